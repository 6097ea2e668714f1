"""Scorers: their interface, each kind of them, and which one scores which checkpoint; and FID while a network trains.

Pictures are scored by their Inception features against a reference; the demo's digits by their raw pixels.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from tread.data.latents import LatentSpec
from tread.data.store import ShardStore
from tread.diffusion.labels import seeded_labels
from tread.diffusion.sampling import Model, Sampler, draw_pictures
from tread.encoders.autoencoder import Decoder
from tread.encoders.inception import Inception, extract, find_weights, load_inception
from tread.evaluation.image_sets import extract_all
from tread.evaluation.metric_table import METRICS, feature_metrics
from tread.evaluation.metrics import Moments, frechet_distance
from tread.evaluation.reference import FeatureSets, Reference, Unavailable, check_size, open_reference
from tread.preparing.digits import digits_parts
from tread.preparing.images import Crop
from tread.runtime.device import use_cores
from tread.runtime.distributed import Processes

NEIGHBOURS = 3
REAL_COUNTS = {"label_agreement_real": 355, "frechet_pixels_real": 1442}  # scans that those values are of
Scores = tuple[dict[str, float], dict[str, str], dict[str, int]]


class Scorer(Protocol):
    """All that scoring asks of a scorer.

    metrics    names of the metrics that it may give, as in METRICS of metric_table.py, the one to look at first.
    reference  the reference that samples are compared with, if it was named by its path.
    seconds    how long its features took to extract.
    """

    metrics: Collection[str]
    reference: Reference | None
    seconds: float

    def prepare(self, pictures: torch.Tensor) -> dict[str, np.ndarray]:
        """Rows to keep beside the pictures (n, C, H, W) uint8: arrays of n rows, by name."""
        return {}

    def score(self, samples: ShardStore) -> Scores:
        """Score parts that hold pictures, labels and the rows of `prepare`.

        Returns the values, the reasons for missing metrics, and the sample counts of values that use fewer samples,
        each by name.
        """

    def warnings(self, samples: int) -> list[str]:
        """Notes for a reader of the numbers of so many samples."""
        return []


class Unscored(Scorer):
    """Samples that are drawn and not scored."""

    metrics, reference, seconds = (), None, 0.0

    def score(self, samples: ShardStore) -> Scores:
        return {}, {"fid": "there is no reference"}, {}


@dataclass
class ReferenceScorer:
    """The reference, and the Inception by whose features pictures are compared with it.

    processes  the main one tells of work that takes long.
    features   of the reference's pictures, see `extract_reference`; None where it has none.
    seconds    how long these took to extract.
    """

    reference: Reference
    network: Inception
    processes: Processes
    features: ShardStore | None = None
    seconds: float = 0.0

    @property
    def metrics(self) -> list[str]:
        return feature_metrics()

    @property
    def hashes(self) -> dict[str, str]:
        """The hashes that decide its numbers, as fid.json records them."""
        return {"reference": self.reference.sha256, "inception": self.network.sha256}

    def extract_reference(self, cache: Path) -> None:
        """Extract the features of the reference's pictures, where it has any; all processes do so together."""
        if self.reference.pictures is not None:
            began = time.perf_counter()
            pictures, self.features = extract_all(self.reference.pictures, cache, self.network, self.processes)
            self.reference = replace(self.reference, pictures=pictures, count=pictures.count)
            self.seconds = time.perf_counter() - began

    def prepare(self, pictures: torch.Tensor) -> dict[str, np.ndarray]:
        """The features of pictures (n, 3, H, W) uint8."""
        return extract(self.network, pictures)

    def score(self, samples: ShardStore) -> Scores:
        """Scores of samples' features; each metric has a value, or a reason why it is unavailable."""
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
        """Notes on counts that are too small, and on a network that is not FID's."""
        dimensions, narrow = self.network.sizes["pool"], self.network.narrow
        counts = {"samples": samples}
        # ADM's mu is of many more pictures than its arr_0 holds
        if "pool" not in self.reference.stated or self.reference.pictures is None:
            counts["pictures in the reference"] = self.reference.count
        texts = [
            f"{count:,} {what} are fewer than the {dimensions:,} dimensions of the features: their covariance is of "
            "deficient rank, FID is biased upwards, and only comparable at the same counts"
            for what, count in counts.items()
            if count is not None and count <= dimensions
        ]
        fewer = f"the Inception has {narrow} times fewer channels than FID's: these are no FID's numbers"
        return texts + [fewer] * (narrow > 1)


def open_scorer(
    reference: Path, inception: str | None, crop: Crop | None, processes: Processes, skip: bool = False
) -> ReferenceScorer:
    """A reference, see `open_reference`, and the Inception, see `find_weights`, before any features are extracted."""
    with processes.main_first():  # one process fetches the weights
        weights = find_weights(inception)
    network = load_inception(weights, processes.device)
    return ReferenceScorer(open_reference(reference, crop, processes, network.sizes, skip), network, processes)


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

    def score(self, samples: ShardStore) -> Scores:
        pictures, labels = (np.concatenate(list(samples.arrays(name))) for name in ("pictures", "labels"))
        unavailable = {"fid": "grey pictures of 8×8 are scored in raw pixels"}
        return judge_digits(pictures, labels), unavailable, REAL_COUNTS


EMBEDDED: dict[str | None, Scorer] = {"digits": DigitsJudge()}  # of embedded datasets, by name


def choose_scorer(embedded: str | None, against: ReferenceScorer | None) -> Scorer:
    """A checkpoint's scorer: by the reference if one was named, else its embedded dataset's own, if it has one."""
    return against or EMBEDDED.get(embedded, Unscored())


@dataclass(frozen=True)
class OnlineFID:
    """FID of a few samples while a network trains: a trend, by the functions that fid.py scores with."""

    scorer: ReferenceScorer
    decoder: Decoder

    def moments(
        self, model: Model, seeds: Sequence[int], sampler: Sampler, stopped: Callable[[], bool] = lambda: False
    ) -> Moments:
        """Mean and covariance of the features of samples, one for each seed, which gives its label too.

        stopped  asked after each batch; True leaves out the rest.
        """
        labels = seeded_labels(seeds, model.network.num_classes, "random")

        def features() -> Iterator[np.ndarray]:
            for batch in draw_pictures(model, self.decoder, seeds, labels, sampler):
                yield self.scorer.prepare(batch)["pool"]
                if stopped():
                    return

        return Moments.of_parts(features())

    def fid(self, samples: Moments, cpu_threads: int | None = None) -> float:
        """FID of samples, whose moments may be merged from several processes.

        cpu_threads  for this one process, while the others wait: see use_cores.
        """
        threads = torch.get_num_threads()
        use_cores(cpu_threads, processes=1)
        try:
            return frechet_distance(*samples.gaussian, *self.scorer.reference.stated["pool"])
        finally:
            torch.set_num_threads(threads)


def open_online_fid(
    reference: Path, samples: int, inception: str | None, latents: LatentSpec, decoder: Decoder, processes: Processes
) -> OnlineFID:
    """Open a reference with mu and sigma, and the Inception.

    samples    how many will be drawn, by all processes.
    inception  see find_weights.

    Raises FileNotFoundError, or ValueError, also if the decoder's pictures are not of the reference's size.
    """
    if samples < processes.count:
        raise ValueError(f"eval.fid_samples is {samples}, which is less than one for each process")
    scorer = open_scorer(reference, inception, None, processes)
    if "pool" not in scorer.reference.stated:
        raise ValueError(
            f"{reference} has no mu and sigma: python fid.py reference={reference} save_reference=stats.npz"
        )
    pictures = decoder(torch.zeros(1, *latents.shape, device=processes.device))
    check_size("what this run's autoencoder decodes", tuple(pictures.shape[1:]), scorer.reference)
    return OnlineFID(scorer, decoder)
