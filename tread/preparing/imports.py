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

A kind's meaning is fixed here and goes into the dataset's index; nothing is guessed from the numbers.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from tread.data.latents import Dtype, LatentSpec
from tread.encoders.autoencoder import UNKNOWN, located
from tread.preparing import lightningdit, uvit
from tread.preparing.archives import Folder, Tar, tar_paths
from tread.preparing.sources import MOST_CLASSES, ONE_CLASS, check_table, label_table
from tread.preparing.uvit import ForeignText
from tread.runtime.schema import Count, CountOrZero

ForeignKind = Annotated[
    Literal["maskdit_lmdb", "tread_tar", "repa_npy", "lightningdit", "uvit_coco"], "pictures: prepare_latents.py"
]
SCALE, AUTOENCODER = 0.18215, "stabilityai/sd-vae-ft-ema"  # of all kinds but lightningdit, unless set
_MASKDIT = (
    ". MaskDiT's own tars hold pickled objects, which run code when they are read, or moments: import the LMDB they "
    "were made from (kind=maskdit_lmdb)"
)


@dataclass
class ForeignLatents:
    """Latents of someone else, in the source's order.

    latents     what they mean.
    labels      (n,) int64.
    read        index → (views, C or 2C, S, S), as stored in the source.
    name        index → what to call a sample in a message.
    normalize   {"mean", "std"} by channel of network latents that the source says to normalise by; None: it says none.
    text        what its encoder made of captions; None: it has none.
    """

    latents: LatentSpec
    labels: np.ndarray
    read: Callable[[int], np.ndarray]
    name: Callable[[int], str]
    normalize: dict[str, list[float]] | None = None
    text: ForeignText | None = None


@dataclass(frozen=True)
class ImportOptions:
    """configs/import_latents.yaml. As to the source:

    flipped        maskdit_lmdb: whether the second half are flipped copies; lightningdit: whether to take them.
    scale          network latents = z·scale; None: Stable Diffusion's, of lightningdit 1.
    scale_applied  tread_tar: whether the stored numbers already are z·scale; must be said.
    num_classes    None: the largest label + 1.
    autoencoder    which decodes the latents; None: Stable Diffusion's, of lightningdit "unknown".
    captions       uvit_coco: MS-COCO's annotations, for the captions themselves; None: they stay unknown.
    """

    kind: ForeignKind
    source: str
    out: str
    autoencoder: str | None
    scale: float | None
    scale_applied: bool | None
    flipped: bool
    num_classes: int | None
    classes: str | None
    captions: str | None
    dtype: Dtype
    shard_size: Count
    decode: CountOrZero


def open_foreign(options: ImportOptions) -> ForeignLatents:
    """Open a source of a kind. Raises FileNotFoundError, or ValueError for one that is not what its kind says."""
    kind, source, statistics, text = options.kind, Path(options.source), None, None
    scale_applied, num_classes, captions = options.scale_applied, options.num_classes, options.captions
    usual = (1.0, UNKNOWN) if kind == "lightningdit" else (SCALE, AUTOENCODER)
    asked = (options.scale, options.autoencoder)
    scale, autoencoder = (theirs if given is None else given for theirs, given in zip(usual, asked))
    if kind != "tread_tar" and scale_applied:
        held = "latents" if kind == "lightningdit" else "moments"
        raise ValueError(f"scale_applied=true, but {kind} holds unscaled {held}; leave scale_applied out")
    if kind == "tread_tar" and scale_applied is None:
        raise ValueError(
            "tread_tar holds samples whose scale can't be seen: say scale_applied=true if they were multiplied by "
            f"scale={scale} before they were written (standard deviation near 1), else scale_applied=false (near 5)"
        )
    if captions is not None and kind != "uvit_coco":
        raise ValueError(f"captions={captions}, but {kind} has classes; leave captions out")
    if kind == "maskdit_lmdb":
        labels, read, name = _maskdit(source, options.flipped)
    elif kind == "tread_tar":
        labels, read, name = _tread(source)
    elif kind == "lightningdit":
        labels, read, name, statistics = lightningdit.open_shards(source, options.flipped)
    elif kind == "uvit_coco":
        labels, read, name, text = uvit.open_folder(source, captions and Path(captions))
    else:
        labels, read, name = _repa(source)
    if not len(labels):
        raise ValueError(f"{source} holds no sample")
    classes = int(labels.max()) + 1 if num_classes is None else num_classes
    if not 0 <= labels.min() <= labels.max() < classes <= MOST_CLASSES:
        raise ValueError(f"{source}: labels lie in {labels.min()}..{labels.max()}, but num_classes is {classes}")
    views, channels, *size = read(0).shape
    spread = {"maskdit_lmdb": "logvar", "uvit_coco": "logvar", "repa_npy": "std"}.get(kind)
    names = ONE_CLASS if text is not None and num_classes is None else None
    latents = LatentSpec(
        shape=(channels // 2 if spread else channels, *size),
        classes=names or tuple(str(number) for number in range(classes)),
        content="moments" if spread else "latents",
        spread=spread,
        scale=scale,
        scale_applied=bool(scale_applied),
        views=views,
        autoencoder=located(autoencoder),
        dtype=options.dtype,
    )
    factors = {"mean": scale, "std": abs(scale)}
    normalize = statistics and {key: [factor * value for value in statistics[key]] for key, factor in factors.items()}
    return ForeignLatents(latents, labels, read, name, normalize, text)


def _maskdit(source: Path, flipped: bool):
    try:
        import lmdb  # imported here because it is asked for by this kind alone
    except ImportError as error:
        raise ValueError("LMDB needs the package lmdb; pip install -r requirements-import.txt") from error
    if not source.exists():
        raise FileNotFoundError(f"{source} is not there; source must be an LMDB's folder or file")
    try:
        opened = lmdb.open(
            str(source), subdir=source.is_dir(), readonly=True, lock=False, readahead=False, create=False
        )
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
    if flipped and length % 2:
        raise ValueError(f"{source} has length {length}, which is odd: its second half can't be flipped copies")
    count = length // 2 if flipped else length
    labels = np.array([number(f"y-{index}") for index in range(length)], dtype=np.int64)
    if flipped and not np.array_equal(labels[:count], labels[count:]):
        at = int(np.flatnonzero(labels[:count] != labels[count:])[0])
        raise ValueError(
            f"{source}: entry {at} has label {labels[at]}, but {at + count} has {labels[at + count]}: the second half "
            "are not the flipped copies; if it has none, say flipped=false"
        )

    def read(index: int) -> np.ndarray:
        views = []
        for at in (index, index + count) if flipped else (index,):
            content = get(f"z-{at}")
            size = round((len(content) / 32) ** 0.5)
            if not size or len(content) != 32 * size * size:
                raise ValueError(f"{source}: entry z-{at} has {len(content)} bytes, not float32 (8, S, S) moments")
            views.append(np.frombuffer(content, np.float32).reshape(8, size, size))
        if len({view.shape for view in views}) > 1:
            raise ValueError(f"{source}: entry z-{index} and its flipped copy have different shapes")
        return np.stack(views)

    return labels[:count], read, lambda index: f"z-{index}"


def _tread(source: Path):
    samples, labels = [], []
    for tar in map(Tar, tar_paths(source)):
        parts: dict[str, dict[str, str]] = {}
        for name in tar.names:
            folder, _, file = name.rpartition("/")
            key, _, extension = file.partition(".")
            parts.setdefault(f"{folder}/{key}", {})[extension] = name
        for key, sample in parts.items():
            if "latent.npy" not in sample or "cls" not in sample:
                raise ValueError(
                    f"{tar.path}: sample {key.lstrip('/')} has {', '.join(sorted(sample))}, but must have latent.npy "
                    "and cls" + _MASKDIT * any(name.split(".")[0] == "latent" for name in sample)
                )
            samples.append((tar, sample["latent.npy"]))
            labels.append(_number(tar.read(sample["cls"]), f"{tar.path}: {sample['cls']}"))

    def read(index: int) -> np.ndarray:
        tar, name = samples[index]
        return _array(tar.read(name), f"{tar.path}: {name}", 4, _MASKDIT)

    return np.array(labels, dtype=np.int64), read, lambda index: samples[index][1]


def _repa(source: Path):
    listed = source / "dataset.json"
    if not listed.is_file():
        raise FileNotFoundError(f"{listed} is not there; source must be the folder that holds it and the .npy files")
    table = label_table(str(listed), listed.read_bytes())
    check_table(str(source), table, {name for name in Folder(source).names if name.endswith(".npy")})
    names = sorted(table)
    if named := [name for name in names if isinstance(table[name], str)]:
        raise ValueError(f"{listed}: the label of {named[0]} is {table[named[0]]!r}, but must be a number")

    def read(index: int) -> np.ndarray:
        path = source / names[index]
        array = _array(path.read_bytes(), path, 8, ": mean and standard deviation")
        if (array[:, 4:] < 0).any():
            raise ValueError(f"{path} has standard deviations below 0: these are not REPA's moments (mean, std)")
        return array

    return np.array([table[name] for name in names], dtype=np.int64), read, names.__getitem__


def _number(content: bytes, where: str) -> int:
    try:
        return int(content)
    except ValueError as error:
        raise ValueError(f"{where} is {content[:20]!r}, but must be a number") from error


def _array(content: bytes, where: object, channels: int, hint: str) -> np.ndarray:
    """A .npy file's numbers as one view (1, channels, S, S): float16 as it is, everything else as float32."""
    try:
        array = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{where} is damaged or no plain array ({error}){hint}") from error
    if array.ndim != 3 or array.shape != (channels, array.shape[2], array.shape[2]) or array.dtype.kind not in "fiu":
        raise ValueError(f"{where} has shape {array.shape} of {array.dtype}, but must be ({channels}, S, S){hint}")
    return array[None] if array.dtype == np.float16 else array[None].astype(np.float32)
