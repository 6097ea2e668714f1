"""Computes what a study will cost: images, samples and training FLOPs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from studies.jobs import Job
from studies.study import Training
from tread.checkpoints.network import build_network
from tread.models.architectures import TextSettings
from tread.training import costs, settings

CLIP_L = TextSettings("clip-l", tokens=77, width=768, pooled=768)


def training_flops(training: Training) -> int:
    """Return the FLOPs of all training steps, forward and backward, as metrics.jsonl will count them."""
    cfg = training.cfg
    if cfg.model.takes_text:  # without the data, assume texts of CLIP-L
        there = cfg.dataset.embedded or Path(cfg.dataset.path).exists()
        cfg = replace(cfg, text=settings.read_text_settings(cfg) if there else CLIP_L)
    with torch.device("meta"):
        network = build_network(cfg)
    return costs.training_flops(cfg, network, range(training.steps), costs.blank_aligner(cfg, network))


def estimate(jobs: Sequence[Job]) -> str:
    """Return a text on the cost of the jobs: a line per training, and the sum."""
    lines, whole = [], 0
    for job in jobs:
        drawn = sum(int(score.words[-1].partition("=")[2]) for score in job.scores)
        whole += (each := training_flops(job.training))
        most = " at most" if job.training.seconds else ""
        images = f"{job.training.images:>12,} images{most}"
        lines.append(f"  {job.folder.name:<40}{images}, {each:.4e} FLOPs, {drawn:,} samples")
    return "\n".join([*lines, f"  in all {sum(job.training.images for job in jobs):,} images, {whole:.4e} FLOPs"])
