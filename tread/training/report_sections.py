"""The sections of a report, each from the runs to the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tread.evaluation.curves import Panel
from tread.evaluation.found_scores import Score, curves_of, find_scores, find_sweeps
from tread.evaluation.inlined import data_uri, spread
from tread.evaluation.page import Page
from tread.evaluation.score_files import SHOWN as CALLED
from tread.evaluation.scorers import METRICS
from tread.training.comparison import Group
from tread.training.comparison_text import COLUMNS, CURVES, axes_of, doubts, number, panel, speed, unit, verdicts
from tread.training.reading import Found
from tread.training.report_facts import ABSENT, duration, facts_of, place_of, settings_apart, time_of, troubles_of

PICTURES = 48  # in a page, of all runs together
AXES = {"step": "steps", "flops": "FLOPs", "seconds": "time"}
DRAWN = {  # metrics, and how they are called
    **CURVES,
    "loss": "training loss",
    "grad_norm": "gradient norm, mean of the good steps",
    "lr": "learning rate",
    "images_per_s": "images/s of training",
}
LINEAR = ("lr", "images_per_s")
DEMO = ("label_agreement", "frechet_pixels", "seen_top1", "held_top1")
COUNTS = {"fid": "fid_samples"} | dict.fromkeys(DEMO, "demo_samples")
ABOUT = {  # a scoring's columns beside its metrics
    "count": "samples",
    "guidance": "guidance",
    "flops_relative": "FLOPs over none",
    "sampler": "solver",
    "nfe": "NFE",
    "weights": "weights",
    "labels": "labels",
    "reference": "reference",
}


@dataclass(frozen=True)
class Subject:
    """What a report is about.

    groups  the runs, those together that differ by their seed alone; names are told apart.
    names   a run's folder → what it is called.
    sweeps  folders of guidance sweeps that were named beside the runs.
    """

    runs: Sequence[Found]
    groups: Sequence[Group]
    names: dict[Path, str]
    sweeps: Sequence[Path]

    @property
    def comparable(self) -> list[Group]:
        """Those whose settings are known, and which have logged something."""
        return [group for group in self.groups if all(run.config and run.records for run in group.runs)]

    def said(self, run: Found, text: str) -> str:
        return f"{self.names[run.folder]}: {text}" if len(self.runs) > 1 else text


def results(page: Page, subject: Subject) -> None:
    page.section("Results")
    groups = subject.groups
    columns = [name for name in COLUMNS if any(group.last(name) for group in groups)]
    name, size = unit("seconds", max((s for group in groups for s in group.last("seconds")), default=0))
    rows = []
    for group in groups:
        cells = []
        for column in columns:
            counts = sorted({f"{count:,.0f}" for count in group.last(COUNTS.get(column, ""))})
            cells.append(number(group.last(column)) + (f" of {'/'.join(counts)}" if counts else ""))
        cells += [speed(group), number([s / size for s in group.last("seconds")]), number(group.last("flops"))]
        seeds = f" ({len(group.runs)} seeds)" if len(group.runs) > 1 else ""
        rows.append([group.name + seeds, f"{min(run.step for run in group.runs):,}", *cells])
    page.table(
        ["run", "steps", *(COLUMNS[column] for column in columns), "images/s", f"training {name}", "training FLOPs"],
        rows,
    )
    if any(column in COUNTS for column in columns):
        page.text("“of n”: so many samples were scored for it.")
    if said := verdicts(subject.comparable):
        page.points(said)
        if all(len(group.runs) == 1 for group in subject.comparable):
            page.text("Without several seeds of each, differences of a few percent are chance.")


def troubles(page: Page, subject: Subject) -> None:
    found = [subject.said(run, text) for run in subject.runs for text in troubles_of(run)]
    if len(subject.comparable) > 1:
        found += [text for text in doubts(subject.comparable) if " is at step " not in text]
    page.section("Warnings")
    if found:
        page.points(found, "warnings")
    else:
        page.text("None: finished, no step was skipped, every file could be read.")


def samples(page: Page, subject: Subject) -> None:
    shown, said = {}, []
    for run in subject.runs:
        found = {
            int(path.stem[5:]): path for path in run.folder.glob("samples/step_*.png") if path.stem[5:].isdecimal()
        }
        chosen, smaller = spread(found, PICTURES // len(subject.runs)), 0
        for step, path in chosen.items():
            try:
                uri, reduced = data_uri(path)
            except (OSError, ValueError) as error:
                said.append(f"{path} can't be read: {error}")
                continue
            shown.setdefault(subject.names[run.folder], {})[step] = uri
            smaller += reduced
        if len(chosen) < len(found):
            said.append(subject.said(run, f"{len(chosen)} of {len(found)} pictures are here, evenly chosen"))
        if smaller:
            said.append(subject.said(run, f"{smaller} pictures are smaller here than in samples/, as JPEGs"))
    if shown or said:
        page.section("Samples")
    if shown:
        page.slider(shown)
        page.text(
            "Drawn with the averaged (EMA) weights; a row is a class, and a place has the same noise at each step."
        )
    if said:
        page.points(said)


def curves(page: Page, subject: Subject) -> None:
    groups = [group for group in subject.groups if group.runs]
    shown = [metric for metric in DRAWN if any(len(group.curve(metric)) > 1 for group in groups)]
    rates = {point.value for group in groups for point in group.curve("lr")}
    shown = [metric for metric in shown if metric != "lr" or len(rates) > 1]  # a constant one stands in the settings
    axes = axes_of(groups, shown)
    if not axes:
        return
    page.section("Curves")
    charts = []
    for metric in shown:
        drawn = [group for group in groups if group.curve(metric)]
        charts.append({AXES[axis]: _drawn(panel(drawn, metric, axis, DRAWN[metric]), metric, drawn) for axis in axes})
    page.curves(charts)
    page.text(
        "Drag over a plot to zoom, double-click to go back. Evaluation loss (edm) and velocity error (rf) are of the "
        "EMA weights with all tokens, on held-out data; compare runs by them, but not one with the other."
    )
    if any(len(group.runs) > 1 for group in groups):
        page.text("Bands: the standard deviation over the seeds.")


def _drawn(panel: Panel, metric: str, groups: Sequence[Group]) -> Panel:
    """Training losses with routes are dashed and said to be incomparable; rates have linear axes."""
    if metric == "loss":
        routed = [any((run.config.get("model") or {}).get("routes") for run in group.runs) for group in groups]
        lines = [replace(line, dashed=dashed) for line, dashed in zip(panel.lines, routed)]
        said = ", with routes (dashed): not comparable to runs without" * any(routed)
        return replace(panel, lines=lines, title=panel.title + said)
    return replace(panel, log="") if metric in LINEAR else panel


def scores(page: Page, subject: Subject) -> None:
    for run in subject.runs:
        found, problems = find_scores(run.folder)
        if not found and not problems:
            continue
        if not any(title == "Scores" for title, _ in page.sections):
            page.section("Scores")
        if len(subject.runs) > 1:
            page.heading(subject.names[run.folder])
        if found:
            _score_table(page, found, run)
        if problems:
            page.points(problems, "warnings")


def _score_table(page: Page, found: Sequence[Score], run: Found) -> None:
    metrics = [name for name in METRICS if any(score.values.get(name) not in (None, "") for score in found)]
    about = [key for key in ABOUT if any(score.values.get(key) not in (None, "") for score in found)]
    rows = []
    for score in found:
        cells = [_cell(score.values.get(name)) for name in metrics]
        cells = [
            f"{cell} of {score.counts[name]:,}" if name in score.counts else cell for name, cell in zip(metrics, cells)
        ]
        step = score.values.get("step")
        where = (
            f"step {_cell(step)}" if step not in (None, "") else place_of(score.values.get("samples", ""), run.folder)
        )
        rows.append([where, *cells, *(_cell(score.values.get(key)) for key in about)])
    arrows = {"lower": "↓", "higher": "↑"}  # where better values lie
    called = [f"{CALLED.get(name, name.replace('_', ' '))} {arrows[METRICS[name]]}" for name in metrics]
    page.table(["of", *called, *(ABOUT[key] for key in about)], rows)
    if notes := list(dict.fromkeys(note for score in found for note in score.notes)):
        page.points(notes)


def _cell(value: object) -> str:
    """A value of a record, or its text in a table, for people."""
    if value in (None, ""):
        return ABSENT
    try:
        return f"{float(value):,.0f}" if float(value).is_integer() else f"{float(value):.5g}"
    except (TypeError, ValueError):
        return str(value)


def sweeps(page: Page, subject: Subject) -> None:
    found, problems = {}, []
    for folder, run in [
        *((run.folder, run.folder) for run in subject.runs),
        *((path, None) for path in subject.sweeps),
    ]:
        swept, wrong = find_sweeps(folder, run)
        found |= {sweep.folder.resolve(): (sweep, run) for sweep in swept if sweep.folder.resolve() not in found}
        problems += wrong
    if found or problems:
        page.section("Guidance")
    for sweep, run in found.values():
        page.heading(f"{sweep.folder}" + (f", with {subject.names[run]}" if run and len(subject.runs) > 1 else ""))
        page.text(sweep.kind)
        page.curves([{"": panel} for panel in curves_of(sweep)])
    if problems:
        page.points(problems, "warnings")


def time(page: Page, subject: Subject) -> None:
    page.section("Where the time went")
    each = {}
    for run in subject.runs:
        spent = time_of(run)
        total = sum(spent.values())
        shares = {name: (duration(seconds), seconds / total) for name, seconds in spent.items()}
        note = f"{duration(total)} in all" if spent else "not known"
        note += "; what was done twice, after a restart, counts once" * (len(run.starts) > 1)
        each[subject.names[run.folder] if len(subject.runs) > 1 else ""] = shares, note
    page.shares(each)


def settings(page: Page, subject: Subject) -> None:
    page.section("What ran")
    facts = [facts_of(run) for run in subject.runs]
    names = [subject.names[run.folder] for run in subject.runs]
    page.table(["", *names], [[key, *(one[key] for one in facts)] for key in facts[0]])
    if len(subject.runs) > 1:
        page.heading("Settings that differ")
        apart = settings_apart(subject.runs)
        if apart:
            page.table(["key", *names], [[key, *values] for key, values in apart.items()])
        else:
            page.text("None.")
    for run in subject.runs:
        if run.config:
            page.folded(
                f"all settings of {subject.names[run.folder]}", json.dumps(run.config, indent=1, ensure_ascii=False)
            )
