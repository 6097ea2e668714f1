"""Files that appear under their name only when they are whole, and locks."""

from __future__ import annotations

import errno
import fcntl
import hashlib
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
    """Have the operating system write a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Fill a temporary folder beside `folder`; when the block ends well it takes the name.

    An existing folder of that name is replaced. After an exception nothing is left behind and the
    existing folder is as it was.
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
    """Where to write a file that takes its name when the block ends well: readers see the old one or the new.

    mark  in the name until then, where several may write at once.
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
        partial.write_text(text)


class Unwritable(OSError):
    """A file that could not be written; the message says which and why."""


@contextmanager
def explain_failure(path: Path) -> Iterator[None]:
    """Let an OSError in the block name the path that could not be written, and the likely reason."""
    try:
        yield
    except (Unwritable, BrokenPipeError):  # a pipe is the output's, not the path's
        raise
    except OSError as error:
        why = "is the disk full, or a file size limit set?"
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            why = "choose a place that you may write to."
        raise Unwritable(f"{path} could not be written ({error}): {why} What was done before is kept") from error


def point_to(link: Path, target: str) -> None:
    """Make `link` a symbolic link to `target` (a name in the same folder), replacing it in one step."""
    partial = link.with_name(f".{link.name}.partial")
    partial.unlink(missing_ok=True)
    partial.symlink_to(target)
    os.replace(partial, link)
    sync(link.parent)


def check_place(folder: Path, needed: int) -> None:
    """Raise OSError unless files of so many bytes can be written in a folder, which is made if it is not there."""
    with explain_failure(folder):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    if needed > free_bytes(folder):
        raise OSError(f"{folder} has {size_text(free_bytes(folder))} free, but {size_text(needed)} are needed")


def size_text(count: float) -> str:
    """So many bytes for people, to three digits: 812 B, 3.4 kB, 16 MB, 41.7 GB, 1.2 TB; a kB has 1,000."""
    rounded = float(f"{count:.3g}")
    power = min(4, (len(f"{rounded:.0f}") - 1) // 3)
    value = rounded / 1000**power
    digits = f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
    return f"{digits} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def plain_name(name: object, where: object) -> str:
    """The name of a file that lies beside `where`, which names it. Raises ValueError for a path to somewhere else."""
    if not isinstance(name, str) or name in ("", "..") or PureWindowsPath(name).name != name:
        raise ValueError(f"{where} names the file {name!r}, but must name files beside it, without any folder")
    return name


def free_bytes(folder: Path) -> int:
    """What the disk below a folder can still take."""
    return shutil.disk_usage(folder).free


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget_inherited_locks() -> None:
    """Close a forked child's copies, with which it would hold its parent's locks beyond the parent's end."""
    for lock in _locks:
        lock.release()


os.register_at_fork(after_in_child=_forget_inherited_locks)


class Lock:
    """Held by one process at a time, until it is released or the process ends.

    busy  what to raise FileExistsError with if another process holds it; None waits for it.

    On a file system without locks it does nothing.
    """

    def __init__(self, path: Path, busy: str | None) -> None:
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
        """To be handed to a process that shall hold it too, until both have ended."""
        return self._file.fileno()

    def release(self) -> None:
        self._file.close()
