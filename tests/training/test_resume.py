"""Going on with a run: whose settings it has, and what is said of those that differ.

The reference is the run's own record, its run.json, and what was typed, by hand."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, TINY, launch, launch_door, launch_processes, records, take_samples
from omegaconf import OmegaConf

import train
from tread.checkpoints.run_log import RunLog
from tread.reports.report import troubles_of
from tread.reports.runs import find_run
from tread.runtime.files import sha256
from tread.training import settings
from tread.training.resume import keys_of, settle, take_typed
from tread.training.run_folder import migrate

RUN = Path("results/digits-tread")
CONFIGS = ROOT / "configs"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    launch(folder, "train.steps=3", "optim.lr=0.003")
    return folder


@pytest.fixture
def begun(trained, tmp_path):
    """A folder with a copy of a run of three steps."""
    shutil.copytree(trained, tmp_path, symlinks=True, dirs_exist_ok=True)
    return tmp_path


def resume(folder, *typed):
    return launch_door(train.main, "config", folder, *typed)


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def warnings(text):
    """All but that on the route of a network of six blocks."""
    found = [line for line in text.splitlines() if line.startswith("warning: ")]
    return [line for line in found if "the routes save little" not in line]


def own(folder):
    return RunLog(folder / RUN).starts()[-1]["config"]


# ------------------------------------------------------------------------------------ by the folder


def test_a_folder_alone_goes_on_by_the_runs_own_settings(begun):
    """Then for longer; then moved, with no more of the old place than its name."""
    before = own(begun)
    text = resume(begun, f"run={RUN}/")
    assert text.startswith(f"{RUN} is finished: train.steps above 3") and warnings(text) == []
    assert own(begun) == before and {path.name for path in begun.iterdir()} == {"data", "results"}
    text = resume(begun, f"run={RUN}", "train.steps=2")
    assert text.count("steps") == 1 and "goes on" not in text and "step/s" not in text
    text = resume(begun, f"run={RUN}", "train.steps=4")
    assert warnings(text) == ["warning: train.steps was 3, is 4"]
    assert own(begun) == {**before, "train": {**before["train"], "steps": 4}}
    assert [record["step"] for record in records(begun / RUN) if "loss" in record] == [1, 2, 3, 4]
    (begun / RUN).rename(begun / "moved")
    text = resume(begun, "run=moved")
    assert "moved is finished: train.steps above 4" in text and warnings(text) == []
    again = RunLog(begun / "moved").starts()[-1]["config"]
    assert (again["name"], again["results"], again["train"]["steps"]) == ("moved", ".", 4)


def test_a_finished_run_keeps_its_record(begun):
    """Typed keys are named, but the report's; a later start with more steps takes them."""
    before, config = own(begun), (begun / RUN / "config.yaml").read_text()
    text = resume(begun, f"run={RUN}", "optim.lr=0.001", "eval.points=32", "report=false", "train.steps=2")
    line = f"warning: {RUN} is finished, its record stays: optim.lr, eval.points had no effect"
    assert warnings(text) == [line] and own(begun) == before and (begun / RUN / "config.yaml").read_text() == config
    with pytest.raises(SystemExit, match="seed: 0 there, 1 here"):
        resume(begun, f"run={RUN}", "seed=1", "optim.lr=0.001")
    text = resume(begun, f"run={RUN}", "optim.lr=0.001", "train.steps=4")
    assert own(begun)["optim"]["lr"] == 0.001 and "optim.lr was 0.003, is 0.001" in text


def test_plugins_typed_for_a_run_that_needs_others_fail_before_the_record(begun):
    path = begun / RUN / "run.json"
    (begun / "needed.py").write_text("raise KeyError('imported')")
    starts = json.loads(path.read_text())
    path.write_text(json.dumps([{**starts[0], "config": {**own(begun), "plugins": [str(begun / "needed.py")]}}]))
    with pytest.raises(SystemExit, match="needed.py, which can't be imported: KeyError: 'imported'"):
        resume(begun, f"run={RUN}")
    assert "is finished" in resume(begun, f"run={RUN}", "plugins=[]") and own(begun)["plugins"] == []


def test_a_folder_without_run_json_goes_on_by_its_checkpoint(begun):
    before = own(begun)
    (begun / RUN / "run.json").unlink()
    assert warnings(resume(begun, f"run={RUN}")) == [] and own(begun) == before


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        (("run=results/digits-tred",), "results/digits-tred does not exist; near it: run=results/digits-tread"),
        (("run=results",), "results holds no run; near it: run=results/digits-tread"),
        (("run=results/digits-tread/latest",), "latest holds no run; near it: run=results/digits-tread"),
        (("run=data/digits",), "data/digits holds no run; near it: no run either"),
        (("run=results/digits-tread", "name=x"), "so name=… and results=… can't be set as well"),
        (("run=results/digits-tread", "resume=false"), "holds a run already"),
        (("run=results/digits-tread", "seed=1"), "  seed: 0 there, 1 here"),
    ],
)
def test_what_is_refused_says_what_is_there_and_touches_nothing(begun, typed, shown):
    before = content(begun)
    with pytest.raises(SystemExit) as error:
        resume(begun, *typed)
    assert shown in str(error.value) and content(begun) == before


def test_latents_that_changed_under_a_run_are_named(begun):
    """Touched; overwritten by as many bytes, with the old and with a new hash in the index; and by an older record.
    Also the held-out latents, unless others are named."""
    shard, record = begun / "data/digits/train/shard-00000.npy", begun / RUN / "run.json"
    steps, index = iter(range(4, 100)), shard.with_name("index.json")

    def said(*typed):
        found = warnings(resume(begun, f"run={RUN}", f"train.steps={next(steps)}", *typed))
        return [line for line in found if "shard-00000.npy changed since the run began" in line]

    assert said() == []
    heldout = begun / "data/digits/heldout/shard-00000.npy"
    os.utime(heldout, (0, 0))
    [line] = said()
    assert f"{heldout.parent.name}/{heldout.name} changed" in line and said("dataset.heldout=null") == []
    os.utime(heldout, (int(shard.stat().st_mtime),) * 2)
    os.utime(shard, (0, 0))
    [line] = said("dataset.heldout=null")
    assert f", is {shard.stat().st_size} bytes of 1970-01-01 00:00:00+00:00. Its latents" in line
    assert any(line.endswith(text) for text in troubles_of(find_run(begun / RUN)))
    assert said("dataset.verify=full") == []
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(SystemExit, match="shard-00000.npy was changed: its sha256"):
        said("dataset.verify=full")
    facts = json.loads(index.read_text())
    facts["shards"][0]["file_sha256"] = sha256(shard)
    index.write_text(json.dumps(facts))
    assert len(said("dataset.verify=full")) == 1
    starts = RunLog(begun / RUN).starts()
    record.write_text(json.dumps([{k: v for k, v in start.items() if k != "files"} for start in starts]))
    assert said() == []


@pytest.mark.slow
def test_two_processes_go_on_by_the_folder(begun):
    done = launch_processes(begun, f"run={RUN}", "train.steps=5", processes=2)
    assert "8 = 2 processes" in done and [s["processes"] for s in RunLog(begun / RUN).starts()] == [1, 2]


# ----------------------------------------------------------------------------- what was typed, or not


def test_what_was_not_typed_stays_and_says_how_to_take_it(begun):
    """The run was begun with more typed than it goes on with."""
    before = own(begun)
    kept = [word for word in TINY if not word.startswith(("model.hidden_size", "every.log", "train.cpu_threads"))]
    text = resume(begun, *kept, "train.steps=4", "train.cpu_threads=1")
    assert "goes on at step 3" in text
    assert warnings(text) == [
        "warning: train.steps was 3, is 4",
        "warning: settings stay as the run has them: model.hidden_size 16 (not 96), optim.lr 0.003 (not 0.004), "
        "every.log 1 (not 50); key=value changes one, but model.hidden_size can't change in a run, "
        "so take another name=…",
    ]
    assert own(begun) == {**before, "train": {**before["train"], "steps": 4}}


def test_a_changed_config_yaml_is_not_taken_by_an_old_run(composed, tmp_path, monkeypatch):
    """With run=… as with the command again; a run's own model, dataset or experiment typed again changes nothing."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(CONFIGS, tmp_path / "configs")
    config = tmp_path / "configs" / "config.yaml"
    config.write_text(config.read_text() + "\noptim:\n  betas: [0.9, 0.95]\n")
    experiment = "experiment=imagenet256_b2"
    before = composed(experiment, "train.steps=9")
    log = RunLog(tmp_path / "results" / before["name"])
    log.start(0, before)
    log.close()
    run = tmp_path / "results" / before["name"] / "run.json"
    run.write_text(json.dumps([{**log.starts()[0], "command": ["train.py", experiment, "train.steps=9"]}]))
    line = "warning: optim.betas stays [0.9,0.999], as the run has it, although config.yaml says [0.9,0.95]; "
    line += "'optim.betas=[0.9,0.95]' takes that"

    def today(*typed):
        tree = composed(*typed)
        tree["optim"]["betas"] = [0.9, 0.95]
        return settle(tree, typed, tmp_path / "configs")

    assert today(f"run=results/{before['name']}") == (before, [line])
    rest = "warning: settings stay as the run has them: train.steps 9 (not 400000); key=value changes one"
    assert today(experiment) == (before, [line, rest])
    found, said = today(experiment, "optim.betas=[0.9,0.95]", "train.steps=9")
    assert (found["optim"]["betas"], said) == ([0.9, 0.95], [])
    # one that is not the run's own is typed: what its file sets, and the files that it chooses
    found, _ = today("experiment=imagenet256_xl2_finetune", f"name={before['name']}")
    assert (found["model"]["depth"], found["model"]["name"], found["optim"]["lr"]) == (28, "dit", 1e-5)
    assert found["optim"]["betas"] == [0.9, 0.999] and found["model"]["routes"] == []
    # an earlier one of the run, typed after another; and one in a folder of one's own
    other = "experiment=imagenet256_xl2_finetune"
    for commands, rate in (([other, experiment], 1e-5), ([experiment, other], before["optim"]["lr"])):
        run.write_text(json.dumps([{**log.starts()[0], "command": ["train.py", command]} for command in commands]))
        assert today(other, f"name={before['name']}")[0]["optim"]["lr"] == rate
    (tmp_path / "my own/experiment").mkdir(parents=True)
    (tmp_path / "my own/experiment/own.yaml").write_text("# @package _global_\noptim:\n  lr: 1e-5\n")
    tree = composed("train.steps=9")
    tree["optim"]["lr"], tree["name"] = 1e-5, before["name"]
    run.write_text(json.dumps([{**log.starts()[0], "command": ["train.py", experiment]}]))
    for typed in (["--config-dir", "my own"], ["--config-dir=my own"], ["-cd", str(tmp_path / "my own")]):
        found, _ = settle(tree, [*typed, "experiment=own", f"name={before['name']}"], CONFIGS)
        assert found["optim"]["lr"] == 1e-5 and found["model"]["depth"] == 12


def test_the_home_folder_is_meant_by_its_sign(composed, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settle(composed("results='~/runs'"), ["results='~/runs'"], CONFIGS)[0]["results"] == f"{tmp_path}/runs"


def test_a_name_typed_as_if_it_chose_a_model_is_told(composed, tmp_path, monkeypatch):
    """It is told unless that model is chosen too; a name that no file has is one's own."""
    monkeypatch.chdir(tmp_path)
    for typed, told in (
        (["model.name=lightning"], ["warning: model.name=lightning only changes a name: model=lightning chooses"]),
        (["model=dit", "dataset.name=emoji"], ["warning: dataset.name=emoji only changes a name: dataset=emoji"]),
        (["model=dit", "model.name=dit"], []),
        (["model.name=my-dit"], []),
    ):
        _, said = settle(composed(*typed), typed, CONFIGS)
        assert len(said) == len(told) and all(map(str.startswith, said, told))


def test_settings_that_a_kill_kept_from_a_checkpoint_are_kept_with_a_word(begun):
    """Typed at the last start, whose process died before it saved: run.json knows, the checkpoint does not."""
    path = begun / RUN / "run.json"
    starts = json.loads(path.read_text())
    checkpoints = own(begun)["checkpoints"] | {"keep_last": 77}
    path.write_text(json.dumps([*starts, {**starts[0], "config": {**own(begun), "checkpoints": checkpoints}}]))
    assert warnings(resume(begun, f"run={RUN}")) == ["warning: checkpoints.keep_last was null, is 77"]


def test_keys_that_are_younger_than_the_run_have_todays_default(begun):
    for path in (begun / RUN / "run.json", begun / RUN / "latest" / "info.json"):
        text = path.read_text()
        path.write_text(text.replace('"tracker": "none",', "").replace('"wandb": {', '"wandb": {"enabled": false,'))
        assert path.read_text() != text and '"rejoin": null' in text
        path.write_text(re.sub(r',\s*"rejoin": null', "", path.read_text()))
    assert warnings(resume(begun, f"run={RUN}")) == [] and own(begun)["tracker"] == "none"


def test_options_of_an_optimizer_are_typed_as_a_whole_and_each_is_told(begun):
    resume(begun, f"run={RUN}", "train.steps=4", "optim.name=sgd", "optim.options={momentum: 0.9}")
    text = resume(begun, f"run={RUN}", "train.steps=5", "optim.options={momentum: 0.9, nesterov: true}")
    assert "warning: optim.options.nesterov was nothing, is true" in text and "begins anew" in text
    resume(begun, f"run={RUN}", "train.steps=6", "optim.name=adamw", "optim.options={amsgrad: true}")
    assert own(begun)["optim"]["options"] == {"amsgrad": True}


def test_a_setting_of_newer_code_is_told_with_its_file(begun):
    """In the run's record, at going on; in the checkpoint's, at sampling and where there is no run.json."""
    record, info = begun / RUN / "run.json", begun / RUN / "step_0000003/info.json"
    for file in (record, info):
        file.write_text(file.read_text().replace('"patch_size": ', '"patches": 3, "patch_size": ', 1))
    for file in (record, info):
        with pytest.raises(SystemExit, match=f"{file.relative_to(begun)}: unknown setting 'model.patches'"):
            resume(begun, f"run={RUN}")
        record.unlink(missing_ok=True)
    with pytest.raises(SystemExit, match=f"{info}: unknown setting 'model.patches'"):
        take_samples(begun, f"checkpoint={RUN}")


def test_typed_values_are_taken_one_by_one():
    before = {"a": {"x": 1, "y": 2}, "routes": [{"s": 0, "r": 0.5}], "other": [1]}
    before["train"] = {"ratio_schedule": {"s": 1}}
    now = {"a": {"x": 3, "y": 4, "z": 5}, "routes": [{"s": 7, "r": 0.3}], "other": [2], "new": 6}
    now["train"] = {"ratio_schedule": {"s": 2, "t": 3}}
    assert take_typed(before, now, {"a.y", "routes.0.r"}) == {
        "a": {"x": 1, "y": 4, "z": 5},
        "routes": [{"s": 0, "r": 0.3}],
        "other": [1],
        "new": 6,
        "train": {"ratio_schedule": {"s": 1}},
    }
    assert take_typed(before, now, {"routes", "train.ratio_schedule"})["routes"] == now["routes"]
    assert take_typed({"routes": []}, now, {"routes.0.r"})["routes"] == now["routes"]  # no such route: to be refused


def test_the_keys_of_a_file_are_what_it_sets():
    raw = OmegaConf.to_container(OmegaConf.load(CONFIGS / "experiment" / "imagenet256_xl2_finetune.yaml"))
    found = keys_of([CONFIGS], "experiment/imagenet256_xl2_finetune")
    assert {"name", "init_from", "model.depth", "optim.lr"} <= found and raw["optim"].keys() == {"lr"}
    assert {"model.routes", "dataset.path"} <= found and "train.precision" not in found
    assert keys_of([CONFIGS], "config") == {"hydra.run", "hydra.output_subdir"}
    assert keys_of([CONFIGS], "model/null") == set()
    cifar10 = keys_of([CONFIGS], "experiment/cifar10_s2")  # what cifar10_b2 builds on
    assert "optim.warmup_steps" in cifar10 <= keys_of([CONFIGS], "experiment/cifar10_b2")


def test_refusals_name_each_key(begun):
    """Inside lists too, and nothing that is alike."""
    with pytest.raises(SystemExit) as error:
        resume(begun, f"run={RUN}", "model.routes.0.selection_ratio=0.3", "train.label_drop=0.2", "optim.lr=1")
    lines = str(error.value).splitlines()
    assert "holds a run with other settings; name=<another name> starts a run of its own" in lines[0]
    expected = {"  train.label_drop: 0.1 there, 0.2 here", "  model.routes.0.selection_ratio: 0.5 there, 0.3 here"}
    assert set(lines[1:]) == expected
    with pytest.raises(SystemExit) as error:
        resume(begun, "model=dit", "name=digits-tread")
    assert "  model.name: tread there, dit here\n" in str(error.value)
    (line,) = [line for line in str(error.value).splitlines() if "model.routes" in line]
    assert line.startswith("  model.routes.0: {") and line.endswith("} there, nothing here")


def test_a_run_keeps_the_options_of_its_architecture(begun, composed, monkeypatch):
    """Whatever the model of config.yaml has; the reference is the run's own record."""
    monkeypatch.chdir(begun)
    model = own(begun)["model"]
    assert model["architecture"] == "dit" and not {"norm", "state", "decoder_depth"} & model.keys()
    today = composed(f"run={RUN}", "model=tread_lightning", "model.qk_norm=true")
    config, _ = settle(today, [f"run={RUN}"], CONFIGS)
    assert config["model"] == model
    config, _ = settle(today, [f"run={RUN}", "model.qk_norm=true"], CONFIGS)
    with pytest.raises(ValueError, match="model.qk_norm is True, but dit has no such choice"):
        settings.read(config)


def test_an_old_record_says_which_tracker_and_whether_blocks_are_computed_again():
    """False was every run's default, and leaves the choice open; what other keys the section has stays."""
    for again, memory in ((True, "checkpointing"), (False, "auto"), (None, "auto")):
        train = migrate({"train": {"activation_checkpointing": again, "steps": 3}})["train"]
        assert (train["activation_checkpointing"], train["memory"], train["steps"]) == (None, memory, 3)
    config = migrate({"wandb": {"enabled": True, "project": "p"}})
    assert (config["tracker"], config["wandb"]) == ("wandb", {"project": "p"})
    assert migrate({"wandb": {"enabled": False}})["tracker"] == "none"
