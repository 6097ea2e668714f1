"""The captions that a text network is scored on: those of held-out pictures, with the text that is stored of them."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from tread.checkpoints.trained import Trained
from tread.data.beside import latents_hash
from tread.data.captions import captions_of
from tread.data.dataset import LatentDataset, read_index
from tread.data.encoded_text import encoder_name
from tread.evaluation.prompts import text_spec
from tread.models.text import Text

HELDOUT = "heldout"


@dataclass(frozen=True)
class ScoredPrompts:
    """Captions by number, in the order of their pictures.

    folder  of the dataset that they are of.
    count   of captions.
    sha256  of the dataset, its captions and what encoded them.
    read    numbers (n,) → what the network sees.
    """

    folder: Path
    count: int
    sha256: str
    read: Callable[[np.ndarray], Text]

    def text(self, numbers: Tensor) -> Text:
        """What the network sees of captions by number."""
        return self.read(numbers.numpy())

    def captions(self, numbers: Tensor) -> list[str]:
        """Captions by number, as people read them. Raises ValueError where the dataset holds none."""
        known = self._captions
        return [known[number] for number in numbers.tolist()]

    @functools.cached_property
    def _captions(self) -> list[str]:
        return list(itertools.chain.from_iterable(captions_of(self.folder, read_index(self.folder))))


def heldout_folder(trained: Trained) -> Path:
    """Where the held-out data of a checkpoint's run lies. Raises ValueError or FileNotFoundError."""
    name, where = trained.cfg.dataset.heldout, trained.found.folder
    if name in (None, "auto"):
        raise ValueError(f"{where} has no held-out data: name a dataset's folder in the place of {HELDOUT}")
    if not (Path(name) / "index.json").is_file():
        raise FileNotFoundError(
            f"the held-out data of {where} is not at {name} any more: name the folder where it lies in the place of "
            f"{HELDOUT}"
        )
    return Path(name)


def open_prompts(trained: Trained, asked: str) -> ScoredPrompts:
    """Captions to score a network on: "heldout", those of its run's held-out data, or a dataset's folder.

    Raises ValueError or FileNotFoundError, also if they were not encoded by the encoder of its training.
    """
    folder = heldout_folder(trained) if asked == HELDOUT else Path(asked).expanduser()
    if folder.is_file():
        raise ValueError(f"prompts={asked} is a file, but must be {HELDOUT} or the folder of a dataset with captions")
    wanted = text_spec(trained)
    data = LatentDataset(folder, text=wanted.encoder)
    if data.text_spec != wanted:
        raise ValueError(
            f"{folder} has other text than {trained.found.folder} was trained with: {data.text_spec.describe()}, and "
            f"that was {wanted.describe()}"
        )
    index = read_index(folder)
    count = index["text"][encoder_name(wanted.encoder)]["captions"]
    parts = {"latents": latents_hash(index), "captions": index.get("captions"), "text": asdict(wanted)}
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return ScoredPrompts(folder, count, digest, data.text_of)
