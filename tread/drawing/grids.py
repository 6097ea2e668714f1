"""Grids of pictures, with names beside their rows, and PNG files that record how they were made."""

import json
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps
from PIL.PngImagePlugin import PngInfo

from tread.runtime.files import whole_file

GAP = 2  # pixels between the pictures of a grid
LETTERS = 20  # characters per line of a row's name
FACTS = "tread"  # key of the PNG text chunk that holds `facts` as JSON


def draw_grid(pictures: np.ndarray, columns: int) -> Image.Image:
    """Return pictures (n, 1 or 3, H, W) uint8 as a grid, `columns` in a row. Pictures up to 32×32 px are enlarged."""
    n, channels, height, width = pictures.shape
    zoom = max(1, 64 // max(height, width))
    pictures = pictures.repeat(zoom, axis=2).repeat(zoom, axis=3)
    cells = np.pad(pictures, ((0, -n % columns), (0, 0), (0, GAP), (0, GAP)), constant_values=255)
    rows = cells.reshape(-1, columns, *cells.shape[1:]).transpose(0, 3, 1, 4, 2)  # rows, H, columns, W, C
    grid = rows.reshape(rows.shape[0] * rows.shape[1], -1, channels)[:-GAP, :-GAP]
    return Image.fromarray(grid.squeeze(2) if channels == 1 else grid)


def name_rows(grid: Image.Image, names: Sequence[str]) -> Image.Image:
    """Return the grid with a left margin that names each row. Long names are wrapped, and cut if they do not fit."""
    import matplotlib  # only for its font, which has more letters than Pillow's; imported here because it is slow

    pitch = (grid.height + GAP) // len(names)
    font = ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf", max(12, pitch // 16))
    space, most = font.size // 2, max(1, pitch * 4 // (5 * font.size))
    shown = [textwrap.wrap(name, LETTERS, max_lines=most, placeholder="…") or [""] for name in names]
    margin = max(int(font.getlength(line)) + 1 for name in shown for line in name) + 2 * space
    named = ImageOps.expand(grid, (margin, 0, 0, 0), "white")
    for row, name in enumerate(shown):
        middle = row * pitch + (pitch - GAP) / 2
        for number, line in enumerate(name):
            lower = (number - (len(name) - 1) / 2) * font.size * 5 / 4
            place = (margin - space, middle + lower)
            ImageDraw.Draw(named).text(place, line, fill="black", font=font, anchor="rm")
    return named


def save_png(path: Path, picture: Image.Image, facts: Mapping | None = None) -> None:
    """Write a PNG file atomically. `facts`, if given, are stored as JSON: Image.open(path).text["tread"] reads them."""
    info = PngInfo()
    if facts is not None:
        info.add_text(FACTS, json.dumps(facts))
    with whole_file(path, f".{os.getpid()}") as partial:
        picture.save(partial, format="PNG", pnginfo=info)


def save_grid(path: Path, pictures: np.ndarray, columns: int, names: Sequence[str] = ()) -> None:
    """Write pictures (n, 1 or 3, H, W) uint8 into a PNG as a grid (see draw_grid), with row names if given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    grid = draw_grid(pictures, columns)
    save_png(path, name_rows(grid, names) if names else grid)
