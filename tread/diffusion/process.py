"""The interface of a diffusion process, and what EDM (edm.py) and RF (rf.py) share."""

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from tread.diffusion.guidance import Routes
from tread.models.conditions import Condition

Network = Callable[..., Tensor]  # (x, time (B,), y, routes=) → (B, C or 2C, S, S)
CLEANEST = 0.001  # the lowest quantile of the training's noise levels that `cleaner` goes to


def per_sample(level: Tensor | float, x: Tensor) -> Tensor:
    """A noise level for each sample of x: (B,) fp32."""
    return torch.as_tensor(level, dtype=torch.float32, device=x.device).expand(x.shape[0])


class Process(Protocol):
    """A way from data x to noise and back, with noise level l (EDM's σ, rectified flow's t).

    default_steps, default_solver  for sampling.
    level_name                     the symbol of l.
    variance_exploding             whether x_l = x + l·noise, so that a sampler may add noise between steps.
    data_std                       the standard deviation that dataset.normalize gives latents.
    conventions                    the settings that decide what a trained network's input and output mean.
    evaluation                     the name of the mean evaluation_loss in metrics.jsonl: numbers that are not
                                   comparable have different names.

    Shapes: x (B, C, S, S); level (B,) or a scalar; y (B,) int64, or a Text.
    """

    default_steps: int
    default_solver: str
    level_name: str
    variance_exploding: bool
    data_std: float
    conventions: tuple[str, ...]
    evaluation: str

    def noise_level(self, normal: Tensor) -> Tensor:
        """Training noise levels from standard normal numbers, elementwise."""

    def quantiles(self, count: int) -> Tensor:
        """(count,) mid-quantiles of training noise levels, fp64, rising: their average loss is the expected one."""
        quantile = (torch.arange(count, dtype=torch.float64) + 0.5) / count
        return self.noise_level(math.sqrt(2) * torch.erfinv(2 * quantile - 1))

    def cleaner(self, normal: Tensor, step: Tensor) -> Tensor:
        """Noise levels below `noise_level` of the same standard normal numbers, elementwise.

        step  in [0, 1): how far below, in quantiles of the training distribution. They stop at the quantile 0.001;
              levels below that stay as they are.
        """
        quantile = (torch.special.ndtr(normal) - step).clamp(min=CLEANEST)
        return self.noise_level(torch.special.ndtri(quantile).minimum(normal))

    def weight(self, level: Tensor) -> Tensor:
        """Loss weight of each noise level."""

    def noised(self, x: Tensor, level: Tensor, noise: Tensor) -> Tensor:
        """x_l, from clean x and standard normal noise."""

    def precondition(self, x: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        """The network's input and time (B,) for a noisy x, fp32."""

    def combine(self, output: Tensor, x: Tensor, level: Tensor) -> Tensor:
        """The predicted data, from the network's output for a noisy x."""

    def denoise(self, network: Network, x: Tensor, level: Tensor, y: Condition, routes: Routes = ()) -> Tensor:
        """D(x; l, y), the predicted data."""
        return self.combine(network(*self.precondition(x, level), y, routes=routes), x, level)

    def errors(
        self, network: Network, x: Tensor, y: Condition, level: Tensor, noise: Tensor, routes: Routes = ()
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Squared errors, which `loss` averages and weights, D and the noisy input, each (B, C, S, S) fp32."""

    def loss(
        self, network: Network, x: Tensor, y: Condition, level: Tensor, noise: Tensor, routes: Routes = ()
    ) -> Tensor:
        """Weighted mean error of each sample: (B,) fp32. x clean latents, noise standard normal, level (B,)."""

    def evaluation_levels(self, count: int) -> Tensor:
        """(count,) noise levels of the loss on held-out data, fp64, rising."""
        return self.quantiles(count)

    def evaluation_loss(
        self, network: Network, x: Tensor, y: Condition, level: Tensor, noise: Tensor, routes: Routes = ()
    ) -> Tensor:
        """The loss by which runs are compared on held-out data, for each sample: (B,) fp32. Arguments: see `loss`."""
        return self.loss(network, x, y, level, noise, routes)

    def schedule(self, num_steps: int) -> Tensor:
        """A sampler's noise levels, falling to 0: (num_steps + 1,) fp64."""
