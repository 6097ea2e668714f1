"""Predicts the cost of a run: python scripts/plan.py experiment=imagenet256_xl2 model=tread devices=8 price=3.5

Prints parameters, FLOPs, device memory by part, how activation memory is saved (train.memory), the largest micro-batch
that fits, images/s, hours, money and disk: a column for all tokens, and one for routes (some tokens skip some blocks).
An encoder that runs in training is included. No GPU is needed, nor a dataset if the config states its shape, its
number of classes and, for models that take text, text.tokens and text.width. device=this measures forward and backward
passes on this machine. For other devices, memory is predicted for bf16, and times for compiled blocks in bf16
(tread/training/costs.py), at speeds that benchmarks/gpu_check.py has measured, if any. All options: configs/plan.yaml.
"""

if __name__ == "__main__":
    import checkout  # noqa: F401

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from routing_module import Route
from tread.models.backbone import count_parameters
from tread.models.cost_constants import DEVICES, PREDICTED, Constants, measured_constants
from tread.reports.summary import disk
from tread.runtime import schema
from tread.runtime.cli import door, open_door
from tread.runtime.compiling import compile_blocks
from tread.runtime.device import device_name, memory_of, use_precision, wait_for
from tread.runtime.files import size_text
from tread.runtime.schema import Count, Positive
from tread.training import costs, settings
from tread.training.settings import Settings

KEYS = ("devices", "device", "price")
RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"


@dataclass(frozen=True)
class Options:
    """The options that configs/plan.yaml adds to train.py's settings. `price` is what one device costs an hour."""

    devices: Count
    device: Literal["h200", "h100", "a100", "4090", "this"]
    price: Positive | None


@door()
def main(tree: dict) -> None:
    if tree["run"] is not None:
        raise ValueError("run=… is train.py's: for a plan, type the settings in which the run differs")
    options = schema.read({key: tree.pop(key) for key in KEYS}, Options)
    cfg = settings.read(tree)
    shape = (cfg.dataset.channels, cfg.dataset.size, cfg.dataset.num_classes)
    if None in shape or (cfg.model.takes_text and cfg.text.tokens is None):
        cfg, _ = settings.complete(tree)  # reads the dataset
    show(cfg, options)


def show(cfg: Settings, options: Options) -> None:
    """Print the plans without and with routes (if any). Raises ValueError if the batch can't be divided as asked."""
    if cfg.train.batch_size % options.devices:
        raise ValueError(f"train.batch_size {cfg.train.batch_size} is not a multiple of devices {options.devices}")
    if (cfg.train.batch_size // options.devices) % (cfg.train.micro_batch_size or 1):
        raise ValueError(
            f"train.micro_batch_size {cfg.train.micro_batch_size} does not divide a device's images a step"
        )
    network, until = costs.blank_network(cfg), cfg.train.routes_until
    routes, images = cfg.model.resolved_routes if until != 0 else (), cfg.train.batch_size // options.devices
    constants, measured = constants_of(options.device)
    columns = [column(cfg, network, kind, images, options, constants) for kind in ((), routes)[: 2 if routes else 1]]
    parameters, trained = count_parameters(network), count_parameters(network, trained=True)
    some = "" if trained == parameters else f", {trained:,} of them trained"
    print(f"{cfg.name}: {parameters:,} parameters{some}, {network.num_tokens} tokens, batch {cfg.train.batch_size}")
    print("\n" + " " * 34 + "".join(f"{head:>14}" for head in ("all tokens", "routed")[: len(columns)]))
    for name in dict.fromkeys(name for each in columns for name in each):  # a column that does not fit has fewer
        print(f"{name:<34}" + "".join(f"{each.get(name, '–'):>14}" for each in columns))
    flops, speeds = ([each[name].replace(",", "") for each in columns] for name in ("FLOPs of the run", "images/s"))
    if routes and "–" not in speeds:
        less = 1 - float(flops[1]) / float(flops[0]), 1 - float(speeds[0]) / float(speeds[1])
        print("the route saves {:.0%} of the run's FLOPs, and {:.0%} of a routed step's time".format(*less))
    stored, each = ("uint8", 1) if cfg.dataset.embedded == "cifar10" else ("fp16", 2)  # bytes of a number
    view = size_text(cfg.dataset.channels * cfg.dataset.size**2 * each)
    stored += ", twice that as moments" * (cfg.dataset.channels not in (1, 3))
    print(f"\ndisk: {disk(cfg, network, costs.blank_aligner(cfg, network))}; latents {view} a view in {stored}")
    if until and routes and until < cfg.train.steps:
        print(f"steps from {until:,} on run all tokens, in FLOPs and hours; their memory is that of all tokens")
    if cfg.train.ratio_schedule and routes:
        print("train.ratio_schedule is not planned: routed steps have the route's selection_ratio")
    known = "memory and times are those of bf16, times of compiled blocks" + (f"; {measured}" if measured else "")
    print("times are those of plain forward and backward passes alone" if options.device == "this" else known)


def constants_of(device: str) -> tuple[Constants, str]:
    """Return the Constants for predicting a device's times, and a note on which were measured, "" if none were."""
    file = max(RESULTS.glob(f"gpu_*{device}*.json"), default=None)
    constants = measured_constants(json.loads(file.read_text()), DEVICES[device]) if file else PREDICTED
    names = [name for name, value in constants._asdict().items() if value != getattr(PREDICTED, name)]
    return constants, f"times: {', '.join(names)} as measured in {file.name}" if names else ""


def column(
    cfg: Settings, network: nn.Module, routes: tuple[Route, ...], images: int, options: Options, constants: Constants
) -> dict:
    """Return a column of the table, {row's name: text}: training under `routes`, with `images` per device and step."""
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    this, steps = options.device == "this", cfg.train.steps
    precision = use_precision(cfg.train.precision, here) if this else "bf16"
    compiled = cfg.train.compile is not False and not (this and here.type == "cpu")
    room = memory_of(here) if this else DEVICES[options.device].memory
    aligner = costs.blank_aligner(cfg, network)
    encoder = aligner.encoder if aligner else None
    ends = cfg.train.routes_until if routes else 0
    way = "plain" if this and here.type == "cpu" and cfg.train.memory == "auto" else cfg.train.memory
    counted = replace(cfg, train=replace(cfg.train, routes_until=ends, ratio_schedule=None, memory=way))
    kinds, once = costs.count_kinds(counted, range(steps)), min(images, cfg.train.micro_batch_size or images)
    live = costs.live_bytes(cfg, once, encoder)
    room -= live + (options.devices > 1 or once < images) * 4 * count_parameters(network)  # gradients that stay
    how, _, warning = costs.plan_memory(counted, network, [*kinds], once, room, precision, compiled, aligner)
    saving = replace(cfg, train=replace(cfg.train, memory=how))
    pairs = [[costs.memory(saving, network, r, n, precision, compiled, aligner) for n in (1, 2)] for r, _ in kinds]
    few, more = pairs[0]
    micro = min(costs.largest_micro_batch(*pair, once, room) for pair in pairs) if warning else once
    alone = options.devices == 1 and not live and getattr(cfg.model, "kernel", "torch") == "torch"
    able = cfg.train.cuda_graphs and cfg.optim.name in ("adamw", "muon")  # whose steps take the rate as a tensor
    graphs = able and (alone or cfg.train.cuda_graphs is True)  # a step is one launch
    constants = constants._replace(launch=0.0 if graphs else constants.launch * -(-images // max(1, micro)))
    frozen = 4 * (count_parameters(network) - count_parameters(network, trained=True))
    saved = few.saved + (max(1, micro) - 1) * (more.saved - few.saved)
    lines = {
        "FLOPs an image": f"{costs.sample_flops(network, routes, aligner):.3e}",
        "FLOPs of the run": f"{costs.training_flops(counted, network, range(steps), aligner):.3e}",
        "memory: weights and gradients": size_text(2 * few.weights - frozen),
        "  optimizer and averages": size_text(few.optimizer + few.averages),
        "  activations of a micro-batch": size_text(saved),
        **({"  live encoder": size_text(live)} if live else {}),
        "largest micro-batch a device": f"{micro} of {once}" if micro else "none fits",
        "  by train.memory": how,
    }
    if not micro:
        return lines | {"images/s": "–", "hours": "–"}

    def step(active: tuple[Route, ...], aligned: bool) -> float:
        if this:
            least = micro if here.type == "cuda" else min(micro, 8)  # few samples would time a GPU's launches
            return measured_seconds(saving, active, least, here, precision) * images / least
        again = 4 / 3 if how == "checkpointing" else 1.0  # a second forward pass
        device, aligning = DEVICES[options.device], aligner if aligned else None
        return again * costs.step_seconds(cfg, network, active, images, device, aligning, constants)

    spent = [step(*kind) for kind in kinds]
    seconds, hours = spent[0], sum(count * each for each, count in zip(spent, kinds.values())) / 3600
    lines |= {"images/s": f"{cfg.train.batch_size / seconds:,.0f}", "hours": f"{hours:,.1f}"}
    lines |= {"device-hours": f"{hours * options.devices:,.1f}", "on": device_name(here) if this else options.device}
    return lines | ({"price": f"{hours * options.devices * options.price:,.0f}"} if options.price else {})


def measured_seconds(
    cfg: Settings, routes: tuple[Route, ...], images: int, device: torch.device, precision: str
) -> float:
    """Measure the seconds of a forward and backward pass on `images` blank samples: the median of three."""
    network = costs.blank_network(cfg, device)
    network.residual, how = cfg.train.residual, cfg.train.memory
    network.activation_checkpointing = how == "checkpointing"
    if device.type == "cuda" and cfg.train.compile is not False:
        torch.compiler.reset()  # graphs of an earlier column may save memory otherwise
        compile_blocks(network.compiled(), saving=how == "budget")
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        costs.blank_loss(cfg, network, routes, images, device, precision).backward()
        wait_for(device)
        seconds.append(time.perf_counter() - began)
    return sorted(seconds[2:])[1]


if __name__ == "__main__":
    open_door(main, lambda: [*settings.known_keys(), "experiment", *KEYS], spell=settings.add_unstated)
