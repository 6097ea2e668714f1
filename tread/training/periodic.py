"""What happens between training steps: evaluation, FID, grids, checkpoints."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from tread.checkpoints import checkpoint
from tread.data.grids import save_grid
from tread.diffusion.sampling import Sampler, draw_pictures, spread_classes
from tread.evaluation.figures import save_curve
from tread.evaluation.heldout_loss import CALLED, heldout_loss
from tread.evaluation.metrics import Moments
from tread.models.text import Text
from tread.runtime.device import autocast
from tread.runtime.files import explain_failure
from tread.training import posthoc_ema
from tread.training.optimizer import StepStatistics
from tread.training.progress import mostly_bad, read_statistics
from tread.training.run import Failure, Run

# an untrained network's loss is about 1, its velocity error 1 + the data's variance, which is about 1, too
ABSURD = 1000
DIVERGED = "the training has diverged, or the data is of another scale. Try a smaller optim.lr, optim.clip_norm=1"


def interrupts(run: Run) -> bool:
    """Whether something beside training is due after run.step steps."""
    every, cfg = run.cfg.every, run.cfg
    intervals = (every.evaluate, every.sample, every.save, cfg.eval.fid_every, cfg.ema.snapshot_every)
    return run.step == cfg.train.steps or any(interval and run.step % interval == 0 for interval in intervals)


def evaluate_and_draw(run: Run, done: Collection[str] = ()) -> bool:
    """Evaluate, score and draw what is due after run.step steps; False if the run was asked to stop meanwhile.

    done  what was done at this step before an interruption: the evaluation by its name, "fid", "grid".
    """
    every, cfg = run.cfg.every, run.cfg
    last = run.step == cfg.train.steps

    def due(interval: int | None, name: str) -> bool:
        return interval is not None and run.step > 0 and (run.step % interval == 0 or last) and name not in done

    metric = run.model.process.evaluation
    if run.heldout is not None and due(every.evaluate, metric):
        with run.beside("eval"):
            loss = evaluate(run)
        if run.stop.agreed():
            return False
        if not math.isfinite(loss):
            raise Failure(f"the {CALLED[metric]} after step {run.step} is {loss}: {DIVERGED}")
        run.record(**{metric: loss})
        if loss > ABSURD:
            run.processes.say(f"warning: the {CALLED[metric]} after step {run.step} is {loss:.3g}: {DIVERGED}")
    if run.online_fid is not None and due(cfg.eval.fid_every, "fid") and not log_fid(run):
        return False
    if due(every.sample, "grid"):
        with run.beside("draw"):
            draw_grid(run)
    return True


def done_before(run: Run) -> set[str]:
    """What `evaluate_and_draw` did at this step in an earlier start of the run."""
    recorded = {name for record in run.log.records() if record["step"] == run.step for name in record}
    return recorded | ({"grid"} if grid_path(run).exists() else set())


def evaluate(run: Run) -> float:
    """Full-token loss of the EMA weights on held-out data, see tread/evaluation/heldout_loss.py.

    Cut short if the run was asked to stop: then it is no mean, as run.stop.agreed() tells all processes.
    """
    options, model, processes = run.cfg.eval, run.model, run.processes
    ranks, total = processes.count, torch.zeros((), device=run.processes.device)
    mine = torch.arange(options.points)[processes.rank :: ranks]
    size = max(1, min(options.batch_size, options.points) // ranks)
    for numbers in mine.split(size) if len(mine) else ():
        padded = torch.cat([numbers, numbers[-1:].expand(size - len(numbers))])  # one shape, so one graph
        with autocast(run.processes.device, run.precision):
            losses = heldout_loss(
                model.process, model.network, run.heldout, padded, options.points, options.noise_levels
            )
        total += losses[: len(numbers)].sum()
        if run.stop.reason:
            break
    return processes.sum(total).item() / options.points


def log_fid(run: Run) -> bool:
    """FID of a few EMA samples, for a trend: the same seeds each time, each process its share. False if stopped."""
    began, processes, sampling = time.perf_counter(), run.processes, run.cfg.sampling
    seeds = range(run.cfg.eval.fid_samples)[processes.rank :: processes.count]
    sampler = Sampler.of(run.model.process, sampling.steps, sampling.solver, min(64, len(seeds)), run.precision)
    total = run.online_fid.moments(run.model, seeds, sampler, stopped=lambda: run.stop.reason is not None)
    if run.stop.agreed():
        return False
    if processes.count > 1:
        rows = processes.gather(total.pack().to(run.processes.device)[None])
        total = functools.reduce(Moments.merge, map(Moments.unpack, rows))
    value = run.online_fid.fid(total, run.cfg.train.cpu_threads) if run.processes.main else math.nan
    seconds = time.perf_counter() - began
    run.record(fid=value, fid_samples=total.count, fid_seconds=round(seconds, 1))
    run.processes.say(f"  FID      {value:.2f} of {total.count:,} samples at step {run.step}, took {seconds:.0f} s")
    return True


def grid_path(run: Run) -> Path:
    return run.folder / "samples" / f"step_{run.step:07d}.png"


def draw_grid(run: Run) -> None:
    """The loss curve, and a grid of EMA samples: a row a class or caption, the same noise each time."""

    def draw() -> None:
        cfg = run.cfg
        classes = spread_classes(run.model.num_labels, cfg.sampling.classes)
        labels = torch.tensor(classes).repeat_interleave(cfg.sampling.per_class)
        pictures = draw_samples(run, labels)
        with explain_failure(grid_path(run)):
            save_grid(grid_path(run), pictures.numpy(), cfg.sampling.per_class, run.captions)
            save_curve(run.folder / "loss.png", run.log.records(), routed=bool(cfg.model.routes))

    run.processes.from_main(draw)


def draw_samples(run: Run, labels: Tensor, prompts: Text | None = None) -> Tensor:
    """EMA samples of the classes or prompts asked for, with seeds 0, 1, …: pictures (n, 1 or 3, H, W) uint8.

    prompts  that labels number; None: the run's.
    """
    model = run.model if prompts is None else replace(run.model, prompts=prompts)
    sampling, batch_size = run.cfg.sampling, min(64, len(labels))
    sampler = Sampler.of(run.model.process, sampling.steps, sampling.solver, batch_size, run.precision)
    stream = draw_pictures(model, run.decoder, range(len(labels)), labels, sampler)
    return torch.cat(list(stream))


def save(run: Run) -> bool:
    """Write a checkpoint of this step, unless it or most of the last ones were skipped: what is saved is known to have
    worked; True if written.

    The last step of a run is saved in any case, but then removes no older ones. Raises OSError if it can't be
    written, Failure if the weights are broken.
    """
    counted = read_statistics(run)
    skipped = counted["in_a_row"] > 0 or mostly_bad(counted)
    if skipped and run.step < run.cfg.train.steps:
        return False
    for name in ("loss", "alignment") if run.aligner else ("loss",):  # of each process
        own = run.statistics.sums[StepStatistics.NAMES.index(name)]
        counted[name] = run.processes.gather(own.clone()[None]).tolist()
    norms = torch._foreach_norm(list(run.network.parameters()))
    if not torch.stack(norms).isfinite().all():
        raise Failure(
            f"weights are not finite after step {run.step}, which is not saved: try a smaller optim.lr; "
            f"{'resume=auto goes on from ' + str(run.folder / 'latest') if run.saved else 'nothing was saved yet'}"
        )
    networks = {width: average.network for width, average in run.averages.items()}
    info = {
        "tally": counted,
        "flops": run.flops,
        "seconds": run.seconds,
        "samples": len(run.data),
        "latents": asdict(run.data.latents),
        "attribution": run.data.attribution,
        "encoder": run.aligner and run.aligner.fingerprint,
        "config": run.config,
        "versions": run.log.versions if run.processes.main else None,
    }

    def write() -> None:
        projector = run.aligner and run.aligner.projector
        parts = checkpoint.parts(run.network, run.ema.network, run.optimizer, networks, projector)
        with explain_failure(run.folder / f"step_{run.step:07d}"):
            checkpoint.save(run.folder, run.step, parts, info)
            if run.cfg.checkpoints.keep_last is not None and not skipped:
                checkpoint.prune(run.folder, run.cfg.checkpoints.keep_last, run.cfg.checkpoints.keep_every)
            run.log.status("running", run.step)

    with run.beside("save"):
        run.processes.from_main(write)
    run.saved = run.step
    return True


def save_snapshot(run: Run) -> None:
    """Store the averages by power functions, for scripts/reconstruct_ema.py."""
    averages = {width: dict(average.network.named_parameters()) for width, average in run.averages.items()}
    run.processes.from_main(lambda: posthoc_ema.save_snapshot(run.folder, run.step, averages))
