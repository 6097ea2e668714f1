"""Continues a run with its recorded settings, except for settings typed on the command line."""

import os
import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

from omegaconf import OmegaConf

from tread.checkpoints.checkpoint import find_whole, newest
from tread.checkpoints.run_log import RunLog, differences, value_at
from tread.runtime.cli import config_folders
from tread.runtime.plugins import absolute, import_plugins
from tread.runtime.schema import check_overrides, written
from tread.runtime.tensor_files import listed
from tread.training.run_folder import LAUNCH, NOTHING, decisive, migrate
from tread.training.settings import as_recorded, known_keys

# settings that may change when a finished run is started again
ON_DONE = ("report", "plugins", "tracker", "train.processes", "train.cuda_graphs")
# folder in configs/ → the key in it that states which of its files was chosen
GROUPS = {"model": "name", "dataset": "name", "experiment": "name", "alignment": "kind"}


def settle(composed: dict, arguments: Sequence[str], configs: Path) -> tuple[dict, list[str]]:
    """Return (the config with which train.py starts, warnings). A new run starts with `composed`. A continued run keeps
    its recorded config, but keys that were typed or are not recorded take their values from `composed`. Warnings name
    recorded keys that differ in `composed` (with run=…, only those set in config.yaml), and typed keys without effect.

    composed   Hydra's config for this start; changed in place: results and run without ~, plugins with absolute paths.
    arguments  the command line. If it chooses another model, dataset, experiment or alignment than the run has, the
               keys in the chosen files (see keys_of) count as typed, too, unless left open (see _left_open).
    configs    the folder of config.yaml and of the choices' files, such as model/dit.yaml; --config-dir adds another.

    Raises FileNotFoundError if run=… names no run; ValueError if name=… or results=… is typed beside run=…, or, unless
    plugins=… is typed, if the record has settings unknown to this code.
    """
    typed = dict(match.groups() for match in map(re.compile(r"[+~]*([^-+~=\s][^=\s]*)=(.*)").match, arguments) if match)
    warnings = [
        f"warning: {group}.name={name} only changes a name: {group}={name} chooses configs/{group}/{name}.yaml"
        for group, name in ((group, typed.get(f"{group}.name")) for group in ("model", "dataset"))
        if name != typed.get(group) and (configs / group / f"{name}.yaml").is_file()
    ]
    if isinstance(named := composed.get("plugins"), list):
        composed["plugins"] = [absolute(str(name)) for name in named]
    composed |= {key: os.path.expanduser(composed[key]) for key in ("results", "run") if isinstance(composed[key], str)}
    if by_folder := composed["run"] is not None:
        if typed.keys() & {"name", "results"}:
            raise ValueError("run=… says which folder, so name=… and results=… can't be set as well")
        folder = find_run(str(composed["run"]))
        composed = {**composed, "name": folder.name, "results": str(folder.parent), "run": None}
    else:
        folder = Path(str(composed["results"])) / str(composed["name"])
    starts, folders = RunLog(folder).starts(), [configs, *config_folders(arguments)]
    checkpoint = None if starts else find_whole(folder)[0]
    if not starts and checkpoint is None:
        return composed, warnings
    recorded = starts[-1]["config"] if starts else checkpoint.info["config"]
    if "plugins" not in typed:  # recorded settings may need the recorded plugins
        import_plugins(recorded.get("plugins", ()))
        check_record(recorded, folder / "run.json" if starts else checkpoint.folder / "info.json")
    recorded, composed = migrate(recorded), as_recorded(composed)
    keys = {leaf for key, value in typed.items() if key not in GROUPS for leaf in leaves(key, value)}
    for group, choice in ((group, typed[group]) for group in GROUPS if group in typed):
        named = [word for start in starts for word in start.get("command", ()) if word.startswith(f"{group}=")]
        if named[-1:] != [f"{group}={choice}"] and recorded.get(group, {}).get(GROUPS[group]) != choice:
            set_there = keys_of(folders, f"{group}/{choice}") or {f"{group}.{key}" for key in composed.get(group) or ()}
            keys |= {key for key in set_there if not _left_open(key, value_at(composed, key))}
    if "model" in recorded:  # keep only keys that the run's architecture has, and typed ones
        options = composed["model"].items()
        kept = {key: value for key, value in options if key in recorded["model"] or f"model.{key}" in keys}
        composed = {**composed, "model": kept}
    config, in_file = take_typed(recorded, composed, {*keys, *LAUNCH}), keys_of([configs], "config")
    rest = {}
    for key, (before, now) in differences(config, composed, nothing=NOTHING).items():
        if now is NOTHING or _left_open(key, now) or key == "model.position_scale" and config.get("init_positions"):
            continue
        if not any(f"{key}.".startswith(f"{name}.") for name in in_file):
            rest[key] = before, now
            continue
        typed_now = shlex.quote(f"{key}={written(now)}")
        advice = "name=… starts a run with that" if decisive([key], config) else f"{typed_now} takes that"
        stays = f"{key} stays {written(before)}, as the run has it"
        warnings.append(f"warning: {stays}, although config.yaml says {written(now)}; {advice}")
    if _is_done(folder, config):
        moving = ("dataset.path", "dataset.heldout", "sampling.autoencoder", "eval.fid_reference")
        moved = [key for key in moving if (place := value_at(recorded, key)) and not Path(place).exists()]
        typed_config, taken = config, {*LAUNCH, *ON_DONE, *moved, *decisive(keys, config)}  # `claim` checks the last
        config = take_typed(recorded, config, taken)
        unused = differences(config, typed_config, nothing=NOTHING).items()
        if unused := [key for key, (_, now) in unused if key != "train.steps" and not _left_open(key, now)]:
            warnings.append(f"warning: {folder} is finished, its record stays: {', '.join(unused)} had no effect")
    if rest and not by_folder:  # with run=… these are defaults of other runs
        kept = [f"{key} {written(before)} (not {written(now)})" for key, (before, now) in rest.items()]
        fixed = decisive(rest, config)
        advice = ["key=value changes one"] if len(fixed) < len(rest) else []
        advice += [f"{' and '.join(fixed)} can't change in a run, so take another name=…"] if fixed else []
        warnings.append(f"warning: settings stay as the run has them: {', '.join(kept)}; {', but '.join(advice)}")
    return config, warnings


def check_record(config: dict, file: Path) -> None:
    """Raise ValueError, which names `file`, if the config recorded there has settings that this code does not know."""
    known = known_keys()
    names = {key.partition(".")[0] for key in known if "." in key}
    sections = [(name, section) for name, section in migrate(config).items() if name in names]
    try:
        check_overrides([f"{name}.{key}=" for name, section in sections for key in section], known)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _is_done(folder: Path, config: dict) -> bool:
    """Return whether the run in `folder` has finished all train.steps of `config`, and its last checkpoint exists."""
    status, latest, steps = RunLog(folder).read_status(), newest(folder), config["train"]["steps"]
    done = status.get("state") == "finished" and isinstance(steps, (int, float)) and status.get("step", 0) >= steps
    return done and latest is not None and latest.resolve().name == f"step_{status['step']:07d}"


def find_run(run: str) -> Path:
    """Return the folder of the run to resume: `run`, the value of run=…, as a normalised path with symbolic links kept.
    Raises FileNotFoundError if that folder holds no run; the message lists runs inside and next to it."""
    folder = Path(os.path.normpath(run))
    folder = folder if folder.name not in ("", "..") else Path(os.path.abspath(run))

    def holds_a_run(path: Path) -> bool:
        return bool(RunLog(path).starts() or newest(path))

    if holds_a_run(folder):
        return folder
    around = [path for place in (folder, folder.parent) if place.is_dir() for path in sorted(place.iterdir())]
    runs = [f"run={path}" for path in (folder.parent, *around) if path.is_dir() and holds_a_run(path)]
    what = "holds no run" if folder.exists() else "does not exist"
    raise FileNotFoundError(f"{folder} {what}; near it: {listed(runs, 10) or 'no run either'}")


def leaves(key: str, value: object) -> list[str]:
    """Return the dotted keys that key=value sets: `key` or, for a dict (except optim.options), the keys inside it."""
    if isinstance(value, str) and re.fullmatch(r"\{.+:.+\}", value):
        spaced = re.sub(r"([{,]\s*[^:{},]+):", r"\1: ", value)  # Hydra reads {a:1} as a dict, YAML only {a: 1}
        value = OmegaConf.to_container(OmegaConf.create(spaced))
    if not isinstance(value, dict) or key == "optim.options":  # whose keys belong to one optimizer
        return [key]
    return [leaf for part, inner in value.items() for leaf in leaves(f"{key}.{part}", inner)]


def keys_of(folders: Sequence[Path], name: str) -> set[str]:
    """Return dotted keys set by the folders' first <name>.yaml, if any, and, for name=group/choice, by its defaults."""
    paths = [path for path in (folder / f"{name}.yaml" for folder in folders) if path.is_file()]
    tree = OmegaConf.to_container(OmegaConf.load(paths[0])) if paths else {}
    own = f"override /{Path(name).parent}"  # a name alone is of the same group
    lists = [item if isinstance(item, dict) else {own: item} for item in tree.pop("defaults", ()) if "/" in name]
    chosen = [(key.removeprefix("override /"), choice) for item in lists for key, choice in item.items() if " /" in key]
    keys = {f"{key}.{part}" for key, section in tree.items() if isinstance(section, dict) for part in section}
    keys |= {key for key, value in tree.items() if not isinstance(value, dict)}
    return keys.union(*(keys_of(folders, f"{place}/{choice}") for place, choice in chosen))


def take_typed(recorded: object, composed: object, typed: Collection[str], key: str = "") -> object:
    """Return a recorded config, or its part at `key`, with `composed`'s values for dotted keys in `typed` and for keys
    that it lacks. Lists and train.ratio_schedule stay as recorded unless they or keys inside them are in `typed`."""
    prefix = f"{key}." if key else ""
    below = [name for name in typed if name.startswith(prefix)]
    if key in typed:
        return composed
    if isinstance(recorded, dict) and isinstance(composed, dict) and (below or key != "train.ratio_schedule"):
        return {
            part: take_typed(recorded.get(part, value), composed.get(part, value), typed, f"{prefix}{part}")
            for part, value in (composed | recorded).items()
        }
    if below and isinstance(recorded, list) and isinstance(composed, list) and len(recorded) == len(composed):
        return [take_typed(old, new, typed, f"{key}.{i}") for i, (old, new) in enumerate(zip(recorded, composed))]
    return composed if below else recorded


def _left_open(key: str, value: object) -> bool:
    """Return whether `value` leaves setting `key` open: null or "auto" in section dataset, text or rf, or for MaskDiT's
    decoder. Such a value may be filled in later, from the dataset's folder, model.hidden_size or the latents' shape."""
    return key.startswith(("dataset.", "model.decoder_", "rf.", "text.")) and value in (None, "auto")
