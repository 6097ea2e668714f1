"""Teaches a network that was trained on the digits 0 to 6 the classes 7, 8 and 9 as well.

python studies/finetune_digits.py out=results/finetune-digits steps=2500 seeds=1

A network is trained on 0 to 6, then on all ten digits for a tenth of the steps; init_classes keeps the embeddings of 0
to 6. It is compared with networks trained only on all ten, for a tenth and for all of the steps. `table.md` in `out`
states the fraction of 100 samples per class that a classifier puts in the right class, for old and new classes."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import subprocess
from dataclasses import dataclass, replace

import numpy as np
from omegaconf import OmegaConf

import tread
from tread.data.writer import write_dataset
from tread.evaluation.scorers import judge_digits
from tread.preparing.digits import MEANING, digits_parts
from tread.runtime import schema
from tread.runtime.cli import answer_help, explained
from tread.runtime.schema import Count

KNOWN = 7


@dataclass(frozen=True)
class Options:
    out: str = "results/finetune-digits"
    steps: Count = 2500
    seeds: Count = 1


def train(out: Path, name: str, steps: int, *overrides: str) -> None:
    shared = ["model=tread", f"train.steps={steps}", f"every.save={steps}", f"every.sample={10 * steps}"]
    shared += ["report=false", "eval.demo_samples=0"]
    command = [sys.executable, ROOT / "train.py", *shared, *overrides, f"name={name}", f"results={out}"]
    subprocess.run(command, check=True)


def main(out: Path, steps: int, seeds: int) -> None:
    pixels, labels = digits_parts()["train"]
    few = labels < KNOWN
    part = out / "data/seven"
    if not part.exists():
        latents = replace(MEANING, classes=MEANING.classes[:KNOWN])
        write_dataset(part, latents, [(pixels[few].reshape(-1, 1, 1, 8, 8) / 8 - 1, labels[few])])
    seven = [f"dataset.path={part}", "dataset.embedded=null", f"dataset.num_classes={KNOWN}", "dataset.heldout=null"]
    kept = "init_classes={" + ",".join(f"{digit}:{digit}" for digit in range(KNOWN)) + "}"
    short, rows = steps // 10, {}
    for seed in range(seeds):
        train(out, f"seven-{steps}-{seed}", steps, *seven, f"seed={seed}")
        train(out, f"taught-{steps}-{seed}", short, f"init_from={out}/seven-{steps}-{seed}", kept, f"seed={seed}")
        train(out, f"nothing-{steps}-{seed}", short, f"seed={seed}")
        train(out, f"whole-{steps}-{seed}", steps, f"seed={seed}")
        for name in ("taught", "nothing", "whole"):
            drawn = tread.load(out / f"{name}-{steps}-{seed}").sample(range(10), range(100), output="pt", steps=18)
            pictures, asked = (drawn * 255).round().byte().numpy(), np.arange(10).repeat(100)
            for which, chosen in (("old", asked < KNOWN), ("new", asked >= KNOWN)):
                agreement = judge_digits(pictures[chosen], asked[chosen])["label_agreement"]
                rows.setdefault((name, which), []).append(agreement)
    trained = {"taught": f"{short} after {steps} on 0 to 6", "nothing": f"{short}", "whole": f"{steps}"}
    lines = ["| network | steps | agreement of 0 to 6 | of 7, 8 and 9 |", "|---|---|---|---|"]
    for name, told in trained.items():
        both = (" ".join(f"{value:.3f}" for value in rows[name, which]) for which in ("old", "new"))
        lines.append(f"| {name} | {told} | {' | '.join(both)} |")
    (out / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    answer_help(__doc__)
    with explained():
        options = schema.read(OmegaConf.to_container(OmegaConf.from_cli()), Options)
        main(Path(options.out), options.steps, options.seeds)
