"""Guidance by hand, without its page. The references: sample.py's own pictures by the command that is shown, what
Guidance itself refuses, and configs/sample.yaml."""

from __future__ import annotations

import re
import shlex
import shutil
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, launch_door, save_checkpoint
from PIL import Image

import sample
from tread.checkpoints.for_sampling import SavedNetwork
from tread.diffusion.guidance import KINDS, Guidance
from tread.reports import explorer as module
from tread.reports.explorer import DEFAULTS, Explorer, ExplorerOptions, Side, branches, controls

DIGITS = ROOT / "tests" / "recorded" / "run"
CPU = torch.device("cpu")
SIDES = {
    "none": Side("none"),
    "cfg": Side("cfg", 2, interval="0.1, 5"),
    "autoguidance": Side("autoguidance", 1.25, checkpoint="results/weak"),
    "sparse": Side("sparse", 3, 0.5, 0.25, force=True, same_ids=True),
    "sparse_cfg": Side("sparse_cfg", 1.5, 0.25, 0.75, checkpoint="results/weak/step_0000002"),
    "sparse_uncond": Side("sparse_uncond", 1.5, 0.0, 0.75),
    "path_drop": Side("path_drop", 1.5),
    "path_drop_class": Side("path_drop_class", 1.5),
}


def options(checkpoint: object, **changed) -> ExplorerOptions:
    return replace(ExplorerOptions(str(checkpoint), 7860, 64, "auto", None, "ema", True, None), **changed)


@pytest.fixture
def explorer(tmp_path, composed, monkeypatch):
    """Of a network with the classes a to e and routes, with a weaker one beside it, in their folder."""
    save_checkpoint(tmp_path / "results" / "a", composed)
    save_checkpoint(tmp_path / "results" / "weak", composed, step=2)
    monkeypatch.chdir(tmp_path)
    return Explorer(options("results/a"), CPU, "sample.py")


def run(folder, command: str) -> Image.Image:
    """The picture that a command leaves in a folder."""
    program, script, *words = shlex.split(command)
    assert (program, script) == ("python", "sample.py")
    launch_door(sample.main, "sample", folder, *words, "overwrite=true")
    return Image.open(folder / "samples.png")


def same(one: Image.Image, other: Image.Image) -> bool:
    return one.mode == other.mode and np.array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_draws_what_is_seen(explorer, tmp_path, kind):
    side = replace(SIDES[kind], steps=3, solver="euler" if kind == "sparse" else None)
    if KINDS[kind].drops_path:
        with pytest.raises(ValueError, match="not trained with model=sprint"):
            explorer.draw(side, [1], "1")
        return
    shown = explorer.draw(side, [1, 5] if kind != "none" else [4], "1, 4" if kind != "cfg" else "2-4")
    assert same(shown.grid, run(tmp_path, shown.command))
    assert f"guidance={kind}" in shown.command and "steps=3" in shown.command
    assert ("of no guidance" in shown.told) == (kind != "none")


def test_the_command_of_digits_draws_what_is_seen_with_other_options_too(tmp_path, monkeypatch):
    """In a folder whose name Hydra would misread."""
    folder = tmp_path / "it's a=b"
    shutil.copytree(DIGITS, folder / "run")
    monkeypatch.chdir(folder)
    given = options("run", batch_size=3, precision="fp32", cpu_threads=1, weights="model", decode=False)
    for one, place in ((given, folder), (replace(given, checkpoint=str(folder / "run")), tmp_path)):
        monkeypatch.chdir(place)
        shown = Explorer(one, CPU, "sample.py").draw(Side("cfg", 1.5, steps=2), [0, 3], "0-1")
        for word in ("batch_size=3", "precision=fp32", "cpu_threads=1", "weights=model", "decode=false"):
            assert f" {word} " in shown.command
        assert same(shown.grid, run(place, shown.command))
    assert shown.grid.size == (2 * 64 + 2, 2 * 64 + 2)


def test_defaults_that_commands_leave_out_are_those_of_sample_py():
    stated = yaml.safe_load((ROOT / "configs" / "sample.yaml").read_text())
    ours = yaml.safe_load((ROOT / "configs" / "explore.yaml").read_text())
    assert DEFAULTS == {key: stated[key] for key in DEFAULTS} == {key: ours[key] for key in DEFAULTS}
    assert {*ours} - {"defaults", "hydra", "port", "checkpoint", "autoencoder"} == {*DEFAULTS}


@pytest.mark.parametrize("kind", KINDS)
def test_controls_without_an_effect_are_those_that_guidance_refuses(kind):
    """Each alone; `force` is refused of no kind, and means something where there are ratios."""
    needed = {"checkpoint": "x"} if KINDS[kind].weak_network == "must" else {}
    given = {"scale": 2.0, "strong": 0.5, "weak": 0.5, "interval": (1.0, 2.0), "checkpoint": "x", "same_ids": True}
    for name, value in given.items():
        try:
            Guidance(
                kind, **needed | ({"weak": 0.5} if name == "strong" and KINDS[kind].routed else {}) | {name: value}
            )
            accepted = True
        except ValueError:
            accepted = False
        assert controls(kind)[name] == accepted, name
    assert controls(kind)["force"] == KINDS[kind].routed
    all_set = Side(kind, 2, 0.25, 0.5, "1, 2", " x ", True, True).guidance()
    shown = {name: value for name, value in (given | {"strong": 0.25, "force": True}).items() if controls(kind)[name]}
    assert all_set == Guidance(kind, **shown)


def test_kinds_are_told_apart():
    assert branches("cfg") == "strong branch: class; weak branch: no class"
    assert "weaker network" in branches("autoguidance") and "no effect" in branches("sparse_uncond")
    assert len({branches(kind) for kind in KINDS}) == len(KINDS)


def test_costs_are_told(explorer):
    """cfg runs two passes of one size; ω = 1 runs one."""
    assert "2.00 times the FLOPs" in explorer.draw(Side("cfg", 2, steps=2), [0], "0").told
    alone = explorer.draw(Side("cfg", 1, steps=2), [0], "0").told
    assert "1.00 times the FLOPs" in alone and alone.endswith("2 steps of heun, NFE 3")
    assert re.fullmatch(
        r"no guidance: \d+\.\d\d s for 2 pictures; 2 steps of heun, NFE 3",
        explorer.draw(Side("none", steps=2), [0], "0-1").told,
    )


def test_networks_and_pictures_are_kept(explorer, monkeypatch):
    loads, draws = [], []
    load, draw = SavedNetwork.load, module.draw_pictures
    monkeypatch.setattr(SavedNetwork, "load", lambda *given: loads.append(given) or load(*given))
    monkeypatch.setattr(module, "draw_pictures", lambda *given, **more: draws.append(given) or draw(*given, **more))
    for scale in (1.5, 2.0, 2.0):
        explorer.draw(replace(SIDES["autoguidance"], scale=scale, steps=2), [0], "0")
    assert len(loads) == 1  # the weak network; the other was loaded when the page was opened
    assert len(draws) == 3  # both scales, and without guidance, once each
    monkeypatch.setattr(module, "GRIDS", 1)
    explorer.draw(Side("none", steps=3), [0], "0")
    assert len(explorer._drawn) == 1


def test_a_checkpoint_that_is_written_anew_is_read_anew(explorer, composed):
    before = explorer.draw(Side("none", steps=2), [0], "0").grid
    shutil.rmtree("results/a")
    _, folder = save_checkpoint(explorer.saved.found.folder.parent, composed, step=4)
    folder.rename(explorer.saved.found.folder)
    assert not same(before, explorer.draw(Side("none", steps=2), [0], "0").grid)


def test_a_checkpoint_that_vanishes_meanwhile_is_told(explorer):
    """Also of what was drawn before: its command would not run."""
    side = replace(SIDES["autoguidance"], steps=2)
    explorer.draw(side, [0], "0")
    shutil.move("results/weak", "results/elsewhere")
    with pytest.raises(FileNotFoundError, match="no checkpoint at results/weak: .* not there"):
        explorer.draw(side, [0], "0")
    (explorer.saved.found.folder / "ema.safetensors").unlink()
    with pytest.raises(ValueError, match="ema.safetensors is missing"):
        explorer.draw(Side("none", steps=2), [0], "0")
    shutil.rmtree("results")
    with pytest.raises(FileNotFoundError, match="no checkpoint at .*step_0000003: .* not there"):
        explorer.draw(Side("none", steps=2), [0], "0")


def test_what_can_not_be_is_refused(explorer):
    for side, labels, seeds, told in (
        (Side("sparse", strong=0.7, weak=0.3), [0], "0", "guidance.strong 0.7 is larger than guidance.weak 0.3"),
        (Side("sparse", weak=0.95), [0], "0", "guidance.weak"),  # keeps a single token of 16
        (Side("autoguidance"), [0], "0", "needs guidance.checkpoint=…"),
        (Side("autoguidance", checkpoint="results/a"), [0], "0", "it can't guide itself"),
        (Side("autoguidance", checkpoint="results/no"), [0], "0", "no checkpoint at results/no"),
        (Side("cfg", interval="5, 1"), [0], "0", "guidance.interval is [5.0, 1.0]"),
        (Side("cfg", interval="5"), [0], "0", "guidance.interval is [5.0], but must be [lowest, highest]"),
        (Side("cfg", interval="from 5"), [0], "0", "guidance.interval is 'from 5', but must be the lowest"),
        (Side("cfg", interval="0.1, inf"), [0], "0", "guidance.interval.1 is inf, but must be a finite number"),
        (Side("cfg", interval="500, 600"), [0], "0", "none of the sampling's noise levels lies in it"),
        (Side("cfg", scale=None), [0], "0", "guidance.scale is None, but must be float"),
        (Side("none", steps=0), [0], "0", "steps is 0, but must be positive"),
        (Side("none", steps=1), [0], "0", "steps is 1, but EDM's schedule needs at least 2"),
        (Side("none"), [0], "0-", "seeds is '0-', but must be a-b"),
        (Side("none"), [0], "", "seeds is '', but must be a-b"),
        (Side("none"), [0, 1], "0-128", "2 classes and 129 seeds are 258 pictures"),
        (Side("none"), [0], "0-9999999999999", "a side shows at most 256 pictures"),
        (Side("none"), [], "0", "0 classes and 1 seeds are 0 pictures"),
        (Side("none"), [9], "0", "classes.0 is 9, but the classes are 0..4"),
    ):
        with pytest.raises((ValueError, OSError)) as refused:
            explorer.draw(replace(side, steps=side.steps if side.kind == "none" else 2), labels, seeds)
        assert told in str(refused.value)


def test_one_drawing_at_a_time(explorer, monkeypatch):
    inside, most = [], []

    def slow(model, decoder, seeds, *rest, **more):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()
        yield torch.zeros(len(seeds), 3, 16, 16, dtype=torch.uint8)

    monkeypatch.setattr(module, "draw_pictures", slow)
    threads = [threading.Thread(target=explorer.draw, args=(Side("cfg", steps=2), [0], str(seed))) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 8 and max(most) == 1


def test_what_the_page_offers(explorer, composed, tmp_path):
    """Class names with their numbers, null where it was trained; the run's other checkpoints; what is drawn from."""
    names = ["0 a", "1 b", "2 c", "3 d", "4 e", "no class"]
    assert explorer.class_names == {name: n for n, name in enumerate(names)} and explorer.others == []
    save_checkpoint(tmp_path / "results" / "a", composed, step=2)
    assert explorer.others == ["results/a/step_0000002"]
    assert explorer.title.endswith(", step 3") and explorer.about.startswith("ema weights of results/a/step_0000003; ")
    assert "trained with r(2→2)" in explorer.about and "16 tokens" in explorer.about
    digits = Explorer(options(DIGITS), CPU, "sample.py")
    assert list(digits.class_names)[:10] == [str(n) for n in range(10)]
