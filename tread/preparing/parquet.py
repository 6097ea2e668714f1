"""Reads pictures, with classes, captions or both, from parquet files as Hugging Face's `datasets` writes them."""

import functools
import json
import math
import os
import re
from pathlib import Path

import numpy as np

from tread.data.index import check_labels
from tread.preparing.photos import ONE_CLASS, Photos, cleaned, is_picture

CAPTIONS = ("caption", "captions", "text")  # usual names of the column of captions
TEXTS = ("string", "large_string", "list<item: string>", "large_list<item: string>")


@functools.lru_cache(maxsize=1)  # pictures are read in order
class _Group:
    """A column's cells in a row group, 64 in memory at a time. `process` is the pid: a fork opens the file anew."""

    def __init__(self, process: int, path: Path, group: int, column: str) -> None:
        self.place, self.first, self.rows = (path, group, column), math.inf, []

    def __getitem__(self, row: int) -> object:
        if row < self.first:
            path, group, column = self.place
            self.blocks = _open(path).iter_batches(64, row_groups=[group], columns=[column])
            self.first, self.rows = 0, []
        while row >= self.first + len(self.rows):
            self.first += len(self.rows)
            self.rows = next(self.blocks).column(0).to_pylist()
        return self.rows[row - self.first]


def _read(place: tuple[Path, int, str, int]) -> bytes:
    """Return the picture file stored at `place` (file, row group, column, row). Raises OSError if none is stored."""
    *group, row = place
    content = _Group(os.getpid(), *group)[row]
    if isinstance(content, bytes):
        return content
    if not isinstance(content, dict) or not content.get("bytes"):
        raise OSError("the row holds no picture, or names a file that is not in the parquet")
    return content["bytes"]


def _open(path: Path):
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ValueError(f"{path}: parquet needs pyarrow; pip install -r requirements-import.txt") from error
    try:
        return ParquetFile(path, pre_buffer=False, buffer_size=2**20)  # reads no row group whole
    except (ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} is damaged or no parquet file: {error}") from error


def parquet_files(source: Path) -> list[Path]:
    """Return [source] if it is a parquet file; for a folder, the parquet files in it and in its subfolder data/; but []
    if the first of these has no column of pictures, and the folder has picture files or other subfolders."""
    if source.is_file():
        return [source] if source.suffix == ".parquet" else []
    found = sorted(path for place in (source, source / "data") for path in place.glob("*.parquet"))
    beside = [path for path in source.glob("[!.]*") if path.name != "data"]  # the hub's downloads have a .cache
    pictures = any(is_picture(path.name) or path.is_dir() for path in beside)
    if found and pictures and not _column(source, _open(found[0]).schema_arrow, "Image", "image", needed=False):
        return []  # a table beside pictures
    return found


def open_parquet(source: Path, paths: list[Path], split: str | None, captions: str | None) -> Photos:
    """Open the pictures in the parquet files `paths` of `source`, with their classes, captions or both.

    split     the split to take, such as "train" for the files train-00000-of-…; None: the only one.
    captions  the column of captions; None: "caption", "captions" or "text", if any; "none": ignore captions.

    Raises ValueError if the split or the columns are missing or ambiguous.
    """
    splits = sorted({_split(path) for path in paths})
    split = splits[0] if split is None and len(splits) == 1 else split
    if split not in splits:
        raise ValueError(f"{source} holds the splits {', '.join(splits)}; choose one by root=…")
    paths = [path for path in paths if _split(path) == split]
    schema = _open(paths[0]).schema_arrow
    image, words = _column(source, schema, "Image", "image"), _captions(source, schema, captions)
    label = _column(source, schema, "ClassLabel", "label", needed=words is None)
    files, labels, names, texts = [], [], [], []
    for path in paths:
        opened = _open(path)
        if not opened.schema_arrow.equals(schema) or _features(opened.schema_arrow) != _features(schema):
            raise ValueError(f"{path} has other columns or classes than {paths[0].name}")
        for group in range(opened.metadata.num_row_groups):
            files += [(_read, (path, group, image, row)) for row in range(opened.metadata.row_group(group).num_rows)]
        names += [f"{path.name}:{row}" for row in range(opened.metadata.num_rows)]
        if words is not None:
            for row in opened.read(columns=[words])[words].to_pylist():
                lines = [row] if isinstance(row, str) else row or []
                texts.append(cleaned([line for line in lines if line]) or "the row is blank")
        if label is not None:
            column = opened.read(columns=[label])[label]
            if column.null_count or not str(column.type).startswith(("int", "uint")):
                given = f"is of {column.type} with {column.null_count} empty rows"
                raise ValueError(f"{path}: the column {label} {given}, but must hold a class's number in each")
            labels += column.to_pylist()
    classes, numbers = ONE_CLASS, np.array(labels if label else [0] * len(names), dtype=np.int64)
    if label is not None:
        classes = _features(schema).get(label, {}).get("names") or range(int(numbers.max(initial=-1)) + 1)
        check_labels(numbers, len(classes), source)
    photos = Photos(str(source), names, numbers, tuple(map(str, classes)), files, heads=False)
    return photos if words is None else photos.captioned(texts, [])


def _captions(source: Path, schema, wanted: str | None) -> str | None:
    """Return the name of the column of captions: `wanted` or, if that is None, a text column "caption", "captions" or
    "text"; None if there is none or `wanted` is "none". ValueError if `wanted` is not a text column, or several fit."""
    texts = [name for name in schema.names if str(schema.field(name).type).replace("element", "item") in TEXTS]
    if wanted not in (None, "none", *texts):
        raise ValueError(f"captions={wanted}: {source} has the columns of words {', '.join(texts) or 'none'}")
    if wanted is not None:
        return None if wanted == "none" else wanted
    usual = [name for name in texts if name in CAPTIONS]
    if len(usual) > 1:
        raise ValueError(f"{source} has the columns {', '.join(usual)}: choose one by captions=…, or captions=none")
    return usual[0] if usual else None


def _features(schema) -> dict:
    """Return {column: dict with type and class names}, as Hugging Face's `datasets` recorded it; {} if it did not."""
    return json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})


def _split(path: Path) -> str:
    """Return a file's split: "train" for train-00000-of-00002[-hash] or train; "" for a number, like the Hub's 0000."""
    return re.sub(r"^\d+$|-\d+-of-\d+(-[0-9a-f]+)?$", "", path.stem)


def _column(source: Path, schema, kind: str, usual: str, needed: bool = True) -> str | None:
    features = _features(schema).items()
    columns = [name for name, feature in features if isinstance(feature, dict) and feature.get("_type") == kind]
    columns = columns if len(columns) == 1 else [name for name in schema.names if name == usual]
    if needed and not columns:
        there = ", ".join(schema.names)
        raise ValueError(f"{source} has the columns {there}, but needs one {kind} column, or {usual!r}")
    return columns[0] if columns else None
