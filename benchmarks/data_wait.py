"""The share of training time spent waiting for data: python benchmarks/data_wait.py [steps=300] [overrides of train.py]

Trains DiT-S/2 with a route on 65,536 synthetic ImageNet-256 moments (two views) through train.py itself,
for each placement, and prints the median images/s and share of waiting over its log intervals, without
the first. Target on a GPU: at most 1%.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from timing import ROOT, random_shards

from tread.data.dataset import PLACEMENTS
from tread.data.latents import LatentSpec
from tread.data.writer import write_dataset
from tread.training.run_folder import RunLog

SAMPLES, PER_SHARD = 65_536, 4_096
MEANING = LatentSpec((4, 32, 32), tuple(map(str, range(1000))), "none", "moments", "logvar", 0.18215, views=2)


def main() -> None:
    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    steps = int(options.pop("steps", 300))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_dataset(folder / "data", MEANING, random_shards(MEANING, SAMPLES, PER_SHARD))
        for placement in PLACEMENTS:
            command = [sys.executable, str(ROOT / "train.py"), "experiment=imagenet256_s2", "model=tread"]
            command += [f"dataset.path={folder / 'data'}", "dataset.heldout=null", f"dataset.placement={placement}"]
            command += ["sampling.decode=false", "sampling.classes=1", "sampling.per_class=1", f"train.steps={steps}"]
            command += [f"every.log={max(1, steps // 10)}", f"every.save={steps}", f"every.sample={steps}"]
            command += [f"results={folder / 'results'}", f"name={placement}"]
            subprocess.run([*command, *(f"{key}={value}" for key, value in options.items())], check=True)
            records = [r for r in RunLog(folder / "results" / placement).records() if "data_wait" in r][1:]
            speed, wait = (statistics.median(r[key] for r in records) for key in ("images_per_s", "data_wait"))
            print(f"{placement:8s} {speed:10,.1f} images/s, {100 * wait:.3f}% of the time waiting for data")


if __name__ == "__main__":
    main()
