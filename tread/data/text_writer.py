"""Writing what a text encoder made of a dataset's captions, shard by shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from tread.data.columns import TextSpec, latents_hash, open_text
from tread.data.index import read_index
from tread.data.section_writer import SectionWriter
from tread.data.shards import write_array
from tread.models.conditions import Text
from tread.runtime.files import explain_failure, sha256, whole_file

SHARD = 1 << 28  # bytes of a shard, about


class TextWriter(SectionWriter):
    """An encoder's text of a dataset in the making.

    folder      of the dataset: one that is finished, or that its writer has just assembled (writer.data).
    spec        the encoder, and the shape of what it makes.
    counts      (samples,) how many captions each sample has, at least one.
    shard_size  captions in a shard, the unit of resuming; None: as many as take 256 MB.
    """

    def __init__(self, folder: Path, spec: TextSpec, counts: Sequence[int], shard_size: int | None = None) -> None:
        self.spec, self.counts = spec, np.asarray(counts, dtype=np.int32)
        index = read_index(folder)
        if len(self.counts) != index["count"] or (len(self.counts) and self.counts.min() < 1):
            raise ValueError(
                f"{folder} holds {index['count']:,} samples, each of which needs a count of captions above 0"
            )
        self.total, size = int(self.counts.sum()), shard_size or max(1, SHARD // spec.caption_bytes)
        captions = index.get("captions")
        made_of = {**asdict(spec), "captions_sha256": captions and captions["sha256"], "of": latents_hash(index)}
        super().__init__(
            folder,
            f"text of {spec.encoder}",
            spec.stem,
            place=("text", spec.encoder),
            facts={**made_of, "captions": self.total},
            plan={**made_of, "counts": self.counts.tolist(), "shard_size": size},
            ranges=[range(first, min(first + size, self.total)) for first in range(0, self.total, size)],
            row_bytes=spec.caption_bytes,
            open=lambda full: open_text(self.folder, read_index(self.folder), spec.encoder, full),
        )
        self.names.append("null")

    def write(self, number: int, text: Text) -> None:
        """Write a shard: what the encoder made of the captions in `ranges[number]`.

        Raises ValueError for text that is not what `spec` says, or not finite in float16.
        """
        self._write(f"{number:05d}", len(self.ranges[number]), text)

    def write_null(self, text: Text) -> None:
        """Write the empty caption's own encoding, one row."""
        self._write("null", 1, text)

    def _write(self, name: str, count: int, text: Text) -> None:
        arrays = {key: array for key, array in self._arrays(name, count, text).items() if array is not None}
        note: dict[str, object] = {"count": count}
        for key, array in arrays.items():
            note |= self._array(key, f"{name}{'' if key == 'file' else f'.{key}'}", array)
        self.note(name, note)

    def _array(self, key: str, name: str, array: np.ndarray) -> dict[str, str]:
        path = self.work / f"{self.spec.stem}-{name}.npy"
        with explain_failure(path), whole_file(path) as partial, partial.open("wb") as file:
            write_array(file, array)
        return {key: path.name, f"{key}_sha256": sha256(path)}

    def _arrays(self, name: str, count: int, text: Text) -> dict[str, np.ndarray | None]:
        """File kind → what is stored of a text."""
        spec = self.spec
        mask = text.mask.cpu().numpy()
        lengths = mask.sum(axis=1).astype(np.int32)
        if not np.array_equal(mask, np.arange(mask.shape[1]) < lengths[:, None]) or (
            len(lengths) and not lengths.min()
        ):
            raise ValueError(f"text {name} must begin with its words, at least one, and end with its padding")
        tokens, pooled = text.tokens.cpu(), None if text.pooled is None else text.pooled.half().cpu().numpy()
        tokens = (tokens.int() if spec.width is None else tokens.half()).numpy()
        shapes, expected = (tokens.shape, pooled is not None and pooled.shape), (count, *spec.token_shape)
        if shapes != (expected, spec.pooled is not None and (count, spec.pooled)):
            raise ValueError(
                f"text {name} has tokens {shapes[0]} and pooled {shapes[1] or 'none'}, but must have {expected} and "
                f"{(count, spec.pooled) if spec.pooled else 'none'}"
            )
        if spec.width is not None and not (np.isfinite(tokens).all() and (pooled is None or np.isfinite(pooled).all())):
            raise ValueError(
                f"text {name} holds numbers that are not finite in float16: they are too large for it, or the weights "
                f"of {spec.encoder} are broken"
            )
        return {"file": tokens, "lengths": lengths, "pooled": pooled}

    def publish(self) -> None:
        """As SectionWriter's, with the counts of captions."""
        super().publish(**self._array("counts", "counts", self.counts))
