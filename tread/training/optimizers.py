"""The optimizers that optim.name chooses from, and their settings."""

import inspect
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import nn

from routing_module import Table
from tread.models.backbone import count_parameters
from tread.runtime.schema import BelowOne, CountOrZero, Positive, PositiveOrZero, written
from tread.runtime.tensor_files import listed
from tread.training.muon import Muon, Scale, block_matrices, groups_of


@dataclass(frozen=True)
class OptimizerEntry:
    """An optimizer that optim.name can choose; comments explain the fields. `make` gets the parameters (in groups if
    `splits` or optim.groups is set) and, as keywords, lr, the settings of section optim named in `shared`, and
    optim.options. Checkpoints save `state` and changes in `param_groups`, except lr; skipped steps change neither."""

    make: Callable[..., torch.optim.Optimizer]
    copies: Callable[[dict], float]  # function of optim.options → numbers of state kept per parameter value
    shared: tuple[str, ...] = ("weight_decay",)  # the other settings of section optim that it takes
    splits: bool = False  # True: `make` gets muon.groups_of's two groups; the first has one number of state per value


# any optimizer works: optimizer_step clips and skips, checkpoints save and resume
OPTIMIZERS = Table(OptimizerEntry, {
    "adamw": OptimizerEntry(
        partial(torch.optim.AdamW, fused=True),
        lambda options: 2 + bool(options.get("amsgrad")),
        ("betas", "eps", "weight_decay"),
    ),
    "muon": OptimizerEntry(Muon, lambda _: 2, ("betas", "eps", "weight_decay", "muon_lr", "muon_scale"), splits=True),
    "sgd": OptimizerEntry(torch.optim.SGD, lambda options: float(bool(options.get("momentum")))),
})  # fmt: skip


@dataclass(frozen=True)
class OwnRate:
    """Parameters with a learning rate of their own instead of optim.lr; 0 freezes them. A parameter belongs to the
    first entry of optim.groups whose regular expression `match` is found in the parameter's name."""

    match: str
    lr: PositiveOrZero

    def __post_init__(self) -> None:
        try:
            re.compile(self.match)
        except re.error as error:
            raise ValueError(f"match is {self.match!r}, which is no regular expression: {error}") from error


@dataclass(frozen=True)
class Optim:
    """Section `optim` of a run's settings, explained in configs/defaults.yaml. Raises ValueError for invalid values."""

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
    muon_lr: Positive | None = None
    muon_scale: Scale = "original"
    groups: tuple[OwnRate, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.final_lr <= self.lr:
            raise ValueError(f"optim.final_lr is {self.final_lr}, but must lie between 0 and optim.lr, {self.lr}")
        if len(self.betas) != 2:
            raise ValueError(f"optim.betas is {list(self.betas)}, but must be two numbers")
        if self.name not in OPTIMIZERS:
            raise ValueError(f"optim.name is {self.name!r}, but must be {', '.join(OPTIMIZERS)} or a plugin's")
        rate = f"optim.muon_lr is {written(self.muon_lr)}, optim.muon_scale {self.muon_scale}"
        if self.entry.splits and self.muon_lr is None:
            raise ValueError(f"{rate}, but optim.name={self.name} needs a rate: 1e-3 say, or 1e-4 with match_rms")
        if not self.entry.splits and (self.muon_lr, self.muon_scale) != (None, "original"):
            raise ValueError(f"{rate}, but optim.name={self.name} has neither: leave them null and original")
        if self.entry.splits and any(group.lr for group in self.groups):
            raise ValueError(f"optim.groups has rates, but optim.name={self.name} has its own: they can only be 0")
        signature, given = inspect.signature(self.entry.make), self._arguments()
        try:
            signature.bind((), **given, **(self.options or {}))
        except TypeError as error:
            takes = ", ".join(name for name in [*signature.parameters][1:] if name not in given)
            said = f"optim.options is {written(self.options)}, but optim.name={self.name} takes {takes} there ({error})"
            raise ValueError(f"{said}; optim.options=null gives none") from error

    @property
    def entry(self) -> OptimizerEntry:
        """The optimizer that `name` chooses."""
        return OPTIMIZERS[self.name]

    def _arguments(self) -> dict:
        return {name: getattr(self, name) for name in ("lr", *self.entry.shared)}

    def freeze(self, network: nn.Module) -> None:
        """Freeze the parameters of groups with rate 0. ValueError if a group has no parameter, or if all are frozen."""
        trained = {name: each for name, each in network.named_parameters() if each.requires_grad}  # not LoRA's base
        members = [self._group_of(name) for name in trained]
        for number, group in enumerate(self.groups):
            if group not in members:
                names = listed(trained)
                where = "in no trained parameter's name" + " that no earlier group has" * (number > 0)
                raise ValueError(f"optim.groups.{number}.match={group.match} is found {where}: {names}")
        for parameter, group in zip(trained.values(), members):
            if group is not None and not group.lr:
                parameter.requires_grad_(False)
        if not any(parameter.requires_grad for parameter in trained.values()):
            raise ValueError("optim.groups freezes all parameters: one at least must have a rate")

    def _group_of(self, name: str) -> OwnRate | None:
        return next((group for group in self.groups if re.search(group.match, name)), None)

    def build(
        self, parameters: Iterable[tuple[str, nn.Parameter]], network: nn.Module | None = None
    ) -> torch.optim.Optimizer:
        """Build the optimizer of `parameters`, pairs (name, parameter). `network` is for optimizers that treat the
        matrices in its blocks differently, as Muon does. Raises ValueError if the optimizer refuses its settings."""
        if self.entry.splits:
            groups = groups_of((parameter for _, parameter in parameters), network)
        elif not self.groups:
            groups = [parameter for _, parameter in parameters]
        else:
            members: dict[OwnRate | None, list] = {}
            for name, parameter in parameters:
                group = self._group_of(name)  # alignment's projector, which `freeze` leaves alone, always has a rate
                members.setdefault(group if group and group.lr else None, []).append(parameter)
            groups = [{"params": part, **({"lr_factor": g.lr / self.lr} if g else {})} for g, part in members.items()]
        try:
            optimizer = self.entry.make(groups, **self._arguments(), **(self.options or {}))
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"optim.name={self.name} refuses its settings, see section optim: {error}") from error
        optimizer.built = [dict(group) for group in optimizer.param_groups]  # checkpoints save what differs from it
        return optimizer

    def keeps_state(self, changed: Collection[str]) -> bool:
        """Return whether the optimizer's state stays valid when the settings with these dotted keys change."""
        return not any(key.startswith(("optim.name", "optim.options", "optim.groups")) for key in changed)

    @property
    def copies(self) -> float:
        """How many numbers of state the optimizer keeps per trained weight outside blocks' matrices (AdamW: 2)."""
        return self.entry.copies(self.options or {})

    @property
    def matrix_copies(self) -> float:
        """How many numbers of state the optimizer keeps per weight of the blocks' matrices (AdamW: 2, Muon: 1)."""
        return 1 if self.entry.splits else self.copies

    def state_size(self, network: nn.Module) -> int:
        """Return how many numbers of state the optimizer has for a network's trained parameters."""
        matrices = sum(matrix.numel() for matrix in block_matrices(network) if matrix.requires_grad)
        trained = count_parameters(network, trained=True)
        return int(self.matrix_copies * matrices + self.copies * (trained - matrices))

    def split(self, optimizer: torch.optim.Optimizer) -> str:
        """Return text to print after the optimizer's name. If it treats blocks' matrices separately, as Muon does: how
        many parameters these have; else, with optim.groups: how many parameters have which learning rate; else ""."""
        if self.entry.splits:
            own, rest = ([parameter.numel() for parameter in group["params"]] for group in optimizer.param_groups)
            return f" for {len(own)} block matrices ({sum(own):,} parameters), AdamW for the other {sum(rest):,}"
        if self.groups:
            parts = [(sum(p.numel() for p in group["params"]), group) for group in optimizer.param_groups]
            told = (f"{count:,} parameters at {self.lr * group.get('lr_factor', 1):g}" for count, group in parts)
            frozen = "; the others are frozen" * any(not group.lr for group in self.groups)
            return f" for {', '.join(told)}{frozen}"
        return ""
