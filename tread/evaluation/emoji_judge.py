"""How well generated emoji show what was asked for: the nearest real emoji should carry the caption. It is no FID.

The real emoji nearest to a drawn one are looked up among all of them, training and held out: by their pixels at 16×16,
and by the FID Inception's features where its weights are at hand.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tread.checkpoints.for_sampling import SavedNetwork
from tread.data.dataset import LatentDataset
from tread.data.index import read_index
from tread.data.latents import stored_pictures
from tread.encoders.inception import Inception, extract
from tread.evaluation.prompts import ScoredPrompts, open_prompts
from tread.models.conditions import Text, join, to
from tread.preparing.emoji import prepare_emoji

SIDE = 16  # of the pictures that are compared pixel by pixel
RANKS = (1, 5)
PARTS = ("seen", "held")  # captions of training emoji; of compositions that no training emoji shows
COMPARED = ("", "_real", "_shifted")  # what was drawn; the emoji asked for itself; the same, a pixel to the right


class EmojiSet(NamedTuple):
    """All real emoji, training first: pictures (m, 3, S, S) uint8, and the captions of each."""

    pictures: Tensor
    captions: list[list[str]]


class Asked(NamedTuple):
    """The emoji (n,) whose first captions are asked for: their numbers, their parts, and the captions' texts."""

    numbers: np.ndarray
    parts: np.ndarray
    texts: Text


def open_emoji(saved: SavedNetwork) -> list[ScoredPrompts]:
    """Open the training and the held-out part of a text network's dataset=emoji; they are written if they are missing.
    Raises FileNotFoundError or ValueError if that fails, or if size or text differ from those of its training."""
    dataset, parts = saved.cfg.dataset, []
    train = Path(dataset.path)
    for part, folder in (("train", train), ("heldout", Path(dataset.heldout or train.with_name("heldout")))):
        prepare_emoji(folder, part, saved.cfg.text.encoder)
        parts.append(open_prompts(saved, str(folder), with_words=False))
        if parts[-1].data.latents.shape != saved.latents.shape:
            raise ValueError(f"{folder} holds emoji of another size than {saved.found.folder} was trained on")
    return parts


def real_emoji(train: LatentDataset, heldout: LatentDataset | None) -> EmojiSet:
    """The pictures and captions of both parts of dataset=emoji."""
    parts = [data for data in (train, heldout) if data]
    pictures = [stored_pictures(data.read(np.arange(len(data))).stored, data.latents).cpu() for data in parts]
    return EmojiSet(torch.cat(pictures), [texts for data in parts for texts in data.captions])


def ask(train: LatentDataset, heldout: LatentDataset | None, count: int) -> Asked:
    """So many first captions: half of training emoji, spread over all, and half of held-out compositions, one after
    the other and again from the first; without held-out data all of the former."""
    compositions = read_index(heldout.folder).get("compositions", 0) if heldout else 0
    held = np.arange(count // 2) % compositions if compositions else np.arange(0)
    seen = np.linspace(0, len(train) - 1, count - len(held)).round().astype(np.int64)
    texts = to(train.read(seen).text, "cpu")
    if len(held):
        texts = join(texts, to(heldout.read(held).text, "cpu"))
    parts = np.repeat(PARTS, (len(seen), len(held)))
    return Asked(np.concatenate([seen, len(train) + held]), parts, texts)


def judge_emoji(pictures: Tensor, asked: Asked, real: EmojiSet, inception: Inception | None = None) -> dict[str, float]:
    """Score generated emoji: pictures (n, 3, S, S) uint8, drawn for the texts that were asked.

    seen_top1, seen_top5    share of the captions of training emoji that the nearest real emoji carries, or one of the
                            five nearest.
    held_top1, held_top5    the same of held-out compositions.
    …_real                  the same of the emoji asked for themselves: below 1 where others look alike to the features.
    …_shifted               the same of these, shifted by one pixel: what a right but inexact picture reaches.
    …_inception…            the same by Inception's features in the place of pixels.
    """
    shown = real.pictures[torch.from_numpy(asked.numbers)]
    compared = dict(zip(COMPARED, (pictures, shown, shown.roll(1, dims=3))))
    features: dict[str, Callable[[Tensor], Tensor]] = {"": small_pixels}
    if inception is not None:
        features["_inception"] = lambda pictures: torch.from_numpy(extract(inception, pictures)["pool"]).double()
    shares = {}
    for name, look in features.items():
        known = look(real.pictures)
        right = {what: retrieved(look(compared[what]), known, asked, real) for what in COMPARED}
        for part, rank, what in itertools.product(dict.fromkeys(asked.parts.tolist()), RANKS, COMPARED):
            share = right[what][asked.parts == part, :rank].any(axis=1).mean()
            shares[f"{part}_top{rank}{name}{what}"] = float(share)
    return shares


def small_pixels(pictures: Tensor) -> Tensor:
    """(n, 3, S, S) uint8 → (n, 3·16·16), the means of areas."""
    return F.adaptive_avg_pool2d(pictures.double() / 255, SIDE).flatten(1)


def retrieved(features: Tensor, known: Tensor, asked: Asked, real: EmojiSet) -> np.ndarray:
    """Features of drawings (n, F) and of real emoji (m, F) → (n, 5) bool: whether the nearest real emoji, the next, …
    carries the caption asked for."""
    nearest = torch.cdist(features, known).topk(min(max(RANKS), len(known)), largest=False).indices
    carried = [{caption.lower() for caption in captions} for captions in real.captions]
    wanted = [real.captions[number][0].lower() for number in asked.numbers]
    return np.array([[caption in carried[index] for index in row] for caption, row in zip(wanted, nearest.tolist())])
