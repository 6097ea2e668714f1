"""Renames autoencoder weights from latent diffusion (LDM; Stable Diffusion, VA-VAE) for diffusers. LDM's names are:

    encoder.down.{i}.block.{j}.*, decoder.up.{i}.block.{j}.*   residual blocks; level 0 has the full resolution in both
    ….down.{i}.attn.{j}.{norm,q,k,v,proj_out}                  attention within a level, after each of its blocks
    ….mid.{block_1,attn_1,block_2}.*, conv_in, norm_out, conv_out, quant_conv, post_quant_conv

diffusers' own conversion leaves out attention within the levels, which VA-VAE's lowest level has.
"""

import re
from collections.abc import Mapping

from torch import Tensor

MARK = "decoder.mid.block_1.norm1.weight"  # only LDM's layout has this name
PARTS = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.")
GROUPS = 32  # of every GroupNorm; the tensors do not show this number
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
    """Return the autoencoder's tensors, keyed by LDM's names without prefixes of enclosing modules, and the names of
    all other tensors, such as a loss's or a diffusion network's. ValueError if there is no LDM autoencoder."""
    heads = [name.removesuffix(MARK) for name in state if name.endswith(MARK)]
    if not heads:
        raise ValueError("its names are neither diffusers', TAESD's nor LDM's (Stable Diffusion, VA-VAE)")
    head = min(heads, key=len)
    named = {name.removeprefix(head): name for name in state if name.startswith(tuple(head + part for part in PARTS))}
    return {name: state[full] for name, full in named.items()}, sorted(state.keys() - set(named.values()))


def config_of(state: Mapping[str, Tensor]) -> dict:
    """Return diffusers' AutoencoderKL config for tensors in LDM's names. Raises KeyError if a tensor is missing."""
    matches = [match for match in (re.match(r"encoder\.down\.(\d+)\.block\.(\d+)\.", name) for name in state) if match]
    levels, blocks = (1 + max((int(match[i]) for match in matches), default=0) for i in (1, 2))
    attends = [f"encoder.down.{level}.attn.0.q.weight" in state for level in range(levels)]
    gives = [f"decoder.up.{level}.attn.0.q.weight" in state for level in reversed(range(levels))]
    return {
        "_class_name": "AutoencoderKL",
        "in_channels": len(state["decoder.conv_out.weight"]),
        "out_channels": len(state["decoder.conv_out.weight"]),
        "latent_channels": state["decoder.conv_in.weight"].shape[1],
        "block_out_channels": [len(state[f"encoder.down.{level}.block.0.conv1.weight"]) for level in range(levels)],
        "layers_per_block": blocks,
        "norm_num_groups": GROUPS,
        "down_block_types": ["AttnDownEncoderBlock2D" if attention else "DownEncoderBlock2D" for attention in attends],
        "up_block_types": ["AttnUpDecoderBlock2D" if attention else "UpDecoderBlock2D" for attention in gives],
        "mid_block_add_attention": "decoder.mid.attn_1.q.weight" in state,
        "use_quant_conv": "quant_conv.weight" in state,
        "use_post_quant_conv": "post_quant_conv.weight" in state,
    }


def renamed(state: Mapping[str, Tensor], levels: int) -> dict[str, Tensor]:
    """Rename tensors from LDM's names to diffusers', which count the decoder's `levels` from the lowest resolution.
    Attention's 1×1 convolutions become matrices."""
    tensors = {}
    for name, value in state.items():
        name = re.sub(r"\.up\.(\d+)\.", lambda match: f".up_blocks.{levels - 1 - int(match[1])}.", name)
        for theirs, ours in RENAMED:
            name = re.sub(theirs, ours, name)
        is_matrix = ".attentions." in name and value.shape[2:] == (1, 1)
        tensors[name] = value[:, :, 0, 0] if is_matrix else value
    return tensors
