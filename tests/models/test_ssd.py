"""The scan of Mamba-2 against its recurrence, one token a step in float64, and closed forms; the convolution against
torch's own."""

import pytest
import torch
import torch.nn.functional as F
from modes import assert_as, assert_bf16_products, assert_compiles, assert_rounds_inputs_alone, counted_flops, derived
from torch.testing import assert_close

from tread.models.ssd import CHUNKS, causal_conv, products, ssd
from tread.runtime.device import exact

COUNTS = [1, 2, 3, 5, 16, 31, 32, 33, 64, 65, 255, 256, 257, 300, 1000, 1024, 1100]  # one to four levels of chunks


def recurrent(x, dt, A, B, C):
    """h_t = exp(Δ_t·A)·h_{t−1} + Δ_t·x_t B_tᵀ, y_t = h_t C_t."""
    x, dt, A, B, C = (item.double() for item in (x, dt, A, B, C))
    shared = x.shape[2] // B.shape[2]
    B, C = (item.repeat_interleave(shared, dim=2)[:, :, :, None] for item in (B, C))  # (S, T, H, 1, N)
    h, seen = torch.zeros(()), []
    for t in range(x.shape[1]):
        h = (dt[:, t] * A).exp()[..., None, None] * h + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t]
        seen.append((h * C[:, t]).sum(dim=3))
    return torch.stack(seen, dim=1)


def inputs(tokens, heads=4, groups=2, step=0.3, A=(-0.1, -1.0, -4.0, -16.0), samples=2, seed=0):
    """x, Δ in 0..step, A of each head, B, C"""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, tokens, heads, 3, generator=generator)
    B, C = (torch.randn(samples, tokens, groups, 5, generator=generator) for _ in range(2))
    return x, step * torch.rand(samples, tokens, heads, generator=generator), torch.tensor(A), B, C


@pytest.mark.parametrize("tokens", COUNTS)
def test_equals_the_recurrence(tokens):
    assert_as(recurrent, ssd, inputs(tokens))


@pytest.mark.parametrize("heads, groups", [(1, 1), (4, 1), (4, 4), (6, 3)])
def test_groups_share_what_they_write_and_read(heads, groups):
    assert_as(recurrent, ssd, inputs(70, heads, groups, A=(-0.1, -1.0, -4.0, -16.0, -2.0, 0.0)[:heads]))


@pytest.mark.parametrize("tokens", [1, 33, 100, 300])
@pytest.mark.parametrize("step", [0.0, 1e-8, 1.0, 1e4])
def test_steps_and_decays_of_any_size(tokens, step):
    """From a state that forgets nothing (A = 0) to one that each token wipes: exp(−1e8) is 0, and nothing is NaN."""
    assert_as(recurrent, ssd, inputs(tokens, step=step, A=(0.0, -1e-6, -50.0, -1e4)))


@pytest.mark.parametrize("tokens", [33, 300])
def test_what_follows_a_wipe_is_as_exact_as_without(tokens):
    """Every third token wipes the state. Differences of running sums, 1e6 and more, would lose the small decays."""
    x, dt, A, B, C = inputs(tokens)
    dt[:, ::3] = 1e5
    x[:, ::3] *= 1e-5
    assert_as(recurrent, ssd, (x, dt, A, B, C))


@pytest.mark.parametrize("tokens", [16, 100])
def test_half_precision_costs_the_rounding_of_the_inputs_alone(tokens):
    x, dt, A, B, C = inputs(tokens)
    assert_rounds_inputs_alone(recurrent, ssd, (x.bfloat16(), dt, A, B.bfloat16(), C.bfloat16()))


@pytest.mark.parametrize("tokens", [32, 100, 300])
@pytest.mark.parametrize("step", [0.003, 0.3, 1e3])
def test_under_autocast_products_are_in_bf16(tokens, step):
    """Four products lie between an input and the output, and each rounds its operands and its result by 2⁻⁹."""
    assert_bf16_products(recurrent, ssd, inputs(tokens, step=step), tolerance=2**-6)


@pytest.mark.parametrize("tokens", [33, 64, 65, 256, 300, 600, 1100])
def test_by_a_gpus_chunks_it_equals_the_recurrence(tokens, monkeypatch):
    monkeypatch.setitem(CHUNKS, "cpu", CHUNKS["cuda"])
    assert_as(recurrent, ssd, inputs(tokens))


@pytest.mark.slow
def test_compiled_it_is_one_graph_with_the_same_numbers():
    assert_compiles(ssd, inputs(100))


@pytest.mark.parametrize("tokens", [1, 5, 32, 33, 100, 300, 1024, 1100])
def test_products_are_those_that_torch_counts(tokens):
    assert counted_flops(ssd, *inputs(tokens, samples=3)) == 2 * 3 * products(tokens, 2, 4, 3, 5)


def test_products_and_memory_are_linear_in_the_tokens():
    """At most 32·(P·H + N·G) within chunks, 2·P·N·H to states and back, (8 + 2)/32·8/7·P·N·H between, up to padding."""
    for tokens in (256, 1024, 4096, 16384):
        most = 32 * (24 * 64 + 2 * 64) + 2 * 24 * 64**2 + (8 + 2) / 32 * 8 / 7 * 24 * 64**2
        assert 0.9 * most < products(tokens, 2, 24, 64, 64) / tokens <= most
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda item: kept.append(item.numel()) or item, lambda item: item):
        ssd(*(item.requires_grad_() for item in inputs(1024, samples=1)))
        first = sum(kept)
        ssd(*(item.requires_grad_() for item in inputs(4096, samples=1)))
    assert (sum(kept) - first) / first == pytest.approx(4, rel=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [16, 256, 1100])
def test_on_a_gpu_it_equals_the_recurrence(tokens):
    with exact():
        on_gpu = lambda *given: ssd(*(item.cuda() for item in given)).cpu()  # noqa: E731
        assert_as(recurrent, on_gpu, inputs(tokens, samples=1), tolerance=1e-4)


def by_conv1d(x, weight, bias):
    taps = weight.shape[2]
    return F.conv1d(F.pad(x.transpose(1, 2), (taps - 1, 0)), weight, bias, groups=len(weight)).transpose(1, 2)


def conv_inputs(tokens, taps, dtype=torch.float64):
    shapes = [(2, tokens, 6), (6, 1, taps), (6,)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("taps", [1, 2, 4, 7])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 50])
def test_the_convolution_is_conv1d(tokens, taps):
    """Forward and gradients, also of fewer tokens than taps, and of tokens that lie otherwise in memory."""
    x, *weights = conv_inputs(tokens, taps)
    for item in (x, x.detach().transpose(1, 2).contiguous().transpose(1, 2)):
        assert_close(derived(causal_conv, (item, *weights)), derived(by_conv1d, (item, *weights)))


@pytest.mark.parametrize("tokens", [2, 6])
def test_gradients_of_the_convolution_are_those_of_differences(tokens):
    """Twice, too: the gradients can be differentiated."""
    assert torch.autograd.gradcheck(causal_conv, conv_inputs(tokens, 4))
    assert torch.autograd.gradgradcheck(causal_conv, conv_inputs(tokens, 4))


def test_a_convolution_of_bf16_is_summed_in_the_weights_fp32():
    """The result is the fp32 one, rounded once; gradients have the types of what they are of."""
    x, weight, bias = conv_inputs(40, 4, torch.float32)
    half = x.detach().bfloat16().requires_grad_()
    actual = causal_conv(half, weight, bias)
    assert actual.dtype == torch.bfloat16
    assert_close(actual.float(), by_conv1d(half.float(), weight, bias), rtol=2**-8, atol=1e-6)
    upstream = torch.randn(actual.shape).bfloat16()
    grads = torch.autograd.grad(actual, (half, weight, bias), upstream)
    twins = torch.autograd.grad(by_conv1d(half.float(), weight, bias), (half, weight, bias), upstream.float())
    for a, b, dtype in zip(grads, twins, (torch.bfloat16, torch.float32, torch.float32), strict=True):
        assert a.dtype == dtype
        assert_close(a.float(), b.float(), rtol=2**-7, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [3, 40])
def test_compiled_convolution_is_the_eager_one(tokens):
    """Compilers see another sum; torch 2.11's has made wrong gradients of the one that others run."""
    given = conv_inputs(tokens, 4)
    assert_compiles(causal_conv, given)
    compiled = torch.compile(causal_conv, backend="aot_eager", fullgraph=True)
    assert compiled(given[0].detach().bfloat16(), *given[1:]).dtype == torch.bfloat16
