"""The class token of REG (Wu et al. 2025, arXiv 2507.01467): a token before the patches that embeds a noised feature
vector of the whole picture. It has no position and skips no block. The network also predicts the feature's velocity.

Shapes: B samples, N patches, z = width channels of the feature, D hidden size."""

import torch
from torch import Tensor, nn


class ClassToken(nn.Module):
    """Embeds a noised feature (B, width) of the whole picture as a token. `out` maps the class token (B, D), after the
    last layer's norm and modulation, to the feature's predicted velocity (B, width), 0 before training."""

    def __init__(self, width: int, hidden_size: int) -> None:
        super().__init__()
        self.width = width
        self.proj = nn.Linear(width, hidden_size)
        self.norm = nn.LayerNorm(hidden_size, eps=1e-6)
        self.out = nn.Linear(hidden_size, width)

    def before(self, tokens: Tensor, given: Tensor | None) -> Tensor:
        """Prepend the feature `given` (B, z), embedded: (B, N, D) → (B, 1 + N, D). ValueError if None or misshapen."""
        if given is None or given.shape != (len(tokens), self.width):
            said = "none" if given is None else tuple(given.shape)
            raise ValueError(f"class_token is {said}, but this network takes ({len(tokens)}, {self.width})")
        return torch.cat([self.norm(self.proj(given)).to(tokens.dtype)[:, None], tokens], dim=1)
