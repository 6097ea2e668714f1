"""Guidance against its formula on denoisers that are known; on Gaussian data: test_sampling.py."""

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import assert_refused
from torch.testing import assert_close

from routing_module import Route
from tread.checkpoints.for_sampling import check_trained_for
from tread.diffusion.edm import EDM
from tread.diffusion.guidance import KINDS, Branch, Guidance, Schedule, guided
from tread.diffusion.sampling import Sampler
from tread.diffusion.solvers import Churn, heun

x, level, y = torch.randn(3, 1, 2, 2), torch.tensor(1.0), torch.tensor([0, 1, 2])
no_class = torch.full_like(y, 9)
COSINE = Schedule("cosine", 0.6, 0.0)


def known(x, level, y, routes):
    """D depends on the label and on how many tokens are kept, so that each branch can be told."""
    return x + 10.0 * y.view(-1, 1, 1, 1) + sum(ids.shape[1] for _, ids in routes)


def routed(kept, rejoin=None):
    return lambda call: [(Route(1, 2, rejoin=rejoin), torch.arange(kept).expand(3, kept))] if kept else []


@pytest.mark.parametrize("scale", [0.0, 1.0, 1.5])
@pytest.mark.parametrize("labels", [y, no_class], ids=["class", "no class"])
@pytest.mark.parametrize("kept", [(0, 0), (8, 4), (6, 6)], ids=str)
def test_the_strong_branch_is_pushed_away_from_the_weak_one_in_all_channels(scale, labels, kept):
    """scale·D_strong + (1 − scale)·D_weak, by one batch or two."""
    actual = guided(Branch(known, y, routed(kept[0])), Branch(known, labels, routed(kept[1])), lambda call: scale)
    strong, weak = known(x, level, y, routed(kept[0])(0)), known(x, level, labels, routed(kept[1])(0))
    assert_close(actual(x, level), scale * strong + (1 - scale) * weak)


def test_branches_of_one_shape_run_as_one_batch():
    batches = []

    def spy(x, level, y, routes):
        batches.append(len(x))
        return known(x, level, y, routes)

    def run(strong, weak, scale=2.0):
        batches.clear()
        guided(strong, weak, lambda call: scale)(x, level)
        return batches

    assert run(Branch(spy, y), Branch(spy, no_class)) == [6]
    assert run(Branch(spy, y, routed(4)), Branch(spy, y, routed(4))) == [6]
    assert run(Branch(spy, y, routed(8)), Branch(spy, y, routed(4))) == [3, 3]
    assert run(Branch(spy, y, routed(4)), Branch(spy, y, routed(4, rejoin=0))) == [3, 3]
    assert run(Branch(spy, y, routed(4, rejoin=1)), Branch(spy, y, routed(4))) == [6]  # its start, said or not
    assert run(Branch(spy, y), Branch(lambda *given: spy(*given), y)) == [3, 3]  # two networks
    assert run(Branch(spy, y), Branch(spy, no_class), scale=1.0) == [3]
    assert run(Branch(spy, y), None) == [3]


def test_one_batch_gives_each_branch_its_own_labels_and_ids():
    strong, weak = torch.tensor([[0, 1], [2, 3], [4, 5]]), torch.tensor([[6, 7], [8, 9], [10, 11]])

    def denoise(x, level, y, routes):
        return x + y.view(-1, 1, 1, 1) + 100.0 * routes[0][1].sum(1).view(-1, 1, 1, 1)

    branches = [Branch(denoise, y, lambda call, ids=ids: [(Route(1, 2), ids)]) for ids in (strong, weak)]
    apart = Branch(lambda *given: denoise(*given), y, branches[1].routes)
    levels = torch.tensor([1.0, 2.0, 3.0])
    together, alone = guided(*branches, lambda call: 1.7), guided(branches[0], apart, lambda call: 1.7)
    assert_close(together(x, levels), alone(x, levels))


def test_calls_are_counted():
    scales, seen = [1.0, 2.0, 3.0], []
    strong = Branch(known, y, lambda call: seen.append(call) or ())
    denoiser = guided(strong, Branch(known, no_class), lambda call: scales[call])
    for scale in scales:
        assert_close(denoiser(x, level), scale * known(x, level, y, ()) + (1 - scale) * known(x, level, no_class, ()))
    assert seen == [0, 1, 2]


def test_schedules_begin_and_end_where_they_say():
    """The reading of SG_FID: γ_weak = 0.3(1 + cos πu), γ_strong = 0.6 − γ_weak."""
    strong = Schedule("cosine", 0.0, 0.6)
    for u in (0.0, 0.1, 0.5, 0.8, 1.0):
        assert COSINE.at(u) == pytest.approx(0.3 * (1 + math.cos(math.pi * u)), abs=1e-12)
        assert strong.at(u) == pytest.approx(0.6 - COSINE.at(u), abs=1e-12)
    assert (COSINE.at(0), COSINE.at(1), strong.at(0), strong.at(1)) == (0.6, 0.0, 0.0, 0.6)
    line = Schedule("linear", 0.2, 0.8)
    assert (line.at(0), line.at(1), line.at(0.25)) == (0.2, 0.8, pytest.approx(0.35))
    calls = Guidance("sparse", Schedule("linear", 2.0, 1.0), strong, COSINE).plan([3.0, 2.0, 1.0], [0.0, 0.5, 1.0])
    assert [call.scale for call in calls] == [2.0, 1.5, 1.0]
    half = pytest.approx(0.3)
    assert [(call.strong, call.weak) for call in calls] == [(0.0, 0.6), (half, half), (0.6, None)]


def test_outside_the_interval_the_strong_branch_runs_alone():
    calls = Guidance("sparse", 2.0, 0.25, 0.5, interval=(0.5, 2.0)).plan([80.0, 2.0, 1.0, 0.5, 0.1], [0.0] * 5)
    assert [call.weak for call in calls] == [None, 0.5, 0.5, 0.5, None]
    assert [call.scale for call in calls] == [1.0, 2.0, 2.0, 2.0, 1.0] and {call.strong for call in calls} == {0.25}


def test_the_interval_holds_the_noise_levels_that_churn_has_raised():
    """The reference: the levels at which Heun's method calls a denoiser."""
    seen, process, churn = [], EDM(), Churn(40.0, sigma_max=20.0)
    noise, levels = torch.zeros(1, 1, 2, 2), process.schedule(4)
    heun(lambda x, level: (seen.append(level.item()), 0 * x)[1], noise, levels, churn, lambda step: noise)
    assert seen[2] > levels[1] == pytest.approx(9.7232, rel=1e-4) and seen[1] == levels[1]
    plan = Sampler(4, guidance=Guidance("cfg", 2.0, interval=(0.1, 12.0)), churn=churn).plan(process)
    assert [call.scale for call in plan] == [2.0 if 0.1 <= level <= 12.0 else 1.0 for level in seen]
    assert [call.scale for call in plan[1:3]] == [2.0, 1.0]


def test_an_interval_that_holds_no_level_is_refused():
    """As EDM's would be for rectified flow, whose t is at most 1; a level at either end of it is enough."""
    for interval in ((0.2, 0.5), (0.5, 0.7)):
        assert [call.scale for call in Guidance("cfg", 2.0, interval=interval).plan([1, 0.5], [0, 1])] == [1, 2]
    with pytest.raises(ValueError, match=r"\[2.0, 5.0\].*0.1 to 1"):
        Guidance("cfg", 2.0, interval=(2.0, 5.0)).plan([1.0, 0.5, 0.1], [0.0, 0.5, 1.0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_of_kinds(kind):
    """Each kind's branches are as arXiv 2207.12598, 2406.02507, 2601.01608 and 2510.21986 define them."""
    row = KINDS[kind]
    assert (row.weak_class is None) == (kind == "none")
    assert row.routed == kind.startswith("sparse")
    assert row.strong_class == (kind != "sparse_uncond")
    assert bool(row.weak_class) == (kind in ("sparse", "autoguidance", "path_drop_class"))
    assert row.drops_path == kind.startswith("path_drop")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"kind": "best"}, "must be one of none, cfg"),
        ({"kind": "sparse", "strong": 0.7, "weak": 0.3}, "strong 0.7 is larger"),
        ({"kind": "sparse", "weak": 1.0}, r"weak is 1, but must lie in \[0, 1\)"),
        ({"kind": "sparse", "strong": -0.1}, r"strong is -0.1, but must lie"),
        ({"kind": "sparse", "weak": Schedule("linear", 0.5, 1.2)}, "linear 0.5→1.2, but must lie"),
        ({"kind": "cfg", "weak": 0.5}, "cfg runs all tokens"),
        ({"kind": "none", "strong": COSINE}, "none runs all tokens"),
        ({"kind": "cfg", "checkpoint": "a"}, "one network"),
        ({"kind": "autoguidance"}, "needs guidance.checkpoint"),
        ({"kind": "cfg", "interval": (1.0, 1.0)}, "lowest"),
        ({"kind": "cfg", "interval": (-1.0, 1.0)}, "lowest"),
        ({"kind": "cfg", "interval": (1.0,)}, "lowest"),
        ({"scale": 1.5}, "choose a kind"),
        ({"interval": (0.1, 1.0)}, "choose a kind"),
        ({"kind": "cfg", "weights": "model"}, "needs guidance.checkpoint"),
        ({"kind": "cfg", "same_ids": True}, "same_ids is given"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Guidance(**arguments)


def test_what_is_free_or_forced():
    for arguments in (
        {"strong": 0.7, "weak": 0.3, "checkpoint": "a"},  # two checkpoints
        {"strong": Schedule("cosine", 0.0, 0.6), "weak": COSINE},  # schedules
        {"strong": 0.7, "weak": COSINE},
        {"strong": 0.7, "weak": 0.3, "force": True},
        {"strong": 0.5, "weak": 0.5},
        {"interval": (0.0, 1.0)},
        {},
    ):
        Guidance("sparse", 1.5, **arguments)
    with pytest.raises(ValueError, match="schedule is 'sine'"):
        Schedule("sine", 0.0, 0.5)


def test_networks_that_can_not_be_guided_so_are_refused():
    trained, dense = (Route(1, 2),), ()

    def network(routes, label_drop, path_drop=None):
        return SimpleNamespace(trained_routes=routes, label_drop=label_drop, path_drop=path_drop)

    whole, no_route, no_null = network(trained, 0.1), network(dense, 0.1), network(trained, 0.0)
    dropping = network(trained, 0.0, path_drop=0.1)
    other = {"weak": 0.5, "checkpoint": "a"}
    assert_refused(
        check_trained_for,
        (Guidance("sparse", weak=0.5), no_route, "weak branch.*without a route.*force=true"),
        (Guidance("sparse", strong=0.1, **other), no_route, whole, "strong branch"),
        (Guidance("sparse", **other), whole, no_route, "weak branch"),
        (Guidance("cfg"), no_null, "label_drop=0 and knows no null class"),
        (Guidance("sparse_cfg"), no_null, "label_drop=0 and knows no null class"),
        (Guidance("sparse_uncond"), no_null, "label_drop=0 and knows no null class"),
        (Guidance("sparse_cfg", checkpoint="a"), whole, no_null, "no null class"),
        (Guidance("path_drop"), network(trained, 0.1, 0.0), "guidance=path_drop .*train.path_drop=0"),
        (Guidance("path_drop_class"), network(trained, 0.1, 0.0), "guidance=path_drop_class .*train.path_drop=0"),
        (Guidance("path_drop"), dropping, "label_drop=0 .*guidance=path_drop_class does not need one"),
        error=ValueError,
    )
    for guidance, *networks in (
        (Guidance("path_drop"), network(trained, 0.1, 0.1)),
        (Guidance("path_drop_class"), dropping),
        (Guidance("sparse", weak=0.5), no_null),
        (Guidance("sparse", weak=0.5, force=True), network(dense, 0.0)),
        (Guidance("sparse", **other), network(dense, 0.0), no_null),
        (Guidance("sparse_cfg", checkpoint="a"), no_null, whole),
    ):
        check_trained_for(guidance, *networks)


def test_descriptions_tell_all_that_decides():
    assert Guidance().describe() == "none"
    assert Guidance("sparse", 1.5, 0.3, 0.7).describe() == "sparse 1.5 with ratios 0.3 and 0.7"
    whole = Guidance("sparse_cfg", Schedule("linear", 1.0, 2.0), 0.25, COSINE, (0.1, 2.0), "a", "model", True)
    assert whole.describe() == (
        "sparse_cfg linear 1→2 with ratios 0.25 and cosine 0.6→0 of the same tokens against model weights of another "
        "network within 0.1..2"
    )
