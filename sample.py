"""Draw samples from a checkpoint: python sample.py checkpoint=results/digits-tread/latest

The functions are those of train.py's grids and of fid.py: seeds and labels in, a stream of pictures out.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf
from torch import Tensor, nn
from tqdm import tqdm

import autoencoder
import checkpoint
import settings
from build import build_network
from compute import autocast, use_precision
from edm import EDM, heun
from guidance import Guidance, Routes, guided
from latents import Latents
from pictures import save_grid
from randomness import generator, seeded_normal, seeded_uniform
from routing_module import Route, draw_ids

LABELS = ("random", "balanced")


@dataclass(frozen=True)
class Sampler:
    """How samples are drawn: all that decides about them beside network, seed and label.

    steps       of Heun's method, N; a denoiser is called 2N−1 times.
    batch_size  samples at once. The last batch is padded to it, so that all have one shape.
    routes      those that the network was trained with, which sparse guidance needs.
    """

    steps: int = 40
    batch_size: int = 64
    precision: str = "fp32"
    guidance: Guidance = Guidance()
    routes: tuple[Route, ...] = ()

    @property
    def calls(self) -> int:
        """Times that the denoiser is called for a sample."""
        return 2 * self.steps - 1

    @property
    def nfe(self) -> int:
        """Network function evaluations a sample, each branch of a guidance counted."""
        return self.calls * len(self.guidance.branches)


def draw(edm: EDM, network: nn.Module, seeds: Sequence[int], labels: Tensor, sampler: Sampler) -> Iterator[Tensor]:
    """Class-conditional samples by Heun's method, a batch after the other.

    seeds   one for each sample; its noise and route ids depend on it alone.
    labels  (n,) int64 classes, on the CPU.

    Yields network latents (b, C, S, S) fp32 on the network's device, in the order of the seeds. A
    sample's numbers do not depend on what else is drawn, where batches have one shape; in other
    batches they differ by rounding.
    """
    if len(seeds) != len(labels) or not len(seeds):
        raise ValueError(f"{len(seeds)} seeds for {len(labels)} labels: each sample needs one of both")
    if not 0 <= int(labels.min()) <= int(labels.max()) <= network.num_classes:
        raise ValueError(
            f"classes lie in {int(labels.min())}..{int(labels.max())}, but must lie in 0..{network.num_classes - 1}, "
            f"or be {network.num_classes} for no class"
        )
    sigmas = edm.schedule(sampler.steps)
    for start in range(0, len(seeds), sampler.batch_size):
        part, y = list(seeds[start : start + sampler.batch_size]), labels[start : start + sampler.batch_size]
        missing = sampler.batch_size - len(part)
        padded, y = part + part[-1:] * missing, torch.cat([y, y[-1:].expand(missing)])
        yield _draw_batch(edm, network, padded, y, sampler, sigmas)[: len(part)]


def _draw_batch(
    edm: EDM, network: nn.Module, seeds: list[int], labels: Tensor, sampler: Sampler, sigmas: Tensor
) -> Tensor:
    device = next(network.parameters()).device
    shape = (network.in_channels, network.input_size, network.input_size)
    calls = {branch: itertools.count() for branch in sampler.guidance.branches}
    uniform = {  # one draw for each pass and route
        (branch, number): seeded_uniform(seeds, (sampler.calls, network.num_tokens), f"route {number} {branch}")
        for branch, ratio in sampler.guidance.branches.items()
        for number in range(len(sampler.routes) if ratio else 0)
    }
    uniform = {key: value.to(device) for key, value in uniform.items()}

    def routes(branch: str) -> list[tuple[Route, Tensor]]:
        call, ratio = next(calls[branch]), sampler.guidance.branches[branch]
        return [
            (replace(route, selection_ratio=ratio), draw_ids(uniform[branch, number][:, call], ratio))
            for number, route in enumerate(sampler.routes if ratio else ())
        ]

    def denoise(x: Tensor, sigma: Tensor, y: Tensor, routes: Routes) -> Tensor:
        with autocast(device, sampler.precision):
            return edm.denoise(network, x, sigma, y, routes)

    denoiser = guided(denoise, labels.to(device), network.num_classes, sampler.guidance, routes)
    return heun(denoiser, seeded_normal(seeds, shape).to(device), sigmas).float()


def draw_pictures(
    edm: EDM,
    network: nn.Module,
    decoder: autoencoder.Decoder,
    seeds: Sequence[int],
    labels: Tensor,
    sampler: Sampler,
    check: bool = False,
) -> Iterator[Tensor]:
    """`draw`, decoded: yields pictures (b, 1 or 3, H, W) uint8 on the CPU.

    check  raise ValueError for samples that are not finite, which would be scored as black pictures.
    """
    for x in draw(edm, network, seeds, labels, sampler):
        if check and not x.isfinite().all():
            raise ValueError(
                "samples are not finite: the network's weights are broken, "
                f"or {sampler.precision} is too coarse for them"
            )
        padding = x[-1:].expand(sampler.batch_size - len(x), -1, -1, -1)  # one shape for the decoder too
        yield to_pictures(torch.cat([x, padding]), decoder)[: len(x)]


def to_pictures(x: Tensor, decoder: autoencoder.Decoder, batch_size: int = 16) -> Tensor:
    """Network latents (n, C, S, S) → pictures (n, 1 or 3, H, W) uint8 on the CPU, decoded in batches of one shape."""
    size = min(batch_size, len(x))
    padded = torch.cat([x, x[-1:].expand(-len(x) % size, -1, -1, -1)])
    return torch.cat([decoder(part).cpu() for part in padded.split(size)])[: len(x)]


def seeded_labels(seeds: Sequence[int], num_classes: int, mode: str) -> Tensor:
    """(n,) int64 classes, each given by its seed alone.

    mode  "random", uniform over the classes, as reference batches are scored; or "balanced", the
          seed's remainder, so that seeds in a row have each class equally often.
    """
    if mode not in LABELS:
        raise ValueError(f"labels is {mode!r}, but must be one of {', '.join(LABELS)}")
    if mode == "balanced":
        return torch.tensor([seed % num_classes for seed in seeds])
    return torch.tensor([int(torch.randint(num_classes, (), generator=generator(seed, "label"))) for seed in seeds])


def spread_classes(num_classes: int, count: int) -> list[int]:
    """`count` class numbers (at most all), spread evenly from the first to the last."""
    return torch.linspace(0, num_classes - 1, min(count, num_classes)).round().int().tolist()


def parse_seeds(seeds: str | int | Sequence[int]) -> list[int]:
    """ "0-15" → 0..15, both included; a number or a list of numbers as it is."""
    if isinstance(seeds, str) and (match := re.fullmatch(r"(\d+)-(\d+)", seeds)) and int(match[1]) <= int(match[2]):
        return list(range(int(match[1]), int(match[2]) + 1))
    seeds = [seeds] if isinstance(seeds, int) else seeds
    if isinstance(seeds, str) or not seeds:
        raise ValueError(f"seeds is {seeds!r}, but must be a-b with a at most b, a number or a list of numbers")
    return list(seeds)


def load_network(
    found: checkpoint.Checkpoint, weights: str, device: torch.device
) -> tuple[nn.Module, settings.Network]:
    """The network of a checkpoint in eval mode, with weights "ema" or "model", and what its run says of it."""
    config = found.info["config"]
    cfg = settings.read({key: config[key] for key in ("model", "dataset", "edm")}, settings.Network)
    network = build_network(cfg)
    network.load_state_dict(found.tensors(weights))
    return network.to(device).eval().requires_grad_(False), cfg


@dataclass(frozen=True)
class Options:
    """configs/sample.yaml."""

    checkpoint: str
    classes: tuple[int, ...] | None
    seeds: str | int | tuple[int, ...]
    steps: int
    batch_size: int
    precision: str
    weights: str
    guidance: Guidance
    decode: bool
    autoencoder: str | None
    out: str

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}, but must be positive")
        if self.weights not in ("ema", "model"):
            raise ValueError(f"weights is {self.weights!r}, but must be ema or model")
        if Path(self.out).suffix != ".png":
            raise ValueError(f"out is {self.out!r}, but must end in .png")


@hydra.main(version_base="1.3", config_path="configs", config_name="sample")
def main(composed: DictConfig) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        options = settings.read(OmegaConf.to_container(composed, throw_on_missing=True), Options)
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        seeds = parse_seeds(options.seeds)
        precision = use_precision(options.precision, device)
        found = checkpoint.find(Path(options.checkpoint))
        network, cfg = load_network(found, options.weights, device)
        latents = Latents.from_json(found.info["latents"])
        decoder = autoencoder.preview
        if options.decode:
            decoder = autoencoder.load_decoder(latents, device, options.autoencoder)
        classes = options.classes or spread_classes(cfg.dataset.num_classes, 10)
        options.guidance.check(cfg.model.routes, found.info["config"]["train"]["label_drop"])
        all_seeds, labels = seeds * len(classes), torch.tensor(classes).repeat_interleave(len(seeds))
        batch_size = min(options.batch_size, len(all_seeds))
        sampler = Sampler(options.steps, batch_size, precision, options.guidance, cfg.model.routes)
        stream = draw_pictures(cfg.edm, network, decoder, all_seeds, labels, sampler, check=True)
        batches = -(-len(all_seeds) // sampler.batch_size)
        pictures = torch.cat(list(tqdm(stream, desc="sampling", total=batches, unit="batch")))
        save_grid(Path(options.out), pictures.numpy(), columns=len(seeds))
    except (ValueError, OSError, MissingMandatoryValue) as error:
        sys.exit(f"error: {error}")
    print(
        f"{options.out}: rows are classes {list(classes)}, columns seeds {options.seeds}; "
        f"step {found.step}, {options.weights} weights, Heun with {options.steps} steps, NFE {sampler.nfe}, "
        f"guidance {options.guidance.describe()}, {precision} on {device.type}"
    )


if __name__ == "__main__":
    try:
        settings.check_overrides(sys.argv[1:], settings.known_keys(Options))
    except ValueError as error:
        sys.exit(f"error: {error}")
    main()
