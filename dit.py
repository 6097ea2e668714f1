"""Diffusion transformer (DiT; Peebles & Xie, ICCV 2023, arXiv 2212.09748) with adaLN-Zero.

Parameter names and shapes are those of public DiT checkpoints, so such a state dict loads with strict=True. This file
holds the blocks, with the options of LightningDiT (tread/models/lightning.py); last layer and forward pass are in
tread/models/backbone.py, embedders in tread/models/embedders.py.

Shapes: B samples, N tokens, D hidden size, H heads of d = D/H channels."""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tread.models.backbone import Backbone, linear_products, modulate
from tread.models.rotary import rotate

Norm = Literal["layer", "rms"]
MlpKind = Literal["gelu", "swiglu"]


class Attention(nn.Module):
    """Multi-head self-attention. qk_norm: RMSNorm of q, k per head. Raises ValueError unless num_heads divides dim."""

    def __init__(self, dim: int, num_heads: int, qk_norm: bool = False) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"hidden_size {dim} is not a multiple of num_heads {num_heads}")
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.q_norm, self.k_norm = (nn.RMSNorm(dim // num_heads, eps=1e-6) if qk_norm else None for _ in range(2))
        self.proj = nn.Linear(dim, dim)
        self.v1_lambda = None  # weight of the first block's values in those of this block; see DiT

    def forward(self, x: Tensor, *along: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output (B, N, D) for x (B, N, D), and the value vectors (B, N, H, d) that it used. `along` holds
        the rotary table (B, N, d), if positions are rotary, then the first block's values, if they are mixed in."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).unbind(2)  # (B, N, H, d)
        if self.v1_lambda is not None:
            *along, first = along
            v = self.v1_lambda * first + (1 - self.v1_lambda) * v
        return attend(self, q, k, v, *along), v


def attend(
    layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """Let queries (B, N, H, d) attend to keys and values (B, T, H, d) and apply layer.proj: (B, N, D). layer.q_norm and
    k_norm are norms, or both None. `table` (B, N, d), for T = N, rotates queries and keys: cosines, then sines, of the
    rotary angles of the N positions; None: no rotation. `mask` (B, T) bool is False for padding."""
    if layer.q_norm is not None:
        q, k = layer.q_norm(q.float()), layer.k_norm(k.float())
    if table is not None:
        q, k, v = rotate(q, table, v.dtype), rotate(k, table, v.dtype), v.contiguous()  # a view keeps q, k
    q, k, v = (part.to(v.dtype).transpose(1, 2) for part in (q, k, v))
    x = F.scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else mask[:, None, None])
    return layer.proj(x.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Token-wise MLP with tanh-GELU: (B, N, D) → (B, N, D)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class SwiGLU(nn.Module):
    """Token-wise MLP w3(silu(gate) ⊙ value) with (gate, value) = w12(x) (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w12 = nn.Linear(dim, 2 * hidden_dim)
        self.w3 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.w12(x).chunk(2, dim=2)
        return self.w3(F.silu(gate) * value)


def make_norm(norm: Norm, dim: int) -> nn.Module:
    """Return a norm over the last axis: "rms" is RMSNorm with channel weights, "layer" is LayerNorm without weights."""
    return nn.RMSNorm(dim, eps=1e-6) if norm == "rms" else nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)


class DiTBlock(nn.Module):
    """DiT's transformer block with adaLN-Zero; the MLP is dim·mlp_ratio wide, with mlp="swiglu" 2/3 of that.
    `conditioning` is the conditioning vector's width; None: dim. For norm, mlp and qk_norm see LightningDiT."""

    returns_values = False  # whether forward also returns the attention's values; see DiT

    def __init__(
        self, dim: int, num_heads: int, mlp_ratio: float, norm: Norm = "layer", mlp: MlpKind = "gelu",
        qk_norm: bool = False, conditioning: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        hidden = int(dim * mlp_ratio)
        self.norm1 = make_norm(norm, dim)
        self.attn = Attention(dim, num_heads, qk_norm)
        self.norm2 = make_norm(norm, dim)
        self.mlp = SwiGLU(dim, int(2 / 3 * hidden)) if mlp == "swiglu" else Mlp(dim, hidden)  # weight counts are equal
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(conditioning or dim, 6 * dim))

    def forward(self, x: Tensor, *given: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return new tokens (B, N, D) for tokens x (B, N, D) and, if self.returns_values, the attention's value vectors
        (B, N, H, d). `given`: what Attention.forward takes besides x, if anything, then c (B, conditioning)."""
        *along, c = given
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c).chunk(6, dim=1)
        change, values = self.attn(modulate(self.norm1(x), shift1, scale1), *along)
        x = x + gate1.unsqueeze(1) * change
        x = x + gate2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift2, scale2))
        return (x, values.contiguous()) if self.returns_values else x

    def multiply_adds(self, tokens: int, attention: bool = True) -> int:
        """Return the multiply-adds for one sample of `tokens` tokens; attention=False counts the linear layers only."""
        return linear_products(self, tokens) + (2 * tokens * tokens * self.attn.proj.out_features if attention else 0)


class DiT(Backbone):
    """The DiT network F(x; t, y): latents x, times t, labels y. value_residual=True mixes the first block's attention
    values into those of each later block (Zhou et al. 2024, arXiv 2410.17897), with a learned weight v1_lambda that is
    0.5 at first. block(hidden_size, num_heads, mlp_ratio) creates a block. Backbone (tread/models/backbone.py) takes
    the other arguments, `sizes`, and raises ValueError if they do not fit."""

    def __init__(
        self, *, hidden_size: int = 1152, num_heads: int = 16, mlp_ratio: float = 4.0, value_residual: bool = False,
        block: Callable[..., nn.Module] = DiTBlock, **sizes: Any,
    ) -> None:  # fmt: skip
        super().__init__(lambda: block(hidden_size, num_heads, mlp_ratio), hidden_size=hidden_size, **sizes)
        if value_residual:
            self.blocks[0].returns_values = True
            for later in self.blocks[1:]:
                later.attn.v1_lambda = nn.Parameter(torch.tensor(0.5))
