"""What a network depends on, as a checkpoint's config says it: its settings, its process, and building it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from torch import nn

from dit import DiT
from rf import RF
from routing_module import SELECT_CHOICES, Route, check_routes
from tread.checkpoints.checkpoint import read_weights
from tread.checkpoints.state_dicts import fit
from tread.data.dataset import PLACEMENTS
from tread.diffusion.edm import EDM
from tread.diffusion.process import Process
from tread.models.backbone import Backbone
from tread.models.rwkv import RWKV
from tread.runtime.schema import check_positive, read

# by architecture, how routes can select tokens
ARCHITECTURES = {"dit": SELECT_CHOICES, "rwkv": ("row",)}


@dataclass(frozen=True)
class Model:
    name: str
    architecture: str
    routes: tuple[Route, ...]
    hidden_size: int
    depth: int
    num_heads: int
    patch_size: int
    mlp_ratio: float
    learn_sigma: bool
    init: str

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"model.architecture is {self.architecture!r}, but must be one of {', '.join(ARCHITECTURES)}"
            )
        for number, route in enumerate(self.routes):
            if route.select not in self.selects:
                raise ValueError(
                    f"model.routes.{number}.select is {route.select!r}, but the blocks of {self.architecture} look at "
                    f"neighbours in the token grid: it must be {' or '.join(self.selects)}"
                )
        sizes = ("hidden_size", "depth", "num_heads", "patch_size", "mlp_ratio")
        check_positive("model", **{name: getattr(self, name) for name in sizes})
        check_routes(self.routes, self.depth)

    @property
    def selects(self) -> tuple[str, ...]:
        """How routes of this architecture can select tokens, the usual way first."""
        return ARCHITECTURES[self.architecture]


@dataclass(frozen=True)
class Dataset:
    name: str
    path: str | None
    heldout: str | None
    embedded: str | None
    channels: int | None
    size: int | None
    num_classes: int | None
    verify: str
    placement: str
    normalize: bool

    def __post_init__(self) -> None:
        if self.path is None:
            raise ValueError(f"dataset.path is null, but dataset={self.name} needs it: dataset.path=<folder>")
        if self.placement not in PLACEMENTS:
            raise ValueError(f"dataset.placement is {self.placement!r}, but must be one of {', '.join(PLACEMENTS)}")
        check_positive("dataset", channels=self.channels, size=self.size, num_classes=self.num_classes)
        if self.embedded not in (None, "digits"):
            raise ValueError(f"dataset.embedded is {self.embedded!r}, but must be digits or null")


@dataclass(frozen=True)
class Network:
    """The part of the settings that a checkpoint's network depends on."""

    model: Model
    dataset: Dataset
    edm: EDM
    rf: RF
    objective: str

    def __post_init__(self) -> None:
        check_objective(self.objective)


def check_objective(name: str) -> None:
    """Raise ValueError unless an objective is known."""
    if name not in ("edm", "rf"):
        raise ValueError(f"objective is {name!r}, but must be edm or rf (rectified flow)")


def read_network(config: dict) -> Network:
    """What a checkpoint's config says of its network. Raises ValueError."""
    return read({item.name: config[item.name] for item in fields(Network) if item.name in config}, Network)


def process_of(cfg: Network) -> Process:
    """The diffusion process that a network is trained on and sampled by; a run's Settings serve too."""
    return cfg.edm if cfg.objective == "edm" else cfg.rf


def build_network(cfg: Network) -> Backbone:
    """The network, initialised from torch's global generator on the default device, of these or of a run's settings.

    Nothing else asks which architecture it is.
    """
    sizes = {
        "input_size": cfg.dataset.size,
        "patch_size": cfg.model.patch_size,
        "in_channels": cfg.dataset.channels,
        "hidden_size": cfg.model.hidden_size,
        "depth": cfg.model.depth,
        "mlp_ratio": cfg.model.mlp_ratio,
        "num_classes": cfg.dataset.num_classes,
        "learn_sigma": cfg.model.learn_sigma,
        "init": cfg.model.init,
    }
    return RWKV(**sizes) if cfg.model.architecture == "rwkv" else DiT(num_heads=cfg.model.num_heads, **sizes)


def load_weights(network: nn.Module, path: str, weights: str = "ema") -> None:
    """Put in other weights (init_from), "ema" or "model". Raises FileNotFoundError, or ValueError unless they fit."""
    network.load_state_dict(fit(read_weights(Path(path), weights), network.state_dict(), path))
