"""How well a network draws the emoji asked for: python scripts/judge_emoji.py checkpoint=results/emoji-tread_text

Of seen captions and of held-out compositions, the share whose nearest real emoji (and one of the five nearest) carries
the caption, and what the real pictures reach: tread/evaluation/emoji_judge.py. Writes judge_emoji.json, and
judge_emoji.png: rows of captions with the real emoji, then those drawn; files of these names that are there are
replaced. All options: configs/judge_emoji.yaml.
"""

from pathlib import Path

if __name__ == "__main__":
    import checkout  # noqa: F401

import json
import time
from dataclasses import asdict, dataclass, replace

import hydra
import torch
from omegaconf import DictConfig
from torch import Tensor
from tqdm import tqdm

from tread.checkpoints import checkpoint
from tread.checkpoints.for_sampling import open_network, open_weak
from tread.checkpoints.weights import KINDS
from tread.diffusion.guidance import Guidance
from tread.diffusion.sampling import Sampler, check_ratios, draw_pictures, relative_cost
from tread.diffusion.solvers import Solver
from tread.drawing.grids import draw_grid, name_rows, save_png
from tread.encoders.autoencoder import load_decoder
from tread.encoders.inception import at_hand, find_weights, load_inception
from tread.evaluation.emoji_judge import Asked, ask, judge_emoji, open_emoji, real_emoji
from tread.preparing.emoji import ATTRIBUTION
from tread.runtime import schema
from tread.runtime.cli import explained, open_door, plain
from tread.runtime.device import Precision, device_name, use_cores, use_precision
from tread.runtime.files import check_place, explain_failure, write_whole
from tread.runtime.schema import Count, TwoOrMore
from tread.runtime.tensor_files import Weights
from tread.runtime.versions import versions


@dataclass(frozen=True)
class Options:
    """configs/judge_emoji.yaml."""

    checkpoint: str
    num_samples: TwoOrMore
    rows: Count
    columns: Count
    steps: Count | None
    solver: Solver | None
    batch_size: Count
    precision: Precision
    cpu_threads: Count | None
    weights: Weights
    inception: str | None
    guidance: Guidance
    data: str | None
    out: str | None


@hydra.main(version_base="1.3", config_path="../configs", config_name="judge_emoji")
def main(composed: DictConfig) -> None:
    with explained("stopped; nothing was written"):
        run(schema.read(plain(composed), Options))


def run(options: Options) -> None:
    """Check, draw, judge, write. Raises ValueError or OSError."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = use_precision(options.precision, device)
    use_cores(options.cpu_threads, processes=1)
    saved = open_network(checkpoint.find(Path(options.checkpoint).expanduser()), options.weights)
    weaker = open_weak(options.guidance, saved)
    batch_size = min(options.batch_size, options.num_samples)
    sampler = Sampler.of(saved.process, options.steps, options.solver, batch_size, precision, options.guidance)
    outlines = [each and each.without_weights(options.guidance) for each in (saved, weaker)]
    check_ratios(sampler, *outlines)
    train, heldout = open_emoji(saved, options.data)
    real, asked = real_emoji(train, heldout), ask(train, heldout, options.num_samples)
    named = options.inception and str(Path(options.inception).expanduser())
    inception = load_inception(find_weights(named), device) if at_hand(named) else None
    folder = Path(options.out).expanduser() if options.out else saved.found.folder
    check_place(folder, 0)
    model, weak = saved.load(device, options.guidance), weaker and weaker.load(device, options.guidance)
    decoder, cost = load_decoder(saved.latents, device), relative_cost(sampler, *outlines)
    print(
        f"  checkpoint  {saved.found.folder}: {KINDS[options.weights]} weights of step {saved.found.step:,}\n"
        f"  samples     {options.num_samples:,}, of {len(real.captions):,} real emoji; {sampler.solver} with "
        f"{sampler.steps} steps, guidance {options.guidance.describe()}, {cost:.3f} times the FLOPs of none"
    )

    def drawn(asked: Asked, name: str) -> Tensor:
        count, prompted = len(asked.numbers), replace(model, prompts=asked.texts)
        stream = draw_pictures(prompted, decoder, range(count), torch.arange(count), sampler, weak, check=True)
        batches = -(-count // sampler.batch_size)
        return torch.cat(list(tqdm(stream, desc=name, total=batches, unit="batch", leave=False)))

    began = time.perf_counter()
    pictures = drawn(asked, "samples")
    seconds = time.perf_counter() - began
    scores = judge_emoji(pictures, asked, real, inception)
    for name, value in scores.items():
        print(f"  {name:<27} {value:.4f}")
    record = {
        "checkpoint": str(saved.found.folder),
        "step": saved.found.step,
        "sha256": saved.sha256,
        "weights": options.weights,
        "data": [str(data.folder) for data in (train, heldout)],
        "count": options.num_samples,
        "guidance": options.guidance.describe(),
        **{name: getattr(sampler, name) for name in ("solver", "steps", "precision")},
        "nfe": sampler.nfe(saved.process),
        "flops": sampler.flops(*outlines),
        "flops_relative": round(cost, 4),
        **{name: round(value, 6) for name, value in scores.items()},
        "seconds": round(seconds, 1),
        "device": device_name(device),
        "versions": versions(),
    }
    files = [folder / "judge_emoji.json", folder / "judge_emoji.png"]
    shown, columns = ask(train, heldout, 2 * options.rows), options.columns
    with explain_failure(folder):
        write_whole(files[0], json.dumps(record, indent=1) + "\n")
        pictures = drawn(shown.repeated(columns), "grid").unflatten(0, (-1, columns))
        rows = torch.cat([real.pictures[torch.from_numpy(shown.numbers)][:, None], pictures], dim=1)
        captions = [real.captions[number][0] for number in shown.numbers]
        grid = name_rows(draw_grid(rows.flatten(0, 1).numpy(), columns + 1), captions)
        save_png(files[1], grid, asdict(options) | {"captions": captions, "attribution": ATTRIBUTION})
    print(f"  written     {', '.join(map(str, files))}")


if __name__ == "__main__":
    open_door(main, schema.known_keys(Options))
