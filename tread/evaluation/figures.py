"""Figures: loss curves and heat maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np


def save_curve(path: Path, records: Sequence[dict], routed: bool) -> None:
    """Draw training and evaluation loss over the steps, from the records of metrics.jsonl."""
    from matplotlib.figure import Figure  # imported here because it takes a second and only the main process draws

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for key, label, style in (
        ("loss", "training loss" + (", with routes: not comparable to runs without" if routed else ""), "-"),
        ("eval_loss", "evaluation loss: EMA weights, all tokens, held-out data", "o-"),
    ):
        points = [(record["step"], record[key]) for record in records if key in record]
        if points:
            axes.plot(*zip(*points), style, label=label, markersize=4, linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_yscale("log")
    axes.grid(alpha=0.3, which="both")
    if axes.lines:
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)


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
    from matplotlib.figure import Figure

    everything = np.concatenate([matrix.ravel() for matrix in panels.values()])
    shared = {"vmin": np.nanmin(everything), "vmax": np.nanmax(everything)}
    count = len(panels) + len(others)
    size = (count * (0.75 * len(columns) + 1.4), 0.55 * len(rows) + 1.6)
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
