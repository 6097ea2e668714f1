"""Autoencoders with statistics of their own, and AutoencoderRAE: from photos to samples, as diffusers does it."""

import sys
from types import SimpleNamespace

import diffusers
import export_checkpoint
import numpy as np
import pytest
import torch
from conftest import TINY_KL, launch, launch_door, read_json, take_samples, write_json
from PIL import Image
from torch.testing import assert_close

import tread
from tread.data.dataset import LatentDataset
from tread.data.latents import LatentSpec, from_network, to_network
from tread.encoders import autoencoder

MEAN, STD = (0.5, -1.0, 0.25, 2.0), (0.5, 2.0, 1.25, 4.0)


@pytest.fixture(scope="module")
def photos(tmp_path_factory, pictures_of):
    """Twelve photos of 16×16 in two classes: their folder, and pixels (12, 3, 16, 16) uint8."""
    folder, pixels = tmp_path_factory.mktemp("photos"), pictures_of(12, 16, 0)
    for number, picture in enumerate(pixels):
        (folder / "ab"[number // 6]).mkdir(exist_ok=True)
        Image.fromarray(picture).save(folder / "ab"[number // 6] / f"{number:02}.png")
    return folder, torch.from_numpy(pixels).permute(0, 3, 1, 2)


@pytest.fixture(scope="module")
def rae(tmp_path_factory):
    """A random AutoencoderRAE, 16×16 ↔ 64×2×2, with statistics by channel and place and a scale: its folder."""
    pytest.importorskip("transformers", reason="AutoencoderRAE needs transformers")
    if not hasattr(diffusers, "AutoencoderRAE"):
        pytest.skip(f"AutoencoderRAE needs diffusers>=0.37, here is {diffusers.__version__}")
    torch.manual_seed(0)
    small = {"decoder_hidden_size": 16, "decoder_intermediate_size": 32, "decoder_num_attention_heads": 2}
    layers = {"encoder_num_hidden_layers": 1, "decoder_num_hidden_layers": 1}
    statistics = {"latents_mean": torch.randn(64, 2, 2), "latents_std": torch.rand(64, 2, 2) + 0.5}
    sizes = {"encoder_hidden_size": 64, "encoder_input_size": 28, "patch_size": 8, "scaling_factor": 0.5}
    folder = tmp_path_factory.mktemp("rae")
    diffusers.AutoencoderRAE(**small, **layers, **statistics, **sizes).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_rae_from_photos_to_samples(tmp_path, photos, rae, prepare_photos):
    """Its statistics and scale are applied by diffusers alone, once; its pixels lie in 0..1."""
    made = [f"source={photos[0]}", f"out={tmp_path / 'data'}", "resolution=16", f"autoencoder={rae}"]
    text = prepare_photos(*made, "dtype=float32", "workers=0", "decode=2")
    data, model = LatentDataset(tmp_path / "data"), diffusers.AutoencoderRAE.from_pretrained(rae).eval()
    with torch.no_grad():
        z = model.encode(photos[1] / 255).latent
        pictures = model.decode(z).sample * 255
    stored = data.read(np.arange(12)).stored
    latents = data.latents
    assert latents.shape == (64, 2, 2) and latents.content == "latents" and "PSNR" in text
    assert (latents.scale, latents.shift, latents.channel_shift, latents.channel_scale) == (1.0, 0.0, (), ())
    assert_close(stored, z, rtol=1e-4, atol=1e-4)
    ours = autoencoder.load_decoder(latents)(to_network(stored, latents))
    assert (ours - pictures.round().clamp(0, 255)).abs().max() <= 1
    small = ["model.hidden_size=16", "model.depth=6", "model.num_heads=2", "model.patch_size=1", "sampling.steps=2"]
    given = ["dataset=folder", "dataset.path=data", "train.batch_size=4", "eval.points=8", "train.steps=1", "name=rae"]
    launch(tmp_path, *given, *small)
    take_samples(tmp_path, "checkpoint=results/rae", "classes=[0]", "seeds=0", "steps=2")
    for path in (tmp_path / "samples.png", *(tmp_path / "results/rae/samples").glob("*.png")):
        assert Image.open(path).mode == "RGB"  # decoded: latents would have been refused, or be 2×2
    out = ("checkpoint=results/rae", "out=exported", "format=diffusers")
    launch_door(export_checkpoint.main, "export_checkpoint", tmp_path, *out)
    pipe = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "exported", trust_remote_code=True)
    drawn = pipe([0], seeds=0, num_inference_steps=2, output_type="np").images[0]
    assert type(pipe.vae).__name__ == "AutoencoderRAE"
    ours = tread.load(tmp_path / "results/rae", device="cpu").sample([0], seeds=0, steps=2, output="np")[0]
    assert np.abs(drawn - ours).max() < 0.01 and drawn.std() > 0.05


@pytest.mark.parametrize("config, scale", [({}, 1.0), ({"scaling_factor": 0.5}, 0.5)])
@pytest.mark.parametrize("store", ["moments", "latents"])
def test_statistics_of_an_autoencoder_are_applied_once(tmp_path, photos, prepare_photos, config, scale, store):
    """x = (z − mean)·scale / std; 0.18215, which diffusers writes where a config says no scale, is none."""
    torch.manual_seed(0)
    statistics = {"latents_mean": MEAN, "latents_std": STD}
    diffusers.AutoencoderKL(**TINY_KL, **statistics, **config).save_pretrained(tmp_path / "kl")
    made = [f"source={photos[0]}", f"out={tmp_path / 'data'}", "resolution=16", f"autoencoder={tmp_path / 'kl'}"]
    text = prepare_photos(*made, f"store={store}", "dtype=float32", "workers=0", "decode=2")
    data, model = LatentDataset(tmp_path / "data"), diffusers.AutoencoderKL.from_pretrained(tmp_path / "kl").eval()
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    noise = torch.randn(12, 4, 8, 8)
    with torch.no_grad():
        posterior = model.encode(photos[1] / 127.5 - 1).latent_dist
        z = posterior.mean + (posterior.std * noise if store == "moments" else 0)
        pictures = model.decode(z).sample * 127.5 + 127.5
    x = to_network(data.read(np.arange(12)).stored, data.latents, noise)
    assert_close(x, (z - mean) * scale / std, rtol=1e-4, atol=1e-4)
    assert_close(from_network(x, data.latents), z, rtol=1e-4, atol=1e-4)
    assert (autoencoder.load_decoder(data.latents)(x) - pictures.round().clamp(0, 255)).abs().max() <= 1
    report = read_json(tmp_path / "data/report.json")
    plain = to_network(data.read(np.arange(12)).stored, data.latents).mean(dim=(0, 2, 3))
    assert_close(torch.tensor(report["channel_mean"]), plain, rtol=1e-4, atol=1e-4)
    assert "normalised by the autoencoder's statistics" in text
    data.normalize(1.0)  # by what is measured, in their place
    x = to_network(data.read(np.arange(12)).stored, data.latents)
    assert_close(x.mean(dim=(0, 2, 3)), torch.zeros(4), rtol=0, atol=1e-4)
    assert_close(from_network(x, data.latents), posterior.mean, rtol=1e-4, atol=1e-4)


def test_records_without_statistics_read_as_before(tmp_path):
    torch.manual_seed(0)
    diffusers.AutoencoderKL(**TINY_KL, shift_factor=0.1).save_pretrained(tmp_path / "kl")
    spec = autoencoder.encoded(autoencoder.load_autoencoder(str(tmp_path / "kl")), "kl", 16, ("a",), "auto")
    assert (spec.scale, spec.shift, spec.channel_shift, spec.channel_scale) == (0.18215, 0.1, (), ())
    tree = {key: value for key, value in vars(spec).items() if not key.startswith("channel_")}
    assert LatentSpec.from_json(tree) == spec


def test_what_does_not_fit_is_refused(rae):
    latents = LatentSpec((4, 8, 8), ("a",), str(rae))
    with pytest.raises(ValueError, match="decodes latents of 64 channels, but these have 4"):
        autoencoder.load_decoder(latents)
    model = autoencoder.load_autoencoder(str(rae))
    with pytest.raises(ValueError, match="32 comes back as 16 from rae: use resolution=16"):
        autoencoder.encoded(model, "rae", 32, ("a",), "auto")
    with pytest.raises(ValueError, match="store=moments needs an AutoencoderKL, but rae is an AutoencoderRAE"):
        autoencoder.encoded(model, "rae", 16, ("a",), "moments")


@pytest.mark.parametrize(
    "has, said",
    [
        ({}, "an AutoencoderRAE needs diffusers>=0.37, but 0.36.0 is installed"),
        ({"AutoencoderRAE": None}, "an AutoencoderRAE needs transformers: pip install"),
    ],
)
def test_packages_that_a_rae_needs_are_named(tmp_path, monkeypatch, has, said):
    write_json(tmp_path / "config.json", {"_class_name": "AutoencoderRAE"})
    utils = SimpleNamespace(is_transformers_available=lambda: False)
    older = SimpleNamespace(AutoencoderKL=diffusers.AutoencoderKL, __version__="0.36.0", utils=utils, **has)
    monkeypatch.setitem(sys.modules, "diffusers", older)
    with pytest.raises(ValueError, match=said):
        autoencoder.load_autoencoder(str(tmp_path))
