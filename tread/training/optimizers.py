"""The optimizers that optim.name chooses from, their settings, and how any of them skips a step with bad gradients."""

import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from routing_module import Table
from tread.models.backbone import block_matrices, count_parameters
from tread.runtime.schema import BelowOne, CountOrZero, Positive, written
from tread.training.muon import Muon, Scale, groups_of


@dataclass(frozen=True)
class OptimizerEntry:
    """An optimizer that optim.name can choose. Checkpoints save, and skipped steps restore, its `state` and
    `param_groups`.

    make  the optimizer class, or a function that returns an instance. It gets the parameters and, by keyword, lr, the
          settings of section optim that `shared` names, and those in optim.options.
    """

    make: Callable[..., torch.optim.Optimizer]
    copies: Callable[[dict], float]  # takes optim.options, returns how many numbers of state a parameter value has
    shared: tuple[str, ...] = ("weight_decay",)  # the other settings of section optim that it takes
    splits: bool = False  # True: it gets muon.groups_of the parameters, and has a single number of state for the first


# any optimizer works: optimizer_step clips and skips, checkpoints save and resume
OPTIMIZERS = Table(OptimizerEntry, {
    "adamw": OptimizerEntry(
        partial(torch.optim.AdamW, fused=True),
        lambda options: 2 + bool(options.get("amsgrad")),
        ("betas", "eps", "weight_decay"),
    ),
    "muon": OptimizerEntry(
        Muon, lambda options: 2, ("betas", "eps", "weight_decay", "muon_lr", "muon_scale"), splits=True
    ),
    "sgd": OptimizerEntry(torch.optim.SGD, lambda options: float(bool(options.get("momentum")))),
})  # fmt: skip


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
    muon_lr: Positive | None = None
    muon_scale: Scale = "original"

    def __post_init__(self) -> None:
        if not 0 <= self.final_lr <= self.lr:
            raise ValueError(f"optim.final_lr is {self.final_lr}, but must lie between 0 and optim.lr, {self.lr}")
        if len(self.betas) != 2:
            raise ValueError(f"optim.betas is {list(self.betas)}, but must be two numbers")
        if self.name not in OPTIMIZERS:
            raise ValueError(f"optim.name is {self.name!r}, but must be {', '.join(OPTIMIZERS)} or a plugin's")
        rate = f"optim.muon_lr is {written(self.muon_lr)}, optim.muon_scale {self.muon_scale}"
        if OPTIMIZERS[self.name].splits and self.muon_lr is None:
            raise ValueError(f"{rate}, but optim.name={self.name} needs a rate: 1e-3 say, or 1e-4 with match_rms")
        if not OPTIMIZERS[self.name].splits and (self.muon_lr, self.muon_scale) != (None, "original"):
            raise ValueError(f"{rate}, but optim.name={self.name} has neither: leave them null and original")
        signature, given = inspect.signature(OPTIMIZERS[self.name].make), self._arguments()
        try:
            signature.bind((), **given, **(self.options or {}))
        except TypeError as error:
            takes = ", ".join(name for name in [*signature.parameters][1:] if name not in given)
            raise ValueError(
                f"optim.options is {written(self.options)}, but optim.name={self.name} takes {takes} there ({error}); "
                "optim.options=null gives none"
            ) from error

    def _arguments(self) -> dict:
        return {name: getattr(self, name) for name in ("lr", *OPTIMIZERS[self.name].shared)}

    def build(self, parameters: Iterable[nn.Parameter], network: nn.Module | None = None) -> torch.optim.Optimizer:
        """Build the optimizer of these parameters; `network` decides which ones an entry that splits them treats apart.
        Raises ValueError if the optimizer refuses its settings."""
        groups = groups_of(parameters, network) if OPTIMIZERS[self.name].splits else list(parameters)
        try:
            optimizer = OPTIMIZERS[self.name].make(groups, **self._arguments(), **(self.options or {}))
        except (TypeError, ValueError) as error:
            raise ValueError(f"optim.name={self.name} refuses its settings, see section optim: {error}") from error
        optimizer.built = [dict(group) for group in optimizer.param_groups]  # checkpoints save what differs from it
        return optimizer

    def keeps_state(self, changed: Collection[str]) -> bool:
        """Return whether the optimizer's state stays valid if settings change, given their dotted keys."""
        return not any(key.startswith(("optim.name", "optim.options")) for key in changed)

    @property
    def copies(self) -> float:
        """The size of the optimizer's state, in numbers per parameter value (AdamW: 2), but see state_size."""
        return OPTIMIZERS[self.name].copies(self.options or {})

    @property
    def matrix_copies(self) -> float:
        """As `copies`, of a value in the blocks' matrices (Muon: 1)."""
        return 1 if OPTIMIZERS[self.name].splits else self.copies

    def state_size(self, network: nn.Module) -> int:
        """Return how many numbers of state the optimizer has for a network's parameters."""
        matrices = sum(matrix.numel() for matrix in block_matrices(network))
        return int(self.matrix_copies * matrices + self.copies * (count_parameters(network) - matrices))

    def split(self, optimizer: torch.optim.Optimizer) -> str:
        """Return how the optimizer treats parameters apart, as words to follow its name; "" if it does not."""
        if not OPTIMIZERS[self.name].splits:
            return ""
        own, rest = ([parameter.numel() for parameter in group["params"]] for group in optimizer.param_groups)
        return f" for {len(own)} block matrices ({sum(own):,} parameters), AdamW for the other {sum(rest):,}"


def step_unless(optimizer: torch.optim.Optimizer, gradients: list[Tensor], bad: Tensor) -> None:
    """Call optimizer.step(), but keep parameters and state bit for bit as they are if `bad`, a 0-d bool tensor, is
    true; the gradients are then set to 0.

    The device chooses between the values before and after the step. The host must wait for the device in two cases: if
    the step creates state, as the first one does, or if it changes Python numbers or tensors on another device. On a
    GPU that includes state["step"] of torch's optimizers, unless capturable=True.
    """
    for gradient in gradients:
        gradient.masked_fill_(bad, 0.0)  # a step may raise an error for NaN
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    owners, state, layout = _state(optimizer)
    before, kept = ([v.clone() if torch.is_tensor(v) else v for v in values] for values in (parameters, state))
    optimizer.step()
    owners_now, state, layout_now = _state(optimizer)
    alike = [*map(id, owners)] == [*map(id, owners_now)] and layout == layout_now
    decidable = alike and all(_decidable(old, new, bad.device) for old, new in zip(kept, state))
    for old, new in zip([*before, *kept], [*parameters, *state] if decidable else parameters):
        if torch.is_tensor(new):
            torch.where(bad, old, new, out=new)
    if not decidable and bad:
        values, groups = tree_unflatten(kept, layout)
        optimizer.state.clear()
        optimizer.state.update(zip(owners, values))
        kept_groups = zip(groups, optimizer.param_groups)
        optimizer.param_groups[:] = [{**settings, "params": group["params"]} for settings, group in kept_groups]


def _state(optimizer: torch.optim.Optimizer) -> tuple[list, list, TreeSpec]:
    """Return the parameters that have state, and the values of optimizer.state and optimizer.param_groups (without
    their parameters) as a flat list with its pytree structure."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return list(optimizer.state), *tree_flatten((list(optimizer.state.values()), groups))


def _decidable(old: object, new: object, device: torch.device) -> bool:
    """Return whether a flag on `device` can choose between two values: both are tensors on it, or they are equal."""
    if torch.is_tensor(old) and torch.is_tensor(new):
        return (old.device, old.shape, old.dtype) == (device, new.shape, new.dtype) and new.device == device
    return type(old) is type(new) and old == new
