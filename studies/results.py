"""What a study's runs came to: results found by their keys, the table, the figure, and what is published."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypedDict

import numpy as np

from studies.jobs import Job, result
from studies.study import HERE, Planned, Study, plan
from tread.drawing.charts import Line, Panel, save_panels
from tread.evaluation.metric_table import METRICS, feature_metrics, names_of
from tread.runtime.files import explain_failure, write_whole


class Made(TypedDict):
    """An arm by a seed, as far as it has come: points over training, each with images, FLOPs and what was measured."""

    seed: int
    points: list[dict]
    scores: list[dict]


def finished(results: Path) -> dict[str, dict]:
    """What is known of trainings, by key: published results, and those below a folder of results."""
    known: dict[str, dict] = {}
    published = (json.loads(path.read_text())["runs"] for path in sorted(HERE.glob("*/results.json")))
    here = (json.loads(path.read_text()) for path in sorted(results.glob("*/*/*/result.json")))
    for record in (*(run for runs in published for run in runs.values()), *here):
        before = known.get(record["key"], {"scores": {}, "trained": False})
        newer = before if before["trained"] and not record["trained"] else record
        known[record["key"]] = newer | {"scores": before["scores"] | record["scores"]}
    return known


def is_made(run: Planned, made: Mapping[str, dict]) -> bool:
    """Whether it is trained, and scored in all ways that are wanted."""
    record = made.get(run.training.key)
    return record is not None and record["trained"] and all(score.key in record["scores"] for score in run.scores)


def gather(runs: Sequence[Planned], jobs: Sequence[Job], made: Mapping[str, dict]) -> dict[str, list[Made]]:
    """Results by arm: its whole runs, or, while there is none, the one that has come furthest."""
    whole: dict[str, list[Made]] = {run.arm: [] for run in runs}
    begun: dict[str, list[Made]] = {run.arm: [] for run in runs}
    under_way = {job.training.key: job for job in jobs}
    for run in runs:
        key = run.training.key
        record = made.get(key)
        if (record is None or not record["trained"]) and key in under_way:
            record = result(under_way[key]) or record
        if record is not None:
            (whole if is_made(run, made) else begun)[run.arm].append(_made(run, record))
    return {
        arm: complete or sorted(begun[arm], key=lambda run: -run["points"][-1]["images"] if run["points"] else 0)[:1]
        for arm, complete in whole.items()
    }


def _made(run: Planned, record: dict) -> Made:
    points = {point["step"]: dict(point) for point in record["points"]}
    scores = [record["scores"][score.key] for score in run.scores if score.key in record["scores"]]
    batch = run.training.cfg.train.batch_size
    counted = [(0, 0), *((step, point["flops"]) for step, point in sorted(points.items()) if "flops" in point)]
    for score in scores:
        step, values = score["step"], {name: score[name] for name in METRICS if score.get(name) is not None}
        flops = {"flops": round(float(np.interp(step, *zip(*counted))))} if counted[1:] else {}
        points[step] = {"step": step, "images": step * batch, **flops, **points.get(step, {}), **values}
    return Made(seed=record["seed"], points=[points[step] for step in sorted(points)], scores=scores)


def reports(runs: Sequence[Planned], place: Path) -> str:
    """Links from a study's folder to the pages that train.py wrote on its runs, wherever they were made."""
    links = []
    for run in runs:
        for page in place.parent.parent.glob(f"*/{place.name}/*-{run.training.key}/train/report.html"):
            links.append(f"[{run.arm}, seed {run.training.seed}]({os.path.relpath(page, place)})")
    return f"\nReports: {', '.join(dict.fromkeys(links))}\n" if links else ""


def missing(runs: Sequence[Planned], made: Mapping[str, dict]) -> str:
    """What is not made yet, in words; "" if nothing."""
    seeds: dict[str, list[str]] = {}
    for run in runs:
        if not is_made(run, made):
            only = " (scores alone)" if made.get(run.training.key, {}).get("trained") else ""
            seeds.setdefault(run.arm, []).append(f"{run.training.seed}{only}")
    return "; ".join(f"{arm} (seed {', '.join(each)})" for arm, each in seeds.items())


def series(runs: Sequence[Made], metric: str) -> list[tuple[dict, list[float]]]:
    """The points that all runs have with a metric: (the first run's point, the values)."""
    each = [{point["images"]: point for point in run["points"] if metric in point} for run in runs]
    shared = [images for images in (each[0] if each else ()) if all(images in points for points in each)]
    return [(each[0][images], [points[images][metric] for points in each]) for images in shared]


def last_values(results: Mapping[str, Sequence[Made]], metric: str) -> dict[str, list[float]]:
    """By arm: the values at the last point at which all its runs have a metric; arms without one are left out."""
    return {arm: points[-1][1] for arm, runs in results.items() if (points := series(runs, metric))}


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean; None of a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def at_equal_images(run: Made, other: Made, metric: str) -> float | None:
    """How much more one run's metric is than another's, at the last number of images that both have it of."""
    values = [{point["images"]: point[metric] for point in made["points"] if metric in point} for made in (run, other)]
    shared = values[0].keys() & values[1].keys()
    return values[0][max(shared)] - values[1][max(shared)] if shared else None


def at_equal_flops(run: Made, other: Made, metric: str) -> float | None:
    """… at the last training FLOPs that both reach; between points, a line is drawn over the logarithm of FLOPs."""
    curves = [
        [(math.log(point["flops"]), point[metric]) for point in points if metric in point and point.get("flops")]
        for points in (run["points"], other["points"])
    ]
    if min(map(len, curves)) < 2:
        return None
    place = min(curve[-1][0] for curve in curves)
    if place < max(curve[0][0] for curve in curves):
        return None
    here, there = (float(np.interp(place, *zip(*curve))) for curve in curves)
    return here - there


def differences(
    study: Study, results: Mapping[str, list[Made]], arm: str, metric: str, by=at_equal_images
) -> list[float]:
    """An arm's metric less that of the arm it is compared with, seed by seed: same data order, same noise."""
    others = {run["seed"]: run for run in results[study.against[arm]]} if arm in study.against else {}
    pairs = [(run, others[run["seed"]]) for run in results[arm] if run["seed"] in others]
    return [less for run, other in pairs if (less := by(run, other, metric)) is not None]


def table(study: Study, results: Mapping[str, list[Made]]) -> str:
    """Markdown: a line an arm; means ± standard errors over the seeds, and paired differences."""
    metrics = dict.fromkeys((*study.figure.metrics, *(name for name, metric in METRICS.items() if metric.compared)))
    metrics = [metric for metric in metrics if any(series(runs, metric) for runs in results.values())]
    compared = [metric for metric in metrics if METRICS[metric].compared][:1] if study.against else []
    head = ["arm", "seeds", "images", "training FLOPs", *(METRICS[metric].title for metric in metrics)]
    titles = [METRICS[metric].title for metric in compared]
    head += [f"{title} against its pair, at equal {what}" for title in titles for what in ("images", "FLOPs")]
    more = getattr(own_module(study), "columns", None) if study.figure.kind == "own" else None
    extra = more(study, results) if more else {}
    head += extra
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    taught = [arm for arm in results if "alignment.encoder=inception" in study.arms[arm].overrides]
    marks = {(arm, metric): " †" for arm in taught for metric in feature_metrics() if series(results[arm], metric)}
    for arm, runs in results.items():
        ends = [run["points"][-1] for run in runs if run["points"]]
        if not ends:
            lines.append(f"| {arm} | 0 |" + " – |" * (len(head) - 2))
            continue
        images = min(point["images"] for point in ends)
        flops = next((f"{point['flops']:.3g}" for point in ends if "flops" in point), "–")
        cells = [arm, str(len(runs)), f"{images:,}", flops]
        cells += [_cell(series(runs, metric), metric) + marks.get((arm, metric), "") for metric in metrics]
        for metric in compared:
            for by in (at_equal_images, at_equal_flops):
                cells.append(shown(differences(study, results, arm, metric, by), sign=True))
        cells += [column.get(arm, "–") for column in extra.values()]
        lines.append(f"| {' | '.join(cells)} |")
    scores = [score for runs in results.values() for run in runs for score in run["scores"]]
    counts = [f"{count:,}" for count in sorted({score["count"] for score in scores if "count" in score})]
    notes = ["± one standard error over the seeds; – is not measured."]
    if counts:
        scored = "KID and FID" if {*metrics} & {*feature_metrics()} else "Scores"
        notes.append(f"{scored} are of {' or '.join(counts)} samples.")
    if marks:
        notes.append("† The Inception network of KID and FID was the teacher of these, too: see the evaluation loss.")
    return "\n".join([*lines, "", " ".join(notes)]) + "\n"


def _cell(points: Sequence[tuple[dict, list[float]]], metric: str) -> str:
    """The last values, and the best mean where it came earlier."""
    if not points:
        return "–"
    means = [statistics.mean(values) for _, values in points]
    best = METRICS[metric].best(range(len(means)), key=means.__getitem__)
    said = shown(points[-1][1])
    if metric in names_of("heldout") and best < len(means) - 1:
        said += f" (best {means[best]:.5g} at {points[best][0]['images']:,})"
    return said


def shown(values: Sequence[float], sign: bool = False) -> str:
    """A mean, with its standard error where there are several."""
    if not values:
        return "–"
    mean, error = statistics.mean(values), standard_error(values)
    plus = "+" if sign else ""
    if error is None:
        return f"{mean:{plus}.5g}"
    places = max(0, 1 - math.floor(math.log10(error))) if error > 0 else 4
    return f"{mean:{plus}.{places}f} ± {error:.{places}f}"


def own_module(study: Study) -> ModuleType:
    """studies/<name>.py of a study with a figure of its own: `draw`, and maybe `columns` that its table has more."""
    spec = importlib.util.spec_from_file_location(f"study_{study.name}", HERE / f"{study.name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def draw(study: Study, results: Mapping[str, list[Made]], path: Path) -> None:
    """The figure: curves are means over the seeds, with bands of a standard error; ends are points. Raises OSError."""
    if study.figure.kind == "own":
        own_module(study).draw(study, results, path)
        return
    metrics = [metric for metric in study.figure.metrics if any(series(runs, metric) for runs in results.values())]
    curves = study.figure.kind == "curves"
    panels = [panel for metric in metrics for panel in (_curves if curves else _ends)(results, metric)]
    if panels:
        save_panels(path, panels, columns=2 if curves else len(panels))


def _curves(results: Mapping[str, list[Made]], metric: str) -> list[Panel]:
    """A metric against images and against FLOPs, a line an arm."""
    most = max(point.get("flops", 1) for runs in results.values() for run in runs for point in run["points"])
    power, panels = 3 * int(math.log10(most) // 3), []
    labels = {"images": ("images, thousands", 1e3), "flops": (f"training FLOPs, 10^{power}", 10**power)}
    for axis, (label, unit) in labels.items():
        lines = []
        for arm, runs in results.items():
            points = [(point[axis] / unit, values) for point, values in series(runs, metric) if axis in point]
            lines.append(mean_line(arm, points))
        panels.append(Panel("", label, METRICS[metric].label, lines))
    return panels


def _ends(results: Mapping[str, list[Made]], metric: str) -> list[Panel]:
    """A metric at the end of training, a point an arm and seed."""
    ends = last_values(results, metric)
    by_seed: dict[int, dict[int, float]] = {}
    for place, (arm, values) in enumerate(ends.items()):
        for run, value in zip(results[arm], values):
            by_seed.setdefault(run["seed"], {})[place] = value
    lines = [Line(f"seed {seed}", [*at], [*at.values()], None) for seed, at in sorted(by_seed.items())]
    return [Panel("", "", METRICS[metric].label, lines, names=tuple(ends))]


def mean_line(name: str, points: Sequence[tuple[float, Sequence[float]]]) -> Line:
    """Means over the seeds at (x, values), with their standard errors where there are several seeds."""
    errors = [standard_error(values) for _, values in points]
    means = [statistics.mean(values) for _, values in points]
    return Line(name, [x for x, _ in points], means, errors if errors and None not in errors else None)


def publish(study: Study, runs: Sequence[Planned], made: Mapping[str, dict], folder: Path) -> None:
    """results.json (a line a training), figure.png and table.md of what is trained of a study, beside its YAML.

    runs  those that were asked for now; the study's other seeds are kept, and what is missing of all is said.
    """
    whole = [*{(run.arm, run.training.seed): run for run in (*plan(study), *runs)}.values()]
    wanted = [run for run in whole if made.get(run.training.key, {}).get("trained")]
    scores = {run.training.key: set[str]() for run in wanted}
    for run in wanted:
        scores[run.training.key] |= {score.key for score in run.scores}
    kept = {
        key: made[key] | {"scores": {name: score for name, score in made[key]["scores"].items() if name in keys}}
        for key, keys in scores.items()
    }
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(run)}" for key, run in kept.items())
    head = json.dumps({"study": study.name, "scale": study.scale_name, "title": study.title})
    with explain_failure(folder):
        folder.mkdir(exist_ok=True)
        write_whole(folder / "results.json", head[:-1] + f',\n "runs": {{\n{lines}\n }}}}\n')
    left = missing(whole, made)
    write(study, gather(whole, [], made), folder, f"\nMissing: {left}.\n" if left else "")


def write(study: Study, results: Mapping[str, list[Made]], folder: Path, below: str = "") -> None:
    """table.md, with a text below it, and figure.png of what there is, if anything. Raises OSError."""
    with explain_failure(folder):
        write_whole(folder / "table.md", table(study, results) + below)
        if any(run["points"] for made in results.values() for run in made):
            draw(study, results, folder / "figure.png")
