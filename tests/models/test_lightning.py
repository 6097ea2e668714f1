"""LightningDiT against golden numbers of its own code, published counts, dit.py, and a twin written token by token."""

import copy
import re

import pytest
import torch
from conftest import hidden_states, launch, state_of
from modes import assert_golden_gradients, assert_modes_agree, assert_near, batch, counted_flops, drawn, hot
from safetensors.torch import load_file

from dit import DiT
from routing_module import Route, gather_tokens
from tread.checkpoints import checkpoint
from tread.models.lightning import LightningDiT
from tread.models.rotary import TABLES, rotary_angles
from tread.routing.ids import choose_ids

TINY = {"input_size": 8, "patch_size": 1, "in_channels": 8, "hidden_size": 64, "num_heads": 4, "num_classes": 10}
LIMITS = {"lightningdit_tiny_a": 5e-6, "lightningdit_tiny_a_hot": 1e-4}
AS_DIT = {"norm": "layer", "mlp": "gelu", "positions": "sincos", "qk_norm": False}


def tiny(depth=3, **more):
    sizes = {"input_size": 4, "patch_size": 1, "hidden_size": 16, "num_heads": 2, "num_classes": 5, **more}
    return hot(LightningDiT(depth=depth, **sizes))


@pytest.mark.parametrize("name", LIMITS)
def test_golden_forward(asset, name):
    """Its own state dict loads strictly, rotary tables and all."""
    g, limit = load_file(asset(f"golden/{name}.safetensors")), LIMITS[name]
    network = LightningDiT(depth=4, **TINY).requires_grad_(False)
    network.load_state_dict(state_of(g), strict=True)
    out, states = hidden_states(network, g["in.x"], g["in.t"], g["in.y"])
    assert_near(out, g["out.cond"], limit)
    assert_near(network(g["in.x"], g["in.t"], g["in.y_null"]), g["out.null"], limit)
    for i, state in enumerate(states):
        assert_near(state, g[f"out.hidden.{i}"], limit)


@pytest.fixture
def routed(asset):
    g = load_file(asset("golden/lightningdit_tread_tiny_hot.safetensors"))
    network = LightningDiT(depth=8, **TINY)
    network.load_state_dict(state_of(g))
    return g, network, [(Route.for_depth(8, fp32="off"), g["in.ids_keep"])]


def test_golden_routed_forward_and_gradients(routed):
    g, network, routes = routed
    assert (routes[0][0].start, routes[0][0].resolve(8).end) == (g["meta.route_start"], g["meta.route_end_inclusive"])
    out, states = hidden_states(network, g["in.x"], g["in.t"], g["in.y"], routes=routes)
    assert_near(out, g["out.routed"])
    for i, state in enumerate(states):
        assert_near(state, g[f"out.hidden_routed.{i}"])
    (out - g["in.target"]).square().mean().backward()
    assert_golden_gradients(network, g, 9)
    with torch.no_grad():
        assert_near(network(g["in.x"], g["in.t"], g["in.y"]), g["out.unrouted"])


def test_golden_rotary_rows_and_that_others_are_far_off(routed):
    g, network, routes = routed
    rows = gather_tokens(network.along(4)[0], g["in.ids_keep"])
    for half, name in zip(rows.chunk(2, dim=2), ("cos", "sin")):
        assert_near(half.repeat_interleave(2, dim=2), g[f"out.rope_{name}_rows"].view(4, 32, 16), 1e-6)
    right = network.along(4)[0]
    network.along = lambda size: [right[:, torch.arange(64).roll(1)]]  # each token at its neighbour's place
    with torch.no_grad():
        assert (network(g["in.x"], g["in.t"], g["in.y"], routes) - g["out.routed"]).abs().max() > 0.1


def naive_attention(attention, x, places, rope):
    """Token by token and head by head in fp64, pairs of channels as complex numbers turned by e^{iθ}."""
    B, N, D = x.shape
    d = D // attention.num_heads
    out = torch.zeros_like(x)
    for b in range(B):
        for head in range(attention.num_heads):

            def part(number, turned, norm, b=b, head=head):
                first = number * D + head * d
                weight, bias = attention.qkv.weight[first : first + d], attention.qkv.bias[first : first + d]
                rows = []
                for token in range(N):
                    row = weight @ x[b, token] + bias
                    if norm is not None:
                        row = row / (row.square().mean() + 1e-6).sqrt() * norm.weight
                    if turned:
                        place = places[b][token]
                        angles = [place[axis] * 10000.0 ** (-2 * k / (d / 2)) for axis in (0, 1) for k in range(d // 4)]
                        pairs = torch.view_as_complex(row.view(-1, 2).contiguous())
                        row = torch.view_as_real(pairs * torch.exp(1j * torch.tensor(angles))).flatten()
                    rows.append(row)
                return torch.stack(rows)

            q, k = part(0, rope, attention.q_norm), part(1, rope, attention.k_norm)
            v = part(2, False, None)
            out[b, :, head * d : (head + 1) * d] = (q @ k.T / d**0.5).softmax(dim=1) @ v
    return out @ attention.proj.weight.T + attention.proj.bias


def naive_block(block, x, c, places):
    """x + gate·attention, x + gate·mlp, by the equations; the block's own settings are read from its parts."""

    def norm(item, y):
        if isinstance(item, torch.nn.RMSNorm):
            return y / (y.square().mean(dim=2, keepdim=True) + 1e-6).sqrt() * item.weight
        return (y - y.mean(dim=2, keepdim=True)) / (y.var(dim=2, correction=0, keepdim=True) + 1e-6).sqrt()

    layer = block.adaLN_modulation[1]
    b1, s1, a1, b2, s2, a2 = ((c * c.sigmoid()) @ layer.weight.T + layer.bias)[:, None].chunk(6, dim=2)
    x = x + a1 * naive_attention(block.attn, (1 + s1) * norm(block.norm1, x) + b1, places, rope=places is not None)
    y, mlp = (1 + s2) * norm(block.norm2, x) + b2, block.mlp
    if hasattr(mlp, "w12"):
        both = y @ mlp.w12.weight.T + mlp.w12.bias
        gate, value = both[..., : both.shape[2] // 2], both[..., both.shape[2] // 2 :]
        return x + a2 * ((gate * gate.sigmoid() * value) @ mlp.w3.weight.T + mlp.w3.bias)
    return x + a2 * mlp(y)


def naive(network, x, t, y, routes=()):
    """The network in fp64, each kept token at its own place in the grid."""
    double = copy.deepcopy(network).double()
    tokens = double.x_embedder(x.double()) + double.pos_embed
    c = (network.t_embedder(t) + network.y_embedder(y)).double()
    for i, block in enumerate(double.blocks):
        ids = routes[0][1] if routes and i == 1 else torch.arange(16).expand(3, -1)
        places = [[divmod(int(token), 4) for token in ids[b]] for b in range(3)] if network.head_dim else None
        seen = naive_block(block, torch.stack([tokens[b, ids[b]] for b in range(3)]), c, places)
        tokens = tokens.clone()
        for b in range(3):
            tokens[b, ids[b]] = seen[b]
    return double.unpatchify(double.final_layer(tokens, c))


@pytest.mark.parametrize("select", [None, "token", "row", "shared", "unsorted"])
@torch.no_grad()
def test_routed_network_is_its_equations_at_each_tokens_own_place(select):
    network, routes = tiny(qk_norm=True), []
    if select:
        [(route, ids)] = drawn(Route(1, 1, 0.5, "off", "token" if select == "unsorted" else select))
        routes = [(route, ids.flip(1) if select == "unsorted" else ids)]
    assert_near(network(*batch(), routes), naive(network, *batch(), routes), 0, 1e-5)


@pytest.mark.parametrize(
    "choice",
    [{"norm": "rms"}, {"mlp": "swiglu"}, {"positions": "rope"}, {"qk_norm": True}, {"norm": "rms", "mlp": "swiglu"}],
)
@torch.no_grad()
def test_each_choice_is_its_equations_and_changes_the_function(choice):
    network = tiny(depth=1, **{**AS_DIT, **choice})
    assert_near(network(*batch()), naive(network, *batch()), 0, 1e-5)


def test_with_dits_choices_it_is_dit():
    ours = tiny(**AS_DIT)
    theirs = DiT(input_size=4, patch_size=1, hidden_size=16, depth=3, num_heads=2, num_classes=5)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    for routes in ((), drawn(Route(1, 2, 0.5))):
        assert_near(ours(*batch(), routes), theirs(*batch(), routes), 1e-6)


@pytest.mark.parametrize("size, parameters", [((768, 12, 12), 130_556_192), ((1152, 28, 16), 675_256_736)])
def test_published_parameter_counts(size, parameters):
    """B/1 and XL/1 at 32×16×16, pos_embed counted."""
    dim, depth, heads = size
    with torch.device("meta"):
        more = {"hidden_size": dim, "depth": depth, "num_heads": heads}
        network = LightningDiT(input_size=16, patch_size=1, in_channels=32, **more)
    assert sum(value.numel() for value in network.state_dict().values()) == parameters


def test_state_dict_has_public_names_and_no_tables():
    names = set(LightningDiT(depth=1, qk_norm=True, **TINY).state_dict())
    linear = ("x_embedder.proj", "t_embedder.mlp.0", "t_embedder.mlp.2", "final_layer.linear")
    linear += ("final_layer.adaLN_modulation.1",)
    frame = {f"{name}.{kind}" for name in linear for kind in ("weight", "bias")}
    frame |= {"pos_embed", "y_embedder.embedding_table.weight", "final_layer.norm_final.weight"}
    layers = ("attn.qkv", "attn.proj", "mlp.w12", "mlp.w3", "adaLN_modulation.1")
    block = {f"blocks.0.{name}.{kind}" for name in layers for kind in ("weight", "bias")}
    block |= {f"blocks.0.{name}.weight" for name in ("norm1", "norm2", "attn.q_norm", "attn.k_norm")}
    assert names == frame | block


@pytest.mark.parametrize("more", [{}, {"mlp_ratio": 3.0, "qk_norm": True}, AS_DIT, {"positions": "sincos"}])
@pytest.mark.parametrize("routes", [(), (Route(1, 4, 0.5),)])
def test_flops_agree_with_torchs_counter(more, routes):
    network = LightningDiT(depth=6, **{**TINY, **more})
    drawn = [(route, choose_ids(route, torch.rand(2, 64), (8, 8))) for route in routes]
    given = torch.randn(2, 8, 8, 8), torch.rand(2), torch.tensor([0, 1]), drawn
    assert 2 * network.forward_flops(routes) == counted_flops(network, *given)


@pytest.mark.slow
def test_bf16_recomputation_and_compiled_blocks_agree_with_the_plain_network():
    """Without a dtype's mismatch in norms or attention; one graph for all tokens and one for kept ones."""
    network, routes = tiny(depth=4, qk_norm=True), drawn(Route(1, 2, 0.5, "end"))
    assert_modes_agree(network, lambda: [network(*batch(), which) for which in ((), routes)], graphs=2 + 2)


def tables(head_dim, side):
    angles = rotary_angles(head_dim, side).repeat_interleave(2, dim=1)
    return dict(zip(TABLES, (angles.cos().float(), angles.sin().float())))


@pytest.mark.parametrize(
    "given, shown",
    [
        (lambda: tables(8, 5), r"\(25, 8\).*must be \(16, d\)"),
        (lambda: {name: table.roll(1, 0) for name, table in tables(8, 4).items()}, "freqs_cos .*differs by up to"),
        (lambda: {name: table[:, :6] for name, table in tables(8, 4).items()}, "multiple of 4"),
        (lambda: tables(16, 4), "rotates heads of 16 channels, but this network has heads of 8"),
    ],
)
def test_foreign_rotary_tables_are_refused(given, shown):
    network = tiny()
    for around in (network, torch.nn.Sequential(network)):  # strictly, one table alone too
        prefix = "" if around is network else "0."
        for names in (TABLES, TABLES[1:]):
            public = {prefix + name: table for name, table in tables(8, 4).items() if name in names}
            around.load_state_dict({**around.state_dict(), **public})
    with pytest.raises(ValueError, match=shown):
        network.load_state_dict({**network.state_dict(), **given()})


@pytest.mark.parametrize(
    "sizes, shown",
    [
        ({"hidden_size": 24, "num_heads": 4}, "heads of 6 channels.*multiple of 4"),
        ({"hidden_size": 20, "num_heads": 3}, "20.*3"),
        ({"norm": "batch"}, "norm is 'batch'.*layer or rms"),
        ({"mlp": "relu"}, "mlp.*gelu or swiglu"),
        ({"positions": "learnt"}, "positions.*sincos or rope"),
    ],
)
def test_sizes_and_choices_that_can_not_be_are_refused(sizes, shown):
    with pytest.raises(ValueError, match=shown):
        LightningDiT(depth=1, **{**TINY, **sizes})
    if "num_heads" in sizes and sizes["hidden_size"] % sizes["num_heads"] == 0:
        LightningDiT(depth=1, **{**TINY, **sizes}, positions="sincos")


def test_a_run_trains_and_holds_its_choices(tmp_path):
    """model=tread_lightning from the command line; a choice of another architecture, or another choice, is refused."""
    size = ["model=tread_lightning", "model.depth=7", "model.hidden_size=16", "model.num_heads=2"]
    printed = launch(tmp_path, *size, "name=run", "train.steps=1", "every.save=1")
    assert "lightning" in printed and "r(2→3)" in printed
    names = checkpoint.find(tmp_path / "results/run").tensors("ema")
    assert "blocks.6.mlp.w12.weight" in names and not any("rot" in name or "rope" in name for name in names)
    for overrides, shown in (
        ([*size, "name=run", "train.steps=9", "model.qk_norm=true"], "model.qk_norm: false there, true here"),
        (["model=tread", "model.norm=rms"], "model.norm is 'rms', but dit has no such choice: model=lightning"),
    ):
        with pytest.raises(SystemExit, match=re.escape(shown)):
            launch(tmp_path, *overrides)
