"""Writes a page on one or several runs: results, warnings, samples, curves, scores, time spent and settings."""

import datetime
import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tread.checkpoints.run_log import differences, value_at
from tread.data.store import spread_indices
from tread.evaluation.metric_table import METRICS, heldout_titles
from tread.reports.comparison import SeedGroup, cautions, charts, group_runs, results_table, unit, unlike, verdicts
from tread.reports.known_scores import Score, find_scores
from tread.reports.page import Page, data_uri
from tread.reports.runs import Found, find_run, told_time
from tread.runtime.files import check_place
from tread.runtime.schema import written
from tread.training.run_folder import LAUNCH

ABSENT = "–"
SPENT = {  # keys of metrics.jsonl, in seconds → the work besides training steps
    "eval_seconds": "evaluation loss",
    "fid_seconds": "FID in training",
    "draw_seconds": "drawing samples",
    "judge_seconds": "judging samples at the end",
    "save_seconds": "saving checkpoints",
}
RISEN = 1.005  # a loss twice in a row above this times the lowest is no noise: held-out points are always the same
PICTURES = 48  # pictures in a page, of all runs together
ABOUT = {  # columns of a score besides its metrics
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
    """The runs of a report, in groups that differ only in their seed. `names` has each run folder's unique name."""

    runs: Sequence[Found]
    groups: Sequence[SeedGroup]
    names: dict[Path, str]

    @property
    def comparable(self) -> list[SeedGroup]:
        """The groups whose runs have known settings and records."""
        return [group for group in self.groups if all(run.config and run.records for run in group.runs)]

    def said(self, run: Found, text: str) -> str:
        return f"{self.names[run.folder]}: {text}" if len(self.runs) > 1 else text


def write_report(folders: Sequence[Path | str]) -> Path:
    """Write a page on runs into the first folder, as report.html, or comparison.html for several runs; return its path.
    The page names damaged files. Raises FileNotFoundError for a folder without a run, OSError if the page can't be
    written, ImportError if plotly is missing."""
    runs = [find_run(folder) for folder in dict.fromkeys(map(Path, folders))]
    first = runs[0].folder
    check_place(first, 0)
    named = [run.folder.resolve().name for run in runs]
    title = " and ".join(named) if len(runs) < 3 else f"{named[0]} and {len(runs) - 1} more"
    page = Page(title, f"Report of {datetime.datetime.now().astimezone():%d %B %Y, %H:%M %Z}")
    subject = subject_of(runs)
    for section in (add_results, add_troubles, add_samples, add_curves, add_scores, add_time, add_settings):
        section(page, subject)
    path = first / ("comparison.html" if len(runs) > 1 else "report.html")
    page.write(path)
    return path


def subject_of(runs: Sequence[Found]) -> Subject:
    """Group runs that differ only in their seed (a run of unknown settings stays alone), and name groups and runs."""
    alone = [run for run in runs if len(runs) == 1 or not run.config]
    groups = group_runs([run for run in runs if run not in alone])
    groups += [SeedGroup(run.folder.resolve().name, [run]) for run in alone]
    called = [group.name for group in groups]
    groups = [replace(g, name=str(g.runs[0].folder)) if called.count(g.name) > 1 else g for g in groups]
    names = {
        run.folder: f"{group.name}, {run.folder.name}" if len(group.runs) > 1 else group.name
        for run in runs
        for group in groups
        if run in group.runs
    }
    return Subject(runs, groups, names)


def add_results(page: Page, subject: Subject) -> None:
    page.section("Results")
    page.table(*results_table(subject.groups))
    page.points(said := verdicts(subject.comparable))
    if said and all(len(group.runs) == 1 for group in subject.comparable):
        page.text("Without several seeds of each, differences of a few percent are chance.")


def add_troubles(page: Page, subject: Subject) -> None:
    texts = [subject.said(run, text) for run in subject.runs for text in troubles_of(run)]
    if len(subject.comparable) > 1:
        texts += cautions(subject.comparable)
    page.section("Warnings")
    page.points(texts, "warnings")
    if not texts:
        page.text("None: finished, no step was skipped, every file could be read.")


def troubles_of(run: Found) -> list[str]:
    """Return warnings about a run for readers of its numbers, the worst first."""
    texts, starts, planned = [], run.starts, value_at(run.config, "train.steps")
    if run.status.get("state") != "finished" or (planned is not None and run.step < planned):
        texts.append(f"{run.state()}, at step {run.progress}")
    texts += run.problems
    skipped = {record["step"]: record["bad_steps"] for record in run.records if "bad_steps" in record}
    if bad := [step for step, count in skipped.items() if count]:
        between = f"{max((step for step in skipped if step < bad[0]), default=0):,} and {bad[-1]:,}"
        total = f"{sum(skipped.values()):,.0f} steps were skipped"
        texts.append(f"{total}, since loss or gradient was not finite: between steps {between}")
    for name, called in heldout_titles().items():
        losses = {record["step"]: record[name] for record in run.records if name in record}
        absurd = [f"the {called} is {loss:.3g} at step {step:,}" for step, loss in losses.items() if loss > 1000]
        texts += absurd[:1]
        lowest, since = min(losses, key=losses.get, default=0), [*losses.values()][-2:]
        if lowest in [*losses][:-2] and min(since) > RISEN * losses[lowest]:
            risen = f"from {losses[lowest]:.4g} at step {lowest:,} to {since[-1]:.4g} at step {max(losses):,}"
            texts.append(f"the {called} has risen, {risen}, as when a network learns its training pictures by heart")
    if run.config and not value_at(run.config, "dataset.heldout"):
        texts.append("there is no held-out data, so no evaluation")
    texts += [str(text) for start in starts for text in start["warnings"]]
    if len(starts) > 1:
        texts.append("started again at step " + ", ".join(f"{start['step']:,}" for start in starts[1:]))
    for before, now in zip(starts, starts[1:]):
        for key, (old, new) in differences(before["config"], now["config"]).items():
            if key not in LAUNCH:
                texts.append(f"{key} was {written(old)}, is {written(new)} from step {now['step']:,} on")
    commits = ", ".join(dict.fromkeys(str(start["versions"].get("git")) for start in starts))
    if ", " in commits:
        texts.append(f"its code changed between starts: commits {commits}")
    elif "+changes" in commits:
        texts.append("its code differed from the stated commit: there were changes that were not committed")
    return list(dict.fromkeys(texts))


def add_samples(page: Page, subject: Subject) -> None:
    shown, said = {}, []
    for run in subject.runs:
        paths = [p for p in sorted(run.folder.glob("samples/step_*.png")) if p.stem[5:].isdecimal()]
        chosen = spread_indices(len(paths), max(2, PICTURES // len(subject.runs)))
        smaller = 0
        for path in (paths[place] for place in chosen):
            try:
                uri, reduced = data_uri(path)
            except (OSError, ValueError) as error:
                said.append(f"{path} can't be read: {error}")
                continue
            shown.setdefault(subject.names[run.folder], {})[int(path.stem[5:])] = uri
            smaller += reduced
        if len(chosen) < len(paths):
            said.append(subject.said(run, f"{len(chosen)} of {len(paths)} pictures are here, evenly chosen"))
        if smaller:
            said.append(subject.said(run, f"{smaller} pictures are smaller here than in samples/, as JPEGs"))
    if shown or said:
        page.section("Samples")
    if shown:
        page.slider(shown)
        page.text("Drawn with the EMA weights. A row is a class, and a place has the same noise at each step.")
    page.points(said)


def add_curves(page: Page, subject: Subject) -> None:
    groups = subject.groups
    shown = [m for m in METRICS if METRICS[m].curve and any(len(group.curve(m)) > 1 for group in groups)]
    if "lr" in shown and len({point.value for group in groups for point in group.curve("lr")}) == 1:
        shown.remove("lr")  # a constant learning rate is in the settings
    if not shown:
        return
    page.section("Curves")
    page.curves(charts(groups, shown))
    page.text(
        "Drag over a plot to zoom, double-click to go back. Bands are the standard deviation over seeds. Evaluation "
        "loss (edm) and velocity error (rf) are of the EMA weights with all tokens, on held-out data; compare runs by "
        "them, but not one with the other."
    )


def add_scores(page: Page, subject: Subject) -> None:
    found = [(run, *find_scores(run.folder)) for run in subject.runs]
    if any(scored or problems for _, scored, problems in found):
        page.section("Scores")
    for run, scored, problems in found:
        if len(subject.runs) > 1 and (scored or problems):
            page.heading(subject.names[run.folder])
        if scored:
            page.table(*score_table(scored, run))
        page.points(list(dict.fromkeys(note for score in scored for note in score.notes)))
        page.points(problems, "warnings")


def score_table(scored: Sequence[Score], run: Found) -> tuple[list[str], list[list[str]]]:
    """Return a table's head, and a row for each of `scored`, scores of `run`. Columns without a value are left out."""

    def known(names: Iterable[str]) -> list[str]:
        return [name for name in names if any(score.values.get(name) not in (None, "") for score in scored)]

    metrics, about, rows = known(METRICS), known(ABOUT), []
    for score in scored:
        path, step = str(score.values.get("samples", "")), score.values.get("step")
        where = path.removeprefix(f"{run.folder}/").removeprefix(f"{run.folder.resolve()}/")
        where = where if step in (None, "") else f"step {_cell(step)}"
        counts = {name: f" of {count:,}" for name, count in score.counts.items()}
        rows.append([where, *(_cell(score.values.get(name)) + counts.get(name, "") for name in (*metrics, *about))])
    return ["of", *(METRICS[m].title + METRICS[m].arrow for m in metrics), *(ABOUT[key] for key in about)], rows


def _cell(value: object) -> str:
    try:
        return f"{float(value):,.0f}" if float(value).is_integer() else f"{float(value):.5g}"
    except (TypeError, ValueError):
        return ABSENT if value in (None, "") else str(value)


def add_time(page: Page, subject: Subject) -> None:
    page.section("Where the time went")
    each = [time_of(run) for run in subject.runs]
    totals = [sum(spent.values()) for spent in each]
    rows = {name: [ABSENT] * len(each) for spent in each for name in spent}
    for number, (spent, total) in enumerate(zip(each, totals)):
        for name, seconds in spent.items():
            rows[name][number] = f"{duration(seconds)}, {seconds / total:.1%}"
    rows["in all"] = map(duration, totals)
    page.table(["", *subject.names.values()], [[name, *cells] for name, cells in rows.items()])
    if any(len(run.starts) > 1 for run in subject.runs):
        page.text("What was done twice, after a restart, counts once.")


def time_of(run: Found) -> dict[str, float]:
    """Return {activity: seconds > 0} of a run, such as "waiting for data"; older code did not record all of them."""
    rest = run.status.get("spent")
    records = [*run.records, rest if isinstance(rest, dict) else {}]

    def total(key: str) -> float:
        return sum(record.get(key, 0.0) for record in records)

    waited = since = 0.0
    for record in run.records:
        if "data_wait" in record and "seconds" in record:
            waited += record["data_wait"] * max(0.0, record["seconds"] - since)
            since = record["seconds"]
    first = total("first_step_seconds")
    parts = {
        "start, before the first step": total("cold_start_seconds") - first,
        "the first step of each start": first,
        "other training steps": max(0.0, (run.last("seconds") or 0.0) - first - waited),
        "waiting for data": waited,
        **{called: total(key) for key, called in SPENT.items()},
    }
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def duration(seconds: float) -> str:
    name, size = unit("seconds", seconds)
    return f"{seconds / size:.3g} {name}"


def add_settings(page: Page, subject: Subject) -> None:
    page.section("What ran")
    names, facts = subject.names.values(), [facts_of(run) for run in subject.runs]
    page.table(["", *names], [[name, *(fact[name] for fact in facts)] for name in facts[0]])
    apart = unlike([run.config for run in subject.runs])
    if rows := [[key, *map(written, values)] for key, values in apart.items() if key not in LAUNCH]:
        page.heading("Settings that differ")
        page.table(["key", *names], rows)
    for run in subject.runs:
        if run.config:
            settings = json.dumps(run.config, indent=1, ensure_ascii=False)
            page.folded(f"all settings of {subject.names[run.folder]}", settings)


def facts_of(run: Found) -> dict[str, str]:
    """Return a run's state, network, data, device and costs as {title: text}."""
    config, starts = run.config, run.starts or [{}]
    first, last, batch = starts[0], starts[-1], value_at(config, "train.batch_size")
    seconds, flops, words, count = run.last("seconds"), run.last("flops"), last.get("command"), last.get("processes")
    versions = last.get("versions", {})
    hashed, plus, rest = str(versions.get("git") or "").partition("+")
    device = ", ".join(str(last[key]) for key in ("device", "precision") if last.get(key))
    facts = {
        "state": run.state(),
        "folder": str(run.folder),
        "network": _network(config),
        "data": value_at(config, "dataset.name"),
        "objective": config.get("objective"),
        "seed": config.get("seed"),
        "first weights": first.get("weights"),
        "steps": run.progress,
        "images": batch and f"{run.step * batch:,} in batches of {batch:,}",
        "training FLOPs": flops and f"{flops:.4g}",
        "training time": seconds and duration(seconds),
        "device": f"{count} processes on {device}" if isinstance(count, int) and count > 1 else device,
        "commit": hashed[:12] + plus + rest,
        "versions": ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "numpy") if name in versions),
        "started": told_time(first.get("time")),
        "last heard of": told_time(run.status.get("time")),
        "command": shlex.join(map(str, ["python", *words])) if isinstance(words, list) and words else None,
    }
    return {name: ABSENT if value in (None, "") else str(value) for name, value in facts.items()}


def _network(config: dict) -> str | None:
    model, train = config.get("model"), config.get("train", {})
    if not model:
        return None
    until, ratio = train.get("routes_until"), train.get("ratio_schedule")
    ratio = ratio and f"{ratio.get('start')} to {ratio.get('end')}"
    sizes = [f"{key.replace('_', ' ')} {model[key]}" for key in ("hidden_size", "depth", "patch_size") if key in model]
    routes = [
        f"r({route.get('start')}→{route.get('end')}) at ratio {ratio or route.get('selection_ratio')}"
        + ("" if route.get("rejoin") in (None, route.get("start")) else f" rejoining as before block {route['rejoin']}")
        for route in (model.get("routes") if until != 0 else None) or ()
    ]
    routes += [f"none from step {until:,} on"] if routes and until and until < train.get("steps", 0) else []
    return ", ".join([str(model["name"]), *sizes, "; ".join(routes) or "no route"])
