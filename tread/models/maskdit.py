"""MaskDiT (Zheng et al. 2023, arXiv 2306.09305): an encoder of DiT blocks on some tokens, a decoder on all.

In training half of the tokens skip the encoder. A learned mask token then takes the place of each skipped token, and a
small decoder runs on all tokens. Parameter names are those of public MaskDiT checkpoints without the prefix `model.`,
except that labels are embedded by DiT's embedding table, whose row for the null class is zero.

Shapes: B samples, N tokens, D hidden size, W the decoder's hidden size."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dit import DiT, DiTBlock
from routing_module import Record, Route, Routes, gather_tokens, run_blocks, scatter_tokens, settle_ids
from tread.models.backbone import FinalLayer, Init
from tread.models.embedders import kept_as, sincos_positions
from tread.routing.ids import count_kept


class MaskDiT(DiT):
    """The MaskDiT network F(x; t, y). `sizes` are DiT's other arguments. The null class's embedding is zero and not
    trained. The decoder has decoder_depth blocks with decoder_hidden_size channels and decoder_heads attention heads;
    defaults are as published. Encoder and decoder share one conditioning. Raises ValueError if sizes do not fit."""

    skipped_return = False

    def __init__(
        self, *, hidden_size: int = 1152, mlp_ratio: float = 4.0, init: Init = "adaln_zero",
        decoder_hidden_size: int = 512, decoder_depth: int = 8, decoder_heads: int = 16, **sizes: Any,
    ) -> None:  # fmt: skip
        if decoder_hidden_size % math.lcm(4, decoder_heads):
            said = f"is not a multiple of 4 and of {decoder_heads} heads"
            raise ValueError(f"decoder_hidden_size {decoder_hidden_size} {said}")
        super().__init__(hidden_size=hidden_size, mlp_ratio=mlp_ratio, init=init, **sizes)
        self.decoder_hidden_size = width = decoder_hidden_size
        table = self.y_embedder.embedding_table
        table.padding_idx = self.num_classes  # no gradient for the null class
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.register_buffer("decoder_pos_embed", sincos_positions(width, self.grid[0])[None])
        self.decoder_layer = FinalLayer(hidden_size, width, hidden_size)
        self.decoder_blocks = nn.ModuleList(
            DiTBlock(width, decoder_heads, mlp_ratio, conditioning=hidden_size) for _ in range(decoder_depth)
        )
        self.final_layer = FinalLayer(width, self.patch_size**2 * self.out_channels, hidden_size)
        self.initialize(init)
        nn.init.normal_(self.mask_token, std=0.02)
        with torch.no_grad():
            table.weight[self.num_classes].zero_()

    def scale_positions(self, scale: float) -> None:
        super().scale_positions(scale)
        self.decoder_pos_embed.copy_(sincos_positions(self.decoder_hidden_size, self.grid[0], scale)[None])

    def compiled(self) -> list[nn.Module]:
        return [*super().compiled(), *self.decoder_blocks]

    def forward_flops(self, routes: Sequence[Route] = (), attention: bool = True, upto: int | None = None) -> int:
        """Return the FLOPs of one sample's forward pass under `routes`. upto: count only the encoder's blocks 0 to
        `upto` and what comes before them. attention=False: leave out the products of queries, keys and values."""
        encoder = super().forward_flops(routes, attention, len(self.blocks) - 1 if upto is None else upto)
        if upto is not None:
            return encoder
        D, W, N = self.hidden_size, self.decoder_hidden_size, self.num_tokens
        kept = min((count_kept(route, N, self.grid) for route in routes), default=N)
        decoder = kept * D * W + 2 * D * D + 2 * D * W  # decoder_layer; modulations of both layers
        decoder += sum(block.multiply_adds(N, attention) for block in self.decoder_blocks)
        return encoder + int(2 * (decoder + N * W * self.patch_size**2 * self.out_channels))

    def forward(self, x: Tensor, t: Tensor, y: Tensor, routes: Routes = (), record: Record | None = None) -> Tensor:
        """Run the network: x (B, C, S, S), time input t (B,), labels y (B,) int64 → (B, out_channels, S, S). `routes`
        is () or one pair (Route, ids_keep (B, K)): the encoder runs only on these tokens, the decoder on all, with mask
        tokens for the rest. `record` receives ids_keep and the outputs of the encoder's blocks in record.blocks."""
        x, c = self.embed(x, t, y)
        (batch, tokens), ids_keep, record = x.shape[:2], None, record or Record()
        check_spans([route for route, _ in routes], len(self.blocks))
        if routes:
            [(route, chosen)] = routes
            ids_keep = settle_ids(route, chosen, x, self.grid)
            x = gather_tokens(x, ids_keep)
        x = product = self.decoder_layer(run_blocks(self.called(self.blocks), x, c, record=record), c)
        if ids_keep is None:
            x = x + 0 * self.mask_token  # mask_token needs a gradient in every step of distributed training
        else:
            record.ids = [ids_keep]
            record.outputs = {block: (output, ids_keep) for block, (output, _) in record.outputs.items()}
            x = scatter_tokens(self.mask_token.expand(batch, tokens, -1), x, ids_keep)
        x = kept_as(self.residual, x + self.decoder_pos_embed, product)
        x = run_blocks(self.called(self.decoder_blocks), x, c)
        return self.unpatchify(self.final_layer(x, c))


def check_spans(routes: Sequence[Route], depth: int) -> None:
    """Raise ValueError unless `routes` is () or one Route over all `depth` blocks with fp32 "off", rejoin None or 0."""
    resolved = [route.resolve(depth) for route in routes]
    if [(r.start, r.end, r.fp32, r.rejoin) for r in resolved] not in ([], [(0, depth - 1, "off", 0)]):
        given = ", ".join(f"{r.start}→{r.end} with fp32={r.fp32}, rejoin={r.rejoin}" for r in routes)
        taken = "one route, start 0, end -1, fp32 off, rejoin null"
        raise ValueError(f"the routes are {given}, but MaskDiT drops tokens before its encoder: it takes {taken}")
