"""Values of the first block mixed into the later ones': golden numbers of SPRINT's fork, a twin, the closed form."""

import copy
from dataclasses import replace

import pytest
import test_text
import torch
from conftest import equal, state_of
from modes import assert_golden_gradients, assert_modes_agree, assert_near, batch, counted_flops, hot
from safetensors.torch import load_file
from torch.nn import functional as F

from dit import DiT
from routing_module import Record, Route, run_blocks
from tread.checkpoints.weights import StoredWeights, sizes
from tread.models.lightning import LightningDiT
from tread.models.sprint import DENSE, Sprint
from tread.routing.ids import pair
from tread.training.muon import block_matrices

SIZES = {"input_size": 4, "patch_size": 1, "hidden_size": 16, "depth": 6, "num_heads": 2}
NETWORKS = {  # name → (class, arguments, route)
    "dit": (DiT, {"num_classes": 5}, Route(1, 3, 0.5, "off")),
    "lightning": (LightningDiT, {"num_classes": 5, "qk_norm": True}, Route(2, 4, 0.5, "off", "norm")),
    "text": (test_text.TextDiT, test_text.ENCODER, Route(1, 3, 0.5, "off", "row")),
    "sprint": (Sprint, {"num_classes": 5, "positions": "rope"}, Route(2, -3, 0.75, "off", "group")),
}


def build(name, value_residual=True):
    """A network with random weights, its inputs, and a pair of its route and ids or draws."""
    kind, more, route = NETWORKS[name]
    network, (x, t, y) = hot(kind(**SIZES, **more, value_residual=value_residual), 0.2), batch()
    y = test_text.texts(network) if name == "text" else y
    noise = torch.rand(3, 16, generator=torch.Generator().manual_seed(2))
    return network, (x, t, y), [pair(route, noise, (4, 4))]


def shares(network):
    return {name: value for name, value in network.named_parameters() if name.endswith("v1_lambda")}


def test_golden_forward_and_gradients_of_sprint_with_a_class_token(asset):
    """Their class token, tokens and all, is put before the patches here; a route keeps it in two of four samples."""
    g = load_file(asset("golden/sprint_tiny_hot.safetensors"))
    sizes = {"input_size": 8, "patch_size": 1, "in_channels": 8, "hidden_size": 64, "num_heads": 4, "num_classes": 10}
    network = Sprint(depth=6, **sizes, norm="rms", positions="rope", value_residual=True)
    theirs = state_of(g)
    state = {name: theirs.get(name, torch.ones(64)) for name in network.state_dict()}
    network.load_state_dict(state | {"pos_embed": theirs["pos_embed"][:, 1:]}, strict=True)
    token = F.linear(g["in.cls_token"], theirs["cls_projectors2.weight"], theirs["cls_projectors2.bias"])
    token = F.rms_norm(token, (64,), theirs["wg_norm.weight"], 1e-6)[:, None]
    tokens, c = network.embed(g["in.x"], g["in.t"], g["in.y"])
    still = torch.cat([torch.ones(4, 1, 8), torch.zeros(4, 1, 8)], dim=2)
    tokens, tables = torch.cat([token, tokens], dim=1), [torch.cat([still, *network.along(4)], dim=1)]
    fused = []
    network.fusion_proj.register_forward_hook(lambda _, given, output: fused.append(output))

    def run(dropped, routes):
        record = Record((DENSE - 1, 6 - 1 - DENSE))
        blocks = network.fusing(network.blocks, network.from_g(tokens, dropped), record)
        x = run_blocks(blocks, tokens, c, routes=routes, along=tables, record=record)
        return network.unpatchify(network.final_layer(x, c)[:, 1:]), record

    routes = [(Route(2, 3, 0.75, "off"), g["in.ids_keep"])]
    out, record = run(None, routes)
    assert_near(record.outputs[1][0], g["out.x_enc"])
    assert_near(record.outputs[3][0], g["out.x_mid_sparse"])
    assert_near(fused[0], g["out.h_in_nopathdrop"])
    assert_near(out, g["out.train_nopathdrop"])
    assert_near(run(None, ())[0], g["out.eval"])
    out, _ = run(torch.tensor([False, True, False, False]), routes)
    assert_near(out, g["out.train_pathdrop_sample1"])
    (out - g["in.target"]).square().mean().backward()
    assert_golden_gradients(network, g, 8)


@torch.no_grad()
def test_a_routed_network_is_its_equations_sample_by_sample():
    """DiT in fp64 with softmax written out; kept tokens have their own values of the first block."""
    network, (x, t, y), routes = build("dit")
    actual, double, expected = network(x, t, y, routes), copy.deepcopy(network).double(), []
    for b, ids in enumerate(routes[0][1]):
        tokens, c = (part.double() for part in network.embed(x[b : b + 1], t[b : b + 1], y[b : b + 1]))
        for index, block in enumerate(double.blocks):
            here = ids if 1 <= index <= 3 else torch.arange(16)
            b1, s1, a1, b2, s2, a2 = block.adaLN_modulation(c).chunk(6, dim=1)
            seen = tokens[0, here]
            q, k, v = (block.attn.qkv(F.layer_norm(seen, (16,), eps=1e-6) * (1 + s1) + b1)).chunk(3, dim=1)
            if index == 0:
                first = v
            else:
                share = block.attn.v1_lambda
                v = torch.stack([share * first[token] + (1 - share) * row for token, row in zip(here, v)])
            heads = [(q[:, h] @ k[:, h].T / 8**0.5).softmax(dim=1) @ v[:, h] for h in (slice(0, 8), slice(8, 16))]
            seen = seen + a1 * block.attn.proj(torch.cat(heads, dim=1))
            tokens[0, here] = seen + a2 * block.mlp(F.layer_norm(seen, (16,), eps=1e-6) * (1 + s2) + b2)
        expected.append(double.unpatchify(double.final_layer(tokens, c)))
    assert_near(actual.double(), torch.cat(expected), 0, 1e-5)


@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_at_0_it_is_the_plain_network_and_at_1_the_later_values_have_no_effect(name):
    """By four rules that choose tokens. A number a block is all that it adds."""
    network, given, routes = build(name)
    plain = build(name, value_residual=False)[0]
    numbers = shares(network)
    assert [*numbers] == [f"blocks.{index}.attn.v1_lambda" for index in range(1, 6)]
    assert network.state_dict().keys() - numbers.keys() == plain.state_dict().keys()
    for used in ((), routes):
        network.load_state_dict(plain.state_dict(), strict=False)
        for number in numbers.values():
            number.fill_(0.0)
        assert torch.equal(network(*given, used), plain(*given, used))
        for number in numbers.values():
            number.fill_(1.0)
        before = network(*given, used)
        assert (before - plain(*given, used)).abs().max() > 1e-2
        for block in network.blocks[1:]:
            block.attn.qkv.bias[32:] += 1.0
        assert torch.equal(network(*given, used), before)


@pytest.mark.parametrize("name", NETWORKS)
def test_flops_weights_and_optimizer_know_it(name, read_config):
    network, given, routes = build(name)
    route = routes[0][0]
    for used, chosen in (((), ()), ((route,), routes)):
        assert 3 * network.forward_flops(used) == counted_flops(network, *given, chosen)
    state, plain = network.state_dict(), build(name, value_residual=False)[0].state_dict()
    assert [sizes(weights)["model.value_residual"] for weights in (state, plain)] == [True, False]
    assert equal(StoredWeights("a file", None, state).fit(state), state)
    with pytest.raises(ValueError, match="model.value_residual=false"):
        StoredWeights("a file", None, plain).fit(state)
    kind, more, _ = NETWORKS[name]
    fresh = kind(**SIZES, **more, value_residual=True)
    assert all(number.shape == () and number == 0.5 for number in shares(fresh).values())
    assert not {*map(id, block_matrices(network))} & {*map(id, shares(network).values())}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dit", "sprint"])
def test_bf16_recomputation_and_compiled_blocks_agree_with_the_plain_network(name):
    """Graphs: the first block, the later ones on all tokens and on kept ones, embedding and last layer."""
    network, given, [(route, ids)] = build(name)
    routes = [(replace(route, fp32="end"), ids)]
    assert_modes_agree(network, lambda: [network(*given), network(*given, routes)], graphs=3 + 2)


def test_what_a_block_hands_on_is_gathered_and_full_again():
    """Under a route, behind it, and under `rejoin=stale`, where all tokens run; twice along with a table."""
    tokens, places, seen = torch.zeros(2, 5, 3), torch.arange(5).repeat(2, 1), []
    ids = torch.tensor([[0, 3], [4, 1]])

    def begin(x, table, c):
        return x + 1, table + 10

    def later(x, table, handed_on, c):
        seen.append(handed_on)
        assert torch.equal(handed_on, table + 10)
        return x + c

    record, blocks = Record((0, 2)), [begin, later, later, later]
    out = run_blocks(blocks, tokens, 2, routes=[(Route(2, 2), ids)], along=[places], record=record)
    assert torch.equal(seen[1], ids + 10) and torch.equal(seen[2], places + 10)
    assert out[0, :, 0].tolist() == [7, 5, 5, 7, 5]
    assert torch.equal(record.outputs[0][0], tokens + 1)
    run_blocks([begin, later, later], tokens, 2, routes=[(Route(0, 1, rejoin="stale"), ids)], along=[places])
    with pytest.raises(ValueError, match="block 0 hands something on, but on a route"):
        run_blocks([begin, later], tokens, 2, routes=[(Route(0, 0), ids)], along=[places])


@pytest.mark.parametrize(
    "words, shown",
    [
        (["model=tread", "model.routes.0.start=0"], "model.value_residual is true, but a route starts at block 0"),
        (["model=maskdit"], "model.value_residual is True, but maskdit has no such choice"),
        (["model=rwkv"], "model.value_residual is True, but rwkv has no such choice"),
        (["model=mamba", "model.attention_every=2"], "model.value_residual is True, but mamba has no such choice"),
    ],
)
def test_where_it_means_nothing_it_is_refused(read_config, words, shown):
    with pytest.raises(ValueError, match=shown):
        read_config(*words, "model.value_residual=true")
    read_config("model=tread", "model.value_residual=true", "model.routes=[{start: 0, end: 3, rejoin: stale}]")
