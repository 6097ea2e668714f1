"""Encodes photos as a dataset of latents and writes a report on it (`prepare_latents`).

All checks run before the long work. Processes share the shards; the same command, run again, makes the missing ones.
Batches never cross a shard, so a shard depends on its pictures, the options and the device, but not on the process that
makes it (on a CPU, its last bits also depend on the number of threads)."""

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from tread.data.captions import add_captions
from tread.data.dataset import LatentDataset
from tread.data.latents import Alpha, Dtype, LatentSpec, Orientation, to_network
from tread.data.store import pieces_of, spread_indices
from tread.data.writer import DatasetWriter
from tread.drawing.grids import save_grid
from tread.encoders import autoencoder
from tread.encoders.autoencoder import LatentEncoder
from tread.preparing.images import Crop, centre_crop, read_rgb
from tread.preparing.photos import DAMAGED, ONE_CLASS, Photos, held_out, told
from tread.preparing.sources import find_photos
from tread.runtime.device import use_precision
from tread.runtime.distributed import Processes
from tread.runtime.files import content_hash, explain_failure, size_text
from tread.runtime.schema import Count, CountOrZero, Fraction
from tread.runtime.tensor_files import listed

MUCH = 4  # the report names pictures enlarged by more than this factor


@dataclass
class Crops:
    """Crops photos. Items: (pixels (3, size, size) uint8, "", photo size (W, H)); (None, reason, (0, 0)) on failure."""

    photos: Photos
    crop: Crop

    def __getitem__(self, index: int) -> tuple[Tensor | None, str, tuple[int, int]]:
        try:
            image = read_rgb(self.photos.read(index), self.crop.orientation, self.crop.alpha)
            pixels = torch.from_numpy(centre_crop(image, self.crop.size).transpose(2, 0, 1).copy())
        except (OSError, ValueError) as error:
            return None, str(error) or type(error).__name__, (0, 0)
        return pixels, "", image.size


def collate(crops: list[tuple]) -> tuple[Tensor | None, list[tuple]]:
    """Join items of `Crops`: return the readable pictures as one tensor (n, 3, size, size), or None if there are none,
    and a list of [why unreadable, or "", photo size] for all items."""
    good = [pixels for pixels, *_ in crops if pixels is not None]
    batch = torch.stack(good) if good else None  # one tensor, as each takes a file descriptor
    if good and get_worker_info() is not None:
        batch.share_memory_()  # already here: an error in the queue's thread would be lost
    return batch, [rest for _, *rest in crops]


def end_with(process: int, worker: int) -> None:
    """Make this data-loading worker exit soon after the process that it loads for, whose id is `process`, has ended.
    PyTorch's own check watches only the worker's parent, which may be a fork server. `worker`, a number, is unused."""

    def watch() -> None:
        while psutil.pid_exists(process):
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end with").start()


def read_crops(
    photos: Photos, crop: Crop, batches: Iterable[np.ndarray], workers: int
) -> Iterator[tuple[Tensor | None, list[tuple]]]:
    """Read photos in worker processes. Yields, for each of the `batches` of photo indices, the readable pictures as one
    tensor (n, 3, size, size) uint8, or None if there are none, and a list of [why unreadable, or "", photo size] for
    all photos in the batch. workers=0: this process reads. Raises OSError if a worker dies."""
    try:
        yield from DataLoader(
            Crops(photos, crop),
            batch_sampler=[rows.tolist() for rows in batches],
            num_workers=workers,
            collate_fn=collate,
            worker_init_fn=partial(end_with, os.getpid()),
        )
    except RuntimeError as error:  # PyTorch's, when a worker died
        how = "It may have had too little (shared) memory: try fewer workers, or a smaller batch_size"
        raise ChildProcessError(f"a reading process ended: {error}\n{how}. What was done before is kept") from error


def source_hash(photos: Photos) -> str:
    """Return the hex sha256 of the pictures' names, labels and classes."""
    names = "\0".join((*photos.classes, *photos.names)).encode(errors="surrogateescape")
    return content_hash(names + photos.labels.tobytes())


def begun_with(photos: Photos, writers: Iterable[DatasetWriter]) -> Photos:
    """Return the photos as listed when the unfinished work of `writers` began. Damaged pictures that were removed since
    then, listed in the shards' notes (see make_shards), are added with file None, so that others keep their shards."""
    notes = [note for writer in writers for note in writer.notes(True)]
    damaged = {place: (name, label) for note in notes for place, name, label, _ in note.get("damaged", ())}
    if not damaged:
        return photos
    columns = [photos.names, photos.labels.tolist(), photos.files, photos.captions or itertools.repeat([])]
    rows, there = list(zip(*columns)), set(photos.names)
    for place, (name, label) in sorted(damaged.items()):
        if name not in there and label < len(photos.classes):
            rows.insert(place, (name, label, None, []))
    names, labels, files, captions = map(list, zip(*rows))
    captions = photos.captions and captions
    return replace(photos, names=names, labels=np.array(labels, dtype=np.int64), files=files, captions=captions)


def shards_of(photos: Photos, heldout: float | int | str | None, shard_size: int) -> dict[str, list[np.ndarray]]:
    """Return {part: picture indices of each shard} for "train" and "heldout" ([] if no picture is held out). `heldout`
    says what is held out: a fraction, a count, a prefix of names, or None. Raises ValueError for too few pictures."""
    out = held_out(photos.names, photos.labels, len(photos.classes), heldout)
    return {part: pieces_of(np.flatnonzero(mask), shard_size) for part, mask in (("train", ~out), ("heldout", out))}


def check_damage(photos: Photos, writers: Iterable[DatasetWriter]) -> None:
    """Raise ValueError if pictures that `writers` left out as damaged are still in the source. The error lists them."""
    there = photos.there
    faults = sorted(tuple(picture) for writer in writers for note in writer.notes() for picture in note["damaged"])
    if damaged := [(name, why) for _, name, _, why in faults if name in there]:
        (text,) = told("damaged pictures", damaged, DAMAGED)
        how = "Replace or remove them and start the same command again, or leave such files out with on_error=skip"
        raise ValueError(f"{photos.where}: {text}\n{how}")


def check_sizes(photos: Photos, resolution: int) -> None:
    """Raise ValueError if the median shorter side of up to 32 pictures, evenly chosen, is below `resolution`."""
    crops = Crops(photos, Crop(resolution))
    looked = (crops[number] for number in spread_indices(len(photos), 32))
    sizes = [min(size) for _, why, size in looked if not why]
    if sizes and np.median(sizes) < resolution:
        raise ValueError(
            f"the pictures of {photos.where} are smaller ({int(np.median(sizes))} pixels along the shorter side, the "
            f"median of {len(sizes)}) than resolution={resolution}; choose a lower one, or enlarge=true"
        )


def make_shards(
    writer: DatasetWriter, photos: Photos, encode: LatentEncoder, options: "PhotoOptions", processes: Processes
) -> None:
    """Make the missing shards of a dataset together with the other processes. Each shard gets a note, a JSON file that
    lists damaged pictures (left out), counts enlarged ones, and lists those enlarged more than 4 times."""
    batch_size = options.batch_size or (2 if processes.device.type == "cpu" else 32)
    workers = min(16, processes.cores) if options.workers is None else options.workers
    no_latents = np.zeros((0, *writer.latents.stored_shape), writer.latents.dtype)
    no_pictures = np.zeros((0, *(writer.pictures or ())), np.uint8)

    def make(numbers: list[int], done: Callable[[int], object]) -> None:
        shards = [pieces_of(writer.ranges[number], batch_size) for number in numbers]
        coming = read_crops(photos, options.crop, itertools.chain(*shards), workers)
        for number, batches in zip(numbers, shards):
            stored, pictures, read, damaged = [no_latents], [no_pictures], {}, []
            for indices in batches:
                pixels, notes = next(coming)
                for index, (why, size) in zip(indices.tolist(), notes):
                    if why:
                        damaged.append((index, photos.names[index], int(photos.labels[index]), why))
                    else:
                        read[index] = min(size)
                if pixels is not None:
                    with np.errstate(over="ignore"):  # infinite numbers are refused when the shard is written
                        stored.append(encode(pixels).astype(writer.latents.dtype))
                    if writer.pictures:
                        pictures.append(pixels.numpy().copy())  # a copy outside the memory shared with the worker
                done(len(indices))
            writer.write(
                number,
                np.concatenate(stored),
                photos.labels[np.array([*read], dtype=np.int64)],
                np.concatenate(pictures),
                damaged=damaged,
                enlarged=sum(side < options.resolution for side in read.values()),
                much_enlarged=[photos.names[index] for index, side in read.items() if MUCH * side < options.resolution],
            )

    writer.share(processes, "encoding", make)


@dataclass(frozen=True)
class PhotoOptions:
    """The options of configs/prepare_latents.yaml."""

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
    store: autoencoder.Content
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

    @property
    def crop(self) -> Crop:
        return Crop(self.resolution, self.orientation, self.alpha)


def prepare_latents(options: PhotoOptions, processes: Processes) -> None:
    """Check everything, then make this process's share of the shards; all processes must call this. The main one also
    finishes datasets and reports. Raises ValueError for unsuitable options or pictures, OSError for unusable files."""
    photos = processes.from_main(lambda: open_photos(options))  # one list for all, even if pictures are still arriving
    heldout = photos.heldout or options.heldout  # see `held_out` for both forms
    use_precision(options.precision, processes.device)
    stored = {"store": options.store, "dtype": options.dtype, "views": 2 if options.flip else 1}
    stored |= {"orientation": options.orientation, "alpha": options.alpha}
    if options.autoencoder == "none":
        model, latents = None, autoencoder.as_pixels(options.resolution, photos.classes, **stored)
    else:
        model = autoencoder.load_autoencoder(options.autoencoder, processes.device)
        latents = autoencoder.encoded(model, options.autoencoder, options.resolution, photos.classes, **stored)
    writers = open_writers(photos, heldout, latents, options)
    work = []
    for writer in writers.values():
        if writer.is_finished():
            processes.say(f"{writer.folder} is finished; remove it to make it anew, if pictures changed since")
        else:
            work.append(writer)
    if not work:
        return

    def begin() -> None:
        begun, there = begun_with(photos, work), photos.there
        shards_of(begun, heldout, options.shard_size)  # raises ValueError for too few pictures
        for writer in work:
            writer.check_free()
        again = all(note.get("damaged") for writer in work for note in writer.notes())  # all shards have damage
        for writer in work:
            writer.begin(again, {"pictures": source_hash(begun)})
            writer.forget(lambda note: any(name in there for _, name, *_ in note["damaged"]))  # to try them again

    processes.from_main(begin)
    begun = begun_with(photos, work)
    shards = shards_of(begun, heldout, options.shard_size)
    for part, writer in writers.items():
        writer.ranges = shards[part]
    processes.from_main(lambda: work[0].check_space(sum(writer.rows(writer.missing()) for writer in work)))
    for line in describe(photos, writers, options):
        processes.say(line)
    encode = autoencoder.encoder(model, latents, options.precision)
    for writer in work:
        make_shards(writer, begun, encode, options, processes)
    if options.on_error == "stop":
        processes.from_main(lambda: check_damage(begun, work))
    if processes.main:
        finish(begun, work, writers, options, processes)


def open_photos(options: PhotoOptions) -> Photos:
    """Open and check the pictures of options.source. Raises ValueError or OSError if they or the options do not fit."""
    out, source = Path(options.out), Path(options.source)
    if source.is_dir() and source.resolve() in (out.resolve(), *out.resolve().parents):
        raise ValueError(f"out {out} lies inside source {source}, among its pictures; choose another place")
    if options.autoencoder == "none" and options.keep_pictures:
        raise ValueError("keep_pictures=true would keep what autoencoder=none stores already: leave one of them out")
    if options.autoencoder == "none" and options.precision != "fp32":
        raise ValueError(f"precision={options.precision} is of the autoencoder, but autoencoder=none has none")
    photos = find_photos(source, options.root, options.labels, options.captions)
    photos.check(options.on_error == "skip", options.allow_empty)
    if photos.heldout and options.heldout is not None:
        held = f"{photos.where} holds out {photos.heldout.rstrip('/')} itself"
        raise ValueError(f"{held}: leave heldout={options.heldout} out, or choose one split by root=")
    if not options.enlarge:
        check_sizes(photos, options.resolution)
    return photos


def open_writers(
    photos: Photos, heldout: float | int | str | None, latents: LatentSpec, options: PhotoOptions
) -> dict[str, DatasetWriter]:
    """Return {"train": writer, "heldout": writer} of the datasets to be made, or only "train" if `heldout` is None.
    `heldout` chooses the held-out pictures: a fraction, a count, or a prefix of names."""
    out = Path(options.out)
    plan = {key: getattr(options, key) for key in ("resolution", "precision", "shard_size")}
    plan["pictures"] = source_hash(photos)
    kept = (3, options.resolution, options.resolution) if options.keep_pictures else None
    besides = {"attribution": options.attribution} if options.attribution else {}
    if photos.captions is not None:
        besides["captions"] = content_hash("".join(json.dumps(captions) + "\n" for captions in photos.captions))
        besides |= {"captions_in": options.captions} if options.captions else {}
    if heldout is None:
        return {"train": DatasetWriter(out, latents, plan, kept, besides)}
    folders = {"train": out, "heldout": out.with_name(f"{out.name}-heldout")}
    plan["heldout"] = heldout
    return {part: DatasetWriter(folders[part], latents, {**plan, "part": part}, kept, besides) for part in folders}


def describe(photos: Photos, writers: dict[str, DatasetWriter], options: PhotoOptions) -> list[str]:
    """Return lines to print that describe the dataset to be made."""
    writer, count = writers["train"], len(photos)
    latents = writer.latents
    classes = f"in {len(photos.classes):,} classes, " if photos.classes != ONE_CLASS else ""
    lines = [f"  pictures  {count:,} {classes}{photos.where}"]
    if photos.captions is not None:
        counts = sorted(map(len, photos.captions))
        each = f"{counts[0]} to {counts[-1]}" if counts[0] < counts[-1] else str(counts[0])
        lines.append(f"  captions  {sum(counts):,}, {each} a picture")
    if heldout := writers.get("heldout"):
        by = photos.heldout or "chosen by a hash of their names"
        lines.append(f"  held out  {sum(map(len, heldout.ranges)):,} of them, {by.rstrip('/')}: {heldout.folder}")
    lines += [
        f"  crop      {options.resolution}², {'with' if options.flip else 'without'} flipped copies; "
        f"orientation={options.orientation}, alpha={options.alpha}",
        f"  encoder   {latents.autoencoder}, {options.precision}",
        f"  stores    {latents.stored_shape[1:]} {latents.dtype}, {size_text(count * latents.sample_bytes)}: "
        f"{stored_meaning(latents)}",
    ]
    if writer.pictures:
        size = size_text(count * writer.picture_bytes)
        lines.append(f"  keeps     the pictures too, {writer.pictures} uint8, {size}")
    if latents.autoencoder == "pixels" and (patch := autoencoder.patch_for(options.resolution)) > 2:
        many, few = ((options.resolution // side) ** 2 for side in (2, patch))
        lines.append(f"  note      {many:,} tokens a picture with model.patch_size=2, {few} with patch_size={patch}")
    return lines


def finish(
    photos: Photos,
    work: Iterable[DatasetWriter],
    writers: dict[str, DatasetWriter],
    options: PhotoOptions,
    processes: Processes,
) -> None:
    """Assemble the datasets of `work`, the unfinished ones among `writers`; write their reports, move them to their
    final names, and print a summary. `writers` is {"train": writer, "heldout": writer} or has only "train"."""
    made = {
        part: look_at(part, photos, writers, options, processes.device)
        for part, writer in writers.items()
        if writer in work
    }
    for part in sorted(made):  # heldout first: train's unfinished work lists the damaged pictures
        writers[part].publish(made[part])
    for part, report in made.items():
        folder = writers[part].folder
        if part == "heldout":
            counts = f"{report['count']:,} samples of {sum(map(bool, report['class_counts'].values())):,} classes"
            processes.say(f"  held out  {folder}: {counts}, for the evaluation loss")
            for text in told("  left out  of the pictures held out", report["left_out"]):
                processes.say(text)
            continue
        processes.say(report_text(report))
        if (folder / "report.png").exists():
            processes.say(f"  pictures  {folder / 'report.png'}: photo, decoded latents")
        processes.say(f"  dataset   {folder}: train with dataset=folder dataset.path={folder}")
        if photos.captions is not None:
            processes.say(f"  text      encode its captions: python scripts/prepare_text.py dataset={folder} encoder=…")


def look_at(
    part: str, photos: Photos, writers: dict[str, DatasetWriter], options: PhotoOptions, device: torch.device
) -> dict:
    """Write index.json and any captions of the dataset `part`, a key of `writers`, once its shards are made. Returns a
    report on it, a dict. If options.decode is above 0, report.png shows up to that many photos next to their decoded
    latents. Raises ValueError if a class has no training picture, unless options.allow_empty is set."""
    writer, other = writers[part], "train" if part == "heldout" else "heldout"
    fields = {other: f"../{writers[other].folder.name}"} if other in writers else {}
    fields |= {"attribution": options.attribution} if options.attribution else {}
    writer.assemble(**fields)
    notes, there = list(writer.notes()), photos.there
    damaged = {name: why for note in notes for _, name, _, why in note["damaged"]}
    left_out = [(name, why) for name, why in damaged.items() if name in there]
    kept = [index for index in np.concatenate(writer.ranges).tolist() if photos.names[index] not in damaged]
    if photos.captions is not None:
        add_captions(writer.data, (photos.captions[index] for index in kept))
    data = LatentDataset(writer.data)
    made = dataset_numbers(data)
    empty = [name for name, count in made["class_counts"].items() if not count]
    if empty and not options.allow_empty and part == "train":
        how = f"repair some of {photos.where} and start the same command again, or set allow_empty=true"
        raise ValueError(f"no picture of {', '.join(empty[:5])} could be read; {how}")
    made |= {
        "enlarged": sum(note["enlarged"] for note in notes),
        "much_enlarged": [name for note in notes for name in note["much_enlarged"]],
        "left_out": [*photos.faults, *left_out] if part == "train" else left_out,
    }
    shown, crops = spread_indices(len(data), options.decode), Crops(photos, options.crop)
    read = {index: pixels for index in shown if (pixels := crops[kept[index]][0]) is not None}  # still there
    if read:
        chosen, before = np.array([*read]), torch.stack([*read.values()]).numpy()
        after = decode_samples(data, chosen, device)
        if data.latents.autoencoder != "pixels":  # pixels come back unchanged
            made["psnr"] = [psnr(*pair) for pair in zip(before, after)]
        with explain_failure(data.folder / "report.png"):
            pairs = np.stack([before, after], axis=1).reshape(-1, *before.shape[1:])
            save_grid(data.folder / "report.png", pairs, columns=2)
    return made


def dataset_numbers(data: LatentDataset) -> dict:
    """Return "count", "class_counts" (by name), "channel_mean" and "channel_std" of network latents (latents.py)."""
    latents = data.latents
    mean, std = map(np.array, data.statistics)
    if latents.channel_scale:  # by the autoencoder's own statistics
        mean, std = (mean - latents.channel_shift) * latents.channel_scale, std * latents.channel_scale
    by_class = dict(zip(latents.classes, np.bincount(data.labels, minlength=len(latents.classes)).tolist()))
    return {"count": len(data), "class_counts": by_class, "channel_mean": mean.tolist(), "channel_std": std.tolist()}


def decode_samples(data: LatentDataset, indices: np.ndarray, device: torch.device | str) -> np.ndarray:
    """Decode stored samples to pictures (n, 1 or 3, H, W) uint8. If the dataset stores a posterior's moments, the mean
    is decoded. Raises ValueError if the autoencoder is unknown, can't be loaded, or has another hash than recorded."""
    decoder = autoencoder.load_decoder(data.latents, device)
    stored = data.read(indices).stored
    return torch.cat([decoder(to_network(part.to(device), data.latents)).cpu() for part in stored.split(4)]).numpy()


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Return the peak signal-to-noise ratio of two uint8 pictures in dB; infinite if they are equal."""
    error = np.mean((a.astype(np.float64) - b) ** 2)
    return float("inf") if error == 0 else float(10 * np.log10(255**2 / error))


def report_text(report: dict) -> str:
    by_class, counts = report["class_counts"], list(report["class_counts"].values())
    span = f"{min(counts):,} to {max(counts):,}, median {int(np.median(counts)):,}"
    lines = {
        "samples": f"{report['count']:,} in {len(counts):,} classes",
        "by class": span if len(counts) > 20 else ", ".join(f"{name} {count:,}" for name, count in by_class.items()),
        "mean": "  ".join(f"{value:+.4f}" for value in report["channel_mean"]) + "  of network latents, by channel",
        "std": "  ".join(f"{value:7.4f}" for value in report["channel_std"]),
    }
    if values := report.get("psnr"):
        span = f"mean of {len(values)} pictures ({min(values):.2f}..{max(values):.2f})"
        lines["PSNR"] = f"{np.mean(values):.2f} dB after a round trip, {span}"
    if enlarged := report.get("enlarged"):
        lines["enlarged"] = f"{enlarged:,} pictures were smaller than the resolution"
    if much := report.get("much_enlarged"):
        lines["blurred"] = f"{len(much):,} of them enlarged more than 4 times, all in report.json: {listed(much)}"
    if left_out := report.get("left_out", []):
        lines["left out"] = f"{len(left_out):,} files, all listed in report.json"
    named = [f"    {name}: {why}" for name, why in left_out[:10]]
    text = "\n".join([*(f"  {name:<10}{value}" for name, value in lines.items()), *named])
    return text.encode(errors="backslashreplace").decode()  # file names may hold bytes that are not UTF-8


def stored_meaning(latents: LatentSpec) -> str:
    """Describe the stored numbers, e.g. "posterior mean and log-variance, unscaled; network latents are …"."""
    if latents.autoencoder == "pixels":
        return "pixels in −1..1"
    spread = {"logvar": "log-variance", "std": "standard deviation"}.get(latents.spread)
    content = f"posterior mean and {spread}" if spread else "latents"
    normalised = ", normalised by the autoencoder's statistics" * bool(latents.channel_scale)
    network = f"(z − {latents.shift:g})·{latents.scale:g}{normalised}"
    if latents.scale_applied:
        return f"{content}, on the network's scale {network}"
    return f"{content}, unscaled; network latents are {network}"
