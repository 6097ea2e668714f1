"""The residual stream in bf16: in every network, of every block, and in what is sampled from a run.

The reference is the network in fp32."""

from dataclasses import replace

import pytest
import test_lightning
import test_mamba
import test_maskdit
import test_rwkv
import test_sprint
import test_text
import torch
from conftest import CPU, launch, opened, random_network
from modes import batch, drawn

from routing_module import Route
from tread.runtime.device import autocast

NETWORKS = {  # and a route
    "dit": (lambda: random_network(0, hidden_size=64, depth=6, num_heads=4), Route(1, 3)),
    "lightning": (lambda: test_lightning.tiny(depth=6, in_channels=4), Route(1, 3)),
    "text": (lambda: test_text.tiny(0.1, **test_text.ENCODER, depth=6), Route(1, 3)),
    "sprint": (lambda: test_sprint.tiny(std=0.1), Route(2, -3)),
    "maskdit": (test_maskdit.tiny, Route(0, -1, fp32="off")),
    "mamba": (test_mamba.network, Route(1, 3, select="row")),
    "rwkv": (test_rwkv.network, Route(1, 3, select="row")),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_block_gets_bf16_but_the_one_that_runs_in_fp32(name):
    """Outputs and gradients are those of fp32 to rounding; without autocast they are so bit for bit."""
    build, route = NETWORKS[name]
    network, types = build(), []
    x, t, y = batch(3, network.input_size)
    y = test_text.texts(network) if name == "text" else y
    for block in [*network.blocks, *getattr(network, "decoder_blocks", ())]:
        block.register_forward_pre_hook(lambda _, inputs: types.append(inputs[0].dtype))
    ends = ("off",) if name == "maskdit" else ("off", "end", "next")
    for routes in [(), *(drawn(replace(route, fp32=fp32)) for fp32 in ends)]:
        results = []
        for precision, residual in (("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "bf16")):
            network.residual = residual
            network.zero_grad(), types.clear()
            with autocast(CPU, precision):
                out = network(x, t, y, routes).float()
            out.square().mean().backward()
            results.append([out.detach(), torch.cat([p.grad.flatten() for p in network.parameters()])])
        exact, same, ours = results
        assert all(map(torch.equal, exact, same))
        for actual, expected in zip(ours, exact):
            assert (actual - expected).norm() / expected.norm() < 0.2
        last = routes[0][0].resolve(len(network.blocks)).fp32_block if routes else None
        assert [i for i, kind in enumerate(types) if kind != torch.bfloat16] == ([] if last is None else [last])


@pytest.mark.slow
def test_a_run_evaluates_and_is_sampled_as_it_trains(tmp_path):
    """Averages and what samplers open have the stream of the training; records without the key have fp32's."""
    launch(tmp_path, "train.precision=bf16", "train.residual=bf16", "train.steps=2", "every.sample=9")
    saved = opened(tmp_path / "results/digits-tread")
    assert saved.load(CPU).network.residual == "bf16"
    del saved.found.info["config"]["train"]["residual"]
    assert saved.load(CPU).network.residual == "fp32"
    told = launch(tmp_path, "train.residual=bf16", "train.steps=1", "name=fp32")  # auto is fp32 on a CPU
    assert "warning: train.residual=bf16 has no effect: the run computes in fp32" in told


def test_without_bf16_the_stream_has_none(read_config):
    assert read_config().train.residual == "fp32"
