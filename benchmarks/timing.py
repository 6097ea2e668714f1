"""What the benchmarks share: options, the data of what is timed, turns, clocks that wait for the device, memory."""

from __future__ import annotations

import datetime
import json
import os
import platform
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

from tread.data.columns import TextSpec
from tread.data.latents import LatentSpec
from tread.data.section_writer import TextWriter
from tread.encoders.language import BEGIN, UNKNOWN
from tread.models.conditions import Text
from tread.runtime import schema
from tread.runtime.cli import answer_help, explained
from tread.runtime.device import device_name, wait_for
from tread.runtime.versions import git_revision
from tread.training import settings

ROOT = Path(__file__).resolve().parent.parent


def options_of(kind: type, others: bool = True) -> tuple[Any, list[str]]:
    """A benchmark's own options, as a dataclass, and the rest of the command line, which is train.py's if it may have
    others. Raises ValueError for what nobody knows.
    """
    names = [item.name for item in fields(kind)]
    own = [word for word in sys.argv[1:] if word.partition("=")[0] in names]
    rest = [word for word in sys.argv[1:] if word not in own]
    schema.check_overrides(rest, [*names, *([*settings.known_keys(), "experiment"] if others else [])])
    return schema.read(OmegaConf.to_container(OmegaConf.from_dotlist(own)), kind), rest


def write(path: str | None, result: dict) -> None:
    """JSON, where a path is given."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(result, indent=1) + "\n")


def begin(main: Callable[[], None]) -> None:
    """Run a benchmark, or print its docstring for --help; what it refuses, and Ctrl-C, end it by a line."""
    answer_help(sys.modules["__main__"].__doc__)
    with explained():
        main()


def composed(name: str, overrides: Sequence[str]) -> dict:
    """A config of this checkout's configs/ with overrides, as nested dicts."""
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "configs")):
        return OmegaConf.to_container(compose(name, overrides=settings.add_unstated(overrides)), resolve=True)


def random_shards(latents: LatentSpec, count: int, per_shard: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Shards for write_dataset: standard normal numbers, and the classes one after the other."""
    rng = np.random.default_rng(0)
    for first in range(0, count, per_shard):
        stored = rng.standard_normal((per_shard, *latents.stored_shape), dtype=np.float32).astype(latents.dtype)
        yield stored, np.arange(first, first + per_shard) % len(latents.classes)


def random_text(folder: Path, count: int, words: bool) -> None:
    """A caption for each sample of a dataset: 4 to 77 standard normal tokens, of the width of CLIP ViT-L.

    words  2 to 13 numbers of words, of 16 places, as the emoji's captions have them.
    """
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


class Turns(NamedTuple):
    """What calls took.

    first    seconds of the first call, with whatever it compiles.
    held     bytes that a call holds at most, beside what was there before.
    seconds  of each measured turn.
    """

    first: float
    held: int
    seconds: list[float]


def take_turns(
    calls: Mapping[str, Callable[[], object]], rounds: int, device: torch.device
) -> tuple[dict[str, Turns], dict[str, str]]:
    """Time calls in turns, every second round backwards: by name what they took, or why one failed."""
    first, held, times, failed = {}, {}, {name: [] for name in calls}, {}
    for turn in range(-2, rounds):
        for name in list(calls)[:: -1 if turn % 2 else 1]:
            if name in failed:
                continue
            try:
                if turn == -2:  # this one also makes the gradients that stay
                    first[name] = seconds(calls[name], device)
                elif turn == -1:
                    held[name] = most_allocated(calls[name], device)
                else:
                    times[name].append(seconds(calls[name], device))
            except Exception as error:  # memory, kernels and compilers fail in many ways; the others go on
                failed[name] = why_failed(error)
                torch.cuda.empty_cache()
    return {name: Turns(first[name], held[name], times[name]) for name in calls if name not in failed}, failed


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """How long a call takes, the device's work included."""
    wait_for(device)
    began = time.perf_counter()
    function()
    wait_for(device)
    return time.perf_counter() - began


def most_allocated(work: Callable[[], object], device: torch.device) -> int:
    """Bytes of tensors that some work holds at most, beside those that were there before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler speaks of itself
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(allocated, default=0)


def why_failed(error: Exception) -> str:
    """In a few words: out of memory, as CUDA, torch's CPU and numpy say it, or the error's first line."""
    lacking = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(error)
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return "out of memory" if lacking else f"{type(error).__name__}: {first}"[:120]


def circumstances(device: torch.device) -> dict[str, str]:
    """What a measurement was made on, when, and by which code, for JSON."""
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "machine": platform.platform(),
        "command": command(),
        "commit": git_revision(),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def command() -> str:
    """The command line; absolute paths are written relative to this checkout, or as their last name."""
    words = []
    for word in sys.argv[1:]:
        key, equals, value = word.rpartition("=")
        path = Path(value)
        if path.is_absolute():
            value = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
        words.append(f"{key}{equals}{value}")
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])
