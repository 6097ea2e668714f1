"""Memory-mapped .npy files: written, checked, and read as one matrix, which a dataset's shards are."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, get_args

import numpy as np
import psutil
import torch
from torch import Tensor

from tread.data.index import check_labels, check_sha256
from tread.data.latents import LatentSpec
from tread.runtime.files import plain_name, size_text

Placement = Literal["mmap", "ram", "device"]
PLACEMENTS = get_args(Placement)


def write_array(file: BinaryIO, array: np.ndarray) -> None:
    """What np.save does, by the file's own write: NumPy's does not notice when the disk is full."""
    array = np.ascontiguousarray(array)
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    file.write(array.reshape(-1).view(np.uint8).data)


def write_rows(file: BinaryIO, dtype: str, shape: tuple[int, ...], parts: Iterable[np.ndarray]) -> None:
    """As write_array, of an array that comes in parts along its first axis: no more than one is held.

    Raises ValueError if the parts are not, together, of that shape.
    """
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    count = 0
    for part in parts:
        if part.dtype != dtype or part.shape[1:] != shape[1:]:
            raise ValueError(f"a part is {part.dtype} {part.shape}, but must be {dtype} (n, {str(shape[1:])[1:]}")
        file.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
        count += len(part)
    if count != shape[0]:
        raise ValueError(f"the parts hold {count} rows, but must hold {shape[0]}")


def open_array(path: Path, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Memory-map an .npy file read-only. Raises FileNotFoundError or ValueError unless it is what was expected."""
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
    if not array.flags.c_contiguous:
        raise ValueError(f"{path} is stored in Fortran order; save it in C order")
    return array


def will_need(array: np.ndarray, start: int, size: int) -> None:
    """Have the operating system read `size` bytes of a memory-mapped array, from byte `start` of its numbers."""
    first = (array.offset + start) // mmap.PAGESIZE * mmap.PAGESIZE
    array._mmap.madvise(mmap.MADV_WILLNEED, first, array.offset + start + size - first)


def rows_in_place(shards: Sequence[np.ndarray], width: int) -> tuple[Tensor, list[int]]:
    """Memory-mapped shards as one matrix, without a copy, so that one gather reads from all of them.

    The matrix spans the addresses from the first shard to the last. Its row i holds the `width`
    numbers that start at the i-th address, so rows overlap, and most lie between the shards: only
    rows within a shard may be read. Returns it with the row at which each shard starts.
    """
    size = shards[0].itemsize
    starts = [shard.ctypes.data for shard in shards]
    base, end = min(starts), max(start + shard.nbytes for start, shard in zip(starts, shards))
    flat = torch.frombuffer((ctypes.c_char * (end - base)).from_address(base), dtype=torch_dtype(shards[0].dtype))
    return flat.as_strided(((end - base) // size - width + 1, width), (1, 1)), [(s - base) // size for s in starts]


def torch_dtype(name: str | np.dtype) -> torch.dtype:
    """The torch type of the same numbers."""
    return torch.from_numpy(np.empty(0, name)).dtype


def open_shards(folder: Path, index: dict, latents: LatentSpec, full: bool) -> tuple[list[np.ndarray], np.ndarray]:
    """A dataset's shards, memory-mapped, and its labels (n,), checked against its parsed index.json.

    full  hash the latents, too, not the labels alone.

    Raises FileNotFoundError or ValueError, KeyError or TypeError for a bad index.
    """
    path, arrays, labels = folder / "index.json", [], []
    for shard in index["shards"]:
        file, label_file = (folder / plain_name(shard[key], path) for key in ("file", "labels"))
        arrays.append(open_array(file, latents.dtype, (shard["count"], *latents.stored_shape)))
        labels.append(np.array(open_array(label_file, "int64", (shard["count"],))))
        for checked, stated in [(label_file, shard["labels_sha256"])] + [(file, shard["file_sha256"])] * full:
            check_sha256(checked, stated)
        check_labels(labels[-1], len(latents.classes), label_file)
    joined = np.concatenate(labels) if labels else np.zeros(0, dtype=np.int64)
    counted = np.bincount(joined, minlength=len(latents.classes)).tolist()
    if len(joined) != index["count"] or counted != index["class_counts"]:
        raise ValueError(
            f"{path} says {index['count']} samples, by class {index['class_counts']}, "
            f"but the shards hold {len(joined)}, by class {counted}"
        )
    return arrays, joined


class Shards:
    """Shards (n, views, …) as one matrix with a row for each view of each sample, held where `placement` says.

    placement  "mmap": memory-mapped; "ram": read into this process's memory; "device": into that of `device`.
    folder     where they are from, for messages.
    more       bytes of what will be placed with them.

    Raises ValueError where memory does not suffice.
    """

    def __init__(
        self,
        arrays: list[np.ndarray],
        views: int,
        placement: Placement,
        device: torch.device | str,
        folder: Path,
        more: int,
    ) -> None:
        self._arrays, self._views, self._in_place = arrays, views, placement == "mmap"
        counts = [len(array) for array in arrays]
        self._firsts = np.cumsum([0, *counts])[:-1]  # of each shard, the first sample
        for array in arrays:  # the kernel's reading ahead would be wasted on samples in random order
            array._mmap.madvise(mmap.MADV_RANDOM if self._in_place else mmap.MADV_SEQUENTIAL)
        if self._in_place and counts:
            width = int(np.prod(arrays[0].shape[2:]))
            self._rows, starts = rows_in_place(arrays, width)
            self._next_view = width
        else:
            starts = (np.cumsum([0, *counts]) * views).tolist()
            self._next_view = 1
            place = torch.device(device if placement == "device" else "cpu")
            needed, free = sum(array.nbytes for array in arrays) + more, free_memory(place)
            if needed > free:
                raise ValueError(
                    f"{folder} takes {size_text(needed)}, but {place} has {size_text(free)} of memory free: "
                    f"dataset.placement={placement} needs more; mmap does not"
                )
            self._rows = _read_all(arrays, starts, place)
        samples = [start + views * self._next_view * np.arange(count) for start, count in zip(starts, counts)]
        self._row_of = torch.from_numpy(np.concatenate(samples) if samples else np.zeros(0, dtype=np.int64))

    @property
    def device(self) -> torch.device:
        return self._rows.device

    def locate(self, index: int) -> tuple[Path, int]:
        """The shard's file that holds a sample, and its number in there."""
        shard = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return Path(self._arrays[shard].filename), int(index - self._firsts[shard])

    def read(self, indices: np.ndarray, views: np.ndarray, pin: bool) -> Tensor:
        """Views of samples, (B, numbers of a view), where the rows lie; in page-locked memory with `pin`."""
        chosen = self._row_of[torch.from_numpy(indices)] + torch.as_tensor(views * self._next_view)
        lock = pin and self.device.type == "cpu"
        shape = (len(indices), self._rows.shape[1])
        batch = torch.empty(shape, dtype=self._rows.dtype, device=self.device, pin_memory=lock)
        return torch.index_select(self._rows, 0, chosen.to(self.device), out=batch)

    def expect(self, indices: np.ndarray, views: np.ndarray) -> None:
        """Have the operating system read what `read` will need, all at once."""
        if not self._in_place:
            return
        size = self._arrays[0][0, 0].nbytes
        shards = np.searchsorted(self._firsts, indices, side="right") - 1
        samples = indices - self._firsts[shards]
        for shard, start in zip(shards.tolist(), ((samples * self._views + views) * size).tolist()):
            will_need(self._arrays[shard], start, size)


def _read_all(arrays: Sequence[np.ndarray], starts: Sequence[int], device: torch.device) -> Tensor:
    """All views of all samples as a matrix on a device; each shard begins at one of the starts, the last is the end."""
    width = int(np.prod(arrays[0].shape[2:])) if arrays else 1
    rows = torch.empty(starts[-1], width, dtype=torch_dtype(arrays[0].dtype) if arrays else None, device=device)
    for array, start in zip(arrays, starts):
        flat = rows_in_place([array], width)[0][::width]
        rows[start : start + len(flat)] = flat
    return rows


def free_memory(device: torch.device) -> int:
    """Bytes that could be taken of a GPU's memory, or of the CPU's."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
