"""Guidance against the formula on denoisers that are known."""

from __future__ import annotations

import pytest
import torch

from guidance import Guidance, guided
from routing_module import Route

x, sigma, y = torch.randn(3, 1, 2, 2), torch.tensor(1.0), torch.tensor([0, 1, 2])


def known(x, sigma, y, routes):
    """D depends on the label (9 is none) and on the ratio of the route, so that each branch can be told."""
    return x + 10.0 * y.view(-1, 1, 1, 1) + sum(route.selection_ratio for route, _ in routes)


def routes_of(guidance):
    return lambda branch: [(Route(1, 2, guidance.branches[branch]), None)] if guidance.branches[branch] else []


def test_none_is_the_strong_branch():
    assert torch.equal(guided(known, y, 9, Guidance(), None)(x, sigma), known(x, sigma, y, ()))


@pytest.mark.parametrize("scale", [0.0, 1.0, 1.5])
def test_cfg_goes_from_no_class_to_the_class_in_all_channels(scale):
    found = guided(known, y, 9, Guidance("cfg", scale), None)(x, sigma)
    weak, strong = known(x, sigma, torch.full_like(y, 9), ()), known(x, sigma, y, ())
    torch.testing.assert_close(found, scale * strong + (1 - scale) * weak)


def test_sparse_keeps_the_class_in_both_branches():
    guidance = Guidance("sparse", 1.5, strong=0.25, weak=0.75)
    found = guided(known, y, 9, guidance, routes_of(guidance))(x, sigma)
    torch.testing.assert_close(found, x + 10.0 * y.view(-1, 1, 1, 1) + 1.5 * 0.25 - 0.5 * 0.75)
    dense = Guidance("sparse", 2.0, strong=0.0, weak=0.5)
    found = guided(known, y, 9, dense, routes_of(dense))(x, sigma)
    torch.testing.assert_close(found, x + 10.0 * y.view(-1, 1, 1, 1) - 0.5)


def test_what_makes_no_sense_is_refused():
    for arguments, message in (
        ({"kind": "best"}, "must be one of none, cfg, sparse"),
        ({"kind": "sparse", "strong": 0.7, "weak": 0.3}, "must be smaller"),
        ({"kind": "sparse"}, "must be smaller"),
        ({"weak": 1.0}, r"must lie in \[0, 1\)"),
    ):
        with pytest.raises(ValueError, match=message):
            Guidance(**arguments)
    with pytest.raises(ValueError, match="trained with a route"):
        Guidance("sparse", weak=0.5).check((), 0.1)
    with pytest.raises(ValueError, match="label_drop"):
        Guidance("cfg").check((Route(1, 2),), 0.0)
    Guidance("sparse", weak=0.5).check((Route(1, 2),), 0.0)


def test_passes_and_description():
    assert [len(Guidance(kind, weak=0.5).branches) for kind in ("none", "cfg", "sparse")] == [1, 2, 2]
    assert Guidance("sparse", 1.5, 0.3, 0.7).describe() == "sparse 1.5 with ratios 0.3 and 0.7"
