"""The sections of a report, in their order on the page, each followed by what it alone is made of."""

from __future__ import annotations

import datetime
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tread.drawing.charts import Panel
from tread.evaluation.metric_table import METRICS, heldout_titles
from tread.reports.comparison import SeedGroup, axes_of, cautions, column_metrics, number, panel, speed, unit, verdicts
from tread.reports.known_scores import Score, curves_of, find_scores, find_sweeps
from tread.reports.page import Page, data_uri, spread
from tread.reports.runs import Found, told_time
from tread.runtime.schema import written
from tread.training.run_folder import LAUNCH, differences, value_at

ABSENT = "–"
SPENT = {  # keys of metrics.jsonl → what took those seconds, beside the training steps
    "eval_seconds": "evaluation loss",
    "fid_seconds": "FID in training",
    "draw_seconds": "drawing samples",
    "judge_seconds": "judging samples at the end",
    "save_seconds": "saving checkpoints",
}
PICTURES = 48  # in a page, of all runs together
AXES = {"step": "steps", "flops": "FLOPs", "seconds": "time"}
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
    groups: Sequence[SeedGroup]
    names: dict[Path, str]
    sweeps: Sequence[Path]

    @property
    def comparable(self) -> list[SeedGroup]:
        """Those whose settings are known, and which have logged something."""
        return [group for group in self.groups if all(run.config and run.records for run in group.runs)]

    def said(self, run: Found, text: str) -> str:
        return f"{self.names[run.folder]}: {text}" if len(self.runs) > 1 else text


def results(page: Page, subject: Subject) -> None:
    page.section("Results")
    groups = subject.groups
    columns = column_metrics(groups)
    name, size = unit("seconds", max((s for group in groups for s in group.last("seconds")), default=0))
    rows = []
    for group in groups:
        cells = []
        for column in columns:
            counts = sorted({f"{count:,.0f}" for count in group.last(METRICS[column].count)})
            cells.append(number(group.last(column)) + (f" of {'/'.join(counts)}" if counts else ""))
        cells += [speed(group), number([s / size for s in group.last("seconds")]), number(group.last("flops"))]
        seeds = f" ({len(group.runs)} seeds)" if len(group.runs) > 1 else ""
        rows.append([group.name + seeds, f"{min(run.step for run in group.runs):,}", *cells])
    titles = [METRICS[column].title for column in columns]
    page.table(["run", "steps", *titles, "images/s", f"training {name}", "training FLOPs"], rows)
    if any(METRICS[column].count for column in columns):
        page.text("“of n”: so many samples were scored for it.")
    if said := verdicts(subject.comparable):
        page.points(said)
        if all(len(group.runs) == 1 for group in subject.comparable):
            page.text("Without several seeds of each, differences of a few percent are chance.")


def troubles(page: Page, subject: Subject) -> None:
    texts = [subject.said(run, text) for run in subject.runs for text in troubles_of(run)]
    if len(subject.comparable) > 1:
        texts += [text for text in cautions(subject.comparable) if " is at step " not in text]
    page.section("Warnings")
    if texts:
        page.points(texts, "warnings")
    else:
        page.text("None: finished, no step was skipped, every file could be read.")


def troubles_of(run: Found) -> list[str]:
    """What somebody who reads this run's numbers should know, the worst first."""
    texts = []
    state, planned = run.state(), value_at(run.config, "train.steps")
    early = isinstance(planned, int) and run.step < planned
    if run.status.get("state") != "finished" or early:
        texts.append(f"{state}, at step {run.step:,}" + (f" of {planned:,}" if isinstance(planned, int) else ""))
    texts += run.problems
    if bad := [record for record in run.records if record.get("bad_steps")]:
        count = sum(record["bad_steps"] for record in bad)
        texts.append(
            f"{count:,.0f} steps were skipped, since loss or gradient was not finite: between steps "
            f"{_before(run, bad[0]):,} and {bad[-1]['step']:,}"
        )
    for name, called in heldout_titles().items():
        if absurd := [record for record in run.records if record.get(name, 0) > 1000]:
            texts.append(f"the {called} is {absurd[0][name]:.3g} at step {absurd[0]['step']:,}")
    if run.config and not value_at(run.config, "dataset.heldout"):
        texts.append("there is no held-out data, so no evaluation")
    texts += [str(text) for start in run.starts for text in start["warnings"]]
    return list(dict.fromkeys(texts + _resumptions(run)))


def _before(run: Found, record: dict) -> int:
    """The step of the last log before one."""
    return max((r["step"] for r in run.records if "bad_steps" in r and r["step"] < record["step"]), default=0)


def _resumptions(run: Found) -> list[str]:
    """That a run was started again, what was changed, and that its code was another or not committed."""
    texts = []
    if len(run.starts) > 1:
        steps = ", ".join(f"{start['step']:,}" for start in run.starts[1:])
        times = "once" if len(run.starts) == 2 else f"{len(run.starts) - 1} times"
        texts.append(f"started again {times}, at step {steps}")
    for before, now in zip(run.starts, run.starts[1:]):
        for key, (old, new) in differences(before["config"], now["config"]).items():
            if key not in LAUNCH:
                texts.append(f"{key} was {written(old)}, is {written(new)} from step {now['step']:,} on")
    commits = list(dict.fromkeys(str(start["versions"].get("git")) for start in run.starts))
    if len(commits) > 1:
        texts.append(f"its code changed between starts: commits {', '.join(commits)}")
    elif commits and commits[0].endswith("+changes"):
        texts.append("its code differed from the commit that is stated: there were changes that were not committed")
    return texts


def samples(page: Page, subject: Subject) -> None:
    shown, said = {}, []
    for run in subject.runs:
        pictures = {
            int(path.stem[5:]): path for path in run.folder.glob("samples/step_*.png") if path.stem[5:].isdecimal()
        }
        chosen, smaller = spread(pictures, PICTURES // len(subject.runs)), 0
        for step, path in chosen.items():
            try:
                uri, reduced = data_uri(path)
            except (OSError, ValueError) as error:
                said.append(f"{path} can't be read: {error}")
                continue
            shown.setdefault(subject.names[run.folder], {})[step] = uri
            smaller += reduced
        if len(chosen) < len(pictures):
            said.append(subject.said(run, f"{len(chosen)} of {len(pictures)} pictures are here, evenly chosen"))
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
    shown = [m for m in METRICS if METRICS[m].curve and any(len(group.curve(m)) > 1 for group in groups)]
    rates = {point.value for group in groups for point in group.curve("lr")}
    shown = [metric for metric in shown if metric != "lr" or len(rates) > 1]  # a constant one stands in the settings
    axes = axes_of(groups, shown)
    if not axes:
        return
    page.section("Curves")
    charts = []
    for metric in shown:
        drawn = [group for group in groups if group.curve(metric)]
        charts.append({AXES[axis]: _drawn(panel(drawn, metric, axis), metric, drawn) for axis in axes})
    page.curves(charts)
    page.text(
        "Drag over a plot to zoom, double-click to go back. Evaluation loss (edm) and velocity error (rf) are of the "
        "EMA weights with all tokens, on held-out data; compare runs by them, but not one with the other."
    )
    if any(len(group.runs) > 1 for group in groups):
        page.text("Bands: the standard deviation over the seeds.")


def _drawn(panel: Panel, metric: str, groups: Sequence[SeedGroup]) -> Panel:
    """Those whose metric is another with routes are dashed where they have them, and said to be incomparable."""
    if "model.routes" not in METRICS[metric].alike:
        return panel
    routed = [any((run.config.get("model") or {}).get("routes") for run in group.runs) for group in groups]
    lines = [replace(line, dashed=dashed) for line, dashed in zip(panel.lines, routed)]
    said = ", with routes (dashed): not comparable to runs without" * any(routed)
    return replace(panel, lines=lines, title=panel.title + said)


def scores(page: Page, subject: Subject) -> None:
    for run in subject.runs:
        scored, problems = find_scores(run.folder)
        if not scored and not problems:
            continue
        if not any(title == "Scores" for title, _ in page.sections):
            page.section("Scores")
        if len(subject.runs) > 1:
            page.heading(subject.names[run.folder])
        if scored:
            _score_table(page, scored, run)
        if problems:
            page.points(problems, "warnings")


def _score_table(page: Page, scored: Sequence[Score], run: Found) -> None:
    metrics = [name for name in METRICS if any(score.values.get(name) not in (None, "") for score in scored)]
    about = [key for key in ABOUT if any(score.values.get(key) not in (None, "") for score in scored)]
    rows = []
    for score in scored:
        cells = [_cell(score.values.get(name)) for name in metrics]
        cells = [
            f"{cell} of {score.counts[name]:,}" if name in score.counts else cell for name, cell in zip(metrics, cells)
        ]
        step, path = score.values.get("step"), str(score.values.get("samples", ""))
        where = path.removeprefix(f"{run.folder}/").removeprefix(f"{run.folder.resolve()}/")
        where = where if step in (None, "") else f"step {_cell(step)}"
        rows.append([where, *cells, *(_cell(score.values.get(key)) for key in about)])
    titles = [METRICS[name].title + METRICS[name].arrow for name in metrics]
    page.table(["of", *titles, *(ABOUT[key] for key in about)], rows)
    if notes := list(dict.fromkeys(note for score in scored for note in score.notes)):
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
    known, problems = {}, []
    for folder, run in [
        *((run.folder, run.folder) for run in subject.runs),
        *((path, None) for path in subject.sweeps),
    ]:
        swept, wrong = find_sweeps(folder, run)
        known |= {sweep.folder.resolve(): (sweep, run) for sweep in swept if sweep.folder.resolve() not in known}
        problems += wrong
    if known or problems:
        page.section("Guidance")
    for sweep, run in known.values():
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


def time_of(run: Found) -> dict[str, float]:
    """What took the run's seconds, in the order of a run; of older code, what is known."""
    total, first = _last(run, "seconds") or 0.0, sum(r.get("first_step_seconds", 0.0) for r in run.records)
    start = sum(
        r["cold_start_seconds"] - r.get("first_step_seconds", 0.0) for r in run.records if "cold_start_seconds" in r
    )
    waited, since = 0.0, 0.0
    for record in run.records:
        if "data_wait" in record and "seconds" in record:
            waited += record["data_wait"] * max(0.0, record["seconds"] - since)
            since = record["seconds"]
    rest = run.status.get("spent") if isinstance(run.status.get("spent"), dict) else {}
    numbers = [*run.records, {key: value for key, value in rest.items() if isinstance(value, (int, float))}]
    apart = {called: sum(record.get(key, 0.0) for record in numbers) for key, called in SPENT.items()}
    parts = {
        "start, before the first step": start,
        "the first step of each start": first,
        "other training steps" if first else "training steps": max(0.0, total - first - waited),
        "waiting for data": waited,
        **apart,
    }
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def duration(seconds: float) -> str:
    name, size = unit("seconds", seconds)
    return f"{seconds / size:.3g} {name}"


def settings(page: Page, subject: Subject) -> None:
    page.section("What ran")
    facts = [facts_of(run) for run in subject.runs]
    names = [subject.names[run.folder] for run in subject.runs]
    page.table(["", *names], [[key, *(fact[key] for fact in facts)] for key in facts[0]])
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


def settings_apart(runs: Sequence[Found]) -> dict[str, list[str]]:
    """Dotted keys that differ between runs → the value of each; those of a launch left out."""
    configs = [run.config for run in runs]
    keys = {key: None for config in configs for key in differences(configs[0], config) if key not in LAUNCH}
    return {
        key: ["–" if value_at(config, key) is None else written(value_at(config, key)) for config in configs]
        for key in keys
    }


def facts_of(run: Found) -> dict[str, str]:
    """What ran, on what, at which cost; by what it is called."""
    config, last, first = run.config, run.starts[-1] if run.starts else {}, run.starts[0] if run.starts else {}
    versions = last.get("versions", {})
    batch, planned = value_at(config, "train.batch_size"), value_at(config, "train.steps")
    spent = {key: _last(run, key) for key in ("seconds", "flops")}
    words = last.get("command")
    facts = {
        "state": run.state(),
        "folder": str(run.folder),
        "network": _network(config),
        "data": value_at(config, "dataset.name"),
        "objective": config.get("objective"),
        "seed": config.get("seed"),
        "first weights": first.get("weights"),
        "steps": f"{run.step:,}" + (f" of {planned:,}" if isinstance(planned, int) else ""),
        "images": f"{run.step * batch:,} in batches of {batch:,}" if isinstance(batch, int) else None,
        "training FLOPs": spent["flops"] and f"{spent['flops']:.4g}",
        "training time": spent["seconds"] and duration(spent["seconds"]),
        "device": _device(last),
        "commit": _short(versions.get("git")),
        "versions": ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "numpy") if name in versions),
        "started": told_time(first.get("time")),
        "last heard of": told_time(run.status.get("time")),
        "from start to end": _wall(run),
        "command": shlex.join(map(str, ["python", *words])) if isinstance(words, list) and words else None,
    }
    return {name: ABSENT if value in (None, "") else str(value) for name, value in facts.items()}


def _last(run: Found, key: str) -> float | None:
    return next((record[key] for record in reversed(run.records) if key in record), None)


def _network(config: dict) -> str | None:
    model = config.get("model")
    if not model:
        return None
    sizes = [f"{key.replace('_', ' ')} {model[key]}" for key in ("hidden_size", "depth", "patch_size") if key in model]
    routes = [
        f"r({route.get('start')}→{route.get('end')}) at ratio {route.get('selection_ratio')}"
        + ("" if route.get("rejoin") in (None, route.get("start")) else f" rejoining as before block {route['rejoin']}")
        for route in model.get("routes") or ()
    ]
    return ", ".join([str(model["name"]), *sizes, "; ".join(routes) or "no route"])


def _device(start: dict) -> str:
    count = start.get("processes")
    processes = f"{count} processes on " if isinstance(count, int) and count > 1 else ""
    return processes + ", ".join(str(start[key]) for key in ("device", "precision") if start.get(key))


def _wall(run: Found) -> str | None:
    """From the start to the end, of a run that was started once and says when it ended."""
    if run.status.get("state") == "running":
        return None
    try:
        (start,) = run.starts
        began, ended = (datetime.datetime.fromisoformat(record["time"]) for record in (start, run.status))
        return duration((ended - began).total_seconds())
    except (ValueError, KeyError, TypeError):
        return None


def _short(commit: object) -> str | None:
    """Twelve digits of a revision, which git knows it by, and whether there were changes beside it."""
    hashed, plus, rest = str(commit or "").partition("+")
    return hashed[:12] + plus + rest
