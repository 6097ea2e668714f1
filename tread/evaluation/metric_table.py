"""The table of all metrics: their names, which direction is better, and the functions that compute FID and the like.

To add a metric, add a line `METRICS["mine"] = Metric("my metric", "lower")` here or in a file of your own. Scoring,
records, figures and tables look metrics up here when they run; the order of METRICS is the order of tables' columns."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from routing_module import Table
from tread.evaluation.metrics import NEIGHBOURS, frechet_distance, inception_score, kernel_distance, precision_recall
from tread.evaluation.reference import FeatureSets


@dataclass(frozen=True)
class Metric:
    """A number that fid.json or metrics.jsonl stores under a key.

    display   name in narrow tables.
    better    direction of better values; None: neither.
    unit      unit of the values, for axes.
    long      name where there is room; "": the same as display.
    of        "samples": measured on samples, by fid.py and maybe in training; "demo": likewise, for dataset=emoji only;
              "heldout": a loss on held-out data in training, to compare runs by; "training": logged every few steps.
    compared  whether tables that compare runs have a column for the metric.
    curve     False: training measures it only once, at the end, so no curve is drawn.
    log       whether its axis is logarithmic.
    alike     settings that must be equal for two runs' values to be comparable, besides those common to all metrics.
    count     key under which training records the number of samples behind a value; "": none.
    real      suffixes: each, added to the metric's key, gives the key of the same metric for real pictures.
    compute   function that computes it from a FeatureSets; None: it is not computed from Inception features.
    needs     what `compute` uses of the reference set of pictures: its "statistics" or "pictures"; None: nothing.
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
        """Title, unit and direction for an axis: "FID, lower is better"."""
        return ", ".join(filter(None, (self.title, self.unit, self.better and f"{self.better} is better")))

    @property
    def arrow(self) -> str:
        """The direction of better values, " ↓" or " ↑"; "" if `better` is None."""
        return {"lower": " ↓", "higher": " ↑", None: ""}[self.better]

    @property
    def best(self) -> Callable:
        """The function that picks the best of several values: max if higher ones are better, else min."""
        return max if self.better == "higher" else min


def _manifold(number: int) -> Callable[[FeatureSets], float]:
    return lambda sets: sets.compare(precision_recall, "precision and recall", (2, 2), more_than=NEIGHBOURS)[number]


DRAWN = ("edm.sigma_min", "edm.sigma_max", "edm.rho", "rf.shift")  # settings of a run that its samples depend on
DRAWN += ("sampling.steps", "sampling.solver", "sampling.autoencoder")
_judged = functools.partial(Metric, curve=False, alike=DRAWN, count="demo_samples")
_log = functools.partial(Metric, of="training", compared=False)
METRICS = Table(Metric, {
    "eval_loss": Metric("evaluation loss", "lower", of="heldout", alike=("edm", "rf")),
    "eval_velocity": Metric("velocity error", "lower", of="heldout"),  # independent of time density and weights
    "fid": Metric("FID", "lower", alike=DRAWN, count="fid_samples",
                  compute=lambda sets: frechet_distance(*sets.gaussians("pool")), needs="statistics"),
    "sfid": Metric("sFID", "lower", compared=False,
                   compute=lambda sets: frechet_distance(*sets.gaussians("spatial")), needs="statistics"),
    "inception_score": Metric("Inception Score", "higher", compared=False,
                              compute=lambda sets: inception_score(sets.probabilities())),
    "precision": Metric("precision", "higher", compared=False, compute=_manifold(0), needs="pictures"),
    "recall": Metric("recall", "higher", compared=False, compute=_manifold(1), needs="pictures"),
    "kid": Metric("KID", "lower", compute=lambda sets: sets.compare(kernel_distance, "KID", (1, 2)), needs="pictures"),
    "label_agreement": _judged("label_agreement", "higher", long="label agreement", real=("_real",)),
    "frechet_pixels": _judged("frechet_pixels", "lower", long="Fréchet distance in pixels", real=("_real",)),
    "clip_score": Metric("CLIP score", "higher"),
    **{
        f"{part}_top{rank}{features}": _judged(
            f"{part}_top{rank}{features}", "higher", long=f"{called}, top {rank}{by}", of="demo",
            compared=rank == 1 and not features, real=("_real", "_shifted"),
        )
        for features, by in (("", ""), ("_inception", ", by Inception features"))
        for part, called in (("seen", "seen captions"), ("held", "held-out compositions"))
        for rank in (1, 5)
    },
    "loss": _log("training loss", "lower", alike=("model.routes",)),
    "grad_norm": _log("gradient norm, mean of the good steps"),
    "lr": _log("learning rate", log=False),
    "images_per_s": _log("training speed", unit="images/s", log=False),
})  # fmt: skip


def with_real(names: Iterable[str]) -> list[str]:
    """Return the metrics' keys `names`, each followed by the same metric's keys for real pictures (see Metric.real)."""
    return [name + end for name in names for end in ("", *METRICS[name].real)]


def names_of(what: str) -> list[str]:
    """Return the keys of the metrics whose field `of` is `what`: "samples", "demo", "heldout" or "training"."""
    return [name for name, metric in METRICS.items() if metric.of == what]


def scored_names(record: Mapping) -> list[str]:
    """Return the metrics to list for `record`, fid.json's content: all of "samples", then those of "demo" in it."""
    return names_of("samples") + [name for name in names_of("demo") if name in record]


def heldout_titles() -> dict[str, str]:
    """Return {key: title} of the losses on held-out data, such as "eval_loss"."""
    return {name: METRICS[name].title for name in names_of("heldout")}


def feature_metrics() -> list[str]:
    """Return the keys of the metrics that are computed from Inception features."""
    return [name for name, metric in METRICS.items() if metric.compute]
