"""The latent format: what is written is read, batches are the same for all readers, damage is found. The loader against
the dataset's own batches, whatever the placement and however far it reads ahead."""

import gc
import mmap
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from conftest import CPU, assert_refused, raising, write_json
from sparse_dataset import write_sparse
from torch.utils.data import DataLoader

from tread.data.dataset import LatentDataset
from tread.data.index import index_lock, read_index
from tread.data.latents import LatentSpec
from tread.data.loader import Loader
from tread.data.shards import Placement
from tread.data.writer import write_dataset
from tread.runtime.distributed import split_batch
from tread.runtime.files import sha256

MEANING = LatentSpec(shape=(2, 4, 4), classes=("ant", "bee", "cow"), autoencoder="pixels", views=2)


def anonymous_memory() -> int | None:
    """Bytes of memory of this process that no file backs; None where the system does not tell."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), None)


def arrays(count: int, views: int = 2, channels: int = 2):
    rng = np.random.default_rng(count)
    return rng.standard_normal((count, views, channels, 4, 4)).astype(np.float16), rng.integers(0, 3, count)


@pytest.fixture
def folder(tmp_path):
    write_dataset(tmp_path / "data", MEANING, [arrays(20), arrays(33), arrays(5)])
    return tmp_path / "data"


def test_an_epoch_shows_each_sample_at_most_once_and_epochs_differ(folder):
    data = LatentDataset(folder)
    assert data.steps_per_epoch(8) == 7
    epochs = [np.concatenate([data.batch(0, 7 * e + s, 8).indices for s in range(7)]) for e in range(3)]
    assert all(len(set(epoch)) == 56 for epoch in epochs)
    assert not np.array_equal(epochs[0], epochs[1])
    assert len({frozenset(range(58)) - set(epoch) for epoch in epochs}) > 1  # others are left over each time
    assert not np.array_equal(data.batch(0, 0, 8).indices, data.batch(1, 0, 8).indices)


def test_batches_do_not_depend_on_who_reads_them_or_in_which_order(folder):
    data = LatentDataset(folder)
    expected = [data.batch(0, step, 8).stored for step in range(10)]

    class Steps(torch.utils.data.Dataset):
        def __len__(self):
            return 10

        def __getitem__(self, step):
            return data.batch(0, step, 8).stored

    for step, stored in enumerate(DataLoader(Steps(), batch_size=None, num_workers=2)):
        assert torch.equal(stored, expected[step])
    with ThreadPoolExecutor(4) as pool:
        for step, stored in zip(range(9, -1, -1), pool.map(lambda s: data.batch(0, s, 8).stored, range(9, -1, -1))):
            assert torch.equal(stored, expected[step])


def test_both_views_are_used(folder):
    data = LatentDataset(folder)
    batch = data.batch(0, 0, 58)
    first = data.read(batch.indices, 0).stored
    from_first = (batch.stored == first).flatten(1).all(dim=1).float().mean()
    assert 0.2 < from_first < 0.8


def edit_index(folder, **changes):
    write_json(folder / "index.json", {**read_index(folder), **changes})


def relabel(folder, label=1, rehash=False):
    path = folder / "shard-00000.labels.npy"
    labels = np.load(path)
    labels[:] = label
    np.save(path, labels)
    if rehash:
        shards = read_index(folder)["shards"]
        shards[0]["labels_sha256"] = sha256(path)
        edit_index(folder, shards=shards)


def fortran(folder):
    path = folder / "shard-00000.npy"
    np.save(path, np.asfortranarray(np.load(path)))


def name_above(folder):
    """Let the index name a file in another folder, which is there: a copy."""
    shards = read_index(folder)["shards"]
    (folder / "../a.npy").write_bytes((folder / shards[1]["file"]).read_bytes())
    shards[1]["file"] = "../a.npy"
    edit_index(folder, shards=shards)


DAMAGE = {
    "no index": (
        lambda f: (f / "index.json").unlink(),
        FileNotFoundError,
        "no dataset at .*prepare_latents.py source=",
    ),
    "broken index": (lambda f: (f / "index.json").write_text('{"version": 1'), ValueError, "index.json is damaged or"),
    "incomplete index": (lambda f: (f / "index.json").write_text('{"version": 1}'), ValueError, "damaged.*KeyError"),
    "other version": (lambda f: edit_index(f, version=9), ValueError, "version 9.*version 1"),
    "missing shard": (lambda f: (f / "shard-00001.npy").unlink(), FileNotFoundError, "shard-00001.npy is missing"),
    "truncated shard": (lambda f: os.truncate(f / "shard-00001.npy", 900), ValueError, "shard-00001.npy is truncated"),
    "wrong dtype": (lambda f: edit_index(f, dtype="float32"), ValueError, "float16.*float32"),
    "wrong channels": (lambda f: edit_index(f, shape=[4, 4, 4]), ValueError, r"\(20, 2, 2, 4, 4\).*\(20, 2, 4, 4, 4\)"),
    "edited label": (relabel, ValueError, "labels.npy was changed"),
    "label out of range": (lambda f: relabel(f, 3, rehash=True), ValueError, "3..3, but there are 3 classes"),
    "Fortran order": (fortran, ValueError, "shard-00000.npy is stored in Fortran order"),
    "bytes too many": (lambda f: (f / "shard-00001.npy").open("ab").write(b"more"), ValueError, "shard-00001.npy has"),
    "shard without hash": (lambda f: edit_index(f, shards=[{"count": 1}]), ValueError, "damaged.*KeyError: 'file'"),
    "wrong count": (lambda f: edit_index(f, count=60), ValueError, "60.*58"),
    "a shard above": (name_above, ValueError, "index.json names the file '../a.npy', but must"),
    "unknown content": (lambda f: edit_index(f, content="moments"), ValueError, "moments"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_on_opening(folder, damage):
    act, error, shown = DAMAGE[damage]
    act(folder)
    with pytest.raises(error, match=shown):
        LatentDataset(folder)


def test_a_swapped_latent_is_found_by_full_verification(folder):
    np.save(folder / "shard-00002.npy", np.load(folder / "shard-00002.npy")[::-1])
    LatentDataset(folder)
    with pytest.raises(ValueError, match="shard-00002.npy was changed"):
        LatentDataset(folder, verify="full")


def test_writing_refuses_what_does_not_fit_and_leaves_nothing(tmp_path):
    assert_refused(
        partial(write_dataset, tmp_path / "data", MEANING),
        ([arrays(5), arrays(5, channels=3)], r"shard 1.*\(5, 2, 3, 4, 4\).*\(5, 2, 2, 4, 4\)"),
        ([(arrays(5)[0], np.full(5, 3))], "3..3.*3 classes"),
        error=ValueError,
    )
    with pytest.raises(ValueError, match="shard 0 is float64, but dtype=uint8 stores pixels of 0 to 255 as they are"):
        grey = LatentSpec((1, 4, 4), ("a",), "pixels", dtype="uint8")
        write_dataset(tmp_path / "data", grey, [(np.zeros((5, 1, 1, 4, 4)), np.zeros(5, dtype=int))])
    assert list(tmp_path.iterdir()) == []
    write_dataset(tmp_path / "data", MEANING, [arrays(5)])
    with pytest.raises(FileExistsError, match="exists already"):
        write_dataset(tmp_path / "data", MEANING, [arrays(5)])


# ------------------------------------------------------------------------------------------- the loader


@pytest.mark.parametrize("placement", get_args(Placement))
def test_every_placement_reads_what_was_written(folder, placement):
    stored, labels = (np.concatenate(parts) for parts in zip(arrays(20), arrays(33), arrays(5)))
    data = LatentDataset(folder, verify="full", placement=placement)
    assert len(data) == 58 and data.latents == MEANING
    assert data.placed == (stored.nbytes if placement == "device" else 0)
    indices, views = np.array([57, 0, 19, 20, 52, 53, 20]), np.array([0, 1, 0, 1, 0, 1, 0])
    batch = data.read(indices, views)
    assert np.array_equal(batch.stored.numpy(), stored[indices, views])
    assert np.array_equal(batch.labels.numpy(), labels[indices])
    for index in range(58):
        for view in (0, 1):
            assert np.array_equal(data.read(np.array([index]), view).stored[0].numpy(), stored[index, view])
    assert data.read(np.zeros(0, dtype=np.int64)).stored.shape == (0, 2, 4, 4)


@pytest.mark.parametrize("placement", get_args(Placement))
def test_what_is_not_there_is_not_read(folder, placement):
    data = LatentDataset(folder, placement=placement)
    for indices, view in (([58], 0), ([-1], 0), ([0], 2), ([0], -1)):
        with pytest.raises(IndexError, match="58 samples|2 views"):
            data.read(np.array(indices), view)


@pytest.mark.parametrize("placement, ahead", [("mmap", 0), ("mmap", 5), ("ram", 1), ("device", 5)])
@pytest.mark.parametrize("ranks, micro", [(1, None), (4, 1)])
def test_reading_ahead_gives_the_batches_of_each_step(folder, placement, ahead, ranks, micro):
    data = LatentDataset(folder, placement=placement)
    loaders = [Loader(data, 3, 8, split_batch(8, ranks, r, micro), CPU, ahead=ahead, steps=20) for r in range(ranks)]
    for step in (0, 1, 2, 3, 6, 7, 8, 19):  # across the end of an epoch, and steps left out
        whole = LatentDataset(folder).batch(3, step, 8)
        parts = [part for loader in loaders for part in loader.batches(step)]
        assert len(parts) == (1 if micro is None else 8)
        assert torch.equal(torch.cat([part.stored for part in parts]), whole.stored)
        assert torch.equal(torch.cat([part.labels for part in parts]), whole.labels)
    for loader in loaders:
        loader.close()


def test_nothing_is_read_beyond_the_last_step(folder, monkeypatch):
    steps, data = [], LatentDataset(folder)
    read = data.batch
    monkeypatch.setattr(data, "batch", lambda seed, step, *a, **k: steps.append(step) or read(seed, step, *a, **k))
    loader = Loader(data, 0, 8, [slice(0, 8)], CPU, steps=3, ahead=4)
    for step in range(3):
        loader.batches(step)
    loader.close()
    assert sorted(steps) == [0, 1, 2]


def test_an_error_while_reading_ahead_reaches_the_step(folder, monkeypatch):
    data = LatentDataset(folder)
    loader = Loader(data, 0, 8, [slice(0, 8)], CPU, ahead=2)
    monkeypatch.setattr(data, "batch", raising(OSError("the disk is gone")))
    with pytest.raises(OSError, match="the disk is gone"):
        loader.batches(0)
    loader.close()


def test_what_is_expected_covers_what_is_read(folder):
    """The pages announced to the operating system, against where each number lies in its file."""

    class Announced(list):
        def madvise(self, option, start, length):
            self.append((option, start, start + length))

    data = LatentDataset(folder)
    batch = data.batch(3, 5, 8, slice(2, 8))
    shards = data._columns["stored"]._arrays
    for shard in shards:
        shard._mmap = Announced()
    data.batch(3, 5, 8, slice(2, 8), expect=True)
    announced = [(number, *range_) for number, shard in enumerate(shards) for range_ in shard._mmap]
    assert len(announced) == 6 and all(option == mmap.MADV_WILLNEED for _, option, _, _ in announced)
    assert all(start % mmap.PAGESIZE == 0 for _, _, start, _ in announced)
    for index, stored in zip(batch.indices, batch.stored):
        shard = int(np.searchsorted([20, 53], index, side="right"))
        content = (folder / f"shard-{shard:05d}.npy").read_bytes()
        parts = [content[start:end] for number, _, start, end in announced if number == shard]
        assert any(stored.numpy().tobytes() in part for part in parts)


def test_another_process_opens_the_dataset_anew(folder):
    data = LatentDataset(folder)
    data.normalize(0.5)
    again = pickle.loads(pickle.dumps(data))  # what a DataLoader's worker is sent
    assert len(pickle.dumps(data)) < 3000
    assert again.latents == data.latents != MEANING
    assert torch.equal(again.batch(0, 0, 8).stored, data.batch(0, 0, 8).stored)


def test_memory_that_is_not_there_is_not_asked_for(folder, monkeypatch):
    monkeypatch.setattr("tread.data.shards.free_memory", lambda device: 1000)
    LatentDataset(folder)
    for placement in ("ram", "device"):
        with pytest.raises(ValueError, match=f"cpu has 1 kB of memory free: dataset.placement={placement}.*mmap"):
            LatentDataset(folder, placement=placement)


@pytest.mark.skipif(anonymous_memory() is None, reason="needs Linux's /proc")
def test_a_dataset_of_imagenets_size_is_opened_by_its_labels_and_takes_little_memory(tmp_path):
    """1,281,167 × 2 views, 42 GB in sparse files, opened and read for some steps: below 200 MB of anonymous memory. How
    long it takes is in docs/measurements.md."""
    write_sparse(tmp_path)

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    gc.collect()
    before, memory = bytes_read(), anonymous_memory()
    data = LatentDataset(tmp_path)
    assert bytes_read() - before < 3 * 8 * len(data) and len(data) == 1_281_167
    loader = Loader(data, 0, 256, [slice(0, 256)], CPU, ahead=4)
    for step in (0, 1, 2, 5003, 5004):
        assert loader.batches(step)[0].stored.shape == (256, 8, 32, 32)
    assert anonymous_memory() - memory < 200e6
    loader.close()


@pytest.mark.gpu
@pytest.mark.parametrize("placement", get_args(Placement))
def test_a_gpu_gets_the_batches_of_each_step(folder, placement):
    """Copies overlap with work on the GPU, whose results must be those of the right samples."""
    device = torch.device("cuda")
    loader = Loader(LatentDataset(folder, placement=placement, device=device), 0, 8, [slice(0, 4), slice(4, 8)], device)
    busy = torch.randn(4096, 4096, device=device)
    for step in range(50):
        expected = LatentDataset(folder).batch(0, step, 8)
        for _ in range(20):
            busy = busy @ busy / 4096  # a step's work is still queued when the next batch is asked for
        parts = loader.batches(step)
        assert all(part.stored.is_cuda for part in parts)
        assert torch.equal(torch.cat([part.stored for part in parts]).cpu(), expected.stored)
        assert torch.equal(torch.cat([part.labels for part in parts]).cpu(), expected.labels)
    loader.close()


def test_one_process_at_a_time_changes_an_index(tmp_path):
    """Eight threads, each of which opens the lock by itself as a process would, lose no count of another."""
    count = tmp_path / "count"
    count.write_text("0")

    def add(_):
        for _ in range(25):
            with index_lock(tmp_path):
                before = int(count.read_text())
                time.sleep(1e-4)
                count.write_text(str(before + 1))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(8)))
    assert count.read_text() == "200" and list(tmp_path.iterdir()) == [count]
