"""A small dataset: handwritten digits (1,797 real 8×8 scans, 10 classes) that ship inside scikit-learn's wheel."""

from pathlib import Path

import numpy as np

from tread.data.latents import LatentSpec
from tread.data.writer import write_dataset

MEANING = LatentSpec((1, 8, 8), classes=tuple("0123456789"), autoencoder="pixels", scale_applied=True)
HELDOUT_EVERY = 5  # of each class, every fifth scan is held out: 355, which leaves 1,442 to train on


def digits_parts() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return {part: (pixels (n, 64) float64 in 0..16, labels (n,) int64)} for the parts "train" and "heldout"."""
    # imported here because it takes a second and other datasets don't need it
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    heldout = np.zeros(len(labels), dtype=bool)
    for digit in range(10):
        heldout[np.flatnonzero(labels == digit)[HELDOUT_EVERY - 1 :: HELDOUT_EVERY]] = True
    return {"train": (pixels[~heldout], labels[~heldout]), "heldout": (pixels[heldout], labels[heldout])}


def prepare_digits(folder: Path, part: str) -> None:
    """Write "train" or "heldout" as a dataset of pixels in −1..1, unless `folder` exists. Concurrent calls are safe."""
    if not folder.exists():
        pixels, labels = digits_parts()[part]
        write_dataset(folder, MEANING, [(pixels.reshape(-1, 1, 1, 8, 8) / 8 - 1, labels)], once=True)
