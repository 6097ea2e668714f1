"""Turn weights that were trained elsewhere into a checkpoint, so that sample.py and fid.py take them.

python scripts/import_weights.py weights=SiT-XL-2-256.pt experiment=sit256_xl2 model=dit rf.reverse=true \
    model.learn_sigma=true name=sit-xl2

A state dict does not say what it was trained on: the options do, and samples are noise where they
are wrong. All options: configs/import_weights.yaml.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import checkpoint  # noqa: E402
import settings  # noqa: E402
from build import build_network, complete, load_weights  # noqa: E402
from cli import open_door, plain  # noqa: E402
from files import explain_failure, write_whole  # noqa: E402
from latents import Latents  # noqa: E402
from runlog import versions  # noqa: E402


@dataclass(frozen=True)
class Options:
    """What configs/import_weights.yaml adds to train.py's options."""

    weights: str
    autoencoder: str
    scale: float


@hydra.main(version_base="1.3", config_path="../configs", config_name="import_weights")
def main(composed: DictConfig) -> None:
    try:
        tree = plain(composed)
        own = {key: tree.pop(key) for key in settings.known_keys(Options)}
        config = complete(tree)
        folder = import_weights(settings.read(own, Options), settings.read(config), config)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"{folder}: python sample.py checkpoint={folder}")


def import_weights(options: Options, cfg: settings.Settings, config: dict) -> Path:
    """Write a run's folder with one checkpoint, at step 0. Raises ValueError or OSError."""
    folder = Path(cfg.results) / cfg.name
    if folder.exists():
        raise FileExistsError(f"{folder} is there already; name=<another name> writes elsewhere")
    network = build_network(cfg)
    load_weights(network, options.weights)
    latents = Latents(
        shape=(cfg.dataset.channels, cfg.dataset.size, cfg.dataset.size),
        classes=tuple(map(str, range(cfg.dataset.num_classes))),
        autoencoder=options.autoencoder,
        scale=options.scale,
    )
    info = {"config": config, "latents": asdict(latents), "weights": options.weights, "versions": versions()}
    with explain_failure(folder):
        saved = checkpoint.save(folder, 0, {"ema": network.state_dict()}, info)
        write_whole(folder / "config.yaml", OmegaConf.to_yaml(config))
    return saved


if __name__ == "__main__":
    open_door(main, [*settings.known_keys(), "experiment", *settings.known_keys(Options)])
