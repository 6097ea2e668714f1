"""Runs side by side: python scripts/compare_runs.py results/a 'results/b-*' … [out=comparison]

Prints a table, and how many steps and FLOPs each needs to come as far as the others; writes comparison.png, the
curves against steps, FLOPs and time, and comparison.csv, their numbers (out= names them without the ending; files of
that name are replaced). Runs that differ by their seed alone are put together: mean ± standard deviation over the
seeds. Without seeds to average, differences of a few percent are chance.

Evaluation losses of edm and of rf are different things. The training loss is left out on purpose: with routes it is
not comparable to one without. images/s is the median over the run; measure speed by benchmarks/step_time.py, which
alternates.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if __name__ == "__main__":
    from tread.runtime.early import guard_imports

    guard_imports(globals())

import math
import statistics
from collections.abc import Sequence

from tread.evaluation.curves import Line, Panel, save_panels
from tread.runtime.cli import answer_help, explained
from tread.runtime.files import check_place
from tread.runtime.schema import written
from tread.training.comparison import COMPARABLE, FAIR, Group, open_groups, reached, unlike, write_table

CURVES = {"eval_loss": "evaluation loss", "fid": "FID"}  # lower is better
COLUMNS = CURVES | {"label_agreement": "label agreement", "frechet_pixels": "Fréchet distance in pixels"}
AXES = {"step": "steps", "flops": "training FLOPs", "seconds": "training time"}
TIMES = {"hours": 3600.0, "minutes": 60.0, "seconds": 1.0}


def main() -> None:
    arguments = sys.argv[1:]
    answer_help(__doc__)
    if not arguments:
        sys.exit("error: name the runs to compare: their folders; --help says more")
    out = Path(next((word.removeprefix("out=") for word in arguments if word.startswith("out=")), "comparison"))
    with explained("stopped"):
        groups = open_groups([word for word in arguments if not word.startswith("out=")])
        check_place(out.parent, 0)
        show(groups)
        shown = [metric for metric in CURVES if any(group.curve(metric) for group in groups)]
        if shown:
            write_table(out.with_name(out.name + ".csv"), groups, [*shown])
            axes = [axis for axis in AXES if any(getattr(p, axis) for g in groups for m in shown for p in g.curve(m))]
            save_panels(out.with_name(out.name + ".png"), [panel(groups, m, a) for m in shown for a in axes], len(axes))
            print(f"written: {out}.png, {out}.csv")


def show(groups: Sequence[Group]) -> None:
    """Print the table, what is not alike, and who reaches whom."""
    columns = [name for name in COLUMNS if any(group.last(name) for group in groups)]
    longest = max((s for group in groups for s in group.last("seconds")), default=0)
    name, size = unit("seconds", longest)
    print(f"| run | seeds | steps | {' | '.join([*map(COLUMNS.get, columns), 'images/s', name, 'FLOPs'])} |")
    print("|---" * (len(columns) + 6) + "|")
    for group in groups:
        cells = [number(group.last(name)) for name in columns] + [speed(group)]
        cells += [number([s / size for s in group.last("seconds")]), number(group.last("flops"))]
        steps = min(run.records[-1]["step"] for run in group.runs)
        print(f"| {group.name} | {len(group.runs)} | {steps:,} | {' | '.join(cells)} |")
    for group in groups:
        if len(group.runs) > 1 or group.name != group.runs[0].folder.name:
            print(f"{group.name}: {', '.join(str(run.folder) for run in group.runs)}")
    for group in groups:
        for run in group.runs:
            if (step := run.records[-1]["step"]) < run.config["train"]["steps"]:
                print(f"warning: {run.folder} is at step {step:,} of {run.config['train']['steps']:,}")
    apart = unlike(groups, COMPARABLE)
    for key, values in {**apart, **unlike(groups, FAIR)}.items():
        print(f"warning: {key} differs: {told(values, groups)}")
    if apart:
        print("warning: numbers of runs that differ so do not mean the same: none of them is said to reach another")
    first = groups if len(groups) <= 4 else groups[:1]  # of many runs, each with the first one
    for metric, called in CURVES.items():
        for one, other in ((a, b) for a in groups for b in groups if a is not b and (a in first or b in first)):
            if one.curve(metric) and other.curve(metric) and not unlike([one, other], COMPARABLE):
                print(reach(one, other, metric, called))


def told(values: Sequence[object], groups: Sequence[Group]) -> str:
    """Each value once, with the groups that have it; of many groups the commonest value without them."""
    names: dict[str, list[str]] = {}
    for value, group in zip(values, groups):
        names.setdefault(written(value), []).append(group.name)
    most = max(names, key=lambda value: len(names[value]))
    others = {most: [f"{len(names[most])} runs"]} if len(names[most]) > 3 else {}
    return ", ".join(f"{value} ({', '.join(those)})" for value, those in {**names, **others}.items())


def reach(one: Group, other: Group, metric: str, called: str) -> str:
    """For people: when `one` first is where `other` ends."""
    goal, best = other.curve(metric)[-1], min(point.value for point in one.curve(metric))
    point, spread = reached(one, metric, goal.value), (goal.spread or 0) + (one.curve(metric)[-1].spread or 0)
    if point is None and best - goal.value < spread:
        return (
            f"{one.name} is level with {other.name} in {called}: {best:.4g} and {goal.value:.4g}, within their spread"
        )
    if point is None:
        return f"{one.name} does not reach the {called} {goal.value:.4g} of {other.name}: its best is {best:.4g}"
    text = f"{one.name} reaches the {called} {goal.value:.4g} of {other.name} by step {point.step:,} (of {goal.step:,})"
    if point.flops and goal.flops:
        text += f", with {point.flops:.3g} FLOPs, {ratio(point.flops, goal.flops)} {goal.flops:.3g}"
    if point.seconds and goal.seconds:
        name, size = unit("seconds", goal.seconds)
        text += (
            f", in {point.seconds / size:.3g} {name}, {ratio(point.seconds, goal.seconds)} {goal.seconds / size:.3g}"
        )
    return text


def ratio(own: float, other: float) -> str:
    return f"{own / other:.2f} times the other's"


def unit(axis: str, most: float) -> tuple[str, float]:
    """In what an axis up to `most` is told: its name, and its size in the units of the records."""
    if axis == "flops":
        power = int(math.log10(most)) // 3 * 3
        return f"10^{power}", 10.0**power
    return next((name, size) for name, size in TIMES.items() if most >= 2 * size or name == "seconds")


def number(values: Sequence[float]) -> str:
    """A mean to four digits, or to where its standard deviation begins."""
    if not values:
        return "–"
    mean, spread = statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0
    if not 1e-4 < spread < 1e4:
        return f"{mean:#.4g}".rstrip(".") if 1e-3 <= abs(mean) < 1e6 else f"{mean:.4g}"
    places = max(0, 1 - int(f"{spread:e}".partition("e")[2]))
    return f"{mean:.{places}f} ± {spread:.{places}f}"


def speed(group: Group) -> str:
    found = [[record["images_per_s"] for record in run.records if "images_per_s" in record] for run in group.runs]
    return number([statistics.median(values) for values in found if values])


def panel(groups: Sequence[Group], metric: str, axis: str) -> Panel:
    """A metric's curves against steps, FLOPs or time; runs of before these were told have steps alone."""
    title, size, lines = AXES[axis], 1.0, []
    if axis != "step":
        most = max(getattr(point, axis) or 1 for group in groups for point in group.curve(metric))
        name, size = unit(axis, most)
        title += f", {name}"
    for group in groups:
        points = [point for point in group.curve(metric) if getattr(point, axis)]
        spread = [point.spread for point in points] if all(point.spread for point in points) else None
        x = [getattr(point, axis) / size for point in points]
        lines.append(Line(group.name, x, [point.value for point in points], spread))
    return Panel(CURVES[metric], title, CURVES[metric], lines, log="y")


if __name__ == "__main__":
    main()
