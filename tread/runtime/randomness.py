"""Randomness that is addressed, not stored.

Every random number of a training run is a function of (seed, step, what it is for, position in the
global batch). A step's numbers are drawn for the whole global batch, and a rank or a micro-batch
takes its rows; so nothing depends on the number of ranks or accumulation steps, and a resumed run
needs no generator state. On one kind of device the numbers repeat bit for bit; a CPU and a GPU draw
different ones.
"""

import hashlib

import torch
from torch import Tensor


def generator(*address: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator seeded by its address, e.g. generator(seed, step, "noise")."""
    digest = hashlib.blake2b(repr(address).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


def seeded_normal(seeds: list[int], shape: tuple[int, ...], stream: str = "noise") -> Tensor:
    """(len(seeds), *shape) standard normal on the CPU; row i depends on seeds[i] alone."""
    return torch.stack([torch.randn(shape, generator=generator(seed, stream)) for seed in seeds])


def seeded_uniform(seeds: list[int], shape: tuple[int, ...], stream: str) -> Tensor:
    """(len(seeds), *shape) uniform in [0, 1) on the CPU; row i depends on seeds[i] alone."""
    return torch.stack([torch.rand(shape, generator=generator(seed, stream)) for seed in seeds])
