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

import numpy as np
import scipy.linalg
import torch
from timing import begin, composed, most_allocated, seconds

from tread.checkpoints.network import build_network, process_of
from tread.diffusion.sampling import Model, Sampler, draw, to_pictures
from tread.encoders import autoencoder
from tread.encoders.inception import Inception, extract, resize
from tread.evaluation import metrics
from tread.runtime.device import autocast, device_name, exact, use_cores, use_precision
from tread.runtime.files import size_text
from tread.training import settings

PARTS = ("frechet", "precision", "features", "sampler", "chain")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def compare(ours: Callable[[], object], plain: Callable[[], object], repeats: int) -> tuple[float, float, list[float]]:
    """Medians of both in seconds, alternating, and the ratios plain/ours of the pairs, sorted."""
    pairs = [(seconds(ours, DEVICE), seconds(plain, DEVICE)) for _ in range(repeats)]
    a, b = (statistics.median(times) for times in zip(*pairs))
    return a, b, sorted(second / first for first, second in pairs)


def overhead(ours: Callable[[], object], bare: Callable[[], object], repeats: int) -> tuple[float, float, str]:
    """Medians of both in seconds, and how much longer ours takes, in words."""
    a, b, ratios = compare(ours, bare, repeats)
    more = [100 * (1 / ratio - 1) for ratio in ratios]
    return a, b, f"{statistics.median(more):.1f}% overhead ({more[-1]:.1f}..{more[0]:.1f}%)"


def frechet(repeats: int) -> str:
    rng = np.random.default_rng(0)
    mixing = rng.standard_normal((2048, 2048)) * np.exp(-np.arange(2048) / 300)
    sets = [metrics.Moments.of(rng.standard_normal((5000, 2048)) @ mixing.T).gaussian for _ in range(2)]
    distances = {}

    def ours() -> None:
        distances["ours"] = metrics.frechet_distance(*sets[0], *sets[1])

    def plain() -> None:
        (m1, c1), (m2, c2) = sets
        root = scipy.linalg.sqrtm(c1 @ c2).real
        distances["plain"] = (m1 - m2) @ (m1 - m2) + np.trace(c1 + c2 - 2 * root)

    a, b, ratios = compare(ours, plain, repeats)
    difference = abs(distances["ours"] - distances["plain"]) / distances["plain"]
    return (
        f"{a:.2f} s, sqrtm {b:.2f} s: {statistics.median(ratios):.1f} times faster "
        f"({ratios[0]:.1f}..{ratios[-1]:.1f}), relative difference {difference:.0e}"
    )


def naive(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Precision and recall, with whole matrices of distances, sorted."""
    radius_x, radius_y = (torch.cdist(z, z).sort(dim=1).values[:, 3] for z in (x, y))
    across = torch.cdist(y, x)
    precision, recall = (near.any(dim=1).float().mean().item() for near in (across <= radius_x, across.T <= radius_y))
    return precision, recall


def precision(repeats: int) -> str:
    torch.manual_seed(0)
    x, y = (torch.rand(10_000, 2048, device=DEVICE) for _ in range(2))
    with exact():
        calls = (lambda: metrics.precision_recall(x, y), lambda: naive(x, y))
        a, b, ratios = compare(*calls, repeats)
        peaks = [most_allocated(call, DEVICE) for call in calls]
    return (
        f"{a:.2f} s, cdist and sort {b:.2f} s: {statistics.median(ratios):.2f} times faster "
        f"({ratios[0]:.2f}..{ratios[-1]:.2f}); peak memory {size_text(peaks[0])}, {size_text(peaks[1])}"
    )


def features(repeats: int) -> str:
    network = Inception(with_classes=True).to(DEVICE, memory_format=torch.channels_last).eval()
    count = 8 if DEVICE.type == "cpu" else 128
    pictures = torch.randint(0, 256, (count, 3, 256, 256), dtype=torch.uint8)
    ready = resize((pictures.to(DEVICE).float() - 128) / 128).contiguous(memory_format=torch.channels_last)

    @torch.no_grad()
    def bare() -> None:
        with exact():
            network(ready)

    extract(network, pictures)
    a, b, more = overhead(lambda: extract(network, pictures), bare, 4 * repeats)
    return f"{count / a:.1f} pictures/s, bare network {count / b:.1f}: {more}"


def sampler(cfg: settings.Settings, batch: int, repeats: int) -> str:
    network = build_network(cfg).to(DEVICE).eval().requires_grad_(False)
    precision = use_precision(cfg.train.precision, DEVICE)
    model, labels = Model(process_of(cfg), network), torch.arange(batch) % cfg.dataset.num_classes
    options = Sampler.of(model.process, None, None, batch, precision)
    x = torch.randn(batch, cfg.dataset.channels, cfg.dataset.size, cfg.dataset.size, device=DEVICE)
    t, y = torch.zeros(batch, device=DEVICE), labels.to(DEVICE)

    @torch.no_grad()
    def calls() -> None:
        with autocast(DEVICE, precision):
            for _ in range(options.nfe(model.process)):
                network(x, t, y)

    def whole() -> None:
        for _ in draw(model, range(batch), labels, options):
            pass

    with torch.no_grad(), autocast(DEVICE, precision):
        network(x, t, y)
    a, b, more = overhead(whole, calls, repeats)
    nfe = options.nfe(model.process)
    return f"{cfg.name}, batch {batch}, {precision}: {a:.2f} s, its {nfe} network calls {b:.2f} s: {more}"


def chain(cfg: settings.Settings, batch: int) -> str:
    import diffusers

    network = build_network(cfg).to(DEVICE).eval().requires_grad_(False)
    vae = diffusers.AutoencoderKL.from_config(autoencoder.SD_CONFIG).eval()
    vae.to(DEVICE, memory_format=torch.channels_last)
    inception = Inception(with_classes=True).to(DEVICE, memory_format=torch.channels_last).eval()
    model = Model(process_of(cfg), network)
    options = Sampler.of(model.process, None, None, batch, use_precision(cfg.train.precision, DEVICE))
    labels, made = torch.arange(batch) % cfg.dataset.num_classes, {}

    @torch.no_grad()
    def decode(x: torch.Tensor) -> torch.Tensor:
        return autoencoder.to_uint8(vae.decode(x / 0.18215).sample)

    for _ in range(2):  # the first one warms up
        stages = {
            "sampling": lambda: made.update(x=next(draw(model, range(batch), labels, options))),
            "decoding": lambda: made.update(pictures=to_pictures(made["x"], decode)),
            "features": lambda: extract(inception, made["pictures"]),
        }
        times = {name: seconds(stage, DEVICE) for name, stage in stages.items()}
    total = sum(times.values())
    shares = ", ".join(f"{name} {100 * value / total:.1f}%" for name, value in times.items())
    return f"{cfg.name}, batch {batch}, {options.precision}: {batch / total:.2f} pictures/s ({shares})"


def main() -> None:
    named = [argument for argument in sys.argv[1:] if argument in PARTS] or PARTS
    if unknown := [argument for argument in sys.argv[1:] if argument not in PARTS and "=" not in argument]:
        sys.exit(f"error: {unknown[0]} is none of {', '.join(PARTS)}")
    given = dict(argument.split("=", 1) for argument in sys.argv[1:] if argument not in PARTS)
    repeats, gpu = int(given.pop("repeats", 5)), DEVICE.type == "cuda"
    batch = int(given.pop("batch", 64 if gpu else 4))
    given.setdefault("experiment", "imagenet256_xl2" if gpu else "imagenet256_s2")
    cfg, _ = settings.complete(composed("config", [f"{key}={value}" for key, value in given.items()]))
    threads = "" if gpu else f", {use_cores(None, processes=1)} threads"
    print(f"{device_name(DEVICE)}, torch {torch.__version__}{threads}, {repeats} repeats")
    for name in named:
        arguments = {"sampler": (cfg, batch, repeats), "chain": (cfg, batch)}.get(name, (repeats,))
        print(f"  {name:<10}{globals()[name](*arguments)}", flush=True)


if __name__ == "__main__":
    begin(main)
