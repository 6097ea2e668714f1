"""LightningDiT (Yao et al. 2025, arXiv 2501.01423): DiT with RMSNorm, SwiGLU and rotary positions, each an option.

Parameters are named and shaped as in public LightningDiT checkpoints; norm="layer", mlp="gelu", positions="sincos" make
it DiT (dit.py), names included. If some tokens skip blocks, the others keep their positions in the full grid.

Shapes: B samples, N tokens of a grid in raster order, D hidden size, H heads of d = D/H channels."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dit import DiT, DiTBlock, MlpKind, Norm, make_norm
from tread.models.rotary import TABLES, check_tables, rotary_angles
from tread.runtime.schema import check

Positions = Literal["sincos", "rope"]
DIT_PARTS = {"norm": "layer", "mlp": "gelu", "positions": "sincos"}  # DiT's choices of these options


class LightningDiT(DiT):
    """The LightningDiT network F(x; t, y). `given` are DiT's other arguments. Raises ValueError if sizes do not fit.

    norm       "rms": RMSNorm with weights, in the last layer too; "layer": LayerNorm without weights, as in DiT.
    mlp        "swiglu", with 2/3 of the width mlp_ratio·D; or "gelu", as in DiT.
    positions  "sincos": fixed sines and cosines are added to the tokens; "rope": in addition queries and keys rotate by
               their token's row and column (rotary positions), as in public checkpoints.
    qk_norm    True: RMSNorm of each head's queries and keys, before they rotate.
    block      callable that creates a block: block(hidden_size, num_heads, mlp_ratio, norm=…, mlp=…, qk_norm=…).
    """

    def __init__(
        self,
        *,
        hidden_size: int = 1152,
        num_heads: int = 16,
        norm: Norm = "rms",
        mlp: MlpKind = "swiglu",
        positions: Positions = "rope",
        qk_norm: bool = False,
        block: Callable[..., nn.Module] = DiTBlock,
        **given: Any,
    ) -> None:
        for name, value, kind in (("norm", norm, Norm), ("mlp", mlp, MlpKind), ("positions", positions, Positions)):
            check(name, value, kind)
        block = partial(block, norm=norm, mlp=mlp, qk_norm=qk_norm)
        super().__init__(hidden_size=hidden_size, num_heads=num_heads, block=block, **given)
        self.final_layer.norm_final = make_norm(norm, hidden_size)
        self.head_dim = hidden_size // num_heads if positions == "rope" else None  # None: heads do not rotate
        self.register_load_state_dict_pre_hook(_take_tables)
        if self.head_dim:
            self.register_buffer("rotary", self._rotary(1.0), persistent=False)

    def _rotary(self, scale: float) -> Tensor:
        """Return a table (1, N, d) for positions × `scale`: d/2 cosines, then d/2 sines, for each token. With a class
        token it is (1, 1 + N, d); the first row is the class token's, whose queries and keys do not rotate."""
        angles = F.pad(rotary_angles(self.head_dim, self.grid[0], scale), (0, 0, self.leading, 0))
        return torch.cat([angles.cos(), angles.sin()], dim=1).float()[None]

    def scale_positions(self, scale: float) -> None:
        super().scale_positions(scale)
        if self.head_dim:
            self.rotary.copy_(self._rotary(scale))

    def along(self, batch: int) -> Sequence[Tensor]:
        return [self.rotary.expand(batch, -1, -1)] if self.head_dim else []


def _take_tables(network: LightningDiT, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Remove public checkpoints' rotary tables from state_dict. ValueError unless they are the network's at scale 1."""
    tables = {name: state_dict.pop(prefix + name) for name in TABLES if prefix + name in state_dict}
    check_tables(tables, network.num_tokens, "the state dict")
    for name, table in tables.items():
        if table.shape[1] != network.head_dim:
            own = f"has heads of {network.head_dim}" if network.head_dim else "needs positions=rope for that"
            raise ValueError(f"{name} rotates heads of {table.shape[1]} channels, but this network {own}")
