"""The table of all metrics: how each is called, which way is better, and how Inception features give it.

A metric is added by one line, `METRICS["mine"] = Metric("my metric", "lower")`, here or in a file of its own: whatever
scores, records, draws, compares or tabulates metrics looks them up here when it runs. The order is that of columns.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from tread.evaluation.metrics import NEIGHBOURS, frechet_distance, inception_score, kernel_distance, precision_recall
from tread.evaluation.reference import FeatureSets


@dataclass(frozen=True)
class Metric:
    """A number that fid.json and metrics.jsonl hold under a key.

    display   its name in narrow tables; `long`: where there is room, "" if it is the same.
    better    which values are better; None: neither. unit: of the values, for axes.
    of        "samples": fid.py gives it, and maybe a training too; "demo": a training alone, at its end; "heldout": the
              loss on held-out data by which runs are compared; "training": a number of each log.
    compared  whether tables that compare runs have a column of it.
    curve     whether a training measures it again and again; log: whether its axis is logarithmic.
    alike     settings that runs must share for it to mean the same, beside those that all metrics need.
    count     the key under which a training records how many samples it is of; "" without one.
    real      the endings of its key where the same number is of real pictures.
    compute   its value from features of samples and reference; None: another scorer gives it.
    needs     the part of a reference that `compute` looks at: "statistics", "pictures", or None.
    """

    display: str
    better: Literal["lower", "higher"] | None = None
    unit: str = ""
    long: str = ""
    of: Literal["samples", "demo", "heldout", "training"] = "samples"
    compared: bool = True
    curve: bool = True
    log: bool = True
    alike: tuple[str, ...] = ()
    count: str = ""
    real: tuple[str, ...] = ()
    compute: Callable[[FeatureSets], float] | None = None
    needs: Literal["statistics", "pictures"] | None = None

    @property
    def title(self) -> str:
        return self.long or self.display

    @property
    def label(self) -> str:
        """For an axis: "FID, lower is better"."""
        return ", ".join(filter(None, (self.title, self.unit, self.better and f"{self.better} is better")))

    @property
    def arrow(self) -> str:
        """Where better values lie."""
        return {"lower": " ↓", "higher": " ↑", None: ""}[self.better]

    @property
    def best(self) -> Callable:
        """min or max, whichever finds the best value."""
        return max if self.better == "higher" else min


def _frechet(kind: str) -> Callable[[FeatureSets], float]:
    return lambda sets: frechet_distance(*sets.gaussians(kind))


def _manifold(number: int) -> Callable[[FeatureSets], float]:
    return lambda sets: sets.compare(precision_recall, "precision and recall", (2, 2), more_than=NEIGHBOURS)[number]


_judged = functools.partial(Metric, curve=False, count="demo_samples")
_log = functools.partial(Metric, of="training", compared=False)
METRICS: dict[str, Metric] = {
    "eval_loss": Metric("evaluation loss", "lower", of="heldout", alike=("edm", "rf")),
    "eval_velocity": Metric("velocity error", "lower", of="heldout"),  # the same for all densities and weights
    "fid": Metric(
        "FID", "lower", alike=("edm", "rf.shift"), count="fid_samples", compute=_frechet("pool"), needs="statistics"
    ),
    "sfid": Metric("sFID", "lower", compared=False, compute=_frechet("spatial"), needs="statistics"),
    "inception_score": Metric(
        "Inception Score", "higher", compared=False, compute=lambda sets: inception_score(sets.probabilities())
    ),
    "precision": Metric("precision", "higher", compared=False, compute=_manifold(0), needs="pictures"),
    "recall": Metric("recall", "higher", compared=False, compute=_manifold(1), needs="pictures"),
    "kid": Metric("KID", "lower", compute=lambda sets: sets.compare(kernel_distance, "KID", (1, 2)), needs="pictures"),
    "label_agreement": _judged("label_agreement", "higher", long="label agreement", real=("_real",)),
    "frechet_pixels": _judged("frechet_pixels", "lower", long="Fréchet distance in pixels", real=("_real",)),
    "clip_score": Metric("CLIP score", "higher"),
    **{
        f"{part}_top{rank}{features}": _judged(
            f"{called}, top {rank}{by}",
            "higher",
            of="demo",
            compared=rank == 1 and not features,
            real=("_real", "_shifted"),
        )
        for features, by in (("", ""), ("_inception", ", by Inception features"))
        for part, called in (("seen", "seen captions"), ("held", "held-out compositions"))
        for rank in (1, 5)
    },
    "loss": _log("training loss", "lower", alike=("model.routes",)),
    "grad_norm": _log("gradient norm, mean of the good steps"),
    "lr": _log("learning rate", log=False),
    "images_per_s": _log("training speed", unit="images/s", log=False),
}


def with_real(names: Iterable[str]) -> list[str]:
    """Keys of metrics, each followed by the keys of the same number for real pictures."""
    return [name + end for name in names for end in ("", *METRICS[name].real)]


def names_of(what: str) -> list[str]:
    """The metrics of "samples", "demo", "heldout" or "training", see `Metric.of`."""
    return [name for name, metric in METRICS.items() if metric.of == what]


def heldout_titles() -> dict[str, str]:
    """Titles of the losses on held-out data, by the names that `Process.evaluation` gives them."""
    return {name: METRICS[name].title for name in names_of("heldout")}


def feature_metrics() -> list[str]:
    """The metrics that are computed from Inception features."""
    return [name for name, metric in METRICS.items() if metric.compute]
