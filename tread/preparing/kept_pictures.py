"""The photos that a prepared dataset was made of, found again in its order and cropped as they were."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from tread.data.dataset import LatentDataset
from tread.preparing.encode_photos import Crops, collate, end_with, source_hash
from tread.preparing.heldout import held_out
from tread.preparing.images import Crop
from tread.preparing.sources import NONE, find_photos


class SourcePictures:
    """Pictures by the samples' indices in a dataset.

    data          the dataset, or what was held out with it: report.json says how it was made.
    source, root, labels
                  the photos, as scripts/prepare_latents.py took them.

    where, size   where they lie, and the side of their crops in pixels.

    Raises ValueError or OSError unless they are those that the latents were made of, by names, labels and classes.
    """

    def __init__(self, data: LatentDataset, source: Path, root: str | None, labels: str | None) -> None:
        report = data.folder / "report.json"
        made = json.loads(report.read_text()) if report.is_file() else {}
        plan, latents = made.get("plan", {}), data.latents
        if not {"pictures", "resolution"} <= plan.keys():
            raise ValueError(
                f"{data.folder} does not say which photos it was made of: scripts/prepare_latents.py did not make it. "
                "Prepare it from the photos, or take a dataset that keeps its pictures"
            )
        photos = find_photos(source, root, labels, plan.get("captions_in") if "captions" in plan else NONE)
        if source_hash(photos.classes, photos.names, photos.labels) != plan["pictures"]:
            raise ValueError(
                f"{photos.where} holds other pictures than {data.folder} was made of ({len(photos):,}, by names and "
                "classes): name the same source=…, root=… and labels=… as then"
            )
        chosen = np.ones(len(photos), dtype=bool)
        if "heldout" in plan:
            out = held_out(photos.names, photos.labels, len(photos.classes), plan["heldout"])
            chosen = out if plan["part"] == "heldout" else ~out
        left_out = {name for name, _ in made.get("left_out", [])}
        chosen &= np.array([name not in left_out for name in photos.names])
        self._photos, self._chosen = photos, np.flatnonzero(chosen)
        if photos.labels[chosen].tolist() != data.labels.tolist():
            raise ValueError(
                f"{photos.where} has {chosen.sum():,} pictures where {data.folder} has {len(data):,} samples, or of "
                "other classes: some were damaged or removed when it was made. Prepare it again with keep_pictures=true"
            )
        self.where, self.size = photos.where, plan["resolution"]
        self._crop = Crop(self.size, latents.orientation, latents.alpha)

    def batches(self, parts: Sequence[np.ndarray], workers: int) -> Iterator[Tensor]:
        """For each of some arrays of samples' indices, their pictures (B, 3, size, size) uint8.

        Raises ValueError for one that can't be read any more, or if a reading process ends.
        """
        parts = [self._chosen[part] for part in parts]
        loader = DataLoader(
            Crops(self._photos, self._crop),
            batch_sampler=[part.tolist() for part in parts],
            num_workers=workers,
            collate_fn=collate,
            worker_init_fn=partial(end_with, os.getpid()),
        )
        coming = iter(loader)
        for part in parts:
            try:
                pictures, notes = next(coming)
            except RuntimeError as error:  # of PyTorch, where a worker died
                raise ValueError(
                    f"a reading process ended: {error}\nTry fewer workers, or a smaller batch_size"
                ) from error
            for number, (why, _) in zip(part.tolist(), notes):
                if why:
                    raise ValueError(f"{self.where}: {self._photos.names[number]} can't be read as a picture ({why})")
            yield pictures
