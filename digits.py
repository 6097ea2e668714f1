"""The embedded dataset: scikit-learn's handwritten digits (1,797 real 8×8 scans, 10 classes).

They ship inside the scikit-learn wheel. `prepare` turns them into the project's latent format,
`judge` says how good generated digits are. Both are for the demo: label agreement and the Fréchet
distance in raw pixels are no FID.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np

from latents import Latents
from metrics import frechet_distance, mean_and_covariance
from shards import write_dataset

MEANING = Latents(
    shape=(1, 8, 8), classes=tuple(str(digit) for digit in range(10)), autoencoder="pixels", scale_applied=True
)
HELDOUT_EVERY = 5  # of each class, every fifth scan is held out: 355, which leaves 1,442 to train on
NEIGHBOURS = 3
REAL_COUNTS = {"label_agreement_real": 355, "frechet_pixels_real": 1442}  # scans that those values are of
METRICS = ("label_agreement", "label_agreement_real", "frechet_pixels", "frechet_pixels_real")


def split() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """{"train", "heldout"} → (pixels (n, 64) float64 in 0..16, labels (n,) int64)."""
    from sklearn.datasets import (
        load_digits,
    )  # imported where used: it takes a second, and other datasets need none of it

    pixels, labels = load_digits(return_X_y=True)
    heldout = np.zeros(len(labels), dtype=bool)
    for digit in range(10):
        heldout[np.flatnonzero(labels == digit)[HELDOUT_EVERY - 1 :: HELDOUT_EVERY]] = True
    return {"train": (pixels[~heldout], labels[~heldout]), "heldout": (pixels[heldout], labels[heldout])}


def prepare(folder: Path, part: str) -> None:
    """Write one part, "train" or "heldout", as a dataset, unless it is there: 0..16 becomes −1..1, exact in float16.

    Several processes may do so at once: each writes its own copy, and the first one done gives it the name.
    """
    if folder.exists():
        return
    pixels, labels = split()[part]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".digits-") as own:
        write_dataset(Path(own) / part, MEANING, [(pixels.reshape(-1, 1, 1, 8, 8) / 8 - 1, labels)])
        try:
            os.rename(Path(own) / part, folder)
        except OSError:
            if not folder.exists():
                raise


def judge(pictures: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Score generated digits: pictures (n, 1, 8, 8) uint8, labels (n,) the classes asked for.

    label_agreement          share that a nearest-neighbour classifier, fitted on the real training
                             digits, assigns to the class asked for.
    label_agreement_real     the same share of the real held-out digits: what is to be expected.
    frechet_pixels           squared Fréchet distance in raw pixels (64 values in 0..16) to the
                             held-out digits.
    frechet_pixels_real      the same distance between the training and the held-out digits.
    """
    from sklearn.neighbors import KNeighborsClassifier

    (train, train_labels), (heldout, heldout_labels) = split().values()
    generated = np.round(pictures.reshape(len(pictures), -1) / 255 * 16)  # on the scans' own grey levels
    classifier = KNeighborsClassifier(NEIGHBOURS).fit(train, train_labels)
    reference = mean_and_covariance(heldout)
    return {
        "label_agreement": float(classifier.score(generated, labels)),
        "label_agreement_real": float(classifier.score(heldout, heldout_labels)),
        "frechet_pixels": frechet_distance(*mean_and_covariance(generated), *reference),
        "frechet_pixels_real": frechet_distance(*mean_and_covariance(train), *reference),
    }
