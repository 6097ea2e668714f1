"""Scores how well generated emoji show their prompts: the nearest real emoji should have the prompt as a caption.

All real emoji are candidates, training and held-out ones. Samples are compared with them by pixels at 16×16 and, if
the weights of FID's Inception network are on this machine, also by its features. None of the scores is an FID."""

import itertools
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

SIDE = 16  # side of the pictures that are compared pixel by pixel
RANKS = (1, 5)
PARTS = ("seen", "held")  # captions of training emoji; captions of held-out emoji that combine known traits
COMPARED = ("", "_real", "_shifted")  # samples; the prompted emoji's real pictures; these shifted by a pixel


class EmojiSet(NamedTuple):
    """All real emoji, training before held-out ones: pictures (m, 3, S, S) uint8, and a list of captions for each."""

    pictures: Tensor
    captions: list[list[str]]


class Asked(NamedTuple):
    """The n emoji whose first captions serve as prompts.

    numbers  (n,) int64, indices into EmojiSet.
    parts    (n,) "seen" for training emoji, "held" for held-out emoji that combine known traits in a new way.
    texts    the n encoded prompts.
    """

    numbers: np.ndarray
    parts: np.ndarray
    texts: Text


def open_emoji(saved: SavedNetwork) -> list[ScoredPrompts]:
    """Open the captions of the emoji datasets of `saved`'s run, [training, held-out]; write missing datasets first.
    Raises FileNotFoundError or ValueError if that fails, or if captions' encoding or picture size is not `saved`'s."""
    dataset, parts = saved.cfg.dataset, []
    train = Path(dataset.path)
    for part, folder in (("train", train), ("heldout", Path(dataset.heldout or train.with_name("heldout")))):
        prepare_emoji(folder, part, saved.cfg.text.encoder)
        parts.append(open_prompts(saved, str(folder), with_words=False))
        if parts[-1].data.latents.shape != saved.latents.shape:
            raise ValueError(f"{folder} holds emoji of another size than {saved.found.folder} was trained on")
    return parts


def real_emoji(train: LatentDataset, heldout: LatentDataset | None) -> EmojiSet:
    """Return all pictures and captions of the emoji datasets `train` and then `heldout`, if that is not None."""
    parts = [data for data in (train, heldout) if data]
    pictures = [stored_pictures(data.read(np.arange(len(data))).stored, data.latents).cpu() for data in parts]
    return EmojiSet(torch.cat(pictures), [texts for data in parts for texts in data.captions])


def ask(train: LatentDataset, heldout: LatentDataset | None, count: int) -> Asked:
    """Choose `count` emoji whose first captions become prompts: half training emoji, evenly spread; half held-out ones
    that combine known traits in a new way (see prepare_emoji), repeated if too few; if none, all are training emoji."""
    compositions = read_index(heldout.folder).get("compositions", 0) if heldout else 0
    held = np.arange(count // 2) % compositions if compositions else np.arange(0)
    seen = np.linspace(0, len(train) - 1, count - len(held)).round().astype(np.int64)
    texts = to(train.read(seen).text, "cpu")
    if len(held):
        texts = join(texts, to(heldout.read(held).text, "cpu"))
    return Asked(np.concatenate([seen, len(train) + held]), np.repeat(PARTS, (len(seen), len(held))), texts)


def judge_emoji(pictures: Tensor, asked: Asked, real: EmojiSet, inception: Inception | None = None) -> dict[str, float]:
    """Score generated emoji, pictures (n, 3, S, S) uint8 sampled with the prompts in `asked`. Returns shares in 0..1:

    seen_top1, seen_top5  for captions of training emoji: share of pictures whose nearest real emoji (top5: one of the
                          five nearest) has the prompt as a caption.
    held_top1, held_top5  the same for captions of held-out emoji that combine known traits in a new way, if any.
    …_real                the same with the prompted emoji's real pictures as samples; below 1 if emoji look alike.
    …_shifted             the same with these real pictures shifted by one pixel, which are good but inexact samples.
    …_inception…          the same shares with distances between Inception features instead of pixels, if `inception` is
                          given; for example seen_top1_inception_real.
    """
    shown = real.pictures[torch.from_numpy(asked.numbers)]
    compared = dict(zip(COMPARED, (pictures, shown, shown.roll(1, dims=3))))
    features = {"": lambda pictures: F.adaptive_avg_pool2d(pictures.double() / 255, SIDE).flatten(1)}
    if inception is not None:
        features["_inception"] = lambda pictures: torch.from_numpy(extract(inception, pictures)["pool"]).double()
    shares = {}
    for name, look in features.items():
        known = look(real.pictures)
        right = {what: retrieved(look(compared[what]), known, asked, real) for what in COMPARED}
        for part, rank, what in itertools.product(dict.fromkeys(asked.parts.tolist()), RANKS, COMPARED):
            shares[f"{part}_top{rank}{name}{what}"] = float(right[what][asked.parts == part, :rank].any(axis=1).mean())
    return shares


def retrieved(features: Tensor, known: Tensor, asked: Asked, real: EmojiSet) -> np.ndarray:
    """Return (n, min(5, m)) bool: whether the nearest, second nearest, … real emoji has the prompt as a caption.
    `features` (n, F) are of the n pictures to judge, `known` (m, F) of all m real emoji."""
    nearest = torch.cdist(features, known).topk(min(max(RANKS), len(known)), largest=False).indices
    carried = [{caption.lower() for caption in captions} for captions in real.captions]
    wanted = [real.captions[number][0].lower() for number in asked.numbers]
    return np.array([[caption in carried[index] for index in row] for caption, row in zip(wanted, nearest.tolist())])
