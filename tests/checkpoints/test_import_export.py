"""Weights from elsewhere to a checkpoint, and one kind of a checkpoint's weights alone: the same bits at both ends."""

import argparse
import os
from dataclasses import asdict
from functools import partial

import import_checkpoint
import numpy as np
import pytest
import torch
from conftest import CPU, assert_refused, launch_door, names_in, opened, randomized, take_samples
from PIL import Image
from safetensors.torch import load_file
from test_exporting import hand_out
from test_state_dicts import same

import sample
from tread.checkpoints import checkpoint
from tread.checkpoints.for_sampling import open_network
from tread.checkpoints.network import build_network, read_network
from tread.checkpoints.weights import load_weights, read_weights
from tread.data.latents import LatentSpec, from_network
from tread.diffusion import sampling
from tread.diffusion.labels import class_labels
from tread.drawing.grids import save_grid
from tread.encoders import autoencoder
from tread.models.rotary import TABLES, rotary_angles
from tread.preparing import digits

SIZES = ["model.hidden_size=16", "model.depth=2", "model.num_heads=2", "model=dit"]


def random_state(composed, seed, *overrides, sizes=SIZES):
    """The state dict of a network with SIZES whose parameters are random."""
    cfg = read_network(composed(*sizes, *overrides))
    return randomized(partial(build_network, cfg), seed, 0.05).state_dict()


def bring_in(folder, *overrides, sizes=SIZES):
    options = ["autoencoder=none", "name=mine", *sizes, *overrides]
    return launch_door(import_checkpoint.main, "import_checkpoint", folder, *options)


def bits(model):
    generator = torch.Generator().manual_seed(0)
    x, t = torch.randn(3, 1, 8, 8, generator=generator), torch.randn(3, generator=generator)
    with torch.no_grad():
        return model.network(x, t, torch.tensor([0, 5, 10]))


@pytest.fixture
def states(composed):
    return {"ema": random_state(composed, 1), "model": random_state(composed, 2)}


@pytest.fixture
def run(tmp_path, composed, states):
    """A run's folder, as training leaves it; its optimizer's part is a stand-in."""
    info = {"config": composed(*SIZES), "latents": asdict(digits.MEANING), "samples": 10, "versions": {}}
    checkpoint.save(tmp_path / "run", 4, {**states, "optimizer": {"step/a": torch.ones(1)}}, info | {"loss_sum": 1.0})
    return tmp_path / "run"


def wrapped(state):
    return {f"_orig_mod.module.model.{key.replace('.attn', '._orig_mod.attn')}": value for key, value in state.items()}


@pytest.mark.parametrize("kind", ["public DiT", "released TREAD"])
def test_both_kinds_of_weights_come_in(tmp_path, states, kind):
    if kind == "public DiT":
        content = {**states, "opt": {"state": {}}, "args": argparse.Namespace(model="DiT-XL/2")}
    else:
        content = {f"{name}_state_dict": wrapped(state) for name, state in states.items()} | {"step": 1}
    torch.save(content, tmp_path / "a.pt")
    text = bring_in(tmp_path, "weights=a.pt")
    imported = checkpoint.find(tmp_path / "results/mine")
    assert sorted(imported.info["files"]) == ["ema.safetensors", "model.safetensors"]
    for name, state in states.items():
        same(imported.tensors(name), state)
        expected = build_network(open_network(imported, name).cfg)
        expected.load_state_dict(state)
        assert torch.equal(bits(open_network(imported, name).load(CPU)), bits(argparse.Namespace(network=expected)))
    assert "averaged (ema) and raw (model) weights of a.pt" in text and "num_heads=2" in text
    assert "hidden_size 16, depth 2" in text and f"python sample.py checkpoint={imported.folder}" in text


@pytest.mark.parametrize(
    "content, take, parts",
    [
        ("both", "model", {"model": "model"}),
        ("bare", "all", {"ema": "ema"}),
        ("bare", "model", {"model": "ema"}),
        ("raw", "all", {"model": "model"}),
    ],
)
def test_what_is_taken(tmp_path, states, content, take, parts):
    held = {"both": states, "bare": states["ema"], "raw": {"model": states["model"]}}[content]
    torch.save(held, tmp_path / "a.pt")
    text = bring_in(tmp_path, "weights=a.pt", f"take={take}")
    imported = checkpoint.find(tmp_path / "results/mine")
    assert set(imported.info["files"]) == {f"{name}.safetensors" for name in parts}
    for name, source in parts.items():
        same(imported.tensors(name), states[source])
    assert text.rstrip().endswith("weights=model") == (list(parts) == ["model"])


def test_tensors_that_share_memory_come_in(tmp_path, states):
    """As where all parameters lie in one buffer."""
    buffer = torch.cat([value.flatten() for value in states["ema"].values()])
    pieces = buffer.split([value.numel() for value in states["ema"].values()])
    views = {name: piece.view_as(value) for piece, (name, value) in zip(pieces, states["ema"].items())}
    torch.save(views, tmp_path / "a.pt")
    bring_in(tmp_path, "weights=a.pt")
    same(checkpoint.find(tmp_path / "results/mine").tensors("ema"), states["ema"])


def test_weights_that_predict_noise_are_sampled_by_edm_and_start_runs(tmp_path, composed):
    """At each timestep's noise level the denoiser is DDPM's own, by its prediction of the noise."""
    state = random_state(composed, 1, "model.learn_sigma=true")
    torch.save(state, tmp_path / "DiT-XL-2-256x256.pt")
    text = bring_in(tmp_path, "weights=DiT-XL-2-256x256.pt", "predicts=noise", "model.learn_sigma=true")
    assert "sample.py" in text
    model = opened(tmp_path / "results/mine").load(CPU)
    same(model.network.state_dict(), state)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0)
    x, y = torch.randn(3, 1, 8, 8), torch.tensor([0, 1, 2])
    for time in (0, 1, 500, 999):
        noisy = (x / kept[time].sqrt()).float()  # DDPM's own input, divided by √ᾱ
        predicted = model.network(x, torch.full((3,), float(time)), y)[:, : x.shape[1]]
        expected = noisy - ((1 - kept[time]) / kept[time]).sqrt().float() * predicted
        actual = model.process.denoise(model.network, noisy, ((1 - kept[time]) / kept[time]).sqrt(), y)
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
    launch_door(sample.main, "sample", tmp_path, "checkpoint=results/mine", "out=a.png", "decode=false", "steps=2")
    text = hand_out(tmp_path, "checkpoint=results/mine", "out=alone")
    assert "init_from=alone" in text and opened(tmp_path / "alone").process.predicts == "ddpm_noise"
    network = build_network(read_network(composed(*SIZES, "model.learn_sigma=true")))
    told = load_weights(network, str(tmp_path / "alone"))
    cfg = read_network(composed(*SIZES, "model.learn_sigma=true", "edm.predicts=ddpm_noise"))
    assert not [line for line in told.warnings(cfg, digits.MEANING) if "predict" in line]
    del told.source.info["predicts"]
    told.source.info["config"]["edm"]["predicts"] = "ddpm_noise"  # as a run records it
    assert not [line for line in told.warnings(cfg, digits.MEANING) if "predict" in line]
    plain = read_network(composed(*SIZES))
    assert "the prediction was noise on timesteps 0..999 where" in "\n".join(told.warnings(plain, digits.MEANING))


def test_nothing_is_written_of_what_can_not_be_used(tmp_path, states):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "hacked"),))

    torch.save({**states, "args": Evil()}, tmp_path / "evil.pt")
    torch.save({"model": states["model"]}, tmp_path / "raw.pt")
    broken = {name: value for name, value in states["model"].items() if name != "blocks.1.mlp.fc2.bias"}
    torch.save({"ema": states["ema"], "model": broken}, tmp_path / "a.pt")
    torch.save({**states["ema"], "pos_embed": torch.rand(1, 16, 16)}, tmp_path / "positions.pt")
    torch.save(states, tmp_path / "whole.pt")
    assert_refused(
        partial(bring_in, tmp_path),
        ("weights=evil.pt", "could not be read"),
        ("weights=none.pt", "weights=none.pt is no file"),
        ("weights=raw.pt", "take=ema", "no averaged ones.*take=model imports them"),
        ("weights=a.pt", "missing: blocks.1.mlp.fc2.bias"),
        ("weights=positions.pt", "pos_embed of positions.pt are not the fixed"),
        ("weights=whole.pt", "model.depth=3", "settings that fit it: model.depth=2"),
        ("weights=… is needed",),
    )
    assert not (tmp_path / "results").exists() and not (tmp_path / "hacked").exists()


@pytest.mark.parametrize("weights", ["ema", "model"])
def test_an_export_is_the_same_network_bit_for_bit(tmp_path, run, states, weights):
    text = hand_out(tmp_path, f"checkpoint={run}", "out=exports/mine", f"weights={weights}")
    out, actual = tmp_path / "exports/mine", checkpoint.find(run)
    assert names_in(out) == {"config.yaml", f"{weights}.safetensors", "info.json"}
    assert (out / f"{weights}.safetensors").read_bytes() == (actual.folder / f"{weights}.safetensors").read_bytes()
    same(load_file(out / f"{weights}.safetensors"), states[weights])  # a reader that knows nothing of checkpoints
    alone = checkpoint.find(out)
    file = f"{weights}.safetensors"
    assert alone.info == {**actual.info, "files": {file: actual.info["files"][file]}}
    this, other = (open_network(source, weights) for source in (actual, alone))
    assert this.sha256 == other.sha256 and this.cfg == other.cfg and this.latents == other.latents
    assert torch.equal(bits(this.load(CPU)), bits(other.load(CPU)))
    same(read_weights(out, weights).state, states[weights])
    same(read_weights(out / f"{weights}.safetensors").state, states[weights])
    option = "" if weights == "ema" else " weights=model"
    assert f"{weights} weights of step 4" in text and f"sample.py checkpoint=exports/mine{option}\n" in text
    other = {"ema": "model", "model": "ema"}[weights]
    with pytest.raises(ValueError, match=f"holds no {other} part"):
        open_network(alone, other)


def test_no_class_is_null_and_no_number(tmp_path, run):
    """The pictures of classes=[null] are those of the null class, label 10, drawn in Python."""
    options = (f"checkpoint={run}", "seeds=0-1", "steps=2")
    with pytest.raises(SystemExit, match="classes.1 is 10, but the classes are 0..9, and null is no class"):
        take_samples(tmp_path, *options, "classes=[3,10]")
    take_samples(tmp_path, *options, "classes=[3,null]")
    saved = opened(run)
    labels, sampler = torch.tensor([3, 3, 10, 10]), sampling.Sampler(2, 4)
    decoder = autoencoder.load_decoder(saved.latents, CPU)
    pictures = sampling.draw_pictures(saved.load(CPU), decoder, [0, 1, 0, 1], labels, sampler)
    save_grid(tmp_path / "expected.png", torch.cat(list(pictures)).numpy(), columns=2)
    actual, expected = (np.array(Image.open(tmp_path / f"{name}.png")) for name in ("samples", "expected"))
    assert np.array_equal(actual[:, -expected.shape[1] :], expected)  # behind the names' margin


def test_a_network_without_a_null_class_is_not_sampled_without_a_class():
    assert class_labels([None, 3], 10, 0.1) == [10, 3]
    with pytest.raises(ValueError, match="classes.0 is null, but the network knows no null class"):
        class_labels([None, 3], 10, 0.0)


def test_an_import_says_what_it_took(tmp_path, run, states, monkeypatch):
    """A file of ours brings its record: its kind, its step, and what it meant there, also behind links as the hub's."""
    given = f"weights={run}/latest/model.safetensors"
    (tmp_path / "results/mine/.step_0000000.partial").mkdir(parents=True)  # as a killed import leaves it
    text = bring_in(tmp_path, given, "scale=2.0")
    assert f"raw (model) weights of {run}/latest/model.safetensors, step 4" in text
    assert "warning: latents.scale was 1.0 where these weights were trained, but is 2.0 now\n" in text
    same(checkpoint.find(tmp_path / "results/mine").tensors("model"), states["model"])
    with pytest.raises(SystemExit, match="holds the model part, as info.json beside it says; take=all"):
        bring_in(tmp_path, given, "take=ema", "name=other")
    torch.save(states["ema"], tmp_path / "a.pt")
    text = bring_in(tmp_path, "weights=a.pt", "name=third")
    assert "at a step that is not recorded" in text and "warning: a.pt has no record" in text
    (tmp_path / "blobs").mkdir()
    for number, name in enumerate(("info.json", "model.safetensors")):
        os.link(run / "step_0000004" / name, tmp_path / f"blobs/{number}")
        (tmp_path / name).symlink_to(f"blobs/{number}")
    (tmp_path / "links").mkdir()
    (tmp_path / "links/model.safetensors").symlink_to(run / "step_0000004/ema.safetensors")
    assert read_weights(tmp_path / "links/model.safetensors").kind == "ema"  # whatever the link is called
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert "step 4" in bring_in(tmp_path, "weights=model.safetensors", "results='~/runs'")
    found = checkpoint.find(tmp_path / "home/runs/mine")
    same(found.tensors("model"), states["model"])
    assert (found.info["latents"]["autoencoder"], found.info["latents"]["scale"]) == ("pixels", 1.0)
    (tmp_path / "vae.pt").touch()
    bring_in(tmp_path, "weights=a.pt", "autoencoder=vae.pt", "name=fourth")
    found = checkpoint.find(tmp_path / "results/fourth").info["latents"]["autoencoder"]
    assert found == str(tmp_path / "vae.pt")  # wherever it is used from


def test_a_sprint_goes_out_and_comes_back_with_what_it_was_trained_for(tmp_path, composed):
    sizes = ["model.hidden_size=16", "model.depth=6", "model.num_heads=2", "model=sprint", "model.qk_norm=true"]
    state = random_state(composed, 2, sizes=sizes)
    torch.save(state, tmp_path / "a.pt")
    bring_in(tmp_path, "weights=a.pt", sizes=sizes)
    hand_out(tmp_path, "checkpoint=results/mine", "out=mine")
    bring_in(tmp_path, "weights=mine/ema.safetensors", "name=again", sizes=sizes)
    again = checkpoint.find(tmp_path / "results/again")
    same(again.tensors("ema"), state)
    assert open_network(again, "ema").path_drop == 0.1


def test_exports_that_can_not_be_leave_nothing(tmp_path, run):
    (tmp_path / "there").mkdir()
    assert_refused(
        partial(hand_out, tmp_path, f"checkpoint={run}"),
        ("out=there", "out=there is there already"),
        ("out=a", "checkpoint=nowhere", "no checkpoint at nowhere"),
        ("out=… is needed",),
    )
    path = checkpoint.find(run).folder / "ema.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(SystemExit, match="ema.safetensors is damaged"):
        hand_out(tmp_path, f"checkpoint={run}", "out=a")
    assert names_in(tmp_path) == {"run", "there"} and not any((tmp_path / "there").iterdir())


def test_a_public_lightningdit_comes_in_with_what_normalised_its_latents(tmp_path, composed):
    """A dict with "ema" under DDP's names, rotary tables in it; z = latents·std + mean by the statistics."""
    sizes = [*SIZES[:3], "model=lightning", "objective=rf", "rf.reverse=true"]
    state = random_state(composed, 2, sizes=sizes)
    turned = rotary_angles(8, 4).repeat_interleave(2, dim=1).float()
    public = {**state, **dict(zip(TABLES, (turned.cos(), turned.sin())))}
    torch.save({"ema": wrapped(public)}, tmp_path / "public.pt")
    mean, std = torch.randn(1, 1, 1, 1), torch.rand(1, 1, 1, 1) + 0.5
    torch.save({"mean": mean, "std": std}, tmp_path / "latents_stats.pt")
    normal = ["dataset.normalize=true", "statistics=latents_stats.pt"]
    text = bring_in(tmp_path, "weights=public.pt", *normal, sizes=sizes)
    assert "architecture lightning" in text and "not been normalised" not in text
    actual = checkpoint.find(tmp_path / "results/mine")
    same(actual.tensors("ema"), state)
    latents = LatentSpec.from_json(actual.info["latents"])
    x = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(from_network(x, latents), x * std + mean)
    assert_refused(
        partial(bring_in, tmp_path, "weights=public.pt", "name=other", sizes=sizes),
        ("model.num_heads=4", *normal, "rotary tables of other settings(?s:.*)settings that fit it: model.num_heads=2"),
        (normal[1], "statistics=… is for a network of normalised latents: set dataset"),
        (normal[0], "statistics=none.pt", "none.pt could not be read"),
        ("model.positions=sincos", "rotary tables of other settings(?s:.*)settings that fit it: model.positions=rope"),
    )
    assert not (tmp_path / "results/other").exists()
    assert "not been normalised" in bring_in(tmp_path, "weights=public.pt", normal[0], "name=other", sizes=sizes)


def test_a_public_repa_checkpoint_comes_in_without_its_projectors(tmp_path, states):
    beside = {f"projectors.0.{i}.{kind}": torch.ones(2) for i in (0, 2, 4) for kind in ("weight", "bias")}
    torch.save({kind: {**state, **beside} for kind, state in states.items()}, tmp_path / "repa.pt")
    text = bring_in(tmp_path, "weights=repa.pt")
    assert text.count("repa.pt holds 6 tensors projectors.* of its alignment, which are set aside") == 1
    same(checkpoint.find(tmp_path / "results/mine").tensors("ema"), states["ema"])
