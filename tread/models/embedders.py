"""Maps a network's inputs to tokens and conditioning, as in public DiT (Peebles & Xie, ICCV 2023, arXiv 2212.09748).

Shapes: B samples, C channels, S×S latents, p patch size, N = (S/p)² tokens, D hidden size."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from routing_module import readable
from tread.models.rotary import rotary_angles

Residual = Literal["fp32", "bf16"]
WAVES = 256  # number of cosines and sines that embed the time input


def sincos_positions(dim: int, grid_size: int, scale: float = 1.0) -> Tensor:
    """Return fixed 2-D sine-cosine positions, (grid_size², dim) fp32, computed in float64. As in public DiT
    checkpoints, the first half of the channels encodes the column, the second the row, each as sines, then cosines.
    `scale` multiplies rows and columns. Raises ValueError unless dim is a multiple of 4."""
    if dim % 4:
        raise ValueError(f"hidden_size {dim} is not a multiple of 4 (2-D sine-cosine positions)")
    angles = rotary_angles(dim, grid_size, scale).unflatten(1, (2, -1)).flip(1)  # of columns, then of rows
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1).float()


class PatchEmbed(nn.Module):
    """Embed non-overlapping patches as tokens in raster order, (B, C, S, S) → (B, N, D); forward may add positions.
    With a bottleneck of d channels, a convolution without bias maps to d, and a linear layer from d to D (JiT; Li & He
    2025, arXiv 2511.13720). torch.compile gets a matrix product instead of the convolution, equal up to rounding."""

    def __init__(self, in_channels: int, patch_size: int, hidden_size: int, bottleneck: int | None = None) -> None:
        super().__init__()
        sizes = (in_channels, bottleneck or hidden_size, patch_size)
        self.proj = nn.Conv2d(*sizes, stride=patch_size, bias=bottleneck is None)
        self.expand = nn.Linear(bottleneck, hidden_size) if bottleneck else nn.Identity()

    def forward(self, x: Tensor, positions: Tensor | None = None, residual: Residual = "fp32") -> Tensor:
        if torch.compiler.is_compiling():
            p = self.proj.stride[0]
            patches = x.unflatten(3, (-1, p)).unflatten(2, (-1, p)).permute(0, 2, 4, 1, 3, 5)  # (B, rows, columns, …)
            tokens = F.linear(patches.flatten(3).flatten(1, 2), self.proj.weight.flatten(1), self.proj.bias)
        else:
            tokens = self.proj(x).flatten(2).transpose(1, 2).contiguous()
        tokens = self.expand(tokens)
        return tokens if positions is None else kept_as(residual, tokens + positions, tokens)


def kept_as(residual: Residual, tokens: Tensor, product: Tensor) -> Tensor:
    """Return the tokens in the dtype of the residual stream: unchanged for residual="fp32"; for "bf16" in the dtype of
    `product`, a layer's output. Under autocast that is bf16, and it makes all later residual sums bf16 as well."""
    return tokens.to(product.dtype) if residual == "bf16" else tokens


class TimestepEmbedder(nn.Module):
    """Embed the scalar time input as cosines and sines, followed by a two-layer MLP: (B,) → (B, D)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WAVES, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size))

    def frequencies(self, t: Tensor) -> Tensor:
        """Map t (B,) to cosines, then sines, of 128 frequencies: (B, 256) fp32."""
        exponent = torch.arange(WAVES // 2, dtype=torch.float32, device=t.device) / (WAVES // 2)
        angle = t.float()[:, None] * torch.exp(-math.log(10000.0) * exponent)
        return torch.cat([angle.cos(), angle.sin()], dim=1)

    def forward(self, t: Tensor) -> Tensor:
        return self.mlp(self.frequencies(t))


class LabelEmbedder(nn.Module):
    """Embed class labels, (B,) int64 → (B, D); row num_classes is the null class."""

    def __init__(self, num_classes: int, hidden_size: int) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(num_classes + 1, hidden_size)

    def initialize(self) -> None:
        nn.init.normal_(self.embedding_table.weight, std=0.02)

    def check(self, y: Tensor, batch: int) -> None:
        """Raise ValueError unless y holds labels for `batch` samples; values are checked on a CPU only."""
        if y.shape != (batch,):
            raise ValueError(f"y has shape {tuple(y.shape)}, but must be ({batch},), a label for each sample")
        null = self.embedding_table.num_embeddings - 1
        if readable(y) and batch and not 0 <= int(y.min()) <= int(y.max()) <= null:
            known = f"0..{null - 1} and the null class {null}"
            raise ValueError(f"labels lie in {int(y.min())}..{int(y.max())}, but this network knows {known}")

    def forward(self, y: Tensor) -> Tensor:
        return self.embedding_table(y)
