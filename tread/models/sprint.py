"""SPRINT (arXiv 2510.21986): a dense part f, a sparse part g on a quarter of the tokens, and a dense part h.

f is the first two blocks, h the last two, and g the blocks between. Learned mask tokens take the places of the tokens
that skipped g. Then the outputs of f and g are concatenated and projected back to D channels for h. Training can drop g
in some samples (path_drop): mask tokens then replace all of g's output. Blocks are LightningDiT's, by default with
DiT's norm, MLP and positions. Tokens that run in g keep their positions in the full grid.

Shapes: B samples, N tokens of a grid in raster order, D hidden size."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from routing_module import Record, Route, Routes, check_routes
from tread.models.lightning import DIT_PARTS, LightningDiT

DENSE = 2  # number of blocks of f, and also of h


class Sprint(LightningDiT):
    """The SPRINT network F(x; t, y). Arguments are LightningDiT's, but norm, mlp and positions are DiT's by default.
    Raises ValueError for sizes that do not fit, and for a depth that leaves no block for the sparse part g."""

    skipped_return, drops_path = False, True

    def __init__(self, **given: Any) -> None:
        super().__init__(**DIT_PARTS | given)
        check_sparse_part((), len(self.blocks))
        self.fusion_proj = nn.Linear(2 * self.hidden_size, self.hidden_size)
        nn.init.xavier_uniform_(self.fusion_proj.weight)
        nn.init.zeros_(self.fusion_proj.bias)
        self.mask_token = nn.Parameter(0.02 * torch.randn(1, 1, self.hidden_size))

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        y: Tensor,
        routes: Routes = (),
        path_drop: Tensor | bool | None = None,
        record: Record | None = None,
    ) -> Tensor:
        """Run the network: x (B, C, S, S), time input t (B,), labels y (B,) int64 → (B, out_channels, S, S).

        routes     one pair (Route, ids_keep (B, K)) over the sparse part g, blocks 2..depth−3; () runs all tokens.
        path_drop  (B,) bool: in these samples mask tokens replace g's output; g still runs on the whole batch, so that
                   shapes do not change. True: all samples, and g does not run. None: no sample.
        record     receives ids_keep and the outputs of the blocks in record.blocks; not filled if g does not run.
        """
        check_sparse_part([route for route, _ in routes], len(self.blocks))
        x, c = self.embed(x, t, y)
        record = record or Record()
        blocks = self.fusing(self.called(self.blocks), self.from_g(x, path_drop), record)
        if path_drop is True:
            blocks, routes, record = blocks[:DENSE] + blocks[-DENSE:], (), None
        x = self.run(blocks, x, c, routes=routes, record=record)
        return self.unpatchify(self.final_layer(x, c))

    def from_g(self, x: Tensor, path_drop: Tensor | bool | None = None) -> Tensor:
        """Return a mask (B, N, 1) bool for tokens x (B, N, D): False in samples where path_drop makes mask tokens
        replace the output of g, else True. Raises ValueError unless path_drop is (B,) bool, a bool or None."""
        if path_drop is None or isinstance(path_drop, bool):
            return torch.full((*x.shape[:2], 1), not path_drop, device=x.device)
        if path_drop.shape != x.shape[:1] or path_drop.dtype != torch.bool:
            given = f"path_drop is {tuple(path_drop.shape)} {path_drop.dtype}"
            raise ValueError(f"{given}, but must be ({len(x)},) torch.bool, or True")
        return ~path_drop[:, None, None].repeat(1, x.shape[1], 1)

    def fusing(
        self, blocks: Sequence[Callable[..., Tensor]], from_g: Tensor, record: Record
    ) -> list[Callable[..., Tensor]]:
        """Return all blocks, two of them wrapped: the last block of f (the first two) stores its output, and the
        first block of h (the last two) fuses this with the output of g (the blocks between) before it runs. Mask tokens
        replace g's output for tokens that skipped g (not in record.ids), and where from_g (B, N, 1) is False."""
        behind_f = []

        def end_f(x: Tensor, *given: Tensor) -> Tensor:
            behind_f.append(blocks[DENSE - 1](x, *given))
            return behind_f[0]

        def begin_h(x: Tensor, *given: Tensor) -> Tensor:
            # mask_token is used even if no token skipped g, so that it has a gradient in every process
            kept = from_g
            for ids_keep in record.ids:
                kept = kept & torch.zeros_like(from_g).scatter(1, ids_keep[:, :, None], True)
            x, f = torch.where(kept, x, self.mask_token.to(x.dtype)), behind_f.pop()
            fused = self.fusion_proj(torch.cat([f, x], dim=2))  # low precision under autocast, unlike the tokens
            return blocks[-DENSE](fused.to(x.dtype), *given)

        return [*blocks[: DENSE - 1], end_f, *blocks[DENSE:-DENSE], begin_h, *blocks[1 - DENSE :]]

    def output_of(self, block: int, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        x, c = self.embed(x, t, y)
        return self.run(self.fusing(self.blocks, self.from_g(x), Record())[: block + 1], x, c)

    def forward_flops(
        self, routes: Sequence[Route] = (), attention: bool = True, upto: int | None = None, path_drop: bool = False
    ) -> int:
        """Return the FLOPs of one sample's forward pass under `routes` up to block `upto` (None: all). attention=False:
        without the products of queries, keys and values; path_drop=True: without the sparse part g."""
        depth, N = len(self.blocks), self.num_tokens
        check_sparse_part(routes, depth)
        flops = super().forward_flops(() if path_drop else routes, attention, upto)
        last, begin_h = depth if upto is None else upto + 1, depth - DENSE
        if last > begin_h:
            flops += 2 * N * self.fusion_proj.weight.numel()
        if path_drop:
            flops -= 2 * sum(block.multiply_adds(N, attention) for block in self.blocks[DENSE : min(last, begin_h)])
        return flops


def check_sparse_part(routes: Sequence[Route], depth: int) -> None:
    """Raise ValueError unless `depth` leaves a sparse part, and `routes` is () or one route over it without rejoin."""
    if depth <= 2 * DENSE:
        raise ValueError(f"depth {depth} leaves no block for SPRINT's sparse part, all but the first and last {DENSE}")
    if len(routes) > 1:
        raise ValueError(f"{len(routes)} routes are given, but SPRINT has one sparse part: give one route, or none")
    for route in check_routes(routes, depth):
        if (route.start, route.end) != (DENSE, depth - 1 - DENSE):
            wanted = f"start must be {DENSE} and end {depth - 1 - DENSE} (or -{DENSE + 1})"
            raise ValueError(f"route {route.start}→{route.end} is not over SPRINT's sparse part: {wanted}")
        if route.rejoin != route.start:
            raise ValueError(f"route rejoin {route.rejoin} is given, but SPRINT puts mask tokens there: leave it null")
