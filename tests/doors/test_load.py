"""tread.load: against sample.py's files, the process's own denoiser, and a stand-in of the hub."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import export_checkpoint
import numpy as np
import pytest
import torch
from conftest import ROOT, equal, launch, launch_door, opened, read_json, save_checkpoint, take_samples, write_json
from hub import serve
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import save_file

import tread
from tread.checkpoints import checkpoint
from tread.checkpoints.network import build_network
from tread.checkpoints.weights import load_weights
from tread.doors import load
from tread.drawing.grids import FACTS
from tread.runtime import device
from tread.runtime.randomness import seeded_normal

DIGITS = str(ROOT / "models/digits")
BRIEF = {"seeds": range(2), "steps": 3}


@pytest.fixture(scope="module")
def model():
    return tread.load(DIGITS, device="cpu")


def pixels(pictures: list[Image.Image]) -> np.ndarray:
    return np.stack([np.asarray(picture) for picture in pictures])


def test_the_same_pictures_as_sample_py_each_class_by_each_seed(model, tmp_path):
    asked = ["classes=[3,8,null]", "seeds=0-3", "guidance=cfg", "guidance.scale=1.5", "guidance.interval=[0.1,5]"]
    take_samples(tmp_path, f"checkpoint={DIGITS}", *asked, "steps=4", "batch_size=5", "out=pictures")
    how = {"steps": 4, "batch_size": 5, "guidance": "cfg", "scale": 1.5, "interval": [0.1, 5]}
    drawn = pixels(model.sample(["3", 8, None], range(4), **how))
    names = ["class3", "class8", "noclass"]
    files = [tmp_path / f"pictures/seed{seed:06d}_{name}.png" for name in names for seed in range(4)]
    assert np.array_equal(drawn, np.stack([np.asarray(Image.open(file))[:, :, 0] for file in files]))
    pairs = model.sample(labels=["3", 8, None, 3], seeds=range(4), **how)
    assert np.array_equal(pixels(pairs), drawn[[0, 5, 10, 3]])


def test_the_callers_tf32_stays(model, monkeypatch):
    """Also where sampling sets it, as in bf16 on a GPU."""
    before, there = device.tf32_flags(), []
    monkeypatch.setattr(load, "use_precision", lambda name, where: device.set_tf32(["tf32"] * 3) or "fp32")
    model.sample(5, on_step=lambda *step: there.append(device.tf32_flags()), **BRIEF)
    assert there[0] == ["tf32"] * 3 and device.tf32_flags() == before


def test_pictures_as_arrays_and_latents(model):
    pictures = pixels(model.sample(5, **BRIEF))
    array, tensor = (model.sample(5, output=form, **BRIEF) for form in ("np", "pt"))
    assert array.dtype == np.float32 and array.shape == (2, 8, 8, 1)
    assert np.array_equal(array[..., 0], pictures.astype(np.float32) / 255)
    assert np.array_equal(tensor.permute(0, 2, 3, 1).numpy(), array)
    latents = model.sample(5, output="latent", **BRIEF)
    assert np.array_equal((latents[:, 0] * 127.5 + 127.5).round().clip(0, 255).numpy(), pictures)
    assert len(model.sample(steps=2, seeds=0)) == 10
    counted = model.sample(np.array([5]), np.arange(2), steps=3, output="np")
    numbers = {"guidance": "cfg", "scale": np.float32(1.5), "interval": np.array([0.1, 5]), "churn": {"amount": 5}}
    written = {"guidance": "cfg", "scale": 1.5, "interval": (0.1, np.float64(5)), "churn": 5}
    one, other = (model.sample(5, np.int64(3), steps=4, output="np", **given) for given in (numbers, written))
    assert np.array_equal(one, other)
    assert np.array_equal(counted, array) and np.array_equal(model.sample(np.int64(5), output="np", **BRIEF), array)


@pytest.mark.parametrize("solver", ["heun", "euler"])
def test_on_step_sees_each_step_once(model, solver):
    seen = []
    ends = model.sample(4, solver=solver, output="latent", on_step=lambda *told: seen.append(told), **BRIEF)
    assert [step for step, *_ in seen] == [0, 1, 2]
    assert [level for _, level, *_ in seen] == model.process.schedule(3)[:3].tolist()
    labels = torch.tensor([4, 4])
    for _, level, x, predicted in seen:
        ours = model.process.denoise(model.network, x.double(), torch.tensor(level), labels)
        torch.testing.assert_close(predicted, ours.float().detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ends, seen[-1][3])  # the last step, to noise level 0, ends at the prediction


@pytest.mark.slow
def test_the_page_s_loop_draws_the_sampler_s_pictures(monkeypatch):
    monkeypatch.chdir(ROOT)
    page = {"noise": seeded_normal([0, 1], (1, 8, 8)).double()}
    text, drawn = re.subn(r"torch\.randn\(2, 1, 8, 8, .*?\)", "noise", (ROOT / "docs/python.md").read_text())
    assert drawn == 1
    for code in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S):
        exec(code, page)
    assert len(page["pictures"]) == 8
    ours = page["model"].sample(labels=[3, 8], seeds=[0, 1], output="latent")
    torch.testing.assert_close(page["x"].float(), ours)


def test_a_weak_network_and_a_shift_are_taken(tmp_path, composed):
    """By hand: Euler's steps at shifted times, by D_weak + 2·(D − D_weak)."""
    folders = [save_checkpoint(tmp_path / name, composed, step=step)[1] for name, step in (("a", 3), ("b", 4))]
    for folder in folders:
        info = read_json(folder / "info.json")
        write_json(folder / "info.json", info | {"config": info["config"] | {"objective": "rf"}})
    strong, weak = (tread.load(folder, device="cpu") for folder in folders)
    asked = {"guidance": "autoguidance", "scale": 2.0, "checkpoint": folders[1], "shift": 0.5}
    drawn = strong.sample(1, seeds=0, steps=3, output="latent", **asked)
    levels = replace(strong.process, shift=0.5).schedule(3)
    x, y = seeded_normal([0], drawn.shape[1:]).double(), torch.tensor([1])
    for level, after in zip(levels, levels[1:]):
        with torch.no_grad():
            data, less = (each.process.denoise(each.network, x, level, y) for each in (strong, weak))
        x = x + (after - level) * (x - less - 2 * (data - less)) / level
    torch.testing.assert_close(drawn, x.float())


def test_what_does_not_fit_is_said_before_anything_is_drawn(model):
    cases = [
        ({"classes": "x"}, "'x' is no class of .*there are 0, 1"),
        ({"classes": []}, "classes is empty"),
        ({"classes": 10}, "classes.0 is 10, but the classes are 0..9"),
        ({"labels": [1]}, "labels has 1 classes for 8 seeds"),
        ({"labels": [1] * 8, "classes": 1}, "in the place of classes"),
        ({"scale": 2}, "scale .* is given, but guidance=none"),
        ({"guidance": "best"}, "guidance is 'best', but must be one of autoguidance, cfg"),
        ({"guidance": "sg_fid"}, "guidance=sg_fid needs checkpoint=…"),
        ({"shift": 2}, "shift=2 is for rectified flow"),
        ({"prompts": "a hat"}, "takes no prompt"),
        ({"output": "png"}, "output is 'png', but must be pil"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"steps": 2.5}, "steps is 2.5, but must be int"),
        ({"churn": "5"}, "churn is '5', but must be a section with keys: amount"),
        ({"seeds": "9-1"}, "seeds is '9-1'"),
    ]
    for given, said in cases:
        with pytest.raises(ValueError, match=said):
            model.sample(**given)
    for given, said in (
        ({"precision": "fp16"}, "precision is 'fp16', but must be"),
        ({"decode_precision": "fp16"}, "decode_precision is 'fp16', but must be"),
        ({"text_encoder": "clip-l"}, "text_encoder is given, but .* was trained with classes"),
    ):
        with pytest.raises(ValueError, match=said):
            tread.load(ROOT / "models/digits", **given)


ALONE = """
import sys, tread
assert "torch" not in sys.modules
import torch
model = tread.load(sys.argv[1])
assert not [name for name in sys.modules if name.startswith(("tread.training", "diffusers", "transformers", "hydra"))]
assert len(model.sample("3", steps=2)) == 8
"""


@pytest.mark.slow
def test_in_a_process_of_its_own_it_imports_little_and_prints_nothing():
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", ALONE, DIGITS], env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_from_the_hub_and_without_it_from_its_cache(tmp_path, monkeypatch):
    shutil.copytree(DIGITS, tmp_path / "hub/ann/digits/main")
    (tmp_path / "hub/ann/pickles/main").mkdir(parents=True)
    for name in ("digits", "pickles"):
        (tmp_path / f"hub/ann/{name}/main/model.pt").write_bytes(b"x")
    (tmp_path / "hub/ann/pickles/weights").mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with serve(tmp_path / "hub") as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix("https://huggingface.co")
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + template)
        found = tread.load("hf:ann/digits").saved.found
        assert len(found.revision) == 40 and found.sha256("ema") == checkpoint.find(DIGITS).sha256("ema")
        assert not [*found.folder.rglob("*.pt")]
        take_samples(tmp_path, "checkpoint=hf:ann/digits@main", "steps=2", "seeds=0", "out=grid.png")
        facts = json.loads(Image.open(tmp_path / "grid.png").text[FACTS])
        assert facts["network"]["revision"] == found.revision
        launch_door(export_checkpoint.main, "export_checkpoint", tmp_path, "checkpoint=hf:ann/digits", "out=out")
        assert checkpoint.find(tmp_path / "out").info["revision"] == found.revision
        sizes = ("model.hidden_size=96", "model.depth=8", "model.num_heads=4")
        launch(tmp_path, *sizes, "init_from=hf:ann/digits", "name=begun", "train.steps=1", "sampling.steps=2")
        assert checkpoint.find(tmp_path / "results/begun").info["init_revision"] == found.revision
        for name, said in (
            ("nobody/digits", "there is no nobody/digits on the hub, or this login can't read it"),
            ("ann/digits@old", "ann/digits has no revision old"),
        ):
            with pytest.raises(ValueError, match=f"^hf:{name}: {said}$"):
                tread.load(f"hf:{name}")
        cfg = opened(DIGITS).cfg
        theirs, ours = build_network(cfg).state_dict(), build_network(cfg)
        save_file(theirs, tmp_path / "hub/ann/pickles/weights/theirs.safetensors")
        load_weights(ours, "hf:ann/pickles@weights", model=cfg.model)
        assert equal(ours.state_dict(), theirs)
        with pytest.raises(ValueError, match="holds no .safetensors; pickles"):
            tread.load("hf:ann/pickles")
        monkeypatch.setenv("HF_TOKEN", "none")
        given = [f"checkpoint={DIGITS}", "out=given", "dtype=fp16", "push=ann/mine", "license=mit"]
        launch_door(export_checkpoint.main, "export_checkpoint", tmp_path, *given)
        assert tread.load("hf:ann/mine").saved.found.sha256("ema") == found.sha256("ema")
        assert 'load("hf:ann/mine")' in (tmp_path / "hub/ann/mine/main/README.md").read_text()
    with pytest.raises(SystemExit, match="http://.* can't be reached"):
        launch_door(export_checkpoint.main, "export_checkpoint", tmp_path, given[0], "out=again", "push=ann/mine")
    assert not (tmp_path / "again").exists()
    for name in ("ann/digits", f"ann/digits@{found.revision}"):
        assert checkpoint.find(f"hf:{name}").folder == found.folder
    for name in ("other", "pickles"):  # of the latter all but weights was fetched
        with pytest.raises(OSError, match=f"hf:ann/{name} is not in the cache, and http://.* can't be reached"):
            tread.load(f"hf:ann/{name}")
    for name in ("hf:digits", "hf:a/b@c@d", "hf:a/b@"):
        with pytest.raises(ValueError, match="is no name on the hub"):
            tread.load(name)
