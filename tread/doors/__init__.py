"""The commands tread-train, tread-sample and tread-fid, which run train.py, sample.py and fid.py."""

import runpy
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE if (HERE / "train.py").exists() else HERE.parents[1]  # of scripts and configs/: of a wheel, or a checkout


def _open(name: str) -> None:
    runpy.run_path(str(ROOT / name), run_name="__main__")


train, sample, fid = (partial(_open, name) for name in ("train.py", "sample.py", "fid.py"))
