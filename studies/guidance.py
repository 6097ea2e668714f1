"""The figure of studies/guidance.yaml: scores against the guidance scale ω (Fig. S9), and against FLOPs per sample."""

from __future__ import annotations

import re
from pathlib import Path

from studies.results import METRICS, Results, last_values, mean_line
from studies.study import Study
from tread.drawing.charts import Panel, save_panels


def sampling_flops(results: Results) -> dict[str, float]:
    """Of the networks, for a sample, by arm."""
    return {arm: runs[0]["scores"][-1]["flops"] for arm, runs in results.items() if runs and runs[0]["scores"]}


def columns(study: Study, results: Results) -> dict[str, dict[str, str]]:
    return {"FLOPs a sample": {arm: f"{flops:.3g}" for arm, flops in sampling_flops(results).items()}}


def draw(study: Study, results: Results, path: Path) -> None:
    """For each metric a panel over ω, a line per network and kind; one over FLOPs, a point per arm."""
    flops, panels = sampling_flops(results), []
    for metric in study.figure.metrics:
        ends = last_values({arm: results[arm] for arm in flops}, metric)
        over_scale: dict[str, list[tuple[float, list[float]]]] = {}
        over_flops: dict[str, list[tuple[float, list[float]]]] = {}
        for arm, values in ends.items():
            network, guidance = arm.partition(", ")[::2]
            kind, scale = guidance.rpartition(" ")[::2]
            if re.fullmatch(r"[\d.]+", scale):
                unguided = [(1.0, ends[network])] if network in ends else []
                over_scale.setdefault(f"{network}, {kind}", unguided).append((float(scale), values))
            else:  # other steps alone
                kind = "no guidance"
            over_flops.setdefault(f"{network}, {kind}", []).append((flops[arm] / 1e9, values))
        labels = ("guidance scale ω (1: none)", "FLOPs of the networks a sample, 10^9")
        for label, lines in zip(labels, (over_scale, over_flops) if ends else ()):
            drawn = [mean_line(name, sorted(points)) for name, points in lines.items()]
            panels.append(Panel("", label, METRICS[metric].label, drawn))
    if panels:
        save_panels(path, panels, columns=2)
