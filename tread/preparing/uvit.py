"""U-ViT's features of MS-COCO, which SiT's and REPA's text-to-image runs use too: every file's size checked first.

    0.npy              float32 (8, 32, 32): mean and log-variance of the Stable Diffusion autoencoder, unscaled
    0_0.npy, 0_1.npy   float32 (77, 768): what CLIP ViT-L/14's text network made of each caption of picture 0
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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tread.data.captions import add_captions
from tread.data.columns import TextSpec
from tread.data.section_writer import TextWriter
from tread.models.conditions import Text
from tread.preparing.coco import read_coco
from tread.runtime.tensor_files import listed

SPEC = TextSpec("clip-l", None, 77, 768, None, padding=True)  # nobody knows the weights' hash
EMPTY = "empty_context.npy"
NAME = re.compile(r"(\d+)(?:_(\d+))?\.npy")


@dataclass
class ForeignText:
    """What someone else's encoder made of captions.

    spec      the encoder.
    counts    (n,) captions of each sample.
    read      sample, number of its caption → (T, C).
    empty     (T, C) of the empty caption.
    captions  of each sample, as text; None: they are not known.
    """

    spec: TextSpec
    counts: np.ndarray
    read: Callable[[int, int], np.ndarray]
    empty: np.ndarray
    captions: list[list[str]] | None


def open_folder(source: Path, captions: Path | None) -> tuple[np.ndarray, Callable, Callable, ForeignText]:
    """Labels (n,), all 0, index → (1, 8, S, S), index → name, and the text.

    captions  MS-COCO's annotations of the same pictures; None: the captions stay unknown.

    Raises FileNotFoundError, or ValueError that names the file.
    """
    counts = _check_names(source)
    empty = next((path for path in (source / EMPTY, source.parent / EMPTY) if path.is_file()), None)
    if empty is None:
        raise FileNotFoundError(
            f"{source / EMPTY} is not there, nor {source.parent / EMPTY}: dropped captions become it"
        )

    def read(index: int) -> np.ndarray:
        moments = _load(path := source / f"{index}.npy")
        if moments.ndim != 3 or moments.shape != (8, moments.shape[2], moments.shape[2]):
            raise ValueError(f"{path} has shape {moments.shape}, but must be (8, S, S): mean and log-variance")
        return moments[None]

    def read_text(index: int, number: int) -> np.ndarray:
        return _text(source / f"{index}_{number}.npy")

    known = None if captions is None else _captions(captions, counts, source)
    text = ForeignText(SPEC, counts, read_text, _text(empty), known)
    return np.zeros(len(counts), dtype=np.int64), read, lambda index: f"{source}/{index}.npy", text


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


def _check_names(source: Path) -> np.ndarray:
    """(n,) how many captions each picture has. Raises ValueError for gaps, and for files of another size."""
    pictures: dict[int, int] = {}  # number → size of its file
    texts: dict[int, dict[int, int]] = {}
    for entry in os.scandir(source) if source.is_dir() else ():
        if match := NAME.fullmatch(entry.name):
            size = entry.stat().st_size
            if match[2] is None:
                pictures[int(match[1])] = size
            else:
                texts.setdefault(int(match[1]), {})[int(match[2])] = size
    if not pictures:
        raise FileNotFoundError(
            f"{source} is not there, or holds no 0.npy: source must be the folder train or val that U-ViT's extraction "
            "wrote"
        )
    gaps = [f"{number}.npy" for number in range(max(pictures) + 1) if number not in pictures]
    stray = [f"{number}_{min(texts[number])}.npy" for number in sorted(texts) if number not in pictures]
    bare = [f"{number}.npy" for number in sorted(pictures) if number not in texts]
    holes = [f"{n}_{i}.npy" for n in sorted(texts) for i in range(max(texts[n])) if i not in texts[n]]
    faults = {
        "pictures that are missing": gaps,
        "captions of missing pictures": stray,
        "pictures without captions": bare,
        "captions that are missing": holes,
    }
    if any(faults.values()):
        raise ValueError(
            f"{source}: " + "; ".join(f"{what}: {listed(names)}" for what, names in faults.items() if names)
        )
    _same_size(source, {f"{number}.npy": size for number, size in sorted(pictures.items())})
    _same_size(source, {f"{n}_{i}.npy": size for n in sorted(texts) for i, size in sorted(texts[n].items())})
    return np.array([len(texts[number]) for number in range(len(pictures))], dtype=np.int32)


def _same_size(source: Path, sizes: dict[str, int]) -> None:
    ((usual, _),) = Counter(sizes.values()).most_common(1)
    if odd := [f"{name} has {size}" for name, size in sizes.items() if size != usual]:
        raise ValueError(f"{source}: damaged files, {listed(odd)} bytes, where others have {usual}")


def _captions(path: Path, counts: np.ndarray, source: Path) -> list[list[str]]:
    captions = list(read_coco(path.parent, path.name).values())
    if len(captions) != len(counts):
        raise ValueError(
            f"{path} lists {len(captions):,} pictures, but {source} holds {len(counts):,}: name the annotations that "
            "they were extracted by"
        )
    if odd := [number for number, its_captions in enumerate(captions) if len(its_captions) != counts[number]]:
        raise ValueError(
            f"{path} has {len(captions[odd[0]])} captions of picture {odd[0]}, but {source} {counts[odd[0]]}: name the "
            "annotations that they were extracted by"
        )
    return captions


def _text(path: Path) -> np.ndarray:
    tokens = _load(path)
    if tokens.shape != SPEC.token_shape:
        raise ValueError(f"{path} has shape {tokens.shape}, but must be {SPEC.token_shape}, as CLIP ViT-L/14 makes it")
    return tokens


def _load(path: Path) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path} is damaged or no plain array ({error})") from error
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
        raise ValueError(f"{path} must hold one array of floating point")
    return array.astype(np.float32)
