"""Pictures as arrays: from a file to the RGB square of ADM's preparation.

Dhariwal & Nichol 2021 prepare ImageNet so, and their reference batches consist of such pictures.
"""

import contextlib
import io
import struct
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from tread.data.latents import Alpha, Orientation

FORMATS = ("JPEG", "PNG", "WEBP", "TIFF")
UPRIGHT = {  # EXIF orientation → what makes the picture upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
HEAD = 16  # bytes of a file, which say its format
STRIP = 16  # times as long as wide: from there on only the box that is kept is enlarged


@dataclass(frozen=True)
class Crop:
    """How photos become squares: the size in pixels, and read_rgb's options."""

    size: int
    orientation: Orientation = "stored"
    alpha: Alpha = "drop"


def read_rgb(content: bytes, orientation: Orientation = "stored", alpha: Alpha = "drop") -> Image.Image:
    """Decode a JPEG, PNG, WebP or TIFF file (its first frame), whatever its name, to 8-bit RGB.

    orientation  "exif": turned and mirrored as its EXIF orientation says; "stored": as the pixels lie, as in
                 ADM's preparation. A TIFF is upright in both, for Pillow turns it while it decodes.
    alpha        "white": transparent pixels are laid on white; "drop": alpha is left out, as in ADM's.

    Grey and palette pictures are expanded, CMYK is converted; 16-bit grey is divided by 257 and rounded, and
    16-bit colours keep their upper 8 bits, as in Pillow. Raises ValueError or OSError for a damaged picture, other
    numbers (32-bit grey, floating point), or more pixels than Pillow's limit.
    """
    with opened(content) as image:
        turn = UPRIGHT.get(_orientation(image)) if orientation == "exif" else None
        if image.mode.startswith("I"):
            image = _eight_bits(image)
        if image.mode not in ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"):
            raise ValueError(f"pixels are of mode {image.mode}; convert the picture to 8 bits a channel")
        if turn is not None:
            image = image.transpose(turn)
        if alpha == "white" and (image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info):
            white, image = Image.new("RGB", image.size, "white"), image.convert("RGBA")
            white.paste(image, mask=image)
            return white
        return image.convert("RGB")


@contextlib.contextmanager
def opened(content: bytes, decode: bool = True) -> Iterator[Image.Image]:
    """A picture file as Pillow has it; without `decode` its size and mode alone. Raises as read_rgb."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of damaged EXIF data, and palettes that lose transparency
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # of half as many pixels as are refused
        try:
            image = Image.open(io.BytesIO(content), formats=FORMATS)
            if decode:
                image.load()
        except UnidentifiedImageError as error:
            raise ValueError(no_picture(content) or "its header is damaged") from error
        except Image.DecompressionBombError as error:
            raise ValueError(f"it has too many pixels to be read, make it smaller: {error}") from error
        except (SyntaxError, TypeError, EOFError, struct.error) as error:  # what Pillow says of broken PNGs and TIFFs
            raise ValueError(f"it is damaged: {error}") from error
        yield image


def no_picture(head: bytes) -> str | None:
    """Why a file starting with `head` (HEAD bytes or more) is no picture; None if it may be one."""
    Image.init()
    if any(Image.OPEN[kind][1](head) for kind in FORMATS):
        return None
    if head.startswith(b"GIF8"):
        return "it is a GIF, which is not read: convert it"
    return "it is no JPEG, PNG or WebP, nor a TIFF" if head else "it is empty"


def _orientation(image: Image.Image) -> int | None:
    """EXIF's orientation of a decoded picture; None if it has none, or EXIF data that can't be read."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation)
    except (SyntaxError, ValueError, TypeError, LookupError, OSError, struct.error):
        return None


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey of 16 bits, which Pillow may hold in 32, as grey of 8; its transparent value becomes alpha."""
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise ValueError(
            f"its grey lies in {values.min()}..{values.max()}; convert the picture to 8 or 16 bits a channel"
        )
    grey = Image.fromarray(((values + 128) // 257).astype(np.uint8))
    if "transparency" in image.info:
        opaque = values != image.info["transparency"]
        grey.putalpha(Image.fromarray(opaque.astype(np.uint8) * 255))
    return grey


def centre_crop(image: Image.Image, size: int) -> np.ndarray:
    """ADM's centre crop: (size, size, 3) uint8.

    Halved by averaging 2×2 boxes while the shorter side is at least twice `size`, then resized
    bicubically so that it equals `size` (enlarged, if it was shorter), then cropped at the centre.
    Takes memory for a few copies of the picture and of STRIP crops, and no more.
    """
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    width, height = round(image.width * scale), round(image.height * scale)
    left, top = (width - size) // 2, (height - size) // 2
    if scale > 1 and max(width, height) > STRIP * size:
        rows, row_weights = _bicubic(image.height, height, top, size)
        columns, column_weights = _bicubic(image.width, width, left, size)
        first = rows.min()
        kept = np.asarray(image.crop((0, first, image.width, rows.max() + 1))).swapaxes(0, 1)
        wide = _weighted(kept, columns, column_weights).swapaxes(0, 1)
        return _weighted(wide, rows - first, row_weights)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image)[top : top + size, left : left + size]


def _bicubic(length: int, enlarged: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Pillow's bicubic weights for enlarging a side from `length` to `enlarged` pixels.

    For `count` of the enlarged pixels, from `first`: the 4 pixels that are summed, and their weights in units of 2⁻²²,
    0 beyond the edge; (count, 4) int64 each.
    """
    centres = (np.arange(first, first + count)[:, None] + 0.5) * (length / enlarged)
    taken = np.floor(centres - 1.5).astype(np.int64) + np.arange(4)
    x = np.abs(taken - centres + 0.5)
    weights = np.where(x < 1, (1.5 * x - 2.5) * x * x + 1, (((x - 5) * x + 8) * x - 4) * -0.5)  # Keys' cubic, a = −0.5
    weights[(x >= 2) | (taken < 0) | (taken >= length)] = 0
    weights /= weights.sum(axis=1, keepdims=True)
    return taken.clip(0, length - 1), np.trunc(weights * 2**22 + np.copysign(0.5, weights)).astype(np.int64)


def _weighted(pixels: np.ndarray, taken: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Sums of pixels (n, …) uint8 along the first axis, rounded as Pillow rounds: (count, …) uint8."""
    sums = (pixels[taken] * weights[:, :, None, None]).sum(axis=1)
    return ((sums + 2**21) >> 22).clip(0, 255).astype(np.uint8)
