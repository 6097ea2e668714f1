"""What the settings of a run mean: its network and its data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from settings import Settings, read
from tread.checkpoints.network import process_of
from tread.data import digits
from tread.data.dataset import LatentDataset, read_index
from tread.data.latents import Latents
from updates import LearningRate

MEASURES = ("channels", "size", "num_classes")


def build_optimizer(cfg: Settings, network: nn.Module) -> torch.optim.AdamW:
    """AdamW over all parameters of a network, fused; build it after moving the network."""
    return torch.optim.AdamW(
        network.parameters(),
        lr=cfg.optim.lr,
        betas=cfg.optim.betas,
        eps=cfg.optim.eps,
        weight_decay=cfg.optim.weight_decay,
        fused=True,
    )


def build_learning_rate(cfg: Settings) -> LearningRate:
    """The learning rate of each step of a run."""
    optim = cfg.optim
    return LearningRate(optim.lr, cfg.train.steps, optim.schedule, optim.warmup_steps, optim.final_lr)


def complete(config: dict) -> dict:
    """The config with dataset.channels, size and num_classes; those that are null come from the dataset itself.

    Raises ValueError or FileNotFoundError.
    """
    dataset = read(config).dataset
    if all(getattr(dataset, key) is not None for key in MEASURES):
        return config
    try:
        found = Latents.from_json(read_index(Path(dataset.path)))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{dataset.path}/index.json is damaged: {type(error).__name__}: {error}") from error
    measures = dict(zip(MEASURES, (found.shape[0], found.shape[1], len(found.classes))))
    known = {key: value for key, value in config["dataset"].items() if key not in MEASURES or value is not None}
    return {**config, "dataset": {**measures, **known}}


def open_datasets(cfg: Settings, device: torch.device | str = "cpu") -> tuple[LatentDataset, LatentDataset | None]:
    """The training data, placed and normalised as cfg.dataset says, and the held-out data if it names them.

    Raises ValueError or FileNotFoundError if they do not fit the model, the batch or one another.
    """
    data = open_dataset(cfg, cfg.dataset.path, "train", cfg.dataset.placement, device)
    if cfg.dataset.normalize:
        data.normalize(process_of(cfg).data_std)
    data.steps_per_epoch(cfg.train.batch_size)
    if cfg.dataset.heldout is None:
        return data, None
    heldout = open_dataset(cfg, cfg.dataset.heldout, "heldout")
    for key in ("classes", "autoencoder", "fingerprint", "scale", "shift"):
        ours, theirs = getattr(data.latents, key), getattr(heldout.latents, key)
        if ours != theirs and not (key == "fingerprint" and None in (ours, theirs)):  # imports do not know it
            raise ValueError(
                f"{cfg.dataset.heldout} and {cfg.dataset.path} differ in {key}: prepare both alike, or set "
                f"dataset.heldout=null\n  {str(theirs)[:100]}\n  {str(ours)[:100]}"
            )
    normalization = {key: getattr(data.latents, key) for key in ("channel_shift", "channel_scale")}
    heldout.latents = replace(heldout.latents, **normalization)
    return data, heldout


def open_dataset(
    cfg: Settings, path: str, part: str, placement: str = "mmap", device: torch.device | str = "cpu"
) -> LatentDataset:
    """Open a dataset, or the "heldout" `part` of it, and check that it fits the model.

    The embedded one is written first if it is not there. Raises ValueError or FileNotFoundError.
    """
    if cfg.dataset.embedded == "digits":
        digits.prepare(Path(path), part)
    data = LatentDataset(path, cfg.dataset.verify, placement, device)
    expected = (cfg.dataset.channels, cfg.dataset.size, cfg.dataset.size)
    if data.latents.shape != expected:
        raise ValueError(
            f"{path} holds latents of shape {data.latents.shape}, but dataset.channels and dataset.size say {expected}"
        )
    if len(data.latents.classes) != cfg.dataset.num_classes:
        raise ValueError(
            f"{path} has {len(data.latents.classes)} classes, but dataset.num_classes is {cfg.dataset.num_classes}"
        )
    return data
