"""Token routing for efficient diffusion training (TREAD; Krause et al., ICCV 2025, arXiv 2501.04765).

A route r(i→j) removes a random subset of the tokens before block i and puts them back, unchanged, after block j. Blocks
i to j, both included, run on the kept tokens only. Routes add no parameters, and without them the network is unchanged.

A network uses routes in one line: `x = run_blocks(self.blocks, x, c, routes=routes)`, where `routes` is a sequence of
pairs (Route, ids_keep) and ids_keep (B, K) holds the indices of the kept tokens. The caller draws the indices with
`draw_ids(torch.rand(B, N), ratio)`. Nothing in the network is random: callers can draw from per-image seeds, and
activation recomputation runs on the same tokens. More rules that choose tokens are in tread/routing/ids.py, and routes
for models that can't be edited in tread/routing/hooks.py. This file needs only torch.

Shapes: B samples, N tokens, K kept tokens, D channels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

FP32_CHOICES = ("auto", "end", "next", "off")
Grid = tuple[int, int]  # rows and columns of tokens


class Table(dict):
    """A dict of named entries, to which users may add. An entry must be an instance of `kind`; with kind=None it may be
    any object but a class. table[name] = entry and table |= entries raise TypeError for any other entry."""

    def __init__(self, kind: type | None, entries: Mapping | tuple = ()) -> None:
        super().__init__(entries)
        self.kind = kind

    def __setitem__(self, name: str, entry: object) -> None:
        if isinstance(entry, type) if self.kind is None else not isinstance(entry, self.kind):
            must = "no class, but an object of it" if self.kind is None else f"of {self.kind}"
            raise TypeError(f"the table's entry {name!r} is {entry!r}, but must be {must}")
        super().__setitem__(name, entry)

    def __ior__(self, entries: Mapping) -> "Table":
        for name, entry in entries.items():
            self[name] = entry
        return self


RULES = Table(None)  # name (Route.select) → rule; tread/routing/ids.py adds its rules, and you can add yours


@dataclass(frozen=True)
class Route:
    """A route r(start→end): some tokens skip blocks `start` to `end`, both included. Raises ValueError for bad values.

    start, end       0-based block indices; negative ones count from the end of the network.
    selection_ratio  fraction of the tokens that skip the blocks, in [0, 1).
    fp32             block that runs in fp32 under autocast, for stability as in TREAD's paper: "end" is block `end`,
                     "next" the one after, "off" none; "auto" is "end" if at most 3 blocks follow the route, else "off".
                     Half-precision weights under autocast need "off".
    select           name of the rule that chooses the kept tokens, a key of RULES (tread/routing/ids.py).
    rejoin           index of a block, at most `start` (None: `start`; negative ones count from the end). The skipped
                     tokens are saved before this block and put back, unchanged, after block `end`. Or a key of REJOINS:
                     "stale" runs all tokens, then, after `end`, resets the skipped ones to their values before `start`.
    """

    start: int
    end: int
    selection_ratio: float = 0.5
    fp32: str = "auto"
    select: str = "token"
    rejoin: int | str | None = None

    def __post_init__(self) -> None:
        if not (hasattr(self.start, "__index__") and hasattr(self.end, "__index__")):
            raise ValueError(f"start is {self.start!r} and end {self.end!r}, but both must be block numbers (int)")
        if not 0.0 <= self.selection_ratio < 1.0:
            raise ValueError(f"selection_ratio is {self.selection_ratio}, but must lie in [0, 1)")
        if self.fp32 not in FP32_CHOICES:
            raise ValueError(f"fp32 is {self.fp32!r}, but must be one of {', '.join(FP32_CHOICES)}")
        if hasattr(self.rejoin, "__index__"):
            object.__setattr__(self, "rejoin", self.rejoin.__index__())
        elif self.rejoin is not None and self.rejoin not in REJOINS:
            names = ", ".join(name for name in REJOINS if name)
            raise ValueError(f"rejoin is {self.rejoin!r}, but must be null, a block, {names} or a plugin's")
        if RULES:
            if self.select not in RULES:
                raise ValueError(f"select is {self.select!r}, but must be one of {', '.join(RULES)}, or a plugin's")
            RULES[self.select].check_route(self)

    @classmethod
    def for_depth(cls, depth: int, selection_ratio: float = 0.5, fp32: str = "auto", select: str = "token") -> "Route":
        """Return the TREAD paper's route r(2→depth−4), e.g. 2→24 for 28 blocks. Raises ValueError if depth < 6."""
        if depth - 4 < 2:
            raise ValueError(f"the rule gives r(2→{depth - 4}) at depth {depth}, but needs at least 6: state both ends")
        return cls(2, depth - 4, selection_ratio, fp32, select)

    def resolve(self, depth: int) -> "Route":
        """Return this route for a network of `depth` blocks, with negative indices, fp32="auto" and rejoin=None made
        explicit. Raises ValueError for indices out of range or order, and for fp32="next" if no block follows."""
        given = {"start": self.start, "end": self.end, "rejoin": self.saved_before}
        for name, index in given.items():
            if not -depth <= index < depth:
                raise ValueError(f"route {name} {index} is out of range for {depth} blocks, -{depth} to {depth - 1}")
        start, end, rejoin = (index % depth for index in given.values())
        if start > end:
            raise ValueError(f"the route {self.start}→{self.end} is {start}→{end} in {depth} blocks, backwards")
        if rejoin > start:
            raise ValueError(f"route rejoin {self.rejoin} lies behind route start {start}, where tokens leave")
        fp32 = self.fp32
        if fp32 == "auto":
            fp32 = "end" if depth - 1 - end <= 3 else "off"
        if fp32 == "next" and end + 1 == depth:
            raise ValueError(f'fp32 is "next", but no block follows route end {end} of {depth} blocks')
        named = self.rejoin if isinstance(self.rejoin, str) else rejoin
        return replace(self, start=start, end=end, fp32=fp32, rejoin=named)

    @property
    def fp32_block(self) -> int | None:
        """Index of the block that runs in fp32, or None. Valid only for a route that `resolve` returned."""
        return {"end": self.end, "next": self.end + 1}.get(self.fp32)

    @property
    def rejoins(self) -> "Rejoin":
        """How the skipped tokens return: REJOINS[rejoin] if `rejoin` is a name like "stale", else REJOINS[None]."""
        return REJOINS[self.rejoin if isinstance(self.rejoin, str) else None]

    @property
    def saved_before(self) -> int:
        """Index of the block before which skipped tokens are saved; not negative if `resolve` returned the route."""
        return self.rejoin if isinstance(self.rejoin, int) else self.start

    def __str__(self) -> str:
        """Describe a resolved route: "r(2→8)", "r(2→8), rejoin=stale" or "r(2→8), rejoins as before block 1"."""
        rejoins = f", rejoin={self.rejoin}" if isinstance(self.rejoin, str) else ""
        rejoins = rejoins if self.saved_before == self.start else f", rejoins as before block {self.rejoin}"
        return f"r({self.start}→{self.end}){rejoins}"


Routes = Sequence[tuple[Route, Tensor]]  # pairs (route, ids_keep (B, K))


def check_routes(routes: Sequence[Route], depth: int) -> tuple[Route, ...]:
    """Return the routes resolved for `depth` blocks (Route.resolve) and sorted by start. Raises ValueError for routes
    that share a block, and for a Route.rejoin inside another route, whose skipped tokens are missing there."""
    resolved = tuple(sorted((r.resolve(depth) for r in routes), key=lambda r: r.start))
    for first, second in zip(resolved, resolved[1:]):
        if second.start <= first.end:
            raise ValueError(f"routes {first.start}→{first.end} and {second.start}→{second.end} overlap")
    for route in resolved:
        for other in resolved:  # before block other.start and after block other.end no token is missing
            if other.start < route.saved_before <= other.end and other is not route:
                inside = f"block {route.rejoin}, which lies in the route {other.start}→{other.end}"
                raise ValueError(f"route {route.start}→{route.end} rejoins as before {inside}")
    return resolved


def num_keep(num_tokens: int, selection_ratio: float) -> int:
    """Return K = N − int(N·ratio), the number of kept tokens out of N."""
    return num_tokens - int(num_tokens * selection_ratio)


def draw_ids(noise: Tensor, selection_ratio: float, sort: bool = True) -> Tensor:
    """Return the indices (B, K) int64 of K = num_keep(N, selection_ratio) tokens; all subsets are equally likely.

    noise  (B, N) independent uniform numbers; a row's K smallest mark the kept tokens. NaN raises ValueError on a CPU.
    sort   True: each sample's indices ascend; False: they are in the order of their noise, smallest first.
    """
    if not 0.0 <= selection_ratio < 1.0:
        raise ValueError(f"selection_ratio is {selection_ratio}, but must lie in [0, 1)")
    if readable(noise) and noise.isnan().any():
        raise ValueError(f"noise holds {int(noise.isnan().sum())} NaN, but must be uniform numbers: torch.rand(B, N)")
    ids_keep = noise.argsort(dim=1, stable=True)[:, : num_keep(noise.shape[1], selection_ratio)]
    return ids_keep.sort(dim=1).values if sort else ids_keep


def check_ids(ids_keep: Tensor, batch: int, tokens: int | None) -> None:
    """Raise ValueError unless ids_keep is (batch, K) int64, K > 0, and a sample's indices are distinct and lie in
    0..`tokens` − 1 (None: N is unknown). Index values are checked on a CPU only, to avoid a GPU synchronisation."""
    shape, most = tuple(ids_keep.shape), "" if tokens is None else f", K at most {tokens} tokens"
    fits = ids_keep.ndim == 2 and shape[0] == batch and 0 < shape[1] <= (tokens or shape[1])
    if not fits or ids_keep.dtype != torch.int64:
        raise ValueError(f"ids_keep has shape {shape}, {ids_keep.dtype}, but must be ({batch}, K) int64, K > 0{most}")
    if readable(ids_keep) and batch:
        ordered = ids_keep.sort(dim=1).values
        low, high = int(ordered.min()), int(ordered.max())
        if low < 0 or (tokens is not None and high >= tokens):
            known = "begin at 0" if tokens is None else f"are 0 to {tokens - 1}"
            raise ValueError(f"ids_keep names tokens {low} to {high}, but they {known}")
        twice = (ordered[:, 1:] == ordered[:, :-1]).nonzero()
        if len(twice):
            row, column = twice[0].tolist()
            raise ValueError(f"ids_keep names token {ordered[row, column]} twice in sample {row}: name each token once")


def readable(values: Tensor) -> bool:
    """Return whether a tensor's values can be read without a GPU synchronisation or a graph break: True for plain CPU
    tensors outside compiled graphs, False for fake tensors."""
    return type(values) is Tensor and values.device.type == "cpu" and not torch.compiler.is_compiling()


class GatherRows(torch.autograd.Function):
    """Gathers the rows of a tensor (R, …) at distinct indices (S,) into (S, …). As no index is repeated, the backward
    pass writes each gradient to its row; Tensor.gather's would add gradients, on a GPU by atomic operations."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, indices: Tensor) -> Tensor:
        return rows.index_select(0, indices)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.shape = inputs[0].shape
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_zeros(ctx.shape).index_copy_(0, *ctx.saved_tensors, gradient), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent.index_select(0, *ctx.saved_tensors)


def gather_tokens(tokens: Tensor, ids_keep: Tensor) -> Tensor:
    """Gather the kept tokens in the order of ids_keep: (B, N, …), (B, K) → (B, K, …). Raises ValueError unless ids_keep
    is int64 and, checked on a CPU only, each sample's indices are distinct and lie in 0..N − 1."""
    given, batch = len(ids_keep), len(tokens)
    if given != batch:
        raise ValueError(f"ids of {given} samples for tokens of {batch}: each sample needs its own row (see expand)")
    check_ids(ids_keep, *tokens.shape[:2])
    if torch.compiler.is_compiling() or not tokens.is_contiguous():  # torch.compile traces no Function with a jvp
        index = ids_keep.view(*ids_keep.shape, *[1] * (tokens.ndim - 2)).expand(-1, -1, *tokens.shape[2:])
        return tokens.gather(1, index)
    return GatherRows.apply(tokens.flatten(0, 1), _rows(ids_keep, tokens)).unflatten(0, ids_keep.shape)


def scatter_tokens(saved: Tensor, kept: Tensor, ids_keep: Tensor) -> Tensor:
    """Return all tokens (B, N, …): `kept` (B, K, …) at the indices ids_keep (B, K), elsewhere `saved` (B, N, …).
    Gradients reach both inputs. Raises ValueError if shapes do not fit or, on a CPU, indices repeat or exceed N − 1."""
    check_ids(ids_keep, *saved.shape[:2])
    if kept.shape != (*ids_keep.shape, *saved.shape[2:]):
        said = f"{tuple(kept.shape)} kept tokens for ids of shape {tuple(ids_keep.shape)}"
        raise ValueError(f"{said} and all tokens of shape {tuple(saved.shape)}: each needs one id and the same width")
    rows, kept = _rows(ids_keep, saved), kept.flatten(0, 1).to(saved.dtype)
    return saved.flatten(0, 1).index_copy(0, rows, kept).view(saved.shape)


def _rows(ids_keep: Tensor, tokens: Tensor) -> Tensor:
    """Return the kept tokens' indices (B·K,) among all B·N tokens. Indices out of range are an error on a GPU too."""
    batch, count = tokens.shape[:2]
    return torch.arange(batch * count, device=tokens.device).view(batch, count).gather(1, ids_keep).flatten()


class Rejoin(NamedTuple):
    """How a route treats the skipped tokens, and how they return after it.

    removes  True: the route's blocks run on the kept tokens only; False: on all tokens.
    join     function (saved tokens (B, N, D), last block's output (B, K or N, D), ids_keep (B, K)) → tokens (B, N, D).
    """

    removes: bool
    join: Callable[[Tensor, Tensor, Tensor], Tensor]


REJOINS = Table(Rejoin, {  # value of Route.rejoin → how tokens return; the entry None also serves block indices
    None: Rejoin(True, scatter_tokens),
    "stale": Rejoin(False, lambda saved, tokens, ids: scatter_tokens(saved, gather_tokens(tokens, ids), ids)),
})  # fmt: skip


def kept_grid(route: Route, ids_keep: Tensor, grid: Grid) -> Grid:
    """Return (rows, columns) of the kept tokens for a route that keeps whole rows of `grid`. Raises ValueError if its
    rule does not, or if ids_keep (B, K) is not whole rows in raster order (on a GPU, only K is checked)."""
    width = grid[1]
    if route.select in RULES and not RULES[route.select].keeps_grid:
        named = f"the route {route.start}→{route.end} selects by {route.select!r}"
        raise ValueError(f'{named}, but these blocks need a grid of tokens: it takes select="row"')
    whole = ids_keep.shape[1] % width == 0
    if whole and readable(ids_keep):
        rows = ids_keep.view(len(ids_keep), -1, width)
        first = rows[:, :, :1]
        in_rows = (first % width == 0).all() and (rows == first + torch.arange(width)).all()
        whole = in_rows and (first.diff(dim=1) > 0).all()
    if not whole:
        rows = f"whole rows of the {grid[0]}×{width} grid in raster order"
        raise ValueError(f"ids_keep of the route {route.start}→{route.end} are not {rows}; row_ids draws such")
    return ids_keep.shape[1] // width, width


def times_written(tokens: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 if torch does not count (inference mode, compiled graphs)."""
    return 0 if torch.compiler.is_compiling() or tokens.is_inference() else tokens._version


def run_in_fp32(block: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Call a block without autocast, on inputs cast to fp32, and return its output in the first input's dtype."""
    with torch.autocast(inputs[0].device.type, enabled=False):
        given = block(*(a.float() if a.is_floating_point() else a for a in inputs))
    dtype = inputs[0].dtype
    return tuple(part.to(dtype) for part in given) if isinstance(given, tuple) else given.to(dtype)


@dataclass
class Record:
    """Collects block outputs and token indices during a forward pass.

    blocks   indices of the blocks whose outputs the caller wants.
    outputs  block index → (output (B, K, D), ids_keep (B, K)); if all tokens run, (output (B, N, D), None).
    ids      the ids_keep (B, K) used by each route, in the caller's order of routes.
    class_token  velocity (B, z) that the network predicts for REG's class token, a noised feature of z channels
             (tread/models/class_token.py); None: the network has no such token.
    """

    blocks: Sequence[int] = ()
    outputs: dict[int, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    ids: list[Tensor] = field(default_factory=list)
    class_token: Tensor | None = None


def settle_ids(route: Route, chosen: Tensor, tokens: Tensor, grid: Grid | None = None) -> Tensor:
    """Return a route's ids_keep (B, K) int64. `chosen` is ids_keep itself, or uniform random numbers (B, N) from which
    the rule route.select chooses ids_keep. The rule may also score `tokens` (B, N, D); if it keeps whole rows, or one
    token of each 2×2 group, it needs their `grid` (H, W). Raises ValueError for ids_keep that do not fit the tokens."""
    if chosen.is_floating_point():
        if route.select not in RULES:
            raise ValueError(f"{route.select!r} is no rule known here (of tread/routing/ids.py): give ids_keep")
        with torch.no_grad():
            rule = RULES[route.select]
            scores = None if rule.scores is None else rule.scores(tokens).nan_to_num()
            chosen = rule.choose(route, chosen, grid, None, scores)
            check_count(route, chosen, tokens.shape[1], grid)
    check_ids(chosen, *tokens.shape[:2])
    return chosen


def check_count(route: Route, ids_keep: Tensor, num_tokens: int, grid: Grid | None) -> None:
    """Raise ValueError unless K of ids_keep (B, K) is what the rule's method `count`, used for FLOP counts, returns."""
    says = RULES[route.select].count(route, num_tokens, grid)
    if ids_keep.shape[1:] != (says,):
        given = f"the rule select={route.select} chose ids of shape {tuple(ids_keep.shape)}"
        raise ValueError(f"{given}, but its `count` says that it keeps {says} of {num_tokens} tokens")


def run_blocks(
    blocks: Sequence[Callable[..., Tensor]],
    tokens: Tensor,
    *shared: Tensor,
    routes: Routes = (),
    along: Sequence[Tensor] = (),
    grid: Grid | None = None,
    record: Record | None = None,
    leading: int = 0,
    layout: Grid | None = None,
) -> Tensor:
    """Run blocks in order under routes and return the tokens (B, N, D).

    blocks  callables (tokens, *along, *shared) → tokens. Outside of routes a block may return (tokens, extra) instead,
            extra (B, N, …): later blocks then get extra as the last of `along`.
    tokens  (B, N, D).
    shared  further inputs of every block, without a token axis (e.g. the conditioning).
    routes  pairs (Route, ids_keep (B, K) int64): blocks get these tokens, in this order; Route.selection_ratio has no
            effect. Or pairs (Route, uniform draws (B, N)): right before block `start` the rule Route.select chooses
            ids_keep from the draws. It may also use the tokens' values, as the rule "norm" does.
    along   tensors (B, N, …) with one row per token (e.g. rotary tables). On a route, blocks get the kept tokens' rows.
    grid    (rows, columns) of the tokens in raster order, which every block then gets as its argument `grid`. On a
            route it is the grid of the kept tokens, so the route must select whole rows.
    record  receives each route's ids_keep and the outputs of the blocks in record.blocks.
    leading number of tokens at the front, such as a class token, that every route keeps. The indices and draws in
            `routes` and the contents of `record` leave these tokens out; index 0 is the first token after them.
    layout  (rows, columns) of the tokens for rules that need them, if blocks take no grid and `grid` is None.

    Raises ValueError for arguments that do not fit each other, RuntimeError if a block changed saved tokens in place.
    """
    if grid is not None and grid[0] * grid[1] != tokens.shape[1]:
        raise ValueError(f"a grid of {grid[0]}×{grid[1]} does not hold {tokens.shape[1]} tokens")
    for tensor in along:
        if tensor.shape[:2] != tokens.shape[:2]:
            raise ValueError(f"along has shape {tuple(tensor.shape)}, but tokens begin with {tuple(tokens.shape[:2])}")
    if routes and isinstance(routes[0], Route):
        raise ValueError("routes is (route, ids), but must be a sequence of such pairs: routes=[(route, ids)]")
    resolved = check_routes([route for route, _ in routes], len(blocks))
    given = {route.resolve(len(blocks)).start: ids for route, ids in routes}
    starting, ending = {route.start: route for route in resolved}, {route.end: route for route in resolved}
    in_fp32 = {route.fp32_block for route in resolved}
    device = tokens.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)

    record = record or Record()
    record.ids = list(given.values())
    seen, shape, ids_here = along, grid, None
    saved = {}  # route.end → the tokens saved for that route, and their times_written
    for index, block in enumerate(blocks):
        saved |= {route.end: (tokens, times_written(tokens)) for route in resolved if route.saved_before == index}
        if route := starting.get(index):
            chosen = record.ids[list(given).index(index)] = settle_ids(
                route, given[index], tokens[:, leading:], grid or layout
            )
            ids_keep = keep_prefix(chosen, leading) if leading else chosen
            if route.rejoins.removes:
                shape = None if grid is None else kept_grid(route, chosen, grid)
                seen, ids_here = [gather_tokens(tensor, ids_keep) for tensor in along], chosen
                tokens = gather_tokens(tokens, ids_keep)
        call = block if shape is None else partial(block, grid=shape)
        if autocast and index in in_fp32:
            call = partial(run_in_fp32, call)
        tokens = call(tokens, *seen, *shared)
        if isinstance(tokens, tuple):
            if ids_here is not None:
                raise ValueError(f"block {index} hands something on, but on a route it lacks the skipped tokens' part")
            tokens, handed_on = tokens
            along = seen = [*along, handed_on]
        if index in record.blocks:
            record.outputs[index] = tokens[:, leading:], ids_here
        if route := ending.get(index):
            tokens = _rejoin(route, *saved.pop(index), tokens, ids_keep)
            seen, shape, ids_here = along, grid, None
    return tokens


def keep_prefix(ids_keep: Tensor, prefix: int) -> Tensor:
    """Shift the indices by `prefix` and put 0..prefix−1 before them: (B, K) → (B, prefix + K)."""
    first = torch.arange(prefix, device=ids_keep.device).expand(len(ids_keep), -1)
    return torch.cat([first, ids_keep + prefix], dim=1)


def _rejoin(route: Route, before: Tensor, written: int, tokens: Tensor, ids_keep: Tensor) -> Tensor:
    """Return the tokens (B, N, D) after a route: its last block's output `tokens`, joined with the saved `before`.
    Raises RuntimeError if times_written(before) is no longer `written`, its value when the tokens were saved, and
    ValueError if the join returns another shape."""
    if times_written(before) != written:
        raise RuntimeError("a block before the start of a route wrote into its inputs, which the skipped tokens need")
    joined = route.rejoins.join(before, tokens, ids_keep)
    if joined.shape != before.shape:
        raise ValueError(f"rejoin={route.rejoin} returned {tuple(joined.shape)}, but must return {tuple(before.shape)}")
    return joined
