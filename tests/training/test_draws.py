"""Draws are functions of (seed, step, stream, position): checked against drawing them again."""

from types import SimpleNamespace

import pytest
import torch

from routing_module import Route, draw_ids
from tread.data.latents import LatentSpec
from tread.models.conditions import replaced
from tread.runtime.distributed import split_batch
from tread.runtime.randomness import generator, seeded_normal
from tread.training.alignment import Alignment
from tread.training.draws import step_draws


def draws(seed=0, step=5, num_routes=1, posterior=True, batch_size=8):
    train = SimpleNamespace(batch_size=batch_size, routes_until=None, ratio_schedule=None, path_drop=0.0)
    routes = tuple(Route(2 * i, 2 * i) for i in range(num_routes))
    model = SimpleNamespace(patch_size=2, resolved_routes=routes, class_token=5 if posterior else None)
    cfg = SimpleNamespace(seed=seed, train=train, model=model, alignment=Alignment())
    content, spread = ("moments", "logvar") if posterior else ("latents", None)
    return step_draws(cfg, LatentSpec((4, 8, 8), ("a",), "pixels", content, spread), step, "cpu")


def test_draws_repeat_and_differ_by_seed_and_step():
    assert torch.equal(draws().noise, draws().noise)
    for name in ("level", "noise", "drop", "posterior", "token"):
        for other in (draws(seed=1), draws(step=6)):
            assert not torch.isclose(getattr(draws(), name), getattr(other, name)).all()
    assert not torch.equal(draws().noise, draws().posterior)
    ids = [d.routes[0][1] for d in (draws(), draws(), draws(step=6))]
    assert torch.equal(ids[0], draw_ids(torch.rand(8, 16, generator=generator(0, 5, "route 0")), 0.5))
    assert torch.equal(ids[0], ids[1]) and not torch.equal(ids[0], ids[2])


def test_routes_and_posterior_leave_the_other_draws_as_they_are():
    bare = draws(num_routes=0, posterior=False)
    assert bare.routes == () and bare.posterior is bare.token is None
    for name in ("level", "noise", "drop"):
        assert torch.equal(getattr(bare, name), getattr(draws(num_routes=2), name))


@pytest.mark.parametrize("ranks, micro", [(1, None), (2, None), (2, 2), (4, 1), (1, 2)])
def test_ranks_and_micro_batches_together_draw_what_one_does(ranks, micro):
    whole = draws()
    parts = [whole.rows(rows) for rank in range(ranks) for rows in split_batch(8, ranks, rank, micro)]
    for name in ("level", "noise", "drop", "posterior", "token"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
    assert torch.equal(torch.cat([part.routes[0][1] for part in parts]), whole.routes[0][1])


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="10.*4 processes"):
        split_batch(10, 4, 0, None)
    with pytest.raises(ValueError, match="micro_batch_size 3.*share, 4 images"):
        split_batch(8, 2, 0, 3)


def test_moments_of_the_draws():
    d = draws(step=0, num_routes=0, posterior=False, batch_size=4096)
    assert abs(d.noise.mean()) < 0.01 and abs(d.noise.std() - 1) < 0.01
    assert abs(d.drop.mean() - 0.5) < 0.03 and 0 <= d.drop.min() <= d.drop.max() < 1


def test_label_drop():
    y, u = torch.tensor([3, 1, 2, 0]), torch.tensor([0.05, 0.5, 0.0999, 0.1])
    null = torch.tensor([10])
    assert replaced(y, u < 0.1, null).tolist() == [10, 1, 10, 0]
    assert replaced(y, u < 0.0, null).tolist() == y.tolist()
    assert replaced(y, u < 1.0, null).tolist() == [10] * 4


def test_seeded_noise_depends_on_its_seed_alone():
    together = seeded_normal([4, 9, 7], (2, 3))
    assert torch.equal(together[1], seeded_normal([9], (2, 3))[0])
    assert len({tuple(row.flatten().tolist()) for row in together}) == 3


def test_addresses_do_not_run_together():
    addresses = [(1, 23), (12, 3), (1, 2, 3), (123,), (1, "23")]
    assert len({generator(*address).initial_seed() for address in addresses}) == 5
