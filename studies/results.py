"""What a study's runs came to: results found by their keys, and how arms compare."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np

from studies.study import HERE, Planned, Study
from tread.evaluation.metric_table import METRICS


class Made(TypedDict):
    """An arm with one seed, as far as it has come: points over training, each with images, FLOPs and metrics."""

    seed: int
    points: list[dict]
    scores: list[dict]


Results = Mapping[str, list[Made]]  # by arm


def finished(results: Path) -> dict[str, dict]:
    """Records of trainings by key: what is published, and what lies below a folder of results."""
    published = [json.loads(path.read_text())["runs"] for path in sorted(HERE.glob("*/results.json"))]
    records = [record for runs in published for record in runs.values()]
    records += [json.loads(path.read_text()) for path in sorted(results.glob("*/*/*/result.json"))]
    known: dict[str, dict] = {}
    for record in records:
        before = known.get(record["key"], {"scores": {}, "trained": False})
        newer = before if before["trained"] and not record["trained"] else record
        known[record["key"]] = newer | {"scores": before["scores"] | record["scores"]}
    return known


def is_made(run: Planned, made: Mapping[str, dict]) -> bool:
    """Whether it is trained, and scored in all ways that are wanted."""
    record = made.get(run.training.key, {"trained": False})
    return record["trained"] and all(score.key in record["scores"] for score in run.scores)


def missing(runs: Sequence[Planned], made: Mapping[str, dict]) -> str:
    """The arms and seeds that are not made yet; "" if none."""
    left: dict[str, list[str]] = {}
    for run in runs:
        if not is_made(run, made):
            left.setdefault(run.arm, []).append(str(run.training.seed))
    return "; ".join(f"{arm} (seed {', '.join(seeds)})" for arm, seeds in left.items())


def gather(runs: Sequence[Planned], made: Mapping[str, dict]) -> dict[str, list[Made]]:
    """Results by arm: its complete runs or, while there is none, the one that has come furthest."""
    results: dict[str, list[Made]] = {run.arm: [] for run in runs}
    for arm, each in results.items():
        begun = [run for run in runs if run.arm == arm and run.training.key in made]
        complete = [run for run in begun if is_made(run, made)]
        furthest = sorted(begun, key=lambda run: len(made[run.training.key]["points"]))[-1:]
        each += [_made(run, made[run.training.key]) for run in complete or furthest]
    return results


def _made(run: Planned, record: dict) -> Made:
    points = {point["step"]: dict(point) for point in record["points"]}
    scores = [record["scores"][score.key] for score in run.scores if score.key in record["scores"]]
    counted = [(0, 0), *((step, point["flops"]) for step, point in sorted(points.items()) if "flops" in point)]
    for score in scores:
        step, values = score["step"], {name: score[name] for name in METRICS if score.get(name) is not None}
        flops = {"flops": round(float(np.interp(step, *zip(*counted))))} if counted[1:] else {}
        images = {"step": step, "images": step * run.training.batch_size}
        points[step] = images | flops | points.get(step, {}) | values
    return Made(seed=record["seed"], points=[points[step] for step in sorted(points)], scores=scores)


def curve(run: Made, metric: str, axis: str) -> dict[float, float]:
    """A metric over images or FLOPs."""
    return {point[axis]: point[metric] for point in run["points"] if metric in point and point.get(axis)}


def series(runs: Sequence[Made], metric: str) -> list[tuple[dict, list[float]]]:
    """The points that all runs have with a metric: (the first run's point, the values)."""
    curves = [curve(run, metric, "images") for run in runs]
    points = runs[0]["points"] if runs else []
    shared = [point for point in points if all(point["images"] in each for each in curves)]
    return [(point, [each[point["images"]] for each in curves]) for point in shared]


def last_values(results: Results, metric: str) -> dict[str, list[float]]:
    """By arm: the values at the last point at which all its runs have a metric; arms without one are left out."""
    return {arm: points[-1][1] for arm, runs in results.items() if (points := series(runs, metric))}


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean; None for a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def at_equal_images(run: Made, other: Made, metric: str) -> float | None:
    """How much larger one run's metric is than another's, at the last number of images at which both have it."""
    both = series([run, other], metric)
    return both[-1][1][0] - both[-1][1][1] if both else None


def at_equal_flops(run: Made, other: Made, metric: str) -> float | None:
    """… at the last training FLOPs that both reach."""
    curves = [curve(made, metric, "flops") for made in (run, other)]
    place = min(max(each, default=0) for each in curves)
    here, there = (at_flops(each, place) for each in curves)
    return None if None in (here, there) else here - there


def at_flops(values: Mapping[float, float], place: float) -> float | None:
    """A metric after so many FLOPs, on a straight line over their logarithm; None outside of the curve."""
    within = len(values) > 1 and min(values) <= place <= max(values)
    return float(np.interp(math.log(place), [*map(math.log, values)], [*values.values()])) if within else None


def differences(study: Study, results: Results, arm: str, metric: str, by: Callable = at_equal_images) -> list[float]:
    """An arm's metric less that of the arm it is compared with, seed by seed: same data order, same noise."""
    others = {run["seed"]: run for run in results.get(study.against.get(arm), ())}
    pairs = [(run, others[run["seed"]]) for run in results[arm] if run["seed"] in others]
    return [less for run, other in pairs if (less := by(run, other, metric)) is not None]


def shown(values: Sequence[float], sign: bool = False) -> str:
    """A mean, with its standard error where there are several values."""
    if not values:
        return "–"
    mean, error, plus = statistics.mean(values), standard_error(values), "+" if sign else ""
    if error is None:
        return f"{mean:{plus}.5g}"
    places = max(0, 1 - math.floor(math.log10(error))) if error > 0 else 4
    return f"{mean:{plus}.{places}f} ± {error:.{places}f}"
