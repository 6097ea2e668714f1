"""Training by rectified flow: the same loop, a checkpoint that knows its objective, doors that go by it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from conftest import TINY, launch_door, state

import fid
import sample
import train
from rf import RF
from routing_module import Route, draw_ids
from tread.checkpoints import checkpoint
from tread.checkpoints.network import build_network
from tread.checkpoints.trained import open_trained
from tread.data import digits
from tread.data.autoencoder import load_decoder
from tread.data.dataset import LatentDataset
from tread.data.latents import LatentSpec, to_network
from tread.diffusion import sampling
from tread.evaluation.heldout_loss import heldout_loss
from tread.runtime import device
from tread.runtime.randomness import generator
from tread.training import progress, settings
from tread.training.objective import step_draws, training_loss
from tread.training.setup import open_datasets

RUN = "results/digits-tread-rf"


def launch(folder, *overrides):
    return launch_door(train.main, "config", folder, *TINY, "objective=rf", *overrides)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rf")
    return folder, launch(folder)


def test_a_resumed_run_is_the_straight_one(trained, tmp_path):
    folder, text = trained
    assert "objective rf" in " ".join(text.split()) and "digits-tread-rf/samples/step_0000006.png" in text
    launch(tmp_path, "train.steps=3")
    launch(tmp_path)
    ours, theirs = state(folder / RUN), state(tmp_path / RUN)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_the_objective_belongs_to_the_run(trained):
    folder, _ = trained
    for override in ("objective=edm", "rf.time=uniform"):
        with pytest.raises(SystemExit, match="a run with other settings"):
            launch(folder, override, "name=digits-tread-rf")
    assert "is finished" in launch(folder, "edm.P_std=1.3")  # means nothing to this run


def test_the_evaluation_is_the_flows_too(trained):
    """eval_velocity: the mean over the held-out points of RF.evaluation_loss, by the EMA weights; no eval_loss."""
    folder, text = trained
    records = [json.loads(line) for line in (folder / RUN / "metrics.jsonl").read_text().splitlines()]
    network = open_trained(checkpoint.find(folder / RUN), "ema").load(torch.device("cpu")).network
    losses = heldout_loss(RF(), network, LatentDataset(folder / "data/digits/heldout"), torch.arange(64), 64, 16)
    found = [record["eval_velocity"] for record in records if "eval_velocity" in record]
    assert found[-1] == pytest.approx(losses.mean().item()) and f"  eval_velocity         {found[-1]:.4f}\n" in text
    assert not any("eval_loss" in record for record in records) and len(found) == 2


def test_latents_are_normalised_for_the_objective(trained, composed):
    """Each channel to a standard deviation of sigma_data for EDM, of 1 for rectified flow."""
    folder, _ = trained
    data = ["dataset.normalize=true", f"dataset.path={folder}/data/digits/train", "dataset.heldout=null"]
    for override, std in (("objective=edm", 0.5), ("objective=rf", 1.0)):
        opened, _ = open_datasets(settings.read(composed(*data, override)))
        x = to_network(opened.read(np.arange(len(opened))).stored, opened.latents)
        assert x.std().item() == pytest.approx(std, rel=1e-3)


def test_what_decides_about_a_run_is_not_changed_by_going_on(tmp_path):
    launch_door(train.main, "config", tmp_path, *TINY, "train.steps=3")
    with pytest.raises(SystemExit, match="objective: edm there, rf here"):
        launch(tmp_path, "name=digits-tread")
    for changed in ("train.loss_tokens=kept", "model.routes.0.select=row"):
        with pytest.raises(SystemExit, match="holds a run with other settings"):
            launch_door(train.main, "config", tmp_path, *TINY, "train.steps=5", changed)
    defaults_left_out = "model.routes=[{start: 2, end: -4}]"
    text = launch_door(train.main, "config", tmp_path, *TINY, "train.steps=4", defaults_left_out)
    assert "goes on at step 3" in text and "routes" not in text.partition("goes on")[2].partition("run ")[0]


def test_a_training_loss_is_the_flows(read_config, tiny):
    """training_loss against RF.loss by hand: stored latents, dropped labels, logit-normal times, the route's ids."""
    cfg = read_config("objective=rf", "model.depth=6", "train.batch_size=4", "train.label_drop=0.5")
    latents = LatentSpec(shape=(4, 8, 8), classes=tuple("0123456789"), autoencoder="x", scale_applied=True)
    stored, labels = torch.randn(4, 4, 8, 8), torch.tensor([1, 2, 3, 4])
    draws = step_draws(cfg, latents, 7, "cpu")
    with torch.no_grad():
        found = training_loss(cfg, tiny, latents, stored, labels, draws)
        y = torch.where(draws.drop < 0.5, 10, labels)
        uniform = torch.rand(4, 16, generator=generator(cfg.seed, 7, "route 0"))
        routes = [(cfg.model.routes[0], draw_ids(uniform, 0.5))]
        expected = RF().loss(tiny, stored, y, torch.sigmoid(draws.level), draws.noise, routes)
    assert 0 < (y == 10).sum() < 4
    torch.testing.assert_close(found, expected)


def test_the_sampler_follows_from_the_checkpoint(trained):
    """sample.py and fid.py draw by Euler with 50 steps, unless told otherwise, and the same pictures."""
    folder, _ = trained
    text = launch_door(sample.main, "sample", folder, f"checkpoint={RUN}", "classes=[3]", "seeds=0-1")
    assert "euler with 50 steps, NFE 50" in text
    guided = ("guidance=sparse", "guidance.strong=0", "guidance.weak=0.5", "solver=heun", "steps=3")
    text = launch_door(sample.main, "sample", folder, f"checkpoint={RUN}", "classes=[3]", "seeds=0-1", *guided)
    assert "heun with 3 steps, NFE 10" in text
    options = (f"checkpoint={RUN}", "num_samples=20", "labels=balanced", "save_samples=true", "steps=5")
    launch_door(fid.main, "fid", folder, *options)
    record = json.loads((folder / RUN / "latest" / "fid.json").read_text())
    found = {key: record["settings"][key] for key in ("sampler", "steps", "nfe", "guidance")}
    assert found == {"sampler": "euler", "steps": 5, "nfe": 5, "guidance": "none"} and "rf" in record["settings"]
    model = open_trained(checkpoint.find(folder / RUN), "ema").load(torch.device("cpu"))
    sampler = sampling.Sampler(5, 20, solver="euler")
    assert model.process == RF()
    x = next(sampling.draw(model, range(20), torch.arange(20) % 10, sampler))
    with np.load(folder / RUN / "latest" / "samples.npz") as samples:
        expected = samples["arr_0"].transpose(0, 3, 1, 2)
    assert np.array_equal(sampling.to_pictures(x, load_decoder(digits.MEANING)), expected)


def test_utilisation_is_logged_where_the_peak_is_known(tmp_path, monkeypatch, composed):
    """Three forward passes an image, by the route; MFU is their FLOP/s over the device's."""
    monkeypatch.setattr(progress, "peak_flops", lambda device, precision: 1e12)
    launch_door(train.main, "config", tmp_path, *TINY, "train.steps=2")
    lines = (tmp_path / "results/digits-tread/metrics.jsonl").read_text().splitlines()
    speeds = [record for record in map(json.loads, lines) if "mfu" in record]
    assert len(speeds) == 2
    network = build_network(settings.read(composed(*TINY)))
    routed, dense = network.forward_flops([Route(2, 2, 0.5)]), network.forward_flops()
    assert routed < 0.99 * dense
    for record in speeds:
        assert record["flops_per_s"] / record["images_per_s"] == pytest.approx(3 * routed, rel=2e-3)
        assert record["mfu"] == pytest.approx(record["flops_per_s"] / 1e12, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", None),
        ("Some GPU", "bf16", None),
    ],
)
def test_known_peaks(monkeypatch, name, precision, peak):
    """Dense bf16 rates of NVIDIA's data sheets."""
    monkeypatch.setattr(device, "device_name", lambda device: name)
    assert device.peak_flops(torch.device("cuda"), precision) == peak
    assert device.peak_flops(torch.device("cpu"), "bf16") is None
