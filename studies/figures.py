"""Draws a study's figure, writes its table, and publishes both in a folder beside the study's YAML.

An arm is a kind of run that a study compares with others; it has one run per seed.
"""

import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from studies.results import Made, Results, gather, missing
from studies.study import Planned, Study, plan
from tread.drawing.charts import Line, Panel, save_heat_maps, save_panels
from tread.evaluation.metric_table import METRICS, feature_metrics
from tread.runtime.files import explain_failure, write_whole

Columns = dict[str, dict[str, str]]  # title → arm → cell


class Figure(NamedTuple):
    """A kind of figure: `draw` draws it into the image file at a path, `columns` returns more columns of the table."""

    draw: Callable[[Study, Results, Path], None]
    columns: Callable[[Study, Results], Columns] = lambda study, results: {}


def curve(run: Made, metric: str, axis: str) -> dict[float, float]:
    """Return {x: value} of a run's metric, where x is the "images", "flops" or "steady_seconds" of its points."""
    return {point[axis]: point[metric] for point in run["points"] if metric in point and point.get(axis)}


def series(runs: Sequence[Made], metric: str) -> list[tuple[dict, list[float]]]:
    """Return (point, [each run's value of the metric]) for each number of images where every run has the metric. The
    point is the first run's: its images, FLOPs and metrics."""
    curves = [curve(run, metric, "images") for run in runs]
    points = runs[0]["points"] if runs else []
    shared = [point for point in points if all(point["images"] in each for each in curves)]
    return [(point, [each[point["images"]] for each in curves]) for point in shared]


def last_values(results: Results, metric: str) -> dict[str, list[float]]:
    """Return {arm of the study: its runs' values of a metric at the last number of images where all have it}."""
    return {arm: points[-1][1] for arm, runs in results.items() if (points := series(runs, metric))}


def last_means(results: Results, metric: str) -> dict[str, float]:
    """Return {arm of the study: mean of the values that last_values returns}."""
    return {arm: statistics.mean(values) for arm, values in last_values(results, metric).items()}


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean; None for a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def interpolate(values: Mapping[float, float], place: float) -> float | None:
    """Interpolate a curve {FLOPs or seconds: metric} at `place`, linearly in log FLOPs or seconds; None outside it."""
    within = len(values) > 1 and min(values) <= place <= max(values)
    return float(np.interp(math.log(place), [*map(math.log, values)], [*values.values()])) if within else None


def at_equal_images(run: Made, other: Made, metric: str) -> float | None:
    """Return one run's metric minus another's, at the last number of images where both have it; None without one."""
    both = series([run, other], metric)
    return both[-1][1][0] - both[-1][1][1] if both else None


def at_equal(run: Made, other: Made, metric: str, axis: str) -> float | None:
    """Return one run's metric minus another's at the most "flops" or "steady_seconds" (`axis`) that both reach; None if
    one has no value, or if seconds are of different devices. If seconds differ by under 1%, ends are compared."""
    if axis == "steady_seconds" and (run["timed_on"] is None or run["timed_on"] != other["timed_on"]):
        return None
    curves = [curve(made, metric, axis) for made in (run, other)]
    ends = [max(each, default=0) for each in curves]
    if axis == "steady_seconds" and 0 < max(ends) < 1.01 * min(ends):
        return curves[0][ends[0]] - curves[1][ends[1]]
    place = min(ends)
    here, there = (interpolate(each, place) for each in curves)
    return None if None in (here, there) else here - there


def differences(runs: Sequence[Made], others: Sequence[Made], by: Callable, *names: str) -> list[float]:
    """Return by(run, other, *names) for each pair of runs with equal seeds, without pairs for which it is None."""
    by_seed = {run["seed"]: run for run in others}
    found = [by(run, by_seed[run["seed"]], *names) for run in runs if run["seed"] in by_seed]
    return [less for less in found if less is not None]


def shown(values: Sequence[float], sign: bool = False) -> str:
    """Format the mean of values and, if there are several, its standard error; sign=True adds a + to positive means."""
    if not values:
        return "–"
    mean, error, plus = statistics.mean(values), standard_error(values), "+" if sign else ""
    if error is None:
        return f"{mean:{plus}.5g}"
    places = max(0, 1 - math.floor(math.log10(error))) if error > 0 else 4
    return f"{mean:{plus}.{places}f} ± {error:.{places}f}"


def measured(names: Sequence[str], results: Results) -> list[str]:
    """Return the metrics in `names` that any run has, each once."""
    return [name for name in dict.fromkeys(names) if any(series(runs, name) for runs in results.values())]


def table(study: Study, results: Results) -> str:
    """Return a Markdown table, a line per arm of the study: means ± standard errors over seeds, paired differences. A
    study with further ways of scoring has a table per metric, in which losses are of its trainings alone."""
    results = {arm: [run for run in runs if run["points"]] for arm, runs in results.items()}
    ends = {arm: [run["points"][-1] for run in runs] for arm, runs in results.items()}
    compared = [name for name, metric in METRICS.items() if metric.compared]
    metrics = measured((*study.metrics, *compared), results)
    taught = {arm for arm in results if "alignment.encoder=inception" in study.arms[arm].overrides}
    columns = {
        "arm": {arm: arm for arm in results},
        "seeds": {arm: f"{len(runs)}" for arm, runs in results.items()},
        "images": {arm: f"{min(point['images'] for point in each):,}" for arm, each in ends.items() if each},
        "training FLOPs": {arm: f"{p['flops']:.3g}" for arm, each in ends.items() for p in each[::-1] if "flops" in p},
    }
    cells = {}
    for metric in metrics:
        marked = taught if metric in feature_metrics() else ()
        last = last_values(results, metric).items()
        cells[metric] = {METRICS[metric].title: {arm: shown(each) + " †" * (arm in marked) for arm, each in last}}
    last = {arm: run["scores"][-1] for arm, runs in results.items() for run in runs if run["scores"]}
    counted = {"samples": {arm: f"{score['count']:,}" for arm, score in last.items() if "count" in score}}
    lines = []
    for metric in metrics if study.ways else ():
        paired = paired_columns(study, results, [metric], tuple(EQUAL))
        arms, more = (networks_of(study, results), {}) if METRICS[metric].of == "heldout" else (results, counted)
        lines += _lines(columns | more | cells[metric] | paired, arms)
    if not lines:
        first = [metric for metric in metrics if metric in compared][:1] if study.against else []
        columns |= {title: column for each in cells.values() for title, column in each.items()}
        columns |= paired_columns(study, results, first, ("images", "FLOPs"))
        lines = _lines(columns | FIGURES[study.figure].columns(study, results), results)

    scores = [score for runs in results.values() for run in runs for score in run["scores"]]
    counts = {score["count"] for score in scores if "count" in score}
    notes = ["± one standard error over the seeds; – is not measured."]
    if counts:
        scored = "KID and FID" if {*metrics} & {*feature_metrics()} else "Scores"
        notes.append(f"{scored} are of {' or '.join(f'{count:,}' for count in sorted(counts))} samples.")
    if any("†" in line for line in lines):
        notes.append("† The Inception network of KID and FID was the teacher of these, too: see the evaluation loss.")
    return "\n".join([*lines, " ".join(notes)]) + "\n"


def _lines(columns: Columns, arms: Iterable[str]) -> list[str]:
    rows = [[*columns], *([cells.get(arm, "–") for cells in columns.values()] for arm in arms)]
    head, *lines = [f"| {' | '.join(row)} |" for row in rows]
    return [head, "|---" * len(columns) + "|", *lines, ""]


def networks_of(study: Study, results: Results) -> Results:
    """Return the results without those of further ways of scoring."""
    return {arm: runs for arm, runs in results.items() if arm.rpartition(", ")[2] not in study.ways}


EQUAL = {  # what two runs have spent equally much of → function for their difference there, and its axis
    "images": (at_equal_images,),
    "FLOPs": (at_equal, "flops"),
    "seconds": (at_equal, "steady_seconds"),
}


def paired_columns(study: Study, results: Results, metrics: Sequence[str], equal: Sequence[str]) -> Columns:
    """Return a column per metric and name in `equal` (keys of EQUAL): each arm's metric minus that of its pair, the arm
    named in study.against."""
    columns = {}
    for metric, name in product(metrics, equal):
        by, *axis = EQUAL[name]
        pairs = {arm: (runs, results.get(study.against.get(arm), ())) for arm, runs in results.items()}
        cells = {arm: shown(differences(*pair, by, metric, *axis), sign=True) for arm, pair in pairs.items()}
        columns[f"{METRICS[metric].title} against its pair, at equal {name}"] = cells
    return columns


def mean_line(name: str, points: Sequence[tuple[float, Sequence[float]]]) -> Line:
    """Return a line through `points` (x, one value per seed): means, and standard errors if there are several seeds."""
    errors = [standard_error(values) for _, values in points]
    means = [statistics.mean(values) for _, values in points]
    return Line(name, [x for x, _ in points], means, errors if errors and None not in errors else None)


def _save(path: Path, panels: Sequence[Panel], columns: int = 2) -> None:
    if panels:
        save_panels(path, panels, columns)


def over_training(results: Results, metric: str, axes: Sequence[str]) -> list[Panel]:
    """Return a panel per axis, "images", "flops" or "steady_seconds": means over the seeds, with bands of ± one
    standard error."""
    most = max(point.get("flops", 1) for runs in results.values() for run in runs for point in run["points"])
    power, panels = 3 * int(math.log10(most) // 3), []
    units = {
        "images": ("images, thousands", 1e3),
        "flops": (f"training FLOPs, 10^{power}", 10**power),
        "steady_seconds": ("seconds of training, the first step left out", 1),
    }
    for label, unit, axis in ((*units[axis], axis) for axis in axes):
        lines = []
        for arm, runs in results.items():
            points = [(point[axis] / unit, values) for point, values in series(runs, metric) if axis in point]
            lines.append(mean_line(arm, points))
        panels.append(Panel("", label, METRICS[metric].label, lines))
    return panels


def draw_curves(study: Study, results: Results, path: Path) -> None:
    """Draw each metric against images and FLOPs."""
    metrics = measured(study.metrics, results)
    _save(path, [panel for metric in metrics for panel in over_training(results, metric, ("images", "flops"))])


def draw_balance(study: Study, results: Results, path: Path) -> None:
    """Draw the first metric over the training of each network. Then draw the final FID against precision, and precision
    against recall, for scores of equally many samples; a line joins scores that differ in guidance scale only."""
    networks = networks_of(study, results)
    devices = {run["timed_on"] for runs in networks.values() for run in runs}
    timed = ("steady_seconds",) if len(devices) == 1 and None not in devices else ()
    panels = []
    for metric in measured(study.metrics[:1], networks):
        panels += over_training(networks, metric, ("images", "flops", *timed))
    for across, up in (("precision", "fid"), ("recall", "precision")):
        lines, ends = defaultdict(list), [last_means(results, metric) for metric in (across, up)]
        for arm in (arm for arm in results if all(arm in values for values in ends)):
            network = arm if arm in networks else arm.rpartition(", ")[0]
            if study.arms[arm].samples == study.arms[network].samples:
                lines[re.sub(r"(, )cfg [\d.]+ ?", r"\1", arm).removesuffix(", ")].append(
                    [values[arm] for values in ends]
                )
        drawn = [Line(name, *zip(*points), dashed=name not in networks) for name, points in lines.items()]
        panels += [Panel("", METRICS[across].label, METRICS[up].label, drawn)] if drawn else []
    _save(path, panels)


def draw_ends(study: Study, results: Results, path: Path) -> None:
    """Draw each metric at the end of training, with a point per run: arms of the study along x, a colour per seed."""
    panels = []
    for metric in measured(study.metrics, results):
        ends, points = last_values(results, metric), defaultdict(list)
        for place, arm in enumerate(ends):
            for run, value in zip(results[arm], ends[arm]):
                points[run["seed"]].append((place, value))
        lines = [Line(f"seed {seed}", *zip(*points[seed])) for seed in sorted(points)]
        panels.append(Panel("", "", METRICS[metric].label, lines, names=tuple(ends)))
    _save(path, panels, columns=len(panels))


def sampling_flops(results: Results) -> dict[str, float]:
    """Return {arm of the study: FLOPs to draw one sample}."""
    return {arm: runs[0]["scores"][-1]["flops"] for arm, runs in results.items() if runs and runs[0]["scores"]}


def guidance_columns(study: Study, results: Results) -> Columns:
    return {"FLOPs a sample": {arm: f"{flops:.3g}" for arm, flops in sampling_flops(results).items()}}


def draw_guidance(study: Study, results: Results, path: Path) -> None:
    """Draw each metric against the guidance scale, with a line per network and kind of guidance, and against the FLOPs
    of sampling, with a point per arm of the study."""
    flops, panels = sampling_flops(results), []
    for metric in study.metrics:
        ends = last_values({arm: results[arm] for arm in flops}, metric)
        over_scale, over_flops = {}, defaultdict(list)
        for arm, values in ends.items():
            network, guidance = arm.partition(", ")[::2]
            kind, scale = guidance.rpartition(" ")[::2]
            if re.fullmatch(r"[\d.]+", scale):
                unguided = [(1.0, ends[network])] if network in ends else []
                over_scale.setdefault(f"{network}, {kind}", unguided).append((float(scale), values))
            else:  # an arm with another number of sampling steps, without guidance
                kind = "no guidance"
            over_flops[f"{network}, {kind}"].append((flops[arm] / 1e9, values))
        labels = ("guidance scale ω (1: none)", "FLOPs of the networks a sample, 10^9")
        for label, lines in zip(labels, (over_scale, over_flops) if ends else ()):
            drawn = [mean_line(name, sorted(points)) for name, points in lines.items()]
            panels.append(Panel("", label, METRICS[metric].label, drawn))
    _save(path, panels)


LAST = 0.2  # final fraction of the training over which its loss is averaged
LOSS_GAP = "training loss above the dense one's"


def training_loss(run: Made) -> float | None:
    """Return the training loss averaged over the last fifth of the training's steps; None if there are no records."""
    losses = curve(run, "loss", "images")
    ends = [max(images, (1 - LAST) * max(losses)) for images in losses]
    weights = [end - before for before, end in zip([(1 - LAST) * max(losses, default=0), *ends], ends)]
    return statistics.fmean(losses.values(), weights) if losses else None


def training_gap(run: Made, other: Made) -> float | None:
    """Return one run's training loss minus another's; None if either is missing."""
    losses = training_loss(run), training_loss(other)
    return None if None in losses else losses[0] - losses[1]


def loss_gaps(results: Results) -> dict[str, list[float]]:
    """Return {routed arm: its training loss minus the dense arm's, one difference per seed}."""
    gaps = {arm: differences(runs, results["dense"], training_gap) for arm, runs in results.items() if arm != "dense"}
    return {arm: less for arm, less in gaps.items() if less}


def loss_gap_columns(study: Study, results: Results) -> Columns:
    return {LOSS_GAP: {arm: shown(less, sign=True) for arm, less in loss_gaps(results).items()}}


def draw_loss_gap(study: Study, results: Results, path: Path) -> None:
    """Draw how far each routed arm's training loss is above the dense arm's, against the number of blocks in its route;
    then each final metric but the study's first, against that gap."""
    mean_gaps = {arm: statistics.mean(less) for arm, less in loss_gaps(results).items()}
    if not mean_gaps:
        return
    places = [map(int, re.findall(r"\d+", arm)) for arm in mean_gaps]
    line = Line("routes", [end - start + 1 for start, end in places], [*mean_gaps.values()])
    panels = [Panel("", "blocks of the route", LOSS_GAP, [line])]
    for metric in study.metrics[1:]:
        means = last_means(results, metric)
        points = sorted((gap, means[arm]) for arm, gap in mean_gaps.items() if arm in means)
        if points and "dense" in means:
            levels, line = {"dense": means["dense"]}, Line("routes", *map(list, zip(*points)))
            panels.append(Panel("", LOSS_GAP, METRICS[metric].title, [line], levels=levels))
    _save(path, panels)


def draw_placement(study: Study, results: Results, path: Path) -> None:
    """Draw heat maps over a route's first and last block: each metric minus the dense arm's, and FLOPs divided by the
    dense arm's."""
    places = {arm: tuple(map(int, re.findall(r"\d+", arm))) for arm in results if arm != "dense"}
    starts, ends = (sorted(set(each)) for each in zip(*places.values()))
    maps = {}
    for metric in (*study.metrics, "flops"):
        means = last_means(results, metric)
        dense, cells = means.pop("dense", None), np.full((len(starts), len(ends)), np.nan)
        for arm, value in means.items() if dense else ():
            start, end = places[arm]
            cells[starts.index(start), ends.index(end)] = value / dense if metric == "flops" else value - dense
        if not np.isnan(cells).all():
            title = f"{METRICS[metric].title} less" if metric in METRICS else "training FLOPs over"
            maps[f"{title} the dense one's"] = cells
    if maps:
        (first, cells), *others = maps.items()
        labels = ("last block of the route", "first block of the route")
        save_heat_maps(path, {first: cells}, dict(others), ends, starts, labels)


SIMILARITIES = {"dense": "all tokens", "routed": "under its route"}  # key of similarity.json → title


def matrices(results: Results) -> dict[tuple[str, str], list[np.ndarray]]:
    """Return {(arm, "dense" or "routed"): matrices of similarity between block outputs, one per seed}: with all tokens
    ("dense"), or under the arm's route ("routed")."""
    found = defaultdict(list)
    for arm, runs in results.items():
        for panel, score in product(SIMILARITIES, chain(*(run["scores"] for run in runs))):
            if score.get(panel):
                found[arm, panel].append(np.array(score[panel], dtype=float))
    return found


def similarity_columns(study: Study, results: Results) -> Columns:
    """Return table columns: mean similarity of outputs of neighbouring blocks; that of embedding and last output."""
    cells = defaultdict(dict)
    for (arm, panel), each in sorted(matrices(results).items(), key=lambda item: item[0][1]):
        neighbours = [float(np.nanmean(np.diagonal(matrix, 1))) for matrix in each]
        cells[f"next block, {SIMILARITIES[panel]}"][arm] = shown(neighbours)
        cells[f"embedding to end, {SIMILARITIES[panel]}"][arm] = shown([matrix[0, -1] for matrix in each])
    return cells


def draw_similarity(study: Study, results: Results, path: Path) -> None:
    """Draw the similarity matrices, averaged over the seeds, side by side on one colour scale."""
    means = {key: np.mean(each, axis=0) for key, each in matrices(results).items()}
    if means:
        names = ["in", *range(len(next(iter(means.values()))) - 1)]
        panels = {f"{arm} network,\n{SIMILARITIES[panel]}": mean for (arm, panel), mean in means.items()}
        label = "behind block (in: the embedding)"
        save_heat_maps(path, panels, {}, names, names, (label, label))


def flops_gap(dense: Sequence[Made], routed: Sequence[Made], metric: str) -> list[tuple[int, list[float]]]:
    """Return (images, [routed minus dense metric at equal FLOPs, one per seed]) for each evaluation of the routed runs
    up to the FLOPs of the dense runs."""
    others = {run["seed"]: curve(run, metric, "flops") for run in dense}
    routed, gaps = [run for run in routed if run["seed"] in others], []
    for point, values in series(routed, metric):
        levels = [interpolate(others[run["seed"]], point.get("flops", 0)) for run in routed]
        if None not in levels:
            gaps.append((point["images"], [value - level for value, level in zip(values, levels)]))
    return gaps


def when_columns(study: Study, results: Results) -> Columns:
    """Return a table column: after how many images each routed arm stays ahead in evaluation loss at equal FLOPs."""
    leads = {}
    for routed, dense in study.against.items():
        points = flops_gap(results[dense], results[routed], "eval_loss")
        behind = [number for number, (_, values) in enumerate(points) if statistics.mean(values) >= 0]
        ahead = points[behind[-1] + 1 if behind else 0 :]
        if points:
            leads[routed] = f"{ahead[0][0]:,} images" if ahead else "not yet"
    return {"ahead at equal FLOPs from": leads}


def draw_when(study: Study, results: Results, path: Path) -> None:
    """Draw the metrics of routed runs minus those of dense runs at equal FLOPs: a panel per metric, a line per pair."""
    panels = []
    for metric in study.metrics:
        lines = []
        for routed, dense in study.against.items():
            gaps = flops_gap(results[dense], results[routed], metric)
            points = [(images / 1e3, values) for images, values in gaps]
            lines += [mean_line(routed.partition(",")[0], points)] if points else []
        if lines:
            title = f"{METRICS[metric].title}: routed less dense, by the same FLOPs"
            panels.append(Panel(title, "images the routed run has seen, thousands", "", lines, levels={"even": 0.0}))
    _save(path, panels, columns=len(panels))


FIGURES = {
    "balance": Figure(draw_balance),
    "curves": Figure(draw_curves),
    "ends": Figure(draw_ends),
    "guidance": Figure(draw_guidance, guidance_columns),
    "loss_gap": Figure(draw_loss_gap, loss_gap_columns),
    "placement": Figure(draw_placement),
    "similarity": Figure(draw_similarity, similarity_columns),
    "when": Figure(draw_when, when_columns),
}


def publish(study: Study, runs: Sequence[Planned], made: Mapping[str, dict], folder: Path) -> None:
    """Write results.json (a line per finished training), figure.png and table.md to `folder`, beside the study's YAML.
    They cover the runs in the study's file and `runs`; table.md names those that are missing. `made` is {a training's
    key: its record}, from `finished` in results.py."""
    whole = [*{(run.arm, run.training.seed): run for run in (*plan(study), *runs)}.values()]
    wanted, kept = {score.key for run in whole for score in run.scores}, {}
    for key, record in ((run.training.key, made.get(run.training.key)) for run in whole):
        if record and record["trained"]:
            scores = {name: score for name, score in record["scores"].items() if name in wanted}
            kept[key] = record | {"scores": scores}
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(record)}" for key, record in kept.items())
    head = json.dumps({"study": study.name, "scale": study.scale, "title": study.title})
    with explain_failure(folder):
        folder.mkdir(exist_ok=True)
        write_whole(folder / "results.json", head[:-1] + f',\n "runs": {{\n{lines}\n }}}}\n')
    write(study, whole, made, folder)


def write(study: Study, runs: Sequence[Planned], made: Mapping[str, dict], folder: Path) -> None:
    """Write table.md and, if there are results, figure.png for `runs`. `made` has their records, by Training.key."""
    results, left = gather(runs, made), missing(runs, made)
    with explain_failure(folder):
        write_whole(folder / "table.md", table(study, results) + (f"\nMissing: {left}.\n" if left else ""))
        if any(run["points"] for each in results.values() for run in each):
            FIGURES[study.figure].draw(study, results, folder / "figure.png")
