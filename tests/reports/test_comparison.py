"""Runs side by side, from records made by hand: what they come to is worked out beside them, or by numpy."""

import copy
import csv
import json
from pathlib import Path

import compare_runs
import numpy as np
import pytest
from conftest import names_in, read_json, write_json
from PIL import Image

from tread.reports.comparison import COMPARABLE, FAIR, curve_metrics, open_groups, reach, unit, unlike

CONFIG = {
    "name": "a",
    "seed": 0,
    "results": "results",
    "resume": "auto",
    "objective": "edm",
    "model": {"name": "tread", "depth": 6},
    "dataset": {"name": "digits", "path": "data"},
    "train": {"steps": 300, "batch_size": 8},
    "optim": {"lr": 1.0},
}


def write_run(folder, losses, flops=10.0, seconds=2.0, metric="eval_loss", **changes):
    """A run evaluated each 100 steps, of so many FLOPs and seconds a step; changes: dotted key with __ → value."""
    config = copy.deepcopy(CONFIG) | {"name": folder.name}
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        (config[section] if section else config)[name] = value
    folder.mkdir(parents=True)
    write_json(folder / "run.json", [{"config": {}}, {"config": config}])
    records = []
    for number, loss in enumerate(losses, start=1):
        costs = {"flops": flops and flops * 100 * number, "seconds": seconds and seconds * 100 * number}
        spent = {"step": 100 * number} | {key: value for key, value in costs.items() if value}
        records += [{**spent, "loss": 9.0, "images_per_s": 50.0 + number}, {**spent, metric: loss}]
    add_records(folder, *records)
    return str(folder)


def add_records(folder, *records):
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def shown(capsys):
    """Folders of runs → what compare_runs.py prints of them."""

    def shown(*folders) -> str:
        compare_runs.show(open_groups(folders))
        return capsys.readouterr().out

    return shown


def test_runs_that_differ_by_their_seed_alone_are_put_together(tmp_path):
    """Means and standard deviations: numpy's, at the steps that all seeds have."""
    losses = [[3.0, 2.0, 1.0], [3.5, 2.5, 1.25], [4.0, 2.25]]
    for seed, values in enumerate(losses):
        write_run(tmp_path / f"tread-{seed}", values, seconds=2.0 + seed, seed=seed)
    write_run(tmp_path / "dit", [3.0], model__name="dit")
    (tmp_path / "no-run").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    groups = open_groups([str(tmp_path / "dit"), str(tmp_path / "*")])
    assert [(group.name, len(group.runs)) for group in groups] == [("dit", 1), ("tread", 3)]
    curve = groups[1].curve("eval_loss")
    assert [point.step for point in curve] == [100, 200]
    for number, point in enumerate(curve):
        values = [series[number] for series in losses]
        assert point.value == pytest.approx(np.mean(values)) and point.spread == pytest.approx(np.std(values, ddof=1))
        assert (point.flops, point.seconds) == (1000.0 * (number + 1), 300.0 * (number + 1))
    assert groups[1].last("eval_loss") == [1.0, 1.25, 2.25] and groups[0].curve("eval_loss")[0].spread is None


def test_groups_are_named_by_what_tells_them_apart(tmp_path):
    one = write_run(tmp_path / "one", [1.0])
    other = write_run(tmp_path / "other", [1.0], optim__lr=0.5)
    dense = write_run(tmp_path / "dense", [1.0], model__name="dit")
    assert [group.name for group in open_groups([one, other, dense])] == ["tread, lr 1.0", "tread, lr 0.5", "dit"]
    assert [group.name for group in open_groups([one])] == ["tread"]
    runs = [
        write_run(tmp_path / name, [1.0], model__name=model, model__routes=routes)
        for name, model, routes in (("a", "dit", []), ("b", "tread", [{"r": 0.5}]), ("c", "tread", [{"r": 0.25}]))
    ]
    assert [group.name for group in open_groups(runs)] == ["dit", "tread, r 0.5", "tread, r 0.25"]


def test_when_one_run_is_as_far_as_another(tmp_path):
    """Loss 2.0: the routed run has it at step 200 of 300, with 5 FLOPs a step for 10: 1000 of 3000, 400 s of 600."""
    routed = write_run(tmp_path / "routed", [3.0, 1.9, 1.8], flops=5.0)
    dense = write_run(tmp_path / "dense", [4.0, 3.0, 2.0], model__name="dit")
    one, other = open_groups([routed, dense])
    text = reach(one, other, "eval_loss")
    assert text == (
        "tread reaches the evaluation loss 2 of dit by step 200, 0.67 times the other's 300, with 1e+03 FLOPs, "
        "0.33 times the other's 3e+03, in 6.67 minutes, 0.67 times the other's 10"
    )
    assert reach(other, one, "eval_loss") == ("dit does not reach the evaluation loss 1.8 of tread: its best is 2")


def test_records_of_before_times_were_kept_are_compared_by_steps_alone(tmp_path):
    old = write_run(tmp_path / "old", [2.0, 1.0], flops=None, seconds=None)
    one, other = open_groups([old, write_run(tmp_path / "new", [2.0, 1.0], model__name="dit")])
    assert [(point.flops, point.seconds) for point in one.curve("eval_loss")] == [(None, None)] * 2
    text = reach(one, other, "eval_loss")
    assert "by step 200" in text and "FLOPs" not in text and "minutes" not in text


def test_what_is_not_alike_is_said_and_then_nobody_reaches_anybody(tmp_path, shown):
    plain = write_run(tmp_path / "plain", [2.0, 1.0, 0.9])
    longer = write_run(tmp_path / "longer", [2.0, 1.0], model__name="dit", train__batch_size=16)
    flow = write_run(tmp_path / "flow", [2.0, 1.0, 0.9], objective="rf")
    configs = [group.config for group in open_groups([plain, longer])]
    assert unlike(configs, COMPARABLE) == {} and unlike(configs, FAIR) == {"train.batch_size": [8, 16]}
    text = shown(plain, longer)
    assert "warning: train.batch_size differs: 8 (tread), 16 (dit)" in text and text.count(" reaches ") == 1
    assert f"warning: {longer} is at step 200 of 300" in text and "| tread | 1 | 300 | 0.9000 | 52.00 |" in text
    text = shown(plain, flow)
    assert "objective differs: edm (" in text and "do not mean the same" in text and " reaches " not in text
    for folder, held in ((plain, "sha256 a, 9 bytes"), (longer, "sha256 b, 9 bytes")):
        starts = read_json(Path(folder) / "run.json")
        write_json(Path(folder) / "run.json", [starts[0] | {"heldout_files": {"0.npy": held}}, starts[1]])
        assert " reaches " in shown(plain, longer) if folder == plain else " reaches " not in shown(plain, longer)


def test_seeds_are_averaged_though_an_older_one_records_no_heldout_files(tmp_path, shown):
    runs = [write_run(tmp_path / name, [0.4], seed=seed) for seed, name in enumerate("ab")]
    *earlier, start = read_json(Path(runs[0]) / "run.json")
    write_json(Path(runs[0]) / "run.json", [*earlier, start | {"heldout_files": {"0.npy": "sha256 a, 9 bytes"}}])
    assert len(open_groups(runs)) == 1
    *earlier, start = read_json(Path(runs[1]) / "run.json")
    write_json(Path(runs[1]) / "run.json", [*earlier, start | {"heldout_files": {"0.npy": "sha256 b, 9 bytes"}}])
    assert len(open_groups([*runs, write_run(tmp_path / "c", [0.4], model__name="dit")])) == 3  # each has its own


def test_seeds_of_different_code_are_said(tmp_path, shown):
    runs = [write_run(tmp_path / name, [0.4], seed=seed) for seed, name in enumerate("ab")]
    for folder, commit in zip(runs, ("1234+changes.ab", "1234+changes.cd")):
        starts = json.loads((tmp_path / folder / "run.json").read_text())
        write_json(tmp_path / folder / "run.json", [*starts[:-1], starts[-1] | {"versions": {"git": commit}}])
    assert "its runs are of different code: 1234+changes.ab, 1234+changes.cd" in shown(*runs)


def test_runs_of_one_seed_are_no_seeds(tmp_path, shown):
    one, again = (write_run(tmp_path / name, [2.0, 1.0]) for name in ("one", "again"))
    assert "warning: tread: 2 runs of 1 seeds: ± is not that of seeds" in shown(one, again)
    other = write_run(tmp_path / "other", [2.0, 1.0], seed=1)
    assert "runs of" not in shown(one, other)


def test_rectified_flows_compare_by_the_velocity_error_alone(tmp_path, shown):
    """Runs of other noise densities and weights compare; EDM's loss and older records share no column with them."""
    velocity = {"metric": "eval_velocity", "objective": "rf"}
    young = {"time": "uniform", "direction": 1.0, "shift": 0.3}
    plain = write_run(tmp_path / "plain", [2.0, 1.0, 0.9], rf={"time": "logit_normal"}, **velocity)
    other = write_run(tmp_path / "other", [1.9, 0.9, 0.8], rf=young, **velocity)
    old = write_run(tmp_path / "old", [1.5, 1.4, 1.3], objective="rf", rf={"time": "uniform"})
    edm = write_run(tmp_path / "edm", [0.5, 0.4, 0.3], rf={})
    edm_otherwise = write_run(tmp_path / "otherwise", [0.5, 0.4, 0.2], rf={}, edm={"P_mean": 0.0})
    text = shown(plain, other)
    assert text.startswith("| run | seeds | steps | velocity error | images/s |") and "mean the same" not in text
    assert "reaches the velocity error 0.9 of" in text and "warning: rf.direction differs: 0.0 (" in text
    for folder, beside, own, said in (
        (plain, edm, "0.9000", "numbers of runs that differ so do not mean the same"),
        (other, old, "0.8000", ""),
    ):
        groups, text = open_groups([folder, beside]), shown(folder, beside)
        assert all(sum(bool(group.curve(metric)) for metric in curve_metrics(groups)) == 1 for group in groups)
        head, _, first, second, *_ = text.splitlines()
        assert head.split(" | ")[3:5] == ["evaluation loss", "velocity error"]
        assert first.split(" | ")[3:5] == ["–", own] and second.split(" | ")[4] == "–"
        assert said in text and " reaches the " not in text and " reach the " not in text
    text = shown(edm, edm_otherwise)
    assert "the evaluation loss of runs that differ so does not mean the same" in text and " reaches " not in text


def test_a_fid_under_another_shift_means_something_else(tmp_path, shown):
    """The velocity errors of the same runs mean the same."""
    for shift in (1.0, 0.3):
        folder = tmp_path / f"{shift}"
        write_run(folder, [2.0, 1.0], metric="eval_velocity", objective="rf", rf={"shift": shift})
        add_records(folder, {"step": 200, "fid": 10.0, "fid_samples": 50})
    text = shown(f"{tmp_path}/1.0", f"{tmp_path}/0.3")
    assert "rf.shift differs: 1.0 (" in text and "the FID of runs that differ so does not mean the same" in text
    assert "reaches the velocity error" in text and "reaches the FID" not in text


def test_scores_of_other_samplers_mean_something_else(tmp_path, shown):
    """The evaluation losses of the same runs mean the same."""
    for steps in (5, 40):
        write_run(tmp_path / f"{steps}", [2.0, 1.0], sampling={"steps": steps, "classes": steps}, seed=steps)
        add_records(tmp_path / f"{steps}", {"step": 200, "fid": 10.0}, {"step": 200, "label_agreement": 0.9})
    text = shown(f"{tmp_path}/5", f"{tmp_path}/40")
    assert "sampling.steps differs: 5 (5), 40 (40)" in text and "sampling.classes" not in text
    assert all(f"the {name} of runs that differ so does not mean" in text for name in ("FID", "label agreement"))
    assert "reaches the evaluation loss" in text and "reaches the FID" not in text


def test_settings_that_no_name_states_are_said(tmp_path, shown):
    """Of other models, and where names are too long: but not the route and options of one architecture alone."""
    one = write_run(
        tmp_path / "one", [1.0], model={"name": "tread", "depth": 6, "routes": [{"start": 1}], "kernel": "x"}
    )
    other = write_run(tmp_path / "other", [1.0], model={"name": "dit", "depth": 8, "routes": []}, train__label_drop=0.0)
    text = shown(one, other)
    assert "model.depth differs: 6 (tread), 8 (dit)" in text and "train.label_drop differs" in text
    assert "model.routes differs" not in text and "kernel" not in text
    same = write_run(
        tmp_path / "same", [1.0], model={"name": "tread", "depth": 8, "routes": [{"start": 1}], "kernel": "x"}
    )
    assert "tread, depth 8" in (text := shown(one, same)) and "differs" not in text


def test_two_of_three_runs_compare_and_a_shorter_goal_is_no_part_of_more_steps(tmp_path, shown):
    short = write_run(tmp_path / "short", [1.0], model__name="dit")
    plain, flow = (write_run(tmp_path / name, [3.0, 2.0, 0.9], objective=name) for name in ("edm", "rf"))
    text = shown(short, plain, flow)
    assert "reaches the evaluation loss 1 of dit by step 300, 3.00 times the other's 100" in text
    assert "not mean the same: no two such runs are said to reach each other's" in text and "none of" not in text


def test_files_lie_beside_the_first_run_and_not_where_the_command_was_given(tmp_path, monkeypatch):
    run, here = write_run(tmp_path / "results/run", [2.0, 1.0]), tmp_path / "here"
    here.mkdir()
    for folder, words in ((here, (run,)), (tmp_path / "results/run", (".",))):
        monkeypatch.chdir(folder)
        monkeypatch.setattr("sys.argv", ["compare_runs.py", *words])
        compare_runs.main()
        for ending in ("csv", "png"):
            (tmp_path / f"results/comparison.{ending}").unlink()
    monkeypatch.setattr("sys.argv", ["compare_runs.py", ".", "out=there/"])
    with pytest.raises(SystemExit, match="there/ could not be written: it names a folder"):
        compare_runs.main()
    assert not list(here.iterdir()) and names_in(here.parent) == {"results", "here"}


def test_axes_have_units_that_leave_readable_numbers():
    assert unit("flops", 3.4e8) == ("10^6", 1e6) and unit("flops", 2e19) == ("10^18", 1e18)
    seconds = {90.0: ("seconds", 1.0), 0.5: ("seconds", 1.0), 600.0: ("minutes", 60.0), 1e6: ("hours", 3600.0)}
    assert {most: unit("seconds", most) for most in seconds} == seconds


def test_a_table_and_a_picture_of_three_panels_without_a_training_loss(tmp_path, monkeypatch, capsys):
    """The picture's size says how many panels there are. The CSV has a line for each evaluation."""
    for model, seed in (("dit", 0), ("dit", 1), ("tread", 0)):
        write_run(tmp_path / f"{model}-{seed}", [2.0, 1.0], model__name=model, seed=seed)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["compare_runs.py", "dit-0", "*", "out=both"])
    compare_runs.main()
    text = capsys.readouterr().out
    assert text.startswith("| run | seeds | steps | evaluation loss | images/s | minutes | FLOPs |\n")
    assert "| dit | 2 | 200 | 1.000 | 51.50 | 6.667 | 2000 |" in text and "written: both.png, both.csv" in text
    width, height = Image.open("both.png").size
    assert 2.5 < width / height < 3.5
    rows = list(csv.DictReader(open("both.csv")))
    assert [row["run"] for row in rows] == ["dit-0", "dit-0", "dit-1", "dit-1", "tread-0", "tread-0"]
    known = {"group": "dit", "seed": "1", "seconds": "400.0", "flops": "2000.0", "eval_loss": "1.0"}
    assert rows[3] == known | {"run": "dit-1", "step": "200"}
