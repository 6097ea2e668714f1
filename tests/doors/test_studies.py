"""The studies: what a YAML means, what is shared and resumed, and what comes of results.

References: FLOPs that training itself counts, arithmetic by hand, and a run that nobody disturbed.
"""

import contextlib
import functools
import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, launch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from test_pages import COMMANDS

from scripts import similarity
from studies import cifar10, figures, jobs, paired, results, run, study
from studies.study import Planned, Training
from tread.checkpoints.run_log import RunLog
from tread.diffusion.guidance import Guidance
from tread.diffusion.sampling import Model, Sampler
from tread.encoders.inception import extract, load_inception
from tread.evaluation.scoring import ScoringOptions
from tread.models.text_dit import TextDiT
from tread.runtime import schema

READ = functools.cache(study.read_study)


@pytest.fixture(autouse=True)
def studies_read_once(monkeypatch):
    monkeypatch.setattr(study, "read_study", READ)


@functools.cache
def batch_of(*words: str) -> SimpleNamespace:
    """In the place of settings_of, which composes each config: the batch of a published run. With a wrong one its
    key would be another, and no result be found."""
    typed = [word.partition("=")[2] for word in words if word.startswith("train.batch_size=")]
    return SimpleNamespace(train=SimpleNamespace(batch_size=int(typed[-1]) if typed else 64))


def planned(name: str, scale: str = "small") -> dict[tuple[str, int], Planned]:
    return {(one.arm, one.training.seed): one for one in study.plan(study.read_study(name, scale))}


def result_of(one: Planned, losses: dict[int, float], kid: float | None = None, flops: float = 1e9) -> dict:
    """A result as jobs.py writes it: evaluation losses by step, the KID of each score, FLOPs in proportion to steps."""
    batch = one.training.batch_size
    points = [
        {"step": s, "images": s * batch, "flops": s * flops, "loss": loss, "eval_loss": loss}
        for s, loss in losses.items()
    ]
    scores = {score.key: {"step": score.step, "kid": kid, "count": 20, "flops": 7.0} for score in one.scores}
    record = {"key": one.training.key, "seed": one.training.seed, "trained": True, "points": points}
    return record | {"scores": scores if kid is not None else {}}


@pytest.mark.slow
def test_every_study_can_be_planned_at_the_papers_scale():
    """All words of all arms; each demo is run below, and small ones are planned throughout."""
    known = {"fid.py": ScoringOptions, "scripts/similarity.py": similarity.Options}
    for name in study.names():
        read = study.read_study(name, "paper")
        runs = study.plan(read, seeds=1)
        assert {one.arm for one in runs} == {*read.arms} and read.figure in figures.FIGURES
        shared = {"guidance": 14, "text": 9, "cifar10": 20, "mechanism": 18, "ladder": 6}.get(
            name, 0
        )  # arms that differ in what they are scored with alone
        assert len({one.training.key for one in runs}) + shared == len(runs)
        trials = {trial for each in read.trials.values() for trial in each.values()}  # which are not scored
        for one in runs:
            assert one.training.steps == one.training.cfg.train.steps
            assert bool(one.scores) != (one.arm in trials)
            assert all(score.step == one.training.steps for score in one.scores[-1:])
            assert one.training.cfg.model.routes or not any(word == "model=tread" for word in one.training.overrides)
            for score in one.scores:
                schema.check_overrides(score.words, schema.known_keys(known[score.script]))


def test_an_arm_alone_can_choose(monkeypatch):
    """Only it has trials, of seed 0, and it takes the best one's value; all arms are compared by other seeds."""
    read = study.read_study("ladder", "small")
    assert {*read.trials} == {"dense, Muon", "TREAD, Muon", "+ Muon"}
    trials = {trial for each in read.trials.values() for trial in each.values()}
    monkeypatch.setattr(study, "settings_of", batch_of)
    runs = study.plan(read)
    assert {run.arm for run in runs if run.training.seed == 0} == trials and len(trials) == 12
    *_, (word, best) = read.trials["TREAD, Muon"].items()
    made = {run.training.key: result_of(run, {1: 2.0 - (run.arm == best)}) for run in runs if run.arm in trials}
    for record in made.values():
        record["points"][-1]["eval_velocity"] = record["points"][-1]["loss"]
    chosen = {run.arm: run for run in study.plan(read, made=made)}["TREAD, Muon"]
    assert word in chosen.training.overrides and best == f"TREAD, Muon, {word}"


def test_an_arm_over_another_says_what_it_adds():
    """The ladder's arms, by hand: a rung left out of the whole, in overrides or in scoring; an encoder by scale."""
    read = study.read_study("ladder", "small")
    whole, norm, labels = (read.arms[name] for name in ("+ two aligned blocks", "− RMSNorm", "− balanced labels"))
    assert {*whole.overrides} ^ {*norm.overrides} == {"model.norm=rms", "model.norm=layer"}
    assert whole.overrides == labels.overrides and {*whole.scoring} - {*labels.scoring} == {"labels=balanced"}
    assert read.against["− RMSNorm"] == "+ two aligned blocks" and (whole.seeds, norm.seeds) == (3, 1)
    paper = [word for arm in study.read_study("ladder", "paper").arms.values() for word in arm.overrides]
    assert {word for word in paper if "encoder" in word} == {"alignment.encoder=dinov2-b", "alignment.encoder=null"}


def test_costs_are_divided_by_those_of_the_arm_compared_with():
    run, other = (
        results.Made(
            seed=0, points=[{"loss": 1.0, "images": 9, "flops": n, "steady_seconds": n}], scores=[], timed_on=("cpu", n)
        )
        for n in (3, 2)
    )
    assert figures.cost_ratio(run, other, "flops") == 1.5 and figures.cost_ratio(run, other, "steady_seconds") is None
    assert figures.cost_ratio(run, other | {"timed_on": ("cpu", 3)}, "steady_seconds") == 1.5


def test_a_training_is_known_by_what_is_said_of_it(monkeypatch):
    one = Training(("model=dit", "optim.lr=1e-3", "model.depth=8"), 0, 1, 1)
    assert one.key == Training(("model.depth=12", "optim.lr=1e-3", "model=dit", "model.depth=8"), 0, 2, 1).key
    others = [replace(one, seed=1), replace(one, overrides=("model=dit", "optim.lr=1e-4", "model.depth=8"))]
    assert len({one.key, *(other.key for other in others)}) == 3
    with_code = replace(one, overrides=(*one.overrides, "plugins=[]"))
    for digest in "12":
        monkeypatch.setattr(study, "plugin_hashes", lambda names, digest=digest: {"mine.py": digest})
        others.append(SimpleNamespace(key=with_code.key))
    assert len({one.key, *(other.key for other in others)}) == 5  # another version of a plugin is another training


def test_published_results_are_those_that_the_studies_ask_for(monkeypatch):
    """Their keys are the reference: what is asked for is still what was made. Each table is the published one."""
    made = results.finished(Path("nowhere"))
    for folder in (path.parent for path in sorted(study.HERE.glob("*/results.json"))):
        name, _, _ = folder.name.partition("_gpu")
        read = study.read_study(name, "gpu" if folder.name.endswith("_gpu") else "small")
        with monkeypatch.context() as patch:
            if not any(arm.flops for arm in read.arms.values()):  # else a run's length needs its network
                patch.setattr(study, "settings_of", batch_of)
            runs = study.plan(read, made=made)
        assert name not in ("convergence", "similarity", "alignment", "text") or results.missing(runs, made) == ""
        published = (folder / "table.md").read_text().partition("\nMissing: ")[0]
        assert figures.table(read, results.gather(runs, made)) == published, folder.name


def test_a_score_of_fewer_seeds_than_trained_is_shown_with_their_number():
    read, runs = study.read_study("convergence", "small"), planned("convergence")
    found = {runs["dense", seed].training.key: result_of(runs["dense", seed], {4688: 1.0}) for seed in (1, 2)}
    found[runs["dense", 0].training.key] = result_of(runs["dense", 0], {4688: 1.0}, kid=0.125)
    text = figures.table(read, results.gather([*runs.values()], found))
    assert "| dense | 3 | " in text and "| 0.125 (1) |" in text and "A number of seeds in brackets" in text


BAD = {  # what is put into depth.yaml → what is said
    "titel: x": "unknown titel",
    "rule: {arm: 8 dense, rivals: [9 dense], metrics: [kid]}": "unknown 9 dense",
    "figure: {kind: ends, metrics: [eval_los]}": "unknown eval_los",
    "figure: {kind: end, metrics: [kid]}": "figure.kind end, not one of balance, curves",
    "arms: {a: {over: c, overrides: []}}": "arm a is over c, which is no arm",
}


@pytest.mark.parametrize("line", BAD)
def test_a_study_with_a_mistake_is_refused_before_it_runs(tmp_path, monkeypatch, line):
    monkeypatch.setattr(study, "HERE", tmp_path)
    whole = OmegaConf.load(ROOT / "studies/depth.yaml")
    (tmp_path / "depth.yaml").write_text(OmegaConf.to_yaml({**whole, "against": {}, **OmegaConf.create(line)}))
    shutil.copy(ROOT / "studies/scales.yaml", tmp_path)
    with pytest.raises(ValueError, match=f"studies/depth.yaml.*{BAD[line]}"):
        run.run(run.Options("depth", results=str(tmp_path / "results"), dry=True))


def test_a_study_that_stops_before_its_first_evaluation_draws_nothing(tmp_path):
    read, runs = study.read_study("depth", "demo"), planned("depth", "demo")
    begun = runs["8 dense", 0]
    record = result_of(begun, {}) | {"points": [{"step": 1, "images": 8, "loss": 1.0}], "trained": False}
    figures.write(read, [*runs.values()], {begun.training.key: record}, tmp_path)
    assert "8 dense" in (tmp_path / "table.md").read_text()


def test_a_dry_run_knows_what_trials_decided():
    read = study.read_study("fair", "demo")
    trials = study.plan(read, made={})
    made = {one.training.key: result_of(one, {5: 1.0 + (".002" not in one.arm)}) for one in trials}
    told = {one.training.key for one in study.plan(read, made=made, guess=True)}
    assert told == {one.training.key for one in study.plan(read, made=made)}
    assert len(study.plan(read, made={}, guess=True)) == len(study.plan(read)) > len(trials)


def test_budgets_become_steps():
    convergence = planned("convergence")["routed", 2]
    assert convergence.training.steps == round(300_000 / 64) and "every.save=391" in convergence.training.overrides
    assert [score.step for score in convergence.scores] == [1564, 3128, 4688]  # each 4 checkpoints, and the end
    assert [score.words[-1] for score in convergence.scores] == ["num_samples=1000"] * 3
    assert planned("finetune")["last 10% dense", 0].training.cfg.train.routes_until == round(625 * 0.9)
    words = planned("guidance")["routed, autoguidance 2", 0].scores[-1].words
    assert "guidance.checkpoint={step 1564}" in words  # a checkpoint that is there, near to a third of 4,688


def test_flops_are_those_that_training_counts(tmp_path):
    words = [*TINY, "model=tread", "train.routes_until=4", "sampling.decode=false"]
    launch(tmp_path, *words[len(TINY) :], "name=run")
    counted = RunLog(tmp_path / "results" / "run").records()[-1]["flops"]
    assert study.training_flops(Training(tuple(words), 0, 6, 16)) == counted


def test_the_table_has_means_errors_and_paired_differences():
    read, runs = study.read_study("convergence", "small"), planned("convergence")
    # at equal images, routed − dense is .01, .02, .03; a routed step costs half, so that its end, at 4688 steps, has
    # the FLOPs of 2344 dense steps, which lie at log 2 / log 4 = half the way between the points at 1172 and 4688
    found = {}
    for seed in range(3):
        dense, routed = runs["dense", seed], runs["routed", seed]
        found[dense.training.key] = result_of(dense, {1172: 1.2, 4688: 1.0 + seed / 10}, kid=0.1)
        less = (seed + 1) / 100
        found[routed.training.key] = result_of(routed, {1172: 1.3, 4688: 1.0 + seed / 10 + less}, kid=0.2, flops=0.5e9)
    by_arm = results.gather([*runs.values()], found)
    pair = by_arm["routed"], by_arm["dense"]
    scored = next(point for point in by_arm["routed"][0]["points"] if point["step"] == 1564)  # between two evaluations
    assert scored == {"step": 1564, "images": 1564 * 64, "flops": 1564 * 0.5e9, "kid": 0.2}
    assert paired.differences(*pair, paired.at_equal_images, "eval_loss") == pytest.approx([0.01, 0.02, 0.03])
    between = [(1.2 + 1.0 + seed / 10) / 2 for seed in range(3)]
    ends = [1.01, 1.12, 1.23]
    equal = paired.differences(*pair, paired.at_equal, "eval_loss", "flops")
    assert equal == pytest.approx([end - middle for end, middle in zip(ends, between)])

    lines = figures.table(read, by_arm).splitlines()
    assert "| routed | 3 | 300,032 | 2.34e+12 | – | 1.120 ± 0.110 | 0.2000 ± 0.0000 |" in lines[3]
    # Student's t of two degrees of freedom is 4.3027 at 97.5%: 0.02 ± 4.3027 · 0.01 / √3
    assert "| routed − dense | 3 | +0.0200 (0.0058) [-0.0048, +0.0448] | -0.030 (0.035) [-0.179, +0.119] |" in lines[7]
    assert "KID and FID are of 20 samples" in lines[-1]
    assert results.missing([*runs.values()], found) == ""


def test_an_estimate_is_that_of_a_hand_computation():
    """1, 2, 4, 5: mean 3, sum of squares 10, spread √(10/3), error √(10/12); t of three degrees at 97.5% is 3.18245."""
    one = paired.estimate([1.0, 2.0, 4.0, 5.0])
    assert [one.mean, one.seeds] == [3.0, 4]
    assert [one.spread, one.error] == pytest.approx([(10 / 3) ** 0.5, (10 / 12) ** 0.5], rel=1e-12)
    assert one.half == pytest.approx(3.182446305 * (10 / 12) ** 0.5, rel=1e-8)
    assert one.signed() == "+3.00 (0.91) [+0.09, +5.91]" and f"{one}" == "3.00 ± 1.83" and one.sign == 1
    assert paired.estimate([-1.0, -2.0, -4.0, -5.0]).sign == -1 and paired.estimate([1.0, 2.0, -4.0]).sign == 0
    assert [paired.estimate(few).sign for few in ([1.0], [1.0, 1.1])] == [None, None]  # no verdict
    assert paired.estimate([0.25]).signed() == "+0.25" and f"{paired.estimate([0.25])}" == "0.25"
    assert paired.estimate([]) is None


def test_scores_by_the_network_that_taught_are_marked():
    read, runs = study.read_study("alignment", "small"), planned("alignment")
    found = {
        run.training.key: result_of(run, {run.training.steps: 1.0}, kid=0.1)
        for (arm, _), run in runs.items()
        if arm in ("dense", "dense, repa", "dense, self")
    }
    *lines, notes = figures.table(read, results.gather([*runs.values()], found)).splitlines()
    assert [line.count("†") for line in lines if line.startswith("| dense")] == [0, 1, 0]
    assert "† The Inception network of KID and FID was the teacher of these, too" in notes
    convergence = results.gather([*planned("convergence").values()], found)
    assert "†" not in figures.table(study.read_study("convergence", "small"), convergence)


def test_what_is_published_counts_as_made_though_its_folder_is_gone(tmp_path, monkeypatch):
    read, runs = study.read_study("convergence", "small"), planned("convergence")
    whole, begun, unscored = runs["dense", 0], runs["routed", 0], runs["dense", 1]
    found = {
        whole.training.key: result_of(whole, {4688: 1.0}, kid=0.1),
        begun.training.key: result_of(begun, {1172: 1.1}) | {"trained": False},
        unscored.training.key: result_of(unscored, {4688: 1.0}),
    }
    found[whole.training.key]["scores"]["of another study"] = {"step": 4688, "kid": 9.9, "count": 1}
    monkeypatch.setattr(results, "HERE", tmp_path)
    figures.publish(read, [*runs.values()], found, tmp_path / "convergence")
    again = results.finished(tmp_path / "nothing")
    assert [*again] == [whole.training.key, unscored.training.key]  # the latter is trained: only scores are missing
    assert again[whole.training.key]["points"] == found[whole.training.key]["points"]
    assert again[whole.training.key]["scores"].keys() == {score.key for score in whole.scores}
    assert results.is_made(whole, again) and not results.is_made(begun, found) and not results.is_made(unscored, found)
    assert results.missing([*runs.values()], again) == "routed (seed 0, 1, 2); dense (seed 1, 2)"
    table = (tmp_path / "convergence" / "table.md").read_text()
    assert "| dense | 2 |" in table and "Missing: routed (seed 0, 1, 2); dense (seed 1, 2)." in table
    found |= {unscored.training.key: result_of(unscored, {4688: 1.0}, kid=0.1)}
    figures.publish(read, [whole], found, tmp_path / "convergence")  # seeds=1 now: the other seed is kept
    assert [*results.finished(tmp_path / "nothing")] == [whole.training.key, unscored.training.key]
    assert (tmp_path / "convergence" / "figure.png").exists()


@pytest.mark.parametrize("name", ["placement", "loss_gap", "when", "guidance"])
def test_figures_draw_what_is_there(tmp_path, name):
    read, runs = study.read_study(name, "demo"), planned(name, "demo")
    made = {}
    for number, one in enumerate(runs.values()):
        if number != 3:  # one is missing
            steps = one.training.steps
            losses = {steps // 2: 1.1, steps: 1.0 + number / 100}
            record = result_of(one, losses, kid=0.1 + number / 100)
            scores = made.get(one.training.key, {}).get("scores", {})
            made[one.training.key] = record | {"scores": scores | record["scores"]}
    figures.write(read, [*runs.values()], made, tmp_path)
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    absent = [*runs.values()][3]
    if name != "guidance":  # whose arms share a training
        assert f"| {absent.arm} | 0 |" in (tmp_path / "table.md").read_text()


def test_a_training_loss_is_the_mean_over_the_steps_of_the_last_fifth():
    """By hand: of 625 steps the last 125 are 100 with a mean of 2 and 25 of 1; of 500 the last 100, of one record."""
    points = [{"images": images, "loss": loss} for images, loss in [(400, 9.0), (500, 3.0), (600, 2.0), (625, 1.0)]]
    assert figures.training_loss({"points": points}) == pytest.approx((100 * 2 + 25 * 1) / 125, rel=1e-12)
    assert figures.training_loss({"points": points[:2]}) == 3
    assert figures.training_loss({"points": [{"images": 64, "eval_loss": 1.0}]}) is None


def test_the_study_of_text_is_scored_by_retrieval_at_equal_flops():
    runs, own = planned("text"), study.settings_of("model=tread_text", "dataset=emoji")
    assert runs["routed", 0].scores[0].words == ("steps=36", "num_samples=600")  # no reference: by the emoji's judge
    cfg = runs["routed", 0].training.cfg
    assert [cfg.dataset, cfg.train, cfg.optim, cfg.ema] == [own.dataset, own.train, own.optim, own.ema]
    sizes = {"patch_size": 4, "in_channels": 3, "hidden_size": 128, "depth": 10, "num_heads": 4}
    outline = Model(own.edm, TextDiT(**sizes, text_tokens=16, vocabulary=9), own.model.routes)
    spent = {}
    for arm in ("routed", "routed, cfg 2", "routed, sparse 2"):
        words = dict(word.split("=") for word in runs[arm, 0].scores[0].words)
        kind = words.get("guidance", "none")
        ratios = {"strong": 0.3, "weak": 0.7} if kind == "sparse" else {}
        guidance = Guidance(kind, float(words.get("guidance.scale", 1)), **ratios)
        spent[arm] = Sampler(int(words["steps"]), guidance=guidance).flops(outline)
    assert max(spent.values()) < 1.02 * min(spent.values())


def test_the_arms_of_cifar10_are_rules_of_their_route():
    runs = planned("cifar10", "gpu")
    arms = {arm: one.training for (arm, _), one in runs.items() if ", " not in arm}
    routes = {arm: training.cfg.model.resolved_routes for arm, training in arms.items()}
    places = {arm: (route.start, route.end, route.rejoin) for arm, each in routes.items() for route in each}
    assert places == {"TREAD": (2, 8, 2), "delayed": (5, 8, 2), "naive": (5, 8, 5)}  # and none in the dense ones
    spent = {arm: study.training_flops(replace(training, steps=1)) for arm, training in arms.items()}
    assert spent["delayed"] == spent["naive"] and abs(spent["TREAD"] / spent["dense 8"] - 1) < 0.06
    assert spent["TREAD"] < spent["delayed"] < spent["dense 12"]
    assert {one.training.cfg.train.batch_size for one in runs.values()} == {256}


def test_each_arm_is_scored_in_each_way_by_one_training():
    read, runs = study.read_study("cifar10", "small"), planned("cifar10")
    assert len(read.arms) == 25 and len({one.training.key for one in runs.values()}) == 11  # 3 seeds of 3 arms, 1 of 2
    assert read.against["naive, cfg 2"] == "dense 12, cfg 2" and ("TREAD, cfg 2", 1) not in runs
    plain, guided = runs["TREAD", 0], runs["TREAD, cfg 1.5", 0]
    assert plain.training == guided.training and len(plain.scores) == 2 and len(guided.scores) == 1
    assert {*guided.scores[0].words} - {*plain.scores[0].words} == {"guidance=cfg", "guidance.scale=1.5"}
    words = " ".join(plain.training.overrides)
    assert "imagenette" not in words and "dataset=folder" not in words  # alone: nothing of scales.yaml
    for one in (*runs.values(), *planned("cifar10", "gpu").values()):  # a checkpoint that is scored is still there then
        assert len(one.scores) == 1 or one.training.cfg.checkpoints.keep_last is None


def test_fair_arms_spend_the_same_flops_at_the_best_of_their_rates():
    read = study.read_study("fair", "demo")
    trials, made = study.plan(read, made={}), {}
    assert len(trials) == 10 and not any(one.scores for one in trials)  # stage A alone, until it is made
    spent = [study.training_flops(one.training) for one in trials]
    assert 0.98 * read.arms["TREAD"].flops < min(spent) and max(spent) <= read.arms["TREAD"].flops
    for one in trials:
        better = one.arm in ("dense 8, optim.lr=0.001", "TREAD, optim.lr=0.002")
        made[one.training.key] = result_of(one, {1: 0.5, 5: 1.0 if better else 1.1})
    chosen = {one.arm: one for one in study.plan(read, made=made) if one not in trials}
    assert {one.training.seed for one in chosen.values()} == {1} and len(chosen) == 5
    rates = {arm: one.training.cfg.optim.lr for arm, one in chosen.items()}
    assert rates["TREAD"] == 0.002 and rates["dense 8"] == 0.001  # the last value counts
    kids = {"TREAD": 0.1, "dense 12": 0.3}
    for name, one in chosen.items():
        made[one.training.key] = result_of(one, {5: 0.4 if name == "TREAD" else 0.5}, kid=kids.get(name, 0.2))
    (said, _) = figures.outcome(read, results.gather([*chosen.values()], made))
    assert "best rival, dense 12: evaluation loss -0.1; KID -0.2: too few seeds for a verdict" in said


def test_the_rule_asks_for_each_metric_beyond_its_interval():
    read = study.read_study("fair", "small")
    runs = [one for one in study.plan(read) if one.arm in (*read.rule["rivals"], "TREAD")]
    for kids, said in (([0.1, 0.11, 0.12], "TREAD beats it"), ([0.1, 0.2, 0.3], "TREAD does not beat it")):
        made = {}
        for one in runs:
            loss = {"TREAD": 0.9, "dense 8": 1.0}.get(one.arm, 1.1) + one.training.seed / 100
            kid = kids[one.training.seed - 1] if one.arm == "TREAD" else 0.25
            made[one.training.key] = result_of(one, {1: loss}, kid=kid)
        told = figures.outcome(read, results.gather(runs, made))[0]
        assert "the best rival, dense 8: evaluation loss -0.1000" in told and said in told


def test_an_arm_behind_one_rival_is_behind_the_best_of_them():
    read = study.read_study("fair", "small")
    runs = [one for one in study.plan(read) if one.arm in ("dense 12", "dense 8", "TREAD")]
    for tread, said in ((1.1, "TREAD does not beat it"), (0.9, "not decided: dense 5, dense 12, batch 45 not run")):
        losses = {"TREAD": tread, "dense 8": 1.0, "dense 12": 1.2}
        made = {one.training.key: result_of(one, {1: losses[one.arm] + one.training.seed / 100}) for one in runs}
        assert said in figures.outcome(read, results.gather(runs, made))[0]
    (halfway,) = (one for one in study.plan(read) if one.arm == "dense 5" and one.training.seed == 1)
    made[halfway.training.key] = result_of(halfway, {1: 0.1}) | {"trained": False}
    assert "dense 5, dense 12" in figures.outcome(read, results.gather([*runs, halfway], made))[0]
    begun = results.gather(study.plan(read, made={}), {})  # no trial has run, so the arms that choose are not planned
    assert "not decided: TREAD, dense 12" in figures.table(read, begun)


def test_mechanisms_arms_are_cifar10s_and_one_that_removes_nothing():
    arms, others = (study.read_study(name, "demo").arms for name in ("mechanism", "cifar10"))
    for name in ("TREAD", "delayed", "naive"):
        own, its = ({w for w in each[name].overrides if w.startswith("model.routes")} for each in (arms, others))
        assert own == its
    runs = {one.arm: one for one in study.plan(study.read_study("mechanism", "small"))}
    spent = {arm: study.training_flops(replace(runs[arm].training, steps=1)) for arm in ("dense", "TREAD", "stale")}
    assert spent["stale"] == spent["dense"] > spent["TREAD"]
    guided = {arm for arm in runs if "autoguidance" in arm}
    assert guided == {f"dense, autoguidance {scale}" for scale in ("1.25", "1.5", "2")}
    assert "guidance.checkpoint={step 521}" in runs["dense, autoguidance 2"].scores[0].words


def test_precision_is_compared_on_the_line_between_scales():
    """By hand: at precision 0.3, half the way from 0.25 to 0.35, the dense network's FID is (10 + 8) / 2."""
    read = study.read_study("mechanism", "small")
    ends = {"dense": (0.25, 10.0), "dense, cfg 2": (0.35, 8.0), "TREAD": (0.3, 11.0), "stale": (0.4, 1.0)}
    made = {
        arm: [{"seed": 0, "points": [{"precision": p, "fid": fid, "kid": fid, "recall": 0.5}], "scores": []}]
        for arm, (p, fid) in ends.items()
    }
    columns = figures.precision_columns(read, made)
    assert columns["FID − dense's, at equal precision"] == {"TREAD": "+2"}
    assert columns["recall − dense's, at equal precision"] == {"TREAD": "+0"}
    made["dense, cfg 1.5"] = [{"seed": 0, "points": [{"precision": 0.2, "fid": 9.0}], "scores": []}]
    assert figures.precision_columns(read, made)["FID − dense's, at equal precision"] == {}  # two places have 0.3


def test_again_leaves_out_what_is_published(tmp_path):
    assert results.finished(tmp_path) and not results.finished(tmp_path, again=True)
    one = job(tmp_path)
    assert one.only_scores_lack({one.training.key: {"trained": True}}) and not one.only_scores_lack({})


def test_a_rehearsal_does_as_much_with_a_tiny_network():
    read = study.read_study("cifar10", "gpu")
    whole, tiny = (study.plan(each)[0] for each in (read, study.rehearsed(read)))
    assert [(len(one.scores), one.training.seconds) for one in (whole, tiny)] == [(2, 200), (2, 10)]
    assert (tiny.training.cfg.model.hidden_size, tiny.training.cfg.model.depth) == (16, 12)
    shares = [one.training.cfg.every.save / one.training.steps for one in (whole, tiny)]
    assert shares[0] == pytest.approx(shares[1])
    assert {"num_samples=20", "reference_features=false", "steps=4"} < {*tiny.scores[0].words}


def test_seconds_leave_out_first_steps_and_decide_when_a_budget_is_used_up(tmp_path):
    """By hand: 20 s at the first record, of which 15 for compiling; started again after 30, with 4 for the cache."""
    records = [
        {"step": 10, "seconds": 20.0, "first_step_seconds": 15.0},
        {"step": 20, "seconds": 30.0},
        {"step": 30, "seconds": 41.0, "first_step_seconds": 4.0},
    ]
    assert jobs.steady_seconds(records) == {10: 5.0, 20: 15.0, 30: 22.0}
    one = study.plan(study.read_study("cifar10", "gpu"))[0]
    timed = jobs.Job(replace(one.training, seconds=22), one.scores, tmp_path)
    longer, whole = (replace(timed, training=replace(one.training, seconds=seconds)) for seconds in (23, None))
    assert len({each.training.key for each in (timed, longer, whole)}) == 3
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for state, trained in (("running", [False] * 3), ("interrupted", [True, False, False]), ("finished", [True] * 3)):
        (tmp_path / "train" / "status.json").write_text(json.dumps({"state": state}))
        assert [each.trained for each in (timed, longer, whole)] == trained
    end, half = one.scores[-1], one.scores[0]
    assert [timed.training.is_scored_at(half.step, reached) for reached in (30, half.step)] == [False, True]
    assert timed.training.is_scored_at(end.step, 30) and whole.training.is_scored_at(half.step, 30)
    assert timed.scoring_command(end, tmp_path)[1] == f"checkpoint='{tmp_path}/train/latest'"
    assert timed.scoring_command(half, tmp_path)[1] == f"checkpoint='{tmp_path}/train/step_{half.step:07d}'"
    assert whole.scoring_command(end, tmp_path)[1] == f"checkpoint='{tmp_path}/train/step_{end.step:07d}'"


def test_a_training_killed_after_its_time_goes_on_from_its_checkpoint_and_is_made_once(tmp_path, monkeypatch):
    """The records are those above. The kill came before the save, so that step 20 is the checkpoint: train.py drops the
    last record and goes on, and is asked to save when its own records reach the time, not at those it found."""
    records = [{"step": 10, "seconds": 20.0, "first_step_seconds": 15.0}, {"step": 20, "seconds": 30.0}]
    behind = {"step": 30, "seconds": 41.0, "first_step_seconds": 4.0}
    one, folder, asked = study.plan(study.read_study("cifar10", "gpu"))[0], tmp_path / "train", []
    timed = jobs.Job(replace(one.training, seconds=22), one.scores, tmp_path)
    folder.mkdir()

    def write(state: str, starts: int, *logged: dict) -> None:
        (folder / "run.json").write_text(json.dumps([{"config": {}, "device": "cpu"}] * starts))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in logged))
        (folder / "status.json").write_text(json.dumps({"state": state}))

    def go_on(self, command, cores, log, lock, over):
        asked.append(over())
        for state, *logged in (("running", *records), ("interrupted", *records, behind)):
            write(state, 2, *logged)
            asked.append(over())

    monkeypatch.setattr(jobs.Children, "run", go_on)
    write("running", 1, *records, behind)
    assert timed.over_time() and not timed.trained
    for _ in range(2):  # the second finds nothing to do
        assert jobs.make_one(timed, tmp_path, 1, 1, jobs.Children(), "train") is None
        assert asked == [False, False, True] and timed.trained
    assert json.loads((tmp_path / "result.json").read_text())["trained"]


def test_a_training_done_anew_keeps_neither_its_place_nor_its_scores_by_halves(tmp_path, monkeypatch):
    """Of a finished result that came without its checkpoints: what is there stays until the new training is finished,
    and then goes with the scores of the old one."""
    one = study.plan(study.read_study("cifar10", "gpu"))[0]
    folder = tmp_path / "results"
    again = jobs.Job(replace(one.training, seconds=None), one.scores, folder / "cifar10/gpu/dense")
    old = result_of(one, {10: 1.0, 20: 0.5}, kid=0.25) | {"key": again.training.key}
    (again.folder / "train").mkdir(parents=True)
    (again.folder / "score-x").mkdir()
    (again.folder / "result.json").write_text(json.dumps(old))
    for starts, (state, losses) in enumerate((("interrupted", [0.75]), ("finished", [0.75, 0.625])), 1):

        def train(*given, starts=starts, state=state, losses=losses):
            assert not (again.folder / "score-x").exists()
            logged = [{"step": 10 * step, "eval_loss": loss, "flops": 1} for step, loss in enumerate(losses, 1)]
            (again.folder / "train/run.json").write_text(json.dumps([{"config": {}, "device": "cpu"}] * starts))
            (again.folder / "train/metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in logged))
            (again.folder / "train/status.json").write_text(json.dumps({"state": state}))

        monkeypatch.setattr(jobs.Children, "run", train)
        assert jobs.make_one(again, tmp_path, 9 - starts, 1, jobs.Children(), "train") is None
        found = json.loads((again.folder / "result.json").read_text())
        assert [point["eval_loss"] for point in found["points"]] == ([1.0, 0.5] if state == "interrupted" else losses)
        assert len(found["scores"]) == (len(old["scores"]) if state == "interrupted" else 0) and found["trained"]
    assert found["at_once"] == [0, 7]  # beside how many the first part ran is not kept
    (again.folder / "result.json").unlink()  # as after a launch that was killed
    again.write_result(3)
    assert json.loads((again.folder / "result.json").read_text())["at_once"] == [0, 3]
    monkeypatch.setattr(results, "HERE", tmp_path)
    for published, kept in ((old, False), (found | {"scores": old["scores"]}, True)):
        (tmp_path / "cifar10").mkdir(exist_ok=True)
        (tmp_path / "cifar10/results.json").write_text(json.dumps({"runs": {"a": published}}))
        (record,) = results.finished(folder).values()
        assert record["points"] == found["points"] and record["scores"] == (old["scores"] if kept else {})


def test_scores_at_unlike_ends_are_those_of_the_ends(tmp_path):
    """Two seeds that a time budget ended after 40 and 50 steps, scored after 20, too; and a run without a log."""
    read = study.read_study("depth", "small")
    first, second, *_ = (one for one in study.plan(read, seeds=2) if one.arm == "8 dense")
    made = {}
    for one, last, fid in ((first, 40, 30.0), (second, 50, 32.0)):
        ends = {"fid": {20: 60.0, last: fid}, "eval_loss": {20: 1.0, 30: 0.5}}
        points = [{"step": s, "images": 64 * s, "flops": float(s)} for s in (20, 30, last)]
        for metric, values in ends.items():
            for point in points:
                point |= {metric: values[point["step"]]} if point["step"] in values else {}
        made[one.training.key] = {"key": one.training.key, "seed": one.training.seed, "trained": True, "points": points}
        made[one.training.key] |= {"scores": {}}
    begun = next(one for one in study.plan(read) if one.arm == "8 r(2→4)")
    made[begun.training.key] = result_of(begun, {}) | {"trained": False}
    found = results.gather(study.plan(read, seeds=2), made)
    assert figures.last_values(found, "fid")["8 dense"] == [30.0, 32.0]
    assert figures.last_values(found, "eval_loss")["8 dense"] == [0.5, 0.5] and found["8 r(2→4)"] == []
    figures.publish(read, study.plan(read), made, tmp_path)
    assert begun.training.key not in (tmp_path / "results.json").read_text()
    assert "| 8 r(2→4) | 0 |" in (tmp_path / "table.md").read_text()


def test_each_panel_names_its_own_rows_and_scores_by_flops_are_shown():
    """Of fair's arms one has no value at equal images, and all end at the same FLOPs, which KID is compared at."""
    read, made = study.read_study("fair", "small"), results.finished(Path("nowhere"))
    panels = figures.end_panels(read, results.gather(study.plan(read, made=made), made))
    lacks = "dense 12, batch 45 − dense 12"
    assert [(panel.title, lacks in panel.names) for panel in panels] == [
        ("evaluation loss, at equal images", False),
        ("evaluation loss, at equal FLOPs", True),
        ("KID, at equal FLOPs", True),
    ]
    assert all(panel.names[-1] == "dense 5 − TREAD" for panel in panels)


def test_a_child_is_asked_once_to_save_when_its_time_is_over(tmp_path):
    saves = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit({code})))"
    children, lock = jobs.Children(), jobs.Lock(tmp_path / ".lock", None)
    for code in (75, 1):
        command = f"{saves}; print('on', flush=True); time.sleep(60)".format(code=code)
        log = tmp_path / f"{code}"
        with contextlib.nullcontext() if code == 75 else pytest.raises(ValueError, match="ended with 1: saved"):
            children.run(["-c", command], 1, log, lock, lambda log=log: log.stat().st_size > 0)
        assert log.read_text().split() == ["on", "saved"] and not children.running
    with pytest.raises(ValueError, match="ended with 75"):  # by another's signal
        children.run(["-c", "raise SystemExit(75)"], 1, tmp_path / "log", lock, lambda: False)
    lock.release()


def timed_result(one: Planned, losses: dict[float, float], device: str = "A", at_once: tuple[int, ...] = (1,)) -> dict:
    """A result with evaluation losses by seconds, a step each, and FID, precision and recall of each score."""
    points = [
        {"step": number, "images": number, "eval_loss": loss, "steady_seconds": seconds, "flops": seconds * 1e9}
        for number, (seconds, loss) in enumerate(losses.items(), 1)
    ]
    scores = {}
    for score in one.scores:
        scale = next((float(w.partition("=")[2]) for w in score.words if w.startswith("guidance.scale")), 1.0)
        scores[score.key] = {
            "step": len(points),
            "count": 300,
            "fid": 10 / scale,
            "precision": scale / 4,
            "recall": 0.5 / scale,
        }
    record = {"key": one.training.key, "seed": 0, "trained": True, "points": points, "device": device}
    return record | {"at_once": [*at_once], "scores": scores}


def test_seconds_compare_on_one_device_alone():
    """By hand: at 8 s, half the way from 4 to 16 by logarithm, the dense loss is 0.5; the routed run ends there."""
    runs = planned("cifar10", "demo")
    dense, routed = runs["dense 12", 0], runs["TREAD", 0]
    slow = timed_result(dense, {4.0: 0.6, 16.0: 0.4})
    others = [({changed: to}, None) for changed, to in (("device", "B"), ("at_once", (2,)), ("at_once", (1, 2)))]
    for changes, expected in (({}, -0.1), *others):
        fast = timed_result(routed, {2.0: 0.7, 8.0: 0.4}, **changes)
        both = results.gather([dense, routed], {slow["key"]: slow, fast["key"]: fast})
        less = paired.at_equal(both["TREAD"][0], both["dense 12"][0], "eval_loss", "steady_seconds")
        assert less == (expected if expected is None else pytest.approx(expected))
    ends = timed_result(dense, {50.0: 0.6, 100.0: 0.4}), timed_result(routed, {50.0: 0.6, 100.5: 0.3})
    budget = [results.gather([one], {one.training.key: end})[one.arm][0] for one, end in zip((dense, routed), ends)]
    assert paired.at_equal(*budget, "eval_loss", "steady_seconds") == pytest.approx(0.1)
    assert paired.at_equal(*budget, "fid", "steady_seconds") == 0  # a single score each, at equal ends
    assert paired.at_equal(*budget, "fid", "flops") is None  # they share the number of images
    budget[1]["points"][-1]["images"] += 1
    assert paired.at_equal(*budget, "fid", "flops") == 0


def test_the_balance_joins_the_scales_of_a_network(tmp_path, monkeypatch):
    read, runs, made, drawn = study.read_study("cifar10", "demo"), planned("cifar10", "demo"), {}, []
    for one in runs.values():
        record = timed_result(one, {2.0: 0.7, 8.0: 0.4})
        scores = made.get(one.training.key, {}).get("scores", {})
        made[one.training.key] = record | {"scores": scores | record["scores"]}
    monkeypatch.setattr(figures, "save_panels", lambda path, panels, *_: drawn.extend(panels))
    figures.write(read, [*runs.values()], made, tmp_path)
    assert [panel.x_label.partition(",")[0] for panel in drawn[:2]] == ["images", "training FLOPs"]
    assert drawn[2].x_label.startswith("seconds of training") and len(drawn) == 5
    lines = {line.name: (line.x, line.y) for line in drawn[3].lines}
    assert lines["naive"] == ([0.25, 0.3125, 0.375, 0.5], [10.0, 8.0, pytest.approx(20 / 3), 5.0])
    assert lines["naive, in an interval"] == ([0.5], [5.0]) and len(lines) == 10
    assert drawn[4].lines[0].y == [0.25, 0.3125, 0.375, 0.5] and drawn[4].lines[0].x[0] == 0.5
    losses, *others, _ = (tmp_path / "table.md").read_text().split("\n\n")  # a table for each metric
    assert losses.count("\n| ") == 5 and "evaluation loss against its pair, at equal FLOPs" in losses
    assert [part.count("\n| ") for part in others] == [
        25
    ] * 3 and "| naive, cfg 2 | 1 | 2 | 8e+09 | – | 300 | 5 |" in others[0]
    assert "| FID | FID against its pair, at equal images |" in others[0] and "recall against its pair" in others[2]
    assert "evaluation loss" not in "".join(others) and max(part.count("---") for part in (losses, *others)) == 10


def test_scales_of_guidance_are_joined_over_the_same_seeds():
    """The unguided network has three seeds, two of its scales one: its point on the line is that of this seed."""
    read = study.read_study("cifar10", "small")

    def end(seed, precision):
        return {"seed": seed, "points": [{"images": 1, "precision": precision, "fid": 100 * precision, "recall": 0.5}]}

    unguided = [end(0, 0.1), end(1, 0.5), end(2, 0.9)]
    guided = {"dense 12, cfg 1.25": [end(0, 0.2)], "dense 12, cfg 2": [end(0, 0.3)]}
    line = figures.balance_panels(read, {"dense 12": unguided, **guided, "TREAD": unguided})[0].lines
    assert [each.x for each in line] == [[0.1, 0.2, 0.3], [0.5]] and line[0].y == [10.0, 20.0, 30.0]
    guided["dense 12, cfg 2"] = unguided  # a scale of fewer seeds than another one is left out
    (line, *_) = figures.balance_panels(read, {"dense 12": unguided, **guided})[0].lines
    assert (
        line.x == [0.5, 0.5] and line.labels == ["", "2"] and sorted({*line.dots}) == [(0.1, 10), (0.5, 50), (0.9, 90)]
    )
    apart = {"dense 12": [end(0, 0.1)], "dense 12, cfg 2": [end(1, 0.3)], "TREAD": unguided}
    assert [each.x for each in figures.balance_panels(read, apart)[0].lines] == [[0.5]]


def test_packed_pictures_come_out_as_they_were(tmp_path):
    places = [tmp_path / name for name in ("from", "packed", "to")]
    for place in places:
        place.mkdir()
    for count in (20, 200):
        content = np.random.default_rng(count).integers(0, 256, count * cifar10.RECORD, dtype=np.uint8)
        content.tofile(places[0] / f"{count}.bin")
    cifar10.pack(*places[:2])
    cifar10.unpack(*places[1:])
    assert len({path.read_bytes() for place in (places[0], places[2]) for path in place.iterdir()}) == 2


def test_the_demos_inception_tells_pictures_apart(tmp_path):
    cifar10.random_inception(tmp_path / "new" / cifar10.RANDOM)
    pictures = torch.stack([torch.full((3, 32, 32), value) for value in (0, 255)]).to(torch.uint8)
    black, white = extract(load_inception(tmp_path / "new" / cifar10.RANDOM), pictures)["pool"]
    assert np.abs(black - white).max() > 0.01


def test_differences_along_training_are_read_at_equal_flops():
    read = study.read_study("when", "small")
    runs = [run for run in study.plan(read, seeds=1) if run.arm in ("depth 8, dense", "depth 8, routed")]
    losses = {20: 1.9, 200: 1.5, 800: 1.1, 1600: 1.0}  # by half the FLOPs a step: as 10, 100, 400, 800 dense steps
    records = result_of(runs[0], {10: 2.0, 1000: 1.0}), result_of(runs[1], losses, flops=0.5e9)
    dense, routed = results.gather(runs, {record["key"]: {**record, "trained": False} for record in records}).items()
    gaps = paired.along(routed[1], dense[1], "eval_loss", "flops")
    assert [values[0] for _, values in gaps] == pytest.approx([-0.1, 0.0, 1.1 - 1.19897, 1.0 - 1.04846], abs=1e-5)


def test_commands_on_the_pages_name_what_there_is():
    words = [command.arguments for command in COMMANDS if command.door == "studies/run.py"]
    assert len(words) > 10
    for said in words:
        options = schema.read(OmegaConf.to_container(OmegaConf.from_cli(said)), run.Options)
        study.read_study(options.study, options.scale)
    told = {word for said in words for word in said if word.startswith("study=")}
    assert told == {f"study={name}" for name in study.names()}  # docs/evidence.md has them all


def job(folder: Path, name: str = "convergence") -> jobs.Job:
    one = planned(name, "demo")["routed", 0]
    return jobs.Job(one.training, one.scores, folder)


def test_a_job_does_what_is_left(tmp_path, monkeypatch):
    """In order, and with the reasons of what fails; the others are made."""
    commands, ended, one = [], [], job(tmp_path / "one")
    other = jobs.Job(replace(one.training, seed=1), one.scores, tmp_path / "other")

    def pretend(self, command, cores, log, lock, over=None):
        commands.append(command[:2])
        if "seed=1" in command:
            raise ValueError("train.py ended with 1: error: no room")

    monkeypatch.setattr(jobs.Children, "run", pretend)
    written = {"kid": 0.1, "step": 10, "command": ["/home/me/fid.py"], "checkpoint": "/home/me/run"}
    (tmp_path / "one/train").mkdir(parents=True)
    (tmp_path / "one/train/run.json").write_text(json.dumps([{"config": {}}]))  # begun: its score
    (tmp_path / "one" / f"score-{one.scores[0].key}").mkdir()
    (tmp_path / "one" / f"score-{one.scores[0].key}" / "fid.json").write_text(json.dumps(written))
    assert jobs.make([one, other], tmp_path, 1, lambda: ended.append(1)) == [
        f"{tmp_path}/other: train.py ended with 1: error: no room (its log.txt has all of it)"
    ]
    assert len(ended) == 2 and [command[0] for command in commands] == ["train.py", "fid.py", "train.py"]
    assert commands[1][1] == f"checkpoint='{tmp_path}/one/train/step_0000020'"
    assert one.record(one.scores[0]) == {"words": [*one.scores[0].words], "kid": 0.1, "step": 10}


def test_odd_paths_reach_the_doors_whole(tmp_path):
    odd = tmp_path / "it's 50% {new}, = (r→2)"
    command = job(odd).training_command(odd)
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "configs")):
        assert compose("config", overrides=command[1:]).results == str(odd)


def test_runs_lie_where_another_study_began_them(tmp_path):
    runs = [*planned("when").values()]
    begun = tmp_path / "convergence" / "small" / planned("convergence")["dense", 0].folder
    begun.mkdir(parents=True)
    found = jobs.jobs_of(runs, tmp_path / "when" / "small", tmp_path)
    assert [one.folder for one in found if one.training.key == runs[2].training.key] == [begun]
    assert found[0].folder.parent == tmp_path / "when" / "small"
    both = jobs.jobs_of([*planned("guidance").values()], tmp_path / "guidance" / "small", tmp_path)
    assert len(both) == 6 and sorted(len(one.scores) for one in both) == [5] * 3 + [11] * 3


def test_a_locked_run_is_waited_for_while_its_process_lives(tmp_path):
    lock = jobs.Lock(tmp_path / ".lock", None)
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock.fileno()])
    lock.release()
    with pytest.raises(FileExistsError, match="busy"):
        jobs.Lock(tmp_path / ".lock", "busy")
    sleeper.communicate(b"\n")
    jobs.Lock(tmp_path / ".lock", "busy").release()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["study=convergense"], "there is no study 'convergense'; there are alignment, architectures"),
        (["study=convergence", "publish=true"], "publish=true is for scale=small"),
        (["study=when", "scale=gpu"], "studies/when.yaml has no scale gpu"),
        (["study=when", "rehearse=true"], "studies/when.yaml has no section rehearsal"),
        (["study=cifar10", "arms=[dense]"], "study cifar10 has no arm dense, but 'dense 12', 'dense 12, cfg 1.25'"),
        (["study=convergence", "sceds=3"], "the nearest known one is 'seeds'"),
        (
            ["study=convergence", "scale=small", "seeds=9", "data=nowhere"],
            "nowhere/imagenette/val, nowhere/imagenette/ref",
        ),
    ],
)
def test_refusals_come_before_any_run(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert said in str(ended.value) and str(ended.value).startswith("error: ")


def start(folder: Path, *words: str) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "studies" / "run.py"), *words, f"results={folder}"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.slow
def test_a_study_goes_on_after_kill_9_and_ctrl_c(tmp_path):
    words = ("study=convergence", "jobs=2")
    assert start(tmp_path / "whole", *words).wait() == 0
    for kill in (signal.SIGKILL, signal.SIGINT):
        began, logs = time.time(), (tmp_path / "cut").glob
        process = start(tmp_path / "cut", *words)
        while process.poll() is None and not [one for one in logs("*/*/*/log.txt") if one.stat().st_mtime > began]:
            time.sleep(0.2)
        time.sleep(4)  # into the training
        process.send_signal(kill)
        assert process.wait() in (-signal.SIGKILL, 128 + signal.SIGINT, 0)
    assert start(tmp_path / "cut", *words).wait() == 0
    whole, cut = (results.finished(tmp_path / name) for name in ("whole", "cut"))
    trainings = {one.training.key: one.training for one in planned("convergence", "demo").values()}
    for key, training in trainings.items():
        losses = [[(p["step"], p.get("eval_loss")) for p in one[key]["points"]] for one in (whole, cut)]
        scored = [{name: score["frechet_pixels"] for name, score in one[key]["scores"].items()} for one in (whole, cut)]
        assert losses[0] == losses[1] and scored[0] == scored[1]
        assert whole[key]["points"][-1]["flops"] == study.training_flops(training)


@pytest.mark.slow
def test_the_gpus_commands_run_on_a_cpu(tmp_path):
    """A training that its time ends, then its scores; the third command finds nothing to do."""
    words = ("study=cifar10", "scale=gpu", "rehearse=true", "arms=[TREAD]", f"data={tmp_path / 'data'}")
    for part in ("train", "score", "both"):
        assert start(tmp_path / "results", *words, f"part={part}").wait() == 0
    made = results.finished(tmp_path / "results")
    runs = study.plan(study.rehearsed(study.read_study("cifar10", "gpu")))
    runs = [one for one in runs if one.arm.startswith("TREAD")]
    assert len(runs) == 6 and results.missing(runs, made) == ""
    (training,) = [one for one in made.values() if one["key"] == runs[0].training.key]
    assert training["points"][-1]["steady_seconds"] >= 10 and training["at_once"] == [1]
    ends = {score["step"] for score in training["scores"].values()}
    assert ends <= {100, max(ends)} and max(ends) >= training["points"][-1]["step"]  # 100 if this machine got so far


@pytest.mark.slow
@pytest.mark.parametrize("name", study.names())
def test_every_demo_runs(tmp_path_factory, name):
    place = tmp_path_factory.getbasetemp() / "studies"  # shared, as studies share runs
    assert start(place, f"study={name}", "jobs=2").wait() == 0
    read, made = study.read_study(name, "demo"), results.finished(place)
    assert results.missing(study.plan(read, made=made), made) == ""
    assert (place / name / "demo" / "figure.png").exists()
    table = (place / name / "demo" / "table.md").read_text()
    assert all(f"| {arm} | 1 |" in table for arm in read.arms)
