"""Finds scores (fid.json, fid.csv) in a run's folder and below; unreadable files are skipped and named in messages."""

import csv
import json
from pathlib import Path
from typing import NamedTuple

from tread.evaluation.score_files import sampler_told

DEPTH = ("", "*/", "*/*/")  # folders below a run's folder that are searched for scores


class Score(NamedTuple):
    """Scores of one set of samples. `values` are settings and metrics, keyed by fid.csv's columns. `counts` is {metric:
    number of samples} where it differs from values["count"]. `notes` are warnings, and reasons for missing metrics."""

    values: dict
    counts: dict[str, int]
    notes: list[str]


def find_scores(folder: Path) -> tuple[list[Score], list[str]]:
    """Return a run's scores in order of time, without those of guidance sweeps, and messages on unreadable files."""
    scores, problems = {}, []
    swept = {path.parent for path in _below(folder, "sweep.csv")}
    for path in [*_below(folder, "*fid*.json"), *_below(folder, "fid*.csv")]:
        for record in _read(path, problems) if not swept & {*path.parents} else ():
            given = (record.get(key) for key in ("settings", "counts", "unavailable"))
            settings, counts, lacks = (value if isinstance(value, dict) else {} for value in given)
            values = settings | record
            if path.suffix == ".json":
                values["sampler"] = sampler_told(values)
            shift = str(values.get("sampler") or "").partition(", ")[2]  # older code wrote no solver
            told = ("time", "step", "guidance", "weights", "labels", "first_seed", "count")
            key = (*("" if values.get(name) is None else str(values[name]) for name in told), shift)
            if path.suffix == ".csv" or counts:
                counts = {name: n for name, n in counts.items() if isinstance(n, int) and n != record.get("count")}
                warnings = record.get("warnings")
                notes = [f"{name} is unavailable: {why}" for name, why in lacks.items()]
                notes += map(str, warnings) if isinstance(warnings, list) else []
                scores.setdefault(key, Score(values, counts, notes))
    return [scores[key] for key in sorted(scores)], problems


def _below(folder: Path, pattern: str) -> list[Path]:
    found = [path for depth in DEPTH for path in sorted(folder.glob(depth + pattern))]
    return [path for path in found if "latest" not in path.relative_to(folder).parts]


def _read(path: Path, problems: list[str]) -> list[dict]:
    """Return a .json's object in a list, or a .csv's rows. If unreadable, return [] and add the error to `problems`."""
    try:
        with path.open(newline="", errors="replace") as file:
            if path.suffix == ".csv":
                return [{k: v for k, v in row.items() if k and v} for row in csv.DictReader(file)]
            content = json.load(file)
    except (OSError, ValueError, csv.Error) as error:
        problems.append(f"{path} can't be read: {error}")
        return []
    return [content] if isinstance(content, dict) else []
