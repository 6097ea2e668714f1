"""Curves and heat maps drawn with matplotlib: panels side by side, one colour for each name, readable ticks."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tread.runtime.files import explain_failure, whole_file

logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # its first message would break a progress bar


@dataclass(frozen=True)
class Line:
    """A named curve of points (x, y), in the same colour in all panels. The name "" is left out of the legend.

    spread  half the height of each point's band or, in a Panel with `names`, half the length of its bar; None: neither.
    dashed  True: a dashed curve with square points, for example one that must not be compared with solid curves.
    colour  a matplotlib colour; None: chosen by the name's position among the names in the figure.
    labels  texts beside the points; `dots` are further points (x, y), drawn small and pale.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float] | None = None
    dashed: bool = False
    colour: str | None = None
    labels: Sequence[str] = ()
    dots: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Panel:
    """One pair of axes with its lines.

    log     axes with a logarithmic scale: "", "x", "y" or "xy".
    levels  {name: y} of dotted horizontal lines; with `names`, {name: x} of vertical ones.
    names   if y is a category, the labels of y = 0, 1, …, from the top; the points are then not joined by lines.
    noise   half the width of a grey band around y = 0 (with `names` x = 0) that marks chance differences, or None.
    zero    whether the y axis begins at 0.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    log: str = ""
    levels: dict[str, float] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    noise: float | None = None
    zero: bool = False


def save_panels(path: Path, panels: Sequence[Panel], columns: int, title: str = "", width: float = 4.6) -> None:
    """Draw panels, each at least `width` inches wide, into an image file, `columns` in a row, under a common title and
    with one legend below. Raises OSError if writing fails."""
    from matplotlib import ticker  # imported here because it takes a second and only the main process draws
    from matplotlib.figure import Figure

    rows = -(-len(panels) // columns)
    longest = max((len(panel.names) for panel in panels), default=0)
    height = rows * (1.3 + 0.32 * longest) if longest else max(4.5, 3.6 * rows)
    figure = Figure(figsize=(max(7.0, width * columns), height), layout="constrained")
    if title:
        figure.suptitle(title, fontsize=11)
    axes = figure.subplots(rows, columns, squeeze=False)
    names, handles = list(dict.fromkeys(line.name for panel in panels for line in panel.lines)), {}  # by label
    for axis, panel in zip(axes.flat, panels):
        for line in panel.lines:
            colour = line.colour or f"C{names.index(line.name) % 10}"
            style = "" if panel.names else "--" if line.dashed else "-"
            marker = ("s" if line.dashed else "o") + style if len(line.x) <= 30 else style
            if line.spread is not None and panel.names:
                axis.errorbar(line.x, line.y, xerr=line.spread, fmt="|", markersize=10, color=colour, capsize=3)
                continue
            [handles[line.name]] = axis.plot(line.x, line.y, marker, color=colour, markersize=4, linewidth=1.2)
            if line.dots:
                axis.plot(*zip(*line.dots), "o", color=colour, alpha=0.4, markersize=2)
            for text, *place in zip(line.labels, line.x, line.y):
                axis.annotate(text, place, (3, 3), textcoords="offset points", fontsize=7, color=colour)
            if line.spread is not None:
                y, spread = np.array(line.y), np.array(line.spread)
                axis.fill_between(line.x, y - spread, y + spread, color=colour, alpha=0.15, linewidth=0)
        for name, height in panel.levels.items():
            draw = axis.axvline if panel.names else axis.axhline
            handles[name] = draw(height, color="black", linestyle=":", linewidth=1)
        if panel.noise:
            span = axis.axvspan if panel.names else axis.axhspan
            span(-panel.noise, panel.noise, color="grey", alpha=0.2, linewidth=0)
        if panel.zero:
            axis.set_ylim(bottom=0)
        whole = all(float(x).is_integer() for line in panel.lines for x in line.x)  # no ticks between steps
        axis.xaxis.set_major_locator(ticker.MaxNLocator(4 if panel.names else 6, integer=whole))
        axis.xaxis.set_major_formatter("{x:,.10g}")
        for letter in panel.log:
            make_logarithmic(axis, letter)
        if panel.names:
            axis.set_yticks(range(len(panel.names)), panel.names)
            axis.set_ylim(len(panel.names) - 0.5, -0.5)
        axis.set_title(panel.title, fontsize=10)
        axis.set(xlabel=panel.x_label, ylabel=panel.y_label)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    if any(names):
        handles.pop("", None)
        columns = min(2, columns)
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns, fontsize="small")
    with explain_failure(path):
        figure.savefig(path, dpi=110)


def make_logarithmic(axis: object, letter: str) -> None:
    """Make the x or y axis (`letter`) of a matplotlib Axes, `axis`, logarithmic, with plain numbers at its ticks."""
    from matplotlib import ticker

    getattr(axis, f"set_{letter}scale")("log")
    ruler = getattr(axis, f"{letter}axis")
    low, high = ruler.get_view_interval()
    if high < 20 * low:  # a logarithmic locator would set only one or two ticks
        ruler.set_major_locator(ticker.MaxNLocator(6))
    else:
        ruler.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if high < 1e4 * low else (1,), numticks=12))
    ruler.set_major_formatter(lambda value, place: f"{value:g}")
    ruler.set_minor_locator(ticker.NullLocator())


def save_curve(path: Path, records: Sequence[dict], routed: bool, evaluations: Mapping[str, str]) -> None:
    """Draw training and evaluation losses over the steps. `records` are parsed lines of metrics.jsonl; `evaluations` is
    {an evaluation loss's key in these records: its name}. routed=True: the legend notes that tokens skipped blocks."""
    names = {"loss": "training loss" + ", with routes: not comparable to runs without" * routed}
    names |= {key: f"{called}: EMA weights, all tokens, held-out data" for key, called in evaluations.items()}
    lines = []
    for key, name in names.items():
        points = [(record["step"], record[key]) for record in records if key in record]
        lines += [Line(name, *zip(*points))] if points else []
    save_panels(path, [Panel("", "step", "loss", lines, log="y")], columns=1)


def save_heat_maps(
    path: Path,
    panels: Mapping[str, np.ndarray],
    others: Mapping[str, np.ndarray],
    columns: Sequence[float | str],
    rows: Sequence[float | str],
    labels: tuple[str, str],
    title: str = "",
    most: int = 14,
) -> None:
    """Draw matrices (rows, columns) side by side into a PNG file, with numbers in the cells; cells that are NaN stay
    empty. With more than `most` rows or columns, cells are small, ticks are fewer, and a colour bar replaces numbers.

    panels         {title: matrix}, at least one; these matrices share one colour scale.
    others         {title: matrix}; each of these has a colour scale of its own.
    columns, rows  tick labels.
    labels         titles of the x and the y axis.
    title          common title.
    """
    from matplotlib.figure import Figure  # imported here because it takes a second and only the main process draws

    everything = np.concatenate([matrix.ravel() for matrix in panels.values()])
    shared = {"vmin": np.nanmin(everything), "vmax": np.nanmax(everything)}
    matrices, longest = [*panels.items(), *others.items()], max(len(columns), len(rows))
    numbered = longest <= most
    width, height, every = (0.75, 0.55, 1) if numbered else (0.15, 0.15, max(2, -(-longest // 15)))
    size = (len(matrices) * max(2.6, width * len(columns) + 0.7), height * len(rows) + 1.9)
    figure = Figure(figsize=size, layout="constrained")
    if title:
        figure.suptitle(title, fontsize=11)
    axes = figure.subplots(1, len(matrices), squeeze=False)
    for number, (axis, (title, matrix)) in enumerate(zip(axes[0], matrices)):
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
