"""What scores samples: one interface, whoever does it, and who does it for which checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np
import torch

from tread.data.parts import PartStore
from tread.evaluation.digits_judge import REAL_COUNTS, judge_digits
from tread.evaluation.reference import Reference
from tread.evaluation.reference_scorer import ReferenceScorer


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
        """What is to be kept of pictures (n, C, H, W) uint8 beside themselves, a row for each, by name."""
        return {}

    def score(self, samples: PartStore) -> tuple[dict[str, float], dict[str, str], dict[str, int]]:
        """Of parts with pictures, labels and what was prepared.

        Returns the values by name, why a metric is unavailable, and the counts of values that are not of all samples.
        """

    def warnings(self, samples: int) -> list[str]:
        """What a reader of the numbers of so many samples should know about them."""
        return []


class Unscored(Scorer):
    """Samples that are drawn and not scored."""

    metrics, reference, seconds = (), None, 0.0

    def score(self, samples: PartStore) -> tuple[dict[str, float], dict[str, str], dict[str, int]]:
        return {}, {"fid": "there is no reference"}, {}


class DigitsJudge(Scorer):
    """`judge_digits` of generated digits."""

    metrics, reference, seconds = ("label_agreement", "frechet_pixels"), None, 0.0

    def score(self, samples: PartStore) -> tuple[dict[str, float], dict[str, str], dict[str, int]]:
        pictures, labels = (np.concatenate(list(samples.arrays(name))) for name in ("pictures", "labels"))
        unavailable = {"fid": "grey pictures of 8×8 are scored in raw pixels"}
        return judge_digits(pictures, labels), unavailable, REAL_COUNTS


EMBEDDED: dict[str | None, Scorer] = {"digits": DigitsJudge()}  # of embedded datasets, by name


def choose_scorer(embedded: str | None, against: ReferenceScorer | None) -> Scorer:
    """The one of a checkpoint of that embedded dataset, if of any; a reference that was named goes before."""
    return against or EMBEDDED.get(embedded, Unscored())
