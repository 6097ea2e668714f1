"""Scores of a set of pictures: its features in parts, then each metric that the reference allows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from inception import POOL_FEATURES, Inception, extract
from metrics import NEIGHBOURS, Moments, frechet_distance, inception_score, kernel_distance, precision_recall
from parts import Parts
from picture_sets import Pictures
from reference import Reference, statistics
from tread.runtime.device import exact

METRICS = ("fid", "sfid", "inception_score", "precision", "recall", "kid")
PART = 256  # pictures of a part, where there are enough of them
PARTS = 64  # that there are at least, where a batch allows it, for the processes to share
BATCH = {"cpu": 8, "gpu": 128}  # pictures the Inception takes at once


def feature_parts(folder: Path, pictures: Pictures, weights: str) -> Parts:
    """Where the features of a set of pictures are kept: below `folder`, by the hashes of pictures and weights."""
    plan = {"pictures": pictures.sha256, "inception": weights}
    name = f"{pictures.sha256[:16]}-{weights[:16]}"
    return Parts(folder / name, plan, pictures.count, part_size(pictures.count, batch_size=32))


def part_size(count: int, batch_size: int) -> int:
    """Pictures of a part: whole batches, given by the count alone and not by the processes."""
    return batch_size * max(1, min(-(-PART // batch_size), count // (batch_size * PARTS)))


def as_arrays(network: Inception, pictures: torch.Tensor) -> dict[str, np.ndarray]:
    """Features of pictures (n, 3, H, W) uint8 by name: pool, spatial and, with fc, probabilities."""
    batch_size = BATCH["cpu" if next(network.parameters()).device.type == "cpu" else "gpu"]
    found = [extract(network, part) for part in pictures.split(batch_size)]
    named = {name: [getattr(one, name) for one in found] for name in ("pool", "spatial", "probabilities")}
    return {name: np.concatenate(arrays) for name, arrays in named.items() if arrays[0] is not None}


def pool_moments(network: Inception, pictures: Iterable[torch.Tensor]) -> Moments:
    """Mean and covariance of the pool features of pictures that come in batches (b, 3, H, W) uint8; none is kept."""
    return Moments.of_parts(as_arrays(network, part)["pool"] for part in pictures)


def extract_parts(network: Inception, pictures: Pictures, parts: Parts, mine: list[int]) -> Iterator[int]:
    """Extract the features of some parts of a set of pictures; yields how many pictures each had, when it is kept."""
    for number in mine:
        rows = parts.ranges[number]
        content = torch.from_numpy(pictures.read(rows.start, rows.stop))
        parts.write(number, as_arrays(network, content))
        yield len(rows)


def score(
    samples: Parts, reference: Reference, reference_features: Parts | None, device: torch.device | str = "cpu"
) -> tuple[dict[str, float], dict[str, str]]:
    """({metric: value}, {metric: why it is unavailable}) of samples' features; all METRICS are in one of them.

    reference_features  of the reference's pictures; None where it has none.
    """
    values, unavailable = {}, {}
    for metric, kind in (("fid", "pool"), ("sfid", "spatial")):
        expected = getattr(reference, kind) or (reference_features and statistics(reference_features, kind))
        if expected is None:
            unavailable[metric] = "the reference has neither pictures (arr_0) nor mu_s, sigma_s"
        else:
            moments = Moments.of_parts(samples.arrays(kind))
            values[metric] = frechet_distance(moments.mean, moments.covariance, *expected)
    if samples.has("probabilities"):
        values["inception_score"] = inception_score(np.concatenate(list(samples.arrays("probabilities"))))
    else:
        unavailable["inception_score"] = "the Inception weights have no fc layer"
    if reference_features is None:
        reason = "the reference has statistics, but no pictures (arr_0)"
        return values, unavailable | dict.fromkeys(("precision", "recall", "kid"), reason)
    ours, theirs = (
        torch.from_numpy(np.concatenate(list(parts.arrays("pool")))) for parts in (samples, reference_features)
    )
    with exact():
        try:
            found = _compare(theirs.to(device), ours.to(device))
        except torch.OutOfMemoryError:
            found = _compare(theirs, ours)
    if found[0] is None:
        unavailable |= dict.fromkeys(("precision", "recall"), f"each set must have more than {NEIGHBOURS} pictures")
    values |= {name: value for name, value in zip(("precision", "recall", "kid"), found) if value is not None}
    return values, unavailable


def _compare(reference: torch.Tensor, samples: torch.Tensor) -> tuple[float | None, float | None, float]:
    """Precision and recall, None for too small sets, and KID."""
    enough = min(len(reference), len(samples)) > NEIGHBOURS
    precision, recall = precision_recall(reference, samples) if enough else (None, None)
    return precision, recall, kernel_distance(reference, samples)


def warnings(samples: int, reference: Reference) -> list[str]:
    """What a reader of the numbers should know about their counts."""
    counts = {"samples": samples, "pictures in the reference": reference.count}
    return [
        f"{count:,} {what} are fewer than the {POOL_FEATURES:,} dimensions of the features: their covariance is of "
        "deficient rank, FID is biased upwards, and only comparable at the same counts"
        for what, count in counts.items()
        if count is not None and count <= POOL_FEATURES and not (what != "samples" and reference.statistics_unknown)
    ]
