"""Scores and sweeps in and around a run's folder, for people. What can't be read is named, and passed over."""

import csv
import json
import math
from pathlib import Path
from typing import NamedTuple

from tread.drawing.charts import Line, Panel
from tread.evaluation.metric_table import METRICS
from tread.evaluation.score_files import sampler_told

DEPTH = ("", "*/", "*/*/")  # how far below a run's folder scores are looked for


class Score(NamedTuple):
    """One scoring: `values` by fid.csv's columns, and the notes from its fid.json.

    counts  metric → its number of samples, where it differs from the scoring's.
    """

    values: dict
    counts: dict[str, int]
    notes: list[str]


class Sweep(NamedTuple):
    """A guidance sweep: the rows of sweep.csv, and the kind of guidance for people.

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
    for path in [*_below(folder, "*fid*.json"), *_below(folder, "fid*.csv")]:
        for record in _read(path, problems) if not swept & {*path.parents} else ():
            settings, counts, lacks = (_section(record, key) for key in ("settings", "counts", "unavailable"))
            values = settings | record
            if path.suffix == ".json":
                values["sampler"] = sampler_told(values)
            shift = str(values.get("sampler") or "").partition(", ")[2]  # a line of old code lacks the solver
            key = (str(values.get("time")), str(values.get("step")), shift)
            if path.suffix == ".csv" or counts:
                counts = {name: n for name, n in counts.items() if isinstance(n, int) and n != record.get("count")}
                warnings = record.get("warnings")
                notes = [f"{name} is unavailable: {why}" for name, why in lacks.items()]
                notes += map(str, warnings) if isinstance(warnings, list) else []
                scores.setdefault(key, Score(values, counts, notes))
    return [scores[key] for key in sorted(scores)], problems


def find_sweeps(folder: Path, beside: bool) -> tuple[list[Sweep], list[str]]:
    """The sweeps in a folder and, if asked, those beside it that were made from it; and what could not be read."""
    sweeps, problems = [], []
    below, others = _below(folder, "sweep.csv"), sorted(folder.parent.glob("*/sweep.csv")) if beside else []
    for path in dict.fromkeys([*below, *others]):
        scored = [record for score in sorted(path.parent.glob("*/fid.json")) for record in _read(score, [])]
        made_from = {Path(str(record.get("checkpoint"))).resolve().parent for record in scored}
        if path not in below and folder.resolve() not in made_from:
            continue
        kinds = [str(_section(record, "settings").get("guidance", "")).partition(" ")[0] for record in scored]
        if rows := _read(path, problems):
            kind = next((f"guidance={kind}" for kind in kinds if kind not in ("", "none")), "")
            without = _read(path.parent / "none" / "fid.json", []) or [{}]
            sweeps.append(Sweep(path.parent, rows, kind, without[0]))
    return sweeps, problems


def curves_of(table: list[dict], without: dict) -> list[Panel]:
    """Each metric of a sweep against ω, a line for each pair of ratios and interval, named by them and its cost.

    table    the rows of sweep.csv.
    without  the score without guidance, a level in each panel; {} if it was not taken.
    """
    settings: dict[tuple, list[dict]] = {}
    for row in table:
        numbers = {key: _number(value) for key, value in row.items()}
        ratios = [numbers.get(key) or 0.0 for key in ("strong", "weak")]
        settings.setdefault((*ratios, row.get("interval")), []).append(numbers)
    named = []
    for (strong, weak, interval), rows in settings.items():
        parts = [f"ratios {strong:g} and {weak:g}"] if any(max(key[:2]) for key in settings) else []
        parts += [f"within {interval}"] if interval else []
        cost = max(row.get("flops_relative") or 0.0 for row in rows)
        parts += [f"{cost:.2f} times the FLOPs"] if cost else []
        named.append((", ".join(parts) or "all noise levels", rows))
    panels = []
    counts = "/".join(dict.fromkeys(f"{_number(row.get('count')) or 0:,.0f}" for row in table))
    for name, metric in METRICS.items():
        lines = []
        for called, rows in named:
            points = [(row.get("scale"), row.get(name)) for row in rows]
            points = sorted(point for point in points if None not in point)
            lines += [Line(called, *zip(*points))] if points else []
        if lines:
            level = _number(without.get(name))
            levels = {} if level is None else {"no guidance": level}
            panels.append(Panel(f"{metric.label}, {counts} samples", "ω", metric.title, lines, levels=levels))
    return panels


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
