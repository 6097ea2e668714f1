"""Turn weights that were trained elsewhere into a checkpoint, so that sample.py, fid.py and init_from take them.

python scripts/import_checkpoint.py weights=SiT-XL-2-256.pt experiment=sit256_xl2 model=dit rf.reverse=true \\
  model.learn_sigma=true name=sit-xl2

A state dict does not say what it was trained on: the options do, and samples are noise where they
are wrong. A file of our own checkpoints has its record beside it, and the options are compared with that.
All options: configs/import_checkpoint.yaml; which files are understood: tread/runtime/tensor_files.py.
"""

from __future__ import annotations

from pathlib import Path

if __name__ == "__main__":
    import checkout  # noqa: F401

from dataclasses import asdict, dataclass, replace
from typing import Literal

import hydra
from omegaconf import DictConfig, OmegaConf

from tread.checkpoints import checkpoint
from tread.checkpoints.network import build_network, process_of, read_network
from tread.checkpoints.weights import KINDS, StoredWeights, describe, read_weights, sizes
from tread.data.latents import LatentSpec
from tread.encoders.autoencoder import UNKNOWN
from tread.preparing.imports import AUTOENCODER, SCALE
from tread.preparing.lightningdit import read_statistics
from tread.runtime import schema
from tread.runtime.cli import explained, open_door, plain
from tread.runtime.files import explain_failure, write_whole
from tread.runtime.tensor_files import read_state_dicts
from tread.runtime.versions import versions
from tread.training import settings


@dataclass(frozen=True)
class Options:
    """What configs/import_checkpoint.yaml adds to train.py's options."""

    weights: str
    take: Literal["all", "ema", "model"]
    predicts: Literal["objective", "noise"]
    autoencoder: str | None
    scale: float | None
    statistics: str | None


@hydra.main(version_base="1.3", config_path="../configs", config_name="import_checkpoint")
def main(composed: DictConfig) -> None:
    with explained():
        tree = plain(composed)
        asked = {key: tree.pop(key) for key in schema.known_keys(Options)}
        cfg, config = settings.complete(tree)
        options = schema.read(asked, Options)
        saved, warnings = import_file(options, cfg, config)
        for warning in warnings:
            print(f"warning: {warning}")
        print(account(checkpoint.find(saved), options))


def import_file(options: Options, cfg: settings.Settings, config: dict) -> tuple[Path, list[str]]:
    """Write a run's folder with one checkpoint, at step 0; returns it, and what is doubtful about its weights.

    Raises ValueError or OSError.
    """
    folder = Path(cfg.results) / cfg.name
    if folder.exists():
        raise FileExistsError(f"{folder} is there already; name=<another name> writes elsewhere")
    sources, expected = chosen(options), build_network(cfg).state_dict()
    first = next(iter(sources.values()))
    parts = {kind: source.fit(expected, cfg.model, cfg.text) for kind, source in sources.items()}
    latents = latents_of(options, cfg)
    info = {
        "config": config,
        "latents": asdict(latents),
        "attribution": first.source.info.get("attribution") if first.source else None,
        "weights": options.weights,
        "weights_step": first.source.step if first.source else None,
        "predicts": options.predicts,
        "versions": versions(),
    }
    with explain_failure(folder):
        saved = checkpoint.save(folder, 0, parts, info)
        write_whole(folder / "config.yaml", OmegaConf.to_yaml(config))
    warnings = first.warnings(cfg, latents, options.predicts)
    if cfg.dataset.normalize and options.statistics is None:
        warnings.append(
            "dataset.normalize is true, but there are no statistics=…: samples are decoded as if the latents had not "
            "been normalised"
        )
    return saved, warnings


def latents_of(options: Options, cfg: settings.Settings) -> LatentSpec:
    """What the network was trained to see, as the options say it. Raises ValueError for statistics that do not fit."""
    usual = (AUTOENCODER, SCALE) if options.statistics is None else (UNKNOWN, 1.0)
    told = (options.autoencoder, options.scale)
    autoencoder, scale = (default if given is None else given for default, given in zip(usual, told))
    latents = LatentSpec(
        shape=(cfg.dataset.channels, cfg.dataset.size, cfg.dataset.size),
        classes=tuple(map(str, range(cfg.dataset.num_classes))),
        autoencoder=autoencoder,
        scale=scale,
    )
    if options.statistics is None:
        return latents
    if not cfg.dataset.normalize:
        raise ValueError("statistics are of normalised latents: dataset.normalize=true says that they were")
    path = Path(options.statistics).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"statistics={options.statistics} is no file")
    statistics, std = read_statistics(path, cfg.dataset.channels), process_of(cfg).data_std
    mean = tuple(scale * value for value in statistics["mean"])
    return replace(latents, channel_shift=mean, channel_scale=tuple(std / (abs(scale) * s) for s in statistics["std"]))


def chosen(options: Options) -> dict[str, StoredWeights]:
    """The weights to import, "ema" or "model" or both; those of an unknown kind count as averaged unless take=model."""
    path = Path(options.weights).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"weights={options.weights} is no file; a checkpoint's folder needs no import")
    if checkpoint.containing(path) or options.take != "all":
        source = read_weights(path, options.take)
        kind = options.take if source.source is None else source.kind
        if options.take not in ("all", kind):
            raise ValueError(f"{path} holds the {kind} part, as info.json beside it says; take=all imports that")
        return {kind: source}
    states = read_state_dicts(path)
    return {kind or "ema": StoredWeights(str(path), kind, state) for kind, state in states.items()}


def account(saved: checkpoint.Checkpoint, options: Options) -> str:
    """What was imported, what a file can't tell, and the command that uses it."""
    parts = [kind for kind in ("ema", "model") if f"{kind}.safetensors" in saved.info["files"]]
    config, raw = saved.info["config"], parts == ["model"]
    use = f"python sample.py checkpoint={saved.folder}{' weights=model' * raw}"
    taken = f"trained by objective={config['objective']}"
    if options.predicts == "noise":
        use = f"python train.py init_from={saved.folder}{' init_weights=model' * raw} name=… and its sizes"
        taken = "trained to predict noise, so that they start runs and are not sampled"
    named = sizes(saved.tensors(parts[0]))
    if "model.num_heads" in read_network(config).model.decisive.keys() - named.keys():
        taken += f", with num_heads {config['model']['num_heads']}"
    step = saved.info["weights_step"]
    when = "at a step that is not recorded" if step is None else f"step {step:,}"
    return "\n".join(
        [
            f"{saved.folder}: {' and '.join(KINDS[kind] for kind in parts)} weights of {options.weights}, {when}",
            f"  of {describe(named)}",
            f"  taken as {taken}",
            f"  {use}",
        ]
    )


if __name__ == "__main__":
    keys = ("experiment", *schema.known_keys(Options))
    open_door(main, lambda: [*settings.known_keys(), *keys], spell=settings.add_unstated)
