"""Exports for diffusers, drawn in a process that has no line of this project: against tread.load's pictures."""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial

import diffusers
import export_checkpoint
import numpy as np
import pytest
import torch
from conftest import RGB, assert_refused, launch_door, opened, randomized, read_json, write_json
from safetensors.torch import load_file

import tread
from routing_module import REJOINS, Rejoin
from tread.checkpoints import checkpoint
from tread.checkpoints.diffusers_export import goes_inside
from tread.checkpoints.network import build_network, read_network
from tread.reports.card import card
from tread.routing.ids import RULES, LargestNorm, Token

SMALL = ("model.hidden_size=32", "model.depth=6", "model.patch_size=4", "train.path_drop=0.1")
LATENTS = replace(RGB, shape=(4, 16, 16), scale=0.3, shift=0.1, channel_shift=(0.1,) * 4, channel_scale=(2.0,) * 4)
VALUES, X = "model.value_residual=true", ("objective=rf", "rf.shift=0.5", "rf.predicts=x", "rf.clamp=0.1")
KINDS = {  # name → overrides; the first two and the last draw pictures, the others only run once
    "dit": ("model=tread",),
    "rectified": (
        "model=tread_lightning",
        "model.positions=rope",
        "model.position_scale=0.5",
        "model.bottleneck=6",
        *X,
        VALUES,
        "model.class_token=10",
    ),
    "text": ("model=tread_text", "edm.predicts=ddpm_noise", "model.learn_sigma=true"),
    "sprint": ("model=sprint", VALUES),
    "maskdit": ("model=maskdit",),
    "mamba": ("model=mamba",),
    "rwkv": ("model=rwkv",),
    "plain": ("model=dit", "train.label_drop=0"),
}
WORDS = {"encoder": "words", "tokens": 4, "vocabulary": ["<begin>", "<unknown>", "red", "apple"], "fingerprint": "f"}
ALONE = """
import json, os, sys
import numpy as np, torch
from diffusers import AutoModel, DiffusionPipeline

exports, seeds = sys.argv[1], [3, 4]
open_pipeline = lambda name: DiffusionPipeline.from_pretrained(f"{exports}/{name}", trust_remote_code=True)
drawn, told = {}, []
for name in ("dit", "rectified", "text", "sprint"):
    pipe = open_pipeline(name)
    pipe.set_progress_bar_config(disable=True)
    what = {"prompt": ["red apple", "red"]} if name == "text" else {"class_labels": ["b", 4]}
    how = {**what, "seeds": seeds, "num_inference_steps": 3, "output_type": "np"}
    drawn[name] = pipe(**how).images
    drawn[f"{name} cfg"] = pipe(**how, guidance_scale=1.5, interval=(0.1, 20)).images
    drawn[f"{name} sparse"] = pipe(**how, guidance="sparse").images
pipe = open_pipeline("dit")
pipe.set_progress_bar_config(disable=True)
one = lambda number: torch.Generator().manual_seed(number)
both = pipe([0, 1], generator=[one(1), one(2)], num_inference_steps=2, output_type="latent", return_dict=False)[0]
alone = pipe([1], generator=[one(2)], num_inference_steps=2, output_type="latent").images
torch.testing.assert_close(both[1:], alone, rtol=1e-3, atol=5e-3)
def end_at_zero(pipe, step, level, given):
    told.append(step)
    return {"latents": given["latents"] * (step < 1)}
ended = pipe([1], seeds=0, num_inference_steps=2, output_type="latent", callback_on_step_end=end_at_zero)
assert told == [0, 1]
for name, kind in (("dit", "sparse"), ("rwkv", "cfg")):
    full, half = (DiffusionPipeline.from_pretrained(f"{exports}/{name}", trust_remote_code=True, torch_dtype=dtype)
                 for dtype in (torch.float32, torch.bfloat16))
    how = {"seeds": 3, "num_inference_steps": 2, "guidance": kind, "output_type": "latent"}
    full, half = full([1], **how).images, half([1], **how).images
    assert 0 < (full - half).std() < 0.1 * full.std(), name
def refused(said, opened=pipe, **given):
    try:
        opened([1], **{"seeds": 0, **given}, num_inference_steps=2)
    except ValueError as error:
        assert said in str(error), error
    else:
        raise AssertionError(said)
refused("output_type is 'jpg', but must be one of pil", output_type="jpg")
refused("solver is 'dpm', but must be one of heun, euler", solver="dpm")
refused("batch_size is 0, but must be positive", batch_size=0)
refused("trained by EDM", shift=2)
refused("0 seeds for", seeds=[])
few = {"num_inference_steps": 2, "output_type": "latent"}
seeds = (3, np.int64(3), np.array([3]), torch.tensor([3]))
(first, *others) = (pipe(1, seeds=seed, **few).images for seed in seeds)
assert all(torch.equal(first, other) for other in (*others, pipe(np.int64(1), seeds=3, **few).images))
try:
    pipe([0, 1, 2], generator=[one(1), one(2)], num_inference_steps=2)
except ValueError as error:
    assert "2 generators for 3 labels or prompts: one each" in str(error)
refused("a second network", guidance="autoguidance")
plain = open_pipeline("plain")
refused("no class, which this network was never", plain, guidance_scale=2.0)
refused("leaves tokens out", plain, guidance="sparse", guidance_scale=2.0)
latents = pipe.latents
assert torch.allclose(ended.images, torch.tensor(latents.channel_shift)[0] / latents.scale + latents.shift)
for name in sorted(os.listdir(exports)):
    network = AutoModel.from_pretrained(f"{exports}/{name}/transformer", trust_remote_code=True)
    assert network.dtype == torch.float32
    given = torch.load(f"{exports}/../{name}.pt", weights_only=True)
    token = {"class_token": torch.ones(2, 10)} if name == "rectified" else {}
    drawn[f"{name} forward"] = network.eval()(*given, network.null(2), **token).detach().numpy()
ours = [name for name in sys.modules if name.partition(".")[0] in ("tread", "dit", "rf", "routing_module")]
assert not ours, ours
np.savez(f"{exports}/../drawn.npz", **drawn)
"""


def export(folder, *overrides):
    return launch_door(export_checkpoint.main, "export_checkpoint", folder, "format=diffusers", *overrides)


@pytest.fixture(scope="module")
def autoencoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("autoencoder")
    sizes = {"block_out_channels": (8,), "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4}
    randomized(partial(diffusers.AutoencoderKL, **sizes), 0, 0.2).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def exports(tmp_path_factory, composed, autoencoder):
    """A folder with a checkpoint of each kind, <kind>/, and its export, exports/<kind>/."""
    root = tmp_path_factory.mktemp("diffusers")
    for kind, overrides in KINDS.items():
        heads = () if kind == "rwkv" else ("model.num_heads=2",)
        drops = () if kind == "sprint" else ("train.path_drop=0",)
        config = composed("dataset=folder", "dataset.path=data", *SMALL, *heads, *drops, *overrides)
        latents = replace(LATENTS, autoencoder=autoencoder) if kind in ("dit", "rectified") else RGB
        latents = replace(latents, classes=(*"abcd", "e\udce9"))  # a folder's name that is no UTF-8
        config["dataset"] |= {"channels": latents.shape[0], "size": 16, "num_classes": 5}
        if kind == "text":
            config["dataset"]["num_classes"], config["text"] = None, WORDS
        network = randomized(partial(build_network, read_network(config)), 3, 0.1).eval()
        info = {"config": config, "latents": asdict(latents), "versions": {"git": "unknown"}}
        info |= {"weights": "/far/a.pt"} if kind == "rwkv" else {"samples": 10}  # as import_checkpoint.py, as a run
        checkpoint.save(root / kind, 3, {"ema": network.state_dict()}, info)
        export(root, f"checkpoint={kind}", f"out=exports/{kind}", "license=mit")
        given = torch.randn(2, *latents.shape), torch.rand(2)
        torch.save(given, root / f"{kind}.pt")
    return root


@pytest.mark.slow
def test_a_process_without_our_code_draws_our_pictures(exports, tmp_path):
    bare = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    bare |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-P", "-c", ALONE, str(exports / "exports")]
    ended = subprocess.run(command, env=bare, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    theirs = np.load(exports / "drawn.npz")
    for name in ("dit", "rectified", "text", "sprint"):
        model, cfg = tread.load(exports / name, device="cpu"), {"guidance": "cfg", "interval": (0.1, 20), "scale": 1.5}
        for guidance, more in (("", {}), (" cfg", cfg), (" sparse", {"guidance": "sparse"})):
            how = {"steps": 3, "output": "np", "batch_size": 2, **more}
            if name == "text":
                drawn = model.sample(prompts=["red apple", "red"], seeds=[3, 4], **how)[[0, 3]]
            else:
                drawn = model.sample(labels=["b", 4], seeds=[3, 4], **how)
            levels = np.abs(drawn - theirs[name + guidance]) * 255
            assert levels.max() <= 1.01 and (levels > 0.5).mean() < 0.001 and drawn.std() > 0.05, name + guidance
    for kind in KINDS:
        network = tread.load(exports / kind, device="cpu").network
        x, t = torch.load(exports / f"{kind}.pt", weights_only=True)
        with torch.no_grad():
            ours = network(x, t, network.null(2), **({"class_token": torch.ones(2, 10)} if kind == "rectified" else {}))
        torch.testing.assert_close(torch.from_numpy(theirs[f"{kind} forward"]), ours)


def test_what_the_folder_holds(exports):
    folder = exports / "exports/dit"
    ours = checkpoint.find(exports / "dit").tensors("ema")
    stored = load_file(folder / "transformer/diffusion_pytorch_model.safetensors")
    assert stored.keys() == ours.keys() and all(torch.equal(stored[name], ours[name]) for name in ours)
    index = json.loads((folder / "model_index.json").read_text())
    assert index["vae"] == ["diffusers", "AutoencoderKL"] and index["autoencoder"] is None
    assert index["process"]["sigma_data"] == 0.5 and index["latents"]["scale"] == 0.3
    told = (folder / "README.md").read_text(encoding="utf-8")
    assert "license: mit" in told and "r(2→2)" in told and "a, b, c, d, e\\udce9" in told
    assert "imported from a.pt |" in (exports / "exports/rwkv/README.md").read_text(encoding="utf-8")
    found = checkpoint.find(exports / "dit")
    score = {"label_agreement": 0.9, "counts": {"label_agreement": 500}, "unavailable": {}, "warnings": []}
    write_json(found.folder / "fid.json", score | {"settings": {"sampler": "heun", "steps": 18, "guidance": "cfg 1.5"}})
    told = card(opened(exports / "dit"), {**found.info, "attribution": "Photos by Ann"}, "fp32", True)
    assert "heun, 18 steps, guidance cfg 1.5" in told and re.search("label_agreement +0.9 +500 samples", told)
    assert told.endswith("## Licence\n\nNot stated.\n\nPhotos by Ann\n")
    assert "tread.load(" not in told
    write_json(found.folder / "fid-1.json", score | {"settings": {"weights": "model", "steps": 77}})
    assert "77 steps" not in card(opened(exports / "dit"), found.info, "fp32", True)
    for weights, asked in (("ema", '"hf:a/b")'), ("model", '"hf:a/b", weights="model")')):
        saved = replace(opened(exports / "dit"), weights=weights)
        assert f"tread.load({asked}.sample(labels=[0, 1]" in card(saved, found.info, "fp32", False, None, "a/b")
    alone = replace(saved, cfg=replace(saved.cfg, dataset=replace(saved.cfg.dataset, num_classes=1)))
    assert "pipe(class_labels=[0, 0], seeds=[0, 1])" in card(alone, found.info, "fp32", True)
    config = found.info["config"]
    for train, route in (
        ({"routes_until": 0}, "none: all tokens in all blocks"),
        ({"routes_until": 2}, "r(2→2), 50% of the tokens; none from step 2 on"),
        ({"routes_until": 10**6}, "r(2→2), 50% of the tokens"),
        ({"ratio_schedule": {"start": 0.75, "end": 0.25}}, "r(2→2), 75% to 25% of the tokens"),
    ):
        changed = {**found.info, "config": config | {"train": config["train"] | train, "init_from": "results/before"}}
        told = card(opened(exports / "dit"), {**changed, "posthoc": {"sigma_rel": 0.075}}, "fp32", True)
        assert f"| route in training | {route} |" in told and ", from the weights in results/before |" in told
        assert "| weights | ema of σ_rel 0.075, of step" in told
    commands = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F,E9", str(exports / "exports")]
    assert subprocess.run(commands, capture_output=True).returncode == 0


def test_what_is_given_away_holds_the_autoencoder_and_no_path_of_this_machine(exports, tmp_path):
    info = read_json(next((exports / "text").glob("step_*")) / "info.json")
    info["config"]["text"]["encoder"] = str(tmp_path / "encoders/mine")
    checkpoint.save(tmp_path / "text", 3, {"ema": checkpoint.find(exports / "text").tensors("ema")}, info)
    export(tmp_path, f"checkpoint={exports}/dit", "out=given/dit", "paths=short")
    export(tmp_path, "checkpoint=text", "out=given/text", "paths=short")
    told = [path.read_text() for kind in ("md", "json") for path in (tmp_path / "given").rglob(f"*.{kind}")]
    assert len(told) == 7 and not [text for text in told if str(tmp_path.parent) in text]
    assert any("encoders/mine" in text for text in told)
    export(tmp_path, f"checkpoint={exports}/dit", "out=named", "autoencoder=madebyollin/taesd")
    assert not (tmp_path / "named/vae").exists()
    assert "latents (4, 16, 16) of madebyollin/taesd" in (tmp_path / "named/README.md").read_text()


def test_what_is_refused(exports, autoencoder, tmp_path, monkeypatch):
    given = [f"checkpoint={exports}/dit", f"out={tmp_path}/new"]
    assert_refused(
        lambda overrides: export(tmp_path, *overrides),
        ([given[0], f"out={exports}/exports/dit"], "is there already"),
        ([*given, "include_autoencoder=false"], "autoencoder=… names one"),
        ([*given, "public=true"], "MaskDiT"),
        ([*given, "format=tread", "include_autoencoder=true"], "needs format=diffusers"),
        ([*given, "format=tread", "license=mit"], "license=mit is for the model card"),
        ([*given, "push=nobody"], "such as push=user/name"),
    )
    info = read_json(next((exports / "dit").glob("step_*")) / "info.json")
    monkeypatch.setitem(RULES, "quiet", type("Quiet", (Token,), {"description": ""})())
    monkeypatch.setitem(REJOINS, "mine", Rejoin(True, lambda saved, kept, ids: saved))
    monkeypatch.setitem(RULES, "sharp", LargestNorm(0.0))  # a class of ours, which the exported table lacks
    monkeypatch.setitem(RULES, "norm", LargestNorm(0.0))
    monkeypatch.setitem(REJOINS, "again", REJOINS["stale"])
    replaced = (("select", "sharp"), ("select", "norm"), ("rejoin", "again"))
    other = {**info, "latents": {**info["latents"], "fingerprint": 64 * "0"}}
    checkpoint.save(tmp_path / "other", 3, {"ema": checkpoint.find(exports / "dit").tensors("ema")}, other)
    with pytest.raises(SystemExit, match="is another autoencoder than the one that made the latents"):
        export(tmp_path, "checkpoint=other", f"out={tmp_path}/new")
    assert goes_inside("shortened/vavae.pt", None)  # a file of before, which is no name on the hub
    for key, value in (("select", "quiet"), ("rejoin", "mine"), *replaced):
        info["config"]["model"]["routes"] = [{"start": 2, "end": -2, key: value}]
        checkpoint.save(tmp_path / key, 3, {"ema": checkpoint.find(exports / "dit").tensors("ema")}, info)
        with pytest.raises(SystemExit, match=f"{key}={value} is a plugin's"):
            export(tmp_path, f"checkpoint={key}", f"out={tmp_path}/new")
    assert not (tmp_path / "new").exists()
