"""The training loop: bit-equal resumption, the same run however the batch is split, and run folders.

The reference is always another way to make the same run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import ROOT, TINY, launch, launch_processes, records, state
from forked import run_python
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

import routing_module
from dit import DiT
from routing_module import Route, draw_ids
from tread.checkpoints import checkpoint
from tread.checkpoints.network import build_network
from tread.data.dataset import LatentDataset
from tread.data.latents import LatentSpec
from tread.data.loader import Loader
from tread.data.writer import write_dataset
from tread.runtime.distributed import Processes
from tread.runtime.signals import Stop
from tread.training import failures
from tread.training.ema import EMA, exponential
from tread.training.run import StepStatistics
from tread.training.run_folder import Claim, RunLog, claim, differences
from tread.training.start import open_dataset, start


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Six steps in one go."""
    folder = tmp_path_factory.mktemp("straight")
    text = launch(folder)
    return folder, text


def test_a_run_leaves_what_it_says(straight):
    folder, text = straight
    run = folder / "results" / "digits-tread"
    names = {path.name for path in run.iterdir()}
    assert names == {
        ".lock",
        "config.yaml",
        "status.json",
        "latest",
        "loss.png",
        "metrics.jsonl",
        "run.json",
        "samples",
        "step_0000003",
        "step_0000006",
    }
    assert {path.name for path in (run / "samples").iterdir()} == {"step_0000003.png", "step_0000006.png"}
    assert sorted(path.name for path in folder.iterdir()) == ["data", "results"]
    for shown in (
        "r(2→2) keeps 8 of 16 tokens",
        "FLOPs",
        "8 = 1 processes × 1 accumulation steps × 8 images",
        "kB a checkpoint",
    ):
        assert shown in text
    for path in ("samples/step_0000006.png", "loss.png", "metrics.jsonl", "latest"):
        assert f"results/digits-tread/{path}" in text
    assert [r["step"] for r in records(run) if "loss" in r] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in records(run) if "eval_loss" in r] == [3, 6]
    starts = json.loads((run / "run.json").read_text())
    assert [s["step"] for s in starts] == [0] and starts[0]["versions"]["torch"] == torch.__version__
    assert {"git", "python"} <= set(starts[0]["versions"])


def test_three_and_three_steps_equal_six_bit_for_bit(straight, tmp_path):
    launch(tmp_path, "train.steps=3")
    text = launch_processes(tmp_path)  # a process of its own: nothing but the folder is left of the first
    run = tmp_path / "results" / "digits-tread"
    expected, found = state(straight[0] / "results" / "digits-tread"), state(run)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert records(run) == records(straight[0] / "results" / "digits-tread")
    assert [s["step"] for s in json.loads((run / "run.json").read_text())] == [0, 3]
    again = launch(tmp_path)
    assert "is finished" in again and "is finished" not in text
    assert records(run) == records(straight[0] / "results" / "digits-tread")  # nothing was evaluated again
    assert "is finished" in launch(tmp_path, "train.steps=4")  # fewer than were done
    assert RunLog(run).read_status()["state"] == "finished"
    assert all(torch.equal(state(run)[key], expected[key]) for key in expected)


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
    run, reference = (folder / "results" / "digits-tread" for folder in (killed, whole))
    shutil.rmtree(run / "step_0000006")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    text = begin(killed, "every.log=2")
    assert "goes on at step 3" in text
    assert records(run) == records(reference)
    assert [record["step"] for record in records(run) if "loss" in record] == [2, 4, 6]
    found, expected = state(run), state(reference)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize(("processes", "micro"), [(1, 2), (2, 2)])
def test_the_split_of_a_batch_changes_nothing_but_rounding(straight, tmp_path, processes, micro):
    overrides = [f"train.micro_batch_size={micro}"]
    text = (
        launch(tmp_path, *overrides) if processes == 1 else launch_processes(tmp_path, *overrides, processes=processes)
    )
    run, reference = (f / "results" / "digits-tread" for f in (tmp_path, straight[0]))
    assert f"8 = {processes} processes" in text
    for found, expected in zip(records(run), records(reference), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    found, expected = state(run), state(reference)
    for key in expected:
        if key.startswith("ema/"):
            torch.testing.assert_close(found[key], expected[key], rtol=1e-3, atol=1e-4)


def test_each_step_draws_its_own_ids_and_noise(read_config, monkeypatch, straight):
    """What the network is given, step by step, and again."""
    monkeypatch.chdir(straight[0])

    def seen(seed):
        """(t, y, ids) of three training steps."""
        cfg = read_config(*TINY, f"seed={seed}")
        network, calls = build_network(cfg), []
        network.register_forward_pre_hook(
            lambda _, args, more: calls.append((args[1], args[2], *more["routes"][0])), with_kwargs=True
        )
        data = open_dataset(cfg, cfg.dataset.path, "train")
        run = SimpleNamespace(
            cfg=cfg,
            processes=Processes(Accelerator(cpu=True), torch.device("cpu")),
            precision="fp32",
            micro_batches=[slice(0, 8)],
            data=data,
            loader=Loader(data, seed, 8, [slice(0, 8)], torch.device("cpu"), steps=3, ahead=2),
            network=network,
            wrapped=network,
            ema=EMA(network, exponential()),
            averages={},
            aligner=None,
            optimizer=cfg.optim.build(network.parameters()),
            statistics=StepStatistics("cpu"),
        )
        for run.step in range(3):
            failures.training_step(run)
        return calls

    calls, again, other = seen(0), seen(0), seen(1)
    for (t, y, route, ids), (t2, y2, _, ids2) in zip(calls, again, strict=True):
        assert torch.equal(t, t2) and torch.equal(y, y2) and torch.equal(ids, ids2)
        assert route == Route(2, -4).resolve(6) and ids.shape == (8, 8) and len(ids.unique(dim=0)) > 1
    for one, another in ((calls[0], calls[1]), (calls[1], calls[2]), (calls[0], other[0])):
        assert not torch.isclose(one[0], another[0]).all() and not torch.equal(one[3], another[3])
    assert 10 in torch.cat([y for _, y, _, _ in calls + other])  # some label is dropped


def test_processes_sum_their_gradients_once_a_step(tmp_path, monkeypatch):
    """All micro-batches but the last run in DDP's no_sync."""
    calls, no_sync = [], Accelerator.no_sync
    monkeypatch.setattr(Accelerator, "no_sync", lambda self, model: calls.append(model) or no_sync(self, model))
    launch(tmp_path, "train.micro_batch_size=2", "train.steps=2")
    assert len(calls) == 2 * 3


def test_a_step_reads_nothing_back_from_the_device(tmp_path, monkeypatch):
    """No operator that takes a number out of a tensor, with accumulation, clipping and all averages. The labels' range
    and the routes' numbers, which are looked at on a CPU alone, do not count. On a GPU, runtime/test_compiling.py
    watches the waits."""
    seen, training_step = [], failures.training_step

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, arguments=(), options=None):
            seen.append(str(operator))
            return operator(*arguments, **(options or {}))

    def watched(run):
        with Watch():
            training_step(run)

    monkeypatch.setattr(failures, "training_step", watched)
    monkeypatch.setattr(DiT, "check_inputs", lambda *_: None)
    monkeypatch.setattr(routing_module, "_readable", lambda _: False)
    launch(tmp_path, "train.micro_batch_size=4", "optim.clip_norm=1", "ema.power=[0.1]", "train.steps=2")
    assert len(seen) > 100 and any("fused_adamw" in name for name in seen)
    waiting = ("_local_scalar_dense", "nonzero", "equal.default", "item", "masked_select", "unique")
    assert not [name for name in seen if any(part in name for part in waiting)]


@pytest.mark.parametrize(
    ("overrides", "shown"),
    [
        (("resume=false",), "holds a run already; resume=auto continues it, name=<another name>"),
        (("model=dit", "resume=true"), "resume=true, but results/digits-dit holds no checkpoint"),
        (("model.hidden_size=32",), "model.hidden_size: 16 there, 32 here"),
        (("seed=1", "train.batch_size=16"), "train.batch_size: 8 there, 16 here"),
        (("init_from=results/other",), "init_from: null there, results/other here"),
        (("model=dit", "name=digits-tread"), "holds a run with other settings"),
        (("train.batch_size=9", "train.micro_batch_size=4", "name=x"), "micro_batch_size 4"),
        (("train.precision=fp16",), "fp16 is refused: without loss scaling"),
        (("dataset.path=nowhere", "dataset.embedded=null", "name=x"), "no dataset at nowhere"),
        (("dataset.heldout=nowhere", "dataset.embedded=null", "name=x"), "no dataset at nowhere"),
        (("dataset.channels=4", "name=x"), "dataset.channels and dataset.size say (4, 8, 8)"),
        (("dataset.num_classes=7", "name=x"), "10 classes, but dataset.num_classes is 7"),
        (("train.batch_size=2000", "name=x"), "1442 samples, fewer than one batch of 2000"),
        (("dataset.path=data/digits/heldout",), "is not the data that results/digits-tread was trained on"),
        (("init_from=nowhere", "name=x"), "no checkpoint at nowhere"),
    ],
)
def test_bad_starts_are_refused_before_anything_is_touched(
    straight, monkeypatch, read_config, composed, overrides, shown
):
    monkeypatch.chdir(straight[0])

    def content():
        return {path: path.read_bytes() for path in straight[0].rglob("*") if path.is_file()}

    before = content()
    stop = Stop()
    with pytest.raises((ValueError, FileNotFoundError, FileExistsError)) as error:
        start(read_config(*TINY, *overrides), composed(*TINY, *overrides), stop)
    stop.close()
    assert shown in str(error.value)
    assert content() == before


def test_the_door_shows_errors_without_a_traceback(straight):
    for overrides, shown in (
        (
            ("train.btach_size=9",),
            "error: unknown setting 'train.btach_size'; the nearest known one is 'train.batch_size'",
        ),
        (("resume=false",), "error: results/digits-tread holds a run already"),
    ):
        text = launch_processes(straight[0], *overrides, ok=False)
        assert shown in text and "Traceback" not in text


def test_broken_weights_are_not_saved(tmp_path):
    for lr, step in (
        ("1e30", 2),
        ("1e39", 1),
    ):  # with the first, a bad step follows: the last one, which is saved in any case
        with pytest.raises(SystemExit, match=f"weights are not finite after step {step}, which is not saved"):
            unseen = "dataset.heldout=null"  # else the evaluation loss says it first
            launch(tmp_path, unseen, f"optim.lr={lr}", f"every.save={step}", "train.steps=2", f"name=lr{lr}")
        assert not list((tmp_path / "results" / f"lr{lr}").glob("step_*"))


def test_an_evaluation_loss_that_is_no_number_fails_the_run(tmp_path):
    with pytest.raises(SystemExit, match="evaluation loss after step 3 is nan: the training has diverged"):
        launch(tmp_path, "optim.lr=100", "optim.clip_norm=1", "train.steps=3", "every.save=3")
    run = tmp_path / "results" / "digits-tread"
    assert RunLog(run).read_status()["state"] == "failed" and not list(run.glob("step_*"))


def test_the_demo_is_judged_once(tmp_path):
    """At the end, into the metrics; the judge itself is tested in test_digits.py."""
    for _ in range(2):
        text = launch(tmp_path, "train.steps=2", "eval.demo_samples=20")
        judged = [r for r in RunLog(tmp_path / "results" / "digits-tread").records() if "label_agreement" in r]
        assert len(judged) == 1 and judged[0]["demo_samples"] == 20 and judged[0]["step"] == 2
        assert f"label_agreement       {judged[0]['label_agreement']:.4f}" in text
        assert "frechet_pixels_real" in text


def test_moments_with_flipped_views_and_an_autoencoder(tmp_path):
    """The way of ImageNet latents: posterior means and log-variances, an AutoencoderKL for the pictures."""
    model = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, sample_size=16)
    model.save_pretrained(tmp_path / "vae")
    meaning = LatentSpec(
        shape=(4, 8, 8),
        classes=("ant", "bee", "cow"),
        autoencoder=str(tmp_path / "vae"),
        content="moments",
        spread="logvar",
        scale=0.18215,
        views=2,
    )
    for part in ("train", "val"):
        shards = [(np.random.default_rng(0).standard_normal((20, 2, 8, 8, 8)), np.arange(20) % 3)]
        write_dataset(tmp_path / "latents" / part, meaning, shards)
    overrides = ["dataset.path=latents/train", "dataset.heldout=latents/val", "dataset.size=8", "dataset.num_classes=3"]
    launch(tmp_path, "dataset=imagenet256", *overrides, "train.steps=3")
    run = tmp_path / "results" / "imagenet256-tread"
    assert [r["step"] for r in records(run) if "loss" in r] == [1, 2, 3]
    assert Image.open(run / "samples" / "step_0000003.png").mode == "RGB"
    assert LatentSpec.from_json(checkpoint.find(run).info["latents"]) == meaning
    with pytest.raises(SystemExit, match="val and latents/train differ in scale"):
        shutil.rmtree(tmp_path / "latents" / "val")
        write_dataset(tmp_path / "latents" / "val", replace(meaning, scale=1.0), shards)
        launch(tmp_path, "dataset=imagenet256", *overrides, "name=other")
    with pytest.raises(SystemExit, match="(?s)differ in fingerprint.*def.*abc"):
        for part, known in (("train", "abc"), ("val", "def")):
            shutil.rmtree(tmp_path / "latents" / part)
            write_dataset(tmp_path / "latents" / part, replace(meaning, fingerprint=known), shards)
        launch(tmp_path, "dataset=imagenet256", *overrides, "name=other")
    shutil.rmtree(tmp_path / "latents" / "train")  # imported, so that nobody knows
    write_dataset(tmp_path / "latents" / "train", meaning, shards)
    launch(tmp_path, "dataset=imagenet256", *overrides, "name=imported", "sampling.decode=false", "train.steps=1")
    with pytest.raises(SystemExit, match="could not be loaded"):
        overrides[1] = "dataset.heldout=null"
        (tmp_path / "vae").rename(tmp_path / "moved")
        launch(tmp_path, "dataset=imagenet256", *overrides, "name=other")


def test_init_from_starts_at_the_other_runs_ema(straight, tmp_path):
    source = straight[0] / "results" / "digits-tread" / "latest"
    launch(tmp_path, "model=dit", f"init_from={source}", "optim.lr=1e-30", "ema.warmup=false", "train.steps=1")
    found, expected = state(tmp_path / "results" / "digits-dit"), state(source)
    for key, value in expected.items():
        if key.startswith("ema/"):
            torch.testing.assert_close(found["model/" + key[4:]], value)


def test_precision_is_train_pys_with_one_warning(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    text = launch(tmp_path, "train.precision=bf16", "train.steps=2")
    assert text.count("accelerate's config says fp16, train.precision decides: bf16") == 1
    assert "cpu, bf16" in text
    weights = checkpoint.find(tmp_path / "results" / "digits-tread").tensors("model")
    assert {value.dtype for value in weights.values()} == {torch.float32}


def test_claim(tmp_path):
    """Which folders may be started in, without a run in them or with one that saved nothing yet."""
    config = {"seed": 0, "model": {"depth": 8}, "optim": {"lr": 1.0}}
    assert claim(tmp_path / "new", "auto", config) == Claim() and list(tmp_path.iterdir()) == []
    (tmp_path / "letters.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="files that are not a run's"):
        claim(tmp_path, "auto", config)
    with pytest.raises(FileExistsError, match="letters.txt is a file"):
        claim(tmp_path / "letters.txt", "auto", config)
    run = tmp_path / "run"
    log = RunLog(run)
    log.start(0, config)
    assert claim(run, "auto", config) == Claim()
    assert claim(run, "auto", {**config, "optim": {"lr": 2.0}}) == Claim(changed={"optim.lr": (1.0, 2.0)})
    with pytest.raises(ValueError, match="model.depth: 8 there, 9 here"):
        claim(run, "auto", {**config, "model": {"depth": 9}})
    with pytest.raises(FileNotFoundError, match="no checkpoint yet"):
        claim(run, True, config)
    with pytest.raises(FileExistsError, match="resume=auto continues it"):
        claim(run, False, config)


def test_claim_without_latest_finds_the_newest_checkpoint(tmp_path):
    config = {"seed": 0}
    for step in (1, 2):
        parts = {name: {} for name in ("model", "ema", "optimizer")}
        checkpoint.save(tmp_path, step, parts, {"config": config, "latents": {}, "samples": 0})
    shutil.rmtree(tmp_path / "step_0000002")  # a damaged one, removed by hand: `latest` names nothing
    assert claim(tmp_path, "auto", config).checkpoint.step == 1
    with pytest.raises(ValueError, match="seed: 0 there, 1 here"):
        claim(tmp_path, "auto", {"seed": 1})
    (tmp_path / "latest").unlink()
    shutil.copytree(tmp_path / "step_0000001", tmp_path / "latest")
    with pytest.raises(FileExistsError, match="latest is a folder, but must be a link"):
        claim(tmp_path, "auto", config)


def test_a_run_that_another_process_made_in_between_is_not_taken(tmp_path):
    late, early = RunLog(tmp_path / "run"), RunLog(tmp_path / "run")
    early.start(0, {})
    early.write({"step": 1, "loss": 1.0})
    early.close()
    with pytest.raises(FileExistsError, match="while this one was starting"):
        late.start(0, {})
    assert early.records() == [{"step": 1, "loss": 1.0}]


def test_a_damaged_line_of_metrics_costs_that_line_alone(tmp_path):
    log = RunLog(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\0\0\n{"step": 3}\n{"step": 4}\n{"ste')
    log.start(3, {})
    assert log.records() == [{"step": 1}, {"step": 3}]


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    first = RunLog(tmp_path)
    first.start(0, {})
    code = "import sys; from pathlib import Path; from tread.training.run_folder import RunLog; "
    code += "RunLog(Path(sys.argv[1])).start(0, {})"
    second = run_python("-c", code, tmp_path, cwd=ROOT)
    assert second.returncode == 1 and "another process is training in" in second.stderr


def test_differences():
    a, b = {"x": 1, "s": {"y": 2, "z": [1]}}, {"x": 1, "s": {"y": 3, "z": [1]}, "new": 0}
    assert differences(a, b) == {"s.y": (2, 3), "new": (None, 0)}


def test_sampling_a_run_from_the_command_line(straight, tmp_path):
    checkpoint_folder = straight[0] / "results" / "digits-tread"
    options = (f"checkpoint={checkpoint_folder}", "steps=2", "classes=[3,8]", "seeds=0-3", "out=grid.png")
    done = run_python(ROOT / "sample.py", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "grid.png: rows are classes [3, 8], columns seeds 0-3; step 6, ema weights" in done.stdout
    assert Image.open(tmp_path / "grid.png").size == (4 * 64 + 3 * 2, 2 * 64 + 2)
    assert [path.name for path in tmp_path.iterdir()] == ["grid.png"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_routed_training_on_a_gpu(tiny):
    device = torch.device("cuda")
    network = tiny.to(device)
    x, y = torch.randn(8, 4, 8, 8, device=device), torch.arange(8, device=device) % 10
    ids = draw_ids(torch.rand(8, 16, device=device), 0.5)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = network(x, torch.zeros(8, device=device), y, routes=[(Route(1, 4), ids)]).float().square().mean()
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in network.parameters())


def folder_of_latents(path, seed=0, **meaning):
    rng = np.random.default_rng(seed)
    latents = LatentSpec(shape=(2, 8, 8), classes=("ant", "bee"), autoencoder="pixels", scale_applied=True, **meaning)
    write_dataset(path, latents, [(3 * rng.standard_normal((20, latents.views, 2, 8, 8)) + 1, np.arange(20) % 2)])
    return path


def test_a_folder_brings_its_own_shape(tmp_path):
    """dataset=folder against the same data described by hand."""
    folder_of_latents(tmp_path / "latents", views=2)
    common = ["dataset=folder", "dataset.path=latents", "dataset.heldout=latents", "sampling.decode=false"]
    launch(tmp_path, *common, "name=read")
    launch(tmp_path, *common, "name=given", "dataset.channels=2", "dataset.size=8", "dataset.num_classes=2")
    assert records(tmp_path / "results" / "read") == records(tmp_path / "results" / "given")
    config = checkpoint.find(tmp_path / "results" / "read").info["config"]
    assert [config["dataset"][key] for key in ("channels", "size", "num_classes")] == [2, 8, 2]
    assert "is finished" in launch(tmp_path, *common, "name=read")
    for given, shown in (
        ([], "dataset.path is null.*dataset.path=<folder>"),
        (["dataset.path=nowhere"], "no dataset at nowhere"),
        (
            ["dataset.path=latents", "dataset.size=4"],
            r"\(2, 8, 8\), but dataset.channels and dataset.size say \(2, 4, 4\)",
        ),
        (["dataset.path=latents", "dataset.placement=disk"], "dataset.placement is 'disk'"),
    ):
        with pytest.raises(SystemExit, match=shown):
            launch(tmp_path, "dataset=folder", *given, "name=other")


def test_placement_changes_nothing_and_waiting_is_logged(straight, tmp_path):
    for placement in ("ram", "device"):
        launch(tmp_path, f"dataset.placement={placement}", f"name={placement}")
        run, reference = tmp_path / "results" / placement, straight[0] / "results" / "digits-tread"
        assert records(run) == records(reference)
        expected = state(reference)
        assert all(torch.equal(value, expected[key]) for key, value in state(run).items())
    waits = [record["data_wait"] for record in RunLog(run).records() if "loss" in record]
    assert len(waits) == 6 and all(0 < wait < 1 for wait in waits)


def test_normalisation_is_recorded_and_undone_in_pictures(tmp_path):
    """The network sees what it would see of data that was normalised before it was written."""
    folder_of_latents(tmp_path / "latents")
    data = LatentDataset(tmp_path / "latents")
    mean, std = (np.array(values)[:, None, None] for values in data.statistics)
    before = data.read(np.arange(20)).stored.numpy().astype(np.float64)
    done = LatentSpec(
        shape=(2, 8, 8), classes=("ant", "bee"), autoencoder="pixels", scale_applied=True, dtype="float32"
    )
    write_dataset(tmp_path / "done", done, [(((before - mean) / std * 0.5)[:, None], data.labels)])
    common = ["dataset=folder", "dataset.heldout=${dataset.path}", "sampling.decode=false", "train.steps=3"]
    launch(tmp_path, *common, "dataset.path=latents", "dataset.normalize=true", "name=a")
    launch(tmp_path, *common, "dataset.path=done", "name=b")
    for a, b in zip(records(tmp_path / "results" / "a"), records(tmp_path / "results" / "b"), strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    latents = LatentSpec.from_json(checkpoint.find(tmp_path / "results" / "a").info["latents"])
    assert np.allclose(latents.channel_shift, mean.ravel()) and np.allclose(latents.channel_scale, 0.5 / std.ravel())
    with pytest.raises(SystemExit, match="is not the data that"):
        launch(tmp_path, *common, "dataset.path=latents", "dataset.normalize=false", "name=a", "train.steps=6")
    with pytest.raises(SystemExit, match="is not the data that"):
        launch(tmp_path, *common, "dataset.path=latents", "dataset.normalize=true", "name=b", "train.steps=6")
