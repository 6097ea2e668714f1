"""The figure of studies/similarity.yaml: cosine similarity of the blocks' outputs, of both networks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from studies.results import Made, shown
from studies.study import Study
from tread.drawing.charts import save_heat_maps

PANELS = {"dense": "all tokens", "routed": "under its route"}  # of similarity.json → what is said of it


def matrices(runs: list[Made], panel: str) -> list[np.ndarray]:
    """Of each seed."""
    nested = [score[panel] for run in runs for score in run["scores"] if score.get(panel)]
    return [np.array([[np.nan if value is None else value for value in row] for row in matrix]) for matrix in nested]


def columns(study: Study, results: Mapping[str, list[Made]]) -> dict[str, dict[str, str]]:
    """For the table: from a block to the next, and from the embedding to the end."""
    cells: dict[str, dict[str, str]] = {}
    for panel, said in PANELS.items():
        for arm, runs in results.items():
            if each := matrices(runs, panel):
                neighbours = [float(np.nanmean(np.diagonal(matrix, 1))) for matrix in each]
                cells.setdefault(f"next block, {said}", {})[arm] = shown(neighbours)
                ends = [float(matrix[0, -1]) for matrix in each]
                cells.setdefault(f"embedding to end, {said}", {})[arm] = shown(ends)
    return cells


def draw(study: Study, results: Mapping[str, list[Made]], path: Path) -> None:
    """Means over the seeds, side by side on one scale."""
    panels = {
        f"{arm} network,\n{said}": np.mean(each, axis=0)
        for arm, runs in results.items()
        for panel, said in PANELS.items()
        if (each := matrices(runs, panel))
    }
    if panels:
        names = ["in", *range(len(next(iter(panels.values()))) - 1)]
        label = "behind block (in: the embedding)"
        save_heat_maps(path, panels, {}, names, names, (label, label))
