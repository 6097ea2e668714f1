"""Computes what a study will cost: images, samples and training FLOPs."""

from collections.abc import Sequence

from studies.jobs import Job
from studies.study import training_flops


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
