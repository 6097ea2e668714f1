"""A run's folder: the record of its starts, whether a run may start in it, and metrics.jsonl (an object per line)."""

import contextlib
import json
import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path

from tread.checkpoints.checkpoint import Checkpoint, find_whole, newest, sweep
from tread.models.architectures import TextSettings
from tread.runtime.files import Lock, write_whole
from tread.runtime.schema import fill, written
from tread.runtime.versions import now, versions
from tread.training.alignment import Alignment
from tread.training.settings import Settings

# The settings that must not change when a run is resumed, besides the section of its objective (edm or rf).
FIXED = ("seed", "objective", "model", "ema.power", "init_from", *TextSettings().decisive)
FIXED += tuple(f"alignment.{item.name}" for item in fields(Alignment) if item.name != "precision")
FIXED += tuple(f"dataset.{key}" for key in ("name", "channels", "size", "num_classes"))
FIXED += tuple(f"train.{key}" for key in ("batch_size", "label_drop", "path_drop", "loss_tokens", "reconstruction"))
LAUNCH = ("name", "results", "resume", "run")  # settings of a launch, not of a run
NOTHING = "nothing"  # stands for a missing value


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


def _by_number(value: object) -> dict | None:
    """Return a dict as it is, a list of dicts as a dict keyed by index, and None for anything else."""
    if isinstance(value, (list, tuple)) and all(isinstance(item, dict) for item in value):
        return {str(number): item for number, item in enumerate(value)}
    return value if isinstance(value, dict) else None


def value_at(config: dict, key: str) -> object:
    """Return the value of a dotted key in a nested dict; None if it is missing."""
    for part in key.split("."):
        config = (_by_number(config) or {}).get(part)
    return config


def decisive(keys: Iterable[str], config: dict) -> list[str]:
    """Return those of the dotted keys whose settings must stay as they are when a run is resumed."""
    names = (*FIXED, config.get("objective", "edm"))
    return [key for key in keys if any(key == name or key.startswith(name + ".") for name in names)]


@dataclass(frozen=True)
class Claim:
    """How a run starts in a folder: anew, or from a checkpoint."""

    checkpoint: Checkpoint | None = None  # where it goes on; None: at step 0
    changed: dict[str, tuple[object, object]] = field(default_factory=dict)  # settings by dotted key: (before, now)
    damaged: list[str] = field(default_factory=list)  # why newer checkpoints can't be used


def claim(folder: Path, resume: bool | str, config: dict) -> Claim:
    """Decide how a run starts in `folder`, without changing files. Raises FileExistsError, FileNotFoundError or
    ValueError if it would mix two runs or lose one, or if `resume`, the setting, forbids it."""
    other = "name=<another name> starts a run of its own"
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file, but a run needs a folder; {other}")
    checkpoint, damaged = find_whole(folder)
    starts = RunLog(folder).starts()
    if checkpoint is None and not starts:
        if folder.exists() and any(not path.name.startswith(".") for path in folder.iterdir()):
            raise FileExistsError(f"{folder} holds files that are not a run's; {other}")
        if resume is True:
            raise FileNotFoundError(f"resume=true, but {folder} holds no checkpoint; resume=auto starts a run there")
        return Claim()
    if resume is False:
        raise FileExistsError(f"{folder} holds a run already; resume=auto continues it, {other}")
    if (folder / "latest").is_dir() and not (folder / "latest").is_symlink():
        raise FileExistsError(f"{folder / 'latest'} is a folder, but must be a link; remove it if step_… is there too")
    before = checkpoint.info["config"] if checkpoint else starts[-1]["config"]
    changed = differences(migrate(before), migrate(config), nothing=NOTHING)
    if fixed := decisive(changed, config):
        listed = [f"\n  {key}: {written(changed[key][0])} there, {written(changed[key][1])} here" for key in fixed]
        raise ValueError(f"{folder} holds a run with other settings; {other}{''.join(listed)}")
    if checkpoint is None and resume is True:
        raise FileNotFoundError(f"resume=true, but {folder} holds no checkpoint yet; resume=auto starts it again")
    said = {key: both for key, both in changed.items() if key not in LAUNCH and both[0] is not NOTHING}
    return Claim(checkpoint, said, damaged)  # keys added since the run was recorded are left out


def migrate(config: dict) -> dict:
    """Convert a config recorded by older code to today's keys; missing ones get their defaults. In the oldest records,
    section `recipe` is dropped, wandb.enabled becomes `tracker`, and train.activation_checkpointing `memory`."""
    kept = {key: value for key, value in config.items() if key != "recipe"}
    if "enabled" in config.get("wandb", {}):
        kept["tracker"] = "wandb" if config["wandb"]["enabled"] else "none"
        kept["wandb"] = {key: value for key, value in config["wandb"].items() if key != "enabled"}
    if (again := config.get("train", {}).get("activation_checkpointing")) is not None:
        memory = {"memory": "checkpointing"} if again else {}
        kept["train"] = {**config["train"], "activation_checkpointing": None, **memory}
    return fill(kept, Settings)


class RunLog:
    """A run's metrics.jsonl, run.json and status.json; only the main process writes them. Open it before `claim`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.metrics, self._lock = folder, folder / "metrics.jsonl", None
        self._seen = self._state()

    def _state(self) -> tuple[int, Path | None]:
        """Return the number of starts and the newest checkpoint's path or None; `claim` decides by both."""
        checkpoint = newest(self.folder)
        return len(self.starts()), checkpoint and checkpoint.resolve()

    def starts(self) -> list[dict]:
        """Return run.json: a dict for each start (time, step, command, versions, config); [] if it can't be read."""
        starts = self._read("run.json")
        starts = starts if isinstance(starts, list) else []
        return [start for start in starts if isinstance(start, dict) and "config" in start]

    def start(self, step: int, config: dict, **facts: object) -> None:
        """Lock the folder, append this start at step `step` to run.json, with `config` and `facts`, and drop the
        metrics of later steps, which will be done again. Raises FileExistsError if another process uses the folder, or
        has used it since this RunLog was created."""
        self.versions = versions()  # now: the code on disk may change later
        self.folder.mkdir(parents=True, exist_ok=True)
        busy = f"another process is training in {self.folder}; name=… starts another run"
        self._lock = Lock(self.folder / ".lock", busy)
        if self._state() != self._seen:
            raise FileExistsError(f"another process trained in {self.folder} while this one was starting; start again")
        start = {"time": now(), "step": step, "command": sys.argv, **facts, "versions": self.versions, "config": config}
        write_whole(self.folder / "run.json", json.dumps([*self.starts(), start], indent=1) + "\n")
        kept = [record for record in self.records() if record["step"] <= step]
        write_whole(self.metrics, "".join(json.dumps(record) + "\n" for record in kept))
        sweep(self.folder)
        for leftover in self.folder.glob(".*.json*.partial"):
            leftover.unlink(missing_ok=True)
        self.status("running", step)

    def status(self, state: str, step: int, reason: str | None = None, **facts: object) -> None:
        """Write status.json: `state` (running, interrupted, finished or failed), the number of steps done, more facts.
        Only "running" replaces a recorded failure, as other processes' failures follow from the first one."""
        if state == "running" or self.read_status().get("state") != "failed":
            who = {"host": platform.node(), "pid": os.getpid()}
            content = {"state": state, "step": step, "reason": reason, "time": now(), **who, **facts}
            text = json.dumps(content, indent=1) + "\n"
            try:
                write_whole(self.folder / "status.json", text)
            except OSError:  # overwriting needs no room on a full disk
                (self.folder / "status.json").write_text(text)

    def read_status(self) -> dict:
        """Return status.json as a dict; {} if it can't be read."""
        return self._read("status.json") or {}

    def _read(self, name: str) -> list | dict | None:
        try:
            return json.loads((self.folder / name).read_text())
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
            return None  # training goes on without it: checkpoints suffice

    def close(self) -> None:
        """Unlock the folder, if `start` has locked it."""
        if self._lock is not None:
            self._lock.release()

    def write(self, record: dict) -> None:
        """Append a record to metrics.jsonl; its "step" is the number of steps done."""
        with self.metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def records(self) -> list[dict]:
        """Return all records of metrics.jsonl, without lines that a crash cut short."""
        records = []
        for line in self.metrics.read_text(errors="replace").splitlines() if self.metrics.exists() else []:
            with contextlib.suppress(json.JSONDecodeError):
                records.append(json.loads(line))
        return records
