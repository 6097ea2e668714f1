"""Writing a dataset shard by shard, so that work which was stopped goes on where it was.

    .<name>.unfinished/          beside the dataset that is to be
        plan.json                what the dataset is made of; work with another plan is refused
        done/00000.json          written last of a shard: it is whole
        data/                    becomes the dataset's folder when all shards are done

Shards may be written in any order and by several processes, each its own. The result depends on
the shards' content alone. dataset.py tells the format and reads it.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from tread.data.captions import add_captions
from tread.data.index import VERSION, check_labels
from tread.data.latents import LatentSpec, mean_and_std
from tread.data.section_writer import differences
from tread.data.shards import write_array
from tread.runtime.files import Lock, explain_failure, free_bytes, sha256, size_text, sync, whole_file, write_whole


def _with_later_keys(plan: dict) -> dict:
    """A plan that may be of a time before it said how photos were read."""
    return {"orientation": "stored", "alpha": "drop"} | plan


class DatasetWriter:
    """A dataset in the making.

    folder    where it will be.
    plan      what decides its content, anything JSON can hold: an unfinished dataset made by another
              plan is not continued.
    pictures  (3, H, W) of the uint8 pictures that are kept beside the latents; None: none are.
    besides   what of the plan no shard depends on: a finished dataset must have it, unfinished work may have begun with
              another.

    Of several processes that write shards, one begins and finishes the work.
    """

    def __init__(
        self,
        folder: Path,
        latents: LatentSpec,
        plan: dict,
        pictures: tuple[int, int, int] | None = None,
        besides: dict | None = None,
    ) -> None:
        self.folder, self.latents, self.pictures = Path(folder), latents, pictures
        if self.folder.name in ("", ".."):
            raise ValueError(f"{folder} must be the name of a new folder")
        self.work = self.folder.with_name(f".{self.folder.name}.unfinished")
        self.data, self._done = self.work / "data", self.work / "done"
        kept = {"keep_pictures": True} if pictures else {}  # older plans know no such key
        self._plan = json.loads(json.dumps({**asdict(latents), **plan, **kept}))
        self._besides = dict(besides or {})

    def is_finished(self) -> bool:
        """Whether the dataset is there already, made by the same plan; then what is left of the work on it goes."""
        made, expected = self.folder / "report.json", self._plan | self._besides
        finished = made.is_file() and _with_later_keys(json.loads(made.read_text()).get("plan", {})) == expected
        if finished:  # a process may have been killed just then
            shutil.rmtree(self.work, ignore_errors=True)
        return finished

    def has_any(self) -> bool:
        """Whether a shard is there."""
        return any(self._done.glob("[0-9]*.json"))

    def begin(self, anew: bool, **begun: object) -> None:
        """Make the place where shards are written, or go on with what is there.

        anew   begin anew where the work that is there has another plan; else it is refused.
        begun  what of the plan was otherwise when that work was begun.

        Raises FileExistsError if the folder is there already or another process writes to it, and
        ValueError if unfinished work has another plan.
        """
        self.check_free()
        for folder in (self.data, self._done):
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = Lock(self.work / "lock", f"another process is writing {self.folder}")
        self.check_free()  # from now on it stays so
        for partial in (*self.data.glob(".*.partial"), *self._done.glob(".*.partial")):
            partial.unlink()  # of a process that was killed
        path = self.work / "plan.json"
        plan = {**self._plan, **begun}
        before = _with_later_keys(json.loads(path.read_text())) if path.exists() else self._plan
        if before != plan and anew:
            for leftover in (self.data, self._done, self.work / "damaged"):
                shutil.rmtree(leftover, ignore_errors=True)
            self.data.mkdir()
            self._done.mkdir()
            before = plan = self._plan
        if before != plan:
            self._lock.release()
            raise ValueError(
                f"{self.work} holds unfinished work of another kind; continue it as it was begun, "
                f"or remove it to start anew\n{differences(before, self._plan)}"
            )
        with explain_failure(path):
            write_whole(path, json.dumps(plan, indent=1) + "\n")

    def check_free(self) -> None:
        """Raise FileExistsError if the folder is there already."""
        if self.folder.exists():
            raise FileExistsError(f"{self.folder} exists already; remove it or choose another folder")

    def missing(self, shards: int) -> list[int]:
        """The shards among 0..shards−1 that are still to be written."""
        return [number for number in range(shards) if not self.has(number)]

    def has(self, number: int) -> bool:
        """Whether a shard is there."""
        return self._note(number).exists()

    def _note(self, number: int) -> Path:
        return self._done / f"{number:05d}.json"

    @property
    def picture_bytes(self) -> int:
        """Size of a sample's picture, where pictures are kept; else 0."""
        return math.prod(self.pictures) if self.pictures else 0

    def check_space(self, samples: int, further_bytes: int = 0) -> None:
        """Raise OSError unless the disk can take this many samples more, and further_bytes of other files."""
        each = self.latents.sample_bytes + self.picture_bytes + 8
        needed, free = int(1.01 * samples * each) + further_bytes, free_bytes(self.work)
        if needed > free:
            raise OSError(f"{samples:,} samples take {size_text(needed)}, but {self.work} has {size_text(free)} free")

    def write(
        self, number: int, stored: np.ndarray, labels: np.ndarray, pictures: np.ndarray | None = None, **note: object
    ) -> None:
        """Write a shard: stored (n, *latents.stored_shape), labels (n,), pictures (n, 3, H, W) uint8; n may be 0.

        note is kept for `assemble`, anything JSON can hold. Raises ValueError for a shard that is not
        what `latents` says, OSError if the disk is full; then no shard of this number is there.
        """
        expected = (len(labels), *self.latents.stored_shape)
        if stored.shape != expected:
            raise ValueError(f"shard {number} has shape {stored.shape}, but must have {expected}")
        kept = self.pictures and (len(labels), *self.pictures)
        if kept != (None if pictures is None else pictures.shape) or (kept and pictures.dtype != np.uint8):
            given = "none" if pictures is None else f"{pictures.dtype} {pictures.shape}"
            raise ValueError(f"shard {number} has pictures {given}, but must have uint8 {kept}")
        check_labels(labels, len(self.latents.classes), f"shard {number}")
        with np.errstate(over="ignore"):
            stored = stored.astype(self.latents.dtype)
        if not np.isfinite(stored).all():
            raise ValueError(
                f"shard {number} holds numbers that are not finite in {self.latents.dtype}: they are too large for it "
                "(dtype=float32), or were not finite before (an autoencoder in low precision: precision=fp32)"
            )
        files = {"file": (f"shard-{number:05d}.npy", stored), "labels": (f"shard-{number:05d}.labels.npy", labels)}
        if pictures is not None:
            files["pictures"] = (f"pictures-{number:05d}.npy", pictures)
        entry = {"count": len(labels)}
        for key, (name, array) in files.items() if len(labels) else ():
            path = self.data / name
            with explain_failure(path), whole_file(path) as partial, partial.open("wb") as file:
                write_array(file, array.astype(np.int64) if key == "labels" else array)
            entry[key], entry[f"{key}_sha256"] = name, sha256(path)
        done = {
            "entry": entry,
            "class_counts": np.bincount(labels, minlength=len(self.latents.classes)).tolist(),
            "sums": [part.tolist() for part in channel_sums(stored, self.latents)],
            "note": note,
        }
        with explain_failure(self._done):
            sync(self.data)  # the shard's name is on the disk before it is said to be done
            write_whole(self._note(number), json.dumps(done) + "\n")

    def forget(self, numbers: Iterable[int]) -> None:
        """Have shards made again."""
        for number in numbers:
            self._note(number).unlink()

    def notes(self, shards: int) -> list[dict]:
        """What was noted of each shard."""
        return [json.loads(self._note(number).read_text())["note"] for number in range(shards)]

    def assemble(self, shards: int, **fields: object) -> None:
        """Write index.json into `data`, once all shards are there.

        fields  what else index.json is to say: where the dataset is that belongs to this one (heldout, train), or by
                which mean and std each channel is to be normalised, where not by measured ones (normalize_by).

        Raises ValueError if the dataset would be empty.
        """
        done = [json.loads(self._note(number).read_text()) for number in range(shards)]
        if not any(shard["entry"]["count"] for shard in done):
            raise ValueError(f"{self.folder} would hold no sample")
        counts = np.sum([shard["class_counts"] for shard in done], axis=0)
        numbers, sums, squares = (np.sum([shard["sums"][i] for shard in done], axis=0) for i in range(3))
        mean = sums / numbers
        index = {
            "version": VERSION,
            **asdict(self.latents),
            "count": int(counts.sum()),
            "class_counts": counts.tolist(),
            "channel_mean": mean.tolist(),
            "channel_std": np.sqrt(np.maximum(squares / numbers - mean**2, 0)).tolist(),
            **fields,
            **({"pictures": list(self.pictures)} if self.pictures else {}),
            "shards": [shard["entry"] for shard in done if shard["entry"]["count"]],
        }
        with explain_failure(self.data / "index.json"):
            write_whole(self.data / "index.json", json.dumps(index, indent=1) + "\n")

    def publish(self, report: dict | None = None) -> None:
        """Give the assembled dataset its name and forget the work.

        report  what a report.json is to say beside the plan; by it `is_finished` knows the dataset again.
        """
        if report is not None:
            path = self.data / "report.json"
            with explain_failure(path):
                write_whole(path, json.dumps(report | {"plan": self._plan | self._besides}, indent=1) + "\n")
        sync(self.data)
        self.data.rename(self.folder)
        sync(self.folder.parent)
        self.discard()

    def discard(self) -> None:
        """Remove the unfinished work."""
        shutil.rmtree(self.work, ignore_errors=True)
        self._lock.release()


def write_dataset(
    folder: Path, latents: LatentSpec, shards: Iterable[tuple[np.ndarray, np.ndarray]], **fields: object
) -> None:
    """Write a dataset in one go; the folder appears under its name only when it is whole.

    shards yields (stored (n, *latents.stored_shape), labels (n,)); fields are what else index.json is to say. Raises
    FileExistsError if the folder is there already, ValueError for a shard that is not what `latents` says.
    """
    writer = DatasetWriter(folder, latents, plan={})
    writer.begin(anew=not writer.has_any())
    try:
        count = 0
        for stored, labels in shards:
            writer.write(count, stored, labels)
            count += 1
        writer.assemble(count, **fields)
        writer.publish()
    except BaseException:
        writer.discard()
        raise


def write_once(
    folder: Path, latents: LatentSpec, stored: np.ndarray, labels: np.ndarray, captions: Sequence = (), **fields: object
) -> None:
    """As write_dataset, of one shard, with captions if there are any, and by several processes at once.

    Each writes its own copy, and the first one done gives it the name.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as place:
        copy = Path(place) / folder.name
        write_dataset(copy, latents, [(stored, labels)], **fields)
        if captions:
            add_captions(copy, captions)
        try:
            copy.rename(folder)
        except OSError:
            if not folder.exists():
                raise


def channel_sums(stored: np.ndarray, latents: LatentSpec) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Count (0-d), sums and sums of squares (C,) of network latents, float64, before any normalisation.

    stored is (n, views, C or 2C, S, S). Moments count as the samples that are drawn from them:
    E[x²] = mean² + std².
    """
    channels = latents.shape[0]
    total, squares = np.zeros(channels), np.zeros(channels)
    for part in torch.from_numpy(stored).split(256):
        mean, std = mean_and_std(part, latents)
        total += mean.double().sum(dim=(0, 1, 3, 4)).numpy()
        square = mean.double().square() + (0.0 if std is None else std.double().square())
        squares += square.sum(dim=(0, 1, 3, 4)).numpy()
    return np.array(float(stored.size // stored.shape[2])), total, squares
