"""The figure of studies/guidance.yaml: scores against the guidance scale ω (Fig. S9), and against FLOPs a sample."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from studies.results import METRICS, Made, last_values, mean_line
from studies.study import Study
from tread.drawing.charts import Panel, save_panels


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
        ends = last_values({arm: runs for arm, runs in results.items() if _scored(runs)}, metric)
        if not ends:
            continue
        by_scale: dict[str, dict[float, list[float]]] = {}
        by_flops: dict[str, list[tuple[float, list[float]]]] = {}
        for arm, values in ends.items():
            by_flops.setdefault(_kind(arm), []).append((sampling_flops(results[arm]) / 1e9, values))
            if match := re.fullmatch(r"(\w+), (\w+) ([\d.]+)", arm):
                line = by_scale.setdefault(f"{match[1]}, {match[2]}", {})
                line |= {1.0: ends[match[1]]} if match[1] in ends else {}
                line[float(match[3])] = values
        over_scale = [mean_line(name, sorted(points.items())) for name, points in by_scale.items()]
        over_flops = [mean_line(name, sorted(points)) for name, points in by_flops.items()]
        label = METRICS[metric].label
        panels.append(Panel("", "guidance scale ω (1: none)", label, over_scale))
        panels.append(Panel("", "FLOPs of the networks a sample, 10^9", label, over_flops))
    if panels:
        save_panels(path, panels, columns=2)


def _kind(arm: str) -> str:
    """An arm's name without its scale; steps alone are "no guidance"."""
    network, _, guidance = arm.partition(", ")
    return f"{network}, {'no guidance' if not guidance or 'steps' in guidance else guidance.rpartition(' ')[0]}"
