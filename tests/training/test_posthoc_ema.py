"""Post-hoc averages against averages tracked in training; their coefficients against integrals and fits on a grid."""

import json
from functools import partial

import numpy as np
import pytest
import reconstruct_ema
import torch
from conftest import CPU, assert_refused, equal, launch_door, names_in, opened, read_json, save_checkpoint, write_json
from numpy.testing import assert_allclose
from safetensors.torch import load_file, save_file
from torch import nn

from tread.checkpoints import checkpoint, posthoc_ema
from tread.checkpoints.ema import EMA, power
from tread.checkpoints.posthoc_ema import exponent
from tread.runtime import tensor_files

STORED, TRACKED = (0.05, 0.1), (0.07, 0.15, 0.2)
STEPS, EVERY = 640, 40


def gamma_of(sigma_rel):
    """The exponent whose density (γ+1)·τ^γ on [0, 1] has that standard deviation, by bisection."""
    low, high = 0.0, 1e8
    for _ in range(200):
        gamma = (low + high) / 2
        wide = (gamma + 1) / (gamma + 3) - ((gamma + 1) / (gamma + 2)) ** 2 > sigma_rel**2  # E τ² − (E τ)²
        low, high = (gamma, high) if wide else (low, gamma)
    return gamma


def on_a_grid(profiles, end, count=200_000):
    """Densities of profiles at midpoints of [0, end]: (len(profiles), count)."""
    tau = (np.arange(count) + 0.5) * end / count
    rows = []
    for step, sigma_rel in profiles:
        gamma = gamma_of(sigma_rel)
        rows.append(np.where(tau <= step, (gamma + 1) * (np.minimum(tau, step) / step) ** gamma / step, 0.0))
    return np.stack(rows)


def test_exponents_are_edm2s():
    """The two that EDM2 prints (Section 3.1), and the standard deviation that each one has."""
    assert (round(exponent(0.05), 2), round(exponent(0.10), 2)) == (16.97, 6.94)
    for width in (0.003, 0.05, 0.1, 0.2, 0.28):
        assert exponent(width) == pytest.approx(gamma_of(width), rel=1e-6)
    for width in (0.0, 0.29):
        with pytest.raises(ValueError, match="must lie between 0 and 0.288"):
            exponent(width)


@pytest.mark.parametrize("width, gamma", [(0.05, 16.97), (0.1, 6.94)])
def test_a_power_functions_average_is_its_sum(width, gamma):
    """Weights (i^(γ+1) − (i−1)^(γ+1)) / t^(γ+1) of steps i = 1 … t, with none left of where it began."""
    values = torch.randn(30)
    network = nn.Linear(1, 1, bias=False)
    average = EMA(network, power(width))
    for step, value in enumerate(values):
        nn.init.constant_(network.weight, value)
        average.update(network, average.share(step), torch.tensor(0.0))
    i = np.arange(1, 31)
    factors = (i ** (gamma + 1) - (i - 1) ** (gamma + 1)) / 30 ** (gamma + 1)
    assert average.network.weight.item() == pytest.approx(float(factors @ values.numpy()), abs=2e-3)


def test_inner_products_are_integrals():
    """And overflow for no training and no width."""
    profiles = [(300, 0.05), (300, 0.28), (700, 0.1), (1000, 0.05), (1000, 0.2), (1000, 0.01)]
    grid = on_a_grid(profiles, 1000)
    products = posthoc_ema.inner_products(profiles)
    assert_allclose(products, grid @ grid.T * 1000 / grid.shape[1], rtol=1e-3, atol=1e-12)
    profiles = [(step, width) for step in (1, 400_000, 4_000_000) for width in (0.0005, 0.05, 0.288)]
    products = posthoc_ema.inner_products(profiles)
    assert np.isfinite(products).all() and (products >= 0).all() and np.array_equal(products, products.T)
    assert np.isfinite(posthoc_ema.coefficients(profiles[3:], 4_000_000, 0.001)).all()


def test_a_stored_profile_is_itself():
    stored = [(step, width) for step in range(1000, 17_000, 1000) for width in STORED]
    for index in (-1, -2, 9):
        expected = np.zeros(len(stored))
        expected[index] = 1
        assert_allclose(posthoc_ema.coefficients(stored, *stored[index]), expected, atol=1e-9)
        assert posthoc_ema.profile_error(stored, *stored[index]) < 1e-7


@pytest.mark.parametrize("width", [0.03, 0.07, 0.2])
def test_coefficients_are_those_of_a_naive_fit(width):
    """Least squares over densities on a grid, one of the coefficients replaced by 1 minus the others."""
    stored = [(step, each) for step in range(125, 1001, 125) for each in STORED]
    grid, (target,) = on_a_grid(stored, 1000, 20_000), on_a_grid([(1000, width)], 1000, 20_000)
    free, *_ = np.linalg.lstsq((grid[:-1] - grid[-1]).T, target - grid[-1], rcond=None)
    expected = np.append(free, 1 - free.sum())
    actual = posthoc_ema.coefficients(stored, 1000, width)
    assert_allclose(actual, expected, atol=1e-3)
    error = np.linalg.norm(expected @ grid - target) / np.linalg.norm(target)
    assert posthoc_ema.profile_error(stored, 1000, width) == pytest.approx(error, rel=1e-2)
    assert actual.sum() == pytest.approx(1, abs=1e-12)


def test_errors_say_which_widths_can_be_had():
    stored = [(step, width) for step in range(1000, 17_000, 1000) for width in STORED]
    errors = [posthoc_ema.profile_error(stored, 16_000, width) for width in (0.005, 0.03, 0.07, 0.15, 0.27)]
    assert errors[2] < 0.005 < errors[3] < 0.02 < errors[1] < 0.05 < errors[4] < errors[0]
    rounding = [posthoc_ema.rounding_error(stored, 16_000, width) for width in (0.01, 0.05, 0.07)]
    assert rounding[1] == pytest.approx(posthoc_ema.FP16_ROUNDING) and rounding[0] > 10 * rounding[1] > 10 * rounding[2]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run's folder with snapshots, and the averages of all widths as they were tracked, by step and width."""
    folder, tracked = tmp_path_factory.mktemp("run"), {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network, teacher = (nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)) for _ in range(2))
        optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
        averages = {width: EMA(network, power(width)) for width in STORED + TRACKED}
        for step in range(STEPS):
            x = torch.randn(16, 8)
            (network(x) - teacher(x) - 0.5 * torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for average in averages.values():
                average.update(network, average.share(step), torch.tensor(0.0))
            if (step + 1) % EVERY == 0:
                now = {w: {n: v.clone() for n, v in ema.network.named_parameters()} for w, ema in averages.items()}
                tracked[step + 1] = now
                posthoc_ema.save_snapshot(folder, step + 1, {f"{w}/{n}": v for w in STORED for n, v in now[w].items()})
    return folder, tracked


def distance(ours, theirs):
    """Euclidean, over all parameters."""
    return sum((ours[name] - theirs[name]).square().sum() for name in theirs).sqrt().item()


@pytest.mark.parametrize("step, width", [(320, 0.15), *((640, width) for width in TRACKED)])
def test_a_reconstruction_is_the_average_that_was_tracked(trained, step, width):
    """To fp16's rounding and the fit of the profile; the nearest of the stored averages is 29 to 121 times as far."""
    folder, tracked = trained
    direct = tracked[step][width]
    actual = posthoc_ema.reconstruct(folder, width, step)
    assert {name: value.shape for name, value in actual.items()} == {name: v.shape for name, v in direct.items()}
    assert all(value.dtype == torch.float32 for value in actual.values())
    nearest = min(distance(tracked[step][stored], direct) for stored in STORED)
    size = distance(direct, {name: torch.zeros_like(value) for name, value in direct.items()})
    assert distance(actual, direct) < nearest / 25
    assert distance(actual, direct) < (1e-3 if step == 320 or width == 0.2 else 3e-4) * size
    if step == STEPS:
        assert equal(posthoc_ema.reconstruct(folder, width), actual)


def test_what_is_stored_comes_back(trained):
    """Rounded to fp16, and the snapshots after the wanted step do not matter."""
    folder, tracked = trained
    for step in (EVERY, 320):
        for name, value in posthoc_ema.reconstruct(folder, 0.1, step).items():
            torch.testing.assert_close(value, tracked[step][0.1][name].half().float(), rtol=0, atol=1e-6)
    snapshots = posthoc_ema.usable(folder, None)
    assert [snapshot.step for snapshot in snapshots] == list(range(EVERY, STEPS + 1, EVERY))
    assert {snapshot.sigma_rel for snapshot in snapshots} == {STORED}
    content = load_file(folder / "ema_snapshots/step_0000040.safetensors")
    assert set(content) == {f"{width}/{name}" for width in ("0.05", "0.1") for name in snapshots[0].shapes}
    assert {value.dtype for value in content.values()} == {torch.float16}


def test_values_beyond_fp16_are_kept_in_fp32(tmp_path):
    large, small = torch.tensor([70_000.125, 1.0]), torch.tensor(65_504.0)
    path = posthoc_ema.save_snapshot(tmp_path, 5, {"0.1/large": large, "0.1/small": small})
    types = {key: value.dtype for key, value in load_file(path).items()}
    assert types == {"0.1/large": torch.float32, "0.1/small": torch.float16}
    actual = posthoc_ema.reconstruct(tmp_path, 0.1)
    assert torch.equal(actual["large"], large) and torch.equal(actual["small"], small)


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    path = posthoc_ema.save_snapshot(tmp_path, 5, {"0.1/w": torch.ones(2)})

    def fail(tensor):
        raise OSError("No space left on device")

    monkeypatch.setattr(tensor_files, "_bytes", fail)  # of the data, behind the header
    with pytest.raises(OSError, match="step_0000005.*No space left"):
        posthoc_ema.save_snapshot(tmp_path, 5, {"0.1/w": torch.zeros(2)})
    assert list(path.parent.iterdir()) == [path]
    assert torch.equal(posthoc_ema.reconstruct(tmp_path, 0.1)["w"], torch.ones(2))


def test_refusals_name_what_is_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no snapshots.*ema.power"):
        posthoc_ema.reconstruct(tmp_path, 0.1)
    with pytest.raises(ValueError, match="w is not finite"):
        posthoc_ema.save_snapshot(tmp_path, 5, {"0.1/w": torch.tensor([1.0, torch.nan])})
    for step in (10, 20, 30, 40):
        path = posthoc_ema.save_snapshot(tmp_path, step, {"0.1/w": torch.ones(2)})
    (tmp_path / "samples").mkdir()
    for step in (30, 40):
        (tmp_path / f"samples/step_{step:07d}.png").touch()
    posthoc_ema.forget_after(tmp_path, 30)
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step_0000030.png"]
    assert [snapshot.step for snapshot in posthoc_ema.usable(tmp_path, None)] == [10, 20, 30]
    with pytest.raises(ValueError, match="no snapshot at step 17; the nearest of its 3 is at 20"):
        posthoc_ema.reconstruct(tmp_path, 0.1, 17)
    posthoc_ema.save_snapshot(tmp_path, 20, {"0.1/w": torch.ones(3)})
    with pytest.raises(ValueError, match="step_0000010.*step_0000020.*different networks"):
        posthoc_ema.reconstruct(tmp_path, 0.1, 20)
    for content in (path.with_stem("step_0000030").read_bytes()[:-1], b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="step_0000040.safetensors is damaged"):
            posthoc_ema.usable(tmp_path, None)
    for key, metadata in (("0.1/w", {}), ("w", {**posthoc_ema.FORMAT, "step": 10}), ("0.1/w", posthoc_ema.FORMAT)):
        save_file({key: torch.ones(2)}, path, {"snapshot": json.dumps(metadata)})
        with pytest.raises(ValueError, match="step_0000040.safetensors is damaged or no snapshot"):
            posthoc_ema.usable(tmp_path, None)


def launch(folder, *overrides):
    return launch_door(reconstruct_ema.main, "reconstruct_ema", folder, *overrides)


@pytest.fixture
def run(tmp_path, composed):
    """results/a with a checkpoint at step 3 and snapshots of random weights at 1000 to 16000; returns its network."""
    network, _ = save_checkpoint(tmp_path / "results/a", composed)
    generator = torch.Generator().manual_seed(0)
    for step in range(1000, 17_000, 1000):
        noise = {name: 0.01 * torch.randn(v.shape, generator=generator) for name, v in network.named_parameters()}
        averages = {f"{w}/{name}": v + noise[name] for w in STORED for name, v in network.named_parameters()}
        posthoc_ema.save_snapshot(tmp_path / "results/a", step, averages)
    return network


def test_the_script_makes_a_checkpoint_to_sample(tmp_path, run):
    """The reference: a network that was given the reconstructed parameters by hand."""
    record = checkpoint.find(tmp_path / "results/a").folder / "info.json"
    write_json(record, read_json(record) | {"flops": 10, "seconds": 1.0})
    text = launch(tmp_path, "run=results/a", "sigma_rel=0.075", "step=12000")
    folder = tmp_path / "results/a/ema_0.075_at_12000"
    assert "12 snapshots with σ_rel 0.05, 0.1" in text and "warning" not in text
    assert names_in(folder) == {"latest", "step_0012000"}
    assert names_in(folder / "latest") == {"ema.safetensors", "info.json"}
    made, before = checkpoint.find(folder), checkpoint.find(tmp_path / "results/a")
    assert made.step == 12_000 and before.step == 3
    assert all(made.info[key] == before.info[key] for key in ("config", "latents", "samples", "versions"))
    assert not {"flops", "seconds"} & made.info.keys()  # the run's at its own step
    facts, stored = made.info["posthoc"], [(step, width) for step in range(1000, 13_000, 1000) for width in STORED]
    assert (facts["sigma_rel"], facts["snapshots"], facts["widths"]) == (0.075, 12, [0.05, 0.1])
    assert facts["profile_error"] == posthoc_ema.profile_error(stored, 12_000, 0.075) < 0.01
    run.load_state_dict(posthoc_ema.reconstruct(tmp_path / "results/a", 0.075, 12_000), strict=False)
    assert equal(opened(folder).load(CPU).network.state_dict(), run.state_dict())


def test_the_script_warns_of_widths_that_fit_poorly(tmp_path, run):
    text = launch(tmp_path, "run=results/a", "sigma_rel=0.01", "out=narrow")
    assert "fit σ_rel 0.01 poorly" in text and "fp16's rounding is multiplied by" in text
    made = checkpoint.find(tmp_path / "narrow")
    assert made.step == 16_000 and made.info["posthoc"]["profile_error"] > reconstruct_ema.POOR_FIT


def test_refusals_of_the_script_come_before_any_work(tmp_path, run, composed):
    before = sorted(path.name for path in (tmp_path / "results/a").iterdir())
    save_checkpoint(tmp_path / "results/bare", composed)
    posthoc_ema.save_snapshot(tmp_path / "results/bare", 5, {"0.1/w": torch.ones(2)})
    assert_refused(
        partial(launch, tmp_path),
        ("run=results/a", "sigma_rel=… is needed"),
        ("run=results/a", "sigma_rel=0.1", "step=12345", "nearest of its 16 is at 12000"),
        ("run=results/a", "sigma_rel=0.1", "out=results", "results is there already"),
        ("run=results/bare", "sigma_rel=0.1", "step_0000005.safetensors is not of the network"),
    )
    assert sorted(path.name for path in (tmp_path / "results/a").iterdir()) == before
