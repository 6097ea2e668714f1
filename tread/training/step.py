"""What a training step minimises: stored samples, labels and draws in, a loss for each sample out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from routing_module import Route
from tread.checkpoints.network import process_of
from tread.data.dataset import Batch
from tread.data.latents import LatentSpec, to_network
from tread.models.backbone import Backbone
from tread.models.conditions import Condition, drop
from tread.routing.ids import choose_ids
from tread.runtime.randomness import generator
from tread.training.alignment import Aligner, alignment_loss, ids_at, self_loss
from tread.training.settings import Settings
from tread.training.token_losses import kept_loss, reconstruction_loss


@dataclass(frozen=True)
class Draws:
    """What one training step draws, for B samples of a batch.

    level      (B,) standard normal, to become noise levels.
    noise      (B, C, S, S) standard normal, to be added to the latents.
    drop       (B,) uniform, to drop labels or texts.
    routes     pairs (Route, ids_keep (B, K)), the tokens that each route keeps.
    posterior  (B, C, S, S) standard normal, to sample latents from moments; None if they are plain.
    back       (B,) uniform, by which share of alignment.gap self's teacher sees less noise; None without it.
    path       (B,) uniform, to drop SPRINT's sparse path; None without train.path_drop.
    """

    level: Tensor
    noise: Tensor
    drop: Tensor
    routes: tuple[tuple[Route, Tensor], ...]
    posterior: Tensor | None
    back: Tensor | None = None
    path: Tensor | None = None

    def rows(self, rows: slice) -> Draws:
        """The draws of some samples of the batch."""
        given = (self.posterior, self.back, self.path)
        posterior, back, path = (None if one is None else one[rows] for one in given)
        routes = tuple((route, ids_keep[rows]) for route, ids_keep in self.routes)
        return Draws(self.level[rows], self.noise[rows], self.drop[rows], routes, posterior, back, path)


def split_batch(batch_size: int, ranks: int, rank: int, micro_batch_size: int | None) -> list[slice]:
    """The rows of the global batch that a process takes, one slice for each accumulation step.

    Raises ValueError if the batch does not divide evenly.
    """
    share, rest = divmod(batch_size, ranks)
    if rest:
        raise ValueError(f"train.batch_size {batch_size} does not divide over {ranks} processes")
    micro = micro_batch_size or share
    if share % micro:
        raise ValueError(
            f"train.micro_batch_size {micro} does not divide a process's share, {share} of the {batch_size} "
            f"images over {ranks} processes"
        )
    return [slice(first, first + micro) for first in range(rank * share, (rank + 1) * share, micro)]


def active_routes(cfg: Settings, step: int) -> tuple[Route, ...]:
    """The routes of training step `step` (0, 1, …): the model's, by train.ratio_schedule, until train.routes_until."""
    until, schedule = cfg.train.routes_until, cfg.train.ratio_schedule
    if until is not None and step >= until:
        return ()
    return schedule.apply(cfg.model.routes, step) if schedule else cfg.model.routes


def training_flops(cfg: Settings, network: Backbone, steps: range, aligner: Aligner | None = None) -> int:
    """FLOPs of training steps, of whole batches, by their routes."""
    alike = itertools.groupby(active_routes(cfg, step) for step in steps)
    each = sum(sample_flops(network, routes, aligner) * sum(1 for _ in group) for routes, group in alike)
    return each * cfg.train.batch_size


def sample_flops(network: Backbone, routes: Sequence[Route], aligner: Aligner | None = None) -> int:
    """FLOPs of training on one sample: forward and backward pass (twice the forward one), and what alignment adds."""
    return 3 * network.forward_flops(routes) + (aligner.flops(routes) if aligner else 0)


def step_draws(cfg: Settings, latents: LatentSpec, step: int, device: torch.device | str) -> Draws:
    """All that is random in a training step, for the global batch; each kind has a stream of its own.

    A change of one kind (routes on or off, say) leaves the numbers of the others as they are, so that runs
    with and without routes see the same noise.
    """

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
            (route, choose_ids(route, uniform(f"route {i}", batch_size, math.prod(grid)), grid))
            for i, route in enumerate(active_routes(cfg, step))
        ),
        posterior=normal("posterior", batch_size, *latents.shape) if latents.content == "moments" else None,
        back=uniform("back", batch_size) if cfg.alignment.kind == "self" else None,
        path=uniform("path", batch_size) if cfg.train.path_drop else None,
    )


def training_loss(
    cfg: Settings,
    network: Callable[..., Tensor],
    latents: LatentSpec,
    stored: Tensor,
    labels: Condition,
    draws: Draws,
    null: Condition | None = None,
) -> Tensor:
    """Loss of each sample (B,) fp32 by the run's objective, with dropped labels and under the routes drawn for.

    stored (B, C or 2C, S, S) and labels (B,), or texts, as the dataset holds them, on the network's device;
    `latents` says what the stored numbers mean, `draws` holds all that is random; null is what dropped labels become,
    see Backbone.null, None: the null class.
    """
    x = to_network(stored, latents, draws.posterior)
    y = dropped(cfg, labels, draws, null)
    process, routes = process_of(cfg), draws.routes
    if draws.path is not None:
        network = partial(network, path_drop=draws.path < cfg.train.path_drop)
    level = process.noise_level(draws.level)
    if cfg.train.loss_tokens == "all" or not routes:
        return process.loss(network, x, y, level, draws.noise, routes)
    squared, denoised, noisy = process.errors(network, x, y, level, draws.noise, routes)
    ids = [ids_keep for _, ids_keep in routes]
    loss = process.weight(level) * kept_loss(squared, ids, cfg.model.patch_size)
    if cfg.train.reconstruction:
        loss = loss + cfg.train.reconstruction * reconstruction_loss(denoised, noisy, ids, cfg.model.patch_size)
    return loss


def dropped(cfg: Settings, labels: Condition, draws: Draws, null: Condition | None) -> Condition:
    """Labels or texts, of which a share of train.label_drop has become the null one."""
    if null is None:
        null = draws.drop.new_full((1,), cfg.dataset.num_classes, dtype=torch.int64)
    return drop(labels, draws.drop, cfg.train.label_drop, null)


def losses(
    cfg: Settings,
    network: Callable[..., Tensor],
    aligner: Aligner | None,
    latents: LatentSpec,
    batch: Batch,
    draws: Draws,
    null: Condition | None = None,
) -> list[Tensor]:
    """The losses of each sample, (B,) fp32: denoising, and alignment where there is one, which is yet to be weighed.

    network  the run's network, or its aligner's module, as processes share it.
    null     see training_loss.
    """
    y = batch.condition
    if aligner is None:
        return [training_loss(cfg, network, latents, batch.stored, y, draws, null)]
    if aligner.teacher is not None:
        targets = teacher_tokens(cfg, aligner.teacher, latents, batch.stored, y, draws, null)
    else:
        targets = aligner.encoder.encode(batch.pictures) if aligner.encoder else batch.features
    return list(aligned_losses(cfg, network, latents, batch.stored, y, draws, targets, null))


def aligned_losses(
    cfg: Settings,
    aligned: Callable[..., tuple[Tensor, Tensor]],
    latents: LatentSpec,
    stored: Tensor,
    labels: Condition,
    draws: Draws,
    targets: Tensor,
    null: Condition | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of each sample as training_loss, and that of its alignment, which cfg.alignment.weight is yet to weigh.

    aligned  as alignment.Aligned: network's arguments → output, projected tokens of the aligned block.
    targets  (B, N, z), what these meet.
    """
    projected = []

    def network(*given: Tensor, **more: object) -> Tensor:
        output, tokens = aligned(*given, **more)
        projected.append(tokens)
        return output

    denoising = training_loss(cfg, network, latents, stored, labels, draws, null)
    depth = cfg.model.depth
    ids_keep = ids_at(cfg.alignment.blocks(depth)[0], draws.routes, depth)
    loss = self_loss if cfg.alignment.kind == "self" else alignment_loss
    return denoising, loss(projected[0], targets, ids_keep)


@torch.no_grad()
def teacher_tokens(
    cfg: Settings,
    teacher: Backbone,
    latents: LatentSpec,
    stored: Tensor,
    labels: Condition,
    draws: Draws,
    null: Condition | None = None,
) -> Tensor:
    """The targets of alignment.kind=self, (B, N, D): what the teacher's block makes of all tokens of the same samples,
    with the same noise and labels, at the cleaner level that draws.back says.
    """
    x, process, found = to_network(stored, latents, draws.posterior), process_of(cfg), []
    y = dropped(cfg, labels, draws, null)

    def network(x: Tensor, t: Tensor, y: Condition, routes: object = ()) -> Tensor:
        found.append(teacher.output_of(cfg.alignment.blocks(cfg.model.depth)[1], x, t, y))
        return x  # of which nothing is used: the process has preconditioned the input, which is all that is wanted

    process.errors(network, x, y, process.cleaner(draws.level, cfg.alignment.gap * draws.back), draws.noise)
    return found[0]
