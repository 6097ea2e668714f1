"""Full-token loss on held-out data, with noise that is the same for all runs.

This is the number to compare runs by: the training loss of a routed network is higher than that of a dense one, and
says nothing about what it does with all tokens. EDM's is the loss weighted as in training, at its noise levels,
rectified flow's the velocity error at uniform times.
"""

import torch
from torch import Tensor, nn

from tread.data.dataset import LatentDataset
from tread.data.latents import to_network
from tread.diffusion.process import Process
from tread.models.conditions import Condition, to
from tread.runtime.randomness import seeded_normal


def point(numbers: Tensor, points: int, samples: int, noise_levels: int) -> tuple[Tensor, Tensor]:
    """Sample and noise level of evaluation points, both (n,) int64.

    With fewer points than samples they are spread over all samples, so that each class has its
    share; with more, each sample comes in turn and meets the noise levels one after the other.
    """
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
) -> tuple[Tensor, Condition, Tensor, Tensor]:
    """Latents (n, C, S, S), labels (n,) or texts, noise levels (n,) and noise (n, C, S, S) of evaluation points.

    All on a device; arguments as in `heldout_loss`, and stream names what the noise is for. Stored moments give their
    mean, and several captions their first.
    """
    sample, level = point(numbers, points, len(data), noise_levels)
    batch = data.read(sample.numpy())
    x = to_network(batch.stored.to(device), data.latents)
    noise = seeded_normal(numbers.tolist(), data.latents.shape, stream).to(device)
    quantiles = process.evaluation_levels(noise_levels).float()[level].to(device)
    return x, to(batch.condition, device), quantiles, noise


@torch.no_grad()
def heldout_loss(
    process: Process, network: nn.Module, data: LatentDataset, numbers: Tensor, points: int, noise_levels: int
) -> Tensor:
    """Loss of some of the evaluation points, (n,) fp32 on the network's device; each point has noise of its own.

    numbers       (n,) int64 in 0..points−1, see `point`.
    points        how many there are in all.
    noise_levels  how many are used, see Process.evaluation_levels.
    """
    device = next(network.parameters()).device
    return process.evaluation_loss(network, *read_points(process, data, numbers, points, noise_levels, device))
