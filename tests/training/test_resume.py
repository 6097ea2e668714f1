"""Going on with a run: which settings it has, and the warnings about those that differ.

The reference is the run's own record, its run.json, and what was typed, by hand."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT, launch, launch_door, launch_processes, records

import train
from tread.training import settings
from tread.training.resume import settle, take_typed
from tread.training.run_folder import RunLog

RUN = Path("results/digits-tread")
CONFIGS = ROOT / "configs"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    launch(folder, "train.steps=3", "optim.lr=0.003")
    return folder


@pytest.fixture
def begun(trained, tmp_path):
    """A folder with a copy of a run of three steps."""
    shutil.copytree(trained, tmp_path, symlinks=True, dirs_exist_ok=True)
    return tmp_path


def resume(folder, *typed):
    return launch_door(train.main, "config", folder, *typed)


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def warnings(text):
    return [line for line in text.splitlines() if line.startswith("warning: ")]


def recorded(folder):
    return RunLog(folder / RUN).starts()[-1]["config"]


def test_a_folder_alone_goes_on_by_the_runs_own_settings(begun):
    """Then for longer; then moved, with no more of the old place than its name."""
    before = recorded(begun)
    text = resume(begun, f"run={RUN}/")
    assert f"{RUN} goes on at step 3\n" in text and "is finished" in text and warnings(text) == []
    assert recorded(begun) == before and {path.name for path in begun.iterdir()} == {"data", "results"}
    text = resume(begun, f"run={RUN}", "train.steps=4")
    assert warnings(text) == ["warning: train.steps was 3, is 4"]
    assert recorded(begun) == {**before, "train": {**before["train"], "steps": 4}}
    assert [record["step"] for record in records(begun / RUN) if "loss" in record] == [1, 2, 3, 4]
    (begun / RUN).rename(begun / "moved")
    text = resume(begun, "run=moved")
    assert "moved goes on at step 4" in text and warnings(text) == []
    again = RunLog(begun / "moved").starts()[-1]["config"]
    assert (again["name"], again["results"], again["train"]["steps"]) == ("moved", ".", 4)


def test_an_older_record_goes_on(begun):
    """Keys younger than the run have their defaults, also without run.json; and what was typed at a start that saved
    nothing is known from run.json alone."""
    for path in (begun / RUN / "run.json", begun / RUN / "latest" / "info.json"):
        text = path.read_text().replace('"tracker": "none",', "").replace('"wandb": {', '"wandb": {"enabled": false,')
        path.write_text(re.sub(r',\s*"rejoin": null', "", text))
    before = RunLog(begun / RUN).starts()
    (begun / RUN / "run.json").rename(begun / "run.json")
    assert warnings(resume(begun, f"run={RUN}")) == [] and recorded(begun)["tracker"] == "none"
    typed = {**before[0], "config": {**before[0]["config"], "init_weights": "model"}}
    (begun / RUN / "run.json").write_text(json.dumps([*before, typed]))
    assert warnings(resume(begun, f"run={RUN}")) == ["warning: init_weights was ema, is model"]


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        (("run=results/digits-tred",), "results/digits-tred holds no run"),
        (("run=results/digits-tread/latest",), "latest holds no run"),
        (("run=results/digits-tread", "name=x"), "so name=… and results=… can't be set beside it"),
        (("run=results/digits-tread", "resume=false"), "holds a run already"),
        (("name=digits-tread", "model=dit"), "holds a run without model=dit; name=<another name> starts one"),
        (("run=results/digits-tread", "experiment=tiny"), "holds a run without experiment=tiny"),
        (
            ("run=results/digits-tread", "model.routes.0.selection_ratio=0.3", "train.label_drop=0.2", "optim.lr=1"),
            "holds a run with other settings; name=<another name> starts a run of its own\n"
            "  model.routes.0.selection_ratio: 0.5 there, 0.3 here\n  train.label_drop: 0.1 there, 0.2 here",
        ),
    ],
)
def test_what_is_refused_says_what_is_there_and_touches_nothing(begun, typed, shown):
    before = content(begun)
    with pytest.raises(SystemExit) as error:
        resume(begun, *typed)
    assert shown in str(error.value) and content(begun) == before


@pytest.mark.slow
def test_two_processes_go_on_by_the_folder(begun):
    done = launch_processes(begun, f"run={RUN}", "train.steps=5", processes=2)
    assert "8 = 2 processes" in done and [s["processes"] for s in RunLog(begun / RUN).starts()] == [1, 2]


def test_a_changed_config_yaml_is_not_taken_by_an_old_run(composed, tmp_path, monkeypatch):
    """With run=… as with the command again, which also says what else was typed before and is not now."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(CONFIGS, tmp_path / "configs")
    config = tmp_path / "configs" / "config.yaml"
    config.write_text(config.read_text() + "\noptim:\n  betas: [0.9, 0.95]\n")
    experiment = "experiment=imagenet256_b2"
    before = composed(experiment, "train.steps=9")
    monkeypatch.setattr(sys, "argv", ["train.py", experiment, "train.steps=9"])
    log = RunLog(tmp_path / "results" / before["name"])
    log.start(0, before)
    log.close()

    def today(*typed):
        tree = composed(*typed)
        tree["optim"]["betas"] = [0.9, 0.95]
        return settle(tree, typed, tmp_path / "configs")

    betas, how = "optim.betas=[0.9,0.999] (now [0.9,0.95])", "typing key=value changes one"
    assert today(f"run=results/{before['name']}") == (before, [f"warning: the run keeps {betas}; {how}"])
    settled, (warning,) = today(experiment)
    assert settled == before and betas in warning and "train.steps=9 (now 400000)" in warning and how in warning
    settled, told = today(experiment, "optim.betas=[0.9,0.95]", "train.steps=9")
    assert (settled["optim"]["betas"], told) == ([0.9, 0.95], [])


def test_typed_values_are_taken_one_by_one():
    """At keys that the run lacks today's are; a ratio schedule is never a mixture."""
    routes = [{"s": 0, "r": 0.5}]
    before = {"a": {"x": 1, "y": 2}, "routes": routes, "other": [1], "train": {"ratio_schedule": {"s": 1}}}
    now = {"a": {"x": 3, "y": 4, "z": 5}, "routes": [{"s": 7, "r": 0.3}], "other": [2], "new": 6}
    now["train"] = {"ratio_schedule": {"s": 2, "t": 3}}
    taken = {**before, "a": {"x": 1, "y": 4, "z": 5}, "routes": [{"s": 0, "r": 0.3}], "new": 6}
    assert take_typed(before, now, {"a.y", "routes.0.r"}) == taken
    assert take_typed(before, now, {"routes", "train.ratio_schedule"})["routes"] == now["routes"]
    assert take_typed({"routes": []}, now, {"routes.0.r"})["routes"] == now["routes"]  # no such route: to be refused


def test_a_run_keeps_the_options_of_its_architecture(begun, composed, monkeypatch):
    """Whatever the model of config.yaml has; the reference is the run's own record."""
    monkeypatch.chdir(begun)
    model = recorded(begun)["model"]
    assert model["architecture"] == "dit" and not {"norm", "state", "decoder_depth"} & model.keys()
    today = composed(f"run={RUN}", "model=tread_lightning", "model.qk_norm=true")
    config, _ = settle(today, [f"run={RUN}"], CONFIGS)
    assert config["model"] == model
    config, _ = settle(today, [f"run={RUN}", "model.qk_norm=true"], CONFIGS)
    with pytest.raises(ValueError, match="model.qk_norm is True, but dit has no such choice"):
        settings.read(config)


def lines(text: str, *beginnings: str) -> list[str]:
    return [re.sub(" +", " ", line.strip()) for line in text.splitlines() if line.strip().startswith(beginnings)]


def test_where_the_first_weights_come_from(tmp_path):
    """What a start says of them, against what is on the disk."""

    def weights(*overrides):
        return lines(launch(tmp_path, "every.save=2", *overrides), "weights ", "warning: ")

    run = tmp_path / "results" / "digits-tread"
    assert weights("train.steps=2", "seed=3") == ["weights new, drawn by seed 3"]
    resumed = weights("train.steps=4", "seed=3")
    assert resumed[0] == "warning: train.steps was 2, is 4"
    assert resumed[1:] == [f"weights raw and averaged, with the optimizer, of {run}/step_0000002, step 2"]
    start = ("train.steps=1", "name=second", "init_from=results/digits-tread", "init_weights=model", "objective=rf")
    said = weights(*start)
    assert said[0] == f"weights raw (model) of {run}/step_0000004/model.safetensors, step 4"
    assert said[1:] == ["warning: objective was edm where these weights were trained, but is rf now"]
    kept = RunLog(tmp_path / "results" / "second").starts()[-1]
    assert [f"weights {kept['weights']}", *(f"warning: {this}" for this in kept["warnings"])] == said
    again = weights(*start, "train.steps=2")
    assert len(again) == 2 and again[1].endswith("second/step_0000001, step 1; init_from was read when the run began")
