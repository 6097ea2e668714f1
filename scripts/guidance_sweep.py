"""Sweep Sparse Guidance over both ratios and ω: python scripts/guidance_sweep.py checkpoint=… reference=… out=…

Each setting is scored as fid.py scores it, in a folder of its own below `out`; start it again after
it was stopped, and it goes on. Writes sweep.csv, and sweep.png: a heat map of the metric for each ω,
and one of the cost. ω and the ratios are those of sweep.…, not of guidance.…. All options: configs/guidance_sweep.yaml.
"""

from __future__ import annotations

import csv
import itertools
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import hydra
import numpy as np
from omegaconf import DictConfig
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tread.checkpoints import checkpoint
from tread.diffusion.guidance import Schedule
from tread.evaluation import pipeline
from tread.evaluation.figures import save_heat_maps
from tread.evaluation.plan import Options, plan_scoring, read_options, settle_paths
from tread.evaluation.reference_scorer import ReferenceScorer
from tread.evaluation.scorers import METRICS
from tread.runtime import schema
from tread.runtime.cli import explained, open_door, plain
from tread.runtime.device import use_precision
from tread.runtime.distributed import Processes, share_work
from tread.runtime.files import check_place, explain_failure

COLUMNS = ("strong", "weak", "scale", "flops_relative", "step", "count", *METRICS)


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


@hydra.main(version_base="1.3", config_path="../configs", config_name="guidance_sweep")
def main(composed: DictConfig) -> None:
    with explained("stopped; start it again to go on with the settings that are missing"):
        tree = plain(composed)
        sweep = schema.read(tree.pop("sweep"), Sweep, "sweep.")
        run(sweep, read_options(tree), share_work(None))


def run(sweep: Sweep, options: Options, processes: Processes) -> None:
    """Check all settings, score each, then write the table and the heat maps."""
    options, paths = processes.from_main(lambda: settle_paths(options))
    metric = check(sweep, options, paths)
    options = replace(options, checkpoint=str(paths[0]))
    grid = list(dict.fromkeys(itertools.product(sweep.strong, sweep.weak, sweep.scale)))
    free = options.guidance.force or options.guidance.checkpoint is not None
    chosen = {point: setting(options, *point) for point in grid if free or point[0] <= point[1]}
    if not chosen:
        raise ValueError(
            "sweep.strong is above sweep.weak everywhere, but the weak branch is to see fewer tokens "
            "(guidance.force=true runs it all the same)"
        )
    found = checkpoint.find(Path(options.checkpoint))
    for one in chosen.values():
        plan_scoring(one, found, use_precision(one.precision, processes.device))
    folder, records = Path(options.out), {}
    with processes.main_first():
        if processes.main:
            check_place(folder, 0)
    processes.say(f"{len(chosen)} settings; {len(grid) - len(chosen)} with strong above weak are left out")
    with tqdm(total=len(chosen), desc="guidance sweep", unit="setting", disable=not processes.main) as progress:
        for point, one in chosen.items():
            (record,) = pipeline.run(one, processes)
            if processes.main and metric not in record:
                raise ValueError(
                    f"sweep.metric is {metric}, but: {record['unavailable'].get(metric, 'nothing was scored')}"
                )
            records[point] = record
            progress.update()
    if processes.main:
        with explain_failure(folder):
            write_table(folder / "sweep.csv", records)
            draw(folder / "sweep.png", sweep, records, metric)
        best = {"lower": min, "higher": max}[METRICS[metric]](records, key=lambda point: records[point][metric])
        values, ratios = records[best], "strong {} weak {} scale {}".format(*best)
        processes.say(f"  best      {metric} {values[metric]:.5g} of {values['count']:,} samples at {ratios}")
        processes.say(f"  written   {folder / 'sweep.csv'}, {folder / 'sweep.png'}")


def check(sweep: Sweep, options: Options, paths: list[Path]) -> str:
    """The metric to draw. Raises ValueError for a sweep that can't be."""
    if options.out is None:
        raise ValueError("out=… is needed: the folder for the table, the heat maps and each setting's score")
    if len(paths) != 1:
        raise ValueError(f"a sweep is over one checkpoint, but checkpoint={options.checkpoint} names {len(paths)}")
    if options.save_reference or options.samples:
        raise ValueError("a sweep scores a checkpoint; save_reference and samples are fid.py's")
    if not options.guidance.row.routed:
        raise ValueError(f"guidance={options.guidance.kind} has no ratios to sweep, as sparse and sparse_cfg have")
    if isinstance(options.guidance.strong, Schedule) or isinstance(options.guidance.weak, Schedule):
        raise ValueError("a sweep is over constant ratios, but guidance.strong or guidance.weak is a schedule")
    allowed = [name for name in METRICS if (name in ReferenceScorer.metrics) == bool(options.reference)]
    metric = sweep.metric or allowed[0]
    if metric not in allowed:
        given = "a reference" if options.reference else "no reference"
        raise ValueError(f"sweep.metric is {metric}, but with {given} there are {', '.join(allowed)}")
    return metric


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


def draw(path: Path, sweep: Sweep, records: dict[tuple[float, float, float], dict], metric: str) -> None:
    """The heat maps: rows are ratios of the weak branch, columns those of the strong one."""

    def panel(scale: float, key: str) -> np.ndarray:
        found = [[records.get((s, w, scale), {}).get(key, np.nan) for s in sweep.strong] for w in sweep.weak]
        return np.array(found, dtype=float)

    note = f"{next(iter(records.values()))['count']:,} samples, {METRICS[metric]} is better"
    panels = {f"{metric}, ω = {scale:g}\n{note}": panel(scale, metric) for scale in sweep.scale}
    guided = next((scale for scale in sweep.scale if scale != 1), 1.0)  # ω = 1 runs the strong branch alone
    cost = {"FLOPs over no guidance": panel(guided, "flops_relative")}
    labels = ("ratio of the strong branch", "ratio of the weak branch")
    save_heat_maps(path, panels, cost, sweep.strong, sweep.weak, labels)


if __name__ == "__main__":
    open_door(main, [*schema.known_keys(Options), *schema.known_keys(Sweep, "sweep.")])
