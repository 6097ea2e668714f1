"""Draw samples from a checkpoint: python sample.py checkpoint=results/digits-tread/latest

All options: configs/sample.yaml. How samples are drawn: tread/diffusion/sampling.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig
from tqdm import tqdm

from tread.checkpoints import checkpoint
from tread.checkpoints.trained import open_trained, open_weak
from tread.data import autoencoder
from tread.data.images import save_grid
from tread.diffusion.guidance import Guidance
from tread.diffusion.sampling import (
    Sampler,
    check_labels,
    check_ratios,
    draw_pictures,
    relative_cost,
    spread_classes,
)
from tread.diffusion.solvers import Churn, Solver
from tread.runtime import schema
from tread.runtime.cli import explained, open_door, plain
from tread.runtime.device import Precision, use_cores, use_precision
from tread.runtime.files import check_place
from tread.runtime.schema import Count
from tread.runtime.tensor_files import Weights


def parse_seeds(seeds: str | int | Sequence[int]) -> list[int]:
    """ "0-15" → 0..15, both included; a number or a list of numbers as it is."""
    if isinstance(seeds, str) and (match := re.fullmatch(r"(\d+)-(\d+)", seeds)) and int(match[1]) <= int(match[2]):
        return list(range(int(match[1]), int(match[2]) + 1))
    seeds = [seeds] if isinstance(seeds, int) else seeds
    if isinstance(seeds, str) or not seeds:
        raise ValueError(f"seeds is {seeds!r}, but must be a-b with a at most b, a number or a list of numbers")
    return list(seeds)


@dataclass(frozen=True)
class Options:
    """configs/sample.yaml."""

    checkpoint: str
    classes: tuple[int, ...] | None
    seeds: str | int | tuple[int, ...]
    steps: Count | None
    solver: Solver | None
    churn: float | Churn | None
    batch_size: Count
    precision: Precision
    cpu_threads: Count | None
    weights: Weights
    guidance: Guidance
    decode: bool
    autoencoder: str | None
    out: str

    def __post_init__(self) -> None:
        if Path(self.out).suffix != ".png":
            raise ValueError(f"out is {self.out!r}, but must end in .png")


@hydra.main(version_base="1.3", config_path="configs", config_name="sample")
def main(composed: DictConfig) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with explained():
        options = schema.read(plain(composed), Options)
        seeds = parse_seeds(options.seeds)
        precision = use_precision(options.precision, device)
        use_cores(options.cpu_threads, processes=1)
        trained = open_trained(checkpoint.find(Path(options.checkpoint).expanduser()), options.weights)
        weaker = open_weak(options.guidance, trained)
        classes = options.classes or spread_classes(trained.cfg.dataset.num_classes, 10)
        all_seeds, labels = seeds * len(classes), torch.tensor(classes).repeat_interleave(len(seeds))
        batch_size = min(options.batch_size, len(all_seeds))
        churn = Churn(options.churn) if isinstance(options.churn, float) else options.churn
        given = (options.steps, options.solver, batch_size, precision, options.guidance, churn)
        sampler = Sampler.of(trained.process, *given)
        check_labels(labels, trained.cfg.dataset.num_classes)
        nfe = sampler.nfe(trained.process)
        outlines = [one and one.outline(options.guidance) for one in (trained, weaker)]
        check_ratios(sampler, *outlines)
        cost = relative_cost(sampler, *outlines)
        check_place(Path(options.out).parent, 0)
        model, weak = trained.load(device, options.guidance), weaker and weaker.load(device, options.guidance)
        decoder = autoencoder.preview
        if options.decode:
            decoder = autoencoder.load_decoder(trained.latents, device, options.autoencoder)
        stream = draw_pictures(model, decoder, all_seeds, labels, sampler, weak, check=True)
        batches = -(-len(all_seeds) // sampler.batch_size)
        pictures = torch.cat(list(tqdm(stream, desc="sampling", total=batches, unit="batch")))
        save_grid(Path(options.out), pictures.numpy(), columns=len(seeds))
    print(
        f"{options.out}: rows are classes {list(classes)}, columns seeds {options.seeds}; step {trained.found.step}, "
        f"{options.weights} weights, {sampler.solver} with {sampler.steps} steps"
        f"{f' and churn {sampler.churn.amount:g}' if sampler.churn.amount else ''}, NFE {nfe}, guidance "
        f"{options.guidance.describe()}, {cost:.3f} times the FLOPs of no guidance, "
        f"{precision} on {device.type}"
    )


if __name__ == "__main__":
    open_door(main, schema.known_keys(Options))
