"""Muon against closed forms, singular values and torch.optim.Muon, and its runs against those without a break."""

import copy
import math
import re
import shutil

import pytest
import torch
from conftest import equal, launch, launch_processes, random_network, records, same, size_of
from test_optimizer import give_gradients, settings
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from tread.checkpoints import checkpoint
from tread.checkpoints.network import build_network, read_network
from tread.models.architectures import ARCHITECTURES
from tread.training.muon import SCALES, block_matrices, groups_of, orthogonalized, step_flops
from tread.training.optimizer import optimizer_step

MUON = ["optim.name=muon", "optim.muon_lr=0.01", "optim.weight_decay=0.1"]
MATRICES = {"dit_text": 7, "lightning_text": 7, "rwkv": 7}  # in a block; others have 4


def small():
    return random_network(0, hidden_size=16, depth=2, num_heads=2)


def iterated(sigma):
    for _ in range(5):
        sigma = 3.4445 * sigma - 4.775 * sigma**3 + 2.0315 * sigma**5
    return sigma


def direction(matrix):
    """The iterations of each singular value, in fp64."""
    left, sigma, right = torch.linalg.svd(matrix.double() / matrix.double().norm(), full_matrices=False)
    return (left * iterated(sigma)) @ right


def test_its_flops_are_those_that_torch_counts():
    network = random_network(0, hidden_size=16, depth=2, num_heads=2)
    network.blocks[0].attn.qkv.weight.requires_grad = False
    with FlopCounterMode(display=False) as counter:
        for weight in block_matrices(network):
            if weight.requires_grad:
                orthogonalized(weight[None].detach(), 5, torch.float32)
    assert step_flops(network) == counter.get_total_flops() > 0


def test_closed_forms():
    assert (iterated(1.0), iterated(0.5)) == pytest.approx((0.69644, 0.76544), abs=5e-6)
    for rows, columns in ((2, 7), (7, 2), (4, 4)):
        given = torch.randn(3, rows, columns, generator=torch.Generator().manual_seed(0))
        given[1] = 0.0
        found = orthogonalized(given, 5, torch.float32)
        assert_close(found[2].double(), direction(given[2]), rtol=0, atol=1e-4)
        for factor in (10, 1e-5):
            assert_close(orthogonalized(factor * given[2:], 5, torch.float32)[0], found[2], rtol=0, atol=1e-5)
        assert not found[1].any()
    scales = [scale(*shape) for scale in SCALES.values() for shape in ((2304, 768), (768, 2304))]
    assert scales == pytest.approx([3**0.5, 1.0, 9.6, 9.6])
    with pytest.raises(ValueError, match="steps 0: must be .* a whole number above 0"):
        settings(name="muon", muon_lr=0.1, options={"steps": 0}).build([], small())


@pytest.mark.parametrize("scale, nesterov", [("original", True), ("match_rms", False)])
def test_steps_are_those_by_hand(tmp_path, scale, nesterov):
    """With clipping, decay, falling rates, a bad step behind which the state is saved and loaded, and no gradients."""
    ours, theirs = small(), small()
    options = {"lr": 0.01, "muon_lr": 0.03, "muon_scale": scale, "options": {"nesterov": nesterov}}
    optim = settings(name="muon", weight_decay=0.1, **options)
    optimizer = optim.build(ours.named_parameters(), ours)
    own, rest = (group["params"] for group in groups_of(theirs.parameters(), theirs))
    reference, momenta = torch.optim.AdamW(rest, weight_decay=0.1), [torch.zeros_like(weight) for weight in own]
    for step in range(6):
        give_gradients(ours, step, float(step < 5)), give_gradients(theirs, step, float(step < 5))
        before = copy.deepcopy((ours.state_dict(), checkpoint.optimizer_tensors(optimizer, ours)))
        if step == 2:
            ours.blocks[1].mlp.fc1.weight.grad[3, 2] = math.nan
        norm, skip = optimizer_step(optimizer, torch.tensor(0.01 / (step + 1), dtype=torch.float64), 2.0)
        assert skip == (step == 2)
        if skip:
            saved = checkpoint.optimizer_tensors(optimizer, ours)
            assert equal(ours.state_dict(), before[0]) and equal(saved, before[1])
            checkpoint.save(tmp_path, 3, {"optimizer": saved}, {"config": {}})
            ours = copy.deepcopy(ours)
            optimizer = optim.build(ours.named_parameters(), ours)
            checkpoint.load_optimizer(optimizer, ours, checkpoint.find(tmp_path).tensors("optimizer"))
            continue
        for parameter in theirs.parameters():
            parameter.grad /= max(1.0, norm / 2.0)
        reference.param_groups[0]["lr"], rate = 0.01 / (step + 1), 0.03 / (step + 1)
        reference.step()
        with torch.no_grad():
            for weight, momentum in zip(own, momenta):
                momentum.copy_(0.95 * momentum + 0.05 * weight.grad)
                update = 0.05 * weight.grad + 0.95 * momentum if nesterov else momentum
                weight.copy_((1 - rate * 0.1) * weight - rate * SCALES[scale](*weight.shape) * direction(update))
    for actual, expected in zip(ours.parameters(), theirs.parameters()):
        assert_close(actual, expected, rtol=1e-4, atol=2e-5)
    numbers = sum(value.numel() for kept in optimizer.state.values() for value in kept.values() if value.dim())
    assert numbers == optim.state_size(ours) == 2 * size_of(ours) - sum(weight.numel() for weight in own)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
@pytest.mark.parametrize("scale, theirs", [("original", "original"), ("match_rms", "match_rms_adamw")])
def test_steps_are_torch_s_up_to_its_bf16(scale, theirs):
    ours, twin, start = small(), small(), small()
    optim = settings(name="muon", lr=0.01, muon_lr=0.02, muon_scale=scale, weight_decay=0.1)
    optimizer = optim.build(ours.named_parameters(), ours)
    reference = torch.optim.Muon(block_matrices(twin), lr=0.02, weight_decay=0.1, adjust_lr_fn=theirs)
    for step in range(4):
        give_gradients(ours, step), give_gradients(twin, step)
        optimizer_step(optimizer, 0.01, None), reference.step()
    for actual, expected, before in zip(*map(block_matrices, (ours, twin, start)), strict=True):
        assert (actual - expected).norm() < 0.02 * (expected - before).norm()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_whose_weights_are_muon_s(composed, name):
    """Here by names: the matrices in blocks but for modulations."""
    config = composed(f"model={name}", "model.hidden_size=32", "model.depth=6")
    config["model"] |= {"num_heads": 2} if "num_heads" in config["model"] else {}
    config["dataset"] |= {"channels": 4, "size": 8, "num_classes": 10}
    config["text"] |= {"encoder": "any", "tokens": 8, "width": 12, "pooled": 6}
    with torch.device("meta"):
        network = build_network(read_network(config))
    named = re.compile(r"(decoder_)?blocks\.\d+\.(?!adaLN)\w+\.\w+\.weight")
    expected = [p for key, p in network.named_parameters() if named.fullmatch(key) and p.ndim == 2]
    blocks = [*network.blocks, *getattr(network, "decoder_blocks", ())]
    assert len(expected) == MATRICES.get(name, 4) * len(blocks)
    assert {id(weight) for weight in block_matrices(network)} == {id(weight) for weight in expected}


def test_a_run_goes_on_bit_for_bit_and_says_which_is_which(tmp_path):
    options = [*MUON, "train.steps=4", "every.save=2", "every.evaluate=9", "every.sample=9", "dataset.heldout=null"]
    text = launch(tmp_path, *options, "name=one")
    said = r"optimizer: muon for 24 block matrices \(18,432 parameters\), AdamW for the other \d+,\d+\n"
    assert re.search(said, text)
    one, parts = (tmp_path / "results" / name for name in ("one", "parts"))
    shutil.copytree(one / "step_0000002", parts / "step_0000002")
    assert "goes on at step 2" in launch(tmp_path, *options, "name=parts")
    assert same(one, parts)


@pytest.mark.slow
def test_two_processes_with_micro_batches_change_nothing_but_rounding(tmp_path):
    launch(tmp_path, *MUON, "name=one")
    launch_processes(tmp_path, *MUON, "name=two", "train.micro_batch_size=2", processes=2)
    for actual, expected in zip(*(records(tmp_path / "results" / name) for name in ("two", "one")), strict=True):
        assert actual == pytest.approx(expected, rel=1e-5)
