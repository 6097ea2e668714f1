"""Pictures for people: grids, with names beside their rows, and PNGs that know how they were made."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from tread.runtime.files import whole_file

GAP = 2  # pixels between the pictures of a grid
FACTS = "tread"  # the key of a PNG's text that holds what made it, as JSON


def draw_grid(pictures: np.ndarray, columns: int) -> Image.Image:
    """Pictures (n, 1 or 3, H, W) uint8 as a grid, row by row; small ones are enlarged to 64 px."""
    n, channels, height, width = pictures.shape
    zoom = max(1, 64 // max(height, width))
    pictures = pictures.repeat(zoom, axis=2).repeat(zoom, axis=3).transpose(0, 2, 3, 1)
    height, width, rows = height * zoom, width * zoom, -(-n // columns)
    grid = np.full((rows * (height + GAP) - GAP, columns * (width + GAP) - GAP, channels), 255, dtype=np.uint8)
    for number, picture in enumerate(pictures):
        top, left = number // columns * (height + GAP), number % columns * (width + GAP)
        grid[top : top + height, left : left + width] = picture
    return Image.fromarray(grid.squeeze(2) if channels == 1 else grid)


def name_rows(grid: Image.Image, names: Sequence[str], wrap: bool = False) -> Image.Image:
    """A grid with a margin to its left that names each row; its own pixels stay. Long names are cut and end in …

    wrap  over as many lines as a row has room for.
    """
    import matplotlib  # for its font alone, which has more letters than Pillow's; imported where used: it takes a while

    pitch = (grid.height + GAP) // len(names)
    font = ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf", max(12, pitch // 16))
    limit, space = 12 * font.size, font.size // 2

    def cut(name: str) -> str:
        if font.getlength(name) <= limit:
            return name
        while font.getlength(name + "…") > limit:
            name = name[:-1]
        return name + "…"

    def lines(name: str) -> list[str]:
        most, parts, words = pitch * 4 // (5 * font.size) if wrap else 1, [], name.split(" ")
        while words:
            taken = len(words) if len(parts) + 1 >= most else 1
            while taken < len(words) and font.getlength(" ".join(words[: taken + 1])) <= limit:
                taken += 1
            parts.append(cut(" ".join(words[:taken])))
            words = words[taken:]
        return parts

    shown = [lines(name) for name in names]
    margin = max(int(font.getlength(line)) + 1 for name in shown for line in name) + 2 * space
    named = Image.new(grid.mode, (margin + grid.width, grid.height), "white")
    named.paste(grid, (margin, 0))
    for row, name in enumerate(shown):
        middle = row * pitch + (pitch - GAP) / 2
        told = {"fill": "black", "font": font, "anchor": "rm"}
        for number, line in enumerate(name):
            lower = (number - (len(name) - 1) / 2) * font.size * 5 / 4
            ImageDraw.Draw(named).text((margin - space, middle + lower), line, **told)
    return named


def save_png(path: Path, picture: Image.Image, facts: Mapping) -> None:
    """Write a PNG in one piece, with facts that JSON can hold in its text: Image.open(path).text[FACTS]."""
    info = PngInfo()
    info.add_text(FACTS, json.dumps(facts))
    with whole_file(path, f".{os.getpid()}") as partial:
        picture.save(partial, format="PNG", pnginfo=info)


def save_grid(path: Path, pictures: np.ndarray, columns: int, names: Sequence[str] = ()) -> None:
    """Write pictures as a grid, see `draw_grid`; its rows may have names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    grid = draw_grid(pictures, columns)
    with whole_file(path, f".{os.getpid()}") as partial:
        (name_rows(grid, names, wrap=True) if names else grid).save(partial, format="PNG")
