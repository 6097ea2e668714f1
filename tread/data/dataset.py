"""The latent format: a folder that is checked when opened and read at the speed of memory.

    index.json               what the numbers mean, and size and sha256 of every file
    shard-00000.npy          (n, views, channels, S, S) float16 or float32, read by memory map
    shard-00000.labels.npy   (n,) int64

`content` says what is stored: "latents", or "moments", a posterior's mean and spread stacked along
the channels (2C of them), where `spread` is "logvar" or "std". The network sees
(z − shift)·scale; `scale_applied` says whether the stored numbers already are on that scale.
A second view, where stored, is the horizontally flipped picture. writer.py writes the format. Pictures and features
may lie beside the shards, see columns.py; they are read where they are asked for.
"""

import functools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tread.data.captions import read_captions
from tread.data.columns import FeatureSpec, TextSpec, open_features, open_pictures, open_text
from tread.data.index import damaged, read_index
from tread.data.latents import LatentSpec, holds_pixels, stored_pictures
from tread.data.shards import Placement, ShardRows, open_latents, place
from tread.models import conditions
from tread.models.conditions import Condition, Text
from tread.runtime.randomness import generator
from tread.runtime.schema import check


class Batch(NamedTuple):
    """Samples as stored (B, stored channels, S, S), labels (B,) int64, indices into the dataset (B,).

    Where the dataset was opened with them: the same views' features (B, T, z) float16 and pictures (B, 3, H, W) uint8,
    and the text of one caption of each sample.
    """

    stored: Tensor
    labels: Tensor
    indices: np.ndarray
    features: Tensor | None = None
    pictures: Tensor | None = None
    text: Text | None = None

    @property
    def condition(self) -> Condition:
        """The network's condition: the text where the dataset was opened with it, else the labels."""
        return self.labels if self.text is None else self.text

    def rows(self, rows: slice) -> "Batch":
        """Some of the samples."""
        return Batch(*(None if part is None else conditions.rows(part, rows) for part in self))


Verify = Literal["open", "full"]
Statistics = tuple[tuple[float, ...], tuple[float, ...]]


@functools.lru_cache(maxsize=2)  # two: batches are prepared ahead, across the end of an epoch
def _epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The epoch's global shuffle: a permutation of 0..count−1 given by (seed, epoch)."""
    return torch.randperm(count, generator=generator(seed, epoch, "order")).numpy()


@dataclass
class LatentDataset:
    """A dataset opened for reading: checked, addressed by (seed, step), held where `placement` says.

    verify     "open" checks headers and sizes of all files, and the labels' hashes; "full" also hashes the latents.
    placement  "mmap": memory-mapped, so that the operating system keeps in memory what it can; "ram": read into this
               process's memory at once; "device": read into the memory of `device`.
    features   the encoder whose features are read too; `feature_spec` describes them.
    pictures   read the pictures too: those that were kept, or the latents themselves if they are pixels;
               `picture_size` is their side.
    text       the encoder whose text of the captions is read too; `text_spec` describes it.

    Features and pictures are memory-mapped, whatever the placement; text lies where the latents do.

    Raises FileNotFoundError or ValueError that says which file and why, or what does not fit.
    """

    folder: Path
    verify: Verify = "open"
    placement: Placement = "mmap"
    device: torch.device | str = "cpu"
    features: str | None = None
    pictures: bool = False
    text: str | None = None
    latents: LatentSpec = field(init=False)
    feature_spec: FeatureSpec | None = field(init=False, default=None)
    text_spec: TextSpec | None = field(init=False, default=None)
    picture_size: int | None = field(init=False, default=None)
    labels: np.ndarray = field(init=False, repr=False)
    statistics: Statistics | None = field(init=False)  # mean, std of each channel
    normal: Statistics | None = field(init=False)  # those that `normalize` takes
    attribution: str | None = field(init=False)  # what its licence asks to be named, as the index states it

    def __post_init__(self) -> None:
        check("verify", self.verify, Verify)
        check("placement", self.placement, Placement)
        self.folder = Path(self.folder)
        index, path = read_index(self.folder), self.folder / "index.json"
        self.attribution = index.get("attribution")
        try:
            self.latents = LatentSpec.from_json(index)
            known = "channel_mean" in index
            self.statistics = (tuple(index["channel_mean"]), tuple(index["channel_std"])) if known else None
            given = index.get("normalize_by")  # an import's source may have said it
            self.normal = (tuple(given["mean"]), tuple(given["std"])) if given else self.statistics
        except (ValueError, KeyError, TypeError) as error:
            raise damaged(path, error) from error
        try:
            self._open(index, full=self.verify == "full")
        except (KeyError, TypeError) as error:
            raise damaged(path, error) from error
        place([self._latents, *(self._text.rows if self._text else ())], self.placement, self.device, self.folder)

    def _open(self, index: dict, full: bool) -> None:
        shards, self.labels = open_latents(self.folder, index, self.latents, full)
        self._latents, self._features, self._pictures, self._text = ShardRows(shards), None, None, None
        if self.text is not None:
            self._text = open_text(self.folder, index, self.text, full)
            self.text_spec = self._text.spec
        if self.features is not None:
            self.feature_spec, self._features = open_features(self.folder, index, self.features, full)
        if self.pictures and "pictures" in index:
            self._pictures, self.picture_size = open_pictures(self.folder, index, full), index["pictures"][1]
        elif self.pictures and holds_pixels(self.latents):
            self.picture_size = self.latents.shape[1]
        elif self.pictures:
            raise ValueError(
                f"{self.folder} keeps no pictures beside its latents: prepare it again by "
                "scripts/prepare_latents.py keep_pictures=true"
            )

    def __reduce__(self) -> tuple:
        # another process opens the files anew, rather than being sent what they hold
        how = (self.folder, "open", self.placement, self.device, self.features, self.pictures, self.text)
        return LatentDataset, how, {"latents": self.latents}

    def __len__(self) -> int:
        return len(self.labels)

    def locate(self, index: int) -> tuple[Path, int]:
        """The shard's file that holds a sample, and its number in there."""
        return self._latents.locate(index)

    def normalize(self, std: float) -> None:
        """Let the network see each channel with mean 0 and this standard deviation (`LatentSpec.channel_scale`).

        By the numbers that an import's source gave, where it did, else by measured ones. Raises ValueError
        if the dataset's statistics are not known or a channel is constant.
        """
        if self.normal is None or min(self.normal[1]) <= 0:
            raise ValueError(
                f"{self.folder} can't be normalised: its index.json has no channel_mean and channel_std above 0. "
                "Prepare it again, or set dataset.normalize=false"
            )
        mean, measured = self.normal
        self.latents = replace(self.latents, channel_shift=mean, channel_scale=tuple(std / s for s in measured))

    def steps_per_epoch(self, batch_size: int) -> int:
        """Whole batches an epoch; the samples left over (others each epoch) wait for the next one."""
        if len(self) < batch_size:
            raise ValueError(f"{self.folder} holds {len(self)} samples, fewer than one batch of {batch_size}")
        return len(self) // batch_size

    def batch(self, seed: int, step: int, batch_size: int, rows: slice = slice(None), pin: bool = False) -> Batch:
        """Rows of the global batch of a step (0, 1, …), the same whoever reads them.

        No sample comes twice in a batch or an epoch. The view and the caption are drawn by (seed, step).
        """
        indices, views, captions = self._chosen(seed, step, batch_size, rows)
        return self.read(indices, views, pin, captions)

    def _chosen(
        self, seed: int, step: int, batch_size: int, rows: slice
    ) -> tuple[np.ndarray, np.ndarray | int, np.ndarray | None]:
        """Indices, views and, where there is text, caption numbers of rows of the global batch of a step."""
        epoch, number = divmod(step, self.steps_per_epoch(batch_size))
        indices = _epoch_order(seed, epoch, len(self))[number * batch_size : (number + 1) * batch_size][rows]
        views, captions = 0, None
        if self.latents.views > 1:
            drawn = torch.randint(self.latents.views, (batch_size,), generator=generator(seed, step, "view"))
            views = drawn.numpy()[rows]
        if self._text is not None:
            drawn = torch.rand(batch_size, dtype=torch.float64, generator=generator(seed, step, "caption"))
            captions = self._text.numbers(indices, drawn.numpy()[rows])
        return indices, views, captions

    def expect(self, seed: int, step: int, batch_size: int, rows: slice = slice(None)) -> None:
        """Have the operating system read what `batch` will need, all at once; memory-mapped data only."""
        indices, views, captions = self._chosen(seed, step, batch_size, rows)
        for part in (self._latents, self._features, self._pictures):
            if part is not None:
                part.expect(indices, views)
        if captions is not None:
            self._text.expect(captions)

    def read(
        self, indices: np.ndarray, views: np.ndarray | int = 0, pin: bool = False, captions: np.ndarray | None = None
    ) -> Batch:
        """Samples by index, in the order given; views chooses the stored view of each.

        captions  numbers of their captions among all of the dataset; None: of each its first one.

        They lie in CPU memory, page-locked with `pin`; with placement "device" the stored numbers lie in
        that device's. Raises IndexError for an index or view that is not there.
        """
        indices, views = np.asarray(indices), np.asarray(views)
        if len(indices) and not (0 <= indices.min() <= indices.max() < len(self) and 0 <= views.min()):
            raise IndexError(f"indices {indices.min()}..{indices.max()}, but {self.folder} holds {len(self)} samples")
        if views.size and views.max() >= self.latents.views:
            raise IndexError(f"view {views.max()}, but {self.folder} holds {self.latents.views} views")
        stored = self._latents.read(indices, views, pin)
        features = self._features and self._features.read(indices, views, pin)
        pictures = self._pictures and self._pictures.read(indices, views, pin)
        if self.pictures and pictures is None:
            pictures = stored_pictures(stored, self.latents)
        text = None
        if self._text is not None:
            text = self._text.read(self._text.numbers(indices) if captions is None else captions, pin)
        return Batch(stored, torch.from_numpy(self.labels[indices]), indices, features, pictures, text)

    def text_of(self, captions: np.ndarray) -> Text:
        """The text of captions, given their dataset-wide numbers; the dataset must be opened with text."""
        return self._text.read(captions)

    def null_text(self) -> Text:
        """The text of the empty caption, one row."""
        return self._text.null

    @functools.cached_property
    def captions(self) -> list[list[str]]:
        """The captions of each sample. Raises FileNotFoundError or ValueError where there are none."""
        return read_captions(self.folder, read_index(self.folder))
