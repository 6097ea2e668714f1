"""Bidirectional WKV, the token mixing of Vision-RWKV (Duan et al. 2024, arXiv 2403.02308, Eq. 4), in linear time.

Channel by channel, every token gets the average of all tokens' values, weighted by their keys and by an
exponential decay with the distance along the sequence:

    wkv_t = Σ_i a_ti·v_i / Σ_i a_ti,   a_ti = exp(k_i − (|t − i| − 1)·w/T) for i ≠ t,   a_tt = exp(k_t + u)

The decay is relative to the number of tokens T, so that a shorter sequence is seen through windows of
the same share of it. Sums over the tokens before and behind are computed in chunks: small matrix
products within a chunk, and the same again over the chunks' sums. Each level has CHUNK times fewer
sums than the one below it, so time and memory are linear in T.

Shapes: B samples, T tokens, D channels.
"""

from __future__ import annotations

import contextlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 32


def wkv(k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """Weighted averages of the values: (B, T, D), (B, T, D), (D,), (D,) → (B, T, D) fp32.

    Computed in fp32 whatever comes in (the products in TF32 where that is allowed), with exponents relative
    to the largest one in sight: keys may be of any size. |w|, the exponent that a decay spans over the whole
    sequence, may be up to 60, and u anything from −60 up (from −20 up where w is negative).
    """
    device = k.device.type
    with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else contextlib.nullcontext():
        T = k.shape[1]
        decay = w.float().view(-1, 1, 1, 1) / T  # of one token
        length = min(T, CHUNK)
        padding = (0, -T % length)
        k, v = (x.float().permute(2, 0, 1) for x in (k, v))  # (D, B, T): the products below go channel by channel
        k = F.pad(k, padding, value=-math.inf).unflatten(2, (-1, length))  # (D, B, C, L); weights exp(−∞) = 0
        v = F.pad(v, padding).unflatten(2, (-1, length))
        u = u.float().view(-1, 1, 1, 1)

        scale = _scale(k.detach(), decay.detach())
        e = (k - scale).exp()
        x = torch.stack([e * v, e], dim=1)  # (D, 2, B, C, L): numerator and denominator
        before, behind = _sums(x, x, scale, decay)
        own = k + u
        top = torch.maximum(own, scale).detach()  # u is out of scale's sight: here each token has a unit of its own
        own = (own - top).exp()
        total = (before + behind) * (scale - top).exp().unsqueeze(1) + torch.stack([own * v, own], dim=1)
        total = total.flatten(3)[..., :T]  # (D, 2, B, T), before dividing: in the padding sums may overflow
        return (total[:, 0] / total[:, 1]).permute(1, 2, 0)


def _scale(k: Tensor, decay: Tensor) -> Tensor:
    """The largest exponent that each chunk meets, up to decay within chunks: (D, B, C, L) → (D, B, C, 1).

    Weights that grow with the distance (w < 0) are not followed: everyone meets the largest one in full.
    """
    m = k.amax(dim=3)
    fall = decay.squeeze(3).clamp(min=0) * k.shape[3] * torch.arange(k.shape[2], device=k.device)  # (D, 1, C)
    before = (m + fall).cummax(dim=2).values - fall
    behind = (m - fall).flip(2).cummax(dim=2).values.flip(2) + fall
    return torch.maximum(before, behind).unsqueeze(3)


def _sums(a: Tensor, b: Tensor, scale: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """For each place i, Σ_{j<i} a_j·exp(−(i − j − 1)·decay) and Σ_{j>i} b_j·exp(−(j − i − 1)·decay).

    a, b (D, 2, B, C, L) in units of exp(scale), scale (D, B, C, 1) one for each chunk, decay (D, 1, 1, 1)
    of one place. Returns both sums, (D, 2, B, C, L), in the same units.
    """
    D, _, B, C, L = a.shape
    place, rate = torch.arange(L, device=a.device), decay.view(D, 1, 1)
    gap = place - place.view(L, 1)  # (L, L), from the row's place to the column's
    reach = torch.where(gap > 0, ((1 - gap.clamp(min=1)) * rate).exp(), 0)  # (D, L, L)
    before = (a.view(D, -1, L) @ reach).view_as(a)
    behind = (b.view(D, -1, L) @ reach.mT).view_as(b)
    if C == 1:
        return before, behind

    fall = (-place * decay).exp().unsqueeze(1)  # (D, 1, 1, 1, L)
    right, left = (a * fall.flip(4)).sum(dim=4), (b * fall).sum(dim=4)  # (D, 2, B, C): a chunk, seen from its ends
    length = min(C, CHUNK)
    missing = -C % length
    scale = scale.squeeze(3)
    padded = torch.cat([scale, scale[..., -1:].expand(-1, -1, missing)], dim=2).unflatten(2, (-1, length))
    common = padded.amax(dim=3, keepdim=True)
    ratio = (padded - common).exp().unsqueeze(1)  # (D, 1, B, C', L')
    right, left = (F.pad(x, (0, missing)).unflatten(3, (-1, length)) * ratio for x in (right, left))
    first, last = _sums(right, left, common, decay * L)
    first, last = ((x / ratio).flatten(3)[..., :C].unsqueeze(4) for x in (first, last))
    return before + first * fall, behind + last * fall.flip(4)


def products(tokens: int, channels: int) -> int:
    """Multiply-adds of wkv's matrix products for one sample: linear in the tokens, up to padding."""
    total, chunks = 0, tokens
    while True:
        length = min(chunks, CHUNK)
        chunks = -(-chunks // length)
        total += 4 * chunks * length * length * channels  # before and behind, numerator and denominator
        if chunks == 1:
            return total
