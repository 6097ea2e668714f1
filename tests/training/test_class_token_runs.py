"""Runs with a class token: their loss by hand, other ways to make them, and the doors that open them."""

import shutil
from functools import partial

import conftest
import numpy as np
import prepare_features
import pytest
import torch
from conftest import CPU, assert_refused, launch_door, logged, opened, read_json, same, state, take_samples, write_json
from torch.testing import assert_close

import tread
from rf import RF
from tread.data.dataset import LatentDataset
from tread.evaluation.heldout_loss import heldout_loss
from tread.evaluation.similarity import noised_states, open_latents
from tread.runtime.randomness import generator

ENCODER = """
import torch
def patches(pictures):
    x = pictures.float() / 127.5 - 1
    return torch.nn.functional.unfold(x, x.shape[2] // 4, stride=x.shape[2] // 4).transpose(1, 2)
def others(pictures):
    return patches(pictures).flip(1)
"""
TOKEN = ("model.class_token=12", "name=token")  # 3 channels of 2×2 pixels
REPA = ("alignment=repa", "alignment.encoder=own_tokens:patches", "alignment.width=8")
PARTS = ("train", "heldout")


def launch(folder, *overrides):
    return conftest.launch(folder, "objective=rf", *overrides)


def encode(folder, part, *overrides):
    options = (f"dataset.path=data/digits/{part}", "encoder=own_tokens:patches", "batch_size=500", *overrides)
    return launch_door(prepare_features.main, "prepare_features", folder, *options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("token")
    (folder / "own_tokens.py").write_text(ENCODER)
    launch(folder, "train.steps=1", "name=plain")  # which writes the digits
    for part in PARTS:
        assert "4×4 tokens of 12 and one of 12" in encode(folder, part)
    launch(folder, *TOKEN)
    return folder


def test_the_first_loss_is_the_plain_one_and_a_share_of_the_tokens_mean_square(trained):
    """Both velocities are 0 then. The features are the means of those that the encoder makes of patches."""
    data = LatentDataset(trained / "data/digits/train", "full", class_token=12, pictures=True)
    batch = data.batch(0, 0, 8)
    pixels = batch.pictures.float().unflatten(3, (4, 2)).unflatten(2, (4, 2))  # of 4×4 patches of 2×2, 3 times the same
    assert_close(batch.class_token.float(), pixels.mean(dim=(2, 4)).flatten(1) / 127.5 - 1, rtol=2**-11, atol=1e-3)
    noise = torch.randn(8, 12, generator=generator(0, 0, "class token"))
    beside = (noise - batch.class_token.float()).square().mean().item()
    plain, actual = (logged(trained / "results" / name, "loss")[0] for name in ("plain", "token"))
    assert actual == pytest.approx(plain + 0.03 * beside, rel=1e-6) and beside > 0.5
    launch(trained, *TOKEN[:1], "name=half", "train.steps=1", "train.class_token_weight=0.5")
    assert logged(trained / "results/half", "loss")[0] == pytest.approx(plain + 0.5 * beside, rel=1e-6)


def test_held_out_the_velocity_error_is_of_latents_alone(trained):
    """That of a network without one, where both predict 0; it sees the noised token of the same time."""
    data, numbers = LatentDataset(trained / "data/digits/heldout", class_token=12), torch.arange(64)
    clean = data.read(np.arange(64) * len(data) // 64).class_token
    noise = torch.stack([torch.randn(12, generator=generator(i, "evaluation class token")) for i in range(64)])

    def network(x, t, y, routes, class_token=None):
        if class_token is not None:
            assert_close(class_token, (1 - t[:, None]) * clean + t[:, None] * noise, rtol=1e-5, atol=1e-5)
            seen.append(class_token)
        return torch.zeros_like(x)

    network.parameters, seen = lambda: iter([torch.zeros(1)]), []
    both = [heldout_loss(RF(), network, each, numbers, 64, 16) for each in (data, LatentDataset(data.folder))]
    assert torch.equal(*both) and len(seen) == 1


def test_three_and_three_steps_are_six_bit_for_bit(trained, tmp_path):
    for name in ("data", "own_tokens.py"):
        (tmp_path / name).symlink_to(trained / name)
    run, other = (folder / "results/token" for folder in (trained, tmp_path))
    shutil.copytree(run / "step_0000003", other / "step_0000003")
    assert "goes on at step 3" in launch(tmp_path, *TOKEN)
    assert same(run, other) and any("z_embedder.out.weight" in name for name in state(run))
    with pytest.raises(SystemExit, match="train.class_token_weight: 0.03 there, 0.1 here"):
        launch(tmp_path, *TOKEN, "train.class_token_weight=0.1")


@pytest.mark.parametrize("more", [REPA, ("alignment=self", "train.loss_tokens=kept")], ids=["repa", "self"])
def test_micro_batches_and_alignment_beside_it(trained, more):
    """On patches alone, in a route; the same numbers in halves."""
    whole, parts = ("name=whole", *TOKEN[:1]), ("name=parts", "train.micro_batch_size=4", *TOKEN[:1])
    for way in (whole, parts):
        launch(trained, *way, *more, "train.steps=3", "rf.contrastive=0.05", "alignment.block=2", "resume=false")
    for name in ("loss", "alignment"):
        both = [logged(trained / "results" / run, name) for run in ("whole", "parts")]
        assert both[0] == pytest.approx(both[1], rel=1e-4)
    for run in ("whole", "parts"):
        shutil.rmtree(trained / "results" / run)


@pytest.mark.slow
def test_two_processes_change_nothing_but_rounding(trained, tmp_path):
    for name in ("data", "own_tokens.py"):
        (tmp_path / name).symlink_to(trained / name)
    conftest.launch_processes(tmp_path, "objective=rf", *TOKEN, processes=2)
    ours, theirs = (state(folder / "results/token") for folder in (trained, tmp_path))
    for name in (name for name in ours if not name.startswith("optimizer")):
        assert_close(theirs[name], ours[name], rtol=1e-5, atol=1e-5)


def test_doors_draw_with_it_and_compare_its_blocks(trained):
    run = trained / "results/token"
    checkpoint = f"checkpoint={run}"
    for number, more in enumerate(((), ("guidance=cfg",), ("guidance=sparse",))):
        take_samples(trained, checkpoint, "seeds=0-1", "steps=2", f"out={number}.png", *more)
    weaker = ("guidance=autoguidance", f"guidance.checkpoint={trained / 'results/plain'}")
    with pytest.raises(SystemExit, match="differ in class_token, so their predictions can't be combined"):
        take_samples(trained, checkpoint, "seeds=0-1", "steps=2", "out=a.png", *weaker)
    weaker = (*weaker[:1], f"guidance.checkpoint={run / 'step_0000003'}")
    take_samples(trained, checkpoint, "seeds=0-1", "steps=2", "out=b.png", *weaker)
    drawn = [tread.load(run).sample([1], seeds, steps=3, output="latent") for seeds in ([5, 6], [6])]
    assert drawn[0].shape == (2, 1, 8, 8)
    assert_close(drawn[0][1:], drawn[1], rtol=1e-5, atol=1e-5)
    saved = opened(run)
    [states] = noised_states(saved.load(CPU), open_latents(saved, f"{trained}/data/digits/heldout"), 4, 2, 0, 4)
    assert states.tokens.shape == (7, 4, 16, 16)


def test_what_does_not_fit_is_refused_in_a_line(trained, tmp_path):
    for name in ("data", "results"):
        shutil.copytree(trained / name, tmp_path / name, symlinks=True)
    (tmp_path / "own_tokens.py").symlink_to(trained / "own_tokens.py")
    index = tmp_path / "data/digits/heldout/index.json"
    there = read_json(index)
    start = partial(launch, tmp_path, "name=refused", "model.class_token=12")
    assert_refused(
        start,
        ("objective=edm", "model.class_token is 12, but needs objective=rf, not edm"),
        ("model.class_token=16", "model.class_token is 16, but own_tokens:patches in .* has 12 channels"),
        ("dataset.flip=true", "dataset.flip mirrors pixels .* without stored features"),
    )
    old = {**there["features"], "pooled": None}
    make = "python scripts/prepare_features.py dataset=data/digits/heldout encoder=own_tokens:patches again=true"
    for features, shown in ((None, "heldout has no features: python .*encoder=… makes them"), (old, make)):
        rest = {key: value for key, value in there.items() if key != "features"}
        write_json(index, rest | {"features": features} if features else rest)
        assert_refused(start, (shown,))
    write_json(index, there)
    for part in PARTS:
        path = tmp_path / f"data/digits/{part}/index.json"
        changed = read_json(path)
        changed["features"]["fingerprint"] = "0" * 64
        write_json(path, changed)
        if part == "train":  # which the held-out tokens are not of
            assert_refused(start, ("differ in the class token's encoder",))
    changed = "train.steps=7", "(?s)is not the data that .*class_token: .*00000"
    assert_refused(partial(launch, tmp_path, *TOKEN), changed)
