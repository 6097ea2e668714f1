"""The map of studies/placement.yaml: a route's first block against its last."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from studies.results import METRICS, Made, series
from studies.study import Study
from tread.drawing.charts import save_heat_maps


def draw(study: Study, results: Mapping[str, list[Made]], path: Path) -> None:
    """A heat map for each metric of the difference to the dense arm, and one of training FLOPs over its."""
    places = {
        arm: tuple(map(int, found.groups())) for arm in results if (found := re.fullmatch(r"r\((\d+)→(\d+)\)", arm))
    }
    starts, ends = (sorted({place[i] for place in places.values()}) for i in (0, 1))

    def matrix(metric: str) -> np.ndarray:
        found = np.full((len(starts), len(ends)), np.nan)
        dense = series(results["dense"], metric)
        for arm, (start, end) in places.items():
            if dense and (own := series(results[arm], metric)):
                less = statistics.mean(own[-1][1]) - statistics.mean(dense[-1][1])
                if metric == "flops":
                    less = own[-1][1][0] / dense[-1][1][0]
                found[starts.index(start), ends.index(end)] = less
        return found

    maps = {metric: found for metric in (*study.figure.metrics, "flops") if not np.isnan(found := matrix(metric)).all()}
    titles = {metric: f"{METRICS[metric].title} less the dense one's" for metric in study.figure.metrics}
    shown = [(titles.get(metric, "training FLOPs over the dense one's"), found) for metric, found in maps.items()]
    if shown:
        labels = ("last block of the route", "first block of the route")
        save_heat_maps(path, dict(shown[:1]), dict(shown[1:]), ends, starts, labels)
