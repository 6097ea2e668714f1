"""Running out of a device's memory: which micro-batch would fit."""

from __future__ import annotations

from collections.abc import Callable

import torch


def smaller(share: int, tried: int) -> list[int]:
    """Micro-batches below the one that was tried that divide a process's share of the batch, largest first."""
    return [size for size in range(tried - 1, 0, -1) if share % size == 0]


def find_fitting(attempt: Callable[[int], None], sizes: list[int]) -> int | None:
    """The first of some sizes, largest first, for which an attempt does not run out of memory; None if there is none.

    Each attempt that fails is followed by one of at most half its size.
    """
    at_most = sizes[0] if sizes else 0
    for size in sizes:
        if size > at_most:
            continue
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        try:
            attempt(size)
            return size
        except torch.OutOfMemoryError:
            at_most = size // 2
    return None
