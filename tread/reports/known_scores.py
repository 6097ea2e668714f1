"""Scores and sweeps that lie in and around a run's folder, for people to look at: what can't be read is passed over
with a word."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tread.drawing.charts import Line, Panel
from tread.evaluation.metric_table import METRICS
from tread.evaluation.score_files import sampler_told

DEPTH = ("", "*/", "*/*/")  # how far below a run's folder scores are looked for


@dataclass(frozen=True)
class Score:
    """A scoring: `values` by the columns of fid.csv, the notes of its fid.json, and what each value is of.

    counts  metric → how many samples, where it is not the count of the scoring.
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
    """All scorings of a run by time, those of its sweeps left out; and what could not be read."""
    scores, problems = {}, []
    swept = {path.parent for path in _below(folder, "sweep.csv")}

    def new(path: Path) -> bool:
        return not swept & {path.parent, *path.parents}

    for path in filter(new, _below(folder, "*fid*.json")):
        record = _read_json(path, problems) or {}
        settings, counts, lacks = ({**_dict(record.get(key))} for key in ("settings", "counts", "unavailable"))
        if counts:
            values = {**settings, **record}
            values["sampler"] = sampler_told(values)
            notes = [f"{name} is unavailable: {why}" for name, why in lacks.items()]
            others = {name: n for name, n in counts.items() if isinstance(n, int) and n != record.get("count")}
            warnings = record["warnings"] if isinstance(record.get("warnings"), list) else []
            scores[_key(values)] = Score(values, others, [*notes, *map(str, warnings)])
    for path in filter(new, _below(folder, "fid*.csv")):
        for row in _read_csv(path, problems):
            scores.setdefault(_key(row), Score(row, {}, []))
    return sorted(scores.values(), key=lambda score: str(score.values.get("time"))), problems


def find_sweeps(folder: Path, run: Path | None = None) -> tuple[list[Sweep], list[str]]:
    """Sweeps in a folder and below; and those beside it that were made from `run`."""
    problems: list[str] = []
    paths = list(_below(folder, "sweep.csv"))
    if run is not None:
        paths += [path for path in sorted(run.parent.glob("*/sweep.csv")) if _is_of(path, run) and path not in paths]
    sweeps = []
    for path in paths:
        if rows := _read_csv(path, problems):
            baseline = path.parent / "none" / "fid.json"
            without = (_read_json(baseline, problems) or {}) if baseline.exists() else {}
            sweeps.append(Sweep(path.parent, rows, _kind(path.parent), without))
    return sweeps, problems


def _kind(folder: Path) -> str:
    """guidance=… of a sweep's settings, how many samples each drew and how, of which step."""
    for path in sorted(folder.glob("*scale*/fid.json"))[:1]:
        record = _read_json(path, []) or {}
        settings = _dict(record.get("settings"))
        settings |= {"sampler": sampler_told({**settings, **record})} if "sampler" in settings else {}
        guidance = str(settings.get("guidance", "")).partition(" ")[0]
        parts = [guidance and f"guidance={guidance}"]
        parts += [f"{key} {settings[key]}" for key in ("step", "sampler", "steps", "labels") if key in settings]
        return ", ".join(filter(None, parts))
    return ""


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
            title = f"{metric.label}, {counts} samples"
            levels = {} if level is None else {"no guidance": level}
            panels.append(Panel(title, "ω", metric.title, drawn, levels=levels))
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


def _is_of(path: Path, run: Path) -> bool:
    """Whether the settings of a sweep were scored with a checkpoint of a run."""
    read = (_read_json(score, []) or {} for score in sorted(path.parent.glob("*/fid.json")))
    stated = next((record["checkpoint"] for record in read if isinstance(record.get("checkpoint"), str)), None)
    return stated is not None and run.resolve() in Path(stated).resolve().parents


def _below(folder: Path, pattern: str) -> Iterable[Path]:
    return [path for depth in DEPTH for path in sorted(folder.glob(depth + pattern)) if "/latest/" not in f"{path}"]


def _key(values: dict) -> tuple[str, ...]:
    """What two descriptions of one scoring share: of the solver its shift alone."""
    shift = str(values.get("sampler") or "").partition(", ")[2]
    return (*(str(values.get(key) or "") for key in ("time", "step", "count", "guidance", "nfe")), shift)


def _read_json(path: Path, problems: list[str]) -> dict | None:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        problems.append(f"{path} can't be read: {error}")
        return None
    return content if isinstance(content, dict) else None


def _read_csv(path: Path, problems: list[str]) -> list[dict]:
    try:
        with path.open(newline="", errors="replace") as file:
            return [{k: v for k, v in row.items() if k and v} for row in csv.DictReader(file)]
    except (OSError, csv.Error) as error:
        problems.append(f"{path} can't be read: {error}")
        return []


def _dict(value: object) -> dict:
    return value if isinstance(value, dict) else {}


def _number(value: object) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
