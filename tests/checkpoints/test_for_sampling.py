"""Two checkpoints that guide one another, and those that can't; the sweep over ratios against fid.py by hand."""

import csv
import shutil
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import conftest
import guidance_sweep
import import_checkpoint
import numpy as np
import pytest
import torch
from conftest import CPU, ROOT, TINY, assert_refused, launch, launch_door, opened, read_json, score, take_samples
from hydra import compose, initialize_config_dir
from numpy.testing import assert_allclose
from omegaconf import OmegaConf
from PIL import Image

import fid
import sample
from rf import RF
from routing_module import Route
from tread.checkpoints import checkpoint
from tread.checkpoints.for_sampling import open_weak
from tread.diffusion import sampling, solvers
from tread.diffusion.guidance import Guidance
from tread.drawing.grids import draw_grid
from tread.encoders.autoencoder import load_decoder
from tread.preparing import digits
from tread.runtime import randomness, schema


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Checkpoints at steps 3 and 6 of digits-tread, and digits-dit without dropped labels."""
    folder = tmp_path_factory.mktemp("runs")
    launch(folder)
    launch(folder, "model=dit", "train.label_drop=0", "every.sample=9", "dataset.heldout=null")
    return folder / "results"


def test_an_earlier_checkpoint_guides_a_later_one(runs, tmp_path):
    strong = opened(runs / "digits-tread")
    guidance = Guidance("autoguidance", 2.0, checkpoint=str(runs / "digits-tread/step_0000003"))
    weak = open_weak(guidance, strong)
    assert (strong.found.step, weak.found.step) == (6, 3) and open_weak(Guidance("cfg"), strong) is None
    seeds, labels = [0, 1], torch.tensor([3, 4])
    this, other = strong.load(CPU), weak.load(CPU)

    def denoise(x, sigma):
        with torch.no_grad():
            a, b = (model.process.denoise(model.network, x, sigma, labels) for model in (this, other))
        return b + 2.0 * (a - b)

    sampler = sampling.Sampler(3, 2, guidance=guidance)
    levels, noise = this.process.schedule(3), randomness.seeded_normal(seeds, (1, 8, 8))
    expected = solvers.solve("heun", denoise, noise, levels).float()
    torch.testing.assert_close(next(sampling.draw(this, seeds, labels, sampler, other)), expected)
    options = ("classes=[3]", "seeds=0-1", "guidance=autoguidance", f"guidance.checkpoint={guidance.checkpoint}")
    text = take_samples(tmp_path, f"checkpoint={runs / 'digits-tread'}", *options)
    assert "autoguidance 1.5 against ema weights of another network" in text and "2.000 times the FLOPs" in text


def test_what_can_not_be_combined_is_refused_with_the_reason(runs, tmp_path, composed):
    tread, dit = opened(runs / "digits-tread"), opened(runs / "digits-dit")
    conftest.save_checkpoint(tmp_path / "other", composed)
    flow = tmp_path / "flow/step_0000006"  # the same weights, recorded as rectified flow's
    shutil.copytree(tread.found.folder, flow)
    info = read_json(flow / "info.json")
    info["config"]["objective"], info["files"]["ema.safetensors"]["sha256"] = "rf", "of others"
    conftest.write_json(flow / "info.json", info)
    for strong, guidance, message in (
        (dit, Guidance("sparse", 1.5, weak=0.5), "trained without a route"),
        (dit, Guidance("cfg"), "no null class"),
        (tread, Guidance("sparse", weak=0.5, checkpoint=str(runs / "digits-dit")), "weak branch.*without a route"),
        (tread, Guidance("sparse_cfg", checkpoint=str(runs / "digits-dit")), "no null class"),
        (tread, Guidance("autoguidance", checkpoint=str(tread.found.folder)), "is the network of checkpoint=… itself"),
        (tread, Guidance("autoguidance", checkpoint=str(tmp_path / "other")), "differ in shape"),
        (tread, Guidance("autoguidance", checkpoint=str(flow)), "differ in objective.*\n.*rf.*\n.*edm"),
    ):
        with pytest.raises(ValueError, match=message):
            open_weak(guidance, strong)
    sparse = Guidance("sparse", 1.5, weak=0.5)
    for until, init_from, fails in ((0, None, True), (0, "results/routed", False), (3, None, False)):
        config = tread.found.info["config"]
        config = config | {"train": config["train"] | {"routes_until": until}, "init_from": init_from}
        changed = replace(tread, found=replace(tread.found, info=tread.found.info | {"config": config}))
        with pytest.raises(ValueError, match="trained without a route") if fails else nullcontext():
            open_weak(sparse, changed)


@pytest.mark.parametrize("door, config", [(sample.main, "sample"), (fid.main, "fid")])
def test_refusals_of_the_doors_come_before_any_work(runs, tmp_path, door, config):
    """A single token of 16 kept by a number, or by a schedule at its end; 0.9 keeps two."""
    few = r"guidance\.weak 0\.9[45] keeps a single token of the 4×4.* at most 0\.875"
    dit, tread = (f"checkpoint={runs / name}" for name in ("digits-dit", "digits-tread"))
    late = "guidance.weak={schedule: linear, start: 0.2, end: 0.95}"
    assert_refused(
        partial(launch_door, door, config, tmp_path),
        (dit, "guidance=sparse", "trained without a route"),
        (tread, "guidance=sparse", "guidance.weak=1.0", r"must lie in \[0, 1\)"),
        (tread, "guidance=sparse", "guidance.strong=0.8", "larger than"),
        (tread, "guidance=sparse", "guidance.strong=0", "guidance.weak=0.94", few),
        (tread, "guidance=sparse", "guidance.strong=0", late, few),
        (tread, "guidance=sg_fid", "guidance.checkpoint"),
        (tread, "guidance=cfg", "guidance.scale={schedule: sine, start: 1, end: 2}", "cosine or linear"),
        (tread, "steps=1", "at least 2"),
        (tread, "batch_size=0", "batch_size is 0"),
    )
    assert not list(tmp_path.iterdir())


def test_the_papers_settings(runs, tmp_path):
    """SG_FLOPS and SG_FID as configs/guidance has them: ratios of the first, the middle and the last call."""
    weak = f"guidance.checkpoint={runs / 'digits-tread'}/step_0000003"
    fid = [(0.0, 0.6), (0.3, 0.3), (0.6, 0.0)]
    for name, given, expected in (("sg_flops", [], [(0.5, 0.9)] * 3), ("sg_fid", [weak], fid)):
        options = [f"checkpoint={runs / 'digits-tread'}", f"guidance={name}", *given, "classes=[3]", "seeds=0"]
        assert "NFE 10" in take_samples(tmp_path, *options, "steps=3", f"out={name}.png")
        with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "configs")):
            config = OmegaConf.to_container(compose("sample", overrides=options))
        plan = schema.read(config["guidance"], Guidance).plan([3.0, 2.0, 1.0], [0.0, 0.5, 1.0])
        assert [(pytest.approx(call.strong), pytest.approx(call.weak)) for call in plan] == expected


def test_scores_tell_guidance_by_what_the_weak_network_is(runs, tmp_path):
    """Two weak networks are different settings; the same one again is scored already."""
    words = [f"checkpoint={runs / 'digits-tread'}", "num_samples=20", "steps=2", f"out={tmp_path}"]
    words += ["guidance=autoguidance", f"guidance.checkpoint={runs / 'digits-tread'}/step_0000003"]
    for weights, new in (("ema", True), ("model", True), ("ema", False)):
        assert ("is scored already" in score(tmp_path, *words, f"guidance.weights={weights}")) == (not new)
    record = read_json(tmp_path / "fid.json")
    weak = checkpoint.find(runs / "digits-tread/step_0000003")
    assert record["flops_relative"] == 2.0 and record["settings"]["nfe"] == 6
    assert record["settings"]["weak_network"] == weak.sha256("model") != weak.sha256("ema")
    assert record["weak_network"] == str(weak.folder)
    with (tmp_path / "fid.csv").open() as file:
        assert [line["weak_network"] for line in csv.DictReader(file)] == [str(weak.folder)] * 2


@pytest.mark.parametrize("case", ["weak network", "forced routes"])
def test_doors_draw_what_draw_does_with_both_networks(runs, tmp_path, case):
    """fid.py's samples and sample.py's grid, pixel for pixel."""
    if case == "weak network":
        name, earlier = "digits-tread", f"{runs}/digits-tread/step_0000003"
        guidance = Guidance("sparse", 2.0, 0.25, 0.5, checkpoint=earlier)
        options = ["guidance.strong=0.25", "guidance.weak=0.5", f"guidance.checkpoint={guidance.checkpoint}"]
    else:
        name, guidance = "digits-dit", Guidance("sparse", 2.0, 0.0, 0.5, force=True)
        options = ["guidance.strong=0", "guidance.weak=0.5", "guidance.force=true"]
    options += [f"checkpoint={runs / name}", "guidance=sparse", "guidance.scale=2", "steps=3"]
    strong, decoder = opened(runs / name), load_decoder(digits.MEANING)
    weak = open_weak(guidance, strong)
    models = strong.load(CPU, guidance), weak and weak.load(CPU, guidance)
    assert (weak is None) == (case == "forced routes")

    def drawn(seeds, labels, other):
        sampler = sampling.Sampler(3, len(seeds), guidance=guidance)
        return torch.cat(list(sampling.draw_pictures(models[0], decoder, seeds, labels, sampler, other)))

    score(tmp_path, *options, "num_samples=10", "labels=balanced", "save_samples=true", "out=a")
    with np.load(tmp_path / "a/samples.npz") as samples:
        kept = samples["arr_0"].transpose(0, 3, 1, 2)
    assert np.array_equal(kept, drawn(range(10), torch.arange(10), models[1]))
    take_samples(tmp_path, *options, "classes=[3]", "seeds=0-1")
    ours = draw_grid(drawn([0, 1], torch.tensor([3, 3]), models[1]).numpy(), columns=2)
    assert np.array_equal(Image.open(tmp_path / "samples.png"), ours)
    # what a door that forgot the guidance's routes, or the weak network, would draw
    models = (replace(models[0], routes=(Route(0, 5),)) if weak is None else models[0], None)
    assert not torch.equal(drawn(range(10), torch.arange(10), None), torch.from_numpy(kept))


def test_imported_weights_sample_like_the_checkpoint_they_came_from(runs, tmp_path):
    """A bare state dict, told what it was trained on: the same pictures; and as another objective's."""
    torch.save({"ema": opened(runs / "digits-tread").load(CPU).network.state_dict()}, tmp_path / "a.pt")
    options = [option for option in TINY if option.startswith("model.")] + ["autoencoder=pixels", "scale=1.0"]

    def bring_in(*overrides):
        return launch_door(import_checkpoint.main, "import_checkpoint", tmp_path, "weights=a.pt", *options, *overrides)

    assert "results/mine/step_0000000" in bring_in("name=mine")
    mine, labels = opened(tmp_path / "results/mine"), torch.tensor([3, 4])
    sampler = sampling.Sampler(3, 2, guidance=Guidance("sparse", 1.5, 0.25, 0.5))
    models = (saved.load(CPU) for saved in (mine, opened(runs / "digits-tread")))
    assert torch.equal(*(next(sampling.draw(model, [0, 1], labels, sampler)) for model in models))
    assert open_weak(Guidance("cfg", 1.5), mine) is None
    bring_in("name=flow", "objective=rf", "rf.reverse=true", "rf.time_scale=1000")
    assert opened(tmp_path / "results/flow").process == RF(time_scale=1000.0, reverse=True)
    with pytest.raises(SystemExit, match="is there already"):
        bring_in("name=mine")


def sweep(folder, *overrides):
    return launch_door(guidance_sweep.main, "guidance_sweep", folder, *overrides)


@pytest.mark.slow
def test_a_sweep_scores_each_setting_as_fid_does(runs, tmp_path):
    options = [f"checkpoint={runs / 'digits-tread'}", "num_samples=20", "steps=2", "labels=balanced"]
    lists = ["sweep.strong=[0,0.5]", "sweep.weak=[0.25,0.5]", "sweep.scale=[1.5,2]"]
    text = sweep(tmp_path, *options, *lists, "out=sweep")
    assert "6 settings; 2 with strong above weak are left out" in text
    with (tmp_path / "sweep/sweep.csv").open() as file:
        lines = list(csv.DictReader(file))
    points = [(float(line["strong"]), float(line["weak"]), float(line["scale"])) for line in lines]
    assert len(points) == 6 and (0.5, 0.25, 1.5) not in points
    chosen = ["guidance=sparse", "guidance.strong=0.5", "guidance.weak=0.5", "guidance.scale=2"]
    score(tmp_path, *options, *chosen, "out=alone")
    alone = read_json(tmp_path / "alone/fid.json")
    actual = lines[points.index((0.5, 0.5, 2.0))]
    for key in ("label_agreement", "frechet_pixels", "flops_relative"):
        assert float(actual[key]) == pytest.approx(alone[key])
    best = max(float(line["label_agreement"]) for line in lines)
    assert f"label_agreement {best:.5g} of 20 samples" in text
    with Image.open(tmp_path / "sweep/sweep.png") as picture:
        assert picture.width > 2 * picture.height
    none = read_json(tmp_path / "sweep/none/fid.json")
    assert f"without guidance {none['label_agreement']:.5g}" in text and none["flops_relative"] == 1
    assert sweep(tmp_path, *options, *lists, "out=sweep").count("is scored already") == 7


def test_a_sweep_of_a_kind_without_routes_draws_curves(runs, tmp_path, monkeypatch):
    """Scores that tell their setting: a line an interval, its points in the order of ω, the level that of none."""
    drawn = []

    def score(options, processes):
        g = options.guidance
        value = 100 * g.scale + (g.interval or (0, 0))[1]
        return [{"frechet_pixels": value, "label_agreement": 0.5, "flops_relative": g.scale, "count": 20}]

    monkeypatch.setattr(guidance_sweep.scoring, "run", score)
    monkeypatch.setattr(guidance_sweep, "save_panels", lambda path, panels, columns: drawn.extend(panels))
    options = [f"checkpoint={runs / 'digits-tread'}", "guidance=cfg", "out=sweep", "sweep.metric=frechet_pixels"]
    text = sweep(tmp_path, *options, "sweep.scale=[2,1.5]", "sweep.interval=[null,[0.3,5]]")
    assert "best      frechet_pixels 150 of 20 samples at scale 1.5; without guidance 100" in text
    assert not (tmp_path / "sweep/sweep.png").exists()
    agreement, distance = drawn
    assert distance.levels == {"no guidance": 100} and agreement.levels == {"no guidance": 0.5}
    assert [(line.name, list(line.x), list(line.y)) for line in distance.lines] == [
        ("2.00 times the FLOPs", [1.5, 2.0], [150, 200]),
        ("within 0.3..5, 2.00 times the FLOPs", [1.5, 2.0], [155, 205]),
    ]
    with (tmp_path / "sweep/sweep.csv").open() as file:
        settings = [(line["scale"], line["interval"]) for line in csv.DictReader(file)]
    assert settings[:2] == [("2.0", ""), ("2.0", "0.3..5")]


@pytest.mark.slow
def test_a_sweep_draws_each_value_in_its_place(runs, tmp_path, monkeypatch):
    """Scores that tell their setting: weak ratios are rows, strong ones columns, the best is the smallest distance."""
    drawn = {}

    def score(options, processes):
        g = options.guidance
        value = 100 * g.scale + 10 * g.weak + g.strong
        return [{"frechet_pixels": value, "flops_relative": 2 - g.weak, "count": 20, "label_agreement": 0.5}]

    def save_heat_maps(path, panels, others, *rest):
        drawn.update(panels, **others)

    monkeypatch.setattr(guidance_sweep.scoring, "run", score)
    monkeypatch.setattr(guidance_sweep, "save_heat_maps", save_heat_maps)
    monkeypatch.setattr(guidance_sweep, "save_panels", lambda *given, **named: None)
    options = [f"checkpoint={runs / 'digits-tread'}", "out=sweep", "sweep.metric=frechet_pixels"]
    lists = ["sweep.strong=[0,0.5]", "sweep.weak=[0.25,0.5,0.75]", "sweep.scale=[1,2]"]
    text = sweep(tmp_path, *options, *lists)
    first, second, cost = drawn.values()
    expected = np.array([[102.5, np.nan], [105.0, 105.5], [107.5, 108.0]])
    assert_allclose(first, expected)
    assert_allclose(second, expected + 100)
    assert_allclose(cost, [[1.75, np.nan], [1.5, 1.5], [1.25, 1.25]])
    assert "best      frechet_pixels 102.5 of 20 samples at strong 0.0 weak 0.25 scale 1.0" in text
    assert "0 with strong above weak" in sweep(tmp_path, *options, *lists, "guidance.force=true")
    assert list(drawn.values())[0][0, 1] == 103.0


def test_a_sweep_that_can_not_be_is_refused(runs, tmp_path):
    common = [f"checkpoint={runs / 'digits-tread'}", "out=a"]
    assert_refused(
        partial(sweep, tmp_path),
        (f"checkpoint={runs / 'digits-tread'}/step_*", "out=a", "one checkpoint"),
        (*common, "guidance=cfg", "sweep.weak=[0.5]", "no ratios to sweep"),
        (*common, "guidance=none", "nothing to sweep"),
        (*common, "guidance=sg_flops", "take guidance=sparse"),
        (*common, "sweep.strong=[0.9]", "sweep.weak=[0.5]", "above sweep.weak everywhere"),
        (*common, "sweep.weak=[0.9,0.94]", "sweep.strong=[0]", "keeps a single token"),
        (*common, "sweep.metric=fid", "with no reference there are label_agreement, frechet_pixels"),
        (*common, "guidance.weak={schedule: cosine, start: 0.6, end: 0.0}", "set sweep.weak="),
        (*common, "reference=a", "save_reference=b.npz", "fid.py's"),
    )
