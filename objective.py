"""What a training step minimises: stored samples, labels and draws in, a loss for each sample out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from autoencoder import to_network
from latents import Latents
from randomness import Draws, draw_step
from route_loss import kept_loss, reconstruction_loss
from routing_ids import choose_ids
from routing_module import Route
from settings import Settings, process_of


def drop_labels(y: Tensor, uniform: Tensor, probability: float, null_class: int) -> Tensor:
    """Replace labels by the null class where the uniform number is below the probability: (B,)."""
    return torch.where(uniform < probability, null_class, y)


def active_routes(cfg: Settings, step: int) -> tuple[Route, ...]:
    """The routes of training step `step` (0, 1, …): the model's, by train.ratio_schedule, until train.routes_until."""
    until, schedule = cfg.train.routes_until, cfg.train.ratio_schedule
    if until is not None and step >= until:
        return ()
    return schedule.apply(cfg.model.routes, step) if schedule else cfg.model.routes


def step_draws(cfg: Settings, latents: Latents, num_tokens: int, step: int, device: torch.device) -> Draws:
    """All that is random in a training step, for the global batch."""
    routes = active_routes(cfg, step)
    draws = draw_step(
        cfg.seed,
        step,
        cfg.train.batch_size,
        latents.shape,
        num_tokens,
        len(routes),
        posterior=latents.content == "moments",
        device=device,
    )
    shared = (u[:1].expand_as(u) if route.select == "shared" else u for route, u in zip(routes, draws.routes))
    return replace(draws, routes=tuple(shared))


def training_loss(
    cfg: Settings, network: Callable[..., Tensor], latents: Latents, stored: Tensor, labels: Tensor, draws: Draws
) -> Tensor:
    """Loss of each sample (B,) fp32 by the run's objective, with dropped labels and under the routes drawn for.

    stored (B, C or 2C, S, S) and labels (B,) as the dataset holds them, on the network's device;
    `latents` says what the stored numbers mean, `draws` holds all that is random.
    """
    x = to_network(stored, latents, draws.posterior)
    grid = (x.shape[2] // cfg.model.patch_size, x.shape[3] // cfg.model.patch_size)
    y = drop_labels(labels, draws.drop, cfg.train.label_drop, cfg.dataset.num_classes)
    routes = [(route, choose_ids(route, u, grid)) for route, u in zip(active_routes(cfg, draws.step), draws.routes)]
    process = process_of(cfg)
    level = process.noise_level(draws.level)
    if cfg.train.loss_tokens == "all" or not routes:
        return process.loss(network, x, y, level, draws.noise, routes)
    squared, denoised, noisy = process.errors(network, x, y, level, draws.noise, routes)
    ids = [ids_keep for _, ids_keep in routes]
    loss = process.weight(level) * kept_loss(squared, ids, cfg.model.patch_size)
    if cfg.train.reconstruction:
        loss = loss + cfg.train.reconstruction * reconstruction_loss(denoised, noisy, ids, cfg.model.patch_size)
    return loss
