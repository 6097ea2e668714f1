"""Alignment against golden numbers of REPA's own code, loops over samples and tokens, and other ways to make a run."""

import copy
import math
import shutil
from dataclasses import replace
from functools import partial

import conftest
import numpy as np
import prepare_features
import pytest
import torch
from conftest import CPU, equal, launch, logged, randomized, read_json, size_of, state, state_of, write_json
from safetensors.torch import load_file
from test_token_losses import LATENTS
from torch.testing import assert_close

from rf import RF
from routing_module import RULES, Record, Route, draw_ids
from tread.checkpoints import checkpoint
from tread.checkpoints.network import build_network, process_of
from tread.data.dataset import Batch, LatentDataset
from tread.data.loader import Loader
from tread.diffusion.edm import EDM
from tread.routing.ids import Token
from tread.runtime import compiling
from tread.runtime.device import autocast
from tread.training import alignment, step
from tread.training.alignment import BETA, Aligned, Aligner, Alignment, alignment_loss, build_projector, self_distance
from tread.training.costs import sample_flops
from tread.training.start import settings_warnings

SIZES = {"patch_size": 2, "hidden_size": 32, "depth": 6, "num_heads": 2}
SELF = ("alignment=self", "alignment.weight=0.7", "train.label_drop=0.5", "name=run")


@pytest.fixture
def golden(asset):
    """REPA's projector by our names, its numbers, and its hidden states to take gradients by."""
    g = load_file(asset("golden/repa_projection.safetensors"))
    projector = build_projector(Alignment(kind="repa", width=128), 64, 48)
    projector.load_state_dict(state_of(g))
    return g, projector, g["in.hidden"].clone().requires_grad_()


@pytest.mark.parametrize("kept", [False, True])
def test_golden_loss_and_gradients(golden, kept):
    g, projector, hidden = golden
    ids, end = (g["in.ids_keep"], "_kept") if kept else (None, "")
    projected = projector(hidden)
    assert_close(projected, g["out.projected"], rtol=0, atol=1e-5)
    if kept:
        projected = torch.stack([projected[i, ids[i]] for i in range(2)])
    losses = alignment_loss(projected, g["in.targets"], ids)
    assert_close(losses, g[f"out.loss{end}_per_sample"], rtol=0, atol=1e-6)
    losses.mean().backward()
    assert_close(losses.mean(), g[f"out.loss{end}"], rtol=0, atol=1e-6)
    gradients = {"hidden": hidden.grad, "0.weight": projector[0].weight.grad, "4.bias": projector[4].bias.grad}
    for name, actual in gradients.items():
        expected = g[f"grad{end}.{name}"]
        assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max(), name


def test_projectors_have_the_published_sizes():
    """REPA's of XL to 768 channels: 8,131,328 parameters; SRA's head D → 2D → D."""
    with torch.device("meta"):
        repa = build_projector(Alignment(kind="repa"), 1152, 768)
        head = build_projector(Alignment(kind="self"), 64, 64)
    assert size_of(repa) == 8_131_328
    assert [tuple(layer.weight.shape) for layer in head if hasattr(layer, "weight")] == [(128, 64), (64, 128)]
    drawn = build_projector(Alignment(kind="repa", width=16), 8, 4)
    assert not any(layer.bias.any() for layer in drawn if hasattr(layer, "bias"))


@pytest.mark.parametrize("depth, expected", [(12, (3, 7)), (24, (7, 15)), (28, (7, 17)), (2, (0, 0)), (1, (0, 0))])
def test_which_blocks(depth, expected):
    """Number min(8, depth // 3), and 2·depth // 3, counted from 1."""
    assert Alignment().resolve(depth) == ((expected[0],), expected[1])
    assert Alignment(block=-1, teacher=0).resolve(depth) == ((depth - 1,), 0)
    assert Alignment(blocks=(-1, 0, depth - 1)).resolve(depth)[0] == tuple(sorted({0, depth - 1}))
    for name, value in (("block", depth), ("teacher", -depth - 1), ("blocks", depth)):
        with pytest.raises(ValueError, match=f"alignment.{name} is {value}, but the network has {depth} blocks"):
            Alignment(**{name: (0, value) if name == "blocks" else value}).resolve(depth)


def naive(kind, projected, targets, ids):
    """A loop over samples, tokens and channels."""
    losses = []
    for b in range(len(projected)):
        total = 0.0
        for k in range(projected.shape[1]):
            p, t = projected[b, k].double(), targets[b, k if ids is None else int(ids[b, k])].double()
            if kind == "repa":
                total -= float(p @ t / (p @ p).sqrt() / (t @ t).sqrt())
            else:
                off = [abs(float(this - other)) for this, other in zip(p, t)]
                total += sum(o * o / (2 * BETA) if o < BETA else o - BETA / 2 for o in off) / len(off)
        losses.append(total / projected.shape[1])
    return torch.tensor(losses)


@pytest.mark.parametrize("kind, loss", [("repa", alignment_loss), ("self", self_distance)])
def test_losses_equal_loops_and_the_order_of_ids_does_not_matter(kind, loss):
    """And are those that an aligner takes: of self, which has a teacher, and of repa, which has none."""
    targets = torch.randn(3, 16, 5) / 10
    ids = draw_ids(torch.rand(3, 16), 0.5, sort=False)
    projected = torch.randn(3, 8, 5) / 10
    assert_close(loss(projected, targets, ids), naive(kind, projected, targets, ids))
    order = torch.randperm(8)
    assert_close(loss(projected[:, order], targets, ids[:, order]), loss(projected, targets, ids))
    whole = torch.randn(3, 16, 5) / 10
    assert_close(loss(whole, targets, None), naive(kind, whole, targets, None))
    network, module = aligned(2)
    aligner, record = Aligner(Alignment(kind=kind), module, network if kind == "self" else None), Record((2,))
    record.outputs[2] = projected, ids
    assert_close(aligner.distance(record, targets), naive(kind, projected, targets, ids))


def aligned(block=1, width=7, **more):
    network = conftest.random_network(0, **SIZES)
    settings = Alignment(kind="repa", block=block, width=12, **more)
    return network, Aligned(network, build_projector(settings, 32, width), (block,))


@pytest.mark.parametrize("block", [0, 1, 3, 4])
def test_the_blocks_output_is_taken_as_it_leaves_it(block):
    """Against the network run block by block: kept tokens within r(1→3), all outside; the output is untouched."""
    network, module = aligned(block)
    x, t, y = torch.randn(3, 4, 8, 8), torch.rand(3), torch.arange(3)
    routes = [(Route(1, 3), draw_ids(torch.rand(3, 16), 0.5))]
    record = Record()
    assert torch.equal(module(x, t, y, routes, record), network(x, t, y, routes))
    projected, ids = record.outputs[block]
    tokens, c = network.embed(x, t, y)
    for i, each in enumerate(network.blocks[: block + 1]):
        if i == 1:
            whole, tokens = tokens, torch.stack([tokens[b, routes[0][1][b]] for b in range(3)])
        tokens = actual = each(tokens, c)
        if i == 3:
            tokens = whole.clone()
            for b in range(3):
                tokens[b, routes[0][1][b]] = actual[b]
    assert_close(projected, module.projector(actual))
    assert (ids is routes[0][1]) == (1 <= block <= 3)
    assert projected.shape[1] == (8 if 1 <= block <= 3 else 16)


def test_several_blocks_share_projector_and_targets():
    """One inside r(1→3), one behind it: the loops' mean of both, and of one block twice its own; so with gradients."""
    network, module = aligned()
    x, t, y, targets = torch.randn(3, 4, 8, 8), torch.rand(3), torch.arange(3), torch.randn(3, 16, 7)
    routes = [(Route(1, 3), draw_ids(torch.rand(3, 16), 0.5))]

    def of(*blocks):
        module.blocks = blocks
        module(x, t, y, routes, record := Record())
        loss = Aligner(Alignment(kind="repa"), module).distance(record, targets)
        return loss, *torch.autograd.grad(loss.mean(), [*module.projector.parameters()])

    network(x, t, y, routes, record=(plain := Record(blocks=(2, 4))))
    loops = [naive("repa", module.projector(tokens).detach(), targets, ids) for tokens, ids in plain.outputs.values()]
    assert_close(of(2, 4)[0], (loops[0] + loops[1]) / 2)
    assert_close(of(2, 4), tuple((one + other) / 2 for one, other in zip(of(2), of(4))))
    assert_close(of(*Alignment(blocks=(2, -4)).resolve(6)[0]), of(2))
    module.blocks, layers = (2, 4), 32 * 12 + 12 * 12 + 12 * 7
    assert Aligner(Alignment(kind="repa"), module).flops([route for route, _ in routes]) == 6 * (8 + 16) * layers


@pytest.mark.slow
def test_bf16_recomputation_and_compiled_blocks_hand_out_the_same():
    """The projected tokens of the plain network, and gradients of the aligned block."""
    network, module = aligned(2)
    x, t, y = torch.randn(3, 4, 8, 8), torch.rand(3), torch.arange(3)
    routes = [(Route(1, 3, fp32="end"), draw_ids(torch.rand(3, 16), 0.5))]

    def results(precision="fp32"):
        module.zero_grad()
        with autocast(CPU, precision):
            module(x, t, y, routes, record := Record())
        projected, _ = record.outputs[2]
        projected.float().square().sum().backward()
        return projected.float(), network.blocks[2].attn.qkv.weight.grad.clone()

    plain = results()
    network.activation_checkpointing = True
    assert_close(results(), plain)
    network.activation_checkpointing = False
    for ours, theirs in zip(results("bf16"), plain):
        assert (ours - theirs).norm() / theirs.norm() < 0.05
    compiling.compile_blocks(network.blocks[:3], "aot_eager")  # one before the route, two in it
    assert_close(results(), plain, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


@pytest.fixture
def given(read_config):
    """A run's settings with self-alignment, a batch, and its draws."""

    def make(*overrides):
        cfg = read_config("model=tread", "model.depth=6", "alignment=self", "train.batch_size=4", *overrides)
        spec = replace(LATENTS, shape=(1, 8, 8))
        return cfg, spec, torch.randn(4, 1, 8, 8), torch.arange(4), step.step_draws(cfg, spec, 3, "cpu")

    return make


def self_aligner(cfg):
    """A network with random weights, and its aligner with another copy as the teacher."""
    network = randomized(partial(build_network, cfg), 0, 0.1)
    module = Aligned(network, build_projector(cfg.alignment, network.hidden_size, network.hidden_size), (1,))
    return network, Aligner(cfg.alignment, module, copy.deepcopy(network))


@pytest.mark.parametrize("objective", ["edm", "rf"])
def test_denoising_is_the_loss_without_alignment_and_the_teacher_sees_less_noise(given, objective, monkeypatch):
    """The teacher: same samples, labels and noise, all tokens, at the cleaner level."""
    cfg, spec, stored, labels, draws = given(f"objective={objective}", "alignment.gap=0.2")
    network, aligner = self_aligner(cfg)
    seen, original = [], aligner.teacher.output_of

    def watched(*inputs):
        seen.append((*inputs, original(*inputs)))
        return seen[-1][-1]

    monkeypatch.setattr(aligner.teacher, "output_of", watched)
    given = (spec, Batch(stored, labels, None), draws, network.null(1))
    denoising, alignment = step.loss(cfg, aligner.module, *given, aligner)
    [(block, x, time, y, targets)] = seen
    assert block == cfg.alignment.resolve(6)[1] == 3
    level = process_of(cfg).cleaner(draws.level, 0.2 * draws.back)
    wide = level.view(-1, 1, 1, 1)
    if objective == "edm":
        noisy, expected = (stored + wide * draws.noise) / (wide**2 + 0.5**2).sqrt(), level.log() / 4
    else:
        noisy, expected = (1 - wide) * stored + wide * draws.noise, level
    assert_close((x, time), (noisy, expected))
    assert torch.equal(y, torch.where(draws.drop < cfg.train.label_drop, 10, labels))
    assert torch.equal(denoising, step.loss(cfg, network, *given)[0])
    assert alignment.shape == (4,) and alignment.requires_grad and not targets.requires_grad


class Least(Token):
    """A rule of somebody else's: the tokens of the least mean, without chance."""

    def scores(self, tokens):
        return -tokens.float().mean(dim=2)


def test_a_scored_route_is_aligned_and_counted_by_the_ids_that_it_chose(given, monkeypatch):
    """By a rule defined here, with the loss of kept tokens: both losses and their gradients are those with the recorded
    ids handed in, bit for bit; the distance is a loop's."""
    monkeypatch.setitem(RULES, "least", Least())
    options = ("train.loss_tokens=kept", "train.reconstruction=0.1")
    cfg, spec, stored, labels, draws = given("model.routes=[{start: 1, end: 3, select: least}]", *options)
    network, aligner = self_aligner(cfg)
    module, batch, null = aligner.module, Batch(stored, labels, None), network.null(1)
    records, ((route, chances),) = [], draws.routes
    assert chances.shape == (4, 16) and chances.is_floating_point()

    def watched(*inputs, record, **more):
        records.append(record)
        return module(*inputs, record=record, **more)

    scored = step.loss(cfg, watched, spec, batch, draws, null, aligner)
    [ids], (projected, aligned_ids) = records[0].ids, records[0].outputs[1]
    assert ids.shape == (4, 8) and aligned_ids is ids and not torch.equal(ids, draw_ids(chances, 0.5))
    expected = step.loss(cfg, module, spec, batch, draws._replace(routes=((route, ids),)), null, aligner)
    assert len(scored) == 2 and all(map(torch.equal, scored, expected))
    ours, theirs = (torch.autograd.grad(sum(terms).mean(), list(module.parameters())) for terms in (scored, expected))
    assert all(map(torch.equal, ours, theirs))
    y = torch.where(draws.drop < cfg.train.label_drop, 10, labels)
    targets = aligner.targets(process_of(cfg), batch, stored, y, draws.level, draws.noise, draws.back)
    assert_close(scored[1], naive("self", projected.detach(), targets, ids))


@pytest.mark.parametrize(
    "process, expected",
    [  # at the quantile 0.5 − 0.2 of the training's levels, whose normal number is −0.524401: less noise
        (EDM(), (math.exp(-1.2), math.exp(-1.2 - 1.2 * 0.524401))),
        (RF(), (0.5, 0.3)),  # of the time itself
        (RF(time="uniform"), (0.5, 0.3)),
    ],
)
def test_cleaner_levels_hold_less_noise(process, expected):
    """Closed forms at the median; from any level down to the cleanest, and never beyond it."""
    step = torch.tensor([0.0, 0.2])
    assert_close(process.cleaner(torch.zeros(2), step), torch.tensor(expected), rtol=1e-4, atol=0)
    normal = torch.linspace(-5, 3, 17)
    levels = process.noise_level(normal)
    assert_close(process.cleaner(normal, torch.zeros(17)), levels, rtol=1e-3, atol=1e-4)
    lowest = process.cleaner(normal, torch.full((17,), 0.999))
    assert lowest.isfinite().all() and (lowest >= 0).all()
    assert (process.cleaner(normal, torch.full((17,), 0.1)) <= levels).all()
    assert process.cleaner(torch.tensor([7.0]), torch.zeros(1)).isfinite().all()


@pytest.mark.parametrize("block, doubted", [(2, False), (3, True), (-1, True)])
def test_a_teacher_that_is_not_deeper_is_doubted(read_config, block, doubted):
    """Block number 3 of 6."""
    cfg = read_config("model.depth=6", "alignment=self", f"alignment.block={block}")
    assert bool(settings_warnings(cfg)) == doubted


def test_flops_are_projector_teacher_and_encoder(given):
    cfg, *_ = given()
    network, module = aligned(1, width=32)
    routes = (Route(1, 3, 0.5),)
    layers = 32 * 12 + 12 * 12 + 12 * 32
    assert Aligner(Alignment(kind="repa"), module).flops(()) == 6 * 16 * layers
    assert Aligner(Alignment(kind="repa"), module).flops(routes) == 6 * 8 * layers
    assert Aligner(Alignment(kind="repa"), module).flops((Route(0, 1, 0.5),)) == 6 * 8 * layers  # its last block
    teacher = Aligner(Alignment(kind="self"), module, teacher=network)
    forward = network.forward_flops()
    block = network.blocks[0].multiply_adds(16)
    last = 16 * 32 * 2 * 2 * 4 + 2 * 32 * 32  # the last layer and its modulation
    assert teacher.flops(()) == 6 * 16 * layers + forward - 2 * (2 * block + last)  # 4 of 6 blocks
    assert sample_flops(network, (), teacher) == 3 * forward + teacher.flops(())


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("aligned")
    return folder, launch(folder, *SELF)


def test_gradients_are_those_of_denoising_and_weighted_alignment(tmp_path, monkeypatch):
    """What is differentiated, against the two losses that are logged."""
    totals, backward = [], step.backward
    monkeypatch.setattr(step, "backward", lambda total: totals.append(total.item()) or backward(total))
    launch(tmp_path, *SELF, "train.steps=2", "train.micro_batch_size=null", "every.log=1", "alignment.weight=0.3")
    losses, alignments = (np.array(logged(tmp_path / "results/run", name)) for name in ("loss", "alignment"))
    assert len(totals) == 2 and totals == pytest.approx(losses + 0.3 * alignments, rel=1e-5)


def test_a_run_logs_all_three_and_its_projector_is_a_file_that_nothing_else_needs(straight, tmp_path):
    folder, text = straight
    run = folder / "results/run"
    assert "alignment self, block 1 (16 tokens) with block 3 of the averaged network, weight 0.7; the proj" in text
    assert "; alignment adds " in text
    losses, alignments = (np.array(logged(run, name)) for name in ("loss", "alignment"))
    assert logged(run, "total") == pytest.approx(losses + 0.7 * alignments)
    actual = checkpoint.find(run)
    assert set(actual.tensors("projector")) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert not any("projector" in name for kind in ("model", "ema") for name in actual.tensors(kind))
    (actual.folder / "projector.safetensors").rename(tmp_path / "away")
    try:
        conftest.take_samples(folder, f"checkpoint={actual.folder}", "seeds=0-1", "steps=2", "out=a.png")
    finally:
        (tmp_path / "away").rename(actual.folder / "projector.safetensors")


def whole(run):
    actual = checkpoint.find(run)
    return state(run) | {f"projector/{name}": value for name, value in actual.tensors("projector").items()}


def test_three_and_three_steps_equal_six_bit_for_bit(straight, tmp_path):
    run, other = (folder / "results/run" for folder in (straight[0], tmp_path))
    shutil.copytree(run / "step_0000003", other / "step_0000003")
    assert "goes on at step 3" in launch(tmp_path, *SELF)
    first = whole(other)
    assert equal(first, whole(run)) and any("optimizer/exp_avg/projector" in name for name in first)
    with pytest.raises(SystemExit, match="alignment.weight: 0.7 there, 0.6 here"):
        launch(tmp_path, *SELF, "alignment.weight=0.6")


@pytest.mark.slow
def test_two_processes_with_micro_batches_change_nothing_but_rounding(straight, tmp_path):
    expected = whole(straight[0] / "results/run")
    conftest.launch_processes(tmp_path, *SELF, "train.micro_batch_size=2", processes=2)
    actual = whole(tmp_path / "results/run")
    for name in (n for n in expected if not n.startswith("optimizer")):
        assert_close(actual[name], expected[name], rtol=1e-5, atol=1e-5)
    alignments = [logged(folder / "results/run", "alignment") for folder in (tmp_path, straight[0])]
    assert alignments[0] == pytest.approx(alignments[1], rel=1e-5)


ENCODER = """
import torch
def patches(pictures):
    x = pictures.float() / 127.5 - 1
    side = x.shape[2] // 4
    return torch.nn.functional.unfold(x, side, stride=side).transpose(1, 2)
"""
REPA = ("alignment=repa", "alignment.encoder=own_encoder:patches", "alignment.width=8", "name=repa")


@pytest.fixture(scope="module")
def repa(tmp_path_factory):
    """A run that aligns with stored features, in a folder that has the encoder."""
    folder = tmp_path_factory.mktemp("repa")
    (folder / "own_encoder.py").write_text(ENCODER)
    launch(folder, "train.steps=1", "name=first")  # which writes the digits
    options = ("dataset.path=data/digits/train", "encoder=own_encoder:patches")
    conftest.launch_door(prepare_features.main, "prepare_features", folder, *options)
    return folder, launch(folder, *REPA)


def test_stored_and_live_features_give_equal_losses(repa):
    """To fp16's rounding; the denoising of the first step is that of the run without alignment. Features of other
    weights under the same name are known by the hash in index.json."""
    folder, text = repa
    assert "alignment repa, block 1 (16 tokens) with stored features of own_encoder:patches, weight 0.5" in text
    live = launch(folder, *REPA, "alignment.source=live", "name=live")
    assert "live features of own_encoder:patches" in live
    stored, other = folder / "results/repa", folder / "results/live"
    for name in ("loss", "alignment", "total"):
        assert logged(stored, name) == pytest.approx(logged(other, name), rel=1e-3)
    assert logged(stored, "alignment")[0] != logged(stored, "alignment")[-1]
    assert logged(stored, "loss")[0] == logged(folder / "results/first", "loss")[0]
    rows = ["model=tread_mamba", "model.head_dim=8", "model.attention_every=3", "train.steps=1", "name=rows"]
    assert "8 of 16 tokens in whole rows" in launch(folder, *REPA[:-1], *rows)
    assert -1 < logged(folder / "results/rows", "alignment")[0] < 1
    path = folder / "data/digits/train/index.json"
    before, index = path.read_text(), read_json(path)
    index["features"]["fingerprint"] = "0" * 64
    write_json(path, index)
    warning = "warning: own_encoder:patches is another encoder than the run was aligned with up to here"
    assert warning in launch(folder, *REPA, "train.steps=7") and warning not in text
    path.write_text(before)
    data = LatentDataset(path.parent, features="own_encoder:patches")
    read = [Loader(data, 0, 8, [slice(0, 8)], CPU, bare_from=end).batches(2)[0] for end in (3, 2)]  # from which step on
    assert read[0].features is not None and read[1].features is None
    assert torch.equal(read[0].stored, read[1].stored)


@pytest.mark.parametrize(
    "asked, training, gpu, expected",
    [
        ("auto", "bf16", True, "bf16"),
        ("auto", "fp32", True, "fp32"),
        ("auto", "bf16", False, "fp32"),  # a CPU, or a GPU that emulates bf16
        ("bf16", "fp32", False, "bf16"),
        ("fp32", "bf16", True, "fp32"),
    ],
)
def test_a_live_encoders_precision(monkeypatch, asked, training, gpu, expected):
    monkeypatch.setattr(alignment, "has_bf16", lambda device: gpu)
    assert Alignment(precision=asked).encoder_precision(training, CPU) == expected


@pytest.mark.slow
def test_a_run_older_than_the_encoders_precision_goes_on_in_fp32_unless_told(repa, monkeypatch):
    """As its record, which lacks the key, was made; today's auto would be bf16 on this "GPU"."""
    folder, _ = repa
    live = (*REPA[:-1], "alignment.source=live")
    monkeypatch.setattr(alignment, "has_bf16", lambda device: True)
    new = ("name=new", "train.precision=bf16", "train.steps=1")
    assert "live features of own_encoder:patches in bf16" in launch(folder, *live, *new)
    launch(folder, *live, "name=old", "train.steps=3")
    run = folder / "results/old"
    for path in (run / "run.json", run / "step_0000003/info.json"):
        tree = read_json(path)
        del (tree[0] if isinstance(tree, list) else tree)["config"]["alignment"]["precision"]
        write_json(path, tree)
    text = launch(folder, *live, "name=old", "train.steps=4", "train.precision=bf16")
    assert "live features of own_encoder:patches in fp32" in text and read_json(run / "run.json")[-1]["step"] == 3
    assert "settings stay as the run has them: alignment.precision fp32 (not auto); key=value changes one" in text
    text = launch(folder, *live, "name=old", "train.steps=5", "alignment.precision=bf16")
    assert "warning: alignment.precision was fp32, is bf16" in text and "own_encoder:patches in bf16" in text
    stored = launch(folder, *REPA[:-1], "name=stored", "train.steps=1", "alignment.precision=bf16")
    assert "alignment.precision" in stored and "without a live encoder of alignment=repa" in stored


def test_what_does_not_fit_is_named_before_training(repa):
    folder, _ = repa
    conftest.assert_refused(
        partial(launch, folder, "name=none"),
        ("alignment=repa", "alignment.encoder is null, but alignment=repa needs one"),
        (*REPA[:3], "model.patch_size=4", "features in .*digits/train have 4×4 tokens, but the network has 2×2"),
        (*REPA[:3], "alignment.source=live", "model.patch_size=1", "4×4.*8×8"),
        ("alignment=self", "alignment.teacher=-7", "alignment.teacher is -7"),
        ("alignment=self", "alignment.precision=fp16", "alignment.precision is 'fp16'"),
        ("alignment=self", "alignment.block=1", "alignment.blocks=[1,3]", r"\[1,3\] and alignment.block 1: name one"),
        ("alignment=self", "alignment.blocks=[]", "alignment.blocks is .* name one block or more"),
        ("alignment=self", "alignment.until=4", "alignment.fade=5", "alignment.fade is 5, but alignment.until 4"),
        ("alignment=none", "alignment.until=4", "alignment.until is 4, which belongs to alignment=repa or .*=self"),
        (*REPA[:3], "alignment.teacher=3", "alignment.teacher is 3, which belongs to alignment=self, not to .*=repa"),
        ("alignment.encoder=dinov2-b", "alignment.encoder is dinov2-b, which belongs to alignment=repa, not .*=none"),
    )
    assert not (folder / "results/none").exists()
