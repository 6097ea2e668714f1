"""FID of real photos: what it must say of pictures whose order of quality is known."""

import io

import numpy as np
import pytest
from conftest import open_pictures, read_json
from conftest import score as launch
from PIL import Image, ImageFilter

REFERENCE = 2000  # training photos


def distorted(kind: str, photo: np.ndarray, seed: int) -> np.ndarray:
    """One photo (H, W, 3) uint8, made worse, or flipped, which FID hardly sees."""
    image = Image.fromarray(photo)
    if kind.startswith("blurred"):
        image = image.filter(ImageFilter.GaussianBlur(int(kind.split()[1])))
    elif kind == "JPEG q10":
        content = io.BytesIO()
        image.save(content, "JPEG", quality=10)
        image = Image.open(content)
    elif kind.startswith("noise"):
        noise = np.random.default_rng(seed).standard_normal(photo.shape) * int(kind.split()[1])
        return (photo + noise).round().clip(0, 255).astype(np.uint8)
    elif kind == "flipped":
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(image)


@pytest.mark.slow
def test_distortions_raise_the_distance(asset, tmp_path):
    """Imagenette's 500 validation photos against 2,000 of its training photos, and each distortion in two strengths or
    beside the plain ones. Prints the table; see LOG.md."""
    tar = asset("data/imagenette128.tar") / "imagenette128"
    weights = f"inception={asset('weights/inception-2015-12-05.nofc.safetensors')}"
    train, val = open_pictures(tar / "train"), open_pictures(tar / "val")
    chosen = np.linspace(0, train.count - 1, REFERENCE).round().astype(int)
    reference = np.concatenate([train.read(i, i + 1) for i in chosen])
    np.savez(tmp_path / "reference.npz", reference.transpose(0, 2, 3, 1))
    photos, found = val.read(0, val.count).transpose(0, 2, 3, 1), {}
    for kind in ("plain", "flipped", "blurred 1", "blurred 2", "noise 10", "noise 30", "JPEG q10"):
        np.savez(tmp_path / "samples.npz", np.stack([distorted(kind, photo, i) for i, photo in enumerate(photos)]))
        launch(tmp_path, "samples=samples.npz", "reference=reference.npz", weights)
        found[kind] = read_json(tmp_path / "samples.fid.json")
        print(kind, {metric: round(found[kind][metric], 4) for metric in found[kind]["counts"]})
    fid = {kind: record["fid"] for kind, record in found.items()}
    assert abs(fid["flipped"] - fid["plain"]) < 0.05 * fid["plain"]
    assert fid["plain"] < fid["blurred 1"] < fid["blurred 2"] and fid["plain"] < fid["noise 10"] < fid["noise 30"]
    assert fid["plain"] < fid["JPEG q10"]
    assert all(found["plain"]["kid"] < found[kind]["kid"] for kind in ("blurred 2", "noise 30", "JPEG q10"))
    assert found["plain"]["precision"] > max(found[kind]["precision"] for kind in ("blurred 2", "noise 30", "JPEG q10"))
    launch(tmp_path, "samples=reference.npz", "reference=reference.npz", weights)
    assert abs(read_json(tmp_path / "reference.fid.json")["fid"]) < 1e-6
