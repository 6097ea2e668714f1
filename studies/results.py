"""What a study's runs came to: results found by their keys, the table, the figure, and what is published."""

from __future__ import annotations

import importlib
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypedDict

import numpy as np

from studies.study import HERE, Planned, Study, plan
from tread.drawing.charts import Line, Panel, save_panels
from tread.evaluation.metric_table import METRICS, feature_metrics, names_of
from tread.runtime.files import explain_failure, write_whole


class Made(TypedDict):
    """An arm with one seed, as far as it has come: points over training, each with images, FLOPs and metrics."""

    seed: int
    points: list[dict]
    scores: list[dict]


Results = Mapping[str, list[Made]]  # by arm


def finished(results: Path) -> dict[str, dict]:
    """Records of trainings by key: what is published, and what lies below a folder of results."""
    records = [
        run for path in sorted(HERE.glob("*/results.json")) for run in json.loads(path.read_text())["runs"].values()
    ]
    records += [json.loads(path.read_text()) for path in sorted(results.glob("*/*/*/result.json"))]
    known: dict[str, dict] = {}
    for record in records:
        before = known.get(record["key"], {"scores": {}, "trained": False})
        newer = before if before["trained"] and not record["trained"] else record
        known[record["key"]] = newer | {"scores": before["scores"] | record["scores"]}
    return known


def is_made(run: Planned, made: Mapping[str, dict]) -> bool:
    """Whether it is trained, and scored in all ways that are wanted."""
    record = made.get(run.training.key, {"trained": False})
    return record["trained"] and all(score.key in record["scores"] for score in run.scores)


def missing(runs: Sequence[Planned], made: Mapping[str, dict]) -> str:
    """The arms and seeds that are not made yet; "" if none."""
    left: dict[str, list[str]] = {}
    for run in runs:
        if not is_made(run, made):
            left.setdefault(run.arm, []).append(str(run.training.seed))
    return "; ".join(f"{arm} (seed {', '.join(seeds)})" for arm, seeds in left.items())


def gather(runs: Sequence[Planned], made: Mapping[str, dict]) -> dict[str, list[Made]]:
    """Results by arm: its complete runs or, while there is none, the one that has come furthest."""
    results: dict[str, list[Made]] = {run.arm: [] for run in runs}
    for arm, each in results.items():
        begun = [run for run in runs if run.arm == arm and run.training.key in made]
        complete = [run for run in begun if is_made(run, made)]
        furthest = sorted(begun, key=lambda run: len(made[run.training.key]["points"]))[-1:]
        each += [_made(run, made[run.training.key]) for run in complete or furthest]
    return results


def _made(run: Planned, record: dict) -> Made:
    points = {point["step"]: dict(point) for point in record["points"]}
    scores = [record["scores"][score.key] for score in run.scores if score.key in record["scores"]]
    counted = [(0, 0), *((step, point["flops"]) for step, point in sorted(points.items()) if "flops" in point)]
    for score in scores:
        step, values = score["step"], {name: score[name] for name in METRICS if score.get(name) is not None}
        flops = {"flops": round(float(np.interp(step, *zip(*counted))))} if counted[1:] else {}
        images = {"step": step, "images": step * run.training.batch_size}
        points[step] = images | flops | points.get(step, {}) | values
    return Made(seed=record["seed"], points=[points[step] for step in sorted(points)], scores=scores)


def curve(run: Made, metric: str, axis: str) -> dict[float, float]:
    """A metric over images or FLOPs."""
    return {point[axis]: point[metric] for point in run["points"] if metric in point and point.get(axis)}


def series(runs: Sequence[Made], metric: str) -> list[tuple[dict, list[float]]]:
    """The points that all runs have with a metric: (the first run's point, the values)."""
    curves = [curve(run, metric, "images") for run in runs]
    points = runs[0]["points"] if runs else []
    shared = [point for point in points if all(point["images"] in each for each in curves)]
    return [(point, [each[point["images"]] for each in curves]) for point in shared]


def last_values(results: Results, metric: str) -> dict[str, list[float]]:
    """By arm: the values at the last point at which all its runs have a metric; arms without one are left out."""
    return {arm: points[-1][1] for arm, runs in results.items() if (points := series(runs, metric))}


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean; None for a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def at_equal_images(run: Made, other: Made, metric: str) -> float | None:
    """How much larger one run's metric is than another's, at the last number of images at which both have it."""
    both = series([run, other], metric)
    return both[-1][1][0] - both[-1][1][1] if both else None


def at_equal_flops(run: Made, other: Made, metric: str) -> float | None:
    """… at the last training FLOPs that both reach."""
    curves = [curve(made, metric, "flops") for made in (run, other)]
    place = min(max(each, default=0) for each in curves)
    here, there = (at_flops(each, place) for each in curves)
    return None if None in (here, there) else here - there


def at_flops(values: Mapping[float, float], place: float) -> float | None:
    """A metric after so many FLOPs, on a straight line over their logarithm; None outside of the curve."""
    within = len(values) > 1 and min(values) <= place <= max(values)
    return float(np.interp(math.log(place), [*map(math.log, values)], [*values.values()])) if within else None


def differences(study: Study, results: Results, arm: str, metric: str, by: Callable = at_equal_images) -> list[float]:
    """An arm's metric less that of the arm it is compared with, seed by seed: same data order, same noise."""
    others = {run["seed"]: run for run in results.get(study.against.get(arm), ())}
    pairs = [(run, others[run["seed"]]) for run in results[arm] if run["seed"] in others]
    return [less for run, other in pairs if (less := by(run, other, metric)) is not None]


def measured(names: Sequence[str], results: Results) -> list[str]:
    """Those of the metrics that some arm has, each once."""
    return [name for name in dict.fromkeys(names) if any(series(runs, name) for runs in results.values())]


def table(study: Study, results: Results) -> str:
    """Markdown, a line per arm: means ± standard errors over the seeds, and paired differences."""
    results = {arm: [run for run in runs if run["points"]] for arm, runs in results.items()}
    ends = {arm: [run["points"][-1] for run in runs] for arm, runs in results.items()}
    compared = [name for name, metric in METRICS.items() if metric.compared]
    metrics = measured((*study.figure.metrics, *compared), results)
    taught = {arm for arm in results if "alignment.encoder=inception" in study.arms[arm].overrides}
    columns = {
        "arm": {arm: arm for arm in results},
        "seeds": {arm: f"{len(runs)}" for arm, runs in results.items()},
        "images": {arm: f"{min(point['images'] for point in each):,}" for arm, each in ends.items() if each},
        "training FLOPs": {arm: f"{p['flops']:.3g}" for arm, each in ends.items() for p in each[::-1] if "flops" in p},
    }
    for metric in metrics:
        marked = taught if metric in feature_metrics() else ()
        last = last_values(results, metric).items()
        columns[METRICS[metric].title] = {arm: shown(each) + " †" * (arm in marked) for arm, each in last}
    for metric in [metric for metric in metrics if metric in compared][:1] if study.against else []:
        for what, by in (("images", at_equal_images), ("FLOPs", at_equal_flops)):
            cells = {arm: shown(differences(study, results, arm, metric, by), sign=True) for arm in results}
            columns[f"{METRICS[metric].title} against its pair, at equal {what}"] = cells
    if study.figure.kind == "own":
        columns |= getattr(own_module(study), "columns", lambda *_: {})(study, results)
    rows = [[*columns], *([cells.get(arm, "–") for cells in columns.values()] for arm in results)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---" * len(columns) + "|")

    scores = [score for runs in results.values() for run in runs for score in run["scores"]]
    counts = {score["count"] for score in scores if "count" in score}
    notes = ["± one standard error over the seeds; – is not measured."]
    if counts:
        scored = "KID and FID" if {*metrics} & {*feature_metrics()} else "Scores"
        notes.append(f"{scored} are of {' or '.join(f'{count:,}' for count in sorted(counts))} samples.")
    if any("†" in line for line in lines):
        notes.append("† The Inception network of KID and FID was the teacher of these, too: see the evaluation loss.")
    return "\n".join([*lines, "", " ".join(notes)]) + "\n"


def shown(values: Sequence[float], sign: bool = False) -> str:
    """A mean, with its standard error where there are several values."""
    if not values:
        return "–"
    mean, error, plus = statistics.mean(values), standard_error(values), "+" if sign else ""
    if error is None:
        return f"{mean:{plus}.5g}"
    places = max(0, 1 - math.floor(math.log10(error))) if error > 0 else 4
    return f"{mean:{plus}.{places}f} ± {error:.{places}f}"


def own_module(study: Study) -> ModuleType:
    """studies/<name>.py of a study with a figure of its own: `draw`, and maybe further `columns` of its table."""
    return importlib.import_module(f"studies.{study.name}")


def draw(study: Study, results: Results, path: Path) -> None:
    """The figure: curves are means over the seeds, with bands of a standard error; ends are points. Raises OSError."""
    if study.figure.kind == "own":
        own_module(study).draw(study, results, path)
    elif metrics := measured(study.figure.metrics, results):
        curves = study.figure.kind == "curves"
        panels = [panel for metric in metrics for panel in (_curves if curves else _ends)(results, metric)]
        save_panels(path, panels, columns=2 if curves else len(panels))


def _curves(results: Results, metric: str) -> list[Panel]:
    """A metric against images and against FLOPs, a line per arm."""
    most = max(point.get("flops", 1) for runs in results.values() for run in runs for point in run["points"])
    power, panels = 3 * int(math.log10(most) // 3), []
    for axis, label, unit in (
        ("images", "images, thousands", 1e3),
        ("flops", f"training FLOPs, 10^{power}", 10**power),
    ):
        lines = []
        for arm, runs in results.items():
            points = [(point[axis] / unit, values) for point, values in series(runs, metric) if axis in point]
            lines.append(mean_line(arm, points))
        panels.append(Panel("", label, METRICS[metric].label, lines))
    return panels


def _ends(results: Results, metric: str) -> list[Panel]:
    """A metric at the end of training, a point per arm and seed."""
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
    """results.json (a line per training), figure.png and table.md of what is trained, beside the study's YAML.

    runs  those that were asked for now; the study's other seeds are kept, and the table says what is missing of all.
    """
    whole = [*{(run.arm, run.training.seed): run for run in (*plan(study), *runs)}.values()]
    kept: dict[str, dict] = {}
    for run in whole:
        key, record = run.training.key, made.get(run.training.key, {"trained": False})
        if record["trained"]:
            scores = {score.key: record["scores"][score.key] for score in run.scores if score.key in record["scores"]}
            kept[key] = record | {"scores": kept.get(key, {"scores": {}})["scores"] | scores}
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(run)}" for key, run in kept.items())
    head = json.dumps({"study": study.name, "scale": study.scale, "title": study.title})
    with explain_failure(folder):
        folder.mkdir(exist_ok=True)
        write_whole(folder / "results.json", head[:-1] + f',\n "runs": {{\n{lines}\n }}}}\n')
    left = missing(whole, made)
    write(study, gather(whole, made), folder, f"\nMissing: {left}.\n" if left else "")


def write(study: Study, results: Results, folder: Path, below: str = "") -> None:
    """table.md, with a text below it, and figure.png of what there is, if anything. Raises OSError."""
    with explain_failure(folder):
        write_whole(folder / "table.md", table(study, results) + below)
        if any(run["points"] for runs in results.values() for run in runs):
            draw(study, results, folder / "figure.png")
