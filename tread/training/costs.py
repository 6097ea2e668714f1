"""What training takes on a device: seconds of a step, by arithmetic, and the micro-batch that its memory holds.

A step is the sum of its matrix products, its attention, what its blocks read and write outside of both, embedding and
last layer, and optimizer and averages; but no shorter than the host takes to launch it. The constants are predictions
for compiled networks in bf16 until benchmarks/gpu_check.py has measured them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from routing_module import Route, check_routes
from tread.models.backbone import Backbone
from tread.routing.ids import count_run
from tread.training.memory import StepMemory, step_memory
from tread.training.settings import Settings


class Device(NamedTuple):
    """A GPU by its maker's data sheet: memory in bytes, bf16 FLOP/s of matrix products, and bytes/s of its memory."""

    memory: float
    products: float
    bandwidth: float


DEVICES = {
    "h200": Device(141e9, 989e12, 4.8e12),
    "h100": Device(80e9, 989e12, 3.35e12),
    "a100": Device(80e9, 312e12, 2.04e12),
    "4090": Device(24e9, 165e12, 1.01e12),
}
# what of a device's figures compiled training reaches
WIDTHS, REACHED = (384, 768, 1024, 1152), (0.34, 0.52, 0.58, 0.6)  # of products, by the network's width
ATTENTION = {64: 0.19, 72: 0.13}  # of products, by the width of a head; torch's backends on Hopper
BANDWIDTH = 0.875
# bytes for each token, channel and block: saved for the backward pass, and moved outside of products and attention
BLOCK_BYTES = {
    "dit": (36.2, 179),
    "maskdit": (36.2, 179),
    "lightning": (37.5, 217),
    "sprint": (37.5, 217),
    "dit_text": (49, 242),
    "lightning_text": (49, 242),
    "rwkv": (74, 560),
    "mamba": (144, 1435),
}
END_BYTES = 280  # moved by embedding and last layer, for each token and channel
UPDATE_BYTES = 44  # moved by optimizer, clipping and average, for each parameter
LAUNCH = 1.1e-3  # seconds of the host for each compiled block's forward, backward and update


def step_seconds(cfg: Settings, network: Backbone, routes: Sequence[Route], images: int, device: Device) -> float:
    """Predict the seconds of a compiled bf16 step of `images` samples on one device, with fp32: off for routes."""
    width, tokens = network.hidden_size, [network.num_tokens] * len(network.blocks)
    for route in check_routes(routes, len(network.blocks)):
        tokens[route.start : route.end + 1] = [count_run(route, network.num_tokens, network.grid)] * (
            route.end + 1 - route.start
        )
    linear = sum(block.multiply_adds(count, attention=False) for block, count in zip(network.blocks, tokens))
    mixing = sum(block.multiply_adds(count) for block, count in zip(network.blocks, tokens)) - linear
    heads = width // getattr(cfg.model, "num_heads", width)
    reached = float(np.interp(width, WIDTHS, REACHED))
    attention = ATTENTION[min(ATTENTION, key=lambda size: abs(size - heads))]
    parameters = sum(parameter.numel() for parameter in network.parameters())
    moved = BLOCK_BYTES.get(cfg.model.architecture, BLOCK_BYTES["dit"])[1] * width * sum(tokens)
    moved = images * (moved + END_BYTES * width * network.num_tokens) + UPDATE_BYTES * parameters
    products = 6 * images * (linear / reached + mixing / attention) / device.products
    return max(products + moved / (BANDWIDTH * device.bandwidth), LAUNCH * len(network.blocks))


def compiled_memory(cfg: Settings, routes: Sequence[Route], images: int) -> StepMemory:
    """Trace a bf16 step, see `step_memory`, and replace what its blocks save by what compiled blocks do."""
    few, more = (step_memory(cfg, routes, count, "bf16") for count in (1, 2))
    eager, fixed = more.saved - few.saved, few.saved - (more.saved - few.saved)
    network_tokens = (cfg.dataset.size // cfg.model.patch_size) ** 2
    tokens = [network_tokens] * cfg.model.depth
    for route in check_routes(routes, cfg.model.depth):
        kept = count_run(route, network_tokens, (int(network_tokens**0.5),) * 2)
        tokens[route.start : route.end + 1] = [kept] * (route.end + 1 - route.start)
    saved = BLOCK_BYTES.get(cfg.model.architecture, BLOCK_BYTES["dit"])[0] * cfg.model.hidden_size * sum(tokens)
    saved = int(fixed + images * min(saved, eager))
    rest = few.weights + few.averages + few.optimizer
    return few._replace(saved=saved, peak=rest + max(saved, few.weights))


def largest_micro_batch(cfg: Settings, routes: Sequence[Route], images: int, device: Device) -> int:
    """Return the largest divisor of `images` whose step fits 94% of the device's memory; 0 if none does."""
    divisors = [count for count in range(images, 0, -1) if images % count == 0]
    one, two = (compiled_memory(cfg, routes, count) for count in (1, 2))
    each = two.saved - one.saved
    rest = one.weights + one.averages + one.optimizer
    fits = (n for n in divisors if rest + max(one.saved + (n - 1) * each, one.weights) <= 0.94 * device.memory)
    return next(fits, 0)
