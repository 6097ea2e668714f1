"""The latent format: a folder that is checked when opened and read at the speed of memory.

    index.json               what the numbers mean, and size and sha256 of every file
    shard-00000.npy          (n, views, channels, S, S) float16 or float32, read by memory map
    shard-00000.labels.npy   (n,) int64

`content` says what is stored: "latents", or "moments", a posterior's mean and spread stacked along
the channels (2C of them), where `spread` is "logvar" or "std". The network sees
(z − shift)·scale; `scale_applied` says whether the stored numbers already are on that scale.
A second view, where stored, is the horizontally flipped picture.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from files import sha256, whole_folder
from randomness import generator

VERSION = 1
SHARD_KEYS = ("count", "file", "labels", "file_sha256", "labels_sha256")


@dataclass(frozen=True)
class Latents:
    """What the numbers of a dataset mean: the part of index.json that is not a count or a file.

    shape          (C, S, S) of the latents (of one view; moments hold twice the channels).
    classes        class names; a label is an index into them.
    autoencoder    what made the latents and decodes them: a hub id, a folder, or "pixels".
    scale, shift   network latents = (z − shift)·scale.
    """

    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    autoencoder: str
    content: str = "latents"
    spread: str | None = None
    scale: float = 1.0
    shift: float = 0.0
    scale_applied: bool = False
    dtype: str = "float16"
    views: int = 1

    def __post_init__(self) -> None:
        allowed = {"latents": (None,), "moments": ("logvar", "std")}
        if self.content not in allowed or self.spread not in allowed[self.content]:
            raise ValueError(
                f"content {self.content!r} with spread {self.spread!r}: stored are latents (spread null), "
                "or moments with spread logvar or std"
            )
        if self.dtype not in ("float16", "float32"):
            raise ValueError(f"dtype is {self.dtype!r}, but must be float16 or float32")
        if self.views not in (1, 2):
            raise ValueError(f"views is {self.views}, but must be 1, or 2 with flipped copies")
        if self.scale == 0:
            raise ValueError("scale is 0, but latents are (z − shift)·scale")

    @classmethod
    def from_json(cls, tree: dict) -> Latents:
        """From a parsed index.json or a checkpoint's info.json. Raises KeyError for a missing key."""
        values = {key: tree[key] for key in cls.__dataclass_fields__}
        return cls(**{**values, "shape": tuple(tree["shape"]), "classes": tuple(tree["classes"])})

    @property
    def stored_shape(self) -> tuple[int, int, int, int]:
        """(views, stored channels, S, S): the shape of one sample in a shard."""
        channels = self.shape[0] * (2 if self.content == "moments" else 1)
        return (self.views, channels, *self.shape[1:])


class Batch(NamedTuple):
    """Samples as stored (B, stored channels, S, S), labels (B,) int64, indices into the dataset (B,)."""

    stored: torch.Tensor
    labels: torch.Tensor
    indices: np.ndarray


def write_dataset(folder: Path, latents: Latents, shards: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
    """Write a dataset; the folder appears under its name only when it is whole.

    shards yields (stored (n, *latents.stored_shape), labels (n,)). Raises FileExistsError if the
    folder is there already, ValueError for a shard that is not what `latents` says.
    """
    folder = Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder} exists already; remove it or choose another folder")
    with whole_folder(folder) as partial:
        entries, counts = [], np.zeros(len(latents.classes), dtype=np.int64)
        for number, (stored, labels) in enumerate(shards):
            expected = (len(labels), *latents.stored_shape)
            if stored.shape != expected:
                raise ValueError(f"shard {number} has shape {stored.shape}, but must have {expected}")
            _check_labels(labels, len(latents.classes), f"shard {number}")
            entry = {"count": len(labels)}
            for key, suffix, array in (
                ("file", ".npy", stored.astype(latents.dtype)),
                ("labels", ".labels.npy", labels.astype(np.int64)),
            ):
                path = partial / f"shard-{number:05d}{suffix}"
                np.save(path, array)
                entry[key], entry[f"{key}_sha256"] = path.name, sha256(path)
            counts += np.bincount(labels, minlength=len(counts))
            entries.append(entry)
        index = {
            "version": VERSION,
            **asdict(latents),
            "count": int(counts.sum()),
            "class_counts": counts.tolist(),
            "shards": entries,
        }
        (partial / "index.json").write_text(json.dumps(index, indent=1) + "\n")


def _check_labels(labels: np.ndarray, num_classes: int, where: object) -> None:
    if len(labels) and not 0 <= labels.min() <= labels.max() < num_classes:
        raise ValueError(f"{where}: labels lie in {labels.min()}..{labels.max()}, but there are {num_classes} classes")


def _open_array(path: Path, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Memory-map an .npy file after checking its existence, dtype, shape and size."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, though index.json names it; prepare the dataset again")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path} is truncated or not an .npy file ({path.stat().st_size} bytes): {error}") from error
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(f"{path} holds {array.dtype} {array.shape}, but index.json says {dtype} {shape}")
    if array.offset + array.nbytes != path.stat().st_size:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, but its array takes {array.offset + array.nbytes}")
    if hasattr(mmap, "MADV_RANDOM"):
        array._mmap.madvise(mmap.MADV_RANDOM)  # samples are read in random order: reading ahead would be wasted
    return array


@dataclass
class LatentDataset:
    """A dataset opened for reading: checked, memory-mapped, addressed by (seed, step).

    Opening checks headers and sizes of all files and the hashes of the labels; verify="full" hashes
    the latents as well. Raises FileNotFoundError or ValueError that says which file and why.
    """

    folder: Path
    verify: str = "open"
    latents: Latents = field(init=False)
    labels: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.folder = Path(self.folder)
        if self.verify not in ("open", "full"):
            raise ValueError(f"verify is {self.verify!r}, but must be open or full")
        path = self.folder / "index.json"
        if not path.is_file():
            raise FileNotFoundError(f"no dataset at {self.folder}: it has no index.json; check dataset.path")
        try:
            index = json.loads(path.read_text())
            if index["version"] != VERSION:
                raise ValueError(f"{path} has version {index['version']}, but this code reads version {VERSION}")
            self.latents = Latents.from_json(index)
            count, class_counts = index["count"], index["class_counts"]
            shards = [{key: shard[key] for key in SHARD_KEYS} for shard in index["shards"]]
        except (ValueError, KeyError, TypeError) as error:  # of JSON and UTF-8 too, which are ValueErrors
            raise ValueError(f"{path} is damaged or of another kind: {type(error).__name__}: {error}") from error
        self._shards = []
        labels = []
        for shard in shards:
            file, label_file = self.folder / shard["file"], self.folder / shard["labels"]
            self._shards.append(_open_array(file, self.latents.dtype, (shard["count"], *self.latents.stored_shape)))
            labels.append(np.array(_open_array(label_file, "int64", (shard["count"],))))
            hashed = [(label_file, "labels_sha256")] + [(file, "file_sha256")] * (self.verify == "full")
            for checked, key in hashed:
                if (found := sha256(checked)) != shard[key]:
                    raise ValueError(f"{checked} was changed: its sha256 is {found}, but index.json says {shard[key]}")
            _check_labels(labels[-1], len(self.latents.classes), label_file)
        self.labels = np.concatenate(labels) if labels else np.zeros(0, dtype=np.int64)
        counted = np.bincount(self.labels, minlength=len(self.latents.classes)).tolist()
        if len(self.labels) != count or counted != class_counts:
            raise ValueError(
                f"{path} says {count} samples, by class {class_counts}, "
                f"but the shards hold {len(self.labels)}, by class {counted}"
            )
        self._offsets = np.cumsum([0] + [len(shard) for shard in self._shards])
        self._order: tuple[tuple[int, int], np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def steps_per_epoch(self, batch_size: int) -> int:
        """Whole batches an epoch; the samples left over (others each epoch) wait for the next one."""
        if len(self) < batch_size:
            raise ValueError(f"{self.folder} holds {len(self)} samples, fewer than one batch of {batch_size}")
        return len(self) // batch_size

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """The epoch's global shuffle: a permutation of 0..len−1 given by (seed, epoch)."""
        kept = self._order
        if kept is None or kept[0] != (seed, epoch):
            shuffle = generator(seed, epoch, "order")
            kept = self._order = (seed, epoch), torch.randperm(len(self), generator=shuffle).numpy()
        return kept[1]

    def batch(self, seed: int, step: int, batch_size: int, rows: slice = slice(None)) -> Batch:
        """Rows of the global batch of a step (0, 1, …), the same whoever reads them.

        No sample comes twice in a batch or an epoch. The view is drawn by (seed, step).
        """
        epoch, number = divmod(step, self.steps_per_epoch(batch_size))
        indices = self.order(seed, epoch)[number * batch_size : (number + 1) * batch_size]
        views = torch.randint(self.latents.views, (batch_size,), generator=generator(seed, step, "view")).numpy()
        return self.read(indices[rows], views[rows])

    def read(self, indices: np.ndarray, views: np.ndarray | int = 0) -> Batch:
        """Samples by index, in the order given; views chooses the stored view of each."""
        indices = np.asarray(indices)
        views = np.broadcast_to(views, indices.shape)
        stored = np.empty((len(indices), *self.latents.stored_shape[1:]), dtype=self.latents.dtype)
        shard_of = np.searchsorted(self._offsets, indices, side="right") - 1
        for shard in np.unique(shard_of):
            mask = shard_of == shard
            stored[mask] = self._shards[shard][indices[mask] - self._offsets[shard], views[mask]]
        return Batch(torch.from_numpy(stored), torch.from_numpy(self.labels[indices]), indices)
