"""Work in parts: what is kept, what is checked; the reference is the arrays that were written."""

from __future__ import annotations

import json
import resource
import signal

import numpy as np
import pytest

from tread.data.parts import PartStore


def fill(parts, numbers):
    for number in numbers:
        rows = parts.ranges[number]
        parts.write(number, {"x": np.arange(rows.start, rows.stop, dtype=np.float32)[:, None]}, seconds=number)


def test_work_goes_on_with_what_is_missing(tmp_path):
    parts = PartStore(tmp_path / "work", {"seed": 0}, count=10, size=3)
    parts.begin()
    assert [list(rows) for rows in parts.ranges] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert parts.missing() == [0, 1, 2, 3]
    fill(parts, [0, 2])
    again = PartStore(tmp_path / "work", {"seed": 0}, count=10, size=3)
    again.begin()
    assert again.missing() == [1, 3]
    fill(again, again.missing())
    assert np.array_equal(np.concatenate(list(again.arrays("x")))[:, 0], np.arange(10))
    assert again.first("x", 5)[:, 0].tolist() == [0, 1, 2, 3, 4] and len(again.first("x", 99)) == 10
    assert again.info(2)["seconds"] == 2
    again.remove()
    assert not (tmp_path / "work").exists()


def test_damaged_parts_are_missing(tmp_path):
    parts = PartStore(tmp_path / "work", {}, count=8, size=2)
    parts.begin()
    fill(parts, range(4))
    content = bytearray((tmp_path / "work/part-00001/x.npy").read_bytes())
    content[-1] ^= 1
    (tmp_path / "work/part-00001/x.npy").write_bytes(content)
    (tmp_path / "work/part-00002/x.npy").unlink()
    (tmp_path / "work/part-00003/info.json").write_text('{"fil')
    assert parts.missing() == [1, 2, 3]
    fill(parts, parts.missing())
    assert parts.missing() == []


def test_other_work_in_the_folder_is_begun_anew(tmp_path):
    parts = PartStore(tmp_path / "work", {"seed": 0}, count=4, size=2)
    parts.begin()
    fill(parts, [0, 1])
    for plan, count in (({"seed": 1}, 4), ({"seed": 0}, 6)):
        other = PartStore(tmp_path / "work", plan, count=count, size=2)
        other.begin()
        assert other.missing() == list(range(count // 2))
    assert json.loads((tmp_path / "work/plan.json").read_text()) == {"seed": 0, "count": 6, "size": 2}


def test_a_full_disk_leaves_no_part(tmp_path):
    parts = PartStore(tmp_path / "work", {}, count=4, size=2)
    parts.begin()
    fill(parts, [0])
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="part-00001 could not be written.*What was done before is kept"):
            parts.write(1, {"x": np.zeros((2, 1000))})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert parts.missing() == [1]
