"""How long a dataset of ImageNet's size takes to open, and how much memory: python benchmarks/dataset_open.py

1,281,167 samples of two 8×32×32 float16 views, 42 GB, written as sparse files with real labels.
Prints the median and the spread of several openings in one process, files in the page cache, and how
much anonymous memory the first one and a step of reading added.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from tread.data.dataset import VERSION, LatentDataset
from tread.data.latents import LatentSpec
from tread.runtime.files import sha256

SAMPLES, PER_SHARD = 1_281_167, 16_384
MEANING = LatentSpec((4, 32, 32), tuple(map(str, range(1000))), "vae", "moments", "logvar", 0.18215, views=2)


def write_sparse(folder: Path) -> None:
    """The dataset, its latents all zero and taking no disk space."""
    shards, counts = [], np.zeros(1000, dtype=np.int64)
    for number, first in enumerate(range(0, SAMPLES, PER_SHARD)):
        count = min(PER_SHARD, SAMPLES - first)
        labels = np.random.default_rng(number).integers(0, 1000, count)
        counts += np.bincount(labels, minlength=1000)
        shard, label_file = folder / f"shard-{number:05d}.npy", folder / f"shard-{number:05d}.labels.npy"
        np.lib.format.open_memmap(shard, mode="w+", dtype="float16", shape=(count, *MEANING.stored_shape))
        np.save(label_file, labels)
        entry = {"count": count, "file": shard.name, "labels": label_file.name}
        shards.append({**entry, "file_sha256": "", "labels_sha256": sha256(label_file)})
    index = {"version": VERSION, **MEANING.__dict__, "count": SAMPLES, "class_counts": counts.tolist()}
    (folder / "index.json").write_text(json.dumps({**index, "shards": shards}))


def anonymous_memory() -> int | None:
    """Bytes of memory of this process that no file backs; None where the system does not tell."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), None)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_sparse(Path(folder))
        before = anonymous_memory()
        data = LatentDataset(folder)
        opened = anonymous_memory()
        data.batch(0, 0, 256)
        read = anonymous_memory()
        times = []
        for _ in range(11):
            start = time.perf_counter()
            LatentDataset(folder)
            times.append(time.perf_counter() - start)
    print(f"opening {SAMPLES:,} samples: median {statistics.median(times):.3f} s, {min(times):.3f}..{max(times):.3f} s")
    if before is not None:
        grown = [(now - before) / 1e6 for now in (opened, read)]
        print(f"anonymous memory: {grown[0]:.0f} MB by opening, {grown[1]:.0f} MB after a step")


if __name__ == "__main__":
    main()
