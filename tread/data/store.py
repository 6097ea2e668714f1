"""Shards (files of many rows) that processes make in any order, kept on disk until all of them are done.

    <work>/plan.json          what determines the shards' content
    <work>/data/              their arrays, such as shard-00003.npy
    <work>/done/00003.json    a shard's note, written last: its files with their sha256, and facts about it

Interrupted work continues. A shard's content follows from plan and rows alone, whichever process makes it, and when.
"""

import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from tread.data.shards import Stream, write_array
from tread.runtime.distributed import Processes
from tread.runtime.files import check_place, explain_failure, sha256, sync, whole_file, write_json, write_whole

FORMAT = 2  # version of the work folder; another version counts as another plan


def pieces_of(rows: range | np.ndarray, size: int) -> list[range | np.ndarray]:
    """Cut rows into pieces of `size` rows, such as shards or batches; the last one may be smaller."""
    return [rows[first : first + size] for first in range(0, len(rows), size)]


def spread_indices(count: int, most: int) -> np.ndarray:
    """Return min(count, most) indices, evenly spread over 0..count−1, including both ends; for most=1 only 0."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(int)


class ShardStore:
    """Makes and keeps shards in a work folder.

    work       the folder.
    plan       everything that determines the shards' content, as JSON.
    ranges     the rows of each shard: a range or an array of row numbers.
    names      file name for each kind of array, with {} for the shard's number; other kinds have <kind>-{}.npy.
    row_bytes  bytes of a row's arrays, to check the free disk space.
    """

    def __init__(
        self, work: Path, plan: Mapping, ranges: Sequence, names: Mapping[str, str] | None = None, row_bytes: int = 0
    ) -> None:
        self.work, self.data, self.done = work, work / "data", work / "done"
        self.plan, self.ranges, self._names = json.loads(json.dumps(plan)), list(ranges), names or {}
        self.row_bytes = row_bytes

    def begin(self, again: bool = False, begun: Mapping | None = None) -> None:
        """Create the work folder, or continue the work in it; one process must call this before any process writes.

        again  discard shards made with another plan; without `again`, they raise ValueError.
        begun  {key: value} that stand in for the plan's when it is compared with unfinished work; never written.

        The ValueError says what differs. Raises OSError if the folder cannot be written.
        """
        path, fresh = self.work / "plan.json", {"format": FORMAT, "shards": list(map(len, self.ranges)), **self.plan}
        try:
            before = json.loads(path.read_text())
        except (OSError, ValueError):
            before = {}
        expected = {**fresh, **(begun or {})}
        same = before == expected
        if not (same or again) and any(self.notes()):
            said = f"{self.work} holds unfinished work of another kind: continue it as it was begun, or start anew"
            raise ValueError(
                f"{said} (remove the folder, or again=true where there is that option)\n{differences(before, expected)}"
            )
        with explain_failure(self.work):
            self.work.mkdir(parents=True, exist_ok=True)
            if not same:
                shutil.rmtree(self.done, ignore_errors=True)  # first, as shards without a note count as missing
                for entry in self.work.iterdir():
                    if entry.name != "lock":
                        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            for folder in (self.data, self.done):
                folder.mkdir(exist_ok=True)
            for partial in self.work.rglob(".*.partial"):
                partial.unlink()  # left by a process that was killed
            if not same:
                write_json(path, fresh)

    def _note(self, number: int) -> Path:
        return self.done / f"{number:05d}.json"

    def note(self, number: int) -> dict:
        """Return a finished shard's note: its facts, and under "entry" its row count and each array's file and hash."""
        return json.loads(self._note(number).read_text())

    def notes(self, forgotten: bool = False) -> Iterator[dict]:
        """Yield finished shards' notes (see `note`) in order; if `forgotten`, also those set aside by `forget`."""
        files = self.done.glob("[0-9]*.json*" if forgotten else "[0-9]*.json")
        for file in sorted(files, key=lambda file: int(file.name.split(".")[0])):
            yield json.loads(file.read_text())

    def rows(self, numbers: Iterable[int]) -> int:
        return sum(len(self.ranges[number]) for number in numbers)

    def missing(self, verify: Processes | None = None) -> list[int]:
        """Return the numbers of the shards still to be made. If `verify` is given, all files of finished shards are
        hashed, with a progress bar from verify.bar, and shards with changed or lost files count as missing."""
        there = [number for number in range(len(self.ranges)) if self._note(number).exists()]
        if verify is not None:
            with verify.bar(f"checking {self.work.name}", self.rows(there)) as bar:
                there = [number for number in there if self._is_whole(number, bar.update)]
        return sorted({*range(len(self.ranges))}.difference(there))

    def _is_whole(self, number: int, done: Callable[[int], object]) -> bool:
        done(len(self.ranges[number]))
        try:
            entry = self.note(number)["entry"]
            kinds = [key.removesuffix("_sha256") for key in entry if key.endswith("_sha256")]
            return all(sha256(self.data / entry[kind]) == entry[f"{kind}_sha256"] for kind in kinds)
        except (OSError, ValueError, KeyError):
            return False

    def check_complete(self, verify: Processes | None = None) -> None:
        """Raise OSError if `missing(verify)` finds missing shards. To be called when all processes have made theirs."""
        if missing := self.missing(verify):
            raise OSError(f"shards {missing} of {self.work} are missing: all processes must share this folder")

    @property
    def nbytes(self) -> int:
        """Bytes that all shards take once they are made, estimated as row_bytes for each row."""
        return self.rows(range(len(self.ranges))) * self.row_bytes

    def check_space(self, rows: int, further: int = 0) -> None:
        """Raise OSError unless the disk has room for `rows` more rows and `further` bytes of other files."""
        check_place(self.work, int(1.01 * rows * self.row_bytes) + further)

    def save(self, kind: str, number: int, array: np.ndarray | Stream) -> dict[str, str]:
        """Write one array of a shard to a file. Returns {kind: file name, <kind>_sha256: hash} for the shard's note."""
        path = self.data / self._names.get(kind, f"{kind}-{{}}.npy").format(f"{number:05d}")
        with explain_failure(path), whole_file(path) as partial, partial.open("wb") as file:
            write_array(file, array)
        return {kind: path.name, f"{kind}_sha256": sha256(path)}

    def keep(self, number: int, arrays: Mapping[str, np.ndarray | Stream], **facts: object) -> None:
        """Write a shard and its note, which includes `facts` as JSON. `arrays` maps each kind of array, a name that the
        caller chooses, to an array of n rows, n the same for all; if n is 0, only the note is written. Raises OSError
        if writing fails; the shard is then still missing."""
        entry: dict[str, object] = {"count": next(iter(arrays.values())).shape[0]}
        for kind, array in arrays.items() if entry["count"] else ():
            entry |= self.save(kind, number, array)
        with explain_failure(self.done):
            sync(self.data)  # the files must be on disk before the note is
            write_whole(self._note(number), json.dumps({"entry": entry, **facts}) + "\n")

    def forget(self, which: Callable[[dict], bool]) -> None:
        """Mark as missing the shards for which which(note) is true; the notes themselves are kept as .json.old."""
        for file in self.done.glob("[0-9]*.json"):
            if which(json.loads(file.read_text())):
                file.replace(file.with_suffix(".json.old"))

    def share(
        self,
        processes: Processes,
        what: str,
        make: Callable[[list[int], Callable[[int], object]], None],
        unit: str = "image",
        verify: bool = False,
    ) -> None:
        """Make this process's part of the missing shards, and wait for the other processes, which must call this too.

        what    the progress bar's title.
        make    function of the numbers of the shards to make and a callback for the number of rows just finished.
        unit    what a row is, for the bar.
        verify  also make those shards again whose files have changed.
        """
        missing = processes.from_main(lambda: self.missing(processes if verify else None))
        work = f"{len(missing)} of {len(self.ranges)} shards, {processes.count} processes on {processes.device}"
        processes.say(f"  work      {work}")
        mine = missing[processes.rank :: processes.count]
        with processes.bar(what, self.rows(mine), unit) as bar:
            make(mine, bar.update)
        processes.wait()

    def arrays(self, kind: str) -> Iterator[np.ndarray]:
        """Yield the arrays of one kind, memory-mapped, shard by shard; shards without rows are left out."""
        for entry in (self.note(number)["entry"] for number in range(len(self.ranges))):
            if entry["count"]:
                yield np.load(self.data / entry[kind], mmap_mode="r", allow_pickle=False)

    def whole(self, kind: str) -> np.ndarray:
        """Return the arrays of one kind, concatenated."""
        return np.concatenate(list(self.arrays(kind)))

    def first(self, kind: str, count: int) -> np.ndarray:
        """Return the first rows of `kind`, at most `count`, from the first ⌈count / shard size⌉ non-empty shards."""
        shards = math.ceil(count / len(self.ranges[0]))
        return np.concatenate(list(itertools.islice(self.arrays(kind), shards)))[:count]

    def remove(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)


def differences(there: Mapping, here: Mapping) -> str:
    """Return a line per key whose value (None if missing) differs between `there`, a plan on disk, and `here`, ours."""
    keys = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    return "\n".join(f"  {key}: {str(there.get(key))[:80]} there, {str(here.get(key))[:80]} here" for key in keys)
