"""Shared fixtures. Reference assets (golden numbers, real weights) lie where TREAD_ASSETS points, by
default ../shared beside the repository; tests that need them skip with a reason when they are absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import settings
from dit import DiT

ROOT = Path(__file__).resolve().parent.parent
ASSETS = Path(os.environ.get("TREAD_ASSETS", ROOT.parent / "shared"))


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
def composed():
    """A function from Hydra overrides to the resolved config, as train.py sees it."""

    def build(*overrides: str, name: str = "config") -> dict:
        with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "configs")):
            return OmegaConf.to_container(compose(name, overrides=list(overrides)), resolve=True)

    return build


@pytest.fixture
def read_config(composed):
    return lambda *overrides: settings.read(composed(*overrides))


@pytest.fixture
def tiny():
    """A network whose every parameter matters: all N(0, 0.05), as the golden numbers' network is."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = DiT(input_size=8, patch_size=2, in_channels=4, hidden_size=64, depth=6, num_heads=4, num_classes=10)
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
    return network
