"""Writing what a text encoder made of a dataset's captions, shard by shard, so that stopped work goes on where it was.

    <dataset>/.text-words.unfinished/    in the dataset's folder
        plan.json                        which encoder, of which captions; work with another plan is refused
        text-words-00000.npy …           a shard, see columns.py
        00000.json, null.json            written last of a shard, and of the empty caption: it is whole

Shards may be written in any order and by several processes. When all are there they go beside the latents, and
index.json names them: until then the dataset is as it was.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from tread.data.columns import TextSpec, latents_hash, open_text
from tread.data.shards import write_array
from tread.models.conditions import Text
from tread.runtime.files import (
    Lock,
    explain_failure,
    free_bytes,
    plain_name,
    sha256,
    size_text,
    sync,
    whole_file,
    write_whole,
)

SHARD = 1 << 28  # bytes of a shard, about


class TextWriter:
    """An encoder's text of a dataset in the making.

    folder      of the dataset: one that is finished, or that its writer has just assembled (writer.data).
    spec        the encoder, and the shape of what it makes.
    counts      (samples,) how many captions each sample has, at least one.
    shard_size  captions in a shard, the unit of resuming; None: as many as take 256 MB.

    Of several processes that write shards, one begins and publishes the work.
    """

    def __init__(self, folder: Path, spec: TextSpec, counts: Sequence[int], shard_size: int | None = None) -> None:
        self.folder, self.spec = Path(folder), spec
        self.counts = np.asarray(counts, dtype=np.int32)
        self.work = self.folder / f".{spec.stem}.unfinished"
        index = self._index()
        if len(self.counts) != index["count"] or (len(self.counts) and self.counts.min() < 1):
            raise ValueError(
                f"{folder} holds {index['count']:,} samples, each of which needs a count of captions above 0"
            )
        self.total = int(self.counts.sum())
        self.shard_size = shard_size or max(1, SHARD // spec.caption_bytes)
        captions = index.get("captions")
        self._of = {"captions_sha256": captions and captions["sha256"], "of": latents_hash(index)}
        self._plan = json.loads(json.dumps({**asdict(spec), **self._of, "counts": self.counts.tolist()}))
        self._plan["shard_size"] = self.shard_size
        self._lock: Lock | None = None

    def _index(self) -> dict:
        return json.loads((self.folder / "index.json").read_text())

    @property
    def shards(self) -> int:
        """How many there are to be."""
        return -(-self.total // self.shard_size)

    def range_of(self, number: int) -> range:
        """The captions of a shard."""
        return range(number * self.shard_size, min((number + 1) * self.shard_size, self.total))

    def is_finished(self, again: bool = False) -> bool:
        """Whether the dataset holds this text already. Raises ValueError for damaged or other one, unless again."""
        index = self._index()
        section = index.get("text", {}).get(self.spec.encoder)
        if section is None:
            return False
        ours = json.loads(json.dumps({**asdict(self.spec), **self._of, "captions": self.total}))
        if {key: section.get(key) for key in ours} == ours:
            try:
                open_text(self.folder, index, self.spec.encoder, full=again)
            except (ValueError, OSError):
                if not again:
                    raise
                return False
            shutil.rmtree(self.work, ignore_errors=True)  # a process may have been killed just then
            return True
        if not again:
            differing = ", ".join(key for key in ours if section.get(key) != ours[key])
            raise ValueError(
                f"{self.folder} holds other text of {self.spec.encoder} (they differ in {differing}): again=true "
                "replaces it"
            )
        return False

    def begin(self, again: bool = False) -> None:
        """Get ready to write shards, or to go on with those that are there.

        again  begin anew where other text is unfinished.

        Raises ValueError where other text is, FileExistsError where another process writes it.
        """
        with explain_failure(self.work):
            self.work.mkdir(exist_ok=True)
        self._lock = Lock(self.work / "lock", f"another process is making text of {self.folder}")
        path = self.work / "plan.json"
        before = json.loads(path.read_text()) if path.exists() else self._plan
        if before != self._plan and not again:
            self.release()
            differing = ", ".join(key for key in self._plan if before.get(key) != self._plan[key])
            raise ValueError(
                f"{self.work} holds unfinished work of another kind (they differ in {differing}): go on with it as it "
                "was begun, or begin anew by again=true"
            )
        stale = [*self.work.glob(".*.partial")]
        if before != self._plan:
            stale = [file for file in self.work.iterdir() if file.name != "lock"]
        with explain_failure(path):
            for file in stale:
                file.unlink()
            write_whole(path, json.dumps(self._plan) + "\n")

    def _note(self, name: str) -> Path:
        return self.work / f"{name}.json"

    def missing(self) -> list[int]:
        """The shards that are still to be written."""
        return [number for number in range(self.shards) if not self._note(f"{number:05d}").exists()]

    def bytes_of(self, numbers: Sequence[int]) -> int:
        """Size of some shards."""
        return sum(len(self.range_of(number)) for number in numbers) * self.spec.caption_bytes

    def check_space(self, missing: Sequence[int]) -> None:
        """Raise OSError unless the disk can take the shards that are missing."""
        needed, free = self.bytes_of(missing), free_bytes(self.work)
        if needed > free:
            raise OSError(f"the text takes {size_text(needed)}, but {self.work} has {size_text(free)} free")

    def write(self, number: int, text: Text) -> None:
        """Write a shard: what the encoder made of the captions in `range_of(number)`.

        Raises ValueError for text that is not what `spec` says, or not finite in float16.
        """
        self._write(f"{number:05d}", len(self.range_of(number)), text)

    def write_null(self, text: Text) -> None:
        """Write the empty caption's own encoding, one row."""
        self._write("null", 1, text)

    def _write(self, name: str, count: int, text: Text) -> None:
        arrays = {key: array for key, array in self._arrays(name, count, text).items() if array is not None}
        note: dict[str, object] = {"count": count}
        for key, array in arrays.items():
            path = self.work / f"{self.spec.stem}-{name}{'' if key == 'file' else f'.{key}'}.npy"
            self._array(path, array)
            note |= {key: path.name, f"{key}_sha256": sha256(path)}
        with explain_failure(self.work):
            sync(self.work)  # the shard's name is on the disk before it is said to be done
            write_whole(self._note(name), json.dumps(note) + "\n")

    def _array(self, path: Path, array: np.ndarray) -> None:
        with explain_failure(path), whole_file(path) as partial, partial.open("wb") as file:
            write_array(file, array)

    def _arrays(self, name: str, count: int, text: Text) -> dict[str, np.ndarray | None]:
        """File kind → what is stored of a text."""
        spec = self.spec
        mask = text.mask.cpu().numpy()
        lengths = mask.sum(axis=1).astype(np.int32)
        if not np.array_equal(mask, np.arange(mask.shape[1]) < lengths[:, None]) or (
            len(lengths) and not lengths.min()
        ):
            raise ValueError(f"text {name} must begin with its words, at least one, and end with its padding")
        tokens, pooled = text.tokens.cpu(), None if text.pooled is None else text.pooled.half().cpu().numpy()
        tokens = (tokens.int() if spec.width is None else tokens.half()).numpy()
        shapes, expected = (tokens.shape, pooled is not None and pooled.shape), (count, *spec.token_shape)
        if shapes != (expected, spec.pooled is not None and (count, spec.pooled)):
            raise ValueError(
                f"text {name} has tokens {shapes[0]} and pooled {shapes[1] or 'none'}, but must have {expected} and "
                f"{(count, spec.pooled) if spec.pooled else 'none'}"
            )
        if spec.width is not None and not (np.isfinite(tokens).all() and (pooled is None or np.isfinite(pooled).all())):
            raise ValueError(
                f"text {name} holds numbers that are not finite in float16: they are too large for it, or the weights "
                f"of {spec.encoder} are broken"
            )
        return {"file": tokens, "lengths": lengths, "pooled": pooled}

    def publish(self) -> None:
        """Put all shards beside the latents, in the place of the encoder's older ones, and let index.json name them.

        Raises OSError if some are missing.
        """
        if lacking := self.missing() + [name for name in ("null",) if not self._note(name).exists()]:
            raise OSError(f"shards {lacking} of {self.work} are missing: all processes must share {self.folder}")
        names = [*(f"{number:05d}" for number in range(self.shards)), "null"]
        *shards, null = (json.loads(self._note(name).read_text()) for name in names)
        counts = self.work / f"{self.spec.stem}-counts.npy"
        self._array(counts, self.counts)
        path = self.folder / "index.json"
        index = self._index()
        sections = dict(index.get("text", {}))
        with explain_failure(path):
            if before := sections.pop(self.spec.encoder, None):
                write_whole(
                    path, json.dumps({**index, "text": sections}, indent=1) + "\n"
                )  # names none while files change
                for name in section_files(before):
                    (self.folder / plain_name(name, path)).unlink(missing_ok=True)
            section = {**asdict(self.spec), **self._of, "captions": self.total}
            section |= {"counts": counts.name, "counts_sha256": sha256(counts), "shards": shards, "null": null}
            for name in section_files(section):
                if (self.work / name).exists():  # else a process was killed behind it
                    (self.work / name).rename(self.folder / name)
            sync(self.folder)
            write_whole(path, json.dumps({**index, "text": {**sections, self.spec.encoder: section}}, indent=1) + "\n")
        shutil.rmtree(self.work, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Let others go on with the work, which stays as it is."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def section_files(section: dict) -> list[str]:
    """The names of all files that a section of index.json's `text` names."""
    entries = [{"counts": section["counts"]}, *section["shards"], section["null"]]
    return [entry[key] for entry in entries for key in ("counts", "file", "lengths", "pooled") if key in entry]
