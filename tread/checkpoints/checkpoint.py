"""Checkpoints: folders of safetensors and JSON files, written atomically, without pickled objects.

results/<run>/step_0001000/
    model.safetensors      weights and buffers, keyed by their names in the network
    ema.safetensors        averaged weights, same keys
    projector.safetensors  weights of the projector for representation alignment; only if alignment.kind is not none
    optimizer.safetensors  keyed "<state>/<parameter>": for AdamW exp_avg/…, exp_avg_sq/… and step/…
    powers.safetensors     power-function EMAs (EDM2), keyed "<width>/<parameter>"; only if ema.power is set
    info.json              step, config, versions, and size and sha256 of each file
results/<run>/latest       symbolic link to the checkpoint that was written, or resumed from, last
results/<run>/base.safetensors  only if lora.rank is set: the network before training; model and ema lack frozen weights
"""

import contextlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tread.checkpoints.lora import BASE, merge
from tread.runtime.device import wait_for
from tread.runtime.files import plain_name, point_to, sha256, whole_folder
from tread.runtime.hub import local, revision_in
from tread.runtime.tensor_files import save_tensors

VERSION = 1
OWN = re.compile(r"info\.json$|.*\.safetensors$|\.(?!fid-)")  # names that nobody adds to a checkpoint: no scores


class Damaged(ValueError):
    """A checkpoint is damaged. Raised as Damaged(problem, folder); the message also names the newest earlier checkpoint
    whose files have their recorded sizes, or says that there is none."""

    def __str__(self) -> str:
        problem, folder = self.args
        earlier = _before(folder)
        if earlier is None:
            return f"{problem}; there is no whole checkpoint before it: it must be copied or made again"
        return f"{problem}; the checkpoint before it is {earlier}"


def save(run: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], info: Mapping) -> Path:
    """Write a checkpoint, make the link `latest` point to it, and return its folder. `tensors[part][name]` are the
    tensors of part "model", "ema", "optimizer", …; `info` holds further entries of info.json: config, …"""
    folder = run / f"step_{step:07d}"
    with whole_folder(folder) as partial:
        files = {}
        for name, part in tensors.items():
            path = partial / f"{name}.safetensors"
            files[path.name] = {"sha256": save_tensors(path, part), "bytes": path.stat().st_size}
        content = {"format": "checkpoint", "version": VERSION, "step": step, "files": files, **info}
        (partial / "info.json").write_text(json.dumps(content, indent=1) + "\n")
    point_to(run / "latest", folder.name)
    return folder


def snapshot(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Return CPU copies of {part: {name: tensor}}, page-locked, if possible, for GPU tensors; waits for the copies."""
    copies = {}
    for name, part in parts.items():
        copies[name] = {key: _room_on_the_host(value).copy_(value, non_blocking=True) for key, value in part.items()}
        for device in {value.device for value in part.values()}:
            wait_for(device)
    return copies


def _room_on_the_host(value: Tensor) -> Tensor:
    """Return empty CPU memory for a copy of `value`, page-locked if `value` is on a GPU and the system allows it."""
    with contextlib.suppress(RuntimeError):
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
    return torch.empty(value.shape, dtype=value.dtype)


def prune(run: Path, keep_last: int, keep_every: int | None) -> None:
    """Remove a run's checkpoints except the newest keep_last, those at multiples of keep_every steps (None: none) and
    those with added files, such as scores. Those later than `latest` stay: a run resumed at `latest` replaces them."""
    for folder in _folders(run)[:-keep_last]:
        if all(map(OWN.match, os.listdir(folder))) and not (keep_every and _step(folder) % keep_every == 0):
            gone = folder.with_name(f".{folder.name}.old")  # renamed first: a removal may be interrupted
            shutil.rmtree(gone, ignore_errors=True)
            folder.rename(gone)
            shutil.rmtree(gone)


def sweep(run: Path) -> None:
    """Remove temporary folders left by a process that was killed while it wrote or removed a checkpoint of this run."""
    for kind in ("partial", "old"):
        for folder in run.glob(f".step_*.{kind}"):
            shutil.rmtree(folder)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk; `info` is its info.json. A part, such as "model", is one of its .safetensors files."""

    folder: Path
    info: dict

    @property
    def step(self) -> int:
        return self.info["step"]

    @property
    def revision(self) -> str | None:
        """The hash of the revision, for a checkpoint fetched from the hub; else None."""
        return revision_in(self.folder)

    @property
    def parts(self) -> list[str]:
        return [file.removesuffix(".safetensors") for file in self.info["files"]]

    def sha256(self, name: str) -> str:
        """Return the sha256 of part `name`'s file, as in info.json. Raises ValueError if there is no such part."""
        if name not in self.parts:
            other = {"ema": "model", "model": "ema"}.get(name)
            raw = f"; weights={other} (of train.py: init_weights={other}) takes those" if other else ""
            raise ValueError(f"{self.folder} holds no {name} part, only {', '.join(self.info['files'])}{raw}")
        return self.info["files"][f"{name}.safetensors"]["sha256"]

    def check(self, name: str) -> Path:
        """Return the path of a part's file. Raises ValueError unless it exists with the size that info.json states."""
        self.sha256(name)
        path = self.folder / f"{name}.safetensors"
        if not path.is_file():
            raise Damaged(f"{path} is missing, though info.json names it", self.folder)
        size, stated = path.stat().st_size, self.info["files"][path.name]["bytes"]
        if size != stated:
            cut = ", so it is cut short" if size < stated else ""
            raise Damaged(f"{path} is damaged: {size} bytes, where {stated} were written{cut}", self.folder)
        return path

    def verify(self, name: str) -> Path:
        """Return the path of a part's file. Raises ValueError unless it has the size and hash that info.json states."""
        path = self.check(name)
        if sha256(path) != self.sha256(name):
            raise Damaged(f"{path} is damaged: its content is not what was written, by info.json's hash", self.folder)
        return path

    def stored(self, name: str) -> dict[str, Tensor]:
        """Load part `name` as stored, {key: CPU tensor}; LoRA isn't merged. ValueError if it is missing or damaged."""
        return load_file(self.verify(name))

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Load part `name`, {key: CPU tensor}, LoRA adapters merged in. ValueError if a file is missing or damaged."""
        stored, adapter = self.stored(name), self.info.get("adapter")
        return merge(self.base(), stored, adapter["scale"]) if adapter and name in ("model", "ema") else stored

    def base(self) -> dict[str, Tensor]:
        """Load the weights that a LoRA run started from. Raises ValueError if the file is missing or has changed."""
        path, alone = self.folder.parent / BASE, f"{self.folder} holds adapters (LoRA) alone, and"
        if not path.is_file():
            raise ValueError(f"{alone} {path}, their network, is missing: scripts/export_checkpoint.py merges the two")
        if sha256(path) != self.info["adapter"]["base"]:
            raise ValueError(f"{alone} {path} is not their network: it is another one, or damaged, by its hash")
        return load_file(path)


def find(path: Path | str) -> Checkpoint:
    """Open the checkpoint at `path`: a checkpoint's folder, a run's link `latest`, a run's folder (for its `latest`,
    else its newest checkpoint), or hf:user/name[@revision]. Reads info.json alone. Raises FileNotFoundError if there is
    no checkpoint; ValueError if `path` is a file, info.json is damaged or missing, or its format is not this code's."""
    path = local(path)
    if path.name == "latest" and not path.is_dir():
        other = newest(path.parent)
        use = f"; the newest checkpoint there is {other}" if other else ""
        raise FileNotFoundError(f"no checkpoint at {path}: it is no link to an existing folder{use}")
    if path.is_file():
        raise ValueError(
            f"{path} is a file, but a checkpoint is a folder with info.json. A state dict can start a training run "
            "(init_from=…), and scripts/import_checkpoint.py makes a checkpoint of one that was trained by EDM "
            "or rectified flow or, with predicts=noise, predicts noise on timesteps 0..999, as public DiT weights do"
        )
    named = path / "latest" if (path / "latest").is_dir() else path
    folder = next((place for place in (path, named) if (place / "info.json").is_file()), None)
    weights = {file.name for file in path.glob("*.safetensors")} - {BASE}
    was_one = path.is_dir() and (path.name.startswith("step_") or bool(weights))
    if folder is None and (named != path or was_one):
        lost = named.resolve()
        raise Damaged(f"{lost / 'info.json'} is missing, and nothing else says what {lost} is", lost)
    if folder is None and (folder := newest(path)) is None:
        why = "neither it nor a folder step_… in it has an info.json" if path.exists() else "it is not there"
        raise FileNotFoundError(f"no checkpoint at {path}: {why}")
    info, file = _parsed(folder), folder / "info.json"
    stated = (info.get("format"), info.get("version"))
    if None not in stated and stated != ("checkpoint", VERSION):
        known = f"this code reads 'checkpoint' version {VERSION}"
        raise ValueError(f"{folder} is a {stated[0]!r} version {stated[1]}, but {known}")
    if None in stated or not _is_complete(info):
        raise Damaged(f"{file} is damaged: it lacks format, version, step, config, or a file's size and sha256", folder)
    try:
        for name in info["files"]:
            plain_name(name, file)
    except ValueError as error:
        raise Damaged(f"{file} is damaged: {error}", folder) from error
    return Checkpoint(folder.resolve(), info)


def containing(path: Path) -> Checkpoint | None:
    """Return the checkpoint that has the file `path`, or None. Raises ValueError if that one's info.json is damaged."""
    for file in (path, path.resolve()):  # the hub's cache has links with names, to files without
        if (file.parent / "info.json").is_file() and _parsed(file.parent).get("format") == "checkpoint":
            if file.name in (checkpoint := find(file.parent)).info["files"]:
                return checkpoint
    return None


def _parsed(folder: Path) -> dict:
    """Return the content of a folder's info.json; {} if it is not a dict. Raises Damaged if it is not JSON."""
    try:
        info = json.loads((folder / "info.json").read_text())
    except ValueError as error:
        raise Damaged(f"{folder / 'info.json'} is damaged ({error})", folder) from error
    return info if isinstance(info, dict) else {}


def _is_complete(info: dict) -> bool:
    """Return whether info.json has a step, config, files with size and sha256, and a dict as "latents", if present."""
    sections = [info.get("files"), info.get("config"), info.get("latents", {})]
    if type(info.get("step")) is not int or not all(isinstance(section, dict) for section in sections):
        return False
    return all(isinstance(file, dict) and {"bytes", "sha256"} <= file.keys() for file in info["files"].values())


def _before(folder: Path) -> Path | None:
    """Return the newest checkpoint earlier than `folder` whose files have the recorded sizes, or None."""
    number = folder.resolve().name.removeprefix("step_")
    for other in reversed(_folders(folder.resolve().parent)):
        if not number.isdecimal() or _step(other) < int(number):
            with contextlib.suppress(ValueError, OSError, LookupError, TypeError, AttributeError):
                checkpoint = find(other)
                for name in checkpoint.parts:
                    checkpoint.check(name)
                return other
    return None


def find_whole(run: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return a run's newest undamaged checkpoint, and messages on what is wrong with newer ones; (None, []) if there
    are no checkpoints. Starts at `latest` and goes back to earlier steps, reading all files. Raises ValueError if all
    are damaged or one is of another format version, and PermissionError for files that may not be read."""
    problems = []
    for folder in reversed(_folders(run)):
        try:
            checkpoint = find(folder)
            if checkpoint.step != _step(folder):
                raise Damaged(f"{folder / 'info.json'} is damaged: it states step {checkpoint.step}", folder)
            if missing := {"latents", "samples", "model", "ema", "optimizer"} - {*checkpoint.info, *checkpoint.parts}:
                raise Damaged(f"{folder} lacks {', '.join(sorted(missing))}, so no training can go on from it", folder)
            for name in checkpoint.parts:
                checkpoint.verify(name)
            return checkpoint, problems
        except Damaged as error:
            problems.append(error.args[0])
        except PermissionError:
            raise
        except (OSError, LookupError, AttributeError, TypeError) as error:  # disk errors, or wrong content of info.json
            problems.append(f"{folder} can't be read ({type(error).__name__}: {error})")
    if problems:
        raise ValueError(f"no checkpoint of {run} is whole; name=… starts another run\n  " + "\n  ".join(problems))
    return None, []


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def _folders(run: Path) -> list[Path]:
    """Return a run's checkpoint folders, damaged ones too, by step, up to the one that `latest` points to, if any."""
    folders = [path for path in run.glob("step_*") if path.name[5:].isdigit() and path.is_dir()]
    latest = [_step(path) for path in folders if path.resolve() == (run / "latest").resolve()]
    return sorted((path for path in folders if not latest or _step(path) <= latest[0]), key=_step)


def newest(run: Path) -> Path | None:
    """Return a run's link `latest` or, if that is broken, its checkpoint of the highest step; None if there is none."""
    steps = [path for path in _folders(run) if (path / "info.json").is_file()]
    return run / "latest" if (run / "latest" / "info.json").is_file() else (steps[-1] if steps else None)


def pinned(source: str) -> str:
    """Return the checkpoint folder that `latest` points to if `source` is a run's folder or `latest`, else `source`."""
    path = Path(source).expanduser()
    path = newest(path) or path
    return str(path.with_name(path.resolve().name)) if path.name == "latest" and path.is_dir() else source


def optimized_parameters(network: nn.Module, projector: nn.Module | None) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter) of a run's trained parameters in the order in which the optimizer is given them: the
    network's, then, as "projector.<name>", those of the projector for representation alignment, if there is one."""
    yield from (named for named in network.named_parameters() if named[1].requires_grad)
    if projector is not None:
        yield from projector.named_parameters(prefix="projector")


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, network: nn.Module, projector: nn.Module | None = None
) -> dict[str, Tensor]:
    """Return the optimizer's state as tensors, keyed "<state>/<parameter>" or, for state that belongs to no parameter,
    "<state>/optimizer". Entries of param_groups that are tensors or have changed since the optimizer was built, except
    lr, are keyed "<key>/group <i>". Values that are not tensors (numbers, text, None, and lists, tuples and dicts, also
    of tensors) are stored as JSON, in the bytes of a tensor `values`. Raises ValueError for values of other types."""
    names = {parameter: name for name, parameter in optimized_parameters(network, projector)}
    sections = [(name, optimizer.state[parameter]) for parameter, name in names.items() if parameter in optimizer.state]
    built = getattr(optimizer, "built", itertools.repeat(optimizer.defaults))  # param_groups as Optim.build made them
    for number, (group, before) in enumerate(zip(optimizer.param_groups, built)):
        others = {key: value for key, value in group.items() if key not in ("params", "param_names", "lr")}
        changed = {key: v for key, v in others.items() if torch.is_tensor(v) or v != before.get(key)}
        sections.append((f"group {number}", changed))
    sections.append(("optimizer", {key: value for key, value in optimizer.state.items() if key not in names}))
    tensors, values, device = {}, {}, next(iter(names)).device
    for name, state in sections:
        for key, value in state.items():
            packed = _pack(value, key, name, device, tensors)
            if packed != ["tensor", f"{key}/{name}", False]:
                values[f"{key}/{name}"] = packed
    if values:
        try:
            tensors["values"] = torch.tensor([*json.dumps(values).encode()], dtype=torch.uint8)
        except TypeError as error:
            raise ValueError(f"the state of {type(optimizer).__name__} can't be saved: {error}") from error
    return tensors


def _pack(value: object, key: str, name: str, device: torch.device, tensors: dict[str, Tensor]) -> object:
    """Return `value` in a form for JSON. It is the state or setting `key` of `name`: a parameter, "group <i>" or
    "optimizer". Containers become ["list", …], ["tuple", …] or ["dict", …]. A tensor is added to `tensors` and becomes
    ["tensor", its key there, True if it is not on the parameters' `device`]. Other values are returned unchanged."""
    if torch.is_tensor(value):
        tensors[f"{key}/{name}"] = value
        return ["tensor", f"{key}/{name}", value.device != device]
    if isinstance(value, dict):
        return ["dict", *(_pack(item, f"{key}.{item[0]}", name, device, tensors) for item in value.items())]
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, *(_pack(item, f"{key}.{i}", name, device, tensors) for i, item in enumerate(value))]
    return value


def _unpack(value: object, device: torch.device, tensors: dict[str, Tensor]) -> object:
    """Rebuild a value that `_pack` converted, removing its tensors from `tensors`. Tensors that were on the parameters'
    device when they were packed go to `device`, others stay on the CPU."""
    if not isinstance(value, list):
        return value
    kind, *items = value
    if kind == "tensor":
        tensor = tensors.pop(items[0])
        return tensor if items[1] else tensor.to(device)
    return {"list": list, "tuple": tuple, "dict": dict}[kind](_unpack(item, device, tensors) for item in items)


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    network: nn.Module,
    tensors: Mapping[str, Tensor],
    projector: nn.Module | None = None,
) -> None:
    """Restore an optimizer's state from `tensors`, as optimizer_tensors returned them. Settings in param_groups that
    these lack, such as lr, stay. In contrast to optimizer.load_state_dict, state keeps its dtype and device."""
    parameters, tensors = dict(optimized_parameters(network, projector)), dict(tensors)
    groups = {f"group {number}": group for number, group in enumerate(optimizer.param_groups)}
    values = json.loads(bytes(tensors.pop("values", torch.tensor([*b"{}"])).tolist()))
    device = next(iter(parameters.values())).device
    state = {key: _unpack(value, device, tensors) for key, value in values.items()}
    for name, value in (state | {key: value.to(device) for key, value in tensors.items()}).items():
        key, _, owner = name.rpartition("/")
        if owner in parameters:
            optimizer.state[parameters[owner]][key] = value
        else:
            groups.get(owner, optimizer.state)[key] = value


@dataclass(frozen=True)
class Trained:
    """What is saved of a run: network, its EMA `averaged`, optimizer, power-function EMAs `powers` by width, alignment
    `projector` if any. `base` names the parameters that LoRA froze, which checkpoints leave out."""

    network: nn.Module
    averaged: nn.Module  # the network's exponential moving average
    optimizer: torch.optim.Optimizer
    powers: Mapping[float, nn.Module]  # width → power-function EMA; {}: no part `powers`
    projector: nn.Module | None  # of representation alignment; None: no part `projector`
    base: frozenset[str]  # parameters that LoRA froze: in base.safetensors, and in no part

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The modules whose state dicts are parts of a checkpoint, keyed by the part's name."""
        modules = {"model": self.network, "ema": self.averaged}
        return modules if self.projector is None else {**modules, "projector": self.projector}

    @property
    def power_tensors(self) -> dict[str, nn.Parameter]:
        """The parameters of the power-function EMAs, keyed "<width>/<parameter>"."""
        return {f"{width}/{name}": p for width, power in self.powers.items() for name, p in power.named_parameters()}

    def parts(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the tensors to save, {part: {name: tensor}}."""
        parts = {
            name: {key: value for key, value in module.state_dict().items() if key not in self.base}
            for name, module in self.modules.items()
        }
        parts["optimizer"] = optimizer_tensors(self.optimizer, self.network, self.projector)
        return parts | ({"powers": self.power_tensors} if self.powers else {})

    def restore(self, checkpoint: Checkpoint, with_optimizer: bool) -> None:
        """Load a checkpoint's parts into the modules and power-function EMAs, and the optimizer if `with_optimizer`."""
        for name, module in self.modules.items():
            kept = {key: value for key, value in module.state_dict().items() if key in self.base}
            module.load_state_dict(kept | checkpoint.stored(name))
        if with_optimizer:
            load_optimizer(self.optimizer, self.network, checkpoint.tensors("optimizer"), self.projector)
        kept = checkpoint.tensors("powers") if self.powers else {}
        for name, parameter in self.power_tensors.items():
            parameter.copy_(kept[name])
