"""The table of all metrics: how each is called, which way is better, and how Inception features give it.

A metric is added by one line, `METRICS["mine"] = Metric("my metric", "lower")`, here or in a file of its own: whatever
scores, records, draws, compares or tabulates metrics looks them up here when it runs. The order is that of columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tread.evaluation.metrics import NEIGHBOURS, frechet_distance, inception_score, kernel_distance, precision_recall
from tread.evaluation.reference import FeatureSets

SETTINGS_OF_SAMPLES = ("edm", "rf.shift")  # that decide where the noise levels of sampling lie


@dataclass(frozen=True)
class Metric:
    """What is known of the values that fid.json and metrics.jsonl hold under a key.

    display     how it is called in narrow tables, and everywhere unless there is a longer name.
    better      which values are; None: neither.
    unit        of the values, named on axes.
    long        how it is called where there is room.
    of          "samples": fid.py gives it, and maybe a training too; "demo": a training alone gives it, at its end;
                "heldout": the loss on held-out data by which runs are compared; "training": of its own batches.
    compared    whether tables that compare runs have a column of it.
    curve       whether it is measured again and again while a network trains.
    log         whether its curve has a logarithmic axis.
    alike       settings that runs must share for it to mean the same, beside those that all metrics need.
    count       the key under which a training records how many samples it is of; "" without one.
    real_keys   keys of the same number of real pictures, which are recorded with it.
    compute     its value from features of samples and reference, or Unavailable is raised; None: another scorer gives it.
    needs       what of a reference `compute` looks at: "statistics", "pictures", or None.
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
    real_keys: tuple[str, ...] = ()
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


def _manifolds(sets: FeatureSets) -> tuple[float, float]:
    return sets.compare(precision_recall, "precision and recall", lambda n, m: 2 * (n + m), more_than=NEIGHBOURS)


METRICS: dict[str, Metric] = {
    "eval_loss": Metric("evaluation loss", "lower", of="heldout", alike=("edm", "rf")),
    "eval_velocity": Metric("velocity error", "lower", of="heldout"),
    "fid": Metric(
        "FID",
        "lower",
        alike=SETTINGS_OF_SAMPLES,
        count="fid_samples",
        compute=lambda sets: frechet_distance(*sets.gaussians("pool")),
        needs="statistics",
    ),
    "sfid": Metric(
        "sFID",
        "lower",
        compared=False,
        compute=lambda sets: frechet_distance(*sets.gaussians("spatial")),
        needs="statistics",
    ),
    "inception_score": Metric(
        "Inception Score", "higher", compared=False, compute=lambda sets: inception_score(sets.probabilities())
    ),
    "precision": Metric(
        "precision", "higher", compared=False, compute=lambda sets: _manifolds(sets)[0], needs="pictures"
    ),
    "recall": Metric("recall", "higher", compared=False, compute=lambda sets: _manifolds(sets)[1], needs="pictures"),
    "kid": Metric(
        "KID",
        "lower",
        compute=lambda sets: sets.compare(kernel_distance, "KID", lambda n, m: n + 2 * m),
        needs="pictures",
    ),
    "label_agreement": Metric(
        "label_agreement",
        "higher",
        long="label agreement",
        curve=False,
        count="demo_samples",
        real_keys=("label_agreement_real",),
    ),
    "frechet_pixels": Metric(
        "frechet_pixels",
        "lower",
        long="Fréchet distance in pixels",
        curve=False,
        count="demo_samples",
        real_keys=("frechet_pixels_real",),
    ),
    "clip_score": Metric("CLIP score", "higher"),
}
METRICS |= {
    f"{part}_top{rank}{features}": Metric(
        f"{called}, top {rank}{by}",
        "higher",
        of="demo",
        compared=rank == 1 and not features,
        curve=False,
        count="demo_samples",
        real_keys=tuple(f"{part}_top{rank}{features}_{what}" for what in ("real", "shifted")),
    )
    for features, by in (("", ""), ("_inception", ", by Inception features"))
    for part, called in (("seen", "seen captions"), ("held", "held-out compositions"))
    for rank in (1, 5)
}
METRICS |= {
    "loss": Metric("training loss", "lower", of="training", compared=False, alike=("model.routes",)),
    "grad_norm": Metric("gradient norm, mean of the good steps", of="training", compared=False),
    "lr": Metric("learning rate", of="training", compared=False, log=False),
    "images_per_s": Metric("training speed", unit="images/s", of="training", compared=False, log=False),
}


def names_of(what: str) -> list[str]:
    """The metrics of "samples", "demo", "heldout" or "training", see `Metric.of`."""
    return [name for name, metric in METRICS.items() if metric.of == what]


def heldout_titles() -> dict[str, str]:
    """How losses on held-out data are called, by the names that `Process.evaluation` gives them."""
    return {name: METRICS[name].title for name in names_of("heldout")}


def feature_metrics() -> list[str]:
    """Those that are computed from Inception features."""
    return [name for name, metric in METRICS.items() if metric.compute]
