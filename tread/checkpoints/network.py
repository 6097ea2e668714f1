"""Reads a network's settings from a checkpoint's config, and builds its diffusion process and the network."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from rf import RF
from tread.data.dataset import Verify
from tread.data.shards import Placement
from tread.diffusion.edm import EDM
from tread.diffusion.process import Process
from tread.models.architectures import AnyOptions, TextSettings
from tread.models.backbone import Backbone
from tread.runtime.plugins import check_plugin
from tread.runtime.schema import Count, check, read

Objective = Annotated[Literal["edm", "rf"], "rectified flow"]


@dataclass(frozen=True)
class Dataset:
    name: str
    path: str | None
    heldout: str | None
    embedded: Literal["digits", "emoji", "cifar10"] | None
    channels: Count | None
    size: Count | None
    num_classes: Count | None
    verify: Verify
    placement: Placement
    normalize: bool
    flip: bool = False
    archive: str | None = None

    def __post_init__(self) -> None:
        if self.path is None:
            raise ValueError(f"dataset.path is null, but dataset={self.name} needs it: dataset.path=<folder>")


@dataclass(frozen=True)
class Network:
    """Those settings of a run that decide its network and diffusion process (`edm` or `rf`, as `objective` says)."""

    model: AnyOptions
    dataset: Dataset
    edm: EDM
    rf: RF
    objective: Objective
    text: TextSettings = TextSettings()
    plugins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        settle_shifts(self)


def settle_shifts(cfg: Network) -> None:
    """Replace "auto" shifts of cfg.rf in place by numbers (RF.for_latents), if cfg.dataset has size and channels."""
    if None not in (cfg.dataset.channels, cfg.dataset.size):
        object.__setattr__(cfg, "rf", cfg.rf.for_latents(cfg.dataset.channels, cfg.dataset.size))


def read_network(config: dict, folder: Path | None = None) -> Network:
    """Read the network's settings from a checkpoint's config, and import its plugins. Raises ValueError for unknown or
    mistyped settings and plugins that fail to import, are missing or lie in the checkpoint's `folder`."""
    stated = {item.name: config[item.name] for item in fields(Network) if item.name in config}
    if folder and "plugins" in stated:
        check("plugins", stated["plugins"], tuple[str, ...])
        stated["plugins"] = [check_plugin(name, folder) for name in stated["plugins"]]
    return read(stated, Network)


def process_of(cfg: Network) -> Process:
    """Return the diffusion process that a network is trained on and sampled by. `cfg` may also be a run's Settings."""
    return cfg.edm if cfg.objective == "edm" else cfg.rf


def build_network(cfg: Network) -> Backbone:
    """Build the network, with initial weights from torch's global generator. `cfg` may also be a run's Settings."""
    return cfg.model.build(cfg.dataset.size, cfg.dataset.channels, cfg.dataset.num_classes, cfg.text)
