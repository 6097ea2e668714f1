"""Other people's latents, written by the libraries of their own kinds and then imported.

Trusted are those libraries (lmdb, webdataset, numpy, safetensors, torch), the numbers that are put into the files, and
the formulas of each kind's own loader: MaskDiT's and U-ViT's mean + exp(logvar / 2)·ε, REPA's mean + std·ε, times
0.18215, and LightningDiT's (z − mean) / std by channel.
"""

import gc
import io
import json
import os
import sys
from types import SimpleNamespace

import import_latents
import numpy as np
import pytest
import torch
from conftest import ROOT, contents, interrupt, launch_door, times, write_json
from forked import run_python
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from tread.data.dataset import LatentDataset
from tread.data.index import read_index
from tread.data.latents import to_network
from tread.encoders import autoencoder
from tread.preparing import imports
from tread.preparing.imports import KINDS

SCALE = 0.18215
LABELS = np.array([2, 0, 1, 1, 0, 2, 1])
COUNT, ALL = len(LABELS), np.arange(len(LABELS))
ROWS = [[f"00000/img-mean-std-{i:08d}.npy", int(label)] for i, label in enumerate(LABELS)]
BOMB = b"cos\nmkdir\n(Vran-by-unpickling\ntR."  # a pickle that makes a folder when it is read
CAPTIONS = [["a red apple", "fruit"], ["a giraffe"], ["flowers", "a vase", "Blumen"], *[[f"{i}"] for i in range(4)]]
SHARDS = {"rank00_shard000": slice(0, 3), "rank00_shard001": slice(3, 4), "rank01_shard000": slice(4, 7)}
FIRST, LAST = (f"latents_{name}.safetensors" for name in ("rank00_shard000", "rank01_shard000"))


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape, np.float32)


EMPTY, TEXTS = drawn(77, 768), [drawn(len(captions), 77, 768) for captions in CAPTIONS]


def stored(kind: str) -> np.ndarray:
    """The numbers in the files of a kind: (n, views, C or 2C, 4, 4) float32."""
    views, channels = {"maskdit_lmdb": (2, 8), "tread_tar": (1, 4), "lightningdit": (2, 6)}.get(kind, (1, 8))
    numbers = 5 * drawn(COUNT, views, channels, 4, 4)
    if kind == "repa_npy":
        return np.concatenate([numbers[:, :, :4], numbers[:, :, 4:] ** 2], axis=2)
    by_channel = np.arange(channels, dtype=np.float32).reshape(-1, 1, 1)
    return numbers * (1 + by_channel) - 3 * by_channel if kind == "lightningdit" else numbers


def put(folder, entries):
    """Write entries of an LMDB, or remove those that are None."""
    lmdb = pytest.importorskip("lmdb", reason="pip install -r requirements-import.txt")
    with lmdb.open(str(folder), map_size=1 << 24) as opened, opened.begin(write=True) as transaction:
        for key, value in entries.items():
            transaction.delete(key.encode()) if value is None else transaction.put(key.encode(), value)


def write_lmdb(folder):
    moments = np.concatenate(list(stored("maskdit_lmdb").swapaxes(0, 1)))  # all as they are, then all flipped
    entries = {f"z-{i}": z.tobytes() for i, z in enumerate(moments)}
    entries |= {f"y-{i}": str(y).encode() for i, y in enumerate([*LABELS, *LABELS])}
    put(folder, entries | {"length": b"14"})


def write_tars(folder):
    webdataset = pytest.importorskip("webdataset", reason="pip install -r requirements-test.txt")
    folder.mkdir()
    with webdataset.ShardWriter(str(folder / "part-%04d.tar"), maxcount=3, verbose=0) as tars:
        for i, (z, y) in enumerate(zip(stored("tread_tar"), LABELS)):
            tars.write({"__key__": f"{i:06d}", "latent.npy": z[0], "cls": int(y)})


def write_repa(folder):
    (folder / "00000").mkdir(parents=True)
    for (name, _), z in zip(ROWS, stored("repa_npy")):
        np.save(folder / name, z[0])
    write_json(folder / "dataset.json", {"labels": ROWS})


def statistics():
    z = torch.from_numpy(stored("lightningdit")).double()
    return {"mean": z.mean(dim=(0, 1, 3, 4)).view(1, -1, 1, 1), "std": z.std(dim=(0, 1, 3, 4)).view(1, -1, 1, 1)}


def write_shards(folder):
    folder.mkdir()
    for name, rows in SHARDS.items():
        parts = [torch.from_numpy(stored("lightningdit")[rows, view].copy()) for view in range(2)]
        tensors = {"latents": parts[0], "latents_flip": parts[1], "labels": torch.from_numpy(LABELS[rows])}
        save_file(tensors, folder / f"latents_{name}.safetensors", {"dtype": "torch.float32", "device": "cpu"})
    torch.save(statistics(), folder / "latents_stats.pt")


def write_coco(folder):
    """The features; and, beside the folder, the annotations, whose pictures are in another order."""
    folder.mkdir()
    for index, (moments, texts) in enumerate(zip(stored("uvit_coco"), TEXTS)):
        np.save(folder / f"{index}.npy", moments[0])
        for number, text in enumerate(texts):
            np.save(folder / f"{index}_{number}.npy", text)
    np.save(folder / "empty_context.npy", EMPTY)
    annotate(folder, CAPTIONS)


def annotate(folder, captions):
    """MS-COCO's annotations: of the sample i the picture 10 + i."""
    images = [{"id": 10 + i, "file_name": f"{i}.jpg"} for i in reversed(range(len(captions)))]
    notes = [{"image_id": 10 + i, "caption": words} for i, its in enumerate(captions) for words in its]
    write_json(folder.parent / "captions.json", {"images": images, "annotations": notes})


STOPPED = ("uvit_coco", "lightningdit")  # the kinds that are stopped in the fast suite: with text, and without
WRITE = dict(zip(KINDS, (write_lmdb, write_tars, write_repa, write_shards, write_coco)))


@pytest.fixture
def bring(run_pipeline, tmp_path, monkeypatch):
    """A function from a kind and overrides to the dataset tmp_path/<out> imported from tmp_path/source; what it printed
    stays in its `printed`."""
    monkeypatch.chdir(tmp_path)

    def run(kind, *overrides, out="data"):
        given = ["source=source", f"out={out}", "autoencoder=pixels", "decode=0", "shard_size=3"]
        given += ["scale_applied=false"] * (kind == "tread_tar") + ["captions=captions.json"] * (kind == "uvit_coco")
        pipeline = (import_latents.import_all, import_latents.ImportOptions, "import_latents")
        run.printed = run_pipeline(*pipeline, f"kind={kind}", *given, *overrides)
        return LatentDataset(tmp_path / out, "full", text="clip-l" if kind == "uvit_coco" else None)

    return run


MEANINGS = {  # overrides, meaning in the index, network latents of stored numbers x and noise e
    "maskdit_lmdb": ([], ("moments", "logvar", False), lambda x, e: (x[:, :4] + np.exp(x[:, 4:] / 2) * e) * SCALE),
    "uvit_coco": ([], ("moments", "logvar", False), lambda x, e: (x[:, :4] + np.exp(x[:, 4:] / 2) * e) * SCALE),
    "repa_npy": ([], ("moments", "std", False), lambda x, e: (x[:, :4] + x[:, 4:] * e) * SCALE),
    "tread_tar": (["scale_applied=false"], ("latents", None, False), lambda x, e: x * SCALE),
    "tread_tar, scaled": (["scale_applied=true"], ("latents", None, True), lambda x, e: x),
    "lightningdit": ([], ("latents", None, False), lambda x, e: x),
}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("case", MEANINGS)
def test_numbers_labels_and_meaning_are_the_sources(bring, tmp_path, case, dtype):
    (overrides, meaning, network), kind = MEANINGS[case], case.split(",")[0]
    WRITE[kind](tmp_path / "source")
    data, expected = bring(kind, f"dtype={dtype}", *overrides), stored(kind).astype(dtype)
    index, captioned = read_index(tmp_path / "data"), kind == "uvit_coco"
    assert tuple(index[key] for key in ("content", "spread", "scale_applied")) == meaning
    assert (index["scale"], index["shift"]) == (1.0 if kind == "lightningdit" else SCALE, 0)
    shape = (6 if kind == "lightningdit" else 4, 4, 4)
    assert (data.latents.shape, index["views"], index["dtype"]) == (shape, expected.shape[1], dtype)
    assert index["classes"] == (["all"] if captioned else ["0", "1", "2"]) and len(index["shards"]) == 3
    assert np.array_equal(data.labels, 0 * LABELS if captioned else LABELS)
    noise = np.random.default_rng(1).standard_normal((COUNT, *shape))
    for view in range(expected.shape[1]):
        there = data.read(ALL, view).stored
        assert np.array_equal(there.numpy(), expected[:, view])
        for eps in (noise, 0 * noise):
            x = to_network(there, data.latents, torch.from_numpy(eps).float() if eps.any() else None)
            assert np.allclose(x, network(expected[:, view].astype(np.float64), eps), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("source, chosen", [("part-*.tar", slice(7)), ("part-0001.tar", slice(3, 6))])
def test_tars_may_be_a_pattern_or_one_file(bring, tmp_path, source, chosen):
    write_tars(tmp_path / "source")
    data = bring("tread_tar", f"source=source/{source}")
    assert np.array_equal(data.labels, LABELS[chosen])
    assert np.array_equal(data.read(np.arange(len(data))).stored, stored("tread_tar")[chosen, 0].astype(np.float16))


def test_an_lmdb_may_be_a_file_without_flipped_copies(bring, tmp_path):
    write_lmdb(tmp_path / "source")
    put(tmp_path / "source", {"length": b"5"})
    data = bring("maskdit_lmdb", "source=source/data.mdb", "flipped=false")
    assert data.latents.views == 1 and data.labels.tolist() == LABELS[:5].tolist()
    assert np.array_equal(data.read(np.arange(5)).stored, stored("maskdit_lmdb")[:5, 0].astype(np.float16))


def test_classes_have_the_names_given(bring, tmp_path):
    write_repa(tmp_path / "source")
    (tmp_path / "names.txt").write_text("\ufefftench\r\ngreat white shark\r\ncock\r\nhen\r\n\r\n")
    with pytest.raises(ValueError, match="num_classes is 1000, but names.txt names 4"):
        bring("repa_npy", "classes=names.txt", "num_classes=1000")
    latents = bring("repa_npy", "classes=names.txt").latents
    assert latents.classes == ("tench", "great white shark", "cock", "hen")
    assert bring("repa_npy", "num_classes=1000", out="thousand").latents.classes == tuple(map(str, range(1000)))


@pytest.mark.parametrize("scale", [1, 0.5])
def test_normalised_latents_are_those_of_lightningdits_own_dataset(bring, tmp_path, scale):
    """By the file's statistics, not by measured ones; without normalisation the latents are z·scale."""
    write_shards(tmp_path / "source")
    theirs = {"mean": torch.arange(6.0).view(1, 6, 1, 1), "std": torch.arange(1, 7.0).view(1, 6, 1, 1) / 3}
    torch.save(theirs, tmp_path / "source/latents_stats.pt")
    data, z = bring("lightningdit", "dtype=float32", f"scale={scale}"), torch.from_numpy(stored("lightningdit"))[:, 1]
    assert "warning: latents_stats.pt is off by" in bring.printed
    there = data.read(ALL, 1).stored
    assert_close(to_network(there, data.latents), z * scale)
    data.normalize(1.0)
    assert_close(to_network(there, data.latents), (z - theirs["mean"]) / theirs["std"], rtol=1e-5, atol=1e-5)


def test_without_statistics_measured_ones_serve_and_one_view_may_do(bring, tmp_path):
    write_shards(tmp_path / "source")
    (tmp_path / "source/latents_stats.pt").unlink()
    data, z = bring("lightningdit", "flipped=false"), torch.from_numpy(stored("lightningdit"))[:, 0]
    assert "warning" not in bring.printed and "normalize_by" not in read_index(data.folder)
    assert data.latents.views == 1
    data.normalize(1.0)
    expected = (z - z.mean(dim=(0, 2, 3), keepdim=True)) / z.std(dim=(0, 2, 3), keepdim=True, correction=0)
    assert_close(to_network(data.read(ALL).stored, data.latents), expected, atol=2e-2, rtol=0)  # of fp16


def test_headers_alone_are_read_before_the_work(tmp_path, monkeypatch):
    """Every tensor but the labels is taken row by row."""
    write_shards(tmp_path / "source")
    opened, taken = imports._opened, []

    class Watched:
        def __init__(self, file):
            self.file, self.keys, self.get_slice = file, file.keys, file.get_slice

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def get_tensor(self, name):
            taken.append(name)
            return self.file.get_tensor(name)

    monkeypatch.setattr(imports, "_opened", lambda path: Watched(opened(path)))
    samples = KINDS["lightningdit"](tmp_path / "source", SimpleNamespace(flipped=True))
    assert np.array_equal(samples.read(5), stored("lightningdit")[5]) and taken == ["labels"] * 3
    assert samples.name(5) == f"{LAST}, row 1,"


@pytest.mark.parametrize("known", [True, False])
def test_u_vits_text_is_the_sources(bring, tmp_path, known):
    """With its captions, where the annotations are named; the empty caption's may lie in the folder above."""
    write_coco(tmp_path / "source")
    if known:
        (tmp_path / "source/empty_context.npy").rename(tmp_path / "empty_context.npy")
    data = bring("uvit_coco", *([] if known else ["captions=null"]))
    flat = np.concatenate(TEXTS).astype(np.float16)
    text = data.encoded.read(np.arange(len(flat)))
    assert np.array_equal(text.tokens, flat) and text.mask.all() and text.pooled is None
    assert np.array_equal(data.encoded.null.tokens[0], EMPTY.astype(np.float16))
    spec = data.text_spec
    assert (spec.encoder, spec.fingerprint, spec.tokens, spec.width, spec.padding) == ("clip-l", None, 77, 768, True)
    assert ("captions" in read_index(data.folder)) == known
    assert not known or data.captions == CAPTIONS


def test_the_report_warns_of_an_unlikely_scale_and_of_nobody_having_looked(bring, tmp_path, monkeypatch):
    write_tars(tmp_path / "source")
    monkeypatch.setattr(autoencoder, "load_decoder", lambda latents, device: lambda x: autoencoder.to_uint8(x[:, :3]))
    bring("tread_tar", "decode=2")
    assert "warning" not in bring.printed and (tmp_path / "data/report.png").is_file()
    monkeypatch.setattr(autoencoder, "load_decoder", lambda latents, device: int("no autoencoder"))  # a ValueError
    bring("tread_tar", "scale_applied=true", "decode=2", out="other")
    assert "are scale and scale_applied right?" in bring.printed
    assert "nobody has seen whether the scale is right" in bring.printed


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k not in STOPPED)) for k in KINDS])
def test_a_stopped_import_goes_on_and_ends_with_the_same_bytes(bring, tmp_path, monkeypatch, kind):
    """Stopped in the latents, and where there is text, in that; and finished it is left alone."""
    monkeypatch.setattr("tread.data.section_writer.SHARD", 4 * imports.CLIP_TEXT.caption_bytes)
    WRITE[kind](tmp_path / "source")
    bring(kind, out="whole")
    work = tmp_path / ".data.unfinished/data"
    for writer in (import_latents.DatasetWriter, imports.TextWriter)[: 1 + (kind == "uvit_coco")]:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            interrupt(patch, writer, "write", 2)
            bring(kind)
        gc.collect()  # the stopped one's locks
    if kind == "uvit_coco":  # and behind it, when all is written but the end
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            interrupt(patch, import_latents, "finish", 1)
            bring(kind)
        gc.collect()
        monkeypatch.setattr(imports.TextWriter, "write", None)
    begun = times(work.rglob("*-00000*.npy"))
    with pytest.raises(ValueError, match="unfinished work of another kind"):
        bring(kind, *(["scale=2"] if kind == "lightningdit" else ["dtype=float32"]))
    gc.collect()
    bring(kind)
    assert contents(tmp_path / "data") == contents(tmp_path / "whole") and not (tmp_path / ".data.unfinished").exists()
    ended = times((tmp_path / "data").iterdir())
    assert begun and all(ended[tmp_path / "data" / path.name] == time for path, time in begun.items())
    bring(kind)
    assert bring.printed.startswith("data is finished; ") and times(ended) == ended
    with pytest.raises(FileExistsError, match="data exists already"):
        bring(kind, "num_classes=9")


def npy(array, save=np.save) -> bytes:
    file = io.BytesIO()
    save(file, array)
    return file.getvalue()


def entries(**values):
    """A function that changes an LMDB: y_3=b"1" is its entry y-3; None removes it."""
    return lambda source: put(source, {key.replace("_", "-"): value for key, value in values.items()})


def tar(compress=None, **parts):
    """A function that puts one more tar into the source, of one sample with these parts."""

    def write(source):
        from webdataset import TarWriter

        with TarWriter(str(source / "part-0003.tar"), compress=compress) as opened:
            opened.write({"__key__": "7", **{key.replace("_", "."): part for key, part in parts.items()}})

    return write


def place(name, content):
    return lambda source: (source / name).write_bytes(content)


def shorten(name):
    return lambda source: os.truncate(source / name, (source / name).stat().st_size // 2)


def remove(pattern):
    return lambda source: [path.unlink() for path in source.glob(pattern)]


def tensors(file, **parts):
    """A function that changes tensors of a shard; None removes one."""

    def change(source):
        there = load_file(source / file)
        there |= {key: part and part(there[key]) for key, part in parts.items()}
        save_file({key: part.contiguous() for key, part in there.items() if part is not None}, source / file)

    return change


def stats(**values):
    return lambda source: torch.save(statistics() | values, source / "latents_stats.pt")


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("ran-by-unpickling",))


Z, NPY, LMDB = np.ones((4, 4, 4), np.float32), ROWS[5][0], "import the LMDB they were made from"
FAULTS = {  # kind: fault → what is done to the source, what the message says, overrides
    "maskdit_lmdb: odd length": (entries(length=b"13"), "first half of 13"),
    "maskdit_lmdb: halves differ": (entries(y_8=b"1"), "flipped=false"),
    "maskdit_lmdb: length too long": (entries(length=b"16"), "source has no entry y-14"),
    "maskdit_lmdb: torn entry": (entries(z_3=bytes(511)), "source.*z-3"),
    "maskdit_lmdb: other size": (entries(z_5=bytes(128), z_12=bytes(128)), r"z-5 has shape \(2, 8, 2, 2\)"),
    "maskdit_lmdb: infinite": (entries(z_4=b"\0\0\x80\x7f" * 128), "not finite in float16"),
    "maskdit_lmdb: no LMDB": (place("data.mdb", b"text" * 4000), "source can't be opened as an LMDB"),
    "maskdit_lmdb: truncated": (shorten("data.mdb"), "source is truncated"),  # to read on would kill the process
    "maskdit_lmdb: scaled": (None, "unscaled numbers", "scale_applied=true"),
    "tread_tar: pickled": (tar(latent=BOMB, cls=1), f"part-0003.tar: sample 7 has cls, latent, .*{LMDB}"),
    "tread_tar: pickle named npy": (tar(latent_npy=BOMB, cls=1), f"part-0003.tar: 7.latent.npy is damaged.*{LMDB}"),
    "tread_tar: moments": (tar(latent_npy=np.ones((8, 4, 4)), cls=1), rf"shape \(8, 4, 4\).* moments: {LMDB}"),
    "tread_tar: other size": (tar(latent_npy=np.ones((4, 6, 6)), cls=1), r"7.latent.npy has shape \(1, 4, 6, 6\), but"),
    "tread_tar: no cls": (tar(latent_npy=Z), "part-0003.tar: sample 7 has latent.npy, but must have .* and cls"),
    "tread_tar: compressed": (tar(True, latent_npy=Z, cls=1), "part-0003.tar is no tar, or damaged"),
    "tread_tar: scale not said": (None, "can't be seen: say scale_applied=true if", "scale_applied=null"),
    "repa_npy: missing": (remove(NPY), f"source: labelled, but not there: {NPY}"),
    "repa_npy: label no number": (
        place("dataset.json", json.dumps({"labels": [[name, "cat"] for name, _ in ROWS]}).encode()),
        "dataset.json.*'cat'",
    ),
    "repa_npy: negative std": (place(NPY, npy(-np.ones((8, 4, 4)))), f"{NPY} has standard deviations below 0"),
    "repa_npy: several arrays": (place(NPY, npy(Z, np.savez)), NPY),
    "repa_npy: too few classes": (None, r"source: labels lie in 0\.\.2, but there are 2", "num_classes=2"),
    "repa_npy: captions": (None, "has classes; leave captions out", "captions=captions.json"),
    "lightningdit: no flipped": (
        tensors(LAST, latents_flip=None),
        f"{LAST} holds labels, latents, but no latents_flip",
    ),
    "lightningdit: fewer flipped": (tensors(FIRST, latents_flip=lambda z: z[1:]), rf"{FIRST}: latents_flip has shape"),
    "lightningdit: other channels": (
        tensors(LAST, latents=lambda z: z[:, :4], latents_flip=lambda z: z[:, :4]),
        rf"{LAST} has latents of shape \(4, 4, 4\), but {FIRST} of \(6, 4, 4\)",
    ),
    "lightningdit: truncated": (shorten(LAST), f"{LAST} can't be read: it is cut short"),
    "lightningdit: no shard": (remove(FIRST), "later shards, but not latents_rank00_shard000"),
    "lightningdit: stats of others": (stats(mean=torch.zeros(4)), r"latents_stats.pt holds mean \(4,\), .* 6 channels"),
    "lightningdit: std of 0": (stats(std=torch.zeros(6)), "latents_stats.pt: mean and std must be finite and"),
    "lightningdit: stats that run code": (stats(x=Bomb()), "latents_stats.pt could not be read .* run any code"),
    "uvit_coco: no picture": (remove("1.npy"), "files are missing, .* 1.npy"),
    "uvit_coco: no caption": (remove("2_1.npy"), "files are missing, .* 2_1.npy"),
    "uvit_coco: no empty caption": (remove("empty*"), "empty_context.npy"),
    "uvit_coco: a caption cut short": (shorten("2_1.npy"), "damaged files, 2_1.npy has"),
    "uvit_coco: another encoder": (place("empty_context.npy", npy(EMPTY[:, :512])), r"\(77, 512\).* must be \(77, 768"),
    "uvit_coco: other annotations": (lambda source: annotate(source, CAPTIONS[:2]), "lists 2 pictures with 3 captions"),
    "uvit_coco: text not finite": (place("0_1.npy", npy(EMPTY * np.inf)), "text holds numbers that are not fin"),
    "another kind": (None, "kind is 'another kind'.*prepare_latents.py", "source=absent"),
    **{f"{kind}: absent": (None, "absent", "source=absent") for kind in WRITE},
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_what_is_not_as_its_kind_says_is_refused(bring, tmp_path, fault):
    kind, (spoil, shown, *overrides) = fault.split(":")[0], FAULTS[fault]
    if kind in WRITE:
        WRITE[kind](tmp_path / "source")
    if spoil:
        spoil(tmp_path / "source")
    with pytest.raises((ValueError, OSError), match=shown):
        bring(kind, *overrides)
    assert not (tmp_path / "data").exists() and not (tmp_path / "ran-by-unpickling").exists()


def test_the_command_line_says_how_to_go_on_without_an_autoencoder(tmp_path, monkeypatch):
    write_shards(tmp_path / "source")
    given = ("kind=lightningdit", "source=source")
    shown = launch_door(import_latents.main, "import_latents", tmp_path, *given, "out=data")
    assert "nobody has seen whether the scale is right: the source of these latents did not say" in shown
    assert shown.splitlines()[-1].endswith(" dataset.normalize=true")
    assert read_index(tmp_path / "data")["autoencoder"] == "unknown"
    remove(FIRST)(tmp_path / "source")
    with pytest.raises(SystemExit, match="^error: source has later shards"):
        launch_door(import_latents.main, "import_latents", tmp_path, *given, "out=other")
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(SystemExit, match="lmdb; pip install -r requirements-import.txt"):
        launch_door(import_latents.main, "import_latents", tmp_path, "kind=maskdit_lmdb", "source=source", "out=other")


@pytest.mark.slow
def test_a_truncated_lmdb_does_not_kill_the_command(tmp_path):
    write_lmdb(tmp_path / "source")
    given = (ROOT / "scripts/import_latents.py", "kind=maskdit_lmdb", "source=source", "decode=0")
    done = run_python(*given, "out=data", cwd=tmp_path)
    assert done.returncode == 0 and LatentDataset(tmp_path / "data", verify="full").latents.views == 2, done
    shorten("data.mdb")(tmp_path / "source")
    done = run_python(*given, "out=other", cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("error: source") and "truncated" in done.stderr, done
