"""Train a diffusion transformer with or without TREAD's token routes: python train.py model=tread

All options: configs/defaults.yaml. If a run was stopped, the command that started it resumes it.
"""

# Read from `main` down: read the settings → start (tread/training/start.py: every check before any long work) →
# train, with evaluations and checkpoints between the steps (tread/training/periodic.py) → outcome. A step is in
# tread/training/step.py, its random numbers in tread/training/draws.py.

if __name__ == "__main__":
    from tread.runtime.import_guard import guard_imports

    guard_imports(globals())

import sys
from pathlib import Path

from tqdm import tqdm

from tread.reports.report import write_report
from tread.reports.summary import describe, describe_outcome
from tread.runtime.cli import door, open_door
from tread.training import periodic, settings
from tread.training.failures import guarded_step, launched
from tread.training.resume import settle
from tread.training.run import Run, leave
from tread.training.start import start


@door()
def main(composed: dict) -> None:
    with launched() as launch:
        config, warnings = settle(composed, sys.argv[1:], Path(__file__).resolve().parent / "configs")
        cfg, config = settings.complete(config)
        run = launch.run = start(cfg, config, launch.stop, warnings)
        launch.finished = train(run)
        run.loader.close()
        if launch.finished:
            periodic.judge_demo(run)
            run.say(describe_outcome(run))
        leave(run, launch.finished)
        if launch.finished:
            report(run)


def train(run: Run) -> bool:
    """Train up to step train.steps, with logs, evaluations and checkpoints. Returns False if stopped before the end."""
    cfg, say = run.cfg, run.say
    if run.step >= cfg.train.steps:
        say(f"{run.folder} is finished: train.steps above {run.step} trains on, name=… starts another run")
    else:
        say(describe(run))
    done = run.processes.from_main(lambda: periodic.done_before(run))
    on = periodic.evaluate_and_draw(run, done)  # evaluations and samples that an interruption left undone
    clock, postponed = periodic.Clock(run), False
    hidden = not run.main or run.step >= cfg.train.steps
    pace = 0.5 if sys.stderr.isatty() else 20  # seconds between updates of the bar
    with tqdm(total=cfg.train.steps, initial=run.step, disable=hidden, unit="step", mininterval=pace) as bar:
        while on and run.step < cfg.train.steps and not run.stop.poll():
            guarded_step(run)
            run.step += 1
            bar.update()
            clock.tick(run.due(cfg.every.log))
            if run.due(cfg.every.log):
                bar.set_postfix_str(periodic.log(run, clock), refresh=False)
            if not (postponed or periodic.interrupts(run)):
                continue
            with clock.paused():
                on, postponed = periodic.evaluate_and_save(run, postponed)
    with clock.paused():
        if run.step != (run.saving or run.saved or 0):
            periodic.save(run, leaving=True)
        with run.timed("save"):
            periodic.finish_saving(run)
    return on and run.step >= cfg.train.steps


def report(run: Run) -> None:
    """Write the run's HTML report, if the setting `report` asks for it. If writing fails, only print a warning."""
    if run.cfg.report and run.processes.main:
        try:
            run.say(f"  {'report':<21} {write_report([run.folder])}")
        except (ImportError, OSError, ValueError) as error:
            run.say(f"warning: no report: {error}")


if __name__ == "__main__":
    open_door(main, lambda: [*settings.known_keys(), "experiment"], spell=settings.add_unstated)
