"""The pictures of a source, with their classes and captions, and what is wrong with the source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from tread.runtime.tensor_files import listed

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff")
NAMED = 20  # files that an error names
ONE_CLASS = ("all",)  # of captioned pictures without classes
Faults = list[tuple[str, str]]  # (name, why)


class Readable(Protocol):
    """Where pictures lie: a store of archives.py, or the rows of parquet files."""

    def read(self, name: str | int) -> bytes:
        """The content of a file. Raises OSError."""


@dataclass
class Photos:
    """Pictures in a fixed order.

    names    of the pictures, for messages and the work's plan.
    labels   (n,) int64, indices into classes.
    files    where each picture lies, and its name there.
    refused  (name, why) of files that lie among the pictures and are none.
    captions of each picture, at least one; None: the source has none.
    unpaired (name, why) of pictures without captions, and captions without a picture; neither is among the others.
    heldout  how the names of the pictures begin that the source itself holds out; None: none.
    """

    where: str
    names: list[str]
    labels: np.ndarray
    classes: tuple[str, ...]
    files: list[tuple[Readable, str | int]]
    refused: Faults = field(default_factory=list)
    captions: list[list[str]] | None = None
    unpaired: Faults = field(default_factory=list)
    heldout: str | None = None

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> bytes:
        """The content of a picture's file. Raises OSError."""
        store, name = self.files[index]
        return store.read(name)

    def check_classes(self, allow_empty: bool = False) -> None:
        """Raise ValueError if there is no picture, or, unless allow_empty, none of some class."""
        if not self.names:
            other = f"; it holds {self.refused[0][0]}" if self.refused else ""
            raise ValueError(f"{self.where} holds no picture ({', '.join(SUFFIXES)}){other}")
        empty = [self.classes[i] for i in np.setdiff1d(range(len(self.classes)), self.labels)]
        if empty and not allow_empty:
            raise ValueError(
                f"{self.where}: classes without a picture: {listed(empty)}. "
                "Remove what is empty, or set allow_empty=true to keep the class"
            )

    def refuse(self) -> None:
        """Raise ValueError that names the files that are no pictures, or else what has no captions or no picture."""
        if self.refused:
            raise ValueError(
                f"{self.where}: files that are no pictures, {len(self.refused):,} in all"
                f"{named(self.refused, 'is no picture: {}')}\nRemove them, or leave them out with on_error=skip"
            )
        if self.unpaired:
            raise ValueError(
                f"{self.where}: pictures without captions or captions without a picture, {len(self.unpaired):,} in all"
                f"{named(self.unpaired, ': {}', '')}\nMend or remove them, or leave them out with on_error=skip"
            )

    def captioned(self, captions: Sequence[list[str] | str], faults: Faults, heldout: str | None = None) -> Photos:
        """The pictures that have captions.

        captions  of each picture, or the reason why it has none.
        faults    captions without a picture.
        """
        kept = [index for index, given in enumerate(captions) if isinstance(given, list)]
        unpaired = [(name, f"no caption: {why}") for name, why in zip(self.names, captions) if isinstance(why, str)]
        return Photos(
            self.where,
            [self.names[index] for index in kept],
            self.labels[kept],
            self.classes,
            [self.files[index] for index in kept],
            self.refused,
            [captions[index] for index in kept],
            [*unpaired, *((name, f"a caption: {why}") for name, why in faults)],
            heldout,
        )


def named(files: Faults, what: str, between: str = " ") -> str:
    """The first of some files and why they are refused, a line each, and how many more there are."""
    more = f"\n  and {len(files) - NAMED:,} more" if len(files) > NAMED else ""
    return "".join(f"\n  {name}{between}{what.format(why)}" for name, why in files[:NAMED]) + more


def is_picture(name: str) -> bool:
    """Whether a file's name is a picture's."""
    return name.lower().endswith(SUFFIXES)
