"""What scores samples: one interface, who fulfils it, and who does it for which checkpoint.

Pictures are scored by their Inception features against a reference; the demo's digits by their raw pixels.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from tread.data.store import ShardStore
from tread.encoders.inception import Inception, extract, extract_all, load_inception
from tread.evaluation.metric_table import METRICS, feature_metrics
from tread.evaluation.metrics import Moments, frechet_distance
from tread.evaluation.reference import FeatureSets, Reference, Unavailable
from tread.preparing.digits import digits_parts
from tread.runtime.distributed import Processes

NEIGHBOURS = 3
REAL_COUNTS = {"label_agreement_real": 355, "frechet_pixels_real": 1442}  # scans that those values are of


class Scorer(Protocol):
    """All that scoring asks of a scorer.

    metrics    the names, as in METRICS of metric_table.py, of what it may give, the first the one to look at.
    reference  what samples are compared with, if it was named by its path.
    seconds    that its features took to extract.
    """

    metrics: Collection[str]
    reference: Reference | None
    seconds: float

    def prepare(self, pictures: torch.Tensor) -> dict[str, np.ndarray]:
        """Rows to keep beside the pictures (n, C, H, W) uint8: arrays of n rows, by name."""
        return {}

    def score(self, samples: ShardStore) -> tuple[dict[str, float], dict[str, str], dict[str, int]]:
        """Score parts that hold pictures, labels and the rows of `prepare`.

        Returns the values, the reasons for missing metrics, and the sample counts of values that use fewer samples,
        each by name.
        """

    def warnings(self, samples: int) -> list[str]:
        """What a reader of the numbers of so many samples should know about them."""
        return []


class Unscored(Scorer):
    """Samples that are drawn and not scored."""

    metrics, reference, seconds = (), None, 0.0

    def score(self, samples: ShardStore) -> tuple[dict[str, float], dict[str, str], dict[str, int]]:
        return {}, {"fid": "there is no reference"}, {}


@dataclass(frozen=True)
class ReferenceScorer:
    """The reference, and the Inception by whose features pictures are compared with it.

    weights   sha256 of the Inception's file.
    features  of the reference's pictures; None where it has none.
    seconds   that these took to extract.
    processes  whose main one says what takes long.
    """

    reference: Reference
    network: Inception
    weights: str
    features: ShardStore | None
    seconds: float
    processes: Processes

    @property
    def metrics(self) -> list[str]:
        return feature_metrics()

    def prepare(self, pictures: torch.Tensor) -> dict[str, np.ndarray]:
        """The features of pictures (n, 3, H, W) uint8."""
        return extract(self.network, pictures)

    def score(self, samples: ShardStore) -> tuple[dict[str, float], dict[str, str], dict[str, int]]:
        """({metric: value}, {metric: why it is unavailable}, {}) of samples' features; one of them has each metric."""
        sets = FeatureSets(samples, self.features, self.reference, self.network, self.processes)
        values, unavailable = {}, {}
        for name in feature_metrics():
            try:
                values[name] = METRICS[name].compute(sets)
            except Unavailable as error:
                unavailable[name] = str(error)
            except (ValueError, TypeError, LookupError, AttributeError) as error:  # which costs the others nothing
                unavailable[name] = f"it failed: {type(error).__name__}: {error}"
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


def judge_digits(pictures: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Score generated digits: pictures (n, 1, 8, 8) uint8, labels (n,) the classes asked for.

    label_agreement          share that a nearest-neighbour classifier, fitted on the real training
                             digits, assigns to the class asked for.
    label_agreement_real     the same share of the real held-out digits: what is to be expected.
    frechet_pixels           squared Fréchet distance in raw pixels (64 values in 0..16) to the
                             held-out digits.
    frechet_pixels_real      the same distance between the training and the held-out digits.
    """
    from sklearn.neighbors import KNeighborsClassifier

    (train, train_labels), (heldout, heldout_labels) = digits_parts().values()
    generated = np.round(pictures.reshape(len(pictures), -1) / 255 * 16)  # on the scans' own grey levels
    classifier = KNeighborsClassifier(NEIGHBOURS).fit(train, train_labels)
    reference = Moments.of(heldout).gaussian
    return {
        "label_agreement": float(classifier.score(generated, labels)),
        "label_agreement_real": float(classifier.score(heldout, heldout_labels)),
        "frechet_pixels": frechet_distance(*Moments.of(generated).gaussian, *reference),
        "frechet_pixels_real": frechet_distance(*Moments.of(train).gaussian, *reference),
    }


class DigitsJudge(Scorer):
    """`judge_digits`: the label agreement and the Fréchet distance in raw pixels are no FID."""

    metrics, reference, seconds = ("label_agreement", "frechet_pixels"), None, 0.0

    def score(self, samples: ShardStore) -> tuple[dict[str, float], dict[str, str], dict[str, int]]:
        pictures, labels = (np.concatenate(list(samples.arrays(name))) for name in ("pictures", "labels"))
        unavailable = {"fid": "grey pictures of 8×8 are scored in raw pixels"}
        return judge_digits(pictures, labels), unavailable, REAL_COUNTS


EMBEDDED: dict[str | None, Scorer] = {"digits": DigitsJudge()}  # of embedded datasets, by name


def choose_scorer(embedded: str | None, against: ReferenceScorer | None) -> Scorer:
    """The one of a checkpoint of that embedded dataset, if of any; a reference that was named goes before."""
    return against or EMBEDDED.get(embedded, Unscored())
