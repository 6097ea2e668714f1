"""Tools for the benchmarks: options, random data, timing calls alternately, peak memory, the machine's description."""

import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch.profiler import ProfilerActivity, profile

from tread.data.latents import LatentSpec
from tread.data.writer import write_dataset
from tread.runtime import schema
from tread.runtime.cli import answer_help, explained
from tread.runtime.compiling import first_line
from tread.runtime.device import device_name, wait_for
from tread.runtime.files import check_file
from tread.runtime.versions import git_revision, now
from tread.training import settings

ROOT = Path(__file__).resolve().parent.parent
CPU = "--cpu" in sys.argv  # use no GPU, even if there is one
if CPU:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for them
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def options_of(kind: type, others: bool = True) -> tuple[Any, list[str]]:
    """Return a benchmark's own options on the command line, as an instance of the dataclass `kind`, and the other
    words: train.py's overrides. Raises ValueError for unknown options and, with others=False, for overrides."""
    names = [item.name for item in fields(kind)]
    own = [word for word in sys.argv[1:] if word.partition("=")[0] in names]
    rest = [word for word in sys.argv[1:] if word not in (*own, "--cpu")]
    if unknown := [word for word in rest if not re.match("~|--|[^-].*=", word)]:
        raise ValueError(f"{unknown[0]!r} is no option; --help lists them")
    schema.check_overrides(rest, [*names, *([*settings.known_keys(), "experiment"] if others else [])])
    for word in [word for word in own if word.startswith("out=")]:
        check_file(word.partition("=")[2])
    return schema.read(OmegaConf.to_container(OmegaConf.from_dotlist(own)), kind), rest


def begin(main: Callable[[], None]) -> None:
    """Run `main`, or print its file's docstring for --help. ValueError and OSError end a benchmark with one line."""
    answer_help(sys.modules["__main__"].__doc__)
    with explained():
        main()


def composed(name: str, overrides: Sequence[str]) -> dict:
    """Compose configs/<name>.yaml of this checkout with overrides, and return it as nested dicts."""
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "configs")):
        return OmegaConf.to_container(compose(name, overrides=settings.add_unstated(overrides)), resolve=True)


def random_dataset(folder: Path, shape: tuple[int, int, int], classes: int, count: int, per_shard: int) -> None:
    """Write `count` N(0, 1) latents (C, S, S), or more to fill the last shard; sample i has class i mod `classes`."""
    latents = LatentSpec(shape, tuple(map(str, range(classes))), "pixels", scale_applied=True)
    rng = np.random.default_rng(0)

    def shards() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for first in range(0, count, per_shard):
            stored = rng.standard_normal((per_shard, *latents.stored_shape), dtype=np.float32).astype(latents.dtype)
            yield stored, np.arange(first, first + per_shard) % classes

    write_dataset(folder, latents, shards())


class Turns(NamedTuple):
    """The measured costs of one function, which take_turns called alternately with others: once in each round.

    first    seconds of its first call, with compilation.
    held     peak bytes of tensors during a call, minus those held before the call: on a GPU the first call, as CUDA
             graphs hide the memory of later ones; on a CPU the second, as the first one allocates the gradients.
    seconds  the seconds of each call after the first two, one per round.
    """

    first: float
    held: int
    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def over(self, other: "Turns") -> list[float]:
        """Return the ratios of this function's seconds to the other's in each round, sorted."""
        return sorted(own / others for own, others in zip(self.seconds, other.seconds))


def take_turns(
    calls: Mapping[str, Callable[[], object]], rounds: int, failed: dict[str, str] | None = None
) -> dict[str, Turns]:
    """Measure the functions in `calls` {name: function}. A round calls each once; every other round goes in reverse
    order. Two rounds give Turns.first and held, then `rounds` more give Turns.seconds. If a function fails, this raises
    ValueError or, if `failed` is given, puts the error's text in failed[name] and leaves the function out."""
    costs, held = {name: [] for name in calls}, {}
    watched = -2 if DEVICE.type == "cuda" else -1  # the turn that gives Turns.held
    for turn in range(-2, rounds):
        for name in [*costs][:: -1 if turn % 2 else 1]:

            def call(name: str = name) -> None:
                costs[name].append(seconds(calls[name]))

            try:
                if turn == watched:
                    held[name] = most_allocated(call)
                else:
                    call()
            except Exception as error:  # memory, kernels and compilers raise many types
                if failed is None:
                    raise ValueError(f"{name}: {why_failed(error)}") from error
                failed[name] = why_failed(error)
                del costs[name]
                torch.cuda.empty_cache()
    return {name: Turns(first, held[name], times) for name, (first, _, *times) in costs.items()}


def seconds(function: Callable[[], object]) -> float:
    """Return the seconds that a call takes, including the device's work."""
    wait_for(DEVICE)
    began = time.perf_counter()
    function()
    wait_for(DEVICE)
    return time.perf_counter() - began


def most_allocated(work: Callable[[], object]) -> int:
    """Return the peak bytes of tensors during a call, less those held before it."""
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(allocated, default=0)


def why_failed(error: Exception) -> str:
    """Describe an error briefly: "out of memory" from CUDA, torch or numpy, else its type and first line."""
    lacking = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(error)
    return "out of memory" if lacking else first_line(error)[:120]


def circumstances() -> dict[str, str]:
    """Return the device, torch version, machine, command, commit and time of a measurement, for JSON."""
    return {
        "device": device_name(DEVICE),
        "torch": torch.__version__,
        "machine": platform.platform(),
        "command": command(),
        "commit": git_revision(),
        "time": now(),
    }


def command() -> str:
    """Return the command line; absolute paths become relative to this checkout or, outside it, base names."""
    words = []
    for word in sys.argv[1:]:
        key, equals, value = word.rpartition("=")
        path = Path(value)
        if path.is_absolute():
            value = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
        words.append(f"{key}{equals}{value}")
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])
