"""A run's folder: what was started there, and its metrics, one JSON object a line."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import subprocess
import sys
from pathlib import Path

from checkpoint import Checkpoint, exists, find
from files import write_whole

# What a resumed run must share with its checkpoint: other values would make it another run.
FIXED = (
    "seed",
    "model",
    "edm",
    "dataset.name",
    "dataset.channels",
    "dataset.size",
    "dataset.num_classes",
    "train.batch_size",
    "train.label_drop",
)
PACKAGES = ("torch", "accelerate", "hydra-core", "diffusers", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python and the packages that matter, and the code's git revision."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return {**found, "git": git_revision()}


def git_revision() -> str:
    """The commit of this code, with "+changes" if files differ from it; "unknown" outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40", "--dirty=+changes"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def differences(before: dict, now: dict, prefix: str = "") -> dict[str, tuple[object, object]]:
    """Dotted keys whose values differ between two nested dicts → (before, now)."""
    found = {}
    for key in {**before, **now}:
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found |= differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found[prefix + key] = (old, new)
    return found


def claim(folder: Path, resume: bool | str, config: dict) -> Checkpoint | None:
    """Decide what starting a run in `folder` means; touches nothing.

    Returns the checkpoint to continue from, or None to start at step 0. Raises FileExistsError,
    FileNotFoundError or ValueError where that would mix two runs or lose one.
    """
    other = "name=<another name> starts a run of its own"
    started = (folder / "run.json").exists()
    if folder.exists() and any(folder.iterdir()) and not started:
        raise FileExistsError(f"{folder} holds files that are not a run's; {other}")
    if resume is False and started:
        raise FileExistsError(f"{folder} holds a run already; resume=auto continues it, {other}")
    if not exists(folder):
        if resume is True:
            raise FileNotFoundError(f"resume=true, but {folder} holds no checkpoint; resume=auto starts it")
        return None
    found = find(folder)
    changed = differences(found.info["config"], config)
    fixed = [key for key in changed if any(key == name or key.startswith(name + ".") for name in FIXED)]
    if fixed:
        listed = "\n".join(f"  {key}: {changed[key][0]} there, {changed[key][1]} here" for key in fixed)
        raise ValueError(f"{folder} holds a run with other settings; {other}\n{listed}")
    return found


class RunLog:
    """metrics.jsonl and run.json of a run; only the main process holds one."""

    def __init__(self, folder: Path) -> None:
        self.metrics, self.starts = folder / "metrics.jsonl", folder / "run.json"

    def start(self, step: int, **facts: object) -> None:
        """Note a start or resumption, and forget metrics of steps that will be done again."""
        starts = json.loads(self.starts.read_text()) if self.starts.exists() else []
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        starts.append({"time": now, "step": step, "command": sys.argv, **facts, "versions": versions()})
        write_whole(self.starts, json.dumps(starts, indent=1) + "\n")
        kept = [record for record in self.records() if record["step"] <= step]
        write_whole(self.metrics, "".join(json.dumps(record) + "\n" for record in kept))

    def write(self, record: dict) -> None:
        """Append one record; its "step" is the number of steps done."""
        with self.metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def records(self) -> list[dict]:
        """All whole records so far; a last line cut short by a crash is left out."""
        records = []
        for line in self.metrics.read_text().splitlines() if self.metrics.exists() else []:
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return records
