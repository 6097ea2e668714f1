"""The latents and the text of other people's sources, in the form in which every reader hands them over."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tread.data.columns import TextSpec


@dataclass
class ForeignText:
    """Encoded captions.

    spec      the encoder.
    counts    (n,) captions of each sample.
    read      sample, number of its caption → (T, C).
    empty     (T, C) of the empty caption.
    captions  of each sample, as text; None: they are not known.
    """

    spec: TextSpec
    counts: np.ndarray
    read: Callable[[int, int], np.ndarray]
    empty: np.ndarray
    captions: list[list[str]] | None


@dataclass
class ForeignSamples:
    """Latents in the source's order.

    labels      (n,) int64.
    read        index → (views, C or 2C, S, S), as stored in the source.
    name        index → what to call a sample in a message.
    statistics  {"mean", "std"} of z by channel, which the source says to normalise by; None: it says none.
    text        the encoded captions; None: there are none.
    """

    labels: np.ndarray
    read: Callable[[int], np.ndarray]
    name: Callable[[int], str]
    statistics: dict[str, list[float]] | None = None
    text: ForeignText | None = None


def read_npy(content: bytes, where: object, shape: tuple[int, ...], hint: str = "") -> np.ndarray:
    """A .npy file's numbers: float16 as they are, others as float32.

    shape  that they must have; 0 stands for the side S of square latents.

    Raises ValueError for another shape, and for what is no plain array of numbers.
    """
    try:
        array = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{where} is damaged or no plain array ({error}){hint}") from error
    side = array.shape[-1] if array.ndim else 0
    if array.shape != tuple(length or side for length in shape) or array.dtype.kind not in "fiu":
        expected = ", ".join(str(length or "S") for length in shape)
        raise ValueError(f"{where} has shape {array.shape} of {array.dtype}, but must be ({expected}){hint}")
    return array if array.dtype == np.float16 else array.astype(np.float32)
