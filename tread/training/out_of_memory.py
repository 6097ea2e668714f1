"""Running out of a device's memory: which micro-batch would fit."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tread.runtime.device import autocast
from tread.training.run import Run
from tread.training.step import losses, step_draws


def find_fitting(attempt: Callable[[int], None], share: int, tried: int) -> int | None:
    """A micro-batch below the one that was tried for which an attempt does not run out of memory; None without any.

    It divides a process's share of the batch. Each attempt that fails is followed by one of at most half its size.
    """
    at_most = tried - 1
    while size := next((size for size in range(at_most, 0, -1) if share % size == 0), None):
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        try:
            attempt(size)
            return size
        except torch.OutOfMemoryError:
            at_most = size // 2
    return None


def explain_memory(run: Run, error: str) -> str:
    """For people: the micro-batch that would fit, which is tried out."""
    rows, cfg = run.micro_batches[0], run.cfg
    share, tried = cfg.train.batch_size // run.processes.count, rows.stop - rows.start
    run.optimizer.zero_grad()
    draws = step_draws(cfg, run.data.latents, run.step, run.processes.device).rows(rows)
    batch = run.loader.batches(run.step)[0]
    module = run.aligner.module if run.aligner else run.network
    parameters = list(module.parameters())

    def attempt(size: int) -> None:
        few, copies = slice(0, size), 0 if run.optimizer.state else cfg.optim.copies  # of its state, yet to come
        room = [parameter.new_empty(math.ceil(copies * parameter.numel())) for parameter in parameters]
        with torch.compiler.set_stance("force_eager"), autocast(run.processes.device, run.precision):
            given = (batch.rows(few), draws.rows(few), run.network.null(1))
            terms = losses(cfg, module, run.aligner, run.data.latents, *given)
            loss = sum(term.mean() for term in terms)
        torch.autograd.grad(loss, parameters)  # not backward(), which would have DDP wait for other processes
        del room  # held until here

    size = find_fitting(attempt, share, tried)
    advice = (
        f"train.micro_batch_size={size} would fit, with the same results" if size else "even one image does not fit"
    )
    return (
        f"out of memory with micro-batches of {tried} images: {error.splitlines()[0]}\n  {advice}. "
        "train.activation_checkpointing=true needs less memory too"
    )
