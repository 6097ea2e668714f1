"""LightningDiT's latents, as its feature extraction writes them: every header checked first, then read row by row.

latents_rank00_shard000.safetensors   latents, latents_flip (n, C, S, S), the second of the mirrored pictures;
                                      labels (n,). Each process (rank) wrote a series of shards, the last one smaller
latents_stats.pt                      mean, std (1, C, 1, 1) of z by channel; may be missing
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from tread.runtime.tensor_files import listed, read_state_dict, what_is_wrong

STATISTICS = "latents_stats.pt"
FLOATS = ("F16", "BF16", "F32", "F64")
INTEGERS = ("I8", "I16", "I32", "I64", "U8")


def open_shards(source: Path, flipped: bool) -> tuple[np.ndarray, Callable, Callable, dict | None]:
    """Labels (n,), index → (views, C, S, S), index → name, and statistics; samples by file name, then row.

    flipped     whether latents_flip is the second view, or left alone.
    statistics  {"mean", "std"} of z, C numbers each; None where there is no latents_stats.pt.

    Raises FileNotFoundError, or ValueError that names the file.
    """
    paths = sorted(source.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(
            f"{source} is not there, or holds no .safetensors file; source must be the folder that LightningDiT's "
            "feature extraction wrote"
        )
    _check_series(source, paths)
    names = ("latents", "latents_flip")[: 1 + flipped]
    shape, labels = None, []
    for path in paths:
        count, its_shape = _check_header(path, names)
        if its_shape != (shape := shape or its_shape):
            raise ValueError(f"{path} has latents of shape {its_shape}, but {paths[0].name} of {shape}")
        with _opened(path) as file:
            labels.append(file.get_tensor("labels").numpy().astype(np.int64))
    firsts = np.cumsum([0, *map(len, labels)])

    @functools.lru_cache(maxsize=1)  # read in order; each is mapped, not read at once
    def slices(number: int) -> list:
        file = _opened(paths[number])
        return [file.get_slice(name) for name in names]

    def locate(index: int) -> tuple[int, int]:
        number = int(np.searchsorted(firsts, index, side="right")) - 1
        return number, int(index - firsts[number])

    def read(index: int) -> np.ndarray:
        number, row = locate(index)
        views = [part[row : row + 1] for part in slices(number)]
        views = [view.numpy() if str(view.dtype) == "torch.float16" else view.float().numpy() for view in views]
        return np.concatenate(views)

    def name(index: int) -> str:
        number, row = locate(index)
        return f"{paths[number].name}, row {row},"

    statistics = source / STATISTICS
    return np.concatenate(labels), read, name, read_statistics(statistics, shape[0]) if statistics.exists() else None


def _opened(path: Path):
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} can't be read: {what_is_wrong(path) or error}") from error


def _check_series(source: Path, paths: list[Path]) -> None:
    """Raise ValueError for a gap in the numbers of processes or of one's shards; a missing last one can't be seen."""
    shards: dict[int, set[int]] = {}
    for path in paths:
        if match := re.fullmatch(r"latents_rank(\d+)_shard(\d+)", path.stem):
            shards.setdefault(int(match[1]), set()).add(int(match[2]))
    gaps = [f"latents_rank{rank:02d}_*" for rank in range(max(shards, default=-1)) if rank not in shards]
    for rank, there in sorted(shards.items()):
        gaps += [f"latents_rank{rank:02d}_shard{number:03d}" for number in range(max(there)) if number not in there]
    if gaps:
        raise ValueError(f"{source} has later shards, but not {listed(gaps)}: bring all files of one extraction")


def _check_header(path: Path, names: tuple[str, ...]) -> tuple[int, tuple[int, ...]]:
    """How many samples a file holds, and the shape of one; nothing but its header is read."""
    with _opened(path) as file:
        there = sorted(file.keys())
        if missing := [name for name in (*names, "labels") if name not in there]:
            flip = "; flipped=false imports latents alone" if missing == ["latents_flip"] else ""
            raise ValueError(f"{path} holds {listed(there) or 'nothing'}, but no {listed(missing)}{flip}")
        parts = {name: file.get_slice(name) for name in (*names, "labels")}
    shapes = {name: tuple(part.get_shape()) for name, part in parts.items()}
    kinds = {name: part.get_dtype() for name, part in parts.items()}
    shape = shapes["latents"]
    if len(shape) != 4 or shape[2] != shape[3] or not all(shape[1:]):
        raise ValueError(f"{path}: latents has shape {shape}, but must be (n, C, S, S)")
    for name, expected in (("latents_flip", shape), ("labels", shape[:1])):
        if shapes.get(name, expected) != expected:
            hint = "; flipped=false imports latents alone" if name == "latents_flip" else ""
            raise ValueError(f"{path}: {name} has shape {shapes[name]}, but latents {shape}{hint}")
    for name, kind in kinds.items():
        if kind not in (INTEGERS if name == "labels" else FLOATS):
            raise ValueError(
                f"{path}: {name} is of {kind}, but must be {'integer' if name == 'labels' else 'floating'}"
            )
    return shape[0], shape[1:]


def read_statistics(path: Path, channels: int) -> dict[str, list[float]]:
    """{"mean", "std"} of z by channel, from latents_stats.pt; no object but tensors is made of it.

    Raises ValueError for other channels, or numbers that latents can't be normalised by.
    """
    tensors = read_state_dict(path, "any")
    if missing := [key for key in ("mean", "std") if key not in tensors]:
        raise ValueError(f"{path} holds {listed(tensors)}, but no {listed(missing)}")
    for key in ("mean", "std"):
        if tuple(tensors[key].shape) not in ((1, channels, 1, 1), (channels, 1, 1), (channels,)):
            raise ValueError(
                f"{path}: {key} has shape {tuple(tensors[key].shape)}, but the latents have {channels} channels: these "
                "are statistics of other latents: bring theirs"
            )
    statistics = {key: tensors[key].double().flatten().tolist() for key in ("mean", "std")}
    if not np.isfinite([*statistics["mean"], *statistics["std"]]).all() or min(statistics["std"]) <= 0:
        raise ValueError(f"{path}: mean and std must be finite and std above 0, for latents are divided by it")
    return statistics
