"""Opens references that samples are scored against: ADM's reference batches, statistics, or your own pictures.

    .npz with mu, sigma      mean and covariance of pool features, for FID, as EDM and pytorch-fid write them
    .npz with mu_s, sigma_s  mean and covariance of spatial features too, for sFID
    .npz with sigma_triu     instead of sigma, only its upper triangle, row by row; likewise sigma_s_triu for sigma_s
    .npz with arr_0          pictures; ADM's batches have pictures and all four statistics
    folder or tar            pictures, as image_sets.py reads them; also a dataset's folder
    cifar10                  the statistics of CIFAR-10's 50,000 training pictures, unflipped; included in this package

If a file has statistics and pictures, FID and sFID use the former, precision, recall and KID the latter, as ADM does.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from tread.data.store import ShardStore
from tread.encoders.inception import Inception
from tread.evaluation.image_sets import Npz, Pictures, hash_of, open_pictures
from tread.evaluation.metrics import Moments, Seen
from tread.preparing.images import Crop
from tread.runtime.device import exact
from tread.runtime.distributed import Processes
from tread.runtime.files import explain_failure, whole_file

T = TypeVar("T")
TRIANGLE = "_triu"
MAKE_FEATURES = "reference_features=true makes them, in about an hour of two CPU cores, once"
STATED = ("resolution", "count")  # arrays that save_statistics stores besides the statistics
Statistics = tuple[np.ndarray, np.ndarray]  # mean (D,), covariance (D, D)
KEYS = {"pool": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s")}
SHIPPED = {"cifar10": Path(__file__).with_name("cifar10.npz")}  # made by fid.py save_reference=…, see docs/scores.md


@dataclass(frozen=True)
class Reference:
    """An opened reference: statistics, pictures, or both. `where` is its path or name, `sha256` its content's hash.

    stated      statistics stored in the file: {kind of features, "pool" or "spatial": (mean, covariance)}.
    pictures    the pictures, from whose features missing statistics are computed; None: there are none.
    resolution  (H, W) of the pictures; None: unknown.
    count       number of pictures in the reference, or from which its statistics were made; None: unknown.
    lacking     why `pictures` is None, as a message for metrics that need pictures.
    """

    where: str
    sha256: str
    stated: dict[str, Statistics]
    pictures: Pictures | None
    resolution: tuple[int, int] | None
    count: int | None
    lacking: str = "the reference has statistics, but no pictures (arr_0)"

    @property
    def statistics_from(self) -> str:
        """Where the statistics for FID come from: "file" or "pictures"."""
        return "file" if "pool" in self.stated else "pictures"


def open_reference(
    path: Path, crop: Crop | None, processes: Processes, sizes: Mapping[str, int], skip: bool = False
) -> Reference:
    """Open a reference, a path or "cifar10", without decoding its pictures. All processes call this together. Raises
    FileNotFoundError, or ValueError if it is damaged, of another Inception network, or has nothing to compare with.

    crop   how photos of a folder or tar are cropped; None: its pictures are taken as they are.
    sizes  the numbers of features that stored statistics must have, {"pool": D, "spatial": D}.
    skip   True: damaged files of a folder or tar are left out; False: they raise ValueError.
    """
    if path.suffix in (".pkl", ".pt", ".pth"):
        raise ValueError(f"{path} may hold pickled objects, which are not read: convert it to an .npz with mu, sigma")
    if str(path) in SHIPPED and not path.exists():
        shipped = open_reference(SHIPPED[str(path)], None, processes, sizes)
        return replace(shipped, where=str(path), lacking=f"features of its pictures were not made: {MAKE_FEATURES}")
    npz = Npz(path) if path.suffix.lower() == ".npz" and path.is_file() else None
    names = {name.removesuffix(TRIANGLE) for name in npz.names} if npz else set()
    stated = {kind: _statistics(npz, *keys, sizes[kind]) for kind, keys in KEYS.items() if {*keys} <= names}
    if npz is None or "arr_0" in npz.names:
        pictures = open_pictures(path, crop, processes, skip)
        return Reference(str(path), pictures.sha256, stated, pictures, pictures.resolution, pictures.count)
    if "pool" not in stated:
        raise ValueError(f"{path} holds {', '.join(npz.names) or 'nothing'}: a reference has mu, sigma or arr_0")
    resolution, count = (npz.read(name).ravel().tolist() if name in npz.names else [] for name in STATED)
    about = (tuple(resolution) if len(resolution) == 2 else None, count[0] if len(count) == 1 else None)
    return Reference(str(path), hash_of(path, processes), stated, None, *about)


def _statistics(npz: Npz, mean_key: str, covariance_key: str, dimension: int) -> Statistics:
    mean, whole = npz.read(mean_key), covariance_key in npz.names
    covariance = npz.read(covariance_key) if whole else symmetric(npz.read(covariance_key + TRIANGLE))
    if mean.shape != (dimension,) or covariance.shape != (dimension, dimension):
        shapes = f"{mean_key} {mean.shape} and {covariance_key} {covariance.shape}"
        raise ValueError(f"{npz.path}: {shapes} are statistics of another network: the Inception gives {dimension}")
    if not all(array.dtype.kind == "f" and np.isfinite(array).all() for array in (mean, covariance)):
        raise ValueError(f"{npz.path}: {mean_key} or {covariance_key} holds numbers that are not finite or not real")
    return mean.astype(np.float64), covariance.astype(np.float64)


def symmetric(triangle: np.ndarray) -> np.ndarray:
    """Return the symmetric matrix (D, D) whose upper triangle, row by row, is `triangle` (D·(D + 1)/2,)."""
    size = (math.isqrt(8 * triangle.size + 1) - 1) // 2
    matrix = np.zeros((size, size), triangle.dtype)
    matrix[np.triu_indices(size)] = triangle[: size * (size + 1) // 2]
    return matrix + np.triu(matrix, 1).T


@functools.lru_cache(maxsize=4)  # the reference's, the same for all scored checkpoints, and the last samples'
def statistics(what: str, features: ShardStore, kind: str, processes: Processes) -> Statistics:
    """Return mean (D,) and covariance (D, D) of "pool" or "spatial" features; `what` names them in a progress bar."""
    with processes.bar(f"mean and covariance of {what}, {kind}", sum(map(len, features.ranges))) as progress:

        def parts() -> Iterator[np.ndarray]:
            for part in features.arrays(kind):
                yield part
                progress.update(len(part))

        return Moments.of_parts(parts()).gaussian


class Unavailable(ValueError):
    """Raised if a metric can't be computed; the message says why."""


@dataclass(frozen=True)
class FeatureSets:
    """Inception features that metrics compare: `samples` has the samples' features, `features` those of the reference's
    pictures (None: the reference has none). Methods raise Unavailable if what they need is missing."""

    samples: ShardStore
    features: ShardStore | None
    reference: Reference
    network: Inception
    processes: Processes
    _compared: dict = field(default_factory=dict)

    def gaussians(self, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return mean (D,) and covariance (D, D) of the samples' "pool" or "spatial" features, then the reference's."""
        expected = self.reference.stated.get(kind)
        if expected is None and self.features is None:
            raise Unavailable("the reference has neither pictures (arr_0) nor mu_s, sigma_s")
        expected = expected or statistics("the reference", self.features, kind, self.processes)
        ours = statistics("the samples", self.samples, kind, self.processes)
        self.processes.say(f"distance of both means and covariances, {kind}")
        return *ours, *expected

    def probabilities(self) -> np.ndarray:
        """Return the probabilities (n, classes) that Inception gives the samples, in the samples' order."""
        if self.network.fc is None:
            raise Unavailable("the Inception weights have no fc layer")
        return self.samples.whole("probabilities")

    @functools.cached_property
    def pools(self) -> tuple[Tensor, Tensor]:
        """The "pool" features, (n, D) of the reference's pictures and (m, D) of the samples, both fp32."""
        if self.features is None:
            raise Unavailable(self.reference.lacking)
        return tuple(torch.from_numpy(store.whole("pool")) for store in (self.features, self.samples))

    def compare(
        self,
        measure: Callable[[Tensor, Tensor, Seen], T],
        title: str,
        passes: tuple[int, int] = (0, 0),
        more_than: int = 0,
    ) -> T:
        """Return measure(reference, samples, seen) for the "pool" features of the reference's pictures (n, D) and the
        samples (m, D). Later calls with the same title return the stored result. If the device runs out of memory,
        `measure` is called again with CPU tensors. Raises Unavailable if there are no or too few pictures.

        measure    a function; it calls seen(number of rows just done), which advances a progress bar with the title.
        passes     how many times `measure` goes through all reference rows, and all sample rows; (0, 0): no bar.
        more_than  each set must have more pictures than this.
        """
        if title in self._compared:
            return self._compared[title]
        n, m = map(len, self.pools)
        if min(n, m) <= more_than:
            raise Unavailable(f"each set must have more than {more_than} pictures")
        device = next(self.network.parameters()).device
        with exact(), self.processes.bar(title, n * passes[0] + m * passes[1]) as progress:
            try:
                value = measure(*(pool.to(device) for pool in self.pools), progress.update)
            except torch.OutOfMemoryError:
                progress.reset()
                value = measure(*self.pools, progress.update)
        return self._compared.setdefault(title, value)


def save_statistics(
    path: Path, pictures: Pictures, features: ShardStore, processes: Processes, packed: bool = False
) -> None:
    """In the main process, write an .npz with the pictures' count and resolution, and the mean and covariance of their
    pool features (mu, sigma) and spatial features (mu_s, sigma_s), read from the store `features`. With `packed`,
    statistics are float32, and of sigma and sigma_s only the upper triangles are stored (sigma_triu, sigma_s_triu)."""
    if processes.main:
        arrays = {}
        for kind, keys in KEYS.items():
            arrays |= zip(keys, statistics("the reference", features, kind, processes))
        for mean, covariance in KEYS.values() if packed else ():
            triangle = arrays.pop(covariance)[np.triu_indices(len(arrays[mean]))]
            arrays[covariance + TRIANGLE] = triangle.astype(np.float32)
            arrays[mean] = arrays[mean].astype(np.float32)
        with explain_failure(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as partial, partial.open("wb") as file:
                np.savez(file, **arrays, count=np.array([pictures.count]), resolution=np.array(pictures.resolution))
        processes.say(f"{path}: statistics of {pictures.count:,} pictures of {pictures.where}")


def check_size(where: object, size: tuple[int, ...], reference: Reference) -> None:
    """Raise ValueError, beginning with `where`, unless `size` (C, H, W) has C = 3 and the reference's H, W if known."""
    if size[0] != 3:
        raise ValueError(f"{where} gives grey pictures, but RGB is scored; digits are scored without reference=…")
    if reference.resolution not in (None, size[1:]):
        height, width = reference.resolution
        raise ValueError(f"{where} has pictures of {size[2]}×{size[1]}, but {reference.where} of {width}×{height}")
