"""Comparisons in words and in panels: numbers with their spread and unit, what is not alike, who reaches whom."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from tread.evaluation.curves import Line, Panel
from tread.evaluation.heldout_loss import CALLED
from tread.runtime.schema import written
from tread.training.comparison import COMPARABLE, FAIR, OF_METRIC, Group, reached, unlike

CURVES = {**CALLED, "fid": "FID"}  # lower is better
COLUMNS = CURVES | {"label_agreement": "label agreement", "frechet_pixels": "Fréchet distance in pixels"}
COLUMNS |= {"seen_top1": "seen captions retrieved", "held_top1": "held-out compositions retrieved"}
AXES = {"step": "steps", "flops": "training FLOPs", "seconds": "training time"}
TIMES = {"hours": 3600.0, "minutes": 60.0, "seconds": 1.0}


def doubts(groups: Sequence[Group]) -> list[str]:
    """What a reader of the numbers should know: runs that are not at their end, and what is not alike."""
    found = []
    for run in (run for group in groups for run in group.runs):
        if (step := run.records[-1]["step"]) < run.config["train"]["steps"]:
            found.append(f"{run.folder} is at step {step:,} of {run.config['train']['steps']:,}")
        if run.config.get("objective") == "rf" and (old := [r["step"] for r in run.records if "eval_loss" in r]):
            found.append(
                f"{run.folder} has an evaluation loss up to step {old[-1]:,}, of older code: weighted as its training "
                "was, it is neither a velocity error nor the loss of edm"
            )

    def tell(those: Sequence[Group], keys: Sequence[str], follows: str | None = None) -> None:
        if apart := unlike(those, keys):
            found.extend(f"{key} differs: {told(values, those)}" for key, values in apart.items())
            found.extend(filter(None, [follows]))

    said = "not mean the same: none of them is said to reach another"
    tell(groups, COMPARABLE, f"numbers of runs that differ so do {said}")
    for metric, keys in OF_METRIC.items():
        if those := [group for group in groups if group.curve(metric)]:
            tell(those, keys, f"the {CURVES[metric]} of runs that differ so does {said}")
    tell(groups, FAIR)
    return list(dict.fromkeys(found))


def verdicts(groups: Sequence[Group]) -> list[str]:
    """Who reaches whom, in each metric; of many runs, each with the first one."""
    first = groups if len(groups) <= 4 else groups[:1]
    pairs = [(a, b) for a in groups for b in groups if a is not b and (a in first or b in first)]
    return [
        reach(one, other, metric, called)
        for metric, called in CURVES.items()
        for one, other in pairs
        if one.curve(metric) and other.curve(metric)
        if not unlike([one, other], (*COMPARABLE, *OF_METRIC.get(metric, ())))
    ]


def told(values: Sequence[object], groups: Sequence[Group]) -> str:
    """Each value once, with the groups that have it; of many groups the commonest value without them."""
    names: dict[str, list[str]] = {}
    for value, group in zip(values, groups):
        names.setdefault(written(value), []).append(group.name)
    most = max(names, key=lambda value: len(names[value]))
    others = {most: [f"{len(names[most])} runs"]} if len(names[most]) > 3 else {}
    return ", ".join(f"{value} ({', '.join(those)})" for value, those in {**names, **others}.items())


def reach(one: Group, other: Group, metric: str, called: str) -> str:
    """For people: when `one` first is where `other` ends."""
    goal, best = other.curve(metric)[-1], min(point.value for point in one.curve(metric))
    point, spread = reached(one, metric, goal.value), (goal.spread or 0) + (one.curve(metric)[-1].spread or 0)
    if point is None and best - goal.value < spread:
        return (
            f"{one.name} is level with {other.name} in {called}: {best:.4g} and {goal.value:.4g}, within their spread"
        )
    if point is None:
        return f"{one.name} does not reach the {called} {goal.value:.4g} of {other.name}: its best is {best:.4g}"
    text = f"{one.name} reaches the {called} {goal.value:.4g} of {other.name} by step {point.step:,} (of {goal.step:,})"
    if point.flops and goal.flops:
        text += f", with {point.flops:.3g} FLOPs, {ratio(point.flops, goal.flops)} {goal.flops:.3g}"
    if point.seconds and goal.seconds:
        name, size = unit("seconds", goal.seconds)
        text += (
            f", in {point.seconds / size:.3g} {name}, {ratio(point.seconds, goal.seconds)} {goal.seconds / size:.3g}"
        )
    return text


def ratio(own: float, other: float) -> str:
    return f"{own / other:.2f} times the other's"


def unit(axis: str, most: float) -> tuple[str, float]:
    """In what an axis up to `most` is told: its name, and its size in the units of the records."""
    if axis == "flops":
        power = int(math.log10(most)) // 3 * 3
        return f"10^{power}", 10.0**power
    return next((name, size) for name, size in TIMES.items() if most >= 2 * size or name == "seconds")


def number(values: Sequence[float]) -> str:
    """A mean to four digits, or to where its standard deviation begins."""
    if not values:
        return "–"
    mean, spread = statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0
    if not 1e-4 < spread < 1e4:
        return f"{mean:#.4g}".rstrip(".") if 1e-3 <= abs(mean) < 1e6 else f"{mean:.4g}"
    places = max(0, 1 - int(f"{spread:e}".partition("e")[2]))
    return f"{mean:.{places}f} ± {spread:.{places}f}"


def speed(group: Group) -> str:
    found = [[record["images_per_s"] for record in run.records if "images_per_s" in record] for run in group.runs]
    return number([statistics.median(values) for values in found if values])


def axes_of(groups: Sequence[Group], metrics: Sequence[str]) -> list[str]:
    """Against what some metrics can be drawn: runs of before FLOPs and seconds were told have steps alone."""
    points = [point for group in groups for metric in metrics for point in group.curve(metric)]
    return [axis for axis in AXES if any(getattr(point, axis) for point in points)]


def panel(groups: Sequence[Group], metric: str, axis: str, called: str | None = None) -> Panel:
    """A metric's curves against steps, FLOPs or time.

    called  the metric for people; None: as CURVES has it.
    """
    title, size, lines = AXES[axis], 1.0, []
    if axis != "step":
        most = max((getattr(point, axis) or 1 for group in groups for point in group.curve(metric)), default=1)
        name, size = unit(axis, most)
        title += f", {name}"
    for group in groups:
        points = [point for point in group.curve(metric) if getattr(point, axis)]
        spread = [point.spread for point in points] if all(point.spread for point in points) else None
        x = [getattr(point, axis) / size for point in points]
        lines.append(Line(group.name, x, [point.value for point in points], spread))
    called = called or CURVES[metric]
    return Panel(called, title, called, lines, log="y")
