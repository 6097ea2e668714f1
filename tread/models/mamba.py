"""Mamba-2 blocks (Dao & Gu 2024, arXiv 2405.21060) in place of DiT's, scanned in one, two or four directions.

A block is DiT's with adaLN-Zero, but with a Mamba-2 mixer instead of attention and an optional MLP. As in Vision-Mamba
and DiS, the directions share input and output projections, and the state is not reset at the ends of rows: the grid is
one sequence. If some rows of tokens skip a block, the block scans the others as if they were the whole grid. Costs are
linear in the number of tokens. With attention_every some blocks are DiT's own. No public checkpoint has exactly these
blocks: their widths, the default of two directions and which weights are shared were chosen for this code.

Shapes: B samples, N = H·W tokens of a grid in raster order, D hidden size, E = expand·D."""

import math
from collections.abc import Callable
from itertools import count
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dit import DiTBlock, Mlp, make_norm
from routing_module import Grid
from tread.models.backbone import Backbone, linear_products, modulate
from tread.models.ssd import causal_conv, fused_ssd, products, ssd
from tread.runtime.schema import check

Directions = Literal[1, 2, 4]
Kernel = Literal["torch", "mamba_ssm"]
STEPS = (1e-3, 0.1)  # range of the step size Δ at initialisation, log-uniform as in Mamba-2
DECAYS = (1.0, 16.0)  # range of −A at initialisation, uniform as in Mamba-2
A_LOG_LIMIT = 40.0  # upper bound of A_log: each token then erases the state, and e^89 overflows fp32


def in_order(x: Tensor, direction: int, grid: Grid | None) -> Tensor:
    """Reorder tokens (B, N, …) from raster order for a scan. Direction 0: by rows, 1: by rows backward, 2: by columns,
    3: by columns backward; directions 2 and 3 need the grid (rows, columns)."""
    if direction >= 2:
        x = x.unflatten(1, grid).transpose(1, 2).flatten(1, 2)
    return x.flip(1) if direction % 2 else x


def in_raster_order(x: Tensor, direction: int, grid: Grid | None) -> Tensor:
    """Undo in_order with the same direction and grid."""
    x = x.flip(1) if direction % 2 else x
    return in_order(x, 2, grid[::-1]) if direction >= 2 else x


class Mamba2Mixer(nn.Module):
    """Mamba-2's token mixing in several scan directions: (B, N, D) → (B, N, D).

    One projection gives the gate z and x (expand·D channels each), B and C (`state` channels each), all shared by the
    directions, and a Δ for each head of each direction. Each direction has its own causal convolution of x, B and C,
    and its own parameters A, D and bias of Δ. The directions' outputs are put back in raster order, summed, gated,
    normalised and projected. Parameter names are Mamba-2's for ngroups=1; the directions' parameters are concatenated.
    """

    def __init__(
        self, dim: int, state: int, head_dim: int, expand: int, conv: int, directions: int, kernel: Kernel = "torch"
    ) -> None:
        super().__init__()
        self.width, self.head_dim, self.state, self.directions = expand * dim, head_dim, state, directions
        self.scan: Callable[..., Tensor] = ssd if kernel == "torch" else fused_ssd()
        heads, channels = directions * self.width // head_dim, self.width + 2 * state
        self.in_proj = nn.Linear(dim, self.width + channels + heads, bias=False)
        self.conv1d = nn.Conv1d(directions * channels, directions * channels, conv, groups=directions * channels)
        # conv1d only holds weights: forward passes them to causal_conv
        step = torch.empty(heads).uniform_(*map(math.log, STEPS)).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus(dt_bias) is the step size
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(*DECAYS).log())
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = nn.RMSNorm(self.width, eps=1e-5)
        self.out_proj = nn.Linear(self.width, dim, bias=False)

    def forward(self, x: Tensor, grid: Grid | None = None) -> Tensor:
        """Mix tokens x (B, N, D) of the grid (H, W). Raises ValueError if directions=4 gets no grid of N tokens."""
        ways = range(self.directions)
        if self.directions == 4 and (grid is None or math.prod(grid) != x.shape[1]):
            raise ValueError(f"directions 4 scans columns, but grid is {grid} for {x.shape[1]} tokens (rows, columns)")
        z, x, dt = self.in_proj(x).split([self.width, self.width + 2 * self.state, len(self.A_log)], dim=2)
        x = torch.cat([in_order(x, way, grid) for way in ways], dim=2)
        dt = torch.cat([in_order(part, way, grid) for way, part in enumerate(dt.chunk(self.directions, dim=2))], dim=2)
        x = F.silu(causal_conv(x, self.conv1d.weight, self.conv1d.bias)).unflatten(2, (self.directions, -1))
        x, B, C = x.split([self.width, self.state, self.state], dim=3)  # (B, N, directions, …)
        x = x.reshape(*x.shape[:2], -1, self.head_dim)
        dt = F.softplus(dt.float() + self.dt_bias)
        A = -self.A_log.float().clamp(max=A_LOG_LIMIT).exp()
        y = self.scan(x, dt, A, B, C) + self.D.unsqueeze(1) * x
        y = y.flatten(2).unflatten(2, (self.directions, -1))
        y = sum(in_raster_order(y[:, :, way], way, grid) for way in ways)
        return self.out_proj(self.norm(y * F.silu(z.contiguous().float())))

    def mixing(self, tokens: int) -> int:
        """Return the multiply-adds of convolution and scan for one sample of `tokens` tokens."""
        scan = products(tokens, self.directions, len(self.A_log), self.head_dim, self.state)
        return tokens * self.conv1d.weight.numel() + scan


class MambaBlock(nn.Module):
    """Mamba-2 mixer and MLP, modulated by the conditioning (adaLN-Zero); mlp_ratio 0 leaves out the MLP."""

    def __init__(self, dim: int, mlp_ratio: float, mixer: Mamba2Mixer) -> None:
        super().__init__()
        self.norm1 = make_norm("layer", dim)
        self.mixer = mixer
        if mlp_ratio:
            self.norm2 = make_norm("layer", dim)
            self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, (6 if mlp_ratio else 3) * dim))

    def forward(self, x: Tensor, c: Tensor, grid: Grid | None = None) -> Tensor:
        """Map tokens x (B, N, D) of the grid (H, W) and conditioning c (B, D) to tokens (B, N, D)."""
        shift, scale, gate, *of_mlp = self.adaLN_modulation(c).unflatten(1, (-1, x.shape[2])).unbind(1)
        x = x + gate.unsqueeze(1) * self.mixer(modulate(self.norm1(x), shift, scale), grid)
        if of_mlp:
            shift, scale, gate = of_mlp
            x = x + gate.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift, scale))
        return x

    def multiply_adds(self, tokens: int, attention: bool = True) -> int:
        """Return the multiply-adds for one sample of `tokens` tokens; attention=False counts the linear layers only."""
        return linear_products(self, tokens) + (self.mixer.mixing(tokens) if attention else 0)


class AttentionBlock(DiTBlock):
    """DiT's attention block, called like MambaBlock, so that the two can alternate; it ignores the grid."""

    def forward(self, x: Tensor, c: Tensor, grid: Grid | None = None) -> Tensor:
        return super().forward(x, c)


class Mamba(Backbone):
    """The network F(x; t, y) of Mamba-2 blocks. `sizes` are other arguments of Backbone (backbone.py).

    mlp_ratio           width of the MLP divided by hidden_size; 0: no MLP.
    state               size of each channel's state (d_state in mamba_ssm).
    head_dim            channels of a head; must divide expand·hidden_size.
    expand              width of the mixer divided by hidden_size.
    conv                kernel size of the causal convolution, in tokens.
    directions          1: raster order; 2: also backward; 4: also both ways along columns.
    attention_every     k: every k-th block is a DiT block with num_heads attention heads; 0: none.
    kernel              "torch": scan by PyTorch, on any device; "mamba_ssm": that package's fused scan, on CUDA.
    allow_token_routes  True: any tokens may skip blocks, and the others are scanned in raster order; directions=4,
                        which needs a grid, raises ValueError. False: only whole rows may skip: the others form a grid.

    Raises ValueError for sizes that do not fit together, and for a kernel that is not available.
    """

    def __init__(
        self,
        *,
        hidden_size: int = 768,
        depth: int = 12,
        mlp_ratio: float = 4.0,
        state: int = 64,
        head_dim: int = 64,
        expand: int = 2,
        conv: int = 4,
        directions: Directions = 2,
        attention_every: int = 0,
        num_heads: int = 12,
        kernel: Kernel = "torch",
        allow_token_routes: bool = False,
        **sizes: Any,
    ) -> None:
        check("directions", directions, Directions)
        if expand * hidden_size % head_dim:
            raise ValueError(f"expand {expand} × hidden_size {hidden_size} is not a multiple of head_dim {head_dim}")
        if directions == 4 and allow_token_routes:
            raise ValueError("directions 4 scans columns, which allow_token_routes takes apart: take directions 1 or 2")
        if attention_every == 1 or attention_every > depth:
            raise ValueError(f"attention_every is {attention_every}, but must be 0, for none, or 2 to {depth}")
        if attention_every and not mlp_ratio:
            raise ValueError("mlp_ratio is 0, but attention_every asks for DiT's blocks, which have an MLP")
        numbers = count(1)

        def make_block() -> nn.Module:
            if attention_every and next(numbers) % attention_every == 0:
                return AttentionBlock(hidden_size, num_heads, mlp_ratio)
            mixer = Mamba2Mixer(hidden_size, state, head_dim, expand, conv, directions, kernel)
            return MambaBlock(hidden_size, mlp_ratio, mixer)

        super().__init__(make_block, hidden_size=hidden_size, depth=depth, **sizes)
        self.needs_grid = not allow_token_routes
