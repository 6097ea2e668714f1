"""torch.compile block by block: all blocks of a network share one graph for each kind of call.

A kind is set by batch shape, number of tokens, precision and whether gradients are on. A run has a handful of kinds."""

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import nn

Compile = Literal["auto", True, False]
BUDGET = 0.9  # fraction of the activations that torch may keep; at 0.9 it still recomputes no matrix products
GRAPHS = 256  # per block, more than any run needs; torch's default limit, 8, is too small for routes and sampling


def why_not(device: torch.device) -> str | None:
    """Try torch.compile on a small layer. Return None if it works on the device, else the error in one line."""
    layer, x = nn.LayerNorm(8, device=device), torch.ones(2, 8, device=device)
    return why_failing(lambda: torch.compile(layer, dynamic=False)(x).sum().backward())


def first_line(error: Exception) -> str:
    """Return an error's type and the first line of its message, cut to 300 characters."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300].rstrip()}"


def why_failing(attempt: Callable[[], None]) -> str | None:
    """Call `attempt`, which compiles. Return None if it succeeds or runs out of memory, else its error in one line."""
    try:
        attempt()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    except Exception as error:  # compilers, drivers and caches fail in many ways
        return first_line(error)
    return None


def settle_compile(value: Compile, device: torch.device) -> tuple[bool, str | None]:
    """Return (whether to compile, an error in one line or None). The setting `value` is True (always), False (never) or
    "auto" (on GPUs only). If it asks for compilation but a trial on the device fails, return (False, trial's error)."""
    if not value or (value == "auto" and device.type != "cuda"):
        return False, None
    reason = why_not(device)
    return reason is None, reason


def compile_blocks(blocks: Iterable[nn.Module], backend: str = "inductor", saving: bool = False) -> None:
    """Compile each block in place with torch.compile. Weights and parameter names stay; deep copies are not compiled.
    saving=True: graphs compiled from now on save fewer activations; backward recomputes those that are cheap."""
    import torch._dynamo  # imported here because it takes seconds
    import torch._functorch.config

    torch._dynamo.config.cache_size_limit = max(GRAPHS, torch._dynamo.config.cache_size_limit)
    torch._dynamo.config.optimize_ddp = False  # would split blocks' graphs; DDP's all-reduce overlaps anyway
    torch._functorch.config.activation_memory_budget = BUDGET if saving else 1.0
    for block in blocks:
        block.compile(dynamic=False, fullgraph=True, backend=backend)
