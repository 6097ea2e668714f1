"""Encoders of pictures, whose patch features a network is aligned with.

    inception        the FID Inception's map of 17×17×768, see inception.py: no further package, no download of its own
    dinov2-s|b|l|g   DINOv2 from the hub, or a hub id or a folder of such a model, by transformers
    module:function  anything that maps pictures (B, 3, H, W) uint8 to (B, T, z), T a square number, tokens row by row;
                     a torch module does too

All run frozen, in fp32, whatever the training's precision.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tread.encoders.autoencoder import fingerprint
from tread.encoders.inception import SIZE, Inception, as_input, find_weights, load_inception
from tread.encoders.pretrained import load_whole, pretrained
from tread.runtime.device import exact

DINOV2 = {f"dinov2-{size[0]}": f"facebook/dinov2-{size}" for size in ("small", "base", "large", "giant")}
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and standard deviation of RGB
INCEPTION_GRID = 16
WIDTHS = {"inception": 768, "dinov2-s": 384, "dinov2-b": 768, "dinov2-l": 1024, "dinov2-g": 1536}  # z, without loading


class Cost(NamedTuple):
    """What one picture makes: tokens, numbers of a token, and the FLOPs of that."""

    tokens: int
    width: int
    flops: int


class Encoder:
    """Pictures (B, 3, H, W) uint8 → features (B, T, z) float32 of T = side² tokens, row by row.

    name         what is recorded of it: two of one name are taken for the same.
    fingerprint  hash of its weights; of the user's own, of its module's source too; None where nobody knows.
    grid         tokens along a side to which finer features are averaged; None: its own.

    What it makes of a picture, its `cost`, is measured on one of them.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[Tensor], Tensor],
        device: torch.device,
        grid: int | None = None,
        fingerprint: str | None = None,
    ) -> None:
        self.name, self.fingerprint, self.grid, self.device, self._run = name, fingerprint, grid, device, run
        self._costs: dict[int, Cost] = {}

    @torch.no_grad()
    def encode(self, pictures: Tensor) -> Tensor:
        """On the encoder's device. Raises ValueError for features that are no (B, T, z) or too coarse for the grid."""
        if pictures.dtype != torch.uint8 or pictures.ndim != 4 or pictures.shape[1] != 3:
            raise ValueError(f"pictures are {pictures.dtype} {tuple(pictures.shape)}, but must be uint8 (B, 3, H, W)")
        with exact():
            features = self._run(pictures.to(self.device))
            shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            side = math.isqrt(shape[1]) if len(shape) == 3 and isinstance(features, Tensor) else 0
            if not side or shape[:2] != (len(pictures), side**2):
                raise ValueError(
                    f"{self.name} makes {shape} of pictures {tuple(pictures.shape)}, but must make (B, T, z) with a "
                    "square number T of tokens"
                )
            features, size = features.float(), pictures.shape[-1]
            if self.grid is None or self.grid == side:
                return features
            if self.grid > side:
                raise ValueError(
                    f"grid is {self.grid}, but {self.name} has {side}×{side} tokens of pictures of {size}×{size}: "
                    f"choose grid={side} or less"
                )
            maps = features.transpose(1, 2).unflatten(2, (side, side))
            return F.adaptive_avg_pool2d(maps, self.grid).flatten(2).transpose(1, 2)

    def cost(self, height: int) -> Cost:
        """The cost of one picture of that size. Products and convolutions count, two FLOPs a multiply-add, alone.

        Raises ValueError as `encode`, and for features that are not finite.
        """
        if height not in self._costs:
            picture = torch.zeros(1, 3, height, height, dtype=torch.uint8)
            with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
                features = self.encode(picture)
            if not features.isfinite().all():
                raise ValueError(
                    f"{self.name} makes features that are not finite of a black picture: are its weights whole?"
                )
            _, tokens, width = features.shape
            self._costs[height] = Cost(tokens, width, counter.get_total_flops())
        return self._costs[height]


def encoder_name(name: str) -> str:
    """What is recorded of an encoder's name: DINOv2's short names for its hub ids, folders in full, others as given."""
    short = {hub_id: short for short, hub_id in DINOV2.items()}
    return short.get(name) or (str(Path(name).resolve()) if Path(name).is_dir() else name)


def open_encoder(
    name: str, device: torch.device | str, *, grid: int | None = None, inception: str | None = None
) -> Encoder:
    """An encoder by its name, see above.

    grid       tokens along a side; finer features are averaged to them, coarser ones refused. None: its own.
    inception  the file of the Inception's weights; None: as find_weights finds it.

    Raises ValueError or OSError if it can't be had.
    """
    device, recorded = torch.device(device), encoder_name(name)
    if name == "inception":
        network = load_inception(find_weights(inception), device)
        run = functools.partial(_inception_tokens, network, grid or INCEPTION_GRID)
        return Encoder(recorded, run, device, grid or INCEPTION_GRID, fingerprint(network))
    if ":" in name:
        run = _load_function(name)
        if isinstance(run, nn.Module):
            run = run.to(device).eval().requires_grad_(False)
        return Encoder(recorded, run, device, grid, _own_fingerprint(name, run))
    model = _load_dinov2(name).to(device).eval().requires_grad_(False)
    return Encoder(recorded, functools.partial(_dinov2_tokens, model), device, grid, fingerprint(model))


# -------------------------------------------------------------------------------------- Inception


def _inception_tokens(network: Inception, grid: int, pictures: Tensor) -> Tensor:
    """(B, T, 768): the map at the centres of the tokens, linearly between its cells and constant beyond the outer ones.

    Cell i of 17 looks at pixel 21 + 16·i of 299, and pixel p of 299 is taken at p·(size / 299), see `resize`. Fewer
    than 16 tokens along a side are averages of the 16.
    """
    maps = network.feature_map(as_input(pictures))
    rows, columns = (_between(max(grid, INCEPTION_GRID), size, maps.device) for size in pictures.shape[2:])
    return (rows @ maps @ columns.T).flatten(2).transpose(1, 2)


def _between(grid: int, size: int, device: torch.device) -> Tensor:
    """(grid, 17): how much each cell along a side has in each token; rows sum to 1."""
    centres = (torch.arange(grid, device=device) + 0.5) * size / grid - 0.5  # in the picture's pixels
    at = ((centres * SIZE / size - 21) / 16).clamp(0, 16)
    return (1 - (at[:, None] - torch.arange(17, device=device)).abs()).clamp(min=0)


# ----------------------------------------------------------------------------------------- DINOv2


def _load_dinov2(name: str) -> nn.Module:
    """transformers' Dinov2Model in fp32, of a short name, a hub id or a folder. Raises ValueError."""
    place = DINOV2.get(name, name)
    known = (
        f"Encoders are inception, {', '.join(DINOV2)}, a hub id (to be downloaded once while online) or a folder of "
        "such a model, or module:function"
    )
    with pretrained(f"encoder {name!r}", place, "requirements-alignment.txt", known) as (transformers, told):
        kind = transformers.Dinov2Config.get_config_dict(place, **told)[0].get("model_type")
        if kind != "dinov2":
            raise ValueError(f"it is a {kind}, not a dinov2")
        return load_whole(transformers.Dinov2Model, place, told, unused="embeddings.mask_token")  # nothing is masked


def _dinov2_tokens(model: nn.Module, pictures: Tensor) -> Tensor:
    """(B, T, z): patch tokens behind the last norm, of pictures normalised and then resized to 7/8 of their size.

    256² become 224², 16×16 patches of 14; sizes in between go to the next whole number of patches, at least one.
    The model resamples its positions to them, bicubically. Neither the class token nor registers are among them.
    """
    mean, std = torch.tensor(IMAGENET, device=pictures.device)[..., None, None]
    patch = model.config.patch_size
    sides = [patch * max(1, round(side * 224 / 256 / patch)) for side in pictures.shape[2:]]
    x = F.interpolate((pictures / 255 - mean) / std, sides, mode="bicubic")
    tokens = model(x).last_hidden_state
    return tokens[:, 1:]


# -------------------------------------------------------------------------------- the user's own


def _load_function(name: str) -> Callable[[Tensor], Tensor]:
    """What module:function names; modules are looked for in the current folder too. Raises ValueError."""
    module, _, function = name.partition(":")
    if "" not in sys.path and (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        target = functools.reduce(getattr, function.split("."), importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"encoder {name!r} could not be imported as module:function: {error}") from error
    if not callable(target):
        raise ValueError(f"encoder {name!r} is a {type(target).__name__}, but must be a function of pictures")
    return target


def _own_fingerprint(name: str, run: Callable[[Tensor], Tensor]) -> str:
    """Hex sha256 of a module's source and, of a torch module, its weights: what a function loads beside is not seen."""
    source = getattr(sys.modules[name.partition(":")[0]], "__file__", None)
    digest = hashlib.sha256(Path(source).read_bytes() if source else b"")
    if isinstance(run, nn.Module):
        digest.update(fingerprint(run).encode())
    return digest.hexdigest()
