"""Captions as a network takes them in the place of labels; tread/models/text_dit.py is such a network.

Shapes: B samples, T text tokens, C and P channels of an encoder's tokens and of its pooled text.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Text(NamedTuple):
    """Captions of B samples.

    tokens  (B, T, C) of a frozen encoder, or (B, T) int64 word numbers, which the network embeds.
    mask    (B, T) bool, True where there is a word. No row is all False: the empty caption is one begin token.
    pooled  (B, P) of the encoder; None: the network takes the mean of the tokens.
    """

    tokens: Tensor
    mask: Tensor
    pooled: Tensor | None = None
