"""Calls by CUDA graphs. On a CPU a graph is what torch traces of a call: like a graph's kernels, the operators read the
tensors of that call, and Python's numbers are as they were then. Reference: the function itself."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tread.runtime import cuda_graphs
from tread.runtime.cuda_graphs import Replayed, recording


class Tracing:
    def __init__(self):
        self.recorded, self.works = 0, True

    def close(self):
        self.works = False

    def record(self, call):
        self.recorded += 1
        return make_fx(call)()


def test_later_calls_replay_and_keep_their_results():
    """Of two kinds, by the value beside the tensors; `ran` counts calls of the function, once each to record."""
    ran = []

    def function(x, pair, sign):
        ran.append(sign)
        return sign * x + pair[0] * pair[1]

    recorder = Tracing()
    call = Replayed(function, recorder)
    found, expected = [], []
    for number in range(5):
        x, pair = torch.full((2, 3), float(number)), (torch.tensor(number + 0.5), torch.arange(3.0))
        for sign in (1, -1):
            found.append(call(x, pair, sign))
            expected.append(sign * x + pair[0] * pair[1])
    assert all(map(torch.equal, found, expected)) and recorder.recorded == 2 and ran == [1, -1] * 2
    broken = Replayed(lambda x: x * torch.nan, recorder)
    assert all(broken(torch.ones(2)).isnan().all() for _ in range(3)) and recorder.recorded == 3 and recorder.works


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_graph_gets_wrong_runs_without(fails):
    """A function that reads a number gives other bits when replayed; one that can't be recorded gives none."""
    ran = []

    def function(x):
        ran.append(len(ran))
        if fails and len(ran) == 2:
            raise torch.OutOfMemoryError("full\nof tensors")
        return x + len(ran)

    recorder = Tracing()
    call = Replayed(function, recorder)
    expected = "OutOfMemoryError: full$" if fails else "AssertionError: a graph's output has other bits"
    assert call(torch.zeros(2)).tolist() == [1, 1]
    with pytest.warns(UserWarning, match=f"sampling without CUDA graphs: {expected}"):
        assert call(torch.zeros(2)).tolist() == [3, 3]
    assert call(torch.zeros(2)).tolist() == [4, 4] and not recorder.works


class OnCuda(torch.nn.Sequential):
    def parameters(self):
        return iter([SimpleNamespace(device=torch.device("cuda"))])


def test_graphs_are_for_cuda_the_main_thread_and_networks_without_hooks(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "Recorder", lambda device: Tracing())

    def recorder(network):
        with recording([network]) as found:
            assert found is None or found.works
        return found and not found.works

    layer = torch.nn.Linear(2, 2)
    assert recorder(layer) is None and recorder(OnCuda(layer)) is True
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(recorder, OnCuda(layer)).result() is None
    handle = layer.register_forward_hook(print)
    assert recorder(OnCuda(layer)) is None
    handle.remove()
    assert recorder(OnCuda(layer)) is True
    layer.forward = partial(layer.forward)  # as libraries for offloading do
    assert recorder(OnCuda(layer)) is None
