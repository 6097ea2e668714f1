"""LightningDiT's latents, as its feature extraction writes them: every header checked first, then read row by row.

latents_rank00_shard000.safetensors   latents, latents_flip (n, C, S, S), the second of the mirrored pictures;
                                      labels (n,). Each process (rank) wrote a series of shards, the last one smaller
latents_stats.pt                      mean, std (1, C, 1, 1) of z by channel; may be missing
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from tread.preparing.foreign import ForeignSamples
from tread.runtime.tensor_files import listed, read_state_dict, what_is_wrong

STATISTICS = "latents_stats.pt"


def open_shards(source: Path, flipped: bool) -> ForeignSamples:
    """The samples of a folder, by file name, then row.

    flipped  whether latents_flip is the second view, or left alone.

    Raises FileNotFoundError, or ValueError that names the file.
    """
    paths = sorted(source.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{source} is not there, or holds no .safetensors file of LightningDiT's extraction")
    _check_series(source, paths)
    names = ("latents", "latents_flip")[: 1 + flipped]
    shapes, labels, rows = [], [], []
    for path in paths:
        shapes.append(_check_header(path, names))
        if shapes[-1] != shapes[0]:
            raise ValueError(f"{path} has latents of shape {shapes[-1]}, but {paths[0].name} of {shapes[0]}")
        with _opened(path) as file:
            labels += file.get_tensor("labels").tolist()
        rows += [(path, row) for row in range(len(labels) - len(rows))]

    @functools.lru_cache(maxsize=1)  # samples are read in order, and a file is mapped
    def slices(path: Path) -> list:
        file = _opened(path)
        return [file.get_slice(name) for name in names]

    def read(index: int) -> np.ndarray:
        path, row = rows[index]
        views = torch.cat([part[row : row + 1] for part in slices(path)])
        return (views if views.dtype == torch.float16 else views.float()).numpy()

    def name(index: int) -> str:
        path, row = rows[index]
        return f"{path.name}, row {row},"

    file = source / STATISTICS
    statistics = read_statistics(file, shapes[0][0]) if file.exists() else None
    return ForeignSamples(np.array(labels, dtype=np.int64), read, name, statistics)


def _opened(path: Path):
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} can't be read: {what_is_wrong(path) or error}") from error


def _check_series(source: Path, paths: list[Path]) -> None:
    """Raise ValueError for a gap in the numbers of processes or of one's shards; a missing last one can't be seen."""
    matches = [re.fullmatch(r"latents_rank(\d+)_shard(\d+)", path.stem) for path in paths]
    there = {(int(match[1]), int(match[2])) for match in matches if match}
    lasts = dict(sorted(there))  # process → its last shard
    expected = [(rank, shard) for rank in range(max(lasts, default=-1) + 1) for shard in range(lasts.get(rank, 0) + 1)]
    if gaps := [f"latents_rank{rank:02d}_shard{shard:03d}" for rank, shard in expected if (rank, shard) not in there]:
        raise ValueError(f"{source} has later shards, but not {listed(gaps)}: bring all files of one extraction")


def _check_header(path: Path, names: tuple[str, ...]) -> tuple[int, ...]:
    """The shape of a sample; nothing but the file's header is read."""
    with _opened(path) as file:
        there = sorted(file.keys())
        if missing := [name for name in (*names, "labels") if name not in there]:
            raise ValueError(f"{path} holds {listed(there)}, but no {listed(missing)} (flipped=false needs no flipped)")
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in (*names, "labels")}
    shape = shapes["latents"]
    if len(shape) != 4 or shape[2] != shape[3]:
        raise ValueError(f"{path}: latents has shape {shape}, but must be (n, C, S, S)")
    for name, its_shape in shapes.items():
        if its_shape != (shape[:1] if name == "labels" else shape):
            raise ValueError(f"{path}: {name} has shape {its_shape}, but latents {shape}")
    return shape[1:]


def read_statistics(path: Path, channels: int) -> dict[str, list[float]]:
    """{"mean", "std"} of z by channel, from latents_stats.pt; no object but tensors is made of it.

    Raises ValueError for other channels, or numbers that latents can't be normalised by.
    """
    tensors = read_state_dict(path, "any")
    statistics = {key: tensors[key].double().flatten().tolist() for key in ("mean", "std") if key in tensors}
    if [*map(len, statistics.values())] != [channels, channels]:
        there = listed(f"{key} {tuple(tensor.shape)}" for key, tensor in tensors.items())
        raise ValueError(f"{path} holds {there}, but must hold mean and std of the latents' {channels} channels")
    if not np.isfinite([*statistics.values()]).all() or min(statistics["std"]) <= 0:
        raise ValueError(f"{path}: mean and std must be finite and std above 0, for latents are divided by it")
    return statistics
