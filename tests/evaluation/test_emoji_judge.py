"""The emoji's judge, against distances by hand; and from a run's end to fid.py, which judges its checkpoint.

The emoji here are colours in quarters, with captions: no package is needed.
"""

import csv
import itertools
import json

import numpy as np
import pytest
import torch
from conftest import launch, save_checkpoint, score
from PIL import Image

from tread.checkpoints.run_log import RunLog
from tread.data.captions import add_captions
from tread.data.dataset import LatentDataset
from tread.data.section_writer import TextWriter
from tread.data.writer import write_dataset
from tread.encoders.inception import load_inception
from tread.encoders.language import WordEncoder, make_vocabulary
from tread.evaluation.emoji_judge import Asked, EmojiSet, ask, judge_emoji, real_emoji
from tread.evaluation.metric_table import names_of, with_real
from tread.preparing.emoji import MEANING
from tread.preparing.encode_text import encoding
from tread.runtime.randomness import generator

VALUES = with_real(names_of("demo"))

WORDS = ("red", "green", "blue", "white")
CAPTIONS = {
    "train": [[f"{one} {other}", f"{other} under {one}"] for one, other in itertools.product(WORDS, WORDS[:3])],
    "heldout": [[f"{one} white"] for one in WORDS] + [["green"], ["blue"]],
}
COMPOSITIONS = 3


def draw(count: int, seed: str) -> torch.Tensor:
    """Pictures (n, 3, 32, 32) uint8 of 4×4 patches."""
    coarse = torch.randint(0, 256, (count, 3, 8, 8), generator=generator(0, 0, seed), dtype=torch.uint8)
    return coarse.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)


def prepare(folder, encoder: WordEncoder) -> None:
    for part, captions in CAPTIONS.items():
        stored = draw(len(captions), part)[:, None].numpy() / 127.5 - 1
        more = {"compositions": COMPOSITIONS} if part == "heldout" else {}
        write_dataset(folder / part, MEANING, [(stored, np.zeros(len(captions), dtype=np.int64))], **more)
        add_captions(folder / part, captions)
        writer = TextWriter(folder / part, encoder.spec, [len(own) for own in captions])
        writer.begin()
        writer.encode(16, encoding(encoder, list(itertools.chain(*captions))), writer.missing())
        writer.publish()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Emoji as dataset=emoji has them, and a run of 6 steps."""
    folder = tmp_path_factory.mktemp("emoji")
    prepare(folder / "data" / "emoji", WordEncoder(make_vocabulary(itertools.chain(*CAPTIONS["train"])), 8))
    small = ("model.patch_size=8", "eval.demo_samples=10")
    (folder / "printed").write_text(launch(folder, "model=tread_text", "dataset=emoji", "name=run", *small))
    return folder


def opened(folder) -> list[LatentDataset]:
    return [LatentDataset(folder / "data" / "emoji" / part, text="words") for part in CAPTIONS]


def judge(folder, *words: str) -> tuple[str, dict]:
    """What fid.py prints of the run's checkpoint, and fid.json; the last word is out=…"""
    printed = score(folder, "checkpoint=results/run", "steps=2", "cpu_threads=1", *words)
    return printed, json.loads((folder / words[-1].removeprefix("out=") / "fid.json").read_text())


def test_half_is_asked_of_seen_captions_and_half_of_compositions(folder):
    train, heldout = opened(folder)
    asked = ask(train, heldout, 9)
    assert asked.numbers.tolist() == [0, 3, 6, 8, 11, 12, 13, 14, 12]  # three compositions, and the first again
    assert asked.parts.tolist() == ["seen"] * 5 + ["held"] * 4
    for number, tokens in zip(asked.numbers, asked.texts.tokens):
        own = train.read(np.array([number])) if number < 12 else heldout.read(np.array([number - 12]))
        assert torch.equal(own.text.tokens[0], tokens)
    assert ask(train, None, 9).parts.tolist() == ["seen"] * 9


def test_real_emoji_are_retrieved_and_others_as_distances_by_hand_say(folder):
    train, heldout = opened(folder)
    real, asked = real_emoji(train, heldout), ask(train, heldout, 12)
    assert torch.equal(real.pictures, torch.cat([draw(12, "train"), draw(6, "heldout")]))
    shown = real.pictures[torch.from_numpy(asked.numbers)]
    found = judge_emoji(shown, asked, real)
    assert [*found] == [name for name in VALUES if "inception" not in name]
    assert all(found[f"{part}_top{rank}"] == 1 for part in ("seen", "held") for rank in (1, 5))
    pictures = (0.2 * shown + 0.8 * draw(12, "noise")).round().to(torch.uint8)  # some are retrieved, some are not
    found = judge_emoji(pictures, asked, real)
    for part in ("seen", "held"):
        for rank in (1, 5):
            hits = []
            for picture, number in zip(pictures[asked.parts == part], asked.numbers[asked.parts == part]):
                small = [
                    np.asarray(Image.fromarray(one.permute(1, 2, 0).numpy()).reduce(2), dtype=float)
                    for one in (picture, *real.pictures)
                ]
                distances = [((small[0] - one) ** 2).sum() for one in small[1:]]
                hits.append(number in np.argsort(distances)[:rank])
            assert found[f"{part}_top{rank}"] == np.mean(hits)
    assert 0 < found["seen_top1"] + found["held_top1"] < 2


def test_an_emoji_that_carries_the_caption_too_is_as_good():
    real = EmojiSet(draw(3, "three"), [["a hat"], ["crown", "A hat"], ["shoe"]])
    asked = Asked(np.array([0, 2]), np.array(["seen", "seen"]), None)
    found = judge_emoji(real.pictures[[1, 1]], asked, real)
    assert found["seen_top1"] == 0.5 and found["seen_top1_real"] == 1 and "held_top1" not in found


def test_inceptions_features_are_looked_at_where_they_are(folder, inception_file):
    train, heldout = opened(folder)
    real, asked = real_emoji(train, heldout), ask(train, heldout, 4)
    found = judge_emoji(draw(4, "other"), asked, real, load_inception(inception_file))
    assert [*found] == VALUES
    assert found["seen_top1_inception_real"] == found["held_top1_inception_real"] == 1


def test_a_run_ends_with_what_fid_says_of_its_checkpoint(folder):
    (judged,) = [record for record in RunLog(folder / "results" / "run").records() if "demo_samples" in record]
    assert judged["step"] == 6 and judged["demo_samples"] == 10
    assert "held_top5_shifted" in (folder / "printed").read_text()
    printed, record = judge(folder, "num_samples=10", "out=scores")
    values = [name for name in VALUES if name in record]
    assert len(values) == 12 and all(record[name] == judged[name] for name in values)
    assert record["counts"] == dict.fromkeys(values, 5) and "held_top1_shifted    " in printed


@pytest.mark.slow
def test_fid_judges_its_pictures(folder, inception_file):
    """By the function, of what is asked in that order; in parts, from another seed, and with Inception's features."""
    words = ("num_samples=9", "batch_size=2", "first_seed=4", "guidance=cfg", "save_samples=true", "out=guided")
    _, record = judge(folder, f"inception={inception_file}", *words)
    train, heldout = opened(folder)
    with np.load(folder / "guided" / "samples.npz") as samples:
        assert samples["arr_1"].tolist() == [4, 5, 6, 7, 8, 0, 1, 2, 3]  # of what is asked, each once
        pictures = torch.from_numpy(np.roll(samples["arr_0"], 4, axis=0)).permute(0, 3, 1, 2)
    asked, real = ask(train, heldout, 9), real_emoji(train, heldout)
    expected = judge_emoji(pictures, asked, real, load_inception(inception_file))
    assert [*expected] == VALUES and {name: record[name] for name in VALUES} == expected
    assert record["counts"] == {name: 5 if name.startswith("seen") else 4 for name in VALUES}
    (row,) = csv.DictReader((folder / "guided" / "fid.csv").open())
    assert float(row["held_top5_inception"]) == record["held_top5_inception"]
    assert "seen_top1_inception" not in judge(folder, *words)[1]  # without Inception, which is another score


def test_grids_of_training_name_their_rows_by_captions(folder):
    grid = np.asarray(Image.open(folder / "results" / "run" / "samples" / "step_0000006.png"))
    height, width = 6 * 66 - 2, 64  # of six captions that are held out, a picture each
    assert grid.shape[0] == height and grid.shape[1] > width + 40
    for row in range(6):
        assert (grid[row * 66 : row * 66 + 64, : -width - 2] < 128).any()


def test_other_networks_and_other_emoji_are_refused(folder, tmp_path, composed):
    save_checkpoint(tmp_path / "classes", composed, embedded="emoji")
    prepare(tmp_path / "data" / "emoji", WordEncoder(make_vocabulary(["other words"]), 8))
    refused = {"classes": "needs reference=", folder / "results" / "run": "data/emoji/train has other text than"}
    for run, said in refused.items():
        with pytest.raises(SystemExit, match=said):
            score(tmp_path, f"checkpoint={run}", "num_samples=2")


def test_a_class_model_on_emoji_is_not_judged(folder):
    text = launch(folder, "model=dit", "dataset=emoji", "name=classes", "train.steps=1", "eval.demo_samples=4")
    assert "eval_loss" in text and "top1" not in text
