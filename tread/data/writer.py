"""Writing a dataset; dataset.py describes the format and reads it.

.<name>.unfinished/    beside the future dataset: shards in progress, see store.py
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

EARLIER = {"orientation": "stored", "alpha": "drop"}  # of a plan that does not say how photos were read


class DatasetWriter(ShardStore):
    """A dataset in the making.

    folder    where it will be.
    plan      everything that decides its content, as JSON: an unfinished dataset by another plan is not continued.
    pictures  (3, H, W) of the uint8 pictures that are kept beside the latents; None: none are.
    besides   the part of the plan that shards do not depend on: it tells finished datasets apart, but not unfinished
              work.
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
        """Whether the dataset is there already, made by the same plan; leftovers of the work on it are removed."""
        made = self._made()
        finished = bool(made) and EARLIER | made.get("plan", {}) == self._report_plan
        if finished:  # a process may have been killed just then
            self.remove()
        return finished

    def begin(self, again: bool = False, begun: Mapping | None = None) -> None:
        """As ShardStore.begin. Raises FileExistsError if the folder is there already, or another process writes it."""
        self.check_free()
        lock = Lock(self.work / "lock", f"another process is writing {self.folder}")
        self.check_free()  # from now on it stays so
        try:
            super().begin(again, begun)
        except ValueError:
            lock.release()
            raise
        self._lock = lock

    def check_free(self) -> None:
        """Raise FileExistsError, which says how it was made otherwise, if the folder is there already."""
        if self.folder.exists():
            made = self._made()
            left_out = len(made.get("left_out", ()))
            skipped = f", made with on_error=skip, which left out {left_out:,} files" if left_out else ""
            differ = "\n" + differences(EARLIER | made.get("plan", {}), self._report_plan) if made else ""
            raise FileExistsError(f"{self.folder} exists already{skipped}; remove it or choose another folder{differ}")

    def _made(self) -> dict:
        """The report of the dataset that is there already, or {}."""
        report = self.folder / "report.json"
        return json.loads(report.read_text()) if report.is_file() else {}

    def write(
        self, number: int, stored: np.ndarray, labels: np.ndarray, pictures: np.ndarray | None = None, **facts: object
    ) -> None:
        """Write a shard: stored (n, *latents.stored_shape), labels (n,), pictures (n, 3, H, W) uint8; n may be 0.

        facts are noted with it. Raises ValueError if the shard does not match `latents`, OSError if the disk is full;
        either way no shard of this number is left.
        """
        expected = (len(labels), *self.latents.stored_shape)
        if stored.shape != expected:
            raise ValueError(f"shard {number} has shape {stored.shape}, but must have {expected}")
        check_labels(labels, len(self.latents.classes), f"shard {number}")
        with np.errstate(over="ignore"):
            stored = stored.astype(self.latents.dtype)
        if not np.isfinite(stored).all():
            raise ValueError(
                f"shard {number} holds numbers that are not finite in {self.latents.dtype}: they are too large for it "
                "(dtype=float32), or were not finite before (an autoencoder in low precision: precision=fp32)"
            )
        arrays = {"file": stored, "labels": labels.astype(np.int64)}
        if self.pictures:
            arrays["pictures"] = pictures
        counts = np.bincount(labels, minlength=len(self.latents.classes)).tolist()
        self.keep(number, arrays, class_counts=counts, sums=channel_sums(stored, self.latents), **facts)

    def assemble(self, **fields: object) -> None:
        """Write index.json into `data`, once all shards are there.

        fields  further fields of index.json: the folder of the dataset that belongs to this one (heldout, train), or
                the mean and std by which channels are normalised, if those are not the measured ones (normalize_by).

        Raises ValueError if the dataset would be empty, OSError if shards are missing.
        """
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
        """Give the dataset its name and, for `is_finished`, a report.json with the plan; remove the work folder."""
        if report is not None:
            write_json(self.data / "report.json", report | {"plan": self._report_plan})
        sync(self.data)
        self.data.rename(self.folder)
        sync(self.folder.parent)
        self.discard()

    def discard(self) -> None:
        """Remove the unfinished work."""
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
    """Write a dataset in one go; the folder appears under its name only when it is whole.

    shards    (stored (n, *latents.stored_shape), labels (n,)) of each.
    captions  of each sample, if there are any.
    once      several processes may write it at once: each writes its own copy, and the first one to finish names it.
    fields    further fields of index.json.

    Raises FileExistsError if the folder is there already, ValueError for a shard that is not what `latents` says.
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
    """Count, sums and sums of squares of each channel of network latents, before any normalisation.

    stored is (n, views, C or 2C, S, S). Moments stand for the samples drawn from them: E[x²] = mean² + std².
    """
    channels = latents.shape[0]
    total, squares = np.zeros(channels), np.zeros(channels)
    for part in torch.from_numpy(stored).split(256):
        mean, std = mean_and_std(part, latents)
        total += mean.double().sum(dim=(0, 1, 3, 4)).numpy()
        square = mean.double().square() + (0.0 if std is None else std.double().square())
        squares += square.sum(dim=(0, 1, 3, 4)).numpy()
    return float(stored.size // stored.shape[2]), total.tolist(), squares.tolist()
