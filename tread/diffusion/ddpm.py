"""Conversion of EDM's noise levels σ to DDPM's timesteps τ (Ho et al. 2020, arXiv 2006.11239), for public DiT weights.

A DDPM network gets x_τ = √ᾱ_τ·x + √(1−ᾱ_τ)·ε and τ = 0 .. 999, with β linear from 1e-4 to 0.02. Let x_σ = x_τ / √ᾱ_τ,
which is x + σ·ε with σ = √((1−ᾱ_τ)/ᾱ_τ), from 0.010 to 157.4. At these σ, the network's noise prediction ε̂ gives the
denoiser D = x_σ − σ·ε̂ exactly. Between them τ, an integer in training, is interpolated in ln σ; beyond, it is 0 or 999.
"""

import functools

import torch
from torch import Tensor

KEPT = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0)
LEVELS = ((1 - KEPT) / KEPT).log() / 2  # made here, as log_levels may first be called while tensors are fake


@functools.cache
def log_levels(device: torch.device) -> Tensor:
    """Return ln σ of the timesteps 0 .. 999, rising: (1000,) fp64, on MPS fp32."""
    return LEVELS.to(device, torch.float32 if device.type == "mps" else torch.float64)


def timestep(sigma: Tensor) -> Tensor:
    """Return the timestep τ of noise levels σ, elementwise, fp32: clamped to 0..999, not rounded to integers."""
    known = log_levels(sigma.device)
    level = sigma.to(known.dtype).log().clamp(known[0], known[-1])
    below = (torch.searchsorted(known, level.contiguous()) - 1).clamp(0, 998)
    return (below + (level - known[below]) / (known[below + 1] - known[below])).float()
