"""A network of a user's own: class, options and config file in a folder of theirs, no file of the project touched.

The reference is DiT's run of the same seed: a network of DiT's blocks must train to the same weights, bit for bit."""

import itertools
import os
import sys
import textwrap
from functools import partial
from pathlib import Path

import export_checkpoint
import pytest
import torch
from conftest import ROOT, TINY, launch, launch_door, read_json, same, score, take_samples, write_json
from forked import run_python

import tread
from routing_module import REJOINS, RULES
from tread.checkpoints import checkpoint
from tread.checkpoints.run_log import RunLog
from tread.diffusion.edm import EDM
from tread.evaluation.metric_table import METRICS
from tread.models.architectures import ARCHITECTURES
from tread.reports.comparison import cautions, open_groups
from tread.routing.ids import Token
from tread.runtime import plugins
from tread.runtime.cli import named_plugins
from tread.runtime.files import sha256
from tread.runtime.plugins import check_plugin, import_plugins
from tread.training.alignment import Alignment
from tread.training.optimizers import OPTIMIZERS

MODULE = '''
    """Blocks of DiT's with as many heads as a block has channels over `head_width`."""

    from dataclasses import dataclass

    from dit import DiTBlock
    from tread.models.architectures import ARCHITECTURES, NetworkOptions
    from tread.models.backbone import Backbone
    from tread.runtime.schema import Count


    class Mine(Backbone):
        def __init__(
            self, input_size, patch_size, in_channels, hidden_size, depth, num_classes, learn_sigma, init, mlp_ratio,
            head_width,
        ):
            super().__init__(
                lambda: DiTBlock(hidden_size, hidden_size // head_width, mlp_ratio),
                input_size, patch_size, in_channels, hidden_size, depth, num_classes, learn_sigma, init,
            )


    @dataclass(frozen=True)
    class MyOptions(NetworkOptions):
        head_width: Count = 4

        network = Mine


    ARCHITECTURES["mine"] = MyOptions
'''
CONFIG = """
    # @package _global_
    model:
      name: mine
      architecture: mine
      routes: [{start: 2, end: -4, selection_ratio: 0.5, fp32: auto, select: token, rejoin: null}]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with module and config; the tables are as before behind it."""
    monkeypatch.setitem(ARCHITECTURES, "mine", ARCHITECTURES["dit"])
    del ARCHITECTURES["mine"]
    (tmp_path / "mine.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "mine/model").mkdir(parents=True)
    (tmp_path / "mine/model/mine.yaml").write_text(textwrap.dedent(CONFIG).lstrip())
    return tmp_path


def test_a_network_of_ones_own_trains_resumes_samples_and_is_exported(folder):
    given = ("--config-dir", str(folder / "mine"), "plugins=[mine.py]", "model=mine", "model.head_width=8")
    done = run_python(ROOT / "train.py", *given, *TINY, "train.steps=2", "name=run", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mine, " in done.stdout and "r(2→2) keeps 8 of 16 tokens" in done.stdout
    launch(folder, "train.steps=2", "name=dit")  # heads of 8 channels too
    assert same(folder / "results/run", folder / "results/dit")
    config = checkpoint.find(folder / "results/run").info["config"]
    assert config["plugins"] == [str(folder / "mine.py")] and config["model"]["head_width"] == 8
    assert not {"num_heads", "norm", "state"} & config["model"].keys()
    assert "mine" not in ARCHITECTURES  # the checkpoint's own record brings it
    other = folder / "elsewhere"
    other.mkdir()
    few = ("steps=2", "classes=[1]", "seeds=0")
    take_samples(other, f"checkpoint={folder}/results/run", *few, "out=a.png")
    launch_door(export_checkpoint.main, "export_checkpoint", other, f"checkpoint={folder}/results/run", "out=given")
    score(other, "checkpoint=given", "num_samples=4", "batch_size=4", "steps=2")
    launch(folder, "run=results/run", "train.steps=3")
    assert checkpoint.find(folder / "results/run").step == 3


def fresh(monkeypatch):
    """Forget all plugins, as a new process would."""
    monkeypatch.setattr(plugins, "_imported", {})
    for name in [name for name in sys.modules if name.endswith("/mine.py")]:
        monkeypatch.delitem(sys.modules, name)


def test_a_changed_plugin_is_told_at_going_on_and_at_sampling(folder, monkeypatch):
    """The record's hash is the file's; one warning names the file, however often it is opened; an older record says
    nothing."""
    fresh(monkeypatch)
    few, said = ("eval.demo_samples=0", "dataset.heldout=null"), "plugin mine.py has changed since the checkpoint"
    given = ("plugins=[mine.py]", "model.architecture=mine", "name=run", *few)
    assert said not in launch(folder, *given, "train.steps=1")
    find = partial(checkpoint.find, folder / "results/run")
    before = sha256(folder / "mine.py")
    assert find().info["plugins"] == {"mine.py": before}
    (folder / "mine.py").write_text(textwrap.dedent(MODULE) + "# edited")
    for steps in (2, 3):
        fresh(monkeypatch)
        text = launch(folder, "run=results/run", f"train.steps={steps}")
        assert text.count(f"warning: {said}") == 1 and find().info["plugins"] == {"mine.py": before}
    few = ("checkpoint=results/run", "steps=2", "classes=[1]", "seeds=0")
    assert take_samples(folder, *few, "out=a.png").count(f"note: {said}") == 1
    assert said in score(folder, "checkpoint=results/run", "num_samples=4", "batch_size=4", "steps=2")
    info = read_json(find().folder / "info.json")
    del info["plugins"]
    write_json(find().folder / "info.json", info)
    assert said not in take_samples(folder, *few, "out=b.png")


def test_what_an_edited_plugin_changes_is_scored_and_compared_anew(folder, monkeypatch):
    """Losses of λ and of 2λ (the reference: twice the first) are no two seeds; a score of an earlier file is not taken
    for one of this; weights that would be broadcast against other samples are refused."""
    monkeypatch.setattr(EDM, "weight", EDM.weight)
    source = "from tread.diffusion.edm import EDM\nusual = EDM.weight\n"
    source += "EDM.weight = lambda edm, sigma: {} * usual(edm, sigma)"
    few = ("eval.demo_samples=0", "plugins=[mine.py]", "train.steps=1")
    scored = ("checkpoint=results/a", "num_samples=4", "batch_size=4", "steps=2")
    usual, losses = EDM.weight, {}
    for name, factor in (("a", 1), ("b", 2)):
        fresh(monkeypatch)
        monkeypatch.setattr(EDM, "weight", usual)
        (folder / "mine.py").write_text(source.format(factor))
        os.utime(folder / "mine.py", (1, 1))  # as long and as old as before: Python's cache holds the other one
        launch(folder, *few, f"name={name}", f"seed={factor}")
        losses[name] = RunLog(folder / "results" / name).records()[-1]["eval_loss"]
        assert "scored already" not in score(folder, *scored)
    assert "scored already" in score(folder, *scored)
    groups = open_groups([str(folder / "results" / name) for name in losses])
    assert [len(group.runs) for group in groups] == [1, 1] and losses["b"] == pytest.approx(2 * losses["a"], rel=0.2)
    said = [line for line in cautions(groups) if "plugin" in line]
    assert said[0].startswith("plugins differs: [mine.py ") and "losses of runs that differ so do not mean" in said[1]
    monkeypatch.setattr(EDM, "weight", lambda edm, sigma: usual(edm, sigma).view(-1, 1))
    with pytest.raises(SystemExit, match="EDM.weight returns shape .2, 1. for noise levels of shape .2,., but must"):
        launch(folder, "name=c")


@pytest.mark.slow
def test_a_plugin_that_came_with_a_checkpoint_is_imported_only_if_named(folder, monkeypatch):
    """On a machine without the file's old place; without any, the error names what is missing and where it was not."""
    fresh(monkeypatch)
    few = ("eval.demo_samples=0", "dataset.heldout=null", "train.steps=1", "name=run")
    launch(folder, "plugins=[mine.py]", "model.architecture=mine", *few)
    for paths in ("full", "short"):
        given = (f"out={paths}", f"paths={paths}", "checkpoint=results/run")
        text = launch_door(export_checkpoint.main, "export_checkpoint", folder, *given)
        assert "needs mine.py: where there is none, plugins=[…] names a copy" in text
        other = folder / f"on {paths}"
        other.mkdir()
        (folder / "mine.py").rename(other / "kept")
        draw = partial(take_samples, other, f"checkpoint={folder / paths}", "steps=2", "classes=[1]", "seeds=0")
        fresh(monkeypatch)
        missing = f"{folder / paths}/info.json: it needs the plugin mine.py, which is neither .*mine.py nor in {folder}"
        with pytest.raises(SystemExit, match=f"{missing}/{paths} or {other}"):
            draw("out=a.png")
        for number, place in enumerate((folder / paths, other)):
            fresh(monkeypatch)
            (place / "mine.py").write_text(textwrap.dedent(MODULE))
            with pytest.raises(SystemExit, match="which is gone: plugins=.*mine.py. imports this one, if you trust it"):
                draw(f"out={number}.png")
            draw(f"out={number}.png", f"plugins=[{place / 'mine.py'}]")
            fresh(monkeypatch)
            assert tread.load(folder / paths, plugins=[str(place / "mine.py")]).network.blocks
            given = (f"checkpoint={folder / paths}", "out=no", "format=diffusers", f"plugins=[{place / 'mine.py'}]")
            done = run_python(ROOT / "scripts/export_checkpoint.py", *given, cwd=folder)
            assert "the network is a plugin's, whose code" in done.stderr
            (place / "mine.py").unlink()
        (other / "kept").rename(folder / "mine.py")


def test_a_plugin_in_a_checkpoints_own_folder_is_never_imported_by_its_record(tmp_path, monkeypatch):
    (tmp_path / "given").mkdir()
    (tmp_path / "given/own.py").write_text("raise RuntimeError('this ran')")
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert check_plugin("mine.py", Path("given")) == "mine.py"
    (tmp_path / "given/run.json").write_text("[]")
    for name, place in itertools.product(("given/own.py", f"{tmp_path}/given/own.py"), ("given", "given/step_0000001")):
        with pytest.raises(ValueError, match="imports this one, if you trust it"):
            check_plugin(name, Path(place))


def test_a_plugin_that_has_moved_is_the_one_that_is_imported_already(tmp_path):
    """The reference is a module that counts its imports."""
    (tmp_path / "counted.py").write_text("import os\nos.environ['COUNTED'] = os.environ.get('COUNTED', '') + 'x'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COUNTED", "")
        for place in ("counted.py", "counted.py", "gone/counted.py"):
            import_plugins([f"{tmp_path}/{place}"])
        assert os.environ["COUNTED"] == "x"


def test_two_plugins_of_one_name_are_refused(tmp_path, monkeypatch):
    """The reference: the rule in the table. A copy of a file is no other one."""
    fresh(monkeypatch)
    monkeypatch.setitem(RULES, "quiet", RULES["token"])
    for folder, name in (("a", "quiet"), ("b", "quiet"), ("c", "loud")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(
            f"from tread.routing.ids import RULES, Token\nRULES[{name!r}] = Token()"
        )
    import_plugins([f"{tmp_path}/{folder}/mine.py" for folder in "ab"])
    first = RULES["quiet"]
    with pytest.raises(ValueError, match="names .*c/mine.py, which can't.*a/mine.py was imported before"):
        import_plugins([f"{tmp_path}/c/mine.py"])
    assert RULES["quiet"] is first is not RULES["token"] and "loud" not in RULES


def test_a_table_refuses_what_is_no_entry_where_it_is_added():
    """A class for an object, an object for a class, and objects of other kinds."""
    cases = [(RULES, Token, "no class, but an object of it"), (ARCHITECTURES, Alignment(), "of <class 'type'>")]
    cases += [(REJOINS, print, "of .*Rejoin'>"), (METRICS, print, "of .*Metric'>")]
    for table, entry, must in (*cases, (OPTIMIZERS, torch.optim.NAdam, "of .*OptimizerEntry'>")):
        with pytest.raises(TypeError, match=f"^the table's entry 'mine' is .*, but must be {must}$"):
            table["mine"] = entry
        with pytest.raises(TypeError, match="but must be"):
            table |= {"mine": entry}
        assert "mine" not in table


def test_an_experiment_names_plugins_whose_keys_may_be_typed(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/my.yaml").write_text("plugins: [mine.py]\n")
    words, config = ["experiment=my", f"--config-dir={tmp_path}"], ROOT / "configs/config.yaml"
    assert named_plugins(words, config) == ["mine.py"] and named_plugins(words[1:], config) == []
    assert named_plugins([*words, "plugins=[other.py]"], config) == ["other.py"]
    assert named_plugins([f"+{words[0]}", words[1]], config) == ["mine.py"]


def test_a_plugin_that_can_not_be_imported_is_named(tmp_path):
    (tmp_path / "broken.py").write_text("import nowhere_at_all")
    for name, shown in (
        (f"{tmp_path}/broken.py", "broken.py, which can't be imported: ModuleNotFoundError: No module"),
        (f"{tmp_path}/none.py", "none.py, which can't be imported: FileNotFoundError"),
    ):
        for _ in range(2):
            with pytest.raises(ValueError, match=shown):
                import_plugins([name])
