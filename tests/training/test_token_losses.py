"""The loss of kept tokens against loops over patches, and whole runs by each way to route.

The references are formulas written out here, the plain loss, and another way to make the same run."""

import shutil

import numpy as np
import pytest
import torch
from conftest import launch, routes_seen, same, state, take_samples
from PIL import Image
from torch.testing import assert_close

from dit import DiT
from rf import RF
from routing_module import Route
from tread.checkpoints.network import build_network
from tread.checkpoints.run_log import RunLog
from tread.data.dataset import Batch
from tread.data.latents import LatentSpec
from tread.diffusion.edm import EDM
from tread.diffusion.token_losses import EPSILON, kept_error, reconstruction_error, to_patches
from tread.models.rwkv import RWKV
from tread.training.draws import active_routes, step_draws
from tread.training.step import loss

LATENTS = LatentSpec(shape=(4, 8, 8), classes=tuple("0123456789"), autoencoder="x", scale_applied=True)
TWO = "model.routes=[{start:1,end:2},{start:4,end:4,selection_ratio:0.25}]"
KEPT = ("model.depth=6", "train.batch_size=4", "train.label_drop=0.5", "train.loss_tokens=kept")
PROCESSES = [EDM(sigma_data=0.7), RF(), RF(reverse=True)]


def ids_of(*kept: int, tokens: int = 16, batch: int = 3) -> list[torch.Tensor]:
    """For each number, ids of so many tokens."""
    return [torch.rand(batch, tokens).argsort(dim=1)[:, :count].sort(dim=1).values for count in kept]


def patch(x: torch.Tensor, image: int, number: int, size: int) -> torch.Tensor:
    """Patch `number` of an image, in raster order: (C, p, p)."""
    row, column = divmod(number, x.shape[3] // size)
    return x[image, :, row * size : (row + 1) * size, column * size : (column + 1) * size]


def by_loops(squared, denoised, noisy, ids, size, coefficient):
    """The loss written out: means over the pixels of a patch, patches of a route, and routes."""
    losses = []
    for image in range(len(squared)):
        total = 0.0
        for ids_keep in ids:
            kept = set(ids_keep[image].tolist())
            around = [number for number in range((squared.shape[2] // size) ** 2) if number not in kept]
            total += sum(patch(squared, image, number, size).mean() for number in kept) / len(kept)
            for number in around:
                target = patch(noisy, image, number, size)
                target = (target - target.mean()) / (target.var() + EPSILON).sqrt()
                error = (patch(denoised, image, number, size) - target).square().mean()
                total += coefficient * error / len(around)
        losses.append(total / len(ids))
    return torch.stack(losses)


def setting(read_config, *overrides):
    """(cfg, stored, labels, draws) of a step on four samples."""
    cfg = read_config(*KEPT, *overrides)
    draws = step_draws(cfg, LATENTS, 7, "cpu")
    return cfg, torch.randn(4, 4, 8, 8), torch.tensor([1, 2, 3, 4]), draws


def loss_of(cfg, network, stored, labels, draws):
    """The loss of each sample, by the step's own function."""
    [actual] = loss(cfg, network, LATENTS, Batch(stored, labels, None), draws, network.null(1))
    return actual


@pytest.mark.parametrize("channels, side, size", [(4, 8, 2), (3, 6, 3), (1, 5, 1), (2, 4, 4)])
def test_patches_are_in_raster_order(channels, side, size):
    x = torch.randn(2, channels, side, side)
    actual = to_patches(x, size)
    assert actual.shape == (2, (side // size) ** 2, channels * size**2)
    for image in range(2):
        for number in range(actual.shape[1]):
            assert torch.equal(actual[image, number], patch(x, image, number, size).flatten())


def test_both_losses_equal_loops():
    squared, denoised, noisy = torch.rand(3, 4, 8, 8), torch.randn(3, 4, 8, 8), 2 + 3 * torch.randn(3, 4, 8, 8)
    for ids in (ids_of(5, 12, 1), ids_of(16, 8)):
        kept = kept_error(squared, ids, 2)
        assert_close(kept, by_loops(squared, denoised, noisy, ids, 2, 0.0))
        actual = kept + 0.3 * reconstruction_error(denoised, noisy, ids, 2)
        assert_close(actual, by_loops(squared, denoised, noisy, ids, 2, 0.3))


def test_a_flat_patch_is_reconstructed_as_zero():
    """Its variance is 0, and its target is 0, not 0 / 0; a route that keeps all has no patches to reconstruct."""
    flat, denoised = torch.full((3, 4, 8, 8), 5.0), torch.full((3, 4, 8, 8), 2.0)
    assert_close(reconstruction_error(denoised, flat, ids_of(8), 2), torch.full((3,), 4.0))
    assert torch.equal(reconstruction_error(denoised, flat, ids_of(16), 2), torch.zeros(3))
    single = reconstruction_error(denoised[:, :1], torch.randn(3, 1, 8, 8), ids_of(8, tokens=64), 1)
    assert_close(single, torch.full((3,), 4.0))  # one number has no unbiased variance: target 0


def test_gradients_reach_each_losss_own_patches_alone():
    """∂/∂squared = Σ over the routes that keep a patch of 1 / (routes · K · pixels); the other loss has the rest."""
    squared, denoised = (torch.randn(3, 4, 8, 8, requires_grad=True) for _ in range(2))
    ids = ids_of(8, 12)
    kept_error(squared, ids, 2).sum().backward()
    expected = torch.zeros(3, 16)
    for ids_keep in ids:
        expected.scatter_add_(1, ids_keep, torch.full(ids_keep.shape, 1 / (2 * ids_keep.shape[1] * 16)))
    assert_close(to_patches(squared.grad, 2), expected[:, :, None].expand(-1, -1, 16))
    reconstruction_error(denoised, torch.randn(3, 4, 8, 8), ids, 2).sum().backward()
    first, second = (torch.zeros(3, 16).scatter_(1, each, 1.0) for each in ids)
    in_all = first * second == 1
    assert in_all.any() and not in_all.all()
    assert torch.equal(to_patches(denoised.grad, 2).abs().sum(dim=2) == 0, in_all)


@pytest.mark.parametrize("process", PROCESSES, ids=["edm", "rf", "reversed rf"])
def test_errors_are_what_the_loss_averages(tiny, process):
    x, noise, y = torch.randn(3, 4, 8, 8), torch.randn(3, 4, 8, 8), torch.tensor([1, 2, 10])
    level, everything = process.noise_level(torch.randn(3)), [torch.arange(16).expand(3, 16)] * 2
    for routes in ((), [(Route(1, 3), ids_of(8)[0])]):
        with torch.no_grad():
            squared, denoised, noisy = process.errors(tiny, x, y, level, noise, routes)
            loss = process.loss(tiny, x, y, level, noise, routes)
            assert_close(denoised, process.denoise(tiny, noisy, level, y, routes))
        assert squared.shape == denoised.shape == x.shape and squared.dtype == torch.float32
        squared *= process.weight(level).view(-1, 1, 1, 1)
        assert_close(squared.mean(dim=(1, 2, 3)), loss, rtol=1e-6, atol=0)
        assert_close(kept_error(squared, everything, 2), loss, rtol=1e-6, atol=0)
        assert torch.equal(reconstruction_error(denoised, noisy, everything, 2), torch.zeros(3))
        a, b = (1.0, level) if isinstance(process, EDM) else (1 - level.view(-1, 1, 1, 1), level)
        assert_close(noisy, a * x + b.view(-1, 1, 1, 1) * noise)


@pytest.mark.parametrize("objective", ["edm", "rf"])
def test_a_training_loss_of_kept_tokens_equals_the_formula(read_config, tiny, objective):
    """Two routes and a coefficient, from the network's own output at those routes."""
    overrides = (TWO, f"objective={objective}", "train.reconstruction=0.1")
    cfg, stored, labels, draws = setting(read_config, *overrides)
    y = torch.where(draws.drop < 0.5, 10, labels)
    routes = draws.routes
    assert [ids.shape[1] for _, ids in routes] == [8, 12] and 0 < (y == 10).sum() < 4
    with torch.no_grad():
        actual = loss_of(cfg, tiny, stored, labels, draws)
        if objective == "edm":
            sigma = (-1.2 + 1.2 * draws.level).exp().view(-1, 1, 1, 1)
            noisy = stored + sigma * draws.noise
            denoised = EDM().denoise(tiny, noisy, sigma.flatten(), y, routes)
            squared = (sigma**2 + 0.25) / (0.5 * sigma) ** 2 * (denoised - stored) ** 2
        else:
            t = draws.level.sigmoid().view(-1, 1, 1, 1)
            noisy = (1 - t) * stored + t * draws.noise
            v = tiny(noisy, t.flatten(), y, routes=routes)
            denoised, squared = noisy - t * v, (v - draws.noise + stored) ** 2
    expected = by_loops(squared, denoised, noisy, [ids for _, ids in routes], 2, 0.1)
    assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    cfg, *_ = setting(read_config, *overrides[:2])
    with torch.no_grad():
        without = loss_of(cfg, tiny, stored, labels, draws)
    assert not torch.isclose(without, actual).any()


def test_it_is_off_unless_asked_for_and_where_no_route_is(read_config, tiny):
    """Bit for bit the plain loss."""
    cfg, stored, labels, draws = setting(read_config, "train.loss_tokens=all")
    assert read_config().train.loss_tokens == "all" and read_config().train.reconstruction == 0
    y, sigma = torch.where(draws.drop < 0.5, 10, labels), EDM().noise_level(draws.level)
    routes = draws.routes
    with torch.no_grad():
        actual = loss_of(cfg, tiny, stored, labels, draws)
        assert torch.equal(actual, EDM().loss(tiny, stored, y, sigma, draws.noise, routes))
        cfg, *_, draws = setting(read_config, "train.routes_until=7", "train.reconstruction=0.1")
        actual = loss_of(cfg, tiny, stored, labels, draws)
        assert torch.equal(actual, EDM().loss(tiny, stored, y, sigma, draws.noise))


@pytest.mark.parametrize(
    "overrides, shown",
    [
        (["train.reconstruction=0.1"], "reconstruction is 0.1.*train.loss_tokens=kept"),
        (["model.routes.0.selection_ratio=0.06"], "0.06 routes nothing around.*less than one token of the 4×4 tokens"),
        (
            ["model=tread_rwkv", "train.ratio_schedule={start:0.1,end:0.2,last:5}"],
            "train.ratio_schedule 0.2 routes nothing around.*less than one row",
        ),
        (
            ["model.routes.0.selection_ratio=0.95"],
            "^model.routes.0.selection_ratio 0.95 keeps a single token of the 4×4.* at most 0.875 keeps more",
        ),
        (["model.architecture=mine"], r"^model.architecture is 'mine', but must be dit, .* \(or a plugin's\)$"),
        (["model.routes.0.select=rows"], "^model.routes.0.select is 'rows', but must be one of token, row, shared"),
        (["model=dit", "train.loss_tokens=kept"], "train.loss_tokens is for routes, but model=dit has none"),
        (["model=rwkv", "train.ratio_schedule={start:0.5,end:0.2,last:5}"], "schedule is for routes, but model=rwkv"),
        (["model=rwkv", "model.routes=[{start:2,end:4}]"], "routes.0.select is 'token'.*rwkv.*must be row"),
        (["train.ratio_schedule={start:0.5,end:0.2}"], "missing settings: train.ratio_schedule.last"),
        (["train.ratio_schedule=0.5"], "train.ratio_schedule is 0.5, but must be {start, end, last.*null"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(read_config, overrides, shown):
    with pytest.raises(ValueError, match=shown):
        read_config(*overrides)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """One folder, so that the digits are written once."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def rows(place):
    """That folder with a run of RWKV with a route, and one without; and what was printed."""
    return place, launch(place, "model=tread_rwkv") + launch(place, "model=rwkv")


def check_run(folder, name):
    """The records of a run of six steps that went well."""
    run = folder / "results" / name
    log = RunLog(run).records()
    for key, steps in (("loss", [1, 2, 3, 4, 5, 6]), ("eval_loss", [3, 6])):
        values = {record["step"]: record[key] for record in log if key in record}
        assert list(values) == steps and np.isfinite(list(values.values())).all()
    assert np.asarray(Image.open(run / "samples/step_0000006.png")).std() > 0
    return log


def test_rwkv_trains_with_and_without_a_route(rows):
    folder, text = rows
    routed, dense = check_run(folder, "digits-tread_rwkv"), check_run(folder, "digits-rwkv")
    assert "r(2→2) keeps 8 of 16 tokens in whole rows" in text and "rwkv, " in text and "routes    none" in text
    speeds = [next(r["flops_per_s"] / r["images_per_s"] for r in run if "loss" in r) for run in (routed, dense)]
    assert speeds[0] < 0.95 * speeds[1]
    assert any("spatial_mix" in key for key in state(folder / "results/digits-rwkv"))


def test_dit_trains_by_other_rules(place):
    """Shared tokens rejoin as they were before an earlier block."""
    routes = "[{start:1,end:1,select:row},{start:2,end:3,select:norm},{start:4,end:4,select:shared,rejoin:1}]"
    text = launch(place, f"model.routes={routes}", "name=rules")
    check_run(place, "rules")
    assert "r(1→1) keeps 8 of 16 tokens in whole rows" in text and "r(2→3) keeps 8 of 16 tokens by their norm" in text
    assert "r(4→4), rejoins as before block 1, keeps 8 of 16 tokens, the same ones" in text


def test_the_first_papers_training_goes_on_where_it_was(place):
    """Two routes, the loss of kept tokens and a reconstruction: three and three steps equal six, bit for bit."""
    overrides = ["model.routes=[{start:1,end:2},{start:4,end:4}]", "train.loss_tokens=kept", "train.reconstruction=0.1"]
    text = launch(place, *overrides, "name=whole")
    assert "r(1→2) keeps 8 of 16 tokens" in text and "r(4→4) keeps 8 of 16 tokens" in text
    shutil.copytree(place / "results/whole/step_0000003", place / "results/parts/step_0000003")
    assert "goes on at step 3" in launch(place, *overrides, "name=parts")
    assert same(place / "results/parts", place / "results/whole")
    check_run(place, "whole")


def test_a_ratio_schedule_is_followed(place, read_config, monkeypatch):
    """12, 8 and 4 of 16 tokens routed around, two steps each, as the network sees them and the logged FLOPs say."""
    seen = routes_seen(monkeypatch, DiT)
    schedule = "train.ratio_schedule={start:0.75,end:0.25,last:5,levels:3}"
    cfg = read_config("model.hidden_size=16", "model.depth=6", "model.num_heads=2", schedule)
    ratios = [0.75, 0.75, 0.5, 0.5, 0.25, 0.25]
    assert [active_routes(cfg, step) for step in range(6)] == [(Route(2, -4, ratio).resolve(6),) for ratio in ratios]
    text = launch(place, schedule, "name=schedule")
    assert [kept for call in seen for *_, kept in call] == [4, 4, 8, 8, 12, 12]
    assert "keeps 4 of 16 tokens, fp32: end; ratio 0.75 up to step 0, 0.25 from 5 on" in text
    costs = [3 * build_network(cfg).forward_flops([Route(2, 2, ratio)]) for ratio in ratios]
    log = [record for record in check_run(place, "schedule") if "loss" in record]
    assert [r["flops_per_s"] / r["images_per_s"] for r in log] == pytest.approx(costs, rel=2e-3)
    assert costs[4] / costs[0] > 1.05


SPARSE = ("guidance=sparse", "guidance.strong=0.25", "guidance.weak=0.5", "steps=2")


@pytest.fixture
def seen(monkeypatch):
    return routes_seen(monkeypatch, RWKV)


def test_rwkv_is_sampled_under_its_route(rows, seen):
    """Without a route in its training it is forced to the paper's rule, r(2→2) of 6 blocks, by rows."""
    folder, _ = rows
    few = ("classes=[3]", "seeds=0-1")
    text = take_samples(folder, "checkpoint=results/digits-tread_rwkv", *SPARSE, *few)
    assert "ratios 0.25 and 0.5" in text and "NFE 6" in text and (folder / "samples.png").exists()
    assert seen == [[(2, 2, "row", 12)], [(2, 2, "row", 8)]] * 3
    seen.clear()
    dense = ("checkpoint=results/digits-rwkv", *SPARSE, *few)
    with pytest.raises(SystemExit, match="trained without a route.*guidance.force=true"):
        take_samples(folder, *dense)
    take_samples(folder, *dense, "guidance.force=true")
    assert seen == [[(2, 2, "row", 12)], [(2, 2, "row", 8)]] * 3
