"""The summary of a run that is printed before its first step."""

from __future__ import annotations

from torch import nn

from latents import LatentDataset
from routing_module import check_routes, num_keep
from settings import Settings


def describe(
    cfg: Settings, network: nn.Module, data: LatentDataset, processes: int, device: str, precision: str
) -> str:
    """Data, size, FLOPs, tokens kept, the batch and its split, disk space: one line each."""
    parameters = sum(parameter.numel() for parameter in network.parameters())
    dense, routed = network.forward_flops(), network.forward_flops(cfg.model.routes)
    epochs = cfg.train.steps / data.steps_per_epoch(cfg.train.batch_size)
    micro = cfg.train.micro_batch_size or cfg.train.batch_size // processes
    accumulation = cfg.train.batch_size // processes // micro
    tokens = network.num_tokens
    routes = [
        f"r({route.start}→{route.end}) keeps {num_keep(tokens, route.selection_ratio)} of {tokens} tokens, "
        f"fp32: {route.fp32}"
        for route in check_routes(cfg.model.routes, cfg.model.depth)
    ]
    lines = {
        "run": f"{cfg.name}, {cfg.train.steps:,} steps, {epochs:.1f} epochs",
        "data": f"{cfg.dataset.name}, {len(data):,} samples of {data.latents.shape}",
        "network": f"{cfg.model.architecture}, {parameters:,} parameters, {cfg.model.depth} blocks, {tokens} tokens",
        "routes": "; ".join(routes) or "none",
        "FLOPs": f"{3 * routed:.3e} a training image, {dense / routed:.3f} times fewer than without routes",
        "batch": f"{cfg.train.batch_size} = {processes} processes × {accumulation} accumulation steps × {micro} images",
        "device": f"{device}, {precision}",
        "disk": f"{16 * parameters / 1e6:,.0f} MB a checkpoint, every {cfg.every.save:,} steps",
    }
    return "\n".join(f"  {name:<9}{text}" for name, text in lines.items())
