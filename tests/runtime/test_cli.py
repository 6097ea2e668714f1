"""How doors end at Ctrl-C and at a closed pipe. The reference is what a shell calls it: 128 and the signal's number."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys

import pytest
from conftest import ROOT

from tread.runtime.cli import explained
from tread.runtime.files import explain_failure

DOORS = [ROOT / name for name in ("train.py", "sample.py", "fid.py")]
PARTS = ("wheel.py", "checkout.py")  # of setup, and of the other scripts
DOORS += [path for path in sorted((ROOT / "scripts").glob("*.py")) if path.name not in PARTS]
BENCHMARKS = [path for path in sorted((ROOT / "benchmarks").glob("*.py")) if path.name != "timing.py"]  # their library


def test_ctrl_c_is_a_line_and_130(capsys):
    with pytest.raises(SystemExit) as end, explained(), explained("stopped; nothing was written"):
        raise KeyboardInterrupt
    assert end.value.code == 130 and capsys.readouterr().err == "stopped; nothing was written\n"


@pytest.mark.parametrize("buffering", [1, -1], ids=["at once", "when it ends"])
def test_a_closed_pipe_is_141_without_a_word(monkeypatch, capsys, buffering):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=buffering) as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(SystemExit) as end, explained(), explain_failure(ROOT):
            print("a line")
        assert end.value.code == 141
        output.flush()  # what Python does at its end
    assert capsys.readouterr().err == ""


def test_an_error_stays_one_where_nobody_reads_the_output(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(SystemExit, match="error: bad"), explained():
            print("a line")
            raise ValueError("bad")


IMPORTS = """
import signal, sys, time
if sys.argv[1] == "ignored":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
from tread.runtime.import_guard import guard_imports
guard_imports(globals())
assert "torch" not in sys.modules
if sys.argv[1] == "imported":
    main = None
try:
    print("ready", flush=True)
    sys.stdin.readline()
except KeyboardInterrupt:
    print("raised")
"""


@pytest.mark.parametrize(
    "when, ends", [("importing", (130, "", "stopped\n")), ("imported", (0, "raised\n", "")), ("ignored", (0, "", ""))]
)
def test_ctrl_c_while_a_door_imports(when, ends):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-c", IMPORTS, when], cwd=ROOT, text=True, **pipes)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    printed = process.communicate("go on\n", timeout=30)
    assert (process.returncode, *printed) == ends


@pytest.mark.parametrize("path", DOORS, ids=lambda path: path.name)
def test_doors_guard_their_imports_and_what_they_do(path):
    """Before anything that is not of the standard library is imported."""
    text, tree = path.read_text(), ast.parse(path.read_text())
    said = "guard_imports(globals())" if path.parent == ROOT else "import checkout"
    (guard,) = (node for node in tree.body if isinstance(node, ast.If) and said in ast.unparse(node))
    for node in tree.body[: tree.body.index(guard)]:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [getattr(node, "module", None) or node.names[0].name]
            assert set(modules) <= sys.stdlib_module_names, f"{path.name}: {modules}"
    assert "open_door(main" in text or "with explained(" in text


def test_scripts_guard_their_imports_by_the_checkout_they_lie_in(tmp_path):
    """Elsewhere and without an installed package: `tread` is found, and the handler is set before torch is there."""
    only = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    code = "import checkout, signal, sys; print(signal.getsignal(signal.SIGINT).__name__, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=only)
    assert done.stdout == "interrupted False\n", done.stderr


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.name)
def test_benchmarks_end_by_a_line_too(path):
    assert '__main__":\n    begin(main)\n' in path.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_doors_before_head(tmp_path, unbuffered):
    """Real interpreters, whose output nobody reads."""
    run = ROOT / "tests" / "recorded" / "run"
    for code, *command in (
        (141, "sample.py", f"checkpoint={run}", "steps=2", "seeds=0-1"),
        (141, "scripts/compare_runs.py", str(run)),
        (-signal.SIGPIPE, "train.py", "--cfg", "job"),
    ):
        reader, writer = os.pipe()
        os.close(reader)
        words = [sys.executable, str(ROOT / command[0]), *command[1:]]
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path, text=True, env=environment)
        os.close(writer)
        assert done.returncode in (code, 128 + signal.SIGPIPE) and "BrokenPipe" not in done.stderr, done.stderr
    assert (tmp_path / "samples.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.5, 4.0])
def test_ctrl_c_in_a_real_door(tmp_path, seconds):
    """While it imports, or a little later."""
    command = [sys.executable, ROOT / "sample.py", f"checkpoint={ROOT}/tests/recorded/run", "steps=100000"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(seconds)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and error.endswith("stopped\n") and "Traceback" not in error
    assert not list(tmp_path.iterdir())
