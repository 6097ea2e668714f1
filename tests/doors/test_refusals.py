"""What Hydra refuses, at the real doors in this process: one line that begins with `error:`, and exit code 1.

The references are Python's own exits, and the configs' file names.
"""

from __future__ import annotations

import runpy
import shutil
import sys

import pytest
from conftest import ROOT


@pytest.fixture
def refusal(monkeypatch, tmp_path, capfd):
    """A function from a door and its words to the line it ends with."""

    def run(door, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(door), *words])
        monkeypatch.setattr(sys, "path", [str((ROOT / door).parent), str(ROOT), *sys.path])
        monkeypatch.setenv("HYDRA_FULL_ERROR", "")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / door), run_name="__main__")
        printed = "".join(capfd.readouterr())
        assert not printed and isinstance(ended.value.code, str)  # Python prints it, and ends with 1
        assert ended.value.code.startswith("error: ") and "\n" not in ended.value.code
        assert "full_key" not in ended.value.code and "Traceback" not in ended.value.code
        return ended.value.code.removeprefix("error: ")

    return run


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        (
            "model=tred",
            "there is no model=tred; the nearest is tread; there are dit, dit_text, lightning, lightning_text, "
            "mamba, maskdit, rwkv, sprint, tread, tread_",
        ),
        ("experiment=imagenet_b2", "there is no experiment=imagenet_b2; the nearest is imagenet256_b2; there are "),
        ("experiment=null", "~experiment takes one away"),
        ("foo", "'foo' is no setting: they are written key=value"),
        ("results/digits-tread", "'results/digits-tread' is no setting"),
        ("=", "'=' is no setting"),
        ("model.depth=", "model.depth is '', but must be int"),
        ("name=a=b=c", "name=a=b=c can't be read; as text it is written \"name='a=b=c'\", both quotes included"),
        ("name=[a", "name=[a can't be read"),
        ("name={a", "name={a can't be read"),
        ("name=(a", "name=(a can't be read"),
        ("name='a", "name='a can't be read"),
        ("train.steps=1,2", "Ambiguous value for argument 'train.steps=1,2'"),
        ("+seed=1", "An item is already at 'seed'"),
        ("~optim.nope", "'optim.nope' does not exist"),
        ("model.routes.5.end=3", "model.routes.5.end=3; the list has no such entry"),
        ("model.routes.0=3", "unknown setting 'model.routes.0'"),
        ("name=${nothing}", "name: Interpolation key 'nothing' not found"),
        ("hydra.foo=1", "Key 'foo' not in 'HydraConf'"),
        ("optim.lr=nan", "optim.lr is nan, but must be positive and finite"),
        ("optim.final_lr=nan", "optim.final_lr is nan, but must be a finite number"),
        ("optim.weight_decay=inf", "optim.weight_decay is inf, but must be a finite number"),
        ("optim.lr=1e400", "optim.lr is inf"),
        ("wandb=true", "wandb is True, but must be a section with keys: project"),
        ("+edm.default_steps=3", "unknown setting 'edm.default_steps'"),
        ("--lr=3", "--lr=3 is no option: settings are written key=value, without dashes; here it is 'optim.lr'"),
        ("--seed", "without dashes: seed=…"),
        ("--cfg=jobs", "--cfg is followed by 'jobs', but must be by one of job, hydra, all"),
        ("--config-name", "--config-name needs a word behind it"),
        ("--resolve", "can only be used in conjunction with --cfg"),
        ("epochs=3", "unknown setting 'epochs'; here it is 'train.steps'"),
    ],
)
def test_words_that_hydra_refuses(refusal, word, shown):
    assert shown in refusal("train.py", word)


@pytest.mark.parametrize("door", ["sample.py", "fid.py", "scripts/prepare_latents.py", "scripts/guidance_sweep.py"])
def test_the_other_doors_refuse_alike(refusal, door):
    assert refusal(door, "out=[a").startswith("out=[a can't be read")
    if "latents" not in door:
        assert "there is no guidance=cgf; the nearest is cfg; there are autoguidance, cfg" in refusal(
            door, "guidance=cgf"
        )


@pytest.mark.parametrize(
    ("added", "shown"),
    [
        ("optim: [1", "config.yaml, line {end}, column 1: expected ',' or ']'"),
        ("optim:\n\tlr: 3", "config.yaml, line {end}, column 1: found character"),
        ("seed: 1\nseed: 2", "config.yaml, line {end}, column 1: found duplicate key seed"),
        ("trian: {steps: 3}", "unknown setting 'trian'; the nearest known one is 'train'"),
        ("train: {epochs: 3}", "unknown setting 'train.epochs'; here it is 'train.steps'"),
        ("optim: 3", "optim is 3, but must be a section with keys: lr"),
        ("optim: {lr: .nan}", "optim.lr is nan"),
        ("name: ${nothing}", "name: Interpolation key 'nothing' not found"),
        ("name: ${", "no viable alternative"),
        ("# \udcff", "a file of configs/ is not UTF-8"),
    ],
)
def test_typos_in_config_yaml(refusal, tmp_path, added, shown):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    shutil.copy(ROOT / "train.py", tmp_path)
    config = tmp_path / "configs" / "config.yaml"
    text = config.read_text() + "\n" + added + "\n"
    config.write_text(text, errors="surrogateescape")
    lines = text.count("\n") + (added == "optim: [1")
    assert shown.format(end=lines) in refusal(tmp_path / "train.py")


def test_a_choice_in_config_yaml_that_is_not_there(refusal, tmp_path):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    shutil.copy(ROOT / "train.py", tmp_path)
    config = tmp_path / "configs" / "config.yaml"
    config.write_text(config.read_text().replace("- model: tread ", "- model: tred "))
    assert refusal(tmp_path / "train.py").startswith("there is no model=tred; the nearest is tread")
    config.write_text(config.read_text().replace("- model: tred ", "- modle: tread "))
    assert refusal(tmp_path / "train.py").startswith("there is no ")


def test_hydras_own_options_are_left_to_it(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    for words, shown in [
        (("--cfg", "job", "seed=7"), "seed: 7"),
        (("-c", "job", "--package", "optim"), "lr: 0.004"),
        (("--info", "defaults"), "model/tread"),
        (("--cfg=job", "--resolve"), "name: digits-tread"),
    ]:
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
        assert shown in capsys.readouterr().out
