"""CIFAR-10's archive in its official layout, against bytes written here by the layout's description; what may be wrong
with it; its fetching, from a server that breaks off; and the flips. Reference of a flip: numpy's."""

import hashlib
import http.server
import io
import tarfile
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tread.data.dataset import LatentDataset
from tread.data.latents import LatentSpec, to_network
from tread.data.writer import write_dataset
from tread.encoders.autoencoder import load_decoder
from tread.preparing import cifar10
from tread.preparing.cifar10 import TEST, TRAIN, prepare_cifar10
from tread.runtime import files as our_files
from tread.training.start import data_warnings, open_datasets

FILES = cifar10.standin()


def write_archive(path: Path, files: dict[str, bytes] = FILES) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in sorted(files.items(), reverse=True):
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def write_folder(path: Path, files: dict[str, bytes] = FILES) -> Path:
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


def test_archive_folder_and_nested_folder_give_the_bytes_they_hold(tmp_path):
    frog = bytes([6] + [59] * 1024 + [43] * 1024 + [50] * 1023 + [49])
    files = FILES | {TRAIN[0]: frog + FILES[TRAIN[0]][len(frog) :]}
    write_folder(tmp_path / "nested/cifar-10-batches-bin", files)
    sources = (write_archive(tmp_path / "a.tar.gz", files), write_folder(tmp_path / "flat", files), tmp_path / "nested")
    for number, source in enumerate(sources):
        folder = tmp_path / f"data/standin-{number}"
        prepare_cifar10(folder, str(source))
        train, test = (LatentDataset(place, "full", pictures=True) for place in (folder, cifar10.heldout_of(folder)))
        assert train.latents == test.latents == cifar10.MEANING and train.latents.classes[6] == "frog"
        for data, names in ((train, TRAIN), (test, [TEST])):
            records = np.frombuffer(b"".join(files[name] for name in names), np.uint8).reshape(-1, 3073)
            batch = data.read(np.arange(len(data)))
            assert np.array_equal(batch.labels, records[:, 0])
            assert np.array_equal(batch.stored.flatten(1), records[:, 1:])
            assert np.array_equal(batch.pictures, batch.stored)
            x = to_network(batch.stored, data.latents)
            assert np.array_equal(x.flatten(1), records[:, 1:].astype(np.float32) / np.float32(127.5) - 1)
            assert np.array_equal(load_decoder(data.latents)(x), batch.stored)
            assert np.allclose(data.statistics, [x.mean((0, 2, 3)), x.std((0, 2, 3), correction=0)], atol=1e-5)
        assert train.read(np.array([0])).stored[0, :, 31, 31].tolist() == [59, 43, 49]


def altered(name: str, at: int, value: int) -> dict[str, bytes]:
    content = bytearray(FILES[name])
    content[at] = value
    return FILES | {name: bytes(content)}


DAMAGES = [
    ({name: content for name, content in FILES.items() if name != TRAIN[2]}, "has no data_batch_3.bin, as cifar-10-bi"),
    (FILES | {TRAIN[1]: FILES[TRAIN[1]][:-1]}, "data_batch_2.bin has 61,459 bytes, but must have 61,460; a smaller"),
    (FILES | {TEST: FILES[TEST][:-3073]}, "data_batch_1.bin has 61,460 bytes, but must have 58,387"),
    (FILES | {TEST: b""}, "data_batch_1.bin has 61,460 bytes, but must have 3,073"),
    (altered(TRAIN[4], 3073, 10), "data_batch_5.bin has a label 10, but there are ten classes"),
]


@pytest.mark.parametrize("files, said", DAMAGES)
def test_damage_is_named_and_nothing_is_written(tmp_path, files, said):
    source = write_folder(tmp_path / "source", files)
    with pytest.raises(ValueError, match=said):
        prepare_cifar10(tmp_path / "data/standin", str(source))
    assert [path.name for path in (tmp_path / "data").iterdir()] == [".standin.lock"]


def test_sources_that_are_none_a_full_disk_and_files_of_unofficial_length(tmp_path, monkeypatch):
    whole, data = write_archive(tmp_path / "a.tar.gz"), tmp_path / "data"
    (tmp_path / "cut.tar.gz").write_bytes(whole.read_bytes()[:-5000])
    altered = bytearray(whole.read_bytes())
    altered[-8] ^= 1  # of the checksum, as a bit elsewhere that still unpacks
    (tmp_path / "altered.tar.gz").write_bytes(altered)
    (tmp_path / "page.html").write_text("not found")
    cases = [("cut.tar.gz", ValueError, "truncated, damaged"), ("page.html", ValueError, "or no tar")]
    cases += [("altered.tar.gz", ValueError, "altered.tar.gz is truncated, damaged or no tar: CRC check failed")]
    cases += [("none", FileNotFoundError, "none is not there: dataset.archive names cifar-10-b")]
    for name, error, said in cases:
        with pytest.raises(error, match=said):
            prepare_cifar10(data / "standin", str(tmp_path / name))
    for archive in (str(whole), "standin"):  # where people look for the real ones
        with pytest.raises(ValueError, match="batch_1.bin has 61,460 bytes, but must have 30,730,000; a smaller st"):
            prepare_cifar10(data / "cifar10", archive)
    monkeypatch.setattr(our_files, "free_bytes", lambda folder: 180_000_000)
    with pytest.raises(OSError, match="180 MB free, but 185 MB are needed"):
        prepare_cifar10(data / "standin", "standin")
    assert not [path for path in data.iterdir() if path.suffix != ".lock"]


def test_flips_are_drawn_from_seed_and_step(tmp_path):
    prepare_cifar10(tmp_path / "standin", "standin")
    plain, flipping = (LatentDataset(tmp_path / "standin", flip=flip) for flip in (False, True))
    flipped = 0
    for step in range(8):
        batch, before = flipping.batch(3, step, 50), plain.batch(3, step, 50)
        assert np.array_equal(batch.indices, before.indices)
        mirrored = np.array([not np.array_equal(*pair) for pair in zip(batch.stored, before.stored)])
        assert np.array_equal(batch.stored[mirrored], before.stored[mirrored].numpy()[..., ::-1])
        part = flipping.batch(3, step, 50, rows=slice(10, 20))
        assert np.array_equal(part.stored, batch.stored[10:20])
        flipped += mirrored.sum()
    assert 160 < flipped < 240
    again = LatentDataset(tmp_path / "standin", flip=True, placement="ram").batch(3, 7, 50)
    assert np.array_equal(again.stored, batch.stored)


def test_training_makes_both_parts_and_flips_its_own_alone(tmp_path, read_config):
    words = ["dataset=cifar10", f"dataset.path={tmp_path}/standin", "dataset.archive=standin", "train.batch_size=8"]
    train, heldout = open_datasets(read_config(*words))
    assert (train.flip, len(train), heldout.flip, len(heldout)) == (True, 100, False, 20)
    heldout.folder.rename(tmp_path / "elsewhere")  # half of it is made whole
    before = (train.folder / "index.json").stat()
    prepare_cifar10(train.folder, "standin")
    assert (train.folder / "index.json").stat() == before and len(LatentDataset(heldout.folder, "full")) == 20
    made_of = partial(SimpleNamespace, data=train, heldout=None, aligner=None, earlier=None)
    assert not data_warnings(made_of(cfg=read_config(*words)))
    (said,) = data_warnings(made_of(cfg=read_config(*words, "dataset.archive=a.tar.gz")))
    assert said.endswith("was there already, made of standin: dataset.archive=a.tar.gz was not read")


def test_latents_are_not_flipped_and_not_stored_in_bytes(tmp_path):
    latents = LatentSpec((4, 8, 8), ("a",), "taesd")
    write_dataset(tmp_path / "latents", latents, [(np.zeros((2, *latents.stored_shape)), np.zeros(2, np.int64))])
    with pytest.raises(ValueError, match="dataset.flip mirrors pixels stored in one view, .* holds taesd, 1 views"):
        LatentDataset(tmp_path / "latents", flip=True)
    with pytest.raises(ValueError, match="dtype is uint8, in which only pixels are stored"):
        LatentSpec((4, 8, 8), ("a",), "taesd", dtype="uint8")


class Server(http.server.BaseHTTPRequestHandler):
    """Gives `content` by ranges, and breaks off after the first `most` bytes."""

    content, most, ranges, log_message = b"", 10**9, [], lambda *_: None

    def do_HEAD(self):
        self.send_response(200)
        self.end_headers()

    def do_GET(self):
        first = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        self.ranges.append(first)
        self.send_response(206)
        self.send_header("Content-Length", str(len(self.content) - first))
        self.end_headers()
        self.wfile.write(self.content[first:][: self.most])


@pytest.fixture
def server(tmp_path, monkeypatch):
    Server.content, Server.most, Server.ranges = write_archive(tmp_path / "a.tar.gz").read_bytes(), 10**9, []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as serving:
        threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True).start()
        address = f"http://127.0.0.1:{serving.server_port}/cifar-10-binary.tar.gz"
        digest = hashlib.md5(Server.content).hexdigest()
        for name, value in (("URL", address), ("SIZE", len(Server.content)), ("MD5", digest)):
            monkeypatch.setattr(cifar10, name, value)
        yield Server
        serving.shutdown()


def test_it_is_fetched_once_going_on_where_a_connection_ended(tmp_path, server):
    folder, server.most = tmp_path / "data/standin", 1000
    with pytest.raises(FileNotFoundError, match="could not be fetched .*; the same command goes on with it") as raised:
        prepare_cifar10(folder)
    assert "\n" not in str(raised.value) and "dataset.archive=" in str(raised.value) and not folder.exists()
    server.most = 10**9
    prepare_cifar10(folder)
    assert server.ranges == [0, 1000] and len(LatentDataset(folder, "full")) == 100
    prepare_cifar10(tmp_path / "data/standin-2")
    assert len(server.ranges) == 2


def test_another_archive_than_the_official_one_is_not_taken(tmp_path, server):
    server.content = server.content[:-9] + bytes(9)
    with pytest.raises(ValueError, match="is damaged: its md5 is not .*; the same command fetches it anew"):
        prepare_cifar10(tmp_path / "standin")
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(server.content)  # as one of a browser's
    with pytest.raises(ValueError, match="10-binary.tar.gz is truncated or damaged: .*; remove it to fetch it anew"):
        prepare_cifar10(tmp_path / "standin")
