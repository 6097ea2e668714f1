"""A run's folder as it is found: finished, running, killed or damaged. What can't be read is said, and left out."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tread.checkpoints import checkpoint
from tread.reports.comparison import Compared
from tread.runtime.plugins import import_plugins
from tread.training.run_folder import RunLog, migrate, value_at

T = TypeVar("T")


@dataclass(frozen=True)
class Found(Compared):
    """A run, and what is left of it.

    config    of its last start, else of its newest checkpoint; {} if neither can be read.
    records   those that can be read, with the numbers in them that are finite.
    starts    of run.json, each with "step", "config", "versions" and "warnings".
    status    of status.json; {} if there is none.
    problems  what could not be read, for people.
    """

    starts: list[dict]
    status: dict
    problems: list[str]

    @property
    def step(self) -> int:
        """How far it has come, by what is there."""
        stated = self.status.get("step")
        return max([stated if isinstance(stated, int) else 0, *(record["step"] for record in self.records)])

    def state(self) -> str:
        """How it is with the run, for people."""
        state, reason = self.status.get("state"), self.status.get("reason")
        if state != "running":
            return " – ".join(str(part) for part in (state or "not known", reason) if part)
        host, pid, time = self.status.get("host"), self.status.get("pid"), told_time(self.status.get("time"))
        if host != platform.node() or not isinstance(pid, int):
            return f"running on {host}, by what it wrote last at {time}"
        return "running" if _alive(pid) else f"killed: process {pid} is gone without a word; it last wrote at {time}"


def told_time(stated: object) -> str | None:
    """A time of run.json or status.json for people."""
    return str(stated).replace("T", " ").replace("+00:00", " UTC") if stated else None


def find_run(folder: Path) -> Found:
    """What there is of a run. Raises FileNotFoundError if a folder holds nothing of one."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} {'is a file, no' if folder.exists() else 'does not exist: name a'} run's folder"
        )
    here = [name for name in ("run.json", "metrics.jsonl", "status.json") if (folder / name).exists()]
    if not here and not any(folder.glob("step_*/info.json")):
        raise FileNotFoundError(
            f"{folder} is no run's folder: it has neither run.json, metrics.jsonl and status.json nor a checkpoint"
        )
    log, problems = RunLog(folder), []

    def read(name: str, attempt: Callable[[], T], otherwise: T) -> T:
        try:
            return attempt()
        except (OSError, ValueError) as error:
            problems.append(f"{name} can't be read: {error}")
            return otherwise

    starts = [_typed(start) for start in read("run.json", log.starts, [])]
    status = read("status.json", log.read_status, {})
    records = read("metrics.jsonl", log.records, [])
    if not starts:
        damaged = "run.json" in here
        problems.append(
            f"run.json is {'damaged' if damaged else 'missing'}: its starts and their commands are not known"
        )
    if not status or not isinstance(status, dict):
        problems.append(
            f"status.json is {'damaged' if 'status.json' in here else 'missing'}: how the run ended is not known"
        )
    whole = [record for record in map(_cleaned, records) if record]
    if "metrics.jsonl" not in here:
        problems.append("metrics.jsonl is missing")
    elif lost := read("metrics.jsonl", lambda: _lines(log.metrics), len(whole)) - len(whole):
        problems.append(f"{lost} of {lost + len(whole)} lines of metrics.jsonl can't be read and are left out")
    if not whole:
        problems.append("nothing was logged")
    if starts:
        read("plugins", lambda: import_plugins(starts[-1]["config"].get("plugins", ())), None)
    config = _config_of(starts[-1]["config"]) if starts else {}
    newest, wrong = read("the newest checkpoint", lambda: _look_at_checkpoint(folder), ({}, None))
    if wrong:
        problems.append(wrong)
    if not config and (config := _config_of(newest.get("config"))):
        problems.append("its settings are those of the newest checkpoint")
    elif not config:
        problems.append("its settings are not known")
    return Found(folder, config, whole, starts, status if isinstance(status, dict) else {}, problems)


def _cleaned(record: object) -> dict | None:
    """A line's finite numbers, if it is one of ours."""
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    kinds = {key: value for key, value in record.items() if type(value) in (int, float)}
    return {key: value for key, value in kinds.items() if math.isfinite(value)}


def _typed(start: dict) -> dict:
    """A start, with nothing where something of another kind stands."""
    kinds = {"step": int, "config": dict, "versions": dict, "warnings": list}
    return start | {key: start[key] if isinstance(start.get(key), kind) else kind() for key, kind in kinds.items()}


def _lines(path: Path) -> int:
    return sum(bool(line.strip()) for line in path.read_text(errors="replace").splitlines())


def _config_of(config: object) -> dict:
    """A config by today's keys, if it holds what everything reads, of the kind that it should be; else {}."""
    try:
        known = migrate(config)
    except (TypeError, AttributeError):
        return {}
    needed = {"model.name": str, "train.steps": int, "train.batch_size": int, "dataset.name": str}
    return known if all(isinstance(value_at(known, key), kind) for key, kind in needed.items()) else {}


def _look_at_checkpoint(folder: Path) -> tuple[dict, str | None]:
    """The newest checkpoint's info, and what is wrong with it by the sizes of its files. Raises ValueError, OSError."""
    newest = checkpoint.newest(folder)
    if newest is None:
        return {}, "there is no checkpoint"
    source = checkpoint.find(newest)
    try:
        for name in source.info["files"]:
            source.check(name.removesuffix(".safetensors"))
    except ValueError as error:
        return source.info, str(error)
    return source.info, None


def _alive(pid: int) -> bool:
    """Whether this machine has such a process, and it is no zombie, as far as that can be told."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text(errors="replace").rpartition(")")[2].split()[:1] == ["Z"])
