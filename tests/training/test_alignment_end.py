"""Alignment that ends within a run. References: closed forms, a run without alignment operator by operator, gradients
of denoising alone, and a run that nobody interrupted or split."""

import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import equal, launch, launch_processes, logged
from test_alignment import whole
from test_graphs import Calls
from torch.testing import assert_close

from tread.training import failures, step
from tread.training.alignment import Alignment
from tread.training.costs import sample_flops
from tread.training.periodic import forecast

PLAIN = ("model=tread", "train.micro_batch_size=null", "every.sample=99")
ENDING = (*PLAIN, "alignment=self", "alignment.blocks=[1,2]", "alignment.until=4", "alignment.fade=2", "name=run")


def test_the_weight_falls_linearly_to_its_end():
    """By hand: over the 4 steps before step 10, a fourth each."""
    fading = Alignment(kind="self", weight=0.8, until=10, fade=4)
    expected = [0.8, 0.8, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0]
    assert [fading.weight_at(number) for number in (0, 5, 6, 7, 8, 9, 10, 99)] == pytest.approx(expected)
    sudden = Alignment(kind="self", weight=0.8, until=2)
    assert [sudden.weight_at(number) for number in (0, 1, 2)] == [0.8, 0.8, 0.0]
    assert [Alignment(kind=kind).weight_at(10**9) for kind in ("self", "none")] == [0.5, 0.0]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run whose alignment ends at step 4 of 6, and what was seen of its steps."""
    folder, training_step, optimizer_step = tmp_path_factory.mktemp("ended"), step.training_step, step.optimizer_step
    seen = SimpleNamespace(folder=folder, run=folder / "results/run", calls={}, expected=[], gradients=[])

    def watched(run):
        seen.last = run
        if run.step == 4 and run.aligner:
            inputs = step.step_inputs(run)
            given = run.data.latents, *inputs.batches, inputs.draws, run.network.null(1)
            [loss] = step.loss(run.cfg, run.network, *given)
            seen.expected = torch.autograd.grad(loss.mean(), [*run.network.parameters()])
        if run.step not in (3, 4):
            return training_step(run)
        with Calls() as calls:
            training_step(run)
        seen.calls[run.cfg.name, run.step] = [re.sub("0x[0-9a-f]+", "", call) for call in calls.seen]  # of generators

    def updated(optimizer, *rest):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        seen.gradients.append([p.grad.clone() for p in parameters if p.grad is not None])
        return optimizer_step(optimizer, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failures, "training_step", watched)
        patch.setattr(step, "optimizer_step", updated)
        launch(folder, *PLAIN, "name=plain")
        seen.gradients.clear()
        seen.text = launch(folder, *ENDING)
    return seen


def test_after_its_end_a_step_is_a_plain_runs(ended):
    """Each operator and shape, drawing and update included, and the gradients bit for bit; before, more is done."""
    assert ended.calls["run", 3] != ended.calls["plain", 3] and ended.calls["run", 4] == ended.calls["plain", 4]
    assert [len(each) for each in ended.gradients] == [len(ended.expected) + 4] * 4 + [len(ended.expected)] * 2
    assert all(map(torch.equal, ended.gradients[4], ended.expected))


def test_a_run_states_logs_and_counts_what_is_left(ended):
    assert "blocks 1 and 2 (16 and 8 tokens) with block 3 of the averaged network, weight 0.2, fall" in ended.text
    assert "weight 0.2, falling to 0 over 2 steps up to step 4; the projector" in ended.text
    losses, alignments, totals = (logged(ended.run, name) for name in ("loss", "alignment", "total"))
    assert len(losses) == 6 and len(alignments) == len(totals) == 4
    weights = (0.2, 0.2, 0.2, 0.1)
    assert totals == pytest.approx([loss + w * a for loss, w, a in zip(losses, weights, alignments)])
    run = ended.last
    plain, more = (sample_flops(run.network, run.cfg.model.resolved_routes, each) for each in (None, run.aligner))
    assert logged(ended.run, "flops")[-1] == run.cfg.train.batch_size * (4 * more + 2 * plain) and more > plain
    run.step = 1
    assert f"training {(3 * 100 + 2 * 100 * plain / more) / 60:.1f}" in forecast(run, 100.0)


@pytest.mark.slow
def test_it_goes_on_bit_for_bit_and_the_end_may_be_moved(ended, tmp_path):
    shutil.copytree(ended.run / "step_0000003", tmp_path / "results/run/step_0000003")
    assert "goes on at step 3" in launch(tmp_path, *ENDING)
    assert equal(whole(tmp_path / "results/run"), whole(ended.run))
    text = launch(tmp_path, *ENDING, "train.steps=8", "alignment.until=7", "alignment.fade=0")
    assert "alignment.until was 4, is 7" in text and len(logged(tmp_path / "results/run", "alignment")) == 2


@pytest.mark.slow
def test_two_processes_leave_the_projector_out_at_the_end(ended, tmp_path):
    """DDP would miss its gradients."""
    launch_processes(tmp_path, *ENDING, processes=2)
    actual, expected = whole(tmp_path / "results/run"), whole(ended.run)
    for name in (n for n in expected if not n.startswith("optimizer")):
        assert_close(actual[name], expected[name], rtol=1e-5, atol=1e-5)
    assert logged(tmp_path / "results/run", "loss") == pytest.approx(logged(ended.run, "loss"), rel=1e-5)
