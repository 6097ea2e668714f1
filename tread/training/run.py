"""The state of a run between steps, and how the run ends."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from statistics import mean

import torch
from torch import Tensor

from tread.checkpoints.checkpoint import Checkpoint, Trained
from tread.checkpoints.ema import EMA
from tread.checkpoints.network import process_of
from tread.checkpoints.run_log import RunLog
from tread.data.dataset import LatentDataset
from tread.data.loader import Loader
from tread.diffusion.sampling import Model
from tread.encoders.autoencoder import Decoder
from tread.evaluation.scorers import OnlineFID
from tread.models.backbone import Backbone
from tread.models.conditions import Text
from tread.runtime.device import beside
from tread.runtime.distributed import Processes
from tread.runtime.files import explain_failure
from tread.runtime.signals import INTERRUPTED, Stop
from tread.runtime.tracking import Tracker
from tread.training.alignment import Aligner
from tread.training.settings import Settings


class StepStatistics:
    """Sums over the steps since the last log, and which of the last 100 were bad (loss or gradient not finite).

    values  what `read` returned, to continue from; None: begin at 0.
    sums    (8,) fp32 on the device, in NAMES' order: loss and gradient norm of good steps; counts of good and bad ones;
            current streak of bad steps; longest since the last log, and how many steps ago it ended; alignment loss.
    recent  (100,) fp32 for the last steps, the newest last: 1 for a bad step, 0 for a good one, 0.5 if unknown.
    """

    NAMES = ("loss", "grad_norm", "good", "bad", "in_a_row", "longest", "ago", "alignment")
    LAST = 100

    def __init__(self, device: torch.device | str, values: dict[str, float | str] | None = None) -> None:
        values = values or {}
        self.sums = torch.tensor([values.get(name, 0.0) for name in self.NAMES], device=device)
        recent = [float(flag) for flag in values.get("recent", "")]
        self.recent = torch.tensor([0.5] * (self.LAST - len(recent)) + recent, device=device)

    def add(self, loss: Tensor, norm: Tensor, skip: Tensor, alignment: Tensor | None = None) -> None:
        """Add a step's mean loss, gradient norm, alignment loss if any, and `skip` (1: no update, else 0), all 0-d."""
        good = 1 - skip
        step = torch.stack([loss.where(good > 0, 0.0), norm.where(good > 0, 0.0), good, skip])
        in_a_row, longest, ago, aligned = self.sums[4:].unbind()
        if alignment is not None:
            aligned = aligned + alignment.where(good > 0, 0.0)
        in_a_row = (in_a_row + 1) * skip
        longer = in_a_row > longest
        longest, ago = torch.where(longer, in_a_row, longest), torch.where(longer, 0.0, ago + 1)
        self.sums.copy_(torch.cat([self.sums[:4] + step, torch.stack([in_a_row, longest, ago, aligned])]))
        self.recent.copy_(torch.cat([self.recent[1:], skip[None]]))

    def read(self) -> dict[str, float | str]:
        """Return {name: value} for NAMES and, under "recent", a text such as "0010" of the last 100 steps, the newest
        last: "1" for a bad step, "0" for a good one; unknown ones are left out. Waits for the device."""
        values = torch.cat([self.sums, self.recent]).tolist()
        flags = (f"{flag:.0f}" for flag in values[len(self.NAMES) :] if flag != 0.5)
        return {**dict(zip(self.NAMES, values)), "recent": "".join(flags)}

    def restart(self) -> None:
        """Zero the sums for the next log, except the current streak of bad steps; the longest streak starts at that."""
        self.sums[:4] = self.sums[6:] = 0.0
        self.sums[5] = self.sums[4]


class Failure(Exception):
    """A run can't go on; the message says why and what to try."""


@dataclass
class Run:
    """The state that a run carries from step to step. Comments in the source explain fields and further attributes."""

    cfg: Settings
    config: dict
    log: RunLog
    processes: Processes
    precision: str
    micro_batches: list[slice]
    data: LatentDataset
    heldout: LatentDataset | None
    network: Backbone
    ema: EMA
    averages: list[EMA]  # `ema`, and an EMA for each width in ema.power
    aligner: Aligner | None  # for alignment=repa and alignment=self
    optimizer: torch.optim.Optimizer
    trained: Trained  # all that checkpoints save
    decoder: Decoder
    online_fid: OnlineFID | None  # for eval.fid_every
    weights: str  # where its weights come from
    warnings: list[str]  # about its settings, data or weights
    stop: Stop
    began: float  # when the start began, by time.perf_counter
    memory: str  # how its steps save memory, and why
    earlier: Checkpoint | None = None  # the checkpoint that it continues
    prompts: Text | None = None  # the grids' texts, for a network that takes texts
    captions: Sequence[str] = ()  # the grids' captions

    def __post_init__(self) -> None:
        """Create the loader and statistics, and restore counters from the checkpoint that the run continues."""
        cfg, info = self.cfg, self.earlier.info if self.earlier else {}
        self.folder = self.log.folder
        self.device, self.main, self.say = self.processes.device, self.processes.main, self.processes.say
        self.loader = Loader(
            self.data, cfg.seed, cfg.train.batch_size, self.micro_batches, self.device,
            steps=cfg.train.steps, beyond=process_of(cfg).beyond, bare_from=cfg.alignment.until,
        )  # fmt: skip
        self.graphs = None  # start() may set it to a Graphs, which runs the steps
        self.tracker: Tracker | None = None
        self.adapter: dict | None = info.get("adapter")  # LoRA's {"scale": of B·A, "base": hash of base.safetensors}
        self.spent = Counter()  # {what `timed` measures, cold_start or first_step: seconds since the last record}
        tally = dict(info["tally"]) if self.earlier else {}
        for name, value in tally.items():
            if isinstance(value, list):  # a number for each process; averaged if there are more or fewer now
                alike = len(value) == self.processes.count
                tally[name] = value[self.processes.rank] if alike else mean(value)
        self.statistics = StepStatistics(self.device, tally)
        self.saved: int | None = self.earlier and self.earlier.step  # the step of the newest checkpoint
        self.saving: int | None = None  # the step whose checkpoint a thread is writing, in all processes
        self.writer = ThreadPoolExecutor(1, "checkpoint")
        self.written: Future[None] | None = None  # the result of that thread; in the main process only
        self.step: int = self.saved or 0  # steps done
        self.flops: int = info.get("flops", 0)  # of training so far, as counted by Clock
        self.seconds: float | None = info.get("seconds", None if self.step else 0.0)  # likewise; None: unknown
        self.wrap()

    def wrap(self) -> None:
        """Set `aligns` to whether the next step (self.step) uses the alignment loss, and `wrapped` to the module that
        the step calls, in DDP if there are several processes: with alignment aligner.module, else the network alone,
        since DDP fails if parameters (here the projector's) get no gradient."""
        # a graph can't record hooks that were made on the default stream
        graphed = self.cfg.train.cuda_graphs is True and self.device.type == "cuda"
        self.aligns, self.wrapped = self.aligner_at(self.step) is not None, None  # frees DDP's buckets
        with beside(torch.cuda.Stream(self.device) if graphed else None):
            self.wrapped = self.processes.distribute(self.aligner.module if self.aligns else self.network)

    def aligner_at(self, step: int) -> Aligner | None:
        """Return the aligner if step `step` (0, 1, …) trains with an alignment loss, else None."""
        return self.aligner if self.cfg.alignment.weight_at(step) else None

    @property
    def model(self) -> Model:
        """The model to sample and evaluate: the EMA weights, with the run's diffusion process."""
        return Model(process_of(self.cfg), self.ema.network, prompts=self.prompts)

    def due(self, interval: int | None) -> bool:
        """Return True after every `interval` steps and after the run's last step; if `interval` is None, never."""
        last = self.step >= self.cfg.train.steps
        return interval is not None and self.step > 0 and (last or self.step % interval == 0)

    @property
    def demo_samples(self) -> int:
        """Number of samples scored at the end: min(eval.demo_samples, max(40, train.steps)), 0 if not judges_demo."""
        return min(self.cfg.eval.demo_samples, max(40, self.cfg.train.steps)) if self.cfg.judges_demo else 0

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Context manager that times its block; the next call of `record` writes the time as <what>_seconds."""
        began = time.perf_counter()
        yield
        self.spent[what] += time.perf_counter() - began

    def take_spent(self) -> dict[str, float]:
        """Return `spent`, the time for each kind of work since the last call, as {<what>_seconds: …}, and reset it."""
        spent, self.spent = self.spent, Counter()
        return {f"{what}_seconds": round(seconds, 3) for what, seconds in spent.items()}

    def record(self, **values: float) -> None:
        """In the main process, log values, step, FLOPs, seconds and `spent` to metrics.jsonl and to any tracker."""
        if self.main:
            values |= {"flops": self.flops, **self.take_spent()}
            if self.seconds is not None:
                values["seconds"] = round(self.seconds, 3)
            with explain_failure(self.log.metrics):
                self.log.write({"step": self.step, **values})
            if self.tracker is not None:
                self.tracker.log(values, self.step)


def leave(run: Run, finished: bool) -> None:
    """Write to status.json that the run is finished or interrupted, print it if interrupted, and unlock its folder."""
    run.stop.ending = None  # what follows, such as the report, changes no status
    if run.main:
        reason = None if finished else run.stop.reason or "another process was asked to stop"
        run.log.status("finished" if finished else "interrupted", run.step, reason, spent=run.take_spent())
        run.log.close()
        if not finished:
            saved = f"step {run.saved} is saved" if run.saved else "nothing is saved yet"
            run.say(f"{run.folder}: stopped by {reason} after step {run.step}; {saved}; start it again to go on")
    if run.tracker is not None:
        run.tracker.close(0 if finished else INTERRUPTED)
    if not finished:  # a launcher ends the others as soon as one has left
        with contextlib.suppress(OSError):
            run.processes.wait()


def note_failure(run: Run | None, reason: str) -> None:
    """Write to status.json why a run failed, if possible, and unlock its folder. If no run has begun (None), return."""
    if run is not None:
        with contextlib.suppress(OSError):
            time.sleep(0 if run.main else 2)  # for a failure in all processes, the main one's is recorded
            who = "" if run.main else f"process {run.processes.rank}: "
            run.log.status("failed", run.step, who + reason)
        run.log.close()
