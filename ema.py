"""Exponential moving average of the weights."""

from __future__ import annotations

import copy

import torch
from torch import nn


class EMA:
    """Keeps an averaged copy of a network: e ← d·e + (1−d)·w after each step.

    decay    the paper's d, 0.9999.
    warmup   d = min(decay, (1+n)/(10+n)) after n earlier updates, so that short runs are not ruled
             by the initial weights; False is the paper's constant d.
    network  the averaged copy, in eval mode; sample and evaluate with it.
    """

    def __init__(self, network: nn.Module, decay: float = 0.9999, warmup: bool = True) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"EMA decay is {decay}, but must lie in [0, 1)")
        self.max_decay, self.warmup = decay, warmup
        self.network = copy.deepcopy(network).eval().requires_grad_(False)

    def decay(self, step: int) -> float:
        """The decay of the update that follows `step` earlier ones."""
        return min(self.max_decay, (1 + step) / (10 + step)) if self.warmup else self.max_decay

    @torch.no_grad()
    def update(self, network: nn.Module, step: int) -> None:
        """Average in the weights of `network` (same parameters) after training step `step` (0, 1, …)."""
        averaged, current = list(self.network.parameters()), list(network.parameters())
        torch._foreach_lerp_(averaged, current, 1 - self.decay(step))
