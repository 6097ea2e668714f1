"""Files and folders that appear under their names only once they are complete; file locks, hashes, free space."""

import fcntl
import hashlib
import json
import os
import shutil
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path, PureWindowsPath


def sha256(path: Path) -> str:
    """Return the hex sha256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def content_hash(content: str | bytes) -> str:
    """Return the hex sha256 of a text in UTF-8, or of bytes."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of files, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Context that yields a temporary folder, which replaces `folder` at the end or, after an exception, is removed."""
    partial, old = (folder.with_name(f".{folder.name}.{kind}") for kind in ("partial", "old"))
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in (*partial.rglob("*"), partial):
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
    """Context that yields a temporary path and renames it to `path` at the end, so that readers see the old or the new
    file. `mark` is part of the temporary name, for a file that several threads or processes may write at once."""
    partial = path.with_name(f".{path.name}{mark}.partial")
    try:
        yield partial
        sync(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a text file in UTF-8, replacing an older one in a single step."""
    with whole_file(path, f".{os.getpid()}-{threading.get_ident()}") as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, tree: object) -> None:
    """Write `tree` as indented JSON, replacing an older file in one step. Raises an OSError that names the file."""
    with explain_failure(path):
        write_whole(path, json.dumps(tree, indent=1) + "\n")


class Unwritable(OSError):
    """A file or folder could not be written; the message names it and the reason."""


@contextmanager
def explain_failure(path: Path) -> Iterator[None]:
    """Context that turns OSError into Unwritable, naming `path`, except for BrokenPipeError and ChildProcessError."""
    try:
        yield
    except (Unwritable, BrokenPipeError, ChildProcessError):  # the last two concern output pipes and reader processes
        raise
    except OSError as error:
        raise Unwritable(f"{path} could not be written ({error}). What was done before is kept") from error


def point_to(link: Path, target: str) -> None:
    """Make `link` a symbolic link to `target`, a name in the same folder, replacing an older link in one step."""
    partial = link.with_name(f".{link.name}.partial")
    partial.unlink(missing_ok=True)
    partial.symlink_to(target)
    os.replace(partial, link)
    sync(link.parent)


def check_place(folder: Path, needed: int) -> None:
    """Make a folder if it is missing. Raises OSError unless files of `needed` bytes in all can be written into it."""
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
    """Return Path(name), and create its parent. Raises OSError if `name` is a folder or its parent is not writable."""
    if name.endswith("/") or Path(name).is_dir():
        raise Unwritable(f"{name} could not be written: it names a folder, but must name a file")
    check_place(Path(name).parent, 0)
    return Path(name)


def size_text(count: float) -> str:
    """Format a number of bytes with at most three digits: 812 B, 3.46 kB, 16 MB, 41.7 GB; a kB has 1,000 bytes."""
    rounded = float(f"{count:.3g}")
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if rounded < 1000 or unit == "TB":
            return f"{rounded:,g} {unit}"
        rounded /= 1000


def plain_name(name: object, where: object) -> str:
    """Return `name`, a file name read from the file `where`. Raises ValueError if `name` is not a bare file name."""
    if not isinstance(name, str) or name in ("", "..") or PureWindowsPath(name).name != name:
        raise ValueError(f"{where} names the file {name!r}, but must name files next to it, without any folder")
    return name


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


_locks: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _forget_inherited_locks() -> None:
    """In a forked child, close inherited lock files, which would keep the locks held after the parent has ended."""
    for lock in _locks:
        lock.release()


os.register_at_fork(after_in_child=_forget_inherited_locks)


class Lock(AbstractContextManager):
    """An exclusive lock on the file `path` (created if missing), held until `release` or the end of this process. If
    another process holds it, raises FileExistsError(busy) or, with busy=None, waits. Some file systems ignore locks."""

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
        """Return the file descriptor. A child process that inherits it holds the lock too, until both have ended."""
        return self._file.fileno()

    def release(self) -> None:
        self._file.close()

    def __exit__(self, *error: object) -> None:
        self.release()
