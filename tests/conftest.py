"""Shared fixtures. Reference assets (golden numbers, real weights) lie where TREAD_ASSETS points, by
default ../shared beside the repository; tests that need them skip with a reason when they are absent."""

# ruff: noqa: E402
import importlib
import os
import sys

if "PYTEST_XDIST_WORKER" in os.environ and hasattr(os, "sched_setaffinity"):
    # a core to each worker, before anything counts them: threads of two workers on one core wait for one another
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % len(cores)]})

import gc

gc.disable()  # until all is collected: what is imported stays, and a third of the imports' time is walks over it
import contextlib
import csv
import io
import json
import pickle
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._functorch.config
from forked import FORKS, run_python
from hydra import compose, initialize_config_dir
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import DefaultsList
from omegaconf import DictConfig, OmegaConf
from PIL import Image
from safetensors.torch import save_file

import fid
import sample
import train
from dit import DiT
from tread.checkpoints import checkpoint
from tread.checkpoints.for_sampling import open_network
from tread.checkpoints.network import build_network, read_network
from tread.checkpoints.run_log import RunLog
from tread.data.latents import LatentSpec
from tread.drawing.grids import FACTS
from tread.encoders.inception import Inception, sizes_of
from tread.evaluation import image_sets, reference
from tread.preparing import encode_photos
from tread.preparing.images import Crop
from tread.runtime import schema, versions
from tread.runtime.cli import take_literally
from tread.runtime.device import set_tf32
from tread.runtime.distributed import share_work
from tread.training import periodic, settings

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
ASSETS = Path(os.environ.get("TREAD_ASSETS", ROOT.parent / "shared"))


def compose_once(choose: Callable, merge: Callable) -> tuple[Callable, Callable]:
    """Hydra's own two steps from names of files to what they say together, which read and merge some twenty files
    whenever a config is composed. Of our configs, each choice of files is merged once; single values are then set by
    Hydra as ever."""
    chosen: dict[tuple, DefaultsList] = {}
    merged: dict[int, tuple[list, bytes]] = {}  # the identity of a list of files → that list, and the pickled config

    def create_defaults_list(repo, config_name: str, overrides_list: list, **how) -> DefaultsList:
        groups = [one for one in overrides_list if repo.group_exists(one.key_or_group)]
        values = [one for one in overrides_list if one not in groups]
        paths = tuple(source.path for source in repo.get_sources())
        if str(ROOT / "configs") not in paths or any(not isinstance(one.value(), str | None) for one in groups):
            return choose(repo=repo, config_name=config_name, overrides_list=overrides_list, **how)
        key = config_name, paths, tuple(one.input_line for one in groups), *how.items()
        if key not in chosen:
            chosen[key] = choose(repo=repo, config_name=config_name, overrides_list=groups, **how)
            merged[id(chosen[key].defaults)] = chosen[key].defaults, b""
        return replace(chosen[key], config_overrides=values)

    def compose_config(self, defaults: list, repo) -> DictConfig:
        if id(defaults) not in merged:
            return merge(self, defaults=defaults, repo=repo)
        if not merged[id(defaults)][1]:
            merged[id(defaults)] = defaults, pickle.dumps(merge(self, defaults=defaults, repo=repo))
        return pickle.loads(merged[id(defaults)][1])

    return create_defaults_list, compose_config


def read_once(load: Callable) -> Callable:
    """Each of our files of settings is read once, not at each choice that it is a part of."""
    read: dict[str, bytes] = {}

    def load_config(self, config_path: str):
        if [source.path for source in self.sources if source.scheme() == "file"] != [str(ROOT / "configs")]:
            return load(self, config_path)
        if config_path not in read:
            read[config_path] = pickle.dumps(load(self, config_path))
        return pickle.loads(read[config_path])

    return load_config


ConfigRepository.load_config = read_once(ConfigRepository.load_config)
config_loader_impl.create_defaults_list, ConfigLoaderImpl._compose_config_from_defaults_list = compose_once(
    config_loader_impl.create_defaults_list, ConfigLoaderImpl._compose_config_from_defaults_list
)


def draw_once(save: Callable) -> Callable:
    """As a run's own save_curve, which takes a quarter of a run of six steps: it draws records of each kind once, and
    then hands out the same picture."""
    drawn = {}

    def save_curve(path: Path, records: list[dict], *more) -> None:
        numbers = [(key, value) for record in records for key, value in record.items()]
        kind = frozenset((key, isinstance(value, float) and not np.isfinite(value)) for key, value in numbers)
        if kind not in drawn:
            save(path, records, *more)
            drawn[kind] = path.read_bytes()
        path.write_bytes(drawn[kind])

    return save_curve


versions.git_revision = cache(versions.git_revision)  # of one commit in one process
os.fsync = lambda descriptor: None  # for power cuts, not kills; what is synced before what: test_checkpoint.py
periodic.save_curve = draw_once(periodic.save_curve)  # of the runs in this process; the curves: drawing/test_charts.py


def pytest_runtest_setup(item):
    """Tests on a GPU begin with exact fp32, and without what earlier ones left: a failed one's watch over waiting,
    graphs compiled to save memory or not to, runs in reference cycles."""
    if item.get_closest_marker("gpu"):
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        torch.cuda.set_sync_debug_mode("default")
        set_tf32(["ieee"] * 3)
        torch._dynamo.reset()
        torch._functorch.config.activation_memory_budget = 1.0
        gc.collect()


def pytest_collection_modifyitems(items):
    """The files that take longest come first, so that no core waits for another's at the end."""
    longest = ("test_survival", "test_pages", "test_studies", "test_diffusers", "test_scoring", "test_encode_photos")
    items.sort(key=lambda item: item.path.stem not in longest)


def pytest_collection_finish(session):
    """What was imported and collected stays to the end: spare each garbage collection the walk over it. Slow tests
    fork dozens of processes that encode pictures, so the autoencoder's seconds of imports are the server's, too."""
    if any(item.get_closest_marker("slow") for item in session.items):
        FORKS.set_forkserver_preload(["imported", "diffusers.models.autoencoders.autoencoder_kl"])
    gc.enable()
    gc.collect()
    gc.freeze()


def launch_door(main: Callable, config: str, folder: Path, *overrides: str) -> str:
    """Do in this process what a door does from the command line in a folder; returns what it prints."""
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "configs")):
        composed = compose(config, overrides=settings.add_unstated(take_literally(overrides, ("prompt",))))
    before, arguments, threads, printed = Path.cwd(), sys.argv, torch.get_num_threads(), io.StringIO()
    os.chdir(folder)
    sys.argv = [f"{main.__module__}.py", *overrides]
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            main.__wrapped__(composed)
    except SystemExit:
        sys.stderr.write(printed.getvalue())  # for capsys
        raise
    finally:
        os.chdir(before)
        sys.argv = arguments
        torch.set_num_threads(threads)
    return printed.getvalue()


TINY = [
    "model.hidden_size=16",
    "model.depth=6",
    "model.num_heads=2",
    "train.batch_size=8",
    "train.steps=6",
    "train.cpu_threads=1",
    "every.log=1",
    "every.evaluate=3",
    "every.sample=6",
    "every.save=3",
    "eval.points=64",
    "eval.demo_samples=0",
    "report=false",
    "sampling.steps=2",
    "sampling.per_class=1",
]


TINY_KL = {  # sizes of an AutoencoderKL that halves pictures
    "block_out_channels": (8, 8),
    "norm_num_groups": 4,
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
}


def launch(folder, *overrides: str) -> str:
    """Do in this process what `python train.py` does in a folder; returns what it prints."""
    return launch_door(train.main, "config", folder, *TINY, *overrides)


def take_samples(folder, *overrides: str) -> str:
    """Do in this process what `python sample.py` does in a folder; returns what it prints."""
    return launch_door(sample.main, "sample", folder, *overrides)


def score(folder, *overrides: str) -> str:
    """Do in this process what `python fid.py` does in a folder; returns what it prints."""
    return launch_door(fid.main, "fid", folder, f"cache={folder}/cache", *map(str, overrides))


def assert_refused(call: Callable, *cases: tuple, error: type[Exception] = SystemExit) -> None:
    """Each case, arguments and behind them what the error must say, ends in such an error."""
    for *given, shown in cases:
        with pytest.raises(error, match=shown):
            call(*given)


def raising(error: BaseException | type[BaseException]) -> Callable:
    """A function of anything that raises the error, to stand where another was."""

    def stop(*_, **__):
        raise error

    return stop


def interrupt(monkeypatch, owner: object, name: str, call: int) -> list[tuple]:
    """Let that call of a function be a Ctrl-C; returns what the function is called with from now on."""
    real, calls = getattr(owner, name), []

    def interrupted(*given, **more):
        calls.append(given)
        if len(calls) == call:
            raise KeyboardInterrupt
        return real(*given, **more)

    monkeypatch.setattr(owner, name, interrupted)
    return calls


def launch_processes(folder, *overrides: str, processes: int = 1, ok: bool = True) -> str:
    """Run train.py as from the command line, by several processes if asked; returns what it prints."""
    done = run_python(ROOT / "train.py", *TINY, *overrides, cwd=folder, processes=processes)
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    return done.stdout + done.stderr


def state(run):
    found = checkpoint.find(run)
    parts = {part: found.tensors(part) for part in ("model", "ema", "optimizer")}
    return {f"{part}/{key}": value for part, tensors in parts.items() for key, value in tensors.items()}


def opened(run):
    """The network of a run's newest checkpoint, or of one, its averaged weights, as doors open it."""
    return open_network(checkpoint.find(run), "ema")


def equal(ours: dict, theirs: dict) -> bool:
    """Whether both have the same tensors under the same names, bit for bit."""
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def same(run, other) -> bool:
    """Whether the newest checkpoints of two runs hold the same weights, averages and optimizer's state, bit for bit."""
    return equal(state(run), state(other))


def records(run):
    fields = ("step", "loss", "eval_loss", "eval_velocity")
    return [{key: record[key] for key in fields if key in record} for record in RunLog(run).records()]


def logged(run, name: str, field: str = "") -> list:
    """A run's numbers of that name, or what stands in another field beside them."""
    return [record[field or name] for record in RunLog(run).records() if name in record]


def read_json(path: Path):
    return json.loads(path.read_text())


def write_json(path: Path, tree) -> None:
    path.write_text(json.dumps(tree))


def read_csv(path: Path) -> list[dict]:
    with path.open() as file:
        return list(csv.DictReader(file))


def facts_in(picture: Path) -> dict:
    """The facts of its making that a picture's own text states."""
    return json.loads(Image.open(picture).text[FACTS])


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def saved(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    """A picture as a file of that kind has it."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def contents(folder: Path) -> dict[str, bytes]:
    """The files in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def times(paths: Iterable[Path]) -> dict[Path, int]:
    """When files were changed."""
    return {path: path.stat().st_mtime_ns for path in paths}


def randomized(build: Callable[[], torch.nn.Module], seed: int, std: float):
    """A network as it is built, all parameters N(0, std); PyTorch's own random numbers stay as they were."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = build()
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=std)
    return network


def random_network(seed: int, **sizes: int) -> DiT:
    """A network on 4×8×8 latents of 10 classes, all parameters N(0, 0.05)."""
    return randomized(partial(DiT, input_size=8, in_channels=4, num_classes=10, **sizes), seed, 0.05)


def routes_seen(monkeypatch, network: type) -> list:
    """The routes of each call of a class's networks from now on, as (start, end, select, kept)."""
    calls, forward = [], network.forward

    def watched(self, x, t, y, routes=(), **more):
        resolved = [(route.resolve(len(self.blocks)), ids.shape[1]) for route, ids in routes]
        calls.append([(route.start, route.end, route.select, kept) for route, kept in resolved])
        return forward(self, x, t, y, routes, **more)

    monkeypatch.setattr(network, "forward", watched)
    return calls


def state_of(golden: dict) -> dict:
    """The golden network's state dict."""
    return {name.removeprefix("state."): value for name, value in golden.items() if name.startswith("state.")}


def size_of(network: torch.nn.Module) -> int:
    """How many parameters it has."""
    return sum(parameter.numel() for parameter in network.parameters())


def hidden_states(network, *inputs, **more):
    """What a network returns, and the output of each block."""
    states = []
    hooks = [block.register_forward_hook(lambda _, __, output: states.append(output)) for block in network.blocks]
    out = network(*inputs, **more)
    for hook in hooks:
        hook.remove()
    return out, states


def open_pictures(path: Path, crop: int | None = None, *how: str) -> image_sets.Pictures:
    """A set of pictures as the only process opens it."""
    return image_sets.open_pictures(path, crop and Crop(crop, *how), share_work(None))


def open_reference(path: Path, narrow: int = 1) -> reference.Reference:
    """A reference for an Inception, by default the whole one, as the only process opens it."""
    return reference.open_reference(path, None, share_work(None), sizes_of(narrow))


RGB = LatentSpec(shape=(3, 16, 16), classes=tuple("abcde"), autoencoder="pixels", scale_applied=True)


def save_checkpoint(run, composed, latents=RGB, step=3, parts=("model", "ema"), **dataset):
    """A checkpoint of a network whose weights are random; returns it."""
    facts = {"channels": latents.shape[0], "size": latents.shape[1], "num_classes": len(latents.classes)} | dataset
    config = composed("dataset=folder", "dataset.path=data", "model.hidden_size=32", "model.depth=6")
    config["dataset"] |= facts
    config["model"] |= {"num_heads": 2, "patch_size": 4}
    network = randomized(partial(build_network, read_network(config)), step, 0.1)
    info = {"config": config, "latents": asdict(latents), "samples": 10, "versions": {}}
    folder = checkpoint.save(run, step, {part: network.state_dict() for part in parts}, info)
    return network.eval(), folder


@pytest.fixture
def asset():
    """A function from a file name to its path among the assets."""

    def find(name: str) -> Path:
        path = ASSETS / name
        if not path.exists():
            pytest.skip(f"{path} is absent; set TREAD_ASSETS to the folder that holds {name}")
        return path

    return find


@pytest.fixture
def import_benchmark(monkeypatch):
    """A function from a benchmark's name to its module, as `python benchmarks/<name>.py` sees it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.fixture(scope="session")
def composed():
    """A function from Hydra overrides to the resolved config, as train.py sees it."""

    def build(*overrides: str, name: str = "config") -> dict:
        with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "configs")):
            return OmegaConf.to_container(compose(name, overrides=settings.add_unstated(overrides)), resolve=True)

    return build


@pytest.fixture
def run_pipeline(composed, capsys):
    """A function (a pipeline of tread.preparing, the class of its options, its config, overrides) → what it prints."""

    def run(pipeline: Callable, options: type, config: str, *overrides: str) -> str:
        tree, threads = composed(*overrides, name=config), torch.get_num_threads()
        try:
            pipeline(schema.read(tree, options), share_work("cpu"))
        finally:
            torch.set_num_threads(threads)
        return capsys.readouterr().out

    return run


@pytest.fixture
def prepare_photos(run_pipeline):
    """A function from the overrides of scripts/prepare_latents.py to what it prints."""
    return partial(run_pipeline, encode_photos.prepare_latents, encode_photos.PhotoOptions, "prepare_latents")


@pytest.fixture
def read_config(composed):
    return lambda *overrides: settings.read(composed(*overrides))


@pytest.fixture
def tiny():
    """A network whose every parameter matters: all N(0, 0.05), as the golden numbers' network is."""
    return random_network(0, patch_size=2, hidden_size=64, depth=6, num_heads=4)


@pytest.fixture(scope="session")
def inception_file(tmp_path_factory):
    """Random weights of a narrow Inception, fc included: for what stands around it."""
    return random_inception(tmp_path_factory.mktemp("inception") / "narrow.safetensors", narrow=16)


def random_inception(path: Path, narrow: int = 1) -> Path:
    """A file with random weights of the Inception, fc included."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = Inception(with_classes=True, narrow=narrow)
        for parameter in network.parameters():
            if parameter.ndim == 4:
                torch.nn.init.kaiming_normal_(parameter)
    save_file(network.state_dict(), path)
    return path


@pytest.fixture(scope="session")
def dinov2(tmp_path_factory):
    """A folder with a Dinov2Model of width 32 and 4×4 positions, all its parameters random."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("encoder") / "dinov2"
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56, "patch_size": 14}
    config = transformers.Dinov2Config(**sizes, mlp_ratio=2)
    randomized(partial(transformers.Dinov2Model, config), 0, 0.2).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def pictures_of():
    """A function (n, size, seed) → smooth random pictures (n, size, size, 3) uint8."""

    def draw(count: int, size: int, seed: int) -> np.ndarray:
        coarse = torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
        fine = torch.nn.functional.interpolate(coarse, size=size, mode="bilinear")
        return (fine * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()

    return draw
