"""Train a diffusion transformer with or without routes: accelerate launch train.py model=tread

Read from `main` down: settings → start (every check before any long work) → training → finish.
All that is random in a step follows from (seed, step, position in the global batch): randomness.py.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import hydra
import torch
from accelerate import Accelerator
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from tqdm import tqdm

import autoencoder
import checkpoint
import digits
import settings
from build import build_network, build_optimizer, complete, load_weights, open_datasets
from cli import open_door
from compute import autocast, peak_flops
from ema import EMA
from evaluation import heldout_loss
from files import write_whole
from latents import LatentDataset, Latents
from loading import Loader
from metrics import Moments
from objective import step_draws, training_loss
from pictures import save_curve, save_grid
from probe import Probe, open_probe
from processes import open_accelerator
from randomness import generator, split_batch
from runlog import RunLog, claim
from sample import Sampler, draw_pictures, spread_classes
from summary import describe, outcome
from tracking import start_wandb
from trained import Model


@dataclass
class Run:
    """What a run carries from step to step. `wrapped` is `network`, in DDP where there are several processes."""

    cfg: settings.Settings
    config: dict
    folder: Path
    accelerator: Accelerator
    precision: str
    micro_batches: list[slice]
    data: LatentDataset
    heldout: LatentDataset | None
    loader: Loader
    network: nn.Module
    wrapped: nn.Module
    ema: EMA
    optimizer: torch.optim.Optimizer
    decoder: autoencoder.Decoder
    probe: Probe | None  # of eval.fid_every
    log: RunLog
    step: int  # steps done
    loss_sum: Tensor  # 0-d on the device: losses since the last log, over loss_count steps
    loss_count: int
    wandb: object = None

    @property
    def model(self) -> Model:
        """What is sampled and evaluated: the EMA weights, by the run's process."""
        return Model(settings.process_of(self.cfg), self.ema.network)

    @property
    def main(self) -> bool:
        return self.accelerator.is_main_process

    def say(self, text: str) -> None:
        if self.main:
            tqdm.write(text)

    def record(self, **values: float) -> None:
        if self.main:
            self.log.write({"step": self.step, **values})
            if self.wandb is not None:
                self.wandb.log(values, step=self.step)


@hydra.main(version_base="1.3", config_path="configs", config_name="config")
def main(composed: DictConfig) -> None:
    try:
        config = complete(OmegaConf.to_container(composed, resolve=True))
        run = start(settings.read(config), config)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    if run.step < run.cfg.train.steps:
        train(run)
    else:
        run.say(f"{run.folder} is finished: train.steps above {run.step} trains on, name=… starts another run")
    run.loader.close()
    finish(run)


# ------------------------------------------------------------------------------------------ start


def start(cfg: settings.Settings, config: dict) -> Run:
    """Open or continue a run. Raises ValueError or OSError for bad input."""
    accelerator, precision = open_accelerator(cfg.train.precision, cfg.train.cpu_threads)
    device, main_process = accelerator.device, accelerator.is_main_process
    micro_batches = split_batch(
        cfg.train.batch_size, accelerator.num_processes, accelerator.process_index, cfg.train.micro_batch_size
    )

    folder = Path(cfg.results) / cfg.name
    log = RunLog(folder)
    found, changed = claim(folder, cfg.resume, config)
    steps = set(accelerator.gather(torch.tensor([found.step if found else 0], device=device)).tolist())
    if len(steps) > 1:
        raise ValueError(f"the processes found the run at steps {steps}; `results` must be a folder they share")
    with accelerator.main_process_first():
        data, heldout = open_datasets(cfg, device)
    if found and (Latents.from_json(found.info["latents"]), found.info["samples"]) != (data.latents, len(data)):
        raise ValueError(f"{cfg.dataset.path} is not the data that {folder} was trained on; name=… starts another run")
    real, probe = None, None
    if (main_process and cfg.sampling.decode) or cfg.eval.fid_every:
        real = autoencoder.load_decoder(data.latents, device, cfg.sampling.autoencoder)
    if cfg.eval.fid_every:
        with accelerator.main_process_first():  # one process fetches the weights
            probe = open_probe(cfg.eval, data.latents, real, device, accelerator.num_processes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(cfg.seed, "init").initial_seed())
        network = build_network(cfg)
    if not found and cfg.init_from is not None:
        load_weights(network, cfg.init_from)
    network.to(device)
    optimizer = build_optimizer(cfg, network)
    ema = EMA(network, cfg.ema.decay, cfg.ema.warmup)
    if found:
        checkpoint.restore(found, network, ema.network, optimizer)
    run = Run(
        cfg=cfg,
        config=config,
        folder=folder,
        accelerator=accelerator,
        precision=precision,
        micro_batches=micro_batches,
        data=data,
        heldout=heldout,
        loader=Loader(data, cfg.seed, cfg.train.batch_size, micro_batches, device, steps=cfg.train.steps),
        network=network,
        wrapped=accelerator.prepare(network),
        ema=ema,
        optimizer=optimizer,
        decoder=real if cfg.sampling.decode and real else autoencoder.preview,
        probe=probe,
        log=log,
        step=found.step if found else 0,
        loss_sum=torch.tensor(found.info["loss_sum"] if found else 0.0, device=device),
        loss_count=found.info["loss_count"] if found else 0,
    )
    if main_process:
        run.log.start(run.step, config, processes=accelerator.num_processes, device=str(device), precision=precision)
        write_whole(folder / "config.yaml", OmegaConf.to_yaml(config))
        if found:
            run.say(f"{folder} goes on at step {run.step}")
        for key, (before, now) in changed.items():
            run.say(f"  {key} was {before}, is {now}")
        if cfg.wandb.enabled:
            run.wandb = start_wandb(cfg, config, folder)
    return run


# --------------------------------------------------------------------------------------- training


def train(run: Run) -> None:
    """All steps that are left, with what is due between them."""
    cfg = run.cfg
    device = f"{run.accelerator.device}, {run.precision}"
    run.say(describe(cfg, run.network, run.data, run.accelerator.num_processes, run.micro_batches, device))
    start_step, start_time = run.step, time.perf_counter()
    first, began, paused = start_step, start_time, 0.0
    pace = 0.5 if sys.stderr.isatty() else 20  # seconds between updates of the bar
    with tqdm(total=cfg.train.steps, initial=run.step, disable=not run.main, unit="step", mininterval=pace) as bar:
        while run.step < cfg.train.steps:
            training_step(run)
            run.step += 1
            bar.update()

            last = run.step == cfg.train.steps
            if run.step - start_step == 20:
                minutes = (time.perf_counter() - start_time) / 20 * (cfg.train.steps - start_step) / 60
                run.say(f"  time      {minutes:.1f} min expected for {cfg.train.steps - start_step:,} steps")
            if run.step % cfg.every.log == 0 or last:
                loss = reduced_loss_sum(run) / run.loss_count  # waits for the device, so the clock comes after
                seconds = time.perf_counter() - began - paused
                images_per_s = (run.step - first) * cfg.train.batch_size / seconds
                log_loss(run, loss, images_per_s, data_wait=run.loader.waited / seconds)
                bar.set_postfix_str(f"loss {loss:.4f}, {images_per_s:.0f} images/s", refresh=False)
                first, began, paused = run.step, time.perf_counter(), 0.0
            pause = time.perf_counter()
            if run.heldout is not None and (run.step % cfg.every.evaluate == 0 or last):
                run.record(eval_loss=evaluate(run))
            if run.probe is not None and (run.step % cfg.eval.fid_every == 0 or last):
                log_fid(run)
            if run.step % cfg.every.sample == 0 or last:
                draw_grid(run)
            if run.step % cfg.every.save == 0 or last:
                save(run)
            paused += time.perf_counter() - pause


def training_step(run: Run) -> None:
    """One optimizer step on global batch number run.step."""
    cfg, latents, device = run.cfg, run.data.latents, run.accelerator.device
    draws = step_draws(cfg, latents, run.network.num_tokens, run.step, device)
    for rows, (stored, labels) in zip(run.micro_batches, run.loader.batches(run.step)):
        synchronise = rows is run.micro_batches[-1]
        with contextlib.nullcontext() if synchronise else run.accelerator.no_sync(run.wrapped):
            with autocast(device, run.precision):
                losses = training_loss(cfg, run.wrapped, latents, stored, labels, draws.rows(rows))
            loss = losses.mean() / len(run.micro_batches)
            loss.backward()
        run.loss_sum += loss.detach()
    run.loss_count += 1
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.ema.update(run.network, run.step)


def log_loss(run: Run, loss: float, images_per_s: float, data_wait: float) -> None:
    """Write down the mean loss and the share of time that waited for data since the last log; begin anew."""
    flops = 3 * run.network.forward_flops(run.cfg.model.routes) * images_per_s
    speed = {"images_per_s": round(images_per_s, 1), "flops_per_s": float(f"{flops:.4g}")}
    peak = peak_flops(run.accelerator.device, run.precision)
    if peak is not None:
        speed["mfu"] = round(flops / (peak * run.accelerator.num_processes), 4)
    run.record(loss=loss, **speed, data_wait=round(data_wait, 5))
    run.loss_sum, run.loss_count, run.loader.waited = torch.zeros_like(run.loss_sum), 0, 0.0


def reduced_loss_sum(run: Run) -> float:
    """run.loss_sum averaged over the processes, on all of them. Ends the run if it is not finite."""
    run.loss_sum = run.accelerator.reduce(run.loss_sum, "mean")
    value = run.loss_sum.item()
    if not math.isfinite(value):
        sys.exit(
            f"error: the loss became {value} before step {run.step}. Try a smaller optim.lr, or train.precision=fp32; "
            f"if going on fails again, remove the newest step_… of {run.folder}"
        )
    return value


def evaluate(run: Run) -> float:
    """Full-token loss of the EMA weights on held-out data, see evaluation.py."""
    options, model, accelerator = run.cfg.eval, run.model, run.accelerator
    ranks, total = accelerator.num_processes, torch.zeros_like(run.loss_sum)
    mine = torch.arange(options.points)[accelerator.process_index :: ranks]
    for numbers in mine.split(max(1, options.batch_size // ranks)) if len(mine) else ():
        with autocast(accelerator.device, run.precision):
            total += heldout_loss(
                model.process, model.network, run.heldout, numbers, options.points, options.noise_levels
            )
    return accelerator.reduce(total, "sum").item() / options.points


def log_fid(run: Run) -> None:
    """FID of a few EMA samples, for a trend: the same seeds each time, each process its share."""
    began, accelerator, sampling = time.perf_counter(), run.accelerator, run.cfg.sampling
    seeds = range(run.cfg.eval.fid_samples)[accelerator.process_index :: accelerator.num_processes]
    sampler = Sampler.of(run.model.process, sampling.steps, sampling.solver, min(64, len(seeds)), run.precision)
    total = run.probe.moments(run.model, seeds, sampler)
    if accelerator.num_processes > 1:
        rows = accelerator.gather(total.pack().to(accelerator.device)[None])
        total = functools.reduce(Moments.merge, map(Moments.unpack, rows))
    value = run.probe.fid(total) if run.main else math.nan
    seconds = time.perf_counter() - began
    run.record(fid=value, fid_samples=total.count, fid_seconds=round(seconds, 1))
    run.say(f"  FID      {value:.2f} of {total.count:,} samples at step {run.step}, took {seconds:.0f} s")


def draw_grid(run: Run) -> None:
    """The loss curve, and a grid of EMA samples: a row a class, the same noise each time."""
    if run.main:
        cfg = run.cfg
        classes = spread_classes(cfg.dataset.num_classes, cfg.sampling.classes)
        labels = torch.tensor(classes).repeat_interleave(cfg.sampling.per_class)
        pictures = draw_samples(run, labels)
        save_grid(run.folder / "samples" / f"step_{run.step:07d}.png", pictures.numpy(), cfg.sampling.per_class)
        save_curve(run.folder / "loss.png", run.log.records(), routed=bool(cfg.model.routes))
    run.accelerator.wait_for_everyone()


def draw_samples(run: Run, labels: Tensor) -> Tensor:
    """EMA samples of the classes asked for, with seeds 0, 1, …: pictures (n, 1 or 3, H, W) uint8."""
    sampling, batch_size = run.cfg.sampling, min(64, len(labels))
    sampler = Sampler.of(run.model.process, sampling.steps, sampling.solver, batch_size, run.precision)
    stream = draw_pictures(run.model, run.decoder, range(len(labels)), labels, sampler)
    return torch.cat(list(stream))


def save(run: Run) -> None:
    """Write a checkpoint of this step, unless its weights are broken: then end the run."""
    loss_sum = reduced_loss_sum(run)
    if not all(parameter.isfinite().all() for parameter in run.network.parameters()):
        sys.exit(f"error: weights are not finite after step {run.step}, which is not saved. Try a smaller optim.lr")
    if run.main:
        info = {
            "loss_sum": loss_sum,
            "loss_count": run.loss_count,
            "samples": len(run.data),
            "latents": asdict(run.data.latents),
            "config": run.config,
            "versions": run.log.versions,
        }
        checkpoint.save(run.folder, run.step, checkpoint.parts(run.network, run.ema.network, run.optimizer), info)
    run.accelerator.wait_for_everyone()


# ----------------------------------------------------------------------------------------- finish


def finish(run: Run) -> None:
    """Judge the demo's samples, and say where everything is."""
    if run.main:
        count = run.cfg.eval.demo_samples
        if count and not any(r["step"] == run.step and "label_agreement" in r for r in run.log.records()):
            labels = torch.arange(count) % run.cfg.dataset.num_classes
            run.record(**digits.judge(draw_samples(run, labels).numpy(), labels.numpy()), demo_samples=count)
        run.say(outcome(run.folder, run.step, run.log.records()))
        run.log.close()
    if run.wandb is not None:
        run.wandb.finish()
    run.accelerator.end_training()


if __name__ == "__main__":
    open_door(main, [*settings.known_keys(), "experiment"])
