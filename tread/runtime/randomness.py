"""Random numbers that follow from an address, such as (seed, step, "noise"), instead of a stored generator state.

Each random number of training is a function of (seed, step, purpose, position in the global batch). A step's numbers
are drawn for the global batch; a rank or micro-batch takes its rows. So nothing depends on ranks or accumulation, and a
resumed run needs no generator state. Numbers repeat bit for bit on one kind of device; CPUs and GPUs differ."""

import hashlib

import torch
from torch import Tensor


def generator(*address: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator seeded by a hash of its address, e.g. generator(seed, step, "noise"). On a CPU, torch keeps 32
    bits of the hash, so that one pair of addresses in four billion shares its numbers."""
    digest = hashlib.blake2b(repr(address).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


def seeded_normal(seeds: list[int], shape: tuple[int, ...], stream: str = "noise") -> Tensor:
    """Draw (len(seeds), *shape) standard normal numbers on the CPU; row i depends on seeds[i] and `stream` alone."""
    return torch.stack([torch.randn(shape, generator=generator(seed, stream)) for seed in seeds])


def seeded_uniform(seeds: list[int], shape: tuple[int, ...], stream: str) -> Tensor:
    """Draw (len(seeds), *shape) uniform numbers in [0, 1) on the CPU; row i depends on seeds[i] and `stream` alone."""
    return torch.stack([torch.rand(shape, generator=generator(seed, stream)) for seed in seeds])
