"""The convolution against torch's own, and its gradients against differences."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tread.models.causal_conv import causal_conv


def by_conv1d(x, weight, bias):
    taps = weight.shape[2]
    return F.conv1d(F.pad(x.transpose(1, 2), (taps - 1, 0)), weight, bias, groups=len(weight)).transpose(1, 2)


def given(tokens, taps, dtype=torch.float64):
    shapes = [(2, tokens, 6), (6, 1, taps), (6,)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("taps", [1, 2, 4, 7])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 50])
def test_it_is_conv1d(tokens, taps):
    """Forward and gradients, also of fewer tokens than taps, and of tokens that lie otherwise in memory."""
    x, weight, bias = given(tokens, taps)
    for item in (x, x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()):
        actual, expected = (conv(item, weight, bias) for conv in (causal_conv, by_conv1d))
        torch.testing.assert_close(actual, expected)
        upstream = torch.randn_like(actual)
        grads = (torch.autograd.grad(out, (item, weight, bias), upstream) for out in (actual, expected))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("tokens", [2, 6])
def test_gradients_are_those_of_differences(tokens):
    """Twice, too: the gradients can be differentiated."""
    assert torch.autograd.gradcheck(causal_conv, given(tokens, 4))
    assert torch.autograd.gradgradcheck(causal_conv, given(tokens, 4))


def test_bf16_is_summed_in_the_weights_fp32():
    """The result is the fp32 one, rounded once; gradients have the types of what they are of."""
    x, weight, bias = given(40, 4, torch.float32)
    half = x.detach().bfloat16().requires_grad_()
    actual = causal_conv(half, weight, bias)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), by_conv1d(half.float(), weight, bias), rtol=2**-8, atol=1e-6)
    upstream = torch.randn(actual.shape).bfloat16()
    grads = torch.autograd.grad(actual, (half, weight, bias), upstream)
    twins = torch.autograd.grad(by_conv1d(half.float(), weight, bias), (half, weight, bias), upstream.float())
    for a, b, dtype in zip(grads, twins, (torch.bfloat16, torch.float32, torch.float32), strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.float(), b.float(), rtol=2**-7, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [3, 40])
def test_compiled_it_is_conv1d(tokens):
    """Compilers see another sum; torch 2.11's has made wrong gradients of the one that others run."""
    torch._dynamo.reset()
    compiled, given_here = torch.compile(causal_conv, backend="aot_eager", fullgraph=True), given(tokens, 4)
    actual, expected = (conv(*given_here) for conv in (compiled, by_conv1d))
    torch.testing.assert_close(actual, expected)
    upstream = torch.randn_like(actual)
    grads = (torch.autograd.grad(out, given_here, upstream) for out in (actual, expected))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)
    half = given_here[0].detach().bfloat16()
    assert compiled(half, *given_here[1:]).dtype == torch.bfloat16
