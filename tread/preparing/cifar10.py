"""CIFAR-10 from its official binary archive: 50,000 training and 10,000 test pictures, 32×32 RGB, in ten classes.

    cifar-10-batches-bin/    data_batch_1.bin to data_batch_5.bin, test_batch.bin: 10,000 records each
    a record                 label (1 byte); 32×32 red bytes row by row, then green, then blue

A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009; https://www.cs.toronto.edu/~kriz/cifar.html
"""

import hashlib
import http.client
import os
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from urllib.request import Request, urlopen

import numpy as np
from tqdm import tqdm

from tread.data.latents import LatentSpec
from tread.data.writer import write_dataset
from tread.runtime.files import Lock, Unwritable, check_place, explain_failure
from tread.runtime.hub import check_answer
from tread.runtime.tensor_files import listed

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
SIZE, MD5 = 170_052_171, "c32a1d4ab5d03f1284b67883e8d87530"
NAMES = tuple("airplane automobile bird cat deer dog frog horse ship truck".split())
MEANING = LatentSpec(shape=(3, 32, 32), classes=NAMES, autoencoder="pixels", scale_applied=True, dtype="uint8")
TRAIN, TEST = [f"data_batch_{number}.bin" for number in range(1, 6)], "test_batch.bin"
RECORDS, RECORD = 10_000, 1 + 3 * 32 * 32  # records in a file; bytes in a record
STANDIN = "standin"


def heldout_of(folder: Path) -> Path:
    """Return the test pictures' folder, <folder>-heldout, given the training pictures' folder."""
    return folder.with_name(f"{folder.name}-heldout")


def prepare_cifar10(folder: Path, archive: str | None = None) -> None:
    """Write the training pictures as a dataset to `folder`, and the test pictures to <folder>-heldout, unless they
    exist. Several processes may call this at once.

    archive  the official archive, or a folder of its .bin files; None: it is downloaded once, and kept beside `folder`;
             "standin": 120 synthetic pictures, to try code with. index.json records the value, or the URL for None.

    Files shorter or longer than the official ones, as the synthetic ones are, need "standin" in the name of `folder`.
    Raises FileNotFoundError if the archive is missing or can't be downloaded, ValueError if it is damaged or of another
    kind, both before a dataset is written; OSError if the disk is too small or becomes full.
    """
    if folder.exists() and heldout_of(folder).exists():
        return
    with Lock(folder.with_name(f".{folder.name}.lock"), None):
        parts = {heldout_of(folder): [TEST], folder: TRAIN}
        missing = [place for place in parts if not place.exists()]
        needed = sum(len(parts[place]) for place in missing) * RECORDS * (RECORD + 8)
        fetched = folder.with_name(Path(URL).name)
        check_place(folder.parent, needed + (SIZE if archive is None and not fetched.exists() else 0))
        source = Path(archive).expanduser() if archive else fetch(fetched)
        files = standin() if archive == STANDIN else read_files(source)
        check_files(files, archive or URL, small=STANDIN in folder.name)
        for place in missing:
            other = {"heldout": f"../{heldout_of(folder).name}"} if place == folder else {"train": f"../{folder.name}"}
            other["archive"] = archive or URL
            with explain_failure(place):
                write_dataset(place, MEANING, [pictures_of(files[name]) for name in parts[place]], once=True, **other)


def pictures_of(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return a .bin file's pictures, (n, 1, 3, 32, 32) uint8 (axis 1: one view, unflipped), and labels (n,) int64."""
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, RECORD)
    return records[:, 1:].reshape(-1, *MEANING.stored_shape), records[:, 0].astype(np.int64)


def read_files(source: Path) -> dict[str, bytes]:
    """Return {file name: content} of the six .bin files, as far as the archive or folder `source` has them. Raises
    FileNotFoundError if `source` is missing, ValueError if the archive is damaged."""
    wanted, inner = {*TRAIN, TEST}, source / "cifar-10-batches-bin"
    if source.is_dir():
        paths = [(inner if inner.is_dir() else source) / name for name in wanted]
        return {path.name: path.read_bytes() for path in paths if path.is_file()}
    if not source.is_file():
        raise FileNotFoundError(f"{source} is not there: dataset.archive names {Path(URL).name} or a folder of it")
    try:
        with tarfile.open(source) as archive:
            files = {}
            for member in archive:
                name = PurePosixPath(member.name).name
                if name in wanted and member.isfile():
                    files[name] = archive.extractfile(member).read()
            archive.fileobj.seek(0, os.SEEK_END)  # to the end, so that gzip checks its checksum
            return files
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise ValueError(f"{source} is truncated, damaged or no tar: {error}") from error


def check_files(files: dict[str, bytes], where: object, small: bool = False) -> None:
    """Raise ValueError unless `files`, {name: content}, are all six .bin files, made of whole records with labels in
    0..9, and of the official length or, if `small`, of equal length. `where`, their source, begins the message."""
    if absent := {*TRAIN, TEST} - {*files}:
        raise ValueError(f"{where} has no {listed(sorted(absent))}, as {Path(URL).name} has (not the -python one)")
    length = len(files[TEST]) // RECORD * RECORD if small else RECORDS * RECORD
    for name in (*TRAIN, TEST):
        if len(files[name]) != length or not length:
            said = f"{where}: {name} has {len(files[name]):,} bytes, but must have {length or RECORD:,}"
            raise ValueError(f"{said}; a smaller stand-in needs a dataset.path with {STANDIN!r} in its name")
        highest = int(pictures_of(files[name])[1].max())
        if highest >= len(NAMES):
            raise ValueError(f"{where}: {name} has a label {highest}, but there are ten classes: it is damaged")


def fetch(file: Path) -> Path:
    """Return `file`, the official archive, after downloading it if it is missing; resumes an earlier download.
    Raises FileNotFoundError if it can't be fetched, ValueError if it is damaged, OSError if the disk is full."""
    partial = file.with_name(f".{file.name}.partial")
    if not file.is_file():
        try:
            _download(partial)
        except Unwritable:
            raise
        except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
            raise FileNotFoundError(
                f"CIFAR-10 could not be fetched ({error}); the same command goes on with it. On a machine without "
                f"internet, put {URL} at {file.absolute()}, or name it, or a folder of its files, by dataset.archive=…"
            ) from error
        if _md5(partial) != MD5:
            partial.unlink()
            raise ValueError(f"what {URL} gave is damaged: its md5 is not {MD5}; the same command fetches it anew")
        partial.rename(file)
    elif _md5(file) != MD5:
        raise ValueError(f"{file} is truncated or damaged: its md5 is not {MD5}; remove it to fetch it anew")
    return file


def _md5(file: Path) -> str:
    return hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest()


def _download(partial: Path) -> None:
    """Append to `partial` the part of the archive that it lacks. Raises OSError (Unwritable if the disk is full)."""
    have = partial.stat().st_size if partial.exists() else 0
    if have >= SIZE:
        return
    check_answer(URL, lambda url, seconds: urlopen(Request(url, method="HEAD"), timeout=seconds).close())
    with urlopen(Request(URL, headers={"Range": f"bytes={have}-"}), timeout=60) as answer, partial.open("ab") as out:
        have = have if answer.status == 206 else 0  # other answers begin at the file's start
        out.truncate(have)
        with tqdm(total=SIZE, initial=have, desc=Path(URL).name, unit="B", unit_scale=True) as bar:
            while chunk := answer.read(1 << 20):
                with explain_failure(partial):
                    out.write(chunk)
                bar.update(len(chunk))
    if partial.stat().st_size < SIZE:
        raise OSError(f"the connection ended after {partial.stat().st_size:,} of {SIZE:,} bytes")


def standin() -> dict[str, bytes]:
    """Return {file name: content} of six files with 20 synthetic pictures each: noise, redder from class to class."""
    files = {}
    for number, name in enumerate((*TRAIN, TEST)):
        labels = np.arange(20) % 10
        coarse = np.random.default_rng(number).integers(0, 130, (20, 3, 4, 4))
        coarse[:, 0] += 12 * labels[:, None, None]
        pictures = coarse.repeat(8, axis=2).repeat(8, axis=3).reshape(20, -1)
        files[name] = np.concatenate([labels[:, None], pictures], axis=1).astype(np.uint8).tobytes()
    return files
