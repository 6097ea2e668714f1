"""Making a study's runs: train.py, then a door for each score, as processes that go on where they were stopped.

A run's folder holds train/ (train.py's), score-<key>/ (what the door wrote), networks/ (the weights alone of what was
scored, so that later studies can score them when train/ is gone), result.json and log.txt.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from scripts.export_checkpoint import Options, export
from studies.study import ROOT, Planned, Score, Training
from tread.evaluation.metric_table import names_of
from tread.runtime.files import Lock, explain_failure, write_whole
from tread.runtime.versions import git_revision
from tread.training.run_folder import RunLog

# keys of what a door writes that are not kept
LEFT_OUT = ("checkpoint", "command", "settings", "versions", "reference", "warnings", "weak_network", "data")


@dataclass(frozen=True)
class Job:
    """A training and all its scores that are wanted."""

    training: Training
    scores: tuple[Score, ...]
    folder: Path


def jobs_of(runs: Sequence[Planned], place: Path, results: Path) -> list[Job]:
    """One for each training, where another study has begun it, else below `place`."""
    jobs: dict[str, Job] = {}
    for run in runs:
        key = run.training.key
        if key in jobs:
            both = dict.fromkeys((*jobs[key].scores, *run.scores))
            jobs[key] = Job(run.training, tuple(both), jobs[key].folder)
        else:
            there = sorted(results.glob(f"*/{place.name}/*-{key}"))
            jobs[key] = Job(run.training, run.scores, there[0] if there else place / run.folder)
    return list(jobs.values())


def make(jobs: Sequence[Job], data: Path, at_once: int, after: Callable[[], None] = lambda: None) -> list[str]:
    """Do jobs, so many at once with an equal share of the cores. Returns what failed, a line each.

    after  called, in one thread, whenever a job has ended.
    """
    cores, problems, children = cores_of(at_once), [], Children()
    with ThreadPoolExecutor(at_once) as pool:
        waiting = [pool.submit(make_one, job, data, cores, children) for job in jobs]
        try:
            for future in tqdm(as_completed(waiting), total=len(waiting), unit="run"):
                problems += [future.result()] if future.result() else []
                after()
        except BaseException:
            for future in waiting:
                future.cancel()
            children.stop()
            raise
    return problems


def make_one(job: Job, data: Path, cores: int, children: Children) -> str | None:
    """Train and score, and write result.json after each part; what is there is kept. Returns what went wrong."""
    job.folder.mkdir(parents=True, exist_ok=True)
    lock = Lock(job.folder / ".lock", None)  # waits for what a killed study left running, as its processes inherit it
    try:
        for command in commands(job, data):
            children.run(command, cores, job.folder / "log.txt", lock)
            write_result(job)
        keep_networks(job)
    except (ValueError, OSError) as error:
        return f"{job.folder}: {error} (its log.txt has all of it)"
    finally:
        lock.release()
    write_result(job)
    return None


def keep_networks(job: Job) -> None:
    """Copy the EMA weights of what is scored out of the training's folder. Raises ValueError or OSError."""
    for step in {score.step for score in job.scores}:
        if not network(job, step).exists():
            network(job, step).parent.mkdir(exist_ok=True)
            export(Options(str(checkpoint(job, step)), str(network(job, step))))


def cores_of(at_once: int) -> int:
    """The cores that each of so many jobs at once gets."""
    return max(1, (os.cpu_count() or 1) // at_once)


class Children:
    """The processes under way, to be stopped with the study."""

    def __init__(self) -> None:
        self.running: set[subprocess.Popen] = set()
        self.stopping = threading.Event()

    def stop(self) -> None:
        """Ask all of them to save and end, and start no more."""
        self.stopping.set()
        for child in [*self.running]:
            child.terminate()

    def run(self, command: Sequence[str], cores: int, log: Path, lock: Lock | None = None) -> None:
        """Run a Python command, its output to the end of a log. Raises ValueError, saying why it failed.

        lock  held for as long as the process lives, though this one be killed.
        """
        environment = {**os.environ, "OMP_NUM_THREADS": str(cores)}
        with log.open("ab") as file:
            began = file.seek(0, os.SEEK_END)
            child = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=[lock.fileno()] if lock else [],
                start_new_session=True,  # Ctrl-C is for the study, which hands it on once
            )
            self.running.add(child)
            if self.stopping.is_set():
                child.terminate()
            code = child.wait()
            self.running.discard(child)
        if code:
            raise ValueError(f"{command[0]} ended with {code}: {_tail(log, began)}")


def _tail(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        lines = re.split(r"[\r\n]+", file.read().decode(errors="replace").strip())
    return next((line for line in reversed(lines) if line.startswith("error")), lines[-1])


def commands(job: Job, data: Path) -> list[list[str]]:
    """What is left to be run, in order: the training, the score of its end, those on the way."""
    kept = job.scores and all(network(job, score.step).exists() for score in job.scores)
    made = [] if finished(job) or kept else [training_command(job, data)]
    scores = sorted(job.scores, key=lambda score: -score.step)
    return made + [scoring_command(job, score, data) for score in scores if read_score(job, score) is None]


def finished(job: Job) -> bool:
    """Whether train.py has done all steps."""
    return RunLog(job.folder / "train").read_status().get("state") == "finished"


def network(job: Job, step: int) -> Path:
    return job.folder / "networks" / f"step_{step:07d}"


def checkpoint(job: Job, step: int) -> Path:
    """The training's own, or the weights that were kept of it."""
    saved = job.folder / "train" / f"step_{step:07d}"
    return network(job, step) if network(job, step).exists() and not saved.exists() else saved


def training_command(job: Job, data: Path) -> list[str]:
    """Of train.py: its folder is `train` in the job's."""
    words = [_filled(word, {"data": data}) for word in job.training.overrides]
    folder = _filled("results={folder}", {"folder": job.folder})
    return ["train.py", *words, folder, "name=train", f"seed={job.training.seed}"]


def scoring_command(job: Job, score: Score, data: Path) -> list[str]:
    """Of the door that scores: its folder is score-<key> in the job's."""
    places = {"data": data, "checkpoint": checkpoint(job, score.step), "out": score_folder(job, score)}
    for word in score.words:
        for step in re.findall(r"\{step (\d+)\}", word):
            places[f"step {step}"] = checkpoint(job, int(step))
    return [score.door, *(_filled(word, places) for word in ("checkpoint={checkpoint}", "out={out}", *score.words))]


def _filled(word: str, places: Mapping[str, Path]) -> str:
    """An override with its {…} replaced by absolute paths, quoted for Hydra where they need it."""
    key, _, value = word.partition("=")
    filled = value
    for name, path in places.items():
        filled = filled.replace(f"{{{name}}}", str(path.expanduser().resolve()))
    if filled != value and not re.fullmatch(r"[\w./-]+", filled, re.ASCII):
        filled = "'" + re.sub(r"(\\*)'", r"\1\1\\'", filled) + "'"
    return f"{key}={filled}"


def score_folder(job: Job, score: Score) -> Path:
    return job.folder / f"score-{score.key}"


def read_score(job: Job, score: Score) -> dict | None:
    """What the door wrote, if it has, without what is of this machine."""
    path = score_folder(job, score) / f"{Path(score.door).stem}.json"
    if not path.exists():
        return None
    read = json.loads(path.read_text())
    return {"words": list(score.words), **{key: value for key, value in read.items() if key not in LEFT_OUT}}


def write_result(job: Job) -> None:
    if (record := result(job)) is not None:
        with explain_failure(job.folder):
            write_whole(job.folder / "result.json", json.dumps(record, indent=1) + "\n")


def result(job: Job) -> dict | None:
    """What a job is kept as, as far as it has come; None if it has not begun.

    points  over training; scores: by their keys, of all studies that wanted some.
    """
    path, log = job.folder / "result.json", RunLog(job.folder / "train")
    before = json.loads(path.read_text()) if path.exists() else {}
    scores = before.get("scores", {})
    scores |= {score.key: read for score in job.scores if (read := read_score(job, score)) is not None}
    if not log.starts():
        return before | {"scores": scores} if before else None
    start, batch = log.starts()[-1], job.training.cfg.train.batch_size
    points: dict[int, dict] = {}
    kept = ("step", "loss", *names_of("heldout"), "flops", "seconds")
    for record in log.records():
        point = points.setdefault(record["step"], {"images": record["step"] * batch})
        point |= {key: record[key] for key in kept if key in record}
    said: Mapping = start.get("versions", {})
    return {
        "key": job.training.key,
        "seed": job.training.seed,
        "overrides": list(job.training.overrides),
        "trained": finished(job),
        "points": [points[step] for step in sorted(points)],
        "scores": scores,
        "device": start.get("device"),
        "torch": said.get("torch"),
        "commit": said.get("git") or git_revision(),
        "started": log.starts()[0].get("time"),
        "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()) if not before.get("ended") else before["ended"],
    }


def submit(jobs: Sequence[Job], data: Path) -> None:
    """Hand what is left of each job to Slurm, its scores to begin when its training has ended. Raises ValueError."""
    for job in jobs:
        job.folder.mkdir(parents=True, exist_ok=True)
        before = ""
        for command in commands(job, data):
            words = ["--parsable", *([f"--dependency=afterok:{before}"] if before else [])]
            words += [f"--job-name={job.folder.name}", f"--output={job.folder.resolve()}/slurm-%j.out"]
            words += [f"--export=ALL,DOOR={command[0]}", "scripts/slurm.sh", *command[1:]]
            try:
                sent = subprocess.run(["sbatch", *words], cwd=ROOT, capture_output=True, text=True, check=True)
            except FileNotFoundError:
                raise ValueError("submit=slurm needs sbatch, which is not on this machine's PATH") from None
            except subprocess.CalledProcessError as error:
                raise ValueError(f"sbatch refused {job.folder.name}: {error.stderr.strip()}") from None
            number = sent.stdout.strip().partition(";")[0]
            before = before if command[0] != "train.py" else number
            print(f"  submitted {number:<10}{command[0]:<10}{job.folder}")
