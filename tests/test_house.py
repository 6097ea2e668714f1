"""The rule of the house: which package may import which, who may know which library, and what should not exist."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

from tread.models.architectures import ARCHITECTURES

ORDER = ("runtime", "drawing", "routing", "models", "diffusion", "data", "encoders", "preparing", "checkpoints")
ORDER += ("evaluation", "training", "reports", "doors")
AT_ROOT = {"routing_module": "routing", "dit": "models", "rf": "diffusion"}
AT_ROOT |= dict.fromkeys(("train", "sample", "fid"), "doors")
FILES = sorted([*ROOT.glob("*.py"), *(ROOT / "tread").rglob("*.py")])
NAMES = [str(path.relative_to(ROOT)) for path in FILES]
TREES = {name: ast.parse(path.read_text()) for name, path in zip(NAMES, FILES)}
KNOWS = {  # library → who may import it; a package means all of its files
    "accelerate": {"tread/runtime/distributed.py"},
    "wandb": {"tread/runtime/tracking.py"},
    "hydra": {"tread/runtime/cli.py"},
    "omegaconf": {"tread/runtime/cli.py", "tread/training/start.py", "tread/training/resume.py"},
    "tensorboard": {"tread/runtime/tracking.py"},
    "plotly": {"tread/reports/page.py"},
    "diffusers": {
        "tread/encoders/autoencoder.py",
        "tread/checkpoints/diffusers_export.py",
        "tread/checkpoints/diffusers_pipeline.py",
    },
    "transformers": {"tread/encoders/pretrained.py"},
    "peft": {"tread/checkpoints/lora.py"},
    "mamba_ssm": {"tread/models/ssd.py"},
}


def package_of(name: str) -> str:
    """The room of a file, by its path, or of a module, by its dotted name."""
    first, *rest = name.removesuffix(".py").replace(".", "/").split("/")
    return AT_ROOT[first] if first in AT_ROOT else rest[0]


def imports(name: str) -> Iterator[str]:
    """Dotted names of what a file imports: modules and, of a package, what is taken from it."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            folder = ".".join(Path(name).parts[: -node.level]) if node.level else ""
            module = ".".join(filter(None, (folder, node.module)))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imported_files(name: str) -> set[str]:
    """Which of our files a file imports."""
    found = set()
    for dotted in imports(name):
        for path in (dotted, dotted.rpartition(".")[0]):
            found |= {file for file in NAMES if file == path.replace(".", "/") + ".py"}
    return found


def test_the_root_holds_doors_and_method_alone():
    assert {name for name in NAMES if "/" not in name} == {f"{name}.py" for name in AT_ROOT}
    rooms = {path.name for path in (ROOT / "tread").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms <= set(ORDER)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "tread/__init__.py"])
def test_imports_run_to_the_left(name):
    own = ORDER.index(package_of(name))
    for other in imported_files(name):
        assert ORDER.index(package_of(other)) <= own, f"{name} ({ORDER[own]}) imports {other}"
        assert package_of(other) != "doors", f"{name} imports a door, {other}"


def test_no_file_imports_itself_by_a_circle():
    edges, done = {name: imported_files(name) for name in NAMES}, set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " → ".join([*path[path.index(name) :], name])
        if name not in done:
            for other in edges[name]:
                visit(other, (*path, name))
            done.add(name)

    for name in NAMES:
        visit(name, ())


def libraries(name: str) -> set[str]:
    ours = {"tread", *AT_ROOT}
    named = (dotted.removeprefix("torch.utils.") if "tensorboard" in dotted else dotted for dotted in imports(name))
    return {dotted.split(".")[0] for dotted in named} - ours - set(sys.stdlib_module_names)


def test_routing_needs_torch_alone():
    for name in NAMES:
        if name != "tread/__init__.py" and package_of(name) == "routing":
            assert libraries(name) <= {"torch"}, name
            assert all(package_of(other) == "routing" for other in imported_files(name)), name


def test_who_knows_which_library():
    """And prints: the doors alone."""
    for name in NAMES:
        for library in libraries(name) & KNOWS.keys():
            assert {name, package_of(name)} & KNOWS[library], f"{name} imports {library}"
        calls = [n for n in ast.walk(TREES[name]) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
        if "print" in {call.func.id for call in calls}:
            assert package_of(name) == "doors" or name == "tread/runtime/distributed.py", f"{name} prints"


def test_one_file_knows_the_architectures():
    """It alone imports the networks; nobody else compares a name of its table, or asks which one it is."""
    names = ("lightning", "mamba", "maskdit", "rwkv", "sprint", "text_dit")
    networks = {"dit.py", *(f"tread/models/{name}.py" for name in names)}
    table = "tread/models/architectures.py"
    assert {name for name in NAMES if networks & imported_files(name)} - networks == {table}
    more = [path for folder in ("scripts", "studies", "benchmarks") for path in (ROOT / folder).glob("*.py")]
    others = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in more}
    for name, tree in {**TREES, **others}.items():
        for node in ast.walk(tree):
            parts = list(ast.walk(node)) if isinstance(node, (ast.Compare, ast.Match)) else []
            compared = {part.value for part in parts if isinstance(part, ast.Constant)} & {*ARCHITECTURES}
            asked = any(isinstance(part, ast.Attribute) and part.attr == "architecture" for part in parts)
            assert name == table or not (compared or asked), f"{name}:{node.lineno} compares {compared or 'the name'}"


def test_packages_are_declared():
    files = [
        ROOT / f"requirements{kind}.txt"
        for kind in ("", "-import", "-tensorboard", "-alignment", "-mamba", "-emoji", "-text", "-lora")
    ]
    declared = {line.split(">")[0] for file in files for line in file.read_text().splitlines()}
    names = {"hydra": "hydra-core", "mamba_ssm": "mamba-ssm", "sklearn": "scikit-learn", "PIL": "pillow"}
    for name in NAMES:
        for package in libraries(name):
            assert names.get(package, package) in declared, f"{name} imports {package}"
    assert not declared & {"torchvision", "timm", "tensorflow", "deepspeed"}


@pytest.mark.parametrize("name", NAMES)
def test_what_should_not_exist(name):
    assert Path(name).stem not in {"utils", "util", "helpers", "helper", "misc", "common"}
    for node in ast.walk(TREES[name]):
        assert not (isinstance(node, ast.ImportFrom) and node.names[0].name == "*"), "star import"
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None), "bare except"
        assert not (
            isinstance(node, ast.Attribute)
            and node.attr == "cuda"
            and isinstance(node.ctx, ast.Load)
            and ast.unparse(node) not in ("torch.cuda", "torch.backends.cuda")
        ), ".cuda()"
        if isinstance(node, ast.FunctionDef) and node.name == "forward":
            assert node.args.kwarg is None, "forward(**kwargs)"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "pickle.load", "np.load"):
            safe = {"torch.load": "weights_only=True", "np.load": "allow_pickle=False"}
            assert safe.get(ast.unparse(node.func), "never") in ast.unparse(node)
        library = name == "tread/__init__.py" or package_of(name) != "doors"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and library:
            assert node.value != "__main__", "a demo in a library"


def test_every_class_and_module_has_a_name_of_its_own():
    modules = [Path(name).stem for name in NAMES if Path(name).stem != "__init__"]
    classes = [node.name for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for names in (modules, classes):
        assert sorted(names) == sorted(set(names)), {name for name in names if names.count(name) > 1}


def test_a_room_is_not_a_warehouse():
    for room in ORDER:
        files = [name for name in NAMES if name.startswith(f"tread/{room}/") and not name.endswith("__init__.py")]
        lines = sum((ROOT / name).read_text().count("\n") for name in files)
        assert len(files) <= 18 and lines <= 3000, f"{room}: {len(files)} files, {lines} lines"
