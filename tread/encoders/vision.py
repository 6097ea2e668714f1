"""Encoders of pictures; a network is aligned with their patch features.

    inception        the FID Inception's map of 17×17×768, see inception.py: no further package, no download of its own
    dinov2-s|b|l|g   DINOv2 from the hub, or a hub id or a folder of such a model, by transformers
    module:function  anything that maps pictures (B, 3, H, W) uint8 to (B, T, z), T a square number, tokens row by row;
                     a torch module does too

All run frozen, in fp32, whatever the training's precision.
"""

import functools
import hashlib
import importlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tread.encoders.autoencoder import fingerprint
from tread.encoders.inception import SIZE, Inception, as_input, check_pictures, find_weights, load_inception
from tread.encoders.pretrained import load_pretrained
from tread.runtime.device import exact

DINOV2 = {f"dinov2-{size[0]}": f"facebook/dinov2-{size}" for size in ("small", "base", "large", "giant")}
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and standard deviation of RGB
INCEPTION_GRID = 16
WIDTHS = {"inception": 768, "dinov2-s": 384, "dinov2-b": 768, "dinov2-l": 1024, "dinov2-g": 1536}  # z, without loading


class Cost(NamedTuple):
    """The tokens of one picture, their width, and the FLOPs to compute them."""

    tokens: int
    width: int
    flops: int


@dataclass(frozen=True)
class Encoder:
    """Pictures (B, 3, H, W) uint8 → features (B, T, z) float32 of T = side² tokens, row by row.

    name         the recorded name: encoders of one name are taken for the same.
    run          the network, without the grid's average.
    fingerprint  hash of its weights, and of the module's source for the user's own.
    grid         tokens along a side, to which finer features are averaged; None: as many as the encoder has.
    """

    name: str
    run: Callable[[Tensor], Tensor]
    device: torch.device
    grid: int | None
    fingerprint: str

    @torch.no_grad()
    def encode(self, pictures: Tensor) -> Tensor:
        """Runs on the encoder's device. Raises ValueError for features that are no (B, T, z), or too coarse."""
        check_pictures(pictures)
        with exact():
            features = self.run(pictures.to(self.device)).float()
            shape, size = tuple(features.shape), pictures.shape[-1]
            side = math.isqrt(shape[1]) if len(shape) == 3 else 0
            if not side or shape[:2] != (len(pictures), side**2):
                raise ValueError(
                    f"{self.name} makes {shape} of pictures {tuple(pictures.shape)}, but must make (B, T, z) with a "
                    "square number T of tokens"
                )
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
        """The cost of one picture of that height: matrix products and convolutions alone, 2 FLOPs a multiply-add.

        Raises ValueError as `encode`, and for features that are not finite.
        """
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            features = self.encode(torch.zeros(1, 3, height, height, dtype=torch.uint8))
        if not features.isfinite().all():
            raise ValueError(
                f"{self.name} makes features that are not finite of a black picture: are its weights whole?"
            )
        return Cost(*features.shape[1:], counter.get_total_flops())


def encoder_name(name: str) -> str:
    """The name that is recorded: DINOv2's short names for its hub ids, folders in full, others as given."""
    short = {hub_id: short for short, hub_id in DINOV2.items()}
    return short.get(name) or (str(Path(name).resolve()) if Path(name).is_dir() else name)


def open_encoder(
    name: str, device: torch.device | str, *, grid: int | None = None, inception: str | None = None
) -> Encoder:
    """The encoder of a name, see above. Raises ValueError or OSError if it can't be loaded.

    grid       see Encoder.
    inception  the file of the Inception's weights; None: as find_weights finds it.
    """
    device, recorded = torch.device(device), encoder_name(name)
    if name == "inception":
        network, grid = load_inception(find_weights(inception), device), grid or INCEPTION_GRID
        run = functools.partial(_inception_tokens, network, grid)
        return Encoder(recorded, run, device, grid, fingerprint(network))
    if ":" in name:
        run = _load_function(name)
        run = run.to(device).eval().requires_grad_(False) if isinstance(run, nn.Module) else run
        return Encoder(recorded, run, device, grid, _own_fingerprint(name, run))
    known = (
        f"Encoders are inception, {', '.join(DINOV2)}, a hub id (to be downloaded once while online) or a folder of "
        "such a model, or module:function"
    )
    what, place, kinds = f"encoder {name!r}", DINOV2.get(name, name), {"dinov2": "Dinov2Model"}
    unused = "embeddings.mask_token"  # nothing is masked
    model, _ = load_pretrained(what, place, kinds, "requirements-alignment.txt", known, unused=unused)
    run = functools.partial(_dinov2_tokens, model.to(device))
    return Encoder(recorded, run, device, grid, fingerprint(model))


# -------------------------------------------------------------------------------------- Inception


def _inception_tokens(network: Inception, grid: int, pictures: Tensor) -> Tensor:
    """(B, T, 768): the map at the tokens' centres, linear between its cells and constant beyond the outer ones.

    Cell i of 17 looks at pixel 21 + 16·i of 299, and pixel p of 299 is taken at p·(size / 299), see `resize`. Fewer
    than 16 tokens along a side are averages of the 16.
    """
    maps = network.feature_map(as_input(pictures))
    rows, columns = (_between(max(grid, INCEPTION_GRID), size, maps.device) for size in pictures.shape[2:])
    return (rows @ maps @ columns.T).flatten(2).transpose(1, 2)


def _between(grid: int, size: int, device: torch.device) -> Tensor:
    """(grid, 17): the weight of each cell along a side in each token; rows sum to 1."""
    centres = (torch.arange(grid, device=device) + 0.5) * size / grid - 0.5  # in the picture's pixels
    at = ((centres * SIZE / size - 21) / 16).clamp(0, 16)
    return (1 - (at[:, None] - torch.arange(17, device=device)).abs()).clamp(min=0)


# ----------------------------------------------------------------------------------------- DINOv2


def _dinov2_tokens(model: nn.Module, pictures: Tensor) -> Tensor:
    """(B, T, z): patch tokens behind the last norm, of pictures normalised and then resized to 7/8 of their size.

    256² become 224², 16×16 patches of 14; other sizes go to the nearest whole number of patches, at least one.
    The model resamples its positions to them, bicubically. The class token is left out.
    """
    mean, std = torch.tensor(IMAGENET, device=pictures.device)[..., None, None]
    patch = model.config.patch_size
    sides = [patch * max(1, round(side * 224 / 256 / patch)) for side in pictures.shape[2:]]
    x = F.interpolate((pictures / 255 - mean) / std, sides, mode="bicubic")
    return model(x).last_hidden_state[:, 1:]


# -------------------------------------------------------------------------------- the user's own


def _load_function(name: str) -> Callable[[Tensor], Tensor]:
    """The callable of module:function; the module may lie in the current folder. Raises ValueError."""
    module, _, function = name.partition(":")
    if "" not in sys.path and (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        return functools.reduce(getattr, function.split("."), importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"encoder {name!r} could not be imported as module:function: {error}") from error


def _own_fingerprint(name: str, run: Callable[[Tensor], Tensor]) -> str:
    """Hex sha256 of a Python module's source and a torch module's weights; files that a function loads are not seen."""
    source = getattr(sys.modules[name.partition(":")[0]], "__file__", None)
    digest = hashlib.sha256(Path(source).read_bytes() if source else b"")
    if isinstance(run, nn.Module):
        digest.update(fingerprint(run).encode())
    return digest.hexdigest()
