"""The store of shards: what is kept, what is checked; the reference is the arrays that were written."""

import resource
import signal

import numpy as np
import pytest

from tread.data.store import ShardStore, pieces_of
from tread.runtime.distributed import share_work


def store(folder, plan, count=10, size=3):
    return ShardStore(folder / "work", plan, pieces_of(range(count), size))


def fill(parts, numbers):
    for number in numbers:
        parts.keep(number, {"x": np.array(parts.ranges[number], dtype=np.float32)[:, None]}, seconds=number)


def test_work_goes_on_with_what_is_missing(tmp_path):
    parts = store(tmp_path, {"seed": 0})
    parts.begin()
    assert [list(rows) for rows in parts.ranges] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert parts.missing() == [0, 1, 2, 3]
    fill(parts, [0, 2])
    again = store(tmp_path, {"seed": 0})
    again.begin()
    assert again.missing() == [1, 3]
    again.share(share_work(None), "rows", lambda numbers, done: fill(again, numbers))
    again.check_complete()
    assert np.array_equal(np.concatenate(list(again.arrays("x")))[:, 0], np.arange(10))
    assert again.first("x", 5)[:, 0].tolist() == [0, 1, 2, 3, 4] and len(again.first("x", 99)) == 10
    assert again.note(2)["seconds"] == 2
    again.remove()
    assert not (tmp_path / "work").exists()


def test_damaged_shards_are_missing(tmp_path):
    parts, processes = store(tmp_path, {}, 8, 2), share_work(None)
    parts.begin()
    fill(parts, range(4))
    files = [parts.data / f"x-0000{number}.npy" for number in range(4)]
    content = bytearray(files[1].read_bytes())
    content[-1] ^= 1
    files[1].write_bytes(content)
    files[2].unlink()
    (parts.done / "00003.json").write_text('{"fil')
    assert parts.missing() == [] and parts.missing(processes) == [1, 2, 3]
    with pytest.raises(OSError, match=r"shards \[1, 2, 3\] of .*work are missing"):
        parts.check_complete(processes)
    parts.share(processes, "rows", lambda numbers, done: fill(parts, numbers), verify=True)
    assert parts.missing(processes) == []


@pytest.mark.parametrize("plan, n", [({"seed": 0}, 10), ({"seed": 1}, 12), ({"seed": 1, "count": 10, "size": 3}, 10)])
def test_other_work_is_refused_or_discarded_and_never_mixed(tmp_path, plan, n):
    """The last plan is as earlier versions wrote it."""
    store(tmp_path, {"seed": 0}).begin()
    (tmp_path / "work/data/.x-00000.npy.partial").write_text("half")  # of a process that was killed
    first = store(tmp_path, {"seed": 1})
    first.begin()  # where no shard was made, nothing is lost
    assert not list(tmp_path.rglob(".*.partial"))
    fill(first, [0, 1])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    other = store(tmp_path, plan, n)
    with pytest.raises(ValueError, match="unfinished work of another kind(?s:.*) there, .* here"):
        other.begin()
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    other.begin(again=True)
    assert other.missing() == list(range(len(other.ranges))) and not any(other.data.iterdir())


def test_a_full_disk_leaves_no_shard(tmp_path):
    parts = store(tmp_path, {}, 4, 2)
    parts.begin()
    fill(parts, [0])
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="x-00001.npy could not be written.*What was done before is kept"):
            parts.keep(1, {"x": np.zeros((2, 1000))})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert parts.missing() == [1] and not list(parts.data.glob("*00001*"))
