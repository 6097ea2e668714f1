"""Time of a training step with and without routes: python benchmarks/step_time.py [overrides]

Alternates dense and routed steps of the same network in one process, on random latents, and prints
the median of each, their ratio with its spread over the pairs, and the ratio that the FLOPs allow.
Overrides are those of train.py, e.g. experiment=imagenet256_s2 train.batch_size=16 pairs=20.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import settings  # noqa: E402
from build import build_network, build_optimizer, complete  # noqa: E402
from compute import autocast, use_cores, use_precision  # noqa: E402
from ema import EMA  # noqa: E402
from randomness import draw_step  # noqa: E402
from routing_module import draw_ids  # noqa: E402


def main() -> None:
    overrides = [argument for argument in sys.argv[1:] if not argument.startswith("pairs=")]
    pairs = int(next((a.removeprefix("pairs=") for a in sys.argv[1:] if a.startswith("pairs=")), 40))
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "configs")):
        cfg = settings.read(complete(OmegaConf.to_container(compose("config", overrides=overrides), resolve=True)))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = use_precision(cfg.train.precision, device)
    if device.type == "cpu":
        use_cores(cfg.train.cpu_threads, processes=1)
    network, process = build_network(cfg).to(device), settings.process_of(cfg)
    optimizer, ema = build_optimizer(cfg, network), EMA(network)
    batch, shape = cfg.train.batch_size, (cfg.dataset.channels, cfg.dataset.size, cfg.dataset.size)
    x = torch.randn(batch, *shape, device=device)
    y = torch.arange(batch, device=device) % cfg.dataset.num_classes

    def step(number: int, routed: bool) -> float:
        """One training step; returns its milliseconds."""
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        routes = cfg.model.routes if routed else ()
        draws = draw_step(0, number, batch, shape, network.num_tokens, len(routes), posterior=False, device=device)
        drawn = [(route, draw_ids(u, route.selection_ratio)) for route, u in zip(routes, draws.routes)]
        with autocast(device, precision):
            loss = process.loss(network, x, y, process.noise_level(draws.level), draws.noise, drawn).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update(network, number)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - start)

    for number in range(3):
        step(number, routed=False), step(number, routed=True)
    times = [(step(n, routed=False), step(n, routed=True)) for n in range(3, 3 + pairs)]
    dense, routed = (statistics.median(column) for column in zip(*times))
    ratios = sorted(a / b for a, b in times)
    ideal = network.forward_flops() / network.forward_flops(cfg.model.routes)
    low, middle, high = ratios[len(ratios) // 4], statistics.median(ratios), ratios[-1 - len(ratios) // 4]
    print(f"{cfg.name}, batch {batch}, {device}, {precision}, {torch.get_num_threads()} threads, {pairs} pairs")
    print(f"dense {dense:.1f} ms, routed {routed:.1f} ms, ratio {middle:.3f} (quartiles {low:.3f}..{high:.3f})")
    print(f"FLOPs allow {ideal:.3f}; reached {middle / ideal:.3f} of it")


if __name__ == "__main__":
    main()
