"""From a folder of photos to pictures by the three commands of docs/data.md, and the presets that they use.

The references are the page itself, whose commands run here on 60 pictures with fewer steps and a smaller network, and
what PIL says of the pictures that went in and came out.
"""

import numpy as np
import prepare_latents
import pytest
import torch
from conftest import TINY, launch_door, logged, read_json
from PIL import Image, ImageDraw
from test_pages import commands_of

import sample
import train
from tread.checkpoints.network import build_network

DOORS = {
    "scripts/prepare_latents.py": (prepare_latents.main, "prepare_latents", ["workers=0"]),
    "train.py": (train.main, "config", [*TINY, "every.evaluate=6", "every.sample=6", "train.cpu_threads=2"]),
    "sample.py": (sample.main, "sample", ["steps=2", "cpu_threads=3"]),
}


def draw_shapes(folder, count):
    """Pictures of 48×40: a shape of one colour on a ground of another, a class for each kind of shape."""
    numbers = np.random.default_rng(0)
    for number in range(count):
        kind = ("circle", "square", "triangle")[number % 3]
        ground, colour = (tuple(map(int, numbers.integers(*span, 3))) for span in ((150, 256), (0, 120)))
        picture = Image.new("RGB", (48, 40), ground)
        x, y, r = *map(int, numbers.integers(14, 26, 2)), 12
        shape = ImageDraw.Draw(picture)
        if kind == "circle":
            shape.ellipse((x - r, y - r, x + r, y + r), fill=colour)
        else:
            shape.regular_polygon((x, y, r), 4 if kind == "square" else 3, fill=colour)
        (folder / kind).mkdir(parents=True, exist_ok=True)
        picture.save(folder / kind / f"{number:02d}.png")


def test_three_commands_lead_from_photos_to_pictures(tmp_path, monkeypatch):
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    draw_shapes(tmp_path / "photos", 60)
    three = commands_of("docs/data.md")[:3]
    assert [command.door for command in three] == list(DOORS)
    printed = []
    for command in three:
        main, config, small = DOORS[command.door]
        printed.append(launch_door(main, config, tmp_path, *command.arguments, *small))
    assert 2 in threads and 3 in threads
    index, heldout = (read_json(tmp_path / f"data/photos{part}/index.json") for part in ("", "-heldout"))
    assert index["count"] + heldout["count"] == 60 and heldout["count"] == 3  # one in twenty
    assert index["shape"] == [3, 32, 32] and index["classes"] == ["circle", "square", "triangle"]
    assert "64 tokens" in printed[1] and "57 samples of (3, 32, 32)" in printed[1]
    assert logged(tmp_path / "results/photos", "step")[-1] == 6 and logged(tmp_path / "results/photos", "eval_loss")
    with Image.open(tmp_path / "samples.png") as grid:  # a row a class, a column a seed: 64 pixels and 2 between
        assert grid.height == 3 * 66 - 2 and grid.width > 8 * 66 - 2 and grid.mode == "RGB"  # names stand to the left


@pytest.mark.parametrize("preset", ["tiny", "small"])
@pytest.mark.parametrize("shape", [(3, 32, 32), (4, 32, 32), (4, 16, 16)], ids=str)
def test_presets_fit_any_folder_of_data(read_config, preset, shape):
    """Pixels and latents alike; patches of 4 and of 2 pixels, whatever the model."""
    facts = [f"dataset.{key}={value}" for key, value in zip(("channels", "size"), shape)]
    cfg = read_config(f"experiment={preset}", "dataset.path=data", *facts, "dataset.num_classes=3")
    with torch.device("meta"):
        network = build_network(cfg)
    assert network.num_tokens == (shape[1] // {"tiny": 4, "small": 2}[preset]) ** 2
    assert cfg.name == f"{preset}-tread" and cfg.dataset.normalize and cfg.eval.demo_samples == 0
    horizon = 1 / (1 - cfg.ema.decay)
    assert 10 * horizon < cfg.train.steps  # what an average remembers is a small part of the run
    for due in (cfg.every.evaluate, cfg.every.sample, cfg.every.save):
        assert cfg.train.steps % due == 0 and cfg.train.steps >= 6 * due
