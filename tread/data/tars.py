"""Files inside a tar, read in any order and by several processes without unpacking it."""

from __future__ import annotations

import posixpath
import tarfile
from pathlib import Path


class Tar:
    """The files of an uncompressed tar; opening it reads the headers of all.

    names    of the files, sorted, without a leading "./".
    folders  names of the folders that have an entry of their own.

    Raises ValueError if it is compressed, damaged or truncated.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._at: dict[str, tuple[int, int]] = {}
        self.folders, links = [], {}
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
                    tar.members = []  # tarfile would keep all of them
                end = tar.offset
        except tarfile.TarError as error:
            raise ValueError(
                f"{self.path} is no tar, or damaged, truncated or compressed ({error}); a compressed tar must be "
                "unpacked first, for its files are read in any order"
            ) from error
        with self.path.open("rb") as file:  # tarfile takes a header that is cut short or damaged for the end
            file.seek(end)
            if file.read(512) != bytes(512):
                raise ValueError(f"{self.path} is truncated or damaged after {end} bytes: a tar ends with zeros")
        for name, target in links.items():
            if target not in self._at:
                raise ValueError(f"{self.path}: {name} is a link to {target}, which is not a file in the tar")
            self._at[name] = self._at[target]
        self.names = sorted(self._at)

    def read(self, name: str) -> bytes:
        """The content of a file."""
        offset, size = self._at[name]
        with self.path.open("rb") as file:  # anew: there may be thousands of tars, and several threads and processes
            file.seek(offset)
            return file.read(size)
