"""Writes datasets of latents; dataset.py describes the format and reads it.

.<name>.unfinished/    unfinished shards, next to the future dataset's folder, see store.py
    data/              becomes the dataset's folder when all shards are done
"""

import json
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from tread.data.captions import add_captions
from tread.data.index import VERSION, check_labels
from tread.data.latents import LatentSpec, mean_and_std
from tread.data.store import ShardStore, differences
from tread.runtime.files import Lock, sync, write_json

EARLIER = {"orientation": "stored", "alpha": "drop"}  # how photos were read if an old plan does not say


class DatasetWriter(ShardStore):
    """Writes a dataset in shards; the work may be interrupted and continued.

    folder    the folder of the future dataset; ValueError if it has no name, such as "..".
    plan      what determines the shards, as JSON; unfinished work is continued only if its plan is the same.
    pictures  (3, H, W) of the uint8 pictures stored with the latents; None: no pictures are kept.
    besides   further settings, which change no shard; unlike `plan`, they may change while the dataset is unfinished.
    ranges    the rows of each shard; may be set later.
    """

    def __init__(
        self,
        folder: Path,
        latents: LatentSpec,
        plan: Mapping,
        pictures: tuple[int, int, int] | None = None,
        besides: Mapping | None = None,
        ranges: Sequence = (),
    ) -> None:
        self.folder, self.latents, self.pictures = Path(folder), latents, pictures
        if self.folder.name in ("", ".."):
            raise ValueError(f"{folder} must be the name of a new folder")
        self.picture_bytes = math.prod(pictures) if pictures else 0
        super().__init__(
            self.folder.with_name(f".{self.folder.name}.unfinished"),
            {**asdict(latents), **plan, **({"keep_pictures": True} if pictures else {})},  # older plans lack the key
            ranges,
            {"file": "shard-{}.npy", "labels": "shard-{}.labels.npy", "pictures": "pictures-{}.npy"},
            latents.sample_bytes + self.picture_bytes + 8,
        )
        self._report_plan = self.plan | json.loads(json.dumps(besides or {}))

    def is_finished(self) -> bool:
        """Return whether the dataset exists and has this plan and these `besides`; if so, remove unfinished work."""
        made = self._made()
        finished = bool(made) and EARLIER | made.get("plan", {}) == self._report_plan
        if finished:  # a process may have been killed in `publish`
            self.remove()
        return finished

    def begin(self, again: bool = False, begun: Mapping | None = None) -> None:
        """Lock the work folder until `publish` or `discard`, and begin or continue the work in it. If it holds finished
        shards of another plan, raises ValueError or, with `again`, discards them; `begun`: see ShardStore.begin. Raises
        FileExistsError if the dataset exists or another process is writing it."""
        self.check_free()
        self._lock = Lock(self.work / "lock", f"another process is writing {self.folder}")
        self.check_free()  # once more: another process may have made it before the lock
        try:
            super().begin(again, begun)
        except (OSError, ValueError):
            self._lock.release()
            raise

    def check_free(self) -> None:
        """Raise FileExistsError if the folder exists; the message says how its dataset's plan differs from this one."""
        if self.folder.exists():
            made = self._made()
            left_out = len(made.get("left_out", ()))
            skipped = f", made with on_error=skip, which left out {left_out:,} files" if left_out else ""
            differ = "\n" + differences(EARLIER | made.get("plan", {}), self._report_plan) if made else ""
            raise FileExistsError(f"{self.folder} exists already{skipped}; remove it or choose another folder{differ}")

    def _made(self) -> dict:
        report = self.folder / "report.json"
        return json.loads(report.read_text()) if report.is_file() else {}

    def write(
        self, number: int, stored: np.ndarray, labels: np.ndarray, pictures: np.ndarray | None = None, **facts: object
    ) -> None:
        """Write a shard: stored (n, *latents.stored_shape), labels (n,), pictures (n, 3, H, W) uint8 if they are
        kept; n may be 0. `facts` are added to the shard's note (see ShardStore.note). Raises ValueError if the shard
        does not match `latents` or is not finite in its dtype, OSError if writing fails; the shard is missing then."""
        expected = (len(labels), *self.latents.stored_shape)
        if stored.shape != expected:
            raise ValueError(f"shard {number} has shape {stored.shape}, but must have {expected}")
        check_labels(labels, len(self.latents.classes), f"shard {number}")
        if self.latents.dtype == "uint8" and stored.dtype != np.uint8:
            raise ValueError(f"shard {number} is {stored.dtype}, but dtype=uint8 stores pixels of 0 to 255 as they are")
        with np.errstate(over="ignore"):
            stored = stored.astype(self.latents.dtype, copy=False)
        if not np.isfinite(stored).all():
            said = f"shard {number} holds numbers that are not finite in {self.latents.dtype}"
            raise ValueError(f"{said}: too large for it (try dtype=float32), or broken before (try precision=fp32)")
        arrays = {"file": stored, "labels": labels.astype(np.int64)}
        if self.pictures:
            arrays["pictures"] = pictures
        counts = np.bincount(labels, minlength=len(self.latents.classes)).tolist()
        self.keep(number, arrays, class_counts=counts, sums=channel_sums(stored, self.latents), **facts)

    def assemble(self, **fields: object) -> None:
        """Write index.json into the shards' folder, once all are done. Raises ValueError if the dataset would be empty,
        OSError if shards are missing. `fields` are more entries of index.json, such as the relative path of the
        held-out (`heldout`) or training (`train`) dataset, or `normalize_by`, {"mean", "std"} of the channels."""
        self.check_complete()
        notes = list(self.notes())
        entries = [note["entry"] for note in notes if note["entry"]["count"]]
        if not entries:
            raise ValueError(f"{self.folder} would hold no sample")
        counts = np.sum([note["class_counts"] for note in notes], axis=0)
        numbers, sums, squares = (np.sum([note["sums"][i] for note in notes], axis=0) for i in range(3))
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
            "shards": entries,
        }
        write_json(self.data / "index.json", index)

    def publish(self, report: dict | None = None) -> None:
        """Write report.json (`report` and plan; None: no file), move the data into place, remove the work folder."""
        if report is not None:
            write_json(self.data / "report.json", report | {"plan": self._report_plan})
        sync(self.data)
        self.data.rename(self.folder)
        sync(self.folder.parent)
        self.discard()

    def discard(self) -> None:
        self.remove()
        self._lock.release()


def write_dataset(
    folder: Path,
    latents: LatentSpec,
    shards: Iterable[tuple[np.ndarray, np.ndarray]],
    captions: Sequence = (),
    once: bool = False,
    **fields: object,
) -> None:
    """Write a dataset in one go; its folder appears only when it is complete. Raises FileExistsError if the folder
    exists already (unless `once`), ValueError for a shard that does not match `latents`.

    shards    (stored (n, *latents.stored_shape), labels (n,)) for each shard.
    captions  the captions of each sample; (): none.
    once      True: if the folder exists, or another process makes it meanwhile, keep it and drop this copy.
    fields    more fields of index.json, see DatasetWriter.assemble.
    """
    folder = Path(folder)
    if folder.exists() and not once:
        raise FileExistsError(f"{folder} exists already; remove it or choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as place:
        writer = DatasetWriter(Path(place) / folder.name, latents, plan={})
        writer.begin()
        for number, (stored, labels) in enumerate(shards):
            writer.write(number, stored, labels)
            writer.ranges.append(range(len(labels)))
        writer.assemble(**fields)
        if captions:
            add_captions(writer.data, captions)
        writer.publish()
        try:
            writer.folder.rename(folder)
        except OSError:
            if not (once and folder.exists()):
                raise


def channel_sums(stored: np.ndarray, latents: LatentSpec) -> tuple[float, list[float], list[float]]:
    """Return the number of values per channel, and the channels' sums and sums of squares, of latents on the network's
    scale, (z − shift)·scale. `stored` is (n, views, C, S, S), or 2C for moments, for which E[x²] = mean² + std²."""
    channels = latents.shape[0]
    total, squares = np.zeros(channels), np.zeros(channels)
    for part in torch.from_numpy(stored).split(256):
        mean, std = mean_and_std(part, latents)
        total += mean.double().sum(dim=(0, 1, 3, 4)).numpy()
        square = mean.double().square() + (0.0 if std is None else std.double().square())
        squares += square.sum(dim=(0, 1, 3, 4)).numpy()
    return float(stored.size // stored.shape[2]), total.tolist(), squares.tolist()
