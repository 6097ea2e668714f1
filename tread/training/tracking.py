"""Where metrics go beside metrics.jsonl: Weights & Biases or TensorBoard."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Mapping
from pathlib import Path

from tread.runtime.files import write_whole
from tread.training.settings import Settings

PACKAGES = {"wandb": "requirements.txt", "tensorboard": "requirements-tensorboard.txt"}  # where each is named


def check_tracker(name: str) -> None:
    """Raise ValueError unless the tracker's package is installed."""
    if name != "none" and importlib.util.find_spec(name) is None:
        needed = f"tracker={name} needs the package {name}; pip install -r {PACKAGES[name]}"
        raise ValueError(f"{needed}, or set tracker=none")


class Wandb:
    """A run of Weights & Biases; its id is kept in the folder, so that a resumed run goes on in the same one."""

    def __init__(self, project: str, name: str, config: dict, folder: Path) -> None:
        import wandb  # imported here because it takes seconds and is off by default

        kept = folder / "wandb_id.txt"
        if not kept.exists():
            write_whole(kept, uuid.uuid4().hex[:8])
        same = {"id": kept.read_text(), "resume": "allow"}
        try:
            self._run = wandb.init(project=project, name=name, config=config, dir=folder, **same)
        except wandb.errors.Error as error:
            raise ValueError(f"wandb: {error}. Run `wandb login`, or set tracker=none") from error

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self, code: int) -> None:
        self._run.finish(exit_code=code)


class TensorBoard:
    """Events in <run>/tensorboard; those of steps that a resumed run does again are shown no more."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # an optional package, which takes seconds

        self._writer = SummaryWriter(folder / "tensorboard", purge_step=step + 1)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # what is logged is there, however the run ends

    def close(self, code: int) -> None:
        self._writer.close()


Tracker = Wandb | TensorBoard  # a run tells it numbers by name after so many steps, and the exit code it ends with


def open_tracker(cfg: Settings, config: dict, folder: Path, step: int) -> Tracker | None:
    """The tracker of a run that goes on after so many steps, in the main process. Raises ValueError for a refusal."""
    if cfg.tracker == "wandb":
        return Wandb(cfg.wandb.project, cfg.name, config, folder)
    return TensorBoard(folder, step) if cfg.tracker == "tensorboard" else None
