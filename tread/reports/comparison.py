"""Compares runs: means over seeds, curves against steps, FLOPs and time, and when one run reaches another's result."""

import csv
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tread.checkpoints.run_log import differences, value_at
from tread.drawing.charts import Line, Panel
from tread.evaluation.metric_table import METRICS
from tread.reports.runs import HELDOUT, Found, find_run, folders_of
from tread.runtime.files import explain_failure
from tread.runtime.schema import written
from tread.training.run_folder import LAUNCH

APART = ("seed", "report", "tracker", "wandb", *LAUNCH)  # settings in which runs of a SeedGroup may differ
UNSAID = ("every", "sampling", "checkpoints", "tags")  # sections that groups' names and cautions leave out
# evaluations and FIDs are comparable only if these are equal; other keys of their sections don't affect them
COMPARABLE = ("dataset.name", "dataset.size", "dataset.heldout", "dataset.normalize", "objective")
COMPARABLE += ("eval.points", "eval.noise_levels", "eval.fid_samples", "eval.fid_reference", HELDOUT)
FAIR = ("dataset.path", "optim", "ema", "rf", "train.batch_size", "train.steps")  # differences may be unfair
AXES = {"step": "steps", "flops": "FLOPs", "seconds": "time"}
TIMES = {"hours": 3600.0, "minutes": 60.0, "seconds": 1.0}


class Point(NamedTuple):
    """A point of a metric's curve: its `value`, and `flops` and `seconds` since the start of training, as means over
    seeds (None if a seed lacks them); `spread` is the standard deviation of `value` (None for one seed)."""

    step: int
    value: float
    spread: float | None
    flops: float | None
    seconds: float | None


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ only in their seed and other settings in APART, under a unique name."""

    name: str
    runs: Sequence[Found]

    @property
    def config(self) -> dict:
        return self.runs[0].config

    def curve(self, metric: str) -> list[Point]:
        """Return a metric's points (mean and spread over the seeds) at the steps where all seeds have it."""
        each = [{r["step"]: r for r in run.records if metric in r} for run in self.runs]
        points = []
        for step in each[0]:
            if len(records := [series[step] for series in each if step in series]) == len(each):
                spread = statistics.stdev(record[metric] for record in records) if len(each) > 1 else None
                known = [[r[key] for r in records if key in r] for key in (metric, "flops", "seconds")]
                mean, *costs = (sum(values) / len(each) if len(values) == len(each) else None for values in known)
                points.append(Point(step, mean, spread, *costs))
        return points

    def last(self, metric: str) -> list[float]:
        """Return the last value of a metric in each run that has the metric."""
        return [value for run in self.runs if (value := run.last(metric)) is not None]


def open_groups(patterns: Sequence[str]) -> list[SeedGroup]:
    """Open runs, given as folders or glob patterns, and group them as group_runs does. Raises FileNotFoundError
    if a pattern matches no run, or if a run's settings or metrics can't be read."""
    runs = [find_run(folder) for folder in folders_of(patterns)]
    for run in runs:
        if not run.config or not run.records:
            raise FileNotFoundError(f"{run.folder} can't be compared: {'; '.join(run.problems)}")
    return group_runs(runs)


def group_runs(runs: Sequence[Found]) -> list[SeedGroup]:
    """Group runs that differ only in settings of APART (seed, logging, launch). Name the groups, and keep the order."""
    groups: dict[str, list[Found]] = {}
    for run in runs:
        alike = {name: value for name, value in run.config.items() if name not in (*APART, HELDOUT)}
        key = json.dumps(alike, sort_keys=True)
        groups.setdefault(key, []).append(run)
    split = []
    for members in groups.values():
        held = [*dict.fromkeys(run.config.get(HELDOUT) for run in members)]
        apart = len({*held} - {None}) > 1  # else a run that records no held-out files counts as having the others'
        split += [[run for run in members if run.config.get(HELDOUT) == each] for each in held] if apart else [members]
    return [SeedGroup(name, members) for name, members in zip(_names(split), split)]


def _names(groups: list[list[Found]]) -> list[str]:
    """Name groups by model and settings that differ among its groups, or by a folder if that is long or not unique."""
    configs, folders = [runs[0].config for runs in groups], [runs[0].folder for runs in groups]
    names = []
    for config in configs:
        alike = [other for other in configs if other["model"]["name"] == config["model"]["name"]]
        keys = [key for key in unlike(alike) if key not in APART and key.partition(".")[0] not in UNSAID]
        parts = [f"{key.rpartition('.')[2]} {value_at(config, key)}" for key in keys]
        names.append(", ".join([config["model"]["name"], *parts]))
    plain = [folder.name for folder in folders]
    plain = [str(folder) if plain.count(folder.name) > 1 else folder.name for folder in folders]
    return [other if len(name) >= 60 or names.count(name) > 1 else name for name, other in zip(names, plain)]


def unlike(configs: Sequence[dict], keys: Sequence[str] = ()) -> dict[str, list[object]]:
    """Return {dotted key: each config's value or None} of settings that differ, among `keys` (or sections) if given.
    HELDOUT, the held-out files' hash, counts only if all have it."""
    differing = {key: None for config in configs for key in differences(configs[0], config)}
    chosen = [key for key in differing if not keys or any(f"{key}.".startswith(f"{name}.") for name in keys)]
    values = {key: [value_at(config, key) for config in configs] for key in chosen}
    return {key: each for key, each in values.items() if key != HELDOUT or None not in each}


def write_table(path: Path, groups: Sequence[SeedGroup], metrics: Sequence[str]) -> None:
    """Write a .csv: a row (seed, step, …) per run and step that has one of `metrics`. Raises OSError if that fails."""
    columns = ["group", "run", "seed", "step", "seconds", "flops", *metrics]
    with explain_failure(path), path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        for group in groups:
            for run in group.runs:
                known = {"group": group.name, "run": run.folder, "seed": run.config.get("seed")}
                writer.writerows({**record, **known} for record in run.records if any(m in record for m in metrics))


def results_table(groups: Sequence[SeedGroup]) -> tuple[list[str], list[list[str]]]:
    """Return (titles, rows): per group its name, number of runs, steps, metrics (mean of last values), images/s, …"""
    metrics = column_metrics(groups)
    name, size = unit("seconds", max((s for group in groups for s in group.last("seconds")), default=0))
    rows = []
    for group in groups:
        cells = []
        for metric in metrics:
            counts = sorted({f"{count:,.0f}" for count in group.last(METRICS[metric].count)})
            cells.append(number(group.last(metric)) + (f" of {'/'.join(counts)}" if counts else ""))
        speeds = [[record["images_per_s"] for record in run.records if "images_per_s" in record] for run in group.runs]
        cells.append(number([statistics.median(values) for values in speeds if values]))
        cells += [number([s / size for s in group.last("seconds")]), number(group.last("flops"))]
        rows.append([group.name, str(len(group.runs)), f"{min(run.step for run in group.runs):,}", *cells])
    return ["run", "seeds", "steps", *(METRICS[m].title for m in metrics), "images/s", name, "FLOPs"], rows


def column_metrics(groups: Sequence[SeedGroup]) -> list[str]:
    """Return the METRICS keys with a table column (Metric.compared) for which at least one group has a value."""
    return [name for name, metric in METRICS.items() if metric.compared and any(group.last(name) for group in groups)]


def curve_metrics(groups: Sequence[SeedGroup]) -> list[str]:
    """Return the names in column_metrics that training measures repeatedly and for which a group has a curve."""
    return [m for m in column_metrics(groups) if METRICS[m].curve and any(group.curve(m) for group in groups)]


def cautions(groups: Sequence[SeedGroup]) -> list[str]:
    """Return warnings on groups whose runs share a seed or differ in code, and on settings in which groups differ."""
    warnings = []
    for group in groups:
        if len(seeds := {run.config.get("seed") for run in group.runs}) < len(group.runs):
            warnings.append(f"{group.name}: {len(group.runs)} runs of {len(seeds)} seeds: ± is not that of seeds")
        if len(codes := {str(run.starts[-1]["versions"].get("git")) for run in group.runs if run.starts}) > 1:
            warnings.append(f"{group.name}: its runs are of different code: {', '.join(sorted(codes))}")

    def tell(groups: Sequence[SeedGroup], keys: Sequence[str], follows: str = "") -> None:
        apart = unlike([group.config for group in groups], keys)
        for key, values in apart.items():
            each = [f"{written(value)} ({group.name})" for value, group in zip(values, groups)]
            warnings.append(f"{key} differs: {', '.join(each)}")
        if apart and follows:
            warnings.append(follows)

    unsaid = "not mean the same: no two such runs are said to reach each other's"
    tell(groups, COMPARABLE, f"numbers of runs that differ so do {unsaid}")
    for metric in column_metrics(groups):
        if METRICS[metric].alike:
            having = [group for group in groups if group.last(metric)]
            tell(having, METRICS[metric].alike, f"the {METRICS[metric].title} of runs that differ so does {unsaid}")
    tell(groups, ("plugins",), "where a plugin changes the loss, losses of runs that differ so do not mean the same")
    tell(groups, FAIR)
    models = [group.config["model"] for group in groups]
    by_model = ("model.name", "model.routes") if len({model["name"] for model in models}) > 1 else ()
    plain = tuple(f"{name}." for name in ("name", "text.vocabulary", *by_model, *APART, *UNSAID))
    for key, values in unlike([group.config for group in groups]).items():
        named = all(f"{key.rpartition('.')[2]} {value}" in group.name for value, group in zip(values, groups))
        of_all = not key.startswith("model.") or all(key.split(".")[1] in model for model in models)
        if of_all and not named and not f"{key}.".startswith(plain):
            tell(groups, (key,))
    return list(dict.fromkeys(warnings))


def verdicts(groups: Sequence[SeedGroup]) -> list[str]:
    """Return what `reach` says for each metric and ordered pair of groups whose settings let the metric be compared.
    With more than four groups, only pairs with the first group are taken."""
    pairs = [pair for pair in itertools.permutations(groups, 2) if len(groups) <= 4 or groups[0] in pair]
    return [
        reach(run, other, metric)
        for metric in curve_metrics(groups)
        if METRICS[metric].better
        for run, other in pairs
        if run.curve(metric) and other.curve(metric)
        if not unlike([run.config, other.config], (*COMPARABLE, *METRICS[metric].alike))
    ]


def reach(run: SeedGroup, other: SeedGroup, metric: str) -> str:
    """Return a sentence: whether `run` reaches the last value of `other`; if so, when first, in steps, FLOPs, time."""
    called, better = METRICS[metric].title, METRICS[metric].best
    curve, goal = run.curve(metric), other.curve(metric)[-1]
    best, spread = better(point.value for point in curve), (goal.spread or 0) + (curve[-1].spread or 0)
    point = next((point for point in curve if better(point.value, goal.value) == point.value), None)
    if point is None and abs(best - goal.value) < spread:
        both = f"{best:.4g} and {goal.value:.4g}"
        return f"{run.name} is level with {other.name} in {called}: {both}, within their spread"
    if point is None:
        return f"{run.name} does not reach the {called} {goal.value:.4g} of {other.name}: its best is {best:.4g}"
    text = f"{run.name} reaches the {called} {goal.value:.4g} of {other.name} by step {point.step:,}"
    text += f", {point.step / goal.step:.2f} times the other's {goal.step:,}"
    if point.flops and goal.flops:
        text += f", with {point.flops:.3g} FLOPs, {point.flops / goal.flops:.2f} times the other's {goal.flops:.3g}"
    if point.seconds and goal.seconds:
        name, size = unit("seconds", goal.seconds)
        times = f"{point.seconds / goal.seconds:.2f} times the other's"
        text += f", in {point.seconds / size:.3g} {name}, {times} {goal.seconds / size:.3g}"
    return text


def unit(axis: str, most: float) -> tuple[str, float]:
    """Choose a unit for values up to `most` on the axis "flops" or "seconds": (name, size), such as ("10^18", 1e18)."""
    if axis == "flops":
        power = int(math.log10(most)) // 3 * 3
        return f"10^{power}", 10.0**power
    return next((name, size) for name, size in TIMES.items() if most >= 2 * size or name == "seconds")


def number(values: Sequence[float]) -> str:
    """Format values as "mean ± deviation"; one value, or a deviation outside 1e-4..1e4: the mean alone; none: "–"."""
    if not values:
        return "–"
    mean, spread = statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0
    if not 1e-4 < spread < 1e4:
        return f"{mean:#.4g}".rstrip(".") if 1e-3 <= abs(mean) < 1e6 else f"{mean:.4g}"
    places = max(0, 1 - int(f"{spread:e}".partition("e")[2]))
    return f"{mean:.{places}f} ± {spread:.{places}f}"


def charts(groups: Sequence[SeedGroup], metrics: Sequence[str]) -> list[dict[str, Panel]]:
    """Return {x-axis: panel} for each metric. x-axes are "steps" and, if records have them, "FLOPs" and "time"."""
    points = [point for group in groups for metric in metrics for point in group.curve(metric)]
    axes = {name: axis for axis, name in AXES.items() if any(getattr(point, axis) for point in points)}
    return [{name: panel(groups, metric, axis) for name, axis in axes.items()} for metric in metrics]


def panel(groups: Sequence[SeedGroup], metric: str, axis: str) -> Panel:
    """Return a chart of a metric against `axis`, "step", "flops" or "seconds". Curves of runs in which tokens skip
    blocks are dashed if this metric can't be compared with that of other runs."""
    known, title, size, lines = METRICS[metric], AXES[axis], 1.0, []
    drawn = [group for group in groups if group.curve(metric)]
    curves = [[point for point in group.curve(metric) if getattr(point, axis)] for group in drawn]
    if axis != "step":
        name, size = unit(axis, max((getattr(point, axis) for curve in curves for point in curve), default=1))
        title = f"training {title}, {name}"
    for group, curve in zip(drawn, curves):
        x, y, spread = ([getattr(point, key) for point in curve] for key in (axis, "value", "spread"))
        dashed = "model.routes" in known.alike and bool(value_at(group.config, "model.routes"))
        dashed = dashed and value_at(group.config, "train.routes_until") != 0
        lines.append(Line(group.name, [value / size for value in x], y, None if None in spread else spread, dashed))
    label = ", ".join(filter(None, (known.title, known.unit)))
    note = ", with routes (dashed): not comparable to runs without" * any(line.dashed for line in lines)
    return Panel(label + note, title, label, lines, log="y" * (known.log and any(line.y for line in lines)))
