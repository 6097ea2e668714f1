"""Loss on held-out data, computed on all tokens and with noise that is the same for all runs.

Compare runs by this number, not by the training loss: where tokens skip blocks (a route), that loss is higher, and does
not show how good the network is on all tokens. EDM: the training loss at quantiles of the training noise levels.
Rectified flow: the mean squared error of the velocity at evenly spaced times t."""

from functools import partial

import torch
from torch import Tensor, nn

from tread.data.dataset import LatentDataset
from tread.data.latents import to_network
from tread.diffusion.process import Process
from tread.diffusion.token_beside import noised_token
from tread.models.conditions import Condition, to
from tread.runtime.randomness import seeded_normal


def point(numbers: Tensor, points: int, samples: int, noise_levels: int) -> tuple[Tensor, Tensor]:
    """Return indices of sample and noise level, (n,) int64 each, of evaluation points `numbers` (n,) in 0..points−1. If
    points ≤ samples, samples are evenly spaced in the dataset (a share of each class, if sorted by class), and point k
    has level k % noise_levels. Else point k has sample s = k % samples, level (s + k // samples) % noise_levels."""
    if points <= samples:
        return numbers * samples // points, numbers % noise_levels
    return numbers % samples, (numbers % samples + numbers // samples) % noise_levels


def read_points(
    process: Process,
    data: LatentDataset,
    numbers: Tensor,
    points: int,
    noise_levels: int,
    device: torch.device,
    stream: str = "evaluation",
) -> tuple[tuple[Tensor, Condition, Tensor, Tensor], dict[str, Tensor]]:
    """Read evaluation points (see `point`). Returns (latents (n, C, S, S), labels (n,) or texts, noise levels (n,),
    noise (n, C, S, S)), and {"class_token": noised features of whole pictures (n, z)}; {} if data.class_token is None.

    numbers               (n,) points to read, in 0..points−1; the noise depends only on them and the name `stream`.
    points, noise_levels  total number of points, and number of noise levels over which they are spread.

    Of latents stored as mean and std or log-variance, the mean is read; of a sample's captions, the first one.
    """
    sample, level = point(numbers, points, len(data), noise_levels)
    batch = data.read(sample.numpy())
    x = to_network(batch.stored.to(device), data.latents)
    noise = seeded_normal(numbers.tolist(), data.latents.shape, stream).to(device)
    quantiles = process.evaluation_levels(noise_levels).float()[level].to(device)
    token = None if batch.class_token is None else batch.class_token.to(device)
    drawn = seeded_normal(numbers.tolist(), (data.class_token or 0,), f"{stream} class token").to(device)
    return (x, to(batch.condition, device), quantiles, noise), noised_token(token, drawn, quantiles)


@torch.no_grad()
def heldout_loss(
    process: Process, network: nn.Module, data: LatentDataset, numbers: Tensor, points: int, noise_levels: int
) -> Tensor:
    """Return evaluation points' losses (see `point`), (n,) fp32 on the network's device; each point has its own noise.

    numbers       (n,) int64 in 0..points−1, the points to compute.
    points        total number of points.
    noise_levels  number of noise levels over which the points are spread, see Process.evaluation_levels.
    """
    given, more = read_points(process, data, numbers, points, noise_levels, next(network.parameters()).device)
    return process.evaluation_loss(partial(network, **more), *given)
