"""Inception features of pictures, in parts that are kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from tread.evaluation.image_sets import Pictures
from tread.evaluation.inception import Inception, extract
from tread.evaluation.metrics import Moments
from tread.evaluation.part_store import PartStore
from tread.runtime.distributed import Processes

PART = 256  # pictures of a part, where there are enough of them
PARTS = 64  # that there are at least, where a batch allows it, for the processes to share
BATCH = {"cpu": 8, "gpu": 128}  # pictures the Inception takes at once


def feature_parts(folder: Path, pictures: Pictures, weights: str) -> PartStore:
    """Where the features of a set of pictures are kept: below `folder`, by the hashes of pictures and weights."""
    plan = {"pictures": pictures.sha256, "inception": weights}
    name = f"{pictures.sha256[:16]}-{weights[:16]}"
    return PartStore(folder / name, plan, pictures.count, part_size(pictures.count, batch_size=32))


def part_size(count: int, batch_size: int) -> int:
    """Pictures of a part: whole batches, given by the count alone and not by the processes."""
    return batch_size * max(1, min(-(-PART // batch_size), count // (batch_size * PARTS)))


def as_arrays(network: Inception, pictures: torch.Tensor) -> dict[str, np.ndarray]:
    """Features of pictures (n, 3, H, W) uint8 by name: pool, spatial and, with fc, probabilities."""
    batch_size = BATCH["cpu" if next(network.parameters()).device.type == "cpu" else "gpu"]
    found = [extract(network, part) for part in pictures.split(batch_size)]
    named = {name: [getattr(one, name) for one in found] for name in ("pool", "spatial", "probabilities")}
    return {name: np.concatenate(arrays) for name, arrays in named.items() if arrays[0] is not None}


def pool_moments(network: Inception, pictures: Iterable[torch.Tensor]) -> Moments:
    """Mean and covariance of the pool features of pictures that come in batches (b, 3, H, W) uint8; none is kept."""
    return Moments.of_parts(as_arrays(network, part)["pool"] for part in pictures)


def extract_parts(network: Inception, pictures: Pictures, parts: PartStore, mine: list[int]) -> Iterator[int]:
    """Extract the features of some parts of a set of pictures; yields how many pictures each had, when it is kept."""
    for number in mine:
        rows = parts.ranges[number]
        content = torch.from_numpy(pictures.read(rows.start, rows.stop))
        parts.write(number, as_arrays(network, content))
        yield len(rows)


def features_of(pictures: Pictures, folder: Path, network: Inception, weights: str, processes: Processes) -> PartStore:
    """Features of a set of pictures, kept below a folder; all processes extract their share of what is missing."""
    parts = feature_parts(folder, pictures, weights)
    with processes.lock(parts.folder.with_suffix(".lock")):
        with processes.main_first():
            if processes.main:
                parts.begin()
        mine = processes.from_main(parts.missing)[processes.rank :: processes.count]
        total = sum(len(parts.ranges[number]) for number in mine)
        with processes.bar(f"features of {Path(pictures.where).name}", total) as progress:
            for done in extract_parts(network, pictures, parts, mine):
                progress.update(done)
        processes.wait()
        if processes.main and (missing := parts.missing()):
            raise OSError(f"parts {missing} of {parts.folder} are missing: all processes must share cache={folder}")
    return parts
