"""What forked.py's server imports once for all of its forks, which spare garbage collections the walk over it."""

# ruff: noqa: E402, F401
import gc

gc.disable()
import diffusers
import matplotlib.figure

import fid
import sample
import train

gc.freeze()
gc.enable()
