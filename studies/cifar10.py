"""Packs CIFAR-10's files into smaller ones, without loss: python studies/cifar10.py pack|unpack FROM TO

pack     writes each .bin file of folder FROM (cifar-10-batches-bin) to TO as .webp and .labels: 100 MB instead of 184
unpack   restores the .bin files of the packed folder FROM in folder TO; train with dataset.archive=TO
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if __name__ == "__main__":
    from tread.runtime.import_guard import guard_imports

    guard_imports(globals())

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from tread.encoders.inception import Inception
from tread.runtime.cli import answer_help, explained
from tread.runtime.files import whole_file

RECORD = 1 + 3 * 32 * 32  # bytes of a label and a picture
RANDOM = "random-inception.safetensors"


def pack(source: Path, target: Path) -> None:
    for path in sorted(source.glob("*.bin")):
        records = np.fromfile(path, np.uint8).reshape(-1, RECORD)
        planes = records[:, 1:].reshape(-1, math.gcd(len(records), 100), 3, 32, 32)  # rows of pictures
        sheet = np.ascontiguousarray(planes.transpose(0, 3, 1, 4, 2))
        Image.fromarray(sheet.reshape(-1, 32 * sheet.shape[2], 3)).save(target / f"{path.stem}.webp", lossless=True)
        records[:, 0].tofile(target / f"{path.stem}.labels")


def unpack(source: Path, target: Path) -> None:
    for path in sorted(source.glob("*.webp")):
        with Image.open(path) as sheet:
            pixels = np.asarray(sheet.convert("RGB")).reshape(sheet.height // 32, 32, sheet.width // 32, 32, 3)
        planes = pixels.transpose(0, 2, 4, 1, 3).reshape(-1, RECORD - 1)
        labels = np.fromfile(path.with_suffix(".labels"), np.uint8)
        np.concatenate([labels[:, None], planes], axis=1).tofile(target / f"{path.stem}.bin")


def random_inception(path: Path) -> None:
    """Write random weights of an Inception network with 16 times fewer channels, for trials without a download."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]), whole_file(path) as partial:
        torch.manual_seed(0)
        network = Inception(with_classes=False, narrow=16)
        for parameter in network.parameters():
            if parameter.ndim == 4:
                torch.nn.init.kaiming_normal_(parameter)  # with torch's default initialisation features vanish
        save_file(network.state_dict(), partial)


if __name__ == "__main__":
    answer_help(__doc__)
    with explained():
        if len(sys.argv) != 4 or sys.argv[1] not in ("pack", "unpack"):
            print(__doc__.strip())
            sys.exit(2)
        todo, (source, target) = {"pack": pack, "unpack": unpack}[sys.argv[1]], map(Path, sys.argv[2:])
        target.mkdir(parents=True, exist_ok=True)
        todo(source, target)
        if not any(target.iterdir()):
            raise FileNotFoundError(f"{source} holds nothing to {sys.argv[1]}")
