"""Reads and writes a run's run.json (an entry per start or resume), status.json and metrics.jsonl; compares configs."""

import contextlib
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from tread.checkpoints.checkpoint import newest, sweep
from tread.runtime.files import Lock, write_json, write_whole
from tread.runtime.plugins import plugin_hashes
from tread.runtime.schema import written
from tread.runtime.versions import now, versions


def differences(before: dict, now: dict, prefix: str = "", nothing: object = None) -> dict[str, tuple[object, object]]:
    """Return {dotted key: (before, now)} for values that differ between nested dicts; `nothing` stands for a missing
    value, `prefix` is put before each key. Lists of dicts are compared item by item: model.routes.0.selection_ratio."""
    changed = {}
    for key in {**before, **now}:
        old, new = before.get(key, nothing), now.get(key, nothing)
        inside = [_by_number(value) for value in (old, new)]
        if None not in inside:
            changed |= differences(*inside, f"{prefix}{key}.", nothing)
        elif old != new:
            changed[prefix + key] = (old, new)
    return changed


def check_alike(configs: Sequence[dict]) -> None:
    """Raise ValueError if `configs`, one per process of distributed training, differ in more than train.cpu_threads."""
    for rank, config in enumerate(configs):
        for key, (first, other) in differences(configs[0], config).items():
            if key != "train.cpu_threads":
                said = f"{key} is {written(first)} in process 0, but {written(other)} in process {rank}"
                raise ValueError(f"{said}: all processes need the same settings, and must share `results` and data")


def _by_number(value: object) -> dict | None:
    """Return a dict as it is, a list of dicts as a dict with keys "0", "1", …, and None for anything else."""
    if isinstance(value, (list, tuple)) and all(isinstance(item, dict) for item in value):
        return {str(number): item for number, item in enumerate(value)}
    return value if isinstance(value, dict) else None


def value_at(config: dict, key: str) -> object:
    """Return the value of a dotted key in a nested dict; None if it is missing."""
    for part in key.split("."):
        config = (_by_number(config) or {}).get(part)
    return config


class RunLog:
    """A run's metrics.jsonl, run.json and status.json. The main process writes them; others only write failures
    to status.json. Create the RunLog before reading the folder: `start` raises if a process has trained there since."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.metrics, self._lock = folder, folder / "metrics.jsonl", None
        self._seen = self._state()

    def _state(self) -> tuple[int, Path | None]:
        """Return the number of starts and the newest checkpoint's path, if any. They change when a process trains."""
        checkpoint = newest(self.folder)
        return len(self.starts()), checkpoint and checkpoint.resolve()

    def starts(self) -> list[dict]:
        """Return run.json: a dict for each start (time, step, command, versions, config); [] if missing or damaged."""
        starts = self._read("run.json")
        starts = starts if isinstance(starts, list) else []
        return [start for start in starts if isinstance(start, dict) and "config" in start]

    def start(self, step: int, config: dict, **facts: object) -> None:
        """Lock the folder, and append a start at step `step`, with `config` and `facts`, to run.json. Drop the metrics
        of later steps, which will be trained again, and temporary files of killed processes. Set status "running".
        Raises FileExistsError if another process uses the folder, or has trained in it since this RunLog was made."""
        self.versions = versions()  # now: the code on disk may change later
        self.folder.mkdir(parents=True, exist_ok=True)
        busy = f"another process is training in {self.folder}; name=… starts another run"
        self._lock = Lock(self.folder / ".lock", busy)
        if self._state() != self._seen:
            raise FileExistsError(f"another process trained in {self.folder} while this one was starting; start again")
        if plugins := config.get("plugins"):
            facts["plugins"] = plugin_hashes(plugins)
        start = {"time": now(), "step": step, "command": sys.argv, **facts, "versions": self.versions, "config": config}
        write_json(self.folder / "run.json", [*self.starts(), start])
        kept = [record for record in self.records() if record["step"] <= step]
        write_whole(self.metrics, "".join(json.dumps(record) + "\n" for record in kept))
        sweep(self.folder)
        for leftover in self.folder.glob(".*.json*.partial"):
            leftover.unlink(missing_ok=True)
        self.status("running", step)

    def status(self, state: str, step: int, reason: str | None = None, **facts: object) -> None:
        """Write status.json: `state` (running, interrupted, finished or failed), steps done, reason, other `facts`.
        Only "running" replaces a recorded failure, since later failures of other processes follow from the first."""
        if state == "running" or self.read_status().get("state") != "failed":
            who = {"host": platform.node(), "pid": os.getpid()}
            content = {"state": state, "step": step, "reason": reason, "time": now(), **who, **facts}
            try:
                write_json(self.folder / "status.json", content)
            except OSError:  # overwriting needs no room on a full disk
                (self.folder / "status.json").write_text(json.dumps(content, indent=1) + "\n")

    def read_status(self) -> dict:
        """Return the content of status.json; {} if it is missing, empty or holds no JSON object."""
        status = self._read("status.json")
        return status if isinstance(status, dict) else {}

    def _read(self, name: str) -> list | dict | None:
        try:
            return json.loads((self.folder / name).read_text())
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
            return None  # training goes on without it: checkpoints suffice

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def write(self, record: dict) -> None:
        """Append a record to metrics.jsonl; its "step" is the number of steps done."""
        with self.metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def records(self) -> list[dict]:
        """Return all records of metrics.jsonl, without lines that a crash cut short."""
        records = []
        for line in self.metrics.read_text(errors="replace").splitlines() if self.metrics.exists() else ():
            with contextlib.suppress(json.JSONDecodeError):
                records.append(json.loads(line))
        return records
