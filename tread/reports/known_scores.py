"""Finds the scores (fid.json, fid.csv) in a run's folder; files that can't be read are named and skipped."""

import csv
import json
from pathlib import Path
from typing import NamedTuple

from tread.evaluation.score_files import sampler_told

DEPTH = ("", "*/", "*/*/")  # folders below a run's folder that are searched for scores
SWEPT = ("none", "scale", "strong")  # how the folders of a sweep's settings, beside its sweep.csv, begin


class Score(NamedTuple):
    """One scoring of samples. `values` are settings and metrics, keyed by fid.csv's columns. `counts` is {metric:
    number of samples} where that is not values["count"]. `notes` are warnings, and reasons for missing metrics."""

    values: dict
    counts: dict[str, int]
    notes: list[str]


def find_scores(folder: Path) -> tuple[list[Score], list[str]]:
    """Return a run's scores, sorted by time and without those of guidance sweeps, and messages on unreadable files."""
    scores, problems = {}, []
    found = [
        path for name in ("*fid*.json", "fid*.csv") for depth in DEPTH for path in sorted(folder.glob(depth + name))
    ]
    for path in found:
        swept = path.parent.name.startswith(SWEPT) and (path.parents[1] / "sweep.csv").exists()
        for record in () if swept or "latest" in path.relative_to(folder).parts else _read(path, problems):
            given = (record.get(key) for key in ("settings", "counts", "unavailable"))
            settings, counts, lacks = (value if isinstance(value, dict) else {} for value in given)
            values = settings | record
            if path.suffix == ".json":
                values["sampler"] = sampler_told(values)
            shift = str(values.get("sampler") or "").partition(", ")[2]  # older code wrote no solver
            key = (str(values.get("time")), str(values.get("step")), shift)
            if path.suffix == ".csv" or counts:
                counts = {name: n for name, n in counts.items() if isinstance(n, int) and n != record.get("count")}
                warnings = record.get("warnings")
                notes = [f"{name} is unavailable: {why}" for name, why in lacks.items()]
                notes += map(str, warnings) if isinstance(warnings, list) else []
                scores.setdefault(key, Score(values, counts, notes))
    return [scores[key] for key in sorted(scores)], problems


def _read(path: Path, problems: list[str]) -> list[dict]:
    """Return a .json's object in a list, or a .csv's rows. If it is unreadable, return [] and tell `problems` why."""
    try:
        with path.open(newline="", errors="replace") as file:
            records = csv.DictReader(file) if path.suffix == ".csv" else [json.load(file)]
            return [{k: v for k, v in one.items() if k} for one in records if isinstance(one, dict)]
    except (OSError, ValueError, csv.Error) as error:
        problems.append(f"{path} can't be read: {error}")
        return []
