"""Where weights come from, and whether they mean in a network what they meant where they were trained.

Shapes don't tell how many heads a network has, which way its time runs or which class is number 3. Our own
checkpoints record it in info.json, which lies beside each of their files, too; other people's files do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

from torch import Tensor, nn

from tread.checkpoints import checkpoint
from tread.checkpoints.network import Model, Network, TextSettings, process_of
from tread.checkpoints.state_dicts import fit, sizes, usual_heads
from tread.data.latents import LatentSpec
from tread.runtime.tensor_files import read_kind

KINDS = {"ema": "averaged (ema)", "model": "raw (model)"}
PROJECTORS = "projectors."  # what REPA's files hold beside the network: of its training alone
LATENTS = ("scale", "shift", "channel_shift", "channel_scale", "autoencoder")


@dataclass(frozen=True)
class Origin:
    """Weights and what is known of them.

    where  the file.
    kind   "ema" or "model"; None where the file does not say.
    state  the tensors by the network's names.
    found  the checkpoint that the file is a part of, with its record; None for files of others.
    """

    where: str
    kind: str | None
    state: Mapping[str, Tensor]
    found: checkpoint.Checkpoint | None = None

    def describe(self) -> str:
        """Kind, file and step, as far as they are known."""
        kind = KINDS.get(self.kind, "averaged or raw, which is not recorded,")
        if self.found is None:
            return f"{kind} of {self.where}, at a step that is not recorded"
        imported = self.found.info.get("weights")
        return f"{kind} of {self.where}, step {self.found.step:,}" + (f", imported from {imported}" if imported else "")

    def recorded(self) -> dict[str, object] | None:
        """What is recorded of Model's settings, and of text's, by dotted name; None without a record.

        A setting that a record is too old to know has its default, if Model gives one.
        """
        if self.found is None:
            return None
        model = self._config.get("model", {})
        stated = {item.name: model.get(item.name, item.default) for item in fields(Model)}
        text = {f"text.{name}": value for name, value in self._config.get("text", {}).items()}
        return text | {f"model.{name}": value for name, value in stated.items() if value is not MISSING}

    @property
    def _config(self) -> dict:
        return self.found.info.get("config", {}) if self.found else {}

    @property
    def _latents(self) -> dict:
        latents = self.found.info.get("latents", {}) if self.found else {}
        return {key: tuple(value) if isinstance(value, list) else value for key, value in latents.items()}

    def fit(
        self, expected: Mapping[str, Tensor], model: Model | None = None, text: TextSettings | None = None
    ) -> dict[str, Tensor]:
        """What a network with the state dict `expected`, built by `model` (for text's encoder), is to load.

        Raises ValueError unless names and shapes are the network's, and what the record says of its Model.
        """
        own = {name: value for name, value in self.state.items() if not name.startswith(PROJECTORS)}
        ours = model and (model.decisive | text.decisive if text and model.takes_text else model.decisive)
        return fit(own, expected, self.where, ours, model and self.recorded())

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
        if self.found is None:
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
        """Names and values (there, here) of what decides about weights beside Model's settings, where it differs."""
        if self.found is None:
            return []
        info, config = self.found.info, self._config
        pairs, theirs = {}, config.get("objective", cfg.objective)
        if info.get("predicts", "objective") != predicts:
            said = {"noise": "noise on timesteps 0..999", "objective": f"what objective={cfg.objective} trains"}
            pairs["the prediction"] = tuple(said.get(one, one) for one in (info.get("predicts", "objective"), predicts))
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


def read_origin(path: Path, weights: str = "ema") -> Origin:
    """Weights "ema" or "model" of a checkpoint, or of a file; one of a checkpoint's files is what it is.

    Raises FileNotFoundError or ValueError.
    """
    if not path.is_file():
        found = checkpoint.find(path)
        return Origin(str(found.folder / f"{weights}.safetensors"), weights, found.tensors(weights), found)
    if found := checkpoint.beside(path):
        kind = path.resolve().stem
        if (kind, weights) == ("ema", "model"):
            raise ValueError(
                f"{path} holds averaged weights, but the raw ones (model) are asked for: model.safetensors"
            )
        return Origin(str(path), kind, found.tensors(kind), found)
    return Origin(str(path), *read_kind(path, weights))


def load_weights(
    network: nn.Module,
    path: str,
    weights: str = "ema",
    model: Model | None = None,
    text: TextSettings | None = None,
) -> Origin:
    """Put in other weights (init_from), "ema" or "model". Raises FileNotFoundError, or ValueError unless they fit.

    model, text  the settings that the network was built by, which the weights' own record must not contradict.
    """
    origin = read_origin(Path(path).expanduser(), weights)
    network.load_state_dict(origin.fit(network.state_dict(), model, text))
    return origin


def _conventions(cfg: Network) -> dict[str, object]:
    """The settings of a network's process that decide what its input and output mean, by dotted name."""
    process = process_of(cfg)
    return {f"{cfg.objective}.{name}": getattr(process, name) for name in process.conventions}


def _numbered(classes: tuple[str, ...]) -> bool:
    """Whether classes have numbers and no names, as imports give them."""
    return classes == tuple(map(str, range(len(classes))))
