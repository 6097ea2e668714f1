"""A page on one run or several: what they came to, their samples, curves, scores, costs, settings and troubles."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from tread.reports import sections
from tread.reports.comparison import SeedGroup, group_runs
from tread.reports.page import Page
from tread.reports.runs import Found, find_run
from tread.runtime.files import check_place

NAME = "report.html"


def write_report(folders: Sequence[Path | str]) -> Path:
    """Write report.html into the first folder, on the runs in all of them; returns its path.

    folders  of runs; behind the first, those of guidance sweeps may stand too.

    What is damaged is reported with what is there. Raises FileNotFoundError for a folder that holds no run, OSError if
    the page can't be written, ImportError without plotly.
    """
    first, *others = dict.fromkeys(map(Path, folders))
    sweeps = [folder for folder in others if (folder / "sweep.csv").is_file()]
    runs = [find_run(folder) for folder in (first, *others) if folder not in sweeps]
    check_place(first, 0)
    subject = subject_of(runs, sweeps)
    named = [run.folder.resolve().name for run in runs]
    now = datetime.datetime.now().astimezone()
    page = Page(
        " and ".join(named) if len(runs) < 3 else f"{named[0]} and {len(runs) - 1} more",
        f"Report of {now:%d %B %Y, %H:%M %Z}",
    )
    for section in (sections.results, sections.troubles, sections.samples, sections.curves, sections.scores):
        section(page, subject)
    for section in (sections.sweeps, sections.time, sections.settings):
        section(page, subject)
    page.write(first / NAME)
    return first / NAME


def subject_of(runs: Sequence[Found], sweeps: Sequence[Path] = ()) -> sections.Subject:
    """Runs that differ by their seed alone put together, those whose settings are not known alone, all with names."""
    if len(runs) == 1:
        groups = [SeedGroup(runs[0].folder.resolve().name, runs)]
    else:
        groups = group_runs([run for run in runs if run.config])
        groups += [SeedGroup(run.folder.resolve().name, [run]) for run in runs if not run.config]
    called = [group.name for group in groups]
    groups = [SeedGroup(str(g.runs[0].folder), g.runs) if called.count(g.name) > 1 else g for g in groups]
    names = {
        run.folder: group.name + (f", {run.folder.name}" if len(group.runs) > 1 else "")
        for group in groups
        for run in group.runs
    }
    return sections.Subject(runs, groups, names, sweeps)
