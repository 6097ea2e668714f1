"""Stored numbers → network latents → pixels, against the formulas and diffusers' own decoding."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import TINY_KL
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from tread.data.latents import LatentSpec, to_network
from tread.encoders import autoencoder
from tread.preparing.archives import Tar
from tread.preparing.images import read_rgb

PLAIN = LatentSpec(shape=(4, 8, 8), classes=("a",), autoencoder="pixels", scale=0.5, shift=0.25)


def test_plain_latents_are_scaled_once():
    z = torch.randn(2, 4, 8, 8)
    assert_close(to_network(z, PLAIN), (z - 0.25) * 0.5)
    assert torch.equal(to_network(z, replace(PLAIN, scale_applied=True)), z)


@pytest.mark.parametrize("spread", ["logvar", "std"])
def test_moments_are_sampled_as_their_spread_says(spread):
    moments = replace(PLAIN, content="moments", spread=spread)
    mean, std, noise = torch.randn(2, 4, 8, 8), torch.rand(2, 4, 8, 8) + 0.1, torch.randn(2, 4, 8, 8)
    stored = torch.cat([mean, 2 * std.log() if spread == "logvar" else std], dim=1)
    assert_close(to_network(stored, moments, noise), (mean + std * noise - 0.25) * 0.5)
    assert_close(to_network(stored, moments), (mean - 0.25) * 0.5)


def test_pixels_decode_to_what_they_were_rounded_and_clipped():
    for given in ({"autoencoder": "taesd"}, {"precision": "bf16"}):
        with pytest.raises(ValueError, match="are of latents, but this network draws pixels"):
            autoencoder.load_decoder(PLAIN, **given)
    grey = torch.arange(256, dtype=torch.uint8).view(4, 1, 8, 8)
    latents = replace(PLAIN, shape=(1, 8, 8))
    assert torch.equal(autoencoder.load_decoder(latents)(to_network(grey.float() / 127.5 - 1, latents)), grey)
    values = torch.tensor([-2.0, -1.0, 1 / 127.5 * 0.9, 1.0, 3.0])
    assert autoencoder.to_uint8(values).tolist() == [0, 0, 128, 255, 255]


@pytest.mark.parametrize("kind", ["AutoencoderKL", "AutoencoderTiny"])
def test_decoding_is_diffusers_own(tmp_path, kind):
    import diffusers

    torch.manual_seed(0)
    if kind == "AutoencoderKL":
        model = diffusers.AutoencoderKL(**TINY_KL)
    else:
        model = diffusers.AutoencoderTiny(
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            num_encoder_blocks=(1, 1),
            num_decoder_blocks=(1, 1),
        )
    model.eval().save_pretrained(tmp_path)
    x = torch.randn(2, 4, 8, 8)
    pictures = autoencoder.load_decoder(replace(PLAIN, autoencoder=str(tmp_path)))(x)
    with torch.no_grad():
        expected = model.decode(x / 0.5 + 0.25).sample
    assert pictures.dtype == torch.uint8 and pictures.shape == expected.shape and pictures.shape[1] == 3
    expected = np.clip(np.rint(expected.numpy() * 127.5 + 127.5), 0, 255)
    assert np.abs(pictures.numpy() - expected).max() <= 1  # a value on the edge may round either way


def bf16_differences(folder, x):
    """Differences in grey levels between decoding in bf16 and in fp32. TF32 is fp32 on a CPU."""
    latents = replace(PLAIN, autoencoder=str(folder), scale=1.0, shift=0.0)
    exact, tf32, bf16 = (autoencoder.load_decoder(latents, precision=kind)(x) for kind in ("fp32", "tf32", "bf16"))
    assert torch.equal(tf32, exact)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # as within a training step
        assert torch.equal(autoencoder.load_decoder(latents)(x), exact)
    with torch.no_grad():
        model = autoencoder.load_autoencoder(str(folder))
        assert torch.equal(exact, autoencoder.to_uint8(model.decode(x).sample))
    return (bf16.int() - exact.int()).abs()


def test_decoding_in_bf16_is_close(tmp_path):
    """A random AutoencoderKL: on average half a grey level, at most 8."""
    import diffusers

    torch.manual_seed(0)
    diffusers.AutoencoderKL(**TINY_KL).save_pretrained(tmp_path)
    differences = bf16_differences(tmp_path, torch.randn(8, 4, 8, 8))
    assert 0 < differences.float().mean() < 0.5 and differences.max() <= 8


@pytest.mark.slow
def test_decoding_of_photos_in_bf16_is_close(asset, tmp_path):
    """TAESD's latents of photos: on average a grey level, 99.9% within 8."""
    import diffusers

    weights = {name: value.float() for name, value in load_file(asset("weights/taesd.fp8.safetensors")).items()}
    model = diffusers.AutoencoderTiny()
    model.load_state_dict(weights)
    model.save_pretrained(tmp_path)
    tar = Tar(asset("data/imagenet1000_adm256.tar"))
    names = sorted(name for name in tar.names if name.endswith(".jpg"))[::250]
    photos = torch.stack([torch.from_numpy(np.array(read_rgb(tar.read(name)))) for name in names]).permute(0, 3, 1, 2)
    with torch.no_grad():
        x = model.eval().encode(photos / 127.5 - 1).latents
    differences = bf16_differences(tmp_path, x)
    assert differences.float().mean() < 1 and (differences <= 8).float().mean() > 0.999, differences.float().mean()


@pytest.mark.parametrize("kind, tf32, low", [("fp32", False, False), ("tf32", True, False), ("bf16", None, True)])
def test_a_decoder_runs_in_its_precision_and_leaves_settings_as_they_were(tmp_path, monkeypatch, kind, tf32, low):
    import diffusers

    diffusers.AutoencoderKL(**TINY_KL).save_pretrained(tmp_path)
    seen, load, matmul = [], autoencoder.load_autoencoder, torch.backends.cuda.matmul

    def watched(*given):
        model, low = load(*given), torch.is_autocast_enabled
        model.decoder.register_forward_hook(lambda *_: seen.append((matmul.allow_tf32, low("cpu"))))
        return model

    monkeypatch.setattr(autoencoder, "load_autoencoder", watched)
    decode = autoencoder.load_decoder(replace(PLAIN, autoencoder=str(tmp_path)), precision=kind)
    usual = matmul.allow_tf32
    try:
        for before in (False, True):
            matmul.allow_tf32 = before
            decode(torch.randn(1, 4, 8, 8))
            assert seen.pop() == (before if tf32 is None else tf32, low) and matmul.allow_tf32 == before
    finally:
        matmul.allow_tf32 = usual


def test_a_file_with_diffusers_older_names_is_read_as_from_pretrained_does(tmp_path, monkeypatch):
    import diffusers

    monkeypatch.setitem(autoencoder.SD_CONFIG, "block_out_channels", [32] * 4)
    monkeypatch.setitem(autoencoder.SD_CONFIG, "layers_per_block", 1)
    model = diffusers.AutoencoderKL.from_config(autoencoder.SD_CONFIG)
    pairs = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    state = {re.sub(r"(to_.|to_out\.0)(?=\.(weight|bias))", lambda m: pairs[m[0]], k): v.contiguous()
             for k, v in model.state_dict().items()}  # fmt: skip
    model.save_config(tmp_path)
    save_file(state, tmp_path / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    theirs = diffusers.AutoencoderKL.from_pretrained(tmp_path).state_dict()
    ours = autoencoder.load_autoencoder(str(tmp_path / "diffusion_pytorch_model.safetensors")).state_dict()
    assert any("query" in name for name in state) and all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_an_autoencoder_that_can_not_be_had_is_named(tmp_path):
    with pytest.raises(ValueError, match="(?s)nowhere.*decode=false"):
        autoencoder.load_decoder(replace(PLAIN, autoencoder=str(tmp_path / "nowhere")))


def test_preview_shows_the_latents_themselves():
    x = torch.zeros(2, 4, 8, 8)
    x[:, 1], x[:, 2] = 3.0, -3.0
    assert autoencoder.preview(x)[0, :, 0, 0].tolist() == [128, 255, 0]
    assert autoencoder.preview(x[:, :1]).shape == (2, 1, 8, 8)
