"""Measures the cost of a training step, with and without token routing: python benchmarks/step_time.py [overrides]

Runs train.py's own steps on random latents: "dense" steps on all tokens and "routed" steps alternate in one process.
Prints for each kind of step the median time, images/s, FLOP/s, MFU and peak memory; the speedup over dense steps, with
its confidence interval; and the speedup divided by the ratio of FLOPs. Then prints which fractions of a step loading,
forward, backward, optimizer and EMA take. If one kind of step fails, the others go on. Overrides are train.py's, and

    beside=…      further models to time, separated by commas; they get only the overrides that all models take
    pairs=24      measurements of each kind of step, each of one step (on a GPU, of 5, to hide kernels' launch time)
    out=…         a JSON file to write as well

python benchmarks/step_time.py experiment=imagenet256_s2 train.batch_size=16       # CPU
python benchmarks/step_time.py experiment=imagenet256_xl2 train.batch_size=256     # GPU
python benchmarks/step_time.py experiment=imagenet256_lightning_b2 model=tread_lightning beside=dit train.batch_size=16
python benchmarks/step_time.py experiment=imagenet256_s2 model=tread beside=maskdit,sprint train.batch_size=16
"""

if __name__ == "__main__":
    import checkout  # noqa: F401


import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import torch
from scipy import stats
from timing import DEVICE, begin, circumstances, composed, options_of, random_dataset, seconds, take_turns

from tread.checkpoints.ema import EMA
from tread.data.columns import TextSpec
from tread.data.section_writer import TextWriter
from tread.encoders.language import BEGIN, UNKNOWN
from tread.models.architectures import ARCHITECTURES, NetworkOptions
from tread.models.backbone import count_parameters
from tread.models.conditions import Text
from tread.runtime.device import peak_flops
from tread.runtime.files import check_file, write_json
from tread.runtime.schema import Range
from tread.runtime.signals import Stop
from tread.training import settings, step
from tread.training.costs import sample_flops
from tread.training.draws import active_routes
from tread.training.run import Run
from tread.training.start import start

BLOCK = 5 if DEVICE.type == "cuda" else 1  # steps in a turn
Kinds = dict[str, tuple[Run, settings.Settings]]  # name of a kind of step → a run, and the settings of its steps


@dataclass(frozen=True)
class Options:
    beside: str = ""
    pairs: Annotated[int, Range("be at least 6, for an interval of the median", lambda number: number >= 6)] = 24
    out: str | None = None


def main() -> None:
    options, overrides = options_of(Options)
    with tempfile.TemporaryDirectory() as folder:
        kinds = kinds_of(open_run(Path(folder), overrides))
        shared = [item.name for item in fields(NetworkOptions)]
        own = [item.name for kind in ARCHITECTURES.values() for item in fields(kind) if item.name not in shared]
        kept = [word for word in overrides if not word.startswith(("model=", *(f"model.{name}=" for name in own)))]
        for name in filter(None, options.beside.split(",")):
            run = open_run(Path(folder) / name, [*kept, f"model={name}"])
            kinds[name] = run, run.cfg
        result = measure(kinds, options.pairs)
    show(result)
    if options.out:
        write_json(check_file(options.out), result)


def open_run(folder: Path, overrides: Sequence[str]) -> Run:
    """Start a run as train.py does, in `folder`, on random latents (and texts) of the config's shapes."""
    fixed = [f"dataset.path={folder}/data", f"results={folder}", "dataset.heldout=null", "sampling.decode=false"]
    fixed += ["dataset.embedded=null", "eval.demo_samples=0", "init_from=null", "train.steps=1000000"]
    words = composed("config", [*overrides, *fixed])["text"]["encoder"] == "words"
    config = composed("config", [*overrides, *fixed, f"text.encoder={'words' if words else 'random'}"])
    cfg = settings.read(config)
    shape, count = (cfg.dataset.channels, cfg.dataset.size, cfg.dataset.size), 4 * cfg.train.batch_size
    if None in (*shape, cfg.dataset.num_classes):
        raise ValueError("random data needs dataset.channels, dataset.size and dataset.num_classes")
    random_dataset(folder / "data", shape, cfg.dataset.num_classes, count, count)
    if cfg.model.takes_text:
        random_text(folder / "data", count, words)
        cfg, config = settings.complete(config)
    stop = Stop()
    run = start(cfg, config, stop)
    stop.close()  # Ctrl-C ends a benchmark
    return run


def random_text(folder: Path, count: int, words: bool) -> None:
    """Write a random caption for each of a dataset's `count` samples: 4 to 77 embeddings from N(0, 1), as wide as CLIP
    ViT-L's; with words=True, 2 to 13 word indices, padded to 16, as in the emoji dataset."""
    spec = TextSpec("random", None, 77, 768, 768)
    if words:
        spec = TextSpec("words", None, 16, None, None, (BEGIN, UNKNOWN, *map(str, range(2, 2000))))
    least, most = (2, 13) if words else (4, 77)
    draws = torch.Generator().manual_seed(0)

    def text(rows: int) -> Text:
        mask = torch.arange(spec.tokens) < torch.randint(least, most + 1, (rows, 1), generator=draws)
        if words:
            return Text(torch.randint(2, 2000, mask.shape, generator=draws) * mask, mask)
        return Text(torch.randn(rows, 77, 768, generator=draws), mask, torch.randn(rows, 768, generator=draws))

    writer = TextWriter(folder, spec, [1] * count)
    writer.begin()
    for number in writer.missing():
        writer.write(number, [text(len(writer.ranges[number]))])
    writer.publish()


def kinds_of(run: Run) -> Kinds:
    """Return {name: (run, settings)}: "dense", all tokens; "routed", routes without fp32 blocks; "routed, fp32: end",
    each route's last block in fp32, if the run is bf16 and not MaskDiT's. Raises ValueError if there are no routes."""
    cfg = run.cfg
    if not cfg.model.routes:
        raise ValueError(f"model={cfg.model.name} has no routes to compare; model=tread measures both")

    def routed(fp32: str) -> settings.Settings:
        routes = tuple(replace(route, fp32=fp32) for route in cfg.model.routes)
        in_all_steps = replace(cfg.train, routes_until=None)
        return replace(cfg, model=replace(cfg.model, routes=routes), train=in_all_steps)

    dense = replace(cfg, train=replace(cfg.train, routes_until=0))
    kinds = {"dense": (run, dense), "routed": (run, routed("off"))}
    if run.precision == "bf16" and not cfg.model.masks:
        kinds["routed, fp32: end"] = run, routed("end")
    return kinds


def calls_of(kinds: Kinds) -> dict[str, Callable[[], None]]:
    """Return {name: a function that takes BLOCK (a constant) steps of that kind}."""
    return {name: partial(take_steps, *kind, BLOCK) for name, kind in kinds.items()}


def measure(kinds: Kinds, pairs: int) -> dict:
    """Time each kind of step `pairs` times, alternately. Returns, for JSON, the device, versions, sizes and "kinds":
    {name: median ms of a step, speeds, memory, and "ratio": the median of the first kind's time / this one's}."""
    for run, cfg in {id(kind[0]): kind for kind in kinds.values()}.values():
        with suppress(Exception):  # makes the optimizer's state, which held_by counts; fails in its turn, too
            take_steps(run, cfg, 1)
    failed: dict[str, str] = {}
    turns = take_turns(calls_of(kinds), pairs, failed)
    (first, (run, dense)), *_ = kinds.items()
    batch, peak = run.cfg.train.batch_size, peak_flops(DEVICE, run.precision)
    rows = {}
    for name, turn in turns.items():
        memory, flops = held_by(kinds[name][0]) + turn.held, flops_of(*kinds[name])
        row = rows[name] = {"ms": 1000 * turn.median / BLOCK, "peak_gb": memory / 1e9, "first_turn_s": turn.first}
        row |= {"images_per_s": 1000 * batch / row["ms"], "flops_per_s": 1000 * flops * batch / row["ms"]}
        row["mfu"] = peak and row["flops_per_s"] / peak
        if name != first and first in turns:
            ratios, ideal = turns[first].over(turns[name]), flops_of(run, dense) / flops
            row |= {"ratio": statistics.median(ratios), "ratio_95": interval(ratios), "ideal": ideal}
            row |= {"of_ideal": row["ratio"] / ideal, "of_ideal_95": [bound / ideal for bound in row["ratio_95"]]}
    for name, row in rows.items():
        row["stages"] = {}
        with suppress(torch.OutOfMemoryError):  # the CUDA graphs still hold the memory of a step
            row["stages"] = stages(*kinds[name])
    return {
        "name": run.cfg.name,
        "parameters": count_parameters(run.network),
        "batch": batch,
        "micro_batch": run.micro_batches[0].stop - run.micro_batches[0].start,
        "memory": run.memory,
        "pairs": pairs,
        "block": BLOCK,
        "kinds": rows,
        "failed": failed,
        "precision": run.precision,
        "compiled": run.network.blocks[0]._compiled_call_impl is not None,
        "threads": torch.get_num_threads(),
        **circumstances(),
    }


def flops_of(run: Run, cfg: settings.Settings) -> int:
    """Return the FLOPs of a training step for one image."""
    return sample_flops(run.network, active_routes(cfg, run.step), run.aligner)


def take_steps(run: Run, cfg: settings.Settings, count: int) -> None:
    """Take `count` training steps of a run with the settings `cfg`, and count them in run.step."""
    run.cfg = cfg
    try:
        for _ in range(count):
            step.training_step(run)
            run.step += 1
    except Exception:
        run.network.zero_grad(set_to_none=True)  # free the memory for other kinds of steps
        raise


def interval(ordered: Sequence[float]) -> list[float]:
    """Return [low, high], a 95% confidence interval of the median of 6 or more sorted values (binomial)."""
    low = max(0, int(stats.binom.ppf(0.025, len(ordered), 0.5)) - 1)
    return [ordered[low], ordered[-1 - low]]


def held_by(run: Run) -> int:
    """Return the bytes of a run's weights, their EMA and the optimizer's state."""
    networks = [[*network.parameters(), *network.buffers()] for network in (run.wrapped, run.ema.network)]
    states = [filter(torch.is_tensor, state.values()) for state in run.optimizer.state.values()]
    return sum(tensor.nbytes for tensor in chain(*networks, *states))


def stages(run: Run, cfg: settings.Settings) -> dict[str, float]:
    """Return {stage: fraction of 5 steps' time}: "data wait", "forward", …, "rest". Waits for the device after each."""
    spent = Counter()
    with ExitStack() as patches:
        patches.enter_context(patch.object(run, "graphs", None))  # a CUDA graph would replay all stages at once
        for stage, owner, name in (
            ("data wait", run.loader, "batches"),
            ("forward", step, "loss"),
            ("backward", step, "backward"),
            ("optimizer", step, "optimizer_step"),
            ("EMA", EMA, "update"),
        ):
            patches.enter_context(patch.object(owner, name, timed(getattr(owner, name), stage, spent)))
        total = seconds(partial(take_steps, run, cfg, 5))
    spent["rest"] = total - sum(spent.values())
    return {stage: taken / total for stage, taken in spent.items()}


def timed(function: Callable, stage: str, spent: Counter) -> Callable:
    """Wrap a function so that the seconds of each call are added to spent[stage]."""

    def call(*arguments: object) -> object:
        outputs = []
        spent[stage] += seconds(lambda: outputs.append(function(*arguments)))
        return outputs[0]

    return call


def show(result: dict) -> None:
    """Print what `measure` returned: a table with a line per kind of step, then speed ratios, failures and stages."""
    print(
        f"{result['name']}, {result['parameters']:,} parameters, batch {result['batch']} in micro-batches of "
        f"{result['micro_batch']}, {result['device']}, {result['precision']}, {'' if result['compiled'] else 'not '}"
        f"compiled, {result['threads']} threads, torch {result['torch']}, {result['pairs']} turns of "
        f"{result['block']} steps\n{'':<18} {'ms':>8} {'images/s':>9} {'TFLOP/s':>8} {'MFU':>6} {'GB':>6} {'first':>7}"
    )
    for name, row in result["kinds"].items():
        mfu = "" if row["mfu"] is None else f"{row['mfu']:.3f}"
        print(
            f"{name:<18} {row['ms']:>8.1f} {row['images_per_s']:>9.1f} {row['flops_per_s'] / 1e12:>8.2f} {mfu:>6} "
            f"{row['peak_gb']:>6.1f} {row['first_turn_s']:>6.1f}s"
        )
    for name, row in result["kinds"].items():
        if "ratio" in row:
            (low, high), (least, most) = row["ratio_95"], row["of_ideal_95"]
            print(
                f"dense / {name}: {row['ratio']:.3f} (95% of the median {low:.3f}..{high:.3f}), FLOPs allow "
                f"{row['ideal']:.3f}: {row['of_ideal']:.3f} of that ({least:.3f}..{most:.3f})"
            )
    for name, reason in result["failed"].items():
        print(f"{name} failed: {reason}")
    for name, row in result["kinds"].items():
        print(f"{name}: " + ", ".join(f"{stage} {fraction:.1%}" for stage, fraction in row["stages"].items()))


if __name__ == "__main__":
    begin(main)
