"""One training step: the loss of each sample, and the update of weights and averages."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from routing_module import Record
from tread.checkpoints.network import process_of
from tread.data.dataset import Batch
from tread.data.latents import LatentSpec, to_network
from tread.diffusion.token_beside import noised_token, token_loss
from tread.diffusion.token_losses import kept_error, reconstruction_error
from tread.models.conditions import Condition, replaced
from tread.runtime.device import autocast
from tread.training.alignment import Aligner
from tread.training.draws import Draws, step_draws
from tread.training.optimizer import backward, is_fused, learning_rate, optimizer_step
from tread.training.run import Run
from tread.training.settings import Settings


def loss(
    cfg: Settings, network: Callable[..., Tensor], latents: LatentSpec, batch: Batch, draws: Draws, null: Condition,
    aligner: Aligner | None = None,
) -> list[Tensor]:  # fmt: skip
    """Return each sample's losses, a list of one or two (B,) fp32: the denoising loss, plus the weighted loss of class
    tokens if there are any; and, with an aligner, the alignment loss without its weight.

    network  the run's network or, with an aligner, aligner.module; either may be wrapped in DDP.
    latents  describes the numbers in `batch`: their shape, scale, and whether they are latents or moments.
    null     the condition that replaces dropped labels or texts, for one sample.
    """
    process, record, own = process_of(cfg), Record(), slice(len(draws.level))
    x, batch = to_network(batch.stored, latents, draws.posterior), batch.rows(own)  # x may go on (process.beyond)
    y = replaced(batch.condition, draws.drop < cfg.train.label_drop, null)
    level = process.noise_level(draws.level)
    sparse = {} if draws.path is None else {"path_drop": draws.path < cfg.train.path_drop}  # SPRINT's path
    token = noised_token(batch.class_token, draws.token, level)
    network = partial(network, record=record, **sparse, **token)
    if cfg.train.loss_tokens == "all" or not draws.routes:
        terms = [process.loss(network, x, y, level, draws.noise, draws.routes)]
    else:
        squared, denoised, noisy = process.errors(network, x, y, level, draws.noise, draws.routes)
        ids, patch_size = record.ids, cfg.model.patch_size
        terms = [process.weight(level) * kept_error(squared, ids, patch_size)]
        if cfg.train.reconstruction:
            skipped = reconstruction_error(denoised, noisy, ids, patch_size)
            terms[0] = terms[0] + cfg.train.reconstruction * skipped
    if draws.token is not None:
        beside = token_loss(record.class_token, batch.class_token, draws.token)
        terms[0] = terms[0] + cfg.train.class_token_weight * beside
    if aligner is not None:
        targets = aligner.targets(process, batch, x[own], y, draws.level, draws.noise[own], draws.back, draws.token)
        terms.append(aligner.distance(record, targets))
    return terms


class Inputs(NamedTuple):
    """All that can differ between steps with the same routes and tensor shapes. Source comments explain each field."""

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
    number = partial(torch.full, (), device=device)  # a 0-d tensor, for which the host does not wait
    if is_fused(run.optimizer):  # a CPU's kernel reads fp64, a GPU's fp32
        rate = number(rate, dtype=torch.float64 if device.type == "cpu" else torch.float32)
    return Inputs(
        step_draws(run.cfg, run.data.latents, run.step, device),
        run.loader.batches(run.step),
        rate,
        [number(average.share(run.step)) for average in run.averages],
        number(0.0),
        number(weight) if weight else None,
    )


def step_on(run: Run, inputs: Inputs) -> list[Tensor]:
    """Do a training step; returns this process's mean losses and the gradients' norm, each 0-d. A CUDA graph of one
    call is replayed for later steps, so any value that differs between steps must be a tensor in `inputs`."""
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
