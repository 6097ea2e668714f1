"""How many CPU threads compute: what was asked for, by setting or by OMP_NUM_THREADS, else all cores.

The references are OpenMP's reading of the variable (a positive number, or a list of them of which the first
counts here; anything else is passed over), accelerate's own environment of what it launches, and
torchrun's documented one (OMP_NUM_THREADS=1 beside RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE).
"""

import os
import subprocess
import sys

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from conftest import ROOT

from tread.runtime.device import use_cores, use_expandable_segments

TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def environ(monkeypatch):
    """An environment without a word about threads or a launcher; torch keeps its own number."""
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")] + list(TORCHRUN):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    yield monkeypatch
    torch.set_num_threads(threads)


def accelerates(threads: int) -> dict[str, str]:
    """What `accelerate launch` sets for a single process."""
    options = "--num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no".split()
    options += ["--num_cpu_threads_per_process", str(threads)]
    arguments = launch_command_parser().parse_args([*options, "train.py"])
    arguments.use_cpu = False
    environment = prepare_simple_launcher_cmd_env(arguments)[1]
    return {key: value for key, value in environment.items() if key.startswith(("ACCELERATE_", "OMP_"))}


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({}, None),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "3,1"}, 3),
        ({"OMP_NUM_THREADS": ""}, None),
        ({"OMP_NUM_THREADS": "many"}, None),
        ({"OMP_NUM_THREADS": "0"}, None),
        (TORCHRUN, None),
        ({**TORCHRUN, "OMP_NUM_THREADS": "3"}, 3),
        (accelerates(1), None),
        (accelerates(3), 3),
    ],
    ids=str,
)
def test_a_setting_wins_over_the_users_variable_and_that_over_all_cores(environ, variables, expected):
    """1 below a launcher is the launcher's, as both set it for what they start; expected None is all cores."""
    for name, value in variables.items():
        environ.setenv(name, value)
    environ.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    assert use_cores(None, processes=1) == (expected or 8) and use_cores(None, processes=2) == (expected or 4)
    assert use_cores(2, processes=1) == 2


@pytest.mark.slow
def test_all_cores_are_used_where_a_launcher_left_one():
    """In a process of its own: torch has taken the launcher's 1 when we are asked."""
    cores = f"import os; os.sched_setaffinity(0, {os.sched_getaffinity(1)}); "  # all, whatever a test's worker has
    code = cores + "import torch; from tread.runtime.device import use_cores; "
    code += "print(torch.get_num_threads(), use_cores(None, 1), use_cores(3, 1))"
    environment = {**os.environ, **accelerates(1)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["1", str(len(os.sched_getaffinity(1))), "3"], done.stderr


@pytest.mark.parametrize("own", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", None])
def test_segments_grow_unless_the_user_said_how_memory_is_allocated(environ, own):
    """And only where there is a GPU: its allocator is told before CUDA is used."""
    told = []
    environ.setattr("torch.cuda.memory._set_allocator_settings", told.append)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        environ.delenv(name, raising=False)
    if own:
        environ.setenv(own, "max_split_size_mb:64")
    for there in (False, True):
        environ.setattr("torch.cuda.is_available", lambda there=there: there)
        use_expandable_segments()
    assert told == ([] if own else ["expandable_segments:True"])


@pytest.mark.gpu
def test_segments_grow_on_a_gpu():
    """As the allocator itself says; in a process that has not used CUDA."""
    code = "import torch; from tread.runtime.distributed import open_training; open_training('auto', None)"
    said = "print(torch.cuda.memory._snapshot()['allocator_settings']['expandable_segments'])"
    done = subprocess.run([sys.executable, "-c", f"{code}; {said}"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split()[-1] == "True", done.stdout + done.stderr
