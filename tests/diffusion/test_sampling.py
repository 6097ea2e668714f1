"""Sampling: order, seeds and labels, against drawing each sample alone and a known network."""

import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from conftest import CPU, assert_refused, opened, random_network, randomized, save_checkpoint, take_samples
from PIL import Image
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import routing_module
from rf import RF
from routing_module import Route
from sample import parse_seeds
from tread.checkpoints.network import build_network, read_network
from tread.data.latents import to_uint8
from tread.diffusion import sampling
from tread.diffusion.edm import EDM
from tread.diffusion.guidance import KINDS as GUIDANCE_KINDS
from tread.diffusion.guidance import Guidance, Schedule
from tread.diffusion.labels import seeded_labels, spread_classes
from tread.diffusion.sampling import Model, Sampler, draw, draw_pictures, relative_cost
from tread.diffusion.solvers import Churn, heun
from tread.drawing.grids import save_grid
from tread.models import embedders
from tread.runtime import cuda_graphs
from tread.runtime.device import use_precision
from tread.runtime.randomness import generator, seeded_normal


def latents_of(network, seeds, labels, process=EDM(), weak=None, **options):  # noqa: B008
    model = Model(process, network, (Route(1, 3),) if len(network.blocks) > 3 else ())
    return torch.cat(list(draw(model, seeds, labels, Sampler(**{"steps": 4, **options}), weak)))


each_process = pytest.mark.parametrize("process", [EDM(), RF()], ids=["edm", "rf"])
SPARSE = Guidance("sparse", 1.5, strong=0.25, weak=0.5)
KINDS = [Guidance(), Guidance("cfg", 1.5), SPARSE]
RATIOS = Schedule("cosine", 0.0, 0.6), Schedule("cosine", 0.6, 0.0)
SCHEDULED = Guidance("sparse_cfg", 1.5, *RATIOS, interval=(0.01, 5.0))


@pytest.fixture
def smaller():
    """Another network that sees the same latents and classes."""
    return random_network(1, patch_size=4, hidden_size=32, depth=4, num_heads=2)


@pytest.mark.parametrize("process, guidance", [*((EDM(), kind) for kind in KINDS), (RF(), SCHEDULED)])
def test_a_sample_is_the_same_bits_in_any_company(tiny, guidance, process):
    """Order, position, neighbours, the start and the padding of the last batch; batches have one shape."""
    options = {"batch_size": 4, "guidance": guidance, "process": process, "solver": process.default_solver}
    seeds, labels = [7, 3, 11, 5, 2, 13], torch.tensor([1, 1, 4, 0, 9, 3])
    together = latents_of(tiny, seeds, labels, **options)
    assert together.shape == (6, 4, 8, 8) and together.dtype == torch.float32
    order = [5, 0, 3, 1, 4, 2]
    assert torch.equal(latents_of(tiny, [seeds[i] for i in order], labels[order], **options), together[order])
    assert torch.equal(latents_of(tiny, seeds[3:], labels[3:], **options), together[3:])
    assert torch.equal(latents_of(tiny, seeds[1:2], labels[1:2], **options), together[1:2])


def test_pictures_are_decoded_in_batches_of_one_shape(tiny):
    """20 at once are 16 and 4 for a decoder; a convolution's bits may follow from that, so it never sees the 4."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        convolution = torch.nn.Conv2d(4, 3, 3, padding=1).requires_grad_(False)
    shapes = []

    def decoder(x):
        shapes.append(tuple(x.shape))
        return to_uint8(convolution(x))

    seeds, labels = list(range(27)), torch.arange(27) % 10
    sampler = Sampler(steps=2, batch_size=20)
    forward = torch.cat(list(draw_pictures(Model(EDM(), tiny), decoder, seeds, labels, sampler)))
    backward = torch.cat(list(draw_pictures(Model(EDM(), tiny), decoder, seeds[::-1], labels.flip(0), sampler)))
    assert set(shapes) == {(16, 4, 8, 8)} and forward.shape == (27, 3, 8, 8)
    assert torch.equal(backward.flip(0), forward)


@pytest.mark.slow
def test_pictures_hardly_depend_on_the_shape_of_the_batch(tiny):
    """Within one grey level on at least 99.9% of the pixels, decoded as latents in −1..1."""

    def pictures(batch_size):
        model, sampler = Model(EDM(), tiny, (Route(1, 3),)), Sampler(4, batch_size, guidance=SPARSE)
        return torch.cat(list(draw_pictures(model, to_uint8, range(8), torch.arange(8), sampler))).int()

    reference = pictures(8)
    assert reference.float().std() > 20
    for batch_size in (1, 5):
        assert ((pictures(batch_size) - reference).abs() <= 1).float().mean() >= 0.999


def test_churn_adds_noise_that_the_seed_gives(tiny):
    """Reference: heun with the same noise, drawn here by its address. Other processes and solvers are refused."""
    seeds, labels, churn = [7, 3], torch.tensor([1, 4]), Churn(20, sigma_min=0.05, sigma_max=50, noise=1.003)
    actual = latents_of(tiny, seeds, labels, steps=4, batch_size=2, churn=churn)

    def normal(stream):
        return torch.stack([torch.randn(4, 8, 8, generator=generator(seed, stream)) for seed in seeds])

    def denoiser(x, level):
        with torch.no_grad():
            return EDM().denoise(tiny, x, level, labels)

    expected = heun(denoiser, normal("noise"), EDM().schedule(4), churn, lambda step: normal(f"churn {step}"))
    assert_close(actual, expected.float())
    plain = latents_of(tiny, seeds, labels, steps=4, batch_size=2)
    assert not torch.isclose(actual, plain, rtol=0.01, atol=0.01).all()
    alone = latents_of(tiny, seeds[1:] * 2, labels[1:].repeat(2), steps=4, batch_size=2, churn=churn)
    assert torch.equal(alone[0], actual[1])
    for process, solver in ((RF(), "heun"), (EDM(), "euler")):
        with pytest.raises(ValueError, match="100..200 holds no noise level"):
            Sampler(4, 2, "fp32", churn=Churn(40, 100, 200)).plan(EDM())
        with pytest.raises(ValueError, match="churn=0.5 needs EDM and solver=heun"):
            latents_of(tiny, seeds, labels, process=process, solver=solver, churn=Churn(0.5))


def test_route_ids_follow_from_the_seed_and_change_from_pass_to_pass(tiny):
    """Ids are those of addressed draws, one for each pass and branch."""
    seen = []
    tiny.register_forward_pre_hook(lambda _, args, kwargs: seen.extend(kwargs["routes"]), with_kwargs=True)
    latents_of(tiny, [5, 8], torch.tensor([0, 1]), batch_size=2, steps=2, guidance=SPARSE)
    assert [route.selection_ratio for route, _ in seen] == [0.25, 0.5] * 3  # 2N − 1 calls of two branches
    for row, seed in enumerate((5, 8)):
        for branch, offset, kept in (("strong", 0, 12), ("weak", 1, 8)):
            uniform = torch.rand(3, 16, generator=generator(seed, f"route 0 {branch}"))
            for call in range(3):
                expected = uniform[call].argsort()[:kept].sort().values
                assert torch.equal(seen[2 * call + offset][1][row], expected)


@each_process
def test_what_guidance_comes_to_at_its_ends(tiny, smaller, process):
    """Scale 1 is the strong branch, bit for bit; ratios 0 are dense sampling without guidance, up to rounding."""
    seeds, labels = [3, 4], torch.tensor([3, 4])
    options = {"batch_size": 2, "process": process, "solver": process.default_solver}
    plain = latents_of(tiny, seeds, labels, **options)
    strong = [Guidance("cfg", 1.0), Guidance("sparse", 1.0, 0.0, 0.5), Guidance("autoguidance", 1.0, checkpoint="a")]
    for guidance in strong:
        assert torch.equal(latents_of(tiny, seeds, labels, guidance=guidance, **options), plain)
    dense = latents_of(tiny, seeds, labels, guidance=Guidance("sparse", 3.0), **options)
    assert_close(dense, plain, rtol=1e-3, atol=1e-4)
    weak = Model(process, smaller, (Route(0, 2),))
    routed, dense = Guidance("sparse", 0.0, weak=0.5, checkpoint="a"), Guidance("autoguidance", 0.0, checkpoint="a")
    mine = latents_of(smaller, seeds, labels, **options)
    other = latents_of(tiny, seeds, labels, guidance=routed, weak=weak, **options)
    assert_close(latents_of(smaller, seeds, labels, guidance=dense, weak=weak, **options), mine)
    assert not torch.isclose(other, mine).all()  # scale 0 is the weak network, here under its route


class Gaussians(torch.nn.Module):
    """A network that knows its data: N(0, std²), std by class, other without one and with tokens or a path left out."""

    drops_path = True
    num_classes, in_channels, input_size, num_tokens, grid = 10, 1, 2, 16, (4, 4)

    def __init__(self, process, factor=1.0):
        super().__init__()
        self.process, self.nothing, self.factor = process, torch.nn.Parameter(torch.zeros(())), factor

    def null(self, count):
        return torch.full((count,), 10)

    def std(self, labelled, ratio):
        return self.factor * (0.6 if labelled else 0.9) * (1 + ratio)

    def forward(self, x, t, y, routes=(), path_drop=False):
        ratio = 1 - routes[0][1].shape[1] / self.num_tokens if routes else 0.5 * path_drop
        std = torch.where(y < 10, self.std(True, ratio), self.std(False, ratio)).view(-1, 1, 1, 1)
        t = t.view(-1, 1, 1, 1)
        if isinstance(self.process, RF):
            a = 1 - t
            return (x - x * a * std**2 / (a**2 * std**2 + t**2)) / t
        sigma, data = (4 * t).exp(), self.process.sigma_data
        norm = (sigma**2 + data**2).sqrt()
        x = x * norm
        return (x * std**2 / (std**2 + sigma**2) - data**2 / norm**2 * x) * norm / (sigma * data)


def shrinks(process, std, start, end):
    """x(end) / x(start) of the exact flow of N(0, std²)."""
    spread = [((1 - s) * std if isinstance(process, RF) else std, s) for s in (start, end)]
    return math.hypot(*spread[1]) / math.hypot(*spread[0])


@pytest.mark.parametrize("process, weak_process", [(EDM(), EDM(sigma_data=0.8)), (RF(), RF(reverse=True))])
@pytest.mark.parametrize("kind", GUIDANCE_KINDS)
@pytest.mark.parametrize("interval", [None, (0.2, 0.7)])
def test_samples_of_gaussian_data_by_each_kind(process, weak_process, kind, interval):
    """The guided flow is linear: factors of the strong branch to the power ω, of the weak one to 1 − ω."""
    row, omega = GUIDANCE_KINDS[kind], 1.6
    two = row.weak_network != "never"
    ratios = (0.25, 0.5) if row.routed else (0.0, 0.0)
    guided = {} if kind == "none" else {"scale": omega, "interval": interval}
    guidance = Guidance(kind, **guided, strong=ratios[0], weak=ratios[1], checkpoint="a" if two else None)
    model = Model(process, Gaussians(process), (Route(0, 0),))
    network = Gaussians(weak_process, 1.2)
    if isinstance(process, RF):  # in the other convention: time from noise to data, and the velocity's sign
        network.forward = lambda x, t, y, routes=(): -Gaussians.forward(network, x, 1 - t, y, routes)
    weak = Model(weak_process, network, (Route(0, 0),)) if two else None
    sampler = Sampler(100, 2, guidance=guidance)
    actual = next(draw(model, [3, 4], torch.tensor([1, 2]), sampler, weak))

    top = 1.0 if isinstance(process, RF) else 80.0
    low, high = guidance.interval or (0.0, top)
    expected = seeded_normal([3, 4], (1, 2, 2)) * top
    for start, end, is_guided in ((top, high, False), (high, low, True), (low, 0.0, False)):
        strong = shrinks(process, model.network.std(row.strong_class, guidance.strong), start, end)
        std = (weak or model).network.std(bool(row.weak_class), guidance.weak + 0.5 * row.drops_path)
        weaker = shrinks(process, std, start, end)
        expected = expected * (strong**omega * weaker ** (1 - omega) if is_guided and kind != "none" else strong)
    assert_close(actual, expected, rtol=0.04, atol=0)  # the interval's ends lie between two levels


def test_a_model_without_routes_is_not_guided_by_them(tiny):
    with pytest.raises(ValueError, match="no routes"):
        next(draw(Model(EDM(), tiny), [0], torch.tensor([1]), Sampler(2, 1, guidance=SPARSE)))


@pytest.mark.parametrize("kind", ["sparse", "sparse_cfg", "sparse_uncond"])
def test_branches_get_the_labels_and_tokens_of_their_kind(tiny, kind):
    """Two passes a call: labels of the table, kept tokens by the ratios, ids apart unless they are to be the same."""
    seen = []

    def spy(module, args, kwargs):
        seen.append((args[2].tolist(), kwargs["routes"][0][1]))

    tiny.register_forward_pre_hook(spy, with_kwargs=True)
    for same in (False, True):
        seen.clear()
        all_nested = True
        guidance = Guidance(kind, 1.5, 0.25, 0.5, same_ids=same)
        latents_of(tiny, [5, 8], torch.tensor([3, 4]), batch_size=2, steps=2, guidance=guidance)
        for (strong_y, strong), (weak_y, weak) in zip(seen[::2], seen[1::2]):
            assert strong_y == ([10, 10] if kind == "sparse_uncond" else [3, 4])
            assert weak_y == ([3, 4] if kind == "sparse" else [10, 10])
            assert (strong.shape, weak.shape) == ((2, 12), (2, 8))
            all_nested &= all(set(w.tolist()) <= set(s.tolist()) for s, w in zip(strong, weak))
        assert all_nested == same  # one draw keeps the first 12 and the first 8 of one order


def test_schedules_run_over_the_levels(tiny):
    """Heun's calls are at levels 0, 1, 1, 2, …; the ratio of each follows from its level, from start to end."""
    kept = []
    tiny.register_forward_pre_hook(
        lambda module, args, kwargs: kept.append([ids.shape[1] for _, ids in kwargs["routes"]]), with_kwargs=True
    )
    guidance = Guidance("sparse", 2.0, Schedule("linear", 0.0, 0.5), Schedule("linear", 0.5, 0.0))
    latents_of(tiny, [0], torch.tensor([1]), batch_size=1, steps=3, guidance=guidance)
    for solver, steps, ratios in (("euler", 3, [0, 0.25, 0.5]), ("heun", 2, [0, 0.5, 0.5]), ("euler", 1, [0])):
        calls = Sampler(steps, solver=solver, guidance=guidance).plan(RF() if steps == 1 else EDM())
        assert [call.strong for call in calls] == ratios
    # γ_strong, γ_weak = 0, .5 | .25, .25 (one batch) | .25, .25 | .5, 0 | .5, 0; of 16 tokens
    assert kept == [[], [8], [12], [12], [8], [], [8], []]


def test_cost_of_a_guided_sample(tiny, smaller):
    model, dense = Model(EDM(), tiny, (Route(1, 4),)), tiny.forward_flops()
    half = tiny.forward_flops([Route(1, 4, 0.5)])
    assert Sampler(3).flops(model) == 5 * dense
    assert Sampler(3, guidance=Guidance("cfg", 2.0)).flops(model) == 10 * dense
    assert Sampler(3, guidance=Guidance("sparse", 2.0, weak=0.5)).flops(model) == 5 * (dense + half)
    weak = Model(EDM(), smaller, (Route(0, 2),))
    auto = Sampler(3, guidance=Guidance("autoguidance", 2.0, checkpoint="a"))
    assert auto.flops(model, weak) == 5 * (dense + smaller.forward_flops())
    assert relative_cost(auto, model, weak) == pytest.approx(1 + smaller.forward_flops() / dense)
    sometimes = Sampler(3, guidance=Guidance("cfg", 2.0, interval=(1.0, 10.0)))  # levels 80, 2.5, 0.002
    assert sometimes.flops(model) == 7 * dense and sometimes.nfe(EDM()) == 7
    assert Sampler(50, solver="euler").nfe(RF()) == 50 and Sampler(50).nfe(RF()) == 99
    assert Sampler() == Sampler(40, 64, "fp32", Guidance(), "heun", Churn())
    assert Sampler.of(EDM(), None, None, 4, "fp32") == Sampler(40, 4, solver="heun")
    assert Sampler.of(RF(), None, None, 4, "fp32") == Sampler(50, 4, solver="euler")
    assert Sampler.of(RF(), 7, "heun", 4, "fp32") == Sampler(7, 4, solver="heun")


def test_labels_follow_from_the_seed():
    labels = seeded_labels(range(2000), 10, "random")
    assert torch.equal(seeded_labels([7, 1999, 3], 10, "random"), labels[[7, 1999, 3]])
    assert 150 < labels.bincount(minlength=10).min() and labels.bincount().max() < 250  # 200 ± 13.4
    balanced = seeded_labels(range(5, 35), 10, "balanced")
    assert balanced[:3].tolist() == [5, 6, 7] and balanced.bincount().tolist() == [3] * 10


def test_bad_requests_are_refused(tiny):
    with pytest.raises(ValueError, match="2 seeds for 1 labels"):
        latents_of(tiny, [0, 1], torch.tensor([0]))
    with pytest.raises(ValueError, match="11.*0..9"):
        latents_of(tiny, [0], torch.tensor([11]))
    tiny.final_layer.linear.bias.data.fill_(float("nan"))
    assert len(next(draw_pictures(Model(EDM(), tiny), to_uint8, [4], torch.tensor([0]), Sampler(steps=2)))) == 1
    with pytest.raises(ValueError, match="not finite"):
        next(draw_pictures(Model(EDM(), tiny), to_uint8, [4], torch.tensor([0]), Sampler(steps=2), check=True))
    with pytest.raises(ValueError, match="precision is 'fp16'.*range is too small"):
        use_precision("fp16", CPU)
    with pytest.raises(ValueError, match="must be random or balanced"):
        seeded_labels([0], 10, "sorted")
    assert use_precision("auto", CPU) == "fp32"


def test_seeds_and_classes():
    assert list(parse_seeds("0-3")) == [0, 1, 2, 3] and list(parse_seeds("5-5")) == [5]
    assert parse_seeds((4, 2)) == [4, 2] and parse_seeds(9) == [9]
    for bad in ("3-1", "a", "1,2"):
        with pytest.raises(ValueError, match=bad):
            parse_seeds(bad)
    assert spread_classes(10, 10) == list(range(10)) and spread_classes(1000, 3) == [0, 500, 999]
    assert spread_classes(2, 10) == [0, 1]


def test_grid_places_pictures_row_by_row(tmp_path):
    pictures = np.arange(6, dtype=np.uint8).reshape(6, 1, 1, 1).repeat(8, 2).repeat(8, 3) * 40
    save_grid(tmp_path / "a/grid.png", pictures, columns=3)
    grid = np.asarray(Image.open(tmp_path / "a/grid.png"))
    assert grid.shape == (2 * 64 + 2, 3 * 64 + 4)
    assert [grid[10 + 66 * r, 10 + 66 * c] for r in range(2) for c in range(3)] == [0, 40, 80, 120, 160, 200]
    save_grid(tmp_path / "rgb.png", np.zeros((2, 3, 256, 256), dtype=np.uint8), columns=2)
    assert np.asarray(Image.open(tmp_path / "rgb.png")).shape == (256, 514, 3)


def test_the_door_refuses_a_bare_state_dict(tmp_path, tiny):
    """Public DiT weights predict noise on timesteps: sampling them by EDM would give noise."""
    torch.save(tiny.state_dict(), tmp_path / "dit.pt")
    bare, none = (f"checkpoint={tmp_path / name}" for name in ("dit.pt", "none"))
    shown = "error: .*timesteps 0..999"
    assert_refused(partial(take_samples, tmp_path), (bare, shown), (none, "error: no checkpoint at"))


class Casts(TorchDispatchMode):
    """Counts, by parameter of some networks, how often it is cast to bf16."""

    def __init__(self, *networks):
        super().__init__()
        self.names = {item.data_ptr(): name for network in networks for name, item in network.named_parameters()}
        self.counts = Counter()

    def __torch_dispatch__(self, operator, types, given=(), more=None):
        cast = operator is torch.ops.aten._to_copy.default and more.get("dtype") is torch.bfloat16
        if cast and given[0].data_ptr() in self.names:
            self.counts[self.names[given[0].data_ptr()]] += 1
        return operator(*given, **more or {})


def uncached(device, precision):
    return torch.autocast(device.type, torch.bfloat16, precision == "bf16", cache_enabled=False)


@pytest.mark.parametrize(
    "guidance", [SPARSE, pytest.param(SCHEDULED, marks=pytest.mark.slow)], ids=lambda item: item.kind
)
def test_a_batch_casts_each_weight_once_and_pictures_stay_the_same_bits(tmp_path, composed, guidance, monkeypatch):
    """Both for a network that trains and a frozen one, as averages are; against autocast without its cache; one block
    of the route runs in fp32."""
    save_checkpoint(tmp_path / "run", composed)
    model = opened(tmp_path / "run").load(CPU)
    model = replace(model, routes=(Route(1, 3, fp32="end"),))
    sampler = Sampler(steps=3, batch_size=4, precision="bf16", guidance=guidance)
    calls, results = len(sampler.plan(model.process)), []
    for least, most in ((1, 1), (1, 1), (calls, 2 * calls)):  # branches of other numbers of tokens run one by one
        if least > 1:
            monkeypatch.setattr(sampling, "autocast", uncached)
        trains = [weight.requires_grad for weight in model.network.parameters()]
        with Casts(model.network) as casts:
            results.append(torch.cat(list(draw(model, range(7), torch.arange(7) % 5, sampler))))
        inner = {name: count for name, count in casts.counts.items() if "blocks.0." in name}
        assert len(inner) == 10 and all(2 * least <= count <= 2 * most for count in inner.values()), inner
        assert trains == [weight.requires_grad for weight in model.network.parameters()]
        model.network.requires_grad_(False)
    assert calls == 5 and all(torch.equal(results[0], other) for other in results[1:])
    assert results[0].isfinite().all() and not any(result.requires_grad for result in results)


@pytest.mark.parametrize("name", ["lightning", "rwkv", "mamba"])
def test_cached_casts_change_no_bits_of_other_networks(composed, name, monkeypatch):
    sizes = ("hidden_size=32", "depth=6", "num_heads=2", *(("head_dim=8",) if name == "mamba" else ()))
    config = composed(f"model={name}", *(f"model.{size}" for size in sizes))
    network = randomized(partial(build_network, read_network(config)), 0, 0.1).eval()
    sampler, results, counts = Sampler(steps=4, batch_size=3, precision="bf16"), [], []
    for _ in range(2):
        with Casts(network) as casts:
            results.append(*draw(Model(EDM(), network), range(3), torch.arange(3), sampler))
        counts.append(casts.counts.total())
        monkeypatch.setattr(sampling, "autocast", uncached)
    assert torch.equal(*results) and 0 < counts[0] < counts[1] / 2


class Traced:
    """Records calls as a CUDA graph does: the operators on the tensors of one call, with Python's numbers as they were
    then. `replays` counts, by call recorded."""

    works = True

    def __init__(self):
        self.replays = []

    def record(self, call):
        operators, number = make_fx(call)(), len(self.replays)
        self.replays.append(0)

        def replay():
            self.replays[number] += 1
            return operators()

        return replay


@pytest.mark.slow
@pytest.mark.parametrize(
    "guidance, process, precision, kinds",
    [
        (Guidance(), EDM(), "fp32", [7]),
        (Guidance("cfg", 1.5), EDM(), "bf16", [7]),  # both branches in one batch
        (SPARSE, RF(), "bf16", [7, 7]),
        (Guidance("path_drop", 1.5), RF(), "fp32", [7, 7]),
    ],
    ids=lambda item: getattr(item, "kind", None),
)
def test_replayed_calls_give_the_same_bits(tiny, composed, monkeypatch, guidance, process, precision, kinds):
    """Against sampling without graphs. In each of two batches a graph for each of the `kinds` of calls, all of whose
    calls but the first replay it, and before them the first as a trial."""
    model = Model(process, tiny, (Route(1, 3, fp32="end"),))
    if guidance.row.drops_path:
        cfg = read_network(composed("model=sprint", "model.hidden_size=32", "model.depth=6", "model.num_heads=2"))
        model = Model(process, randomized(partial(build_network, cfg), 0, 0.1).eval(), cfg.model.routes)
    sampler = Sampler(4, 4, precision, guidance, solver="heun")
    expected = torch.cat(list(draw(model, range(7), torch.arange(7) % 5, sampler)))
    recorder = Traced()
    for module in (routing_module, embedders):  # as on a GPU, where no number is read
        monkeypatch.setattr(module, "readable", lambda values: False)
    monkeypatch.setattr(sampling, "recording", lambda networks: nullcontext(recorder))
    found = torch.cat(list(draw(model, range(7), torch.arange(7) % 5, sampler)))
    assert torch.equal(found, expected) and found.std() > 0.1
    assert recorder.replays == kinds * 2


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("guidance", [Guidance("cfg", 1.5), SPARSE], ids=lambda item: item.kind)
def test_on_a_gpu_graphs_give_the_same_bits(tiny, monkeypatch, guidance, precision, recwarn):
    """In three batches; what graphs took is given back."""
    use_precision(precision, torch.device("cuda"))
    model, sampler = Model(RF(), tiny.to("cuda"), (Route(1, 3),)), Sampler(20, 4, precision, guidance)
    recorded, record = [], cuda_graphs.Recorder.record
    monkeypatch.setattr(cuda_graphs.Recorder, "record", lambda self, call: recorded.append(call) or record(self, call))
    found = torch.cat(list(draw(model, range(10), torch.arange(10), sampler)))
    assert not recwarn.list and len(recorded) == 3 * (1 if guidance.kind == "cfg" else 2)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < 2**28  # products keep workspaces
    monkeypatch.setattr(sampling, "recording", lambda networks: nullcontext())
    assert torch.equal(torch.cat(list(draw(model, range(10), torch.arange(10), sampler))), found)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@each_process
def test_on_a_gpu_pictures_hold_as_on_a_cpu(tiny, precision, process):
    """Noise, labels and ids are drawn on the CPU, so they are the same bits on any device. Pictures at one batch shape
    are equal in any order; in fp32 they are within one grey level on 99.9% of the pixels in other shapes, and beside
    the CPU's."""
    use_precision(precision, torch.device("cuda"))
    seeds, labels = range(32), torch.arange(32) % 10

    def pictures(device, batch_size, backwards=False):
        model = Model(process, tiny.to(device), (Route(1, 3),))
        sampler = Sampler.of(process, 10, None, batch_size, precision, SPARSE)
        given = list(seeds)[::-1] if backwards else list(seeds)
        return torch.cat(list(draw_pictures(model, to_uint8, given, labels[given], sampler))).int()

    reference = pictures("cuda", 16)
    assert torch.equal(pictures("cuda", 16, backwards=True).flip(0), reference)
    for other in [pictures("cuda", 8), pictures("cpu", 16)] if precision == "fp32" else []:
        assert ((other - reference).abs() <= 1).float().mean() >= 0.999
