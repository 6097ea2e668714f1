"""Values of the first block mixed into those of the later blocks (value residual; Zhou et al. 2024, arXiv 2410.17897).

Shapes: B samples, N tokens, H heads of d channels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def add_value_residual(blocks: nn.ModuleList) -> None:
    """Make the first block return its attention values beside the tokens, and give each later block a learned weight
    v1_lambda, 0.5 at first, with which its attention mixes them into its own values."""
    blocks[0].returns_values = True
    for block in blocks[1:]:
        block.attn.v1_lambda = nn.Parameter(torch.tensor(0.5))


def mixed(layer: nn.Module, v: Tensor, along: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """Return an attention layer's values, and its further inputs `along`. If the layer has a weight λ = v1_lambda, the
    first block's values v₁ end `along` and are taken out: the values are λ·v₁ + (1 − λ)·v. All are (B, N, H, d)."""
    if layer.v1_lambda is None:
        return v, along
    *along, first = along
    return layer.v1_lambda * first + (1 - layer.v1_lambda) * v, along
