"""Rules that choose which tokens a route keeps, and a table of the rules. A route's blocks run on kept tokens only.

Rules turn uniform noise into ids_keep (B, K) int64, the indices of the kept tokens in raster order. They draw no random
numbers: the caller draws `torch.rand(B, N, generator=…)` for the global batch from a generator seeded by (seed, step),
and passes each process its rows, so that ids don't depend on the number of processes.

RULES maps names to rules; Route.select and the setting `model.routes.<n>.select` are such names. For a new rule,
subclass Token and override what differs. A rule with a method `scores`, which rates tokens by their values, chooses
during the forward pass, in run_blocks (routing_module.py).

This file needs only torch and routing_module.py.

Shapes: B samples, N = H·W tokens of an H×W grid in raster order, K kept tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from routing_module import RULES, Grid, Route, check_count, draw_ids, keep_prefix, num_keep

Some = Tensor | None


def force(noise: Tensor, keep: Tensor, selection_ratio: float) -> Tensor:
    """Return `noise` (B, N) with −∞ where `keep` (B, N) bool is true: rules keep the tokens with the smallest numbers.
    Raises ValueError if `keep` has another shape or dtype, or marks more than K = N − int(N·selection_ratio) tokens in
    a sample. Counting them synchronises with the GPU if `keep` is on one."""
    _check_mask(noise, keep)
    most, kept = int(keep.sum(dim=1).max()) if len(keep) else 0, num_keep(noise.shape[1], selection_ratio)
    if most > kept:
        held = f"force_keep holds {most} of a sample's {noise.shape[1]} tokens (or rows)"
        raise ValueError(f"{held}, but selection_ratio {selection_ratio} keeps {kept}")
    return noise.masked_fill(keep, -math.inf)


def row_ids(noise: Tensor, selection_ratio: float, grid: Grid, force_keep: Tensor | None = None) -> Tensor:
    """Return ids_keep (B, K) of H − int(H·ratio) whole rows of the grid, for blocks that use neighbouring tokens.

    noise       (B, N) uniform numbers; the rows whose first tokens have the smallest numbers are kept.
    grid        (H, W); the kept rows form a grid (K / W, W). Raises ValueError unless H·W = N.
    force_keep  (B, N) bool; rows with a marked token are kept (ValueError if there are too many). None: none is marked.
    """
    height, width = _check_grid(noise, grid)
    chances = noise.view(-1, height, width)[:, :, 0]
    if force_keep is not None:
        _check_mask(noise, force_keep)
        chances = force(chances, force_keep.view(-1, height, width).any(dim=2), selection_ratio)
    rows = draw_ids(chances, selection_ratio)  # (B, K / W)
    return (rows[:, :, None] * width + torch.arange(width, device=rows.device)).flatten(1)


def _by_groups(values: Tensor, grid: Grid) -> Tensor:
    """Split the grid into 2×2 groups: (B, H·W) → (B, H/2, W/2, 4)."""
    height, width = grid
    return values.view(-1, height // 2, 2, width // 2, 2).transpose(2, 3).flatten(3)


class Token:
    """Rule "token": each sample keeps random tokens of its own. Other rules are derived from this class."""

    keeps_grid = False  # whether the kept tokens form a grid, as blocks that look at neighbours need
    description = ""  # text after the number of tokens in a run's summary
    ratio = None  # the only selection_ratio that the rule supports; None: any
    scores = None  # None, or a function from the tokens (B, N, D) before the route to scores (B, N)

    def choose(self, route: Route, draws: Tensor, grid: Grid | None, keep: Some, scores: Some) -> Tensor:
        """Return ids_keep (B, K): the tokens with the largest scores (B, N) or, if scores is None, the smallest uniform
        draws (B, N). `keep` (B, N) bool marks tokens that must be kept; more than K of them raise ValueError. Only
        rules for rows and groups need `grid`, the tokens' rows and columns."""
        if scores is not None and scores.shape != draws.shape:
            raise ValueError(f"scores of {route.select} are {tuple(scores.shape)}, but must be {tuple(draws.shape)}")
        draws = draws if scores is None else -scores
        if keep is not None:
            draws = force(draws, keep, route.selection_ratio)
        return draw_ids(draws, route.selection_ratio)

    def count(self, route: Route, num_tokens: int, grid: Grid | None) -> int:
        """Return how many of num_tokens tokens are kept. Rules for rows use the tokens' grid (H, W), if known."""
        return num_keep(num_tokens, route.selection_ratio)

    def check_route(self, route: Route) -> None:
        """Raise ValueError if the rule does not support the route's selection_ratio."""
        if self.ratio not in (None, route.selection_ratio):
            given = f"selection_ratio is {route.selection_ratio}"
            raise ValueError(f"{given}, but must be {self.ratio} with select={route.select}")

    def check_grid(self, grid: Grid) -> tuple[str, int]:
        """Return the unit that the rule selects and the number of such units in a grid (H, W), e.g. ("row", H), for
        messages. Raises ValueError if the grid does not suit the rule."""
        return "token", math.prod(grid)

    def with_ratio(self, route: Route, ratio: float) -> Route:
        return replace(route, selection_ratio=ratio)

    def for_sampling(self, route: Route) -> Route:
        """Return the route for sampling, where kept tokens must not depend on the other samples of a batch: `route`, or
        a copy with another rule if this rule looks at other samples."""
        return route


class Row(Token):
    """Rule "row": each sample keeps random rows of the token grid."""

    keeps_grid, description = True, " in whole rows"

    def choose(self, route: Route, draws: Tensor, grid: Grid | None, keep: Some, scores: Some) -> Tensor:
        return row_ids(draws, route.selection_ratio, grid, keep)

    def count(self, route: Route, num_tokens: int, grid: Grid | None) -> int:
        if grid is None:
            return num_keep(num_tokens, route.selection_ratio)
        return num_keep(grid[0], route.selection_ratio) * grid[1]

    def check_grid(self, grid: Grid) -> tuple[str, int]:
        return "row", grid[0]


class Shared(Token):
    """Rule "shared": all samples of a batch keep the same tokens, chosen by the first sample's draws, including all
    that force_keep (see choose_ids) marks in any sample. For models whose positions or masks have no batch axis. If a
    batch is split over processes or accumulation steps, give each part the same first row of draws and the same
    forced tokens, or the parts choose differently."""

    description = ", the same ones in a batch"

    def choose(self, route: Route, draws: Tensor, grid: Grid | None, keep: Some, scores: Some) -> Tensor:
        chances = draws[:1]
        if keep is not None:
            _check_mask(draws, keep)
            chances = force(chances, keep.any(dim=0, keepdim=True), route.selection_ratio)
        return draw_ids(chances, route.selection_ratio).expand(len(draws), -1)

    def for_sampling(self, route: Route) -> Route:
        return replace(route, select="token")


class Group(Token):
    """Rule "group": in each 2×2 group of the grid a sample keeps the token with the smallest random number, as SPRINT
    does. selection_ratio, the fraction not kept, must be 0.75; force_keep may mark at most one token of each group."""

    description, ratio = ", one of each 2×2", 0.75

    def choose(self, route: Route, draws: Tensor, grid: Grid | None, keep: Some, scores: Some) -> Tensor:
        height, width = _check_grid(draws, grid)
        self.check_grid(grid)
        if keep is not None:
            _check_mask(draws, keep)
            if len(draws) and (most := int(_by_groups(keep, grid).sum(dim=3).max())) > 1:
                raise ValueError(f"force_keep holds {most} tokens of a 2×2 group, but select=group keeps one of each")
            draws = draws.masked_fill(keep, -1.0)
        place = _by_groups(draws, grid).argmin(dim=3)  # (B, H/2, W/2) of 0..3: upper left, upper right, lower left, …
        row = 2 * torch.arange(height // 2, device=draws.device)[:, None] + place // 2
        column = 2 * torch.arange(width // 2, device=draws.device) + place % 2
        return (row * width + column).flatten(1).sort(dim=1).values

    def check_grid(self, grid: Grid) -> tuple[str, int]:
        if grid[0] % 2 or grid[1] % 2:
            grown = f"a grid of {grid[0]}×{grid[1]} tokens is odd: select=token takes any"
            raise ValueError(f"select=group keeps one token of each 2×2 group, but {grown}")
        return super().check_grid(grid)

    def with_ratio(self, route: Route, ratio: float) -> Route:
        return replace(route, selection_ratio=ratio, select=route.select if ratio == self.ratio else "token")


@dataclass(frozen=True)
class LargestNorm(Token):
    """Rule "norm": tokens are kept at random without replacement, with probabilities proportional to
    exp(z / temperature). z is the logarithm of a token's norm, standardised within its sample. Temperature 0 keeps the
    tokens with the largest norms; a high temperature approaches the rule "token"."""

    temperature: float = 1.0
    description = " by their norm"

    def scores(self, tokens: Tensor) -> Tensor:
        norms = tokens.float().norm(dim=2).clamp(min=1e-12).log()
        std, mean = torch.std_mean(norms, dim=1, keepdim=True)
        return (norms - mean) / std.clamp(min=1e-6)

    def choose(self, route: Route, draws: Tensor, grid: Grid | None, keep: Some, scores: Some) -> Tensor:
        gumbel = -(-draws.clamp(1e-9, 1 - 1e-7).log()).log()
        return super().choose(route, draws, grid, keep, scores + self.temperature * gumbel)


BUILT_IN = {"token": Token(), "row": Row(), "shared": Shared(), "group": Group(), "norm": LargestNorm()}
RULES |= BUILT_IN


def choose_ids(
    route: Route, noise: Tensor, grid: Grid | None = None, force_keep: Tensor | None = None, prefix: int = 0
) -> Tensor:
    """Return a route's ids_keep (B, prefix + K) int64, the indices of the kept tokens, chosen by the rule route.select.

    noise       (B, N) uniform numbers for the tokens that may be skipped.
    grid        (H, W) of these tokens, required by select="row" and "group".
    force_keep  (B, N) bool, true for tokens that must be kept; the number of kept tokens, K, does not change.
    prefix      number of further tokens before these N (class, register or text tokens), which are always kept.

    Raises ValueError for a grid or force_keep that does not fit, for rules that need the tokens' values (use
    run_blocks), and for a rule of your own whose `count` returns another number than K.
    """
    rule = RULES[route.select]
    if rule.scores is not None:
        raise ValueError(f'select="{route.select}" scores the tokens before the route: run_blocks takes (route, draws)')
    ids = rule.choose(route, noise, grid, force_keep, None)
    check_count(route, ids, noise.shape[1], grid)
    return keep_prefix(ids, prefix) if prefix else ids


def pair(route: Route, draws: Tensor, grid: Grid) -> tuple[Route, Tensor]:
    """Return (route, ids_keep (B, K)), an entry for a network's argument `routes`; the uniform numbers `draws` (B, N)
    decide the ids. Rules that need the tokens' values choose later, in the network: for them return (route, draws)."""
    return route, draws if RULES[route.select].scores is not None else choose_ids(route, draws, grid)


def with_ratio(route: Route, ratio: float) -> Route:
    """Return the route with another selection_ratio; select="group" becomes "token" unless the ratio is 0.75."""
    return RULES[route.select].with_ratio(route, ratio)


def count_kept(route: Route, num_tokens: int, grid: Grid | None = None) -> int:
    """Return how many of `num_tokens` tokens a route keeps. Only rules for whole rows need the tokens' `grid`."""
    return RULES[route.select].count(route, num_tokens, grid)


def describe_route(route: Route, num_tokens: int, grid: Grid) -> str:
    """Return a text such as "r(2→8) keeps 8 of 16 tokens" for a resolved route (Route.resolve)."""
    comma = "" if str(route).endswith(")") else ","
    return f"{route}{comma} keeps {count_kept(route, num_tokens, grid)} of {num_tokens} tokens"


def check_ratio(route: Route, grid: Grid, key: str) -> None:
    """Raise ValueError, naming the setting `key`, if a selection_ratio above 0 skips no token of the grid (H, W) or
    keeps a single one, which could attend only to itself. A Route itself allows both; settings do not."""
    ratio, tokens = route.selection_ratio, math.prod(grid)
    kept = count_kept(route, tokens, grid)
    unit, units = RULES[route.select].check_grid(grid)
    if ratio and kept == tokens:
        less = f"less than one {unit} of the {grid[0]}×{grid[1]} tokens"
        raise ValueError(f"{key} {ratio:g} routes nothing around: it is {less}")
    if ratio and kept == 1:
        alone = f"{key} {ratio:g} keeps a single token of the {grid[0]}×{grid[1]}, which would see no other"
        raise ValueError(f"{alone}: a ratio of at most {1 - 2 / units:.4g} keeps more")


def _check_grid(noise: Tensor, grid: Grid | None) -> Grid:
    if grid is None or noise.shape[1:] != (math.prod(grid),):
        raise ValueError(f"noise (B, N) has shape {tuple(noise.shape)}, grid is {grid}: it must be (H, W) with N = H·W")
    return grid


def _check_mask(noise: Tensor, keep: Tensor) -> None:
    if keep.shape != noise.shape or keep.dtype != torch.bool:
        raise ValueError(f"force_keep is {tuple(keep.shape)} {keep.dtype}, not {tuple(noise.shape)} of torch.bool")


@dataclass(frozen=True)
class RatioSchedule:
    """A selection_ratio for all routes that goes from `start` to `end` between training steps `first` and `last`.

    start, end  ratios in [0, 1).
    shape       the course of the change: "linear", or "cosine" (flat at both ends).
    levels      the number of different ratios, 2 to 16 (else ValueError); compiled blocks have one graph for each.
    """

    start: float
    end: float
    last: int
    first: int = 0
    shape: str = "linear"
    levels: int = 8

    def __post_init__(self) -> None:
        for name, ratio in (("start", self.start), ("end", self.end)):
            if not 0 <= ratio < 1:
                raise ValueError(f"{name} is {ratio}, but must lie in [0, 1): a selection_ratio")
        if not 0 <= self.first < self.last:
            raise ValueError(f"first {self.first} and last {self.last} must be steps, 0 <= first < last")
        if self.shape not in ("linear", "cosine"):
            raise ValueError(f"shape is {self.shape!r}, but must be linear or cosine")
        if not 2 <= self.levels <= 16:
            raise ValueError(f"levels is {self.levels}, but must lie in 2..16: each is compiled anew")

    def at(self, step: int) -> float:
        """Return the selection_ratio at training step `step` (0, 1, …)."""
        done = min(max((step - self.first) / (self.last - self.first), 0.0), 1.0)
        if self.shape == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        level = min(int(done * self.levels), self.levels - 1) / (self.levels - 1)
        return (1 - level) * self.start + level * self.end  # both ends exactly

    def apply(self, routes: Sequence[Route], step: int) -> tuple[Route, ...]:
        return tuple(replace(route, selection_ratio=self.at(step)) for route in routes)
