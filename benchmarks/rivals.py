"""What DiT, TREAD, MaskDiT, SPRINT and their rivals cost: python benchmarks/rivals.py [time=S,B batch=12,6 …]

For each size of DiT's at 256 px (4×32×32 latents, patch 2, 1000 classes): parameters, and GMAC of a forward pass of one
image in training and in sampling, by arithmetic. Rows of MDT, MDTv2 and SD-DiT are parameters alone, of their papers.
With time=…, train.py's own steps of the four, in turns in one process: the median time and the peak memory, over
DiT's, beside what the FLOPs allow. Other overrides are train.py's, of the timed steps.

    time=S,B      sizes that are timed (those of S, B, L, XL; none)
    batch=12,6    images a step, of each of them (16 of all)
    pairs=12      turns that are measured, of a step each (5 on a GPU) (6)
    out=…         a JSON file to write as well

python benchmarks/rivals.py                                                        # arithmetic alone
python benchmarks/rivals.py time=S,B batch=12,6                                    # CPU
python benchmarks/rivals.py time=S,B,L,XL batch=256,256,128,64 pairs=12            # GPU
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from flops import SIZES, build, read
from step_time import measure, open_run, own_options, turns, write
from timing import begin

from tread.runtime.schema import check_overrides
from tread.training import settings

MODELS = {"DiT": "dit", "TREAD": "tread", "MaskDiT": "maskdit", "SPRINT": "sprint"}  # name → model=
NAMES = {name: size.removesuffix("/2") for size, name in SIZES.items()}  # experiment's → as in the table

# millions, by size, and where they are from; nothing here runs these
LISTED = {
    "MDT": ({"S": 35.8, "B": 141.5, "L": 477.6, "XL": 699.8}, "derived from arXiv 2303.14389"),
    "MDTv2": ({"S": 38.5, "B": 150.9, "XL": 742.3}, "derived from arXiv 2303.14389"),
    "SD-DiT": ({"XL": 740}, "published (Table S7); not derivable from arXiv 2403.17004, which has no code"),
}
TABLE_S7 = {"DiT": 675, "TREAD": 675, "MaskDiT": 730}  # millions at XL, in the paper (arXiv 2501.04765)


COUNTED = """\
GMAC: billions of multiply-adds of a forward pass of one image at 256 px, by arithmetic; a training step costs
3 times as much as its forward pass. In training TREAD takes half of the tokens around its route, MaskDiT's
encoder sees half of them and its decoder (8 blocks, width 512, at every size) all, SPRINT's sparse part, all
but 4 blocks, a quarter. A sampling forward has all tokens in all blocks, the decoder's and the fusion too.

| size | model | parameters, M | training GMAC | over DiT's | sampling GMAC | over DiT's | parameters are |
|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Row:
    """A model of a size; costs are multiply-adds of a forward pass of one image, None where they are not counted.

    parameters  millions.
    training    with the tokens that a training step leaves out.
    sampling    with all tokens.
    source      where the parameters are from.
    """

    size: str
    model: str
    parameters: float
    training: float | None
    sampling: float | None
    source: str


def rows() -> list[Row]:
    """Of all sizes, in each DiT first."""
    counted = []
    for experiment, size in NAMES.items():
        for name, model in MODELS.items():
            cfg = read(f"experiment=imagenet256_{experiment}", f"model={model}")
            network = build(cfg).network
            costs = [network.forward_flops(routes) / 2 for routes in (cfg.model.routes, ())]
            source = f"counted; Table S7: {TABLE_S7[name]}" if size == "XL" and name in TABLE_S7 else "counted"
            counted.append(Row(size, name, sum(p.numel() for p in network.parameters()) / 1e6, *costs, source))
        counted += [Row(size, name, by[size], None, None, said) for name, (by, said) in LISTED.items() if size in by]
    return counted


def main() -> None:
    given, overrides = own_options({"time": "", "batch": "16", "pairs": "6", "out": None})
    check_overrides(overrides, [*settings.known_keys(), "experiment"])
    sizes, pairs = given["time"].split(",") if given["time"] else [], turns(given["pairs"])
    if unknown := {*sizes} - {*NAMES.values()}:
        raise ValueError(f"time names {', '.join(sorted(unknown))}, but the sizes are {', '.join(NAMES.values())}")
    images = given["batch"]
    batches = images.split(",") * (len(sizes) if "," not in images else 1)
    whole = all(number.isdigit() and int(number) for number in batches)
    if not whole or (sizes and len(batches) != len(sizes)):
        raise ValueError(f"batch is {images}, but must be a positive number, or one for each size of time=…")
    counted = rows()
    result = {"counted": [asdict(row) for row in counted], "timed": {}}
    show_counted(counted)
    write(given["out"], result)
    for size, batch in zip(sizes, batches):
        with tempfile.TemporaryDirectory() as folder:
            result["timed"][size] = measure(kinds_of(Path(folder), size, batch, overrides), pairs, staged=False)
        show_timed(size, result["timed"][size])
        write(given["out"], result)


def kinds_of(folder: Path, size: str, batch: str, overrides: Sequence[str]) -> dict:
    """Runs of the four with their settings, by name, DiT's first, which is TREAD's network without the route."""
    experiment = next(experiment for experiment, name in NAMES.items() if name == size)
    said = [f"experiment=imagenet256_{experiment}", f"train.batch_size={batch}", *overrides]
    routed = {name: model for name, model in MODELS.items() if name != "DiT"}
    runs = {name: open_run(folder / model, [*said, f"model={model}"]) for name, model in routed.items()}
    dense = runs["TREAD"].cfg
    kinds = {"DiT": (runs["TREAD"], replace(dense, train=replace(dense.train, routes_until=0)))}
    return kinds | {name: (run, run.cfg) for name, run in runs.items()}


def show_counted(counted: Sequence[Row]) -> None:
    """Print what is arithmetic."""
    print(COUNTED)
    dit = {row.size: row for row in counted if row.model == "DiT"}
    for row in counted:
        costs = ((row.training, dit[row.size].training), (row.sampling, dit[row.size].sampling))
        cells = [f"{cost / 1e9:.2f} | {cost / base:.3f}" if cost else "– | –" for cost, base in costs]
        places = 2 if row.source.startswith("counted") else 0 if row.parameters == int(row.parameters) else 1
        print(f"| {row.size} | {row.model} | {row.parameters:.{places}f} | {' | '.join(cells)} | {row.source} |")


def show_timed(size: str, result: dict) -> None:
    """Print what was measured of a size. Of memory, FLOPs say nothing."""
    compiled = "compiled" if result["compiled"] else "not compiled"
    print(
        f"\n{size}, batch {result['batch']}, {result['device']}, {result['precision']}, {compiled}, "
        f"{result['threads']} threads, torch {result['torch']}, {result['pairs']} turns of {result['block']} steps"
    )
    print("memory: a run's weights, their average, the optimizer's state and the most that a step holds beside them\n")
    print("| size | model | ms a step | over DiT's (95% of the median) | FLOPs allow | of that | GB | over DiT's |")
    print("|---|---|---|---|---|---|---|---|")
    for name, row in result["kinds"].items():
        cells, memory = " | | ", row["peak_gb"] / result["kinds"]["DiT"]["peak_gb"]
        if "ratio" in row:  # DiT's time over this one's
            low, high = row["ratio_95"]
            cells = f"{1 / row['ratio']:.3f} ({1 / high:.3f}..{1 / low:.3f}) | {1 / row['ideal']:.3f} | "
            cells += f"{1 / row['of_ideal']:.3f}"
        print(f"| {size} | {name} | {row['ms']:,.0f} | {cells} | {row['peak_gb']:.2f} | {memory:.3f} |", flush=True)


if __name__ == "__main__":
    begin(main)
