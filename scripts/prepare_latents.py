"""Photos → a dataset of latents: python scripts/prepare_latents.py source=… out=…

All options: configs/prepare_latents.yaml. Start it again after it was stopped, with any number of
processes, and it goes on with the shards that are missing.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import hydra
import numpy as np
import torch
from omegaconf import DictConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tread.data import autoencoder, dataset_report
from tread.data.dataset import LatentDataset
from tread.data.images import save_grid
from tread.data.latents import Dtype
from tread.data.photos import Photos, find_photos
from tread.data.prepare import Crops, check_sizes, make_shards, shard_ranges, source_hash
from tread.data.writer import DatasetWriter
from tread.runtime import schema
from tread.runtime.cli import explained, open_door, plain
from tread.runtime.device import use_precision
from tread.runtime.distributed import Processes, share_work
from tread.runtime.files import explain_failure
from tread.runtime.schema import Count, CountOrZero


@dataclass(frozen=True)
class Options:
    """configs/prepare_latents.yaml."""

    source: str
    root: str | None
    labels: str | None
    out: str
    resolution: Count
    flip: bool
    autoencoder: str
    store: autoencoder.Store
    dtype: Dtype
    precision: Literal["fp32", "bf16"]
    batch_size: Count | None
    device: str | None
    workers: CountOrZero | None
    shard_size: Count
    on_error: Literal["stop", "skip"]
    enlarge: bool
    allow_empty: bool
    decode: CountOrZero


@hydra.main(version_base="1.3", config_path="../configs", config_name="prepare_latents")
def main(composed: DictConfig) -> None:
    with explained("stopped; start it again to go on with the shards that are missing"):
        options = schema.read(plain(composed), Options)
        prepare(options, share_work(options.device))


def prepare(options: Options, processes: Processes) -> None:
    """Check everything, make this process's shards, and, in the main process, the dataset of all."""
    out, source = Path(options.out), Path(options.source)
    if source.is_dir() and source.resolve() in (out.resolve(), *out.resolve().parents):
        raise ValueError(
            f"out {out} lies inside source {source}, whose pictures it would be among; choose another place"
        )
    photos = find_photos(source, options.root, options.labels)
    photos.check_classes(options.allow_empty)
    if photos.refused and options.on_error == "stop":
        name, why = photos.refused[0]
        more = f" ({len(photos.refused)} such files)" if len(photos.refused) > 1 else ""
        raise ValueError(f"{photos.where}: {name} is no picture: {why}{more}; remove it, or set on_error=skip")
    if not options.enlarge:
        check_sizes(photos, options.resolution)
    use_precision(options.precision, processes.device)
    stored = {"store": options.store, "dtype": options.dtype, "views": 2 if options.flip else 1}
    if options.autoencoder == "none":
        model, latents = None, autoencoder.as_pixels(options.resolution, photos.classes, **stored)
    else:
        model = autoencoder.load_autoencoder(options.autoencoder, processes.device)
        latents = autoencoder.encoded(model, options.autoencoder, options.resolution, photos.classes, **stored)
    ranges = shard_ranges(len(photos), options.shard_size)
    plan = {key: getattr(options, key) for key in ("resolution", "precision", "shard_size")}
    plan["pictures"] = source_hash(photos)
    writer = DatasetWriter(out, latents, plan)
    if writer.is_finished():
        processes.say(f"{out} is finished")
        return
    with processes.main_first():
        if processes.main:
            writer.begin()
        missing = writer.missing(len(ranges))
    processes.wait()  # nobody writes before all have seen the same list
    if processes.main:
        writer.check_space(sum(len(ranges[number]) for number in missing))
    stored = f"{latents.stored_shape[1:]} {latents.dtype}, {len(photos) * latents.sample_bytes / 1e9:.2f} GB"
    processes.say(f"  pictures  {len(photos):,} in {len(photos.classes):,} classes, {photos.where}")
    processes.say(f"  crop      {options.resolution}², {'with' if options.flip else 'without'} flipped copies")
    processes.say(f"  encoder   {latents.autoencoder}, {options.precision}")
    processes.say(f"  stores    {stored}: {latents.meaning}")
    if model is None and (patch := autoencoder.patch_for(options.resolution)) > 2:
        many, few = ((options.resolution // side) ** 2 for side in (2, patch))
        processes.say(
            f"  note      {many:,} tokens a picture with model.patch_size=2, {few} with model.patch_size={patch}"
        )
    shards = f"{len(missing)} of {len(ranges)} shards"
    processes.say(f"  work      {shards}, {processes.count} processes on {processes.device}")
    make_shards(
        photos,
        writer,
        autoencoder.encoder(model, latents, options.precision),
        [(number, ranges[number]) for number in missing[processes.rank :: processes.count]],
        options.resolution,
        options.batch_size or (2 if processes.device.type == "cpu" else 32),
        min(16, processes.cores) if options.workers is None else options.workers,
        options.on_error == "skip",
        processes,
    )
    processes.wait()
    if processes.main:
        finish(photos, writer, len(ranges), options, processes.device)


def finish(photos: Photos, writer: DatasetWriter, shards: int, options: Options, device: torch.device) -> None:
    """Assemble the dataset, look at it, write its report, and give it its name."""
    notes, data = writer.assemble(shards), LatentDataset(writer.data)
    made = dataset_report.numbers(data)
    empty = [name for name, count in made["class_counts"].items() if not count]
    if empty and not options.allow_empty:
        raise ValueError(
            f"no picture of {', '.join(empty[:5])} could be read; repair some of {photos.where} and remove "
            f"{writer.work}, or set allow_empty=true"
        )
    left_out = [*photos.refused, *(tuple(one) for note in notes for one in note["left_out"])]
    made |= {"enlarged": sum(note["enlarged"] for note in notes), "left_out": left_out}
    if options.decode:
        chosen = dataset_report.spread(len(data), options.decode)
        skipped = {name for name, _ in left_out}
        kept = [index for index, name in enumerate(photos.names) if name not in skipped]
        crops = Crops(photos, options.resolution)
        before = np.stack([crops[kept[index]][0].numpy() for index in chosen])
        after = dataset_report.decode(data, chosen, device)
        if data.latents.autoencoder != "pixels":  # which come back as they were
            made["psnr"] = [dataset_report.psnr(*pair) for pair in zip(before, after)]
        with explain_failure(data.folder / "report.png"):
            pairs = np.stack([before, after], axis=1).reshape(-1, *before.shape[1:])
            save_grid(data.folder / "report.png", pairs, columns=2)
    writer.publish(made)
    print(dataset_report.text(made))
    if options.decode:
        print(f"  pictures  {writer.folder / 'report.png'}: photo, decoded latents")
    print(f"  dataset   {writer.folder}: train with dataset=folder dataset.path={writer.folder}")


if __name__ == "__main__":
    open_door(main, schema.known_keys(Options))
