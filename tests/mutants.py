"""Mutants of the core files: what the nearest tests would not notice. A slow command, no part of any suite.

    python tests/mutants.py                                     # all of them: more than an hour
    python tests/mutants.py rf.py tread/diffusion/edm.py        # those of some files
    python tests/mutants.py --sample 100 --seed 1               # 100 of them, drawn by a seed

In a copy of the tree, one sign, bound, constant, comparison or flag of a file is changed at a time, and the tests that
TESTS names for it run until the first one fails. Those that none fails for are printed; messages, annotations and
docstrings are left alone.
"""

import argparse
import ast
import contextlib
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 240  # a mutant that runs for longer hangs, and is caught
TESTS = {  # core file → the nearest tests, those that fail soonest first; folders and names within tests/
    "routing_module.py": "routing/test_routing_module.py models/test_dit.py routing/test_ids.py "
    "training/test_plugins.py",
    "tread/routing/ids.py": "routing/test_ids.py diffusion/test_sampling.py",
    "dit.py": "models/test_dit.py models/test_value_residual.py",
    "tread/models/backbone.py": "models/test_dit.py models/test_lightning.py models/test_mamba.py models/test_text.py",
    "tread/models/embedders.py": "models/test_dit.py models/test_bottleneck.py models/test_text.py",
    "rf.py": "diffusion/test_rf.py diffusion/test_rf_recipe.py diffusion/test_process.py diffusion/test_predictions.py",
    "tread/diffusion/edm.py": "diffusion/test_edm.py diffusion/test_process.py",
    "tread/diffusion/process.py": "diffusion/test_process.py diffusion/test_edm.py diffusion/test_rf.py",
    "tread/diffusion/guidance.py": "diffusion/test_guidance.py diffusion/test_sampling.py",
    "tread/diffusion/solvers.py": "diffusion/test_edm.py diffusion/test_rf.py diffusion/test_sampling.py",
    "tread/diffusion/sampling.py": "diffusion/test_sampling.py models/test_text.py models/test_sprint.py",
    "tread/training/step.py": "test_recorded.py training/test_survival.py training/test_alignment.py "
    "training/test_class_token_runs.py",
    "tread/training/draws.py": "training/test_draws.py test_recorded.py",
    "tread/training/optimizer.py": "training/test_optimizer.py training/test_runs.py",
    "tread/checkpoints/ema.py": "checkpoints/test_checkpoint.py training/test_posthoc_ema.py",
    "tread/diffusion/token_losses.py": "training/test_token_losses.py",
    "tread/training/alignment.py": "training/test_alignment.py",
    "tread/evaluation/metrics.py": "evaluation/test_metrics.py",
}
IMPORTED = "pytest torch._dynamo.testing torch.utils.flop_counter accelerate hydra sklearn.datasets scipy.linalg"
OPPOSITE = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.In: ast.NotIn}
OPPOSITE |= {ast.Add: ast.Sub, ast.Mult: ast.Div, ast.And: ast.Or}
OPPOSITE |= {other: kind for kind, other in OPPOSITE.items()} | {ast.FloorDiv: ast.Div, ast.Pow: ast.Mult}


def places(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, object]]:
    """What can be changed under a node: an object, its attribute, the number in it if that is a list, the new value."""
    for name, value in ast.iter_fields(node):
        for number, part in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if name in ("annotation", "returns", "decorator_list") or isinstance(part, (ast.Raise, ast.JoinedStr)):
                continue
            if type(part) in OPPOSITE:
                yield node, name, number, OPPOSITE[type(part)]()
            elif isinstance(part, ast.UnaryOp) and isinstance(part.op, (ast.USub, ast.Not)):
                yield node, name, number, part.operand
            elif isinstance(part, ast.Constant) and isinstance(part.value, (bool, int, float)):
                changed = not part.value if isinstance(part.value, bool) else part.value + (part.value == 0 or 1)
                yield node, name, number, ast.Constant(changed)
            if isinstance(part, ast.AST):
                yield from places(part)


def mutants(path: Path) -> Iterator[tuple[int, str, str]]:
    """A file's line, what is changed there, and the changed file's text, for each thing that can be."""
    tree = ast.parse(path.read_text())
    for node, name, number, new in places(tree):
        held = getattr(node, name)
        old = held if number is None else held[number]
        line, before = getattr(node, "lineno", 0), ast.unparse(node)
        for value in (new, old):  # there and back
            if number is None:
                setattr(node, name, value)
            else:
                held[number] = value
            if value is new:
                change, text = f"{before}  →  {ast.unparse(node)}", ast.unparse(tree)
        yield line, " ".join(change.split())[:160], text


def caught(tests: list[str], copy: Path) -> bool:
    """Whether a test fails in the copy of the tree, in a fork of this process, which has imported the libraries."""
    child = os.fork()
    if not child:
        os.setsid()
        signal.alarm(SECONDS)
        for number in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        os.chdir(copy)
        sys.path[:0] = [str(copy)]
        quick = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu", *tests]
        os._exit(importlib.import_module("pytest").main(quick))
    status = os.waitpid(child, 0)[1]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what a test left behind
    return status != 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="*", default=[*TESTS], help="of the core files (default: all)")
    parser.add_argument("--sample", type=int, help="so many mutants instead of all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    given = parser.parse_args()
    sys.dont_write_bytecode = True
    os.environ.setdefault("TREAD_ASSETS", str(ROOT.parent / "shared"))  # as for the tests here, not beside the copy
    for name in IMPORTED.split():
        importlib.import_module(name)
    chosen = [(file, *mutant) for file in given.files for mutant in mutants(ROOT / file)]
    chosen = sorted(random.Random(given.seed).sample(chosen, min(given.sample or len(chosen), len(chosen))))
    survivors, whole = 0, set()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(ROOT, f"{folder}/tree", ignore=shutil.ignore_patterns(".git", "__pycache__")))
        for number, (file, line, change, text) in enumerate(chosen, 1):
            tests = [f"tests/{name}" for name in TESTS[file].split()]
            if file not in whole and caught(tests, copy):
                sys.exit(f"the tests of {file} fail without a mutant: {' '.join(tests)}")
            whole.add(file)
            original = (copy / file).read_text()
            (copy / file).write_text(text)
            if not caught(tests, copy):
                survivors += 1
                print(f"{file}:{line} survived: {change}", flush=True)
            (copy / file).write_text(original)
            if number % 20 == 0:
                print(f"{number} of {len(chosen)} mutants, {survivors} not caught", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants caught")


if __name__ == "__main__":
    main()
