"""Routes for models that can't be edited: hooks on a ModuleList of blocks.

    routing = attach_routes(model.transformer_blocks, [Route(2, -4)])
    with routing.on(torch.rand(B, N)):      # without it the model is what it was
        loss = criterion(model(...))
        loss.backward()                     # inside too, where activations are computed again

Every block on a route gets the kept tokens, and its output goes back among the untouched others right
behind it, so that whatever a model does between two blocks sees all tokens. This is the same function
as gathering once and scattering once (run_blocks), for two more copies of the tokens a block.

Blocks may take the tokens by a keyword, and return them among others: text and picture tokens of joint blocks, say,
of which attach_routes(…, tokens="hidden_states", output=1) routes the second and leaves the text whole.

What travels with the tokens is the caller's to say, since no name or shape tells it for certain; where nothing was
said, whatever might travel is an error:

    select(args, kwargs, ids) → args, kwargs     a block's inputs, with everything that has a token axis gathered
    join(output, saved, ids) → output            a block's output, put back; saved is (args, kwargs) before select,
                                                 behind a route's end those of the block as before which it rejoins

Where `tokens` is said, both see them first in args however the model called the block; where `output` is, join gets
and returns the tokens alone.

This file needs torch, routing_module.py and ids.py beside it alone.

Shapes: B samples, N tokens, K kept tokens.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from routing_module import RULES, Route, check_ids, check_routes, gather_tokens, scatter_tokens, times_written

from .ids import choose_ids, with_ratio

Inputs = tuple[tuple, dict]


def select_first(args: tuple, kwargs: dict, ids_keep: Tensor) -> Inputs:
    """For blocks whose first positional input is the tokens (B, N, D), and nothing else has a token axis.

    Given as `select=select_first` it says that this is so; where no select was given, select_only looks too.
    """
    if not args:
        raise ValueError(
            f"the block was called by keywords alone ({', '.join(kwargs)}), which say not where the tokens are: "
            "give attach_routes a select and a join, or tokens= (the keyword of the tokens)"
        )
    return (gather_tokens(args[0], ids_keep), *args[1:]), kwargs


def select_only(args: tuple, kwargs: dict, ids_keep: Tensor) -> Inputs:
    """select_first, for tokens that come alone: attach_routes' default.

    Raises ValueError for a further tensor, in lists and dicts too, with an axis as long as the tokens' (but not for
    its first where there are as many samples as tokens): nothing tells whether it travels with the tokens.
    """
    selected = select_first(args, kwargs, ids_keep)
    samples, count = args[0].shape[:2]
    others = {f"input {place}": given for place, given in enumerate(args[1:], 1)} | kwargs
    for name, tensor in _tensors(others):
        if count in tensor.shape[samples == count :]:
            raise ValueError(
                f"the block also gets {name} of shape {tuple(tensor.shape)}, with an axis of {count} as the tokens "
                f"{tuple(args[0].shape)} have: give attach_routes a select= that takes the kept tokens' part of it, "
                "or select=select_first if that axis is no tokens"
            )
    return selected


def _tensors(given: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors among inputs by name, inside of lists, tuples and dicts too."""
    if isinstance(given, Tensor):
        yield name, given
    elif isinstance(given, (dict, list, tuple)):
        for key, value in given.items() if isinstance(given, dict) else enumerate(given):
            yield from _tensors(value, f"{name}[{key!r}]" if name else str(key))


def _written(*inputs: Any) -> list[int]:
    """How often each tensor among a block's inputs was written to."""
    return [times_written(tensor) for _, tensor in _tensors(inputs)]


def join_first(output: Tensor, saved: Inputs, ids_keep: Tensor) -> Tensor:
    """For blocks that return the tokens alone."""
    if not isinstance(output, Tensor):
        raise ValueError(
            f"the block returned a {type(output).__name__}, not the tokens alone: give attach_routes a join, or "
            "output= (the tokens' place in a tuple)"
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
        keyword: str | None,
        place: int | None,
    ) -> None:
        self.routes = routes
        self._select, self._join, self._keyword, self._place = select, join, keyword, place
        self._ids: tuple[Tensor, ...] | None = None
        self._tokens: int | None = None
        self._running: dict[int, tuple[Inputs, Tensor]] = {}  # by block, the call that is under way
        self._rejoins: dict[int, tuple[Inputs, list[int]]] = {}  # by route, what its tokens come back as
        self._handles = []
        for number, route in enumerate(routes):  # before those below, which take tokens out
            if route.rejoin < route.start:
                save = partial(self._save, number)
                self._handles.append(blocks[route.rejoin].register_forward_pre_hook(save, with_kwargs=True))
        for number, route in enumerate(routes):
            for index in range(route.start, route.end + 1):  # methods, so that a copy of the model has its own
                before, behind = partial(self._before, number, index), partial(self._behind, index)
                self._handles += [
                    blocks[index].register_forward_pre_hook(before, with_kwargs=True),
                    blocks[index].register_forward_hook(behind, with_kwargs=True),
                ]

    def _tokens_first(self, args: tuple, kwargs: dict) -> Inputs:
        """The same call, which gives the tokens by position: they are the block's first input."""
        if self._keyword not in kwargs:
            return args, kwargs
        return (kwargs[self._keyword],), {name: given for name, given in kwargs.items() if name != self._keyword}

    def _check_count(self, index: int, args: tuple) -> None:
        if self._select in (select_first, select_only) and args and self._tokens not in (None, args[0].shape[1]):
            raise ValueError(
                f"the numbers (and prefix) are of {self._tokens} tokens, but block {index} gets {args[0].shape[1]}"
            )

    def _save(self, number: int, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._ids is not None:
            args, kwargs = self._tokens_first(args, kwargs)
            self._check_count(self.routes[number].rejoin, args)
            self._rejoins[number] = (args, kwargs), _written(args, kwargs)

    def _saved(self, number: int, index: int, args: tuple) -> Inputs:
        """The inputs of the block as before which a route rejoins, once; `args` are those of block `index`, its end."""
        rejoin, again = self.routes[number].rejoin, "activation checkpointing around single blocks"
        if number not in self._rejoins:
            raise RuntimeError(
                f"block {index} was called without block {rejoin} before it, as before which its route rejoins: where "
                f"it is computed again ({again}), hooks can't do that; leave rejoin out, or use run_blocks"
            )
        if not torch.is_grad_enabled() and args and isinstance(args[0], Tensor) and args[0].grad_fn is not None:
            raise RuntimeError(
                f"block {index} runs without a graph inside of one ({again}, use_reentrant=True), so that no gradient "
                f"would reach block {rejoin}, as before which its route rejoins; leave rejoin out, or use run_blocks"
            )
        saved, written = self._rejoins.pop(number)
        if _written(*saved) != written:
            raise RuntimeError(
                f"the model wrote into what block {rejoin} was given before block {index} was done, so that tokens "
                "can't come back as they were before it; leave rejoin out"
            )
        return saved

    def _before(self, number: int, index: int, module: nn.Module, args: tuple, kwargs: dict) -> Inputs | None:
        self._running.pop(index, None)
        if self._ids is None:
            return None
        args, kwargs = self._tokens_first(args, kwargs)
        self._check_count(index, args)
        ids_keep, route = self._ids[number], self.routes[number]
        rejoins = index == route.end and route.rejoin < route.start
        saved = self._saved(number, index, args) if rejoins else (args, kwargs)
        picked = self._select(args, kwargs, ids_keep)
        self._running[index] = saved, ids_keep
        return picked

    def _behind(self, index: int, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        if index not in self._running:
            return output
        call = self._running.pop(index)
        if self._place is None:
            return self._join(output, *call)
        parts = list(output) if isinstance(output, tuple) else []
        if not -len(parts) <= self._place < len(parts):
            returned = f"{len(parts)} things" if isinstance(output, tuple) else f"a {type(output).__name__}, no tuple"
            raise ValueError(f"output={self._place} says where the tokens are, but block {index} returned {returned}")
        parts[self._place] = self._join(parts[self._place], *call)
        return tuple(parts)

    @contextlib.contextmanager
    def on_ids(self, *ids_keep: Tensor, tokens: int | None = None) -> Iterator[None]:
        """Run the model under ids that are drawn already: (B, K) for each route. Whatever their K, it is the ratio.

        tokens  how many the ids choose from, checked where no other `select` was given; None: not checked.

        Raises ValueError for ids that are none, or name a token twice (looked at on a CPU only).
        """
        if len(ids_keep) != len(self.routes):
            raise ValueError(f"{len(ids_keep)} sets of ids for {len(self.routes)} routes: each route needs its own")
        for ids in ids_keep:
            if not isinstance(ids, Tensor):
                raise ValueError(f"ids are {ids!r}, but must be tensors, (B, K) int64, one for each route")
            check_ids(ids, len(ids) if ids.ndim else 0, tokens)
        if self._ids is not None:
            raise RuntimeError("the routes are on already: leave the first context before entering another")
        if not self._handles:
            raise RuntimeError("the routes were removed from the model: attach them anew")
        self._ids, self._tokens = ids_keep, tokens
        try:
            yield
        finally:
            self._ids = self._tokens = None
            self._running.clear()  # a call that failed holds its tensors
            self._rejoins.clear()

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
        for given in noise:
            if not isinstance(given, Tensor):
                raise ValueError(f"the numbers are {given!r}, but must be uniform ones: torch.rand(B, N)")
        each = noise * len(self.routes) if len(noise) == 1 else noise
        if len(each) != len(self.routes):
            raise ValueError(f"{len(noise)} tensors of noise for {len(self.routes)} routes: give one for each, or one")
        routes = self.routes if ratio is None else [with_ratio(route, ratio) for route in self.routes]
        ids = [choose_ids(route, u, grid, force_keep, prefix) for route, u in zip(routes, each)]
        return self.on_ids(*ids, tokens=prefix + each[0].shape[1])

    def remove(self) -> None:
        """Take the hooks off the model."""
        while self._handles:
            self._handles.pop().remove()


def attach_routes(
    blocks: nn.ModuleList,
    routes: Route | Sequence[Route],
    select: Callable[[tuple, dict, Tensor], Inputs] = select_only,
    join: Callable[[Any, Inputs, Tensor], Any] = join_first,
    tokens: str | None = None,
    output: int | None = None,
) -> Routing:
    """Let a model's blocks run under routes, by hooks; no weight, name or line of the model changes.

    blocks        the model's own list, in the order in which it calls them.
    routes        disjoint; ends may be negative. Their fp32 is not kept here: "auto" means none. One with an earlier
                  rejoin can't be where single blocks are computed again: a RuntimeError of that pass.
    select, join  what travels with the tokens, see above; blocks (tokens, …) → tokens need neither.
                  select=select_first says of blocks that the default refuses that nothing else does.
    tokens        the name of the blocks' first input, the tokens, where the model gives it by keyword.
    output        the tokens' place in the tuple that the blocks return; None: they return the tokens alone.

    Raises ValueError for routes that do not fit the blocks or ask for a block in fp32, for a block that stands in the
    list twice or whose first input has another name, and without a select for blocks that hold a module of
    batch_first=False.
    """
    for name, given in (("select", select), ("join", join)):
        if not callable(given):
            raise ValueError(
                f"{name} is {given!r}, but must be a function ({name}= in the module's docstring); leave it out for "
                "blocks (tokens, …) → tokens"
            )
    routes = [routes] if isinstance(routes, Route) else routes or ()
    for route in routes:
        if not route.rejoins.removes or RULES[route.select].scores is not None:
            raise ValueError(
                f"the route {route.start}→{route.end} has rejoin={route.rejoin}, select={route.select}: hooks take out "
                "tokens that were drawn, and put them back as they were; run_blocks does the rest"
            )
        if route.fp32 not in ("auto", "off"):
            raise ValueError(
                f"fp32={route.fp32!r} of the route {route.start}→{route.end}: hooks do not change a block's precision; "
                'use fp32="off", and keep that block in fp32 yourself'
            )
    if not routes:
        raise ValueError("no routes were given to attach")
    if len({id(block) for block in blocks}) < len(blocks):
        raise ValueError("a block stands in the list more than once: hooks can't tell its calls apart")
    for index, block in enumerate(blocks if select is select_only else ()):
        for name, module in block.named_modules():
            if getattr(module, "batch_first", True) is False:
                raise ValueError(
                    f"{name or 'the module'} of block {index} has batch_first=False, so that its tokens may be "
                    "(N, B, D): give attach_routes a select= and a join= for those, or select=select_first if the "
                    "block gets (B, N, D)"
                )
    if output is not None and not isinstance(output, int):
        raise ValueError(f"output is {output!r}, but must be the tokens' place in what the blocks return: 0, 1, …")
    for index, block in enumerate(blocks if tokens is not None else ()):
        names = list(inspect.signature(block.forward).parameters)
        if names[:1] != [tokens]:
            raise ValueError(
                f"tokens is {tokens!r}, but must name the first input of the blocks; block {index} takes "
                f"{', '.join(names) or 'none'}: for tokens at another place give attach_routes a select= and a join="
            )
    resolved = [route.resolve(len(blocks)) for route in routes]
    check_routes(resolved, len(blocks))
    return Routing(blocks, tuple(replace(route, fp32="off") for route in resolved), select, join, tokens, output)
