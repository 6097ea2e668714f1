"""Weights for other classes and sizes: against the rows that they had, and positions by their formula."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from conftest import RGB, assert_refused, launch, opened, randomized, read_json, save_checkpoint, take_samples

from dit import DiT
from tread.checkpoints.adapting import new_classes, new_positions, position_scale
from tread.checkpoints.weights import read_weights
from tread.data.writer import write_dataset
from tread.models.embedders import sincos_positions
from tread.models.rotary import TABLES, rotary_angles
from tread.runtime.tensor_files import LABELS

NEW = ("d", "x", "a", "y")  # RGB's classes are a to e
SMALL = ("model.hidden_size=32", "model.num_heads=2", "model.patch_size=4", "sampling.decode=false", "eval.points=8")
ROPE = ("model=tread_lightning", "objective=rf")


def write(folder, side: int, classes: tuple[str, ...]) -> tuple[str, ...]:
    """Write a dataset, and return the overrides that train on it."""
    latents, count = replace(RGB, shape=(3, side, side), classes=classes), 16
    pixels = np.random.default_rng(side).normal(size=(count, 1, 3, side, side)).astype(np.float32)
    write_dataset(folder, latents, [(pixels, np.arange(count) % len(classes))])
    return "dataset=folder", f"dataset.path={folder}", *SMALL


def test_rows_of_the_label_table(tmp_path, composed):
    stored = read_weights(save_checkpoint(tmp_path / "old", composed)[1])
    old, drawn = stored.state[LABELS], torch.randn(5, 32)
    changed, said = new_classes(stored, drawn, {"a": "a", 3: 0}, NEW)
    assert torch.equal(changed.state[LABELS], torch.stack([old[3], drawn[1], old[0], drawn[3], old[5]]))
    assert "2 of 4 begin as old ones (a → a, d → d), the others anew" in said
    fresh = new_classes(stored, drawn, "new", NEW)[0].state[LABELS]
    assert torch.equal(fresh, torch.cat([drawn[:4], old[5:]])) and torch.equal(stored.state[LABELS], old)
    digits = ("1", "10", "0", "2")  # a number that is a class's name is that name, typed as either
    for asked in ({0: 2, "b": 10}, {"0": "2", 1: "10"}):
        rows = new_classes(stored, drawn, asked, digits)[0].state[LABELS]
        assert torch.equal(rows, torch.stack([drawn[0], old[1], drawn[2], old[0], old[5]]))
    for asked, told in (
        ({"a": "d", "b": 0}, "names the new class 'd' .0. twice"),
        ({"a": "d", 0: "x"}, "names the old class 'a' .0. twice"),
        ({"f": "d"}, "'f' is no class"),
        ({0: 4}, "names class 4, but the classes there are 0..3"),
        ({0: -1}, "'-1' is no class"),
    ):
        with pytest.raises(ValueError, match=told):
            new_classes(stored, drawn, asked, NEW)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [(), ROPE], ids=["sincos", "rope"])
def test_a_run_goes_on_at_another_size_and_with_other_classes(tmp_path, kind):
    """Scaled positions are those of the old places and of the places between."""
    small, large = write(tmp_path / "small", 16, RGB.classes), write(tmp_path / "large", 32, NEW)
    launch(tmp_path, *small, *kind, "name=old")
    start = ("init_from=results/old", "init_classes={a:a,3:0}")
    assert_refused(
        lambda *more: launch(tmp_path, *large, *kind, "name=no", *more),
        (*start, "of other shapes.*\n.*\n.*\n  or train.py takes init_positions for another size"),
        (start[0], "takes init_classes for other classes, init_positions for another size"),
    )
    asked = ("name=no", "model.position_scale=0.7")
    refused = ("init_positions=scaled", "model.position_scale is 0.7, but init_positions=scaled makes it 0.5")
    assert_refused(lambda *more: launch(tmp_path, *large, *kind, *start, *asked, *more), refused)
    for how, scale, said in (("recomputed", 1.0, "go on beyond the old ones"), ("scaled", 0.5, "span the old range")):
        told = launch(tmp_path, *large, *kind, *start, f"init_positions={how}", f"name={how}", "train.steps=3")
        assert f"4×4 tokens where these weights were trained, 8×8 now: they {said}" in told
        assert "begin as old ones" in told
        assert "were trained, but" not in told  # a warning
        again = launch(tmp_path, *large, *kind, *start, f"init_positions={how}", f"name={how}", "train.steps=6")
        assert "settings stay" not in again
        run = tmp_path / "results" / how
        assert read_json(run / "latest/info.json")["config"]["model"].get("position_scale", 1.0) == scale
        network = opened(run).load("cpu").network
        old = opened(tmp_path / "results/old").load("cpu").network
        assert torch.equal(network.pos_embed[0], sincos_positions(32, 8, scale))
        step = round(1 / scale)
        places = torch.arange(64).view(8, 8)[: 4 * step : step, : 4 * step : step].flatten()
        torch.testing.assert_close(network.pos_embed[0, places], old.pos_embed[0])
        if kind:
            torch.testing.assert_close(network.rotary[0, places], old.rotary[0])
        take_samples(tmp_path, f"checkpoint=results/{how}", "seeds=0", "steps=2", "classes=[0]", "decode=false")
    assert_refused(
        lambda *more: launch(tmp_path, *large, *kind, "name=scaled", *more),
        ("init_classes=new", "holds a run with other settings"),
        ("init_classes={a:a,3:1}", "init_classes.3: 0 there, 1 here"),
        ("init_positions=recomputed", "init_positions: scaled there, recomputed here"),
    )
    launch(tmp_path, *large, *kind, "init_from=results/scaled", "init_positions=scaled", "name=again", "train.steps=1")
    assert read_json(tmp_path / "results/again/latest/info.json")["config"]["model"]["position_scale"] == 0.5
    back = launch(tmp_path, *large, *kind, "init_from=results/scaled", "init_positions=recomputed", "name=back")
    assert "8×8 now: they are 1 apart, where 0.5 was" in back
    stretched = read_weights(tmp_path / "results/again")
    learned = replace(stretched, state={**stretched.state, "pos_embed": 2 * stretched.state["pos_embed"]})
    with pytest.raises(ValueError, match="pos_embed of .* are not fixed sines and cosines"):
        new_positions(learned, 8, 0.5)
    angles = rotary_angles(16, 8).repeat_interleave(2, 1)  # the tables that public files hold
    public = replace(stretched, state={**stretched.state, TABLES[0]: angles.cos(), TABLES[1]: angles.sin()})
    remade = new_positions(public, 16, 0.25)[0]  # they tell the heads, whose number must be the network's
    assert torch.equal(remade.state[TABLES[1]], rotary_angles(16, 16).repeat_interleave(2, 1).sin())
    assert (
        position_scale("gone", "ema", tmp_path / "results/scaled", 8) == 0.5
    )  # a run that goes on reads its own record


def test_a_file_in_public_dit_s_layout_starts_other_classes_at_another_size(tmp_path):
    large = write(tmp_path / "large", 32, NEW)
    sizes = {"input_size": 16, "patch_size": 4, "in_channels": 3, "hidden_size": 32, "depth": 6, "num_heads": 2}
    public = randomized(partial(DiT, **sizes, num_classes=20, learn_sigma=True), 0, 0.05).state_dict()
    torch.save(public, tmp_path / "DiT.pt")
    how = ("model.learn_sigma=true", "edm.predicts=ddpm_noise", "init_classes={7:x}", "init_positions=scaled")
    frozen = "optim.groups=[{match: y_embedder, lr: 0}]"
    assert_refused(
        lambda *more: launch(tmp_path, *large, *how, "init_from=DiT.pt", "name=own", *more),
        ("model.hidden_size=64", "of other shapes(?s:.*)settings that fit it: model.hidden_size=32"),
    )
    told = launch(tmp_path, *large, *how, "init_from=DiT.pt", frozen, "name=own", "train.steps=1")
    assert "(7 → x), the others anew" in told and "they span the old range" in told and "position_scale" not in told
    state = opened(tmp_path / "results/own").load("cpu").network.state_dict()
    table, old = state[LABELS], public[LABELS]
    assert torch.equal(table[[1, 4]], old[[7, 20]]) and not torch.isclose(table[[0, 2, 3]], old[:3]).all(1).any()
    assert torch.equal(state["pos_embed"][0], sincos_positions(32, 8, 0.5))


def test_what_needs_weights_is_refused_without(tmp_path):
    small = write(tmp_path / "small", 16, RGB.classes)
    assert_refused(
        lambda *more: launch(tmp_path, *small, *more),
        ("init_classes=new", "init_classes is given, but init_from=… is not"),
        ("init_positions=scaled", "init_positions is given, but init_from=… is not"),
        ("init_positions=large", "init_positions is 'large', but must be recomputed, scaled or null"),
    )
