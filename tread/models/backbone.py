"""The parts that all networks share: latents → tokens → blocks → latents. A route lets some tokens skip some blocks.

Parameter names and initialisation of the embedders (embedders.py) and of the last layer are those of the public DiT
code. The blocks are in dit.py, text_dit.py, rwkv.py and mamba.py. A forward pass draws no random numbers: the caller
draws ids_keep, the indices of the tokens that do not skip, and for label dropout passes the null class as a label.

Shapes: B samples, C channels, S×S latents, p patch size, N = (S/p)² tokens, D hidden size."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from routing_module import Record, Route, Routes, check_routes, run_blocks
from tread.models.class_token import ClassToken
from tread.models.embedders import WAVES, LabelEmbedder, PatchEmbed, Residual, TimestepEmbedder, sincos_positions
from tread.routing.ids import count_kept
from tread.runtime.schema import check

Init = Literal["adaln_zero", "xavier"]


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return x·(1 + scale) + shift for tokens x (B, N, D), shift and scale (B, D); in fp32 under autocast."""
    if x.dtype == torch.bfloat16 and not x.is_meta and torch.is_autocast_enabled(x.device.type):
        x = x.float()  # norms return bf16 on a CPU, and RMSNorm does on a GPU before torch 2.12
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class FinalLayer(nn.Module):
    """LayerNorm modulated by c (adaLN), then a linear layer: x (B, N, dim), c (B, conditioning) → (B, N, values)."""

    def __init__(self, dim: int, values: int, conditioning: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.linear = nn.Linear(dim, values)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(conditioning, 2 * dim))

    def modulated(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return modulate(self.norm_final(x), shift, scale)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return self.linear(self.modulated(x, c))


def count_parameters(network: nn.Module, trained: bool = False) -> int:
    """Return the number of values in a network's parameters; trained=True: only in those that require gradients."""
    return sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad or not trained)


def linear_products(block: nn.Module, tokens: int) -> int:
    """Return a block's multiply-adds in linear layers for one sample of `tokens` tokens; adaLN runs once per sample."""
    layers, modulation = (
        sum(layer.weight.numel() for layer in part.modules() if isinstance(layer, nn.Linear))
        for part in (block, block.adaLN_modulation)
    )
    return tokens * (layers - modulation) + modulation


def block_layers(network: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Return (name in the network, layer) for the linear layers in the network's blocks (its ModuleLists)."""
    return [
        (f"{name}.{inner}", layer)
        for name, blocks in network.named_children()
        if isinstance(blocks, nn.ModuleList)
        for inner, layer in blocks.named_modules()
        if isinstance(layer, nn.Linear)
    ]


class Backbone(nn.Module):
    """The network F(x; t, y) (see forward): embedders, blocks and last layer. Arguments are named as in public DiT.

    make_block   function () → block, a module that maps tokens (B, N, D), the tensors of the network's along(B),
                 conditioning (B, D), the `further` inputs that `embed` returns and, if the network's needs_grid is
                 set, grid=(rows, columns) to tokens. It has a linear layer adaLN_modulation[1] and a method
                 multiply_adds like DiTBlock's (dit.py). It draws no random numbers (no dropout): they would differ
                 when activations are recomputed or a run is resumed.
    input_size   height and width S of the latents; a multiple of patch_size.
    num_classes  labels are 0..num_classes−1; num_classes itself is the null class. None: `embedder` is given instead.
    learn_sigma  True: twice the output channels, as in public DiT; the second half is unused here.
    init         "adaln_zero" (DiT's): modulations and last layer start at zero, so an untrained network outputs
                 0. "xavier": Xavier-uniform linear layers overwrite the zeros, as in the released TREAD code.
    embedder     function (hidden_size) → module that embeds the condition y as (B, D) or ((B, D), *further), and has
                 methods initialize() and check(y, batch) like those of LabelEmbedder; None: y are class labels, and a
                 LabelEmbedder is used.
    bottleneck   channels to which patches are projected before a second projection to D (JiT); None: directly to D.
    class_token  channels z of the feature that REG's class token embeds (class_token.py); None: no class token.

    Raises ValueError for sizes that do not fit together.
    """

    needs_grid = False
    skipped_return = True  # False: mask tokens replace the skipped ones after a route
    drops_path = False  # whether forward and forward_flops take path_drop, as SPRINT's do

    def __init__(
        self,
        make_block: Callable[[], nn.Module],
        input_size: int = 32,
        patch_size: int = 2,
        in_channels: int = 4,
        hidden_size: int = 1152,
        depth: int = 28,
        num_classes: int | None = 1000,
        learn_sigma: bool = False,
        init: Init = "adaln_zero",
        embedder: Callable[[int], nn.Module] | None = None,
        bottleneck: int | None = None,
        class_token: int | None = None,
    ) -> None:
        super().__init__()
        if input_size % patch_size:
            raise ValueError(f"input_size {input_size} is not a multiple of patch_size {patch_size}")
        check("init", init, Init)
        side = input_size // patch_size
        self.input_size, self.patch_size, self.in_channels = input_size, patch_size, in_channels
        self.num_classes, self.hidden_size = num_classes, hidden_size
        self.out_channels = 2 * in_channels if learn_sigma else in_channels
        self.grid, self.num_tokens = (side, side), side**2
        self.activation_checkpointing = False  # True: keep blocks' inputs only, recompute the rest in backward
        self.residual: Residual = "fp32"  # "bf16": under autocast tokens are bf16 between blocks; norms stay in fp32

        self.x_embedder = PatchEmbed(in_channels, patch_size, hidden_size, bottleneck)
        self.t_embedder = TimestepEmbedder(hidden_size)
        self.y_embedder = embedder(hidden_size) if embedder else LabelEmbedder(num_classes, hidden_size)
        self.register_buffer("pos_embed", sincos_positions(hidden_size, side)[None])
        self.blocks = nn.ModuleList(make_block() for _ in range(depth))
        self.final_layer = FinalLayer(hidden_size, patch_size**2 * self.out_channels, hidden_size)
        self.z_embedder = ClassToken(class_token, hidden_size) if class_token else None
        self.leading = int(self.z_embedder is not None)  # number of tokens before the patches
        self.initialize(init)

    def initialize(self, init: str) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        patches = self.x_embedder.proj
        nn.init.xavier_uniform_(patches.weight.view(patches.out_channels, -1))
        if patches.bias is not None:
            nn.init.zeros_(patches.bias)
        self.y_embedder.initialize()
        if init == "adaln_zero":
            nn.init.normal_(self.t_embedder.mlp[0].weight, std=0.02)
            nn.init.normal_(self.t_embedder.mlp[2].weight, std=0.02)
            for module in self.modules():
                if hasattr(module, "adaLN_modulation"):
                    nn.init.zeros_(module.adaLN_modulation[1].weight)
            nn.init.zeros_(self.final_layer.linear.weight)
        if self.z_embedder is not None:
            nn.init.zeros_(self.z_embedder.out.weight)

    def scale_positions(self, scale: float) -> None:
        """Recompute the fixed position embeddings from rows and columns that are multiplied by `scale`."""
        self.pos_embed.copy_(sincos_positions(self.hidden_size, self.grid[0], scale)[None])

    def compiled(self) -> list[nn.Module]:
        """Return the modules to pass to torch.compile one by one; blocks of equal sizes then share a compiled graph."""
        return [self.x_embedder, *self.blocks, self.final_layer]

    def along(self, batch: int) -> Sequence[Tensor]:
        """Return the blocks' inputs (batch, N, …) with a row per token, e.g. rotary tables; this class has none."""
        return ()

    def unpatchify(self, x: Tensor) -> Tensor:
        """Assemble the tokens' patches into latents: (B, N, p·p·C) → (B, C, S, S)."""
        (rows, columns), p = self.grid, self.patch_size
        x = x.view(-1, rows, columns, p, p, self.out_channels)
        return x.permute(0, 5, 1, 3, 2, 4).reshape(-1, self.out_channels, rows * p, columns * p)

    def null(self, count: int) -> Tensor:
        """Return the condition that means "no condition" for `count` samples: the null class, (count,) int64."""
        return torch.full((count,), self.num_classes, device=self.pos_embed.device)

    def tokens_run(self, routes: Sequence[Route]) -> list[int]:
        """Return, for each block, the number of tokens on which it runs under `routes`, not counting a class token."""
        tokens = [self.num_tokens] * len(self.blocks)
        for route in check_routes(routes, len(tokens)):
            if route.rejoins.removes:  # others, such as "stale", only reset the skipped tokens after the route
                kept = count_kept(route, self.num_tokens, self.grid)
                tokens[route.start : route.end + 1] = [kept] * (route.end + 1 - route.start)
        return tokens

    def forward_flops(self, routes: Sequence[Route] = (), attention: bool = True, upto: int | None = None) -> int:
        """Return one sample's forward FLOPs under `routes`: two per multiply-add of matrix products and token mixing.

        attention  False: linear layers only, without token mixing (in DiT the products of queries, keys and values).
        upto       index of the last block to count; the last layer is then not counted. None: count everything.
        """
        D, last = self.hidden_size, len(self.blocks) if upto is None else upto + 1
        run = (K + self.leading for K in self.tokens_run(routes))
        blocks = sum(block.multiply_adds(K, attention) for block, K in zip(self.blocks[:last], run))
        embedding = sum(weight.numel() for weight in self.x_embedder.parameters() if weight.ndim > 1)
        values = D * self.patch_size**2 * self.out_channels if upto is None else 0
        time, final = (WAVES + D) * D, 2 * D * D if upto is None else 0
        if self.z_embedder is not None:  # its embedding; its velocity, for which the last layer is modulated again
            blocks += self.z_embedder.width * D * (2 if upto is None else 1) + final
        return int(2 * (blocks + self.num_tokens * (embedding + values) + final + time))

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        y: Tensor,
        routes: Routes = (),
        record: Record | None = None,
        class_token: Tensor | None = None,
    ) -> Tensor:
        """Run the network: x (B, C, S, S), time input t (B,), labels y (B,) int64 → (B, out_channels, S, S).

        routes       pairs (Route, ids_keep (B, K)): a route's blocks run only on the K tokens with these indices. Or
                     pairs (Route, uniform draws (B, N)), from which the rule Route.select chooses ids_keep.
        record       receives each route's ids_keep, outputs of record.blocks, and any class token's predicted velocity.
        class_token  (B, z) noised feature; required if the network has a class token.
        """
        x, c, *shared = self.embed(x, t, y, class_token)
        x = self.run(self.called(self.blocks), x, c, *shared, routes=routes, record=record)
        if self.z_embedder is not None and record is not None:
            record.class_token = self.z_embedder.out(self.final_layer.modulated(x[:, :1], c)[:, 0])
        return self.unpatchify(self.final_layer(x[:, self.leading :], c))

    def run(self, blocks: Sequence[Callable[..., Tensor]], x: Tensor, *shared: Tensor, **how: Any) -> Tensor:
        """Run blocks on tokens x, a class token included, with inputs that all tokens share, and return the tokens.
        `how` are arguments of run_blocks: routes and record, if any."""
        along, grid = self.along(len(x)), self.grid if self.needs_grid else None
        return run_blocks(blocks, x, *shared, along=along, grid=grid, leading=self.leading, layout=self.grid, **how)

    def called(self, blocks: Iterable[nn.Module]) -> list[Callable[..., Tensor]]:
        """Return the blocks, each wrapped in activation checkpointing if self.activation_checkpointing is set."""
        if not self.activation_checkpointing:
            return list(blocks)
        # nothing in the blocks is random, so no generator state is kept
        return [partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False) for block in blocks]

    def output_of(self, block: int, x: Tensor, t: Tensor, y: Tensor, class_token: Tensor | None = None) -> Tensor:
        """Return the output (B, N, D) of the block with index `block` on all tokens; later blocks do not run."""
        return self.run(self.blocks[: block + 1], *self.embed(x, t, y, class_token))[:, self.leading :]

    def embed(self, x: Tensor, t: Tensor, y: Tensor, class_token: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return (tokens, conditioning (B, D), *further). Tokens are (B, N, D), or (B, 1 + N, D) with a class token;
        `further` are other inputs that all tokens share, such as a text. Raises ValueError if inputs do not fit."""
        expected = (self.in_channels, self.input_size, self.input_size)
        if x.shape[1:] != expected:
            raise ValueError(f"x has shape {tuple(x.shape)}, but this network takes (B, *{expected})")
        self.y_embedder.check(y, len(x))
        tokens = self.x_embedder(x, self.pos_embed, self.residual)
        if self.z_embedder is not None:
            tokens = self.z_embedder.before(tokens, class_token)
        elif class_token is not None:
            raise ValueError("class_token is given, but this network has none")
        embedded = self.y_embedder(y)
        condition, *shared = embedded if isinstance(embedded, tuple) else (embedded,)
        return tokens, self.t_embedder(t) + condition, *shared
