"""Compiled blocks: as many graphs as kinds of calls, the same numbers, and a way out where no compiler is.

The reference is the network that is not compiled."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import CPU, launch, logged, raising, random_network, records
from forked import run_python
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch import config as functorch
from torch._functorch.aot_autograd import make_boxed_func
from torch.testing import assert_close

from routing_module import Route, draw_ids
from tread.checkpoints.network import build_network
from tread.diffusion.edm import EDM
from tread.diffusion.guidance import Guidance, Schedule
from tread.diffusion.sampling import Model, Sampler, draw
from tread.models import ssd, wkv
from tread.models.cost_constants import VALUE_BYTES, block_bytes
from tread.runtime import compiling
from tread.runtime.device import autocast
from tread.training import failures, settings, start
from tread.training.costs import blank_loss

GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counted(*networks, backend="aot_eager"):
    counter = CompileCounterWithBackend(backend)
    for network in networks:
        compiling.compile_blocks(network.blocks, counter)
    return counter


@pytest.mark.slow
def test_a_graph_for_each_kind_of_call_however_deep_the_network():
    """Kinds: all tokens and half of them with gradients, all without, in fp32 and bf16; a fp32 block under bf16."""
    network = random_network(0, hidden_size=32, depth=5, num_heads=2)
    eager, averaged = copy.deepcopy(network), copy.deepcopy(network).requires_grad_(False).eval()
    names = list(network.state_dict())
    counter = counted(network, averaged, backend="eager")
    assert list(network.state_dict()) == names == list(copy.deepcopy(network).state_dict())
    x, t, y = torch.randn(4, 4, 8, 8), torch.zeros(4), torch.arange(4)
    for repeat in range(2):
        for precision, fp32, expected in (("fp32", "off", 3), ("bf16", "off", 6), ("bf16", "end", 6)):
            routes = [(Route(1, 3, 0.5, fp32), draw_ids(torch.rand(4, 16), 0.5))]
            with autocast(CPU, precision):
                pairs = [(model(x, t, y), model(x, t, y, routes)) for model in (network, eager)]
                with torch.no_grad():
                    averaged(x, t, y)
            for ours, theirs in zip(*pairs):
                assert_close(ours, theirs, rtol=1e-4, atol=0.02 if precision == "bf16" else 1e-5)
            assert counter.frame_count == (6 if repeat else expected)


def test_gradients_are_those_of_the_plain_network():
    plain = random_network(1, hidden_size=32, depth=6, num_heads=2)
    compiled, recomputed, both = (copy.deepcopy(plain) for _ in range(3))
    counted(compiled, both)
    recomputed.activation_checkpointing = both.activation_checkpointing = True
    x, t, y = torch.randn(4, 4, 8, 8), torch.zeros(4), torch.arange(4)
    routes = [(Route(1, 3, 0.5), draw_ids(torch.rand(4, 16), 0.5))]
    for network in (plain, compiled, recomputed, both):
        network(x, t, y, routes).square().sum().backward()
    for name, parameter in plain.named_parameters():
        gradients = [network.get_parameter(name).grad for network in (compiled, recomputed, both)]
        assert torch.equal(gradients[1], parameter.grad)  # recomputation sees the same ids
        for gradient in gradients:
            assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-4)


def test_a_guidance_has_a_graph_for_each_of_its_ratios():
    assert Guidance("sparse", 2.0, Schedule("linear", 0.0, 0.5), 0.75).scheduled  # which stays eager
    guidance = Guidance("sparse", 2.0, 0.25, 0.75)
    assert not guidance.scheduled
    network = random_network(0, hidden_size=32, depth=6, num_heads=2).eval().requires_grad_(False)
    eager, counter = copy.deepcopy(network), counted(network, backend="eager")
    sampler = Sampler(steps=2, batch_size=4, guidance=guidance)
    ours, theirs = (
        torch.cat(list(draw(Model(EDM(), each, (Route(1, 3),)), range(6), torch.arange(6), sampler)))
        for each in (network, eager)
    )
    assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 3  # all tokens, three quarters, a quarter; the short batch is padded


slow = partial(pytest.param, marks=pytest.mark.slow)
SIZE = "dataset.size=32"


@pytest.fixture
def built(composed):
    """A function from model and sizes to the settings and network of a run on 4 channels, with texts of 77 words."""

    def build(model, *words):
        data = ["dataset=folder", "dataset.path=x", "dataset.channels=4", "dataset.num_classes=10", "model.num_heads=2"]
        text = ["text.encoder=clip-l", "text.tokens=77", "text.width=768", "text.pooled=768"] * ("text" in model)
        cfg = settings.read(composed(*data, *text, f"model={model}", *words))
        return cfg, build_network(cfg)

    return build


@pytest.mark.parametrize(
    "words, graphs",
    [
        (["tread"], 3),
        slow(["tread_lightning", "model.routes.0.fp32=end"], 3),
        slow(["tread_text"], 3),
        slow(["tread_rwkv"], 3),
        slow(["tread_mamba"], 3),
        slow(["tread_mamba", "model.attention_every=4"], 5),
        (["sprint"], 2),
        slow(["maskdit"], 3),
    ],
)
def test_a_dense_and_a_routed_step_have_few_graphs(built, words, graphs):
    """In bf16, whose routes end in fp32: blocks on all tokens, on kept ones, and the last of these. Of SPRINT's routes
    none ends in fp32; MaskDiT's decoder is a block of another kind. A hybrid has two kinds of blocks. Embedding and
    last layer are not counted."""
    cfg, network = built(*words, "dataset.size=16", "model.hidden_size=64", "model.depth=8")
    counter = counted(backend="eager")
    ends = (network.x_embedder, network.final_layer)
    compiling.compile_blocks([part for part in network.compiled() if part not in ends], counter)
    for routes in ((), cfg.model.resolved_routes) * 2:
        blank_loss(cfg, network, routes, 2, CPU, "bf16").backward()
    assert counter.frame_count == graphs


class Lowered(Exception):
    pass


def lowered(built, model: str, budget: float, width: int = 128, residual: str = "fp32") -> tuple[float, float, int]:
    """Bytes for each token and channel that a block saves for its backward pass, and that its fused kernels read and
    write, from the difference of two batches; and the number of products. Inductor lowers and fuses for the CPU, and
    writes no code; what it was given runs as it is."""
    from torch._inductor import compile_fx, graph, ir, scheduler  # imported here because they take seconds
    from torch._inductor import config as inductor

    if not hasattr(graph.GraphLowering, "_update_scheduler") or torch.__version__ < "2.13":
        pytest.skip("the numbers are of torch 2.13's fusions")
    found = []

    def count(lowering):
        lowering.init_wrapper_code()
        lowering._update_scheduler()
        for node in lowering.scheduler.nodes:
            if isinstance(node, scheduler.ExternKernelSchedulerNode):
                found[-1][2] += not isinstance(node.node, ir.MultiOutput)
            elif not isinstance(node, scheduler.NopKernelSchedulerNode):
                found[-1][1] += node.get_read_write_buffers_sizes()
        raise Lowered

    def lower(module, inputs, **more):
        as_given = copy.deepcopy(module)
        if not more.get("is_backward"):
            kept = [node.meta["val"] for node in module.graph.output_node().args[0][1:] if "val" in node.meta]
            storages = {part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in kept}
            found[-1][0] += sum(storages.values())
        with pytest.raises(Exception, match="Lowered"):
            compile_fx.compile_fx_inner(module, inputs, **more)
        return make_boxed_func(as_given.forward)

    for images in (2, 4):
        torch._dynamo.reset()
        found.append([0, 0, 0])
        cfg, network = built(model, SIZE, f"model.hidden_size={width}", "model.depth=2")
        network.residual = residual
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(graph.GraphLowering, "codegen", count)
            for scan in (ssd, wkv):
                patch.setitem(scan.CHUNKS, "cpu", scan.CHUNKS["cuda"])
            with inductor.patch(force_disable_caches=True):
                backend = partial(compile_fx.compile_fx, inner_compile=lower)
                compiling.compile_blocks(network.blocks, backend, saving=budget == compiling.BUDGET)
                blank_loss(cfg, network, (), images, CPU, "bf16").backward()
    (saved, moved, _), (more_saved, more_moved, products) = found
    each = 2 * network.num_tokens * network.hidden_size
    return (more_saved - saved) / each, (more_moved - moved) / each, products


@pytest.mark.parametrize(
    "model, width, products",
    [
        slow("dit", 128, 17),
        slow("lightning", 128, 17),
        slow("dit_text", 128, 28),
        slow("lightning_text", 128, 28),
        slow("rwkv", 128, 35),
        slow("mamba", 128, 36),
        slow("mamba", 384, 36),
    ],
)
def test_a_compiled_block_moves_no_more_bytes_than_planned(built, model, width, products):
    """By inductor, beside the constants that plans are made of, within 2%; a budget computes no product again."""
    ways = ((1.0, width), (compiling.BUDGET, width), (1.0, width, "bf16"))
    (saved, moved, ours), (less, _, same), (_, in_bf16, _) = (lowered(built, model, *way) for way in ways)
    assert (saved, moved, less, in_bf16) == pytest.approx(block_bytes(built(model, SIZE)[0].model, width), rel=0.02)
    assert ours == same == products


OTHER_OPTIONS = [
    ("dit", "model.mlp_ratio=8"),
    ("lightning", "model.qk_norm=true"),
    ("mamba", "model.directions=4"),
    ("mamba", "model.expand=1"),
    ("mamba", "model.state=128"),
]


@pytest.mark.slow
@pytest.mark.parametrize("model, word", OTHER_OPTIONS)
def test_options_change_a_blocks_bytes_as_planned(built, model, word):
    """Within 10% of inductor's, where the usual options' bytes are off by 12 to 50%."""
    saved, moved, _ = lowered(lambda *words: built(*words, word), model, 1.0)
    usual, planned = (block_bytes(built(model, SIZE, *words)[0].model, 128) for words in ((), (word,)))
    assert (saved, moved) == pytest.approx(planned[:2], rel=0.1)
    assert saved != pytest.approx(usual.saved, rel=0.1)


@pytest.mark.slow
def test_a_text_blocks_28th_product_is_the_gradient_of_its_texts_projection(built):
    def frozen(*words):
        cfg, network = built(*words)
        network.y_embedder.requires_grad_(False)
        return cfg, network

    assert lowered(frozen, "dit_text", 1.0)[2] == 27


@pytest.mark.slow
def test_mixing_the_first_blocks_values_keeps_and_moves_as_planned(built):
    """Beside a plain block's bytes, by inductor. A first and a later block are two graphs, and both count what the
    first hands on: 2 bytes, of which a network keeps one copy. Handing on moves 6."""

    def mixing(*words):
        return built(*words, "model.value_residual=true")

    further = []
    for way in ((1.0,), (compiling.BUDGET,), (1.0, 128, "bf16")):
        (saved, moved, _), (plain_saved, plain_moved, _) = (lowered(how, "dit", *way) for how in (mixing, built))
        further.append((saved - 2 * plain_saved - 2 * 2, moved - 2 * plain_moved - 6))
    found = (*further[0], further[1][0], further[2][1])
    assert found == pytest.approx(VALUE_BYTES, abs=0.5)
    pairs = zip(*(block_bytes(how("dit", SIZE)[0].model, 128) for how in (mixing, built)))
    assert [more - less for more, less in pairs] == pytest.approx(VALUE_BYTES)


DDP = """
import os, torch
from test_compiling import counted, random_network

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
network = random_network(0, hidden_size=768, depth=2, num_heads=2)
counter = counted(network, backend="eager")
wrapped = torch.nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True)
wrapped(torch.randn(1, 4, 8, 8), torch.zeros(1), torch.zeros(1, dtype=torch.int64)).square().sum().backward()
print(counter.frame_count, "graphs", flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_a_block_in_ddp_is_one_graph():
    """Dynamo would cut it at the bounds of DDP's buckets, which are 1 MB and 25 MB. In a process that ends without
    tidying up: PyTorch can hang where it deletes gloo's threads while it holds Python's lock."""
    done = run_python("-c", DDP, cwd=Path(__file__).parent)
    assert done.stdout == "1 graphs\n", done.stdout + done.stderr


BROKEN = aot_autograd(
    fw_compiler=lambda module, inputs: make_boxed_func(module.forward),
    bw_compiler=raising(RuntimeError("no such register")),
)


def test_settings_say_when(read_config, monkeypatch):
    monkeypatch.setattr(compiling, "why_not", lambda device: None)
    cases = (("auto", CPU, False), (True, CPU, True), ("auto", GPU, True), (False, GPU, False))
    for value, device, wanted in cases:
        assert compiling.settle_compile(value, device) == (wanted, None)
    with pytest.raises(ValueError, match="train.compile is 'always', but must be auto, true or false"):
        read_config("train.compile=always")


def test_without_a_compiler_a_run_goes_on_with_one_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", raising(RuntimeError("no working C++ compiler\nsecond line")))
    text = launch(tmp_path, "train.compile=true", "train.steps=2", "every.sample=2", "eval.points=8")
    assert text.count("running without torch.compile, which fails here: RuntimeError: no working C++ compiler") == 1
    assert logged(tmp_path / "results/digits-tread", "loss", "step") == [1, 2]


@pytest.mark.slow
def test_a_block_whose_backward_pass_does_not_compile_runs_as_it_is(tmp_path, monkeypatch):
    """The layer that is tried first does; the run gives the uncompiled one's numbers. Reference: the eager run."""
    monkeypatch.setattr(start, "compile_blocks", partial(compiling.compile_blocks, backend=BROKEN))
    monkeypatch.setattr(compiling, "why_not", lambda device: None)
    options = ["train.steps=2", "every.sample=2", "eval.points=8"]
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    try:
        text = launch(tmp_path / "a", *options, "train.compile=true")
    finally:
        torch.compiler.set_stance("default")
    launch(tmp_path / "b", *options)
    assert text.count("running without torch.compile, which fails here: ") == 1 and "no such register" in text
    assert logged(tmp_path / "a/results/digits-tread", "loss") == logged(tmp_path / "b/results/digits-tread", "loss")


def test_a_budget_without_compiled_blocks_is_warned_of(tmp_path):
    text = launch(tmp_path, "train.memory=budget", "train.steps=1", "every.sample=2", "eval.points=8")
    assert text.count("warning: train.memory=budget needs compiled blocks") == 1 and "  memory    budget\n" in text


def test_memory_that_does_not_suffice_says_nothing_of_the_compiler(monkeypatch):
    assert compiling.why_failing(raising(torch.OutOfMemoryError("CUDA out of memory"))) is None
    assert compiling.why_failing(raising(ValueError("one\ntwo"))) == "ValueError: one"


@pytest.mark.slow
@pytest.mark.parametrize("precision, graphs", [("fp32", 10), ("bf16", 11)])
def test_a_run_compiles_no_more_than_its_kinds_of_steps(tmp_path, monkeypatch, precision, graphs):
    """Routed and, after routes_until, dense steps, evaluation with a short batch, grids: by the real compiler.

    Graphs: all tokens and kept tokens with gradients, evaluation, sampling; in bf16 the route's last block in fp32; of
    embedding and last layer training, evaluation, sampling.
    """
    counters = []

    def counting(blocks, saving):
        counters.append(CompileCounterWithBackend("inductor"))
        compile_blocks(blocks, counters[-1])

    compile_blocks = compiling.compile_blocks
    monkeypatch.setattr(start, "compile_blocks", counting)
    options = ["train.steps=8", "train.routes_until=5", "eval.points=40", "eval.batch_size=16", "every.sample=4"]
    options += [f"train.precision={precision}", "model.routes.0.start=1", "model.routes.0.end=3"]
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    text = launch(tmp_path / "a", *options, "train.compile=true")
    assert "of which the first step took" in text and "warning" not in text
    assert [counter.frame_count for counter in counters] == [graphs]
    launch(tmp_path / "b", *options)
    ours, theirs = (records(tmp_path / name / "results/digits-tread") for name in "ab")
    for found, expected in zip(ours, theirs, strict=True):
        assert found == pytest.approx(expected, rel=1e-4 if precision == "fp32" else 0.05)


@pytest.mark.gpu
def test_a_training_step_on_a_gpu_waits_for_nothing_and_uses_fused_attention(tmp_path, monkeypatch):
    """PyTorch's own watch over synchronising calls, and the operators that its profiler saw."""
    training_step, steps = failures.training_step, []

    def watched(run):
        steps.append(run.step)
        if run.step < 4:  # the first ones compile
            return training_step(run)
        torch.cuda.set_sync_debug_mode("error")
        try:
            if run.step > 4:
                return training_step(run)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                training_step(run)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        names = {event.key for event in profile.key_averages() if "attention" in event.key}
        fused = [name for name in names if "flash_attention" in name or "cudnn_attention" in name]  # as torch sees fit
        assert fused and not any("math" in name for name in names), names

    monkeypatch.setattr(failures, "training_step", watched)
    launch(
        tmp_path, "train.steps=8", "train.precision=bf16", "model.hidden_size=128", "model.routes.0.fp32=off",
        "train.micro_batch_size=4", "optim.clip_norm=1", "ema.power=[0.1]", "train.cuda_graphs=false",
    )  # fmt: skip
    assert steps == list(range(8))


def test_blocks_compiled_later_save_memory_only_if_asked():
    for saving, budget in ((True, compiling.BUDGET), (False, 1.0)):
        compiling.compile_blocks([], saving=saving)
        assert functorch.activation_memory_budget == budget
