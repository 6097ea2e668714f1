"""What a rectified-flow network predicts, and what its loss compares: the velocity, the data x or the noise.

With x_t = (1−t)·x + t·ε and v = ε − x, each of the three follows from any other and x_t (Li & He 2025, arXiv
2511.13720, whose time is 1 − t). To get a velocity from x or noise, one divides by t or 1 − t, here raised to at least
`clamp`. The loss applies this clamp to prediction and target alike, so an exact prediction always has zero loss.

Shapes: B samples; data, noise and predictions (B, C, S, S); t (B, 1, 1, 1) or a scalar tensor."""

from typing import Literal

import torch
from torch import Tensor

Quantity = Literal["velocity", "x", "noise"]


def velocity_of(kind: Quantity, predicted: Tensor, noisy: Tensor, t: Tensor, clamp: float) -> Tensor:
    """Convert a prediction of `kind` for noisy x_t to the velocity noise − data, dividing by max(t or 1 − t, clamp)."""
    if kind == "x":
        return (noisy - predicted) / t.clamp(min=clamp)
    if kind == "noise":
        return (predicted - noisy) / (1 - t).clamp(min=clamp)
    return predicted


def error_of(
    kind: Quantity, loss_of: Quantity, predicted: Tensor, x: Tensor, noise: Tensor, t: Tensor, clamp: float
) -> Tensor:
    """Return the error (not squared; its sign may be flipped) of the quantity `loss_of`, given a prediction of `kind`,
    the true data x and `noise`. Prediction and target are both converted from `kind` to `loss_of`, dividing by
    max(t or 1 − t, clamp). So the result is a multiple of `predicted` minus the true quantity of `kind`."""
    error = predicted - {"velocity": noise - x, "x": x, "noise": noise}[kind]
    if kind == loss_of:
        return error
    scale = {"velocity": torch.ones_like(t), "x": t, "noise": 1 - t}  # of an error, where the velocity's is 1
    return error / scale[kind].clamp(min=clamp) * scale[loss_of]
