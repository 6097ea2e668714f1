"""The package: what a wheel holds, and that it trains and samples where there is no checkout."""

import configparser
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT, names_in
from PIL import Image


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Made of a copy of the files that git knows, so that nothing is left beside them."""
    folder = tmp_path_factory.mktemp("package")
    listed = ["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard", "-z"]
    for name in subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file() and not name.startswith("tests/"):
            (folder / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "copy" / name).write_bytes((ROOT / name).read_bytes())
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(folder)!r})"  # as pip calls it
    done = subprocess.run([sys.executable, "-c", build], cwd=folder / "copy", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = folder.glob("*.whl")
    return made


def test_a_wheel_holds_the_method_and_one_package_with_doors_and_configs(wheel):
    with zipfile.ZipFile(wheel) as content:
        names = [name for name in content.namelist() if ".dist-info/" not in name]
        info = wheel.name.rpartition("-py3")[0] + ".dist-info"
        metadata = content.read(f"{info}/METADATA").decode()
        entries = configparser.ConfigParser()
        entries.read_string(content.read(f"{info}/entry_points.txt").decode())
    assert {name.partition("/")[0] for name in names} == {"tread", "routing_module.py", "dit.py", "rf.py"}
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "tread").rglob("*.py")}
    ours |= {f"tread/{name}" for name in ("reports/page.html", "reports/page.css", "reports/page.js")}
    ours.add("tread/evaluation/cifar10.npz")
    ours |= {f"tread/doors/{name}.py" for name in ("train", "sample", "fid")}
    ours |= {f"tread/doors/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert {name for name in names if name.startswith("tread/")} == ours
    doors = {f"tread-{name}": f"tread.doors:{name}" for name in ("train", "sample", "fid")}
    assert dict(entries["console_scripts"]) == doors
    needed = [line.partition("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    stated = [line.removeprefix("Requires-Dist: ") for line in metadata.splitlines() if "Requires-Dist" in line]
    plain = {line.split(">")[0].split("<")[0] for line in stated if "extra" not in line}
    assert plain == {line.split(">")[0] for line in needed}
    assert all(f"Provides-Extra: {name}\n" in metadata for name in ("import", "tensorboard", "test"))


@pytest.mark.slow
def test_in_an_empty_environment_it_trains_and_samples(wheel, tmp_path):
    """A new virtual environment, and a folder that holds nothing."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    place, programs = tmp_path / "place", tmp_path / "venv/bin"
    place.mkdir()
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(*command: object) -> str:
        done = subprocess.run(command, cwd=place, env=kept, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    run(programs / "pip", "install", "--quiet", wheel)
    assert "digits-tread, 20 steps" in run(programs / "tread-train", "model=tread", "train.steps=20")
    run(programs / "tread-sample", "checkpoint=results/digits-tread", "classes=[3]", "seeds=0-3", "steps=4")
    assert Image.open(place / "samples.png").size == (4 * 64 + 3 * 2, 64)
    text = run(programs / "tread-fid", "checkpoint=results/digits-tread", "num_samples=20", "steps=4")
    assert "label_agreement" in text
    assert names_in(place) == {"data", "results", "samples.png"}
