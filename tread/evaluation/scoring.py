"""Scores checkpoints or pictures (`run`). All checks come before the long work. The processes share the work in small
portions; after an interruption, the same command does only the missing ones."""

import datetime
import glob
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

from routing_module import Route
from tread.checkpoints import checkpoint
from tread.checkpoints.for_sampling import SavedNetwork, open_network, open_weak
from tread.data.latents import Alpha, Orientation
from tread.data.store import ShardStore, pieces_of
from tread.diffusion.guidance import Guidance
from tread.diffusion.labels import Labels, seeded_labels
from tread.diffusion.process import Process
from tread.diffusion.sampling import Sampler, check_ratios, draw_pictures, relative_cost
from tread.diffusion.solvers import Solver
from tread.drawing.grids import save_grid
from tread.encoders import autoencoder
from tread.encoders.clip import ClipScore
from tread.evaluation.image_sets import Pictures, extract_all, feature_store, open_pictures, part_size, save_npz
from tread.evaluation.prompts import HELDOUT, ScoredPrompts, heldout_folder, open_prompts
from tread.evaluation.reference import SHIPPED, Reference, check_size, save_statistics
from tread.evaluation.sample_files import describe_drawing
from tread.evaluation.score_files import NAMES, ScoreFiles, add_line, table
from tread.evaluation.scorers import EMBEDDED, ReferenceScorer, Scorer, Unscored, open_scorer
from tread.preparing import cifar10
from tread.preparing.images import Crop
from tread.runtime import schema
from tread.runtime.compiling import Compile, compile_blocks, settle_compile
from tread.runtime.device import Precision, avoid_faults, device_name, use_precision
from tread.runtime.distributed import Processes
from tread.runtime.files import check_place, content_hash, explain_failure, write_json
from tread.runtime.plugins import plugin_changes, plugin_hashes
from tread.runtime.schema import Count, CountOrZero, Positive, TwoOrMore
from tread.runtime.tensor_files import Weights
from tread.runtime.versions import versions

CLIP = "clip_score"  # the CLIP score's key in METRICS and in stored parts
COUNT, TEXT_COUNT, EMBEDDED_COUNT = 50_000, 10_000, 1000  # default numbers of samples
GRID = 64  # number of pictures in fid.png
# keys that ScoringPlan.fingerprint leaves out if their values are null, false or empty
OPTIONAL = {*"weak_network weak_process network routes compiled decode_precision prompts clip plugins".split()}


@dataclass(frozen=True)
class ScoringOptions:
    """The options of configs/fid.yaml. Raises ValueError if they do not fit together."""

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
    on_error: Literal["stop", "skip"]
    cache: str
    save_samples: bool
    out: str | None
    plugins: tuple[str, ...] = ()
    decode_precision: autoencoder.Decoding = "fp32"
    reference_features: bool = False
    packed: bool = False

    def __post_init__(self) -> None:
        if (self.checkpoint is None) == (self.samples is None) and not (self.samples is None and self.save_reference):
            raise ValueError("name one of checkpoint=… and samples=… to score, or reference=… save_reference=stats.npz")
        if self.checkpoint is None and (self.prompts or self.clip):
            raise ValueError("prompts=… and clip=… are for a checkpoint; other pictures are taken without captions")
        usual = {"num_samples": None, "first_seed": 0, "labels": "random", "steps": None, "solver": None, "shift": None}
        usual |= {"weights": "ema", "autoencoder": None, "decode_precision": "fp32", "save_samples": False}
        drawing = [key for key, value in usual.items() if getattr(self, key) != value]
        drawing += ["guidance"] * (self.guidance.kind != "none")
        if drawing and self.checkpoint is None:
            raise ValueError(f"{', '.join(drawing)}: only for drawing from a checkpoint, but checkpoint=… is not given")
        if self.out is None and (self.checkpoint or "").startswith("hf:"):
            raise ValueError(f"checkpoint={self.checkpoint} has no folder of yours: name one for the score, out=…")
        if self.reference is None and (self.samples or self.save_reference):
            raise ValueError("reference=… is needed: ADM's .npz, an .npz with mu and sigma, a folder or a tar")
        if self.reference_features and self.reference not in SHIPPED:
            raise ValueError(f"reference_features=true is for reference={', '.join(SHIPPED)}, which has no pictures")
        if self.packed and not self.save_reference:
            raise ValueError("packed=true is for save_reference=…")
        if self.save_reference and Path(self.save_reference).suffix != ".npz":
            raise ValueError(f"save_reference is {self.save_reference!r}, but must end in .npz")
        paths = [Path(path) for path in (self.samples, self.reference) if path]
        if self.crop and all(path.suffix == ".npz" or (str(path) in SHIPPED and not path.exists()) for path in paths):
            raise ValueError(f"crop={self.crop} is for folders and tars of photos, but none is named")
        for key in ("orientation", "alpha"):
            if (value := getattr(self, key)) and not self.crop:
                raise ValueError(f"{key}={value} needs crop=…: without crop, pictures are taken as stored")


def read_options(config: dict) -> ScoringOptions:
    """Read the options from a config composed by Hydra, expanding ~ in its paths. Raises ValueError if one is wrong."""
    paths = ("checkpoint", "samples", "reference", "save_reference", "prompts", "clip")
    paths += ("inception", "autoencoder", "out", "cache")
    for section, keys in ((config, paths), (config.get("guidance") or {}, ("checkpoint",))):
        section |= {key: str(Path(section[key]).expanduser()) for key in keys if isinstance(section.get(key), str)}
    return schema.read(config, ScoringOptions)


def run(options: ScoringOptions, processes: Processes) -> list[dict | None]:
    """Check everything, then write options.save_reference and score each checkpoint, or the pictures options.samples.
    All processes call this. Returns each checkpoint's fid.json as a dict (for a new score only in the main process; the
    others get None), [] without checkpoints. Raises ValueError or OSError if a check, reading or writing fails."""
    options, paths = processes.from_main(lambda: settle_paths(options))
    precision = use_precision(options.precision, processes.device)
    if faulty := avoid_faults(processes.device):
        processes.say(f"note: {faulty}")
    compiled, reason = settle_compile(options.compile, processes.device)
    if reason:
        processes.say(f"warning: running without torch.compile, which fails here: {reason}")
    plans = [plan_scoring(options, checkpoint.find(path), precision, compiled) for path in paths]
    options = settle_reference(options, plans)
    if crop := settle_crop(options, plans):
        processes.say(f"crop={crop.size} reads photos with orientation={crop.orientation} alpha={crop.alpha}")
    # open what is scored and what scores it
    skip = options.on_error == "skip"
    samples = options.samples and open_pictures(Path(options.samples), crop, processes, skip)
    against = options.reference and open_scorer(Path(options.reference), options.inception, crop, processes, skip)
    if options.inception and not against and not any(plan.judge.hashes.get("inception") for plan in plans):
        raise ValueError(f"inception={options.inception} is read by nothing here: name a reference=…, or leave it out")
    if options.reference in SHIPPED and not Path(options.reference).exists():
        add_shipped_pictures(against, options, plans, processes)
    if crop and samples and against.reference.pictures is None:
        processes.say(f"crop={crop.size} is of the samples: the statistics of {options.reference} stay as they are")
    with processes.main_first():  # one process fetches the weights
        clip = options.clip and ClipScore(options.clip, processes.device)
    scorings = [CheckpointScoring(plan, against or plan.judge, clip, processes) for plan in plans]
    records = processes.from_main(lambda: [scoring.find_score() for scoring in scorings])
    left = [scoring for scoring, record in zip(scorings, records) if record is None]
    # checks before long work
    how = {"autoencoder": options.autoencoder, "precision": options.decode_precision}
    decoder_of = cache(partial(autoencoder.load_decoder, device=processes.device, **how))
    for scoring in left:
        scoring.check(decoder_of(scoring.plan.saved.latents))
    if samples:
        check_size(samples.where, (3, *samples.resolution), against.reference)
        check_place(files_beside(options).folder, 0)
    if options.save_reference:
        check_target(Path(options.save_reference), against.reference)
    # the work
    if against and (left or samples or options.save_reference):
        against.extract_reference(Path(options.cache))
    if options.save_reference:
        pictures, path = against.reference.pictures, Path(options.save_reference)
        save_statistics(path, pictures, against.features, processes, options.packed)
    for number, scoring in enumerate(scorings):
        if scoring in left:
            records[number] = scoring.score(decoder_of(scoring.plan.saved.latents))
    if samples:
        score_pictures(samples, against, options, processes)
    return records


def settle_paths(options: ScoringOptions) -> tuple[ScoringOptions, list[Path]]:
    """Find the checkpoints that options.checkpoint names, a path or a pattern with *. Call it once, in one process, as
    the link `latest` may change. Returns the options, with guidance.checkpoint, if set, replaced by its folder, and the
    distinct folders found, sorted by run and step. Raises FileNotFoundError or, if one is damaged, ValueError."""
    pattern, weak = options.checkpoint, options.guidance.checkpoint
    paths = [pattern] if pattern else []
    if pattern and not Path(pattern).exists():
        paths = glob.glob(pattern) or paths
    steps = {source.folder: source.step for source in (checkpoint.find(Path(path)) for path in paths)}
    if weak is not None:
        weak = str(checkpoint.find(Path(weak)).folder)
        options = replace(options, guidance=replace(options.guidance, checkpoint=weak))
    return options, sorted(steps, key=lambda folder: (str(folder.parent), steps[folder]))


@dataclass(frozen=True)
class ScoringPlan:
    """How the network `saved` is scored under `options`, with samples drawn by `sampler`.

    weak            second network for guidance (as in autoguidance), if it is another checkpoint; else None.
    count           number of samples to draw.
    compiled        whether the networks' blocks are compiled for sampling.
    decoder         a text that identifies the decoder of the network's latents; "pixels": there is none.
    judge           scorer to use without a reference: DigitsJudge, EmojiJudge, or Unscored, which computes nothing.
    prompts         the captions to draw samples for, if the network takes texts; else None.
    flops           FLOPs of the networks for one sample, over all steps.
    flops_relative  `flops` divided by the FLOPs of the same steps by `saved` alone, without guidance, on all tokens.
    """

    options: ScoringOptions
    saved: SavedNetwork
    weak: SavedNetwork | None
    sampler: Sampler
    count: int
    compiled: bool
    decoder: str
    judge: Scorer
    prompts: ScoredPrompts | None
    flops: int
    flops_relative: float

    @property
    def folder(self) -> Path:
        return self.saved.found.folder

    @property
    def seeds(self) -> range:
        return range(self.options.first_seed, self.options.first_seed + self.count)

    def fingerprint(self, reference: str | None = None, inception: str | None = None, clip: str | None = None) -> dict:
        """Return all that decides a score, the checkpoint's sha256 included, as a dict for JSON: equal dicts mean equal
        scores. The arguments are the sha256 of the reference, Inception's weights, CLIP's weights; None: not used."""
        saved, weak, sampler, latents = self.saved, self.weak, self.sampler, self.saved.latents
        decoded_in = self.options.decode_precision
        routed = [network for network in (saved, weak) if network and sampler.guidance.row.routed]
        decisive = {
            "step": saved.found.step,
            "checkpoint": saved.sha256,
            "weights": saved.weights,
            "network": [each.cfg.model.decisive for each in (saved, weak) if each and "predicts" in each.found.info],
            "num_samples": self.count,
            "first_seed": self.options.first_seed,
            "labels": self.options.labels,
            "sampler": sampler.solver,
            "steps": sampler.steps,
            "nfe": sampler.nfe(saved.process),
            "guidance": sampler.guidance.describe(),
            "weak_network": weak and weak.sha256,
            "weak_process": weak and _decisive(weak.process),
            "routes": [_decisive(route) for network in routed for route in network.routes(sampler.guidance)],
            "dtype": sampler.precision,
            "batch_size": sampler.batch_size,
            "compiled": self.compiled,
            "decoder": self.decoder,
            "decode_precision": None if decoded_in == "fp32" else decoded_in,
            "latents": {key: getattr(latents, key) for key in ("scale", "shift", "channel_shift", "channel_scale")},
            saved.cfg.objective: _decisive(saved.process),
            "reference": reference,
            "inception": inception,
            "prompts": self.prompts and self.prompts.sha256,
            "clip": clip,
            "plugins": plugin_hashes([*self.options.plugins, *saved.cfg.plugins, *(weak.cfg.plugins if weak else ())]),
        }
        return {key: value for key, value in decisive.items() if value or key not in OPTIONAL}


def _decisive(part: Process | Route) -> dict:
    """Return the fields of a diffusion process or a route, {name: value}. Fields that older scores did not record are
    left out if they have their default value, so that older scores are still found."""
    added = ("direction", "shift", "train_shift", "predicts", "loss_of", "clamp", "contrastive")  # of a process
    added += ("rejoin",)  # of a route
    return {key: value for key, value in asdict(part).items() if key not in added or value != getattr(type(part), key)}


def plan_scoring(
    options: ScoringOptions, entry: checkpoint.Checkpoint, precision: str, compiled: bool = False
) -> ScoringPlan:
    """Decide how the checkpoint `entry` is scored, without opening the reference. The device must support `precision`
    and, if `compiled`, torch.compile. Raises ValueError or FileNotFoundError if the options do not fit."""
    saved = open_network(entry, options.weights, options.shift)
    weak, dataset = open_weak(options.guidance, saved), saved.cfg.dataset
    kind = (dataset.embedded, saved.cfg.model.takes_text)
    judged = kind in EMBEDDED and not (options.reference or options.prompts or options.clip)
    count = options.num_samples or (EMBEDDED_COUNT if judged else TEXT_COUNT if saved.text else COUNT)
    judge = EMBEDDED[kind](saved, count, options.inception) if judged else Unscored()
    prompts = judge.prompts or _settle_prompts(options, saved)
    if judge.prompts:
        options = replace(options, labels="balanced")
    if not (options.save_samples or options.reference or judged or prompts):
        kinds = "ADM's .npz, an .npz with mu and sigma, a folder or a tar of pictures"
        needs = f"which needs reference=…: {kinds} (save_samples=true draws without scoring)"
        raise ValueError(f"{entry.folder} is of dataset {dataset.name}, {needs}")
    batch_size = min(options.batch_size, count)
    sampler = Sampler.of(saved.process, options.steps, options.solver, batch_size, precision, options.guidance)
    outlines = [network and network.without_weights(options.guidance) for network in (saved, weak)]
    check_ratios(sampler, *outlines)
    return ScoringPlan(
        options,
        saved,
        weak,
        sampler,
        count,
        compiled=compiled and (options.compile is True or not options.guidance.scheduled),
        decoder=autoencoder.decoder_hash(saved.latents, options.autoencoder),
        judge=judge,
        prompts=prompts,
        flops=sampler.flops(*outlines),
        flops_relative=relative_cost(sampler, *outlines),
    )


def _settle_prompts(options: ScoringOptions, saved: SavedNetwork) -> ScoredPrompts | None:
    """Open the captions on which a text-conditional network is scored; return None for a class-conditional one. Raises
    FileNotFoundError or ValueError if they can't be opened, or if prompts or clip is set for a network with classes."""
    if saved.text is not None:
        return open_prompts(saved, options.prompts or HELDOUT, with_words=options.clip is not None)
    for key in ("prompts", "clip"):
        if (value := getattr(options, key)) is not None:
            raise ValueError(f"{key}={value} is for captions, but {saved.found.folder} was trained with classes")
    return None


def settle_reference(options: ScoringOptions, plans: list[ScoringPlan]) -> ScoringOptions:
    """Return the options with reference names replaced by folders: "cifar10-test" by CIFAR-10's test pictures, which
    are downloaded if missing, "heldout" by the networks' held-out data. If no reference is set, "heldout" is also used
    for text-conditional networks, unless EmojiJudge scores them or save_samples is set. Raises OSError or ValueError if
    the download fails, or if the networks have no held-out data or different ones."""
    unnamed = options.reference is None and not options.save_samples
    unnamed &= any(plan.prompts and not plan.judge.prompts for plan in plans)
    if options.reference == "cifar10-test":  # the test pictures of CIFAR-10
        return replace(options, reference=str(cifar10.heldout_of(find_cifar10(plans, make=True))))
    if not plans or not (options.reference == HELDOUT or unnamed):
        return options
    folders = {str(heldout_folder(plan.saved)) for plan in plans}
    if len(folders) > 1:
        raise ValueError(f"checkpoints differ in held-out data ({', '.join(sorted(folders))}): score them one by one")
    return replace(options, reference=folders.pop())


def find_cifar10(plans: list[ScoringPlan], make: bool) -> Path:
    """Return the folder of CIFAR-10's training pictures: that of the first network in `plans` trained on them, else
    data/cifar10. If `make`, write it if missing, downloading if needed; ValueError or OSError if that fails."""
    datasets = [plan.saved.cfg.dataset for plan in plans if plan.saved.cfg.dataset.embedded == "cifar10"]
    folder = Path(datasets[0].path if datasets else "data/cifar10")
    if make:
        cifar10.prepare_cifar10(folder, datasets[0].archive if datasets else None)
    return folder


def add_shipped_pictures(
    scorer: ReferenceScorer, options: ScoringOptions, plans: list[ScoringPlan], processes: Processes
) -> None:
    """Add CIFAR-10's training pictures (see find_cifar10) to the scorer's reference "cifar10", for metrics that need
    pictures: the package has only its statistics. With options.reference_features, download them if missing, and raise
    ValueError if their number is wrong; without it, add them only if their features are in the cache."""
    with processes.main_first():
        folder = find_cifar10(plans, make=options.reference_features)
    if not (folder / "index.json").is_file():
        return
    try:
        pictures, reference = open_pictures(folder, None, processes), scorer.reference
    except ValueError:  # other files in this folder are no error unless features are wanted
        if options.reference_features:
            raise
        return
    missing = processes.from_main(lambda: feature_store(pictures, Path(options.cache), scorer.network).missing())
    if pictures.count == reference.count and (options.reference_features or not missing):
        scorer.reference = replace(reference, pictures=pictures)  # its hash stays: a cache changes no score's settings
    elif options.reference_features:
        raise ValueError(f"{folder} holds {pictures.count:,} pictures, but CIFAR-10 has {reference.count:,}")


def settle_crop(options: ScoringOptions, plans: list[ScoringPlan]) -> Crop | None:
    """Return how photos of the reference and samples are cropped; None if options.crop is null. A null orientation or
    alpha is replaced by the value used for the checkpoints' training photos; without checkpoints, EXIF orientation is
    applied, and transparent pixels are laid on white. Raises ValueError if checkpoints differ in such a value."""
    if options.crop is None:
        return None
    chosen = []
    for key, usual in (("orientation", "exif"), ("alpha", "white")):
        asked = getattr(options, key)
        recorded = sorted({getattr(plan.saved.latents, key) for plan in plans}) or [usual]
        if len(recorded) > 1 and asked is None:
            trained = f"the checkpoints were trained on photos read with {key}={' and '.join(recorded)}"
            raise ValueError(f"{trained}: set {key}=…, or score them one by one")
        chosen.append(asked or recorded[0])
    return Crop(options.crop, *chosen)


def files_beside(options: ScoringOptions) -> ScoreFiles:
    """Return where to write the score of options.samples: in options.out or, if that is null, beside the samples."""
    if options.out:
        return ScoreFiles(Path(options.out))
    path = Path(options.samples)
    path = path.resolve() if path.name in ("", "..") else path
    name = path.stem if path.is_file() else path.name  # also a folder in a tar
    return ScoreFiles(next(parent for parent in path.parents if parent.is_dir()), f"{name}.")


def check_target(path: Path, reference: Reference) -> None:
    """Raise ValueError if `reference` lacks pictures or has mu and sigma, OSError if `path` exists or can't be made."""
    if reference.pictures is None:
        raise ValueError(f"{reference.where} holds no pictures to make statistics of")
    if reference.stated:
        raise ValueError(f"{reference.where} holds mu and sigma already, maybe not those of the pictures in it")
    if path.exists():
        raise FileExistsError(f"save_reference={path} is there already; remove it, or choose another name")
    check_place(path.parent, 0)


class CheckpointScoring:
    """Scores one checkpoint as `plan` says, by `scorer` and by `clip`, the CLIP score (None: not computed).

    settings  everything that decides the score, as ScoringPlan.fingerprint returns it.
    files     paths of fid.json, fid.png and samples.npz.
    lines     path of fid.csv, to which a line is appended.
    parts     store of the samples and their features, kept until they are scored; they do not depend on the reference.
    seconds   time that this process took to draw samples, "sampling", and to extract features, "features".
    """

    def __init__(self, plan: ScoringPlan, scorer: Scorer, clip: ClipScore | None, processes: Processes) -> None:
        self.plan, self.scorer, self.clip, self.processes = plan, scorer, clip, processes
        out = plan.options.out and Path(plan.options.out)
        self.files, self.lines = ScoreFiles(out or plan.folder), (out or plan.folder.parent) / "fid.csv"
        self.settings = plan.fingerprint(**scorer.hashes, clip=clip and clip.sha256)
        drawn = {key: value for key, value in self.settings.items() if key != "reference"}
        name = f".fid-{content_hash(json.dumps(drawn))[:12]}"
        size = part_size(plan.count, plan.sampler.batch_size)
        self.parts = ShardStore(self.files.folder / name, drawn, pieces_of(plan.seeds, size))
        self.seconds = Counter(sampling=0.0, features=0.0)

    def find_score(self) -> dict | None:
        """Return an earlier fid.json with the same settings, and print its table; None if there is none. With
        save_samples it must have a samples.npz; with reference_features its reference pictures must be the same."""
        options = self.plan.options
        of = {"reference_pictures": self.scorer.reference.pictures.sha256} if options.reference_features else {}
        path, record = self.files.find(self.settings, with_samples=options.save_samples, **of) or (None, None)
        if record is not None:
            tqdm.write(f"{self.plan.folder} is scored already with these settings: {path}\n{table(record)}")
        return record

    def check(self, decoder: autoencoder.Decoder) -> None:
        """Raise ValueError unless samples are RGB and of the reference's size; in the main process, OSError if a folder
        is not writable or has no room for the samples still to draw, their features and, if wanted, samples.npz."""
        plan, shape = self.plan, self.plan.saved.latents.shape
        picture = decoder(torch.zeros(1, *shape, device=self.processes.device)).cpu()
        if self.scorer.reference is not None:
            check_size(plan.folder, tuple(picture.shape[1:]), self.scorer.reference)
        if self.processes.main:
            kept = sum(rows.nbytes for rows in self.scorer.prepare(picture).values())
            needed = self.parts.rows(self.parts.missing()) * (picture.nbytes + kept)
            check_place(self.files.folder, needed + plan.options.save_samples * plan.count * picture.nbytes)
            check_place(self.lines.parent, 0)

    def score(self, decoder: autoencoder.Decoder) -> dict | None:
        """Draw samples into the store `parts`, score them, and remove them. Returns fid.json's content in the main
        process, None in the others; if another launch has made the score meanwhile, nothing is drawn, and all processes
        return its content. Raises FileExistsError if another launch is scoring in this folder."""
        began, folder, plan, processes = time.perf_counter(), self.files.folder, self.plan, self.processes
        with processes.lock(folder / ".fid.lock", f"another process is scoring in {folder}"):
            record = processes.from_main(self.find_score)
            if record is not None:  # another launch scored it meanwhile
                return record
            processes.from_main(lambda: self.parts.begin(again=True))
            how = describe_drawing(plan.saved, plan.sampler, plan.flops_relative)
            processes.say(f"{plan.folder}: {plan.count:,} samples of {how}")
            for other in set(folder.glob(".fid-*")) - {self.parts.work}:
                processes.say(f"  note: {other} holds unfinished work with other settings; remove it if unwanted")
            for text in (*plugin_changes(plan.saved.found.info), *self.scorer.warnings(plan.count)):
                processes.say(f"  note: {text}")
            self.parts.share(processes, "samples", partial(self._draw, decoder), verify=True)
            if processes.main:
                record = self._record()
                record["seconds"]["total"] = time.perf_counter() - began
                self._write_down(record)
                self.parts.remove()
            processes.wait()
        return record

    def _draw(self, decoder: autoencoder.Decoder, numbers: list[int], done: Callable[[int], object]) -> None:
        """Draw samples for the shards `numbers` of the store self.parts, and store them with the arrays that
        Scorer.prepare returns and any CLIP scores. `done` is called with the number of samples in each batch."""
        if not numbers:
            return
        plan, guidance, device = self.plan, self.plan.sampler.guidance, self.processes.device
        model, weak = plan.saved.load(device, guidance), plan.weak and plan.weak.load(device, guidance)
        if plan.compiled:
            compile_blocks([block for branch in (model, weak) if branch for block in branch.network.compiled()])
        num_labels = plan.prompts.count if plan.prompts else model.num_labels
        for number in numbers:
            seeds, began = self.parts.ranges[number], time.perf_counter()
            labels = asked = seeded_labels(seeds, num_labels, plan.options.labels)
            if plan.prompts is not None:  # only this part's prompts, to save memory
                model, asked = replace(model, prompts=plan.prompts.read(labels.numpy())), torch.arange(len(labels))
            drawn = []
            for pictures in draw_pictures(model, decoder, seeds, asked, plan.sampler, weak, check=True):
                drawn.append(pictures)
                done(len(pictures))
            pictures, sampled = torch.cat(drawn), time.perf_counter()
            arrays = {"pictures": pictures.numpy(), "labels": labels.numpy(), **self.scorer.prepare(pictures)}
            if self.clip is not None:
                arrays[CLIP] = self.clip.score(pictures, [plan.prompts.words[label] for label in labels.tolist()])
            seconds = {"sampling": sampled - began, "features": time.perf_counter() - sampled}
            self.parts.keep(number, arrays, seconds=seconds)
            self.seconds.update(seconds)

    def _record(self) -> dict:
        plan, parts, began, total = self.plan, self.parts, time.perf_counter(), Counter()
        parts.check_complete(self.processes)
        for note in parts.notes():
            total.update(note["seconds"])
        record = common_record(self.scorer, parts, plan.count, self.processes)
        if self.clip is not None:
            record[CLIP] = float(parts.whole(CLIP).mean(dtype="float64"))
            record["counts"][CLIP] = plan.count
        if (decoded_in := plan.options.decode_precision) != "fp32":
            note = f"pictures were decoded in {decoded_in}; published numbers are of fp32"
            record["warnings"] = [*record["warnings"], note]
        if plan.prompts is not None:
            record["prompts"] = str(plan.prompts.data.folder)
        return record | {
            "checkpoint": str(plan.folder),
            "revision": plan.saved.found.revision,
            "step": plan.saved.found.step,
            "resolution": list(parts.first("pictures", 1).shape[2:]),
            "ema": plan.saved.weights == "ema",
            "seeds": [plan.seeds[0], plan.seeds[-1]],
            "settings": self.settings,
            "weak_network": plan.weak and str(plan.weak.found.folder),
            "shift": plan.saved.shift,
            "flops": plan.flops,
            "flops_relative": plan.flops_relative,
            "seconds": {
                "reference": self.scorer.seconds,
                **self.seconds,
                "scoring": time.perf_counter() - began,
                "of_all_processes_and_launches": total,
            },
        }

    def _write_down(self, record: dict) -> None:
        """Write fid.json and fid.png, add a line to fid.csv, write samples.npz if wanted, and print the score."""
        files, parts = self.files, self.parts
        with explain_failure(files.folder):
            files.make_room(self.settings, NAMES if self.plan.options.save_samples else NAMES[1:])
            save_grid(files.path("fid.png"), parts.first("pictures", GRID), columns=8)
            if self.plan.options.save_samples:
                tqdm.write(f"  writing   {files.path('samples.npz')}")
                save_npz(files.path("samples.npz"), parts.arrays("pictures"), parts.whole("labels"))
            add_line(self.lines, record)  # first: if this fails, the same command scores again
            write_json(files.path("fid.json"), record)
        tqdm.write(f"{table(record)}\n  written   {files.path('fid.json')}")


def common_record(
    scorer: Scorer, samples: ShardStore, count: int, processes: Processes, pictures: Pictures | None = None
) -> dict:
    """Return the items that every fid.json has: the metrics' values, the number of samples behind each (`count`, unless
    the scorer states its own), why other metrics have no value, warnings, the reference, time, command, device and
    versions. `pictures` are the samples if they come from files, to count damaged ones; None: they were generated."""
    (values, unavailable, counts), reference = scorer.score(samples), scorer.reference
    sets = {"skipped": pictures, "reference_skipped": reference and reference.pictures}
    return {
        **values,
        "count": count,
        "counts": dict.fromkeys(values, count) | counts,
        "unavailable": unavailable,
        "warnings": scorer.warnings(count),
        "reference": reference and reference.where,
        "reference_count": reference and reference.count,
        "reference_statistics": reference and reference.statistics_from,
        "reference_pictures": reference and reference.pictures and reference.pictures.sha256,
        **{key: len(found.damaged) for key, found in sets.items() if found and found.damaged},
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
        "device": device_name(processes.device),
        "processes": processes.count,
        "versions": versions(),
    }


def score_pictures(samples: Pictures, scorer: ReferenceScorer, options: ScoringOptions, processes: Processes) -> None:
    """Score pictures made elsewhere; the main process writes and prints fid.json. Features are put in options.cache."""
    for text in scorer.warnings(samples.count):
        processes.say(f"  note: {text}")
    began = time.perf_counter()
    samples, features = extract_all(samples, Path(options.cache), scorer.network, processes)
    extracted = time.perf_counter()
    if processes.main:
        record = common_record(scorer, features, samples.count, processes, samples) | {
            "samples": options.samples,
            "settings": {"samples": samples.sha256, **scorer.hashes},
            "seconds": {
                "reference": scorer.seconds,
                "features": extracted - began,
                "scoring": time.perf_counter() - extracted,
            },
        }
        files = files_beside(options)
        with explain_failure(files.folder):
            files.make_room(record["settings"], ["fid.json"], options.samples)
            write_json(files.path("fid.json"), record)
        tqdm.write(f"{table(record)}\n  written   {files.path('fid.json')}")
    processes.wait()
