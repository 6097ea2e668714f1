"""Decodes drawn latents, and returns pictures as PIL images, tensors or arrays."""

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

Output = Literal["pil", "pt", "np", "latent"]


def to_pictures(x: Tensor, decoder: Callable[[Tensor], Tensor], size: int = 16) -> Tensor:
    """Decode latents (n, C, S, S) by `decoder` to pictures (n, 1 or 3, H, W) uint8 on the CPU, `size` at a time."""
    padded = torch.cat([x, x[-1:].expand(-len(x) % size, -1, -1, -1)])
    return torch.cat([decoder(part).cpu() for part in padded.split(size)])[: len(x)]


def in_form(output: Output, drawn: Tensor) -> list[Image.Image] | Tensor | np.ndarray:
    """Convert pictures (n, 1 or 3, H, W) uint8 to `output`: "pil", a list of images; "pt", a float tensor of this shape
    in 0..1; "np", a float32 array (n, H, W, 1 or 3) in 0..1. With "latent" return latents (n, C, S, S) unchanged."""
    if output == "latent":
        return drawn
    if output == "pt":
        return drawn.float() / 255
    pictures = drawn.permute(0, 2, 3, 1).numpy()
    if output == "np":
        return pictures.astype(np.float32) / 255
    return [Image.fromarray(picture.squeeze(2) if picture.shape[2] == 1 else picture) for picture in pictures]
