"""Figures: loss curves and heat maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tread.evaluation.curves import Line, Panel, save_panels


def save_curve(path: Path, records: Sequence[dict], routed: bool) -> None:
    """Draw training and evaluation loss over the steps, from the records of metrics.jsonl."""
    names = {
        "loss": "training loss" + (", with routes: not comparable to runs without" if routed else ""),
        "eval_loss": "evaluation loss: EMA weights, all tokens, held-out data",
    }
    lines = []
    for key, name in names.items():
        found = [(record["step"], record[key]) for record in records if key in record]
        lines += [Line(name, *zip(*found))] if found else []
    save_panels(path, [Panel("", "step", "loss", lines, log="y")], columns=1)


def save_heat_maps(
    path: Path,
    panels: Mapping[str, np.ndarray],
    others: Mapping[str, np.ndarray],
    columns: Sequence[float],
    rows: Sequence[float],
    labels: tuple[str, str],
) -> None:
    """Draw matrices (rows, columns) side by side, with their numbers in the cells; NaN stays empty.

    panels  title → matrix; they share one colour scale. others have one each.
    labels  of the axes, x and y.
    """
    from matplotlib.figure import Figure  # imported here because it takes a second and only the main process draws

    everything = np.concatenate([matrix.ravel() for matrix in panels.values()])
    shared = {"vmin": np.nanmin(everything), "vmax": np.nanmax(everything)}
    count = len(panels) + len(others)
    size = (count * max(2.6, 0.75 * len(columns) + 1.4), 0.55 * len(rows) + 1.9)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)
    for number, (axis, (title, matrix)) in enumerate(zip(axes[0], [*panels.items(), *others.items()])):
        image = axis.imshow(matrix, cmap="viridis", aspect="auto", **(shared if number < len(panels) else {}))
        for row, column in zip(*np.nonzero(~np.isnan(matrix))):
            dark = image.norm(matrix[row, column]) < 0.6
            text = f"{matrix[row, column]:.3g}"
            axis.text(column, row, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
        axis.set_xticks(range(len(columns)), [f"{value:g}" for value in columns])
        axis.set_yticks(range(len(rows)), [f"{value:g}" for value in rows])
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(labels[0], fontsize=8)
    axes[0, 0].set_ylabel(labels[1], fontsize=8)
    figure.savefig(path, dpi=130)
