"""The latent format: what is written is read, batches are the same for all readers, damage is found."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from sparse_dataset import write_sparse
from torch.utils.data import DataLoader

from tread.data.dataset import LatentDataset
from tread.data.latents import LatentSpec
from tread.data.writer import write_dataset
from tread.runtime.distributed import split_batch
from tread.runtime.files import sha256

MEANING = LatentSpec(shape=(2, 4, 4), classes=("ant", "bee", "cow"), autoencoder="pixels", views=2)


def arrays(count: int, views: int = 2, channels: int = 2):
    rng = np.random.default_rng(count)
    return rng.standard_normal((count, views, channels, 4, 4)).astype(np.float16), rng.integers(0, 3, count)


@pytest.fixture
def folder(tmp_path):
    write_dataset(tmp_path / "data", MEANING, [arrays(20), arrays(33), arrays(5)])
    return tmp_path / "data"


def test_what_is_written_is_read(folder):
    data = LatentDataset(folder, verify="full")
    stored, labels = (np.concatenate(parts) for parts in zip(arrays(20), arrays(33), arrays(5)))
    assert len(data) == 58 and data.latents == MEANING
    indices, views = np.array([57, 0, 19, 20, 52, 53, 20]), np.array([0, 1, 0, 1, 0, 1, 0])
    batch = data.read(indices, views)
    assert np.array_equal(batch.stored.numpy(), stored[indices, views])
    assert np.array_equal(batch.labels.numpy(), labels[indices])


def test_an_epoch_shows_each_sample_at_most_once_and_epochs_differ(folder):
    data = LatentDataset(folder)
    assert data.steps_per_epoch(8) == 7
    epochs = [np.concatenate([data.batch(0, 7 * e + s, 8).indices for s in range(7)]) for e in range(3)]
    assert all(len(set(epoch)) == 56 for epoch in epochs)
    assert not np.array_equal(epochs[0], epochs[1])
    assert len({frozenset(range(58)) - set(epoch) for epoch in epochs}) > 1  # others are left over each time
    assert not np.array_equal(data.batch(0, 0, 8).indices, data.batch(1, 0, 8).indices)


@pytest.mark.parametrize(("ranks", "micro"), [(1, None), (2, None), (4, 1), (2, 2)])
def test_all_ranks_and_micro_batches_together_read_the_same_global_batch(folder, ranks, micro):
    data = LatentDataset(folder)
    for step in (0, 6, 7, 30):
        whole = data.batch(3, step, 8)
        parts = [data.batch(3, step, 8, rows) for r in range(ranks) for rows in split_batch(8, ranks, r, micro)]
        assert torch.equal(torch.cat([p.stored for p in parts]), whole.stored)
        assert torch.equal(torch.cat([p.labels for p in parts]), whole.labels)
        assert len(np.unique(np.concatenate([p.indices for p in parts]))) == 8


def test_batches_do_not_depend_on_who_reads_them_or_in_which_order(folder):
    data = LatentDataset(folder)
    expected = [data.batch(0, step, 8).stored for step in range(10)]

    class Steps(torch.utils.data.Dataset):
        def __len__(self):
            return 10

        def __getitem__(self, step):
            return data.batch(0, step, 8).stored

    for workers in (0, 2):
        for step, stored in enumerate(DataLoader(Steps(), batch_size=None, num_workers=workers)):
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


def test_fewer_samples_than_a_batch_are_refused(folder):
    with pytest.raises(ValueError, match="58 samples.*64"):
        LatentDataset(folder).batch(0, 0, 64)


def edit_index(folder, **changes):
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**index, **changes}))


def truncate(folder):
    path = folder / "shard-00001.npy"
    os.truncate(path, path.stat().st_size - 100)


def relabel(folder, label=1, rehash=False):
    path = folder / "shard-00000.labels.npy"
    labels = np.load(path)
    labels[:] = label
    np.save(path, labels)
    if rehash:
        shards = json.loads((folder / "index.json").read_text())["shards"]
        shards[0]["labels_sha256"] = sha256(path)
        edit_index(folder, shards=shards)


def swap(folder):
    stored = np.load(folder / "shard-00002.npy")
    np.save(folder / "shard-00002.npy", stored[::-1])


def fortran(folder):
    path = folder / "shard-00000.npy"
    np.save(path, np.asfortranarray(np.load(path)))


def name_shard(key, name):
    """Let the index name another file, which is there: a copy."""

    def act(folder):
        shards = json.loads((folder / "index.json").read_text())["shards"]
        if isinstance(name, str):
            (folder / "inner").mkdir()
            target = folder / name.replace("\\", "/")
            target.write_bytes((folder / shards[1][key]).read_bytes())
        shards[1][key] = name
        edit_index(folder, shards=shards)

    return act


DAMAGE = {
    "no index": (lambda f: (f / "index.json").unlink(), FileNotFoundError, "no dataset at"),
    "broken index": (lambda f: (f / "index.json").write_text('{"version": 1'), ValueError, "index.json is damaged or"),
    "incomplete index": (lambda f: (f / "index.json").write_text('{"version": 1}'), ValueError, "damaged.*KeyError"),
    "other version": (lambda f: edit_index(f, version=9), ValueError, "version 9.*version 1"),
    "missing shard": (lambda f: (f / "shard-00001.npy").unlink(), FileNotFoundError, "shard-00001.npy is missing"),
    "missing labels": (lambda f: (f / "shard-00001.labels.npy").unlink(), FileNotFoundError, "labels.npy is missing"),
    "truncated shard": (truncate, ValueError, "shard-00001.npy is truncated"),
    "empty shard": (lambda f: (f / "shard-00001.npy").write_bytes(b""), ValueError, "shard-00001.npy is truncated"),
    "wrong dtype": (lambda f: edit_index(f, dtype="float32"), ValueError, "float16.*float32"),
    "unknown dtype": (lambda f: edit_index(f, dtype="int8"), ValueError, "int8"),
    "wrong channels": (lambda f: edit_index(f, shape=[4, 4, 4]), ValueError, r"\(20, 2, 2, 4, 4\).*\(20, 2, 4, 4, 4\)"),
    "edited label": (relabel, ValueError, "labels.npy was changed"),
    "label out of range": (lambda f: relabel(f, 3, rehash=True), ValueError, "3..3, but there are 3 classes"),
    "Fortran order": (fortran, ValueError, "shard-00000.npy is stored in Fortran order"),
    "bytes too many": (lambda f: (f / "shard-00001.npy").open("ab").write(b"more"), ValueError, "shard-00001.npy has"),
    "shard without hash": (lambda f: edit_index(f, shards=[{"count": 1}]), ValueError, "damaged.*KeyError: 'file'"),
    "fewer classes": (lambda f: edit_index(f, classes=["ant", "bee"]), ValueError, "0..2.*2 classes"),
    "wrong count": (lambda f: edit_index(f, count=60), ValueError, "60.*58"),
    "a shard above": (name_shard("file", "../a.npy"), ValueError, "index.json names the file '../a.npy', but must"),
    "labels above": (name_shard("labels", "../a.npy"), ValueError, "index.json names the file '../a.npy'"),
    "a shard below": (name_shard("file", "inner/a.npy"), ValueError, "names the file 'inner/a.npy'"),
    "a shard by a detour": (name_shard("file", "inner/../a.npy"), ValueError, "names the file 'inner/../a.npy'"),
    "a shard from the root": (name_shard("labels", "/dev/null"), ValueError, "names the file '/dev/null'"),
    "a shard of Windows": (name_shard("file", "inner\\a.npy"), ValueError, "names the file 'inner.*a.npy'"),
    "a shard on a drive": (name_shard("file", "C:a.npy"), ValueError, "names the file 'C:a.npy'"),
    "a shard without a name": (name_shard("file", 3), ValueError, "names the file 3"),
    "unknown content": (lambda f: edit_index(f, content="moments"), ValueError, "moments"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_on_opening(folder, damage):
    act, error, shown = DAMAGE[damage]
    act(folder)
    with pytest.raises(error, match=shown):
        LatentDataset(folder)


def test_a_swapped_latent_is_found_by_full_verification(folder):
    swap(folder)
    LatentDataset(folder)
    with pytest.raises(ValueError, match="shard-00002.npy was changed"):
        LatentDataset(folder, verify="full")


def test_writing_refuses_what_does_not_fit_and_leaves_nothing(tmp_path):
    for shards, shown in (
        ([arrays(5), arrays(5, channels=3)], r"shard 1.*\(5, 2, 3, 4, 4\).*\(5, 2, 2, 4, 4\)"),
        ([(arrays(5)[0], np.full(5, 3))], "3..3.*3 classes"),
    ):
        with pytest.raises(ValueError, match=shown):
            write_dataset(tmp_path / "data", MEANING, shards)
    assert list(tmp_path.iterdir()) == []
    write_dataset(tmp_path / "data", MEANING, [arrays(5)])
    with pytest.raises(FileExistsError, match="exists already"):
        write_dataset(tmp_path / "data", MEANING, [arrays(5)])


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="counts the bytes read, which needs Linux's /proc")
def test_opening_at_imagenet_scale_reads_labels_and_headers_alone(tmp_path):
    """42 GB of latents as sparse files; how long it takes is in docs/measurements.md."""
    write_sparse(tmp_path)

    def bytes_read() -> int:
        return int(open("/proc/self/io").read().split()[1])

    before = bytes_read()
    data = LatentDataset(tmp_path)
    assert bytes_read() - before < 3 * 8 * len(data)
    assert len(data) == 1_281_167
    assert data.batch(0, 5000, 256).stored.shape == (256, 8, 32, 32)
