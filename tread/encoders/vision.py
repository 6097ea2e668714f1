"""Picture encoders. Training can align the diffusion network's features with an encoder's patch features.

    inception        the 17×17×768 map of FID's Inception (inception.py); needs nothing beyond FID's weights
    dinov2-s|b|l|g   DINOv2 from the hub; also a hub id or a folder of such a model; loaded with transformers
    module:function  a function or torch module: pictures (B, 3, H, W) uint8 → (B, T, z), T = side², row by row

All are frozen and run in fp32, whatever the precision of training, unless alignment.precision asks for bf16.
"""

import functools
import math
import pkgutil
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
from tread.runtime.device import computing
from tread.runtime.files import content_hash

DINOV2 = {f"dinov2-{size[0]}": f"facebook/dinov2-{size}" for size in ("small", "base", "large", "giant")}
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and standard deviation of RGB
INCEPTION_GRID = 16
WIDTHS = {"inception": 768, "dinov2-s": 384, "dinov2-b": 768, "dinov2-l": 1024, "dinov2-g": 1536}  # z
LAYERS = {"dinov2-s": 12, "dinov2-b": 12, "dinov2-l": 24, "dinov2-g": 40}


class Cost(NamedTuple):
    """Number T and width z of one picture's tokens, and the FLOPs to compute them."""

    tokens: int
    width: int
    flops: int


def dinov2_cost(name: str, side: int) -> Cost:
    """Return DINOv2's Cost for a picture of side × side pixels, without loading it; name: dinov2-s, -b, -l or -g."""
    patches, width = max(1, round(side * 224 / 256 / 14)) ** 2, WIDTHS[name]
    tokens = patches + 1
    products = LAYERS[name] * (12 * tokens * width**2 + 2 * tokens**2 * width) + patches * 3 * 14**2 * width
    return Cost(patches, width, 2 * products)


@dataclass(frozen=True)
class Encoder:
    """A frozen encoder from pictures (B, 3, H, W) uint8 to features (B, T, z) float32 of T = side² tokens, row by row.

    name         the recorded name (see encoder_name), by which stored features are recognised.
    run          the network: pictures → features, before they are averaged to `grid`; or pictures → (features, a
                 function without arguments that computes a feature vector of each whole picture, (B, P)).
    fingerprint  hash of the weights; for module:function, of the module's source and any weights.
    grid         tokens along a side, to which larger feature maps are averaged; None: as many as the network gives.
    precision    "fp32", or "bf16" for autocast.
    """

    name: str
    run: Callable[[Tensor], Tensor | tuple[Tensor, Callable[[], Tensor]]]
    device: torch.device
    grid: int | None
    fingerprint: str
    precision: str = "fp32"

    def encode(self, pictures: Tensor) -> Tensor:
        """Return the features (B, T, z) of pictures (B, 3, H, W) uint8, on the encoder's device. Raises ValueError for
        pictures or features of any other shape, and if the network makes fewer than grid² tokens."""
        return self.encode_both(pictures, whole=False)[0]

    @torch.no_grad()
    def encode_both(self, pictures: Tensor, whole: bool = True) -> tuple[Tensor, Tensor | None]:
        """Return features (B, T, z) of pictures (B, 3, H, W) uint8 and, unless `whole` is False, a vector per picture,
        (B, P), both fp32. The vectors come from the function that `run` returns (DINOv2's class token, Inception's
        pooled features); if it returns none, they are mean tokens. Raises ValueError like `encode`."""
        check_pictures(pictures)
        with computing(self.device, self.precision):
            made = self.run(pictures.to(self.device))
            features, pooled = made if isinstance(made, tuple) else (made, None)
            features = features.float()
            shape = tuple(features.shape)
            side = math.isqrt(shape[1]) if len(shape) == 3 else 0
            if not side or shape[:2] != (len(pictures), side**2):
                made = f"{self.name} makes {shape} of pictures {tuple(pictures.shape)}"
                raise ValueError(f"{made}, but must make (B, T, z) with a square number T of tokens")
            pooled = None if not whole else pooled().float() if pooled else features.mean(dim=1)
            if self.grid is None or self.grid == side:
                return features, pooled
            if self.grid > side:
                there = f"{side}×{side} tokens of pictures of {pictures.shape[-2]}×{pictures.shape[-1]}"
                raise ValueError(f"grid is {self.grid}, but {self.name} has {there}: choose grid={side} or less")
            maps = features.transpose(1, 2).unflatten(2, (side, side))
            return F.adaptive_avg_pool2d(maps, self.grid).flatten(2).transpose(1, 2), pooled

    def cost(self, height: int) -> Cost:
        """Return the cost of encoding one square picture of `height` pixels a side: matrix products and convolutions
        only, 2 FLOPs per multiply-add. Raises ValueError if the features have a wrong shape or are not finite."""
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            features = self.encode(torch.zeros(1, 3, height, height, dtype=torch.uint8))
        if not features.isfinite().all():
            raise ValueError(f"{self.name} makes features that are not finite of a black picture: broken weights?")
        return Cost(*features.shape[1:], counter.get_total_flops())


def encoder_name(name: str) -> str:
    """Return the name to record: the short name for DINOv2's hub ids, absolute paths for folders, others as given."""
    short = {hub_id: short for short, hub_id in DINOV2.items()}
    return short.get(name) or (str(Path(name).resolve()) if name not in WIDTHS and Path(name).is_dir() else name)


def open_encoder(
    name: str, device: torch.device | str, *, grid: int | None = None, inception: str | None = None
) -> Encoder:
    """Load the encoder "inception", "dinov2-s" (or -b, -l, -g), a DINOv2 by hub id or folder, or module:function.
    `grid`: tokens along a side (None: 16 for "inception", else the network's). `inception`: the Inception's weight file
    (None: found or fetched, see find_weights). Raises ValueError or OSError if loading fails."""
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
    run = functools.partial(_dinov2_tokens, model.to(device), torch.tensor(IMAGENET, device=device)[..., None, None])
    return Encoder(recorded, run, device, grid, fingerprint(model))


# -------------------------------------------------------------------------------------- Inception


def _inception_tokens(network: Inception, grid: int, pictures: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """Return the Inception's 17×17 map interpolated at the tokens' centres: (B, T, 768) with T = max(grid, 16)²; and a
    function that returns the pooled features (B, 2048).

    Interpolation is linear between the centres of cells and constant beyond the outer ones. The network's input is the
    picture resized to 299 pixels a side: input pixel p lies at pixel p·(size / 299) of the picture; cell i of the map
    is centred on input pixel 21 + 16·i. If grid is below 16, Encoder.encode averages the tokens.
    """
    maps = network.feature_map(as_input(pictures))
    rows, columns = (_between(max(grid, INCEPTION_GRID), size, maps.device) for size in pictures.shape[2:])
    return (rows @ maps @ columns.T).flatten(2).transpose(1, 2), lambda: network.pooled(maps)


def _between(grid: int, size: int, device: torch.device) -> Tensor:
    """Return weights (grid, 17) that interpolate Inception's 17×17 map along one side of a picture, `size` pixels long.
    Row i holds the weights of the map's 17 cells at the centre of token i, and sums to 1."""
    centres = (torch.arange(grid, device=device) + 0.5) * size / grid - 0.5  # in the picture's pixels
    at = ((centres * SIZE / size - 21) / 16).clamp(0, 16)
    return (1 - (at[:, None] - torch.arange(17, device=device)).abs()).clamp(min=0)


# ----------------------------------------------------------------------------------------- DINOv2


def _dinov2_tokens(model: nn.Module, normalization: Tensor, pictures: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """Return the patch tokens (B, T, z) after the last norm, and a function that returns the class token (B, z).

    Pictures are normalised and then resized to 7/8 of their size, rounded to a whole number of patches, at least one:
    256×256 becomes 224×224, 16×16 patches of 14×14. The model resamples its position embeddings bicubically.
    `normalization` (2, 3, 1, 1) has mean and standard deviation, on the device already, so that no step copies them.
    """
    mean, std = normalization
    patch = model.config.patch_size
    sides = [patch * max(1, round(side * 224 / 256 / patch)) for side in pictures.shape[2:]]
    x = F.interpolate((pictures / 255 - mean) / std, sides, mode="bicubic")
    tokens = model(x).last_hidden_state
    return tokens[:, 1:], lambda: tokens[:, 0]


# -------------------------------------------------------------------------------- the user's own


def _load_function(name: str) -> Callable[[Tensor], Tensor]:
    """Import the callable module:function; the module may be in the current folder. Raises ValueError if that fails."""
    if "" not in sys.path and (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"encoder {name!r} could not be imported as module:function: {error}") from error


def _own_fingerprint(name: str, run: Callable[[Tensor], Tensor]) -> str:
    """Return the hex sha256 of the source file of the Python module in `name` ("module:function") and, if `run` is an
    nn.Module, of its weights. Other files that the source imports are left out."""
    source = getattr(sys.modules[name.partition(":")[0]], "__file__", None)
    weights = fingerprint(run).encode() if isinstance(run, nn.Module) else b""
    return content_hash((Path(source).read_bytes() if source else b"") + weights)
