"""Writes a page on runs for a browser: python scripts/report.py results/my-run [results/other …]

Writes report.html (comparison.html for several runs) into the first folder, a page of results, samples, curves that can
be zoomed and hidden, scores, time spent, warnings and settings. It loads nothing from the network. Patterns such as
'results/seeds-*' work too; runs that differ only in their seed are averaged, damaged ones shown as far as can be read.
"""

import sys

if __name__ == "__main__":
    import checkout  # noqa: F401

from tread.reports.report import write_report
from tread.reports.runs import folders_of
from tread.runtime.cli import answer_help, explained


def main() -> None:
    answer_help(__doc__)
    with explained():
        print(f"written: {write_report(folders_of(sys.argv[1:]))}")


if __name__ == "__main__":
    main()
