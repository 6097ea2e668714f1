"""--help of every door and script, opened as the command line does, in this process.

References: the doors' own keys, and the config files as YAML and as Hydra composes them.
"""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from test_pages import DOORS

from tread.runtime import cli, schema

SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for folder in ("scripts", "benchmarks")
    for path in (ROOT / folder).glob("*.py")
    if '__name__ == "__main__"' in path.read_text()
)
USUAL = r"Usual overrides:\n((?:  .+\n)+)"


@pytest.fixture
def ask(monkeypatch, capsys):
    """A function from a script and its words to what it prints and its exit code."""

    def run(script: str | Path, *words: str) -> tuple[str, int | str]:
        monkeypatch.setattr(sys, "argv", [str(script), *words])
        monkeypatch.setattr(sys, "path", [str((ROOT / script).parent), *sys.path])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        printed = capsys.readouterr()
        return printed.out + printed.err, ended.value.code

    return run


@pytest.mark.parametrize("script", sorted({*DOORS, *SCRIPTS}))
def test_help_is_short_and_says_what_the_script_does(ask, script):
    text, code = ask(script, "--help")
    assert code == 0 and text.count("\n") <= 60 and text == ask(script, "some=thing", "-h")[0]
    assert max(map(len, text.splitlines())) <= 120
    first = (ROOT / script).read_text().removeprefix('"""').partition("\n")[0]
    assert text.startswith(first) and len(first) > 20


@pytest.mark.parametrize("script", ["scripts/quickstart.sh", "scripts/slurm.sh", "scripts/test.sh"])
def test_help_of_shell_scripts_is_their_head(tmp_path, script):
    done = subprocess.run(["bash", ROOT / script, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr and 1 < done.stdout.count("\n") < 10
    assert done.stdout.splitlines()[0] in (ROOT / script).read_text() and "set -" not in done.stdout


@pytest.mark.parametrize("door", DOORS)
def test_keys_of_the_help_are_known_and_have_their_comment(ask, door):
    config, known, _ = DOORS[door]
    text, body = ask(door, "--help")[0], (ROOT / "configs" / f"{config}.yaml").read_text()
    keys = re.findall(r"^  ([\w.]+)(=\S.*?)?  +(\S.*)", text.partition("Keys that are set most:")[2], re.M)
    assert len(keys) >= 3
    for key, _, comment in keys:
        assert key in known and comment[:30] in body, key
    top = {key: value for key, value in yaml.safe_load(body).items() if key not in ("defaults", "hydra")}
    assert {key.split(".")[0] for key, _, _ in keys} >= top.keys()


@pytest.mark.parametrize("door", DOORS)
def test_the_five_usual_overrides_are_of_known_keys_and_choices(ask, door):
    _, known, _ = DOORS[door]
    lines = re.search(USUAL, ask(door, "--help")[0])[1].splitlines()
    assert len(lines) == 5
    for line in lines:
        words = shlex.split(re.split(r" {2,}", line.strip())[0])
        schema.check_overrides(words, known)
        for word in words:
            group, _, choice = word.partition("=")
            folder = ROOT / "configs" / group
            assert not folder.is_dir() or (folder / f"{choice}.yaml").is_file(), word


@pytest.mark.parametrize("door", DOORS)
def test_help_all_shows_every_key_with_its_comment(ask, door):
    """Without one are only what a group's first line explains: what a choice is called, the numbers it stands for."""
    text, code = ask(door, "model=tread", "guidance=sparse", "--help", "all")
    assert code == 0 and "configs/guidance/cfg.yaml" not in text
    groups = ["guidance=sparse"] if DOORS[door][0] in ("sample", "fid", "guidance_sweep") else []
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "configs")):
        tree = OmegaConf.to_container(compose(DOORS[door][0], groups))
    keys = [key for key in tree] + [name for part in tree.values() if isinstance(part, dict) for name in part]
    plain = set(
        "name architecture embedded channels size num_classes kind scale strong weak guidance sweep edm rf".split()
    )
    for key in keys:
        said = "" if key in plain else ".*# "
        assert re.search(rf"^[# -]*{key}:{said}", text, re.M), key


def test_help_needs_no_config_that_composes(tmp_path, monkeypatch, capsys):
    """A wheel's doors lie in tread/doors, with configs/ beside them; there they are commands."""
    folder = tmp_path / "doors"
    shutil.copytree(ROOT / "configs", folder / "configs")
    shutil.copy(ROOT / "sample.py", folder)
    with (folder / "configs" / "sample.yaml").open("a") as file:
        file.write("broken: [1\n")
    monkeypatch.setattr(sys, "argv", ["tread-sample", "--help", "guidance=nothing"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(folder / "sample.py"), run_name="__main__")
    text = capsys.readouterr().out
    assert ended.value.code == 0 and "tread-sample checkpoint=" in text and "python sample.py" not in text
    assert str(folder / "configs") in text


def test_comments_over_several_lines_and_choices_that_no_comment_names_are_told(tmp_path):
    (tmp_path / "kind").mkdir()
    (tmp_path / "kind" / "round.yaml").touch()
    (tmp_path / "kind" / "square.yaml").touch()
    (tmp_path / "it.yaml").write_text(
        "# run it\n#\n# Usual overrides:\n#   a=1  one\n\ndefaults:\n  - other\n  - kind: round  # round, …\n\n"
        "a: [1, 2]  # a list\n           # of two\n# part:\n#   b: 3     # a part's\nc: ???  # must be given\n"
    )
    text = cli.short_help("It does.", tmp_path / "it.yaml")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.startswith("  ")]
    assert lines[1:] == [
        ["kind=round", "round, …; also square"],
        ["a=[1,", "2]    a list of two"],
        ["part.b", "a part's"],
        ["c=…", "must be given"],
    ]
    (tmp_path / "other.yaml").write_text("d: 4\n")
    whole = cli.whole_help(tmp_path / "it.yaml", ["kind=square"])
    assert [Path(path).name for path in re.findall("^# ---- (.*)", whole, re.M)] == [
        "it.yaml",
        "other.yaml",
        "square.yaml",
    ]
