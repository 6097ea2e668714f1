"""Whole runs of Mamba and of hybrids: they go on, align, are sampled and scored by rows, exported and compiled.

The references are the same run made another way, the ids that the network is called with, and what settings refuse."""

from __future__ import annotations

import json
from dataclasses import asdict

import export_checkpoint
import pytest
import torch
from conftest import launch, launch_door, launch_processes, records, state

import fid
import sample
from tread.checkpoints import checkpoint
from tread.checkpoints.for_sampling import open_network
from tread.checkpoints.network import build_network, read_network
from tread.checkpoints.weights import describe, load_weights, sizes
from tread.models.mamba import Mamba
from tread.preparing import digits

SMALL = ["model.head_dim=8", "model.state=4"]
HYBRID = [*SMALL, "model.directions=4", "model.attention_every=3"]
SPARSE = ("guidance=sparse", "guidance.strong=0.25", "guidance.weak=0.5", "steps=2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run of a hybrid under a route, and what it printed."""
    folder = tmp_path_factory.mktemp("runs")
    return folder, launch(folder, "model=tread_mamba", *HYBRID)


@pytest.fixture
def seen(monkeypatch):
    """The routes that Mamba was called with."""
    calls, forward = [], Mamba.forward

    def watched(self, x, t, y, routes=(), **more):
        calls.append([(route.select, ids.shape[1]) for route, ids in routes])
        return forward(self, x, t, y, routes, **more)

    monkeypatch.setattr(Mamba, "forward", watched)
    return calls


def test_a_hybrid_says_what_it_is_and_goes_on_bit_equal(runs):
    folder, text = runs
    assert "mamba, " in text and "6 blocks, 2 of them DiT's with attention, 16 tokens" in text
    assert "r(2→2) keeps 8 of 16 tokens in whole rows" in text
    launch(folder, "model=tread_mamba", *HYBRID, "name=parts", "train.steps=3")
    assert "goes on at step 3" in launch(folder, "model=tread_mamba", *HYBRID, "name=parts")
    whole, parts = (state(folder / "results" / name) for name in ("digits-tread_mamba", "parts"))
    assert whole.keys() == parts.keys() and all(torch.equal(whole[key], parts[key]) for key in whole)
    assert any("mixer.A_log" in key for key in whole) and any("attn.qkv" in key for key in whole)


@pytest.mark.slow
def test_two_processes_equal_one(runs):
    """Up to the order of sums, 4 samples a batch each; they wait for each parameter's gradient."""
    folder, _ = runs
    launch_processes(folder, "model=tread_mamba", *HYBRID, "name=two", "train.steps=3", processes=2)
    one, two = (records(folder / "results" / name) for name in ("digits-tread_mamba", "two"))
    losses = [[record["loss"] for record in each if "loss" in record] for each in (one, two)]
    assert losses[1] == pytest.approx(losses[0][:3], rel=1e-5) and len(losses[1]) == 3


def test_without_a_route_with_recomputation_and_aligned_with_itself(runs, seen):
    folder, _ = runs
    text = launch(folder, "model=mamba", *SMALL, "alignment=self", "train.activation_checkpointing=true")
    assert "routes    none" in text and "alignment self" in text and not any(seen)
    launch(folder, "model=tread_mamba", *SMALL, "alignment=self", "train.steps=1", "name=aligned")
    assert [("row", 8)] in seen


def test_it_is_sampled_scored_and_exported_by_rows(runs, seen):
    folder, _ = runs
    given = ("checkpoint=results/digits-tread_mamba", *SPARSE)
    text = launch_door(sample.main, "sample", folder, *given, "classes=[3]", "seeds=0-1")
    assert "ratios 0.25 and 0.5" in text and seen == [[("row", 12)], [("row", 8)]] * 3
    seen.clear()
    launch_door(export_checkpoint.main, "export_checkpoint", folder, given[0], "out=given")
    launch_door(fid.main, "fid", folder, "checkpoint=given", *SPARSE, "num_samples=4", "batch_size=4")
    assert seen == [[("row", 12)], [("row", 8)]] * 3
    assert json.loads((folder / "given/fid.json").read_text())["settings"]["nfe"] == 6


def test_single_tokens_where_they_are_allowed(runs, seen):
    folder, _ = runs
    allowed = ["model.allow_token_routes=true", "model.routes.0.select=token", "model.routes.0.selection_ratio=0.3"]
    text = launch(folder, "model=tread_mamba", *SMALL, *allowed, "name=tokens", "train.steps=1")
    assert "keeps 12 of 16 tokens, fp32" in text and [("token", 12)] in seen


def test_a_run_by_the_fused_kernel_opens_where_it_is_not(composed, tmp_path):
    """What weights mean does not depend on it."""
    names = ["model=mamba", "model.hidden_size=16", "model.depth=2", *SMALL]
    config, fused = composed(*names), composed(*names, "model.kernel=mamba_ssm", "model.allow_token_routes=true")
    network = build_network(read_network(config))
    info = {"config": fused, "latents": asdict(digits.MEANING), "versions": {}}
    checkpoint.save(tmp_path, 1, {"ema": network.state_dict()}, info)
    assert open_network(checkpoint.find(tmp_path), "ema").cfg.model.kernel == "torch"
    load_weights(network, str(tmp_path), model=read_network(config).model)


@pytest.mark.parametrize(
    "changed",
    [
        [],
        ["model.directions=4", "model.state=6"],
        ["model.directions=1", "model.mlp_ratio=0"],
        ["model.attention_every=2", "model.num_heads=2", "model.expand=3"],
        ["model.conv=3", "model.head_dim=4"],
    ],
)
def test_weights_tell_their_settings(composed, changed):
    names = ["model=mamba", "model.hidden_size=16", "model.depth=4", *SMALL, *changed]
    cfg = read_network(composed(*names))
    found, model = sizes(build_network(cfg).state_dict()), cfg.model
    assert found["model.architecture"] == "mamba" and "architecture mamba" in describe(found)
    told = {key: value for key, value in model.decisive.items() if key in found}
    assert told.keys() >= {f"model.{name}" for name in ("state", "head_dim", "expand", "conv", "directions")}
    assert told == {key: found[key] for key in told} and found["model.attention_every"] == model.attention_every
    assert found["model.mlp_ratio"] == model.mlp_ratio


@pytest.mark.parametrize(
    ("overrides", "shown"),
    [
        (
            ["model=tread_mamba", "model.routes.0.select=token"],
            "'token'.*must be row, or model.allow_token_routes=true",
        ),
        (["model=tread_mamba", "model.directions=3"], "model.directions is 3, but must be 1, 2 or 4"),
        (["model=tread_mamba", "model.kernel=triton"], "model.kernel is 'triton', but must be torch or mamba_ssm"),
        (["model=tread_mamba", "model.state=0"], "model.state is 0, but must be positive"),
        (["model=tread_mamba", "model.attention_every=-1"], "model.attention_every is -1"),
        (["model=tread_mamba", "model.norm=rms"], "model.norm is 'rms', but mamba has no such choice"),
        (["model=tread", "model.state=32"], "model.state is 32, but dit has no such choice: model=mamba has it"),
        (["model=rwkv", "model.attention_every=2"], "attention_every is 2, but rwkv has no such choice"),
        (["model=tread", "model.allow_token_routes=true"], "allow_token_routes is True, but dit has no such choice"),
        (["model=tread", "model.mlp_ratio=0"], "model.mlp_ratio is 0, but must be positive: of dit no MLP"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(read_config, overrides, shown):
    with pytest.raises(ValueError, match=shown):
        read_config(*overrides)


@pytest.mark.parametrize(
    ("overrides", "shown"),
    [
        (["model.head_dim=48"], "expand 2 × hidden_size 16 is not a multiple of head_dim 48"),
        (["model.head_dim=8", "model.attention_every=7"], "attention_every is 7, but must be 0, for none, or 2 to 6"),
        (["model.head_dim=8", "model.kernel=mamba_ssm"], "mamba_ssm needs"),
    ],
)
def test_what_no_network_can_be_is_one_line_before_any_work(tmp_path, overrides, shown):
    with pytest.raises(SystemExit, match=shown):
        launch(tmp_path, "model=tread_mamba", *overrides)
    assert not (tmp_path / "results").exists()
