"""Pictures inside a page, in bounded size: few of many, large ones smaller."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from pathlib import Path

from PIL import Image

SIDE = 1000  # pixels of a picture at most
BYTES = 150_000  # of a file that is taken as it is


def spread(pictures: Mapping[int, Path], most: int) -> dict[int, Path]:
    """At most so many of them (two at least), evenly chosen by their order, with the first and the last."""
    steps = sorted(pictures)
    most = max(2, most)
    if len(steps) > most:
        steps = [steps[round(number * (len(steps) - 1) / (most - 1))] for number in range(most)]
    return {step: pictures[step] for step in steps}


def data_uri(path: Path) -> tuple[str, bool]:
    """A picture's file as a URI, and whether it was made smaller; a large one becomes a JPEG of at most SIDE pixels.

    Raises OSError or ValueError for what is no whole picture.
    """
    try:
        with Image.open(path) as picture:
            picture.load()  # a file that was cut short fails here
            large = path.stat().st_size > BYTES or max(picture.size) > 2 * SIDE
            if not large and picture.format == "PNG":
                return _uri("png", path.read_bytes()), False
            small = picture.convert("RGB")
    except (SyntaxError, Image.DecompressionBombError) as error:  # as Pillow says of broken PNGs, and of huge ones
        raise ValueError(str(error)) from error
    small.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=88)
    return _uri("jpeg", buffer.getvalue()), True


def _uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
