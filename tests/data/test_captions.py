"""Captions beside latents and their text, against arrays that were written by hand; draws against a naive count."""

import pickle
import shutil
import threading
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import get_args

import numpy as np
import pytest
import torch
from conftest import CPU, assert_refused, contents, names_in, write_json

from tread.data import captions, section_writer
from tread.data.captions import add_captions, parse_captions, read_captions
from tread.data.columns import TextSpec
from tread.data.dataset import LatentDataset
from tread.data.index import read_index
from tread.data.latents import LatentSpec
from tread.data.loader import Loader
from tread.data.section_writer import TextWriter
from tread.data.shards import Placement
from tread.data.writer import write_dataset
from tread.models.conditions import Text
from tread.runtime.distributed import split_batch

MEANING = LatentSpec(shape=(2, 4, 4), classes=("ant", "bee"), autoencoder="pixels", views=2)
COUNT, T = 23, 5
COUNTS = [1 + number % 4 for number in range(COUNT)]
CAPTIONS = [[f"caption {j} of {i}, “é”" for j in range(count)] for i, count in enumerate(COUNTS)]
TOTAL = sum(COUNTS)
FIRSTS = np.cumsum([0, *COUNTS])
WORDS = TextSpec("words", "hash", T, None, None, ("<begin>", "<unknown>", *map(str, range(TOTAL))))
FROZEN = TextSpec("a/frozen one", None, T, 8, 6)


def encoded(spec: TextSpec) -> Text:
    """Text whose second token says which caption it is."""
    rng = np.random.default_rng(1)
    mask = torch.arange(T) < torch.from_numpy(rng.integers(2, T + 1, (TOTAL, 1)))
    tokens = torch.zeros(TOTAL, T, dtype=torch.int64) if spec.width is None else torch.randn(TOTAL, T, spec.width)
    tokens[:, 1] = torch.arange(TOTAL) if spec.width is None else torch.arange(TOTAL)[:, None] / 1.0
    return Text(tokens, mask, None if spec.pooled is None else torch.randn(TOTAL, spec.pooled))


def part(text: Text, rows: object) -> Text:
    return Text(*(None if one is None else one[rows] for one in text))


def write_text(folder, spec: TextSpec, text: Text) -> TextWriter:
    """In shards of 13 captions, and batches of 5; of the empty caption row 0."""
    writer = TextWriter(folder, spec, COUNTS, 13)
    writer.begin()
    rows = [*range(TOTAL), 0]
    writer.encode(5, lambda batches: (part(text, rows[own.start : own.stop]) for own in batches), writer.missing())
    writer.publish()
    return writer


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A dataset of 23 samples in two shards, with captions and text of two encoders in other shards."""
    folder = tmp_path_factory.mktemp("made") / "data"
    stored, labels = np.random.default_rng(0).standard_normal((COUNT, 2, 2, 4, 4)), np.arange(COUNT) % 2
    write_dataset(folder, MEANING, [(stored[:20], labels[:20]), (stored[20:], labels[20:])])
    add_captions(folder, CAPTIONS)
    texts = {spec.encoder: encoded(spec) for spec in (WORDS, FROZEN)}
    for spec in (WORDS, FROZEN):
        write_text(folder, spec, texts[spec.encoder])
    return folder, texts


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made[0], tmp_path / "data")


def stored(text: Text) -> Text:
    """As it is read: numbers in float16."""
    return Text(*(part.half() if part.is_floating_point() else part for part in text if part is not None))


def same(a: Text, b: Text) -> bool:
    return all(one is other or torch.equal(one, other) for one, other in zip(a, b))


@pytest.mark.parametrize("spec", [WORDS, FROZEN], ids=["words", "frozen"])
@pytest.mark.parametrize("placement", get_args(Placement))
def test_every_placement_reads_the_text_that_was_written(made, spec, placement):
    folder, texts = made
    data, text = LatentDataset(folder, "full", placement, text=spec.encoder), texts[spec.encoder]
    expected = stored(text)
    assert data.text_spec == spec
    assert same(data.encoded.read(np.arange(TOTAL)), expected)
    assert same(data.encoded.null, part(expected, slice(1)))
    read = data.read(np.array([22, 0, 7]))  # of each picture the first caption
    assert same(read.text, part(expected, FIRSTS[[22, 0, 7]]))
    assert same(read.rows(slice(1, 2)).text, part(expected, FIRSTS[[0]]))
    assert data.captions == CAPTIONS
    with pytest.raises(IndexError, match=f"captions 0..{TOTAL}, but there are {TOTAL}"):
        data.encoded.read(np.array([0, TOTAL]))
    assert same(pickle.loads(pickle.dumps(data)).batch(0, 1, 8).text, data.batch(0, 1, 8).text)


def test_a_picture_comes_with_one_of_its_captions_all_of_them_alike_often(made):
    data, seen = LatentDataset(made[0], text="words"), Counter()
    for step in range(1200):
        batch = data.batch(0, step, 11)
        captions = batch.text.tokens[:, 1].numpy()
        assert (np.searchsorted(FIRSTS, captions, side="right") - 1 == batch.indices).all()
        seen.update(captions.tolist())
    visits = 1200 * 11 / COUNT
    for sample, count in enumerate(COUNTS):
        found = [seen[number] for number in range(FIRSTS[sample], FIRSTS[sample + 1])]
        assert np.abs(np.array(found) - visits / count).max() < 5 * np.sqrt(visits / count)  # five deviations


def test_draws_do_not_depend_on_ranks_and_micro_batches_nor_change_the_others(made):
    data, plain = LatentDataset(made[0], text="words"), LatentDataset(made[0])
    for step in (0, 1, 5):
        whole, bare = data.batch(7, step, 8), plain.batch(7, step, 8)
        assert bare.text is None
        assert np.array_equal(whole.indices, bare.indices) and torch.equal(whole.stored, bare.stored)
        for processes, at_once in ((1, 8), (2, 2), (4, 1)):
            parts = []
            for rank in range(processes):
                loader = Loader(data, 7, 8, split_batch(8, processes, rank, at_once), CPU, ahead=2)
                parts += [batch.text for batch in loader.batches(step)]
                loader.close()
            assert len(parts) == 8 // at_once
            assert torch.equal(torch.cat([text.tokens for text in parts]), whole.text.tokens)
            assert torch.equal(torch.cat([text.mask for text in parts]), whole.text.mask)
    assert not torch.equal(data.batch(7, 0, 8).text.tokens, data.batch(8, 0, 8).text.tokens)


def edited(folder, change) -> None:
    """Change a parsed index.json."""
    index = read_index(folder)
    change(index)
    write_json(folder / "index.json", index)


def spoil(folder, number: int, value: float, kind: str = "") -> None:
    file = folder / f"{FROZEN.stem}-{number:05d}{kind}.npy"
    array = np.load(file)
    array[:] = value
    np.save(file, array)


NAME = FROZEN.encoder
DAMAGE = {
    "none": (lambda f: edited(f, lambda index: index.pop("text")), rf"no text of encoder {NAME}: python \S+text.py .*"),
    "other": (lambda f: edited(f, lambda index: index["text"].pop(NAME)), f"no text of encoder {NAME}, but of words"),
    "captions": (lambda f: edited(f, lambda index: index["captions"].update(sha256="")), "is of other captions: .*"),
    "key": (lambda f: edited(f, lambda index: index["text"][NAME].pop("tokens")), "damaged.*KeyError: 'tokens'"),
    "nan": (lambda f: spoil(f, 1, np.nan), r"00001.npy, row \d+, holds numbers that are not finite"),
    "null": (lambda f: spoil(f, 5, np.inf), "00005.npy, row 0, holds numbers that are not finite"),
    "lengths": (lambda f: spoil(f, 0, T, ".lengths"), "00000.lengths.npy was changed"),
    "missing": (lambda f: (f / f"{FROZEN.stem}-00001.npy").unlink(), "00001.npy is missing, though index.json names"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_text_is_named_and_those_who_do_not_ask_do_not_meet_it(folder, kind):
    act, shown = DAMAGE[kind]
    act(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=shown):
        LatentDataset(folder, text=FROZEN.encoder)
    LatentDataset(folder)
    if kind not in ("none", "captions"):
        LatentDataset(folder, text="words")


def test_hashes_of_all_text_are_looked_at_when_asked_to(folder):
    spoil(folder, 0, 1.0)
    LatentDataset(folder, text=FROZEN.encoder)
    with pytest.raises(ValueError, match="00000.npy was changed"):
        LatentDataset(folder, "full", text=FROZEN.encoder)


def test_text_counts_where_memory_is_asked_for(folder, monkeypatch):
    """As much memory as the latents take: enough for them, and not for text besides."""
    monkeypatch.setattr("tread.data.shards.free_memory", lambda device: COUNT * 2 * 2 * 4 * 4 * 2)
    LatentDataset(folder, placement="ram")
    with pytest.raises(ValueError, match="dataset.placement=ram needs more"):
        LatentDataset(folder, placement="ram", text=FROZEN.encoder)


def test_captions_that_do_not_fit_are_refused_and_nothing_is_lost(folder):
    before = contents(folder)
    assert_refused(
        partial(add_captions, folder),
        (CAPTIONS[:-1], f"captions of 22 samples, but .* holds {COUNT}"),
        ([*CAPTIONS, ["more"]], f"captions of 24 samples, but .* holds {COUNT}"),
        ([*CAPTIONS[:4], [], *CAPTIONS[5:]], "sample 4 of .* has no caption"),
        ([*CAPTIONS[:4], "red apple", *CAPTIONS[5:]], "sample 4 .* must have a list of strings"),
        ([*CAPTIONS[:4], ["red \ud83d"], *CAPTIONS[5:]], "sample 4 .* has a caption that is no text: .*ud83d"),
        ([["other"]] * COUNT, "has other captions already: again=true replaces them"),
        error=ValueError,
    )
    assert contents(folder) == before
    add_captions(folder, CAPTIONS)  # the same ones
    LatentDataset(folder, text="words")
    add_captions(folder, [["other"]] * COUNT, again=True)
    assert LatentDataset(folder).captions[3] == ["other"]
    with pytest.raises(ValueError, match="text of words .* is of other captions"):
        LatentDataset(folder, text="words")


def test_caption_files_that_are_missing_or_changed_are_named(folder):
    file = folder / "captions.jsonl"
    file.write_text(file.read_text().replace("caption 0 of 3", "another"))
    with pytest.raises(ValueError, match="captions.jsonl was changed"):
        read_captions(folder, read_index(folder))
    file.unlink()
    with pytest.raises(FileNotFoundError, match="captions.jsonl is missing"):
        read_captions(folder, read_index(folder))
    edited(folder, lambda index: index.pop("captions"))
    with pytest.raises(ValueError, match="has no captions: python scripts/prepare_text.py dataset="):
        read_captions(folder, read_index(folder))


def test_captions_are_read_from_lines(tmp_path):
    (tmp_path / "a.txt").write_text("a red apple, cut open\nça “ira”\n")
    (tmp_path / "a.jsonl").write_text('["one", "two"]\n"three"\n')
    for mark in ("", "\ufeff"):  # which some editors put before the first line
        for file in (tmp_path / "a.txt", tmp_path / "a.jsonl"):
            file.write_text(mark + file.read_text(), newline="\r\n" if mark else None)
        assert list(parse_captions(tmp_path / "a.txt")) == [["a red apple, cut open"], ["ça “ira”"]]
        assert list(parse_captions(tmp_path / "a.jsonl")) == [["one", "two"], ["three"]]
    for name, content, message in (
        ("b.jsonl", b'["one"]\n["two"\n', "b.jsonl, line 2, is no JSON"),
        ("b.jsonl", b'["one", 2]\n', "b.jsonl, line 1, has captions"),
        ("b.txt", b"one\n\nthree\n", "b.txt, line 2, has a blank caption"),
        ("b.txt", b"one\n\xff\n", "b.txt, line 2, is no UTF-8"),
        ("b.csv", b"one\n", "b.csv must be a .jsonl file"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            list(parse_captions(tmp_path / name))
    with pytest.raises(FileNotFoundError, match="No such file"):
        list(parse_captions(tmp_path / "none.txt"))


def test_text_that_is_not_what_was_said_is_not_written(made, folder):
    writer, text = TextWriter(folder, FROZEN, COUNTS, 13), part(encoded(FROZEN), slice(13))
    writer.begin(again=True)
    for wrong, message in (
        (text._replace(tokens=text.tokens[..., :7]), "but must have"),
        (text._replace(pooled=None), "but must have"),
        (text._replace(tokens=text.tokens * 1e6), "not finite in float16"),
        (text._replace(mask=text.mask.flip(1)), "must begin with its words"),
        (text._replace(mask=text.mask & False), "must begin with its words, at least one"),
    ):
        with pytest.raises(ValueError, match=message):
            writer.write(0, [wrong])
    with pytest.raises(OSError, match="shards .* are missing"):
        writer.publish()
    with pytest.raises(ValueError, match="each needing a count of captions above 0"):
        TextWriter(folder, FROZEN, [0] * COUNT)
    kept = LatentDataset(folder, text=FROZEN.encoder).encoded.read(np.arange(TOTAL))
    assert torch.equal(kept.mask, made[1][FROZEN.encoder].mask)


def test_sections_that_are_published_at_the_same_time_are_both_kept(folder, monkeypatch):
    """The second waits until the first, held before its index.json is written, has written it."""
    going, sync = threading.Event(), section_writer.sync
    monkeypatch.setattr(section_writer, "sync", lambda place: (going.wait(20), sync(place)))
    specs = [TextSpec(name, "hash", T, 8, 6) for name in ("one", "other")]
    threads = [threading.Thread(target=write_text, args=(folder, spec, encoded(spec))) for spec in specs]
    for thread in threads:
        thread.start()
    threads[0].join(1)
    going.set()
    for thread in threads:
        thread.join()
    assert read_index(folder)["text"].keys() >= {"one", "other"}
    write = captions.write_whole
    last = threading.Thread(target=write_text, args=(folder, replace(specs[0], encoder="last"), encoded(specs[0])))
    monkeypatch.setattr(captions, "write_whole", lambda *given: (last.start(), last.join(0.5), write(*given)))
    add_captions(folder, [["other"]] * COUNT, again=True)
    last.join()
    assert read_index(folder)["text"].keys() >= {"one", "other", "last"} and names_in(folder) >= {"captions.jsonl"}
    monkeypatch.setattr(captions, "write_whole", None)
    add_captions(folder, [["other"]] * COUNT)  # the same: nothing is written


def test_work_that_was_stopped_goes_on_and_other_work_is_not_lost(folder):
    spec = TextSpec("later", "hash", T, 8, 6)
    text, writer = encoded(spec), TextWriter(folder, spec, COUNTS, 13)
    writer.begin()
    writer.write(1, [part(text, slice(13, 26))])
    other = TextWriter(folder, TextSpec("later", "other hash", T, 8, 6), COUNTS, 13)
    with pytest.raises(ValueError, match="(?s)unfinished work of another .*fingerprint: hash there, other hash here"):
        other.begin()
    assert writer.missing() == [0, *range(2, len(writer.ranges))]
    write_text(folder, spec, text)
    assert same(LatentDataset(folder, "full", text="later").encoded.read(np.arange(TOTAL)), stored(text))
    assert writer.is_finished() and not (folder / ".text-later.unfinished").exists()
    with pytest.raises(ValueError, match="holds other text of later: again=true(?s:.*)fingerprint: hash there, other"):
        other.is_finished()
    index = read_index(folder)
    del index["text"]["later"]["shards"]
    write_json(folder / "index.json", index)
    with pytest.raises(ValueError, match="index.json is damaged"):
        writer.is_finished()
    assert not writer.is_finished(again=True)
    write_text(folder, spec, text)
    assert writer.is_finished()
