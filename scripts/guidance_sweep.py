"""Sweeps a guidance over ω, intervals and ratios: python scripts/guidance_sweep.py checkpoint=… reference=… out=…

guidance=… chooses the kind (tread/diffusion/guidance.py). Guidance combines the predictions of two branches, a strong
and a weak one, as D_weak + ω·(D_strong − D_weak). The ratios are the fractions of tokens that skip blocks in each
branch, an interval is the range of noise levels with guidance. Set these and ω by sweep.…, not by guidance.…. Each
setting is scored as by fid.py, in its own folder in `out`; a stopped sweep resumes when started again. Writes
sweep.csv, and curves.png, each metric against ω. Kinds with ratios also get sweep.png, heat maps over both ratios: of
sweep.metric for each ω and interval, and of FLOPs for each interval. All options: configs/guidance_sweep.yaml.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    import checkout  # noqa: F401

import csv
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from tread.checkpoints import checkpoint
from tread.diffusion.guidance import NO_GUIDANCE
from tread.drawing.charts import Line, Panel, save_heat_maps, save_panels
from tread.evaluation import scoring
from tread.evaluation.metric_table import METRICS, feature_metrics, scored_names
from tread.evaluation.scoring import ScoringOptions, ScoringPlan, plan_scoring, read_options, settle_reference
from tread.runtime import schema
from tread.runtime.cli import door, open_door
from tread.runtime.device import use_precision
from tread.runtime.distributed import Processes, share_work
from tread.runtime.files import check_place, explain_failure

STRONG, WEAK = (0.0, 0.3, 0.5), (0.5, 0.7, 0.9)  # default fractions of skipped tokens


class Point(NamedTuple):
    """A setting of the sweep: the fractions of tokens that skip blocks in the strong and the weak branch, the guidance
    weight ω (`scale`), and the (lowest, highest) noise level with guidance, σ for EDM or t for RF; None: all levels."""

    strong: float
    weak: float
    scale: float
    interval: tuple[float, ...] | None


@dataclass(frozen=True)
class Sweep:
    """Options `sweep.…`: values of Point's fields; baseline: score without guidance, too; metric: see choose_metric."""

    scale: tuple[float, ...]
    strong: tuple[float, ...] | None
    weak: tuple[float, ...] | None
    interval: tuple[tuple[float, ...] | None, ...]
    baseline: bool
    metric: str | None

    def points(self, routed: bool) -> list[Point]:
        """Return all combinations of the sweep's values, each once. `routed`: whether the kind of guidance lets tokens
        skip blocks. If so, strong=None means STRONG, weak=None means WEAK; if not, both fractions are 0."""
        strong, weak = ((0.0,), (0.0,))
        if routed:
            strong, weak = STRONG if self.strong is None else self.strong, WEAK if self.weak is None else self.weak
        return list(dict.fromkeys(map(Point._make, itertools.product(strong, weak, self.scale, self.interval))))


@door(stopped="stopped; start it again to go on with the settings that are missing")
def main(tree: dict) -> None:
    for name in Point._fields:
        if any(word.lstrip("+").startswith(f"guidance.{name}=") for word in sys.argv[1:]):
            raise ValueError(f"guidance.{name} is what a sweep changes: set sweep.{name}=[…] instead")
    if any(word.startswith("guidance=sg_") for word in sys.argv[1:]):
        raise ValueError("guidance=sg_… sets the ratios, which a sweep changes: take guidance=sparse")
    sweep = schema.read(tree.pop("sweep"), Sweep, "sweep.")
    options = read_options(tree)
    run(sweep, options, share_work(None, options.cpu_threads))


def run(sweep: Sweep, options: ScoringOptions, processes: Processes) -> None:
    """Check all settings, score each, write table and figures. ValueError or OSError for unusable settings or files."""
    options, paths = processes.from_main(lambda: scoring.settle_paths(options))
    check(sweep, options, paths)
    options, routed = replace(options, checkpoint=str(paths[0])), options.guidance.row.routed
    grid, folder = sweep.points(routed), Path(options.out)
    free = options.guidance.force or options.guidance.checkpoint is not None
    chosen = {point: setting(options, point) for point in grid if free or point.strong <= point.weak}
    if not chosen:
        raise ValueError("a list is empty, or strong is above sweep.weak everywhere (guidance.force=true allows it)")
    source, precision = checkpoint.find(paths[0]), use_precision(options.precision, processes.device)
    metric = choose_metric(sweep, options, [plan_scoring(scored, source, precision) for scored in chosen.values()])
    processes.from_main(lambda: check_place(folder, 0))
    left_out = f"; {len(grid) - len(chosen)} with strong above weak are left out" if routed else ""
    processes.say(f"{len(chosen)} settings{left_out}" + "; and none" * sweep.baseline)
    if sweep.baseline:
        chosen |= {None: replace(options, guidance=NO_GUIDANCE, out=str(folder / "none"))}
    records = {}
    with tqdm(total=len(chosen), desc="guidance sweep", unit="setting", disable=not processes.main) as progress:
        for point, scored in chosen.items():
            (records[point],) = scoring.run(scored, processes)
            if processes.main and metric not in records[point]:
                raise ValueError(f"sweep.metric is {metric}, but: {records[point]['unavailable'].get(metric)}")
            progress.update()
    if processes.main:
        write(folder, sweep, records, metric, routed)


def check(sweep: Sweep, options: ScoringOptions, paths: list[Path]) -> None:
    """Raise ValueError for options that can't make a sweep, such as several checkpoint `paths`, or guidance=none."""
    guidance, others = options.guidance, options.save_reference or options.samples
    refused = {
        "out=… is needed: the folder for the table, the figures and each setting's score": options.out is None,
        f"a sweep is over one checkpoint, but checkpoint={options.checkpoint} names {len(paths)}": len(paths) != 1,
        "a sweep scores a checkpoint; save_reference and samples are fid.py's": others,
        "guidance=none has nothing to sweep; choose a kind: guidance=cfg, sparse, …": guidance.kind == "none",
        f"guidance={guidance.kind} has no ratios to sweep": not guidance.row.routed and (sweep.strong or sweep.weak),
    }
    for message, holds in refused.items():
        if holds:
            raise ValueError(message)


def choose_metric(sweep: Sweep, options: ScoringOptions, plans: list[ScoringPlan]) -> str:
    """Return the metric to draw: sweep.metric (None: the first one scored). Raises ValueError if it is not scored."""
    reference = settle_reference(options, plans).reference
    allowed = [*(feature_metrics() if reference else plans[0].judge.metrics), *[scoring.CLIP] * bool(options.clip)]
    metric = sweep.metric or next(iter(allowed), None)
    if metric not in allowed:
        given = "a reference" if reference else "no reference"
        raise ValueError(f"sweep.metric is {metric}, but with {given} there are {', '.join(allowed)}")
    return metric


def setting(options: ScoringOptions, point: Point) -> ScoringOptions:
    """Return fid.py's options for one point of the sweep. Raises ValueError for a guidance that is not valid."""
    ratios = f"strong{point.strong:g}-weak{point.weak:g}-" if options.guidance.row.routed else ""
    name = f"{ratios}scale{point.scale:g}{within(point.interval, '-within')}"
    return replace(options, guidance=replace(options.guidance, **point._asdict()), out=str(Path(options.out) / name))


def within(interval: tuple[float, ...] | None, word: str) -> str:
    return f"{word}{interval[0]:g}..{interval[1]:g}" if interval else ""


def write(folder: Path, sweep: Sweep, records: dict[Point | None, dict], metric: str, routed: bool) -> None:
    """Write the table and the figures, with heat maps if tokens skip blocks in guidance (`routed`); print the setting
    with the best `metric`. `records` are the scores by setting; None stands for no guidance."""
    records = dict(records)
    baseline = records.pop(None, {})
    files = [folder / "sweep.csv", folder / "curves.png"] + [folder / "sweep.png"] * routed
    rows = [{**record, **p._asdict(), "interval": within(p.interval, "")} for p, record in records.items()]
    columns = [*Point._fields, "flops_relative", "step", "count", *scored_names(rows[0])]
    with explain_failure(folder):
        with files[0].open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        panels = curves(records, baseline)
        save_panels(files[1], panels, columns=min(3, len(panels)))
        if routed:
            draw_maps(files[2], sweep, records, metric)
    best = METRICS[metric].best(records, key=lambda point: records[point][metric])
    score = f"{metric} {records[best][metric]:.5g} of {records[best]['count']:,} samples"
    ratios = f"strong {best.strong} weak {best.weak} " if routed else ""
    without = f"; without guidance {baseline[metric]:.5g}" if baseline else ""
    print(f"  best      {score} at {ratios}scale {best.scale}{within(best.interval, ' within ')}{without}")
    print(f"  written   {', '.join(map(str, files))}")


def curves(records: Mapping[Point, dict], baseline: dict) -> list[Panel]:
    """Return a panel per metric against ω: a line for each noise interval and pair of fractions of skipped tokens (in
    the strong and the weak branch), and a flat line for `baseline`, the scores without guidance."""
    settings: dict[tuple[str, str], list[Point]] = {}
    for point in sorted(records, key=lambda point: point.scale):
        ratios = f"ratios {point.strong:g} and {point.weak:g}" if point.strong or point.weak else ""
        settings.setdefault((ratios, within(point.interval, "within ")), []).append(point)
    panels = []
    for name, metric in METRICS.items():
        lines = []
        for setting, points in settings.items():
            scored = [point for point in points if records[point].get(name) is not None]
            cost = f"{max(records[point]['flops_relative'] for point in points):.2f} times the FLOPs"
            called = ", ".join(filter(None, (*setting, cost)))
            if scored:
                scales = [point.scale for point in scored]
                lines.append(Line(called, scales, [records[point][name] for point in scored]))
        if lines:
            levels = {"no guidance": baseline[name]} if baseline.get(name) is not None else {}
            count = next(iter(records.values()))["count"]
            panels.append(Panel(f"{metric.label}, {count:,} samples", "ω", metric.title, lines, levels=levels))
    return panels


def draw_maps(path: Path, sweep: Sweep, records: Mapping[Point, dict], metric: str) -> None:
    """Draw maps over both branches' ratios: `metric` per ω and interval; FLOPs relative to no guidance per interval."""
    strong, weak = sweep.strong or STRONG, sweep.weak or WEAK

    def matrix(scale: float, interval: tuple[float, ...] | None, key: str) -> np.ndarray:
        values = [[records.get(Point(s, w, scale, interval), {}).get(key, np.nan) for s in strong] for w in weak]
        return np.array(values, dtype=float)

    scores, costs, count = {}, {}, next(iter(records.values()))["count"]
    guided = next((scale for scale in sweep.scale if scale != 1), 1.0)  # ω = 1 runs only the strong branch
    for interval in sweep.interval:
        levels = "" if sweep.interval == (None,) else f"{within(interval, 'within ') or 'all noise levels'}\n"
        for scale in sweep.scale:
            title = f"{METRICS[metric].label}, ω = {scale:g}\n{levels}{count:,} samples"
            scores[title] = matrix(scale, interval, metric)
        costs[f"FLOPs over no guidance\n{levels}"] = matrix(guided, interval, "flops_relative")
    save_heat_maps(path, scores, costs, strong, weak, ("ratio of the strong branch", "ratio of the weak branch"))


if __name__ == "__main__":
    open_door(main, [*schema.known_keys(ScoringOptions), *schema.known_keys(Sweep, "sweep.")])
