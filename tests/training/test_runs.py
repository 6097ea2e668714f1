"""The training loop: bit-equal resumption, the same run however the batch is split, and run folders.

The reference is always another way to make the same run."""

import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import TINY, launch, launch_processes, logged, names_in, read_json, records, same, state
from PIL import Image
from test_optimizer import Watch

import routing_module
import train
from tread.checkpoints import checkpoint
from tread.checkpoints.run_log import RunLog, differences
from tread.data.dataset import LatentDataset
from tread.data.latents import LatentSpec
from tread.data.writer import write_dataset
from tread.evaluation.scorers import EMBEDDED
from tread.models.embedders import LabelEmbedder
from tread.reports.report import troubles_of
from tread.reports.runs import find_run
from tread.runtime.signals import Stop
from tread.training import failures
from tread.training.run import Run
from tread.training.run_folder import Claim, claim
from tread.training.start import start


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Six steps in one go."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, launch(folder, "every.sample=3")


def test_a_run_leaves_what_it_says(straight):
    folder, text = straight
    run = folder / "results/digits-tread"
    names = ".lock config.yaml status.json latest loss.png metrics.jsonl run.json samples step_0000003 step_0000006"
    assert names_in(run) == {*names.split()}
    assert {path.name for path in (run / "samples").iterdir()} == {"step_0000003.png", "step_0000006.png"}
    assert names_in(folder) == {"data", "results"}
    for shown in ("r(2→2) keeps 8 of 16 tokens", "times fewer than without routes", "kB a checkpoint"):
        assert shown in text
    for path in ("samples/step_0000006.png", "loss.png", "metrics.jsonl", "latest"):
        assert f"results/digits-tread/{path}" in text
    assert logged(run, "loss", "step") == [1, 2, 3, 4, 5, 6]
    assert logged(run, "eval_loss", "step") == [3, 6]
    starts = read_json(run / "run.json")
    assert [s["step"] for s in starts] == [0] and torch.__version__.startswith(starts[0]["versions"]["torch"])
    assert {"git", "python"} <= set(starts[0]["versions"])


def test_three_and_three_steps_equal_six_bit_for_bit(straight, tmp_path):
    launch(tmp_path, "train.steps=3")
    text = launch_processes(tmp_path)  # a process of its own: nothing but the folder is left of the first
    run, reference = (folder / "results/digits-tread" for folder in (tmp_path, straight[0]))
    assert same(run, reference) and records(run) == records(reference)
    assert [s["step"] for s in read_json(run / "run.json")] == [0, 3]
    assert "is finished" in launch(tmp_path, "train.steps=4") and "is finished" not in text  # fewer than were done
    assert same(run, reference) and records(run) == records(reference)  # nothing was evaluated again
    assert RunLog(run).read_status()["state"] == "finished"


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_run_repeats_what_was_not_saved(tmp_path, processes):
    """Killed after step 5, with a log interval (2) that does not meet the checkpoint's (3): the newer checkpoint and
    `latest` are gone, the metrics of later steps are forgotten and written again, not twice."""
    begin = launch if processes == 1 else partial(launch_processes, processes=processes)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    begin(whole, "every.log=2")
    shutil.copytree(whole, killed, symlinks=True)
    if processes == 2:  # logged losses do not depend on when checkpoints are written
        begin(tmp_path, "every.log=2", "every.save=6")
        whole = tmp_path
    run, reference = (folder / "results/digits-tread" for folder in (killed, whole))
    shutil.rmtree(run / "step_0000006")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    assert "goes on at step 3" in begin(killed, "every.log=2")
    assert records(run) == records(reference)
    assert logged(run, "loss", "step") == [2, 4, 6]
    assert same(run, reference)


def test_the_split_of_a_batch_changes_nothing_but_rounding(straight, tmp_path, monkeypatch):
    """All micro-batches but the last run in DDP's no_sync, so that gradients are summed once a step. By two processes:
    test_survival.py."""
    calls, no_sync = [], Accelerator.no_sync
    monkeypatch.setattr(Accelerator, "no_sync", lambda self, model: calls.append(model) or no_sync(self, model))
    text = launch(tmp_path, "train.micro_batch_size=2")
    assert len(calls) == 6 * 3 and "8 = 1 processes" in text
    run, reference = (f / "results/digits-tread" for f in (tmp_path, straight[0]))
    for actual, expected in zip(records(run), records(reference), strict=True):
        assert actual == pytest.approx(expected, rel=1e-5)
    actual, expected = state(run), state(reference)
    for key in expected:
        if key.startswith("ema/"):
            torch.testing.assert_close(actual[key], expected[key], rtol=1e-3, atol=1e-4)


def test_a_step_reads_nothing_back_from_the_device(tmp_path, monkeypatch):
    """No operator that takes a number out of a tensor, with accumulation, clipping and all averages. The labels' range
    and the routes' numbers, which are looked at on a CPU alone, do not count. On a GPU, runtime/test_compiling.py
    watches the waits."""
    watch, training_step = Watch(), failures.training_step

    def watched(run):
        with watch:
            training_step(run)

    monkeypatch.setattr(failures, "training_step", watched)
    monkeypatch.setattr(LabelEmbedder, "check", lambda *_: None)
    monkeypatch.setattr(routing_module, "readable", lambda _: False)
    launch(tmp_path, "train.micro_batch_size=4", "optim.clip_norm=1", "ema.power=[0.1]", "train.steps=2")
    assert len(watch.seen) > 100 and any("fused_adamw" in name for name in watch.seen)
    waiting = ("_local_scalar_dense", "nonzero", "equal.default", "item", "masked_select", "unique")
    assert not [name for name in watch.seen if any(part in name for part in waiting)]


@pytest.mark.parametrize(
    "overrides, shown",
    [
        (("resume=false",), "holds a run already; resume=auto continues it, name=<another name>"),
        (("model=dit", "resume=true"), "resume=true, but results/digits-dit holds no checkpoint"),
        (("seed=1", "train.batch_size=16"), "train.batch_size: 8 there, 16 here"),
        (("model=dit", "name=digits-tread"), "holds a run with other settings"),
        (("init_weights=model",), "\n  init_weights: ema there, model here"),
        (("train.batch_size=9", "train.micro_batch_size=4", "name=x"), "micro_batch_size 4"),
        (("train.precision=fp16",), "fp16 is refused: without loss scaling"),
        (("dataset.heldout=nowhere", "dataset.embedded=null", "name=x"), "no dataset at nowhere"),
        (("dataset.num_classes=7", "name=x"), "latents and classes (1, 8, 8, 10), but dataset.channels"),
        (("train.batch_size=2000", "name=x"), "1442 samples, fewer than one batch of 2000"),
        (("dataset.path=data/digits/heldout",), "\n  samples: 1442 there, "),
        (("init_from=nowhere", "name=x"), "no checkpoint at nowhere"),
    ],
)
def test_bad_starts_are_refused_and_nothing_is_touched(straight, monkeypatch, read_config, composed, overrides, shown):
    monkeypatch.chdir(straight[0])

    def content():
        return {path: path.read_bytes() for path in straight[0].rglob("*") if path.is_file()}

    before, stop = content(), Stop()
    with pytest.raises((ValueError, OSError)) as error:
        start(read_config(*TINY, *overrides), composed(*TINY, *overrides), stop)
    stop.close()
    assert shown in str(error.value) and content() == before


@pytest.mark.parametrize("lr, step", [("1e30", 2), ("1e39", 1)])
def test_broken_weights_are_not_saved(tmp_path, lr, step):
    """With the first a bad step follows: the last one, which is saved in any case."""
    options = ("dataset.heldout=null", "train.steps=2")  # else the evaluation loss says it first
    with pytest.raises(SystemExit, match=f"weights are not finite after step {step}, which is not saved"):
        launch(tmp_path, *options, f"optim.lr={lr}", f"every.save={step}")
    assert not list((tmp_path / "results/digits-tread").glob("step_*"))


def test_an_evaluation_loss_that_is_no_number_fails_the_run(tmp_path):
    with pytest.raises(SystemExit, match="evaluation loss after step 3 is nan: the training has diverged"):
        launch(tmp_path, "optim.lr=100", "optim.clip_norm=1", "train.steps=3", "every.save=3")
    run = tmp_path / "results/digits-tread"
    assert RunLog(run).read_status()["state"] == "failed" and not list(run.glob("step_*"))


def test_the_demo_is_judged_once_and_says_by_how_many_samples(tmp_path, read_config, monkeypatch):
    """At the end, into the metrics; the judge itself: test_digits.py. A short run judges few (20 steps judged 1,000,
    minutes by Mamba); the quickstart's 2,500 steps still judge 1,000, and other data none, also with a judge of its
    own for fid.py. What a second signal does is over by the report."""
    endings = []
    monkeypatch.setitem(EMBEDDED, (None, False), lambda *_: None)
    monkeypatch.setattr(train, "report", lambda run: endings.append(run.stop.ending))
    for _ in range(2):
        text = launch(tmp_path, "train.steps=1", "eval.demo_samples=1000")
    (judged,) = [r for r in RunLog(tmp_path / "results/digits-tread").records() if "label_agreement" in r]
    assert judged["demo_samples"] == 40 and judged["step"] == 1 and "frechet_pixels_real" in text
    assert endings == [None, None]
    assert f"label_agreement       {judged['label_agreement']:.4f} of 40 samples\n" in text
    for overrides, count in (((), 1000), (("train.steps=500",), 500), (("dataset.embedded=null",), 0)):
        assert Run.demo_samples.fget(SimpleNamespace(cfg=read_config(*overrides))) == count


def test_moments_with_flipped_views_and_an_autoencoder(tmp_path):
    """The way of ImageNet latents: posterior means and log-variances, an AutoencoderKL for the pictures."""
    model = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, sample_size=16)
    model.save_pretrained(tmp_path / "vae")
    meaning = LatentSpec((4, 8, 8), ("ant", "bee", "cow"), str(tmp_path / "vae"), "moments", "logvar", 0.18215, views=2)
    shards = [(np.random.default_rng(0).standard_normal((20, 2, 8, 8, 8)), np.arange(20) % 3)]

    def write(part, **changed):
        shutil.rmtree(tmp_path / "latents" / part, ignore_errors=True)
        write_dataset(tmp_path / "latents" / part, replace(meaning, **changed), shards)

    write("train"), write("val")
    overrides = ["dataset.path=latents/train", "dataset.size=8", "dataset.num_classes=3", "dataset=imagenet256"]
    heldout = "dataset.heldout=latents/val"
    launch(tmp_path, *overrides, heldout, "train.steps=3")
    run = tmp_path / "results/imagenet256-tread"
    assert logged(run, "loss", "step") == [1, 2, 3]
    assert Image.open(run / "samples/step_0000003.png").mode == "RGB"
    assert LatentSpec.from_json(checkpoint.find(run).info["latents"]) == meaning
    write("val", scale=1.0)
    with pytest.raises(SystemExit, match="val and latents/train differ in scale"):
        launch(tmp_path, *overrides, heldout, "name=other")
    write("train", fingerprint="abc"), write("val", fingerprint="def")
    with pytest.raises(SystemExit, match="(?s)differ in fingerprint.*def.*abc"):
        launch(tmp_path, *overrides, heldout, "name=other")
    write("train")  # imported, so that nobody knows its fingerprint
    launch(tmp_path, *overrides, heldout, "name=imported", "sampling.decode=false", "train.steps=1")
    (tmp_path / "vae").rename(tmp_path / "moved")
    with pytest.raises(SystemExit, match="could not be loaded"):
        launch(tmp_path, *overrides, "dataset.heldout=null", "name=other")


def test_precision_is_train_pys_with_one_warning(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")  # train.compile decides, which is off on a CPU
    text = launch(tmp_path, "train.precision=bf16", "train.steps=2")
    assert text.count("accelerate's config says fp16, train.precision decides: bf16") == 1
    assert "cpu, bf16" in text and "torch.compile" not in text
    weights = checkpoint.find(tmp_path / "results/digits-tread").tensors("model")
    assert {value.dtype for value in weights.values()} == {torch.float32}


def test_claim(tmp_path):
    """Which folders may be started in, without a run in them or with one that saved nothing yet."""
    config = {"seed": 0, "model": {"depth": 8}, "optim": {"lr": 1.0}}
    assert claim(tmp_path / "new", "auto", config) == Claim() and list(tmp_path.iterdir()) == []
    (tmp_path / "letters.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="files that are not a run's"):
        claim(tmp_path, "auto", config)
    run = tmp_path / "run"
    log, late = RunLog(run), RunLog(run)
    log.start(0, config)
    assert claim(run, "auto", config) == Claim()
    assert claim(run, "auto", {**config, "optim": {"lr": 2.0}}) == Claim(changed={"optim.lr": (1.0, 2.0)})
    for resume, other, error, shown in (
        ("auto", {**config, "model": {"depth": 9}}, ValueError, "model.depth: 8 there, 9 here"),
        (True, config, FileNotFoundError, "holds no checkpoint"),
        (False, config, FileExistsError, "resume=auto continues it"),
    ):
        with pytest.raises(error, match=shown):
            claim(run, resume, other)
    log.metrics.write_text('{"step": 1}\n{"st\0\0\n{"step": 3}\n{"step": 4}\n{"ste')
    log.close()
    with pytest.raises(FileExistsError, match="while this one was starting"):
        late.start(0, {})
    late.close()
    again = RunLog(run)
    again.start(3, config)
    assert again.records() == [{"step": 1}, {"step": 3}]  # damaged lines cost themselves alone
    parts = {name: {} for name in ("model", "ema", "optimizer")}
    for step in (1, 2):
        checkpoint.save(run, step, parts, {"config": config, "latents": {}, "samples": 0})
    shutil.rmtree(run / "step_0000002")  # a damaged one, removed by hand: `latest` names nothing
    assert claim(run, "auto", config).checkpoint.step == 1
    shutil.rmtree(run / "step_0000001")
    with pytest.raises(FileNotFoundError, match="no whole checkpoint any more: remove the folder"):
        claim(run, "auto", config)


def test_two_do_not_train_in_one_folder(tmp_path):
    first = RunLog(tmp_path)
    first.start(0, {})
    with pytest.raises(FileExistsError, match="another process is training in"):
        RunLog(tmp_path).start(0, {})


def test_init_from_a_run_that_still_trains_is_the_checkpoint_of_now(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for step in (1, 2):
        checkpoint.save(tmp_path, step, {"ema": {}}, {"config": {}})
    for source in (tmp_path, tmp_path / "latest", "~", "~/latest"):
        assert checkpoint.pinned(str(source)) == str(tmp_path / "step_0000002")
    for other in ("hf:ann/digits", "a.pt", str(tmp_path / "step_0000001")):
        assert checkpoint.pinned(other) == other
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("step_0000009")  # which is not there: it is told where it is opened
    assert checkpoint.pinned(str(tmp_path / "latest")) == str(tmp_path / "latest")


def test_differences():
    a, b = {"x": 1, "s": {"y": 2, "z": [1]}}, {"x": 1, "s": {"y": 3, "z": [1]}, "new": 0}
    assert differences(a, b) == {"s.y": (2, 3), "new": (None, 0)}


def folder_of_latents(path, seed=0, **meaning):
    rng = np.random.default_rng(seed)
    latents = LatentSpec(shape=(2, 8, 8), classes=("ant", "bee"), autoencoder="pixels", scale_applied=True, **meaning)
    write_dataset(path, latents, [(3 * rng.standard_normal((20, latents.views, 2, 8, 8)) + 1, np.arange(20) % 2)])
    return path


@pytest.mark.parametrize("how", ["same", "link", "copy", "other"])
def test_an_evaluation_on_the_training_data_is_doubted(tmp_path, how):
    """Also in the report, which takes a run's warnings from its record."""
    folder_of_latents(tmp_path / "latents")
    heldout = tmp_path / ("latents" if how == "same" else how)
    if how == "link":
        heldout.symlink_to(tmp_path / "latents")
    elif how == "copy":
        shutil.copytree(tmp_path / "latents", heldout)
    elif how == "other":
        folder_of_latents(heldout, seed=1)
    data = ["dataset=folder", f"dataset.path={tmp_path}/latents", f"dataset.heldout={heldout}", "sampling.decode=false"]
    text = launch(tmp_path, *data, "train.steps=1", "name=run")
    said = f"1 of 1 files of latents in {heldout} are those of {tmp_path}/latents"
    said = f"{said}: the evaluation is of the training data"
    found = [said in place for place in (text, *troubles_of(find_run(tmp_path / "results/run")))]
    assert (found[0], sum(found)) == ((False, 0) if how == "other" else (True, 2))


def test_a_folder_brings_its_own_shape(tmp_path):
    """dataset=folder against the same data described by hand."""
    folder_of_latents(tmp_path / "latents", views=2)
    common = ["dataset=folder", "dataset.path=latents", "dataset.heldout=latents", "sampling.decode=false"]
    common.append("train.steps=2")
    launch(tmp_path, *common, "name=read")
    launch(tmp_path, *common, "name=given", "dataset.channels=2", "dataset.size=8", "dataset.num_classes=2")
    assert records(tmp_path / "results/read") == records(tmp_path / "results/given")
    config = checkpoint.find(tmp_path / "results/read").info["config"]
    assert [config["dataset"][key] for key in ("channels", "size", "num_classes")] == [2, 8, 2]
    assert "is finished" in launch(tmp_path, *common, "name=read")
    with pytest.raises(SystemExit, match="dataset.path is null.*dataset.path=<folder>"):
        launch(tmp_path, "dataset=folder", "name=other")


@pytest.mark.parametrize("placement", ["ram", "device"])
def test_placement_changes_nothing_and_waiting_is_logged(straight, placement):
    launch(straight[0], f"dataset.placement={placement}", f"name={placement}")
    run, reference = (straight[0] / "results" / name for name in (placement, "digits-tread"))
    assert records(run) == records(reference)
    assert same(run, reference)
    waits = logged(run, "loss", "data_wait")
    assert len(waits) == 6 and all(0 < wait < 1 for wait in waits)


def test_normalisation_is_recorded_and_undone_in_pictures(tmp_path):
    """The network sees what it would see of data that was normalised before it was written."""
    folder_of_latents(tmp_path / "latents")
    data = LatentDataset(tmp_path / "latents")
    mean, std = (np.array(values)[:, None, None] for values in data.statistics)
    before = data.read(np.arange(20)).stored.numpy().astype(np.float64)
    done = LatentSpec((2, 8, 8), ("ant", "bee"), "pixels", scale_applied=True, dtype="float32")
    write_dataset(tmp_path / "done", done, [(((before - mean) / std * 0.5)[:, None], data.labels)])
    common = ["dataset=folder", "dataset.heldout=${dataset.path}", "sampling.decode=false", "train.steps=3"]
    launch(tmp_path, *common, "dataset.path=latents", "dataset.normalize=true", "name=a")
    launch(tmp_path, *common, "dataset.path=done", "name=b")
    for a, b in zip(records(tmp_path / "results/a"), records(tmp_path / "results/b"), strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    latents = LatentSpec.from_json(checkpoint.find(tmp_path / "results/a").info["latents"])
    assert np.allclose(latents.channel_shift, mean.ravel()) and np.allclose(latents.channel_scale, 0.5 / std.ravel())
    normalized = r"is not the data that.*\n  channel_shift: \([-\d., ]+\) there, \(\) here\n  channel_scale: .* here$"
    with pytest.raises(SystemExit, match=normalized):
        launch(tmp_path, *common, "dataset.path=latents", "dataset.normalize=false", "name=a", "train.steps=6")
