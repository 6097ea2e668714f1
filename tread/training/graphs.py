"""Training steps as CUDA graphs: one launch replaces thousands, which can take longer than a small step's work.

Steps with equal routes and tensor shapes are of one kind. The first ones of a kind run without a graph, on the stream
used for recording. Then a graph is recorded, and later steps copy their inputs into its fixed buffers and replay it.
All graphs share a memory pool, as a graph's own tensors are not needed after its step; weights, optimizer, averages and
statistics lie outside. A new graph is first tried on the inputs of two steps, without updating weights: losses and
gradient norms must be within 1% of those without a graph. If not, or if recording fails, the run goes on without."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._pytree import tree_map_only

from tread.runtime.compiling import first_line
from tread.runtime.cuda_graphs import Replay, kind_of, record
from tread.runtime.device import beside
from tread.training.optimizer import is_fused
from tread.training.run import Failure, Run
from tread.training.step import Inputs, step_on

CLOSE = {"rtol": 0.01, "atol": 1e-6, "equal_nan": True}  # of losses and gradient norms in bf16


@dataclass
class StepKind:
    done: int = 0  # steps that ran without a graph
    last: Sequence[Tensor] = ()  # the inputs of the last such step
    buffers: Sequence[Tensor] = ()  # the tensors that the graph reads
    replay: Replay | None = None


class Graphs:
    """Does a run's training steps, with CUDA graphs once they are recorded.

    stream  the stream for recording graphs and for the first steps of each kind; None on a CPU.
    record  function (step) → replay: records the function `step`, which does a training step, as a graph without
            running it, and returns a function that replays the graph. In tests on a CPU it may return `step` itself.
    """

    def __init__(self, run: Run, stream: "torch.cuda.Stream | None", record: Callable[[Replay], Replay]) -> None:
        self.run, self.stream, self.record = run, stream, record
        self.kinds: dict[tuple, StepKind] = {}  # by routes, and shapes and types of tensors
        self.usual = 3 if run.processes.count == 1 else 11  # steps before a kind's graph; DDP changes buckets at first

    def take(self, inputs: Inputs) -> None:
        """Do a training step: directly if it is one of the first with its routes and shapes, else by a CUDA graph."""
        key, tensors = kind_of(inputs)  # sample numbers, numpy arrays, do not count
        kind, run, problem = self.kinds.setdefault(key, StepKind()), self.run, None
        try:
            if kind.done < self.usual:
                with beside(self.stream):
                    step_on(run, inputs)
                kind.done, kind.last = kind.done + 1, tensors
                return
            kind.replay = kind.replay or self.prepare(kind, inputs, tensors)
        except Failure:
            raise
        except Exception as error:  # kernels, libraries and drivers refuse to be recorded in many ways
            recorded = any(other.replay for other in self.kinds.values())  # and hold memory that this step may need
            if kind.done < self.usual and not (recorded and isinstance(error, torch.OutOfMemoryError)):
                raise
            problem = first_line(error)
        if problem is None:
            torch._foreach_copy_(kind.buffers, tensors)
            kind.replay()
        else:  # outside the except block, which holds the step's memory
            self.leave(problem)
            step_on(run, inputs)

    def leave(self, problem: str) -> None:
        """Free the graphs, and print that the run goes on without them because of `problem`."""
        self.kinds.clear()
        self.run.graphs = None
        self.run.optimizer.zero_grad()
        self.run.say(f"warning: going on without CUDA graphs: {problem}")

    def prepare(self, kind: StepKind, inputs: Inputs, tensors: list[Tensor]) -> Replay:
        """Record a graph of a step, and return a function that replays it on the inputs in `kind.buffers`. Sets
        kind.buffers to a copy of `tensors`, the tensors in the step's `inputs`. The run's weights do not change.

        If recording fails in one process, or the graph's losses or gradient norms differ there from those without it
        (AssertionError), all processes raise an error. If a trial step fails in one process, before recording
        or in a replay, only that process raises an error, which is a Failure if the run has several processes.
        """
        run, cloned = self.run, tree_map_only(Tensor, torch.clone, inputs)
        kind.buffers = kind_of(cloned)[1]
        step = partial(step_on, run, cloned)
        tallies = [run.statistics.sums, run.statistics.recent]
        before = [tally.clone() for tally in tallies]

        def rehearse(replay: Replay) -> Tensor:
            results = []
            try:
                for given in (kind.last, tensors):
                    torch._foreach_copy_(kind.buffers, given)
                    cloned.hold.fill_(1.0)
                    results.append(torch.stack(replay()))
            except Exception as error:
                if run.processes.count > 1:  # the other processes wait for this one's gradients
                    raise Failure(f"a CUDA graph's rehearsal failed: {first_line(error)}; cuda_graphs=false") from error
                raise
            return torch.stack(results)

        try:
            with beside(self.stream):
                expected = rehearse(step)
            replay = run.processes.together(lambda: self.record(step))
            found = rehearse(replay)
            differ = f"its losses and gradient norms are {found.tolist()}, but should be {expected.tolist()}"
            run.processes.together(lambda: assert_close(found, expected, **CLOSE, msg=differ))
        finally:
            torch._foreach_copy_(tallies, before)
        return replay


def record_graph(run: Run, stream: "torch.cuda.Stream", pool: tuple[int, int], step: Replay) -> Replay:
    """Record `step` as a CUDA graph in the memory pool `pool`, without running it, and return a function that replays
    it. Raises the recording's error, or MemoryError if less than a tenth of the device's memory is left."""
    groups = run.optimizer.param_groups
    before = [group["capturable"] for group in groups]
    for group in groups:  # a fused optimizer has its state on the device anyway
        group["capturable"] = True
    torch.cuda.synchronize(stream.device)
    torch.cuda.empty_cache()
    try:
        replay = record(stream, pool, step)
    finally:
        for group, capturable in zip(groups, before):
            group["capturable"] = capturable
    free, total = torch.cuda.mem_get_info(stream.device)
    if free < total / 10:  # the pool keeps a step's memory for good
        raise MemoryError("less than a tenth of the device's memory is left for evaluation and samples")
    return replay


def open_graphs(run: Run) -> Graphs | None:
    """Return Graphs for the run's steps, or None to go without. ValueError if train.cuda_graphs=true is impossible."""
    asked, device, never = run.cfg.train.cuda_graphs, run.device, None
    if device.type != "cuda":
        never = f"the run is on {device}, without a CUDA device"
    elif not is_fused(run.optimizer):
        never = f"optim.name={run.cfg.optim.name} is no fused AdamW or Muon, which take the learning rate as a tensor"
    if asked is True and never:
        raise ValueError(f"train.cuda_graphs is true, but {never}")
    kernel, live = getattr(run.cfg.model, "kernel", "torch"), run.aligner and run.aligner.encoder
    unsure = {"several processes": run.processes.count > 1, "a live encoder": live, kernel: kernel != "torch"}
    why = never or next((reason for reason, holds in unsure.items() if holds), None)
    if asked == "auto" and why and device.type == "cuda":
        run.processes.say(f"steps without CUDA graphs: {why}{'; train.cuda_graphs=true tries them' * (not never)}")
    if not asked or never or (asked == "auto" and why):
        return None
    stream = torch.cuda.Stream(device)
    return Graphs(run, stream, partial(record_graph, run, stream, torch.cuda.graph_pool_handle()))
