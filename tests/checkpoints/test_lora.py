"""LoRA against peft's own merging; its runs: resumed bit for bit, opened without peft, exported whole."""

import re
import shutil
import sys
from functools import partial
from importlib.util import find_spec

import export_checkpoint
import numpy as np
import pytest
import torch
from conftest import assert_refused, contents, equal, launch, opened, randomized, read_json, take_samples
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from tread.checkpoints import checkpoint
from tread.checkpoints.lora import BASE, Lora, base_of, merge
from tread.checkpoints.network import build_network
from tread.checkpoints.weights import read_weights
from tread.runtime.tensor_files import LABELS
from tread.training.costs import sample_flops

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="pip install -r requirements-lora.txt")

SIZES = ("dataset=folder", "dataset.path=x", "dataset.channels=4", "dataset.size=8", "dataset.num_classes=10")
SIZES += ("model.hidden_size=32", "model.depth=6", "model.patch_size=2")
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("tread_rwkv", "tread_mamba", "maskdit", "sprint")]


@pytest.mark.parametrize("model", ["tread_lightning", *OTHERS])
def test_merged_weights_are_peft_s_and_compute_the_same(read_config, model):
    """No block reads a layer's weight past its adapter; of what `also` names, the trained tensor counts, a bias too."""
    heads = () if model == "tread_rwkv" else ("model.num_heads=2",)
    cfg = read_config(*SIZES, *heads, f"model={model}", *(["model.decoder_depth=1"] if model == "maskdit" else ()))
    network, whole = (randomized(partial(build_network, cfg), seed, 0.2) for seed in (0, 1))
    frozen = Lora(rank=3, alpha=1.5, also="y_embedder|blocks.0.*bias").adapt(network)
    base = {name: value.clone() for name, value in base_of(network).items()}
    assert base.keys() == whole.state_dict().keys()
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    assert LABELS in trained and "x_embedder.proj.weight" in frozen
    assert all(".lora_" in name or "y_embedder" in name or name.endswith("bias") for name in trained)
    for name, parameter in network.named_parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape) * (name in trained)
    state = {name: value for name, value in network.state_dict().items() if name not in frozen}
    whole.load_state_dict(merge(base, state, 0.5))
    x, t, y = torch.randn(3, 4, 8, 8), torch.rand(3), torch.arange(3)
    assert network.forward_flops() > whole.forward_flops()
    with FlopCounterMode(display=False) as counter:
        network(x, t, y).square().sum().backward()
    assert 0.9 < 3 * sample_flops(network, ()) / counter.get_total_flops() < 1.2 or model != "tread_lightning"
    with torch.no_grad():
        torch.testing.assert_close(whole(x, t, y), network(x, t, y), rtol=1e-3, atol=1e-3)
        for layer in (module for module in network.modules() if hasattr(module, "lora_A")):
            layer.merge()
    for name, value in base_of(network).items():
        torch.testing.assert_close(whole.state_dict()[name], value)


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit_and_is_opened_and_exported_without_peft(tmp_path, monkeypatch):
    launch(tmp_path, "name=old")
    asked = ("init_from=results/old", "init_weights=model", "lora.rank=2", "lora.alpha=4", "lora.targets=attn|mlp")
    said = launch(tmp_path, *asked, "name=straight")
    assert "of them trained" in said
    launch(tmp_path, *asked, "name=halved", "train.steps=3")
    (tmp_path / "results/old/latest").unlink()  # init_from was read when the run began
    launch(tmp_path, *asked, "name=halved", "train.steps=6")
    runs = [tmp_path / "results" / name for name in ("straight", "halved")]
    straight, halved = (checkpoint.find(run) for run in runs)
    for part in ("model", "ema", "optimizer"):
        assert equal(straight.stored(part), halved.stored(part))
    base, kept = straight.base(), straight.stored("ema")
    biases = [name for name in base if name.endswith("bias")]
    changed = {name for name, value in straight.tensors("ema").items() if not torch.equal(value, base[name])}
    assert changed == {LABELS, *(name for name in base if re.match(r"blocks.*\.(attn|mlp)", name))} - {*biases}
    assert {name for name in kept if ".lora_" not in name} == {LABELS, "pos_embed"}

    monkeypatch.setitem(sys.modules, "peft", None)
    draw = ("seeds=0", "steps=2", "classes=[0]", "decode=false")
    take_samples(tmp_path, "checkpoint=results/straight", "out=a.png", *draw)
    monkeypatch.chdir(tmp_path)
    exported = export_checkpoint.export(export_checkpoint.Options("results/straight", "out"))
    assert "adapter" not in exported.info and equal(exported.stored("ema"), straight.tensors("ema"))
    assert equal(opened(tmp_path / "out").load("cpu").network.state_dict(), straight.tensors("ema"))
    take_samples(tmp_path, "checkpoint=out", "out=b.png", *draw)
    pictures = (np.asarray(Image.open(tmp_path / name)) for name in ("a.png", "b.png"))
    assert np.array_equal(*pictures)
    (runs[0] / BASE).write_bytes((runs[0] / BASE).read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="is not their network: it is another one, or damaged, by its hash"):
        straight.tensors("ema")
    (runs[0] / BASE).unlink()
    before = contents(straight.folder)
    (tmp_path / "alone.safetensors").write_bytes(before["ema.safetensors"])
    assert_refused(
        lambda *more: launch(tmp_path, *more),
        (*asked, "name=straight", "train.steps=9", f"{BASE}, their network, is missing: scripts/export_checkpoint.py"),
        ("init_from=results/straight", "name=x", f"{BASE}, their network, is missing"),
        (*asked, "name=halved", "lora.rank=4", "lora.rank: 2 there, 4 here"),
        ("init_from=alone.safetensors", "name=x", "they are adapters .LoRA. alone"),
        ("init_from=results/halved", "name=x", "model.hidden_size=32", r"^.*\(LoRA\) of another network; .*=\d+$"),
        ("init_from=results/halved", "name=x", "lora.rank=2", "needs peft: pip install -r requirements-lora.txt"),
        ("init_from=results/halved", "name=x", "lora.rank=2", "lora.targets=qvk", "lora.targets=qvk is found in no"),
        ("init_from=results/halved", "name=x", "lora.rank=2", "lora.also=label", "lora.also=label is found in no"),
        ("init_from=results/halved", "name=x", "lora.rank=2", "lora.also=.", "lora.also=. is found in all"),
        ("init_from=a", "lora.rank=2", "lora.targets='('", "lora.targets is .*no regular expression"),
        ("init_from=a", "lora.rank=2", "optim.name=muon", "optim.muon_lr=1e-3", "muon updates whole matrices"),
        ("init_from=a", "lora.rank=2", "ema.power=[0.1]", "ema.power averages whole weights"),
        ("lora.rank=2", "lora.rank is given, but init_from=… is not"),
    )
    assert contents(straight.folder) == before
    (runs[1] / "latest").unlink()
    assert checkpoint.find(runs[1]).step == 6
    for step in runs[1].glob("step_*"):
        shutil.rmtree(step)
    for read in (checkpoint.find, read_weights):  # the network before training is no checkpoint of the run
        with pytest.raises(FileNotFoundError, match="no checkpoint at"):
            read(runs[1])


def test_groups_give_adapters_their_own_rates(tmp_path):
    launch(tmp_path, "name=old", "train.steps=1")
    groups = "optim.groups=[{match: lora_A, lr: 0}, {match: lora_B, lr: 1e-2}, {match: y_embedder, lr: 0}]"
    asked = ("init_from=results/old", "lora.rank=2", "name=parts")
    launch(tmp_path, *asked, "train.steps=3")
    launch(tmp_path, *asked, groups, "train.steps=6")  # a run's rates may change
    found = checkpoint.find(tmp_path / "results/parts")
    before = checkpoint.find(tmp_path / "results/parts/step_0000003")
    same = {name for name, value in found.stored("model").items() if torch.equal(value, before.stored("model")[name])}
    assert same == {name for name in found.stored("model") if "lora_B" not in name}
    assert not torch.equal(found.tensors("model")[LABELS], found.base()[LABELS])
    assert read_json(found.folder / "info.json")["adapter"]["scale"] == 1.0
