"""Photos → latents → training → samples → pictures, by the commands of docs/data.md, on real photos.

The reference for the pictures is the autoencoder run by hand on latents drawn from the checkpoint.
"""

import os
import subprocess
import sys
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from conftest import CPU, ROOT, read_json
from PIL import Image

from tread.checkpoints import checkpoint
from tread.checkpoints.for_sampling import open_network
from tread.data.dataset import LatentDataset
from tread.data.latents import LatentSpec
from tread.diffusion.sampling import Sampler, draw
from tread.encoders import autoencoder

SMALL = ["model.hidden_size=64", "model.depth=6", "model.num_heads=2", "train.batch_size=16", "train.steps=6"]
SMALL += ["every.log=2", "every.evaluate=6", "every.sample=6", "every.save=6", "sampling.steps=4", "eval.points=64"]


def run(folder: Path, *command: str) -> str:
    """A command of the README in a folder, `accelerate` being that of the Python that runs the tests."""
    python = {"accelerate": ("-m", "accelerate.commands.accelerate_cli"), "python": ()}
    command = (sys.executable, *python[command[0]], *command[1:])
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ | {"TQDM_DISABLE": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def random_autoencoder_kl(folder: Path) -> Path:
    torch.manual_seed(0)
    model = diffusers.AutoencoderKL(
        block_out_channels=(16, 16, 16, 16),
        norm_num_groups=4,
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
    )
    model.save_pretrained(folder / "kl")
    return folder / "kl"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["taesd", "kl"])
def test_from_photos_to_pictures(asset, tmp_path, kind):
    photos = asset("data/imagenette128.tar")
    name = asset("weights/taesd.fp8.safetensors") if kind == "taesd" else random_autoencoder_kl(tmp_path)
    prepare = ["accelerate", "launch", str(ROOT / "scripts/prepare_latents.py"), f"source={photos}", "resolution=128"]
    text = run(tmp_path, *prepare, "root=val", f"autoencoder={name}", "out=data/val", "flip=true")
    data = LatentDataset(tmp_path / "data/val", verify="full")
    assert len(data) == 500 and np.bincount(data.labels).tolist() == [50] * 10
    assert data.latents.content == ("latents" if kind == "taesd" else "moments") and data.latents.shape == (4, 16, 16)
    if kind == "taesd":
        assert np.mean(read_json(tmp_path / "data/val/report.json")["psnr"]) > 18
        assert 0.6 < np.mean(data.statistics[1]) < 0.9  # the scale of Stable Diffusion's latents
    assert "500 in 10 classes" in text

    train = ["accelerate", "launch", str(ROOT / "train.py"), "model=tread", "dataset=folder", "dataset.path=data/val"]
    text = run(tmp_path, *train, "dataset.heldout=data/val", "dataset.normalize=true", *SMALL, "name=imagenette")
    assert "500 samples of (4, 16, 16)" in text and "keeps 32 of 64 tokens" in text
    found = checkpoint.find(tmp_path / "results/imagenette")
    latents = LatentSpec.from_json(found.info["latents"])
    assert latents.channel_shift == data.statistics[0]

    options = ("checkpoint=results/imagenette", "classes=[3]", "seeds=0-1", "steps=4")
    run(tmp_path, "python", str(ROOT / "sample.py"), *options)
    named = np.asarray(Image.open(tmp_path / "samples.png"))  # a margin with the class's name, then two pictures
    grid = named[:, -258:]
    assert named.shape[0] == 128 and named.shape[1] > 258 and (named[:, :-258] != 255).any()
    model = open_network(found, "ema").load(CPU)
    x = next(draw(model, [0, 1], torch.tensor([3, 3]), Sampler(steps=4, batch_size=2)))
    z = x / torch.tensor(latents.channel_scale)[:, None, None] + torch.tensor(latents.channel_shift)[:, None, None]
    with torch.no_grad():
        expected = autoencoder.load_autoencoder(str(name)).decode(z / latents.scale).sample
    expected = (expected * 127.5 + 127.5).round().clamp(0, 255)
    for number, left in enumerate((0, 130)):
        shown = torch.from_numpy(grid[:, left : left + 128].copy()).permute(2, 0, 1)
        assert (shown - expected[number]).abs().max() <= 1
