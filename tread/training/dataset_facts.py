"""What a run's settings leave to its dataset: sizes, held-out data, and what an encoder of captions is."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from tread.checkpoints.network import TextSettings
from tread.data import digits, emojis
from tread.data.dataset import LatentDataset, heldout_beside
from tread.training.settings import Settings, read

MEASURES = ("channels", "size", "num_classes")


def complete(config: dict) -> dict:
    """The config with dataset.channels, size and num_classes; those that are null come from the dataset itself, as
    what there is to know of a text network's encoder does.

    So does dataset.heldout=auto: the held-out data that was prepared with it, or null.

    Raises ValueError or FileNotFoundError.
    """
    dataset = read(config).dataset
    if dataset.heldout == "auto":
        found = heldout_beside(dataset.path)
        config = {**config, "dataset": {**config["dataset"], "heldout": found and str(found)}}
    config = _with_text(config)
    if all(getattr(dataset, key) is not None for key in MEASURES):
        return config
    found = LatentDataset(dataset.path).latents
    measures = dict(zip(MEASURES, (found.shape[0], found.shape[1], len(found.classes))))
    known = {key: value for key, value in config["dataset"].items() if key not in MEASURES or value is not None}
    return {**config, "dataset": {**measures, **known}}


def with_text(cfg: Settings) -> Settings:
    """The settings of a text network with what the dataset says of text.encoder.

    Raises FileNotFoundError, or ValueError, also where the settings say otherwise.
    """
    if not cfg.model.takes_text:
        return cfg
    prepare_embedded(cfg, cfg.dataset.path, "train")
    found = asdict(LatentDataset(cfg.dataset.path, text=cfg.text.encoder).text_spec)
    for key, value in found.items():
        if (given := getattr(cfg.text, key)) not in (getattr(TextSettings, key), value):
            raise ValueError(
                f"text.{key} is {str(given)[:80]}, as typed or as the run was begun, but {str(value)[:80]} of the text "
                f"of {cfg.text.encoder} in {cfg.dataset.path}: leave it null, or name=<another name> starts a run of "
                "its own"
            )
    return replace(cfg, text=TextSettings(**found))


def _with_text(config: dict) -> dict:
    cfg = read(config)
    if not cfg.model.takes_text:
        return config
    found = asdict(with_text(cfg).text)
    words = found["vocabulary"]
    return {**config, "text": {**found, "vocabulary": words and list(words)}}  # as info.json gives it back


def prepare_embedded(cfg: Settings, path: str, part: str) -> None:
    """Write a part of an embedded dataset, and its captions' text if a network takes it, unless they are there."""
    if cfg.dataset.embedded == "digits":
        digits.prepare(Path(path), part)
    elif cfg.dataset.embedded == "emoji":
        emojis.prepare(Path(path), part, cfg.text.encoder if cfg.model.takes_text else None)
