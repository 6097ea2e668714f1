"""Mamba and RWKV, whose routes keep whole rows: tests of both networks; their tokens are a grid of 4×4 here."""

import copy
from functools import partial

import pytest
import test_mamba
import test_rwkv
import torch
from conftest import CPU
from modes import assert_starts_at_zero, batch, counted_flops, rows
from test_ssd import by_conv1d
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

from dit import DiT
from routing_module import Route, run_blocks
from tread.models import mamba
from tread.models.mamba import Mamba, MambaBlock
from tread.models.rwkv import RWKV, RWKVBlock
from tread.routing.ids import choose_ids
from tread.runtime import compiling
from tread.runtime.device import autocast

FOUR = partial(test_mamba.network, directions=4)
HYBRID = partial(test_mamba.network, attention_every=2, num_heads=2)
NETWORKS = {"mamba": FOUR, "hybrid": HYBRID, "rwkv": test_rwkv.network}
every_network = pytest.mark.parametrize("build", NETWORKS.values(), ids=NETWORKS)
BLOCKS = {  # a block, its twin in fp64, and the width of its tokens
    "mamba": (lambda: test_mamba.scramble(MambaBlock(12, 2.0, test_mamba.mixer(2))), test_mamba.naive_block, 12),
    "four": (lambda: test_mamba.scramble(MambaBlock(12, 2.0, test_mamba.mixer(4))), test_mamba.naive_block, 12),
    "rwkv": (lambda: test_rwkv.scramble(RWKVBlock(16, 2.0)), test_rwkv.naive_block, 16),
}
given = partial(batch, 4, 8)


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_row_route_is_the_smaller_image_and_leaves_the_rest(kind):
    """Three blocks with a route over two; the twin cuts the rows out of the image by hand, runs the blocks on what is
    then an image, and puts them back."""
    make, naive, dim = BLOCKS[kind]
    (height, width), blocks = (5, 3), [make() for _ in range(3)]
    x, c = torch.randn(3, height * width, dim), torch.randn(3, dim)
    route, ids = Route(1, 2, 0.5, select="row"), rows(3, 0.5, (height, width))
    chosen = ids.view(3, -1, width)[:, :, 0] // width
    assert chosen.shape == (3, 3) and len(chosen.unique(dim=0)) > 1 and (chosen.diff(dim=1) > 1).any()  # and gaps
    actual = run_blocks(blocks, x, c, routes=[(route, ids)], grid=(height, width))

    before = blocks[0](x, c, (height, width))
    expected = before.clone().double()
    for sample in range(3):
        image = before[sample].view(height, width, dim)
        part = torch.stack([image[row] for row in chosen[sample]]).reshape(1, -1, dim).double()
        for block in blocks[1:]:
            part = naive(copy.deepcopy(block).double(), part, c[sample : sample + 1].double(), (3, width))
        for place, row in enumerate(chosen[sample]):
            expected[sample].view(height, width, dim)[row] = part[0].view(3, width, dim)[place]
    assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)

    bypassed = torch.ones(3, height * width, dtype=torch.bool).scatter_(1, ids, False)
    assert bypassed.sum() == 3 * 2 * width
    assert torch.equal(actual[bypassed], before[bypassed]) and not torch.equal(actual[~bypassed], before[~bypassed])


@every_network
def test_routes(build):
    """Ratio 0 is no route; single tokens are refused; gradients reach everything, and recomputation finds the same."""
    model = build()
    dense, by_rows = model(*given()), [(Route(1, 4, 0.5, select="row"), rows(4))]
    assert torch.equal(model(*given(), routes=[(Route(1, 4, 0.0, select="row"), rows(4, 0.0))]), dense)
    assert not torch.equal(model(*given(), routes=by_rows), dense)
    tokens = Route(1, 4, 0.5)
    with pytest.raises(ValueError, match="1→4 selects by 'token'.*it takes select=\"row\""):
        model(*given(), routes=[(tokens, choose_ids(tokens, torch.rand(4, 16)))])
    recomputed = copy.deepcopy(model)
    recomputed.activation_checkpointing = True
    for item in (model, recomputed):
        item(*given(), routes=by_rows).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().sum() > 0, name
        assert torch.equal(recomputed.get_parameter(name).grad, parameter.grad), name


@pytest.mark.parametrize("network", [Mamba, RWKV])
def test_an_untrained_network_outputs_zero(network):
    assert_starts_at_zero(network, hidden_size=64)


@pytest.mark.parametrize("network", [Mamba, partial(Mamba, directions=4), RWKV])
def test_all_but_the_blocks_is_as_dits(network):
    with torch.device("meta"):
        ours, frame = network(hidden_size=64, depth=3).state_dict(), DiT(hidden_size=64, depth=0, num_heads=4)
    mine = {name: value.shape for name, value in ours.items() if not name.startswith("blocks.")}
    assert mine == {name: value.shape for name, value in frame.state_dict().items()}


@pytest.fixture
def counted_conv(monkeypatch):
    """Mamba's convolution by torch's own, whose products its counter knows."""
    monkeypatch.setattr(mamba, "causal_conv", by_conv1d)


@pytest.mark.parametrize(
    "build", [FOUR, HYBRID, partial(FOUR, directions=1, mlp_ratio=0), partial(test_rwkv.network, mlp_ratio=3.0)]
)
@pytest.mark.parametrize("routes", [(), (Route(1, 4, 0.5),), (Route(0, 1, 0.25), Route(3, 5, 0.7))])
def test_flops_agree_with_torchs_counter(build, routes, counted_conv):
    """All products, those of scan, convolution and WKV among them; of 4 rows stay 2, 3, and 4 − int(2.8) = 2."""
    routes, model = [Route(r.start, r.end, r.selection_ratio, select="row") for r in routes], build()
    drawn = [(route, rows(2, route.selection_ratio)) for route in routes]
    assert 2 * model.forward_flops(routes) == counted_flops(model, *batch(2, 8), routes=drawn)


@pytest.mark.parametrize("kind", BLOCKS)
def test_flops_of_a_large_grid_are_those_that_torch_counts(kind, counted_conv):
    make, _, dim = BLOCKS[kind]
    block = make()
    for grid in ((8, 8), (16, 8), (16, 16), (32, 33)):
        n = grid[0] * grid[1]
        assert counted_flops(block, torch.randn(1, n, dim), torch.randn(1, dim), grid) == 2 * block.multiply_adds(n)


@pytest.mark.parametrize("build", [test_mamba.network, test_rwkv.network], ids=["mamba", "rwkv"])
def test_half_precision_is_close_and_the_routes_last_block_runs_in_fp32(build):
    """The twin is the network in fp32."""
    model, dtypes = build(), []
    for block in model.blocks:
        first = block.mixer.in_proj if hasattr(block, "mixer") else block.spatial_mix.key
        first.register_forward_hook(lambda _, __, output: dtypes.append(output.dtype))
    routes = [(Route(1, 3, 0.5, "end", "row"), rows(4))]
    exact = model(*given(), routes=routes)
    dtypes.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(*given(), routes=routes)
    assert [i for i, dtype in enumerate(dtypes) if dtype == torch.float32] == [3]
    out.float().square().sum().backward()
    assert out.isfinite().all() and all(p.grad.isfinite().all() for p in model.parameters())
    assert (out - exact).abs().max() <= 0.02 * exact.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("build", [partial(FOUR, attention_every=3, num_heads=2), test_rwkv.network])
def test_routed_training_on_a_gpu(build):
    """In fp32 it gives the CPU's numbers; steps in bf16 under a row route lower the loss."""
    inputs, routes, model = batch(8, 8), [(Route(1, 4, 0.5, "end", "row"), rows(8))], build()
    expected = model(*inputs, routes=routes)
    model, inputs = model.cuda(), [item.cuda() for item in inputs]
    routes = [(route, ids.cuda()) for route, ids in routes]
    assert_close(model(*inputs, routes=routes).cpu(), expected, rtol=1e-4, atol=1e-4)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(*inputs, routes=routes).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("build, fp32, bf16", [(HYBRID, 6, 11), (test_rwkv.network, 4, 8)], ids=["hybrid", "rwkv"])
def test_compiled_blocks_have_a_graph_for_each_kind_of_call(build, fp32, bf16, monkeypatch):
    """Kinds: all tokens and half of the rows, in fp32 and bf16, of each kind of block; the hybrid's last one on the
    route runs in fp32. Embedding and last layer have one graph each in both precisions. Output and gradients are
    the eager ones.

    torch 2.11 does not trace is_autocast_available: nor is it traced here.
    """
    torch._dynamo.reset()
    monkeypatch.setattr(torch.amp, "is_autocast_available", torch._dynamo.disable(torch.amp.is_autocast_available))
    model = build(depth=4)
    eager, counter = copy.deepcopy(model), CompileCounterWithBackend("aot_eager")
    compiling.compile_blocks(model.compiled(), counter)
    for precision, last, graphs in (("fp32", "off", fp32), ("bf16", "end", bf16)):
        routes = [(Route(1, 2, 0.5, last, "row"), rows(4))]
        with autocast(CPU, precision):
            ours, theirs = (each(*given(), routes=routes) for each in (model, eager))
        assert_close(ours, theirs, rtol=1e-4, atol=0.02 if precision == "bf16" else 1e-5)
        assert counter.frame_count == graphs
        if precision == "fp32":
            for output in (ours, theirs):
                output.square().sum().backward()
            for name, parameter in eager.named_parameters():
                assert_close(model.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()
