"""The pages' commands do what they say: run in small on the embedded digits, or composed and checked up to their data.

The reference is the code that people meet: the doors' own exit codes and folders, the settings' own keys, the files in
the checkout. What a page says in words is checked for keys, files and links that do not exist.
"""

import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import export_checkpoint
import guidance_sweep
import import_checkpoint
import import_latents
import plan as plan_door
import prepare_features
import prepare_latents
import prepare_text
import pytest
import reconstruct_ema
import similarity
import torch
import yaml
from conftest import ROOT, TINY, logged
from hydra import compose, initialize_config_dir

import sample
from routing_module import REJOINS, RULES, Route
from tread.evaluation import scoring
from tread.evaluation.metric_table import METRICS
from tread.models.architectures import ARCHITECTURES
from tread.runtime import cli, schema
from tread.runtime.cli import plain, spell_folder, take_literally
from tread.training import settings
from tread.training.optimizers import OPTIMIZERS

PAGES = ["README.md", "docs/start.md", "CONTRIBUTING.md"]  # start.md first: others take its runs on
PAGES += sorted({f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} - set(PAGES))
PAGES += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "models").glob("*/README.md"))
TRAIN = [*settings.known_keys(), "experiment"]

NOT_RUN = {  # how a command starts → why it is neither run nor composed
    "bash scripts/test.sh": "these are the tests",
    "python3 -m venv": "installs",
    "pip install": "installs",
    "curl": "fetches gigabytes",
    "python -c": "renders for half a minute",
    "pytest": "a slow test of its own",
    "python -m pytest": "these are the tests",
    "python scripts/compare_runs.py results/seeds-": "of runs that are composed alone",
    "python studies/": "trains for minutes to days (tests/doors/test_studies.py reads their words)",
    "python train.py --config-dir": "of a folder of the reader's",
    "python train.py plugins=": "of a file of the reader's (tests/training/test_plugins.py)",
    "python benchmarks/": "measures for minutes (step_time.py, which takes train.py's options, is composed)",
}
COMPOSED = {  # what a command has → why it can't be run here
    r"^(torchrun|sbatch)|--multi_gpu|--config_file": "several processes or nodes",
    r"^python benchmarks/step_time.py": "measures for minutes",
    r"results/photos": "tests/doors/test_own_data.py runs them",
    r"models/cifar10-tread": "55M weights, four seconds a command; tests/doors/test_published.py draws by them",
    r"finetune_own": "public weights of gigabytes, and photos of others",
    r"results/studies/": "a network that a study trains on a GPU",
    r"push=": "the hub (tests/doors/test_load.py has a stand-in)",
    r"hf:": "the hub (tests/doors/test_load.py has a stand-in)",
    r"experiment=": "ImageNet and GPUs",
    r"source=|dataset=folder|imagenette": "photos or latents of others",
    r"prepare_features.py": "pictures of others, and an encoder from the hub",
    r"prepare_text.py": "captions of others, and an encoder from the hub",
    r"dataset=emoji": "renders for half a minute; tests/preparing/test_emoji.py makes a few",
    r" weights=\S+\.pt": "weights of others",
    r"(emoji|coco256_b2)-tread_text": "a network of captions, trained for hours (tests/evaluation/test_prompts.py)",
    r"reference=|samples=\S+\.npz": "pictures to compare with, and the FID Inception",
    r"name=(seeds|fp32|bf16)-": "studies: commands that run elsewhere, with other steps and seeds",
    r"^python train.py .*(lightning|rwkv|mamba|maskdit|alignment=|routes_until|digits-0.7|v1|stage-2|my-setting)": (
        "no later command reads that run; tests/training and tests/models train each kind"
    ),
}
SMALL = {  # what is appended so that a command takes a second
    "train.py": [*TINY, "every.evaluate=6", "every.sample=6", "eval.points=16"],
    "sample.py": ["steps=4", "seeds=0-1", "classes=[0,1]"],
    "fid.py": ["num_samples=20", "steps=2", "cache=cache"],
    "scripts/guidance_sweep.py": ["num_samples=20", "steps=2", "cache=cache", "sweep.scale=[2]"],
    "scripts/similarity.py": ["samples=16"],
}
RATIOS = ["sweep.strong=[0]", "sweep.weak=[0.5]"]  # of the sweep's kinds that have them
EARLIER = {"step_0050000": "step_0000003"}  # a checkpoint of a long run → one of TINY's


@dataclass(frozen=True)
class Command:
    page: str
    line: int
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def place(self) -> int:
        """Where the script stands behind its launcher."""
        return next((n for n, word in enumerate(self.words) if re.fullmatch(r"[\w/]+\.(py|sh)", word)), 0)

    @property
    def door(self) -> str:
        """The script; the shell scripts that hand their arguments on are train.py."""
        script = self.words[self.place]
        trains = ("scripts/slurm.sh", "scripts/quickstart.sh", "benchmarks/step_time.py")
        return "train.py" if script in trains else script

    @property
    def arguments(self) -> list[str]:
        given = list(self.words[self.place + 1 :])
        if self.words[self.place] == "scripts/quickstart.sh":
            return ["model=tread", *given]
        if self.words[self.place] in ("scripts/prepare_features.py", "scripts/prepare_text.py"):
            return spell_folder(given)
        own = ("pairs=", "out=", "beside=") if self.words[self.place] == "benchmarks/step_time.py" else ()
        return [word for word in given if not (own and word.startswith(own))]

    @property
    def prints_alone(self) -> bool:
        return "--cfg" in self.words or "--help" in self.words

    @property
    def kind(self) -> str:
        if not self.prints_alone and any(re.search(pattern, self.text) for pattern in COMPOSED):
            return "composed"
        return "not run" if self.text.startswith(tuple(NOT_RUN)) else "run"

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def commands_of(page: str) -> list[Command]:
    """The commands of a page's bash blocks; a backslash joins lines, comments go."""
    text, found = (ROOT / page).read_text(), []
    for block in re.finditer(r"^```bash\n(.*?)^```", text, re.M | re.S):
        number = text.count("\n", 0, block.start(1)) + 1
        for line in block[1].replace("\\\n", " \0").splitlines():
            if words := shlex.split(line.replace("\0", ""), comments=True):
                found.append(Command(page, number, tuple(words)))
            number += 1 + line.count("\0")
    return found


COMMANDS = [command for page in PAGES for command in commands_of(page)]


def read_import(tree: dict) -> settings.Settings:
    own = {key: tree.pop(key) for key in schema.known_keys(import_checkpoint.Options)}
    schema.read(own, import_checkpoint.Options)
    return settings.read(tree)


def read_sweep(tree: dict) -> scoring.ScoringOptions:
    schema.read(tree.pop("sweep"), guidance_sweep.Sweep, "sweep.")
    return scoring.read_options(tree)


def read_plan(tree: dict) -> settings.Settings:
    schema.read({key: tree.pop(key) for key in plan_door.KEYS}, plan_door.Options)
    return settings.read(tree)


def read_as(kind: type) -> tuple[list[str], Callable[[dict], object]]:
    return schema.known_keys(kind), lambda tree: schema.read(tree, kind)


DOORS = {  # script → its config, the keys it knows, and how it reads them
    "train.py": ("config", TRAIN, settings.read),
    "sample.py": ("sample", *read_as(sample.Options)),
    "fid.py": ("fid", schema.known_keys(scoring.ScoringOptions), scoring.read_options),
    "scripts/import_checkpoint.py": (
        "import_checkpoint",
        [*TRAIN, *schema.known_keys(import_checkpoint.Options)],
        read_import,
    ),
    "scripts/guidance_sweep.py": (
        "guidance_sweep",
        [*schema.known_keys(scoring.ScoringOptions), *schema.known_keys(guidance_sweep.Sweep, "sweep.")],
        read_sweep,
    ),
}
PLAIN = {
    "prepare_latents": prepare_latents.PhotoOptions,
    "prepare_features": prepare_features.FeatureOptions,
    "prepare_text": prepare_text.TextOptions,
    "import_latents": import_latents.ImportOptions,
    "export_checkpoint": export_checkpoint.Options,
    "reconstruct_ema": reconstruct_ema.Options,
    "similarity": similarity.Options,
}
DOORS["scripts/plan.py"] = ("plan", [*TRAIN, *plan_door.KEYS], read_plan)
DOORS |= {f"scripts/{name}.py": (name, *read_as(options)) for name, options in PLAIN.items()}


def composed_settings(command: Command) -> object:
    """What the door would have read, were its data here. Raises what it would end with."""
    config, known, read = DOORS[command.door]
    schema.check_overrides(command.arguments, known)
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "configs")):
        return read(plain(compose(config, overrides=take_literally(command.arguments, ("prompt",)))))


def test_pages_have_commands_of_all_kinds():
    """And each reason for not running one is still needed."""
    assert len(COMMANDS) > 80 and {command.kind for command in COMMANDS} == {"run", "composed", "not run"}
    for start in NOT_RUN:
        assert any(command.text.startswith(start) for command in COMMANDS if command.kind == "not run"), start
    for pattern in COMPOSED:
        assert any(re.search(pattern, command.text) for command in COMMANDS), pattern
    assert {"train.py", "sample.py", "fid.py"} <= {command.door for command in COMMANDS if command.kind == "run"}


@pytest.mark.parametrize("page", PAGES)
def test_scripts_of_commands_exist(page):
    for command in commands_of(page):
        for word in command.words:
            if re.fullmatch(r"[\w/.-]+\.(py|sh|yaml)|requirements\S*\.txt|tests/\w+", word):
                assert (ROOT / word).exists(), command


FIRST = ("README.md", "docs/start.md", "docs/training.md")  # the commands of other pages compose in the slow suite


@pytest.mark.parametrize("page", [pytest.param(p, marks=[pytest.mark.slow] * (p not in FIRST)) for p in PAGES])
def test_commands_for_other_machines_compose(page):
    """Keys, values and what they say together; everything but the data."""
    for command in commands_of(page):
        if command.kind == "composed":
            try:
                composed_settings(command)
            except Exception as error:
                raise AssertionError(f"{command}: {error}") from error


@pytest.mark.parametrize("pages", [PAGES[:1], pytest.param(PAGES, marks=pytest.mark.slow)], ids=["README.md", "all"])
def test_commands_run_in_small(tmp_path, monkeypatch, capfd, pages):
    """In one folder, in the order of the pages: what train.py makes is there for sample.py and fid.py, and models/."""
    shutil.copytree(ROOT / "models", tmp_path / "models")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "leave_at_once", lambda code: None)  # it would end the process
    ran = set()
    for command in (command for page in pages for command in commands_of(page)):
        if command.kind != "run" or command.text in ran:
            continue
        ran.add(command.text)
        words = [*command.arguments, *([] if command.prints_alone else SMALL.get(command.door, []))]
        words += RATIOS if command.door == "scripts/guidance_sweep.py" and "guidance=cfg" not in words else []
        for long, short in EARLIER.items():
            words = [word.replace(long, short) for word in words]
        script = ROOT / command.door
        monkeypatch.setattr(sys, "argv", [str(script), *words])
        monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            assert not end.code, f"{command}: {end.code}"
        printed = capfd.readouterr().out
        if command.door == "train.py" and not command.prints_alone:
            (run,) = set(re.findall(r"results/[\w.-]+(?=/latest|/?$| is finished)", printed, re.M))
            assert logged(tmp_path / run, "step")[-1] == 6, command
        elif command.door == "fid.py":
            assert "label_agreement" in printed, command
    assert len(ran) >= (40 if pages == PAGES else 3)
    assert (tmp_path / "samples.png").is_file()
    assert (tmp_path / "results/sweep/sweep.png").is_file() or pages != PAGES


def test_the_experiment_of_the_page_composes(tmp_path):
    """docs/configuration.md shows a file of one's own; the page's keys are the reference."""
    (example,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs/configuration.md").read_text(), re.M | re.S)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "configs/experiment/my_b2.yaml").write_text(example)
    with initialize_config_dir(version_base="1.3", config_dir=str(tmp_path / "configs")):
        cfg = settings.read(plain(compose("config", overrides=["experiment=my_b2", "model=tread"])))
    written = yaml.safe_load(example)
    assert cfg.name == "my_b2-tread" and cfg.dataset.name == "imagenet256"
    assert cfg.train.steps == int(written["train"]["steps"]) and cfg.optim.lr == float(written["optim"]["lr"])


def anchors(page: Path) -> set[str]:
    """A page's headings as GitHub writes them behind #."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", text):
        path, _, anchor = "".join(target).partition("#")
        if path.startswith("http"):
            continue
        found = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert found.exists(), f"{page}: {path}"
        assert not anchor or anchor in anchors(found), f"{page}: #{anchor} is no heading of {found.name}"


@pytest.mark.parametrize("page", PAGES)
def test_files_and_keys_named_in_words_exist(page):
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.M | re.S)
    for path in re.findall(r"\b(?:tests|tread|configs|scripts|benchmarks)/[\w./-]+\.(?:py|sh|yaml|json|png)\b", text):
        assert (ROOT / path).exists(), f"{page}: {path}"
    known = [*settings.known_keys(), *schema.known_keys(scoring.ScoringOptions)]
    sections = "|".join({key.partition(".")[0] for key in known if "." in key})
    no_keys = ("train.py", "rf.py", "dataset.json", "model.routing")  # files; a variable
    no_keys += ("alignment.txt", "text.txt", "lora.txt")
    for code in re.findall(r"`([^`]+)`", text):
        for key in re.findall(rf"(?<![\w./])(?:{sections})\.[\w.]*\w", code):
            assert key in no_keys or re.sub(r"\.\d+", ".*", key) in known, f"{page}: {key}"


def test_pages_are_short():
    """README, docs/ without evidence and log; prose at most 120 wide (no commands, printed lines, tables, pictures)."""
    text = {page: (ROOT / page).read_text() for page in PAGES}
    assert text["README.md"].count("\n") <= 120
    assert sum(len(text[page].split()) for page in PAGES if re.match("docs/(?!evidence)", page)) <= 16_000
    for page in PAGES:
        prose = re.sub(r"^```.*?^```", "", text[page], flags=re.M | re.S).splitlines()
        assert not [line for line in prose if len(line) > 120 and not line.startswith(("|", "<img", "    "))], page


def test_entries_that_contributing_shows_stand_in_the_tables():
    """The recipes' python blocks, as written; the tables are as before behind it."""
    tables = {"mine": ARCHITECTURES, "quiet": RULES, "shifted": REJOINS, "nadam": OPTIMIZERS, "spread": METRICS}
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S))
    try:
        exec(code, {"__name__": __name__})
        assert all(name in table for name, table in tables.items())
        ids = RULES["quiet"].choose(Route(0, 0), torch.rand(1, 4), None, None, -torch.tensor([[3.0, 1.0, 2.0, 0.0]]))
        assert ids.tolist() == [[1, 3]]  # by hand: the two smallest norms
    finally:
        for name, table in tables.items():
            table.pop(name, None)
