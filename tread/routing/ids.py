"""Rules that choose which tokens a route keeps: plain functions from uniform noise to ids, and a table of them.

Each returns ids_keep (B, K) int64 in raster order, for run_blocks or attach_routes. K is the same for all samples.
None of them draws: the caller draws `torch.rand(B, N, generator=…)` for the whole batch, from a generator seeded by
(seed, step), and passes the rows of its part of the batch. So the ids do not depend on the number of processes.

A rule is an object in RULES, under the name that Route.select and `model.routes.<n>.select` take: derive it from Token
and override what differs. A rule that looks at the tokens themselves has `scores`, which run_blocks calls.

This file needs only torch and routing_module.py.

Shapes: B samples, N = H·W tokens of an H×W grid in raster order, K kept tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from routing_module import RULES, Grid, Route, draw_ids, num_keep

Some = Tensor | None


def force(noise: Tensor, keep: Tensor, selection_ratio: float) -> Tensor:
    """Noise (B, N) by which tokens stay where keep (B, N) is true, and the others by chance; their number is the same.
    Raises ValueError if a sample forces more tokens than are kept; if the mask is on a GPU, the check waits for it."""
    _check_mask(noise, keep)
    most, kept = int(keep.sum(dim=1).max()) if len(keep) else 0, num_keep(noise.shape[1], selection_ratio)
    if most > kept:
        raise ValueError(
            f"force_keep holds {most} of a sample's {noise.shape[1]} tokens (or rows), but selection_ratio "
            f"{selection_ratio} keeps {kept}"
        )
    return noise.masked_fill(keep, -math.inf)


def row_ids(noise: Tensor, selection_ratio: float, grid: Grid, force_keep: Tensor | None = None) -> Tensor:
    """Keep whole rows of the grid, for blocks that look at neighbours: H − int(H·ratio) of them, in order.

    noise       (B, N); the first number of each row decides.
    grid        (H, W); the kept rows form a grid (K / W, W).
    force_keep  (B, N) bool; a row stays if one of its tokens must.
    """
    height, width = _check_grid(noise, grid)
    chances = noise.view(-1, height, width)[:, :, 0]
    if force_keep is not None:
        _check_mask(noise, force_keep)
        chances = force(chances, force_keep.view(-1, height, width).any(dim=2), selection_ratio)
    rows = draw_ids(chances, selection_ratio)  # (B, K / W)
    return (rows[:, :, None] * width + torch.arange(width, device=rows.device)).flatten(1)


def group_ids(noise: Tensor, grid: Grid, force_keep: Tensor | None = None) -> Tensor:
    """Keep one token of each 2×2 group of the grid, the one with the smallest number, as SPRINT does: (B, N / 4).

    noise       (B, N); the four tokens of a group are equally likely, whatever the other groups keep.
    grid        (H, W), both even.
    force_keep  (B, N) bool; at most one token of a group.
    """
    height, width = _check_grid(noise, grid)
    check_groups(grid)
    if force_keep is not None:
        _check_mask(noise, force_keep)
        most = int(_by_groups(force_keep, grid).sum(dim=3).max()) if len(noise) else 0
        if most > 1:
            raise ValueError(f"force_keep holds {most} tokens of a 2×2 group, but select=group keeps one of each")
        noise = noise.masked_fill(force_keep, -1.0)
    place = _by_groups(noise, grid).argmin(dim=3)  # (B, H/2, W/2) of 0..3: upper left, upper right, lower left, …
    row = 2 * torch.arange(height // 2, device=noise.device)[:, None] + place // 2
    column = 2 * torch.arange(width // 2, device=noise.device) + place % 2
    return (row * width + column).flatten(1).sort(dim=1).values


def check_groups(grid: Grid) -> None:
    """Raise ValueError for a grid (H, W) without whole 2×2 groups."""
    if grid[0] % 2 or grid[1] % 2:
        raise ValueError(
            f"select=group keeps one token of each 2×2 group, but a grid of {grid[0]}×{grid[1]} tokens is odd: "
            "select=token takes any grid"
        )


def _by_groups(values: Tensor, grid: Grid) -> Tensor:
    """(B, H·W) → (B, H/2, W/2, 4)."""
    height, width = grid
    return values.view(-1, height // 2, 2, width // 2, 2).transpose(2, 3).flatten(3)


def shared_ids(noise: Tensor, selection_ratio: float, force_keep: Tensor | None = None) -> Tensor:
    """Keep the same tokens in all samples, chosen by the first sample's numbers: (B, K).

    For models whose positions or masks have no batch axis. If a batch is split over processes or accumulation steps,
    pass every part the same first row (and the same forced tokens), or the parts choose differently.
    force_keep  (B, N) bool; a token stays if it must stay in any sample.
    """
    chances = noise[:1]
    if force_keep is not None:
        _check_mask(noise, force_keep)
        chances = force(chances, force_keep.any(dim=0, keepdim=True), selection_ratio)
    return draw_ids(chances, selection_ratio).expand(len(noise), -1)


class Token:
    """Single tokens, each sample its own."""

    keeps_grid = False  # whether the kept tokens form a grid, as blocks that look at neighbours need
    description = ""  # added to the number of tokens in a run's summary
    ratio = None  # the only selection_ratio that the rule supports; None: any
    scores = None  # or a function from the tokens (B, N, D) before the route to scores (B, N)

    def choose(self, route: Route, draws: Tensor, grid: Grid | None, keep: Some, scores: Some) -> Tensor:
        """ids_keep (B, K): the smallest of uniform draws (B, N), or the largest of scores (B, N) if the rule has them.

        keep  (B, N) bool, tokens that stay.
        """
        if scores is not None and scores.shape != draws.shape:
            raise ValueError(
                f"scores of select={route.select} are {tuple(scores.shape)}, but must be {tuple(draws.shape)}, (B, N)"
            )
        draws = draws if scores is None else -scores
        if keep is not None:
            draws = force(draws, keep, route.selection_ratio)
        return draw_ids(draws, route.selection_ratio)

    def count(self, route: Route, num_tokens: int, grid: Grid | None) -> int:
        """K, out of N tokens."""
        return num_keep(num_tokens, route.selection_ratio)

    def check_route(self, route: Route) -> None:
        """Raise ValueError for a ratio that the rule does not support."""
        if self.ratio not in (None, route.selection_ratio):
            raise ValueError(
                f"selection_ratio is {route.selection_ratio}, but must be {self.ratio} with select={route.select}: "
                "select=token takes other ratios"
            )

    def check_grid(self, grid: Grid) -> tuple[str, int]:
        """The unit that is chosen, for messages, and how many a grid (H, W) has. Raises ValueError for a misfit."""
        return "token", math.prod(grid)

    def with_ratio(self, route: Route, ratio: float) -> Route:
        """The route with another ratio, for sampling."""
        return replace(route, selection_ratio=ratio)

    def for_sampling(self, route: Route) -> Route:
        """The route to sample with, whose ids depend on each sample's own draws only."""
        return route


class Row(Token):
    """Whole rows of the token grid, each sample its own."""

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
    """The same tokens in the whole batch."""

    description = ", the same ones in a batch"

    def choose(self, route: Route, draws: Tensor, grid: Grid | None, keep: Some, scores: Some) -> Tensor:
        return shared_ids(draws, route.selection_ratio, keep)

    def for_sampling(self, route: Route) -> Route:
        return replace(route, select="token")


class Group(Token):
    """One token of each 2×2 group of the grid, each sample its own; its ratio is 0.75."""

    description, ratio = ", one of each 2×2", 0.75

    def choose(self, route: Route, draws: Tensor, grid: Grid | None, keep: Some, scores: Some) -> Tensor:
        return group_ids(draws, grid, keep)

    def check_grid(self, grid: Grid) -> tuple[str, int]:
        check_groups(grid)
        return super().check_grid(grid)

    def with_ratio(self, route: Route, ratio: float) -> Route:
        return replace(route, selection_ratio=ratio, select=route.select if ratio == self.ratio else "token")


@dataclass(frozen=True)
class LargestNorm(Token):
    """Tokens drawn without replacement, with probabilities proportional to exp(z / temperature), where z is the log of
    a token's norm, standardised over its sample.

    temperature  0: the tokens of the largest norm; towards infinity as `token`.
    """

    temperature: float = 1.0
    description = " by their norm"

    def scores(self, tokens: Tensor) -> Tensor:
        norms = tokens.float().norm(dim=2).clamp(min=1e-12).log()
        std, mean = torch.std_mean(norms, dim=1, keepdim=True)
        return (norms - mean) / std.clamp(min=1e-6)

    def choose(self, route: Route, draws: Tensor, grid: Grid | None, keep: Some, scores: Some) -> Tensor:
        gumbel = -(-draws.clamp(1e-9, 1 - 1e-7).log()).log()
        return super().choose(route, draws, grid, keep, scores + self.temperature * gumbel)


RULES |= {"token": Token(), "row": Row(), "shared": Shared(), "group": Group(), "norm": LargestNorm()}


def choose_ids(
    route: Route, noise: Tensor, grid: Grid | None = None, force_keep: Tensor | None = None, prefix: int = 0
) -> Tensor:
    """The ids of a route, by its `select` and its ratio: (B, prefix + K).

    noise       (B, N) uniform numbers for the tokens that may be skipped.
    grid        (H, W) of those tokens, for select="row" and "group".
    force_keep  (B, N) bool, tokens that stay; the number of kept tokens does not change.
    prefix      number of tokens before the N (class, register or text tokens), which always stay.

    Raises ValueError for a missing grid or one of another number of tokens, for more forced tokens than are
    kept, and for a rule that scores the tokens, which only run_blocks can call.
    """
    rule = RULES[route.select]
    if rule.scores is not None:
        raise ValueError(
            f'select="{route.select}" scores the tokens before the route: give run_blocks the pair (route, draws), and '
            "it chooses"
        )
    ids = rule.choose(route, noise, grid, force_keep, None)
    return keep_prefix(ids, prefix) if prefix else ids


def pair(route: Route, draws: Tensor, grid: Grid) -> tuple[Route, Tensor]:
    """A route as networks take it: with its ids_keep (B, K), or with the draws (B, N) if its rule scores tokens."""
    return route, draws if RULES[route.select].scores is not None else choose_ids(route, draws, grid)


def keep_prefix(ids_keep: Tensor, prefix: int) -> Tensor:
    """Ids among the tokens behind a prefix → ids of the whole sequence, with the prefix: (B, K) → (B, prefix + K)."""
    first = torch.arange(prefix, device=ids_keep.device).expand(len(ids_keep), -1)
    return torch.cat([first, ids_keep + prefix], dim=1)


def with_ratio(route: Route, ratio: float) -> Route:
    """The route with another ratio; select="group", whose ratio is fixed, becomes "token"."""
    return RULES[route.select].with_ratio(route, ratio)


def count_kept(route: Route, num_tokens: int, grid: Grid | None = None) -> int:
    """How many of N tokens choose_ids keeps for a route, without a prefix."""
    return RULES[route.select].count(route, num_tokens, grid)


def count_run(route: Route, num_tokens: int, grid: Grid | None = None) -> int:
    """How many of N tokens the blocks on a route run on: the kept ones, or all if the route removes none."""
    return count_kept(route, num_tokens, grid) if route.rejoins.removes else num_tokens


def describe_route(route: Route, num_tokens: int, grid: Grid) -> str:
    """A resolved route in words, like "r(2→8) keeps 8 of 16 tokens"."""
    comma = "" if str(route).endswith(")") else ","
    return f"{route}{comma} keeps {count_kept(route, num_tokens, grid)} of {num_tokens} tokens"


def check_ratio(route: Route, grid: Grid, key: str) -> None:
    """Raise ValueError, naming the key, for a ratio above 0 that skips no token or keeps a single one.

    In settings either is a mistake: a single token attends to nothing else. Route and the functions above allow both.
    """
    ratio, tokens, kept = route.selection_ratio, math.prod(grid), count_kept(route, math.prod(grid), grid)
    unit, units = RULES[route.select].check_grid(grid)
    if ratio and kept == tokens:
        raise ValueError(
            f"{key} {ratio:g} routes nothing around: it is less than one {unit} of the {grid[0]}×{grid[1]} tokens"
        )
    if ratio and kept == 1:
        raise ValueError(
            f"{key} {ratio:g} keeps a single token of the {grid[0]}×{grid[1]}, which would see no other: "
            f"a ratio of at most {1 - 2 / units:.4g} keeps more"
        )


def _check_grid(noise: Tensor, grid: Grid | None) -> Grid:
    if grid is None or noise.shape[1:] != (math.prod(grid),):
        raise ValueError(
            f"noise has shape {tuple(noise.shape)} and grid is {grid}, but must be (rows, columns), as many tokens as "
            "noise has columns"
        )
    return grid


def _check_mask(noise: Tensor, keep: Tensor) -> None:
    if keep.shape != noise.shape or keep.dtype != torch.bool:
        raise ValueError(
            f"force_keep is {tuple(keep.shape)} {keep.dtype}, but must be {tuple(noise.shape)} of torch.bool, as noise"
        )


@dataclass(frozen=True)
class RatioSchedule:
    """A selection_ratio, that of all routes, which changes over training steps in a few levels.

    start, end    the ratio up to step `first` and from step `last` on, in [0, 1).
    shape         "linear", or "cosine" (flat at both ends).
    levels        the number of different ratios, 2..16: compiled blocks have one graph for each.
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
        """The ratio of training step `step` (0, 1, …)."""
        done = min(max((step - self.first) / (self.last - self.first), 0.0), 1.0)
        if self.shape == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        level = min(int(done * self.levels), self.levels - 1) / (self.levels - 1)
        return (1 - level) * self.start + level * self.end  # which gives both ends exactly

    def apply(self, routes: Sequence[Route], step: int) -> tuple[Route, ...]:
        """The routes with the ratio of a step."""
        return tuple(replace(route, selection_ratio=self.at(step)) for route in routes)
