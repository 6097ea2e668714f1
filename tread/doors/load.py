"""Sampling from Python: tread.load(checkpoint).sample(…) draws the pictures that sample.py draws."""

import itertools
import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

from tread.checkpoints import checkpoint
from tread.checkpoints.for_sampling import SavedNetwork, open_network, open_weak
from tread.data.latents import from_network
from tread.diffusion.guidance import Guidance, Schedule
from tread.diffusion.labels import Label, class_number
from tread.diffusion.pictures import Output, in_form
from tread.diffusion.process import Process
from tread.diffusion.sampling import OnStep, Sampler, check_ratios, draw_pictures
from tread.diffusion.solvers import Churn, Solver
from tread.encoders.autoencoder import Decoder, Decoding, load_decoder
from tread.evaluation.prompts import encode_prompts, row_labels
from tread.evaluation.sample_files import parse_seeds
from tread.runtime.cli import read_choice
from tread.runtime.device import Precision, avoid_faults, exact, use_precision
from tread.runtime.plugins import import_plugins, plugin_changes
from tread.runtime.schema import Count, check, read
from tread.runtime.tensor_files import Weights

Number = float | dict | Schedule | None  # a guidance setting: constant, or a schedule such as {"schedule": "linear", …}


def load(
    source: str | Path,
    weights: Weights = "ema",
    device: torch.device | str | None = None,
    precision: Precision = "auto",
    autoencoder: str | None = None,
    decode_precision: Decoding = "fp32",
    text_encoder: str | None = None,
    plugins: Sequence[str] = (),
) -> "TrainedModel":
    """Load a trained network for sampling.

    source            a checkpoint's folder, a run's folder (its latest checkpoint), or hf:user/name[@revision].
    weights           "ema" (averaged) or "model" (raw).
    device            None: a GPU if there is one, else the CPU.
    precision         "fp32", "bf16" (autocast), or "auto": bf16 on a GPU that supports it, else fp32.
    autoencoder       hub id, folder or file of the autoencoder that decodes latents; None: the one that the run used.
    decode_precision  precision of the autoencoder: "fp32", "tf32" or "bf16".
    text_encoder      hub id or folder of the encoder for prompts; None: the one that the run used.
    plugins           modules, or paths of .py files, to import first. The checkpoint's other plugins follow; ValueError
                      if one is a .py file that is missing or lies in the folder of the checkpoint or its run.

    Raises ValueError or FileNotFoundError if the checkpoint is missing or damaged, or does not suit the options.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    check("precision", precision, Precision)
    check("decode_precision", decode_precision, Decoding)
    import_plugins([str(name) for name in ([plugins] if isinstance(plugins, (str, Path)) else plugins)])
    saved = open_network(checkpoint.find(source), weights)
    if text_encoder is not None and not saved.text:
        raise ValueError(f"text_encoder is given, but {source} was trained with classes, and reads no prompt")
    for note in (*plugin_changes(saved.found.info), *filter(None, [avoid_faults(device)])):
        warnings.warn(note, stacklevel=2)
    network = saved.load(device).network
    return TrainedModel(saved, network, precision, (autoencoder, decode_precision), text_encoder)


@dataclass(eq=False, repr=False)
class TrainedModel:
    """A trained network with its diffusion process and, once it is needed, its decoder; returned by `load`.

    network  the module, in eval mode: network(x, time, y, routes=()), see Backbone.forward.
    process  EDM or RF; process.denoise(network, x, level, y) predicts clean latents; `level` is EDM's σ or RF's t.
    classes  names of the classes; a text-conditional network has none.
    """

    saved: SavedNetwork
    network: nn.Module
    precision: Precision
    _decoding: tuple[str | None, Decoding]  # the name and precision of the autoencoder, see `load`
    _text_encoder: str | None

    @property
    def process(self) -> Process:
        return self.saved.process

    @property
    def classes(self) -> tuple[str, ...]:
        return () if self.saved.text else tuple(self.saved.latents.classes)

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def to(self, device: torch.device | str) -> "TrainedModel":
        """Move the network to a device, in place, and return this TrainedModel."""
        self.network.to(device)
        vars(self).pop("_decoder", None)
        if faulty := avoid_faults(self.device):
            warnings.warn(faulty, stacklevel=2)
        return self

    @exact()  # leaves the caller's own TF32 and autocast alone
    def sample(
        self,
        classes: Label | Sequence[Label] = None,
        seeds: str | int | Sequence[int] = range(8),
        *,
        prompts: str | Sequence[str] = (),
        labels: Sequence[Label] | None = None,
        steps: int | None = None,
        solver: Solver | None = None,
        shift: float | None = None,
        churn: float | dict | Churn | None = None,
        batch_size: int = 64,
        guidance: str = "none",
        scale: Number = None,
        strong: Number = None,
        weak: Number = None,
        interval: Sequence[float] | None = None,
        checkpoint: str | Path | None = None,
        weights: Weights | None = None,
        same_ids: bool | None = None,
        force: bool | None = None,
        output: Output = "pil",
        on_step: OnStep | None = None,
    ) -> list[Image.Image] | Tensor | np.ndarray:
        """Draw a picture for each class (or prompt) with each seed, class by class. Up to rounding, a picture does not
        depend on the others or on batch_size. steps and solver default to the process's. `shift` (None: the run's) is
        rectified flow's s: u = 1 − t becomes s·u/(1 + (s−1)·u). `churn`: EDM's S_churn, a Churn, or a dict of fields.

        classes   class names or numbers, one or several; None in a list: no class. Default: up to ten, evenly spread.
        seeds     numbers, or text such as "0-7", both ends included.
        prompts   for a text-conditional network, instead of classes: texts that say what to draw.
        labels    a class for each seed, instead of `classes`: pairs, not all combinations.
        guidance  name of a file in configs/guidance/. The arguments `scale` to `force` replace its values unless None.
        scale     the guidance weight: D = D(weak branch) + scale·(D(strong branch) − D(weak branch)).
        strong, weak  share of the tokens that skip the route's blocks in each branch.
        interval  (lowest, highest) noise level, EDM's σ or RF's t, outside of which the strong branch runs alone.
        checkpoint, weights  checkpoint of another network for the weak branch, and which of its weights.
        same_ids  whether both branches choose their tokens by the same random numbers.
        force     whether to allow `strong` above `weak`, and skipped tokens in a network trained without a route.
        output    "pil": a list of pictures; "pt" (n, 3, H, W) and "np" (n, H, W, 3): float32 in 0..1, with 1 channel if
                  pictures are grey; "latent": (n, C, S, S) fp32, in the units of the autoencoder's decoder.
        on_step   called at each step, batch by batch, with its number, the noise level, the current latents (b, C, S,
                  S) and the predicted clean ones, both as network latents (see tread/data/latents.py).

        Raises ValueError before sampling for options that do not fit, and during it if samples are not finite.
        """
        steps, shift, churn, batch_size = map(_plain, (steps, shift, churn, batch_size))
        check("output", output, Output)
        check("batch_size", batch_size, Count)
        check("steps", steps, Count | None)
        batch_size, steps = int(batch_size), steps and int(steps)  # 2.0 passes, as on the command line
        given = {"scale": scale, "strong": strong, "weak": weak, "interval": interval, "checkpoint": checkpoint}
        given |= {"weights": weights, "same_ids": same_ids, "force": force}
        guide = read_guidance(guidance, {name: value for name, value in given.items() if value is not None})
        saved = self.saved.shifted(shift)
        other = open_weak(guide, saved)
        seeds = [operator.index(seed) for seed in parse_seeds(seeds)]
        prompts = (prompts,) if isinstance(prompts, str) else tuple(prompts)
        numbers, columns = self._pairs(classes, labels, prompts, seeds)
        how = (steps, solver, min(batch_size, len(columns)), use_precision(self.precision, self.device), guide)
        if not isinstance(churn, Churn | None):
            churn = read({"amount": churn} if isinstance(churn, (int, float)) else churn, Churn, "churn.")
        sampler = Sampler.of(saved.process, *how, churn)
        check_ratios(sampler, *(network and network.without_weights(guide) for network in (saved, other)))
        text, notes = encode_prompts(saved, prompts, self.device, self._text_encoder) if prompts else (None, ())
        for note in notes:
            warnings.warn(note, stacklevel=2)
        model = replace(saved.with_weights(self.network, guide), prompts=text)
        weaker = other and other.load(self.device, guide)
        latents = self.saved.latents
        decoder = partial(from_network, latents=latents) if output == "latent" else self._decoder
        drawn = draw_pictures(model, decoder, columns, torch.tensor(numbers), sampler, weaker, True, on_step)
        count = -(-len(columns) // sampler.batch_size)
        bar = tqdm(drawn, desc="sampling", total=count, unit="batch", disable=None)  # None: off where no terminal is
        return in_form(output, torch.cat([*bar]))

    def _pairs(
        self, classes: object, labels: Sequence[Label] | None, prompts: Sequence[str], seeds: list[int]
    ) -> tuple[tuple[int, ...], ...]:
        """Return (numbers of classes or prompts, seeds), one each per picture. ValueError for options that conflict."""
        if labels is not None and (prompts or len(labels) != len(seeds) or classes is not None):
            told = f"labels has {len(labels)} classes for {len(seeds)} seeds"
            raise ValueError(f"{told}: it must give one for each seed, in the place of classes and prompts")
        listed = [classes] if isinstance(classes, (str, int, np.integer)) else classes if labels is None else labels
        numbers = None if listed is None else [class_number(label, self.classes) for label in listed]
        rows = row_labels(self.saved, numbers, prompts)
        return tuple(zip(*(itertools.product(rows, seeds) if labels is None else zip(rows, seeds))))

    @cached_property
    def _decoder(self) -> Decoder:
        return load_decoder(self.saved.latents, self.device, *self._decoding)


def _plain(value: object) -> object:
    """Return an option's value as configs hold it: numpy values as Python values, a Schedule as a dict."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return vars(value) if isinstance(value, Schedule) else value.tolist() if hasattr(value, "tolist") else value


def read_guidance(name: str, given: dict[str, object]) -> Guidance:
    """Return the guidance of configs/guidance/<name>.yaml, with values replaced by those in `given`. Raises
    ValueError for an unknown name, values that do not fit, and a required `checkpoint` that is not given."""
    here = Path(__file__).resolve().parent
    configs = next(place for place in (here / "configs", here.parents[1] / "configs") if place.is_dir())
    settings = read_choice(configs, "guidance", name) | given
    if settings["checkpoint"] == "???":
        raise ValueError(f"guidance={name} needs checkpoint=…, the weaker network's")
    plain = {key: _plain(value) for key, value in settings.items()}
    return read(plain | {"checkpoint": plain["checkpoint"] and str(plain["checkpoint"])}, Guidance)
