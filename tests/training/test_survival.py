"""Runs that meet damage, full disks, bad numbers, wrong launches and kill -9.

The reference is the undisturbed run, bit for bit."""

import concurrent.futures
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, launch, launch_processes, records, same, state
from forked import run_python
from PIL import Image
from torch._dynamo.exc import BackendCompilerFailed

from tread.checkpoints import checkpoint
from tread.checkpoints.run_log import RunLog
from tread.data.writer import write_dataset
from tread.models import backbone
from tread.preparing import digits
from tread.training import failures, periodic, start, step

RUN = Path("results/digits-tread")


def status(folder) -> dict:
    return json.loads((folder / RUN / "status.json").read_text())


OPTIONS = ("train.steps=8", "every.save=2", "train.micro_batch_size=4", "ema.power=[0.1]")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Eight steps, undisturbed, with a checkpoint each two."""
    folder = tmp_path_factory.mktemp("whole")
    launch(folder, *OPTIONS)
    return folder


@pytest.mark.slow
def test_resumed_twice_within_an_epoch_with_accumulation(whole, tmp_path):
    for steps in (5, 7, 8):
        launch(tmp_path, *OPTIONS, f"train.steps={steps}")
    assert [start["step"] for start in RunLog(tmp_path / RUN).starts()] == [0, 5, 7]
    assert same(tmp_path / RUN, whole / RUN)
    powers = [checkpoint.find(folder / RUN).tensors("powers") for folder in (tmp_path, whole)]
    assert all(torch.equal(value, powers[1][key]) for key, value in powers[0].items()) and powers[0]
    loss = [[r for r in records(folder / RUN) if "loss" in r] for folder in (tmp_path, whole)]
    assert loss[0] == loss[1] and len(loss[0]) == 8
    assert [r for r in records(tmp_path / RUN) if r["step"] == 8] == [r for r in records(whole / RUN) if r["step"] == 8]


@pytest.mark.slow
def test_another_number_of_processes_keeps_batches_and_draws(whole, tmp_path):
    """Four steps by one process, four by two: equal up to the order of sums."""
    launch(tmp_path, *OPTIONS, "train.steps=4")
    launch_processes(tmp_path, *OPTIONS, processes=2)
    actual, expected = ([r for r in records(folder / RUN) if r["step"] != 4] for folder in (tmp_path, whole))
    for this, other in zip(actual, expected, strict=True):
        assert this == pytest.approx(other, rel=1e-5)
    assert [r["step"] for r in actual if "eval_loss" in r] == [3, 6, 8]


def test_two_processes_equal_one_over_20_steps_of_uneven_data(tmp_path):
    """21 samples in batches of 8, 7 held out, 5 evaluation points: no share is even. Each process takes micro-batches.
    A hang is a timeout."""
    for part, count in (("train", 21), ("heldout", 7)):
        content = np.random.default_rng(count).standard_normal((count, 1, 1, 8, 8))
        write_dataset(tmp_path / part, digits.MEANING, [(content, np.arange(count) % 10)])
    options = ["dataset.embedded=null", f"dataset.path={tmp_path}/train", f"dataset.heldout={tmp_path}/heldout"]
    options += ["train.steps=20", "every.evaluate=7", "every.sample=20", "every.save=6", "eval.points=5"]
    launch(tmp_path, *options, "name=one")
    text = launch_processes(tmp_path, *options, "name=two", "train.micro_batch_size=2", processes=2)
    assert "8 = 2 processes × 2 accumulation steps × 2 images" in text
    this, two = (records(tmp_path / "results" / name) for name in ("one", "two"))
    assert [r["step"] for r in two if "loss" in r] == list(range(1, 21))  # written once
    for actual, expected in zip(two, this, strict=True):
        assert actual == pytest.approx(expected, rel=1e-5)
    ours, theirs = (checkpoint.find(tmp_path / f"results/{n}/step_0000006").tensors("ema") for n in ("two", "one"))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    grids = [np.asarray(Image.open(tmp_path / f"results/{name}/samples/step_0000020.png")) for name in ("one", "two")]
    assert np.abs(np.subtract(*grids, dtype=int)).max() <= 1  # each process draws half of it
    assert text.count("expected for") <= 1 and text.count("  checkpoint  ") == 1


@pytest.fixture
def copied(whole, tmp_path):
    """A folder with a copy of the undisturbed run."""
    shutil.copytree(whole, tmp_path, symlinks=True, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "step", '{"format"', "", "{}", "[]"])
def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_is_used(whole, copied, damage):
    """With leftovers of a kill beside them, which are removed."""
    folder = copied / RUN / "step_0000008"
    weights = folder / "ema.safetensors"
    if damage == "flip":
        content = bytearray(weights.read_bytes())
        content[len(content) // 2] ^= 1
        weights.write_bytes(content)
    elif damage == "cut":
        os.truncate(weights, 100)
    elif damage == "remove":
        weights.unlink()
    elif damage == "step":
        info = json.loads((folder / "info.json").read_text())
        (folder / "info.json").write_text(json.dumps({**info, "step": 7}))
    else:
        (folder / "info.json").write_text(damage)
    checked, (problem,) = checkpoint.find_whole(copied / RUN)
    assert checked.step == 6 and str(folder) in problem
    if damage == "flip":
        for name in (".step_0000010.partial", ".step_0000002.old"):
            shutil.copytree(copied / RUN / "step_0000002", copied / RUN / name)
        text = launch(copied, *OPTIONS)
        assert "warning: " in text and "goes on at step 6, from the checkpoint before" in text
        assert same(copied / RUN, whole / RUN) and not list((copied / RUN).glob(".step_*"))


@pytest.mark.parametrize(("last", "every", "left"), [(1, None, [2, 8]), (2, None, [2, 6, 8]), (1, 4, [2, 4, 8])])
def test_which_checkpoints_are_kept(copied, last, every, left):
    """Also those with scores beside them, or samples that are being scored."""
    (copied / RUN / "step_0000002/.fid-1").mkdir()
    (copied / RUN / "step_0000004/.fid.lock").touch()  # what a score left that never began keeps nothing
    checkpoint.prune(copied / RUN, last, every)
    assert sorted(path.name for path in (copied / RUN).glob("*step_*")) == [f"step_{step:07d}" for step in left]


def test_without_a_whole_checkpoint_nothing_is_begun(copied):
    for folder in (copied / RUN).glob("step_*"):
        os.truncate(folder / "model.safetensors", 10)
    with pytest.raises(SystemExit, match=r"no checkpoint of \S+ is whole(?s:.*)step_0000008(?s:.*)step_0000002"):
        launch(copied, *OPTIONS)


FULL = """
import resource, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests"]
sys.dont_write_bytecode = True  # else the limit may cut a module's
from conftest import launch
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))  # what a full disk does, to each file
launch(".", *sys.argv[2:])
"""


def test_a_full_disk_stops_with_a_message_and_leaves_older_checkpoints_whole(whole, copied):
    done = run_python("-c", FULL, ROOT, *OPTIONS, "train.steps=10", cwd=copied)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert status(copied)["state"] == "failed" and "could not be written" in status(copied)["reason"]
    assert checkpoint.find_whole(copied / RUN)[0].step == 8 and same(copied / RUN, whole / RUN)
    assert not list((copied / RUN).glob(".step_*"))


@pytest.mark.parametrize("error", [OSError("the disk was pulled out"), SystemExit(3)], ids=["disk", "thread"])
def test_training_goes_on_while_a_checkpoint_is_written_and_its_failure_ends_the_run(tmp_path, monkeypatch, error):
    """Step 3's is written once step 5 has begun; its failure is raised by the next log, and leaves nothing behind."""
    begun, save, training_step = threading.Event(), checkpoint.save, failures.training_step

    def late(run, number, *content):
        if number == 3:
            assert begun.wait(60)
            raise error
        return save(run, number, *content)

    def watched(run):
        if run.step == 5:
            begun.set()
            concurrent.futures.wait([run.written])
        return training_step(run)

    monkeypatch.setattr(checkpoint, "save", late)
    monkeypatch.setattr(failures, "training_step", watched)
    with pytest.raises((SystemExit, RuntimeError), match="pulled out|writing thread ended: SystemExit"):
        launch(tmp_path, "train.steps=12", "every.save=3", "every.evaluate=12")
    assert status(tmp_path)["state"] == "failed" and status(tmp_path)["step"] == 6
    assert not list((tmp_path / RUN).glob("*step_*"))


def spoil(monkeypatch, steps: set[int]) -> None:
    """Let the loss of some steps be NaN."""
    loss, count = step.loss, {"now": 0}

    def spoilt(*arguments):
        [actual] = loss(*arguments)
        count["now"] += 1
        return [actual * float("nan") if count["now"] - 1 in steps else actual]

    monkeypatch.setattr(step, "loss", spoilt)


def test_bad_steps_are_skipped_and_counted(tmp_path, monkeypatch):
    """Reference: the optimizer's own count of steps, and the mean of the good losses logged one by one."""
    for every in (6, 1):
        with monkeypatch.context() as patch:
            spoil(patch, {1, 2, 4})
            text = launch(tmp_path, "every.save=6", f"every.log={every}", f"name=every{every}")
        if every == 6:
            assert "3 steps up to step 6 were skipped: loss or gradient not finite" in text
    together, alone = (tmp_path / "results" / f"every{every}" for every in (6, 1))
    assert int(state(together)["optimizer/step/x_embedder.proj.bias"]) == 3
    [line] = [r for r in RunLog(together).records() if "bad_steps" in r]
    single = [r for r in RunLog(alone).records() if "bad_steps" in r]
    assert line["bad_steps"] == 3 and [r["bad_steps"] for r in single] == [0, 1, 1, 0, 1, 0]
    good = [r for r in single if "loss" in r]
    assert [r["step"] for r in good] == [1, 4, 6]
    assert line["loss"] == pytest.approx(np.mean([r["loss"] for r in good]))
    assert line["grad_norm"] == pytest.approx(np.mean([r["grad_norm"] for r in good]))
    assert same(together, alone)


TOO_MANY = [(range(9, 100), (1, 3), (10, 15), 9), (range(4, 10), (12, 12), (5, 10), None)]


@pytest.mark.parametrize("bad, every, shown, kept", TOO_MANY)
def test_too_many_bad_steps_in_a_row_end_a_run_and_keep_what_was_saved(tmp_path, monkeypatch, bad, every, shown, kept):
    """Also a row that has ended before the log."""
    spoil(monkeypatch, set(bad))
    options = ("train.steps=24", "train.max_bad_steps=5", "every.evaluate=100", "every.sample=100")
    with pytest.raises(SystemExit) as error:
        launch(tmp_path, *options, f"every.log={every[0]}", f"every.save={every[1]}")
    actual = re.search(r"in 6 steps in a row, (\d+) to (\d+) .* σ lay between (\S+) and (\S+)\. Try", str(error.value))
    assert actual and (int(actual[1]), int(actual[2])) == shown and 0 < float(actual[3]) < float(actual[4])
    assert status(tmp_path)["state"] == "failed" and "optim.lr" in status(tmp_path)["reason"]
    assert (f"that of step {kept}" if kept else "nothing was saved yet") in str(error.value)
    saved, _ = checkpoint.find_whole(tmp_path / RUN)
    assert (saved and saved.step) == kept  # what was skipped is not saved


def test_skipped_steps_change_no_average_and_remove_no_checkpoint(tmp_path, monkeypatch):
    """Three steps and three bad ones, against the checkpoint of three steps. The last one is saved all the same."""
    spoil(monkeypatch, {3, 4, 5})
    launch(tmp_path, "ema.power=[0.1]", "checkpoints.keep_last=1")
    run = tmp_path / RUN
    actual, expected = checkpoint.find(run), checkpoint.find(run / "step_0000003")
    assert actual.step == 6
    for part in ("model", "ema", "powers", "optimizer"):
        ours, theirs = actual.tensors(part), expected.tensors(part)
        assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_a_save_that_is_due_at_a_bad_step_waits_for_a_good_one(tmp_path, monkeypatch):
    spoil(monkeypatch, {2, 3})
    launch(tmp_path)
    assert sorted(path.name for path in (tmp_path / RUN).glob("step_*")) == ["step_0000005", "step_0000006"]


def test_a_stop_after_a_bad_step_saves_the_weights_it_left(tmp_path, monkeypatch):
    spoil(monkeypatch, {3})
    spoilt, calls = step.loss, []
    monkeypatch.setattr(
        step, "loss", lambda *given: (calls.append(1), len(calls) == 4 and signal.raise_signal(15), spoilt(*given))[2]
    )
    with pytest.raises(SystemExit) as stopped:
        launch(tmp_path, "every.save=3", "every.evaluate=100")
    assert stopped.value.code == 75 and checkpoint.find(tmp_path / RUN).step == 4
    monkeypatch.undo()
    launch(tmp_path, "every.save=3", "every.evaluate=100")
    assert checkpoint.find(tmp_path / RUN).step == 6


def test_the_learning_rate_and_clipping_that_are_set_are_used(tmp_path, monkeypatch):
    """What the optimizer is given; and Adam's first moments, (1 − β₁) of the clipped gradients."""
    used, optimizer_step = [], step.optimizer_step
    monkeypatch.setattr(step, "optimizer_step", lambda *given: used.append(given[1]) or optimizer_step(*given))
    launch(tmp_path, "train.steps=4", "optim.warmup_steps=3", "optim.lr=0.3", "optim.clip_norm=1e-6", "every.save=1")
    assert used == pytest.approx([0.1, 0.2, 0.3, 0.3])
    moments = checkpoint.find(tmp_path / RUN / "step_0000001").tensors("optimizer")
    first = torch.cat([value.flatten() for key, value in moments.items() if key.startswith("exp_avg/")])
    assert first.norm().item() == pytest.approx(1e-7, rel=1e-3)


ONE_RANK = """
import os, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests"]
from conftest import launch
from tread.training import step
calls, loss = [0], step.loss
def spoilt(*arguments):
    calls[0] += 1
    [found] = loss(*arguments)
    return [found * (float("inf") if calls[0] == 2 and os.environ["RANK"] == "1" else 1.0)]
step.loss = spoilt
launch(".", *sys.argv[2:])
"""


def test_a_bad_loss_of_one_process_is_skipped_by_all(tmp_path):
    (tmp_path / "spoilt.py").write_text(ONE_RANK)
    done = run_python("spoilt.py", ROOT, "train.steps=3", cwd=tmp_path, processes=2)
    assert done.returncode == 0, done.stderr
    assert [r["bad_steps"] for r in RunLog(tmp_path / RUN).records() if "bad_steps" in r] == [0, 1, 0]
    assert int(state(tmp_path / RUN)["optimizer/step/x_embedder.proj.bias"]) == 2


@pytest.mark.slow
def test_a_number_of_processes_that_was_not_asked_for_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match="train.processes is 2, but 1 were launched: torchrun --nproc_per_node=2"):
        launch(tmp_path, "train.processes=2")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes=2"]
    how = {"capture_output": True, "text": True, "timeout": 120}
    how["env"] = {key: value for key, value in os.environ.items() if key not in ("MASTER_PORT", "WORLD_SIZE")}
    done = subprocess.run([*command, str(ROOT / "train.py"), *TINY], cwd=tmp_path, **how)
    assert done.returncode == 1 and "asked for several processes and started one" in done.stderr
    assert not (tmp_path / "results").exists()


def test_out_of_memory_names_the_micro_batch_that_fits(tmp_path, monkeypatch):
    """A device that takes at most 3 images: of 8, 4, 2, 1 it takes 2."""
    loss = step.loss

    def limited(cfg, network, latents, batch, draws, null, aligner):
        if len(batch.stored) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
        return loss(cfg, network, latents, batch, draws, null, aligner)

    for module in (step, failures):
        monkeypatch.setattr(module, "loss", limited)
    with pytest.raises(SystemExit, match="(?s)micro-batches of 8 images: CUDA out.*train.micro_batch_size=2 would fit"):
        launch(tmp_path)
    assert status(tmp_path)["state"] == "failed"
    launch(tmp_path, "train.micro_batch_size=2")


FROZEN, OVER = ["optim.groups=[{match: blocks.0, lr: 0}]"], ["alignment=self", "alignment.until=1"]


@pytest.mark.parametrize("words", [FROZEN, OVER])
def test_out_of_memory_is_told_where_parts_are_frozen_or_alignment_is_over(tmp_path, monkeypatch, words):
    taken = failures.training_step

    def full(run):
        if run.step:
            raise torch.OutOfMemoryError("CUDA out of memory")
        taken(run)

    monkeypatch.setattr(failures, "training_step", full)
    with pytest.raises(SystemExit, match="train.micro_batch_size=4 would fit"):
        launch(tmp_path, *words)


def test_a_start_notices_that_another_process_trained_meanwhile(copied, monkeypatch):
    """While this one reads its data, another one records a start and ends."""
    opened = start.open_datasets

    def meanwhile(*arguments):
        other = RunLog(copied / RUN)
        other.start(8, other.starts()[-1]["config"])
        other.close()
        return opened(*arguments)

    monkeypatch.setattr(start, "open_datasets", meanwhile)
    with pytest.raises(SystemExit, match="another process trained in .* while this one was starting; start again"):
        launch(copied, *OPTIONS, "train.steps=9")


def test_a_compiler_that_fails_in_a_step_is_left_out_from_there(whole, tmp_path, monkeypatch):
    """In the second of two micro-batches, when the first one's gradients are there; reference: the eager run."""

    class Broken(BackendCompilerFailed):
        def __init__(self):
            Exception.__init__(self, "file too short\nand more")

    calls, loss, problems = [], step.loss, {2: Broken()}

    def failing(*arguments):
        calls.append(1)
        if len(calls) in problems:
            raise problems[len(calls)]
        return loss(*arguments)

    monkeypatch.setattr(step, "loss", failing)
    try:
        text = launch(tmp_path, *OPTIONS)
        calls.clear()
        problems[3] = torch.OutOfMemoryError("CUDA out of memory")  # without the compiler it takes more
        with pytest.raises(SystemExit, match="out of memory with micro-batches of 4 images"):
            launch(tmp_path, *OPTIONS, "name=larger")
    finally:
        torch.compiler.set_stance("default")
    assert text.count("warning: going on without torch.compile, which failed: Broken: file too short\n") == 1
    assert same(tmp_path / RUN, whole / RUN)


def test_activation_checkpointing_changes_no_bit(whole, tmp_path, monkeypatch):
    calls, recompute = [], backbone.checkpoint
    watched = lambda *given, **options: calls.append(1) or recompute(*given, **options)  # noqa: E731
    monkeypatch.setattr(backbone, "checkpoint", watched)
    launch(tmp_path, *OPTIONS, "train.memory=checkpointing")
    assert len(calls) == 8 * 2 * 6 and same(tmp_path / RUN, whole / RUN)


def test_an_evaluation_that_was_interrupted_is_done_on_resumption(whole, tmp_path, monkeypatch):
    heldout_loss = periodic.heldout_loss

    def interrupting(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return heldout_loss(*arguments)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ending:
        patch.setattr(periodic, "heldout_loss", interrupting)
        launch(tmp_path, *OPTIONS)
    assert ending.value.code == 75 and status(tmp_path)["state"] == "interrupted" and status(tmp_path)["step"] == 3
    assert not [r for r in records(tmp_path / RUN) if "eval_loss" in r]
    launch(tmp_path, *OPTIONS)
    ours, theirs = (sorted(map(str, records(folder / RUN))) for folder in (tmp_path, whole))
    assert ours == theirs and same(tmp_path / RUN, whole / RUN)


@pytest.mark.parametrize("place", ["heldout_loss", "save_grid"])
def test_what_fails_beside_training_costs_no_step(whole, tmp_path, monkeypatch, place):
    """Its step is saved out of turn, with a snapshot that is due; then the run goes on as the undisturbed one."""

    def failing(*_):
        raise OSError("the disk was pulled out")

    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="the disk was pulled out"):
        patch.setattr(periodic, place, failing)
        launch(tmp_path, *OPTIONS, "every.sample=3", "every.save=8", "ema.snapshot_every=3")
    assert checkpoint.find_whole(tmp_path / RUN)[0].step == status(tmp_path)["step"] == 3
    assert (tmp_path / RUN / "ema_snapshots" / "step_0000003.safetensors").exists()
    launch(tmp_path, *OPTIONS)
    assert same(tmp_path / RUN, whole / RUN) and len(records(tmp_path / RUN)) == len(records(whole / RUN))


FAILING_RANK = """
import os, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests"]
from conftest import launch
from tread.training import periodic
heldout_loss = periodic.heldout_loss
def failing(*arguments):
    if os.environ["RANK"] == "1":
        raise IndexError("no such row")
    return heldout_loss(*arguments)
periodic.heldout_loss = failing
launch(".", *sys.argv[2:])
"""


@pytest.mark.slow
def test_an_evaluation_that_fails_in_one_process_costs_no_step(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING_RANK)
    done = run_python("failing.py", ROOT, "every.save=6", cwd=tmp_path, processes=2)
    assert done.returncode and status(tmp_path)["reason"].endswith("process 1 failed: IndexError: no such row")
    assert checkpoint.find_whole(tmp_path / RUN)[0].step == 3


FULL_RECORD = """
import os, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests"]
from conftest import launch
from tread.checkpoints.run_log import RunLog
write = RunLog.write
def full(log, record):
    if "eval_loss" in record:
        raise OSError("no space left")
    write(log, record)
RunLog.write = full
launch(".", *sys.argv[2:])
"""


@pytest.mark.slow
def test_an_evaluation_that_can_not_be_recorded_ends_all_processes_and_costs_no_step(tmp_path):
    (tmp_path / "full.py").write_text(FULL_RECORD)
    done = run_python("full.py", ROOT, "every.save=6", cwd=tmp_path, processes=2)
    assert done.returncode and "no space left" in status(tmp_path)["reason"]
    assert checkpoint.find_whole(tmp_path / RUN)[0].step == 3


OWN_SETTINGS = """
import os, runpy, sys
sys.argv = [*sys.argv[1:], "seed=" + os.environ["RANK"]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_settings_typed_for_one_process_alone_are_refused(tmp_path):
    (tmp_path / "own.py").write_text(OWN_SETTINGS)
    done = run_python("own.py", ROOT / "train.py", *TINY, cwd=tmp_path, processes=2)
    assert done.returncode == 1 and "seed is 0 in process 0, but 1 in process 1" in done.stderr, done.stderr
    assert not (tmp_path / "results").exists()


def test_the_first_reason_of_a_failure_stays(tmp_path):
    log = RunLog(tmp_path)
    log.status("running", 1)
    log.status("failed", 2, "out of memory")
    log.status("failed", 2, "connection closed")
    log.status("interrupted", 3, "SIGTERM")
    assert [log.read_status()[key] for key in ("state", "step", "reason")] == ["failed", 2, "out of memory"]
    log.status("running", 3)
    assert log.read_status()["state"] == "running"
    for name in ("status.json", "run.json"):  # damaged ones stop nothing
        (tmp_path / name).write_text('{"sta')
    assert log.read_status() == {} and log.starts() == []


def test_snapshots_of_averages_come_as_asked_and_go_when_the_run_goes_back(copied):
    """The run of every.save=2, asked for one each three steps from step 6 on."""
    folder = copied / RUN / "ema_snapshots"
    assert sorted(path.name for path in folder.iterdir()) == [f"step_000000{step}.safetensors" for step in (2, 4, 6, 8)]
    last = (folder / "step_0000008.safetensors").read_bytes()
    (folder / "step_0000008.safetensors").rename(folder / "step_0000007.safetensors")
    os.truncate(copied / RUN / "step_0000008" / "ema.safetensors", 10)
    launch(copied, *OPTIONS, "ema.snapshot_every=3")
    assert sorted(path.name for path in folder.iterdir()) == [f"step_000000{step}.safetensors" for step in (2, 4, 6, 8)]
    assert (folder / "step_0000008.safetensors").read_bytes() == last


def test_routes_until_is_training_without_routes_from_there(tmp_path):
    """Reference: a dense run that starts from the routed one's checkpoint."""
    routed, dense = tmp_path / RUN, tmp_path / "results" / "dense"
    launch(tmp_path, "train.routes_until=3")
    shutil.copytree(routed / "step_0000003", dense / "step_0000003")
    path = dense / "step_0000003" / "info.json"
    info = json.loads(path.read_text())
    info["config"]["model"]["routes"], info["config"]["train"]["routes_until"] = [], None
    path.write_text(json.dumps(info))
    launch(tmp_path, "model.routes=[]", "name=dense")
    assert same(routed, dense)
    flops = [r["flops_per_s"] / r["images_per_s"] for r in RunLog(routed).records() if "images_per_s" in r]
    assert flops[-1] > 1.05 * flops[0]


def test_init_from_raw_weights_and_a_learning_rate_schedule(whole, tmp_path):
    source = state(whole / RUN)
    options = ("model=dit", "train.steps=4", "optim.lr=1e-30", "optim.schedule=linear", "optim.warmup_steps=2")
    for weights in ("ema", "model"):
        launch(tmp_path, *options, f"init_from={whole / RUN}", f"init_weights={weights}", f"name={weights}")
        actual = state(tmp_path / "results" / weights)
        for key, value in source.items():
            if key.startswith(f"{weights}/"):
                torch.testing.assert_close(actual[f"model/{key[len(weights) + 1 :]}"], value, rtol=0, atol=1e-20)
    rates = [r["lr"] for r in RunLog(tmp_path / "results" / "ema").records() if "lr" in r]
    assert rates == pytest.approx([0.5e-30, 1e-30, 1e-30, 0.5e-30])


FORKS = """
import json, os, random, signal, sys, time
root, kills, *options = sys.argv[1:]
sys.path[:0] = [root, root + "/tests"]
from pathlib import Path
from conftest import launch
run, random = Path("results/digits-tread"), random.Random(0)

def steps():
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\\n") if path.exists() else 0

def taken_by(child):
    path = run / "status.json"
    return path.exists() and json.loads(path.read_text())["pid"] == child

def start():
    child = os.fork()
    if child == 0:
        try:
            launch(Path("."), *options)
        except BaseException as error:
            print("failed:", repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    return child

killed, starts = 0, 0
while killed < int(kills):
    child, starts = start(), starts + 1
    began, seen = time.monotonic(), None
    while True:
        done, code = os.waitpid(child, os.WNOHANG)
        if done:
            sys.exit(f"ended by itself with {code} after {killed} kills")
        if seen is None and taken_by(child):
            seen = steps()
        if seen is not None and steps() > seen:
            break
        assert time.monotonic() - began < 60
        time.sleep(0.002)
    time.sleep(random.uniform(0, 0.25))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    killed += 1
child = start()
assert os.waitpid(child, 0)[1] == 0
print(json.dumps({"kills": killed, "steps": steps()}))
"""


@pytest.mark.slow
def test_a_hundred_kills_at_random_moments_change_no_bit(tmp_path):
    """kill -9 within a quarter of a second after the first step of each start, uniformly; each second step is saved."""
    options = ["train.steps=2500", "every.save=2", "every.sample=9999", "every.evaluate=50", "checkpoints.keep_last=3"]
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    command = [sys.executable, "-c", FORKS, str(ROOT), "100", *options]
    done = subprocess.run(command, cwd=tmp_path / "a", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["kills"] == 100
    launch(tmp_path / "b", *options)
    assert same(tmp_path / "a" / RUN, tmp_path / "b" / RUN)
    assert records(tmp_path / "a" / RUN) == records(tmp_path / "b" / RUN)
    starts = [start["step"] for start in RunLog(tmp_path / "a" / RUN).starts()]
    assert len(starts) == 101 and starts == sorted(starts) and starts[-1] > 10
