"""Training in bf16 against fp32: python benchmarks/bf16.py results/fp32-* -- results/bf16-* [out=…]

The runs are made by, for each seed,

    python train.py train.steps=2000 every.evaluate=500 seed=0 train.precision=fp32 name=fp32-0
    python train.py train.steps=2000 every.evaluate=500 seed=0 train.precision=bf16 name=bf16-0

Runs of one seed see the same data, noise and ids. Prints the full-token evaluation loss of both, as mean and
standard deviation over the seeds, and the largest difference between two runs of one seed.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from tread.training.run_folder import RunLog


def curve(run: Path) -> dict[int, float]:
    """Evaluation loss by step."""
    return {record["step"]: record["eval_loss"] for record in RunLog(run).records() if "eval_loss" in record}


def main() -> None:
    out = next((argument.removeprefix("out=") for argument in sys.argv if argument.startswith("out=")), None)
    names = [argument for argument in sys.argv[1:] if not argument.startswith("out=")]
    middle = names.index("--")
    fp32, bf16 = ([curve(Path(name)) for name in part] for part in (names[:middle], names[middle + 1 :]))
    table = {}
    for step in sorted(set.intersection(*map(set, (*fp32, *bf16)))):
        rows = {name: [one[step] for one in runs] for name, runs in (("fp32", fp32), ("bf16", bf16))}
        table[step] = rows
        means = {name: f"{statistics.mean(row):.4f} ± {statistics.stdev(row):.4f}" for name, row in rows.items()}
        apart = max(abs(a - b) for a, b in zip(*rows.values()))
        print(f"step {step}: fp32 {means['fp32']}, bf16 {means['bf16']}, one seed at most {apart:.4f} apart")
    if out:
        starts = {name: RunLog(Path(name)).starts()[-1] for name in names if name != "--"}
        facts = {name: {"command": one["command"][1:], "versions": one["versions"]} for name, one in starts.items()}
        Path(out).write_text(json.dumps({"eval_loss": table, "runs": facts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
