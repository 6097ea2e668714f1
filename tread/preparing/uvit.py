"""U-ViT's features of MS-COCO, which SiT's and REPA's text-to-image runs use too: every file's size checked first.

    0.npy              float32 (8, 32, 32): mean and log-variance of the Stable Diffusion autoencoder, unscaled
    0_0.npy, 0_1.npy   float32 (77, 768): each caption of picture 0, encoded by CLIP ViT-L/14's text network
    empty_context.npy  of the empty caption; here, or in the folder above, which has train/ and val/

Pictures are numbered in the order of their ids in MS-COCO's annotations. Which of the 77 tokens are padding is not
stored: all count as words, as U-ViT's network takes them.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch

from tread.data.captions import add_captions
from tread.data.columns import TextSpec
from tread.data.section_writer import TextWriter
from tread.models.conditions import Text
from tread.preparing.coco import read_coco
from tread.preparing.foreign import ForeignSamples, ForeignText, read_npy
from tread.runtime.tensor_files import listed

SPEC = TextSpec("clip-l", None, 77, 768, None, padding=True)  # nobody knows the weights' hash
EMPTY = "empty_context.npy"
NAME = re.compile(r"\d+(_\d+)?\.npy")


def open_folder(source: Path, captions: str | None) -> ForeignSamples:
    """The samples of a folder, all of label 0, and their text.

    captions  MS-COCO's annotations of the same pictures; None: the captions stay unknown.

    Raises FileNotFoundError, or ValueError that names the file.
    """
    counts = _check_files(source)
    empty = source / EMPTY if (source / EMPTY).is_file() else source.parent / EMPTY

    def load(path: Path, shape: tuple[int, ...]) -> np.ndarray:
        return read_npy(path.read_bytes(), path, shape)

    def read(index: int) -> np.ndarray:
        return load(source / f"{index}.npy", (8, 0, 0))[None]

    def read_text(index: int, number: int) -> np.ndarray:
        return load(source / f"{index}_{number}.npy", SPEC.token_shape)

    known = None if captions is None else _captions(Path(captions), counts, source)
    text = ForeignText(SPEC, counts, read_text, load(empty, SPEC.token_shape), known)
    labels = np.zeros(len(counts), dtype=np.int64)
    return ForeignSamples(labels, read, lambda index: f"{source}/{index}.npy", text=text)


def write_text(folder: Path, text: ForeignText, progress: Callable[[int], AbstractContextManager]) -> None:
    """Write text beside the latents of an assembled dataset, shard by shard; goes on with what is there.

    progress  number of captions → a bar with `update`.
    """
    if text.captions is not None:
        add_captions(folder, text.captions)
    writer = TextWriter(folder, text.spec, text.counts)
    writer.begin()
    missing = writer.missing()
    writer.check_space(writer.rows(missing))
    samples = np.repeat(np.arange(len(text.counts)), text.counts)
    numbers = np.arange(len(samples)) - np.repeat(np.cumsum(text.counts) - text.counts, text.counts)

    def read(batches: Sequence[range]) -> Iterator[Text]:
        for rows in batches:
            known = [text.read(samples[row], numbers[row]) if row < len(samples) else text.empty for row in rows]
            tokens = torch.from_numpy(np.stack(known))
            yield Text(tokens, torch.ones(tokens.shape[:2], dtype=torch.bool))  # nobody says what is padding

    with progress(writer.rows(missing)) as bar:
        writer.encode(64, read, missing, bar.update)
    writer.publish()


def _check_files(source: Path) -> np.ndarray:
    """(n,) how many captions each picture has. Raises ValueError for gaps in the names, and for odd sizes of files."""
    sizes = {entry.name: entry.stat().st_size for entry in os.scandir(source) if NAME.fullmatch(entry.name)}
    texts = [name for name in sizes if "_" in name]
    counts = Counter(int(name.partition("_")[0]) for name in texts)
    numbers = range(len(sizes) - len(texts))
    wanted = [f"{number}.npy" for number in numbers], [f"{n}_{i}.npy" for n in numbers for i in range(counts[n] or 1)]
    if odd := sizes.keys() ^ {*wanted[0], *wanted[1]}:
        raise ValueError(f"{source}: files are missing, for the names have gaps before or at {listed(sorted(odd))}")
    for names in wanted:
        ((usual, _),) = Counter(sizes[name] for name in names).most_common(1)
        if damaged := [f"{name} has {sizes[name]}" for name in names if sizes[name] != usual]:
            raise ValueError(f"{source}: damaged files, {listed(damaged)} bytes, where others have {usual}")
    return np.array([counts[number] for number in numbers], dtype=np.int32)


def _captions(path: Path, counts: np.ndarray, source: Path) -> list[list[str]]:
    captions = list(read_coco(path.parent, path.name).values())
    if list(map(len, captions)) != counts.tolist():
        raise ValueError(
            f"{path} lists {len(captions):,} pictures with {sum(map(len, captions)):,} captions, but {source} holds "
            f"{len(counts):,} with {counts.sum():,}, or others of them: name the annotations they were extracted by"
        )
    return captions
