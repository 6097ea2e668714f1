"""Reads and writes a score's files. By default, fid.py writes a checkpoint's score to fid.json in its folder, and adds
a line to fid.csv one folder up; for photos/ or photos.npz it writes photos.fid.json beside it. out=… sets a folder.
A new score with other settings takes the name fid.json: the older one becomes fid-1.json, …"""

import csv
import itertools
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from tread.evaluation.metric_table import METRICS, Metric, scored_names

NAMES = ("samples.npz", "fid.png", "fid.json")


@dataclass(frozen=True)
class ScoreFiles:
    """The files fid.json, fid.png and samples.npz of the scores in `folder`. Their names begin with `stem`, usually "".
    Beside pictures photos/ or photos.npz it is "photos.", since the folder may hold other pictures' scores, too."""

    folder: Path
    stem: str = ""

    def path(self, name: str, number: int | None = None) -> Path:
        """Return the path of the newest score's file `name`, e.g. fid.json; number=1 is for the older fid-1.json."""
        head, _, suffix = name.rpartition(".")
        return self.folder / f"{self.stem}{head}{'' if number is None else f'-{number}'}.{suffix}"

    def _there(self, number: int | None = None) -> list[str]:
        return [name for name in NAMES if self.path(name, number).exists()]

    def _free(self) -> int:
        return next(number for number in itertools.count(1) if not self._there(number))

    def _is(self, number: int | None, settings: dict) -> dict | None:
        """Return the record of score `number` (None: the newest) if it exists and has these settings, else None."""
        try:
            record = json.loads(self.path("fid.json", number).read_text())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        same = isinstance(record, dict) and record.get("settings") == json.loads(json.dumps(settings))
        return record if same else None

    def find(self, settings: dict, with_samples: bool = False, **values: str) -> tuple[Path, dict] | None:
        """Return (path, content) of the first of fid.json, fid-1.json, … that was made with these settings and holds
        the entries `values`; None if there is none. with_samples=True: the score must also have a samples.npz."""
        for number in (None, *range(1, self._free())):
            record = self._is(number, settings)
            same = record and all(record.get(key) == value for key, value in values.items())
            if same and (not with_samples or "samples.npz" in self._there(number)):
                return self.path("fid.json", number), record
        return None

    def make_room(self, settings: dict, written: Collection[str], scored: str = "") -> None:
        """Unless the newest score has these settings, rename its files, and others of the names `written`, to
        fid-1.json, …, but not the samples `scored`. A samples.npz that belongs to no score stays as it is."""
        if not self._is(None, settings):
            number, older = self._free(), self.path("fid.json").exists()
            for name in self._there():
                if (older or name in written) and self.path(name).resolve() != Path(scored).resolve():
                    self.path(name).replace(self.path(name, number))


def table(record: dict) -> str:
    """Format `record`, fid.json's content, as text: for each metric a line with its value and number of samples, or
    with the reason why it has no value; then notes on damaged pictures, and the warnings."""
    pictures = f" against {record['reference_count']:,}" if record.get("reference_count") else ""
    against = {"pictures": pictures, "statistics": pictures * (record.get("reference_statistics") == "pictures")}

    def known(name: str) -> Metric:
        return METRICS.get(name, Metric(name))

    width = max([20, *map(len, record["counts"])]) + 1
    lines = [
        f"  {known(name).display:<{width}}{record[name]:<12.5g} {count:,} samples{against.get(known(name).needs, '')}"
        for name, count in record["counts"].items()
    ]
    lines += [f"  {known(name).display:<{width}}unavailable: {why}" for name, why in record["unavailable"].items()]
    for key, what in (("skipped", "samples"), ("reference_skipped", "the reference")):
        lines += [f"  note: {record[key]:,} damaged pictures of {what} were left out"] if key in record else []
    return "\n".join(lines + [f"  note: {text}" for text in record["warnings"]])


def sampler_told(values: Mapping) -> str | None:
    """Return the sampler as text, with the time shift if that is not 1; None if the scored pictures were read from
    files. `values` is fid.json's content merged with its entry "settings"."""
    shift = values.get("shift")
    return values.get("sampler") if shift in (None, 1) else f"{values.get('sampler')}, shift {shift}"


def columns(record: Mapping) -> list[str]:
    """Return the names of fid.csv's columns for the score `record`, fid.json's content."""
    head = ["time", "step", "count", *scored_names(record), "reference", "reference_count"]
    head += ["sampler", "steps", "nfe", "flops_relative", "guidance", "weak_network"]
    return [*head, "labels", "first_seed", "weights", "dtype", "checkpoint"]


def add_line(path: Path, record: dict) -> None:
    """Append the score `record`, fid.json's content, to the .csv `path`. A file with other columns is renamed first."""
    head = columns(record)
    if path.exists() and path.read_bytes().partition(b"\n")[0].strip() != ",".join(head).encode():
        number = next(n for n in itertools.count(1) if not path.with_name(f"{path.stem}-{n}.csv").exists())
        path.replace(path.with_name(f"{path.stem}-{number}.csv"))
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, head, extrasaction="ignore")
        if not file.tell():
            writer.writeheader()
        values = record["settings"] | record
        writer.writerow(values | {"sampler": sampler_told(values)})
