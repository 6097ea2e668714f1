"""Metrics against closed forms, sqrtm, and naive twins that follow the papers' definitions literally."""

import subprocess
import sys

import numpy as np
import pytest
import scipy.linalg
import torch
from conftest import ROOT

from tread.evaluation import metrics
from tread.evaluation.metrics import Moments, frechet_distance, inception_score, kernel_distance, precision_recall


def test_frechet_distance_of_known_gaussians():
    a, b = np.diag([1.0, 4.0, 9.0]), np.diag([4.0, 4.0, 1.0])
    mean = np.array([1.0, 2.0, 2.0])
    assert frechet_distance(mean, a, 0 * mean, b) == pytest.approx(9 + 1 + 0 + 4)  # |μ|² + Σ(σ₁−σ₂)²


def test_frechet_distance_equals_the_square_root_way():
    rng = np.random.default_rng(0)
    sets = [rng.standard_normal((500, 30)) @ rng.standard_normal((30, 30)) + rng.standard_normal(30) for _ in range(2)]
    (m1, c1), (m2, c2) = (Moments.of(item).gaussian for item in sets)
    root = scipy.linalg.sqrtm(c1 @ c2).real
    expected = (m1 - m2) @ (m1 - m2) + np.trace(c1 + c2 - 2 * root)
    assert frechet_distance(m1, c1, m2, c2) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e9])
def test_frechet_distance_on_rank_deficient_sets(scale):
    """Closed form with an isotropic set: tr Σ + D − 2·Σ√λ. Small eigenvalues count, and those of rounding do not."""
    rng = np.random.default_rng(0)
    few, mean, values = rng.standard_normal((5, 30)), np.zeros(30), np.array([3.0, 1.0, 1e-6, 1e-11])
    assert frechet_distance(*Moments.of(few).gaussian, *Moments.of(few).gaussian) == pytest.approx(0, abs=1e-9)
    axes = np.linalg.qr(rng.standard_normal((30, 4)))[0]
    actual = frechet_distance(mean, scale * (axes * values) @ axes.T, mean, scale * np.eye(30))
    assert actual == pytest.approx(scale * (values.sum() + 30 - 2 * np.sqrt(values).sum()), rel=1e-10)
    nothing = np.zeros((30, 30))
    assert frechet_distance(mean, nothing, mean, scale * np.eye(30)) == pytest.approx(30 * scale)


def test_frechet_distance_of_numbers_that_are_not_finite_is_refused():
    mean, covariance = np.zeros(3), np.eye(3)
    with pytest.raises(ValueError, match="not finite"):
        frechet_distance(mean, covariance, mean, covariance * np.nan)


def test_moments_merge_to_numpys_whatever_the_parts():
    features = np.random.default_rng(0).standard_normal((100, 7)).astype(np.float32) * 3 + 1000
    for cuts in ([50], [1, 2, 99], [10, 20, 30, 40, 97]):
        actual = Moments.of_parts(np.split(features, cuts))
        assert actual.count == 100
        np.testing.assert_allclose(actual.mean, features.astype(np.float64).mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(actual.gaussian[1], np.cov(features.astype(np.float64), rowvar=False), rtol=1e-9)


def test_inception_score_of_known_distributions():
    certain = np.eye(8)[np.arange(64) % 8]
    assert inception_score(certain) == pytest.approx(8)  # certain and diverse: the number of classes
    assert inception_score(np.full((64, 8), 1 / 8)) == pytest.approx(1)
    assert inception_score(np.eye(8)[np.zeros(64, dtype=int)]) == pytest.approx(1)
    assert inception_score(np.eye(8)[np.arange(5001) % 8]) == pytest.approx((8 + 1) / 2)  # 5,000, and one that is left


def test_inception_score_is_the_mean_over_splits_with_the_rest_as_one():
    p = np.random.default_rng(0).dirichlet(np.ones(5) * 0.2, 25)

    def naive(part):
        divergences = [sum(x * np.log(x / q) for x, q in zip(row, part.mean(axis=0)) if x > 0) for row in part]
        return np.exp(np.mean(divergences))

    assert inception_score(p, split=10) == pytest.approx(np.mean([naive(p[:10]), naive(p[10:20]), naive(p[20:])]))


def naive_precision_recall(reference, samples, k):
    def radius(points, i):
        return sorted(np.linalg.norm(points - points[i], axis=1))[k]  # position 0 is the point itself

    def share(points, centres):
        radii = [radius(centres, i) for i in range(len(centres))]
        return np.mean([any(np.linalg.norm(p - c) <= r for c, r in zip(centres, radii)) for p in points])

    return share(samples, reference), share(reference, samples)


@pytest.mark.parametrize("block, origin", [(7, 0), (200, 0), (10**6, 0), (10**6, 1000)])
def test_precision_and_recall_are_the_definition_s(monkeypatch, block, origin):
    rng = np.random.default_rng(0)
    reference, samples = rng.standard_normal((60, 5)), rng.standard_normal((45, 5)) * 0.6 + 0.5
    reference, samples = ((item + origin).astype(np.float32).astype(np.float64) for item in (reference, samples))
    expected = naive_precision_recall(reference, samples, 3)
    assert 0.1 < expected[1] < expected[0] <= 1
    monkeypatch.setattr(metrics, "BLOCK_NUMBERS", block)
    assert precision_recall(*(torch.from_numpy(a).float() for a in (reference, samples))) == pytest.approx(expected)


def test_precision_counts_a_ball_s_edge_but_not_the_point_itself():
    """Two clusters of four: the third neighbour of 0 is 3, and of 3 is 0, so the balls reach from −3 to 6."""
    cluster = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    reference = torch.cat([cluster, cluster + 1000])
    samples = torch.tensor([[-3.0], [-3.1], [6.0], [6.1], [997.0], [996.9]])
    assert precision_recall(reference, samples)[0] == pytest.approx(3 / 6)


def test_kid_is_the_unbiased_estimate(monkeypatch):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((12, 4)), rng.standard_normal((9, 4)) + 0.3

    def k(a, b):
        return (a @ b / 4 + 1) ** 3

    mine = [np.mean([k(a, b) for i, a in enumerate(s) for j, b in enumerate(s) if i != j]) for s in (x, y)]
    expected = sum(mine) - 2 * np.mean([k(a, b) for a in x for b in y])
    tensors = [torch.from_numpy(a).float() for a in (x, y)]
    assert kernel_distance(*tensors) == pytest.approx(expected, rel=1e-5)
    monkeypatch.setattr(metrics, "BLOCK_NUMBERS", 5)
    assert kernel_distance(*tensors) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_large_sets_fit_in_two_gigabytes():
    """50K × 10K × 2048, the issue's size, in a process of its own: resident memory is measured."""
    code = (
        "import torch; from tread.evaluation import metrics; torch.manual_seed(0); "
        "x, y = torch.randn(10_000, 2048), torch.randn(50_000, 2048); print(metrics.precision_recall(x, y)); "
        "print(int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) / 1e6)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout.split()[-1]) < 2.0
