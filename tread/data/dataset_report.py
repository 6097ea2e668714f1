"""What a dataset holds, in numbers and pictures, once it is made."""

from __future__ import annotations

import numpy as np
import torch

from tread.data import autoencoder
from tread.data.dataset import LatentDataset
from tread.data.latents import to_network
from tread.runtime.tensor_files import listed


def numbers(data: LatentDataset) -> dict:
    """Counts by class, and each channel's mean and standard deviation of network latents."""
    mean, std = data.statistics
    counts = np.bincount(data.labels, minlength=len(data.latents.classes))
    return {
        "count": len(data),
        "class_counts": dict(zip(data.latents.classes, counts.tolist())),
        "channel_mean": list(mean),
        "channel_std": list(std),
    }


def disagreement(data: LatentDataset) -> float:
    """How far what data.normalize takes is from what was measured, at most: of means and deviations, in the latter."""
    (mean, std), (taken, by) = np.array(data.statistics), np.array(data.normal)
    return float(np.abs([(mean - taken) / by, std / by - 1]).max())


def spread(count: int, pictures: int) -> np.ndarray:
    """Some indices in 0..count−1, spread over all."""
    return np.unique(np.linspace(0, count - 1, pictures).round().astype(int))


def decode(data: LatentDataset, indices: np.ndarray, device: torch.device) -> np.ndarray:
    """Stored samples as pictures (n, 1 or 3, H, W) uint8; moments by their mean. Raises as load_decoder does."""
    decoder = autoencoder.load_decoder(data.latents, device)
    stored = data.read(indices).stored
    parts = [decoder(to_network(part.to(device), data.latents)).cpu() for part in stored.split(4)]
    return torch.cat(parts).numpy()


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Peak signal-to-noise ratio of two uint8 pictures in dB; infinite if they are equal."""
    error = np.mean((a.astype(np.float64) - b) ** 2)
    return float("inf") if error == 0 else float(10 * np.log10(255**2 / error))


def text(report: dict) -> str:
    """The report as lines to print."""
    counts = list(report["class_counts"].values())
    lines = {"samples": f"{report['count']:,} in {len(counts):,} classes"}
    if len(counts) <= 20:
        lines["by class"] = ", ".join(f"{name} {count:,}" for name, count in report["class_counts"].items())
    else:
        lines["by class"] = f"{min(counts):,} to {max(counts):,}, median {int(np.median(counts)):,}"
    lines["mean"] = "  ".join(f"{value:+.4f}" for value in report["channel_mean"]) + "  of network latents, by channel"
    lines["std"] = "  ".join(f"{value:7.4f}" for value in report["channel_std"])
    if report.get("psnr"):
        found = report["psnr"]
        span = f"mean of {len(found)} pictures ({min(found):.2f}..{max(found):.2f})"
        lines["PSNR"] = f"{np.mean(found):.2f} dB after a round trip, {span}"
    if report.get("enlarged"):
        lines["enlarged"] = f"{report['enlarged']:,} pictures were smaller than the resolution"
    if much := report.get("much_enlarged"):
        lines["blurred"] = f"{len(much):,} of them enlarged more than 4 times, all in report.json: {listed(much)}"
    left_out = report.get("left_out", [])
    if left_out:
        lines["left out"] = f"{len(left_out):,} files, all listed in report.json"
    named = [f"    {name}: {why}" for name, why in left_out[:10]]
    lines = [f"  {name:<10}{value}" for name, value in lines.items()] + named
    return "\n".join(lines).encode(errors="backslashreplace").decode()  # file names may be of bytes that are no UTF-8
