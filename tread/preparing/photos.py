"""A source's pictures with classes and captions, the check for faulty files, and the choice of held-out pictures.
Captions may lie beside pictures (a.txt beside a.jpg), one per line. Faults are collected and reported together."""

import hashlib
import posixpath
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.pool import ThreadPool
from typing import Any

import numpy as np

from tread.preparing.archives import Store
from tread.preparing.images import HEAD, no_picture, read_rgb
from tread.runtime.tensor_files import listed

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff")
OTHERS = (".gif", ".heic", ".heif", ".avif", ".bmp", ".jxl")  # pictures in formats that are not supported
NAMED = 20  # files that an error message names at most
LOOKED = 100_000  # with more pictures, their first bytes are not checked in advance
DECODED = 10_000  # up to this many are all decoded before an error is raised, so that it can name all damaged ones
THREADS = 16  # number of threads that check first bytes
ONE_CLASS = ("all",)  # for captioned pictures without classes
Faults = list[tuple[str, str]]  # (name, why)
DAMAGED = " can't be read as a picture ({})"  # the argument `line` of `told`


@dataclass
class Photos:
    """Pictures in a fixed order.

    where     the source, for messages.
    names     the pictures' names, for messages and to recognise the same pictures in a later run.
    labels    (n,) int64, indices into classes.
    files     (read, key) per picture: read(key) returns the file's content or raises OSError. None: a removed file.
    faults    (name, reason) of files left out: not a picture, outside the class folders, a picture without captions,
              captions without a picture.
    captions  at least one text per picture, [] for a removed file; None: the source has no captions.
    heldout   prefix of the names of pictures that the source itself holds out; None: it holds out none.
    heads     whether read(key, n), which returns the first n bytes alone, is supported.
    """

    where: str
    names: list[str]
    labels: np.ndarray
    classes: tuple[str, ...]
    files: list[tuple[Callable[[Any], bytes], Any] | None]
    faults: Faults = field(default_factory=list)
    captions: list[list[str]] | None = None
    heldout: str | None = None
    heads: bool = True

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> bytes:
        """Return the content of a picture's file. Raises OSError if it was removed or can't be read."""
        if self.files[index] is None:
            raise OSError("it was removed")
        read, name = self.files[index]
        return read(name)

    @property
    def there(self) -> set[str]:
        """The names of the pictures whose files were not removed."""
        return {name for name, file in zip(self.names, self.files) if file is not None}

    def no_pictures(self, whole: bool = False) -> Faults:
        """Return (name, reason) of files that can't be read or aren't pictures, judged by their first bytes or, if
        `whole`, by decoding. Return [] without checking if over 100,000 files (`whole`: 10,000) or not self.heads."""

        def fault(file: tuple) -> str | None:
            read, name = file
            try:
                return read_rgb(read(name)) and None if whole else no_picture(read(name, HEAD))
            except (OSError, ValueError) as error:
                return str(error)

        if not self.heads or len(self) > (DECODED if whole else LOOKED):
            return []
        with ThreadPool(THREADS) as pool:  # network disks are slow to open a file
            return sorted((name, why) for name, why in zip(self.names, pool.map(fault, self.files)) if why)

    def check(self, skip: bool = False, allow_empty: bool = False) -> None:
        """Raise ValueError if there is no picture, if some files can't be used or aren't pictures (unless `skip`), or
        if a class has no picture (unless `allow_empty`). The message covers all faults, grouped by kind."""
        if not self.names:
            raise ValueError(f"{self.where} holds no picture ({', '.join(SUFFIXES)}){named(self.faults, ': {}')}")
        unused = [] if allow_empty else np.setdiff1d(range(len(self.classes)), self.labels)
        empty, texts = [self.classes[label] for label in unused], []
        if not skip:
            damaged = self.no_pictures()
            if self.faults or damaged or empty:
                damaged = self.no_pictures(whole=True) or damaged  # it stops here anyway: name all of them at once
            texts = told("files that can't be used", self.faults) + told("damaged pictures", damaged, DAMAGED)
            texts += ["Mend or remove them, or leave them out with on_error=skip"] * bool(texts)
        if empty:
            remedy = "Remove what is empty, or set allow_empty=true to keep the class"
            texts.append(f"classes without a picture: {listed(empty)}. {remedy}")
        if texts:
            raise ValueError(f"{self.where}: " + "\n".join(texts))

    def captioned(self, captions: Sequence[list[str] | str], faults: Faults) -> "Photos":
        """Return a copy with only the photos that have captions. The other photos are added to the copy's faults.

        captions  the captions of each picture, or the reason why it has none.
        faults    (name, reason) of captions without a picture, which are added to the copy's faults too.
        """
        kept = [index for index, given in enumerate(captions) if isinstance(given, list)]
        without = [(name, f"no caption: {why}") for name, why in zip(self.names, captions) if isinstance(why, str)]
        return replace(
            self,
            names=[self.names[index] for index in kept],
            labels=self.labels[kept],
            files=[self.files[index] for index in kept],
            captions=[captions[index] for index in kept],
            faults=[*self.faults, *without, *((name, f"a caption: {why}") for name, why in faults)],
        )


def told(what: str, faults: Faults, line: str = ": {}") -> list[str]:
    """Return [text], or [] if there are no faults. The text is `what`, the number of faults, and a line for each of the
    first 20: its name, then `line` with the reason in place of {}."""
    return [f"{what}, {len(faults):,} in all{named(faults, line)}"] if faults else []


def named(files: Faults, line: str) -> str:
    """Return a line per (name, reason) in `files`: name, then `line` with {} as the reason. After 20, how many more."""
    more = f"\n  and {len(files) - NAMED:,} more" if len(files) > NAMED else ""
    text = "".join(f"\n  {name}{line.format(why)}" for name, why in files[:NAMED]) + more
    return text.encode(errors="backslashreplace").decode()  # file names may hold bytes that are not UTF-8


def is_picture(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


def cleaned(captions: Sequence[str]) -> list[str]:
    """Return the captions with whitespace collapsed to single spaces, and without empty ones."""
    return [words for caption in captions if (words := " ".join(caption.split()))]


def held_out(names: Sequence[str], labels: np.ndarray, classes: int, wanted: float | int | str | None) -> np.ndarray:
    """Choose the pictures to hold out: (n,) bool. labels (n,) lie in 0..classes−1.

    wanted  float: a fraction of all pictures (at least one picture), spread over the classes in proportion to their
            sizes. int: a count, spread evenly. Either way, each class keeps a picture for training. str: the prefix of
            the names of the pictures that the source itself holds out. None: no picture.

    The choice within a class depends on the names alone. Raises ValueError if there are too few pictures.
    """
    if wanted is None or isinstance(wanted, str):
        return np.array([wanted is not None and name.startswith(wanted) for name in names], dtype=bool)
    sizes = np.bincount(labels, minlength=classes)
    if isinstance(wanted, float):
        total, shares = max(1, round(wanted * len(labels))), wanted * sizes
    else:
        total, shares = wanted, np.full(classes, wanted / classes)
    counts = _whole(shares, total, np.maximum(sizes - 1, 0))
    digests = [hashlib.sha256(name.encode(errors="surrogateescape")).digest() for name in names]
    hashes, out = np.array([digest[:8] for digest in digests], dtype="S8"), np.zeros(len(labels), dtype=bool)
    for label in np.flatnonzero(counts):
        members = np.flatnonzero(labels == label)
        out[members[np.argsort(hashes[members], kind="stable")[: counts[label]]]] = True
    return out


def _whole(shares: np.ndarray, total: int, most: np.ndarray) -> np.ndarray:
    """Round shares to integers ≤ `most` that sum to `total`, by largest remainders. ValueError if sum(most) < total."""
    if total > most.sum():
        most_out = f"{most.sum():,} can be held out: each class keeps one for training"
        raise ValueError(f"heldout takes {total:,} pictures, but {most_out}")
    counts = np.minimum(np.floor(shares).astype(int), most)
    while left := total - counts.sum():
        order = np.argsort(counts - shares, kind="stable")
        chosen = order[counts[order] < most[order]][:left]
        counts[chosen] += 1
    return counts


def split_texts(names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the names of files other than captions, and {name without suffix: name} of captions. All .txt files count
    as captions if one of them lies beside its picture (a.txt beside a.jpg); other files named like a picture (a.json)
    are dropped then. Without captions, returns all names and {}."""
    pictures = {_stem(name) for name in names if is_picture(name)}
    texts = {_stem(name): name for name in names if name.lower().endswith(".txt")}
    if not pictures & texts.keys():
        return list(names), {}
    beside = {*texts.values(), *(name for name in names if _stem(name) in pictures)}
    return [name for name in names if is_picture(name) or name not in beside], texts


def read_texts(store: Store, prefix: str, pictures: Sequence[str], texts: dict[str, str]) -> tuple[list, Faults]:
    """Read the captions of `pictures` from the text files `texts`, {name without suffix: name}. All these names lack
    the `prefix` that they have in the store. Returns a list with each picture's captions, or with the reason why it has
    none, and a list of (file, reason) for text files without a picture."""
    stems = [_stem(name) for name in pictures]
    captions = [_lines(store, prefix, texts.get(stem)) for stem in stems]
    alone = texts.keys() - set(stems)
    return captions, [(text, "there is no picture of its name") for stem, text in texts.items() if stem in alone]


def _lines(store: Store, prefix: str, name: str | None) -> list[str] | str:
    if name is None:
        return "there is no text file of its name"
    try:
        lines = cleaned(store.read(prefix + name).decode("utf-8-sig").split("\n"))
    except UnicodeDecodeError as error:
        return f"{name} is no UTF-8 text: {error}"
    except OSError as error:
        return f"{name} can't be read: {error}"
    return lines or f"{name} is blank"


def _stem(name: str) -> str:
    return posixpath.splitext(name)[0]
