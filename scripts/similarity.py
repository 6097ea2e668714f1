"""Measures how similar the outputs of a network's blocks are: python scripts/similarity.py checkpoint=results/my-run

Computes the cosine similarity of every two blocks' outputs, once on all tokens and once while some tokens skip blocks,
as routes=… says (null: as the checkpoint's own routes do). Writes similarity.json and similarity.png (a heat map for
each case), replacing old ones. Method: tread/evaluation/similarity.py. All options: configs/similarity.yaml.
"""

from pathlib import Path

if __name__ == "__main__":
    import checkout  # noqa: F401

from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor
from tqdm import tqdm

from routing_module import Route
from tread.checkpoints import checkpoint
from tread.checkpoints.for_sampling import open_network
from tread.checkpoints.weights import KINDS
from tread.drawing.charts import save_heat_maps
from tread.evaluation.similarity import adjacent, noised_states, open_latents, settle_routes, similarity
from tread.routing.ids import describe_route
from tread.runtime.cli import door, open_door
from tread.runtime.device import device_name, use_cores, use_precision
from tread.runtime.files import check_place, explain_failure, write_json
from tread.runtime.schema import Count, CountOrZero
from tread.runtime.tensor_files import Weights
from tread.runtime.versions import versions


@dataclass(frozen=True)
class Options:
    checkpoint: str
    routes: tuple[Route, ...] | None
    samples: Count
    noise_levels: Count
    seed: CountOrZero
    batch_size: Count
    cpu_threads: Count | None
    weights: Weights
    data: str | None
    out: str | None


@door(Options, "stopped; nothing was written")
def main(options: Options) -> None:
    """Compare the blocks' outputs and write the results. ValueError or OSError if options or files do not fit."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    use_precision("fp32", device)
    use_cores(options.cpu_threads, processes=1)
    saved = open_network(checkpoint.find(options.checkpoint), options.weights)
    routes = settle_routes(saved, options.routes)
    data = open_latents(saved, options.data)
    if options.out is None and options.checkpoint.startswith("hf:"):
        raise ValueError(f"checkpoint={options.checkpoint} has no folder of yours: name one for the files, out=…")
    folder = Path(options.out).expanduser() if options.out else saved.found.folder
    check_place(folder, 0)
    model = saved.load(device)
    tokens, grid = model.network.num_tokens, model.network.grid
    words = ", ".join(describe_route(route, tokens, grid) for route in routes)
    levels = saved.process.evaluation_levels(options.noise_levels)
    weights = f"{KINDS[saved.weights]} weights of step {saved.found.step:,}, {saved.cfg.model.depth} blocks"
    print(f"  checkpoint  {saved.found.folder}: {weights}")
    at = f"{len(levels)} noise levels, {saved.process.level_name} {levels[0]:.3g} to {levels[-1]:.3g}"
    print(f"  samples     {options.samples:,} pairs of the {len(data):,} samples in {data.folder} and {at}")

    matrices = {}
    for name, seen in ({"dense": ()} | ({"routed": routes} if routes else {})).items():
        called, told = ("routed", f"; {words}") if seen else ("all tokens", "")
        routed = replace(model, routes=seen)
        batches = noised_states(routed, data, options.samples, options.noise_levels, options.seed, options.batch_size)
        count = -(-options.samples // options.batch_size)
        matrix = matrices[name] = similarity(tqdm(batches, desc=name, total=count, unit="batch", leave=False))
        if matrix.diagonal().isnan().any():
            raise ValueError(f"the tokens of {called} are not finite: the network's weights are broken")
        ends = f"{matrix[0, -1]:.4f} from the embedding to the end{told}"
        print(f"  {called:<10}  {adjacent(matrix):.4f} from a block to the next, {ends}")
    if not routes:
        print("  routed      no: the network has no route; routes=… compares under one, see configs/similarity.yaml")
    record = {
        "checkpoint": str(saved.found.folder),
        "step": saved.found.step,
        "sha256": saved.sha256,
        "data": str(data.folder),
        **{name: getattr(options, name) for name in ("weights", "samples", "noise_levels", "seed")},
        "routes": [asdict(route) for route in routes],
        "route": words or None,
        "adjacent": {name: round(adjacent(matrix), 6) for name, matrix in matrices.items()},
        "dense": as_json(matrices["dense"]),
        "routed": as_json(matrices["routed"]) if routes else None,
        "device": device_name(device),
        "versions": versions(),
    }
    titles = dict(zip(("all tokens", words.replace(", ", "\n")), (matrix.numpy() for matrix in matrices.values())))
    files = [folder / "similarity.json", folder / "similarity.png"]
    with explain_failure(folder):
        write_json(files[0], record)
        names, label = ["in", *range(len(model.network.blocks))], "behind block (in: the embedding)"
        save_heat_maps(files[1], titles, {}, names, names, (label, label))
    print(f"  written     {', '.join(map(str, files))}")


def as_json(matrix: Tensor) -> list[list[float | None]]:
    """Convert a matrix to rows of numbers (6 decimals); NaN, where two blocks' outputs share no token, becomes None."""
    return [[None if value != value else round(value, 6) for value in row] for row in matrix.tolist()]


if __name__ == "__main__":
    open_door(main)
