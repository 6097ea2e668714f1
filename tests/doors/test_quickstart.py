"""What a newcomer does, in a fresh copy and a fresh environment. The judge knows real digits: 0.989."""

import os
import subprocess

import pytest
from conftest import ROOT

from tread.checkpoints.run_log import RunLog


@pytest.mark.slow
def test_quickstart_from_nothing_reaches_label_agreement(tmp_path):
    home = tmp_path / "a path with spaces/tread"
    home.mkdir(parents=True)
    tracked = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes((ROOT / name).read_bytes())
    environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH", "OMP_NUM_THREADS")}
    if "VIRTUAL_ENV" in os.environ:
        kept = [p for p in os.environ["PATH"].split(":") if not p.startswith(os.environ["VIRTUAL_ENV"])]
        environment["PATH"] = ":".join(kept)

    def quickstart() -> str:
        command = ["bash", str(home / "scripts/quickstart.sh")]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stderr + done.stdout

    text = quickstart()
    run = home / "results/digits-tread"
    judged = [record for record in RunLog(run).records() if "label_agreement" in record][-1]
    assert judged["demo_samples"] == 1000 and judged["label_agreement"] >= 0.95
    assert judged["frechet_pixels_real"] < judged["frechet_pixels"] < 3 * judged["frechet_pixels_real"]
    for shown in ("samples/step_", "loss.png", "latest", "label_agreement", "frechet_pixels_real"):
        assert shown in text
    assert "results/digits-tread/report.html" in "\n".join(text.splitlines()[-3:])
    assert (run / "report.html").stat().st_size < 10e6
    before = {path: path.stat().st_mtime for path in run.glob("step_*/*")}
    assert "is finished" in quickstart()
    assert {path: path.stat().st_mtime for path in run.glob("step_*/*")} == before
