"""The choice of held-out pictures: in each class those whose names have the smallest hashes, or a split."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def held_out(names: Sequence[str], labels: np.ndarray, classes: int, wanted: float | int | str | None) -> np.ndarray:
    """(n,) bool, True for pictures that are held out.

    wanted  a fraction of all pictures, at least one of them, divided over the classes by their sizes; or a count,
            divided over the classes evenly; each class keeps at least one picture for training. Or the beginning of the
            names of pictures that the source itself holds out. None: none is.

    The choice within a class depends on the names alone. Raises ValueError if there are too few pictures.
    """
    if wanted is None or isinstance(wanted, str):
        return np.array([wanted is not None and name.startswith(wanted) for name in names], dtype=bool)
    sizes = np.bincount(labels, minlength=classes)
    if isinstance(wanted, float):
        total, shares = max(1, round(wanted * len(labels))), wanted * sizes
    else:
        total, shares = wanted, np.full(classes, wanted / classes)
    counts = _whole(shares, total, np.maximum(sizes - 1, 0))
    digests = [hashlib.sha256(name.encode(errors="surrogateescape")).digest() for name in names]
    hashes, out = np.array([digest[:8] for digest in digests], dtype="S8"), np.zeros(len(labels), dtype=bool)
    for label in np.flatnonzero(counts):
        members = np.flatnonzero(labels == label)
        out[members[np.argsort(hashes[members], kind="stable")[: counts[label]]]] = True
    return out


def _whole(shares: np.ndarray, total: int, most: np.ndarray) -> np.ndarray:
    """Integers that sum to `total`, each at most `most`: the shares rounded down, then raised where most is missing."""
    if total > most.sum():
        raise ValueError(
            f"heldout takes {total:,} pictures, but {most.sum():,} can be held out: each class keeps one for training"
        )
    counts = np.minimum(np.floor(shares).astype(int), most)
    while left := total - counts.sum():
        order = np.argsort(counts - shares, kind="stable")
        chosen = order[counts[order] < most[order]][:left]
        counts[chosen] += 1
    return counts
