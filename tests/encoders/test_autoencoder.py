"""Stored numbers → network latents → pixels, against the formulas and diffusers' own decoding."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import TINY_KL
from torch.testing import assert_close

from tread.data.latents import LatentSpec, to_network
from tread.encoders import autoencoder

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


def test_an_autoencoder_that_can_not_be_had_is_named(tmp_path):
    with pytest.raises(ValueError, match="(?s)nowhere.*decode=false"):
        autoencoder.load_decoder(replace(PLAIN, autoencoder=str(tmp_path / "nowhere")))


def test_preview_shows_the_latents_themselves():
    x = torch.zeros(2, 4, 8, 8)
    x[:, 1], x[:, 2] = 3.0, -3.0
    assert autoencoder.preview(x)[0, :, 0, 0].tolist() == [128, 255, 0]
    assert autoencoder.preview(x[:, :1]).shape == (2, 1, 8, 8)
