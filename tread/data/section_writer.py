"""Writes encoded text or features into a dataset's folder, and a section (a dict) about them into its index.json.

    <dataset>/.<stem>.unfinished/    unfinished shards, see store.py; <stem> is "features" or "text-<encoder>"

When all are done, they move into the dataset's folder, and index.json lists them. Until then the dataset is unchanged.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from tread.data.columns import FeatureSpec, TextSpec, latents_hash, open_features, open_text
from tread.data.index import explain_damage, index_lock, read_index
from tread.data.shards import Stream
from tread.data.store import ShardStore, differences, pieces_of
from tread.models.conditions import Text, join
from tread.runtime.distributed import Processes
from tread.runtime.files import explain_failure, plain_name, sync, write_json

SHARD = 1 << 28  # approximate bytes of a shard of text
Encode = Callable[[Sequence[range]], Iterator]  # batches of rows → for each, a part for SectionWriter.write


class SectionWriter(ShardStore, ABC):
    """Writes the files of one section of index.json in shards.

    folder     the folder of a finished dataset, or the attribute `data` of a DatasetWriter after its `assemble`.
    place      the keys in index.json that lead to the section: ("text", encoder) or ("features",).
    stem       the first part of the files' names.
    facts      the section's entries except those about its files, as JSON; other facts make it a different section.
    ranges     the rows of each shard.
    row_bytes  bytes of a row, to check the free disk space.
    """

    def __init__(
        self, folder: Path, place: Sequence[str], stem: str, facts: Mapping, ranges: Sequence[range], row_bytes: int
    ) -> None:
        self.folder, self._place, self._what = Path(folder), place, " of ".join(place)
        names = {"file": f"{stem}-{{}}.npy", "counts": f"{stem}-counts.npy"}
        names |= {kind: f"{stem}-{{}}.{kind}.npy" for kind in ("lengths", "pooled")}
        super().__init__(self.folder / f".{stem}.unfinished", facts, ranges, names, row_bytes)

    @abstractmethod
    def open(self, index: dict, full: bool) -> object:
        """Check this section's files, listed in `index`, a parsed index.json, by open_text or open_features (see there
        for `full`), and return what that function returns. Raises ValueError or OSError if files are damaged."""

    @abstractmethod
    def shards(self, entries: list[dict]) -> dict:
        """Return the section's entries about files: "shards" and, for text, "null" (the empty caption's entry) and
        the file "counts", written here, with its hash. `entries`: per shard {"count": rows, "file": name, …}."""

    @abstractmethod
    def write(self, number: int, parts: Iterable) -> None:
        """Write shard `number`, whose rows come in parts (Text or pairs of arrays, depending on the subclass)."""

    def _around(self, index: dict) -> tuple[dict, str]:
        """Return the dict around this section in `index`, a parsed index.json (added if missing), and its key."""
        for key in self._place[:-1]:
            index = index.setdefault(key, {})
        return index, self._place[-1]

    def is_finished(self, again: bool = False) -> bool:
        """Return whether index.json has this section already; if so, remove unfinished work. If the section is damaged
        or has other `facts`, raise ValueError or OSError; with `again`, which also checks hashes, return False."""
        index = read_index(self.folder)
        around, key = self._around(index)
        if (section := around.get(key)) is None:
            return False
        differ = differences({name: section.get(name) for name in self.plan}, self.plan)
        try:
            if differ:
                raise ValueError(f"{self.folder} holds other {self._what}: again=true replaces it\n{differ}")
            with explain_damage(self.folder / "index.json"):
                self.open(index, again)
        except (ValueError, OSError):
            if not again:
                raise
            return False
        self.remove()  # left by a process that was killed in `publish`
        return True

    def make(
        self, processes: Processes, again: bool, lines: Iterable[str], unit: str, batch_size: int, encode: Encode
    ) -> bool:
        """Make the section's missing shards together with the other processes, call `publish`, and return True. If
        index.json has the same section already, do nothing and return False. Raises ValueError or OSError if an
        existing section is different or damaged (unless `again`), FileExistsError if another launch is making it.

        again   replace a different or damaged section, and discard unfinished shards of another plan (see store.py).
        lines   lines of text that describe the work, printed before it starts.
        unit    name of a row in the progress bar; batch_size rows are encoded at a time.
        encode  function: list of batches (ranges of row numbers) → iterator with a part for `write` for each batch.
        """
        if processes.from_main(lambda: self.is_finished(again)):
            processes.say(f"{self.folder} holds the same {self._what} already")
            return False
        with processes.lock(self.work / "lock", f"another process is making {self._what} in {self.folder}"):
            processes.from_main(lambda: self.begin(again))
            for line in lines:
                processes.say(line)
            processes.from_main(lambda: self.check_space(self.rows(self.missing())))
            self.share(processes, self._what, partial(self.encode, batch_size, encode), unit)
            processes.from_main(self.publish)
        return True

    def encode(
        self, batch_size: int, encode: Encode, numbers: Iterable[int], done: Callable[[int], object] = lambda rows: None
    ) -> None:
        """Encode and write the shards `numbers`; no batch crosses shards. Calls `done` with each batch's row count."""
        batches = [pieces_of(self.ranges[number], batch_size) for number in numbers]
        coming = encode(list(itertools.chain(*batches)))

        def parts(shard: list[range]) -> Iterator:
            for rows, part in zip(shard, coming):
                yield part
                done(len(rows))

        for number, shard in zip(numbers, batches):
            self.write(number, parts(shard))

    def publish(self) -> None:
        """Move all shards to the dataset and its index.json, replacing an older section. OSError if one is missing."""
        self.check_complete()
        section = self.plan | self.shards([note["entry"] for note in self.notes()])
        path = self.folder / "index.json"
        with index_lock(self.folder):
            index = read_index(self.folder)
            around, key = self._around(index)
            with explain_failure(path):
                if before := around.pop(key, None):
                    write_json(path, index)  # without the section while its files change
                    for name in section_files(before):
                        (self.folder / plain_name(name, path)).unlink(missing_ok=True)
                for name in section_files(section):
                    if (self.data / name).exists():  # else it was moved before an interruption
                        (self.data / name).rename(self.folder / name)
                sync(self.folder)
                around[key] = section
                write_json(path, index)
        self.remove()


def section_files(section: dict) -> list[str]:
    """Return the names of all files that a section of index.json names."""
    entries = [{"file": section.get("counts")}, *section.get("shards", ()), section.get("null", {})]
    return [entry[kind] for entry in entries for kind in ("file", "lengths", "pooled") if entry.get(kind)]


class TextWriter(SectionWriter):
    """Writes a dataset's captions, encoded by one encoder. The last shard has one row, the empty caption.

    counts      (n,) number of captions of each of the dataset's n samples. ValueError for another n, or a count of 0.
    shard_size  captions in a shard; None: as many as fit into 256 MiB. After a stop, unfinished shards are made anew.
    """

    def __init__(self, folder: Path, spec: TextSpec, counts: Sequence[int], shard_size: int | None = None) -> None:
        self.spec, self.counts = spec, np.asarray(counts, dtype=np.int32)
        index = read_index(folder)
        if len(self.counts) != index["count"] or self.counts.min() < 1:
            raise ValueError(f"{folder} holds {index['count']:,} samples, each needing a count of captions above 0")
        total, size = int(self.counts.sum()), shard_size or max(1, SHARD // spec.caption_bytes)
        of = {"captions_sha256": index.get("captions", {}).get("sha256"), "of": latents_hash(index), "captions": total}
        ranges = [*pieces_of(range(total), size), range(total, total + 1)]
        super().__init__(folder, ("text", spec.encoder), spec.stem, asdict(spec) | of, ranges, spec.caption_bytes)

    def open(self, index: dict, full: bool) -> object:
        return open_text(self.folder, index, self.spec.encoder, full)

    def shards(self, entries: list[dict]) -> dict:
        return {**self.save("counts", 0, self.counts), "shards": entries[:-1], "null": entries[-1]}

    def write(self, number: int, parts: Iterable[Text]) -> None:
        """Write a shard from parts of its text. Raises ValueError unless they fit `spec` and are finite in float16."""
        spec, count, where = self.spec, len(self.ranges[number]), f"shard {number} of text"
        text = join(*parts)
        mask = text.mask.cpu().numpy()
        lengths = mask.sum(axis=1).astype(np.int32)
        if not np.array_equal(mask, np.arange(mask.shape[1]) < lengths[:, None]) or not lengths.min():
            raise ValueError(f"{where} must begin with its words, at least one, and end with its padding")
        tokens = text.tokens.int() if spec.width is None else text.tokens.half()
        arrays = {"file": tokens.cpu().numpy(), "lengths": lengths}
        expected = {"file": (count, *spec.token_shape), "lengths": (count,)}
        if text.pooled is not None:
            arrays["pooled"] = text.pooled.half().cpu().numpy()
        if spec.pooled is not None:
            expected["pooled"] = (count, spec.pooled)
        if (shapes := {kind: array.shape for kind, array in arrays.items()}) != expected:
            raise ValueError(f"{where} has arrays of {shapes}, but must have {expected}")
        if not all(np.isfinite(array).all() for array in arrays.values()):
            broken = f"they are too large for it, or the weights of {spec.encoder} are broken"
            raise ValueError(f"{where} holds numbers that are not finite in float16: {broken}")
        self.keep(number, arrays)


class FeatureWriter(SectionWriter):
    """Writes a dataset's features; `spec` states their encoder and shape, and its `pooled` must not be None."""

    def __init__(self, folder: Path, spec: FeatureSpec) -> None:
        index = read_index(folder)
        self.spec, self.row_shape = spec, (index["views"], spec.grid**2, spec.width)
        self.pooled_shape = (index["views"], spec.pooled)
        counts = [shard["count"] for shard in index["shards"]]
        ranges = [range(end - count, end) for count, end in zip(counts, itertools.accumulate(counts))]
        row_bytes = 2 * (math.prod(self.row_shape) + math.prod(self.pooled_shape))
        super().__init__(folder, ("features",), "features", asdict(spec), ranges, row_bytes)

    def open(self, index: dict, full: bool) -> object:
        open_features(self.folder, index, self.spec.encoder, full, self.spec.pooled)
        return open_features(self.folder, index, self.spec.encoder, full)

    def shards(self, entries: list[dict]) -> dict:
        keys = ("file", "pooled", "pooled_sha256")
        return {"shards": [{"sha256": entry["file_sha256"]} | {key: entry[key] for key in keys} for entry in entries]}

    def write(self, number: int, parts: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
        """Write shard `number` from parts. Each part is a pair of float16 arrays for n samples in 1 view (plain) or 2
        (plain, flipped): patch features (n, views, T tokens, z channels), which are written part by part, and feature
        vectors of whole pictures (n, views, P), which are kept in memory until all parts have come."""
        count, whole = len(self.ranges[number]), []

        def features() -> Iterator[np.ndarray]:
            for part, pooled in parts:
                whole.append(pooled)
                yield part

        file = Stream("float16", (count, *self.row_shape), features())
        self.keep(number, {"file": file, "pooled": Stream("float16", (count, *self.pooled_shape), whole)})
