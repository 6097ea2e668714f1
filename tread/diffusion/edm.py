"""EDM: preconditioning, loss and noise levels (Karras et al. 2022, arXiv 2206.00364).

Equation and table numbers are that paper's. Callers draw the noise. process.py documents the methods (class Process).

Shapes: x (B, C, S, S); sigma (B,) or a scalar; y (B,) int64, or a Text."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tread.diffusion.ddpm import timestep
from tread.diffusion.guidance import Routes
from tread.diffusion.process import Network, Process, per_sample
from tread.models.conditions import Condition
from tread.runtime.schema import Positive, check


@dataclass(frozen=True)
class EDM(Process):
    """EDM's diffusion process. sigma_data, sigma_min and sigma_max are in units of the latents.

    P_mean, P_std              training noise levels: ln σ ~ Normal(P_mean, P_std²) (Table 1).
    sigma_data                 standard deviation of the data that the preconditioning assumes.
    sigma_min, sigma_max, rho  range of the sampler's noise levels (0 < min < max), exponent of their spacing (Eq. 5).
    predicts                   the network's output: "F" of Eq. 7, or "ddpm_noise", the noise, for a network that was
                               trained on DDPM's timesteps, like public DiT; see ddpm.py.
    """

    default_steps, default_solver, level_name, variance_exploding = 40, "heun", "σ", True
    conventions, evaluation = ("sigma_data", "predicts"), "eval_loss"

    P_mean: float = -1.2
    P_std: float = 1.2
    sigma_data: float = 0.5
    sigma_min: float = 0.002
    sigma_max: float = 80.0
    rho: float = 7.0
    predicts: Literal["F", "ddpm_noise"] = "F"

    def __post_init__(self) -> None:
        if not 0 < self.sigma_min < self.sigma_max:
            raise ValueError(f"sigma_min {self.sigma_min} and sigma_max {self.sigma_max} must satisfy 0 < min < max")
        check("predicts", self.predicts, Literal["F", "ddpm_noise"])
        for name in ("P_std", "sigma_data", "rho"):
            check(name, getattr(self, name), Positive)

    @property
    def data_std(self) -> float:
        return self.sigma_data

    def noise_level(self, normal: Tensor) -> Tensor:
        return (normal * self.P_std + self.P_mean).exp()

    def weight(self, sigma: Tensor) -> Tensor:
        """Return the loss weight λ(σ) = (σ² + σ_data²) / (σ·σ_data)² (Table 1)."""
        return (sigma**2 + self.sigma_data**2) / (sigma * self.sigma_data) ** 2

    def precondition(self, x: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Return the network's input x / √(σ² + σ_data²) and its time input ln σ / 4 (B,), both fp32 (Table 1).
        With predicts="ddpm_noise": x / √(σ² + 1) and the DDPM timestep (B,)."""
        sigma, ddpm = per_sample(sigma, x), self.predicts == "ddpm_noise"
        norm = (sigma.view(-1, 1, 1, 1) ** 2 + (1 if ddpm else self.sigma_data**2)).sqrt()
        return x.float() / norm, timestep(sigma) if ddpm else sigma.log() / 4

    def combine(self, F: Tensor, x: Tensor, sigma: Tensor) -> Tensor:
        """Return the predicted data D = c_skip·x + c_out·F in fp32 (Eq. 7), from the first C channels of the network's
        output F; with predicts="ddpm_noise" D = x − σ·F."""
        sigma = per_sample(sigma, x).view(-1, 1, 1, 1)
        x, F = x.float(), F[:, : x.shape[1]].float()
        if self.predicts == "ddpm_noise":
            return x - sigma * F
        norm = (sigma**2 + self.sigma_data**2).sqrt()
        c_skip, c_out = self.sigma_data**2 / norm**2, sigma * self.sigma_data / norm
        return c_skip * x + c_out * F

    def noised(self, x: Tensor, sigma: Tensor, noise: Tensor) -> Tensor:
        return x + sigma.float().view(-1, 1, 1, 1) * noise

    def errors(
        self, network: Network, x: Tensor, y: Condition, sigma: Tensor, noise: Tensor, routes: Routes = ()
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (D − x)², the predicted data D and the noisy input x + σ·noise, (B, C, S, S) each, for clean x,
        standard normal noise and routes (which tokens skip which blocks). `loss` is λ(σ)·mean (D − x)² (Eq. 2, 8)."""
        noisy = self.noised(x, sigma, noise)
        D = self.denoise(network, noisy, sigma, y, routes)
        return (D - x).square(), D, noisy

    def schedule(self, num_steps: int = 40) -> Tensor:
        """Return num_steps levels, sigma_max .. sigma_min (Eq. 5), then 0, in fp64. ValueError if num_steps < 2."""
        if num_steps < 2:
            raise ValueError(f"steps is {num_steps}, but EDM's schedule needs at least 2")
        ramp = torch.arange(num_steps, dtype=torch.float64) / (num_steps - 1)
        high, low = self.sigma_max ** (1 / self.rho), self.sigma_min ** (1 / self.rho)
        sigmas = (high + ramp * (low - high)) ** self.rho
        sigmas[0], sigmas[-1] = self.sigma_max, self.sigma_min  # the exact ends, without rounding errors
        return torch.cat([sigmas, sigmas.new_zeros(1)])
