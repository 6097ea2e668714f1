"""Checkpoints, whole files and the EMA: what is saved comes back bit for bit, and damage is named."""

import json
import math
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from conftest import equal, names_in, raising, read_json, write_json
from safetensors.torch import save_file

from dit import DiT
from tread.checkpoints import checkpoint
from tread.checkpoints.ema import EMA, exponential
from tread.checkpoints.weights import load_weights, read_weights
from tread.runtime import tensor_files
from tread.runtime.files import whole_folder, write_whole


def small(**more):
    return DiT(input_size=4, in_channels=1, hidden_size=16, depth=2, num_heads=2, num_classes=3, **more)


@pytest.fixture
def saved(tmp_path):
    parts = {"model": small().state_dict(), "optimizer": {"exp_avg/a": torch.ones(2)}}
    checkpoint.save(tmp_path, 1, parts, {"config": {}})
    checkpoint.save(tmp_path, 2, {**parts, "ema": small().state_dict()}, {"config": {"a": [1]}})
    return tmp_path


def test_what_is_saved_comes_back(saved):
    actual = checkpoint.find(saved)
    assert actual.step == 2 and actual.info["config"] == {"a": [1]} and actual.folder.name == "step_0000002"
    assert names_in(saved) == {"latest", "step_0000001", "step_0000002"}
    assert [checkpoint.find(saved / name).step for name in ("latest", "step_0000001")] == [2, 1]


def test_damage_is_named(saved):
    latest, first = checkpoint.find(saved), checkpoint.find(saved / "step_0000001")
    before = f"; the checkpoint before it is {first.folder}$"
    with pytest.raises(ValueError, match="holds no ema part.*weights=model"):
        first.tensors("ema")
    path = latest.folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    for damaged, shown in ((content, "model.safetensors is damaged"), (content[:100], "100 bytes.* cut short")):
        path.write_bytes(damaged)
        with pytest.raises(checkpoint.Damaged, match=f"{shown}.*{before}"):
            latest.tensors("model")
    path.unlink()
    with pytest.raises(checkpoint.Damaged, match="model.safetensors is missing"):
        latest.tensors("model")
    info = latest.folder / "info.json"
    whole = read_json(info)
    elsewhere = {**whole["files"], "../step_0000001/model.safetensors": whole["files"]["model.safetensors"]}
    for text, shown in (
        ('{"format": "check', "info.json is damaged"),
        ("[]", "info.json is damaged"),
        (json.dumps({**whole, "files": {"model.safetensors": {}}}), "info.json is damaged"),
        (json.dumps({**whole, "files": elsewhere}), "must name files next to it"),
        (None, "info.json is missing"),  # not an older one in its place
    ):
        info.unlink() if text is None else info.write_text(text)
        for name in (saved, saved / "latest", latest.folder):
            with pytest.raises(checkpoint.Damaged, match=f"{shown}.*{before}") as caught:
                checkpoint.find(name)
            assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # as other processes are told
    write_json(info, {"format": "checkpoint", "version": 99})
    with pytest.raises(ValueError, match="version 99"):
        checkpoint.find(saved)
    info.write_text("")
    with pytest.raises(checkpoint.Damaged, match="info.json is damaged"):
        read_weights(latest.folder / "ema.safetensors")
    write_json(info, whole)
    os.truncate(first.folder / "model.safetensors", 100)
    with pytest.raises(checkpoint.Damaged, match="there is no whole checkpoint before it"):
        latest.tensors("model")
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        checkpoint.find(saved / "step_0000009")


def test_a_latest_that_names_nothing(saved):
    shutil.rmtree(saved / "step_0000002")
    shown = f"no checkpoint at .*latest: it is no link to .*; the newest checkpoint there is {saved / 'step_0000001'}$"
    for leave in (Path.unlink, Path.touch, Path.unlink):  # a dangling link, none, a file
        with pytest.raises(FileNotFoundError, match=shown):
            checkpoint.find(saved / "latest")
        assert checkpoint.find(saved).step == 1
        leave(saved / "latest")


def test_a_failed_save_leaves_the_older_one_whole(saved, monkeypatch):
    monkeypatch.setattr(tensor_files, "_bytes", raising(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(saved, 3, {"model": {"a": torch.zeros(1)}}, {})
    assert checkpoint.find(saved).step == 2 and os.readlink(saved / "latest") == "step_0000002"
    assert names_in(saved) == {"latest", "step_0000001", "step_0000002"}


def test_what_gets_a_name_is_on_the_disk_before(tmp_path, monkeypatch):
    """Each file and its folder before the rename, `latest` after it."""
    events, fsync, replace = [], os.fsync, os.replace

    def synced(descriptor):
        events.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda a, b: events.append(("name", Path(b).name)) or replace(a, b))
    checkpoint.save(tmp_path, 1, {"model": {"a": torch.zeros(1)}}, {})
    before = [("sync", name) for name in (".step_0000001.partial", "info.json", "model.safetensors")]
    assert sorted(events[:3]) == before and events[2] == before[0]
    assert events[3:] == [
        ("name", "step_0000001"),
        ("sync", tmp_path.name),
        ("name", "latest"),
        ("sync", tmp_path.name),
    ]
    events.clear()
    write_whole(tmp_path / "status.json", "{}")
    assert [kind for kind, _ in events] == ["sync", "name"] and events[1][1] == "status.json"


def test_a_folder_is_replaced_only_by_a_whole_one(tmp_path):
    folder = tmp_path / "f"
    for text in ("one", "two"):
        with whole_folder(folder) as partial:
            (partial / "x").write_text(text)
            assert not (folder / "x").exists() or (folder / "x").read_text() == "one"
        assert (folder / "x").read_text() == text
    with pytest.raises(RuntimeError), whole_folder(folder) as partial:
        (partial / "x").write_text("three")
        raise RuntimeError
    assert (folder / "x").read_text() == "two" and list(tmp_path.iterdir()) == [folder]


def test_weights_to_start_from(saved, tmp_path):
    first, last, state = checkpoint.find(saved / "step_0000001"), checkpoint.find(saved), small().state_dict()
    save_file(state, tmp_path / "bare.safetensors")
    for path, weights, expected in (
        (saved, "ema", last.tensors("ema")),
        (first.folder, "model", first.tensors("model")),
        (tmp_path / "bare.safetensors", "ema", state),
    ):
        read, network = read_weights(path, weights).state, small()
        assert equal(read, expected)
        load_weights(network, str(path), weights)
        assert all(torch.equal(value, expected[key]) for key, value in network.state_dict().items())
    with pytest.raises(ValueError, match="is a file.*import_checkpoint.py"):
        checkpoint.find(tmp_path / "bare.safetensors")


def test_the_emas_warm_up_is_a_product():
    """The product of (1+n)/(10+n), or the decay, over updates n: after 3 updates 1 / C(12, 9) of the start is left."""
    for decay, warmup, steps, left in (
        (0.9999, True, 3, 1 / math.comb(12, 9)),
        (0.5, True, 10, math.factorial(8) * math.factorial(9) / math.factorial(17) * 0.25),  # the decay from n = 8 on
        (0.9, False, 7, 0.9**7),
    ):
        network = torch.nn.Linear(3, 2)
        began = network.weight.detach().clone()
        ema = EMA(network, exponential(decay, warmup))
        torch.nn.init.zeros_(network.weight)
        for step in range(steps):
            ema.update(network, ema.share(step), torch.tensor(0.0))
        torch.testing.assert_close(ema.network.weight, began * left, rtol=1e-5, atol=0)
        assert not ema.network.weight.requires_grad and not ema.network.training
