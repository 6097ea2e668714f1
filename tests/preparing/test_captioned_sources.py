"""Pictures with captions, prepared: against what was written into each source, by the tools of its kind.

Pictures are of one colour, which says which they are; so what a sample shows must go with its captions.
"""

import pickle
import shutil
import zipfile

import numpy as np
import pytest
from conftest import contents, raising, read_json, saved, times, write_json
from PIL import Image

from tread.data.captions import read_captions
from tread.data.dataset import LatentDataset
from tread.data.index import read_index
from tread.data.latents import stored_pictures
from tread.preparing import encode_photos
from tread.preparing.encode_features import find_again
from tread.preparing.sources import find_photos

TRAIN = {9: ["a red\n apple ", "fruit"], 25: ["a giraffe"], 30: ["flowers", "a vase", "Blumen in einer Väse"]}
VAL = {42: ["shoes", "a dog"], 73: ["a motorbike"]}


def picture(number: int) -> bytes:
    return saved(Image.new("RGB", (12, 10), (number, 255 - number, 7)))


def coco_name(split: str, number: int) -> str:
    return f"COCO_{split}_{number:012d}.jpg"  # the content is PNG, so that colours come back exactly


def annotations(split: str, pictures: dict[int, list[str]]) -> dict:
    """As the official files have it: captions of one picture do not lie together."""
    images = [
        {"license": 5, "file_name": coco_name(split, number), "height": 10, "width": 12, "id": number}
        for number in reversed(pictures)
    ]
    rounds = max(map(len, pictures.values()))
    notes = [(number, lines[i]) for i in range(rounds) for number, lines in pictures.items() if i < len(lines)]
    listed = [{"image_id": number, "id": 100 + i, "caption": words} for i, (number, words) in enumerate(notes)]
    return {"info": {"year": 2014}, "images": images, "licenses": [], "annotations": listed}


@pytest.fixture
def coco(tmp_path):
    """coco/annotations/captions_{train,val}2014.json, coco/train2014/, coco/val2014/."""
    root = tmp_path / "coco"
    (root / "annotations").mkdir(parents=True)
    (root / "annotations/instances_val2014.json").write_text("{}")
    for split, pictures in (("train2014", TRAIN), ("val2014", VAL)):
        (root / split).mkdir()
        for number in pictures:
            (root / split / coco_name(split, number)).write_bytes(picture(number))
        write_json(root / f"annotations/captions_{split}.json", annotations(split, pictures))
    return root


def zipped(root):
    """As the files come from the site: train2014.zip, val2014.zip, annotations_trainval2014.zip."""
    for split, name in (("train2014",) * 2, ("val2014",) * 2, ("annotations", "annotations_trainval2014")):
        shutil.make_archive(str(root / name), "zip", root, split)
        shutil.rmtree(root / split)
    return root


@pytest.fixture
def prepare(tmp_path, prepare_photos):
    """A function from overrides to what the script prints; the dataset is tmp_path/data, of pixels."""
    given = [f"out={tmp_path / 'data'}", "autoencoder=none", "resolution=8", "workers=0", "shard_size=2", "decode=0"]
    return lambda source, *overrides: prepare_photos(f"source={source}", *given, *overrides)


def numbers_of(pictures: np.ndarray) -> list[int]:
    """Which pictures these are, by their colours."""
    assert (pictures == pictures[:, :, :1, :1]).all()
    return pictures[:, 0, 0, 0].tolist()


def held(folder) -> list[tuple[int, list[str]]]:
    """The picture that each sample shows, and its captions."""
    data = LatentDataset(folder, verify="full")
    shown = stored_pictures(data.read(np.arange(len(data))).stored, data.latents)
    return list(zip(numbers_of(shown.numpy()), read_captions(folder, read_index(folder)), strict=True))


def expected(pictures: dict[int, list[str]]) -> list[tuple[int, list[str]]]:
    return [(number, [" ".join(words.split()) for words in lines]) for number, lines in pictures.items()]


# ------------------------------------------------------------------------------------------ MS-COCO


@pytest.mark.parametrize("as_it_comes", [False, True])
def test_coco_is_prepared_by_one_command(coco, prepare, tmp_path, as_it_comes):
    """With an attribution, which stands in both indices, and tells a finished dataset from that of another."""
    if as_it_comes:
        zipped(coco)
    text = prepare(coco, "attribution=by_all_of_them")
    assert "captions  9, 1 to 3 a picture" in text and "held out  2 of them, val2014" in text
    assert read_index(tmp_path / "data")["heldout"] == "../data-heldout"
    for part, pictures in (("data", TRAIN), ("data-heldout", VAL)):
        data = LatentDataset(tmp_path / part)
        assert held(tmp_path / part) == expected(pictures) and data.latents.classes == ("all",)
        assert data.attribution == read_index(tmp_path / part)["attribution"] == "by_all_of_them"
        read, *_ = find_again(data, coco, None, None, workers=0)
        ((batch,),) = read([range(len(pictures))])
        assert numbers_of(batch.numpy()) == list(pictures)  # the photos are found again
    assert "is finished" in prepare(coco, "attribution=by_all_of_them") and not list(tmp_path.glob(".*"))
    with pytest.raises(FileExistsError, match="data exists already"):
        prepare(coco, "attribution=by_others")


def test_one_split_alone(coco, prepare, tmp_path):
    shutil.rmtree(coco / "train2014")
    prepare(coco, "root=val2014")
    assert held(tmp_path / "data") == expected(VAL) and not (tmp_path / "data-heldout").exists()
    with pytest.raises(ValueError, match="neither train2014/ nor train2014.zip: .*another split by root="):
        prepare(coco)


def test_years_are_chosen_and_a_split_may_be_divided(coco, prepare, tmp_path):
    for split in ("train2014", "val2014"):
        other = split.replace("2014", "2017")
        shutil.copytree(coco / split, coco / other)
        shutil.copy(coco / f"annotations/captions_{split}.json", coco / f"captions_{other}.json")
    with pytest.raises(ValueError, match="captions of train2014, train2017, val2014, val2017: choose by root="):
        prepare(coco)
    with pytest.raises(ValueError, match="holds out val2014 itself: leave heldout=1 out"):
        prepare(coco, "root=2014", "heldout=1")
    prepare(coco, "root=2017")
    assert held(tmp_path / "data-heldout") == expected(VAL)
    prepare(coco, "root=train2014", "heldout=1", f"out={tmp_path / 'split'}")
    both = held(tmp_path / "split") + held(tmp_path / "split-heldout")
    assert sorted(both) == expected(TRAIN) and len(held(tmp_path / "split-heldout")) == 1


def edit(change):
    """A function that changes the parsed captions of train2014."""

    def act(coco):
        path = coco / "annotations/captions_train2014.json"
        tree = read_json(path)
        change(tree)
        write_json(path, tree)

    return act


def cut(coco):
    path = coco / "annotations/captions_train2014.json"
    path.write_text(path.read_text()[:-40])


DAMAGED = {
    "cut short": (cut, "captions_train2014.json is damaged, or no captions file of MS-COCO"),
    "no annotations": (edit(lambda tree: tree.pop("annotations")), "captions_train2014.json .*it has no 'annotations'"),
    "no words": (edit(lambda tree: tree["annotations"][0].update(caption=None)), "captions_train2014.json is damaged"),
    "no text": (edit(lambda tree: tree["annotations"][0].update(caption="\ud83d")), "json is damaged, .*surrogates"),
    "not listed": (edit(lambda tree: tree["images"].pop()), "pictures that it does not list, by their ids: 9"),
    "listed twice": (edit(lambda tree: tree["images"].append(tree["images"][0])), "it lists a picture twice"),
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_damaged_captions_are_named(coco, fault):
    spoil, shown = DAMAGED[fault]
    spoil(coco)
    with pytest.raises(ValueError, match=shown):
        find_photos(coco)


def test_what_does_not_go_together_is_named_or_left_out(coco, prepare, tmp_path):
    """A picture that is not listed, one without captions or with a blank one, captions without a picture."""
    (coco / "train2014/stray.jpg").write_bytes(picture(1))
    (coco / "train2014" / coco_name("train2014", 30)).unlink()

    def change(tree):
        notes = [note for note in tree["annotations"] if note["image_id"] != 25]
        tree["annotations"] = [*notes, {"image_id": 25, "id": 1, "caption": " \n"}]

    edit(change)(coco)
    names = ["train2014/stray.jpg", *(f"train2014/{coco_name('train2014', number)}" for number in (25, 30))]
    with pytest.raises(ValueError, match="files that can't be used, 3 in all") as refused:
        prepare(coco)
    assert all(f"{name}: {what}" in str(refused.value) for name, what in zip(names, ("no", "no", "a caption: the pic")))
    assert not list(tmp_path.glob("*data*"))
    prepare(coco, "on_error=skip")
    assert held(tmp_path / "data") == expected({9: TRAIN[9]}) and held(tmp_path / "data-heldout") == expected(VAL)
    left_out = read_json(tmp_path / "data/report.json")["left_out"]
    assert sorted(name for name, _ in left_out) == sorted(names)


def test_a_damaged_picture_takes_its_captions_with_it(coco, prepare, tmp_path):
    """Also where it stops the work: what is done stays, and without the picture the work goes on."""
    (coco / "train2014" / coco_name("train2014", 9)).write_bytes(picture(9)[:50])
    with pytest.raises(ValueError, match="(?s)damaged pictures, 1 in all.*000000000009.jpg"):
        prepare(coco)
    done = times(tmp_path.glob(".data*/done/*"))
    prepare(coco, "on_error=skip", f"out={tmp_path / 'anew'}")
    (coco / "train2014" / coco_name("train2014", 9)).unlink()
    assert len(done) == 3 and done == times(done)
    prepare(coco, "on_error=skip")
    rest = {number: lines for number, lines in TRAIN.items() if number != 9}
    assert held(tmp_path / "data") == held(tmp_path / "anew") == expected(rest)
    assert held(tmp_path / "data-heldout") == expected(VAL)


def test_stopped_it_goes_on_with_the_captions_of_now(coco, prepare, tmp_path, monkeypatch):
    prepare(coco, f"out={tmp_path / 'whole'}")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(encode_photos, "add_captions", raising(KeyboardInterrupt))
        prepare(coco)
    text = prepare(coco)
    assert "0 of 2 shards" in text and "0 of 1 shards" in text
    for part in ("", "-heldout"):
        made, whole = (contents(tmp_path / f"{out}{part}") for out in ("data", "whole"))
        assert made.keys() == whole.keys() and all(made[name] == whole[name] for name in made if name != "index.json")
        assert made["index.json"].replace(b"../data", b"../whole") == whole["index.json"]
    edit(lambda tree: tree["annotations"][0].update(caption="a green apple"))(coco)
    with pytest.raises(FileExistsError, match="data exists already"):  # not "is finished": it has other captions
        prepare(coco)
    shutil.move(tmp_path / "data", tmp_path / "before")
    shutil.move(tmp_path / "data-heldout", tmp_path / "before-heldout")
    prepare(coco)
    assert held(tmp_path / "data")[0] == (9, ["a green apple", "fruit"])


# ------------------------------------------------------------------------------- text beside pictures


def put(folder, number: int, captions: list[str] | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{number:03d}.png").write_bytes(picture(number))
    if captions is not None:
        (folder / f"{number:03d}.txt").write_text("\n".join(captions) + "\n\n", encoding="utf-8-sig")


LINES = {number: [words.replace("\n", " ") for words in lines] for number, lines in TRAIN.items()}
LINES[9][0] = "a red\u2028apple"  # which is no end of a line


def packed(folder, kind: str = "zip") -> str:
    return shutil.make_archive(str(folder.parent / "a"), kind, folder)


@pytest.mark.parametrize("kind", ["folder", "tar", "zip"])
@pytest.mark.parametrize("deep", ["", "a/b"], ids=["flat", "deep"])
def test_text_files_beside_pictures_are_their_captions(prepare, tmp_path, kind, deep):
    for number, lines in LINES.items():
        put(tmp_path / "photos" / deep, number, lines)
    put(tmp_path / "photos", 200, ["outside"])
    (tmp_path / "photos" / deep / "009.json").write_text("{}")  # what else has a picture's name belongs to it
    prepare(tmp_path / "photos" if kind == "folder" else packed(tmp_path / "photos", kind))
    outside = [(200, ["outside"])]  # a/b/009 comes behind 200, 009 before it
    assert held(tmp_path / "data") == (outside + expected(LINES) if deep else expected(LINES) + outside)
    assert LatentDataset(tmp_path / "data").latents.classes == ("all",)


def test_class_folders_and_labels_files_stay_classes(tmp_path):
    for number, name in ((9, "ant"), (25, "bee"), (30, "bee")):
        put(tmp_path / "photos" / name, number, LINES[number])
    photos = find_photos(tmp_path / "photos")
    assert photos.classes == ("ant", "bee") and photos.labels.tolist() == [0, 1, 1]
    assert photos.captions == [lines for _, lines in expected(LINES)]
    (tmp_path / "photos/preview.png").write_bytes(picture(31))  # without a caption, it is no reason for one class
    assert find_photos(tmp_path / "photos").classes == ("ant", "bee")
    (tmp_path / "photos/preview.png").unlink()
    flat = tmp_path / "photos/bee"
    (flat / "labels.csv").write_text("file,label\n025.png,3\n030.png,1\n")
    photos = find_photos(flat)
    assert photos.labels.tolist() == [3, 1] and photos.captions == [lines for _, lines in expected(LINES)][1:]
    without = find_photos(flat, captions="none")
    assert without.captions is None and without.names == photos.names and not without.faults
    (flat / "labels.csv").unlink()
    for text in flat.parent.rglob("*.txt"):
        text.rename(text.with_stem(f"other {text.stem}"))  # which is no picture's, and so no caption
    photos = find_photos(flat.parent)
    assert photos.captions is None and len(photos.faults) == 3 and photos.labels.tolist() == [0, 1, 1]


def test_texts_and_pictures_that_do_not_go_together_are_named(prepare, tmp_path):
    for number, lines in LINES.items():
        put(tmp_path / "photos", number, lines)
    put(tmp_path / "photos", 40)
    put(tmp_path / "photos", 41, [" "])
    put(tmp_path / "photos", 42, ["x"])
    (tmp_path / "photos/042.txt").write_bytes("Väse".encode("latin-1"))
    (tmp_path / "photos/043.txt").write_text("a picture that was removed")
    faults = ["040.png: no caption: there is no text file of its name", "041.png: no caption: 041.txt is blank"]
    faults += ["042.png: no caption: 042.txt is no UTF-8 text", "043.txt: a caption: there is no picture of its name"]
    with pytest.raises(ValueError, match="files that can't be used, 4 in all") as refused:
        prepare(tmp_path / "photos")
    assert all(fault in str(refused.value) for fault in faults)
    prepare(tmp_path / "photos", "on_error=skip")
    assert held(tmp_path / "data") == expected(LINES)
    report = read_json(tmp_path / "data/report.json")
    assert [name for name, _ in report["left_out"]] == ["040.png", "041.png", "042.png", "043.txt"]
    rows = "".join(f"{path.name},0\n" for path in (tmp_path / "photos").glob("*.png"))
    (tmp_path / "all.csv").write_text(f"file,label\n{rows}")
    given = ("captions=none", "on_error=skip", f"labels={tmp_path / 'all.csv'}", f"out={tmp_path / 'b'}")
    prepare(tmp_path / "photos", *given)
    assert len(LatentDataset(tmp_path / "b")) == 6 and "captions" not in read_index(tmp_path / "b")


# -------------------------------------------------------------------------- webdatasets, zips


@pytest.fixture
def webdataset():
    return pytest.importorskip("webdataset", reason="pip install -r requirements-test.txt")


@pytest.mark.parametrize("how", ["", "{00000..00001}.tar", "*.tar", "root"])
def test_webdatasets_are_read_as_they_were_written(webdataset, prepare, tmp_path, how):
    (tmp_path / "wds").mkdir()
    with webdataset.ShardWriter(str(tmp_path / "wds/%05d.tar"), maxcount=2, verbose=0) as tars:
        for number, lines in LINES.items():
            tars.write({"__key__": f"{number:09d}", "png": picture(number), "txt": "\n".join(lines), "json": {}})
    (tmp_path / "wds/00000.parquet").touch()  # img2dataset's tables and statistics beside the tars
    (tmp_path / "wds/00000_stats.json").write_text("{}")
    source, given = (tmp_path, ["root=wds"]) if how == "root" else (tmp_path / "wds" / how, [])
    out = tmp_path.with_name(f"{tmp_path.name}-made")
    prepare(f"'{source}'", *given, f"out={out}")
    assert held(out) == expected(LINES) and LatentDataset(out).latents.classes == ("all",)


@pytest.mark.parametrize("how", ["{0..1}/00000.tar", "*/00000.tar"])
def test_tars_of_one_name_in_several_folders_are_all_read(webdataset, tmp_path, how):
    for folder, (number, lines) in enumerate(LINES.items()):
        (tmp_path / "wds" / str(folder)).mkdir(parents=True)
        with webdataset.TarWriter(str(tmp_path / "wds" / str(folder) / "00000.tar")) as tar:
            tar.write({"__key__": "000", "png": picture(number), "txt": "\n".join(lines)})
    photos, some = find_photos(tmp_path / "wds" / how), list(LINES)[: 2 if "{" in how else 3]
    assert photos.names == [f"{folder}/00000/000.png" for folder in range(len(some))]
    assert [photos.read(i) for i in range(len(some))] == [picture(number) for number in some]
    assert photos.captions == [lines for _, lines in expected(LINES)][: len(some)]


def test_tars_without_captions_have_no_classes(webdataset, tmp_path):
    (tmp_path / "wds").mkdir()
    with webdataset.TarWriter(str(tmp_path / "wds/0.tar")) as tar:
        tar.write({"__key__": "1", "png": picture(1), "cls": 3})
    with pytest.raises(ValueError, match="a tar's name is no class"):
        find_photos(tmp_path / "wds")
    with pytest.raises(ValueError, match="root=val is .* holds 1 tars: source=.*/wds/0.tar"):
        find_photos(tmp_path / "wds", root="val")
    shutil.copy(tmp_path / "wds/0.tar", tmp_path / "wds/1.tar")
    with pytest.raises(ValueError, match="root=val is of .* named itself, but .* holds 2 tars: source=…/val[*].tar"):
        find_photos(tmp_path / "wds", root="val")
    (tmp_path / "wds/1.tar").unlink()
    for pattern in ("{0..1}.tar", "x*.tar"):
        with pytest.raises(FileNotFoundError, match="1.tar|x\\*.tar is not there"):
            find_photos(tmp_path / "wds" / pattern)


def test_a_zip_is_the_folder_it_was_made_of(tmp_path):
    for number, name in ((9, "ant"), (25, "bee"), (30, "bee")):
        put(tmp_path / "photos/train" / name, number)
    path = packed(tmp_path / "photos")
    photos, same = (find_photos(source, root="train") for source in (path, tmp_path / "photos"))
    assert (photos.names, photos.classes) == (same.names, same.classes)
    again = pickle.loads(pickle.dumps(photos.read))  # as it is handed to a reading process
    assert [again(i) for i in range(3)] == [photos.read(i) for i in range(3)] == [picture(n) for n in (9, 25, 30)]


def test_a_forked_process_opens_a_zip_anew(tmp_path, monkeypatch):
    """Else two would move one another's place in the file."""
    put(tmp_path / "photos/ant", 9)
    photos, opened = find_photos(packed(tmp_path / "photos")), []
    whole = zipfile.ZipFile
    monkeypatch.setattr(zipfile, "ZipFile", lambda path: opened.append(path) or whole(path))
    for process in (1, 1, 2):
        monkeypatch.setattr("os.getpid", lambda process=process: process)
        assert photos.read(0) == picture(9)
    assert len(opened) == 2


def test_a_damaged_picture_in_a_zip_is_named(prepare, tmp_path):
    for number in TRAIN:
        put(tmp_path / "photos/ant", number)
    path = packed(tmp_path / "photos")
    with zipfile.ZipFile(path) as opened:
        at = opened.getinfo("ant/025.png").header_offset + 60
    content = bytearray(open(path, "rb").read())
    content[at : at + 20] = bytes(20)
    open(path, "wb").write(content)
    with pytest.raises(ValueError, match=r"(?s)1 in all.*ant/025.png can't be read as a picture \(damaged in a.zip"):
        prepare(path)
