"""Passes that read no value: on a GPU each read, and each copy of a constant, would wait for the device.

The reference is the meta device, whose tensors have no values. Checks of values that a CPU makes are outside: see
`readable` in routing_module.py."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from routing_module import Record
from tread.checkpoints.network import build_network, read_network
from tread.models.architectures import ARCHITECTURES
from tread.routing.ids import pair

META = torch.device("meta")
ROUTED = {"dit": "tread", "maskdit": "maskdit", "sprint": "sprint", "dit_text": "tread_text"}  # others: tread_<name>


class NoReads(TorchDispatchMode):
    """Refuses what takes tensors that hold values, numbers aside."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.ndim]
        assert all(tensor.device == META for tensor in tensors), f"{function} takes a tensor that is on the CPU"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("routed", [pytest.param(False, marks=pytest.mark.slow), True], ids=["dense", "routed"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_network_reads_a_value(composed, name, routed):
    config = composed(f"model={ROUTED.get(name, f'tread_{name}')}", "model.hidden_size=32", "model.depth=6")
    config["model"] |= {"num_heads": 2} if "num_heads" in config["model"] else {}
    config["dataset"] |= {"channels": 4, "size": 8, "num_classes": 10}
    config["text"] |= {"encoder": "any", "tokens": 8, "width": 12, "pooled": 6}
    cfg = read_network(config)
    with META:
        network = build_network(cfg)
    grid, count = network.grid, 3
    draws = torch.empty(count, grid[0] * grid[1], device=META)
    inputs = torch.empty(count, 4, 8, 8, device=META), torch.empty(count, device=META), network.null(count)
    with NoReads():
        routes = [pair(route, draws, grid) for route in cfg.model.resolved_routes] if routed else ()
        output = network(*inputs, routes=routes, record=Record(range(len(network.blocks))))
        output.square().mean().backward()
    assert output.shape[0] == count and len(routes) == routed
    assert all(parameter.grad is not None for parameter in network.parameters() if parameter.requires_grad)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: bool((x > 0).all()),
        lambda x: x * torch.tensor([1.0, 2.0]).to(META),
        lambda x: x.cpu(),
    ],
)
def test_reads_are_seen(read):
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)), NoReads():
        read(torch.empty(3, 2, device=META))
