"""Costs of training: FLOPs, which depend on each step's token routes; bytes and seconds of a step on a device.

A step's predicted time is the sum of the times of matrix products, attention, the blocks' other reads and writes, the
embedding and the last layer, the optimizer and the EMA. It is at least the time that the host needs to launch the
step. The default constants are estimates for compiled networks in bf16; benchmarks/gpu_check.py measures real ones.

The memory of a compiled step is computed from tables. An uncompiled step is traced: its passes run on torch's fake
tensors, which have sizes and types but no numbers, and the bytes of storages in use are counted after each operation.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from routing_module import Route
from tread.checkpoints.network import build_network, process_of
from tread.encoders.vision import LAYERS, WIDTHS, Encoder, dinov2_cost, open_encoder
from tread.models.backbone import Backbone, count_parameters
from tread.models.cost_constants import END_BYTES, PREDICTED, UPDATE_BYTES, Constants, Device, block_bytes, blocks_run
from tread.routing.ids import pair
from tread.runtime.device import Alive, autocast
from tread.runtime.files import size_text
from tread.training.alignment import Aligned, Aligner, build_projector
from tread.training.draws import active_routes
from tread.training.muon import step_flops
from tread.training.settings import Settings

Kind = tuple[tuple[Route, ...], bool]  # kind of step: its token routes, and whether its loss has an alignment term
USABLE = 0.94  # share of a device's memory for tensors; CUDA and fragmentation take the rest


def training_flops(cfg: Settings, network: Backbone, steps: range, aligner: Aligner | None = None) -> int:
    """Return the FLOPs of the training steps in `steps` on global batches, with alignment if `aligner` is given."""
    kinds = count_kinds(cfg, steps).items()
    each = (count * sample_flops(network, routes, aligner if aligned else None) for (routes, aligned), count in kinds)
    return cfg.train.batch_size * sum(each)


def changes(cfg: Settings, steps: range) -> list[int]:
    """Return, ascending, the first of `steps` and those from which token routes or alignment are switched off."""
    ends = (end for end in (cfg.train.routes_until, cfg.alignment.until) if end is not None)
    return sorted(step for step in {steps.start, *ends} if step in steps)


def count_kinds(cfg: Settings, steps: range) -> Counter[Kind]:
    """Return {(token routes, whether alignment is in the loss): number of such steps} of the training steps `steps`."""
    kinds, firsts = Counter(), [*steps] if cfg.train.ratio_schedule else changes(cfg, steps)
    for first, end in zip(firsts, [*firsts[1:], steps.stop]):
        kinds[active_routes(cfg, first), bool(cfg.alignment.weight_at(first))] += end - first
    return kinds


def kinds_to_come(cfg: Settings, steps: range) -> list[Kind]:
    """Return the distinct pairs (token routes, whether alignment is in the loss) of the training steps `steps`. With
    train.ratio_schedule, only the ends of the schedule and of `steps` are looked at, and the steps around `changes`."""
    schedule, ends = cfg.train.ratio_schedule, changes(cfg, steps)
    more = (schedule.first, schedule.last, steps.stop - 1, *(end - 1 for end in ends)) if schedule else ()
    places = [*ends, *(step for step in more if step in steps)]
    return list(dict.fromkeys((active_routes(cfg, place), bool(cfg.alignment.weight_at(place))) for place in places))


def sample_flops(network: Backbone, routes: Sequence[Route], aligner: Aligner | None = None) -> int:
    """Return the FLOPs of training on one sample: the network's passes, and alignment, if any."""
    return int(passes(network) * network.forward_flops(routes)) + (aligner.flops(routes) if aligner else 0)


def passes(network: Backbone) -> float:
    """Return a training step's cost in forward passes: 2 plus the trained fraction of the parameters."""
    return 2 + count_parameters(network, trained=True) / count_parameters(network)


def blank_network(cfg: Settings, device: torch.device | str = "meta") -> Backbone:
    """Build the run's network, with any LoRA adapters, to count its costs; freeze parameters that have rate 0."""
    cfg = replace(cfg, model=cfg.model.anywhere) if device == "meta" else cfg
    with torch.device(device):
        network = build_network(cfg)
        if cfg.lora.rank:
            cfg.lora.adapt(network)
    cfg.optim.freeze(network)
    return network


class StepMemory(NamedTuple):
    """Bytes of memory that one training step takes on one device.

    weights    weights of the network and the projector in fp32, without gradients (as many bytes, if all are trained).
    averages   the averaged copies of the weights.
    optimizer  the optimizer's state.
    saved      what the forward pass keeps for the backward pass.
    peak       the most bytes in use at any moment of the step, with gradients and, if it was traced, temporary tensors.
    """

    weights: int
    averages: int
    optimizer: int
    saved: int
    peak: int


def blank_loss(
    cfg: Settings, network: Backbone, routes: Sequence[Route], images: int, device: torch.device, precision: str
) -> Tensor:
    """Return the mean loss (0-d) of `images` all-zero latents with token `routes`, to measure what a pass costs."""
    x = torch.zeros(images, cfg.dataset.channels, cfg.dataset.size, cfg.dataset.size, device=device)
    level = torch.full((images,), 0.5, device=device)
    chosen = [pair(route, torch.zeros(images, network.num_tokens, device=device), network.grid) for route in routes]
    token = network.z_embedder
    zeros = {} if token is None else {"class_token": network.pos_embed.new_zeros(images, token.width)}
    called = partial(network, **zeros)
    with autocast(device, precision):
        return process_of(cfg).loss(called, x, network.null(images), level, torch.zeros_like(x), chosen).mean()


def step_memory(cfg: Settings, routes: Sequence[Route], images: int, precision: str) -> StepMemory:
    """Trace an uncompiled step that trains all weights on `images` samples; averages and optimizer are left out (0)."""
    with FakeTensorMode(allow_non_fake_inputs=True), Alive() as alive:
        network = build_network(cfg)
        network.activation_checkpointing = cfg.train.memory == "checkpointing"
        network.residual = cfg.train.residual
        weights = sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))
        before = alive.now
        alive.peak = alive.now
        loss = blank_loss(cfg, network, routes, images, torch.device("cpu"), precision)
        saved = alive.now - before
        loss.backward()
    return StepMemory(weights, 0, 0, saved, alive.peak)


def step_seconds(
    cfg: Settings, network: Backbone, routes: Sequence[Route], images: int, device: Device,
    aligner: Aligner | None = None, constants: Constants = PREDICTED,
) -> float:  # fmt: skip
    """Predict the seconds of a compiled bf16 training step of `images` samples on the GPU that `device` describes.
    `constants` holds the fractions of the GPU's peak speeds that a step reaches, and the time to launch a block."""
    blocks = blocks_run(network, routes)
    head = network.hidden_size // getattr(cfg.model, "num_heads", network.hidden_size)
    attention = constants.attention[min(constants.attention, key=lambda known: abs(known - head))]
    iterations = int((cfg.optim.options or {}).get("steps", 5))  # of Muon
    update = step_flops(network, iterations) / images if cfg.optim.entry.splits else 0
    products = ((aligner.flops(routes) if aligner else 0) + update) / np.interp(network.hidden_size, *constants.reached)
    moved = network.hidden_size * END_BYTES.moved * network.num_tokens
    for block, count, width in blocks:
        linear = block.multiply_adds(count, attention=False)
        mixing = block.multiply_adds(count) - linear
        products += 2 * passes(network) * (linear / np.interp(width, *constants.reached) + mixing / attention)
        known = block_bytes(cfg.model, width, block)
        moved += count * width * (known.moved_in_bf16 if cfg.train.residual == "bf16" else known.moved)
    moved = images * moved + UPDATE_BYTES * count_parameters(network, trained=True)
    seconds = images * products / device.products + moved / (constants.bandwidth * device.bandwidth)
    return float(max(seconds, constants.launch * len(blocks)))


def projector_bytes(aligner: Aligner, routes: Sequence[Route], precision: str) -> int:
    """Return the bytes per image that the alignment loss keeps for the backward pass: the projector's input, its
    layers' and activations' outputs, and the targets. A live encoder's own memory is not included (see live_bytes)."""
    layers = [layer for layer in aligner.module.projector if isinstance(layer, nn.Linear)]
    network, width = aligner.module.network, layers[-1].out_features
    tokens = sum(aligner.tokens(routes))
    kept = layers[0].in_features + 2 * sum(layer.out_features for layer in layers)
    return tokens * kept * (2 if precision == "bf16" else 4) + 4 * (network.num_tokens + tokens) * width


def memory(
    cfg: Settings, network: Backbone, routes: Sequence[Route], images: int, precision: str, compiled: bool,
    aligner: Aligner | None = None,
) -> StepMemory:  # fmt: skip
    """Return the bytes of a step in micro-batches of `images` samples on one device: traced if not `compiled`, else
    computed from tables of bytes per token and channel. train.memory says which activations are kept: all ("plain" or
    "auto"), those costly to recompute ("budget"; if not `compiled`, all), or blocks' inputs ("checkpointing")."""
    if aligner is not None:
        step = memory(cfg, network, routes, images, precision, compiled)
        weights = 4 * count_parameters(aligner.module.projector)
        optimizer, saved = int(cfg.optim.copies * weights), images * projector_bytes(aligner, routes, precision)
        more = StepMemory(weights, 0, optimizer, saved, weights + optimizer + max(saved, weights))
        return StepMemory(*map(sum, zip(step, more)))
    weights, gradients = 4 * count_parameters(network), 4 * count_parameters(network, trained=True)
    traced = None if compiled else step_memory(cfg, routes, images, precision)  # its weights include buffers
    averaged, how = gradients if cfg.lora.rank else traced.weights if traced else weights, cfg.train.memory
    averages, optimizer = averaged * (1 + len(cfg.ema.power)), 4 * cfg.optim.state_size(network)
    if traced:
        return traced._replace(averages=averages, optimizer=optimizer, peak=traced.peak + averages + optimizer)
    sizes = [(n * width, block_bytes(cfg.model, width, block)) for block, n, width in blocks_run(network, routes)]
    kept = sum(size * (block.budget if how == "budget" else block.saved) for size, block in sizes)
    if how == "checkpointing":  # each block's fp32 input, and the activations of one block
        kept = sum(4 * size for size, _ in sizes) + max(size * block.saved for size, block in sizes)
    ends = network.hidden_size * END_BYTES.saved * network.num_tokens
    each = (kept + ends) * (1 if precision == "bf16" else 2)
    saved = int(weights / 2 + images * each)  # autocast keeps weights in bf16
    return StepMemory(weights, averages, optimizer, saved, weights + averages + optimizer + max(saved, gradients))


class MemoryPlan(NamedTuple):
    """How a run's steps save memory. `how` is "plain" (keep all activations), "budget" (compiled blocks recompute cheap
    activations) or "checkpointing" (recompute blocks). `said` is a text on this choice and, on a GPU, the predicted
    memory. `warning` says that memory may not suffice, or that train.memory can't be obeyed; None: neither."""

    how: str
    said: str
    warning: str | None = None


def plan_memory(
    cfg: Settings, network: Backbone, kinds: Sequence[Kind], images: int, room: int, precision: str,
    compiled: bool, aligner: Aligner | None = None,
) -> MemoryPlan:  # fmt: skip
    """Choose how steps on micro-batches of `images` samples save memory, as train.memory says. "auto" takes the first
    of "plain", "budget" (only if `compiled`) and "checkpointing" that makes steps of all `kinds` (see Kind) fit into
    94% (USABLE) of the device's `room` bytes, or the last if none does. A plan that does not fit has a warning."""
    ways = ("plain", "budget", "checkpointing") if compiled else ("plain", "checkpointing")
    kinds, peaks, micro = kinds or [((), False)], {}, images

    def needed(routes: tuple[Route, ...], aligned: bool, images: int = images) -> StepMemory:
        return memory(saving, network, routes, images, precision, compiled, aligner if aligned else None)

    for how in ways if cfg.train.memory == "auto" else (cfg.train.memory,):
        saving = replace(cfg, train=replace(cfg.train, memory=how))
        peaks[how] = max(needed(*kind).peak for kind in kinds)
        if peaks[how] <= USABLE * room:
            break
    else:
        pairs = ([needed(*kind, count) for count in (1, 2)] for kind in kinds)
        micro = min(largest_micro_batch(few, more, images, room) for few, more in pairs)
    others = "".join(f", {way} {size_text(peak)}" for way, peak in peaks.items() if way != how)
    said = f"{how}, predicted {size_text(peaks[how])} of {size_text(room)}{others}"
    if micro == images:
        return MemoryPlan(how, said)
    advice = f"train.micro_batch_size={micro} would, with the same results" if micro else "nor would a single one"
    return MemoryPlan(how, said, f"{images} images at once may not fit the device's memory; {advice}")


def checkpoint_bytes(cfg: Settings, network: Backbone, aligner: Aligner | None) -> int:
    """Return the bytes of a checkpoint: weights, averages and optimizer state, but not the weights that LoRA froze."""
    kept = count_parameters(network, trained=cfg.lora.rank is not None)
    beside = (1 + cfg.optim.copies) * count_parameters(aligner.module.projector) if aligner else 0
    return round(4 * ((2 + len(cfg.ema.power)) * kept + cfg.optim.state_size(network) + beside))


def picture_side(cfg: Settings) -> int:
    """Return a picture's side in pixels: 8 times the latents' side, or equal to it for 1 or 3 channels (pixels)."""
    return cfg.dataset.size * (1 if cfg.dataset.channels in (1, 3) else 8)


def live_bytes(cfg: Settings, images: int, encoder: Encoder | None = None, side: int | None = None) -> int:
    """Return the bytes of REPA's live encoder, which runs in training (0 without one), and its activations for `images`
    pictures of `side` pixels (None: picture_side): measured on blank ones; with encoder=None, estimated for DINOv2."""
    alignment, side = cfg.alignment, side or picture_side(cfg)
    if alignment.kind != "repa" or alignment.source != "live":
        return 0
    if encoder is None:
        cost = dinov2_cost(alignment.encoder, side)
        return 4 * 12 * LAYERS[alignment.encoder] * cost.width**2 + images * 40 * (cost.tokens + 1) * cost.width
    parts = [part for part in (encoder.run, *getattr(encoder.run, "args", ())) if isinstance(part, nn.Module)]
    weights, peaks = [weight for part in parts for weight in part.parameters()], []
    with Alive(weights) as alive:
        for count in (1, 2):  # the difference leaves out copies of weights in bf16
            encoder.encode(torch.zeros(count, 3, side, side, dtype=torch.uint8))
            peaks.append(alive.peak)
    return sum(weight.nbytes for weight in weights) + peaks[0] + (images - 1) * (peaks[1] - peaks[0])


def blank_aligner(cfg: Settings, network: Backbone) -> Aligner | None:
    """Return an Aligner for counting costs, with its projector on the meta device; None without an alignment loss.
    Loads the encoder only if its width or, with alignment.source=live, its FLOPs can't be known otherwise."""
    alignment, width, flops, encoder = cfg.alignment, network.hidden_size, 0, None
    if alignment.kind == "none":
        return None
    live = alignment.source == "live"
    if alignment.kind == "repa":
        if not live and alignment.encoder in WIDTHS:
            width = WIDTHS[alignment.encoder]
        elif alignment.encoder in LAYERS:
            _, width, flops = dinov2_cost(alignment.encoder, picture_side(cfg))
        else:
            encoder = open_encoder(alignment.encoder, "cpu", grid=network.grid[0], inception=cfg.eval.inception)
            _, width, flops = encoder.cost(picture_side(cfg))
    with torch.device("meta"):
        projector = build_projector(alignment, network.hidden_size, width)
    module, teacher = Aligned(network, projector, alignment.resolve(cfg.model.depth)[0]), alignment.kind == "self"
    return Aligner(alignment, module, network if teacher else None, encoder if live else None, live * flops)


def largest_micro_batch(few: StepMemory, more: StepMemory, images: int, room: float) -> int:
    """Return the largest divisor of `images` that, as micro-batch size, makes a step fit into 94% (USABLE) of the
    device's `room` bytes; 0 if 1 does not. `few` and `more` are a step's memory with one sample and with two."""
    each = more.saved - few.saved
    return next((n for n in range(images, 0, -1) if images % n == 0 and few.peak + (n - 1) * each <= USABLE * room), 0)
