"""Autoencoders in LDM's parameter names (Stable Diffusion's, VA-VAE's), loaded into diffusers' class.

The reference is written here from the layout as described: residual blocks of GroupNorm (32 groups, eps 1e-6), swish
and convolutions, attention of one head by 1×1 convolutions, halving after zeros below and right, nearest doubling.
"""

import logging
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.testing import assert_close

from tread.data.latents import LatentSpec
from tread.encoders import autoencoder

Z = LatentSpec(shape=(6, 4, 4), classes=("a",), autoencoder="unknown")


class Bag(nn.Module):
    """Modules and lists of modules by names."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, nn.ModuleList(part) if isinstance(part, list) else part)


def norm(width):
    return nn.GroupNorm(32, width, eps=1e-6)


class Block(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.norm1, self.conv1 = norm(before), nn.Conv2d(before, after, 3, padding=1)
        self.norm2, self.conv2 = norm(after), nn.Conv2d(after, after, 3, padding=1)
        if before != after:
            self.nin_shortcut = nn.Conv2d(before, after, 1)

    def forward(self, x):
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return h + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = norm(width)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (part(h).flatten(2) for part in (self.q, self.k, self.v))  # (B, C, tokens)
        weights = (q.transpose(1, 2) @ k / q.shape[1] ** 0.5).softmax(dim=-1)
        return x + self.proj_out((v @ weights.transpose(1, 2)).view_as(x))


class Side(nn.Module):
    """An encoder (with `down`) or a decoder (with `up`), whose lowest level attends."""

    def __init__(self, encodes, widths, blocks, inside, outside):
        super().__init__()
        self.encodes, last = encodes, len(widths) - 1
        at = widths[0] if encodes else widths[-1]
        self.conv_in = nn.Conv2d(inside, at, 3, padding=1)
        levels = [None] * len(widths)
        if not encodes:
            self.mid = self._mid(at)
        for level in range(len(widths)) if encodes else reversed(range(len(widths))):
            residual = [Block(at if j == 0 else widths[level], widths[level]) for j in range(blocks)]
            at, parts = widths[level], {"block": residual}
            parts["attn"] = [Attention(at) for _ in range(blocks)] if level == last else []
            if level != (last if encodes else 0):
                conv = nn.Conv2d(at, at, 3, stride=2) if encodes else nn.Conv2d(at, at, 3, padding=1)
                parts["downsample" if encodes else "upsample"] = Bag(conv=conv)
            levels[level] = Bag(**parts)
        setattr(self, "down" if encodes else "up", nn.ModuleList(levels))
        if encodes:
            self.mid = self._mid(at)
        self.norm_out, self.conv_out = norm(at), nn.Conv2d(at, outside, 3, padding=1)

    @staticmethod
    def _mid(width):
        return Bag(block_1=Block(width, width), attn_1=Attention(width), block_2=Block(width, width))

    def forward(self, x):
        x = self.conv_in(x)
        middle = [self.mid.block_1, self.mid.attn_1, self.mid.block_2]
        for part in [] if self.encodes else middle:
            x = part(x)
        for level in self.down if self.encodes else reversed(self.up):
            for number, block in enumerate(level.block):
                x = block(x)
                x = level.attn[number](x) if len(level.attn) else x
            if hasattr(level, "downsample"):
                x = level.downsample.conv(F.pad(x, (0, 1, 0, 1)))
            if hasattr(level, "upsample"):
                x = level.upsample.conv(x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3))
        for part in middle if self.encodes else []:
            x = part(x)
        return self.conv_out(F.silu(self.norm_out(x)))


@pytest.fixture(scope="module")
def theirs():
    """An autoencoder of VA-VAE's layout, small: (B, 3, 16, 16) to (B, 6, 4, 4)."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        widths = (32, 32, 64)
        made = Bag(
            encoder=Side(True, widths, 1, 3, 12),
            decoder=Side(False, widths, 2, 6, 3),
            quant_conv=nn.Conv2d(12, 12, 1),
            post_quant_conv=nn.Conv2d(6, 6, 1),
        )
        for name, parameter in made.named_parameters():
            if "norm" in name:  # else all are 1 or 0, and one could stand for another
                nn.init.uniform_(parameter, 0.5, 1.5)
    return made.eval().requires_grad_(False)


@pytest.mark.parametrize("form", ["plain.safetensors", "lightning.ckpt", "plain.pt", "inside.pt"])
def test_pictures_and_latents_are_those_of_the_layout(theirs, tmp_path, caplog, form):
    """And what else a checkpoint holds is set aside, in one line."""
    path, state = tmp_path / form, dict(theirs.state_dict())
    others = {"loss.logvar": torch.zeros(1), "foundation_model.model.blocks.0.norm1.weight": torch.ones(3)}
    if form == "plain.safetensors":
        save_file(state, path)
    elif form == "inside.pt":
        torch.save({f"first_stage_model.{name}": value for name, value in state.items()}, path)
    else:
        torch.save({"state_dict": state | others, "epoch": 3} if form == "lightning.ckpt" else state, path)
    with caplog.at_level(logging.WARNING):
        model = autoencoder.load_autoencoder(str(path))
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == (
        ["2 tensors beside the autoencoder's are set aside: foundation_model, loss"] * (form == "lightning.ckpt")
    )
    with torch.no_grad():
        z, pixels = torch.randn(2, 6, 4, 4), torch.randn(2, 3, 16, 16)
        pictures = theirs.decoder(theirs.post_quant_conv(z))
        assert_close(model.decode(z).sample, pictures, atol=1e-5, rtol=0)
        moments = theirs.quant_conv(theirs.encoder(pixels))
        assert_close(model.encode(pixels).latent_dist.mean, moments[:, :6], atol=1e-5, rtol=0)
        decoded = autoencoder.load_decoder(Z, autoencoder=str(path))(z)
    assert pictures.std() > 0.1  # they do show something
    assert (decoded.int() - autoencoder.to_uint8(pictures).int()).abs().max() <= 1
    assert model.config.scaling_factor == 1.0  # no file says one; Stable Diffusion's sizes alone have theirs


def without(*starts):
    return lambda state: {name: value for name, value in state.items() if not name.startswith(starts)}


FAULTS = {
    "a block is missing": (without("decoder.up.2.attn.1."), r"Missing key\(s\).*decoder.up_blocks.0.attentions.1"),
    "no encoder": (without("encoder.", "quant_conv."), "it has no 'encoder.down"),
    "another shortcut": (
        lambda state: {name.replace("nin_shortcut", "conv_shortcut3"): value for name, value in state.items()},
        r"Unexpected key\(s\).*encoder.down_blocks.2.resnets.0.conv_shortcut3.weight",
    ),
    "one z without its spread": (
        lambda state: state | {"quant_conv.weight": torch.ones(6, 6, 1, 1)},
        "size mismatch for quant_conv.weight",
    ),
    "something else": (lambda state: {"layers.0.weight": torch.ones(2)}, "neither diffusers', TAESD's nor LDM's"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_named_with_what_to_do(theirs, tmp_path, fault):
    change, shown = FAULTS[fault]
    torch.save(change(dict(theirs.state_dict())), tmp_path / "vae.pt")
    with pytest.raises(ValueError, match=f"(?s)vae.pt.*{shown}.*save_latents=true"):
        autoencoder.load_decoder(Z, autoencoder=str(tmp_path / "vae.pt"))


def test_an_autoencoder_of_other_channels_and_one_that_nobody_named(theirs, tmp_path):
    torch.save(theirs.state_dict(), tmp_path / "vae.pt")
    with pytest.raises(ValueError, match="decodes latents of 6 channels, but these have 32"):
        autoencoder.load_decoder(replace(Z, shape=(32, 4, 4)), autoencoder=str(tmp_path / "vae.pt"))
    with pytest.raises(ValueError, match="did not say which autoencoder made them(.|\n)*autoencoder=…"):
        autoencoder.load_decoder(Z)
