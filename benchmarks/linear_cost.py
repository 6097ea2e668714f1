"""What mixing tokens costs as they become more: python benchmarks/linear_cost.py [options]

Forward and backward of one block of DiT, Diffusion-RWKV and Mamba-2 (its defaults: two directions), and of their token
mixing alone (attention, WKV, the scan SSD, and the convolution before it, beside torch's own), in turns in one process,
for 64 tokens up to `most`, with as many samples as make the same number of tokens each time. Milliseconds are medians
over the rounds, and memory is what a pass holds at most beside weights and inputs, both for 1,000 tokens: what is
linear in the tokens stays the same down its column.
Beside them stand the multiply-adds a token of the blocks, by arithmetic.

    width=384       channels, a multiple of heads and of 32
    heads=6         of attention
    most=16384      tokens; what memory does not suffice for is left out and said
    rounds=5
    compile=true    compile what runs on a GPU; on a CPU nothing is
    out=…           a JSON file to write as well

python benchmarks/linear_cost.py                       # GPU
python benchmarks/linear_cost.py rounds=3 most=4096    # CPU
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
from timing import begin, command, options_of, take_turns, write
from torch import Tensor, nn

from dit import DiTBlock
from tread.models.mamba import Mamba
from tread.models.rwkv import RWKVBlock
from tread.models.ssd import causal_conv, ssd
from tread.models.wkv import wkv
from tread.runtime.compiling import compile_blocks
from tread.runtime.device import autocast, device_name, use_precision
from tread.runtime.schema import Count
from tread.runtime.versions import git_revision

COLUMNS = ("attention", "WKV", "SSD", "convolution", "nn.Conv1d", "DiT block", "RWKV block", "Mamba block")


@dataclass(frozen=True)
class Options:
    width: Count = 384
    heads: Count = 6
    most: Count = 16384
    rounds: Count = 5
    compile: bool = True
    out: str | None = None

    def __post_init__(self) -> None:
        if self.width % self.heads or self.width % 32:
            raise ValueError(f"width is {self.width}, but must be a multiple of 32 and of heads, {self.heads}")
        if self.most < 64:
            raise ValueError(f"most is {self.most}, but must be at least 64, where it begins")


def main() -> None:
    options, _ = options_of(Options, others=False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = use_precision("auto", device)
    total = max(options.most, 65536 if device.type == "cuda" else 4096)
    compiled = options.compile and device.type == "cuda"
    blocks = {
        "DiT block": DiTBlock(options.width, options.heads, 4.0).to(device),
        "RWKV block": RWKVBlock(options.width, 4.0).to(device),
        "Mamba block": Mamba(hidden_size=options.width, depth=1, num_classes=1).blocks[0].to(device),
    }
    kernels = {"WKV": wkv, "SSD": ssd, "convolution": causal_conv}
    if compiled:
        compile_blocks(blocks.values())
        kernels = {name: torch.compile(kernel, dynamic=False) for name, kernel in kernels.items()}

    facts = {"device": device_name(device), "precision": precision, "compiled": compiled, "batch_tokens": total}
    facts |= {"torch": torch.__version__, "threads": torch.get_num_threads(), "commit": git_revision()}
    facts |= {key: value for key, value in asdict(options).items() if key not in ("out", "compile")}
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    print("\nms of forward and backward for 1,000 tokens\n")
    print(f"| tokens | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}")
    rows, tokens = [], 64
    while tokens <= options.most:
        calls = passes(blocks, kernels, tokens, total // tokens, device, precision)
        turns, failed = take_turns(calls, options.rounds, device)
        thousands = total // tokens * tokens / 1e3
        row = {"tokens": tokens, "failed": failed}
        row["ms"] = {name: 1e3 * statistics.median(each.seconds) / thousands for name, each in turns.items()}
        row["mb"] = {name: each.held / 1e6 / thousands for name, each in turns.items()}
        row["mmac"] = {  # without its modulation
            name: (block.multiply_adds(tokens) - 6 * options.width**2) / tokens / 1e6 for name, block in blocks.items()
        }
        rows.append(row)
        print(f"| {tokens:,} | {cells(row, 'ms', 2)} |", flush=True)
        write(options.out, {**facts, "rows": rows, "command": command()})
        tokens *= 4
    print("\nMB for 1,000 tokens; MMAC: millions of multiply-adds of a forward pass for one token\n")
    print(f"| tokens | {' | '.join(COLUMNS)} | {', MMAC | '.join(blocks)}, MMAC |")
    print(f"|{'---|' * (len(COLUMNS) + len(blocks) + 1)}")
    for row in rows:
        mmac = " | ".join(f"{row['mmac'][name]:.2f}" for name in blocks)
        print(f"| {row['tokens']:,} | {cells(row, 'mb', 1)} | {mmac} |")
    print(f"\nlargest ms over the smallest: {spread(rows, 'ms')}")
    print(f"largest MB over the smallest: {spread(rows, 'mb')}")


def cells(row: dict, kind: str, places: int) -> str:
    """A row of a table, with the reason where there is no number."""
    return " | ".join(f"{row[kind][name]:.{places}f}" if name in row[kind] else row["failed"][name] for name in COLUMNS)


def spread(rows: list[dict], kind: str) -> str:
    """How far each column is from flat."""
    columns = {name: [row[kind][name] for row in rows if name in row[kind]] for name in COLUMNS}
    return ", ".join(f"{name} {max(values) / min(values):.2f}" for name, values in columns.items() if values)


def passes(
    blocks: dict[str, nn.Module],
    kernels: dict[str, Callable[..., Tensor]],
    tokens: int,
    batch: int,
    device: torch.device,
    precision: str,
) -> dict[str, Callable[[], None]]:
    """Forward and backward passes by name, of random inputs; scan and convolution are those of both directions."""
    attended, mixed, scanned = blocks["DiT block"].attn, blocks["RWKV block"].spatial_mix, blocks["Mamba block"].mixer
    width, heads, side = attended.proj.out_features, attended.num_heads, math.isqrt(tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(batch, tokens, *shape, device=device, requires_grad=True)

    x, k, v = (random(width) for _ in range(3))
    c, grid = torch.randn(batch, width, device=device), (side, tokens // side)
    of_heads = len(scanned.A_log)
    inner, dt = random(of_heads, scanned.head_dim), torch.rand(batch, tokens, of_heads, device=device) / 10
    B, C = (random(scanned.directions, scanned.state) for _ in range(2))
    dt.requires_grad_()
    conv = scanned.conv1d
    met, before = random(conv.in_channels), (conv.kernel_size[0] - 1, 0)

    def attention() -> Tensor:
        q, keys, values = (tensor.unflatten(2, (heads, -1)).transpose(1, 2) for tensor in (x, k, v))
        return nn.functional.scaled_dot_product_attention(q, keys, values)

    def both(forward: Callable[[], Tensor]) -> None:
        with autocast(device, precision):
            output = forward()
        output.float().sum().backward()

    calls = {
        "attention": attention,
        "WKV": lambda: kernels["WKV"](k, v, mixed.decay, mixed.bonus),
        "SSD": lambda: kernels["SSD"](inner, dt, -scanned.A_log.exp(), B, C),
        "convolution": lambda: kernels["convolution"](met, conv.weight, conv.bias),
        "nn.Conv1d": lambda: conv(nn.functional.pad(met.transpose(1, 2), before)),
        "DiT block": lambda: blocks["DiT block"](x, c),
        "RWKV block": lambda: blocks["RWKV block"](x, c, grid=grid),
        "Mamba block": lambda: blocks["Mamba block"](x, c, grid=grid),
    }
    return {name: partial(both, forward) for name, forward in calls.items()}


if __name__ == "__main__":
    begin(main)
