"""Exports to give away: numpy's fp16 is the reference for the numbers, hashlib and the file system for the record."""

from __future__ import annotations

import hashlib
import json
import math

import export_checkpoint
import numpy as np
import pytest
import torch
from conftest import RGB, TINY, launch_door, save_checkpoint
from omegaconf import OmegaConf
from PIL import Image
from safetensors.torch import load_file

import fid
import sample
import train
from tread.checkpoints import checkpoint
from tread.checkpoints.exporting import record, shortened
from tread.checkpoints.for_sampling import open_network
from tread.checkpoints.weights import load_weights, read_weights
from tread.preparing import digits


def hand_out(folder, *overrides):
    return launch_door(export_checkpoint.main, "export_checkpoint", folder, *overrides)


@pytest.fixture
def saved(tmp_path, composed):
    """A checkpoint of digits' shapes with random weights."""
    return save_checkpoint(tmp_path / "run", composed, digits.MEANING, name="digits", embedded="digits")[1]


def test_half_precision_is_the_rounded_weights_in_half_the_bytes(tmp_path, saved):
    text = hand_out(tmp_path, "checkpoint=run", "out=half", "dtype=fp16")
    full, half = (load_file(folder / "ema.safetensors") for folder in (saved, tmp_path / "half"))
    assert full.keys() == half.keys()
    for name, value in half.items():
        assert value.dtype == torch.float16 and np.array_equal(value.numpy(), full[name].numpy().astype(np.float16))
    path, before = tmp_path / "half" / "ema.safetensors", checkpoint.find(saved).info
    content, info = path.read_bytes(), json.loads((tmp_path / "half" / "info.json").read_text())
    assert len(content) < 0.52 * (saved / "ema.safetensors").stat().st_size
    file = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    origin = {"dtype": "fp16", "made_from": before["files"]["ema.safetensors"]["sha256"]}
    assert info == {**before, "files": {"ema.safetensors": file}, **origin}
    assert "ema weights of step 3 in fp16" in text


def test_doors_take_half_precision_and_compute_in_fp32(tmp_path, saved, composed):
    hand_out(tmp_path, f"checkpoint={saved}", "out=half", "dtype=fp16")
    trained = open_network(checkpoint.find(tmp_path / "half"), "ema")
    network = trained.load(torch.device("cpu")).network
    stored = load_file(tmp_path / "half" / "ema.safetensors")
    for name, value in network.state_dict().items():
        assert value.dtype == torch.float32 and torch.equal(value, stored[name].float()), name
    load_weights(network, str(tmp_path / "half"))
    assert {value.dtype for value in network.state_dict().values()} == {torch.float32}
    for source in ("run", "half"):
        options = [f"checkpoint={source}", "seeds=0-1", "steps=4", f"out={source}.png"]
        launch_door(sample.main, "sample", tmp_path, *options)
    run, half = (np.array(Image.open(tmp_path / f"{name}.png")).astype(int) for name in ("run", "half"))
    assert np.abs(run - half).max() <= 2 and run.std() > 20  # grey levels of 256
    launch_door(fid.main, "fid", tmp_path, "checkpoint=half", "num_samples=20", "steps=2", "out=scores")
    sizes = ["model=dit", "model.hidden_size=32", "model.depth=6", "model.num_heads=2", "model.patch_size=4"]
    text = launch_door(train.main, "config", tmp_path, *TINY, *sizes, "init_from=half", "name=on")
    assert "averaged (ema) of" in text and "step 3" in text
    on = checkpoint.find(tmp_path / "results" / "on").tensors("model")
    assert {value.dtype for value in on.values()} == {torch.float32}
    guided = ["guidance=autoguidance", "guidance.checkpoint=half", "guidance.scale=1.5"]
    launch_door(sample.main, "sample", tmp_path, "checkpoint=run", "seeds=0", "steps=2", *guided)


def test_back_to_fp32_and_again_nothing_changes(tmp_path, saved):
    """fp16 in fp32 is exact; what has the type that is asked for is copied."""
    hand_out(tmp_path, f"checkpoint={saved}", "out=half", "dtype=fp16")
    hand_out(tmp_path, "checkpoint=half", "out=full")
    hand_out(tmp_path, "checkpoint=full", "out=again", "dtype=fp16")
    hand_out(tmp_path, "checkpoint=half", "out=copied", "dtype=fp16")
    half, full = (read_weights(tmp_path / name).state for name in ("half", "full"))
    assert all(value.dtype == torch.float32 and torch.equal(value, half[name].float()) for name, value in full.items())
    assert checkpoint.find(tmp_path / "full").info["dtype"] == "fp32"
    for name in ("again", "copied"):
        assert (tmp_path / name / "ema.safetensors").read_bytes() == (tmp_path / "half/ema.safetensors").read_bytes()
    assert checkpoint.find(tmp_path / "copied").info == checkpoint.find(tmp_path / "half").info


@pytest.mark.parametrize(("value", "says"), [(65520.0, "65,520"), (-1e6, "1e[+]06"), (math.nan, "nan")])
def test_what_half_precision_does_not_hold_is_refused(tmp_path, saved, value, says):
    info = checkpoint.find(saved).info
    state = load_file(saved / "ema.safetensors")
    state["blocks.1.mlp.fc2.bias"][3] = value
    kept = {key: info[key] for key in ("config", "latents")}
    checkpoint.save(tmp_path / "run", 5, {"ema": state}, kept)
    with pytest.raises(SystemExit, match=f"blocks.1.mlp.fc2.bias: .*{says}.*65,504; dtype=fp32 keeps"):
        hand_out(tmp_path, "checkpoint=run/step_0000005", "out=half", "dtype=fp16")
    assert not (tmp_path / "half").exists()
    hand_out(tmp_path, "checkpoint=run/step_0000005", "out=full")


def test_no_path_of_this_machine_stays(tmp_path, composed):
    """Whatever in the record is absolute is shortened; without paths=short it is what it was."""
    latents = RGB.__class__(**{**vars(RGB), "shape": (4, 16, 16), "autoencoder": str(tmp_path / "weights/a.pt")})
    _, folder = save_checkpoint(tmp_path / "run", composed, latents, heldout=str(tmp_path / "nette" / "val"))
    info = checkpoint.find(folder).info
    info["config"]["dataset"]["path"], info["config"]["results"] = str(tmp_path / "nette" / "train"), "/results"
    (folder / "info.json").write_text(json.dumps({**info, "weights": str(tmp_path / "them" / "a.pt")}))
    hand_out(tmp_path, "checkpoint=run", "out=plain")
    assert str(tmp_path) in (tmp_path / "plain" / "info.json").read_text()
    hand_out(tmp_path, "checkpoint=run", "out=given", "paths=short", "autoencoder=madebyollin/taesd")
    for name in ("info.json", "config.yaml"):
        assert str(tmp_path) not in (tmp_path / "given" / name).read_text()
    found = checkpoint.find(tmp_path / "given").info
    assert found["config"] == OmegaConf.to_container(OmegaConf.load(tmp_path / "given" / "config.yaml"))
    data = found["config"]["dataset"]
    assert (data["path"], data["heldout"], found["config"]["results"]) == ("nette/train", "nette/val", "results")
    assert found["weights"] == "them/a.pt"
    assert found["latents"] == {**info["latents"], "autoencoder": "madebyollin/taesd"}  # with its fingerprint
    hand_out(tmp_path, "checkpoint=run", "out=third", "paths=short")
    assert checkpoint.find(tmp_path / "third").info["latents"]["autoencoder"] == "weights/a.pt"


def test_only_paths_are_shortened():
    kept = {"a": ["data/digits/train", "a/b", "madebyollin/taesd", None, 3, True, "and/or /tmp"], "b": {"c": "~/x"}}
    assert shortened(kept) == kept
    assert shortened(["/", "/a", "/a/b", "/a/b/c/"]) == ["", "a", "a/b", "b/c"]
    classes = {"latents": {"classes": ["/a/b/c"], "autoencoder": "/a/b/c"}}
    assert record(classes, "short", None) == {"latents": {"classes": ["/a/b/c"], "autoencoder": "b/c"}}


def test_names_that_others_can_not_use_are_refused(tmp_path, saved, composed):
    with pytest.raises(SystemExit, match="draws pixels and has none"):
        hand_out(tmp_path, f"checkpoint={saved}", "out=a", "autoencoder=madebyollin/taesd")
    latents = RGB.__class__(**{**vars(RGB), "shape": (4, 16, 16), "autoencoder": "a.pt"})
    save_checkpoint(tmp_path / "other", composed, latents)
    for name in ("/a/b", "taesd.safetensors", "../b", "a/b/c"):
        with pytest.raises(SystemExit, match=f"autoencoder={name} is no hub id"):
            hand_out(tmp_path, "checkpoint=other", "out=a", f"autoencoder={name}")
    for wrong in ("dtype=bf16", "paths=none"):
        with pytest.raises(SystemExit, match="must be"):
            hand_out(tmp_path, "checkpoint=other", "out=a", wrong)
    assert not (tmp_path / "a").exists()
