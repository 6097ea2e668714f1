"""Readers of latents that other projects wrote, one for each kind of source. S is the side of square latents:

    maskdit_lmdb  MaskDiT's LMDB. z-<i>: float32 (8, S, S), mean and log-variance of the Stable Diffusion autoencoder's
                  posterior, unscaled; y-<i>: the label in decimal; length: the number of labels. With
                  flipped=true, length is 2N for N pictures, and z-<N + i> is the flipped copy of z-<i>.
    tread_tar     webdataset tars for TREAD's training. latent.npy: (4, S, S), samples of the posterior; cls: the label.
                  The files do not show whether samples are scaled, so the option scale_applied states it.
    repa_npy      REPA's folders. .npy files: float32 (8, S, S), mean and standard deviation, unscaled; dataset.json:
                  {"labels": [[file, label], …]}.
    lightningdit  LightningDiT's folders. latents_rank00_shard000.safetensors, …, numbered per process: latents, and
                  latents_flip for the mirrored pictures, float32 (n, C, S, S), samples of the posterior, unscaled;
                  labels (n,). latents_stats.pt (optional): mean and std (1, C, 1, 1) by channel, which
                  dataset.normalize uses. The files do not name their autoencoder.
    uvit_coco     U-ViT's folders of MS-COCO, which SiT and REPA train on too. <i>.npy: float32 (8, S, S), mean and
                  log-variance, unscaled; <i>_<k>.npy: float32 (77, 768), caption k of the picture, encoded by CLIP
                  ViT-L/14; empty_context.npy, here or in the parent folder: the empty caption, encoded. Pictures are
                  in the order of their MS-COCO ids. Padding is not marked, so all tokens count as words.

Each reader states what its numbers mean, and index.json records that; nothing is guessed from their values.
Before the first latent is read, labels and file names are checked, for uvit_coco also the sizes of files, and for
lightningdit the shapes of tensors. Other faults of a latent are found when it is read.
"""

import functools
import io
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from tread.data.captions import add_captions
from tread.data.columns import TextSpec
from tread.data.index import check_labels
from tread.data.latents import Dtype, LatentSpec
from tread.data.section_writer import TextWriter
from tread.encoders.autoencoder import UNKNOWN, located
from tread.models.conditions import Text
from tread.preparing.archives import Folder, Tar, tar_paths
from tread.preparing.coco import read_coco
from tread.preparing.photos import ONE_CLASS
from tread.preparing.sources import MOST_CLASSES, check_table, label_table
from tread.runtime.distributed import Processes
from tread.runtime.schema import Count, CountOrZero
from tread.runtime.tensor_files import listed, read_kind, what_is_wrong

SCALE, AUTOENCODER = 0.18215, "stabilityai/sd-vae-ft-ema"  # Stable Diffusion's
STATISTICS = "latents_stats.pt"
CLIP_TEXT = TextSpec("clip-l", None, 77, 768, None, padding=True)  # the weights' hash is not known
_MASKDIT = (
    ". MaskDiT's own tars hold pickled objects, which run code when they are read, or moments: import the LMDB they "
    "were made from (kind=maskdit_lmdb)"
)


@dataclass
class ForeignText:
    """Encoded captions of another project's data, in the order of the samples.

    counts    (n,) number of captions of each sample.
    read      function: caption number → its tokens (T, C). Captions are numbered sample after sample, from 0 to
              sum(counts) − 1; number sum(counts) is the empty caption.
    captions  each sample's captions as text; None if they are not known.
    """

    spec: TextSpec
    counts: np.ndarray
    read: Callable[[int], np.ndarray]
    captions: list[list[str]] | None


@dataclass
class ForeignSamples:
    """Another project's latents, in the order in which the dataset will store them.

    labels       (n,) int64.
    read         function: index → the source's numbers (views, C or 2C, S, S); the second view, if any, is mirrored.
    name         function: index → the sample's name in messages.
    spread       meaning of the second C of 2C channels, "logvar" or "std"; None: C channels, posterior samples.
    scaled       whether the source's numbers are already multiplied by `scale`.
    scale        factor from the autoencoder's latents to the network's, unless the options give another one.
    autoencoder  Hugging Face id of the autoencoder, unless the options name another one.
    normalize    whether training should normalise the latents by channel, by the option dataset.normalize=true.
    statistics   {"mean", "std"} per channel of unscaled latents, to normalise by; None if the source has none.
    text         the encoded captions; None if the source has none.
    """

    labels: Sequence[int]
    read: Callable[[int], np.ndarray]
    name: Callable[[int], str]
    spread: Literal["logvar", "std"] | None = None
    scaled: bool = False
    scale: float = SCALE
    autoencoder: str = AUTOENCODER
    normalize: bool = False
    statistics: dict[str, list[float]] | None = None
    text: ForeignText | None = None

    def __post_init__(self) -> None:
        self.labels = np.array(self.labels, dtype=np.int64)


def read_npy(content: bytes, where: object, shape: tuple[int, ...], hint: str = "") -> np.ndarray:
    """Parse the content of a .npy file that must have this `shape`; zeros in `shape` stand for the side S of square
    latents. float16 is kept, other numbers become float32. Raises ValueError, which names `where` and ends with `hint`,
    for another shape and for anything but a plain array of numbers."""
    try:
        array = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{where} is damaged or no plain array ({error}){hint}") from error
    side = array.shape[-1] if array.ndim else 0
    if array.shape != tuple(length or side for length in shape) or array.dtype.kind not in "fiu":
        expected = ", ".join(str(length or "S") for length in shape)
        raise ValueError(f"{where} has shape {array.shape} of {array.dtype}, but must be ({expected}){hint}")
    return array if array.dtype == np.float16 else array.astype(np.float32)


def _number(content: bytes | str | int, where: str) -> int:
    try:
        return int(content)
    except ValueError as error:
        raise ValueError(f"{where} is {content[:20]!r}, but must be a number") from error


def _maskdit(source: Path, options: "ImportOptions") -> ForeignSamples:
    try:
        import lmdb  # imported here because only this kind needs it
    except ImportError as error:
        raise ValueError("LMDB needs the package lmdb; pip install -r requirements-import.txt") from error
    try:
        opened = lmdb.open(
            str(source), create=False, subdir=source.is_dir(), readonly=True, lock=False, readahead=False
        )
    except lmdb.Error as error:
        raise ValueError(f"{source} can't be opened as an LMDB: {error}") from error
    file = source / "data.mdb" if source.is_dir() else source
    needed, size = (opened.info()["last_pgno"] + 1) * opened.stat()["psize"], file.stat().st_size
    if size < needed:  # reading beyond the end of a mapped file would kill the process
        raise ValueError(f"{source} is truncated: it has {size} bytes of {needed}")
    transaction = opened.begin(buffers=True)

    def get(key: str) -> bytes:
        value = transaction.get(key.encode())
        if value is None:
            raise ValueError(f"{source} has no entry {key}: it is truncated, or no MaskDiT LMDB (z-i, y-i, length)")
        return value

    def number(key: str) -> int:
        return _number(bytes(get(key)), f"{source}: entry {key}")

    length = number("length")
    count = length // 2 if options.flipped else length
    labels = [number(f"y-{index}") for index in range(length)]
    if options.flipped and labels[:count] != labels[count:]:
        halves = f"the labels of the first half of {length} entries are not those of the second"
        raise ValueError(f"{source}: {halves}: if there are no flipped copies, say flipped=false")

    def moments(key: str) -> np.ndarray:
        content = get(key)
        side = math.isqrt(len(content) // 32)
        if len(content) != 32 * side**2:
            raise ValueError(f"{source}: entry {key} has {len(content)} bytes, not float32 (8, S, S) moments")
        return np.frombuffer(content, np.float32).reshape(8, side, side)

    def read(index: int) -> np.ndarray:
        return np.stack([moments(f"z-{view}") for view in range(index, length, count)])

    return ForeignSamples(labels[:count], read, lambda index: f"z-{index}", "logvar")


def _tread(source: Path, options: "ImportOptions") -> ForeignSamples:
    if options.scale_applied is None:
        raise ValueError(
            "tread_tar holds samples whose scale can't be seen: say scale_applied=true if they were multiplied by "
            f"scale={options.scale or SCALE} before they were written (standard deviation near 1), else "
            "scale_applied=false (near 5)"
        )
    samples, labels = [], []
    for tar in map(Tar, tar_paths(source) or sorted(source.glob("*.tar")) or [source]):
        parts: dict[str, dict[str, str]] = {}
        for name in tar.names:
            folder, _, file = name.rpartition("/")
            key, _, extension = file.partition(".")
            parts.setdefault(f"{folder}/{key}", {})[extension] = name
        for key, sample in parts.items():
            if not {"latent.npy", "cls"} <= sample.keys():
                has = f"{tar.path}: sample {key.lstrip('/')} has {', '.join(sorted(sample))}"
                raise ValueError(f"{has}, but must have latent.npy and cls{_MASKDIT}")
            samples.append((tar, sample["latent.npy"]))
            labels.append(_number(tar.read(sample["cls"]), f"{tar.path}: {sample['cls']}"))

    def read(index: int) -> np.ndarray:
        tar, name = samples[index]
        return read_npy(tar.read(name), f"{tar.path}: {name}", (4, 0, 0), _MASKDIT)[None]

    return ForeignSamples(labels, read, lambda index: samples[index][1], scaled=options.scale_applied)


def _repa(source: Path, options: "ImportOptions") -> ForeignSamples:
    listing = source / "dataset.json"
    table = label_table(str(listing), listing.read_bytes())
    check_table(str(source), table, {name for name in Folder(source).names if name.endswith(".npy")})
    names = sorted(table)

    def read(index: int) -> np.ndarray:
        path = source / names[index]
        array = read_npy(path.read_bytes(), path, (8, 0, 0))
        if (array[4:] < 0).any():
            raise ValueError(f"{path} has standard deviations below 0: these are not REPA's moments (mean, std)")
        return array[None]

    labels = [_number(table[name], f"{listing}: the label of {name}") for name in names]
    return ForeignSamples(labels, read, names.__getitem__, "std")


# --------------------------------------------------------------------------------------- LightningDiT


def _lightningdit(source: Path, options: "ImportOptions") -> ForeignSamples:
    paths = sorted(source.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{source} is not there, or holds no .safetensors file of LightningDiT's extraction")
    _check_series(source, paths)
    views = ("latents", "latents_flip")[: 1 + options.flipped]
    shapes, labels, rows = [], [], []
    for path in paths:
        with _opened(path) as file:  # reads only the latents' header
            shapes.append(_check_header(path, file, views))
            labels += file.get_tensor("labels").tolist()
        if shapes[-1] != shapes[0]:
            raise ValueError(f"{path} has latents of shape {shapes[-1]}, but {paths[0].name} of {shapes[0]}")
        rows += [(path, row) for row in range(len(labels) - len(rows))]

    @functools.lru_cache(maxsize=1)  # samples are read in order, so one open file is enough
    def slices(path: Path) -> list:
        file = _opened(path)
        return [file.get_slice(view) for view in views]

    def read(index: int) -> np.ndarray:
        path, row = rows[index]
        sample = torch.cat([part[row : row + 1] for part in slices(path)])
        return (sample if sample.dtype == torch.float16 else sample.float()).numpy()

    def name(index: int) -> str:
        return f"{rows[index][0].name}, row {rows[index][1]},"

    file = source / STATISTICS
    statistics = read_statistics(file, shapes[0][0]) if file.exists() else None
    return ForeignSamples(labels, read, name, scale=1.0, autoencoder=UNKNOWN, normalize=True, statistics=statistics)


def _opened(path: Path):
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} can't be read: {what_is_wrong(path) or error}") from error


def _check_series(source: Path, paths: list[Path]) -> None:
    """Raise ValueError if latents_rank<number>_shard<number> files have gaps; missing last files can't be noticed."""
    matches = [re.fullmatch(r"latents_rank(\d+)_shard(\d+)", path.stem) for path in paths]
    there = {(int(match[1]), int(match[2])) for match in matches if match}
    before = {(rank, shard - 1) if shard else (rank - 1, 0) for rank, shard in there} - {(-1, 0)}
    if gaps := [f"latents_rank{rank:02d}_shard{shard:03d}" for rank, shard in sorted(before - there)]:
        raise ValueError(f"{source} has later shards, but not {listed(gaps)}: bring all files of one extraction")


def _check_header(path: Path, file: safe_open, views: Sequence[str]) -> tuple[int, ...]:
    """Return the shape (C, S, S) of the samples in an opened file. `views` are the names of the tensors that hold
    latents. Raises ValueError if a tensor or the labels are missing, or if the shapes disagree."""
    there = sorted(file.keys())
    if missing := [name for name in (*views, "labels") if name not in there]:
        raise ValueError(f"{path} holds {listed(there)}, but no {listed(missing)} (flipped=false needs no flipped)")
    shapes = {name: tuple(file.get_slice(name).get_shape()) for name in (*views, "labels")}
    latents = shapes["latents"]
    if len(latents) != 4 or latents[2] != latents[3]:
        raise ValueError(f"{path}: latents has shape {latents}, but must be (n, C, S, S)")
    for name, shape in shapes.items():
        if shape != (latents[:1] if name == "labels" else latents):
            raise ValueError(f"{path}: {name} has shape {shape}, but latents {latents}")
    return latents[1:]


def read_statistics(path: Path, channels: int) -> dict[str, list[float]]:
    """Read the unscaled latents' {"mean", "std"} per channel from a latents_stats.pt; no pickled code is run. Raises
    ValueError for another number of channels, a number that is not finite, or a std that is not positive."""
    tensors = read_kind(path, "any")[1]
    statistics = {key: tensors[key].double().flatten().tolist() for key in ("mean", "std") if key in tensors}
    if [*map(len, statistics.values())] != [channels, channels]:
        there = listed(f"{key} {tuple(tensor.shape)}" for key, tensor in tensors.items())
        raise ValueError(f"{path} holds {there}, but must hold mean and std of the latents' {channels} channels")
    if not np.isfinite([*statistics.values()]).all() or min(statistics["std"]) <= 0:
        raise ValueError(f"{path}: mean and std must be finite and std above 0, for latents are divided by it")
    return statistics


# ---------------------------------------------------------------------------------------------- U-ViT


def _uvit(source: Path, options: "ImportOptions") -> ForeignSamples:
    pattern = re.compile(r"\d+(_\d+)?\.npy")  # of pictures and of captions
    sizes = {entry.name: entry.stat().st_size for entry in os.scandir(source) if pattern.fullmatch(entry.name)}
    counted = Counter(int(name.partition("_")[0]) for name in sizes if "_" in name)
    numbers = range(max(1, len(sizes) - counted.total()))
    pictures = [f"{number}.npy" for number in numbers]
    texts = [f"{number}_{k}.npy" for number in numbers for k in range(counted[number] or 1)]
    if odd := sizes.keys() ^ {*pictures, *texts}:
        raise ValueError(f"{source}: files are missing, for the names have gaps before or at {listed(sorted(odd))}")
    for names in (pictures, texts):
        ((usual, _),) = Counter(sizes[name] for name in names).most_common(1)
        if damaged := [f"{name} has {sizes[name]}" for name in names if sizes[name] != usual]:
            raise ValueError(f"{source}: damaged files, {listed(damaged)} bytes, where others have {usual}")
    counts = np.array([counted[number] for number in numbers], dtype=np.int32)
    captions = None
    if options.captions is not None:
        path = Path(options.captions)
        captions = list(read_coco(path, path.read_bytes).values())
        if list(map(len, captions)) != counts.tolist():
            ours = f"{source} holds {len(counts):,} with {counts.sum():,}"
            lists = f"{path} lists {len(captions):,} pictures with {sum(map(len, captions)):,} captions"
            raise ValueError(f"{lists}, but {ours}, or others of them: name the annotations they were extracted by")
    empty = source / "empty_context.npy"
    empty = empty if empty.is_file() else source.parent / empty.name

    def read(index: int) -> np.ndarray:
        path = source / pictures[index]
        return read_npy(path.read_bytes(), path, (8, 0, 0))[None]

    def read_text(number: int) -> np.ndarray:
        path = source / texts[number] if number < len(texts) else empty
        return read_npy(path.read_bytes(), path, CLIP_TEXT.token_shape)

    read_text(len(texts))  # raises an error if the empty caption is missing
    text = ForeignText(CLIP_TEXT, counts, read_text, captions)
    return ForeignSamples(np.zeros(len(counts)), read, lambda index: f"{source}/{pictures[index]}", "logvar", text=text)


def write_text(folder: Path, text: ForeignText, processes: Processes) -> None:
    """Write encoded captions, and their text if known, into a dataset's folder; continue unfinished work."""
    if text.captions is not None:
        add_captions(folder, text.captions)

    def read(batches: Sequence[range]) -> Iterator[Text]:
        for rows in batches:
            tokens = torch.from_numpy(np.stack([text.read(row) for row in rows]))
            yield Text(tokens, torch.ones(tokens.shape[:2], dtype=torch.bool))  # padding isn't marked

    TextWriter(folder, text.spec, text.counts).make(processes, False, (), "caption", 64, read)


# ------------------------------------------------------------------------------------------ all kinds


KINDS = {
    "maskdit_lmdb": _maskdit,
    "tread_tar": _tread,
    "repa_npy": _repa,
    "lightningdit": _lightningdit,
    "uvit_coco": _uvit,
}
ForeignKind = Annotated[Literal[tuple(KINDS)], "pictures: prepare_latents.py"]


@dataclass(frozen=True)
class ImportOptions:
    """The options of configs/import_latents.yaml; the comments there explain each option and what its null means."""

    kind: ForeignKind
    source: str
    out: str
    autoencoder: str | None
    scale: float | None
    scale_applied: bool | None
    flipped: bool
    num_classes: Count | None
    classes: str | None
    captions: str | None
    dtype: Dtype
    shard_size: Count
    decode: CountOrZero


def open_foreign(options: ImportOptions) -> tuple[LatentSpec, ForeignSamples]:
    """Open options.source; return its LatentSpec and samples. Raises OSError if a file can't be read, ValueError if the
    source is damaged or empty, or if options do not fit it."""
    samples = KINDS[options.kind](Path(options.source), options)
    if options.scale_applied and not samples.scaled:
        raise ValueError(f"scale_applied=true, but {options.kind} holds unscaled numbers; leave scale_applied out")
    if options.captions is not None and samples.text is None:
        raise ValueError(f"captions={options.captions}, but {options.kind} has classes; leave captions out")
    if not len(samples.labels):
        raise ValueError(f"{options.source} holds no sample")
    if options.classes is not None:
        classes = tuple(Path(options.classes).read_text(encoding="utf-8-sig").rstrip().splitlines())
        if options.num_classes not in (None, len(classes)):
            raise ValueError(f"num_classes is {options.num_classes}, but {options.classes} names {len(classes)}")
    elif samples.text is not None and options.num_classes is None:
        classes = ONE_CLASS
    else:
        count = options.num_classes or int(samples.labels.max()) + 1
        classes = tuple(map(str, range(min(count, MOST_CLASSES))))
    check_labels(samples.labels, len(classes), options.source)
    views, channels, *size = samples.read(0).shape
    latents = LatentSpec(
        shape=(channels // 2 if samples.spread else channels, *size),
        classes=classes,
        autoencoder=located(options.autoencoder or samples.autoencoder),
        content="moments" if samples.spread else "latents",
        spread=samples.spread,
        scale=samples.scale if options.scale is None else options.scale,
        scale_applied=samples.scaled,
        dtype=options.dtype,
        views=views,
    )
    return latents, samples
