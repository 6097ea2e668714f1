"""Mamba-2's linear-time token mixing: scan (state-space duality, Dao & Gu 2024, arXiv 2405.21060) and convolution.

Each head holds a state h of P × N numbers. Every token shrinks it, adds to it and reads from it:

    h_t = exp(Δ_t·A)·h_{t−1} + Δ_t·x_t B_tᵀ,   y_t = h_t C_t,   h_0 = 0

Within a chunk of tokens y is a product masked by decays, (C Bᵀ ∘ decay)(Δ ∘ x), plus C times the decayed state before
the chunk. Another product gives what a chunk adds to the state. The states between chunks follow the same recurrence,
again in chunks: each level has fewer steps by a constant factor, so time and memory are linear in the tokens.

Shapes: S samples, T tokens, G groups of R heads each, which share B and C; P channels per head, N numbers in B and in C
per token. In the convolution: C channels, K taps.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 32  # most tokens in a chunk
# On a GPU memory traffic decides: products take little time. Per token and head, a pass over the decays within chunks
# of L tokens moves L numbers, and a pass over the states P·N/L. The sum is least at L = √(P·N), 64 for P = N = 64.
CHUNKS = {"cuda": 64}
FUSED_CHUNK = 256  # tokens in a chunk of mamba_ssm's kernel
LEVEL = 8  # most chunks in a chunk of the next level


def ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """Return y (S, T, G·R, P) fp32 of the recurrence h_t = exp(Δ_t·A)·h_{t−1} + Δ_t·x_t B_tᵀ, y_t = h_t C_t, h_0 = 0,
    for x (S, T, G·R, P), dt = Δ (S, T, G·R), A (G·R,), B and C (S, T, G, N); a head's state h has P × N numbers.

    Δ ≥ 0 and A ≤ 0 may have any size: each decay is the exponential of a sum over the tokens it spans, not a quotient
    or difference of sums, so nothing overflows or cancels. Computed in fp32 for any input (products in TF32 if
    allowed). Under autocast products are in bf16, as in mamba_ssm's kernel; decays, sums and states stay fp32.
    """
    device = "cpu" if x.is_meta else x.device.type
    most, half = CHUNKS.get(device, CHUNK), product_dtype(device)
    with torch.autocast(device, enabled=False):
        T, P, G, dt = x.shape[1], x.shape[3], B.shape[2], dt.float()
        u, a = (part.unflatten(2, (G, -1)) for part in (x.float() * dt.unsqueeze(3), dt * A.float()))
        u, a = (_chunks(part, most).movedim(2, 4).contiguous() for part in (u, a))  # (S, c, G, R, L, P), (…, L)
        B, C = (_chunks(part.to(half), most).transpose(2, 3).contiguous() for part in (B, C))  # (S, c, G, L, N)

        decay = _decay(a)
        y = ((B @ C.mT).unsqueeze(3) * decay).to(half).mT @ u.to(half)
        if y.shape[1] > 1:
            added = (u * decay[..., -1:]).to(half).mT.flatten(3, 4) @ B  # (S, c, G, R·P, N), decayed to chunks' ends
            states = added.float().unflatten(3, (-1, P)).movedim(1, 3).flatten(4)  # (S, G, R, c, P·N)
            states = _entering(states.flatten(0, 2), a.sum(dim=4).movedim(1, 3).flatten(0, 2)).view_as(states)
            states = states.to(half).movedim(3, 1).reshape(added.shape)
            seen = (C @ states.mT).unflatten(4, (-1, P)).transpose(3, 4)  # (S, c, G, R, L, P)
            y = y + a.cumsum(dim=4).exp().unsqueeze(5) * seen
        return y.float().movedim(4, 2).flatten(3, 4).flatten(1, 2)[:, :T]


def product_dtype(device: str) -> torch.dtype:
    """Return the dtype of a scan's matrix products on a device type such as "cuda": bf16 under autocast, else fp32."""
    return torch.bfloat16 if torch.is_autocast_enabled(device) else torch.float32


def _chunks(x: Tensor, most: int) -> Tensor:
    """Split (S, T, …) into chunks of L ≤ `most` tokens, (S, c, L, …); padding by zeros leaves the state as it is."""
    chunks = -(-x.shape[1] // most)
    length = -(-x.shape[1] // chunks)
    if padding := chunks * length - x.shape[1]:
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, padding))
    return x.unflatten(1, (chunks, length))


def _decay(a: Tensor) -> Tensor:
    """Return exp(Σ_{j<k≤i} a_k), the decay from token j to token i, and 0 for i < j: (…, L) → (…, L, L), axes j, i."""
    spans = a.unsqueeze(-2).expand(*a.shape, a.shape[-1]).triu(1).cumsum(dim=-1)
    earlier = a.new_ones(spans.shape[-2:], dtype=torch.bool).tril(-1)
    return spans.masked_fill(earlier, -torch.inf).exp()  # masked after exp, two results would be kept


def _entering(added: Tensor, a: Tensor) -> Tensor:
    """Run K recurrences h_i = exp(a_i)·h_{i−1} + added_i of c steps from h = 0, and return the state before each step.
    A state is a vector of F numbers: added (K, c, F), a (K, c) → (K, c, F)."""
    steps = added.shape[1]
    added, a = _chunks(added, LEVEL), _chunks(a, LEVEL)  # (K, m, L, F), (K, m, L)
    decay = F.pad(_decay(a), (1, 0))  # columns: the state before each step, and after the last
    if added.shape[1] == 1:
        return (decay[..., :-1].mT @ added).squeeze(1)
    h, ends = (decay.mT @ added).split([added.shape[2], 1], dim=2)
    before = _entering(ends.squeeze(2), a.sum(dim=2)).unsqueeze(2)
    since = F.pad(a.cumsum(dim=2)[..., :-1], (1, 0)).exp().unsqueeze(3)
    h = torch.baddbmm(*(part.flatten(0, 1) for part in (h, since, before))).view_as(h)
    return h.flatten(1, 2)[:, :steps]


def products(tokens: int, groups: int, heads: int, channels: int, numbers: int) -> int:
    """Return the multiply-adds of ssd's matrix products for one sample: linear in the tokens, apart from padding. The
    chunk sizes for CPUs are used whatever the device, so that a network's FLOPs are the same everywhere.

    groups    groups of heads that share B and C.
    heads     heads of all groups together.
    channels  channels per head, P.
    numbers   numbers in B and in C per token, N; a head's state has P × N.
    """
    chunks = -(-tokens // CHUNK)
    length = -(-tokens // chunks)
    total = chunks * length * length * (groups * numbers + heads * channels)
    if chunks > 1:
        total += 2 * chunks * length * heads * channels * numbers
    while chunks > 1:
        above = -(-chunks // LEVEL)
        level = -(-chunks // above)
        total += above * level * (level + 2 * (above > 1)) * heads * channels * numbers
        chunks = above
    return total


def fused_ssd() -> Callable[..., Tensor]:
    """Return a function of x, dt, A, B and C, as in `ssd`, that calls the fused CUDA scan of the package mamba_ssm. x,
    B and C keep their precision; the result is fp32. Raises ValueError if the package or CUDA is missing."""
    if not torch.cuda.is_available():
        raise ValueError("kernel mamba_ssm needs a CUDA device, and there is none: kernel torch runs anywhere")
    try:
        import mamba_ssm.ops.triton.ssd_combined  # noqa: F401
    except ImportError as error:
        raise ValueError(f"mamba_ssm is not installed ({error}): pip install -r requirements-mamba.txt") from error

    def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        return _fused_scan(*(part.contiguous() for part in (x, dt, A, B, C))).float()

    return scan


@torch.library.custom_op("tread::fused_scan", mutates_args=())
def _fused_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """Call mamba_ssm's scan on contiguous tensors, as one operator that torch.compile does not trace into."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    return mamba_chunk_scan_combined(x, dt, A, B, C, FUSED_CHUNK).contiguous()


@torch.library.custom_op("tread::fused_scan_backward", mutates_args=())
def _fused_scan_backward(
    g: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of _fused_scan's arguments; mamba_ssm computes them from g, the gradient of the result y."""
    from mamba_ssm.ops.triton.ssd_combined import _mamba_chunk_scan_combined_bwd

    return tuple(part.contiguous() for part in _mamba_chunk_scan_combined_bwd(g, x, dt, A, B, C, y, FUSED_CHUNK)[:5])


_fused_scan.register_fake(lambda x, *_: torch.empty_like(x))
_fused_scan_backward.register_fake(lambda g, *given: tuple(torch.empty_like(part) for part in given[:5]))
_fused_scan.register_autograd(
    lambda ctx, g: _fused_scan_backward(g.contiguous(), *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output),
)


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return y_t = bias + Σ_k weight_k·x_{t−K+1+k}, with x = 0 before the first token: (S, T, C), in x's dtype.

    weight (C, 1, K) and bias (C,) are those of nn.Conv1d(C, C, K, groups=C), but that layer needs the tokens in the
    last axis and takes about twice as long on a CPU from 1,024 tokens on (docs/measurements.md). Sums use the wider
    dtype of x and weight. torch 2.11 compiles the gradients of `_Shifted` wrongly, so torch.compile gets a plain sum.
    """
    if torch.compiler.is_compiling():
        taps, tokens = weight.shape[2], x.shape[1]
        padded = F.pad(x, (0, 0, taps - 1, 0))
        return (bias + sum(padded[:, k : k + tokens] * weight[:, 0, k] for k in range(taps))).to(x.dtype)
    return _Shifted.apply(x, weight.squeeze(1), bias)


class _Shifted(torch.autograd.Function):
    """causal_conv's function: x (S, T, C), weight (C, K), bias (C,) → (S, T, C). Its backward pass is written by hand,
    as autograd would keep a copy of x per tap. Tap K − 1 − s reads the token s places back, none before the first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = torch.addcmul(bias, x, weight[:, -1])
        for shift in range(1, min(weight.shape[1], x.shape[1])):
            y[:, shift:].addcmul_(x[:, :-shift], weight[:, -1 - shift])
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        g = g.to(torch.promote_types(x.dtype, weight.dtype))
        of_x, of_weight = g * weight[:, -1], torch.zeros_like(weight)
        of_weight[:, -1] = (g * x).sum(dim=(0, 1))
        for shift in range(1, min(weight.shape[1], x.shape[1])):
            of_x[:, :-shift].addcmul_(g[:, shift:], weight[:, -1 - shift])
            of_weight[:, -1 - shift] = (g[:, shift:] * x[:, :-shift]).sum(dim=(0, 1))
        return of_x.to(x.dtype), of_weight, g.sum(dim=(0, 1))
