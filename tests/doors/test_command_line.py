"""--help, refusals and Hydra's own options of every script, opened as the command line does, in this process.

References: the scripts' own keys, the config files as YAML and as Hydra composes them, and Python's exit codes.
"""

import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from test_pages import DOORS

from tread.runtime import foreign_names, schema

SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for folder in ("scripts", "benchmarks", "studies")
    for path in (ROOT / folder).glob("*.py")
    if '__name__ == "__main__"' in path.read_text()
)


@pytest.fixture
def ask(monkeypatch, capfd, tmp_path):
    """A function from a script and its words to what it prints, its error included, and its exit code."""

    def run(script: str | Path, *words: str) -> tuple[str, int]:
        monkeypatch.setattr(sys, "argv", [str(script), *words])
        monkeypatch.setattr(sys, "path", [str((ROOT / script).parent), str(ROOT), *sys.path])
        monkeypatch.setenv("HYDRA_FULL_ERROR", "")
        monkeypatch.chdir(tmp_path)
        error = code = 0
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as ended:  # Python prints what is no number, and ends with 1
            error, code = ended.code or 0, ended.code if isinstance(ended.code, int) else 1
        return "".join(capfd.readouterr()) + str(error or ""), code

    return run


def test_help_says_what_a_script_does_with_its_keys_and_five_usual_overrides(ask):
    for script in sorted({*DOORS, *SCRIPTS}):
        text, code = ask(script, "some=thing", "-h")
        first = (ROOT / script).read_text().removeprefix('"""').partition("\n")[0]
        assert code == 0 and text.startswith(first) and len(first) > 20, script
        assert text.count("\n") <= 65, script
        if script not in DOORS:
            continue
        config, known, _ = DOORS[script]
        for line in yaml.safe_dump(yaml.safe_load((ROOT / f"configs/{config}.yaml").read_text())).splitlines():
            key = line.partition(":")[0]
            assert key == "hydra" or not re.fullmatch(r"\w+", key) or f"\n{key}:" in text, key
        usual = re.search(r"Usual overrides:\n((?:#   .+\n)+)", text)[1].splitlines()
        assert len(usual) == 5, script
        for line in usual:
            words = shlex.split(re.split(r" {2,}", line.removeprefix("#").strip())[0])
            schema.check_overrides(words, known)
            for group, _, choice in (word.partition("=") for word in words):
                folder = ROOT / "configs" / group
                assert not folder.is_dir() or (folder / f"{choice}.yaml").is_file(), line


def test_every_key_has_its_comment():
    """Without one are only those that a group's first line explains, and the numbers that a choice stands for."""
    text = "\n".join(path.read_text() for path in (ROOT / "configs").rglob("*.yaml"))
    plain = set("name architecture embedded channels size num_classes kind sweep edm rf strong weak scale".split())
    for config in {config for config, _, _ in DOORS.values()}:
        groups = ["guidance=sparse"] if config in ("sample", "fid", "guidance_sweep") else []
        with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "configs")):
            tree = OmegaConf.to_container(compose(config, groups))
        keys = {*tree, *(key for part in tree.values() if isinstance(part, dict) for key in part)}
        for key in keys - plain:
            assert re.search(rf"^[# -]*{key}:.*# ", text, re.M), key


def test_help_all_adds_the_files_that_a_config_extends(ask):
    assert "max_bad_steps:" not in ask("train.py", "--help")[0]
    for script in ("train.py", "scripts/import_checkpoint.py"):
        assert "max_bad_steps:" in ask(script, "--help", "all")[0]


def test_help_of_a_wheels_command_needs_no_config_that_composes(tmp_path, ask):
    """A wheel's entry points lie in tread/doors, with configs/ beside them."""
    folder = tmp_path / "doors"
    shutil.copytree(ROOT / "configs", folder / "configs")
    shutil.copy(ROOT / "sample.py", folder)
    with (folder / "configs/sample.yaml").open("a") as file:
        file.write("broken: [1\n")
    text, code = ask(folder / "sample.py", "--help", "guidance=nothing")
    assert code == 0 and "tread-sample checkpoint=" in text and "python sample.py" not in text


@pytest.mark.parametrize("script", ["scripts/quickstart.sh", "scripts/slurm.sh", "scripts/test.sh"])
def test_help_of_shell_scripts_is_their_head(tmp_path, script):
    done = subprocess.run(["bash", ROOT / script, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr and 1 < done.stdout.count("\n") < 10
    assert done.stdout.splitlines()[0] in (ROOT / script).read_text() and "set -" not in done.stdout


@pytest.mark.parametrize(
    "word, shown",
    [
        ("train.btach_size=3", "unknown setting 'train.btach_size'; the nearest known one is 'train.batch_size'"),
        ("epochs=3", "unknown setting 'epochs'; here it is 'train.steps': optimizer steps, not epochs"),
        ("every.checkpoint=10", "unknown setting 'every.checkpoint'; here it is 'every.save'"),
        ("model.depth=", "model.depth is '', but must be int"),
        ("optim.lr=nan", "optim.lr is nan, but must be positive and finite"),
        ("wandb=true", "wandb is True, but must be a section with keys: project"),
        ("model=tred", "Could not find 'model/tred'"),
        ("foo", "foo"),
        ("train.steps=1.5", "train.steps is 1.5, but must be int"),
        ("train.steps=1e21", "train.steps is 1000000000000000000000, but must lie in 1 to 10^12: more take decades"),
        ("eval.points=1e15", "eval.points is 1000000000000000, but must be positive and below 2³¹"),
        ("model.hidden_size=1e8", "make 4.8e+17 parameters or more, with gradients, optimizer and averages 9.6e+06 TB"),
        ("name=a=b=c", "name=a=b=c"),
        ("train.steps=1,2", "Ambiguous value for argument 'train.steps=1,2'"),
        ("train.steps=1,3", "3. For several runs, give one command for each value, each with its own name="),
        ("-m", "would run the first value alone: give one command for each value, each with its own name="),
        ("--multirun", "-m and --multirun would run the first value alone"),
        ("dataset.path=nowhere", "nowhere does not exist: latents of your own need dataset=folder; digits are written"),
        ("dataset.path=~/nowhere", f"{Path.home()}/nowhere does not exist"),
        ("dataset.heldout=digits", "digits does not exist: latents of your own need dataset=folder"),
        ("model.routes.5.end=3", "model.routes.5.end=3"),
        ("name=${nothing}", "name: Interpolation key 'nothing' not found"),
        ("--seed=3", "'--seed=3' is written 'seed=3', without dashes"),
        ("--sede=3", "unrecognized arguments: --sede=3"),
        ("dit", "'dit' is no setting, which is written key=value"),
        ("guidance=cfg", "unknown setting 'guidance'; --help all prints all"),
    ],
)
def test_a_word_that_is_refused_is_named_without_a_traceback(ask, word, shown):
    text, code = ask("train.py", word)
    assert shown in text and "error: " in text and "Traceback" not in text and code in (1, 2)


@pytest.mark.parametrize(
    "added, shown",
    [
        ("optim: [1", r'(?s)expected .,. or .\].*config.yaml", line {end}'),
        ("train: {epochs: 3}", "unknown setting 'train.epochs'; here it is 'train.steps'"),
        ("name: ${nothing}", "name: Interpolation key 'nothing' not found"),
    ],
)
def test_what_is_wrong_in_config_yaml_is_named(ask, tmp_path, added, shown):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    shutil.copy(ROOT / "train.py", tmp_path)
    config = tmp_path / "configs/config.yaml"
    config.write_text(config.read_text() + "\n" + added + "\n")
    end = config.read_text().count("\n") + 1
    text, code = ask(tmp_path / "train.py")
    assert re.search(shown.replace("{end}", str(end)), text) and "Traceback" not in text and code == 1


def test_each_script_refuses_a_word_that_it_does_not_know(ask):
    for script in DOORS:
        text, code = ask(script, "sourcs=a")
        assert "error: unknown setting 'sourcs'" in text and "Traceback" not in text and code == 1, script


def test_a_mapping_names_each_key_once():
    """Hydra takes the last of two, silently."""
    for words in ("{3: gold, 4: gold}", "[{match: a, lr: 1}, {match: b, lr: 0}]", "{a: {b: 1}, c: {b: 1}}"):
        schema.check_overrides([f"init_classes={words}"], ["init_classes"])
    for words in ("{3:gold,3:silver}", "{gold: 1, silver: 2, gold: 3}"):
        with pytest.raises(ValueError, match=f"^init_classes={words} names (3|gold) twice$"):
            schema.check_overrides([f"init_classes={words}"], ["init_classes"])


def test_hydras_own_options_are_left_to_it(ask):
    for words, shown in (
        (("--cfg", "job", "seed=7", "train.steps=-1"), "seed: 7"),
        (("--cfg=job", "train.steps=-1"), "a run also checks them"),
        (("--info", "defaults"), "model/tread"),
        (("--cfg=job", "--resolve", "--package", "optim"), "lr: 0.004"),
    ):
        assert shown in ask("train.py", *words)[0]


def test_foreign_names_are_refused_and_ours_are_told():
    for script, foreign, ours in (
        ("train.py", "optim.learning_rate", "optim.lr"),
        ("train.py", "learning-rate", "optim.lr"),
        ("train.py", "bs", "train.batch_size"),
        ("train.py", "eval.bs", "eval.batch_size"),
        ("train.py", "evaluation.batch_size", "eval.batch_size"),
        ("train.py", "mixed_precision", "train.precision"),
        ("train.py", "resume_from", "resume"),
        ("train.py", "ckpt", "init_from"),
        ("sample.py", "ckpt", "checkpoint"),
        ("sample.py", "seed", "seeds"),
        ("sample.py", "num_inference_steps", "steps"),
        ("fid.py", "ref_batch", "reference"),
        ("scripts/prepare_latents.py", "image_size", "resolution"),
    ):
        with pytest.raises(ValueError, match=rf"^unknown setting '{foreign}'; .* '{re.escape(ours)}'"):
            schema.check_overrides([f"{foreign}=3"], DOORS[script][1])


def test_the_table_of_foreign_names_names_keys_of_ours_and_hides_none():
    keys = {key for _, known, _ in DOORS.values() for key in known}
    for line in foreign_names._TABLE.strip().splitlines():
        assert {*line.partition(" | ")[0].split()} <= keys, line
    for _, known, _ in DOORS.values():
        schema.check_overrides([f"{key}=1" for key in known], known)
