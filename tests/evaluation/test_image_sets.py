"""Reading sets of pictures and references; the reference is NumPy's and Pillow's own reading of the same files."""

import hashlib
import os
import tarfile
import zipfile

import numpy as np
import pytest
from conftest import names_in, open_pictures, open_reference
from PIL import Image
from test_reference_scorer import NARROW, parts_of

from tread.evaluation import image_sets
from tread.evaluation.image_sets import Pictures, save_npz
from tread.evaluation.reference import check_size, save_statistics
from tread.preparing.images import centre_crop
from tread.runtime.distributed import share_work


def write_folder(folder, pictures, suffix="png"):
    for i, picture in enumerate(pictures):
        path = folder / f"class{i % 2}/{i:03d}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(path)
    return folder


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_npz_is_read_by_rows_forward_and_back(tmp_path, pictures_of, save):
    pictures = pictures_of(9, 16, 0)
    save(tmp_path / "a.npz", pictures)
    found = open_pictures(tmp_path / "a.npz")
    assert (found.count, found.resolution) == (9, (16, 16)) and len(found.sha256) == 64
    for start, stop in ((0, 4), (4, 9), (7, 9), (2, 3), (8, 9), (0, 9)):
        assert np.array_equal(found.read(start, stop), pictures[start:stop].transpose(0, 3, 1, 2))


def test_what_is_saved_is_what_adm_reads(tmp_path, pictures_of):
    pictures, labels = pictures_of(7, 8, 0), np.arange(7)
    save_npz(tmp_path / "samples.npz", np.split(pictures.transpose(0, 3, 1, 2), [3, 6]), labels)
    with np.load(tmp_path / "samples.npz") as found:
        assert np.array_equal(found["arr_0"], pictures) and found["arr_0"].dtype == np.uint8
        assert np.array_equal(found["arr_1"], labels)
    assert names_in(tmp_path) == {"samples.npz"}


def test_folders_and_tars_hold_the_same_pictures(tmp_path, pictures_of):
    pictures = pictures_of(6, 16, 0)
    folder = write_folder(tmp_path / "photos/val", pictures)
    (folder / "notes.txt").write_text("no picture")
    (folder / ".hidden.png").write_text("no picture")
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        tar.add(tmp_path / "photos", arcname="photos")
    order = [0, 2, 4, 1, 3, 5]  # by name: class0 first
    for path in (folder, tmp_path / "photos.tar", tmp_path / "photos.tar/photos/val"):
        found = open_pictures(path)
        assert found.count == 6 and found.resolution == (16, 16)
        assert np.array_equal(found.read(1, 5), pictures[order][1:5].transpose(0, 3, 1, 2))
    before = open_pictures(folder).sha256
    Image.fromarray(pictures[0] // 2).save(folder / "class0/000.png")
    assert open_pictures(folder).sha256 != before
    with pytest.raises(ValueError, match="no pictures in nowhere/, but folders like photos/val"):
        open_pictures(tmp_path / "photos.tar/nowhere")


def test_photos_of_any_size_are_cropped_as_adm_does(tmp_path, pictures_of):
    photos = [pictures_of(1, size, size)[0] for size in (40, 64, 100)]
    folder = write_folder(tmp_path / "photos", photos)
    Image.fromarray(photos[0][..., 0]).save(folder / "class0/grey.png")
    with pytest.raises(ValueError, match=r"(?s)not RGB, 1 in all.*grey\.png is of mode L.*crop=256"):
        open_pictures(folder)
    found = open_pictures(folder, crop=32)
    expected = [centre_crop(Image.fromarray(photo), 32) for photo in (photos[0], photos[2])]
    assert found.count == 4 and np.array_equal(found.read(0, 2), np.stack(expected).transpose(0, 3, 1, 2))
    (folder / "class0/grey.png").unlink()
    with pytest.raises(ValueError, match=r"differ in size.*40×40.*100×100.*crop"):
        open_pictures(folder)


def test_a_crops_photos_are_read_as_asked_and_its_hash_says_how(tmp_path, pictures_of):
    """What was hashed before there was a choice keeps its hash: features in the cache stay."""
    photos = [np.dstack([photo, photo[..., 0]]) for photo in pictures_of(2, 40, 0)]
    exif = Image.Exif()
    exif[0x0112] = 6
    digest = hashlib.sha256(b"crop 16")
    for name, photo in zip(("a.png", "b.png"), photos):
        Image.fromarray(photo).save(tmp_path / name, exif=exif)
        content = (tmp_path / name).read_bytes()
        digest.update(f"\0{name}\0{len(content)}\0".encode() + content)
    assert open_pictures(tmp_path, 16).sha256 == digest.hexdigest()
    hashes = set()
    for orientation in ("exif", "stored"):
        for alpha in ("white", "drop"):
            found = open_pictures(tmp_path, 16, orientation, alpha)
            hashes.add(found.sha256)
            for photo, crop in zip(photos, found.read(0, 2)):
                image = Image.new("RGB", (40, 40), "white")
                image.paste(Image.fromarray(photo), mask=Image.fromarray(photo) if alpha == "white" else None)
                turned = np.rot90(np.asarray(image), -1) if orientation == "exif" else np.asarray(image)
                assert np.array_equal(crop.transpose(1, 2, 0), centre_crop(Image.fromarray(turned), 16))
    assert len(hashes) == 4 and digest.hexdigest() in hashes


def test_wrong_arrays_are_refused(tmp_path):
    shapes = [(4, 8, 8), (4, 8, 8, 1), (4, 8, 8, 4), (4, 3, 8, 8), (1, 8, 8, 3), (0, 8, 8, 3)]
    for array in (np.zeros((4, 8, 8, 3), np.float32), np.array([{}, {}]), *(np.zeros(s, np.uint8) for s in shapes)):
        np.savez(tmp_path / "a.npz", array)
        with pytest.raises(ValueError, match="a.npz.*(must be uint8 RGB|objects|at least 2)"):
            open_pictures(tmp_path / "a.npz")


def test_damaged_files_are_named(tmp_path, pictures_of):
    path = tmp_path / "a.npz"
    np.savez(path, pictures_of(20, 16, 0))
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"PK nothing"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="a.npz is damaged"):
            open_pictures(path)
    spoilt = bytearray(whole)
    spoilt[len(whole) // 2] ^= 255
    path.write_bytes(spoilt)
    with pytest.raises(ValueError, match="damaged.*CRC"):
        open_pictures(path).read(0, 20)
    with zipfile.ZipFile(path, "w") as archive, archive.open("arr_0.npy", "w") as file:  # a head without its array
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (20, 16, 16, 3)})
    with pytest.raises(ValueError, match=r"arr_0 is not \(20, 16, 16, 3\)"):
        open_pictures(path)
    np.savez(path, images=pictures_of(20, 16, 0))
    with pytest.raises(ValueError, match="holds images, but no pictures"):
        open_pictures(path)
    with pytest.raises(FileNotFoundError, match="nowhere.npz is not there"):
        open_pictures(tmp_path / "nowhere.npz")


def test_all_damaged_files_are_named_at_once_whatever_bytes_their_names_have(tmp_path, pictures_of):
    """In a folder and a tar: empty, cut short, nowhere, and a name of latin-1 bytes, that came as a codec's error."""
    folder = write_folder(tmp_path / "photos", pictures_of(6, 16, 0))
    names = [folder / "class0" / os.fsdecode(b"\xe9.png"), folder / "class0/004.png", folder / "class1/001.png"]
    (folder / "class0/000.png").rename(names[0])
    assert open_pictures(folder).count == 6
    names[0].write_bytes(b"")
    names[1].write_bytes(names[1].read_bytes()[:-200])  # its head is whole
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        tar.add(folder, arcname=".")
    names[2].unlink()
    names[2].symlink_to("nowhere")
    for path, count in ((folder, 3), (tmp_path / "photos.tar", 2)):
        with pytest.raises(ValueError, match=f"damaged pictures, {count} in all") as refused:
            open_pictures(path)
        for name, why in list(zip((r"class0/\udce9.png", "004.png", "001.png"), ("it is empty", "", "")))[:count]:
            assert f"{name} can't be read as a picture ({why}" in str(refused.value)


def test_pictures_of_other_formats_are_not_passed_over(tmp_path, pictures_of):
    """They were left out without a word, and the scores were of the rest."""
    folder = write_folder(tmp_path / "photos", pictures_of(4, 16, 0))
    (folder / "class0/a.gif").write_bytes(b"GIF89a")
    (folder / "class0/b.HEIC").write_bytes(b"heic")
    with pytest.raises(ValueError, match="(?s)damaged pictures, 2 in all.*a.gif .*is a GIF.*b.HEIC .*is no JPEG"):
        open_pictures(folder)
    pictures = image_sets.open_pictures(folder, None, share_work("cpu"), skip=True)
    assert pictures.count == 4 and [name for name, _ in pictures.damaged] == ["class0/a.gif", "class0/b.HEIC"]


def test_every_process_reads_the_pictures_that_the_main_process_found(tmp_path, pictures_of):
    """One arrives, first by its name, before another process looks: its rows would be shifted by one."""
    folder = write_folder(tmp_path / "photos", pictures_of(4, 16, 0))
    main, other, told = share_work("cpu"), share_work("cpu"), []
    main.from_main = lambda decide: told.append(decide()) or told[-1]
    answers = iter(told)
    other.from_main = lambda decide: next(answers)
    first = image_sets.open_pictures(folder, None, main)
    Image.fromarray(pictures_of(1, 16, 1)[0]).save(folder / "a.png")
    second = image_sets.open_pictures(folder, None, other)
    assert first.count == second.count == 4 and np.array_equal(first.read(0, 4), second.read(0, 4))


# ------------------------------------------------------------------------------------- references


def statistics(dimension, seed=0):
    x = np.random.default_rng(seed).standard_normal((50, dimension))
    return x.mean(axis=0), np.cov(x, rowvar=False)


def test_references_say_what_they_have(tmp_path, pictures_of):
    mu, sigma = statistics(128)
    mu_s, sigma_s = statistics(289)
    np.savez(tmp_path / "edm.npz", mu=mu, sigma=sigma)
    np.savez(tmp_path / "adm.npz", pictures_of(4, 16, 0), mu=mu, sigma=sigma, mu_s=mu_s, sigma_s=sigma_s)
    np.savez(tmp_path / "batch.npz", pictures_of(4, 16, 0))
    edm, adm, batch = (open_reference(tmp_path / f"{name}.npz", NARROW) for name in ("edm", "adm", "batch"))
    assert np.array_equal(edm.stated["pool"][0], mu) and np.array_equal(edm.stated["pool"][1], sigma)
    assert (len(edm.stated), edm.pictures, edm.resolution, edm.count) == (1, None, None, None)
    assert np.array_equal(adm.stated["spatial"][1], sigma_s) and adm.count == 4 and adm.resolution == (16, 16)
    assert not batch.stated and batch.count == 4 and batch.statistics_from == "pictures"
    np.savez(tmp_path / "fortran.npz", mu=mu, sigma=np.asfortranarray(sigma + mu), resolution=np.array([16]))
    found = open_reference(tmp_path / "fortran.npz", NARROW)
    assert np.array_equal(found.stated["pool"][1], sigma + mu) and found.resolution is None
    assert adm.sha256 != batch.sha256 and adm.statistics_from == "file"


def test_wrong_references_are_refused(tmp_path):
    def refused(message, **arrays):
        np.savez(tmp_path / "a.npz", **arrays)
        with pytest.raises(ValueError, match=message):
            open_reference(tmp_path / "a.npz", NARROW)

    mu, sigma = statistics(64)
    refused(r"mu \(64,\).*another network.*128", mu=mu, sigma=sigma)
    mu, sigma = statistics(128)
    refused("not finite", mu=mu * np.nan, sigma=sigma)
    refused("not real", mu=mu, sigma=sigma.astype(np.complex128))
    refused("mu, sigma or arr_0", labels=mu)
    refused("Object arrays", mu=np.array([{}]), sigma=sigma)
    with pytest.raises(ValueError, match="pickled objects"):
        open_reference(tmp_path / "imagenet.pkl")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_reference(tmp_path / "nowhere.npz")


def test_statistics_that_are_saved_are_a_reference(tmp_path):
    rng = np.random.default_rng(0)
    pool, spatial = rng.standard_normal((6, 128)), rng.standard_normal((6, 289))
    parts = parts_of(tmp_path / "work", {"pool": pool, "spatial": spatial}, 4)
    pictures = Pictures("photos", 6, (16, 16), "", None)
    save_statistics(tmp_path / "out/stats.npz", pictures, parts, share_work(None))
    found = open_reference(tmp_path / "out/stats.npz", NARROW)
    np.testing.assert_allclose(found.stated["pool"][1], np.cov(pool, rowvar=False), atol=1e-12)
    np.testing.assert_allclose(found.stated["spatial"][0], spatial.mean(axis=0), atol=1e-12)
    assert found.resolution == (16, 16) and found.count == 6 and found.statistics_from == "file"
    check_size("samples", (3, 16, 16), found)
    with pytest.raises(ValueError, match="samples has pictures of 32×16, but .*stats.npz of 16×16"):
        check_size("samples", (3, 16, 32), found)
    with pytest.raises(ValueError, match="grey"):
        check_size("samples", (1, 16, 16), found)
