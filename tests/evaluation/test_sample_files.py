"""What sample.py leaves. The references: the pictures drawn by hand, what Pillow and NumPy read, info.json's hashes."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from conftest import CPU, RGB, ROOT, assert_refused, names_in, open_pictures, opened, save_checkpoint, take_samples
from PIL import Image
from safetensors import safe_open
from torch.testing import assert_close

import sample
from tread.checkpoints import checkpoint
from tread.data.latents import to_uint8
from tread.diffusion.sampling import Sampler, draw, draw_pictures
from tread.drawing.grids import FACTS, GAP, draw_grid, name_rows
from tread.encoders.autoencoder import load_decoder

DIGITS = ROOT / "tests/recorded/run"
OPTIONS = ("checkpoint=results/a", "classes=[1,4]", "seeds=0-2", "steps=2")
SINGLE = [f"seed{seed:06d}_class{label}.png" for seed in range(3) for label in (1, 4)]


@pytest.fixture
def drawn(tmp_path, composed):
    """The pictures that OPTIONS ask for, (6, 16, 16, 3) uint8, of a checkpoint with the classes a to e."""
    save_checkpoint(tmp_path / "results/a", composed)
    model = opened(tmp_path / "results/a").load(CPU)
    labels = torch.tensor([1, 1, 1, 4, 4, 4])
    (pictures,) = draw_pictures(model, load_decoder(RGB), [0, 1, 2] * 2, labels, Sampler(steps=2, batch_size=6))
    return pictures.numpy().transpose(0, 2, 3, 1)


def launch(folder, *overrides: str) -> str:
    return take_samples(folder, *OPTIONS, *overrides)


def refusal(folder, *overrides: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        launch(folder, *overrides)
    return str(stopped.value)


def test_a_grid_says_what_made_it_and_names_its_rows(tmp_path, drawn):
    said = launch(tmp_path, "out=new/folder/grid.png", "guidance=cfg", "guidance.scale=1")
    assert "grid.png: rows are classes [1 (b), 4 (e)], columns seeds 0-2; step 3, ema weights" in said
    assert names_in(tmp_path) == {"results", "new"}
    image = Image.open(tmp_path / "new/folder/grid.png")
    facts = json.loads(image.text[FACTS])
    saved = checkpoint.find(tmp_path / "results/a")
    assert facts["network"] == {"step": 3, "weights": "ema", "sha256": saved.info["files"]["ema.safetensors"]["sha256"]}
    rows = [{"class": n, "class_name": name, "seeds": [0, 1, 2]} for n, name in ((1, "b"), (4, "e"))]
    assert facts["rows"] == rows and facts["weak_network"] is None
    expected = {"seeds": "0-2", "steps": 2, "solver": "heun", "precision": "fp32", "churn": None, "autoencoder": None}
    assert {key: facts["settings"][key] for key in expected} == expected
    assert facts["settings"]["guidance"]["kind"] == "cfg" and torch.__version__.startswith(facts["versions"]["torch"])
    size = (2 * 64 + GAP, 3 * 64 + 2 * GAP)
    shown = np.asarray(image)
    assert shown.shape[0] == size[0] and shown.shape[1] > size[1]
    assert np.array_equal(shown[:, -size[1] :], draw_grid(drawn.transpose(0, 3, 1, 2), 3))
    margin = shown[:, : -size[1]]
    assert all((row == 255).any() and (row < 128).any() for row in np.split(margin[: 64 * 2], 2))
    assert not np.array_equal(margin[:64], margin[64 + GAP :])  # other letters


def test_the_weak_network_of_a_guidance_is_told_by_its_hash(tmp_path, drawn, composed):
    save_checkpoint(tmp_path / "results/weak", composed, step=2)
    launch(tmp_path, "guidance=autoguidance", "guidance.checkpoint=results/weak", "guidance.weights=model", "churn=40")
    facts = json.loads(Image.open(tmp_path / "samples.png").text[FACTS], parse_constant=pytest.fail)
    weak = checkpoint.find(tmp_path / "results/weak")
    assert facts["weak_network"] == {"step": 2, "weights": "model", "sha256": weak.sha256("model")}
    assert facts["settings"]["churn"] == {"amount": 40.0, "sigma_min": 0.0, "noise": 1.0}


def test_single_files_in_a_folder(tmp_path, drawn):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/other.txt").write_text("kept")
    assert "mine: 6 pictures of classes [1 (b), 4 (e)], seeds 0-2; step 3" in launch(
        tmp_path, "out=mine", "batch_size=4"
    )
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {*SINGLE, "other.txt"}
    for number, (label, seed) in enumerate([(label, seed) for label in (1, 4) for seed in range(3)]):
        image = Image.open(tmp_path / f"mine/seed{seed:06d}_class{label}.png")
        assert np.abs(np.asarray(image).astype(int) - drawn[number]).max() <= 1  # of batches of another shape
        facts = json.loads(image.text[FACTS])
        assert (facts["seed"], facts["class"], facts["class_name"]) == (seed, label, RGB.classes[label])
    assert "rows" not in facts and facts["settings"]["batch_size"] == 4

    for name in SINGLE[1:]:
        (tmp_path / "mine" / name).unlink()
    before = (tmp_path / "mine" / SINGLE[0]).read_bytes()
    assert f"mine/{SINGLE[0]} is there already" in refusal(tmp_path, "out=mine", "steps=3")
    assert (tmp_path / "mine" / SINGLE[0]).read_bytes() == before
    launch(tmp_path, "out=mine", "steps=3", "overwrite=true")
    assert (tmp_path / "mine" / SINGLE[0]).read_bytes() != before
    assert (tmp_path / "mine/other.txt").read_text() == "kept"
    assert "twice" in refusal(tmp_path, "out=again", "classes=[1,1]")
    launch(tmp_path, "out=none", "classes=[null]", "seeds=[7]")
    assert [path.name for path in (tmp_path / "none").iterdir()] == ["seed000007_noclass.png"]


def test_scoring_finds_the_same_pictures_in_the_batch_and_the_folder(tmp_path, drawn):
    for name, order in (("batch.npz", [0, 1, 2, 3, 4, 5]), ("single", [0, 3, 1, 4, 2, 5])):  # by seed, then by class
        launch(tmp_path, f"out={name}")
        assert np.array_equal(open_pictures(tmp_path / name).read(0, 6).transpose(0, 2, 3, 1), drawn[order])
    with np.load(tmp_path / "batch.npz") as batch:
        assert batch.files == ["arr_0", "arr_1"] and batch["arr_0"].dtype == np.uint8
        assert np.array_equal(batch["arr_0"], drawn) and batch["arr_1"].tolist() == [1, 1, 1, 4, 4, 4]


def test_grey_pictures_become_rgb_where_they_are_scored_and_it_is_said(tmp_path):
    options = (f"checkpoint={DIGITS}", "steps=2", "classes=[3]", "seeds=0-1")
    for out in ("a.npz", "a"):
        assert "grey as RGB" in take_samples(tmp_path, *options, f"out={out}")
        pictures = open_pictures(tmp_path / out).read(0, 2)
        assert pictures.shape == (2, 3, 8, 8) and (pictures == pictures[:, :1]).all()
    assert "grey" not in take_samples(tmp_path, *options)
    shown = Image.open(tmp_path / "samples.png")
    assert shown.mode == "L" and shown.size == (2 * 64 + GAP, 64)  # no margin: the names are the numbers


def test_the_default_name_gets_a_number_and_another_is_refused_before_any_work(tmp_path, drawn, monkeypatch):
    for name in ("samples.png", "samples-1.png", "samples-2.png"):
        assert launch(tmp_path).splitlines()[-1].startswith(f"{name}: rows are classes")
    first = (tmp_path / "samples.png").read_bytes()
    launch(tmp_path, "overwrite=true", "steps=3")
    assert (tmp_path / "samples.png").read_bytes() != first and not (tmp_path / "samples-3.png").exists()
    (tmp_path / "x.npz").touch()
    (tmp_path / "folder.png").mkdir()
    monkeypatch.setattr(sample, "draw_pictures", lambda *_, **__: pytest.fail("it sampled"))
    assert_refused(
        partial(launch, tmp_path),
        ("out=samples.png", "overwrite=true"),
        ("out=x.npz", "overwrite=true"),
        ("out=folder.png", "overwrite=true", "is a folder"),
        ("out=x.npz/a.png", "could not be written"),
        ("out=x.npz/single", "could not be written"),
        ("out=x.jpg", "must be a grid's name"),
        ("out=", "must be a grid's name"),
    )


def read_latents(path):
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()


def test_latents_are_the_autoencoders_own_and_need_none(tmp_path, composed):
    """z = x / scale + shift behind x / channel_scale + channel_shift; nobody has the autoencoder."""
    normalised = {"channel_shift": (1.0, 2.0, 3.0), "channel_scale": (0.5, 2.0, 4.0)}
    latents = replace(RGB, autoencoder="unknown", scale=0.25, shift=5.0, **normalised)
    save_checkpoint(tmp_path / "results/a", composed, latents)
    model = opened(tmp_path / "results/a").load(CPU)
    labels = torch.tensor([1, 1, 1, 4, 4, 4])
    (x,) = draw(model, [0, 1, 2] * 2, labels, Sampler(steps=2, batch_size=6))
    for name in ("samples.safetensors", "samples-1.safetensors"):
        assert f"{name}: 6 latents of classes [1 (b), 4 (e)], seeds 0-2; step 3" in launch(
            tmp_path, "save_latents=true"
        )
        found, metadata = read_latents(tmp_path / name)
        shift, scale = (torch.tensor(value).view(3, 1, 1) for value in normalised.values())
        assert_close(found["latents"], (x / scale + shift) / 0.25 + 5)
        assert found["seeds"].tolist() == [0, 1, 2] * 2 and torch.equal(found["labels"], labels)
        facts = json.loads(metadata[FACTS])
        assert "decoder takes" in metadata["meaning"] and facts["rows"][1]["class_name"] == "e"
        assert facts["latents"]["autoencoder"] == "unknown" and facts["latents"]["channel_scale"] == [0.5, 2.0, 4.0]
        assert facts["network"]["step"] == 3 and facts["settings"]["steps"] == 2
    assert not list(tmp_path.glob("*.png"))
    assert "did not say which autoencoder made them" in (said := refusal(tmp_path)) and "save_latents=true" in said


def test_latents_are_those_of_the_pictures_and_have_their_address(tmp_path, drawn):
    launch(tmp_path, "save_latents=true", "out=new/z.safetensors")
    found, _ = read_latents(tmp_path / "new/z.safetensors")
    assert np.array_equal(to_uint8(found["latents"]).permute(0, 2, 3, 1), drawn)  # pixels: z is the picture
    launch(tmp_path, "save_latents=true", "out=one.safetensors", "classes=[4]", "seeds=[1]")
    one = read_latents(tmp_path / "one.safetensors")[0]["latents"][0]
    assert_close(one, found["latents"][4], rtol=1e-3, atol=1e-2)  # of a batch of another shape


@pytest.mark.parametrize(
    "given, shown",
    [
        (["save_latents=true", "out=x.png"], "save_latents=true writes a .safetensors file"),
        (["save_latents=true", "out="], "save_latents=true writes a .safetensors file"),
        (["out=x.safetensors"], "save_latents=true writes a .safetensors file"),
        (["save_latents=true", "autoencoder=vae.pt"], "decodes none: leave it out, or autoencoder=…"),
        (["decode=false", "autoencoder=vae.pt"], "decode=false draws latents and decodes none: leave it out, or"),
        (["text_encoder=clip-l"], "text_encoder is given, but no prompt"),
        (["save_latents=true", "decode_precision=tf32"], "leave it out, or autoencoder=… and decode_precision=…"),
        (["decode_precision=fp16"], "decode_precision is 'fp16', but must be fp32, tf32 or bf16"),
        (["save_latents=true", "seeds=[9223372036854775808]"], "seed 9223372036854775808 does not fit into the 64"),
        (["save_latents=true", "out=there.safetensors"], "there.safetensors is there already"),
    ],
)
def test_latents_that_can_not_be_written_are_refused_before_any_work(tmp_path, drawn, monkeypatch, given, shown):
    (tmp_path / "there.safetensors").touch()
    monkeypatch.setattr(sample, "draw_pictures", lambda *_, **__: pytest.fail("it sampled"))
    assert shown in refusal(tmp_path, *given)
    assert (tmp_path / "there.safetensors").stat().st_size == 0


def test_long_names_are_cut_and_no_class_is_named():
    grid = draw_grid(np.zeros((2, 1, 64, 64), np.uint8), 1)
    short, long, longer = (np.asarray(name_rows(grid, [name, "no class"])) for name in ("a", "a" * 40, "a" * 80))
    assert short.shape[1] < long.shape[1] < 64 + 20 * 12 and long.shape == longer.shape
