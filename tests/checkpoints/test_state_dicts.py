"""Other people's files: each is built here as the code that it comes from saves it, by the wrappers themselves."""

import argparse
import os
from collections import OrderedDict

import numpy as np
import pytest
import torch
from conftest import equal, random_network
from safetensors.torch import save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

from dit import DiT
from tread.checkpoints.weights import StoredWeights, describe, load_weights, sizes
from tread.models.rwkv import RWKV
from tread.runtime.tensor_files import plain_names, read_kind, read_state_dicts

SIZES = {"patch_size": 2, "hidden_size": 16, "depth": 3, "num_heads": 2}


def read_state_dict(path, weights="ema"):
    return read_kind(path, weights)[1]


def network(seed=0, **more):
    return random_network(seed, **SIZES, **more)


class Preconditioned(nn.Module):
    """As EDM's code keeps a network: under the name `model`."""

    def __init__(self, model):
        super().__init__()
        self.model = model


class Around(nn.Module):
    """As DistributedDataParallel keeps one, which can't be made without processes: under the name `module`."""

    def __init__(self, module):
        super().__init__()
        self.module = module


class Averaging(nn.Module):
    """As the package ema_pytorch keeps two: its names, and its two counters."""

    def __init__(self, online, averaged, with_online=True):
        super().__init__()
        self.ema_model = averaged
        if with_online:
            self.online_model = online
        self.register_buffer("initted", torch.tensor(True))
        self.register_buffer("step", torch.tensor(7))


def compiled_blocks(model):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block)
    return model


def same(actual, expected):
    assert equal(actual, expected)


def test_public_dit_and_sit_training_checkpoints(tmp_path):
    raw, averaged = network(0), network(1)
    optimizer = torch.optim.AdamW(raw.parameters())
    options = argparse.Namespace(model="DiT-XL/2", image_size=256, data_path="/data")
    content = {"model": raw.state_dict(), "ema": averaged.state_dict(), "opt": optimizer.state_dict(), "args": options}
    for legacy in (False, True):  # files were no zip archives before torch 1.6
        torch.save(content, tmp_path / "0050000.pt", _use_new_zipfile_serialization=not legacy)
        same(read_state_dict(tmp_path / "0050000.pt"), averaged.state_dict())
        same(read_state_dict(tmp_path / "0050000.pt", "model"), raw.state_dict())
        assert list(read_state_dicts(tmp_path / "0050000.pt")) == ["ema", "model"]


def test_released_tread_checkpoints(tmp_path):
    """A compiled, preconditioned network in a process group."""
    raw, averaged = network(0), network(1)
    expected = {kind: {**this.state_dict()} for kind, this in (("ema", averaged), ("model", raw))}
    wrapped = [torch.compile(Around(Preconditioned(compiled_blocks(this)))) for this in (raw, averaged)]
    assert "_orig_mod.module.model.blocks.0._orig_mod.attn.qkv.weight" in wrapped[0].state_dict()
    content = {"model_state_dict": wrapped[0].state_dict(), "ema_state_dict": wrapped[1].state_dict(), "step": 9}
    torch.save({**content, "optimizer_state_dict": {"state": {}}}, tmp_path / "latest.pt")
    for kind, state in expected.items():
        same(read_state_dict(tmp_path / "latest.pt", kind), state)
        mine = network(5)
        load_weights(mine, str(tmp_path / "latest.pt"), kind)
        same(mine.state_dict(), state)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize(
    "wrap",
    [
        AveragedModel,
        lambda inner: Around(Preconditioned(torch.compile(inner))),
        lambda inner: torch.compile(Preconditioned(Around(inner))),
        lambda inner: nn.ModuleDict({"net": Preconditioned(inner)}),
        lambda inner: Averaging(None, Preconditioned(inner), with_online=False),
    ],
)
def test_wrappers_names_come_off(tmp_path, wrap, suffix):
    state, path = network().state_dict(), tmp_path / f"a.{suffix}"
    wrapped = wrap(network()).state_dict()
    save_file(dict(wrapped), path) if suffix == "safetensors" else torch.save(wrapped, path)
    same(read_state_dict(path), state)


def test_ema_pytorch_keeps_both_in_one(tmp_path):
    raw, averaged = network(0), network(1)
    flat = Averaging(Preconditioned(raw), Preconditioned(averaged)).state_dict()
    torch.save(flat, tmp_path / "flat.pt")
    torch.save({"model": network(2).state_dict(), "ema": flat}, tmp_path / "nested.pt")
    same(read_state_dict(tmp_path / "flat.pt"), averaged.state_dict())
    same(read_state_dict(tmp_path / "flat.pt", "model"), raw.state_dict())
    same(read_state_dict(tmp_path / "nested.pt"), averaged.state_dict())
    same(read_state_dict(tmp_path / "nested.pt", "model"), network(2).state_dict())
    torch.save({**flat, "head.weight": torch.zeros(2)}, tmp_path / "more.pt")
    with pytest.raises(ValueError, match="not the network's: head.weight"):
        load_weights(network(), str(tmp_path / "more.pt"))


def test_files_of_one_kind(tmp_path):
    state = network().state_dict()
    for name, content in (("bare", state), ("raw", {"model": state}), ("averaged", {"ema": state, "epoch": 3})):
        torch.save(content, tmp_path / f"{name}.pt")
    for name, kind in (("bare", "ema"), ("bare", "model"), ("raw", "model"), ("averaged", "ema")):
        same(read_state_dict(tmp_path / f"{name}.pt", kind), state)
    assert list(read_state_dicts(tmp_path / "bare.pt")) == [None]
    with pytest.raises(ValueError, match="raw.pt holds raw weights and no averaged ones: init_weights=model"):
        read_state_dict(tmp_path / "raw.pt")
    with pytest.raises(ValueError, match="holds averaged weights .ema. and no raw ones"):
        read_state_dict(tmp_path / "averaged.pt", "model")


def test_what_is_no_state_dict_is_named(tmp_path):
    (tmp_path / "text.pt").write_text("no weights")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"weights": network().state_dict(), "epoch": 1}, tmp_path / "other.pt")
    torch.save({"ema": {"decay": 0.99, "shadow_params": []}, "model": network().state_dict()}, tmp_path / "shadow.pt")
    for name, shown in (
        ("text.pt", "could not be read"),
        ("none.pt", "could not be read"),
        ("list.pt", "no state dict"),
        ("other.pt", "weights, epoch is something else, and none of the keys ema,"),
        ("shadow.pt", "under 'ema', holds no state dict.*decay, shadow_params"),
    ):
        with pytest.raises(ValueError, match=shown):
            read_state_dict(tmp_path / name)
    same(read_state_dict(tmp_path / "shadow.pt", "model"), network().state_dict())


@pytest.mark.parametrize("legacy", [False, True])
def test_pickled_code_is_not_run(tmp_path, legacy):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "hacked"),))

    content = {"model": network().state_dict(), "ema": network().state_dict()}
    for extra in (Evil(), argparse.Namespace(a=Evil()), {"deep": [Evil()]}):
        torch.save({**content, "args": extra}, tmp_path / "evil.pt", _use_new_zipfile_serialization=not legacy)
        with pytest.raises(ValueError, match=r"could not be read.*object of \S*mkdir.*can run any code"):
            read_state_dict(tmp_path / "evil.pt")
        assert not (tmp_path / "hacked").exists()
    assert argparse.Namespace not in torch.serialization.get_safe_globals()  # allowed for the reading alone


def refusal(state, expected):
    with pytest.raises(ValueError) as refused:
        StoredWeights("a.pt", None, state).fit(expected.state_dict())
    return str(refused.value)


@pytest.mark.parametrize(
    "file, fitting",
    [
        ({"hidden_size": 24}, "model.hidden_size=24"),
        ({"depth": 2}, "model.depth=2"),
        ({"patch_size": 4}, "model.patch_size=4"),
        ({"mlp_ratio": 2.0}, "model.mlp_ratio=2.0"),
        ({"learn_sigma": True}, "model.learn_sigma=true"),
        ({"num_classes": 7}, "dataset.num_classes=7"),
        ({"input_size": 16}, "dataset.size=16"),
        ({"in_channels": 3}, "dataset.channels=3"),
        ({"bottleneck": 6}, "model.bottleneck=6"),
        (
            {"learn_sigma": True, "depth": 4, "num_classes": 1000},
            "depth=4 model.learn_sigma=true dataset.num_classes=1000",
        ),
    ],
)
def test_other_sizes_are_refused_with_the_settings_that_fit(file, fitting):
    """Each setting of a network is read back from its state dict, and named if and only if it differs."""
    sizes_here = {**SIZES, "input_size": 8, "in_channels": 4, "num_classes": 10}
    theirs, ours = DiT(**sizes_here | file), DiT(**sizes_here)
    text = refusal(theirs.state_dict(), ours)
    assert text.startswith("the weights of a.pt do not fit this network:")
    assert f"  settings that fit it: {'model.' * fitting.startswith('depth')}{fitting}" in text.splitlines()[-2:]
    assert f"the file is of {describe(sizes(theirs.state_dict()))}" in text
    back = refusal(ours.state_dict(), theirs)
    assert {item.partition("=")[0] for item in back.rpartition("fit it: ")[2].split()} == {
        item.partition("=")[0] for item in text.rpartition("fit it: ")[2].split()
    }


def test_sizes_of_the_public_networks():
    with torch.device("meta"):
        state = DiT(hidden_size=384, depth=12, num_heads=6, learn_sigma=True).state_dict()
        recurrent = RWKV(hidden_size=384, depth=12, learn_sigma=True).state_dict()
    text = "hidden_size 384, depth 12, patch_size 2, mlp_ratio 4.0, learn_sigma true, num_classes 1000, channels 4"
    assert describe(sizes(state)) == f"architecture dit, {text}, size 32"
    assert describe(sizes(recurrent)) == f"architecture rwkv, {text}, size 32"


def test_weights_of_the_other_architecture_are_refused_with_its_name():
    sizes = {"input_size": 8, "in_channels": 1, "hidden_size": 16, "depth": 2, "num_classes": 10}
    dit, rwkv = DiT(num_heads=2, **sizes).state_dict(), RWKV(**sizes).state_dict()
    for theirs, ours, name in ((dit, rwkv, "dit"), (rwkv, dit, "rwkv")):
        with pytest.raises(ValueError, match=f"settings that fit it: model.architecture={name}$"):
            StoredWeights("a file", None, theirs).fit(ours)
    first = {"blocks.0.mixer.conv1d.weight": torch.zeros(32, 1, 4), "blocks.0.mixer.A_log": torch.zeros(32, 16)}
    with pytest.raises(ValueError, match="a file"):  # Mamba 1, which no architecture here is
        StoredWeights("a file", None, {**dit, **first}).fit(rwkv)


@pytest.mark.parametrize("width, ratio", [(352, 8 / 3), (48, 4.0), (176, 3.1)])
def test_the_ratio_told_from_a_file_builds_its_mlp_again(width, ratio):
    state = DiT(hidden_size=width, depth=1, num_heads=4, mlp_ratio=ratio).state_dict()
    channels = len(state["blocks.0.mlp.fc1.bias"])
    assert channels == int(width * ratio) == int(width * sizes(state)["model.mlp_ratio"])


def test_entries_that_are_missing_or_too_many_are_named():
    ours = network()
    state = {**ours.state_dict()}
    state["logvar_linear.weight"] = state.pop("blocks.1.attn.qkv.weight")
    text = refusal(state, ours)
    assert "missing: blocks.1.attn.qkv.weight\n" in text and "not the network's: logvar_linear.weight\n" in text
    wrapped = {"logvar.weight": torch.zeros(1)} | {f"model.{name}": value for name, value in ours.state_dict().items()}
    text = refusal(plain_names(wrapped), ours)
    assert "not the network's: logvar.weight\n" in text and "missing" not in text
    text = refusal({f"backbone.{name}": value for name, value in ours.state_dict().items()}, ours)
    assert "there is no x_embedder.proj.weight, as in public DiT's parameter names, but backbone.pos_embed" in text
    whole = {**ours.state_dict(), "t_embedder.mlp.0.bias": torch.zeros(16, dtype=torch.int8)}
    assert "t_embedder.mlp.0.bias (16,) torch.int8 instead of (16,) torch.float32" in refusal(whole, ours)


def test_two_entries_of_one_name_are_refused():
    state = network().state_dict()
    with pytest.raises(ValueError, match="more than one entry comes to blocks.0.attn.qkv.bias"):
        plain_names({**state, "blocks.0._orig_mod.attn.qkv.bias": torch.zeros(48)})
    two = OrderedDict(state) | {f"model.{name}": value for name, value in network(1).state_dict().items()}
    assert "not the network's: model." in refusal(plain_names(two), network())


def test_positions_may_be_absent_and_numbers_half():
    ours = network(1)
    half = {name: value.half() for name, value in network(0).state_dict().items() if name != "pos_embed"}
    loaded = StoredWeights("a.pt", None, half).fit(ours.state_dict())
    same(loaded, {name: half[name].float() if name in half else value for name, value in ours.state_dict().items()})
    assert {value.dtype for value in loaded.values()} == {torch.float32}


def public_positions(dim, side):
    """Public DiT's get_2d_sincos_pos_embed, token by token: columns first, then rows; sines, then cosines."""
    table = np.zeros((side * side, dim), np.float32)
    for row in range(side):
        for column in range(side):
            for half, place in enumerate((column, row)):
                for i in range(dim // 4):
                    angle = place / 10000 ** (i / (dim / 4))
                    table[row * side + column, half * dim // 2 + i] = np.sin(angle)
                    table[row * side + column, half * dim // 2 + dim // 4 + i] = np.cos(angle)
    return torch.from_numpy(table)[None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_positions_must_be_the_formulas_up_to_rounding(dtype):
    ours = network(1)
    state = {name: value.to(dtype) for name, value in network(0).state_dict().items()}
    state["pos_embed"] = public_positions(16, 4).to(dtype)
    StoredWeights("a.pt", None, state).fit(ours.state_dict())
    columns_and_rows = state["pos_embed"].roll(8, dims=2)
    learnt = state["pos_embed"] + 0.02 * torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    for other in (columns_and_rows, learnt):
        off = (other.float() - ours.pos_embed).abs().max()
        with pytest.raises(ValueError, match=f"pos_embed of a.pt are not the fixed .* by up to {off:.3g}, "):
            StoredWeights("a.pt", None, {**state, "pos_embed": other}).fit(ours.state_dict())


def test_damaged_files_are_named_in_plain_words(tmp_path):
    state = network().state_dict()
    save_file(state, tmp_path / "whole.safetensors")
    torch.save(state, tmp_path / "whole.pt")
    whole = (tmp_path / "whole.safetensors").read_bytes()
    for name, content, shown in (
        ("a.safetensors", whole[:-1000], f"cut short or damaged .{len(whole) - 1000:,} bytes"),
        ("a.safetensors", whole[:5], "cut short or damaged .5 bytes"),
        ("a.safetensors", b"version https://git-lfs.github.com/spec/v1", "pointer of Git LFS"),
        ("a.pt", (tmp_path / "whole.pt").read_bytes()[:-300], "cut short or damaged"),
        ("a.pt", b"", "cut short or damaged .0 bytes"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} could not be read as a state dict: .*{shown}"):
            read_state_dict(tmp_path / name)
