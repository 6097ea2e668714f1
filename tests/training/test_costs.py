"""Predicted costs against the sums that they are, by hand; what fits a memory; and the plan of a run."""

import json
import re
from dataclasses import replace
from functools import partial

import plan
import pytest
import torch
from conftest import ROOT, launch_door
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tread.checkpoints.network import build_network
from tread.encoders.vision import LAYERS, WIDTHS, Encoder, dinov2_cost
from tread.models.backbone import count_parameters
from tread.models.cost_constants import DEVICES, PREDICTED, UPDATE_BYTES, Device, blocks_run, measured_constants
from tread.reports.summary import disk
from tread.training import costs, settings
from tread.training.alignment import Alignment
from tread.training.costs import kinds_to_come, largest_micro_batch, memory, plan_memory, step_seconds
from tread.training.draws import active_routes

DENSE = ((), False)  # a kind of steps: without routes, without alignment
BANDWIDTH, LAUNCH = PREDICTED.bandwidth, PREDICTED.launch


@pytest.fixture
def xl(composed):
    """Settings and network of the paper's largest size, with its route."""
    cfg = settings.read(composed("experiment=imagenet256_xl2", "model=tread"))
    with torch.device("meta"):
        return cfg, build_network(cfg)


def test_a_step_is_the_sum_of_its_parts(xl):
    """By hand, XL/2 at 256 images: 28 blocks of 12·D² and 2·N·D multiply-adds a token, times 6; 179 bytes a token,
    channel and block, 41 for the ends; 44 a parameter. The parts add up, and the host is the least."""
    cfg, network = xl
    D, N, blocks, images = 1152, 256, 28, 256
    linear, mixing = blocks * (N * 12 * D**2 + 6 * D**2), blocks * 2 * N * N * D
    products = 6 * images * (linear / 0.6 + mixing / 0.13)
    moved = images * N * D * (179 * blocks + 41) + UPDATE_BYTES * 674_816_272
    for device in DEVICES.values():
        expected = products / device.products + moved / BANDWIDTH / device.bandwidth
        assert step_seconds(cfg, network, (), images, device) == pytest.approx(expected, rel=1e-3)
        less = images * N * D * (179 - 137) * blocks / BANDWIDTH / device.bandwidth
        bf16 = replace(cfg, train=replace(cfg.train, residual="bf16"))
        assert step_seconds(bf16, network, (), images, device) == pytest.approx(expected - less, rel=1e-3)
    endless = Device(1e12, 1e30, 1e30)
    assert step_seconds(cfg, network, (), images, endless) == pytest.approx(blocks * LAUNCH)
    routes = cfg.model.resolved_routes
    assert [count for _, count, _ in blocks_run(network, routes)] == [256] * 2 + [128] * 23 + [256] * 3
    dense, routed = (step_seconds(cfg, network, kind, images, DEVICES["h200"]) for kind in ((), routes))
    assert 0.97 < dense / routed / (network.forward_flops() / network.forward_flops(routes)) < 1.03


def test_muons_iterations_count(xl):
    cfg, network = xl

    def seconds(**optim):
        return step_seconds(replace(cfg, optim=replace(cfg.optim, **optim)), network, (), 256, DEVICES["h200"])

    muon = {"name": "muon", "muon_lr": 1e-3}
    five, ten = (seconds(**muon, options=options) - seconds() for options in (None, {"steps": 10}))
    assert 0 < 2 * five == pytest.approx(ten)


def test_a_decoder_counts_with_its_own_width(composed):
    """MaskDiT-XL's 8 blocks of width 512 on all tokens, by hand: bytes kept in bf16, and read and written."""
    cfg = settings.read(composed("experiment=imagenet256_xl2", "model=maskdit"))
    with torch.device("meta"):
        network = build_network(cfg)
    blocks, ends = 28 * 128 * 1152 + 8 * 256 * 512, 256 * 1152
    kept = memory(cfg, network, cfg.model.resolved_routes, 4, "bf16", compiled=True)
    assert kept.saved == pytest.approx(kept.weights / 2 + 4 * (36.2 * blocks + 30 * ends))
    slow = Device(1e12, 1e30, 1e9)
    moved = 4 * (179 * blocks + 41 * ends) + UPDATE_BYTES * count_parameters(network)
    found = step_seconds(cfg, network, cfg.model.resolved_routes, 4, slow)
    assert found == pytest.approx(moved / BANDWIDTH / 1e9)


def test_measured_constants_take_the_predicted_ones_places(tmp_path, monkeypatch):
    """By hand; what failed, or lacks a part, stays predicted. A plan names them and the file."""
    h200 = DEVICES["h200"]
    machine = {f"products of {size}, forward": {"measured": 494.5} for size in ("S", "B", "L", "XL")}
    machine |= {f"attention, heads of {w}, 256 tokens, flash": {"measured": 1, "tflops": 98.9} for w in (64, 72)}
    machine |= {"copy, read and written": {"measured": 2400.0}}
    host = {"S's depth, dense, compiled": {"measured": 6.0, "ms_a_block": 0.5}}
    result = {"machine": {"rows": machine}, "host": {"rows": host}}
    (found, reached), *rest = measured_constants(result, h200)
    assert found == (384, 768, 1024, 1152) and reached == pytest.approx([0.5] * 4)
    assert rest == [{64: 0.1, 72: 0.1}, 0.5, 0.5e-3]
    failed = ("products of L", "attention, heads of 72")
    result["machine"]["rows"] = {name: {} if name.startswith(failed) else row for name, row in machine.items()}
    expected = PREDICTED._replace(bandwidth=0.5, launch=0.5e-3)
    assert measured_constants(result, h200) == expected and measured_constants({}, h200) == PREDICTED
    monkeypatch.setattr(plan, "RESULTS", tmp_path)
    (tmp_path / "gpu_h200.json").write_text(json.dumps(result))
    words = ["experiment=imagenet256_s2", "model=tread", "devices=128"]
    said = [launch_door(plan.main, "plan", tmp_path, *words, f"device={device}") for device in ("h200", "h100")]
    assert "times: bandwidth, launch as measured in gpu_h200.json\n" in said[0] and "measured" not in said[1]
    assert f"{256 / (12 * 0.5e-3):,.0f}" in said[0]  # which is bound by the host


def test_the_largest_micro_batch_is_a_divisor_that_fits():
    """5 GB, and 1 GB for each sample: 94% of 20 GB hold 13, of which 12 divides 24; of 6 GB not one."""
    few, more = (costs.StepMemory(1, 1, 1, int(saved), int(5e9 + saved)) for saved in (1e9, 2e9))
    assert largest_micro_batch(few, more, 24, 20e9) == 12
    assert largest_micro_batch(few, more, 24, 6e9) == 0


def test_compiled_blocks_save_less_than_eager_ones(xl):
    """The compiled step's bytes lie below the traced ones of the eager network, and both grow with the batch."""
    cfg, network = xl
    small = replace(cfg, model=replace(cfg.model, depth=4, routes=()))
    with torch.device("meta"):
        network = build_network(small)
    one, two, eager = (memory(small, network, (), n, "bf16", how) for n, how in ((64, True), (128, True), (64, False)))
    assert one.saved < eager.saved < 2 * one.saved and 1.8 < two.saved / one.saved < 2
    assert (one.weights, one.optimizer) == pytest.approx((eager.weights, eager.optimizer), rel=0.01)


def test_a_plan_says_what_a_run_takes(tmp_path, monkeypatch):
    """XL/2 needs micro-batches of 128 on an H100 without its route, unless it saves memory; twice the devices take half
    the hours, but for the optimizer, which each of them runs."""
    words = ["experiment=imagenet256_xl2", "model=tread", "device=h100", "price=2"]
    said = [launch_door(plan.main, "plan", tmp_path, *words, f"devices={count}") for count in (1, 2)]
    rows = [{line[:34].strip(): line[34:].split() for line in text.splitlines()} for text in said]
    assert rows[0]["largest micro-batch a device"] == ["256", "of", "256", "256", "of", "256"]
    assert rows[0]["by train.memory"] == ["budget", "plain"]
    plain = launch_door(plan.main, "plan", tmp_path, *words, "train.memory=plain")
    assert re.search(r"largest micro-batch a device +128 of 256 +256 of 256", plain)
    (alone, routed), (both, _) = ([float(hours) for hours in row["hours"]] for row in rows)
    assert both == pytest.approx(alone / 2, rel=0.03) and routed < alone / 1.6
    assert float(rows[0]["price"][0].replace(",", "")) == pytest.approx(2 * alone, abs=1)
    assert "674,816,272 parameters" in said[0] and not any(tmp_path.iterdir())
    monkeypatch.setattr(costs, "largest_micro_batch", lambda *given: 0)  # asked where not all fit: without a route
    text = launch_door(plan.main, "plan", tmp_path, *words, "train.memory=plain")
    assert re.search(r"micro-batch a device +none fits +256 of 256\n(?s:.*)\ndevice-hours +– +[\d,.]+\n", text)


def test_a_plan_counts_launches_where_steps_are_no_graphs(tmp_path):
    """S/2 on an H200 as measured: 12 blocks of 2.856 ms, longer than 32 images take a GPU, dense or routed."""
    words, speeds = ("experiment=imagenet256_s2", "model=tread"), []
    for more in (("devices=1",), ("devices=8",), ("devices=8", "train.cuda_graphs=true")):
        text = launch_door(plan.main, "plan", tmp_path, *words, *more)
        (line,) = (line for line in text.splitlines() if line.startswith("images/s"))
        speeds.append([float(each.replace(",", "")) for each in line.split()[1:]])
    alone, launched, graphed = speeds
    assert launched == [pytest.approx(256 / 0.03427, rel=0.01)] * 2
    text = launch_door(plan.main, "plan", tmp_path, *words, "devices=8", "train.cuda_graphs=true", "optim.name=sgd")
    assert float(re.search(r"images/s +([\d,]+)", text)[1].replace(",", "")) == launched[0]  # no graphs of SGD's steps
    assert 1.3 < alone[1] / alone[0] < 1.5
    assert all(0.85 < each / (8 * one) < 1 for each, one in zip(graphed, alone))  # each GPU runs all of the update


def test_a_plan_counts_a_live_encoder(tmp_path):
    """DINOv2-B on pictures of 256×256 takes 46 GFLOP; weights of 340 MB; per picture about 8 MB while it runs."""
    words = ["experiment=imagenet256_b2", "model=dit", "alignment=repa", "alignment.source=live"]
    said = launch_door(plan.main, "plan", tmp_path, *words, "alignment.encoder=dinov2-b")
    stored = launch_door(plan.main, "plan", tmp_path, *words, "alignment.encoder=dinov2-b", "alignment.source=stored")
    rows, other = ({line[:34].strip(): line[34:].split() for line in text.splitlines()} for text in (said, stored))
    assert "live encoder" in rows and "live encoder" not in other
    assert float(rows["FLOPs an image"][0]) - float(other["FLOPs an image"][0]) == pytest.approx(46e9, rel=0.03)
    assert float(rows["hours"][0]) > float(other["hours"][0])


@pytest.mark.parametrize("name", ["dinov2-s", pytest.param("dinov2-g", marks=pytest.mark.slow)])
def test_the_cost_of_dinov2_is_that_of_transformers_model(name, monkeypatch):
    """Its first layer, by torch's counter."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setitem(LAYERS, name, 1)
    sizes = {"hidden_size": WIDTHS[name], "num_hidden_layers": 1, "num_attention_heads": WIDTHS[name] // 64}
    config = transformers.Dinov2Config(**sizes, use_swiglu_ffn=name == "dinov2-g", image_size=518, patch_size=14)
    network = transformers.Dinov2Model(config).eval()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        network(torch.zeros(1, 3, 224, 224))
    cost = dinov2_cost(name, 256)
    assert cost == (256, WIDTHS[name], counter.get_total_flops())
    assert 12 * WIDTHS[name] ** 2 == pytest.approx(count_parameters(network.encoder), rel=0.005)


def test_an_open_encoder_is_traced_on_a_picture(composed):
    """A layer of 3×8 weights and its output of a picture of 16×16: 8 channels in fp32, beside what casts it to fp32."""
    layer = torch.nn.Conv2d(3, 8, 1, bias=False)
    encoder = Encoder("own", partial(run_layer, layer), torch.device("cpu"), None, "")
    words = ["alignment=repa", "alignment.source=live", "alignment.encoder=own:run", "dataset.path=x"]
    words += ["dataset.channels=3", "dataset.size=16", "dataset.num_classes=10", "dataset=folder"]
    cfg = settings.read(composed(*words))
    traced = [costs.live_bytes(cfg, images, encoder) for images in (0, 1, 2)]
    assert traced[0] == 4 * 3 * 8 and traced[2] - traced[1] == traced[1] - traced[0]
    assert 4 * 256 * (3 + 8) <= traced[1] - traced[0] <= 4 * 256 * (3 + 8) + 3 * 256
    larger = [costs.live_bytes(cfg, images, encoder, 32) for images in (0, 1)]  # pictures as the dataset keeps them
    assert larger[1] - larger[0] == pytest.approx(4 * (traced[1] - traced[0]), rel=0.05)

    wide = torch.nn.Linear(3, 4096, bias=False)  # uses a view of its weights, 48 kB; a picture's output has 16 kB
    encoder = Encoder("own", partial(run_wide, wide), torch.device("cpu"), None, "")
    each = costs.live_bytes(cfg, 2, encoder) - costs.live_bytes(cfg, 1, encoder)
    assert 4 * 4096 <= each <= 4 * (4096 + 3 + 2 * 256 * 3)
    half = replace(encoder, precision="bf16")
    each = costs.live_bytes(cfg, 2, half) - costs.live_bytes(cfg, 1, half)
    assert 6 * 4096 <= each <= 6 * 4096 + 4 * (3 + 2 * 256 * 3)  # its output in bf16, and in fp32


def run_layer(layer, pictures):
    return layer(pictures.float()).flatten(2).transpose(1, 2)


def run_wide(layer, pictures):
    return layer(pictures.float().mean((2, 3)))[:, None]


GB = 10**9


@pytest.mark.parametrize(
    "room, how, micro",
    [(141, "plain", 256), (80, "budget", 256), (40, "checkpointing", 256), (24, "checkpointing", 128)],
)
def test_memory_is_saved_as_far_as_a_device_needs_it(xl, room, how, micro):
    """XL/2 at 256 images: 91 GB, 65 by a budget; where nothing fits, a warning names the micro-batch that would."""
    cfg, network = xl
    plan = plan_memory(cfg, network, [(cfg.model.resolved_routes, False), DENSE], 256, room * GB, "bf16", True)
    assert plan.how == how and plan.said.startswith(f"{how}, predicted ")
    assert (plan.warning is None) == (micro == 256) and (micro == 256 or f"micro_batch_size={micro} " in plan.warning)
    routed = plan_memory(cfg, network, [(cfg.model.resolved_routes, False)], 256, room * GB, "bf16", True)
    assert routed.how != "budget"  # which it needs for steps without its route alone
    asked = replace(cfg, train=replace(cfg.train, memory="plain"))
    assert plan_memory(asked, network, [DENSE], 256, room * GB, "bf16", True).how == "plain"
    assert "nor would a single one" in plan_memory(cfg, network, [DENSE], 256, 8 * GB, "bf16", True).warning


@pytest.mark.slow
def test_an_eager_network_has_no_budget(xl):
    """Traced: plain, or computed again."""
    cfg, _ = xl
    small = replace(cfg, model=replace(cfg.model, depth=6, routes=()))
    with torch.device("meta"):
        network = build_network(small)
    plain = plan_memory(small, network, [DENSE], 32, 100 * GB, "bf16", False)
    assert plain.how == "plain"
    assert plan_memory(small, network, [DENSE], 32, 4 * GB, "bf16", False).how == "checkpointing"


def test_an_uncompiled_step_keeps_what_frozen_weights_need(composed):
    """LoRA's averages and optimizer are of the adapters, compiled or not."""
    pytest.importorskip("peft")
    cfg = settings.read(composed("model=dit", "lora.rank=2", "init_from=x"))
    eager, compiled = (memory(cfg, costs.blank_network(cfg), (), 1, "fp32", how) for how in (False, True))
    assert (eager.averages, eager.optimizer) == (compiled.averages, compiled.optimizer)
    assert eager.peak > eager.weights + eager.averages + eager.optimizer + eager.saved


def test_kinds_of_steps_to_come(composed):
    """The present one, a schedule's ends, and the dense one after the routes; none is counted twice or looked back."""
    words = ["experiment=imagenet256_s2", "model=tread", "train.steps=100", "train.routes_until=80"]
    cfg = settings.read(composed(*words))
    routes = cfg.model.resolved_routes
    assert kinds_to_come(cfg, range(0, 100)) == [(routes, False), DENSE]
    aligned = replace(cfg, alignment=Alignment(kind="self", until=60, fade=9))
    assert kinds_to_come(aligned, range(0, 100)) == [(routes, True), (routes, False), DENSE]
    assert kinds_to_come(cfg, range(80, 100)) == [DENSE] and kinds_to_come(cfg, range(100, 100)) == []
    endless = settings.read(composed(*words[:2], "train.steps=1e12"))  # without a walk over the steps
    assert kinds_to_come(endless, range(10**12)) == [(endless.model.resolved_routes, False)]
    beyond = settings.read(composed(*words[:3], "train.ratio_schedule={start: 0.75, end: 0.25, last: 150}"))
    kinds = [routes[0].selection_ratio for routes, _ in kinds_to_come(beyond, range(100))]
    assert kinds == [0.75, active_routes(beyond, 99)[0].selection_ratio]  # the last step's is the largest
    ended = replace(beyond, alignment=Alignment(kind="self", until=60))
    assert (active_routes(ended, 59), True) in kinds_to_come(ended, range(100))  # the largest step with a teacher
    cfg = settings.read(composed(*words, "train.ratio_schedule={start: 0.75, end: 0.25, first: 10, last: 60}"))
    for begun, ratios in ((0, {0.75, 0.25}), (70, {0.25})):
        kinds = kinds_to_come(cfg, range(begun, 100))
        assert len(kinds) == len(ratios) + 1
        assert {route.selection_ratio for kind, _ in kinds for route in kind} == ratios


def test_a_plan_counts_alignment_up_to_its_end(tmp_path):
    """Half of the steps with, half without: the mean of both plans."""
    words, planned = ("experiment=imagenet256_xl2", "model=dit", "train.steps=1_000_000", "devices=1"), []
    for more in ((), ("alignment=self",), ("alignment=self", "alignment.until=500_000")):
        text = launch_door(plan.main, "plan", tmp_path, *words, *more)
        found = [re.search(rf"{name} +([\d.e+,]+)", text)[1] for name in ("run", "\nhours")]
        planned.append([float(number.replace(",", "")) for number in found])
    for plain, aligned, ended in zip(*planned):
        assert 1.02 * plain < aligned and ended == pytest.approx((plain + aligned) / 2, rel=1e-3)


def test_a_plan_counts_routes_up_to_their_end_and_a_second_forward_pass(tmp_path):
    """A quarter of the steps routed: that share of both columns; with checkpointing 4/3 of the time. Memory is saved as
    the steps after the route's end need it, on micro-batches of the size asked for."""
    words = ("experiment=imagenet256_xl2", "model=tread", "train.steps=1_000_000", "devices=1")

    def planned(*more: str) -> list[list[float]]:
        text = launch_door(plan.main, "plan", tmp_path, *words, *more)
        found = [re.search(rf"{name} +(.+)", text)[1].split() for name in ("run", "\nhours")]
        return [[float(number.replace(",", "")) for number in line] for line in found]

    whole, part, again = planned(), planned("train.routes_until=250_000"), planned("train.memory=checkpointing")
    for (dense, routed), (same, mixed) in zip(whole, part):
        assert same == dense and mixed == pytest.approx(0.25 * routed + 0.75 * dense, rel=2e-3)
    assert [len(line) for line in planned("train.routes_until=0")] == [1, 1]
    assert again[0] == whole[0] and again[1] == pytest.approx([4 / 3 * hours for hours in whole[1]], rel=2e-3)
    (_, muon) = planned("optim.name=muon", "optim.muon_lr=1e-3")  # 1.2e13 FLOPs a step at 0.7 of 989 TFLOP/s, by hand
    assert (muon[0] - whole[1][0]) * 3600 / 1_000_000 == pytest.approx(1.2e13 / 0.7 / 989e12, rel=0.1)
    (flops, adapted), (_, hours) = planned("lora.rank=16", "init_from=x"), whole
    assert 0.66 < flops[0] / whole[0][0] < 0.69 and adapted[0] / hours[0] < 0.78  # two passes of three
    for more, how in (
        (("train.routes_until=350000", "devices=4"), ["checkpointing", "checkpointing"]),
        (("train.micro_batch_size=32", "devices=1"), ["budget", "plain"]),
        (("train.batch_size=32", "devices=1"), ["plain", "plain"]),  # without gradients that stay
    ):
        text = launch_door(plan.main, "plan", tmp_path, *words[:2], "device=4090", *more)
        assert re.search("by train.memory +(.+)", text)[1].split() == how


@pytest.mark.parametrize(
    "experiment, said",
    [
        ("cifar10_small", "latents 3.07 kB a view in uint8"),  # 3·32·32 bytes
        ("sit256_s2", "latents 8.19 kB a view in fp16"),  # 4·32·32 of two bytes; by rectified flow
    ],
)
def test_a_plan_counts_the_bytes_that_are_stored(tmp_path, experiment, said):
    assert said in launch_door(plan.main, "plan", tmp_path, f"experiment={experiment}", "model=dit")


def test_a_plan_s_disk_is_that_of_the_run_s_own_summary(composed):
    """With alignment's projector, and averages stored at their own pace."""
    words = ["experiment=imagenet256_s2", "ema.power=[0.05,0.1]", "ema.snapshot_every=500", "every.save=5000"]
    texts = []
    for more in ([], ["alignment=repa", "alignment.encoder=dinov2-s"]):
        cfg = settings.read(composed(*words, *more))
        with torch.device("meta"):
            network = build_network(cfg)
        texts.append(disk(cfg, network, costs.blank_aligner(cfg, network)))
    assert all(text.endswith("of averages stored every 500 steps") for text in texts)
    plain, aligned = (float(text.split()[0]) for text in texts)
    assert aligned > 1.02 * plain


@pytest.mark.slow
def test_finetune_own_and_its_page_state_what_they_take(tmp_path):
    """As scripts/plan.py predicts it, on the two GPUs that have room for it."""
    head = (ROOT / "configs/experiment/finetune_own.yaml").read_text()
    page = " ".join((ROOT / "docs/finetuning.md").read_text().split())
    words = ["experiment=finetune_own", "dataset.path=x", "dataset.channels=4", "dataset.size=32"]
    words += ["dataset.num_classes=10", "train.memory=plain"]

    def planned(*more: str) -> tuple[str, list[float]]:
        text = launch_door(plan.main, "plan", tmp_path, *words, *more)
        parts = re.findall(r"^(?:memory: w|  optimizer|  activations).* ([\d.]+) (.B) +([\d.]+) (.B)$", text, re.M)
        gigabytes = {"MB": 1e-3, "GB": 1.0}
        assert len(parts) == 3
        return text, [sum(float(part[i]) * gigabytes[part[i + 1]] for part in parts) for i in (0, 2)]

    text, (dense, routed) = planned("device=h200")
    assert f"{dense:.0f} GB of a GPU's memory with all tokens, {routed:.0f} GB" in head.replace("\n# ", " ")
    assert "10.8 GB a checkpoint" in text and "10.8 GB a checkpoint" in head
    pytest.importorskip("peft")
    text, (dense, _) = planned("lora.rank=16", "device=4090")
    count, trained = (float(number.replace(",", "")) / 1e6 for number in re.findall(r"[\d,]{6,}", text)[:2])
    assert f"{trained:.0f} of XL/2's {count:.0f} million parameters" in page
    assert f"{dense:.0f} GB of a GPU's memory with all tokens, and 190 MB a checkpoint" in page
    assert "190 MB a checkpoint" in text and "32 of 32" in text
    text = launch_door(plan.main, "plan", tmp_path, *words[:-1], "device=4090")
    assert re.search(r"largest .* 32 of 32 +32 of 32\n +by train.memory +plain +plain\n", text)


@pytest.mark.slow
def test_a_plan_measures_this_machine(tmp_path):
    words = ["dataset=digits", "dataset.path=data", "dataset.channels=1", "dataset.size=8", "dataset.num_classes=10"]
    text = launch_door(plan.main, "plan", tmp_path, *words, "model=tread", "device=this", "train.batch_size=8")
    assert "8 of 8" in text and " cpu " in text


def test_a_kernel_for_gpus_is_planned_anywhere(tmp_path):
    words = ("experiment=imagenet256_b2", "model=tread_mamba", "model.kernel=mamba_ssm")
    assert "FLOPs an image" in launch_door(plan.main, "plan", tmp_path, *words)


@pytest.mark.parametrize(
    "words, said",
    [
        (["device=h300"], "device is 'h300', but must be h200, h100, a100, 4090 or this"),
        (["devices=3"], "train.batch_size 256 is not a multiple of devices 3"),
        (["train.micro_batch_size=7"], "train.micro_batch_size 7 does not divide a device's images a step"),
        (["run=results/x"], "run=… is train.py's"),
        (["price=-1"], "price is -1, but must be positive"),
        (["optim.groups=[{match: nothing, lr: 0}]"], "is found in no trained parameter's name"),
    ],
)
def test_what_can_not_be_planned_is_refused(tmp_path, words, said):
    with pytest.raises(SystemExit, match=said):
        launch_door(plan.main, "plan", tmp_path, "experiment=imagenet256_s2", "model=tread", *words)
