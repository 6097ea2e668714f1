"""Guidance by hand. References: sample.py's own pictures by the command that is shown, what Guidance itself refuses,
configs/sample.yaml; of the page, what an HTML parser and a real browser (slow) make of it."""

from __future__ import annotations

import base64
import contextlib
import html
import http.client
import io
import re
import shlex
import shutil
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path

import explore
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
from tread.reports.explorer import BOXES, DEFAULTS, FIELDS, Explorer, ExplorerOptions, PageHandler, Shown, controls

DIGITS = ROOT / "tests" / "recorded" / "run"
CPU = torch.device("cpu")
FORMS = {
    "none": {},
    "cfg": {"scale": "2", "interval": "0.1, 5"},
    "autoguidance": {"scale": "1.25", "checkpoint": "results/weak"},
    "sparse": {"scale": "3", "strong": "0.5", "weak": "0.25", "force": "on", "same_ids": "on"},
    "sparse_cfg": {"strong": "0.25", "weak": "0.75", "checkpoint": " results/weak/step_0000002 "},
    "sparse_uncond": {"strong": "0", "weak": "0.75"},
    "path_drop": {},
    "path_drop_class": {},
}


def options(checkpoint: object, **changed) -> ExplorerOptions:
    return replace(ExplorerOptions(str(checkpoint), 7860, 64, "auto", None, "ema", True, None), **changed)


@pytest.fixture(scope="module")
def results(composed, tmp_path_factory):
    """Two checkpoints of a network with classes a to e and routes, and a weaker one beside it."""
    folder = tmp_path_factory.mktemp("explorer") / "results"
    for name, step in (("a", 2), ("a", 3), ("weak", 2)):
        save_checkpoint(folder / name, composed, step=step)
    return folder


@pytest.fixture(scope="module")
def opened(results):
    return Explorer(options(results / "a"), CPU, "sample.py")


@pytest.fixture
def explorer(opened, results, monkeypatch):
    """An explorer without pictures so far, in the folder above its results."""
    monkeypatch.chdir(results.parent)
    monkeypatch.setattr(opened, "_drawn", {})
    return opened


def draw(explorer: Explorer, kind: str, labels: list[int], seeds: str, **form: str) -> Shown:
    """A side as its form asks for it, by default of two steps."""
    first = {name: value for name, (_, value, _) in FIELDS.items()} | {"kind": kind, "steps": "2"}
    return explorer.draw(module.read_side(first | form), labels, seeds)


def run(command: str) -> Image.Image:
    """The picture that a command leaves in the working folder."""
    program, script, *words = shlex.split(command)
    assert (program, script) == ("python", "sample.py")
    launch_door(sample.main, "sample", Path.cwd(), *words, "overwrite=true")
    return Image.open("samples.png")


def same(first: Image.Image, second: Image.Image) -> bool:
    return first.mode == second.mode and np.array_equal(np.asarray(first), np.asarray(second))


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_draws_what_is_seen(explorer, kind):
    if KINDS[kind].drops_path:
        with pytest.raises(ValueError, match="not trained with model=sprint"):
            draw(explorer, kind, [1], "1")
        return
    form = {"steps": "3", "solver": "euler" if kind == "sparse" else "", **FORMS[kind]}
    shown = draw(explorer, kind, [1, 5] if kind != "none" else [4], "1, 4" if kind != "cfg" else "2-4", **form)
    assert same(shown.grid, run(shown.command))
    assert f"guidance={kind}" in shown.command and "steps=3" in shown.command
    assert ("of no guidance" in shown.told) == (kind != "none")


def test_the_command_of_digits_draws_what_is_seen_with_other_options_too(tmp_path, monkeypatch):
    """In a folder whose name Hydra would misread."""
    folder = tmp_path / "it's a=b"
    shutil.copytree(DIGITS, folder / "run")
    given = options("run", batch_size=3, precision="fp32", cpu_threads=1, weights="model", decode=False)
    for chosen, place in ((given, folder), (replace(given, checkpoint=str(folder / "run")), tmp_path)):
        monkeypatch.chdir(place)
        shown = draw(Explorer(chosen, CPU, "sample.py"), "cfg", [0, 3], "0-1")
        assert " batch_size=3 precision=fp32 cpu_threads=1 weights=model decode=false " in shown.command
        assert same(shown.grid, run(shown.command))


def test_defaults_that_commands_leave_out_are_those_of_sample_py():
    stated = yaml.safe_load((ROOT / "configs" / "sample.yaml").read_text())
    ours = yaml.safe_load((ROOT / "configs" / "explore.yaml").read_text())
    assert DEFAULTS == {key: stated[key] for key in DEFAULTS} == {key: ours[key] for key in DEFAULTS}
    assert {*ours} - {"defaults", "hydra", "port", "checkpoint"} == {*DEFAULTS}


@pytest.mark.parametrize("kind", KINDS)
def test_controls_without_an_effect_are_those_that_guidance_refuses(kind):
    """Each alone; `force` is refused of no kind, and means something where there are ratios."""
    needed = {"checkpoint": "x"} if KINDS[kind].weak_network == "must" else {}
    needed |= {"weak": 0.5} if KINDS[kind].routed else {}
    given = {"scale": 2.0, "strong": 0.5, "weak": 0.5, "interval": (1.0, 2.0), "checkpoint": "x", "same_ids": True}
    for name, value in given.items():
        refused = pytest.raises(ValueError) if not controls(kind)[name] else contextlib.nullcontext()
        with refused:
            Guidance(kind, **needed | {name: value})
    assert controls(kind)["force"] == KINDS[kind].routed and {*controls(kind)} < {*FIELDS, *BOXES}
    assert len({module.branches(kind) for kind in KINDS}) == len(KINDS)
    form = {"scale": "2", "strong": "0.5", "weak": "0.5", "interval": "[1, 2]", "checkpoint": " x ", "same_ids": "on"}
    side = module.read_side({"kind": kind, "steps": "", **form})
    assert side.guidance == Guidance(kind, **{name: given[name] for name in given if controls(kind)[name]})


def test_costs_are_told(explorer):
    """cfg runs two passes of one size; ω = 1 runs one."""
    assert "2.000 times the FLOPs" in draw(explorer, "cfg", [0], "0", scale="2").told
    alone = draw(explorer, "cfg", [0], "0", scale="1").told
    assert "1.000 times the FLOPs" in alone and "heun with 2 steps, NFE 3" in alone
    assert re.search(r", guidance none, fp32; \d+\.\d\d s for 2 pictures$", draw(explorer, "none", [0], "0-1").told)


def test_networks_and_pictures_are_kept(explorer, monkeypatch):
    done, load, drawing = [], SavedNetwork.load, module.draw_pictures
    monkeypatch.setattr(explorer, "_networks", {})
    monkeypatch.setattr(SavedNetwork, "load", lambda *given: done.append("load") or load(*given))
    monkeypatch.setattr(module, "draw_pictures", lambda *given, **more: done.append("draw") or drawing(*given, **more))
    for scale in ("1.5", "2", "2"):
        draw(explorer, "autoguidance", [0], "0", scale=scale, checkpoint="results/weak")
    assert done.count("load") == 2 and done.count("draw") == 3  # both networks; both scales, and without guidance
    monkeypatch.setattr(module, "GRIDS", 1)
    draw(explorer, "none", [0], "0", steps="3")
    assert len(explorer._drawn) == 1


def test_a_checkpoint_that_changes_or_vanishes_meanwhile_is_seen(results, tmp_path, composed, monkeypatch):
    """Also where its pictures are kept: the command would not run."""
    shutil.copytree(results, tmp_path / "results", symlinks=True)
    monkeypatch.chdir(tmp_path)
    explorer = Explorer(options("results/a"), CPU, "sample.py")
    before = draw(explorer, "none", [0], "0").grid
    shutil.rmtree("results/a")
    _, folder = save_checkpoint(explorer.saved.found.folder.parent, composed, step=4)
    folder.rename(explorer.saved.found.folder)
    assert not same(before, draw(explorer, "none", [0], "0").grid)
    draw(explorer, "autoguidance", [0], "0", checkpoint="results/weak")
    shutil.move("results/weak", "results/elsewhere")
    with pytest.raises(FileNotFoundError, match="no checkpoint at results/weak"):
        draw(explorer, "autoguidance", [0], "0", checkpoint="results/weak")
    (explorer.saved.found.folder / "ema.safetensors").unlink()
    with pytest.raises(ValueError, match="ema.safetensors is missing"):
        draw(explorer, "none", [0], "0")


def test_what_can_not_be_is_refused(explorer):
    for kind, labels, seeds, form, told in (
        ("sparse", [0], "0", {"strong": "0.7", "weak": "0.3"}, "guidance.strong 0.7 is larger"),
        ("sparse", [0], "0", {"weak": "0.95"}, "guidance.weak"),  # keeps a single token of 16
        ("autoguidance", [0], "0", {}, "needs guidance.checkpoint=…"),
        ("cfg", [0], "0", {"interval": "5"}, "guidance.interval is [5.0], but must be [lowest, highest]"),
        ("cfg", [0], "0", {"interval": "from 5"}, "interval is 'from 5', but must be a number"),
        ("cfg", [0], "0", {"scale": ""}, "scale is '', but must be a number"),
        ("none", [0], "0", {"steps": "0"}, "steps is 0, but must be positive"),
        ("none", [0], "0", {"steps": "x", "solver": "y"}, "steps is 'x'"),
        ("else", [0], "0", {}, "guidance.kind is 'else', but must be none"),
        ("none", [0], "0-", {}, "seeds is '0-', but must be a-b"),
        ("none", [0, 1], "0-128", {}, "2 classes and 129 seeds are 258 pictures"),
        ("none", [0], "0-9999999999999", {}, "a side shows 1 to 256"),
        ("none", [], "0", {}, "0 classes and 1 seeds are 0 pictures"),
        ("none", [9], "0", {}, "classes.0 is 9, but the classes are 0..4"),
    ):
        with pytest.raises((ValueError, OSError)) as refused:
            draw(explorer, kind, labels, seeds, **form)
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
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda seed: draw(explorer, "cfg", [0], str(seed)), range(4)))
    assert len(most) == 8 and max(most) == 1


@pytest.fixture
def address(explorer):
    """The address of the explorer's page."""
    with ThreadingHTTPServer((module.HOST, 0), PageHandler) as server, ThreadPoolExecutor() as pool:
        server.explorer = explorer
        pool.submit(server.serve_forever, poll_interval=0.01)
        yield f"{module.HOST}:{server.server_port}"
        server.shutdown()


def ask(address: str, query: str = "", path: str = "/", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address)
    connection.request("GET", path + query, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_page_offers_what_there_is(explorer, address):
    """Class names with their numbers, "no class" where it was trained; the run's other checkpoints; the network."""
    names = ["0 a", "1 b", "2 c", "3 d", "4 e", "no class"]
    assert explorer.class_names == {name: n for n, name in enumerate(names)}
    status, page = ask(address)
    assert status == 200 and re.findall("<option>(.*?)<", page) == ["results/a/step_0000002"] and "<img" not in page
    assert explorer.title.endswith(", step 3") and html.escape(explorer.about) in page
    assert "ema weights of results/a/step_0000003; " in page and "; 16 tokens; trained with r(2→2);" in page
    assert re.findall(r'name="classes" value="(\d)" checked', page) == ["0", "1", "3", "4"]
    assert '<option value="none" selected>' in page and '<option value="cfg" selected>' in page
    digits = Explorer(options(DIGITS), CPU, "sample.py")
    assert list(digits.class_names)[:10] == [str(n) for n in range(10)]
    for refused in ({"path": "/other"}, {"Host": "elsewhere.example:80"}):
        assert ask(address, **refused)[0] == 404


def test_the_page_shows_pictures_and_refusals_beside_the_form_as_it_was_sent(address):
    """The reference: sample.py's picture by the command on the page."""
    form = {"classes": "1", "seeds": "0-1", "kind-A": "sparse", "steps-A": "2", "weak-A": "0.5", "same_ids-A": "on"}
    form |= {"kind-B": "autoguidance", "checkpoint-B": "<no>"}
    _, page = ask(address, "?" + urllib.parse.urlencode(form))
    picture = base64.b64decode(re.search(r'src="data:image/png;base64,([^"]*)"', page)[1])
    command = html.unescape(re.search("<pre>(.*)</pre>", page)[1])
    assert same(Image.open(io.BytesIO(picture)), run(command)) and "guidance.same_ids=true" in command
    assert 'role="alert">no checkpoint at &lt;no&gt;' in page and 'value="&lt;no&gt;"' in page
    assert 'name="weak-A" value="0.5"' in page and 'name="same_ids-A" value="on" checked' in page


@pytest.mark.slow
def test_a_browser_hides_what_has_no_effect(address):
    playwright = pytest.importorskip("playwright.sync_api")
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("there is no chromium here; Debian's package of that name has it")
    with playwright.sync_playwright() as started:
        page, heard = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"]).new_page(), []
        page.on("request", lambda asked: heard.append(asked.url))
        page.goto(f"http://{address}")
        for kind in KINDS:
            page.locator("[name=kind-B]").select_option(kind)
            side = page.locator("fieldset", has=page.locator("[name=kind-B]"))
            for name, effect in controls(kind).items():
                assert side.locator(f".{name}").is_visible() == effect
            assert side.locator(f".about-{kind}").is_visible()
        page.get_by_role("button", name="Draw A and B").click()
        page.locator("#A img").wait_for()
        assert all(asked.startswith((f"http://{address}", "data:")) for asked in heard)


def test_a_busy_port_is_refused_before_any_work(address, tmp_path):
    port = address.rpartition(":")[2]
    with pytest.raises(SystemExit, match="Address already in use"):
        launch_door(explore.main, "explore", tmp_path, "checkpoint=results/no", f"port={port}")
