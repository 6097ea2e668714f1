"""A checkpoint to be scored: what decides about its numbers, settled and checked before any work."""

from __future__ import annotations

import glob
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from tread.checkpoints import checkpoint
from tread.checkpoints.trained import Trained, open_trained, open_weak
from tread.data import autoencoder
from tread.data.images import Alpha, Crop, Orientation
from tread.data.latents import LatentSpec
from tread.diffusion.guidance import Guidance
from tread.diffusion.process import Process
from tread.diffusion.sampling import Labels, Sampler, check_ratios, relative_cost
from tread.diffusion.solvers import Solver
from tread.evaluation.scored_prompts import HELDOUT, ScoredPrompts, heldout_folder, open_prompts
from tread.evaluation.scorers import EMBEDDED
from tread.runtime import schema
from tread.runtime.compiling import Compile
from tread.runtime.device import Precision
from tread.runtime.schema import Count, CountOrZero, Positive, TwoOrMore
from tread.runtime.tensor_files import Weights

COUNT, TEXT_COUNT, EMBEDDED_COUNT = 50_000, 10_000, 1000  # samples, unless a number is asked for


@dataclass(frozen=True)
class Options:
    """configs/fid.yaml."""

    checkpoint: str | None
    samples: str | None
    reference: str | None
    save_reference: str | None
    num_samples: TwoOrMore | None
    first_seed: CountOrZero
    labels: Labels
    prompts: str | None
    clip: str | None
    steps: Count | None
    solver: Solver | None
    shift: Positive | None
    batch_size: Count
    precision: Precision
    cpu_threads: Count | None
    compile: Compile
    weights: Weights
    guidance: Guidance
    autoencoder: str | None
    inception: str | None
    crop: Count | None
    orientation: Orientation | None
    alpha: Alpha | None
    cache: str
    save_samples: bool
    out: str | None

    def __post_init__(self) -> None:
        if (self.checkpoint is None) == (self.samples is None) and not (self.samples is None and self.save_reference):
            raise ValueError("name one of checkpoint=… and samples=… to score, or reference=… save_reference=stats.npz")
        if self.samples and (self.prompts or self.clip):
            raise ValueError("prompts=… and clip=… are of a checkpoint; samples=… are scored without their captions")
        if self.reference is None and (self.samples or self.save_reference):
            raise ValueError("reference=… is needed: ADM's .npz, an .npz with mu and sigma, a folder or a tar")
        if self.save_reference and Path(self.save_reference).suffix != ".npz":
            raise ValueError(f"save_reference is {self.save_reference!r}, but must end in .npz")
        paths = [Path(path) for path in (self.samples, self.reference) if path]
        if self.crop and all(path.suffix == ".npz" for path in paths):
            raise ValueError(f"crop={self.crop} is for folders and tars of photos, but none is named")
        for key in ("orientation", "alpha"):
            if (value := getattr(self, key)) and not self.crop:
                raise ValueError(f"{key}={value} is for the photos of crop=…; without it pictures are taken as stored")


def read_options(config: dict) -> Options:
    """The options with ~ in paths expanded, where the shell has not done it."""
    paths = ("checkpoint", "samples", "reference", "save_reference", "prompts", "clip")
    paths += ("inception", "autoencoder", "out", "cache")
    for section, keys in ((config, paths), (config["guidance"], ("checkpoint",))):
        section |= {key: str(Path(section[key]).expanduser()) for key in keys if section[key]}
    return schema.read(config, Options)


@dataclass(frozen=True)
class ScoringPlan:
    """What scoring a checkpoint means.

    weak        the weak network of the guidance, if it is another.
    embedded    the dataset whose own judge scores it, where there is no reference.
    compiled    whether the networks' blocks are, when samples are drawn.
    decoder     what makes pictures of latents, by its fingerprint.
    prompts     the captions that it draws, of a network that takes texts.
    flops       of the networks, a sample; flops_relative: over those of the same steps without guidance.
    reference   sha256 of what it is scored against, of the Inception, and of CLIP; None without them.
    """

    trained: Trained
    weak: Trained | None
    sampler: Sampler
    count: int
    first_seed: int
    labels: str
    compiled: bool
    decoder: str
    embedded: str | None
    flops: int
    flops_relative: float
    prompts: ScoredPrompts | None = None
    reference: str | None = None
    inception: str | None = None
    clip: str | None = None

    @property
    def found(self) -> checkpoint.Checkpoint:
        return self.trained.found

    @property
    def latents(self) -> LatentSpec:
        return self.trained.latents

    @property
    def nfe(self) -> int:
        """Network function evaluations a sample."""
        return self.sampler.nfe(self.trained.process)

    @property
    def num_labels(self) -> int:
        """Classes or captions that it draws of."""
        return self.trained.cfg.dataset.num_classes if self.prompts is None else self.prompts.count

    @property
    def seeds(self) -> range:
        return range(self.first_seed, self.first_seed + self.count)

    @property
    def fingerprint(self) -> dict:
        """All that decides about the numbers, for JSON: what was scored by an equal one need not be scored again."""
        trained, weak, sampler, latents = self.trained, self.weak, self.sampler, self.latents
        routed = [one for one in (trained, weak) if one and sampler.guidance.row.routed]
        routes = [asdict(route) for one in routed for route in one.routes(sampler.guidance)]
        for route in routes:
            if route["rejoin"] is None:
                del route["rejoin"]  # a younger key: what was scored without it stays scored
        return {
            "step": self.found.step,
            "checkpoint": trained.sha256,
            "weights": trained.weights,
            "num_samples": self.count,
            "first_seed": self.first_seed,
            "labels": self.labels,
            "sampler": sampler.solver,
            "steps": sampler.steps,
            "nfe": self.nfe,
            "guidance": sampler.guidance.describe(),
            **({"weak_network": weak.sha256, "weak_process": _constants(weak.process)} if weak else {}),
            **({"routes": routes} if routes else {}),
            "dtype": sampler.precision,
            "batch_size": sampler.batch_size,
            **({"compiled": True} if self.compiled else {}),
            "decoder": self.decoder,
            "latents": {key: getattr(latents, key) for key in ("scale", "shift", "channel_shift", "channel_scale")},
            trained.cfg.objective: _constants(trained.process),
            "reference": self.reference,
            "inception": self.inception,
            **({"prompts": self.prompts.sha256} if self.prompts else {}),
            **({"clip": self.clip} if self.clip else {}),
        }


def _constants(process: Process) -> dict:
    """A process's; those that are younger than the first scores only where they are set, so that these are found."""
    young = {"direction": 0.0, "shift": 1.0}
    return {key: value for key, value in asdict(process).items() if key not in young or value != young[key]}


def settle_paths(options: Options) -> tuple[Options, list[Path]]:
    """The options with the weak network's own folder, and the checkpoints' folders, each once, by step.

    checkpoint is a path, or a pattern with *; `latest` may name another a moment later. Raises
    FileNotFoundError or ValueError.
    """
    pattern, weak = options.checkpoint, options.guidance.checkpoint
    paths = [pattern] if pattern else []
    if pattern and not Path(pattern).exists() and any(sign in pattern for sign in "*?["):
        paths = glob.glob(pattern)
        if not paths:
            raise FileNotFoundError(f"no checkpoint matches {pattern}")
    found = {one.folder: one.step for one in (checkpoint.find(Path(path)) for path in paths)}
    if weak is not None:
        weak = str(checkpoint.find(Path(weak)).folder)
        options = replace(options, guidance=replace(options.guidance, checkpoint=weak))
    return options, sorted(found, key=lambda folder: (str(folder.parent), found[folder]))


def settle_crop(options: Options, plans: list[ScoringPlan]) -> Crop | None:
    """How photos are prepared: as asked, else as those that the checkpoints were trained on; exif, white without one.

    Raises ValueError if the checkpoints' were read in different ways.
    """
    chosen = {}
    for key, usual in (("orientation", "exif"), ("alpha", "white")) if options.crop else ():
        recorded = sorted({getattr(plan.latents, key) for plan in plans}) or [usual]
        if len(recorded) > 1 and getattr(options, key) is None:
            raise ValueError(
                f"the checkpoints were trained on photos read with {key}={' and '.join(recorded)}: set {key}=…, or "
                "score them one by one"
            )
        chosen[key] = getattr(options, key) or recorded[0]
    return Crop(options.crop, **chosen) if options.crop else None


def plan_scoring(options: Options, found: checkpoint.Checkpoint, precision: str, compiled: bool = False) -> ScoringPlan:
    """Settle what scoring a checkpoint means, but for the reference; precision and compiled are of sampling, settled.

    Raises ValueError or FileNotFoundError if it can't be scored so.
    """
    trained = open_trained(found, options.weights, options.shift)
    weak, cfg, process = open_weak(options.guidance, trained), trained.cfg, trained.process
    prompts = _settle_prompts(options, trained)
    judged = cfg.dataset.embedded in EMBEDDED and prompts is None and options.reference is None
    embedded = cfg.dataset.embedded if judged else None
    if not options.save_samples and options.reference is None and embedded is None and prompts is None:
        raise ValueError(
            f"{found.folder} is of dataset {cfg.dataset.name}, which needs reference=…: ADM's .npz, an .npz with mu "
            "and sigma, a folder or a tar of pictures (save_samples=true draws without scoring)"
        )
    count = options.num_samples or (EMBEDDED_COUNT if embedded else TEXT_COUNT if prompts else COUNT)
    sampler = Sampler.of(
        process, options.steps, options.solver, min(options.batch_size, count), precision, options.guidance
    )
    outlines = [one and one.outline(options.guidance) for one in (trained, weak)]
    check_ratios(sampler, *outlines)
    return ScoringPlan(
        trained,
        weak,
        sampler,
        count,
        options.first_seed,
        options.labels,
        compiled=compiled and not options.guidance.scheduled,
        decoder=autoencoder.decoder_hash(trained.latents, options.autoencoder),
        embedded=embedded,
        flops=sampler.flops(*outlines),
        flops_relative=relative_cost(sampler, *outlines),
        prompts=prompts,
    )


def _settle_prompts(options: Options, trained: Trained) -> ScoredPrompts | None:
    """The captions that a network is scored on; None of one that takes classes.

    Raises ValueError or FileNotFoundError, also for what a network of classes has no use for.
    """
    if trained.text is not None:
        prompts = open_prompts(trained, options.prompts or HELDOUT)
        if options.clip is not None:
            prompts.captions(torch.zeros(0, dtype=torch.int64))  # raises where only their encodings are known
        return prompts
    for key in ("prompts", "clip"):
        if (value := getattr(options, key)) is not None:
            raise ValueError(f"{key}={value} is of captions, but {trained.found.folder} was trained with classes")
    return None


def settle_reference(options: Options, plans: list[ScoringPlan]) -> Options:
    """The options with the folder of the held-out data as reference, where reference=heldout asks for it, or nothing
    is named and networks of texts are to be scored.

    Raises ValueError or FileNotFoundError.
    """
    unnamed = options.reference is None and not options.save_samples and all(plan.prompts for plan in plans)
    if not plans or not (options.reference == HELDOUT or unnamed):
        return options
    folders = {str(heldout_folder(plan.trained)) for plan in plans}
    if len(folders) > 1:
        raise ValueError(
            f"the checkpoints have other held-out data ({', '.join(sorted(folders))}): score them one by one"
        )
    return replace(options, reference=folders.pop())
