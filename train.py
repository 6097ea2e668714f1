"""Train a diffusion transformer with or without routes: accelerate launch train.py model=tread

Read from `main` down: settings → start (start.py: every check before any long work) → training, with
what is due between the steps (between.py) → finish. All that is random in a step follows from
(seed, step, position in the global batch): randomness.py.
"""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Iterator

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from torch._dynamo.exc import BackendCompilerFailed
from tqdm import tqdm

import settings
from between import done_before, draw_samples, look, read_tally, save, save_snapshot
from build import complete
from memory import find_fitting, smaller
from objective import active_routes, step_draws, training_loss
from start import Failure, Run, start
from summary import describe, outcome
from tread.evaluation.digits_judge import judge_digits
from tread.runtime.cli import open_door
from tread.runtime.device import autocast, peak_flops, wait_for
from tread.runtime.distributed import from_main
from tread.runtime.signals import INTERRUPTED, Stop, leave_at_once
from updates import backward, optimizer_step


@hydra.main(version_base="1.3", config_path="configs", config_name="config")
def main(composed: DictConfig) -> None:
    stop, run = Stop(), None
    try:
        config = complete(OmegaConf.to_container(composed, resolve=True))
        run = start(settings.read(config), config, stop)
        finished = train(run)
        run.loader.close()
        if finished:
            finish(run)
        leave(run, finished)
    except (ValueError, OSError, Failure) as error:
        note_failure(run, str(error))
        leave_at_once(1, f"error: {error}")
        sys.exit(f"error: {error}")
    except torch.OutOfMemoryError as error:
        advice = "a smaller eval.batch_size, sampling.classes or sampling.per_class needs less"
        note_failure(run, f"out of memory beside the training steps: {first_line(error)}: {advice}")
        leave_at_once(1, f"error: {error}\n{advice}")
        sys.exit(f"error: {error}\n{advice}")
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
    cfg = run.cfg
    if run.step >= cfg.train.steps:
        run.say(f"{run.folder} is finished: train.steps above {run.step} trains on, name=… starts another run")
    else:
        device = f"{run.device}, {run.precision}"
        run.say(describe(cfg, run.network, run.data, run.accelerator.num_processes, run.micro_batches, device))
    on = look(run, from_main(run.accelerator, lambda: done_before(run)))  # what an interruption left undone
    clock, postponed = Clock(run), False
    pace = 0.5 if sys.stderr.isatty() else 20  # seconds between updates of the bar
    with tqdm(total=cfg.train.steps, initial=run.step, disable=not run.main, unit="step", mininterval=pace) as bar:
        while on and run.step < cfg.train.steps and not run.stop.poll():
            if trouble := step_or_trouble(run):
                raise Failure(explain_memory(run, trouble))
            run.step += 1
            bar.update()
            clock.tick()

            last = run.step == cfg.train.steps
            if run.step % cfg.every.log == 0 or last:
                bar.set_postfix_str(log(run, clock), refresh=False)
            with clock.paused():
                on = look(run)
                if run.averages and (run.step % (cfg.ema.snapshot_every or cfg.every.save) == 0 or last):
                    save_snapshot(run)
                if run.step % cfg.every.save == 0 or last or postponed:
                    postponed = not save(run)
    if run.step != (run.saved or 0):
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
        run.say(f"warning: going on without torch.compile, which failed: {first_line(error)}")
        torch.compiler.set_stance("force_eager")
        run.optimizer.zero_grad()
        training_step(run)
    return None


def training_step(run: Run) -> None:
    """One optimizer step on global batch number run.step. Nothing in it waits for the device."""
    cfg, latents = run.cfg, run.data.latents
    draws = step_draws(cfg, latents, run.network.num_tokens, run.step, run.device)
    total = 0.0
    for rows, (stored, labels) in zip(run.micro_batches, run.loader.batches(run.step)):
        synchronise = rows is run.micro_batches[-1]
        with contextlib.nullcontext() if synchronise else run.accelerator.no_sync(run.wrapped):
            with autocast(run.device, run.precision):
                losses = training_loss(cfg, run.wrapped, latents, stored, labels, draws.rows(rows))
            loss = losses.mean() / len(run.micro_batches)
            backward(loss)
        total = total + loss.detach()
    norm, skip = optimizer_step(run.optimizer, run.learning_rate.at(run.step), cfg.optim.clip_norm)
    for average in (run.ema, *run.averages.values()):
        average.update(run.network, run.step, skip)
    run.tally.add(total, norm, skip)


class Clock:
    """Steps per second since the last log, without pauses, and without the first step, which compiles."""

    def __init__(self, run: Run) -> None:
        self.run, self.start_step, self.began = run, run.step, time.perf_counter()
        self.first_step = self.first_wait = self.cold_start = None
        self.restart()

    def restart(self) -> None:
        self.run.loader.waited = 0.0
        self.first, self.since = self.run.step, time.perf_counter()

    def tick(self) -> None:
        """After each step: report how long the first one took, and after 20 when the end is expected."""
        run, done = self.run, self.run.step - self.start_step
        if done == 1:
            wait_for(run.device)
            now = time.perf_counter()
            self.first_step, self.cold_start = now - self.began, now - run.began
            self.first_wait = run.loader.waited
            run.say(f"  start     {self.cold_start:.1f} s, of which the first step took {self.first_step:.1f} s")
            self.restart()
        if done == 21:
            left = run.cfg.train.steps - self.start_step
            minutes = (time.perf_counter() - self.began - self.first_step) / 20 * left / 60
            run.say(f"  time      {minutes:.1f} min expected for {left:,} steps")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose time does not count."""
        began = time.perf_counter()
        yield
        self.since += time.perf_counter() - began


def log(run: Run, clock: Clock) -> str:
    """Write down means and speed since the last log, and begin anew; returns them in short."""
    tally, rate = read_tally(run), run.learning_rate.at(run.step - 1)  # waits for the device, so the clock comes after
    values = {"lr": rate, "bad_steps": int(tally["bad"])}
    if tally["good"]:
        values |= {name: tally[name] / tally["good"] for name in ("loss", "grad_norm")}
    seconds, steps, waited = time.perf_counter() - clock.since, run.step - clock.first, run.loader.waited
    if not steps:  # the first step is all there is
        seconds, steps, waited = clock.first_step, 1, clock.first_wait
    speed = steps * run.cfg.train.batch_size / seconds
    flops = 3 * run.network.forward_flops(active_routes(run.cfg, run.step - 1)) * speed
    values |= {"images_per_s": round(speed, 1), "flops_per_s": float(f"{flops:.4g}")}
    peak = peak_flops(run.device, run.precision)
    if peak is not None:
        values["mfu"] = round(flops / (peak * run.accelerator.num_processes), 4)
    values["data_wait"] = round(waited / seconds, 5)
    if clock.cold_start is not None:  # once a start
        values["cold_start_seconds"], clock.cold_start = round(clock.cold_start, 2), None
    run.record(**values)
    if tally["bad"]:
        run.say(f"warning: {int(tally['bad'])} steps up to step {run.step} were skipped: loss or gradient not finite")
    run.tally.restart()
    clock.restart()
    return f"loss {values['loss']:.4f}, {speed:.0f} images/s" if "loss" in values else "no good step"


def explain_memory(run: Run, error: str) -> str:
    """For people: the micro-batch that would fit, which is tried out."""
    rows, cfg = run.micro_batches[0], run.cfg
    share, tried = cfg.train.batch_size // run.accelerator.num_processes, rows.stop - rows.start
    run.optimizer.zero_grad()
    draws = step_draws(cfg, run.data.latents, run.network.num_tokens, run.step, run.device).rows(rows)
    [(stored, labels), *_] = run.loader.batches(run.step)
    parameters = list(run.network.parameters())

    def attempt(size: int) -> None:
        few, moments = slice(0, size), [] if run.optimizer.state else 2 * parameters  # of AdamW, yet to come
        room = [torch.empty_like(parameter) for parameter in moments]
        with torch.compiler.set_stance("force_eager"), autocast(run.device, run.precision):
            loss = training_loss(cfg, run.network, run.data.latents, stored[few], labels[few], draws.rows(few)).mean()
        torch.autograd.grad(loss, parameters)  # not backward(), which would have DDP wait for other processes
        del room  # held until here

    size = find_fitting(attempt, smaller(share, tried))
    advice = (
        f"train.micro_batch_size={size} would fit, with the same results" if size else "even one image does not fit"
    )
    return (
        f"out of memory with micro-batches of {tried} images: {error.splitlines()[0]}\n  {advice}. "
        "train.activation_checkpointing=true needs less memory too"
    )


# ----------------------------------------------------------------------------------------- finish


def finish(run: Run) -> None:
    """Judge the demo's samples, and say where everything is."""
    if run.main:
        count = run.cfg.eval.demo_samples
        if count and not any(r["step"] == run.step and "label_agreement" in r for r in run.log.records()):
            labels = torch.arange(count) % run.cfg.dataset.num_classes
            run.record(**judge_digits(draw_samples(run, labels).numpy(), labels.numpy()), demo_samples=count)
        run.say(outcome(run.folder, run.step, run.log.records()))


def leave(run: Run, finished: bool) -> None:
    """Say how it ended, and give back the folder."""
    if run.main:
        reason = None if finished else run.stop.reason or "another process was asked to stop"
        if not finished:
            saved = f"step {run.saved} is saved" if run.saved else "nothing is saved yet"
            run.say(f"{run.folder}: stopped by {reason} after step {run.step}; {saved}; start it again to go on")
        run.log.status("finished" if finished else "interrupted", run.step, reason)
        run.log.close()
    if run.wandb is not None:
        run.wandb.finish(exit_code=0 if finished else INTERRUPTED)


def note_failure(run: Run | None, reason: str) -> None:
    """Write down why the run failed, if it had begun and the disk still takes it."""
    if run is not None:
        with contextlib.suppress(OSError):
            time.sleep(0 if run.main else 2)  # what all fail by is the main process's to say
            who = "" if run.main else f"process {run.accelerator.process_index}: "
            run.log.status("failed", run.step, who + reason)
        run.log.close()


def first_line(error: Exception) -> str:
    """An error in a line: compilers say thousands."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"


if __name__ == "__main__":
    open_door(main, [*settings.known_keys(), "experiment"])
