"""How many CPU threads compute: what was asked for, by setting or by OMP_NUM_THREADS, else all cores.

The references are OpenMP's reading of the variable (a positive number, or a list of them of which the first
counts here; anything else is passed over), accelerate's own environment of what it launches, and
torchrun's documented one (OMP_NUM_THREADS=1 beside RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE).
"""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from conftest import ROOT

from tread.runtime.device import (
    attention_fault,
    avoid_faults,
    exact,
    set_tf32,
    tf32_flags,
    use_cores,
    use_expandable_segments,
    use_precision,
)

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


MATMUL, CUDNN, GPU = torch.backends.cuda.matmul, torch.backends.cudnn, torch.device("cuda")


@pytest.fixture
def fp32():
    """Puts torch's switches of TF32 back."""
    before = tf32_flags()
    yield
    if hasattr(torch.backends, "fp32_precision"):
        torch.backends.fp32_precision = "none"
    set_tf32(before)


@pytest.mark.skipif(not hasattr(MATMUL, "fp32_precision"), reason="new switches come with torch 2.9")
@pytest.mark.parametrize(
    "owner, name, value",
    [
        (MATMUL, "allow_tf32", True),
        (CUDNN, "allow_tf32", False),
        (MATMUL, "fp32_precision", "tf32"),
        (CUDNN.conv, "fp32_precision", "ieee"),  # not that of recurrent networks: reading the old switch raises
        (torch.backends, "fp32_precision", "tf32"),
        (torch.backends, "fp32_precision", "ieee"),
    ],
)
def test_exact_numbers_whatever_switch_a_user_sets(fp32, owner, name, value):
    """By old switches or new ones, before the precision is set or after; both kinds can be read inside and behind."""
    use_precision("fp32", GPU)
    setattr(owner, name, value)
    before = tf32_flags()
    for _ in range(2):
        with exact():
            assert tf32_flags() == ["ieee"] * 3 and not MATMUL.allow_tf32 and not CUDNN.allow_tf32
        assert tf32_flags() == before and MATMUL.allow_tf32 == (before[0] == "tf32")
    for precision, expected in (("bf16", "tf32"), ("fp32", "ieee")):
        use_precision(precision, GPU)
        assert tf32_flags() == [expected] * 3 and MATMUL.allow_tf32 == CUDNN.allow_tf32 == (expected == "tf32")


def test_a_torch_with_old_switches_alone(monkeypatch):
    matmul, cudnn = SimpleNamespace(allow_tf32=True), SimpleNamespace(allow_tf32=False)
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    monkeypatch.setattr(torch.backends, "cudnn", cudnn)
    with exact():
        assert not matmul.allow_tf32 and not cudnn.allow_tf32
    assert matmul.allow_tf32 and not cudnn.allow_tf32
    use_precision("bf16", GPU)
    assert vars(matmul) == vars(cudnn) == {"allow_tf32": True}
    use_precision("fp32", GPU)
    assert vars(matmul) == vars(cudnn) == {"allow_tf32": False}


@pytest.mark.parametrize(
    "release, cudnn, keys, expected",
    [
        ("2.9.0+cu128", 91002, None, "169849"),
        ("2.9.1", 91500, 77, "169849"),
        ("2.9.1", 91501, None, None),
        ("2.9.1+cu130", 91501, 64, None),
        ("2.8.0", 91002, 64, None),
        ("2.10.0", 91002, 64, None),
        ("2.11.0", 91900, 64, "196678"),
        ("2.13.0+cu130", 92000, 192, "196678"),
        ("2.14.0a0+git1234", 92501, 64, "196678"),
        ("2.13.0", 92000, 128, None),
        ("2.13.0", 92000, 77, None),
        ("2.13.0", 92000, None, None),
        ("2.15.0", 92600, 64, None),
        ("2.9.0+cpu", None, 64, None),
    ],
)
def test_faults_of_attention_are_known_and_avoided(monkeypatch, release, cudnn, keys, expected):
    """Versions: those of PyTorch's issues and of the changes that closed them."""
    fault = attention_fault(release, cudnn, keys)
    assert (expected in fault) if expected else fault is None
    switched = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", switched.append)
    monkeypatch.setattr(torch, "__version__", release)
    monkeypatch.setattr(CUDNN, "version", lambda: cudnn)
    assert avoid_faults(torch.device("cpu"), keys) is None and not switched
    line = avoid_faults(GPU, keys)
    assert switched == [False] * bool(expected)
    assert line is None or (line.startswith("attention runs without cuDNN") and line.endswith(f"cuDNN {cudnn}"))


@pytest.mark.parametrize("own", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", None])
def test_segments_grow_unless_the_user_said_how_memory_is_allocated(environ, own):
    """And only where there is a GPU: its allocator is told before CUDA is used."""
    told = []
    environ.setattr("torch._C._accelerator_setAllocatorSettings", told.append, raising=False)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        environ.delenv(name, raising=False)
    if own:
        environ.setenv(own, "max_split_size_mb:64")
    for there in (False, True):
        environ.setattr("torch.cuda.is_available", lambda there=there: there)
        use_expandable_segments()
    assert told == ([] if own else ["expandable_segments:True"])


@pytest.mark.gpu
def test_segments_grow_on_a_gpu(environ):
    """As the allocator itself says; in a process that has not used CUDA."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        environ.delenv(name, raising=False)
    code = "import torch; from tread.runtime.distributed import open_training; open_training('auto', None)"
    said = "print(torch.cuda.memory._snapshot()['allocator_settings']['expandable_segments'])"
    done = subprocess.run([sys.executable, "-c", f"{code}; {said}"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split()[-1:] == ["True"], done.stdout + done.stderr
