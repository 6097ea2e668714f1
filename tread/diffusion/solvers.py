"""Solvers of the probability-flow ODE dx/dl = (x − D(x; l)) / l, from high noise levels l to 0, for any denoiser D.

A denoiser is a function (x, level) → D, with x (B, C, S, S) and level a 0-d tensor. The level is EDM's σ (Karras et al.
2022, arXiv 2206.00364, Eq. 1) or rectified flow's t, whose velocity is (x − D) / t. Guidance is part of the denoiser.
State and samples are float64 (float32 on devices without it)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from tread.runtime.schema import Range, check

Denoiser = Callable[[Tensor, Tensor], Tensor]
Solver = Literal["heun", "euler"]
AfterStep = Callable[[int, Tensor], Tensor]  # (step, state) → the state to go on with
Watch = Callable[[int, Tensor, Tensor, Tensor], object]  # (step, level, state, D), after a step's first denoiser call


@dataclass(frozen=True)
class Churn:
    """EDM's stochastic sampling (Algorithm 2): at noise levels in sigma_min..sigma_max (S_min, S_max) each step adds
    noise of strength `amount` (S_churn; 0: none), scaled by `noise` (S_noise). Raises ValueError for bad values."""

    amount: float = 0.0
    sigma_min: float = 0.0
    sigma_max: Annotated[float, Range("be a number", lambda number: not math.isnan(number))] = math.inf
    noise: float = 1.0

    def __post_init__(self) -> None:
        if self.amount < 0 or self.noise <= 0 or not 0 <= self.sigma_min < self.sigma_max:
            given = f"churn amount {self.amount}, noise {self.noise} and range {self.sigma_min}..{self.sigma_max}"
            raise ValueError(f"{given} must satisfy amount ≥ 0, noise > 0 and 0 ≤ sigma_min < sigma_max")

    def gamma(self, level: float, steps: int) -> float:
        """Return γ, by which a step raises its noise level to (1 + γ)·level before the first of its two calls."""
        return min(self.amount / steps, math.sqrt(2) - 1) if self.sigma_min <= level <= self.sigma_max else 0.0


def call_order(solver: str, steps: int) -> list[int]:
    """Return each denoiser call's index into the noise levels, for N steps: euler 0..N−1; heun 0, 1, 1, …, N−1, N−1."""
    check("solver", solver, Solver)
    return list(range(steps)) if solver == "euler" else [(call + 1) // 2 for call in range(2 * steps - 1)]


def _start(noise: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first state, noise·levels[0], and the levels, on the noise's device in fp64 (on MPS in fp32)."""
    precision = torch.float32 if noise.device.type == "mps" else torch.float64
    levels = levels.to(noise.device, precision)
    return noise.to(precision) * levels[0], levels


def unchanged(step: int, x: Tensor) -> Tensor:
    return x


def unseen(*seen: object) -> None:
    pass


@torch.no_grad()
def euler(
    denoiser: Denoiser, noise: Tensor, levels: Tensor, after_step: AfterStep = unchanged, on_step: Watch = unseen
) -> Tensor:
    """Return the sample x (B, C, S, S) that Euler's first-order method reaches in N steps of one denoiser call each.
    noise (B, C, S, S) is standard normal and scaled by levels[0] to start; levels (N+1,) fall to 0. after_step maps
    (step, state) to the state to go on with, and on_step sees (step, level, state, D)."""
    x, levels = _start(noise, levels)
    for i, (level, level_next) in enumerate(zip(levels, levels[1:])):
        denoised = denoiser(x, level).to(x)
        on_step(i, level, x, denoised)
        x = after_step(i, x + (level_next - level) * (x - denoised) / level)
    return x


@torch.no_grad()
def heun(
    denoiser: Denoiser,
    noise: Tensor,
    levels: Tensor,
    churn: Churn = Churn(),
    churn_noise: Callable[[int], Tensor] | None = None,
    after_step: AfterStep = unchanged,
    on_step: Watch = unseen,
) -> Tensor:
    """Return the sample of Heun's method (Algorithms 1 and 2). N steps take 2N−1 calls, since the last step is Euler's.

    noise        (B, C, S, S) standard normal; scaled by levels[0] to start.
    levels       (N+1,) falling noise levels, the last one 0.
    churn_noise  function (step's number) → standard normal, shaped like `noise`; ValueError if None while churn is on.
    after_step   function (step's number, state after the step) → state from which to continue.
    on_step      function that gets (step's number, level, state, D) after the first denoiser call of each step.
    """
    if churn.amount > 0 and churn_noise is None:
        raise ValueError(f"churn.amount is {churn.amount}, but no churn_noise function was given")
    x, levels = _start(noise, levels)
    num_steps, known = len(levels) - 1, levels.tolist()
    for i, (level, level_next) in enumerate(zip(levels, levels[1:])):
        if gamma := churn.gamma(known[i], num_steps):
            raised = level * (1 + gamma)
            x = x + (raised**2 - level**2).sqrt() * churn.noise * churn_noise(i).to(x)
            level = raised
        denoised = denoiser(x, level).to(x)
        on_step(i, level, x, denoised)
        slope = (x - denoised) / level
        x_euler = x + (level_next - level) * slope
        if known[i + 1] > 0:
            slope_next = (x_euler - denoiser(x_euler, level_next).to(x)) / level_next
            x = x + (level_next - level) * (slope + slope_next) / 2
        else:
            x = x_euler
        x = after_step(i, x)
    return x


def solve(
    solver: str, denoiser: Denoiser, noise: Tensor, levels: Tensor, *churning: object, **hooks: Callable
) -> Tensor:
    """Return the sample that the solver "euler" or "heun" reaches from standard normal noise, both (B, C, S, S),
    over levels (N+1,). `churning`: heun's churn and churn_noise, ignored by euler. `hooks`: after_step and on_step."""
    check("solver", solver, Solver)
    if solver == "heun":
        return heun(denoiser, noise, levels, *churning, **hooks)
    return euler(denoiser, noise, levels, **hooks)
