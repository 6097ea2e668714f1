"""Features of a dataset's pictures: `prepare_features` checks everything before long work, which processes share.

    <dataset>/.features.unfinished/    in the dataset's folder
        plan.json                      whose features they are; work with another plan is refused
        features-00000.npy             a shard
        00000.json                     written last of a shard: it is whole

Started again after it was stopped, it goes on with the shards that are missing. When all are there they go beside the
latents, and index.json names them: until then the dataset is as it was.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tread.data.columns import FeatureSpec, latents_hash
from tread.data.dataset import LatentDataset
from tread.data.index import read_index
from tread.data.latents import holds_pixels
from tread.data.shards import write_rows
from tread.encoders.vision import Encoder, open_encoder
from tread.preparing.encode_photos import pieces_of, read_crops, source_hash
from tread.preparing.encode_text import DatasetPlace
from tread.preparing.heldout import held_out
from tread.preparing.images import Crop
from tread.preparing.sources import NONE, find_photos
from tread.runtime.distributed import Processes
from tread.runtime.files import (
    explain_failure,
    free_bytes,
    plain_name,
    sha256,
    size_text,
    sync,
    whole_file,
    write_whole,
)
from tread.runtime.schema import Count, CountOrZero

PictureReader = Callable[[Sequence[np.ndarray]], Iterator[tuple[Tensor, ...]]]


@dataclass(frozen=True)
class FeatureOptions:
    """configs/prepare_features.yaml."""

    dataset: DatasetPlace
    encoder: str
    source: str | None
    root: str | None
    labels: str | None
    grid: Count | None
    inception: str | None
    again: bool
    batch_size: Count | None
    device: str | None
    workers: CountOrZero | None


def prepare_features(options: FeatureOptions, processes: Processes) -> None:
    """Check everything, make this process's shards, and, in the main process, give all of them their place."""
    folder = Path(options.dataset.path)
    index = read_index(folder)
    data, pictures, size, where = open_source(options, index, processes)
    with processes.main_first():  # which may fetch it
        encoder = open_encoder(options.encoder, processes.device, grid=options.grid, inception=options.inception)
    cost = encoder.cost(size)
    spec = FeatureSpec(encoder.name, encoder.fingerprint, math.isqrt(cost.tokens), cost.width, latents_hash(index))
    work = Work(folder, spec, data.latents.views, [shard["count"] for shard in index["shards"]])
    if processes.from_main(lambda: work.is_finished(options.again)):
        processes.say(f"{folder} holds these features already")
        return
    with processes.lock(work.work / "lock", f"another process is making features of {folder}"):
        processes.from_main(lambda: work.begin(options.again))
        missing = processes.from_main(work.missing)
        views = "both views" if work.views == 2 else "one view"
        shape = f"{spec.grid}×{spec.grid} tokens of {spec.width}"
        size_of_all = size_text(work.bytes_of(range(len(work.counts))))
        processes.say(f"  dataset   {folder}: {len(data):,} samples, {views}")
        processes.say(f"  pictures  {size}×{size}, {where}")
        processes.say(f"  encoder   {encoder.name}: {shape}, {cost.flops / 1e9:.3g} GFLOP a picture")
        processes.say(f"  stores    float16, {size_of_all}")
        shards = f"{len(missing)} of {len(work.counts)} shards"
        processes.say(f"  work      {shards}, {processes.count} processes on {processes.device}")
        processes.from_main(lambda: work.check_space(missing))
        mine = missing[processes.rank :: processes.count]
        batch_size = options.batch_size or (8 if processes.device.type == "cpu" else 64)
        parts = [pieces_of(work.samples(number), batch_size) for number in mine]
        coming = pictures(list(itertools.chain(*parts)))
        with processes.bar("features", sum(work.counts[number] for number in mine)) as bar:
            for number, batches in zip(mine, parts):
                work.write(number, encode_batches(itertools.islice(coming, len(batches)), encoder, bar.update))
        processes.wait()
        processes.from_main(work.publish)
    processes.say(f"  features  {folder}: {encoder.name}, read with alignment.source=stored")


def encode_batches(
    batches: Iterable[tuple[Tensor, ...]], encoder: Encoder, done: Callable[[int], object]
) -> Iterator[np.ndarray]:
    """(n, views, T, z) float16 of batches of pictures by view; `done` is told of each n."""
    for views in batches:
        features = torch.stack([encoder.encode(view) for view in views], dim=1).half()
        if not features.isfinite().all():
            raise ValueError(
                f"{encoder.name} makes features that are not finite in float16 of some picture: they are too large for "
                "it, or its weights are broken"
            )
        yield features.cpu().numpy()
        done(len(features))


def open_source(
    options: FeatureOptions, index: dict, processes: Processes
) -> tuple[LatentDataset, PictureReader, int, str]:
    """The dataset, a function from batches of indices to their pictures by view, their size, where they lie.

    Raises ValueError or OSError where there are none, or others than the latents were made of.
    """
    folder = Path(options.dataset.path)
    if options.source is not None:
        data, workers = LatentDataset(folder), min(16, processes.cores) if options.workers is None else options.workers
        source = SourcePictures(data, Path(options.source), options.root, options.labels)

        def of_photos(parts: Sequence[np.ndarray]) -> Iterator[tuple[Tensor, ...]]:
            for pictures in source.batches(parts, workers):
                yield (pictures, pictures.flip(-1))[: data.latents.views]

        return data, of_photos, source.size, source.where
    if "pictures" not in index and not holds_pixels(LatentDataset(folder).latents):
        raise ValueError(
            f"{folder} keeps no pictures beside its latents: name the photos that it was made of, source=…, or prepare "
            "it again by scripts/prepare_latents.py keep_pictures=true"
        )
    data = LatentDataset(folder, pictures=True)

    def of_dataset(parts: Sequence[np.ndarray]) -> Iterator[tuple[Tensor, ...]]:
        for part in parts:
            yield tuple(data.read(part, view).pictures for view in range(data.latents.views))

    kept = "kept beside the latents" if "pictures" in index else "which the stored pixels are"
    return data, of_dataset, data.picture_size, kept


class SourcePictures:
    """Pictures by the samples' indices in a dataset.

    data          the dataset, or what was held out with it: report.json says how it was made.
    source, root, labels
                  the photos, as scripts/prepare_latents.py took them.

    where, size   where they lie, and the side of their crops in pixels.

    Raises ValueError or OSError unless they are those that the latents were made of, by names, labels and classes.
    """

    def __init__(self, data: LatentDataset, source: Path, root: str | None, labels: str | None) -> None:
        report = data.folder / "report.json"
        made = json.loads(report.read_text()) if report.is_file() else {}
        plan, latents = made.get("plan", {}), data.latents
        if not {"pictures", "resolution"} <= plan.keys():
            raise ValueError(
                f"{data.folder} does not say which photos it was made of: scripts/prepare_latents.py did not make it. "
                "Prepare it from the photos, or take a dataset that keeps its pictures"
            )
        photos = find_photos(source, root, labels, plan.get("captions_in") if "captions" in plan else NONE)
        if source_hash(photos.classes, photos.names, photos.labels) != plan["pictures"]:
            raise ValueError(
                f"{photos.where} holds other pictures than {data.folder} was made of ({len(photos):,}, by names and "
                "classes): name the same source=…, root=… and labels=… as then"
            )
        chosen = np.ones(len(photos), dtype=bool)
        if "heldout" in plan:
            out = held_out(photos.names, photos.labels, len(photos.classes), plan["heldout"])
            chosen = out if plan["part"] == "heldout" else ~out
        left_out = {name for name, _ in made.get("left_out", [])}
        chosen &= np.array([name not in left_out for name in photos.names])
        self._photos, self._chosen = photos, np.flatnonzero(chosen)
        if photos.labels[chosen].tolist() != data.labels.tolist():
            raise ValueError(
                f"{photos.where} has {chosen.sum():,} pictures where {data.folder} has {len(data):,} samples, or of "
                "other classes: some were damaged or removed when it was made. Prepare it again with keep_pictures=true"
            )
        self.where, self.size = photos.where, plan["resolution"]
        self._crop = Crop(self.size, latents.orientation, latents.alpha)

    def batches(self, parts: Sequence[np.ndarray], workers: int) -> Iterator[Tensor]:
        """For each of some arrays of samples' indices, their pictures (B, 3, size, size) uint8.

        Raises ValueError for one that can't be read any more, or if a reading process ends.
        """
        parts = [self._chosen[part] for part in parts]
        coming = read_crops(self._photos, self._crop, parts, workers)
        for part in parts:
            try:
                pictures, notes = next(coming)
            except RuntimeError as error:  # of PyTorch, where a worker died
                raise ValueError(
                    f"a reading process ended: {error}\nTry fewer workers, or a smaller batch_size"
                ) from error
            for number, (why, _) in zip(part.tolist(), notes):
                if why:
                    raise ValueError(f"{self.where}: {self._photos.names[number]} can't be read as a picture ({why})")
            yield pictures


def described(spec: dict) -> str:
    """A FeatureSpec in JSON, for people; where only hashes tell it from another one, those too."""
    known = {key: spec.get(key) for key in FeatureSpec.__dataclass_fields__}
    hashes = f"weights {str(known['fingerprint'])[:8]}, latents {str(known['of'])[:8]}"
    return f"features of {known['encoder']}, {known['grid']}×{known['grid']} tokens of {known['width']} ({hashes})"


class Work:
    """Features of a dataset in the making.

    spec    what they are; it decides, with views, whether unfinished work is gone on with.
    counts  samples of each shard.

    Of several processes that write shards, one begins and publishes the work.
    """

    def __init__(self, folder: Path, spec: FeatureSpec, views: int, counts: list[int]) -> None:
        self.folder, self.spec, self.views, self.counts = folder, spec, views, counts
        self.work = folder / ".features.unfinished"

    def is_finished(self, again: bool) -> bool:
        """Whether the dataset holds these features. Raises ValueError for damaged or other ones, unless again."""
        section = read_index(self.folder).get("features")
        if section is None:
            return False
        if section == self.spec.section(section.get("shards", [])):
            try:
                LatentDataset(self.folder, "full" if again else "open", features=self.spec.encoder)
            except (ValueError, OSError):
                if not again:
                    raise
                return False
            shutil.rmtree(self.work, ignore_errors=True)  # a process may have been killed just then
            return True
        if not again:
            raise ValueError(
                f"{self.folder} holds {described(section)}: again=true replaces them by {described(asdict(self.spec))}"
            )
        return False

    def begin(self, again: bool) -> None:
        """Get ready to write shards, or to go on with those that are there.

        again  begin anew where other features are unfinished.

        Raises ValueError where other ones are.
        """
        path, plan = self.work / "plan.json", {**self.spec.section([]), "views": self.views}
        before = json.loads(path.read_text()) if path.exists() else plan
        if before != plan and not again:
            raise ValueError(
                f"{self.work} holds unfinished work, {described(before)}, and these are {described(plan)}: go on with "
                "it as it was begun, or begin anew by again=true"
            )
        stale = itertools.chain(self.work.glob(".*.partial"), self.work.glob("*[0-9].*") if before != plan else ())
        with explain_failure(path):
            for file in stale:
                file.unlink()
            write_whole(path, json.dumps(plan, indent=1) + "\n")

    def _note(self, number: int) -> Path:
        return self.work / f"{number:05d}.json"

    def missing(self) -> list[int]:
        """The shards that are still to be written."""
        return [number for number in range(len(self.counts)) if not self._note(number).exists()]

    def samples(self, number: int) -> np.ndarray:
        """The indices of a shard's samples in the dataset."""
        first = sum(self.counts[:number])
        return np.arange(first, first + self.counts[number])

    def shape(self, number: int) -> tuple[int, int, int, int]:
        """(n, views, T, z) of a shard."""
        return (self.counts[number], self.views, self.spec.grid**2, self.spec.width)

    def bytes_of(self, numbers: range | list[int]) -> int:
        """Size of some shards."""
        return sum(2 * int(np.prod(self.shape(number))) for number in numbers)

    def check_space(self, missing: list[int]) -> None:
        """Raise OSError unless the disk can take the shards that are missing."""
        needed, free = self.bytes_of(missing), free_bytes(self.work)
        if needed > free:
            raise OSError(f"the features take {size_text(needed)}, but {self.work} has {size_text(free)} free")

    def write(self, number: int, parts: Iterator[np.ndarray]) -> None:
        """Write a shard of parts (n, views, T, z) float16."""
        path = self.work / f"features-{number:05d}.npy"
        with explain_failure(path):
            with whole_file(path) as partial, partial.open("wb") as file:
                write_rows(file, "float16", self.shape(number), parts)
            sync(self.work)  # the shard's name is on the disk before it is said to be done
            write_whole(self._note(number), json.dumps({"file": path.name, "sha256": sha256(path)}) + "\n")

    def publish(self) -> None:
        """Put all shards beside the latents, in the place of other features, and let index.json name them.

        Raises OSError if some are missing.
        """
        if lacking := self.missing():
            raise OSError(f"shards {lacking} of {self.work} are missing: all processes must share {self.folder}")
        entries = [json.loads(self._note(number).read_text()) for number in range(len(self.counts))]
        path = self.folder / "index.json"
        index = read_index(self.folder)
        with explain_failure(path):
            if before := index.pop("features", None):
                write_whole(path, json.dumps(index, indent=1) + "\n")  # which names none while files change
                for entry in before["shards"]:
                    (self.folder / plain_name(entry["file"], path)).unlink(missing_ok=True)
            for entry in entries:
                if (self.work / entry["file"]).exists():  # else a process was killed behind it
                    (self.work / entry["file"]).rename(self.folder / entry["file"])
            sync(self.folder)
            write_whole(path, json.dumps({**index, "features": self.spec.section(entries)}, indent=1) + "\n")
        shutil.rmtree(self.work, ignore_errors=True)
