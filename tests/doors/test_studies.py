"""The studies: what a YAML means, what is shared and resumed, and what comes of results.

References: FLOPs that training itself counts, arithmetic by hand, and a run that nobody disturbed.
"""

from __future__ import annotations

import json
import operator
import os
import re
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, TINY, launch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from test_pages import COMMANDS

from studies import cost, jobs, loss_gap, results, run, study
from studies.study import Planned, Training
from tread.diffusion.guidance import Guidance
from tread.diffusion.sampling import Model, Sampler
from tread.models.text_dit import TextDiT
from tread.runtime import schema
from tread.training.run_folder import RunLog

MADE = {"device": "cpu", "commit": "0", "trained": True}


def planned(name: str, scale: str = "small") -> dict[tuple[str, int], Planned]:
    return {(one.arm, one.training.seed): one for one in study.plan(study.read_study(name, scale))}


def made(one: Planned, losses: dict[int, float], kid: float | None = None, flops: float = 1e9) -> dict:
    """A result as jobs.py writes it: evaluation losses by step, the KID of each score, FLOPs in proportion to steps."""
    batch = one.training.cfg.train.batch_size
    points = [
        {"step": s, "images": s * batch, "flops": s * flops, "loss": loss, "eval_loss": loss}
        for s, loss in losses.items()
    ]
    scores = {score.key: {"step": score.step, "kid": kid, "count": 20, "flops": 7.0} for score in one.scores}
    key, seed = one.training.key, one.training.seed
    return MADE | {"key": key, "seed": seed, "points": points, "scores": scores if kid is not None else {}}


@pytest.mark.slow
def test_every_study_can_be_planned_at_the_papers_scale():
    """All words of all arms; each demo is run below, and small ones are planned throughout."""
    for name in study.names():
        read = study.read_study(name, "paper")
        runs = study.plan(read, seeds=1)
        assert {one.arm for one in runs} == {*read.arms}
        shared = {"guidance": 14, "text": 9}.get(name, 0)  # arms that differ in what they are scored with alone
        assert len({one.training.key for one in runs}) + shared == len(runs)
        for one in runs:
            last = [score.step for score in one.scores][-1]
            assert last == one.training.steps and one.training.images == last * one.training.cfg.train.batch_size
            assert one.training.cfg.model.routes or not any(word == "model=tread" for word in one.training.overrides)
        if read.figure.kind == "own":
            assert "draw" in vars(results.own_module(read))


def test_a_training_is_known_by_what_is_said_of_it():
    cfg = study.settings_of("model=dit")
    one = Training(("model=dit", "optim.lr=1e-3", "model.depth=8"), 0, 1, cfg)
    assert one.key == Training(("model.depth=12", "optim.lr=1e-3", "model=dit", "model.depth=8"), 0, 2, cfg).key
    others = [replace(one, seed=1), replace(one, overrides=("model=dit", "optim.lr=1e-4", "model.depth=8"))]
    assert len({one.key, *(other.key for other in others)}) == 3


@pytest.mark.slow
def test_studies_share_runs_that_say_the_same():
    for name, arm, other, twin in [
        ("when", "depth 12, routed", "convergence", "routed"),
        ("guidance", "dense, cfg 2", "convergence", "dense"),
        ("similarity", "routed", "convergence", "routed"),
        ("selection_rate", "0.5", "placement", "r(2→8)"),
        ("loss_gap", "r(2→6)", "placement", "r(2→6)"),
        ("finetune", "dense", "init", "dense, adaLN-Zero"),
        ("rivals", "dense", "convergence", "dense"),
        ("rivals", "routed", "convergence", "routed"),
    ]:
        assert planned(name)[arm, 0].training.key == planned(other)[twin, 0].training.key, (name, arm)


def test_budgets_become_steps():
    convergence = planned("convergence")["routed", 2]
    assert convergence.training.steps == round(300_000 / 64) and convergence.training.save == round(25_000 / 64)
    assert [score.step for score in convergence.scores] == [1564, 3128, 4688]  # each 4 checkpoints, and the end
    assert [score.words[-1] for score in convergence.scores] == ["num_samples=1000"] * 3
    assert planned("finetune")["last 10% dense", 0].training.cfg.train.routes_until == round(625 * 0.9)
    words = planned("guidance")["routed, autoguidance 2", 0].scores[-1].words
    assert "guidance.checkpoint={step 1564}" in words  # a checkpoint that is there, near to a third of 4,688

    read = study.read_study("convergence", "demo")
    arms = {"dense": replace(read.arms["dense"], flops=2e9), "routed": replace(read.arms["routed"], flops=2e9)}
    by_flops = study.plan(replace(read, arms=arms))
    for one in by_flops:
        each = cost.training_flops(one.training) / one.training.steps
        assert abs(cost.training_flops(one.training) - 2e9) <= each / 2
    assert by_flops[0].training.steps < by_flops[1].training.steps


def test_rivals_see_what_convergence_saw():
    """300,000 images by three seeds, scored alike; a decoder of 2 blocks of half the width, in full for the paper."""
    rivals, convergence = planned("rivals"), planned("convergence")
    assert len(rivals) == 12 and all(rivals[key].scores == one.scores for key, one in convergence.items())
    for arm in ("maskdit", "sprint"):
        for seed in range(3):
            ours, dense = rivals[arm, seed], convergence["dense", seed]
            assert ours.scores == dense.scores and ours.training.seed == seed and ours.training.images == 300_032
            for part in ("dataset", "edm", "ema", "optim", "every", "eval"):
                assert getattr(ours.training.cfg, part) == getattr(dense.training.cfg, part)
    for scale, width, depth in (("demo", 8, 2), ("small", 48, 2), ("paper", 512, 8)):
        model = planned("rivals", scale)["maskdit", 0].training.cfg.model
        assert (model.decoder_hidden_size, model.decoder_depth) == (width, depth)


def test_architectures_see_the_same():
    """60,000 photos once; digits by three seeds, trained as docs/measurements.md trained dit, tread and rwkv."""
    photos, digits = (study.read_study(name, "small") for name in ("architectures", "architectures_digits"))
    assert photos.arms == digits.arms and len(photos.arms) == 9
    assert (photos.scale.seeds, digits.scale.seeds) == (1, 3)
    for read, images in ((photos, 60_032), (digits, 192_000)):
        for one in study.plan(read, seeds=1):
            assert one.training.images == images and len(one.scores) == 1
            assert (getattr(one.training.cfg.model, "attention_every", 0) == 4) == one.arm.startswith("hybrid")
    ours, theirs = one.training.cfg, study.settings_of("model=tread_mamba", "train.steps=3000")
    for part in (
        "dataset",
        "edm",
        "ema",
        "optim",
        "train.steps",
        "train.batch_size",
        "model.hidden_size",
        "model.depth",
    ):
        assert operator.attrgetter(part)(ours) == operator.attrgetter(part)(theirs), part
    assert ours.eval.points == theirs.eval.points


def test_flops_are_those_that_training_counts(tmp_path):
    words = [*TINY, "model=tread", "train.routes_until=4", "sampling.decode=false"]
    launch(tmp_path, *words[len(TINY) :], "name=run")
    counted = RunLog(tmp_path / "results" / "run").records()[-1]["flops"]
    assert cost.training_flops(Training(tuple(words), 0, 3, study.settings_of(*words))) == counted


def test_the_table_has_means_errors_and_paired_differences():
    read, runs = study.read_study("convergence", "small"), planned("convergence")
    # at equal images, routed less dense is .01, .02, .03; a routed step costs half, so that its end, at 4688 steps, has
    # the FLOPs of 2344 dense steps, which lie at log 2 / log 4 = half the way between the points at 1172 and 4688
    found = {}
    for seed in range(3):
        dense, routed = runs["dense", seed], runs["routed", seed]
        found[dense.training.key] = made(dense, {1172: 1.2, 4688: 1.0 + seed / 10}, kid=0.1)
        less = (seed + 1) / 100
        found[routed.training.key] = made(routed, {1172: 1.3, 4688: 1.0 + seed / 10 + less}, kid=0.2, flops=0.5e9)
    by_arm = results.gather([*runs.values()], [], found)
    scored = next(point for point in by_arm["routed"][0]["points"] if point["step"] == 1564)  # between two evaluations
    assert scored == {"step": 1564, "images": 1564 * 64, "flops": 1564 * 0.5e9, "kid": 0.2}
    assert results.differences(read, by_arm, "routed", "eval_loss") == pytest.approx([0.01, 0.02, 0.03])
    between = [(1.2 + 1.0 + seed / 10) / 2 for seed in range(3)]
    ends = [1.01, 1.12, 1.23]
    equal = results.differences(read, by_arm, "routed", "eval_loss", results.at_equal_flops)
    assert equal == pytest.approx([end - middle for end, middle in zip(ends, between)])

    lines = results.table(read, by_arm).splitlines()
    assert "| routed | 3 | 300,032 | 2.34e+12 | 1.120 ± 0.064 | 0.2000 ± 0.0000 |" in lines[3]
    assert lines[3].endswith("| +0.0200 ± 0.0058 | -0.030 ± 0.035 |")
    assert "KID and FID are of 20 samples" in lines[-1]
    assert results.missing([*runs.values()], found) == ""


def test_scores_by_the_network_that_taught_are_marked():
    read, runs = study.read_study("alignment", "small"), planned("alignment")
    found = {
        run.training.key: made(run, {run.training.steps: 1.0}, kid=0.1)
        for (arm, _), run in runs.items()
        if arm in ("dense", "dense, repa", "dense, self")
    }
    *lines, notes = results.table(read, results.gather([*runs.values()], [], found)).splitlines()
    assert [line.count("†") for line in lines if line.startswith("| dense")] == [0, 1, 0]
    assert "† The Inception network of KID and FID was the teacher of these, too" in notes
    convergence = results.gather([*planned("convergence").values()], [], found)
    assert "†" not in results.table(study.read_study("convergence", "small"), convergence)


def test_what_is_published_counts_as_made_though_its_folder_is_gone(tmp_path, monkeypatch):
    read, runs = study.read_study("convergence", "small"), planned("convergence")
    whole, begun, unscored = runs["dense", 0], runs["routed", 0], runs["dense", 1]
    found = {
        whole.training.key: made(whole, {4688: 1.0}, kid=0.1),
        begun.training.key: made(begun, {1172: 1.1}) | {"trained": False},
        unscored.training.key: made(unscored, {4688: 1.0}),
    }
    found[whole.training.key]["scores"]["of another study"] = {"step": 4688, "kid": 9.9, "count": 1}
    monkeypatch.setattr(results, "HERE", tmp_path)
    results.publish(read, [*runs.values()], found, tmp_path / "convergence")
    again = results.finished(tmp_path / "nothing")
    assert [*again] == [whole.training.key, unscored.training.key]  # the latter is trained: only scores are missing
    assert again[whole.training.key]["points"] == found[whole.training.key]["points"]
    assert again[whole.training.key]["scores"].keys() == {score.key for score in whole.scores}
    assert results.is_made(whole, again) and not results.is_made(begun, found) and not results.is_made(unscored, found)
    assert results.missing([*runs.values()], again) == "routed (seed 0, 1, 2); dense (seed 1 (scores alone), 2)"
    table = (tmp_path / "convergence" / "table.md").read_text()
    assert "| dense | 1 |" in table and "Missing: routed (seed 0, 1, 2); dense (seed 1 (scores alone), 2)." in table
    found |= {unscored.training.key: made(unscored, {4688: 1.0}, kid=0.1)}
    results.publish(read, [whole], found, tmp_path / "convergence")  # seeds=1 now: the other seed is kept
    assert [*results.finished(tmp_path / "nothing")] == [whole.training.key, unscored.training.key]
    assert (tmp_path / "convergence" / "figure.png").exists()


@pytest.mark.parametrize("name", ["placement", "loss_gap", "when", "guidance"])
def test_own_figures_draw_what_is_there(tmp_path, name):
    read, runs = study.read_study(name, "demo"), planned(name, "demo")
    found = {}
    for number, one in enumerate(runs.values()):
        if number != 3:  # one is missing
            steps = one.training.steps
            found.setdefault(
                one.training.key, made(one, {steps // 2: 1.1, steps: 1.0 + number / 100}, kid=0.1 + number / 100)
            )
            found[one.training.key]["scores"] |= made(one, {}, kid=0.1 + number / 100)["scores"]
    by_arm = results.gather([*runs.values()], [], found)
    results.write(read, by_arm, tmp_path)
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    absent = [one for one in runs.values()][3]
    if name != "guidance":  # whose arms share a training
        assert f"| {absent.arm} | 0 |" in (tmp_path / "table.md").read_text()


def test_a_training_loss_is_the_mean_over_the_steps_of_the_last_fifth():
    """By hand: of 625 steps the last 125 are 100 with a mean of 2 and 25 of 1; of 500 the last 100, of one record."""
    points = [{"images": images, "loss": loss} for images, loss in [(400, 9.0), (500, 3.0), (600, 2.0), (625, 1.0)]]
    assert loss_gap.training_loss([{"points": points}]) == pytest.approx((100 * 2 + 25 * 1) / 125, rel=1e-12)
    assert loss_gap.training_loss([{"points": points[:2]}]) == 3
    assert loss_gap.training_loss([{"points": [{"images": 64, "eval_loss": 1.0}]}]) is None


def test_the_study_of_text_is_scored_by_retrieval_at_equal_flops(tmp_path):
    """On emoji; MS-COCO by fid.py. The table has the ratio of step times, and the pair's difference."""
    assert {one.door for run in planned("text", "paper").values() for one in run.scores} == {"fid.py"}
    read, runs = study.read_study("text", "small"), planned("text")
    assert {one.door for run in runs.values() for one in run.scores} == {"scripts/judge_emoji.py"}
    own = study.settings_of("model=tread_text", "dataset=emoji")
    for (arm, _), one in runs.items():
        cfg = one.training.cfg
        for part in ("dataset", "train", "optim", "ema"):
            assert getattr(cfg, part) == getattr(own, part), (arm, part)
        assert cfg.model == own.model or arm.startswith("dense")
    outline = Model(own.edm, TextDiT(32, 4, 3, 128, 10, 4, text_tokens=16, vocabulary=9), own.model.routes)
    spent = {}
    for arm in ("routed", "routed, cfg 2", "routed, sparse 2"):
        words = dict(word.split("=") for word in runs[arm, 0].scores[0].words)
        kind = words.get("guidance", "none")
        ratios = {"strong": 0.3, "weak": 0.7} if kind == "sparse" else {}
        guidance = Guidance(kind, float(words.get("guidance.scale", 1)), **ratios)
        spent[arm] = Sampler(int(words["steps"]), guidance=guidance).flops(outline)
    assert max(spent.values()) < 1.02 * min(spent.values())

    found = {}
    for (arm, _), one in runs.items():
        if "," in arm:
            continue
        share = {"dense": 0.4, "routed": 0.3}[arm]
        found[one.training.key] = made(one, {5000: 1.1, 10_000: 1.0})
        scores = {"step": 10_000, "seen_top1": share, "held_top1": share / 2, "count": 600, "flops": 7.0}
        found[one.training.key]["scores"] = {score.key: scores for score in one.scores}
    by_arm = results.gather([*runs.values()], [], found)
    results.write(read, by_arm, tmp_path)
    lines = (tmp_path / "table.md").read_text().splitlines()
    (routed,) = [line for line in lines if line.startswith("| routed |")]
    assert "| 0.3 | 0.15 | 1 |" in routed and routed.endswith("| -0.1 | – | 7 |")
    assert "Scores are of 600 samples." in lines[-1] and (tmp_path / "figure.png").stat().st_size > 10_000


def test_a_study_links_the_reports_of_its_runs(tmp_path):
    one, other = planned("convergence")["dense", 0], planned("when")["depth 12, dense", 0]
    page = tmp_path / "convergence" / "small" / one.folder / "train" / "report.html"
    page.parent.mkdir(parents=True)
    page.touch()
    (tmp_path / "when" / "small").mkdir(parents=True)
    (link,) = re.findall(r"\]\((.*?)\)", results.reports([other], tmp_path / "when" / "small"))
    assert (tmp_path / "when" / "small" / link).samefile(page)


def test_when_finds_where_routing_begins_to_pay():
    runs, when = planned("when"), results.own_module(study.read_study("when", "small"))
    dense = results.gather([one := runs["depth 8, dense", 0]], [], {one.training.key: made(one, {10: 2.0, 1000: 1.0})})
    losses = {20: 1.9, 200: 1.5, 800: 1.1, 1600: 1.0}  # by half the FLOPs a step: as 10, 100, 400, 800 dense steps
    routed = made(runs["depth 8, routed", 0], losses, flops=0.5e9)
    routed = results.gather([one := runs["depth 8, routed", 0]], [], {one.training.key: routed})
    found = when.gap(*dense.values(), *routed.values(), "eval_loss")
    assert [values[0] for _, values in found] == pytest.approx([-0.1, 0.0, 1.1 - 1.19897, 1.0 - 1.04846], abs=1e-5)
    read = study.read_study("when", "small")
    assert when.columns(read, {arm: [] for arm in read.arms} | dense | routed) == {
        "ahead at equal FLOPs from": {"depth 8, routed": f"{800 * 64:,} images"}
    }


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


def test_commands_are_those_that_are_left(tmp_path):
    one, data = job(tmp_path / "run"), tmp_path / "data"
    train, *scoring = jobs.commands(one, data)
    assert train[0] == "train.py" and f"results={tmp_path}/run" in train and "seed=0" in train
    assert [words[:2] for words in scoring] == [
        ["fid.py", f"checkpoint={tmp_path}/run/train/step_00000{step}"] for step in (20, 10)
    ]
    jobs.score_folder(one, one.scores[0]).mkdir(parents=True)
    written = {"kid": 0.1, "step": 10, "command": ["/home/me/fid.py"], "checkpoint": "/home/me/run"}
    (jobs.score_folder(one, one.scores[0]) / "fid.json").write_text(json.dumps(written))
    assert jobs.read_score(one, one.scores[0]) == {"words": [*one.scores[0].words], "kid": 0.1, "step": 10}
    assert len(jobs.commands(one, data)) == 2
    for step in (10, 20):  # weights that were kept: nothing is trained again
        jobs.network(one, step).mkdir(parents=True)
    assert [words[:2] for words in jobs.commands(one, data)] == [
        ["fid.py", f"checkpoint={tmp_path}/run/networks/step_0000020"]
    ]


def test_odd_paths_reach_the_doors_whole(tmp_path):
    odd = tmp_path / "it's 50% {new}, = (r→2)"
    command = jobs.training_command(job(odd), odd)
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


def test_slurm_gets_each_training_and_scores_that_wait_for_it(tmp_path, monkeypatch, capsys):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/sent\nwc -l < {tmp_path}/sent\n')
    sbatch.chmod(sbatch.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run.run(run.Options("convergence", submit="slurm", results=str(tmp_path / "results")))
    sent = (tmp_path / "sent").read_text().splitlines()
    assert [line.split("DOOR=")[1].split()[:2] for line in sent] == [
        [door, "scripts/slurm.sh"] for door in ("train.py", "fid.py", "fid.py") * 2
    ]
    assert ["--dependency=afterok:1" in line for line in sent] == [False, True, True, False, False, False]
    assert ["--dependency=afterok:4" in line for line in sent] == [False] * 4 + [True] * 2
    assert capsys.readouterr().out.count("submitted") == 6


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["study=convergense"],
            "there is no study 'convergense'; there are alignment, architectures, architectures_digits",
        ),
        (["study=convergence", "scale=large"], "scale is 'large'"),
        (["study=convergence", "publish=true"], "publish=true is for scale=small"),
        (["study=convergence", "sceds=3"], "the nearest known one is 'seeds'"),
        (["scale=small"], "study"),
        (
            ["study=convergence", "scale=small", "seeds=9", "data=nowhere"],
            "nowhere/imagenette/train, nowhere/imagenette/val, nowhere/imagenette/reference not found",
        ),
        (["study=convergence", "submit=slurm"], "needs sbatch"),
    ],
)
def test_refusals_come_before_any_run(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert said in str(ended.value) and str(ended.value).startswith("error: ")


def test_a_failed_run_says_why_and_the_others_are_made(tmp_path, monkeypatch):
    def pretend(self, command, cores, log, lock=None):
        if "seed=1" in command:
            raise ValueError("train.py ended with 1: error: no room")

    monkeypatch.setattr(jobs.Children, "run", pretend)
    one = job(tmp_path / "one")
    other = jobs.Job(replace(one.training, seed=1), one.scores, tmp_path / "other")
    monkeypatch.setattr(jobs, "keep_networks", lambda job: None)
    ended = []
    assert jobs.make([one, other], tmp_path, 2, lambda: ended.append(1)) == [
        f"{tmp_path}/other: train.py ended with 1: error: no room (its log.txt has all of it)"
    ]
    assert len(ended) == 2


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
        assert whole[key]["points"][-1]["flops"] == cost.training_flops(training)


@pytest.mark.slow
@pytest.mark.parametrize("name", study.names())
def test_every_demo_runs(tmp_path_factory, name):
    place = tmp_path_factory.getbasetemp() / "studies"  # shared, as studies share runs
    assert start(place, f"study={name}", "jobs=2").wait() == 0
    read = study.read_study(name, "demo")
    assert results.missing(study.plan(read), results.finished(place)) == ""
    assert (place / name / "demo" / "figure.png").exists()
    table = (place / name / "demo" / "table.md").read_text()
    assert all(f"| {arm} | 1 |" in table for arm in read.arms)
