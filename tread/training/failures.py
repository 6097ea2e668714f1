"""Failures of train.py: messages and exit codes, continuing without torch.compile, and advice when memory runs out."""

import contextlib
import math
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch._dynamo.exc import BackendCompilerFailed

from tread.runtime.compiling import first_line
from tread.runtime.device import autocast
from tread.runtime.signals import INTERRUPTED, Stop, leave_at_once
from tread.training.draws import step_draws
from tread.training.run import Failure, Run, note_failure
from tread.training.step import loss, training_step


@dataclass
class Launch:
    """The state that `launched` shares with the work inside its context."""

    stop: Stop
    finished: bool = False  # whether all steps are done; if not, the exit code is INTERRUPTED
    run: Run | None = None  # once it has begun


@contextlib.contextmanager
def launched() -> Iterator[Launch]:
    """Context that yields a Launch, in which train.py sets `run` and `finished`. It listens for stop signals, turns
    expected errors into exit code 1 and a message without traceback, and exits with code 75 if `finished` is False."""
    launch = Launch(Stop())
    try:
        yield launch
    except BaseException as error:
        if launch.run is not None and launch.run.written is not None:
            launch.run.written.exception()  # waits for the checkpoint that a thread is writing
        if isinstance(error, (ValueError, OSError, Failure, torch.OutOfMemoryError)):
            reason = "its output was closed (a broken pipe)" if isinstance(error, BrokenPipeError) else str(error)
            if isinstance(error, torch.OutOfMemoryError):
                advice = "a smaller eval.batch_size, sampling.classes or sampling.per_class needs less"
                reason = f"out of memory outside the training steps: {first_line(error)}: {advice}"
            note_failure(launch.run, reason)
            leave_at_once(1, f"error: {reason}")
            sys.exit(f"error: {reason}")
        if isinstance(error, Exception):
            note_failure(launch.run, first_line(error))
            leave_at_once(1, "".join(traceback.format_exception(error)))
        raise
    finally:
        launch.stop.close()
    leave_at_once(0 if launch.finished else INTERRUPTED)
    if not launch.finished:
        sys.exit(INTERRUPTED)


def guarded_step(run: Run) -> None:
    """Run a training step; if torch.compile fails, run it and all later ones uncompiled. Raises Failure if the device's
    memory does not suffice; the message names a micro-batch size that fits, if one is found."""
    full = None
    try:
        training_step(run)
    except torch.OutOfMemoryError as error:
        full = str(error)
    except BackendCompilerFailed as error:  # although the test in settle_compile succeeded
        run.say(f"warning: going on without torch.compile, which failed: {first_line(error)}")
        torch.compiler.set_stance("force_eager")
        run.optimizer.zero_grad()
        guarded_step(run)
    if full is not None:  # outside the except block, which holds the step's memory
        run.graphs = None
        raise Failure(explain_memory(run, full))


def explain_memory(run: Run, error: str) -> str:
    """Return a message for the out-of-memory error `error`; it names a micro-batch size found to fit, if any."""
    rows, cfg = run.micro_batches[0], run.cfg
    share, tried = cfg.train.batch_size // run.processes.count, rows.stop - rows.start
    run.optimizer.zero_grad()
    draws = step_draws(cfg, run.data.latents, run.step, run.device).rows(rows)
    batch = run.loader.batches(run.step)[0]
    aligner = run.aligner_at(run.step)
    module = aligner.module if aligner else run.network
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def attempt(size: int) -> None:
        few = slice(0, size)
        copies = 1 + (0 if run.optimizer.state else cfg.optim.copies)  # gradients that stay, its future state
        room = [parameter.new_empty(math.ceil(copies * parameter.numel())) for parameter in parameters]
        with torch.compiler.set_stance("force_eager"), autocast(run.device, run.precision):
            given = (batch.rows(few), draws.rows(few), run.network.null(1))
            total = sum(term.mean() for term in loss(cfg, module, run.data.latents, *given, aligner))
        torch.autograd.grad(total, parameters)  # not backward(), which would have DDP wait for other processes
        del room  # held until here

    at_most = tried - 1  # then at most half of the size tried before
    while size := next((part for part in range(at_most, 0, -1) if share % part == 0), None):
        torch.cuda.empty_cache()
        try:
            attempt(size)
            break
        except torch.OutOfMemoryError:
            at_most = size // 2
    said = f"out of memory with micro-batches of {tried} images: {error.splitlines()[0]}"
    fits = f"train.micro_batch_size={size} would fit, with the same results" if size else "even one image does not fit"
    return f"{said}\n  {fits}. train.memory=checkpointing needs less memory too"
