"""Randomness that is addressed, not stored.

Every random number of a training run is a function of (seed, step, what it is for, position in the
global batch). A step's numbers are drawn for the whole global batch, and a rank or a micro-batch
takes its rows; so nothing depends on the number of ranks or accumulation steps, and a resumed run
needs no generator state. On one kind of device the numbers repeat bit for bit; a CPU and a GPU draw
different ones.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


def generator(*address: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator seeded by its address, e.g. generator(seed, step, "noise")."""
    digest = hashlib.blake2b(repr(address).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


@dataclass(frozen=True)
class Draws:
    """What one training step draws, for B samples of a batch.

    step       its number.
    level      (B,) standard normal, to become noise levels.
    noise      (B, C, S, S) standard normal, to be added to the latents.
    drop       (B,) uniform, to drop labels.
    routes     a (B, N) uniform tensor for each route, to choose tokens.
    posterior  (B, C, S, S) standard normal, to sample latents from moments; None if they are plain.
    """

    step: int
    level: Tensor
    noise: Tensor
    drop: Tensor
    routes: tuple[Tensor, ...]
    posterior: Tensor | None

    def rows(self, rows: slice) -> Draws:
        """The draws of some samples of the batch."""
        posterior = None if self.posterior is None else self.posterior[rows]
        routes = tuple(r[rows] for r in self.routes)
        return Draws(self.step, self.level[rows], self.noise[rows], self.drop[rows], routes, posterior)


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


def draw_step(
    seed: int,
    step: int,
    batch_size: int,
    shape: tuple[int, int, int],
    num_tokens: int,
    num_routes: int,
    posterior: bool,
    device: torch.device | str = "cpu",
) -> Draws:
    """All draws of a training step for the global batch; each kind has a stream of its own.

    shape is the latents' (C, S, S). A change of one kind (routes on or off, say) leaves the numbers
    of the others as they are, so that runs with and without routes see the same noise.
    """

    def normal(stream: str, *size: int) -> Tensor:
        return torch.randn(size, generator=generator(seed, step, stream, device=device), device=device)

    def uniform(stream: str, *size: int) -> Tensor:
        return torch.rand(size, generator=generator(seed, step, stream, device=device), device=device)

    return Draws(
        step=step,
        level=normal("sigma", batch_size),
        noise=normal("noise", batch_size, *shape),
        drop=uniform("drop", batch_size),
        routes=tuple(uniform(f"route {i}", batch_size, num_tokens) for i in range(num_routes)),
        posterior=normal("posterior", batch_size, *shape) if posterior else None,
    )


def seeded_normal(seeds: list[int], shape: tuple[int, ...], stream: str = "noise") -> Tensor:
    """(len(seeds), *shape) standard normal on the CPU; row i depends on seeds[i] alone."""
    return torch.stack([torch.randn(shape, generator=generator(seed, stream)) for seed in seeds])


def seeded_uniform(seeds: list[int], shape: tuple[int, ...], stream: str) -> Tensor:
    """(len(seeds), *shape) uniform in [0, 1) on the CPU; row i depends on seeds[i] alone."""
    return torch.stack([torch.rand(shape, generator=generator(seed, stream)) for seed in seeds])
