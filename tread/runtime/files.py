"""Files that take their name only once they are whole, and locks."""

import fcntl
import hashlib
import json
import os
import shutil
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath


def sha256(path: Path) -> str:
    """Hex sha256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Have the operating system write a file, or a folder's directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder, which takes the name when the block ends well and replaces an existing folder.

    After an exception nothing is left behind, and the existing folder is as it was.
    """
    partial, old = (folder.with_name(f".{folder.name}.{kind}") for kind in ("partial", "old"))
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in (*partial.iterdir(), partial):
            sync(path)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(folder, old)
        os.replace(partial, folder)
        sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        if old.exists() and not folder.exists():
            os.replace(old, folder)
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def whole_file(path: Path, mark: str = "") -> Iterator[Path]:
    """Yields a temporary path, which takes the name when the block ends well: readers see the old file or the new.

    mark  part of the temporary name, where several may write at once.
    """
    partial = path.with_name(f".{path.name}{mark}.partial")
    try:
        yield partial
        sync(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a text file in one piece, see `whole_file`."""
    with whole_file(path, f".{os.getpid()}-{threading.get_ident()}") as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, tree: object) -> None:
    """Write JSON for people and programs in one piece. Raises an OSError that names the file."""
    with explain_failure(path):
        write_whole(path, json.dumps(tree, indent=1) + "\n")


class Unwritable(OSError):
    """A file that could not be written; the message says which and why."""


@contextmanager
def explain_failure(path: Path) -> Iterator[None]:
    """Let an OSError in the block name the path that could not be written."""
    try:
        yield
    except (Unwritable, BrokenPipeError):  # the pipe is the output's, not the path's
        raise
    except OSError as error:
        raise Unwritable(f"{path} could not be written ({error}). What was done before is kept") from error


def point_to(link: Path, target: str) -> None:
    """Make `link` a symbolic link to `target`, a name in the same folder, and replace an older one in one step."""
    partial = link.with_name(f".{link.name}.partial")
    partial.unlink(missing_ok=True)
    partial.symlink_to(target)
    os.replace(partial, link)
    sync(link.parent)


def check_place(folder: Path, needed: int) -> None:
    """Raise OSError unless a folder, which is made if need be, can take files of so many bytes."""
    if files := [path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()]:
        raise Unwritable(f"{folder} could not be written ({files[0]} is a file, but must be a folder)")
    with explain_failure(folder):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    if needed > free_bytes(folder):
        raise OSError(f"{folder} has {size_text(free_bytes(folder))} free, but {size_text(needed)} are needed")


def check_file(name: str) -> Path:
    """The path of a file to be written. Raises OSError unless its folder, which is made if need be, can take it."""
    if name.endswith("/") or Path(name).is_dir():
        raise Unwritable(f"{name} could not be written: it names a folder, but must name a file")
    check_place(Path(name).parent, 0)
    return Path(name)


def size_text(count: float) -> str:
    """A number of bytes to three digits: 812 B, 3.4 kB, 16 MB, 41.7 GB, 1.2 TB; a kB has 1,000."""
    rounded = float(f"{count:.3g}")
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if rounded < 1000 or unit == "TB":
            return f"{rounded:,g} {unit}"
        rounded /= 1000


def plain_name(name: object, where: object) -> str:
    """The name of a file that must lie beside `where`, which names it. Raises ValueError for any other path."""
    if not isinstance(name, str) or name in ("", "..") or PureWindowsPath(name).name != name:
        raise ValueError(f"{where} names the file {name!r}, but must name files beside it, without any folder")
    return name


def free_bytes(folder: Path) -> int:
    """How many bytes the disk of a folder can still take."""
    return shutil.disk_usage(folder).free


_locks: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _forget_inherited_locks() -> None:
    """Close a forked child's copies, which would hold its parent's locks beyond the parent's end."""
    for lock in _locks:
        lock.release()


os.register_at_fork(after_in_child=_forget_inherited_locks)


class Lock:
    """A lock on a file, made if need be, that one process holds until it is released or the process ends.

    busy  the message of the FileExistsError if another process holds it; None waits for it.

    On a file system without locks it does nothing.
    """

    def __init__(self, path: Path, busy: str | None) -> None:
        with explain_failure(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w")
        _locks.add(self)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | (0 if busy is None else fcntl.LOCK_NB))
        except BlockingIOError:
            self._file.close()
            raise FileExistsError(busy) from None
        except OSError:
            pass  # a file system without locks

    def fileno(self) -> int:
        """For a child process that is to hold it, too, until both have ended."""
        return self._file.fileno()

    def release(self) -> None:
        self._file.close()
