"""Scores of checkpoints or pictures. Read from `run` down.

Everything is settled and checked before long work starts. Processes share the work part by part; after a stop, the same
command goes on with the missing parts.
"""

from __future__ import annotations

import datetime
import glob
import hashlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

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
from tread.encoders.inception import Pictures, extract_all, feature_sizes, find_weights, part_size
from tread.evaluation.image_sets import open_pictures, save_npz
from tread.evaluation.prompts import HELDOUT, ScoredPrompts, heldout_folder, open_prompts
from tread.evaluation.reference import Reference, check_size, open_reference, save_statistics
from tread.evaluation.score_files import ScoreFiles, add_line, table
from tread.evaluation.scorers import EMBEDDED, ReferenceScorer, Scorer, choose_scorer, open_scorer
from tread.preparing.images import Crop
from tread.runtime import schema
from tread.runtime.compiling import Compile, compile_blocks, settle_compile
from tread.runtime.device import Precision, device_name, use_precision
from tread.runtime.distributed import Processes
from tread.runtime.files import check_place, explain_failure, sha256
from tread.runtime.schema import Count, CountOrZero, Positive, TwoOrMore
from tread.runtime.tensor_files import Weights
from tread.runtime.versions import versions

CLIP = "clip_score"  # its name in METRICS, and of its parts
COUNT, TEXT_COUNT, EMBEDDED_COUNT = 50_000, 10_000, 1000  # samples, unless a number is asked for
GRID = 64  # pictures of fid.png


@dataclass(frozen=True)
class ScoringOptions:
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
    plugins: tuple[str, ...] = ()

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


def read_options(config: dict) -> ScoringOptions:
    """The options with ~ in paths expanded, where the shell has not done it."""
    paths = ("checkpoint", "samples", "reference", "save_reference", "prompts", "clip")
    paths += ("inception", "autoencoder", "out", "cache")
    for section, keys in ((config, paths), (config["guidance"], ("checkpoint",))):
        section |= {key: str(Path(section[key]).expanduser()) for key in keys if section[key]}
    return schema.read(config, ScoringOptions)


@dataclass(frozen=True)
class ScoringPlan:
    """How a checkpoint is scored.

    weak        the weak network of the guidance, if it is another one.
    embedded    the dataset whose own judge scores it, where there is no reference.
    compiled    whether the networks' blocks are compiled for drawing samples.
    decoder     fingerprint of the decoder of its latents.
    prompts     the captions that are drawn, for a network that takes texts.
    flops       of the networks, per sample; flops_relative: their ratio to the same steps without guidance.
    reference, inception, clip
                sha256 of the reference, and of the networks that score; None without them.
    """

    saved: SavedNetwork
    weak: SavedNetwork | None
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
    def folder(self) -> Path:
        return self.saved.found.folder

    @property
    def nfe(self) -> int:
        """Network function evaluations a sample."""
        return self.sampler.nfe(self.saved.process)

    @property
    def num_labels(self) -> int:
        """How many classes or captions samples are drawn from."""
        return self.saved.cfg.dataset.num_classes if self.prompts is None else self.prompts.count

    @property
    def seeds(self) -> range:
        return range(self.first_seed, self.first_seed + self.count)

    @property
    def fingerprint(self) -> dict:
        """Everything that decides the numbers, as JSON: with an equal fingerprint nothing is scored again."""
        saved, weak, sampler, latents = self.saved, self.weak, self.sampler, self.saved.latents
        routed = [network for network in (saved, weak) if network and sampler.guidance.row.routed]
        routes = [asdict(route) for network in routed for route in network.routes(sampler.guidance)]
        for route in routes:
            if route["rejoin"] is None:
                del route["rejoin"]  # as in scores from before it existed, so that they are recognised
        return {
            "step": self.saved.found.step,
            "checkpoint": saved.sha256,
            "weights": saved.weights,
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
            saved.cfg.objective: _constants(saved.process),
            "reference": self.reference,
            "inception": self.inception,
            **({"prompts": self.prompts.sha256} if self.prompts else {}),
            **({"clip": self.clip} if self.clip else {}),
        }


def _constants(process: Process) -> dict:
    """A process's constants, without later ones at their defaults, so that older scores are recognised."""
    added = {"direction": 0.0, "shift": 1.0}
    return {key: value for key, value in asdict(process).items() if key not in added or value != added[key]}


def settle_paths(options: ScoringOptions) -> tuple[ScoringOptions, list[Path]]:
    """Resolve the checkpoints, as `latest` may soon name another one.

    Returns the options with the weak network's folder, and the folders that options.checkpoint (a path, or a pattern
    with *) names: each once, by step. Raises FileNotFoundError or ValueError.
    """
    pattern, weak = options.checkpoint, options.guidance.checkpoint
    paths = [pattern] if pattern else []
    if pattern and not Path(pattern).exists() and any(sign in pattern for sign in "*?["):
        paths = glob.glob(pattern)
        if not paths:
            raise FileNotFoundError(f"no checkpoint matches {pattern}")
    steps = {source.folder: source.step for source in (checkpoint.find(Path(path)) for path in paths)}
    if weak is not None:
        weak = str(checkpoint.find(Path(weak)).folder)
        options = replace(options, guidance=replace(options.guidance, checkpoint=weak))
    return options, sorted(steps, key=lambda folder: (str(folder.parent), steps[folder]))


def settle_crop(options: ScoringOptions, plans: list[ScoringPlan]) -> Crop | None:
    """How photos are read: as asked, else as the checkpoints' training photos; without checkpoints exif and white.

    Raises ValueError if the checkpoints' photos were read in different ways.
    """
    chosen = {}
    for key, usual in (("orientation", "exif"), ("alpha", "white")) if options.crop else ():
        recorded = sorted({getattr(plan.saved.latents, key) for plan in plans}) or [usual]
        if len(recorded) > 1 and getattr(options, key) is None:
            raise ValueError(
                f"the checkpoints were trained on photos read with {key}={' and '.join(recorded)}: set {key}=…, or "
                "score them one by one"
            )
        chosen[key] = getattr(options, key) or recorded[0]
    return Crop(options.crop, **chosen) if options.crop else None


def plan_scoring(
    options: ScoringOptions, entry: checkpoint.Checkpoint, precision: str, compiled: bool = False
) -> ScoringPlan:
    """Settle how a checkpoint is scored, except for the reference; precision and compiled are settled ones.

    Raises ValueError or FileNotFoundError if it cannot be scored that way.
    """
    saved = open_network(entry, options.weights, options.shift)
    weak, cfg, process = open_weak(options.guidance, saved), saved.cfg, saved.process
    prompts = _settle_prompts(options, saved)
    judged = cfg.dataset.embedded in EMBEDDED and prompts is None and options.reference is None
    embedded = cfg.dataset.embedded if judged else None
    if not options.save_samples and options.reference is None and embedded is None and prompts is None:
        raise ValueError(
            f"{entry.folder} is of dataset {cfg.dataset.name}, which needs reference=…: ADM's .npz, an .npz with mu "
            "and sigma, a folder or a tar of pictures (save_samples=true draws without scoring)"
        )
    count = options.num_samples or (EMBEDDED_COUNT if embedded else TEXT_COUNT if prompts else COUNT)
    sampler = Sampler.of(
        process, options.steps, options.solver, min(options.batch_size, count), precision, options.guidance
    )
    outlines = [network and network.without_weights(options.guidance) for network in (saved, weak)]
    check_ratios(sampler, *outlines)
    return ScoringPlan(
        saved,
        weak,
        sampler,
        count,
        options.first_seed,
        options.labels,
        compiled=compiled and not options.guidance.scheduled,
        decoder=autoencoder.decoder_hash(saved.latents, options.autoencoder),
        embedded=embedded,
        flops=sampler.flops(*outlines),
        flops_relative=relative_cost(sampler, *outlines),
        prompts=prompts,
    )


def _settle_prompts(options: ScoringOptions, saved: SavedNetwork) -> ScoredPrompts | None:
    """The captions that a network is scored on; None for a network of classes.

    Raises ValueError or FileNotFoundError, also for options that a network of classes cannot use.
    """
    if saved.text is not None:
        prompts = open_prompts(saved, options.prompts or HELDOUT)
        if options.clip is not None:
            prompts.captions(torch.zeros(1, dtype=torch.int64))  # raises where only their encodings are known
        return prompts
    for key in ("prompts", "clip"):
        if (value := getattr(options, key)) is not None:
            raise ValueError(f"{key}={value} is of captions, but {saved.found.folder} was trained with classes")
    return None


def settle_reference(options: ScoringOptions, plans: list[ScoringPlan]) -> ScoringOptions:
    """The options, with the held-out data's folder as the reference if that is asked for (reference=heldout), or if no
    reference is named and all networks take texts. Raises ValueError or FileNotFoundError.
    """
    unnamed = options.reference is None and not options.save_samples and all(plan.prompts for plan in plans)
    if not plans or not (options.reference == HELDOUT or unnamed):
        return options
    folders = {str(heldout_folder(plan.saved)) for plan in plans}
    if len(folders) > 1:
        raise ValueError(
            f"the checkpoints have other held-out data ({', '.join(sorted(folders))}): score them one by one"
        )
    return replace(options, reference=folders.pop())


def run(options: ScoringOptions, processes: Processes) -> list[dict | None]:
    """Check everything first, then score one thing after the other.

    Returns the checkpoints' scores, in the main process.
    """
    options, paths = processes.from_main(lambda: settle_paths(options))
    precision = use_precision(options.precision, processes.device)
    compiled, reason = settle_compile(options.compile, processes.device)
    if reason:
        processes.say(f"warning: running without torch.compile, which fails here: {reason}")
    plans = [plan_scoring(options, checkpoint.find(path), precision, compiled) for path in paths]
    options = settle_reference(options, plans)
    crop = settle_crop(options, plans)
    if crop:
        processes.say(f"crop={crop.size} reads photos with orientation={crop.orientation} alpha={crop.alpha}")
    samples, reference, weights, inception, clip, feature_bytes = None, None, None, None, None, 0
    if options.samples is not None:
        samples = open_pictures(Path(options.samples), crop, processes)
    if options.reference is not None:
        with processes.main_first():  # one process fetches the weights
            weights = find_weights(options.inception)
        inception, sizes = sha256(weights), feature_sizes(weights)
        feature_bytes = 4 * sum(sizes)
        reference = open_reference(Path(options.reference), crop, processes, sizes)
    if options.clip is not None:
        with processes.main_first():
            clip = ClipScore(options.clip, processes.device)
    hashes = {"reference": reference and reference.sha256, "inception": inception, "clip": clip and clip.sha256}
    plans = [replace(plan, **hashes) for plan in plans]
    scorings = [CheckpointScoring(plan, options, processes) for plan in plans]
    records = processes.from_main(lambda: [scoring.find_score() for scoring in scorings])
    decoders, left = {}, [scoring for scoring, record in zip(scorings, records) if record is None]
    for scoring in left:
        latents = scoring.plan.saved.latents
        if latents not in decoders:
            decoders[latents] = autoencoder.load_decoder(latents, processes.device, options.autoencoder)
        picture = decoders[latents](torch.zeros(1, *latents.shape, device=processes.device))[0]
        if reference is not None:
            check_size(scoring.plan.folder, tuple(picture.shape), reference)
        if processes.main:
            scoring.check_space(picture.numel(), feature_bytes)
    if samples is not None:
        check_size(samples.where, (3, *samples.resolution), reference)
        check_place(files_beside(options).folder, 0)
    if options.save_reference:
        check_target(Path(options.save_reference), reference)
    against = None
    if reference is not None and (left or samples or options.save_reference):
        against = open_scorer(reference, weights, inception, Path(options.cache), processes)
    if options.save_reference:
        keep_statistics(Path(options.save_reference), against, processes)
    for number, scoring in enumerate(scorings):
        if scoring in left:
            scorer = choose_scorer(scoring.plan.embedded, against)
            records[number] = scoring.score(decoders[scoring.plan.saved.latents], scorer, clip)
    if samples is not None:
        score_pictures(samples, against, options, processes)
    return records


def files_beside(options: ScoringOptions) -> ScoreFiles:
    """Where the score of samples=… goes: beside them, with their name; of a folder inside a tar, beside the tar."""
    path = Path(options.samples)
    folder = next(parent for parent in path.parents if parent.is_dir())
    return ScoreFiles(Path(options.out)) if options.out else ScoreFiles(folder, f"{path.stem}.")


def check_target(path: Path, reference: Reference) -> None:
    """Raise ValueError or OSError unless the reference's statistics can be written to a new file."""
    if reference.pictures is None:
        raise ValueError(f"{reference.where} holds no pictures to make statistics of")
    if path.exists():
        raise FileExistsError(f"save_reference={path} is there already; remove it, or choose another name")
    check_place(path.parent, 0)


def keep_statistics(path: Path, scorer: ReferenceScorer, processes: Processes) -> None:
    """Write the reference's statistics."""
    if processes.main:
        pictures = scorer.reference.pictures
        with explain_failure(path):
            save_statistics(path, scorer.features, pictures.count, pictures.resolution, processes)
        processes.say(f"{path}: statistics of {pictures.count:,} pictures of {scorer.reference.where}")


class CheckpointScoring:
    """A checkpoint that is scored.

    files  where its score goes.
    lines  the table that gets a line of it.
    parts  its samples and their features, kept until they are scored; they do not depend on a reference.
    """

    def __init__(self, plan: ScoringPlan, options: ScoringOptions, processes: Processes) -> None:
        self.plan, self.options, self.processes = plan, options, processes
        self.files = ScoreFiles(Path(options.out) if options.out else plan.folder)
        self.lines = (Path(options.out) if options.out else plan.folder.parent) / "fid.csv"
        drawn = {key: value for key, value in plan.fingerprint.items() if key != "reference"}
        name = f".fid-{hashlib.sha256(json.dumps(drawn).encode()).hexdigest()[:12]}"
        size = part_size(plan.count, plan.sampler.batch_size)
        self.parts = ShardStore(self.files.folder / name, drawn, pieces_of(range(plan.count), size))

    def find_score(self) -> dict | None:
        """The record of an earlier scoring by the same settings, which is printed; None if something is left to do."""
        before = self.files.find(self.plan.fingerprint, with_samples=self.options.save_samples)
        if before is not None:
            tqdm.write(f"{self.plan.folder} is scored already by these settings: {before[0]}\n{table(before[1])}")
        return before and before[1]

    def check_space(self, picture_bytes: int, feature_bytes: int) -> None:
        """Raise OSError unless the disk can take what is left to draw, its features, and the files of the score."""
        needed = self.parts.rows(self.parts.missing()) * (picture_bytes + feature_bytes)
        check_place(self.files.folder, needed + self.options.save_samples * self.plan.count * picture_bytes)
        check_place(self.lines.parent, 0)

    def score(self, decoder: autoencoder.Decoder, scorer: Scorer, clip: ClipScore | None) -> dict | None:
        """Draw, score, and write down; what is drawn is kept until then. Returns the score in the main process."""
        began, folder, plan, processes = time.perf_counter(), self.files.folder, self.plan, self.processes
        with processes.lock(folder / ".fid.lock", f"another process is scoring in {folder}"):
            record = processes.from_main(self.find_score)
            if record is not None:  # by another launch meanwhile
                return record
            processes.from_main(lambda: self.parts.begin(again=True))
            guidance = plan.sampler.guidance
            shift = "" if plan.saved.shift in (None, 1) else f"shift {plan.saved.shift:g}, "
            cost = "" if guidance.kind == "none" else f"{plan.flops_relative:.3f} times the FLOPs of none, "
            processes.say(
                f"{plan.folder}: {plan.count:,} samples, guidance {guidance.describe()}, "
                f"NFE {plan.nfe}, {shift}{cost}{plan.sampler.precision}"
            )
            for other in set(folder.glob(".fid-*")) - {self.parts.work}:
                processes.say(f"  note: {other} holds unfinished work by other settings; remove it if unwanted")
            for text in scorer.warnings(plan.count):
                processes.say(f"  note: {text}")
            seconds = {"sampling": 0.0, "features": 0.0}
            draw = partial(self._draw, decoder, scorer, clip, seconds)
            self.parts.share(processes, "samples", draw, verify=True)
            if processes.main:
                record = self._conclude(scorer, seconds)
                record["seconds"]["total"] = time.perf_counter() - began
                self._write_down(record)
                self.parts.remove()
            processes.wait()
        return record

    def _draw(
        self,
        decoder: autoencoder.Decoder,
        scorer: Scorer,
        clip: ClipScore | None,
        spent: dict[str, float],
        numbers: list[int],
        done: Callable[[int], object],
    ) -> None:
        """Draw some parts, with what the scorer keeps of them; adds to the seconds that were spent, by stage."""
        if not numbers:
            return
        plan, guidance, device = self.plan, self.plan.sampler.guidance, self.processes.device
        model, weak = plan.saved.load(device, guidance), plan.weak and plan.weak.load(device, guidance)
        if plan.compiled:
            compile_blocks([block for branch in (model, weak) if branch for block in branch.network.compiled()])
        for number in numbers:
            seeds, began = [plan.seeds[i] for i in self.parts.ranges[number]], time.perf_counter()
            labels = asked = seeded_labels(seeds, plan.num_labels, plan.labels)
            if plan.prompts is not None:  # this part's alone, which are few
                model, asked = replace(model, prompts=plan.prompts.read(labels.numpy())), torch.arange(len(labels))
            drawn = []
            for pictures in draw_pictures(model, decoder, seeds, asked, plan.sampler, weak, check=True):
                drawn.append(pictures)
                done(len(pictures))
            pictures, sampled = torch.cat(drawn), time.perf_counter()
            arrays = {"pictures": pictures.numpy(), "labels": labels.numpy(), **scorer.prepare(pictures)}
            if clip is not None:
                arrays[CLIP] = clip.score(pictures, plan.prompts.captions(labels))
            seconds = {"sampling": sampled - began, "features": time.perf_counter() - sampled}
            self.parts.keep(number, arrays, seconds=seconds)
            for stage in spent:
                spent[stage] += seconds[stage]

    def _conclude(self, scorer: Scorer, seconds: dict[str, float]) -> dict:
        """Score what was drawn: the content of fid.json. seconds are those of this launch in the main process."""
        plan, parts = self.plan, self.parts
        parts.check_complete(self.processes)
        began, spent = time.perf_counter(), [note["seconds"] for note in parts.notes()]
        record = common_record(scorer, parts, plan.count, self.processes)
        if plan.clip is not None:
            record |= {CLIP: float(np.concatenate(list(parts.arrays(CLIP))).mean(dtype=np.float64))}
            record["counts"][CLIP] = plan.count
        if plan.prompts is not None:
            record["prompts"] = str(plan.prompts.folder)
        return record | {
            "checkpoint": str(plan.folder),
            "step": plan.saved.found.step,
            "resolution": list(parts.first("pictures", 1).shape[2:]),
            "ema": plan.saved.weights == "ema",
            "seeds": [plan.seeds[0], plan.seeds[-1]],
            "settings": plan.fingerprint,
            "weak_network": plan.weak and str(plan.weak.found.folder),
            "shift": plan.saved.shift,
            "flops": plan.flops,
            "flops_relative": plan.flops_relative,
            "seconds": {
                "reference": scorer.seconds,
                **seconds,
                "scoring": time.perf_counter() - began,
                "of_all_processes_and_launches": {stage: sum(part[stage] for part in spent) for stage in seconds},
            },
        }

    def _write_down(self, record: dict) -> None:
        """fid.json, fid.png, a line in fid.csv, and samples.npz if asked for; then print the table."""
        files, parts = self.files, self.parts
        with explain_failure(files.folder):
            files.make_room(self.plan.fingerprint)
            save_grid(files.path("fid.png"), parts.first("pictures", GRID), columns=8)
            if self.options.save_samples:
                tqdm.write(f"  writing   {files.path('samples.npz')}")
                labels = np.concatenate(list(parts.arrays("labels")))
                save_npz(files.path("samples.npz"), parts.arrays("pictures"), labels)
            add_line(self.lines, record)
            where = files.write(record)
        tqdm.write(f"{table(record)}\n  written   {where}")


def common_record(scorer: Scorer, samples: ShardStore, count: int, processes: Processes) -> dict:
    """What every fid.json has: each value with its count, and what it was made with."""
    (values, unavailable, counts), reference = scorer.score(samples), scorer.reference
    return {
        **values,
        "count": count,
        "counts": dict.fromkeys(values, count) | counts,
        "unavailable": unavailable,
        "warnings": scorer.warnings(count),
        "reference": reference and reference.where,
        "reference_count": reference and reference.count,
        "reference_statistics": reference and reference.statistics_from,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
        "device": device_name(processes.device),
        "processes": processes.count,
        "versions": versions(),
    }


def score_pictures(samples: Pictures, scorer: ReferenceScorer, options: ScoringOptions, processes: Processes) -> None:
    """Score pictures made elsewhere; their features are kept in the cache like a reference's."""
    for text in scorer.warnings(samples.count):
        processes.say(f"  note: {text}")
    began = time.perf_counter()
    features = extract_all(samples, Path(options.cache), scorer.network, scorer.weights, processes)
    extracted = time.perf_counter()
    if processes.main:
        record = common_record(scorer, features, samples.count, processes) | {
            "samples": options.samples,
            "settings": {"samples": samples.sha256, "reference": scorer.reference.sha256, "inception": scorer.weights},
            "seconds": {
                "reference": scorer.seconds,
                "features": extracted - began,
                "scoring": time.perf_counter() - extracted,
            },
        }
        files = files_beside(options)
        with explain_failure(files.folder):
            files.make_room(record["settings"])
            where = files.write(record)
        tqdm.write(f"{table(record)}\n  written   {where}")
    processes.wait()
