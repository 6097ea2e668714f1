"""Runs side by side: python scripts/compare_runs.py results/a 'results/b-*' … [out=comparison]

Prints a table, and how many steps and FLOPs each needs to come as far as the others; writes comparison.png, the
curves against steps, FLOPs and time, and comparison.csv, their numbers (out= names them without the ending; files of
that name are replaced). Runs that differ by their seed alone are put together: mean ± standard deviation over the
seeds. Without seeds to average, differences of a few percent are chance.

The evaluation loss of edm and the velocity error of rf are different things, with a column and a curve each; so is an
evaluation loss that older code wrote for rf. The training loss is left out on purpose: with routes it is not
comparable to one without. images/s is the median over the run; measure speed by benchmarks/step_time.py, which
alternates.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    import checkout  # noqa: F401

from collections.abc import Sequence

from tread.drawing.charts import save_panels
from tread.evaluation.metric_table import METRICS
from tread.reports.comparison import (
    SeedGroup,
    axes_of,
    cautions,
    column_metrics,
    curve_metrics,
    number,
    open_groups,
    panel,
    speed,
    unit,
    verdicts,
    write_table,
)
from tread.runtime.cli import answer_help, explained
from tread.runtime.files import check_place


def main() -> None:
    arguments = sys.argv[1:]
    answer_help(__doc__)
    out = Path(next((word.removeprefix("out=") for word in arguments if word.startswith("out=")), "comparison"))
    with explained("stopped"):
        groups = open_groups([word for word in arguments if not word.startswith("out=")])
        check_place(out.parent, 0)
        show(groups)
        if shown := curve_metrics(groups):
            write_table(out.with_name(out.name + ".csv"), groups, shown)
            axes = axes_of(groups, shown)
            save_panels(out.with_name(out.name + ".png"), [panel(groups, m, a) for m in shown for a in axes], len(axes))
            print(f"written: {out}.png, {out}.csv")


def show(groups: Sequence[SeedGroup]) -> None:
    """Print the table, what is not alike, and who reaches whom."""
    columns = column_metrics(groups)
    longest = max((s for group in groups for s in group.last("seconds")), default=0)
    name, size = unit("seconds", longest)
    titles = [METRICS[column].title for column in columns]
    print(f"| run | seeds | steps | {' | '.join([*titles, 'images/s', name, 'FLOPs'])} |")
    print("|---" * (len(columns) + 6) + "|")
    for group in groups:
        cells = [number(group.last(name)) for name in columns] + [speed(group)]
        cells += [number([s / size for s in group.last("seconds")]), number(group.last("flops"))]
        steps = min(run.records[-1]["step"] for run in group.runs)
        print(f"| {group.name} | {len(group.runs)} | {steps:,} | {' | '.join(cells)} |")
    for group in groups:
        if len(group.runs) > 1 or group.name != group.runs[0].folder.name:
            print(f"{group.name}: {', '.join(str(run.folder) for run in group.runs)}")
    for text in cautions(groups):
        print(f"warning: {text}")
    for text in verdicts(groups):
        print(text)


if __name__ == "__main__":
    main()
