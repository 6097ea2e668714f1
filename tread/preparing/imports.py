"""Other people's latents: what each kind of source means, and how to read it.

    maskdit_lmdb  MaskDiT's LMDB. z-i: float32 (8, S, S), mean and log-variance of the Stable Diffusion
                  autoencoder's posterior, unscaled; y-i: the label in decimal; length. Of 2N entries
                  the second N are the flipped copies, i + N that of i.
    tread_tar     webdataset tars as TREAD trains on. latent.npy: (4, S, S), samples of the posterior;
                  cls: the label. Whether they are scaled can't be seen: whoever imports them says so.
    repa_npy      REPA's folders. .npy files float32 (8, S, S), mean and standard deviation, unscaled;
                  dataset.json: {"labels": [[file, label], …]}.
    lightningdit  LightningDiT's folders. *.safetensors: latents and latents_flip float32 (n, C, S, S), samples
                  of the posterior, unscaled, and labels (n,); latents_stats.pt: mean and std by channel,
                  which dataset.normalize takes. The autoencoder is not said.
    uvit_coco     U-ViT's folders of MS-COCO. {i}.npy: float32 (8, S, S), mean and log-variance, unscaled;
                  {i}_{k}.npy: float32 (77, 768), CLIP ViT-L/14's text of its captions; empty_context.npy.

KINDS fixes what each kind means, which goes into the dataset's index; nothing is guessed from the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from tread.data.index import check_labels
from tread.data.latents import Dtype, LatentSpec
from tread.encoders.autoencoder import UNKNOWN, located
from tread.preparing import lightningdit, uvit
from tread.preparing.archives import Folder, Tar, tar_paths
from tread.preparing.foreign import ForeignSamples, read_npy
from tread.preparing.photos import ONE_CLASS
from tread.preparing.sources import MOST_CLASSES, check_table, label_table
from tread.runtime.schema import Count, CountOrZero

SCALE, AUTOENCODER = 0.18215, "stabilityai/sd-vae-ft-ema"  # Stable Diffusion's
_MASKDIT = (
    ". MaskDiT's own tars hold pickled objects, which run code when they are read, or moments: import the LMDB they "
    "were made from (kind=maskdit_lmdb)"
)


def _maskdit(source: Path, options: ImportOptions) -> ForeignSamples:
    try:
        import lmdb  # imported here because it is asked for by this kind alone
    except ImportError as error:
        raise ValueError("LMDB needs the package lmdb; pip install -r requirements-import.txt") from error
    how = {"subdir": source.is_dir(), "readonly": True, "lock": False, "readahead": False, "create": False}
    try:
        opened = lmdb.open(str(source), **how)
    except lmdb.Error as error:
        raise ValueError(f"{source} can't be opened as an LMDB: {error}") from error
    file = source / "data.mdb" if source.is_dir() else source
    needed, size = (opened.info()["last_pgno"] + 1) * opened.stat()["psize"], file.stat().st_size
    if size < needed:  # to read beyond the end of a mapped file would end the process
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
    labels = np.array([number(f"y-{index}") for index in range(length)], dtype=np.int64)
    if options.flipped and not np.array_equal(labels[:count], labels[count:]):
        raise ValueError(
            f"{source}: the labels of the first half of {length} entries are not those of the second, so that one does "
            "not hold the flipped copies; if there are none, say flipped=false"
        )

    def moments(key: str) -> np.ndarray:
        content = get(key)
        side = math.isqrt(len(content) // 32)
        if len(content) != 32 * side**2:
            raise ValueError(f"{source}: entry {key} has {len(content)} bytes, not float32 (8, S, S) moments")
        return np.frombuffer(content, np.float32).reshape(8, side, side)

    def read(index: int) -> np.ndarray:
        return np.stack([moments(f"z-{view}") for view in range(index, length, count)])

    return ForeignSamples(labels[:count], read, lambda index: f"z-{index}")


def _tread(source: Path, options: ImportOptions) -> ForeignSamples:
    samples, labels = [], []
    for tar in map(Tar, tar_paths(source) or sorted(source.glob("*.tar")) or [source]):
        parts: dict[str, dict[str, str]] = {}
        for name in tar.names:
            folder, _, file = name.rpartition("/")
            key, _, extension = file.partition(".")
            parts.setdefault(f"{folder}/{key}", {})[extension] = name
        for key, sample in parts.items():
            if not {"latent.npy", "cls"} <= sample.keys():
                raise ValueError(
                    f"{tar.path}: sample {key.lstrip('/')} has {', '.join(sorted(sample))}, but must have latent.npy "
                    f"and cls{_MASKDIT}"
                )
            samples.append((tar, sample["latent.npy"]))
            labels.append(_number(tar.read(sample["cls"]), f"{tar.path}: {sample['cls']}"))

    def read(index: int) -> np.ndarray:
        tar, name = samples[index]
        return read_npy(tar.read(name), f"{tar.path}: {name}", (4, 0, 0), _MASKDIT)[None]

    return ForeignSamples(np.array(labels, dtype=np.int64), read, lambda index: samples[index][1])


def _repa(source: Path, options: ImportOptions) -> ForeignSamples:
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
    return ForeignSamples(np.array(labels, dtype=np.int64), read, names.__getitem__)


def _number(content: bytes | str | int, where: str) -> int:
    try:
        return int(content)
    except ValueError as error:
        raise ValueError(f"{where} is {content[:20]!r}, but must be a number") from error


@dataclass(frozen=True)
class SourceKind:
    """What sources of a kind hold.

    open                what reads one.
    spread              how moments hold their spread, see LatentSpec; None: these are samples.
    scale, autoencoder  unless the options set others.
    scaled              whether stored numbers may be scaled already.
    normalize           whether they are for dataset.normalize=true.
    """

    open: Callable[[Path, ImportOptions], ForeignSamples]
    spread: Literal["logvar", "std"] | None = None
    scale: float = SCALE
    autoencoder: str = AUTOENCODER
    scaled: bool = False
    normalize: bool = False


KINDS = {
    "maskdit_lmdb": SourceKind(_maskdit, "logvar"),
    "tread_tar": SourceKind(_tread, scaled=True),
    "repa_npy": SourceKind(_repa, "std"),
    "lightningdit": SourceKind(
        lambda source, options: lightningdit.open_shards(source, options.flipped), None, 1.0, UNKNOWN, normalize=True
    ),
    "uvit_coco": SourceKind(lambda source, options: uvit.open_folder(source, options.captions), "logvar"),
}
ForeignKind = Annotated[Literal[tuple(KINDS)], "pictures: prepare_latents.py"]


@dataclass(frozen=True)
class ImportOptions:
    """configs/import_latents.yaml, which explains them. None:

    scale, autoencoder  those of the kind.
    scale_applied       not said, though tread_tar must.
    num_classes         the largest label + 1.
    classes             numbers are the names.
    captions            of uvit_coco: the captions stay unknown as text.
    """

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
    """Open a source of a kind. Raises OSError, or ValueError for one that is not what its kind says."""
    kind = KINDS[options.kind]
    scale = kind.scale if options.scale is None else options.scale
    if kind.scaled and options.scale_applied is None:
        raise ValueError(
            f"{options.kind} holds samples whose scale can't be seen: say scale_applied=true if they were multiplied "
            f"by scale={scale} before they were written (standard deviation near 1), else scale_applied=false (near 5)"
        )
    if options.scale_applied and not kind.scaled:
        raise ValueError(f"scale_applied=true, but {options.kind} holds unscaled numbers; leave scale_applied out")
    samples = kind.open(Path(options.source), options)
    if options.captions is not None and samples.text is None:
        raise ValueError(f"captions={options.captions}, but {options.kind} has classes; leave captions out")
    if not len(samples.labels):
        raise ValueError(f"{options.source} holds no sample")
    if options.classes is not None:
        classes = tuple(Path(options.classes).read_text().splitlines())
    elif samples.text is not None and options.num_classes is None:
        classes = ONE_CLASS
    else:
        count = options.num_classes or int(samples.labels.max()) + 1
        classes = tuple(map(str, range(min(count, MOST_CLASSES))))
    check_labels(samples.labels, len(classes), options.source)
    views, channels, *size = samples.read(0).shape
    latents = LatentSpec(
        shape=(channels // 2 if kind.spread else channels, *size),
        classes=classes,
        content="moments" if kind.spread else "latents",
        spread=kind.spread,
        scale=scale,
        scale_applied=bool(options.scale_applied),
        views=views,
        autoencoder=located(options.autoencoder or kind.autoencoder),
        dtype=options.dtype,
    )
    return latents, samples
