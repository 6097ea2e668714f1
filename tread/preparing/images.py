"""Decodes picture files to RGB squares, as ADM prepares ImageNet and its reference batches (Dhariwal & Nichol 2021)."""

import contextlib
import io
import struct
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from tread.data.latents import Alpha, Orientation

FORMATS = ("JPEG", "PNG", "WEBP", "TIFF")
HEAD = 16  # bytes at a file's start that show its format
# errors for EXIF data that can't be read (the picture stays as it is) or be written back (it has been turned by then)
EXIF_FAULTS = (SyntaxError, ValueError, TypeError, LookupError, AttributeError, OverflowError, OSError, struct.error)
STRIP = 16  # if the longer side is over this many times the shorter one, only the kept part is enlarged


@dataclass(frozen=True)
class Crop:
    """How photos become squares: the side in pixels, whether the EXIF orientation is applied ("exif") or ignored
    ("stored"), and whether transparent pixels are laid on white ("white") or alpha is dropped ("drop")."""

    size: int
    orientation: Orientation = "stored"
    alpha: Alpha = "drop"


def read_rgb(content: bytes, orientation: Orientation = "stored", alpha: Alpha = "drop") -> Image.Image:
    """Decode the content of a JPEG, PNG, WebP or TIFF file (its first frame) to 8-bit RGB.

    orientation  "exif": apply the EXIF orientation; "stored": ignore it, as ADM does (a TIFF's is always applied).
    alpha        "white": lay transparent pixels on white; "drop": drop the alpha channel, as ADM does.

    Grey and palette pictures are expanded, CMYK is converted. 16-bit grey is divided by 257 and rounded; 16-bit
    colours keep their upper 8 bits, as in Pillow. Raises ValueError or OSError for a damaged picture, pixels of other
    types (grey beyond 16 bits, floating point), or too many pixels (twice Image.MAX_IMAGE_PIXELS).
    """
    with opened(content) as image:
        if orientation == "exif":
            with contextlib.suppress(*EXIF_FAULTS):
                ImageOps.exif_transpose(image, in_place=True)
        if image.mode.startswith("I"):
            image = _eight_bits(image)
        if image.mode not in ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"):
            raise ValueError(f"pixels are of mode {image.mode}; convert the picture to 8 bits a channel")
        if alpha == "white" and (image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info):
            white, image = Image.new("RGB", image.size, "white"), image.convert("RGBA")
            white.paste(image, mask=image)
            return white
        return image.convert("RGB")


@contextlib.contextmanager
def opened(content: bytes, decode: bool = True) -> Iterator[Image.Image]:
    """Context that yields a picture opened by Pillow, decoded if `decode`. ValueError or OSError if this fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about damaged EXIF data and palettes that lose transparency
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # at half the refused number of pixels
        try:
            image = Image.open(io.BytesIO(content), formats=FORMATS)
            if decode:
                image.load()
        except UnidentifiedImageError as error:
            raise ValueError(no_picture(content) or "its header is damaged") from error
        except Image.DecompressionBombError as error:
            raise ValueError(f"it has too many pixels to be read, make it smaller: {error}") from error
        except (SyntaxError, TypeError, EOFError, struct.error) as error:  # Pillow's for broken PNGs and TIFFs
            raise ValueError(f"it is damaged: {error}") from error
        yield image


def no_picture(head: bytes) -> str | None:
    """Return the reason why a file is not a picture, given its first 16 bytes or more; None if it may be one."""
    Image.init()
    if any(Image.OPEN[kind][1](head) for kind in FORMATS):
        return None
    if head.startswith(b"GIF8"):
        return "it is a GIF, which is not read: convert it"
    return "it is no JPEG, PNG or WebP, nor a TIFF" if head else "it is empty"


def _eight_bits(image: Image.Image) -> Image.Image:
    """Convert 16-bit grey to 8 bits, transparency to an alpha channel. Raises ValueError for grey beyond 16 bits."""
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise ValueError(f"its grey lies in {values.min()}..{values.max()}, not in 8 or 16 bits: convert the picture")
    grey = Image.fromarray(((values + 128) // 257).astype(np.uint8))
    if "transparency" in image.info:
        grey.putalpha(Image.fromarray(values != image.info["transparency"]).convert("L"))
    return grey


def centre_crop(image: Image.Image, size: int) -> np.ndarray:
    """Return ADM's centre crop, (size, size, 3) uint8.

    The picture is halved by averaging 2×2 boxes while its shorter side is at least 2·size; then it is resized
    bicubically to a shorter side of `size`, and cropped at the centre. If a picture must be enlarged and its longer
    side is over 16 times its shorter one, only the part that is kept is enlarged. That saves memory, and changes the
    result by at most one or two levels of 255.
    """
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    width, height = round(image.width * scale), round(image.height * scale)
    left, top = (width - size) // 2, (height - size) // 2
    if scale > 1 and max(width, height) > STRIP * size:
        across, down = image.width / width, image.height / height  # pixels of the picture per pixel of the enlarged one
        x, y = max(0, int(left * across) - 4), max(0, int(top * down) - 4)
        box = (left * across - x, top * down - y, (left + size) * across - x, (top + size) * down - y)
        near = image.crop((x, y, *image.size))  # Pillow's box is fp32, so its numbers must be small
        return np.asarray(near.resize((size, size), Image.Resampling.BICUBIC, box))
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image)[top : top + size, left : left + size]
