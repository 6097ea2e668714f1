"""Distances between sets of pictures, as pure functions of arrays."""

from __future__ import annotations

import numpy as np


def mean_and_covariance(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean (D,) and unbiased covariance (D, D) of features (n, D), in float64; n must be at least 2."""
    if features.ndim != 2 or len(features) < 2:
        raise ValueError(f"features have shape {features.shape}, but must be (n, D) with n at least 2")
    features = features.astype(np.float64)
    return features.mean(axis=0), np.cov(features, rowvar=False)


def _root(covariance: np.ndarray) -> np.ndarray:
    """Symmetric square root of a positive semi-definite matrix."""
    values, vectors = np.linalg.eigh(covariance)
    return (vectors * np.sqrt(values.clip(min=0))) @ vectors.T


def frechet_distance(mean1: np.ndarray, covariance1: np.ndarray, mean2: np.ndarray, covariance2: np.ndarray) -> float:
    """Squared Fréchet distance of two Gaussians (Heusel et al. 2017, arXiv 1706.08500).

    |μ₁−μ₂|² + tr Σ₁ + tr Σ₂ − 2·tr (Σ₁Σ₂)^½, where the last trace is the sum of the singular values
    of Σ₁^½·Σ₂^½: real by construction, and exact on rank-deficient input too.
    """
    singular = np.linalg.svd(_root(covariance1) @ _root(covariance2), compute_uv=False)
    offset = mean1 - mean2
    return float(offset @ offset + np.trace(covariance1) + np.trace(covariance2) - 2 * singular.sum())
