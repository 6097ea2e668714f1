"""FID in training. The reference for its value is fid.py, for what it must not disturb a run without it."""

from functools import partial

import numpy as np
import pytest
from conftest import RGB, assert_refused, launch, launch_processes, logged, raising, read_json, same, score

from tread.checkpoints import checkpoint
from tread.data.writer import write_dataset
from tread.evaluation import scorers

DATA = ["dataset=folder", "dataset.path=data", "train.steps=4", "every.save=4", "every.sample=4", "name=rgb"]


@pytest.fixture(scope="module")
def place(tmp_path_factory, pictures_of, inception_file):
    """A folder with an RGB dataset, and statistics to score against."""
    folder = tmp_path_factory.mktemp("probe")
    pictures = pictures_of(24, 16, 0).transpose(0, 3, 1, 2)
    write_dataset(folder / "data", RGB, [(pictures[:, None] / 127.5 - 1, np.arange(24) % 5)])
    np.savez(folder / "pictures.npz", pictures_of(6, 16, 0))
    score(folder, "reference=pictures.npz", "save_reference=stats.npz", f"inception={inception_file}")
    return folder


@pytest.fixture(scope="module")
def probed(place, inception_file):
    """The options that switch it on, and the run that has it."""
    options = ["eval.fid_every=2", "eval.fid_samples=7", "eval.fid_reference=stats.npz"]
    options.append(f"eval.inception={inception_file}")
    return options, launch(place, *DATA, *options, "results=with")


def fids(run):
    return list(zip(*(logged(run, "fid", field) for field in ("step", "fid", "fid_samples"))))


def test_it_is_fid_pys_number_with_its_count_and_time(place, probed, inception_file):
    found = fids(place / "with/rgb")
    assert [(step, count) for step, _, count in found] == [(2, 7), (4, 7)]
    assert "of 7 samples at step 4, took" in probed[1] and f"{found[-1][1]:.4f} of 7 samples" in probed[1]
    options = ["checkpoint=with/rgb", "reference=stats.npz", "num_samples=7", "steps=2", "batch_size=7"]
    score(place, *options, f"inception={inception_file}")
    assert found[-1][1] == pytest.approx(read_json(place / "with/rgb/step_0000004/fid.json")["fid"], rel=1e-6)


def test_it_disturbs_nothing(place, probed):
    launch(place, *DATA, "results=without")
    assert same(place / "with/rgb", place / "without/rgb")
    losses = [logged(place / name / "rgb", "loss") for name in ("with", "without")]
    assert losses[0] == losses[1] and len(losses[0]) == 4


@pytest.mark.slow
def test_processes_share_it(place, probed):
    launch_processes(place, *DATA, *probed[0], "results=two", "train.steps=2", processes=2)
    assert fids(place / "two/rgb") == [pytest.approx(fids(place / "with/rgb")[0], rel=1e-4)]


def test_one_that_fails_costs_no_step(place, probed, monkeypatch):
    """Saved out of turn, the run goes on there, as the undisturbed one."""
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="did not converge"):
        patch.setattr(scorers, "frechet_distance", raising(np.linalg.LinAlgError("did not converge")))
        launch(place, *DATA, *probed[0], "results=failing")
    run = place / "failing/rgb"
    assert checkpoint.find(run).step == 2 and not fids(run)
    launch(place, *DATA, *probed[0], "results=failing")
    assert fids(run) == fids(place / "with/rgb") and same(run, place / "with/rgb")


def test_what_it_needs_is_asked_for_before_the_first_step(place, probed):
    assert_refused(
        partial(launch, place, *DATA, "results=never"),
        ("eval.fid_every=2", "eval.fid_every needs eval.fid_reference"),
        (*probed[0], "eval.fid_reference=pictures.npz", "has no mu and sigma: python fid.py"),
        (*probed[0], "eval.fid_reference=nowhere.npz", "nowhere.npz is not there"),
        (*probed[0], "eval.inception=nowhere", "nowhere is not there"),
        (*probed[0], "eval.fid_samples=1", "at least 2"),
        (*probed[0], "dataset=digits", "dataset.path=digits/train", "grey"),
    )
    assert not (place / "never").exists()
