"""Diffusion transformer (DiT; Peebles & Xie, ICCV 2023, arXiv 2212.09748) with adaLN-Zero.

Parameter names and shapes are those of public DiT checkpoints, so such a state dict loads with strict=True. This file
holds the blocks; last layer and forward pass are in tread/models/backbone.py, embedders in embedders.py beside it.

Shapes: B samples, N tokens, D hidden size.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tread.models.backbone import Backbone, linear_products, modulate
from tread.models.value_residual import add_value_residual, mixed


class Attention(nn.Module):
    """Multi-head self-attention with H heads of width d: (B, N, D) → (B, N, D), and its value vectors (B, N, H, d)."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"hidden_size {dim} is not a multiple of num_heads {num_heads}")
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.v1_lambda = None  # see value_residual.py

    def forward(self, x: Tensor, *along: Tensor) -> tuple[Tensor, Tensor]:
        B, N, D = x.shape
        q, k, v = self.qkv(x).view(B, N, 3, self.num_heads, D // self.num_heads).unbind(2)
        v, _ = mixed(self, v, along)
        x = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)))  # (B, heads, N, D/heads)
        return self.proj(x.transpose(1, 2).reshape(B, N, D)), v


class Mlp(nn.Module):
    """Token-wise MLP with tanh-GELU: (B, N, D) → (B, N, D)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class DiTBlock(nn.Module):
    """DiT's transformer block with adaLN-Zero. `conditioning` is the conditioning vector's width; None: hidden size."""

    returns_values = False  # see value_residual.py

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float, conditioning: int | None = None) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.attn = Attention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(conditioning or dim, 6 * dim))

    def forward(self, x: Tensor, *given: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return new tokens (B, N, D) for tokens x (B, N, D) and, if self.returns_values is set, also the attention's
        value vectors (B, N, H, d). `given` is the conditioning vector c (B, conditioning); if this block mixes the
        value vectors of the first block into its own, those come before c."""
        *along, c = given
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c).chunk(6, dim=1)
        change, values = self.attn(modulate(self.norm1(x), shift1, scale1), *along)
        x = x + gate1.unsqueeze(1) * change
        x = x + gate2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift2, scale2))
        return (x, values.contiguous()) if self.returns_values else x

    def multiply_adds(self, tokens: int, attention: bool = True) -> int:
        """Return the multiply-adds for one sample of `tokens` tokens; attention=False counts the linear layers only."""
        products = 2 * tokens * tokens * self.attn.proj.out_features if attention else 0
        return linear_products(self, tokens) + products


class DiT(Backbone):
    """The DiT network F(x; t, y). value_residual=True mixes the first block's attention values into those of later
    blocks. Backbone (tread/models/backbone.py) takes the other arguments, and raises ValueError if sizes do not fit."""

    def __init__(
        self, *, hidden_size: int = 1152, num_heads: int = 16, mlp_ratio: float = 4.0, value_residual: bool = False,
        **sizes: Any,
    ) -> None:  # fmt: skip
        super().__init__(lambda: DiTBlock(hidden_size, num_heads, mlp_ratio), hidden_size=hidden_size, **sizes)
        if value_residual:
            add_value_residual(self.blocks)
