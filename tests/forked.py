"""Python commands run by forks of a process that has imported torch and the doors already.

What a command does from there on is what it does from the command line: its own process, folder, arguments,
output and exit code. runtime/test_signals.py and doors/test_launches.py start launchers, and with them real
interpreters.
"""

import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["imported"])
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")])


def _become(command: list[str], folder: str, environment: dict[str, str], outputs: list[str]) -> None:
    """What the fork does: `python` with these arguments."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in zip((1, 2), outputs):
        with open(path, "ab") as file:
            os.dup2(file.fileno(), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.set_start_method(None, force=True)  # Python's own default, not that of forks
    if command[0] == "-c":
        sys.argv, sys.path[0:0] = ["-c", *command[2:]], [folder]
        exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0:0] = command, [str(Path(command[0]).resolve().parent)]
        runpy.run_path(command[0], run_name="__main__")


def fork(target: Callable, *given: object) -> multiprocessing.Process:
    """Start target(*given). The first call starts the server, which finds what it imports ahead by PYTHONPATH alone."""
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = PATHS
    try:
        process = FORKS.Process(target=target, args=given)
        process.start()
    finally:
        os.environ.pop("PYTHONPATH")
        if path is not None:
            os.environ["PYTHONPATH"] = path
    return process


def start_python(
    *command: object, cwd: Path, outputs: list[str], environment: dict[str, str] | None = None
) -> multiprocessing.Process:
    """Start `python *command`, a script's path or -c and code first; output goes to two files."""
    environment = environment or {**os.environ, "PYTHONPATH": PATHS}
    return fork(_become, [str(part) for part in command], str(cwd), environment, outputs)


def start_together(
    *command: object, cwd: Path, outputs: list[str], processes: int, environment: dict[str, str] | None = None
) -> list[multiprocessing.Process]:
    """Start `python *command` by several processes as torchrun does, or by one."""
    base = dict(os.environ if environment is None else environment)
    started = []
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    for rank in range(processes):
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
        place |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
        place |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
        own = base | place if processes > 1 else base
        started.append(start_python(*command, cwd=cwd, outputs=outputs, environment=own))
    return started


def run_python(
    *command: object, cwd: Path, processes: int = 1, environment: dict[str, str] | None = None, timeout: float = 120
) -> subprocess.CompletedProcess:
    """Run `python *command` to its end, by several processes if asked; their output together.

    The exit code is the first that is not 0.
    """
    with tempfile.TemporaryDirectory() as folder:
        outputs = [f"{folder}/stdout", f"{folder}/stderr"]
        started = start_together(*command, cwd=cwd, outputs=outputs, processes=processes, environment=environment)
        for process in started:
            process.join(timeout)
        hanging = [process for process in started if process.exitcode is None]
        for process in hanging:
            process.kill()
            process.join()
        printed = [Path(path).read_text() if Path(path).exists() else "" for path in outputs]
        if hanging:
            raise subprocess.TimeoutExpired(command, timeout, *printed)
        code = next((process.exitcode for process in started if process.exitcode), 0)
        return subprocess.CompletedProcess(command, code, *printed)
