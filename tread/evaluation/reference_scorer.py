"""Scores of a set of pictures from its Inception features: each metric that the reference allows."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tread.data.parts import PartStore
from tread.encoders.inception import Inception, extract, extract_all, load_inception
from tread.evaluation.metric_table import METRICS, feature_metrics
from tread.evaluation.reference import FeatureSets, Reference, Unavailable
from tread.runtime.distributed import Processes


@dataclass(frozen=True)
class ReferenceScorer:
    """The reference, and the Inception by whose features pictures are compared with it: a Scorer, see scorers.py.

    weights   sha256 of the Inception's file.
    features  of the reference's pictures; None where it has none.
    seconds   that these took to extract.
    processes  whose main one says what takes long.
    """

    reference: Reference
    network: Inception
    weights: str
    features: PartStore | None
    seconds: float
    processes: Processes

    @property
    def metrics(self) -> list[str]:
        return feature_metrics()

    def prepare(self, pictures: torch.Tensor) -> dict[str, np.ndarray]:
        """The features of pictures (n, 3, H, W) uint8."""
        return extract(self.network, pictures)

    def score(self, samples: PartStore) -> tuple[dict[str, float], dict[str, str], dict[str, int]]:
        """({metric: value}, {metric: why it is unavailable}, {}) of samples' features; one of them has each metric."""
        sets = FeatureSets(samples, self.features, self.reference, self.network, self.processes)
        values, unavailable = {}, {}
        for name in feature_metrics():
            try:
                values[name] = METRICS[name].compute(sets)
            except Unavailable as error:
                unavailable[name] = str(error)
        return values, unavailable, {}

    def warnings(self, samples: int) -> list[str]:
        """What a reader of the numbers should know about their counts, and about a network that is not FID's."""
        dimensions = self.network.sizes.pool
        counts = {"samples": samples}
        if self.reference.pool is None or self.reference.pictures is None:  # ADM's mu is of many more than its arr_0
            counts["pictures in the reference"] = self.reference.count
        texts = [
            f"{count:,} {what} are fewer than the {dimensions:,} dimensions of the features: their covariance is of "
            "deficient rank, FID is biased upwards, and only comparable at the same counts"
            for what, count in counts.items()
            if count is not None and count <= dimensions
        ]
        if self.network.narrow > 1:
            texts.append(
                f"the Inception has {self.network.narrow} times fewer channels than FID's: these are no FID's numbers"
            )
        return texts


def open_scorer(reference: Reference, weights: Path, digest: str, cache: Path, processes: Processes) -> ReferenceScorer:
    """The Inception of a file with that sha256, and the features of the reference's pictures, kept in the cache."""
    network, features = load_inception(weights, processes.device), None
    began = time.perf_counter()
    if reference.pictures is not None:
        features = extract_all(reference.pictures, cache, network, digest, processes)
    return ReferenceScorer(reference, network, digest, features, time.perf_counter() - began, processes)
