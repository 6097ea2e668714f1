"""Scores of a set of pictures from its features: each metric that the reference allows."""

from __future__ import annotations

import numpy as np
import torch

from tread.evaluation.inception import POOL_FEATURES, Inception
from tread.evaluation.metrics import (
    NEIGHBOURS,
    Moments,
    frechet_distance,
    inception_score,
    kernel_distance,
    precision_recall,
)
from tread.evaluation.part_store import PartStore
from tread.evaluation.reference import Reference, statistics
from tread.runtime.device import exact

METRICS = ("fid", "sfid", "inception_score", "precision", "recall", "kid")


def score(
    samples: PartStore, reference: Reference, reference_features: PartStore | None, device: torch.device | str = "cpu"
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


def warnings(samples: int, reference: Reference, network: Inception | None = None) -> list[str]:
    """What a reader of the numbers should know about their counts, and about a network that is not FID's."""
    dimensions = network.sizes.pool if network else POOL_FEATURES
    counts = {"samples": samples, "pictures in the reference": reference.count}
    found = [
        f"{count:,} {what} are fewer than the {dimensions:,} dimensions of the features: their covariance is of "
        "deficient rank, FID is biased upwards, and only comparable at the same counts"
        for what, count in counts.items()
        if count is not None and count <= dimensions and not (what != "samples" and reference.statistics_unknown)
    ]
    if network and network.narrow > 1:
        found.append(f"the Inception has {network.narrow} times fewer channels than FID's: these are no FID's numbers")
    return found
