"""The interface of a diffusion process, and the parts that EDM (edm.py) and rectified flow (rf.py) share."""

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from tread.diffusion.guidance import Routes
from tread.models.conditions import Condition

Network = Callable[..., Tensor]  # (x, time (B,), y, routes=) → (B, C or 2C, S, S)
CLEANEST = 0.001  # the quantile of training noise levels below which `cleaner` lowers no level


def per_sample(level: Tensor | float, x: Tensor) -> Tensor:
    """Expand a noise level, scalar or (B,), to one for each sample of x: (B,) fp32."""
    return torch.as_tensor(level, dtype=torch.float32, device=x.device).expand(x.shape[0])


class Process(Protocol):
    """Interface of a process from data x to noise, with noise level l (σ in EDM, t in rectified flow).

    default_steps, default_solver  the sampler's defaults.
    level_name                     the symbol of l.
    variance_exploding             True if x_l = x + l·noise, so that a sampler may add noise between steps.
    data_std                       standard deviation of the latents' channels with the setting dataset.normalize=true.
    conventions                    names of the settings that decide what a trained network's input and output mean.
    beyond                         how many samples beyond a micro-batch `errors` needs: 1 with rf.contrastive, else 0.
    evaluation                     name of the evaluation loss in metrics.jsonl; compare only runs that share it.

    Shapes: x (B, C, S, S); level (B,) or a scalar; y (B,) int64, or a Text.
    """

    default_steps: int
    default_solver: str
    level_name: str
    variance_exploding: bool
    data_std: float
    conventions: tuple[str, ...]
    evaluation: str
    beyond = 0

    def noise_level(self, normal: Tensor) -> Tensor:
        """Map standard normal numbers to training noise levels, elementwise."""

    def quantiles(self, count: int) -> Tensor:
        """Return the training noise levels' quantiles (i + ½) / count, rising, (count,) fp64, to evaluate at."""
        quantile = (torch.arange(count, dtype=torch.float64) + 0.5) / count
        return self.noise_level(math.sqrt(2) * torch.erfinv(2 * quantile - 1))

    def cleaner(self, normal: Tensor, step: Tensor) -> Tensor:
        """Return noise_level(normal), lowered elementwise: each level's quantile among the training levels falls by
        `step` (0 to 1), but not below 0.001; a lower quantile stays as it is. RF lowers t by `step` instead."""
        quantile = (torch.special.ndtr(normal) - step).clamp(min=CLEANEST)
        return self.noise_level(torch.special.ndtri(quantile).minimum(normal))

    def weight(self, level: Tensor) -> Tensor:
        """Return the loss weight of each noise level, (B,) for levels (B,)."""

    def noised(self, x: Tensor, level: Tensor, noise: Tensor) -> Tensor:
        """Return x_l, the noisy input at noise level l, from clean x and standard normal noise."""

    def precondition(self, x: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        """Return the network's inputs for a noisy x: the scaled x (B, C, S, S) and the time input (B,), both fp32."""

    def combine(self, output: Tensor, x: Tensor, level: Tensor) -> Tensor:
        """Return the predicted data (B, C, S, S), given the network's output for a noisy x."""

    def denoise(self, network: Network, x: Tensor, level: Tensor, y: Condition, routes: Routes = ()) -> Tensor:
        """Return the network's predicted data D(x; l, y) of noisy x. `routes` says which tokens skip which blocks."""
        return self.combine(network(*self.precondition(x, level), y, routes=routes), x, level)

    def errors(
        self, network: Network, x: Tensor, y: Condition, level: Tensor, noise: Tensor, routes: Routes = ()
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the squared errors that `loss` averages, the predicted data and the noisy input, (B, C, S, S) fp32
        each. Here x is clean data, `noise` is standard normal, and `routes` says which tokens skip which blocks."""

    def loss(
        self, network: Network, x: Tensor, y: Condition, level: Tensor, noise: Tensor, routes: Routes = ()
    ) -> Tensor:
        """Return each sample's loss, (B,) fp32: weight(level) · mean of its squared errors; arguments of `errors`."""
        squared = self.errors(network, x, y, level, noise, routes)[0]
        return self.weight(level.float()) * squared.mean(dim=(1, 2, 3))

    def evaluation_levels(self, count: int) -> Tensor:
        """Return the noise levels at which the loss on held-out data is computed, rising, (count,) fp64."""
        return self.quantiles(count)

    def evaluation_loss(
        self, network: Network, x: Tensor, y: Condition, level: Tensor, noise: Tensor, routes: Routes = ()
    ) -> Tensor:
        """Return each sample's held-out loss, (B,) fp32: `loss` (RF: the velocity's MSE). Arguments as in `errors`."""
        return self.loss(network, x, y, level, noise, routes)

    def schedule(self, num_steps: int) -> Tensor:
        """Return the sampler's noise levels, falling to 0: (num_steps + 1,) fp64."""
