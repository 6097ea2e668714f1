"""The same seeds give the same numbers as at the commit that tests/recorded/numbers.json names.

Reference: that commit's own numbers, and a run of 20 steps that it left, with what it made of it. On the
machine that recorded them, with its version of torch, numbers are equal bit for bit; elsewhere up to rounding.
TREAD_RECORD=1 writes them anew (not the run), which a change does that means to change numbers, and says
so in LOG.md.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import CPU, ROOT, launch, opened, read_json, score, take_samples
from PIL import Image
from safetensors.torch import load_file, save_file

from tread.checkpoints.run_log import RunLog
from tread.diffusion.guidance import Guidance
from tread.diffusion.sampling import Sampler, draw

RECORDED = ROOT / "tests/recorded"
RUNS = {
    "dit": ["model=dit"],
    "tread": ["model=tread"],
    "tread_rf": ["model=tread", "objective=rf"],
    "tread_rwkv": ["model=tread_rwkv"],
    "two_routes_kept": [
        "model=tread",
        "model.routes=[{start: 1, end: 3}, {start: 5, end: 6, selection_ratio: 0.25}]",
        "train.loss_tokens=kept",
    ],
}
OPTIONS = ["model.hidden_size=32", "model.depth=8", "model.num_heads=2", "train.batch_size=16", "train.steps=20"]
# with AdamW's own eps, rounding would steer weights whose gradient is 0 but for it, as the keys' biases
OPTIONS += ["optim.lr=3e-3", "optim.eps=1e-5", "every.evaluate=20", "every.sample=20", "every.save=20", "name=recorded"]
GUIDANCES = {
    "cfg": Guidance("cfg", 1.5),
    "sparse": Guidance("sparse", 1.5, strong=0.3, weak=0.7, force=True),  # forced: dit has no route of its own
}
SEEDS = [0, 1, 2, 3]


def machine() -> dict[str, str]:
    """What decides about the last bits of a sum."""
    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        facts = [next((x for x in lines if x.startswith(key)), "") for key in ("model name", "stepping", "flags")]
        cpu = facts[0].partition(": ")[2] + " " + hashlib.sha256("".join(facts).encode()).hexdigest()[:8]
    return {"cpu": cpu, "torch": torch.__version__, "capability": torch.backends.cpu.get_cpu_capability()}


def numbers_of(folder: Path, name: str) -> tuple[dict, dict[str, torch.Tensor]]:
    """A run's 20 losses, sum and norm of each averaged tensor, and its samples by guidance, on one thread."""
    launch(folder, *OPTIONS, *RUNS[name])
    run = folder / "results/recorded"
    found = opened(run)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tensors = found.found.tensors("ema")
        average = {key: [value.double().sum().item(), value.double().norm().item()] for key, value in tensors.items()}
        samples = {}
        for kind, guidance in GUIDANCES.items():
            sampler = Sampler.of(found.process, 5, None, len(SEEDS), "fp32", guidance)
            model = found.load(CPU, guidance)
            samples[f"{name}/{kind}"] = next(draw(model, SEEDS, torch.tensor([3, 1, 4, 1]), sampler))
    finally:
        torch.set_num_threads(threads)
    losses = [record["loss"] for record in RunLog(run).records() if "loss" in record]
    return {"loss": losses, "ema": average}, samples


@pytest.mark.parametrize("name", RUNS)
def test_the_numbers_are_those_that_were_recorded(tmp_path, name):
    if os.environ.get("TREAD_RECORD"):
        pytest.skip("they are being recorded")
    numbers, samples = numbers_of(tmp_path, name)
    recorded, expected = (read_json(RECORDED / "numbers.json"), load_file(RECORDED / "samples.safetensors"))
    losses, average = recorded["runs"][name]["loss"], recorded["runs"][name]["ema"]
    assert len(losses) == 20 and numbers["ema"].keys() == average.keys()
    if recorded["machine"] == machine():
        assert numbers == recorded["runs"][name]
        assert all(torch.equal(value, expected[key]) for key, value in samples.items())
    assert numbers["loss"] == pytest.approx(losses, rel=1e-3)
    for key, (total, norm) in numbers["ema"].items():
        assert norm == pytest.approx(average[key][1], rel=1e-3, abs=1e-6), key
        assert total == pytest.approx(average[key][0], rel=1e-3, abs=1e-3 * average[key][1] + 1e-6), key
    for key, value in samples.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-2, atol=1e-2)


@pytest.mark.skipif("TREAD_RECORD" not in os.environ, reason="writes the reference: TREAD_RECORD=1")
def test_record(tmp_path):
    runs, samples = {}, {}
    for name in RUNS:
        (tmp_path / name).mkdir()
        runs[name], drawn = numbers_of(tmp_path / name, name)
        samples |= drawn
    assert all(torch.isfinite(value).all() for value in samples.values())
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    content = {"commit": commit, "machine": machine(), "runs": runs}
    (RECORDED / "numbers.json").write_text(json.dumps(content, indent=1) + "\n")
    save_file(samples, RECORDED / "samples.safetensors")


@pytest.fixture
def old_run(tmp_path):
    """A copy of the run that the recorded commit left after 20 steps."""
    run = tmp_path / "results/digits-tread"
    shutil.copytree(RECORDED / "run", run)
    (run / "latest").symlink_to("step_0000020")  # not kept in the repository, where not everyone can have links
    return run


def test_a_run_of_the_recorded_commit_is_sampled_scored_and_resumed(old_run, tmp_path):
    then = read_json(RECORDED / "run_then.json")
    here = machine() == read_json(RECORDED / "numbers.json")["machine"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    options = ("classes=[3,8]", "seeds=0-3", "guidance=cfg", "steps=8")
    take_samples(tmp_path, f"checkpoint={old_run}", *options)
    score(tmp_path, f"checkpoint={old_run}", "num_samples=40", "steps=8")
    torch.set_num_threads(threads)
    found, expected = (np.asarray(Image.open(p)).astype(int) for p in (tmp_path / "samples.png", RECORDED / "run.png"))
    assert np.abs(found - expected).max() <= (0 if here else 3)
    scored = read_json(old_run / "latest/fid.json")
    for name, value in then["score"].items():
        assert scored[name] == pytest.approx(value, **({"rel": 1e-9} if here else {"rel": 0.02, "abs": 0.05})), name

    options = ("model.hidden_size=8", "train.steps=24", "every.evaluate=10", "every.sample=100", "every.save=20")
    text = launch(tmp_path, *options)
    assert "goes on at step 20\nwarning: train.steps was 20, is 24\n" in text and text.count(" was ") == 1
    records = RunLog(old_run).records()
    losses = [record["loss"] for record in records if "loss" in record and record["step"] > 20]
    evaluated = [record["eval_loss"] for record in records if "eval_loss" in record][-1]
    assert (losses, evaluated) == (then["loss"], then["eval_loss"]) or not here
    assert [*losses, evaluated] == pytest.approx([*then["loss"], then["eval_loss"]], rel=1e-3)
