"""The work between training steps and after the last one: logs, evaluation, FID, sample grids and checkpoints."""

import contextlib
import functools
import math
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from tread.checkpoints import checkpoint, posthoc_ema
from tread.data.dataset import Batch, LatentDataset
from tread.diffusion.labels import spread_classes
from tread.diffusion.sampling import Sampler, draw_pictures
from tread.drawing.charts import save_curve
from tread.drawing.grids import save_grid
from tread.encoders.inception import find_at_hand, load_inception
from tread.evaluation.emoji_judge import ask, judge_emoji, real_emoji
from tread.evaluation.heldout_loss import heldout_loss, point
from tread.evaluation.metric_table import METRICS, heldout_titles
from tread.evaluation.metrics import Moments
from tread.evaluation.scorers import judge_digits
from tread.models.conditions import Text
from tread.runtime.device import autocast, peak_flops, wait_for
from tread.runtime.files import explain_failure
from tread.runtime.hub import revision_in
from tread.runtime.plugins import plugin_hashes
from tread.runtime.tensor_files import listed
from tread.training.costs import sample_flops, training_flops
from tread.training.draws import active_routes, step_draws
from tread.training.optimizer import learning_rate
from tread.training.run import Failure, Run


class Clock:
    """Measures the time and FLOPs of training, not of evaluating and saving, over the whole run and since the last log.
    The first steps are slow (compilation, recording of CUDA graphs): the forecast of the time left leaves them out, and
    the logged speed does too, unless the log is due right after one of them."""

    def __init__(self, run: Run) -> None:
        self.run, self.start_step, self.began = run, run.step, time.perf_counter()
        self.settled = run.step + (1 if run.graphs is None else run.graphs.usual + 1)
        self.counted = run.step, self.began  # step and time up to which training is counted
        self.restart()

    def restart(self) -> None:
        self.run.loader.waited = self.seconds = 0.0
        self.first, self.flops = self.run.step, self.run.flops

    def tick(self, due: bool) -> None:
        """Call after each step; `due`: whether `log` is next. Prints how long the start took and, later, a forecast."""
        run = self.run
        if run.step in (self.start_step + 1, self.settled):
            wait_for(run.device)
            self.advance()
            if run.step == self.start_step + 1:
                start, first = self.counted[1] - run.began, self.counted[1] - self.began
                run.spent.update(cold_start=start, first_step=first)  # adds
                run.say(f"  start     {start:.1f} s, of which the first step took {first:.1f} s")
            if not due:
                self.restart()
        elif run.step == self.settled + 2 and run.step < run.cfg.train.steps:
            wait_for(run.device)
            seconds = (time.perf_counter() - self.counted[1]) / (run.step - self.counted[0])
            run.say(forecast(run, seconds))

    def advance(self) -> None:
        """Add to run.seconds and .flops the training since the last call or pause. The device must be done with it."""
        run, (step, since) = self.run, self.counted
        self.counted = run.step, time.perf_counter()
        self.seconds += self.counted[1] - since
        run.flops += training_flops(run.cfg, run.network, range(step, run.step), run.aligner)
        if run.seconds is not None:
            run.seconds += self.counted[1] - since

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager whose time is not counted as training; waits for the device first."""
        wait_for(self.run.device)
        self.advance()
        yield
        self.counted = self.run.step, time.perf_counter()


def log(run: Run, clock: Clock) -> str:
    """Write mean losses and speed since the last log to metrics.jsonl; returns "loss …, … images/s" to print."""
    sums = read_statistics(run)  # waits for the device, so the clock is read later
    clock.advance()
    values = {"lr": learning_rate(run.cfg, run.step - 1), "bad_steps": int(sums["bad"])}
    if sums["good"]:
        values |= {"loss": mean(sums["loss"]) / sums["good"], "grad_norm": sums["grad_norm"] / sums["good"]}
        if weight := run.cfg.alignment.weight_at(run.step - 1):
            values["alignment"] = mean(sums["alignment"]) / sums["good"]
            values["total"] = values["loss"] + weight * values["alignment"]
    speed = (run.step - clock.first) * run.cfg.train.batch_size / clock.seconds
    flops = (run.flops - clock.flops) / clock.seconds
    values |= {"images_per_s": round(speed, 1), "flops_per_s": float(f"{flops:.4g}")}
    if (peak := peak_flops(run.device, run.precision)) is not None:
        values["mfu"] = round(flops / (peak * run.processes.count), 4)
    run.record(**values, data_wait=round(run.loader.waited / clock.seconds, 5))
    if sums["bad"] and run.main:
        with clock.paused():
            text = f"warning: {sums['bad']:.0f} steps up to step {run.step} were skipped: loss or gradient not finite"
            steps = [step for step in recent_bad_steps(run, sums) if step >= run.step - sums["good"] - sums["bad"]]
            run.say(f"{text}; {look_at_samples(run, steps)[1]}" if steps else text)
    run.statistics.restart()
    finish_saving(run, wait=False)
    clock.restart()
    return f"loss {values['loss']:.4f}, {speed:.0f} images/s" if "loss" in values else "no good step"


def read_statistics(run: Run) -> dict:
    """Return StepStatistics.read's values; "loss" (and "alignment", with an aligner) is a list with a sum per process.
    Raises Failure if more than train.max_bad_steps steps in a row were bad (loss or gradient not finite) or,
    from step train.max_bad_steps on and at the last step, over half of the last 100 were. All processes call this."""
    sums, most = run.statistics.read(), run.cfg.train.max_bad_steps
    for name in ("loss", "alignment") if run.aligner else ("loss",):
        sums[name] = run.processes.gather(torch.tensor([sums[name]], device=run.device)).tolist()
    if sums["longest"] > most:
        end = run.step - int(sums["ago"])
        steps = range(end - int(sums["longest"]), end)
        where = f"{len(steps)} steps in a row, {steps[0] + 1} to {end} (train.max_bad_steps {most})"
        raise Failure(explain_bad_steps(run, steps, where))
    if mostly_bad(sums) and (run.step >= most or run.step == run.cfg.train.steps):
        steps, recent = recent_bad_steps(run, sums), len(sums["recent"])
        where = f"{len(steps)} of the last {recent} steps, up to {run.step} (more than half of them)"
        raise Failure(explain_bad_steps(run, steps, where))
    return sums


def mostly_bad(sums: dict) -> bool:
    """Return whether loss or gradient was not finite in over half of the last 100 steps, as recorded in `sums`."""
    return 2 * sums["recent"].count("1") > len(sums["recent"])


def recent_bad_steps(run: Run, sums: dict) -> list[int]:
    """Return the numbers (from 0) of the bad ones of the last 100 steps; see read_statistics, which returned `sums`."""
    first = run.step - len(sums["recent"])
    return [first + number for number, flag in enumerate(sums["recent"]) if flag == "1"]


def explain_bad_steps(run: Run, steps: Sequence[int], where: str) -> str:
    """Return a message on steps whose loss or gradient was not finite: their noise levels, samples with non-finite
    numbers, and advice. `where` names the steps in the message. Waits for a checkpoint in progress."""
    process = run.model.process
    normal = [step_draws(run.cfg, run.data.latents, step, run.device).level for step in steps[:100]]  # as used before
    levels = process.noise_level(torch.cat(normal))
    spoilt, seen = look_at_samples(run, steps)
    finish_saving(run)
    advice = "Try a smaller optim.lr, optim.clip_norm=1 or train.precision=fp32, or look at the data"
    kept = f"the last good checkpoint is that of step {run.saved}" if run.saved else "nothing was saved yet"
    return (
        f"loss or gradient was not finite in {where}, which were skipped. Their {process.level_name} lay "
        f"between {levels.min():.3g} and {levels.max():.3g}. {'Look at the data first' if spoilt else advice}: "
        f"{seen}; {kept}"
    )


def look_at_samples(run: Run, steps: Sequence[int]) -> tuple[bool, str]:
    """Search the training samples of `steps`, at most the first 100 of these (fewer if a batch has over 256 samples),
    for NaN and infinity. Returns (whether any was found, a text that names the samples or says that there are none)."""
    size = run.cfg.train.batch_size
    looked = steps[: min(100, max(1, 25_600 // size))]
    if spoilt := name_spoilt(run.data, (run.data.batch(run.cfg.seed, step, size) for step in looked)):
        return True, f"these samples hold such numbers: {spoilt}"
    return False, f"no sample of the {len(looked)} steps looked at holds such numbers"


def name_spoilt(data: LatentDataset, batches: Iterable[Batch]) -> str:
    """Return a text that names samples with NaN or infinity: index, file and row of the first three; "" if none."""
    spoilt = set()
    for batch in batches:
        for read in (batch.stored, batch.features, batch.class_token, *(batch.text or ())):
            if read is not None:
                broken = ~read.flatten(1).isfinite().all(dim=1)
                spoilt.update(batch.indices[broken.cpu().numpy()].tolist())
    places = ((index, *data.locate(index)) for index in sorted(spoilt))
    return listed((f"{index} ({file}, row {row})" for index, file, row in places), 3)


# an untrained network's loss is about 1, or 2 for rectified flow: 1 + the data's variance
ABSURD = 1000
DIVERGED = "the training has diverged, or the data is of another scale. Try a smaller optim.lr, optim.clip_norm=1"


def interrupts(run: Run) -> bool:
    """Return whether work that pauses training (evaluation, FID, grids, saving) is due after run.step steps."""
    every, cfg = run.cfg.every, run.cfg
    return any(map(run.due, (every.evaluate, every.sample, every.save, cfg.eval.fid_every, cfg.ema.snapshot_every)))


def evaluate_and_save(run: Run, postponed: bool) -> tuple[bool, bool]:
    """Do all work that is due after run.step steps, and save if an earlier save was `postponed`. Returns (whether
    training goes on, whether a save is postponed now). Saves are postponed while loss or gradients are not finite. If
    the work raises an error other than Failure, such as OSError for a file, the step is saved first, if possible."""
    try:
        full = False
        try:
            on = evaluate_and_draw(run)
        except torch.OutOfMemoryError:
            if run.graphs is None or run.processes.count > 1:
                raise
            full = True
        if full:  # not in the except block, where the traceback holds memory
            run.graphs.leave("evaluation and samples need their memory")
            wait_for(run.device)  # emptying a cache waits for no graph
            torch.cuda.empty_cache()
            on = evaluate_and_draw(run, done_before(run))
    except Exception as error:
        with contextlib.suppress(OSError, RuntimeError, Failure):  # the first error is raised
            if not isinstance(error, Failure):
                save_due(run, True, leaving=True)
            finish_saving(run)  # before another process's end stops this one
        raise
    return on, save_due(run, postponed)


def save_due(run: Run, asked: bool, leaving: bool = False) -> bool:
    """Save an EMA snapshot if due; if due or `asked`, call save(run, leaving). Returns True if that returned False."""
    powers, every = run.trained.power_tensors, run.cfg.every.save
    if powers and run.due(run.cfg.ema.snapshot_every or every):
        run.processes.from_main(lambda: posthoc_ema.save_snapshot(run.folder, run.step, powers))
    return (asked or run.due(every)) and not save(run, leaving)


def evaluate_and_draw(run: Run, done: Collection[str] = ()) -> bool:
    """Do the evaluation, FID and sample grid due after run.step steps, except `done` ones (see done_before). Returns
    False if asked to stop. If the held-out loss isn't finite, raises ValueError if its samples aren't, else Failure."""
    metric, cfg = run.model.process.evaluation, run.cfg
    if run.heldout is not None and run.due(cfg.every.evaluate) and metric not in done:
        with run.timed("eval"):
            loss = evaluate(run)
        if run.stop.agreed():
            return False
        found = f"the {METRICS[metric].title} after step {run.step} is {loss:.3g}"
        doubt = f"{found}: {DIVERGED}"
        if not math.isfinite(loss):
            if spoilt := run.processes.from_main(lambda: name_spoilt(run.heldout, evaluated(run))):
                advice = "prepare them again, or set dataset.heldout=null, and the run goes on"
                raise ValueError(f"{found}: held-out samples {spoilt} hold numbers that are not finite: {advice}")
            raise Failure(doubt)

        def note() -> None:
            run.record(**{metric: loss})
            if loss > ABSURD:
                run.say(f"warning: {doubt}")

        run.processes.from_main(note)
    if run.due(cfg.eval.fid_every) and "fid" not in done and not log_fid(run):
        return False
    if run.due(cfg.every.sample) and "grid" not in done:
        with run.timed("draw"):
            draw_grid(run)
    return True


def done_before(run: Run) -> set[str]:
    """Return what is done already at run.step: keys of metrics.jsonl records, e.g. "fid"; "grid" if its file exists."""
    done = {name for record in run.log.records() if record["step"] == run.step for name in record}
    return done | {"grid"} if grid_path(run).exists() else done


def evaluate(run: Run) -> float:
    """Return the mean loss of the EMA weights on held-out data with all tokens (tread/evaluation/heldout_loss.py). If
    the run is asked to stop meanwhile (run.stop.agreed()), the evaluation ends early and its result is meaningless."""
    options, processes, process, network = run.cfg.eval, run.processes, run.model.process, run.ema.network
    total = torch.zeros((), device=processes.device)
    mine = torch.arange(options.points)[processes.rank :: processes.count]
    size = max(1, min(options.batch_size, options.points) // processes.count)

    def add_mine() -> None:
        for numbers in mine.split(size) if len(mine) else ():
            padded = torch.cat([numbers, numbers[-1:].expand(size - len(numbers))])  # all of one shape
            with autocast(processes.device, run.precision):
                losses = heldout_loss(process, network, run.heldout, padded, options.points, options.noise_levels)
            total.add_(losses[: len(numbers)].sum())
            if run.stop.reason:
                break

    processes.together(add_mine)
    return processes.sum(total).item() / options.points


def evaluated(run: Run) -> Iterator[Batch]:
    """Yield the held-out samples that `evaluate` uses, in batches."""
    options, data = run.cfg.eval, run.heldout
    samples, _ = point(torch.arange(options.points), options.points, len(data), options.noise_levels)
    return (data.read(some.numpy()) for some in samples.unique().split(options.batch_size))


def log_fid(run: Run) -> bool:
    """Record the FID of eval.fid_samples samples of the EMA weights, at fixed seeds. Returns False if asked to stop."""
    began, processes = time.perf_counter(), run.processes
    seeds = range(run.cfg.eval.fid_samples)[processes.rank :: processes.count]
    drawn_by, stopped = sampler(run, len(seeds)), lambda: run.stop.reason is not None
    total = processes.together(lambda: run.online_fid.moments(run.model, seeds, drawn_by, stopped=stopped))
    if run.stop.agreed():
        return False
    total = functools.reduce(Moments.merge, processes.gather_objects(total))

    def note() -> None:
        value = run.online_fid.fid(total, run.cfg.train.cpu_threads)
        seconds = time.perf_counter() - began
        run.record(fid=value, fid_samples=total.count, fid_seconds=round(seconds, 1))
        run.say(f"  FID      {value:.2f} of {total.count:,} samples at step {run.step}, took {seconds:.0f} s")

    processes.from_main(note)
    return True


def grid_path(run: Run) -> Path:
    return run.folder / "samples" / f"step_{run.step:07d}.png"


def draw_grid(run: Run) -> None:
    """Save the loss curve, and a grid of samples drawn with the EMA weights: a row per class or caption, with the same
    noise each time. The processes share the samples equally; all must call this."""
    sampling, processes = run.cfg.sampling, run.processes
    classes = spread_classes(run.model.num_labels, sampling.classes)
    labels = torch.tensor(classes).repeat_interleave(sampling.per_class)
    share = math.ceil(len(labels) / processes.count)
    seeds = torch.arange(processes.rank * share, (processes.rank + 1) * share) % len(labels)  # some twice: equal shares
    mine = processes.together(lambda: draw_samples(run, seeds.tolist(), labels[seeds]))
    pictures = processes.gather(mine.to(processes.device))[: len(labels)].cpu().numpy()

    def save_both() -> None:
        with explain_failure(grid_path(run)):
            save_grid(grid_path(run), pictures, sampling.per_class, run.captions)
            save_curve(run.folder / "loss.png", run.log.records(), bool(run.cfg.model.routes), heldout_titles())

    processes.from_main(save_both)


def draw_samples(run: Run, seeds: Sequence[int], labels: Tensor, prompts: Text | None = None) -> Tensor:
    """Draw samples (n, 1 or 3, H, W) uint8 with the EMA weights, one per seed. `labels` (n,) are classes or, for a
    network that takes text, indices into the encoded captions `prompts` (None: those of the run's sample grids)."""
    model = run.model if prompts is None else replace(run.model, prompts=prompts)
    return torch.cat(list(draw_pictures(model, run.decoder, seeds, labels, sampler(run, len(labels)))))


def sampler(run: Run, samples: int) -> Sampler:
    """Return the run's sampler, with batches of min(`samples`, 64) samples."""
    sampling = run.cfg.sampling
    return Sampler.of(run.model.process, sampling.steps, sampling.solver, min(64, samples), run.precision)


def save(run: Run, leaving: bool = False) -> bool:
    """Copy what a checkpoint holds, let a thread write it, and return True. If this step or over half of the last 100
    were bad (loss or gradient not finite, weights unchanged), save nothing and return False or, if `leaving`, save but
    remove no older checkpoint. Waits first until the previous checkpoint is written. Raises OSError if that failed,
    Failure as read_statistics does or if the weights are not finite."""
    with run.timed("save"):
        finish_saving(run)
    counted = read_statistics(run)
    skipped = counted["in_a_row"] > 0 or mostly_bad(counted)
    if skipped and not leaving:
        return False
    norms = torch._foreach_norm(list(run.network.parameters()))
    if not torch.stack(norms).isfinite().all():
        raise Failure(f"weights are not finite after step {run.step}, which is not saved: try a smaller optim.lr")
    info = {
        "tally": counted,
        "flops": run.flops,
        "seconds": run.seconds,
        "samples": len(run.data),
        "latents": asdict(run.data.latents),
        "attribution": run.data.attribution,
        "encoder": run.aligner and run.aligner.fingerprint,
        "class_token": run.data.class_fingerprint,
        "config": run.config,
        "init_revision": revision_in([start.get("weights") for start in run.log.starts() if not start["step"]][-1:]),
        "plugins": plugin_hashes(run.cfg.plugins) | (run.earlier.info.get("plugins", {}) if run.earlier else {}),
        "versions": run.log.versions if run.main else None,
    }
    if run.adapter:
        info["adapter"] = run.adapter

    def write(step: int, parts: dict[str, dict[str, Tensor]]) -> None:
        with explain_failure(run.folder / f"step_{step:07d}"):
            checkpoint.save(run.folder, step, parts, info)
            if run.cfg.checkpoints.keep_last is not None and not skipped:
                checkpoint.prune(run.folder, run.cfg.checkpoints.keep_last, run.cfg.checkpoints.keep_every)

    def begin() -> None:
        run.written = run.writer.submit(write, run.step, checkpoint.snapshot(run.trained.parts()))

    with run.timed("save"):
        run.processes.from_main(begin)
    run.saving = run.step
    return True


def finish_saving(run: Run, wait: bool = True) -> None:
    """Wait until a thread has written the checkpoint in progress, if any, and note that it is saved. wait=False: if the
    thread is still writing, do nothing. All processes must call this. Raises the thread's error, such as OSError."""

    def written() -> bool:
        if not wait and not run.written.done():
            return False
        if error := run.written.exception():
            raise error if isinstance(error, Exception) else RuntimeError(f"the writing thread ended: {error!r}")
        run.log.status("running", run.saving)
        return True

    if run.saving is not None and run.processes.from_main(written):
        run.saved, run.saving = run.saving, None


def judge_demo(run: Run) -> None:
    """Draw run.demo_samples pictures with the EMA weights, and record scores from judge_digits or judge_emoji, unless
    recorded already. For emoji, raises ValueError or OSError if find_at_hand's Inception weights can't be read."""
    count = run.demo_samples
    if not run.main or not count or "demo_samples" in done_before(run):
        return
    with run.timed("judge"):
        if run.cfg.dataset.embedded == "digits":
            labels = torch.arange(count) % run.cfg.dataset.num_classes
            values = judge_digits(draw_samples(run, range(count), labels).numpy(), labels.numpy())
        else:
            asked = ask(run.data, run.heldout, count)
            pictures = draw_samples(run, range(count), torch.arange(count), asked.texts)
            weights = find_at_hand(run.cfg.eval.inception)
            inception = weights and load_inception(weights, run.device)
            values = judge_emoji(pictures, asked, real_emoji(run.data, run.heldout), inception)
    run.record(**values, demo_samples=count)


def forecast(run: Run, seconds: float) -> str:
    """Return a line that estimates the time left; `seconds` is the time of a training step."""
    cfg, model, sampling, count = run.cfg, run.model, run.cfg.sampling, run.processes.count
    routes, aligner, left = active_routes(cfg, run.step - 1), run.aligner_at(run.step - 1), cfg.train.steps - run.step
    flops = sample_flops(run.network, routes, aligner)
    if aligner and cfg.alignment.until:  # steps after alignment's end take less time
        left -= max(0, cfg.train.steps - cfg.alignment.until) * aligner.flops(routes) / flops
    each = sampler(run, 1).flops(model)
    speed = flops * cfg.train.batch_size / count / seconds  # FLOP/s of one process

    def times(interval: int | None) -> int:
        return 0 if interval is None else -(-cfg.train.steps // interval) - (run.step - 1) // interval

    def drawn(samples: int) -> float:
        batch = min(64, max(1, samples))  # the last batch is padded
        return -(-samples // batch) * batch * each / speed

    evaluation = cfg.eval.points * run.network.forward_flops() / count / speed if run.heldout else 0.0
    parts = {
        "training": left * seconds,
        "evaluation": times(cfg.every.evaluate) * evaluation,
        "FID": times(cfg.eval.fid_every) * drawn(cfg.eval.fid_samples // count),
        "grids": times(cfg.every.sample) * drawn(min(sampling.classes, model.num_labels) * sampling.per_class),
        "judging": drawn(run.demo_samples),
    }
    unit, size = ("s", 1) if sum(parts.values()) < 120 else ("min", 60)
    each = ", ".join(f"{name} {part / size:,.1f}" for name, part in parts.items() if part)
    total = sum(parts.values()) / size
    return f"  time      about {total:,.1f} {unit} more, estimated by the first steps: {each}"
