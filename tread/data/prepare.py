"""From photos to shards of latents: read, crop, encode, write.

Pictures are read and cropped by worker processes while the autoencoder runs. A shard is a fixed
range of pictures, encoded in batches that never cross it; so what a shard holds depends on the
pictures, the autoencoder, the device and the batch size alone, and not on who makes it or what was
done before. (The last bits of a CPU's results depend on its number of threads, too.)
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from tread.data.autoencoder import Encoder
from tread.data.dataset_report import spread
from tread.data.images import Crop, centre_crop, read_rgb
from tread.data.photos import Photos
from tread.data.writer import DatasetWriter
from tread.runtime.distributed import Processes

MUCH = 4  # pictures that are enlarged more times are named in the report


@dataclass
class Crops(Dataset):
    """index → (pixels (3, size, size) uint8 or None, why it could not be read, its size)."""

    photos: Photos
    crop: Crop

    def __getitem__(self, index: int) -> tuple[Tensor | None, str, tuple[int, int]]:
        try:
            image = read_rgb(self.photos.read(index), self.crop.orientation, self.crop.alpha)
            pixels = torch.from_numpy(centre_crop(image, self.crop.size).transpose(2, 0, 1).copy())
        except (OSError, ValueError) as error:
            return None, f"{type(error).__name__}: {error}", (0, 0)
        return pixels, "", image.size

    def __len__(self) -> int:
        return len(self.photos)


def _collate(crops: list[tuple]) -> tuple[Tensor | None, list[tuple]]:
    """One tensor for a batch, as each tensor that a worker hands over takes a file descriptor."""
    good = [pixels for pixels, *_ in crops if pixels is not None]
    batch = torch.stack(good) if good else None
    if good and get_worker_info() is not None:
        batch.share_memory_()  # here, where a failure is raised: the queue's own thread would lose the batch
    return batch, [rest for _, *rest in crops]


def _end_with(process: int, worker: int) -> None:
    """Let a reading process end when the one it reads for is gone: PyTorch watches its parent, a fork server."""

    def watch() -> None:
        while True:
            try:
                os.kill(process, 0)
            except ProcessLookupError:
                os._exit(1)
            time.sleep(1)

    threading.Thread(target=watch, daemon=True, name="end with").start()


def shard_ranges(count: int, shard_size: int) -> list[range]:
    """The pictures of each shard."""
    return [range(first, min(first + shard_size, count)) for first in range(0, count, shard_size)]


def source_hash(photos: Photos) -> str:
    """Hex sha256 of the pictures' names, labels and classes: what an unfinished dataset was begun with."""
    digest = hashlib.sha256("\0".join((*photos.classes, *photos.names)).encode(errors="surrogateescape"))
    digest.update(photos.labels.tobytes())
    return digest.hexdigest()


def check_sizes(photos: Photos, resolution: int) -> None:
    """Raise ValueError if most of some pictures, spread over all, are smaller than the resolution asked for."""
    crops = Crops(photos, Crop(resolution))
    sizes = [min(size) for _, why, size in (crops[int(number)] for number in spread(len(photos), 32)) if not why]
    if sizes and np.median(sizes) < resolution:
        raise ValueError(
            f"the pictures of {photos.where} are smaller ({int(np.median(sizes))} pixels along the shorter side, the "
            f"median of {len(sizes)}) than resolution={resolution}; choose a lower one, or enlarge=true"
        )


def make_shards(
    photos: Photos,
    writer: DatasetWriter,
    encode: Encoder,
    shards: Sequence[tuple[int, range]],
    resolution: int,
    batch_size: int,
    workers: int,
    skip_damaged: bool,
    processes: Processes,
) -> None:
    """Write shards (number, its pictures), with a progress bar, and the speed at the end.

    Notes for each shard which pictures were left out, how many were enlarged, and which more than
    MUCH times. Raises ValueError for a
    damaged picture, unless skip_damaged.
    """
    batches = {n: [part[i : i + batch_size] for i in range(0, len(part), batch_size)] for n, part in shards}
    loader = DataLoader(
        Crops(photos, Crop(resolution, writer.latents.orientation, writer.latents.alpha)),
        batch_sampler=[indices for parts in batches.values() for indices in parts],
        num_workers=workers,
        collate_fn=_collate,
        worker_init_fn=partial(_end_with, os.getpid()),
    )
    coming, total = iter(loader), sum(len(part) for _, part in shards)
    began, waited = time.perf_counter(), 0.0
    with processes.bar("encoding", total) as bar:
        for number, parts in batches.items():
            stored, labels, left_out, enlarged, much_enlarged = [], [], [], 0, []
            for indices in parts:
                asked = time.perf_counter()
                try:
                    pixels, notes = next(coming)
                except RuntimeError as error:  # of PyTorch, where a worker died
                    raise OSError(
                        f"a reading process ended: {error}\nIt may have had too little (shared) memory, or a file "
                        "size limit: try fewer workers, or a smaller batch_size. What was done before is kept"
                    ) from error
                waited += time.perf_counter() - asked
                for index, (why, size) in zip(indices, notes):
                    if why and not skip_damaged:
                        raise ValueError(
                            f"{photos.where}: {photos.names[index]} can't be read as a picture ({why}). "
                            "Replace it, or leave such pictures out with on_error=skip; without it in the source the "
                            "work would have to begin anew"
                        )
                    if why:
                        left_out.append((photos.names[index], why))
                        continue
                    labels.append(photos.labels[index])
                    enlarged += min(size) < resolution
                    if MUCH * min(size) < resolution:
                        much_enlarged.append(photos.names[index])
                if pixels is not None:
                    stored.append(encode(pixels))
                bar.update(len(indices))
            whole = np.concatenate(stored) if stored else np.zeros((0, *writer.latents.stored_shape), np.float32)
            notes = {"left_out": left_out, "enlarged": enlarged, "much_enlarged": much_enlarged}
            writer.write(number, whole, np.array(labels, dtype=np.int64), **notes)
    if total:
        wall = time.perf_counter() - began
        processes.say(
            f"  speed     {total / wall:.1f} images/s a process, of whose time {100 * waited / wall:.1f}% waiting for "
            f"pictures from {workers} reading processes"
        )
