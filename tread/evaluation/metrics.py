"""Scores of sets of pictures, as functions of their features.

FID and sFID (`frechet_distance` of two kinds of features), Inception Score, precision and recall are computed as in
ADM's evaluator (Dhariwal & Nichol 2021, arXiv 2105.05233). KID, which ADM does not have, is computed too."""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tread.diffusion.solvers import unseen

NEIGHBOURS = 3  # k of precision and recall
SPLIT = 5000  # pictures in a split of the Inception Score
BLOCK_NUMBERS = 2**25  # pairs of points in a block: 128 MB of fp32 numbers; two blocks are in memory at a time
Seen = Callable[[int], object]  # called with the number of rows just done, for progress bars


@dataclass(frozen=True)
class Moments:
    """Mean and covariance, in float64, of features that come in parts.

    count    number n of feature vectors.
    mean     (D,)
    scatter  (D, D), the sum of (x − mean)(x − mean)ᵀ, which is n − 1 times the covariance.
    """

    count: int
    mean: np.ndarray
    scatter: np.ndarray

    @classmethod
    def of(cls, features: np.ndarray) -> "Moments":
        """Return the moments of features (n, D), n at least 1."""
        features = features.astype(np.float64)
        mean = features.mean(axis=0)
        centred = torch.from_numpy(features - mean)  # with torch's threads: launchers may limit NumPy's
        return cls(len(features), mean, (centred.T @ centred).numpy())

    @classmethod
    def of_parts(cls, parts: Iterable[np.ndarray]) -> "Moments":
        """Return the joint moments of one or more parts (n, D), with one part in memory at a time."""
        return functools.reduce(cls.merge, map(cls.of, parts))

    def merge(self, other: "Moments") -> "Moments":
        """Return the moments of both sets together (Chan, Golub & LeVeque 1983). The order only changes rounding."""
        count, offset = self.count + other.count, other.mean - self.mean
        scatter = self.scatter + other.scatter + np.outer(offset, offset) * (self.count * other.count / count)
        return Moments(count, self.mean + offset * (other.count / count), scatter)

    @property
    def gaussian(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean (D,) and unbiased covariance (D, D), as `frechet_distance` takes them; needs at least 2 features."""
        return self.mean, self.scatter / (self.count - 1)


def _factor(covariance: np.ndarray) -> Tensor:
    """Return A (D, rank) with A·Aᵀ = covariance (D, D), positive semi-definite; eigenvalues close to 0 are dropped."""
    values, vectors = torch.linalg.eigh(torch.from_numpy(np.asarray(covariance, np.float64)))
    kept = values > values[-1].clamp(min=0) * len(values) * torch.finfo(values.dtype).eps
    return vectors[:, kept] * values[kept].sqrt()


def frechet_distance(mean1: np.ndarray, covariance1: np.ndarray, mean2: np.ndarray, covariance2: np.ndarray) -> float:
    """Return the squared Fréchet distance of two Gaussians (Heusel et al. 2017, arXiv 1706.08500).

    |μ₁−μ₂|² + tr Σ₁ + tr Σ₂ − 2·tr (Σ₁Σ₂)^½. With Σ = A·Aᵀ the last trace is the sum of the singular values of A₁ᵀ·A₂,
    which is real, and exact for rank-deficient covariances; roots of the eigenvalues of Σ₁Σ₂ lose half the digits.
    Raises ValueError for numbers that are not finite.
    """
    if not all(np.isfinite(array).all() for array in (mean1, covariance1, mean2, covariance2)):
        raise ValueError("means or covariances hold numbers that are not finite")
    offset = np.asarray(mean1, np.float64) - mean2
    overlap = torch.linalg.svdvals(_factor(covariance1).T @ _factor(covariance2)).sum().item()
    distance = offset @ offset + np.trace(covariance1) + np.trace(covariance2) - 2 * overlap
    return max(0.0, float(distance))  # below 0 is rounding


def inception_score(probabilities: np.ndarray, split: int = SPLIT) -> float:
    """Return exp(mean KL(p(y|x) ‖ p(y))) (Salimans et al. 2016, arXiv 1606.03498), averaged over splits. The rows of
    probabilities (n, classes) sum to 1 and are in the pictures' order. Each `split` consecutive rows are one split; the
    last one may be shorter, and counts like the others, as in ADM's evaluator."""
    scores = []
    for start in range(0, len(probabilities), split):
        p = torch.from_numpy(probabilities[start : start + split].astype(np.float64))
        divergence = torch.special.xlogy(p, p) - torch.special.xlogy(p, p.mean(dim=0))
        scores.append(divergence.sum(dim=1).mean().exp().item())
    return float(np.mean(scores))


def precision_recall(reference: Tensor, samples: Tensor, seen: Seen = unseen) -> tuple[float, float]:
    """Return improved precision and recall (Kynkäänniemi et al. 2019, arXiv 1904.06991) of features (n, D) and (m, D).

    Precision is the share of samples inside the reference's manifold; recall is the share of the reference inside the
    samples' manifold. A manifold is the union of closed balls around a set's points; a ball reaches from its point to
    the k-th nearest other point, k = NEIGHBOURS. Distances are fp32; ADM's evaluator uses fp16 where that is finite.

    Both sets must be fp32 on one device and have over k points. BLOCK_NUMBERS distances are computed at a time. `seen`
    is called with the number of rows just done; these numbers add up to 2·(n + m).
    """
    centre = reference.mean(dim=0)  # centred, as |a|² − 2ab + |b|² loses digits far from 0
    reference, samples = reference - centre, samples - centre
    theirs, ours = _radii(reference, seen), _radii(samples, seen)
    return _inside(samples, reference, theirs, seen), _inside(reference, samples, ours, seen)


def _distances(rows: Tensor, columns: Tensor, seen: Seen) -> Iterator[Tensor]:
    """Yield squared distances (b, m) of b of the `rows` (n, D) at a time to all `columns` (m, D), then call seen(b)."""
    norms = columns.square().sum(dim=1)
    for part in rows.split(max(1, BLOCK_NUMBERS // len(columns))):
        yield torch.addmm(norms, part, columns.T, alpha=-2).add_(part.square().sum(dim=1, keepdim=True)).clamp_(min=0)
        seen(len(part))


def _radii(features: Tensor, seen: Seen) -> Tensor:
    """Return points' squared distances to their NEIGHBOURS-th nearest other point, (n,); call seen(rows just done)."""
    blocks = _distances(features, features, seen)
    return torch.cat([block.topk(NEIGHBOURS + 1, dim=1, largest=False).values[:, -1] for block in blocks])


def _inside(points: Tensor, centres: Tensor, radii: Tensor, seen: Seen) -> float:
    """Return the share of points in any ball, `radii` being squared, one per centre; call seen(number of rows done)."""
    inside = sum((block <= radii).any(dim=1).sum() for block in _distances(points, centres, seen))
    return inside.item() / len(points)


def kernel_distance(reference: Tensor, samples: Tensor, seen: Seen = unseen) -> float:
    """Return KID, the unbiased squared MMD with kernel (x·y/D + 1)³ (Bińkowski et al. 2018, arXiv 1801.01401), between
    features (n, D) and (m, D) fp32, n and m at least 2. All pairs are used; other code averages over random subsets.
    `seen` is called with the number of rows just done; these numbers add up to n + 2·m."""

    def sums(rows: Tensor, columns: Tensor) -> Iterator[float]:
        for part in rows.split(max(1, BLOCK_NUMBERS // len(columns))):
            block = (part @ columns.T).div_(rows.shape[1]).add_(1).pow_(3)
            yield block.sum(dtype=torch.float64).item()
            seen(len(part))

    def within(features: Tensor) -> float:
        diagonal = ((features.square().sum(dim=1) / features.shape[1] + 1) ** 3).double().sum().item()
        return (sum(sums(features, features)) - diagonal) / (len(features) * (len(features) - 1))

    across = sum(sums(samples, reference)) / (len(samples) * len(reference))
    return within(reference) + within(samples) - 2 * across
