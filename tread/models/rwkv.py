"""Diffusion-RWKV (Fei et al. 2024, arXiv 2404.04478): bidirectional RWKV blocks in place of DiT's.

A block mixes tokens (spatial mix: gated WKV, wkv.py) and then channels, each after a shift that gives every token some
channels of its four neighbours, as in Vision-RWKV (Duan et al. 2024, arXiv 2403.02308). Conditioning, gates and last
layer are DiT's adaLN-Zero (backbone.py), which Diffusion-RWKV has as an option. Diffusion-RWKV's long skip connections
between shallow and deep blocks are left out, as in TREAD. Costs are linear in the number of tokens.

Shapes: B samples, N = H·W tokens of a grid in raster order, D hidden size."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dit import make_norm
from routing_module import Grid
from tread.models.backbone import Backbone, linear_products, modulate
from tread.models.wkv import products, wkv

DECAY_RANGE = 8.0  # at initialisation, channels have decays w = 0 .. 8 over the whole sequence


def quad_shift(x: Tensor, grid: Grid) -> Tensor:
    """Shift each quarter of the channels of x (B, H·W, D) by one token (down, up, right, left), padding with zeros."""
    height, width = grid
    down, up, right, left = x.unflatten(1, (height, width)).chunk(4, dim=3)
    moved = [
        F.pad(down, (0, 0, 0, 0, 1, 0))[:, :-1],  # from the row above
        F.pad(up, (0, 0, 0, 0, 0, 1))[:, 1:],
        F.pad(right, (0, 0, 1, 0))[:, :, :-1],  # from the column before
        F.pad(left, (0, 0, 0, 1))[:, :, 1:],
    ]
    return torch.cat(moved, dim=3).flatten(1, 2)


class SpatialMix(nn.Module):
    """Token mixing (B, N, D) → (B, N, D): projects σ(r) ⊙ WKV(k, v); r, k, v are linear in tokens and neighbours."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mix_r, self.mix_k, self.mix_v = (nn.Parameter(torch.full((dim,), 0.5)) for _ in range(3))
        self.decay = nn.Parameter(torch.linspace(0, DECAY_RANGE, dim // 4).repeat(4))  # w; all decays in each quarter
        self.bonus = nn.Parameter(torch.zeros(dim))  # u
        self.receptance, self.key, self.value, self.output = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        shifted = quad_shift(x, grid)
        r = self.receptance(torch.lerp(shifted, x, self.mix_r.to(x)))
        k = self.key(torch.lerp(shifted, x, self.mix_k.to(x)))
        v = self.value(torch.lerp(shifted, x, self.mix_v.to(x)))
        return self.output(r.sigmoid() * wkv(k, v, self.decay, self.bonus).to(r.dtype))


class ChannelMix(nn.Module):
    """Gated token-wise MLP with squared ReLU, on tokens blended with their neighbours: (B, N, D) → (B, N, D)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.mix_r, self.mix_k = (nn.Parameter(torch.full((dim,), 0.5)) for _ in range(2))
        self.receptance = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, hidden_dim, bias=False)
        self.value = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        shifted = quad_shift(x, grid)
        r = self.receptance(torch.lerp(shifted, x, self.mix_r.to(x)))
        k = self.key(torch.lerp(shifted, x, self.mix_k.to(x)))
        return r.sigmoid() * self.value(k.relu().square())


class RWKVBlock(nn.Module):
    """Spatial mix and channel mix, modulated by the conditioning (adaLN-Zero)."""

    def __init__(self, dim: int, mlp_ratio: float) -> None:
        super().__init__()
        self.norm1 = make_norm("layer", dim)
        self.spatial_mix = SpatialMix(dim)
        self.norm2 = make_norm("layer", dim)
        self.channel_mix = ChannelMix(dim, int(dim * mlp_ratio))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(self, x: Tensor, c: Tensor, grid: Grid) -> Tensor:
        """Map tokens x (B, H·W, D) of the grid (H, W) and conditioning c (B, D) to tokens (B, H·W, D)."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate1.unsqueeze(1) * self.spatial_mix(modulate(self.norm1(x), shift1, scale1), grid)
        x = x + gate2.unsqueeze(1) * self.channel_mix(modulate(self.norm2(x), shift2, scale2), grid)
        return x

    def multiply_adds(self, tokens: int, attention: bool = True) -> int:
        """Return the multiply-adds for one sample of `tokens` tokens: linear layers and, if attention=True, WKV."""
        return linear_products(self, tokens) + (products(tokens, len(self.spatial_mix.decay)) if attention else 0)


class RWKV(Backbone):
    """The network F(x; t, y) of RWKV blocks. mlp_ratio is the channel mix's width / hidden_size; `sizes` are Backbone's
    other arguments. Blocks use neighbouring tokens, so only whole rows may skip blocks: Route(…, select="row")."""

    needs_grid = True

    def __init__(self, *, hidden_size: int = 768, depth: int = 12, mlp_ratio: float = 4.0, **sizes: Any) -> None:
        super().__init__(partial(RWKVBlock, hidden_size, mlp_ratio), hidden_size=hidden_size, depth=depth, **sizes)
