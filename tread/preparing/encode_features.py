"""Writes features of a dataset's pictures into its folder (`prepare_features`): an encoder's patch features and one
vector per whole picture. All checks run before the long work. Run again, the command makes only the missing shards."""

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
from tread.data.section_writer import FeatureWriter
from tread.encoders.vision import open_encoder
from tread.preparing.encode_photos import read_crops, source_hash
from tread.preparing.encode_text import DatasetPlace
from tread.preparing.images import Crop
from tread.preparing.photos import held_out
from tread.preparing.sources import NONE, find_photos
from tread.runtime.distributed import Processes
from tread.runtime.files import size_text
from tread.runtime.schema import Count, CountOrZero


@dataclass(frozen=True)
class FeatureOptions:
    """The options of configs/prepare_features.yaml."""

    dataset: DatasetPlace
    encoder: str
    source: str | None
    root: str | int | None
    labels: str | None
    grid: Count | None
    inception: str | None
    again: bool
    batch_size: Count | None
    device: str | None
    workers: CountOrZero | None


def prepare_features(options: FeatureOptions, processes: Processes) -> None:
    """Write an encoder's features of a dataset's pictures into the dataset's folder. All processes must call this: each
    checks everything, then encodes its share of the shards; the main process adds all shards to the dataset."""
    folder = Path(options.dataset.path)
    index = read_index(folder)
    data, pictures, size, where = open_source(options, index, processes)
    with processes.main_first():  # one process downloads the weights
        encoder = open_encoder(options.encoder, processes.device, grid=options.grid, inception=options.inception)
    cost = encoder.cost(size)
    whole = encoder.encode_both(torch.zeros(1, 3, size, size, dtype=torch.uint8))[1].shape[1]
    grid = math.isqrt(cost.tokens)
    spec = FeatureSpec(encoder.name, encoder.fingerprint, grid, cost.width, latents_hash(index), whole)
    writer = FeatureWriter(folder, spec)
    lines = [
        f"  dataset   {folder}: {len(data):,} samples, {'both views' if data.latents.views == 2 else 'one view'}",
        f"  pictures  {size}×{size}, {where}",
        f"  encoder   {encoder.name}: {spec.grid}×{spec.grid} tokens of {spec.width} and one of {whole}, "
        f"{cost.flops / 1e9:.3g} GFLOP a picture",
        f"  stores    float16, {size_text(writer.nbytes)}",
    ]

    def encode(batches: Sequence[range]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for views in pictures(batches):
            both = zip(*(encoder.encode_both(view) for view in views))
            features, pooled = (torch.stack(parts, dim=1).half() for parts in both)
            if not (features.isfinite().all() and pooled.isfinite().all()):
                raise ValueError(f"{encoder.name} makes features of some picture that are not finite in float16")
            yield features.cpu().numpy(), pooled.cpu().numpy()

    batch_size = options.batch_size or (8 if processes.device.type == "cpu" else 64)
    if writer.make(processes, options.again, lines, "image", batch_size, encode):
        processes.say(f"  features  {folder}: {encoder.name}, read with alignment.source=stored")


def open_source(
    options: FeatureOptions, index: dict, processes: Processes
) -> tuple[LatentDataset, Callable[[Sequence[range]], Iterator[tuple[Tensor, ...]]], int, str]:
    """Find a dataset's pictures, in options.source if given, else in the dataset (`index` is its parsed index.json).

    Returns the dataset, a function that reads pictures, the pictures' side in pixels, and a text on where they lie. The
    function takes batches of sample indices; for each batch it yields a tuple with pictures (B, 3, H, W) uint8 of each
    view (plain, flipped). Raises ValueError or OSError if pictures are missing or are not those of the dataset.
    """
    folder = Path(options.dataset.path)
    if options.source is not None:
        data, workers = LatentDataset(folder), min(16, processes.cores) if options.workers is None else options.workers
        return data, *find_again(data, Path(options.source), options.root, options.labels, workers)
    if "pictures" not in index and not holds_pixels(LatentDataset(folder).latents):
        how = "name the photos that it was made of, source=…, or prepare it again with keep_pictures=true"
        raise ValueError(f"{folder} keeps no pictures beside its latents: {how}")
    data = LatentDataset(folder, pictures=True)

    def stored(batches: Sequence[range]) -> Iterator[tuple[Tensor, ...]]:
        for rows in batches:
            yield tuple(data.read(rows, view).pictures for view in range(data.latents.views))

    where = "kept beside the latents" if "pictures" in index else "which the stored pixels are"
    return data, stored, data.picture_size, where


def find_again(
    data: LatentDataset, source: Path, root: str | int | None, labels: str | None, workers: int
) -> tuple[Callable[[Sequence[range]], Iterator[tuple[Tensor, ...]]], int, str]:
    """Find the photos from which a dataset (training or held-out) was made, as recorded in its report.json. `source`,
    `root` and `labels` are options of scripts/prepare_latents.py that lead to these photos, which may have been moved.

    Returns a function that reads pictures like open_source's, in worker processes; the pictures' side in pixels; and a
    text on where they lie. The function raises ValueError if a photo can no longer be read, OSError if a worker dies.
    Raises ValueError or OSError if no photos are recorded, or if their names, labels or classes have changed.
    """
    report = data.folder / "report.json"
    made = json.loads(report.read_text()) if report.is_file() else {}
    plan = made.get("plan", {})
    if not {"pictures", "resolution"} <= plan.keys():
        how = "prepare it from the photos, or take a dataset that keeps its pictures"
        raise ValueError(f"{data.folder} does not say which photos it was made of: {how}")
    photos = find_photos(source, root, labels, plan.get("captions_in") if "captions" in plan else NONE)
    if source_hash(photos) != plan["pictures"]:
        what = f"other pictures than {data.folder} was made of ({len(photos):,}, by names and classes)"
        raise ValueError(f"{photos.where} holds {what}: name the same source=…, root=… and labels=… as then")
    out = held_out(photos.names, photos.labels, len(photos.classes), plan.get("heldout"))
    chosen = out if plan.get("part") == "heldout" else ~out
    left_out = {name for name, _ in made.get("left_out", [])}
    chosen &= np.array([name not in left_out for name in photos.names])
    if photos.labels[chosen].tolist() != data.labels.tolist():
        raise ValueError(
            f"{photos.where} has {chosen.sum():,} pictures where {data.folder} has {len(data):,} samples, or of "
            "other classes: some were damaged or removed when it was made. Prepare it again with keep_pictures=true"
        )
    crop = Crop(plan["resolution"], data.latents.orientation, data.latents.alpha)
    photo_of = np.flatnonzero(chosen)  # for each sample the index of its photo

    def read(batches: Sequence[range]) -> Iterator[tuple[Tensor, ...]]:
        parts = [photo_of[rows] for rows in batches]
        for part, (pictures, notes) in zip(parts, read_crops(photos, crop, parts, workers)):
            for number, (why, _) in zip(part.tolist(), notes):
                if why:
                    raise ValueError(f"{photos.where}: {photos.names[number]} can't be read as a picture ({why})")
            yield (pictures, pictures.flip(-1))[: data.latents.views]

    return read, crop.size, photos.where
