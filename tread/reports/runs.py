"""Reads a run's folder in any state: finished, running, killed or damaged. Unreadable files are named and skipped."""

import glob
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tread.checkpoints import checkpoint
from tread.checkpoints.run_log import RunLog, value_at
from tread.runtime.files import content_hash
from tread.runtime.plugins import import_plugins
from tread.training.run_folder import migrate

FILES = ("run.json", "metrics.jsonl", "status.json")
HELDOUT = "heldout_hash"  # key in Found.config, of the held-out files of latents; older runs lack it
NEEDED = {"model.name": str, "train.steps": int, "train.batch_size": int, "dataset.name": str}  # keys of a config


@dataclass(frozen=True)
class Found:
    """A run, and what can be read of it.

    config    settings of the last start, else of the newest checkpoint; {}: neither can be read. Item "plugins" lists
              files or modules with the start of their sha256; item HELDOUT, if known, is the held-out files' hash.
    records   a dict of finite numbers per readable line of metrics.jsonl: metrics, "step", "seconds", "flops" so far.
    starts    entries of run.json, one per start: "step", "config", "versions" and "warnings".
    status    content of status.json; {}: it is missing or damaged.
    problems  messages about what could not be read.
    """

    folder: Path
    config: dict
    records: list[dict]
    starts: list[dict]
    status: dict
    problems: list[str]

    @property
    def step(self) -> int:
        """The number of steps done: the largest one in the status and the records."""
        stated = self.status.get("step")
        return max([stated if isinstance(stated, int) else 0, *(record["step"] for record in self.records)])

    @property
    def progress(self) -> str:
        """The number of steps done as text, with the planned number if that is known."""
        return f"{self.step:,}" + (f" of {self.config['train']['steps']:,}" if self.config else "")

    def last(self, key: str) -> float | None:
        return next((record[key] for record in reversed(self.records) if key in record), None)

    def state(self) -> str:
        """Return a text that says whether the run is running, finished, killed, …."""
        state, reason = self.status.get("state"), self.status.get("reason")
        if state != "running":
            return " – ".join(str(part) for part in (state or "not known", reason) if part)
        host, pid, time = self.status.get("host"), self.status.get("pid"), told_time(self.status.get("time"))
        if host != platform.node() or not isinstance(pid, int):
            return f"running on {host}, by what it wrote last at {time}"
        gone = f"killed: process {pid} is gone without a word; it last wrote at {time}"
        return "running" if psutil.pid_exists(pid) else gone


def told_time(stated: object) -> str | None:
    """Format an ISO time from run.json or status.json as "2026-01-31 12:00:00 UTC"; None if `stated` is empty."""
    return str(stated).replace("T", " ").replace("+00:00", " UTC") if stated else None


def folders_of(patterns: Sequence[str]) -> list[Path]:
    """Return run folders, each once. A pattern is a folder's path, which is not checked, or a glob, which matches only
    folders with metrics. Raises FileNotFoundError for a glob without a match, or if `patterns` is empty."""
    folders: dict[Path, None] = {}
    for pattern in patterns:
        matching = [Path(pattern)]
        if glob.has_magic(pattern) and not Path(pattern).is_dir():
            matching = [folder for folder in map(Path, sorted(glob.glob(pattern))) if RunLog(folder).records()]
        if not matching:
            raise FileNotFoundError(f"{pattern} names no run that has logged anything yet")
        folders |= dict.fromkeys(matching)
    if not folders:
        raise FileNotFoundError("name at least one run's folder, such as results/digits-tread or 'results/*'")
    return [*folders]


def find_run(folder: Path) -> Found:
    """Read a run's folder, and import the run's plugins. Raises FileNotFoundError if none of a run's files is there."""
    present = [name for name in FILES if (folder / name).exists()]
    if not present and not any(folder.glob("step_*/info.json")):
        raise FileNotFoundError(f"{folder} is no run's folder: it has neither {', '.join(FILES)} nor a checkpoint")
    log = RunLog(folder)
    starts = [_typed(start) for start in log.starts()]
    records = [record for record in map(_numbers, log.records()) if record]
    status = log.read_status()
    lacking = [name for name, content in zip(FILES, (starts, records, status)) if not content]
    problems = [f"{name} is {'damaged or empty' if name in present else 'missing'}" for name in lacking]
    lines = log.metrics.read_text(errors="replace").splitlines() if "metrics.jsonl" in present else []
    if lost := sum(bool(line.strip()) for line in lines) - len(records):
        problems.append(f"{lost} of {lost + len(records)} lines of metrics.jsonl can't be read and are left out")
    start, saved = starts[-1] if starts else {}, {}
    config = _config_of(start.get("config"))
    try:
        import_plugins(config.get("plugins", ()))  # plugins may define metrics and networks of the run
    except ValueError as error:
        problems.append(str(error))
    try:
        if newest := checkpoint.newest(folder):
            source = checkpoint.find(newest)
            saved = source.info
            for name in source.parts:
                source.check(name)
        else:
            problems.append("there is no checkpoint")
    except (OSError, ValueError) as error:
        problems.append(str(error))
    if not config:
        config = _config_of(saved.get("config"))
        problems.append("its settings are " + ("those of the newest checkpoint" if config else "not known"))
    if plugins := start.get("plugins") or saved.get("plugins"):
        config = {**config, "plugins": [f"{name} {digest[:8]}" for name, digest in plugins.items()]}
    if held := [start["heldout_files"] for start in starts if isinstance(start.get("heldout_files"), dict)]:
        hashes = [str(text).partition(",")[0] for text in held[-1].values()]
        config = {**config, HELDOUT: content_hash("".join(hashes))[:8]}
    return Found(folder, config, records, starts, status, problems)


def _numbers(record: object) -> dict:
    """Return the finite numbers of a line of metrics.jsonl; {} if it is not a dict with a whole number "step"."""
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return {}
    return {key: value for key, value in record.items() if type(value) in (int, float) and math.isfinite(value)}


def _typed(start: dict) -> dict:
    """Return an entry of run.json with empty values in place of those that are missing or of a wrong type."""
    kinds = {"step": int, "config": dict, "versions": dict, "warnings": list, "plugins": dict}
    return start | {key: start[key] if isinstance(start.get(key), kind) else kind() for key, kind in kinds.items()}


def _config_of(config: object) -> dict:
    """Convert a recorded config to today's keys; {} if it is no dict or lacks a key of NEEDED with the right type."""
    try:
        config = migrate(config)
    except (TypeError, AttributeError):
        return {}
    return config if all(isinstance(value_at(config, key), kind) for key, kind in NEEDED.items()) else {}
