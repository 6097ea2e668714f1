"""Finds pictures, their classes and captions in folders, zips, tars and parquet files; images.py decodes them.

class folders  train/n01440764/1.jpg in a folder, zip or tar; the sorted folder names are the classes
labels file    EDM's dataset.json, or a CSV with columns file and label; names each picture, at any depth, and its class
captions       a.txt beside a.jpg, also in webdataset tars; all are of one class without class folders or a labels file
MS-COCO        its pictures and captions_….json (coco.py)
parquet        picture datasets as Hugging Face writes them (parquet.py)
"""

import csv
import io
import json
import posixpath
import re
from collections import Counter
from pathlib import Path, PurePosixPath

import numpy as np

from tread.data.index import check_labels
from tread.preparing.archives import Folder, Store, Tar, Tars, Zip, tar_paths
from tread.preparing.coco import open_coco
from tread.preparing.parquet import open_parquet, parquet_files
from tread.preparing.photos import ONE_CLASS, OTHERS, Photos, is_picture, read_texts, split_texts
from tread.runtime.tensor_files import listed

LABEL_FILES = ("dataset.json", "labels.csv", "metadata.csv")
LABEL_FORMATS = 'EDM\'s dataset.json, {"labels": [[file, label], …]}, or a CSV with the header file,label'
MOST_CLASSES = 1_000_000  # a larger label is taken for a mistake
NONE = "none"  # the value of captions=… with which the captions of pictures are ignored
LEFT_BY_SYSTEMS = ("__MACOSX", "Thumbs.db", "desktop.ini")
TABLES = (".parquet", "_stats.json")  # as img2dataset leaves them beside the folders of its pictures
FRACTION = re.compile(r"\d+\.\d*")


def find_photos(
    source: Path, root: str | int | None = None, labels: str | None = None, captions: str | None = None
) -> Photos:
    """Find the pictures of a folder, a zip, tars, a parquet file or a folder of parquet files.

    root      folder inside the source that holds the pictures, or the split of parquet files and MS-COCO; a number is
              taken as a name. None: the folder that _prefix finds; of parquet files the only split; of MS-COCO all.
    labels    path of a labels file, or its name inside the source; None: dataset.json, labels.csv or metadata.csv in
              the folder of the pictures, if there is one, else class folders.
    captions  column of captions in parquet files; "none": captions are ignored; None: they are read if there are any.

    Raises FileNotFoundError if a file is missing, ValueError if the source does not fit the options or is damaged.
    """
    source, root = Path(source), None if root is None else str(root)
    if root is not None and tar_paths(source / root):
        source, root = source / root, None
    tars = tar_paths(source)
    if not source.exists() and not tars:
        raise FileNotFoundError(f"{source} is not there; source must be a folder, a zip, tars or parquet files")
    paths = [] if tars else parquet_files(source)
    if captions not in (None, NONE) and not paths:
        raise ValueError(f"captions={captions} would be a column of parquet files, but {source} holds none")
    if paths:
        if labels is not None:
            raise ValueError(f"labels={labels} goes with files of pictures, but {source} holds labels of its own")
        return open_parquet(source, paths, root, captions)
    if tars and root is not None:
        instead = f"source=…/{root}*.tar" if len(tars) > 1 else f"source={tars[0]}"
        raise ValueError(f"root={root} is of a source named itself, but {source} holds {len(tars)} tars: {instead}")
    if captions is None and labels is None and (photos := open_coco(source, root)):
        return photos
    kind = Folder if source.is_dir() else Zip if source.suffix.lower() == ".zip" else Tar
    return _photos_in(source, Tars(tars) if tars else kind(source), root, labels, captions)


def _photos_in(source: Path, store: Store, root: str | None, labels: str | None, captions: str | None) -> Photos:
    names = [name for name in store.names if not _hidden(name)]
    folders = {posixpath.dirname(name) for name in names} | {name for name in store.folders if not _hidden(name)}
    folders = (folders | {str(parent) for folder in folders for parent in PurePosixPath(folder).parents}) - {"", "."}
    prefix = "" if isinstance(store, Tars) else _prefix(source, names, folders, root, labels)
    names = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    where = f"{source}:{prefix[:-1]}" if prefix else str(source)

    if labels is not None and labels not in names and (here := Path(labels)).is_relative_to(source / prefix):
        labels = here.relative_to(source / prefix).as_posix()  # a path of a file among the pictures
    chosen = labels or next((name for name in LABEL_FILES if name in names), None)
    is_inside = chosen in names
    names, texts = split_texts([name for name in names if name != chosen])
    texts = {} if captions == NONE else texts
    captioned = [name for name in names if is_picture(name) and posixpath.splitext(name)[0] in texts]
    if chosen is not None:
        content = store.read(prefix + chosen) if is_inside else Path(chosen).read_bytes()
        names = [name for name in names if name not in LABEL_FILES]
        numbers, classes = _by_table(where, names, label_table(chosen, content))
    elif isinstance(store, Tars) and not texts:
        said = f"{where} holds tars without a text file beside any picture (a.txt, a.jpg), nor a labels file"
        raise ValueError(f"{said}: one of the two is needed, for a tar's name is no class")
    elif texts and (isinstance(store, Tars) or any(name.count("/") != 1 for name in captioned)):
        numbers, classes = dict.fromkeys(filter(is_picture, names), 0), ONE_CLASS
    else:
        classes = sorted({f.removeprefix(prefix).split("/")[0] for f in folders if f.startswith(prefix)})
        numbers = _by_folder(where, names, classes)
    faults = [(name, _why_not(name)) for name in names if name not in numbers]
    names, labels, read = list(numbers), np.array([*numbers.values()], dtype=np.int64), store.read
    photos = Photos(where, names, labels, tuple(classes), [(read, prefix + name) for name in names], faults)
    return photos.captioned(*read_texts(store, prefix, names, texts)) if texts else photos


def _why_not(name: str) -> str:
    if is_picture(name):
        return "it lies deeper than <class>/<picture>" if "/" in name else "it is in no class folder"
    converted = "it must be converted: JPEG, PNG, WebP and TIFF are read"
    return converted if name.lower().endswith(OTHERS) else "its name is not a picture's"


def _hidden(name: str) -> bool:
    left = any(part.startswith(".") or part in LEFT_BY_SYSTEMS for part in name.split("/"))
    return left or name.lower().endswith(TABLES)


def _prefix(source: Path, names: list[str], folders: set[str], root: str | None, labels: str | None) -> str:
    """Return the folder of pictures inside the source, as a prefix of names ("" or "…/"): the outermost one whose path
    ends in `root`; ValueError if there is none, or several at the same depth. With root=None: the innermost folder that
    contains all files or, if that is a class folder, its parent. It is a class folder if files lie directly in it, with
    two exceptions: one of these files is a labels file; or labels=None, there are no caption files, and over half of
    the pictures lie in folders below it."""
    if root is not None:
        root = str(PurePosixPath(root))
        outermost = sorted(folders, key=lambda f: (f.count("/"), f))
        matches = [folder for folder in outermost if f"/{folder}".endswith(f"/{root}")]
        if not matches:
            raise ValueError(f"{source} has no folder {root}; its folders are {', '.join(outermost[:8]) or 'none'}, …")
        if sum(folder.count("/") == matches[0].count("/") for folder in matches) > 1:
            raise ValueError(f"{source} has several folders {root}: root={matches[0]} or root={matches[1]}")
        return f"{matches[0]}/"
    folder = posixpath.commonpath(map(posixpath.dirname, names)) if names else ""
    inside = {name.removeprefix(f"{folder}/") for name in names}
    below = ["/" in name for name in inside if is_picture(name)]
    holds_classes = labels is None and 2 * sum(below) > len(below) and not split_texts(names)[1]
    if any("/" not in name for name in inside) and not {*LABEL_FILES, labels} & inside and not holds_classes:
        folder = posixpath.dirname(folder)  # it holds pictures: it is a class
    return f"{folder}/" if folder else ""


def _by_folder(where: str, names: list[str], classes: list[str]) -> dict[str, int]:
    """Return {picture: index of its class} for the pictures that lie directly in a class folder, <class>/<picture>.

    where    the source, for error messages.
    names    all files of the source, as paths below its root; some are not pictures.
    classes  names of the class folders, in the order of their indices.

    Raises ValueError if at least as many pictures lie elsewhere as in class folders, if all pictures of a class folder
    lie in folders below it, or if a class folder holds a labels file.
    """
    pictures, index = list(filter(is_picture, names)), {name: number for number, name in enumerate(classes)}
    numbers = {name: index[name.split("/")[0]] for name in pictures if name.count("/") == 1}
    strays = [name for name in pictures if "/" not in name]
    deep = [name for name in pictures if name.count("/") > 1]
    prevail = len(strays) + len(deep) >= len(numbers)
    if strays and prevail and len(strays) >= len(deep):
        raise ValueError(
            f"{where}: not in a class folder: {listed(strays)}. Use class folders (train/<class>/<picture>), or "
            f"labels=… with a labels file: {LABEL_FORMATS} ({', '.join(LABEL_FILES)} are found by themselves)"
        )
    if tables := [name for name in names if name.count("/") == 1 and posixpath.basename(name) in LABEL_FILES]:
        raise ValueError(f"{where}: labels file {tables[0]} is deeper; root={posixpath.dirname(tables[0])} takes it")
    if deep and (prevail or {name.split("/")[0] for name in deep} - {name.split("/")[0] for name in numbers}):
        below = Counter(str(parent) for picture in pictures for parent in PurePosixPath(picture).parents)
        fitting = Counter(posixpath.dirname(posixpath.dirname(picture)) for picture in pictures)
        roots = [f"root={folder}" for folder, count in fitting.items() if count == below[folder]]
        how = f"choose the folder of classes: {', '.join(roots[:4])}" if roots else "move it there"
        raise ValueError(f"{where}: {deep[0]} lies deeper than <class>/<picture>; {how}")
    return numbers


def _by_table(where: str, names: list[str], table: dict[str, int | str]) -> tuple[dict[str, int], list[str]]:
    """Return {picture: index of its class} and the class names. `table` is a labels file, {picture: class number or
    name}. Raises ValueError, which names `where`, for a bad number, a picture without label or a label without file."""
    check_table(where, table, {name for name in names if is_picture(name) or name in table})
    classes = sorted(set(table.values()))
    if not any(isinstance(label, str) for label in classes):
        check_labels(np.array(classes, dtype=object), MOST_CLASSES, where)
        classes = range(max(classes, default=-1) + 1)
    index = {label: number for number, label in enumerate(classes)}
    return {name: index[table[name]] for name in sorted(table)}, [*map(str, classes)]


def check_table(where: str, table: dict[str, int | str], files: set[str]) -> None:
    """Raise ValueError, which names `where`, unless a labels file's `table` and `files` name the same pictures."""
    wrong = {"labelled, but not there": table.keys() - files, "without a label": files - table.keys()}
    if texts := [f"{what}: {listed(sorted(names))}" for what, names in wrong.items() if names]:
        raise ValueError(f"{where}: {'; '.join(texts)}")


def label_table(name: str, content: bytes) -> dict[str, int | str]:
    """Parse a labels file into {picture: number or name of its class}: a CSV, if `name` ends in .csv, else EDM's JSON.
    A CSV has the columns label and file (or file_name, as Hugging Face's do). Raises ValueError for other content."""
    try:
        text = content.decode("utf-8-sig")
        if name.endswith(".csv"):
            read = csv.DictReader(io.StringIO(text, newline=None))
            rows = [(row["file" if "file" in row else "file_name"], row["label"]) for row in read]
        else:
            rows = json.loads(text)["labels"]
        pictures = [posixpath.normpath(picture) for picture, _ in rows]
        labels = [label.strip() if isinstance(label, str) else label for _, label in rows]
        if all(isinstance(label, str) and re.fullmatch(r"-?\d+", label) for label in labels):
            labels = list(map(int, labels))
        table, kinds = dict(zip(pictures, labels)), set(map(type, labels))
        odd = [f"{p} is {it!r}" for p, it in table.items() if it in (None, "") or FRACTION.fullmatch(str(it))]
        if odd or len(kinds) > 1 or not kinds <= {int, str}:
            raise ValueError(f"labels must be whole numbers, or names{f', but that of {listed(odd)}' if odd else ''}")
        if twice := [picture for picture, count in Counter(pictures).items() if count > 1]:
            raise ValueError(f"{listed(twice)} comes twice")
        return table
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"labels file {name}: line {line} is not UTF-8, in which it must be saved") from error
    except (ValueError, LookupError, TypeError, AttributeError, csv.Error) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"labels file {name} can't be read: {why}. It must be {LABEL_FORMATS}") from error
