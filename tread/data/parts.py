"""Long work in parts that are kept on disk, so that it can be stopped, and shared by processes.

<folder>/plan.json          what the work is
<folder>/part-00003/        arrays of one part, name.npy, and info.json with the sha256 of each
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from tread.data.shards import write_array
from tread.runtime.distributed import Processes
from tread.runtime.files import explain_failure, plain_name, sha256, whole_folder, write_whole


class PartStore:
    """Numbers 0..count−1, cut into parts of `size` (the last one may be shorter), whatever process does which.

    plan  what decides about the result, anything JSON can hold. Work of another plan in the folder
          is begun anew.
    """

    def __init__(self, folder: Path, plan: Mapping, count: int, size: int) -> None:
        self.folder, self.plan = folder, json.loads(json.dumps({**plan, "count": count, "size": size}))
        self.ranges = [range(start, min(start + size, count)) for start in range(0, count, size)]

    def begin(self) -> None:
        """Take the folder; one process does this before any of them goes on."""
        kept = self.folder / "plan.json"
        try:
            fits = json.loads(kept.read_text()) == self.plan
        except (OSError, ValueError):
            fits = False
        if not fits:
            shutil.rmtree(self.folder, ignore_errors=True)
            with explain_failure(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                write_whole(kept, json.dumps(self.plan, indent=1) + "\n")

    def _part(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}"

    def done(self, number: int) -> bool:
        """Whether a part is there and its files are what was written."""
        try:
            files = self.info(number)["files"]
            return all(
                sha256(self._part(number) / plain_name(name, "info.json")) == value for name, value in files.items()
            )
        except (OSError, ValueError, KeyError):
            return False

    def kept(self) -> list[range]:
        """What the parts hold that look done, unchecked."""
        return [rows for number, rows in enumerate(self.ranges) if (self._part(number) / "info.json").is_file()]

    def missing(self, processes: Processes | None = None) -> list[int]:
        """The parts that are not done; what is kept is read for that, under a bar of these processes."""
        if processes is None:
            return [number for number in range(len(self.ranges)) if not self.done(number)]
        missing = []
        with processes.bar(f"checking {self.folder.name}", sum(map(len, self.kept()))) as progress:
            for number, rows in enumerate(self.ranges):
                done = self.done(number)
                progress.update(len(rows) if done else 0)
                missing += [] if done else [number]
        return missing

    def write(self, number: int, arrays: Mapping[str, np.ndarray], **facts: object) -> None:
        """Keep a part, whole or not at all. Raises OSError that names the folder."""
        with explain_failure(self._part(number)), whole_folder(self._part(number)) as partial:
            files = {}
            for name, array in arrays.items():
                path = partial / f"{name}.npy"
                with path.open("wb") as file:
                    write_array(file, array)
                files[path.name] = sha256(path)
            (partial / "info.json").write_text(json.dumps({"files": files, **facts}) + "\n")

    def info(self, number: int) -> dict:
        """A finished part's facts."""
        return json.loads((self._part(number) / "info.json").read_text())

    def arrays(self, name: str) -> Iterator[np.ndarray]:
        """An array of each part, in order, by memory map."""
        for number in range(len(self.ranges)):
            yield np.load(self._part(number) / f"{name}.npy", mmap_mode="r", allow_pickle=False)

    def first(self, name: str, count: int) -> np.ndarray:
        """The first rows of an array, at most `count`, over as many parts as they take."""
        parts = sum(rows.start < count for rows in self.ranges)
        return np.concatenate(list(itertools.islice(self.arrays(name), parts)))[:count]

    def remove(self) -> None:
        """Forget the work."""
        shutil.rmtree(self.folder, ignore_errors=True)
