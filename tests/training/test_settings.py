"""configs/ and what it means: everything composes, everything is read, nothing unknown passes."""

from __future__ import annotations

import ast
import re
import shutil
from dataclasses import replace

import pytest
import torch
import yaml
from conftest import ROOT
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from rf import RF
from routing_module import Route
from tread.checkpoints.network import TextSettings, build_network, process_of, read_network
from tread.diffusion.edm import EDM
from tread.routing.ids import choose_ids
from tread.runtime import schema
from tread.training import settings
from tread.training.optimizers import OPTIMIZERS

EXPERIMENTS = sorted(path.stem for path in (ROOT / "configs" / "experiment").glob("*.yaml"))
DATASETS = sorted(path.stem for path in (ROOT / "configs" / "dataset").glob("*.yaml"))
SHAPE = ["dataset.path=data", "dataset.channels=4", "dataset.size=16", "dataset.num_classes=3"]
MODELS = sorted(path.stem for path in (ROOT / "configs" / "model").glob("*.yaml"))
PAPER = {  # experiment → hidden size, depth, heads, end of the route (TREAD, Table S8)
    "imagenet256_s2": (384, 12, 6, 8),
    "imagenet256_b2": (768, 12, 12, 8),
    "imagenet256_l2": (1024, 24, 16, 20),
    "imagenet256_xl2": (1152, 28, 16, 24),
}


CHOSEN = [f"dataset={name}" for name in DATASETS] + [f"experiment={name}" for name in EXPERIMENTS]
WITH_ALL = ["dataset=digits", "dataset=folder", *(f"experiment={name}" for name in PAPER)]  # models; others with some
WITH_TEXT = ("dataset=folder", "experiment=imagenet256_b2")


@pytest.mark.parametrize(
    ("chosen", "model"),
    [
        (one, model)
        for one in CHOSEN
        for model in (MODELS if one in WITH_ALL else ("dit", "tread", "maskdit", "sprint"))
        if "text" not in model or one in WITH_TEXT
    ],
)
def test_every_config_composes_and_builds(read_config, chosen, model):
    of_any_shape = ("dataset=folder", "experiment=small", "experiment=tiny")
    encoder = ["text.encoder=clip"] if "text" in model else []
    cfg = read_config(chosen, f"model={model}", *encoder, *(SHAPE if chosen in of_any_shape else ()))
    text = TextSettings("clip", tokens=77, width=768)  # as a dataset says it
    few = replace(cfg, model=replace(cfg.model, depth=6), text=text)  # blocks are alike
    with torch.device("meta"):
        network = build_network(few)
    noise = torch.zeros(2, dtype=torch.float32, device="meta")
    x = torch.zeros(2, cfg.dataset.channels, cfg.dataset.size, cfg.dataset.size, device="meta")
    noise_of_tokens = torch.zeros(2, network.num_tokens, device="meta")
    routes = [(route, choose_ids(route, noise_of_tokens, network.grid)) for route in cfg.model.routes]
    y = network.null(2) if cfg.model.takes_text else noise.long()
    assert network(x, noise, y, routes=routes).shape == x.shape
    without = ("dit", "lightning", "mamba", "rwkv", "dit_text", "lightning_text")
    assert (model not in without) == bool(cfg.model.routes)


@pytest.mark.parametrize("experiment", PAPER)
def test_experiments_are_the_papers(read_config, experiment):
    cfg = read_config(f"experiment={experiment}", "model=tread")
    hidden, depth, heads, end = PAPER[experiment]
    assert (cfg.model.hidden_size, cfg.model.depth, cfg.model.num_heads, cfg.model.patch_size) == (
        hidden,
        depth,
        heads,
        2,
    )
    assert [r.resolve(depth) for r in cfg.model.routes] == [Route(2, end, 0.5).resolve(depth)]
    assert (cfg.train.batch_size, cfg.train.steps, cfg.train.label_drop) == (256, 400_000, 0.1)
    assert (cfg.optim.lr, cfg.optim.betas, cfg.optim.weight_decay) == (1e-4, (0.9, 0.999), 0.0)
    assert (cfg.ema.decay, cfg.ema.warmup) == (0.9999, False)
    assert cfg.name == f"{experiment}-tread"
    edm = cfg.edm
    assert (edm.P_mean, edm.P_std, edm.sigma_data, edm.rho) == (-1.2, 1.2, 0.5, 7.0)
    assert (edm.sigma_min, edm.sigma_max, cfg.sampling.steps, edm.default_steps) == (0.002, 80.0, None, 40)
    assert process_of(cfg) is edm


@pytest.mark.parametrize("experiment", PAPER)
def test_sit_has_the_papers_sizes_and_another_objective(read_config, experiment):
    """SiT (arXiv 2401.08740) trains DiT's networks by DiT's recipe: batch 256, lr 1e-4, EMA 0.9999, label drop 0.1."""
    edm, sit = (
        read_config(f"experiment={name}", "model=tread") for name in (experiment, experiment.replace("imagenet", "sit"))
    )
    assert (edm.model, edm.train, edm.optim, edm.ema) == (sit.model, sit.train, sit.optim, sit.ema)
    assert process_of(sit) is sit.rf and sit.rf == RF() and (sit.rf.default_steps, sit.objective) == (50, "rf")
    assert sit.name == f"{experiment}-tread-rf"


def test_the_default_name_tells_rectified_flow(read_config):
    assert read_config("model=dit").name == "digits-dit" and read_config("objective=rf").name == "digits-tread-rf"
    assert read_config("objective=rf", "name=digits-tread").name == "digits-tread"


def test_the_objective_says_which_process(composed):
    assert process_of(read_network(composed())) == EDM()
    assert process_of(read_network(composed("objective=rf", "rf.time_scale=1000"))) == RF(time_scale=1000)


@pytest.mark.parametrize("objective", ["edm", "rf"])
def test_coco_states_what_it_costs(read_config, objective):
    """Three forward passes' FLOPs an image, as the network counts them with CLIP ViT-L/14's text."""
    head = (ROOT / "configs" / "experiment" / "coco256_b2.yaml").read_text()
    stated = re.search(r"(\d+) EFLOP with the route, (\d+) without; (\d+) h and (\d+) h of one", head).groups()
    found = []
    for model in ("tread_text", "dit_text"):
        cfg = read_config("experiment=coco256_b2", f"model={model}", f"objective={objective}")
        assert (cfg.train.batch_size, cfg.train.steps, cfg.train.label_drop) == (256, 400_000, 0.1)
        assert (cfg.model.hidden_size, cfg.model.depth, cfg.model.num_heads, cfg.model.patch_size) == (768, 12, 12, 2)
        assert cfg.name == f"coco256_b2-{model}{'-rf' * (objective == 'rf')}" and cfg.text.encoder == "clip-l"
        assert [r.resolve(12) for r in cfg.model.routes] == [Route(2, 8, 0.5).resolve(12)] * (model == "tread_text")
        with_text = replace(cfg, text=replace(cfg.text, tokens=77, width=768, pooled=768))
        with torch.device("meta"):
            network = build_network(with_text)
        found.append(3 * network.forward_flops(cfg.model.routes) * cfg.train.batch_size * cfg.train.steps)
    assert [f"{flops / 1e18:.0f}" for flops in found] == list(stated[:2])
    assert [f"{flops / (0.4 * 989e12 * 3600):.0f}" for flops in found] == list(stated[2:])


def test_finetuning_stage(read_config):
    cfg = read_config("experiment=imagenet256_xl2_finetune")
    assert cfg.model.routes == () and cfg.train.batch_size == 1024 and cfg.optim.lr == 1e-5
    assert cfg.init_from == f"{cfg.results}/{read_config('experiment=imagenet256_xl2', 'model=tread').name}/latest"


def test_a_dataset_alone_brings_its_recipe(read_config):
    alone, experiment = read_config("dataset=imagenet256"), read_config("experiment=imagenet256_b2")
    for section in ("model", "dataset", "train", "optim", "ema", "every", "eval"):
        assert getattr(alone, section) == getattr(experiment, section)


def test_the_default_is_the_digits_run_with_the_papers_rule(read_config):
    cfg = read_config()
    assert cfg.dataset.embedded == "digits" and cfg.model.name == "tread" and cfg.tracker == "none"
    assert [r.resolve(cfg.model.depth) for r in cfg.model.routes] == [
        Route.for_depth(cfg.model.depth).resolve(cfg.model.depth)
    ]


def test_the_command_line_wins(read_config):
    cfg = read_config(
        "experiment=imagenet256_b2", "model=tread", "train.batch_size=64", "model.routes.0.selection_ratio=0.7"
    )
    assert cfg.train.batch_size == 64 and cfg.model.routes[0].selection_ratio == 0.7


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("train.btach_size=3", "train.batch_size"),
        ("+train.batchsize=3", "train.batch_size"),
        ("batch_size=3", "train.batch_size"),
        ("modle=dit", "model"),
        ("expriment=imagenet256_b2", "experiment"),
        ("model.routes.0.ratio=0.5", "model.routes.*.selection_ratio"),
        ("sampling.step=3", "sampling.steps"),
        ("lr=1", "optim.lr"),
    ],
)
def test_a_misspelt_override_names_the_nearest_key(override, nearest):
    with pytest.raises(ValueError, match=re.escape(repr(nearest))):
        schema.check_overrides(["model=dit", override], [*settings.known_keys(), "experiment"])


def test_good_overrides_pass():
    good = [
        "model=dit",
        "experiment=x",
        "++train.steps=3",
        "~optim.eps=1",
        "model.routes.0.end=7",
        "hydra.verbose=true",
        "-m",
    ]
    assert schema.check_overrides(good, [*settings.known_keys(), "experiment"]) is None


@pytest.mark.parametrize(
    ("path", "value", "shown"),
    [
        ("train.batchsize", 3, "'train.batchsize'.*'train.batch_size'"),
        ("trian", {}, "'trian'.*'train'"),
        ("train.steps", "many", "train.steps is 'many', but must be int"),
        ("train.steps", 1.5, "train.steps is 1.5"),
        ("train.steps", True, "train.steps is True"),
        ("train.steps", 0, "train.steps is 0, but must be positive"),
        ("train.precision", "fp16", "train.precision is 'fp16'.*fp16 is refused: without loss scaling"),
        ("train.precision", "int8", "int8.*auto, fp32 or bf16"),
        ("train.label_drop", 1.5, "1.5.*\\[0, 1\\]"),
        ("train", 3, "train is 3"),
        ("model.num_heads", 0, "model.num_heads is 0"),
        ("ema.decay", 1.0, "ema.decay is 1.0"),
        ("eval.points", 0, "eval.points is 0"),
        ("eval.demo_samples", 1, "demo_samples is 1, but must be 0"),
        ("model.architecture", "unet", "unet"),
        ("model.routes", [{"start": 2, "end": 99}], "99.*8 blocks"),
        ("model.routes", [{"start": 2}], "model.routes.0.end"),
        ("model.routes", [{"start": 2, "end": 4, "rejoin": 3}], "rejoin 3 lies behind route start 2"),
        (
            "model.routes",
            [{"start": 2, "end": 4, "rejoin": 0.5}],
            "model.routes.0.rejoin is 0.5, but must be int, str or null",
        ),
        ("model.routes", [{"start": 2, "end": 4, "selection_ratio": 1}], "1.0.*\\[0, 1\\)"),
        ("optim.betas", [0.9], "betas"),
        ("optim.betas", [0.9, 1.0], "betas.1 is 1.0"),
        ("ema.power", [0.1, 0.3], "ema.power.1 is 0.3, but must lie between 0 and 0.288"),
        ("ema.warmup", 1, "ema.warmup is 1, but must be true or false"),
        ("resume", "maybe", "maybe.*auto"),
        ("name", "a/b", "a/b"),
        ("dataset.embedded", None, "demo_samples is 1000"),
        ("dataset.embedded", "cifar", "cifar.*digits"),
        ("edm.sigma_data", -1, "sigma_data is -1"),
        ("sampling.steps", 1, "steps is 1, but EDM"),
        ("sampling.solver", "dopri5", "dopri5.*heun, euler"),
        ("objective", "ddpm", "ddpm.*edm or rf"),
        ("rf.time", "cosine", "cosine.*logit_normal or uniform"),
    ],
)
def test_bad_values_are_refused_by_name(composed, path, value, shown):
    tree = composed()
    node, parts = tree, path.split(".")
    for part in parts[:-1]:
        node = node[part]
    node[parts[-1]] = value
    with pytest.raises(ValueError, match=shown):
        settings.read(tree)


def test_a_missing_key_is_named(composed):
    tree = composed()
    del tree["optim"]["lr"]
    with pytest.raises(ValueError, match="missing settings: optim.lr"):
        settings.read(tree)


def chains(path):
    """All attribute chains of a file as dotted text, e.g. run.cfg.train.steps."""
    return {ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}


def test_every_key_is_read_somewhere():
    files = {path for path in (*ROOT.glob("*.py"), *(ROOT / "tread").rglob("*.py")) if path.name != "settings.py"}
    used = set().union(*map(chains, files))
    used |= {f"optim.{name}" for entry in OPTIMIZERS.values() for name in entry.shared}
    used |= set(re.findall(r"\$\{([a-z.]+)\}", (ROOT / "configs" / "defaults.yaml").read_text()))
    whole = (
        "edm",
        "rf",
        "model",  # whose options are arguments of its network
        "train.ratio_schedule",
        "tags",
        "alignment",
        "text",
    )  # read as objects of their own
    for key in {*settings.known_keys()} - {"plugins"}:  # which schema.read imports
        if key.startswith(tuple(f"{name}." for name in whole)) or any(
            k.startswith(key + ".") for k in settings.known_keys()
        ):
            continue
        section, _, name = key.rpartition(".")
        ends = (f".{key}", f"options.{name}") if section == "eval" else (f".{key}",)
        assert any(f".{chain}".endswith(ends) for chain in used), f"no file reads {key}"


def commented_keys() -> dict[str, str]:
    """The keys that config.yaml holds commented out, dotted → the value that stands there."""
    found, section = {}, ""
    for line in (ROOT / "configs" / "config.yaml").read_text().partition("# Below are")[2].splitlines():
        if match := re.fullmatch(r"# (\w+):", line):
            section = match[1] + "."
        elif match := re.match(r"#( {1,3})(\w+): (\S+)", line):
            found[(section if len(match[1]) == 3 else "") + match[2]] = match[3]
    return found


def test_what_groups_set_stands_commented_out_in_config_yaml_with_its_default(composed):
    """Reference: the groups' files, as YAML. What they set and config.yaml does not show, people would not find."""
    shown, defaults = commented_keys(), OmegaConf.load(ROOT / "configs" / "defaults.yaml")
    for path in (ROOT / "configs").glob("*/*.yaml"):
        if path.parent.name in ("dataset", "experiment"):
            for key, value in OmegaConf.to_container(OmegaConf.load(path), resolve=False).items():
                keys = [f"{key}.{name}" for name in value] if isinstance(value, dict) else [key]
                own = ("defaults", "dataset.")  # a dataset's own facts: only path and heldout are for people to set
                assert not {name for name in keys if not name.startswith(own)} - shown.keys(), path
    assert {"dataset.path", "dataset.heldout", "model.routes", "name"} <= shown.keys()
    for key in shown.keys() - {"name", "model.routes", "dataset.path", "dataset.heldout"}:
        assert yaml.safe_load(shown[key]) == OmegaConf.select(defaults, key), key


@pytest.mark.parametrize("key", sorted(commented_keys()))
def test_an_uncommented_key_wins_over_the_groups_and_the_command_line_over_it(tmp_path, key):
    other = {"name": "mine", "objective": "rf", "init_from": "a.pt", "model.routes": [], "dataset.path": "mine"}
    other |= {"dataset.heldout": "mine", "ema.warmup": False}
    written = other.get(key, 7)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    tree = OmegaConf.create({})
    OmegaConf.update(tree, key, written)
    config = tmp_path / "configs" / "config.yaml"
    config.write_text(config.read_text() + "\n" + OmegaConf.to_yaml(tree))
    for overrides in ((), ("experiment=imagenet256_xl2_finetune",)):
        with initialize_config_dir(version_base="1.3", config_dir=str(tmp_path / "configs")):
            found = compose("config", overrides=list(overrides))
            assert OmegaConf.select(found, key) == written
            found = compose("config", overrides=[*overrides, f"{key}=null"])
            assert OmegaConf.select(found, key) is None


def test_a_models_file_may_set_keys_outside_model(tmp_path):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    text = (ROOT / "configs" / "model" / "tread.yaml").read_text()
    (tmp_path / "configs" / "model" / "mine.yaml").write_text(text + "\ntrain:\n  loss_tokens: kept\n")
    with initialize_config_dir(version_base="1.3", config_dir=str(tmp_path / "configs")):
        assert compose("config", overrides=["model=mine"]).train.loss_tokens == "kept"
        assert compose("config", overrides=["model=mine", "train.loss_tokens=all"]).train.loss_tokens == "all"


@pytest.mark.parametrize("name", ["config", "defaults"])
def test_every_line_is_commented(name):
    lines = (ROOT / "configs" / f"{name}.yaml").read_text().partition("\nhydra:")[0].splitlines()
    assert [line for line in lines if line.strip() and "#" not in line] == []
