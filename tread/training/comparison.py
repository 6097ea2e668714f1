"""Runs side by side: seeds put together, curves against steps, FLOPs and time, and what one needs to come as far as
another."""

from __future__ import annotations

import csv
import glob
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tread.runtime.files import explain_failure
from tread.training.run_folder import LAUNCH, RunLog, differences, migrate, value_at

APART = ("seed", "report", "tracker", "wandb", *LAUNCH)  # what the runs of one group may differ in
UNSAID = ("every", "sampling", "checkpoints", "tags")  # sections that no name of a group tells
# what evaluations and FIDs must share to mean the same; the other keys of these sections have no effect on them
COMPARABLE = ("dataset.name", "dataset.size", "dataset.heldout", "dataset.normalize", "objective")
COMPARABLE += ("eval.points", "eval.noise_levels", "eval.fid_samples", "eval.fid_reference")
# and what one of them must share beside: the velocity error is the same number for all densities and weights
OF_METRIC = {"eval_loss": ("edm", "rf"), "fid": ("edm", "rf.shift")}
FAIR = ("dataset.path", "optim", "ema", "rf", "train.batch_size", "train.steps")  # what may make a comparison unfair


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
class Group:
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
        found = [[record[metric] for record in run.records if metric in record] for run in self.runs]
        return [values[-1] for values in found if values]


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
        elif found := [folder for folder in map(Path, sorted(glob.glob(pattern))) if RunLog(folder).records()]:
            folders |= dict.fromkeys(found)
        else:
            raise FileNotFoundError(f"{pattern} names no run that has logged anything yet")
    if not folders:
        raise FileNotFoundError("name at least one run's folder, such as results/digits-tread or 'results/*'")
    return [*folders]


def open_groups(patterns: Sequence[str]) -> list[Group]:
    """Runs by folders or globs of them, grouped, in that order. Raises FileNotFoundError for a folder without a run."""
    runs = []
    for folder in folders_of(patterns):
        log = RunLog(folder)
        starts, records = log.starts(), log.records()
        if not starts or not records:
            what = "has logged nothing yet" if starts else "is no run's folder"
            raise FileNotFoundError(f"{folder} {what}")
        runs.append(Compared(folder, migrate(starts[-1]["config"]), records))
    return group_runs(runs)


def group_runs(runs: Sequence[Compared]) -> list[Group]:
    """Runs that differ by their seed alone put together, in their order, with names."""
    groups: dict[str, list[Compared]] = {}
    for run in runs:
        key = json.dumps({name: value for name, value in run.config.items() if name not in APART}, sort_keys=True)
        groups.setdefault(key, []).append(run)
    return [Group(name, those) for name, those in zip(_names(list(groups.values())), groups.values())]


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


def unlike(groups: Sequence[Group], keys: Sequence[str]) -> dict[str, list[object]]:
    """Of some keys or sections, the dotted keys that differ between groups → the value of each group."""
    first = groups[0].runs[0].config
    found = {key: None for group in groups for key in differences(first, group.runs[0].config)}
    chosen = [key for key in found if any(key == name or key.startswith(name + ".") for name in keys)]
    return {key: [value_at(group.runs[0].config, key) for group in groups] for key in chosen}


def reached(group: Group, metric: str, value: float) -> Point | None:
    """The first evaluated step at which a group's mean is at most a value; None: it never was."""
    return next((point for point in group.curve(metric) if point.value <= value), None)


def write_table(path: Path, groups: Sequence[Group], metrics: Sequence[str]) -> None:
    """A line for each record with a metric. Raises OSError."""
    columns = ["group", "run", "seed", "step", "seconds", "flops", *metrics]
    with explain_failure(path), path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        for group in groups:
            for run in group.runs:
                known = {"group": group.name, "run": run.folder, "seed": run.config.get("seed")}
                writer.writerows({**record, **known} for record in run.records if any(m in record for m in metrics))
