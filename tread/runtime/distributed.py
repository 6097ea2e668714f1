"""The processes of a launch, set up by accelerate: they train one network together, or share independent work."""

import contextlib
import datetime
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs, PartialState
from accelerate.utils import broadcast_object_list, gather, gather_object, reduce
from torch import Tensor, nn
from tqdm import tqdm

from tread.runtime.device import use_cores, use_expandable_segments, use_precision
from tread.runtime.files import Lock
from tread.runtime.signals import PATIENCE

T = TypeVar("T")


def open_training(precision: str, cpu_threads: int | None, processes: int | None = None) -> "tuple[Processes, str]":
    """Set up the processes that train one network. Returns (Processes, precision); "auto" becomes "bf16" on GPUs with
    bf16 hardware, else "fp32". On CPUs each process uses cpu_threads threads (None: OMP_NUM_THREADS, or its share of
    the cores). Raises ValueError if accelerate is set to anything but one device or DDP, if it started fewer processes
    than asked for, or if `processes` is not None and another number was launched."""
    on_cpu = not torch.accelerator.is_available()
    forced = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"  # on GPUs accelerate starts as many as asked
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in os.environ and "WORLD_SIZE" not in os.environ
    if (on_cpu or forced) and by_accelerate and "MASTER_PORT" in os.environ:
        how = "launch them with torchrun --nproc_per_node=<processes> train.py …, or with --num_processes 1"
        raise ValueError(f"accelerate was asked for several processes and started one, as it does on CPUs: {how}")
    use_expandable_segments()
    # device.autocast sets the precision, as in sampling; without cpu=True, torchrun on CPUs would start one process
    handlers = [DistributedDataParallelKwargs(gradient_as_bucket_view=True), InitProcessGroupKwargs(timeout=PATIENCE)]
    accelerator = Accelerator(mixed_precision="no", dynamo_backend="no", cpu=on_cpu, kwargs_handlers=handlers)
    kind = accelerator.distributed_type.value
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise ValueError(f"accelerate is set to {kind}, but this code runs on one device or with DDP")
    if accelerator.device.type == "cpu":
        use_cores(cpu_threads, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    group = Processes(accelerator, accelerator.device)
    if processes not in (None, group.count):
        launcher = f"torchrun --nproc_per_node={processes}"
        raise ValueError(f"train.processes is {processes}, but {group.count} were launched: {launcher} starts as many")
    precision = use_precision(precision, accelerator.device)
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if accelerator.is_main_process and asked not in ("no", precision):
        print(f"warning: accelerate's config says {asked}, train.precision decides: {precision}", file=sys.stderr)
    return group, precision


def share_work(device: str | None, cpu_threads: int | None = None) -> "Processes":
    """Set up processes that share independent work: those that accelerate or torchrun launched, else this one alone.
    They communicate by gloo on any device, and wait up to 7 days for each other. device="cuda" gives each process its
    own GPU; None does too, or takes the CPU if there is no GPU. cpu_threads=None: OMP_NUM_THREADS, or a share of the
    cores. Raises ValueError if the device can't be used."""
    state = PartialState(cpu=True, timeout=datetime.timedelta(days=7))
    if device in (None, "cuda"):
        device = f"cuda:{state.local_process_index}" if torch.cuda.is_available() else device or "cpu"
    try:
        place = torch.zeros(1, device=device).device
        if place.type == "cuda":
            torch.cuda.set_device(place)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} can't be used: {error}") from error
    use_cores(cpu_threads, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    return Processes(state, place)


class Processes:
    """This process, and its communication with the others launched with it. Made by open_training or share_work.

    rank, count, main  this process's number, the number of processes, and whether this one's number is 0.
    device             the device that this process computes on.
    cores              the number of CPU threads that this process uses.

    Raises ValueError if accelerate's number of processes is not WORLD_SIZE, the number that the launcher started.
    """

    def __init__(self, launched: Accelerator | PartialState, device: torch.device) -> None:
        self._launched, self.device, self.cores = launched, device, torch.get_num_threads()
        self.rank, self.count, self.main = launched.process_index, launched.num_processes, launched.is_main_process
        started = int(os.environ.get("WORLD_SIZE", 1))
        if started != self.count:
            raise ValueError(f"{started} processes were launched, but accelerate runs {self.count}")

    def distribute(self, network: nn.Module) -> nn.Module:
        """Return the network, wrapped in DDP if there are several processes; its buffers are not broadcast. Wrappers of
        earlier calls are dropped from accelerate's lists: their memory is freed once the caller drops them, too."""
        if self.count > 1:
            self._launched.free_memory()
        buffers = [name for name, _ in network.named_buffers()]
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(network, buffers)
        return self._launched.prepare(network)

    def no_sync(self, network: nn.Module) -> contextlib.AbstractContextManager:
        """Return a context in which `network`, returned by distribute, accumulates gradients without an all-reduce."""
        return self._launched.no_sync(network)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes, on each of them."""
        return reduce(tensor, "sum")

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all processes, concatenated along the first dimension, on each of them."""
        return gather(tensor)

    def gather_objects(self, one: T) -> list[T]:
        """Return the list of `one` from every process, in order of rank, on each process."""
        return gather_object([one])

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """Context whose body runs in the main process first, then in the others."""
        if not self.main:
            self.wait()
        yield
        if self.main:
            self.wait()

    def wait(self) -> None:
        """Wait until all processes reach this call. Raises OSError if another process has ended."""
        try:
            self._launched.wait_for_everyone()
        except RuntimeError as error:  # from torch.distributed
            raise OSError("another process stopped; see its message") from error

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` in every process and return this process's result. If it fails in one, all raise its error, in the
        others as RuntimeError unless it is a ValueError or OSError. Raises OSError if another process has ended."""
        done, error, told = None, None, None
        try:
            done = work()
        except Exception as raised:  # nobody must wait for a process that has failed
            error = told = raised
            if not isinstance(error, (ValueError, OSError)):
                told = RuntimeError(f"process {self.rank} failed: {type(error).__name__}: {error}")
        try:
            failed = [one for one in self.gather_objects(told) if one is not None]
        except RuntimeError as lost:  # from torch.distributed
            raise error or OSError("another process stopped; see its message") from lost
        if failed:
            raise error or failed[0]
        return done

    def from_main(self, decide: Callable[[], T]) -> T:
        """Run `decide` in the main process alone. All return its result or raise its error, as in `together`."""
        return broadcast_object_list([self.together(lambda: decide() if self.main else None)])[0]

    def say(self, text: str) -> None:
        """Print a line from the main process only; if standard output is closed, the work goes on without printing."""
        try:
            if self.main:
                tqdm.write(text)
                sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def bar(self, what: str, total: int, unit: str = "image") -> tqdm:
        """Return a progress bar, titled `what`, for this process's `total` units; only the main process shows it."""
        share = f" (process 1 of {self.count})" if self.count > 1 else ""
        pace = 0.5 if sys.stderr.isatty() else 20  # seconds between updates
        hidden = not self.main or not total
        return tqdm(total=total, desc=what + share, unit=unit, disable=hidden, mininterval=pace, smoothing=0.1)

    @contextlib.contextmanager
    def lock(self, path: Path, busy: str | None = None) -> Iterator[None]:
        """Context that all processes enter; the main one holds the lock file `path`, the others don't wait for it. If
        another launch holds the lock, the main process raises FileExistsError(busy) or, with busy=None, waits."""
        held = contextlib.nullcontext()
        if self.main:
            try:
                held = Lock(path, busy or "")
            except FileExistsError:
                if busy is not None:
                    raise
                self.say(f"another process is making {path.with_suffix('')}; waiting for it")
                held = Lock(path, None)
        with held:
            yield


def split_batch(batch_size: int, ranks: int, rank: int, micro_batch_size: int | None) -> list[slice]:
    """Return the rows of the global batch that process `rank` of `ranks` trains on: one slice for each micro-batch of
    micro_batch_size rows (None: a single slice). Raises ValueError if the batch does not divide evenly."""
    share, rest = divmod(batch_size, ranks)
    if rest:
        raise ValueError(f"train.batch_size {batch_size} does not divide evenly over {ranks} processes")
    micro = micro_batch_size or share
    if share % micro:
        raise ValueError(f"train.micro_batch_size {micro} does not divide a process's share, {share} images")
    return [slice(first, first + micro) for first in range(rank * share, (rank + 1) * share, micro)]
