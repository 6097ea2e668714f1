"""Mamba against transformers' Mamba-2, naive twins written with loops, closed forms, and torch's counter of FLOPs."""

import copy
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import CPU, size_of
from modes import batch, hot, rows
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

from dit import DiT
from routing_module import Route, gather_tokens, run_blocks
from tread.models.mamba import DECAYS, STEPS, AttentionBlock, Mamba, Mamba2Mixer, MambaBlock
from tread.models.ssd import ssd
from tread.routing.hooks import attach_routes
from tread.routing.ids import choose_ids
from tread.runtime import compiling
from tread.runtime.device import autocast

SIZES = {"input_size": 8, "hidden_size": 32, "num_classes": 10, "state": 8, "head_dim": 16}


def scramble(module):
    """Every parameter matters: weights N(0, 0.1), and Δ's bias, decays and D numbers of their kind."""
    return hot(module, 0.1, dt_bias=1.0, A_log=1.0, D=1.0)


def network(depth=6, **sizes):
    return scramble(Mamba(depth=depth, **{**SIZES, **sizes}))


def mixer(directions=2, dim=12, state=5, head_dim=8, expand=2, conv=4):
    return scramble(Mamba2Mixer(dim, state, head_dim, expand, conv, directions))


def silu(x):
    return x / (1 + (-x).exp())


def naive_orders(height, width, directions):
    """Which token of the raster each direction meets as its i-th."""
    raster = [row * width + column for row in range(height) for column in range(width)]
    columns = [row * width + column for column in range(width) for row in range(height)]
    return [raster, raster[::-1], columns, columns[::-1]][:directions]


def naive_mixer(m, x, grid):
    """Direction by direction, head by head, token by token, of a mixer in fp64."""
    E, n, heads = m.width, m.state, m.width // m.head_dim
    projected = x @ m.in_proj.weight.T
    z, shared, steps = projected[..., :E], projected[..., E : 2 * E + 2 * n], projected[..., 2 * E + 2 * n :]
    total = torch.zeros_like(z)
    for way, order in enumerate(naive_orders(*grid, m.directions)):
        channels = slice(way * (E + 2 * n), (way + 1) * (E + 2 * n))
        weight, bias = m.conv1d.weight[channels, 0], m.conv1d.bias[channels]
        met = shared[:, order]
        for sample in range(len(x)):
            for head in range(heads):
                item = way * heads + head
                h = torch.zeros(m.head_dim, n, dtype=x.dtype)
                for i, token in enumerate(order):
                    taps = weight.shape[1]
                    seen = [met[sample, i + k - taps + 1] * weight[:, k] for k in range(taps) if i + k - taps + 1 >= 0]
                    u = silu(sum(seen) + bias)
                    mine = u[head * m.head_dim : (head + 1) * m.head_dim]
                    dt = (steps[sample, token, item] + m.dt_bias[item]).exp().log1p()
                    h = (-dt * m.A_log[item].exp()).exp() * h + dt * mine[:, None] * u[E : E + n]
                    y = h @ u[E + n :] + m.D[item] * mine
                    total[sample, token, head * m.head_dim : (head + 1) * m.head_dim] += y
    gated = total * silu(z)
    return gated / (gated.square().mean(dim=2, keepdim=True) + 1e-5).sqrt() * m.norm.weight @ m.out_proj.weight.T


def naive_block(block, x, c, grid):
    """x + α·mix(γ·norm(x) + β), once without MLP, twice with it; β, γ − 1, α from the conditioning."""
    layer = block.adaLN_modulation[1]
    actual = (silu(c) @ layer.weight.T + layer.bias)[:, None].split(x.shape[2], dim=2)

    def norm(y):
        return (y - y.mean(dim=2, keepdim=True)) / (y.var(dim=2, correction=0, keepdim=True) + 1e-6).sqrt()

    x = x + actual[2] * naive_mixer(block.mixer, (1 + actual[1]) * norm(x) + actual[0], grid)
    return x + actual[5] * block.mlp((1 + actual[4]) * norm(x) + actual[3]) if len(actual) == 6 else x


def double(module):
    return copy.deepcopy(module).double()


@pytest.mark.parametrize("tokens", [1, 3, 40, 300])
def test_one_direction_is_mamba_2_of_transformers(tokens):
    """The same weights by the same names, forward and gradients; their part in plain torch."""
    transformers = pytest.importorskip("transformers", reason="transformers has the Mamba-2 to compare with")
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer as Theirs

    config = transformers.Mamba2Config(
        hidden_size=32, num_heads=8, head_dim=8, state_size=16, expand=2, n_groups=1, conv_kernel=4, chunk_size=16
    )
    theirs, ours = Theirs(config, layer_idx=0), scramble(Mamba2Mixer(32, 16, 8, 2, 4, 1))
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = torch.randn(2, tokens, 32)
    actual = []
    for item in (ours, theirs):
        given = x.clone().requires_grad_()
        out = item(given)
        out.square().sum().backward()
        actual.append([out.detach(), given.grad, *(p.grad for _, p in sorted(item.named_parameters()))])
    for a, b in zip(*actual, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max().clamp(min=1)


@pytest.mark.parametrize("grid", [(4, 4), (1, 5), (6, 1), (2, 7), (1, 1)])
@pytest.mark.parametrize("directions", [1, 2, 4])
def test_mixer_equals_its_equations(directions, grid):
    x = torch.randn(2, grid[0] * grid[1], 12)
    for conv in (4, 1):
        m = mixer(directions, conv=conv)
        expected = naive_mixer(double(m), x.double(), grid)
        assert_close(m(x, grid).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("directions", [1, 2, 4])
def test_gradients_are_those_of_the_equations(directions):
    m, x = mixer(directions, dim=8, state=3, head_dim=4), torch.randn(1, 12, 8)
    twin = double(m)
    m(x, (3, 4)).square().sum().backward()
    naive_mixer(twin, x.double(), (3, 4)).square().sum().backward()
    for name, parameter in twin.named_parameters():
        assert_close(m.get_parameter(name).grad.double(), parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("step", [-1000.0, 30.0, 1e4])
@pytest.mark.parametrize("decay", [-1000.0, 0.0, 39.0, 1000.0])
def test_steps_and_decays_of_any_size_break_nothing(step, decay):
    """A network may learn such numbers: all stays finite, gradients too, and A beyond the limit is the limit's."""
    m, x = mixer(4), torch.randn(1, 70, 12)
    m.dt_bias.data.fill_(step)
    actual = []
    for item in (decay, min(decay, 40.0)):
        m.A_log.data.fill_(item)
        m.zero_grad()
        actual.append(m(x, (7, 10)))
        actual[-1].square().sum().backward()
        assert actual[-1].isfinite().all() and all(p.grad.isfinite().all() for p in m.parameters())
    assert torch.equal(*actual)


@pytest.mark.parametrize("mlp_ratio", [2.5, 0])
def test_block_equals_its_equations(mlp_ratio):
    block = scramble(MambaBlock(12, mlp_ratio, mixer()))
    x, c = torch.randn(2, 12, 12), torch.randn(2, 12)
    expected = naive_block(double(block), x.double(), c.double(), (3, 4))
    assert_close(block(x, c, (3, 4)).double(), expected, rtol=1e-5, atol=1e-5)
    assert block.adaLN_modulation[1].out_features == (72 if mlp_ratio else 36)


def test_where_it_starts():
    """As Mamba-2's: Δ of 0.001 to 0.1, A of −16 to −1, D of 1."""
    m = Mamba2Mixer(64, 8, 4, 2, 4, 2)
    step = torch.nn.functional.softplus(m.dt_bias)
    assert (step > 0.99 * STEPS[0]).all() and (step < 1.01 * STEPS[1]).all() and step.std() > 0.01
    assert (m.A_log.exp() >= DECAYS[0]).all() and (m.A_log.exp() <= DECAYS[1]).all() and m.A_log.exp().std() > 3
    assert (m.D == 1).all()


@pytest.mark.parametrize("directions", [1, 2, 4])
@pytest.mark.parametrize("dim, depth, mlp_ratio", [(768, 12, 4.0), (384, 12, 0), (64, 3, 2.5)])
def test_parameter_count(dim, depth, mlp_ratio, directions):
    """Matrices and vectors by arithmetic, and the frame that DiT has as well."""
    with torch.device("meta"):
        ours = Mamba(hidden_size=dim, depth=depth, mlp_ratio=mlp_ratio, directions=directions)
        frame = DiT(hidden_size=dim, depth=0, num_heads=4)
    width, heads, scanned = 2 * dim, directions * 2 * dim // 64, 2 * dim + 2 * 64
    mixing = dim * (width + scanned + heads) + directions * scanned * 5 + 3 * heads + width + width * dim
    mlp = 2 * dim * int(mlp_ratio * dim) + int(mlp_ratio * dim) + dim if mlp_ratio else 0
    modulation = (6 if mlp_ratio else 3) * (dim**2 + dim)
    count = depth * (mixing + mlp + modulation) + size_of(frame)
    assert size_of(ours) == count


def test_sizes_that_the_page_lists():
    """docs/models.md, in millions; and the nearest to the 111 that TREAD lists."""
    listed = {(384, 12): (37.2, 36.1), (768, 12): (146.3, 142.3), (1152, 28): (756.2, 735.9)}
    alone = {12: 68.3, 24: 133.9}

    def millions(**sizes):
        with torch.device("meta"):
            return round(size_of(Mamba(**sizes)) / 1e6, 1)

    for (dim, depth), (plain, hybrid) in listed.items():
        assert millions(hidden_size=dim, depth=depth) == plain
        assert millions(hidden_size=dim, depth=depth, attention_every=4) == hybrid
    assert {depth: millions(depth=depth, mlp_ratio=0) for depth in alone} == alone


@pytest.mark.parametrize("directions", [2, 4])
def test_hooks_route_rows_as_run_blocks_does(directions):
    """They are told the kept rows' shape where columns are scanned."""
    height, width = 5, 3
    blocks = torch.nn.ModuleList(scramble(MambaBlock(12, 2.0, mixer(directions))) for _ in range(3))
    x, c = torch.randn(3, height * width, 12), torch.randn(3, 12)
    route, ids = Route(1, 2, 0.5, select="row"), rows(3, 0.5, (height, width))
    actual = run_blocks(list(blocks), x, c, routes=[(route, ids)], grid=(height, width))

    def select(args, kwargs, ids):
        return (gather_tokens(args[0], ids), *args[1:]), {"grid": (ids.shape[1] // width, width)}

    if directions == 4:
        with pytest.raises(ValueError, match="directions 4 scans columns, but grid is .* 9 tokens"):
            blocks[1](x[:, :9], c, grid=(height, width))
    told = {"select": select} if directions == 4 else {}
    attached = attach_routes(blocks, route, **told, verify=False)  # scans mix by order on purpose
    with attached.on_ids(ids):
        for block in blocks:
            x = block(x, c, grid=(height, width))
    assert_close(x, actual)


def test_routes_of_single_tokens_where_they_are_allowed():
    """The blocks on the route are those of the kept tokens as a line; rows are the same with and without."""
    route = Route(1, 4, 0.5)
    ids = choose_ids(route, torch.rand(4, 16, generator=torch.Generator().manual_seed(3)), (4, 4))
    free = network(allow_token_routes=True)
    x, c = free.embed(*batch(4, 8))
    tokens = free.blocks[0](x, c)
    kept = torch.stack([tokens[sample, ids[sample]] for sample in range(4)])
    for block in free.blocks[1:5]:
        kept = block(kept, c, (1, 8))
    for sample in range(4):
        tokens[sample, ids[sample]] = kept[sample]
    expected = free.unpatchify(free.final_layer(free.blocks[5](tokens, c), c))
    assert_close(free(*batch(4, 8), routes=[(route, ids)]), expected, rtol=1e-5, atol=1e-6)
    by_rows = [(Route(1, 4, 0.5, select="row"), rows(4))]
    assert torch.equal(free(*batch(4, 8), routes=by_rows), network()(*batch(4, 8), routes=by_rows))


def test_every_kth_block_of_a_hybrid_is_dits():
    """It is DiT's function of the same weights, on a route too, and does not see the grid."""
    model = network(attention_every=3, num_heads=2)
    assert [isinstance(block, AttentionBlock) for block in model.blocks] == [False, False, True] * 2
    (twin,) = DiT(depth=1, num_heads=2, **{key: SIZES[key] for key in ("input_size", "hidden_size")}).blocks
    twin.load_state_dict(model.blocks[2].state_dict())
    x, c = torch.randn(2, 8, 32), torch.randn(2, 32)
    assert torch.equal(model.blocks[2](x, c, grid=(2, 4)), twin(x, c))


def test_the_scan_adds_up_in_fp32():
    """It gets and gives fp32 wherever a number is summed up."""
    model, dtypes = network(), []

    def watched(x, dt, A, B, C):
        y = ssd(x, dt, A, B, C)
        dtypes.append((x.dtype, dt.dtype, A.dtype, y.dtype))
        return y

    for block in model.blocks:
        block.mixer.scan = watched
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(*batch(4, 8), routes=[(Route(1, 3, 0.5, "end", "row"), rows(4))])
    full, half = torch.float32, torch.bfloat16
    assert dtypes == [(full if i == 3 else half, full, full, full) for i in range(6)]


@pytest.mark.parametrize(
    "sizes, shown",
    [
        ({"head_dim": 48}, "expand 2 × hidden_size 32 is not a multiple of head_dim 48"),
        ({"directions": 3}, "directions.*3.*1, 2.*4"),
        ({"attention_every": 1}, "attention_every is 1.*2 to 1"),
        ({"depth": 4, "attention_every": 5}, "attention_every is 5, but must be 0, for none, or 2 to 4"),
        ({"depth": 4, "attention_every": 2, "num_heads": 5}, "32 is not a multiple of num_heads 5"),
        ({"depth": 4, "attention_every": 2, "num_heads": 2, "mlp_ratio": 0}, "mlp_ratio is 0.*attention_every"),
        ({"directions": 4, "allow_token_routes": True}, "directions 4.*columns.*directions 1 or 2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, shown):
    with pytest.raises(ValueError, match=shown):
        Mamba(**{**SIZES, "depth": 1, **sizes})


def test_the_fused_kernel_is_asked_for_only_where_it_is_chosen(monkeypatch):
    """Its absence is nothing to others; chosen, what is missing is said: CUDA, or the package."""
    assert not [name for name in sys.modules if name.startswith("mamba_ssm")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="mamba_ssm needs a CUDA device.*kernel torch"):
        network(kernel="mamba_ssm")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "mamba_ssm", None)  # as Python marks what can't be imported
    with pytest.raises(ValueError, match="mamba_ssm.*pip install -r requirements-mamba.txt"):
        network(kernel="mamba_ssm")


def stand_in(monkeypatch):
    """mamba_ssm's two functions, by the scan in plain torch, as if CUDA and the package were there."""
    theirs = types.ModuleType("mamba_ssm.ops.triton.ssd_combined")

    def forward(x, dt, A, B, C, chunk_size):
        assert chunk_size == 256 and all(part.is_contiguous() for part in (x, dt, A, B, C))
        return ssd(x, dt, A, B, C).to(x.dtype)

    def backward(dout, x, dt, A, B, C, out, chunk_size, D=None):
        assert out.shape == dout.shape == x.shape and chunk_size == 256
        given = [part.detach().requires_grad_() for part in (x, dt, A, B, C)]

        def gradients():
            return torch.autograd.grad(forward(*given, chunk_size), given, dout)

        with ThreadPoolExecutor(1) as other:  # in an operator's own thread autograd records nothing
            return *other.submit(gradients).result(), None, None, None, None

    theirs.mamba_chunk_scan_combined, theirs._mamba_chunk_scan_combined_bwd = forward, backward
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, theirs.__name__, theirs)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_with_the_fused_kernel_a_block_compiles_to_one_graph(precision, monkeypatch):
    """Output and gradients are those of the plain scan, as it is and compiled."""
    given, results = batch(4, 8), []
    plain = network(depth=2)
    with monkeypatch.context() as patched:
        stand_in(patched)
        fused, compiled = (network(depth=2, kernel="mamba_ssm") for _ in range(2))
        patched.setattr(torch.cuda, "is_available", lambda: False)  # for the compiler
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        assert set(compiled.blocks) <= set(compiled.compiled())
        compiling.compile_blocks(compiled.blocks, counter)
        for model in (plain, fused, compiled):
            with autocast(CPU, precision):
                out = model(*given)
            out.square().sum().backward()
            results.append([out.detach(), *(parameter.grad for parameter in model.parameters())])
    assert counter.frame_count == 1
    limit = 1e-4 if precision == "fp32" else 0.05
    for expected, *others in zip(*results, strict=True):
        assert all((other - expected).abs().max() <= limit * expected.abs().max() for other in others)
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("directions", [1, 2, 4])
def test_the_fused_kernel_is_the_scan(directions):
    """Output and gradients, as it is and compiled, against plain torch in fp32, relative to the largest value: in fp32
    within 1e-2 (Triton's products are in TF32), in bf16 within 5e-2 (plain torch's bf16 is off by up to 1.3e-2)."""
    pytest.importorskip("mamba_ssm.ops.triton.ssd_combined")
    ours = scramble(Mamba2Mixer(128, 64, 64, 2, 4, directions)).cuda()
    fused = scramble(Mamba2Mixer(128, 64, 64, 2, 4, directions, "mamba_ssm")).cuda()
    compiled = copy.deepcopy(fused)
    compiled.compile(fullgraph=True, dynamic=False)
    x = torch.randn(4, 240, 128, generator=torch.Generator().manual_seed(0)).cuda()

    def results(item, bf16):
        item.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
            out = item(x, (12, 20))
        out.float().square().sum().backward()
        return {"output": out.detach().float()} | {name: p.grad.clone() for name, p in item.named_parameters()}

    expected, off = results(ours, False), {}
    for bound, bf16, item in ((1e-2, False, fused), (5e-2, True, fused), (5e-2, True, compiled)):
        for part, found in results(item, bf16).items():
            off[bound, part] = float((found - expected[part]).abs().max() / expected[part].abs().max()) / bound
    assert all(error <= 1 for error in off.values()), off
