"""Rectified flow against its definition, straight flows that Euler solves exactly, and Gaussian data."""

from typing import get_args

import pytest
import torch
from torch.testing import assert_close

from rf import RF
from routing_module import Route, draw_ids
from tread.diffusion.solvers import Solver, call_order, euler, heun


def test_loss_equals_the_definition_sample_by_sample(tiny):
    x, noise = torch.randn(3, 4, 8, 8), torch.randn(3, 4, 8, 8)
    y, t = torch.tensor([0, 4, 10]), torch.tensor([0.1, 0.5, 0.9])
    with torch.no_grad():
        losses = RF().loss(tiny, x, y, t, noise)
        for i, s in enumerate(t.tolist()):
            x_t = (1 - s) * x[i] + s * noise[i]
            v = tiny(x_t[None], torch.tensor([s]), y[i : i + 1])[0]
            assert_close(losses[i], (noise[i] - x[i] - v).square().mean(), rtol=1e-4, atol=1e-5)


def test_training_times():
    normal = torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    t = RF(time_mean=0.5, time_std=2.0).noise_level(normal)
    assert_close(t.logit(), 2 * normal + 0.5)
    assert RF().noise_level(torch.tensor([0.0])).item() == 0.5
    lower = RF().cleaner(torch.tensor([0.0, -1.0]), torch.tensor([0.2, 0.3]))
    assert lower.tolist() == [pytest.approx(0.3), 0.0]  # σ(−1) = 0.269 lies less than the step above 0
    t = RF("uniform").noise_level(normal)
    assert t.min() >= 0 and t.max() <= 1
    assert torch.histc(t, 10, 0, 1) / len(t) == pytest.approx([0.1] * 10, abs=0.004)
    for one in (RF(), RF("uniform")):
        drawn, quantiles = one.noise_level(normal), one.quantiles(8)
        shares = [(drawn < quantile).double().mean() for quantile in quantiles]
        assert shares == pytest.approx([(i + 0.5) / 8 for i in range(8)], abs=0.004)


def test_the_network_gets_the_time_as_it_is_or_scaled_or_reversed():
    seen = []

    def network(x, t, y, routes):
        seen.append(t)
        return x

    x, t = torch.randn(2, 4, 8, 8), torch.tensor([0.25, 0.5])
    for flow, expected, sign in (
        (RF(), t, 1),
        (RF(time_scale=1000), 1000 * t, 1),
        (RF(reverse=True), 1 - t, -1),
        (RF(time_scale=9, reverse=True), 9 - 9 * t, -1),
    ):
        assert_close(flow.velocity(network, x, t, None), sign * x)
        assert_close(seen.pop(), expected)


def test_reversed_weights_learn_and_sample_the_same_flow():
    """A network in public SiT's convention, v' = x − ε at time 1 − t, serves as the one in ours."""
    ours = lambda x, t, y, routes=(): x * (1 - t).view(-1, 1, 1, 1)  # noqa: E731
    theirs = lambda x, t, y, routes=(): -x * t.view(-1, 1, 1, 1)  # noqa: E731
    x, noise, y, t = torch.randn(5, 1, 2, 2), torch.randn(5, 1, 2, 2), torch.zeros(5).long(), torch.rand(5)
    assert_close(RF(reverse=True).loss(theirs, x, y, t, noise), RF().loss(ours, x, y, t, noise))
    assert_close(RF(reverse=True).sample(theirs, noise, y), RF().sample(ours, noise, y))


def test_learned_sigma_uses_the_first_channels():
    x = torch.randn(2, 4, 8, 8)
    network = lambda x, t, y, routes: torch.cat([x, x * 1e9], 1)  # noqa: E731
    assert_close(RF().velocity(network, x, 0.5, None), x)


@pytest.mark.parametrize("steps", [1, 3, 50])
def test_euler_is_exact_where_the_flow_is_straight(steps):
    """A velocity that is constant along paths takes x to x − v, whatever the steps."""
    noise, v = torch.randn(2, 1, 2, 2), torch.randn(2, 1, 2, 2)
    network = lambda x, t, y, routes: v  # noqa: E731
    for solver in get_args(Solver):
        actual = RF().sample(network, noise, torch.tensor([0, 1]), steps=steps, solver=solver)
        assert_close(actual, (noise - v).double(), rtol=1e-6, atol=1e-6)


def test_euler_steps_of_a_linear_velocity():
    """v = k·x: each of N steps multiplies x by 1 − k/N."""
    noise = torch.randn(2, 1, 2, 2)
    y, network = torch.tensor([0, 1]), lambda x, t, y, routes: 0.8 * x
    for steps, given in ((10, {"steps": 10}), (50, {})):
        expected = noise.double() * (1 - 0.8 / steps) ** steps
        assert_close(RF().sample(network, noise, y, **given), expected, rtol=1e-6, atol=1e-6)
        assert_close(RF().sample_tread(network, noise, y, (), (), **given), expected, rtol=1e-6, atol=1e-6)
    assert len(RF().schedule()) == 51


@pytest.mark.parametrize("solver, order", [(euler, 1), (heun, 2)])
def test_orders_of_the_solvers(solver, order):
    """Data N(0, 0.7²): the exact flow ends at 0.7·noise; halving the steps divides the error by 2^order."""
    noise = torch.ones(1, 1, 1, 1)

    def denoiser(x, t):
        return x * (1 - t) * 0.49 / ((1 - t) ** 2 * 0.49 + t**2)

    errors = [abs(solver(denoiser, noise, RF().schedule(n)).item() - 0.7) for n in (200, 400)]
    assert errors[0] / errors[1] == pytest.approx(2**order, rel=0.1)


def test_levels_of_the_calls():
    """The levels that the solvers ask for, against the order by which schedules of guidance go."""
    for solver, function in (("euler", euler), ("heun", heun)):
        levels, seen = RF().schedule(4), []
        function(lambda x, t, seen=seen: seen.append(float(t)) or x, torch.zeros(1, 1, 1, 1), levels)
        assert seen == [levels[i] for i in call_order(solver, 4)]
    with pytest.raises(ValueError, match="solver is 'dopri5'"):
        call_order("dopri5", 4)


def released_sample(network, z, y, null, steps, scale, routes=((), ())):
    """The released code's loop, written out: z ← z − v/N from t = 1, v = v_weak + scale·(v_strong − v_weak)."""
    for i in range(steps, 0, -1):
        t = torch.full((len(z),), i / steps)
        strong, weak = network(z, t, y, routes=routes[0]), network(z, t, null, routes=routes[1])
        z = z - (weak + scale * (strong - weak)) / steps
    return z


def test_sample_is_the_plain_loop(tiny):
    noise, y = torch.randn(3, 4, 8, 8), torch.tensor([1, 5, 9])
    with torch.no_grad():
        expected = released_sample(tiny, noise, y, torch.full_like(y, 10), 5, 1.5)
        plain = released_sample(tiny, noise, y, y, 5, 1.0)
    actual = RF().sample(tiny, noise, y, null_class=10, scale=1.5, steps=5)
    assert_close(actual.float(), expected, rtol=1e-4, atol=1e-5)
    assert_close(RF().sample(tiny, noise, y, steps=5).float(), plain, rtol=1e-4, atol=1e-5)


def test_sample_tread_is_the_plain_loop_under_given_ids(tiny):
    noise, y = torch.randn(3, 4, 8, 8), torch.tensor([1, 5, 9])
    routes = [[(Route(1, 4, ratio), draw_ids(torch.rand(3, 16), ratio))] for ratio in (0.25, 0.5)]
    with torch.no_grad():
        expected = released_sample(tiny, noise, y, y, 5, 1.5, routes)
        uncond = released_sample(tiny, noise, y, torch.full_like(y, 10), 5, 1.5, routes)
    actual = RF().sample_tread(tiny, noise, y, *routes, scale=1.5, steps=5)
    assert_close(actual.float(), expected, rtol=1e-4, atol=1e-5)
    actual = RF().sample_tread(tiny, noise, y, *routes, scale=1.5, steps=5, weak_y=torch.full_like(y, 10))
    assert_close(actual.float(), uncond, rtol=1e-4, atol=1e-5)
    by_call = [lambda call, one=one: one for one in routes]
    both = [RF().sample_tread(tiny, noise, y, *each, 1.5, 5) for each in (by_call, routes)]
    assert torch.equal(*both)
    strong = RF().sample_tread(tiny, noise, y, *routes, steps=5)  # scale 1
    with torch.no_grad():
        expected = released_sample(tiny, noise, y, y, 5, 1.0, routes)
    assert_close(strong.float(), expected, rtol=1e-4, atol=1e-5)


def test_levels_are_the_fractions_that_people_write():
    """So that an interval [0.1, 0.3] holds both ends."""
    assert RF().schedule(10).tolist() == [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]
    assert RF().schedule(250).tolist() == [i / 250 for i in range(250, -1, -1)]


def test_bad_constants_are_refused(tiny):
    with pytest.raises(ValueError, match="without null_class"):
        RF().sample(tiny, torch.randn(1, 4, 8, 8), torch.tensor([0]), scale=2.0)
    for arguments in ({"time": "cosine"}, {"time_std": 0.0}, {"direction": -0.5}, {"shift": 0.0}):
        with pytest.raises(ValueError, match=f"rf.{next(iter(arguments))} is"):
            RF(**arguments)
    with pytest.raises(ValueError, match="some of 4 steps have no length"):
        RF(shift=2.0**-53).schedule(4)  # 1, 1, 1, less, 0
    with pytest.raises(ValueError, match="steps is 0"):
        RF().schedule(0)
