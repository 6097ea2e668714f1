"""The evaluation loss: which points it takes, and its sum against the loss computed point by point."""

import pytest
import torch
from conftest import CPU, launch, logged, opened

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


DECODER = ["model.decoder_hidden_size=8", "model.decoder_depth=1", "model.decoder_heads=2"]


def test_models_that_train_otherwise_are_evaluated_alike(tmp_path):
    """As DiT's above: MaskDiT's and SPRINT's eval_loss is of all tokens, λ(σ)·(D − x)² by Karras et al.'s Table 1,
    without MaskDiT's reconstruction and without SPRINT's dropped paths, which their training losses have.
    """
    numbers, common = torch.arange(32), ("train.steps=3", "eval.points=32", "report=false", "sampling.decode=false")
    for model, more in (("maskdit", DECODER), ("sprint", [])):
        launch(tmp_path, f"model={model}", *more, *common, f"name={model}")
        ema = opened(tmp_path / "results" / model).load(CPU).network
        data = LatentDataset(tmp_path / "data/digits/heldout")
        sample, level = point(numbers, 32, len(data), 16)
        batch, edm = data.read(sample.numpy()), EDM()
        x, labels = batch.stored, batch.labels
        sigma, d = edm.quantiles(16).float()[level], 0.5
        noisy = x + sigma.view(-1, 1, 1, 1) * seeded_normal(numbers.tolist(), (1, 8, 8), "evaluation")
        root = (sigma**2 + d**2).sqrt().view(-1, 1, 1, 1)
        with torch.no_grad():
            output = ema(noisy / root, sigma.log() / 4, labels)
        denoised = d**2 / root**2 * noisy + sigma.view(-1, 1, 1, 1) * d / root * output
        losses = (sigma**2 + d**2) / (sigma * d) ** 2 * (denoised - x).square().mean(dim=(1, 2, 3))
        assert output.std() > 1e-4
        found = logged(tmp_path / "results" / model, "eval_loss")
        assert found == pytest.approx([losses.mean().item()], rel=1e-5), model
