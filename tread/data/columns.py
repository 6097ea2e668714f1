"""What may lie beside the latents: their pictures, an encoder's features of them, and encoded text of their captions.

Pictures and features are of the same samples in the same shards:

    pictures-00000.npy       (n, 3, H, W) uint8, as they were cropped; of a flipped view the mirror image is read
    features-00000.npy       (n, views, T, z) float16, T = grid² tokens row by row; a flipped view has its own

index.json names them: `pictures` is (3, H, W), with a file and a hash in each shard's entry; `features` is a section,
see FeatureSpec. They are many times larger than the latents, and stay memory-mapped wherever those are placed.

Text has files of its own:

    text-words-00000.npy            (n, T, C) float16, or (n, T) int32 word numbers
    text-words-00000.lengths.npy    (n,) int32: how many of the T tokens are the caption's; the others are padding
    text-words-00000.pooled.npy     (n, P) float16, where the encoder pools
    text-words-counts.npy           (samples,) int32: how many captions each sample has
    text-words-null.npy             and .lengths, .pooled: the empty caption's own encoding, n = 1

Captions lie one behind the other in the order of samples, whatever shards those lie in. index.json has a section for
each encoder, text[<name>], see TextSpec. text_writer.py writes all this.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tread.data.index import check_sha256
from tread.data.shards import open_array, torch_dtype, will_need
from tread.models.conditions import Text
from tread.runtime.files import plain_name
from tread.runtime.schema import Count, read

LOOKED_AT = 32  # samples, spread over all, whose features must be finite for a dataset to open


class Columns:
    """The rows of a dataset's shards as one array: memory-mapped, or, after `place`, in a device's memory.

    arrays  of each shard (n·views, …): the stored views of a sample lie one behind the other.
    views   how many views of a sample are stored; of those that are not, the mirror image of a stored one is read.
    """

    def __init__(self, arrays: Sequence[np.ndarray], views: int = 1) -> None:
        self._arrays, self._views, self._placed = list(arrays), views, None
        self._firsts = np.cumsum([0, *map(len, arrays)])[:-1]

    @property
    def nbytes(self) -> int:
        """Size of all rows."""
        return sum(array.nbytes for array in self._arrays)

    def place(self, device: torch.device | str) -> None:
        """Read all rows into a device's memory."""
        parts = [torch.from_numpy(np.array(array)).to(device) for array in self._arrays]
        self._placed, self._arrays = torch.cat(parts), []

    def _at(self, indices: np.ndarray, views: np.ndarray | int) -> list[tuple[int, int]]:
        """The shard of each row, and its number in there."""
        rows = indices * self._views + views % self._views
        shards = np.searchsorted(self._firsts, rows, side="right") - 1
        return list(zip(shards.tolist(), (rows - self._firsts[shards]).tolist()))

    def read(self, indices: np.ndarray, views: np.ndarray | int = 0, pin: bool = False) -> Tensor:
        """(B, …) where the rows lie, in page-locked CPU memory with `pin`; indices and views (B,).

        Rows that were placed are read by index alone, whatever the view.
        """
        if self._placed is not None:
            device = self._placed.device
            lock = pin and device.type == "cpu"
            shape = (len(indices), *self._placed.shape[1:])
            batch = torch.empty(shape, dtype=self._placed.dtype, device=device, pin_memory=lock)
            return torch.index_select(self._placed, 0, torch.from_numpy(indices).to(device), out=batch)
        first = self._arrays[0]
        batch = torch.empty(len(indices), *first.shape[1:], dtype=torch_dtype(first.dtype), pin_memory=pin)
        mirrored = np.broadcast_to(views, indices.shape) >= self._views
        arrays = list(map(np.asarray, self._arrays))  # np.memmap is slow to index
        for row, (shard, at), mirror in zip(batch.numpy(), self._at(indices, views), mirrored.tolist()):
            row[...] = arrays[shard][at][..., ::-1] if mirror else arrays[shard][at]
        return batch

    def expect(self, indices: np.ndarray, views: np.ndarray | int = 0) -> None:
        """Have the operating system read what `read` will need, all at once."""
        for shard, at in self._at(indices, views) if self._placed is None else ():
            size = self._arrays[shard].nbytes // len(self._arrays[shard])
            will_need(self._arrays[shard], at * size, size)


@dataclass(frozen=True)
class FeatureSpec:
    """Which features lie beside some latents: the section "features" of index.json, but for its shards.

    encoder      its name, as tread/encoders/vision.py records it.
    fingerprint  hash of its weights, or of its source; None where nobody knows.
    grid         tokens along a side; there are grid² of them.
    width        numbers of a token, z.
    of           latents_hash of the dataset that they are of.
    """

    encoder: str
    fingerprint: str | None
    grid: Count
    width: Count
    of: str


def latents_hash(index: dict) -> str:
    """Hex sha256 of a dataset's content, by the hashes in its parsed index.json."""
    content = [[shard[key] for key in ("count", "file_sha256", "labels_sha256")] for shard in index["shards"]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def check_grid(grid: int, side: int, whose: str) -> None:
    """Raise ValueError unless features have as many tokens along a side as the network they are compared with."""
    if grid != side:
        raise ValueError(
            f"{whose} have {grid}×{grid} tokens, but the network has {side}×{side}: choose the grid of the features "
            f"(grid={side}), or model.patch_size"
        )


def open_pictures(folder: Path, index: dict, full: bool) -> Columns:
    """The pictures that were kept with a dataset. Raises FileNotFoundError or ValueError, KeyError for a bad index."""
    path, shape, arrays = folder / "index.json", tuple(index["pictures"]), []
    for shard in index["shards"]:
        file = folder / plain_name(shard["pictures"], path)
        arrays.append(open_array(file, "uint8", (shard["count"], *shape)))
        if full:
            check_sha256(file, shard["pictures_sha256"])
        arrays[-1]._mmap.madvise(mmap.MADV_RANDOM)
    return Columns(arrays)


def open_features(folder: Path, index: dict, encoder: str, views: int, full: bool) -> tuple[FeatureSpec, Columns]:
    """The features of a dataset, checked: they are there, of this encoder and these latents, and finite.

    full  look at all of them, hashes too; else at headers and sizes, and at some samples.

    Raises FileNotFoundError or ValueError, KeyError or TypeError for a bad index.
    """
    path, section = folder / "index.json", index.get("features")
    make = f"python scripts/prepare_features.py dataset={folder} encoder={encoder}"
    if section is None:
        raise ValueError(f"{folder} has no features: {make} makes them")
    shards, entries = index["shards"], section["shards"]
    spec = read({key: section[key] for key in FeatureSpec.__dataclass_fields__}, FeatureSpec, "features.")
    if spec.encoder != encoder:
        raise ValueError(
            f"{folder} holds features of {spec.encoder}, not of {encoder}, which was asked for: ask for "
            f"{spec.encoder}, or replace them by {make} again=true"
        )
    if spec.of != latents_hash(index) or len(entries) != len(shards):
        raise ValueError(f"the features in {folder} are of another dataset: replace them by {make} again=true")
    arrays, files = [], []
    for shard, entry in zip(shards, entries):
        files.append(folder / plain_name(entry["file"], path))
        arrays.append(open_array(files[-1], "float16", (shard["count"], views, spec.grid**2, spec.width)))
    counts = np.cumsum([0, *map(len, arrays)])
    looked = np.unique(np.linspace(0, counts[-1] - 1, counts[-1] if full else LOOKED_AT).round().astype(int))
    for index_ in looked.tolist() if len(arrays) else ():
        shard = int(np.searchsorted(counts, index_, side="right")) - 1
        if not np.isfinite(arrays[shard][index_ - counts[shard]]).all():
            raise ValueError(
                f"{files[shard]}, row {index_ - counts[shard]}, holds features that are not finite: replace them by "
                f"{make} again=true"
            )
    for file, entry in zip(files, entries) if full else ():
        check_sha256(file, entry["sha256"])
    for array in arrays:
        array._mmap.madvise(mmap.MADV_RANDOM)
    return spec, Columns([array.reshape(-1, *array.shape[2:]) for array in arrays], views)


CLIP_L = "openai/clip-vit-large-patch14"  # its short name is clip-l


def text_encoder_name(name: str) -> str:
    """What is recorded of an encoder's name: CLIP-L's short one, folders in full, others as given."""
    return "clip-l" if name == CLIP_L else str(Path(name).resolve()) if Path(name).is_dir() else name


@dataclass(frozen=True)
class TextSpec:
    """An encoder of text and the shape of what it makes.

    encoder      its name, as language.py records it.
    fingerprint  hash of its weights and of how it cuts text up, or of its vocabulary; None where nobody knows.
    tokens       T: every caption is cut off or padded to so many.
    width        C, numbers of a token; None: tokens are word numbers.
    pooled       P, numbers of a whole caption; None: none are stored.
    vocabulary   of word numbers, in their order: "<begin>", "<unknown>", and words.
    padding      True: what the encoder makes of its padding counts as words, as in U-ViT's features; nothing is masked.
    """

    encoder: str
    fingerprint: str | None
    tokens: Count
    width: Count | None
    pooled: Count | None
    vocabulary: tuple[str, ...] | None = None
    padding: bool = False

    @property
    def dtype(self) -> str:
        """Of the stored tokens."""
        return "int32" if self.width is None else "float16"

    @property
    def token_shape(self) -> tuple[int, ...]:
        """(T, C), or (T,) of word numbers."""
        return (self.tokens,) if self.width is None else (self.tokens, self.width)

    @property
    def stem(self) -> str:
        """How the names of its files begin."""
        plain = re.sub(r"[^A-Za-z0-9.]+", "-", self.encoder).strip("-.")[-40:]
        digest = hashlib.sha256(self.encoder.encode()).hexdigest()[:6]
        return f"text-{plain}" if plain == self.encoder else f"text-{plain}-{digest}"

    @property
    def caption_bytes(self) -> int:
        """Size of one stored caption."""
        return int(np.prod(self.token_shape)) * np.dtype(self.dtype).itemsize + 2 * (self.pooled or 0) + 4

    def describe(self) -> str:
        """For people."""
        what = f"{self.tokens} tokens of {self.width}"
        if self.width is None:
            what = f"{self.tokens} word numbers below {len(self.vocabulary):,}"
        return f"text of {self.encoder}, {what} (hash {str(self.fingerprint)[:8]})"


class EncodedText:
    """An encoder's text of a dataset, opened for reading.

    spec    what it is.
    counts  (samples,) captions of each sample; those of sample i are numbers firsts[i] to firsts[i] + counts[i] − 1.
    """

    def __init__(
        self,
        spec: TextSpec,
        counts: np.ndarray,
        lengths: np.ndarray,
        tokens: Sequence[np.ndarray],
        pooled: Sequence[np.ndarray] | None,
        null: Text,
    ) -> None:
        self.spec, self.counts, self._null = spec, counts, null
        self.firsts = np.cumsum([0, *counts])[:-1]
        self._lengths = torch.from_numpy(lengths.astype(np.int64))
        self._columns = [Columns(arrays) for arrays in (tokens, pooled) if arrays is not None]

    def __len__(self) -> int:
        """All captions."""
        return len(self._lengths)

    @property
    def nbytes(self) -> int:
        """Size of all captions' encodings."""
        return sum(column.nbytes for column in self._columns)

    def place(self, device: torch.device | str) -> None:
        """Read everything into a device's memory."""
        for column in self._columns:
            column.place(device)

    def numbers(self, indices: np.ndarray, uniform: np.ndarray | float = 0.0) -> np.ndarray:
        """Caption numbers of samples; of a sample's captions the one that a uniform number in [0, 1) chooses."""
        counts = self.counts[indices]
        return self.firsts[indices] + np.minimum((np.asarray(uniform) * counts).astype(np.int64), counts - 1)

    def read(self, numbers: np.ndarray, pin: bool = False) -> Text:
        """Captions by number: tokens (B, T, C) float16 or (B, T) int64, in CPU memory or where they were placed."""
        numbers = np.asarray(numbers, dtype=np.int64)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(self):
            raise IndexError(f"captions {numbers.min()}..{numbers.max()}, but there are {len(self):,}")
        tokens, *pooled = (column.read(numbers, pin=pin) for column in self._columns)
        return as_text(self.spec, tokens, self._lengths[torch.from_numpy(numbers)], *pooled)

    def expect(self, numbers: np.ndarray) -> None:
        """Have the operating system read what `read` will need, all at once."""
        for column in self._columns:
            column.expect(numbers)

    def null(self) -> Text:
        """The empty caption, one row."""
        return self._null


def as_text(spec: TextSpec, tokens: Tensor, lengths: Tensor, pooled: Tensor | None = None) -> Text:
    """Stored tokens, lengths (B,) and pooled → Text on the tokens' device."""
    mask = (torch.arange(spec.tokens) < lengths[:, None]).to(tokens.device)
    return Text(tokens.long() if spec.width is None else tokens, mask, pooled)


def read_spec(folder: Path, index: dict, encoder: str) -> TextSpec | None:
    """What a parsed index.json says of an encoder's text; None if there is none. Raises ValueError for a bad one."""
    section = index.get("text", {}).get(text_encoder_name(encoder))
    if section is None:
        return None
    try:
        known = {key: section[key] for key in TextSpec.__dataclass_fields__}
        return read(known, TextSpec, f"text.{encoder}.")
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / 'index.json'} is damaged: {type(error).__name__}: {error}") from error


def open_text(folder: Path, index: dict, encoder: str, full: bool) -> EncodedText:
    """What an encoder made of a dataset's captions, checked: of these latents and captions, whole and finite.

    full  look at all of it, hashes too; else at headers and sizes, at all lengths, and at some captions.

    Raises FileNotFoundError or ValueError, KeyError or TypeError for a bad index.
    """
    path, sections = folder / "index.json", index.get("text", {})
    make = f"python scripts/prepare_text.py dataset={folder} encoder={encoder}"
    spec = read_spec(folder, index, encoder)
    if spec is None:
        others = f", but of {', '.join(sections)}" if sections else ""
        raise ValueError(f"{folder} has no text of encoder {encoder}{others}: {make} makes it")
    section = sections[text_encoder_name(encoder)]
    captions = index.get("captions")
    known = None if captions is None else captions["sha256"]
    if section["of"] != latents_hash(index) or section["captions_sha256"] not in (None, known):
        raise ValueError(f"the text of {encoder} in {folder} is of other captions: replace it by {make} again=true")

    def opened(entry: dict, key: str, dtype: str, shape: tuple[int, ...], hashed: bool) -> np.ndarray:
        file = folder / plain_name(entry[key], path)
        array = open_array(file, dtype, shape)
        if hashed:
            check_sha256(file, entry[f"{key}_sha256"], f"; {make} again=true makes it anew")
        return array

    counts = np.array(opened(section, "counts", "int32", (index["count"],), True), dtype=np.int64)
    if (len(counts) and counts.min() < 1) or counts.sum() != section["captions"]:
        raise ValueError(f"{path} says {section['captions']} captions, but {section['counts']} counts {counts.sum()}")
    parts: list[tuple] = []
    for entry in (*section["shards"], section["null"]):
        count = entry["count"]
        tokens = opened(entry, "file", spec.dtype, (count, *spec.token_shape), full)
        lengths = np.array(opened(entry, "lengths", "int32", (count,), True))
        pooled = None if spec.pooled is None else opened(entry, "pooled", "float16", (count, spec.pooled), full)
        if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= spec.tokens:
            raise ValueError(f"{folder / entry['lengths']} must hold lengths in 1..{spec.tokens}; {make} again=true")
        parts.append((tokens, lengths, pooled))
        for row in range(count) if full else np.unique(np.linspace(0, count - 1, min(LOOKED_AT, count)).astype(int)):
            _check_row(spec, tokens[row], None if pooled is None else pooled[row], folder / entry["file"], row, make)
    *shards, (null, null_length, null_pooled) = parts
    lengths = np.concatenate([lengths for _, lengths, _ in shards]) if shards else np.zeros(0, np.int32)
    if len(lengths) != counts.sum():
        raise ValueError(f"{path} says {counts.sum()} captions, but the shards of {encoder} hold {len(lengths)}")
    empty = [torch.from_numpy(np.array(part)) for part in (null, null_length, null_pooled) if part is not None]
    pooled = None if spec.pooled is None else [pooled for *_, pooled in shards]
    return EncodedText(spec, counts, lengths, [tokens for tokens, *_ in shards], pooled, as_text(spec, *empty))


def _check_row(spec: TextSpec, tokens: np.ndarray, pooled: np.ndarray | None, file: Path, row: int, make: str) -> None:
    if spec.width is None:
        good = 0 <= tokens.min() <= tokens.max() < len(spec.vocabulary)
    else:
        good = np.isfinite(tokens).all() and (pooled is None or np.isfinite(pooled).all())
    if not good:
        what = "word numbers beyond its vocabulary" if spec.width is None else "numbers that are not finite"
        raise ValueError(f"{file}, row {row}, holds {what}: replace it by {make} again=true")
