"""The optimizer step against PyTorch's own, and what it leaves alone when numbers are bad."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import random_network

from tread.runtime import schema
from tread.training.ema import EMA, exponential, power
from tread.training.optimizer import backward, learning_rate, optimizer_step
from tread.training.optimizers import Optim
from tread.training.run import StepStatistics


def network(seed=0):
    return random_network(seed, hidden_size=16, depth=2, num_heads=2)


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1.0, **{"weight_decay": 0.01, "fused": True, **options})


def give_gradients(model, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("clip_norm", [None, 0.5, 1e9])
def test_steps_equal_those_of_torch(clip_norm):
    """Reference: clip_grad_norm_ and AdamW in a loop over the parameters."""
    ours, theirs = network(), network()
    optimizer, reference = adamw(ours), adamw(theirs, fused=False, foreach=False)
    for step in range(5):
        give_gradients(ours, step), give_gradients(theirs, step)
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip_norm or math.inf)
        reference.param_groups[0]["lr"] = 0.01 * (step + 1)
        reference.step()
        norm, skip = optimizer_step(optimizer, 0.01 * (step + 1), clip_norm)
        torch.testing.assert_close(norm, expected)
        assert skip.item() == 0.0 and all(parameter.grad is None for parameter in ours.parameters())
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_leaves_everything_bit_for_bit(bad):
    model = network()
    optimizer, averages = adamw(model), [EMA(model, exponential(0.9)), EMA(model, power(0.1))]
    give_gradients(model, 0)
    optimizer_step(optimizer, 0.01, None)
    for average in averages:
        average.update(model, 0, torch.tensor(0.0))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"], [a.network for a in averages]))
    give_gradients(model, 1)
    model.blocks[1].mlp.fc1.weight.grad[3, 2] = bad
    norm, skip = optimizer_step(optimizer, 0.01, 1.0)
    assert skip.item() == 1.0 and not norm.isfinite()
    for average in averages:
        average.update(model, 1, skip)
    assert all(torch.equal(value, before[0][name]) for name, value in model.state_dict().items())
    for index, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before[1][index][name]) for name, value in state.items())
    for average, old in zip(averages, before[2]):
        assert all(torch.equal(a, b) for a, b in zip(average.network.parameters(), old.parameters()))
    give_gradients(model, 2)
    assert optimizer_step(optimizer, 0.01, None)[1].item() == 0.0  # and it goes on


def test_an_infinite_loss_with_finite_gradients_spoils_them():
    weight = torch.tensor([1e20], requires_grad=True)
    loss = (weight**2).sum()
    assert loss.isinf()
    backward(loss)
    assert weight.grad.isnan().all()
    weight.grad = None
    backward((2 * weight).sum())
    assert weight.grad.item() == 2.0


def test_the_tally_leaves_bad_steps_out_of_means_and_counts_them_in_a_row():
    tally = StepStatistics("cpu")
    for loss, norm, skip in ((1.0, 2.0, 0.0), (math.nan, math.nan, 1.0), (3.0, 4.0, 0.0), (math.inf, 1.0, 1.0)):
        tally.add(torch.tensor(loss), torch.tensor(norm), torch.tensor(skip))
    rows = {"in_a_row": 1.0, "longest": 1.0, "ago": 2.0, "alignment": 0.0}
    assert tally.read() == {"loss": 4.0, "grad_norm": 6.0, "good": 2.0, "bad": 2.0, **rows, "recent": "0101"}
    assert StepStatistics("cpu", tally.read()).read() == tally.read()
    tally.restart()
    tally.add(torch.tensor(1.0), torch.tensor(math.nan), torch.tensor(1.0))
    rows = {"in_a_row": 2.0, "longest": 2.0, "ago": 0.0, "alignment": 0.0}
    assert tally.read() == {"loss": 0.0, "grad_norm": 0.0, "good": 0.0, "bad": 1.0, **rows, "recent": "01011"}
    for skip in (0.0, 0.0, 1.0):
        tally.add(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(skip))
    assert [tally.read()[name] for name in ("in_a_row", "longest", "ago")] == [1.0, 2.0, 3.0]


def test_learning_rates():
    """Closed forms, by hand."""
    tree = {"lr": 1.0, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "clip_norm": None}
    tree |= {"schedule": "constant", "warmup_steps": 0, "final_lr": 0.0}

    def rates(steps, at, **options):
        optim = schema.read({**tree, **options}, Optim, "optim.")
        cfg = SimpleNamespace(optim=optim, train=SimpleNamespace(steps=steps))
        return [learning_rate(cfg, step) for step in at]

    assert set(rates(100, (0, 50, 99, 200), lr=1e-4)) == {1e-4}
    linear = {"schedule": "linear", "warmup_steps": 10, "final_lr": 0.5}
    assert rates(110, (0, 4, 9), **linear) == pytest.approx([0.1, 0.5, 1.0])
    assert rates(110, (10, 60, 110, 500), **linear) == pytest.approx([1.0, 0.75, 0.5, 0.5])
    cosine = rates(100, (0, 25, 50, 100), lr=2.0, schedule="cosine")
    assert cosine == pytest.approx([2.0, 1 + 2**-0.5, 1.0, 0.0])
    for options, shown in (
        ({"schedule": "step"}, "optim.schedule is 'step'.*constant, linear or cosine"),
        ({"warmup_steps": -1}, "optim.warmup_steps is -1"),
        ({"final_lr": 2.0}, "optim.final_lr is 2.0.*between 0 and optim.lr, 1.0"),
    ):
        with pytest.raises(ValueError, match=shown):
            rates(10, (0,), **options)
