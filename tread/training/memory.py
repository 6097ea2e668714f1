"""The memory that a training step needs, known before the first: its passes run on tensors that have no numbers.

torch's fake tensors have shapes, types and storages of a size, but hold nothing, so that the step of any network takes
seconds and no memory. After each operation the bytes of all storages that are alive are counted.
"""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from routing_module import Route
from tread.checkpoints.network import build_network, process_of
from tread.routing.ids import pair
from tread.training.settings import Settings


class StepMemory(NamedTuple):
    """Bytes of one training step on one device, of an eager network.

    weights    of the network, in fp32; gradients take as much.
    averages   of the weights.
    optimizer  its state.
    saved      what the forward pass keeps for the backward pass.
    peak       the most at once, of all these and of what single operations need.
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
