"""Curves and heat maps for people, as matplotlib holds them: which numbers stand at ticks and in cells, and what a
single point looks like."""

import logging
from pathlib import Path

import matplotlib.figure
import numpy as np
import pytest
from conftest import names_in

from tread.drawing.charts import Line, Panel, save_curve, save_heat_maps, save_panels
from tread.evaluation.metric_table import heldout_titles


@pytest.fixture
def figures(tmp_path, monkeypatch):
    """The figures that were saved, in the working folder."""
    found, savefig = [], matplotlib.figure.Figure.savefig
    watched = lambda self, *args, **kw: found.append(self) or savefig(self, *args, **kw)  # noqa: E731
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", watched)
    monkeypatch.chdir(tmp_path)
    return found


def labels_of(figures, x, y, log=""):
    """The texts at the ticks of both axes."""
    save_panels(Path("panel.png"), [Panel("", "step", "loss", [Line("a", x, y)], log)], 1)
    (axes,) = figures[-1].axes
    axes.figure.canvas.draw()
    return [[t.get_text() for t in axis.get_ticklabels() if t.get_text()] for axis in (axes.xaxis, axes.yaxis)]


@pytest.mark.parametrize("y", [[0.41], [0.45, 0.41], [1.15, 0.41], [9.0, 0.4], [1e3, 1e-3], [1e25, 1.0]])
def test_a_logarithmic_axis_has_several_plain_numbers(figures, y):
    """Within a decade, over one and over many: 3 to 15 ticks in sight, in the digits that Python reads back."""
    _, labels = labels_of(figures, range(1, len(y) + 1), y, "y")
    low, high = figures[-1].axes[0].get_ylim()
    shown = [label for label in labels if low <= float(label) <= high]
    assert 3 <= len(shown) <= 15 and len(set(shown)) == len(shown)
    assert all(len(label) <= 8 and "$" not in label for label in shown)


def test_steps_are_whole_numbers_with_thousands(figures):
    few, _ = labels_of(figures, [20, 21], [2.0, 1.0])
    assert all(label.isdigit() for label in few) and len(few) >= 2
    many, _ = labels_of(figures, [0, 400_000], [2.0, 1.0])
    assert "400,000" in many and len(many) < 12


def test_a_loss_curve_of_one_point_shows_it(figures):
    one = [{"step": 20, "loss": 0.5}, {"step": 20, "eval_loss": 0.4}]
    for records in (one, [{"step": step, "loss": 1.0 / step} for step in range(1, 100)], []):
        save_curve(Path("loss.png"), records, True, heldout_titles())
    lines, (many,) = (figure.axes[0].lines for figure in figures[:2])
    assert [line.get_xydata().tolist() for line in lines] == [[[20.0, 0.5]], [[20.0, 0.4]]]
    assert all(line.get_marker() == "o" for line in lines) and many.get_marker() != "o"
    assert Path("loss.png").stat().st_size > 1000  # without a record


@pytest.mark.parametrize("size", [3, 29])
def test_heat_maps_have_numbers_where_they_can_be_read_else_a_colour_bar(figures, size):
    """And labels that do not touch: at most 16 on an axis; both panels are on one scale."""
    matrix, names = np.linspace(0, 1, size * size).reshape(size, size), ["in", *range(size - 1)]
    save_heat_maps(Path("map.png"), {"a": matrix, "b": matrix / 2}, {}, names, names, ("x", "y"))
    axes = figures[-1].axes
    assert len(axes) == (2 if size == 3 else 4)
    for axis in axes[:2]:
        assert len(axis.texts) == (9 if size == 3 else 0)
        assert axis.images[0].get_clim() == (0, 1)
        shown = [label.get_text() for label in axis.get_yticklabels()]
        assert shown[:2] == ["in", "0" if size == 3 else "1"] and len(shown) <= 16
    assert names_in(Path()) == {"map.png"}


def test_matplotlibs_font_cache_does_not_speak_into_a_progress_bar(caplog):
    logging.getLogger("matplotlib.font_manager").warning("Matplotlib is building the font cache")
    assert not caplog.records


def test_a_name_that_begins_with_an_underscore_is_in_the_legend(figures):
    save_panels(
        Path("panel.png"), [Panel("", "step", "loss", [Line("_base", [1, 2], [1, 2])], levels={"even": 1.5})], 1
    )
    assert [text.get_text() for text in figures[-1].legends[0].get_texts()] == ["_base", "even"]
