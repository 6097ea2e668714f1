"""What an export changes where it is asked to: weights in half precision, and a record without this machine's paths."""

from __future__ import annotations

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


def stored_dtype(info: Mapping) -> Dtype:
    """What a checkpoint's weights are stored in; training writes fp32, and no record of it."""
    return info.get("dtype", "fp32")


def as_dtype(tensors: Mapping[str, Tensor], dtype: Dtype) -> dict[str, Tensor]:
    """The same tensors, rounded to a type. Raises ValueError where numbers are not finite in it."""
    rounded = {n: value.to(TYPES[dtype]) if value.is_floating_point() else value for n, value in tensors.items()}
    if lost := [name for name, value in rounded.items() if not value.isfinite().all()]:
        most = max(tensors[name].abs().max().item() for name in lost)
        limit = f"{dtype} ends at {torch.finfo(TYPES[dtype]).max:,.0f}"
        raise ValueError(
            f"{listed(lost)}: no {dtype} holds numbers up to {most:,.6g}, where {limit}; dtype=fp32 keeps them"
        )
    return rounded


def public_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """MaskDiT's weights by the names of its released files, labels as a matrix (D, classes) without the null class.

    Raises ValueError for weights of another network, whose names are public ones already, or if the null class is not
    zero, for which those files have no place.
    """
    if MASKDIT not in tensors:
        raise ValueError("public=true is of MaskDiT: the names of this network are those of its public files already")
    if tensors[LABELS][-1].any():
        raise ValueError(f"the null class, the last row of {LABELS}, is not zero: MaskDiT's files have no place for it")
    return {
        f"model.{name}": value[:-1].T.contiguous() if name == LABELS else value.contiguous()
        for name, value in tensors.items()
    }


def record(info: Mapping, paths: Paths, autoencoder: str | None) -> dict:
    """info.json's content for others to read.

    paths        "short": of each absolute path the last two names, as "imagenette/train".
    autoencoder  the hub id that is named in the place of what is recorded, whose fingerprint stays; None: what is.

    Raises ValueError for another name than a hub id, or if there is no autoencoder.
    """
    content, latents = dict(info), dict(info.get("latents", {}))
    if autoencoder is not None:
        if latents.get("autoencoder", "pixels") == "pixels":
            raise ValueError(f"autoencoder={autoencoder}, but this network draws pixels and has none")
        if not HUB_ID.fullmatch(autoencoder) or autoencoder.endswith(WEIGHT_FILES):
            raise ValueError(
                f"autoencoder={autoencoder} is no hub id, as madebyollin/taesd is: others have no such file"
            )
        latents["autoencoder"] = autoencoder
    if paths == "short":
        content = shortened(content)
        latents["autoencoder"] = shortened(latents.get("autoencoder"))  # nothing else there is a path
    return {key: latents if key == "latents" else value for key, value in content.items()}


def shortened(value: object) -> object:
    """A tree of JSON, where of absolute paths the last two names are left."""
    if isinstance(value, Mapping):
        return {key: shortened(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shortened(item) for item in value]
    if isinstance(value, str) and PurePath(value).is_absolute():
        return "/".join(PurePath(value).parts[1:][-2:])
    return value
