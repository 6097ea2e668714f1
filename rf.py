"""Rectified flow: straight paths x_t = (1−t)·x + t·ε and their velocity ε − x (Liu et al. 2022, arXiv 2209.03003).

As in SiT (Ma et al. 2024, arXiv 2401.08740), but t is logit-normal (Esser et al. 2024, arXiv 2403.03206) as in the
released TREAD code; SiT's is uniform. Everything random comes in as a tensor. RF and EDM (tread/diffusion/edm.py) are
both a Process (tread/diffusion/process.py), so training, guidance and sampling work for either.

Shapes: x (B, C, S, S); t (B,) or a scalar, in [0, 1]; y (B,) int64.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tread.diffusion.guidance import Branch, Routes, guided
from tread.diffusion.process import Network, Process, per_sample
from tread.diffusion.solvers import solve
from tread.models.conditions import Condition
from tread.runtime.schema import Positive, PositiveOrZero, check

Time = Literal["logit_normal", "uniform"]
# The shortest velocity of which `direction` takes the angle. A new network's velocity is 0: with a smaller bound, the
# first gradients are so large that Adam's second moments stall the last layer for thousands of steps.
SHORTEST = 0.01


@dataclass(frozen=True)
class RF(Process):
    """A rectified flow.

    time        density of t in training: "logit_normal", logit t ~ Normal(time_mean, time_std²), or "uniform".
    time_scale  the network gets time_scale·t: 1 as in the released code and SiT, 1000 for networks that
                count timesteps.
    reverse     true: the network's time and velocity run from noise to data, as in public SiT weights:
                it gets time_scale·(1 − t) and predicts x − ε.
    direction   weight of mean(1 − cos) beside the squared error in training, where cos is of the angle between the
                predicted and the true velocity over the channels, at each position (LightningDiT: 1; Yao et al. 2025,
                arXiv 2501.01423); velocities shorter than SHORTEST count as that long.
    shift       s of the sampler's times: with u = 1 − t, u' = s·u / (1 + (s − 1)·u). Below 1, more steps lie near
                noise (LightningDiT: 0.3).
    """

    default_steps, default_solver, level_name, variance_exploding = 50, "euler", "t", False
    evaluation = "eval_velocity"
    data_std = 1.0  # of latents behind dataset.normalize; nothing else depends on it
    conventions = ("time_scale", "reverse")

    time: Time = "logit_normal"
    time_mean: float = 0.0
    time_std: Positive = 1.0
    time_scale: Positive = 1.0
    reverse: bool = False
    direction: PositiveOrZero = 0.0
    shift: Positive = 1.0

    def __post_init__(self) -> None:
        kinds = {"time": Time, "direction": PositiveOrZero}
        for name in ("time", "time_std", "time_scale", "direction", "shift"):
            check(f"rf.{name}", getattr(self, name), kinds.get(name, Positive))

    def noise_level(self, normal: Tensor) -> Tensor:
        """Training times t from standard normal numbers, elementwise."""
        if self.time == "uniform":
            return torch.special.ndtr(normal)
        return torch.sigmoid(normal * self.time_std + self.time_mean)

    def cleaner(self, normal: Tensor, step: Tensor) -> Tensor:
        """Times that lie `step` below `noise_level` of the same standard normal numbers, at least 0."""
        return (self.noise_level(normal) - step).clamp(min=0)

    def weight(self, t: Tensor) -> Tensor:
        """Loss weight of each time: 1."""
        return torch.ones_like(t)

    def precondition(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The network's input x and time (B,), fp32."""
        t = per_sample(t, x)
        return x.float(), self.time_scale * (1 - t if self.reverse else t)

    def combine(self, output: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """D = x_t − t·v, the predicted data, in the precision of x. The flow is v = (x_t − D) / t."""
        level = torch.as_tensor(t, dtype=x.dtype, device=x.device).expand(x.shape[0]).view(-1, 1, 1, 1)
        return x - level * self._velocity(output, x)

    def _velocity(self, output: Tensor, x: Tensor) -> Tensor:
        """ε − x in fp32, from the first C channels of the output."""
        v = output[:, : x.shape[1]].float()
        return -v if self.reverse else v

    def velocity(self, network: Network, x: Tensor, t: Tensor, y: Condition, routes: Routes = ()) -> Tensor:
        """The predicted velocity ε − x at x_t: (B, C, S, S) fp32."""
        return self._velocity(network(*self.precondition(x, t), y, routes=routes), x)

    def noised(self, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """x_t = (1 − t)·x + t·noise."""
        level = t.float().view(-1, 1, 1, 1)
        return (1 - level) * x + level * noise

    def errors(
        self, network: Network, x: Tensor, y: Condition, t: Tensor, noise: Tensor, routes: Routes = ()
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Squared errors of the velocity, D = x_t − t·v, and x_t, each (B, C, S, S) fp32.

        With `direction`, its term at each position is added to the squared errors of all channels.
        """
        noisy = self.noised(x, t, noise)
        v, target = self.velocity(network, noisy, t, y, routes), noise - x
        squared = (v - target).square()
        if self.direction:
            squared = squared + self.direction * (1 - F.cosine_similarity(v, target, dim=1, eps=SHORTEST))[:, None]
        return squared, noisy - t.float().view(-1, 1, 1, 1) * v, noisy

    def loss(self, network: Network, x: Tensor, y: Condition, t: Tensor, noise: Tensor, routes: Routes = ()) -> Tensor:
        """The mean error of each sample: (B,) fp32. x clean latents, noise standard normal, t (B,)."""
        squared = self.errors(network, x, y, t, noise, routes)[0]
        return squared.mean(dim=(1, 2, 3))

    def evaluation_levels(self, count: int) -> Tensor:
        """(count,) mid-quantiles of uniform times, whatever the density in training: fp64, rising."""
        return (torch.arange(count, dtype=torch.float64) + 0.5) / count

    def evaluation_loss(
        self, network: Network, x: Tensor, y: Condition, t: Tensor, noise: Tensor, routes: Routes = ()
    ) -> Tensor:
        """The squared error of the velocity, without `direction`: (B,) fp32."""
        return replace(self, direction=0.0).loss(network, x, y, t, noise, routes)

    def schedule(self, num_steps: int = 50) -> Tensor:
        """Times 1 .. 0, in even steps but for `shift`: (N+1,) fp64."""
        if num_steps < 1:
            raise ValueError(f"steps is {num_steps}, but must be at least 1")
        t = torch.arange(num_steps, -1, -1, dtype=torch.float64) / num_steps
        t = t / (1 + (self.shift - 1) * (1 - t))
        if not (t.diff() < 0).all():
            raise ValueError(
                f"shift is {self.shift:g}, so far from 1 that some of the {num_steps} steps have no length"
            )
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
        """Samples of classes y from standard normal noise, without routes: (B, C, S, S) float64.

        null_class  the label of the weak branch of classifier-free guidance; None: no guidance.
        scale       its weight ω, see tread/diffusion/guidance.py.
        """
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
        """Samples by Sparse Guidance, each branch under its routes: (B, C, S, S) float64.

        strong, weak  routes of the branches with ids drawn, [(Route, ids_keep (B, K))], the same in all
                      calls; or a function from the index of a call to them.
        weak_y        labels of the weak branch; None: y, as in Sparse Guidance.
        """
        denoise = partial(self.denoise, network)
        by_call = [routes if callable(routes) else (lambda call, fixed=routes: fixed) for routes in (strong, weak)]
        branches = Branch(denoise, y, by_call[0]), Branch(denoise, y if weak_y is None else weak_y, by_call[1])
        return solve(solver, guided(*branches, lambda call: scale), noise, self.schedule(steps))
