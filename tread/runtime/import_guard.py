"""A line in place of a traceback while a script still imports, which takes seconds: for Ctrl-C, and for packages that
are not installed. Standard library alone."""

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path


def guard_imports(script: Mapping) -> None:
    """Let Ctrl-C and a missing package end the process by a line, with 130 and 1, until a script's globals() hold its
    `main`.

    From there on both raise, as ever. Where Ctrl-C is ignored, it stays so.
    """

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
