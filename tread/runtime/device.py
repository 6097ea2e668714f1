"""Numerical precision, CPU threads, synchronisation and peak speed of a device."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Annotated, Literal

import torch

from tread.runtime.schema import check

Precision = Annotated[Literal["auto", "fp32", "bf16"], "fp16 is refused: without loss scaling its range is too small"]
LAUNCHED = {"LOCAL_RANK", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION"}  # a launcher sets at least one of them


def use_precision(name: Precision, device: torch.device) -> str:
    """Return the precision, "auto" resolved to "bf16" on a GPU that has it in hardware, else to "fp32"; set TF32.

    With bf16, TF32 is allowed, as the block that a route may run in fp32 would be slow without it; else it is off.
    """
    check("precision", name, Precision)
    if name == "auto":
        name = "bf16" if has_bf16(device) else "fp32"
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = name == "bf16"
    return name


def has_bf16(device: torch.device) -> bool:
    """Return whether a device is a GPU that computes in bf16 in hardware."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def autocast(device: torch.device, precision: str) -> AbstractContextManager:
    """Return the context in which a network runs: autocast to bf16, or none; weights stay fp32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


@contextmanager
def exact(tf32: bool = False) -> Iterator[None]:
    """Context that computes in fp32 without autocast, and with TF32 only if asked, whatever sampling or training has
    set."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = tf32
    gpu = torch.autocast("cuda", enabled=False) if torch.cuda.is_available() else nullcontext()
    try:
        with gpu, torch.autocast("cpu", enabled=False):
            yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def computing(device: torch.device, precision: str) -> AbstractContextManager:
    """Return the context in which a frozen network beside the trained one runs: fp32 exactly, "tf32" or "bf16"."""
    return autocast(device, precision) if precision == "bf16" else exact(tf32=precision == "tf32")


def use_cores(threads: int | None, processes: int) -> int:
    """Set the number of CPU threads that torch uses in this process, and return it. `processes` is the number of
    processes on this machine. With threads=None torch uses OMP_NUM_THREADS threads, else an equal share of the cores.

    accelerate and torchrun set OMP_NUM_THREADS=1 in processes that they launch, so 1 counts as unset there.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # may be a list, a number per nesting level
    launched = not LAUNCHED.isdisjoint(os.environ)
    if not asked.isdecimal() or asked == "0" or (launched and asked == "1"):
        asked = max(1, cores // processes)
    torch.set_num_threads(threads or int(asked))
    return torch.get_num_threads()


def wait_for(device: torch.device) -> None:
    """Wait until a device has finished its queued work; returns at once for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


PEAKS = {  # part of a GPU's name → dense bf16 FLOP/s, from the maker's data sheets; the first match counts
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "A6000": 155e12,
}


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return a GPU's peak bf16 FLOP/s, for model FLOPs utilisation; None for fp32 and for unlisted devices."""
    name = device_name(device) if precision == "bf16" else ""
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def device_name(device: torch.device) -> str:
    """Return a GPU's model name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
