"""Checkpoints, whole files and the EMA: what is saved comes back bit for bit, and damage is named."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dit import DiT
from tread.checkpoints import checkpoint
from tread.checkpoints.weights import load_weights, read_weights
from tread.runtime import tensor_files
from tread.runtime.files import whole_folder, write_whole
from tread.training.ema import EMA, exponential


def small(**more):
    return DiT(input_size=4, in_channels=1, hidden_size=16, depth=2, num_heads=2, num_classes=3, **more)


def trained(network, steps=2):
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, fused=True)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 1, 4, 4, generator=generator)
        (network(x, torch.zeros(4), torch.tensor([0, 1, 2, 3])) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.fixture
def saved(tmp_path):
    network = small()
    optimizer = trained(network)
    parts = {"model": network.state_dict(), "optimizer": checkpoint.optimizer_tensors(optimizer, network)}
    checkpoint.save(tmp_path, 1, parts, {"config": {}})
    checkpoint.save(tmp_path, 2, {**parts, "ema": network.state_dict()}, {"config": {"a": [1]}})
    return tmp_path


def test_what_is_saved_comes_back(saved):
    found = checkpoint.find(saved)
    assert found.step == 2 and found.info["config"] == {"a": [1]} and found.folder.name == "step_0000002"
    assert sorted(p.name for p in saved.iterdir()) == ["latest", "step_0000001", "step_0000002"]
    assert [checkpoint.find(saved / name).step for name in ("latest", "step_0000001")] == [2, 1]


def test_network_and_optimizer_go_on_as_if_they_had_not_stopped(saved):
    found, straight = checkpoint.find(saved), small()
    resumed = small()
    resumed.load_state_dict(found.tensors("model"), strict=True)
    straight.load_state_dict(resumed.state_dict())
    optimizers = []
    for network in (straight, resumed):
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, fused=True)
        checkpoint.load_optimizer(optimizer, network, found.tensors("optimizer"))
        optimizers.append(optimizer)
    a, b = (checkpoint.optimizer_tensors(o, n) for o, n in zip(optimizers, (straight, resumed)))
    assert a.keys() == found.tensors("optimizer").keys() == b.keys()
    assert all(torch.equal(value, found.tensors("optimizer")[key]) for key, value in a.items())
    assert {key.split("/")[0] for key in a} == {"exp_avg", "exp_avg_sq", "step"}


def test_damage_is_named(saved):
    found = checkpoint.find(saved)
    with pytest.raises(ValueError, match="holds no ema part.*model"):
        checkpoint.find(saved / "step_0000001").tensors("ema")
    path = found.folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="model.safetensors is damaged"):
        found.tensors("model")
    os.truncate(path, 100)
    with pytest.raises(ValueError, match="damaged: 100 bytes"):
        found.tensors("model")
    path.unlink()
    with pytest.raises(ValueError, match="model.safetensors is missing"):
        found.tensors("model")
    (found.folder / "info.json").write_text('{"format": "check')
    with pytest.raises(ValueError, match="info.json is damaged"):
        checkpoint.find(saved)
    (found.folder / "info.json").write_text(json.dumps({"format": "checkpoint", "version": 99}))
    with pytest.raises(ValueError, match="version 99"):
        checkpoint.find(saved)
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        checkpoint.find(saved / "step_0000009")


def test_damage_names_the_checkpoint_before(saved):
    """By every name of a damaged one; those before it that are damaged, too, are not advised."""
    last, before = (saved / f"step_000000{step}" for step in (2, 1))
    names, whole = (saved, saved / "latest", last), (last / "info.json").read_text()
    os.truncate(last / "model.safetensors", 100)
    for name in names:
        with pytest.raises(ValueError, match=f"so it is cut short; the checkpoint before it is {before}$"):
            checkpoint.find(name).tensors("model")
    for content in (None, "", "[]", '{"format": "checkpoint", "version": 1, "step": 2, "files": {}}'):
        (last / "info.json").unlink() if content is None else (last / "info.json").write_text(content)
        for name in names:
            with pytest.raises(ValueError, match=f"info.json is .*; the checkpoint before it is {before}$"):
                checkpoint.find(name)
    with pytest.raises(ValueError, match="info.json is damaged"):
        read_weights(last / "ema.safetensors")
    (last / "info.json").write_text(whole)
    os.truncate(before / "model.safetensors", 100)
    with pytest.raises(ValueError, match="there is no whole checkpoint before it"):
        checkpoint.find(saved).tensors("model")


def test_damage_reaches_other_processes(saved):
    """Errors of the main process are sent pickled."""
    error = checkpoint.Damaged("it is cut short", saved / "step_0000002")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_latest_that_names_nothing(saved):
    shutil.rmtree(saved / "step_0000002")
    for why in ("a link to step_0000002, which is gone", "no link to a checkpoint", "not there"):
        shown = f"no checkpoint at .*latest: it is {why}; the newest checkpoint there is {saved / 'step_0000001'}$"
        with pytest.raises(FileNotFoundError, match=shown):
            checkpoint.find(saved / "latest")
        assert checkpoint.find(saved).step == 1
        (saved / "latest").unlink(missing_ok=True)
        if why.startswith("a link"):
            (saved / "latest").touch()


@pytest.mark.parametrize("name", ["../step_0000001/model.safetensors", "/tmp/a.safetensors", "a/b.safetensors", ".."])
def test_parts_lie_in_the_checkpoints_own_folder(saved, name):
    path = saved / "step_0000002" / "info.json"
    info = json.loads(path.read_text())
    path.write_text(json.dumps({**info, "files": {**info["files"], name: info["files"]["model.safetensors"]}}))
    with pytest.raises(checkpoint.Damaged, match=f"info.json names the file '{name}', but must name files beside it"):
        checkpoint.find(saved)
    path.write_text(json.dumps({**info, "files": 3}))
    with pytest.raises(checkpoint.Damaged, match="info.json is damaged"):
        checkpoint.find(saved)


def test_a_failed_save_leaves_the_older_one_whole(saved, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(tensor_files, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(saved, 3, {"model": {"a": torch.zeros(1)}}, {})
    assert checkpoint.find(saved).step == 2 and os.readlink(saved / "latest") == "step_0000002"
    assert sorted(p.name for p in saved.iterdir()) == ["latest", "step_0000001", "step_0000002"]


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
    write_whole(tmp_path / "t", "a")
    write_whole(tmp_path / "t", "b")
    assert (tmp_path / "t").read_text() == "b"


def test_weights_to_start_from(saved, tmp_path):
    found, state = checkpoint.find(saved), small().state_dict()
    save_file(state, tmp_path / "bare.safetensors")
    for path, weights, expected in (
        (saved, "ema", found.tensors("ema")),
        (saved / "step_0000001", "model", checkpoint.find(saved / "step_0000001").tensors("model")),
        (tmp_path / "bare.safetensors", "ema", state),
    ):
        read, network = read_weights(path, weights).state, small()
        assert read.keys() == expected.keys() and all(torch.equal(read[key], expected[key]) for key in expected)
        load_weights(network, str(path), weights)
        assert all(torch.equal(value, expected[key]) for key, value in network.state_dict().items())
    with pytest.raises(ValueError, match="holds no ema part.*weights=model"):
        read_weights(saved / "step_0000001")
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        read_weights(tmp_path / "text.safetensors")
    with pytest.raises(ValueError, match="is a file.*import_checkpoint.py"):
        checkpoint.find(tmp_path / "bare.safetensors")


def test_ema_equals_its_recursion():
    for warmup in (True, False):
        network = torch.nn.Linear(3, 2)
        ema = EMA(network, exponential(0.9, warmup))
        expected = network.weight.detach().double().clone()
        for step in range(200):
            with torch.no_grad():
                network.weight.add_(torch.randn(2, 3))
            ema.update(network, step, torch.tensor(0.0))
            decay = min(0.9, (1 + step) / (10 + step)) if warmup else 0.9
            expected = decay * expected + (1 - decay) * network.weight.detach().double()
        torch.testing.assert_close(ema.network.weight.double(), expected, rtol=1e-4, atol=1e-5)
        assert not ema.network.weight.requires_grad and not ema.network.training
