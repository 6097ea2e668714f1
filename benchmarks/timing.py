"""What the benchmarks share: the config and the data of what is timed, and clocks that wait for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from tread.data.encoded_text import TextSpec
from tread.data.latents import LatentSpec
from tread.data.text_writer import TextWriter
from tread.models.text import Text
from tread.runtime.device import wait_for

ROOT = Path(__file__).resolve().parent.parent


def composed(name: str, overrides: Sequence[str]) -> dict:
    """A config of this checkout's configs/ with overrides, as nested dicts."""
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "configs")):
        return OmegaConf.to_container(compose(name, overrides=list(overrides)), resolve=True)


def random_shards(latents: LatentSpec, count: int, per_shard: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Shards for write_dataset: standard normal numbers, and the classes one after the other."""
    rng = np.random.default_rng(0)
    for first in range(0, count, per_shard):
        stored = rng.standard_normal((per_shard, *latents.stored_shape), dtype=np.float32).astype(latents.dtype)
        yield stored, np.arange(first, first + per_shard) % len(latents.classes)


def random_text(folder: Path, count: int) -> None:
    """Text of one caption for each sample of a dataset: 4 to 77 standard normal tokens of the width of CLIP ViT-L."""
    writer = TextWriter(folder, TextSpec("random", None, 77, 768, 768), [1] * count)
    writer.begin()
    draws = torch.Generator().manual_seed(0)

    def text(rows: int) -> Text:
        lengths = torch.randint(4, 78, (rows, 1), generator=draws)
        tokens, pooled = torch.randn(rows, 77, 768, generator=draws), torch.randn(rows, 768, generator=draws)
        return Text(tokens, torch.arange(77) < lengths, pooled)

    for number in writer.missing():
        writer.write(number, text(len(writer.range_of(number))))
    writer.write_null(text(1))
    writer.publish()


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """How long a call takes, the device's work included."""
    wait_for(device)
    began = time.perf_counter()
    function()
    wait_for(device)
    return time.perf_counter() - began
