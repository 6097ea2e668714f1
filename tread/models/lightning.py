"""LightningDiT (Yao et al. 2025, arXiv 2501.01423): DiT with RMSNorm, SwiGLU and rotary positions, each an option.

Parameter names and shapes are those of public LightningDiT checkpoints; with norm="layer", mlp="gelu" and
positions="sincos" the network is dit.py's DiT, with its names. Tokens keep their rotary positions in the full grid when
other tokens skip blocks: that changes which tokens attend to each other, not their positions.

Shapes: B samples, N tokens of a grid in raster order, D hidden size, H heads of d = D/H channels.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dit import DiTBlock, Mlp
from tread.models.backbone import Backbone
from tread.models.rotary import TABLES, check_tables, rotary_angles, rotate
from tread.models.value_residual import add_value_residual, mixed
from tread.runtime.schema import check

Norm = Literal["layer", "rms"]
MlpKind = Literal["gelu", "swiglu"]
Positions = Literal["sincos", "rope"]
DIT_PARTS = {"norm": "layer", "mlp": "gelu", "positions": "sincos"}  # DiT's choices of these options


class RotaryAttention(nn.Module):
    """Multi-head self-attention with optional rotary positions and norms of queries and keys. forward returns the new
    tokens (B, N, D) and the values (B, N, H, d) that were attended to."""

    def __init__(self, dim: int, num_heads: int, qk_norm: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.q_norm, self.k_norm = (nn.RMSNorm(dim // num_heads, eps=1e-6) if qk_norm else None for _ in range(2))
        self.proj = nn.Linear(dim, dim)
        self.v1_lambda = None  # see value_residual.py

    def forward(self, x: Tensor, *along: Tensor) -> tuple[Tensor, Tensor]:
        """Map x (B, N, D) to tokens (B, N, D) and values (B, N, H, d). `along` are the rotary table (B, N, d), if
        positions rotate, and the first block's values (B, N, H, d), if the network mixes them in."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).unbind(2)  # (B, N, H, d)
        v, table = mixed(self, v, along)
        return attend(self, q, k, v, *table), v


def attend(
    layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """Let queries (B, N, H, d) attend to keys and values (B, T, H, d) and apply the layer's projection: (B, N, D).
    `layer` has q_norm, k_norm (or None) and proj. `table` (B, N, d) holds the cosines, then the sines, of the rotary
    positions of queries and keys. `mask` (B, T) bool is False for padding."""
    if layer.q_norm is not None:
        q, k = layer.q_norm(q.float()), layer.k_norm(k.float())
    if table is not None:
        q, k = rotate(q, table), rotate(k, table)  # in fp32, as the table is
    q, k, v = (part.to(v.dtype).transpose(1, 2) for part in (q, k, v))
    x = F.scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else mask[:, None, None])
    return layer.proj(x.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """Token-wise MLP w3(silu(gate) ⊙ value) with (gate, value) = w12(x) (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w12 = nn.Linear(dim, 2 * hidden_dim)
        self.w3 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.w12(x).chunk(2, dim=2)
        return self.w3(F.silu(gate) * value)


class LightningBlock(nn.Module):
    """DiT's block (adaLN-Zero) with a choice of norms, MLP and positions."""

    returns_values = False  # see value_residual.py

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float, norm: Norm, mlp: MlpKind, qk_norm: bool) -> None:
        super().__init__()
        self.norm1 = make_norm(norm, dim)
        self.attn = RotaryAttention(dim, num_heads, qk_norm)
        self.norm2 = make_norm(norm, dim)
        hidden = int(dim * mlp_ratio)
        self.mlp = SwiGLU(dim, int(2 / 3 * hidden)) if mlp == "swiglu" else Mlp(dim, hidden)  # as many weights in both
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    forward, multiply_adds = DiTBlock.forward, DiTBlock.multiply_adds  # `along` has the rotary positions, if any


def make_norm(norm: Norm, dim: int) -> nn.Module:
    """Return a norm over the last axis: "rms" is RMSNorm with a weight per channel, "layer" LayerNorm without any."""
    return nn.RMSNorm(dim, eps=1e-6) if norm == "rms" else nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)


class LightningDiT(Backbone):
    """The LightningDiT network F(x; t, y). `sizes` go to Backbone. Raises ValueError for sizes that do not fit.

    norm       "rms": RMSNorm with weights, in the last layer too; "layer": LayerNorm without weights, as in DiT.
    mlp        "swiglu", with 2/3 of the width mlp_ratio·D; or "gelu", as in DiT.
    positions  "sincos": fixed sines and cosines are added to the tokens; "rope": in addition queries and keys rotate by
               their token's row and column (rotary positions), as in public checkpoints.
    qk_norm    True: RMSNorm of each head's queries and keys, before they rotate.
    block      class or function that creates a block from LightningBlock's arguments.
    value_residual  True: values of the first block's attention are mixed into those of the later blocks.
    """

    def __init__(
        self,
        *,
        hidden_size: int = 1152,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
        norm: Norm = "rms",
        mlp: MlpKind = "swiglu",
        positions: Positions = "rope",
        qk_norm: bool = False,
        block: Callable[..., nn.Module] = LightningBlock,
        value_residual: bool = False,
        **sizes: Any,
    ) -> None:
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size {hidden_size} is not a multiple of num_heads {num_heads}")
        for name, value, kind in (("norm", norm, Norm), ("mlp", mlp, MlpKind), ("positions", positions, Positions)):
            check(name, value, kind)
        make_block = partial(block, hidden_size, num_heads, mlp_ratio, norm, mlp, qk_norm)
        super().__init__(make_block, hidden_size=hidden_size, **sizes)
        self.final_layer.norm_final = make_norm(norm, hidden_size)
        if value_residual:
            add_value_residual(self.blocks)
        self.head_dim = hidden_size // num_heads if positions == "rope" else None  # None: heads do not rotate
        self.register_load_state_dict_pre_hook(_take_tables)
        if self.head_dim:
            self.register_buffer("rotary", self._rotary(1.0), persistent=False)

    def _rotary(self, scale: float) -> Tensor:
        """Return cosines, then sines, (1, N, d) for positions × `scale`. With a class token: (1, 1 + N, d), where the
        first row is the class token's, whose queries and keys do not rotate."""
        angles = F.pad(rotary_angles(self.head_dim, self.grid[0], scale), (0, 0, self.leading, 0))
        return torch.cat([angles.cos(), angles.sin()], dim=1).float()[None]

    def scale_positions(self, scale: float) -> None:
        super().scale_positions(scale)
        if self.head_dim:
            self.rotary.copy_(self._rotary(scale))

    def along(self, batch: int) -> Sequence[Tensor]:
        return [self.rotary.expand(batch, -1, -1)] if self.head_dim else []


def _take_tables(network: LightningDiT, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Remove a public file's rotary tables from state_dict. Raises ValueError if they differ from the network's."""
    tables = {name: state_dict.pop(prefix + name) for name in TABLES if prefix + name in state_dict}
    check_tables(tables, network.num_tokens, "the state dict")
    for name, table in tables.items():
        if table.shape[1] != network.head_dim:
            own = f"has heads of {network.head_dim}" if network.head_dim else "needs positions=rope for that"
            raise ValueError(f"{name} rotates heads of {table.shape[1]} channels, but this network {own}")
