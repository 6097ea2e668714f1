"""The meaning of stored numbers, and their conversion to the latents that the network sees, and back.

    pixels --encode--> stored (latents or moments) --to_network--> network latents      (autoencoder.py encodes)
    network latents --from_network--> the autoencoder's z --decode--> pixels

Network latents are x = (z − shift)·scale for the autoencoder's z. In runs that normalise channels, and for autoencoders
with statistics of each channel in their config, they are (x − channel_shift)·channel_scale.
"""

import functools
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tread.runtime.schema import check

Dtype = Literal["float16", "float32"]
Stored = Literal["float16", "float32", "uint8"]
Orientation = Literal["exif", "stored"]
Alpha = Literal["white", "drop"]


@dataclass(frozen=True)
class LatentSpec:
    """The meaning of a dataset's numbers, as index.json records it. Raises ValueError for impossible values.

    shape                         (C, S, S) of the latents of one view; moments are stored with 2C channels.
    classes                       class names; a label is an index into them.
    autoencoder                   what encodes and decodes latents: a hub id, folder or file; "pixels"; "unknown".
    content, spread               "latents" and None, or "moments" (a posterior's mean and spread) and "logvar"/"std".
    scale, shift, scale_applied   x = (z − shift)·scale for the autoencoder's z; whether applied before storing.
    views                         stored views per sample: 1, or 2 with the flipped one.
    fingerprint                   hash of the autoencoder's weights; None if unknown.
    channel_shift, channel_scale  per channel; the network gets (x − channel_shift)·channel_scale; (): it gets x.
    orientation                   what was done to photos with an EXIF orientation: "exif": applied; "stored": ignored.
    alpha                         what was done to transparent photos: "white": laid on white; "drop": alpha ignored.
    dtype                         type of the stored numbers; uint8 is for pixels only, and stores −1..1 as 0..255.
    """

    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    autoencoder: str
    content: str = "latents"
    spread: str | None = None
    scale: float = 1.0
    shift: float = 0.0
    scale_applied: bool = False
    dtype: Stored = "float16"
    views: int = 1
    fingerprint: str | None = None
    channel_shift: tuple[float, ...] = ()
    channel_scale: tuple[float, ...] = ()
    orientation: Orientation = "stored"
    alpha: Alpha = "drop"

    def __post_init__(self) -> None:
        if (self.content, self.spread) not in (("latents", None), ("moments", "logvar"), ("moments", "std")):
            given = f"content {self.content!r} with spread {self.spread!r}"
            raise ValueError(f"{given}, but must be latents with spread null, or moments with spread logvar or std")
        for name, kind in (("dtype", Stored), ("orientation", Orientation), ("alpha", Alpha)):
            check(name, getattr(self, name), kind)
        if self.dtype == "uint8" and not holds_pixels(self):
            raise ValueError("dtype is uint8, in which only pixels are stored")
        if self.views not in (1, 2):
            raise ValueError(f"views is {self.views}, but must be 1, or 2 with flipped copies")
        if self.scale == 0 or 0 in self.channel_scale:
            raise ValueError("scale or a channel_scale is 0, but latents are multiplied by both")
        if not len(self.channel_shift) == len(self.channel_scale) in (0, self.shape[0]):
            raise ValueError(f"channel_shift and channel_scale need a value for each of {self.shape[0]} channels")

    @classmethod
    def from_json(cls, tree: dict) -> "LatentSpec":
        """Build a spec from a parsed index.json or a checkpoint's info.json["latents"]. Raises KeyError if a key is
        missing that all versions of these files have; keys that were added later have defaults."""
        # the first files of version 1 lack these keys
        later = ("fingerprint", "channel_shift", "channel_scale", "orientation", "alpha")
        values = {key: tree[key] for key in cls.__dataclass_fields__ if key in tree or key not in later}
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})

    @property
    def stored_shape(self) -> tuple[int, int, int, int]:
        """The shape of one sample in a shard: (views, stored channels, S, S)."""
        channels = self.shape[0] * (2 if self.content == "moments" else 1)
        return (self.views, channels, *self.shape[1:])

    @property
    def sample_bytes(self) -> int:
        return int(np.prod(self.stored_shape)) * np.dtype(self.dtype).itemsize


# ------------------------------------------------------------------- stored numbers, network latents


def to_network(stored: Tensor, latents: LatentSpec, posterior: Tensor | None = None) -> Tensor:
    """Convert stored numbers (B, C or 2C, S, S) to network latents (B, C, S, S) fp32. Moments become mean +
    std·posterior, where `posterior` is standard normal noise (B, C, S, S); None: they become their mean."""
    x, std = mean_and_std(stored, latents)
    if posterior is not None and std is not None:
        x = x + std * posterior
    if latents.channel_scale:
        shift, scale = _per_channel(latents.channel_shift, latents.channel_scale, x.device)
        x = (x - shift) * scale
    return x


def mean_and_std(stored: Tensor, latents: LatentSpec) -> tuple[Tensor, Tensor | None]:
    """Return mean and standard deviation of the latents (z − shift)·scale, each (…, C, S, S) fp32. If latents are
    stored, not moments, return the latents and None. No other function applies shift and scale to stored numbers."""
    scale, shift = (1.0, 0.0) if latents.scale_applied else (latents.scale, latents.shift)
    if latents.content == "latents":
        z = stored.float() / 127.5 - 1 if stored.dtype == torch.uint8 else stored.float()
        return (z - shift) * scale, None
    mean, spread = stored.float().chunk(2, dim=-3)
    # log-variances are clamped as AutoencoderKL clamps them
    std = spread if latents.spread == "std" else (0.5 * spread.clamp(-30.0, 20.0)).exp()
    return (mean - shift) * scale, std * scale


@functools.lru_cache(maxsize=8)  # cached, so that the copy to a GPU, for which the CPU waits, is made once
def _per_channel(shift: tuple[float, ...], scale: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor([shift, scale], device=device)[..., None, None]


def from_network(x: Tensor, latents: LatentSpec) -> Tensor:
    """Convert network latents (B, C, S, S) to the autoencoder's z, fp32."""
    x = x.float()
    if latents.channel_scale:
        shift, scale = _per_channel(latents.channel_shift, latents.channel_scale, x.device)
        x = x / scale + shift
    return x / latents.scale + latents.shift


def to_uint8(pixels: Tensor) -> Tensor:
    """Convert pixels in −1..1 to uint8, rounded and clipped."""
    return (pixels.float() * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)


def holds_pixels(latents: LatentSpec) -> bool:
    """Return whether the stored samples are pictures themselves, grey or RGB."""
    return latents.autoencoder == "pixels" and latents.content == "latents" and latents.shape[0] in (1, 3)


def stored_pictures(stored: Tensor, latents: LatentSpec) -> Tensor:
    """Convert stored pixels (B, 1 or 3, S, S), of the dtype and scale in `latents`, to RGB (B, 3, S, S) uint8."""
    return to_uint8(from_network(to_network(stored, latents), latents)).expand(-1, 3, -1, -1).contiguous()
