"""How fast latents reach the device: python benchmarks/loader.py [folder=…] [rounds=5]

Latents/s of 4×32×32 float16 samples through the whole path to a device batch of 256, side by side
in one process, each round all of them:

  ours        tread.data.loader.Loader, for each placement
  webdataset  (a) a tar of the same latents, read with the webdataset library, in one process and
              with 2 workers
  npy files   (b) one .npy a sample through a PyTorch DataLoader, in one process and with 2 workers
  memcpy      (c) one array to an equally large one, one thread

Needs requirements-test.txt. Files are in the page cache. (a) and (b) are slow, so they read a part
of the samples. Prints the median of the rounds and its ratio to memcpy and to webdataset, whichever of
its two is faster.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import webdataset
from timing import begin, options_of, random_shards, seconds
from torch.utils.data import DataLoader, Dataset

from tread.data.dataset import LatentDataset
from tread.data.latents import LatentSpec
from tread.data.loader import Loader
from tread.data.writer import write_dataset
from tread.runtime.schema import Count

SAMPLES, PER_SHARD, BATCH, FILES = 65_536, 4_096, 256, 8_192
MEANING = LatentSpec((4, 32, 32), tuple(map(str, range(1000))), "pixels", scale_applied=True)


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
        return np.load(self.folder / f"{index:06d}.npy"), index % 1000


def write(folder: Path) -> None:
    """The same latents as a dataset, as a tar and as single files."""
    write_dataset(folder / "ours", MEANING, random_shards(MEANING, SAMPLES, PER_SHARD))
    data = LatentDataset(folder / "ours")
    (folder / "npy").mkdir()
    with webdataset.TarWriter(str(folder / "latents.tar")) as tar:
        for index in range(FILES):
            latent = data.read(np.array([index])).stored[0].numpy()
            tar.write({"__key__": f"{index:06d}", "latent.npy": latent, "cls": index % 1000})
            np.save(folder / "npy" / f"{index:06d}.npy", latent)


def ours(folder: Path, placement: str, device: torch.device) -> Callable[[], None]:
    data = LatentDataset(folder / "ours", placement=placement, device=device)
    loader, steps = Loader(data, 0, BATCH, [slice(0, BATCH)], device), itertools.count()

    def read() -> None:
        for step in itertools.islice(steps, SAMPLES // BATCH):
            loader.batches(step)

    return read


def through(batches: Callable[[], Iterable], device: torch.device) -> Callable[[], None]:
    def read() -> None:
        for stored, labels in batches():
            torch.as_tensor(stored).to(device), torch.as_tensor(labels).to(device)

    return read


def tar(folder: Path, workers: int) -> Callable[[], Iterable]:
    pipe = webdataset.WebDataset(str(folder / "latents.tar"), shardshuffle=False, empty_check=False).shuffle(1000)
    pipe = pipe.decode().to_tuple("latent.npy", "cls").batched(BATCH, partial=True)
    return lambda: webdataset.WebLoader(pipe, batch_size=None, num_workers=workers)


def main() -> None:
    options, _ = options_of(Options, others=False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        write(folder)
        files = Files(folder / "npy")
        ways = {f"ours, {placement}": ours(folder, placement, device) for placement in ("mmap", "ram", "device")}
        for workers in (0, 2):
            ways[f"webdataset, {workers} workers"] = through(tar(folder, workers), device)
            load = DataLoader(files, BATCH, shuffle=True, num_workers=workers)
            ways[f"npy files, {workers} workers"] = through(lambda load=load: load, device)
        source, target = (np.full((SAMPLES, 4, 32, 32), value, np.float16) for value in (1, 0))
        ways["memcpy"] = lambda: np.copyto(target, source)
        speeds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(1 + options.rounds):  # the first round warms up
            for way, read in ways.items():
                count = FILES if way.startswith(("webdataset", "npy")) else SAMPLES
                speeds[way].append(count / seconds(read, device))
    median = {way: statistics.median(values[1:]) for way, values in speeds.items()}
    best_tar = max(value for way, value in median.items() if way.startswith("webdataset"))
    print(f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}, {SAMPLES:,} latents, batch {BATCH}")
    for way, value in median.items():
        low, high = min(speeds[way][1:]), max(speeds[way][1:])
        print(
            f"{way:22s} {value:12,.0f} latents/s ({low:,.0f}..{high:,.0f})"
            f"  {value / median['memcpy']:7.3f} of memcpy  {value / best_tar:7.1f}× webdataset"
        )


if __name__ == "__main__":
    begin(main)
