"""Turn weights that were trained elsewhere into a checkpoint, so that sample.py, fid.py and init_from take them.

python scripts/import_checkpoint.py weights=SiT-XL-2-256.pt experiment=sit256_xl2 model=dit rf.reverse=true \
    model.learn_sigma=true name=sit-xl2

A state dict does not say what it was trained on: the options do, and samples are noise where they
are wrong. All options: configs/import_checkpoint.yaml; which files are understood: tread/checkpoints/state_dicts.py.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import hydra
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tread.checkpoints import checkpoint
from tread.checkpoints.network import build_network
from tread.checkpoints.state_dicts import describe, fit, sizes
from tread.data.latents import LatentSpec
from tread.runtime import schema
from tread.runtime.cli import explained, open_door, plain
from tread.runtime.files import explain_failure, write_whole
from tread.runtime.tensor_files import read_state_dict, read_state_dicts
from tread.runtime.versions import versions
from tread.training import settings
from tread.training.setup import complete


@dataclass(frozen=True)
class Options:
    """What configs/import_checkpoint.yaml adds to train.py's options."""

    weights: str
    take: Literal["all", "ema", "model"]
    predicts: Literal["objective", "noise"]
    autoencoder: str
    scale: float


@hydra.main(version_base="1.3", config_path="../configs", config_name="import_checkpoint")
def main(composed: DictConfig) -> None:
    with explained():
        tree = plain(composed)
        own = {key: tree.pop(key) for key in schema.known_keys(Options)}
        config = complete(tree)
        options = schema.read(own, Options)
        saved = import_file(options, settings.read(config), config)
    print(account(checkpoint.find(saved), options))


def import_file(options: Options, cfg: settings.Settings, config: dict) -> Path:
    """Write a run's folder with one checkpoint, at step 0. Raises ValueError or OSError."""
    folder = Path(cfg.results) / cfg.name
    if folder.exists():
        raise FileExistsError(f"{folder} is there already; name=<another name> writes elsewhere")
    found, expected = chosen(options), build_network(cfg).state_dict()
    parts = {kind: fit(state, expected, options.weights) for kind, state in found.items()}
    latents = LatentSpec(
        shape=(cfg.dataset.channels, cfg.dataset.size, cfg.dataset.size),
        classes=tuple(map(str, range(cfg.dataset.num_classes))),
        autoencoder=options.autoencoder,
        scale=options.scale,
    )
    info = {
        "config": config,
        "latents": asdict(latents),
        "weights": options.weights,
        "predicts": options.predicts,
        "versions": versions(),
    }
    with explain_failure(folder):
        saved = checkpoint.save(folder, 0, parts, info)
        write_whole(folder / "config.yaml", OmegaConf.to_yaml(config))
    return saved


def chosen(options: Options) -> dict[str, dict[str, Tensor]]:
    """The weights to import, "ema" or "model" or both; those of an unknown kind count as averaged unless take=model."""
    path = Path(options.weights).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"weights={options.weights} is no file; a checkpoint's folder needs no import")
    if options.take != "all":
        return {options.take: read_state_dict(path, options.take)}
    return {kind or "ema": state for kind, state in read_state_dicts(path).items()}


def account(saved: checkpoint.Checkpoint, options: Options) -> str:
    """What was imported, what a file can't tell, and the command that uses it."""
    parts = [kind for kind in ("ema", "model") if f"{kind}.safetensors" in saved.info["files"]]
    config, raw = saved.info["config"], parts == ["model"]
    use = f"python sample.py checkpoint={saved.folder}{' weights=model' * raw}"
    trained = f"trained by objective={config['objective']}"
    if options.predicts == "noise":
        use = f"python train.py init_from={saved.folder}{' init_weights=model' * raw} name=… and its sizes"
        trained = "trained to predict noise, so that they start runs and are not sampled"
    found = sizes(saved.tensors(parts[0]))
    if found.get("model.architecture") == "dit":
        trained += f", with num_heads {config['model']['num_heads']}"
    names = {"ema": "averaged (ema)", "model": "raw (model)"}
    return "\n".join(
        [
            f"{saved.folder}: {' and '.join(names[kind] for kind in parts)} weights of {options.weights}",
            f"  of {describe(found)}",
            f"  taken as {trained}: no file tells",
            f"  {use}",
        ]
    )


if __name__ == "__main__":
    open_door(main, [*settings.known_keys(), "experiment", *schema.known_keys(Options)], settings.MOVED)
