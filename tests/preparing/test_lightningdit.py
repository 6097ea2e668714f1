"""LightningDiT's latents, written as its feature extraction writes them, and imported.

Trusted are what is put into the files, safetensors' and torch's own writers, and the formula of its own dataset:
(z − mean) / std by channel, where latents or latents_flip are z.
"""

from __future__ import annotations

import gc
import json
import sys

import import_latents
import numpy as np
import pytest
import torch
from conftest import launch_door
from safetensors.torch import load_file, save_file

from tread.data.dataset import LatentDataset
from tread.data.latents import to_network
from tread.preparing import lightningdit
from tread.runtime import schema

SIZES = {(0, 0): 5, (0, 1): 2, (1, 0): 5, (1, 1): 1}  # (rank, shard): samples
COUNT, SHAPE = sum(SIZES.values()), (6, 4, 4)
FIRST, LAST = "latents_rank00_shard000.safetensors", "latents_rank01_shard001.safetensors"


def contents():
    """View, sample, …: z (2, COUNT, *SHAPE) fp32, of other mean and std in each channel; labels (COUNT,)."""
    draws = torch.Generator().manual_seed(0)
    spread, middle = torch.arange(1, 7).view(-1, 1, 1), torch.linspace(-3, 3, 6).view(-1, 1, 1)
    z = middle + spread * torch.randn((2, COUNT, *SHAPE), generator=draws)
    return z, torch.randint(0, 4, (COUNT,), generator=draws)


def statistics():
    z = contents()[0]
    return {"mean": z.mean(dim=(0, 1, 3, 4)).view(1, -1, 1, 1), "std": z.std(dim=(0, 1, 3, 4)).view(1, -1, 1, 1)}


@pytest.fixture
def source(tmp_path):
    """Two processes' shards and their statistics."""
    folder, start, (z, labels) = tmp_path / "source", 0, contents()
    folder.mkdir()
    for (rank, shard), size in SIZES.items():
        rows = slice(start, start := start + size)
        parts = {"latents": z[0, rows], "latents_flip": z[1, rows], "labels": labels[rows]}
        metadata = {"total_size": str(size), "dtype": "torch.float32", "device": "cpu"}
        name = f"latents_rank{rank:02d}_shard{shard:03d}.safetensors"
        save_file({key: part.contiguous() for key, part in parts.items()}, folder / name, metadata)
    torch.save(statistics(), folder / "latents_stats.pt")
    return folder


@pytest.fixture
def bring(composed, tmp_path, monkeypatch):
    """A function from overrides to the dataset tmp_path/<out> imported from tmp_path/source."""
    monkeypatch.chdir(tmp_path)

    def run(*overrides, out="data"):
        given = ("kind=lightningdit", "source=source", f"out={out}", "decode=0", "shard_size=4")
        tree = composed(*given, *overrides, name="import_latents")
        import_latents.import_all(schema.read(tree, import_latents.ImportOptions))
        return LatentDataset(tmp_path / out, verify="full")

    return run


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_each_sample_and_view_comes_bit_for_bit(source, bring, capsys, dtype):
    data, (z, labels) = bring(f"dtype={dtype}"), contents()
    assert "dataset.normalize=true takes latents_stats.pt" in (shown := capsys.readouterr().out)
    assert "warning" not in shown and "dataset.normalize=true" in shown.splitlines()[-1]
    assert np.array_equal(data.labels, labels) and data.latents.views == 2 and data.latents.shape == SHAPE
    for view in range(2):
        stored = data.read(np.arange(COUNT), view).stored
        assert torch.equal(stored, z[view].to(getattr(torch, dtype)))
    index = json.loads((data.folder / "index.json").read_text())
    assert index["class_counts"] == torch.bincount(labels).tolist() and index["classes"] == ["0", "1", "2", "3"]
    assert (index["content"], index["scale"], index["scale_applied"]) == ("latents", 1.0, False)
    assert index["autoencoder"] == "unknown"  # nothing in the files says it


@pytest.mark.parametrize("scale", [1, 0.5])
def test_normalised_latents_are_those_of_its_own_dataset(source, bring, capsys, scale):
    """By the file's numbers, not by measured ones; whatever scale is, and it alone without normalisation."""
    theirs = {"mean": torch.arange(6.0).view(1, 6, 1, 1), "std": torch.arange(1, 7.0).view(1, 6, 1, 1) / 3}
    torch.save(theirs, source / "latents_stats.pt")
    data, (z, _) = bring("dtype=float32", f"scale={scale}"), contents()
    assert "warning: latents_stats.pt is off by" in capsys.readouterr().out
    stored = data.read(np.arange(COUNT), 1).stored
    torch.testing.assert_close(to_network(stored, data.latents), z[1] * scale)
    data.normalize(1.0)
    expected = (z[1] - theirs["mean"]) / theirs["std"]
    torch.testing.assert_close(to_network(stored, data.latents), expected, rtol=1e-5, atol=1e-5)


def test_without_statistics_measured_ones_serve_and_one_view_may_do(source, bring, capsys):
    (source / "latents_stats.pt").unlink()
    data, (z, _) = bring("flipped=false"), contents()
    assert "takes what is measured here, for there is no latents_stats.pt" in capsys.readouterr().out
    assert data.latents.views == 1 and "normalize_by" not in json.loads((data.folder / "index.json").read_text())
    data.normalize(1.0)
    found = to_network(data.read(np.arange(COUNT)).stored, data.latents)
    expected = (z[0] - z[0].mean(dim=(0, 2, 3), keepdim=True)[0]) / z[0].std(dim=(0, 2, 3), keepdim=True)[0]
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=0)  # stored in fp16


def test_a_stopped_import_goes_on_and_ends_with_the_same_bytes(source, bring, tmp_path, capsys, monkeypatch):
    bring(out="whole")
    write = import_latents.DatasetWriter.write

    def stop(self, number, *arguments):
        write(self, number, *arguments) if number < 2 else sys.exit("stopped")

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(import_latents.DatasetWriter, "write", stop)
        bring()
    gc.collect()  # the stopped one's locks
    torch.save({key: 2 * value for key, value in statistics().items()}, source / "latents_stats.pt")
    with pytest.raises(ValueError, match="unfinished work of another kind(.|\n)*normalize_by"):
        bring()
    gc.collect()
    torch.save(statistics(), source / "latents_stats.pt")
    capsys.readouterr()
    bring()
    assert "work      2 of 4 shards" in capsys.readouterr().out
    ended, whole = ({p.name: p.read_bytes() for p in (tmp_path / out).iterdir()} for out in ("data", "whole"))
    assert ended == whole


def test_headers_alone_are_read_before_the_work(source, monkeypatch):
    """Every tensor but the labels is taken row by row."""
    opened, taken = lightningdit._opened, []

    class Watched:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def __getattr__(self, name):
            return getattr(self.file, name)

        def get_tensor(self, name):
            taken.append(name)
            return self.file.get_tensor(name)

    monkeypatch.setattr(lightningdit, "_opened", lambda path: Watched(opened(path)))
    labels, read, name, _ = lightningdit.open_shards(source, True)
    assert taken == ["labels"] * 4
    assert torch.equal(torch.from_numpy(read(8)), contents()[0][:, 8]) and taken == ["labels"] * 4
    assert name(8) == "latents_rank01_shard000.safetensors, row 1,"


def edit(file, **parts):
    """A function that changes tensors of a shard; None removes one."""

    def change(source):
        there = load_file(source / file)
        there |= {key: part(there[key]) if callable(part) else part for key, part in parts.items()}
        save_file({key: part.contiguous() for key, part in there.items() if part is not None}, source / file)

    return change


def stats(content):
    return lambda source: torch.save(content, source / "latents_stats.pt")


class Bomb:
    def __reduce__(self):
        return (exec, ("open('ran-by-unpickling', 'w')",))


FAULTS = {  # what is done to the source, what the message says, overrides
    "no flipped latents": (
        edit(LAST, latents_flip=None),
        f"{LAST} holds labels, latents, but no latents_flip; flipped=false",
    ),
    "no latents": (edit(LAST, latents=None), f"{LAST} holds labels, latents_flip, but no latents$"),
    "no labels": (edit(LAST, labels=None), f"{LAST} holds latents, latents_flip, but no labels"),
    "fewer flipped": (
        edit(FIRST, latents_flip=lambda z: z[1:]),
        rf"{FIRST}: latents_flip has shape \(4, 6, 4, 4\), but latents \(5, 6, 4, 4\); flipped=false",
    ),
    "flipped of other size": (edit(FIRST, latents_flip=lambda z: z[..., :2]), r"latents_flip has shape \(5, 6, 4, 2\)"),
    "fewer labels": (edit(FIRST, labels=lambda y: y[1:]), rf"{FIRST}: labels has shape \(4,\), but latents"),
    "other channels": (
        edit(LAST, latents=lambda z: z[:, :4], latents_flip=lambda z: z[:, :4]),
        rf"{LAST} has latents of shape \(4, 4, 4\), but {FIRST} of \(6, 4, 4\)",
    ),
    "no pictures' shape": (edit(FIRST, latents=lambda z: z[:, 0]), r"latents has shape \(5, 4, 4\), but must be \(n"),
    "integers": (edit(FIRST, latents=lambda z: z.int()), f"{FIRST}: latents is of I32, but must be floating"),
    "labels no integers": (edit(FIRST, labels=lambda y: y.float()), f"{FIRST}: labels is of F32, but must be integer"),
    "label below 0": (edit(FIRST, labels=lambda y: y - 9), "labels lie in -"),
    "too few classes": (None, r"labels lie in 0\.\.3, but num_classes is 2", "num_classes=2"),
    "not finite": (edit(FIRST, latents=lambda z: z * torch.inf), "not finite in float16"),
    "truncated": (
        lambda source: (source / LAST).write_bytes((source / LAST).read_bytes()[:-9]),
        f"{LAST} can't be read: it is cut short",
    ),
    "a shard is missing": (
        lambda source: (source / FIRST).unlink(),
        "source has later shards, but not latents_rank00_shard000: bring all",
    ),
    "a process is missing": (
        lambda source: [path.unlink() for path in source.glob("*rank00*")],
        r"source has later shards, but not latents_rank00_\*",
    ),
    "empty": (lambda source: [path.unlink() for path in source.iterdir()], "source is not there, or holds no .safet"),
    "absent": (None, "absent is not there", "source=absent"),
    "scaled": (None, "holds unscaled latents; leave scale_applied out", "scale_applied=true"),
    "stats of other channels": (
        stats({key: value[:, :4] for key, value in statistics().items()}),
        r"latents_stats.pt: mean has shape \(1, 4, 1, 1\), but the latents have 6 channels: these are statistics of",
    ),
    "stats without std": (stats({"mean": statistics()["mean"]}), "latents_stats.pt holds mean, but no std"),
    "std of 0": (stats(statistics() | {"std": torch.zeros(6)}), "latents_stats.pt: mean and std must be finite and"),
    "mean not a number": (stats(statistics() | {"mean": torch.full((6,), torch.nan)}), "latents_stats.pt: mean and"),
    "stats not tensors": (stats({"mean": 1.0, "std": 2.0}), "latents_stats.pt holds no state dict"),
    "stats that run code": (stats(statistics() | {"x": Bomb()}), "latents_stats.pt could not be read .* run any code"),
    "stats damaged": (
        lambda source: (source / "latents_stats.pt").write_bytes(b"PK"),
        "latents_stats.pt could not be read as a state dict: it is cut short",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_as_it_should_be_is_refused(source, bring, tmp_path, fault):
    spoil, shown, *overrides = FAULTS[fault]
    if spoil:
        spoil(source)
    with pytest.raises((ValueError, OSError), match=shown):
        bring(*overrides)
    assert not (tmp_path / "data").exists() and not (tmp_path / "ran-by-unpickling").exists()
    assert fault == "not finite" or not list(tmp_path.glob(".*"))  # all others before any work


def test_the_command_line_says_how_to_go_on_without_an_autoencoder(source, tmp_path):
    given = ("kind=lightningdit", "source=source")
    shown = launch_door(import_latents.main, "import_latents", tmp_path, *given, "out=data")
    assert "nobody has seen whether the scale is right: the source of these latents did not say" in shown
    assert LatentDataset(tmp_path / "data").latents.views == 2
    edit(LAST, latents_flip=None)(source)
    with pytest.raises(SystemExit, match=f"^error: source/{LAST} holds"):
        launch_door(import_latents.main, "import_latents", tmp_path, *given, "out=other")
