"""Opens sets of pictures to be scored, reads them in parts, and extracts their Inception features.

batch.npz         arr_0 (n, H, W, 3) uint8, as ADM's sampling script writes it and its evaluator reads it
folder or tar     JPEG, PNG, WebP or TIFF files, of one size unless they are cropped, sorted by name, with subfolders;
                  photos.tar/val is a folder inside a tar
dataset's folder  the pictures stored beside its latents, or the latents themselves if they are pixels
"""

import contextlib
import hashlib
import itertools
import json
import math
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from tread.data.dataset import LatentDataset
from tread.data.index import read_index
from tread.data.shards import Stream, write_array
from tread.data.store import ShardStore, pieces_of
from tread.encoders.inception import Inception, extract
from tread.preparing.archives import Folder, Tar
from tread.preparing.images import Crop, centre_crop, opened, read_rgb
from tread.preparing.photos import DAMAGED, OTHERS, Faults, is_picture, told
from tread.runtime.distributed import Processes
from tread.runtime.files import content_hash, sha256, size_text, whole_file

THREADS = 8  # threads that decode a folder's pictures
PART = 256  # pictures in a stored file, if there are enough
PARTS = 64  # at least this many files, for processes to share, if each file can hold a batch
# raised by the zip and NumPy readers for files that are damaged, encrypted or of another format
UNREADABLE = (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, KeyError, RuntimeError)


@dataclass(frozen=True)
class Pictures:
    """Pictures in a fixed order, read in parts.

    where       their file or folder, for messages.
    count       number of pictures, including files whose damage shows only in decoding, until extract_all decodes them.
    resolution  (H, W)
    sha256      hash of an .npz file; for a folder or tar, of names, contents and crop; for a dataset, of file hashes.
    read        function (start, stop) → (n, 3, H, W) uint8, fastest if called in ascending order. Damaged files raise
                ValueError; given a list as third argument, a folder or tar skips them and adds (name, reason) to it.
    skip        whether extract_all leaves out damaged files; if not, it raises ValueError for them.
    damaged     (name, reason) of the files found to be damaged, which `count` leaves out.
    """

    where: str
    count: int
    resolution: tuple[int, int]
    sha256: str
    read: Callable[..., np.ndarray]
    skip: bool = False
    damaged: Faults = ()


def open_pictures(path: Path, crop: Crop | None, processes: Processes, skip: bool = False) -> Pictures:
    """Open pictures (see the module) and check what needs no decoding. All processes must call this together.

    crop  how photos of a folder or tar are prepared, as for training: converted to RGB and cropped as ADM does. None:
          pictures must be 8-bit RGB of one size, and are taken as they are.
    skip  True: damaged files of a folder or tar are left out. False: ValueError, here or, once decoded, in extract_all.

    Raises FileNotFoundError if nothing is at `path`, ValueError for unfit or damaged files or fewer than 2 pictures.
    """
    inside = ""
    if not path.exists():
        tar = next((parent for parent in path.parents if parent.is_file()), None)
        if tar is None:
            raise FileNotFoundError(f"{path} is not there: an .npz with arr_0, a folder or a tar of pictures is needed")
        path, inside = tar, f"{path.relative_to(tar)}/"
    if path.suffix == ".npy":
        raise ValueError(f"{path} is one array; save it as an .npz: np.savez(…, arr_0=pictures)")
    if (path / "index.json").is_file():
        pictures = _open_dataset(path, crop)
    elif path.suffix.lower() == ".npz":
        pictures = _open_npz(path, processes)
    else:
        pictures = _open_files(path, inside, crop, processes, skip)
    if pictures.count < 2:
        raise ValueError(f"{path} holds {pictures.count} pictures, but at least 2 are needed")
    return pictures


def _open_dataset(path: Path, crop: Crop | None) -> Pictures:
    if crop:
        raise ValueError(f"{path} is a dataset, whose pictures are cropped already: leave out crop={crop.size}")
    data = LatentDataset(path, pictures=True)

    def read(start: int, stop: int, damaged: Faults | None = None) -> np.ndarray:
        return data.read(np.arange(start, stop)).pictures.numpy()

    shards = [[shard.get("pictures_sha256"), shard["file_sha256"]] for shard in read_index(path)["shards"]]
    return Pictures(str(path), len(data), (data.picture_size,) * 2, content_hash(json.dumps(shards)), read)


class Npz:
    """Arrays of an .npz file, read without unpickling. Raises ValueError if the file is damaged or not an .npz."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._explained():
            self._zip = zipfile.ZipFile(path)
        self.names = [name.removesuffix(".npy") for name in self._zip.namelist()]

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except UNREADABLE as error:
            raise ValueError(f"{self.path} is damaged or no NumPy archive: {error}") from error

    def rows(self, name: str) -> tuple[tuple[int, ...], np.dtype, Callable[[int, int], np.ndarray]]:
        """Return the array `name`'s shape, dtype, and a function (start, stop) → rows that loads only these rows."""
        with self._explained():
            file = self._zip.open(f"{name}.npy")
            version = np.lib.format.read_magic(file)
            head = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, columns, dtype = head(file)
            begin, size = file.tell(), math.prod(shape[1:]) * dtype.itemsize
            if dtype.hasobject or (columns and len(shape) > 1):
                raise ValueError(f"{name} holds objects, or is stored column by column")
            if begin + shape[0] * size != self._zip.getinfo(f"{name}.npy").file_size:
                raise ValueError(f"{name} is not {shape} of {dtype}, as its header says")

        def read(start: int, stop: int) -> np.ndarray:
            with self._explained():
                file.seek(begin + start * size)
                return np.frombuffer(file.read((stop - start) * size), dtype).reshape(stop - start, *shape[1:])

        return shape, dtype, read

    def read(self, name: str) -> np.ndarray:
        """Load the whole array `name`. Raises ValueError if the file has no such array, or if it is damaged."""
        with self._explained(), np.load(self.path, allow_pickle=False) as arrays:
            return arrays[name]


def _open_npz(path: Path, processes: Processes) -> Pictures:
    npz = Npz(path)
    if "arr_0" not in npz.names:
        raise ValueError(f"{path} holds {', '.join(npz.names) or 'nothing'}, but no pictures (arr_0)")
    shape, dtype, rows = npz.rows("arr_0")
    if len(shape) != 4 or shape[-1] != 3 or 0 in shape[1:] or dtype != np.uint8:
        raise ValueError(f"{path}: arr_0 is {shape} of {dtype}, but must be uint8 RGB pictures (n, H, W, 3)")

    def read(start: int, stop: int, damaged: Faults | None = None) -> np.ndarray:
        return np.ascontiguousarray(rows(start, stop).transpose(0, 3, 1, 2))

    return Pictures(str(path), shape[0], shape[1:3], hash_of(path, processes), read)


def hash_of(path: Path, processes: Processes) -> str:
    """Return a file's sha256. The main process computes it for all processes, after a message if the file is large."""
    if (size := path.stat().st_size) > 2e8:
        processes.say(f"reading {path}, {size_text(size)}, for its hash")
    return processes.from_main(lambda: sha256(path))


def _open_files(path: Path, inside: str, crop: Crop | None, processes: Processes, skip: bool) -> Pictures:
    store = Folder(path) if path.is_dir() else Tar(path)
    shown = [name for name in store.names if name.startswith(inside) and "/." not in f"/{name}"]  # not hidden
    names = [name for name in shown if is_picture(name) or name.lower().endswith(OTHERS)]  # OTHERS can't be decoded
    names = processes.from_main(lambda: names)  # files may arrive before another process looks
    if not names:
        folders = sorted({name.rpartition("/")[0] for name in store.names})
        raise ValueError(f"{path} has no pictures in {inside or './'}, but folders like {', '.join(folders[:3])}")
    how, prepared = (crop.orientation, crop.alpha) if crop else (), f"crop {crop and crop.size}"
    if crop and crop != Crop(crop.size):  # the defaults are not hashed, so that older caches stay valid
        prepared += f", orientation {crop.orientation}, alpha {crop.alpha}"

    def decode(name: str) -> np.ndarray | str:
        """Return the picture `name` of the folder or tar, (H, W, 3) uint8, or the reason why it can't be read."""
        try:
            image = read_rgb(store.read(name), *how)
        except (ValueError, OSError) as error:
            return str(error)
        return centre_crop(image, crop.size) if crop else np.asarray(image)

    def read_all() -> tuple[str, tuple[int, int], Faults]:
        digest, sizes, damaged, modes = hashlib.sha256(prepared.encode()), {}, [], []
        with processes.bar(f"reading {path}", len(names)) as progress:
            for name in names:
                progress.update()
                try:
                    content = store.read(name)
                    with opened(content, decode=False) as image:
                        size, mode = (image.height, image.width), image.mode
                except (ValueError, OSError) as error:
                    damaged.append((name, str(error)))
                    continue
                digest.update(f"\0{name}\0{len(content)}\0".encode(errors="surrogateescape") + content)
                sizes.setdefault((crop.size, crop.size) if crop else size, name)
                if mode != "RGB" and not crop:
                    modes.append((name, mode))
        if (damaged or modes) and not skip:  # the error also names files that only fail in decoding
            processes.say(f"looking for all damaged pictures in {path}")
            damaged = [(name, why) for name in names if isinstance(why := decode(name), str)]
        check_damage(path, [] if skip else damaged, modes)
        if len(sizes) > 1:
            (here, first), (there, second), *_ = sizes.items()
            sizes = f"{first} is {here[1]}×{here[0]}, {second} is {there[1]}×{there[0]}"
            raise ValueError(f"{path}: pictures differ in size, {sizes}; crop=256 takes ADM's centre crop of each")
        return digest.hexdigest(), next(iter(sizes), (0, 0)), damaged

    def read(start: int, stop: int, damaged: Faults | None = None) -> np.ndarray:
        with ThreadPoolExecutor(THREADS) as pool:
            found = dict(zip(names[start:stop], pool.map(decode, names[start:stop])))
        faults = [(name, why) for name, why in found.items() if isinstance(why, str)]
        if damaged is None:
            check_damage(path, faults)
        else:
            damaged += faults
        arrays = [array for array in found.values() if not isinstance(array, str)]
        stacked = np.stack(arrays) if arrays else np.zeros((0, *size, 3), np.uint8)
        return np.ascontiguousarray(stacked.transpose(0, 3, 1, 2))

    digest, size, damaged = processes.from_main(read_all)
    left_out = {name for name, _ in damaged}
    names = [name for name in names if name not in left_out]
    return Pictures(str(path / inside), len(names), size, digest, read, skip, damaged)


def check_damage(where: object, damaged: Faults, modes: Faults = ()) -> None:
    """Raise a ValueError that names the damaged pictures and those that are not RGB, if there are any. `damaged` is a
    list of (name, reason), `modes` of (name, mode); `where` is their folder or file."""
    texts = told("damaged pictures", damaged, DAMAGED)
    texts += ["Replace or remove them, or leave them out with on_error=skip"] if damaged else []
    texts += told("pictures that are not RGB", modes, " is of mode {}")
    texts += ["Convert them, or set crop=256 for photos that are to be prepared as ADM does"] if modes else []
    if texts:
        raise ValueError(f"{where}: " + "\n".join(texts))


def part_size(count: int, batch_size: int) -> int:
    """Return the number of pictures per file, a multiple of batch_size, in a store of `count` pictures or features."""
    return batch_size * max(1, min(-(-PART // batch_size), count // (batch_size * PARTS)))


def feature_store(pictures: Pictures, folder: Path, network: Inception) -> ShardStore:
    """Return the store of the pictures' features: a folder in `folder`, named by hashes of pictures and network."""
    plan = {"pictures": pictures.sha256, "inception": network.sha256}
    pieces = pieces_of(range(pictures.count), part_size(pictures.count, batch_size=32))
    return ShardStore(folder / f"{pictures.sha256[:16]}-{network.sha256[:16]}", plan, pieces)


def extract_all(
    pictures: Pictures, folder: Path, network: Inception, processes: Processes
) -> tuple[Pictures, ShardStore]:
    """Extract, shared among all processes, the pictures' features that a store in `folder` lacks. Return the undamaged
    pictures and the store. Raises ValueError if any are damaged or, with pictures.skip, if fewer than 2 are left."""
    parts = feature_store(pictures, folder, network)

    def work(numbers: list[int], done: Callable[[int], object]) -> None:
        for number in numbers:
            rows, damaged = parts.ranges[number], []
            pixels = torch.from_numpy(pictures.read(rows.start, rows.stop, damaged))
            features = extract(network, pixels) if len(pixels) else {"pool": pixels.numpy()}
            parts.keep(number, features, damaged=damaged)
            done(len(rows))

    with processes.lock(parts.work.with_suffix(".lock")):
        processes.from_main(lambda: parts.begin(again=True))
        # a disk may recover
        processes.from_main(lambda: parts.forget(lambda note: "[Errno" in str(note.get("damaged"))))
        parts.share(processes, f"features of {Path(pictures.where).name}", work, verify=True)
        processes.from_main(lambda: parts.check_complete(processes))
    found = [(name, why) for note in parts.notes() for name, why in note.get("damaged", ())]
    damaged = sorted([*pictures.damaged, *found])
    if not pictures.skip:
        check_damage(pictures.where, damaged)
    for text in told(f"{pictures.where}: damaged pictures that are left out", damaged):
        processes.say(text)
    if len(found) > pictures.count - 2:
        raise ValueError(f"{pictures.where} holds fewer than 2 pictures that can be read")
    return replace(pictures, count=pictures.count - len(found), damaged=damaged), parts


def save_npz(path: Path, pictures: Iterable[np.ndarray], labels: np.ndarray) -> None:
    """Write an .npz as ADM does: batches of pictures (b, C, H, W) uint8 → arr_0 (n, H, W, C), labels (n,) → arr_1."""
    parts = (part.transpose(0, 2, 3, 1) for part in pictures)
    first = next(parts)
    batch = Stream("uint8", (len(labels), *first.shape[1:]), itertools.chain([first], parts))
    with whole_file(path) as partial, zipfile.ZipFile(partial, "w") as archive:
        for name, array in (("arr_0.npy", batch), ("arr_1.npy", labels)):
            with archive.open(name, "w", force_zip64=True) as file:
                write_array(file, array)
