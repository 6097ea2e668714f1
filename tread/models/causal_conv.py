"""A causal convolution of each channel along the tokens, with few taps, as a sum of shifted products.

The result is that of nn.Conv1d(C, C, K, groups=C) on tokens padded at the start. torch's version wants the tokens last
and takes about twice as long on a CPU from 1,024 tokens on (docs/measurements.md).

Shapes: B samples, N tokens, C channels, K taps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """y_t = bias + Σ_k weight_k·x_{t−K+1+k}, x before the first token being 0: x (B, N, C) → (B, N, C), of x's dtype.

    weight (C, 1, K) and bias (C,) as nn.Conv1d has them; summed in the wider of their dtype and x's. Compilers get the
    plain sum, which they fuse: torch 2.11 traces `_Shifted` to wrong gradients.
    """
    if torch.compiler.is_compiling():
        taps, tokens = weight.shape[2], x.shape[1]
        padded = F.pad(x, (0, 0, taps - 1, 0))
        return (bias + sum(padded[:, k : k + tokens] * weight[:, 0, k] for k in range(taps))).to(x.dtype)
    return _Shifted.apply(x, weight.squeeze(1), bias)


class _Shifted(torch.autograd.Function):
    """x (B, N, C), weight (C, K), bias (C,), with its own gradients: autograd's fill all tokens for each tap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = torch.addcmul(bias, x, weight[:, -1])
        for shift in _shifts(x, weight):
            y[:, shift:].addcmul_(x[:, :-shift], weight[:, -1 - shift])
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        g = g.to(torch.promote_types(x.dtype, weight.dtype))
        of_x, of_weight = g * weight[:, -1], torch.zeros_like(weight)
        of_weight[:, -1] = (g * x).sum(dim=(0, 1))
        for shift in _shifts(x, weight):
            of_x[:, :-shift].addcmul_(g[:, shift:], weight[:, -1 - shift])
            of_weight[:, -1 - shift] = (g[:, shift:] * x[:, :-shift]).sum(dim=(0, 1))
        return of_x.to(x.dtype), of_weight, g.sum(dim=(0, 1))


def _shifts(x: Tensor, weight: Tensor) -> range:
    """How far back each tap reaches, without the last, which is the token itself."""
    return range(1, min(weight.shape[1], x.shape[1]))
