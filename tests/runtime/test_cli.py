"""How entry points end at Ctrl-C and at a closed pipe. The reference is a shell's: 128 and the signal's number."""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from conftest import ROOT

from tread.runtime.cli import explained
from tread.runtime.files import explain_failure

DOORS = [ROOT / name for name in ("train.py", "sample.py", "fid.py")]
PARTS = ("wheel.py", "checkout.py", "timing.py")  # of setup, and of the others
OTHERS = [*sorted((ROOT / "benchmarks").glob("*.py")), ROOT / "studies/run.py", ROOT / "studies/cifar10.py"]
DOORS += [path for path in sorted((ROOT / "scripts").glob("*.py")) if path.name not in PARTS]


def test_ctrl_c_is_a_line_and_130(capsys):
    with pytest.raises(SystemExit) as end, explained(), explained("stopped; nothing was written"):
        raise KeyboardInterrupt
    assert end.value.code == 130 and capsys.readouterr().err == "stopped; nothing was written\n"


@pytest.fixture
def unread(monkeypatch):
    """A function that redirects standard output to a pipe that nobody reads."""
    outputs = []

    def redirect(buffering: int) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        outputs.append(open(writer, "w", buffering=buffering))
        monkeypatch.setattr(sys, "stdout", outputs[0])

    yield redirect
    outputs[0].close()  # as Python does at its end


@pytest.mark.parametrize("buffering", [1, -1], ids=["at once", "when it ends"])
def test_a_closed_pipe_is_141_without_a_word(unread, capsys, buffering):
    unread(buffering)
    with pytest.raises(SystemExit) as end, explained(), explain_failure(ROOT):
        print("a line")
    assert end.value.code == 141 and capsys.readouterr().err == ""


def test_an_error_stays_one_where_nobody_reads_the_output(unread):
    unread(-1)
    with pytest.raises(SystemExit, match="error: bad"), explained():
        print("a line")
        raise ValueError("bad")


IMPORTS = """
import signal, sys
if sys.argv[1] == "ignored":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
import checkout
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
def test_ctrl_c_while_a_script_imports(tmp_path, when, ends):
    """Elsewhere and without an installed package: scripts find `tread` by the checkout that they lie in."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    only = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    process = subprocess.Popen([sys.executable, "-c", IMPORTS, when], cwd=tmp_path, text=True, env=only, **pipes)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    printed = process.communicate("go on\n", timeout=30)
    assert (process.returncode, *printed) == ends


def test_scripts_guard_their_imports_and_what_they_do():
    """Before anything that is not of the standard library is imported."""
    for path in DOORS:
        text, tree = path.read_text(), ast.parse(path.read_text())
        said = "guard_imports(globals())" if path.parent == ROOT else "import checkout"
        (guard,) = (node for node in tree.body if isinstance(node, ast.If) and said in ast.unparse(node))
        for node in tree.body[: tree.body.index(guard)]:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                modules = [getattr(node, "module", None) or node.names[0].name]
                assert {module.partition(".")[0] for module in modules} <= sys.stdlib_module_names, path.name
        assert "open_door(main" in text or "with explained(" in text, path
    for path in (ROOT / "benchmarks").glob("*.py"):
        assert path.name in PARTS or '__main__":\n    begin(main)\n' in path.read_text(), path


def test_without_the_packages_every_entry_point_says_what_to_install(tmp_path):
    """Real interpreters that look into no site-packages; started at once, since each only imports."""
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    paths = [*DOORS, *(path for path in OTHERS if path.name not in PARTS)]
    for door in [subprocess.Popen([sys.executable, "-S", path], stderr=-1, text=True, env=bare) for path in paths]:
        said = door.communicate(timeout=60)[1]
        assert door.returncode == 1 and said.count("\n") == 1, said
        assert re.match(r"the package \w+ is not installed .*pip install -r .*requirements.txt$", said), said


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_commands_before_head(tmp_path, unbuffered):
    """Real interpreters, whose output nobody reads."""
    run = shutil.copytree(ROOT / "tests" / "recorded" / "run", tmp_path / "run")  # a comparison lies beside it
    for command in (
        ("sample.py", f"checkpoint={run}", "steps=2", "seeds=0-1"),
        ("scripts/compare_runs.py", str(run)),
        ("train.py", "--cfg", "job"),
    ):
        reader, writer = os.pipe()
        os.close(reader)
        words = [sys.executable, str(ROOT / command[0]), *command[1:]]
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path, text=True, env=environment)
        os.close(writer)
        assert done.returncode == 141 and "BrokenPipe" not in done.stderr, done.stderr
    assert (tmp_path / "samples.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.5, 4.0])
def test_ctrl_c_in_a_real_script(tmp_path, seconds):
    """While it imports, or a little later."""
    command = [sys.executable, ROOT / "sample.py", f"checkpoint={ROOT}/tests/recorded/run", "steps=100000"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(seconds)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and error.endswith("stopped\n") and "Traceback" not in error
    assert not list(tmp_path.iterdir())
