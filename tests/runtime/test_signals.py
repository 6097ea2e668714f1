"""Being asked to stop: what is left is what an undisturbed run has at that step, and says so."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, TINY, launch, same, state
from forked import start_python, start_together

from tread.runtime.signals import SIGNALS, Stop

LONG = [*TINY, "train.steps=100000", "every.save=100000", "every.sample=100000", "every.evaluate=100000"]
RUN = "results/digits-tread"


def begin(folder, *launcher: str) -> subprocess.Popen:
    """Start train.py by a launcher, and wait until it has done some steps."""
    process = subprocess.Popen(
        [sys.executable, *launcher, str(ROOT / "train.py"), *LONG],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    wait_until(lambda: steps_logged(folder) >= 3, process)
    return process


def begin_forks(folder, processes: int = 1) -> list:
    """The same without a launcher; what they print is in folder/printed."""
    outputs = [str(folder / "printed")] * 2
    started = start_together(ROOT / "train.py", *LONG, cwd=folder, outputs=outputs, processes=processes)
    wait_until(lambda: steps_logged(folder) >= 3)
    return started


def end_of(processes: list, folder) -> str:
    """Wait for them; returns what they printed."""
    for process in processes:
        process.join(60)
    return (folder / "printed").read_text()


def steps_logged(folder) -> int:
    path = folder / RUN / "metrics.jsonl"
    return path.read_text().count('"loss"') if path.exists() else 0


def status(folder) -> dict:
    path = folder / RUN / "status.json"
    return json.loads(path.read_text()) if path.exists() else {}


def wait_until(condition, process=None, seconds=90):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        assert process is None or process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


def equals_an_undisturbed_run(folder, reference):
    """The saved weights, averages and moments, bit for bit."""
    step = status(folder)["step"]
    launch(reference, f"train.steps={step}", "every.save=100000", "every.sample=100000", "every.evaluate=100000")
    assert same(folder / RUN, reference / RUN)


# SIGUSR1 is tests/doors/test_launches.py's, too
@pytest.mark.parametrize("number", [SIGNALS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in SIGNALS[1:])])
def test_a_signal_finishes_the_step_saves_and_exits_with_75(tmp_path, number):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    (process,) = begin_forks(tmp_path / "a")
    assert status(tmp_path / "a")["state"] == "running"
    os.kill(process.pid, number)
    text = end_of([process], tmp_path / "a")
    assert process.exitcode == 75 and "Traceback" not in text
    found = status(tmp_path / "a")
    assert found["state"] == "interrupted" and found["reason"] == number.name and found["step"] >= 3
    assert f"stopped by {number.name} after step {found['step']}; step {found['step']} is saved" in text
    equals_an_undisturbed_run(tmp_path / "a", tmp_path / "b")
    launch(tmp_path / "a", f"train.steps={found['step'] + 2}")
    assert status(tmp_path / "a")["state"] == "finished" and status(tmp_path / "a")["step"] == found["step"] + 2


@pytest.mark.slow
@pytest.mark.parametrize("to", ["launcher", "one process"])
def test_two_processes_stop_after_the_same_step(tmp_path, to):
    """Under torchrun, which passes SIGTERM on; or when a signal reaches one process alone."""
    if to == "launcher":
        torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv_backend=c10d"]
        process = begin(tmp_path, *torchrun, "--rdzv_endpoint=localhost:0")
        process.terminate()
        text = process.communicate(timeout=60)[0]
    else:
        both = begin_forks(tmp_path, processes=2)
        os.kill(status(tmp_path)["pid"], signal.SIGUSR1)
        text = end_of(both, tmp_path)
        assert [process.exitcode for process in both] == [75, 75]
    found = status(tmp_path)
    assert found["state"] == "interrupted" and found["reason"] in ("SIGTERM", "SIGUSR1"), text
    assert text.count("is saved; start it again") == 1
    resumed = state(tmp_path / RUN)
    assert int(resumed["optimizer/step/x_embedder.proj.bias"]) == found["step"]


@pytest.mark.slow
def test_the_end_of_the_launcher_is_a_signal(tmp_path):
    """accelerate launch dies of SIGTERM without telling the training process."""
    process = begin(tmp_path, "-m", "accelerate.commands.launch", "--num_processes=1", "--cpu")
    process.terminate()
    process.wait(timeout=30)
    wait_until(lambda: status(tmp_path)["state"] != "running", seconds=30)
    assert status(tmp_path)["state"] == "interrupted" and status(tmp_path)["reason"] == "the launcher has ended"
    process.communicate(timeout=30)


BUSY = """
import sys, time, torch
from tread.runtime.signals import Stop
torch.set_num_threads(1)
stop = Stop()
stop.ending = lambda name: print("ending by", name, flush=True)
x = torch.zeros(int(sys.argv[1]), int(sys.argv[1]))
print("ready", flush=True)
x @ x
time.sleep(0.01)  # for the handlers
print("asked by", stop.reason, stop.poll(), flush=True)
"""


@pytest.mark.parametrize("again, width", [(0.0, 2000), (0.8, 6000)])
def test_a_second_signal_ends_at_once_while_the_main_thread_computes(tmp_path, again, width):
    """During a product of matrices no Python handler can run. What comes within half a second is one signal."""
    printed = tmp_path / "printed"
    process = start_python("-c", BUSY, width, cwd=ROOT, outputs=[str(printed)] * 2)
    wait_until(lambda: printed.exists() and printed.read_text() == "ready\n")
    os.kill(process.pid, signal.SIGINT)
    time.sleep(again)
    os.kill(process.pid, signal.SIGTERM)
    text = end_of([process], tmp_path).removeprefix("ready\n")
    if again:
        assert process.exitcode == 128 + signal.SIGTERM and text == "ending by SIGTERM\n"
    else:
        assert process.exitcode == 0 and text.startswith("asked by SIG") and text.endswith(" True\n")


def test_signals_do_again_what_they_did_before():
    before = [signal.getsignal(number) for number in SIGNALS]
    Stop().close()
    assert before == [signal.getsignal(number) for number in SIGNALS]
