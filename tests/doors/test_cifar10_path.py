"""The commands of docs/data.md for CIFAR-10, from an empty folder, on the stand-in and with the real Inception."""

import time

import pytest
from conftest import ROOT, logged, read_json
from forked import run_python
from PIL import Image


@pytest.mark.slow
def test_s2_trains_draws_and_is_scored_from_an_empty_folder_in_under_five_minutes(tmp_path, asset):
    weights = asset("weights/inception-2015-12-05.nofc.safetensors")

    def run(door, *options):
        done = run_python(ROOT / door, *options, cwd=tmp_path, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    began = time.monotonic()
    small = ("train.steps=20", "train.batch_size=4", "eval.points=20", "sampling.steps=3", "sampling.per_class=1")
    data = ("dataset.archive=standin", "dataset.path=data/cifar10-standin", "every.log=10", "every.sample=20")
    printed = run("train.py", "experiment=cifar10_s2", "model=tread", *data, *small)
    assert "cifar10, 100 samples of (3, 32, 32)" in printed
    assert "32,475,660 parameters, 12 blocks, 256 tokens" in printed
    result = tmp_path / "results/cifar10_s2-tread"
    assert logged(result, "step")[-1] == 20 and 0.5 < logged(result, "eval_loss")[-1] < 2
    with Image.open(result / "samples/step_0000020.png") as grid:
        assert grid.mode == "RGB" and grid.height > 10 * 32
    run("fid.py", f"checkpoint={result}", "reference=cifar10", f"inception={weights}", "num_samples=50", "steps=2")
    score = read_json(result / "step_0000020/fid.json")
    assert (score["reference"], score["count"], score["reference_count"]) == ("cifar10", 50, 50_000)
    assert 200 < score["fid"] < 700 and score["sfid"] > 50 and "precision" in score["unavailable"]
    assert time.monotonic() - began < 300
