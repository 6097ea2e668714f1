"""Optional changes to an exported checkpoint: half precision, public parameter names, shortened paths in info.json."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Literal

import torch
from torch import Tensor

from tread.runtime.hub import HUB_ID, WEIGHT_FILES
from tread.runtime.tensor_files import LABELS, MASKDIT, listed

Dtype = Literal["fp32", "fp16"]
Paths = Literal["full", "short"]
TYPES = {"fp32": torch.float32, "fp16": torch.float16}


def as_dtype(tensors: Mapping[str, Tensor], dtype: Dtype) -> dict[str, Tensor]:
    """Round floating-point tensors to a dtype. Raises ValueError if numbers are not finite in that dtype."""
    rounded = {n: value.to(TYPES[dtype]) if value.is_floating_point() else value for n, value in tensors.items()}
    if lost := [name for name, value in rounded.items() if not value.isfinite().all()]:
        limit = f"{torch.finfo(TYPES[dtype]).max:,.0f}"
        raise ValueError(f"{listed(lost)}: not finite, or outside {dtype}'s range of ±{limit}; dtype=fp32 has more")
    return rounded


def public_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert MaskDiT's weights to the names and shapes of its released files, whose label table is (D, classes),
    without the null class. Raises ValueError for other networks, whose names are public already, and for a null class
    that is not zero, since the released files can't hold it."""
    if MASKDIT not in tensors:
        raise ValueError("public=true is for MaskDiT: this network already has the names of its public files")
    if tensors[LABELS][-1].any():
        raise ValueError(f"the null class, the last row of {LABELS}, is not zero: MaskDiT's files have no place for it")
    return {
        f"model.{name}": value[:-1].T.contiguous() if name == LABELS else value.contiguous()
        for name, value in tensors.items()
    }


def record(info: Mapping, paths: Paths, autoencoder: str | None) -> dict:
    """Return info.json's content for publication, without the entry "adapter", as exported weights have LoRA's adapters
    merged in. Raises ValueError if `autoencoder` is not a hub id, or is given for a network that works on pixels.

    paths        "short" keeps only the last two names of each absolute path, as in "imagenette/train"; "full": all.
    autoencoder  hub id to record in place of the present name; the recorded hash of weights stays. None: no change.
    """
    content, latents = {key: value for key, value in info.items() if key != "adapter"}, dict(info.get("latents", {}))
    if autoencoder is not None:
        if latents.get("autoencoder", "pixels") == "pixels":
            raise ValueError(f"autoencoder={autoencoder}, but this network draws pixels and has none")
        if not HUB_ID.fullmatch(autoencoder) or autoencoder.endswith(WEIGHT_FILES):
            raise ValueError(f"autoencoder={autoencoder} is no hub id, such as madebyollin/taesd")
        latents["autoencoder"] = autoencoder
    if paths == "short":
        content = shortened(content)
        latents["autoencoder"] = shortened(latents.get("autoencoder"))  # the only entry that may be a path
    return {key: latents if key == "latents" else value for key, value in content.items()}


def shortened(value: object) -> object:
    """Return a tree of JSON values with each absolute path cut to its last two names."""
    if isinstance(value, Mapping):
        return {key: shortened(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shortened(item) for item in value]
    if isinstance(value, str) and PurePath(value).is_absolute() and len(PurePath(value).parts) > 1:  # not a word "/"
        return "/".join(PurePath(value).parts[1:][-2:])
    return value
