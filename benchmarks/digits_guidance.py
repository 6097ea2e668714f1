"""Guidance on digits: python benchmarks/digits_guidance.py results/deep-0 results/deep-1 results/deep-2

The runs differ by their seed alone. Scores each as fid.py does, by the kinds of guidance below and each ω; the
weak network of autoguidance is the run's own after WEAK_STEP steps. Goes on where it was stopped.
Prints a table (mean ± standard deviation over the runs) and writes docs/guidance.png and
benchmarks/results/digits_guidance.json. About 40 minutes on 2 CPU cores for three runs.
"""

from __future__ import annotations

import contextlib
import io
import json
import statistics
import sys
from pathlib import Path

from timing import ROOT, composed
from tqdm import tqdm

from tread.checkpoints import checkpoint
from tread.evaluation import pipeline
from tread.evaluation.plan import read_options
from tread.runtime.cli import answer_help
from tread.runtime.distributed import Processes, share_work

SHARED = ("labels=balanced", "num_samples=1000", "steps=18", "batch_size=250")
SCALES = (1.25, 1.5, 2.0, 4.0, 8.0)
WEAK_STEP = 500
RATIOS = ("guidance.strong=0.25", "guidance.weak=0.75")
KINDS = {
    "none": ("guidance=none",),
    "cfg": ("guidance=cfg",),
    "autoguidance": ("guidance=autoguidance",),
    "sparse": ("guidance=sparse", *RATIOS),
    "autoguidance + sparse": ("guidance=sparse", *RATIOS),
}
METRICS = {"label_agreement": "label agreement", "frechet_pixels": "Fréchet distance in pixels"}


def score(run: Path, kind: str, scale: float | None, processes: Processes) -> dict:
    """The score of a run by one guidance; what it prints is kept back."""
    folder = run / "guidance" / f"{kind} {scale or ''}".replace(" ", "")
    options = [f"checkpoint='{run}'", f"out='{folder}'", *SHARED, *KINDS[kind]]
    options += [f"guidance.scale={scale}"] if scale else []
    options += [f"guidance.checkpoint='{run}/step_{WEAK_STEP:07d}'"] if kind.startswith("autoguidance") else []
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        (record,) = pipeline.run(read_options(composed("fid", options)), processes)
    return record


def draw(path: Path, found: dict[tuple[str, float | None], list[dict]]) -> None:
    """Both metrics against ω, a line a kind, with a band of one standard deviation over the runs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, (metric, title) in zip(axes, METRICS.items()):
        for number, kind in enumerate(KINDS):
            points = [("none", None), *[(kind, scale) for scale in SCALES if kind != "none"]]
            x = [scale or 1.0 for _, scale in points]
            values = [[record[metric] for record in found[point]] for point in points]
            mean, spread = (
                [statistics.mean(v) for v in values],
                [statistics.stdev(v) if len(v) > 1 else 0.0 for v in values],
            )
            low, high = ([m + sign * s for m, s in zip(mean, spread)] for sign in (-1, 1))
            cost = statistics.mean(record["flops_relative"] for record in found[points[-1]])
            if kind == "none":
                axis.axhline(mean[0], color="black", linestyle=":", label="none, 1.00 times the FLOPs")
                continue
            axis.plot(x, mean, "o-", color=f"C{number}", markersize=4, label=f"{kind}, {cost:.2f} times")
            axis.fill_between(x, low, high, color=f"C{number}", alpha=0.15)
        axis.set_xscale("log", base=2)
        axis.set_xticks([1.0, *SCALES], [f"{scale:g}" for scale in (1.0, *SCALES)])
        axis.set_xlabel("ω")
        axis.set_title(f"{title}, {'higher' if metric == 'label_agreement' else 'lower'} is better", fontsize=10)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    axes[1].set_yscale("log")
    axes[1].set_yticks([30, 50, 100, 200, 500], ["30", "50", "100", "200", "500"])
    axes[1].minorticks_off()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    runs, processes = [Path(argument) for argument in sys.argv[1:]], share_work(None)
    for run in runs:
        try:
            checkpoint.find(run / f"step_{WEAK_STEP:07d}")
        except (ValueError, OSError) as error:
            sys.exit(f"error: {error}")
    if not runs:
        sys.exit("error: name at least one run's folder")
    points = [(kind, scale) for kind in KINDS for scale in ([None] if kind == "none" else SCALES)]
    found = {point: [] for point in points}
    for run, point in tqdm([(run, point) for run in runs for point in points], unit="score"):
        found[point].append(score(run, *point, processes))

    print(f"| guidance | ω | FLOPs | {' | '.join(METRICS.values())} |\n|---|---|---|---|---|")
    for (kind, scale), records in found.items():
        cells = []
        for metric, digits in zip(METRICS, (3, 1)):
            values = [record[metric] for record in records]
            spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.{digits}f}{spread}")
        print(f"| {kind} | {scale or '–'} | {records[0]['flops_relative']:.2f} | {' | '.join(cells)} |")
    kept, first = ("label_agreement", "frechet_pixels"), found["none", None][0]
    rows = [
        {
            "guidance": records[0]["settings"]["guidance"],
            "weak_step": WEAK_STEP if kind.startswith("autoguidance") else None,
            "flops_relative": records[0]["flops_relative"],
            "runs": [{key: record[key] for key in kept} for record in records],
        }
        for (kind, _), records in found.items()
    ]
    shared = ("sampler", "steps", "num_samples", "first_seed", "labels", "weights", "dtype", "batch_size")
    table = {
        "versions": first["versions"],
        "settings": {key: first["settings"][key] for key in shared},
        "checkpoints": [record["settings"]["checkpoint"] for record in found["none", None]],
        "table": rows,
    }
    results = ROOT / "benchmarks" / "results"
    results.mkdir(exist_ok=True)
    (results / "digits_guidance.json").write_text(json.dumps(table, indent=1) + "\n")
    draw(ROOT / "docs" / "guidance.png", found)


if __name__ == "__main__":
    answer_help(__doc__)
    main()
