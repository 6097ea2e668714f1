"""The random numbers of a training step, routes' choice of tokens included; see tread/runtime/randomness.py."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from routing_module import Route
from tread.data.latents import LatentSpec
from tread.routing.ids import pair
from tread.runtime.randomness import generator
from tread.training.settings import Settings


class Draws(NamedTuple):
    """The random numbers of one training step for a batch of B samples. Comments in the source explain each field."""

    level: Tensor  # (B,) standard normal, to become noise levels
    noise: Tensor  # (B, C, S, S) standard normal, to be added to the latents
    drop: Tensor  # (B,) uniform, to drop labels or texts
    routes: tuple[tuple[Route, Tensor], ...]  # with ids_keep (B, K), or uniform (B, N) if the rule scores tokens
    posterior: Tensor | None  # (B, C, S, S) standard normal, to sample latents from moments; None if latents are stored
    back: Tensor | None = None  # (B,) uniform, lowers the noise of alignment=self's teacher; else None
    path: Tensor | None = None  # (B,) uniform, to drop SPRINT's sparse path; None without train.path_drop
    token: Tensor | None = None  # (B, z) standard normal, to be added to class tokens; None without them

    def rows(self, rows: slice, beyond: int = 0) -> "Draws":
        """Return the random numbers of the samples in the slice `rows` of the batch. `noise` and `posterior` also cover
        the next `beyond` samples, for losses that contrast samples; after the batch's last sample comes its first."""
        routes = tuple((route, chosen[rows]) for route, chosen in self.routes)
        drawn = {name: value[rows] for name, value in self._asdict().items() if isinstance(value, Tensor)}
        if beyond:
            numbers = torch.arange(rows.start, rows.stop + beyond, device=self.noise.device) % len(self.noise)
            drawn |= {name: getattr(self, name)[numbers] for name in ("noise", "posterior") if name in drawn}
        return self._replace(**drawn, routes=routes)


def active_routes(cfg: Settings, step: int) -> tuple[Route, ...]:
    """Return a step's routes: the model's, with the ratio of train.ratio_schedule, if any; () from routes_until on."""
    until, schedule = cfg.train.routes_until, cfg.train.ratio_schedule
    if until is not None and step >= until:
        return ()
    routes = cfg.model.resolved_routes
    return schedule.apply(routes, step) if schedule else routes


def step_draws(cfg: Settings, latents: LatentSpec, step: int, device: torch.device | str) -> Draws:
    """Draw a training step's random numbers, for the global batch, each kind from a random generator of its own."""

    def drawn(kind: Callable[..., Tensor], stream: str, *size: int) -> Tensor:
        return kind(size, generator=generator(cfg.seed, step, stream, device=device), device=device)

    normal, uniform, batch_size = partial(drawn, torch.randn), partial(drawn, torch.rand), cfg.train.batch_size
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
