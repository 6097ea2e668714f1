"""What scores of scale=small can come down to: python studies/floor.py

Scores the held-out photos themselves, and what the autoencoder makes of their latents, against the same reference.
Writes studies/floor.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from omegaconf import OmegaConf

from studies.jobs import LEFT_OUT, Children, cores_of
from studies.study import HERE
from tread.data.dataset import LatentDataset
from tread.data.latents import to_network
from tread.encoders.autoencoder import load_decoder
from tread.evaluation.image_sets import save_npz
from tread.runtime import schema
from tread.runtime.cli import answer_help, explained
from tread.runtime.files import write_whole

BATCH = 50


@dataclass(frozen=True)
class Options:
    data: str = "data"
    photos: str = "imagenette/photos/val"  # below data: the pictures that the latents in imagenette/val are of
    out: str = str(HERE / "floor.json")


def main() -> None:
    answer_help(__doc__)
    with explained():
        words = sys.argv[1:]
        schema.check_overrides(words, schema.known_keys(Options))
        run(schema.read(OmegaConf.to_container(OmegaConf.from_cli(words)), Options))


def run(options: Options) -> None:
    """Decode, score twice, write. Raises ValueError or OSError."""
    data = Path(options.data).resolve()
    heldout = LatentDataset(data / "imagenette" / "val")
    decode = load_decoder(heldout.latents)

    def pictures() -> Iterator[np.ndarray]:
        for start in range(0, len(heldout), BATCH):
            read = heldout.read(np.arange(start, min(start + BATCH, len(heldout))))
            yield decode(to_network(read.stored, heldout.latents)).numpy()

    scores = {}
    with tempfile.TemporaryDirectory() as folder:
        save_npz(Path(folder) / "round_trip.npz", pictures(), heldout.labels)
        sets = {"held-out photos": data / options.photos, "their round trip": Path(folder) / "round_trip.npz"}
        for name, samples in sets.items():
            out = Path(folder) / name
            words = [f"samples='{samples}'", f"reference='{data / 'imagenette' / 'reference'}'", f"out='{out}'"]
            Children().run(["fid.py", *words, "crop=128"], cores_of(1), Path(folder) / "log.txt")
            read = json.loads((out / "fid.json").read_text())
            scores[name] = {key: value for key, value in read.items() if key not in (*LEFT_OUT, "seconds", "samples")}
            print(f"  {name:<18} KID {read['kid']:.4f}, FID {read['fid']:.1f}, of {read['count']:,} samples")
    write_whole(Path(options.out), json.dumps(scores, indent=1) + "\n")


if __name__ == "__main__":
    main()
