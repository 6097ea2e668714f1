"""What weights meant where they were trained, by their own record: each thing that shapes hide, changed alone."""

import shutil
from dataclasses import asdict, dataclass, replace

import import_checkpoint
import pytest
import torch
from conftest import launch_door, opened
from safetensors.torch import save_file

from tread.checkpoints import checkpoint
from tread.checkpoints.for_sampling import meaning
from tread.checkpoints.network import build_network, read_network
from tread.checkpoints.run_log import differences
from tread.checkpoints.weights import load_weights, read_weights, usual_heads
from tread.models.architectures import ARCHITECTURES, DiTOptions
from tread.preparing import digits
from tread.training.run_folder import migrate

SIZES = ["model.hidden_size=16", "model.depth=2", "model.num_heads=2", "model=dit"]
LATENTS = replace(digits.MEANING, classes=tuple("abcdefghij"))
KNOWN = replace(LATENTS, autoencoder="here", fingerprint="abc")


@pytest.fixture
def cfg(composed):
    """A function from overrides to the settings of a network with SIZES."""
    return lambda *overrides: read_network(composed(*SIZES, *overrides))


@pytest.fixture
def saved(tmp_path, composed, cfg):
    """A function from what info.json is to hold otherwise to the folder of a checkpoint at step 4."""

    def save(**more):
        config = composed(*SIZES, *more.pop("overrides", ()))
        state = build_network(cfg()).state_dict()
        info = {"config": config, "latents": asdict(LATENTS), "versions": {}} | more
        return checkpoint.save(tmp_path / "run", 4, {"ema": state, "model": state}, info)

    return save


def test_heads_are_compared_wherever_the_record_lies(saved, cfg, tmp_path):
    """Two heads' weights have the shapes of four heads': the run's folder, a file in it, and a link to that file. With
    the other settings that differ, all at once."""
    folder, four, deeper = saved(), cfg("model.num_heads=4"), cfg("model.num_heads=4", "model.depth=3")
    (tmp_path / "link.safetensors").symlink_to(folder / "ema.safetensors")
    places = (folder, tmp_path / "run", folder / "model.safetensors", tmp_path / "link.safetensors")
    for path in places:
        with pytest.raises(ValueError, match="model.num_heads 2 instead of 4(?s:.*)that fit it: model.num_heads=2$"):
            load_weights(build_network(four), str(path), model=four.model)
        load_weights(build_network(cfg()), str(path), model=cfg().model)
    with pytest.raises(ValueError, match="fit it: model.depth=2 model.num_heads=2$"):
        load_weights(build_network(deeper), str(folder), model=deeper.model)
    with pytest.raises(SystemExit, match="model.num_heads 2 instead of 4"):
        options = (f"weights={folder}/ema.safetensors", "autoencoder=pixels", "scale=1.0", "name=mine")
        launch_door(import_checkpoint.main, "import_checkpoint", tmp_path, *options, *SIZES, "model.num_heads=4")
    assert not (tmp_path / "results").exists()


def test_a_text_encoder_is_known_by_its_hash_wherever_it_lies(composed, tmp_path):
    places, cfgs = (("/old/t5", "abc"), ("/new/t5", "abc"), ("/new/t5", "def")), []
    for i, (encoder, digest) in enumerate(places):
        text = (f"text.encoder={encoder}", f"text.fingerprint={digest}", "text.tokens=4", "text.width=8")
        config = composed(*SIZES[:3], "model=dit_text", *text)
        cfgs.append(read_network(config))
        info = {"config": config, "latents": asdict(LATENTS), "versions": {}}
        checkpoint.save(tmp_path / f"{i}", 4, {"ema": build_network(cfgs[-1]).state_dict()}, info)
    first, moved, other = (meaning(opened(tmp_path / f"{i}")) for i in range(3))
    assert first == moved != other
    load_weights(build_network(cfgs[1]), str(tmp_path / "0"), model=cfgs[1].model, text=cfgs[1].text)
    with pytest.raises(ValueError, match="text.encoder /old/t5 instead of /new/t5, text.fingerprint abc"):
        load_weights(build_network(cfgs[2]), str(tmp_path / "0"), model=cfgs[2].model, text=cfgs[2].text)


def test_every_setting_of_a_network_is_compared(saved, cfg, monkeypatch):
    """Also those that an architecture will have: one that the record is too old to know has its default."""
    common = {"architecture", "hidden_size", "depth", "patch_size", "mlp_ratio", "learn_sigma", "position_scale"}
    lightning = {"norm", "mlp", "positions", "qk_norm", "bottleneck", "value_residual"}  # of DiT too, which has one
    decoder = {"decoder_hidden_size", "decoder_depth", "decoder_heads"}
    scans = {"state", "head_dim", "expand", "conv", "directions", "attention_every"}
    for model, names in {
        "dit": {"num_heads", "class_token"} | lightning,
        "lightning": {"num_heads", "class_token"} | lightning,
        "sprint": {"num_heads"} | lightning,
        "maskdit": {"num_heads"} | lightning | decoder,
        "rwkv": set(),
        "mamba": scans,
    }.items():
        assert set(cfg(f"model={model}", "model.depth=5").model.decisive) == {f"model.{n}" for n in common | names}
    hybrid = cfg("model=mamba", "model.attention_every=2").model
    assert set(hybrid.decisive) == {f"model.{name}" for name in common | scans | {"num_heads"}}

    @dataclass(frozen=True)
    class Coming(DiTOptions):
        coming: str = "layer"

        def arguments(self):
            return {name: value for name, value in super().arguments().items() if name != "coming"}

    monkeypatch.setitem(ARCHITECTURES, "dit", Coming)
    folder, network = saved(), build_network(cfg())
    load_weights(network, str(folder), model=cfg().model)
    with pytest.raises(ValueError, match="model.coming layer instead of rms"):
        load_weights(network, str(folder), model=replace(cfg().model, coming="rms"))


FLAT = {  # what main recorded of every architecture before each had its own options
    "norm": "layer", "mlp": "gelu", "positions": "sincos", "qk_norm": False, "decoder_hidden_size": 512,
    "decoder_depth": 8, "decoder_heads": 16, "state": 64, "head_dim": 64, "expand": 2, "conv": 4, "directions": 2,
    "attention_every": 0, "kernel": "torch", "allow_token_routes": False,
}  # fmt: skip


@pytest.mark.parametrize("model", ["dit", "lightning", "mamba", "maskdit", "rwkv", "sprint"])
def test_records_with_the_options_of_all_architectures_open(composed, model):
    """And are the same run's as today's: others' options at their defaults are left out, at other values refused."""
    config = composed(*SIZES, f"model={model}", "model.depth=5")
    flat = {**config, "model": {"num_heads": 2, **FLAT, **config["model"]}}
    assert read_network(flat) == read_network(config)
    assert differences(migrate(flat), migrate(config)) == {}
    assert migrate(flat)["model"].keys() == vars(read_network(config).model).keys()
    for key in FLAT:
        if key not in vars(read_network(config).model):
            other = {**flat, "model": flat["model"] | {key: "other"}}
            with pytest.raises(ValueError, match=f"model.{key} is 'other', but {model} has no such choice: model="):
                read_network(other)
            with pytest.raises(ValueError, match=f"model.{key} is 'other'"):
                migrate(other)


RF = ("objective=rf",)


@pytest.mark.parametrize(
    "record, overrides, latents, shown",
    [
        ({}, (), {}, []),
        ({"overrides": RF}, RF, {}, []),
        ({}, RF, {}, ["objective was edm", "is rf"]),
        ({"overrides": RF}, (*RF, "rf.reverse=true"), {}, ["rf.reverse was False", "is True"]),
        ({"overrides": RF}, (*RF, "rf.time_scale=1000"), {}, ["rf.time_scale was 1.0", "is 1000.0"]),
        ({}, ("edm.sigma_data=1.0",), {}, ["edm.sigma_data was 0.5", "is 1.0"]),
        ({}, ("edm.P_mean=0.0", "edm.sigma_max=60.0", "rf.reverse=true"), {}, []),
        ({"predicts": "noise"}, (), {}, ["was noise on timesteps 0..999", "is what objective=edm trains"]),
        ({}, (), {"scale": 0.5}, ["latents.scale was 1.0", "is 0.5"]),
        ({}, (), {"shift": 0.1}, ["latents.shift was 0.0", "is 0.1"]),
        ({}, (), {"channel_shift": (1.0,), "channel_scale": (2.0,)}, ["channel_shift was ()", "channel_scale was ()"]),
        ({}, (), {"autoencoder": "other"}, ["latents.autoencoder was pixels", "is other"]),
        ({"latents": asdict(KNOWN)}, (), {"autoencoder": "there", "fingerprint": "abc"}, []),  # one in two places
        ({"latents": asdict(KNOWN)}, (), {"fingerprint": "abd"}, ["latents.autoencoder was here"]),
        ({}, (), {"classes": tuple("abdcefghij")}, ["class 2 (the first of 2 that differ) was 'c'", "is 'd'"]),
        ({"latents": asdict(digits.MEANING)}, (), {}, ["records no class names: its class 0 is taken for 'a'"]),
        ({}, (), {"classes": digits.MEANING.classes}, ["classes are numbers here: class 'a' of ", " is taken for '0'"]),
    ],
)
def test_what_a_run_may_mean_otherwise_is_said_with_both_values(saved, cfg, record, overrides, latents, shown):
    lines = read_weights(saved(**record)).warnings(cfg(*overrides), replace(LATENTS, **latents))
    assert bool(lines) == bool(shown) and len(lines) <= 2
    assert all(part in "\n".join(lines) for part in shown)


def test_where_weights_came_from(saved, tmp_path):
    folder = saved()
    assert read_weights(folder).describe() == f"averaged (ema) of {folder.resolve()}/ema.safetensors, step 4"
    raw = read_weights(folder / "model.safetensors")  # a file is what it is, whatever init_weights says
    assert raw.describe() == f"raw (model) of {folder}/model.safetensors, step 4"
    shutil.copy(folder / "ema.safetensors", tmp_path / "bare.safetensors")
    (tmp_path / "info.json").write_text('{"made by": "somebody else"}')
    assert "which is not recorded" in read_weights(tmp_path / "bare.safetensors").describe()
    torch.save({"model": raw.state}, tmp_path / "raw.pt")
    assert read_weights(tmp_path / "raw.pt", "model").describe().startswith("raw (model) of")


def test_a_file_without_a_record_says_what_can_not_be_known(cfg, tmp_path):
    settings = cfg("model.hidden_size=64")
    save_file(build_network(settings).state_dict(), tmp_path / "a.safetensors")
    actual = load_weights(build_network(settings), str(tmp_path / "a.safetensors"), model=settings.model)
    unknown, heads = actual.warnings(settings, LATENTS)
    assert "no record" in unknown and "scale" in unknown and "classes" in unknown
    assert "model.num_heads=2, model.positions=sincos, objective=edm, edm.sigma_data=0.5," in unknown
    assert heads == "model.num_heads is 2, but networks of hidden_size 64 usually have 1"
    assert len(actual.warnings(cfg("model.hidden_size=64", "model.num_heads=1"), LATENTS)) == 1


def test_the_usual_heads_are_the_published():
    """Those of public DiT-S, B, L and XL (Peebles & Xie, Table 1), and 64 channels a head elsewhere."""
    assert [usual_heads(width) for width in (384, 768, 1024, 1152, 512, 16)] == [6, 12, 16, 16, 8, None]
