"""Bidirectional WKV, the token mixing of Vision-RWKV (Duan et al. 2024, arXiv 2403.02308, Eq. 4), in linear time.

In each channel, a token gets the mean of all values, weighted by keys and by exponential decay with the distance:

    wkv_t = Σ_i a_ti·v_i / Σ_i a_ti,   a_ti = exp(k_i − (|t − i| − 1)·w/T) for i ≠ t,   a_tt = exp(k_t + u)

The decay is relative to the number of tokens T, so it spans the same fraction of any sequence. Sums over the tokens
before and after a token are computed in chunks: by small matrix products within a chunk, and the same way over the
chunks' own sums. Each level has CHUNK times fewer sums than the one below (the first, on a GPU, 64 times), so time and
memory are linear in T.

Shapes: B samples, T tokens, D channels.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tread.models.ssd import product_dtype

CHUNK = 32  # most tokens, or sums of a lower level, in a chunk
# On a GPU a product with a 64×64 matrix takes no longer than reading its factors, fills a tile of a tensor core and
# leaves half as many sums to the next level as 32×32. A 128×128 matrix of decays would be four times as large.
CHUNKS = {"cuda": 64}
DECAY_LIMIT, BONUS_LIMIT = 60.0, 20.0  # limits of exponents; exp of their sum then stays in fp32's range, e^±87


def wkv(k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """Return weighted means of the values: keys k and values v (B, T, D), decay w and bonus u (D,) → (B, T, D) fp32.
    Token t weighs token i by exp(k_i − (|t − i| − 1)·w/T), and itself by exp(k_t + u).

    Computed in fp32 for any input precision (products in TF32 where that is allowed), relative to the largest key of
    each sample and channel, so keys may have any size; under autocast e^k, e^k·v and the products within chunks are in
    bf16. To stay within fp32's range, w is clamped to ±60, and u to at least −20.
    """
    device = "cpu" if k.is_meta else k.device.type
    most, half = CHUNKS.get(device, CHUNK), product_dtype(device)
    with torch.autocast(device, enabled=False):
        T = k.shape[1]
        decay = w.float().clamp(-DECAY_LIMIT, DECAY_LIMIT).view(-1, 1, 1, 1) / T  # per token
        length = min(T, most)
        padding = (0, -T % length)
        k, v = (x.float().permute(2, 0, 1) for x in (k, v))  # (D, B, T): the products below go channel by channel
        k = k - k.detach().amax(dim=2, keepdim=True)
        k = F.pad(k, padding, value=-math.inf).unflatten(2, (-1, length))  # (D, B, C, L); weights exp(−∞) = 0
        v = F.pad(v, padding).unflatten(2, (-1, length))

        e = k.exp()
        weighted = torch.stack([e * v, e], dim=1).to(half)  # for numerator and denominator, (D, 2, B, C, L)
        before, behind = _sums(weighted, weighted, decay)
        bonus = k + u.float().clamp(min=-BONUS_LIMIT).view(-1, 1, 1, 1)
        top = bonus.detach().clamp(min=0)  # bonuses may be large: each token's sums are scaled
        bonus = (bonus - top).exp()
        total = (before + behind) * (-top).exp().unsqueeze(1) + torch.stack([bonus * v, bonus], dim=1)
        total = total.flatten(3)[..., :T]  # (D, 2, B, T), before dividing: in the padding sums may overflow
        return (total[:, 0] / total[:, 1].contiguous()).permute(1, 2, 0)


def _sums(x: Tensor, y: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ_{j<i} x_j·exp(−(i − j − 1)·decay) and Σ_{j>i} y_j·exp(−(j − i − 1)·decay) for each token i. x, y and
    both sums are (D, 2, B, C, L): channels, numerator and denominator of the mean, samples, chunks, tokens in a chunk.
    decay is (D, 1, 1, 1). Sums are fp32; products within chunks are in the precision of x and y."""
    D, _, _, C, L = x.shape
    place, rate = torch.arange(L, device=x.device), decay.view(D, 1, 1)
    gap = place - place.view(L, 1)  # (L, L), column minus row
    reach = torch.where(gap > 0, ((1 - gap.clamp(min=1)) * rate).exp(), 0).to(x.dtype)  # (D, L, L)
    before = (x.view(D, -1, L) @ reach).view_as(x).float()
    behind = (y.view(D, -1, L) @ reach.mT).view_as(y).float()
    if C == 1:
        return before, behind

    fall = (-place * decay).exp().unsqueeze(1)  # (D, 1, 1, 1, L)
    right, left = (x * fall.flip(4)).sum(dim=4), (y * fall).sum(dim=4)  # (D, 2, B, C), at a chunk's ends
    length = min(C, CHUNK)
    right, left = (F.pad(part, (0, -C % length)).unflatten(3, (-1, length)) for part in (right, left))
    first, last = (part.flatten(3)[..., :C].unsqueeze(4) for part in _sums(right, left, decay * L))
    return before + first * fall, behind + last * fall.flip(4)


def products(tokens: int, channels: int) -> int:
    """Return the multiply-adds of wkv's matrix products for one sample: quadratic in the tokens up to CHUNK, about
    linear beyond. CHUNK, the chunk size for CPUs, is used whatever the device."""
    length = min(tokens, CHUNK)
    chunks = -(-tokens // length)
    own = 4 * chunks * length * length * channels  # before and behind, numerator and denominator
    return own if chunks == 1 else own + products(chunks, channels)
