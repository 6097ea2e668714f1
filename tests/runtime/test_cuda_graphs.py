"""Calls by CUDA graphs. On a CPU a graph is what torch traces of a call: like a graph's kernels, the operators read the
tensors of that call, and Python's numbers are as they were then. Reference: the function itself."""

from types import SimpleNamespace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tread.runtime import cuda_graphs
from tread.runtime.cuda_graphs import Replayed, replayed


class Tracing:
    def __init__(self):
        self.recorded, self.works = 0, True

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
    expected = "OutOfMemoryError: full$" if fails else "ArithmeticError: a graph's output has other bits"
    assert call(torch.zeros(2)).tolist() == [1, 1]
    with pytest.warns(UserWarning, match=f"sampling without CUDA graphs: {expected}"):
        assert call(torch.zeros(2)).tolist() == [3, 3]
    assert call(torch.zeros(2)).tolist() == [4, 4] and not recorder.works


class OnCuda(torch.nn.Sequential):
    def parameters(self):
        return iter([SimpleNamespace(device=torch.device("cuda"))])


def test_graphs_are_for_cuda_and_networks_without_hooks(monkeypatch):
    recorder, layer = Tracing(), torch.nn.Linear(2, 2)
    monkeypatch.setattr(cuda_graphs, "recorder_of", lambda device, thread: recorder)
    assert replayed(print, layer) is print
    assert replayed(print, OnCuda(layer)).recorder is recorder
    handle = layer.register_forward_hook(print)
    assert replayed(print, OnCuda(layer)) is print
    handle.remove()
    assert replayed(print, OnCuda(layer)) is not print
    recorder.works = False
    assert replayed(print, OnCuda(layer)) is print
