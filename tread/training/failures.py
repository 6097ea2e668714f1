"""How a launch of train.py fails: what is printed and recorded."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType

import torch
from torch._dynamo.exc import BackendCompilerFailed

from tread.runtime.signals import INTERRUPTED, Stop, leave_at_once
from tread.training.run import Failure, Run, first_line, note_failure
from tread.training.step import training_step


class Launch:
    """The context of a launch: it listens for signals to stop, and ends the process as the run ended.

    run       the run, once it has begun.
    finished  whether all steps are done; if not, the exit code at the end is INTERRUPTED.
    """

    def __init__(self) -> None:
        self.stop, self.finished = Stop(), False
        self.run: Run | None = None

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType) -> None:
        try:
            if isinstance(error, (ValueError, OSError, Failure, torch.OutOfMemoryError)):
                note_failure(self.run, str(error))
                leave_at_once(1, f"error: {error}")
                sys.exit(f"error: {error}")
            if isinstance(error, Exception):
                note_failure(self.run, first_line(error))
                leave_at_once(1, "".join(traceback.format_exception(error)))
        finally:
            self.stop.close()
        if error is None:
            leave_at_once(0 if self.finished else INTERRUPTED)
            if not self.finished:
                sys.exit(INTERRUPTED)


def guarded_step(run: Run) -> None:
    """A training step, without compiled blocks from where their compiler fails.

    Raises Failure, with what to try, where the device's memory does not suffice.
    """
    try:
        training_step(run)
    except torch.OutOfMemoryError as error:
        images = run.micro_batches[0].stop - run.micro_batches[0].start
        raise Failure(
            f"out of memory with micro-batches of {images} images: {first_line(error)}\n  train.micro_batch_size="
            f"{max(1, images // 2)} gives the same results; train.activation_checkpointing=true needs less memory too"
        ) from error
    except BackendCompilerFailed as error:  # a block's graph, although the sample of settle_compile went well
        run.processes.say(f"warning: going on without torch.compile, which failed: {first_line(error)}")
        torch.compiler.set_stance("force_eager")
        run.optimizer.zero_grad()
        training_step(run)
