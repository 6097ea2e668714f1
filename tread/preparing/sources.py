"""Where pictures, their classes and captions come from: folders, zips, tars, parquet files.

    class folders     train/n01440764/1.jpg, in a folder, zip or tar; classes are the sorted folder names
    a labels file     beside pictures in a flat folder or tar: EDM's dataset.json or a CSV, see label_table
    captions          a.txt beside a.jpg, see caption_files.py, in tars of a webdataset too; class folders are classes,
                      else there is one class of all
    MS-COCO           its pictures and captions_….json, see coco.py
    parquet           as Hugging Face writes picture datasets, see parquet.py

Nothing is decoded here; images.py does.
"""

from __future__ import annotations

import csv
import io
import json
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np

from tread.preparing.archives import Store, Tars, holds_tars, is_pattern, open_store
from tread.preparing.caption_files import Faults, pictures_among, read_texts, texts_beside
from tread.preparing.coco import open_coco
from tread.preparing.parquet import open_parquet, parquet_files
from tread.runtime.tensor_files import listed

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff")
LABEL_FILES = ("dataset.json", "labels.csv", "metadata.csv")
LABEL_FORMATS = 'EDM\'s dataset.json, {"labels": [[file, label], …]}, or a CSV with the header file,label'
NAMED = 20  # files that an error names
MOST_CLASSES = 1_000_000  # a larger label is taken for a mistake
ONE_CLASS = ("all",)  # of captioned pictures without classes
NO_PICTURE = "its name is not a picture's"
NONE = "none"  # captions=none: text beside pictures is left alone
LEFT_BY_SYSTEMS = ("__MACOSX", "Thumbs.db", "desktop.ini")


@dataclass
class Photos:
    """Pictures in a fixed order.

    names    of the pictures, for messages and the work's plan.
    labels   (n,) int64, indices into classes.
    read     index → the picture's file content; raises OSError.
    refused  (name, why) of files that lie among the pictures and are none.
    captions of each picture, at least one; None: the source has none.
    unpaired (name, why) of pictures without captions, and captions without a picture; neither is among the others.
    heldout  how the names of pictures begin that the source itself holds out; None: none.
    """

    where: str
    names: list[str]
    labels: np.ndarray
    classes: tuple[str, ...]
    read: Callable[[int], bytes]
    refused: Faults = field(default_factory=list)
    captions: list[list[str]] | None = None
    unpaired: Faults = field(default_factory=list)
    heldout: str | None = None

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
        """Raise ValueError that names the files that are no pictures, or what has no captions or no picture, if any."""
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
        """Those that have captions; a picture's are a list, or the reason why it has none. faults: of no picture."""
        kept = [index for index, given in enumerate(captions) if isinstance(given, list)]
        unpaired = [(name, f"no caption: {why}") for name, why in zip(self.names, captions) if isinstance(why, str)]
        return Photos(
            self.where,
            [self.names[index] for index in kept],
            self.labels[kept],
            self.classes,
            self.read if len(kept) == len(self) else partial(_read_some, self.read, kept),
            self.refused,
            [captions[index] for index in kept],
            [*unpaired, *((name, f"a caption: {why}") for name, why in faults)],
            heldout,
        )


def named(files: Faults, what: str, between: str = " ") -> str:
    """The first of some files and why they are refused, a line each, and how many more there are."""
    more = f"\n  and {len(files) - NAMED:,} more" if len(files) > NAMED else ""
    return "".join(f"\n  {name}{between}{what.format(why)}" for name, why in files[:NAMED]) + more


def _read_some(read: Callable[[int], bytes], kept: list[int], index: int) -> bytes:
    return read(kept[index])


def find_photos(
    source: Path, root: str | None = None, labels: str | None = None, captions: str | None = None
) -> Photos:
    """The pictures of a folder, a zip, tars, or a parquet file or folder of such.

    root      a folder inside the source (of parquet files and MS-COCO: a split) that holds the pictures; None: the
              outermost that does.
    labels    a labels file, beside the source or inside it; None: one of LABEL_FILES if it lies beside
              the pictures, else class folders.
    captions  the column of parquet files that holds them; "none": there are to be none; None: those that are found.

    Raises FileNotFoundError, or ValueError that says what was found instead.
    """
    source = Path(source)
    if root is not None and holds_tars(source / root):
        source, root = source / root, None
    if not source.exists() and not is_pattern(source):
        raise FileNotFoundError(f"{source} is not there; source must be a folder, a zip, tars or parquet files")
    paths = [] if is_pattern(source) or holds_tars(source) else parquet_files(source)
    if captions not in (None, NONE) and not paths:
        raise ValueError(f"captions={captions} would be a column of parquet files, but {source} holds none")
    if paths:
        names, numbers, classes, read, words = open_parquet(source, paths, root, captions)
        photos = Photos(str(source), names, numbers, tuple(classes or ONE_CLASS), read)
        return photos if words is None else photos.captioned(words, [])
    if captions is None and labels is None and (coco := open_coco(source, root)):
        numbers = np.zeros(len(coco.names), dtype=np.int64)
        photos = Photos(str(source), coco.names, numbers, ONE_CLASS, coco.read)
        return photos.captioned(coco.captions, coco.faults, coco.heldout)
    return _photos_in(source, open_store(source), root, labels, captions)


def _photos_in(source: Path, store: Store, root: str | None, labels: str | None, captions: str | None) -> Photos:
    names = [name for name in store.names if not _hidden(name)]
    folders = set(store.folders) | {name.rpartition("/")[0] for name in names}
    folders |= {str(parent) for folder in folders for parent in PurePosixPath(folder).parents}
    folders = {folder for folder in folders if not _hidden(folder)} - {"", "."}
    inside = "" if isinstance(store, Tars) else _inside(source, names, folders, root, labels)
    prefix = f"{inside}/" if inside else ""
    names = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    where = f"{source}:{inside}" if inside else str(source)

    chosen = labels or next((name for name in LABEL_FILES if name in names), None)
    texts = texts_beside([name for name in names if name != chosen], _is_picture)
    if texts:
        names = [name for name in pictures_among(names, _is_picture) if name != chosen] + [chosen] * (chosen in names)
    texts = {} if captions == NONE else texts
    if chosen is not None:
        if chosen not in names and not Path(chosen).is_file():
            raise FileNotFoundError(f"labels file {chosen} is neither in {where} nor a file of that path")
        content = store.read(prefix + chosen) if chosen in names else Path(chosen).read_bytes()
        names = [name for name in names if name not in (chosen, *LABEL_FILES)]
        names, numbers, classes, refused = _by_table(where, names, label_table(chosen, content))
    elif isinstance(store, Tars) and not texts:
        raise ValueError(
            f"{where} holds tars without a text file beside any picture (a.txt, a.jpg), nor a labels file: one of both "
            "is needed, for a tar's name is no class"
        )
    elif texts and (isinstance(store, Tars) or any(name.count("/") != 1 for name in names if _is_picture(name))):
        kept, classes = [name for name in names if _is_picture(name)], ONE_CLASS
        refused = [(name, NO_PICTURE) for name in names if not _is_picture(name)]
        names, numbers = kept, [0] * len(kept)
    else:
        classes = sorted({f.removeprefix(prefix).split("/")[0] for f in folders if f.startswith(prefix)})
        names, numbers, refused = _by_folder(where, names, classes)
    read = partial(_read, store, [prefix + name for name in names])
    photos = Photos(where, names, np.array(numbers, dtype=np.int64), tuple(classes), read, refused)
    return photos.captioned(*read_texts(store, prefix, names, texts)) if texts else photos


def _read(store: Store, names: list[str], index: int) -> bytes:
    return store.read(names[index])


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
        matches = [folder for folder in outermost if folder == root or folder.endswith(f"/{root}")]
        if not matches:
            raise ValueError(f"{source} has no folder {root}; its folders are {', '.join(outermost[:8]) or 'none'}, …")
        return matches[0]
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
            refused.append((name, NO_PICTURE))
    return kept, numbers, refused


def _by_table(where: str, names: list[str], table: dict[str, int | str]) -> tuple:
    """Pictures, labels, classes and refused files, as a labels file has them."""
    check_table(where, table, {name for name in names if _is_picture(name) or name in table})
    refused = [(name, NO_PICTURE) for name in names if name not in table]
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
