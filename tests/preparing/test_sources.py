"""Pictures and their classes, against what Pillow decodes, ADM's rule worked out by hand, and equal sources."""

from __future__ import annotations

import io
import json
import shutil
import tarfile

import numpy as np
import pytest
from PIL import Image

from tread.preparing.images import centre_crop, read_rgb
from tread.preparing.sources import find_photos, label_table

NOISE = np.random.default_rng(0).integers(0, 256, (24, 32, 4), dtype=np.uint8)
CLASSES = {"bee": 2, "ant": 3, "cow": 1}


def encoded(mode="RGB", kind="PNG", **options) -> bytes:
    file = io.BytesIO()
    Image.fromarray(NOISE, "RGBA").convert(mode).save(file, kind, **options)
    return file.getvalue()


# ---------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("RGB", "JPEG"),
        ("L", "JPEG"),
        ("CMYK", "JPEG"),
        ("RGB", "PNG"),
        ("RGBA", "PNG"),
        ("LA", "PNG"),
        ("L", "PNG"),
        ("1", "PNG"),
        ("P", "PNG"),
        ("RGB", "WEBP"),
        ("RGBA", "WEBP"),
    ],
)
@pytest.mark.filterwarnings("ignore:Palette images")
def test_pictures_are_what_pillow_converts_to_rgb(mode, kind):
    content = encoded(mode, kind)
    expected = Image.open(io.BytesIO(content)).convert("RGB")
    assert np.array_equal(np.asarray(read_rgb(content)), np.asarray(expected))


def test_a_transparent_palette_is_read_without_its_transparency():
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, 200, 100, 50])
    file = io.BytesIO()
    image.save(file, "PNG", transparency=1)
    assert np.unique(np.asarray(read_rgb(file.getvalue())).reshape(-1, 3), axis=0).tolist() == [[200, 100, 50]]


def test_exif_orientation_is_not_applied():
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    content = encoded("RGB", "JPEG", exif=exif)
    assert read_rgb(content).size == (32, 24)
    assert np.array_equal(np.asarray(read_rgb(content)), np.asarray(read_rgb(encoded("RGB", "JPEG"))))


def grey(dtype) -> bytes:
    file = io.BytesIO()
    Image.fromarray(NOISE[..., 0].astype(dtype) * 65536).save(file, "TIFF")
    return file.getvalue()


BROKEN = {
    "no picture": (b"these are words", "no JPEG, PNG or WebP"),
    "nothing": (b"", "no JPEG, PNG or WebP"),
    "truncated": (encoded("RGB", "JPEG")[:-200], "truncated"),
    "truncated PNG": (encoded("RGB", "PNG")[:-200], "truncated|broken"),
    "a GIF": (encoded("P", "GIF"), "no JPEG, PNG or WebP"),
    "32 bits": (grey(np.int32), "8 or 16 bits"),
    "floating point": (grey(np.float32), "mode F.*8 bits"),
}


@pytest.mark.parametrize("content", BROKEN)
def test_what_is_no_whole_picture_is_refused(content):
    with pytest.raises((OSError, ValueError), match=BROKEN[content][1]):
        read_rgb(BROKEN[content][0])


# ---------------------------------------------------------------------------------------- cropping


def test_a_picture_of_the_right_size_stays_as_it_is():
    assert np.array_equal(centre_crop(Image.fromarray(NOISE[:, 4:28, :3]), 24), NOISE[:, 4:28, :3])


def test_halving_is_the_mean_of_boxes_and_the_crop_is_central():
    wide = np.random.default_rng(1).integers(0, 256, (64, 104, 3), dtype=np.uint8)
    halved = wide.reshape(32, 2, 52, 2, 3).mean(axis=(1, 3))
    quartered = halved.reshape(16, 2, 26, 2, 3).mean(axis=(1, 3))
    for size, boxes, left, rounding in ((32, halved, 10, 1), (16, quartered, 5, 2)):
        found = centre_crop(Image.fromarray(wide), size)
        assert np.abs(found - boxes[:, left : left + size]).max() <= rounding  # twice 0.5 for each halving


def test_resizing_keeps_a_ramp_a_ramp():
    """512×384 → halved once, 256×192 → 171×128 by 2/3 → the central 128 columns, from column 21."""
    ramp = np.broadcast_to((np.arange(512) / 2).astype(np.uint8)[None, :, None], (384, 512, 3))
    columns = (np.arange(21, 21 + 128) + 0.5) * 512 / 171 / 2 - 0.5
    found = centre_crop(Image.fromarray(np.ascontiguousarray(ramp)), 128)
    assert found.shape == (128, 128, 3) and np.abs(found - columns[None, :, None]).max() <= 1


def test_small_pictures_are_enlarged():
    assert centre_crop(Image.new("RGB", (10, 20), (1, 2, 3)), 64)[:, :, 2].tolist() == [[3] * 64] * 64


# ----------------------------------------------------------------------------------------- sources


def picture(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (40, 48), (number, 2 * number, 255 - number)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def tree(tmp_path):
    """train/<class>/<n>.png, and val/ with one picture of each class."""
    number = 0
    for part, counts in (("train", CLASSES), ("val", dict.fromkeys(CLASSES, 1))):
        for name, count in counts.items():
            (tmp_path / "tree" / part / name).mkdir(parents=True)
            for index in range(count):
                (tmp_path / "tree" / part / name / f"{index}.png").write_bytes(picture(number))
                number += 1
    (tmp_path / "tree" / "train" / ".hidden.png").write_bytes(b"")
    return tmp_path / "tree"


def pack(folder, path, top=""):
    with tarfile.open(path, "w") as tar:
        for file in sorted(folder.rglob("*")):
            tar.add(file, arcname=f"{top}{file.relative_to(folder)}", recursive=False)
    return path


def held(photos):
    return [(photos.classes[label], photos.read(i)) for i, label in enumerate(photos.labels)]


def test_class_folders_in_sorted_order(tree):
    photos = find_photos(tree / "train")
    assert photos.classes == ("ant", "bee", "cow") and photos.labels.tolist() == [0, 0, 0, 1, 1, 2]
    assert photos.names == ["ant/0.png", "ant/1.png", "ant/2.png", "bee/0.png", "bee/1.png", "cow/0.png"]
    assert [content for _, content in held(photos)] == [picture(n) for n in (2, 3, 4, 0, 1, 5)]


def test_a_tar_is_the_folder_it_was_made_of(tree, tmp_path):
    expected = held(find_photos(tree / "train"))
    assert held(find_photos(tree, root="train")) == expected
    assert held(find_photos(pack(tree, tmp_path / "a.tar"), root="train")) == expected
    assert held(find_photos(pack(tree, tmp_path / "b.tar", "photos/"), root="train")) == expected
    assert held(find_photos(pack(tree / "train", tmp_path / "c.tar", "./"))) == expected


def test_links_in_a_tar_are_followed(tree, tmp_path):
    path = pack(tree / "train", tmp_path / "a.tar")
    with tarfile.open(path, "a") as tar:
        for name, kind, target in (
            ("cow/9.png", tarfile.LNKTYPE, "ant/0.png"),
            ("cow/8.png", tarfile.SYMTYPE, "../bee/0.png"),
        ):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = kind, target
            tar.addfile(link)
    assert held(find_photos(path))[-2:] == [("cow", picture(0)), ("cow", picture(2))]


FLAT = [("0.png", 1, "bee"), ("1.png", 0, "ant"), ("2.png", 2, "cow")]
TABLES = {
    "dataset.json": json.dumps({"labels": [[file, name] for file, _, name in FLAT]}),
    "mine.json": json.dumps({"labels": [[f"./{file}", name] for file, _, name in FLAT]}),
    "labels.csv": "file,label\n" + "".join(f"{file},{name}\n" for file, _, name in FLAT),
    "metadata.csv": "label,text,file_name\n" + "".join(f"{name},a picture,{file}\n" for file, _, name in FLAT),
}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("how", ["folder", "tar", "named", "beside"])
def test_a_flat_source_has_the_classes_of_its_labels_file(tmp_path, table, how):
    flat, labels = tmp_path / "flat", None
    flat.mkdir()
    for number, (file, _, _) in enumerate(FLAT):
        (flat / file).write_bytes(picture(number))
    (flat / table).write_text(TABLES[table])
    if how == "named" or table == "mine.json":
        labels = table
    if how == "beside":
        labels = str(shutil.move(flat / table, tmp_path / f"our {table}"))
    source = pack(flat, tmp_path / "flat.tar", "pictures/") if how == "tar" else flat
    photos = find_photos(source, labels=labels)
    assert photos.classes == ("ant", "bee", "cow")
    assert held(photos) == [("bee", picture(0)), ("ant", picture(1)), ("cow", picture(2))]


def test_numbers_are_their_own_names():
    assert label_table("a.csv", b"file,label\na.png,3\nb.png,0\n") == {"a.png": 3, "b.png": 0}
    assert label_table("a.json", b'{"labels": [["a", 10], ["b", 9]]}') == {"a": 10, "b": 9}
    assert label_table("a.csv", b"file,label\na.png,n03\nb.png,0\n") == {"a.png": "n03", "b.png": "0"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("labels.json", '{"0.png": 1}'),
        ("labels.json", '[["0.png", 1]]'),
        ("labels.json", '{"labels": {"0.png": 1}}'),
        ("labels.json", '{"labels": [{"file": "0.png", "label": 1}]}'),
        ("labels.json", '{"labels": [["0.png", [1, "bee"]]]}'),
        ("metadata.jsonl", '{"file_name": "0.png", "label": 1}\n{"file_name": "1.png", "label": 1}\n'),
        ("labels.csv", "filename,class\n0.png,1\n"),
    ],
)
def test_another_labels_file_names_the_two_that_are_read(name, content):
    with pytest.raises(ValueError, match=f"{name} can't be read: .*It must be EDM's dataset.json, .* or a CSV"):
        label_table(name, content.encode())


def test_thousand_pictures_of_imagenet(asset, tmp_path):
    path = asset("data/imagenet1000_adm256.tar")
    with tarfile.open(path) as tar:
        table = json.load(tar.extractfile("labels.json"))  # {file: [number, wnid, name]}
    rows = [f"{file},{wnid}\n" for file, (_, wnid, _) in table.items()]
    (tmp_path / "labels.csv").write_text("file,label\n" + "".join(rows))
    photos = find_photos(path, labels=str(tmp_path / "labels.csv"))
    assert len(photos) == len(photos.classes) == 1000 and photos.labels.tolist() == list(range(1000))
    assert (photos.classes[0], photos.classes[999]) == ("n01440764", "n15075141")
    assert photos.refused == [("labels.json", "its name is not a picture's")]
    image = read_rgb(photos.read(0))
    assert np.array_equal(centre_crop(image, 256), np.asarray(image))  # ADM's crop of ADM's crop


def test_imagenette(asset):
    photos = find_photos(asset("data/imagenette128.tar"), root="train")
    assert len(photos) == 9469 and len(photos.classes) == 10 and photos.classes[0] == "n01440764"
    with pytest.raises(ValueError, match="root=train, root=val"):
        find_photos(asset("data/imagenette128.tar"))


def compressed(tree):
    with tarfile.open(tree.parent / "a.tar.gz", "w:gz") as tar:
        tar.add(tree, arcname="a")
    return tree.parent / "a.tar.gz"


def truncated(tree):
    path = pack(tree, tree.parent / "a.tar")
    path.write_bytes(path.read_bytes()[:5000])
    return path


def numbered(**labels):
    return labelled(json.dumps({"labels": [[f"{name[1:]}.png", label] for name, label in labels.items()]}))


def labelled(text, name="dataset.json"):
    def make(tree):
        (tree / "train" / "ant" / name).write_text(text)
        return tree / "train" / "ant"

    return make


def empty_class(tree):
    (tree / "train" / "dog").mkdir()
    return tree / "train"


def only(name):
    def make(tree):
        (tree / "other" / "x").mkdir(parents=True)
        (tree / "other" / "x" / name).write_bytes(b"")
        return tree / "other"

    return make


WRONG = {
    "nothing there": (lambda tree: tree / "nowhere", "is not there"),
    "no root": (lambda tree: tree, "deeper than <class>/<picture>; .*root=train, root=val"),
    "flat without labels": (lambda tree: tree / "train" / "ant", "in no class folder.*labels="),
    "empty class": (empty_class, "classes without a picture: dog.*allow_empty"),
    "no picture": (only("a.txt"), "holds no picture.*it holds x/a.txt"),
    "tar of tars": (only("n01440764.tar"), "n01440764.tar"),
    "compressed": (compressed, "unpacked first"),
    "truncated": (truncated, "truncated"),
    "labelled, not there": (numbered(_0=0, _1=0, _2=1, _7=1), "labelled, but not there: 7.png"),
    "not labelled": (numbered(_0=0, _2=1), "without a label: 1.png"),
    "splits like classes": (lambda tree: labelled("", "metadata.csv")(tree).parent, "labels file.*root=ant"),
    "hole in the classes": (numbered(_0=0, _1=0, _2=2), "classes without a picture: 1"),
    "negative": (numbered(_0=-1, _1=0, _2=0), "has label -1"),
    "names and numbers": (numbered(_0="a", _1=0, _2=0), "some are names"),
    "fractions": (numbered(_0=0.5), "can't be read: the label of 0.png is 0.5"),
    "broken JSON": (labelled('{"0.png": 0'), "dataset.json can't be read"),
    "unknown columns": (labelled("a,b\n1,2\n", "labels.csv"), "can't be read: 'file_name'. It must be"),
    "no label in a row": (labelled("file,label\n0.png\n", "labels.csv"), "the label of 0.png is None"),
    "no labels": (labelled('{"labels": null}', "dataset.json"), "dataset.json can't be read"),
    "a picture for a tar": (lambda tree: tree / "train" / "ant" / "0.png", "is no tar"),
    "fractions in a table": (labelled("file,label\n0.png,1.0\n", "labels.csv"), "the label of 0.png is '1.0'"),
    "too large": (numbered(_0=0, _1=100000000, _2=0), "1.png has label 100000000"),
    "outside": (labelled("file,label\n../0.png,1\n", "labels.csv"), "can't be read: ../0.png lies outside"),
    "outside by a detour": (numbered(_0=0, _1=0, **{"_a/../../b/2": 1}), "can't be read: ../b/2.png lies outside"),
    "outside from the root": (numbered(**{"_/tmp/0": 0}), "can't be read: /tmp/0.png lies outside"),
    "twice": (labelled("file,label\n0.png,1\n0.png,2\n", "labels.csv"), "0.png comes twice"),
}


@pytest.mark.parametrize("source", WRONG)
def test_a_source_that_is_not_clear_is_refused(tree, source):
    make, shown = WRONG[source]
    with pytest.raises((ValueError, FileNotFoundError), match=f"(?s){shown}"):
        find_photos(make(tree)).check_classes()


def test_a_labels_file_that_is_nowhere_is_named(tree):
    with pytest.raises(FileNotFoundError, match="mine.csv is neither in .*train nor a file"):
        find_photos(tree / "train", labels="mine.csv")


def test_an_unknown_root_lists_the_folders(tree):
    with pytest.raises(ValueError, match="no folder test; its folders are train, val"):
        find_photos(tree, root="test")
