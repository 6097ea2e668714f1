"""Reads state dicts of this and other codebases, and writes ours, under the unwrapped network's parameter names.

Layouts that are read: weights alone; under a key of KEYS, as {"model": …, "ema": …, "opt": …} (public DiT, SiT) or
{"model_state_dict": …, "ema_state_dict": …} (released TREAD); ema_pytorch's "ema_model.…" and "online_model.…".
Prefixes of wrappers are removed, such as "module." (DDP) and "model." (a preconditioned network), and "_orig_mod."
(torch.compile) anywhere in a name. Released MaskDiT's class matrix, for one-hot labels, becomes an embedding table."""

import argparse
import hashlib
import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

Weights = Literal["ema", "model"]  # averaged and raw weights
KEYS = {  # keys under which training code keeps averaged and raw weights
    "ema": ("ema", "ema_state_dict", "model_ema", "ema_model"),
    "model": ("model", "model_state_dict", "state_dict", "module"),
}
FLAT = {"ema": "ema_model.", "model": "online_model."}  # ema_pytorch keeps both in one state dict
EXPAND = "x_embedder.expand.weight"  # only in networks with model.bottleneck
CLASS_TOKEN = "z_embedder.proj.weight"  # only in networks with model.class_token
FIRST = "x_embedder.proj.weight"  # what precedes this name in a file is a wrapper's prefix
WRAPPERS = re.compile(r"((module|model|net|ema_model)\.)*")
LABELS = "y_embedder.embedding_table.weight"
MASKDIT = "decoder_layer.linear.weight"  # a parameter that only MaskDiT has
COUNTERS = {"initted", "step", "n_averaged"}  # scalars of ema_pytorch and torch's AveragedModel, not weights


def read_kind(path: Path, weights: str = "ema") -> tuple[str | None, dict[str, Tensor]]:
    """Read weights from a .safetensors, .pt or .pth file: "ema" (averaged), "model" (raw) or "any" (averaged ones if
    there are any). Return (kind, state dict); a file of weights alone serves as either kind, and its kind is None.
    Raises ValueError if the file can't be read, or holds the other kind only."""
    parts = _parts(path)
    kind = next((kind for kind in KEYS if weights in (kind, "any") and kind in parts), None)
    if kind in parts:
        return kind, plain_names(_tensors(*parts[kind]))
    if weights == "ema":
        raw = f"{path} holds raw weights and no averaged ones"
        raise ValueError(f"{raw}: init_weights=model starts a run from those, take=model imports them")
    raise ValueError(f"{path} holds averaged weights (ema) and no raw ones")


def read_state_dicts(path: Path) -> dict[str | None, dict[str, Tensor]]:
    """Read all weights in a file: {kind: state dict}, kind "ema", "model" or None (unknown). ValueError if none."""
    return {kind: plain_names(_tensors(*part)) for kind, part in _parts(path).items()}


def _parts(path: Path) -> dict[str | None, tuple[object, str]]:
    """Return {kind: (unchecked weights, where they are, for messages)}; kinds: "ema", "model" or None (unknown)."""
    content, parts = _read(path), {}
    for kind, keys in KEYS.items():
        for key in keys:
            if isinstance(content, dict) and isinstance(content.get(key), dict):
                parts[kind] = _flat(content[key]).get(kind, content[key]), f"{path}, under {key!r},"
                break
    return parts or {kind: (part, str(path)) for kind, part in (_flat(content) or {None: content}).items()}


def _read(path: Path) -> object:
    """Load a file of tensors, plain values or argparse.Namespace. Raises ValueError for other contents or damage."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch raises many kinds for damaged files
        why = what_is_wrong(path) or error
        if foreign := re.search(r"GLOBAL (\S+)", str(error)):
            why = (
                f"it holds an object of {foreign[1]}, and unpickling such objects can run any code. If you trust the "
                "file, save only its tensors: torch.save({'model': {…}, 'ema': {…}}, …)"
            )
        raise ValueError(f"{path} could not be read as a state dict: {why}") from error


def what_is_wrong(path: Path) -> str | None:
    """Return why torch or safetensors failed to read the file `path`, and what to do; None if the file is missing."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        if file.read(8) == b"version ":
            return "it is a pointer of Git LFS, a text in the place of the file; git lfs pull fetches it"
    size = path.stat().st_size
    return f"it is cut short or damaged ({size:,} bytes), or not a file of this kind; copy or download it again"


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
    """Return the weights in an ema_pytorch state dict, keyed "ema" and "model"; {} for anything else."""
    names = [name for name in content if isinstance(name, str)] if isinstance(content, dict) else []
    parts = {
        kind: {name.removeprefix(prefix): content[name] for name in names if name.startswith(prefix)}
        for kind, prefix in FLAT.items()
    }
    if not parts["ema"]:
        return {}
    rest = {name: content[name] for name in names if name not in COUNTERS and not name.startswith(tuple(FLAT.values()))}
    return {kind: part | rest for kind, part in parts.items() if part}


def plain_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under the unwrapped network's names, without EMA wrappers' counters. The prefix to remove is
    what precedes "x_embedder.proj.weight" if WRAPPERS matches it; else only "_orig_mod." is removed. MaskDiT's class
    matrix becomes an embedding table. Raises ValueError if two entries get the same name."""
    names = {name: name.replace("_orig_mod.", "") for name in state}
    heads = [name.removesuffix(FIRST) for name in names.values() if name.endswith(FIRST)]
    head = min((head for head in heads if WRAPPERS.fullmatch(head)), key=len, default=None)
    if head is not None:
        counters = {n for n, plain in names.items() if plain.rpartition(".")[2] in COUNTERS and state[n].numel() == 1}
        names = {name: plain.removeprefix(head) for name, plain in names.items() if name not in counters}
    if twice := [plain for plain, count in Counter(names.values()).items() if count > 1]:
        raise ValueError(f"more than one entry comes to {listed(twice)}: this is not one network's state dict")
    return _with_label_table({plain: state[name] for name, plain in names.items()})


def _with_label_table(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert released MaskDiT's label matrix (D, classes), for one-hot labels, to an embedding table (classes + 1, D).
    Its last row, the null class, is 0, as in MaskDiT. A square matrix with such a row counts as a table, and stays."""
    if not {MASKDIT, LABELS, FIRST} <= state.keys():
        return state
    matrix = state[LABELS]
    by_channel = matrix.ndim == 2 and matrix.shape[:1] == state.get(EXPAND, state[FIRST]).shape[:1]
    if not by_channel or (matrix.shape[0] == matrix.shape[1] and not matrix[-1].any()):
        return state
    return {**state, LABELS: torch.cat([matrix.T, matrix.new_zeros(1, len(matrix))])}


def listed(names: Iterable[str], most: int = 4) -> str:
    """Join the first `most` names by commas, and say how many more there are."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """Write tensors, and `metadata` if given, to a .safetensors file. Return its hex sha256, computed while writing."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        tensor, begin = tensors[name], end
        end += tensor.nbytes
        kind = str(tensor.dtype)[6:].replace("float", "f").replace("uint", "u").replace("int", "i")  # f32
        kind = kind.replace("complex", "c").upper().removesuffix("FN")  # float8_e4m3fn is F8_E4M3 in safetensors
        header[name] = {"dtype": kind, "shape": [*tensor.shape], "data_offsets": [begin, end]}
    words = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    words += b" " * (-len(words) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in (len(words).to_bytes(8, "little"), words, *(_bytes(tensors[name]) for name in order)):
            digest.update(part)
            file.write(part)
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
