"""What a training step minimises: stored samples, labels and draws in, a loss for each sample out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from autoencoder import to_network
from latents import Latents
from randomness import Draws, draw_step
from routing_module import Route, draw_ids
from settings import Settings, process_of


def drop_labels(y: Tensor, uniform: Tensor, probability: float, null_class: int) -> Tensor:
    """Replace labels by the null class where the uniform number is below the probability: (B,)."""
    return torch.where(uniform < probability, null_class, y)


def active_routes(cfg: Settings, step: int) -> tuple[Route, ...]:
    """The routes of training step `step` (0, 1, …): the model's, until train.routes_until."""
    until = cfg.train.routes_until
    return cfg.model.routes if until is None or step < until else ()


def step_draws(cfg: Settings, latents: Latents, num_tokens: int, step: int, device: torch.device) -> Draws:
    """All that is random in a training step, for the global batch."""
    return draw_step(
        cfg.seed,
        step,
        cfg.train.batch_size,
        latents.shape,
        num_tokens,
        len(active_routes(cfg, step)),
        posterior=latents.content == "moments",
        device=device,
    )


def training_loss(
    cfg: Settings, network: Callable[..., Tensor], latents: Latents, stored: Tensor, labels: Tensor, draws: Draws
) -> Tensor:
    """Loss of each sample (B,) fp32 by the run's objective, with dropped labels and under the routes drawn for.

    stored (B, C or 2C, S, S) and labels (B,) as the dataset holds them, on the network's device;
    `latents` says what the stored numbers mean, `draws` holds all that is random.
    """
    x = to_network(stored, latents, draws.posterior)
    y = drop_labels(labels, draws.drop, cfg.train.label_drop, cfg.dataset.num_classes)
    routes = [(route, draw_ids(u, route.selection_ratio)) for route, u in zip(cfg.model.routes, draws.routes)]
    process = process_of(cfg)
    return process.loss(network, x, y, process.noise_level(draws.level), draws.noise, routes)
