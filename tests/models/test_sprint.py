"""SPRINT against golden numbers, a twin written part by part, closed-form counts and torch's FLOPs counter."""

import copy
import math

import pytest
import torch
from conftest import launch, launch_processes, records, same, size_of, state, state_of, take_samples
from modes import assert_golden_gradients, assert_modes_agree, assert_near, batch, counted_flops, drawn, hot
from safetensors.torch import load_file
from torch.testing import assert_close

from rf import RF
from routing_module import Record, Route
from tread.checkpoints.weights import sizes
from tread.data.dataset import Batch
from tread.data.latents import LatentSpec
from tread.diffusion.guidance import Guidance
from tread.diffusion.sampling import Model, Sampler, draw, seeded_normal
from tread.evaluation.similarity import block_states
from tread.models.lightning import LightningDiT
from tread.models.sprint import Sprint
from tread.training import settings
from tread.training.step import loss, step_draws

SIZES = {"input_size": 4, "patch_size": 1, "hidden_size": 16, "num_heads": 2, "num_classes": 5}
ROUTE = Route(2, -3, 0.75, "off")
ALL_CHOICES = {"norm": "rms", "mlp": "swiglu", "positions": "rope", "qk_norm": True}


def tiny(depth=6, std=0.3, **more):
    return hot(Sprint(depth=depth, **{**SIZES, **more}), std)


@pytest.fixture
def golden(asset):
    """Without their class token, value residual and projectors; their norms have no weight, ours weights of 1."""
    g = load_file(asset("golden/sprint_tiny_hot.safetensors"))
    sizes = {"input_size": 8, "patch_size": 1, "in_channels": 8, "hidden_size": 64, "num_heads": 4, "num_classes": 10}
    network = Sprint(depth=6, **sizes, norm="rms", positions="rope")
    state = state_of(g) | {name: torch.ones(64) for name in network.state_dict() if ".norm" in name}
    state["pos_embed"] = state["pos_embed"][:, 1:]
    left_out = ("cls_projectors2.", "projectors.", "wg_norm.", "final_layer.linear_cls.")
    kept = {name: value for name, value in state.items() if not name.startswith(left_out) and "v1_" not in name}
    network.load_state_dict(kept, strict=True)
    return g, network


def test_golden_forward_hidden_states_and_gradients(golden):
    g, network = golden
    record, fused = Record((1,)), []
    network.fusion_proj.register_forward_hook(lambda _, given, output: fused.append((given[0], output)))
    routes = [(ROUTE, g["plain.in.ids_keep"])]
    x, t, y = g["in.x"], g["in.t"], g["in.y"]
    actual = network(x, t, y, routes, g["plain.in.path_drop"], record)
    assert_near(actual, g["plain.out.train"])
    assert_near(record.outputs[1][0], g["plain.out.f"])
    both, h_in = fused[0]
    assert_near(both[..., :64], g["plain.out.f"])
    assert_near(both[..., 64:], g["plain.out.g_pad_after_pathdrop"])
    assert_near(h_in, g["plain.out.h_in"])
    loss = (actual - g["in.target"]).square().mean()
    assert_near(loss, g["plain.out.loss"], 1e-5)
    loss.backward()
    assert_golden_gradients(network, g, 4, "plain.grad.")
    with torch.no_grad():
        assert_near(network(x, t, y), g["plain.out.eval_dense"])


@pytest.mark.parametrize("choices", [{}, ALL_CHOICES])
def test_it_is_its_parts(choices):
    """Sample by sample, f on all tokens, g on the kept with their own rotary rows, [f ; g or mask token], h."""
    network, (x, t, y) = tiny(7, **choices), batch()
    routes, path_drop = drawn(ROUTE), torch.tensor([False, True, False])
    with torch.no_grad():
        actual, expected = network(x, t, y, routes, path_drop), []
        for b in range(3):
            tokens, c = network.embed(x[b : b + 1], t[b : b + 1], y[b : b + 1])
            ids = routes[0][1][b]
            table = network.along(1)
            for block in network.blocks[:2]:
                tokens = block(tokens, *table, c)
            kept = tokens[:, ids]
            for block in network.blocks[2:5]:
                kept = block(kept, *(item[:, ids] for item in table), c)
            g = network.mask_token.repeat(1, 16, 1)
            if not path_drop[b]:
                for place, token in zip(ids, kept[0]):
                    g[0, place] = token
            W = network.fusion_proj.weight
            tokens = tokens @ W[:, :16].T + g @ W[:, 16:].T + network.fusion_proj.bias
            for block in network.blocks[5:]:
                tokens = block(tokens, *table, c)
            expected.append(network.unpatchify(network.final_layer(tokens, c)))
    assert_near(actual, torch.cat(expected), 0, 1e-5)


def test_nothing_left_out_is_the_dense_forward_bit_for_bit():
    network, (x, t, y) = tiny(**ALL_CHOICES), batch()
    with torch.no_grad():
        dense = network(x, t, y)
        for routes in ([(Route(2, 3, 0.0), torch.arange(16).expand(3, -1))], drawn(Route(2, 3, 0.0, "off"))):
            assert torch.equal(network(x, t, y, routes), dense)
        assert torch.equal(network(x, t, y, path_drop=torch.zeros(3, dtype=torch.bool)), dense)
        assert (network(x, t, y, drawn(ROUTE)) - dense).abs().max() > 1e-2


def test_path_dropped_samples_do_not_depend_on_g():
    """Nor on the route; True is all samples at once, without a call of g's blocks."""
    network, (x, t, y) = tiny(), batch()
    other, path_drop = copy.deepcopy(network), torch.tensor([True, False, True])
    for parameter in other.blocks[2:4].parameters():
        torch.nn.init.normal_(parameter)
    with torch.no_grad():
        item, two = network(x, t, y, drawn(ROUTE), path_drop), other(x, t, y, drawn(ROUTE, seed=5), path_drop)
        assert torch.equal(item[path_drop], two[path_drop]) and not torch.equal(item[1], two[1])
        calls = []
        for block in network.blocks:
            block.register_forward_hook(lambda *_: calls.append(1))
        without = network(x, t, y, path_drop=True)
        assert len(calls) == 4
        assert_close(without[path_drop], item[path_drop], rtol=1e-5, atol=1e-5)
        assert torch.equal(without, network(x, t, y, drawn(ROUTE), True))


def test_gradients_reach_both_paths_and_g_only_of_samples_that_use_it():
    network, (x, t, y) = tiny(), batch()
    network(x, t, y, drawn(ROUTE)).square().mean().backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad.abs().max() > 0, name
    assert all(half.any() for half in network.fusion_proj.weight.grad.chunk(2, dim=1))
    network.zero_grad()
    network(x, t, y, drawn(ROUTE), torch.ones(3, dtype=torch.bool)).square().mean().backward()
    assert all((parameter.grad == 0).all() for parameter in network.blocks[2:4].parameters())
    assert network.mask_token.grad.abs().max() > 0
    network.zero_grad()
    network(x, t, y).square().mean().backward()  # zero, and there: processes wait for each parameter's
    assert (network.mask_token.grad == 0).all()


def test_untrained_output_is_zero_and_parts_are_drawn_alike():
    torch.manual_seed(0)
    x, t, y = batch()
    network = Sprint(depth=6, **{**SIZES, "hidden_size": 64})
    assert (network(x, t, y) == 0).all()
    assert abs(network.mask_token.std() - 0.02) < 0.006 and (network.fusion_proj.bias == 0).all()
    bound = math.sqrt(6 / (3 * 64))
    assert 0.95 * bound < network.fusion_proj.weight.abs().max() <= bound


def test_fusion_is_all_that_it_adds_to_the_backbone():
    """2.66 M parameters at XL/2: 2D² + D, and the mask token's D."""
    with torch.device("meta"):
        ours, plain = Sprint(), LightningDiT(norm="layer", mlp="gelu", positions="sincos")
    assert size_of(ours) - size_of(plain) == 2 * 1152**2 + 2 * 1152
    assert set(ours.state_dict()) - set(plain.state_dict()) == {"fusion_proj.weight", "fusion_proj.bias", "mask_token"}


@pytest.mark.parametrize("choices", [{}, ALL_CHOICES])
@pytest.mark.parametrize("routed, path_drop", [(False, False), (True, False), (False, True)])
def test_flops_agree_with_torchs_counter(choices, routed, path_drop):
    network, given = tiny(7, **choices), (*batch(2), drawn(ROUTE, 2) if routed else (), path_drop or None)
    actual = network.forward_flops([ROUTE] if routed else [], path_drop=path_drop)
    assert 2 * actual == counted_flops(network, *given)


@pytest.mark.parametrize("block", [0, 2, 4, 5])
def test_output_of_a_block_and_its_flops(block):
    network, given, record = tiny(), batch(), Record((block,))
    network(*given, record=record)
    assert torch.equal(network.output_of(block, *given), record.outputs[block][0]) and record.outputs[block][1] is None
    assert 3 * network.forward_flops(upto=block) == counted_flops(network.output_of, block, *given)


def test_states_of_the_sparse_part_hold_its_tokens_alone_behind_it_too():
    """As the blocks leave them: mask tokens, and no tokens that return, take the others' places."""
    network, (x, t, y), routes = tiny(), batch(), drawn(ROUTE)
    record = Record(range(6))
    with torch.no_grad():
        actual = block_states(network, x, t, y, routes)[1]
        network(x, t, y, routes, record=record)
    kept = torch.zeros(3, 16, dtype=torch.bool).scatter(1, routes[0][1], True)
    assert list(record.outputs) == list(range(6))
    for block, (output, ids_keep) in record.outputs.items():
        tokens, held = actual.tokens[block + 1], actual.held[block + 1]
        assert torch.equal(held, kept if block in (2, 3) else torch.ones_like(kept))
        assert torch.equal(tokens[held], output.flatten(0, 1)) and not tokens[~held].any()
        assert (ids_keep is routes[0][1]) == (block in (2, 3))


@pytest.mark.slow
def test_bf16_recomputation_and_compiled_blocks_agree_with_the_plain_network():
    """One graph for all tokens and one for kept ones."""
    network, given, routes = tiny(**ALL_CHOICES), batch(), drawn(Route(2, 3, 0.75, "end"))
    path_drop = torch.tensor([False, True, False])
    assert_modes_agree(network, lambda: [network(*given), network(*given, routes, path_drop)], graphs=2 + 2)


@pytest.mark.parametrize(
    "routes, shown",
    [
        ([Route(1, 3, 0.75)], "1→3 is not over SPRINT's sparse part.*start must be 2 and end 3"),
        ([Route(2, -4, 0.75)], "2→2 is not over"),
        ([Route(2, -3, 0.75, rejoin=1)], "rejoin 1 is given"),
        ([Route(2, 2, 0.75), Route(3, 3, 0.75)], "2 routes are given"),
    ],
)
def test_other_routes_are_refused(routes, shown):
    network, (x, t, y) = tiny(), batch()
    with pytest.raises(ValueError, match=shown):
        network(x, t, y, [drawn(route)[0] for route in routes])
    with pytest.raises(ValueError, match=shown):
        network.forward_flops(routes)


def test_depths_and_path_drops_that_can_not_be_are_refused():
    with pytest.raises(ValueError, match="depth 4 leaves"):
        tiny(4)
    x, t, y = batch()
    for given in (torch.tensor([True]), torch.zeros(3)):
        with pytest.raises(ValueError, match=r"path_drop is .*must be \(3,\) torch.bool"):
            tiny()(x, t, y, path_drop=given)


# --------------------------------------------------------------------------------------- guidance


@pytest.mark.parametrize("kind, weak_class", [("path_drop", False), ("path_drop_class", True)])
def test_path_drop_guidance_is_its_equation_and_costs_what_runs(kind, weak_class):
    """D_weak + ω(D − D_weak) in one Euler step, and FLOPs against torch's counter."""
    network, labels = tiny(std=0.1).requires_grad_(False), torch.tensor([1, 2])
    model, guidance = Model(RF(), network, (ROUTE,)), Guidance(kind, 2.0)
    sampler = Sampler(steps=1, batch_size=2, solver="euler", guidance=guidance)
    (actual,) = draw(model, [1, 2], labels, sampler)
    assert 2 * sampler.flops(model) == counted_flops(lambda: list(draw(model, [1, 2], labels, sampler)))
    assert sampler.flops(model) < 0.95 * Sampler(steps=1, solver="euler", guidance=Guidance("cfg", 2.0)).flops(model)

    def dropped(*given, **more):
        return network(*given, **more, path_drop=True)

    process = model.process

    def denoise(x, level, y):
        weak_y = y if weak_class else torch.full_like(y, 5)
        strong, weak = process.denoise(network, x, level, y), process.denoise(dropped, x, level, weak_y)
        return weak + 2.0 * (strong - weak)

    level = process.schedule(1)[0].float()
    noise = torch.cat([seeded_normal([seed], (4, 4, 4)) for seed in (1, 2)])
    assert_close(actual, denoise(level * noise, level, labels).float(), rtol=1e-4, atol=1e-4)
    plain = LightningDiT(depth=6, **SIZES)
    with pytest.raises(ValueError, match=f"guidance={kind} leaves out .* model=sprint"):
        next(draw(Model(RF(), plain, ()), [1, 2], labels, sampler))


# --------------------------------------------------------------------------------------- training

RUN = ["model=sprint", "train.precision=fp32"]
LATENTS = LatentSpec(shape=(1, 8, 8), classes=tuple("0123456789"), autoencoder="pixels", scale_applied=True)


def test_training_drops_paths_by_the_runs_own_draws(composed):
    """A share of path_drop, the same for a step whoever takes which rows; other draws stay what they are without."""
    config = composed(*RUN, "dataset.size=8", "dataset.channels=1", "dataset.num_classes=10", "train.batch_size=1000")
    cfg = settings.read(config)
    draws = step_draws(cfg, LATENTS, 3, "cpu")
    given = []

    def network(x, t, y, routes=(), record=None, path_drop=None):
        given.append(path_drop)
        return torch.zeros_like(x)

    for rows in (slice(0, 1000), slice(300, 400)):
        part = draws.rows(rows)
        given_batch = Batch(torch.zeros(len(part.drop), 1, 8, 8), part.drop.long(), None)
        loss(cfg, network, LATENTS, given_batch, part, torch.tensor([10]))
    assert torch.equal(given[0][300:400], given[1]) and given[0].dtype == torch.bool
    assert abs(given[0].float().mean() - 0.1) < 5 * (0.1 * 0.9 / 1000) ** 0.5
    assert not torch.equal(given[0], step_draws(cfg, LATENTS, 4, "cpu").path < 0.1)
    config["train"]["path_drop"] = 0.0
    without = step_draws(settings.read(config), LATENTS, 3, "cpu")
    assert without.path is None and torch.equal(without.noise, draws.noise)
    assert torch.equal(without.routes[0][1], draws.routes[0][1])


def test_a_run_goes_on_bit_equal_across_the_end_of_its_routes(tmp_path):
    """Interrupted in stage 1 and begun anew in stage 2, without routes and with a path dropped now and then."""
    run = [*RUN, "train.routes_until=4", "train.path_drop=0.3"]
    printed = launch(tmp_path, *run, "name=whole", "train.steps=6")
    assert "r(2→3) keeps 4 of 16 tokens, one of each 2×2" in printed
    assert "0.3 of the samples without the sparse part" in " ".join(printed.split())
    launch(tmp_path, *run, "name=parts", "train.steps=3")
    launch(tmp_path, *run, "name=parts", "train.steps=6")
    whole, parts = (tmp_path / "results" / name for name in ("whole", "parts"))
    assert same(whole, parts) and "model/mask_token" in state(whole)
    assert records(whole) == records(parts)


@pytest.mark.slow
def test_two_processes_equal_one_in_both_stages(tmp_path):
    """Up to the order of sums; no path is dropped, so that in stage 2 the mask token is unused."""
    run = [*RUN, "train.path_drop=0", "eval.points=8", "every.save=2", "every.evaluate=2", "every.sample=2"]
    for until, steps in ((1, 2), (0, 1)):  # the second stage within a run, and by itself
        options = [*run, f"train.routes_until={until}", f"train.steps={steps}"]
        launch(tmp_path, *options, f"name=one-{until}")
        launch_processes(tmp_path, *options, f"name=two-{until}", processes=2)
        item, two = (tmp_path / f"results/{name}-{until}" for name in ("one", "two"))
        assert records(two) == [pytest.approx(record, rel=1e-5) for record in records(item)]
        actual, expected = state(two), state(item)
        assert all(torch.allclose(actual[name], expected[name], rtol=1e-3, atol=1e-4) for name in expected)


def test_doors_guide_by_a_dropped_path_where_it_was_trained(tmp_path):
    run = [*RUN, "train.steps=1", "every.save=1", "every.sample=1", "every.evaluate=1"]
    given = ["classes=[3]", "steps=2", "batch_size=1", "cpu_threads=1", "guidance=path_drop", "guidance.scale=2"]
    launch(tmp_path, *run, "name=with", "train.path_drop=0.1")
    printed = take_samples(tmp_path, "checkpoint=results/with", *given)
    assert "guidance path_drop 2, 1." in printed and (tmp_path / "samples.png").exists()


@pytest.mark.parametrize(
    "overrides, shown",
    [
        (["model.routes.0.start=1"], "not over SPRINT's sparse part"),
        (["dataset.size=6"], "grid of 3×3 tokens is odd"),
        (["model=dit", "train.path_drop=0.1"], "train.path_drop is 0.1, but model=dit has no sparse path"),
        (["train.ratio_schedule={start: 0.75, end: 0.25, last: 10}"], "train.ratio_schedule is given, but .*group"),
    ],
)
def test_settings_that_can_not_be_are_refused(composed, overrides, shown):
    with pytest.raises(ValueError, match=shown):
        settings.read(composed("model=sprint", *overrides))


def test_weights_say_that_they_are_sprints():
    actual = sizes(tiny(**ALL_CHOICES).state_dict())
    assert actual["model.architecture"] == "sprint" and actual["model.mlp"] == "swiglu" and actual["model.depth"] == 6
