"""Where pictures and their classes come from: folders, tars, parquet files.

    class folders     train/n01440764/1.jpg, in a folder or a tar; classes are the sorted folder names
    a labels file     beside pictures in a flat folder or tar: EDM's dataset.json or a CSV, see label_table
    parquet           as Hugging Face writes picture datasets, see parquet.py

Nothing is decoded here; images.py does.
"""

from __future__ import annotations

import csv
import io
import json
import os
import posixpath
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np

from tread.data.parquet import open_pictures, parquet_files
from tread.data.tars import Tar
from tread.runtime.tensor_files import listed

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff")
LABEL_FILES = ("dataset.json", "labels.csv", "metadata.csv")
LABEL_FORMATS = 'EDM\'s dataset.json, {"labels": [[file, label], …]}, or a CSV with the header file,label'
NAMED = 20  # files that an error names
MOST_CLASSES = 1_000_000  # a larger label is taken for a mistake


@dataclass
class Photos:
    """Pictures in a fixed order.

    names    of the pictures, for messages and the work's plan.
    labels   (n,) int64, indices into classes.
    read     index → the picture's file content; raises OSError.
    refused  (name, why) of files that lie among the pictures and are none.
    """

    where: str
    names: list[str]
    labels: np.ndarray
    classes: tuple[str, ...]
    read: Callable[[int], bytes]
    refused: list[tuple[str, str]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.names)

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
        """Raise ValueError that names the files that are no pictures."""
        raise ValueError(
            f"{self.where}: files that are no pictures, {len(self.refused):,} in all"
            f"{named(self.refused, 'is no picture: {}')}\nRemove them, or leave them out with on_error=skip"
        )


def named(files: list[tuple[str, str]], what: str) -> str:
    """The first of some files and why they are refused, a line each, and how many more there are."""
    more = f"\n  and {len(files) - NAMED:,} more" if len(files) > NAMED else ""
    return "".join(f"\n  {name} {what.format(why)}" for name, why in files[:NAMED]) + more


class Folder:
    """A folder's files, with the same attributes as a Tar."""

    def __init__(self, path: Path) -> None:
        self.path, self.names, self.folders = Path(path), [], []
        for folder, inner, files in os.walk(path, followlinks=True, onerror=_raise):
            inside = PurePosixPath(os.path.relpath(folder, path).replace(os.sep, "/"))
            self.names += [str(inside / name) for name in files]
            self.folders += [str(inside / name) for name in inner]
        self.names.sort()

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()


def _raise(error: OSError) -> None:
    raise error


def find_photos(source: Path, root: str | None = None, labels: str | None = None) -> Photos:
    """The pictures of a folder, a tar, or a parquet file or folder of such.

    root    a folder inside the source (of parquet files: a split) that holds the pictures; None: the
            outermost that does.
    labels  a labels file, beside the source or inside it; None: one of LABEL_FILES if it lies beside
            the pictures, else class folders.

    Raises FileNotFoundError, or ValueError that says what was found instead.
    """
    source = Path(source)
    if not source.exists():
        raise FileNotFoundError(f"{source} is not there; source must be a folder, a tar or parquet files")
    if paths := parquet_files(source):
        names, numbers, classes, read = open_pictures(source, paths, root)
        return Photos(str(source), names, numbers, tuple(classes), read)
    store = Folder(source) if source.is_dir() else Tar(source)
    names = [name for name in store.names if not _hidden(name)]
    folders = set(store.folders) | {name.rpartition("/")[0] for name in names}
    folders |= {str(parent) for folder in folders for parent in PurePosixPath(folder).parents}
    folders = {folder for folder in folders if not _hidden(folder)} - {"", "."}
    inside = _inside(source, names, folders, root, labels)
    prefix = f"{inside}/" if inside else ""
    names = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    where = f"{source}:{inside}" if inside else str(source)

    chosen = labels or next((name for name in LABEL_FILES if name in names), None)
    if chosen is not None:
        if chosen not in names and not Path(chosen).is_file():
            raise FileNotFoundError(f"labels file {chosen} is neither in {where} nor a file of that path")
        content = store.read(prefix + chosen) if chosen in names else Path(chosen).read_bytes()
        names = [name for name in names if name not in (chosen, *LABEL_FILES)]
        names, numbers, classes, refused = _by_table(where, names, label_table(chosen, content))
    else:
        classes = sorted({f.removeprefix(prefix).split("/")[0] for f in folders if f.startswith(prefix)})
        names, numbers, refused = _by_folder(where, names, classes)
    read = partial(_read, store, [prefix + name for name in names])
    return Photos(where, names, np.array(numbers, dtype=np.int64), tuple(classes), read, refused)


def _read(store: Folder | Tar, names: list[str], index: int) -> bytes:
    return store.read(names[index])


LEFT_BY_SYSTEMS = ("__MACOSX", "Thumbs.db", "desktop.ini")


def _hidden(name: str) -> bool:
    return any(part.startswith(".") and part != "." or part in LEFT_BY_SYSTEMS for part in name.split("/"))


def _is_picture(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


def _inside(source: Path, names: list[str], folders: set[str], root: str | None, labels: str | None) -> str:
    """The folder that `root` means, or the outermost that has more in it than a folder; "" for the source itself."""
    tables = {*LABEL_FILES, labels}
    if root is not None:
        root = str(PurePosixPath(root))
        outermost = sorted(folders, key=lambda f: (f.count("/"), f))
        found = [folder for folder in outermost if folder == root or folder.endswith(f"/{root}")]
        if not found:
            raise ValueError(f"{source} has no folder {root}; its folders are {', '.join(outermost[:8]) or 'none'}, …")
        return found[0]
    inside = ""
    while True:
        prefix = f"{inside}/" if inside else ""
        below = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        tops = {name.split("/")[0] for name in below}
        if len(tops) != 1 or "/" not in below[0]:
            return inside
        lower = [name.split("/", 1)[1] for name in below]
        if any("/" not in name for name in lower) and not set(lower) & tables:
            return inside  # the only folder holds pictures: it is a class
        inside = prefix + tops.pop()


def _by_folder(where: str, names: list[str], classes: list[str]) -> tuple[list, list, list]:
    """Pictures, labels and refused files of class folders."""
    index = {name: number for number, name in enumerate(classes)}
    kept, numbers, refused = [], [], []
    for name in names:
        folder, _, file = name.rpartition("/")
        if not folder and _is_picture(name):
            raise ValueError(
                f"{where}: {name} lies in no class folder. Use class folders (train/<class>/<picture>), or labels=… "
                f"with a labels file: {LABEL_FORMATS} ({', '.join(LABEL_FILES)} are found by themselves)"
            )
        if "/" in folder:
            tops = ", ".join(f"root={top}" for top in classes[:4])
            raise ValueError(
                f"{where}: {name} lies deeper than <class>/<picture>; choose the folder of classes: {tops}"
            )
        if file in LABEL_FILES:
            raise ValueError(f"{where}: {name} is a labels file in a folder of its own; choose it by root={folder}")
        if _is_picture(name):
            kept.append(name)
            numbers.append(index[folder])
        else:
            refused.append((name, "its name is not a picture's"))
    return kept, numbers, refused


def _by_table(where: str, names: list[str], table: dict[str, int | str]) -> tuple:
    """Pictures, labels, classes and refused files, as a labels file has them."""
    check_table(where, table, {name for name in names if _is_picture(name) or name in table})
    refused = [(name, "its name is not a picture's") for name in names if name not in table]
    kept = sorted(table)
    labels = [table[name] for name in kept]
    if all(isinstance(label, int) for label in labels):
        odd = [f"{name} has label {label}" for name, label in zip(kept, labels) if not 0 <= label < MOST_CLASSES]
        if odd:
            raise ValueError(f"{where}: {listed(odd)}, but must have one in 0..{MOST_CLASSES - 1}")
        return kept, labels, [str(number) for number in range(max(labels, default=-1) + 1)], refused
    if not all(isinstance(label, str) for label in labels):
        raise ValueError(f"{where}: some labels are numbers and some are names; use one of both")
    classes = sorted(set(labels))
    index = {name: number for number, name in enumerate(classes)}
    return kept, [index[label] for label in labels], classes, refused


def check_table(where: str, table: dict[str, int | str], files: set[str]) -> None:
    """Raise ValueError unless the labels are those of the files."""
    wrong = {"labelled, but not there": table.keys() - files, "without a label": files - table.keys()}
    if any(wrong.values()):
        raise ValueError(f"{where}: " + "; ".join(f"{what}: {listed(sorted(n))}" for what, n in wrong.items() if n))


def _is_label(label: object) -> bool:
    plain = isinstance(label, (int, str)) and not isinstance(label, bool)
    return plain and not re.fullmatch(r"\d+\.\d*", str(label))


def label_table(name: str, content: bytes) -> dict[str, int | str]:
    """A labels file as {picture: number or name of its class}.

    A CSV (Hugging Face's column file_name does as well as file), or else EDM's JSON. Raises ValueError.
    """
    try:
        text = content.decode("utf-8-sig")
        if name.endswith(".csv"):
            read = csv.DictReader(io.StringIO(text))
            rows = [(row["file" if "file" in row else "file_name"], row["label"]) for row in read]
        else:
            rows = json.loads(text)["labels"]
            if not all(isinstance(row, list) for row in rows):
                raise ValueError("labels is no list of lists")
        rows = [(posixpath.normpath(p), label.strip() if isinstance(label, str) else label) for p, label in rows]
        if all(isinstance(label, str) and label.isdecimal() for _, label in rows):
            rows = [(picture, int(label)) for picture, label in rows]
        odd = [f"{picture} is {label!r}" for picture, label in rows if not _is_label(label)]
        if odd:
            raise ValueError(f"the label of {listed(odd)}, but must be a whole number or a name")
        twice = [picture for picture, count in Counter(picture for picture, _ in rows).items() if count > 1]
        if twice:
            raise ValueError(f"{listed(twice)} comes twice")
        outside = [picture for picture, _ in rows if picture.split("/")[0] in ("", "..")]
        if outside:
            raise ValueError(f"{listed(outside)} lies outside of the folder that the names are of")
        return dict(rows)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"labels file {name} can't be read: {error}. It must be {LABEL_FORMATS}") from error
