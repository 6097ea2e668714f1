"""Writing what lies beside a dataset's latents, shard by shard, so that stopped work goes on where it was.

    <dataset>/.<stem>.unfinished/    in the dataset's folder
        plan.json                    what is made, and of what; work with another plan is refused
        <stem>-00000.npy …           a shard, see columns.py
        00000.json …                 written last of a shard: it is whole

Shards may be written in any order and by several processes. When all are there they go beside the latents, and a
section of index.json names them: until then the dataset is as it was.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tread.data.index import read_index
from tread.runtime.distributed import Processes
from tread.runtime.files import Lock, explain_failure, free_bytes, plain_name, size_text, sync, write_whole


def differences(there: Mapping, here: Mapping) -> str:
    """What two plans differ in, for people: a line for each key, with both values."""
    keys = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    return "\n".join(f"  {key}: {str(there.get(key))[:80]} there, {str(here.get(key))[:80]} here" for key in keys)


class SectionWriter:
    """A section of a dataset's index.json in the making.

    folder     of the dataset: one that is finished, or that its writer has just assembled (writer.data).
    what       it is, for messages.
    stem       how the names of its files begin.
    place      the keys in index.json that lead to the section.
    facts      what the section says beside its shards, anything JSON can hold; a finished one must have them.
    plan       what decides whether unfinished work is gone on with.
    ranges     the rows of each shard.
    row_bytes  size of a row.
    open       opens what a finished section names, all of it if its argument is true. Raises ValueError or OSError
               for what is damaged.

    Of several processes that write shards, one begins and publishes the work.
    """

    def __init__(
        self,
        folder: Path,
        what: str,
        stem: str,
        place: Sequence[str],
        facts: Mapping,
        plan: Mapping,
        ranges: Sequence[range],
        row_bytes: int,
        open: Callable[[bool], object],
    ) -> None:
        self.folder, self.ranges = Path(folder), ranges
        self.work = self.folder / f".{stem}.unfinished"
        self.names = [f"{number:05d}" for number in range(len(ranges))]
        self._what, self._stem, self._place, self._row_bytes, self._open = what, stem, place, row_bytes, open
        self._facts, self._plan = (json.loads(json.dumps(told)) for told in (facts, plan))
        self._lock: Lock | None = None

    def _around(self, index: dict) -> tuple[dict, str]:
        """The part of a parsed index.json that holds the section, and the section's key in there."""
        for key in self._place[:-1]:
            index = index.setdefault(key, {})
        return index, self._place[-1]

    def is_finished(self, again: bool = False) -> bool:
        """Whether the dataset holds this already. Raises ValueError for what is damaged or other, unless again."""
        around, key = self._around(read_index(self.folder))
        if (section := around.get(key)) is None:
            return False
        there = {name: section.get(name) for name in self._facts}
        if there != self._facts:
            if not again:
                differ = differences(there, self._facts)
                raise ValueError(f"{self.folder} holds other {self._what}: again=true replaces what is there\n{differ}")
            return False
        try:
            self._open(again)
        except (ValueError, OSError):
            if not again:
                raise
            return False
        shutil.rmtree(self.work, ignore_errors=True)  # a process may have been killed just then
        return True

    def begin(self, again: bool = False) -> None:
        """Get ready to write shards, or to go on with those that are there.

        again  begin anew where something else is unfinished.

        Raises ValueError where something else is, FileExistsError where another process writes it.
        """
        with explain_failure(self.work):
            self.work.mkdir(exist_ok=True)
        self._lock = Lock(self.work / "lock", f"another process is making {self._what} in {self.folder}")
        path = self.work / "plan.json"
        before = json.loads(path.read_text()) if path.exists() else self._plan
        if before != self._plan and not again:
            self.release()
            raise ValueError(
                f"{self.work} holds unfinished work of another kind: go on with it as it was begun, or begin anew by "
                f"again=true\n{differences(before, self._plan)}"
            )
        stale = [*self.work.glob(".*.partial")]
        if before != self._plan:
            stale = [file for file in self.work.iterdir() if file.name not in ("lock", path.name)]
        with explain_failure(path):
            for file in stale:
                file.unlink()
            write_whole(path, json.dumps(self._plan) + "\n")

    def _note(self, name: str) -> Path:
        return self.work / f"{name}.json"

    def missing(self) -> list[int]:
        """The shards that are still to be written."""
        return [number for number in range(len(self.ranges)) if not self._note(self.names[number]).exists()]

    def rows(self, numbers: Sequence[int]) -> int:
        """Rows of some shards."""
        return sum(len(self.ranges[number]) for number in numbers)

    @property
    def nbytes(self) -> int:
        """Size of all shards."""
        return self.rows(range(len(self.ranges))) * self._row_bytes

    def check_space(self, missing: Sequence[int]) -> None:
        """Raise OSError unless the disk can take the shards that are missing."""
        if (size := self.rows(missing) * self._row_bytes) > (free := free_bytes(self.work)):
            raise OSError(f"{size_text(size)} of {self._what} are to come, but {self.work} has {size_text(free)} free")

    def note(self, name: str, entry: dict) -> None:
        """Write down that a shard's files are whole: its entry in the section."""
        with explain_failure(self.work):
            sync(self.work)  # the shard's name is on the disk before it is said to be done
            write_whole(self._note(name), json.dumps(entry) + "\n")

    def make(
        self,
        processes: Processes,
        again: bool,
        lines: Iterable[str],
        unit: str,
        write: Callable[[list[int], Callable[[int], object]], None],
    ) -> bool:
        """Do the work that is missing with other processes and publish it; False if all was there.

        again  see `begin`.
        lines  tell people of the work.
        unit   what a row is called.
        write  (numbers of shards, what is to be told of each count of rows) writes this process's share.
        """
        if processes.from_main(lambda: self.is_finished(again)):
            processes.say(f"{self.folder} holds the same {self._what} already")
            return False
        processes.from_main(lambda: self.begin(again))
        try:
            missing = processes.from_main(self.missing)
            for line in lines:
                processes.say(line)
            shards = f"{len(missing)} of {len(self.ranges)} shards"
            processes.say(f"  work      {shards}, {processes.count} processes on {processes.device}")
            processes.from_main(lambda: self.check_space(missing))
            mine = missing[processes.rank :: processes.count]
            with processes.bar(self._what, self.rows(mine), unit) as bar:
                write(mine, bar.update)
            processes.wait()
            processes.from_main(self.publish)
        finally:
            self.release()
        return True

    def publish(self, **facts: object) -> None:
        """Put all shards beside the latents, in the place of older ones, and let index.json name them.

        facts  what else the section says.

        Raises OSError if some are missing.
        """
        if lacking := [name for name in self.names if not self._note(name).exists()]:
            raise OSError(f"shards {lacking} of {self.work} are missing: all processes must share {self.folder}")
        notes = {name: json.loads(self._note(name).read_text()) for name in self.names}
        null = {"null": notes.pop("null")} if "null" in notes else {}
        section = {**self._facts, **facts, "shards": list(notes.values()), **null}
        path, index = self.folder / "index.json", read_index(self.folder)
        around, key = self._around(index)
        with explain_failure(path):
            if before := around.pop(key, None):
                write_whole(path, json.dumps(index, indent=1) + "\n")  # which names none while files change
                for name in section_files(before):
                    (self.folder / plain_name(name, path)).unlink(missing_ok=True)
            for name in section_files(section):
                if (self.work / name).exists():  # else a process was killed behind it
                    (self.work / name).rename(self.folder / name)
            sync(self.folder)
            around[key] = section
            write_whole(path, json.dumps(index, indent=1) + "\n")
        shutil.rmtree(self.work, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Let others go on with the work, which stays as it is."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def section_files(section: dict) -> list[str]:
    """The names of all files that a section of index.json names."""
    entries = [{"file": section.get("counts")}, *section["shards"], section.get("null", {})]
    return [entry[kind] for entry in entries for kind in ("file", "lengths", "pooled") if entry.get(kind)]
