"""A study: one YAML, and the ordinary runs of train.py and fid.py that it means.

A training is known by the hash of what is said of it (overrides, budget, seed), a score by that of its own words, not
by folders: studies that say the same share them, and a published result counts as made though its folder is gone.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from scripts.judge_emoji import Options as JudgeOptions
from scripts.similarity import Options as SimilarityOptions
from tread.checkpoints.network import build_network
from tread.evaluation.scoring import ScoringOptions
from tread.models.architectures import TextSettings
from tread.models.backbone import Backbone
from tread.runtime import schema
from tread.runtime.schema import Count, CountOrZero, Positive, TwoOrMore
from tread.training import settings
from tread.training.step import active_routes

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
DOORS = {
    "fid.py": schema.known_keys(ScoringOptions),
    "scripts/similarity.py": schema.known_keys(SimilarityOptions),
    "scripts/judge_emoji.py": schema.known_keys(JudgeOptions),
}  # door → its keys
COUNTED = dict.fromkeys(DOORS, "num_samples") | {"scripts/similarity.py": "samples"}  # door → how it calls the count
CLIP_L = TextSettings("clip-l", tokens=77, width=768, pooled=768)
ScaleName = Literal["demo", "small", "paper"]


@dataclass(frozen=True)
class Scale:
    """How large the runs are.

    overrides     of train.py, for all arms; {data} stands for the folder of the data.
    images        seen in training by each run.
    seeds         so many: 0, 1, ….
    evaluate      images between evaluation losses.
    save          images between checkpoints.
    score         images between scores, a multiple of save; 0: only the end is scored.
    scoring       overrides of the door that scores; {data} as above.
    samples       drawn for a score; 0: none is made.
    last_samples  for the last one; null: as many.
    needs         what must be there first, in words; null: the clone suffices.
    """

    overrides: tuple[str, ...]
    images: Count
    seeds: Count
    evaluate: Count
    save: Count
    score: CountOrZero
    scoring: tuple[str, ...]
    samples: CountOrZero
    last_samples: TwoOrMore | None
    needs: str | None


@dataclass(frozen=True)
class Figure:
    """What is drawn of metrics of the runs' points.

    kind  curves: over images and over FLOPs; ends: at the end, arm by arm; own: what studies/<name>.py's `draw` draws.
    """

    kind: Literal["curves", "ends", "own"]
    metrics: tuple[str, ...]


@dataclass(frozen=True)
class Arm:
    """One kind of run: overrides of train.py, where {75%} is that share of its steps, and what differs from the scale.

    flops    the budget in training FLOPs, in the place of images.
    scoring  overrides of the door that scores, behind the scale's; {75%} is the run's checkpoint nearest to that share.
    """

    overrides: tuple[str, ...]
    seeds: Count | None = None
    images: Count | None = None
    flops: Positive | None = None
    score: CountOrZero | None = None
    samples: CountOrZero | None = None
    last_samples: TwoOrMore | None = None
    scoring: tuple[str, ...] = ()


@dataclass(frozen=True)
class Study:
    """What a YAML says, at one scale.

    arms       by name.
    against    arm → the arm that its differences are taken to; others have none.
    scored_by  the door that scores a checkpoint, at this scale.
    """

    name: str
    title: str
    question: str
    arms: dict[str, Arm]
    against: dict[str, str]
    figure: Figure
    scored_by: Literal["fid.py", "scripts/similarity.py", "scripts/judge_emoji.py"]
    scale_name: ScaleName
    scale: Scale


@dataclass(frozen=True)
class Training:
    """A run of train.py.

    overrides  of train.py, but for its place and seed.
    save       steps between its checkpoints.
    cfg        the settings that train.py will read, with {data} as data.
    """

    overrides: tuple[str, ...]
    seed: int
    save: int
    cfg: settings.Settings

    @property
    def steps(self) -> int:
        return self.cfg.train.steps

    @property
    def images(self) -> int:
        return self.steps * self.cfg.train.batch_size

    @property
    def key(self) -> str:
        """Of the last word on each key, in any order."""
        return _hash([sorted(_last_words(self.overrides)), self.seed])


@dataclass(frozen=True)
class Score:
    """What is measured at a checkpoint.

    door   a script, from the root.
    words  its overrides; {data}, and {step N} for the run's checkpoint of that step.
    """

    step: int
    door: str
    words: tuple[str, ...]

    @property
    def key(self) -> str:
        return _hash([self.step, self.door, sorted(self.words)])


@dataclass(frozen=True)
class Planned:
    """An arm by a seed."""

    arm: str
    training: Training
    scores: tuple[Score, ...]

    @property
    def folder(self) -> str:
        name = re.sub(r"[^\w.]|→", "_", self.arm)
        return f"{re.sub('__+', '_', name).strip('_')}-{self.training.seed}-{self.training.key}"


def _hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def names() -> list[str]:
    """All studies that there are."""
    return sorted(path.stem for path in HERE.glob("*.yaml") if path.stem != "scales")


def read_study(name: str, scale: ScaleName) -> Study:
    """A study at a scale: studies/scales.yaml, what the study says of that scale over it. Raises ValueError."""
    schema.check("scale", scale, ScaleName)
    if name not in names():
        raise ValueError(f"there is no study {name!r}; there are {', '.join(names())}")
    tree = _yaml(HERE / f"{name}.yaml")
    by_scale = tree.pop("scales", {})
    shared = _yaml(HERE / "scales.yaml")[scale]
    said = by_scale.get(scale) or {}
    merged = {**shared, **said, "overrides": _last_words(shared["overrides"], said.get("overrides", []))}
    others, door = merged.pop("arms", {}), tree.pop("scored_by", "fid.py")
    try:
        trees = {arm: said if isinstance(said, dict) else {"overrides": said} for arm, said in tree.pop("arms").items()}
        arms = {arm: schema.read(said | others.get(arm, {}), Arm, f"arms.{arm}.") for arm, said in trees.items()}
        against = tree.pop("against", {})
        study = Study(
            name=name,
            arms=arms,
            against=against,
            scored_by=merged.pop("scored_by", door),
            figure=schema.read(tree.pop("figure"), Figure, "figure."),
            scale_name=scale,
            scale=schema.read(merged, Scale, f"scales.{scale}."),
            **tree,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"studies/{name}.yaml is no study: {type(error).__name__}: {error}") from error
    if unknown := {*against, *against.values(), *others} - {*arms}:
        raise ValueError(f"studies/{name}.yaml names {', '.join(sorted(unknown))}, which are no arms of it")
    return study


def _yaml(path: Path) -> dict:
    try:
        return OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OmegaConfBaseException, OSError) as error:
        raise ValueError(f"{path} can't be read: {error}") from error


def plan(study: Study, seeds: int | None = None) -> list[Planned]:
    """The runs of a study, seed by seed, so that an interrupted one has all arms of the first. Raises ValueError."""
    counts = {name: seeds or arm.seeds or study.scale.seeds for name, arm in study.arms.items()}
    return [_planned(study, arm, seed) for seed in range(max(counts.values())) for arm in counts if seed < counts[arm]]


def _planned(study: Study, name: str, seed: int) -> Planned:
    scale, arm = study.scale, study.arms[name]
    chosen = _last_words(scale.overrides, arm.overrides)
    cfg = settings_of(*(word for word in chosen if "%}" not in word))
    batch, images = cfg.train.batch_size, arm.images or scale.images
    if arm.flops:
        images = round(arm.flops / (3 * build_on_meta(cfg).forward_flops(active_routes(cfg, 0))))
    last, evaluate, save = (round(count / batch) for count in (images, scale.evaluate, scale.save))
    between = scale.score if arm.score is None else arm.score
    if not min(last, evaluate, save) or between % scale.save:
        raise ValueError(
            f"studies/{study.name}.yaml, {name}: images, evaluate and save must be a batch of {batch} or more, and "
            f"score a multiple of save; they are {images}, {scale.evaluate}, {scale.save} and {between}"
        )
    score = between // scale.save * save or last
    chosen = [_shares(word, lambda share: str(round(last * share))) for word in chosen]
    cfg = replace(settings_of(*chosen), seed=seed)
    cfg = replace(cfg, train=replace(cfg.train, steps=last), every=replace(cfg.every, evaluate=evaluate, save=save))
    chosen += [f"train.steps={last}", f"every.evaluate={evaluate}", f"every.save={save}", f"every.sample={last}"]
    training = Training((*chosen, "eval.demo_samples=0"), seed, save, cfg)

    samples = scale.samples if arm.samples is None else arm.samples
    counts = dict.fromkeys(range(score, last, score), samples)
    counts[last] = arm.last_samples or (scale.last_samples if arm.samples is None else None) or samples
    words = _last_words(scale.scoring, arm.scoring)
    schema.check_overrides(words, DOORS[study.scored_by])
    words = [_shares(word, lambda share: f"{{step {round(last * share / save) * save}}}") for word in words]
    counted = {step: f"{COUNTED[study.scored_by]}={count}" for step, count in counts.items() if count}
    return Planned(name, training, tuple(Score(step, study.scored_by, (*words, w)) for step, w in counted.items()))


def _last_words(*overrides: Sequence[str]) -> list[str]:
    """Overrides one after the other, without those that a later one of the same key replaces."""
    return list({word.partition("=")[0]: word for words in overrides for word in words}.values())


def _shares(word: str, written: Callable[[float], str]) -> str:
    """A word with each {75%} replaced by what a function makes of 0.75."""
    return re.sub(r"\{(\d+)%\}", lambda match: written(int(match[1]) / 100), word)


def build_on_meta(cfg: settings.Settings) -> Backbone:
    """The network without numbers, to be asked what it costs; of texts as the dataset says, CLIP-L's without it."""
    if cfg.model.takes_text:
        there = cfg.dataset.embedded or Path(cfg.dataset.path).exists()
        cfg = replace(cfg, text=settings.read_text_settings(cfg) if there else CLIP_L)
    with torch.device("meta"):
        return build_network(cfg)


@functools.cache
def settings_of(*overrides: str) -> settings.Settings:
    """What train.py reads from overrides. Raises ValueError."""
    schema.check_overrides(overrides, [*settings.known_keys(), "experiment"])
    words = settings.add_unstated(overrides)
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "configs")):
        composed = compose("config", overrides=[override.replace("{data}", "data") for override in words])
    return settings.read(OmegaConf.to_container(composed, resolve=True))
