"""The optimizers that optim.name chooses from, and the settings they are built by."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import nn

from tread.runtime.schema import BelowOne, CountOrZero, Positive


@dataclass(frozen=True)
class OptimizerEntry:
    """An optimizer that optim.name can choose.

    make    its class, or a function that returns one: takes parameters, then by name lr, `shared` and optim.options.
    copies  optim.options → how many numbers its state holds for each number of a parameter.
    shared  the other settings of section optim that it takes.

    Only its `state` and `param_groups` are saved.
    """

    make: Callable[..., torch.optim.Optimizer]
    copies: Callable[[dict], float]
    shared: tuple[str, ...] = ("weight_decay",)


# optimizer_step clips and skips for any of them, checkpoints save and resume any
OPTIMIZERS = {
    "adamw": OptimizerEntry(
        partial(torch.optim.AdamW, fused=True),
        lambda options: 2 + bool(options.get("amsgrad")),
        ("betas", "eps", "weight_decay"),
    ),
    "sgd": OptimizerEntry(torch.optim.SGD, lambda options: float(bool(options.get("momentum")))),
}


@dataclass(frozen=True)
class Optim:
    lr: Positive
    betas: tuple[BelowOne, ...]
    eps: Positive
    weight_decay: float
    schedule: Literal["constant", "linear", "cosine"]
    warmup_steps: CountOrZero
    final_lr: float
    clip_norm: Positive | None
    name: str = "adamw"
    options: dict | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.final_lr <= self.lr:
            raise ValueError(f"optim.final_lr is {self.final_lr}, but must lie between 0 and optim.lr, {self.lr}")
        if len(self.betas) != 2:
            raise ValueError(f"optim.betas is {list(self.betas)}, but must be two numbers")
        if self.name not in OPTIMIZERS:
            raise ValueError(f"optim.name is {self.name!r}, but must be {' or '.join(OPTIMIZERS)}")

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of these parameters. Raises ValueError for options that it refuses."""
        entry = OPTIMIZERS[self.name]
        shared = {name: getattr(self, name) for name in ("lr", *entry.shared)}
        try:
            optimizer = entry.make(list(parameters), **shared, **(self.options or {}))
        except (TypeError, ValueError) as error:
            raise ValueError(f"optim.name={self.name} refuses its settings, see section optim: {error}") from error
        optimizer.built = [dict(group) for group in optimizer.param_groups]  # checkpoints keep what it changes there
        return optimizer

    def keeps_state(self, changed: Collection[str]) -> bool:
        """Whether a run with these changed settings, dotted keys, goes on with its optimizer's state."""
        return not any(key.startswith(("optim.name", "optim.options")) for key in changed)

    @property
    def copies(self) -> float:
        """How many numbers the optimizer's state holds for each number of the parameters."""
        return OPTIMIZERS[self.name].copies(self.options or {})
