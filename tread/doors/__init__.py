"""What tread-train, tread-sample and tread-fid call: the doors, here in a wheel, at the root of a checkout."""

import runpy
from functools import partial
from pathlib import Path


def _open(name: str) -> None:
    """Run a door as `python <name>` does."""
    here = Path(__file__).resolve().parent
    runpy.run_path(str((here if (here / name).exists() else here.parents[1]) / name), run_name="__main__")


train, sample, fid = (partial(_open, name) for name in ("train.py", "sample.py", "fid.py"))
