"""What scoring leaves behind: fid.json beside what was scored, and a line in the run's fid.csv.

fid.json holds the newest scoring; older ones by other settings keep their files as fid-1.json, fid-2.json, …
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

from files import write_whole
from scoring import METRICS

COLUMNS = ("time", "step", "count", *METRICS, "label_agreement", "frechet_pixels", "reference", "reference_count")
COLUMNS += ("sampler", "steps", "nfe", "guidance", "labels", "first_seed", "weights", "dtype", "file")


class ScoreFiles:
    """fid.json, fid.png and samples.npz in a folder, with `stem` before their names where several sets share it."""

    def __init__(self, folder: Path, stem: str = "") -> None:
        self.folder, self.stem = folder, stem

    def path(self, name: str, number: int | None = None) -> Path:
        """Where a file is: path("fid.json"), or the older path("fid.json", 1)."""
        head, _, suffix = name.rpartition(".")
        return self.folder / f"{self.stem}{head}{'' if number is None else f'-{number}'}.{suffix}"

    def _numbers(self) -> Iterator[int | None]:
        """None for the newest scoring that is there, then 1, 2, … for the others."""
        if self.path("fid.json").exists():
            yield None
        number = 1
        while self.path("fid.json", number).exists():
            yield number
            number += 1

    def _is(self, number: int | None, settings: dict) -> dict | None:
        """A scoring's record, if it is by these settings."""
        try:
            record = json.loads(self.path("fid.json", number).read_text())
        except ValueError:
            return None
        return record if record.get("settings") == json.loads(json.dumps(settings)) else None

    def find(self, settings: dict) -> dict | None:
        """The record of a scoring by these settings, if it was done before; its "samples" says where they are."""
        for number in self._numbers():
            if record := self._is(number, settings):
                return record | {
                    "file": str(self.path("fid.json", number)),
                    "has_samples": self.path("samples.npz", number).exists(),
                }
        return None

    def make_room(self, settings: dict) -> None:
        """Give the files of a scoring by other settings a number, so that a new one can have their names."""
        if self.path("fid.json").exists() and not self._is(None, settings):
            number = max((found for found in self._numbers() if found), default=0) + 1
            for name in ("samples.npz", "fid.png", "fid.json"):
                if self.path(name).exists():
                    self.path(name).replace(self.path(name, number))

    def write(self, record: dict) -> Path:
        """Write fid.json and return its path."""
        path = self.path("fid.json")
        write_whole(path, json.dumps(record, indent=1) + "\n")
        return path


NAMES = {"fid": "FID", "sfid": "sFID", "inception_score": "Inception Score", "kid": "KID"}


def table(record: dict) -> str:
    """A scoring's values, each with its count; what is unavailable, and what to keep in mind: one line each."""
    pictures = f" against {record['reference_count']:,}" if record.get("reference_count") else ""
    statistics = pictures if record.get("reference_statistics") == "pictures" else ""
    against = {"fid": statistics, "sfid": statistics} | dict.fromkeys(("precision", "recall", "kid"), pictures)
    lines = [
        f"  {NAMES.get(name, name):<21}{record[name]:<12.5g} {count:,} samples{against.get(name, '')}"
        for name, count in record["counts"].items()
    ]
    lines += [f"  {NAMES.get(name, name):<21}unavailable: {why}" for name, why in record["unavailable"].items()]
    return "\n".join(lines + [f"  note: {text}" for text in record["warnings"]])


def add_line(path: Path, record: dict) -> None:
    """Append a scoring to a .csv with COLUMNS, which is begun if it is not there."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        if new:
            writer.writeheader()
        writer.writerow(record["settings"] | record)
