"""scripts/prepare_text.py against its encoders run by hand on each caption, and the same work done in one go."""

import shutil

import numpy as np
import prepare_text
import pytest
import torch
from conftest import ROOT, contents, launch_door, write_json
from forked import run_python
from tiny_text import save_encoder

from tread.data.captions import add_captions
from tread.data.dataset import LatentDataset
from tread.data.index import read_index
from tread.data.latents import LatentSpec
from tread.data.writer import write_dataset
from tread.encoders.language import text_encoder
from tread.preparing import encode_text

MEANING = LatentSpec(shape=(1, 4, 4), classes=("all",), autoencoder="pixels")
NAMES = ["a red apple, cut open", "woman", "a man with a red hat", "hat", "firefighter with hat"]
CAPTIONS = [[NAMES[(i + j) % 5] for j in range(1 + i % 3)] for i in range(11)]
HELD = [["a blue apple"], ["woman with hat", "apple " * 500]]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A dataset with captions, one held out from it, and three encoders."""
    folder = tmp_path_factory.mktemp("place")
    for name, captions, beside in (("train", CAPTIONS, {"heldout": "../held"}), ("held", HELD, {"train": "../train"})):
        count = len(captions)
        samples = np.random.default_rng(count).standard_normal((count, 1, 1, 4, 4))
        write_dataset(folder / name, MEANING, [(samples, np.zeros(count, dtype=np.int64))], **beside)
        add_captions(folder / name, captions)
    for kind in ("clip", "t5", "bert"):
        save_encoder(folder / kind, kind)
    return folder


@pytest.fixture
def here(place, tmp_path):
    """The datasets' copy, to be worked in; encoders stay where they are."""
    for name in ("train", "held"):
        shutil.copytree(place / name, tmp_path / name)
    return tmp_path


def prepare(here, *words: str, dataset: str = "train") -> str:
    return launch_door(prepare_text.main, "prepare_text", here, f"dataset.path={dataset}", "device=cpu", *words)


def refused(here, message: str, *words: str, dataset: str = "train") -> None:
    with pytest.raises(SystemExit) as stopped:
        prepare(here, *words, dataset=dataset)
    assert message in str(stopped.value)


@pytest.mark.parametrize("kind", ["words", "clip", "t5", "bert"])
def test_text_is_what_the_encoder_makes_of_each_caption(place, here, kind):
    name = kind if kind == "words" else str(place / kind)
    printed = prepare(here, f"encoder={name}")
    flat = [caption for own in CAPTIONS for caption in own]
    encoder, data = text_encoder(name, flat), LatentDataset(here / "train", "full", text=name)
    assert data.text_spec == encoder.spec
    assert f"11 samples, {len(flat)} captions" in printed and encoder.spec.describe() in printed
    assert "stores" in printed and printed.index("stores") < printed.index("work")
    found, expected = data.encoded.read(np.arange(len(flat))), encoder.encode(flat)
    assert torch.equal(found.mask, expected.mask)
    assert torch.allclose(found.tokens.float(), expected.tokens.float(), atol=1e-3)
    assert kind == "words" or torch.allclose(found.pooled.float(), expected.pooled.float(), atol=1e-3)
    empty = encoder.encode([""])
    assert torch.equal(data.encoded.null.tokens, empty.tokens) and torch.equal(data.encoded.null.mask, empty.mask)
    assert "train holds the same text of " in prepare(here, f"encoder={name}")


@pytest.mark.parametrize("kind", ["words", "t5"])
def test_what_is_held_out_is_encoded_alike(place, here, kind):
    name = kind if kind == "words" else str(place / kind)
    refused(here, f"has no text of encoder {name}: python scripts/prepare_text.py", f"encoder={name}", dataset="held")
    printed = prepare(here, f"encoder={name}")
    train, held = (LatentDataset(here / part, "full", text=name) for part in ("train", "held"))
    assert train.text_spec == held.text_spec and train.text_spec.tokens == 8
    assert "1 of 3 texts are cut off after 8 tokens; the longest has 501" in printed
    if kind == "words":
        assert "1 texts have words that are not in the vocabulary, which are all alike: blue" in printed
        shutil.rmtree(here / "held")
        shutil.copytree(place / "held", here / "held")
        before = train.text_spec
        prepare(here, "encoder=words", dataset="held")  # alone: by the training data's vocabulary
        assert LatentDataset(here / "held", text="words").text_spec == before
    prepare(here, f"encoder={name}", "tokens=16", "again=true")
    assert LatentDataset(here / "held", text=name).text_spec.tokens == 16
    (here / "elsewhere").mkdir()
    (here / "train").rename(here / "elsewhere/train")
    (here / "held").rename(here / "elsewhere/held")
    (here / "train").symlink_to("elsewhere/train")  # what is held out lies beside the folder, not beside the link
    assert "is not there" not in prepare(here, f"encoder={name}", "tokens=16", "again=true")
    (here / "train").unlink()
    (here / "elsewhere/train").rename(here / "train")
    (here / "elsewhere/held").rename(here / "held")
    given, before = (f"encoder={name}", "tokens=6", "again=true"), contents(here / "held")
    refused(here, "tokens is 6, but train, which held goes with, has text of 16", *given, dataset="held")
    assert contents(here / "held") == before


def test_work_that_was_stopped_goes_on_to_the_same_bytes(place, here, monkeypatch):
    words = [f"encoder={place / 'bert'}", "shard_size=4", "batch_size=3"]
    shutil.copytree(here / "train", here / "whole")
    prepare(here, *words, dataset="whole")
    before, made = contents(here / "train"), []
    write = encode_text.TextWriter.write

    def stop(writer, number, text):
        if len(made) == 2:
            raise OSError("the machine goes down")
        made.append(number)
        write(writer, number, text)

    monkeypatch.setattr(encode_text.TextWriter, "write", stop)
    refused(here, "the machine goes down", *words)
    assert contents(here / "train") == before and len(made) == 2  # until all is there the dataset is as it was
    monkeypatch.setattr(encode_text.TextWriter, "write", write)
    refused(here, "unfinished work of another kind", *words, "tokens=9")
    assert "5 of 7 shards" in prepare(here, *words)
    assert contents(here / "train") == contents(here / "whole")


def test_captions_can_be_added_and_replaced(here):
    index = read_index(here / "train")
    (here / "train/captions.jsonl").unlink()
    del index["captions"], index["heldout"]
    write_json(here / "train/index.json", index)
    refused(here, "train has no captions: python scripts/prepare_text.py dataset=train captions=", "encoder=words")
    before = contents(here / "train")
    (here / "new.txt").write_text("red hat\n" * 10)
    for words, message in (
        (["captions=new.txt"], "captions of 10 samples, but train holds 11"),
        (["captions=none.txt"], "No such file or directory: 'none.txt'"),
        (["captions=new.csv"], "must be a .jsonl file"),
    ):
        refused(here, message, "encoder=words", *words)
        assert contents(here / "train") == before
    (here / "new.txt").write_text("red hat\n" * 11)
    prepare(here, "encoder=words", "captions=new.txt")
    assert LatentDataset(here / "train", text="words").captions[10] == ["red hat"]
    prepare(here, "encoder=words", "captions=new.txt")  # the same ones
    (here / "new.jsonl").write_text('["blue hat", "hat"]\n' * 11)
    refused(here, "has other captions already: again=true replaces them", "encoder=words", "captions=new.jsonl")
    prepare(here, "encoder=words", "captions=new.jsonl", "again=true")
    (here / "train/captions.jsonl").write_text("damaged")
    prepare(here, "encoder=words", "captions=new.jsonl", "again=true")  # mends it
    data = LatentDataset(here / "train", "full", text="words")
    assert data.captions[0] == ["blue hat", "hat"] and "blue" in data.text_spec.vocabulary


def test_other_text_of_the_same_encoder_is_kept_unless_replaced(here):
    prepare(here, "encoder=words")
    before = contents(here / "train")
    refused(here, "holds other text of words: again=true", "encoder=words", "tokens=4")
    assert contents(here / "train") == before
    file = here / "train/text-words-00000.npy"
    file.write_bytes(file.read_bytes()[:-4])
    refused(here, "is truncated", "encoder=words")
    prepare(here, "encoder=words", "again=true")
    assert contents(here / "train") == before


@pytest.mark.slow
def test_two_processes_make_what_one_makes(place, here):
    words = [f"encoder={place / 't5'}", "shard_size=4", "batch_size=2", "device=cpu"]
    shutil.copytree(here / "train", here / "whole")
    prepare(here, *words, dataset="whole")
    script = [str(ROOT / "scripts/prepare_text.py"), "dataset=train", *words]
    done = run_python(*script, cwd=here, processes=2)
    assert done.returncode == 0, done.stderr
    assert contents(here / "train") == contents(here / "whole")
