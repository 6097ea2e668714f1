"""CUDA graphs: what a call launches is recorded once, then repeated by one launch instead of hundreds."""

import contextlib
import warnings
from collections.abc import Callable, Hashable
from functools import cache, partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from tread.runtime.compiling import first_line

Replay = Callable[[], Any]  # repeats a recorded call, and returns what the call returned


def kind_of(given: Any) -> tuple[tuple, list[Tensor]]:
    """Return the kind of a call with the nested tuple `given`, and the tensors in it. Calls of one kind can share a
    graph: shapes and types of their tensors are equal, and so are other values, apart from numpy arrays."""
    leaves = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Hashable)]
    tensors = [leaf for leaf in leaves if torch.is_tensor(leaf)]
    return tuple((leaf.shape, leaf.dtype) if torch.is_tensor(leaf) else leaf for leaf in leaves), tensors


def record(stream: "torch.cuda.Stream", pool: tuple[int, int], call: Replay) -> Replay:
    """Record `call` as a CUDA graph on `stream`, with memory of `pool`, without running it, and return a function that
    replays it. Raises what stops the recording."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(pool, capture_error_mode="thread_local")  # a loader's threads may use CUDA meanwhile
            try:
                results = call()
            finally:
                graph.capture_end()
    except Exception:
        with contextlib.suppress(RuntimeError, AttributeError):  # torch may leave the pool open, and free nothing
            torch._C._cuda_endAllocateToPool(stream.device.index, pool)  # RuntimeError if it is closed
            torch._C._cuda_releasePool(stream.device.index, pool)
        raise

    def replay() -> Any:
        graph.replay()
        return results

    return replay


class Recorder:
    """Records calls as CUDA graphs on one device. They share memory, which stays reserved for the next ones."""

    def __init__(self, device: torch.device) -> None:
        self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self.keeper: Replay | None = None  # the first graph: while it exists, so does the pool
        self.works = True  # until a recording fails

    def record(self, call: Replay) -> Replay:
        self.keeper = self.keeper or record(self.stream, self.pool, partial(torch.zeros, 1, device=self.stream.device))
        return record(self.stream, self.pool, call)


@cache
def recorder_of(device: torch.device, thread: int) -> Recorder:
    """Return the device's Recorder for a thread, as a recording takes in all that any thread runs on its stream. It is
    made once, as each stream's products reserve a workspace."""
    return Recorder(device)


class Replayed:
    """Calls `function`, of tensors and hashable values to one tensor, by CUDA graphs; it must not change its inputs.

    The first call of a kind runs as usual. At the second a graph is recorded; its output for the first one's tensors
    must have the same bits. Later calls replay it. If the bits differ or recording fails, the recorder is not used
    again, and a warning says why.
    """

    def __init__(self, function: Callable[..., Tensor], recorder: Recorder) -> None:
        self.function, self.recorder = function, recorder
        self.first: dict[tuple, tuple[list[Tensor], Tensor]] = {}  # tensors and output of the first call of a kind
        self.graphs: dict[tuple, tuple[list[Tensor], Replay]] = {}  # what a kind's graph reads, and its replay

    def __call__(self, *given: Any) -> Tensor:
        kind, tensors = kind_of(given)
        if self.recorder and kind in self.first and kind not in self.graphs:
            try:
                self.graphs[kind] = self._recorded(given, *self.first[kind])
            except Exception as error:  # kernels, libraries and drivers refuse to be recorded in many ways
                self.recorder.works, self.recorder = False, None
                self.graphs.clear()
                warnings.warn(f"sampling without CUDA graphs: {first_line(error)}", stacklevel=2)
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
        if not torch.equal(replay(), expected):
            raise ArithmeticError("a graph's output has other bits than the same call's without it")
        return buffers, replay


def replayed(function: Callable[..., Tensor], network: nn.Module) -> Callable[..., Tensor]:
    """Return `function`, which calls the network in inference; on CUDA by graphs (class Replayed), unless an earlier
    recording failed or modules have hooks, which a graph would not call."""
    device = next(network.parameters()).device
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())
    recorder = None if device.type != "cuda" or hooked else recorder_of(device, get_ident())
    return Replayed(function, recorder) if recorder and recorder.works else function
