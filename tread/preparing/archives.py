"""Stores of files: a folder, zip, tar or several tars, read in any order by several processes, without unpacking.

A store has `names` (the sorted names of its files), `folders` (the names of its folders; an archive may omit some)
and `read(name, most)`, which returns the first `most` bytes of a file, by default all of them, or raises OSError."""

import functools
import glob
import os
import posixpath
import re
import tarfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

FAULTS = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)  # errors of an unreadable file
BESIDE_TARS = (".json", ".parquet", ".txt", ".csv", ".md", ".idx")  # tables and statistics that may lie beside tars


class Folder:
    """The files of a folder and its subfolders, without hidden folders. Raises OSError if a folder can't be listed."""

    def __init__(self, path: Path) -> None:
        self.path, self.names, self.folders = Path(path), [], []
        for folder, inner, files in os.walk(path, followlinks=True, onerror=_raise):
            inside = PurePosixPath(os.path.relpath(folder, path))
            inner[:] = [name for name in inner if name[0] != "."]  # hidden ones are not used, and may be unreadable
            self.names += [str(inside / name) for name in files]
            self.folders += [str(inside / name) for name in inner]
        self.names.sort()

    def read(self, name: str, most: int = -1) -> bytes:
        with (self.path / name).open("rb") as file:
            return file.read(most)


def _raise(error: OSError) -> None:
    raise error


class Zip:
    """The files of a zip. Raises ValueError for a file that is not a zip or whose list of files is damaged or cut off;
    `read` raises OSError for a damaged file inside."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            with zipfile.ZipFile(self.path) as opened:
                listed = opened.infolist()
        except zipfile.BadZipFile as error:
            raise ValueError(f"{self.path} is no zip, or damaged or truncated ({error})") from error
        self._spelt = {posixpath.normpath(entry.filename): entry.filename for entry in listed if not entry.is_dir()}
        self.folders = [posixpath.normpath(entry.filename) for entry in listed if entry.is_dir()]
        self.names = sorted(self._spelt)

    def read(self, name: str, most: int = -1) -> bytes:
        try:
            with _opened_zip(self.path, os.getpid()).open(self._spelt[name]) as file:
                return file.read(most)
        except FAULTS as error:
            raise OSError(f"damaged in {self.path.name}: {error}") from error


@functools.lru_cache(maxsize=4)
def _opened_zip(path: Path, process: int) -> zipfile.ZipFile:
    """Open a zip, once per process id: a handle inherited by fork would share the file position with its parent."""
    return zipfile.ZipFile(path)


class Tar:
    """The files of an uncompressed tar, by names without a leading "./". The constructor reads all headers. Raises
    ValueError if it is compressed, damaged or truncated, or has sparse files or links to anything but its files."""

    def __init__(self, path: Path) -> None:
        self.path, self.folders, links = Path(path), [], {}
        self._at: dict[str, tuple[int, int]] = {}
        try:
            with tarfile.open(self.path, "r:") as tar:
                for member in tar:
                    name = posixpath.normpath(member.name)
                    if member.issparse():
                        raise ValueError(f"{self.path}: {name} is stored as a sparse file; pack the tar without -S")
                    if member.isfile():
                        self._at[name] = member.offset_data, member.size
                    elif member.isdir():
                        self.folders.append(name)
                    elif member.islnk() or member.issym():
                        folder = posixpath.dirname(name) if member.issym() else ""
                        links[name] = posixpath.normpath(posixpath.join(folder, member.linkname))
                    tar.members = []  # tarfile would keep every header in memory
                end = tar.offset
        except tarfile.TarError as error:
            said = f"{self.path} is no tar, or damaged, truncated or compressed ({error})"
            raise ValueError(f"{said}; a compressed tar must be unpacked first") from error
        with self.path.open("rb") as file:  # tarfile stops without an error at a damaged header
            file.seek(end)
            if len(rest := file.read(1 << 20)) < 512 or any(rest):  # a second tar after the first would be lost
                raise ValueError(f"{self.path} is truncated or damaged after {end} bytes: a tar ends with zeros")
        for name, target in links.items():
            if target not in self._at:
                raise ValueError(f"{self.path}: {name} is a link to {target}, which is not a file in the tar")
            self._at[name] = self._at[target]
        self.names = sorted(self._at)

    def read(self, name: str, most: int = -1) -> bytes:
        offset, size = self._at[name]
        with self.path.open("rb") as file:  # opened per read: there may be thousands of tars, and many readers
            file.seek(offset)
            return file.read(size if most < 0 else min(size, most))


class Tars:
    """The files of several tars: x.jpg in a/0.tar is named a/0/x.jpg, relative to the tars' common folder."""

    def __init__(self, paths: Sequence[Path]) -> None:
        above = os.path.commonpath([path.parent for path in paths])
        tars = {path.relative_to(above).with_suffix("").as_posix(): Tar(path) for path in paths}
        self._files = {f"{stem}/{name}": (tar, name) for stem, tar in tars.items() for name in tar.names}
        self.names, self.folders = sorted(self._files), list(tars)

    def read(self, name: str, most: int = -1) -> bytes:
        tar, inside = self._files[name]
        return tar.read(inside, most)


Store = Folder | Zip | Tar | Tars


def tar_paths(source: Path) -> list[Path]:
    """Return the tars that `source` names: by a pattern, {00..99}.tar (all, even missing ones) or *.tar, or as a folder
    that holds only tars and tables or texts (BESIDE_TARS). Returns [] for any other path, even that of one tar."""
    if source.is_dir():
        names = sorted(entry.name for entry in os.scandir(source) if entry.name[0] != ".")
        only = all(name.lower().endswith((".tar", *BESIDE_TARS)) for name in names)
        return [source / name for name in names if name.lower().endswith(".tar") and only]
    if source.exists():
        return []
    if braces := re.fullmatch(r"(.*)\{(\d+)\.\.(\d+)\}(.*)", str(source)):
        before, first, last, after = braces.groups()
        return [Path(f"{before}{n:0{len(first)}d}{after}") for n in range(int(first), int(last) + 1)]
    return [Path(name) for name in sorted(glob.glob(str(source)))]
