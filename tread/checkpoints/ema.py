"""Averages of the weights over training: an exponential one, and EDM2's power-function EMAs.

A power-function EMA gives the weights at time τ the factor τ^γ. σ_rel is the width of this profile, relative to the
training so far (Karras et al. 2024, arXiv 2312.02696, "EDM2", Section 3.1). From stored averages,
tread/checkpoints/posthoc_ema.py computes averages of other widths."""

import copy
from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from tread.checkpoints.posthoc_ema import exponent


def exponential(decay: float = 0.9999, warmup: bool = True) -> Callable[[int], float]:
    """Return a function from the number n of earlier updates to the decay of an exponential average. With `warmup` the
    decay is at most (1+n)/(10+n), so that initial weights do not dominate short runs; the TREAD paper has no warmup."""
    return lambda step: min(decay, (1 + step) / (10 + step)) if warmup else decay


def power(sigma_rel: float) -> Callable[[int], float]:
    """Return n ↦ (1 − 1/(n+1))^(γ+1), a power-function EMA's decay after n updates (EDM2, Eq. 2); σ_rel gives γ."""
    gamma = exponent(sigma_rel)
    return lambda step: (1 - 1 / (step + 1)) ** (gamma + 1)


class EMA:
    """Keeps an averaged copy of a network: e ← d·e + (1−d)·w after each step, with the weights w.

    profile  d as a function of the number of earlier steps, from `exponential` or `power`.
    network  the network to copy; the attribute of this name is the averaged copy, in eval mode.
    shared   names of parameters that never change; the copy shares them with `network`.
    """

    def __init__(
        self, network: nn.Module, profile: Callable[[int], float], shared: Collection[str] = frozenset()
    ) -> None:
        self.profile = profile
        self._shared = {id(p): p for name, p in network.named_parameters() if name in shared}
        self.network = copy.deepcopy(network, self._shared.copy()).eval().requires_grad_(False)
        self._averaged, self._of = self._own(self.network), (None, [])  # kept, as walks over modules take long
        self._fp32 = all(parameter.dtype == torch.float32 for parameter in self._averaged)

    def _own(self, network: nn.Module) -> list[Tensor]:
        return [parameter for parameter in network.parameters() if id(parameter) not in self._shared]

    def share(self, step: int) -> float:
        """Return 1 − d for training step `step` (0, 1, …): the share of that step's weights in the new average."""
        return 1 - self.profile(step)

    @torch.no_grad()
    def update(self, network: nn.Module, share: Tensor | float, skip: Tensor) -> None:
        """Move the average by the fraction `share` (a number or 0-d fp32) towards the weights of `network`, unless
        `skip` (0-d fp32 on the parameters' device) is 1. The host does not wait for the device."""
        if network is not self._of[0]:
            self._of = network, self._own(network)
        if skip.is_cuda and self._fp32:
            fused_average(self._averaged, self._of[1], share, skip)
        else:
            torch._foreach_lerp_(self._averaged, self._of[1], [share * (1 - skip)] * len(self._averaged))


def fused_average(averaged: list[Tensor], current: list[Tensor], share: Tensor | float, skip: Tensor) -> None:
    """Do averaged += share·(current − averaged) in one pass, or nothing if `skip` is 1. It is fused SGD, with gradient
    −current and weight decay 1; torch._foreach_lerp_ by a weight on the GPU would launch a kernel per parameter."""
    torch._fused_sgd_(
        averaged, current, [], weight_decay=1.0, momentum=0.0, lr=share, dampening=0.0, nesterov=False, maximize=True,
        is_first_step=False, found_inf=skip,
    )  # fmt: skip
