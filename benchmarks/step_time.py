"""What a training step costs, with and without routes: python benchmarks/step_time.py [overrides]

Runs train.py's own steps on random latents, dense and routed ones taking turns in one process, and prints for
each kind the median time, images/s, FLOP/s, MFU, peak memory, the ratio dense/routed with its spread, and that
ratio over what the FLOPs allow; then how a step's time divides into stages. Overrides are those of train.py, and

    beside=dit    further models, separated by commas, as they train by the same overrides but an architecture's own
    pairs=24      turns that are measured, of a step each (5 on a GPU, where single ones show the first kernels' launch)
    out=…         a JSON file to write as well

python benchmarks/step_time.py experiment=imagenet256_s2 train.batch_size=16       # CPU
python benchmarks/step_time.py experiment=imagenet256_xl2 train.batch_size=256     # GPU
python benchmarks/step_time.py experiment=imagenet256_lightning_b2 model=tread_lightning beside=dit train.batch_size=16
python benchmarks/step_time.py experiment=imagenet256_s2 model=tread beside=maskdit,sprint train.batch_size=16
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import torch
from timing import begin, circumstances, composed, options_of, random_shards, random_text, seconds, take_turns, write

from tread.data.latents import LatentSpec
from tread.data.writer import write_dataset
from tread.models.architectures import CHOSEN
from tread.runtime.device import peak_flops, wait_for
from tread.runtime.signals import Stop
from tread.training import settings, step
from tread.training.ema import EMA
from tread.training.run import Run
from tread.training.start import start

STAGED = 5  # steps taken stage by stage
Kinds = Mapping[str, tuple[Run, settings.Settings]]


@dataclass(frozen=True)
class Options:
    beside: str | None = None
    pairs: int = 24
    out: str | None = None

    def __post_init__(self) -> None:
        if self.pairs < 6:
            raise ValueError(f"pairs is {self.pairs}, but an interval of the median needs 6")


def main() -> None:
    options, overrides = options_of(Options)
    with tempfile.TemporaryDirectory() as folder:
        kinds = kinds_of(open_run(Path(folder), overrides))
        left_out = ("model=", *(f"model.{name}=" for name in CHOSEN.optional()))
        kept = [word for word in overrides if not word.startswith(left_out)]
        for name in options.beside.split(",") if options.beside else ():
            run = open_run(Path(folder) / name, [*kept, f"model={name}"])
            kinds[name] = run, run.cfg
        result = measure(kinds, options.pairs)
    show(result)
    write(options.out, result)


def open_run(folder: Path, overrides: Sequence[str]) -> Run:
    """A run as train.py starts it, on random latents of the config's shape (and text), in a temporary folder."""
    fixed = [f"dataset.path={folder}/data", f"results={folder}", "dataset.heldout=null", "sampling.decode=false"]
    fixed += ["dataset.embedded=null", "eval.demo_samples=0", "init_from=null", "train.steps=1000000"]
    words = composed("config", [*overrides, *fixed])["text"]["encoder"] == "words"
    config = composed("config", [*overrides, *fixed, f"text.encoder={'words' if words else 'random'}"])
    cfg = settings.read(config)
    shape, count = (cfg.dataset.channels, cfg.dataset.size, cfg.dataset.size), 4 * cfg.train.batch_size
    meaning = LatentSpec(shape, tuple(map(str, range(cfg.dataset.num_classes))), "pixels", scale_applied=True)
    write_dataset(folder / "data", meaning, random_shards(meaning, count, count))
    if cfg.model.takes_text:
        random_text(folder / "data", count, words)
        cfg, config = settings.complete(config)
    stop = Stop()
    run = start(cfg, config, stop)
    stop.close()  # Ctrl-C ends a benchmark
    return run


def kinds_of(run: Run) -> dict[str, tuple[Run, settings.Settings]]:
    """Kinds of steps by name, each as a run and its settings: without routes, with them, and with the route's last
    block in fp32 where that differs.
    """
    cfg = run.cfg
    if not cfg.model.routes:
        raise ValueError(f"model={cfg.model.name} has no routes to compare; model=tread measures both")

    def routed(fp32: str) -> settings.Settings:
        routes = tuple(replace(route, fp32=fp32) for route in cfg.model.routes)
        return replace(cfg, model=replace(cfg.model, routes=routes), train=replace(cfg.train, routes_until=None))

    kinds = {"dense": (run, replace(cfg, train=replace(cfg.train, routes_until=0))), "routed": (run, routed("off"))}
    if run.precision == "bf16" and not cfg.model.masks:
        kinds["routed, fp32: end"] = run, routed("end")
    return kinds


def measure(kinds: Kinds, pairs: int) -> dict:
    """All numbers of the table; ratios are to the first kind. Raises ValueError if a kind fails."""
    first, device = next(iter(kinds)), next(iter(kinds.values()))[0].processes.device
    run, block, facts = kinds[first][0], 5 if device.type == "cuda" else 1, circumstances(device)
    turns, failed = take_turns({name: partial(take_steps, *kind, block) for name, kind in kinds.items()}, pairs, device)
    if failed:
        raise ValueError("; ".join(f"{name}: {why}" for name, why in failed.items()))
    batch, peak, rows = run.cfg.train.batch_size, peak_flops(device, run.precision), {}
    for name, (timed, cfg) in kinds.items():
        flops, ms = forward_flops(timed, cfg), 1000 * statistics.median(turns[name].seconds) / block
        row = {"ms": ms, "images_per_s": 1000 * batch / ms, "flops_per_s": 3000 * flops * batch / ms}
        row |= {"mfu": peak and row["flops_per_s"] / peak, "peak_gb": (held_by(timed) + turns[name].held) / 1e9}
        row["first_turn_s"] = turns[name].first
        if name != first:
            ratios = [a / b for a, b in zip(turns[first].seconds, turns[name].seconds)]
            ideal, (low, high) = forward_flops(*kinds[first]) / flops, interval(ratios)
            row |= {"ratio": statistics.median(ratios), "ratio_95": [low, high], "ideal": ideal}
            row |= {"of_ideal": row["ratio"] / ideal, "of_ideal_95": [low / ideal, high / ideal]}
        rows[name] = row | {"stages": stages(timed, cfg)}
    return {
        "name": run.cfg.name,
        "parameters": sum(parameter.numel() for parameter in run.network.parameters()),
        "batch": batch,
        "micro_batch": run.micro_batches[0].stop - run.micro_batches[0].start,
        "activation_checkpointing": run.cfg.train.activation_checkpointing,
        "pairs": pairs,
        "block": block,
        "kinds": rows,
        **run_facts(run),
        **facts,
    }


def run_facts(run: Run) -> dict:
    compiled = run.network.blocks[0]._compiled_call_impl is not None
    return {"precision": run.precision, "compiled": compiled, "threads": torch.get_num_threads()}


def forward_flops(run: Run, cfg: settings.Settings) -> int:
    """FLOPs of a training step's forward pass, for one image."""
    return run.network.forward_flops(() if cfg.train.routes_until == 0 else cfg.model.routes)


def take_steps(run: Run, cfg: settings.Settings, count: int) -> None:
    """Do so many training steps by the settings."""
    run.cfg = cfg
    try:
        for _ in range(count):
            step.training_step(run)
            run.step += 1
    except Exception:
        run.network.zero_grad(set_to_none=True)  # other kinds of the run may need the memory
        raise


def interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95% confidence interval of the median, from order statistics."""
    ordered, margin = sorted(values), 0.98 * len(values) ** 0.5
    low = max(0, int(len(values) / 2 - margin))
    return ordered[low], ordered[len(values) - 1 - low]


def held_by(run: Run) -> int:
    """Bytes of a run's weights, their average and the optimizer's state."""
    networks = [run.wrapped, run.ema.network]
    held = [*chain.from_iterable(chain(network.parameters(), network.buffers()) for network in networks)]
    held += [tensor for state in run.optimizer.state.values() for tensor in state.values() if torch.is_tensor(tensor)]
    return sum(tensor.nbytes for tensor in held)


def stages(run: Run, cfg: settings.Settings) -> dict[str, float]:
    """Fractions of a step by stage. Each stage is waited for, so a step takes longer than otherwise."""
    spent: dict[str, float] = {}

    def timed(stage: str, function: Callable) -> Callable:
        def call(*arguments: object) -> object:
            wait_for(run.processes.device)
            began = time.perf_counter()
            output = function(*arguments)
            wait_for(run.processes.device)
            spent[stage] = spent.get(stage, 0.0) + time.perf_counter() - began
            return output

        return call

    with (
        patch.object(run.loader, "batches", timed("data wait", run.loader.batches)),
        patch.object(step, "loss", timed("forward", step.loss)),
        patch.object(step, "backward", timed("backward", step.backward)),
        patch.object(step, "optimizer_step", timed("optimizer", step.optimizer_step)),
        patch.object(EMA, "update", timed("EMA", EMA.update)),
    ):
        total = seconds(partial(take_steps, run, cfg, STAGED), run.processes.device)
    spent["rest"] = total - sum(spent.values())
    return {stage: taken / total for stage, taken in spent.items()}


def show(result: dict) -> None:
    """Print the table."""
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
    for name, row in result["kinds"].items():
        print(f"{name}: " + ", ".join(f"{stage} {fraction:.1%}" for stage, fraction in row["stages"].items()))


if __name__ == "__main__":
    begin(main)
