"""Training by rectified flow: the same loop, a checkpoint that knows its objective, doors that go by it."""

import shutil
from dataclasses import asdict, replace
from functools import partial

import conftest
import numpy as np
import pytest
import torch
from conftest import CPU, TINY, facts_in, launch_door, logged, opened, read_json, same, score, take_samples, write_json
from test_token_losses import LATENTS

import fid
import sample
from rf import RF
from routing_module import Route, draw_ids
from tread.checkpoints.network import build_network
from tread.checkpoints.run_log import RunLog
from tread.data.dataset import Batch, LatentDataset
from tread.data.latents import to_network
from tread.diffusion import sampling
from tread.encoders.autoencoder import load_decoder
from tread.evaluation.heldout_loss import heldout_loss
from tread.preparing import digits
from tread.reports.comparison import curve_metrics, open_groups
from tread.reports.known_scores import find_scores
from tread.runtime import device
from tread.runtime.randomness import generator
from tread.training import periodic, settings
from tread.training.start import open_datasets
from tread.training.step import loss, step_draws

RUN = "results/digits-tread-rf"


def launch(folder, *overrides):
    return conftest.launch(folder, "objective=rf", *overrides)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rf")
    return folder, launch(folder)


def test_a_resumed_run_is_the_straight_one(trained):
    folder, text = trained
    assert "objective rf" in " ".join(text.split()) and "digits-tread-rf/samples/step_0000006.png" in text
    shutil.copytree(folder / RUN / "step_0000003", folder / "results/parts/step_0000003")
    assert "goes on at step 3" in launch(folder, "name=parts")
    assert same(folder / RUN, folder / "results/parts")


def test_the_evaluation_is_the_flows_too(trained):
    """eval_velocity: the mean over the held-out points of RF.evaluation_loss, by the EMA weights; no eval_loss."""
    folder, text = trained
    network = opened(folder / RUN).load(CPU).network
    losses = heldout_loss(RF(), network, LatentDataset(folder / "data/digits/heldout"), torch.arange(64), 64, 16)
    actual = logged(folder / RUN, "eval_velocity")
    assert actual[-1] == pytest.approx(losses.mean().item()) and f"  eval_velocity         {actual[-1]:.4f}\n" in text
    assert not logged(folder / RUN, "eval_loss") and len(actual) == 2


def test_an_older_run_goes_on_under_the_new_name(trained, tmp_path):
    """Its settings know neither direction nor shift, its metrics call another number eval_loss: both are kept, and what
    is recorded at a step under its own name is not done again."""
    shutil.copytree(trained[0], tmp_path, symlinks=True, dirs_exist_ok=True)
    run = tmp_path / RUN
    for path in (run / "run.json", run / "latest/info.json"):
        content = read_json(path)
        for entry in content if isinstance(content, list) else [content]:
            del entry["config"]["rf"]["direction"], entry["config"]["rf"]["shift"]
        write_json(path, content)
    path = run / "metrics.jsonl"
    path.write_text(path.read_text().replace("eval_velocity", "eval_loss"))
    with pytest.raises(SystemExit, match="rf.direction: 0.0 there, 1.0 here"):
        launch(tmp_path, "train.steps=8", "rf.direction=1.0")
    for _ in range(2):
        text = launch(tmp_path, "train.steps=8")
    assert "is finished" in text and "eval_loss" in text and "at step 6\n" in text
    steps = {name: logged(run, name, "step") for name in ("eval_loss", "eval_velocity")}
    assert steps == {"eval_loss": [3, 6], "eval_velocity": [6, 8]}
    (old,) = open_groups([str(run)])
    assert {name: len(old.curve(name)) for name in curve_metrics([old])} == {"eval_loss": 2, "eval_velocity": 2}


def test_latents_are_normalised_for_the_objective(trained, composed):
    """Each channel to a standard deviation of sigma_data for EDM, of 1 for rectified flow."""
    folder, _ = trained
    data = ["dataset.normalize=true", f"dataset.path={folder}/data/digits/train", "dataset.heldout=null"]
    for override, std in (("objective=edm", 0.5), ("objective=rf", 1.0)):
        opened, _ = open_datasets(settings.read(composed(*data, override)))
        x = to_network(opened.read(np.arange(len(opened))).stored, opened.latents)
        assert x.std().item() == pytest.approx(std, rel=1e-3)


def test_what_decides_about_a_run_is_not_changed_by_going_on(trained):
    folder, _ = trained
    for changed in ("objective=edm", "rf.time=uniform", "train.loss_tokens=kept", "model.routes.0.select=row"):
        with pytest.raises(SystemExit, match="holds a run with other settings"):
            launch(folder, "name=digits-tread-rf", changed)
    defaults_left_out = "model.routes=[{start: 2, end: -4}]"
    text = launch(folder, "edm.P_std=1.3", defaults_left_out)  # EDM's means nothing to this run
    assert "is finished" in text and "other settings" not in text


def test_a_training_loss_is_the_flows(read_config, tiny):
    """The step's loss against RF.loss by hand: stored latents, dropped labels, logit-normal times, the route's ids."""
    cfg = read_config("objective=rf", "model.depth=6", "train.batch_size=4", "train.label_drop=0.5")
    stored, labels = torch.randn(4, 4, 8, 8), torch.tensor([1, 2, 3, 4])
    draws = step_draws(cfg, LATENTS, 7, "cpu")
    with torch.no_grad():
        [actual] = loss(cfg, tiny, LATENTS, Batch(stored, labels, None), draws, tiny.null(1))
        y = torch.where(draws.drop < 0.5, 10, labels)
        uniform = torch.rand(4, 16, generator=generator(cfg.seed, 7, "route 0"))
        routes = [(cfg.model.routes[0], draw_ids(uniform, 0.5))]
        expected = RF().loss(tiny, stored, y, torch.sigmoid(draws.level), draws.noise, routes)
    assert 0 < (y == 10).sum() < 4
    torch.testing.assert_close(actual, expected)


def test_the_sampler_follows_from_the_checkpoint(trained):
    """sample.py and fid.py draw by Euler with 50 steps, unless told otherwise."""
    folder, _ = trained
    text = take_samples(folder, f"checkpoint={RUN}", "classes=[3]", "seeds=0-1")
    assert "euler with 50 steps, NFE 50" in text
    score(folder, f"checkpoint={RUN}", "num_samples=4", "steps=5")
    record = read_json(folder / RUN / "latest/fid.json")
    actual = {key: record["settings"][key] for key in ("sampler", "steps", "nfe", "guidance")}
    assert actual == {"sampler": "euler", "steps": 5, "nfe": 5, "guidance": "none"} and record["shift"] == 1
    older = ("time", "time_mean", "time_std", "time_scale", "reverse")
    before = {key: value for key, value in asdict(RF()).items() if key in older}
    assert record["settings"]["rf"] == before  # as scores of older code have it, so that they are found
    assert opened(folder / RUN).process == RF()


def test_a_shift_is_the_runs_unless_another_is_asked_for(trained):
    """In sample.py and fid.py. The reference is a drawing by RF(shift=…), and each score has its own place."""
    folder, run = trained[0], trained[0] / "results/shifted"
    text = launch(folder, "rf.shift=0.3", "rf.direction=1.0", "train.steps=1", "name=shifted", "dataset.heldout=null")
    assert "rf.direction teaches nothing: latents of one channel have only a sign" in text
    drawn = ("seeds=0-1", "classes=[3]", "steps=2", "overwrite=true", "out=a.png")
    for words, shift, shown in (((), 0.3, " and shift 0.3"), (("shift=1",), 1.0, "")):
        text = take_samples(folder, f"checkpoint={run}", *drawn, *words)
        facts = facts_in(folder / "a.png")["settings"]
        assert f"euler with 2 steps{shown}, NFE 2" in text and facts["shift"] == shift
    model = opened(run).load(CPU)
    assert model.process == RF(shift=0.3, direction=1.0)
    pictures, scores, sampler = [], folder / "scores", sampling.Sampler(5, 20, solver="euler")
    options = ("num_samples=20", "labels=balanced", "save_samples=true", "steps=5", f"out={scores}")
    for words, shift in (((), 0.3), (("shift=2.5",), 2.5), (("shift=1",), 1.0)):
        text = score(folder, f"checkpoint={run}", *options, *words)
        record = read_json(scores / "fid.json")
        assert record["shift"] == shift and record["settings"]["rf"].get("shift", 1.0) == shift
        assert (f"shift {shift:g}, " in text) == (shift != 1)
        with np.load(scores / "samples.npz") as samples:
            pictures.append(samples["arr_0"].transpose(0, 3, 1, 2))
        x = next(sampling.draw(replace(model, process=RF(shift=shift)), range(20), torch.arange(20) % 10, sampler))
        assert np.array_equal(sampling.to_pictures(x, load_decoder(digits.MEANING)), pictures[-1])
    assert not any(np.array_equal(each, pictures[1]) for each in pictures[::2])
    assert "is scored already" in score(folder, f"checkpoint={run}", *options)
    table, _ = find_scores(scores)
    assert sorted(score.values["sampler"] for score in table) == ["euler", "euler, shift 0.3", "euler, shift 2.5"]


@pytest.mark.parametrize(
    "override, told",
    [
        ("rf.direction=-1", "rf.direction is -1, but must be finite and not negative"),
        ("rf.shift=0", "rf.shift is 0, but must be positive"),
        ("rf.shift=1e-20", "shift is 1e-20, so far from 1 that some of 50 steps have no length"),
    ],
)
def test_settings_that_cant_be_are_refused_before_the_training(read_config, override, told):
    with pytest.raises(ValueError, match=told):
        read_config("objective=rf", override)


@pytest.mark.parametrize("door, config", [(sample, "sample"), (fid, "fid")])
def test_a_shift_that_cant_be_is_refused(trained, composed, tmp_path, door, config):
    conftest.save_checkpoint(tmp_path / "edm", composed)
    flow = f"checkpoint={trained[0] / RUN}"
    conftest.assert_refused(
        partial(launch_door, door.main, config, tmp_path),
        (f"checkpoint={tmp_path / 'edm'}", "shift=0.5", "^error: shift=0.5 is for rectified flow, but .*_0000003 was"),
        (flow, "shift=0", "^error: shift is 0, but must be positive"),
        (flow, "shift=1e-20", "^error: shift is 1e-20, so far from 1 that some of 50 steps have no length"),
    )


def test_utilisation_is_logged_where_the_peak_is_known(tmp_path, monkeypatch, composed):
    """Three forward passes an image, by the route; MFU is their FLOP/s over the device's."""
    monkeypatch.setattr(periodic, "peak_flops", lambda device, precision: 1e12)
    conftest.launch(tmp_path, "train.steps=2")
    speeds = [record for record in RunLog(tmp_path / "results/digits-tread").records() if "mfu" in record]
    assert len(speeds) == 2
    network = build_network(settings.read(composed(*TINY)))
    routed, dense = network.forward_flops([Route(2, 2, 0.5)]), network.forward_flops()
    assert routed < 0.99 * dense
    for record in speeds:
        assert record["flops_per_s"] / record["images_per_s"] == pytest.approx(3 * routed, rel=8e-3)
        assert record["mfu"] == pytest.approx(record["flops_per_s"] / 1e12, abs=1e-4)


def test_known_peaks(monkeypatch):
    """Dense bf16 rates of NVIDIA's data sheets."""
    assert device.peak_flops(CPU, "bf16") is None
    for name, precision, peak in (
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", None),
        ("Some GPU", "bf16", None),
    ):
        monkeypatch.setattr(device, "device_name", lambda device, name=name: name)
        assert device.peak_flops(torch.device("cuda"), precision) == peak
