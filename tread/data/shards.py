"""Memory-mapped .npy files: written, checked, and seen as one matrix."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor


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
