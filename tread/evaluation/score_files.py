"""The files of a score: fid.json beside the checkpoint or the pictures, and a line in the run's fid.csv.

fid.json holds the newest scoring; older ones by other settings keep their files as fid-1.json, fid-2.json, …
"""

import csv
import itertools
import json
from collections.abc import Mapping
from pathlib import Path

from tread.evaluation.metric_table import METRICS, Metric, names_of
from tread.runtime.files import write_whole

NAMES = ("samples.npz", "fid.png", "fid.json")


class ScoreFiles:
    """fid.json, fid.png and samples.npz in a folder, with `stem` before their names where several sets share it."""

    def __init__(self, folder: Path, stem: str = "") -> None:
        self.folder, self.stem = folder, stem

    def path(self, name: str, number: int | None = None) -> Path:
        """Where a file is: path("fid.json"), or the older path("fid.json", 1)."""
        head, _, suffix = name.rpartition(".")
        return self.folder / f"{self.stem}{head}{'' if number is None else f'-{number}'}.{suffix}"

    def _there(self, number: int | None = None) -> list[str]:
        """The names of the files that are there."""
        return [name for name in NAMES if self.path(name, number).exists()]

    def _free(self) -> int:
        """The first number that none of the files has."""
        return next(number for number in itertools.count(1) if not self._there(number))

    def _is(self, number: int | None, settings: dict) -> dict | None:
        """A scoring's record, if it is there and by these settings."""
        try:
            record = json.loads(self.path("fid.json", number).read_text())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        same = isinstance(record, dict) and record.get("settings") == json.loads(json.dumps(settings))
        return record if same else None

    def find(self, settings: dict, with_samples: bool = False) -> tuple[Path, dict] | None:
        """fid.json and its content of a scoring by these settings; with_samples: one whose samples are there too."""
        for number in (None, *range(1, self._free())):
            record = self._is(number, settings)
            if record and (not with_samples or "samples.npz" in self._there(number)):
                return self.path("fid.json", number), record
        return None

    def make_room(self, settings: dict) -> None:
        """Give files that are there a number, so that a new scoring can have their names; those of the same stay."""
        if not self._is(None, settings):
            number = self._free()
            for name in self._there():
                self.path(name).replace(self.path(name, number))

    def write(self, record: dict) -> Path:
        """Write fid.json and return its path."""
        path = self.path("fid.json")
        write_whole(path, json.dumps(record, indent=1) + "\n")
        return path


def table(record: dict) -> str:
    """A scoring's values, each with its count; what is unavailable, and what to keep in mind: one line each."""
    pictures = f" against {record['reference_count']:,}" if record.get("reference_count") else ""
    against = {"pictures": pictures, "statistics": pictures * (record.get("reference_statistics") == "pictures")}

    def known(name: str) -> Metric:
        return METRICS.get(name, Metric(name))

    lines = [
        f"  {known(name).display:<21}{record[name]:<12.5g} {count:,} samples{against.get(known(name).needs, '')}"
        for name, count in record["counts"].items()
    ]
    lines += [f"  {known(name).display:<21}unavailable: {why}" for name, why in record["unavailable"].items()]
    for key, what in (("skipped", "samples"), ("reference_skipped", "the reference")):
        lines += [f"  note: {record[key]:,} damaged pictures of {what} were left out"] if key in record else []
    return "\n".join(lines + [f"  note: {text}" for text in record["warnings"]])


def sampler_told(values: Mapping) -> str | None:
    """The solver of a score, and the shift of its times unless that is 1."""
    shift = values.get("shift")
    return values.get("sampler") if shift in (None, 1) else f"{values.get('sampler')}, shift {shift}"


def columns() -> list[str]:
    """The columns of fid.csv, including those of all metrics in METRICS."""
    head = ["time", "step", "count", *names_of("samples"), "reference", "reference_count"]
    head += ["sampler", "steps", "nfe", "flops_relative", "guidance", "weak_network"]
    return [*head, "labels", "first_seed", "weights", "dtype", "checkpoint"]


def add_line(path: Path, record: dict) -> None:
    """Append a scoring to a .csv with `columns`; one with other columns keeps its lines under another name."""
    head = ",".join(columns())
    if path.exists() and path.read_text().partition("\n")[0].strip() != head:
        number = next(n for n in itertools.count(1) if not path.with_name(f"{path.stem}-{n}.csv").exists())
        path.replace(path.with_name(f"{path.stem}-{number}.csv"))
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns(), extrasaction="ignore")
        if not file.tell():
            writer.writeheader()
        values = record["settings"] | record
        writer.writerow(values | {"sampler": sampler_told(values)})
