"""Parameters and forward cost of the paper's sizes: python benchmarks/flops.py [tokens on a side, default 16]

GMAC: billions of multiply-adds of one forward pass for one image, matrix products and attention.
The ratio is dense over routed, with the paper's route r(2→depth−4) and half of the tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dit import DiT  # noqa: E402
from routing_module import Route  # noqa: E402

SIZES = {"S/2": (384, 12, 6), "B/2": (768, 12, 12), "L/2": (1024, 24, 16), "XL/2": (1152, 28, 16)}


def main() -> None:
    side = int(sys.argv[1]) if len(sys.argv) > 1 else 16
    print(f"{side * side} tokens")
    print("| size | route | parameters | dense GMAC | routed GMAC | ratio |")
    print("|---|---|---|---|---|---|")
    for name, (hidden_size, depth, heads) in SIZES.items():
        with torch.device("meta"):
            network = DiT(input_size=2 * side, hidden_size=hidden_size, depth=depth, num_heads=heads)
        route = Route.for_depth(depth)
        dense, routed = network.forward_flops() / 2e9, network.forward_flops([route]) / 2e9
        count = sum(parameter.numel() for parameter in network.parameters())
        ends = f"{route.start}→{route.end}"
        print(f"| {name} | {ends} | {count:,} | {dense:.2f} | {routed:.2f} | {dense / routed:.3f} |")


if __name__ == "__main__":
    main()
