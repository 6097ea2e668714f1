"""What a dataset hands out: a batch of samples."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from tread.models import conditions
from tread.models.conditions import Condition
from tread.models.text import Text


class Batch(NamedTuple):
    """Samples as stored (B, stored channels, S, S), labels (B,) int64, indices into the dataset (B,).

    And of the same views, where the dataset was opened with them, features (B, T, z) float16 and pictures
    (B, 3, H, W) uint8; and of one caption of each sample its text.
    """

    stored: Tensor
    labels: Tensor
    indices: np.ndarray
    features: Tensor | None = None
    pictures: Tensor | None = None
    text: Text | None = None

    @property
    def condition(self) -> Condition:
        """What a network gets of them: the text where the dataset was opened with it, else the labels."""
        return self.labels if self.text is None else self.text

    def rows(self, rows: slice) -> Batch:
        """Some of the samples."""
        return Batch(*(None if part is None else conditions.rows(part, rows) for part in self))
