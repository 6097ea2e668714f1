"""The training loss over kept tokens alone, for several routes, as in the first arXiv version of TREAD (2501.04765v1).

On each route some patches skip some blocks, and the others are kept. The denoising loss is averaged over the patches
that each route keeps, and over the routes. A reconstruction loss on the skipped patches, also averaged over the routes,
is added with a coefficient, as in MaskDiT (Zheng et al. 2023, arXiv 2306.09305). Its target is the noisy input,
normalised within each patch with the unbiased variance, as in MaskDiT's code (to 0 if a patch is one number). This
follows what is known of that version of TREAD; the version at ICCV averages over all patches.

model=maskdit trains with the same two terms, on its only route. Only the denoising term has the process's loss weight:
λ(σ) for EDM. For rectified flow the velocity's error has weight 1. With D = x_t − t·v that error is
v − (ε − x) = (x − D)/t, so the squared error of D has weight 1/t². The reconstruction is D for both processes.

Shapes: B samples, C channels, S×S latents, N = (S/p)² patches in raster order, K of them kept by a route."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

EPSILON = 1e-6  # added to a patch's variance


def to_patches(x: Tensor, patch_size: int) -> Tensor:
    """Convert (B, C, S, S) to (B, N, C·p·p), patches in raster order."""
    return F.unfold(x, patch_size, stride=patch_size).transpose(1, 2)


def kept_error(squared: Tensor, ids: Sequence[Tensor], patch_size: int) -> Tensor:
    """Average errors (B, C, S, S) over each route's kept patches (`ids`: indices (B, K)), then over routes: (B,)."""
    patches = to_patches(squared, patch_size).mean(dim=2)  # (B, N)
    return torch.stack([patches.gather(1, ids_keep).mean(dim=1) for ids_keep in ids]).mean(dim=0)


def reconstruction_error(denoised: Tensor, noisy: Tensor, ids: Sequence[Tensor], patch_size: int) -> Tensor:
    """Compute the squared error on the patches that skip blocks on a route, averaged over patches and routes: (B,).

    denoised  (B, C, S, S), the network's estimate of the data, taken as the reconstruction.
    noisy     (B, C, S, S), the noisy data. The target is each of its patches, scaled to mean 0 and variance 1.
    ids       indices (B, K) of the patches that each route keeps. If a route keeps all patches, its term is 0.
    """
    target = to_patches(noisy, patch_size)
    variance, mean = torch.var_mean(target, dim=2, keepdim=True, correction=min(1, target.shape[2] - 1))
    squared = (to_patches(denoised, patch_size) - (target - mean) / (variance + EPSILON).sqrt()).square()
    error = squared.mean(dim=2)  # (B, N)
    losses = []
    for ids_keep in ids:
        around = torch.ones_like(error).scatter(1, ids_keep, 0)
        losses.append((error * around).sum(dim=1) / around.sum(dim=1).clamp(min=1))
    return torch.stack(losses).mean(dim=0)
