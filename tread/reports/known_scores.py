"""Scores and sweeps in and around a run's folder, for people. What can't be read is named, and passed over."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass
from pathlib import Path

from tread.drawing.charts import Line, Panel
from tread.evaluation.metric_table import METRICS
from tread.evaluation.score_files import sampler_told

DEPTH = ("", "*/", "*/*/")  # how far below a run's folder scores are looked for


@dataclass(frozen=True)
class Score:
    """A scoring: `values` by the columns of fid.csv, and the notes of its fid.json.

    counts  metric → its number of samples, where that is not the scoring's.
    """

    values: dict
    counts: dict[str, int]
    notes: list[str]


@dataclass(frozen=True)
class Sweep:
    """The table of a guidance sweep.

    kind     what was swept, for people.
    without  the score without guidance; {} if it was not taken.
    """

    folder: Path
    rows: list[dict]
    kind: str
    without: dict


def find_scores(folder: Path) -> tuple[list[Score], list[str]]:
    """All scorings of a run by time, without those of its sweeps; and what could not be read."""
    scores, problems = {}, []
    swept = {path.parent for path in _below(folder, "sweep.csv")}
    for pattern in ("*fid*.json", "fid*.csv"):
        for path in _below(folder, pattern):
            for record in _read(path, problems) if not swept & {*path.parents} else ():
                settings, counts, lacks = (_section(record, key) for key in ("settings", "counts", "unavailable"))
                values = settings | record
                if pattern == "*fid*.json":
                    values["sampler"] = sampler_told(values)
                shift = str(values.get("sampler") or "").partition(", ")[2]  # a line of old code lacks the solver
                key = (str(values.get("time")), str(values.get("step")), shift)
                if path.suffix == ".csv" or counts:
                    counts = {name: n for name, n in counts.items() if isinstance(n, int) and n != record.get("count")}
                    notes = [f"{name} is unavailable: {why}" for name, why in lacks.items()]
                    warnings = record.get("warnings")
                    notes += map(str, warnings) if isinstance(warnings, list) else []
                    scores.setdefault(key, Score(values, counts, notes))
    return [scores[key] for key in sorted(scores)], problems


def find_sweeps(folder: Path, run: Path | None = None) -> tuple[list[Sweep], list[str]]:
    """Sweeps in a folder and below, and those beside it that were made from `run`; and what could not be read."""
    sweeps, problems = [], []
    beside = sorted(run.parent.glob("*/sweep.csv")) if run else ()
    for path in dict.fromkeys([*_below(folder, "sweep.csv"), *beside]):
        scored = [record for score in sorted(path.parent.glob("*/fid.json")) for record in _read(score, [])]
        made_from = {Path(str(record.get("checkpoint"))).resolve().parent for record in scored}
        if path in beside and folder not in path.parents and run.resolve() not in made_from:
            continue
        kinds = [str(_section(record, "settings").get("guidance", "")).partition(" ")[0] for record in scored]
        without = [record for record in _read(path.parent / "none" / "fid.json", []) if record]
        if rows := _read(path, problems):
            kind = next((f"guidance={kind}" for kind in kinds if kind not in ("", "none")), "")
            sweeps.append(Sweep(path.parent, rows, kind, without[0] if without else {}))
    return sweeps, problems


def curves_of(sweep: Sweep) -> list[Panel]:
    """Each metric against ω, a line for each pair of ratios and interval, and without guidance as a level."""
    panels = []
    for name, metric in METRICS.items():
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in sweep.rows:
            scale, value = _number(row.get("scale")), _number(row.get(name))
            if scale is not None and value is not None:
                lines.setdefault(_setting(row, sweep.rows), []).append((scale, value))
        if lines:
            drawn = [Line(setting, *zip(*sorted(points))) for setting, points in lines.items()]
            level = _number(sweep.without.get(name))
            counts = "/".join(dict.fromkeys(f"{_number(row.get('count')) or 0:,.0f}" for row in sweep.rows))
            levels = {} if level is None else {"no guidance": level}
            panels.append(Panel(f"{metric.label}, {counts} samples", "ω", metric.title, drawn, levels=levels))
    return panels


def _setting(row: dict, rows: list[dict]) -> str:
    """What tells a line of a sweep from the others: ratios if it has any, and interval; and its cost."""
    routed = any(_number(other.get(key)) for other in rows for key in ("strong", "weak"))
    same = [other for other in rows if all(other.get(key) == row.get(key) for key in ("strong", "weak", "interval"))]
    cost = max((_number(other.get("flops_relative")) or 0.0 for other in same), default=0.0)
    ratios = " and ".join(f"{_number(row.get(key)) or 0.0:g}" for key in ("strong", "weak"))
    interval = f"within {row['interval']}" if row.get("interval") else ""
    times = f"{cost:.2f} times the FLOPs" if cost else ""
    return ", ".join(filter(None, (f"ratios {ratios}" * routed, interval, times))) or "all noise levels"


def _below(folder: Path, pattern: str) -> list[Path]:
    return [path for depth in DEPTH for path in sorted(folder.glob(depth + pattern)) if "/latest/" not in f"{path}"]


def _read(path: Path, problems: list[str]) -> list[dict]:
    """The object of a .json, or the rows of a .csv without their empty cells; [] for what can't be read."""
    try:
        with path.open(newline="", errors="replace") as file:
            if path.suffix == ".csv":
                return [{k: v for k, v in row.items() if k and v} for row in csv.DictReader(file)]
            content = json.load(file)
    except (OSError, ValueError, csv.Error) as error:
        problems.append(f"{path} can't be read: {error}")
        return []
    return [content] if isinstance(content, dict) else []


def _section(record: dict, key: str) -> dict:
    return record[key] if isinstance(record.get(key), dict) else {}


def _number(value: object) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
