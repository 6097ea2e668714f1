"""From photos to a dataset, against the autoencoder run by hand, and against the same work done in one go.

What goes wrong on the way must end in a clear error, and in nothing half-written that looks whole.
"""

import contextlib
import logging
import multiprocessing
import os
import random
import resource
import shutil
import socket
import sys
import time
from functools import partial
from types import SimpleNamespace

import conftest
import diffusers
import numpy as np
import pytest
import torch
from accelerate import PartialState
from conftest import ROOT, TINY_KL, contents, launch, logged, names_in, raising, read_json, score, times, write_json
from forked import fork, run_python
from PIL import Image
from safetensors.torch import save_file
from torch.testing import assert_close

from tread.data.dataset import LatentDataset
from tread.data.index import read_index
from tread.data.latents import to_network
from tread.data.writer import DatasetWriter
from tread.encoders import autoencoder
from tread.preparing import encode_photos
from tread.preparing.archives import Tar
from tread.preparing.encode_photos import end_with
from tread.preparing.images import centre_crop, read_rgb
from tread.preparing.photos import held_out
from tread.preparing.sources import find_photos
from tread.runtime import schema
from tread.runtime.distributed import share_work
from tread.training import settings

SIZES = {"ant": 7, "bee": 5, "cow": 9}
FINISHED = "is finished; remove it to make it anew, if pictures changed since\n"
PIXELS = ["autoencoder=none", "dtype=float32"]
CORES = sorted(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """21 photos in class folders, an AutoencoderKL (×2) and an AutoencoderTiny (×8), both of random weights."""
    folder = tmp_path_factory.mktemp("place")
    rng = np.random.default_rng(0)
    for name, count in SIZES.items():
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((40, 30 + number)).save(folder / "photos" / name / f"{number}.png")
    torch.manual_seed(0)
    diffusers.AutoencoderKL(**TINY_KL, scaling_factor=0.5, shift_factor=0.1).save_pretrained(folder / "kl")
    diffusers.AutoencoderKL(**TINY_KL).save_pretrained(folder / "other")
    diffusers.AutoencoderTiny().save_pretrained(folder / "tiny")
    return folder


@pytest.fixture
def prepare(place, tmp_path, prepare_photos):
    """A function from overrides to what the script prints; the dataset is tmp_path/data."""
    given = [f"source={place / 'photos'}", f"out={tmp_path / 'data'}", f"autoencoder={place / 'kl'}", "resolution=16"]
    given += ["workers=0", "shard_size=4", "decode=2"]
    return partial(prepare_photos, *given)


def shard_files(folder):
    return {name: content for name, content in contents(folder).items() if name.startswith("shard-")}


# --------------------------------------------------------------------------------- what is prepared


@pytest.fixture
def moments(place, prepare):
    """The photos' moments with flipped copies, prepared once, and what was printed."""
    folder, printed = place / "moments", place / "moments.txt"
    if not folder.exists():
        printed.write_text(prepare("flip=true", f"out={folder}"))
    return LatentDataset(folder, verify="full"), printed.read_text()


def test_moments_are_the_autoencoders_own(place, moments):
    data, text = moments
    photos = find_photos(place / "photos")
    assert data.latents.classes == tuple(SIZES) and data.labels.tolist() == photos.labels.tolist()
    assert (data.latents.content, data.latents.spread, data.latents.views) == ("moments", "logvar", 2)
    assert (data.latents.scale, data.latents.shift, data.latents.scale_applied) == (0.5, 0.1, False)
    model = diffusers.AutoencoderKL.from_pretrained(place / "kl").eval()
    for index in range(0, len(photos), 3):
        pixels = torch.from_numpy(centre_crop(read_rgb(photos.read(index)), 16).copy()).permute(2, 0, 1) / 127.5 - 1
        for view in (0, 1):
            with torch.no_grad():
                expected = model.encode((pixels.flip(-1) if view else pixels)[None]).latent_dist.parameters[0]
            stored = data.read(np.array([index]), view).stored[0].float()
            assert_close(stored, expected, rtol=2e-3, atol=2e-3)  # float16
    assert "21 in 3 classes" in text and "ant 7, bee 5, cow 9" in text and "6 of 6 shards" in text
    assert Image.open(data.folder / "report.png").size == (2 * 64 + 2, 2 * 64 + 2)
    assert not list(place.glob(".*"))


def test_plain_latents_of_both_kinds(place, prepare, tmp_path):
    for kind, size, given in (("kl", 8, ["store=latents"]), ("tiny", 2, [])):
        prepare(f"autoencoder={place / kind}", f"out={tmp_path / kind}", "dtype=float32", *given)
        data = LatentDataset(tmp_path / kind)
        assert (data.latents.content, data.latents.shape) == ("latents", (4, size, size))
        pixels = torch.from_numpy(centre_crop(read_rgb(find_photos(place / "photos").read(3)), 16).copy())
        model = autoencoder.load_autoencoder(str(place / kind))
        with torch.no_grad():
            out = model.encode(pixels.permute(2, 0, 1)[None] / 127.5 - 1)
        expected = out.latents if kind == "tiny" else out.latent_dist.mode()
        assert_close(data.read(np.array([3])).stored, expected, rtol=1e-4, atol=1e-4)


def test_statistics_are_those_of_what_the_network_sees(moments):
    """Against the samples themselves, drawn 400 times."""
    data = LatentDataset(moments[0].folder)
    stored = torch.cat([data.read(np.arange(len(data)), view).stored for view in (0, 1)])
    shape = (len(stored), *data.latents.shape)
    samples = torch.stack([to_network(stored, data.latents, torch.randn(shape)) for _ in range(400)])
    mean, std = (torch.tensor(values) for values in data.statistics)
    assert_close(samples.mean(dim=(0, 1, 3, 4)), mean, rtol=0, atol=0.01)
    assert_close(samples.std(dim=(0, 1, 3, 4)), std, rtol=0.01, atol=0)
    data.normalize(0.5)
    samples = torch.stack([to_network(stored, data.latents, torch.randn(shape)) for _ in range(400)])
    assert_close(samples.mean(dim=(0, 1, 3, 4)), torch.zeros(4), rtol=0, atol=0.01)
    assert_close(samples.std(dim=(0, 1, 3, 4)), torch.full((4,), 0.5), rtol=0.01, atol=0)
    x = to_network(stored, data.latents)
    plain = data.latents.__class__(**{**data.latents.__dict__, "channel_shift": (), "channel_scale": ()})
    before = autoencoder.load_decoder(plain)(to_network(stored, plain))
    assert (autoencoder.load_decoder(data.latents)(x).int() - before.int()).abs().max() <= 1


def test_made_again_it_is_finished_and_worker_processes_change_nothing(prepare, tmp_path):
    prepare("batch_size=1")
    before = contents(tmp_path / "data")
    prepare("batch_size=1", "workers=2", f"out={tmp_path / 'again'}")
    assert contents(tmp_path / "again") == before
    (tmp_path / ".data.unfinished/done").mkdir(parents=True)  # as a process leaves it that is killed at the end
    assert prepare() == f"{tmp_path / 'data'} {FINISHED}"
    assert names_in(tmp_path) == {"data", "again"} and contents(tmp_path / "data") == before
    with pytest.raises(FileExistsError, match="exists already; remove it or choose another(?s:.*) there, 24 here"):
        prepare("resolution=24")


def test_photos_are_turned_and_laid_on_white_as_asked(place, prepare, tmp_path):
    """Against the crops of read_rgb, whose own tests compare it with Pillow."""
    for number, path in enumerate(sorted((place / "photos").glob("*/*.png"))):
        exif, image = Image.Exif(), Image.open(path)
        exif[0x0112] = number % 8 + 1
        image.putalpha(Image.linear_gradient("L").resize(image.size))
        (tmp_path / "photos" / path.parent.name).mkdir(parents=True, exist_ok=True)
        image.save(tmp_path / "photos" / path.parent.name / path.name, exif=exif)
    photos, seen = find_photos(tmp_path / "photos"), []
    for how in (("exif", "white"), ("stored", "drop")):
        given = () if how[0] == "exif" else ("orientation=stored", "alpha=drop")
        text = prepare(f"source={tmp_path / 'photos'}", f"out={tmp_path / how[0]}", *PIXELS, *given)
        assert f"orientation={how[0]}, alpha={how[1]}" in text and "patch_size" not in text
        data, plan = LatentDataset(tmp_path / how[0]), read_json(tmp_path / how[0] / "report.json")["plan"]
        assert (plan["orientation"], plan["alpha"]) == (data.latents.orientation, data.latents.alpha) == how
        expected = np.stack([centre_crop(read_rgb(photos.read(index), *how), 16) for index in range(21)])
        seen.append((data.read(np.arange(21)).stored * 127.5 + 127.5).round().numpy().transpose(0, 2, 3, 1))
        assert np.array_equal(seen[-1], expected)
    assert not np.array_equal(*seen)


def test_datasets_of_before_photos_were_turned_are_finished_and_open(prepare, tmp_path):
    """Their plan and index.json do not say how photos were read: as they were stored, without alpha."""
    stored = ["orientation=stored", "alpha=drop", *PIXELS]
    prepare(*stored)
    for name in ("index.json", "report.json"):
        tree = read_json(tmp_path / "data" / name)
        for key in ("orientation", "alpha"):
            del tree.get("plan", tree)[key]
        write_json(tmp_path / "data" / name, tree)
    assert prepare(*stored) == f"{tmp_path / 'data'} {FINISHED}"
    latents = LatentDataset(tmp_path / "data").latents
    assert (latents.orientation, latents.alpha) == ("stored", "drop")


def test_pictures_enlarged_more_than_4_times_are_named(prepare, tmp_path):
    """To 16 pixels: one of 3 is, one of 4 is enlarged 4 times and no more."""
    (tmp_path / "photos/ant").mkdir(parents=True)
    for side in (3, 4, 15, 16):
        Image.new("RGB", (side, 20)).save(tmp_path / f"photos/ant/{side}.png")
    text = prepare(f"source={tmp_path / 'photos'}", "enlarge=true", "decode=0")
    made = read_json(tmp_path / "data/report.json")
    assert (made["enlarged"], made["much_enlarged"]) == (3, ["ant/3.png"])
    assert "3 pictures were smaller" in text and "1 of them enlarged more than 4 times" in text and "ant/3.png" in text


def test_names_of_bytes_that_are_no_text_can_be_printed():
    """As the operating system hands them over: os.fsdecode."""
    name = os.fsdecode("Bär/".encode() + b"\xff.jpg")
    report = {"count": 1, "class_counts": {"Bär": 1}, "channel_mean": [0.0], "channel_std": [1.0]}
    text = encode_photos.report_text(report | {"enlarged": 1, "much_enlarged": [name], "left_out": [(name, "damaged")]})
    assert text.encode().decode().count("Bär/\\udcff.jpg") == 2


# ------------------------------------------------------------------------------------ interruptions


def work(tree, limit=None, descriptors=None):
    """One attempt, in a process of its own, that prints nothing."""
    if descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    if limit is not None:
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # else the limit may cut a module's, in processes begun from here
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    os.sched_setaffinity(0, CORES[:1])
    multiprocessing.set_start_method(None, force=True)  # Python's own default, as from the command line
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
        try:
            encode_photos.prepare_latents(schema.read(tree, encode_photos.PhotoOptions), share_work("cpu"))
        except OSError as error:
            sys.exit(0 if "What was done before is kept" in str(error) else repr(error))


def started(*given, target=work):
    """An attempt that has begun, in a fork of a process that has everything imported."""
    return fork(target, *given)


def ended(*given) -> int:
    """The exit code of an attempt, of which nothing is left after a minute."""
    process = started(*given)
    process.join(timeout=60)
    process.kill()
    return process.exitcode


@pytest.fixture
def tree(place, composed, tmp_path):
    given = [f"source={place / 'photos'}", f"out={tmp_path / 'data'}", f"autoencoder={place / 'kl'}", "resolution=16"]
    return composed(*given, "workers=0", "shard_size=2", "decode=2", "flip=true", name="prepare_latents")


@pytest.mark.slow
def test_two_processes_make_the_same_dataset(tree, tmp_path):
    """From the command line, against one process; each has one thread."""
    given = ("source", "autoencoder", "resolution", "shard_size", "decode", "flip", "workers")
    options = [f"{key}={tree[key]}" for key in given] + ["out=both"]
    done = run_python(ROOT / "scripts/prepare_latents.py", *options, cwd=tmp_path, processes=2)
    assert done.returncode == 0 and "2 processes on cpu" in done.stdout, done.stdout + done.stderr
    assert ended(tree) == 0
    assert contents(tmp_path / "both") == contents(tmp_path / "data")


@pytest.mark.slow
def test_killed_at_any_point_it_ends_the_same(tree, tmp_path):
    """20 kills at random points of the work, before, between and in its 11 shards and while it is being finished."""
    tree = {**tree, "resolution": 64, "enlarge": True}  # a shard takes some 30 ms
    for out in ("first", "expected"):  # the first start takes longer
        began = time.perf_counter()
        assert ended({**tree, "out": str(tmp_path / out)}) == 0
        took = time.perf_counter() - began
    reference, kills, midway, rng = contents(tmp_path / "expected"), 0, 0, random.Random(0)

    def done() -> int:
        return len(list(tmp_path.glob(".data.unfinished/done/*.json")))

    while kills < 20:
        before, attempt = done(), started(tree)
        if kills % 2:  # anywhere
            attempt.join(timeout=rng.uniform(0, took))
        else:  # soon after another shard
            while done() <= before and attempt.is_alive():
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.03))
        attempt.kill()
        attempt.join()
        kills += attempt.exitcode == -9
        midway += 0 < done() < 11
        if (tmp_path / "data").exists():  # whatever is there under its name is whole
            assert contents(tmp_path / "data") == reference
            shutil.rmtree(tmp_path / "data")
    assert ended(tree) == 0
    assert contents(tmp_path / "data") == reference
    assert midway >= 5, "too few kills fell between the first shard and the last"
    assert names_in(tmp_path) == {"first", "expected", "data"}


@pytest.mark.slow
def test_killed_beside_its_reading_processes_it_can_go_on_at_once(tree, tmp_path):
    """Its children, which outlive it for a second or two, do not hold what it held."""
    tree = {**tree, "workers": 2, "shard_size": 1}
    for ends in (-9, -9, 0):
        attempt = started(tree)
        before = len(list(tmp_path.glob(".data.unfinished/done/*.json")))
        while ends and len(list(tmp_path.glob(".data.unfinished/done/*.json"))) == before and attempt.is_alive():
            time.sleep(0.01)
        if ends:
            attempt.kill()
        attempt.join(timeout=60)
        assert attempt.exitcode == ends
    assert len(LatentDataset(tmp_path / "data", verify="full")) == 21


@pytest.mark.slow
def test_a_reading_process_ends_with_the_one_it_reads_for():
    """Whoever its parent is: here a fork server, as under Python 3.14. Another's end does not matter."""
    whole, other = (started(600, target=time.sleep) for _ in range(2))
    ends, stays = (started(process.pid, target=reading_for) for process in (whole, other))
    whole.kill()
    ends.join(timeout=60)  # it imports this file first
    assert (ends.exitcode, stays.exitcode) == (1, None)
    for process in (other, stays):
        process.kill()


def reading_for(process):
    end_with(process, 0)
    time.sleep(600)


@pytest.mark.slow
def test_reading_processes_need_shared_memory_and_few_descriptors(tree, tmp_path):
    """Without the one the work ends clearly; a batch of 21 pictures takes no more than 40 descriptors for all."""
    few = {**tree, "batch_size": 21, "shard_size": 21, "workers": 1}
    for given, whole in (({**tree, "workers": 2}, 1024), False), ((few, None, 40), True):
        assert ended(*given) == 0 and (tmp_path / "data").exists() == whole


@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_full_disk_stops_the_work_and_it_goes_on(tree, tmp_path, everywhere):
    """At a shard; `everywhere`: at the plan, at a shard, at the report's pictures."""
    pixels = {**tree, "autoencoder": "none", "flip": False, "resolution": 8, "decode": 21}

    def attempt(out, limit=None):
        assert ended({**pixels, "out": str(tmp_path / out)}, limit) == 0

    attempt("expected")
    sizes = {name: len(content) for name, content in contents(tmp_path / "expected").items()}
    report = sizes["report.png"] - 1
    assert 600 < sizes["shard-00000.npy"] < sizes["index.json"] < report
    for limit in (100, 600, report) if everywhere else (600,):
        attempt("data", limit)
        assert not (tmp_path / "data").exists()
        data = tmp_path / ".data.unfinished/data"
        assert not list(data.glob(".*")) and (data / "index.json").exists() == (limit == report)
    attempt("data")
    assert contents(tmp_path / "data") == contents(tmp_path / "expected")


def test_too_small_a_disk_and_another_launch_are_seen_before_the_work(prepare, monkeypatch, tmp_path, moments):
    with monkeypatch.context() as patch:
        patch.setattr("tread.runtime.files.free_bytes", lambda folder: 10_000)
        with pytest.raises(OSError, match=r"has 10 kB free, but [\d.]+ kB are needed"):
            prepare(*PIXELS)
    shutil.rmtree(tmp_path / ".data.unfinished")
    writer = DatasetWriter(tmp_path / "data", moments[0].latents, {})
    writer.begin()
    with pytest.raises(FileExistsError, match="another process is writing"):
        prepare(*PIXELS)
    writer.discard()
    prepare(*PIXELS)


def test_unfinished_work_of_another_kind_is_not_continued(place, prepare, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(encode_photos, "finish", raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare()
    before = times((tmp_path / ".data.unfinished").rglob("*.*"))
    (tmp_path / "photos/bee").mkdir(parents=True)
    shutil.copytree(place / "photos/ant", tmp_path / "photos/bee/one")
    kind = "(?s)unfinished work of another kind.*"
    conftest.assert_refused(
        prepare,
        ("resolution=24", f"{kind}resolution: 16 there, 24 here"),
        (f"autoencoder={place / 'other'}", f"{kind}autoencoder: .*kl there, .*other here.*fingerprint"),
        ("flip=true", f"{kind}views: 1 there, 2 here"),
        (f"source={tmp_path / 'photos'}", "root=bee", f"{kind}pictures"),
        error=ValueError,
    )
    assert before == times(before)
    assert "0 of 6 shards" in prepare()


# ------------------------------------------------------------------------------------------- faults


@pytest.fixture
def photos(place, tmp_path):
    return shutil.copytree(place / "photos", tmp_path / "photos")


DAMAGE = {
    "bee/2.png": (lambda path: path.write_text("words"), "it is no JPEG, PNG or WebP"),
    "cow/3.png": (lambda path: path.write_bytes(path.read_bytes()[:100]), "it is damaged|.*truncated|.*broken"),
    "cow/8.png": (lambda path: (path.unlink(), path.symlink_to("nowhere")), ".*No such file"),
}


def test_damaged_pictures_stop_or_are_left_out(photos, prepare, tmp_path):
    for name, (act, _) in DAMAGE.items():
        act(photos / name)
    shown = [rf"{name} can't be read as a picture \(({why})" for name, (_, why) in DAMAGE.items()]
    with pytest.raises(ValueError, match=rf"(?s)damaged pictures, 3 in all.*{'.*'.join(shown)}.*on_error=skip"):
        prepare(f"source={photos}")
    assert not list(tmp_path.glob(".data*"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tread.preparing.photos.LOOKED", 20)  # so that all are found by the work
        with pytest.raises(ValueError, match=rf"(?s)damaged pictures, 3 in all.*{'.*'.join(shown)}.*on_error=skip"):
            prepare(f"source={photos}")
    assert not (tmp_path / "data").exists()
    text = prepare(f"source={photos}", "on_error=skip", "decode=21")
    data = LatentDataset(tmp_path / "data")
    made = read_json(tmp_path / "data/report.json")
    assert [name for name, _ in made["left_out"]] == [*DAMAGE] and "bee/2.png" in text
    assert data.labels.tolist() == [0] * 7 + [1] * 4 + [2] * 7
    for name in DAMAGE:
        (photos / name).unlink()
    with pytest.raises(FileExistsError, match="(?s)made with on_error=skip, which left out 3 files;.*pictures: "):
        prepare(f"source={photos}")
    prepare(f"source={photos}", f"out={tmp_path / 'without'}", "decode=21")
    expected = LatentDataset(tmp_path / "without")
    assert torch.allclose(data.read(np.arange(18)).stored, expected.read(np.arange(18)).stored, rtol=2e-3, atol=2e-3)
    assert np.allclose(made["psnr"], read_json(tmp_path / "without/report.json")["psnr"], rtol=1e-2)


def test_all_that_can_be_seen_of_a_source_is_refused_at_once(photos, prepare, tmp_path):
    """Strays, formats that are not read, empty files, an empty class, and what only decoding shows."""
    (photos / "ant/notes.txt").write_text("words")
    for stray in ("stray.png", "cow/old/1.png"):  # beside and below the class folders
        (photos / stray).parent.mkdir(exist_ok=True)
        shutil.copy(photos / "ant/0.png", photos / stray)
    Image.new("RGB", (40, 40)).save(photos / "ant/a.gif")
    shutil.copy(photos / "ant/a.gif", photos / "bee/2.png")
    (photos / "cow/8.png").write_bytes(b"")
    (photos / "cow/3.png").write_bytes((photos / "cow/3.png").read_bytes()[:100])
    (photos / "dog").mkdir()
    with pytest.raises(ValueError, match="(?s)classes without a picture: dog") as refused:
        prepare(f"source={photos}")
    for shown in (
        "files that can't be used, 4 in all",
        "ant/a.gif: it must be converted",
        "ant/notes.txt: its name is not a picture's",
        "cow/old/1.png: it lies deeper than <class>/<picture>",
        "stray.png: it is in no class folder",
        "damaged pictures, 3 in all",
        "cow/3.png can't be read as a picture (",
        "bee/2.png can't be read as a picture (it is a GIF",
        "cow/8.png can't be read as a picture (it is empty)",
    ):
        assert shown in str(refused.value)
    assert not list(tmp_path.glob(".data*"))
    prepare(f"source={photos}", "on_error=skip", "allow_empty=true", *PIXELS)
    left_out = [name for name, _ in read_json(tmp_path / "data/report.json")["left_out"]]
    strays = ["ant/a.gif", "ant/notes.txt", "cow/old/1.png", "stray.png"]
    assert left_out == [*strays, "bee/2.png", "cow/3.png", "cow/8.png"]


def test_all_damaged_pictures_are_named_and_without_them_the_work_goes_on(photos, prepare, tmp_path):
    """In one go, whole shards staying; it ends with what on_error=skip would have made."""
    given = [f"source={photos}", *PIXELS, "shard_size=3", "heldout=6"]
    damaged = ["ant/0.png", "bee/2.png", "cow/7.png", "cow/8.png"]
    for name in damaged:
        (photos / name).write_bytes((photos / name).read_bytes()[:100])
    prepare(*given, "on_error=skip", f"out={tmp_path / 'expected'}")
    with pytest.raises(ValueError, match="(?s)damaged pictures, 4 in all.*" + ".*".join(damaged)):
        prepare(*given)
    done = times(path for path in tmp_path.glob(".data*/done/*") if '"damaged": []' in path.read_text())
    assert len(done) >= 3
    for name in damaged[:2]:
        (photos / name).unlink()
    (photos / damaged[2]).write_bytes((photos / "ant/1.png").read_bytes()[:99])  # damaged in another way
    with pytest.raises(ValueError, match="(?s)^(?!.*ant/0).*pictures, 2 in all.*cow/7.png.*cow/8.png"):
        prepare(*given)
    for name in damaged[2:]:
        (photos / name).unlink()
    assert done == times(done)
    prepare(*given)
    for part in ("", "-heldout"):
        assert shard_files(tmp_path / f"data{part}") == shard_files(tmp_path / f"expected{part}")
    assert "is finished" in prepare(*given) and not list(tmp_path.glob(".*"))


def test_a_replaced_picture_is_taken_and_where_nothing_is_whole_the_work_begins_anew(photos, prepare, tmp_path):
    given = [f"source={photos}", *PIXELS]
    (photos / "bee/2.png").write_bytes((photos / "bee/2.png").read_bytes()[:100])
    with pytest.raises(ValueError, match="(?s)1 in all.*bee/2.png"):
        prepare(*given, "shard_size=100")
    (photos / "bee/2.png").unlink()
    (photos / "bee/3.png").unlink()  # which was none of the damaged
    assert "19 in 3 classes" in prepare(*given, "shard_size=50")
    shutil.rmtree(tmp_path / "data")
    (photos / "bee/1.png").write_bytes((photos / "bee/1.png").read_bytes()[:100])
    with pytest.raises(ValueError, match="(?s)1 in all.*bee/1.png"):
        prepare(*given)
    shutil.copy(photos / "ant/1.png", photos / "bee/1.png")
    prepare(*given)
    assert len(LatentDataset(tmp_path / "data")) == 19 and not list(tmp_path.glob(".*"))


def test_many_damaged_files_are_counted(photos, prepare):
    for number in range(30):
        (photos / f"ant/x{number}.png").write_text("words")
        (photos / f"ant/y{number}.txt").write_text("words")
    shown = "can't be used, 30 in all.*ant/y0.txt.*and 10 more.*damaged pictures, 30 in all.*ant/x0.png.*and 10 more"
    with pytest.raises(ValueError, match=f"(?s){shown}.*on_error=skip"):
        prepare(f"source={photos}")


def test_a_class_whose_pictures_are_all_damaged_is_named(photos, prepare, tmp_path):
    for path in (photos / "bee").iterdir():
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="no picture of bee could be read"):
        prepare(f"source={photos}", "on_error=skip")
    assert not (tmp_path / "data").exists()
    prepare(f"source={photos}", "on_error=skip", "allow_empty=true")
    assert LatentDataset(tmp_path / "data").labels.tolist() == [0] * 7 + [2] * 9
    with pytest.raises(ValueError, match="no picture of bee could be read"):
        prepare(f"source={photos}", "on_error=skip", f"out={tmp_path / 'other'}")
    shutil.copy(photos / "ant/1.png", photos / "bee/1.png")  # one that is repaired is taken, without more to do
    prepare(f"source={photos}", "on_error=skip", f"out={tmp_path / 'other'}")
    assert LatentDataset(tmp_path / "other").labels.tolist() == [0] * 7 + [1] + [2] * 9


WRONG = {
    "resolution=17": "resolution 17 comes back as 16",
    "resolution=64": r"smaller \(3\d pixels.*enlarge=true",
    "autoencoder=nowhere": "'.*nowhere' could not be loaded",
    "autoencoder=unet": "it is a UNet2DModel",
    "autoencoder=labels.txt": "labels.txt' could not be loaded",
    "store=moment": "store is 'moment'",
    "batch_size=-1": "batch_size is -1",
    "out=..": "must be the name of a new folder",
    "heldout=19": "heldout takes 19 pictures, but 18 can be",
    "heldout=1.5": "heldout.*between 0 and 1",
}


def test_what_can_not_be_is_refused_before_the_work(place, prepare, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    shape = {"block_out_channels": (8,), "norm_num_groups": 4, "down_block_types": ("DownBlock2D",)}
    diffusers.UNet2DModel(**shape, up_block_types=("UpBlock2D",)).save_pretrained(tmp_path / "unet")
    (tmp_path / "labels.txt").write_text("words")
    monkeypatch.chdir(tmp_path)
    for given, shown in WRONG.items():
        with pytest.raises(ValueError, match=f"(?s){shown}"):
            prepare(given)
    for out in (place / "photos/latents", place / "photos"):
        with pytest.raises(ValueError, match="lies inside source"):
            prepare(f"out={out}")
    (tmp_path / "data-heldout").mkdir()
    with pytest.raises(FileExistsError, match="data-heldout exists already"):
        prepare(*PIXELS, "heldout=3")
    for device in ("tpu", "meta:x"):
        with pytest.raises(ValueError, match=f"device '{device}' can't be used"):
            share_work(device)
    assert names_in(tmp_path) == {"unet", "labels.txt", "data-heldout"}


def test_each_process_of_a_launch_has_the_gpu_of_its_number(monkeypatch):
    """Also where cuda is asked for. The number is one that no machine has."""
    share_work("cpu")
    monkeypatch.setitem(PartialState._shared_state, "local_process_index", 99)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for device in (None, "cuda"):
        with pytest.raises(ValueError, match="device 'cuda:99' can't be used"):
            share_work(device)


def test_the_main_process_alone_lists_the_photos(tree, monkeypatch):
    """The others take its list, in which a picture that arrives meanwhile shifts no rows."""
    monkeypatch.setattr(encode_photos, "find_photos", raising(AssertionError))
    with pytest.raises(StopIteration):
        options = schema.read(tree, encode_photos.PhotoOptions)
        encode_photos.prepare_latents(options, SimpleNamespace(from_main=raising(StopIteration)))


# ------------------------------------------------------------------------------------- autoencoders


def test_weight_files_of_every_kind_give_the_same_autoencoder(tmp_path, monkeypatch):
    """A folder and files in diffusers' names (LDM's: test_ldm_names.py); SD's size is cut down."""
    small = {"block_out_channels": [32, 32, 32, 32], "layers_per_block": 1}
    monkeypatch.setattr(autoencoder, "SD_CONFIG", autoencoder.SD_CONFIG | small)
    model = diffusers.AutoencoderKL.from_config(autoencoder.SD_CONFIG)
    model.save_pretrained(tmp_path / "folder")
    save_file(model.state_dict(), tmp_path / "file.safetensors")
    torch.save(model.state_dict(), tmp_path / "file.pt")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("folder", "file.safetensors", "file.pt"):
        loaded = autoencoder.load_autoencoder(str(tmp_path / name))
        assert autoencoder.fingerprint(loaded) == autoencoder.fingerprint(model)


@pytest.mark.slow
def test_the_real_taesd_gives_photos_back(asset):
    name, tar = str(asset("weights/taesd.fp8.safetensors")), asset("data/imagenet1000_adm256.tar")
    photos, model = Tar(tar), autoencoder.load_autoencoder(name)
    latents = autoencoder.encoded(model, name, 256, ("any",), "auto", dtype="float16", views=1)
    assert (latents.shape, latents.content, latents.scale) == ((4, 32, 32), "latents", 1.0)
    names = sorted(name for name in photos.names if name.endswith(".jpg"))
    chosen = [read_rgb(photos.read(names[index])) for index in (0, 300)]
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in chosen])).permute(0, 3, 1, 2)
    stored = torch.from_numpy(autoencoder.encoder(model, latents)(pixels)[:, 0].astype(np.float16))
    back = autoencoder.load_decoder(latents)(to_network(stored, latents))
    errors = ((back.double() - pixels.double()) ** 2).mean(dim=(1, 2, 3))
    assert 18 < (10 * torch.log10(255**2 / errors)).mean() < 28  # 22.5 dB in the mean over all thousand


@pytest.mark.slow
def test_a_hub_id_is_taken_from_the_cache_and_without_it_the_hub_is_asked_once(place, monkeypatch, tmp_path, caplog):
    """The cache as huggingface_hub lays it out; a hub that keeps silent, as where a network lets nothing out."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--some--kl"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("a" * 40)
    shutil.copytree(place / "kl", repository / "snapshots" / ("a" * 40))
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr("tread.runtime.hub.check_answer.__defaults__", (0.2,))
        expected = autoencoder.fingerprint(autoencoder.load_autoencoder(str(place / "kl")))
        assert autoencoder.fingerprint(autoencoder.load_autoencoder("some/kl")) == expected
        (repository / "snapshots" / ("a" * 40) / "diffusion_pytorch_model.safetensors").unlink()
        for name in ("some/kl", "some/other"):
            with pytest.raises(ValueError, match=f"(?s)'{name}' could not be.*can't be reached: (no answer|timed out)"):
                autoencoder.load_autoencoder(name)
    for path in ("some/kl.safetensors", "/some/kl", "no/such/folder"):
        with pytest.raises(ValueError, match="there is no such file or folder"):
            autoencoder.load_autoencoder(path)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_another_autoencoder_than_the_latents_own_is_refused(place, prepare, tmp_path):
    moved = shutil.copytree(place / "kl", tmp_path / "vae")
    prepare(f"autoencoder={moved}")
    latents = LatentDataset(tmp_path / "data").latents
    shutil.rmtree(moved)
    with pytest.raises(ValueError, match="(?s)could not be loaded.*autoencoder="):
        autoencoder.load_decoder(latents)
    shutil.copytree(place / "other", moved)
    with pytest.raises(ValueError, match="another autoencoder than the one that made the latents"):
        autoencoder.load_decoder(latents)
    x = torch.zeros(1, 4, 8, 8)
    own, other = (autoencoder.load_decoder(latents, autoencoder=str(place / name)) for name in ("kl", "other"))
    assert not torch.equal(own(x), other(x))


# -------------------------------------------------------------------------------------- without one


def test_pixels_of_large_pictures_are_refused_and_many_tokens_named(prepare):
    with pytest.raises(ValueError, match="resolution is 1025.*at most 1024.*autoencoder"):
        prepare("autoencoder=none", "resolution=1025", "enlarge=true")
    with pytest.raises(ValueError, match="store=moments needs an AutoencoderKL"):
        prepare("autoencoder=none", "store=moments")
    text = prepare("autoencoder=none", "resolution=48", "enlarge=true")
    assert "pixels in −1..1" in text and "PSNR" not in text
    assert "note      576 tokens a picture with model.patch_size=2, 256 with patch_size=3" in text
    assert "21 pictures were smaller than the resolution" in text


# ------------------------------------------------------------------------------------ held-out data


def test_held_out_pictures_are_a_dataset_of_their_own(place, prepare, tmp_path):
    """Against the datasets made of all pictures, and against held_out for which ones they are."""
    prepare(*PIXELS, f"out={tmp_path / 'all'}")
    assert "held out  4 of them" in prepare(*PIXELS, "heldout=0.2")
    assert names_in(tmp_path) == {"all", "data", "data-heldout"}
    photos, whole = find_photos(place / "photos"), LatentDataset(tmp_path / "all")
    mask = held_out(photos.names, photos.labels, 3, 0.2)
    assert mask.sum() == 4
    for name, chosen in (("data", ~mask), ("data-heldout", mask)):
        data, expected = LatentDataset(tmp_path / name, verify="full"), whole.read(np.flatnonzero(chosen))
        assert torch.equal(data.read(np.arange(len(data))).stored, expected.stored)
        assert data.labels.tolist() == expected.labels.tolist() and data.latents == whole.latents
    assert read_index(tmp_path / "data")["heldout"] == "../data-heldout"
    assert read_index(tmp_path / "data-heldout")["train"] == "../data"
    finished = [f"{tmp_path / 'data'}{part} {FINISHED}" for part in ("", "-heldout")]
    assert prepare(*PIXELS, "heldout=0.2") == "".join(finished)


@pytest.mark.slow
def test_pixels_are_trained_on_sampled_and_scored_with_the_held_out_pictures(
    place, prepare, tmp_path, composed, monkeypatch, inception_file
):
    """The whole way at 16 px; scores are against the photos' own crops. Training finds the held-out pictures unless
    another is named, or none; a folder that was moved alone is asked for."""
    prepare(*PIXELS, "heldout=3")
    monkeypatch.chdir(tmp_path)

    def heldout(*given: str) -> str | None:
        return settings.complete(composed("dataset=folder", *given))[1]["dataset"]["heldout"]

    assert heldout("dataset.path=data") == "data-heldout"
    assert heldout("dataset.path=data", "dataset.heldout=null") is None
    assert heldout("dataset.path=data", "dataset.heldout=x") == "x"
    assert heldout("dataset.path=data-heldout") is None
    small = ["dataset=folder", "dataset.path=data", "eval.points=16", "model.patch_size=4", "name=run"]
    assert "18 samples of (3, 16, 16)" in launch(tmp_path, *small)
    grid = np.asarray(Image.open(tmp_path / "results/run/samples/step_0000006.png"))
    assert grid.ndim == 3 and grid.shape[2] == 3
    assert logged(tmp_path / "results/run", "eval_loss", "step") == [3, 6]
    given = [f"inception={inception_file}", f"reference={place / 'photos'}", "crop=16", "num_samples=8", "steps=2"]
    assert "KID" in score(tmp_path, "checkpoint=results/run", *given)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere/data")
    for name in ("data", "data-heldout"):
        (tmp_path / name).rename(tmp_path / "elsewhere" / name)
    assert os.path.samefile(heldout("dataset.path=link"), tmp_path / "elsewhere/data-heldout")
    shutil.rmtree(tmp_path / "elsewhere/data-heldout")
    with pytest.raises(FileNotFoundError, match="data-heldout, which is not there.*dataset.heldout=null"):
        heldout("dataset.path=link")


@pytest.mark.parametrize("ends", ["a shard", "heldout", "train"])
def test_both_datasets_are_whole_or_not_there(prepare, tmp_path, monkeypatch, ends):
    """Stopped while a shard is written, or just before a dataset gets its name; then the other, removed."""
    prepare(*PIXELS, "heldout=5", f"out={tmp_path / 'expected'}")
    expected = {part: shard_files(tmp_path / f"expected{part}") for part in ("", "-heldout")}

    stop = raising(KeyboardInterrupt)

    def stop_at(self, *args, publish=DatasetWriter.publish):
        (stop if self.folder.name.endswith("heldout") == (ends == "heldout") else publish)(self, *args)

    def stop_late(self, number, *args, write=DatasetWriter.write, **kwargs):
        (stop if number == 2 else write)(self, number, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(DatasetWriter, *(("write", stop_late) if ends == "a shard" else ("publish", stop_at)))
        with pytest.raises(KeyboardInterrupt):
            prepare(*PIXELS, "heldout=5")
    there = {path.name for path in tmp_path.glob("data*")}
    assert there == ({"data-heldout"} if ends == "train" else set())
    assert ("data-heldout is finished" in prepare(*PIXELS, "heldout=5")) == (ends == "train")
    for part, content in expected.items():
        assert shard_files(tmp_path / f"data{part}") == content
    shutil.rmtree(tmp_path / "data-heldout")
    assert f"{tmp_path / 'data'} is finished" in prepare(*PIXELS, "heldout=5")
    assert shard_files(tmp_path / "data-heldout") == expected["-heldout"]
    assert not list(tmp_path.glob(".*"))
