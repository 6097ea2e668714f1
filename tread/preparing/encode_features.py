"""Features of a dataset's pictures: `prepare_features` checks everything before long work, which processes share.

Started again after it was stopped, it goes on with the shards that are missing, see tread/data/store.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tread.data.columns import FeatureSpec, latents_hash
from tread.data.dataset import LatentDataset
from tread.data.index import read_index
from tread.data.latents import holds_pixels
from tread.data.sections import FeatureWriter
from tread.encoders.vision import open_encoder
from tread.preparing.encode_photos import read_crops, source_hash
from tread.preparing.encode_text import DatasetPlace
from tread.preparing.heldout import held_out
from tread.preparing.images import Crop
from tread.preparing.sources import NONE, find_photos
from tread.runtime.distributed import Processes
from tread.runtime.files import size_text
from tread.runtime.schema import Count, CountOrZero

PictureReader = Callable[[Sequence[range]], Iterator[tuple[Tensor, ...]]]


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
    writer = FeatureWriter(folder, spec, data.latents.views, [shard["count"] for shard in index["shards"]])
    lines = [
        f"  dataset   {folder}: {len(data):,} samples, {'both views' if data.latents.views == 2 else 'one view'}",
        f"  pictures  {size}×{size}, {where}",
        f"  encoder   {encoder.name}: {spec.grid}×{spec.grid} tokens of {spec.width}, "
        f"{cost.flops / 1e9:.3g} GFLOP a picture",
        f"  stores    float16, {size_text(writer.nbytes)}",
    ]

    def encode(batches: Sequence[range]) -> Iterator[np.ndarray]:
        for views in pictures(batches):
            features = torch.stack([encoder.encode(view) for view in views], dim=1).half()
            if not features.isfinite().all():
                raise ValueError(
                    f"{encoder.name} makes features of some picture that are not finite in float16: they are too large "
                    "for it, or its weights are broken"
                )
            yield features.cpu().numpy()

    batch_size = options.batch_size or (8 if processes.device.type == "cpu" else 64)
    if writer.make(processes, options.again, lines, "image", batch_size, encode):
        processes.say(f"  features  {folder}: {encoder.name}, read with alignment.source=stored")


def open_source(
    options: FeatureOptions, index: dict, processes: Processes
) -> tuple[LatentDataset, PictureReader, int, str]:
    """The dataset, a function from batches of indices to their pictures by view, their size, and where they lie.

    Raises ValueError or OSError where there are none, or others than the latents were made of.
    """
    folder = Path(options.dataset.path)
    if options.source is None and "pictures" not in index and not holds_pixels(LatentDataset(folder).latents):
        raise ValueError(
            f"{folder} keeps no pictures beside its latents: name the photos that it was made of, source=…, or prepare "
            "it again by scripts/prepare_latents.py keep_pictures=true"
        )
    data = LatentDataset(folder, pictures=options.source is None)
    if options.source is None:
        where = "kept beside the latents" if "pictures" in index else "which the stored pixels are"

        def stored(batches: Sequence[range]) -> Iterator[tuple[Tensor, ...]]:
            for rows in batches:
                yield tuple(data.read(rows, view).pictures for view in range(data.latents.views))

        return data, stored, data.picture_size, where
    source = SourcePictures(data, Path(options.source), options.root, options.labels)
    workers = min(16, processes.cores) if options.workers is None else options.workers

    def of_photos(batches: Sequence[range]) -> Iterator[tuple[Tensor, ...]]:
        for pictures in source.batches(batches, workers):
            yield (pictures, pictures.flip(-1))[: data.latents.views]

    return data, of_photos, source.size, source.where


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

        Raises ValueError for one that can't be read any more, OSError if a reading process ends.
        """
        parts = [self._chosen[part] for part in parts]
        for part, (pictures, notes) in zip(parts, read_crops(self._photos, self._crop, parts, workers)):
            for number, (why, _) in zip(part.tolist(), notes):
                if why:
                    raise ValueError(f"{self.where}: {self._photos.names[number]} can't be read as a picture ({why})")
            yield pictures
