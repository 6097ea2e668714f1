"""Draw samples from a checkpoint: python sample.py checkpoint=results/digits-tread/latest

All options: configs/sample.yaml. How samples are drawn: tread/diffusion/sampling.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    from tread.runtime.import_guard import guard_imports

    guard_imports(globals())

import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig
from tqdm import tqdm

from tread.checkpoints import checkpoint
from tread.checkpoints.for_sampling import open_network, open_weak
from tread.data.latents import from_network
from tread.diffusion.guidance import Guidance
from tread.diffusion.sampling import (
    Sampler,
    check_ratios,
    draw_pictures,
    relative_cost,
)
from tread.diffusion.solvers import Churn, Solver
from tread.encoders import autoencoder
from tread.evaluation.prompts import brief, encode_prompts, read_prompts, row_labels
from tread.evaluation.sample_files import SampleFiles, check_name, facts_of, parse_seeds
from tread.runtime import schema
from tread.runtime.cli import explained, open_door, plain
from tread.runtime.device import Precision, device_name, use_cores, use_precision
from tread.runtime.schema import Count, Positive
from tread.runtime.tensor_files import Weights


@dataclass(frozen=True)
class Options:
    """configs/sample.yaml."""

    checkpoint: str
    classes: tuple[int | None, ...] | None
    prompt: str | None
    prompts: str | None
    seeds: str | int | tuple[int, ...]
    steps: Count | None
    solver: Solver | None
    shift: Positive | None
    churn: float | Churn | None
    batch_size: Count
    precision: Precision
    cpu_threads: Count | None
    weights: Weights
    guidance: Guidance
    decode: bool
    save_latents: bool
    autoencoder: str | None
    text_encoder: str | None
    out: str | None
    overwrite: bool
    plugins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name(self.out, self.save_latents)
        if self.save_latents and self.autoencoder is not None:
            raise ValueError("save_latents=true writes latents and decodes none: leave it out, or autoencoder=…")


@hydra.main(version_base="1.3", config_path="configs", config_name="sample")
def main(composed: DictConfig) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with explained():
        options = schema.read(plain(composed), Options)
        seeds = parse_seeds(options.seeds)
        precision = use_precision(options.precision, device)
        use_cores(options.cpu_threads, processes=1)
        found = checkpoint.find(Path(options.checkpoint).expanduser())
        trained = open_network(found, options.weights, options.shift)
        weaker = open_weak(options.guidance, trained)
        prompts = read_prompts(options.prompt, options.prompts)
        rows = row_labels(trained, options.classes, prompts)
        all_seeds, labels = seeds * len(rows), torch.tensor(rows).repeat_interleave(len(seeds))
        batch_size = min(options.batch_size, len(all_seeds))
        churn = Churn(options.churn) if isinstance(options.churn, float) else options.churn
        given = (options.steps, options.solver, batch_size, precision, options.guidance, churn)
        sampler = Sampler.of(trained.process, *given)
        nfe = sampler.nfe(trained.process)
        outlines = [one and one.without_weights(options.guidance) for one in (trained, weaker)]
        check_ratios(sampler, *outlines)
        cost = relative_cost(sampler, *outlines)
        relative = "" if options.guidance.kind == "none" else f"{cost:.3f} times the FLOPs of no guidance, "
        out = options.out and Path(options.out).expanduser()
        names = prompts or trained.latents.classes
        files = SampleFiles(out, options.overwrite, seeds, rows, names, options.save_latents, bool(prompts))
        files.check()
        text = None
        if prompts:
            text, doubts = encode_prompts(trained, prompts, device, options.text_encoder)
            for doubt in doubts:
                print(f"note: {doubt}")
        facts = facts_of(asdict(options), sampler, trained, weaker) | {"device": device_name(device)}
        model, weak = trained.load(device, options.guidance), weaker and weaker.load(device, options.guidance)
        model = replace(model, prompts=text)
        decoder = autoencoder.preview
        if options.save_latents:
            facts["latents"] = asdict(replace(trained.latents, classes=()))
            decoder = partial(from_network, latents=trained.latents)
        elif options.decode:
            decoder = autoencoder.load_decoder(trained.latents, device, options.autoencoder)
        stream = draw_pictures(model, decoder, all_seeds, labels, sampler, weak, check=True)
        batches = -(-len(all_seeds) // sampler.batch_size)
        pictures = (part.numpy() for part in tqdm(stream, desc="sampling", total=batches, unit="batch"))
        written, grey = files.write(pictures, facts)
        kind = "latents" if options.save_latents else "pictures"
        of, columns = ("rows are", "columns ") if files.form == "grid" else (f"{len(labels)} {kind} of", "")
        print(
            f"{written}: {of} {told(files)}, {columns}seeds {options.seeds}"
            f"{', grey as RGB of three equal channels' if grey else ''}; step {trained.found.step}, "
            f"{options.weights} weights, {sampler.solver} with {sampler.steps} steps"
            f"{f' and shift {trained.shift:g}' if trained.shift not in (None, 1) else ''}"
            f"{f' and churn {sampler.churn.amount:g}' if sampler.churn.amount else ''}, NFE {nfe}, guidance "
            f"{options.guidance.describe()}, {relative}{precision} on {device.type}"
        )


def told(files: SampleFiles) -> str:
    """What is in the rows."""
    if not files.prompts:
        return f"classes {json.dumps([None if label == len(files.classes) else label for label in files.labels])}"
    first = json.dumps(brief(files.classes[0]), ensure_ascii=False)
    return f"{len(files.classes)} prompts from {first} on" if files.classes[1:] else f"prompt {first}"


if __name__ == "__main__":
    open_door(main, schema.known_keys(Options), literal=("prompt",))
