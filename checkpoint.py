"""Checkpoints: folders of safetensors and JSON, whole or not there, without pickled objects.

results/<run>/step_0001000/
    model.safetensors      weights
    ema.safetensors        averaged weights, same names
    optimizer.safetensors  exp_avg/<name>, exp_avg_sq/<name>, step/<name>
    info.json              step, config, versions, and size and sha256 of each file
results/<run>/latest       link to the newest one
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from files import point_to, sha256, whole_folder

VERSION = 1
# what readers raise for files that are damaged or something else; torch's stumbles over whatever it finds there
UNREADABLE = (SafetensorError, UnpicklingError, RuntimeError, OSError, EOFError)
UNREADABLE += (LookupError, ValueError, TypeError, AttributeError)


def save(run: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], info: Mapping) -> Path:
    """Write a checkpoint and let `latest` name it; returns its folder.

    tensors  name ("model", "ema", "optimizer") → tensors by name, see `parts`.
    info     anything JSON can hold: config, versions, …
    """
    folder = run / f"step_{step:07d}"
    with whole_folder(folder) as partial:
        files = {}
        for name, part in tensors.items():
            path = partial / f"{name}.safetensors"
            save_file({key: value.detach().contiguous() for key, value in part.items()}, path)
            files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        content = {"format": "checkpoint", "version": VERSION, "step": step, "files": files, **info}
        (partial / "info.json").write_text(json.dumps(content, indent=1) + "\n")
    point_to(run / "latest", folder.name)
    return folder


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint found on disk; `info` is its info.json."""

    folder: Path
    info: dict

    @property
    def step(self) -> int:
        return self.info["step"]

    def sha256(self, name: str) -> str:
        """The hash that info.json states of one part. Raises ValueError if it does not hold the part."""
        file = f"{name}.safetensors"
        if file not in self.info["files"]:
            raw = "; weights=model takes the weights that are not averaged" if name == "ema" else ""
            raise ValueError(f"{self.folder} holds no {name} part, only {', '.join(self.info['files'])}{raw}")
        return self.info["files"][file]["sha256"]

    def check(self, name: str) -> None:
        """Raise FileNotFoundError or ValueError unless one part's file is there in the size that info.json states."""
        self.sha256(name)
        path = self.folder / f"{name}.safetensors"
        size = path.stat().st_size if path.is_file() else 0
        if size != self.info["files"][path.name]["bytes"]:
            raise ValueError(f"{path} is damaged: {size} bytes instead of {self.info['files'][path.name]['bytes']}")

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of one part on the CPU. Raises FileNotFoundError or ValueError if it is damaged."""
        path = self.folder / f"{name}.safetensors"
        self.sha256(name)
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing, though info.json names it; remove {self.folder} to go on from the one before"
            )
        expected = self.info["files"][path.name]
        if path.stat().st_size != expected["bytes"] or sha256(path) != expected["sha256"]:
            raise ValueError(
                f"{path} is damaged: {path.stat().st_size} bytes, but info.json says {expected['bytes']} "
                f"bytes of another content; remove {self.folder} to go on from the checkpoint before"
            )
        return load_file(path)


def find(path: Path) -> Checkpoint:
    """Open a checkpoint folder, a run's `latest`, or a run folder (its newest).

    Raises FileNotFoundError if there is none, ValueError if it is none of ours.
    """
    path = Path(path)
    if path.is_file():
        raise ValueError(
            f"{path} is a file, but a checkpoint is a folder with info.json. A bare state dict can start a training "
            "run (init_from=…), and scripts/import_weights.py makes a checkpoint of one that was trained by EDM or "
            "rectified flow. Public DiT weights were not: they predict noise on timesteps 0..999"
        )
    folder = path if (path / "info.json").is_file() else newest(path)
    if folder is None:
        raise FileNotFoundError(f"no checkpoint at {path}: neither it nor a folder step_… in it has an info.json")
    try:
        info = json.loads((folder / "info.json").read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        advice = f"remove {folder.resolve()} to go on from the checkpoint before"
        raise ValueError(f"{folder / 'info.json'} is damaged ({error}); {advice}") from error
    if info.get("format") != "checkpoint" or info.get("version") != VERSION:
        kind = f"{info.get('format')!r} version {info.get('version')}"
        raise ValueError(f"{folder} is a {kind}, but this code reads 'checkpoint' version {VERSION}")
    return Checkpoint(folder.resolve(), info)


def newest(run: Path) -> Path | None:
    """The checkpoint `latest` names in a run folder; if it names none, that of the highest step; None without any."""
    steps = sorted(path for path in run.glob("step_*") if (path / "info.json").is_file())
    return run / "latest" if (run / "latest" / "info.json").is_file() else (steps[-1] if steps else None)


def optimizer_tensors(optimizer: torch.optim.Optimizer, network: nn.Module) -> dict[str, Tensor]:
    """The optimizer's state by parameter name: <state>/<parameter>."""
    names = {parameter: name for name, parameter in network.named_parameters()}
    return {
        f"{key}/{names[parameter]}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def load_optimizer(optimizer: torch.optim.Optimizer, network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put back what optimizer_tensors returned; settings such as the learning rate stay the optimizer's own."""
    groups = optimizer.state_dict()["param_groups"]
    names = {parameter: name for name, parameter in network.named_parameters()}
    order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    state = {index: {} for index in range(len(order))}
    position = {name: index for index, name in enumerate(order)}
    for key, value in tensors.items():
        kind, name = key.split("/", 1)
        state[position[name]][kind] = value
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def parts(network: nn.Module, averaged: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """What a training run saves."""
    return {
        "model": network.state_dict(),
        "ema": averaged.state_dict(),
        "optimizer": optimizer_tensors(optimizer, network),
    }


def restore(found: Checkpoint, network: nn.Module, averaged: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put back what `parts` gave, in place, on the devices the networks are on."""
    network.load_state_dict(found.tensors("model"))
    averaged.load_state_dict(found.tensors("ema"))
    load_optimizer(optimizer, network, found.tensors("optimizer"))


def read_weights(path: Path) -> dict[str, Tensor]:
    """Weights to start a run from: a checkpoint's EMA, or a bare state dict (.safetensors, .pt, .pth).

    A .pt file is read with weights_only=True; of {"ema": …} or {"model": …} the first is taken.
    Raises FileNotFoundError or ValueError.
    """
    path = Path(path)
    if not path.is_file():
        return find(path).tensors("ema")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        raise ValueError(f"{path} could not be read as a state dict: {error}") from error
    for key in ("ema", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{path} holds no state dict (names → tensors)")
    return content
