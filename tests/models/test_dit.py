"""The network against golden numbers of the reference implementation and published counts."""

import math

import pytest
import torch
from conftest import CPU, hidden_states, random_network, size_of
from modes import assert_near, assert_starts_at_zero, batch, counted_flops
from safetensors.torch import load_file

from dit import DiT
from routing_module import Record, Route, draw_ids
from tread.runtime.compiling import compile_blocks
from tread.runtime.device import autocast

SIZES = {  # dim, depth, heads, trainable parameters at 4×32×32, 1000 classes, no learned sigma
    "S/2": (384, 12, 6, 32_858_896),
    "B/2": (768, 12, 12, 130_303_504),
    "L/2": (1024, 24, 16, 457_824_272),
    "XL/2": (1152, 28, 16, 674_816_272),
}


def build(size: str, **more) -> DiT:
    dim, depth, heads, _ = SIZES[size]
    with torch.device("meta"):
        return DiT(hidden_size=dim, depth=depth, num_heads=heads, **more)


@pytest.fixture
def golden(asset, tiny):
    tiny.load_state_dict(load_file(asset("golden/tread_tiny_state.safetensors")), strict=True)
    return tiny.requires_grad_(False), load_file(asset("golden/tread_tiny_forward.safetensors"))


def test_golden_forward(golden):
    network, g = golden
    out, states = hidden_states(network, g["x"], g["t"], g["y"])
    assert_near(out, g["out_eval"], 1e-5)
    for i, state in enumerate(states):
        assert_near(state, g[f"hidden/eval/block{i}"], 1e-5)
    assert_near(network(g["x"], g["t"], torch.full_like(g["y"], 10)), g["out_eval_uncond"], 1e-5)


def test_golden_routed_forward(golden):
    network, g = golden
    out, states = hidden_states(network, g["x"], g["t"], g["y"], routes=[(Route(1, 4), g["ids_keep_r050"])])
    assert_near(out, g["out_train_routed"], 1e-5)
    assert network.skipped_return and not network.drops_path  # as TREAD's, unlike SPRINT's and MaskDiT's
    for i, state in enumerate(states):
        assert_near(state, g[f"hidden/routed/block{i}"], 1e-5)


def test_golden_parts(golden):
    network, g = golden
    assert_near(network.x_embedder(g["x"]) + network.pos_embed, g["x_tokens_embedded"], 1e-5)
    assert_near(network.t_embedder.frequencies(g["t"]), g["t_freq_embedding"], 1e-5)
    assert_near(network.t_embedder(g["t"]), g["t_emb"], 1e-5)
    fresh = DiT(input_size=8, patch_size=2, hidden_size=64, depth=1, num_heads=4)
    assert_near(fresh.pos_embed, g["pos_embed"], 1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_parameter_counts(size):
    """The paper's table, which has the same numbers with TREAD; the defaults are XL/2's."""
    assert size_of(build(size)) == SIZES[size][3]
    if size == "XL/2":
        with torch.device("meta"):
            default = DiT()
        ours, theirs = (network.state_dict() for network in (default, build(size)))
        assert {name: p.shape for name, p in ours.items()} == {name: p.shape for name, p in theirs.items()}
        assert default.grid == (16, 16) and default.blocks[0].attn.num_heads == 16


def test_where_weights_start():
    """As public DiT: embedders N(0, 0.02²), linear layers and patches Xavier-uniform, biases and modulations zero."""
    torch.manual_seed(0)
    network = DiT(input_size=8, hidden_size=256, depth=1, num_heads=4, num_classes=999)
    linear = [network.blocks[0].attn.qkv.weight, network.blocks[0].mlp.fc1.weight, network.x_embedder.proj.weight]
    for weight in linear:
        rows = weight.flatten(1)
        bound = math.sqrt(6 / sum(rows.shape))
        assert 0.95 * bound < rows.abs().max() <= bound
        assert rows.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    embedders = [network.y_embedder.embedding_table, network.t_embedder.mlp[0], network.t_embedder.mlp[2]]
    for layer in embedders:
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.03)
    zero = [p for name, p in network.named_parameters() if name.endswith("bias") or "adaLN" in name]
    assert not any(p.any() for p in (*zero, network.final_layer.linear.weight))


@pytest.mark.parametrize("block", [0, 3, 5])
def test_output_of_a_block_stops_there(tiny, block):
    """Reference: the block's output in a whole pass, and torch's counter."""
    given = batch(2, 8)
    actual = tiny.output_of(block, *given)
    assert 2 * tiny.forward_flops(upto=block) == counted_flops(tiny.output_of, block, *given)
    assert torch.equal(actual, hidden_states(tiny, *given)[1][block])
    tiny(*given, record=(record := Record((block,))))
    [(number, (output, ids))] = record.outputs.items()
    assert number == block and torch.equal(output, actual) and ids is None


def test_state_dict_has_public_names_and_shapes():
    state = build("XL/2", learn_sigma=True).state_dict()
    expected = {
        "pos_embed": (1, 256, 1152),
        "x_embedder.proj.weight": (1152, 4, 2, 2),
        "x_embedder.proj.bias": (1152,),
        "t_embedder.mlp.0.weight": (1152, 256),
        "t_embedder.mlp.0.bias": (1152,),
        "t_embedder.mlp.2.weight": (1152, 1152),
        "t_embedder.mlp.2.bias": (1152,),
        "y_embedder.embedding_table.weight": (1001, 1152),
        "final_layer.linear.weight": (32, 1152),
        "final_layer.linear.bias": (32,),
        "final_layer.adaLN_modulation.1.weight": (2304, 1152),
        "final_layer.adaLN_modulation.1.bias": (2304,),
    }
    for i in range(28):
        for name, shape in {
            "attn.qkv": (3456, 1152),
            "attn.proj": (1152, 1152),
            "mlp.fc1": (4608, 1152),
            "mlp.fc2": (1152, 4608),
            "adaLN_modulation.1": (6912, 1152),
        }.items():
            expected |= {f"blocks.{i}.{name}.weight": shape, f"blocks.{i}.{name}.bias": shape[:1]}
    assert {name: tuple(value.shape) for name, value in state.items()} == expected


def test_untrained_network_outputs_zero_and_xavier_does_not():
    assert_starts_at_zero(DiT, hidden_size=32, num_heads=2)


@pytest.mark.parametrize("patch_size", [2, 4, 8])
def test_patches_and_large_latents(patch_size):
    network = DiT(input_size=64, patch_size=patch_size, hidden_size=32, depth=1, num_heads=2, learn_sigma=True)
    assert network(torch.randn(1, 4, 64, 64), torch.zeros(1), torch.tensor([5])).shape == (1, 8, 64, 64)
    assert network.num_tokens == (64 // patch_size) ** 2


def test_patches_are_put_back_where_they_were_taken():
    network = DiT(input_size=8, patch_size=2, in_channels=3, hidden_size=32, depth=1, num_heads=2)
    x = torch.randn(2, 3, 8, 8)
    patches = x.unfold(2, 2, 2).unfold(3, 2, 2)  # (B, C, rows, columns, p, p)
    tokens = patches.permute(0, 2, 3, 4, 5, 1).reshape(2, 16, -1)
    assert torch.equal(network.unpatchify(tokens), x)


@pytest.mark.slow
@pytest.mark.parametrize("patch_size", [1, 2])
def test_compiled_ends_are_those_that_are_not(patch_size):
    """The convolution itself, and the last layer; outputs and gradients to rounding, in fp32 and in bf16."""
    network = random_network(0, patch_size=patch_size, hidden_size=64, depth=0, num_heads=4)
    results = []
    for compiled in (False, True):
        if compiled:
            torch._dynamo.reset()
            compile_blocks(network.compiled(), "aot_eager")
        for precision in ("fp32", "bf16"):
            network.zero_grad()
            with autocast(CPU, precision):
                out = network(*batch(3, 8)).float()
            out.square().sum().backward()
            results.append([out.detach(), *(p.grad for p in network.parameters())])
    torch._dynamo.reset()
    plain, rounded, ours, ours_rounded = results
    for limit, pair in ((1e-5, (plain, ours)), (0.02, (rounded, ours_rounded))):
        for expected, actual in zip(*pair):
            assert (actual - expected).norm() <= limit * expected.norm()


@pytest.mark.parametrize("labels, shown", [([0, 11], "0..11"), ([-1, 3], "-1..3")])
def test_unknown_labels_are_refused(tiny, labels, shown):
    with pytest.raises(ValueError, match=f"{shown}.*0..9 and the null class 10"):
        tiny(torch.zeros(2, 4, 8, 8), torch.zeros(2), torch.tensor(labels))


@pytest.mark.parametrize(
    "sizes, shown",
    [
        ({"input_size": 9}, "9.*2"),
        ({"hidden_size": 30}, "30.*4"),
        ({"hidden_size": 30, "num_heads": 3}, "30.*4"),
        ({"init": "ones"}, "ones.*xavier"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, shown):
    with pytest.raises(ValueError, match=shown):
        DiT(**{"input_size": 8, "hidden_size": 32, "depth": 1, "num_heads": 4, **sizes})


def test_wrong_latents_are_refused(tiny):
    with pytest.raises(ValueError, match=r"\(2, 3, 8, 8\).*\(4, 8, 8\)"):
        tiny(torch.zeros(2, 3, 8, 8), torch.zeros(2), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("size, gmacs", [("S/2", 6.06), ("B/2", 23.01), ("L/2", 80.71), ("XL/2", 118.64)])
def test_flops_agree_with_the_published_ones(size, gmacs):
    assert build(size, learn_sigma=True).forward_flops() / 2e9 == pytest.approx(gmacs, rel=5e-3)


@pytest.mark.parametrize(
    "routes",
    [
        (),
        (Route(1, 4, 0.5),),
        (Route(0, 1, 0.25), Route(3, 5, 0.75)),
        (Route(3, 4, 0.5, rejoin=1),),
        (Route(1, 3, 0.5, rejoin="stale"),),
    ],
)
def test_flops_agree_with_torchs_counter(tiny, routes):
    drawn = [(route, draw_ids(torch.rand(2, 16), route.selection_ratio)) for route in routes]
    given = *batch(2, 8), drawn
    assert 2 * tiny.forward_flops(routes) == counted_flops(tiny, *given)
    if not routes:  # two products of N×N×D in each block
        assert tiny.forward_flops() - tiny.forward_flops(attention=False) == 2 * 6 * 2 * 16**2 * 64


def test_recomputed_blocks_give_the_same_bits_where_tokens_rejoin_earlier(tiny):
    """The state that waits lies outside of what is computed again; by default nothing is."""
    (x, t, y), ids = batch(2, 8), draw_ids(torch.rand(2, 16), 0.5)
    results, calls = [], []
    for block in tiny.blocks:
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    for again, count in ((None, 6), (True, 6 + 12)):
        tiny.activation_checkpointing = again or tiny.activation_checkpointing
        out = tiny(x, t, y, routes=[(Route(3, 4, 0.5, rejoin=1), ids)])
        results.append([out, *torch.autograd.grad(out.square().sum(), list(tiny.parameters()))])
        assert len(calls) == count
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    "size, ratios",
    [("S/2", (1.440, 1.507)), ("B/2", (1.426, 1.466)), ("L/2", (1.675, 1.736)), ("XL/2", (1.716, 1.776))],
)
def test_ideal_savings_of_a_training_step(size, ratios):
    """Dense over routed FLOPs with the paper's route and half of the tokens, at 256² and 512²."""
    for input_size, ratio in zip((32, 64), ratios):
        network = build(size, input_size=input_size)
        route = Route.for_depth(len(network.blocks))
        assert network.forward_flops() / network.forward_flops([route]) == pytest.approx(ratio, rel=5e-3)


def test_flops_of_sparse_guidance():
    """Its paper's table for XL/2, r(2→24), one step: 114.42 dense, 228.84 guided, 97.67 by ratios 0.5 and 0.9 (linear
    layers alone, as its numbers evidently are); with attention 0.844 of a dense step."""
    network = build("XL/2")
    routes = [[Route(2, 24, ratio)] for ratio in (0.5, 0.9)]
    linear, whole = [sum(network.forward_flops(each, attention) for each in routes) for attention in (False, True)]
    assert network.forward_flops(attention=False) / 2e9 == pytest.approx(114.42, rel=0.01)
    assert linear / network.forward_flops(attention=False) == pytest.approx(97.67 / 114.42, rel=0.01)
    assert linear / (2 * network.forward_flops(attention=False)) == pytest.approx(97.67 / 228.84, rel=0.01)
    assert whole / network.forward_flops() == pytest.approx(0.844, rel=0.01)
