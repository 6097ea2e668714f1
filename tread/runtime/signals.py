"""Being asked to stop: the step that runs is finished, and all processes stop after the same one."""

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
PATIENCE = datetime.timedelta(hours=2)  # with other processes: one may hash or write a large checkpoint meanwhile
INTERRUPTED = 75  # exit code of a run that was stopped and saved: EX_TEMPFAIL, "try again later"
SAME = 0.5  # seconds in which a signal that comes again is the same one: torchrun repeats what the terminal sent to all


def leave_at_once(code: int, last_words: str = "") -> None:
    """End this process without taking anything apart, where it has process groups; elsewhere do nothing.

    A gloo group that is deleted waits for its threads while it holds Python's lock, and a thread may wait for
    that lock to drop a tensor: then the process never ends.
    """
    if dist.is_initialized():
        sys.stdout.flush()
        sys.stderr.write(last_words and last_words + "\n")
        sys.stderr.flush()
        os._exit(code)


class Stop:
    """Listens for SIGTERM, SIGUSR1 and Ctrl-C from its making until `close`.

    The first signal sets `reason`; a second one calls `ending` and ends the process at once, even while
    it waits for a device. Of what accelerate or torchrun has started, the end of the launcher counts as a signal
    too, since not all launchers pass signals on. To be made in the main thread.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.ending: Callable[[str], None] | None = None  # gets the name of the second signal
        launched = "ACCELERATE_MIXED_PRECISION" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ
        self._launcher = os.getppid() if launched else None
        self._group, self._flag, self._work = None, None, None
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        # Python handlers run between bytecodes of the main thread, so they wait for what it waits for; this thread
        # hears of signals at once
        self._before = {number: signal.signal(number, self._first) for number in SIGNALS}
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(self._read,), daemon=True, name="signals").start()

    def _first(self, number: int, frame: object) -> None:
        self.reason = self.reason or signal.Signals(number).name

    def _watch(self, descriptor: int) -> None:
        """Until the pipe is closed: end the process at the second signal."""
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
        """Let several processes agree, through gloo on their CPUs: no device is waited for."""
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE) if processes > 1 else None

    def poll(self) -> bool:
        """Whether to stop now, the same on all processes, which all call it once a step; with several it lags."""
        if self._launcher is not None and os.getppid() != self._launcher:
            self.reason = self.reason or "the launcher has ended"
        if self._group is None:
            return self.reason is not None
        asked = self._answer()
        self._flag = torch.tensor([float(self.reason is not None)])
        self._work = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return asked

    def agreed(self) -> bool:
        """Whether any process was asked to stop. All of them call it, and wait for one another."""
        return self.poll() or (self._group is not None and self._answer())

    def _answer(self) -> bool:
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        return work is not None and bool(self._flag.item())

    def close(self) -> None:
        """Stop listening: signals do again what they did before."""
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._write)
