"""Rectified flow: straight paths x_t = (1−t)·x + t·ε and their velocity ε − x (Liu et al. 2022, arXiv 2209.03003).

It follows SiT (Ma et al. 2024, arXiv 2401.08740), except that t is logit-normal (Esser et al. 2024, arXiv 2403.03206)
by default, as in the released TREAD code, not uniform. All random numbers are arguments. RF has the interface of EDM
(tread/diffusion/edm.py), defined in tread/diffusion/process.py, so training, guidance and sampling work with both.

Shapes: x (B, C, S, S); t (B,) or a scalar, in [0, 1]; y (B,) int64, or a Text."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tread.diffusion.guidance import Branch, Routes, guided
from tread.diffusion.predictions import Quantity, error_of, velocity_of
from tread.diffusion.process import Network, Process, per_sample
from tread.diffusion.solvers import solve
from tread.models.conditions import Condition
from tread.runtime.schema import BelowOne, Positive, PositiveOrZero, Range, check

Time = Literal["logit_normal", "uniform"]
Shift = Positive | Literal["auto"]
# Lower bound of a velocity's norm in the loss term of `direction`. A new network predicts 0: with a smaller bound, the
# first gradients are so large that Adam's second moments stall the last layer for thousands of steps.
SHORTEST = 0.01


@dataclass(frozen=True)
class RF(Process):
    """Rectified flow, with its training density of t and its sampler's time shift. Raises ValueError for bad values.

    time        density of t in training: "logit_normal", logit t ~ Normal(time_mean, time_std²), or "uniform".
    time_scale  the network gets time_scale·t: 1 as in the released code and SiT; 1000 for networks that take timesteps.
    reverse     True: the network's time 0 is noise (SiT's weights): it gets time_scale·(1 − t), its velocity is x − ε.
    direction   weight of a second term in the training loss, 1 − cos of the angle between predicted and true velocity
                over the channels of a position (LightningDiT: weight 1; Yao et al. 2025, arXiv 2501.01423). In this
                term, norms of velocities below SHORTEST (0.01) count as SHORTEST.
    shift       s: the sampler's evenly spaced u = 1 − t become s·u / (1 + (s − 1)·u); 0.3 (LightningDiT) puts more
                steps near noise. "auto": 1 / √(CHW/4096), which `for_latents` computes.
    train_shift s: times drawn in training become s·t / (1 + (s − 1)·t). "auto": √(CHW/4096), by `for_latents`.
    predicts    what the network predicts: "velocity", "x" (the data) or "noise".
    loss_of     what the squared error compares: "velocity", "x" or "noise", computed from the prediction.
    clamp       lower bound of t and 1 − t where a velocity is computed by dividing by them.
    contrastive λ of a loss term −λ·(v − v')²; v is the predicted velocity, v' another sample's true one (arXiv
                2506.05350: 0.05). Velocities come out about 1 / (1 − λ) times as large, which sampling does not undo.
    """

    default_steps, default_solver, level_name, variance_exploding = 50, "euler", "t", False
    evaluation = "eval_velocity"
    conventions = ("time_scale", "reverse", "predicts", "clamp")
    data_std = 1.0  # standard deviation that dataset.normalize gives the latents; no formula here needs it

    time: Time = "logit_normal"
    time_mean: float = 0.0
    time_std: Positive = 1.0
    time_scale: Positive = 1.0
    reverse: bool = False
    direction: PositiveOrZero = 0.0
    shift: Shift = 1.0
    train_shift: Shift = 1.0
    predicts: Quantity = "velocity"
    loss_of: Quantity = "velocity"
    clamp: Annotated[float, Range("lie between 0 and 0.5", lambda number: 0 < number < 0.5)] = 0.05
    contrastive: BelowOne = 0.0

    def __post_init__(self) -> None:
        for item in fields(self):
            check(f"rf.{item.name}", getattr(self, item.name), item.type)
        if self.contrastive and self.loss_of != "velocity":
            given = f"rf.contrastive is {self.contrastive:g} and rf.loss_of {self.loss_of}"
            raise ValueError(f"{given}, but the contrastive term is of velocities: rf.loss_of must be velocity")

    @property
    def beyond(self) -> int:
        return int(self.contrastive > 0)

    def for_latents(self, channels: int, size: int) -> "RF":
        """Return a copy whose shift and train_shift, if "auto", are the numbers for latents (channels, size, size)."""
        scale = size * channels**0.5 / 64  # √(CHW/4096)
        shift = 1 / scale if self.shift == "auto" else self.shift
        return replace(self, shift=shift, train_shift=scale if self.train_shift == "auto" else self.train_shift)

    def noise_level(self, normal: Tensor) -> Tensor:
        """Map standard normal numbers to training times t, elementwise."""
        if self.time == "uniform":
            t = torch.special.ndtr(normal)
        else:
            t = torch.sigmoid(normal * self.time_std + self.time_mean)
        return t if self.train_shift == 1 else self.train_shift * t / (1 + (self.train_shift - 1) * t)

    def cleaner(self, normal: Tensor, step: Tensor) -> Tensor:
        """Return the times noise_level(normal) − step, which are closer to the data, clamped at 0; elementwise."""
        return (self.noise_level(normal) - step).clamp(min=0)

    def weight(self, t: Tensor) -> Tensor:
        """Return the loss weight of each time, which is always 1."""
        return torch.ones_like(t)

    def precondition(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return x and the network's time input (B,), in fp32: time_scale·t or, with `reverse`, time_scale·(1 − t)."""
        t = per_sample(t, x)
        return x.float(), self.time_scale * (1 - t if self.reverse else t)

    def combine(self, output: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """Return the predicted data D = x − t·v, in the noisy x's dtype or fp32 if wider; v: the predicted velocity."""
        level = torch.as_tensor(t, dtype=x.dtype, device=x.device).expand(x.shape[0]).view(-1, 1, 1, 1)
        return x - level * self._velocity(output, x, level)

    def _predicted(self, output: Tensor, x: Tensor) -> Tensor:
        """Return the first C channels of `output`, C as in x, in fp32; with `reverse`, velocities are negated."""
        predicted = output[:, : x.shape[1]].float()
        return -predicted if self.reverse and self.predicts == "velocity" else predicted

    def _velocity(self, output: Tensor, x: Tensor, level: Tensor) -> Tensor:
        return velocity_of(self.predicts, self._predicted(output, x), x, level, self.clamp)

    def velocity(self, network: Network, x: Tensor, t: Tensor, y: Condition, routes: Routes = ()) -> Tensor:
        """Run the network on a noisy x and return the predicted velocity, noise minus data: (B, C, S, S) fp32."""
        output = network(*self.precondition(x, t), y, routes=routes)
        return self._velocity(output, x.float(), per_sample(t, x).view(-1, 1, 1, 1))

    def noised(self, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        level = t.float().view(-1, 1, 1, 1)
        return (1 - level) * x + level * noise

    def errors(
        self, network: Network, x: Tensor, y: Condition, t: Tensor, noise: Tensor, routes: Routes = ()
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return three (B, C, S, S) fp32 tensors for clean x: squared errors of the quantity `loss_of`; the predicted
        data x_t − t·v, with the predicted velocity v; and x_t. To the squared errors `direction` adds a cosine term,
        the same in all channels of a position, and `contrastive` −λ·(v − v')². v' is the next sample's true velocity;
        the sample after the last is the first or, if x and noise hold one sample more than t, that extra one."""
        if self.contrastive:
            others = noise - x
            others = others[1:] if len(others) > len(t) else others.roll(-1, 0)
        x, noise = x[: len(t)], noise[: len(t)]
        noisy, level = self.noised(x, t, noise), t.float().view(-1, 1, 1, 1)
        predicted = self._predicted(network(*self.precondition(noisy, t), y, routes=routes), noisy)
        squared = error_of(self.predicts, self.loss_of, predicted, x, noise, level, self.clamp).square()
        v = velocity_of(self.predicts, predicted, noisy, level, self.clamp)
        if self.direction:
            cosine = F.cosine_similarity(v, noise - x, dim=1, eps=SHORTEST)
            squared = squared + self.direction * (1 - cosine)[:, None]
        if self.contrastive:
            squared = squared - self.contrastive * (v - others).square()
        return squared, noisy - level * v, noisy

    def evaluation_levels(self, count: int) -> Tensor:
        """Return the times (i + ½) / count for i = 0 .. count−1, (count,) fp64, independent of the training density."""
        return (torch.arange(count, dtype=torch.float64) + 0.5) / count

    def evaluation_loss(
        self, network: Network, x: Tensor, y: Condition, t: Tensor, noise: Tensor, routes: Routes = ()
    ) -> Tensor:
        """Return each sample's mean squared error of the velocity for clean x, (B,) fp32, whatever the training loss.
        If the network predicts data or noise, the velocity is computed from that, dividing by at least `clamp`."""
        v = self.velocity(network, self.noised(x, t, noise), t, y, routes)
        return (v - (noise - x)).square().mean(dim=(1, 2, 3))

    def schedule(self, num_steps: int = 50) -> Tensor:
        """Return num_steps + 1 shifted times, 1 to 0, fp64. Raises ValueError for num_steps < 1 or two equal times."""
        if num_steps < 1:
            raise ValueError(f"steps is {num_steps}, but must be at least 1")
        t = torch.arange(num_steps, -1, -1, dtype=torch.float64) / num_steps
        t = t / (1 + (self.shift - 1) * (1 - t))
        if not (t.diff() < 0).all():
            raise ValueError(f"shift is {self.shift:g}, so far from 1 that some of {num_steps} steps have no length")
        return t

    def sample(
        self,
        network: Network,
        noise: Tensor,
        y: Condition,
        null_class: int | None = None,
        scale: float = 1.0,
        steps: int = 50,
        solver: str = "euler",
    ) -> Tensor:
        """Draw samples (B, C, S, S) of classes y, float64 (on MPS float32), from standard normal noise by the solver
        "euler" or "heun". null_class, the label for "no class", turns on guidance: D_null + scale·(D_y − D_null) with
        the data predicted for null_class and y. Without null_class, a scale other than 1 raises ValueError."""
        if null_class is None and scale != 1:
            raise ValueError(f"scale is {scale}, but without null_class there is no guidance")
        weak_y = None if null_class is None else torch.full_like(y, null_class)
        return self.sample_tread(network, noise, y, (), (), scale, steps, solver, weak_y)

    def sample_tread(
        self,
        network: Network,
        noise: Tensor,
        y: Condition,
        strong: Routes | Callable[[int], Routes],
        weak: Routes | Callable[[int], Routes],
        scale: float = 1.0,
        steps: int = 50,
        solver: str = "euler",
        weak_y: Condition | None = None,
    ) -> Tensor:
        """Draw samples (B, C, S, S), float64 (on MPS float32), by Sparse Guidance (arXiv 2601.01608). It combines two
        predictions of the data by one network with different routes: D_weak + scale·(D_strong − D_weak).

        strong, weak  the routes of each prediction: pairs (Route, indices (B, K) of the kept tokens), or a function
                      from the index of the denoiser call (0, 1, …) to such pairs.
        scale         the guidance weight ω; 1: D_strong alone.
        weak_y        labels for D_weak; None: y, as in Sparse Guidance.
        """
        denoise = partial(self.denoise, network)
        by_call = [routes if callable(routes) else (lambda call, fixed=routes: fixed) for routes in (strong, weak)]
        branches = Branch(denoise, y, by_call[0]), Branch(denoise, y if weak_y is None else weak_y, by_call[1])
        return solve(solver, guided(*branches, lambda call: scale), noise, self.schedule(steps))
