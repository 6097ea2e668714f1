"""Reads prompts for text-conditional networks and encodes them with the text encoder used in training; opens captions
of a dataset for scoring. Samplers take labels: for a text-conditional network, indices of the prompts."""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from tread.checkpoints.for_sampling import SavedNetwork
from tread.data.captions import read_captions
from tread.data.columns import TextSpec, latents_hash, text_encoder_name
from tread.data.dataset import LatentDataset
from tread.data.index import read_index
from tread.diffusion.labels import class_labels, spread_classes
from tread.encoders.language import encoder_for, remarks
from tread.models.conditions import Text
from tread.runtime.files import content_hash

HELDOUT = "heldout"


def read_prompts(prompt: str | None, file: str | None) -> tuple[str, ...]:
    """Return the prompt, or the prompts of a file with one per line; () if neither is given. Raises OSError if the file
    can't be read, ValueError if both are given, a prompt or a line is blank, or the file is not UTF-8."""
    if prompt is not None and file is not None:
        raise ValueError("prompt=… and prompts=… are both given: name one prompt, or a file of them")
    if file is None:
        prompts, where = [] if prompt is None else [prompt], "prompt"
    else:
        where = Path(file).expanduser()
        try:
            prompts = where.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{where} is not UTF-8 ({error})") from error
    if blank := [str(number) for number, line in enumerate(prompts, 1) if not line.strip()]:
        raise ValueError(f"{where} is blank in line {', '.join(blank)}: say what to draw, one prompt per line")
    return tuple(prompts)


def row_labels(saved: SavedNetwork, classes: Sequence[int | None] | None, prompts: Sequence[str]) -> list[int]:
    """Return the labels to sample, one for each row of a grid. For a class-conditional network they are `classes`, with
    num_classes in place of None (no class); classes=None chooses up to ten classes, evenly spread. For a
    text-conditional network they are the prompts' indices. Raises ValueError for unknown classes, for a
    class-conditional network with prompts, and for a text-conditional one with classes or without prompts."""
    where, count = saved.found.folder, saved.cfg.dataset.num_classes
    if saved.text is not None:
        if classes is not None or not prompts:
            raise ValueError(f"{where} was trained with captions, and takes no classes: prompt='…', or prompts=<file>")
        return list(range(len(prompts)))
    if prompts:
        raise ValueError(f"{where} was trained with classes, and takes no prompt: classes=[0,1] names them")
    if classes is not None and not len(classes):
        raise ValueError("classes is empty: name some, or leave it out for ten")
    return class_labels(spread_classes(count, 10) if classes is None else classes, count, saved.label_drop)


def encode_prompts(
    saved: SavedNetwork, prompts: Sequence[str], device: torch.device, place: str | None = None
) -> tuple[Text, list[str]]:
    """Return the encoded prompts, and notes on prompts that are cut off or have unknown words. `place` is the text
    encoder's hub id or folder; None: the one used in training. Raises ValueError if the encoder can't be loaded or has
    another hash than in training, or if `place` is given although the encoder is a word list in the checkpoint."""
    if place is not None and saved.cfg.text.width is None:
        raise ValueError(f"text_encoder={place} is given, but {saved.found.folder} holds its words: leave it out")
    encoder = encoder_for(TextSpec(**asdict(saved.cfg.text)), device, place and str(Path(place).expanduser()))
    return encoder.encode(prompts), remarks(encoder, prompts)


@dataclass(frozen=True)
class ScoredPrompts:
    """Captions numbered 0..count−1, in their pictures' order, to draw samples for and to score them with. EmojiJudge
    (scorers.py) uses training and held-out captions: `data` is then the held-out dataset, `sha256` both hashes joined.

    data    the captions' dataset.
    count   number of captions.
    sha256  one hash of the dataset's latents, its captions and their encoder.
    read    function from caption numbers (n,) to encoded text.
    words   the captions as text, if they were requested; else ().
    """

    data: LatentDataset
    count: int
    sha256: str
    read: Callable[[np.ndarray], Text]
    words: Sequence[str]


def heldout_folder(saved: SavedNetwork) -> Path:
    """Return the folder of a run's held-out data. Raises ValueError if none is set, FileNotFoundError if it is gone."""
    name, where = saved.cfg.dataset.heldout, saved.found.folder
    if name in (None, "auto"):
        raise ValueError(f"{where} has no held-out data: name a dataset's folder instead of {HELDOUT}")
    if not (Path(name) / "index.json").is_file():
        raise FileNotFoundError(f"the held-out data of {where} is not at {name}: name its folder instead of {HELDOUT}")
    return Path(name)


def check_text(saved: SavedNetwork, text: TextSpec, folder: Path) -> TextSpec:
    """Return the `text` of the dataset in `folder`. Raises ValueError if it isn't what the network was trained with."""
    wanted = TextSpec(**asdict(saved.cfg.text))
    if text != wanted:
        theirs = f"{folder} has other text than {saved.found.folder} was trained with"
        raise ValueError(f"{theirs}: {text.describe()}, and that was {wanted.describe()}")
    return wanted


def open_prompts(saved: SavedNetwork, asked: str, with_words: bool) -> ScoredPrompts:
    """Open the captions to score a network on: those of its run's held-out data if `asked` is "heldout", else those of
    the dataset in the folder `asked`; with_words=True also reads their text. Raises FileNotFoundError or ValueError if
    they can't be opened, were not encoded as in training, or lack the text that with_words needs."""
    folder = heldout_folder(saved) if asked == HELDOUT else Path(asked).expanduser()
    data, index = LatentDataset(folder, text=saved.cfg.text.encoder), read_index(folder)
    wanted = check_text(saved, data.text_spec, folder)
    count = index["text"][text_encoder_name(wanted.encoder)]["captions"]
    parts = {"latents": latents_hash(index), "captions": index.get("captions"), "text": asdict(wanted)}
    digest = content_hash(json.dumps(parts, sort_keys=True))
    words = itertools.chain.from_iterable(read_captions(folder, index)) if with_words else ()
    return ScoredPrompts(data, count, digest, data.encoded.read, tuple(words))
