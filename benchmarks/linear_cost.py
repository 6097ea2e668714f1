"""What mixing tokens costs as they become more: python benchmarks/linear_cost.py [width=384 heads=6 most=4096 …]

Forward and backward of one DiT block and one RWKV block, of their token mixing alone (attention, WKV), in turns in one
process, for 64 tokens up to `most`, with as many samples as make 4,096 tokens (65,536 on a GPU). Milliseconds are
medians over the rounds, for 1,000 tokens: what is linear in the tokens stays the same down its column. Beside them
stand the multiply-adds a token of the two blocks, by arithmetic.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from timing import seconds
from torch import Tensor

from dit import DiTBlock
from tread.models.rwkv import RWKVBlock
from tread.models.wkv import wkv
from tread.runtime.cli import answer_help, explained
from tread.runtime.compiling import compile_blocks
from tread.runtime.device import autocast, device_name
from tread.runtime.versions import git_revision


def main() -> None:
    given = {"width": 384, "heads": 6, "most": 4096, "rounds": 5, "out": ""}
    for argument in sys.argv[1:]:
        key, _, value = argument.partition("=")
        if key not in given:
            sys.exit(f"error: unknown option {key!r}; there are {', '.join(given)}")
        if key != "out" and not value.isdigit():
            sys.exit(f"error: {key} is {value!r}, but must be a whole number")
        given[key] = value if key == "out" else int(value)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = "bf16" if device.type == "cuda" else "fp32"
    total = 65536 if device.type == "cuda" else 4096
    blocks = DiTBlock(given["width"], given["heads"], 4.0).to(device), RWKVBlock(given["width"], 4.0).to(device)
    if device.type == "cuda":
        compile_blocks(blocks)
    mixing = torch.compile(wkv, dynamic=False) if device.type == "cuda" else wkv

    facts = {"device": device_name(device), "precision": precision, "batch_tokens": total, "commit": git_revision()}
    print(", ".join(f"{key} {value}" for key, value in (facts | given).items()))
    print(
        "ms of forward and backward for 1,000 tokens; MMAC: millions of multiply-adds of a forward pass for one token\n"
    )
    print("| tokens | attention | WKV | DiT block | RWKV block | WKV/attention | DiT block, MMAC | RWKV block, MMAC |")
    print("|---|---|---|---|---|---|---|---|")
    rows, tokens = [], 64
    while tokens <= given["most"]:
        row = measure(blocks, mixing, tokens, max(1, total // tokens), given["rounds"], device, precision)
        for name, block in zip(("dit", "rwkv"), blocks):  # without its modulation
            row[f"{name}_mmac"] = (block.multiply_adds(tokens) - 6 * given["width"] ** 2) / tokens / 1e6
        row["tokens"] = tokens
        rows.append(row)
        columns = ("attention", "wkv", "dit_block", "rwkv_block")
        cells = " | ".join(f"{row[name]:.2f}" for name in columns)
        cells += f" | {row['wkv'] / row['attention']:.2f} | {row['dit_mmac']:.2f} | {row['rwkv_mmac']:.2f}"
        print(f"| {tokens:,} | {cells} |", flush=True)
        tokens *= 4
    if given["out"]:
        Path(given["out"]).write_text(json.dumps({**facts, **given, "rows": rows}, indent=1) + "\n")


def measure(
    blocks: tuple[DiTBlock, RWKVBlock],
    mixing: Callable[..., Tensor],
    tokens: int,
    batch: int,
    rounds: int,
    device: torch.device,
    precision: str,
) -> dict[str, float]:
    """Median milliseconds of a forward and backward pass for 1,000 tokens, by what runs."""
    attended, mixed = blocks
    width, side = attended.attn.proj.out_features, math.isqrt(tokens)
    x, k, v = (torch.randn(batch, tokens, width, device=device, requires_grad=True) for _ in range(3))
    c = torch.randn(batch, width, device=device)
    mix = mixed.spatial_mix
    heads = attended.attn.num_heads

    def attention() -> Tensor:
        q, keys, values = (one.unflatten(2, (heads, -1)).transpose(1, 2) for one in (x, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values)

    calls: dict[str, Callable[[], Tensor]] = {
        "attention": attention,
        "wkv": lambda: mixing(k, v, mix.decay, mix.bonus),
        "dit_block": lambda: attended(x, c),
        "rwkv_block": lambda: mixed(x, c, grid=(side, tokens // side)),
    }

    def both_passes(call: Callable[[], Tensor]) -> None:
        with autocast(device, precision):
            output = call()
        output.float().sum().backward()

    times = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            taken = seconds(lambda call=call: both_passes(call), device)
            if turn:  # the first one warms up
                times[name].append(1e6 * taken / (batch * tokens))
    return {name: statistics.median(taken) for name, taken in times.items()}


if __name__ == "__main__":
    answer_help(__doc__)
    with explained():
        main()
