"""The figure of studies/loss_gap.yaml: how far a routed training loss lies above the dense one (Fig. S10)."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

from studies.results import METRICS, Made, Results, curve, last_values, shown
from studies.study import Study
from tread.drawing.charts import Line, Panel, save_panels

LAST = 0.2  # the fraction of the training over whose end a training loss is averaged
LABEL = "training loss above the dense one's"


def training_loss(run: Made) -> float | None:
    """The mean over the last fifth of the training, where a record counts by its steps; None without a record."""
    losses = curve(run, "loss", "images")
    ends = [max(images, (1 - LAST) * max(losses)) for images in losses]
    weights = [end - before for before, end in zip([(1 - LAST) * max(losses, default=0), *ends], ends)]
    return statistics.fmean(losses.values(), weights) if losses else None


def gaps(results: Results) -> dict[str, list[float]]:
    """By routed arm: how far its training loss lies above the dense one's, seed by seed."""
    dense = {run["seed"]: training_loss(run) for run in results["dense"]}
    by_arm = {}
    for arm, runs in results.items():
        pairs = [(training_loss(run), dense.get(run["seed"])) for run in runs if arm != "dense"]
        by_arm[arm] = [routed - other for routed, other in pairs if None not in (routed, other)]
    return {arm: less for arm, less in by_arm.items() if less}


def columns(study: Study, results: Results) -> dict[str, dict[str, str]]:
    return {LABEL: {arm: shown(less, sign=True) for arm, less in gaps(results).items()}}


def draw(study: Study, results: Results, path: Path) -> None:
    """The gap against the blocks of the route, and each metric at the end against the gap."""
    mean_gaps = {arm: statistics.mean(less) for arm, less in gaps(results).items()}
    if not mean_gaps:
        return
    places = [map(int, re.findall(r"\d+", arm)) for arm in mean_gaps]
    line = Line("routes", [end - start + 1 for start, end in places], [*mean_gaps.values()])
    panels = [Panel("", "blocks of the route", LABEL, [line])]
    for metric in study.figure.metrics[1:]:
        means = {arm: statistics.mean(values) for arm, values in last_values(results, metric).items()}
        points = sorted((gap, means[arm]) for arm, gap in mean_gaps.items() if arm in means)
        if points and "dense" in means:
            levels, line = {"dense": means["dense"]}, Line("routes", *map(list, zip(*points)))
            panels.append(Panel("", LABEL, METRICS[metric].title, [line], levels=levels))
    save_panels(path, panels, columns=2)
