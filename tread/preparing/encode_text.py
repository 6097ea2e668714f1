"""Encoded text of a dataset's captions, written by `prepare_text`.

Everything is checked before long work starts, which processes share; after a stop, the same command goes on with the
missing shards. Batches never cross a shard, so its content does not depend on who makes it.
"""

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tread.data.captions import add_captions, parse_captions, read_captions
from tread.data.columns import TextSpec, read_spec
from tread.data.index import read_index
from tread.data.section_writer import Encode, TextWriter
from tread.encoders.language import AT_ONCE, TextEncoder, text_encoder
from tread.runtime.distributed import Processes
from tread.runtime.files import size_text
from tread.runtime.schema import Count


@dataclass(frozen=True)
class DatasetPlace:
    """The group `dataset` of a configuration that names a prepared dataset."""

    path: str


@dataclass(frozen=True)
class TextOptions:
    """configs/prepare_text.yaml."""

    dataset: DatasetPlace
    encoder: str
    captions: str | None
    tokens: Count | None
    like: str | None
    again: bool
    batch_size: Count | None
    shard_size: Count | None
    device: str | None


def prepare_text(options: TextOptions, processes: Processes) -> None:
    """Make the text of a dataset, and then of the one held out from it, if that has captions too."""
    folder = Path(options.dataset.path)
    index = read_index(folder)
    if options.captions is not None:
        processes.from_main(lambda: _take_captions(options, folder, index))
    train, heldout = (index.get(key) and os.path.normpath(folder / index[key]) for key in ("train", "heldout"))
    _prepare(options, folder, options.like or train, processes)
    if not heldout or options.like is not None:
        return
    heldout = Path(heldout)
    if not (heldout / "index.json").is_file():
        processes.say(f"  held out  {heldout} is not there")
    elif "captions" not in read_index(heldout):
        processes.say(
            f"  held out  {heldout} has no captions: dataset={heldout} captions=<file> adds them, and its text"
        )
    else:
        _prepare(options, heldout, str(folder), processes)


def _take_captions(options: TextOptions, folder: Path, index: dict) -> None:
    """Put the captions of a file beside a dataset, unless they are there."""
    captions = list(parse_captions(Path(options.captions)))
    if "captions" not in index or read_captions(folder, index) != captions:
        add_captions(folder, captions, options.again)


def _prepare(options: TextOptions, folder: Path, like: str | None, processes: Processes) -> None:
    """Check everything, make this process's part of the shards, and publish them in the main process."""
    captions = read_captions(folder, read_index(folder))
    flat = list(itertools.chain(*captions))
    shape = None if like is None else _shape_of(Path(like), options.encoder)
    if shape and options.tokens not in (None, shape.tokens):
        raise ValueError(
            f"tokens is {options.tokens}, but {like}, which {folder} goes with, has text of {shape.tokens}: leave "
            f"tokens out, or encode both by dataset={like}"
        )
    tokens, vocabulary = options.tokens or (shape and shape.tokens), shape and shape.vocabulary
    with processes.main_first():  # which may fetch it
        encoder = text_encoder(options.encoder, flat, tokens, vocabulary, processes.device)
    writer = TextWriter(folder, encoder.spec, list(map(len, captions)), options.shard_size)
    batch_size = min(AT_ONCE, options.batch_size or (16 if processes.device.type == "cpu" else AT_ONCE))
    lines = [
        f"  dataset   {folder}: {len(captions):,} samples, {len(flat):,} captions",
        f"  encoder   {encoder.spec.describe()}",
        f"  stores    {encoder.spec.dtype}, {size_text(writer.nbytes)}",
        *remarks(encoder, flat),
    ]
    if writer.make(processes, options.again, lines, "caption", batch_size, encoding(encoder, flat)):
        processes.say(f"  text      {folder}: {encoder.spec.encoder}, read with text.encoder={encoder.spec.encoder}")


def _shape_of(like: Path, encoder: str) -> TextSpec:
    """The spec of another dataset's text. Raises ValueError if it has none of this encoder."""
    spec = read_spec(like, read_index(like), encoder)
    if spec is None:
        raise ValueError(
            f"{like}, whose number of tokens and vocabulary this text is to have, has no text of {encoder}: "
            f"python scripts/prepare_text.py dataset={like} encoder={encoder} makes it, and this one too"
        )
    return spec


def remarks(encoder: TextEncoder, captions: Sequence[str]) -> list[str]:
    """The words and ends of captions that an encoder ignores, as lines to print."""
    longest, spec = encoder.lengths(captions), encoder.spec
    lines = []
    if cut := sum(length > spec.tokens for length in longest):
        lines.append(
            f"  cut off   {cut:,} of {len(captions):,} captions, which are longer than {spec.tokens} tokens; the "
            f"longest has {max(longest):,} (tokens=… sets another number)"
        )
    unknown = [words for caption in captions if (words := encoder.unknown(caption))]
    if unknown:
        words = list(dict.fromkeys(itertools.chain.from_iterable(unknown)))
        listed = ", ".join(words[:10]) + (", …" if len(words) > 10 else "")
        lines.append(
            f"  unknown   {len(words):,} words in {len(unknown):,} captions are not in the vocabulary: {listed}"
        )
    return lines


def encoding(encoder: TextEncoder, captions: Iterable[str]) -> Encode:
    """How a TextWriter gets the text of all captions of its dataset, and of the empty one behind them."""
    captions = [*captions, ""]
    return lambda batches: (encoder.encode(captions[rows.start : rows.stop]) for rows in batches)
