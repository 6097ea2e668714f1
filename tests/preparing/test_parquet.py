"""Pictures in parquet files, against the rows that Hugging Face's `datasets` wrote into them."""

import os
import sys

import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image
from torch.utils.data import DataLoader

from tread.preparing import parquet
from tread.preparing.encode_photos import Crops
from tread.preparing.images import Crop, centre_crop, read_rgb
from tread.preparing.sources import find_photos

CAPTIONS = [["a red apple", "fruit"], ["a giraffe"], ["flowers", "a vase", "Blumen"], ["shoes"], ["a dog"]]


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


def test_it_holds_the_pictures_classes_and_split_that_datasets_wrote(tmp_path, monkeypatch):
    files = {"train-00000-of-00002": 5, "train-00001-of-00002": 4, "validation-00000-of-00001": 3}
    *train, other = [list(write_parquet(tmp_path / f"data/{file}.parquet", n)) for file, n in files.items()]
    for root, rows in (("train", sum(train, [])), ("validation", other)):
        photos = find_photos(tmp_path, root)
        assert photos.classes == ("wasp", "bee") and photos.labels.tolist() == [row["label"] for row in rows]
        assert len(photos.names) == len(set(photos.names)) == len(rows)
        for index in np.random.default_rng(0).permutation(len(rows)):  # row groups back and forth
            assert same(photos.read(int(index)), rows[index]["image"])
    for root in (None, "test"):
        with pytest.raises(ValueError, match="holds the splits train, validation; choose one by root="):
            find_photos(tmp_path, root)
    crops, rows = Crops(find_photos(tmp_path, "train"), Crop(16)), sum(train, [])
    read = DataLoader(crops, sampler=range(len(rows)), batch_size=None, num_workers=2)
    for (pixels, *_), row in zip(read, rows, strict=True):
        assert np.array_equal(pixels.permute(1, 2, 0), centre_crop(row["image"], 16))
    os.truncate(tmp_path / "data/train-00001-of-00002.parquet", 999)
    with pytest.raises(ValueError, match="train-00001-of-00002.parquet is damaged or no parquet file"):
        find_photos(tmp_path, "train")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match="pyarrow; pip install -r requirements-import.txt"):
        find_photos(tmp_path, "train")


def test_numbered_files_are_one_split(tmp_path):
    for name in ("0000.parquet", "0001.parquet"):  # as the Hub names the files that it converts
        write_parquet(tmp_path / name)
    assert len(find_photos(tmp_path)) == 10
    for number in range(2):  # as older ones of `datasets` were named
        name = f"train-0000{number}-of-00002-566cc9b19d7203f{number}.parquet"
        write_parquet(tmp_path / "hashed" / name)
    assert len(find_photos(tmp_path / "hashed", "train")) == 10
    with pytest.raises(ValueError, match="labels=a.csv goes with files of pictures"):
        find_photos(tmp_path, labels="a.csv")


@pytest.mark.parametrize("case", ["lists", "a named one", "one each"])
def test_captions_stand_in_a_column(tmp_path, case):
    columns, chosen = {
        "lists": ({"captions": CAPTIONS}, None),
        "a named one": ({"prompts": CAPTIONS, "text": ["x"] * 5}, "prompts"),
        "one each": ({"text": [lines[0] for lines in CAPTIONS]}, None),
    }[case]
    rows = write_parquet(tmp_path / "train.parquet", label=None, **columns)
    photos = find_photos(tmp_path, captions=chosen)
    assert photos.captions == ([lines[:1] for lines in CAPTIONS] if case == "one each" else CAPTIONS)
    assert photos.classes == ("all",) and all(same(photos.read(i), row["image"]) for i, row in enumerate(rows))


def test_captions_that_are_not_clear_are_refused(tmp_path):
    texts = {"caption": ["a", " ", "c", "d", "e"], "text": ["a", None, "c", "d", "e"]}
    rows = write_parquet(tmp_path / "train.parquet", **texts)
    with pytest.raises(ValueError, match="columns caption, text: choose one by captions="):
        find_photos(tmp_path)
    with pytest.raises(ValueError, match="captions=prompt: .* has the columns of words caption, text"):
        find_photos(tmp_path, captions="prompt")
    for column in texts:
        photos = find_photos(tmp_path, captions=column)
        assert photos.faults == [("train.parquet:1", "no caption: the row is blank")]
        assert photos.captions == [["a"], ["c"], ["d"], ["e"]] and photos.labels.tolist() == [0, 0, 1, 0]
        assert same(photos.read(1), rows[2]["image"])
    photos = find_photos(tmp_path, captions="none")
    assert photos.captions is None and len(photos) == 5
    (tmp_path / "ant").mkdir()
    with pytest.raises(ValueError, match="captions=x would be a column of parquet files"):
        find_photos(tmp_path / "ant", captions="x")


def test_a_whole_file_as_one_row_group_of_plain_bytes(tmp_path):
    """As pandas writes it: pictures as bytes, read a block at a time, forwards and back."""
    stored = [f"picture {number}".encode() for number in range(200)]
    table = pyarrow.table({"image": stored, "label": [0] * 200})
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    photos = find_photos(tmp_path)
    assert [photos.read(index) for index in (0, 63, 64, 199, 70, 3)] == [stored[i] for i in (0, 63, 64, 199, 70, 3)]
    assert len(parquet._Group(os.getpid(), tmp_path / "train.parquet", 0, "image").rows) == 64


def test_a_table_beside_pictures_is_no_source(tmp_path):
    """img2dataset's files: pictures with text files beside them in folders, tables and statistics beside those."""
    (tmp_path / "00000").mkdir()
    for number, picture in enumerate(pixels(3)):
        picture.save(tmp_path / f"00000/{number}.jpg")
        (tmp_path / f"00000/{number}.txt").write_text(f"caption {number}")
    write_parquet(tmp_path / "00000.parquet", image=None, url=list("abcde"))
    (tmp_path / "00000_stats.json").write_text("{}")
    photos = find_photos(tmp_path)
    assert photos.captions == [["caption 0"], ["caption 1"], ["caption 2"]] and not photos.faults


FAULTS = {  # columns, what the message says
    "no pictures": ({"image": None}, "has the columns label, but needs one Image column, or 'image'"),
    "no labels": ({"label": None}, "has the columns image, but needs one ClassLabel column, or 'label'"),
    "names for labels": ({"label": list("abcde")}, "source.*label"),
    "a label missing": ({"label": [0, 1, None, 1, 0]}, "with 1 empty rows"),
    "a label of no class": ({"label": [0, 1, -1, 1, 0]}, r"source: labels lie in -1\.\.1"),
    "a row without a picture": ({"image": [None, *pixels(4)]}, "the row holds no picture"),
    "pictures elsewhere": ({"image": [{"bytes": None, "path": "a.png"}] * 5}, "a file that is not in the parquet"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_clear_is_refused(tmp_path, fault):
    columns, shown = FAULTS[fault]
    write_parquet(tmp_path / "source/train.parquet", **columns)
    (tmp_path / "source/.cache").mkdir()  # of a download from the hub
    with pytest.raises((ValueError, OSError), match=shown):
        find_photos(tmp_path / "source").read(0)
