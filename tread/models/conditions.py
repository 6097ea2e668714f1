"""What labels (B,) int64 and texts share: rows of conditions, joined, padded, moved and dropped alike."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tread.models.text import Text

Condition = Tensor | Text


def _each(function: Callable[..., Tensor], *given: Condition) -> Condition:
    """A function of tensors, of labels or of each part of texts that there is."""
    if not isinstance(given[0], Text):
        return function(*given)
    return Text(*(None if parts[0] is None else function(*parts) for parts in zip(*given)))


def count(y: Condition) -> int:
    """B, how many samples' conditions these are."""
    return len(y.mask if isinstance(y, Text) else y)


def rows(y: Condition, chosen: slice | Tensor) -> Condition:
    """Some of the conditions: a slice of them, or by numbers (n,) int64."""
    return _each(lambda part: part[chosen], y)


def join(a: Condition, b: Condition) -> Condition:
    """Those of a, then those of b."""
    return _each(lambda one, other: torch.cat([one, other]), a, b)


def pad(y: Condition, total: int) -> Condition:
    """So many conditions, by repeating the last one."""
    missing = total - count(y)
    return _each(lambda part: torch.cat([part, part[-1:].expand(missing, *part.shape[1:])]), y)


def to(y: Condition, device: torch.device | str) -> Condition:
    """On a device."""
    return _each(lambda part: part.to(device), y)


def replaced(y: Condition, where: Tensor, null: Condition) -> Condition:
    """The null condition (1, …) where (B,) bool says so."""

    def choose(part: Tensor, empty: Tensor) -> Tensor:
        return torch.where(where.view(-1, *[1] * (part.ndim - 1)), empty.to(part.dtype), part)

    return _each(choose, y, null)


def drop(y: Condition, uniform: Tensor, probability: float, null: Condition) -> Condition:
    """The null condition (1, …) where the uniform number (B,) is below the probability."""
    return replaced(y, uniform < probability, null)
