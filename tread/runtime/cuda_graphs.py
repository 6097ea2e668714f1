"""CUDA graphs: the kernels of a call are recorded once, then repeated by one launch instead of hundreds."""

import contextlib
import threading
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves, tree_map_only

from tread.runtime.compiling import first_line

Replay = Callable[[], Any]  # repeats a recorded call, and returns what the call returned


def kind_of(given: Any) -> tuple[tuple, list[Tensor]]:
    """Return the kind of a call with arguments `given`, a nested tuple, and the tensors in it. Calls of one kind can
    share a graph: their tensors' shapes and dtypes and their other values are equal. Numpy arrays are ignored."""
    leaves = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Hashable)]
    tensors = [leaf for leaf in leaves if torch.is_tensor(leaf)]
    return tuple((leaf.shape, leaf.dtype) if torch.is_tensor(leaf) else leaf for leaf in leaves), tensors


def record(stream: "torch.cuda.Stream", pool: tuple[int, int], call: Replay) -> Replay:
    """Record `call` as a CUDA graph on `stream`, without running it, and return a function that replays it. The graph's
    memory comes from `pool`, a graph_pool_handle of torch.cuda. If the recording fails, its exception is raised."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(pool, capture_error_mode="thread_local")  # a loader's threads may use CUDA meanwhile
            results = call()
            graph.capture_end()
    except Exception:
        with contextlib.suppress(RuntimeError), torch.cuda.stream(stream):
            graph.capture_end()
        with contextlib.suppress(RuntimeError):  # if it failed, torch leaves the pool open, and frees nothing
            before_2_8 = "_cuda_endAllocateCurrentStreamToPool"
            end = getattr(torch._C, "_cuda_endAllocateToPool", None) or getattr(torch._C, before_2_8)
            end(stream.device.index, pool)  # RuntimeError if it is closed
            torch._C._cuda_releasePool(stream.device.index, pool)
        raise

    def replay() -> Any:
        graph.replay()
        return results

    return replay


@cache
def recording_stream(device: torch.device) -> "torch.cuda.Stream":
    """Return the stream for recordings on a device: always the same, as cuBLAS reserves a workspace per stream."""
    return torch.cuda.Stream(device)


class Recorder:
    """Records calls as CUDA graphs in one memory pool. `works` is False after `close`: callers then record no more."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.pool, self.works = device, torch.cuda.graph_pool_handle(), True
        self.keeper: Replay | None = None  # a graph that keeps the pool while others come and go

    def record(self, call: Replay) -> Replay:
        into_pool = partial(record, recording_stream(self.device), self.pool)
        if self.keeper is None:
            torch.cuda.empty_cache()  # during a recording, cached memory can't be used
            self.keeper = into_pool(partial(torch.zeros, 1, device=self.device))
        return into_pool(call)

    def close(self) -> None:
        """Set `works` to False, and let the pool be freed once no graphs are left."""
        self.works = False
        if self.keeper is not None:
            torch.cuda.synchronize(self.device)  # freed memory may be unmapped, which does not wait for replays
        self.keeper = None


@contextlib.contextmanager
def recording(networks: Collection[nn.Module]) -> Iterator[Recorder | None]:
    """Context that yields a Recorder for calls of the networks, all on one device. It yields None in three cases:
    without CUDA; outside the main thread (graphs read weights in autocast's cache, which other threads may clear); and
    if a module has hooks or an instance attribute `forward` (a replayed graph calls no Python code)."""
    device = next(next(iter(networks)).parameters()).device
    modules = [module for network in networks for module in network.modules()]
    hooked = any(item._forward_hooks or item._forward_pre_hooks or "forward" in vars(item) for item in modules)
    if device.type != "cuda" or hooked or threading.current_thread() is not threading.main_thread():
        yield None
        return
    recorder = Recorder(device)
    try:
        yield recorder
    finally:
        recorder.close()


class Replayed:
    """Calls `function` by CUDA graphs. It maps tensors and hashable values to one tensor, and must not change inputs.

    The first call of a kind (see kind_of) runs as usual. The second records a graph, and checks that for the first
    call's tensors it returns the first call's output, bit for bit. This and later calls replay the graph. If the bits
    differ or recording fails, a warning says why, and the recorder is closed: no kind gets a graph any more.
    """

    def __init__(self, function: Callable[..., Tensor], recorder: Recorder) -> None:
        self.function, self.recorder = function, recorder
        self.first: dict[tuple, tuple[list[Tensor], Tensor]] = {}  # tensors and output of the first call of a kind
        self.graphs: dict[tuple, tuple[list[Tensor], Replay]] = {}  # what a kind's graph reads, and its replay

    def __call__(self, *given: Any) -> Tensor:
        kind, tensors = kind_of(given)
        if self.recorder.works and kind in self.first and kind not in self.graphs:
            try:
                self.graphs[kind] = self._recorded(given, *self.first[kind])
            except Exception as error:  # kernels, libraries and drivers refuse to be recorded in many ways
                warnings.warn(f"sampling without CUDA graphs: {first_line(error)}", stacklevel=2)
                self.recorder.close()
        if kind in self.graphs:
            buffers, replay = self.graphs[kind]
            torch._foreach_copy_(buffers, tensors)
            return replay().clone()
        output = self.function(*given)
        self.first.setdefault(kind, (tensors, output))
        return output

    def _recorded(self, given: tuple, tensors: list[Tensor], expected: Tensor) -> tuple[list[Tensor], Replay]:
        cloned = tree_map_only(Tensor, torch.clone, given)
        buffers = kind_of(cloned)[1]
        replay = self.recorder.record(lambda: self.function(*cloned))
        torch._foreach_copy_(buffers, tensors)
        differs = "a graph's output has other bits than the same call's without it"
        assert_close(replay(), expected, rtol=0, atol=0, equal_nan=True, msg=differs)
        return buffers, replay
