"""The cost of mixing tokens, as they become more: python benchmarks/linear_cost.py [options]

Measures forward and backward of one block of DiT, Diffusion-RWKV and Mamba-2 (two directions), and of their token
mixing alone: attention, WKV, the scan SSD, and the convolution before it, beside torch's own. They take turns in one
process, for 64 tokens up to `most`; a batch always has the same number of tokens in all.

Milliseconds are medians over the rounds. Memory is the most that a pass holds beside weights and inputs. Both are for
1,000 tokens, so that a cost linear in the tokens stays the same down its column. The blocks' multiply-adds for one
token, by arithmetic, stand beside them.

    width=384       channels, a multiple of heads and of 32
    heads=6         of attention
    most=16384      tokens; where memory does not suffice, the table says so
    rounds=5
    compile=true    compile what runs on a GPU; on a CPU nothing is
    out=…           a JSON file to write as well

python benchmarks/linear_cost.py                       # GPU
python benchmarks/linear_cost.py rounds=3 most=4096    # CPU
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
from timing import DEVICE, begin, circumstances, options_of, take_turns, write
from torch import Tensor, nn

from dit import DiTBlock
from tread.models.mamba import Mamba
from tread.models.rwkv import RWKVBlock
from tread.models.ssd import causal_conv, ssd
from tread.models.wkv import wkv
from tread.runtime.compiling import compile_blocks
from tread.runtime.device import autocast, use_precision
from tread.runtime.schema import Count

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
    precision = use_precision("auto", DEVICE)
    total = max(options.most, 65536 if DEVICE.type == "cuda" else 4096)
    compiled = options.compile and DEVICE.type == "cuda"
    blocks = {
        "DiT block": DiTBlock(options.width, options.heads, 4.0).to(DEVICE),
        "RWKV block": RWKVBlock(options.width, 4.0).to(DEVICE),
        "Mamba block": Mamba(hidden_size=options.width, depth=1, num_classes=1).blocks[0].to(DEVICE),
    }
    kernels = {"WKV": wkv, "SSD": ssd, "convolution": causal_conv}
    if compiled:
        compile_blocks(blocks.values())
        kernels = {name: torch.compile(kernel, dynamic=False) for name, kernel in kernels.items()}

    facts = circumstances() | {"precision": precision, "compiled": compiled, "batch_tokens": total}
    facts |= {key: value for key, value in asdict(options).items() if key not in ("out", "compile")}
    facts["threads"] = torch.get_num_threads()
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    print("\nms of forward and backward for 1,000 tokens\n")
    print(f"| tokens | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}")
    rows, tokens = [], 64
    while tokens <= options.most:
        row = {"tokens": tokens, "failed": {}}
        calls = passes(blocks, kernels, tokens, total // tokens, precision)
        turns = take_turns(calls, options.rounds, row["failed"])
        thousands = total // tokens * tokens / 1e3
        row["ms"] = {name: 1e3 * each.median / thousands for name, each in turns.items()}
        row["mb"] = {name: each.held / 1e6 / thousands for name, each in turns.items()}
        row["mmac"] = {  # without its modulation
            name: (block.multiply_adds(tokens) - 6 * options.width**2) / tokens / 1e6 for name, block in blocks.items()
        }
        rows.append(row)
        print(f"| {tokens:,} | {cells(row, 'ms', 2)} |", flush=True)
        write(options.out, {**facts, "rows": rows})
        tokens *= 4
    print("\nMB for 1,000 tokens; MMAC: millions of multiply-adds of a forward pass for one token\n")
    print(f"| tokens | {' | '.join(COLUMNS)} | {', MMAC | '.join(blocks)}, MMAC |")
    print(f"|{'---|' * (len(COLUMNS) + len(blocks) + 1)}")
    for row in rows:
        mmac = " | ".join(f"{value:.2f}" for value in row["mmac"].values())
        print(f"| {row['tokens']:,} | {cells(row, 'mb', 1)} | {mmac} |")
    print(f"\nlargest ms over the smallest: {spread(rows, 'ms')}")
    print(f"largest MB over the smallest: {spread(rows, 'mb')}")


def cells(row: dict, kind: str, places: int) -> str:
    """A row of a table, with the reason where there is no number."""
    return " | ".join(f"{row[kind][name]:.{places}f}" if name in row[kind] else row["failed"][name] for name in COLUMNS)


def spread(rows: list[dict], kind: str) -> str:
    """Each column's largest value over its smallest, in words."""
    columns = {name: [row[kind][name] for row in rows if name in row[kind]] for name in COLUMNS}
    return ", ".join(f"{name} {max(values) / min(values):.2f}" for name, values in columns.items() if values)


def passes(
    blocks: dict[str, nn.Module], kernels: dict[str, Callable[..., Tensor]], tokens: int, batch: int, precision: str
) -> dict[str, Callable[[], None]]:
    """Forward and backward passes by name, of random inputs; scan and convolution are those of both directions."""
    attended, mixed, scanned = blocks["DiT block"].attn, blocks["RWKV block"].spatial_mix, blocks["Mamba block"].mixer
    width, heads, conv, side = attended.proj.out_features, len(scanned.A_log), scanned.conv1d, math.isqrt(tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(batch, tokens, *shape, device=DEVICE, requires_grad=True)

    x, k, v = (random(width) for _ in range(3))
    inner, met = random(heads, scanned.head_dim), random(conv.in_channels)
    c, grid = torch.randn(batch, width, device=DEVICE), (side, tokens // side)
    dt = (torch.rand(batch, tokens, heads, device=DEVICE) / 10).requires_grad_()
    B, C = (random(scanned.directions, scanned.state) for _ in range(2))

    def attention() -> Tensor:
        q, keys, values = (tensor.unflatten(2, (attended.num_heads, -1)).transpose(1, 2) for tensor in (x, k, v))
        return nn.functional.scaled_dot_product_attention(q, keys, values)

    def both(forward: Callable[[], Tensor]) -> None:
        with autocast(DEVICE, precision):
            output = forward()
        output.float().sum().backward()

    calls = {
        "attention": attention,
        "WKV": lambda: kernels["WKV"](k, v, mixed.decay, mixed.bonus),
        "SSD": lambda: kernels["SSD"](inner, dt, -scanned.A_log.exp(), B, C),
        "convolution": lambda: kernels["convolution"](met, conv.weight, conv.bias),
        "nn.Conv1d": lambda: conv(nn.functional.pad(met.transpose(1, 2), (conv.kernel_size[0] - 1, 0))),
        "DiT block": lambda: blocks["DiT block"](x, c),
        "RWKV block": lambda: blocks["RWKV block"](x, c, grid=grid),
        "Mamba block": lambda: blocks["Mamba block"](x, c, grid=grid),
    }
    return {name: partial(both, forward) for name, forward in calls.items()}


if __name__ == "__main__":
    begin(main)
