"""What a start says of its weights, against what is on the disk."""

from __future__ import annotations

import re

from conftest import launch

from tread.training.run_folder import RunLog


def lines(text: str, *beginnings: str) -> list[str]:
    return [re.sub(" +", " ", line.strip()) for line in text.splitlines() if line.strip().startswith(beginnings)]


def test_where_the_first_weights_come_from(tmp_path):
    def weights(*overrides):
        return lines(launch(tmp_path, "every.save=2", *overrides), "weights ", "warning: ")

    run = tmp_path / "results" / "digits-tread"
    assert weights("train.steps=2", "seed=3") == ["weights new, drawn by seed 3"]
    resumed = weights("train.steps=4", "seed=3")
    assert resumed[0] == "warning: train.steps was 2, is 4"
    assert resumed[1:] == [f"weights raw and averaged, with the optimizer, of {run}/step_0000002, step 2"]
    start = ("train.steps=1", "name=second", "init_from=results/digits-tread", "init_weights=model", "objective=rf")
    said = weights(*start)
    assert said[0] == f"weights raw (model) of {run}/step_0000004/model.safetensors, step 4"
    assert said[1:] == ["warning: objective was edm where these weights were trained, but is rf now"]
    kept = RunLog(tmp_path / "results" / "second").starts()[-1]
    assert [f"weights {kept['weights']}", *(f"warning: {one}" for one in kept["warnings"])] == said
    again = weights(*start, "train.steps=2")
    assert len(again) == 2 and again[1].endswith("second/step_0000001, step 1; init_from was read when the run began")
