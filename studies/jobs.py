"""Runs a study's jobs: train.py, then a script for each score, as processes that resume after a stop."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from studies.study import ROOT, Planned, Score, Training, training_flops
from tread.checkpoints.run_log import RunLog
from tread.evaluation.metric_table import names_of
from tread.runtime.device import usable_cores
from tread.runtime.files import Lock, write_json
from tread.runtime.signals import INTERRUPTED

# KEPT: keys of metrics.jsonl that result.json keeps; LEFT_OUT: keys of a score's JSON that it drops
KEPT = ("step", "loss", *names_of("heldout"), "flops", "seconds")
Part = Literal["both", "train", "score"]
LEFT_OUT = ("checkpoint", "command", "settings", "versions", "reference", "warnings", "weak_network", "data", "prompts")


@dataclass(frozen=True)
class Job:
    """A training, the scores to compute from it, and their folder, which holds train/ (train.py's output), score-<key>/
    (the script's output), result.json and log.txt."""

    training: Training
    scores: tuple[Score, ...]
    folder: Path

    @property
    def words(self) -> list[str]:
        """The Hydra overrides of train.py and the scoring scripts, before `_filled` replaces {data} and {step N}."""
        return [*self.training.overrides, *(word for score in self.scores for word in score.words)]

    @property
    def trained(self) -> bool:
        """Whether train.py has finished all steps, or was stopped by the time budget (it then saves its last step)."""
        state = RunLog(self.folder / "train").read_status().get("state")
        return state == "finished" or (state == "interrupted" and self.over_time())

    def only_scores_lack(self, made: Mapping[str, dict]) -> bool:
        """Return whether `made`, {Training.key: content of result.json}, lists this training as finished although the
        job's folder has no finished training any more. It must then be trained again before it can be scored."""
        return not self.trained and made.get(self.training.key, {"trained": False})["trained"]

    def over_time(self) -> bool:
        """Return whether the training has a time budget and has used it up."""
        budget, records = self.training.seconds, RunLog(self.folder / "train").records()
        return budget is not None and max(steady_seconds(records).values(), default=0.0) >= budget

    def training_command(self, data: Path) -> list[str]:
        words = (*self.training.overrides, "results={folder}", "name=train", f"seed={self.training.seed}")
        return ["train.py", *(self._filled(word, data) for word in words)]

    def scoring_command(self, score: Score, data: Path) -> list[str]:
        last = self.training.seconds is not None and score.step == self.training.steps
        checkpoint = "{folder}/train/latest" if last else f"{{step {score.step}}}"
        words = (f"checkpoint={checkpoint}", f"out={{folder}}/score-{score.key}", *score.words)
        return [score.script, *(self._filled(word, data) for word in words)]

    def _filled(self, word: str, data: Path) -> str:
        """Return the override `word` with {data}, {folder} (the job's) and {step N} (that step's checkpoint) replaced
        by absolute paths; if any was, the value is quoted for Hydra."""
        key, _, value = word.partition("=")
        filled = re.sub(r"\{step (\d+)\}", lambda match: f"{{folder}}/train/step_{int(match[1]):07d}", value)
        for name, path in (("data", data), ("folder", self.folder)):
            filled = filled.replace(f"{{{name}}}", str(path.expanduser().resolve()))
        quoted = re.sub(r"(\\*)'", r"\1\1\\'", filled)
        return word if filled == value else f"{key}='{quoted}'"

    def record(self, score: Score) -> dict | None:
        """Return a score's JSON without the keys LEFT_OUT, but with its overrides as "words"; None if it is missing."""
        path = self.folder / f"score-{score.key}" / f"{Path(score.script).stem}.json"
        if not path.exists():
            return None
        read = json.loads(path.read_text())
        return {"words": list(score.words), **{key: value for key, value in read.items() if key not in LEFT_OUT}}

    def write_result(self, at_once: int | None = None) -> None:
        """Write result.json from what exists: the training's metrics, and all scores, keyed by Score.key. `at_once` is
        the number of jobs that shared the machine during the training just launched; None: no training was. If a
        finished training is repeated, its old metrics and scores stay in the file until the new one is finished."""
        path, log = self.folder / "result.json", RunLog(self.folder / "train")
        result = json.loads(path.read_text()) if path.exists() else {}
        if not result and len(log.starts()) > 1:
            result = {"at_once": [0]}  # 0: not known of earlier launches, one of which was killed
        for start in log.starts()[-1:]:
            points: dict[int, dict] = {}
            steady = steady_seconds(log.records())
            for record in log.records():
                images = record["step"] * self.training.batch_size
                kept = {key: record[key] for key in KEPT if key in record}
                kept |= {"steady_seconds": steady[record["step"]]} if record["step"] in steady else {}
                points.setdefault(record["step"], {"images": images}).update(kept)
            ordered = [points[step] for step in sorted(points)]
            if result.get("trained", False) and result["points"] != ordered:  # of another training, with these scores
                if not self.trained:
                    break
                result = {"at_once": [0] * (len(log.starts()) > 1)}
            training = {"key": self.training.key, "seed": self.training.seed, "overrides": self.training.overrides}
            result |= training | {"trained": self.trained, "points": ordered}
            versions = start.get("versions", {})
            devices = sorted({str(each.get("device")) for each in log.starts()})
            result |= {"device": " and ".join(devices), "torch": versions.get("torch"), "commit": versions.get("git")}
            result["at_once"] = sorted({*result.get("at_once", ()), *([at_once] if at_once else [])})
        if result:
            scores = {score.key: record for score in self.scores if (record := self.record(score)) is not None}
            result["scores"] = result.get("scores", {}) | scores
            write_json(path, result)


def steady_seconds(records: Sequence[dict]) -> dict[int, float]:
    """Return {step: training seconds so far} from metrics.jsonl's `records`, without each launch's slow first step."""
    found, first = {}, 0.0
    for record in records:
        first += record.get("first_step_seconds", 0.0)
        if "seconds" in record:
            found[record["step"]] = round(record["seconds"] - first, 3)
    return found


def jobs_of(runs: Sequence[Planned], place: Path, results: Path) -> list[Job]:
    """Return a job for each different training of `runs`, with the scores of all runs that share it. A job that a study
    in `results` has begun at this scale keeps its folder; others get one in `place`, <results>/<study>/<scale>."""
    by_key, jobs = defaultdict(list), []
    for run in runs:
        by_key[run.training.key].append(run)
    for key, same in by_key.items():
        begun = sorted(results.glob(f"*/{place.name}/*-{key}"))
        scores = dict.fromkeys(score for run in same for score in run.scores)
        jobs.append(Job(same[0].training, tuple(scores), begun[0] if begun else place / same[0].folder))
    return jobs


def costs_of(jobs: Sequence[Job]) -> str:
    """Return a text: a line per job (training images and FLOPs, samples to draw for its scores), and a line of sums."""
    lines, whole = [], 0
    for job in jobs:
        drawn = sum(int(score.words[-1].partition("=")[2]) for score in job.scores)
        whole += (each := training_flops(job.training))
        images = f"{job.training.images:>12,} images{' at most' * bool(job.training.seconds)}"
        lines.append(f"  {job.folder.name:<40}{images}, {each:.4e} FLOPs, {drawn:,} samples")
    return "\n".join([*lines, f"  in all {sum(job.training.images for job in jobs):,} images, {whole:.4e} FLOPs"])


def make(jobs: Sequence[Job], data: Path, at_once: int, after: Callable[[], None], part: Part = "both") -> list[str]:
    """Train and score the jobs with data from folder `data`, or do only the `part` "train" or "score". `at_once` jobs
    at a time share the cores equally. `after` is called in this thread when a job ends. Returns failed jobs' errors."""
    cores, problems, children = max(1, usable_cores() // at_once), [], Children()
    with ThreadPoolExecutor(at_once) as pool:
        waiting = [pool.submit(make_one, job, data, at_once, cores, children, part) for job in jobs]
        try:
            for future in tqdm(as_completed(waiting), total=len(waiting), unit="run"):
                problems.append(future.result())
                after()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            children.stop()
            raise
    return [*filter(None, problems)]


def make_one(job: Job, data: Path, at_once: int, cores: int, children: "Children", part: Part = "both") -> str | None:
    """Train and score what is still missing (or only the `part` "train" or "score"), in `children` with `cores` threads
    each, and write result.json. `at_once` is the number of jobs that share the machine. Return any error's text."""
    job.folder.mkdir(parents=True, exist_ok=True)
    log = job.folder / "log.txt"
    lock = Lock(job.folder / ".lock", None)  # waits for processes that a killed study left, which inherited the lock
    history, begun = RunLog(job.folder / "train"), False
    try:
        if not job.trained and part == "score":
            raise ValueError("it is not trained yet: part=train comes first")
        if not job.trained:
            begun, starts = True, len(history.starts())
            for old in () if starts else job.folder.glob("score-*"):  # of a training that is gone
                shutil.rmtree(old)

            def over() -> bool:  # only once this start is recorded: an earlier one may have used up the time
                return len(history.starts()) > starts and job.over_time()

            children.run(job.training_command(data), cores, log, lock, over if job.training.seconds else None)
        reached = history.read_status().get("step", 0)
        for score in sorted(job.scores, key=lambda score: -score.step) if part != "train" else ():  # the end first
            if job.record(score) is None and job.training.is_scored_at(score.step, reached):
                children.run(job.scoring_command(score, data), cores, log, lock)
    except (ValueError, OSError) as error:
        return f"{job.folder}: {error} (its log.txt has all of it)"
    finally:
        job.write_result(at_once if begun else None)
        lock.release()
    return None


class Children:
    """The scripts that run as child processes. Ctrl-C reaches the study alone, which then calls `stop`."""

    def __init__(self) -> None:
        self.running: set[subprocess.Popen] = set()
        self.stopped = False

    def stop(self) -> None:
        """Ask all processes to save and end; processes started later end at once."""
        self.stopped = True
        for child in [*self.running]:
            child.terminate()

    def run(
        self, command: Sequence[str], cores: int, log: Path, lock: Lock, over: Callable[[], bool] | None = None
    ) -> None:
        """Run a Python command with `cores` threads, appending output to `log`. It holds `lock` until it ends, even if
        the study is killed, and is asked to save and end once over() is true (None: never). ValueError if it fails."""
        with log.open("ab") as file:
            began = file.seek(0, os.SEEK_END)
            child = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": str(cores)},
                pass_fds=[lock.fileno()],
                start_new_session=True,  # only the study gets Ctrl-C, and stops its children
            )
        self.running.add(child)
        if self.stopped:
            child.terminate()
        if over:
            while child.poll() is None and not over():
                time.sleep(0.5)
            child.terminate()  # does nothing if it has ended
        code = child.wait()
        self.running.discard(child)
        if code and not (code == INTERRUPTED and over and over()):
            lines = re.split(r"[\r\n]+", log.read_bytes()[began:].decode(errors="replace").strip())
            said = next((line for line in reversed(lines) if line.startswith("error")), lines[-1])
            raise ValueError(f"{command[0]} ended with {code}: {said}")
