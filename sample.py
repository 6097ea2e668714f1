"""Draw samples from a checkpoint: python sample.py checkpoint=results/digits-tread/latest

The functions are what train.py uses for its grids: seeds and labels in, network latents out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
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
from latents import Latents
from pictures import save_grid
from randomness import seeded_normal


def generate(
    edm: EDM,
    network: nn.Module,
    seeds: Sequence[int],
    labels: Tensor,
    steps: int = 40,
    batch_size: int = 64,
    precision: str = "fp32",
    progress: bool = False,
) -> Tensor:
    """Class-conditional samples by Heun's method, all tokens, no guidance.

    seeds   one for each sample; its initial noise depends on it alone.
    labels  (n,) int64 classes, on the CPU.

    Returns network latents (n, C, S, S) fp32 on the CPU, in the order of the seeds.
    """
    device = next(network.parameters()).device
    shape = (network.in_channels, network.input_size, network.input_size)
    if len(seeds) != len(labels) or not len(seeds):
        raise ValueError(f"{len(seeds)} seeds for {len(labels)} labels: each sample needs one of both")
    if not 0 <= int(labels.min()) <= int(labels.max()) <= network.num_classes:
        raise ValueError(
            f"classes lie in {int(labels.min())}..{int(labels.max())}, but must lie in 0..{network.num_classes - 1}, "
            f"or be {network.num_classes} for no class"
        )
    sigmas, done = edm.schedule(steps), []
    for start in tqdm(range(0, len(seeds), batch_size), desc="sampling", unit="batch", disable=not progress):
        y = labels[start : start + batch_size].to(device)
        noise = seeded_normal(list(seeds[start : start + batch_size]), shape).to(device)

        def denoiser(x: Tensor, sigma: Tensor, y: Tensor = y) -> Tensor:
            with autocast(device, precision):
                return edm.denoise(network, x, sigma, y)

        done.append(heun(denoiser, noise, sigmas).float().cpu())
    return torch.cat(done)


def to_pictures(x: Tensor, decoder: autoencoder.Decoder, device: torch.device, batch_size: int = 16) -> Tensor:
    """Network latents (n, C, S, S) → pictures (n, 1 or 3, H, W) uint8 on the CPU."""
    return torch.cat([decoder(part.to(device)).cpu() for part in x.split(batch_size)])


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
        x = generate(
            cfg.edm,
            network,
            seeds * len(classes),
            torch.tensor(classes).repeat_interleave(len(seeds)),
            steps=options.steps,
            batch_size=options.batch_size,
            precision=precision,
            progress=True,
        )
        save_grid(Path(options.out), to_pictures(x, decoder, device).numpy(), columns=len(seeds))
    except (ValueError, OSError, MissingMandatoryValue) as error:
        sys.exit(f"error: {error}")
    print(
        f"{options.out}: rows are classes {list(classes)}, columns seeds {options.seeds}; "
        f"step {found.step}, {options.weights} weights, Heun with {options.steps} steps, {precision} on {device.type}"
    )


if __name__ == "__main__":
    try:
        settings.check_overrides(sys.argv[1:], settings.known_keys(Options))
    except ValueError as error:
        sys.exit(f"error: {error}")
    main()
