"""Bidirectional WKV against its formula written out: all pairs of tokens, a softmax over exponents, in float64."""

import pytest
import torch
from modes import assert_as, assert_bf16_products, assert_compiles, assert_rounds_inputs_alone, counted_flops, derived

from tread.models.wkv import CHUNKS, products, wkv
from tread.runtime.device import exact

COUNTS = [1, 2, 3, 5, 16, 17, 31, 32, 33, 49, 64, 255, 256, 1000, 1024, 1100]  # one, two and three levels of chunks


def naive(k, v, w, u):
    """wkv_t = Σ_i a_ti·v_i / Σ_i a_ti, a_ti = exp(k_i − (|t − i| − 1)·w/T), a_tt = exp(k_t + u)."""
    k, v, w, u = (x.double() for x in (k, v, w, u))
    T = k.shape[1]
    distance = (torch.arange(T)[:, None] - torch.arange(T)).abs()[:, :, None]  # (T, T, 1)
    exponent = k[:, None] + torch.where(distance == 0, u, -(distance - 1) * w / T)  # (B, T, T, D)
    return (exponent.softmax(dim=2) * v[:, None]).sum(dim=2)


def inputs(tokens, size=1.0, w=(0.0, 3.0, -3.0, 8.0), u=(0.0, 1.0, -1.0, 0.5), batch=2, seed=0):
    """k and v (batch, tokens, D), w and u (D,), one channel for each of the given decays."""
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(batch, tokens, len(w), generator=generator) for _ in range(2))
    return size * k, v, torch.tensor(w), torch.tensor(u)


@pytest.mark.parametrize("tokens", COUNTS)
def test_equals_the_formula(tokens):
    if tokens < 300:
        assert_as(naive, wkv, inputs(tokens))
    else:  # the twin takes tokens² numbers a channel
        assert_as(naive, wkv, inputs(tokens, w=(3.0, -3.0), u=(1.0, -1.0), batch=1))


@pytest.mark.parametrize("size", [1.0, 60.0, 400.0])
@pytest.mark.parametrize("tokens", [1, 2, 16, 31, 32, 33, 64, 255])
def test_keys_decays_and_bonuses_of_any_size(tokens, size):
    """Up to the limits that the docstring states: decays ±60, bonuses from −20 up. At a limit some torch versions
    give a clamped number no gradient."""
    w = (59.99, 59.99, 59.99, -59.99, -59.99, -59.99, 0.0, 0.0)
    u = (-19.99, 0.0, 1000.0, -19.99, 0.0, 60.0, -19.99, 60.0)
    half = len(w) // 2
    for part in (slice(half), slice(half, None)):
        k, v, *rest = inputs(tokens, size, w[part], u[part], batch=1, seed=tokens)
        assert_as(naive, wkv, (k, v, *rest), tolerance=2e-4)


@pytest.mark.parametrize("tokens", [1, 33, 255])
def test_decays_and_bonuses_beyond_the_limits_count_as_the_limits(tokens):
    """A network may learn such numbers without harm."""
    k, v, w, u = inputs(tokens, 60.0, (200.0, -1e4, 61.0, -60.0), (-95.0, -1e4, -21.0, 0.0))
    clamped = wkv(k, v, torch.tensor([60.0, -60.0, 60.0, -60.0]), torch.tensor([-20.0, -20.0, -20.0, 0.0]))
    assert torch.equal(wkv(k, v, w, u), clamped)
    assert all(item.isfinite().all() for item in derived(wkv, (k, v, w, u)))


@pytest.mark.parametrize("tokens", [33, 1100])
@pytest.mark.parametrize("w", [60.0, 0.0, -60.0])
def test_a_single_large_key(tokens, w):
    """One key 300 above all others, in front, in the middle or behind: all look at it alone."""
    for place in (0, tokens // 2, tokens - 1):
        k, v, w_all, u = inputs(tokens, w=(w,), u=(-15.0,), batch=1)
        k[:, place] += 300
        assert_as(naive, wkv, (k, v, w_all, u), tolerance=2e-4)


@pytest.mark.parametrize("tokens", [16, 100])
def test_half_precision_costs_the_rounding_of_the_inputs_alone(tokens):
    k, v, w, u = inputs(tokens)
    assert_rounds_inputs_alone(naive, wkv, (k.bfloat16(), v.bfloat16(), w, u))


@pytest.mark.parametrize("size, tolerance", [(1.0, 2**-6), (60.0, 2**-5)])
@pytest.mark.parametrize("tokens", [16, 100, 300])
def test_under_autocast_products_are_in_bf16(tokens, size, tolerance):
    """Keys' weights, decays and both sums are each rounded by 2⁻⁹. Where one key outweighs all others, its gradient is
    a difference of such numbers, all but zero."""
    assert_bf16_products(naive, wkv, inputs(tokens, size), tolerance)


@pytest.mark.parametrize("tokens", [33, 64, 65, 256, 300, 1100])
def test_by_a_gpus_chunks_it_equals_the_formula(tokens, monkeypatch):
    monkeypatch.setitem(CHUNKS, "cpu", CHUNKS["cuda"])
    assert_as(naive, wkv, inputs(tokens, w=(3.0, -3.0), u=(1.0, -1.0), batch=1))


@pytest.mark.slow
def test_compiled_it_is_one_graph_with_the_same_numbers():
    assert_compiles(wkv, inputs(100), atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 5, 32, 33, 100, 1024, 1100])
def test_products_are_those_that_torch_counts(tokens):
    assert counted_flops(wkv, *inputs(tokens, batch=3)) == 2 * 3 * products(tokens, 4)


def test_products_are_linear_in_the_tokens():
    """32 multiply-adds a token for each of four sums, 1/32 of that for chunks, 1/32 of that …: at most 32²/31.

    To the last product that is so for powers of 32, of which n = 32ᵐ takes 4·(32² + … + 32ᵐ⁺¹). Other
    numbers differ by the last level, of less than 32 sums, and by the padding of a chunk on each level.
    """
    for power in (1, 2, 3, 4):
        assert products(32**power, 1) == 4 * sum(32 ** (level + 1) for level in range(1, power + 1))
    for tokens in (1024, 2048, 4096, 16384, 65536):
        assert 4 * 32 <= products(tokens, 1) / tokens <= 4 * 32**2 / 31
        assert products(8 * tokens, 1) / products(tokens, 1) == pytest.approx(8, rel=2e-3)
        assert products(tokens, 768) == 768 * products(tokens, 1)
    assert products(1025, 1) < 1.07 * products(1024, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [16, 256, 1100])
def test_on_a_gpu_it_equals_the_formula(tokens):
    with exact():
        on_gpu = lambda *given: wkv(*(x.cuda() for x in given)).cpu()  # noqa: E731
        assert_as(naive, on_gpu, inputs(tokens, w=(0.0, 8.0, 60.0, -60.0), batch=1), tolerance=1e-4)
