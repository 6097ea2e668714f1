"""Two checkpoints that guide one another, and those that can't; the sweep over ratios against fid.py by hand."""

from __future__ import annotations

import csv
import json

import guidance_sweep
import import_weights
import pytest
import torch
from conftest import launch_door
from PIL import Image
from test_fid import save_checkpoint
from test_train import TINY

import checkpoint
import fid
import sample
import train
from guidance import Guidance
from rf import RF
from trained import open_guide, open_trained


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Checkpoints at steps 3 and 6 of digits-tread, and digits-dit without dropped labels."""
    folder = tmp_path_factory.mktemp("runs")
    launch_door(train.main, "config", folder, *TINY)
    launch_door(train.main, "config", folder, *TINY, "model=dit", "train.label_drop=0")
    return folder / "results"


def opened(path):
    return open_trained(checkpoint.find(path), "ema")


def test_an_earlier_checkpoint_guides_a_later_one(runs, tmp_path):
    strong = opened(runs / "digits-tread")
    guidance = Guidance("autoguidance", 2.0, checkpoint=str(runs / "digits-tread" / "step_0000003"))
    weak = open_guide(guidance, strong)
    assert (strong.found.step, weak.found.step) == (6, 3) and open_guide(Guidance("cfg"), strong) is None
    device, seeds, labels = torch.device("cpu"), [0, 1], torch.tensor([3, 4])
    one, other = strong.load(device), weak.load(device)

    def denoise(x, sigma):
        with torch.no_grad():
            a, b = (model.process.denoise(model.network, x, sigma, labels) for model in (one, other))
        return b + 2.0 * (a - b)

    sampler = sample.Sampler(3, 2, guidance=guidance)
    levels, noise = one.process.schedule(3), sample.seeded_normal(seeds, (1, 8, 8))
    expected = sample.solve("heun", denoise, noise, levels).float()
    torch.testing.assert_close(next(sample.draw(one, seeds, labels, sampler, other)), expected)
    options = ("classes=[3]", "seeds=0-1", "guidance=autoguidance", f"guidance.checkpoint={guidance.checkpoint}")
    text = launch_door(sample.main, "sample", tmp_path, f"checkpoint={runs / 'digits-tread'}", *options)
    assert "autoguidance 1.5 against ema weights of another network" in text and "2.000 times the FLOPs" in text


def test_what_can_not_be_combined_is_refused_with_the_reason(runs, tmp_path, composed):
    tread, dit = opened(runs / "digits-tread"), opened(runs / "digits-dit")
    sparse = Guidance("sparse", 1.5, weak=0.5)
    for strong, guidance, message in (
        (dit, sparse, "trained without a route"),
        (dit, Guidance("cfg"), "no null class"),
        (tread, Guidance("sparse", weak=0.5, checkpoint=str(runs / "digits-dit")), "weak branch.*without a route"),
        (tread, Guidance("sparse_cfg", checkpoint=str(runs / "digits-dit")), "no null class"),
        (tread, Guidance("autoguidance", checkpoint=str(tmp_path)), "no checkpoint at"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            open_guide(guidance, strong)
    save_checkpoint(tmp_path / "other", composed)
    with pytest.raises(ValueError, match="differ in shape"):
        open_guide(Guidance("autoguidance", checkpoint=str(tmp_path / "other")), tread)
    launch_door(train.main, "config", tmp_path, *TINY, "objective=rf", "train.steps=3")
    with pytest.raises(ValueError, match="differ in objective.*\n.*rf.*\n.*edm"):
        open_guide(Guidance("autoguidance", checkpoint=str(tmp_path / "results/digits-tread-rf")), tread)


def test_a_network_without_a_route_can_be_forced(runs):
    """By the paper's rule: r(2→depth−4)."""
    dit, forced = opened(runs / "digits-dit"), Guidance("sparse", 1.5, weak=0.5, force=True)
    assert open_guide(forced, dit) is None
    (route,) = dit.load(torch.device("cpu"), forced).routes
    assert (route.start, route.end) == (2, 2) and dit.routes(Guidance()) == ()


def test_refusals_of_the_doors_come_before_any_work(runs, tmp_path):
    checkpoint_of = {name: f"checkpoint={runs / name}" for name in ("digits-tread", "digits-dit")}
    for name, options, message in (
        ("digits-dit", ["guidance=sparse"], "trained without a route"),
        ("digits-dit", ["guidance=cfg"], "no null class"),
        ("digits-tread", ["guidance=sparse", "guidance.weak=1.0"], r"must lie in \[0, 1\)"),
        ("digits-tread", ["guidance=sparse", "guidance.strong=0.8"], "larger than"),
        ("digits-tread", ["guidance=sg_fid"], "guidance.checkpoint"),
        ("digits-tread", ["guidance=cfg", "guidance.scale={schedule: sine, start: 1, end: 2}"], "cosine, linear"),
        (
            "digits-tread",
            ["guidance=cfg", "guidance.scale={schedule: cosine, begin: 1, end: 2}"],
            "guidance.scale.end",
        ),
        ("digits-tread", ["solver=dopri5"], "heun, euler"),
        ("digits-tread", ["steps=1"], "at least 2"),
    ):
        for main, config in ((sample.main, "sample"), (fid.main, "fid")):
            with pytest.raises(SystemExit, match=message):
                launch_door(main, config, tmp_path, checkpoint_of[name], *options)
    assert not list(tmp_path.iterdir())


def test_a_schedule_from_the_command_line(runs, tmp_path):
    options = ("guidance=sparse", "guidance.strong=0", "guidance.weak={schedule: cosine, start: 0.6, end: 0.0}")
    text = launch_door(
        sample.main, "sample", tmp_path, f"checkpoint={runs / 'digits-tread'}", "classes=[3]", "seeds=0-1", *options
    )
    assert "sparse 1.5 with ratios 0 and cosine 0.6→0" in text


def test_scores_tell_guidance_by_what_the_second_network_is(runs, tmp_path):
    """Two weak networks at different places in a run are different settings; the same one again is scored already."""
    launch = [
        f"checkpoint={runs / 'digits-tread'}",
        "num_samples=20",
        "steps=2",
        f"out={tmp_path}",
        "guidance=autoguidance",
    ]
    for step, new in (("0000003", True), ("0000006", True), ("0000003", False)):
        weak = f"guidance.checkpoint={runs / 'digits-tread'}/step_{step}"
        text = launch_door(fid.main, "fid", tmp_path, *launch, weak)
        assert ("is scored already" in text) == (not new)
    record = json.loads((tmp_path / "fid.json").read_text())
    assert record["flops_relative"] == 2.0 and record["settings"]["nfe"] == 6
    found = checkpoint.find(runs / "digits-tread" / "step_0000006")
    assert record["settings"]["guide"] == found.sha256("ema")


def test_imported_weights_sample_like_the_checkpoint_they_came_from(runs, tmp_path):
    """A bare state dict, told what it was trained on: the same pictures, for both objectives."""
    torch.save({"ema": opened(runs / "digits-tread").load(torch.device("cpu")).network.state_dict()}, tmp_path / "a.pt")
    options = [option for option in TINY if option.startswith("model.")] + ["autoencoder=pixels", "scale=1.0"]

    def launch(*overrides):
        return launch_door(import_weights.main, "import_weights", tmp_path, "weights=a.pt", *options, *overrides)

    assert "results/mine/step_0000000" in launch("name=mine")
    mine, device, labels = opened(tmp_path / "results/mine"), torch.device("cpu"), torch.tensor([3, 4])
    ours, theirs = (one.load(device) for one in (mine, opened(runs / "digits-tread")))
    sampler = sample.Sampler(3, 2, guidance=Guidance("sparse", 1.5, 0.25, 0.5))
    assert torch.equal(
        next(sample.draw(ours, [0, 1], labels, sampler)), next(sample.draw(theirs, [0, 1], labels, sampler))
    )
    assert open_guide(Guidance("cfg", 1.5), mine) is None
    launch("name=flow", "objective=rf", "rf.reverse=true", "rf.time_scale=1000")
    assert opened(tmp_path / "results/flow").process == RF(time_scale=1000.0, reverse=True)
    for overrides, message in (
        (["name=mine"], "is there already"),
        (["name=b", "model.depth=7"], "do not fit this network"),
        (["name=b", "weights=none.pt"], "none.pt"),
    ):
        with pytest.raises(SystemExit, match=message):
            launch(*overrides)


def sweep(folder, *overrides):
    return launch_door(guidance_sweep.main, "guidance_sweep", folder, *overrides)


def test_a_sweep_scores_each_setting_as_fid_does(runs, tmp_path):
    options = [f"checkpoint={runs / 'digits-tread'}", "num_samples=20", "steps=2", "labels=balanced"]
    lists = ["sweep.strong=[0,0.5]", "sweep.weak=[0.25,0.5]", "sweep.scale=[1.5,2]"]
    text = sweep(tmp_path, *options, *lists, "out=sweep")
    assert "6 settings; 2 with strong above weak are left out" in text
    with (tmp_path / "sweep" / "sweep.csv").open() as file:
        lines = list(csv.DictReader(file))
    points = [(float(line["strong"]), float(line["weak"]), float(line["scale"])) for line in lines]
    assert len(points) == 6 and (0.5, 0.25, 1.5) not in points
    chosen = ["guidance=sparse", "guidance.strong=0.5", "guidance.weak=0.5", "guidance.scale=2"]
    launch_door(fid.main, "fid", tmp_path, *options, *chosen, "out=alone")
    alone = json.loads((tmp_path / "alone" / "fid.json").read_text())
    found = lines[points.index((0.5, 0.5, 2.0))]
    for key in ("label_agreement", "frechet_pixels", "flops_relative"):
        assert float(found[key]) == pytest.approx(alone[key])
    best = max(float(line["label_agreement"]) for line in lines)
    assert f"label_agreement {best:.5g} of 20 samples" in text
    with Image.open(tmp_path / "sweep" / "sweep.png") as picture:
        assert picture.width > 2 * picture.height
    assert sweep(tmp_path, *options, *lists, "out=sweep").count("is scored already") == 6


def test_a_sweep_that_can_not_be_is_refused(runs, tmp_path):
    checkpoint_of = f"checkpoint={runs / 'digits-tread'}"
    for overrides, message in (
        ([checkpoint_of], "out=… is needed"),
        ([f"checkpoint={runs / 'digits-tread'}/step_*", "out=a"], "one checkpoint"),
        ([checkpoint_of, "out=a", "guidance=cfg"], "no ratios to sweep"),
        ([checkpoint_of, "out=a", "sweep.strong=[0.9]", "sweep.weak=[0.5]"], "above sweep.weak everywhere"),
        ([checkpoint_of, "out=a", "sweep.weak=[1.5]"], r"must lie in \[0, 1\)"),
        ([checkpoint_of, "out=a", "sweep.scale=[]"], "sweep.scale is empty"),
        ([checkpoint_of, "out=a", "sweep.metric=loss"], "must be one of"),
        ([f"checkpoint={runs / 'digits-dit'}", "out=a"], "without a route"),
    ):
        with pytest.raises(SystemExit, match=message):
            sweep(tmp_path, *overrides)
