"""Reads batches ahead, so that they are on the device before the training step asks for them.

Threads read the samples of coming steps while the device computes, and copy them to a GPU from page-locked memory on a
separate stream. A step's samples depend on seed, step and batch size alone: reading ahead changes only the speed."""

import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from tread.data.dataset import Batch, LatentDataset
from tread.models.conditions import Text, each


class Loader:
    """Reads this process's rows of each global batch (`batch_size` samples over all processes) onto `device`.

    seed           decides the order of the data.
    micro_batches  this process's rows of the global batch: adjacent slices, as split_batch returns them.
    beyond         samples to add to each micro-batch: the next ones of the global batch, starting over at its end.
    steps          the number of training steps, beyond which nothing is read ahead; by default without limit.
    ahead          steps to read ahead; None: 4 on a GPU, 0 on a CPU, which would have to do the reading itself.
    bare_from      the first step for which neither features nor pictures are read (class tokens still are); None: all
                   that `data` was opened with is read for all steps.
    """

    def __init__(
        self,
        data: LatentDataset,
        seed: int,
        batch_size: int,
        micro_batches: Sequence[slice],
        device: torch.device,
        steps: int = sys.maxsize,
        ahead: int | None = None,
        beyond: int = 0,
        bare_from: int | None = None,
    ) -> None:
        self.data, self.seed, self.batch_size, self.steps = data, seed, batch_size, steps
        self.bare, self.bare_from = data.bare(), sys.maxsize if bare_from is None else bare_from
        first, last = micro_batches[0].start, micro_batches[-1].stop
        self.rows = np.arange(first, last + beyond) % batch_size
        self.pieces = [slice(rows.start - first, rows.stop - first + beyond) for rows in micro_batches]
        self.device = torch.device(device)
        self.ahead = (0 if self.device.type == "cpu" else 4) if ahead is None else ahead
        self.waited = 0.0  # seconds that `batches` has waited for samples; the caller may reset it
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        # a new thread's current device is GPU 0
        start = {"initializer": torch.cuda.set_device, "initargs": (self._stream.device,)} if self._stream else {}
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="loader", **start)
        self._coming: dict[int, Future] = {}

    def batches(self, step: int) -> list[Batch]:
        """Return a step's batches on the device, one for each of micro_batches, each with `beyond` more samples."""
        began = time.perf_counter()
        if self.ahead:
            for coming in range(step, min(step + 1 + self.ahead, self.steps)):
                if coming not in self._coming:
                    self._coming[coming] = self._pool.submit(self._read, coming)
            batch, copied = self._coming.pop(step).result()
        else:
            batch, copied = self._read(step)
        self.waited += time.perf_counter() - began
        if copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copied)
            for tensor in (*batch, *(batch.text or ())):
                if isinstance(tensor, Tensor):
                    tensor.record_stream(current)  # so that its memory is not reused before this step ends
        return [batch.rows(piece) for piece in self.pieces]

    def _read(self, step: int) -> tuple[Batch, torch.cuda.Event | None]:
        data = self.data if step < self.bare_from else self.bare
        to_gpu = self._stream is not None

        def move(part: Tensor) -> Tensor:
            if to_gpu and not (part.is_cuda or part.is_pinned()):
                part = part.pin_memory()
            return part.to(self.device, non_blocking=to_gpu)

        with torch.cuda.stream(self._stream) if to_gpu else nullcontext():  # `batch` may gather on the GPU, too
            batch = data.batch(self.seed, step, self.batch_size, self.rows, pin=to_gpu, expect=self.ahead > 0)
            moved = Batch(*(each(move, part) if isinstance(part, (Tensor, Text)) else part for part in batch))
            return moved, self._stream and self._stream.record_event()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._coming.clear()
