"""What a network depends on, as a checkpoint's config says it: its settings, its process, and building it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from dit import DiT
from rf import RF
from routing_module import RULES, Route, check_routes
from tread.data.dataset import Verify
from tread.data.shards import Placement
from tread.diffusion.edm import EDM
from tread.diffusion.process import Process
from tread.models.backbone import Backbone, Init
from tread.models.lightning import LightningDiT, MlpKind, Norm, Positions
from tread.models.mamba import Directions, Kernel, Mamba
from tread.models.maskdit import MaskDiT, check_spans
from tread.models.rwkv import RWKV
from tread.models.sprint import Sprint, check_sparse_part
from tread.models.text_dit import TextDiT
from tread.runtime.schema import Count, CountOrZero, PositiveOrZero, read

Objective = Annotated[Literal["edm", "rf"], "rectified flow"]
TEXTS = ("dit_text", "lightning_text")  # architectures that take texts in the place of labels
LIGHTNING = ("norm", "mlp", "positions", "qk_norm")  # settings of lightning, lightning_text and sprint alone
DECODER = ("decoder_hidden_size", "decoder_depth", "decoder_heads")  # of maskdit alone
# and of mamba alone
SCANS = ("state", "head_dim", "expand", "conv", "directions", "attention_every", "kernel", "allow_token_routes")


@dataclass(frozen=True)
class Model:
    name: str
    architecture: Literal["dit", "dit_text", "lightning", "lightning_text", "mamba", "maskdit", "rwkv", "sprint"]
    routes: tuple[Route, ...]
    hidden_size: Count
    depth: Count
    num_heads: Count
    patch_size: Count
    mlp_ratio: PositiveOrZero
    learn_sigma: bool
    init: Init
    norm: Norm = "layer"
    mlp: MlpKind = "gelu"
    positions: Positions = "sincos"
    qk_norm: bool = False
    decoder_hidden_size: Count = 512
    decoder_depth: Count = 8
    decoder_heads: Count = 16
    state: Count = 64
    head_dim: Count = 64
    expand: Count = 2
    conv: Count = 4
    directions: Directions = 2
    attention_every: CountOrZero = 0
    kernel: Kernel = "torch"
    allow_token_routes: bool = False

    def __post_init__(self) -> None:
        for owners, names, models in (
            (
                ("lightning", "lightning_text", "sprint"),
                LIGHTNING,
                "model=lightning, model=tread_lightning, both with _text, and model=sprint have it",
            ),
            (("maskdit",), DECODER, "model=maskdit has it"),
            (("mamba",), SCANS, "model=mamba and model=tread_mamba have it"),
        ):
            for name in () if self.architecture in owners else names:
                if (value := getattr(self, name)) != getattr(Model, name):
                    raise ValueError(f"model.{name} is {value!r}, but {self.architecture} has no such choice: {models}")
        if not self.mlp_ratio and self.architecture != "mamba":
            raise ValueError(
                f"model.mlp_ratio is 0, but must be positive: of {self.architecture} no MLP can be left out"
            )
        for number, route in enumerate(self.routes):
            if route.select not in self.selects:
                raise ValueError(
                    f"model.routes.{number}.select is {route.select!r}, but the blocks of {self.architecture} look at "
                    f"neighbours in the token grid: it must be {' or '.join(self.selects)}"
                    + (", or model.allow_token_routes=true" if self.architecture == "mamba" else "")
                )
        if self.architecture == "sprint":
            check_sparse_part(self.routes, self.depth)
        check_routes(self.routes, self.depth)
        if self.architecture == "maskdit":
            check_spans(self.routes, self.depth)

    @property
    def selects(self) -> tuple[str, ...]:
        """How routes of this architecture can select tokens, the usual way first."""
        grids = [name for name, rule in RULES.items() if rule.keeps_grid]
        if self.architecture == "mamba" and self.allow_token_routes:
            return (*grids, *(name for name in RULES if name not in grids))
        return tuple(grids) if self.architecture in ("rwkv", "mamba") else tuple(RULES)

    @property
    def takes_text(self) -> bool:
        """Whether the network takes texts in the place of labels."""
        return self.architecture in TEXTS

    @property
    def has_path(self) -> bool:
        """Whether the network has a sparse path that train.path_drop can drop."""
        return self.architecture == "sprint"

    @property
    def masks(self) -> bool:
        """Whether nothing but mask tokens stands for what a route takes, so that sampling never leaves any out.

        SPRINT's mask tokens stand beside what its dense part makes of every token.
        """
        return self.architecture == "maskdit"

    @property
    def usual_route(self) -> Route:
        """TREAD's r(2→depth−4), or SPRINT's over its sparse part. Raises ValueError for a depth without one."""
        if self.architecture == "sprint":
            return Route(2, -3, 0.75, "off")
        return Route.for_depth(self.depth, select=self.selects[0])

    @property
    def decisive(self) -> dict[str, object]:
        """What decides which function weights are, by dotted name: all but its name, its routes and how it starts."""
        left_out = {"name", "routes", "init", "kernel", "allow_token_routes"}
        left_out |= set(LIGHTNING) if self.architecture in ("rwkv", "mamba") else set()
        attends = self.architecture != "rwkv" and (self.architecture != "mamba" or self.attention_every)
        left_out |= set() if attends else {"num_heads"}
        left_out |= set() if self.architecture == "mamba" else set(SCANS)
        left_out |= set(DECODER) if self.architecture != "maskdit" else set()
        return {f"model.{item.name}": getattr(self, item.name) for item in fields(self) if item.name not in left_out}


@dataclass(frozen=True)
class Dataset:
    name: str
    path: str | None
    heldout: str | None
    embedded: Literal["digits", "emoji"] | None
    channels: Count | None
    size: Count | None
    num_classes: Count | None
    verify: Verify
    placement: Placement
    normalize: bool

    def __post_init__(self) -> None:
        if self.path is None:
            raise ValueError(f"dataset.path is null, but dataset={self.name} needs it: dataset.path=<folder>")


@dataclass(frozen=True)
class TextSettings:
    """The encoder of a text network's captions; all but its name come from the dataset, see settings.py.

    fingerprint  hash of the encoder, or of the vocabulary; None where nobody knows.
    tokens       T; width C and pooled P are None where it has no such thing.
    vocabulary   of word numbers, in their order.
    padding      True: what the encoder makes of its padding counts as words.
    """

    encoder: str | None = None
    fingerprint: str | None = None
    tokens: Count | None = None
    width: Count | None = None
    pooled: Count | None = None
    vocabulary: tuple[str, ...] | None = None
    padding: bool = False

    @property
    def decisive(self) -> dict[str, object]:
        """What decides which function weights are, by dotted name; the fingerprint says which vocabulary."""
        return {f"text.{item.name}": getattr(self, item.name) for item in fields(self) if item.name != "vocabulary"}


@dataclass(frozen=True)
class Network:
    """The part of the settings that a checkpoint's network depends on."""

    model: Model
    dataset: Dataset
    edm: EDM
    rf: RF
    objective: Objective
    text: TextSettings = TextSettings()


def read_network(config: dict) -> Network:
    """What a checkpoint's config says of its network. Raises ValueError."""
    return read({item.name: config[item.name] for item in fields(Network) if item.name in config}, Network)


def process_of(cfg: Network) -> Process:
    """The diffusion process that a network is trained on and sampled by; a run's Settings serve too."""
    return cfg.edm if cfg.objective == "edm" else cfg.rf


def check_text(cfg: Network) -> None:
    """Raise ValueError for a network of texts whose encoder's shapes nobody has said."""
    if cfg.model.takes_text and cfg.text.tokens is None:
        raise ValueError(
            f"text.tokens is null, but model={cfg.model.name} needs what the dataset says of text.encoder="
            f"{cfg.text.encoder}: its tokens, and their width or vocabulary"
        )


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
        "learn_sigma": cfg.model.learn_sigma,
        "init": cfg.model.init,
    }
    choices = {
        "norm": cfg.model.norm,
        "mlp": cfg.model.mlp,
        "positions": cfg.model.positions,
        "qk_norm": cfg.model.qk_norm,
    }
    if cfg.model.takes_text:
        check_text(cfg)
        words = cfg.text.vocabulary and len(cfg.text.vocabulary)
        text = {"text_tokens": cfg.text.tokens, "text_width": cfg.text.width, "text_pooled": cfg.text.pooled}
        return TextDiT(num_heads=cfg.model.num_heads, vocabulary=words, **text, **choices, **sizes)
    sizes["num_classes"] = cfg.dataset.num_classes
    if cfg.model.architecture == "rwkv":
        return RWKV(**sizes)
    if cfg.model.architecture == "mamba":
        return Mamba(
            num_heads=cfg.model.num_heads,
            state=cfg.model.state,
            head_dim=cfg.model.head_dim,
            expand=cfg.model.expand,
            conv=cfg.model.conv,
            directions=cfg.model.directions,
            attention_every=cfg.model.attention_every,
            kernel=cfg.model.kernel,
            allow_token_routes=cfg.model.allow_token_routes,
            **sizes,
        )
    if cfg.model.architecture in ("lightning", "sprint"):
        network = Sprint if cfg.model.architecture == "sprint" else LightningDiT
        return network(
            num_heads=cfg.model.num_heads,
            **choices,
            **sizes,
        )
    if cfg.model.architecture == "maskdit":
        return MaskDiT(
            num_heads=cfg.model.num_heads,
            decoder_hidden_size=cfg.model.decoder_hidden_size,
            decoder_depth=cfg.model.decoder_depth,
            decoder_heads=cfg.model.decoder_heads,
            **sizes,
        )
    return DiT(num_heads=cfg.model.num_heads, **sizes)
