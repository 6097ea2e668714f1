"""The text encoder "words": captions as numbers of whole words, which a network embeds and trains along.

It needs no package and no weights; its vocabulary is the training captions' own and travels in checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from tread.data.columns import TextSpec
from tread.models.conditions import Text

BEGIN, UNKNOWN = "<begin>", "<unknown>"  # words 0 and 1; padding is 0 too, and masked
MOST = 8192  # words in a vocabulary
WORD = re.compile(r"[^\W_]+(?:[-'.][^\W_]+)*|[^\w\s,;:.()!?\"“”'-]")  # "medium-light" is one, "&" and "#" are


def split_words(caption: str) -> list[str]:
    """A caption's words in lower case, without punctuation."""
    return WORD.findall(unicodedata.normalize("NFKC", caption).replace("’", "'").lower())


def make_vocabulary(captions: Iterable[str]) -> tuple[str, ...]:
    """The begin token, the unknown word, and the words of some captions, the most frequent ones first."""
    counts = Counter(word for caption in captions for word in split_words(caption))
    return (BEGIN, UNKNOWN, *sorted(counts, key=lambda word: (-counts[word], word))[: MOST - 2])


class WordEncoder:
    """Captions → word numbers; each begins with the begin token.

    spec  records the vocabulary and the number of tokens.
    """

    def __init__(self, vocabulary: Sequence[str], tokens: int) -> None:
        vocabulary = tuple(vocabulary)
        fingerprint = hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()
        self.spec = TextSpec("words", fingerprint, tokens, None, None, vocabulary)
        self._numbers = {word: number for number, word in enumerate(vocabulary)}

    def _cut(self, caption: str) -> list[int]:
        unknown = self._numbers[UNKNOWN]
        return [self._numbers[BEGIN], *(self._numbers.get(word, unknown) for word in split_words(caption))]

    def lengths(self, captions: Sequence[str]) -> list[int]:
        """Tokens of each caption before it is cut off, the begin token included."""
        return [len(self._cut(caption)) for caption in captions]

    def unknown(self, caption: str) -> list[str]:
        """The words of a caption that are not in the vocabulary."""
        return [word for word in split_words(caption) if word not in self._numbers]

    def encode(self, captions: Sequence[str]) -> Text:
        """Word numbers (B, T) int64; longer captions are cut off."""
        T = self.spec.tokens
        rows = [self._cut(caption)[:T] for caption in captions]
        tokens = torch.tensor([row + [0] * (T - len(row)) for row in rows], dtype=torch.int64).view(-1, T)
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        return Text(tokens, torch.arange(T) < lengths[:, None])
