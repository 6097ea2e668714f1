"""How a run comes along: speed, what is logged of the steps, and what is said when too many of them are bad."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import torch

from tread.checkpoints.network import process_of
from tread.runtime.device import peak_flops, wait_for
from tread.training.objective import active_routes, sample_flops, step_draws, training_flops
from tread.training.optimizer import StepStatistics, learning_rate
from tread.training.run import Failure, Run


class Clock:
    """What training took, without pauses: all of it in the run's seconds and flops, and since the last log.

    The latter is for the speed, and leaves out the first step, which compiles, if others follow.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.start_step, self.began = run, run.step, time.perf_counter()
        self.first_step = self.cold_start = None
        self.counted = run.step, self.began  # up to where the run's flops and seconds go
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

    def advance(self) -> None:
        """Count what the run took up to here; for when the device has done what it was given."""
        run, (step, since) = self.run, self.counted
        self.counted = run.step, time.perf_counter()
        run.flops += training_flops(run.cfg, run.network, range(step, run.step), run.aligner)
        if run.seconds is not None:
            run.seconds += self.counted[1] - since

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose time does not count. Waits for the device, whose steps do."""
        wait_for(self.run.processes.device)
        self.advance()
        yield
        ended = time.perf_counter()
        self.since += ended - self.counted[1]
        self.counted = self.run.step, ended


def log(run: Run, clock: Clock) -> str:
    """Write down means and speed since the last log, and begin anew; returns them in short."""
    found = read_statistics(run)  # waits for the device, so the clock comes after
    clock.advance()
    values = {"lr": learning_rate(run.cfg, run.step - 1), "bad_steps": int(found["bad"])}
    if found["good"]:
        values |= {name: found[name] / found["good"] for name in ("loss", "grad_norm")}
        if run.aligner:
            values["alignment"] = found["alignment"] / found["good"]
            values["total"] = values["loss"] + run.cfg.alignment.weight * values["alignment"]
    seconds, steps, waited = time.perf_counter() - clock.since, run.step - clock.first, run.loader.waited
    speed = steps * run.cfg.train.batch_size / seconds
    flops = sample_flops(run.network, active_routes(run.cfg, run.step - 1), run.aligner) * speed
    values |= {"images_per_s": round(speed, 1), "flops_per_s": float(f"{flops:.4g}")}
    peak = peak_flops(run.processes.device, run.precision)
    if peak is not None:
        values["mfu"] = round(flops / (peak * run.processes.count), 4)
    values["data_wait"] = round(waited / seconds, 5)
    if clock.cold_start is not None:  # once a start
        values["cold_start_seconds"], values["first_step_seconds"] = (
            round(clock.cold_start, 2),
            round(clock.first_step, 3),
        )
        clock.cold_start = None
    run.record(**values)
    if found["bad"] and run.processes.main:
        with clock.paused():
            text = f"warning: {found['bad']:.0f} steps up to step {run.step} were skipped: loss or gradient not finite"
            recent = recent_bad_steps(run, found, int(found["good"] + found["bad"]))
            run.processes.say(f"{text}; {look_at_samples(run, recent)[1]}" if recent else text)
    run.statistics.restart()
    clock.restart()
    return f"loss {values['loss']:.4f}, {speed:.0f} images/s" if "loss" in values else "no good step"


def read_statistics(run: Run) -> dict[str, float | str]:
    """The sums by name, the loss averaged over the processes, on all of them. Raises Failure for too many bad steps:
    a row of them, or more than half of the last ones.
    """
    found, most = run.statistics.read(), run.cfg.train.max_bad_steps
    for name in ("loss", "alignment") if run.aligner else ("loss",):
        own = run.statistics.sums[StepStatistics.NAMES.index(name)]
        found[name] = (run.processes.sum(own.clone()) / run.processes.count).item()
    if found["longest"] > most:
        end = run.step - int(found["ago"])
        row = range(end - int(found["longest"]), end)
        what = f"{len(row)} steps in a row, {row[0] + 1} to {row[-1] + 1} (train.max_bad_steps {most})"
        raise Failure(explain_bad_steps(run, row, what))
    recent = len(found["recent"])
    known = run.step if recent == min(run.step, StepStatistics.LAST) else recent  # older checkpoints did not keep them
    if mostly_bad(found) and (known >= most or known == run.step == run.cfg.train.steps):
        steps = recent_bad_steps(run, found, recent)
        what = f"{len(steps)} of the last {recent} steps, up to {run.step} (more than half of them)"
        raise Failure(explain_bad_steps(run, steps, what))
    return found


def mostly_bad(found: dict[str, float | str]) -> bool:
    """Whether more than half of the last steps were bad."""
    return 2 * found["recent"].count("1") > len(found["recent"])


def recent_bad_steps(run: Run, found: dict[str, float | str], steps: int) -> list[int]:
    """Which of the last `steps` steps were bad, as far as StepStatistics keeps them: their numbers, from 0."""
    flags = found["recent"][-steps:]
    return [run.step - len(flags) + number for number, flag in enumerate(flags) if flag == "1"]


def explain_bad_steps(run: Run, steps: Sequence[int], what: str) -> str:
    """For people: `what` was bad, at which noise levels, and what to try. The steps are drawn again to see that."""
    process, given = process_of(run.cfg), (run.cfg, run.data.latents)
    draws = [step_draws(*given, step, run.processes.device) for step in steps[:100]]
    levels = torch.cat([process.noise_level(draw.level) for draw in draws])
    spoilt, seen = look_at_samples(run, steps)
    advice = "Try a smaller optim.lr, optim.clip_norm=1 or train.precision=fp32, or look at the data"
    kept = f"the last good checkpoint is that of step {run.saved}" if run.saved else "nothing was saved yet"
    return (
        f"loss or gradient was not finite in {what}, which were skipped. Their {process.level_name} lay "
        f"between {levels.min():.3g} and {levels.max():.3g}. {'Look at the data first' if spoilt else advice}: "
        f"{seen}; {kept}"
    )


def look_at_samples(run: Run, steps: Sequence[int]) -> tuple[bool, str]:
    """Whether samples of some steps hold numbers that are not finite; and which, for people.

    They are read again, of as many of the steps as that takes seconds for.
    """
    size, data, found = run.cfg.train.batch_size, run.data, []
    looked = steps[: min(100, max(1, 25_600 // size))]
    for step in looked:
        batch = data.batch(run.cfg.seed, step, size)
        for read in (batch.stored, batch.features):
            if read is not None:
                spoilt = ~read.flatten(1).isfinite().all(dim=1)
                found += batch.indices[spoilt.cpu().numpy()].tolist()
    found = sorted(set(found))
    if not found:
        return False, f"no sample of the {len(looked)} steps looked at holds such numbers"
    places = [(index, *data.locate(index)) for index in found[:3]]
    named = ", ".join(f"{index} ({file}, row {row})" for index, file, row in places)
    more = f" and {len(found) - len(places)} more" if len(found) > len(places) else ""
    return True, f"these samples hold such numbers: {named}{more}"
