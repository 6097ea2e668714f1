"""Draw samples from a checkpoint: python sample.py checkpoint=results/digits-tread/latest

All options: configs/sample.yaml. The sampling loop is in tread/diffusion/sampling.py.
"""

if __name__ == "__main__":
    from tread.runtime.import_guard import guard_imports

    guard_imports(globals())

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from tread.checkpoints import checkpoint
from tread.checkpoints.for_sampling import open_network, open_weak
from tread.data.latents import from_network
from tread.diffusion.guidance import Guidance
from tread.diffusion.sampling import Sampler, check_ratios, draw_pictures, relative_cost
from tread.diffusion.solvers import Churn, Solver
from tread.encoders import autoencoder
from tread.evaluation.prompts import encode_prompts, read_prompts, row_labels
from tread.evaluation.sample_files import SampleFiles, check_name, describe_drawing, facts_of, parse_seeds
from tread.runtime.cli import door, open_door
from tread.runtime.device import Precision, avoid_faults, device_name, use_cores, use_precision
from tread.runtime.plugins import plugin_changes
from tread.runtime.schema import Count, Positive
from tread.runtime.tensor_files import Weights


@dataclass(frozen=True)
class Options:
    """The options of sample.py; configs/sample.yaml explains each of them."""

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
    decode_precision: autoencoder.Decoding = "fp32"

    def __post_init__(self) -> None:
        check_name(self.out, self.save_latents)
        if (self.save_latents or not self.decode) and (self.autoencoder is not None or self.decode_precision != "fp32"):
            decoding = "autoencoder=… and decode_precision=…"
            latents = "save_latents=true writes" if self.save_latents else "decode=false draws"
            raise ValueError(f"{latents} latents and decodes none: leave it out, or {decoding}")
        if self.text_encoder is not None and self.prompt is self.prompts is None:
            raise ValueError("text_encoder is given, but no prompt that it would read: prompt=… or prompts=…")


@door(Options)
def main(options: Options) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    seeds = parse_seeds(options.seeds)
    precision = use_precision(options.precision, device)
    use_cores(options.cpu_threads, processes=1)
    strong = open_network(checkpoint.find(options.checkpoint), options.weights, options.shift)
    weak = open_weak(options.guidance, strong)
    prompts = read_prompts(options.prompt, options.prompts)
    rows = row_labels(strong, options.classes, prompts)
    names, out = prompts or strong.latents.classes, options.out and Path(options.out).expanduser()
    files = SampleFiles(out, options.overwrite, seeds, rows, names, options.save_latents, bool(prompts))
    churn = Churn(options.churn) if isinstance(options.churn, float) else options.churn
    batch_size = min(options.batch_size, len(files.pairs))
    sampler = Sampler.of(strong.process, options.steps, options.solver, batch_size, precision, options.guidance, churn)
    outlines = [network and network.without_weights(options.guidance) for network in (strong, weak)]
    check_ratios(sampler, *outlines)
    files.check()
    text, notes = encode_prompts(strong, prompts, device, options.text_encoder) if prompts else (None, ())
    for note in (*plugin_changes(strong.found.info), *notes, *filter(None, [avoid_faults(device)])):
        print(f"note: {note}")
    facts = facts_of(asdict(options), sampler, strong, weak) | {"device": device_name(device)}
    model = replace(strong.load(device, options.guidance), prompts=text)
    guide = weak and weak.load(device, options.guidance)
    if options.save_latents:
        facts["latents"] = asdict(replace(strong.latents, classes=()))
        decoder = partial(from_network, latents=strong.latents)
    elif options.decode:
        decoder = autoencoder.load_decoder(strong.latents, device, options.autoencoder, options.decode_precision)
    else:
        decoder = autoencoder.preview
    labels, columns = zip(*files.pairs)
    drawn = draw_pictures(model, decoder, columns, torch.tensor(labels), sampler, guide, check=True)
    bar = tqdm(drawn, desc="sampling", total=-(-len(labels) // sampler.batch_size), unit="batch")
    path, grey = files.write((part.numpy() for part in bar), facts)
    made = describe_drawing(strong, sampler, relative_cost(sampler, *outlines))
    print(f"{files.describe(path, grey, options.seeds)}; {made} on {device.type}")


if __name__ == "__main__":
    open_door(main, literal=("prompt",))
