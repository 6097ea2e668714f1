"""Compares runs: python scripts/compare_runs.py results/a 'results/b-*' … [out=comparison]

Prints a table, and how many steps and FLOPs and how much time each run needs to reach the others' results (with more
than four runs, only the first is compared with the others). Writes comparison.png (curves against steps, FLOPs and
time) and comparison.csv (each run's numbers) beside the first run's folder; out=path writes path.png and path.csv
instead. Existing files are replaced. Runs that differ only in their seed are averaged and count as one run: mean ±
standard deviation. Without several seeds, differences of a few percent may be chance.

On held-out data, EDM's evaluation loss, rectified flow's velocity error, and the evaluation loss that older versions of
this code wrote for rectified flow are three different quantities. The training loss is left out, as it usually
is higher if tokens skip blocks. images/s is the median over the run; to measure speeds, use benchmarks/step_time.py.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    import checkout  # noqa: F401

from collections.abc import Sequence

from tread.drawing.charts import save_panels
from tread.reports import comparison
from tread.runtime.cli import answer_help, explained
from tread.runtime.files import check_file


def main() -> None:
    answer_help(__doc__)
    named = [os.path.expanduser(word.removeprefix("out=")) for word in sys.argv[1:] if word.startswith("out=")]
    with explained("stopped"):
        groups = comparison.open_groups([word for word in sys.argv[1:] if not word.startswith("out=")])
        out = [*named, os.path.normpath(groups[0].runs[0].folder / "../comparison")][0]
        check_file(out if out.endswith("/") else f"{out}.png")
        show(groups)
        if shown := comparison.curve_metrics(groups):
            comparison.write_table(Path(f"{out}.csv"), groups, shown)
            charts = comparison.charts(groups, shown)
            panels = [panel for chart in charts for panel in chart.values()]
            save_panels(Path(f"{out}.png"), panels, len(charts[0]))
            print(f"written: {out}.png, {out}.csv")


def show(groups: Sequence[comparison.SeedGroup]) -> None:
    """Print results, warnings (unfinished runs, settings that differ), and by which step runs reach others' results."""
    head, rows = comparison.results_table(groups)
    for cells in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(cells)} |")
    for group in groups:
        if len(group.runs) > 1 or group.name != group.runs[0].folder.name:
            print(f"{group.name}: {', '.join(str(run.folder) for run in group.runs)}")
    for run in (run for group in groups for run in group.runs):
        if run.step < run.config["train"]["steps"]:
            print(f"warning: {run.folder} is at step {run.progress}")
    for text in comparison.cautions(groups):
        print(f"warning: {text}")
    for text in comparison.verdicts(groups):
        print(text)


if __name__ == "__main__":
    main()
