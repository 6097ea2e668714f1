"""Prediction kinds, losses and shifts of rectified flow, against published weights and written-out definitions."""

import math
from itertools import product
from typing import get_args

import pytest
import torch
from torch.testing import assert_close

from rf import RF
from tread.diffusion.predictions import Quantity

PAIRS = list(product(get_args(Quantity), repeat=2))
g = torch.Generator().manual_seed(0)
X, NOISE = (torch.randn(3, 2, 4, 4, generator=g) for _ in range(2))
T = torch.tensor([0.01, 0.4, 0.98])  # the first and the last within the clamp


def gives(output):
    """A network with this output, whatever it sees."""
    return lambda x, t, y, routes=(): output


def exact(kind, x=X, noise=NOISE):
    return {"velocity": noise - x, "x": x, "noise": noise}[kind]


def all_of(kind, value, noisy, t):
    """Velocity, data and noise as one prediction tells them, with denominators of at least 0.05."""
    low, high = max(t, 0.05), max(1 - t, 0.05)
    if kind == "velocity":
        return {"velocity": value, "x": noisy - t * value, "noise": noisy + (1 - t) * value}
    if kind == "x":
        v = (noisy - value) / low
        return {"velocity": v, "x": value, "noise": noisy + (1 - t) * v}
    v = (value - noisy) / high
    return {"velocity": v, "x": noisy - t * v, "noise": value}


@pytest.mark.parametrize("predicts, loss_of", PAIRS)
@pytest.mark.parametrize("reverse", [False, True])
def test_a_pairs_loss_is_that_of_what_is_told(predicts, loss_of, reverse):
    """Each sample by hand: prediction and target go the same way to what the loss compares. Its velocity, its data and
    its gradient follow, and an exact network has no loss."""
    flow = RF(predicts=predicts, loss_of=loss_of, reverse=reverse)
    sign = -1 if reverse and predicts == "velocity" else 1
    output = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(1))
    squared, data, noisy = flow.errors(gives(sign * output), X, None, T, NOISE)
    v = flow.velocity(gives(sign * output), noisy, T, None)
    for i, t in enumerate(T.tolist()):
        told, target = (all_of(predicts, part[i], noisy[i], t) for part in (output, exact(predicts)))
        assert_close(noisy[i], (1 - t) * X[i] + t * NOISE[i])
        assert_close(squared[i], (told[loss_of] - target[loss_of]).square(), rtol=1e-3, atol=1e-4)
        assert_close(v[i], told["velocity"], rtol=1e-4, atol=1e-4)
        assert_close(data[i], noisy[i] - t * told["velocity"], rtol=1e-4, atol=1e-4)
    assert_close(flow.combine(sign * output, noisy.double(), T), data.double(), rtol=1e-4, atol=1e-4)
    assert flow.loss(gives(sign * exact(predicts)), X, None, T, NOISE).max() < 1e-9


def test_published_weights_of_the_nine_pairs():
    """JiT, Table 1, in our time: the factor of the squared error of what the network predicts, away from the clamp."""
    t, u = 0.4, 0.6
    table = {
        "x": {"x": 1, "noise": (u / t) ** 2, "velocity": 1 / t**2},
        "noise": {"x": (t / u) ** 2, "noise": 1, "velocity": 1 / u**2},
        "velocity": {"x": t**2, "noise": u**2, "velocity": 1},
    }
    for predicts, loss_of in PAIRS:
        flow, off = RF(predicts=predicts, loss_of=loss_of), gives(exact(predicts) + 1)
        loss = flow.loss(off, X, None, torch.full((3,), t), NOISE)
        assert_close(loss, torch.full((3,), float(table[predicts][loss_of])), rtol=1e-4, atol=0)
    v = RF(predicts="x").velocity(gives(X), NOISE, 0.01, None)
    assert_close(v, 20 * (NOISE - X))


@pytest.mark.parametrize("solver", ["euler", "heun"])
def test_sampling_ends_at_what_x_is_predicted_up_to_the_clamp(solver):
    """A constant prediction of x: each step of Euler goes the share (t − t') / max(t, clamp) of the way there."""
    flow, noise, y = RF(predicts="x", clamp=0.3), NOISE.double(), torch.zeros(3).long()
    samples = flow.sample(gives(X), NOISE, y, steps=10, solver="euler")
    left = math.prod(1 - 0.1 / max(i / 10, 0.3) for i in range(1, 11))
    assert_close(samples, X + left * (noise - X), rtol=1e-5, atol=1e-5)
    assert_close(RF(predicts="x").sample(gives(X), NOISE, y, steps=10, solver=solver), X.double(), rtol=0, atol=1e-5)
    guided = RF(predicts="x").sample(lambda x, t, y, routes=(): y.view(-1, 1, 1, 1) + 0 * x, NOISE, y, 1, 1.5, steps=10)
    assert_close(guided, torch.full_like(guided, -0.5), rtol=0, atol=1e-5)  # 1 + 1.5·(0 − 1)


def test_the_evaluation_is_of_the_velocity_alone():
    """Whatever is shifted, weighed or added; of predicts=x with the clamp that sampling has, and the true target."""
    changed = {"loss_of": "x", "direction": 1.0, "train_shift": 3.0}
    for more in (changed, {"contrastive": 0.5}):
        flow = RF(**more)
        assert_close(flow.evaluation_loss(gives(X), X, None, T, NOISE), RF().loss(gives(X), X, None, T, NOISE))
        assert torch.equal(flow.evaluation_levels(16), RF().evaluation_levels(16))
    actual = RF(predicts="x", loss_of="noise").evaluation_loss(gives(X), X, None, T, NOISE)
    expected = (NOISE - X).square().mean(dim=(1, 2, 3)) * torch.tensor([(0.01 / 0.05 - 1) ** 2, 0, 0])
    assert_close(actual, expected, rtol=1e-4, atol=1e-9)


def test_the_direction_is_that_of_the_velocity_told():
    for kind in get_args(Quantity):
        one, other = (RF(predicts=kind, loss_of=kind, direction=weight) for weight in (0.0, 1.0))
        term = other.errors(gives(NOISE), X, None, T, NOISE)[0] - one.errors(gives(NOISE), X, None, T, NOISE)[0]
        v = one.velocity(gives(NOISE), one.noised(X, T, NOISE), T, None)
        expected = 1 - torch.nn.functional.cosine_similarity(v, NOISE - X, dim=1, eps=0.01)
        assert_close(term, expected[:, None].expand_as(term), rtol=0, atol=0.02)


def test_training_times_are_shifted():
    """t' = s·t / (1 + (s − 1)·t): √2 takes ½ to 0.58579, and adds ln s to the mean of logit t."""
    normal = torch.linspace(-3, 3, 7, dtype=torch.float64)
    assert RF(train_shift=math.sqrt(2)).noise_level(torch.zeros(1)).item() == pytest.approx(0.58579, abs=1e-5)
    moved = RF(time_mean=0.2 + math.log(3), time_std=0.8).noise_level(normal)
    assert_close(RF(time_mean=0.2, time_std=0.8, train_shift=3.0).noise_level(normal), moved)
    t = RF("uniform").noise_level(normal)
    assert_close(RF("uniform", train_shift=2.0).noise_level(normal), 2 * t / (1 + t))


def test_auto_follows_from_the_latents():
    for channels, size, scale in ((4, 16, 0.5), (4, 32, 1.0), (32, 16, math.sqrt(2)), (768, 16, 6.9282)):
        flow = RF(shift="auto", train_shift="auto").for_latents(channels, size)
        assert (flow.train_shift, flow.shift) == (pytest.approx(scale), pytest.approx(1 / scale))
    assert RF(shift=0.3).for_latents(4, 16) == RF(shift=0.3)


def test_contrastive_loss():
    """v = 1 and another's velocity of 3 draw the best prediction to (1 − 3λ) / (1 − λ) = 0.8947 for λ = 0.05."""
    x, noise, t = torch.zeros(2, 1, 1, 1), torch.tensor([1.0, 3.0]).view(2, 1, 1, 1), torch.full((2,), 0.5)
    v = torch.tensor([0.8947368, 0.0]).view(2, 1, 1, 1).requires_grad_()
    flow = RF(contrastive=0.05)
    flow.loss(gives(v), x, None, t, noise)[0].backward()
    assert v.grad[0].item() == pytest.approx(0, abs=1e-6)
    whole = flow.errors(gives(NOISE), X, None, T, NOISE)[0]
    target = NOISE - X
    expected = (NOISE - target).square() - 0.05 * (NOISE - target[[1, 2, 0]]).square()
    assert_close(whole, expected)
    assert_close(flow.errors(gives(NOISE[:2]), X, None, T[:2], NOISE)[0], expected[:2])


def test_refusals():
    for given, told in (
        ({"predicts": "v"}, "rf.predicts is 'v', but must be velocity, x or noise"),
        ({"clamp": 0.0}, "rf.clamp is 0.0, but must lie between 0 and 0.5"),
        ({"clamp": 0.5}, "rf.clamp is 0.5, but must lie between 0 and 0.5"),
        ({"contrastive": 1.0}, "rf.contrastive is 1.0, but must lie in \\[0, 1\\)"),
        ({"contrastive": 0.1, "loss_of": "x"}, "rf.loss_of x, but the contrastive term is of velocities"),
        ({"train_shift": 0.0}, "rf.train_shift is 0.0, but must be positive"),
        ({"shift": "none"}, "rf.shift is 'none', but must be float or auto"),
    ):
        with pytest.raises(ValueError, match=told):
            RF(**given)
