"""The figure of studies/guidance.yaml: scores against the guidance scale ω (Fig. S9), and against FLOPs a sample."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path

from studies.results import METRICS, Made, series, standard_error
from studies.study import Study
from tread.drawing.charts import Line, Panel, save_panels


def sampling_flops(runs: list[Made]) -> float:
    """Of the networks, a sample."""
    return runs[0]["scores"][-1]["flops"]


def columns(study: Study, results: Mapping[str, list[Made]]) -> dict[str, dict[str, str]]:
    """FLOPs a sample, for the table."""
    return {"FLOPs a sample": {arm: f"{sampling_flops(runs):.3g}" for arm, runs in results.items() if _scored(runs)}}


def _scored(runs: list[Made]) -> bool:
    return bool(runs) and bool(runs[0]["scores"])


def draw(study: Study, results: Mapping[str, list[Made]], path: Path) -> None:
    """For each metric a panel over ω, a line a network and kind; one over FLOPs, a point an arm."""
    panels = []
    for metric in study.figure.metrics:
        ends = {arm: found[-1][1] for arm, runs in results.items() if _scored(runs) and (found := series(runs, metric))}
        if not ends:
            continue
        kinds: dict[str, dict[float, list[float]]] = {}
        for arm, values in ends.items():
            if found := re.fullmatch(r"(\w+), (\w+) ([\d.]+)", arm):
                line = kinds.setdefault(f"{found[1]}, {found[2]}", {})
                line |= {1.0: ends[found[1]]} if found[1] in ends else {}
                line[float(found[3])] = values
        over_scale = [_line(name, points.items()) for name, points in kinds.items()]
        over_flops = [
            _line(name, [(sampling_flops(results[arm]) / 1e9, ends[arm]) for arm in ends if _kind(arm) == name])
            for name in dict.fromkeys(map(_kind, ends))
        ]
        label = METRICS[metric].label
        panels.append(Panel("", "guidance scale ω (1: none)", label, over_scale))
        panels.append(Panel("", "FLOPs of the networks a sample, 10^9", label, over_flops))
    if panels:
        save_panels(path, panels, columns=2)


def _kind(arm: str) -> str:
    """An arm's name without its scale; steps alone are "no guidance"."""
    network, _, guidance = arm.partition(", ")
    return f"{network}, {'no guidance' if not guidance or 'steps' in guidance else guidance.rpartition(' ')[0]}"


def _line(name: str, points: Iterable[tuple[float, list[float]]]) -> Line:
    points = sorted(points)
    errors = [standard_error(values) for _, values in points]
    means = [statistics.mean(values) for _, values in points]
    return Line(name, [place for place, _ in points], means, None if None in errors else errors)
