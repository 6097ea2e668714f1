"""Weights & Biases, beside metrics.jsonl."""

from __future__ import annotations

import uuid
from pathlib import Path

from tread.runtime.files import write_whole
from tread.training.settings import Settings


def start_wandb(cfg: Settings, config: dict, folder: Path) -> object:
    """A Weights & Biases run; its id is kept in the folder, so that a resumed run goes on in the same one."""
    import wandb  # imported here because it takes seconds and is off by default

    kept = folder / "wandb_id.txt"
    if not kept.exists():
        write_whole(kept, uuid.uuid4().hex[:8])
    same = {"id": kept.read_text(), "resume": "allow"}
    try:
        return wandb.init(project=cfg.wandb.project, name=cfg.name, config=config, dir=folder, **same)
    except wandb.errors.Error as error:
        raise ValueError(f"wandb: {error}. Run `wandb login`, or set wandb.enabled=false") from error
