"""The patch embedding's bottleneck: against two matrices by hand, torch's FLOPs counter, and in state dicts."""

import pytest
import torch
from conftest import CPU, equal
from modes import batch, counted_flops, hot
from torch.nn import functional as F
from torch.testing import assert_close

from dit import DiT
from tread.checkpoints.exporting import public_names
from tread.checkpoints.network import build_network
from tread.checkpoints.weights import StoredWeights, sizes
from tread.models.embedders import PatchEmbed
from tread.routing.ids import pair
from tread.runtime.device import autocast
from tread.runtime.tensor_files import EXPAND, plain_names

SIZES = ("dataset.channels=4", "dataset.size=8", "model.patch_size=2", "model.hidden_size=32", "model.num_heads=2")


def test_a_token_is_its_patch_by_two_matrices():
    part, positions = hot(PatchEmbed(4, 2, 16, bottleneck=6)), torch.randn(16, 16)
    assert [(name, tuple(value.shape)) for name, value in part.named_parameters()] == [
        ("proj.weight", (6, 4, 2, 2)),
        ("expand.weight", (16, 6)),
        ("expand.bias", (16,)),
    ]
    (x, _, _), first = batch(side=8), part.proj.weight.flatten(1)
    expected = torch.empty(3, 16, 16)
    for row, column in torch.cartesian_prod(torch.arange(4), torch.arange(4)).tolist():
        patch = x[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].flatten(1)
        expected[:, 4 * row + column] = patch @ first.T @ part.expand.weight.T + part.expand.bias
    assert_close(part(x, positions), expected + positions)
    compiled = torch.compile(part, backend="eager", fullgraph=True)
    assert_close(compiled(x, positions), expected + positions)
    with autocast(CPU, "bf16"):
        assert part(x, positions, "bf16").dtype == torch.bfloat16
    torch._dynamo.reset()


@pytest.mark.parametrize("model", ["tread", "tread_lightning", "sprint", "maskdit"])
def test_flops_and_names_of_every_network_that_has_one(read_config, model):
    cfg = read_config(f"model={model}", *SIZES, "model.depth=6", "model.bottleneck=6")
    network, (x, t, y), routes = build_network(cfg), batch(side=8), cfg.model.resolved_routes
    part = network.x_embedder
    assert_close(part(x), F.linear(part.proj(x).flatten(2).mT, part.expand.weight))
    for used in ((), routes):
        drawn = [pair(route, torch.rand(3, 16), (4, 4)) for route in used]
        assert 3 * network.forward_flops(used) == counted_flops(network, x, t, y, drawn)
    told, state = sizes(network.state_dict()), network.state_dict()
    assert (told["model.bottleneck"], told["model.hidden_size"]) == (6, 32)
    assert equal(StoredWeights("a file", None, state).fit(state, cfg.model), state)
    if cfg.model.masks:  # its released files' label matrix has as many rows as tokens have channels
        assert equal(plain_names(public_names(state)), state)


def test_without_one_nothing_is_new(read_config):
    names = {name for name in DiT(input_size=8, depth=1).state_dict() if "x_embedder" in name}
    assert names == {"x_embedder.proj.weight", "x_embedder.proj.bias"} and EXPAND not in names
    with pytest.raises(ValueError, match="model.bottleneck is 6, but rwkv has no such choice"):
        read_config("model=rwkv", "model.bottleneck=6")
