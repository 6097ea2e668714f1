"""Training steps at 256 to 16,384 tokens, by kind of network: python benchmarks/long_sequences.py [options] [overrides]

DiT, Diffusion-RWKV, Mamba-2 and the hybrid (each fourth block DiT's), without and with their routes, of S's width with
patches of 2: latents are 32 to 256 wide. train.py's own steps (forward, backward, optimizer, average), all kinds taking
turns in one process; medians. Memory is a run's weights, their average, the optimizer's state and the most that a step
holds beside them. What does not run, since memory does not suffice or a part is missing, is said in its place. On a CPU
there are 4 blocks, r(1→2), and steps of 1,024 tokens at least, in the place of 12 blocks, r(2→8), and 32,768 tokens:
the longest fills 20 GB of memory then, and the hybrid's attention is behind the route. More blocks: model.depth=8
model.routes.0.end=-3.

    tokens=[256,1024,4096,16384] squares of even numbers
    batch_tokens=…               tokens of all images of a step, where one image has not more; memory is about that
    rounds=5                     turns that are measured, of a step each (5 on a GPU)
    out=…                        a JSON file to write, after each length
    figure=….png                 time and memory against tokens, with the crossing points
    from=….json                  measure nothing: table and figure of such a file

Other overrides are train.py's: model.depth=6, train.compile=false, where compiling would take longer than the steps.

python benchmarks/long_sequences.py out=long.json figure=long.png                                      # GPU
python benchmarks/long_sequences.py rounds=2 train.compile=false out=long.json figure=long.png         # GPU, in minutes
python benchmarks/long_sequences.py rounds=3                                                           # CPU
python benchmarks/long_sequences.py from=long.json figure=long.png
"""

import gc
import json
import math
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from step_time import BLOCK, forward_flops, open_run, routes_until, run_facts, time_steps
from timing import DEVICE, begin, circumstances, composed, options_of, why_failed, write

from routing_module import check_routes
from tread.drawing.charts import Line, Panel, save_panels
from tread.runtime.schema import Count
from tread.training import settings

MODELS = {  # what runs without its route, and with it → overrides
    ("DiT", "TREAD"): ["model=tread"],
    ("RWKV", "routed RWKV"): ["model=tread_rwkv"],
    ("Mamba", "routed Mamba"): ["model=tread_mamba"],
    ("hybrid", "routed hybrid"): ["model=tread_mamba", "model.attention_every=4"],
}
ROUTED = [routed for _, routed in MODELS]
KINDS = [name for pair in MODELS for name in pair]
LINEAR = [name for name in KINDS if name not in ("DiT", "TREAD")]
SMALLER = ["model.depth=4", "model.routes.0.start=1", "model.routes.0.end=-2"]  # 2 of 4 blocks for 7 of 12
MEASURES = {"ms_per_1000": "ms a step for 1,000 tokens", "peak_gb": "peak memory, GB"}


@dataclass(frozen=True)
class Options:
    """See above; batch_tokens null: what the device usually takes; read: from."""

    tokens: tuple[Count, ...] = (256, 1024, 4096, 16384)
    batch_tokens: Count | None = None
    rounds: Count = 5
    out: str | None = None
    figure: str | None = None
    read: str | None = None

    def __post_init__(self) -> None:
        for tokens in self.tokens:
            if math.isqrt(tokens) ** 2 != tokens or tokens % 4:
                raise ValueError(f"tokens has {tokens}, but images here have squares of even numbers, as 256 and 1024")


def main() -> None:
    sys.argv[1:] = [re.sub("^from=", "read=", word) for word in sys.argv[1:]]
    options, overrides = options_of(Options)
    if options.read:
        result = json.loads(Path(options.read).read_text())
        for row in result["rows"]:
            show(row, result)
    else:
        result = measure_all(options, overrides)
    places = show_crossings(result["rows"])
    if options.figure:
        draw(Path(options.figure), result, places)


def measure_all(options: Options, overrides: Sequence[str]) -> dict:
    """All lengths, printed and written one by one. Raises ValueError before any of them for what can't be."""
    for word in overrides:
        if word.startswith(("model=", "experiment=", "dataset.size=", "train.batch_size=")):
            raise ValueError(f"{word} is what this benchmark chooses: see its tokens and batch_tokens, by --help")
    gpu = DEVICE.type == "cuda"
    words = ["experiment=imagenet256_s2", *([] if gpu else SMALLER), *overrides]
    for model in MODELS.values():
        settings.read(composed("config", [*model, *words]))
    least = options.batch_tokens or (32768 if gpu else 1024)
    result = {**circumstances(), "rounds": options.rounds, "block": BLOCK, "rows": []}
    for tokens in options.tokens:
        with tempfile.TemporaryDirectory() as folder:
            sizes = [f"dataset.size={2 * math.isqrt(tokens)}", f"train.batch_size={max(1, least // tokens)}"]
            result["rows"].append(measure(Path(folder), tokens, [*words, *sizes], options.rounds))
        gc.collect()  # of runs, which refer to themselves
        torch.cuda.empty_cache()
        show(result["rows"][-1], result)
        write(options.out, result)
    return result


def measure(folder: Path, tokens: int, words: Sequence[str], rounds: int) -> dict:
    """A row: what a step of each kind costs at one length; kinds that fail have the reason in the place of numbers."""
    kinds, failed, facts = {}, {}, {}
    for (dense, routed), model in MODELS.items():
        try:
            run = open_run(folder / dense, [*model, *words])
        except Exception as error:  # memory and missing parts; other kinds go on
            failed |= dict.fromkeys((dense, routed), why_failed(error))
            continue
        kinds |= {dense: (run, routes_until(0, run.cfg)), routed: (run, routes_until(None, run.cfg))}
        if not facts:
            (route,) = check_routes(run.cfg.model.routes, run.cfg.model.depth)
            facts = {"batch": run.cfg.train.batch_size, "width": run.cfg.model.hidden_size}
            facts |= {"depth": run.cfg.model.depth, "route": [route.start, route.end], **run_facts(run)}
    turns, costs = time_steps(kinds, rounds, failed)
    for name, cost in costs.items():
        cost["ms_per_1000"] = 1000 * cost["ms"] / tokens / facts["batch"]
        dense = next((dense for dense, routed in MODELS if routed == name), "DiT")
        if name != dense and dense in turns:
            ratios = turns[dense].over(turns[name])
            cost |= {"against": dense, "ratio": statistics.median(ratios), "ratios": [ratios[0], ratios[-1]]}
            cost["flops_ratio"] = forward_flops(*kinds[dense]) / forward_flops(*kinds[name])
    return facts | {"tokens": tokens, "kinds": {name: costs.get(name) or {"failed": failed[name]} for name in KINDS}}


def show(row: dict, result: dict) -> None:
    """Print a row's table, with what it is of."""
    if "batch" not in row:
        print(f"\n{row['tokens']:,} tokens: {row['kinds']['DiT']['failed']}")
        return
    start, end = row["route"]
    print(
        f"\n{row['tokens']:,} tokens, batch {row['batch']}: width {row['width']}, {row['depth']} blocks, "
        f"r({start}→{end}), {result['device']}, {row['precision']}, {'' if row['compiled'] else 'not '}compiled, "
        f"{row['threads']} threads, torch {result['torch']}, {result['rounds']} turns of {result['block']} steps\n"
    )
    print("| kind | ms a step | ms for 1,000 tokens | GB | times faster (over the turns) | FLOPs allow |")
    print("|---|---|---|---|---|---|")
    for name, cost in row["kinds"].items():
        cells, ratio = f"{cost.get('failed')} | |", "|"
        if "ms" in cost:
            cells = f"{cost['ms']:,.1f} | {cost['ms_per_1000']:.2f} | {cost['peak_gb']:.2f}"
        if "ratio" in cost:
            low, high = cost["ratios"]
            ratio = f"{cost['ratio']:.2f} than {cost['against']} ({low:.2f}..{high:.2f}) | {cost['flops_ratio']:.2f}"
        print(f"| {name} | {cells} | {ratio} |", flush=True)


def show_crossings(rows: Sequence[dict]) -> dict[str, dict[str, float]]:
    """Print from how many tokens on a kind costs less than another. Returns by measure: a name for both → tokens."""
    print("\n| this costs less than that | in time | in memory |\n|---|---|---|")
    places = {measure: {} for measure in MEASURES}
    for name, other in [(routed, dense) for dense, routed in MODELS] + [(name, "TREAD") for name in LINEAR]:
        cells = []
        for measure in MEASURES:
            points = [(row["tokens"], *(row["kinds"][kind].get(measure) for kind in (name, other))) for row in rows]
            cell, place = crossing([point for point in points if None not in point])
            cells.append(cell)
            places[measure] |= {f"{name} below {other}": place} if place else {}
        print(f"| {name} than {other} | {' | '.join(cells)} |")
    return places


def crossing(points: Sequence[tuple[float, float, float]]) -> tuple[str, float | None]:
    """Where the first of two costs, (tokens, first, second) each, falls below the second for good: in words, and where.

    Between two lengths both are taken as straight lines of logarithms.
    """
    if not points:
        return "–", None
    above = [math.log(first / second) for _, first, second in points]
    if above[-1] >= 0:
        return f"not up to {points[-1][0]:,} tokens", None
    last = max((number for number, value in enumerate(above) if value >= 0), default=None)
    if last is None:
        return f"at all, from {points[0][0]:,} tokens on", None
    low, high = points[last][0], points[last + 1][0]
    place = low * (high / low) ** (above[last] / (above[last] - above[last + 1]))
    return f"from about {float(f'{place:.2g}'):,.0f} tokens on", place


def draw(path: Path, result: dict, places: dict[str, dict[str, float]]) -> None:
    """Time and memory against tokens; crossing points are named lines."""
    rows, panels = result["rows"], []
    batches = ", ".join(str(row.get("batch", "–")) for row in rows)
    for measure, label in MEASURES.items():
        lines = []
        for name in KINDS:
            points = [(row["tokens"], row["kinds"][name][measure]) for row in rows if measure in row["kinds"][name]]
            lines += [Line(name, *zip(*points), dashed=name in ROUTED)] if points else []
        title = f"{result['device']}, batches of {batches}"
        panels.append(Panel(title, "tokens", label, lines, log="xy", places=places[measure]))
    save_panels(path, panels, columns=2)


if __name__ == "__main__":
    begin(main)
