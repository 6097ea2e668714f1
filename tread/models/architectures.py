"""The architectures: the options of each, how its network is built, and whatever else depends on the choice.

ARCHITECTURES maps the values of model.architecture to dataclasses, into which the section `model` of the settings is
read. Fields without a default are required. Attributes without a type annotation, or with ClassVar, are not settings.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, ClassVar

from dit import DiT, MlpKind, Norm
from routing_module import Route, Table, check_routes
from tread.models.backbone import Backbone, Init
from tread.models.lightning import LightningDiT, Positions
from tread.models.mamba import Directions, Kernel, Mamba
from tread.models.maskdit import MaskDiT, check_spans
from tread.models.rotary import TABLES
from tread.models.rwkv import RWKV
from tread.models.sprint import Sprint, check_sparse_part
from tread.models.text_dit import TextDiT
from tread.routing.ids import RULES
from tread.runtime.schema import Chosen, Count, CountOrZero, Positive, PositiveOrZero
from tread.runtime.tensor_files import CLASS_TOKEN, EXPAND, MASKDIT

OUTSIDE = ("name", "architecture", "routes", "position_scale")  # options that no network's constructor takes
Shapes = Mapping[str, tuple[int, ...]]  # name of a state dict's tensor → its shape
BLOCK = "blocks.0."
CROSS = f"{BLOCK}cross_attn.q.weight"


@dataclass(frozen=True)
class TextSettings:
    """The text encoder of a network that takes captions: `encoder` is its name; the other fields come from the dataset.

    fingerprint    hash of the encoder or of the vocabulary; None: unknown.
    tokens         T, the number of text tokens to which captions are padded or cut off.
    width          channels C of each token; None: the encoder returns word ids, which the network embeds.
    pooled         channels P of the pooled text; None: the encoder has no pooled output.
    vocabulary     the words that the encoder "words" knows, in the order of their ids.
    padding        True: padding tokens are attended to like words, so no token is masked.
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
        """The settings that affect a trained network's output, as {"text.<name>": value}: all fields but vocabulary."""
        return {f"text.{item.name}": getattr(self, item.name) for item in fields(self) if item.name != "vocabulary"}


@dataclass(frozen=True)
class NetworkOptions:
    """The options that all architectures share, most of them arguments of the network. `name` is that of the file in
    configs/model; position_scale multiplies tokens' rows and columns in fixed position embeddings. Subclasses override:

    network     the network's class.
    takes_text  True: the network takes texts instead of labels.
    has_path    True: the network has SPRINT's sparse part, which training can drop in some samples (train.path_drop).
    class_token channels of the feature that REG's class token embeds; None: there is no class token.
    masks       True: sampling must run all tokens, since mask tokens would replace skipped ones (MaskDiT).
    along_grid  True: the blocks use neighbours in the token grid, so routes select whole rows.
    needs_mlp   True: mlp_ratio can't be 0.
    constants   names of fixed attributes (options in other architectures) that affect a trained network's output.
    undecisive  names of options that do not affect a trained network's output.
    marks       tensor names by which `knows` recognises this architecture's state dicts; by default any one suffices.
    """

    name: str
    architecture: str
    routes: tuple[Route, ...]
    hidden_size: Count
    depth: Count
    patch_size: Count
    mlp_ratio: PositiveOrZero
    learn_sigma: bool
    init: Init
    position_scale: Positive = field(default=1.0, kw_only=True)

    network = Backbone
    takes_text = has_path = masks = along_grid = allow_token_routes = False
    needs_mlp, class_token = True, None
    constants = undecisive = marks = ()

    def __post_init__(self) -> None:
        if not self.mlp_ratio and self.needs_mlp:
            raise ValueError(f"model.mlp_ratio is 0, but must be positive: the blocks of {self.architecture} need it")
        for number, route in enumerate(self.routes):
            if route.select not in self.selects:
                otherwise = ", or model.allow_token_routes=true" * ("allow_token_routes" in self.arguments())
                given = f"model.routes.{number}.select is {route.select!r}, but the blocks of {self.architecture}"
                raise ValueError(f"{given} look at neighbours: it must be {' or '.join(self.selects)}{otherwise}")
        self.check_routes()

    def check_routes(self) -> None:
        """Raise ValueError if tokens can't skip the blocks of self.routes in this architecture."""
        check_routes(self.routes, self.depth)

    @property
    def selects(self) -> tuple[str, ...]:
        """Names of the rules (Route.select) that can choose the kept tokens in this architecture, the default first."""
        if not self.along_grid:
            return tuple(RULES)
        in_grid = tuple(name for name, rule in RULES.items() if rule.keeps_grid)
        return tuple(dict.fromkeys(in_grid + tuple(RULES))) if self.allow_token_routes else in_grid

    @property
    def resolved_routes(self) -> tuple[Route, ...]:
        """The routes in the given order, with negative block numbers and depth-dependent defaults resolved."""
        return tuple(route.resolve(self.depth) for route in self.routes)

    @property
    def usual_route(self) -> Route:
        """The default route: tokens skip blocks 2 to depth − 4, 0-based. Raises ValueError if depth < 6."""
        return Route.for_depth(self.depth, select=self.selects[0])

    @property
    def blocks(self) -> str:
        """A description of the blocks, such as "12 blocks"."""
        return f"{self.depth} blocks"

    @property
    def anywhere(self) -> "NetworkOptions":
        """These options, changed where needed to run on any machine: Mamba's kernel becomes "torch"."""
        return self

    @classmethod
    def deciding(cls) -> list[str]:
        """Return the names of the options that affect a trained network's output: all options and `constants`
        except name, routes, init and those in `undecisive`."""
        names = dict.fromkeys((*(item.name for item in fields(cls)), *cls.constants))
        return [name for name in names if name not in ("name", "routes", "init", *cls.undecisive)]

    @property
    def decisive(self) -> dict[str, object]:
        """The options that affect a trained network's output (see `deciding`), as {"model.<name>": value}."""
        return {f"model.{name}": getattr(self, name) for name in self.deciding()}

    def build(self, size: int, channels: int, num_classes: int, text: TextSettings) -> Backbone:
        """Create the network for latents (channels, size, size) on torch's default device, with random weights from
        torch's global generator. `text` describes the text encoder, if any. Raises ValueError if sizes do not fit."""
        network = self.network(**self.all_arguments(size, channels, num_classes, text))
        if self.position_scale != 1:
            network.scale_positions(self.position_scale)
        return network

    def all_arguments(self, size: int, channels: int, num_classes: int, text: TextSettings) -> dict[str, object]:
        """Return {name: value} of all arguments of the network's constructor, for latents (channels, size, size)."""
        return {"input_size": size, "in_channels": channels, "num_classes": num_classes, **self.arguments()}

    def arguments(self) -> dict[str, object]:
        """Return the arguments that these options give the network's constructor, keyed by name."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name not in OUTSIDE}

    @classmethod
    def knows(cls, shapes: Shapes) -> bool:
        """Return whether a state dict with tensors of these names and shapes can be of this architecture."""
        return any(name in shapes for name in cls.marks)

    @classmethod
    def told(cls, shapes: Shapes, hidden_size: int) -> dict[str, object]:
        """Return {option: value} for mlp_ratio and the options that subclasses add, as far as `shapes`, those
        of a state dict, determine them. The state dict must be of this architecture (see `knows`) and hidden_size."""
        width = shapes.get(f"{BLOCK}mlp.fc1.weight")
        return {"mlp_ratio": _ratio_of(width[0], hidden_size)} if width else {}


@dataclass(frozen=True)
class DiTOptions(NetworkOptions):
    num_heads: Count
    bottleneck: Count | None = None
    class_token: Count | None = None
    value_residual: bool = False

    network = DiT
    norm, mlp, positions, qk_norm = "layer", "gelu", "sincos", False
    constants = ("norm", "mlp", "positions", "qk_norm")

    def check_routes(self) -> None:
        super().check_routes()
        if self.value_residual and any(r.start == 0 and r.rejoins.removes for r in self.resolved_routes):
            raise ValueError("value_residual is true, but a route starts at block 0, whose values every token needs")

    @classmethod
    def told(cls, shapes: Shapes, hidden_size: int) -> dict[str, object]:
        swiglu = shapes.get(f"{BLOCK}mlp.w12.weight")
        options = super().told(shapes, hidden_size) | {
            "norm": "rms" if f"{BLOCK}norm1.weight" in shapes else "layer",
            "mlp": "swiglu" if swiglu else "gelu",
            "qk_norm": f"{BLOCK}attn.q_norm.weight" in shapes,
            "bottleneck": shapes[EXPAND][1] if EXPAND in shapes else None,
            "class_token": shapes[CLASS_TOKEN][1] if CLASS_TOKEN in shapes else None,
            "value_residual": "blocks.1.attn.v1_lambda" in shapes,
        }
        if swiglu:
            options["mlp_ratio"] = _ratio_of(swiglu[0] // 2, hidden_size, share=2 / 3)
        for rows in (shapes[name] for name in TABLES if len(shapes.get(name, ())) == 2):
            options |= {"positions": "rope", "num_heads": hidden_size // max(1, rows[1])}
        return options


def _ratio_of(width: int, hidden_size: int, share: float = 1.0) -> float:
    """Return an mlp_ratio with which int(share · int(hidden_size · ratio)) is `width`; a multiple of ¼ if possible."""
    exact = width / hidden_size / share
    likely = (round(4 * exact) / 4, exact, (width + 0.5) / hidden_size, exact + 1 / hidden_size)
    return next((ratio for ratio in likely if int(share * int(hidden_size * ratio)) == width), exact)


@dataclass(frozen=True)
class LightningOptions(DiTOptions):
    norm: Norm = "layer"
    mlp: MlpKind = "gelu"
    positions: Positions = "sincos"
    qk_norm: bool = False

    network = LightningDiT
    marks = (*(f"{BLOCK}{name}.weight" for name in ("norm1", "mlp.w12", "attn.q_norm")), *TABLES)


class TakesText:
    """Mixin for the options of a network that takes texts instead of labels."""

    network, takes_text = TextDiT, True

    def all_arguments(self, size: int, channels: int, num_classes: int | None, text: TextSettings) -> dict[str, object]:
        if text.tokens is None:
            raise ValueError(f"text.tokens is null, but model={self.name} needs the text of a dataset (text.encoder=…)")
        words = text.vocabulary and len(text.vocabulary)
        shape = {"text_tokens": text.tokens, "text_width": text.width, "text_pooled": text.pooled, "vocabulary": words}
        return {"input_size": size, "in_channels": channels, **shape, **self.arguments()}


@dataclass(frozen=True)
class DiTTextOptions(TakesText, DiTOptions):
    marks = (CROSS,)


@dataclass(frozen=True)
class LightningTextOptions(TakesText, LightningOptions):
    @classmethod
    def knows(cls, shapes: Shapes) -> bool:
        return CROSS in shapes and super().knows(shapes)


@dataclass(frozen=True)
class MambaOptions(NetworkOptions):
    num_heads: Count
    state: Count = 64
    head_dim: Count = 64
    expand: Count = 2
    conv: Count = 4
    directions: Directions = 2
    attention_every: CountOrZero = 0
    kernel: Kernel = "torch"
    allow_token_routes: bool = False

    network, along_grid, needs_mlp = Mamba, True, False
    undecisive = ("kernel", "allow_token_routes")
    marks = tuple(f"{BLOCK}mixer.{name}" for name in ("in_proj.weight", "out_proj.weight", "conv1d.weight", "A_log"))

    @classmethod
    def knows(cls, shapes: Shapes) -> bool:
        return all(name in shapes for name in cls.marks) and len(shapes[cls.marks[-1]]) == 1  # 2 axes: Mamba-1

    @property
    def blocks(self) -> str:
        every = self.attention_every
        return super().blocks + (f", {self.depth // every} of them DiT's with attention" if every else "")

    @property
    def anywhere(self) -> NetworkOptions:
        return replace(self, kernel="torch")

    @property
    def decisive(self) -> dict[str, object]:
        told = super().decisive
        if not self.attention_every:
            del told["model.num_heads"]
        return told

    @classmethod
    def told(cls, shapes: Shapes, hidden_size: int) -> dict[str, object]:
        (rows, _), (_, width), (scanned, _, conv), (heads,) = (shapes[name] for name in cls.marks)
        channels = rows - width - heads  # x, B and C of one direction
        directions = scanned // channels
        attention = [int(match[1]) for name in shapes if (match := re.match(r"blocks\.(\d+)\.attn\.", name))]
        return {
            "mlp_ratio": 0.0,
            **super().told(shapes, hidden_size),
            "state": (channels - width) // 2,
            "conv": conv,
            "head_dim": width * directions // heads,
            "expand": width // hidden_size,
            "directions": directions,
            "attention_every": min(attention, default=-1) + 1,
        }


@dataclass(frozen=True)
class MaskDiTOptions(DiTOptions):
    """Options of MaskDiT. Decoder options of None become the published sizes, or smaller ones if hidden_size < 384."""

    decoder_hidden_size: Count | None = 512
    decoder_depth: Count | None = 8
    decoder_heads: Count | None = 16
    class_token: ClassVar[None] = None  # not an option: no published MaskDiT has one
    value_residual: ClassVar[bool] = False  # not an option, as the route starts at block 0

    network, masks, marks = MaskDiT, True, (MASKDIT,)
    constants = (*DiTOptions.constants, "value_residual")

    def __post_init__(self) -> None:
        unit = math.lcm(4, self.num_heads)  # what the decoder's width is a multiple of
        small = max(1, self.hidden_size // 2 // unit) * unit, 2, self.num_heads
        sizes = (512, 8, 16) if self.hidden_size >= 384 else small
        for name, size in zip(("decoder_hidden_size", "decoder_depth", "decoder_heads"), sizes):
            if getattr(self, name) is None:
                object.__setattr__(self, name, size)
        super().__post_init__()

    def check_routes(self) -> None:
        check_spans(self.routes, self.depth)

    @classmethod
    def told(cls, shapes: Shapes, hidden_size: int) -> dict[str, object]:
        decoder = {match[1] for name in shapes if (match := re.match(r"decoder_blocks\.(\d+)\.", name))}
        sizes = {"decoder_hidden_size": shapes[MASKDIT][0], "decoder_depth": len(decoder)}
        return super().told(shapes, hidden_size) | sizes


@dataclass(frozen=True)
class RWKVOptions(NetworkOptions):
    network, along_grid, marks = RWKV, True, (f"{BLOCK}channel_mix.key.weight",)

    @classmethod
    def told(cls, shapes: Shapes, hidden_size: int) -> dict[str, object]:
        return {"mlp_ratio": _ratio_of(shapes[f"{BLOCK}channel_mix.key.weight"][0], hidden_size)}


@dataclass(frozen=True)
class SprintOptions(LightningOptions):
    class_token: ClassVar[None] = None  # not an option: no published SPRINT has one

    network, has_path, marks = Sprint, True, ("fusion_proj.weight",)

    def check_routes(self) -> None:
        check_sparse_part(self.routes, self.depth)

    @property
    def usual_route(self) -> Route:
        """SPRINT's default route: ¾ of the tokens skip all blocks but the first two and the last two."""
        return Route(2, -3, 0.75, "off")


ARCHITECTURES = Table(type, {
    "dit": DiTOptions,
    "dit_text": DiTTextOptions,
    "lightning": LightningOptions,
    "lightning_text": LightningTextOptions,
    "mamba": MambaOptions,
    "maskdit": MaskDiTOptions,
    "rwkv": RWKVOptions,
    "sprint": SprintOptions,
})  # fmt: skip
CHOSEN = Chosen("architecture", ARCHITECTURES)
AnyOptions = Annotated[NetworkOptions, CHOSEN]  # the type of the settings' section `model`


def recognize(shapes: Shapes) -> str:
    """Return the architecture of a state dict: the last one in ARCHITECTURES whose `knows` returns True, else "dit"."""
    return next((name for name, kind in reversed(ARCHITECTURES.items()) if kind.knows(shapes)), "dit")
