"""The commands tread-train, tread-sample and tread-fid, which run train.py, sample.py and fid.py."""

import runpy
from functools import partial
from pathlib import Path


def _open(name: str) -> None:
    """Run the script `name`, e.g. "train.py", as __main__: a wheel's copy in tread/doors, else the checkout's file."""
    here = Path(__file__).resolve().parent
    runpy.run_path(str((here if (here / name).exists() else here.parents[1]) / name), run_name="__main__")


train, sample, fid = (partial(_open, name) for name in ("train.py", "sample.py", "fid.py"))
