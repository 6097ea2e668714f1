"""Writes an HTML page on one or several runs: results, warnings, samples, curves, scores, time spent and settings."""

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
RISEN = 1.005  # two losses in a row above RISEN × the lowest are not chance: held-out points are always the same
PICTURES = 48  # most pictures in a page, of all runs together; but each run may have two
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
    """The runs of a report, and groups of runs that differ only in their seed. `names`: run folder → unique name."""

    runs: Sequence[Found]
    groups: Sequence[SeedGroup]
    names: dict[Path, str]

    @property
    def comparable(self) -> list[SeedGroup]:
        """The groups whose runs all have known settings and at least one line in metrics.jsonl."""
        return [group for group in self.groups if all(run.config and run.records for run in group.runs)]

    def said(self, run: Found, text: str) -> str:
        return f"{self.names[run.folder]}: {text}" if len(self.runs) > 1 else text


def write_report(folders: Sequence[Path | str]) -> Path:
    """Write a page on one run, report.html, or on several, comparison.html, into the first folder; return its path. The
    page names damaged files. FileNotFoundError: a folder has no run; OSError: writing fails; ValueError: no plotly."""
    first, *others = dict.fromkeys(map(Path, folders))
    runs = [find_run(folder) for folder in (first, *others)]
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
        for group in groups
        for run in group.runs
    }
    called = [*names.values()]
    said = {folder: str(folder) if called.count(name) > 1 else name for folder, name in names.items()}
    return Subject(runs, groups, {run.folder: said[run.folder] for run in runs})


def add_results(page: Page, subject: Subject) -> None:
    page.section("Results")
    page.table(*results_table(subject.groups))
    page.points(said := verdicts(subject.comparable))
    if said and all(len(group.runs) == 1 for group in subject.comparable):
        page.text("Without several seeds of each, differences of a few percent may be chance.")


def add_troubles(page: Page, subject: Subject) -> None:
    texts = [subject.said(run, text) for run in subject.runs for text in troubles_of(run)]
    if len(subject.comparable) > 1:
        texts += cautions(subject.comparable)
    page.section("Warnings")
    page.points(texts, "warnings")
    if not texts:
        page.text("None: finished, no step was skipped, every file could be read.")


def troubles_of(run: Found) -> list[str]:
    """Return warnings about a run, the worst first: it is unfinished, its files are damaged, its loss rises, …"""
    texts, starts, planned = [], run.starts, value_at(run.config, "train.steps")
    if run.status.get("state") != "finished" or (planned is not None and run.step < planned):
        texts.append(f"{run.state()}, at step {run.progress}")
    texts += run.problems
    if bad := [record for record in run.records if record.get("bad_steps")]:
        before = [r["step"] for r in run.records if "bad_steps" in r and r["step"] < bad[0]["step"]]
        count, between = sum(r["bad_steps"] for r in bad), f"{max(before, default=0):,} and {bad[-1]['step']:,}"
        texts.append(f"{count:,.0f} steps were skipped, since loss or gradient was not finite: between steps {between}")
    for name, called in heldout_titles().items():
        if absurd := [record for record in run.records if record.get(name, 0) > 1000]:
            texts.append(f"the {called} is {absurd[0][name]:.3g} at step {absurd[0]['step']:,}")
        losses = {record["step"]: record[name] for record in run.records if name in record}
        lowest, since = min(losses, key=losses.get, default=0), [*losses.values()][-2:]
        if [*losses][:-2].count(lowest) and min(since) > RISEN * losses[lowest]:
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
    if len(commits := list(dict.fromkeys(str(start["versions"].get("git")) for start in starts))) > 1:
        texts.append(f"its code changed between starts: commits {', '.join(commits)}")
    elif commits and "+changes" in commits[0]:
        texts.append("its code differed from the stated commit: there were changes that were not committed")
    return list(dict.fromkeys(texts))


def add_samples(page: Page, subject: Subject) -> None:
    shown, said = {}, []
    for run in subject.runs:
        paths = {p.stem[5:]: p for p in sorted(run.folder.glob("samples/step_*.png")) if p.stem[5:].isdecimal()}
        most, smaller = max(2, PICTURES // len(subject.runs)), 0
        chosen = [[*paths][place] for place in spread_indices(len(paths), most)]
        for step in chosen:
            try:
                uri, reduced = data_uri(paths[step])
            except (OSError, ValueError) as error:
                said.append(f"{paths[step]} can't be read: {error}")
                continue
            shown.setdefault(subject.names[run.folder], {})[int(step)] = uri
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
    if len({point.value for group in groups for point in group.curve("lr")}) < 2:
        shown = [metric for metric in shown if metric != "lr"]  # a constant learning rate is in the settings
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
    each = [(run, *find_scores(run.folder)) for run in subject.runs]
    if each := [(run, scored, problems) for run, scored, problems in each if scored or problems]:
        page.section("Scores")
    for run, scored, problems in each:
        if len(subject.runs) > 1:
            page.heading(subject.names[run.folder])
        if scored:
            page.table(*score_table(scored, run))
        page.points(list(dict.fromkeys(note for score in scored for note in score.notes)))
        page.points(problems, "warnings")


def score_table(scored: Sequence[Score], run: Found) -> tuple[list[str], list[list[str]]]:
    """Return (column titles, rows), a row for each of `scored`, scores of `run`; empty columns are left out."""

    def known(names: Iterable[str]) -> list[str]:
        return [name for name in names if any(score.values.get(name) not in (None, "") for score in scored)]

    metrics, about, rows = known(METRICS), known(ABOUT), []
    for score in scored:
        path = str(score.values.get("samples", ""))
        where = path.removeprefix(f"{run.folder}/").removeprefix(f"{run.folder.resolve()}/")
        where = f"step {_cell(score.values['step'])}" if score.values.get("step") not in (None, "") else where
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
    rows = []
    for name in dict.fromkeys(name for spent in each for name in spent):
        shares = [(spent.get(name), total) for spent, total in zip(each, totals)]
        rows.append([name, *(f"{duration(own)}, {own / total:.1%}" if own else ABSENT for own, total in shares)])
    page.table(["", *subject.names.values()], [*rows, ["in all", *map(duration, totals)]])
    if any(len(run.starts) > 1 for run in subject.runs):
        page.text("What was done twice, after a restart, counts once.")


def time_of(run: Found) -> dict[str, float]:
    """Return {activity: seconds > 0} of a run, such as "waiting for data"; older code did not record all of them."""
    rest = run.status.get("spent")

    def total(key: str) -> float:
        return sum(record.get(key, 0.0) for record in [*run.records, rest if isinstance(rest, dict) else {}])

    waited = since = first = 0.0
    for record in run.records:
        first += record.get("first_step_seconds", 0.0)  # which data_wait leaves out
        if "data_wait" in record and "seconds" in record:
            waited += record["data_wait"] * max(0.0, record["seconds"] - since - first)
            since, first = record["seconds"], 0.0
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
    """Return {title: text} of a run's state, network, data, steps, training time, device and more; "–" if unknown."""
    config, (first, last) = run.config, [run.starts[place] if run.starts else {} for place in (0, -1)]
    versions, batch = last.get("versions", {}), value_at(config, "train.batch_size")
    seconds, flops, words, count = run.last("seconds"), run.last("flops"), last.get("command"), last.get("processes")
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
        + ("" if route.get("rejoin") in (None, route.get("start")) else f" with rejoin={route['rejoin']}")
        for route in (model.get("routes") if until != 0 else None) or ()
    ]
    routes += [f"none from step {until:,} on"] if routes and until and until < train.get("steps", 0) else []
    return ", ".join([str(model["name"]), *sizes, "; ".join(routes) or "no route"])
