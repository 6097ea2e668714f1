"""Features beside the latents, against the encoder run by hand on each picture, and the same work done in one go.

The encoders are real loading code: a tiny random DINOv2 on disk, and a function of a module; the photos' crops are
Pillow's own, of photos that have the resolution already.
"""

import json
import shutil
from functools import partial
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
from conftest import CPU, ROOT, TINY_KL, contents, read_json, write_json
from forked import run_python
from PIL import Image
from torch.testing import assert_close

from tread.data import section_writer, store
from tread.data.columns import check_grid, latents_hash
from tread.data.dataset import LatentDataset
from tread.data.index import read_index
from tread.data.latents import LatentSpec
from tread.data.loader import Loader
from tread.data.writer import write_dataset
from tread.encoders.vision import open_encoder
from tread.preparing import digits, encode_features
from tread.runtime.files import sha256
from tread.training import periodic

COUNT, SIZE = 13, 32
FUNCTION = "own_patches:patches"


def crops() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (COUNT, SIZE, SIZE, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Photos of 32×32 in two classes, a tiny AutoencoderKL, a module with an encoder."""
    folder = tmp_path_factory.mktemp("place")
    for number, pixels in enumerate(crops()):
        file = folder / "photos" / ("ant" if number < 6 else "bee") / f"{number:02d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)
    torch.manual_seed(0)
    diffusers.AutoencoderKL(**TINY_KL).save_pretrained(folder / "kl")
    (folder / "own_patches.py").write_text(
        "def patches(pictures):\n"
        '    """Each patch of 4×4 as it is, /100: (B, T, 48)"""\n'
        "    return (pictures.float() / 100).unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(1, 2)"
        ".flatten(2)\n"
        "def large(pictures):\n    return patches(pictures) * 1e6\n"
        "def other(pictures):\n    return 1 - patches(pictures)\n"
    )
    return folder


@pytest.fixture(autouse=True)
def own_module(place, monkeypatch):
    monkeypatch.syspath_prepend(str(place))


@pytest.fixture
def prepare_latents(prepare_photos, place, tmp_path):
    given = [f"source={place / 'photos'}", f"out={tmp_path / 'data'}", f"autoencoder={place / 'kl'}"]
    given += [f"resolution={SIZE}", "workers=0", "shard_size=4", "decode=0", "flip=true", "keep_pictures=true"]
    return partial(prepare_photos, *given)


@pytest.fixture
def features(run_pipeline, tmp_path):
    given = [f"dataset.path={tmp_path / 'data'}", f"encoder={FUNCTION}", "workers=0", "batch_size=3"]
    pipeline = (encode_features.prepare_features, encode_features.FeatureOptions, "prepare_features")
    return partial(run_pipeline, *pipeline, *given)


@pytest.fixture
def foreign(tmp_path):
    """A function that writes a dataset of random latents, in two views, which keeps no pictures."""

    def write(folder=tmp_path / "data", autoencoder: str = "vae", channels: int = 4):
        latents = LatentSpec((channels, 8, 8), ("a", "b"), autoencoder, scale_applied=True, views=2)
        rng = np.random.default_rng(0)
        shards = [(rng.uniform(-1, 1, (n, *latents.stored_shape)), rng.integers(0, 2, n)) for n in (5, 4)]
        write_dataset(folder, latents, shards)
        return folder

    return write


def both_views() -> torch.Tensor:
    """(views, n, 3, H, W) of all photos."""
    pictures = torch.from_numpy(crops()).permute(0, 3, 1, 2)
    return torch.stack([pictures, pictures.flip(-1)])


# ------------------------------------------------------------------------------------------ pictures


def test_pictures_are_kept_beside_the_latents_and_mirrored_when_read(prepare_latents, tmp_path):
    """All else is as without them."""
    text = prepare_latents()
    assert f"keeps     the pictures too, (3, 32, 32) uint8, {COUNT * 3 * 32 * 32 / 1000:.1f} kB" in text
    data = LatentDataset(tmp_path / "data", verify="full", pictures=True)
    views = np.arange(COUNT) % 2
    found = data.read(np.arange(COUNT)[::-1].copy(), views).pictures
    assert torch.equal(found, both_views()[views, np.arange(COUNT)[::-1].copy()])
    assert data.picture_size == SIZE and data.read(np.arange(3)).features is None
    assert LatentDataset(tmp_path / "data").read(np.arange(3)).pictures is None
    assert "keeps" not in prepare_latents("keep_pictures=false", f"out={tmp_path / 'plain'}")
    kept, plain = contents(tmp_path / "data"), contents(tmp_path / "plain")
    assert set(kept) - set(plain) == {f"pictures-0000{n}.npy" for n in range(4)}
    assert all(kept[name] == plain[name] for name in plain if name.endswith(".npy"))
    index, expected = json.loads(kept["index.json"]), json.loads(plain["index.json"])
    assert index.pop("pictures") == [3, 32, 32] and expected.keys() == index.keys()
    assert {shard.pop("pictures") for shard in index["shards"]} == set(kept) - set(plain)
    assert all(shard.pop("pictures_sha256") for shard in index["shards"]) and index == expected
    assert "keep_pictures" not in json.loads(plain["report.json"])["plan"]


def test_pixels_are_pictures_already(prepare_latents, tmp_path):
    """Both views of a dataset of pixels, and the digits' grey ones, against what was stored and Pillow's crops."""
    with pytest.raises(ValueError, match="keep_pictures=true would keep what autoencoder=none stores already"):
        prepare_latents("autoencoder=none")
    with pytest.raises(ValueError, match="precision=bf16 is of the autoencoder, but autoencoder=none has none"):
        prepare_latents("autoencoder=none", "keep_pictures=false", "precision=bf16")
    prepare_latents("autoencoder=none", "keep_pictures=false")
    data = LatentDataset(tmp_path / "data", pictures=True)
    for view in (0, 1):
        assert torch.equal(data.read(np.arange(COUNT), view).pictures, both_views()[view])
    data.normalize(0.5)
    assert torch.equal(data.read(np.arange(COUNT)).pictures, both_views()[0])
    digits.prepare_digits(tmp_path / "digits", "train")
    found = LatentDataset(tmp_path / "digits", pictures=True).read(np.arange(9)).pictures
    expected = np.round(digits.digits_parts()["train"][0][:9] * 255 / 16).reshape(9, 1, 8, 8)
    assert found.shape == (9, 3, 8, 8) and np.array_equal(found.numpy(), np.repeat(expected, 3, axis=1))


def test_a_dataset_without_pictures_or_features_is_refused(foreign, tmp_path):
    for autoencoder, channels in (("vae", 3), ("pixels", 4)):
        folder = foreign(tmp_path / autoencoder, autoencoder, channels)
        with pytest.raises(ValueError, match="keeps no pictures beside its latents: prepare it again"):
            LatentDataset(folder, pictures=True)
    with pytest.raises(ValueError, match="has no features: python scripts/prepare_features.py dataset=.* encoder=x"):
        LatentDataset(folder, features="x")


# ------------------------------------------------------------------------------------------ features


@pytest.mark.parametrize("kind", ["dinov2", "function"])
def test_stored_features_are_what_the_live_encoder_makes(kind, prepare_latents, features, tmp_path, request):
    """To float16's rounding, for both views, read by the loader at the same addresses; also from the photos."""
    name = FUNCTION if kind == "function" else str(request.getfixturevalue("dinov2"))
    prepare_latents()
    text = features(f"encoder={name}")
    encoder = open_encoder(name, CPU)
    tokens, width = (4, 32) if kind == "dinov2" else (64, 48)
    size = encode_features.size_text(COUNT * 2 * (tokens + 1) * width * 2)
    assert f"stores    float16, {size}" in text and f"{encoder.cost(SIZE).flops / 1e9:.3g} G" in text
    data = LatentDataset(tmp_path / "data", verify="full", features=name, pictures=True, class_token=width)
    assert data.class_fingerprint == encoder.fingerprint
    assert (data.feature_spec.grid**2, data.feature_spec.width) == (tokens, width)
    assert data.feature_spec.fingerprint == encoder.fingerprint
    loader, seen = Loader(data, 0, 12, [slice(0, 5), slice(5, 12)], CPU, ahead=2, steps=4), set()
    for step in range(4):
        views = data._chosen(0, step, 12, slice(None))[1]
        batches = loader.batches(step)
        assert [len(batch.indices) for batch in batches] == [5, 7]
        expected = encoder.encode(both_views()[views, np.concatenate([batch.indices for batch in batches])])
        stored, live = (torch.cat(parts) for parts in zip(*((b.features, encoder.encode(b.pictures)) for b in batches)))
        assert stored.dtype == torch.float16
        assert_close(live, expected, rtol=1e-5, atol=1e-5)
        assert_close(stored.float(), live, rtol=2**-11, atol=1e-5)
        whole = torch.cat([encoder.encode_both(batch.pictures)[1] for batch in batches])
        assert_close(torch.cat([batch.class_token for batch in batches]).float(), whole, rtol=2**-11, atol=1e-5)
        seen |= set(views.tolist())
    loader.close()
    assert seen == {0, 1}


def test_photos_give_the_features_of_kept_pictures(place, prepare_latents, features, tmp_path):
    """In both parts, one picture being damaged, and with workers that read."""
    shutil.copytree(place / "photos", tmp_path / "photos")
    (tmp_path / "photos/bee/08.png").write_bytes(b"none")
    source, parts = f"source={tmp_path / 'photos'}", ("data", "data-heldout")
    assert "keeps     the pictures too, (3, 32, 32) uint8" in prepare_latents("heldout=4", source, "on_error=skip")
    for part in parts:
        features(f"dataset.path={tmp_path / part}")
        kept = contents(tmp_path / part)
        shutil.copytree(tmp_path / part, tmp_path / f"{part}-photos")
        index = read_index(tmp_path / part)
        del index["features"]
        write_json(tmp_path / f"{part}-photos/index.json", index)
        features(f"dataset.path={tmp_path / part}-photos", source, "workers=1")
        assert contents(tmp_path / f"{part}-photos") == kept
    assert sum(len(LatentDataset(tmp_path / part, features=FUNCTION)) for part in parts) == COUNT - 1


def test_other_photos_are_refused(place, prepare_latents, features, foreign, tmp_path):
    prepare_latents("keep_pictures=false")
    with pytest.raises(ValueError, match="keeps no pictures beside its latents: name the photos .*source="):
        features()
    shutil.copytree(place / "photos", tmp_path / "photos")
    (tmp_path / "photos/ant/new.png").write_bytes((tmp_path / "photos/ant/01.png").read_bytes())
    with pytest.raises(ValueError, match=r"photos holds other pictures than .*data was made of \(14, by names"):
        features(f"source={tmp_path / 'photos'}")
    (tmp_path / "photos/ant/new.png").unlink()
    (tmp_path / "photos/ant/01.png").write_bytes(b"none")
    with pytest.raises(ValueError, match="ant/01.png can't be read as a picture"):
        features(f"source={tmp_path / 'photos'}")
    report = tmp_path / "data/report.json"
    write_json(report, {**read_json(report), "left_out": [["ant/02.png", "why"]]})
    with pytest.raises(ValueError, match="has 12 pictures where .* has 13 samples"):
        features(f"source={tmp_path / 'photos'}")
    foreign(tmp_path / "imported")
    with pytest.raises(ValueError, match="imported does not say which photos it was made of"):
        features(f"source={tmp_path / 'photos'}", f"dataset.path={tmp_path / 'imported'}")
    with pytest.raises(FileNotFoundError, match="no dataset at digits: it has no index.json"):
        features("dataset.path=digits")


def test_features_that_were_stopped_are_gone_on_with(prepare_latents, features, tmp_path, monkeypatch):
    """Until all are there the dataset is as it was; in the end the bytes are those of one go. Also if it was killed
    between the shards' last move and index.json."""
    prepare_latents()
    before, folder = contents(tmp_path / "data"), tmp_path / "data"
    shutil.copytree(folder, tmp_path / "whole")
    features(f"dataset.path={tmp_path / 'whole'}")
    whole = contents(tmp_path / "whole")

    write_array = store.write_array

    def stop(file, array):
        if array.shape[0] == 1:
            file.write(b"half")
            raise KeyboardInterrupt
        write_array(file, array)

    monkeypatch.setattr(store, "write_array", stop)
    with pytest.raises(KeyboardInterrupt):
        features()
    assert contents(folder) == before
    with pytest.raises(ValueError, match="(?s)unfinished work .*own_patches:patches there, own_patches:other here"):
        features("encoder=own_patches:other")
    monkeypatch.undo()
    write_json = section_writer.write_json

    def killed(path, tree):
        if path.name == "index.json":
            raise KeyboardInterrupt
        write_json(path, tree)

    monkeypatch.setattr(section_writer, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        features()
    monkeypatch.setattr(section_writer, "write_json", write_json)
    assert "0 of 4 shards" in features()
    assert contents(folder) == whole and not list(folder.glob(".*"))
    assert features() == f"{folder} holds the same features already\n"


def test_other_or_damaged_features_are_replaced_when_that_is_asked_for(prepare_latents, features, tmp_path):
    prepare_latents()
    features("grid=4")
    before = contents(tmp_path / "data")
    for other in ("grid=2", "encoder=own_patches:other"):
        with pytest.raises(ValueError, match="(?s)holds other features: again=true.*(grid: 4 there, 2|:patches there)"):
            features(other)
    assert contents(tmp_path / "data") == before and not (tmp_path / "data/.features.unfinished").exists()
    features("encoder=own_patches:other", "again=true")
    whole = contents(tmp_path / "data")
    spoil(tmp_path / "data", np.nan, 0)
    with pytest.raises(ValueError, match="not finite: replace it by .*again=true"):
        features("encoder=own_patches:other")
    features("encoder=own_patches:other", "again=true")
    assert contents(tmp_path / "data") == whole
    (pooled, *_) = sorted((tmp_path / "data").glob("features-*pooled*"))
    pooled.write_bytes(pooled.read_bytes()[:-2] + b"zz")
    features("encoder=own_patches:other", "again=true")
    assert contents(tmp_path / "data") == whole
    found = LatentDataset(tmp_path / "data", verify="full", features="own_patches:other").read(np.arange(COUNT), 1)
    expected = open_encoder("own_patches:other", CPU).encode(both_views()[1])
    assert_close(found.features.float(), expected, rtol=2**-11, atol=1e-4)
    assert len(list((tmp_path / "data").glob("features-*"))) == 8


def test_features_that_do_not_fit_float16_or_the_disk_are_refused(prepare_latents, features, tmp_path, monkeypatch):
    prepare_latents()
    with pytest.raises(ValueError, match="own_patches:large makes features of some picture that are not finite"):
        features("encoder=own_patches:large")
    with pytest.raises(ValueError, match="grid is 9, but own_patches:patches has 8×8 tokens of pictures of 32×32"):
        features("grid=9")
    monkeypatch.setattr("tread.runtime.files.free_bytes", lambda folder: 1000)
    with pytest.raises(OSError, match="has 1 kB free, but 164 kB are needed"):
        features("again=true")
    assert "features" not in read_index(tmp_path / "data")


def edited(folder, **changes) -> None:
    index = read_index(folder)
    write_json(folder / "index.json", {**index, "features": {**index["features"], **changes}})


def spoil(folder, value: float, row: int) -> None:
    path = folder / "features-00001.npy"
    array = np.load(path)
    array[row, 1, 3, 5] = value
    np.save(path, array)


DAMAGE = {
    "none": (lambda f: f / "", "holds features of own_patches:patches, not of dinov2-b"),
    "of another dataset": (lambda f: edited(f, of="0" * 64), "the features in .* are of another dataset: .*again=true"),
    "infinite": (lambda f: spoil(f, np.inf, 0), "features-00001.npy, row 0, holds numbers that are not finite"),
    "missing": (lambda f: (f / "features-00001.npy").unlink(), "features-00001.npy is missing"),
    "another grid": (lambda f: edited(f, grid=16), r"holds float16 \(5, 2, 64, 48\), but index.json says .*256, 48"),
    "outside": (lambda f: edited(f, shards=[{"file": "../x.npy"}] * 2), "names the file '../x.npy'"),
    "no shards": (lambda f: edited(f, shards=None), "index.json is damaged or of another kind: TypeError"),
}


@pytest.fixture(scope="module")
def with_features(tmp_path_factory):
    """A dataset of 9 pictures' pixels with features by hand, two shards."""
    folder = tmp_path_factory.mktemp("with") / "data"
    latents = LatentSpec((3, 8, 8), ("a", "b"), "pixels", scale_applied=True, views=2)
    rng = np.random.default_rng(0)
    write_dataset(folder, latents, [(rng.uniform(-1, 1, (n, 2, 3, 8, 8)), rng.integers(0, 2, n)) for n in (5, 4)])
    entries = []
    for number, count in enumerate((5, 4)):
        path = folder / f"features-{number:05d}.npy"
        np.save(path, rng.standard_normal((count, 2, 64, 48)).astype(np.float16))
        entries.append({"file": path.name, "sha256": sha256(path)})
    index = read_index(folder)
    section = {"encoder": FUNCTION, "fingerprint": None, "grid": 8, "width": 48, "of": latents_hash(index)}
    write_json(folder / "index.json", {**index, "features": {**section, "shards": entries}})
    return folder


@pytest.mark.parametrize("damage", DAMAGE)
def test_bad_features_are_named_before_training(with_features, tmp_path, damage):
    folder = shutil.copytree(with_features, tmp_path / "data")
    act, shown = DAMAGE[damage]
    act(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=shown):
        LatentDataset(folder, features="dinov2-b" if damage == "none" else FUNCTION)
    LatentDataset(folder)  # whoever does not ask for them does not meet them


def test_a_grid_that_does_not_fit_the_network_is_named():
    with pytest.raises(ValueError, match=r"the stored features have 8×8 tokens, but the network has 16×16.*grid=16"):
        check_grid(8, 16, "the stored features")


def test_full_verification_finds_what_opening_does_not(with_features, tmp_path):
    folder = shutil.copytree(with_features, tmp_path / "data")
    spoil(folder, 1.0, 0)
    LatentDataset(folder, features=FUNCTION)
    with pytest.raises(ValueError, match="features-00001.npy was changed"):
        LatentDataset(folder, verify="full", features=FUNCTION)


@pytest.mark.parametrize("placement", ["mmap", "ram"])
def test_every_placement_reads_the_same_features(with_features, placement):
    """Against the files, read whole; they stay memory-mapped, and are announced to the operating system."""
    data = LatentDataset(with_features, placement=placement, features=FUNCTION, pictures=True)
    stored = np.concatenate([np.load(with_features / f"features-0000{n}.npy") for n in (0, 1)])
    batch = data.batch(3, 1, 6, slice(1, 5), expect=True)
    views = data._chosen(3, 1, 6, slice(1, 5))[1]
    assert np.array_equal(batch.features.numpy(), stored[batch.indices, views])
    assert batch.pictures.shape == (4, 3, 8, 8) and batch.features.device == CPU
    again, same = data.__reduce__(), data.read(np.arange(2), 1)
    assert torch.equal(again[0](*again[1]).read(np.arange(2), 1).features, same.features)


def test_bad_steps_name_samples_with_bad_features(with_features, tmp_path):
    """The explanation of a bad step looks at features, too; here they were spoilt after the dataset was opened."""
    folder = shutil.copytree(with_features, tmp_path / "data")
    data = LatentDataset(folder, features=FUNCTION)
    spoil(folder, np.nan, 1)
    run = SimpleNamespace(cfg=SimpleNamespace(seed=0, train=SimpleNamespace(batch_size=9)), data=data)
    views = [int(data._chosen(0, step, 9, slice(None))[1][data.batch(0, step, 9).indices == 6][0]) for step in range(9)]
    spoilt, seen = periodic.look_at_samples(run, [views.index(1)])
    assert spoilt and "6 (" in seen and "shard-00001.npy, row 1" in seen
    assert not periodic.look_at_samples(run, [views.index(0)])[0]


@pytest.mark.slow
def test_two_processes_make_the_same_features(foreign, tmp_path, features, monkeypatch):
    """As from the command line, by the user's function in the current folder; the bytes are those of one process."""
    (tmp_path / "mine.py").write_text("def encode(pictures):\n    return pictures.float().flatten(2).mT\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = foreign(autoencoder="pixels", channels=1)
    shutil.copytree(folder, tmp_path / "alone")
    features(f"dataset.path={tmp_path / 'alone'}", "encoder=mine:encode", "grid=4")
    words = ["dataset=data", "encoder=mine:encode", "grid=4", "device=cpu", "batch_size=3"]
    done = run_python(ROOT / "scripts/prepare_features.py", *words, cwd=tmp_path, processes=2)
    assert "9 samples, both views" in done.stdout and "4×4 tokens of 3" in done.stdout, done.stdout + done.stderr
    assert contents(folder) == contents(tmp_path / "alone")
    data = LatentDataset(folder, verify="full", features="mine:encode", pictures=True)
    batch = data.read(np.arange(9), np.arange(9) % 2)
    expected = batch.pictures.float().unfold(2, 2, 2).unfold(3, 2, 2).mean(dim=(4, 5)).flatten(2).mT
    assert_close(batch.features.float(), expected, rtol=2**-11, atol=1e-3)
