"""The map of studies/placement.yaml: a route's first block against its last."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import numpy as np

from studies.results import METRICS, Results, last_values
from studies.study import Study
from tread.drawing.charts import save_heat_maps


def draw(study: Study, results: Results, path: Path) -> None:
    """A heat map per metric of the difference to the dense arm, and one of training FLOPs over the dense arm's."""
    places = {arm: tuple(map(int, re.findall(r"\d+", arm))) for arm in results if arm != "dense"}
    starts, ends = (sorted(set(each)) for each in zip(*places.values()))
    maps = {}
    for metric in (*study.figure.metrics, "flops"):
        means = {arm: statistics.mean(values) for arm, values in last_values(results, metric).items()}
        dense, cells = means.pop("dense", None), np.full((len(starts), len(ends)), np.nan)
        for arm, value in means.items() if dense else ():
            start, end = places[arm]
            cells[starts.index(start), ends.index(end)] = value / dense if metric == "flops" else value - dense
        if metric == "flops":
            title = "training FLOPs over the dense one's"
        else:
            title = f"{METRICS[metric].title} less the dense one's"
        maps |= {} if np.isnan(cells).all() else {title: cells}
    if maps:
        (first, cells), *others = maps.items()
        labels = ("last block of the route", "first block of the route")
        save_heat_maps(path, {first: cells}, dict(others), ends, starts, labels)
