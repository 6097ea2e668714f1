"""Figures: loss curves and heat maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tread.evaluation.curves import Line, Panel, save_panels
from tread.evaluation.heldout_loss import CALLED
from tread.runtime.files import whole_file

NUMBERED = 14  # rows or columns: in a heat map of more, the numbers could not be read


def save_curve(path: Path, records: Sequence[dict], routed: bool) -> None:
    """Draw training and evaluation loss over the steps, from the records of metrics.jsonl."""
    names = {
        "loss": "training loss" + (", with routes: not comparable to runs without" if routed else ""),
        **{name: f"{called}: EMA weights, all tokens, held-out data" for name, called in CALLED.items()},
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
    columns: Sequence[float | str],
    rows: Sequence[float | str],
    labels: tuple[str, str],
) -> None:
    """Draw matrices (rows, columns) side by side, with their numbers in the cells; NaN stays empty.

    Large ones have small cells, a colour bar in the place of the numbers, and not all of their ticks.

    panels  title → matrix; they share one colour scale. others have one each.
    labels  of the axes, x and y.
    """
    from matplotlib.figure import Figure  # imported here because it takes a second and only the main process draws

    everything = np.concatenate([matrix.ravel() for matrix in panels.values()])
    shared = {"vmin": np.nanmin(everything), "vmax": np.nanmax(everything)}
    count = len(panels) + len(others)
    longest = max(len(columns), len(rows))
    numbered = longest <= NUMBERED
    width, height, every = (0.75, 0.55, 1) if numbered else (0.15, 0.15, -(-longest // 15))
    size = (count * max(2.6, width * len(columns) + 1.4), height * len(rows) + 1.9)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)
    for number, (axis, (title, matrix)) in enumerate(zip(axes[0], [*panels.items(), *others.items()])):
        image = axis.imshow(matrix, cmap="viridis", aspect="auto", **(shared if number < len(panels) else {}))
        for row, column in zip(*np.nonzero(~np.isnan(matrix))) if numbered else ():
            dark = image.norm(matrix[row, column]) < 0.6
            text = f"{matrix[row, column]:.3g}"
            axis.text(column, row, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
        for names, set_ticks in ((columns, axis.set_xticks), (rows, axis.set_yticks)):
            shown = [value if isinstance(value, str) else f"{value:g}" for value in names]
            set_ticks(range(0, len(names), every), shown[::every])
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(labels[0], fontsize=8)
        if not numbered:
            figure.colorbar(image, ax=axis)
    axes[0, 0].set_ylabel(labels[1], fontsize=8)
    with whole_file(path) as partial:
        figure.savefig(partial, dpi=130, format="png")
