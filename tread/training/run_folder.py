"""Decides whether a run may start in a folder and with which settings it may resume; converts older configs."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path

from tread.checkpoints.checkpoint import Checkpoint, find_whole
from tread.checkpoints.run_log import RunLog, differences
from tread.models.architectures import TextSettings
from tread.runtime.schema import fill, written
from tread.training.alignment import Alignment
from tread.training.settings import Settings

# The settings that must not change when a run is resumed, besides the section of its objective (edm or rf).
FIXED = ("seed", "objective", "model", "ema.power", *TextSettings().decisive)
FIXED += ("init_from", "init_weights", "init_classes", "init_positions", "lora", "train.class_token_weight")
FIXED += ("dataset.name", "dataset.channels", "dataset.size", "dataset.num_classes")
FIXED += ("train.batch_size", "train.label_drop", "train.path_drop", "train.loss_tokens", "train.reconstruction")
FIXED += tuple(f"alignment.{key}" for key in {each.name for each in fields(Alignment)} - {"precision", "until", "fade"})
LAUNCH = ("name", "results", "resume", "run")  # settings of a launch, not of a run
NOTHING = "nothing"  # stands for a missing value
FREE = ("optim.options.", "train.ratio_schedule.")  # dicts in which a missing key differs from its default


def decisive(keys: Iterable[str], config: dict) -> list[str]:
    """Return those of the dotted keys whose settings must not change when a run with `config` is resumed."""
    never = ["train.routes_until"] * (config.get("train", {}).get("routes_until") == 0)  # 0 stands for "never any"
    names = (*FIXED, *never, config.get("objective", "edm"))
    return [key for key in keys if any(f"{key}.".startswith(f"{name}.") for name in names)]


@dataclass(frozen=True)
class Claim:
    """How a run starts in a folder: its checkpoint, changed settings, and why newer checkpoints can't be used."""

    checkpoint: Checkpoint | None = None  # where it goes on; None: at step 0
    changed: dict[str, tuple[object, object]] = field(default_factory=dict)  # settings by dotted key: (before, now)
    damaged: list[str] = field(default_factory=list)  # why newer checkpoints can't be used


def claim(folder: Path, resume: bool | str, config: dict) -> Claim:
    """Decide how a run starts in `folder`, without changing files; resume="auto": continue a run if there is one.
    Raises FileExistsError if the folder holds files that are not a run's or, with resume=False, a run;
    FileNotFoundError if resume=True or the run had checkpoints, but none is whole; ValueError if `config` changes a
    `decisive` setting."""
    other = "name=<another name> starts a run of its own"
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file, but a run needs a folder; {other}")
    checkpoint, damaged = find_whole(folder)
    starts = RunLog(folder).starts()
    if checkpoint is None and not starts:
        if folder.exists() and any(not path.name.startswith(".") for path in folder.iterdir()):
            raise FileExistsError(f"{folder} holds files that are not a run's; {other}")
        if resume is True:
            raise FileNotFoundError(f"resume=true, but {folder} holds no checkpoint; resume=auto starts a run there")
        return Claim()
    if resume is False:
        raise FileExistsError(f"{folder} holds a run already; resume=auto continues it, {other}")
    if (folder / "latest").is_dir() and not (folder / "latest").is_symlink():
        raise FileExistsError(f"{folder / 'latest'} is a folder, but must be a link; remove it if step_… is there too")
    if checkpoint is None and (folder / "latest").is_symlink():  # starting anew would erase its records and samples
        gone = f"the run in {folder} has no whole checkpoint any more"
        raise FileNotFoundError(f"{gone}: remove the folder to train it again; {other}")
    before = checkpoint.info["config"] if checkpoint else starts[-1]["config"]
    changed = differences(migrate(before), migrate(config), nothing=NOTHING)
    if fixed := decisive(changed, config):
        listed = [f"\n  {key}: {written(changed[key][0])} there, {written(changed[key][1])} here" for key in fixed]
        raise ValueError(f"{folder} holds a run with other settings; {other}{''.join(listed)}")
    if checkpoint is None and resume is True:
        raise FileNotFoundError(f"resume=true, but {folder} holds no checkpoint yet; resume=auto starts it again")
    said = {}  # without keys that were added since the run was recorded, but with items added to lists
    for key, (before, now) in changed.items():
        younger = before is NOTHING and not key.startswith(FREE) and not key[-1].isdecimal()
        if key not in LAUNCH and not younger:
            said[key] = before, now
    return Claim(checkpoint, said, damaged)


def migrate(config: dict) -> dict:
    """Convert a config recorded by older code to today's keys; missing ones get their defaults. Section `recipe` is
    dropped, wandb.enabled becomes tracker, train.activation_checkpointing=true becomes train.memory=checkpointing."""
    kept = {key: value for key, value in config.items() if key != "recipe"}
    if "enabled" in config.get("wandb", {}):
        kept["tracker"] = "wandb" if config["wandb"]["enabled"] else "none"
        kept["wandb"] = {key: value for key, value in config["wandb"].items() if key != "enabled"}
    if (again := config.get("train", {}).get("activation_checkpointing")) is not None:
        memory = {"memory": "checkpointing"} if again else {}
        kept["train"] = {**config["train"], "activation_checkpointing": None, **memory}
    return fill(kept, Settings)
