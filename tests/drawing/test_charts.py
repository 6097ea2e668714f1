"""Curves and heat maps for people, as matplotlib holds them: which numbers stand at ticks and in cells, and what a
single point looks like."""

from __future__ import annotations

import matplotlib.figure
import numpy as np
import pytest

from tread.drawing.charts import Line, Panel, save_curve, save_heat_maps, save_panels
from tread.evaluation.metric_table import heldout_titles


@pytest.fixture
def figures(monkeypatch):
    """The figures that were saved."""
    found, savefig = [], matplotlib.figure.Figure.savefig
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda self, *args, **kw: found.append(self) or savefig(self, *args, **kw)
    )
    return found


def labels_of(figures, y, x=None, **options):
    save_panels("panel.png", [Panel("", "step", "loss", [Line("a", x or range(1, len(y) + 1), y)], **options)], 1)
    (axes,) = figures[-1].axes
    axes.figure.canvas.draw()
    return (
        [label.get_text() for label in one.get_ticklabels() if label.get_text()] for one in (axes.xaxis, axes.yaxis)
    )


@pytest.mark.parametrize("y", [[0.41], [0.45, 0.41], [1.15, 0.41], [9.0, 0.4], [1e3, 1e-3], [1e25, 1.0]])
def test_a_logarithmic_axis_has_several_plain_numbers(figures, tmp_path, monkeypatch, y):
    """Within a decade, over one and over many: 3 to 15 ticks in sight, in the digits that Python reads back."""
    monkeypatch.chdir(tmp_path)
    _, labels = labels_of(figures, y, log="y")
    low, high = figures[-1].axes[0].get_ylim()
    shown = [label for label in labels if low <= float(label) <= high]
    assert 3 <= len(shown) <= 15 and len(set(shown)) == len(shown)
    assert all(len(label) <= 8 and "$" not in label for label in shown)


def test_steps_are_whole_numbers_with_thousands(figures, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few, _ = labels_of(figures, [2.0, 1.0], x=[20, 21])
    assert all(label.isdigit() for label in few) and len(few) >= 2
    many, _ = labels_of(figures, [2.0, 1.0], x=[0, 400_000])
    assert "400,000" in many and len(many) < 12


def test_places_are_lines_with_their_names(figures, tmp_path):
    places = {"later": 300.0, "first": 20.0}
    save_panels(tmp_path / "x.png", [Panel("", "x", "y", [Line("a", [1, 1000], [1, 2])], "xy", places=places)], 1)
    (axes,) = figures[0].axes
    assert {line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"} == {*places.values()}
    texts = {text.get_text(): text for text in axes.texts}
    assert {name: text.get_position()[0] for name, text in texts.items()} == places
    assert [texts[name].get_va() for name in ("first", "later")] == ["top", "bottom"]  # not on one another


def test_a_loss_curve_of_one_point_shows_it(figures, tmp_path):
    save_curve(
        tmp_path / "loss.png",
        [{"step": 20, "loss": 0.5}, {"step": 20, "eval_loss": 0.4}],
        routed=True,
        evaluations=heldout_titles(),
    )
    lines = figures[0].axes[0].lines
    assert [line.get_xydata().tolist() for line in lines] == [[[20.0, 0.5]], [[20.0, 0.4]]]
    assert all(line.get_marker() == "o" for line in lines)
    save_curve(
        tmp_path / "loss.png",
        [{"step": s, "loss": 1.0 / s} for s in range(1, 100)],
        routed=False,
        evaluations=heldout_titles(),
    )
    assert figures[1].axes[0].lines[0].get_marker() != "o"  # a hundred points are a line
    save_curve(tmp_path / "loss.png", [], routed=False, evaluations=heldout_titles())
    assert (tmp_path / "loss.png").stat().st_size > 1000


@pytest.mark.parametrize("size", [3, 29])
def test_heat_maps_have_numbers_where_they_can_be_read_else_a_colour_bar(figures, tmp_path, size):
    """And labels that do not touch: at most 16 on an axis; both panels are on one scale."""
    matrix, names = np.linspace(0, 1, size * size).reshape(size, size), ["in", *range(size - 1)]
    save_heat_maps(tmp_path / "map.png", {"a": matrix, "b": matrix / 2}, {}, names, names, ("x", "y"))
    axes = figures[-1].axes
    assert len(axes) == (2 if size == 3 else 4)
    for axis in axes[:2]:
        assert len(axis.texts) == (9 if size == 3 else 0)
        assert axis.images[0].get_clim() == (0, 1)
        shown = [label.get_text() for label in axis.get_yticklabels()]
        assert shown[:2] == ["in", "0" if size == 3 else "1"] and len(shown) <= 16
    assert [path.name for path in tmp_path.iterdir()] == ["map.png"]
