"""Draws a study's figure, writes its table, and publishes both in a folder beside the study's YAML.

An arm is a kind of run that a study compares with others; it has one run per seed."""

import json
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, cycle, product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from studies.paired import ENOUGH, EQUAL, along, curve, differences, estimate, last_difference, paired, series
from studies.results import Made, Results, finished, gather, is_made, missing
from studies.study import HERE, Planned, Study, plan, read_study, training_memory
from tread.drawing.charts import Line, Panel, save_heat_maps, save_panels
from tread.evaluation.metric_table import METRICS, feature_metrics
from tread.runtime.files import explain_failure, write_whole

Columns = dict[str, dict[str, str]]  # title → row (an arm, or the name of a pair) → cell
Dots = Sequence[tuple[float, Sequence[float]]]  # x, a value per seed


class Figure(NamedTuple):
    """How results are shown: `draw` draws them into an image file, `columns` adds {title: {arm: cell}} to table.md."""

    draw: Callable[[Study, Results, Path], None]
    columns: Callable[[Study, Results], Columns] = lambda study, results: {}


def last_values(results: Results, metric: str) -> dict[str, list[float]]:
    """Return {arm: [metric of each run that has it]}, read at each run's end. If one of these runs lacks it there, all
    are read at the largest number of training images where all have it."""
    found = {}
    for arm, runs in results.items():
        having = [run for run in runs if curve(run, metric, "images")]
        values = [run["points"][-1].get(metric) for run in having]
        if None in values and (shared := series(having, metric)):
            values = shared[-1][1]
        if values and None not in values:
            found[arm] = values
    return found


def last_means(results: Results, metric: str) -> dict[str, float]:
    return {arm: statistics.mean(values) for arm, values in last_values(results, metric).items()}


def measured(names: Sequence[str], results: Results) -> list[str]:
    """Return the metrics in `names` for which at least one run has values, each once."""
    return [name for name in dict.fromkeys(names) if last_values(results, name)]


def table(study: Study, results: Results) -> str:
    """Return the text of table.md: a table of means ± standard deviations over the seeds, with a row per arm; a table
    of differences between compared arms, paired by seed; the verdict of the study's decision rule, if it has one; and
    notes. If study.figure is "balance", there is a table per metric instead, with both means and differences."""
    ends = {arm: [run["points"][-1] for run in runs] for arm, runs in results.items()}
    compared = [*(name for name, metric in METRICS.items() if metric.compared), "precision", "recall"]
    metrics = measured((*study.metrics, *compared), results)
    of_inception = {"alignment.encoder=inception", "model.class_token=2048"}
    taught = {arm for arm in results if of_inception & {*study.arms[arm].overrides}}
    columns = {
        "arm": {arm: arm for arm in results},
        "seeds": {arm: f"{len(runs)}" for arm, runs in results.items()},
        "images": {arm: f"{min(point['images'] for point in each):,}" for arm, each in ends.items() if each},
        "training FLOPs": {arm: f"{p['flops']:.3g}" for arm, each in ends.items() for p in each[::-1] if "flops" in p},
        "seconds alone": seconds_alone(results),
    }
    cells: Columns = {}
    for metric in metrics:
        column = cells[METRICS[metric].title] = {}
        for arm, values in last_values(results, metric).items():
            seeds = f" ({len(values)})" * (len(values) < len(results[arm]))
            mark = " †" * (arm in taught and metric in feature_metrics())
            column[arm] = f"{estimate(values)}{seeds}{mark}"
    last = {arm: run["scores"][-1] for arm, runs in results.items() for run in runs if run["scores"]}
    counted = {"samples": {arm: f"{score['count']:,}" for arm, score in last.items() if "count" in score}}
    lines = []
    for metric in metrics if study.figure == "balance" else ():
        arms, more = (networks_of(study, results), {}) if METRICS[metric].of == "heldout" else (results, counted)
        column = cells[METRICS[metric].title]
        whole = columns | more | {METRICS[metric].title: column} | paired_columns(study, results, metric)
        lines += grid(whole, [arm for arm in arms if arm in column])
    if not (differing := lines):
        differing = pair_table(study, results, [name for name in metrics if name in compared])
        lines = grid(columns | cells | FIGURES[study.figure].columns(study, results), results) + differing
    lines += outcome(study, results)

    scores = chain(*(run["scores"] for runs in results.values() for run in runs))
    counts = {score["count"] for score in scores if "count" in score}
    notes = ["± is the standard deviation over the seeds; – is not measured."]
    fewer = re.search(r" \(\d+\)[ †]*\|", "".join(lines)) is not None
    notes += ["A number of seeds in brackets: as many have that score."] * fewer
    notes += ["Differences are paired by seed: mean (standard error) [95% interval, Student's t]."] * bool(differing)
    notes += ["No seconds: no run is on record as alone on its device."] * (not columns["seconds alone"])
    if counts:
        scored = "KID and FID" if {*metrics} & {*feature_metrics()} else "Scores"
        notes.append(f"{scored} are of {' or '.join(f'{count:,}' for count in sorted(counts))} samples.")
    if any("†" in line for line in lines):
        notes.append("† The Inception network of KID and FID was the teacher of these, too: see the evaluation loss.")
    return "\n".join([*lines, " ".join(notes)]) + "\n"


def networks_of(study: Study, results: Results) -> Results:
    """Return the results of the arms that train a network, without the arms that score another arm's network."""
    return {arm: runs for arm, runs in results.items() if arm.rpartition(", ")[2] not in study.ways}


def grid(columns: Columns, names: Iterable[str]) -> list[str]:
    """Return the lines of a Markdown table of {title: {row: cell}} with the rows `names`, then ""; [] without rows."""
    rows = [[*columns], *([cells.get(name, "–") for cells in columns.values()] for name in names)]
    head, *lines = [f"| {' | '.join(row)} |" for row in rows]
    return [head, "|---" * len(columns) + "|", *lines, ""] if lines else []


def seconds_alone(results: Results) -> dict[str, str]:
    """Return {arm: mean training seconds, less slow first steps} of arms whose runs each had a device to themselves."""
    cells = {}
    for arm, runs in results.items():
        alone = runs and all(run["timed_on"] is not None and run["timed_on"][1:] == (1,) for run in runs)
        last = [max(curve(run, "loss", "steady_seconds"), default=0) for run in runs]
        if alone and all(last):
            cells[arm] = f"{statistics.mean(last):,.0f}"
    return cells


def pair_table(study: Study, results: Results, metrics: Sequence[str]) -> list[str]:
    """Return the lines of a table of differences between compared arms, paired by seed. Columns are each metric at
    equal training images, FLOPs and seconds; rows are the pairs with runs to compare."""
    columns: Columns = defaultdict(dict)
    seeds = {pair_name(*pair): 0 for pair in study.pairs}  # the largest number of seeds in a pair's row
    for metric, equal, (arm, other) in product(metrics, EQUAL, study.pairs):
        if less := paired(results.get(arm, ()), results.get(other, ()), metric, equal):
            name = pair_name(arm, other)
            columns[f"{METRICS[metric].title}, equal {equal}"][name] = less.signed()
            seeds[name] = max(less.seeds, seeds[name])
    names = [name for name in seeds if seeds[name]]
    first = {"pair": {name: name for name in names}, "seeds": {name: f"{seeds[name]}" for name in names}}
    return grid(first | columns, names)


def outcome(study: Study, results: Results) -> list[str]:
    """Return lines that say whether the arm of study.rule beats its best rival after training; [] if there is no rule.
    The best rival has the best mean of the rule's first metric. To beat it, the arm must be better in each metric of
    the rule, with a 95% interval of the paired difference that excludes 0. If the arm or one of the rule's rivals has
    not run, there is no verdict unless such an interval puts the arm behind the best that ran in the first metric."""
    if not (rule := study.rule):
        return []
    results = {arm: [run for run in runs if run["trained"]] for arm, runs in results.items()}
    ends = last_means(results, rule["metrics"][0])
    absent = [arm for arm in (rule["arm"], *rule["rivals"]) if arm not in ends]
    ran = [arm for arm in rule["rivals"] if arm in ends]
    best = METRICS[rule["metrics"][0]].best(ran, key=ends.get, default=rule["rivals"][0])
    said, signs = [], []
    for metric in rule["metrics"]:
        less = estimate(differences(results.get(rule["arm"], ()), results.get(best, ()), last_difference, metric))
        said.append(f"{METRICS[metric].title} {less.signed() if less else 'not paired'}")
        better = -1 if METRICS[metric].better == "lower" else 1
        signs.append(better * less.sign if less and less.sign is not None else None)
    if absent and signs[0] != -1:
        return [f"The rule is not decided: {', '.join(absent)} not run.", ""]
    words = "beats it" if {*signs} == {1} else "does not beat it" if {0, -1} & {*signs} else None  # None: too few seeds
    verdict = f"{rule['arm']} {words}" if words else "too few seeds for a verdict"
    rival = f"the best rival of those that have run (not {', '.join(absent)})" if absent else "the best rival"
    return [f"By the rule, against {rival}, {best}: {'; '.join(said)}: {verdict}.", ""]


def paired_columns(study: Study, results: Results, metric: str) -> Columns:
    """Return three columns of the metric: at equal training images, at equal FLOPs and at equal seconds. A cell is an
    arm's metric minus that of the arm it is compared with, as Estimate.signed writes it."""
    columns: Columns = {}
    for equal in EQUAL:
        column = columns[f"{METRICS[metric].title} against its pair, at equal {equal}"] = {}
        for arm, other in study.against.items():
            if less := paired(results.get(arm, ()), results.get(other, ()), metric, equal):
                column[arm] = less.signed()
    return columns


COLOURS = {  # an arm's own overrides → its colour in every study
    "model=dit": "C0",
    "model=tread": "C1",
    "model.depth=8 model=dit": "C2",
    "model.routes.0.rejoin=stale model=tread": "C3",
    "model.routes.0.rejoin=2 model.routes.0.start=5 model=tread": "C4",
    "model.routes.0.start=5 model=tread": "C5",
}
OTHERS = ("C6", "C8", "C9", "C7", "#17415f", "#7f3f00", "#a1d99b", "#c5b0d5", "#f7b6d2", "#dbdb8d", "black")


def colours(study: Study) -> dict[str, str]:
    """Return {arm: colour}, listed in COLOURS by the arm's overrides, else the next one of OTHERS. Overrides that over
    half of the arms share, except model=…, are ignored; if arms become equal by that, only those of all are ignored.
    Arms that differ only in scoring, or in a setting whose value trial runs choose (Study.trials), share a colour."""
    tried = {word.partition("=")[0] for trials in study.trials.values() for word in trials}
    own = {n: frozenset(w for w in a.overrides if w.partition("=")[0] not in tried) for n, a in study.arms.items()}
    counts = Counter(chain(*own.values()))
    base = {word for word, count in counts.items() if 2 * count > len(own) and not word.startswith("model=")}
    if len({each - base for each in own.values()}) < len({*own.values()}):
        base = {word for word, count in counts.items() if count == len(own)}
    # without "_text": networks for captions have the colours of the same networks for classes
    words = {name: " ".join(sorted(each - base)).replace("_text", "") for name, each in own.items()}
    others = [each for each in dict.fromkeys(words.values()) if each not in COLOURS]
    known = COLOURS | {each: OTHERS[number % len(OTHERS)] for number, each in enumerate(others)}
    return {name: known[each] for name, each in words.items()}


def pair_name(arm: str, other: str) -> str:
    """Name two arms' difference: "a − b", or "depth 8: routed − dense" for "depth 8, routed" and "depth 8, dense"."""
    (first, _, rest), (second, _, others) = arm.partition(", "), other.partition(", ")
    return f"{first}: {rest} − {others}" if first == second and rest and others else f"{arm} − {other}"


def mean_line(name: str, points: Dots, colour: str, dashed: bool = False, interval: bool = False) -> Line:
    """Return a line through the means of `points` (x, one value per seed), with a band of ± one standard deviation if
    every point has 2 seeds or more; with `interval`, a band of the 95% interval if every point has 3 or more."""
    each = [estimate(values) for _, values in points]
    widths = [point.spread if not interval else None if point.sign is None else point.half for point in each]
    known = widths if widths and None not in widths else None
    return Line(name, [x for x, _ in points], [point.mean for point in each], known, dashed, colour)


def _save(study: Study, path: Path, panels: Sequence[Panel], columns: int = 2, key: str = "") -> None:
    """Draw panels into the image `path`, under the title study.seen and a line, `key`, that explains what is drawn."""
    if panels:
        save_panels(path, panels, columns, "\n".join(filter(None, [study.seen, key])), 4.6 if columns < 3 else 3.7)


def over_training(study: Study, results: Results, metric: str, axes: Sequence[str]) -> list[Panel]:
    """Return a panel per axis ("images", "flops" or "steady_seconds" of training, as in jobs.py) with each arm's mean
    of the metric over seeds, ± one standard deviation."""
    most = max(point.get("flops", 1) for runs in results.values() for run in runs for point in run["points"])
    power, panels, colour = 3 * int(math.log10(most) // 3), [], colours(study)
    units = {
        "images": ("images, thousands", 1e3),
        "flops": (f"training FLOPs, 10^{power}", 10**power),
        "steady_seconds": ("seconds of training, the first step left out", 1),
    }
    for axis in axes:
        (label, unit), lines = units[axis], []
        for arm, runs in results.items():
            points = [(point[axis] / unit, values) for point, values in series(runs, metric) if axis in point]
            lines += [mean_line(arm, points, colour[arm])] if points else []
        panels.append(Panel("", label, METRICS[metric].label, lines))
    return panels


def less_panels(study: Study, results: Results, metric: str) -> list[Panel]:
    """Return panels of `metric` over training, as differences of compared arms: at equal images, at equal FLOPs."""
    colour, panels = colours(study), []
    for name in ("images", "FLOPs"):
        lines = []
        for place, (arm, other) in enumerate(study.pairs):
            besides = place >= len(study.against)
            less = along(results.get(arm, ()), results.get(other, ()), metric, name.lower())
            if points := [(point["images"] / 1e3, values) for point, values in less]:
                seeds = len(points[0][1])  # the same at each point
                told = f" ({seeds} seed{'s' * (seeds > 1)})" * (seeds < ENOUGH)
                of = colour[other if besides else arm]
                lines.append(mean_line(pair_name(arm, other) + told, points, of, besides, interval=True))
        label, x_label = f"{METRICS[metric].title}, difference", "images of the first-named, thousands"
        if lines:
            panels.append(Panel(f"at equal {name}", x_label, label, lines, levels={"even": 0.0}))
    return panels


def draw_curves(study: Study, results: Results, path: Path) -> None:
    """Draw to the image `path` metrics over training, and compared arms' differences at equal images and FLOPs."""
    panels = []
    for metric in measured(study.metrics, results):
        panels += over_training(study, results, metric, ("images",)) + less_panels(study, results, metric)
    _save(study, path, panels, 3, "shaded: a standard deviation by seed; of differences, the 95% interval")


def draw_differences(study: Study, results: Results, path: Path) -> None:
    """Draw to the image `path` how compared arms differ in each metric, at equal training images and at equal FLOPs."""
    panels = [less_panels(study, results, metric) for metric in measured(study.metrics, results)]
    _save(study, path, [*chain(*panels)], key="shaded: 95% intervals of three or more seeds")


def draw_balance(study: Study, results: Results, path: Path) -> None:
    """Draw to the image `path` the first metric over training, FID against precision, and precision against recall."""
    networks = networks_of(study, results)
    devices = {run["timed_on"] for runs in networks.values() for run in runs}
    timed = ("steady_seconds",) if len(devices) == 1 and None not in devices else ()
    panels = []
    for metric in measured(study.metrics[:1], networks):
        panels += over_training(study, networks, metric, ("images", "flops", *timed))
    _save(study, path, panels + balance_panels(study, results), key=MARKS)


def draw_precision(study: Study, results: Results, path: Path) -> None:
    """Draw to the image `path` `end_panels` of the unguided arms and, if guided arms have run, `balance_panels`."""
    networks = networks_of(study, results)
    guided = any(results[arm] for arm in results if arm not in networks)
    panels = end_panels(study, networks) + (balance_panels(study, results) if guided else [])
    _save(study, path, panels, key=f"{ENDS}\n{MARKS}" if guided else ENDS)


def balance_panels(study: Study, results: Results) -> list[Panel]:
    """Return panels of the final FID against precision, and of precision against recall. A line joins a network's
    mean scores at several scales of one kind of guidance; the last scale is written next to its point. Means are over
    the seeds that all scales of the line have; small dots are these seeds' scores. A scale is left out if a guided one
    has more seeds, or if it has another sample count than the unguided network; a line, if no seed has all scales."""
    networks, panels, colour = networks_of(study, results), [], colours(study)
    for across, up in (("precision", "fid"), ("recall", "precision")):
        lines, drawn = defaultdict(dict), []
        for arm, runs in results.items():
            network = arm if arm in networks else arm.rpartition(", ")[0]
            ends = {run["seed"]: end for run in runs if {across, up} <= {*(end := run["points"][-1])}}
            if ends and study.arms[arm].samples == study.arms[network].samples:
                name = re.sub(r"(, )(?:cfg|(autoguidance)) [\d.]+ ?", r"\1\2", arm).removesuffix(", ")
                lines[network, name][arm] = ends
        for (network, name), scales in lines.items():
            most = max((len(ends) for arm, ends in scales.items() if arm not in networks), default=0)
            joined = {arm: ends for arm, ends in scales.items() if len(ends) >= most}
            if not (seeds := set.intersection(*map(set, joined.values()))):
                continue
            each = [[[ends[seed][key] for seed in seeds] for key in (across, up)] for ends in joined.values()]
            means = [[statistics.mean(values) for values in pair] for pair in each]
            dots = tuple(chain(*(zip(*pair) for pair in each))) if len(seeds) > 1 else ()
            scale = [*[""] * (len(joined) - 1), *re.findall(r"[\d.]+", [*joined][-1].removeprefix(network))]
            drawn.append(Line(name, *map(list, zip(*means)), None, name not in networks, colour[network], scale, dots))
        panels += [Panel("", METRICS[across].label, METRICS[up].label, drawn)] if drawn else []
    return panels


def precision_columns(study: Study, results: Results) -> Columns:
    """Return columns for FID, KID and recall: an unguided arm's value minus the first arm's at the same precision,
    which is interpolated between the first arm's scores at several cfg scales. A cell leaves out a seed if the arm's
    precision is outside the first arm's range, or if the first arm's precision doesn't rise with the scale."""
    tried = {trial for trials in study.trials.values() for trial in trials.values()}
    first, columns = next(arm for arm in study.arms if arm not in tried), {}
    scaled = [first, *(name for way in study.ways if way.startswith("cfg") and (name := f"{first}, {way}") in results)]
    ends = [{run["seed"]: run["points"][-1] for run in results[arm]} for arm in scaled]
    for metric in ("fid", "kid", "recall"):
        cells = {}
        for arm in (arm for arm in networks_of(study, results) if arm != first):
            less = []
            for run in (run for run in results[arm] if {"precision", metric} <= {*run["points"][-1]}):
                here, known = run["points"][-1], [each[run["seed"]] for each in ends if run["seed"] in each]
                line = [(end["precision"], end[metric]) for end in known if {"precision", metric} <= {*end}]
                places = [place for place, _ in line]
                if places == sorted({*places}) and places[:1] <= [here["precision"]] <= places[-1:]:
                    less.append(here[metric] - float(np.interp(here["precision"], *zip(*line))))
            if mean := estimate(less):
                cells[arm] = mean.signed()
        columns[f"{METRICS[metric].title} − {first}'s, at equal precision"] = cells
    return columns


ENDS = "dots: seeds; bars: their 95% interval; grey: two standard deviations by seed"  # what end_panels show
MARKS = "numbers: the largest guidance scale; small dots: seeds, where there are several"  # in balance_panels


def chance(study: Study, results: Results, metric: str, name: str = "images") -> float | None:
    """Return twice the standard deviation, over seeds, of the difference of two compared arms in a metric at equal
    "images" or "FLOPs" (`name`): a smaller difference at one seed may be chance. The deviation is pooled over the
    study's pairs. If they have too few seeds, and study.scale is not "demo", a study of Imagenette takes it from the
    published study "convergence", at the number of images nearest to its own end. Returns None if it is unknown."""
    pairs = [(results.get(arm, ()), results.get(other, ())) for arm, other in study.pairs]
    each = [less for pair in pairs if (less := paired(*pair, metric, name)) and less.spread is not None]
    if sum(less.seeds - 1 for less in each) < ENOUGH - 1 and study.scale != "demo":
        if not all("imagenette" in " ".join(arm.overrides) for arm in study.arms.values()):
            return None
        known = gather(plan(read_study("convergence", "small")), finished(HERE / "none"))
        last = max(point["images"] for runs in results.values() for run in runs for point in run["points"])
        found = along(known["routed"], known["dense"], metric, name.lower())
        nearest = sorted(found, key=lambda at: abs(at[0]["images"] - last))[:1]
        each = [less for _, values in nearest if (less := estimate(values)).spread is not None]
    freedom = sum(less.seeds - 1 for less in each)
    return 2 * math.sqrt(sum((less.seeds - 1) * less.spread**2 for less in each) / freedom) if each else None


def draw_ends(study: Study, results: Results, path: Path) -> None:
    """Draw to the image `path` the differences between compared arms after training: each seed's, and 95% intervals."""
    _save(study, path, end_panels(study, results), key=ENDS)


def end_panels(study: Study, results: Results) -> list[Panel]:
    """Return panels of the differences between compared arms at the end of training, a row per pair: in the first
    metric at equal training images and at equal FLOPs; in others only at equal images, or at equal FLOPs if no pair can
    be compared at equal images. Dots: seeds; bars: 95% intervals; grey: differences that may be chance (`chance`)."""
    panels, colour, drawn = [], colours(study), set()
    metrics = measured(study.metrics, results)  # none before the first evaluation
    for metric, name in product(metrics, ("images", "FLOPs")):
        if name == "FLOPs" and metric in drawn - {metrics[0]}:
            continue
        rows = {pair: differences(*(results.get(arm, ()) for arm in pair), EQUAL[name], metric) for pair in study.pairs}
        rows, lines = {pair: less for pair, less in rows.items() if less}, []
        for place, ((arm, _), less) in enumerate(rows.items()):
            lines.append(Line("", less, [place] * len(less), colour=colour[arm]))
            mean = estimate(less)
            if mean.sign is not None:
                lines.append(Line("", [mean.mean], [place], [mean.half], colour=colour[arm]))
        names = tuple(pair_name(*pair) for pair in rows)
        title = f"{METRICS[metric].title}, at equal {name}"
        if rows:
            drawn.add(metric)
            band = chance(study, results, metric, name)
            if len(panels) % 2 and panels[-1].names == names:  # the panel to the left has them
                names = ("",) * len(names)
            label = f"{METRICS[metric].title}, difference"
            panels.append(Panel(title, label, "", lines, names=names, noise=band, levels={"": 0.0}))
    return panels


def cost_ratio(run: Made, other: Made, axis: str) -> float | None:
    """Return one run's training "flops" or "steady_seconds" (`axis`, as in jobs.py), divided by another's. None if
    either is unknown or, for seconds, if the runs differ in device or in how many runs shared it (Made.timed_on)."""
    if axis == "steady_seconds" and (run["timed_on"] is None or run["timed_on"] != other["timed_on"]):
        return None
    ends = [max(curve(each, "loss", axis), default=0) for each in (run, other)]
    return ends[0] / ends[1] if all(ends) else None


def ladder_columns(study: Study, results: Results) -> Columns:
    """Return table columns with each arm's training FLOPs, seconds and predicted memory (`training_memory`), divided by
    those of the arm that it is compared with. A column "published" has study.published's text for the arm's change,
    such as an FID before and after it, "4.58 → 4.65"; it is left out if no arm has such a text."""
    trainings = {run.arm: run.training for run in plan(study)}
    cells: Columns = {title: {} for title in ("FLOPs, ratio", "seconds, ratio", "memory by plan, ratio")}
    for arm, other in study.against.items():
        for title, axis in (("FLOPs, ratio", "flops"), ("seconds, ratio", "steady_seconds")):
            if mean := estimate(differences(results.get(arm, ()), results.get(other, ()), cost_ratio, axis)):
                cells[title][arm] = f"{mean.mean:.3f}"
        if results.get(arm) and arm in networks_of(study, results):
            ratio = training_memory(trainings[arm]) / training_memory(trainings[other])
            cells["memory by plan, ratio"][arm] = f"{ratio:.2f}"
    rungs = {arm: re.sub(r"^(\+ |\w+, )", "", arm) for arm in results}
    known = {arm: study.published[rung] for arm, rung in rungs.items() if rung in study.published}
    return cells | ({"published": known} if known else {})


def guidance_columns(study: Study, results: Results) -> Columns:
    scored = {arm: runs[0]["scores"][-1] for arm, runs in results.items() if runs and runs[0]["scores"]}
    return {"FLOPs a sample": {arm: f"{score['flops']:.3g}" for arm, score in scored.items()}}


def draw_guidance(study: Study, results: Results, path: Path) -> None:
    """Draw to the image `path` metrics over guidance scale ω, a line per network and guidance kind; y axes from 0."""
    scored = {arm: runs for arm, runs in results.items() if runs and runs[0]["scores"]}
    panels, colour, others = [], colours(study), cycle(OTHERS)
    for metric in study.metrics:
        ends, over_scale = last_values(scored, metric), {}
        for arm, values in ends.items():
            network, guidance = arm.partition(", ")[::2]
            kind, scale = guidance.rpartition(" ")[::2]
            if re.fullmatch(r"[\d.]+", scale):
                unguided = [(1.0, ends[network])] if network in ends else []
                over_scale.setdefault((network, kind), unguided).append((float(scale), values))
        lines = []
        for (network, kind), points in over_scale.items():
            name = f"{network}, {kind}"
            colour.setdefault(name, colour[network] if kind == "cfg" else next(others))
            lines.append(mean_line(name, sorted(points), colour[name]))
        if lines:
            panels.append(Panel("", "guidance scale ω (1: none)", METRICS[metric].label, lines, zero=True))
    _save(study, path, panels, min(3, len(panels)))


LAST = 0.2  # final fraction of the training over which its loss is averaged


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


def loss_gap_columns(study: Study, results: Results) -> Columns:
    gaps = {arm: differences(runs, results["dense"], training_gap) for arm, runs in results.items() if arm != "dense"}
    return {"training loss above the dense one's": {arm: estimate(less).signed() for arm, less in gaps.items() if less}}


def draw_loss_gap(study: Study, results: Results, path: Path) -> None:
    """Draw to the image `path` each routed arm's difference from the arm "dense", over the number of blocks that the
    route spans: in the training loss, and in other metrics at equal training images."""
    lengths = {arm: 1 - int(np.subtract(*map(int, re.findall(r"\d+", arm)))) for arm in results if arm != "dense"}
    panels = []
    for metric in study.metrics:
        by, *names = (training_gap,) if metric == "loss" else (EQUAL["images"], metric)
        less = {arm: differences(results[arm], results["dense"], by, *names) for arm in lengths}
        if points := [(lengths[arm], values) for arm, values in less.items() if values]:
            band = chance(study, results, metric) if metric != "loss" else None
            title = f"{METRICS[metric].title} − the dense one's"
            line = mean_line("routes", points, "C1", interval=True)
            panels.append(Panel(title, "blocks of the route", "", [line], levels={"even": 0.0}, noise=band))
    _save(study, path, panels, 3, "grey: two standard deviations by seed")


def draw_placement(study: Study, results: Results, path: Path) -> None:
    """Draw to the image `path` heat maps over a route's first and last block: each metric minus that of training with
    no route, at equal training images and at equal FLOPs, and the training FLOPs divided by those with no route."""
    places = {arm: tuple(map(int, re.findall(r"\d+", arm))) for arm in results if arm != "dense"}
    starts, ends = (sorted(set(each)) for each in zip(*places.values()))
    maps = {}
    for metric, name in [*product(study.metrics, ("images", "FLOPs")), ("flops", "")]:
        cells, flops = np.full((len(starts), len(ends)), np.nan), last_means(results, metric)
        for arm, (start, end) in places.items():
            if metric == "flops" and {arm, "dense"} <= {*flops}:
                cells[starts.index(start), ends.index(end)] = flops[arm] / flops["dense"]
            elif metric != "flops" and (less := paired(results[arm], results["dense"], metric, name)):
                cells[starts.index(start), ends.index(end)] = less.mean
        if not np.isnan(cells).all():
            title = "training FLOPs over\nthe dense one's"
            if name:
                title = f"{METRICS[metric].title} − the dense one's,\nat equal {name}"
            maps[title] = cells
    if maps:
        (first, cells), *others = maps.items()
        labels = ("last block of the route", "first block of the route")
        save_heat_maps(path, {first: cells}, dict(others), ends, starts, labels, study.seen)


SIMILARITIES = {"dense": "all tokens", "routed": "under its route"}  # key of similarity.json → title


def matrices(results: Results) -> dict[tuple[str, str], list[np.ndarray]]:
    """Return {(arm, "dense" or "routed"): matrices of cosine similarity between block outputs, one per seed}, computed
    with all tokens ("dense") or under the arm's route ("routed"). The first row and column are the embedding's."""
    found = defaultdict(list)
    for arm, runs in results.items():
        for panel, score in product(SIMILARITIES, chain(*(run["scores"] for run in runs))):
            if score.get(panel):
                found[arm, panel].append(np.array(score[panel], dtype=float))
    return found


def similarity_columns(study: Study, results: Results) -> Columns:
    """Return columns of cosine similarities: neighbouring blocks' outputs (mean); embedding and last block's output."""
    cells = defaultdict(dict)
    for (arm, panel), each in sorted(matrices(results).items(), key=lambda item: item[0][1]):
        neighbours = [float(np.nanmean(np.diagonal(matrix, 1))) for matrix in each]
        cells[f"next block, {SIMILARITIES[panel]}"][arm] = f"{estimate(neighbours)}"
        ends = [float(matrix[0, -1]) for matrix in each]
        cells[f"embedding to end, {SIMILARITIES[panel]}"][arm] = f"{estimate(ends)}"
    return cells


def draw_similarity(study: Study, results: Results, path: Path) -> None:
    """Draw to the image `path` arms' heat maps of cosine similarity between blocks' outputs, averaged over seeds."""
    if means := {key: np.mean(each, axis=0) for key, each in matrices(results).items()}:
        names = ["in", *range(len(next(iter(means.values()))) - 1)]
        panels = {f"{arm} network,\n{SIMILARITIES[panel]}": mean for (arm, panel), mean in means.items()}
        label, less = "behind block (in: the embedding)", {}
        if {("dense", "dense"), ("routed", "dense")} <= {*means}:
            less = {"routed − dense,\nall tokens": means["routed", "dense"] - means["dense", "dense"]}
        save_heat_maps(path, panels, less, names, names, (label, label), study.seen, most=0)


MOST_SEEDS = 9  # of an arm, in published results
FIGURES = {
    "balance": Figure(draw_balance),
    "curves": Figure(draw_curves),
    "differences": Figure(draw_differences),
    "ends": Figure(draw_ends),
    "guidance": Figure(draw_guidance, guidance_columns),
    "ladder": Figure(draw_ends, ladder_columns),
    "loss_gap": Figure(draw_loss_gap, loss_gap_columns),
    "placement": Figure(draw_placement),
    "precision": Figure(draw_precision, precision_columns),
    "similarity": Figure(draw_similarity, similarity_columns),
}


def publish(study: Study, runs: Sequence[Planned], made: Mapping[str, dict], folder: Path) -> None:
    """Write results.json (a line per finished training), table.md (it names missing runs) and, if there are results,
    figure.png to `folder`, for `runs`, all others of the study's plan, and further seeds in the results.json
    that it replaces. `made`: {training's hash: result.json}."""
    file = folder / "results.json"
    own = json.loads(file.read_text())["runs"] if file.exists() else {}
    further = [run for run in plan(study, MOST_SEEDS, made) if run.training.key in own and is_made(run, made)]
    whole = [*{(run.arm, run.training.seed): run for run in (*plan(study, made=made), *further, *runs)}.values()]
    wanted, kept = {score.key for run in whole for score in run.scores}, {}
    for key, record in ((run.training.key, made.get(run.training.key)) for run in whole):
        if record and record["trained"]:
            kept[key] = record | {"scores": {name: each for name, each in record["scores"].items() if name in wanted}}
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(record)}" for key, record in kept.items())
    head = json.dumps({"study": study.name, "scale": study.scale, "title": study.title})
    with explain_failure(folder):
        folder.mkdir(exist_ok=True)
        write_whole(file, head[:-1] + f',\n "runs": {{\n{lines}\n }}}}\n')
    write(study, whole, kept, folder)


def write(study: Study, runs: Sequence[Planned], made: Mapping[str, dict], folder: Path) -> None:
    """Write table.md and, if there are results, figure.png for `runs`. `made`: {training's hash: its result.json}."""
    results, left = gather(runs, made), missing(runs, made)
    left = "; ".join(filter(None, [left, *(f"{arm} (after its trials)" for arm in study.arms if arm not in results)]))
    with explain_failure(folder):
        write_whole(folder / "table.md", table(study, results) + (f"\nMissing: {left}.\n" if left else ""))
        if any(results.values()):
            FIGURES[study.figure].draw(study, results, folder / "figure.png")
