"""A network of a user's own: class, options and config file in a folder of theirs, no file of the project touched.

The reference is DiT's run of the same seed: a network of DiT's blocks must train to the same weights, bit for bit."""

import os
import textwrap

import export_checkpoint
import pytest
import torch
from conftest import ROOT, TINY, launch, launch_door, same, score, take_samples
from forked import run_python

from routing_module import REJOINS, RULES
from tread.checkpoints import checkpoint
from tread.evaluation.metric_table import METRICS
from tread.models.architectures import ARCHITECTURES
from tread.routing.ids import Token
from tread.runtime.plugins import import_plugins
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


def test_a_plugin_that_has_moved_is_the_one_that_is_imported_already(tmp_path):
    """The reference is a module that counts its imports."""
    (tmp_path / "counted.py").write_text("import os\nos.environ['COUNTED'] = os.environ.get('COUNTED', '') + 'x'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COUNTED", "")
        for place in ("counted.py", "counted.py", "gone/counted.py"):
            import_plugins([f"{tmp_path}/{place}"])
        assert os.environ["COUNTED"] == "x"


def test_a_table_refuses_what_is_no_entry_where_it_is_added():
    """A class for an object, an object for a class, and objects of other kinds."""
    cases = [(RULES, Token, "no class, but an object of it"), (ARCHITECTURES, Alignment(), "of <class 'type'>")]
    cases += [(REJOINS, print, "of .*Rejoin'>"), (METRICS, print, "of .*Metric'>")]
    for table, entry, must in (*cases, (OPTIMIZERS, torch.optim.NAdam, "of .*OptimizerEntry'>")):
        with pytest.raises(TypeError, match=f"^the table's entry 'mine' is .*, but must be {must}$"):
            table["mine"] = entry
        assert "mine" not in table


def test_a_plugin_that_can_not_be_imported_is_named(tmp_path):
    (tmp_path / "broken.py").write_text("import nowhere_at_all")
    for name, shown in (
        (f"{tmp_path}/broken.py", "broken.py, which can't be imported: ModuleNotFoundError: No module"),
        (f"{tmp_path}/none.py", "none.py, which can't be imported: FileNotFoundError"),
    ):
        for _ in range(2):
            with pytest.raises(ValueError, match=shown):
                import_plugins([name])
