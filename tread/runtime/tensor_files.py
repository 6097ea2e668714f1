"""Files of tensors by name, one's own and other people's, whose wrappers' names are taken off.

What training code leaves in a file: weights alone; {"model": …, "ema": …, "opt": …, "args": …} (public DiT,
SiT); {"model_state_dict": …, "ema_state_dict": …} (released TREAD); ema_pytorch's "ema_model.…" and
"online_model.…". Names begin as the wrappers had it: "module." (DDP), "model." (a preconditioned
network), "_orig_mod." (torch.compile, also in the middle). Released MaskDiT's matrix of labels becomes a table.
"""

from __future__ import annotations

import argparse
import json
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

# what readers raise for files that are damaged or something else; torch's stumbles over whatever it finds there
UNREADABLE = (SafetensorError, UnpicklingError, RuntimeError, OSError, EOFError)
UNREADABLE += (LookupError, ValueError, TypeError, AttributeError)
Weights = Literal["ema", "model"]  # averaged and raw ones
KEYS = {  # where training code keeps averaged and raw weights
    "ema": ("ema", "ema_state_dict", "model_ema", "ema_model"),
    "model": ("model", "model_state_dict", "state_dict", "module"),
}
FLAT = {"ema": "ema_model.", "model": "online_model."}  # ema_pytorch keeps both in one state dict
FIRST = "x_embedder.proj.weight"  # the name that tells where a DiT's own names begin
WRAPPERS = re.compile(r"((module|model|net|ema_model)\.)*")
LABELS = "y_embedder.embedding_table.weight"
MASKDIT = "decoder_layer.linear.weight"  # the name that tells a MaskDiT
COUNTERS = {"initted", "step", "n_averaged"}  # of ema_pytorch and torch's AveragedModel: one number each, no weights


def read_state_dict(path: Path, weights: str = "ema") -> dict[str, Tensor]:
    """One kind of weights in a .safetensors, .pt or .pth file, by the network's own names.

    weights  "ema", "model" (raw), or "any": averaged ones where there are. A file of weights alone does
             not say which it holds, and serves for each.
    Raises ValueError, also if the file holds the other kind only.
    """
    return read_kind(path, weights)[1]


def read_kind(path: Path, weights: str = "ema") -> tuple[str | None, dict[str, Tensor]]:
    """As read_state_dict, with which kind it is, "ema" or "model": None where the file does not say."""
    parts = _parts(Path(path))
    kind = next((kind for kind in KEYS if weights in (kind, "any") and kind in parts), None)
    if kind in parts:
        return kind, plain_names(_tensors(*parts[kind]))
    if weights == "ema":
        raise ValueError(
            f"{path} holds raw weights and no averaged ones: init_weights=model starts a run from those, "
            "take=model imports them"
        )
    raise ValueError(f"{path} holds averaged weights (ema) and no raw ones")


def read_state_dicts(path: Path) -> dict[str | None, dict[str, Tensor]]:
    """All weights in a file: "ema" and "model", as far as they are there, or None → weights of an unknown kind.

    Tensors of a .pt file may be mapped from it. Raises ValueError.
    """
    return {kind: plain_names(_tensors(*part)) for kind, part in _parts(Path(path)).items()}


def _parts(path: Path) -> dict[str | None, tuple[object, str]]:
    """A file's weights by kind, not yet looked at: each as what is there and where."""
    content = _read(path)
    parts = {}
    for kind, keys in KEYS.items():
        held = [key for key in keys if isinstance(content, dict) and isinstance(content.get(key), dict)]
        if held:
            part = content[held[0]]
            parts[kind] = (_flat(part).get(kind, part), f"{path}, under {held[0]!r},")
    return parts or {kind: (part, str(path)) for kind, part in (_flat(content) or {None: content}).items()}


def _read(path: Path) -> object:
    """What a file holds. Of objects, only tensors, plain values and the options in an argparse.Namespace are made."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except UNREADABLE as error:
        foreign = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, UnpicklingError) else None
        why = what_is_wrong(path) or str(error)
        if foreign:
            why = (
                f"it holds an object of {foreign[1]}, and making such objects can run any code. Where you trust the "
                "file, save its tensors alone: torch.save({'model': {…}, 'ema': {…}}, …)"
            )
        raise ValueError(f"{path} could not be read as a state dict: {why}") from error


def what_is_wrong(path: Path) -> str | None:
    """What a damaged file of tensors lacks, in plain words, and what to do; None where that can't be seen."""
    if not path.is_file():
        return None if path.exists() else "it is not there"
    size, again = path.stat().st_size, "copy or download it again"
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        header = file.read(min(length, size)) if path.suffix == ".safetensors" else b""
    if not size:
        return f"it is empty; {again}"
    if start == b"version ":
        return "it is a pointer of Git LFS, a text in the place of the file; git lfs pull fetches it"
    if path.suffix != ".safetensors":
        cut = start.startswith(b"PK") and not zipfile.is_zipfile(path)
        return f"it is cut short: {size:,} bytes, without the list of contents at its end; {again}" if cut else None
    if size < 8 or (header.startswith(b"{") and len(header) < length):
        return f"it is cut short: {size:,} bytes, more than {8 + (length if size >= 8 else 0):,} expected; {again}"
    try:
        ends = [entry["data_offsets"][1] for name, entry in json.loads(header).items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (ValueError, LookupError, TypeError, AttributeError):
        return f"it is no safetensors file, or damaged at its beginning; {again}"
    if size == expected:
        return None
    return f"it is {'cut short' if size < expected else 'damaged'}: {size:,} bytes, {expected:,} expected; {again}"


def _tensors(content: object, where: str) -> dict[str, Tensor]:
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{where} holds no state dict (names → tensors)")
    odd = [str(name) for name, value in content.items() if not (isinstance(name, str) and isinstance(value, Tensor))]
    if odd:
        known = ", ".join(key for keys in KEYS.values() for key in keys)
        raise ValueError(
            f"{where} holds no state dict (names → tensors): {listed(odd)} is something else, "
            f"and none of the keys {known} holds weights"
        )
    return content


def _flat(content: object) -> dict[str, dict]:
    """The networks in an ema_pytorch state dict by kind; {} for anything else."""
    names = [name for name in content if isinstance(name, str)] if isinstance(content, dict) else []
    if not any(name.startswith(FLAT["ema"]) for name in names):
        return {}
    rest = {name: content[name] for name in names if name not in COUNTERS and not name.startswith(tuple(FLAT.values()))}
    parts = {
        kind: {name.removeprefix(prefix): content[name] for name in names if name.startswith(prefix)}
        for kind, prefix in FLAT.items()
    }
    return {kind: part | rest for kind, part in parts.items() if part}


def plain_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors by a DiT's own names, without those that wrappers put before them.

    Wrappers' counters are left out; other entries beside the network's keep their names. State dicts that
    are no DiT's lose "_orig_mod." alone. Raises ValueError if two entries come to one name.
    """
    names = {name: name.replace("_orig_mod.", "") for name in state}
    heads = [name.removesuffix(FIRST) for name in names.values() if name.endswith(FIRST)]
    head = min((head for head in heads if WRAPPERS.fullmatch(head)), key=len, default=None)
    if head is not None:
        counters = {n for n, plain in names.items() if plain.rpartition(".")[2] in COUNTERS and state[n].numel() == 1}
        names = {name: plain.removeprefix(head) for name, plain in names.items() if name not in counters}
    if len(set(names.values())) < len(names):
        twice = [plain for plain in set(names.values()) if list(names.values()).count(plain) > 1]
        raise ValueError(f"more than one entry comes to {listed(sorted(twice))}: this is not one network's state dict")
    return _with_label_table({plain: state[name] for name, plain in names.items()})


def _with_label_table(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same, but of released MaskDiT the matrix (D, classes), of one-hot labels, as table (classes + 1, D).

    The table's last row, of the null class, is zero, as a label dropped there is: by that a square one is known.
    """
    shapes = [tuple(state[name].shape) for name in (LABELS, FIRST) if name in state]
    if MASKDIT not in state or [len(shape) for shape in shapes] != [2, 4]:
        return state
    (rows, columns), (width, *_) = shapes
    if rows != width or (columns == width and not state[LABELS][-1].any()):
        return state
    matrix = state[LABELS]
    return {**state, LABELS: torch.cat([matrix.T, matrix.new_zeros(1, width)])}


def listed(names: Iterable[str], most: int = 4) -> str:
    """The first of some names, and how many more there are."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a .safetensors file. Raises OSError where safetensors wraps what the operating system says."""
    try:
        save_file(dict(tensors), path, metadata and dict(metadata))
    except SafetensorError as error:
        raise OSError(str(error)) from error
