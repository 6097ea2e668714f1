"""A network's conditions: labels (B,) int64, or texts for the network in text_dit.py. Functions here take either kind.

Shapes: B samples, T text tokens, C and P channels of an encoder's tokens and of its pooled text."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Text(NamedTuple):
    """Encoded captions of B samples. Functions take any tuple with these fields: exported folders copy this class.

    tokens  (B, T, C) output of a frozen encoder, or (B, T) int64 word ids, which the network embeds.
    mask    (B, T) bool, False for padding. No row is all False: even the empty caption has a begin token.
    pooled  (B, P) pooled output of the encoder; None: the network uses the mean of the tokens.
    """

    tokens: Tensor
    mask: Tensor
    pooled: Tensor | None = None


Condition = Tensor | Text


def each(function: Callable[..., Tensor], *given: Condition) -> Condition:
    """Return function(*given) for labels. For texts, call `function` once on the tokens of all texts, once on their
    masks and once on their pooled outputs (None stays None), and return the results as a Text."""
    if not isinstance(given[0], tuple):
        return function(*given)
    return Text(*(None if parts[0] is None else function(*parts) for parts in zip(*given)))


def count(y: Condition) -> int:
    return len(y.mask if isinstance(y, tuple) else y)


def rows(y: Condition, chosen: slice | Tensor) -> Condition:
    """Return the conditions of the samples chosen by a slice or by indices (n,) int64."""
    return each(lambda part: part[chosen], y)


def join(*parts: Condition) -> Condition:
    return each(lambda *tensors: torch.cat(tensors), *parts)


def pad(y: Condition, total: int) -> Condition:
    """Pad conditions to `total` samples by repeating the last one."""
    return each(lambda part: torch.cat([part, part[-1:].expand(total - len(part), *part.shape[1:])]), y)


def to(y: Condition, device: torch.device | str) -> Condition:
    return each(lambda part: part.to(device), y)


def replaced(y: Condition, where: Tensor, null: Condition) -> Condition:
    """Return y with the null condition (1, …) for samples where `where` (B,) bool is true."""

    def choose(part: Tensor, empty: Tensor) -> Tensor:
        return torch.where(where.view(-1, *[1] * (part.ndim - 1)), empty.to(part.dtype), part)

    return each(choose, y, null)
