"""The weights in models/: what lies there is whole, small and of no machine, and draws the pictures that lie beside it.

References: the stored pictures, made by sample.py with the settings in their own text, on one machine in one batch. In
another batch, or by other kernels, sums have another order; a picture is then the same within TOLERANCE.
"""

import json
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import CPU, ROOT, facts_in, names_in, take_samples
from PIL import Image
from safetensors.torch import load_file
from test_pages import commands_of, composed_settings

from tread.checkpoints import checkpoint
from tread.checkpoints.for_sampling import open_network
from tread.checkpoints.weights import load_weights
from tread.drawing.grids import FACTS, GAP
from tread.encoders import autoencoder
from tread.runtime.files import size_text
from tread.training.run_folder import migrate

FOLDERS = sorted(path for path in (ROOT / "models").iterdir() if path.is_dir())
PICTURES = [path for folder in FOLDERS for path in sorted(folder.glob("*.png"))]
EACH, TOGETHER = 30e6, 60e6  # bytes
TOLERANCE = 3  # grey levels of 256
PLACES = re.compile(r"(?<![\w.~])/(?:tmp|work|home|root|mnt|data|usr|var|Users)\b|[A-Z]:\\")


def named(path: Path) -> str:
    return str(path.relative_to(ROOT / "models"))


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_they_are_there_and_small():
    assert {folder.name for folder in FOLDERS} == {"cifar10-tread", "digits", "imagenette-dit", "imagenette-tread"}
    assert max(map(bytes_of, FOLDERS)) <= EACH and bytes_of(ROOT / "models") <= TOGETHER


@pytest.mark.parametrize("folder", FOLDERS, ids=named)
def test_a_folder_holds_a_checkpoint_a_card_and_pictures(folder):
    pictures = {"samples.png"} | ({"latents.png"} if folder.name.startswith("imagenette") else set())
    assert names_in(folder) == ({"README.md", "config.yaml", "ema.safetensors", "info.json"} | pictures)
    found = checkpoint.find(folder)
    found.verify("ema")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert found.info["dtype"] == "fp16" and found.info["config"] == config
    assert {value.dtype for value in load_file(folder / "ema.safetensors").values()} == {torch.float16}
    network = open_network(found, "ema").load(CPU).network
    load_weights(network, str(folder))  # as init_from does
    assert {value.dtype for value in network.state_dict().values()} == {torch.float32}


def test_nothing_names_a_place_on_a_machine():
    for folder in FOLDERS:
        for path in folder.iterdir():
            if path.suffix in (".json", ".yaml", ".md"):
                assert not PLACES.search(path.read_text()), path
            if path.suffix in (".json", ".yaml"):
                strings = [one for one in leaves(yaml.safe_load(path.read_text())) if isinstance(one, str)]
                assert not [one for one in strings if Path(one).is_absolute()], path
            if path.suffix == ".png":
                assert not PLACES.search(Image.open(path).text[FACTS]), path


def leaves(tree: object) -> list:
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else None
    return [tree] if children is None else [leaf for child in children for leaf in leaves(child)]


@pytest.mark.parametrize("folder", FOLDERS, ids=named)
def test_a_card_says_what_the_record_says(folder):
    card, info = (folder / "README.md").read_text(), checkpoint.find(folder).info
    assert f"step {info['step']:,}" in card and size_text(info["files"]["ema.safetensors"]["bytes"]) in card
    assert f"seed {info['config']['seed']}" in card and info["versions"]["git"][:7] in card
    for word in ("## Data", "licence", "## Scores", "## Limits", "## How it was made"):
        assert word in card, word
    assert ("research" in card and "ImageNet" in card) == folder.name.startswith("imagenette")
    given = {command.door: command for command in commands_of(f"models/{folder.name}/README.md")}
    assert {"sample.py", "scripts/export_checkpoint.py"} < given.keys()
    trained, config = asdict(composed_settings(given["train.py"])), migrate(info["config"])
    for name in ("objective", "seed", "model", "edm", "optim", "ema"):
        assert plain_lists(trained[name]) == config[name], name
    for name in ("steps", "batch_size", "label_drop", "loss_tokens"):
        assert trained["train"][name] == config["train"][name], name
    for name in ("embedded", "channels", "size", "num_classes", "normalize"):
        assert trained["dataset"][name] == config["dataset"][name], name


def plain_lists(tree: object) -> object:
    """As JSON has it."""
    return json.loads(json.dumps(tree))


@pytest.mark.parametrize(  # others than digits take one to eight seconds a picture
    "path", [pytest.param(p, id=named(p), marks=[pytest.mark.slow] * ("digits" not in str(p))) for p in PICTURES]
)
def test_what_is_drawn_is_the_stored_picture(path, tmp_path, asset):
    """The second class and seed are drawn anew, by the settings that the picture itself states."""
    facts = facts_in(path)
    settings, found = facts["settings"], checkpoint.find(path.parent)
    assert facts["network"] == {"step": found.step, "weights": "ema", "sha256": found.sha256("ema")}
    options = [f"{key}={settings[key]}" for key in ("steps", "solver", "decode")]
    options += [f"guidance={settings['guidance']['kind']}"]
    options += [f"guidance.scale={settings['guidance']['scale']}"] if settings["guidance"]["kind"] != "none" else []
    if settings["decode"] and found.info["latents"]["autoencoder"] != "pixels":
        file = asset("weights/taesd.fp8.safetensors")
        print_of = autoencoder.fingerprint(autoencoder.load_autoencoder(str(file)))
        assert print_of == found.info["latents"]["fingerprint"]  # the one that made the latents
        options += [f"autoencoder={file}"]
    row, columns = facts["rows"][1], len(facts["rows"][1]["seeds"])
    options += [f"classes=[{row['class']}]", f"seeds={row['seeds'][1]}", "out=drawn.png"]
    take_samples(tmp_path, f"checkpoint={path.parent}", *options)
    stored, drawn = (np.array(Image.open(one)).astype(int) for one in (path, tmp_path / "drawn.png"))
    side = drawn.shape[0]
    margin = stored.shape[1] - columns * (side + GAP) + GAP  # with the rows' names, if any
    top, left = side + GAP, margin + side + GAP
    expected = stored[top : top + side, left : left + side]
    assert np.abs(expected - drawn[:, -side:]).max() <= TOLERANCE
    assert expected.std() > 20
