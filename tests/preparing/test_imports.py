"""Other people's latents and pictures, written by the libraries of their own kinds and then imported.

Trusted are those libraries (lmdb, webdataset, numpy, datasets), what is put into the files, and the
formulas of each kind's own loader: MaskDiT's mean + exp(logvar / 2)·ε, REPA's mean + std·ε, times 0.18215.
"""

from __future__ import annotations

import gc
import io
import json
import os
import sys

import import_latents
import lmdb
import numpy as np
import pytest
import torch
import webdataset
from conftest import ROOT
from forked import run_python
from PIL import Image
from torch.utils.data import DataLoader

from tread.data.dataset import LatentDataset
from tread.data.latents import to_network
from tread.encoders import autoencoder
from tread.preparing.encode_photos import Crops
from tread.preparing.images import Crop, centre_crop, read_rgb
from tread.preparing.sources import find_photos
from tread.runtime import schema

SCALE = 0.18215
LABELS = np.array([2, 0, 1, 1, 0, 2, 1])
ROWS = [[f"00000/img-mean-std-{i:08d}.npy", int(label)] for i, label in enumerate(LABELS)]
BOMB = b"cos\nmkdir\n(Vran-by-unpickling\ntR."  # a pickle that makes a folder when it is read


def sources(kind: str) -> np.ndarray:
    """What the files of a kind hold: (n, views, C, 4, 4) float32, as if of Stable Diffusion's autoencoder."""
    views, channels = {"maskdit_lmdb": (2, 8), "tread_tar": (1, 4), "repa_npy": (1, 8)}[kind]
    numbers = 5 * np.random.default_rng(channels * views).standard_normal((7, views, channels, 4, 4), np.float32)
    return np.concatenate([numbers[:, :, :4], numbers[:, :, 4:] ** 2], axis=2) if kind == "repa_npy" else numbers


def put(folder, entries):
    """Write entries of an LMDB, or remove those that are None."""
    with lmdb.open(str(folder), map_size=1 << 24) as opened, opened.begin(write=True) as transaction:
        for key, value in entries.items():
            transaction.delete(key.encode()) if value is None else transaction.put(key.encode(), value)


def write_lmdb(folder):
    stored = np.concatenate(list(sources("maskdit_lmdb").swapaxes(0, 1)))  # all as they are, then all flipped
    entries = {f"z-{i}": z.tobytes() for i, z in enumerate(stored)}
    entries |= {f"y-{i}": str(y).encode() for i, y in enumerate([*LABELS, *LABELS])}
    put(folder, entries | {"length": b"14"})


def write_tars(folder):
    folder.mkdir()
    with webdataset.ShardWriter(str(folder / "part-%04d.tar"), maxcount=3, verbose=0) as tars:
        for i, (z, y) in enumerate(zip(sources("tread_tar"), LABELS)):
            tars.write({"__key__": f"{i:06d}", "latent.npy": z[0], "cls": int(y)})


def write_folder(folder):
    (folder / "00000").mkdir(parents=True)
    for (name, _), z in zip(ROWS, sources("repa_npy")):
        np.save(folder / name, z[0])
    (folder / "dataset.json").write_text(json.dumps({"labels": ROWS}))


WRITE = {"maskdit_lmdb": write_lmdb, "tread_tar": write_tars, "repa_npy": write_folder}


@pytest.fixture
def bring(composed, tmp_path, monkeypatch):
    """A function from a kind and overrides to the dataset tmp_path/<out> imported from tmp_path/source."""
    monkeypatch.chdir(tmp_path)

    def run(kind, *overrides, out="data"):
        given = ("source=source", f"out={out}", "autoencoder=pixels", "decode=0", "shard_size=3")
        given += ("scale_applied=false",) if kind == "tread_tar" else ()
        tree = composed(f"kind={kind}", *given, *overrides, name="import_latents")
        import_latents.import_all(schema.read(tree, import_latents.ImportOptions))
        return LatentDataset(tmp_path / out, verify="full")

    return run


MEANINGS = {  # overrides, meaning in the index, network latents of stored numbers x and noise e
    "maskdit_lmdb": ([], ("moments", "logvar", False), lambda x, e: (x[:, :4] + np.exp(x[:, 4:] / 2) * e) * SCALE),
    "repa_npy": ([], ("moments", "std", False), lambda x, e: (x[:, :4] + x[:, 4:] * e) * SCALE),
    "tread_tar": (["scale_applied=false"], ("latents", None, False), lambda x, e: x * SCALE),
    "tread_tar, scaled": (["scale_applied=true"], ("latents", None, True), lambda x, e: x),
}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("case", MEANINGS)
def test_numbers_labels_and_meaning_are_the_sources(bring, tmp_path, case, dtype):
    (overrides, meaning, network), kind = MEANINGS[case], case.split(",")[0]
    WRITE[kind](tmp_path / "source")
    data, expected = bring(kind, f"dtype={dtype}", *overrides), sources(kind).astype(dtype)
    index = json.loads((tmp_path / "data" / "index.json").read_text())
    assert tuple(index[key] for key in ("content", "spread", "scale_applied")) == meaning
    assert (index["scale"], index["shift"], index["autoencoder"]) == (SCALE, 0, "pixels")
    assert (index["shape"], index["views"], index["dtype"]) == ([4, 4, 4], expected.shape[1], dtype)
    assert index["classes"] == ["0", "1", "2"] and len(index["shards"]) == 3
    assert np.array_equal(data.labels, LABELS)
    noise = np.random.default_rng(1).standard_normal((7, 4, 4, 4))
    for view in range(expected.shape[1]):
        stored = data.read(np.arange(7), view).stored
        assert np.array_equal(stored.numpy(), expected[:, view])
        for eps in (noise, 0 * noise):
            x = to_network(stored, data.latents, torch.from_numpy(eps).float() if eps.any() else None)
            assert np.allclose(x, network(expected[:, view].astype(np.float64), eps), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("source", "chosen"), [("part-*.tar", slice(7)), ("part-0001.tar", slice(3, 6))])
def test_tars_may_be_a_pattern_or_one_file(bring, tmp_path, source, chosen):
    write_tars(tmp_path / "source")
    data = bring("tread_tar", f"source=source/{source}")
    assert np.array_equal(data.labels, LABELS[chosen])
    assert np.array_equal(data.read(np.arange(len(data))).stored, sources("tread_tar")[chosen, 0].astype(np.float16))


def test_an_lmdb_may_be_a_file_without_flipped_copies(bring, tmp_path):
    write_lmdb(tmp_path / "source")
    put(tmp_path / "source", {"length": b"5"})
    data = bring("maskdit_lmdb", "source=source/data.mdb", "flipped=false")
    assert data.latents.views == 1 and data.labels.tolist() == LABELS[:5].tolist()
    assert np.array_equal(data.read(np.arange(5)).stored, sources("maskdit_lmdb")[:5, 0].astype(np.float16))


def test_classes_have_the_names_given(bring, tmp_path):
    write_folder(tmp_path / "source")
    (tmp_path / "names.txt").write_text("tench\ngreat white shark\ncock\nhen\n")
    latents = bring("repa_npy", "classes=names.txt").latents
    assert latents.classes == ("tench", "great white shark", "cock", "hen")
    assert bring("repa_npy", "num_classes=1000", out="thousand").latents.classes == tuple(map(str, range(1000)))


def test_the_report_warns_of_an_unlikely_scale_and_of_nobody_having_looked(bring, tmp_path, capsys, monkeypatch):
    write_tars(tmp_path / "source")
    monkeypatch.setattr(autoencoder, "load_decoder", lambda latents, device: lambda x: autoencoder.to_uint8(x[:, :3]))
    bring("tread_tar", "decode=2")
    assert "warning" not in capsys.readouterr().out and (tmp_path / "data" / "report.png").is_file()
    monkeypatch.setattr(autoencoder, "load_decoder", lambda latents, device: int("no autoencoder"))  # a ValueError
    bring("tread_tar", "scale_applied=true", "decode=2", out="other")
    shown = capsys.readouterr().out
    assert "are scale and scale_applied right?" in shown and "nobody has seen whether the scale is right" in shown


@pytest.mark.parametrize("kind", WRITE)
def test_a_stopped_import_goes_on_and_ends_with_the_same_bytes(bring, tmp_path, capsys, monkeypatch, kind):
    WRITE[kind](tmp_path / "source")
    bring(kind, out="whole")
    write = import_latents.DatasetWriter.write

    def stop(self, number, *arguments):
        write(self, number, *arguments) if number == 0 else sys.exit("stopped")

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(import_latents.DatasetWriter, "write", stop)
        bring(kind)
    gc.collect()  # the stopped one's locks
    begun = (tmp_path / ".data.unfinished" / "data" / "shard-00000.npy").stat().st_mtime_ns
    with pytest.raises(ValueError, match="unfinished work of another kind"):
        bring(kind, "dtype=float32")
    gc.collect()
    capsys.readouterr()
    bring(kind)
    assert "work      2 of 3 shards" in capsys.readouterr().out
    ended, whole = ({p.name: p.read_bytes() for p in (tmp_path / out).iterdir()} for out in ("data", "whole"))
    assert ended == whole and (tmp_path / "data" / "shard-00000.npy").stat().st_mtime_ns == begun
    assert not (tmp_path / ".data.unfinished").exists()


def test_a_finished_import_is_left_alone(bring, tmp_path, capsys):
    write_folder(tmp_path / "source")
    bring("repa_npy")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").iterdir()}
    capsys.readouterr()
    bring("repa_npy")
    assert capsys.readouterr().out == "data is finished\n"
    with pytest.raises(FileExistsError, match="data exists already"):
        bring("repa_npy", "num_classes=9")
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "data").iterdir()}


def npy(array, save=np.save) -> bytes:
    file = io.BytesIO()
    save(file, array)
    return file.getvalue()


def edit(**entries):
    """A function that changes an LMDB: y_3=b"1" is its entry y-3; None removes it."""
    return lambda source: put(source, {key.replace("_", "-"): value for key, value in entries.items()})


def tar(compress=None, **parts):
    """A function that puts one more tar into the source, of one sample with these parts."""

    def write(source):
        with webdataset.TarWriter(str(source / "part-0003.tar"), compress=compress) as opened:
            opened.write({"__key__": "7", **{key.replace("_", "."): part for key, part in parts.items()}})

    return write


def listed(rows):
    return place("dataset.json", json.dumps({"labels": rows}).encode())


def shorten(name):
    return lambda source: os.truncate(source / name, (source / name).stat().st_size // 2)


def remove(name):
    return lambda source: (source / name).unlink()


def place(name, content):
    return lambda source: (source / name).write_bytes(content)


Z, NPY = np.ones((4, 4, 4), np.float32), ROWS[5][0]
LMDB = "import the LMDB they were made from"
FAULTS = {  # kind: fault → what is done to the source, what the message says, overrides
    "maskdit_lmdb: odd length": (edit(length=b"13"), "source has length 13, which is odd"),
    "maskdit_lmdb: halves differ": (edit(y_8=b"1"), "entry 1 has label 0, but 8 has 1.*flipped=false"),
    "maskdit_lmdb: length too long": (edit(length=b"16"), "source has no entry y-14: it is truncated"),
    "maskdit_lmdb: no length": (edit(length=None), "source has no entry length.*no MaskDiT LMDB"),
    "maskdit_lmdb: broken length": (edit(length=b"many"), "source.*length.*many"),
    "maskdit_lmdb: label no number": (edit(y_3=b"cat"), "source.*y-3.*cat"),
    "maskdit_lmdb: torn entry": (edit(z_3=bytes(511)), "source.*z-3"),
    "maskdit_lmdb: other size": (edit(z_5=bytes(128), z_12=bytes(128)), r"z-5 has shape \(2, 8, 2, 2\), but the first"),
    "maskdit_lmdb: infinite": (edit(z_4=b"\0\0\x80\x7f" * 128), "not finite in float16.*dtype=float32"),
    "maskdit_lmdb: no LMDB": (place("data.mdb", b"text" * 4000), "source can't be opened as an LMDB"),
    "maskdit_lmdb: empty folder": (remove("data.mdb"), "source can't be opened as an LMDB"),
    "maskdit_lmdb: scaled": (None, "holds unscaled moments; leave scale_applied out", "scale_applied=true"),
    "tread_tar: pickled": (tar(latent=BOMB, cls=1), f"part-0003.tar: sample 7 has cls, latent, .*{LMDB}"),
    "tread_tar: pickled otherwise": (tar(latent_pyd=Z, cls=1), f"part-0003.tar: sample 7 has .*{LMDB}"),
    "tread_tar: pickle named npy": (
        tar(latent_npy=BOMB, cls=1),
        f"part-0003.tar: 7.latent.npy is damaged or no.*{LMDB}",
    ),
    "tread_tar: objects": (
        tar(latent_npy=np.array([{}], object), cls=1),
        f"7.latent.npy is damaged or no plain array.*{LMDB}",
    ),
    "tread_tar: moments": (tar(latent_npy=np.ones((8, 4, 4)), cls=1), rf"shape \(8, 4, 4\).* moments: {LMDB}"),
    "tread_tar: other size": (tar(latent_npy=np.ones((4, 6, 6)), cls=1), r"7.latent.npy has shape \(1, 4, 6, 6\), but"),
    "tread_tar: one number": (tar(latent_npy=npy(1.0), cls=1), r"7.latent.npy has shape \(\)"),
    "tread_tar: empty npy": (tar(latent_npy=b"", cls=1), "part-0003.tar: 7.latent.npy"),
    "tread_tar: no cls": (tar(latent_npy=Z), "part-0003.tar: sample 7 has latent.npy, but must have .* and cls"),
    "tread_tar: label no number": (tar(latent_npy=Z, cls=b"cat"), "part-0003.tar.*7.*cat"),
    "tread_tar: compressed": (tar(True, latent_npy=Z, cls=1), "part-0003.tar is no tar, or damaged"),
    "tread_tar: truncated": (shorten("part-0001.tar"), "part-0001.tar is .*truncated"),
    "tread_tar: scale not said": (None, "can't be seen: say scale_applied=true if", "scale_applied=null"),
    "repa_npy: missing": (remove(NPY), f"source: labelled, but not there: {NPY}"),
    "repa_npy: no label": (listed(ROWS[:5] + ROWS[6:]), f"source: without a label: {NPY}"),
    "repa_npy: outside": (listed([*ROWS[:-1], ["../a.npy", 1]]), "can't be read: ../a.npy lies outside"),
    "repa_npy: comes twice": (listed([*ROWS, ROWS[5]]), f"{NPY}.*twice"),
    "repa_npy: label no number": (listed([[name, "cat"] for name, _ in ROWS]), "dataset.json.*'cat'"),
    "repa_npy: no labels": (place("dataset.json", b"{}"), 'dataset.json can\'t be read: .*, {"labels"'),
    "repa_npy: no dataset.json": (remove("dataset.json"), "source/dataset.json is not there; source must be"),
    "repa_npy: negative std": (place(NPY, npy(-np.ones((8, 4, 4)))), f"{NPY} has standard deviations below 0"),
    "repa_npy: other size": (place(NPY, npy(np.ones((8, 6, 6)))), r"5.npy has shape \(1, 8, 6, 6\), but the first"),
    "repa_npy: truncated": (shorten(NPY), f"{NPY} is damaged or no plain array"),
    "repa_npy: pickled": (place(NPY, BOMB), f"{NPY} is damaged or no plain array"),
    "repa_npy: several arrays": (place(NPY, npy(Z, np.savez)), NPY),
    "repa_npy: too few classes": (None, r"source: labels lie in 0\.\.2, but num_classes is 2", "num_classes=2"),
    "repa_npy: no classes": (None, "num_classes", "num_classes=0"),
    "repa_npy: too few names": (place("a.txt", b"a\nb\n"), "a.txt names 2 classes", "classes=source/a.txt"),
    "another kind": (None, "kind is 'another kind'.*prepare_latents.py", "source=absent"),
    **{f"{kind}: absent": (None, "absent.* is not there", "source=absent") for kind in WRITE},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_as_its_kind_says_is_refused(bring, tmp_path, fault):
    kind, (spoil, shown, *overrides) = fault.split(":")[0], FAULTS[fault]
    if kind in WRITE:
        WRITE[kind](tmp_path / "source")
    if spoil:
        spoil(tmp_path / "source")
    with pytest.raises((ValueError, OSError), match=shown):
        bring(kind, *overrides)
    assert not (tmp_path / "data").exists() and not list(tmp_path.rglob("index.json"))
    assert not (tmp_path / "ran-by-unpickling").exists()


def test_the_package_of_a_kind_is_named_where_it_is_missing(bring, tmp_path, monkeypatch):
    write_lmdb(tmp_path / "source")
    (tmp_path / "train.parquet").touch()
    for package, attempt in (("lmdb", lambda: bring("maskdit_lmdb")), ("pyarrow", lambda: find_photos(tmp_path))):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ValueError, match=f"{package}; pip install -r requirements-import.txt"):
            attempt()


@pytest.mark.slow
def test_the_command_lines_end_with_a_dataset_or_an_error(tmp_path):
    def run(script, *arguments):
        return run_python(ROOT / "scripts" / script, *arguments, cwd=tmp_path)

    write_lmdb(tmp_path / "source")
    given = ("import_latents.py", "kind=maskdit_lmdb", "source=source", "decode=0")
    done = run(*given, "out=data")
    assert done.returncode == 0 and "posterior mean and log-variance, unscaled" in done.stdout, done
    assert LatentDataset(tmp_path / "data", verify="full").latents.views == 2
    for split in ("train", "test"):
        write_parquet(tmp_path / "source" / f"{split}-00000-of-00001.parquet")
    done = run("prepare_latents.py", "source=source", "out=other")
    assert done.returncode == 1 and done.stderr.startswith("error: source holds the splits test, train; choose"), done
    shorten("data.mdb")(tmp_path / "source")  # reading beyond the end of a mapped file would kill the process
    done = run(*given, "out=other")
    assert done.returncode == 1 and done.stderr.startswith("error: source") and "truncated" in done.stderr, done
    assert {path.name for path in tmp_path.iterdir()} == {"source", "data"}


def pixels(count):
    rng = np.random.default_rng(count)
    return [Image.fromarray(rng.integers(0, 256, (16 + i, 20, 3), dtype=np.uint8)) for i in range(count)]


def same(content, picture) -> bool:
    return np.array_equal(np.asarray(read_rgb(content)), np.asarray(picture))


def write_parquet(path, count=5, **columns):
    """Pictures of a wasp, a bee, a wasp, …, in row groups of 2; or other columns."""
    import datasets  # imported here because it takes a second

    datasets.disable_progress_bars()
    columns = {"image": pixels(count), "label": [i % 2 for i in range(count)]} | columns
    table = datasets.Dataset.from_dict({name: column for name, column in columns.items() if column})
    if columns["label"] and set(columns["label"]) == {0, 1}:
        table = table.cast_column("label", datasets.ClassLabel(names=["wasp", "bee"]))
    path.parent.mkdir(exist_ok=True, parents=True)
    table.to_parquet(str(path), batch_size=2)
    return table


def test_parquet_holds_the_pictures_classes_and_split_that_datasets_wrote(tmp_path):
    files = {"train-00000-of-00002": 5, "train-00001-of-00002": 4, "validation-00000-of-00001": 3}
    *train, other = [list(write_parquet(tmp_path / "data" / f"{file}.parquet", n)) for file, n in files.items()]
    for root, rows in (("train", sum(train, [])), ("validation", other)):
        photos = find_photos(tmp_path, root)
        assert photos.classes == ("wasp", "bee") and photos.labels.tolist() == [row["label"] for row in rows]
        assert len(photos.names) == len(set(photos.names)) == len(rows)
        for index in np.random.default_rng(0).permutation(len(rows)):  # row groups back and forth
            assert same(photos.read(int(index)), rows[index]["image"])
    for root in (None, "test"):
        with pytest.raises(ValueError, match="holds the splits train, validation; choose one by root="):
            find_photos(tmp_path, root)
    crops = DataLoader(Crops(find_photos(tmp_path, "train"), Crop(16)), batch_size=None, num_workers=2)
    for (pixels, *_), row in zip(crops, sum(train, []), strict=True):
        assert np.array_equal(pixels.permute(1, 2, 0), centre_crop(row["image"], 16))
    shorten("train-00001-of-00002.parquet")(tmp_path / "data")
    with pytest.raises(ValueError, match="train-00001-of-00002.parquet is damaged or no parquet file"):
        find_photos(tmp_path, "train")


def test_numbered_parquet_files_are_one_split(tmp_path):
    for name in ("0000.parquet", "0001.parquet"):  # as the Hub names the files that it converts
        write_parquet(tmp_path / name)
    assert len(find_photos(tmp_path)) == 10


PARQUET = {  # columns, what the message says
    "no pictures": ({"image": None}, "has the columns label, but needs one Image column, or 'image'"),
    "no labels": ({"label": None}, "has the columns image, but needs one ClassLabel column, or 'label'"),
    "names for labels": ({"label": list("abcde")}, "source.*label"),
    "a label missing": ({"label": [0, 1, None, 1, 0]}, r"source.*label(?!s lie in -9223372036854775808)"),
    "a label of no class": ({"label": [0, 1, -1, 1, 0]}, r"source: labels lie in -1\.\.1"),
    "names for pictures": ({"image": list("abcde")}, "image|picture"),
    "a row without a picture": ({"image": [None, *pixels(4)]}, "the row holds no picture"),
    "pictures elsewhere": ({"image": [{"bytes": None, "path": "a.png"}] * 5}, "a file that is not in the parquet"),
}


@pytest.mark.parametrize("fault", PARQUET)
def test_parquet_that_is_not_clear_is_refused(tmp_path, fault):
    columns, shown = PARQUET[fault]
    write_parquet(tmp_path / "source" / "train.parquet", **columns)
    with pytest.raises((ValueError, OSError), match=shown):
        find_photos(tmp_path / "source").read(0)


@pytest.mark.parametrize("metadata", [None, "metadata.csv"])
@pytest.mark.parametrize("classes", [["wasp", "bee", "wasp"], [1, 0, 1]])
def test_an_imagefolder_is_what_datasets_reads_it_as(tmp_path, metadata, classes):
    import datasets

    rows = [(f"{name}/{i}.png", name) for i, name in enumerate(classes)]
    for (name, _), picture in zip(rows, pixels(3)):
        (tmp_path / "train" / name).parent.mkdir(parents=True, exist_ok=True)
        picture.save(tmp_path / "train" / name)
    if metadata:
        lines = ["file_name,label", *(f"{name},{label}" for name, label in rows)]
        (tmp_path / "train" / metadata).write_text("\n".join(lines) + "\n")
    read = datasets.load_dataset("imagefolder", data_dir=str(tmp_path), split="train", cache_dir=str(tmp_path / ".hub"))
    names = getattr(read.features["label"], "names", None)
    photos = find_photos(tmp_path, "train")
    assert len(photos) == len(read) == 3 and names in (None, list(photos.classes))
    for row in read:
        (index,) = (i for i in range(3) if same(photos.read(i), row["image"]))
        assert photos.classes[photos.labels[index]] == (names[row["label"]] if names else str(row["label"]))
    (tmp_path / "train" / rows[1][0]).unlink()
    with pytest.raises(ValueError, match="labelled, but not there" if metadata else "without a picture"):
        find_photos(tmp_path, "train").check_classes()
