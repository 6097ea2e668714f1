"""The settings of a run: dataclasses for configs/config.yaml, checks, and values completed from the dataset."""

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch

from rf import RF
from tread.checkpoints.adapting import Positions
from tread.checkpoints.lora import Lora
from tread.checkpoints.network import Dataset, Objective, process_of, settle_shifts
from tread.checkpoints.posthoc_ema import Width
from tread.data.dataset import LatentDataset
from tread.data.index import prepared_heldout
from tread.diffusion.edm import EDM
from tread.diffusion.solvers import Solver
from tread.models.architectures import CHOSEN, AnyOptions, TextSettings
from tread.models.embedders import Residual
from tread.preparing import cifar10, digits, emoji
from tread.routing.ids import RULES, RatioSchedule, check_ratio
from tread.runtime import schema
from tread.runtime.compiling import Compile
from tread.runtime.device import Precision
from tread.runtime.plugins import absolute
from tread.runtime.schema import BelowOne, Count, CountOrZero, PositiveOrZero, Range, Share, TwoOrMore, written
from tread.runtime.tensor_files import Weights
from tread.training.alignment import Alignment
from tread.training.optimizers import Optim


@dataclass(frozen=True)
class Train:
    steps: Annotated[int, Range("lie in 1 to 10^12: more take decades", lambda number: 0 < number <= 10**12)]
    batch_size: Count
    micro_batch_size: Count | None
    precision: Precision
    cpu_threads: Count | None
    processes: Count | None
    compile: Compile
    label_drop: Share
    routes_until: CountOrZero | None
    max_bad_steps: Count
    ratio_schedule: RatioSchedule | None
    loss_tokens: Literal["all", "kept"]
    reconstruction: PositiveOrZero
    path_drop: Share = 0.0
    cuda_graphs: Literal["auto", True, False] = "auto"
    memory: Literal["auto", "plain", "budget", "checkpointing"] = "auto"
    activation_checkpointing: bool | None = None  # older spelling: true means memory=checkpointing
    residual: Residual = "fp32"
    class_token_weight: PositiveOrZero = 0.03

    def __post_init__(self) -> None:
        again, memory = self.activation_checkpointing, self.memory
        if again is not None and memory != "auto" and again != (memory == "checkpointing"):
            both = f"activation_checkpointing is {written(again)}, but train.memory is {memory}"
            raise ValueError(f"{both}: memory alone decides, and checkpointing is a value of it")
        if again:
            object.__setattr__(self, "memory", "checkpointing")
        if self.reconstruction and self.loss_tokens == "all":
            raise ValueError(f"train.reconstruction is {self.reconstruction}, but that needs train.loss_tokens=kept")


@dataclass(frozen=True)
class Ema:
    decay: BelowOne
    warmup: bool
    power: tuple[Width, ...]
    snapshot_every: Count | None

    def __post_init__(self) -> None:
        if len(set(self.power)) < len(self.power):
            raise ValueError(f"ema.power is {list(self.power)}, but must be different widths")


@dataclass(frozen=True)
class Every:
    log: Count
    evaluate: Count
    sample: Count
    save: Count


@dataclass(frozen=True)
class Checkpoints:
    keep_last: Count | None
    keep_every: Count | None


@dataclass(frozen=True)
class Evaluation:
    points: Count
    batch_size: Count
    noise_levels: Count
    demo_samples: Annotated[int, Range("be 0 (none) or at least 2", lambda number: number == 0 or number >= 2)]
    fid_every: Count | None
    fid_samples: TwoOrMore
    fid_reference: str | None
    inception: str | None

    def __post_init__(self) -> None:
        if self.fid_every and self.fid_reference is None:
            raise ValueError("eval.fid_every needs eval.fid_reference, an .npz as fid.py save_reference=… makes")


@dataclass(frozen=True)
class Sampling:
    steps: int | None
    solver: Solver | None
    classes: Count
    per_class: Count
    decode: bool
    autoencoder: str | None


@dataclass(frozen=True)
class WandbSettings:
    project: str


@dataclass(frozen=True)
class Tags:
    """Suffixes of a run's default name, for each objective (edm, rf) and each alignment.kind (none, repa, self)."""

    edm: str
    rf: str
    none: str = ""
    repa: str = "-repa"
    self: str = "-self"


@dataclass(frozen=True)
class Settings:
    name: str
    results: str
    seed: int
    resume: Literal["auto", True, False]
    run: str | None
    init_from: str | None
    init_weights: Weights
    objective: Objective
    model: AnyOptions
    dataset: Dataset
    edm: EDM
    rf: RF
    train: Train
    optim: Optim
    ema: Ema
    every: Every
    checkpoints: Checkpoints
    eval: Evaluation
    sampling: Sampling
    report: bool
    tracker: Literal["none", "wandb", "tensorboard"]
    wandb: WandbSettings
    tags: Tags
    alignment: Alignment = Alignment()
    text: TextSettings = TextSettings()
    plugins: tuple[str, ...] = ()
    init_classes: Literal["new"] | dict | None = None
    init_positions: Positions | None = None
    lora: Lora = Lora()

    def __post_init__(self) -> None:
        model, schedule, named = self.model, self.train.ratio_schedule, f"model={self.model.name}"
        side, rest = divmod(self.dataset.size or 0, model.patch_size)
        for number, route in enumerate(() if rest or not side else model.routes):  # the network refuses a remainder
            if schedule and (fixed := RULES[route.select].ratio) is not None:
                given = f"train.ratio_schedule is given, but model.routes.{number}.select={route.select}"
                raise ValueError(f"{given} fixes the ratio at {fixed}: select=token takes others")
            ratio = max(schedule.start, schedule.end) if schedule else route.selection_ratio
            key = "train.ratio_schedule" if schedule else f"model.routes.{number}.selection_ratio"
            check_ratio(replace(route, selection_ratio=ratio), (side, side), key)
        for key, given in {"ratio_schedule": schedule, "loss_tokens": self.train.loss_tokens != "all"}.items():
            if given and not model.routes and (schedule or not model.masks):
                raise ValueError(f"train.{key} is for routes, but {named} has none")
        if self.train.path_drop and not model.has_path:
            raise ValueError(f"train.path_drop is {self.train.path_drop:g}, but {named} has no sparse path")
        if model.class_token and self.objective != "rf":
            raise ValueError(f"model.class_token is {model.class_token}, but needs objective=rf, not {self.objective}")
        if model.takes_text and self.text.encoder is None:
            raise ValueError(f"text.encoder is null, but {named} takes texts: scripts/prepare_text.py encodes captions")
        if model.takes_text and self.eval.fid_every:
            raise ValueError(f"eval.fid_every scores classes, which {named} has not: fid.py scores its checkpoints")
        for key in ("predicts", "loss_of", "contrastive", "train_shift") if self.objective == "edm" else ():
            if (value := getattr(self.rf, key)) != getattr(RF, key):
                instead = "; for edm add ln s to edm.P_mean" * (key == "train_shift")
                raise ValueError(f"rf.{key} is {written(value)}, but belongs to objective=rf, not to edm{instead}")
        given = {"init_classes": self.init_classes, "init_positions": self.init_positions, "lora.rank": self.lora.rank}
        for key, value in given.items():
            if value is not None and self.init_from is None:
                raise ValueError(f"{key} is given, but init_from=… is not, whose weights it changes")
        if self.init_classes is not None and model.takes_text:
            raise ValueError(f"init_classes is given, but {named} takes texts, not classes")
        if self.lora.rank and self.optim.entry.splits:
            raise ValueError(f"optim.name={self.optim.name} updates whole matrices, which lora.rank freezes: try adamw")
        if self.lora.rank and self.ema.power:
            raise ValueError("ema.power averages whole weights, but with lora.rank only adapters change: leave it []")
        self.alignment.resolve(model.depth)  # raises ValueError for blocks that the network does not have
        both = ("repa", "self")
        for key, kinds in dict(block=both, blocks=both, until=both, encoder=("repa",), teacher=("self",)).items():
            value, kind = getattr(self.alignment, key), self.alignment.kind
            if value is not None and kind not in kinds:
                given = f"alignment.{key} is {written(value)}"
                asked = " or ".join(f"alignment={choice}" for choice in kinds)
                raise ValueError(f"{given}, which belongs to {asked}, not to alignment={kind}")
        if self.alignment.kind == "repa" and self.alignment.encoder is None:
            encoders = "dinov2-s, -b, -l, -g, a hub id or folder of DINOv2, inception, or module:function"
            raise ValueError(f"alignment.encoder is null, but alignment=repa needs one: {encoders}")
        settle_shifts(self)
        process, steps = process_of(self), self.sampling.steps
        if self.rf.shift != "auto":  # else `complete` settles it; raises ValueError for impossible steps
            process.schedule(process.default_steps if steps is None else steps)
        if (shape := tuple(process.weight(torch.full((2,), 0.5)).shape)) != (2,):  # of a plugin
            said = f"{type(process).__name__}.weight returns shape {shape} for noise levels of shape (2,)"
            raise ValueError(f"{said}, but must return one weight for each")
        if process.beyond >= self.train.batch_size:
            raise ValueError("rf.contrastive contrasts with another sample of the batch, but train.batch_size is 1")
        if "/" in self.name or self.name in ("", ".", ".."):
            raise ValueError(f"name is {self.name!r}, but must be the name of one folder; see also results=…")

    @property
    def judges_demo(self) -> bool:
        """Whether samples can be scored at the end (eval.demo_samples): only digits by class and emoji by caption."""
        return (self.dataset.embedded, self.model.takes_text) in {("digits", False), ("emoji", True)}


# reads a config as Settings; lists all dotted keys; puts ++ before overrides of keys that are in no config file
read = partial(schema.read, kind=Settings)
known_keys = partial(schema.known_keys, Settings)
add_unstated = partial(schema.add_unstated, kind=Settings)


def as_recorded(config: dict) -> dict:
    """Return the config with the keys of init_classes, {init_from's class: new class}, turned into strings for JSON."""
    if not isinstance(asked := config.get("init_classes"), dict):
        return config
    return {**config, "init_classes": {str(old): new for old, new in asked.items()}}


def complete(config: dict) -> tuple[Settings, dict]:
    """Return a config composed by Hydra, with its open values filled in, as Settings and as a dict.

    Null dataset.channels, size and num_classes, and a text-conditional network's null text settings, are read from the
    dataset. dataset.heldout=auto becomes the held-out data that its index.json names, or null. Section `model` of the
    dict keeps only the architecture's keys. MaskDiT's null sizes and rf's "auto" shifts become numbers, plugins' paths
    absolute. Raises ValueError for settings that do not fit together, FileNotFoundError if needed data is missing.
    """
    config = as_recorded(config)
    cfg = read(config)
    config = schema.as_read(config, cfg)
    dataset, text = cfg.dataset, cfg.text
    if dataset.heldout == "auto":
        prepared = prepared_heldout(dataset.path)
        dataset = replace(dataset, heldout=prepared and str(prepared))
    if cfg.model.takes_text:
        text = read_text_settings(cfg)
        words = text.vocabulary and list(text.vocabulary)  # a list, as after a round trip through JSON
        config = {**config, "text": {**asdict(text), "vocabulary": words}}
    if None in (dataset.channels, dataset.size, dataset.num_classes):
        latents = LatentDataset(dataset.path).latents
        known = {"channels": latents.shape[0], "size": latents.shape[1], "num_classes": len(latents.classes)}
        dataset = replace(dataset, **{key: value for key, value in known.items() if getattr(dataset, key) is None})
    plugins = tuple(absolute(name) for name in cfg.plugins)
    stated = {key: getattr(dataset, key) for key in config["dataset"]}
    model = CHOSEN.settle(config["model"], "model")[1]
    cfg = replace(cfg, dataset=dataset, text=text, plugins=plugins)
    rf = {key: getattr(cfg.rf, key) if value == "auto" else value for key, value in config["rf"].items()}
    return cfg, {**config, "plugins": list(plugins), "model": model, "dataset": stated, "rf": rf}


def read_text_settings(cfg: Settings) -> TextSettings:
    """Return the text settings that the dataset records for the encoder text.encoder. A missing built-in dataset is
    made first. Raises FileNotFoundError for other missing data, ValueError if `cfg` states other values."""
    prepare_embedded(cfg, cfg.dataset.path, "train")
    stored = asdict(LatentDataset(cfg.dataset.path, text=cfg.text.encoder).text_spec)
    for key, value in stored.items():
        if (given := getattr(cfg.text, key)) not in (getattr(TextSettings, key), value):
            there = f"{str(value)[:80]} in {cfg.dataset.path}: leave it null, or name=… starts a run of its own"
            raise ValueError(f"text.{key} is {str(given)[:80]}, as typed or as the run was begun, but {there}")
    return TextSettings(**stored)


def prepare_embedded(cfg: Settings, path: str, part: str) -> None:
    """If the folder `path` of a built-in dataset (dataset.embedded) is missing, make its `part` "train" or "heldout";
    for cifar10, make both, at dataset.path and <dataset.path>-heldout. Emoji get encoded captions if the network takes
    text. Raises ValueError or OSError if CIFAR-10's archive can't be fetched or read; for digits and emoji,
    FileNotFoundError if a missing `path` does not end in name and part (digits/train), so is likely mistyped."""
    kind, folder = cfg.dataset.embedded, Path(path)
    if kind == "cifar10" and not folder.exists():
        cifar10.prepare_cifar10(Path(cfg.dataset.path), cfg.dataset.archive)
    elif kind in ("digits", "emoji") and not folder.exists() and folder.absolute().parts[-2:] != (kind, part):
        said = f"{path} does not exist: latents of your own need dataset=folder"
        raise FileNotFoundError(f"{said}; {kind} are written to folders …/{kind}/{part} only")
    elif kind == "digits":
        digits.prepare_digits(folder, part)
    elif kind == "emoji":
        emoji.prepare_emoji(folder, part, cfg.text.encoder if cfg.model.takes_text else None)
