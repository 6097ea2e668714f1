"""Going on with a run: by its own settings, except for what was typed on the command line."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from omegaconf import OmegaConf

from tread.checkpoints.checkpoint import find_whole, newest
from tread.runtime.plugins import import_plugins
from tread.runtime.schema import written
from tread.training.run_folder import LAUNCH, NOTHING, RunLog, differences, migrate

GROUPS = {"model": "name", "dataset": "name", "alignment": "kind"}  # a typed group → where the run's section names it


def settle(composed: dict, arguments: Sequence[str], configs: Path) -> tuple[dict, list[str]]:
    """The config of a launch that may go on with a run, and warnings about today's values that the run does not take.

    composed   today's config, with the typed values.
    arguments  the command line, which says what was typed.
    configs    the folder of config.yaml.

    Raises FileNotFoundError if run=… names no run, ValueError for another model, dataset, experiment or alignment.
    """
    typed = dict(match.groups() for match in map(re.compile(r"[+~]*([^-+~=\s][^=\s]*)=(.*)").match, arguments) if match)
    by_folder = composed["run"] is not None
    if by_folder and typed.keys() & {"name", "results"}:
        raise ValueError("run=… says which folder, so name=… and results=… can't be set beside it")
    folder = Path(str(composed["results"])) / str(composed["name"])
    if by_folder:
        folder = find_run(str(composed["run"]))
        composed = {**composed, "name": folder.name, "results": str(folder.parent), "run": None}
    starts = RunLog(folder).starts()
    checkpoint = None if starts else find_whole(folder)[0]
    if not starts and checkpoint is None:
        return composed, []
    recorded = starts[-1]["config"] if starts else checkpoint.info["config"]
    import_plugins(recorded.get("plugins", ()))
    recorded = migrate(recorded)
    for group in {*GROUPS, "experiment"} & typed.keys():
        begun = any(f"{group}={typed[group]}" in start.get("command", ()) for start in starts)
        if not begun and recorded.get(group, {}).get(GROUPS.get(group)) != typed[group]:
            raise ValueError(f"{folder} holds a run without {group}={typed[group]}; name=<another name> starts one")
    if "model" in recorded:  # its keys are the run's architecture's, and typed ones
        kept = {key for key in composed["model"] if key in recorded["model"] or f"model.{key}" in typed}
        composed = {**composed, "model": {key: value for key, value in composed["model"].items() if key in kept}}
    config = take_typed(recorded, composed, {*typed, *LAUNCH} - GROUPS.keys())
    # with run=… only config.yaml's values are meant for this run: the composed defaults are another model's
    today = OmegaConf.to_container(OmegaConf.load(configs / "config.yaml")) if by_folder else composed
    stay = {
        key: both
        for key, both in differences(config, today, nothing=NOTHING).items()
        if NOTHING not in both
        and key not in (*typed, *LAUNCH)
        and not (key.startswith("dataset.") and both[1] in (None, "auto"))
    }
    if not stay:
        return config, []
    listed = ", ".join(f"{key}={written(before)} (now {written(now)})" for key, (before, now) in stay.items())
    return config, [f"warning: the run keeps {listed}; typing key=value changes one"]


def find_run(run: str) -> Path:
    """The folder that run=… names, as it was written. Raises FileNotFoundError if it holds no run."""
    folder = Path(os.path.normpath(run))
    folder = folder if folder.name not in ("", "..") else Path(os.path.abspath(run))
    if not (RunLog(folder).starts() or newest(folder)):
        raise FileNotFoundError(f"{folder} holds no run")
    return folder


def take_typed(recorded: object, composed: object, typed: Collection[str], key: str = "") -> object:
    """A run's config with the composed values at the typed dotted keys, and at keys that it lacks."""
    below = [name for name in typed if name.startswith(f"{key}." if key else "")]
    if key in typed:
        return composed
    if isinstance(recorded, dict) and isinstance(composed, dict) and (below or key != "train.ratio_schedule"):
        both = {
            part: take_typed(recorded[part], composed[part], typed, f"{key}.{part}".lstrip("."))
            for part in recorded.keys() & composed.keys()
        }
        return composed | recorded | both
    if below and isinstance(recorded, list) and isinstance(composed, list) and len(recorded) == len(composed):
        return [take_typed(old, new, typed, f"{key}.{i}") for i, (old, new) in enumerate(zip(recorded, composed))]
    return composed if below else recorded
