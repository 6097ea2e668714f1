"""Rectified flow as LightningDiT trains and samples it, against numbers of its authors' code (golden) and formulas.

There t runs from noise (0) to data (1), as with rf.reverse=true; x1 is the data and x0 the noise.
"""

import pytest
import torch
from conftest import state_of
from safetensors.torch import load_file
from torch.testing import assert_close

from rf import RF
from tread.diffusion.edm import EDM
from tread.models.lightning import LightningDiT

LIGHTNING = {"reverse": True, "direction": 1.0, "shift": 0.3}


@pytest.fixture
def golden(asset):
    return load_file(asset("golden/lightningdit_transport.safetensors"))


def close(actual, expected, limit):
    """Within a share of the largest number."""
    assert (actual - expected).abs().max() <= limit * expected.abs().max()


def loss_of(g, network, **changes):
    """The loss of each golden sample."""
    return RF(**{**LIGHTNING, **changes}).loss(network, g["in.x1"], g["in.y"], 1 - g["out.t_lognorm"], g["in.x0"])


def test_golden_terms_are_ours(golden):
    """The network's outputs are the golden ones; the last bias adds to each place, so its gradient is theirs, too."""
    prediction, seen = golden["out.pred"].requires_grad_(), []

    def network(x, t, y, routes):
        seen.append((x, t))
        return prediction

    mse, total = loss_of(golden, network, direction=0.0), loss_of(golden, network)
    for x, t in seen:
        assert_close(x, golden["out.xt"], rtol=0, atol=2e-6)
        assert_close(t, golden["out.t_lognorm"], rtol=0, atol=1e-6)
    close(mse, golden["out.mse_per_sample"], 5e-6)
    close(total - mse, golden["out.cos_per_sample"], 5e-6)
    close(loss_of(golden, network, direction=0.25) - mse, 0.25 * golden["out.cos_per_sample"], 5e-6)
    close(total.mean(), golden["out.total"], 5e-6)
    total.mean().backward()
    close(prediction.grad.sum(dim=(0, 2, 3)), golden["grad.final_layer.linear.bias"], 1e-4)
    normal = golden["in.normals"].double()
    assert_close(1 - RF().noise_level(-normal), golden["out.t_lognorm"].double(), rtol=0, atol=1e-7)


def test_golden_times_and_path_are_ours(golden):
    """Their 10 points are 9 steps of Euler: each call is at a point of theirs, where the path and the time are."""
    path, grid = golden["out.traj_nocfg"], golden["out.grid"]
    assert_close(1 - RF(**LIGHTNING).schedule(9).float(), grid, rtol=0, atol=2e-7)
    calls = iter(range(9))

    def network(x, t, y, routes=()):
        i = next(calls)
        assert_close(x, path[i], rtol=0, atol=1e-5)
        assert_close(t, grid[i].expand(len(x)), rtol=0, atol=1e-6)
        return (path[i + 1] - path[i]) / (grid[i + 1] - grid[i])

    actual = RF(**LIGHTNING).sample(network, golden["in.noise"], golden["in.y"], steps=9)
    assert_close(actual.float(), golden["out.sample_nocfg"], rtol=0, atol=1e-5)


def test_golden_network_learns_samples_and_is_guided_as_theirs(golden, asset):
    sizes = {"input_size": 8, "patch_size": 1, "in_channels": 8, "hidden_size": 64, "depth": 4}
    network = LightningDiT(**sizes, num_heads=4, num_classes=10)
    network.load_state_dict(state_of(load_file(asset("golden/lightningdit_tiny_a.safetensors"))))
    flow, noise, y = RF(**LIGHTNING), golden["in.noise"], golden["in.y"]
    loss_of(golden, network).mean().backward()
    parameters = dict(network.named_parameters())
    for name in (name.removeprefix("grad.") for name in golden if name.startswith("grad.")):
        close(parameters[name].grad, golden[f"grad.{name}"], 1e-4)
    close(flow.sample(network, noise, y, steps=9).float(), golden["out.sample_nocfg"], 5e-6)
    with torch.no_grad():  # theirs guides the first three channels alone, ours all
        cond, null = (-flow.velocity(network, noise, torch.tensor(0.5), item) for item in (y, golden["in.y_null"]))
    theirs = golden["out.cfg_call_t0.5"][:4]
    close((null + 2 * (cond - null))[:, :3], theirs[:, :3], 1e-5)
    close(cond[:, 3:], theirs[:, 3:], 1e-5)


def test_the_direction_is_one_less_the_cosine_place_by_place(tiny):
    """By hand, with the velocity of either way of the time; the squared errors alone without it, bit for bit."""
    x, noise, y = torch.randn(2, 4, 8, 8), torch.randn(2, 4, 8, 8), torch.tensor([3, 10])
    t = torch.tensor([0.3, 0.8])
    with torch.no_grad():
        for flow in (RF(direction=0.5), RF(direction=0.5, reverse=True)):
            squared, denoised, noisy = flow.errors(tiny, x, y, t, noise)
            plain = RF(reverse=flow.reverse).errors(tiny, x, y, t, noise)
            v, target = flow.velocity(tiny, noisy, t, y), noise - x
            cos = (v * target).sum(1) / (v.square().sum(1) * target.square().sum(1)).sqrt()
            level = t[:, None, None, None]
            assert_close(noisy, (1 - level) * x + level * noise)
            assert_close(denoised, noisy - level * v)
            assert_close(squared, plain[0] + 0.5 * (1 - cos)[:, None].expand_as(x))
            assert torch.equal(denoised, plain[1]) and torch.equal(plain[0], (v - target).square())
            expected = (v - target).square().mean(dim=(1, 2, 3)) + 0.5 * (1 - cos).mean(dim=(1, 2))
            assert_close(flow.loss(tiny, x, y, t, noise), expected)
            assert torch.equal(flow.evaluation_loss(tiny, x, y, t, noise), plain[0].mean(dim=(1, 2, 3)))


def test_a_new_network_does_not_begin_with_an_endless_slope():
    """v = 0 is at a right angle to everything; there the slope of each place is that of a velocity of length 0.01."""
    v, x, noise = torch.zeros(2, 4, 8, 8, requires_grad=True), torch.randn(2, 4, 8, 8), torch.randn(2, 4, 8, 8)
    loss = RF(direction=1.0).loss(lambda x, t, y, routes: v, x, None, torch.rand(2), noise)
    assert_close(loss, (noise - x).square().mean(dim=(1, 2, 3)) + 1)
    (slope,) = torch.autograd.grad(loss.sum() - (v - (noise - x)).square().mean(dim=(1, 2, 3)).sum(), v)
    assert_close(slope.norm(dim=1), torch.full((2, 8, 8), 100 / 64))


def test_the_evaluation_is_the_same_for_all_densities_and_weights():
    """Mid-quantiles of uniform times; EDM's is the loss at those of its density, as it was."""
    for flow in (RF(), RF("uniform"), RF(time_mean=2.0, direction=1.0, reverse=True)):
        assert flow.evaluation_levels(4).tolist() == [0.125, 0.375, 0.625, 0.875]
        assert flow.evaluation == "eval_velocity"
    edm, x = EDM(), torch.randn(3, 1, 2, 2)
    network = lambda x, t, y, routes=(): 0.3 * x  # noqa: E731
    given = (network, x, None, edm.evaluation_levels(3).float(), torch.randn_like(x))
    assert torch.equal(edm.evaluation_levels(16), edm.quantiles(16)) and edm.evaluation == "eval_loss"
    assert torch.equal(edm.evaluation_loss(*given), edm.loss(*given))


@pytest.mark.parametrize("shift", [0.3, 3.0])
def test_a_shift_moves_the_times_and_not_their_ends(shift):
    """By its formula, in numbers of t from noise to data; a shift and its inverse undo each other."""
    u = [i / 10 for i in range(11)]
    actual = RF(shift=shift).schedule(10)
    expected = [1 - shift * item / (1 + (shift - 1) * item) for item in u]
    assert actual.tolist() == pytest.approx(expected, abs=1e-12) and actual[0] == 1 and actual[-1] == 0
    back = (1 - actual) / shift / (1 + (1 / shift - 1) * (1 - actual))
    assert back.tolist() == pytest.approx(u, abs=1e-12)
    assert (actual > 0.5).sum() > 5 if shift < 1 else (actual > 0.5).sum() < 5
