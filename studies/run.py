"""A figure or table of the paper, made again: python studies/run.py study=convergence scale=demo|small|paper

    seeds=3        another number of seeds than the study's
    jobs=2         runs at once, each with its share of the cores
    dry=true       only say what would be run: images, FLOPs, hours on this device
    publish=true   copy results.json, figure.png and table.md to studies/<name>/ (scale=small), as each run ends
    submit=slurm   hand each run to scripts/slurm.sh, and end; start the study again when they are done
    data=data      where imagenette/ (scale=small) or imagenet256/ (paper) lies
    results=results/studies   where runs are kept

A study is studies/<name>.yaml. Its runs are ordinary runs of train.py and fid.py below results/studies/<name>/<scale>/:
start it again after whatever stopped it, and it goes on. Interrupted ones draw what is there. Without study= all are
listed.
"""

from __future__ import annotations

import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if __name__ == "__main__":
    from tread.runtime.import_guard import guard_imports

    guard_imports(globals())

from omegaconf import OmegaConf

from studies.cost import estimate
from studies.jobs import jobs_of, make, submit
from studies.results import finished, gather, is_made, missing, publish, reports, write
from studies.study import HERE, ScaleName, Study, names, plan, read_study
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
    submit: Literal["slurm"] | None = None
    data: str = "data"
    results: str = "results/studies"

    def __post_init__(self) -> None:
        if self.publish and self.scale != "small":
            raise ValueError(f"publish=true is for scale=small, whose numbers stand in docs; scale is {self.scale}")


def main() -> None:
    if not (words := sys.argv[1:]):
        sys.argv.append("--help")
    answer_help(f"{__doc__.strip()}\n\nstudies: {', '.join(names())}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with explained("stopped; start it again to go on"):
        schema.check_overrides(words, schema.known_keys(Options))
        run(schema.read(OmegaConf.to_container(OmegaConf.from_cli(words)), Options))


def run(options: Options) -> None:
    """Make, draw and publish a study. Raises ValueError or OSError before any run for what can't be."""
    study = read_study(options.study, options.scale)
    runs, data, results = plan(study, options.seeds), Path(options.data), Path(options.results)
    place, made = results / study.name / study.scale_name, finished(results)
    to_make = [run for run in runs if not is_made(run, made)]
    jobs = jobs_of(to_make, place, results)
    already = len(runs) - len(to_make)
    print(f"{study.title}: {study.question}")
    print(f"  {len(runs)} runs, of which {already} are made already; {len(jobs)} trainings are concerned")
    lacking = lacking_data(study, data) if jobs else ""
    if options.dry:
        print(estimate(study, jobs, data, options.jobs, measure=not lacking))
        print(f"  hours are not measured: {lacking}" if lacking and study.scale_name != "paper" else "", end="")
        return
    if lacking:
        raise ValueError(lacking)
    if any(word.startswith("reference=") for word in study.scale.scoring) and jobs:
        find_weights()  # now rather than after hours of training
    check_place(place, 0)
    place.mkdir(parents=True, exist_ok=True)
    if options.submit == "slurm":
        submit(jobs, data)
        return

    def after() -> None:
        made = finished(results)
        write(study, gather(runs, jobs, made), place, reports(runs, place))
        if options.publish:
            publish(study, runs, made, HERE / study.name)

    try:
        problems = make(jobs, data, options.jobs, after)
    finally:
        after()
        left = missing(runs, finished(results))
        print((place / "table.md").read_text().partition("\nReports: ")[0].rstrip())
        print(f"  missing   {left}" if left else "  nothing is missing")
        print(f"  written   {', '.join(map(str, [*place.glob('*.*')] + [HERE / study.name] * options.publish))}")
    if problems:
        sys.exit("error: " + "\n".join(problems))


def lacking_data(study: Study, data: Path) -> str:
    """What a scale's words name below {data} and is not there, in words; "" if nothing."""
    named = re.findall(r"\{data\}/([^\s,\]]+)", " ".join((*study.scale.overrides, *study.scale.scoring)))
    absent = [str(data / name) for name in named if not (data / name).exists()]
    needs = (study.scale.needs or "").replace("{data}", str(data))
    return f"{', '.join(absent)} not found; scale={study.scale_name} needs {needs}" if absent else ""


if __name__ == "__main__":
    main()
