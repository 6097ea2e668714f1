"""The page of scripts/explore.py: what its door refuses before any work, and, slow, the page in a real browser.

The references: the operating system's own ports, and sample.py's picture by the command that the page shows.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import explore
import numpy as np
import pytest
from conftest import ROOT, launch_door
from forked import run_python
from PIL import Image

from tread.checkpoints import checkpoint
from tread.diffusion.guidance import KINDS
from tread.reports.explorer import SAME, controls

DIGITS = ROOT / "tests" / "recorded" / "run"
FIRST = "http://127.0.0.1"


@pytest.fixture
def refusal(tmp_path, capsys, monkeypatch):
    """A function from overrides to the line that the door ends with, before it looks for the checkpoint."""
    monkeypatch.setitem(sys.modules, "gradio", SimpleNamespace(__version__="6.0.0"))
    monkeypatch.delenv("GRADIO_ANALYTICS_ENABLED", raising=False)

    def run(*overrides: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            launch_door(explore.main, "explore", tmp_path, "checkpoint=results/a", *overrides)
        assert "\n" not in stopped.value.code and stopped.value.code.startswith("error: ")
        return stopped.value.code

    return run


def test_without_the_extra_the_door_names_the_command(refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)  # as Python marks what can't be imported
    assert refusal().endswith("needs gradio, version 6 or later: pip install -r requirements-explore.txt")
    monkeypatch.setitem(sys.modules, "gradio", SimpleNamespace(__version__="5.49.1"))
    assert refusal().endswith("pip install -r requirements-explore.txt; here is 5.49.1")
    assert os.environ["GRADIO_ANALYTICS_ENABLED"] == "False"


def test_a_busy_port_is_one_line(refusal):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        told = f"port {port} of 127.0.0.1 is taken, maybe by another page: port={port + 1} or any other that is free"
        assert refusal(f"port={port}") == f"error: {told}"
    assert "no checkpoint at results/a" in refusal(f"port={port}")
    assert "port is 70000, but must lie in 1..65535" in refusal("port=70000")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def page(tmp_path):
    """(the page in a browser, its door's process, what was asked of other machines) of digits with two checkpoints.

    Stops door and browser.
    """
    playwright = pytest.importorskip("playwright.sync_api")
    pytest.importorskip("gradio")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium here; Debian's package of that name has it")
    shutil.copytree(DIGITS, tmp_path / "results" / "digits")
    shutil.copytree(DIGITS, tmp_path / "results" / "weak")
    own = tmp_path / "results" / "weak" / "step_0000020"
    shutil.copy(own / "model.safetensors", own / "ema.safetensors")  # as weak as the raw weights are
    hashes = [checkpoint.find(own).sha256(part) for part in ("ema", "model")]
    (own / "info.json").write_text((own / "info.json").read_text().replace(*hashes))
    port = free_port()
    command = [sys.executable, ROOT / "scripts" / "explore.py", "checkpoint=results/digits", f"port={port}"]
    log = tmp_path / "log.txt"
    (tmp_path / "temporary").mkdir()
    with log.open("w") as file:
        place = os.environ | {"TMPDIR": str(tmp_path / "temporary")}
        door = subprocess.Popen([*command, "cpu_threads=1"], cwd=tmp_path, env=place, stdout=file, stderr=file)
    try:
        wait_for(lambda: FIRST in log.read_text() or door.poll() is not None)
        assert log.read_text() == f"{FIRST}:{port}  digits-tread, step 20; Ctrl-C closes it\n"
        with playwright.sync_playwright() as started:
            sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
            browser = started.chromium.launch(executable_path=chromium, args=sandbox)
            context = browser.new_context(viewport={"width": 1280, "height": 900})
            context.grant_permissions(["clipboard-read", "clipboard-write"])
            opened, foreign = context.new_page(), []
            opened.set_default_timeout(120_000)
            opened.on("request", lambda asked: foreign.append(asked.url))
            opened.on("pageerror", lambda error: foreign.append(str(error)))
            opened.goto(f"{FIRST}:{port}")
            opened.get_by_role("button", name="Draw A and B").wait_for()
            yield opened, door, foreign
            browser.close()
    finally:
        door.kill()
        door.wait()


def wait_for(happened, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


@pytest.mark.slow
def test_all_kinds_are_clicked_through_once(page, tmp_path):
    opened, door, foreign = page
    side = {name: opened.locator(f"#{name}-B") for name in ("kind", "told", "grid", "command", *controls("sparse"))}

    def choose(kind: str) -> None:
        side["kind"].locator("input").click()
        opened.get_by_role("option", name=kind, exact=True).click()

    def weaken(given: str) -> None:
        side["checkpoint"].locator("input").fill(given)
        side["checkpoint"].locator("input").press("Enter")

    def draw(told: str) -> None:
        opened.get_by_role("button", name="Draw A and B").click()
        side["told"].get_by_text(re.compile(told)).wait_for()

    opened.locator("#seeds input, #seeds textarea").fill("0-1")
    for name in "AB":
        opened.locator(f"#steps-{name} input").fill("4")
    for kind in KINDS:
        choose(kind)
        for name, has_effect in controls(kind).items():
            side[name].wait_for(state="visible" if has_effect else "hidden")
        if controls(kind)["checkpoint"]:
            weaken(SAME if kind == "sparse" else "results/weak")
        if kind == "cfg":
            side["scale"].locator("input[type=number]").fill("3.5")
            side["interval"].locator("input, textarea").fill("0.1, 20")
        draw(r"^no guidance: " if kind == "none" else rf"^{kind} [\d.]+.* times the FLOPs .* 4 steps of heun, NFE \d+$")
        picture = opened.request.get(side["grid"].locator("img").get_attribute("src")).body()
        side["command"].get_by_role("button").click()
        copied = opened.evaluate("navigator.clipboard.readText()")
        program, script, *words = shlex.split(copied)
        assert (program, (tmp_path / script).resolve()) == ("python", ROOT / "sample.py")
        assert ("guidance.checkpoint=results/weak/step_0000020" in words) == (kind in ("autoguidance", "sparse_cfg"))
        done = run_python(ROOT / "sample.py", *words, f"out={kind}.png", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        ours = Image.open(tmp_path / f"{kind}.png")
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(picture)).convert(ours.mode)), np.asarray(ours)), kind
    assert opened.locator("#told-A").inner_text().startswith("no guidance: ")

    choose("sparse")
    weaken(SAME)
    for name, ratio in (("strong", "0.7"), ("weak", "0.3")):
        side[name].locator("input[type=number]").fill(ratio)
    draw(r"^guidance.strong 0.7 is larger than guidance.weak 0.3: .*\)$")
    assert side["grid"].locator("img").count() == 0 and not side["command"].locator("textarea").input_value()
    choose("cfg")
    (tmp_path / "results" / "digits").rename(tmp_path / "results" / "gone")
    draw("^no checkpoint at .*/step_0000020: it is not there$")
    assert "no checkpoint at" in opened.locator("#told-A [role=alert]").inner_text()

    start = opened.url
    assert len(foreign) > 20 and all(asked.startswith((start, "data:", "blob:" + start)) for asked in foreign)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", int(start.split(":")[2].strip("/"))), timeout=5)
    door.send_signal(signal.SIGINT)
    assert door.wait(30) == 130 and not any((tmp_path / "temporary").rglob("*.png"))
    (_, last) = (tmp_path / "log.txt").read_text().splitlines()
    assert last == "closed"
