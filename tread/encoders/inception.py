"""The Inception-v3 of 2015-12-05, whose features define FID, in plain PyTorch.

It is the graph that the TTUR code and ADM's evaluator run in TensorFlow. It differs from later Inception-v3s: average
pools leave out the padding, the last block's pool takes the maximum, batch norm has no scale, and there are 1,008
classes. Parameter names are those of pytorch-fid's weight file, which `find_weights` downloads once."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tread.runtime.device import exact
from tread.runtime.files import sha256
from tread.runtime.hub import check_answer
from tread.runtime.tensor_files import read_kind

URL = "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth"
SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
VARIABLE = "TREAD_INCEPTION"
SIZE = 299
CPU_BATCH, GPU_BATCH = 8, 128  # pictures per batch in `extract`
Branches = dict[str, list[tuple]]


def sizes_of(narrow: int) -> dict[str, int]:
    """Return {kind: number of features} for "pool" and "spatial", of a network with `narrow` times fewer channels."""
    return {"pool": 2048 // narrow, "spatial": max(1, 7 // narrow) * 17 * 17}


class Conv(nn.Module):
    """Convolution without bias, then batch norm and ReLU. `narrow` divides the numbers of channels, except RGB's 3."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        size: int | tuple[int, int],
        stride: int = 1,
        padding: str = "same",
        narrow: int = 1,
    ) -> None:
        super().__init__()
        inputs = inputs if inputs == 3 else inputs // narrow
        self.conv = nn.Conv2d(inputs, outputs // narrow, size, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs // narrow, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


# pools of 3×3: two that keep the size, and one that halves it
average = partial(F.avg_pool2d, kernel_size=3, stride=1, padding=1, count_include_pad=False)
largest = partial(F.max_pool2d, kernel_size=3, stride=1, padding=1)
halved = partial(F.max_pool2d, kernel_size=3, stride=2)


class Mixed(nn.Module):
    """An Inception block: parallel chains of convolutions and a pool, concatenated by channel.

    branches  {name: list of a chain's layers}. A layer (channels, size) is one convolution; (channels, size, size) is
              two of them on the same input, with concatenated outputs. Layers are named <name>_1, <name>_2, … (<name>
              if there is only one); the two convolutions of a layer <name>_2 are <name>_2a and <name>_2b.
    pool      the pooling function. The chain "branch_pool" is applied to its output; without such a chain, the output
              itself is concatenated. If `pool` is the function `halved`, each chain's last convolution has stride 2.
    """

    def __init__(self, conv: Callable[..., Conv], inputs: int, branches: Branches, pool: Callable[[Tensor], Tensor]):
        super().__init__()
        self.pool, self.chains = pool, {name: [] for name in branches}
        for branch, layers in branches.items():
            width = inputs
            for number, (outputs, *sizes) in enumerate(layers, start=1):
                stem = f"{branch}_{number}" if len(layers) > 1 else branch
                names = [stem] if len(sizes) == 1 else [f"{stem}a", f"{stem}b"]
                strided = {"stride": 2, "padding": "valid"} if pool is halved and number == len(layers) else {}
                for name, size in zip(names, sizes):
                    setattr(self, name, conv(width, outputs, size, **strided))
                self.chains[branch].append(names)
                width = outputs

    def forward(self, x: Tensor) -> Tensor:
        pooled, parts = self.pool(x), []
        for branch, chain in self.chains.items():
            h = pooled if branch == "branch_pool" else x
            for names in chain:
                h = torch.cat([getattr(self, name)(h) for name in names], dim=1)
            parts.append(h)
        return torch.cat(parts if "branch_pool" in self.chains else [*parts, pooled], dim=1)


def mixed_5(pooled: int) -> Branches:
    """Return Mixed's `branches` for a block 35×35 → 35×35 with `pooled` channels in "branch_pool"."""
    return {
        "branch1x1": [(64, 1)],
        "branch5x5": [(48, 1), (64, 5)],
        "branch3x3dbl": [(64, 1), (96, 3), (96, 3)],
        "branch_pool": [(pooled, 1)],
    }


def mixed_6(width: int) -> Branches:
    """Return Mixed's `branches` for a block 17×17 → 17×17 with `width` channels inside the 7×7 branches."""
    row, column = (1, 7), (7, 1)
    return {
        "branch1x1": [(192, 1)],
        "branch7x7": [(width, 1), (width, row), (192, column)],
        "branch7x7dbl": [(width, 1), (width, column), (width, row), (width, column), (192, row)],
        "branch_pool": [(192, 1)],
    }


MIXED_6A = {"branch3x3": [(384, 3)], "branch3x3dbl": [(64, 1), (96, 3), (96, 3)]}  # 35×35 → 17×17
MIXED_7A = {  # 17×17 → 8×8
    "branch3x3": [(192, 1), (320, 3)],
    "branch7x7x3": [(192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3)],
}
MIXED_7 = {  # 8×8 → 8×8
    "branch1x1": [(320, 1)],
    "branch3x3": [(384, 1), (384, (1, 3), (3, 1))],
    "branch3x3dbl": [(448, 1), (384, 3), (384, (1, 3), (3, 1))],
    "branch_pool": [(192, 1)],
}


class Inception(nn.Module):
    """The network from `as_input`'s pixels to features; with_classes adds the layer fc, which some weight files lack.

    narrow  divisor of all numbers of channels: 1 for FID's network; 2, 4, 8 or 16 for quick tests of code.
    sizes   {"pool": 2048, "spatial": 2023}, the number of features of each kind; fewer if `narrow` is above 1.
    sha256  hash of the weight file, which load_inception sets.
    """

    sha256 = ""

    def __init__(self, with_classes: bool, narrow: int = 1) -> None:
        super().__init__()
        conv, self.narrow, self.sizes = partial(Conv, narrow=narrow), narrow, sizes_of(narrow)
        self.Conv2d_1a_3x3 = conv(3, 32, 3, stride=2, padding="valid")
        self.Conv2d_2a_3x3 = conv(32, 32, 3, padding="valid")
        self.Conv2d_2b_3x3 = conv(32, 64, 3)
        self.Conv2d_3b_1x1 = conv(64, 80, 1)
        self.Conv2d_4a_3x3 = conv(80, 192, 3, padding="valid")
        self.Mixed_5b = Mixed(conv, 192, mixed_5(32), average)
        self.Mixed_5c = Mixed(conv, 256, mixed_5(64), average)
        self.Mixed_5d = Mixed(conv, 288, mixed_5(64), average)
        self.Mixed_6a = Mixed(conv, 288, MIXED_6A, halved)
        self.Mixed_6b = Mixed(conv, 768, mixed_6(128), average)
        self.Mixed_6c = Mixed(conv, 768, mixed_6(160), average)
        self.Mixed_6d = Mixed(conv, 768, mixed_6(160), average)
        self.Mixed_6e = Mixed(conv, 768, mixed_6(192), average)
        self.Mixed_7a = Mixed(conv, 768, MIXED_7A, halved)
        self.Mixed_7b = Mixed(conv, 1280, MIXED_7, average)
        self.Mixed_7c = Mixed(conv, 2048, MIXED_7, largest)
        self.fc = nn.Linear(self.sizes["pool"], 1008) if with_classes else None

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Map x (n, 3, 299, 299) in about −1..1 to {"pool": (n, 2048), "spatial": (n, 2023)}, with fc also
        {"probabilities": (n, 1008)}. Spatial features are the first 7 channels of TensorFlow's mixed_6/conv, flattened
        as (H, W, C). Probabilities are computed from logits without their bias, as in ADM's evaluator."""
        x = self._until_6d(x)  # the first channels are branch1x1's
        spatial = x[:, : self.sizes["spatial"] // (17 * 17)].permute(0, 2, 3, 1).flatten(1)
        features = {"pool": self.pooled(self.Mixed_6e(x)), "spatial": spatial}
        if self.fc is not None:
            features["probabilities"] = F.linear(features["pool"], self.fc.weight).softmax(dim=1)
        return features

    def feature_map(self, x: Tensor) -> Tensor:
        """Map x (n, 3, 299, 299) in about −1..1 to the last 17×17 map, the output of Mixed_6e, (n, 768, 17, 17)."""
        return self.Mixed_6e(self._until_6d(x))

    def pooled(self, feature_map: Tensor) -> Tensor:
        """Map the output of feature_map to the pooled features, (n, 2048)."""
        return self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(feature_map))).mean(dim=(2, 3))  # of (n, 2048, 8, 8)

    def _until_6d(self, x: Tensor) -> Tensor:
        x = halved(self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x))))
        x = halved(self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x)))
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(x)))  # (n, 288, 35, 35)
        return self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x))))


def resize(x: Tensor) -> Tensor:
    """Resize (n, C, H, W) to (n, C, 299, 299) bilinearly, as in TensorFlow 1: pixel i reads position i·(size / 299)."""
    for dim in (2, 3):
        size = x.shape[dim]
        at = torch.arange(SIZE, device=x.device, dtype=torch.float32) * (size / SIZE)
        low = at.floor().long().clamp(max=size - 1)
        high = (low + 1).clamp(max=size - 1)
        weight = (at - low)[:, None] if dim == 2 else at - low
        x = x.index_select(dim, low).lerp(x.index_select(dim, high), weight)
    return x


def as_input(pictures: Tensor) -> Tensor:
    """Convert pictures (n, 3, H, W) uint8 to the network's input, (n, 3, 299, 299) fp32: pixel / 128 − 1, resized."""
    return resize(pictures.contiguous(memory_format=torch.channels_last).float().sub_(128).div_(128))


def check_pictures(pictures: Tensor) -> None:
    """Raise ValueError unless pictures are (n, 3, H, W) uint8."""
    if pictures.dtype != torch.uint8 or pictures.ndim != 4 or pictures.shape[1] != 3:
        raise ValueError(f"pictures are {pictures.dtype} {tuple(pictures.shape)}, but must be uint8 (n, 3, H, W)")


@torch.no_grad()
def extract(network: Inception, pictures: Tensor) -> dict[str, np.ndarray]:
    """Return Inception.forward's outputs, {kind: (n, …) fp32}, for pictures (n, 3, H, W) uint8, computed in batches."""
    check_pictures(pictures)
    device = next(network.parameters()).device
    parts = pictures.split(CPU_BATCH if device.type == "cpu" else GPU_BATCH)
    with exact():
        batches = [network(as_input(part.to(device))) for part in parts]
    return {name: torch.cat([batch[name] for batch in batches]).cpu().numpy() for name in batches[0]}


def _cached() -> Path:
    return Path(torch.hub.get_dir()) / "checkpoints" / URL.rpartition("/")[2]


def find_at_hand(path: str | None = None) -> Path | None:
    """Return the weight file: `path`, else $TREAD_INCEPTION, else the file in torch's cache, else None. Nothing is
    downloaded. Raises FileNotFoundError if a named file is missing, ValueError if the cached one is damaged."""
    return find_weights(path) if path or os.environ.get(VARIABLE) or _cached().is_file() else None


def find_weights(path: str | None = None) -> Path:
    """Return the weight file: `path`, else $TREAD_INCEPTION, else pytorch-fid's file in torch's cache, downloaded if
    needed. Raises FileNotFoundError if it is missing or can't be fetched, ValueError if the cached file is damaged."""
    if given := path or os.environ.get(VARIABLE):
        if not Path(given).is_file():
            raise FileNotFoundError(f"{given} is not there; inception=… or {VARIABLE} must name the Inception weights")
        return Path(given)
    file = _cached()
    if not file.is_file():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            check_answer(URL, lambda url, seconds: urlopen(Request(url, method="HEAD"), timeout=seconds).status or 200)
            torch.hub.download_url_to_file(URL, str(file), hash_prefix=SHA256)  # renamed after the check of its hash
        except (RuntimeError, OSError) as error:  # URLError is an OSError
            how = f"On a machine without internet, fetch {URL} elsewhere and name it by inception=… or {VARIABLE}=…"
            raise FileNotFoundError(f"the Inception weights could not be fetched ({error}). {how}") from error
    if sha256(file) != SHA256:
        raise ValueError(f"{file} is damaged: its sha256 is not {SHA256}; remove it to fetch it again")
    return file


def load_inception(path: Path, device: torch.device | str = "cpu") -> Inception:
    """Load a frozen Inception from a file with pytorch-fid's names; `fc` may be missing. ValueError for other files."""
    state = read_kind(path, "any")[1]
    channels = len(state.get("Conv2d_1a_3x3.conv.weight", ()))  # 32 in FID's network
    network = Inception("fc.weight" in state, 32 // channels if channels in (2, 4, 8, 16) else 1)
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(
            f"{path} holds other weights than those of the FID Inception of 2015-12-05 ({URL}): {str(error)[:300]} …"
        ) from error
    network.sha256 = sha256(path)
    return network.to(device, memory_format=torch.channels_last).eval().requires_grad_(False)
