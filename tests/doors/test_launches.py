"""Ready commands: the accelerate configs say what accelerate understands, and the Slurm script requeues what was saved.

Slurm is a stand-in that starts processes with its variables; signals and exit codes are real."""

import os
import signal
import subprocess
import time

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from conftest import ROOT, TINY, read_json

SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
for i in 0 1; do SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & echo $! >> pids; done
code=0
for pid in $(cat pids); do wait $pid || code=$?; done
exit $code
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then echo localhost; else echo "$@" >> requeued; fi
"""


@pytest.mark.parametrize("name, processes", [("1gpu", 1), ("8gpu", 8), ("2nodes", 16)])
def test_accelerate_reads_the_launch_configs(name, processes):
    found = load_config_from_file(str(ROOT / f"configs/launch/{name}.yaml"))
    assert found.num_processes == processes and found.mixed_precision == "no"
    assert found.distributed_type.value == ("NO" if processes == 1 else "MULTI_GPU")


@pytest.mark.slow
def test_the_slurm_script_saves_before_the_end_and_requeues(tmp_path):
    for name, content in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train.py").symlink_to(ROOT / "train.py")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    slurm = {
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_NTASKS": "2",
    }
    environment = {**os.environ, **slurm, "SLURM_NNODES": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment["PYTHONPATH"] = str(ROOT)
    options = [*TINY, "train.steps=100000", "every.save=100000", "every.sample=100000", "every.evaluate=100000"]
    job = subprocess.Popen(
        ["bash", str(ROOT / "scripts/slurm.sh"), *options],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    metrics, end = tmp_path / "results/digits-tread/metrics.jsonl", time.monotonic() + 90
    while not (metrics.exists() and metrics.read_text().count("loss") > 3):
        assert time.monotonic() < end and job.poll() is None, job.communicate()[0]
        time.sleep(0.1)
    for pid in (tmp_path / "pids").read_text().split():
        os.kill(int(pid), signal.SIGUSR1)
    text = job.communicate(timeout=60)[0]
    assert job.returncode == 75, text
    assert (tmp_path / "requeued").read_text() == f"requeue {os.getpid()}\n"
    status = read_json(metrics.parent / "status.json")
    assert status["state"] == "interrupted" and status["reason"] == "SIGUSR1"
    assert (metrics.parent / "latest").resolve().name == f"step_{status['step']:07d}"
