"""Predicted costs against the sums that they are, by hand; what fits a memory; and the plan of a run."""

from dataclasses import replace

import plan
import pytest
import torch
from conftest import launch_door

from tread.checkpoints.network import build_network
from tread.training import settings
from tread.training.costs import (
    BANDWIDTH,
    DEVICES,
    LAUNCH,
    UPDATE_BYTES,
    Device,
    StepMemory,
    largest_micro_batch,
    memory,
    step_seconds,
    tokens_of_blocks,
)


@pytest.fixture
def xl(composed):
    """Settings and network of the paper's largest size, with its route."""
    cfg = settings.read(composed("experiment=imagenet256_xl2", "model=tread"))
    with torch.device("meta"):
        return cfg, build_network(cfg)


def test_a_step_is_the_sum_of_its_parts(xl):
    """By hand, XL/2 at 256 images: 28 blocks of 12·D² and 2·N·D multiply-adds a token, times 6; 179 bytes a token,
    channel and block, 280 for the ends; 44 a parameter. The parts add up, and the host is the least."""
    cfg, network = xl
    D, N, blocks, images = 1152, 256, 28, 256
    linear, mixing = blocks * (N * 12 * D**2 + 6 * D**2), blocks * 2 * N * N * D
    products = 6 * images * (linear / 0.6 + mixing / 0.13)
    moved = images * N * D * (179 * blocks + 280) + UPDATE_BYTES * 674_816_272
    for device in DEVICES.values():
        expected = products / device.products + moved / BANDWIDTH / device.bandwidth
        assert step_seconds(cfg, network, (), images, device) == pytest.approx(expected, rel=1e-3)
    endless = Device(1e12, 1e30, 1e30)
    assert step_seconds(cfg, network, (), images, endless) == pytest.approx(blocks * LAUNCH)
    routes = cfg.model.resolved_routes
    assert tokens_of_blocks(network, routes) == [256] * 2 + [128] * 23 + [256] * 3
    dense, routed = (step_seconds(cfg, network, kind, images, DEVICES["h200"]) for kind in ((), routes))
    assert 0.97 < dense / routed / (network.forward_flops() / network.forward_flops(routes)) < 1.03


def test_the_largest_micro_batch_is_a_divisor_that_fits():
    """5 GB, and 1 GB for each sample: 94% of 20 GB hold 13, of which 12 divides 24; of 6 GB not one."""
    few, more = (StepMemory(1, 1, 1, int(saved), int(5e9 + saved)) for saved in (1e9, 2e9))
    assert largest_micro_batch(few, more, 24, 20e9) == 12
    assert largest_micro_batch(few, more, 24, 6e9) == 0


def test_compiled_blocks_save_less_than_eager_ones(xl):
    """The compiled step's bytes lie below the traced ones of the eager network, and both grow with the batch."""
    cfg, network = xl
    small = replace(cfg, model=replace(cfg.model, depth=4, routes=()))
    with torch.device("meta"):
        network = build_network(small)
    (one, two), (eager, _) = (
        [memory(small, network, (), count, "bf16", compiled) for count in (64, 128)] for compiled in (True, False)
    )
    assert one.saved < eager.saved < 2 * one.saved and 1.8 < two.saved / one.saved < 2
    assert (one.weights, one.optimizer) == pytest.approx((eager.weights, eager.optimizer), rel=0.01)


def test_a_plan_says_what_a_run_takes(tmp_path):
    """XL/2 needs micro-batches of 128 on an H100 without its route; twice the devices take half the hours, but
    for the optimizer, which each of them runs."""
    words = ["experiment=imagenet256_xl2", "model=tread", "device=h100", "price=2"]
    said = [launch_door(plan.main, "plan", tmp_path, *words, f"devices={count}") for count in (1, 2)]
    rows = [{line[:34].strip(): line[34:].split() for line in text.splitlines()} for text in said]
    assert rows[0]["largest micro-batch a device"] == ["128", "of", "256", "256", "of", "256"]
    (alone, routed), (both, _) = ([float(hours) for hours in row["hours"]] for row in rows)
    assert both == pytest.approx(alone / 2, rel=0.03) and routed < alone / 1.6
    assert float(rows[0]["price"][0].replace(",", "")) == pytest.approx(2 * alone, abs=1)
    assert "674,816,272 parameters" in said[0] and not any(tmp_path.iterdir())


def test_a_plan_measures_this_machine(tmp_path):
    words = ["dataset=digits", "dataset.path=data", "dataset.channels=1", "dataset.size=8", "dataset.num_classes=10"]
    text = launch_door(plan.main, "plan", tmp_path, *words, "model=tread", "device=this", "train.batch_size=8")
    assert "8 of 8" in text and " cpu " in text


@pytest.mark.parametrize(
    "words, said",
    [
        (["device=h300"], "device is 'h300', but must be h200, h100, a100, 4090 or this"),
        (["devices=3"], "train.batch_size 256 is not a multiple of devices 3"),
        (["price=-1"], "price is -1, but must be positive"),
    ],
)
def test_what_can_not_be_planned_is_refused(tmp_path, words, said):
    with pytest.raises(SystemExit, match=said):
        launch_door(plan.main, "plan", tmp_path, "experiment=imagenet256_s2", "model=tread", *words)
