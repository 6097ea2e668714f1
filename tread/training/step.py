"""One training step: its random numbers, the loss of each sample, and the update of weights and averages."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from routing_module import Record, Route
from tread.checkpoints.network import process_of
from tread.data.dataset import Batch
from tread.data.latents import LatentSpec, to_network
from tread.diffusion.token_beside import noised_token, token_loss
from tread.diffusion.token_losses import kept_terms
from tread.models.conditions import Condition, drop
from tread.routing.ids import pair
from tread.runtime.device import autocast
from tread.runtime.randomness import generator
from tread.training.alignment import Aligner
from tread.training.optimizer import backward, is_fused, learning_rate, optimizer_step
from tread.training.run import Run
from tread.training.settings import Settings


@dataclass(frozen=True)
class Draws:
    """The random numbers of one training step, for the B samples of a batch."""

    level: Tensor  # (B,) standard normal, to become noise levels
    noise: Tensor  # (B, C, S, S) standard normal, to be added to the latents
    drop: Tensor  # (B,) uniform, to drop labels or texts
    routes: tuple[tuple[Route, Tensor], ...]  # with ids_keep (B, K); draws (B, N) if the rule scores tokens
    posterior: Tensor | None  # (B, C, S, S) standard normal, to sample latents from moments; None if they are plain
    back: Tensor | None = None  # (B,) uniform, lowers the noise of alignment=self's teacher
    path: Tensor | None = None  # (B,) uniform, to drop SPRINT's sparse path; None without train.path_drop
    token: Tensor | None = None  # (B, z) standard normal, to be added to class tokens; None without them

    def rows(self, rows: slice, beyond: int = 0) -> "Draws":
        """Return the random numbers of the samples in the slice `rows` of the batch. Noise and posterior also cover the
        `beyond` samples after them; the batch's first sample follows its last."""
        routes = tuple((route, chosen[rows]) for route, chosen in self.routes)
        drawn = {name: value[rows] for name, value in vars(self).items() if isinstance(value, Tensor)}
        if beyond:
            numbers = torch.arange(rows.start, rows.stop + beyond, device=self.noise.device) % len(self.noise)
            drawn |= {name: getattr(self, name)[numbers] for name in ("noise", "posterior") if name in drawn}
        return replace(self, **drawn, routes=routes)


def active_routes(cfg: Settings, step: int) -> tuple[Route, ...]:
    """Return the model's routes at step `step` (0, 1, …), with the ratio of train.ratio_schedule if that is set; ()
    from step train.routes_until on."""
    until, schedule = cfg.train.routes_until, cfg.train.ratio_schedule
    if until is not None and step >= until:
        return ()
    routes = cfg.model.resolved_routes
    return schedule.apply(routes, step) if schedule else routes


def step_draws(cfg: Settings, latents: LatentSpec, step: int, device: torch.device | str) -> Draws:
    """Draw all random numbers of a training step, for the global batch, each kind from its own random stream: runs with
    and without routes see the same noise."""

    def normal(stream: str, *size: int) -> Tensor:
        return torch.randn(size, generator=generator(cfg.seed, step, stream, device=device), device=device)

    def uniform(stream: str, *size: int) -> Tensor:
        return torch.rand(size, generator=generator(cfg.seed, step, stream, device=device), device=device)

    batch_size = cfg.train.batch_size
    grid = (latents.shape[1] // cfg.model.patch_size, latents.shape[2] // cfg.model.patch_size)
    return Draws(
        level=normal("sigma", batch_size),
        noise=normal("noise", batch_size, *latents.shape),
        drop=uniform("drop", batch_size),
        routes=tuple(
            pair(route, uniform(f"route {number}", batch_size, math.prod(grid)), grid)
            for number, route in enumerate(active_routes(cfg, step))
        ),
        posterior=normal("posterior", batch_size, *latents.shape) if latents.content == "moments" else None,
        back=uniform("back", batch_size) if cfg.alignment.kind == "self" and cfg.alignment.weight_at(step) else None,
        path=uniform("path", batch_size) if cfg.train.path_drop else None,
        token=normal("class token", batch_size, cfg.model.class_token) if cfg.model.class_token else None,
    )


def loss(
    cfg: Settings, network: Callable[..., Tensor], latents: LatentSpec, batch: Batch, draws: Draws, null: Condition,
    aligner: Aligner | None = None,
) -> list[Tensor]:  # fmt: skip
    """Compute a list of losses, each (B,) fp32: denoising, class tokens included, and, with an aligner, alignment.

    network  the run's network, or aligner.module if there is an aligner; wrapped in DDP if there are several processes.
    latents  the meaning of the batch's stored numbers.
    null     the condition that replaces dropped labels or texts, see Backbone.null.
    """
    process, record, own = process_of(cfg), Record(), slice(len(draws.level))
    x, batch = to_network(batch.stored, latents, draws.posterior), batch.rows(own)  # x may go on (process.beyond)
    y = drop(batch.condition, draws.drop, cfg.train.label_drop, null)
    level = process.noise_level(draws.level)
    sparse = {} if draws.path is None else {"path_drop": draws.path < cfg.train.path_drop}  # SPRINT's path
    token = noised_token(batch.class_token, draws.token, level)
    network = partial(network, record=record, **sparse, **token)
    if cfg.train.loss_tokens == "all" or not draws.routes:
        terms = [process.loss(network, x, y, level, draws.noise, draws.routes)]
    else:
        errors, weight = process.errors(network, x, y, level, draws.noise, draws.routes), process.weight(level)
        terms = [kept_terms(*errors, weight, record.ids, cfg.model.patch_size, cfg.train.reconstruction)]
    if draws.token is not None:
        beside = token_loss(record.class_token, batch.class_token, draws.token)
        terms[0] = terms[0] + cfg.train.class_token_weight * beside
    if aligner is not None:
        targets = aligner.targets(process, batch, x[own], y, draws.level, draws.noise[own], draws.back, draws.token)
        terms.append(aligner.distance(record, targets))
    return terms


class Inputs(NamedTuple):
    """All values that differ between training steps with equal routes and tensor shapes, on the device."""

    draws: Draws  # for the global batch
    batches: list[Batch]  # this process's micro-batches
    rate: Tensor | float  # the learning rate, 0-d; a number for an optimizer that may take no tensor
    shares: list[Tensor]  # EMA.share of each average at this step, 0-d
    hold: Tensor  # 0-d; 1: the step changes nothing but the statistics
    alignment: Tensor | None  # the weight of alignment, 0-d; None: the step has none


def training_step(run: Run) -> None:
    """Run one optimizer step on the global batch of step run.step, without waiting for the device."""
    inputs = step_inputs(run)
    if run.aligns and inputs.alignment is None:
        run.wrap()
    if run.graphs is None:
        step_on(run, inputs)
    else:
        run.graphs.take(inputs)


def step_inputs(run: Run) -> Inputs:
    """Return the inputs of step run.step: draws its random numbers and reads its samples."""
    device, rate, weight = run.device, learning_rate(run.cfg, run.step), run.cfg.alignment.weight_at(run.step)
    if is_fused(run.optimizer):  # a CPU's kernel reads fp64, a GPU's fp32
        rate = torch.full((), rate, dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)
    return Inputs(
        step_draws(run.cfg, run.data.latents, run.step, device),
        run.loader.batches(run.step),
        rate,
        [torch.full((), average.share(run.step), device=device) for average in run.averages],
        torch.zeros((), device=device),
        torch.full((), weight, device=device) if weight else None,
    )


def step_on(run: Run, inputs: Inputs) -> list[Tensor]:
    """Do a training step on the device; returns its mean losses and the gradients' norm, each 0-d. What it reads and
    what changes between steps must be a tensor in `inputs`, as a CUDA graph of one call is replayed for later steps."""
    cfg, latents, null = run.cfg, run.data.latents, run.network.null(1)
    weights, aligner = ((1.0,), None) if inputs.alignment is None else ((1.0, inputs.alignment), run.aligner)
    totals, beyond = [0.0] * len(weights), process_of(cfg).beyond
    for rows, batch in zip(run.micro_batches, inputs.batches):
        last = rows is run.micro_batches[-1]
        with contextlib.nullcontext() if last else run.processes.no_sync(run.wrapped):
            with autocast(run.device, run.precision):
                terms = loss(cfg, run.wrapped, latents, batch, inputs.draws.rows(rows, beyond), null, aligner)
            means = [term.mean() / len(run.micro_batches) for term in terms]
            backward(sum(weight * mean for weight, mean in zip(weights, means)))
        totals = [total + mean.detach() for total, mean in zip(totals, means)]
    norm, skip = optimizer_step(run.optimizer, inputs.rate, cfg.optim.clip_norm, inputs.hold)
    for average, share in zip(run.averages, inputs.shares):
        average.update(run.network, share, skip)
    run.statistics.add(totals[0], norm, skip, *totals[1:])
    return [*totals, norm]
