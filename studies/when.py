"""The figure of studies/when.yaml: how far a routed run is ahead of, or behind, the dense one by the same FLOPs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from studies.results import METRICS, Made, Results, at_flops, curve, mean_line, series
from studies.study import Study
from tread.drawing.charts import Panel, save_panels


def gap(dense: Sequence[Made], routed: Sequence[Made], metric: str) -> list[tuple[int, list[float]]]:
    """(images, routed less dense by seeds) where the dense run has passed the FLOPs of the routed one too."""
    others = {run["seed"]: curve(run, metric, "flops") for run in dense}
    routed, gaps = [run for run in routed if run["seed"] in others], []
    for point, values in series(routed, metric):
        levels = [at_flops(others[run["seed"]], point.get("flops", 0)) for run in routed]
        if None not in levels:
            gaps.append((point["images"], [value - level for value, level in zip(values, levels)]))
    return gaps


def columns(study: Study, results: Results) -> dict[str, dict[str, str]]:
    """From how many images on the routed run is ahead at equal FLOPs in the evaluation loss."""
    leads = {}
    for routed, dense in study.against.items():
        points = gap(results[dense], results[routed], "eval_loss")
        behind = [number for number, (_, values) in enumerate(points) if statistics.mean(values) >= 0]
        ahead = points[behind[-1] + 1 if behind else 0 :]
        if points:
            leads[routed] = f"{ahead[0][0]:,} images" if ahead else "not yet"
    return {"ahead at equal FLOPs from": leads}


def draw(study: Study, results: Results, path: Path) -> None:
    """A panel per metric: a line per condition, below 0 where routing is ahead."""
    panels = []
    for metric in study.figure.metrics:
        lines = []
        for routed, dense in study.against.items():
            if points := gap(results[dense], results[routed], metric):
                scaled = [(images / 1e3, values) for images, values in points]
                lines.append(mean_line(routed.partition(",")[0], scaled))
        if lines:
            title = f"{METRICS[metric].title}: routed less dense, by the same FLOPs"
            panels.append(Panel(title, "images the routed run has seen, thousands", "", lines, levels={"even": 0.0}))
    if panels:
        save_panels(path, panels, columns=len(panels))
