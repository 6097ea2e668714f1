"""Reads a study, which is one YAML file, and plans the runs of train.py and of the scoring scripts that it needs.

A training is identified by a hash of its overrides and seed, a score by a hash of its step, script and overrides. So
studies share equal runs, and a published result counts as done even without the run's folder."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Literal

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from tread.evaluation.metric_table import METRICS
from tread.models.architectures import TextSettings
from tread.models.backbone import Backbone
from tread.runtime import schema
from tread.runtime.files import content_hash
from tread.runtime.plugins import plugin_hashes
from tread.runtime.schema import Count, CountOrZero, Positive
from tread.training import costs, settings

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
ScaleName = Literal["demo", "small", "gpu", "paper"]
Script = Literal["fid.py", "scripts/similarity.py"]
CLIP_L = TextSettings("clip-l", tokens=77, width=768, pooled=768)


@dataclass(frozen=True)
class Arm:
    """One of the kinds of run that a study compares, at one scale.

    overrides  overrides for train.py; {data} stands for the data's folder, {75%} for that fraction of the run's steps.
    images     number of images to train on, with repetition.
    flops      number of training FLOPs after which to end, instead of after `images`; None: after `images`.
    seeds      number of seeds, which are first_seed, first_seed + 1, ….
    evaluate   images between evaluation losses.
    save       images between checkpoints.
    score      images between scores, a multiple of `save`; 0: only the last checkpoint is scored.
    scored_by  the script that scores a checkpoint.
    scoring    overrides for this script; {data} as above, {75%} stands for the checkpoint nearest to that step.
    samples    number of samples per score; 0: nothing is scored.
    needs      what the data's folder must contain, in words; None: nothing.
    seconds    time budget: training ends after so many seconds of steps (without compilation), or after `images` or
               `flops` if that is earlier. With a budget, only the first and last score are planned.
    """

    overrides: tuple[str, ...]
    images: Count
    seeds: Count
    evaluate: Count
    save: Count
    score: CountOrZero
    scored_by: Script
    scoring: tuple[str, ...]
    samples: CountOrZero
    needs: str | None
    seconds: Count | None = None
    flops: Positive | None = None
    first_seed: CountOrZero = 0


@dataclass(frozen=True)
class Study:
    """A study at one scale (how large its runs are: demo, small, gpu or paper).

    arms       {name: arm}.
    against    {name of an arm: name of the arm that it is compared with}.
    besides    further pairs {name of an arm: name of the arm that it is compared with}.
    figure     how metrics are drawn: a key of FIGURES in studies/figures.py.
    seen       the figure's title: a sentence on what the published results at this scale show, if any, else `title`.
    trials     {arm: {override: name of an arm that tries it}}. The arm is then trained, with other seeds, with the
               override whose trial ended with the best value of metrics[0].
    rule       {"arm": …, "rivals": […], "metrics": […]}, fixed before the runs: the arm must beat the best rival.
    published  {change: its published effect, as text}; the key "Muon" is for the arms "dense, Muon" and "+ Muon".
    ways       names of further ways to score a network; arm "a, cfg 2" is arm "a" scored in the way "cfg 2".
    rehearsal  {field of Arm: value} for a quick test of the same commands with a tiny network; {}: none.
    """

    name: str
    scale: ScaleName
    title: str
    question: str
    arms: dict[str, Arm]
    against: dict[str, str]
    figure: str
    metrics: tuple[str, ...]
    ways: tuple[str, ...] = ()
    rehearsal: dict = field(default_factory=dict)
    besides: dict[str, str] = field(default_factory=dict)
    seen: str = ""
    trials: dict[str, dict[str, str]] = field(default_factory=dict)
    rule: dict = field(default_factory=dict)
    published: dict[str, str] = field(default_factory=dict)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """All pairs (arm, the arm that it is compared with)."""
        return [*self.against.items(), *self.besides.items()]


@dataclass(frozen=True)
class Training:
    """A run of train.py. `overrides` leave out the folder and the seed; `seconds` is its time budget, if any."""

    overrides: tuple[str, ...]
    seed: int
    steps: int
    batch_size: int
    seconds: int | None = None

    @property
    def images(self) -> int:
        return self.steps * self.batch_size

    def is_scored_at(self, step: int, reached: int) -> bool:
        """Return whether to compute the score planned at `step`. If a time budget ended training at the step `reached`,
        scores planned later are left out, except the last."""
        return self.seconds is None or step == self.steps or step <= reached

    @property
    def cfg(self) -> settings.Settings:
        """The settings that train.py will read, with {data}, which stands for the data's folder, replaced by "data"."""
        return replace(settings_of(*self.overrides), seed=self.seed)

    @property
    def key(self) -> str:
        """A hash of the seed, the time budget, the overrides (the last of each setting, sorted) and plugins' files."""
        named = any(word.startswith("plugins=") for word in self.overrides)
        code = [sorted(plugin_hashes(self.cfg.plugins).values())] if named else []
        return _hash([sorted(_last_words(self.overrides)), self.seed, *([self.seconds] if self.seconds else []), *code])


@dataclass(frozen=True)
class Score:
    """A measurement of a checkpoint by a script, with the overrides `words`. In these {data} stands for the path of the
    data's folder, and {step 500} for that of the checkpoint of step 500."""

    step: int
    script: Script
    words: tuple[str, ...]

    @property
    def key(self) -> str:
        return _hash([self.step, self.script, sorted(self.words)])


@dataclass(frozen=True)
class Planned:
    """A planned run: an arm with one seed."""

    arm: str
    training: Training
    scores: tuple[Score, ...]

    @property
    def folder(self) -> str:
        return f"{re.sub(r'[^a-zA-Z0-9.]+', '_', self.arm).strip('_')}-{self.training.seed}-{self.training.key}"


def _hash(content: object) -> str:
    return content_hash(json.dumps(content))[:12]


def names() -> list[str]:
    return sorted(path.stem for path in HERE.glob("*.yaml") if path.stem != "scales")


def read_study(name: str, scale: ScaleName) -> Study:
    """Read studies/<name>.yaml for one scale. An arm's values come from these sections. Later ones override earlier
    ones, but add to lists of overrides and scoring (a scale's scoring replaces that of scales.yaml):

    scales.yaml             all studies' values at this scale
    scales.<scale>          the study's values for all arms at this scale; `like: small` takes the scale small of
                            scales.yaml in place of this one, `alone: true` takes nothing from scales.yaml
    arms.<arm>              the study's values for the arm
    scales.<scale>.arms     the arm's values at this scale; null leaves the arm out
    scales.<scale>.seen     the figure's title at this scale; default: figure.seen for the scale small, else the title
    scales.<scale>.rule     null: the study's rule is not for this scale

    An arm with `over: <earlier arm>` adds its overrides and scoring to that arm's, and is compared with it. A scale's
    `instead: {override: other}` replaces an override in all arms. `ways` and scales.<scale>.ways {name: values} score
    networks once more: each way copies every arm, or those in its `only`, with its values; null leaves a way out.
    `choose: {key: [values]}`, of the study, a scale or an arm, adds an unscored arm of one seed for each arm and value,
    to choose the best value (Study.trials). Raises ValueError for an unknown name, key or scale.
    """
    if name not in names():
        raise ValueError(f"there is no study {name!r}; there are {', '.join(names())}")
    tree, shared = (OmegaConf.to_container(OmegaConf.load(HERE / f"{file}.yaml")) for file in (name, "scales"))
    own_scale = tree.pop("scales", {}).get(scale, {})
    if scale not in shared and not own_scale:
        raise ValueError(f"studies/{name}.yaml has no scale {scale}")
    below = None if own_scale.pop("alone", False) else shared.get(own_scale.pop("like", scale))
    changed, ways = own_scale.pop("arms", {}), tree.pop("ways", {}) | own_scale.pop("ways", {})
    ways = {way: scored for way, scored in ways.items() if scored is not None}
    choose, instead = own_scale.pop("choose", tree.pop("choose", None)) or {}, own_scale.pop("instead", {})
    seen, rule = own_scale.pop("seen", ""), own_scale.pop("rule", tree.pop("rule", {})) or {}
    base = (below or {"overrides": [], "scoring": []}) | {"scored_by": tree.pop("scored_by", "fid.py")}
    base = _over(base | ({"scoring": []} if "scoring" in own_scale else {}), own_scale)
    only = {way: scored.pop("only", None) for way, scored in ways.items()}
    arms, trials, said_arms = {}, {}, tree.pop("arms")
    against, besides = tree.pop("against", {}), tree.pop("besides", {})
    figure = {"kind": None, "metrics": ()} | tree.pop("figure", {})
    seen = seen or (figure.get("seen", "") if scale == "small" else "")
    for arm, said in said_arms.items():
        said = said_arms[arm] = dict(said) if isinstance(said, dict) else {"overrides": said}
        if below := said.pop("over", None):
            if below not in said_arms:
                raise ValueError(f"studies/{name}.yaml: arm {arm} is over {below}, which is no arm")
            against.setdefault(arm, below)
            said |= _over({key: said_arms[below].get(key, []) for key in ("overrides", "scoring")}, said)
    chosen = bool(choose) or any("choose" in said for said in said_arms.values())
    named = {*against, *against.values(), *besides, *besides.values(), *changed}
    if unknown := named - {*said_arms, *(f"{arm}, {way}" for arm in said_arms for way in ways)}:
        raise ValueError(f"studies/{name}.yaml names {', '.join(sorted(unknown))}, which are not among its arms")
    for arm, said in said_arms.items():
        if arm in changed and changed[arm] is None:
            continue
        whole = _over(_over(base, said), changed.get(arm, {}))
        whole["overrides"] = [instead.get(word, word) for word in whole["overrides"]]
        tries = whole.pop("choose", choose)
        for word in (f"{key}={value}" for key, values in tries.items() for value in values):
            tried = trials.setdefault(arm, {})[word] = f"{arm}, {word}"
            arms[tried] = schema.read(_over(whole | {"samples": 0, "seeds": 1}, {"overrides": [word]}), Arm)
        whole |= {"first_seed": 1} if chosen else {}
        own_ways = {f"{arm}, {way}": scored for way, scored in ways.items() if only[way] is None or arm in only[way]}
        for called, scored in {arm: {}, **own_ways}.items():
            here = changed.get(called, {}) if scored else {}
            if here is not None:  # null leaves the arm out
                arms[called] = schema.read(_over(_over(whole, scored), here), Arm, f"arms.{called}.")
    against |= {f"{arm}, {way}": f"{other}, {way}" for arm, other in against.items() for way in ways}
    against, besides = ({a: b for a, b in each.items() if {a, b} <= {*arms}} for each in (against, besides))
    wanted = ({*tree}, {item.name for item in fields(Study)}), ({*figure["metrics"]}, {*METRICS})
    ruled = {*rule.get("rivals", ()), *filter(None, [rule.get("arm")])}, {*said_arms}
    for there, known in (*wanted, ruled, ({*rule.get("metrics", ())}, {*METRICS})):
        if unknown := sorted(there - known):
            raise ValueError(f"studies/{name}.yaml: unknown {', '.join(unknown)}")
    return Study(
        name,
        scale,
        arms=arms,
        ways=(*ways,),
        against=against,
        besides=besides,
        trials=trials,
        figure=figure["kind"],
        metrics=figure["metrics"],
        seen=seen or tree["title"],
        rule=rule,
        **tree,
    )


def rehearsed(study: Study) -> Study:
    """Return the study for a quick test: with the values of study.rehearsal for all arms, and as many evaluations,
    checkpoints and scores as before. Raises ValueError if the study has no rehearsal."""
    if not study.rehearsal:
        raise ValueError(f"studies/{study.name}.yaml has no section rehearsal")
    arms = {}
    for name, arm in study.arms.items():
        share = Fraction(study.rehearsal["images"], arm.images)
        lengths = {key: round(getattr(arm, key) * share) for key in ("evaluate", "save", "score")}
        arms[name] = schema.read(_over(asdict(arm) | lengths, study.rehearsal), Arm, f"arms.{name}.")
    return replace(study, arms=arms)


def _over(base: dict, said: dict) -> dict:
    """Return `base` updated by `said`; lists "overrides" and "scoring" are joined, and the last of each key is kept."""
    return base | said | {key: _last_words(base[key], said.get(key, [])) for key in ("overrides", "scoring")}


def plan(study: Study, seeds: int | None = None, made: Mapping | None = None, guess: bool = False) -> list[Planned]:
    """Return a study's runs, seed by seed. Raises ValueError for overrides that train.py does not take.

    seeds  number of seeds of each arm; None: its own. A trial, made to try a value of an arm's `choose`, has one seed.
    made   {key of a training: its result.json}. An arm with `choose` takes the value of its best trial, and is left
           out until all its trials are trained. None: it takes the first value.
    guess  True: until its trials are trained, an arm with `choose` takes the first value instead of being left out.
    """
    arms = {name: _chosen(study, name, made) or (_chosen(study, name, None) if guess else None) for name in study.arms}
    trials = {trial for each in study.trials.values() for trial in each.values()}
    counts = {name: 1 if name in trials else seeds or arm.seeds for name, arm in arms.items() if arm}
    order = [(name, number) for number in range(max(counts.values())) for name in counts if number < counts[name]]
    return [_planned(name, arms[name], arms[name].first_seed + number) for name, number in order]


def _chosen(study: Study, name: str, made: Mapping[str, dict] | None) -> Arm | None:
    """Return the arm `name`. If study.trials tries overrides for it, add the one whose trial did best by `made` {key of
    a training: its result.json}, or return None if a trial is not trained yet; made=None: add the first override."""
    arm, trials = study.arms[name], study.trials.get(name, {})
    if not trials:
        return arm
    metric, best = study.metrics[0], next(iter(trials))
    if made is not None:
        records = {word: made.get(_planned(trial, study.arms[trial], 0).training.key) for word, trial in trials.items()}
        if not all(record and record["trained"] for record in records.values()):
            return None
        ends = {word: [p[metric] for p in record["points"] if metric in p][-1] for word, record in records.items()}
        best = METRICS[metric].best(ends, key=ends.get)
    return replace(arm, overrides=tuple(_last_words(arm.overrides, [best])))


def _planned(name: str, arm: Arm, seed: int) -> Planned:
    plain = tuple(word for word in arm.overrides if "%}" not in word)
    batch = settings_of(*plain).train.batch_size
    last, evaluate, save = (round(count / batch) for count in (arm.images, arm.evaluate, arm.save))
    if arm.flops:
        if re.search(r"train\.(routes_until|ratio_schedule)", " ".join(arm.overrides)):
            raise ValueError(f"{name}: flops needs steps of equal cost: no train.routes_until, no train.ratio_schedule")
        last = max(1, int(arm.flops) // training_flops(Training(plain, 0, 1, batch)))
    words = [_fractions(word, lambda fraction: str(round(last * fraction))) for word in arm.overrides]
    words += [f"train.steps={last}", f"every.evaluate={evaluate}", f"every.save={save}", f"every.sample={last}"]
    training = Training((*words, "eval.demo_samples=0"), seed, last, batch, arm.seconds)
    scores = ()
    if arm.samples:
        count = "samples" if arm.scored_by == "scripts/similarity.py" else "num_samples"
        nearest = partial(_fractions, written=lambda fraction: f"{{step {round(last * fraction / save) * save}}}")
        words, between = (*map(nearest, arm.scoring), f"{count}={arm.samples}"), arm.score // arm.save * save or last
        earlier = [*range(between, last, between)][: 1 if arm.seconds else None]
        scores = tuple(Score(step, arm.scored_by, words) for step in (*earlier, last))
    return Planned(name, training, scores)


@cache
def training_flops(training: Training) -> int:
    """Return the FLOPs of all training steps, forward and backward, as metrics.jsonl will count them."""
    cfg, network, aligner = _built(training)
    return costs.training_flops(cfg, network, range(training.steps), aligner)


@cache
def training_memory(training: Training) -> int:
    """Predict the most bytes that a step takes on a GPU, in bf16 and compiled, with its whole batch at once."""
    cfg, network, aligner = _built(training)
    return costs.memory(cfg, network, cfg.model.resolved_routes, cfg.train.batch_size, "bf16", True, aligner).peak


def _built(training: Training) -> tuple[settings.Settings, Backbone, costs.Aligner | None]:
    cfg = training.cfg
    if cfg.model.takes_text:  # without the data, assume texts of CLIP-L
        there = cfg.dataset.embedded or Path(cfg.dataset.path).exists()
        cfg = replace(cfg, text=settings.read_text_settings(cfg) if there else CLIP_L)
    network = costs.blank_network(cfg)
    return cfg, network, costs.blank_aligner(cfg, network)


def _last_words(*overrides: Sequence[str]) -> list[str]:
    """Join lists of overrides; of several overrides of one key only the last remains."""
    return list({word.partition("=")[0]: word for words in overrides for word in words}.values())


def _fractions(word: str, written: Callable[[float], str]) -> str:
    """Return the override `word` with each percentage in braces, such as {75%}, replaced by written(0.75)."""
    return re.sub(r"\{(\d+)%\}", lambda match: written(int(match[1]) / 100), word)


@cache
def settings_of(*overrides: str) -> settings.Settings:
    """Return the settings that train.py reads from overrides. Raises ValueError for unknown keys or wrong values."""
    schema.check_overrides(overrides, [*settings.known_keys(), "experiment"])
    words = settings.add_unstated(overrides)
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "configs")):
        composed = compose("config", overrides=[override.replace("{data}", "data") for override in words])
    return settings.read(OmegaConf.to_container(composed, resolve=True))
