"""torch.compile block by block: all blocks of a network share one graph for each kind of call.

A kind of call is a batch shape, a number of tokens, a precision and whether gradients are kept; so a
run has a handful of graphs, however deep its network is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Compile = Literal["auto", True, False]
GRAPHS = 64  # of one block: more than any run needs. torch's own limit, 8, is less than routes and sampling may


def why_not(device: torch.device) -> str | None:
    """None if torch.compile works for a device, else why not, in a line. Compiles a few operations to see it."""

    def sample(x: Tensor) -> Tensor:
        return F.gelu(F.layer_norm(x, x.shape[-1:]), approximate="tanh")

    x = torch.ones(2, 8, device=device, requires_grad=True)
    try:
        torch.compile(sample, dynamic=False)(x).sum().backward()
    except Exception as error:  # compilers, drivers and caches fail in many ways
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
    return None


def settle_compile(value: Compile, device: torch.device) -> tuple[bool, str | None]:
    """Whether to compile on a device, and, where that was wanted and does not work, why; auto wants it on a GPU."""
    if not value or (value == "auto" and device.type != "cuda"):
        return False, None
    reason = why_not(device)
    return reason is None, reason


def compile_blocks(blocks: Iterable[nn.Module], backend: str = "inductor") -> None:
    """Compile each block in place: names, weights and copies of the network stay as they are."""
    import torch._dynamo  # imported here because it takes seconds, and whoever does not compile needs none of it

    torch._dynamo.config.cache_size_limit = max(GRAPHS, torch._dynamo.config.cache_size_limit)
    torch._dynamo.config.optimize_ddp = False  # which would cut a block in DDP; between blocks, sums overlap anyway
    for block in blocks:
        block.compile(dynamic=False, fullgraph=True, backend=backend)
