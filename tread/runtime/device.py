"""Numerical precision, CPU threads, memory, synchronisation and peak speed of a device."""

import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tread.runtime.schema import check

Precision = Annotated[Literal["auto", "fp32", "bf16"], "fp16 is refused: without loss scaling its range is too small"]
LAUNCHED = {"LOCAL_RANK", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION"}  # a launcher sets at least one of them


def use_precision(name: Precision, device: torch.device) -> str:
    """Return "fp32" or "bf16"; "auto" becomes "bf16" on a GPU with bf16 hardware, else "fp32". On a GPU this turns TF32
    on for "bf16", to speed up blocks kept in fp32 for stability, off for "fp32". Raises ValueError for other names."""
    check("precision", name, Precision)
    if name == "auto":
        name = "bf16" if has_bf16(device) else "fp32"
    if device.type == "cuda":
        set_tf32(["tf32" if name == "bf16" else "ieee"] * 3)
    return name


def has_bf16(device: torch.device) -> bool:
    """Return whether a device is a GPU that computes in bf16 in hardware."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def autocast(device: torch.device, precision: str) -> AbstractContextManager:
    """Return a context to run a network in: bf16 autocast with precision="bf16", else no autocast."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def tf32_flags() -> list[str]:
    """Return the precision of fp32 matmuls, convolutions and RNNs on GPUs: each "tf32", "ieee" or "none" (not set)."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    if hasattr(matmul, "fp32_precision"):  # from torch 2.9 on, where reading old flags fails once new ones are set
        return [matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision]
    return ["tf32" if allowed else "ieee" for allowed in (matmul.allow_tf32, cudnn.allow_tf32, cudnn.allow_tf32)]


def set_tf32(flags: list[str]) -> None:
    """Set the precision of fp32 matmuls, convolutions and RNNs on GPUs to `flags`, as returned by `tf32_flags`. Also
    sets torch's old flags: torch.compile in 2.9 and 2.10 fails if they differ from the new ones (pytorch #166387)."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    matmul.allow_tf32, cudnn.allow_tf32 = flags[0] == "tf32", flags[1] == "tf32"
    if hasattr(matmul, "fp32_precision"):  # the old flags alone would not override the global fp32_precision
        matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = flags


def attention_fault(release: str, cudnn: int | None, masked_keys: int | None) -> str | None:
    """Return a phrase on what cuDNN's attention does wrong in these versions, or None if no bug is known. `release` is
    torch's version; `cudnn` is cuDNN's (91002 is 9.10.2), None without cuDNN; masked_keys as for avoid_faults."""
    version = tuple(int(part) for part in release.split(".")[:2])
    if cudnn and version == (2, 9) and cudnn < 91501:
        return "reads out of bounds (pytorch #169849)"
    if cudnn and version >= (2, 11) and cudnn < 92600 and masked_keys and masked_keys % 128 == 64:
        return f"turns rare gradients into NaN under masks over {masked_keys} keys (pytorch #196678)"
    return None


def avoid_faults(device: torch.device, masked_keys: int | None = None) -> str | None:
    """Switch cuDNN's attention off in this process if it has a known bug, and return a line about the bug, else None.
    masked_keys is the number of keys if attention has both a mask and gradients, else None."""
    cudnn = torch.backends.cudnn.version() if device.type == "cuda" else None
    fault = attention_fault(torch.__version__, cudnn, masked_keys)
    if fault is None:
        return None
    torch.backends.cuda.enable_cudnn_sdp(False)
    return f"attention runs without cuDNN, which {fault} in torch {torch.__version__} with cuDNN {cudnn}"


@contextmanager
def exact(tf32: bool = False) -> Iterator[None]:
    """Context without autocast, so that fp32 tensors are computed in fp32; TF32 is used only if tf32=True."""
    before = tf32_flags()
    set_tf32(["tf32" if tf32 else "ieee"] * 3)
    gpu = torch.autocast("cuda", enabled=False) if torch.cuda.is_available() else nullcontext()
    try:
        with gpu, torch.autocast("cpu", enabled=False):
            yield
    finally:
        set_tf32(before)


def computing(device: torch.device, precision: str) -> AbstractContextManager:
    """Return a context to run a frozen network in: "bf16" (autocast), "tf32" (fp32 with TF32), else exact fp32."""
    return autocast(device, precision) if precision == "bf16" else exact(tf32=precision == "tf32")


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_cores(threads: int | None, processes: int) -> int:
    """Set the number of CPU threads that torch uses in this process, and return that number. With threads=None it is
    OMP_NUM_THREADS or, if unset, an equal share of the cores for each of the `processes` on this machine. accelerate
    and torchrun set OMP_NUM_THREADS=1 in processes that they launch, so 1 counts as unset there."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # may be a list, a number per nesting level
    if not asked.isdecimal() or asked == "0" or (asked == "1" and LAUNCHED & os.environ.keys()):
        asked = max(1, usable_cores() // processes)
    torch.set_num_threads(threads or int(asked))
    return torch.get_num_threads()


def wait_for(device: torch.device) -> None:
    """Wait until a device has finished its queued work; return at once for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_of(device: torch.device) -> int:
    """Return the total memory of a GPU or, for a CPU, of this machine, in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Alive(TorchDispatchMode):
    """Context that measures, in bytes, the storages of the tensors that operators in it return: `now` is the size of
    those still in memory, `peak` the largest `now` so far. Storages of the tensors `earlier` are left out."""

    def __init__(self, earlier: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in earlier}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> object:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known:
                    self.known.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self.drop, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def drop(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def use_expandable_segments() -> None:
    """Turn on expandable segments in CUDA's allocator, so that steps with alternating shapes do not fragment memory. A
    PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF that the user set stays in force. Call this before CUDA is used."""
    own = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"} & os.environ.keys()
    told = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # in newer torch, where the call below warns
    told = told or getattr(torch.cuda.memory, "_set_allocator_settings", None)
    if not own and told is not None and torch.cuda.is_available():
        told("expandable_segments:True")


PEAKS = {  # part of a GPU's name → dense bf16 FLOP/s, from NVIDIA's data sheets; the first match counts
    "H200 NVL": 835e12,
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


@contextmanager
def beside(stream: "torch.cuda.Stream | None") -> Iterator[None]:
    """Context whose work runs on the CUDA stream `stream`, after the work already queued on the current stream. Later
    work on the current stream waits for the context's work. With stream=None the context has no effect."""
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        current.wait_stream(stream)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return a GPU's peak dense bf16 FLOP/s, or None if `precision` is not "bf16" or PEAKS does not list the GPU."""
    name = device_name(device) if precision == "bf16" else ""
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def device_name(device: torch.device) -> str:
    """Return a GPU's model name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
