"""Costs of training: FLOPs, which depend on the routes of each step; bytes and seconds of a step on a device.

A step takes the sum of the times for matrix products, attention, what its blocks read and write besides, embedding and
last layer, and optimizer and averages, and never less than the host takes to launch it. The constants are predictions
for compiled networks in bf16; benchmarks/gpu_check.py measures what they stand for.

A step's memory is traced: its passes run on torch's fake tensors, which have shapes, types and storage sizes but no
numbers, and after each operation the bytes of all storages in use are counted.
"""

import itertools
import time
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from routing_module import Route, check_routes
from tread.checkpoints.network import build_network, process_of
from tread.models.backbone import Backbone
from tread.routing.ids import count_run, pair
from tread.runtime.compiling import compile_blocks
from tread.runtime.device import autocast, wait_for
from tread.training.alignment import Aligner
from tread.training.settings import Settings
from tread.training.step import active_routes


class Device(NamedTuple):
    """A GPU by its maker's data sheet: bytes of memory, bf16 FLOP/s of matrix products, bytes/s of its memory."""

    memory: float
    products: float
    bandwidth: float


class BlockBytes(NamedTuple):
    """Bytes of a compiled bf16 block for each token and channel: kept for the backward pass, and read or written
    outside of matrix products and attention, forward and backward."""

    saved: float
    moved: float


DEVICES = {
    "h200": Device(141e9, 989e12, 4.8e12),
    "h100": Device(80e9, 989e12, 3.35e12),
    "a100": Device(80e9, 312e12, 2.04e12),
    "4090": Device(24e9, 165e12, 1.01e12),
}
BLOCK_BYTES = {  # by architecture; tests/runtime/test_compiling.py holds them against what torch's compiler makes
    "dit": BlockBytes(36.2, 179),
    "maskdit": BlockBytes(36.2, 179),
    "lightning": BlockBytes(37.5, 217),
    "sprint": BlockBytes(37.5, 217),
    "dit_text": BlockBytes(49, 242),
    "lightning_text": BlockBytes(49, 242),
    "rwkv": BlockBytes(74, 560),
    "mamba": BlockBytes(144, 1435),
}
END_BYTES = BlockBytes(30, 280)  # of embedding and last layer together, likewise
UPDATE_BYTES = 44  # read or written by clipping, AdamW and one average, for each parameter
WIDTHS, REACHED = (384, 768, 1024, 1152), (0.34, 0.52, 0.58, 0.6)  # network's width → share of `products` reached
ATTENTION = {64: 0.19, 72: 0.13}  # width of a head → share of `products` that attention reaches
BANDWIDTH = 0.875  # share of `bandwidth` reached
LAUNCH = 1.1e-3  # seconds of the host for a block's forward pass, backward pass and update, compiled
USABLE = 0.94  # share of `memory`; the rest is CUDA's and fragments'


def training_flops(cfg: Settings, network: Backbone, steps: range, aligner: Aligner | None = None) -> int:
    """Return the FLOPs of the given training steps on whole batches, with the routes that each step has."""
    alike = itertools.groupby(active_routes(cfg, step) for step in steps)
    each = sum(sample_flops(network, routes, aligner) * sum(1 for _ in group) for routes, group in alike)
    return each * cfg.train.batch_size


def sample_flops(network: Backbone, routes: Sequence[Route], aligner: Aligner | None = None) -> int:
    """Return the FLOPs of training on one sample: forward, backward (twice the forward pass), and alignment."""
    return 3 * network.forward_flops(routes) + (aligner.flops(routes) if aligner else 0)


class StepMemory(NamedTuple):
    """Bytes of memory that one training step takes on one device.

    weights    the network's weights, in fp32; gradients take as much.
    averages   the averaged weights.
    optimizer  the optimizer's state.
    saved      what the forward pass keeps for the backward pass.
    peak       the most bytes in use at any moment of the step, with all of the above and temporary tensors.
    """

    weights: int
    averages: int
    optimizer: int
    saved: int
    peak: int


class Alive(TorchDispatchMode):
    """Counts the bytes of the storages that operations make: those alive `now`, and the most at once, `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> object:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known:
                    self.known.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self.drop, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def drop(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def step_memory(cfg: Settings, routes: Sequence[Route], images: int, precision: str) -> StepMemory:
    """Trace one step of `images` samples under these routes, without a compiler and without alignment."""
    process, shape = process_of(cfg), (images, cfg.dataset.channels, cfg.dataset.size, cfg.dataset.size)
    with FakeTensorMode(allow_non_fake_inputs=True), Alive() as alive:
        network = build_network(cfg)
        network.activation_checkpointing = cfg.train.activation_checkpointing
        weights = sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))
        before = alive.now
        x, noise, level = torch.empty(shape), torch.empty(shape), torch.empty(images)
        chosen = [pair(route, torch.empty(images, network.num_tokens), network.grid) for route in routes]
        alive.peak = alive.now
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = process.loss(network, x, network.null(images), level, noise, chosen).mean()
        saved = alive.now - before
        loss.backward()
    averages = weights * (1 + len(cfg.ema.power))
    optimizer = int(cfg.optim.copies * sum(4 * p.numel() for p in network.parameters() if p.requires_grad))
    return StepMemory(weights, averages, optimizer, saved, alive.peak + averages + optimizer)


def tokens_of_blocks(network: Backbone, routes: Sequence[Route]) -> list[int]:
    """Return on how many tokens each block runs."""
    tokens = [network.num_tokens] * len(network.blocks)
    for route in check_routes(routes, len(tokens)):
        for block in range(route.start, route.end + 1):
            tokens[block] = count_run(route, network.num_tokens, network.grid)
    return tokens


def moved_and_saved(cfg: Settings, network: Backbone, routes: Sequence[Route]) -> BlockBytes:
    """Return the bytes that a compiled bf16 step saves and moves per sample, without optimizer and averages."""
    block, tokens = BLOCK_BYTES.get(cfg.model.architecture, BLOCK_BYTES["dit"]), sum(tokens_of_blocks(network, routes))
    ends = network.num_tokens
    return BlockBytes(*(network.hidden_size * (b * tokens + e * ends) for b, e in zip(block, END_BYTES)))


def step_seconds(cfg: Settings, network: Backbone, routes: Sequence[Route], images: int, device: Device) -> float:
    """Predict the seconds of a compiled step of `images` samples on one device, with all blocks in bf16."""
    tokens, width = tokens_of_blocks(network, routes), network.hidden_size
    linear = sum(block.multiply_adds(count, attention=False) for block, count in zip(network.blocks, tokens))
    mixing = sum(block.multiply_adds(count) for block, count in zip(network.blocks, tokens)) - linear
    head = width // getattr(cfg.model, "num_heads", width)
    attention = ATTENTION[min(ATTENTION, key=lambda known: abs(known - head))]
    products = linear / float(np.interp(width, WIDTHS, REACHED)) + mixing / attention
    moved = images * moved_and_saved(cfg, network, routes).moved + UPDATE_BYTES * count_parameters(network)
    seconds = 6 * images * products / device.products + moved / (BANDWIDTH * device.bandwidth)
    return max(seconds, LAUNCH * len(tokens))


def count_parameters(network: Backbone) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def memory(
    cfg: Settings, network: Backbone, routes: Sequence[Route], images: int, precision: str, compiled: bool
) -> StepMemory:
    """Return the bytes of a step on one device: traced for an eager network, else predicted from BLOCK_BYTES."""
    if not compiled:
        return step_memory(cfg, routes, images, precision)
    weights = 4 * count_parameters(network)
    averages, optimizer = weights * (1 + len(cfg.ema.power)), int(weights * cfg.optim.copies)
    saved = int(weights / 2 + images * moved_and_saved(cfg, network, routes).saved)  # autocast keeps weights in bf16
    return StepMemory(weights, averages, optimizer, saved, weights + averages + optimizer + max(saved, weights))


def largest_micro_batch(few: StepMemory, more: StepMemory, images: int, room: float) -> int:
    """Return the largest divisor of `images` at which a step fits a device; 0 if a single sample does not.

    few, more  a step's memory with one sample and with two.
    room       the device's memory in bytes, of which the step may use the share USABLE.
    """
    each = more.saved - few.saved
    fits = (n for n in range(images, 0, -1) if images % n == 0 and few.peak + (n - 1) * each <= USABLE * room)
    return next(fits, 0)


def measured_seconds(
    cfg: Settings, routes: Sequence[Route], images: int, device: torch.device, precision: str
) -> float:
    """Measure forward and backward pass of `images` samples on this machine: the median of three, on random data."""
    network = build_network(cfg).to(device)
    if device.type == "cuda":
        compile_blocks(network.compiled())
    shape = (images, cfg.dataset.channels, cfg.dataset.size, cfg.dataset.size)
    x, noise, level = (
        torch.randn(shape, device=device),
        torch.randn(shape, device=device),
        torch.zeros(images, device=device),
    )
    draws = torch.rand(images, network.num_tokens, device=device)
    chosen, seconds = [pair(route, draws, network.grid) for route in routes], []
    for _ in range(5):
        began = time.perf_counter()
        with autocast(device, precision):
            loss = process_of(cfg).loss(network, x, network.null(images), level.sigmoid(), noise, chosen).mean()
        loss.backward()
        wait_for(device)
        seconds.append(time.perf_counter() - began)
    return sorted(seconds[2:])[1]
