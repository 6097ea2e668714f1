"""Reads a dataset's index.json, and checks the files and labels that it describes."""

import datetime
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from tread.runtime.files import Lock, plain_name, sha256

VERSION = 1


def read_index(folder: Path) -> dict:
    """Return a dataset's parsed index.json. FileNotFoundError if missing, ValueError for damage or another version."""
    path = Path(folder) / "index.json"
    if not path.is_file():
        how = "prepare or import one there"
        if Path(folder).is_dir():
            how = f"of photos in it, scripts/prepare_latents.py source={folder} out=… makes one in another folder"
        raise FileNotFoundError(f"no dataset at {folder}: it has no index.json; {how}")
    with explain_damage(path, ValueError):  # errors of JSON and UTF-8 are ValueErrors
        index = json.loads(path.read_text())
        version = index["version"]
    if version != VERSION:
        raise ValueError(f"{path} has version {version}, but this code reads version {VERSION}")
    return index


@contextmanager
def index_lock(folder: Path) -> Iterator[None]:
    """Context in which a process may change a dataset's index.json; other processes wait until it is left."""
    file = folder / ".index.lock"

    def taken() -> Lock:
        lock = Lock(file, None)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), file.stat()):
                return lock
        lock.release()  # that of a file which the process before removed: others may have locked a new one
        return taken()

    with taken():
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def beside(folder: Path, name: object) -> Path:
    """Return the folder of a related dataset. `name` is its path relative to `folder`, as in index.json. If `folder` is
    a link, ".." in `name` is the folder that holds the link or, if that leads nowhere, that of the link's target."""
    place = Path(folder) / str(name)
    plain = Path(os.path.normpath(place))
    return plain if plain.exists() else place


def prepared_heldout(folder: Path) -> Path | None:
    """Return the folder of held-out data that `folder`'s index.json names; None if it names none. Raises
    FileNotFoundError if either folder is not a dataset, ValueError if index.json can't be read."""
    name = read_index(folder).get("heldout")
    if name is None:
        return None
    place = beside(folder, name)
    if not (place / "index.json").is_file():
        said = f"{folder} was prepared with held-out data, {place}, which is not there: bring it back"
        raise FileNotFoundError(f"{said}, or name it; dataset.heldout=null trains without evaluation loss")
    return place


def named_file(folder: Path, name: object) -> Path:
    """Return `folder`/`name`. FileNotFoundError if there is no such file, ValueError if `name` is not a bare name."""
    file = folder / plain_name(name, folder / "index.json")
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing, though index.json names it; prepare the dataset again")
    return file


def files_of(folder: Path) -> dict[str, str]:
    """Return {file name: description} for a dataset's files of latents, so that changed_files can compare them later. A
    description has the file's hash as index.json records it, its present size and the time of its last change."""
    files = {}
    for shard in read_index(folder)["shards"]:
        found = (folder / shard["file"]).stat()
        changed = datetime.datetime.fromtimestamp(int(found.st_mtime), datetime.timezone.utc)
        files[shard["file"]] = f"sha256 {shard['file_sha256']}, {found.st_size} bytes of {changed}"
    return files


def changed_files(folder: Path, before: dict[str, str], hashes_alone: bool) -> list[str]:
    """Return a list with one warning if a dataset's files differ from `before`, an earlier result of files_of, else [].
    With `hashes_alone`, only hashes are compared, not sizes and times."""
    after, changed = files_of(folder), []
    for name in before | after:
        then, now = (files.get(name, "not there") for files in (before, after))
        if then.partition(", ")[0] == now.partition(", ")[0]:  # index.json records the same hash
            then, now = ("" if hashes_alone else text.partition(", ")[2] for text in (then, now))
        if then != now:
            changed.append((name, then, now))
    if not changed:
        return []
    (name, then, now), *others = changed
    more = f" and {len(others)} more" if others else ""
    said = f"{folder / name}{more} changed since the run began: was {then}, is {now}"
    return [f"{said}. Its latents may have changed: dataset.verify=full checks the hashes"]


@contextmanager
def explain_damage(path: Path, *others: type[Exception]) -> Iterator[None]:
    """Context that turns KeyError, TypeError and `others` into a ValueError, naming `path`, an index.json."""
    try:
        yield
    except (KeyError, TypeError, *others) as error:
        raise ValueError(f"{path} is damaged or of another kind: {type(error).__name__}: {error}") from error


def check_labels(labels: np.ndarray, num_classes: int, where: object) -> None:
    """Raise ValueError unless all labels lie in 0..num_classes−1. `where` begins the message."""
    if len(labels) and not 0 <= labels.min() <= labels.max() < num_classes:
        raise ValueError(f"{where}: labels lie in {labels.min()}..{labels.max()}, but there are {num_classes} classes")


def check_sha256(file: Path, expected: str) -> None:
    """Raise ValueError unless a file has the hash `expected`, which index.json states."""
    if (actual := sha256(file)) != expected:
        raise ValueError(f"{file} was changed: its sha256 is {actual}, but index.json says {expected}; make it anew")
