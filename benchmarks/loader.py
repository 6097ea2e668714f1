"""Measures how fast latents reach the device: python benchmarks/loader.py [folder=…] [rounds=5]

Times ways to bring 4×32×32 float16 latents to the device in batches of 256, and a plain copy, each once a round:

  ours        tread.data.loader.Loader, with the dataset mapped from disk (mmap), in RAM (ram) or on the device (device)
  webdataset  a tar of the same latents, read with the webdataset library, in one process and with 2 workers
  npy files   a .npy per sample through a PyTorch DataLoader, in one process and with 2 workers
  memcpy      copying one array to another of the same size, by one thread

Prints the median latents per second of each way, and their ratios to memcpy and to the faster webdataset run. The files
are written to a temporary folder in `folder` (null: the system's), so reads come from the page cache. The tar and .npy
files hold an eighth of the samples, as reading them is slow. Needs requirements-test.txt.
"""

if __name__ == "__main__":
    import checkout  # noqa: F401

import itertools
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import webdataset
from timing import DEVICE, begin, options_of, random_dataset, take_turns
from torch.utils.data import DataLoader, Dataset

from tread.data.dataset import LatentDataset
from tread.data.loader import Loader
from tread.runtime.schema import Count

SAMPLES, PER_SHARD, BATCH, FILES = 65_536, 4_096, 256, 8_192
SHAPE, CLASSES = (4, 32, 32), 1000


@dataclass(frozen=True)
class Options:
    folder: str | None = None
    rounds: Count = 5


class Files(Dataset):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return FILES

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.load(self.folder / f"{index:06d}.npy"), index % CLASSES


def write(folder: Path) -> None:
    """Write SAMPLES random latents as a dataset, and the first FILES of them also as a tar and as .npy files."""
    random_dataset(folder / "ours", SHAPE, CLASSES, SAMPLES, PER_SHARD)
    data = LatentDataset(folder / "ours")
    (folder / "npy").mkdir()
    with webdataset.TarWriter(str(folder / "latents.tar")) as tar:
        for index in range(FILES):
            latent = data.read(np.array([index])).stored[0].numpy()
            tar.write({"__key__": f"{index:06d}", "latent.npy": latent, "cls": index % CLASSES})
            np.save(folder / "npy" / f"{index:06d}.npy", latent)


def ours(folder: Path, placement: str) -> Callable[[], None]:
    """Return a function that reads an epoch to the device with our Loader. `placement` is "mmap", "ram" or "device"."""
    data = LatentDataset(folder / "ours", placement=placement, device=DEVICE)
    loader, steps = Loader(data, 0, BATCH, [slice(0, BATCH)], DEVICE), itertools.count()

    def read() -> None:
        for step in itertools.islice(steps, SAMPLES // BATCH):
            loader.batches(step)

    return read


def through(batches: Iterable) -> None:
    for stored, labels in batches:
        torch.as_tensor(stored).to(DEVICE), torch.as_tensor(labels).to(DEVICE)


def tar(folder: Path, workers: int) -> Iterable:
    """Return webdataset's loader of latents.tar in `folder`: batches (latents, labels); `workers`: processes or 0."""
    pipe = webdataset.WebDataset(str(folder / "latents.tar"), shardshuffle=False, empty_check=False).shuffle(1000)
    pipe = pipe.decode().to_tuple("latent.npy", "cls").batched(BATCH, partial=True)
    return webdataset.WebLoader(pipe, batch_size=None, num_workers=workers)


def main() -> None:
    options, _ = options_of(Options, others=False)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        write(folder)
        ways = {f"ours, {placement}": ours(folder, placement) for placement in ("mmap", "ram", "device")}
        for workers in (0, 2):
            files = DataLoader(Files(folder / "npy"), BATCH, shuffle=True, num_workers=workers)
            ways[f"webdataset, {workers} workers"] = partial(through, tar(folder, workers))
            ways[f"npy files, {workers} workers"] = partial(through, files)
        source, target = (np.full((SAMPLES, *SHAPE), value, np.float16) for value in (1, 0))
        ways["memcpy"] = partial(np.copyto, target, source)
        turns = take_turns(ways, options.rounds)
    counts = {way: FILES if way.startswith(("webdataset", "npy")) else SAMPLES for way in ways}
    speeds = {way: counts[way] / turns[way].median for way in ways}
    best_tar = max(speed for way, speed in speeds.items() if way.startswith("webdataset"))
    print(f"{DEVICE}, {torch.get_num_threads()} threads, torch {torch.__version__}, {SAMPLES:,} latents, batch {BATCH}")
    for way, speed in speeds.items():
        low, high = (counts[way] / extreme(turns[way].seconds) for extreme in (max, min))
        print(
            f"{way:22s} {speed:12,.0f} latents/s ({low:,.0f}..{high:,.0f})"
            f"  {speed / speeds['memcpy']:7.3f} of memcpy  {speed / best_tar:7.1f}× webdataset"
        )


if __name__ == "__main__":
    begin(main)
