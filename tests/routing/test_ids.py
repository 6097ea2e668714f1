"""Ways to choose ids against loops over samples, rows and tokens, counting, and closed forms of the schedule."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from conftest import randomized
from test_routing_module import mixing

from dit import DiT
from rf import RF
from routing_module import REJOINS, RULES, Record, Route, draw_ids, num_keep, run_blocks, settle_ids
from tread.data.dataset import Batch
from tread.data.latents import LatentSpec
from tread.diffusion.edm import EDM
from tread.diffusion.guidance import Branch, Guidance, guided
from tread.diffusion.sampling import Model, Sampler, draw
from tread.models.maskdit import MaskDiT
from tread.models.sprint import Sprint
from tread.routing.hooks import attach_routes
from tread.routing.ids import (
    LargestNorm,
    RatioSchedule,
    Row,
    Token,
    check_ratio,
    choose_ids,
    count_kept,
    keep_prefix,
    pair,
    row_ids,
    with_ratio,
)
from tread.runtime.distributed import split_batch
from tread.runtime.randomness import generator
from tread.training.step import loss, step_draws

SELECTS = ("token", "row", "shared")


def uniform(batch: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(batch, tokens, generator=torch.Generator().manual_seed(seed))


def mask(batch: int, tokens: int, *places: tuple[int, int]) -> torch.Tensor:
    """False but at (sample, token)."""
    actual = torch.zeros(batch, tokens, dtype=torch.bool)
    for sample, token in places:
        actual[sample, token] = True
    return actual


def shares(subsets: torch.Tensor, size: int) -> tuple[int, float]:
    """How many different rows there are, and how far their shares lie from being equal, in standard errors."""
    _, counts = subsets.unique(dim=0, return_counts=True)
    p = 1 / size
    return len(counts), ((counts / len(subsets) - p).abs().max() / (p * (1 - p) / len(subsets)) ** 0.5).item()


# ------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize(("grid", "ratio"), [((4, 4), 0.5), ((5, 3), 0.3), ((3, 7), 0.9), ((6, 1), 0.5), ((1, 6), 0.9)])
def test_row_ids_equal_a_loop(grid, ratio):
    height, width = grid
    noise = uniform(7, height * width)
    expected = []
    for numbers in noise.tolist():
        first = sorted(range(height), key=lambda row: numbers[row * width])
        rows = sorted(first[: height - int(height * ratio)])
        expected.append([row * width + column for row in rows for column in range(width)])
    actual = row_ids(noise, ratio, grid)
    assert actual.tolist() == expected and actual.dtype == torch.int64


# ----------------------------------------------------------------------------------------- shared


def test_shared_ids_are_those_of_the_first_sample():
    noise = uniform(5, 12)
    route = Route(0, 0, 0.25, select="shared")
    ids = choose_ids(route, noise)
    assert ids.shape == (5, 9) and torch.equal(ids, draw_ids(noise, 0.25)[:1].expand(5, -1))
    other = torch.cat([noise[:1], uniform(4, 12, seed=1)])
    assert torch.equal(choose_ids(route, other), ids)
    assert not torch.equal(choose_ids(route, noise.flip(0)), ids)


# ----------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize("grid", [(4, 4), (2, 6), (8, 2)])
def test_group_ids_equal_a_loop(grid):
    height, width = grid
    noise, expected = uniform(7, height * width), []
    for numbers in noise.tolist():
        ids = []
        for row, column in itertools.product(range(0, height, 2), range(0, width, 2)):
            four = [(row + down) * width + column + right for down in (0, 1) for right in (0, 1)]
            ids.append(min(four, key=lambda token: numbers[token]))
        expected.append(sorted(ids))
    route = Route(0, 0, 0.75, select="group")
    actual = choose_ids(route, noise, grid)
    assert actual.tolist() == expected and actual.dtype == torch.int64
    assert actual.shape[1] == count_kept(route, height * width)
    assert choose_ids(route, noise, grid, prefix=1).tolist() == [[0, *(i + 1 for i in ids)] for ids in expected]


def test_a_forced_token_stays_for_its_group_and_two_of_one_are_refused():
    noise, route = uniform(20000, 8), Route(0, 0, 0.75, select="group")
    keep = mask(20000, 8)
    keep[:, 5] = True  # of the left group, 0 1 4 5
    ids = choose_ids(route, noise, (2, 4), keep)
    number, errors = shares(ids, 4)
    assert (ids == 5).any(dim=1).all() and number == 4 and errors < 5
    with pytest.raises(ValueError, match="2 tokens of a 2×2 group"):
        choose_ids(route, noise[:3], (2, 4), mask(3, 8, (1, 5), (1, 0)))


def test_groups_have_one_ratio_and_even_grids():
    for ratio in (0.0, 0.5, 0.74):
        with pytest.raises(ValueError, match=f"selection_ratio is {ratio}, but must be 0.75 with select=group"):
            Route(0, 0, ratio, select="group")
    route = Route(1, 3, 0.75, select="group")
    for grid in ((3, 4), (4, 3)):
        odd = f"grid of {grid[0]}×{grid[1]} tokens is odd: select=token"
        with pytest.raises(ValueError, match=odd):
            choose_ids(route, uniform(2, 12), grid)
        with pytest.raises(ValueError, match=odd):
            check_ratio(route, grid, "key")
    check_ratio(route, (4, 4), "key")
    assert with_ratio(route, 0.75) == route and with_ratio(route, 0.5) == Route(1, 3, 0.5)
    assert with_ratio(Route(1, 3, 0.75, select="row"), 0.5) == Route(1, 3, 0.5, select="row")


# ----------------------------------------------------------------------------------------- forced


def test_forced_tokens_equal_a_loop():
    """The forced ones, then those of the smallest numbers, each sample with a mask of its own."""
    noise, keep = uniform(50, 10), uniform(50, 10, seed=1) < 0.2
    assert 1 < keep.sum(dim=1).max() <= 5 and keep.sum(dim=1).min() == 0
    expected = []
    for numbers, forced in zip(noise.tolist(), keep.tolist()):
        order = sorted(range(10), key=lambda token: (not forced[token], numbers[token]))
        expected.append(sorted(order[:5]))
    assert choose_ids(Route(0, 0, 0.5), noise, force_keep=keep).tolist() == expected
    nothing = torch.zeros_like(keep)
    assert torch.equal(choose_ids(Route(0, 0, 0.5), noise, force_keep=nothing), draw_ids(noise, 0.5))


def test_a_row_stays_if_one_of_its_tokens_must():
    """Forced with row 4 in all samples, and with rows 0 and 1 in the second one, which leaves no choice."""
    noise = uniform(20000, 15)
    keep = mask(20000, 15, (1, 0), (1, 5))
    keep[:, 13] = True
    ids = row_ids(noise, 0.4, (5, 3), keep)
    rows = ids.view(20000, 3, 3)[..., 0] // 3
    assert ids.shape == (20000, 9) and (rows == 4).any(dim=1).all() and rows[1].tolist() == [0, 1, 4]
    number, errors = shares(rows[2:], math.comb(4, 2))
    assert number == math.comb(4, 2) and errors < 5


def test_a_shared_token_stays_if_it_must_in_one_sample():
    """The two that the first sample's numbers would route first, forced by other samples, and its two smallest."""
    noise = uniform(4, 8)
    order = noise[0].argsort().tolist()
    ids = choose_ids(Route(0, 0, select="shared"), noise, None, mask(4, 8, (1, order[-1]), (3, order[-2])))
    assert ids.tolist() == [sorted(order[-2:] + order[:2])] * 4


@pytest.mark.parametrize(
    ("select", "places", "shown"),
    [
        ("token", [(1, token) for token in range(9)], "9 of a sample's 16 .*0.5 keeps 8"),
        ("row", [(1, 0), (1, 5), (1, 10)], "3 of a sample's 4 .*0.5 keeps 2"),
        ("shared", [(token % 3, token) for token in range(9)], "9 of a sample's 16 .*0.5 keeps 8"),
    ],
)
def test_more_forced_than_kept_is_refused(select, places, shown):
    route = Route(0, 0, 0.5, select=select)
    with pytest.raises(ValueError, match=shown):
        choose_ids(route, uniform(3, 16), (4, 4), mask(3, 16, *places))
    assert choose_ids(route, uniform(3, 16), (4, 4), mask(3, 16, *places[:-1])).shape == (3, 8)


@pytest.mark.parametrize("select", SELECTS)
@pytest.mark.parametrize("keep", [mask(3, 16).long(), mask(1, 16)], ids=["int64", "one sample"])
def test_a_mask_of_another_shape_or_type_is_refused(select, keep):
    with pytest.raises(ValueError, match="force_keep is .* not \\(3, 16\\) of torch.bool"):
        choose_ids(Route(0, 0, select=select), uniform(3, 16), (4, 4), keep)


# ------------------------------------------------------------------------------ prefix, count, grid


@pytest.mark.parametrize("select", SELECTS)
def test_a_prefix_always_stays(select):
    noise, route = uniform(3, 16), Route(0, 0, 0.5, select=select)
    actual, plain = choose_ids(route, noise, (4, 4), prefix=2), choose_ids(route, noise, (4, 4))
    assert actual.tolist() == [[0, 1, *(token + 2 for token in ids)] for ids in plain.tolist()]
    assert torch.equal(keep_prefix(plain, 2), actual) and torch.equal(keep_prefix(plain, 0), plain)
    forced = choose_ids(route, noise, (4, 4), mask(3, 16, (0, 7)), prefix=2)  # the mask is of those behind it
    assert forced.shape == (3, 10) and 9 in forced[0] and (forced[:, :2] == torch.arange(2)).all()


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.25, 0.3, 0.5, 0.7, 0.9, 0.99])
def test_count_kept_is_what_is_chosen(ratio):
    for height, width in itertools.product(range(1, 11), (1, 2, 5, 8)):
        tokens = height * width
        for select in SELECTS:
            route = Route(0, 0, ratio, select=select)
            chosen = choose_ids(route, torch.zeros(2, tokens), (height, width))
            assert chosen.shape == (2, count_kept(route, tokens, (height, width))), (height, width, select)
            assert chosen.shape[1] > 0
        assert count_kept(Route(0, 0, ratio), tokens) == num_keep(tokens, ratio)


def test_a_rule_that_keeps_another_number_than_it_says_is_refused(monkeypatch):
    """With draws and with scores, where run_blocks lets the rule choose."""

    class Fewer(Token):
        def choose(self, route, draws, grid, keep, scores):
            return super().choose(route, draws, grid, keep, scores)[:, 1:]

    scored = Fewer()
    scored.scores = lambda tokens: tokens.norm(dim=2)
    monkeypatch.setitem(RULES, "fewer", Fewer())
    monkeypatch.setitem(RULES, "scored", scored)
    said = r"select=\w+ chose ids of shape \(2, 7\), but its `count` says that it keeps 8 of 16 tokens"
    with pytest.raises(ValueError, match=said):
        choose_ids(Route(0, 0, 0.5, select="fewer"), uniform(2, 16))
    with pytest.raises(ValueError, match=said):
        settle_ids(Route(0, 0, 0.5, select="scored"), uniform(2, 16), torch.zeros(2, 16, 4))


@pytest.mark.parametrize("select", SELECTS)
@pytest.mark.parametrize("size", [2, 3, 4, 16])
def test_ratios_for_settings_keep_more_than_one_token_and_not_all(size, select):
    """Against counting what choose_ids keeps, over ratios around each number of tokens."""
    for ratio in [part / 1000 for part in range(1000)] + [kept / size**2 for kept in range(size**2)]:
        route = Route(0, 0, ratio, select=select)
        kept = choose_ids(route, torch.zeros(1, size**2), (size, size)).shape[1]
        if ratio == 0 or 1 < kept < size**2:
            check_ratio(route, (size, size), "key")
        else:
            what = "keeps a single token" if kept == 1 else "routes nothing around"
            with pytest.raises(ValueError, match=f"^key {ratio:g} {what}"):
                check_ratio(route, (size, size), "key")


def test_rows_need_a_grid_that_fits():
    with pytest.raises(ValueError, match="keeps a single token .* at most 0.5 keeps more"):  # two rows of four
        check_ratio(Route(0, 0, 0.75, select="row"), (4, 1), "key")
    for noise, grid in ((uniform(2, 16), None), (uniform(2, 16), (4, 5)), (uniform(2, 16)[0], (4, 4))):
        for route in (Route(0, 0, select="row"), Route(0, 0, 0.75, select="group")):
            with pytest.raises(ValueError, match="noise .B, N. has shape .* grid is"):
                choose_ids(route, noise, grid)


# --------------------------------------------------------------------------------------- schedule


@pytest.mark.parametrize("levels", [2, 3, 8])
def test_a_linear_schedule_holds_each_level_equally_long(levels):
    """Level k of steps first + [k, k + 1)·length / levels, in whole numbers."""
    schedule = RatioSchedule(0.75, 0.25, last=1100, first=100, levels=levels)
    for step in range(1300):
        level = min(max(step - 100, 0) * levels // 1000, levels - 1)
        assert schedule.at(step) == pytest.approx(0.75 - 0.5 * level / (levels - 1)), step


@pytest.mark.parametrize("levels", [3, 5])
def test_a_cosine_schedule_is_flat_at_both_ends(levels):
    """Level k begins where (1 − cos πu) / 2 = k / levels, at u = arccos(1 − 2k / levels) / π."""
    schedule = RatioSchedule(0.2, 0.6, last=1000, shape="cosine", levels=levels)
    begins = [math.acos(1 - 2 * k / levels) / math.pi * 1000 for k in range(1, levels)]
    for step in range(1100):
        level = sum(step >= begin for begin in begins)
        assert schedule.at(step) == pytest.approx(0.2 + 0.4 * level / (levels - 1)), step
    held = [sum(schedule.at(step) == ratio for step in range(1000)) for ratio in (0.2, schedule.at(500))]
    assert held[0] > 1.5 * held[1]


@pytest.mark.parametrize("shape", ["linear", "cosine"])
@pytest.mark.parametrize("levels", [2, 3, 8, 16])
def test_a_schedule_has_so_many_ratios_and_keeps_its_ends(shape, levels):
    """0.7 → 0.1, whose difference is no binary fraction: at the end it is 0.1, so that 2 of 20 tokens are routed."""
    schedule = RatioSchedule(0.7, 0.1, last=300, first=10, shape=shape, levels=levels)
    ratios = [schedule.at(step) for step in range(400)]
    assert len(set(ratios)) == levels and ratios == sorted(ratios, reverse=True)
    assert set(ratios[:11]) == {0.7} and set(ratios[300:]) == {0.1} and schedule.at(10**9) == 0.1
    if levels % 2:
        assert schedule.at(155) == pytest.approx(0.4)  # the middle
    assert num_keep(20, schedule.at(300)) == 18


def test_a_schedule_is_of_all_routes():
    routes = (Route(1, 2, 0.5, "off", "row"), Route(4, 4, 0.9))
    actual = RatioSchedule(0.75, 0.25, last=4, levels=3).apply(routes, 2)
    assert actual == (Route(1, 2, 0.5, "off", "row"), Route(4, 4, 0.5))


@pytest.mark.parametrize(
    "wrong",
    [{"start": 1.0}, {"end": -0.1}, {"first": 10}, {"first": -1}, {"shape": "step"}, {"levels": 1}, {"levels": 17}],
    ids=str,
)
def test_a_schedule_that_can_not_be_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RatioSchedule(**{"start": 0.5, "end": 0.25, "last": 10, **wrong})
    assert RatioSchedule(0.5, 0.0, 8) == RatioSchedule(0.5, 0.0, 8, 0, "linear", 8)


# ---------------------------------------------------------------------- independence of the company


@pytest.mark.parametrize("select", SELECTS)
def test_ids_and_losses_do_not_depend_on_how_a_batch_is_split(read_config, tiny, select):
    """Two processes of two micro-batches each, and the whole batch at once; "shared" is the same in all parts."""
    cfg = read_config("model.depth=6", "train.batch_size=8", f"model.routes.0.select={select}")
    latents = LatentSpec(shape=(4, 8, 8), classes=tuple("0123456789"), autoencoder="x", scale_applied=True)
    batch = Batch(torch.randn(8, 4, 8, 8), torch.arange(8), np.arange(8))
    draws, route = step_draws(cfg, latents, 3, "cpu"), cfg.model.resolved_routes[0]
    ((drawn_for, whole),) = draws.routes
    uniform = torch.rand(8, 16, generator=generator(cfg.seed, 3, "route 0"))
    assert drawn_for == route and torch.equal(whole, choose_ids(route, uniform, tiny.grid))
    parts = [rows for rank in range(2) for rows in split_batch(8, 2, rank, 2)]
    assert len(parts) == 4
    split = [draws.rows(rows).routes[0][1] for rows in parts]
    assert torch.equal(torch.cat(split), whole) and (len(whole.unique(dim=0)) == 1) == (select == "shared")
    assert not torch.equal(step_draws(cfg, latents, 4, "cpu").routes[0][1], whole)
    with torch.no_grad():
        [expected] = loss(cfg, tiny, latents, batch, draws, tiny.null(1))
        losses = [loss(cfg, tiny, latents, batch.rows(r), draws.rows(r), tiny.null(1))[0] for r in parts]
    torch.testing.assert_close(torch.cat(losses), expected)


@pytest.mark.parametrize("select", SELECTS)
def test_a_pictures_ids_follow_from_its_seed_alone(tiny, select):
    """In any company and batch. Of a route trained with one draw a batch, each picture has its own."""
    seen = []
    tiny.register_forward_pre_hook(lambda _, args, more: seen.append(more["routes"]), with_kwargs=True)
    model, guidance = Model(EDM(), tiny, (Route(1, 3, select=select),)), Guidance("sparse", 1.5, 0.25, 0.5)

    def drawn(seeds: list[int], batch_size: int) -> dict[int, list]:
        """Seed → its ids, call by call."""
        seen.clear()
        labels, sampler = torch.tensor(seeds) % 10, Sampler(2, batch_size, guidance=guidance)
        list(draw(model, seeds, labels, sampler))
        calls = [seen[i : i + 6] for i in range(0, len(seen), 6)]  # 2N − 1 calls of two branches
        return {
            seed: [routes[0][1][place % batch_size].tolist() for routes in calls[place // batch_size]]
            for place, seed in enumerate(seeds)
        }

    together = drawn([5, 8, 2, 11], 4)
    assert drawn([11, 5], 2) == {seed: together[seed] for seed in (11, 5)}
    assert drawn([8, 2, 5], 1) == {seed: together[seed] for seed in (8, 2, 5)}
    assert [len(ids) for ids in together[5]] == [12, 8] * 3
    assert all(len({str(one[call]) for one in together.values()}) > 1 for call in range(6))
    if select == "row":
        assert all(ids == [4 * (i // 4) + j for i in ids[::4] for j in range(4)] for ids in together[5])


# ------------------------------------------------------------------------------- all tokens, stale ones


def test_blocks_on_a_stale_route_see_all_tokens_and_are_recorded_so():
    """Its values are in test_routing_module.py."""
    x, route, seen = torch.randn(2, 8, 8, dtype=torch.float64), Route(2, 4, rejoin="stale"), []
    watched = [lambda tokens, block=block: seen.append(tokens.shape[1]) or block(tokens) for block in mixing()]
    ids = draw_ids(uniform(2, 8), 0.5)
    run_blocks(watched, x, routes=[(route, ids)], record=(record := Record((2,))))
    assert seen == [8] * 7 and record.ids[0] is ids
    assert record.outputs[2][0].shape == (2, 8, 8) and record.outputs[2][1] is None


def test_what_can_not_rejoin_stale_refuses_to():
    sizes = {"input_size": 8, "in_channels": 4, "patch_size": 2, "hidden_size": 32, "num_heads": 2, "num_classes": 10}
    given, ids = (torch.randn(2, 4, 8, 8), torch.rand(2), torch.arange(2)), draw_ids(uniform(2, 16), 0.5)
    with pytest.raises(ValueError, match="rejoin stale is given, but SPRINT puts mask tokens"):
        Sprint(depth=6, **sizes)(*given, [(Route(2, 3, rejoin="stale"), ids)])
    whole = Route(0, -1, fp32="off", rejoin="stale")
    with pytest.raises(ValueError, match="MaskDiT drops tokens before its encoder"):
        MaskDiT(depth=4, **sizes)(*given, [(whole, ids)])
    with pytest.raises(ValueError, match="route 0→-1 has rejoin=stale.*only run_blocks"):
        attach_routes(torch.nn.ModuleList(mixing()), whole)
    with pytest.raises(ValueError, match="rejoin is 'fresh', but must be null, a block, stale or a plugin's"):
        Route(0, 1, rejoin="fresh")


# ------------------------------------------------------------------------------ rules that score tokens


def test_without_chance_the_largest_norms_are_kept(monkeypatch):
    """Against a sort of the norms, in raster order, whatever the draws."""
    monkeypatch.setitem(RULES, "norm", LargestNorm(temperature=0.0))
    tokens = torch.randn(5, 12, 4) * uniform(5, 12, 1)[:, :, None].exp()
    norms = [[float(sum(value**2 for value in token)) for token in sample] for sample in tokens.double()]
    expected = [sorted(sorted(range(12), key=lambda place: -sample[place])[:5]) for sample in norms]
    for draws in (uniform(5, 12), torch.zeros(5, 12), torch.ones(5, 12)):
        route, record = Route(1, 1, 0.6, select="norm"), Record()
        run_blocks([lambda x: x] * 3, tokens, routes=[(route, draws)], record=record)
        assert record.ids[0].tolist() == expected


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_chances_of_norms_are_those_of_draws_without_replacement(monkeypatch, temperature):
    """Two of four tokens: each subset's share against the sum over both orders of exp(z / T), drawn one by one."""
    monkeypatch.setitem(RULES, "norm", LargestNorm(temperature))
    lengths, count = [1.0, 2.0, 0.5, 1.5], 40000
    logs = [math.log(length) for length in lengths]
    mean = sum(logs) / 4
    std = math.sqrt(sum((value - mean) ** 2 for value in logs) / 3)
    weights = [math.exp((value - mean) / std / temperature) for value in logs]
    tokens = torch.tensor(lengths)[None, :, None] * torch.tensor([0.6, 0.0, -0.8])
    ids = settle_ids(Route(0, 0, 0.5, select="norm"), uniform(count, 4), tokens.expand(count, -1, -1))
    for one, other in itertools.combinations(range(4), 2):
        total = sum(weights)
        pairs = ((one, other), (other, one))
        chance = sum(weights[a] / total * weights[b] / (total - weights[a]) for a, b in pairs)
        share = (ids == torch.tensor([one, other])).all(dim=1).double().mean().item()
        assert abs(share - chance) < 5 * math.sqrt(chance * (1 - chance) / count), (one, other)


def test_scored_routes_choose_before_their_first_block_and_are_recorded_in_order():
    """Handing the recorded ids in directly is the same pass, its gradients too: none goes through the scores."""
    blocks, x = mixing(), torch.randn(2, 8, 8, dtype=torch.float64, requires_grad=True)
    late, early = Route(5, 5, 0.25, select="norm"), Route(1, 3, select="norm")
    given, record = [(late, uniform(2, 8, 1)), (early, uniform(2, 8, 2))], Record()
    actual = run_blocks(blocks, x, routes=given, record=record)
    assert [tuple(ids.shape) for ids in record.ids] == [(2, 6), (2, 4)]
    assert torch.equal(record.ids[1], settle_ids(early, given[1][1], blocks[0](x)))
    routes = [(route, ids) for (route, _), ids in zip(given, record.ids)]
    expected = run_blocks(blocks, x, routes=routes, record=(again := Record()))
    assert torch.equal(actual, expected) and all(map(torch.equal, record.ids, again.ids))
    inputs = [x, *(p for block in blocks for p in block.parameters())]
    ours, theirs = (torch.autograd.grad(out.square().sum(), inputs) for out in (actual, expected))
    assert all(map(torch.equal, ours, theirs))


def test_numbers_that_are_not_finite_stay_in_their_sample():
    """So a training step skips that loss. Reference: the other sample's pass without it."""
    tokens, draws, route = torch.randn(2, 16, 4), uniform(2, 16), Route(1, 2, select="norm")
    spoiled = torch.stack([tokens[0], torch.full_like(tokens[0], math.nan)])
    blocks = [torch.nn.Linear(4, 4) for _ in range(4)]
    both, alone = (run_blocks(blocks, x, routes=[(route, draws[: len(x)])]) for x in (spoiled, tokens[:1]))
    assert torch.equal(both[:1], alone) and both[1].isnan().all()


@pytest.mark.parametrize("kind", [DiT, Sprint, MaskDiT])
def test_rules_may_score_by_the_grid_in_networks_whose_blocks_get_none(monkeypatch, kind):
    """The row with the largest sum: against the rows of the tokens that the network embeds."""

    class Loudest(Row):
        def scores(self, tokens):
            return tokens.sum(dim=2)

        def choose(self, route, draws, grid, keep, scores):
            rows = scores.view(len(scores), *grid).sum(dim=2).argsort(descending=True)[:, :2].sort().values
            return (rows[:, :, None] * grid[1] + torch.arange(grid[1])).flatten(1)

    monkeypatch.setitem(RULES, "loudest", Loudest())
    sizes = {"input_size": 8, "in_channels": 4, "num_classes": 10, "hidden_size": 32, "num_heads": 2, "patch_size": 2}
    network, depth = randomized(partial(kind, depth=6, **sizes), 0, 0.05), 6
    span = (0, depth - 1) if kind is MaskDiT else (2, depth - 3)
    x, t, y, record = torch.randn(3, 4, 8, 8), torch.rand(3), torch.tensor([0, 1, 2]), Record()
    network(x, t, y, routes=[(Route(*span, 0.5, fp32="off", select="loudest"), uniform(3, 16))], record=record)
    if kind is MaskDiT:
        embedded = network.embed(x, t, y)[0].sum(dim=2).view(3, 4, 4).sum(dim=2)
        assert torch.equal(record.ids[0].view(3, 2, 4)[..., 0] // 4, embedded.topk(2).indices.sort().values)
    assert record.ids[0].shape == (3, 8) and (record.ids[0].view(3, 2, 4).diff(dim=2) == 1).all()


def test_scored_routes_are_chosen_by_run_blocks_alone(monkeypatch):
    route, draws = Route(1, 2, select="norm"), uniform(2, 16)
    assert pair(route, draws, (4, 4))[1] is draws and pair(Route(1, 2), draws, (4, 4))[1].dtype == torch.int64
    with pytest.raises(ValueError, match='select="norm" scores the tokens before the route.*run_blocks'):
        choose_ids(route, draws, (4, 4))
    with pytest.raises(ValueError, match="select=norm, which only run_blocks"):
        attach_routes(torch.nn.ModuleList(mixing()), route)
    monkeypatch.setitem(REJOINS, "mine", REJOINS["stale"].__class__(True, lambda saved, kept, ids: saved))
    with pytest.raises(ValueError, match="rejoin=mine, select=token, which only run_blocks"):
        attach_routes(torch.nn.ModuleList(mixing()), Route(1, 2, rejoin="mine"))
    monkeypatch.setitem(REJOINS, "mine", REJOINS["stale"].__class__(True, lambda saved, kept, ids: kept))
    with pytest.raises(ValueError, match=r"rejoin=mine returned \(2, 4, 8\), but must return \(2, 8, 8\)"):
        run_blocks([torch.nn.Identity()], torch.zeros(2, 8, 8), routes=[(Route(0, 0, rejoin="mine"), torch.rand(2, 8))])
    monkeypatch.setattr("routing_module.RULES", {})  # as where that file alone was copied
    with pytest.raises(ValueError, match="'norm' is no rule known here .*: give ids_keep"):
        run_blocks([torch.nn.Identity()] * 4, torch.randn(2, 16, 4), routes=[(route, draws)])


def test_samples_by_a_scored_route_do_not_depend_on_their_batch(tiny):
    """Each branch keeps its share of the tokens."""
    seen = []
    tiny.blocks[1].register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
    model, guidance = Model(RF(), tiny, (Route(1, 3, select="norm"),)), Guidance("sparse", 1.5, 0.25, 0.5)

    def drawn(seeds: list[int], batch_size: int) -> dict[int, torch.Tensor]:
        samples = draw(model, seeds, torch.tensor(seeds) % 10, Sampler(2, batch_size, guidance=guidance))
        return dict(zip(seeds, torch.cat(list(samples))))

    together = drawn([5, 8, 2, 11], 4)
    assert seen == [12, 8] * 3 and all(sample.isfinite().all() for sample in together.values())
    others = drawn([11, 3, 5, 7], 4)
    assert all(torch.equal(others[seed], together[seed]) for seed in (11, 5))
    for seed, sample in drawn([2, 8], 1).items():
        torch.testing.assert_close(sample, together[seed], rtol=1e-4, atol=1e-4)


def test_branches_of_one_scored_route_run_as_one_batch_with_their_own_ids(tiny):
    """As one after the other; those of two ratios, whose draws have one shape, do not run as one."""
    x, y, calls = torch.randn(3, 4, 8, 8), torch.arange(3), []
    tiny.register_forward_pre_hook(lambda _, given: calls.append(len(given[0])))

    def denoise(*given):
        with torch.no_grad():
            return EDM().denoise(tiny, *given)

    for ratio, together in ((0.5, [6]), (0.75, [3, 3])):
        strong, weak = ([(Route(1, 3, r, select="norm"), uniform(3, 16, s))] for r, s in ((0.5, 1), (ratio, 2)))
        calls.clear()
        branches = Branch(denoise, y, lambda call: strong), Branch(denoise, y.flip(0), lambda call: weak)  # noqa: B023
        actual = guided(*branches, lambda call: 3.0)(x, torch.tensor(0.5))
        assert calls == together
        D_strong, D_weak = denoise(x, torch.tensor(0.5), y, strong), denoise(x, torch.tensor(0.5), y.flip(0), weak)
        torch.testing.assert_close(actual, D_weak + 3 * (D_strong - D_weak), rtol=1e-4, atol=1e-4)
