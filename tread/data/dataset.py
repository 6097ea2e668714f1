"""Reads datasets of latents or pixels: folders that are checked when opened, and memory-mapped or copied to memory.

    index.json               what the numbers mean, and the files with their hashes
    shard-00000.npy          (n, views, channels, S, S) float16, float32 or, for pixels only, uint8; S: latents' side
    shard-00000.labels.npy   (n,) int64

In index.json, `content` is "latents" (also for pixels, with `autoencoder` "pixels") or "moments": a posterior's mean
and its spread, stacked along the channels (2C); `spread` is "logvar" or "std". The network sees (z − shift)·scale, and
`scale_applied` says whether stored numbers are on that scale already. A second view, if stored, is flipped left-right.
writer.py writes the format. Pictures, features and encoded captions, see columns.py, are opened on request.
"""

import functools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tread.data.captions import read_captions
from tread.data.columns import open_features, open_text
from tread.data.index import explain_damage, read_index
from tread.data.latents import LatentSpec, holds_pixels, stored_pictures
from tread.data.shards import Placement, ShardRows, open_arrays, open_latents, place
from tread.models import conditions
from tread.models.conditions import Condition, Text
from tread.runtime.randomness import generator
from tread.runtime.schema import check


class Batch(NamedTuple):
    """B samples: latents as stored (B, stored channels, S, S), labels (B,) int64, indices into the dataset (B,). Other
    fields are None unless the dataset was opened with them: features (B, tokens, channels) float16 and pictures (B, 3,
    H, W) uint8, mirrored if the latents are; text, an encoded caption per sample; and class_token (B, channels)
    float16, a feature vector of each whole picture."""

    stored: Tensor
    labels: Tensor
    indices: np.ndarray
    features: Tensor | None = None
    pictures: Tensor | None = None
    text: Text | None = None
    class_token: Tensor | None = None

    @property
    def condition(self) -> Condition:
        """The network's condition: the text if the dataset was opened with text, else the labels."""
        return self.labels if self.text is None else self.text

    def rows(self, rows: slice) -> "Batch":
        return Batch(*(None if part is None else conditions.rows(part, rows) for part in self))


Verify = Literal["open", "full"]
Rows = slice | np.ndarray  # rows of a batch: a slice or their indices


@functools.lru_cache(maxsize=2)  # two epochs: batches are read ahead, into the next epoch
def _epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """Return the order of an epoch's samples, a permutation of 0..count−1 determined by (seed, epoch)."""
    return torch.randperm(count, generator=generator(seed, epoch, "order")).numpy()


@dataclass
class LatentDataset:
    """A dataset of latents, read by (seed, step) or index. Raises FileNotFoundError or ValueError, naming the bad file.

    verify     "open" checks headers and sizes of all opened files, hashes of labels, caption counts and lengths, and
               some rows of features and text; "full" checks all hashes, and all rows of features and text.
    placement  "mmap": memory-mapped; "ram": copied to this process's memory; "device": copied to that of `device`. Text
               is placed like the latents; features, class tokens and stored pictures are always memory-mapped.
    features   the name of an encoder whose stored features are read too; `feature_spec` describes them.
    pictures   also read pictures, stored ones or the latents if they are pixels; `picture_size` is the side in pixels.
    text       the name of a text encoder whose encoded captions (`encoded`) are read too; `text_spec` describes them.
    flip       `batch` mirrors each sample with probability ½; only for pixels stored in one view, without features.
    class_token  channels of the stored feature vectors of whole pictures, which are then read too; None: not read.
    """

    folder: Path
    verify: Verify = "open"
    placement: Placement = "mmap"
    device: torch.device | str = "cpu"
    features: str | None = None
    pictures: bool = False
    text: str | None = None
    flip: bool = False
    class_token: int | None = None
    latents: LatentSpec = field(init=False)
    labels: np.ndarray = field(init=False, repr=False)
    feature_spec = class_fingerprint = text_spec = picture_size = encoded = None

    def __post_init__(self) -> None:
        check("verify", self.verify, Verify)
        check("placement", self.placement, Placement)
        self.folder = Path(self.folder)
        index, path = read_index(self.folder), self.folder / "index.json"
        self.attribution = index.get("attribution")  # a text that the data's licence requires
        with explain_damage(path, ValueError):
            self.latents = LatentSpec.from_json(index)
            known = "channel_mean" in index  # mean and std of each channel
            self.statistics = (tuple(index["channel_mean"]), tuple(index["channel_std"])) if known else None
            given = index.get("normalize_by")  # mean and std that the source of imported latents states
            self.normal = (tuple(given["mean"]), tuple(given["std"])) if given else self.statistics
        with explain_damage(path):
            self._open(index, full=self.verify == "full")
        fixed = self.features or self.class_token or self.latents.views > 1
        if self.flip and (fixed or not holds_pixels(self.latents)):
            raise ValueError(
                f"dataset.flip mirrors pixels stored in one view, without stored features, but {self.folder} holds "
                f"{self.latents.autoencoder}, {self.latents.views} views, features {self.features}: dataset.flip=false "
                "(prepare_latents.py flip=true stores a mirrored view of latents)"
            )
        rows = [self._columns["stored"], *(self.encoded.rows if self.encoded else ())]
        place(rows, self.placement, self.device, self.folder)
        self.placed = sum(part.nbytes for part in rows) if self.placement == "device" else 0  # bytes on the device

    def _open(self, index: dict, full: bool) -> None:
        shards, self.labels = open_latents(self.folder, index, self.latents, full)
        self._columns = {"stored": ShardRows(shards)}  # those fields of Batch that are read from shards
        if self.text is not None:
            self.encoded = open_text(self.folder, index, self.text, full)
            self.text_spec = self.encoded.spec
        if self.features is not None:
            self.feature_spec, self._columns["features"] = open_features(self.folder, index, self.features, full)
        if self.class_token is not None:
            made, self._columns["class_token"] = open_features(self.folder, index, None, full, self.class_token)
            self.class_fingerprint = made.fingerprint
        if self.pictures and "pictures" in index:
            arrays = open_arrays(self.folder, index["shards"], "pictures", "uint8", index["pictures"], full)
            self._columns["pictures"] = ShardRows([array[:, None] for array in arrays])  # of one view
            self.picture_size = index["pictures"][1]
        elif self.pictures and holds_pixels(self.latents):
            self.picture_size = self.latents.shape[1]
        elif self.pictures:
            again = "prepare it again by scripts/prepare_latents.py keep_pictures=true"
            raise ValueError(f"{self.folder} keeps no pictures beside its latents: {again}")

    def __reduce__(self) -> tuple:
        # pickling keeps the arguments, with which another process opens the files again
        how = (self.folder, "open", self.placement, self.device, self.features, self.pictures, self.text, self.flip)
        return LatentDataset, (*how, self.class_token), {"latents": self.latents}

    def bare(self) -> "LatentDataset":
        """Return a copy that reads the same open files, but no pictures and no features except class tokens."""
        bare = object.__new__(LatentDataset)
        columns = {name: self._columns[name] for name in ("stored", "class_token") if name in self._columns}
        vars(bare).update(vars(self), features=None, pictures=False, _columns=columns)
        return bare

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def views(self) -> int:
        """The number of views of each sample (plain, mirrored): those stored, or 2 if `flip` makes the mirrored one."""
        return 2 if self.flip else self.latents.views

    def locate(self, index: int) -> tuple[Path, int]:
        """Return the file that holds the sample with this index, and its row in that file."""
        return self._columns["stored"].locate(index)

    def normalize(self, std: float) -> None:
        """Change self.latents so that to_network makes each channel have mean 0 and standard deviation `std`. The mean
        and std before that are those in index.json: `normalize_by`, stated by the source of imported latents, or else
        the measured ones. Raises ValueError if index.json has neither, or if a channel's std is not above 0."""
        if self.normal is None or min(self.normal[1]) <= 0:
            raise ValueError(f"{self.folder} can't be normalised: it has no channel_mean and channel_std above 0")
        mean, measured = self.normal
        self.latents = replace(self.latents, channel_shift=mean, channel_scale=tuple(std / s for s in measured))

    def steps_per_epoch(self, batch_size: int) -> int:
        """Return the number of whole batches in an epoch. Samples left over at the end of an epoch's random order are
        skipped in that epoch. Raises ValueError if the dataset is smaller than a batch."""
        if len(self) < batch_size:
            raise ValueError(f"{self.folder} holds {len(self)} samples, fewer than one batch of {batch_size}")
        return len(self) // batch_size

    def batch(
        self, seed: int, step: int, batch_size: int, rows: Rows = slice(None), pin: bool = False, expect: bool = False
    ) -> Batch:
        """Return `rows` (a slice or indices) of the global batch of step `step` (0, 1, …); for `pin`, see `read`.
        Seed, step and batch_size determine samples, views and captions; no sample occurs twice in a global batch or an
        epoch. With `expect`, the operating system is asked to load all the rows from disk before the first is read."""
        indices, views, captions = self._chosen(seed, step, batch_size, rows)
        if expect:
            for column in self._columns.values():
                column.expect(indices, views)
            for column in self.encoded.rows if self.encoded else ():
                column.expect(captions)
        return self.read(indices, views, pin, captions)

    def _chosen(
        self, seed: int, step: int, batch_size: int, rows: Rows
    ) -> tuple[np.ndarray, np.ndarray | int, np.ndarray | None]:
        """Return, for `rows` of a step's global batch: sample indices, view numbers (0 plain, 1 mirrored; the int 0 if
        there are no mirrored views), and caption numbers (None without text)."""
        epoch, number = divmod(step, self.steps_per_epoch(batch_size))
        indices = _epoch_order(seed, epoch, len(self))[number * batch_size : (number + 1) * batch_size][rows]
        views, captions = 0, None
        if self.views > 1:
            drawn = torch.randint(self.views, (batch_size,), generator=generator(seed, step, "view"))
            views = drawn.numpy()[rows]
        if self.encoded is not None:
            drawn = torch.rand(batch_size, dtype=torch.float64, generator=generator(seed, step, "caption"))
            captions = self.encoded.numbers(indices, drawn.numpy()[rows])
        return indices, views, captions

    def read(
        self, indices: np.ndarray, views: np.ndarray | int = 0, pin: bool = False, captions: np.ndarray | None = None
    ) -> Batch:
        """Return samples by index, in the given order. Raises IndexError for an index or view that does not exist.

        views     the view of each sample, or one for all: 0 plain, 1 mirrored.
        pin       use page-locked CPU memory, but not for labels, text masks, word ids or pictures computed from pixels.
        captions  (B,) numbers of the captions to read, counted over the whole dataset; None: each sample's first.

        Tensors are in CPU memory, with one exception: with placement "device", latents and text are on the device, and
        so are pictures that are computed from stored pixels.
        """
        indices, views = np.asarray(indices), np.asarray(views)
        if len(indices) and not (0 <= indices.min() <= indices.max() < len(self) and 0 <= views.min()):
            raise IndexError(f"indices {indices.min()}..{indices.max()}, but {self.folder} holds {len(self)} samples")
        if views.size and views.max() >= self.views:
            raise IndexError(f"view {views.max()}, but {self.folder} has {self.views} views")
        parts = {name: column.read(indices, views, pin) for name, column in self._columns.items()}
        if self.pictures and "pictures" not in parts:
            parts["pictures"] = stored_pictures(parts["stored"], self.latents)
        if self.encoded is not None:
            parts["text"] = self.encoded.read(self.encoded.numbers(indices) if captions is None else captions, pin)
        return Batch(labels=torch.from_numpy(self.labels[indices]), indices=indices, **parts)

    @functools.cached_property
    def captions(self) -> list[list[str]]:
        """The captions of each sample as text. ValueError if there are none, FileNotFoundError if the file is gone."""
        return read_captions(self.folder, read_index(self.folder))
