"""Writes and checks .npy files, and reads memory-mapped ones as one matrix of rows."""

import ctypes
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import psutil
import torch
from torch import Tensor

from tread.data.index import check_labels, check_sha256, named_file
from tread.data.latents import LatentSpec
from tread.runtime.files import size_text

Placement = Literal["mmap", "ram", "device"]


@dataclass(frozen=True)
class Stream:
    """An array that is written part by part along its first axis. If `parts` is a generator, each part is made when it
    is written, so that memory holds one at a time. `shape` is that of the whole array."""

    dtype: str
    shape: tuple[int, ...]
    parts: Iterable[np.ndarray]


def write_array(file: BinaryIO, array: np.ndarray | Stream) -> None:
    """Write an array in the format of np.save, but with file.write, since NumPy's own writing does not notice a full
    disk. Raises ValueError if the parts of a Stream do not match its dtype and shape."""
    descr, count = np.lib.format.dtype_to_descr(np.dtype(array.dtype)), 0
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": array.shape})
    for part in array.parts if isinstance(array, Stream) else [array]:
        if part.dtype != array.dtype or part.shape[1:] != array.shape[1:]:
            raise ValueError(f"a part is {part.dtype} {part.shape}, but the array {array.dtype} {array.shape}")
        file.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
        count += len(part)
    if count != array.shape[0]:
        raise ValueError(f"the parts hold {count} rows, but must hold {array.shape[0]}")


def open_arrays(
    folder: Path, entries: Iterable[Mapping], kind: str, dtype: str, row: Sequence[int], hashed: bool
) -> list[np.memmap]:
    """Memory-map a dataset's .npy files read-only. Raises FileNotFoundError or ValueError unless they match index.json.

    entries  a dict for each file: entry[kind] is its name, entry[f"{kind}_sha256"] its hash, entry["count"] its rows.
    row      the shape of a row.
    hashed   compare the hashes too.
    """
    arrays = []
    for entry in entries:
        path, shape = named_file(folder, entry[kind]), (entry["count"], *row)
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            size = path.stat().st_size
            raise ValueError(f"{path} is truncated or not an .npy file ({size} bytes): {error}") from error
        if array.dtype != dtype or array.shape != shape:
            raise ValueError(f"{path} holds {array.dtype} {array.shape}, but index.json says {dtype} {shape}")
        size, takes = path.stat().st_size, array.offset + array.nbytes
        if size != takes:
            raise ValueError(f"{path} has {size} bytes, but its array takes {takes}")
        if not array.flags.c_contiguous:
            raise ValueError(f"{path} is stored in Fortran order; save it in C order")
        if hashed:
            check_sha256(path, entry[f"{kind}_sha256"])
        arrays.append(array)
    return arrays


def open_latents(folder: Path, index: dict, latents: LatentSpec, full: bool) -> tuple[list[np.memmap], np.ndarray]:
    """Memory-map a dataset's shards and read its labels (n,), checked against its parsed index.json. `full` compares
    the hashes of the latents too, not only those of the labels. Raises FileNotFoundError or ValueError if a file is
    missing or does not fit the index, KeyError or TypeError if the index is malformed."""
    path, shards = folder / "index.json", index["shards"]
    arrays = open_arrays(folder, shards, "file", latents.dtype, latents.stored_shape, full)
    labels = open_arrays(folder, shards, "labels", "int64", (), True)
    for shard, numbers in zip(shards, labels):
        check_labels(numbers, len(latents.classes), folder / shard["labels"])
    if not arrays:
        raise ValueError(f"{path} names no shard")
    joined = np.concatenate(labels)
    counted = np.bincount(joined, minlength=len(latents.classes)).tolist()
    if len(joined) != index["count"] or counted != index["class_counts"]:
        stated = f"{path} says {index['count']} samples, by class {index['class_counts']}"
        raise ValueError(f"{stated}, but the shards hold {len(joined)}, by class {counted}")
    return arrays, joined


def rows_in_place(shards: Sequence[np.ndarray], width: int) -> tuple[Tensor, list[int]]:
    """View memory-mapped shards as one matrix without a copy, so that one gather reads from all of them. Also returns
    the row at which each shard starts. The matrix spans the memory from the first shard to the last: row i holds
    elements i to i + width − 1 of this memory. Rows overlap; only those that lie within a shard may be read."""
    size = shards[0].itemsize
    starts = [shard.ctypes.data for shard in shards]
    base, end = min(starts), max(start + shard.nbytes for start, shard in zip(starts, shards))
    flat = torch.from_numpy(np.frombuffer((ctypes.c_char * (end - base)).from_address(base), shards[0].dtype))
    return flat.as_strided(((end - base) // size - width + 1, width), (1, 1)), [(s - base) // size for s in starts]


class ShardRows:
    """Shards (n, views, …) as one matrix, a row for each stored view of each sample: 0 is the original, 1 its mirror
    image (if it is not stored, `read` mirrors view 0). Rows are memory-mapped or, after `place`, in device memory."""

    def __init__(self, arrays: Sequence[np.memmap]) -> None:
        self._arrays = list(arrays)
        self._views, *self._shape = arrays[0].shape[1:]
        self._firsts = np.cumsum([0, *map(len, arrays)])  # the first sample of each shard, then the number of samples
        self._stride = int(np.prod(self._shape))  # rows of the matrix from one view to the next
        self._in_place = True
        for array in arrays:  # the kernel's reading ahead would be wasted on samples in random order
            array._mmap.madvise(mmap.MADV_RANDOM)
        self._rows, self._starts = rows_in_place(arrays, self._stride)
        step = self._views * self._stride
        samples = [start + step * np.arange(len(array)) for start, array in zip(self._starts, arrays)]
        self._row_of = torch.from_numpy(np.concatenate(samples))  # where each sample's rows, one per view, begin

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays)

    def place(self, device: torch.device) -> None:
        """Read all rows into a device's memory."""
        width, firsts = self._stride, (self._firsts * self._views).tolist()
        rows = torch.empty(firsts[-1], width, dtype=self._rows.dtype, device=device)
        for array, start, first, stop in zip(self._arrays, self._starts, firsts, firsts[1:]):
            array._mmap.madvise(mmap.MADV_SEQUENTIAL)
            rows[first:stop] = self._rows[start : start + (stop - first) * width : width]
        self._rows, self._stride, self._in_place = rows, 1, False
        self._row_of = torch.arange(len(self._row_of)) * self._views

    def locate(self, index: int) -> tuple[Path, int]:
        """Return the file that holds the sample with this index, and its row in that file."""
        shard = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return Path(self._arrays[shard].filename), int(index - self._firsts[shard])

    def read(self, indices: np.ndarray, views: np.ndarray | int = 0, pin: bool = False) -> Tensor:
        """Return samples' views (0 original, 1 mirrored), (B, …), on the rows' device. `pin` page-locks CPU tensors."""
        views, mirrored = np.asarray(views), None
        if views.max(initial=0) >= self._views:
            mirrored, views = np.broadcast_to(views >= self._views, indices.shape).copy(), views % self._views
        chosen = self._row_of[torch.from_numpy(indices)] + torch.as_tensor(views * self._stride)
        device = self._rows.device
        batch = self._rows.new_empty((len(indices), self._rows.shape[1]), pin_memory=pin and device.type == "cpu")
        batch = torch.index_select(self._rows, 0, chosen.to(device), out=batch).view(-1, *self._shape)
        if mirrored is not None:
            batch[mirrored] = batch[mirrored].flip(-1)
        return batch

    def expect(self, indices: np.ndarray, views: np.ndarray | int = 0) -> None:
        """Ask the operating system to load from disk what `read` with these sample indices and views (0 original, 1
        mirrored; one for all, or one each) will need. Does nothing once `place` has copied all rows into memory."""
        if not self._in_place:
            return
        size = self._arrays[0][0, 0].nbytes
        shards = np.searchsorted(self._firsts, indices, side="right") - 1
        rows = (indices - self._firsts[shards]) * self._views + views % self._views
        for shard, start in zip(shards.tolist(), (rows * size).tolist()):
            array = self._arrays[shard]
            first = (array.offset + start) // mmap.PAGESIZE * mmap.PAGESIZE
            array._mmap.madvise(mmap.MADV_WILLNEED, first, array.offset + start + size - first)


def place(rows: Sequence[ShardRows], placement: Placement, device: torch.device | str, folder: Path) -> None:
    """Copy a dataset's rows into the CPU's memory (placement "ram") or into that of `device` ("device"); "mmap" leaves
    them on disk. Raises ValueError, which names `folder`, if too little memory is free."""
    if placement == "mmap":
        return
    to = torch.device(device if placement == "device" else "cpu")
    needed, free = sum(part.nbytes for part in rows), free_memory(to)
    if needed > free:
        room = f"{folder} takes {size_text(needed)}, but {to} has {size_text(free)} of memory free"
        raise ValueError(f"{room}: dataset.placement={placement} needs more; mmap does not")
    for part in rows:
        part.place(to)


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a GPU's memory, or of the CPU's."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
