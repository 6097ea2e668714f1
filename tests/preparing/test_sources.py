"""Where pictures and their classes lie: against what was written there, equal sources, and `datasets`."""

import json
import shutil
import tarfile

import numpy as np
import pytest
from conftest import saved
from PIL import Image

from tread.preparing.images import centre_crop, read_rgb
from tread.preparing.sources import find_photos, label_table

CLASSES = {"bee": 2, "ant": 3, "cow": 1}


def picture(number: int) -> bytes:
    return saved(Image.new("RGB", (40, 48), (number, 2 * number, 255 - number)))


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
    (tmp_path / "tree/train/.hidden.png").write_bytes(b"")
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
    (tree / "train/stray.txt").write_text("beside the class folders")
    assert held(find_photos(pack(tree / "train", tmp_path / "d.tar", "photos/"))) == expected


def test_links_in_a_tar_are_followed(tree, tmp_path):
    path = pack(tree / "train", tmp_path / "a.tar")
    with tarfile.open(path, "a") as tar:
        links = ("cow/9.png", tarfile.LNKTYPE, "ant/0.png"), ("cow/8.png", tarfile.SYMTYPE, "../bee/0.png")
        for name, kind, target in links:
            link = tarfile.TarInfo(name)
            link.type, link.linkname = kind, target
            tar.addfile(link)
    assert held(find_photos(path))[-2:] == [("cow", picture(0)), ("cow", picture(2))]


FLAT = [("0.png", "bee"), ("1.png", "ant"), ("2.png", "cow")]
TABLES = {
    "dataset.json": json.dumps({"labels": FLAT}),
    "mine.json": json.dumps({"labels": [[f"./{file}", name] for file, name in FLAT]}),
    "labels.csv": "file,label\n" + "".join(f"{file},{name}\n" for file, name in FLAT),
    "metadata.csv": "label,text,file_name\n" + "".join(f"{name},a picture,{file}\n" for file, name in FLAT),
}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("how", ["folder", "tar", "named", "beside"])
def test_a_flat_source_has_the_classes_of_its_labels_file(tmp_path, table, how):
    flat, labels = tmp_path / "flat", None
    flat.mkdir()
    for number, (file, _) in enumerate(FLAT):
        (flat / file).write_bytes(picture(number))
    (flat / table).write_text(TABLES[table])
    if how == "named" or table == "mine.json":
        labels = table
    if how == "named" and table == "labels.csv":  # by its path, whatever its name
        labels = str((flat / table).rename(flat / "train.csv"))
    if how == "beside":
        labels = str(shutil.move(flat / table, tmp_path / f"our {table}"))
    source = pack(flat, tmp_path / "flat.tar", "pictures/") if how == "tar" else flat
    photos = find_photos(source, labels=labels)
    assert photos.classes == ("ant", "bee", "cow")
    assert held(photos) == [("bee", picture(0)), ("ant", picture(1)), ("cow", picture(2))]


def test_numbers_are_their_own_names():
    assert label_table("a.csv", b"file,label\na.png,3\nb.png,0\n") == {"a.png": 3, "b.png": 0}
    assert label_table("a.csv", b"file,label\ra.png,3\rb.png,0\r") == {"a.png": 3, "b.png": 0}
    assert label_table("a.json", b'{"labels": [["a", 10], ["b", 9]]}') == {"a": 10, "b": 9}
    assert label_table("a.csv", b"file,label\na.png,n03\nb.png,0\n") == {"a.png": "n03", "b.png": "0"}


def test_a_labels_file_in_another_encoding_names_the_line():
    with pytest.raises(ValueError, match="can't be read: it has no 'file_name'. It must be .*header file,label"):
        label_table("a.csv", b"filename,class\na.png,3\n")
    with pytest.raises(ValueError, match="labels file a.csv: line 3 is not UTF-8"):
        label_table("a.csv", "\ufefffile,label\na.png,fée\n".encode() + "b.png,fée\n".encode("latin-1"))


def test_another_labels_file_names_the_two_that_are_read():
    for name, content in (
        ("labels.json", b'{"0.png": 1}'),
        ("labels.json", b'{"labels": {"0.png": 1}}'),
        ("labels.json", b'{"labels": [["0.png", [1, "bee"]]]}'),
        ("metadata.jsonl", b'{"file_name": "0.png", "label": 1}\n{"file_name": "1.png", "label": 1}\n'),
        ("labels.csv", b"filename,class\n0.png,1\n"),
    ):
        with pytest.raises(ValueError, match=f"{name} can't be read: .*It must be EDM's dataset.json, .* or a CSV"):
            label_table(name, content)


def test_thousand_pictures_of_imagenet(asset, tmp_path):
    path = asset("data/imagenet1000_adm256.tar")
    with tarfile.open(path) as tar:
        table = json.load(tar.extractfile("labels.json"))  # {file: [number, wnid, name]}
    rows = [f"{file},{wnid}\n" for file, (_, wnid, _) in table.items()]
    (tmp_path / "labels.csv").write_text("file,label\n" + "".join(rows))
    photos = find_photos(path, labels=str(tmp_path / "labels.csv"))
    assert len(photos) == len(photos.classes) == 1000 and photos.labels.tolist() == list(range(1000))
    assert (photos.classes[0], photos.classes[999]) == ("n01440764", "n15075141")
    assert photos.faults == [("labels.json", "its name is not a picture's")]
    image = read_rgb(photos.read(0))
    assert np.array_equal(centre_crop(image, 256), np.asarray(image))  # ADM's crop of ADM's crop


@pytest.mark.slow
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
        (tree / "train/ant" / name).write_text(text)
        return tree / "train/ant"

    return make


def twofold(tree):
    for part in ("train", "val"):
        (tree / part / "x").mkdir()
        (tree / part / "x/1.png").write_bytes(picture(1))
    return tree


def empty_class(tree):
    (tree / "train/dog").mkdir()
    return tree / "train"


def only(name):
    def make(tree):
        (tree / "other/x").mkdir(parents=True)
        (tree / "other/x" / name).write_bytes(b"")
        return tree / "other"

    return make


def nested(*pictures):
    def make(tree):
        for name in pictures:
            (tree / "nested" / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / "nested" / name).write_bytes(b"")
        return tree / "nested"

    return make


WRONG = {
    "nothing there": (lambda tree: tree / "nowhere", "is not there"),
    "no root": (lambda tree: tree, "deeper than <class>/<picture>; .*root=train, root=val"),
    "roots further down": (nested("a/x/ant/1.png", "b/y/1.png", "b/1.png"), "choose the folder of classes: root=a/x$"),
    "no folder of classes": (
        nested("ant/1.png", "ant/a/1.png", "ant/b/1.png", "bee/1.png", "bee/a/1.png"),
        "ant/a/1.png lies .*; move it there$",
    ),
    "one class": (nested("ant/1.png", "ant/2.png", "ant/x/1.png"), "used, 1 in all.*ant/x/1.png: it lies deeper"),
    "as many elsewhere": (
        nested("1.png", "2.png", "ant/1.png", "ant/2.png", "ant/3.png", "ant/x/1.png"),
        "not in a class",
    ),
    "beside the splits": (nested("few/1.png", "few/2.png", "train/ant/1.png"), "train/ant/1.png lies.*root=train"),
    "flat without labels": (lambda tree: tree / "train/ant", "not in a class folder: 0.png, 1.png, 2.*labels="),
    "empty class": (empty_class, "classes without a picture: dog.*allow_empty"),
    "no picture": (only("a.txt"), "holds no picture.*x/a.txt: its name"),
    "compressed": (compressed, "unpacked first"),
    "truncated": (truncated, "truncated"),
    "labelled, not there": (numbered(_0=0, _1=0, _2=1, _7=1), "labelled, but not there: 7.png"),
    "not labelled": (numbered(_0=0, _2=1), "without a label: 1.png"),
    "splits like classes": (lambda tree: labelled("", "metadata.csv")(tree).parent, "labels file.*root=ant"),
    "hole in the classes": (numbered(_0=0, _1=0, _2=2), "classes without a picture: 1"),
    "negative": (numbered(_0=-1, _1=0, _2=0), r"labels lie in -1\.\."),
    "names and numbers": (numbered(_0="a", _1=0, _2=0), "must be whole numbers, or names"),
    "fractions": (numbered(_0=0.5), "must be whole numbers, or names, but that of 0.png is 0.5"),
    "fractions in a table": (labelled("file,label\n0.png,1.0\n", "labels.csv"), "that of 0.png is '1.0'"),
    "a blank label": (labelled("file,label\n0.png,1\n1.png,\n2.png,10\n", "labels.csv"), "but that of 1.png is ''"),
    "negative in a table": (
        labelled("file,label\n0.png,1\n1.png,-1\n2.png,10\n", "labels.csv"),
        r"labels lie in -1\.\.",
    ),
    "a root twice": (
        lambda tree: find_photos(twofold(tree), root="x"),
        "several folders x: root=train/x or root=val/x",
    ),
    "no label in a row": (labelled("file,label\n0.png\n", "labels.csv"), "that of 0.png is None"),
    "too large": (numbered(_0=0, _1=100000000, _2=0), r"labels lie in 0\.\.100000000"),
    "outside": (labelled("file,label\n../0.png,1\n", "labels.csv"), r"not there: \.\./0.png"),
    "twice": (labelled("file,label\n0.png,1\n0.png,2\n", "labels.csv"), "0.png comes twice"),
    "an unknown root": (lambda tree: find_photos(tree, root="test"), "no folder test; its folders are train, val"),
    "a labels file nowhere": (lambda tree: find_photos(tree, labels="mine.csv"), "No such file .*mine.csv"),
}


@pytest.mark.parametrize("source", WRONG)
def test_a_source_that_is_not_clear_is_refused(tree, source):
    make, shown = WRONG[source]
    with pytest.raises((ValueError, FileNotFoundError), match=f"(?s){shown}"):
        find_photos(make(tree)).check()


@pytest.mark.parametrize("metadata", [None, "metadata.csv"])
@pytest.mark.parametrize("classes", [["wasp", "bee", "wasp"], [1, 0, 1]])
def test_an_imagefolder_is_what_datasets_reads_it_as(tmp_path, metadata, classes):
    import datasets

    rows = [(f"{name}/{i}.png", name) for i, name in enumerate(classes)]
    for number, (name, _) in enumerate(rows):
        (tmp_path / "train" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "train" / name).write_bytes(picture(number))
    if metadata:
        lines = ["file_name,label", *(f"{name},{label}" for name, label in rows)]
        (tmp_path / "train" / metadata).write_text("\n".join(lines) + "\n")
    read = datasets.load_dataset("imagefolder", data_dir=str(tmp_path), split="train", cache_dir=str(tmp_path / ".hub"))
    names = getattr(read.features["label"], "names", None)
    photos = find_photos(tmp_path, "train")
    assert len(photos) == len(read) == 3 and names in (None, list(photos.classes))
    for row in read:
        (index,) = (i for i in range(3) if np.array_equal(read_rgb(photos.read(i)), row["image"]))
        assert photos.classes[photos.labels[index]] == (names[row["label"]] if names else str(row["label"]))
    (tmp_path / "train" / rows[1][0]).unlink()
    with pytest.raises(ValueError, match="labelled, but not there" if metadata else "without a picture"):
        find_photos(tmp_path, "train").check()


def test_a_tar_behind_another_is_not_lost_in_silence(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").touch()
        with tarfile.open(tmp_path / f"{name}.tar", "w") as tar:
            tar.add(tmp_path / f"{name}.txt", f"{name}.txt")
    (tmp_path / "both.tar").write_bytes((tmp_path / "a.tar").read_bytes() + (tmp_path / "b.tar").read_bytes())
    with pytest.raises(ValueError, match="both.tar is truncated or damaged after .* a tar ends with zeros"):
        find_photos(tmp_path / "both.tar")
