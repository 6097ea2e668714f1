"""Both processes are what the protocol asks for: the reference is the protocol's own list of members."""

import inspect

import pytest
import torch

from rf import RF
from tread.diffusion.edm import EDM
from tread.diffusion.process import Process

MEMBERS = [name for name in {*vars(Process), *Process.__annotations__} if not name.startswith("_")]


@pytest.mark.parametrize("process", [EDM(), RF()], ids=["edm", "rf"])
def test_a_process_has_what_training_and_sampling_ask_for(process):
    assert {"denoise", "loss", "errors", "schedule", "default_solver", "data_std"} <= set(MEMBERS)
    for name in MEMBERS:
        asked, actual = getattr(Process, name, None), getattr(process, name)
        if inspect.isfunction(asked):
            ours = list(inspect.signature(actual).parameters.values())
            theirs = list(inspect.signature(asked).parameters.values())[1:]
            assert [p.kind for p in ours] == [p.kind for p in theirs], name
            assert "routes" not in [p.name for p in theirs] or ours[-1].name == "routes", name
    facts = (40, True, 0.5) if isinstance(process, EDM) else (50, False, 1.0)
    assert (process.default_steps, process.variance_exploding, process.data_std) == facts
    levels = process.schedule(process.default_steps)
    assert levels.shape == (process.default_steps + 1,) and levels[-1] == 0 and (levels.diff() < 0).all()
    assert process.weight(process.quantiles(4).float()).shape == (4,) and process.data_std > 0
    assert process.noise_level(torch.zeros(3)).shape == (3,)
