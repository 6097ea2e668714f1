"""A metric that a file of somebody else's adds, seen wherever metrics are shown; its values are worked out by hand."""

import csv
import importlib.util
import json

import compare_runs
import guidance_sweep
import numpy as np
import pytest
import torch
from conftest import open_reference, write_json
from test_reference_scorer import features, parts_of, score

from tread.evaluation.metric_table import METRICS, Metric
from tread.evaluation.score_files import add_line, table
from tread.reports.comparison import open_groups, panel, reach
from tread.reports.report import write_report

MODULE = """
from tread.evaluation.metric_table import METRICS, Metric

def gap(reference, samples, seen):
    return (reference.mean() - samples.mean()).abs().item()

METRICS["gap"] = Metric("my gap", "lower", unit="m", compute=lambda sets: sets.compare(gap, "gap"), needs="pictures")
METRICS["taste"] = Metric("my taste", "higher", count="tasted")
"""


def write_run(folder, values):
    """A run that recorded my taste each 100 steps."""
    (folder / "step_0000200").mkdir(parents=True)
    config = {"name": folder.name, "objective": "edm", "model": {"name": folder.name}, "dataset": {"name": "digits"}}
    config["train"] = {"steps": 200, "batch_size": 8}
    write_json(folder / "run.json", [{"config": config}])
    records = [{"step": 100 * number, "taste": value} for number, value in enumerate(values, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture
def added(tmp_path, monkeypatch):
    """The module is imported, and what it adds is taken out again afterwards."""
    for name in ("gap", "taste"):
        monkeypatch.setitem(METRICS, name, Metric(""))
        del METRICS[name]
    (tmp_path / "mine.py").write_text(MODULE)
    spec = importlib.util.spec_from_file_location("mine", tmp_path / "mine.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_a_metric_on_inception_features_is_scored_and_a_column_of_its_own(added, tmp_path, pictures_of):
    """By NumPy on the same features; where the reference has no pictures, that is said."""
    ours, theirs = features(30, 1, 0.5, sizes=(128, 35)), features(20, 2, 0.0, sizes=(128, 35))
    np.savez(tmp_path / "batch.npz", pictures_of(20, 8, 0))
    samples = parts_of(tmp_path / "a", ours)
    values, _ = score(samples, open_reference(tmp_path / "batch.npz"), parts_of(tmp_path / "b", theirs))
    assert [*values][-1] == "gap"
    assert values["gap"] == pytest.approx(abs(ours["pool"].mean() - theirs["pool"].mean()), rel=1e-5)
    np.savez(tmp_path / "edm.npz", mu=theirs["pool"].mean(axis=0), sigma=np.cov(theirs["pool"], rowvar=False))
    _, unavailable = score(samples, open_reference(tmp_path / "edm.npz", 16), None)
    assert "arr_0" in unavailable["gap"]

    record = {**values, "taste": 0.75, "settings": {}, "counts": {"gap": 30}, "unavailable": {}, "warnings": []}
    record |= {"reference_count": 20, "reference_statistics": "file"}
    (line,) = table(record).splitlines()
    assert line.split() == ["my", "gap", f"{values['gap']:.5g}", "30", "samples", "against", "20"]
    add_line(tmp_path / "fid.csv", record)
    with (tmp_path / "fid.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (float(row["gap"]), row["taste"]) == (values["gap"], "0.75")
    metrics = ["label_agreement", "frechet_pixels", "clip_score", "gap", "taste"]
    assert [name for name in row if name in METRICS][-5:] == metrics


def test_a_metrics_failure_and_its_numpy_number_end_nothing(tmp_path, monkeypatch, pictures_of):
    monkeypatch.setitem(METRICS, "single", Metric("", compute=lambda sets: sets.samples.whole("pool").mean()))
    monkeypatch.setitem(METRICS, "broken", Metric("", compute=lambda sets: torch.ones(2, 3) @ torch.ones(2, 3)))
    ours = features(30, 1, 0.5, sizes=(128, 35))
    np.savez(tmp_path / "batch.npz", pictures_of(20, 8, 0))
    values, unavailable = score(
        parts_of(tmp_path / "a", ours), open_reference(tmp_path / "batch.npz"), parts_of(tmp_path / "b", ours)
    )
    assert json.loads(json.dumps(values))["single"] == pytest.approx(ours["pool"].mean()) and "fid" in values
    assert unavailable["broken"].startswith("it failed: RuntimeError: mat1 and mat2")


def test_it_is_compared_drawn_and_reported(added, tmp_path, capsys):
    """Higher is better: the run that comes to 0.5 by step 100 reaches what the other ends with."""
    fast = write_run(tmp_path / "fast", [0.5, 0.75])
    slow = write_run(tmp_path / "slow", [0.25, 0.5])
    score = {"gap": 2.5, "counts": {"gap": 30}, "count": 30, "time": "2026-01-02", "step": 200}
    write_json(fast / "step_0000200/fid.json", score)
    groups = open_groups([str(fast), str(slow)])
    assert "fast reaches the my taste 0.5 of slow by step 100, 0.50 times the other's 200" in reach(*groups, "taste")
    assert "slow does not reach the my taste 0.75 of fast: its best is 0.5" in reach(*groups[::-1], "taste")
    assert panel(groups, "taste", "step").y_label == "my taste"
    compare_runs.show(groups)
    text = capsys.readouterr().out
    assert text.startswith("| run | seeds | steps | my taste |") and "| fast | 1 | 200 | 0.7500 |" in text
    page = write_report([fast, slow]).read_text()
    assert "<th class=number>my taste</th>" in page and "my gap ↓" in page and '"title": "my taste"' in page


def test_a_sweep_draws_it_and_finds_its_best(added, tmp_path, monkeypatch, capsys):
    points = {guidance_sweep.Point(0.0, 0.0, scale, None): scale for scale in (1.0, 2.0, 3.0)}
    records = {at: {"taste": 1 - (scale - 2) ** 2, "count": 10, "flops_relative": 1.0} for at, scale in points.items()}
    panels = []
    monkeypatch.setattr(guidance_sweep, "save_panels", lambda path, drawn, columns: panels.extend(drawn))
    sweep = guidance_sweep.Sweep((1.0, 2.0, 3.0), None, None, (None,), False, "taste")
    guidance_sweep.write(tmp_path, sweep, records, "taste", routed=False)
    assert "best      taste 1 of 10 samples at scale 2.0" in capsys.readouterr().out
    assert [panel.title for panel in panels] == ["my taste, higher is better, 10 samples"]
    assert "taste" in (tmp_path / "sweep.csv").read_text().splitlines()[0].split(",")
