"""A table of finished runs: python scripts/compare_runs.py results/a results/b …

Runs that differ by their seed alone are put together: mean and standard deviation over the seeds.
Evaluation losses of edm and of rf are different things. The training loss is left out on purpose:
with routes it is not comparable to one without. images/s is the median over the run; measure speed by
benchmarks/step_time.py, which alternates.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tread.checkpoints import checkpoint
from tread.training.run_folder import RunLog

COLUMNS = ("eval_loss", "fid", "label_agreement", "frechet_pixels", "images_per_s")


def main() -> None:
    groups: dict[str, list[list[dict]]] = {}
    for folder in map(Path, sys.argv[1:]):
        try:
            found = checkpoint.find(folder)
        except (FileNotFoundError, ValueError) as error:
            sys.exit(f"error: {error}")
        config, records = found.info["config"], RunLog(folder).records()
        steps = config["train"]["steps"]
        if not records or records[-1]["step"] != steps:
            sys.exit(f"error: {folder} is not the folder of a finished run: its metrics do not end at step {steps}")
        objective = config["objective"]
        label = f"{config['model']['name']} by {objective} on {config['dataset']['name']}, {steps} steps"
        apart = {key: value for key, value in config.items() if key not in ("seed", "name", "resume", "results")}
        groups.setdefault(json.dumps([label, apart]), []).append(records)
    if not groups:
        sys.exit("error: name at least one run's folder")
    print("| runs | seeds | " + " | ".join(COLUMNS) + " |\n|---|---|" + "---|" * len(COLUMNS))
    for key, runs in groups.items():
        cells = []
        for column in COLUMNS:
            series = [[record[column] for record in records if column in record] for records in runs]
            last = statistics.median if column == "images_per_s" else lambda values: values[-1]
            values = [last(found) for found in series if found]
            spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.4f}{spread}" if values else "–")
        print(f"| {json.loads(key)[0]} | {len(runs)} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
