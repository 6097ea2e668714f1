"""Sampling: order, seeds and labels, against drawing each sample alone and a known network."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image

import checkpoint
from compute import use_precision
from edm import EDM
from pictures import save_curve, save_grid
from sample import generate, parse_seeds, spread_classes


def test_each_sample_depends_on_its_seed_and_label_alone(tiny):
    seeds, labels = [7, 3, 11], torch.tensor([1, 1, 4])
    together = generate(EDM(), tiny, seeds, labels, steps=4, batch_size=3)
    assert together.shape == (3, 4, 8, 8) and together.dtype == torch.float32
    for i in range(3):
        alone = generate(EDM(), tiny, seeds[i : i + 1], labels[i : i + 1], steps=4, batch_size=2)
        torch.testing.assert_close(alone[0], together[i], rtol=1e-3, atol=1e-3)
    other = generate(EDM(), tiny, seeds, torch.tensor([2, 1, 4]), steps=4)
    assert not torch.isclose(other[0], together[0]).all()
    torch.testing.assert_close(other[1:], together[1:], rtol=1e-3, atol=1e-3)


def test_an_untrained_network_gives_the_known_contraction():
    """F = 0 means D = c_skip·x, the denoiser of N(0, σ_data²): samples are noise of that size."""

    class Zero(torch.nn.Module):
        in_channels, input_size, num_classes = 1, 4, 3

        def __init__(self):
            super().__init__()
            self.unused = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x, t, y, routes):
            return torch.zeros_like(x)

    x = generate(EDM(), Zero(), range(500), torch.zeros(500, dtype=torch.int64), steps=40, batch_size=500)
    assert x.std() == pytest.approx(0.5, rel=0.03)


def test_bad_requests_are_refused(tiny):
    with pytest.raises(ValueError, match="2 seeds for 1 labels"):
        generate(EDM(), tiny, [0, 1], torch.tensor([0]))
    with pytest.raises(ValueError, match="11.*0..9"):
        generate(EDM(), tiny, [0], torch.tensor([11]))
    with pytest.raises(ValueError, match="fp16"):
        use_precision("fp16", torch.device("cpu"))
    assert use_precision("auto", torch.device("cpu")) == "fp32"


def test_all_cores_are_used_where_a_launcher_left_one():
    """accelerate and torchrun set OMP_NUM_THREADS=1."""
    code = "import torch, compute as c; print(torch.get_num_threads(), c.use_cores(None, 1), c.use_cores(3, 1))"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["1", str(len(os.sched_getaffinity(0))), "3"]


def test_seeds_and_classes():
    assert parse_seeds("0-3") == [0, 1, 2, 3] and parse_seeds("5-5") == [5]
    assert parse_seeds((4, 2)) == [4, 2] and parse_seeds(9) == [9]
    for bad in ("3-1", "a", "1,2"):
        with pytest.raises(ValueError, match=bad):
            parse_seeds(bad)
    assert spread_classes(10, 10) == list(range(10)) and spread_classes(1000, 3) == [0, 500, 999]
    assert spread_classes(2, 10) == [0, 1]


def test_grid_places_pictures_row_by_row(tmp_path):
    pictures = np.arange(6, dtype=np.uint8).reshape(6, 1, 1, 1).repeat(8, 2).repeat(8, 3) * 40
    save_grid(tmp_path / "a" / "grid.png", pictures, columns=3)
    grid = np.asarray(Image.open(tmp_path / "a" / "grid.png"))
    assert grid.shape == (2 * 64 + 2, 3 * 64 + 4)
    assert [grid[10 + 66 * r, 10 + 66 * c] for r in range(2) for c in range(3)] == [0, 40, 80, 120, 160, 200]
    save_grid(tmp_path / "rgb.png", np.zeros((2, 3, 256, 256), dtype=np.uint8), columns=2)
    assert np.asarray(Image.open(tmp_path / "rgb.png")).shape == (256, 514, 3)


def test_curve_is_drawn(tmp_path):
    records = [{"step": s, "loss": 1 / s} for s in range(1, 9)] + [{"step": 8, "eval_loss": 0.1}]
    save_curve(tmp_path / "loss.png", records, routed=True)
    drawn = np.asarray(Image.open(tmp_path / "loss.png").convert("RGB")).reshape(-1, 3)
    assert len(np.unique(drawn, axis=0)) > 10


def test_the_door_refuses_a_bare_state_dict_and_a_misspelt_key(tmp_path, tiny):
    """Public DiT weights predict noise on timesteps: sampling them by EDM would give noise."""
    torch.save(tiny.state_dict(), tmp_path / "dit.pt")
    with pytest.raises(ValueError, match="timesteps"):
        checkpoint.find(tmp_path / "dit.pt")
    for arguments, shown in (
        ([f"checkpoint={tmp_path / 'dit.pt'}"], "timesteps 0..999"),
        ([f"checkpoint={tmp_path / 'none'}"], "no checkpoint at"),
        (["chekpoint=x"], "nearest known one is 'checkpoint'"),
        (["seeds=0-7"], "checkpoint"),
    ):
        command = [sys.executable, str(ROOT / "sample.py"), *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 1 and "error: " in done.stderr and shown in done.stderr
