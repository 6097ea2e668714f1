"""The figure of studies/similarity.yaml: cosine similarity of the blocks' outputs, of both networks."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from studies.results import Results, shown
from studies.study import Study
from tread.drawing.charts import save_heat_maps

PANELS = {"dense": "all tokens", "routed": "under its route"}  # key of similarity.json → how it is called


def matrices(results: Results) -> dict[tuple[str, str], list[np.ndarray]]:
    """By arm and panel, a matrix per seed."""
    nested = {
        (arm, panel): [score[panel] for run in runs for score in run["scores"] if score.get(panel)]
        for arm, runs in results.items()
        for panel in PANELS
    }
    return {key: [np.array(matrix, dtype=float) for matrix in each] for key, each in nested.items() if each}


def columns(study: Study, results: Results) -> dict[str, dict[str, str]]:
    """The similarity of a block's output to the next one's, and of the embedding to the last output."""
    cells: dict[str, dict[str, str]] = {}
    for (arm, panel), each in sorted(matrices(results).items(), key=lambda item: item[0][1]):
        neighbours = [float(np.nanmean(np.diagonal(matrix, 1))) for matrix in each]
        cells.setdefault(f"next block, {PANELS[panel]}", {})[arm] = shown(neighbours)
        cells.setdefault(f"embedding to end, {PANELS[panel]}", {})[arm] = shown([matrix[0, -1] for matrix in each])
    return cells


def draw(study: Study, results: Results, path: Path) -> None:
    """Means over the seeds, side by side on one scale."""
    means = {key: np.mean(each, axis=0) for key, each in matrices(results).items()}
    if means:
        names = ["in", *range(len(next(iter(means.values()))) - 1)]
        panels = {f"{arm} network,\n{PANELS[panel]}": mean for (arm, panel), mean in means.items()}
        label = "behind block (in: the embedding)"
        save_heat_maps(path, panels, {}, names, names, (label, label))
