"""Reproduces a figure or table of the paper: python studies/run.py study=convergence scale=demo|small|gpu|paper

    seeds=3        number of seeds, instead of the study's
    jobs=2         number of runs at a time, with equal shares of the cores
    again=true     run all that is missing in the folder results=, even if published results have it
    dry=true       only print what would be run: images, FLOPs, samples
    publish=true   write results.json, figure.png and table.md to studies/<name>/ as each run ends (scale=small), or to
                   studies/<name>_gpu/ (scale=gpu)
    arms=[dense]   only these arms (the kinds of run that the study compares), with all their trials and scores
    part=train     only train; part=score: only score finished trainings
    rehearse=true  a short trial of everything with a tiny network, where the study's file says how (cifar10)
    data=data      the folder that holds the data, e.g. imagenette/ (scale=small) or imagenet256/ (scale=paper)
    results=results/studies   the folder to which the runs are written

A study is studies/<name>.yaml. Its runs are ordinary runs of train.py and fid.py in results/studies/<name>/<scale>/.
After a stop, the same command goes on; whenever it ends, it draws what exists. Without options, it lists all studies.
"""

import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if __name__ == "__main__":
    from tread.runtime.import_guard import guard_imports

    guard_imports(globals())

from omegaconf import OmegaConf

from studies.cifar10 import RANDOM, random_inception
from studies.figures import FIGURES, publish, write
from studies.jobs import Job, Part, costs_of, jobs_of, make
from studies.results import finished, is_made
from studies.study import HERE, Planned, ScaleName, names, plan, read_study, rehearsed
from tread.encoders.inception import find_weights
from tread.runtime import schema
from tread.runtime.cli import answer_help, explained
from tread.runtime.files import check_place
from tread.runtime.schema import Count


@dataclass(frozen=True)
class Options:
    study: str
    scale: ScaleName = "demo"
    seeds: Count | None = None
    jobs: Count = 1
    dry: bool = False
    publish: bool = False
    data: str = "data"
    results: str = "results/studies"
    arms: tuple[str, ...] = ()
    part: Part = "both"
    rehearse: bool = False
    again: bool = False

    def __post_init__(self) -> None:
        if self.publish and self.scale not in ("small", "gpu"):
            raise ValueError(f"publish=true is for scale=small and gpu, whose numbers docs show, not {self.scale}")
        if self.publish and self.rehearse:
            raise ValueError("publish=true is for numbers, and rehearse=true gives none")


def main() -> None:
    if not (words := sys.argv[1:]):
        sys.argv.append("--help")
    answer_help(f"{__doc__.strip()}\n\nstudies: {', '.join(names())}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with explained("stopped; start it again to go on"):
        run(schema.read(OmegaConf.to_container(OmegaConf.from_cli(words)), Options))


def run(options: Options) -> None:
    """Run a study, draw its figure and write its table. Wrong options raise ValueError or OSError before any run."""
    study = read_study(options.study, options.scale)
    if study.figure not in FIGURES:
        raise ValueError(f"studies/{study.name}.yaml has figure.kind {study.figure}, not one of {', '.join(FIGURES)}")
    study = rehearsed(study) if options.rehearse else study
    data, results = Path(options.data).expanduser(), Path(options.results).expanduser()
    place = results / study.name / f"{study.scale}{'_rehearsal' * options.rehearse}"
    made = finished(results, options.again)
    if unknown := {*options.arms} - {*study.arms}:
        raise ValueError(f"study {study.name} has no arm {', '.join(unknown)}, but {', '.join(map(repr, study.arms))}")
    asked = {*options.arms, *(f"{arm}, {way}" for arm in options.arms for way in study.ways)}
    asked = asked.union(*(study.trials.get(arm, {}).values() for arm in options.arms)) or {*study.arms}

    def left_to_make(runs: Sequence[Planned]) -> list[Job]:
        return jobs_of([run for run in runs if run.arm in asked and not is_made(run, made)], place, results)

    runs = plan(study, options.seeds, made, options.dry)
    jobs = left_to_make(runs)
    print(f"{study.title}: {study.question}")
    done, anew = sum(is_made(run, made) for run in runs), sum(job.only_scores_lack(made) for job in jobs)
    print(f"  {len(runs)} runs, {done} of them made already; {len(jobs)} trainings are left to do or to score")
    if anew:
        print(f"  {anew} of them were made before, but their checkpoints are not here: trained again, to be scored")
    if study.trials:
        print("  each arm's trials come first; their best value is trained by further seeds")
    if options.dry:
        print(costs_of(jobs))
        return
    trains = options.part == "train"
    words = " ".join(word for job in jobs for word in (job.training.overrides if trains else job.words))
    paths = [data / name for name in dict.fromkeys(re.findall(r"\{data\}/([^\s,\]]+)", words))]
    needs = {arm.needs.replace("{data}", str(data)) for arm in study.arms.values() if arm.needs}
    if needs and (absent := [str(path) for path in paths if not path.exists()]):
        raise ValueError(f"{', '.join(absent)} not found; scale={study.scale} needs {' '.join(needs)}")
    if data / RANDOM in paths:
        random_inception(data / RANDOM)
    elif "reference=" in words or (study.trials and jobs and needs and not trains):
        find_weights()  # fails now rather than after hours of training
    published = HERE / (study.name if study.scale == "small" else f"{study.name}_{study.scale}")
    check_place(place, 0)

    def after() -> None:
        made = finished(results, options.again)
        write(replace(study, seen=study.title), runs, made, place)  # study.seen is said of the published results
        if options.publish:
            publish(study, runs, finished(results), published)

    problems: list[str] = []
    try:
        while jobs and not problems:
            problems = make(jobs, data, options.jobs, after, options.part)
            made, before = finished(results, options.again), jobs
            runs = plan(study, options.seeds, made)
            jobs = [job for job in left_to_make(runs) if job not in before]  # after trials, what they decided
    finally:
        after()
        print((place / "table.md").read_text().rstrip())
        written = [path for path in place.glob("*.*") if path.is_file()] + [published] * options.publish
        print(f"  written   {', '.join(map(str, written))}")
    if problems:
        sys.exit("error: " + "\n".join(problems))


if __name__ == "__main__":
    main()
