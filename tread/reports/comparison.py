"""Runs side by side: seeds put together, curves against steps, FLOPs and time, and what one needs to come as far as
another; in words and in panels, with spread and unit.
"""

from __future__ import annotations

import csv
import glob
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tread.drawing.charts import Line, Panel
from tread.evaluation.metric_table import METRICS
from tread.runtime.files import explain_failure
from tread.runtime.plugins import import_plugins
from tread.runtime.schema import written
from tread.training.run_folder import LAUNCH, RunLog, differences, migrate, value_at

APART = ("seed", "report", "tracker", "wandb", *LAUNCH)  # what the runs of one group may differ in
UNSAID = ("every", "sampling", "checkpoints", "tags")  # sections that no name of a group tells
# what evaluations and FIDs must share to mean the same; the other keys of these sections have no effect on them
COMPARABLE = ("dataset.name", "dataset.size", "dataset.heldout", "dataset.normalize", "objective")
COMPARABLE += ("eval.points", "eval.noise_levels", "eval.fid_samples", "eval.fid_reference")
FAIR = ("dataset.path", "optim", "ema", "rf", "train.batch_size", "train.steps")  # what may make a comparison unfair
AXES = {"step": "steps", "flops": "training FLOPs", "seconds": "training time"}
TIMES = {"hours": 3600.0, "minutes": 60.0, "seconds": 1.0}


@dataclass(frozen=True)
class Compared:
    """A run as far as it has come.

    config   of its last start.
    records  of metrics.jsonl. Each has "step" and, of the training up to then, "seconds" and "flops".
    """

    folder: Path
    config: dict
    records: list[dict]


@dataclass(frozen=True)
class Point:
    """The runs of a group at one step: means over the seeds, and the standard deviation of `value` (None of one)."""

    step: int
    value: float
    spread: float | None
    flops: float | None
    seconds: float | None


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ by their seed alone, under a name that tells them from the other groups."""

    name: str
    runs: Sequence[Compared]

    def curve(self, metric: str) -> list[Point]:
        """A metric at the steps that all seeds have it at."""
        each = [{r["step"]: r for r in run.records if metric in r} for run in self.runs]
        return [
            _point(step, metric, [series[step] for series in each])
            for step in each[0]
            if all(step in series for series in each)
        ]

    def last(self, metric: str) -> list[float]:
        """A metric's last value of each run that has it."""
        series = [[record[metric] for record in run.records if metric in record] for run in self.runs]
        return [values[-1] for values in series if values]


def _point(step: int, metric: str, records: list[dict]) -> Point:
    if len(records) == 1:  # of one there is no mean, which is slow
        (record,) = records
        return Point(step, record[metric], None, record.get("flops"), record.get("seconds"))
    values = [record[metric] for record in records]
    spent = {
        key: statistics.mean(r[key] for r in records) if all(key in r for r in records) else None
        for key in ("flops", "seconds")
    }
    return Point(step, statistics.mean(values), statistics.stdev(values), **spent)


def folders_of(patterns: Sequence[str]) -> list[Path]:
    """Folders by their names or globs of them (what is no run's folder is passed over in a glob), each once.

    Raises FileNotFoundError for a glob without a run, or if nothing is named.
    """
    folders: dict[Path, None] = {}
    for pattern in patterns:
        if not glob.has_magic(pattern):
            folders[Path(pattern)] = None
        elif matching := [folder for folder in map(Path, sorted(glob.glob(pattern))) if RunLog(folder).records()]:
            folders |= dict.fromkeys(matching)
        else:
            raise FileNotFoundError(f"{pattern} names no run that has logged anything yet")
    if not folders:
        raise FileNotFoundError("name at least one run's folder, such as results/digits-tread or 'results/*'")
    return [*folders]


def open_groups(patterns: Sequence[str]) -> list[SeedGroup]:
    """Runs by folders or globs of them, grouped, in that order. Raises FileNotFoundError for a folder without a run."""
    runs = []
    for folder in folders_of(patterns):
        log = RunLog(folder)
        starts, records = log.starts(), log.records()
        if not starts or not records:
            what = "has logged nothing yet" if starts else "is no run's folder"
            raise FileNotFoundError(f"{folder} {what}")
        import_plugins(starts[-1]["config"].get("plugins", ()))  # whose metrics and architectures it may have
        runs.append(Compared(folder, migrate(starts[-1]["config"]), records))
    return group_runs(runs)


def group_runs(runs: Sequence[Compared]) -> list[SeedGroup]:
    """Runs that differ by their seed alone put together, in their order, with names."""
    groups: dict[str, list[Compared]] = {}
    for run in runs:
        key = json.dumps({name: value for name, value in run.config.items() if name not in APART}, sort_keys=True)
        groups.setdefault(key, []).append(run)
    return [SeedGroup(name, those) for name, those in zip(_names(list(groups.values())), groups.values())]


def _names(groups: list[list[Compared]]) -> list[str]:
    """The model's name, with the settings that tell it from another of that name; else the first run's folder."""
    configs = [runs[0].config for runs in groups]
    differing = {key: None for config in configs for key in differences(configs[0], config) if key not in APART}
    differing = [key for key in differing if key.partition(".")[0] not in UNSAID]
    names = []
    for config in configs:
        same_model = [other for other in configs if other["model"]["name"] == config["model"]["name"]]
        telling = [key for key in differing if len({json.dumps(value_at(other, key)) for other in same_model}) > 1]
        parts = [f"{key.rpartition('.')[2]} {value_at(config, key)}" for key in telling]
        names.append(", ".join([config["model"]["name"], *parts]))
    folders = [runs[0].folder.name for runs in groups]
    folders = [str(runs[0].folder) if folders.count(name) > 1 else name for name, runs in zip(folders, groups)]
    unclear = [len(name) >= 60 or names.count(name) > 1 for name in names]
    return [folder if other else name for name, folder, other in zip(names, folders, unclear)]


def unlike(groups: Sequence[SeedGroup], keys: Sequence[str]) -> dict[str, list[object]]:
    """Of some keys or sections, the dotted keys that differ between groups → the value of each group."""
    first = groups[0].runs[0].config
    differing = {key: None for group in groups for key in differences(first, group.runs[0].config)}
    chosen = [key for key in differing if any(key == name or key.startswith(name + ".") for name in keys)]
    return {key: [value_at(group.runs[0].config, key) for group in groups] for key in chosen}


def reached(group: SeedGroup, metric: str, value: float) -> Point | None:
    """The first evaluated step at which a group's mean is a value or better; None: it never was."""
    best = METRICS[metric].best
    return next((point for point in group.curve(metric) if best(point.value, value) == point.value), None)


def write_table(path: Path, groups: Sequence[SeedGroup], metrics: Sequence[str]) -> None:
    """A line for each record with a metric. Raises OSError."""
    columns = ["group", "run", "seed", "step", "seconds", "flops", *metrics]
    with explain_failure(path), path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        for group in groups:
            for run in group.runs:
                known = {"group": group.name, "run": run.folder, "seed": run.config.get("seed")}
                writer.writerows({**record, **known} for record in run.records if any(m in record for m in metrics))


def column_metrics(groups: Sequence[SeedGroup]) -> list[str]:
    """The metrics by which runs are compared, as far as any group has them."""
    return [name for name, metric in METRICS.items() if metric.compared and any(group.last(name) for group in groups)]


def curve_metrics(groups: Sequence[SeedGroup]) -> list[str]:
    """Those of them that are measured again and again in a training."""
    return [m for m in column_metrics(groups) if METRICS[m].curve and any(group.curve(m) for group in groups)]


def cautions(groups: Sequence[SeedGroup]) -> list[str]:
    """What a reader of the numbers should know: runs that are not at their end, and what is not alike."""
    warnings = []
    for run in (run for group in groups for run in group.runs):
        if (step := run.records[-1]["step"]) < run.config["train"]["steps"]:
            warnings.append(f"{run.folder} is at step {step:,} of {run.config['train']['steps']:,}")
        if run.config.get("objective") == "rf" and (old := [r["step"] for r in run.records if "eval_loss" in r]):
            warnings.append(
                f"{run.folder} has an evaluation loss up to step {old[-1]:,}, of older code: weighted as its training "
                "was, it is neither a velocity error nor the loss of edm"
            )

    def tell(those: Sequence[SeedGroup], keys: Sequence[str], follows: str | None = None) -> None:
        if apart := unlike(those, keys):
            warnings.extend(f"{key} differs: {told(values, those)}" for key, values in apart.items())
            warnings.extend(filter(None, [follows]))

    said = "not mean the same: none of them is said to reach another"
    tell(groups, COMPARABLE, f"numbers of runs that differ so do {said}")
    for metric in curve_metrics(groups):
        having = [group for group in groups if group.curve(metric)]
        tell(having, METRICS[metric].alike, f"the {METRICS[metric].title} of runs that differ so does {said}")
    tell(groups, FAIR)
    return list(dict.fromkeys(warnings))


def verdicts(groups: Sequence[SeedGroup]) -> list[str]:
    """Who reaches whom, in each metric; of many runs, each with the first one."""
    first = groups if len(groups) <= 4 else groups[:1]
    pairs = [(a, b) for a in groups for b in groups if a is not b and (a in first or b in first)]
    return [
        reach(run, other, metric)
        for metric in curve_metrics(groups)
        if METRICS[metric].better
        for run, other in pairs
        if run.curve(metric) and other.curve(metric)
        if not unlike([run, other], (*COMPARABLE, *METRICS[metric].alike))
    ]


def told(values: Sequence[object], groups: Sequence[SeedGroup]) -> str:
    """Each value once, with the groups that have it; of many groups the commonest value without them."""
    names: dict[str, list[str]] = {}
    for value, group in zip(values, groups):
        names.setdefault(written(value), []).append(group.name)
    most = max(names, key=lambda value: len(names[value]))
    others = {most: [f"{len(names[most])} runs"]} if len(names[most]) > 3 else {}
    return ", ".join(f"{value} ({', '.join(those)})" for value, those in {**names, **others}.items())


def reach(run: SeedGroup, other: SeedGroup, metric: str) -> str:
    """For people: when `one` first is where `other` ends."""
    goal, called = other.curve(metric)[-1], METRICS[metric].title
    best = METRICS[metric].best(point.value for point in run.curve(metric))
    point, spread = reached(run, metric, goal.value), (goal.spread or 0) + (run.curve(metric)[-1].spread or 0)
    if point is None and abs(best - goal.value) < spread:
        return (
            f"{run.name} is level with {other.name} in {called}: {best:.4g} and {goal.value:.4g}, within their spread"
        )
    if point is None:
        return f"{run.name} does not reach the {called} {goal.value:.4g} of {other.name}: its best is {best:.4g}"
    text = f"{run.name} reaches the {called} {goal.value:.4g} of {other.name} by step {point.step:,} (of {goal.step:,})"
    if point.flops and goal.flops:
        text += f", with {point.flops:.3g} FLOPs, {point.flops / goal.flops:.2f} times the other's {goal.flops:.3g}"
    if point.seconds and goal.seconds:
        name, size = unit("seconds", goal.seconds)
        times = f"{point.seconds / goal.seconds:.2f} times the other's"
        text += f", in {point.seconds / size:.3g} {name}, {times} {goal.seconds / size:.3g}"
    return text


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


def speed(group: SeedGroup) -> str:
    speeds = [[record["images_per_s"] for record in run.records if "images_per_s" in record] for run in group.runs]
    return number([statistics.median(values) for values in speeds if values])


def axes_of(groups: Sequence[SeedGroup], metrics: Sequence[str]) -> list[str]:
    """Against what some metrics can be drawn: runs of before FLOPs and seconds were told have steps alone."""
    points = [point for group in groups for metric in metrics for point in group.curve(metric)]
    return [axis for axis in AXES if any(getattr(point, axis) for point in points)]


def panel(groups: Sequence[SeedGroup], metric: str, axis: str) -> Panel:
    """A metric's curves against steps, FLOPs or time."""
    known, title, size, lines = METRICS[metric], AXES[axis], 1.0, []
    if axis != "step":
        most = max((getattr(point, axis) or 1 for group in groups for point in group.curve(metric)), default=1)
        name, size = unit(axis, most)
        title += f", {name}"
    for group in groups:
        points = [point for point in group.curve(metric) if getattr(point, axis)]
        spread = [point.spread for point in points] if all(point.spread for point in points) else None
        x = [getattr(point, axis) / size for point in points]
        lines.append(Line(group.name, x, [point.value for point in points], spread))
    label = ", ".join(filter(None, (known.title, known.unit)))
    return Panel(label, title, label, lines, log="y" * known.log)
