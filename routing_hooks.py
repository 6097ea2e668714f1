"""Routes for models that can't be edited: hooks on a ModuleList of blocks.

    routing = attach_routes(model.transformer_blocks, [Route(2, -4)])
    with routing.on(torch.rand(B, N)):      # without it the model is what it was
        loss = criterion(model(...))
        loss.backward()                     # inside too, where activations are computed again

Every block on a route gets the kept tokens, and its output goes back among the untouched others right
behind it, so that whatever a model does between two blocks sees all tokens. This is the same function
as gathering once and scattering once (run_blocks), for two more copies of the tokens a block.

What travels with the tokens is the caller's to say, since no name or shape tells it for certain:

    select(args, kwargs, ids) → args, kwargs     a block's inputs, with everything that has a token axis gathered
    join(output, saved, ids) → output            a block's output, put back; saved is (args, kwargs) before select

This file needs torch, routing_module.py and routing_ids.py alone.

Shapes: B samples, N tokens, K kept tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from routing_ids import choose_ids
from routing_module import Route, check_routes, gather_tokens, scatter_tokens

Inputs = tuple[tuple, dict]


def select_first(args: tuple, kwargs: dict, ids_keep: Tensor) -> Inputs:
    """For blocks whose first positional input is the tokens (B, N, D), and nothing else has a token axis."""
    if not args:
        raise ValueError(
            f"the block was called by keywords alone ({', '.join(kwargs)}), which say not where the tokens are: "
            "give attach_routes a select and a join"
        )
    return (gather_tokens(args[0], ids_keep), *args[1:]), kwargs


def join_first(output: Tensor, saved: Inputs, ids_keep: Tensor) -> Tensor:
    """For blocks that return the tokens alone."""
    if not isinstance(output, Tensor):
        raise ValueError(
            f"the block returned a {type(output).__name__}, not the tokens alone: give attach_routes a join"
        )
    return scatter_tokens(saved[0][0], output, ids_keep)


class Routing:
    """Routes attached to a model's blocks; off until `on` or `on_ids`. Made by attach_routes."""

    def __init__(
        self,
        blocks: nn.ModuleList,
        routes: tuple[Route, ...],
        select: Callable[[tuple, dict, Tensor], Inputs],
        join: Callable[[Any, Inputs, Tensor], Any],
    ) -> None:
        self.routes = routes
        self._select, self._join = select, join
        self._ids: tuple[Tensor, ...] | None = None
        self._handles = []
        self._running: list[list[tuple[Inputs, Tensor]]] = []  # of each block, the call that is under way
        for number, route in enumerate(routes):
            for block in blocks[route.start : route.end + 1]:
                self._attach(block, number)

    def _attach(self, block: nn.Module, number: int) -> None:
        running: list[tuple[Inputs, Tensor]] = []
        self._running.append(running)

        def before(module: nn.Module, args: tuple, kwargs: dict) -> Inputs | None:
            running.clear()
            if self._ids is None:
                return None
            ids_keep = self._ids[number]
            running.append(((args, kwargs), ids_keep))
            return self._select(args, kwargs, ids_keep)

        def behind(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
            return self._join(output, *running.pop()) if running else output

        self._handles += [
            block.register_forward_pre_hook(before, with_kwargs=True),
            block.register_forward_hook(behind, with_kwargs=True),
        ]

    @contextlib.contextmanager
    def on_ids(self, *ids_keep: Tensor) -> Iterator[None]:
        """Run the model under ids that are drawn already: (B, K) for each route. Whatever their K, it is the ratio."""
        if len(ids_keep) != len(self.routes):
            raise ValueError(f"{len(ids_keep)} sets of ids for {len(self.routes)} routes: each route needs its own")
        for ids in ids_keep:
            if ids.ndim != 2 or ids.dtype != torch.int64:
                raise ValueError(f"ids have shape {tuple(ids.shape)} and type {ids.dtype}, but must be (B, K) int64")
        if self._ids is not None:
            raise RuntimeError("the routes are on already: leave the first context before entering another")
        if not self._handles:
            raise RuntimeError("the routes were removed from the model: attach them anew")
        self._ids = ids_keep
        try:
            yield
        finally:
            self._ids = None
            for running in self._running:  # a call that failed holds its tensors
                running.clear()

    def on(
        self,
        *noise: Tensor,
        ratio: float | None = None,
        grid: tuple[int, int] | None = None,
        force_keep: Tensor | None = None,
        prefix: int = 0,
    ) -> contextlib.AbstractContextManager[None]:
        """Run the model under ids chosen from uniform numbers, (B, N) for each route, or one tensor for all.

        ratio  another selection_ratio than the routes' own, e.g. at inference. The rest: see choose_ids.
        """
        each = noise * len(self.routes) if len(noise) == 1 else noise
        if len(each) != len(self.routes):
            raise ValueError(f"{len(noise)} tensors of noise for {len(self.routes)} routes: give one for each, or one")
        routes = self.routes if ratio is None else [replace(route, selection_ratio=ratio) for route in self.routes]
        return self.on_ids(*(choose_ids(route, u, grid, force_keep, prefix) for route, u in zip(routes, each)))

    def remove(self) -> None:
        """Take the hooks off the model."""
        while self._handles:
            self._handles.pop().remove()


def attach_routes(
    blocks: nn.ModuleList,
    routes: Sequence[Route],
    select: Callable[[tuple, dict, Tensor], Inputs] = select_first,
    join: Callable[[Any, Inputs, Tensor], Any] = join_first,
) -> Routing:
    """Let a model's blocks run under routes, by hooks; no weight, name or line of the model changes.

    blocks        the model's own list, in the order in which it calls them.
    routes        disjoint; ends may be negative. Their fp32 is not kept here: "auto" means none.
    select, join  what travels with the tokens, see above; blocks (tokens, …) → tokens need neither.

    Raises ValueError for routes that do not fit the blocks, or that ask for a block in fp32.
    """
    for route in routes:
        if route.fp32 not in ("auto", "off"):
            raise ValueError(
                f"fp32={route.fp32!r} of the route {route.start}→{route.end}: hooks do not change a block's precision; "
                'use fp32="off", and keep that block in fp32 yourself'
            )
    if not routes:
        raise ValueError("no routes were given to attach")
    resolved = [route.resolve(len(blocks)) for route in routes]
    check_routes(resolved, len(blocks))
    return Routing(blocks, tuple(replace(route, fp32="off") for route in resolved), select, join)
