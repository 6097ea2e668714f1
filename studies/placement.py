"""The map of studies/placement.yaml: a route's first block against its last."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from studies.results import METRICS, Made, last_values
from studies.study import Study
from tread.drawing.charts import save_heat_maps


def draw(study: Study, results: Mapping[str, list[Made]], path: Path) -> None:
    """A heat map for each metric of the difference to the dense arm, and one of training FLOPs over its."""
    places = {
        arm: tuple(map(int, match.groups())) for arm in results if (match := re.fullmatch(r"r\((\d+)→(\d+)\)", arm))
    }
    starts, ends = (sorted({place[i] for place in places.values()}) for i in (0, 1))

    def matrix(metric: str) -> np.ndarray:
        values = np.full((len(starts), len(ends)), np.nan)
        last = last_values(results, metric)
        dense = last.get("dense")
        for arm, (start, end) in places.items():
            if dense and arm in last:
                less = statistics.mean(last[arm]) - statistics.mean(dense)
                values[starts.index(start), ends.index(end)] = last[arm][0] / dense[0] if metric == "flops" else less
        return values

    maps = {metric: cells for metric in (*study.figure.metrics, "flops") if not np.isnan(cells := matrix(metric)).all()}
    titles = {metric: f"{METRICS[metric].title} less the dense one's" for metric in study.figure.metrics}
    shown = [(titles.get(metric, "training FLOPs over the dense one's"), cells) for metric, cells in maps.items()]
    if shown:
        labels = ("last block of the route", "first block of the route")
        save_heat_maps(path, dict(shown[:1]), dict(shown[1:]), ends, starts, labels)
