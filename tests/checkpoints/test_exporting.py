"""Exports to give away: numpy's fp16 is the reference for the numbers, hashlib and the file system for the record."""

import hashlib
import math
from dataclasses import replace

import export_checkpoint
import numpy as np
import pytest
import torch
from conftest import CPU, RGB, launch_door, opened, read_json, save_checkpoint, take_samples, write_json
from omegaconf import OmegaConf
from PIL import Image
from safetensors.torch import load_file

from tread.checkpoints import checkpoint
from tread.checkpoints.exporting import record, shortened
from tread.checkpoints.weights import load_weights
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
    path, before = tmp_path / "half/ema.safetensors", checkpoint.find(saved).info
    content, info = path.read_bytes(), read_json(tmp_path / "half/info.json")
    assert len(content) < 0.52 * (saved / "ema.safetensors").stat().st_size
    file = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    origin = {"dtype": "fp16", "made_from": before["files"]["ema.safetensors"]["sha256"]}
    assert info == {**before, "files": {"ema.safetensors": file}, **origin}
    assert "ema weights of step 3 in fp16" in text


def test_doors_take_half_precision_and_compute_in_fp32(tmp_path, saved):
    hand_out(tmp_path, f"checkpoint={saved}", "out=half", "dtype=fp16")
    network = opened(tmp_path / "half").load(CPU).network
    stored = load_file(tmp_path / "half/ema.safetensors")
    for name, value in network.state_dict().items():
        assert value.dtype == torch.float32 and torch.equal(value, stored[name].float()), name
    load_weights(network, str(tmp_path / "half"))
    assert {value.dtype for value in network.state_dict().values()} == {torch.float32}
    for source in ("run", "half"):
        take_samples(tmp_path, f"checkpoint={source}", "seeds=0-1", "steps=4", f"out={source}.png")
    run, half = (np.array(Image.open(tmp_path / f"{name}.png")).astype(int) for name in ("run", "half"))
    assert np.abs(run - half).max() <= 2 and run.std() > 20  # grey levels of 256
    guided = ["guidance=autoguidance", "guidance.checkpoint=half", "guidance.scale=1.5"]
    take_samples(tmp_path, "checkpoint=run", "seeds=0", "steps=2", *guided)


@pytest.mark.parametrize("value", [65520.0, -1e6, math.nan])
def test_what_half_precision_does_not_hold_is_refused(tmp_path, saved, value):
    info = checkpoint.find(saved).info
    state = load_file(saved / "ema.safetensors")
    state["blocks.1.mlp.fc2.bias"][3] = value
    checkpoint.save(tmp_path / "run", 5, {"ema": state}, {key: info[key] for key in ("config", "latents")})
    with pytest.raises(SystemExit, match="fc2.bias: not finite, or outside fp16.s range of ±65,504"):
        hand_out(tmp_path, "checkpoint=run/step_0000005", "out=half", "dtype=fp16")
    assert not (tmp_path / "half").exists()


def test_no_path_of_this_machine_stays(tmp_path, composed):
    """Whatever in the record is absolute is shortened; without paths=short it is what it was."""
    latents = replace(RGB, shape=(4, 16, 16), autoencoder=str(tmp_path / "weights/a.pt"))
    _, folder = save_checkpoint(tmp_path / "run", composed, latents, heldout=str(tmp_path / "nette/val"))
    info = checkpoint.find(folder).info
    info["config"]["dataset"]["path"], info["config"]["results"] = str(tmp_path / "nette/train"), "/results"
    write_json(folder / "info.json", {**info, "weights": str(tmp_path / "them/a.pt")})
    hand_out(tmp_path, "checkpoint=run", "out=plain")
    assert str(tmp_path) in (tmp_path / "plain/info.json").read_text()
    hand_out(tmp_path, "checkpoint=run", "out=given", "paths=short", "autoencoder=madebyollin/taesd")
    for name in ("info.json", "config.yaml"):
        assert str(tmp_path) not in (tmp_path / "given" / name).read_text()
    actual = checkpoint.find(tmp_path / "given").info
    assert actual["config"] == OmegaConf.to_container(OmegaConf.load(tmp_path / "given/config.yaml"))
    data = actual["config"]["dataset"]
    assert (data["path"], data["heldout"], actual["config"]["results"]) == ("nette/train", "nette/val", "results")
    assert actual["weights"] == "them/a.pt"
    assert actual["latents"] == {**info["latents"], "autoencoder": "madebyollin/taesd"}  # with its fingerprint
    hand_out(tmp_path, "checkpoint=run", "out=third", "paths=short")
    assert checkpoint.find(tmp_path / "third").info["latents"]["autoencoder"] == "weights/a.pt"


def test_only_paths_are_shortened():
    kept = {"a": ["data/digits/train", "a/b", "madebyollin/taesd", None, 3, True, "and/or /tmp"], "b": {"c": "~/x"}}
    assert shortened(kept) == kept
    assert shortened(["/", "/a", "/a/b", "/a/b/c/"]) == ["/", "a", "a/b", "b/c"]
    classes = {"latents": {"classes": ["/a/b/c"], "autoencoder": "/a/b/c"}}
    assert record(classes, "short", None) == {"latents": {"classes": ["/a/b/c"], "autoencoder": "b/c"}}


def test_names_that_others_can_not_use_are_refused(tmp_path, saved, composed):
    with pytest.raises(SystemExit, match="draws pixels and has none"):
        hand_out(tmp_path, f"checkpoint={saved}", "out=a", "autoencoder=madebyollin/taesd")
    save_checkpoint(tmp_path / "other", composed, replace(RGB, shape=(4, 16, 16), autoencoder="a.pt"))
    for name in ("/a/b", "taesd.safetensors", "../b", "a/b/c"):
        with pytest.raises(SystemExit, match=f"autoencoder={name} is no hub id"):
            hand_out(tmp_path, "checkpoint=other", "out=a", f"autoencoder={name}")
    assert not (tmp_path / "a").exists()
