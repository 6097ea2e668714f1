"""Full-token loss on held-out data, with noise that is the same for all runs.

This is the number to compare runs by: the training loss of a routed network is higher than that of
a dense one, and says nothing about what it does with all tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autoencoder import to_network
from edm import EDM
from latents import LatentDataset
from randomness import seeded_normal


@torch.no_grad()
def loss_sum(edm: EDM, network: nn.Module, data: LatentDataset, numbers: Tensor, noise_levels: int) -> Tensor:
    """Sum of the EDM loss over evaluation points, a 0-d tensor on the network's device.

    numbers       (n,) int64: point k takes sample k modulo the data's size, noise of its own, and
                  one of the noise levels in turn, so that with growing k each sample meets each.
    noise_levels  how many mid-quantiles of the training noise distribution are used.

    Moments are represented by their mean, labels are kept.
    """
    device = next(network.parameters()).device
    batch = data.read((numbers % len(data)).numpy())
    x = to_network(batch.stored.to(device), data.latents)
    noise = seeded_normal(numbers.tolist(), data.latents.shape, "evaluation").to(device)
    level = (numbers + numbers // len(data)) % noise_levels
    sigma = edm.sigma_quantiles(noise_levels).float()[level].to(device)
    return edm.loss(network, x, batch.labels.to(device), sigma, noise).sum()
