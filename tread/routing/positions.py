"""Check that blocks do not take positions from the order of their tokens, which would be wrong if tokens are left out.

A block with rotary angles from arange(x.shape[1]), say, gives K kept tokens the positions 0..K−1, and no error occurs.
If positions are passed along with the tokens instead, permuted tokens give permuted outputs. The check permutes all
tokens and compares. This file needs only torch and routing_module.py."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from routing_module import gather_tokens, scatter_tokens

GAIN = 2.0  # scale of random matrices, so that attention is sharp and positions weigh as much as contents
TOLERANCE = {torch.float16: 0.02, torch.bfloat16: 0.02}  # for relative differences; half precision's rounding is 0.002
FULL_TOLERANCE = 1e-3  # fp32's rounding is 3e-7; positions by arange make a difference of 0.4


def check_positions(
    blocks: Sequence[Callable[..., Tensor]], tokens: Tensor, *shared: Tensor, along: Sequence[Tensor] = ()
) -> None:
    """Raise ValueError if a block's output depends on the order of its tokens (B, N, D), N > 1. Blocks are called as
    block(tokens, *along, *shared); each tensor of `along` is (B, N, …), with one row per token.

    One or two blocks of each class run twice, in eval mode without gradient, with random parameters, since a fresh
    adaLN-Zero block adds nothing. Parameters, buffers, mode and global random generators stay as they were.
    """

    def select(args: tuple, kwargs: dict, ids: Tensor) -> tuple[tuple, dict]:
        count = 1 + len(along)
        return (*(gather_tokens(given, ids) for given in args[:count]), *args[count:]), kwargs

    def join(output: Tensor, saved: tuple[tuple, dict], ids: Tensor) -> Tensor:
        return scatter_tokens(saved[0][0], output, ids)

    ids = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
    for index in blocks_to_check(dict(enumerate(blocks))):
        block = blocks[index]
        if difference := order_matters(block, (tokens, *along, *shared), {}, ids, False, select, join):
            raise ValueError(refusal(index, block, difference, "along=", "leave this check out"))


def blocks_to_check(blocks: dict[int, Callable]) -> list[int]:
    """Choose one or two blocks of each class in {index: block} and return their indices. One is the last of its class,
    since possibly only deep blocks compute positions themselves. The other differs most from it in attributes,
    submodules and tensor shapes, if any differ. An integer that differs in every block is ignored as a likely index."""
    alike: dict[type, dict[int, dict]] = {}
    for index, block in sorted(blocks.items(), reverse=True):
        alike.setdefault(type(block), {})[index] = _settings(block) if isinstance(block, nn.Module) else {}
    chosen = []
    for settings in alike.values():
        last = next(iter(settings))
        values = {key: [found.get(key) for found in settings.values()] for key in settings[last]}
        numbers = {key for key, each in values.items() if type(each[0]) is int and len({*each}) == len(each)}
        changes = {
            index: sum(key not in numbers for key, _ in settings[last].items() ^ found.items())
            for index, found in settings.items()
        }
        chosen += dict.fromkeys([last, max(changes, key=changes.get)])
    return chosen


def _settings(block: nn.Module) -> dict[str, Any]:
    """Return a block's plain attributes, the classes of its submodules and the shapes of its tensors, keyed by name."""
    found = {name: given.shape for name, given in [*block.named_parameters(), *block.named_buffers()]}
    for name, module in block.named_modules():
        for key, value in vars(module).items():
            found[f"{name}.{key}"] = value if isinstance(value, (bool, int, float, str)) else type(value)
        found[f"{name}."] = type(module)
    return found


def refusal(index: int, block: Any, difference: float, how: str, otherwise: str) -> str:
    """Return the error text for a block that depends on the order of its tokens: if they are permuted, what it adds to
    them changes by the fraction `difference`. `how` names the argument, such as "along=", by which the caller can pass
    positions to the block. `otherwise` is advice for a block that uses the order on purpose."""
    return (
        f"block {index} ({type(block).__name__}) depends on the order of its tokens: when they are permuted, what it "
        f"adds to them changes by {difference:.0%}. If it makes positions by itself, such as rotary angles from "
        f"arange(x.shape[1]), kept tokens would get positions 0 to K−1: hand the positions to the block as an input "
        f"that travels with the tokens ({how}). If it mixes tokens by their order on purpose, as a scan over rows "
        f"does, {otherwise}"
    )


def permuted(ids: Tensor, shared: bool = False) -> Tensor:
    """Return ids (B, K) in a random order, the same in every call. Each sample has its own order unless `shared`."""
    noise = torch.rand(1 if shared else len(ids), ids.shape[1], generator=torch.Generator().manual_seed(0))
    return ids.gather(1, noise.argsort(dim=1).expand(ids.shape).to(ids.device))


def order_matters(
    block: Callable, args: tuple, kwargs: dict, ids: Tensor, shared: bool, select: Callable, join: Callable,
    prefix: int = 0,
) -> float:  # fmt: skip
    """Run a block on its tokens args[0] at the indices `ids` (B, K) in two orders that differ after the first `prefix`.
    Return the relative change in what the block adds to its tokens; 0.0 if rounding errors can explain the change.

    Tokens are replaced by noise, and so are all-zero inputs without a token axis. shared=True permutes all samples
    alike. select(args, kwargs, ids) → (args, kwargs) gathers the tokens; join(output, (args, kwargs), ids) puts the
    output in their place. Sharded or quantized parameters can't be made random: the function warns and returns 0.
    """
    plain = (nn.Parameter, Tensor)
    unsharded = any(hasattr(part, "reshard") for part in getattr(block, "modules", list)())  # for now, by FSDP2
    if unsharded or any(type(given) not in plain or given.is_meta for given in getattr(block, "parameters", list)()):
        what = f"{type(block).__name__} has sharded or quantized parameters: its positions are not checked"
        warnings.warn(what, stacklevel=2)
        return 0.0
    noise = torch.Generator().manual_seed(1)

    def drawn(given: Tensor) -> Tensor:
        return torch.randn(given.shape, generator=noise).to(given)

    def opened(given: Any) -> Any:  # a gate made outside the block is zero at first, and would hide what the block does
        zero = isinstance(given, Tensor) and given.is_floating_point() and given.ndim > 1 and not given.any()
        return drawn(given) if zero and ids.shape[1] not in given.shape[1:] else given

    if args and isinstance(args[0], Tensor) and args[0].is_floating_point():  # equal tokens would hide their order
        args = (drawn(args[0]), *tree_map(opened, args[1:]))
    kwargs = tree_map(opened, kwargs)
    outputs = []
    with _sandbox(block) as call:
        for order in (ids, torch.cat([ids[:, :prefix], permuted(ids[:, prefix:], shared)], dim=1)):
            chosen, named = select(args, kwargs, order)
            outputs.append(join(call(*chosen, **named), (args, kwargs), order))
    worst = 0.0
    for (_, first), (_, second) in zip(*map(tensors_in, outputs)):
        before = args[0].float() if args and first.shape == args[0].shape else 0.0
        added, again = first.float() - before, second.float() - before
        finite = added.isfinite() & again.isfinite()
        size = added[finite].norm()
        if size > 0:
            autocast = torch.is_autocast_enabled(first.device.type)
            kind = torch.get_autocast_dtype(first.device.type) if autocast else first.dtype
            difference = ((added - again)[finite].norm() / size).item()
            worst = max(worst, difference * (difference > TOLERANCE.get(kind, FULL_TOLERANCE)))
    return worst


@contextlib.contextmanager
def _sandbox(block: Callable) -> Iterator[Callable]:
    """Yield a function that calls the block with random parameters, in eval mode, without gradient, on copies of its
    buffers (noise for floating-point ones that are all zero) and with forked random generators. Afterwards the modules'
    attributes, including the contents of lists and dicts, are as before, even if the block has filled a cache."""
    if not isinstance(block, nn.Module):
        with torch.no_grad():
            yield block
        return
    generator = torch.Generator().manual_seed(0)
    state = {name: buffer.clone() for name, buffer in block.named_buffers()}
    for name, given in block.named_parameters():
        scale = GAIN / given[0].numel() ** 0.5 if given.ndim > 1 else 1.0
        state[name] = (scale * torch.randn(given.shape, generator=generator)).to(given)
    for name, given in block.named_buffers():
        if given.is_floating_point() and not given.float().any():  # not filled yet; positive, as it may be a variance
            state[name] = torch.randn(given.shape, generator=generator).abs().to(given)
    places = [vars(module) for module in block.modules()]
    places += [held for place in places for held in place.values() if type(held) in (dict, list)]
    before = [(place, place.copy()) for place in places]
    devices = {tensor.device for tensor in state.values() if tensor.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(devices):
        block.eval()
        try:
            yield lambda *args, **kwargs: functional_call(block, state, args, kwargs)
        finally:
            for place, held in before:
                place.clear()
                (place.extend if isinstance(place, list) else place.update)(held)


def tensors_in(given: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for each tensor in nested lists, tuples and dicts; a name is like "mask" or "0['cos']"."""
    if isinstance(given, Tensor):
        yield name, given
    elif isinstance(given, (dict, list, tuple)):
        for key, value in given.items() if isinstance(given, dict) else enumerate(given):
            yield from tensors_in(value, f"{name}[{key!r}]" if name else str(key))
