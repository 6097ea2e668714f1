"""Stopping on request: the running step is finished, and all processes stop after the same step."""

import datetime
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
PATIENCE = datetime.timedelta(hours=2)  # to wait for another process, which may hash or write a large checkpoint
INTERRUPTED = 75  # exit code of a run that was stopped and saved: EX_TEMPFAIL, "try again later"
SAME = 0.5  # seconds in which repeated signals count as one: the terminal and torchrun may both send Ctrl-C


def leave_at_once(code: int, last_words: str = "") -> None:
    """Print `last_words` and exit with `code`, without clean-up, if torch.distributed is initialised; else do nothing.
    Clean-up could hang: deleting a gloo group holds the GIL while it waits for threads that may need it."""
    if dist.is_initialized():
        sys.stdout.flush()
        sys.stderr.write(last_words and last_words + "\n")
        sys.stderr.flush()
        os._exit(code)


class Stop:
    """Listens for SIGTERM, SIGUSR1 and Ctrl-C until `close` is called. Must be constructed in the main thread.

    The first signal sets the attribute `reason` to its name. A second one, more than 0.5 s (SAME) later, calls the
    attribute `ending`, if set, and ends the process at once, even while the main thread waits for a device. `poll` sets
    `reason`, too, once the launcher (accelerate or torchrun) has ended, as not all launchers forward signals.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.ending: Callable[[str], None] | None = None  # gets the name of the second signal
        launched = "ACCELERATE_MIXED_PRECISION" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ
        self._launcher = os.getppid() if launched else None
        self._group, self._flag, self._work = None, None, None
        read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        # Python's handlers are delayed while the main thread waits for a device; the thread below sees signals at once
        self._before = {number: signal.signal(number, self._first) for number in SIGNALS}
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(read,), daemon=True, name="signals").start()

    def _first(self, number: int, frame: object) -> None:
        self.reason = self.reason or signal.Signals(number).name

    def _watch(self, descriptor: int) -> None:
        """Read signal numbers from a pipe until it is closed, and end the process at the second signal (see Stop)."""
        first = None
        while received := os.read(descriptor, 1):
            if received[0] not in SIGNALS:
                continue
            first = first or time.monotonic()
            if time.monotonic() - first > SAME:
                try:
                    if self.ending is not None:
                        self.ending(signal.Signals(received[0]).name)
                finally:
                    os._exit(128 + received[0])
        os.close(descriptor)

    def connect(self, processes: int) -> None:
        """If `processes` > 1, create a gloo group, in which all processes agree to stop without waiting for a GPU."""
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE) if processes > 1 else None

    def poll(self) -> bool:
        """Return whether to stop. All processes must call this once a step, and all get the same answer; with several
        processes the answer covers only signals received before the previous call."""
        if self._launcher is not None and os.getppid() != self._launcher:
            self.reason = self.reason or "the launcher has ended"
        if self._group is None:
            return self.reason is not None
        asked = self._answer()
        self._flag = torch.tensor([float(self.reason is not None)])
        self._work = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return asked

    def agreed(self) -> bool:
        """Return whether any process was asked to stop. All processes must call this, and wait for one another here."""
        return self.poll() or self._answer()

    def _answer(self) -> bool:
        """Wait for the answer of the last poll and return it; False if there is none, as with one process."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        return work is not None and bool(self._flag.item())

    def close(self) -> None:
        """Stop listening, and restore the earlier signal handlers."""
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._write)
