"""The best scores that scale=small can reach: python studies/floor.py [data=data]

Scores the held-out photos themselves, data/imagenette/photos/val, and what the autoencoder makes of their latents,
data/imagenette/val, against the same reference. Writes studies/floor.json.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from studies.jobs import LEFT_OUT
from studies.study import HERE, ROOT
from tread.data.dataset import LatentDataset
from tread.data.latents import to_network
from tread.encoders.autoencoder import load_decoder
from tread.evaluation.image_sets import save_npz
from tread.runtime.cli import answer_help, explained
from tread.runtime.files import write_whole

BATCH = 50


def main() -> None:
    """Decode, score both sets, write."""
    answer_help(__doc__)
    data, scores = Path(sys.argv[-1].removeprefix("data=") if sys.argv[1:] else "data").resolve() / "imagenette", {}
    heldout = LatentDataset(data / "val")
    decode = load_decoder(heldout.latents)
    batches = np.array_split(np.arange(len(heldout)), range(BATCH, len(heldout), BATCH))
    pictures = (decode(to_network(heldout.read(batch).stored, heldout.latents)).numpy() for batch in batches)
    with tempfile.TemporaryDirectory() as folder:
        decoded = Path(folder, "round_trip.npz")
        save_npz(decoded, pictures, heldout.labels)
        for name, samples in {"held-out photos": data / "photos" / "val", "their round trip": decoded}.items():
            out = Path(folder, name)
            words = [f"samples='{samples}'", f"reference='{data / 'reference'}'", f"out='{out}'", "crop=128"]
            subprocess.run([sys.executable, "fid.py", *words], cwd=ROOT, check=True)
            read = json.loads((out / "fid.json").read_text())
            scores[name] = {key: value for key, value in read.items() if key not in (*LEFT_OUT, "seconds", "samples")}
    write_whole(HERE / "floor.json", json.dumps(scores, indent=1) + "\n")


if __name__ == "__main__":
    with explained():
        main()
