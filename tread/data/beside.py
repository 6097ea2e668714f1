"""What may lie beside the latents, of the same samples in the same shards: their pictures, and an encoder's features.

    pictures-00000.npy       (n, 3, H, W) uint8, as they were cropped; of a flipped view the mirror image is read
    features-00000.npy       (n, views, T, z) float16, T = grid² tokens row by row; a flipped view has its own

index.json names them: `pictures` is (3, H, W), with a file and a hash in each shard's entry; `features` is a section,
see FeatureSpec. They are many times larger than the latents, and stay memory-mapped wherever those are placed.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tread.data.npy import open_array, torch_dtype, will_need
from tread.runtime.files import plain_name, sha256
from tread.runtime.schema import Count, read

LOOKED_AT = 32  # samples, spread over all, whose features must be finite for a dataset to open


@dataclass(frozen=True)
class FeatureSpec:
    """Which features lie beside some latents: the section "features" of index.json, but for its shards.

    encoder      its name, as tread/evaluation/encoders.py records it.
    fingerprint  hash of its weights, or of its source; None where nobody knows.
    grid         tokens along a side; there are grid² of them.
    width        numbers of a token, z.
    of           latents_hash of the dataset that they are of.
    """

    encoder: str
    fingerprint: str | None
    grid: Count
    width: Count
    of: str

    def section(self, shards: Sequence[dict]) -> dict:
        """The section of index.json; a shard is {"file": …, "sha256": …}."""
        return {**asdict(self), "shards": list(shards)}


def latents_hash(index: dict) -> str:
    """Hex sha256 of a dataset's content, by the hashes in its parsed index.json."""
    content = [[shard[key] for key in ("count", "file_sha256", "labels_sha256")] for shard in index["shards"]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def check_grid(grid: int, side: int, whose: str) -> None:
    """Raise ValueError unless features have as many tokens along a side as the network they are compared with."""
    if grid != side:
        raise ValueError(
            f"{whose} have {grid}×{grid} tokens, but the network has {side}×{side}: choose the grid of the features "
            f"(grid={side}), or model.patch_size"
        )


class Beside:
    """Memory-mapped arrays of a dataset's shards, addressed as its latents are.

    arrays    of each shard (n, …) where views are mirror images, else (n, views, …).
    mirrored  view 1 is the mirror image along the last axis; it is not stored.
    """

    def __init__(self, arrays: Sequence[np.ndarray], mirrored: bool) -> None:
        self._arrays, self._mirrored = list(arrays), mirrored
        self._firsts = np.cumsum([0, *map(len, arrays)])[:-1]
        for array in arrays:
            array._mmap.madvise(mmap.MADV_RANDOM)

    def _at(self, indices: np.ndarray) -> list[tuple[int, int]]:
        shards = np.searchsorted(self._firsts, indices, side="right") - 1
        return list(zip(shards.tolist(), (indices - self._firsts[shards]).tolist()))

    def read(self, indices: np.ndarray, views: np.ndarray, pin: bool = False) -> Tensor:
        """(B, …) in CPU memory, page-locked with `pin`; views (B,)."""
        shape = self._arrays[0].shape[1 if self._mirrored else 2 :]
        found = torch.empty(len(indices), *shape, dtype=torch_dtype(self._arrays[0].dtype), pin_memory=pin)
        rows = found.numpy()
        for row, (shard, sample), view in zip(rows, self._at(indices), views.tolist()):
            if self._mirrored:
                row[...] = self._arrays[shard][sample][..., :: -1 if view else 1]
            else:
                row[...] = self._arrays[shard][sample, view]
        return found

    def expect(self, indices: np.ndarray, views: np.ndarray) -> None:
        """Have the operating system read what `read` will need, all at once."""
        for (shard, sample), view in zip(self._at(indices), views.tolist()):
            array = self._arrays[shard]
            size = array.nbytes // len(array) // (1 if self._mirrored else array.shape[1])
            at = sample if self._mirrored else sample * array.shape[1] + view
            will_need(array, at * size, size)


def open_pictures(folder: Path, index: dict, full: bool) -> Beside:
    """The pictures that were kept with a dataset. Raises FileNotFoundError or ValueError, KeyError for a bad index."""
    path, shape, arrays = folder / "index.json", tuple(index["pictures"]), []
    for shard in index["shards"]:
        file = folder / plain_name(shard["pictures"], path)
        arrays.append(open_array(file, "uint8", (shard["count"], *shape)))
        if full:
            _check_hash(file, shard["pictures_sha256"])
    return Beside(arrays, mirrored=True)


def open_features(folder: Path, index: dict, encoder: str, views: int, full: bool) -> tuple[FeatureSpec, Beside]:
    """The features of a dataset, checked: they are there, of this encoder and these latents, and finite.

    full  look at all of them, hashes too; else at headers and sizes, and at some samples.

    Raises FileNotFoundError or ValueError, KeyError or TypeError for a bad index.
    """
    path, section = folder / "index.json", index.get("features")
    make = f"python scripts/prepare_features.py dataset={folder} encoder={encoder}"
    if section is None:
        raise ValueError(f"{folder} has no features: {make} makes them")
    shards, entries = index["shards"], section["shards"]
    spec = read({key: section[key] for key in FeatureSpec.__dataclass_fields__}, FeatureSpec, "features.")
    if spec.encoder != encoder:
        raise ValueError(
            f"{folder} holds features of {spec.encoder}, not of {encoder}, which was asked for: ask for "
            f"{spec.encoder}, or replace them by {make} again=true"
        )
    if spec.of != latents_hash(index) or len(entries) != len(shards):
        raise ValueError(f"the features in {folder} are of another dataset: replace them by {make} again=true")
    arrays, files = [], []
    for shard, entry in zip(shards, entries):
        files.append(folder / plain_name(entry["file"], path))
        arrays.append(open_array(files[-1], "float16", (shard["count"], views, spec.grid**2, spec.width)))
    counts = np.cumsum([0, *map(len, arrays)])
    looked = np.unique(np.linspace(0, counts[-1] - 1, counts[-1] if full else LOOKED_AT).round().astype(int))
    for index_ in looked.tolist() if len(arrays) else ():
        shard = int(np.searchsorted(counts, index_, side="right")) - 1
        if not np.isfinite(arrays[shard][index_ - counts[shard]]).all():
            raise ValueError(
                f"{files[shard]}, row {index_ - counts[shard]}, holds features that are not finite: replace them by "
                f"{make} again=true"
            )
    for file, entry in zip(files, entries) if full else ():
        _check_hash(file, entry["sha256"])
    return spec, Beside(arrays, mirrored=False)


def _check_hash(file: Path, expected: str) -> None:
    if (found := sha256(file)) != expected:
        raise ValueError(f"{file} was changed: its sha256 is {found}, but index.json says {expected}")
