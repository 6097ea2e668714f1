"""What a study will cost: images and FLOPs by arithmetic, hours from short samples on this device."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from studies.jobs import Children, Job, cores_of, finished, read_score, score_folder, scoring_command, training_command
from studies.study import Score, Study, Training, build_on_meta
from tread.encoders.vision import WIDTHS, open_encoder
from tread.models.backbone import Backbone
from tread.training import flops
from tread.training.alignment import Aligned, Aligner, build_projector
from tread.training.run_folder import RunLog
from tread.training.settings import Settings

WARMUP, SAMPLED, DRAWN = 5, 25, 20  # steps before and after which the clock is read, and samples that are scored
H100, GPUS, MFU = 989e12, 8, 0.4  # dense bf16 FLOP/s of one, how many, and the share of it that is assumed


def training_flops(training: Training) -> int:
    """Of all steps, forward and backward, as metrics.jsonl will say."""
    network, cfg = build_on_meta(training.cfg), training.cfg
    return flops.training_flops(cfg, network, range(cfg.train.steps), build_aligner(cfg, network))


def build_aligner(cfg: Settings, network: Backbone) -> Aligner | None:
    """A run's aligner without weights, for its cost; pictures beside latents are taken to have 8 times their side."""
    alignment, width, flops = cfg.alignment, network.hidden_size, 0
    if alignment.kind == "none":
        return None
    block, _ = alignment.blocks(cfg.model.depth)
    if alignment.kind == "repa" and (alignment.source == "live" or alignment.encoder not in WIDTHS):
        encoder = open_encoder(alignment.encoder, "cpu", grid=network.grid[0], inception=cfg.eval.inception)
        cost = encoder.cost(cfg.dataset.size * (1 if cfg.dataset.channels in (1, 3) else 8))
        width, flops = cost.width, cost.flops if alignment.source == "live" else 0
    elif alignment.kind == "repa":
        width = WIDTHS[alignment.encoder]
    with torch.device("meta"):
        module = Aligned(network, build_projector(alignment, network.hidden_size, width), block)
    return Aligner(alignment, module, network if alignment.kind == "self" else None, None, flops)


@dataclass(frozen=True)
class Sample:
    """Seconds on this device.

    step       a training step, of so many FLOPs.
    start      starting and ending train.py.
    drawn      a drawn and scored sample, by what fid.py was told.
    scoring    starting and ending fid.py, and its metrics.
    reference  the features of the reference, once.
    """

    flops: float
    step: float
    start: float
    drawn: dict[tuple[str, ...], float]
    scoring: float
    reference: float


def take_sample(job: Job, data: Path, cores: int) -> Sample:
    """Time a few steps of a job, and a few samples in each way in which it is scored. Raises ValueError if it fails."""
    said = [word for word in job.training.overrides if not word.startswith(("train.steps=", "every."))]
    said += [f"train.steps={SAMPLED}", f"every.log={WARMUP}", f"every.evaluate={SAMPLED}", f"every.sample={SAMPLED}"]
    ways = {_way(score): score.words for score in job.scores if score.door == "fid.py"}
    with tempfile.TemporaryDirectory() as folder:
        short = Job(replace(job.training, overrides=tuple(said)), (), Path(folder))
        seconds = _timed(training_command(short, data), cores, short.folder)
        steps = {record["step"]: record.get("seconds") for record in RunLog(short.folder / "train").records()}
        step = (steps[SAMPLED] - steps[WARMUP]) / (SAMPLED - WARMUP)
        start, drawn, scoring, reference = max(0.0, seconds - SAMPLED * step), {}, 0.0, 0.0
        for way, words in ways.items():
            words = [re.sub(r"\{step \d+\}", f"{{step {SAMPLED}}}", word) for word in (*words, f"num_samples={DRAWN}")]
            score = Score(SAMPLED, "fid.py", tuple(words))
            seconds = _timed(scoring_command(short, score, data), cores, short.folder)
            spent = json.loads((score_folder(short, score) / "fid.json").read_text())["seconds"]
            loop = spent["sampling"] + spent["features"]
            drawn[way], reference = loop / DRAWN, max(reference, spent["reference"])
            scoring = max(scoring, seconds - loop - spent["reference"])
    return Sample(training_flops(job.training) / job.training.steps, step, start, drawn, scoring, reference)


def _way(score: Score) -> tuple[str, ...]:
    return tuple(word for word in score.words if not word.startswith("num_samples="))


def _timed(command: list[str], cores: int, folder: Path) -> float:
    began = time.perf_counter()
    Children().run(command, cores, folder / "log.txt")
    return time.perf_counter() - began


def sample_all(jobs: Sequence[Job], data: Path, cores: int) -> dict[str, tuple[Sample, ...]]:
    """Samples by the key of a training: of the cheapest and the dearest among those of its network."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        cfg = job.training.cfg
        alike = f"{replace(cfg.model, routes=(), name='')} {cfg.train.batch_size} {cfg.train.precision}"
        groups.setdefault(alike, []).append(job)
    by_training = {}
    for group in groups.values():
        cost = {job.training.key: training_flops(job.training) / job.training.steps for job in group}
        ends = {cost[job.training.key]: job for job in sorted(group, key=lambda job: cost[job.training.key])}
        samples = tuple(take_sample(ends[end], data, cores) for end in sorted({min(ends), max(ends)}))
        by_training |= dict.fromkeys(cost, samples)
    return by_training


def seconds_of(job: Job, samples: Sequence[Sample]) -> float:
    """What is left of a job: training, evaluations at the speed of training steps, scores."""
    cfg, forward = job.training.cfg, build_on_meta(job.training.cfg).forward_flops
    flops = training_flops(job.training) / job.training.steps
    step = float(np.interp(flops, [sample.flops for sample in samples], [sample.step for sample in samples]))
    start = samples[-1].start
    evaluations = -(-cfg.train.steps // cfg.every.evaluate) * cfg.eval.points * forward() * step / flops
    training = 0.0 if finished(job) else start + cfg.train.steps * step + evaluations
    drawn = {way: seconds for sample in samples for way, seconds in sample.drawn.items()}
    scores = [score for score in job.scores if read_score(job, score) is None]
    return training + sum(samples[-1].scoring + _count(score) * drawn.get(_way(score), 0.0) for score in scores)


def _count(score: Score) -> int:
    return int(score.words[-1].partition("=")[2])


def estimate(study: Study, jobs: Sequence[Job], data: Path, at_once: int, measure: bool) -> str:
    """For people: a line a training, and the sum.

    measure  False: images and FLOPs alone. Raises ValueError if a sample fails.
    """
    paper, hours, lines = study.scale_name == "paper", {}, []
    flops = {job.training.key: training_flops(job.training) for job in jobs}
    samples = sample_all(jobs, data, cores_of(at_once)) if measure and not paper else {}
    for job in jobs:
        key = job.training.key
        if paper:
            hours[key] = flops[key] / (GPUS * H100 * MFU) / 3600
        elif samples:
            hours[key] = seconds_of(job, samples[key]) / 3600
        drawn = sum(_count(score) for score in job.scores)
        took = f", {_said(hours[key])}" if key in hours else ""
        lines.append(
            f"  {job.folder.name:<40}{job.training.images:>12,} images, {flops[key]:.4e} FLOPs, {drawn:,} samples{took}"
        )
    whole = f"  in all {sum(job.training.images for job in jobs):,} images, {sum(flops.values()):.4e} FLOPs"
    if paper:
        whole += f", {_said(sum(hours.values()))} on 8×H100 at {MFU:.0%} of {H100 / 1e12:.0f} TFLOP/s: training alone"
        whole += "; a score of 50,000 samples comes on top"
    elif samples:
        once = max(sample.reference for each in samples.values() for sample in each)
        whole += f", {_said(_spread(list(hours.values()), at_once) + once / 3600)} on this device, {at_once} at once"
    return "\n".join([*lines, whole])


def _said(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.1f} min"


def _spread(hours: Sequence[float], at_once: int) -> float:
    """When the last job ends, if each is begun as soon as one ends before it."""
    ends = [0.0] * at_once
    for each in hours:
        ends[ends.index(min(ends))] += each
    return max(ends)
