"""Scores of a set of pictures from its Inception features: each metric that the reference allows."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from tread.data.parts import PartStore
from tread.encoders.inception import Inception, extract, extract_all, load_inception
from tread.evaluation.metrics import (
    NEIGHBOURS,
    frechet_distance,
    inception_score,
    kernel_distance,
    precision_recall,
)
from tread.evaluation.reference import Reference, moments, statistics
from tread.runtime.device import exact
from tread.runtime.distributed import Processes


@dataclass(frozen=True)
class ReferenceScorer:
    """The reference, and the Inception by whose features pictures are compared with it: a Scorer, see scorers.py.

    weights   sha256 of the Inception's file.
    features  of the reference's pictures; None where it has none.
    seconds   that these took to extract.
    processes  whose main one says what takes long.
    """

    metrics: ClassVar[Mapping[str, str]] = {
        "fid": "lower",
        "sfid": "lower",
        "inception_score": "higher",
        "precision": "higher",
        "recall": "higher",
        "kid": "lower",
    }
    reference: Reference
    network: Inception
    weights: str
    features: PartStore | None
    seconds: float
    processes: Processes

    def prepare(self, pictures: torch.Tensor) -> dict[str, np.ndarray]:
        """The features of pictures (n, 3, H, W) uint8."""
        return extract(self.network, pictures)

    def score(self, samples: PartStore) -> tuple[dict[str, float], dict[str, str], dict[str, int]]:
        """({metric: value}, {metric: why it is unavailable}, {}) of samples' features; one of them has each metric."""
        values, unavailable = {}, {}
        for metric, kind in (("fid", "pool"), ("sfid", "spatial")):
            expected = getattr(self.reference, kind) or (
                self.features and statistics(self.features, kind, self.processes)
            )
            if expected is None:
                unavailable[metric] = "the reference has neither pictures (arr_0) nor mu_s, sigma_s"
            else:
                ours = moments("the samples", samples, kind, self.processes).gaussian
                self.processes.say(f"distance of both means and covariances, {kind}")
                values[metric] = frechet_distance(*ours, *expected)
        if self.network.fc is None:
            unavailable["inception_score"] = "the Inception weights have no fc layer"
        else:
            values["inception_score"] = inception_score(np.concatenate(list(samples.arrays("probabilities"))))
        if self.features is None:
            reason = "the reference has statistics, but no pictures (arr_0)"
            return values, unavailable | dict.fromkeys(("precision", "recall", "kid"), reason), {}
        ours, theirs = (
            torch.from_numpy(np.concatenate(list(parts.arrays("pool")))) for parts in (samples, self.features)
        )
        device = next(self.network.parameters()).device
        with exact():
            try:
                values |= _compare(theirs.to(device), ours.to(device), self.processes)
            except torch.OutOfMemoryError:
                values |= _compare(theirs, ours, self.processes)
        if "recall" not in values:
            unavailable |= dict.fromkeys(("precision", "recall"), f"each set must have more than {NEIGHBOURS} pictures")
        return values, unavailable, {}

    def warnings(self, samples: int) -> list[str]:
        """What a reader of the numbers should know about their counts, and about a network that is not FID's."""
        dimensions = self.network.sizes.pool
        counts = {"samples": samples}
        if self.reference.pool is None or self.reference.pictures is None:  # ADM's mu is of many more than its arr_0
            counts["pictures in the reference"] = self.reference.count
        found = [
            f"{count:,} {what} are fewer than the {dimensions:,} dimensions of the features: their covariance is of "
            "deficient rank, FID is biased upwards, and only comparable at the same counts"
            for what, count in counts.items()
            if count is not None and count <= dimensions
        ]
        if self.network.narrow > 1:
            found.append(
                f"the Inception has {self.network.narrow} times fewer channels than FID's: these are no FID's numbers"
            )
        return found


def _compare(reference: torch.Tensor, samples: torch.Tensor, processes: Processes) -> dict[str, float]:
    """Precision and recall, but of too small sets, and KID."""
    found, n, m = {}, len(reference), len(samples)
    if min(n, m) > NEIGHBOURS:
        with processes.bar("precision and recall", 2 * (n + m)) as progress:
            found["precision"], found["recall"] = precision_recall(reference, samples, progress.update)
    with processes.bar("KID", n + 2 * m) as progress:
        return found | {"kid": kernel_distance(reference, samples, progress.update)}


def open_scorer(reference: Reference, weights: Path, digest: str, cache: Path, processes: Processes) -> ReferenceScorer:
    """The Inception of a file with that sha256, and the features of the reference's pictures, kept in the cache."""
    network, features = load_inception(weights, processes.device), None
    began = time.perf_counter()
    if reference.pictures is not None:
        features = extract_all(reference.pictures, cache, network, digest, processes)
    return ReferenceScorer(reference, network, digest, features, time.perf_counter() - began, processes)
