"""Loads weights of other runs and other people, and checks that they fit a network and have the same meaning in it.

Shapes don't tell how many heads a network has, which way its time runs or which class is number 3. Our checkpoints
record such facts in info.json beside their files; other people's files do not."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from tread.checkpoints import checkpoint
from tread.checkpoints.network import Network, process_of
from tread.data.latents import LatentSpec
from tread.models.architectures import ARCHITECTURES, NetworkOptions, TextSettings, recognize
from tread.models.rotary import ROUNDING, TABLES, check_tables
from tread.runtime.hub import local
from tread.runtime.schema import written
from tread.runtime.tensor_files import EXPAND, FIRST, LABELS, MASKDIT, listed, read_kind

POSITIONS = ("pos_embed", "decoder_pos_embed")  # names of tensors of fixed sines and cosines


def _check_numbers(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: str) -> None:
    """Raise ValueError if `state` has numbers that are not finite, position embeddings other than `expected`, or (for
    MaskDiT) an embedding of the null class that is not 0. `where` names the file in messages."""
    if broken := [name for name in expected if not state[name].isfinite().all()]:
        raise ValueError(f"the weights of {where} are broken: not all numbers are finite in {listed(broken)}")
    for name in (name for name in POSITIONS if name in expected):
        off = (state[name].float() - expected[name].float()).abs().max().item()
        if off > ROUNDING:
            said = f"the positions {name} of {where} are not the fixed 2-D sines and cosines that this network adds"
            raise ValueError(f"{said}: they differ by up to {off:.3g}, and without {name} the file would fit")
    if MASKDIT in state and state[LABELS][-1].any():
        raise ValueError(f"the null class of {where}, the last row of {LABELS}, is not zero, as MaskDiT's is")


def usual_heads(hidden_size: int) -> int | None:
    """Return the usual number of heads for a DiT of this width: 16 for DiT-XL, else width / 64; None if not whole."""
    if hidden_size == 1152:  # DiT-XL; the published S, B and L have width / 64
        return 16
    return None if hidden_size % 64 else hidden_size // 64


def sizes(state: Mapping[str, Tensor]) -> dict[str, int | float | bool]:
    """Return {dotted name: value} of the settings that a state dict's names and shapes show, such as "model.depth".
    "model.num_heads" and "model.positions" are told by rotary tables only. {} if the patch embedding is missing."""
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    if len(shapes.get(FIRST, ())) != 4:
        return {}
    (_, channels, patch_size, _), hidden_size = shapes[FIRST], shapes.get(EXPAND, shapes[FIRST])[0]
    blocks = {match[1] for name in shapes if (match := re.match(r"blocks\.(\d+)\.", name))}
    architecture = recognize(shapes)
    model = {"architecture": architecture, "hidden_size": hidden_size, "depth": len(blocks), "patch_size": patch_size}
    model |= ARCHITECTURES[architecture].told(shapes, hidden_size)
    if rows := shapes.get("final_layer.linear.weight"):
        model["learn_sigma"] = rows[0] == 2 * patch_size**2 * channels
    dataset = {"channels": channels}
    if rows := shapes.get("y_embedder.embedding_table.weight"):
        dataset = {"num_classes": rows[0] - 1, **dataset}  # one row is the null class
    if len(tokens := shapes.get("pos_embed", ())) == 3:
        dataset["size"] = math.isqrt(tokens[1]) * patch_size
    sections = {"model": model, "dataset": dataset}
    return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}


def _kind_of(settings: Mapping[str, object]) -> type[NetworkOptions]:
    return ARCHITECTURES.get(settings.get("model.architecture"), NetworkOptions)


def _usual(settings: Mapping[str, object]) -> dict[str, object]:
    """Return {"model.<name>": value} of settings that change a network's output for given weights: the options of
    settings["model.architecture"] that have a default, and its `constants` (options in other architectures only)."""
    kind = _kind_of(settings)
    return {f"model.{name}": getattr(kind, name) for name in kind.deciding() if hasattr(kind, name)}


def describe(settings: Mapping[str, int | float | bool]) -> str:
    """Return settings as text, "hidden_size 384, depth 12, …", leaving out those that have their default value."""
    plain = _usual(settings)
    told = {key: value for key, value in settings.items() if key not in plain or plain[key] != value}
    return ", ".join(f"{key.partition('.')[2]} {written(value)}" for key, value in told.items())


KINDS = {"ema": "averaged (ema)", "model": "raw (model)"}
PROJECTORS = "projectors."  # prefix of names of REPA's projectors in public files; only training uses projectors
NOISE = "noise on timesteps 0..999"  # what weights predict with predicts=noise
LATENTS = ("autoencoder", "scale", "shift", "channel_shift", "channel_scale")


@dataclass(frozen=True)
class StoredWeights:
    """Weights by parameter name, their file `where`, `kind` ("ema", "model"; None: unknown) and checkpoint `source`."""

    where: str  # the file
    kind: str | None  # "ema" or "model"; None where the file does not say
    state: Mapping[str, Tensor]
    source: checkpoint.Checkpoint | None = None  # the checkpoint with this file, if any

    def describe(self) -> str:
        """Return a text such as "averaged (ema) of <file>, step 1,000", with what is known of the weights."""
        kind = KINDS.get(self.kind, "averaged or raw, which is not recorded,")
        if self.source is None:
            return f"{kind} of {self.where}, at a step that is not recorded"
        imported = self.source.info.get("weights")
        origin = f", imported from {imported}" if imported else ""
        return f"{kind} of {self.where}, step {self.source.step:,}{origin}"

    def recorded(self) -> dict[str, object]:
        """Return the settings model.* and text.* of the checkpoint's config, by dotted name; {} without a checkpoint.
        Model options that an older config lacks have their defaults."""
        if self.source is None:
            return {}
        config = self.source.info["config"]
        stated = {f"{name}.{key}": value for name in ("text", "model") for key, value in config.get(name, {}).items()}
        return _usual(stated) | stated

    @property
    def _latents(self) -> dict:
        latents = self.source.info.get("latents", {})
        return {key: tuple(value) if isinstance(value, list) else value for key, value in latents.items()}

    def fit(
        self, expected: Mapping[str, Tensor], model: NetworkOptions | None = None, text: TextSettings | None = None
    ) -> dict[str, Tensor]:
        """Check that the weights fit a network. Return those to load into it, converted to its dtypes.

        expected  the network's state dict.
        model     the network's settings: those that shapes do not show are compared with the record. None: unchecked.
        text      the settings of its text encoder, compared likewise if `model` is given. None: unchecked.

        Position embeddings and rotary tables are constants: if the file lacks them, the network's own are used. Raises
        ValueError if constants, names, shapes or settings differ (the message suggests settings that fit), or if values
        are not finite. For weights with LoRA's adapters merged in, the message doesn't list the tensors that differ.
        """
        state = {name: value for name, value in self.state.items() if not name.startswith(PROJECTORS)}
        texts = text.decisive if model and text and model.takes_text else {}
        ours = {**(model.decisive if model else {}), **texts, **sizes(expected)}
        theirs, recorded = sizes(state), self.recorded() if model else {}
        if texts and texts["text.fingerprint"] and texts["text.fingerprint"] == recorded.get("text.fingerprint"):
            recorded.pop("text.encoder", None)  # the same one, at another place
        adapter = self.source is not None and "adapter" in self.source.info
        tables = {name: state[name] for name in TABLES if name in state}
        refusal = f"the weights of {self.where} do not fit this network:"
        if any(".lora_" in name for name in state):
            raise ValueError(f"{refusal} they are adapters (LoRA) alone; the checkpoint in their run's folder is whole")
        if FIRST not in state:
            raise ValueError(f"{refusal} there is no {FIRST}, as in public DiT's parameter names, but {listed(state)}")
        whole = {name: expected[name] for name in POSITIONS if name in expected}
        whole |= {name: value for name, value in state.items() if name not in tables}
        reshaped = [
            f"{name} {tuple(whole[name].shape)} {whole[name].dtype} instead of {tuple(value.shape)} {value.dtype}"
            for name, value in expected.items()
            if name in whole
            and (whole[name].shape != value.shape or whole[name].is_floating_point() < value.is_floating_point())
        ]
        unlike = {key: value for key, value in recorded.items() if key not in theirs and ours.get(key, value) != value}
        turned = {key: theirs[key] for key in ("model.positions", "model.num_heads") if key in theirs}
        turned = {key: value for key, value in turned.items() if ours.get(key, value) != value}
        differing = {
            "missing": listed(name for name in expected if name not in whole),
            "not the network's": listed(name for name in whole if name not in expected),
            "of other shapes or types": listed(reshaped),
            "rotary tables of other settings": describe(turned),
            "its info.json records other settings": ", ".join(
                f"{key} {written(value)} instead of {written(ours[key])}" for key, value in unlike.items()
            ),
        }
        problems = [f"{what}: {which}" for what, which in differing.items() if which]
        if not problems:
            _check_numbers(whole, expected, self.where)
            check_tables(tables, expected["pos_embed"].shape[1], self.where)
            return {name: whole[name].to(expected[name].dtype) for name in expected}
        if adapter:
            refusal, problems = f"{refusal} they are an adapter (LoRA) of another network;", []
        problems.append(f"the file is of {describe(theirs)}")
        theirs |= unlike
        kind, plain = _kind_of(theirs), _usual(theirs)
        if fitting := {key: value for key, value in theirs.items() if ours.get(key, plain.get(key)) != value}:
            if "model.architecture" in fitting and (kind.masks or kind.has_path):  # model=… sets the route, too
                fitting = {"model": fitting.pop("model.architecture"), **fitting}
            settings = " ".join(f"{key}={written(value)}" for key, value in fitting.items())
            problems.append(f"settings that fit it: {settings}")
        ways = {
            "dataset.num_classes": "init_classes for other classes",
            "dataset.size": "init_positions for another size",
        }
        if others := [way for key, way in ways.items() if key in fitting]:
            problems.append(f"or train.py takes {', '.join(others)}")
        raise ValueError(f"{refusal} {'; '.join(problems)}" if adapter else "\n  ".join([refusal, *problems]))

    def warnings(self, cfg: Network, latents: LatentSpec, predicts: str | None = None) -> list[str]:
        """Return lines that warn of settings that differ from those of the weights' training, or that were not
        recorded. `latents` describes the network's latents. `predicts`: what the network is to predict now, "noise" (on
        timesteps 0..999, as in DDPM) or "objective" (the target of cfg.objective); None: what `cfg` says."""
        predicts = predicts or ("noise" if cfg.objective == "edm" and cfg.edm.predicts == "ddpm_noise" else "objective")
        lines = []
        if aside := [name for name in self.state if name.startswith(PROJECTORS)]:
            lines.append(f"{self.where} holds {len(aside)} tensors {PROJECTORS}* of its alignment, which are set aside")
        if self.source is not None:
            for key, (there, here) in self._meanings(cfg, latents, predicts).items():
                if there != here:
                    lines.append(f"{key} was {there} where these weights were trained, but is {here} now")
            theirs, ours = self._latents.get("classes", ()), latents.classes
            if _numbered(theirs) != _numbered(ours) and ours and not cfg.model.takes_text:
                named = f"{self.where} records no class names: its class 0"
                if not _numbered(theirs):
                    named = f"classes are numbers here: class {theirs[0]!r} of {self.where}"
                lines.append(f"{named} is taken for {ours[0]!r}, …")
            return lines
        shown = sizes(self.state)
        shown["model.position_scale"] = 1.0  # `fit` and new_positions have compared the positions themselves
        hidden = {key: value for key, value in cfg.model.decisive.items() if key not in shown}
        process = process_of(cfg)
        hidden["objective"] = cfg.objective
        hidden |= {f"{cfg.objective}.{name}": getattr(process, name) for name in process.conventions}
        taken = ", ".join(f"{key}={written(value)}" for key, value in hidden.items())
        unknown = f"{self.where} has no record: nobody can know here whether it was trained with {taken}"
        lines.append(f"{unknown}, latents of this scale and classes in this order")
        heads, usual = hidden.get("model.num_heads"), usual_heads(cfg.model.hidden_size)
        if heads and usual and heads != usual:
            width = f"networks of hidden_size {cfg.model.hidden_size}"
            lines.append(f"model.num_heads is {heads}, but {width} usually have {usual}")
        return lines

    def _meanings(self, cfg: Network, latents: LatentSpec, predicts: str) -> dict[str, tuple[object, object]]:
        """Return {name: (recorded value, present value)} of everything besides the network's options that decides what
        its inputs and outputs mean. `predicts` is as in `warnings`."""
        config, recorded = self.source.info["config"], self.source.info.get("predicts", "objective")
        theirs = config.get("objective", cfg.objective)
        if theirs == "edm" and config.get("edm", {}).get("predicts") == "ddpm_noise":
            recorded = "noise"
        there, here = (f"what objective={objective} trains" for objective in (theirs, cfg.objective))
        there, here = (NOISE if kind == "noise" else usual for kind, usual in ((recorded, there), (predicts, here)))
        pairs = {} if recorded == predicts else {"the prediction": (there, here)}
        if recorded == predicts == "objective":
            process = process_of(cfg)
            pairs["objective"] = (theirs, cfg.objective)
            for name in process.conventions if theirs == cfg.objective else ():
                usual = getattr(type(process), name)  # if the record is older than the key
                pairs[f"{theirs}.{name}"] = (config.get(theirs, {}).get(name, usual), getattr(process, name))
        stated = self._latents
        same_autoencoder = stated.get("fingerprint") == latents.fingerprint is not None
        for name in LATENTS[same_autoencoder:]:
            here = getattr(latents, name)
            pairs[f"latents.{name}"] = (stated.get(name, here), here)
        classes = stated.get("classes", ())
        if not _numbered(classes) and not _numbered(latents.classes):
            unlike = [(i, *both) for i, both in enumerate(zip(classes, latents.classes)) if both[0] != both[1]]
            for i, there, here in unlike[:1]:
                pairs[f"class {i} (the first of {len(unlike):,} that differ)"] = (repr(there), repr(here))
        return pairs


def read_weights(path: Path, weights: str = "ema") -> StoredWeights:
    """Read the "ema" or "model" (raw) weights of a checkpoint, a file, or a folder with one .safetensors file, not
    counting LoRA's base.safetensors. Raises FileNotFoundError if there are none; ValueError if they are damaged or only
    of the other kind. But if `path` is a checkpoint's file model.safetensors, its raw weights serve as "ema"."""
    known = (path / "info.json").exists() or checkpoint.newest(path)
    files = () if known else [file for file in path.glob("*.safetensors") if file.name != checkpoint.BASE]
    path = files[0] if len(files) == 1 else path
    if not path.is_file():
        source = checkpoint.find(path)
        return StoredWeights(str(source.folder / f"{weights}.safetensors"), weights, source.tensors(weights), source)
    if source := checkpoint.containing(path):
        kind = (path if path.parent.resolve() == source.folder else path.resolve()).stem
        if (kind, weights) == ("ema", "model"):
            raise ValueError(f"{path} holds averaged weights, but the raw ones (model) are asked for")
        return StoredWeights(str(path), kind, source.tensors(kind), source)
    return StoredWeights(str(path), *read_kind(path, weights))


def load_weights(
    network: nn.Module,
    path: str,
    weights: str = "ema",
    model: NetworkOptions | None = None,
    text: TextSettings | None = None,
    adapt: Callable[[StoredWeights], StoredWeights] = lambda stored: stored,
) -> StoredWeights:
    """Load the "ema" or "model" `weights` of `path`, a file, folder or hf:user/name[@revision], into `network`, after
    `adapt` has changed them; return them. `model` and `text`, the network's settings, are compared with recorded ones,
    unless model is None. Raises OSError if files are missing, or neither the hub answers nor its cache has them;
    ValueError if the hub has no such weights, or they are damaged, or names, shapes or recorded settings differ."""
    stored = adapt(read_weights(local(path), weights))
    network.load_state_dict(stored.fit(network.state_dict(), model, text))
    return stored


def _numbered(classes: tuple[str, ...]) -> bool:
    """Return whether the class names are just "0", "1", …, as for imported latents without class names."""
    return classes == tuple(map(str, range(len(classes))))
