"""The evaluation loss: which points it takes, and its sum against the loss computed point by point."""

from __future__ import annotations

import pytest
import torch

from tread.data.dataset import LatentDataset
from tread.data.latents import LatentSpec
from tread.data.writer import write_dataset
from tread.diffusion.edm import EDM
from tread.evaluation.heldout_loss import heldout_loss, point
from tread.runtime.randomness import seeded_normal


def test_many_points_take_each_sample_at_each_noise_level():
    for samples in (355, 16, 7):
        sample, level = point(torch.arange(16 * samples), 16 * samples, samples, 16)
        assert len(set(zip(sample.tolist(), level.tolist()))) == 16 * samples


def test_few_points_are_spread_over_all_samples():
    sample, level = point(torch.arange(4096), 4096, 50_000, 16)
    assert sample.diff().min() >= 12 and sample.diff().max() <= 13 and sample[-1] > 49_980
    assert torch.bincount(level).tolist() == [256] * 16
    assert len(set((sample // 50).tolist())) == 1000  # each of 1000 classes stored in order


def test_the_losses_equal_those_one_by_one(tmp_path, tiny):
    meaning = LatentSpec(shape=(4, 8, 8), classes=tuple("abcdefghij"), autoencoder="none", dtype="float32", scale=2.0)
    stored = torch.randn(5, 1, 4, 8, 8)
    write_dataset(tmp_path / "data", meaning, [(stored.numpy(), torch.arange(5).numpy())])
    data, edm = LatentDataset(tmp_path / "data"), EDM()
    numbers = torch.tensor([0, 3, 11, 12])
    expected = []
    with torch.no_grad():
        for k in numbers.tolist():
            i, sigma = k % 5, edm.quantiles(4)[(k % 5 + k // 5) % 4]
            noise = seeded_normal([k], (4, 8, 8), "evaluation")
            expected.append(edm.loss(tiny, 2 * stored[i], torch.tensor([i]), sigma.view(1), noise).item())
    assert heldout_loss(edm, tiny, data, numbers, 20, 4).tolist() == pytest.approx(expected, rel=1e-5)
