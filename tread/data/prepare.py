"""From photos to shards of latents: read, crop, encode, write.

Pictures are read and cropped by worker processes while the autoencoder runs. A shard is a fixed
range of pictures, encoded in batches that never cross it; so what a shard holds depends on the
pictures, the autoencoder, the device and the batch size alone, and not on who makes it or what was
done before. (The last bits of a CPU's results depend on its number of threads, too.)
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from tread.data.autoencoder import Encoder
from tread.data.dataset_report import spread
from tread.data.heldout import held_out
from tread.data.images import Crop, centre_crop, read_rgb
from tread.data.photos import Photos, named
from tread.data.writer import DatasetWriter
from tread.runtime.distributed import Processes
from tread.runtime.files import explain_failure, write_whole

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
            return None, str(error) or type(error).__name__, (0, 0)
        return pixels, "", image.size

    def __len__(self) -> int:
        return len(self.photos)


def collate(crops: list[tuple]) -> tuple[Tensor | None, list[tuple]]:
    """One tensor for a batch, as each tensor that a worker hands over takes a file descriptor."""
    good = [pixels for pixels, *_ in crops if pixels is not None]
    batch = torch.stack(good) if good else None
    if good and get_worker_info() is not None:
        batch.share_memory_()  # here, where a failure is raised: the queue's own thread would lose the batch
    return batch, [rest for _, *rest in crops]


def end_with(process: int, worker: int) -> None:
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


def source_hash(classes: Sequence[str], names: Sequence[str], labels: np.ndarray) -> str:
    """Hex sha256 of the pictures' names, labels and classes: what an unfinished dataset was begun with."""
    digest = hashlib.sha256("\0".join((*classes, *names)).encode(errors="surrogateescape"))
    digest.update(labels.tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Begun:
    """The pictures as they were when the work was begun: those of now, and damaged ones that were removed since.

    names, labels  of them all.
    at             (n,) where the pictures of now are among them.
    """

    names: Sequence[str]
    labels: np.ndarray
    at: np.ndarray

    def cut(self, classes: int, heldout: float | int | str | None, shard_size: int) -> dict[str, list[np.ndarray]]:
        """{"train" and, if some are held out, "heldout"} → the pictures of each shard, as indices into those of now."""
        parts = {"train": np.ones(len(self.names), dtype=bool)}
        if heldout is not None:
            out = held_out(self.names, self.labels, classes, heldout)
            parts = {"train": ~out, "heldout": out}
        places = {part: np.flatnonzero(chosen) for part, chosen in parts.items()}
        cuts = {part: [own[i : i + shard_size] for i in range(0, len(own), shard_size)] for part, own in places.items()}
        return {part: [self._now(one) for one in cut] for part, cut in cuts.items()}

    def _now(self, places: np.ndarray) -> np.ndarray:
        """Indices into the pictures of now of those that were at some places."""
        indices = np.searchsorted(self.at, places)
        there = self.at[np.minimum(indices, len(self.at) - 1)] == places
        return indices[there]


class Damage:
    """Pictures that could not be read, kept beside unfinished work: a file for each shard that lacks them.

    By them the work goes on in the same shards when they were removed from the source.
    """

    def __init__(self, folder: Path, photos: Photos) -> None:
        self.folder, self.photos = folder, photos

    def _of(self, files: Iterable[Path]) -> list[tuple[int, str, str, str]]:
        """(where it was among the pictures, its name, its class, why it can't be read) of pictures, in order."""
        return sorted(tuple(one) for file in files if file.exists() for one in json.loads(file.read_text()))

    def _gone(self, files: Iterable[Path]) -> list[tuple[int, str, str, str]]:
        """Those that were removed since; not of classes that went with them, whose work is another."""
        found = self._of(files)
        there, classes = (set(self.photos.names), set(self.photos.classes)) if found else ((), ())
        return [one for one in found if one[1] not in there and one[2] in classes]

    def begun(self) -> Begun:
        """The pictures that the work was begun with."""
        names, labels = list(self.photos.names), self.photos.labels.tolist()
        gone = self._gone(self.folder.glob("*.json"))
        for place, name, its_class, _ in gone:
            names.insert(place, name)
            labels.insert(place, self.photos.classes.index(its_class))
        at = np.setdiff1d(np.arange(len(names)), [place for place, *_ in gone])
        return Begun(names, np.array(labels, dtype=np.int64), at)

    def keep(self, shard: str, found: list[tuple[int, str, str, str]]) -> None:
        """Write down the damaged pictures of a shard."""
        file = self.folder / f"{shard}.json"
        with explain_failure(file):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps([*found, *self._gone([file])]) + "\n")

    def check(self, shards: Iterable[str]) -> None:
        """Raise ValueError that names the damaged pictures of shards which could not be made."""
        files = [self.folder / f"{shard}.json" for shard in shards]
        gone = {name for _, name, *_ in self._gone(files)}
        damaged = [(name, why) for _, name, _, why in self._of(files) if name not in gone]
        if damaged:
            listed = named(damaged, "can't be read as a picture ({})")
            raise ValueError(
                f"{self.photos.where}: damaged pictures, {len(damaged):,} in all{listed}\nReplace or remove them and "
                "start the same command again: it goes on with what is done. Or leave such files out with on_error=skip"
            )


@dataclass(frozen=True)
class Piece:
    """A shard that is to be made: by which writer, which number, of which pictures, and its name in Damage."""

    writer: DatasetWriter
    number: int
    pictures: np.ndarray
    name: str


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
    pieces: Sequence[Piece],
    encode: Encoder,
    crop: Crop,
    batch_size: int,
    workers: int,
    damage: Damage | None,
    begun: Begun,
    processes: Processes,
) -> None:
    """Write shards, with a progress bar, and the speed at the end.

    Notes for each shard which pictures were left out, how many were enlarged, and which more than MUCH times.

    damage  where damaged pictures are written down, of whose shards nothing is written; None leaves them out.
    """
    batches = [
        [piece.pictures[i : i + batch_size] for i in range(0, len(piece.pictures), batch_size)] for piece in pieces
    ]
    loader = DataLoader(
        Crops(photos, crop),
        batch_sampler=[indices.tolist() for parts in batches for indices in parts],
        num_workers=workers,
        collate_fn=collate,
        worker_init_fn=partial(end_with, os.getpid()),
    )
    coming, total = iter(loader), sum(len(piece.pictures) for piece in pieces)
    began, waited = time.perf_counter(), 0.0
    with processes.bar("encoding", total) as bar:
        for piece, parts in zip(pieces, batches):
            stored, kept, labels, left_out, enlarged, much_enlarged, damaged = [], [], [], [], 0, [], []
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
                for index, (why, size) in zip(indices.tolist(), notes):
                    name, label = photos.names[index], int(photos.labels[index])
                    if why:
                        left_out.append((name, why))
                        damaged.append((int(begun.at[index]), name, photos.classes[label], why))
                        continue
                    labels.append(label)
                    enlarged += min(size) < crop.size
                    if MUCH * min(size) < crop.size:
                        much_enlarged.append(name)
                if pixels is not None and not (damaged and damage):
                    stored.append(encode(pixels))
                    if piece.writer.pictures:
                        kept.append(pixels.numpy().copy())  # not in the memory that a worker shares with us
                bar.update(len(indices))
            if damaged and damage:
                damage.keep(piece.name, damaged)
                continue
            whole = np.concatenate(stored) if stored else np.zeros((0, *piece.writer.latents.stored_shape), np.float32)
            numbers = np.array(labels, dtype=np.int64)
            pictures = np.concatenate(kept) if kept else np.zeros((0, 3, crop.size, crop.size), np.uint8)
            counts = {"left_out": left_out, "enlarged": enlarged, "much_enlarged": much_enlarged}
            piece.writer.write(piece.number, whole, numbers, pictures if piece.writer.pictures else None, **counts)
    if total:
        wall = time.perf_counter() - began
        processes.say(
            f"  speed     {total / wall:.1f} images/s a process, of whose time {100 * waited / wall:.1f}% waiting for "
            f"pictures from {workers} reading processes"
        )
