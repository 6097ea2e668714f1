"""Diffusion-RWKV against naive twins written with loops, closed forms, and torch's counter of FLOPs."""

import copy

import pytest
import torch
from conftest import size_of
from modes import batch, counted_flops, hot, rows
from test_wkv import naive as naive_wkv
from torch.testing import assert_close

from dit import DiT
from routing_module import Route, draw_ids
from tread.models.rwkv import RWKV, ChannelMix, RWKVBlock, SpatialMix, quad_shift


def scramble(module):
    """Every parameter matters: weights N(0, 0.05), and where tokens are blended or decay, numbers of that kind."""
    return hot(module, 0.05, decay=3.0, bonus=3.0, mix_r=1.0, mix_k=1.0, mix_v=1.0)


def network(depth=6, **sizes):
    sizes = {"input_size": 8, "hidden_size": 32, "num_classes": 10, **sizes}
    return scramble(RWKV(depth=depth, **sizes))


def naive_shift(x, grid):
    """Token by token: each quarter looks at the token above, below, to the left, to the right."""
    (height, width), quarter = grid, x.shape[2] // 4
    out = torch.zeros_like(x)
    for part, (down, right) in enumerate(((-1, 0), (1, 0), (0, -1), (0, 1))):
        channels = slice(part * quarter, (part + 1) * quarter)
        for row in range(height):
            for column in range(width):
                if 0 <= row + down < height and 0 <= column + right < width:
                    seen = (row + down) * width + column + right
                    out[:, row * width + column, channels] = x[:, seen, channels]
    return out


def blend(x, shifted, mix):
    return mix * x + (1 - mix) * shifted


def naive_spatial(m, x, grid):
    """(σ(R) ⊙ WKV(K, V))·W_O with R, K, V = blended tokens·W."""
    shifted = naive_shift(x, grid)
    pairs = ((m.mix_r, m.receptance), (m.mix_k, m.key), (m.mix_v, m.value))
    r, k, v = (blend(x, shifted, mix) @ layer.weight.T for mix, layer in pairs)
    return (1 / (1 + (-r).exp()) * naive_wkv(k, v, m.decay, m.bonus)) @ m.output.weight.T


def naive_channel(m, x, grid):
    """σ(R) ⊙ (max(K, 0)²·W_V)."""
    shifted = naive_shift(x, grid)
    r = blend(x, shifted, m.mix_r) @ m.receptance.weight.T
    k = blend(x, shifted, m.mix_k) @ m.key.weight.T
    return 1 / (1 + (-r).exp()) * (k.clamp(min=0) ** 2 @ m.value.weight.T)


def naive_block(block, x, c, grid):
    """x + α·mix(γ·norm(x) + β), twice, with β, γ − 1, α from the conditioning."""
    layer = block.adaLN_modulation[1]
    b1, g1, a1, b2, g2, a2 = ((c * c.sigmoid()) @ layer.weight.T + layer.bias)[:, None].chunk(6, dim=2)

    def norm(y):
        return (y - y.mean(dim=2, keepdim=True)) / (y.var(dim=2, correction=0, keepdim=True) + 1e-6).sqrt()

    x = x + a1 * naive_spatial(block.spatial_mix, (1 + g1) * norm(x) + b1, grid)
    return x + a2 * naive_channel(block.channel_mix, (1 + g2) * norm(x) + b2, grid)


GRIDS = [(4, 4), (1, 5), (6, 1), (2, 7), (7, 2), (1, 1)]


def test_where_it_starts():
    """Decays of 0 to 8 in each of the four shifts, no bonus, tokens and neighbours blended half and half."""
    mix = SpatialMix(16)
    assert torch.allclose(mix.decay.view(4, 4), torch.tensor([0.0, 8 / 3, 16 / 3, 8.0]).expand(4, -1))
    assert not mix.bonus.any()
    for item in (mix.mix_r, mix.mix_k, mix.mix_v, ChannelMix(16, 32).mix_r, ChannelMix(16, 32).mix_k):
        assert (item == 0.5).all()


@pytest.mark.parametrize("grid", GRIDS)
def test_shift_equals_a_loop(grid):
    x = torch.randn(2, grid[0] * grid[1], 8)
    assert torch.equal(quad_shift(x, grid), naive_shift(x, grid))


@pytest.mark.parametrize("grid", GRIDS)
def test_parts_and_block_equal_their_equations(grid):
    x, c = torch.randn(2, grid[0] * grid[1], 16), torch.randn(2, 16)
    for module, twin in (
        (SpatialMix(16), lambda m: naive_spatial(m, x.double(), grid)),
        (ChannelMix(16, 40), lambda m: naive_channel(m, x.double(), grid)),
        (RWKVBlock(16, 2.5), lambda m: naive_block(m, x.double(), c.double(), grid)),
    ):
        scramble(module)
        actual = module(x, c, grid) if isinstance(module, RWKVBlock) else module(x, grid)
        assert_close(actual.double(), twin(copy.deepcopy(module).double()), rtol=1e-5, atol=1e-6)


def test_network_is_its_blocks_on_the_token_grid():
    model = network(depth=2)
    x, t, y = batch(2, 8)
    double = copy.deepcopy(model).double()
    tokens = (double.x_embedder(x.double()) + double.pos_embed).detach()
    c = (model.t_embedder(t) + model.y_embedder(y)).double()
    for block in double.blocks:
        tokens = naive_block(block, tokens, c, (4, 4))
    expected = double.unpatchify(double.final_layer(tokens, c))
    assert_close(model(x, t, y).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dim, depth, mlp_ratio", [(768, 12, 4.0), (384, 12, 4.0), (64, 3, 2.5)])
def test_parameter_count(dim, depth, mlp_ratio):
    """Matrices, 7 vectors and the modulation of each block, and the frame that DiT has as well."""
    with torch.device("meta"):
        ours = RWKV(hidden_size=dim, depth=depth, mlp_ratio=mlp_ratio)
        frame = DiT(hidden_size=dim, depth=0, num_heads=4)
    block = (5 + 2 * mlp_ratio) * dim**2 + 7 * dim + 6 * dim**2 + 6 * dim
    assert size_of(ours) == depth * block + size_of(frame)


def test_row_routes_on_dit_are_token_routes_with_those_ids(tiny):
    """The ablation: a DiT needs no grid, and which ids come is all that a route is to it."""
    ids = rows(4)
    routes = [Route(1, 4, 0.5, select=select) for select in ("row", "token")]
    by_row, by_token = (tiny(*batch(4, 8), routes=[(route, ids)]) for route in routes)
    assert torch.equal(by_row, by_token)
    assert not torch.equal(by_row, tiny(*batch(4, 8), routes=[(Route(1, 4, 0.5), draw_ids(torch.rand(4, 16), 0.5))]))
    route = Route(1, 4, 0.7, select="row")  # 2 rows of 4 stay, of tokens 16 − 11
    assert 4 * tiny.forward_flops([route]) == counted_flops(tiny, *batch(4, 8), routes=[(route, rows(4, 0.7))])
    assert tiny.forward_flops([route]) > tiny.forward_flops([Route(1, 4, 0.7)])
