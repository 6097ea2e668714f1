"""Photos → a dataset of latents, the whole way: everything is checked before long work, which processes share.

Read from `prepare` down. Started again after it was stopped, it goes on with the shards that are missing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from tread.data import autoencoder, dataset_report
from tread.data.caption_files import captions_hash
from tread.data.captions import add_captions
from tread.data.dataset import LatentDataset
from tread.data.grids import save_grid
from tread.data.images import Alpha, Crop, Orientation
from tread.data.latents import Dtype
from tread.data.photos import ONE_CLASS, Photos, find_photos
from tread.data.prepare import Crops, Damage, Piece, check_sizes, make_shards, source_hash
from tread.data.writer import DatasetWriter
from tread.runtime.device import use_precision
from tread.runtime.distributed import Processes
from tread.runtime.files import explain_failure, size_text
from tread.runtime.schema import Count, CountOrZero, Fraction


@dataclass(frozen=True)
class Options:
    """configs/prepare_latents.yaml."""

    source: str
    root: str | int | None
    labels: str | None
    captions: str | None
    attribution: str | None
    out: str
    heldout: Count | Fraction | None
    resolution: Count
    orientation: Orientation
    alpha: Alpha
    flip: bool
    keep_pictures: bool
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


def prepare(options: Options, processes: Processes) -> None:
    """Check everything, make this process's shards, and, in the main process, the dataset of all."""
    out, source = Path(options.out), Path(options.source)
    if source.is_dir() and source.resolve() in (out.resolve(), *out.resolve().parents):
        raise ValueError(
            f"out {out} lies inside source {source}, whose pictures it would be among; choose another place"
        )
    root = None if options.root is None else str(options.root)
    photos = find_photos(source, root, options.labels, options.captions)
    if options.on_error == "stop" and (photos.names or photos.unpaired):
        photos.refuse()
    photos.check_classes(options.allow_empty)
    if photos.heldout and options.heldout is not None:
        raise ValueError(
            f"{photos.where} holds out {photos.heldout.rstrip('/')} itself: leave heldout={options.heldout} out, or "
            "choose one split by root="
        )
    heldout = photos.heldout or options.heldout
    if not options.enlarge:
        check_sizes(photos, options.resolution)
    use_precision(options.precision, processes.device)
    stored = {"store": options.store, "dtype": options.dtype, "views": 2 if options.flip else 1}
    stored |= {"orientation": options.orientation, "alpha": options.alpha}
    if options.autoencoder == "none" and options.keep_pictures:
        raise ValueError("keep_pictures=true would keep what autoencoder=none stores already: leave one of them out")
    if options.autoencoder == "none":
        model, latents = None, autoencoder.as_pixels(options.resolution, photos.classes, **stored)
    else:
        model = autoencoder.load_autoencoder(options.autoencoder, processes.device)
        latents = autoencoder.encoded(model, options.autoencoder, options.resolution, photos.classes, **stored)
    plan = {key: getattr(options, key) for key in ("resolution", "precision", "shard_size")}
    plan["pictures"] = source_hash(photos.classes, photos.names, photos.labels)
    crop_shape = (3, options.resolution, options.resolution) if options.keep_pictures else None
    said = {} if photos.captions is None else {"captions": captions_hash(photos.captions)}
    said |= {"captions_in": options.captions} if photos.captions is not None and options.captions else {}
    said |= {"attribution": options.attribution} if options.attribution else {}
    if heldout is None:
        writers = {"train": DatasetWriter(out, latents, plan, crop_shape, said)}
    else:
        folders = {"train": out, "heldout": out.with_name(f"{out.name}-heldout")}
        plan["heldout"] = heldout
        writers = {
            part: DatasetWriter(folder, latents, {**plan, "part": part}, crop_shape, said)
            for part, folder in folders.items()
        }
    unfinished = {part: writer for part, writer in writers.items() if not writer.is_finished()}
    for part, writer in writers.items():
        if part not in unfinished:
            processes.say(f"{writer.folder} is finished")
    if not unfinished:
        return
    damage = Damage(next(iter(unfinished.values())).work / "damaged", photos)
    with processes.main_first():
        if processes.main:
            for writer in unfinished.values():
                writer.check_free()
            pictures = damage.begun()
            pictures.cut(len(photos.classes), heldout, options.shard_size)  # which may be refused
            pictures = source_hash(photos.classes, pictures.names, pictures.labels)
            first = next(iter(unfinished.values()))
            anew = not first.has_any()  # both parts, or neither
            for writer in unfinished.values():
                writer.begin(anew, pictures=pictures)
        begun = damage.begun()
        shards = begun.cut(len(photos.classes), heldout, options.shard_size)
        pieces = [
            Piece(writer, number, shards[part][number], f"{part}-{number:05d}")
            for part, writer in unfinished.items()
            for number in writer.missing(len(shards[part]))
        ]
    processes.wait()  # nobody writes before all have seen the same list
    if processes.main:
        next(iter(unfinished.values())).check_space(sum(len(piece.pictures) for piece in pieces))
    stored = f"{latents.stored_shape[1:]} {latents.dtype}, {size_text(len(photos) * latents.sample_bytes)}"
    classes = f"in {len(photos.classes):,} classes, " if photos.classes != ONE_CLASS else ""
    processes.say(f"  pictures  {len(photos):,} {classes}{photos.where}")
    if photos.captions is not None:
        counts = sorted(map(len, photos.captions))
        each = f"{counts[0]} to {counts[-1]}" if counts[0] < counts[-1] else str(counts[0])
        processes.say(f"  captions  {sum(counts):,}, {each} a picture")
    if heldout is not None:
        kept, by = sum(map(len, shards["heldout"])), photos.heldout or "chosen by a hash of their names"
        processes.say(f"  held out  {kept:,} of them, {by.rstrip('/')}: {writers['heldout'].folder}")
    processes.say(
        f"  crop      {options.resolution}², {'with' if options.flip else 'without'} flipped copies; "
        f"orientation={options.orientation}, alpha={options.alpha}"
    )
    processes.say(f"  encoder   {latents.autoencoder}, {options.precision}")
    processes.say(f"  stores    {stored}: {latents.meaning}")
    if options.keep_pictures:
        size = size_text(len(photos) * writers["train"].picture_bytes)
        processes.say(f"  keeps     the pictures too, {writers['train'].pictures} uint8, {size}")
    if model is None and (patch := autoencoder.patch_for(options.resolution)) > 2:
        many, few = ((options.resolution // side) ** 2 for side in (2, patch))
        processes.say(
            f"  note      {many:,} tokens a picture with model.patch_size=2, {few} with model.patch_size={patch}"
        )
    work = f"{len(pieces)} of {sum(len(shards[part]) for part in unfinished)} shards"
    processes.say(f"  work      {work}, {processes.count} processes on {processes.device}")
    make_shards(
        photos,
        pieces[processes.rank :: processes.count],
        autoencoder.encoder(model, latents, options.precision),
        Crop(options.resolution, options.orientation, options.alpha),
        options.batch_size or (2 if processes.device.type == "cpu" else 32),
        min(16, processes.cores) if options.workers is None else options.workers,
        damage if options.on_error == "stop" else None,
        begun,
        processes,
    )
    processes.wait()
    if options.on_error == "stop":
        processes.from_main(lambda: damage.check(piece.name for piece in pieces if not piece.writer.has(piece.number)))
    if processes.main:
        finish(photos, unfinished, writers, shards, options, processes)


def finish(
    photos: Photos,
    unfinished: dict[str, DatasetWriter],
    writers: dict[str, DatasetWriter],
    shards: dict[str, list[np.ndarray]],
    options: Options,
    processes: Processes,
) -> None:
    """Assemble the datasets, look at them, write their reports, and give them their names."""
    made = {}
    for part, writer in unfinished.items():
        other = next((writers[other].folder for other in writers if other != part), None)
        beside = {"train" if part == "heldout" else "heldout": os.path.relpath(other, writer.folder)} if other else {}
        beside |= {"attribution": options.attribution} if options.attribution else {}
        made[part] = look_at(
            part, photos, writer, np.concatenate(shards[part]), len(shards[part]), beside, options, processes.device
        )
    for part in sorted(made):  # what is held out first: the work on the rest knows what was damaged
        unfinished[part].publish(made[part])
    for part in made:
        folder = writers[part].folder
        if part == "heldout":
            counts = (
                f"{made[part]['count']:,} samples of {sum(map(bool, made[part]['class_counts'].values())):,} classes"
            )
            processes.say(f"  held out  {folder}: {counts}, for the evaluation loss")
            continue
        processes.say(dataset_report.text(made[part]))
        if options.decode:
            processes.say(f"  pictures  {folder / 'report.png'}: photo, decoded latents")
        processes.say(f"  dataset   {folder}: train with dataset=folder dataset.path={folder}")
        if photos.captions is not None:
            processes.say(f"  text      encode its captions: python scripts/prepare_text.py dataset={folder} encoder=…")


def look_at(
    part: str,
    photos: Photos,
    writer: DatasetWriter,
    pictures: np.ndarray,
    shards: int,
    beside: dict[str, str],
    options: Options,
    device: torch.device,
) -> dict:
    """Assemble a dataset and return its report; its pictures are indices into photos."""
    notes = writer.notes(shards)
    skipped = {name for note in notes for name, _ in note["left_out"]}
    kept = [index for index in pictures.tolist() if photos.names[index] not in skipped]
    writer.assemble(shards, **beside)
    if photos.captions is not None:
        add_captions(writer.data, (photos.captions[index] for index in kept))
    data = LatentDataset(writer.data)
    made = dataset_report.numbers(data)
    empty = [name for name, count in made["class_counts"].items() if not count]
    if empty and not options.allow_empty and part == "train":
        writer.forget(number for number, note in enumerate(notes) if note["left_out"])
        raise ValueError(
            f"no picture of {', '.join(empty[:5])} could be read; repair some of {photos.where} and start the same "
            "command again, or set allow_empty=true"
        )
    refused = [*photos.refused, *photos.unpaired] if part == "train" else []
    left_out = [*refused, *(tuple(one) for note in notes for one in note["left_out"])]
    made |= {
        "enlarged": sum(note["enlarged"] for note in notes),
        "much_enlarged": [name for note in notes for name in note.get("much_enlarged", [])],  # not in older notes
        "left_out": left_out,
    }
    if options.decode:
        chosen = dataset_report.spread(len(data), options.decode)
        crops = Crops(photos, Crop(options.resolution, options.orientation, options.alpha))
        before = np.stack([crops[kept[index]][0].numpy() for index in chosen])
        after = dataset_report.decode(data, chosen, device)
        if data.latents.autoencoder != "pixels":  # which come back as they were
            made["psnr"] = [dataset_report.psnr(*pair) for pair in zip(before, after)]
        with explain_failure(data.folder / "report.png"):
            pairs = np.stack([before, after], axis=1).reshape(-1, *before.shape[1:])
            save_grid(data.folder / "report.png", pairs, columns=2)
    return made
