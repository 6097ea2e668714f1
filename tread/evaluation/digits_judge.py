"""How good generated digits are, for the demo: label agreement and the Fréchet distance in raw pixels are no FID."""

from __future__ import annotations

import numpy as np

from tread.evaluation.metrics import Moments, frechet_distance
from tread.preparing.digits import digits_parts

NEIGHBOURS = 3
REAL_COUNTS = {"label_agreement_real": 355, "frechet_pixels_real": 1442}  # scans that those values are of


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
