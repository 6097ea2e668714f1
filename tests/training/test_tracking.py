"""Trackers beside metrics.jsonl, by TensorBoard's own reader and by what W&B's client is told and writes."""

import shutil
import sys
from types import SimpleNamespace

import pytest
from conftest import launch, logged

from tread.runtime import tracking

RUN = "results/digits-tread"


def test_tensorboard_shows_each_step_once_after_a_resumption(tmp_path):
    """Killed after the checkpoint of step 3: steps 4 and 5 are done again."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    launch(tmp_path, "tracker=tensorboard", "train.steps=5", "every.save=3", "every.evaluate=5")
    shutil.rmtree(tmp_path / RUN / "step_0000005")
    launch(tmp_path, "train.steps=6", f"run={RUN}")  # the tracker is the run's
    actual = accumulator.EventAccumulator(str(tmp_path / RUN / "tensorboard")).Reload()
    for name, steps in (("loss", [1, 2, 3, 4, 5, 6]), ("eval_loss", [3, 6])):
        assert [event.step for event in actual.Scalars(name)] == steps
        assert [event.value for event in actual.Scalars(name)] == pytest.approx(logged(tmp_path / RUN, name))


def test_wandb_goes_on_by_the_id_in_the_folder(tmp_path, monkeypatch):
    """What wandb is told, with steps as values, as its own count only rises; its own files: the slow test below."""
    told, seen, ended = [], [], []
    run = SimpleNamespace(log=seen.append, define_metric=lambda name, step_metric: seen.append({name: step_metric}))
    run.finish = lambda exit_code: ended.append(exit_code)
    fake = SimpleNamespace(init=lambda **given: told.append(given) or run, errors=SimpleNamespace(Error=OSError))
    fake.__spec__ = "installed"
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for steps in (1, 2):
        launch(tmp_path, "tracker=wandb", "wandb.project=mine", f"train.steps={steps}")
    kept = (tmp_path / RUN / "wandb_id.txt").read_text()
    assert [(given["id"], given["resume"], given["project"]) for given in told] == [(kept, "allow", "mine")] * 2
    assert [values["step"] for values in seen if "loss" in values] == [1, 2] and ended == [0, 0]
    assert seen.count({"*": "step"}) == 2
    launch(tmp_path, "train.steps=2")  # finished: nothing is opened
    assert len(told) == 2


@pytest.mark.slow
def test_wandb_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for steps in (1, 2):
        launch(tmp_path, "tracker=wandb", f"train.steps={steps}")
    kept = (tmp_path / RUN / "wandb_id.txt").read_text()
    actual = list((tmp_path / RUN / "wandb").glob("offline-run-*"))
    assert actual and all(path.name.endswith(f"-{kept}") for path in actual)


def test_a_package_that_is_absent_is_said_before_anything_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SystemExit, match="tracker=wandb needs a package: pip install wandb"):
        launch(tmp_path, "tracker=wandb")
    assert list(tmp_path.iterdir()) == []
