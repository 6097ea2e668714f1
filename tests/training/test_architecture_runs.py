"""Whole runs of Mamba, hybrids and MaskDiT: they go on, align, are sampled and scored, exported, imported and compiled.

The references are the same run made another way, the ids that the network is called with, what was exported, and the
paper's settings.
"""

import shutil
from dataclasses import asdict
from functools import partial

import conftest
import export_checkpoint
import import_checkpoint
import pytest
import torch
from conftest import equal, launch, launch_door, launch_processes, read_json, records, same, score, state, take_samples
from safetensors.torch import load_file
from test_token_losses import SPARSE

from tread.checkpoints import checkpoint
from tread.checkpoints.exporting import public_names
from tread.checkpoints.network import build_network, read_network
from tread.checkpoints.weights import StoredWeights, describe, load_weights, sizes
from tread.models.architectures import MaskDiTOptions
from tread.models.mamba import Mamba
from tread.preparing import digits
from tread.runtime.tensor_files import LABELS
from tread.training.draws import active_routes
from tread.training.settings import complete

SMALL = ["model.head_dim=8", "model.state=4"]
HYBRID = [*SMALL, "model.directions=4", "model.attention_every=3"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run of a hybrid under a route, and what it printed."""
    folder = tmp_path_factory.mktemp("runs")
    return folder, launch(folder, "model=tread_mamba", *HYBRID)


@pytest.fixture
def seen(monkeypatch):
    return conftest.routes_seen(monkeypatch, Mamba)


def test_a_hybrid_says_what_it_is_and_goes_on_bit_equal(runs):
    folder, text = runs
    assert "mamba, " in text and "6 blocks, 2 of them DiT's with attention, 16 tokens" in text
    assert "r(2→2) keeps 8 of 16 tokens in whole rows" in text
    whole, parts = (folder / "results" / name for name in ("digits-tread_mamba", "parts"))
    shutil.copytree(whole / "step_0000003", parts / "step_0000003")
    assert "goes on at step 3" in launch(folder, "model=tread_mamba", *HYBRID, "name=parts")
    assert same(whole, parts)
    assert {"model/blocks.0.mixer.A_log", "model/blocks.2.attn.qkv.weight"} <= state(whole).keys()


@pytest.mark.slow
def test_two_processes_equal_one(runs):
    """Up to the order of sums, 4 samples a batch each; they wait for each parameter's gradient."""
    folder, _ = runs
    launch_processes(folder, "model=tread_mamba", *HYBRID, "name=two", "train.steps=3", processes=2)
    this, two = (records(folder / "results" / name) for name in ("digits-tread_mamba", "two"))
    losses = [[record["loss"] for record in each if "loss" in record] for each in (this, two)]
    assert losses[1] == pytest.approx(losses[0][:3], rel=1e-5) and len(losses[1]) == 3


def test_without_a_route_with_recomputation_and_aligned_with_itself(runs, seen):
    options = (*SMALL, "alignment=self", "train.steps=2", "every.evaluate=9", "every.sample=9")
    text = launch(runs[0], "model=mamba", *options, "train.memory=checkpointing")
    assert "routes    none" in text and "alignment self" in text and not any(seen)
    launch(runs[0], "model=tread_mamba", *options, "train.steps=1", "name=aligned")
    assert [(2, 2, "row", 8)] in seen


def test_it_is_sampled_scored_and_exported_by_rows(runs, seen):
    folder, _ = runs
    given = ("checkpoint=results/digits-tread_mamba", *SPARSE)
    text = take_samples(folder, *given, "classes=[3]", "seeds=0-1")
    assert "ratios 0.25 and 0.5" in text and seen == [[(2, 2, "row", 12)], [(2, 2, "row", 8)]] * 3
    seen.clear()
    launch_door(export_checkpoint.main, "export_checkpoint", folder, given[0], "out=given")
    score(folder, "checkpoint=given", *SPARSE, "num_samples=4", "batch_size=4")
    assert seen == [[(2, 2, "row", 12)], [(2, 2, "row", 8)]] * 3
    settings = read_json(folder / "given/fid.json")["settings"]
    assert settings["nfe"] == 6 and "sparse" in str(settings["guidance"])


def test_single_tokens_where_they_are_allowed(runs, seen):
    folder, _ = runs
    allowed = ["model.allow_token_routes=true", "model.routes.0.select=token", "model.routes.0.selection_ratio=0.3"]
    text = launch(folder, "model=tread_mamba", *SMALL, *allowed, "name=tokens", "train.steps=1")
    assert "keeps 12 of 16 tokens, fp32" in text and [(2, 2, "token", 12)] in seen


def test_a_run_by_the_fused_kernel_opens_where_it_is_not(composed, tmp_path):
    """What weights mean does not depend on it."""
    names = ["model=mamba", "model.hidden_size=16", "model.depth=2", *SMALL]
    config, fused = composed(*names), composed(*names, "model.kernel=mamba_ssm", "model.allow_token_routes=true")
    network = build_network(read_network(config))
    info = {"config": fused, "latents": asdict(digits.MEANING), "versions": {}}
    checkpoint.save(tmp_path, 1, {"ema": network.state_dict()}, info)
    assert conftest.opened(tmp_path).cfg.model.kernel == "torch"
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
    cfg = read_network(composed("model=mamba", "model.hidden_size=16", "model.depth=4", *SMALL, *changed))
    actual, model = sizes(build_network(cfg).state_dict()), cfg.model
    assert actual["model.architecture"] == "mamba" and "architecture mamba" in describe(actual)
    told = {key: value for key, value in model.decisive.items() if key in actual}
    assert told.keys() >= {f"model.{name}" for name in ("state", "head_dim", "expand", "conv", "directions")}
    assert told == {key: actual[key] for key in told} and actual["model.attention_every"] == model.attention_every
    assert actual["model.mlp_ratio"] == model.mlp_ratio


@pytest.mark.parametrize(
    "overrides, shown",
    [
        (["model=tread_mamba", "model.routes.0.select=token"], "'token'.*row, or model.allow_token_routes=true"),
        (["model=tread_mamba", "model.directions=3"], "model.directions is 3, but must be 1, 2 or 4"),
        (["model=tread_mamba", "model.attention_every=-1"], "model.attention_every is -1"),
        (["model=tread_mamba", "model.norm=rms"], "model.norm is 'rms', but mamba has no such choice"),
        (["model=tread", "model.state=32"], "model.state is 32, but dit has no such choice: model=mamba has it"),
        (["model=tread", "model.mlp_ratio=0"], "model.mlp_ratio is 0, but must be positive: the blocks of dit need"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(read_config, overrides, shown):
    with pytest.raises(ValueError, match=shown):
        read_config(*overrides)


# MaskDiT: by model=maskdit alone, whole or resumed, by one process or two, in both stages

MASKED = ["model.hidden_size=16", "model.num_heads=2", "model.depth=3"]
MASKED += ["model.decoder_hidden_size=8", "model.decoder_depth=1", "model.decoder_heads=2"]
FEW = [*MASKED, "model=maskdit", "every.evaluate=9", "every.sample=9"]


@pytest.mark.slow
def test_a_resumed_run_and_two_processes_equal_one_across_the_end_of_masking(tmp_path):
    """Two masked steps and two of all tokens: resumed behind the first, bit for bit; by two processes, which wait for
    each parameter's gradient, the mask token's too, also where they begin behind the masked steps."""
    options = [*FEW, "train.routes_until=2", "train.steps=4", "every.save=1"]
    results = tmp_path / "results"
    launch(tmp_path, *options, "name=one")
    shutil.copytree(results / "one/step_0000001", results / "parts/step_0000001")
    assert "goes on at step 1" in launch(tmp_path, *options, "name=parts")
    assert same(results / "one", results / "parts")
    launch_processes(tmp_path, *options, "name=two", "train.steps=3", processes=2)
    launch_processes(tmp_path, *options, "name=two", processes=2)
    expected, actual = ([r for r in records(results / name) if "loss" in r] for name in ("one", "two"))
    assert [record["step"] for record in actual] == [1, 2, 3, 4]
    for ours, theirs in zip(actual, expected):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    alone, two = (state(results / name) for name in ("one", "two"))
    for moment in ("exp_avg", "exp_avg_sq"):  # of all gradients there were
        for key in (key for key in alone if key.startswith(f"optimizer/{moment}/")):
            torch.testing.assert_close(two[key], alone[key], rtol=1e-3, atol=1e-6)


def test_without_a_route_the_loss_is_the_plain_one_of_all_tokens(tmp_path):
    """As with train.routes_until=0, bit for bit; a schedule of ratios is still refused."""
    text = launch(tmp_path, *FEW, "model.routes=[]", "train.steps=2", "name=none")
    assert "routes none" in " ".join(text.split()) and "reconstruction" not in text
    text = launch(tmp_path, *FEW, "train.routes_until=0", "train.steps=2", "name=until")
    assert "reconstruction" not in text
    assert same(tmp_path / "results/none", tmp_path / "results/until")


def test_what_a_file_of_theirs_may_be(read_config):
    """Elsewhere its settings are named. A null class that was trained could not be kept: no gradient reaches it."""
    cfg = read_config("model=maskdit", *MASKED)
    given = build_network(cfg).state_dict()
    theirs = StoredWeights("theirs.pt", None, given)
    assert theirs.fit(given).keys() == given.keys()
    given[LABELS] = given[LABELS].index_fill(0, torch.tensor(10), 0.1)
    dense = build_network(read_config("model=dit", *MASKED[:3])).state_dict()
    with pytest.raises(ValueError, match="fit it: model=maskdit model.decoder_hidden_size=8 model.decoder_depth=1$"):
        theirs.fit(dense)
    with pytest.raises(ValueError, match=f"null class of theirs.pt, the last row of {LABELS}, is not zero"):
        theirs.fit(build_network(cfg).state_dict())


def test_a_run_trains_resumes_is_sampled_exported_in_their_names_and_imported_again(tmp_path):
    """By model=maskdit alone; the file is read as theirs: prefix model., labels as a matrix (D, classes)."""
    printed = launch(tmp_path, "model=maskdit", *MASKED, "name=run")
    assert "maskdit" in printed and "r(0→2) keeps" in printed and "0.1 of a masked reconstruction" in printed
    given = checkpoint.find(tmp_path / "results/run").tensors("ema")
    assert not given[LABELS][-1].any() and given[LABELS][:-1].all()  # six steps of Adam on the other rows
    exported = ("checkpoint=results/run", "out=given", "public=true")
    launch_door(export_checkpoint.main, "export_checkpoint", tmp_path, *exported)
    public = load_file(tmp_path / "given/ema-public.safetensors")
    assert torch.equal(public[f"model.{LABELS}"], given[LABELS][:-1].T)
    assert public.keys() == {f"model.{name}" for name in given}
    assert checkpoint.find(tmp_path / "given").tensors("ema").keys() == given.keys()
    for other in (given | {LABELS: torch.ones(11, 16)}, {LABELS: torch.zeros(11, 64)}):
        with pytest.raises(ValueError, match="null class.* is not zero|public=true is for MaskDiT"):
            public_names(other)
    torch.save({"ema": public}, tmp_path / "theirs.pt")
    launch_door(import_checkpoint.main, "import_checkpoint", tmp_path, "weights=theirs.pt", "model=maskdit", *MASKED,
                "name=back")  # fmt: skip
    back = checkpoint.find(tmp_path / "results/back").tensors("ema")
    assert equal(given, back)
    few = ("checkpoint=results/run", "steps=2", "classes=[1]", "seeds=0", "out=drawn.png")
    take_samples(tmp_path, *few, "guidance=cfg", "guidance.scale=1.5")
    with pytest.raises(SystemExit, match="MaskDiT, which sees mask tokens in their places"):
        take_samples(tmp_path, *few, "guidance=sparse", "guidance.force=true")
    conftest.assert_refused(
        partial(launch, tmp_path, "model=maskdit", *MASKED, "name=other"),
        ("model.routes.0.start=1", "one route, start 0, end -1, fp32 off"),
        ("model.decoder_heads=3", "decoder_hidden_size 8 is not a multiple of 4 and of 3 heads"),
    )


def test_a_decoder_left_to_the_encoder_is_the_published_one_or_a_small_one(tmp_path, composed):
    """Below hidden_size 384 half the width, two blocks and the encoder's heads; a run records and keeps the numbers."""
    names = ("decoder_hidden_size", "decoder_depth", "decoder_heads")

    def decoder(*overrides):
        cfg, config = complete(composed("model=maskdit", *overrides))
        sizes = tuple(getattr(cfg.model, name) for name in names)
        assert sizes == tuple(config["model"][name] for name in names)
        return sizes

    assert decoder("model.hidden_size=384", "model.num_heads=6") == (512, 8, 16)
    assert decoder("model.hidden_size=180", "model.num_heads=6")[0] == 84  # of 90 what 4 and 6 divide
    assert decoder() == (48, 2, 4) and decoder("model.decoder_depth=3") == (48, 3, 4)
    small = build_network(complete(composed("model=maskdit"))[0])  # on the quickstart's digits
    assert conftest.size_of(small) < 2e6
    assert MaskDiTOptions.decoder_hidden_size == 512  # what a record without it means
    few = [*MASKED[:3], "model=maskdit", "name=run"]
    launch(tmp_path, *few, "train.steps=1")
    assert state(tmp_path / "results/run")["model/decoder_blocks.1.mlp.fc1.weight"].shape == (32, 8)
    again = launch(tmp_path, *few, "train.steps=2")
    assert "goes on at step 1" in again and "stay" not in again


def test_the_unmasking_stage_is_the_papers(read_config):
    """No token dropped, lr 5e-5, full precision, 100K steps of batch 1024, from the masked run's weights."""
    cfg = read_config("experiment=imagenet256_xl2_maskdit_unmask")
    assert active_routes(cfg, 0) == () and cfg.model.masks and cfg.train.precision == "fp32"
    assert (cfg.optim.lr, cfg.train.steps, cfg.train.batch_size) == (5e-5, 100_000, 1024)
    masked = read_config("experiment=imagenet256_xl2", "model=maskdit")
    assert cfg.init_from == f"{masked.results}/{masked.name}/latest" and cfg.model == masked.model
    assert (masked.train.loss_tokens, masked.train.reconstruction) == ("kept", 0.1)
