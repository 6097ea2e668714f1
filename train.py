"""Train a diffusion transformer with or without routes: python train.py model=tread

All options: configs/defaults.yaml. The same command goes on where a run of that name was stopped.
"""

# Read from `main` down: settings → start (tread/training/start.py: every check before any long work) →
# training, with what is due between the steps (periodic.py there) → finish. All that is random in a step
# follows from (seed, step, position in the global batch): Draws in step.py.

from __future__ import annotations

if __name__ == "__main__":
    from tread.runtime.import_guard import guard_imports

    guard_imports(globals())

import contextlib
import sys
import traceback
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig
from torch._dynamo.exc import BackendCompilerFailed
from tqdm import tqdm

from tread.reports.report import write_report
from tread.runtime.cli import open_door, plain
from tread.runtime.device import autocast
from tread.runtime.signals import INTERRUPTED, Stop, leave_at_once
from tread.training import settings
from tread.training.optimizer import backward, learning_rate, optimizer_step
from tread.training.out_of_memory import explain_memory
from tread.training.periodic import (
    Clock,
    done_before,
    evaluate_and_draw,
    interrupts,
    judge_demo,
    log,
    save,
    save_snapshot,
)
from tread.training.resume import settle
from tread.training.run import Failure, Run, first_line, leave, note_failure
from tread.training.settings import complete
from tread.training.start import start
from tread.training.step import losses, step_draws
from tread.training.summary import describe, describe_outcome


@hydra.main(version_base="1.3", config_path="configs", config_name="config")
def main(composed: DictConfig) -> None:
    stop, run = Stop(), None
    try:
        config, warnings = settle(plain(composed), sys.argv[1:], Path(__file__).parent / "configs")
        config = complete(config)
        run = start(settings.read(config), config, stop, warnings)
        finished = train(run)
        run.loader.close()
        if finished:
            finish(run)
        leave(run, finished)
        if finished:
            report(run)
    except (ValueError, OSError, Failure, torch.OutOfMemoryError) as error:
        reason = "its output was closed (a broken pipe)" if isinstance(error, BrokenPipeError) else str(error)
        if isinstance(error, torch.OutOfMemoryError):
            advice = "a smaller eval.batch_size, sampling.classes or sampling.per_class needs less"
            reason = f"out of memory beside the training steps: {first_line(error)}: {advice}"
        note_failure(run, reason)
        leave_at_once(1, f"error: {reason}")
        sys.exit(f"error: {reason}")
    except Exception as error:
        note_failure(run, first_line(error))
        leave_at_once(1, traceback.format_exc())
        raise
    finally:
        stop.close()
    leave_at_once(0 if finished else INTERRUPTED)
    if not finished:
        sys.exit(INTERRUPTED)


# --------------------------------------------------------------------------------------- training


def train(run: Run) -> bool:
    """All steps that are left, with what is due between them. False if the run was asked to stop before the end."""
    cfg, say = run.cfg, run.processes.say
    if run.step >= cfg.train.steps:
        say(f"{run.folder} is finished: train.steps above {run.step} trains on, name=… starts another run")
    else:
        say(describe(run))
    on = evaluate_and_draw(run, run.processes.from_main(lambda: done_before(run)))  # what an interruption left undone
    clock, postponed = Clock(run), False
    hidden, pace = not run.processes.main, 0.5 if sys.stderr.isatty() else 20  # seconds between updates of the bar
    with tqdm(total=cfg.train.steps, initial=run.step, disable=hidden, unit="step", mininterval=pace) as bar:
        while on and run.step < cfg.train.steps and not run.stop.poll():
            if trouble := step_or_trouble(run):
                raise Failure(explain_memory(run, trouble))
            run.step += 1
            bar.update()
            last = run.step == cfg.train.steps
            due = run.step % cfg.every.log == 0 or last
            clock.tick(due)
            if due:
                bar.set_postfix_str(log(run, clock), refresh=False)
            if not (postponed or interrupts(run)):
                continue
            with clock.paused():
                on = evaluate_and_draw(run)
                if run.averages and (run.step % (cfg.ema.snapshot_every or cfg.every.save) == 0 or last):
                    save_snapshot(run)
                if run.step % cfg.every.save == 0 or last or postponed:
                    postponed = not save(run)
    if run.step != (run.saved or 0):
        with clock.paused():
            save(run)
    return on and run.step >= cfg.train.steps


def step_or_trouble(run: Run) -> str | None:
    """A training step, without compiled blocks from where their compiler fails.

    Returns what the device says if its memory does not suffice, when what the step had of it is free again.
    """
    try:
        training_step(run)
    except torch.OutOfMemoryError as error:
        return str(error)
    except BackendCompilerFailed as error:  # a block's graph, although why_not's sample went well
        run.processes.say(f"warning: going on without torch.compile, which failed: {first_line(error)}")
        torch.compiler.set_stance("force_eager")
        run.optimizer.zero_grad()
        training_step(run)
    return None


def training_step(run: Run) -> None:
    """One optimizer step on global batch number run.step. Nothing in it waits for the device."""
    cfg, latents = run.cfg, run.data.latents
    draws = step_draws(cfg, latents, run.step, run.processes.device)
    weights, null = (1.0, cfg.alignment.weight), run.network.null(1)
    totals = [0.0, 0.0] if run.aligner else [0.0]
    for rows, batch in zip(run.micro_batches, run.loader.batches(run.step)):
        synchronise = rows is run.micro_batches[-1]
        with contextlib.nullcontext() if synchronise else run.processes.no_sync(run.wrapped):
            with autocast(run.processes.device, run.precision):
                terms = losses(cfg, run.wrapped, run.aligner, latents, batch, draws.rows(rows), null)
            means = [term.mean() / len(run.micro_batches) for term in terms]
            backward(sum(weight * mean for weight, mean in zip(weights, means)))
        totals = [total + mean.detach() for total, mean in zip(totals, means)]
    norm, skip = optimizer_step(run.optimizer, learning_rate(cfg, run.step), cfg.optim.clip_norm)
    for average in (run.ema, *run.averages.values()):
        average.update(run.network, run.step, skip)
    run.statistics.add(totals[0], norm, skip, *totals[1:])


# ----------------------------------------------------------------------------------------- finish


def finish(run: Run) -> None:
    """Judge the demo's samples, and say where everything is."""
    if run.processes.main:
        count = run.cfg.eval.demo_samples
        if count and not any(r["step"] == run.step and "demo_samples" in r for r in run.log.records()):
            with run.beside("judge"):
                judged = judge_demo(run)
            if judged:
                run.record(**judged, demo_samples=count)
        run.processes.say(describe_outcome(run, run.log.records()))


def report(run: Run) -> None:
    """The page for a browser. What keeps it from being made does not make a finished run fail."""
    if run.cfg.report and run.processes.main:
        try:
            run.processes.say(f"  {'report':<21} {write_report([run.folder])}")
        except (ImportError, OSError, ValueError) as error:
            run.processes.say(f"warning: no report: {error}")


if __name__ == "__main__":
    open_door(main, lambda: [*settings.known_keys(), "experiment"], settings.MOVED, spell=settings.add_unstated)
