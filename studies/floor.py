"""The best scores that scale=small can reach: python studies/floor.py [data=data] [photos=…] [out=studies/floor.json]

Scores the held-out photos themselves, and what the autoencoder makes of their latents, against the same reference.

    photos=imagenette/photos/val   below data: the pictures that the latents in imagenette/val were made of
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from omegaconf import OmegaConf

from studies.jobs import LEFT_OUT
from studies.study import HERE, ROOT
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
    photos: str = "imagenette/photos/val"
    out: str = str(HERE / "floor.json")


def main() -> None:
    answer_help(__doc__)
    with explained():
        run(schema.read(OmegaConf.to_container(OmegaConf.from_cli(sys.argv[1:])), Options))


def run(options: Options) -> None:
    """Decode, score both sets, write. Raises ValueError or OSError."""
    data, scores = Path(options.data).resolve(), {}
    heldout = LatentDataset(data / "imagenette" / "val")
    decode = load_decoder(heldout.latents)
    batches = np.array_split(np.arange(len(heldout)), range(BATCH, len(heldout), BATCH))
    pictures = (decode(to_network(heldout.read(batch).stored, heldout.latents)).numpy() for batch in batches)
    with tempfile.TemporaryDirectory() as folder:
        decoded = Path(folder, "round_trip.npz")
        save_npz(decoded, pictures, heldout.labels)
        for name, samples in {"held-out photos": data / options.photos, "their round trip": decoded}.items():
            out = Path(folder, name)
            words = [f"samples='{samples}'", f"reference='{data / 'imagenette' / 'reference'}'", f"out='{out}'"]
            subprocess.run([sys.executable, "fid.py", *words, "crop=128"], cwd=ROOT, check=True)
            read = json.loads((out / "fid.json").read_text())
            scores[name] = {key: value for key, value in read.items() if key not in (*LEFT_OUT, "seconds", "samples")}
    write_whole(Path(options.out), json.dumps(scores, indent=1) + "\n")


if __name__ == "__main__":
    main()
