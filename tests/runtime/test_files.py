"""Sizes for people, names of files, and files of tensors. The references are division by powers of 1,000, pathlib's own
joining, and safetensors."""

import hashlib
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tread.runtime import files, tensor_files
from tread.runtime.files import check_file, plain_name, size_text, whole_folder

UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


@pytest.mark.parametrize(
    "count, shown",
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.7, "1 kB"),
        (3450, "3.45 kB"),
        (999_500, "1 MB"),
        (41_990_000_000, "42 GB"),
        (5_678_000_000_000_000, "5,680 TB"),
    ],
)
def test_sizes_have_three_digits_and_a_fitting_unit(count, shown):
    assert size_text(count) == shown


def test_no_size_reads_as_nothing():
    for power in range(49):
        number, unit = size_text(2**power).replace(",", "").split()
        assert math.isclose(float(number) * UNITS[unit], 2**power, rel_tol=0.005), power


def test_where_no_file_can_be_is_said_in_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    assert check_file("new/folder/a.json") == Path("new/folder/a.json") and not list(Path("new/folder").iterdir())
    for name, said in (("new", "names a folder"), ("x/", "names a folder"), ("file/x", "file is a file, but")):
        with pytest.raises(OSError, match=f"^{name.replace('/x', '')} could not be written.*{said}"):
            check_file(name)


def test_a_name_that_leaves_the_folder_is_refused():
    for name in ("..", "", "a/b", "/a", "a/", "../a", "./a", ".", "a\\b", "C:a", 3, None):
        with pytest.raises(ValueError, match="^here/index.json names the file"):
            plain_name(name, Path("here/index.json"))


def test_a_plain_name_is_a_file_of_the_folder():
    for name in ("a", "shard-00000.npy", "..a", "a..b", ".hidden", "a b", "ä"):
        assert (Path("here") / plain_name(name, "x")).parent == Path("here")


@pytest.mark.parametrize("metadata", [None, {"said": '"ü"'}])
def test_tensors_are_written_as_by_safetensors(tmp_path, metadata):
    tensors = {"b": torch.randn(3, 4).T, "a": torch.randn(5).half(), "c": torch.tensor(3), "ä": torch.zeros(0, 3)}
    tensors |= {"d": torch.arange(5, dtype=torch.uint8)}
    digest = tensor_files.save_tensors(tmp_path / "ours", tensors, metadata)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs", metadata)
    ours = (tmp_path / "ours").read_bytes()
    assert ours == (tmp_path / "theirs").read_bytes() and digest == hashlib.sha256(ours).hexdigest()
    kinds = (torch.bfloat16, torch.float64, torch.bool, torch.int8, torch.int16, torch.int32, torch.float8_e5m2)
    tensors = {str(kind): torch.tensor([1.0, 0, 1]).to(kind) for kind in (*kinds, torch.float8_e4m3fn)}
    tensor_files.save_tensors(tmp_path / "ours", tensors)
    found = load_file(tmp_path / "ours")
    assert {name: value.dtype for name, value in found.items()} == {name: t.dtype for name, t in tensors.items()}
    assert all(torch.equal(found[name].to(torch.cfloat), each.to(torch.cfloat)) for name, each in tensors.items())


def test_all_of_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(files, "sync", lambda path: written.append((path.name, (tmp_path / "a").exists())))
    with whole_folder(tmp_path / "a") as partial:
        (partial / "b").mkdir()
        (partial / "b/c").touch()
    assert sorted(written[:-1]) == [(".a.partial", False), ("b", False), ("c", False)]
