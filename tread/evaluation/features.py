"""Inception features of pictures, in parts that are kept."""

from __future__ import annotations

from pathlib import Path

import torch

from tread.evaluation.image_sets import Pictures
from tread.evaluation.inception import Inception, extract
from tread.evaluation.part_store import PartStore
from tread.runtime.distributed import Processes

PART = 256  # pictures of a part, where there are enough of them
PARTS = 64  # that there are at least, where a batch allows it, for the processes to share


def part_size(count: int, batch_size: int) -> int:
    """Pictures of a part: whole batches, given by the count alone and not by the processes."""
    return batch_size * max(1, min(-(-PART // batch_size), count // (batch_size * PARTS)))


def features_of(pictures: Pictures, folder: Path, network: Inception, weights: str, processes: Processes) -> PartStore:
    """Features of a set of pictures, kept below a folder by the hashes of pictures and weights.

    All processes extract their share of what is missing.
    """
    name, plan = f"{pictures.sha256[:16]}-{weights[:16]}", {"pictures": pictures.sha256, "inception": weights}
    parts = PartStore(folder / name, plan, pictures.count, part_size(pictures.count, batch_size=32))
    with processes.lock(parts.folder.with_suffix(".lock")):
        processes.from_main(parts.begin)
        mine = processes.from_main(lambda: parts.missing(processes))[processes.rank :: processes.count]
        total = sum(len(parts.ranges[number]) for number in mine)
        with processes.bar(f"features of {Path(pictures.where).name}", total) as progress:
            for number in mine:
                rows = parts.ranges[number]
                parts.write(number, extract(network, torch.from_numpy(pictures.read(rows.start, rows.stop))))
                progress.update(len(rows))
        processes.wait()
        if processes.main and (missing := parts.missing(processes)):
            raise OSError(f"parts {missing} of {parts.folder} are missing: all processes must share cache={folder}")
    return parts
