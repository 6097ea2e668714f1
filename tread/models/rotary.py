"""Rotary positions (RoFormer; Su et al. 2021, arXiv 2104.09864) in two dimensions, as in LightningDiT.

Shapes: B samples, N tokens of a square grid in raster order, H heads of d channels."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

TABLES = ("feat_rope.freqs_cos", "feat_rope.freqs_sin")  # names of rotary tables in public checkpoints
ROUNDING = 0.01  # tolerance for a file's tables; rounding to bf16 changes them by up to 0.002


def rotary_angles(head_dim: int, side: int, scale: float = 1.0) -> Tensor:
    """Return the angles by which pairs of a head's channels rotate, (side², d/2) fp64, d = head_dim. The first half
    of the pairs rotates by the token's row, the second by its column, with frequencies 10000^(−2k/(d/2)),
    k = 0 .. d/4−1. `scale` multiplies rows and columns. Raises ValueError unless d is a multiple of 4."""
    if head_dim % 4:
        raise ValueError(f"heads of {head_dim} channels have no rotary positions, which take a multiple of 4")
    frequency = 10000.0 ** (-torch.arange(head_dim // 4, dtype=torch.float64) / (head_dim / 4))
    line = scale * torch.arange(side, dtype=torch.float64)[:, None] * frequency
    return torch.cat([line.repeat_interleave(side, dim=0), line.repeat(side, 1)], dim=1)


def rotate(x: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotate pairs of adjacent channels of x (B, N, H, d), then cast to dtype; table (B, N, d): cosines, then sines."""
    cos, sin = table.unsqueeze(2).chunk(2, dim=3)
    first, second = x.unflatten(3, (-1, 2)).unbind(4)
    return torch.stack([(first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)], 4).flatten(3)


def public_tables(head_dim: int, side: int) -> dict[str, Tensor]:
    """Return the tables of public checkpoints by name: cosines and sines of rotary_angles, (side², d) fp64."""
    angles = rotary_angles(head_dim, side).repeat_interleave(2, dim=1)
    return dict(zip(TABLES, (angles.cos(), angles.sin())))


def check_tables(state: Mapping[str, Tensor], tokens: int, where: str) -> None:
    """Raise ValueError if rotary tables in a public file's state dict differ by more than ROUNDING from public_tables
    for a square grid of `tokens` tokens and as many channels per head. `where` names the file in messages."""
    for name in TABLES:
        if name not in state:
            continue
        table, side = state[name], math.isqrt(tokens)
        if table.ndim != 2 or len(table) != tokens or side**2 != tokens:
            raise ValueError(f"{name} of {where} is {tuple(table.shape)}, but must be ({tokens}, d), of a square grid")
        off = (table.double().cpu() - public_tables(table.shape[1], side)[name]).abs().max().item()
        if not off <= ROUNDING:
            raise ValueError(f"{name} of {where} differs by up to {off:.3g} from the rotary positions here")
