"""Fitting other people's weights to a network: which settings a state dict is of, and whether it is this network's."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from torch import Tensor

from tread.runtime.tensor_files import FIRST, listed


def fit(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """What a DiT with the state dict `expected` is to load of weights from `where`, in its own types.

    The positions pos_embed are fixed numbers: the network's own serve where the file has none.
    Raises ValueError unless all other names and shapes are the network's; it says which settings
    the file is of.
    """
    refusal = f"the weights of {where} do not fit this network: "
    if FIRST not in state:
        raise ValueError(f"{refusal}there is no {FIRST}, as in public DiT's parameter names, but {listed(state)}")
    whole = {"pos_embed": expected["pos_embed"], **state} if "pos_embed" in expected else dict(state)
    problems = []
    if missing := [name for name in expected if name not in whole]:
        problems.append(f"missing: {listed(missing)}")
    if extra := [name for name in whole if name not in expected]:
        problems.append(f"not the network's: {listed(extra)}")
    shared = [name for name in expected if name in whole]
    if other := [
        f"{name} {tuple(whole[name].shape)} instead of {tuple(expected[name].shape)}"
        for name in shared
        if whole[name].shape != expected[name].shape
    ]:
        problems.append(f"of other shapes: {listed(other)}")
    if coarse := [f"{name} {whole[name].dtype}" for name in shared if not whole[name].is_floating_point()]:
        problems.append(f"no floating-point numbers: {listed(coarse)}")
    elif broken := [name for name in shared if not whole[name].isfinite().all()]:
        raise ValueError(f"the weights of {where} are broken: not all numbers are finite in {listed(broken)}")
    if not problems:
        return {name: whole[name].to(expected[name].dtype) for name in expected}
    theirs, ours = sizes(state), sizes(expected)
    problems.append(f"the file is of {describe(theirs)}")
    if fitting := {key: value for key, value in theirs.items() if ours.get(key) != value}:
        settings = " ".join(f"{key}={_written(value)}" for key, value in fitting.items())
        problems.append(f"settings that fit it: {settings}")
    raise ValueError("\n  ".join([refusal.rstrip(), *problems]))


def sizes(state: Mapping[str, Tensor]) -> dict[str, int | float | bool]:
    """The settings that a network's names and shapes tell; model.num_heads is not among them."""
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    if len(shapes.get(FIRST, ())) != 4:
        return {}
    hidden_size, channels, patch_size, _ = shapes[FIRST]
    blocks = {match[1] for name in shapes if (match := re.match(r"blocks\.(\d+)\.", name))}
    rwkv = "blocks.0.channel_mix.key.weight" in shapes
    found = {"model.architecture": "rwkv" if rwkv else "dit"}
    found |= {"model.hidden_size": hidden_size, "model.depth": len(blocks), "model.patch_size": patch_size}
    if width := shapes.get("blocks.0.channel_mix.key.weight" if rwkv else "blocks.0.mlp.fc1.weight"):
        found["model.mlp_ratio"] = width[0] / hidden_size
    if rows := shapes.get("final_layer.linear.weight"):
        found["model.learn_sigma"] = rows[0] == 2 * patch_size**2 * channels
    if rows := shapes.get("y_embedder.embedding_table.weight"):
        found["dataset.num_classes"] = rows[0] - 1  # one is the null class
    found["dataset.channels"] = channels
    if len(tokens := shapes.get("pos_embed", ())) == 3:
        found["dataset.size"] = math.isqrt(tokens[1]) * patch_size
    return found


def describe(found: Mapping[str, int | float | bool]) -> str:
    """Sizes in words: "hidden_size 384, depth 12, …"."""
    return ", ".join(f"{key.partition('.')[2]} {_written(value)}" for key, value in found.items())


def _written(value: int | float | bool) -> str:
    return str(value).lower()
