"""MaskDiT in the same loop: by model=maskdit alone, whole or resumed, by one process or two, in both stages.

The references are the undisturbed run, bit for bit, what was exported, and the paper's settings.
"""

from __future__ import annotations

import export_checkpoint
import import_checkpoint
import pytest
import torch
from conftest import launch, launch_door, launch_processes, records, state
from safetensors.torch import load_file

import sample
from tread.checkpoints import checkpoint
from tread.checkpoints.exporting import public_names
from tread.checkpoints.network import build_network
from tread.checkpoints.weights import fit
from tread.runtime.tensor_files import LABELS
from tread.training.step import active_routes

SMALL = ["model.hidden_size=16", "model.num_heads=2", "model.depth=3"]
SMALL += ["model.decoder_hidden_size=8", "model.decoder_depth=1", "model.decoder_heads=2"]
FEW = [*SMALL, "model=maskdit", "every.evaluate=9", "every.sample=9"]


def test_a_resumed_run_and_two_processes_equal_one_across_the_end_of_masking(tmp_path):
    """Two masked steps and two of all tokens: resumed behind the first, bit for bit; by two processes, which wait for
    each parameter's gradient, the mask token's too, also where they begin behind the masked steps."""
    options = [*FEW, "train.routes_until=2", "train.steps=4"]
    launch(tmp_path, *options, "name=one")
    launch(tmp_path, *options, "name=parts", "train.steps=1")
    assert "goes on at step 1" in launch(tmp_path, *options, "name=parts")
    one, parts = (state(tmp_path / "results" / name) for name in ("one", "parts"))
    assert one.keys() == parts.keys() and all(torch.equal(one[key], parts[key]) for key in one)
    launch_processes(tmp_path, *options, "name=two", "train.steps=3", processes=2)
    launch_processes(tmp_path, *options, "name=two", processes=2)
    expected, found = ([r for r in records(tmp_path / "results" / name) if "loss" in r] for name in ("one", "two"))
    assert [record["step"] for record in found] == [1, 2, 3, 4]
    for ours, theirs in zip(found, expected):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    two = state(tmp_path / "results" / "two")
    for moment in ("exp_avg", "exp_avg_sq"):  # of all gradients there were
        for key in (key for key in one if key.startswith(f"optimizer/{moment}/")):
            torch.testing.assert_close(two[key], one[key], rtol=1e-3, atol=1e-6)


def test_without_a_route_the_loss_is_the_plain_one_of_all_tokens(tmp_path):
    """As with train.routes_until=0, bit for bit; a schedule of ratios is still refused."""
    text = launch(tmp_path, *FEW, "model.routes=[]", "train.steps=2", "name=none")
    assert "routes none" in " ".join(text.split()) and "reconstruction" not in text
    text = launch(tmp_path, *FEW, "train.routes_until=0", "train.steps=2", "name=until")
    assert "reconstruction" not in text
    none, until = (state(tmp_path / "results" / name) for name in ("none", "until"))
    assert none.keys() == until.keys() and all(torch.equal(none[key], until[key]) for key in none)
    with pytest.raises(SystemExit, match="train.ratio_schedule is of routes, but model=maskdit has none"):
        launch(tmp_path, *FEW, "model.routes=[]", "train.ratio_schedule={start: 0.5, end: 0.25, last: 2}")


def test_what_a_file_of_theirs_may_be(read_config):
    """Elsewhere its settings are named. A null class that was trained could not be kept: no gradient reaches it."""
    cfg = read_config("model=maskdit", *SMALL)
    given = build_network(cfg).state_dict()
    assert fit(given, given, "theirs.pt").keys() == given.keys()
    given[LABELS] = given[LABELS].index_fill(0, torch.tensor(10), 0.1)
    dense = build_network(read_config("model=dit", *SMALL[:3])).state_dict()
    with pytest.raises(ValueError, match="fit it: model=maskdit model.decoder_hidden_size=8 model.decoder_depth=1$"):
        fit(given, dense, "theirs.pt")
    with pytest.raises(ValueError, match=f"null class of theirs.pt, the last row of {LABELS}, is not zero: MaskDiT's"):
        fit(given, build_network(cfg).state_dict(), "theirs.pt")


def test_a_run_trains_resumes_is_sampled_exported_in_their_names_and_imported_again(tmp_path):
    """By model=maskdit alone; the file is read as theirs: prefix model., labels as a matrix (D, classes)."""
    printed = launch(tmp_path, "model=maskdit", *SMALL, "name=run", "train.steps=3")
    assert "maskdit" in printed and "r(0→2) keeps" in printed and "0.1 of a masked reconstruction" in printed
    launch(tmp_path, "model=maskdit", *SMALL, "name=run", "train.steps=6")
    given = checkpoint.find(tmp_path / "results/run").tensors("ema")
    assert not given[LABELS][-1].any() and given[LABELS][:-1].all()  # six steps of Adam on the other rows
    exported = ("checkpoint=results/run", "out=given", "public=true")
    launch_door(export_checkpoint.main, "export_checkpoint", tmp_path, *exported)
    public = load_file(tmp_path / "given/ema-public.safetensors")
    assert torch.equal(public[f"model.{LABELS}"], given[LABELS][:-1].T)
    assert public.keys() == {f"model.{name}" for name in given}
    assert checkpoint.find(tmp_path / "given").tensors("ema").keys() == given.keys()
    for other in (given | {LABELS: torch.ones(11, 16)}, {LABELS: torch.zeros(11, 64)}):
        with pytest.raises(ValueError, match="null class.* is not zero|public=true is of MaskDiT"):
            public_names(other)
    torch.save({"ema": public}, tmp_path / "theirs.pt")
    launch_door(import_checkpoint.main, "import_checkpoint", tmp_path, "weights=theirs.pt", "model=maskdit", *SMALL,
                "name=back")  # fmt: skip
    back = checkpoint.find(tmp_path / "results/back").tensors("ema")
    assert given.keys() == back.keys() and all(torch.equal(given[name], back[name]) for name in given)
    few = ("checkpoint=results/run", "steps=2", "classes=[1]", "seeds=0", "out=drawn.png")
    launch_door(sample.main, "sample", tmp_path, *few, "guidance=cfg", "guidance.scale=1.5")
    for overrides, shown in (
        ((*few, "guidance=sparse"), "MaskDiT, which sees mask tokens in their places"),
        ((*few, "guidance=sparse", "guidance.force=true"), "MaskDiT, which sees mask tokens in their places"),
    ):
        with pytest.raises(SystemExit, match=shown):
            launch_door(sample.main, "sample", tmp_path, *overrides)
    for overrides, shown in (
        (["model=maskdit", *SMALL, "model.routes.0.start=1"], "one route, start 0, end -1, fp32 off"),
        (["model=maskdit", *SMALL, "model.decoder_heads=3"], "decoder_hidden_size 8 .* decoder_heads 3"),
        (
            ["model=tread", "model.decoder_depth=3"],
            "model.decoder_depth is 3, but dit has no such choice: model=maskdit",
        ),
    ):
        with pytest.raises(SystemExit, match=shown):
            launch(tmp_path, *overrides, "name=other")


def test_the_unmasking_stage_is_the_papers(read_config):
    """No token dropped, lr 5e-5, full precision, 100K steps of batch 1024, from the masked run's weights."""
    cfg = read_config("experiment=imagenet256_xl2_maskdit_unmask")
    assert active_routes(cfg, 0) == () and cfg.model.masks and cfg.train.precision == "fp32"
    assert (cfg.optim.lr, cfg.train.steps, cfg.train.batch_size) == (5e-5, 100_000, 1024)
    masked = read_config("experiment=imagenet256_xl2", "model=maskdit")
    assert cfg.init_from == f"{masked.results}/{masked.name}/latest" and cfg.model == masked.model
    assert (masked.train.loss_tokens, masked.train.reconstruction) == ("kept", 0.1)
