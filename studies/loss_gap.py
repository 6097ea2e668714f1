"""The figure of studies/loss_gap.yaml: how far a routed training loss lies above the dense one (Fig. S10)."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from pathlib import Path

from studies.results import METRICS, Made, last_values, series, shown
from studies.study import Study
from tread.drawing.charts import Line, Panel, save_panels

LAST = 0.2  # share of the training over whose end a training loss is averaged


def training_loss(runs: list[Made]) -> float | None:
    """The mean over the seeds and the last fifth of the training, where a record counts by its steps."""
    points = series(runs, "loss")
    begun = (1 - LAST) * points[-1][0]["images"] if points else 0
    ends = [max(begun, point["images"]) for point, _ in points]
    weights = [end - before for before, end in zip([begun, *ends], ends)]  # images: the batch is one size
    return statistics.fmean((statistics.mean(values) for _, values in points), weights) if any(weights) else None


def gaps(results: Mapping[str, list[Made]]) -> dict[str, tuple[int, list[float]]]:
    """By arm: the blocks of its route, and how far its training loss lies above the dense one's, seed by seed."""
    dense = {run["seed"]: training_loss([run]) for run in results["dense"]}
    by_arm = {}
    for arm, runs in results.items():
        route = re.fullmatch(r"r\((\d+)→(\d+)\)", arm)
        pairs = [(training_loss([run]), dense.get(run["seed"])) for run in runs]
        less = [routed - other for routed, other in pairs if routed is not None and other is not None]
        if route and less:
            by_arm[arm] = int(route[2]) - int(route[1]) + 1, less
    return by_arm


def columns(study: Study, results: Mapping[str, list[Made]]) -> dict[str, dict[str, str]]:
    """The gap, for the table."""
    return {
        "training loss above the dense one's": {arm: shown(less, sign=True) for arm, (_, less) in gaps(results).items()}
    }


def draw(study: Study, results: Mapping[str, list[Made]], path: Path) -> None:
    """The gap against the blocks of the route, and each metric at the end against the gap."""
    mean_gaps = {arm: (blocks, statistics.mean(less)) for arm, (blocks, less) in gaps(results).items()}
    if not mean_gaps:
        return
    label = "training loss above the dense one's"
    panels = [Panel("", "blocks of the route", label, [Line("routes", *map(list, zip(*mean_gaps.values())))])]
    for metric in study.figure.metrics[1:]:
        means = {arm: statistics.mean(values) for arm, values in last_values(results, metric).items()}
        points = sorted((gap, means[arm]) for arm, (_, gap) in mean_gaps.items() if arm in means)
        if points and "dense" in means:
            levels, line = {"dense": means["dense"]}, Line("routes", *map(list, zip(*points)))
            panels.append(Panel("", label, METRICS[metric].title, [line], levels=levels))
    save_panels(path, panels, columns=2)
