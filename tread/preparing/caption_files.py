"""Captions that lie beside pictures: a.txt with a.jpg, in folders, zips and tars.

Each line that is not blank is a caption. Faults are collected, to be named all at once.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Sequence

from tread.preparing.archives import Store
from tread.preparing.photos import Faults, is_picture


def cleaned(captions: Sequence[str]) -> list[str]:
    """Captions with single blanks; blank ones are left out."""
    return [words for caption in captions if (words := " ".join(caption.split()))]


def captions_hash(captions: Sequence[Sequence[str]]) -> str:
    """Hex sha256 of all captions."""
    digest = hashlib.sha256()
    for sample_captions in captions:
        digest.update(json.dumps(sample_captions).encode() + b"\n")
    return digest.hexdigest()


def split_texts(names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The names but for text files and other files of a picture's name, and {name without its suffix: text file}.

    If no text file has a picture's name, all names and {}.
    """
    pictures = {_stem(name) for name in names if is_picture(name)}
    texts = {_stem(name): name for name in names if name.lower().endswith(".txt")}
    if not pictures & texts.keys():
        return list(names), {}
    beside = {*texts.values(), *(name for name in names if _stem(name) in pictures)}
    return [name for name in names if is_picture(name) or name not in beside], texts


def read_texts(store: Store, prefix: str, pictures: Sequence[str], texts: dict[str, str]) -> tuple[list, Faults]:
    """For each picture its captions, or why it has none; and the texts that belong to no picture."""
    captions: list[list[str] | str] = []
    for name in pictures:
        text = texts.get(_stem(name))
        captions.append("there is no text file of its name" if text is None else _lines(store, prefix, text))
    stems = set(map(_stem, pictures))
    return captions, [(text, "there is no picture of its name") for stem, text in texts.items() if stem not in stems]


def _lines(store: Store, prefix: str, name: str) -> list[str] | str:
    try:
        lines = cleaned(store.read(prefix + name).decode("utf-8-sig").split("\n"))
    except UnicodeDecodeError as error:
        return f"{name} is no UTF-8 text: {error}"
    except OSError as error:
        return f"{name} can't be read: {error}"
    return lines or f"{name} is blank"


def _stem(name: str) -> str:
    return posixpath.splitext(name)[0]
