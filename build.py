"""What the settings of a run mean: its network and its data."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import digits
from checkpoint import read_weights
from dit import DiT
from latents import LatentDataset
from settings import Network, Settings


def build_network(cfg: Settings | Network) -> nn.Module:
    """The network of a run, freshly initialised from torch's global generator, on the default device."""
    return DiT(
        input_size=cfg.dataset.size,
        patch_size=cfg.model.patch_size,
        in_channels=cfg.dataset.channels,
        hidden_size=cfg.model.hidden_size,
        depth=cfg.model.depth,
        num_heads=cfg.model.num_heads,
        mlp_ratio=cfg.model.mlp_ratio,
        num_classes=cfg.dataset.num_classes,
        learn_sigma=cfg.model.learn_sigma,
        init=cfg.model.init,
    )


def build_optimizer(cfg: Settings, network: nn.Module) -> torch.optim.AdamW:
    """AdamW over all parameters of a network, fused where its device can; build it after moving the network."""
    device = next(network.parameters()).device.type
    return torch.optim.AdamW(
        network.parameters(),
        lr=cfg.optim.lr,
        betas=cfg.optim.betas,
        eps=cfg.optim.eps,
        weight_decay=cfg.optim.weight_decay,
        fused=device in ("cpu", "cuda"),
    )


def load_weights(network: nn.Module, path: str) -> None:
    """Start from other weights (init_from). Raises FileNotFoundError, or ValueError if they do not fit."""
    try:
        network.load_state_dict(read_weights(Path(path)))
    except RuntimeError as error:
        raise ValueError(
            f"the weights of init_from={path} do not fit this network (public DiT checkpoints need "
            f"model.learn_sigma=true): {error}"
        ) from error


def open_datasets(cfg: Settings) -> tuple[LatentDataset, LatentDataset | None]:
    """The training data and, if dataset.heldout names them, the held-out data.

    Raises ValueError or FileNotFoundError if they do not fit the model, the batch or one another.
    """
    data = open_dataset(cfg, cfg.dataset.path, "train")
    data.steps_per_epoch(cfg.train.batch_size)
    if cfg.dataset.heldout is None:
        return data, None
    heldout = open_dataset(cfg, cfg.dataset.heldout, "heldout")
    for key in ("classes", "autoencoder", "scale", "shift"):
        if getattr(heldout.latents, key) != getattr(data.latents, key):
            raise ValueError(f"{cfg.dataset.heldout} and {cfg.dataset.path} differ in {key}: prepare both alike")
    return data, heldout


def open_dataset(cfg: Settings, path: str, part: str) -> LatentDataset:
    """Open a dataset, or the "heldout" `part` of it, and check that it fits the model.

    The embedded one is written first if it is not there. Raises ValueError or FileNotFoundError.
    """
    if cfg.dataset.embedded == "digits":
        digits.prepare(Path(path), part)
    data = LatentDataset(path, cfg.dataset.verify)
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
