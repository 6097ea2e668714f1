"""Values of the first block mixed into those of the later blocks (value residual; Zhou et al. 2024, arXiv 2410.17897).

Shapes: B samples, N tokens, H heads of d channels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def add_value_residual(blocks: nn.ModuleList) -> None:
    """Make the first block also return its attention's values. Give the attention of each later block a learned scalar
    v1_lambda, initially 0.5: the weight of the first block's values when they are mixed into its own."""
    blocks[0].returns_values = True
    for block in blocks[1:]:
        block.attn.v1_lambda = nn.Parameter(torch.tensor(0.5))


def mixed(layer: nn.Module, v: Tensor, along: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """Mix the first block's values v₁ into an attention layer's own values v, both (B, N, H, d). `along` are the
    layer's inputs besides the tokens; the last one is v₁. Returns λ·v₁ + (1 − λ)·v, with λ = layer.v1_lambda, and
    `along` without v₁. If λ is None, there is no v₁ in `along`, and v and `along` are returned unchanged."""
    if layer.v1_lambda is None:
        return v, along
    *along, first = along
    return layer.v1_lambda * first + (1 - layer.v1_lambda) * v, along
