"""Ctrl-C while a script still imports, which takes seconds: a line in place of a traceback. Standard library alone."""

import os
import signal
from collections.abc import Mapping


def guard_imports(script: Mapping) -> None:
    """Let Ctrl-C end the process at once, by a line and 130, until a script's globals() hold its `main`.

    From there on it raises KeyboardInterrupt, as ever. Where it is ignored, it stays so.
    """

    def interrupted(number: int, frame: object) -> None:
        if "main" in script:
            raise KeyboardInterrupt
        os.write(2, b"stopped\n")
        os._exit(128 + number)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupted)
