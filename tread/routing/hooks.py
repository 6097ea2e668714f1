"""Token routing by forward hooks, for models whose code can't be edited: a route's blocks run on some tokens only.

    routing = attach_routes(model.transformer_blocks, [Route(2, -4)])  # from block 2 to the fourth from the end
    with routing.on(torch.rand(B, N)):      # outside of this context the model runs all tokens
        loss = criterion(model(...))
        loss.backward()                     # inside too: activation checkpointing calls the blocks again

Each block of a route gets the kept tokens, and its output is put back among the skipped tokens right after the block.
So whatever a model does between two blocks applies to all tokens, skipped ones too. If it does nothing there, the
result is that of routing_module.run_blocks, which gathers and scatters once per route; hooks do so at each block.

Blocks may take the tokens by keyword and return them in a tuple. For joint blocks of text and picture tokens,
attach_routes(…, tokens="hidden_states", output=1) routes the picture tokens and leaves the text whole.

Names and shapes do not say for certain which other inputs have a token axis. By default an input that might have one
raises ValueError; the caller can pass two functions instead:

    select(args, kwargs, ids_keep) → args, kwargs    a block's inputs, with everything along a token axis gathered
    join(output, saved, ids_keep) → output           a block's output, put back among all tokens. `saved` holds the
                                                     block's (args, kwargs) before `select`; for a route's last
                                                     block, if Route.rejoin < start, those of block Route.rejoin

With attach_routes(tokens=…), both functions get the tokens as args[0], however the model called the block. With
attach_routes(output=…), join gets and returns only the tokens, not the block's whole output tuple.

One or two blocks of each class on a route run twice more at their first call, and raise ValueError if the order of
their tokens matters (positions.py). This file needs only torch, routing_module.py, ids.py and positions.py.

Shapes: B samples, N tokens, K kept tokens, D channels.
"""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from routing_module import RULES, Grid, Route, check_ids, check_routes, gather_tokens, scatter_tokens, times_written

from .ids import choose_ids, with_ratio
from .positions import blocks_to_check, order_matters, refusal, tensors_in

_ON: list["Routing"] = []  # routings that are active: within their context `on` or `on_ids`
Inputs = tuple[tuple, dict]
Select = Callable[[tuple, dict, Tensor], Inputs]
Join = Callable[[Any, Inputs, Tensor], Any]


def select_first(args: tuple, kwargs: dict, ids_keep: Tensor) -> Inputs:
    """Return a block's inputs (args, kwargs) with args[0] (B, N, D) reduced to the tokens at ids_keep (B, K), so
    (B, K, D). All other inputs are unchanged. Raises ValueError if there are only keyword arguments."""
    if not args:
        called = f"the block was called with keywords only ({', '.join(kwargs)})"
        raise ValueError(f"{called}: give attach_routes tokens= (the keyword of the tokens), or a select and a join")
    return (gather_tokens(args[0], ids_keep), *args[1:]), kwargs


def select_only(args: tuple, kwargs: dict, ids_keep: Tensor) -> Inputs:
    """Return a block's inputs (args, kwargs) with args[0] (B, N, D) reduced to the tokens at ids_keep (B, K), so
    (B, K, D). Raises ValueError if another input tensor, including those in lists and dicts, has an axis of length N:
    it may be a token axis. If N = B, first axes count as batch axes."""
    selected = select_first(args, kwargs, ids_keep)
    samples, count = args[0].shape[:2]
    others = {f"input {place}": given for place, given in enumerate(args[1:], 1)} | kwargs
    for name, tensor in tensors_in(others):
        if count in tensor.shape[samples == count :]:
            raise ValueError(
                f"the block also gets {name} of shape {tuple(tensor.shape)}, with an axis of {count} like the tokens "
                f"{tuple(args[0].shape)}: give attach_routes a select= that gathers the kept tokens' part of it, "
                "or select=select_first if that axis is not tokens"
            )
    return selected


def _written(*inputs: Any) -> list[int]:
    """Return how often each tensor among a block's inputs was changed in place."""
    return [times_written(tensor) for _, tensor in tensors_in(inputs)]


def _in_forward() -> bool:
    """Return whether this is a forward pass, not compiled and not repeated in backward by activation checkpointing."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() == -1


def join_first(output: Tensor, saved: Inputs, ids_keep: Tensor) -> Tensor:
    """Return all tokens (B, N, D): the block's first input saved[0][0], with the block's output (B, K, D) in place of
    the tokens at ids_keep (B, K). Raises ValueError if the output is not a tensor."""
    if not isinstance(output, Tensor):
        raise ValueError(f"the block returned a {type(output).__name__}, not the tokens alone: state output= or join=")
    return scatter_tokens(saved[0][0], output, ids_keep)


class Routing:
    """Hooks on a model's blocks, as attach_routes adds them. They act only inside the contexts `on` and `on_ids`.
    The arguments are attach_routes's; its `tokens` and `output` are here `keyword` and `place`."""

    def __init__(
        self,
        blocks: nn.ModuleList,
        routes: tuple[Route, ...],
        select: Select,
        join: Join,
        keyword: str | None,
        place: int | None,
        verify: bool,
    ) -> None:
        self.routes = routes
        on_routes = {index: blocks[index] for route in routes for index in range(route.start, route.end + 1)}
        self._blocks = set(on_routes.values())
        self._unverified = set(blocks_to_check(on_routes)) if verify else set()
        self._select, self._join, self._keyword, self._place = select, join, keyword, place
        self._batch_first = select in (select_first, select_only)  # whether tokens are known to be (B, N, …)
        self._ids: tuple[Tensor, ...] | None = None
        self._tokens: tuple[int | None, ...] = ()
        self._prefix = 0  # the number of tokens that come first in any order
        self._running: dict[int, tuple[Inputs, Tensor]] = {}  # block → inputs, ids_keep of its call
        self._rejoins: dict[int, tuple[Inputs, list[int], bool]] = {}  # route → inputs, write counts, _in_forward()
        self._last, self._handles = -1, []  # _last: the block that was called last
        self._ran = False  # whether a block on a route was called in the context that is on
        self._waiting = False  # whether `on` was called, and its context not entered since
        self._unwatched = {index for route in routes for index in range(route.start + 1, route.end + 1) if verify}
        self._entered: tuple[int, Tensor] | None = None  # the routed block called last, and all its tokens
        for index, block in enumerate(blocks) if any(route.rejoin < route.start for route in routes) else ():
            self._handles.append(block.register_forward_pre_hook(partial(self._call, index)))
        for number, route in enumerate(routes):  # before the hooks below, which take tokens out
            if route.rejoin < route.start:
                save = partial(self._save, number)
                self._handles.append(blocks[route.rejoin].register_forward_pre_hook(save, with_kwargs=True))
        for number, route in enumerate(routes):
            for index in range(route.start, route.end + 1):  # bound methods: a model's deep copy gets its own Routing
                before, behind = partial(self._before, number, index), partial(self._behind, index)
                self._handles += [
                    blocks[index].register_forward_pre_hook(before, with_kwargs=True),
                    blocks[index].register_forward_hook(behind, with_kwargs=True),
                ]

    def _tokens_first(self, number: int, index: int, args: tuple, kwargs: dict) -> Inputs:
        """Return the inputs (args, kwargs) of block `index`, with tokens that came by keyword moved to args[0]. Raises
        ValueError unless the tokens' first or second axis has the length N that `on` or `on_ids` expects for route
        `number`. With a custom `select` and no keyword, any input may be the tokens: one that fits is enough."""
        if self._keyword in kwargs:
            args = (kwargs[self._keyword],)
            kwargs = {name: given for name, given in kwargs.items() if name != self._keyword}
        first = self._keyword or self._batch_first
        shapes = [tuple(tensor.shape) for _, tensor in tensors_in(args[:1] if first else (args, kwargs))]
        count = self._tokens[number]
        axes = slice(len(self._ids[number]) == count, 2)  # if B equals N, the batch axis would match by chance
        if count is not None and shapes and all(count not in shape[axes] for shape in shapes):
            raise ValueError(
                f"the noise (and prefix) is for {count} tokens, but block {index} gets {shapes[0]}: give noise "
                "for each, or, if text, class or register tokens stand before them, how many these are as prefix="
            )
        return args, kwargs

    def _call(self, index: int, module: nn.Module, args: tuple) -> None:
        """Record a call of block `index`. If a new forward pass begins, run _check_rejoined and drop saved inputs."""
        if self._ids is not None and _in_forward():
            if index < self._last:
                self._check_rejoined()
                self._rejoins.clear()
            self._last = index

    def _check_rejoined(self) -> None:
        """Raise RuntimeError if inputs were saved for a route, but its last block, which needs them, did not run."""
        for route in [self.routes[number] for number, (_, _, forward) in self._rejoins.items() if forward]:
            said = f"block {route.end}, the last of a route with rejoin, was not called after block {route.rejoin}"
            raise RuntimeError(f"{said}: leave rejoin out if blocks may be skipped; after errors, re-enter the context")

    def _save(self, number: int, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._ids is not None:
            saved = self._tokens_first(number, self.routes[number].rejoin, args, kwargs)
            if number in self._rejoins:
                self._check_rejoined()
            self._rejoins[number] = saved, _written(*saved), _in_forward()

    def _saved(self, number: int, index: int, args: tuple) -> Inputs:
        """Remove and return the inputs saved for route `number`, those of block Route.rejoin: after the route's last
        block, skipped tokens take their values from these. `index` and `args` are the last block's number and
        inputs. Raises RuntimeError if no inputs were saved in this forward pass, if they have been changed in place
        since, or if the last block alone is checkpointed with use_reentrant=True."""
        rejoin = self.routes[number].rejoin
        no_graph = not torch.is_grad_enabled() and args and isinstance(args[0], Tensor) and args[0].grad_fn is not None
        if number not in self._rejoins or no_graph:  # no_graph: checkpointed with use_reentrant=True
            said = f"block {index} was called without block {rejoin}, before which its route rejoins"
            advice = "activation checkpointing of single blocks does so: leave rejoin out, or use run_blocks"
            raise RuntimeError(f"{said}; {advice}")
        saved, written, _ = self._rejoins.pop(number)
        if _written(*saved) != written:
            raise RuntimeError(f"the model wrote into the inputs of block {rejoin}, which are saved: leave rejoin out")
        return saved

    def _before(self, number: int, index: int, module: nn.Module, args: tuple, kwargs: dict) -> Inputs | None:
        self._running.pop(index, None)
        if self._ids is None:
            if self._waiting:
                self._waiting = False
                warnings.warn("routing.on(…) was called without `with`, so nothing is routed", stacklevel=2)
            return None
        self._ran = True
        args, kwargs = self._tokens_first(number, index, args, kwargs)
        ids_keep, route = self._ids[number], self.routes[number]
        if index in self._unverified and not torch.compiler.is_compiling():
            self._verify(number, index, module, args, kwargs)
        if self._unwatched and _in_forward():
            self._watch(number, index, args)
        rejoins = index == route.end and route.rejoin < route.start
        saved = self._saved(number, index, args) if rejoins else (args, kwargs)
        self._running[index] = saved, ids_keep
        return self._select(args, kwargs, ids_keep)

    def _behind(self, index: int, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        if index not in self._running:
            return output
        return self._joined(index, output, *self._running.pop(index))

    def _joined(self, index: int, output: Any, saved: Inputs, ids_keep: Tensor) -> Any:
        if self._place is None:
            return self._join(output, saved, ids_keep)
        if not isinstance(output, tuple):
            raise ValueError(f"output is {self._place}, but block {index} returned a {type(output).__name__}, no tuple")
        parts = list(output)
        parts[self._place] = self._join(parts[self._place], saved, ids_keep)
        return tuple(parts)

    def _verify(self, number: int, index: int, block: nn.Module, args: tuple, kwargs: dict) -> None:
        """Raise ValueError if block `index`, which is on route `number`, depends on the order of its tokens. The check
        permutes all N tokens but the prefix, or only the kept ones if N is unknown."""
        ids, self._ids = self._ids, None  # the block's own hooks do nothing meanwhile
        every, count = ids[number], self._tokens[number]
        if count is None and self._batch_first and args and isinstance(args[0], Tensor):
            count = args[0].shape[1]
        if count is not None:
            every = torch.arange(count, device=every.device).expand(len(every), -1)
        shared, joined = self.routes[number].select == "shared", partial(self._joined, index)
        try:
            with _disable_current_modes():  # the caller's selective checkpointing or count of FLOPs
                difference = order_matters(block, args, kwargs, every, shared, self._select, joined, self._prefix)
        finally:
            self._ids = ids
        if difference:
            raise ValueError(refusal(index, block, difference, "select=", "pass verify=False to attach_routes"))
        self._unverified.discard(index)

    @torch.no_grad()
    def _watch(self, number: int, index: int, args: tuple) -> None:
        """Warn, once, if the model changes skipped tokens of route `number` between blocks `index` − 1 and `index`."""
        (last, before), ids = self._entered or (None, None), self._ids[number]
        tokens = self._entered = (index, args[0]) if args and isinstance(args[0], Tensor) else None
        if last != index - 1 or index not in self._unwatched or tokens is None:
            return
        self._unwatched.discard(index)
        now, count = args[0], args[0].shape[1] if self._batch_first else self._tokens[number]
        unclear = not self._batch_first and count == len(ids)  # whether (B, N, …) or (N, B, …)
        if now.shape == before.shape and now.shape[:2] == (len(ids), count) and not unclear:
            skipped = torch.ones(now.shape[:2], dtype=torch.bool, device=now.device).scatter(1, ids, False)
            if not torch.equal(now[skipped], before[skipped].to(now.dtype)):
                self._unwatched.clear()
                warnings.warn(
                    f"the model changes tokens between blocks {last} and {index}, skipped ones too. Where it "
                    "adds a block's input to its output, x + block(x), they double: give attach_routes a join= that "
                    "puts the output among zeros (docs/routing.md), or verify=False if this is meant",
                    stacklevel=2,
                )

    @contextlib.contextmanager
    def on_ids(self, *ids_keep: Tensor, tokens: int | Sequence[int] | None = None, prefix: int = 0) -> Iterator[None]:
        """Return a context in which each route's blocks run on the tokens at its ids_keep (B, K) int64, one tensor per
        route. `tokens` is N, or each route's N; if given, blocks called with another number of tokens raise ValueError.
        The check of positions leaves the first `prefix` tokens in their places.
        Entering the context raises ValueError for ids_keep of wrong number, shape or dtype and, on a CPU only, for
        indices that repeat or are out of range; RuntimeError if a Routing of these blocks is active, or after `remove`.
        Leaving it raises RuntimeError if inputs saved for a rejoin were not used, and warns if no routed block ran."""
        self._waiting = False
        if len(ids_keep) != len(self.routes):
            raise ValueError(f"{len(ids_keep)} sets of ids for {len(self.routes)} routes: each route needs its own")
        counts = tuple(tokens) if isinstance(tokens, Sequence) else (tokens,) * len(self.routes)
        for ids, count in zip(ids_keep, counts, strict=True):
            check_ids(ids, len(ids) if ids.ndim else 0, count)
        if any(self._blocks & other._blocks for other in _ON):
            raise RuntimeError("routes of these blocks are on already: one attach_routes takes all that run together")
        if not self._handles:
            raise RuntimeError("the routes were removed from the model: attach them anew")
        self._ids, self._tokens, self._prefix, self._ran = ids_keep, counts, prefix, False
        _ON.append(self)
        try:
            yield
            self._check_rejoined()
            if not self._ran:
                warnings.warn(
                    "no block on a route was called in this context: nothing was routed. A model that was compiled and "
                    "run before attach_routes keeps its old graph (attach first, or call torch._dynamo.reset()); one "
                    "that calls block.forward(x) passes hooks by (call block(x))",
                    stacklevel=3,
                )
        finally:
            _ON.remove(self)
            self._ids, self._tokens, self._last = None, (), -1
            self._entered = None
            self._running.clear()  # a failed call would keep its tensors alive
            self._rejoins.clear()

    def on(
        self,
        *noise: Tensor,
        ratio: float | None = None,
        grid: Grid | None = None,
        force_keep: Tensor | None = None,
        prefix: int = 0,
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context in which routes keep tokens chosen by uniform noise (B, N): one tensor per route, or one for
        all. `ratio` replaces each route's selection_ratio. `grid` is (H, W) of the N tokens, if a route needs it.
        `force_keep` (B, N) bool marks tokens to keep. `prefix` further tokens before these N are always kept. Raises
        ValueError if arguments do not fit; RuntimeErrors and warnings come from the context, as in `on_ids`."""
        each = noise * len(self.routes) if len(noise) == 1 else noise
        if not all(isinstance(u, Tensor) for u in each):
            raise ValueError("noise must be tensors, one after the other: on(n1, n2), not on((n1, n2))")
        if len(each) != len(self.routes):
            raise ValueError(f"{len(noise)} tensors of noise for {len(self.routes)} routes: give one for each, or one")
        routes = self.routes if ratio is None else [with_ratio(route, ratio) for route in self.routes]
        ids = [choose_ids(route, u, grid, force_keep, prefix) for route, u in zip(routes, each)]
        self._waiting = True
        return self.on_ids(*ids, tokens=[prefix + u.shape[1] for u in each], prefix=prefix)

    def __getstate__(self) -> dict:
        """Return the attributes for a copy or a pickle of this object, in which no route is active."""
        return vars(self) | {"_ids": None, "_entered": None, "_last": -1, "_running": {}, "_rejoins": {}}

    def remove(self) -> None:
        """Remove the hooks from the model."""
        while self._handles:
            self._handles.pop().remove()


def attach_routes(
    blocks: nn.ModuleList,
    routes: Route | Sequence[Route],
    select: Select = select_only,
    join: Join = join_first,
    tokens: str | None = None,
    output: int | None = None,
    verify: bool = True,
) -> Routing:
    """Attach routes to a model's blocks by hooks; the model's weights, names and code stay as they are. Returns a
    Routing: the routes act only while the model runs in the Routing's context `on` or `on_ids`.

    blocks        the model's own list, in the order in which it calls the blocks.
    routes        routes that share no block. Hooks can't change precision: Route.fp32 must be "auto" or "off", and both
                  mean "off". With Route.rejoin before Route.start, activation checkpointing of single blocks raises
                  RuntimeError.
    select, join  select(args, kwargs, ids_keep) → (args, kwargs) gathers a block's inputs; join(output, saved inputs,
                  ids_keep) → output puts its output back. The defaults suit blocks (tokens, …) → tokens.
                  select=select_first allows further inputs with an axis of length N.
    tokens        name of the blocks' first input, the tokens, if the model passes them by keyword.
    output        index of the tokens in the tuple that the blocks return; None: blocks return the tokens alone.
    verify        True: blocks raise ValueError if the order of their tokens matters. Of each class of routed blocks the
                  last is checked and, if any differ from it, the one that differs most (see blocks_to_check). A check
                  runs the block twice more, at its first call on a route outside compiled graphs. False: no check,
                  for blocks that use the order on purpose (scans), and no warning if tokens change between blocks.

    Raises ValueError for routes that do not fit or need run_blocks (select="norm", rejoin="stale"), for a name `tokens`
    other than the first input's, a block listed twice and, with the default `select`, modules with batch_first=False.
    """
    routes = [routes] if isinstance(routes, Route) else routes
    for route in routes:
        if isinstance(route.rejoin, str) or RULES[route.select].scores is not None:
            given = f"rejoin={route.rejoin}, select={route.select}"
            raise ValueError(f"the route {route.start}→{route.end} has {given}, which only run_blocks supports")
        if route.fp32 not in ("auto", "off"):
            named = f"the route {route.start}→{route.end} has fp32={route.fp32!r}"
            raise ValueError(f'{named}, but hooks do not change a block\'s precision: use fp32="off"')
    if len({id(block) for block in blocks}) < len(blocks):
        raise ValueError("a block is in the list more than once: hooks can't tell its calls apart")
    for index, block in enumerate(blocks):
        for name, module in block.named_modules() if select is select_only else ():
            if getattr(module, "batch_first", True) is False:
                raise ValueError(
                    f"{name or 'the module'} of block {index} has batch_first=False, so its tokens may be (N, B, D): "
                    "give attach_routes a select= and a join= for those, or select=select_first if the block gets "
                    "(B, N, D)"
                )
        if tokens is not None and next(iter(inspect.signature(block.forward).parameters), None) != tokens:
            said = f"tokens is {tokens!r}, but must name the first input of the blocks"
            raise ValueError(f"{said}; wrap or compile blocks after attach_routes")
    resolved = [route.resolve(len(blocks)) for route in routes]
    check_routes(resolved, len(blocks))
    settled = tuple(replace(route, fp32="off") for route in resolved)
    return Routing(blocks, settled, select, join, tokens, output, verify)
