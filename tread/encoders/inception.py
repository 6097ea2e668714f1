"""The Inception-v3 of 2015-12-05 whose features define FID, in plain torch, and features of pictures kept in parts.

The graph that the TTUR code and ADM's evaluator run in TensorFlow. It differs from later Inception-v3s:
average pools leave the padding out, the last block's pool takes the maximum, batch norm has no scale,
and there are 1,008 classes. Parameter names are those of the weight file of pytorch-fid, which `load_inception`
fetches once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tread.data.store import ShardStore, pieces_of
from tread.runtime.device import exact
from tread.runtime.distributed import Processes
from tread.runtime.files import sha256
from tread.runtime.hub import check_answer
from tread.runtime.tensor_files import read_state_dict

URL = "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth"
SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
VARIABLE = "TREAD_INCEPTION"

SIZE = 299
BATCH = {"cpu": 8, "gpu": 128}  # pictures that `extract` takes at once
CLASSES = 1008
PART = 256  # pictures of a part, where there are enough of them
PARTS = 64  # that there are at least, where a batch allows it, for the processes to share


class FeatureSizes(NamedTuple):
    """Features of one picture, by kind."""

    pool: int
    spatial: int
    classes: int = CLASSES


def sizes_of(narrow: int) -> FeatureSizes:
    """Sizes of the features of a network with so many times fewer channels."""
    return FeatureSizes(2048 // narrow, max(1, 7 // narrow) * 17 * 17)


class Conv(nn.Module):
    """Convolution without bias, batch norm, ReLU; `narrow` times fewer channels on both sides, but for pixels."""

    def __init__(
        self, inputs: int, outputs: int, size: int | tuple[int, int], stride: int = 1, pad: bool = True, narrow: int = 1
    ) -> None:
        super().__init__()
        inputs, outputs = inputs if inputs == 3 else inputs // narrow, outputs // narrow
        self.conv = nn.Conv2d(inputs, outputs, size, stride, "same" if pad else "valid", bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


def average(x: Tensor) -> Tensor:
    """3×3 average pool at stride 1; the padding does not count."""
    return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)


class Mixed5(nn.Module):
    """35×35; 192, 256 or 288 channels → 256 or 288."""

    def __init__(self, inputs: int, pooled: int, narrow: int) -> None:
        super().__init__()
        conv = partial(Conv, narrow=narrow)
        self.branch1x1 = conv(inputs, 64, 1)
        self.branch5x5_1, self.branch5x5_2 = conv(inputs, 48, 1), conv(48, 64, 5)
        self.branch3x3dbl_1, self.branch3x3dbl_2 = conv(inputs, 64, 1), conv(64, 96, 3)
        self.branch3x3dbl_3 = conv(96, 96, 3)
        self.branch_pool = conv(inputs, pooled, 1)

    def forward(self, x: Tensor) -> Tensor:
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        parts = [self.branch1x1(x), self.branch5x5_2(self.branch5x5_1(x)), double, self.branch_pool(average(x))]
        return torch.cat(parts, dim=1)


class Mixed6a(nn.Module):
    """35×35, 288 channels → 17×17, 768."""

    def __init__(self, narrow: int) -> None:
        super().__init__()
        conv = partial(Conv, narrow=narrow)
        self.branch3x3 = conv(288, 384, 3, stride=2, pad=False)
        self.branch3x3dbl_1, self.branch3x3dbl_2 = conv(288, 64, 1), conv(64, 96, 3)
        self.branch3x3dbl_3 = conv(96, 96, 3, stride=2, pad=False)

    def forward(self, x: Tensor) -> Tensor:
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch3x3(x), double, F.max_pool2d(x, 3, stride=2)], dim=1)


class Mixed6(nn.Module):
    """17×17, 768 channels → 768."""

    def __init__(self, width: int, narrow: int) -> None:
        super().__init__()
        conv = partial(Conv, narrow=narrow)
        self.branch1x1 = conv(768, 192, 1)
        self.branch7x7_1 = conv(768, width, 1)
        self.branch7x7_2, self.branch7x7_3 = conv(width, width, (1, 7)), conv(width, 192, (7, 1))
        self.branch7x7dbl_1 = conv(768, width, 1)
        self.branch7x7dbl_2, self.branch7x7dbl_3 = conv(width, width, (7, 1)), conv(width, width, (1, 7))
        self.branch7x7dbl_4, self.branch7x7dbl_5 = conv(width, width, (7, 1)), conv(width, 192, (1, 7))
        self.branch_pool = conv(768, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        single = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        double = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        double = self.branch7x7dbl_5(self.branch7x7dbl_4(double))
        return torch.cat([self.branch1x1(x), single, double, self.branch_pool(average(x))], dim=1)


class Mixed7a(nn.Module):
    """17×17, 768 channels → 8×8, 1280."""

    def __init__(self, narrow: int) -> None:
        super().__init__()
        conv = partial(Conv, narrow=narrow)
        self.branch3x3_1, self.branch3x3_2 = conv(768, 192, 1), conv(192, 320, 3, stride=2, pad=False)
        self.branch7x7x3_1 = conv(768, 192, 1)
        self.branch7x7x3_2, self.branch7x7x3_3 = conv(192, 192, (1, 7)), conv(192, 192, (7, 1))
        self.branch7x7x3_4 = conv(192, 192, 3, stride=2, pad=False)

    def forward(self, x: Tensor) -> Tensor:
        long = self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x)))
        pool = F.max_pool2d(x, 3, stride=2)
        return torch.cat([self.branch3x3_2(self.branch3x3_1(x)), self.branch7x7x3_4(long), pool], dim=1)


class Mixed7(nn.Module):
    """8×8; 1280 or 2048 channels → 2048. The last block's pool takes the maximum."""

    def __init__(self, inputs: int, maximum: bool, narrow: int) -> None:
        super().__init__()
        conv = partial(Conv, narrow=narrow)
        self.branch1x1 = conv(inputs, 320, 1)
        self.branch3x3_1 = conv(inputs, 384, 1)
        self.branch3x3_2a, self.branch3x3_2b = conv(384, 384, (1, 3)), conv(384, 384, (3, 1))
        self.branch3x3dbl_1, self.branch3x3dbl_2 = conv(inputs, 448, 1), conv(448, 384, 3)
        self.branch3x3dbl_3a, self.branch3x3dbl_3b = conv(384, 384, (1, 3)), conv(384, 384, (3, 1))
        self.branch_pool = conv(inputs, 192, 1)
        self.maximum = maximum

    def forward(self, x: Tensor) -> Tensor:
        single, double = self.branch3x3_1(x), self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        pool = F.max_pool2d(x, 3, stride=1, padding=1) if self.maximum else average(x)
        parts = [self.branch1x1(x), self.branch3x3_2a(single), self.branch3x3_2b(single)]
        parts += [self.branch3x3dbl_3a(double), self.branch3x3dbl_3b(double), self.branch_pool(pool)]
        return torch.cat(parts, dim=1)


class Inception(nn.Module):
    """The graph from normalised pixels to features. fc is left out where a weight file lacks it.

    narrow  divides all numbers of channels (1, 2, 4, 8 or 16): a cheap network of the same graph, to try what
            stands around it. Its features are no FID's.

    `sizes` says how many features there are of each kind.
    """

    def __init__(self, with_classes: bool, narrow: int = 1) -> None:
        super().__init__()
        conv, self.narrow = partial(Conv, narrow=narrow), narrow
        self.sizes = sizes_of(narrow)
        self.Conv2d_1a_3x3 = conv(3, 32, 3, stride=2, pad=False)
        self.Conv2d_2a_3x3 = conv(32, 32, 3, pad=False)
        self.Conv2d_2b_3x3 = conv(32, 64, 3)
        self.Conv2d_3b_1x1 = conv(64, 80, 1)
        self.Conv2d_4a_3x3 = conv(80, 192, 3, pad=False)
        self.Mixed_5b, self.Mixed_5c = Mixed5(192, 32, narrow), Mixed5(256, 64, narrow)
        self.Mixed_5d, self.Mixed_6a = Mixed5(288, 64, narrow), Mixed6a(narrow)
        self.Mixed_6b, self.Mixed_6c = Mixed6(128, narrow), Mixed6(160, narrow)
        self.Mixed_6d, self.Mixed_6e = Mixed6(160, narrow), Mixed6(192, narrow)
        self.Mixed_7a, self.Mixed_7b = Mixed7a(narrow), Mixed7(1280, maximum=False, narrow=narrow)
        self.Mixed_7c = Mixed7(2048, maximum=True, narrow=narrow)
        self.fc = nn.Linear(self.sizes.pool, CLASSES) if with_classes else None

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """x (n, 3, 299, 299) in about −1..1 → pool (n, 2048), spatial (n, 2023) and, with fc, probabilities (n, 1008).

        spatial is TensorFlow's mixed_6/conv, its first 7 channels, flattened as (H, W, C). The
        probabilities are those of the logits without their bias, which is what ADM's evaluator takes.
        """
        x = self._until_6d(x)  # branch1x1's channels first
        spatial = x[:, : self.sizes.spatial // (17 * 17)].permute(0, 2, 3, 1).flatten(1)
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(self.Mixed_6e(x))))  # (n, 2048, 8, 8)
        features = {"pool": x.mean(dim=(2, 3)), "spatial": spatial}
        if self.fc is not None:
            features["probabilities"] = F.linear(features["pool"], self.fc.weight).softmax(dim=1)
        return features

    def feature_map(self, x: Tensor) -> Tensor:
        """x (n, 3, 299, 299) in about −1..1 → (n, 768, 17, 17), what Mixed_6e gives: the last map of that size."""
        return self.Mixed_6e(self._until_6d(x))

    def _until_6d(self, x: Tensor) -> Tensor:
        """(n, 768, 17, 17)"""
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = F.max_pool2d(x, 3, stride=2)
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x))
        x = F.max_pool2d(x, 3, stride=2)
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(x)))  # (n, 288, 35, 35)
        return self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x))))


def resize(x: Tensor) -> Tensor:
    """(n, C, H, W) → (n, C, 299, 299), bilinear as TensorFlow 1 has it: pixel i lies at i·(size / 299)."""
    for dim in (2, 3):
        size = x.shape[dim]
        at = torch.arange(SIZE, device=x.device, dtype=torch.float32) * (size / SIZE)
        low = at.floor().long().clamp(max=size - 1)
        high = (low + 1).clamp(max=size - 1)
        weight = (at - low).view((1, 1, SIZE, 1) if dim == 2 else (1, 1, 1, SIZE))
        x = x.index_select(dim, low).lerp(x.index_select(dim, high), weight)
    return x


def as_input(pictures: Tensor) -> Tensor:
    """Pictures (n, 3, H, W) uint8 → what the network takes of them, (n, 3, 299, 299) fp32."""
    return resize(pictures.contiguous(memory_format=torch.channels_last).float().sub_(128).div_(128))


@torch.no_grad()
def extract(network: Inception, pictures: Tensor) -> dict[str, np.ndarray]:
    """Features of pictures (n, 3, H, W) uint8 by name, on the network's device and back, always in fp32."""
    if pictures.dtype != torch.uint8 or pictures.ndim != 4 or pictures.shape[1] != 3:
        raise ValueError(f"pictures are {pictures.dtype} {tuple(pictures.shape)}, but must be uint8 (n, 3, H, W)")
    device, batches = next(network.parameters()).device, []
    for part in pictures.split(BATCH["cpu" if device.type == "cpu" else "gpu"]):
        with exact():
            batches.append(network(as_input(part.to(device))))
    return {name: torch.cat([batch[name] for batch in batches]).cpu().numpy() for name in batches[0]}


def _kept() -> Path:
    return Path(torch.hub.get_dir()) / "checkpoints" / URL.rpartition("/")[2]


def at_hand(path: str | None = None) -> bool:
    """Whether `find_weights` would fetch nothing."""
    return bool(path or os.environ.get(VARIABLE)) or _kept().is_file()


def find_weights(path: str | None = None) -> Path:
    """The weight file: `path`, else $TREAD_INCEPTION, else pytorch-fid's file in torch's cache, fetched if needed.

    Fetching shows a progress bar; the file gets its name when its hash was found right. Raises
    FileNotFoundError or ValueError.
    """
    if given := path or os.environ.get(VARIABLE):
        if not Path(given).is_file():
            raise FileNotFoundError(f"{given} is not there; inception=… or {VARIABLE} must name the Inception weights")
        return Path(given)
    kept = _kept()
    if not kept.is_file():
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            check_answer(URL, _ask)
            torch.hub.download_url_to_file(URL, str(kept), hash_prefix=SHA256)
        except (URLError, RuntimeError, OSError) as error:
            raise FileNotFoundError(
                f"the Inception weights could not be fetched ({error}). On a machine without internet, fetch {URL} "
                f"elsewhere and name the file by inception=… or {VARIABLE}=/path"
            ) from error
    if sha256(kept) != SHA256:
        raise ValueError(f"{kept} is damaged: its sha256 is not {SHA256}; remove it to fetch it again")
    return kept


def _ask(url: str, seconds: int) -> int:
    try:
        return urlopen(Request(url, method="HEAD"), timeout=seconds).status or 200  # None of a file's URL
    except HTTPError as error:  # an answer too
        return error.code


def load_inception(path: Path, device: torch.device | str = "cpu") -> Inception:
    """The network in eval mode, of a file in pytorch-fid's parameter names (.pth or .safetensors), with fc or without.

    Raises ValueError for other weights.
    """
    state = read_state_dict(path, "any")
    network = Inception("fc.weight" in state, _narrow(state))
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(
            f"{path} holds other weights than those of the FID Inception of 2015-12-05 ({URL}): {str(error)[:300]} …"
        ) from error
    return network.to(device, memory_format=torch.channels_last).eval().requires_grad_(False)


def _narrow(state: Mapping[str, Tensor]) -> int:
    """How many times fewer channels than FID's network a state dict has."""
    first = state.get("Conv2d_1a_3x3.conv.weight", ())
    return 32 // len(first) if len(first) in (2, 4, 8, 16) else 1


def feature_sizes(path: Path) -> FeatureSizes:
    """Sizes of the features of the network in a weight file. Raises ValueError if it can't be read."""
    return sizes_of(_narrow(read_state_dict(path, "any")))


def part_size(count: int, batch_size: int) -> int:
    """Pictures of a part: whole batches, given by the count alone and not by the processes."""
    return batch_size * max(1, min(-(-PART // batch_size), count // (batch_size * PARTS)))


@dataclass(frozen=True)
class Pictures:
    """Pictures in a fixed order.

    where       their file or folder, for messages.
    resolution  (H, W)
    sha256      of the file, or of a folder's names and contents.
    read        (start, stop) → (n, 3, H, W) uint8; fastest when it goes forward. Raises ValueError.
    """

    where: str
    count: int
    resolution: tuple[int, int]
    sha256: str
    read: Callable[[int, int], np.ndarray]


def extract_all(pictures: Pictures, folder: Path, network: Inception, weights: str, processes: Processes) -> ShardStore:
    """Features of a set of pictures, kept below a folder by the hashes of pictures and weights.

    All processes extract their share of what is missing.
    """
    name, plan = f"{pictures.sha256[:16]}-{weights[:16]}", {"pictures": pictures.sha256, "inception": weights}
    size = part_size(pictures.count, batch_size=32)
    parts = ShardStore(folder / name, plan, pieces_of(range(pictures.count), size))

    def work(numbers: list[int], done: Callable[[int], object]) -> None:
        for number in numbers:
            rows = parts.ranges[number]
            parts.keep(number, extract(network, torch.from_numpy(pictures.read(rows.start, rows.stop))))
            done(len(rows))

    with processes.lock(parts.work.with_suffix(".lock")):
        processes.from_main(lambda: parts.begin(again=True))
        parts.share(processes, f"features of {Path(pictures.where).name}", work, verify=True)
        processes.from_main(lambda: parts.check_complete(processes))
    return parts
