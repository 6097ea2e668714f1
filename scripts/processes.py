"""The processes of a launch that share a work of independent parts, for the scripts beside this file."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate import PartialState
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from compute import use_cores  # noqa: E402


class Processes:
    """This process among those that `accelerate launch` or torchrun started, or the only one.

    They talk through gloo, whatever the device: all they say is that they are done, and the others
    may take hours. device None is the GPU that belongs to this process, else the CPU.
    """

    def __init__(self, device: str | None) -> None:
        self._state = PartialState(cpu=True, timeout=datetime.timedelta(days=7))
        self.rank, self.count, self.main = (
            self._state.process_index,
            self._state.num_processes,
            self._state.is_main_process,
        )
        if int(os.environ.get("WORLD_SIZE", 1)) != self.count:
            raise ValueError(f"{os.environ['WORLD_SIZE']} processes were launched, but accelerate runs {self.count}")
        if device is None:
            device = f"cuda:{self._state.local_process_index}" if torch.cuda.is_available() else "cpu"
        try:
            self.device = torch.device(device)
            torch.zeros(1, device=self.device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"device {device!r} can't be used: {error}") from error
        self.cores = use_cores(None, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """A context that the main process goes through before the others."""
        if not self.main:
            self.wait()
        yield
        if self.main:
            self.wait()

    def wait(self) -> None:
        """Until all processes are here. Raises OSError if another one has ended."""
        try:
            self._state.wait_for_everyone()
        except RuntimeError as error:  # of torch.distributed
            raise OSError("another process stopped; see its message") from error

    def say(self, text: str) -> None:
        """Print a line, from the main process alone."""
        if self.main:
            tqdm.write(text)
