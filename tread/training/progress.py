"""How a run comes along: speed, what is logged of the steps, and what is said when too many of them are bad."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from tread.checkpoints.network import process_of
from tread.runtime.device import peak_flops, wait_for
from tread.training.objective import active_routes, step_draws
from tread.training.optimizer import learning_rate
from tread.training.run import Failure, Run


class Clock:
    """Steps per second since the last log, without pauses; without the first step, which compiles, if others follow."""

    def __init__(self, run: Run) -> None:
        self.run, self.start_step, self.began = run, run.step, time.perf_counter()
        self.first_step = self.cold_start = None
        self.restart()

    def restart(self) -> None:
        self.run.loader.waited = 0.0
        self.first, self.since = self.run.step, time.perf_counter()

    def tick(self, due: bool) -> None:
        """After each step, before a log that is due: say how long the first took, and after 20 when the end comes."""
        run, done = self.run, self.run.step - self.start_step
        if done == 1:
            wait_for(run.processes.device)
            now = time.perf_counter()
            self.first_step, self.cold_start = now - self.began, now - run.began
            run.processes.say(
                f"  start     {self.cold_start:.1f} s, of which the first step took {self.first_step:.1f} s"
            )
            if not due:
                self.restart()
        if done == 21:
            left = run.cfg.train.steps - self.start_step
            minutes = (time.perf_counter() - self.began - self.first_step) / 20 * left / 60
            run.processes.say(f"  time      {minutes:.1f} min expected for {left:,} steps")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose time does not count."""
        began = time.perf_counter()
        yield
        self.since += time.perf_counter() - began


def log(run: Run, clock: Clock) -> str:
    """Write down means and speed since the last log, and begin anew; returns them in short."""
    found = read_statistics(run)  # waits for the device, so the clock comes after
    values = {"lr": learning_rate(run.cfg, run.step - 1), "bad_steps": int(found["bad"])}
    if found["good"]:
        values |= {name: found[name] / found["good"] for name in ("loss", "grad_norm")}
    seconds, steps, waited = time.perf_counter() - clock.since, run.step - clock.first, run.loader.waited
    speed = steps * run.cfg.train.batch_size / seconds
    flops = 3 * run.network.forward_flops(active_routes(run.cfg, run.step - 1)) * speed
    values |= {"images_per_s": round(speed, 1), "flops_per_s": float(f"{flops:.4g}")}
    peak = peak_flops(run.processes.device, run.precision)
    if peak is not None:
        values["mfu"] = round(flops / (peak * run.processes.count), 4)
    values["data_wait"] = round(waited / seconds, 5)
    if clock.cold_start is not None:  # once a start
        values["cold_start_seconds"], clock.cold_start = round(clock.cold_start, 2), None
    run.record(**values)
    if found["bad"]:
        bad = int(found["bad"])
        run.processes.say(f"warning: {bad} steps up to step {run.step} were skipped: loss or gradient not finite")
    run.statistics.restart()
    clock.restart()
    return f"loss {values['loss']:.4f}, {speed:.0f} images/s" if "loss" in values else "no good step"


def read_statistics(run: Run) -> dict[str, float]:
    """The sums by name, the loss averaged over the processes, on all of them. Raises Failure for too many bad steps."""
    found = run.statistics.read()
    found["loss"] = (run.processes.sum(run.statistics.sums[0].clone()) / run.processes.count).item()
    if found["longest"] > run.cfg.train.max_bad_steps:
        end = run.step - int(found["ago"])
        raise Failure(explain_bad_steps(run, range(end - int(found["longest"]), end)))
    return found


def explain_bad_steps(run: Run, steps: range) -> str:
    """For people: which steps were bad, at which noise levels, and what to try. They are drawn again to see that."""
    process, given = process_of(run.cfg), (run.cfg, run.data.latents)
    draws = [step_draws(*given, step, run.processes.device) for step in steps[:100]]
    levels = torch.cat([process.noise_level(draw.level) for draw in draws])
    kept = f"the last good checkpoint is that of step {run.saved}" if run.saved else "nothing was saved yet"
    return (
        f"loss or gradient was not finite in {len(steps)} steps in a row, {steps[0] + 1} to {steps[-1] + 1} "
        f"(train.max_bad_steps {run.cfg.train.max_bad_steps}), which were skipped. Their {process.level_name} lay "
        f"between {levels.min():.3g} and {levels.max():.3g}. Try a smaller optim.lr, optim.clip_norm=1 or "
        f"train.precision=fp32; {kept}"
    )
