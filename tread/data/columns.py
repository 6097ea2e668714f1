"""What a dataset may store besides its latents: pictures, an encoder's features of them, and encoded captions.

Pictures and features have a file for each shard of the latents, with the same n samples:

    pictures-00000.npy       (n, 3, H, W) uint8, cropped but not flipped; flipped copies are made on reading
    features-00000.npy       (n, views, T, z) float16: T = grid² tokens of z channels; view 1, if any, is flipped
    features-00000.pooled.npy   (n, views, P) float16, the same encoder's feature vector of the whole picture

In index.json, `pictures` is [3, H, W], and each shard's entry names its file of pictures; `features` is a section, see
FeatureSpec. Both are many times larger than the latents, and stay on disk even if the latents are kept in memory.

Encoded captions are in the order of the samples, but their files are not split as the shards are. For encoder "clip-l":

    text-clip-l-00000.npy           (n, T, C) float16; for the encoder "words": (n, T) int32 indices into a vocabulary
    text-clip-l-00000.lengths.npy   (n,) int32: the number of tokens of each caption; the rest of the T are padding
    text-clip-l-00000.pooled.npy    (n, P) float16, if the encoder has a pooled output
    text-clip-l-counts.npy          (samples,) int32: how many captions each sample has
    text-clip-l-00007.npy           the last file (here number 7), which holds the encoded empty caption alone: n = 1

index.json has a section text[<encoder>] for each encoder, see TextSpec. section_writer.py writes features and text.
"""

import bisect
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tread.data.index import explain_damage
from tread.data.shards import ShardRows, open_arrays
from tread.data.store import spread_indices
from tread.models.conditions import Text
from tread.runtime.files import content_hash
from tread.runtime.schema import Count, read

LOOKED_AT = 32  # rows of each kind that are checked when a dataset is opened, unless all are


def check_rows(arrays: Sequence[np.memmap], full: bool, make: str, vocabulary: Sequence[str] | None = None) -> None:
    """Raise ValueError for the first row with numbers that are not finite or not in the vocabulary, and name the row.

    arrays      the rows of each file.
    full        True: check all rows; False: check LOOKED_AT (32) of them, evenly spaced.
    make        the command that makes the files anew, for the message.
    vocabulary  the words, if the rows hold word numbers (indices into it); None: the rows hold floats.
    """
    firsts = np.cumsum([0, *map(len, arrays)]).tolist()
    for row in spread_indices(firsts[-1], firsts[-1] if full else LOOKED_AT).tolist():
        shard = bisect.bisect_right(firsts, row) - 1
        at = row - firsts[shard]
        numbers = arrays[shard][at]
        if vocabulary is None:
            good, fault = np.isfinite(numbers).all(), "numbers that are not finite"
        else:
            good, fault = 0 <= numbers.min() <= numbers.max() < len(vocabulary), "word numbers beyond its vocabulary"
        if not good:
            raise ValueError(f"{arrays[shard].filename}, row {at}, holds {fault}: replace it by {make}")


@dataclass(frozen=True)
class FeatureSpec:
    """The encoder and shape of stored features: the section "features" of index.json without the list of its files.

    encoder      its name, as encoder_name in tread/encoders/vision.py returns it.
    fingerprint  hash of the encoder's weights and, for module:function, of its source; None if unknown.
    grid         tokens along each side of the picture; there are grid² in all.
    width        number of channels z of each token.
    of           latents_hash of the dataset for which the features were computed.
    pooled       number of channels P of the whole picture's feature vector; None: older code stored none.
    """

    encoder: str
    fingerprint: str | None
    grid: Count
    width: Count
    of: str
    pooled: Count | None = None


def latents_hash(index: dict) -> str:
    """Return a hex sha256 of a dataset's latents and labels, computed from the hashes in its parsed index.json."""
    content = [[shard[key] for key in ("count", "file_sha256", "labels_sha256")] for shard in index["shards"]]
    return content_hash(json.dumps(content))


def check_grid(grid: int, side: int, whose: str) -> None:
    """Raise ValueError, beginning with `whose`, unless features' `grid` and the network's `side` (tokens) agree."""
    if grid != side:
        raise ValueError(f"{whose} have {grid}×{grid} tokens, but the network has {side}×{side}: take grid={side}")


def open_features(
    folder: Path, index: dict, encoder: str | None, full: bool, pooled: int | None = None
) -> tuple[FeatureSpec, ShardRows]:
    """Open a dataset's patch features or, if `pooled` is given, its feature vectors of whole pictures, which must have
    `pooled` channels. Checks that they are finite, fit the present latents, and were made by `encoder`, a name as in
    FeatureSpec (None: any). `full` checks all numbers and hashes; otherwise only headers, sizes and some samples are
    checked. Raises FileNotFoundError or ValueError; KeyError or TypeError for a bad `index`, the parsed index.json."""
    section = index.get("features")
    named = encoder or (section["encoder"] if section else "…")
    make = f"python scripts/prepare_features.py dataset={folder} encoder={named}"
    if section is None:
        raise ValueError(f"{folder} has no features: {make} makes them")
    entries, shards = section["shards"], index["shards"]
    stated = {"pooled": None} | section
    spec = read({key: stated[key] for key in FeatureSpec.__dataclass_fields__}, FeatureSpec, "features.")
    if pooled and spec.pooled is None:
        raise ValueError(f"the features in {folder} lack vectors of whole pictures: {make} again=true makes both")
    if pooled not in (None, spec.pooled):
        raise ValueError(f"model.class_token is {pooled}, but {spec.encoder} in {folder} has {spec.pooled} channels")
    if encoder not in (None, spec.encoder):
        others = f"{folder} holds features of {spec.encoder}, not of {encoder}"
        raise ValueError(f"{others}: ask for those, or replace them by {make} again=true")
    if spec.of != latents_hash(index) or len(entries) != len(shards):
        raise ValueError(f"the features in {folder} are of another dataset: replace them by {make} again=true")
    entries = [  # with the keys that open_arrays reads
        {**entry, "file_sha256": entry.get("sha256"), "count": shard["count"]} for entry, shard in zip(entries, shards)
    ]
    kind, row = ("pooled", (pooled,)) if pooled else ("file", (spec.grid**2, spec.width))
    arrays = open_arrays(folder, entries, kind, "float16", (index["views"], *row), full)
    check_rows(arrays, full, f"{make} again=true")
    return spec, ShardRows(arrays)


CLIP_L = "openai/clip-vit-large-patch14"  # its short name is clip-l
SHORT = ("words", "minilm", "clip-l")  # these names never stand for a folder


def text_encoder_name(name: str) -> str:
    """Return a text encoder's name to record: "clip-l" for CLIP-L's hub id, a folder's absolute path, else `name`."""
    name = "clip-l" if name == CLIP_L else name
    return str(Path(name).resolve()) if name not in SHORT and Path(name).is_dir() else name


@dataclass(frozen=True)
class TextSpec:
    """A text encoder and the shape of its output.

    encoder      its name, as text_encoder_name returns it.
    fingerprint  hash of its weights and tokenizer, or of its vocabulary; None if unknown.
    tokens       the number T of tokens to which every caption is cut off or padded.
    width        number of channels C of each token; None: tokens are stored as word numbers (see vocabulary).
    pooled       size P of the vector that stands for a whole caption; None: none is stored.
    vocabulary   "<begin>", "<unknown>", then words; a word number is an index into it. None unless width is None.
    padding      True: the encoder's padding tokens count as words, as in U-ViT's features, and nothing is masked.
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
        return "int32" if self.width is None else "float16"

    @property
    def token_shape(self) -> tuple[int, ...]:
        """The shape of a caption's tokens: (T, C), or (T,) for word numbers."""
        return (self.tokens,) if self.width is None else (self.tokens, self.width)

    @property
    def stem(self) -> str:
        """Start of the files' names: "text-<encoder>". A name unfit for files is changed, and a hash is added."""
        plain = re.sub(r"[^A-Za-z0-9.]+", "-", self.encoder).strip("-.")[-40:]
        return f"text-{plain}" if plain == self.encoder else f"text-{plain}-{content_hash(self.encoder)[:6]}"

    @property
    def caption_bytes(self) -> int:
        """The size of one encoded caption in bytes, the same for all captions."""
        return int(np.prod(self.token_shape)) * np.dtype(self.dtype).itemsize + 2 * (self.pooled or 0) + 4

    def describe(self) -> str:
        """Return a short description of the encoder, the shape of its output and its fingerprint."""
        what = f"{self.tokens} tokens of {self.width}"
        if self.width is None:
            what = f"{self.tokens} word numbers below {len(self.vocabulary):,}"
        return f"text of {self.encoder}, {what} (hash {str(self.fingerprint)[:8]})"


@dataclass(eq=False)
class EncodedText:
    """A dataset's captions, encoded by one encoder and opened for reading.

    counts   (samples,) int64: number of captions of each sample. Captions are numbered from 0, sample after sample.
    lengths  (captions,) int64: number of tokens of each caption, without padding.
    rows     a list: ShardRows of the tokens and, if the encoder has pooled outputs, ShardRows of the pooled outputs.
    null     the encoded empty caption, a Text of one sample.
    """

    spec: TextSpec
    counts: np.ndarray
    lengths: Tensor
    rows: list[ShardRows]
    null: Text

    def __post_init__(self) -> None:
        self.firsts = np.cumsum([0, *self.counts])[:-1]

    def numbers(self, indices: np.ndarray, uniform: np.ndarray | float = 0.0) -> np.ndarray:
        """Return one caption number per sample index: `uniform` in [0, 1) picks one of the sample's, 0 the first."""
        counts = self.counts[indices]
        return self.firsts[indices] + np.minimum((np.asarray(uniform) * counts).astype(np.int64), counts - 1)

    def read(self, numbers: np.ndarray, pin: bool = False) -> Text:
        """Return the captions with these numbers (B,); `pin` page-locks fp16 tensors. IndexError if out of range."""
        numbers, count = np.asarray(numbers, dtype=np.int64), len(self.lengths)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < count:
            raise IndexError(f"captions {numbers.min()}..{numbers.max()}, but there are {count:,}")
        tokens, *pooled = (rows.read(numbers, pin=pin) for rows in self.rows)
        return as_text(self.spec, tokens, self.lengths[torch.from_numpy(numbers)], *pooled)


def as_text(spec: TextSpec, tokens: Tensor, lengths: Tensor, pooled: Tensor | None = None) -> Text:
    """Build a Text from tokens (B, T, C) or (B, T), pooled (B, P), and `lengths` (B,) on the CPU: tokens not masked."""
    mask = (torch.arange(spec.tokens) < lengths[:, None]).to(tokens.device)
    return Text(tokens.long() if spec.width is None else tokens, mask, pooled)


def read_spec(folder: Path, index: dict, encoder: str) -> TextSpec | None:
    """Return `encoder`'s TextSpec in `index`, the parsed index.json; None if absent. ValueError if it is damaged."""
    section = index.get("text", {}).get(text_encoder_name(encoder))
    if section is None:
        return None
    with explain_damage(folder / "index.json"):
        return read({key: section[key] for key in TextSpec.__dataclass_fields__}, TextSpec, f"text.{encoder}.")


def open_text(folder: Path, index: dict, encoder: str, full: bool) -> EncodedText:
    """Open a dataset's captions, encoded by `encoder`. Checks that they are complete, finite, and made for the present
    latents and captions. `full` checks all numbers and hashes; otherwise only headers, lengths and some captions are
    checked. Raises FileNotFoundError or ValueError; KeyError or TypeError for a bad `index`, the parsed index.json."""
    sections = index.get("text", {})
    make = f"python scripts/prepare_text.py dataset={folder} encoder={encoder}"
    spec = read_spec(folder, index, encoder)
    if spec is None:
        others = f", but of {', '.join(sections)}" if sections else ""
        raise ValueError(f"{folder} has no text of encoder {encoder}{others}: {make} makes it")
    section = sections[text_encoder_name(encoder)]
    captions, make = index.get("captions", {}), f"{make} again=true"
    if section["of"] != latents_hash(index) or section["captions_sha256"] not in (None, captions.get("sha256")):
        raise ValueError(f"the text of {encoder} in {folder} is of other captions: replace it by {make}")
    entries = [*section["shards"], section["null"]]
    counted = {**section, "count": index["count"]}
    counts = open_arrays(folder, [counted], "counts", "int32", (), True)[0].astype(np.int64)
    kinds = {"file": (spec.dtype, spec.token_shape), "lengths": ("int32", ())}
    if spec.pooled is not None:
        kinds["pooled"] = ("float16", (spec.pooled,))
    tokens, lengths, *pooled = (
        open_arrays(folder, entries, kind, dtype, row, full or kind == "lengths")
        for kind, (dtype, row) in kinds.items()
    )
    if not counts.sum() == section["captions"] == sum(map(len, lengths[:-1])):
        raise ValueError(f"the text of {encoder} in {folder} disagrees on how many captions there are; {make}")
    for arrays in (tokens, *pooled):  # reversed, so that the empty caption is always checked
        check_rows(arrays[::-1], full, make, spec.vocabulary)
    whole = torch.from_numpy(np.concatenate(lengths)).long()
    if not 1 <= whole.min() <= whole.max() <= spec.tokens:
        raise ValueError(f"the text of {encoder} in {folder} must have lengths in 1..{spec.tokens}; {make}")
    empty = (torch.from_numpy(np.array(arrays[-1])) for arrays in (tokens, lengths, *pooled))
    rows = [ShardRows([array[:, None] for array in arrays[:-1]]) for arrays in (tokens, *pooled)]
    return EncodedText(spec, counts, whole[:-1], rows, as_text(spec, *empty))
