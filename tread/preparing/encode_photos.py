"""Photos → a dataset of latents: checked, read, cropped, encoded and written, then reported in numbers and pictures.

`prepare_latents` checks everything before long work, which processes share. Started again after it was stopped, it
goes on with the shards that are missing.

Pictures are read and cropped by worker processes while the autoencoder runs. A shard is a fixed range of pictures,
encoded in batches that never cross it; so what a shard holds depends on the pictures, the autoencoder, the device and
the batch size alone, and not on who makes it or what was done before. (The last bits of a CPU's results depend on its
number of threads, too.)
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from tread.data.captions import add_captions
from tread.data.dataset import LatentDataset
from tread.data.latents import Alpha, Dtype, LatentSpec, Orientation, to_network
from tread.data.writer import DatasetWriter
from tread.drawing.grids import save_grid
from tread.encoders import autoencoder
from tread.encoders.autoencoder import LatentEncoder
from tread.preparing.heldout import held_out
from tread.preparing.images import Crop, centre_crop, read_rgb
from tread.preparing.photos import ONE_CLASS, Photos, captions_hash, named
from tread.preparing.sources import find_photos
from tread.runtime.device import use_precision
from tread.runtime.distributed import Processes
from tread.runtime.files import explain_failure, size_text, write_whole
from tread.runtime.schema import Count, CountOrZero, Fraction
from tread.runtime.tensor_files import listed

MUCH = 4  # pictures that are enlarged more times are named in the report


@dataclass
class Crops(Dataset):
    """index → (pixels (3, size, size) uint8 or None, why it could not be read, its size)."""

    photos: Photos
    crop: Crop

    def __getitem__(self, index: int) -> tuple[Tensor | None, str, tuple[int, int]]:
        try:
            image = read_rgb(self.photos.read(index), self.crop.orientation, self.crop.alpha)
            pixels = torch.from_numpy(centre_crop(image, self.crop.size).transpose(2, 0, 1).copy())
        except (OSError, ValueError) as error:
            return None, str(error) or type(error).__name__, (0, 0)
        return pixels, "", image.size

    def __len__(self) -> int:
        return len(self.photos)


def collate(crops: list[tuple]) -> tuple[Tensor | None, list[tuple]]:
    """One tensor for a batch, as each tensor that a worker hands over takes a file descriptor."""
    good = [pixels for pixels, *_ in crops if pixels is not None]
    batch = torch.stack(good) if good else None
    if good and get_worker_info() is not None:
        batch.share_memory_()  # here, where a failure is raised: the queue's own thread would lose the batch
    return batch, [rest for _, *rest in crops]


def end_with(process: int, worker: int) -> None:
    """Let a reading process end when the one it reads for is gone: PyTorch watches its parent, a fork server."""

    def watch() -> None:
        while True:
            try:
                os.kill(process, 0)
            except ProcessLookupError:
                os._exit(1)
            time.sleep(1)

    threading.Thread(target=watch, daemon=True, name="end with").start()


def read_crops(
    photos: Photos, crop: Crop, batches: Iterable[np.ndarray], workers: int
) -> Iterator[tuple[Tensor | None, list[tuple]]]:
    """What `collate` makes of each batch of indices, read by worker processes. Raises OSError if one died."""
    sampler, start = [indices.tolist() for indices in batches], partial(end_with, os.getpid())
    options = {"num_workers": workers, "collate_fn": collate, "worker_init_fn": start}
    try:
        yield from DataLoader(Crops(photos, crop), batch_sampler=sampler, **options)
    except RuntimeError as error:  # of PyTorch, where a worker died
        raise OSError(
            f"a reading process ended: {error}\nIt may have had too little (shared) memory, or a file size limit: try "
            "fewer workers, or a smaller batch_size. What was done before is kept"
        ) from error


def pieces_of(numbers: range | np.ndarray, size: int) -> list[range | np.ndarray]:
    """Numbers in pieces of one size, such as shards or batches; the last one may be smaller."""
    return [numbers[first : first + size] for first in range(0, len(numbers), size)]


def source_hash(classes: Sequence[str], names: Sequence[str], labels: np.ndarray) -> str:
    """Hex sha256 of the pictures' names, labels and classes: what an unfinished dataset was begun with."""
    digest = hashlib.sha256("\0".join((*classes, *names)).encode(errors="surrogateescape"))
    digest.update(labels.tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Begun:
    """The pictures as they were when the work was begun: those of now, and damaged ones that were removed since.

    names, labels  of them all.
    at             (n,) where the pictures of now are among them.
    """

    names: Sequence[str]
    labels: np.ndarray
    at: np.ndarray

    def cut(self, classes: int, heldout: float | int | str | None, shard_size: int) -> dict[str, list[np.ndarray]]:
        """{"train" and, if some are held out, "heldout"} → the pictures of each shard, as indices into those of now."""
        parts = {"train": np.ones(len(self.names), dtype=bool)}
        if heldout is not None:
            out = held_out(self.names, self.labels, classes, heldout)
            parts = {"train": ~out, "heldout": out}
        cuts = {part: pieces_of(np.flatnonzero(chosen), shard_size) for part, chosen in parts.items()}
        return {part: list(map(self._now, cut)) for part, cut in cuts.items()}

    def _now(self, places: np.ndarray) -> np.ndarray:
        """Indices into the pictures of now of those that were at some places."""
        indices = np.searchsorted(self.at, places)
        there = self.at[np.minimum(indices, len(self.at) - 1)] == places
        return indices[there]


class Damage:
    """Pictures that could not be read, kept beside unfinished work: a file for each shard that lacks them.

    By them the work goes on in the same shards when they were removed from the source.
    """

    def __init__(self, folder: Path, photos: Photos) -> None:
        self.folder, self.photos = folder, photos

    def _of(self, files: Iterable[Path]) -> list[tuple[int, str, str, str]]:
        """(where it was among the pictures, its name, its class, why it can't be read) of pictures, in order."""
        return sorted(tuple(picture) for file in files if file.exists() for picture in json.loads(file.read_text()))

    def _gone(self, files: Iterable[Path]) -> list[tuple[int, str, str, str]]:
        """Those that were removed since; not of classes that went with them, whose work is another."""
        damaged = self._of(files)
        there, classes = (set(self.photos.names), set(self.photos.classes)) if damaged else ((), ())
        return [picture for picture in damaged if picture[1] not in there and picture[2] in classes]

    def begun(self) -> Begun:
        """The pictures that the work was begun with."""
        names, labels = list(self.photos.names), self.photos.labels.tolist()
        gone = self._gone(self.folder.glob("*.json"))
        for place, name, its_class, _ in gone:
            names.insert(place, name)
            labels.insert(place, self.photos.classes.index(its_class))
        at = np.setdiff1d(np.arange(len(names)), [place for place, *_ in gone])
        return Begun(names, np.array(labels, dtype=np.int64), at)

    def keep(self, shard: str, damaged: list[tuple[int, str, str, str]]) -> None:
        """Write down the damaged pictures of a shard."""
        file = self.folder / f"{shard}.json"
        with explain_failure(file):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps([*damaged, *self._gone([file])]) + "\n")

    def check(self, shards: Iterable[str]) -> None:
        """Raise ValueError that names the damaged pictures of shards which could not be made."""
        files = [self.folder / f"{shard}.json" for shard in shards]
        gone = {name for _, name, *_ in self._gone(files)}
        damaged = [(name, why) for _, name, _, why in self._of(files) if name not in gone]
        if damaged:
            listed = named(damaged, "can't be read as a picture ({})")
            raise ValueError(
                f"{self.photos.where}: damaged pictures, {len(damaged):,} in all{listed}\nReplace or remove them and "
                "start the same command again: it goes on with what is done. Or leave such files out with on_error=skip"
            )


@dataclass(frozen=True)
class Piece:
    """A shard that is to be made: by which writer, which number, of which pictures, and its name in Damage."""

    writer: DatasetWriter
    number: int
    pictures: np.ndarray
    name: str


def check_sizes(photos: Photos, resolution: int) -> None:
    """Raise ValueError if most of some pictures, spread over all, are smaller than the resolution asked for."""
    crops = Crops(photos, Crop(resolution))
    looked = (crops[int(number)] for number in spread_indices(len(photos), 32))
    sizes = [min(size) for _, why, size in looked if not why]
    if sizes and np.median(sizes) < resolution:
        raise ValueError(
            f"the pictures of {photos.where} are smaller ({int(np.median(sizes))} pixels along the shorter side, the "
            f"median of {len(sizes)}) than resolution={resolution}; choose a lower one, or enlarge=true"
        )


def make_shards(
    photos: Photos,
    pieces: Sequence[Piece],
    encode: LatentEncoder,
    damage: Damage,
    begun: Begun,
    options: PhotoOptions,
    processes: Processes,
) -> None:
    """Write shards, with a progress bar, and the speed at the end.

    Notes for each shard which pictures were left out, how many were enlarged, and which more than MUCH times.

    damage  where damaged pictures are written down, of whose shards nothing is written; on_error=skip leaves them out.
    """
    batch_size = options.batch_size or (2 if processes.device.type == "cpu" else 32)
    batches, stops = [pieces_of(piece.pictures, batch_size) for piece in pieces], options.on_error == "stop"
    workers = min(16, processes.cores) if options.workers is None else options.workers
    coming = read_crops(photos, options.crop, itertools.chain.from_iterable(batches), workers)
    total = sum(len(piece.pictures) for piece in pieces)
    began, waited = time.perf_counter(), 0.0
    with processes.bar("encoding", total) as bar:
        for piece, parts in zip(pieces, batches):
            stored, kept, labels, left_out, enlarged, much_enlarged, damaged = [], [], [], [], 0, [], []
            for indices in parts:
                asked = time.perf_counter()
                pixels, notes = next(coming)
                waited += time.perf_counter() - asked
                for index, (why, size) in zip(indices.tolist(), notes):
                    name, label = photos.names[index], int(photos.labels[index])
                    if why:
                        left_out.append((name, why))
                        damaged.append((int(begun.at[index]), name, photos.classes[label], why))
                        continue
                    labels.append(label)
                    enlarged += min(size) < options.resolution
                    if MUCH * min(size) < options.resolution:
                        much_enlarged.append(name)
                if pixels is not None and not (damaged and stops):
                    stored.append(encode(pixels))
                    if piece.writer.pictures:
                        kept.append(pixels.numpy().copy())  # not in the memory that a worker shares with us
                bar.update(len(indices))
            if damaged and stops:
                damage.keep(piece.name, damaged)
                continue
            whole = np.concatenate(stored) if stored else np.zeros((0, *piece.writer.latents.stored_shape), np.float32)
            numbers = np.array(labels, dtype=np.int64)
            pictures = np.concatenate(kept) if kept else np.zeros((0, *(piece.writer.pictures or ())), np.uint8)
            counts = {"left_out": left_out, "enlarged": enlarged, "much_enlarged": much_enlarged}
            piece.writer.write(piece.number, whole, numbers, pictures if piece.writer.pictures else None, **counts)
    if total:
        wall = time.perf_counter() - began
        processes.say(
            f"  speed     {total / wall:.1f} images/s a process, of whose time {100 * waited / wall:.1f}% waiting for "
            f"pictures from {workers} reading processes"
        )


@dataclass(frozen=True)
class PhotoOptions:
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
        """How pictures are cropped."""
        return Crop(self.resolution, self.orientation, self.alpha)


def prepare_latents(options: PhotoOptions, processes: Processes) -> None:
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
    folders, plans = {"train": out}, {"train": plan}
    if heldout is not None:
        folders["heldout"] = out.with_name(f"{out.name}-heldout")
        plans = {part: {**plan, "heldout": heldout, "part": part} for part in folders}
    writers = {part: DatasetWriter(folders[part], latents, plans[part], crop_shape, said) for part in folders}
    unfinished = {part: writer for part, writer in writers.items() if not writer.is_finished()}
    for part, writer in writers.items():
        if part not in unfinished:
            processes.say(f"{writer.folder} is finished")
    if not unfinished:
        return
    first = next(iter(unfinished.values()))
    damage = Damage(first.work / "damaged", photos)
    with processes.main_first():
        if processes.main:
            for writer in unfinished.values():
                writer.check_free()
            pictures = damage.begun()
            pictures.cut(len(photos.classes), heldout, options.shard_size)  # which may be refused
            pictures = source_hash(photos.classes, pictures.names, pictures.labels)
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
        first.check_space(sum(len(piece.pictures) for piece in pieces))
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
    processes.say(f"  stores    {stored}: {stored_meaning(latents)}")
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
    mine, encode = pieces[processes.rank :: processes.count], autoencoder.encoder(model, latents, options.precision)
    make_shards(photos, mine, encode, damage, begun, options, processes)
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
    options: PhotoOptions,
    processes: Processes,
) -> None:
    """Assemble the datasets, look at them, write their reports, and give them their names."""
    made = {}
    for part, writer in unfinished.items():
        other = next((writers[other].folder for other in writers if other != part), None)
        fields = {"train" if part == "heldout" else "heldout": os.path.relpath(other, writer.folder)} if other else {}
        fields |= {"attribution": options.attribution} if options.attribution else {}
        made[part] = look_at(part, photos, writer, shards[part], fields, options, processes.device)
    for part in sorted(made):  # what is held out first: the work on the rest knows what was damaged
        unfinished[part].publish(made[part])
    for part in made:
        folder, report = writers[part].folder, made[part]
        if part == "heldout":
            classes = sum(map(bool, report["class_counts"].values()))
            counts = f"{report['count']:,} samples of {classes:,} classes"
            processes.say(f"  held out  {folder}: {counts}, for the evaluation loss")
            continue
        processes.say(report_text(report))
        if options.decode:
            processes.say(f"  pictures  {folder / 'report.png'}: photo, decoded latents")
        processes.say(f"  dataset   {folder}: train with dataset=folder dataset.path={folder}")
        if photos.captions is not None:
            processes.say(f"  text      encode its captions: python scripts/prepare_text.py dataset={folder} encoder=…")


def look_at(
    part: str,
    photos: Photos,
    writer: DatasetWriter,
    shards: list[np.ndarray],
    fields: dict[str, str],
    options: PhotoOptions,
    device: torch.device,
) -> dict:
    """Assemble a dataset and return its report; shards are indices into photos, fields further ones of index.json."""
    notes = writer.notes(len(shards))
    skipped = {name for note in notes for name, _ in note["left_out"]}
    kept = [index for index in np.concatenate(shards).tolist() if photos.names[index] not in skipped]
    writer.assemble(len(shards), **fields)
    if photos.captions is not None:
        add_captions(writer.data, (photos.captions[index] for index in kept))
    data = LatentDataset(writer.data)
    made = dataset_numbers(data)
    empty = [name for name, count in made["class_counts"].items() if not count]
    if empty and not options.allow_empty and part == "train":
        writer.forget(number for number, note in enumerate(notes) if note["left_out"])
        raise ValueError(
            f"no picture of {', '.join(empty[:5])} could be read; repair some of {photos.where} and start the same "
            "command again, or set allow_empty=true"
        )
    refused = [*photos.refused, *photos.unpaired] if part == "train" else []
    left_out = [*refused, *(tuple(fault) for note in notes for fault in note["left_out"])]
    made |= {
        "enlarged": sum(note["enlarged"] for note in notes),
        "much_enlarged": [name for note in notes for name in note.get("much_enlarged", [])],  # not in older notes
        "left_out": left_out,
    }
    if options.decode:
        chosen = spread_indices(len(data), options.decode)
        crops = Crops(photos, options.crop)
        before = np.stack([crops[kept[index]][0].numpy() for index in chosen])
        after = decode_samples(data, chosen, device)
        if data.latents.autoencoder != "pixels":  # which come back as they were
            made["psnr"] = [psnr(*pair) for pair in zip(before, after)]
        with explain_failure(data.folder / "report.png"):
            pairs = np.stack([before, after], axis=1).reshape(-1, *before.shape[1:])
            save_grid(data.folder / "report.png", pairs, columns=2)
    return made


def dataset_numbers(data: LatentDataset) -> dict:
    """Counts by class, and each channel's mean and standard deviation of network latents."""
    mean, std = data.statistics
    counts = np.bincount(data.labels, minlength=len(data.latents.classes))
    return {
        "count": len(data),
        "class_counts": dict(zip(data.latents.classes, counts.tolist())),
        "channel_mean": list(mean),
        "channel_std": list(std),
    }


def spread_indices(count: int, pictures: int) -> np.ndarray:
    """Some indices in 0..count−1, spread over all."""
    return np.unique(np.linspace(0, count - 1, pictures).round().astype(int))


def decode_samples(data: LatentDataset, indices: np.ndarray, device: torch.device) -> np.ndarray:
    """Stored samples as pictures (n, 1 or 3, H, W) uint8; moments by their mean. Raises as load_decoder does."""
    decoder = autoencoder.load_decoder(data.latents, device)
    stored = data.read(indices).stored
    parts = [decoder(to_network(part.to(device), data.latents)).cpu() for part in stored.split(4)]
    return torch.cat(parts).numpy()


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Peak signal-to-noise ratio of two uint8 pictures in dB; infinite if they are equal."""
    error = np.mean((a.astype(np.float64) - b) ** 2)
    return float("inf") if error == 0 else float(10 * np.log10(255**2 / error))


def report_text(report: dict) -> str:
    """The report as lines to print."""
    counts = list(report["class_counts"].values())
    lines = {"samples": f"{report['count']:,} in {len(counts):,} classes"}
    if len(counts) <= 20:
        lines["by class"] = ", ".join(f"{name} {count:,}" for name, count in report["class_counts"].items())
    else:
        lines["by class"] = f"{min(counts):,} to {max(counts):,}, median {int(np.median(counts)):,}"
    lines["mean"] = "  ".join(f"{value:+.4f}" for value in report["channel_mean"]) + "  of network latents, by channel"
    lines["std"] = "  ".join(f"{value:7.4f}" for value in report["channel_std"])
    if report.get("psnr"):
        values = report["psnr"]
        span = f"mean of {len(values)} pictures ({min(values):.2f}..{max(values):.2f})"
        lines["PSNR"] = f"{np.mean(values):.2f} dB after a round trip, {span}"
    if report.get("enlarged"):
        lines["enlarged"] = f"{report['enlarged']:,} pictures were smaller than the resolution"
    if much := report.get("much_enlarged"):
        lines["blurred"] = f"{len(much):,} of them enlarged more than 4 times, all in report.json: {listed(much)}"
    if left_out := report.get("left_out", []):
        lines["left out"] = f"{len(left_out):,} files, all listed in report.json"
    named = [f"    {name}: {why}" for name, why in left_out[:10]]
    lines = [f"  {name:<10}{value}" for name, value in lines.items()] + named
    return "\n".join(lines).encode(errors="backslashreplace").decode()  # file names may be of bytes that are no UTF-8


def stored_meaning(latents: LatentSpec) -> str:
    """What stored numbers are, in words."""
    spread = {"logvar": "log-variance", "std": "standard deviation"}.get(latents.spread)
    content = f"posterior mean and {spread}" if spread else "latents"
    if latents.autoencoder == "pixels":
        return "pixels in −1..1"
    if latents.scale_applied:
        return f"{content}, on the network's scale (z − {latents.shift:g})·{latents.scale:g}"
    return f"{content}, unscaled; network latents are (z − {latents.shift:g})·{latents.scale:g}"
