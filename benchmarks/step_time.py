"""What a training step costs, with and without routes: python benchmarks/step_time.py [overrides]

Runs train.py's own steps on random latents, dense and routed ones taking turns in one process, and prints for
each kind the median time, images/s, FLOP/s, MFU, peak memory, the ratio dense/routed with its spread, and that
ratio over what the FLOPs allow; then the share of each stage. Overrides are those of train.py, and

    beside=dit    another model without routes, with the same overrides but for an architecture's own, in the same turns
    pairs=24      turns that are measured, of a step each (5 on a GPU, where single ones show the first kernels' launch)
    out=…         a JSON file to write as well

python benchmarks/step_time.py experiment=imagenet256_s2 train.batch_size=16       # CPU
python benchmarks/step_time.py experiment=imagenet256_xl2 train.batch_size=256     # GPU
python benchmarks/step_time.py experiment=imagenet256_lightning_b2 model=tread_lightning beside=dit train.batch_size=16
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import torch
from timing import begin, circumstances, composed, most_allocated, random_shards, random_text, seconds

from tread.data.latents import LatentSpec
from tread.data.writer import write_dataset
from tread.models.architectures import CHOSEN
from tread.runtime.device import peak_flops, wait_for
from tread.runtime.schema import check_overrides
from tread.runtime.signals import Stop
from tread.training import settings, step
from tread.training.ema import EMA
from tread.training.run import Run
from tread.training.start import start

STAGES = ("data wait", "forward", "backward", "optimizer", "EMA", "rest")
WARMUP, STAGED = 3, 5  # turns between the first and the measurement, and steps taken stage by stage


def main() -> None:
    given, overrides = own_options({"pairs": "24", "out": None, "beside": None})
    check_overrides(overrides, [*settings.known_keys(), "experiment"])
    pairs = turns(given["pairs"])
    with tempfile.TemporaryDirectory() as folder:
        kinds = kinds_of(open_run(Path(folder), overrides))
        if given["beside"]:
            left_out = ("model=", *(f"model.{name}=" for name in CHOSEN.optional()))
            kept = [word for word in overrides if not word.startswith(left_out)]
            other = open_run(Path(folder) / "beside", [*kept, f"model={given['beside']}"])
            name = f"{given['beside']}, dense" if other.cfg.model.routes else given["beside"]
            kinds[name] = other, replace(other.cfg, train=replace(other.cfg.train, routes_until=0))
        result = measure(kinds, pairs)
    show(result)
    write(given["out"], result)


def own_options(defaults: dict[str, str | None]) -> tuple[dict[str, str | None], list[str]]:
    """A benchmark's own options as the command line gives them, and the rest of it, which is train.py's."""
    given, overrides = dict(defaults), []
    for argument in sys.argv[1:]:
        key, _, value = argument.partition("=")
        given.update({key: value}) if key in given else overrides.append(argument)
    return given, overrides


def turns(given: str) -> int:
    """How many are measured. Raises ValueError below what an interval needs."""
    if not given.isdigit() or int(given) < 6:
        raise ValueError(f"pairs is {given}, but must be a whole number: an interval of the median needs 6")
    return int(given)


def write(path: str | None, result: dict) -> None:
    """JSON, where a path is given."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(result, indent=1) + "\n")


def open_run(folder: Path, overrides: list[str]) -> Run:
    """A run as train.py starts it, on random latents of the config's shape (and text), in a temporary folder."""
    fixed = [f"dataset.path={folder}/data", f"results={folder}", "dataset.heldout=null", "sampling.decode=false"]
    fixed += ["dataset.embedded=null", "eval.demo_samples=0", "init_from=null", "train.steps=1000000"]
    words = composed("config", overrides + fixed)["text"]["encoder"] == "words"
    fixed += [f"text.encoder={'words' if words else 'random'}"]
    config = composed("config", overrides + fixed)
    cfg = settings.read(config)
    shape, classes = (cfg.dataset.channels, cfg.dataset.size, cfg.dataset.size), cfg.dataset.num_classes
    count = 4 * cfg.train.batch_size
    meaning = LatentSpec(shape, tuple(map(str, range(classes))), "pixels", scale_applied=True)
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
        raise ValueError(
            f"model={cfg.model.name} has no routes to compare; model=tread and model=tread_rwkv measure both"
        )

    def routed(fp32: str) -> settings.Settings:
        routes = tuple(replace(route, fp32=fp32) for route in cfg.model.routes)
        return replace(cfg, model=replace(cfg.model, routes=routes), train=replace(cfg.train, routes_until=None))

    kinds = {"dense": replace(cfg, train=replace(cfg.train, routes_until=0)), "routed": routed("off")}
    kinds |= {"routed, fp32: end": routed("end")} if run.precision == "bf16" and not cfg.model.masks else {}
    return {name: (run, kind) for name, kind in kinds.items()}


def measure(kinds: dict[str, tuple[Run, settings.Settings]], pairs: int, staged: bool = True) -> dict:
    """All numbers of the table; ratios are to the first kind, and `staged` says whether the stages are timed too."""
    first = next(iter(kinds))
    run = kinds[first][0]
    block = 5 if run.processes.device.type == "cuda" else 1
    facts = circumstances(run.processes.device)  # of the code that runs, whatever is changed while it does

    def turn(kind: tuple[Run, settings.Settings]) -> float:
        """Milliseconds of a step."""
        kind[0].cfg = kind[1]
        return 1000 * take_steps(kind[0], block) / block

    cold, peaks = {name: turn(kind) * block / 1000 for name, kind in kinds.items()}, {}
    for _ in range(WARMUP):
        for name, kind in kinds.items():
            peaks[name] = peak_memory(kind[0], lambda kind=kind: turn(kind))
    times = {name: [] for name in kinds}
    for number in range(pairs):
        order = list(kinds) if number % 2 == 0 else list(kinds)[::-1]
        for name in order:
            times[name].append(turn(kinds[name]))
    batch, peak = run.cfg.train.batch_size, peak_flops(run.processes.device, run.precision)
    dense_flops, rows = run.network.forward_flops(), {}
    for name, (timed_run, cfg) in kinds.items():
        routes = () if cfg.train.routes_until == 0 else cfg.model.routes
        ms, flops = statistics.median(times[name]), timed_run.network.forward_flops(routes)
        row = {"ms": ms, "images_per_s": 1000 * batch / ms, "flops_per_s": 3000 * flops * batch / ms}
        row |= {"mfu": peak and row["flops_per_s"] / peak, "peak_gb": peaks[name], "first_turn_s": cold[name]}
        if name != first:
            ratios, ideal = [a / b for a, b in zip(times[first], times[name])], dense_flops / flops
            low, high = interval(ratios)
            row |= {"ratio": statistics.median(ratios), "ratio_95": [low, high], "ideal": ideal}
            row |= {"of_ideal": row["ratio"] / ideal, "of_ideal_95": [low / ideal, high / ideal]}
        timed_run.cfg = cfg
        rows[name] = row | ({"stages": stages(timed_run)} if staged else {})
    return {
        "name": run.cfg.name,
        "parameters": sum(parameter.numel() for parameter in run.network.parameters()),
        "batch": batch,
        "micro_batch": run.micro_batches[0].stop - run.micro_batches[0].start,
        "precision": run.precision,
        "compiled": run.network.blocks[0]._compiled_call_impl is not None,
        "activation_checkpointing": run.cfg.train.activation_checkpointing,
        "threads": torch.get_num_threads(),
        "pairs": pairs,
        "block": block,
        "kinds": rows,
        **facts,
    }


def take_steps(run: Run, count: int) -> float:
    """Do so many training steps; returns the seconds until the device is done."""

    def steps() -> None:
        for _ in range(count):
            step.training_step(run)
            run.step += 1

    return seconds(steps, run.processes.device)


def interval(values: list[float]) -> tuple[float, float]:
    """A 95% confidence interval of the median, from order statistics."""
    ordered, margin = sorted(values), 0.98 * len(values) ** 0.5
    low = max(0, int(len(values) / 2 - margin))
    return ordered[low], ordered[len(values) - 1 - low]


def peak_memory(run: Run, work: Callable[[], object]) -> float:
    """GB that a run's tensors take at most during some work: its weights, their average, the optimizer's state, and
    what the work allocates; not what other runs in this process hold.
    """
    networks = [run.wrapped, run.ema.network]
    held = [*chain.from_iterable(chain(network.parameters(), network.buffers()) for network in networks)]
    held += [tensor for state in run.optimizer.state.values() for tensor in state.values() if torch.is_tensor(tensor)]
    size = sum(tensor.nbytes for tensor in held)
    return (size + most_allocated(work, run.processes.device)) / 1e9


def stages(run: Run) -> dict[str, float]:
    """Shares of a step by stage, each waited for: so the sum is more than a step takes that does not wait."""
    spent = dict.fromkeys(STAGES, 0.0)

    def timed(stage: str, function: Callable) -> Callable:
        def call(*arguments: object) -> object:
            wait_for(run.processes.device)
            began = time.perf_counter()
            output = function(*arguments)
            wait_for(run.processes.device)
            spent[stage] += time.perf_counter() - began
            return output

        return call

    with (
        patch.object(step, "loss", timed("forward", step.loss)),
        patch.object(step, "backward", timed("backward", step.backward)),
        patch.object(step, "optimizer_step", timed("optimizer", step.optimizer_step)),
        patch.object(run.loader, "batches", timed("data wait", run.loader.batches)),
        patch.object(EMA, "update", timed("EMA", EMA.update)),
    ):
        total = take_steps(run, STAGED)
    spent["rest"] = total - sum(spent.values())
    return {stage: taken / total for stage, taken in spent.items()}


def show(result: dict) -> None:
    """Print the table."""
    compiled = "compiled" if result["compiled"] else "not compiled"
    print(
        f"{result['name']}, {result['parameters']:,} parameters, batch {result['batch']} in micro-batches of "
        f"{result['micro_batch']}, {result['device']}, {result['precision']}, {compiled}, "
        f"{result['threads']} threads, torch {result['torch']}, {result['pairs']} turns of {result['block']} steps"
    )
    print(f"{'':<18} {'ms':>8} {'images/s':>9} {'TFLOP/s':>8} {'MFU':>6} {'GB':>6} {'first':>7}")
    for name, row in result["kinds"].items():
        mfu = "" if row["mfu"] is None else f"{row['mfu']:.3f}"
        print(
            f"{name:<18} {row['ms']:>8.1f} {row['images_per_s']:>9.1f} {row['flops_per_s'] / 1e12:>8.2f} {mfu:>6} "
            f"{row['peak_gb']:>6.1f} {row['first_turn_s']:>6.1f}s"
        )
    for name, row in result["kinds"].items():
        if "ratio" in row:
            low, high = row["ratio_95"]
            print(
                f"dense / {name}: {row['ratio']:.3f} (95% of the median {low:.3f}..{high:.3f}), FLOPs allow "
                f"{row['ideal']:.3f}: {row['of_ideal']:.3f} of that ({row['of_ideal_95'][0]:.3f}.."
                f"{row['of_ideal_95'][1]:.3f})"
            )
    for name, row in result["kinds"].items():
        print(f"{name}: " + ", ".join(f"{stage} {share:.1%}" for stage, share in row["stages"].items()))


if __name__ == "__main__":
    begin(main)
