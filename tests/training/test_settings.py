"""configs/ and what it means: everything composes, everything is read, nothing unknown passes."""

import ast
import re
import shutil
from dataclasses import replace

import pytest
import torch
import yaml
from conftest import CPU, ROOT, size_of
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from rf import RF
from routing_module import Route
from tread.checkpoints.network import TextSettings, build_network, process_of
from tread.routing.ids import choose_ids
from tread.runtime import schema
from tread.training import costs, settings
from tread.training.optimizers import OPTIMIZERS
from tread.training.start import check_memory, settings_warnings

EXPERIMENTS = sorted(path.stem for path in (ROOT / "configs/experiment").glob("*.yaml"))
DATASETS = sorted(path.stem for path in (ROOT / "configs/dataset").glob("*.yaml"))
SHAPE = ["dataset.path=data", "dataset.channels=4", "dataset.size=16", "dataset.num_classes=3"]
MODELS = sorted(path.stem for path in (ROOT / "configs/model").glob("*.yaml"))
SCHEDULE = "train.ratio_schedule={start: 0.9, end: 0.5, last: 9}"
PAPER = {  # experiment → hidden size, depth, heads, end of the route (TREAD, Table S8)
    "imagenet256_s2": (384, 12, 6, 8),
    "imagenet256_b2": (768, 12, 12, 8),
    "imagenet256_l2": (1024, 24, 16, 20),
    "imagenet256_xl2": (1152, 28, 16, 24),
}


CHOSEN = [f"dataset={name}" for name in DATASETS] + [f"experiment={name}" for name in EXPERIMENTS]
OWN_MODEL = {"experiment=ladder256_b1": "sprint", "experiment=prx1024": "tread_lightning_text"}
OF_ALL_MODELS = "dataset=folder"  # of any shape, with labels or captions; models and datasets choose alone


@pytest.mark.parametrize(
    "chosen, model",
    [
        (this, model)
        for this in CHOSEN
        for model in (MODELS if this == OF_ALL_MODELS else [OWN_MODEL.get(this, "tread")])
    ],
)
def test_every_config_composes_and_builds(read_config, chosen, model):
    of_any_shape = ("dataset=folder", "experiment=small", "experiment=tiny", "experiment=finetune_own")
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
    assert network(x, noise, y, routes=routes)[:, : x.shape[1]].shape == x.shape
    without = ("dit", "lightning", "mamba", "rwkv", "dit_text", "lightning_text")
    assert (model not in without) == bool(cfg.model.routes)


@pytest.mark.parametrize("experiment", PAPER)
def test_experiments_are_the_papers(read_config, experiment):
    """And SiT's (arXiv 2401.08740) are DiT's networks by DiT's recipe, with another objective."""
    cfg = read_config(f"experiment={experiment}", "model=tread")
    hidden, depth, heads, end = PAPER[experiment]
    model, edm = cfg.model, cfg.edm
    assert (model.hidden_size, model.depth, model.num_heads, model.patch_size) == (hidden, depth, heads, 2)
    assert [r.resolve(depth) for r in model.routes] == [Route(2, end, 0.5).resolve(depth)]
    assert (cfg.train.batch_size, cfg.train.steps, cfg.train.label_drop) == (256, 400_000, 0.1)
    assert (cfg.optim.lr, cfg.optim.betas, cfg.optim.weight_decay) == (1e-4, (0.9, 0.999), 0.0)
    assert (cfg.ema.decay, cfg.ema.warmup) == (0.9999, False)
    assert cfg.name == f"{experiment}-tread" and process_of(cfg) is edm
    assert (edm.P_mean, edm.P_std, edm.sigma_data, edm.rho) == (-1.2, 1.2, 0.5, 7.0)
    assert (edm.sigma_min, edm.sigma_max, cfg.sampling.steps, edm.default_steps) == (0.002, 80.0, None, 40)
    sit = read_config(f"experiment={experiment.replace('imagenet', 'sit')}", "model=tread")
    assert (model, cfg.train, cfg.optim, cfg.ema) == (sit.model, sit.train, sit.optim, sit.ema)
    assert process_of(sit) is sit.rf and sit.rf == RF() and (sit.rf.default_steps, sit.objective) == (50, "rf")
    assert sit.name == f"{experiment}-tread-rf"


@pytest.mark.parametrize("size, unit, share", [("s2", 1e18, 0.19), ("b2", 1e18, 0.31), ("small", 1e15, None)])
def test_cifar10_states_what_it_costs(read_config, size, unit, share):
    """And is flipped, with power EMAs, at the paper's 256 tokens; the small one at 64."""
    head = (ROOT / f"configs/experiment/cifar10_{size}.yaml").read_text()
    stated = re.search(r"([\d.]+) [EP]FLOP with the route, ([\d.]+) without; ([\d.]+) h and ([\d.]+) h", head).groups()
    million = float(re.search(r"([\d.]+) M parameters", head)[1])
    for model, flops, hours in zip(("tread", "dit"), stated[:2], stated[2:]):
        cfg = read_config(f"experiment=cifar10_{size}", f"model={model}")
        assert cfg.dataset.flip and cfg.ema.power == (0.05, 0.1) and cfg.name == f"cifar10_{size}-{model}"
        assert (cfg.dataset.path, cfg.dataset.heldout) == ("data/cifar10", "data/cifar10-heldout")
        with torch.device("meta"):
            network = build_network(cfg)
        assert network.num_tokens == (64 if size == "small" else 256)
        assert sum(parameter.numel() for parameter in network.parameters()) == pytest.approx(million * 1e6, rel=0.02)
        actual = 3 * network.forward_flops(cfg.model.routes) * cfg.train.batch_size * cfg.train.steps
        assert f"{actual / unit:.1f}" == flops
        assert share is None or actual / (share * 989e12 * 3600) == pytest.approx(float(hours), rel=0.04)


@pytest.mark.parametrize("objective", ["edm", "rf"])
def test_coco_states_what_it_costs(read_config, objective):
    """Three forward passes' FLOPs an image, as the network counts them with CLIP ViT-L/14's text."""
    head = (ROOT / "configs/experiment/coco256_b2.yaml").read_text()
    stated = re.search(r"(\d+) EFLOP with the route, (\d+) without; (\d+) h and (\d+) h of one", head).groups()
    actual = []
    for model in ("tread_text", "dit_text"):
        cfg = read_config("experiment=coco256_b2", f"model={model}", f"objective={objective}")
        assert (cfg.train.batch_size, cfg.train.steps, cfg.train.label_drop) == (256, 400_000, 0.1)
        assert (cfg.model.hidden_size, cfg.model.depth, cfg.model.num_heads, cfg.model.patch_size) == (768, 12, 12, 2)
        assert cfg.name == f"coco256_b2-{model}{'-rf' * (objective == 'rf')}" and cfg.text.encoder == "clip-l"
        assert [r.resolve(12) for r in cfg.model.routes] == [Route(2, 8, 0.5).resolve(12)] * (model == "tread_text")
        with_text = replace(cfg, text=replace(cfg.text, tokens=77, width=768, pooled=768))
        with torch.device("meta"):
            network = build_network(with_text)
        actual.append(3 * network.forward_flops(cfg.model.routes) * cfg.train.batch_size * cfg.train.steps)
    assert [f"{flops / 1e18:.0f}" for flops in actual] == list(stated[:2])
    assert [f"{flops / (0.4 * 989e12 * 3600):.0f}" for flops in actual] == list(stated[2:])


@pytest.mark.parametrize("experiment, dense", [("ladder256_b1", "lightning"), ("prx1024", "lightning_text")])
def test_the_ladders_experiments_state_what_they_cost(read_config, experiment, dense):
    head = (ROOT / f"configs/experiment/{experiment}.yaml").read_text()
    stated = re.search(r"(\d+) EFLOP with the route, (\d+) without; (\d+) h and (\d+) h of one", head).groups()
    cfg, without = read_config(f"experiment={experiment}"), read_config(f"experiment={experiment}", f"model={dense}")
    actual = []
    for each in (cfg, without):
        with torch.device("meta"):
            network = build_network(each)
        flops = costs.sample_flops(network, each.model.resolved_routes, costs.blank_aligner(each, network))
        actual.append(flops * each.train.batch_size * each.train.steps)
    assert [f"{flops / 1e18:.0f}" for flops in actual] == list(stated[:2])
    assert [f"{flops / (0.4 * 989e12 * 3600):.0f}" for flops in actual] == list(stated[2:])


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
    depth = cfg.model.depth
    assert cfg.dataset.embedded == "digits" and cfg.model.name == "tread" and cfg.tracker == "none"
    assert [r.resolve(depth) for r in cfg.model.routes] == [Route.for_depth(depth).resolve(depth)]
    assert read_config("model=dit").name == "digits-dit" and read_config("objective=rf").name == "digits-tread-rf"


@pytest.mark.parametrize(
    "override, nearest",
    [
        ("+train.batchsize=3", "train.batch_size"),
        ("modle=dit", "model"),
        ("model.routes.0.ratio=0.5", "model.routes.*.selection_ratio"),
        ("lr=1", "optim.lr"),
    ],
)
def test_a_misspelt_override_names_the_nearest_key(override, nearest):
    known = [*settings.known_keys(), "experiment"]
    with pytest.raises(ValueError, match=re.escape(repr(nearest))):
        schema.check_overrides(["model=dit", override], known)
    good = ["experiment=x", "++train.steps=3", "~optim.eps=1", "model.routes.0.end=7", "hydra.verbose=true", "-m"]
    assert schema.check_overrides(good, known) is None


@pytest.mark.parametrize(
    "path, value, shown",
    [
        ("train.batchsize", 3, "'train.batchsize'.*'train.batch_size'"),
        ("train.steps", "many", "train.steps is 'many', but must be int"),
        ("train.steps", True, "train.steps is True"),
        ("train.steps", 0, "train.steps is 0, but must lie in 1 to 10"),
        ("train.precision", "fp16", "train.precision is 'fp16'.*fp16 is refused: without loss scaling"),
        ("train.label_drop", 1.5, "1.5.*\\[0, 1\\]"),
        ("train", 3, "train is 3"),
        ("eval.demo_samples", 1, "demo_samples is 1, but must be 0"),
        ("model.architecture", "unet", "unet"),
        ("model.routes", [{"start": 2, "end": 99}], "99.*8 blocks"),
        ("model.routes", [{"start": 2}], "model.routes.0.end"),
        ("model.routes", [{"start": 2, "end": 4, "rejoin": 3}], "rejoin 3 lies behind route start 2"),
        ("optim.betas", [0.9], "betas"),
        ("optim.betas", [0.9, 1.0], "betas.1 is 1.0"),
        ("ema.power", [0.1, 0.3], "ema.power.1 is 0.3, but must lie between 0 and 0.288"),
        ("name", "a/b", "a/b"),
        ("sampling.steps", 1, "steps is 1, but EDM"),
        ("objective", "ddpm", "ddpm.*edm or rf"),
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


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        (["objective=rf", "edm.P_mean=-0.4", "rf.shift=0.3"], ["edm.P_mean has no effect with objective=rf"]),
        (
            ["rf.shift=0.3", "rf.time=uniform", "edm.rho=5"],
            ["rf.time has no effect with obj", "rf.shift has no effect"],
        ),
        (["objective=rf"], []),
        (["optim.warmup_steps=10", "train.steps=10"], ["optim.warmup_steps is not below train.steps"]),
        (["alignment.weight=0.7", "alignment.gap=0.5"], ["alignment.weight has no effect", "alignment.gap has no"]),
        (["alignment=self", "alignment.width=64"], ["alignment.width has no effect with alignment=self"]),
        (["alignment=self", "alignment.weight=0.7"], []),
        (["alignment=repa", "alignment.encoder=dinov2-b", "alignment.source=stored"], []),
        (["optim.name=sgd", "optim.betas=[0.8,0.9]"], ["optim.betas has no effect with optim.name=sgd"]),
        (["optim.name=sgd", "optim.eps=1e-3", "optim.weight_decay=0.1"], ["optim.eps has no effect with optim.name="]),
        (["optim.name=muon", "optim.muon_lr=1", "optim.eps=1e-3"], []),
        (["text.encoder=clip-l"], ["text.encoder has no effect with model=tread, which"]),
        (["objective=rf", "rf.time=uniform", "rf.time_std=2.0"], ["rf.time_std has no effect with rf.time=uniform"]),
        (["objective=rf", "rf.loss_of=x", "rf.clamp=0.1"], ["rf.clamp has no effect with rf.predicts=velocity"]),
        (["objective=rf", "rf.predicts=x", "rf.clamp=0.1"], []),
        (["rf.clamp=0.1"], ["rf.clamp has no effect with objective=edm"]),
        (["ema.snapshot_every=5"], ["ema.snapshot_every has no effect without ema.power"]),
        (["dataset.archive=standin"], ["dataset.archive has no effect but with dataset=cifar10"]),
        (["checkpoints.keep_every=5"], ["checkpoints.keep_every has no effect without checkpoints.keep_last"]),
        (["optim.final_lr=1e-5"], ["optim.final_lr has no effect with optim.schedule=constant"]),
        (["model=dit", "train.routes_until=3"], ["train.routes_until has no effect without routes"]),
        (["init_weights=model"], ["init_weights has no effect without init_from"]),
        (["eval.fid_reference=x.npz"], ["eval.fid_reference has no effect without eval.fid_every"]),
        (["eval.fid_samples=9", "wandb.project=x"], ["eval.fid_samples has no", "wandb.project has no effect but"]),
        (["eval.inception=x.pth"], ["eval.inception has no effect"]),
        (["train.routes_until=9", "train.steps=9"], ["train.routes_until is not below train.steps"]),
        (["alignment=self", "alignment.until=9", "train.steps=9"], ["alignment.until is not below train.steps"]),
        ([SCHEDULE], []),
        (["model.routes.0.selection_ratio=0.6", SCHEDULE], ["selection_ratio of routes has no"]),
        (["train.label_drop=1"], ["train.label_drop is 1: no class or text is learned"]),
        (["train.class_token_weight=0.5"], ["train.class_token_weight has no effect"]),
        (["dataset=folder", "dataset.path=x", "eval.demo_samples=9"], ["eval.demo_samples has no effect but with"]),
        (["model=tread_text", "dataset=emoji", "eval.inception=x.pth"], []),
    ],
)
def test_settings_that_have_no_effect_are_warned_of(read_config, overrides, warned):
    said = settings_warnings(read_config(*overrides))
    warnings = [re.sub(r"=\S+ has no effect", " has no effect", line) for line in said]  # without the value
    assert len(warnings) == len(warned) and all(map(str.startswith, warnings, warned))
    stated = {line.split()[0] for line in said if re.match(r"\S+=\S+ has no effect", line)}
    assert stated <= {word.replace("1e-3", "0.001").replace("1e-5", "1e-05") for word in overrides}


@pytest.mark.parametrize("given", ["rf.predicts=x", "rf.loss_of=noise", "rf.contrastive=0.05", "rf.train_shift=2.0"])
def test_what_rectified_flow_alone_has_is_refused_for_edm(read_config, given):
    told = f"{given.replace('=', ' is ')}, but belongs to objective=rf, not to edm"
    with pytest.raises(ValueError, match=f"^{told}{'; for edm add ln s to edm.P_mean' * ('shift' in given)}$"):
        read_config(given)
    read_config("objective=rf", given)


def chains(path):
    """All attribute chains of a file as dotted text, e.g. run.cfg.train.steps."""
    return {ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}


def test_every_key_is_read_somewhere():
    files = {path for path in (*ROOT.glob("*.py"), *(ROOT / "tread").rglob("*.py")) if path.name != "settings.py"}
    used = set().union(*map(chains, files))
    used |= {f"optim.{name}" for entry in OPTIMIZERS.values() for name in entry.shared}
    used |= set(re.findall(r"\$\{([a-z.]+)\}", (ROOT / "configs/defaults.yaml").read_text()))
    # sections that are read as objects; the model's options are arguments of its network
    whole = ("edm.", "rf.", "model.", "train.ratio_schedule.", "tags.", "alignment.", "text.", "lora.", "optim.groups.")
    known = settings.known_keys()
    elsewhere = {"plugins", "train.activation_checkpointing", "dataset.archive"}  # read by schema.read and settings.py
    for key in {*known} - elsewhere:
        if key.startswith(whole) or any(other.startswith(key + ".") for other in known):
            continue
        section, _, name = key.rpartition(".")
        ends = (f".{key}", f"options.{name}") if section == "eval" else (f".{key}",)
        assert any(f".{chain}".endswith(ends) for chain in used), f"no file reads {key}"


def commented_keys() -> dict[str, str]:
    """The keys that config.yaml holds commented out, dotted → the value that stands there."""
    actual, section = {}, ""
    for line in (ROOT / "configs/config.yaml").read_text().partition("# Below are")[2].splitlines():
        if match := re.fullmatch(r"# (\w+):", line):
            section = match[1] + "."
        elif match := re.match(r"#( {1,3})(\w+): (\S+)", line):
            actual[(section if len(match[1]) == 3 else "") + match[2]] = match[3]
    return actual


def test_memory_is_asked_for_before_a_network_is_built_and_never_too_much(composed, monkeypatch):
    """What the check counts is less than torch counts in the built network, of each architecture."""
    for architecture in ("dit", "lightning", "rwkv", "mamba", "maskdit", "sprint"):
        cfg, _ = settings.complete(composed(f"model={architecture}", "optim.name=sgd"))
        exact = 4 * (3 + cfg.optim.copies) * size_of(build_network(cfg))
        monkeypatch.setattr("os.sysconf", lambda name, exact=exact: {"SC_PHYS_PAGES": exact, "SC_PAGE_SIZE": 1}[name])
        check_memory(cfg, CPU)
        monkeypatch.setattr("os.sysconf", lambda name, exact=exact: exact // 10 if name == "SC_PHYS_PAGES" else 1)
        if architecture != "maskdit":  # whose decoder is most of it
            with pytest.raises(ValueError, match="parameters or more"):
                check_memory(cfg, CPU)
    for frozen in ("lora.rank=2", "optim.groups=[{match: ., lr: 0}]"):  # no gradients or moments of the blocks
        cfg, _ = settings.complete(composed("model=dit", frozen, "init_from=a"))
        room = 4 * (1 if "lora" in frozen else 2) * size_of(build_network(cfg))
        monkeypatch.setattr("os.sysconf", lambda name, room=room: {"SC_PHYS_PAGES": room, "SC_PAGE_SIZE": 1}[name])
        check_memory(cfg, CPU)


def test_the_older_name_of_saving_memory_still_reads(read_config):
    """True is memory=checkpointing; false says only that it is not that."""
    cases = {("null", "auto"): "auto", ("true", "auto"): "checkpointing", ("true", "checkpointing"): "checkpointing"}
    cases |= {("false", "auto"): "auto", ("false", "budget"): "budget", ("null", "plain"): "plain"}
    for (again, memory), meant in cases.items():
        words = [f"train.activation_checkpointing={again}", f"train.memory={memory}"]
        assert read_config(*words).train.memory == meant
    for again, memory in (("true", "plain"), ("true", "budget"), ("false", "checkpointing")):
        with pytest.raises(ValueError, match=f"activation_checkpointing is {again}, but train.memory is {memory}"):
            read_config(f"train.activation_checkpointing={again}", f"train.memory={memory}")
    with pytest.raises(ValueError, match="train.memory is 'less', but must be auto, plain, budget or checkpointing"):
        read_config("train.memory=less")


def test_what_groups_set_stands_commented_out_in_config_yaml_with_its_default():
    """Reference: the groups' files, as YAML. What they set and config.yaml does not show, people would not find. The
    ladder's recipes set so many keys that these stand in defaults.yaml alone."""
    shown, defaults = commented_keys(), OmegaConf.load(ROOT / "configs/defaults.yaml")
    for path in (ROOT / "configs").glob("*/*.yaml"):
        if path.parent.name in ("dataset", "experiment") and f"experiment={path.stem}" not in OWN_MODEL:
            for key, value in OmegaConf.to_container(OmegaConf.load(path), resolve=False).items():
                keys = [f"{key}.{name}" for name in value] if isinstance(value, dict) else [key]
                facts = ("defaults", "dataset.")  # of a dataset only path and heldout are for people to set
                assert not {name for name in keys if not name.startswith(facts)} - shown.keys(), path
    assert {"dataset.path", "dataset.heldout", "model.routes", "name"} <= shown.keys()
    for key in shown.keys() - {"name", "model.routes", "dataset.path", "dataset.heldout"}:
        assert yaml.safe_load(shown[key]) == OmegaConf.select(defaults, key), key


def test_an_uncommented_key_wins_over_the_groups_and_the_command_line_over_it(tmp_path):
    """All of them at once."""
    values = {key: 7 for key in commented_keys()} | {"model.routes": [], "ema.warmup": False}
    values |= {"name": "mine", "objective": "rf", "init_from": "a.pt", "dataset.path": "b", "dataset.heldout": "c"}
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    tree = OmegaConf.create({})
    for key, value in values.items():
        OmegaConf.update(tree, key, value)
    config = tmp_path / "configs/config.yaml"
    config.write_text(config.read_text() + "\n" + OmegaConf.to_yaml(tree))
    nothing = [f"{key}=null" for key in values]
    with initialize_config_dir(version_base="1.3", config_dir=str(tmp_path / "configs")):
        for overrides in ([], ["experiment=imagenet256_xl2_finetune"]):
            tree, bare = (compose("config", overrides=[*overrides, *more]) for more in ((), nothing))
            assert {key: OmegaConf.select(tree, key) for key in values} == values
            assert not [key for key in values if OmegaConf.select(bare, key) is not None]


def test_every_line_is_commented():
    for name in ("config", "defaults"):
        lines = (ROOT / f"configs/{name}.yaml").read_text().partition("\nhydra:")[0].splitlines()
        assert [line for line in lines if line.strip() and "#" not in line] == []
