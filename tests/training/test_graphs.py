"""Steps by CUDA graphs. On a CPU a step is its own replay, over buffers that were last filled for another step, and
knows nothing of the run's progress. Reference: the same run without graphs, bit for bit."""

from types import SimpleNamespace

import pytest
import torch
from conftest import launch, launch_processes, logged, raising, records, same
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tread.training import failures, graphs, periodic, start, step
from tread.training.graphs import Graphs, open_graphs

OPTIONS = ["train.steps=14", "train.micro_batch_size=4", "optim.clip_norm=0.5", "name=run", "every.sample=99"]
OPTIONS += ["ema.power=[0.1]", "ema.warmup=true", "optim.warmup_steps=5"]
OPTIONS += ["every.save=7", "train.routes_until=8", "dataset.heldout=null"]
ENDING = ["alignment.until=8", "alignment.fade=6"]  # with the routes


def itself(run, do):
    """A replay of a step that is the step, without the number of the step and the data; all it updates stays where it
    was, as a graph knows addresses."""

    def addresses():
        networks = [run.wrapped, *(average.network for average in run.averages)]
        tensors = [parameter for network in networks for parameter in network.parameters()]
        tensors += [value for state in run.optimizer.state.values() for value in state.values()]
        return [tensor.data_ptr() for tensor in (*tensors, run.statistics.sums, run.statistics.recent)]

    known = addresses()

    def replay():
        assert addresses() == known
        kept = run.step, run.loader
        run.step = run.loader = None
        try:
            return do()
        finally:
            run.step, run.loader = kept

    return replay


def use_graphs(monkeypatch, record=itself) -> list[int]:
    """Let runs take their steps by what `record(run, step)` makes of them; returns the numbers of replayed steps."""
    replayed = []

    def open_graphs(run):
        def recording(do):
            replay = record(run, do)
            return lambda: replayed.append(run.step) or replay()

        return Graphs(run, None, recording)

    monkeypatch.setattr(start, "open_graphs", open_graphs)
    return replayed


@pytest.fixture
def spoilt(monkeypatch):
    """Let the loss of step 4 be NaN, by its draws."""

    def marked(cfg, latents, number, device):
        draws = draw(cfg, latents, number, device)
        return draws._replace(drop=draws.drop + 1) if number == 4 else draws

    def with_nan(cfg, network, latents, batch, draws, *more):
        good = torch.where(draws.drop.max() > 1, float("nan"), 1.0)
        return [term * good for term in loss(cfg, network, latents, batch, draws, *more)]

    draw, loss = step.step_draws, step.loss
    monkeypatch.setattr(step, "step_draws", marked)
    monkeypatch.setattr(step, "loss", with_nan)


@pytest.mark.parametrize(
    "options",
    [
        ["train.ratio_schedule={start: 0.5, end: 0.25, last: 1, levels: 2}"],
        pytest.param(
            ["model.routes.0.select=norm", "train.loss_tokens=kept", "objective=rf", "alignment=self", *ENDING],
            marks=pytest.mark.slow,
        ),
        pytest.param(["optim.name=muon", "optim.muon_lr=0.01", "train.loss_tokens=kept"], marks=pytest.mark.slow),
    ],
)
def test_replayed_steps_are_those_without_graphs(tmp_path, monkeypatch, spoilt, options):
    """With a step that is skipped, several kinds of steps, and a run that goes on from a checkpoint."""
    (tmp_path / "plain").mkdir(), (tmp_path / "graphs").mkdir()
    launch(tmp_path / "plain", *OPTIONS, *options)
    replayed = use_graphs(monkeypatch)
    text = launch(tmp_path / "graphs", *OPTIONS, *options, "train.steps=7")
    text += launch(tmp_path / "graphs", *OPTIONS, *options)
    ours, theirs = (tmp_path / name / "results/run" for name in ("graphs", "plain"))
    assert "without CUDA graphs" not in text, text[text.find("without CUDA") :][:600]
    assert same(ours, theirs) and records(ours) == records(theirs)
    for name in ("bad_steps", "grad_norm", "alignment") if "alignment=self" in options else ("bad_steps", "grad_norm"):
        assert logged(ours, name) == logged(theirs, name)
    # a kind is rehearsed twice, and its first replay follows; the schedule's first step is of another kind
    first = 1 if "train.ratio_schedule" in options[0] else 0
    assert sorted(set(replayed)) == [*range(first + 3, 7), 11, 12, 13]
    assert [replayed.count(number) for number in (first + 3, 6, 11, 12)] == [3, 1, 3, 1]


@pytest.mark.parametrize("steps, forecast", [(14, "training 16.0"), (6, None)])
def test_speed_and_forecast_leave_out_warming_up_and_rehearsal(tmp_path, monkeypatch, steps, forecast):
    """By a clock: usual and rehearsed steps take 10 s each, a replay 2; the log comes two replays later."""
    now = [0.0]
    monkeypatch.setattr(periodic.time, "perf_counter", lambda: now[0])

    def ticking(run, do):
        replay = itself(run, do)

        def timed():
            end = now[0] + (10.0 if len(replayed) <= 2 else 2.0)
            results = replay()
            now[0] = end
            return results

        return timed

    def usual(run, inputs):
        now[0] += 10.0
        return step_on(run, inputs)

    step_on, replayed = graphs.step_on, use_graphs(monkeypatch, ticking)
    monkeypatch.setattr(graphs, "step_on", usual)
    options = ["dataset.heldout=null", "every.sample=99", "every.log=6", "eval.demo_samples=0", "name=run"]
    text = launch(tmp_path, "model=dit", f"train.steps={steps}", *options)
    assert logged(tmp_path / "results/run", "images_per_s")[0] == 4.0
    assert (f"estimated by the first steps: {forecast}" in text) if forecast else "estimated" not in text


def wrong(run, do):
    """A replay that does another step than the usual one."""
    return lambda: [2 * number for number in do()]


@pytest.mark.slow
def test_a_graph_that_fails_or_differs_costs_a_line(tmp_path, monkeypatch, spoilt):
    cases = {
        "AssertionError: its losses and gradient norms are [[": wrong,
        "RuntimeError: operation not permitted\n": lambda run, do: raising(
            RuntimeError("operation not permitted\nmore")
        ),
        "OutOfMemoryError: CUDA out of memory\n": raising(torch.OutOfMemoryError("CUDA out of memory")),
    }
    launch(tmp_path, *OPTIONS, "train.steps=6", "name=plain")
    for number, (shown, record) in enumerate(cases.items()):
        use_graphs(monkeypatch, record)
        text = launch(tmp_path, *OPTIONS, "train.steps=6", f"name=run{number}")
        assert text.count("warning: going on without CUDA graphs: " + shown) == text.count("without CUDA graphs") == 1
        ours, theirs = (tmp_path / "results" / name for name in (f"run{number}", "plain"))
        assert same(ours, theirs) and records(ours) == records(theirs)
        assert logged(ours, "bad_steps") == logged(theirs, "bad_steps") == [0, 0, 0, 0, 1, 0]


class Calls(TorchDispatchMode):
    """Takes down operators with all their arguments; of tensors shape and type."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        said = tree_map(lambda x: (x.shape, x.dtype) if torch.is_tensor(x) else x, (arguments, options))
        self.seen += [] if "profiler" in str(operator) else [f"{operator} {said}"]
        return operator(*arguments, **(options or {}))


@pytest.mark.parametrize(
    "options",
    [
        ["alignment=self", "alignment.until=6", "alignment.fade=4"],
        pytest.param(["model=tread_rwkv", "objective=rf"], marks=pytest.mark.slow),
        pytest.param(["model=tread_mamba", "model.head_dim=8", "model.state=8"], marks=pytest.mark.slow),
        pytest.param(["model=maskdit", "train.loss_tokens=kept"], marks=pytest.mark.slow),
        pytest.param(["model=sprint", "train.path_drop=0.1"], marks=pytest.mark.slow),
    ],
)
def test_no_argument_but_tensors_changes_from_step_to_step(tmp_path, monkeypatch, options):
    """And the test would see it: by a learning rate, or a share, that is a number of Python."""
    calls, training_step = [], failures.training_step

    def watched(run):
        if run.step in (3, 4):
            inputs = step.step_inputs(run)
            numbers = [share.item() for share in inputs.shares]
            others = inputs._replace(rate=inputs.rate.item()), inputs._replace(shares=numbers)
            tallies = run.statistics.sums.clone(), run.statistics.recent.clone()
            for given in (inputs, *others):
                given.hold.fill_(1.0)
                with Calls() as seen:
                    step.step_on(run, given)
                calls.append(seen.seen)
            run.statistics.sums, run.statistics.recent = tallies
        training_step(run)

    monkeypatch.setattr(failures, "training_step", watched)
    launch(tmp_path, *OPTIONS, "train.steps=5", *options)
    assert len(calls[0]) > 500 and any("_fused_adamw_.tensor_lr" in call for call in calls[0])
    differ = [[pair for pair in zip(calls[i], calls[i + 3], strict=True) if pair[0] != pair[1]] for i in range(3)]
    assert not differ[0] and differ[1] and differ[2], differ


GRAPHED = """
from test_graphs import itself
from tread.training import start
from tread.training.graphs import Graphs

def open_graphs(run):
    def recording(do):
        if FAILS and run.processes.rank == 1:
            raise RuntimeError("no kernel")
        replay = itself(run, do)

        def noted():
            with open(f"replayed-{run.processes.rank}", "a") as file:
                file.write(f"{run.step} ")
            return replay()

        return noted

    return Graphs(run, None, recording)

start.open_graphs = open_graphs
"""


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_two_processes_replay_after_eleven_steps_or_go_on_without(tmp_path, fails):
    """In DDP, whose buckets change at first; a recording that fails in one process ends the graphs of both."""
    options = ["model=dit", "train.steps=14", "name=run", "every.sample=99", "dataset.heldout=null"]
    for name in ("plain", "graphs"):
        (tmp_path / name).mkdir()
    (tmp_path / "graphed.py").write_text(GRAPHED.replace("FAILS", str(fails)))
    launch_processes(tmp_path / "plain", *options, processes=2)
    text = launch_processes(tmp_path / "graphs", *options, f"plugins=[{tmp_path}/graphed.py]", processes=2)
    assert same(tmp_path / "graphs/results/run", tmp_path / "plain/results/run")
    assert text.count("going on without CUDA graphs") == fails and text.count("no kernel") == fails
    replayed = [tmp_path / f"graphs/replayed-{rank}" for rank in (0, 1)]
    assert [path.read_text().split() if path.exists() else [] for path in replayed] == (
        [[], []] if fails else [["11"] * 3 + ["12", "13"]] * 2
    )


def test_graphs_are_for_cuda_and_an_error_elsewhere(tmp_path, capsys):
    with pytest.raises(SystemExit, match="train.cuda_graphs is true, but the run is on cpu, without a CUDA device"):
        launch(tmp_path, "train.cuda_graphs=true", "resume=auto")


@pytest.mark.parametrize(
    ("name", "count", "why"),
    [("sgd", 1, "optim.name=sgd is no fused"), ("adamw", 2, "several processes"), ("adamw", 1, "a live encoder")],
)
def test_where_auto_takes_no_graphs_a_line_says_why(monkeypatch, name, count, why):
    said = []
    monkeypatch.setattr(graphs, "is_fused", lambda optimizer: optimizer == "adamw")
    live = SimpleNamespace(encoder=count == 1)
    train, optim, model = SimpleNamespace(cuda_graphs="auto"), SimpleNamespace(name=name), SimpleNamespace()
    run = SimpleNamespace(
        cfg=SimpleNamespace(train=train, optim=optim, model=model), device=torch.device("cuda"), optimizer=name,
        aligner=live, processes=SimpleNamespace(count=count, say=said.append),
    )  # fmt: skip
    assert open_graphs(run) is None and len(said) == 1 and why in said[0]
    assert ("=true tries them" in said[0]) == (name == "adamw")


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_graphed_steps_on_a_gpu_are_those_without(tmp_path, monkeypatch, compiled):
    """The losses of a run with graphs, of two kinds, beside those of one without, where others use the GPU, too."""
    taken, take = [], graphs.Graphs.take
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40, 2**40))
    monkeypatch.setattr(graphs.Graphs, "take", lambda self, inputs: take(self, inputs) or taken.append(len(self.kinds)))
    for name in ("true", "false"):
        (tmp_path / name).mkdir()
        options = [f"train.cuda_graphs={name}", f"train.compile={compiled}", "model.hidden_size=128"]
        text = launch(tmp_path / name, *OPTIONS, *options)
        assert "without CUDA graphs" not in text, text
    assert len(taken) == 14 and taken[-1] == 2
    ours, theirs = (tmp_path / name / "results/run" for name in ("true", "false"))
    for found, expected in zip(records(ours), records(theirs), strict=True):
        assert found == pytest.approx(expected, rel=1e-3)
