"""Ends a script with one line, not a traceback, if Ctrl-C or a missing package stops its imports."""

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path


def guard_imports(script: Mapping) -> None:
    """While a script imports, let Ctrl-C (exit code 130) and a missing package (exit code 1) end the process with one
    line. `script` is the script's globals(). Once the script has defined `main`, its imports count as done, and Ctrl-C
    and missing packages raise as usual. If Ctrl-C was being ignored, it stays ignored."""

    def interrupted(number: int, frame: object) -> None:
        if "main" in script:
            raise KeyboardInterrupt
        os.write(2, b"stopped\n")
        os._exit(128 + number)

    def uncaught(kind: type, error: BaseException, traceback: object) -> None:
        if "main" in script or not isinstance(error, ModuleNotFoundError):
            sys.__excepthook__(kind, error, traceback)
            return
        needed = Path(__file__).resolve().parents[2] / "requirements.txt"
        os.write(2, f"the package {error.name} is not installed here: pip install -r {needed}\n".encode())

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupted)
    sys.excepthook = uncaught
