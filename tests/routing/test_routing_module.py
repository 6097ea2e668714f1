"""The router against its definition in the paper and naive twins written with loops."""

import weakref

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves as leaves_of

from routing_module import Route, check_routes, draw_ids, gather_tokens, kept_grid, num_keep, run_blocks, scatter_tokens
from tread.routing.ids import row_ids


def drawn(batch: int, tokens: int, ratio: float, seed: int = 0, sort: bool = True) -> torch.Tensor:
    return draw_ids(torch.rand(batch, tokens, generator=torch.Generator().manual_seed(seed)), ratio, sort)


@pytest.mark.parametrize(("tokens", "ratio", "kept"), [(16, 0.7, 5), (64, 0.3, 45), (256, 0.9, 26), (256, 0.5, 128)])
def test_kept_count_rounds_the_routed_part_down(tokens, ratio, kept):
    assert num_keep(tokens, ratio) == kept
    assert drawn(3, tokens, ratio).shape == (3, kept)


def test_blocks_get_the_positions_of_their_own_tokens():
    """Token i gets the angle 100 + i added in each block that it passes; beside it travels a table of more axes."""
    seen = []

    def block(x, angle, table, c):
        seen.append((x[..., 0].round(), angle, table, c))
        return torch.stack([x[..., 0], x[..., 1] + angle], dim=2)

    index = torch.arange(10.0).expand(2, 10)
    x, angle = torch.stack([index, torch.zeros(2, 10)], dim=2), 100 + index
    table, c = index.view(2, 10, 1, 1) * torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.randn(2, 5)
    routes = [(Route(1, 2, 0.5), drawn(2, 10, 0.5, 1)), (Route(4, 4, 0.3), drawn(2, 10, 0.3, 2))]
    out = run_blocks([block] * 6, x, c, routes=routes, along=(angle, table))
    for number, (tokens, angles, tables, shared) in enumerate(seen):
        ids = {1: routes[0][1], 2: routes[0][1], 4: routes[1][1]}.get(number, index.long())
        assert torch.equal(tokens, ids.float()) and torch.equal(angles, 100 + tokens) and shared is c
        assert torch.equal(tables[:, :, 1, 0], 3 * tokens) and tables.shape == (*ids.shape, 2, 2)
    assert not torch.equal(routes[0][1], index[:, :5].long())  # the first five of a table that is not gathered
    visits = torch.full((2, 10), 3.0)
    for (_, ids), blocks in zip(routes, (2, 1)):
        visits.scatter_add_(1, ids, torch.full(ids.shape, float(blocks)))
    assert torch.equal(out[..., 1], visits * angle)


def test_blocks_get_the_shape_of_the_kept_rows():
    """Each is called with the grid of its tokens, in fp32 under autocast too; without a grid, with none."""
    seen = []

    def block(x, c, grid):
        seen.append((x.dtype, x.shape[1], grid))
        return x + x.mean(dim=1, keepdim=True)

    x, c = torch.randn(3, 20, 4), torch.randn(3, 4)
    noise = torch.rand(3, 20)
    routes = [Route(1, 2, 0.5, "end", "row"), Route(4, 4, 0.2, "off", "row")]
    routes = [(route, row_ids(noise, route.selection_ratio, (5, 4))) for route in routes]
    run_blocks([block] * 6, x, c, routes=routes, grid=(5, 4))
    whole, half, most = [20, (5, 4)], [12, (3, 4)], [16, (4, 4)]
    assert [shape for _, *shape in seen] == [whole, half, half, whole, most, whole]
    seen.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run_blocks([block] * 6, x.bfloat16(), c, routes=routes, grid=(5, 4))
    assert [dtype == torch.float32 for dtype, *_ in seen] == [False, False, True, False, False, False]
    assert seen[2][1:] == (12, (3, 4))
    assert torch.equal(run_blocks([lambda x, c: x], x, c, routes=routes[:0]), x)


def test_a_pair_for_a_list_of_pairs_and_ends_that_are_no_numbers_are_explained():
    ids = drawn(2, 16, 0.5)
    with pytest.raises(ValueError, match=r"routes=\[\(route, ids\)\]"):
        run_blocks([lambda x: x] * 12, torch.zeros(2, 16, 4), routes=(Route(2, 8), ids))
    for start, end in (("2", 8), (2, "8"), (2.0, 8), (None, 8)):
        with pytest.raises(ValueError, match=rf"start is {start!r} and end {end!r}, but both must be block numbers"):
            Route(start, end)


def test_ids_that_are_no_rows_of_the_grid_are_refused():
    route, rows = Route(0, 0, 0.5, select="row"), torch.tensor([[4, 5, 6, 7, 12, 13, 14, 15], [0, 1, 2, 3, 4, 5, 6, 7]])
    assert kept_grid(route, rows, (4, 4)) == (2, 4)
    assert kept_grid(route, torch.tensor([[1, 2]]), (4, 1)) == (2, 1)  # tokens one below the other
    wrong = [
        rows[:, :7],  # not all of a row
        rows - rows.new_tensor([[1], [0]]),  # shifted
        rows[:, [4, 5, 6, 7, 0, 1, 2, 3]],  # another order of rows
        rows[:, [1, 0, 2, 3, 4, 5, 6, 7]],  # another order in a row
        rows[:, [0, 1, 2, 3, 0, 1, 2, 3]],  # a row twice
    ]
    for ids in wrong:
        with pytest.raises(ValueError, match="not whole rows of the 4×4 grid"):
            kept_grid(route, ids, (4, 4))
    with pytest.raises(ValueError, match="0→0 selects by 'token'.*select=\"row\""):
        run_blocks([lambda x, grid: x], torch.zeros(2, 16, 1), routes=[(Route(0, 0), rows)], grid=(4, 4))


def test_ratio_zero_equals_dense(tiny):
    x, t, y = torch.randn(2, 4, 8, 8), torch.randn(2), torch.tensor([1, 10])
    routed = tiny(x, t, y, routes=[(Route(1, 4, 0.0), drawn(2, 16, 0.0))])
    assert torch.equal(routed, tiny(x, t, y))


def test_what_does_not_fit_the_tokens_is_refused():
    x = torch.zeros(2, 8, 1)
    with pytest.raises(ValueError, match="a grid of 2×3 does not hold 8 tokens"):
        run_blocks([], x, grid=(2, 3))
    with pytest.raises(ValueError, match="along has shape"):
        run_blocks([], x, along=[torch.zeros(2, 9, 4)])
    for ids in (torch.zeros(3, 2).long(), torch.zeros(2, 9).long(), torch.zeros(2, 0).long(), torch.zeros(2, 1).int()):
        with pytest.raises(ValueError, match="ids_keep has shape"):
            run_blocks([torch.nn.Identity()], x, routes=[(Route(0, 0), ids)])
    for ratio in (-0.1, 1.0):
        with pytest.raises(ValueError, match=f"selection_ratio is {ratio}"):
            draw_ids(torch.rand(2, 8), ratio)
        with pytest.raises(ValueError, match=f"selection_ratio is {ratio}"):
            Route(2, 8, ratio)


def test_every_token_is_kept_equally_often_and_ids_differ_across_samples():
    ids = drawn(20000, 16, 0.5)
    share = torch.bincount(ids.flatten(), minlength=16) / 20000
    assert (share - 0.5).abs().max() < 5 * (0.25 / 20000) ** 0.5  # five standard errors of a binomial
    assert (ids.diff(dim=1) > 0).all()
    assert len(ids.unique(dim=0)) > 10000  # of C(16, 8) = 12870 subsets
    pair = torch.zeros(20000, 16).scatter_(1, ids, 1.0)
    together = (pair.T @ pair / 20000)[~torch.eye(16, dtype=torch.bool)]
    assert (together - 8 * 7 / (16 * 15)).abs().max() < 0.02  # subsets, not tokens, are uniform


def test_sorting_keeps_the_subset():
    assert torch.equal(drawn(5, 32, 0.5, sort=False).sort(dim=1).values, drawn(5, 32, 0.5))


def test_paper_rule():
    assert [(r.start, r.end) for r in map(Route.for_depth, (12, 24, 28))] == [(2, 8), (2, 20), (2, 24)]
    assert Route(2, -4).resolve(28) == Route.for_depth(28).resolve(28)
    assert Route.for_depth(6) == Route(2, 2, 0.5) and Route(-12, -1).resolve(12) == Route(0, 11).resolve(12)
    with pytest.raises(ValueError, match="r\\(2→1\\) at depth 5"):
        Route.for_depth(5)


@pytest.mark.parametrize(
    ("route", "shown"),
    [
        (Route(2, 12), "end 12 is out of range for 12 blocks"),
        (Route(-13, 5), "start -13 is out of range"),
        (Route(8, 2), "the route 8→2 is 8→2 in 12 blocks, backwards"),
        (Route(8, -11), "the route 8→-11 is 8→1 in 12 blocks, backwards"),
        (Route(2, 11, fp32="next"), "no block follows"),
        (Route(2, 8, rejoin=-9), "rejoin -9 lies behind route start 2"),
    ],
)
def test_routes_that_do_not_fit_show_both_numbers(route, shown):
    with pytest.raises(ValueError, match=shown):
        check_routes([route], 12)


def test_overlap_is_refused():
    with pytest.raises(ValueError, match="2→8 and 8→9 overlap"):
        check_routes([Route(8, 9), Route(2, -4)], 12)
    assert check_routes([Route(9, 10), Route(2, 8)], 12)[0].start == 2


def test_numbers_and_ids_that_would_choose_wrongly_are_refused():
    """NaN sorts last, so that its tokens would always go; of a token named twice, one result would be lost."""
    noise = torch.rand(2, 8)
    noise[1, 3] = torch.nan
    with pytest.raises(ValueError, match="noise holds 1 NaN"):
        draw_ids(noise, 0.5)
    x, kept = torch.arange(16.0).view(2, 8, 1), torch.zeros(2, 3, 1)
    assert gather_tokens(x, torch.tensor([[7], [0]])).flatten().tolist() == [7, 8]  # one token is enough
    for rows, message in (
        ([[5, 2, 7], [1, 4, 1]], "token 1 twice in sample 1"),
        ([[5, 2, 5], [1, 4, 7]], "token 5 twice in sample 0"),
        ([[0, 1, 2], [6, 7, 8]], "tokens 0 to 8, but they are 0 to 7"),
        ([[0, 1, 2], [-1, 2, 3]], "tokens -1 to 3, but they are 0 to 7"),
    ):
        ids = torch.tensor(rows)
        with pytest.raises(ValueError, match=message):
            run_blocks([torch.nn.Identity()], x, routes=[(Route(0, 0), ids)])
        with pytest.raises(ValueError, match=message):
            scatter_tokens(x, kept, ids)
        with pytest.raises(ValueError, match=message):
            gather_tokens(x, ids)
    with pytest.raises(ValueError, match="\\(2, 4, 1\\) kept tokens for ids of shape \\(2, 3\\)"):
        scatter_tokens(x, torch.zeros(2, 4, 1), torch.tensor([[0, 1, 2], [3, 4, 5]]))
    with pytest.raises(ValueError, match="all tokens of shape .* the same width"):
        scatter_tokens(x, torch.zeros(2, 3, 2), torch.tensor([[0, 1, 2], [3, 4, 5]]))
    unsorted = torch.tensor([[5, 2, 7], [6, 4, 1]])
    actual = run_blocks([lambda tokens: -tokens], x, routes=[(Route(0, 0), unsorted)])
    expected = x.clone()
    for sample, tokens in enumerate(unsorted.tolist()):
        for token in tokens:
            expected[sample, token] *= -1
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("route", "depth", "expected"),
    [
        (Route(2, 8, fp32="auto"), 12, 8),  # 3 blocks follow
        (Route(2, 7, fp32="auto"), 12, None),  # 4 follow
        (Route(2, 8, fp32="end"), 12, 8),
        (Route(2, 8, fp32="next"), 12, 9),
        (Route(2, 8, fp32="off"), 12, None),
    ],
)
def test_the_fp32_block_runs_in_fp32_under_autocast_alone(route, depth, expected):
    linears = [torch.nn.Linear(4, 4) for _ in range(depth)]
    dtypes = []

    def block(x, c, linear):
        y = linear(x)
        dtypes.append(y.dtype)
        return x + y

    blocks = [lambda x, c, linear=linear: block(x, c, linear) for linear in linears]
    x, c, routes = torch.randn(2, 8, 4), torch.randn(2, 4), [(route, drawn(2, 8, 0.5))]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run_blocks(blocks, x, c, routes=routes)
    assert [i for i, dtype in enumerate(dtypes) if dtype == torch.float32] == ([] if expected is None else [expected])
    dtypes.clear()
    run_blocks(blocks, x, c, routes=routes)
    assert set(dtypes) == {torch.float32}


# ------------------------------------------------------------------- tokens that rejoin as they were earlier


def mixing(seed: int = 0) -> list[torch.nn.Module]:
    """Blocks in which every token sees all others, in float64; the order of the tokens makes no difference."""
    torch.manual_seed(seed)
    layers = [torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(7)]
    return [layer.double() for layer in layers]


def twin(blocks, x, routes):
    """Sample by sample and token by token: {place: vector} of what is there before each block."""
    samples = []
    for sample in range(len(x)):
        here = {place: x[sample, place] for place in range(x.shape[1])}
        states = []
        for number, block in enumerate(blocks):
            states.append(dict(here))
            for route, ids in routes:
                if number == route.start and route.rejoin != "stale":
                    here = {int(place): here[int(place)] for place in ids[sample]}
            places = list(here)
            done = block(torch.stack([here[place] for place in places])[None])[0]
            here = {place: done[position] for position, place in enumerate(places)}
            for route, ids in routes:
                if number == route.end:
                    left_out = set(range(x.shape[1])) - set(ids[sample].tolist())
                    here |= {place: states[route.saved_before][place] for place in left_out}
        samples.append(torch.stack([here[place] for place in range(x.shape[1])]))
    return torch.stack(samples)


REJOINING = {
    "earlier": [Route(3, 5, rejoin=1)],
    "the first block": [Route(2, 6, 0.3, rejoin=0)],
    "counted from the end": [Route(-3, -2, rejoin=-6)],
    "one state for two": [Route(5, 5, rejoin=1), Route(2, 3, 0.75, rejoin=1)],
    "another's first block": [Route(1, 2, 0.25), Route(5, 6, rejoin=1)],
    "behind another's end": [Route(1, 2), Route(5, 5, 0.75, rejoin=3)],
    "stale": [Route(2, 4, rejoin="stale")],
    "stale throughout": [Route(0, 6, rejoin="stale")],
    "stale for one block, and at the end": [Route(3, 3, rejoin="stale"), Route(5, -1, rejoin="stale")],
}


def assert_same_gradients(actual, expected, inputs) -> None:
    weight = torch.randn_like(actual)
    torch.testing.assert_close(*(torch.autograd.grad((out * weight).sum(), inputs) for out in (actual, expected)))


@pytest.mark.parametrize("kind", REJOINING)
def test_a_route_that_rejoins_equals_loops_over_samples_and_tokens(kind):
    """With gradients, of ids in any order."""
    blocks, x = mixing(), torch.randn(2, 8, 8, dtype=torch.float64, requires_grad=True)
    routes = [(route, drawn(2, 8, route.selection_ratio, n, sort=False)) for n, route in enumerate(REJOINING[kind])]
    actual = run_blocks(blocks, x, routes=routes)
    expected = twin(blocks, x, [(route.resolve(7), ids) for route, ids in routes])
    torch.testing.assert_close(actual, expected)
    earlier = run_blocks(blocks, x, routes=[(Route(r.start, r.end, r.selection_ratio), ids) for r, ids in routes])
    assert (actual - earlier).abs().max() > 0.01
    assert_same_gradients(actual, expected, [x, *(p for block in blocks for p in block.parameters())])


def test_to_rejoin_at_the_start_is_what_a_route_was():
    """Bit for bit, gradients too: gathered, run and scattered by hand."""
    blocks = [block.float() for block in mixing()]
    parameters = [p for block in blocks for p in block.parameters()]
    x, ids, weight = torch.randn(2, 8, 8), drawn(2, 8, 0.5), torch.randn(2, 8, 8)
    before = blocks[1](blocks[0](x))
    kept = gather_tokens(before, ids)
    for block in blocks[2:5]:
        kept = block(kept)
    expected = blocks[6](blocks[5](scatter_tokens(before, kept, ids)))
    gradients = torch.autograd.grad((expected * weight).sum(), parameters)
    for rejoin in (None, 2, -5):
        actual = run_blocks(blocks, x, routes=[(Route(2, 4, rejoin=rejoin), ids)])
        assert torch.equal(actual, expected)
        assert all(map(torch.equal, torch.autograd.grad((actual * weight).sum(), parameters), gradients))


def test_the_order_of_ids_changes_the_order_in_the_blocks_alone():
    blocks, x, ids = mixing(), torch.randn(2, 8, 8, dtype=torch.float64), drawn(2, 8, 0.4)
    order, seen = torch.tensor([4, 0, 2, 1, 3]), []
    watched = [lambda x, block=block: seen.append(block(x)) or seen[-1] for block in blocks]
    outputs = [run_blocks(watched, x, routes=[(Route(3, 5, 0.4, rejoin=1), item)]) for item in (ids, ids[:, order])]
    torch.testing.assert_close(*outputs)
    for number, (item, other) in enumerate(zip(seen[:7], seen[7:])):
        torch.testing.assert_close(item[:, order] if 3 <= number <= 5 else item, other)


def test_the_gradient_of_tokens_that_rejoin_goes_round_the_blocks_between():
    """Closed form of linear blocks: kept tokens' through all four, the others' through the first alone, twice."""
    matrices = [torch.randn(4, 4, dtype=torch.float64) for _ in range(4)]
    x, ids = torch.randn(2, 6, 4, dtype=torch.float64, requires_grad=True), drawn(2, 6, 0.5)
    blocks = [lambda x, A=A: x @ A for A in matrices]
    out = run_blocks(blocks, x, routes=[(Route(2, 3, rejoin=1), ids)])
    weight = torch.randn_like(out)
    (gradient,) = torch.autograd.grad((out * weight).sum(), x)
    a, b, c, d = matrices
    kept = torch.zeros(2, 6, 1, dtype=torch.bool).scatter_(1, ids[..., None], True)
    torch.testing.assert_close(out, torch.where(kept, x @ a @ b @ c @ d, x @ a))
    torch.testing.assert_close(gradient, torch.where(kept, weight @ (a @ b @ c @ d).T, weight @ a.T))


def test_a_route_rejoins_where_all_tokens_are():
    route = Route(2, 4)
    for rejoin in (0, 1, 2, 5, 6, 8):
        assert check_routes([Route(8, 9, rejoin=rejoin), route], 12)[1].rejoin == rejoin
    for rejoin in (3, 4, -8):
        with pytest.raises(ValueError, match=f"8→9 rejoins as before block {rejoin % 12}, which lies in the route 2→4"):
            check_routes([Route(8, 9, rejoin=rejoin), route], 12)
    assert str(Route(8, -3, rejoin=np.int64(-10)).resolve(12)) == "r(8→9), rejoins as before block 2"
    with pytest.raises(ValueError, match="rejoin is 2.0, but must be null, a block"):
        Route(8, -3, rejoin=2.0)
    assert str(Route(8, -3, rejoin=8).resolve(12)) == str(Route(8, -3).resolve(12)) == "r(8→9)"


def held_by_the_graph(route: Route) -> int:
    """Bytes of all tensors that a routed forward pass keeps for its backward pass, each counted once."""
    kept, x, ids = {}, torch.randn(2, 8, 8, dtype=torch.float64, requires_grad=True), drawn(2, 8, 0.5)

    def note(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = run_blocks(mixing(), x, routes=[(route, ids)])
    assert result.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def test_what_a_state_that_waits_costs():
    """Without a graph it is one sequence more between `rejoin` and the start of the route, and nothing on the route
    itself, which would hold the state of its start; with one, nothing: the block behind it keeps its input anyway."""
    assert held_by_the_graph(Route(3, 5, rejoin=1)) == held_by_the_graph(Route(3, 5))
    alive, states = [], []

    def block(x):
        alive.append([number for number, state in enumerate(states) if state() is not None])
        x = x + 1
        states.append(weakref.ref(x))  # state n is what block n returns
        return x

    run_blocks([block] * 7, torch.zeros(2, 8, 1), routes=[(Route(3, 4, rejoin=1), drawn(2, 8, 0.5))])
    assert alive == [[], [0], [0, 1], [0], [0, 3], [], [5]]


def test_blocks_that_write_into_what_is_to_rejoin_are_refused():
    x, ids = torch.randn(2, 8, 1), drawn(2, 8, 0.5)
    blocks = [lambda x: x + 1, lambda x: x.mul_(2), lambda x: x + 1, lambda x: x.mul_(2)]
    assert torch.isfinite(run_blocks(blocks, x, routes=[(Route(2, 3), ids)])).all()  # its blocks have a copy
    with pytest.raises(RuntimeError, match="a block before the start of a route wrote into its inputs"):
        run_blocks(blocks, x, routes=[(Route(2, 3, rejoin=1), ids)])
    blocks[1] = lambda x: x * 2
    with torch.inference_mode():  # where nobody counts
        assert torch.isfinite(run_blocks(blocks, torch.randn(2, 8, 1), routes=[(Route(2, 3, rejoin=1), ids)])).all()


def gathered(tokens, ids):
    """Tensor.gather, whose gradient adds up."""
    return tokens.gather(1, ids.view(*ids.shape, *[1] * (tokens.ndim - 2)).expand(-1, -1, *tokens.shape[2:]))


def scattered(saved, kept, ids):
    index = ids.view(*ids.shape, *[1] * (saved.ndim - 2)).expand(-1, -1, *saved.shape[2:])
    return saved.scatter(1, index, kept.to(saved.dtype))


def gradients(function, inputs, weight):
    """The function's values and what they pass back."""
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]  # which keeps strides
    output = function(*inputs)
    return output.detach(), *torch.autograd.grad(output, inputs, weight.expand_as(output).to(output.dtype))


@pytest.mark.parametrize("more", [(5,), (), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_rows_come_and_go_as_by_gather_and_scatter(dtype, more):
    """Bit for bit, both ways: contiguous tokens, transposed ones, one sample expanded; under autocast; kept in fp32.
    Masks (B, N) and tables (B, N, heads, pairs, …) travel so, too."""
    ids, shape = drawn(3, 7, 0.5, sort=False), (3, 7, *more)
    whole, kept = torch.randn(shape).to(dtype), torch.randn(3, 4, *more)
    back, back_kept = torch.randn(shape), torch.randn(3, 4, *more)
    for tokens in (whole, whole.transpose(0, 1).contiguous().transpose(0, 1), whole[:1].expand(shape)):
        for autocast in (False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                ours = gradients(lambda x: gather_tokens(x, ids), [tokens], back_kept)
                ours += gradients(lambda x, y: scatter_tokens(x, y, ids), [tokens, kept], back)
                theirs = gradients(lambda x: gathered(x, ids), [tokens], back_kept)
                theirs += gradients(lambda x, y: scattered(x, y, ids), [tokens, kept], back)
            for our, their in zip(ours, theirs, strict=True):
                assert our.dtype == their.dtype and torch.equal(our, their)
    with torch.no_grad():
        assert torch.equal(gather_tokens(whole, ids), gathered(whole, ids))


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_rows_differentiate_as_gather_and_scatter_do(name):
    """Numerically, once and twice, forward mode too; by torch.func's maps, compiled whole."""
    ids = drawn(2, 5, 0.5, sort=False)
    x, kept = torch.randn(2, 5, 3, dtype=torch.float64), torch.randn(2, 3, 3, dtype=torch.float64)
    inputs, ours, theirs = {
        "gather": ((x,), lambda x: gather_tokens(x, ids), lambda x: gathered(x, ids)),
        "scatter": ((x, kept), lambda *given: scatter_tokens(*given, ids), lambda *given: scattered(*given, ids)),
    }[name]
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    assert torch.autograd.gradcheck(ours, leaves, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(ours, leaves)
    stacked = [torch.stack([tensor, 2 * tensor]) for tensor in inputs]
    for call in (
        lambda function: torch.func.jvp(function, inputs, inputs)[1],
        lambda function: torch.func.hessian(lambda *given: function(*given).pow(3).sum())(*inputs),
        lambda function: torch.vmap(function)(*stacked),
        lambda function: torch.vmap(torch.func.grad(lambda *given: function(*given).pow(2).sum()))(*stacked),
        lambda function: torch.inference_mode()(function)(*inputs),
    ):
        found, expected = call(ours), call(theirs)
        assert torch.equal(*(torch.cat([part.flatten() for part in leaves_of(tree)]) for tree in (found, expected)))
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, gradients(compiled, inputs, x[:, :1]), gradients(theirs, inputs, x[:, :1])))
