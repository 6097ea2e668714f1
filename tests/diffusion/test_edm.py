"""EDM against golden numbers, the paper's formulas, and a Gaussian whose denoiser and ODE are known."""

import math
from statistics import NormalDist

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from tread.diffusion.edm import EDM
from tread.diffusion.solvers import Churn, heun

DATA_STD = 0.7


def gaussian_denoiser(x, sigma):
    """The exact denoiser of data ~ N(0, DATA_STD²)."""
    return x * DATA_STD**2 / (DATA_STD**2 + sigma**2)


def gaussian_solution(noise, sigmas):
    """Where the probability-flow ODE takes σ_0·noise for that data (closed form)."""
    start = float(sigmas[0])
    return noise.double() * start * DATA_STD / math.sqrt(DATA_STD**2 + start**2)


@pytest.mark.parametrize("sigma", [0.002, 0.01, 0.1, 0.5, 1, 5, 20, 80])
def test_golden_preconditioning(asset, tiny, sigma):
    tiny.load_state_dict(load_file(asset("golden/tread_tiny_state.safetensors")), strict=True)
    g = load_file(asset("golden/edm_precond.safetensors"))
    with torch.no_grad():
        D = EDM().denoise(tiny, g["x"] * sigma, torch.tensor(sigma), g["y"])
    assert (D - g[f"D_sigma{sigma:g}"]).abs().max() <= 1e-5


def test_loss_equals_the_formula_sample_by_sample(tiny):
    edm, x, noise = EDM(sigma_data=0.6), torch.randn(3, 4, 8, 8), torch.randn(3, 4, 8, 8)
    y, sigma = torch.tensor([0, 4, 10]), torch.tensor([0.05, 0.6, 7.0])
    with torch.no_grad():
        losses = edm.loss(tiny, x, y, sigma, noise)
        for i, s in enumerate(sigma.tolist()):
            noisy = x[i] + s * noise[i]
            c_in = 1 / math.sqrt(s**2 + 0.6**2)
            F = tiny(c_in * noisy[None], torch.tensor([math.log(s) / 4]), y[i : i + 1])[0]
            D = 0.6**2 / (s**2 + 0.6**2) * noisy + s * 0.6 / math.sqrt(s**2 + 0.6**2) * F
            expected = (s**2 + 0.6**2) / (s * 0.6) ** 2 * (D - x[i]).square().mean()
            assert_close(losses[i], expected, rtol=1e-4, atol=1e-5)


def test_learned_sigma_uses_the_first_channels():
    def network(x, t, y, routes):
        return torch.cat([x, torch.full_like(x, 1e9)], dim=1)

    x, sigma = torch.randn(2, 4, 8, 8), torch.tensor([0.5, 0.5])
    expected = 0.5 * x + 0.5 * 0.5 / math.sqrt(0.5) * x / math.sqrt(0.5)
    assert_close(EDM().denoise(network, x, sigma, None), expected)


def test_noise_levels_of_training():
    normal = torch.tensor([0.0, 1.0, -2.0])
    assert_close(EDM().noise_level(normal).log(), torch.tensor([-1.2, 0.0, -3.6]))


def test_levels_by_quantile():
    """Mid-quantiles for evaluation; `cleaner` steps down by quantiles, to 0.001 at the lowest. Reference: Python's."""
    normal, level = NormalDist(), NormalDist(-1.2, 1.2)
    expected = [math.exp(level.inv_cdf((i + 0.5) / 8)) for i in range(8)]
    assert EDM().quantiles(8).tolist() == pytest.approx(expected, rel=1e-9)
    given, steps = [-4.0, -3.0, 0.0, 1.5], [0.1, 0.1, 0.3, 0.0]
    lower = [max(normal.cdf(n) - step, 0.001) for n, step in zip(given, steps)]
    expected = [math.exp(level.inv_cdf(min(q, normal.cdf(n)))) for n, q in zip(given, lower)]
    actual = EDM().cleaner(torch.tensor(given, dtype=torch.float64), torch.tensor(steps, dtype=torch.float64))
    assert actual.tolist() == pytest.approx(expected, rel=1e-6)


def test_schedule():
    assert torch.equal(EDM().schedule(), EDM().schedule(40)) and EDM().schedule(2).tolist() == [80, 0.002, 0]
    sigmas = EDM().schedule(40)
    assert sigmas.dtype == torch.float64 and len(sigmas) == 41
    assert sigmas[0] == 80 and sigmas[39] == 0.002 and sigmas[40] == 0
    middle = (80 ** (1 / 7) + 13 / 39 * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7
    assert sigmas[13].item() == pytest.approx(middle, rel=1e-12)
    assert (sigmas.diff() < 0).all()
    with pytest.raises(ValueError, match="steps is 1"):
        EDM().schedule(1)


def test_heun_is_second_order():
    noise, errors = torch.randn(4, 1, 2, 2, generator=torch.Generator().manual_seed(0)), []
    for steps in (32, 64, 128):
        sigmas = EDM(sigma_min=0.01).schedule(steps)[:-1]  # without the last step, which is Euler's
        x = heun(gaussian_denoiser, noise, sigmas)
        exact = gaussian_solution(noise, sigmas) * math.sqrt(DATA_STD**2 + 0.01**2) / DATA_STD
        errors.append((x - exact).abs().max().item())
    assert 3.6 < errors[0] / errors[1] < 4.4 and 3.6 < errors[1] / errors[2] < 4.4


def test_heun_reaches_the_solution_and_counts_evaluations():
    calls = []

    def denoiser(x, sigma):
        calls.append(float(sigma))
        assert x.dtype == torch.float64
        return gaussian_denoiser(x, sigma)

    noise, sigmas = torch.randn(4, 1, 2, 2), EDM().schedule(40)
    x = heun(denoiser, noise, sigmas)
    assert len(calls) == 79 and calls[0] == 80 and calls[-1] == 0.002
    assert_close(x, gaussian_solution(noise, sigmas), rtol=1e-2, atol=0)
    sigmas = EDM().schedule(640)
    assert_close(heun(gaussian_denoiser, noise, sigmas), gaussian_solution(noise, sigmas), rtol=1e-4, atol=0)


def algorithm_2(D, t, S_churn, S_min, S_max, S_noise, draws):
    """The paper's stochastic sampler, line by line; draws are its normal numbers, those of x_0 last."""
    N, x = len(t) - 1, t[0] * draws[-1]
    for i in range(N):
        gamma = min(S_churn / N, 2**0.5 - 1) if S_min <= t[i] <= S_max else 0.0
        t_hat = t[i] + gamma * t[i]
        x_hat = x + math.sqrt(t_hat**2 - t[i] ** 2) * S_noise * draws[i]
        d = (x_hat - D(x_hat, t_hat)) / t_hat
        x = x_hat + (t[i + 1] - t_hat) * d
        if t[i + 1] != 0:
            x = x_hat + (t[i + 1] - t_hat) * (d + (x - D(x, t[i + 1])) / t[i + 1]) / 2
    return x


@pytest.mark.parametrize("churn", [(0.0,), (0.5,), (2.0, 0.3, 20.0, 1.003), (200.0, "t 5", "t 2", 0.9)], ids=str)
def test_heun_is_the_papers_algorithm(churn):
    """Bounds of the range count; amounts below and above the limit √2 − 1 of a step; the defaults of the range."""
    levels = EDM().schedule(8)
    t = levels.tolist()
    churn = tuple(t[int(one[-1])] if isinstance(one, str) else one for one in churn)
    draws = torch.randn(9, 3, 1, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    actual = heun(gaussian_denoiser, draws[-1], levels, Churn(*churn), lambda step: draws[step])
    expected = algorithm_2(gaussian_denoiser, t, *(*churn, *(0.0, 0.0, math.inf, 1.0)[len(churn) :]), draws)
    assert_close(actual, expected, rtol=1e-10, atol=0)
    if churn[0]:
        assert not torch.isclose(actual, heun(gaussian_denoiser, draws[-1], levels), rtol=1e-3).all()
        with pytest.raises(ValueError, match="no churn_noise"):
            heun(gaussian_denoiser, draws[-1], levels, Churn(*churn))


@pytest.mark.parametrize(
    "kind, values",
    [
        (EDM, {"sigma_min": 80.0}),
        (EDM, {"sigma_min": 0.0}),
        (EDM, {"sigma_data": 0.0}),
        (Churn, {"amount": -1}),
        (Churn, {"noise": 0}),
        (Churn, {"sigma_min": -1}),
        (Churn, {"sigma_min": 2, "sigma_max": 2}),
    ],
)
def test_constants_that_make_no_sense_are_refused(kind, values):
    with pytest.raises(ValueError, match="sigma|churn"):
        kind(**values)


def test_a_network_that_predicts_noise_gets_ddpms_variance():
    """DDPM's x_t = √ᾱ·x₀ + √(1 − ᾱ)·ε is (x₀ + σ·ε)·√ᾱ with σ² = (1 − ᾱ) / ᾱ; x₀ follows from ε."""
    x, noise, alpha = torch.randn(3, 4, 4, 4), torch.randn(3, 4, 4, 4), torch.tensor([0.9, 0.5, 0.1]).view(-1, 1, 1, 1)
    sigma, edm = ((1 - alpha) / alpha).sqrt(), EDM(predicts="ddpm_noise")
    noisy = edm.noised(x, sigma.flatten(), noise)
    given, _ = edm.precondition(noisy, sigma.flatten())
    assert_close(given, alpha.sqrt() * x + (1 - alpha).sqrt() * noise)
    assert_close(edm.combine(noise, noisy, sigma.flatten()), x, atol=1e-5, rtol=1e-5)
