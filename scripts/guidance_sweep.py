"""Sweep Sparse Guidance over both ratios and ω: python scripts/guidance_sweep.py checkpoint=… reference=… out=…

Each setting is scored as fid.py scores it, in a folder of its own below `out`; start it again after
it was stopped, and it goes on. Writes sweep.csv, and sweep.png: a heat map of the metric for each ω,
and one of the cost. All options: configs/guidance_sweep.yaml.
"""

from __future__ import annotations

import csv
import itertools
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import hydra
import numpy as np
import torch
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fid  # noqa: E402
import scoring  # noqa: E402
import settings  # noqa: E402
from cli import open_door  # noqa: E402
from digits import METRICS  # noqa: E402
from files import check_place, explain_failure  # noqa: E402
from job import Options, find_checkpoints  # noqa: E402
from pictures import save_heat_maps  # noqa: E402
from processes import Processes  # noqa: E402

LOWER_IS_BETTER = {"fid", "sfid", "kid", "frechet_pixels"}
COLUMNS = ("strong", "weak", "scale", "flops_relative", "count", *scoring.METRICS, "label_agreement", "frechet_pixels")


@dataclass(frozen=True)
class Sweep:
    """The lists of configs/guidance_sweep.yaml."""

    strong: tuple[float, ...]
    weak: tuple[float, ...]
    scale: tuple[float, ...]
    metric: str | None

    def __post_init__(self) -> None:
        for name in ("strong", "weak", "scale"):
            if not getattr(self, name):
                raise ValueError(f"sweep.{name} is empty")
        known = (*scoring.METRICS, *METRICS)
        if self.metric is not None and self.metric not in known:
            raise ValueError(f"sweep.metric is {self.metric!r}, but must be one of {', '.join(known)}")


@hydra.main(version_base="1.3", config_path="../configs", config_name="guidance_sweep")
def main(composed: DictConfig) -> None:
    try:
        tree = OmegaConf.to_container(composed)
        sweep = settings.read(tree.pop("sweep"), Sweep)
        run(sweep, fid.read_options(OmegaConf.create(tree)), Processes(None))
    except (ValueError, OSError, MissingMandatoryValue) as error:
        sys.exit(f"error: {error}")
    except torch.OutOfMemoryError as error:
        sys.exit(f"error: {error}\nA smaller batch_size needs less; what was done before is kept")
    except KeyboardInterrupt:
        sys.exit("stopped; start it again to go on with the settings that are missing")


def run(sweep: Sweep, options: Options, processes: Processes) -> None:
    """Score every setting, then write the table and the heat maps."""
    if options.out is None:
        raise ValueError("out=… is needed: the folder for the table, the heat maps and each setting's score")
    if options.checkpoint is None or len(find_checkpoints(options.checkpoint)) != 1:
        raise ValueError(f"a sweep is over one checkpoint, but checkpoint={options.checkpoint} does not name one")
    if not options.guidance.row.routed:
        raise ValueError(
            f"guidance={options.guidance.kind} has no ratios to sweep; take sparse, sparse_cfg, sparse_uncond"
        )
    folder, grid = Path(options.out), list(itertools.product(sweep.strong, sweep.weak, sweep.scale))
    chosen = {point: setting(options, *point) for point in grid if point[0] <= point[1]}
    if not chosen:
        raise ValueError(
            "sweep.strong is above sweep.weak everywhere: the weak branch is the one that sees fewer tokens"
        )
    with processes.main_first():
        if processes.main:
            check_place(folder, 0)
    processes.say(f"{len(chosen)} settings; {len(grid) - len(chosen)} with strong above weak are left out")
    records = {}
    with processes.bar("guidance sweep", len(chosen), unit="setting") as progress:
        for point, one in chosen.items():
            fid.run(one, processes)
            progress.update()
            if processes.main:
                records[point] = json.loads((Path(one.out) / "fid.json").read_text())
    if processes.main:
        with explain_failure(folder):
            write_table(folder / "sweep.csv", records)
            metric = draw(folder / "sweep.png", sweep, records)
        best = (min if metric in LOWER_IS_BETTER else max)(records, key=lambda point: records[point][metric])
        ratios = "strong {} weak {} scale {}".format(*best)
        print(f"  best      {metric} {records[best][metric]:.5g} of {records[best]['count']:,} samples at {ratios}")
        print(f"  written   {folder / 'sweep.csv'}, {folder / 'sweep.png'}")


def setting(options: Options, strong: float, weak: float, scale: float) -> Options:
    """fid.py's options for one point of the sweep. Raises ValueError if it can't be."""
    guidance = replace(options.guidance, strong=strong, weak=weak, scale=scale)
    name = f"strong{strong:g}-weak{weak:g}-scale{scale:g}"
    return replace(options, guidance=guidance, out=str(Path(options.out) / name))


def write_table(path: Path, records: dict[tuple[float, float, float], dict]) -> None:
    """A line a setting."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        for (strong, weak, scale), record in records.items():
            writer.writerow({**record, "strong": strong, "weak": weak, "scale": scale})


def draw(path: Path, sweep: Sweep, records: dict[tuple[float, float, float], dict]) -> str:
    """The heat maps; returns the metric that they show."""
    some = next(iter(records.values()))
    metric = sweep.metric or ("fid" if "fid" in some else "label_agreement")
    if metric not in some:
        raise ValueError(f"sweep.metric is {metric}, which these scores do not have: {some['unavailable']}")

    def panel(scale: float, key: str) -> np.ndarray:
        found = [[records.get((s, w, scale), {}).get(key, np.nan) for s in sweep.strong] for w in sweep.weak]
        return np.array(found, dtype=float)

    better = "lower" if metric in LOWER_IS_BETTER else "higher"
    note = f"{some['count']:,} samples, {better} is better"
    panels = {f"{metric}, ω = {scale:g}\n{note}": panel(scale, metric) for scale in sweep.scale}
    cost = {"FLOPs over no guidance": panel(max(sweep.scale, key=lambda scale: abs(scale - 1)), "flops_relative")}
    labels = ("ratio of the strong branch", "ratio of the weak branch")
    save_heat_maps(path, panels, cost, sweep.strong, sweep.weak, labels)
    return metric


if __name__ == "__main__":
    open_door(main, [*settings.known_keys(Options), *settings.known_keys(Sweep, "sweep.")])
