"""Speed of scoring, each against its plain twin in the same run: python benchmarks/scoring.py [parts] [overrides]

    frechet    Fréchet distance at 2,048 dimensions, against scipy's sqrtm
    precision  precision and recall of 10,000 × 10,000 × 2,048, against torch.cdist and sort: time, and peak memory
    features   Inception features of 256 px pictures, against the bare network on tensors that are ready
    sampler    the objective's own steps (EDM: Heun's 40), against the network calls alone
    chain      pictures/s from seeds to features: sampler, Stable Diffusion's decoder, Inception

All of them if none is named. Networks have random weights: what they know takes no time. Overrides are train.py's and
choose the network that samples, by default experiment=imagenet256_s2, on a GPU imagenet256_xl2; also batch=4 and
repeats=5.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.linalg
import torch
from timing import DEVICE, Turns, begin, composed, options_of, seconds, take_turns
from torch import Tensor

from tread.checkpoints.network import build_network, process_of
from tread.diffusion.sampling import Model, Sampler, draw, to_pictures
from tread.encoders import autoencoder
from tread.encoders.inception import Inception, extract, resize
from tread.evaluation import metrics
from tread.runtime.device import autocast, device_name, exact, use_cores, use_precision
from tread.runtime.files import size_text
from tread.runtime.schema import Count
from tread.training import settings

GPU = DEVICE.type == "cuda"


@dataclass(frozen=True)
class Options:
    batch: Count = 64 if GPU else 4
    repeats: Count = 5


def compare(ours: Callable[[], object], plain: Callable[[], object], repeats: int) -> tuple[Turns, Turns, str]:
    """The costs of both, taking turns, and how much faster ours is, in words."""
    turns = take_turns({"ours": ours, "plain": plain}, repeats)
    ratios = turns["plain"].over(turns["ours"])
    faster = f"{statistics.median(ratios):.2f} times faster ({ratios[0]:.2f}..{ratios[-1]:.2f})"
    return turns["ours"], turns["plain"], faster


def overhead(ours: Turns, bare: Turns) -> str:
    """The time that ours takes beyond the bare calls, in words."""
    more = [100 * (ratio - 1) for ratio in ours.over(bare)]
    return f"{statistics.median(more):.1f}% overhead ({more[0]:.1f}..{more[-1]:.1f}%)"


def frechet(cfg: settings.Settings, options: Options) -> str:
    rng, distances = np.random.default_rng(0), {}
    mixing = rng.standard_normal((2048, 2048)) * np.exp(-np.arange(2048) / 300)
    sets = [metrics.Moments.of(rng.standard_normal((5000, 2048)) @ mixing.T).gaussian for _ in range(2)]

    def ours() -> None:
        distances["ours"] = metrics.frechet_distance(*sets[0], *sets[1])

    def plain() -> None:
        (m1, c1), (m2, c2) = sets
        root = scipy.linalg.sqrtm(c1 @ c2).real
        distances["plain"] = (m1 - m2) @ (m1 - m2) + np.trace(c1 + c2 - 2 * root)

    mine, roots, faster = compare(ours, plain, options.repeats)
    difference = abs(distances["ours"] - distances["plain"]) / distances["plain"]
    return f"{mine.median:.2f} s, sqrtm {roots.median:.2f} s: {faster}, relative difference {difference:.0e}"


def naive(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Precision and recall, with whole matrices of distances, sorted."""
    radius_x, radius_y = (torch.cdist(z, z).sort(dim=1).values[:, 3] for z in (x, y))
    across = torch.cdist(y, x)
    precision, recall = (near.any(dim=1).float().mean().item() for near in (across <= radius_x, across.T <= radius_y))
    return precision, recall


def precision(cfg: settings.Settings, options: Options) -> str:
    torch.manual_seed(0)
    x, y = (torch.rand(10_000, 2048, device=DEVICE) for _ in range(2))
    with exact():
        ours, plain, faster = compare(lambda: metrics.precision_recall(x, y), lambda: naive(x, y), options.repeats)
    return (
        f"{ours.median:.2f} s, cdist and sort {plain.median:.2f} s: {faster}; peak memory {size_text(ours.held)}, "
        f"{size_text(plain.held)}"
    )


def open_inception() -> Inception:
    return Inception(with_classes=True).to(DEVICE, memory_format=torch.channels_last).eval()


def features(cfg: settings.Settings, options: Options) -> str:
    network, count = open_inception(), 128 if GPU else 8
    pictures = torch.randint(0, 256, (count, 3, 256, 256), dtype=torch.uint8)
    ready = resize((pictures.to(DEVICE).float() - 128) / 128).contiguous(memory_format=torch.channels_last)

    @torch.no_grad()
    def bare() -> None:
        with exact():
            network(ready)

    ours, plain, _ = compare(lambda: extract(network, pictures), bare, 4 * options.repeats)
    return f"{count / ours.median:.1f} pictures/s, bare network {count / plain.median:.1f}: {overhead(ours, plain)}"


def open_sampler(cfg: settings.Settings, batch: int) -> tuple[Model, Tensor, Sampler]:
    """A network with random weights, the labels of a batch, and the objective's own sampler."""
    model = Model(process_of(cfg), build_network(cfg).to(DEVICE).eval().requires_grad_(False))
    plan = Sampler.of(model.process, None, None, batch, use_precision(cfg.train.precision, DEVICE))
    return model, torch.arange(batch) % cfg.dataset.num_classes, plan


def sampler(cfg: settings.Settings, options: Options) -> str:
    (model, labels, plan), batch = open_sampler(cfg, options.batch), options.batch
    x = torch.randn(batch, cfg.dataset.channels, cfg.dataset.size, cfg.dataset.size, device=DEVICE)
    t, y, nfe = torch.zeros(batch, device=DEVICE), labels.to(DEVICE), plan.nfe(model.process)

    @torch.no_grad()
    def calls() -> None:
        with autocast(DEVICE, plan.precision):
            for _ in range(nfe):
                model.network(x, t, y)

    ours, bare, _ = compare(lambda: [*draw(model, range(batch), labels, plan)], calls, options.repeats)
    return (
        f"{cfg.name}, batch {batch}, {plan.precision}: {ours.median:.2f} s, its {nfe} network calls {bare.median:.2f} "
        f"s: {overhead(ours, bare)}"
    )


def chain(cfg: settings.Settings, options: Options) -> str:
    import diffusers

    (model, labels, plan), batch = open_sampler(cfg, options.batch), options.batch
    vae = diffusers.AutoencoderKL.from_config(autoencoder.SD_CONFIG).eval()
    vae.to(DEVICE, memory_format=torch.channels_last)
    inception, made = open_inception(), {}

    @torch.no_grad()
    def decode(x: Tensor) -> Tensor:
        return autoencoder.to_uint8(vae.decode(x / 0.18215).sample)

    for _ in range(2):  # the first one warms up
        stages = {
            "sampling": lambda: made.update(x=next(draw(model, range(batch), labels, plan))),
            "decoding": lambda: made.update(pictures=to_pictures(made["x"], decode)),
            "features": lambda: extract(inception, made["pictures"]),
        }
        times = {name: seconds(stage) for name, stage in stages.items()}
    total = sum(times.values())
    shares = ", ".join(f"{name} {100 * value / total:.1f}%" for name, value in times.items())
    return f"{cfg.name}, batch {batch}, {plan.precision}: {batch / total:.2f} pictures/s ({shares})"


PARTS = {"frechet": frechet, "precision": precision, "features": features, "sampler": sampler, "chain": chain}


def main() -> None:
    named = [word for word in sys.argv[1:] if word in PARTS] or PARTS
    sys.argv[1:] = [word for word in sys.argv[1:] if word not in PARTS]
    options, overrides = options_of(Options)
    cfg, _ = settings.complete(
        composed("config", [f"experiment={'imagenet256_xl2' if GPU else 'imagenet256_s2'}", *overrides])
    )
    threads = "" if GPU else f", {use_cores(None, processes=1)} threads"
    print(f"{device_name(DEVICE)}, torch {torch.__version__}{threads}, {options.repeats} repeats")
    for name in named:
        print(f"  {name:<10}{PARTS[name](cfg, options)}", flush=True)


if __name__ == "__main__":
    begin(main)
