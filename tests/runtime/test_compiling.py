"""Compiled blocks: as many graphs as kinds of calls, the same numbers, and a way out where no compiler is.

The reference is the network that is not compiled."""

import copy
from pathlib import Path

import pytest
import torch
from conftest import CPU, launch, logged, raising, random_network, records
from forked import run_python
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

from routing_module import Route, draw_ids
from tread.diffusion.edm import EDM
from tread.diffusion.guidance import Guidance, Schedule
from tread.diffusion.sampling import Model, Sampler, draw
from tread.runtime import compiling
from tread.runtime.device import autocast
from tread.training import failures, start

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
@pytest.mark.parametrize("precision, graphs", [("fp32", 10), ("bf16", 11)])
def test_a_run_compiles_no_more_than_its_kinds_of_steps(tmp_path, monkeypatch, precision, graphs):
    """Routed and, after routes_until, dense steps, evaluation with a short batch, grids: by the real compiler.

    Graphs: all tokens and kept tokens with gradients, evaluation, sampling; in bf16 the route's last block in fp32; of
    embedding and last layer training, evaluation, sampling.
    """
    counters = []

    def counting(blocks):
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
        "train.micro_batch_size=4", "optim.clip_norm=1", "ema.power=[0.1]",
    )  # fmt: skip
    assert steps == list(range(8))
