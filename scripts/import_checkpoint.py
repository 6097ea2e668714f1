"""Turns weights that were trained elsewhere into a checkpoint that sample.py, fid.py and train.py's init_from take.

python scripts/import_checkpoint.py weights=SiT-XL-2-256.pt experiment=sit256_xl2 model=dit rf.reverse=true \\
  model.learn_sigma=true name=sit-xl2

A state dict does not say what it was trained on, so the options must. With wrong options, samples are noise. If the
file belongs to a checkpoint of this code, the options are compared with the info.json beside the file. All options:
configs/import_checkpoint.yaml; file formats: tread/runtime/tensor_files.py.
"""

from pathlib import Path

if __name__ == "__main__":
    import checkout  # noqa: F401

from dataclasses import asdict, dataclass, replace
from typing import Literal

from omegaconf import OmegaConf

from tread.checkpoints import checkpoint
from tread.checkpoints.network import build_network, process_of
from tread.checkpoints.weights import KINDS, StoredWeights, describe, read_weights, sizes
from tread.data.latents import LatentSpec
from tread.encoders.autoencoder import UNKNOWN, located
from tread.preparing.imports import AUTOENCODER, SCALE, read_statistics
from tread.runtime import schema
from tread.runtime.cli import door, open_door
from tread.runtime.files import explain_failure, write_whole
from tread.runtime.tensor_files import read_state_dicts
from tread.runtime.versions import versions
from tread.training import settings


@dataclass(frozen=True)
class Options:
    """The options that configs/import_checkpoint.yaml adds to train.py's."""

    weights: str
    take: Literal["all", "ema", "model"]
    predicts: Literal["objective", "noise"]
    autoencoder: str | None
    scale: float | None
    statistics: str | None


@door()
def main(tree: dict) -> None:
    asked = {key: tree.pop(key) for key in schema.known_keys(Options)}
    cfg, config = settings.complete(tree)
    print(import_file(schema.read(asked, Options), cfg, config))


def import_file(options: Options, cfg: settings.Settings, config: dict) -> str:
    """Write a run's folder with a checkpoint at step 0; return warnings, a summary and a sampling command as text.
    `config`: `cfg` as a dict. Raises ValueError or OSError if the folder exists, weights don't fit or writing fails."""
    folder = (Path(cfg.results) / cfg.name).expanduser()
    if folder.is_file() or folder.is_dir() and {*folder.iterdir()} - {*folder.glob(".step_*")}:
        raise FileExistsError(f"{folder} is there already; name=<another name> writes elsewhere")
    sources, expected = chosen(options), build_network(replace(cfg, model=cfg.model.anywhere)).state_dict()
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
        saved = checkpoint.save(folder, 0, parts, info).resolve()
        write_whole(folder / "config.yaml", OmegaConf.to_yaml(config))
    warnings = first.warnings(cfg, latents, options.predicts)
    if cfg.dataset.normalize and options.statistics is None:
        warnings.append("without statistics=… samples are decoded as if the latents had not been normalised")
    step = "at a step that is not recorded" if first.source is None else f"step {first.source.step:,}"
    raw = " weights=model" if "ema" not in parts else ""
    lines = [f"warning: {warning}" for warning in warnings]
    lines += [f"{saved}: {' and '.join(KINDS[kind] for kind in parts)} weights of {options.weights}, {step}"]
    lines += [f"  {describe(sizes(next(iter(parts.values()))))}", f"  python sample.py checkpoint={saved}{raw}"]
    return "\n".join(lines)


def latents_of(options: Options, cfg: settings.Settings) -> LatentSpec:
    """Return the spec of the latents that the network was trained on. Raises ValueError if options.statistics, a file
    of each channel's mean and std, does not fit them, or is given although dataset.normalize is false."""
    autoencoder, scale = (AUTOENCODER, SCALE) if options.statistics is None else (UNKNOWN, 1.0)
    if options.autoencoder in ("none", "pixels"):
        autoencoder, scale = "pixels", 1.0
    scale = scale if options.scale is None else options.scale
    latents = LatentSpec(
        shape=(cfg.dataset.channels, cfg.dataset.size, cfg.dataset.size),
        classes=tuple(map(str, range(cfg.dataset.num_classes))),
        autoencoder=autoencoder if autoencoder == "pixels" else located(options.autoencoder or autoencoder),
        scale=scale,
    )
    if options.statistics is None:
        return latents
    if not cfg.dataset.normalize:
        raise ValueError("statistics=… is for a network of normalised latents: set dataset.normalize=true")
    statistics = read_statistics(Path(options.statistics).expanduser(), cfg.dataset.channels)
    mean, std = tuple(scale * value for value in statistics["mean"]), process_of(cfg).data_std
    return replace(latents, channel_shift=mean, channel_scale=tuple(std / (abs(scale) * s) for s in statistics["std"]))


def chosen(options: Options) -> dict[str, StoredWeights]:
    """Return the weights to import, keyed "model" or "ema": those of the kind options.take; for "all", all in the file.
    If the file does not say which kind its weights are, they count as options.take or, for "all", as "ema". Raises
    FileNotFoundError if options.weights is no file, ValueError if it can't be read or lacks the kind options.take."""
    path = Path(options.weights).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"weights={options.weights} is no file; a checkpoint's folder needs no import")
    if checkpoint.containing(path) or options.take != "all":
        source = read_weights(path, options.take)
        kind = options.take if source.source is None else source.kind
        if options.take not in ("all", kind):
            raise ValueError(f"{path} holds the {kind} part, as info.json beside it says; take=all imports that")
        return {kind: source}
    return {kind or "ema": StoredWeights(str(path), kind, state) for kind, state in read_state_dicts(path).items()}


if __name__ == "__main__":
    keys = ("experiment", *schema.known_keys(Options))
    open_door(main, lambda: [*settings.known_keys(), *keys], spell=settings.add_unstated)
