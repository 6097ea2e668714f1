"""Pixels, stored numbers and network latents: the only file that knows how they relate.

    stored (latents or moments, see latents.py) --to_network--> network latents --decode--> pixels

Network latents are (z − shift)·scale of the autoencoder's z. The autoencoder "pixels" is the
identity: its z is the picture itself, with 0..255 mapped to −1..1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from latents import Latents

Decoder = Callable[[Tensor], Tensor]
KINDS = ("AutoencoderKL", "AutoencoderTiny")


def to_network(stored: Tensor, latents: Latents, posterior: Tensor | None = None) -> Tensor:
    """Stored numbers (B, C or 2C, S, S) → network latents (B, C, S, S) fp32.

    posterior  standard normal (B, C, S, S), which moments are sampled with: mean + std·posterior.
               Without it their mean is taken.
    """
    z = stored.float()
    if latents.content == "moments":
        z, spread = z.chunk(2, dim=1)
        if posterior is not None:
            # log-variances are clamped as AutoencoderKL clamps them
            std = spread if latents.spread == "std" else (0.5 * spread.clamp(-30.0, 20.0)).exp()
            z = z + std * posterior
    return z if latents.scale_applied else (z - latents.shift) * latents.scale


def to_uint8(pixels: Tensor) -> Tensor:
    """Pixels in −1..1 → uint8, rounded and clipped."""
    return (pixels.float() * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)


def load_decoder(latents: Latents, device: torch.device | str = "cpu") -> Decoder:
    """A function from network latents (B, C, S, S) to uint8 pictures (B, 1 or 3, H, W).

    latents.autoencoder is "pixels", a local folder or a hub id of a diffusers AutoencoderKL or
    AutoencoderTiny. Raises ValueError if it is neither or can't be had.
    """

    def unscale(x: Tensor) -> Tensor:
        return x.float() / latents.scale + latents.shift

    if latents.autoencoder == "pixels":
        return lambda x: to_uint8(unscale(x))
    import diffusers  # imported here because it takes seconds and "pixels" does not need it

    try:
        kind = diffusers.AutoencoderKL.load_config(latents.autoencoder)["_class_name"]
        if kind not in KINDS:
            raise ValueError(f"is a {kind}")
        model = getattr(diffusers, kind).from_pretrained(latents.autoencoder)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"autoencoder {latents.autoencoder!r} could not be loaded as one of {', '.join(KINDS)}: {error}\n"
            "Download it once while online, or set decode=false (in training: sampling.decode=false) to draw the "
            "latents themselves"
        ) from error
    model = model.to(device).eval().requires_grad_(False)

    @torch.no_grad()
    def decode(x: Tensor) -> Tensor:
        return to_uint8(model.decode(unscale(x)).sample)

    return decode


def preview(x: Tensor) -> Tensor:
    """Network latents as they are, their first 3 (or 1) channels as uint8 pictures, −3..3 → 0..255."""
    channels = 3 if x.shape[1] >= 3 else 1
    return to_uint8(x[:, :channels] / 3)
