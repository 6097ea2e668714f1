"""The loader against the dataset's own batches, whatever the placement and however far it reads ahead."""

from __future__ import annotations

import gc
import mmap
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from sparse_dataset import write_sparse

from tread.data.dataset import LatentDataset
from tread.data.latents import LatentSpec
from tread.data.loader import Loader
from tread.data.shards import PLACEMENTS
from tread.data.writer import write_dataset
from tread.runtime.distributed import split_batch

MEANING = LatentSpec(shape=(2, 4, 4), classes=("ant", "bee", "cow"), autoencoder="pixels", views=2)
CPU = torch.device("cpu")


def anonymous_memory() -> int | None:
    """Bytes of memory of this process that no file backs; None where the system does not tell."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), None)


def arrays(count):
    rng = np.random.default_rng(count)
    return rng.standard_normal((count, 2, 2, 4, 4)).astype(np.float16), rng.integers(0, 3, count)


@pytest.fixture
def folder(tmp_path):
    write_dataset(tmp_path / "data", MEANING, [arrays(20), arrays(33), arrays(5)])
    return tmp_path / "data"


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_reads_what_was_written(folder, placement):
    stored = np.concatenate([arrays(count)[0] for count in (20, 33, 5)])
    data = LatentDataset(folder, placement=placement)
    indices, views = np.array([57, 0, 19, 20, 52, 53, 20]), np.array([0, 1, 0, 1, 0, 1, 0])
    assert np.array_equal(data.read(indices, views).stored.numpy(), stored[indices, views])
    for index in range(58):
        for view in (0, 1):
            assert np.array_equal(data.read(np.array([index]), view).stored[0].numpy(), stored[index, view])
    assert data.read(np.zeros(0, dtype=np.int64)).stored.shape == (0, 2, 4, 4)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("wrong", [([58], 0), ([-1], 0), ([0], 2), ([0], -1)])
def test_what_is_not_there_is_not_read(folder, placement, wrong):
    with pytest.raises(IndexError, match="58 samples|2 views"):
        LatentDataset(folder, placement=placement).read(np.array(wrong[0]), wrong[1])


@pytest.mark.parametrize("ahead", [0, 1, 5])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("ranks", "micro"), [(1, None), (2, 2)])
def test_reading_ahead_gives_the_batches_of_each_step(folder, placement, ahead, ranks, micro):
    data = LatentDataset(folder, placement=placement)
    loaders = [Loader(data, 3, 8, split_batch(8, ranks, r, micro), CPU, ahead=ahead, steps=20) for r in range(ranks)]
    for step in (0, 1, 2, 3, 6, 7, 8, 19):  # across the end of an epoch, and steps left out
        whole = LatentDataset(folder).batch(3, step, 8)
        parts = [part for loader in loaders for part in loader.batches(step)]
        assert len(parts) == (1 if micro is None else 4)
        assert torch.equal(torch.cat([part.stored for part in parts]), whole.stored)
        assert torch.equal(torch.cat([part.labels for part in parts]), whole.labels)
    for loader in loaders:
        loader.close()


def test_nothing_is_read_beyond_the_last_step(folder, monkeypatch):
    steps, data = [], LatentDataset(folder)
    read = data.batch
    monkeypatch.setattr(data, "batch", lambda seed, step, *rest: steps.append(step) or read(seed, step, *rest))
    loader = Loader(data, 0, 8, [slice(0, 8)], CPU, steps=3, ahead=4)
    for step in range(3):
        loader.batches(step)
    loader.close()
    assert sorted(steps) == [0, 1, 2]


def test_an_error_while_reading_ahead_reaches_the_step(folder, monkeypatch):
    data = LatentDataset(folder)

    def fail(*_):
        raise OSError("the disk is gone")

    loader = Loader(data, 0, 8, [slice(0, 8)], CPU, ahead=2)
    monkeypatch.setattr(data, "batch", fail)
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
    for shard in data._latents._arrays:
        shard._mmap = Announced()
    data.expect(3, 5, 8, slice(2, 8))
    announced = [(number, *range_) for number, shard in enumerate(data._latents._arrays) for range_ in shard._mmap]
    assert len(announced) == 6 and all(option == mmap.MADV_WILLNEED for _, option, _, _ in announced)
    assert all(start % mmap.PAGESIZE == 0 for _, _, start, _ in announced)
    for index, stored in zip(batch.indices, batch.stored):
        shard = int(np.searchsorted([20, 53], index, side="right"))
        content = (folder / f"shard-{shard:05d}.npy").read_bytes()
        assert any(
            number == shard and stored.numpy().tobytes() in content[start:end] for number, _, start, end in announced
        )


def test_waiting_is_counted(folder):
    loader = Loader(LatentDataset(folder), 0, 8, [slice(0, 8)], CPU)
    loader.batches(0)
    first = loader.waited
    loader.batches(1)
    assert 0 < first < loader.waited


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
def test_a_dataset_of_imagenets_size_takes_little_memory(tmp_path):
    """1,281,167 × 2 views, 42 GB in sparse files, opened and read for some steps: below 200 MB of anonymous memory."""
    write_sparse(tmp_path)
    gc.collect()
    before = anonymous_memory()
    data = LatentDataset(tmp_path)
    loader = Loader(data, 0, 256, [slice(0, 256)], CPU, ahead=4)
    for step in (0, 1, 2, 5003, 5004):
        loader.batches(step)
    assert anonymous_memory() - before < 200e6
    loader.close()


@pytest.mark.gpu
@pytest.mark.parametrize("placement", PLACEMENTS)
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
