"""Adapts trained weights to other classes (setting init_classes) and to another latent size (setting init_positions).

A label table has one row per class, and a last row for no class. Position embeddings are fixed functions of a token's
row and column. init_positions=recomputed computes them for the new grid; if that is larger, its added rows and columns
are new to the network. init_positions=scaled multiplies rows and columns by model.position_scale to span the old grid.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from torch import Tensor

from tread.checkpoints.run_log import RunLog
from tread.checkpoints.weights import POSITIONS, StoredWeights, read_weights, sizes
from tread.diffusion.labels import Label, class_number
from tread.models.embedders import sincos_positions
from tread.models.rotary import ROUNDING, TABLES, check_tables, public_tables
from tread.runtime.hub import local
from tread.runtime.tensor_files import LABELS, Weights

Positions = Literal["recomputed", "scaled"]


def new_classes(
    stored: StoredWeights, table: Tensor, asked: str | Mapping[Label, Label], classes: Sequence[str]
) -> tuple[StoredWeights, str]:
    """Return (weights, message): `stored` with a label table for the new `classes`, which replace the old ones in the
    checkpoint's record, and a line to print that says which rows are copied.

    table  the network's newly initialised label table, (len(classes) + 1, D); classes not in `asked` keep its rows.
    asked  {old class: new class} for the rows to copy, each class by name or number; "new": copy no class's row. A
           number that is also a class name counts as the name. The row for no class is always copied.

    Raises ValueError for unknown classes, a class that is named twice, and weights without a label table.
    """
    if LABELS not in stored.state:
        raise ValueError(f"init_classes is given, but {stored.where} has no {LABELS}: it has no classes")
    old = stored.state[LABELS]
    recorded = stored.source.info.get("latents", {}).get("classes", ()) if stored.source else ()
    names = tuple(recorded) or tuple(map(str, range(len(old) - 1)))
    pairs = [] if asked == "new" else [(_number(a, names), _number(b, tuple(classes))) for a, b in asked.items()]
    for which, listed, known in (("old", [a for a, _ in pairs], names), ("new", [b for _, b in pairs], classes)):
        if twice := [number for number in listed if listed.count(number) > 1]:
            raise ValueError(f"init_classes names the {which} class {known[twice[0]]!r} ({twice[0]}) twice")
    fits = old.shape[1] == table.shape[1]  # else `fit` will refuse the weights, and name the settings for their width
    rows = table.detach().clone() if fits else old.new_zeros(len(table), old.shape[1])
    rows[-1] = old[-1]
    for before, now in pairs:
        rows[now] = old[before]
    kept = ", ".join(f"{names[a]} → {classes[b]}" for a, b in pairs[:5]) + ", …" * (len(pairs) > 5)
    said = f"classes: {len(pairs)} of {len(classes)} begin as old ones{f' ({kept})' if kept else ''}, the others anew"
    source = stored.source
    if source is not None and "latents" in source.info:
        source = replace(source, info={**source.info, "latents": {**source.info["latents"], "classes": [*classes]}})
    return replace(stored, state={**stored.state, LABELS: rows}, source=source), said


def _number(label: Label, classes: tuple[str, ...]) -> int:
    named = str(label) in classes or not str(label).isdecimal()
    number = class_number(str(label) if named else int(label), classes)
    if number >= len(classes):
        raise ValueError(f"init_classes names class {label}, but the classes there are 0..{len(classes) - 1}")
    return number


def new_positions(stored: StoredWeights, side: int, scale: float) -> tuple[StoredWeights, list[str]]:
    """Return (weights, lines to print): `stored` for a grid of side × side tokens. Position embeddings are left out, as
    the network computes its own; rotary tables are computed anew; `scale` is recorded as model.position_scale. Raises
    ValueError if the old grid is unknown, or the stored positions are not the fixed ones for it and its scale."""
    before, stretched = old_side(stored), float(stored.recorded().get("model.position_scale", 1.0))
    for name in (name for name in POSITIONS if name in stored.state):
        given = stored.state[name].float()
        if (given[0] - sincos_positions(given.shape[2], before, stretched)).abs().max() > ROUNDING:
            raise ValueError(f"{name} of {stored.where} are not fixed sines and cosines: they can't be recomputed")
    tables = {name: stored.state[name] for name in TABLES if name in stored.state}
    check_tables(tables, before**2, stored.where)
    state = {name: value for name, value in stored.state.items() if name not in POSITIONS}
    state |= {name: public_tables(table.shape[1], side)[name] for name, table in tables.items()}
    how = "go on beyond the old ones" if side > before else "are those"
    if scale != stretched:
        spanning = math.isclose(side * scale, before * stretched)
        how = "span the old range" if spanning else f"are {scale:g} apart, where {stretched:g} was"
    lines = [f"positions: {before}×{before} tokens where these weights were trained, {side}×{side} now: they {how}"]
    if side > before:
        remedy = "rf.train_shift above 1, or a larger edm.P_mean, offsets it"
        lines += [f"in a larger picture the same noise hides less: {remedy}"]
    source = stored.source
    if source is not None and "model" in source.info["config"]:
        model = {**source.info["config"]["model"], "position_scale": scale}
        source = replace(source, info={**source.info, "config": {**source.info["config"], "model": model}})
    return replace(stored, state=state, source=source), lines


def old_side(stored: StoredWeights) -> int:
    """Return the number of rows of the token grid on which `stored` was trained. Raises ValueError if it is unknown."""
    if "dataset.size" not in sizes(stored.state):
        raise ValueError(f"init_positions is given, but {stored.where} holds no pos_embed that tells its size")
    return math.isqrt(stored.state["pos_embed"].shape[1])


def position_scale(init_from: str, weights: Weights, run: Path, side: int) -> float:
    """Return model.position_scale for init_positions=scaled: that of a run begun in folder `run`, else the scale (1 if
    not recorded) × token rows of init_from's `weights` / `side`, so that `side` rows of tokens span the old grid."""
    if starts := RunLog(run).starts():
        return float(starts[0]["config"]["model"].get("position_scale", 1.0))
    stored = read_weights(local(init_from), weights)
    return float(stored.recorded().get("model.position_scale", 1.0)) * old_side(stored) / side
