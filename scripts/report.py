"""A page on runs, for a browser: python scripts/report.py results/my-run [results/other results/sweep …]

Writes report.html (of several runs comparison.html) into the first folder: results, samples, curves that zoom and
toggle, scores, guidance sweeps, where the time went, warnings, what ran. It holds all it needs, and asks nothing of the
network. Patterns such as 'results/seeds-*' are taken too; runs that differ by their seed alone are put together. What
is left of damaged and killed runs is reported. A sweep in a run's folder or beside it is found; others can be named.
"""

import sys

if __name__ == "__main__":
    import checkout  # noqa: F401

from tread.reports.report import write_report
from tread.reports.runs import folders_of
from tread.runtime.cli import answer_help, explained


def main() -> None:
    answer_help(__doc__)
    with explained("stopped"):
        try:
            print(f"written: {write_report(folders_of(sys.argv[1:]))}")
        except ImportError as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
