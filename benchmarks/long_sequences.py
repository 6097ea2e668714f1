"""Training steps at 256 to 16,384 tokens, by kind of network: python benchmarks/long_sequences.py [options] [overrides]

DiT, Diffusion-RWKV, Mamba-2 and the hybrid (each fourth block DiT's), without and with their routes, of S's width with
patches of 2: latents are 32 to 256 wide. train.py's own steps (forward, backward, optimizer, average), all kinds taking
turns in one process; medians. Memory is a run's weights, their average, the optimizer's state and the most that a step
holds beside them. What does not run, since memory does not suffice or a part is missing, is said in its place. On a CPU
there are 4 blocks, r(1→2), and steps of 1,024 tokens at least, in the place of 12 blocks, r(2→8), and 32,768 tokens:
the longest fills 20 GB of memory then, and the hybrid's attention is behind the route. More blocks: model.depth=8
model.routes.0.end=-3.

    tokens=256,1024,4096,16384   squares of even numbers
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

from __future__ import annotations

import gc
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from step_time import open_run, own_options, peak_memory, take_steps, write
from timing import begin, circumstances, composed, why_failed

from routing_module import check_routes
from tread.drawing.charts import Line, Panel, save_panels
from tread.runtime import schema
from tread.runtime.schema import Count
from tread.training import settings
from tread.training.run import Run

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
    """See above; batch_tokens null: what the device usually takes."""

    tokens: tuple[Count, ...] = (256, 1024, 4096, 16384)
    batch_tokens: Count | None = None
    rounds: Count = 5
    out: str | None = None
    figure: str | None = None
    read: str | None = None

    def __post_init__(self) -> None:
        for tokens in self.tokens:
            if math.isqrt(tokens) ** 2 != tokens or tokens % 4:
                raise ValueError(
                    f"tokens has {tokens}, but images here have squares of even numbers, like 256 and 1024"
                )


def main() -> None:
    said, overrides = own_options(dict.fromkeys(("tokens", "batch_tokens", "rounds", "out", "figure", "from")))
    given = {key: value for key, value in said.items() if value is not None}
    given |= {key: int(given[key]) for key in ("batch_tokens", "rounds") if given.get(key, "").isdigit()}
    if "tokens" in given:
        given["tokens"] = [int(word) if word.isdigit() else word for word in given["tokens"].split(",")]
    if "from" in given:
        given["read"] = given.pop("from")
    options = schema.read(given, Options)
    if options.read:
        result = read(Path(options.read))
        for row in result["rows"]:
            show(row, result)
    else:
        result = measure_all(options, overrides)
    lines, places = crossings(result["rows"])
    print("\n".join(lines))
    if options.figure:
        draw(Path(options.figure), result, places)


def read(path: Path) -> dict:
    """What `out` wrote. Raises ValueError for another file."""
    try:
        result = json.loads(path.read_text())
        if result["rows"] and all("kinds" in row for row in result["rows"]):
            return result
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"from is {path}, which can't be read ({error}): it must be what out=… wrote") from error
    raise ValueError(f"from is {path}, which has no rows: it must be what out=… wrote")


def measure_all(options: Options, overrides: Sequence[str]) -> dict:
    """All lengths, printed and written one by one. Raises ValueError before any of them for what can't be."""
    schema.check_overrides(overrides, settings.known_keys())
    for word in overrides:
        if word.startswith(("model=", "dataset.size=", "train.batch_size=")):
            raise ValueError(f"{word} is what this benchmark chooses: see its tokens and batch_tokens, by --help")
    gpu = torch.cuda.is_available()
    words = ["experiment=imagenet256_s2", *([] if gpu else SMALLER), *overrides]
    for model in MODELS.values():
        settings.read(composed("config", [*model, *words]))
    least = options.batch_tokens or (32768 if gpu else 1024)
    result = {
        **circumstances(torch.device("cuda" if gpu else "cpu")),
        "rounds": options.rounds,
        "block": 5 if gpu else 1,
        "rows": [],
    }
    for tokens in options.tokens:
        with tempfile.TemporaryDirectory() as folder:
            sizes = [f"dataset.size={2 * math.isqrt(tokens)}", f"train.batch_size={max(1, least // tokens)}"]
            row = measure(Path(folder), tokens, [*words, *sizes], options.rounds, result["block"])
        gc.collect()  # of runs, which refer to themselves
        torch.cuda.empty_cache()
        result["rows"].append(row)
        show(row, result)
        write(options.out, result)
    return result


def measure(folder: Path, tokens: int, words: Sequence[str], rounds: int, block: int) -> dict:
    """A row: what a step of each kind costs at one length; kinds that fail have the reason in the place of numbers."""
    kinds, failed, facts = {}, {}, {}

    def tried(name: str, work: Callable[[], object]) -> object:
        """What some work returns; where it fails, its kind is out, and the memory of it is given back."""
        try:
            return work()
        except Exception as error:  # memory, kernels and compilers fail in many ways; other kinds go on
            failed[name] = why_failed(error)
        if name in kinds:
            kinds[name][0].network.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        return None

    for pair, model in MODELS.items():
        run = tried(pair[0], lambda model=model, pair=pair: open_run(folder / pair[0], [*model, *words]))
        if run is None:
            failed[pair[1]] = failed[pair[0]]
            continue
        cfg = run.cfg
        kinds[pair[0]] = run, replace(cfg, train=replace(cfg.train, routes_until=0))
        kinds[pair[1]] = run, replace(cfg, train=replace(cfg.train, routes_until=None))
        facts = facts or facts_of(run)

    def turn(name: str, steps: int = block) -> float:
        """Milliseconds of a step."""
        run, run.cfg = kinds[name][0], kinds[name][1]
        return 1000 * take_steps(run, steps) / steps

    first, peaks = {}, {}
    for name in list(kinds):
        first[name] = tried(name, lambda name=name: turn(name, 1))
        if name not in failed:
            peaks[name] = tried(name, lambda name=name: peak_memory(kinds[name][0], lambda: turn(name, 1)))
    times = {name: [] for name in kinds if name not in failed}
    for number in range(rounds):
        for name in list(times) if number % 2 == 0 else list(times)[::-1]:
            if name not in failed and (ms := tried(name, lambda name=name: turn(name))) is not None:
                times[name].append(ms)
    row = {"tokens": tokens, **facts, "kinds": {}}
    for name in KINDS:
        if name in failed:
            row["kinds"][name] = {"failed": failed[name]}
            continue
        run, cfg = kinds[name]
        flops = run.network.forward_flops(() if cfg.train.routes_until == 0 else cfg.model.routes)
        ms = statistics.median(times[name])
        row["kinds"][name] = {"ms": ms, "ms_per_1000": 1000 * ms / tokens / facts["batch"], "peak_gb": peaks[name]}
        row["kinds"][name] |= {"forward_flops": flops, "first_step_s": first[name] / 1000}
        dense = next((pair[0] for pair in MODELS if pair[1] == name), "DiT")
        if name != dense and dense not in failed:
            ratios = [a / b for a, b in zip(times[dense], times[name])]
            row["kinds"][name] |= {"against": dense, "ratio": statistics.median(ratios)}
            row["kinds"][name] |= {"ratios": [min(ratios), max(ratios)]}
            row["kinds"][name] |= {"flops_ratio": kinds[dense][0].network.forward_flops() / flops}
    return row


def facts_of(run: Run) -> dict:
    """What all kinds of a row have in common."""
    (route,) = check_routes(run.cfg.model.routes, run.cfg.model.depth)
    return {
        "batch": run.cfg.train.batch_size,
        "width": run.cfg.model.hidden_size,
        "depth": run.cfg.model.depth,
        "route": [route.start, route.end],
        "precision": run.precision,
        "compiled": run.network.blocks[0]._compiled_call_impl is not None,
        "threads": torch.get_num_threads(),
    }


def show(row: dict, result: dict) -> None:
    """Print a row's table, with what it is of."""
    if "batch" not in row:
        print(f"\n{row['tokens']:,} tokens: {row['kinds']['DiT']['failed']}")
        return
    start, end = row["route"]
    scaled = "" if row["depth"] == 12 else " (in the place of S's 12)"
    print(
        f"\n{row['tokens']:,} tokens, batch {row['batch']}: width {row['width']}, {row['depth']} blocks{scaled}, "
        f"r({start}→{end}), {result['device']}, {row['precision']}, {'' if row['compiled'] else 'not '}compiled, "
        f"{row['threads']} threads, torch {result['torch']}, {result['rounds']} turns of {result['block']} steps\n"
    )
    print("| kind | ms a step | ms for 1,000 tokens | GB | times faster (over the turns) | FLOPs allow |")
    print("|---|---|---|---|---|---|")
    for name, cost in row["kinds"].items():
        if "failed" in cost:
            print(f"| {name} | {cost['failed']} | | | | |")
            continue
        ratio = " | "
        if "ratio" in cost:
            low, high = cost["ratios"]
            ratio = f"{cost['ratio']:.2f} than {cost['against']} ({low:.2f}..{high:.2f}) | {cost['flops_ratio']:.2f}"
        cells = f"{cost['ms']:,.1f} | {cost['ms_per_1000']:.2f} | {cost['peak_gb']:.2f}"
        print(f"| {name} | {cells} | {ratio} |", flush=True)


def crossings(rows: Sequence[dict]) -> tuple[list[str], dict[str, dict[str, float]]]:
    """From how many tokens on a kind costs less than another: as a table's lines, and by measure, name → tokens."""
    pairs = [(routed, dense) for dense, routed in MODELS] + [(name, "TREAD") for name in LINEAR]
    lines = ["\n| this costs less than that | in time | in memory |", "|---|---|---|"]
    places = {measure: {} for measure in MEASURES}
    for name, other in pairs:
        cells = []
        for measure in MEASURES:
            points = [(row["tokens"], *(row["kinds"][kind].get(measure) for kind in (name, other))) for row in rows]
            cell, place = crossing([point for point in points if None not in point])
            cells.append(cell)
            places[measure] |= {f"{name} below {other}": place} if place else {}
        lines.append(f"| {name} than {other} | {' | '.join(cells)} |")
    return lines, places


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
    """Time and memory against tokens; crossing points are named lines. Says so where matplotlib is missing."""
    rows, panels = result["rows"], []
    batches = ", ".join(str(row.get("batch", "–")) for row in rows)
    for measure, label in MEASURES.items():
        lines = []
        for name in KINDS:
            points = [(row["tokens"], row["kinds"][name][measure]) for row in rows if measure in row["kinds"][name]]
            lines += [Line(name, *zip(*points), dashed=name in ROUTED)] if points else []
        title = f"{result['device']}, batches of {batches}"
        panels.append(Panel(title, "tokens", label, lines, log="xy", places=places[measure]))
    try:
        save_panels(path, panels, columns=2)
    except ImportError as error:
        print(f"warning: no figure is drawn ({error}); elsewhere, from=… draws it of what out=… wrote")


if __name__ == "__main__":
    begin(main)
