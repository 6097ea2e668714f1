"""Scores samples: by Inception features against a reference, by a built-in dataset's metrics, or by FID in training."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from tread.checkpoints.for_sampling import SavedNetwork
from tread.data.latents import LatentSpec
from tread.data.store import ShardStore
from tread.diffusion.labels import seeded_labels
from tread.diffusion.sampling import Model, Sampler, draw_pictures
from tread.encoders.autoencoder import Decoder
from tread.encoders.inception import Inception, extract, find_at_hand, find_weights, load_inception
from tread.evaluation.emoji_judge import ask, judge_emoji, open_emoji, real_emoji
from tread.evaluation.image_sets import extract_all
from tread.evaluation.metric_table import METRICS, feature_metrics, names_of
from tread.evaluation.metrics import Moments, frechet_distance
from tread.evaluation.prompts import ScoredPrompts
from tread.evaluation.reference import FeatureSets, Reference, Unavailable, check_size, open_reference
from tread.models.conditions import rows
from tread.preparing.digits import digits_parts
from tread.preparing.images import Crop
from tread.runtime.device import use_cores
from tread.runtime.distributed import Processes
from tread.runtime.files import sha256

REAL_COUNTS = {"label_agreement_real": 355, "frechet_pixels_real": 1442}  # number of real digits behind these values
Scores = tuple[dict[str, float], dict[str, str], dict[str, int]]  # see Scorer.score


class Scorer(ABC):
    """Computes metrics: `prepare` gets pictures part by part, then `score` gets all samples.

    metrics    keys in METRICS that `score` may give values for, the most important one first.
    reference  the reference that samples are compared with, opened from a path; None: the scorer has none.
    seconds    seconds that extracting the reference's features took.
    prompts    captions to draw samples for, each equally often; None: the user's options choose labels or prompts.
    hashes     {"reference": sha256, "inception": sha256} of those files that scores depend on; fid.json records them.
    """

    metrics: Collection[str] = ()
    reference: Reference | None = None
    seconds: float = 0.0
    prompts: ScoredPrompts | None = None
    hashes: Mapping[str, str | None] = {}

    def prepare(self, pictures: torch.Tensor) -> dict[str, np.ndarray]:
        """Return what `score` needs of pictures (n, C, H, W) uint8, to be stored with them: {name: array of n rows}."""
        return {}

    @abstractmethod
    def score(self, samples: ShardStore) -> Scores:
        """Score a store of samples: pictures, labels and the arrays of `prepare`, or, if the pictures come from files,
        only the arrays. Returns {metric: value}, {metric: why it has no value}, and {metric: number of pictures it is
        computed from} where that is not the number of samples. Only the main process calls this."""

    def warnings(self, samples: int) -> list[str]:
        """Return warnings to record with a score of `samples` samples."""
        return []


class Unscored(Scorer):
    """Computes nothing: for samples that are only generated and saved."""

    def score(self, samples: ShardStore) -> Scores:
        return {}, {"fid": "there is no reference"}, {}


class ReferenceScorer(Scorer):
    """Compares samples with a reference by Inception features.

    features  the features of the reference's pictures; None before `extract_reference`, or if there are no pictures.
    seconds   seconds that extracting these features took.
    """

    def __init__(
        self, reference: Reference, network: Inception, processes: Processes, features: ShardStore | None = None
    ) -> None:
        self.reference, self.network, self.processes, self.features = reference, network, processes, features
        self.metrics = feature_metrics()
        self.hashes = {"reference": reference.sha256, "inception": network.sha256}

    def extract_reference(self, cache: Path) -> None:
        """Extract features of the reference's pictures, if any, or read them from `cache`. All processes call this."""
        if self.reference.pictures is not None:
            began = time.perf_counter()
            pictures, self.features = extract_all(self.reference.pictures, cache, self.network, self.processes)
            self.reference = replace(self.reference, pictures=pictures, count=pictures.count)
            self.seconds = time.perf_counter() - began

    def prepare(self, pictures: torch.Tensor) -> dict[str, np.ndarray]:
        """Return Inception.forward's outputs for pictures (n, 3, H, W) uint8, {"pool": (n, D), …}, all fp32."""
        return extract(self.network, pictures)

    def score(self, samples: ShardStore) -> Scores:
        sets = FeatureSets(samples, self.features, self.reference, self.network, self.processes)
        values, unavailable = {}, {}
        for name in self.metrics:
            try:
                values[name] = float(METRICS[name].compute(sets))
            except Unavailable as error:
                unavailable[name] = str(error)
            except (torch.OutOfMemoryError, MemoryError, OSError):  # another try goes on with the samples
                raise
            except Exception as error:  # the other metrics still get values
                if "can't allocate memory" in str(error) or "ALLOC_FAILED" in str(error):  # on CPUs, and by cuBLAS
                    raise
                unavailable[name] = f"it failed: {type(error).__name__}: {error}"
        return values, unavailable, {}

    def warnings(self, samples: int) -> list[str]:
        """Return warnings if samples or reference pictures are too few, or Inception has fewer channels than FID's."""
        dimensions, narrow = self.network.sizes["pool"], self.network.narrow
        counts = {"samples": samples}
        # ADM's mu comes from many more pictures than its arr_0 holds
        if "pool" not in self.reference.stated or self.reference.pictures is None:
            counts["pictures in the reference"] = self.reference.count
        texts = [
            f"{count:,} {what} are fewer than the {dimensions:,} dimensions of the features: their covariance is of "
            "deficient rank, FID is biased upwards, and only comparable at the same counts"
            for what, count in counts.items()
            if count is not None and count <= dimensions
        ]
        fewer = f"the Inception has {narrow} times fewer channels than FID's: these numbers are not FIDs"
        return texts + [fewer] * (narrow > 1)


def open_scorer(
    reference: Path, inception: str | None, crop: Crop | None, processes: Processes, skip: bool = False
) -> ReferenceScorer:
    """Open a reference, and Inception from the weight file `inception` (None: TREAD_INCEPTION's, else pytorch-fid's,
    downloaded if needed). `crop` says how the reference's photos are cropped (None: not); with `skip`, damaged ones are
    left out. All processes call this together. Raises FileNotFoundError or ValueError if either can't be opened."""
    with processes.main_first():  # one process fetches the weights
        network = load_inception(find_weights(inception), processes.device)
    return ReferenceScorer(open_reference(reference, crop, processes, network.sizes, skip), network, processes)


def judge_digits(pictures: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Score generated digits: pictures (n, 1, 8, 8) uint8 in 0..255, labels (n,) of the classes they were drawn for.

    label_agreement       share whose label a 3-nearest-neighbour classifier, fitted on training digits, predicts.
    label_agreement_real  the same share for the held-out digits: what to expect of perfect samples.
    frechet_pixels        squared Fréchet distance to the held-out digits, of vectors of 64 pixels scaled to 0..16.
    frechet_pixels_real   the same distance between the training and the held-out digits.
    """
    from sklearn.neighbors import KNeighborsClassifier

    (train, train_labels), (heldout, heldout_labels) = digits_parts().values()
    generated = np.round(pictures.reshape(len(pictures), -1) / 255 * 16)  # the scans' grey levels 0..16
    classifier = KNeighborsClassifier(n_neighbors=3).fit(train, train_labels)
    reference = Moments.of(heldout).gaussian
    return {
        "label_agreement": float(classifier.score(generated, labels)),
        "label_agreement_real": float(classifier.score(heldout, heldout_labels)),
        "frechet_pixels": frechet_distance(*Moments.of(generated).gaussian, *reference),
        "frechet_pixels_real": frechet_distance(*Moments.of(train).gaussian, *reference),
    }


class DigitsJudge(Scorer):
    """Scores pictures of digits by a classifier and by their pixels (see judge_digits); neither score is an FID."""

    metrics = ("label_agreement", "frechet_pixels")

    def score(self, samples: ShardStore) -> Scores:
        values = judge_digits(samples.whole("pictures"), samples.whole("labels"))
        return values, {"fid": "grey pictures of 8×8 are scored in raw pixels"}, REAL_COUNTS


class EmojiJudge(Scorer):
    """Scores `count` emoji samples, half with captions of training emoji, half of held-out emoji, by judge_emoji:
    whether the real emoji nearest to a sample has the sample's caption. There is no FID.

    inception  weight file of an Inception network, whose features are compared in addition to pixels. None: the file
               that TREAD_INCEPTION names, else pytorch-fid's if it is in torch's cache; without either, pixels alone.

    Raises FileNotFoundError or ValueError if the emoji cannot be opened, or the weight file does not exist.
    """

    metrics = names_of("demo")

    def __init__(self, saved: SavedNetwork, count: int, inception: str | None) -> None:
        train, heldout = open_emoji(saved)
        self.parts, self.weights = (train.data, heldout.data), find_at_hand(inception)
        self.asked = ask(*self.parts, count)
        self.hashes = {"inception": self.weights and sha256(self.weights)}
        self.prompts = replace(
            heldout,
            count=count,
            sha256=train.sha256 + heldout.sha256,
            read=lambda numbers: rows(self.asked.texts, torch.from_numpy(numbers)),
        )

    def score(self, samples: ShardStore) -> Scores:
        inception = self.weights and load_inception(self.weights, "cuda" if torch.cuda.is_available() else "cpu")
        order = samples.whole("labels").argsort()
        asked, in_order = self.asked.parts.tolist(), torch.from_numpy(samples.whole("pictures")[order])
        values = judge_emoji(in_order, self.asked, real_emoji(*self.parts), inception)
        counts = {name: asked.count(name.partition("_")[0]) for name in values}
        return values, {"fid": "emoji are judged by their captions"}, counts


# (built-in dataset, whether the network takes texts) → function (network, number of samples, Inception file) → scorer
EMBEDDED: dict[tuple, Callable[..., Scorer]] = {
    ("digits", False): lambda *_: DigitsJudge(),
    ("emoji", True): EmojiJudge,
}


@dataclass(frozen=True)
class OnlineFID:
    """Computes the FID of a few samples during training, to show a trend. The computation is the same as in fid.py."""

    scorer: ReferenceScorer
    decoder: Decoder

    def moments(self, model: Model, seeds: Sequence[int], sampler: Sampler, stopped: Callable[[], bool]) -> Moments:
        """Draw a sample for each seed, of a class drawn from the seed, and return the moments of the samples' "pool"
        features. `stopped` is called after each batch; if it returns True, no more samples are drawn."""
        labels = seeded_labels(seeds, model.network.num_classes, "random")

        def features() -> Iterator[np.ndarray]:
            for batch in draw_pictures(model, self.decoder, seeds, labels, sampler):
                yield self.scorer.prepare(batch)["pool"]
                if stopped():
                    return

        return Moments.of_parts(features())

    def fid(self, samples: Moments, cpu_threads: int | None) -> float:
        """Return the FID, given the moments of the features of all processes' samples. Call it in one process while the
        others wait. It may use `cpu_threads` threads; None: OMP_NUM_THREADS, else all cores."""
        threads = torch.get_num_threads()
        use_cores(cpu_threads, processes=1)
        try:
            return frechet_distance(*samples.gaussian, *self.scorer.reference.stated["pool"])
        finally:
            torch.set_num_threads(threads)


def open_online_fid(
    reference: Path, samples: int, inception: str | None, latents: LatentSpec, decoder: Decoder, processes: Processes
) -> OnlineFID:
    """Open a reference with mu and sigma, and Inception from the weight file `inception` (None: as in open_scorer).
    `latents` describes the input of `decoder`. Raises FileNotFoundError or ValueError if either can't be opened;
    ValueError if `samples`, the total, is below one per process, or decoded and reference pictures differ in size."""
    if samples < processes.count:
        raise ValueError(f"eval.fid_samples is {samples}, which is less than one for each process")
    scorer = open_scorer(reference, inception, None, processes)
    if "pool" not in scorer.reference.stated:
        raise ValueError(f"{reference} has no mu and sigma: python fid.py reference={reference} save_reference=a.npz")
    pictures = decoder(torch.zeros(1, *latents.shape, device=processes.device))
    check_size("what this run's autoencoder decodes", tuple(pictures.shape[1:]), scorer.reference)
    return OnlineFID(scorer, decoder)
