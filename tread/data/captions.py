"""Reads and writes captions.jsonl, the captions of a dataset's samples as text (columns.py reads encoded captions).

["woman firefighter, medium skin tone", "a firefighter"]        line i: the captions of sample i, at least one
["red apple"]
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tread.data.index import check_sha256, index_lock, named_file
from tread.runtime.files import content_hash, explain_failure, write_json, write_whole

FILE = "captions.jsonl"


def add_captions(folder: Path, captions: Iterable[Sequence[str]], again: bool = False) -> None:
    """Write captions.jsonl into a dataset's folder and list it in index.json. Raises ValueError and changes nothing if
    `captions` is not as described below, or if the dataset has other captions already and `again` is False.

    folder    the folder of a finished dataset, or the attribute `data` of a DatasetWriter after its method `assemble`.
    captions  for each sample of the dataset, in order, a list or tuple of at least one caption, none of them blank.
    again     replace other captions. Text encoded from the old ones is kept, but reading it then raises ValueError.
    """
    path = folder / "index.json"
    index, captions = json.loads(path.read_text()), list(captions)
    if len(captions) != index["count"]:
        raise ValueError(f"there are captions of {len(captions):,} samples, but {folder} holds {index['count']:,}")
    for number, of_sample in enumerate(captions):
        check_captions(of_sample, f"sample {number:,} of {folder}")
    text = "".join(json.dumps(of_sample, ensure_ascii=False) + "\n" for of_sample in captions)
    entry, file = {"file": FILE, "sha256": content_hash(text)}, folder / FILE
    with index_lock(folder):
        index = json.loads(path.read_text())
        before = index.pop("captions", None)
        if before not in (None, entry) and not again:
            raise ValueError(f"{folder} has other captions already: again=true replaces them")
        if before == entry and file.exists() and content_hash(file.read_text("utf-8")) == entry["sha256"]:
            return
        write_json(path, index)  # without captions while their file changes
        with explain_failure(file):
            write_whole(file, text)
        write_json(path, {**index, "captions": entry})


def check_captions(captions: object, whose: str) -> None:
    """Raise ValueError, naming `whose`, unless `captions` lists one string or more, none blank or with surrogates."""
    if not isinstance(captions, (list, tuple)) or not all(isinstance(caption, str) for caption in captions):
        raise ValueError(f"{whose} has captions {str(captions)[:80]!r}, but must have a list of strings")
    if any("\ud800" <= sign <= "\udfff" for sign in "".join(captions)):  # half of a surrogate pair, as JSON may hold
        raise ValueError(f"{whose} has a caption that is no text: {str(captions)[:80]!a}")
    if not captions or not all(caption.strip() for caption in captions):
        raise ValueError(f"{whose} has {'a blank caption' if captions else 'no caption'}; each sample needs some")


def read_captions(folder: Path, index: dict) -> list[list[str]]:
    """Return a list of captions for each sample. `index` is the parsed index.json in `folder`. Raises ValueError if
    `index` lists no captions or their file was changed, FileNotFoundError if their file is missing."""
    entry = index.get("captions")
    if entry is None:
        how = f"python scripts/prepare_text.py dataset={folder} captions=<file> encoder=…"
        raise ValueError(f"{folder} has no captions: {how} adds them from a file with a line per sample")
    file = named_file(folder, entry["file"])
    check_sha256(file, entry["sha256"])
    return list(parse_captions(file))


def parse_captions(file: Path) -> Iterable[list[str]]:
    """Yield a list of captions for each line, which stands for one sample: in a .txt file, a line is one caption; in a
    .jsonl file, a JSON string or list of strings. Raises ValueError for a malformed line or another suffix."""
    if file.suffix not in (".jsonl", ".txt"):
        raise ValueError(f"{file} must be a .jsonl file, with JSON for each sample, or .txt, with a caption per line")
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{file}, line {number:,},"
            try:
                text = line.decode("utf-8-sig").rstrip("\r\n")  # editors may begin a file with a byte-order mark
                entry = text if file.suffix == ".txt" else json.loads(text)
            except ValueError as error:
                kind = "JSON" if file.suffix == ".jsonl" else "UTF-8"
                raise ValueError(f"{where} is no {kind} ({error}): {line[:60]!r}") from error
            captions = [entry] if isinstance(entry, str) else entry
            check_captions(captions, where)
            yield captions
