"""When bad steps end a run, and the FLOPs and seconds of its records.

References: steps spoilt by hand, closed forms of the FLOPs, a clock set by hand, and the run in one go.
"""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import launch, logged, same
from test_survival import RUN, spoil, status
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dit import DiT
from routing_module import Route, draw_ids
from tread.checkpoints import checkpoint
from tread.checkpoints.network import build_network, read_network
from tread.checkpoints.run_log import RunLog
from tread.data.writer import write_dataset
from tread.preparing import digits
from tread.training import failures, periodic, settings
from tread.training.costs import sample_flops
from tread.training.run import StepStatistics


def test_the_last_steps_are_kept_whatever_cuts_them():
    """Reference: a list. One is read and made anew after each step, as by a checkpoint, and restarted, as by a log."""
    flags = (torch.rand(250, generator=torch.Generator().manual_seed(0)) < 0.3).float()
    whole, cut = StepStatistics("cpu"), StepStatistics("cpu")
    for step, skip in enumerate(flags):
        for statistics in (whole, cut):
            statistics.add(torch.tensor(1.0), torch.tensor(1.0), skip)
        cut.restart()
        cut = StepStatistics("cpu", json.loads(json.dumps(cut.read())))
        expected = "".join(f"{flag:.0f}" for flag in flags[: step + 1].tolist())[-100:]
        assert whole.read()["recent"] == cut.read()["recent"] == expected


@pytest.mark.parametrize(
    "bad, steps, ends",
    [
        ({3, 4, 5, 6}, 7, 7),  # a run shorter than max_bad_steps is judged at its end
        ({3, 4, 5}, 6, None),  # half is not more than half
        ({0, 1, 3, 4, 6, 7}, 12, 10),  # at 10, once max_bad_steps are done: 6 of 10
        ({0, 1, 3, 4, 6}, 12, None),
    ],
)
def test_more_than_half_of_the_last_steps_bad_is_a_failure(tmp_path, monkeypatch, bad, steps, ends):
    spoil(monkeypatch, bad)
    options = (f"train.steps={steps}", "train.max_bad_steps=10", "every.evaluate=50", "every.sample=50")
    if ends is None:
        launch(tmp_path, *options)
        assert status(tmp_path)["state"] == "finished"
        return
    with pytest.raises(SystemExit) as error:
        launch(tmp_path, *options)
    count = len([step for step in bad if step < ends])
    assert f"not finite in {count} of the last {ends} steps, up to {ends} (more than half" in str(error.value)
    assert status(tmp_path)["state"] == "failed" and status(tmp_path)["step"] == ends
    saved = [path.name for path in (tmp_path / RUN).glob("step_*")]
    assert saved == ([] if 0 in bad else ["step_0000003"])  # while most are bad nothing is saved


def test_a_learning_rate_out_of_all_proportion_does_not_finish(tmp_path):
    """The issue's own case: evaluation loss 2e25, exit code 0, "finished"."""
    options = ("train.steps=20", "optim.lr=1e6", "every.log=100", "every.evaluate=100", "every.save=100")
    with pytest.raises(SystemExit, match=r"in \d+ of the last 20 steps(?s:.*)smaller optim.lr(?s:.*)look at the data"):
        launch(tmp_path, *options, "every.sample=100")
    assert status(tmp_path)["state"] == "failed" and not list((tmp_path / RUN).glob("step_*"))


def test_a_run_that_was_cut_is_judged_as_in_one_go(tmp_path, monkeypatch):
    """Steps 2, 4, 5 and 7 of 7: stopped after 6, at 3 of 6, and ended by the fourth."""
    spoil(monkeypatch, {1, 3, 4, 6})
    launch(tmp_path, "train.steps=6", "every.save=6")
    assert checkpoint.find(tmp_path / RUN).info["tally"]["recent"] == "010110"
    with pytest.raises(SystemExit, match="in 4 of the last 7 steps"):
        launch(tmp_path, "train.steps=7")


def latents(folder, spoilt):
    """24 samples in shards of 10 and 14, with a NaN or an infinite number in some, written behind the index's back."""
    rng = np.random.default_rng(0)
    write_dataset(folder, digits.MEANING, [(rng.standard_normal((n, 1, 1, 8, 8)), np.arange(n) % 10) for n in (10, 14)])
    for index, value in spoilt:
        shard = np.load(folder / f"shard-0000{int(index >= 10)}.npy", mmap_mode="r+")
        shard[index - 10 * (index >= 10), 0, 0, 3, 5] = value
        shard.flush()
    return ["dataset.embedded=null", f"dataset.path={folder}", "dataset.heldout=null", "every.log=6"]


def test_samples_that_are_not_finite_are_named(tmp_path):
    """Three batches of 8 an epoch, each sample in one of them: with one spoilt, two of six steps warn; a failure once
    two batches of three are spoilt."""
    text = launch(tmp_path, *latents(tmp_path / "few", [(12, np.nan)]), "name=few")
    warning = "warning: 2 steps up to step 6 were skipped: loss or gradient not finite"
    assert f"{warning}; these samples hold such numbers: 12 ({tmp_path}/few/shard-00001.npy, row 2)\n" in text
    many = latents(tmp_path / "many", [(3, np.nan), (10, np.inf), (13, -np.inf), (17, np.nan), (23, np.nan)])
    with pytest.raises(SystemExit) as error:
        launch(tmp_path, *many, "name=many")
    first, second = (tmp_path / f"many/shard-0000{number}.npy" for number in (0, 1))
    named = f"Look at the data first: these samples hold such numbers: 3 ({first}, row 3), 10 ({second}, row 0), "
    assert named + f"13 ({second}, row 3) and 2 more; nothing was saved yet" in str(error.value)


def test_held_out_samples_that_are_not_finite_are_named_and_cost_no_step(tmp_path):
    """The run then goes on without them, as one that never had them; a run that diverges on good ones saves nothing."""
    options = [*latents(tmp_path / "train", []), "every.save=6"]
    latents(tmp_path / "heldout", [(12, np.nan), (14, np.inf)])
    with pytest.raises(SystemExit) as error:
        launch(tmp_path, *options, f"dataset.heldout={tmp_path}/heldout")
    shard = tmp_path / "heldout/shard-00001.npy"
    said = "the evaluation loss after step 3 is nan: held-out samples 12 "
    assert f"{said}({shard}, row 2), 14 ({shard}, row 4) hold numbers that are not finite" in str(error.value)
    assert checkpoint.find(tmp_path / RUN).step == 3 and status(tmp_path)["state"] == "failed"
    launch(tmp_path, *options)
    launch(tmp_path, *options, "name=whole")
    assert same(tmp_path / RUN, tmp_path / "results/whole")


@pytest.mark.parametrize(
    "options, saved",
    [
        ((), "1.09"),  # r(2→2) of 6 blocks
        (("model.depth=8", "model.routes.0.selection_ratio=0.25"), "1.11"),
        (("model.routes.0.rejoin=stale",), None),  # which is to save nothing
        (("train.ratio_schedule={start: 0, end: 0.5, last: 4}",), "1.09"),  # the most that it comes to
        (("model.depth=8", "train.ratio_schedule={start: 0.25, end: 0.5, last: 4}"), None),
    ],
)
def test_routes_that_save_little_are_doubted(tmp_path, options, saved):
    text = launch(tmp_path, *options, "train.steps=1", "dataset.heldout=null")
    found = re.findall(r"warning: the routes save little: a training step takes (\S+) times", text)
    assert found == [saved] * bool(saved)


def build_network_of(folder):
    with torch.device("meta"):
        return build_network(read_network(checkpoint.find(folder / RUN).info["config"]))


def test_flops_are_those_of_the_steps_routes_and_batch(tmp_path):
    """Closed form: 3 forward passes a sample; steps 1 to 3 at ratio 0.5, 4 and 5 at 0.25, then none routed."""
    options = ["train.ratio_schedule={start: 0.5, end: 0.25, last: 6, levels: 2}", "train.routes_until=5"]
    launch(tmp_path, *options, "train.micro_batch_size=2", "every.log=4")
    network, actual = build_network_of(tmp_path), RunLog(tmp_path / RUN).records()
    route = settings.read(checkpoint.find(tmp_path / RUN).info["config"]).model.routes[0]
    half, quarter = (network.forward_flops([replace(route, selection_ratio=r)]) for r in (0.5, 0.25))
    steps = np.cumsum([half] * 3 + [quarter] * 2 + [network.forward_flops()]) * 3 * 8
    assert all(record["flops"] == steps[record["step"] - 1] for record in actual)
    assert [record["step"] for record in actual] == [3, 4, 6, 6]
    *_, last = (record for record in actual if "flops_per_s" in record)  # of a step with a route and one without
    assert last["flops_per_s"] / last["images_per_s"] == pytest.approx((steps[5] - steps[3]) / 16, rel=0.01)


@pytest.mark.parametrize("routes", [(), (Route(1, 3, 0.5),)])
def test_training_flops_are_torchs_count_of_forward_and_backward(tiny, routes):
    """Torch counts a multiply-add as two, and no gradient of the first layer's input."""
    drawn = [(route, draw_ids(torch.rand(2, 16), route.selection_ratio)) for route in routes]
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        tiny(torch.randn(2, 4, 8, 8), torch.randn(2), torch.tensor([1, 2]), routes=drawn).square().sum().backward()
    assert 2 * sample_flops(tiny, routes) == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_seconds_count_training_alone_and_all_launches(tmp_path, monkeypatch):
    """By a clock that each step puts 1 s on (the first 10 s), each evaluation, grid and checkpoint 100 s."""
    now = [0.0]
    monkeypatch.setattr(periodic.time, "perf_counter", lambda: now[0])

    def taking(module, name, seconds):
        original = getattr(module, name)

        def slow(*arguments):
            now[0] += seconds() if callable(seconds) else seconds
            return original(*arguments)

        monkeypatch.setattr(module, name, slow)

    steps = iter([10.0, *[1.0] * 100])
    taking(failures, "training_step", lambda: next(steps))
    for name in ("heldout_loss", "save_grid"):
        taking(periodic, name, 100.0)
    taking(periodic.checkpoint, "snapshot", 100.0)
    launch(tmp_path, "train.steps=4", "every.log=2", "every.sample=3")
    launch(tmp_path, "train.steps=8", "every.log=2", "every.sample=3")
    actual = [(record["step"], record["seconds"]) for record in RunLog(tmp_path / RUN).records()]
    assert actual == [(step, 9.0 + step) for step in (2, 3, 4, 4, 6, 6, 8, 8)]
    assert checkpoint.find(tmp_path / RUN).info["seconds"] == 17.0

    def beside(record):
        return {key: record[key] for key in ("eval_seconds", "draw_seconds", "save_seconds") if key in record}

    log, evaluated = RunLog(tmp_path / RUN), {"eval_seconds": 100.0}
    drawn = {"draw_seconds": 100.0, "save_seconds": 100.0}
    assert [beside(record) for record in log.records()] == [{}, *[evaluated, drawn] * 3, evaluated]  # the end's too
    assert log.read_status()["spent"] == drawn
    assert logged(tmp_path / RUN, "first_step_seconds") == [10.0, 1.0]
    launch(tmp_path, "name=late", "train.steps=4", "every.log=4", "every.evaluate=2")  # evaluated before it logs
    first, *rest = RunLog(tmp_path / "results/late").records()
    assert first["first_step_seconds"] == 1.0 and not [record for record in rest if "first_step_seconds" in record]


def test_the_time_foretold_counts_evaluation_grids_and_judging(tmp_path, monkeypatch):
    """By a clock that each step of 8 images puts 2.4 s on, thus 0.1 s a pass; reference: the passes that follow."""
    now, passes, forward, training_step = [0.0], [], DiT.forward, failures.training_step
    monkeypatch.setattr(periodic.time, "perf_counter", lambda: now[0])

    def counted(self, x, *arguments, **more):
        passes.extend([] if torch.is_grad_enabled() else x)
        return forward(self, x, *arguments, **more)

    def slow(run):
        now[0] += 2.4
        return training_step(run)

    monkeypatch.setattr(DiT, "forward", counted)
    monkeypatch.setattr(failures, "training_step", slow)
    every = ("every.evaluate=3", "every.sample=8", "every.save=8")
    text = launch(tmp_path, "model=dit", "train.steps=8", *every, "eval.demo_samples=20")
    assert len(passes) == 192 + 30 + 60
    listed = "training 12.0, evaluation 19.2, grids 3.0, judging 6.0"
    assert f"  time      about 40.2 s more, estimated by the first steps: {listed}\n" in text


def test_a_run_without_held_out_data_or_routes_says_so(tmp_path):
    text = launch(tmp_path, "model=dit", "dataset.heldout=null", "train.steps=1")
    assert re.search(r"\nwarning: there is no held-out data .*no evaluation loss.* heldout=0.02", text)
    assert "  eval_loss             none: there is no held-out data\n" in text and "times fewer" not in text
