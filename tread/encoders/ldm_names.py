"""Autoencoders in the parameter names of latent diffusion (LDM), Stable Diffusion's and VA-VAE's files, for diffusers.

    encoder.down.{i}.block.{j}.*, decoder.up.{i}.block.{j}.*   residual blocks; both count levels from the picture
    ….down.{i}.attn.{j}.{norm,q,k,v,proj_out}                  attention within a level, behind each of its blocks
    ….mid.{block_1,attn_1,block_2}.*, conv_in, norm_out, conv_out, quant_conv, post_quant_conv

diffusers' own conversion leaves out attention within the levels, as VA-VAE's lowest has it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

MARK = "decoder.mid.block_1.norm1.weight"  # no other layout has this name
PARTS = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.")
GROUPS = 32  # of every GroupNorm; no name or shape says it
RENAMED = (
    (r"\.mid\.block_1\.", ".mid_block.resnets.0."),
    (r"\.mid\.block_2\.", ".mid_block.resnets.1."),
    (r"\.mid\.attn_1\.", ".mid_block.attentions.0."),
    (r"\.down\.(\d+)\.", r".down_blocks.\1."),
    (r"\.block\.(\d+)\.", r".resnets.\1."),
    (r"\.attn\.(\d+)\.", r".attentions.\1."),
    (r"\.(down|up)sample\.", r".\1samplers.0."),
    (r"\.nin_shortcut\.", ".conv_shortcut."),
    (r"\.norm_out\.", ".conv_norm_out."),
    (r"(\.attentions\.\d+)\.norm\.", r"\1.group_norm."),
    (r"(\.attentions\.\d+)\.([qkv])\.", r"\1.to_\2."),
    (r"(\.attentions\.\d+)\.proj_out\.", r"\1.to_out.0."),
)


def own_part(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The autoencoder's tensors by LDM's names without what wrappers put before them, and the names of all others.

    Such others are a loss, a network that latents were aligned with, or a diffusion network. Raises ValueError
    if there is no autoencoder of this layout.
    """
    heads = [name.removesuffix(MARK) for name in state if name.endswith(MARK)]
    if not heads:
        raise ValueError("its names are neither diffusers', TAESD's nor LDM's (Stable Diffusion, VA-VAE)")
    head = min(heads, key=len)
    named = {name.removeprefix(head): name for name in state if name.startswith(tuple(head + part for part in PARTS))}
    return {name: state[full] for name, full in named.items()}, sorted(state.keys() - set(named.values()))


def config_of(state: Mapping[str, Tensor]) -> dict:
    """The config of diffusers' AutoencoderKL with tensors of these names and shapes.

    Raises ValueError for a name that must be there, or channels that can't be.
    """
    down = [match for match in (re.match(r"encoder\.down\.(\d+)\.block\.(\d+)\.", name) for name in state) if match]
    levels, blocks = (1 + max((int(match[i]) for match in down), default=0) for i in (1, 2))
    try:
        channels = [len(state[f"encoder.down.{level}.block.0.conv1.weight"]) for level in range(levels)]
        pictures, latents = state["decoder.conv_out.weight"].shape[0], state["decoder.conv_in.weight"].shape[1]
    except LookupError as error:
        raise ValueError(f"it has names of LDM's AutoencoderKL, but no {error}") from error
    if odd := [width for width in channels if width % GROUPS]:
        raise ValueError(f"it has {odd[0]} channels in a level, but LDM's AutoencoderKL has multiples of {GROUPS}")
    attends = [f"encoder.down.{level}.attn.0.q.weight" in state for level in range(levels)]
    gives = [f"decoder.up.{level}.attn.0.q.weight" in state for level in reversed(range(levels))]
    return {
        "_class_name": "AutoencoderKL",
        "in_channels": pictures,
        "out_channels": pictures,
        "latent_channels": latents,
        "block_out_channels": channels,
        "layers_per_block": blocks,
        "norm_num_groups": GROUPS,
        "down_block_types": ["AttnDownEncoderBlock2D" if attention else "DownEncoderBlock2D" for attention in attends],
        "up_block_types": ["AttnUpDecoderBlock2D" if attention else "UpDecoderBlock2D" for attention in gives],
        "mid_block_add_attention": "decoder.mid.attn_1.q.weight" in state,
        "use_quant_conv": "quant_conv.weight" in state,
        "use_post_quant_conv": "post_quant_conv.weight" in state,
    }


def renamed(state: Mapping[str, Tensor]) -> dict[str, tuple[str, Tensor]]:
    """diffusers' name → LDM's name and the tensor as diffusers has it: 1×1 convolutions of attention as matrices."""
    top = max(
        (int(match[1]) for match in (re.match(r"decoder\.up\.(\d+)\.", name) for name in state) if match), default=0
    )
    tensors = {}
    for name, value in state.items():
        new = re.sub(r"\.up\.(\d+)\.", lambda match: f".up_blocks.{top - int(match[1])}.", name)
        for theirs, ours in RENAMED:
            new = re.sub(theirs, ours, new)
        if ".attentions." in new and value.shape[2:] == (1, 1):
            value = value[:, :, 0, 0]
        tensors[new] = name, value
    return tensors
