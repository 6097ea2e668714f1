"""Logging of metrics to Weights & Biases or TensorBoard, in addition to metrics.jsonl."""

import importlib.util
import uuid
from collections.abc import Mapping
from pathlib import Path

from tread.runtime.files import write_whole


def check_tracker(name: str) -> None:
    """Raise ValueError if the package of the tracker "wandb" or "tensorboard" is missing; "none" needs no package."""
    if name != "none" and importlib.util.find_spec(name) is None:
        raise ValueError(f"tracker={name} needs a package: pip install {name}, or set tracker=none")


class Wandb:
    """Logs to the wandb run whose id is in <folder>/wandb_id.txt (made if missing). ValueError if wandb can't start."""

    def __init__(self, project: str, name: str, config: dict, folder: Path) -> None:
        import wandb  # takes seconds, and is off by default

        kept = folder / "wandb_id.txt"
        if not kept.exists():
            write_whole(kept, uuid.uuid4().hex[:8])
        run_id = kept.read_text()
        try:
            self._run = wandb.init(project=project, name=name, config=config, dir=folder, id=run_id, resume="allow")
            self._run.define_metric("*", step_metric="step")  # as wandb's own count drops steps that are done again
        except wandb.errors.Error as error:
            raise ValueError(f"wandb: {error}") from error

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def close(self, code: int) -> None:
        self._run.finish(exit_code=code)


class TensorBoard:
    """Writes to <folder>/tensorboard. Old events of steps after `step` are hidden: a resumed run repeats the steps."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # an optional package, which takes seconds

        self._writer = SummaryWriter(folder / "tensorboard", purge_step=step + 1)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # so that a crash loses nothing

    def close(self, code: int) -> None:
        self._writer.close()


Tracker = Wandb | TensorBoard


def open_tracker(tracker: str, project: str, config: dict, folder: Path, step: int) -> Tracker | None:
    """Open the tracker "wandb" or "tensorboard" for the run in `folder`, after `step` steps; return None for "none".
    `config` holds the run's settings, `project` names a wandb project. Raises ValueError if wandb fails to start."""
    if tracker == "wandb":
        return Wandb(project, config["name"], config, folder)
    return TensorBoard(folder, step) if tracker == "tensorboard" else None
