"""The figure of studies/loss_gap.yaml: how far a routed training loss lies above the dense one (Fig. S10)."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from pathlib import Path

from results import METRICS, series
from study import Study

from tread.evaluation.curves import Line, Panel, save_panels

LAST = 0.2  # share of the training over whose end a training loss is averaged


def training_loss(runs: list[dict]) -> float | None:
    """The mean over the seeds and the last fifth of the training."""
    found = series(runs, "loss")
    end = found[-1][0]["images"] if found else 0
    values = [statistics.mean(values) for point, values in found if point["images"] > (1 - LAST) * end]
    return statistics.mean(values) if values else None


def draw(study: Study, results: Mapping[str, list[dict]], path: Path) -> None:
    """The gap against the blocks of the route, and each metric at the end against the gap."""
    dense = training_loss(results["dense"])
    routed = {}
    for arm, runs in results.items():
        found, loss = re.fullmatch(r"r\((\d+)→(\d+)\)", arm), training_loss(runs)
        if found and loss is not None and dense is not None:
            routed[arm] = int(found[2]) - int(found[1]) + 1, loss - dense
    label = "training loss above the dense one's"
    panels = (
        [Panel("", "blocks of the route", label, [Line("routes", *map(list, zip(*routed.values())))])] if routed else []
    )
    for metric in study.figure.metrics[1:]:
        ends = [(gap, series(results[arm], metric)) for arm, (_, gap) in routed.items()]
        points = [(gap, statistics.mean(found[-1][1])) for gap, found in ends if found]
        other = series(results["dense"], metric)
        if points and other:
            levels = {"dense": statistics.mean(other[-1][1])}
            panels.append(
                Panel("", label, METRICS[metric][0], [Line("routes", *map(list, zip(*points)))], levels=levels)
            )
    if panels:
        save_panels(path, panels, columns=2)
