"""Pictures of every kind, against what Pillow and NumPy make of them, and ADM's crop in the plain way."""

import io
import resource
import tarfile
import zlib

import numpy as np
import psutil
import pytest
from conftest import assert_refused, open_pictures, saved
from PIL import Image, ImageOps

from tread.preparing.encode_photos import Crops
from tread.preparing.images import STRIP, Crop, centre_crop, read_rgb
from tread.preparing.sources import find_photos

NOISE = np.random.default_rng(0).integers(0, 256, (24, 33, 4), dtype=np.uint8)
RGB, ALPHA = NOISE[..., :3], NOISE[..., 3]


def pixels(content: bytes, *how) -> np.ndarray:
    return np.asarray(read_rgb(content, *how))


@pytest.mark.parametrize(
    "mode, kind",
    [
        *[(mode, "JPEG") for mode in ("RGB", "L", "CMYK")],
        *[(mode, "PNG") for mode in ("RGB", "RGBA", "LA", "L", "1", "P")],
        *[(mode, "WEBP") for mode in ("RGB", "RGBA")],
    ],
)
@pytest.mark.filterwarnings("ignore:Palette images")
def test_pictures_are_what_pillow_converts_to_rgb(mode, kind):
    content = saved(Image.fromarray(NOISE).convert(mode), kind)
    assert np.array_equal(pixels(content), np.asarray(Image.open(io.BytesIO(content)).convert("RGB")))


# ----------------------------------------------------------------------------------- orientation


def turned(number: int, kind: str = "PNG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = number
    return saved(Image.fromarray(RGB), kind, exif=exif)


@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_orientations_are_pillows_own(kind, number):
    content = turned(number, kind)
    stored = Image.open(io.BytesIO(content))
    upright = np.asarray(ImageOps.exif_transpose(stored))
    assert upright.shape[:2] == ((33, 24) if number > 4 else (24, 33))
    assert np.array_equal(pixels(content, "exif"), upright)
    assert np.array_equal(pixels(content, "stored"), np.asarray(stored))
    assert np.array_equal(pixels(content), np.asarray(stored))


@pytest.mark.parametrize("number", [1, 3, 6])
def test_a_tiff_is_upright_and_turned_once(number):
    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(turned(number)))))
    for orientation in ("exif", "stored"):
        assert np.array_equal(pixels(turned(number, "TIFF"), orientation), upright)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("exif", [b"Exif\0\0no TIFF", b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12", b"\xff" * 40])
def test_damaged_exif_data_leaves_a_picture_as_it_is_stored(exif):
    for kind in ("JPEG", "PNG", "WEBP"):
        content = saved(Image.fromarray(RGB), kind, exif=exif)
        assert np.array_equal(pixels(content, "exif"), np.asarray(Image.open(io.BytesIO(content))))


def test_palettes_and_grey_are_turned_with_their_transparency():
    for image in (Image.fromarray(NOISE[..., 0]), Image.fromarray(RGB).quantize(16)):
        exif = Image.Exif()
        exif[0x0112] = 6
        content = saved(image, exif=exif, transparency=3)
        upright = np.rot90(pixels(saved(image, transparency=3), "stored", "white"), -1)
        assert np.array_equal(pixels(content, "exif", "white"), upright)


# ------------------------------------------------------------------------------------------ alpha


def on_white(rgb: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    share = alpha[..., None] / 255
    return rgb * share + 255 * (1 - share)


@pytest.mark.parametrize("mode, kind", [("RGBA", "PNG"), ("LA", "PNG"), ("RGBA", "WEBP"), ("RGBA", "TIFF")])
def test_alpha_is_laid_on_white_or_dropped(mode, kind):
    image, options = Image.fromarray(NOISE).convert(mode), {"lossless": True, "exact": True}
    content, rgb = saved(image, kind, **(options if kind == "WEBP" else {})), np.asarray(image.convert("RGB"))
    assert np.array_equal(pixels(content, "stored", "drop"), rgb)
    for orientation in ("stored", "exif"):
        assert np.abs(pixels(content, orientation, "white") - on_white(rgb, ALPHA)).max() <= 1


def test_pictures_without_transparency_are_the_same_on_white():
    opaque = Image.fromarray(np.dstack([RGB, np.full_like(ALPHA, 255)]))
    for image in (opaque, opaque.convert("RGB"), opaque.convert("L"), opaque.convert("1"), opaque.quantize(8)):
        assert np.array_equal(pixels(saved(image), "exif", "white"), pixels(saved(image)))
    for mode in ("RGB", "L", "CMYK"):
        content = saved(opaque.convert(mode), "JPEG")
        assert np.array_equal(pixels(content, "exif", "white"), pixels(content))


def test_transparent_colours_become_white():
    """One of a palette, shares of a palette, grey, black, and a colour of RGB; alpha=drop shows the colour below."""
    palette = Image.fromarray(RGB).quantize(4)
    index, colours = np.asarray(palette), np.array(palette.getpalette()[:12]).reshape(4, 3)
    for transparency, alpha in ((2, [255, 255, 0, 255]), (bytes([0, 85, 170, 255]), [0, 85, 170, 255])):
        content = saved(palette, transparency=transparency)
        assert np.array_equal(pixels(content), colours[index])
        assert np.abs(pixels(content, "exif", "white") - on_white(colours[index], np.array(alpha)[index])).max() <= 1
    grey = NOISE[..., 0]
    content = saved(Image.fromarray(grey), transparency=int(grey[0, 0]))
    assert np.array_equal(pixels(content, "exif", "white")[..., 1], np.where(grey == grey[0, 0], 255, grey))
    assert np.array_equal(pixels(content)[..., 1], grey)
    black = Image.new("1", (8, 8), 0)
    assert pixels(saved(black, transparency=0), "exif", "white").min() == 255 and pixels(saved(black)).max() == 0
    content = saved(Image.fromarray(RGB), transparency=tuple(map(int, RGB[3, 4])))
    assert pixels(content, "exif", "white")[3, 4].tolist() == [255] * 3
    assert np.array_equal(pixels(content), RGB)


# ---------------------------------------------------------------------------------------- 16 bits

DEEP = np.append(np.random.default_rng(0).integers(0, 65536, 30), [0, 128, 129, 385, 386, 65535]).reshape(4, 9)


@pytest.mark.parametrize(
    "dtype, mode, kind",
    [("<u2", "I;16", "PNG"), ("<u2", "I;16", "TIFF"), (">u2", "I;16B", "TIFF"), ("<i4", "I", "TIFF")],
)
def test_16_bit_grey_is_scaled_and_rounded(dtype, mode, kind):
    content = saved(Image.frombytes(mode, (9, 4), DEEP.astype(dtype).tobytes()), kind)
    assert Image.open(io.BytesIO(content)).mode in (mode, "I")
    expected = np.round(DEEP / 65535 * 255)
    for how in ((), ("exif", "white")):
        assert np.array_equal(pixels(content, *how), np.stack([expected] * 3, axis=-1))


def test_a_transparent_value_of_16_bit_grey_becomes_white():
    content = saved(Image.fromarray(np.full((8, 8), 513, np.uint16)), transparency=513)
    assert pixels(content).max() == 2 and pixels(content, "exif", "white").min() == 255


def test_of_16_bit_colours_the_upper_bits_are_taken():
    """A PNG written by hand, as Pillow writes none of them."""
    values = np.random.default_rng(0).integers(0, 65536, (4, 5, 3)).astype(">u2")

    def chunk(kind: bytes, body: bytes) -> bytes:
        return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")

    head = (5).to_bytes(4, "big") + (4).to_bytes(4, "big") + bytes([16, 2, 0, 0, 0])
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    clear = chunk(b"tRNS", values[1, 2].tobytes())
    body = chunk(b"IHDR", head) + clear + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    content = b"\x89PNG\r\n\x1a\n" + body
    for how in ((), ("exif", "white")):
        result = pixels(content, *how).copy()
        result[1, 2] = values[1, 2] >> 8  # transparent
        assert np.array_equal(result, values >> 8)


# ------------------------------------------------------------------------------------ other kinds


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "MPO"])
def test_the_first_frame_is_read(kind):
    frames = [Image.new("RGB", (32, 24), colour) for colour in ("red", "blue")]
    content = saved(frames[0], kind, save_all=True, append_images=frames[1:])
    assert Image.open(io.BytesIO(content)).n_frames == 2
    assert np.abs(pixels(content, "exif", "white").astype(int) - [255, 0, 0]).max() <= 2


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_what_is_cut_short_is_refused(kind):
    content = saved(Image.fromarray(RGB), kind)
    for length in (len(content) // 3, len(content) * 2 // 3, len(content) - 40):
        with pytest.raises((OSError, ValueError)):
            read_rgb(content[:length], "exif", "white")


def test_what_is_no_picture_of_8_or_16_bits_is_refused():
    deep = [Image.fromarray(NOISE[..., 0].astype(dtype) * 65536) for dtype in (np.int32, np.float32)]
    assert_refused(
        read_rgb,
        (b"these are words", "no JPEG, PNG or WebP"),
        (b"", "it is empty"),
        (saved(Image.fromarray(RGB), "GIF"), "it is a GIF, .*convert"),
        (saved(deep[0], "TIFF"), "8 or 16 bits"),
        (saved(deep[1], "TIFF"), "mode F.*8 bits"),
        error=ValueError,
    )


def huge() -> bytes:
    """A JPEG whose head says 30,000×30,000."""
    return saved(Image.fromarray(RGB), "JPEG").replace(b"\x08\x00\x18\x00\x21\x03", b"\x08\x75\x30\x75\x30\x03")


def test_too_many_pixels_are_refused_before_they_are_decoded(tmp_path):
    with pytest.raises(ValueError, match=r"too many pixels to be read, make it smaller: .*900000000 pixels"):
        read_rgb(huge())
    for name in ("a.jpg", "b.jpg"):
        (tmp_path / name).write_bytes(huge())
    with pytest.raises(ValueError, match=r"2 in all\s+a\.jpg can't be read .*too many pixels.*900000000 pixels"):
        open_pictures(tmp_path)
    with pytest.raises(ValueError, match=r"a\.jpg can't be read .*it has too many pixels"):
        open_pictures(tmp_path, crop=16)


def test_names_say_nothing_and_may_be_of_any_script(tmp_path):
    """A PNG named .jpg, a TIFF named .png, one named .TIFF and words named .jpg, from a folder, a tar and parquet."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    files = {"Bär/ä 1.jpg": turned(6, "PNG"), "Bär/日本.png": turned(8, "TIFF"), "кот/x.TIFF": turned(1, "TIFF")}
    for name, content in files.items():
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "photos/кот/я.jpg").write_text("words")
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        tar.add(tmp_path / "photos", arcname="")
    rows = [{"bytes": content, "path": name} for name, content in [*files.items(), ("я.jpg", b"words")]]
    parquet.write_table(pa.table({"image": rows, "label": [0, 0, 1, 1]}), tmp_path / "photos.parquet")
    upright = [ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB") for content in files.values()]
    expected = [centre_crop(image, 16).transpose(2, 0, 1) for image in upright]
    for source in ("photos", "photos.tar", "photos.parquet"):
        photos = find_photos(tmp_path / source)
        result = [Crops(photos, Crop(16, "exif", "white"))[index] for index in range(4)]
        assert [size for _, _, size in result[:3]] == [(24, 33), (24, 33), (33, 24)]
        for (pixels, *_), wanted in zip(result, expected):
            assert np.array_equal(pixels, wanted)
        assert result[3][0] is None and "no JPEG, PNG or WebP, nor a TIFF" in result[3][1]


# --------------------------------------------------------------------------------------- cropping


def test_halving_is_the_mean_of_boxes_and_the_crop_is_central():
    wide = np.random.default_rng(1).integers(0, 256, (64, 104, 3), dtype=np.uint8)
    halved = wide.reshape(32, 2, 52, 2, 3).mean(axis=(1, 3))
    quartered = halved.reshape(16, 2, 26, 2, 3).mean(axis=(1, 3))
    for size, boxes, left, rounding in ((64, wide, 20, 0), (32, halved, 10, 1), (16, quartered, 5, 2)):
        crop = centre_crop(Image.fromarray(wide), size)
        assert np.abs(crop - boxes[:, left : left + size]).max() <= rounding  # twice 0.5 for each halving


def test_resizing_keeps_a_ramp_a_ramp():
    """512×384 → halved once, 256×192 → 171×128 by 2/3 → the central 128 columns, from column 21."""
    ramp = np.broadcast_to((np.arange(512) / 2).astype(np.uint8)[None, :, None], (384, 512, 3))
    columns = (np.arange(21, 21 + 128) + 0.5) * 512 / 171 / 2 - 0.5
    crop = centre_crop(Image.fromarray(np.ascontiguousarray(ramp)), 128)
    assert crop.shape == (128, 128, 3) and np.abs(crop - columns[None, :, None]).max() <= 1


def plain_crop(image: Image.Image, size: int) -> np.ndarray:
    """ADM's: all is enlarged, then the crop is cut out."""
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return np.asarray(image)[top : top + size, left : left + size]


@pytest.mark.parametrize("upright", [False, True])
def test_strips_are_what_the_plain_way_gives(upright):
    """But for two levels. Pictures of any size below the crop's, so that all kinds of factors enlarge them."""
    rng, strips = np.random.default_rng(int(upright)), 0
    for _ in range(40):
        size = int(rng.integers(8, 65))
        short = int(rng.integers(1, size))
        long = int(short * rng.uniform(1, 8 * STRIP))
        shape = (long, short, 3) if upright else (short, long, 3)
        values = rng.integers(0, 256, shape, dtype=np.uint8)
        image = Image.fromarray(values if rng.random() < 0.5 else values // 128 * 255)
        strips += round(long * size / short) > STRIP * size
        off = np.abs(centre_crop(image, size).astype(int) - plain_crop(image, size))
        assert off.max() <= 2 and off.mean() < 0.01, (image.size, size)
    assert strips > 20


def test_strips_take_little_memory():
    """0.25 GB more than the process has: the plain way takes 13 GB for a strip of 1×20,000."""
    before, limit = resource.getrlimit(resource.RLIMIT_AS), psutil.Process().memory_info().vms + 2**28
    for size in ((20_000, 1), (1, 20_000), (10_000, 255), (255, 10_000)):
        content = saved(Image.new("RGB", size, (1, 2, 3)))
        try:
            resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
            result = centre_crop(read_rgb(content, "exif", "white"), 256)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
        assert np.array_equal(result, np.full((256, 256, 3), (1, 2, 3)))
