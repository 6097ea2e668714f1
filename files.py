"""Files that appear under their name only when they are whole."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sha256(path: Path) -> str:
    """Hex sha256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
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
            _sync(path)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(folder, old)
        os.replace(partial, folder)
        _sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        if old.exists() and not folder.exists():
            os.replace(old, folder)
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a text file in one piece: readers see the old content or the new."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    _sync(partial)
    os.replace(partial, path)


def point_to(link: Path, target: str) -> None:
    """Make `link` a symbolic link to `target` (a name in the same folder), replacing it in one step."""
    partial = link.with_name(f".{link.name}.partial")
    partial.unlink(missing_ok=True)
    partial.symlink_to(target)
    os.replace(partial, link)
