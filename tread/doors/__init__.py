"""What tread-train, tread-sample and tread-fid call: the doors, here in a wheel, at the root of a checkout."""

from __future__ import annotations

import runpy
from pathlib import Path


def train() -> None:
    """python train.py"""
    _open("train.py")


def sample() -> None:
    """python sample.py"""
    _open("sample.py")


def fid() -> None:
    """python fid.py"""
    _open("fid.py")


def _open(name: str) -> None:
    here = Path(__file__).resolve().parent
    runpy.run_path(str((here if (here / name).exists() else here.parents[1]) / name), run_name="__main__")
