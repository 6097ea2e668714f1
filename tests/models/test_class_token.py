"""A class token in the network and in sampling, against twins that keep it apart: the blocks called one by one on
tokens gathered by hand, Euler's method on two tensors, and the exact velocities of a single picture."""

from functools import partial

import pytest
import torch
from conftest import CPU, equal
from modes import batch, counted_flops, hot
from torch.nn import functional as F
from torch.testing import assert_close

from rf import RF
from routing_module import RULES, Record, Route
from tread.checkpoints.network import build_network
from tread.checkpoints.weights import StoredWeights, sizes
from tread.diffusion.guidance import Guidance
from tread.diffusion.sampling import Model, Sampler, draw
from tread.diffusion.solvers import solve
from tread.diffusion.token_beside import Beside, noised_token, token_loss
from tread.runtime.device import autocast
from tread.runtime.randomness import generator, seeded_uniform

SIZES = ("objective=rf", "dataset.channels=4", "dataset.size=8", "dataset.num_classes=10", "model.patch_size=2")
SIZES += ("model.hidden_size=32", "model.num_heads=2", "model.depth=6", "model.class_token=10")
WORDS = ("text.encoder=words", "text.fingerprint=f", "text.tokens=4", "text.vocabulary=[a,b,c,d]")
NETWORKS = {
    "dit": ("model=tread",),
    "lightning": ("model=tread_lightning", "model.positions=rope", "model.norm=rms", "model.value_residual=true"),
    "text": ("model=tread_text", *WORDS),
}


@pytest.fixture(params=NETWORKS)
def built(request, read_config):
    cfg = read_config(*NETWORKS[request.param], *SIZES)
    network = hot(build_network(cfg), 0.1).eval()
    (x, t, y), token = batch(3, 8), torch.randn(3, 10, generator=torch.Generator().manual_seed(5))
    return cfg, network, (x, t, network.null(3) if cfg.model.takes_text else y), token


def by_hand(network, x, t, y, token, span=None, ids=None):
    """Both velocities; between the blocks of `span` on the class token and the patches `ids` of each sample alone."""
    tokens, c, *shared = network.embed(x, t, y, token)
    part = network.z_embedder
    first = F.linear(token, part.proj.weight, part.proj.bias)
    first = F.layer_norm(first, (32,), part.norm.weight, part.norm.bias, 1e-6)
    tokens, table = torch.cat([first[:, None], tokens[:, 1:]], dim=1), None
    if getattr(network, "head_dim", None):
        table = torch.cat([torch.ones(1, 8), torch.zeros(1, 8)], dim=1)  # the cosines and sines of no angle
        table = torch.cat([table, network.rotary[0, 1:]])
    values = {}  # of the first block, by sample, where they are mixed in later
    for index, block in enumerate(network.blocks):
        changed = tokens.clone()
        for sample in range(len(x)):
            routed = span is not None and span[0] <= index <= span[1]
            rows = [0, *(1 + number for number in ids[sample].tolist())] if routed else [*range(17)]
            along = [] if table is None else [table[None, rows]]
            along += [values[sample][:, rows]] if index and values else []
            one = [part[sample : sample + 1] for part in (c, *shared)]
            made = block(tokens[sample : sample + 1, rows], *along, *one)
            if isinstance(made, tuple):
                made, values[sample] = made
            changed[sample, rows] = made[0]
        tokens = changed
    last = network.final_layer
    shift, scale = last.adaLN_modulation(c)[:, None].chunk(2, dim=2)
    modulated = last.norm_final(tokens) * (1 + scale) + shift
    return network.unpatchify(last.linear(modulated[:, 1:])), F.linear(modulated[:, 0], part.out.weight, part.out.bias)


def test_it_is_the_blocks_on_one_more_token_that_every_route_keeps(built):
    """In a route, `ids`, the block's output and the loss of kept tokens speak of patches alone."""
    cfg, network, given, token = built
    [route], ids = cfg.model.resolved_routes, torch.tensor([[0, 3, 7, 15], [1, 2, 4, 9], [5, 6, 8, 10]])
    for routes, span in (((), None), ([(route, ids)], (route.start, route.end))):
        record = Record(blocks=(route.start,))
        actual = network(*given, routes, record, class_token=token)
        assert_close((actual, record.class_token), by_hand(network, *given, token, span, ids), rtol=1e-4, atol=1e-4)
        assert record.outputs[route.start][0].shape == (3, 4 if routes else 16, 32)
        assert not routes or torch.equal(record.ids[0], ids) and torch.equal(record.outputs[route.start][1], ids)
    gradients = []
    for network.activation_checkpointing in (False, True):
        record = Record()
        (network(*given, routes, record, class_token=token).mean() + record.class_token.mean()).backward()
        gradients.append([parameter.grad for parameter in network.z_embedder.parameters()])
        network.zero_grad()
    assert all(map(torch.equal, *gradients))
    with autocast(CPU, "bf16"):
        network(*given, class_token=token, record=record)
    assert_close(record.class_token.float(), by_hand(network, *given, token)[1], rtol=0.1, atol=0.3)


def test_flops_names_and_records(built):
    cfg, network, given, token = built
    routes = [(route, torch.arange(8).expand(3, -1)) for route in cfg.model.resolved_routes]
    for used in ((), routes):
        counted = counted_flops(network, *given, used, Record(), class_token=token)
        assert 3 * network.forward_flops([route for route, _ in used]) == counted
    counted = counted_flops(network.output_of, 1, *given, class_token=token)
    assert 3 * network.forward_flops(upto=1) == counted
    state = network.state_dict()
    assert sizes(state)["model.class_token"] == 10
    assert equal(StoredWeights("a file", None, state).fit(state, cfg.model), state)
    without = {n: v for n, v in state.items() if "z_embedder" not in n}
    with pytest.raises(ValueError, match=r"(?s)z_embedder.norm.bias.*settings that fit it: .*model.class_token=null"):
        StoredWeights("a file", None, without).fit(state, cfg.model)


def test_scores_are_of_patches_alone(read_config):
    """The rule of large norms, beside a class token of a norm far above all."""
    network, draws = hot(build_network(read_config("model=dit", *SIZES)), 0.1), torch.rand(3, 16)
    route = Route(1, 2, select="norm")
    torch.nn.init.constant_(network.z_embedder.norm.weight, 1e4)
    (x, t, y), record = batch(3, 8), Record(blocks=(0,))
    network(x, t, y, [(route, draws)], record, class_token=torch.randn(3, 10))
    scores = RULES["norm"].scores(record.outputs[0][0])
    assert torch.equal(record.ids[0], RULES["norm"].choose(route, draws, None, None, scores))


def test_at_first_its_velocity_is_0_and_its_loss_the_mean_square_of_the_true_one(read_config):
    network, (x, t, y) = build_network(read_config("model=dit", "model.init=xavier", *SIZES)), batch(3, 8)
    clean, noise, record = torch.full((3, 10), 2.0), torch.full((3, 10), 0.5), Record()
    network(x, t, y, record=record, **noised_token(clean, noise, t))
    assert not record.class_token.any()
    assert torch.equal(token_loss(record.class_token, clean, noise), torch.full((3,), 2.25))
    noised = noised_token(clean, noise, torch.tensor([0, 0.25, 1]))["class_token"]
    assert_close(noised[:, 0], torch.tensor([2, 1.625, 0.5]))
    for wrong in (None, torch.zeros(3, 9)):
        with pytest.raises(ValueError, match=r"class_token is (none|\(3, 9\)), but this network takes \(3, 10\)"):
            network(x, t, y, class_token=wrong)


@pytest.mark.parametrize("model", ["rwkv", "mamba", "maskdit", "sprint"])
def test_networks_that_have_none(read_config, model):
    with pytest.raises(ValueError, match=f"model.class_token is 10, but {model} has no such choice: model=dit or "):
        read_config(f"model={model}", "objective=rf", "model.class_token=10")


@pytest.mark.parametrize("solver, steps", [("euler", 1), ("euler", 7), ("heun", 4)])
def test_solvers_end_at_the_picture_whose_velocities_are_exact(solver, steps):
    """v = (x_t − a)/t for a single picture a; 3 channels of 2×2 hold a token of 10, filled up with zeros."""
    a, b, noise, token = (torch.randn(2, *shape).double() for shape in ((4, 2, 2), (10,), (4, 2, 2), (10,)))

    def network(x, t, y, routes, class_token, record):
        record.class_token = (class_token - b) / t[:, None]
        return (x - a) / t.view(-1, 1, 1, 1)

    beside, process = Beside(4, 10), RF()
    state = beside.join(noise, token)
    assert state.shape == (2, 7, 2, 2) and not state.flatten(1)[:, 26:].any()
    denoise = partial(beside.denoise, process, network, y=None, routes=())
    drawn = solve(solver, lambda x, level: denoise(state=x, level=level), state, process.schedule(steps))
    assert_close(drawn, beside.join(a, b), rtol=0, atol=1e-5)


GUIDED = [Guidance(), Guidance("cfg", 1.5), Guidance("sparse", 1.5, strong=0.25, weak=0.75)]


@pytest.mark.parametrize("guidance", GUIDED, ids=lambda item: item.kind)
def test_it_is_denoised_along_and_guided_as_latents_are(read_config, guidance):
    """Two tensors by Euler's method, each branch on its own. Steps are told of latents alone."""
    network, route = hot(build_network(read_config("model=tread", *SIZES)), 0.1).eval(), Route(2, 4)
    seeds, labels, told = [7, 3, 11], torch.tensor([1, 4, 9]), []
    latents = torch.stack([torch.randn(4, 8, 8, generator=generator(seed, "noise")) for seed in seeds]).double()
    token = torch.stack([torch.randn(10, generator=generator(seed, "class token")) for seed in seeds]).double()
    sampler = Sampler(4, 2, guidance=guidance, solver="euler")
    how = {"on_step": lambda *step: told.append(step[2])}
    how["after_step"] = lambda step, x: x.mul(1) if x.shape[1] == 4 else 0
    actual = torch.cat([*draw(Model(RF(), network, (route,)), seeds, labels, sampler, **how)])

    def branch(x, token, t, name, y, ratio, call):
        record, keep = Record(), 16 - int(16 * ratio)
        order = seeded_uniform(seeds, (4, 16), f"route 0 {name}")[:, call].argsort(dim=1)[:, :keep].sort(dim=1).values
        routes = [(route, order)] if ratio else ()
        v = network(x.float(), torch.full((3,), t), y, routes, record, class_token=token.float())
        return v, record.class_token

    with torch.no_grad():
        for call, t in enumerate((1.0, 0.75, 0.5, 0.25)):
            steps = [step for step in told if len(step)][call::4]
            assert_close(torch.cat(steps), latents.float(), rtol=1e-4, atol=1e-4)
            both = branch(latents, token, t, "strong", labels, guidance.strong, call)
            if guidance.kind != "none":
                y = torch.full_like(labels, 10) if guidance.kind == "cfg" else labels
                weak = branch(latents, token, t, "weak", y, guidance.weak, call)
                both = [w + 1.5 * (s - w) for s, w in zip(both, weak)]
            latents, token = latents - 0.25 * both[0], token - 0.25 * both[1]
    assert_close(actual, latents.float(), rtol=1e-4, atol=1e-4)
