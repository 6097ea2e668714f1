"""Computes a study's cost before it is run: images, samples and training FLOPs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from studies.jobs import Job
from studies.study import Training
from tread.checkpoints.network import build_network
from tread.encoders.vision import WIDTHS, open_encoder
from tread.models.architectures import TextSettings
from tread.models.backbone import Backbone
from tread.training import costs, settings
from tread.training.alignment import Aligned, Aligner, build_projector

CLIP_L = TextSettings("clip-l", tokens=77, width=768, pooled=768)


def training_flops(training: Training) -> int:
    """Return the FLOPs of all training steps, forward and backward, as metrics.jsonl will count them."""
    cfg = training.cfg
    if cfg.model.takes_text:  # without the data, assume texts of CLIP-L
        there = cfg.dataset.embedded or Path(cfg.dataset.path).exists()
        cfg = replace(cfg, text=settings.read_text_settings(cfg) if there else CLIP_L)
    with torch.device("meta"):
        network = build_network(cfg)
    return costs.training_flops(cfg, network, range(training.steps), _aligner(cfg, network))


def _aligner(cfg: settings.Settings, network: Backbone) -> Aligner | None:
    """Return the Aligner of a run, built without weights, or None if the run has none. The pictures that its encoder
    gets are assumed to be 8 times as wide as the latents or, if the latents are pixels, equally wide."""
    alignment, width, flops = cfg.alignment, network.hidden_size, 0
    if alignment.kind == "none":
        return None
    live = alignment.source == "live"
    if alignment.kind == "repa" and (live or alignment.encoder not in WIDTHS):
        encoder = open_encoder(alignment.encoder, "cpu", grid=network.grid[0], inception=cfg.eval.inception)
        cost = encoder.cost(cfg.dataset.size * (1 if cfg.dataset.channels in (1, 3) else 8))
        width, flops = cost.width, live * cost.flops
    elif alignment.kind == "repa":
        width = WIDTHS[alignment.encoder]
    with torch.device("meta"):
        projector = build_projector(alignment, network.hidden_size, width)
    module = Aligned(network, projector, alignment.blocks(cfg.model.depth)[0])
    return Aligner(alignment, module, network if alignment.kind == "self" else None, None, flops)


def estimate(jobs: Sequence[Job]) -> str:
    """Describe the cost: a line per training, and the sum."""
    lines, whole = [], 0
    for job in jobs:
        drawn = sum(int(score.words[-1].partition("=")[2]) for score in job.scores)
        whole += (each := training_flops(job.training))
        lines.append(f"  {job.folder.name:<40}{job.training.images:>12,} images, {each:.4e} FLOPs, {drawn:,} samples")
    return "\n".join([*lines, f"  in all {sum(job.training.images for job in jobs):,} images, {whole:.4e} FLOPs"])
