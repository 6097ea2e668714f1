"""Weights of other people and of other runs: which settings a state dict is of, whether it is this network's,
and whether it means in this network what it meant where it was trained.

Shapes don't tell how many heads a network has, which way its time runs or which class is number 3. Our own
checkpoints record it in info.json, which lies beside each of their files, too; other people's files do not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from tread.checkpoints import checkpoint
from tread.checkpoints.network import Network, process_of
from tread.data.latents import LatentSpec
from tread.models.architectures import ARCHITECTURES, NetworkOptions, TextSettings, recognize
from tread.models.rotary import ROUNDING, TABLES, check_tables
from tread.runtime.tensor_files import FIRST, LABELS, MASKDIT, listed, read_kind

USUAL_HEADS = {384: 6, 768: 12, 1024: 16, 1152: 16}  # by hidden size: DiT-S, B, L, XL
POSITIONS = ("pos_embed", "decoder_pos_embed")  # fixed sines and cosines


def fit(
    state: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    where: str,
    ours: Mapping[str, object] | None = None,
    recorded: Mapping[str, object] | None = None,
) -> dict[str, Tensor]:
    """What a DiT with the state dict `expected` is to load of weights from `where`, in its own types.

    ours      the network's settings by dotted name, for those that shapes do not tell.
    recorded  the same of the weights, as their own record has it; None without one.

    The positions pos_embed and rotary tables are fixed numbers: the network's own serve where the file has none, and
    others than these are refused. Raises ValueError unless all other names and shapes are the network's, and what is
    recorded; it says which settings the file is of.
    """
    ours, theirs = ours or {}, sizes(state)
    tables = {name: state[name] for name in TABLES if name in state}
    refusal = f"the weights of {where} do not fit this network: "
    if FIRST not in state:
        raise ValueError(f"{refusal}there is no {FIRST}, as in public DiT's parameter names, but {listed(state)}")
    whole = {name: expected[name] for name in POSITIONS if name in expected} | dict(state)
    whole = {name: value for name, value in whole.items() if name not in tables}
    problems = []
    if missing := [name for name in expected if name not in whole]:
        problems.append(f"missing: {listed(missing)}")
    if extra := [name for name in whole if name not in expected]:
        problems.append(f"not the network's: {listed(extra)}")
    shared = [name for name in expected if name in whole]
    if other := [
        f"{name} {tuple(whole[name].shape)} instead of {tuple(expected[name].shape)}"
        for name in shared
        if whole[name].shape != expected[name].shape
    ]:
        problems.append(f"of other shapes: {listed(other)}")
    numbers = [name for name in shared if expected[name].is_floating_point()]  # the others: a text's words and mask
    if coarse := [f"{name} {whole[name].dtype}" for name in numbers if not whole[name].is_floating_point()]:
        problems.append(f"no floating-point numbers: {listed(coarse)}")
    elif broken := [name for name in shared if not whole[name].isfinite().all()]:
        raise ValueError(f"the weights of {where} are broken: not all numbers are finite in {listed(broken)}")
    turned = {key: theirs[key] for key in ("model.positions", "model.num_heads") if tables and key in theirs}
    if any(ours.get(key, value) != value for key, value in turned.items()):
        problems.append(f"rotary tables of other settings: {describe(turned)}")
    ours = {**ours, **sizes(expected)}
    if unlike := {
        key: value
        for key, value in (recorded or {}).items()
        if key in ours.keys() - theirs.keys() and ours[key] != value
    }:
        listing = ", ".join(
            f"{key} {_written(value)} instead of {_written(ours[key])}" for key, value in unlike.items()
        )
        problems.append(f"trained with other settings, which its info.json records: {listing}")
    if not problems:
        _check_positions(whole, expected, where)
        _check_null_class(whole, where)
        check_tables(tables, expected["pos_embed"].shape[1], where)
        return {name: whole[name].to(expected[name].dtype) for name in expected}
    problems.append(f"the file is of {describe(theirs)}")
    theirs |= unlike
    if recorded is None and "model.num_heads" in ours and "model.num_heads" not in theirs:
        heads = usual_heads(theirs["model.hidden_size"])
        advised = f"model.num_heads={heads} is usual for its size" if heads else "model.num_heads must be known"
        problems.append(f"no file tells the number of heads: {advised}")
        if heads and theirs["model.hidden_size"] != ours.get("model.hidden_size"):
            theirs["model.num_heads"] = heads
    kind, plain = _kind_of(theirs), _usual(theirs)
    if fitting := {key: value for key, value in theirs.items() if ours.get(key, plain.get(key)) != value}:
        if "model.architecture" in fitting and (kind.masks or kind.has_path):  # whose file brings their own route
            fitting = {"model": fitting.pop("model.architecture"), **fitting}
        settings = " ".join(f"{key}={_written(value)}" for key, value in fitting.items())
        problems.append(f"settings that fit it: {settings}")
    raise ValueError("\n  ".join([refusal.rstrip(), *problems]))


def _check_positions(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: str) -> None:
    """Raise ValueError unless a file's positions are the formula's, up to rounding."""
    for name in (name for name in POSITIONS if name in expected):
        off = (state[name].float() - expected[name].float()).abs().max().item()
        if off <= ROUNDING:
            continue
        raise ValueError(
            f"the positions {name} of {where} are not the fixed 2-D sines and cosines that this network adds: they "
            f"differ by up to {off:.3g}, where rounding allows {ROUNDING:g}. A learnt or another table can't be "
            "represented here, and the weights mean nothing without theirs. If they were trained with the fixed ones "
            f"and the table alone is wrong, leave {name} out of the file: the network's own serve"
        )


def _check_null_class(state: Mapping[str, Tensor], where: str) -> None:
    """Raise ValueError for a MaskDiT whose null class is not zero."""
    if MASKDIT in state and state[LABELS][-1].any():
        raise ValueError(
            f"the null class of {where}, the last row of {LABELS}, is not zero: MaskDiT's is, and is never trained, so "
            "that weights which learnt another one can't be represented here. If nothing trained it, set the row to 0"
        )


def usual_heads(hidden_size: int) -> int | None:
    """The attention heads that a DiT of a width usually has: the published, else of 64 channels; None if neither."""
    return USUAL_HEADS.get(hidden_size, hidden_size // 64 if hidden_size % 64 == 0 else None)


def sizes(state: Mapping[str, Tensor]) -> dict[str, int | float | bool]:
    """The settings that a network's names and shapes tell: the heads and rotary positions only where it has tables."""
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    if len(shapes.get(FIRST, ())) != 4:
        return {}
    hidden_size, channels, patch_size, _ = shapes[FIRST]
    blocks = {match[1] for name in shapes if (match := re.match(r"blocks\.(\d+)\.", name))}
    architecture = recognize(shapes)
    model = {"architecture": architecture, "hidden_size": hidden_size, "depth": len(blocks), "patch_size": patch_size}
    model |= ARCHITECTURES[architecture].told(shapes, hidden_size)
    if rows := shapes.get("final_layer.linear.weight"):
        model["learn_sigma"] = rows[0] == 2 * patch_size**2 * channels
    dataset = {"channels": channels}
    if rows := shapes.get("y_embedder.embedding_table.weight"):
        dataset = {"num_classes": rows[0] - 1, **dataset}  # one is the null class
    if len(tokens := shapes.get("pos_embed", ())) == 3:
        dataset["size"] = math.isqrt(tokens[1]) * patch_size
    sections = {"model": model, "dataset": dataset}
    return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}


def _kind_of(settings: Mapping[str, object]) -> type[NetworkOptions]:
    return ARCHITECTURES.get(settings.get("model.architecture"), NetworkOptions)


def _usual(settings: Mapping[str, object]) -> dict[str, object]:
    """What an architecture's options are unless they are set, and its constants, by dotted name."""
    kind = _kind_of(settings)
    return {f"model.{name}": getattr(kind, name) for name in kind.deciding() if hasattr(kind, name)}


def describe(settings: Mapping[str, int | float | bool]) -> str:
    """Sizes in words: "hidden_size 384, depth 12, …", without those that DiT has, too."""
    plain = _usual(settings)
    told = {key: value for key, value in settings.items() if key not in plain or plain[key] != value}
    return ", ".join(f"{key.partition('.')[2]} {_written(value)}" for key, value in told.items())


def _written(value: object) -> str:
    return str(value).lower()


KINDS = {"ema": "averaged (ema)", "model": "raw (model)"}
PROJECTORS = "projectors."  # what REPA's files hold beside the network: of its training alone
LATENTS = ("scale", "shift", "channel_shift", "channel_scale", "autoencoder")


@dataclass(frozen=True)
class StoredWeights:
    """Weights and what is known of them.

    where   the file.
    kind    "ema" or "model"; None where the file does not say.
    state   the tensors by the network's names.
    source  the checkpoint that the file is a part of, with its record; None for files of others.
    """

    where: str
    kind: str | None
    state: Mapping[str, Tensor]
    source: checkpoint.Checkpoint | None = None

    def describe(self) -> str:
        """Kind, file and step, as far as they are known."""
        kind = KINDS.get(self.kind, "averaged or raw, which is not recorded,")
        if self.source is None:
            return f"{kind} of {self.where}, at a step that is not recorded"
        imported = self.source.info.get("weights")
        step = f"step {self.source.step:,}"
        return f"{kind} of {self.where}, {step}" + (f", imported from {imported}" if imported else "")

    def recorded(self) -> dict[str, object] | None:
        """What is recorded of what decides about a network's weights, by dotted name; None without a record.

        An option that a record is too old to know has its default.
        """
        if self.source is None:
            return None
        sections = {name: self._config.get(name, {}) for name in ("text", "model")}
        stated = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
        return {**_usual(stated), **stated}

    @property
    def _config(self) -> dict:
        return self.source.info.get("config", {}) if self.source else {}

    @property
    def _latents(self) -> dict:
        latents = self.source.info.get("latents", {}) if self.source else {}
        return {key: tuple(value) if isinstance(value, list) else value for key, value in latents.items()}

    def fit(
        self, expected: Mapping[str, Tensor], model: NetworkOptions | None = None, text: TextSettings | None = None
    ) -> dict[str, Tensor]:
        """What a network with the state dict `expected`, built by `model` (for text's encoder), is to load.

        Raises ValueError unless names and shapes are the network's, and what the record says of it.
        """
        state = {name: value for name, value in self.state.items() if not name.startswith(PROJECTORS)}
        ours = model and (model.decisive | text.decisive if text and model.takes_text else model.decisive)
        return fit(state, expected, self.where, ours, model and self.recorded())

    def warnings(self, cfg: Network, latents: LatentSpec, predicts: str = "objective") -> list[str]:
        """What weights that fit meant otherwise, a line each with both values, and what nobody recorded.

        latents   what the network is to see.
        predicts  "objective", or "noise", see scripts/import_checkpoint.py.
        """
        unlike = self._unlike(cfg, latents, predicts)
        lines = [
            f"{key} was {there} where these weights were trained, but is {here} now" for key, (there, here) in unlike
        ]
        if aside := [name for name in self.state if name.startswith(PROJECTORS)]:
            lines.append(f"{self.where} holds {len(aside)} tensors {PROJECTORS}* of its alignment, which are set aside")
        if self.source is None:
            heads, usual = cfg.model.decisive.get("model.num_heads"), usual_heads(cfg.model.hidden_size)
            hidden = {key: value for key, value in cfg.model.decisive.items() if key not in sizes(self.state)}
            hidden |= {"objective": cfg.objective, **_conventions(cfg)}
            taken = ", ".join(f"{key}={str(value).lower()}" for key, value in hidden.items())
            lines.append(
                f"{self.where} has no record: nobody can know here whether it was trained with {taken}, latents of "
                "this scale and classes in this order"
            )
            if "model.num_heads" in hidden and usual and heads != usual:
                width = f"networks of hidden_size {cfg.model.hidden_size}"
                lines.append(f"model.num_heads is {heads}, but {width} usually have {usual}")
        elif _numbered(self._latents.get("classes", ())) and not _numbered(latents.classes):
            lines.append(
                f"{self.where} records no class names: its class 0 is taken for {latents.classes[0]!r}, and so on"
            )
        return lines

    def _unlike(self, cfg: Network, latents: LatentSpec, predicts: str) -> list[tuple[str, tuple[object, object]]]:
        """Names and values (there, here) of what decides about weights beside a network's options, where it differs."""
        if self.source is None:
            return []
        info, config = self.source.info, self._config
        pairs, theirs = {}, config.get("objective", cfg.objective)
        if info.get("predicts", "objective") != predicts:
            said = {"noise": "noise on timesteps 0..999", "objective": f"what objective={cfg.objective} trains"}
            names = (info.get("predicts", "objective"), predicts)
            pairs["the prediction"] = tuple(said.get(name, name) for name in names)
        elif theirs != cfg.objective:
            pairs["objective"] = (theirs, cfg.objective)
        else:
            for name, here in _conventions(cfg).items():
                pairs[name] = (config.get(theirs, {}).get(name.partition(".")[2], here), here)
        stated = self._latents
        prints = (stated.get("fingerprint"), latents.fingerprint)
        for name in LATENTS:
            here = getattr(latents, name)
            same = name == "autoencoder" and None not in prints and prints[0] == prints[1]
            pairs[f"latents.{name}"] = (here if same else stated.get(name, here), here)
        classes = stated.get("classes", ())
        unlike = [i for i, (there, here) in enumerate(zip(classes, latents.classes)) if there != here]
        if unlike and not _numbered(classes) and not _numbered(latents.classes):
            key = f"class {unlike[0]} (the first of {len(unlike):,} that differ)"
            pairs[key] = (repr(classes[unlike[0]]), repr(latents.classes[unlike[0]]))
        return [(key, both) for key, both in pairs.items() if both[0] != both[1]]


def read_weights(path: Path, weights: str = "ema") -> StoredWeights:
    """Weights "ema" or "model" of a checkpoint, or of a file; one of a checkpoint's files is what it is.

    Raises FileNotFoundError or ValueError.
    """
    if not path.is_file():
        source = checkpoint.find(path)
        return StoredWeights(str(source.folder / f"{weights}.safetensors"), weights, source.tensors(weights), source)
    if source := checkpoint.containing(path):
        kind = path.resolve().stem
        if (kind, weights) == ("ema", "model"):
            raise ValueError(
                f"{path} holds averaged weights, but the raw ones (model) are asked for: model.safetensors"
            )
        return StoredWeights(str(path), kind, source.tensors(kind), source)
    return StoredWeights(str(path), *read_kind(path, weights))


def load_weights(
    network: nn.Module,
    path: str,
    weights: str = "ema",
    model: NetworkOptions | None = None,
    text: TextSettings | None = None,
) -> StoredWeights:
    """Put in other weights (init_from), "ema" or "model". Raises FileNotFoundError, or ValueError unless they fit.

    model, text  the settings that the network was built by, which the weights' own record must not contradict.
    """
    stored = read_weights(Path(path).expanduser(), weights)
    network.load_state_dict(stored.fit(network.state_dict(), model, text))
    return stored


def _conventions(cfg: Network) -> dict[str, object]:
    """The settings of a network's process that decide what its input and output mean, by dotted name."""
    process = process_of(cfg)
    return {f"{cfg.objective}.{name}": getattr(process, name) for name in process.conventions}


def _numbered(classes: tuple[str, ...]) -> bool:
    """Whether classes have numbers and no names, as imports give them."""
    return classes == tuple(map(str, range(len(classes))))
