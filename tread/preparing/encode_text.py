"""Writes a text encoder's encodings of a dataset's captions into the dataset's folder (`prepare_text`).

All checks run before the long work. Processes share the shards; the same command, run again, makes the missing ones.
Batches never cross a shard, so a shard does not depend on the process that makes it."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tread.data.captions import add_captions, parse_captions, read_captions
from tread.data.dataset import LatentDataset
from tread.data.index import beside, read_index
from tread.data.section_writer import Encode, TextWriter
from tread.encoders.language import AT_ONCE, TextEncoder, remarks, text_encoder
from tread.runtime.distributed import Processes
from tread.runtime.files import size_text
from tread.runtime.schema import Count


@dataclass(frozen=True)
class DatasetPlace:
    """The section `dataset` of a script's options: the folder of a prepared dataset."""

    path: str


@dataclass(frozen=True)
class TextOptions:
    """The options of configs/prepare_text.yaml."""

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
    """Add the captions in the file options.captions, if any, to a dataset, then encode its captions and those of its
    held-out dataset. Held-out text takes the number of tokens and the vocabulary from its training data's text. With
    options.like, the dataset's own text takes both from the dataset named there, and held-out text is not encoded."""
    folder = Path(options.dataset.path)
    index = read_index(folder)
    if options.captions is not None:
        processes.from_main(lambda: add_captions(folder, parse_captions(Path(options.captions)), options.again))
    train, heldout = (index.get(key) and beside(folder, index[key]) for key in ("train", "heldout"))
    _prepare(options, folder, options.like or train and str(train), processes)
    if not heldout or options.like is not None:
        return
    if not (heldout / "index.json").is_file():
        processes.say(f"  held out  {heldout} is not there")
    elif "captions" not in read_index(heldout):
        processes.say(f"  held out  {heldout} has no captions: dataset={heldout} captions=<file> adds them")
    else:
        _prepare(options, heldout, str(folder), processes)


def _prepare(options: TextOptions, folder: Path, like: str | None, processes: Processes) -> None:
    """Check everything, and encode this process's share of the captions of the dataset in `folder`; the main process
    then adds the encoded text of all processes to that dataset. `like` is the folder of a dataset from which the number
    of tokens and the vocabulary are taken; None: the options and captions determine them."""
    captions = read_captions(folder, read_index(folder))
    flat = list(itertools.chain(*captions))
    shape = like and LatentDataset(Path(like), text=options.encoder).text_spec
    if shape and options.tokens not in (None, shape.tokens):
        theirs = f"{like}, which {folder} goes with, has text of {shape.tokens}"
        raise ValueError(f"tokens is {options.tokens}, but {theirs}: leave it out, or encode both by dataset={like}")
    tokens, vocabulary = options.tokens or (shape and shape.tokens), shape and shape.vocabulary
    with processes.main_first():  # one process downloads the weights
        encoder = text_encoder(options.encoder, flat, tokens, vocabulary, processes.device)
    writer = TextWriter(folder, encoder.spec, list(map(len, captions)), options.shard_size)
    batch_size = min(AT_ONCE, options.batch_size or (16 if processes.device.type == "cpu" else AT_ONCE))
    lines = [
        f"  dataset   {folder}: {len(captions):,} samples, {len(flat):,} captions",
        f"  encoder   {encoder.spec.describe()}",
        f"  stores    {encoder.spec.dtype}, {size_text(writer.nbytes)}",
        *(f"  note      {remark}" for remark in remarks(encoder, flat)),
    ]
    if writer.make(processes, options.again, lines, "caption", batch_size, encoding(encoder, flat)):
        processes.say(f"  text      {folder}: {encoder.spec.encoder}, read with text.encoder={encoder.spec.encoder}")


def encoding(encoder: TextEncoder, captions: Iterable[str]) -> Encode:
    """Return the function that TextWriter needs: it takes ranges of caption indices, and yields the encoded captions
    of each range. The index len(captions) stands for the empty caption."""
    captions = [*captions, ""]
    return lambda batches: (encoder.encode(captions[rows.start : rows.stop]) for rows in batches)
