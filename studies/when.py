"""The figure of studies/when.yaml: how far a routed run is ahead of, or behind, the dense one by the same FLOPs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from studies.results import METRICS, Made, mean_line, series
from studies.study import Study
from tread.drawing.charts import Panel, save_panels


def gap(dense: Sequence[Made], routed: Sequence[Made], metric: str) -> list[tuple[dict, list[float]]]:
    """Routed less dense by seeds, at the points of the routed run whose FLOPs the dense one has passed too.

    Between its points the dense one's metric is taken from a line over the logarithm of FLOPs.
    """
    others = {run["seed"]: [p for p in run["points"] if metric in p and p.get("flops")] for run in dense}
    routed = [run for run in routed if len(others.get(run["seed"], ())) > 1]
    gaps = []
    for point, values in series(routed, metric):
        curves = [others[run["seed"]] for run in routed]
        if point.get("flops") and all(c[0]["flops"] <= point["flops"] <= c[-1]["flops"] for c in curves):
            place = math.log(point["flops"])
            levels = [np.interp(place, [math.log(p["flops"]) for p in c], [p[metric] for p in c]) for c in curves]
            gaps.append((point, [float(value - level) for value, level in zip(values, levels)]))
    return gaps


def columns(study: Study, results: Mapping[str, list[Made]]) -> dict[str, dict[str, str]]:
    """From how many images on the routed run is ahead at equal FLOPs in the evaluation loss, for the table."""
    leads = {}
    for routed, dense in study.against.items():
        points = gap(results[dense], results[routed], "eval_loss")
        behind = [number for number, (_, values) in enumerate(points) if statistics.mean(values) >= 0]
        first = behind[-1] + 1 if behind else 0
        if points:
            leads[routed] = "not yet" if first == len(points) else f"{points[first][0]['images']:,} images"
    return {"ahead at equal FLOPs from": leads}


def draw(study: Study, results: Mapping[str, list[Made]], path: Path) -> None:
    """A panel a metric: a line a condition, below 0 where routing is ahead."""
    panels = []
    for metric in study.figure.metrics:
        lines = []
        for routed, dense in study.against.items():
            gaps = gap(results[dense], results[routed], metric)
            if gaps:
                points = [(point["images"] / 1e3, values) for point, values in gaps]
                lines.append(mean_line(routed.partition(",")[0], points))
        if lines:
            title = f"{METRICS[metric].title}: routed less dense, by the same FLOPs"
            panels.append(Panel(title, "images the routed run has seen, thousands", "", lines, levels={"even": 0.0}))
    if panels:
        save_panels(path, panels, columns=len(panels))
