"""Write one kind of weights of a checkpoint alone, to keep or give away.

python scripts/export_checkpoint.py checkpoint=results/my-run out=exports/my-run

The folder holds ema.safetensors (a DiT's in public DiT's parameter names), info.json and config.yaml, and is a
checkpoint itself: sample.py, fid.py and init_from take it. All options: configs/export_checkpoint.yaml.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if __name__ == "__main__":
    from tread.runtime.early import guard_imports

    guard_imports(globals())

import json
import shutil
from dataclasses import dataclass

import hydra
from omegaconf import DictConfig, OmegaConf

from tread.checkpoints import checkpoint
from tread.runtime import schema
from tread.runtime.cli import explained, open_door, plain
from tread.runtime.files import check_place, explain_failure, size_text, whole_folder
from tread.runtime.tensor_files import Weights


@dataclass(frozen=True)
class Options:
    """configs/export_checkpoint.yaml."""

    checkpoint: str
    out: str
    weights: Weights


@hydra.main(version_base="1.3", config_path="../configs", config_name="export_checkpoint")
def main(composed: DictConfig) -> None:
    with explained():
        options = schema.read(plain(composed), Options)
        found = export(
            checkpoint.find(Path(options.checkpoint).expanduser()), options.weights, Path(options.out).expanduser()
        )
        print(account(found, options))


def export(found: checkpoint.Checkpoint, weights: str, out: Path) -> checkpoint.Checkpoint:
    """Write a checkpoint with one part, whole or not at all, and open it. Raises ValueError or OSError."""
    if out.exists() or out.is_symlink():
        raise FileExistsError(f"out={out} is there already; choose another folder")
    found.verify(weights)
    name = f"{weights}.safetensors"
    stated = found.info["files"][name]
    check_place(out.parent, stated["bytes"])
    with explain_failure(out), whole_folder(out) as partial:
        shutil.copyfile(found.folder / name, partial / name)
        content = {**found.info, "files": {name: stated}}
        (partial / "info.json").write_text(json.dumps(content, indent=1) + "\n")
        (partial / "config.yaml").write_text(OmegaConf.to_yaml(found.info["config"]))
    return checkpoint.find(out)


def account(found: checkpoint.Checkpoint, options: Options) -> str:
    """What was written, and the commands that take it."""
    size = found.info["files"][f"{options.weights}.safetensors"]["bytes"]
    raw = options.weights == "model"
    lines = [f"{options.out}: {options.weights} weights of step {found.step}, {size_text(size)}"]
    if found.info.get("predicts", "objective") == "objective":
        lines += [f"  python sample.py checkpoint={options.out}{' weights=model' * raw}"]
        lines += [f"  python fid.py checkpoint={options.out}{' weights=model' * raw} reference=…"]
    lines += [f"  python train.py init_from={options.out}{' init_weights=model' * raw} name=…"]
    return "\n".join(lines)


if __name__ == "__main__":
    open_door(main, schema.known_keys(Options))
