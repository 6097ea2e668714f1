"""Finds the results of a study's runs by a hash of each training, in a folder of results and in published results."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TypedDict

import numpy as np

from studies.study import HERE, Planned
from tread.evaluation.metric_table import METRICS


class Made(TypedDict):
    """The results so far of one run: an arm (kind of run) with one seed. Comments in the source explain fields."""

    seed: int
    points: list[dict]  # over training, each with images, FLOPs and metrics
    scores: list[dict]  # JSON of the scoring scripts
    trained: bool  # whether its training is finished
    timed_on: tuple | None  # device, number of runs that shared it; None: not known or varied, so don't compare seconds


Results = Mapping[str, list[Made]]  # arm → its runs


def finished(results: Path, again: bool = False) -> dict[str, dict]:
    """Return {training's hash: its parsed result.json} in the folder `results` and, unless `again`, published results.
    Of two, the folder's counts unless only the published one is fully trained. If "points" are equal, scores merge."""
    paths = () if again else sorted(HERE.glob("*/results.json"))
    published = [json.loads(path.read_text())["runs"].values() for path in paths]
    own = [json.loads(path.read_text()) for path in sorted(results.glob("*/*/*/result.json"))]
    known: dict[str, dict] = {}
    for record in (*chain(*published), *own):
        before = known.get(record["key"], {"scores": {}, "trained": False, "points": []})
        newer = before if before["trained"] and not record["trained"] else record
        merged = before["scores"] | record["scores"] if before["points"] == record["points"] else newer["scores"]
        known[record["key"]] = newer | {"scores": merged}
    return known


def is_made(run: Planned, made: Mapping[str, dict]) -> bool:
    """Return whether a run is trained and has its planned scores. `made` is {training's hash: its result.json}."""
    record = made.get(run.training.key, {"trained": False})
    reached = max((point["step"] for point in record.get("points", ())), default=0)
    due = [score for score in run.scores if run.training.is_scored_at(score.step, reached)]
    return record["trained"] and all(score.key in record["scores"] for score in due)


def missing(runs: Sequence[Planned], made: Mapping[str, dict]) -> str:
    """Return, as text, the arms and seeds whose runs are incomplete. `made` is {training's hash: its result.json}."""
    left = defaultdict(list)
    for run in runs:
        if not is_made(run, made):
            left[run.arm].append(str(run.training.seed))
    return "; ".join(f"{arm} (seed {', '.join(seeds)})" for arm, seeds in left.items())


def gather(runs: Sequence[Planned], made: Mapping[str, dict]) -> dict[str, list[Made]]:
    """Return {arm: its trained runs, scored or not; if none is trained, the run that got furthest}. A run that shares
    its training with an earlier arm counts only if fully scored. `made` is {training's hash: its result.json}."""
    results: dict[str, list[Made]] = {run.arm: [] for run in runs}
    shown: set[str] = set()  # keys of trainings
    for arm, each in results.items():
        begun = [run for run in runs if run.arm == arm and run.training.key in made]
        complete, new = [run for run in begun if is_made(run, made)], [r for r in begun if r.training.key not in shown]
        trained = [run for run in new if made[run.training.key]["trained"]]
        furthest = sorted(new, key=lambda run: len(made[run.training.key]["points"]))[-1:]
        most = max(complete, trained, key=len)  # a training that is not scored yet still shows its losses
        each += [found for run in most or furthest if (found := _made(run, made[run.training.key]))["points"]]
        shown.update(run.training.key for run in begun)
    return results


def _made(run: Planned, record: dict) -> Made:
    points = {point["step"]: dict(point) for point in record["points"]}
    scores = [record["scores"][score.key] for score in run.scores if score.key in record["scores"]]
    known = {
        axis: [(0, 0), *((step, point[axis]) for step, point in sorted(points.items()) if axis in point)]
        for axis in ("flops", "steady_seconds")
    }
    for score in scores:
        step = score["step"]
        point = {"step": step, "images": step * run.training.batch_size}
        for axis, counted in known.items():
            if counted[1:]:  # after the last record, where a time budget ended: extrapolated in proportion to steps
                beyond = max(1.0, step / counted[-1][0])
                point[axis] = round(beyond * float(np.interp(step, *zip(*counted))), 3)
        point |= points.get(step, {})
        numbers = {name: score.get(name) for name in METRICS}  # "precision" may also be a dtype, such as "bf16"
        points[step] = point | {name: each for name, each in numbers.items() if isinstance(each, int | float)}
    at_once, ordered = record.get("at_once", []), [points[step] for step in sorted(points)]
    timed_on = (record.get("device"), *at_once) if len(at_once) == 1 else None
    return Made(seed=record["seed"], points=ordered, scores=scores, trained=record["trained"], timed_on=timed_on)
