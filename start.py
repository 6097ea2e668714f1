"""The first stage of training: open a run or continue one, with every check before any long work."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from omegaconf import OmegaConf
from torch import nn
from tqdm import tqdm

import posthoc
import settings
from build import build_learning_rate, build_optimizer, open_datasets
from ema import EMA, exponential, power
from objective import split_batch
from runlog import Claim, RunLog, claim
from tracking import start_wandb
from tread.checkpoints import checkpoint
from tread.checkpoints.network import build_network, load_weights, process_of
from tread.data import autoencoder
from tread.data.dataset import LatentDataset
from tread.data.latents import Latents
from tread.data.loader import Loader
from tread.diffusion.sampling import Model
from tread.evaluation.online_fid import OnlineFID, open_online_fid
from tread.runtime.compiling import compile_blocks, settle_compile
from tread.runtime.distributed import distribute, from_main, open_accelerator
from tread.runtime.files import check_place, explain_failure, point_to, write_whole
from tread.runtime.randomness import generator
from tread.runtime.signals import Stop
from updates import LearningRate, Tally


class Failure(Exception):
    """A run that can't go on; the message says why and what to try."""


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
    averages: dict[float, EMA]  # of ema.power, by width
    optimizer: torch.optim.Optimizer
    learning_rate: LearningRate
    decoder: autoencoder.Decoder
    online_fid: OnlineFID | None  # of eval.fid_every
    log: RunLog
    stop: Stop
    began: float  # when the start began, by time.perf_counter
    tally: Tally  # of the steps since the last log
    step: int  # steps done
    saved: int | None  # step of the newest checkpoint
    wandb: object = None

    @property
    def model(self) -> Model:
        """What is sampled and evaluated: the EMA weights, by the run's process."""
        return Model(process_of(self.cfg), self.ema.network)

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def main(self) -> bool:
        return self.accelerator.is_main_process

    def say(self, text: str) -> None:
        if self.main:
            tqdm.write(text)

    def record(self, **values: float) -> None:
        if self.main:
            with explain_failure(self.log.metrics):
                self.log.write({"step": self.step, **values})
            if self.wandb is not None:
                self.wandb.log(values, step=self.step)


def start(cfg: settings.Settings, config: dict, stop: Stop) -> Run:
    """Open or continue a run. Raises ValueError or OSError for bad input."""
    began = time.perf_counter()
    accelerator, precision = open_accelerator(cfg.train.precision, cfg.train.cpu_threads, cfg.train.processes)
    device, main_process = accelerator.device, accelerator.is_main_process
    stop.connect(accelerator.num_processes)
    micro_batches = split_batch(
        cfg.train.batch_size, accelerator.num_processes, accelerator.process_index, cfg.train.micro_batch_size
    )

    folder = Path(cfg.results) / cfg.name
    log = RunLog(folder)
    claimed = from_main(accelerator, lambda: claim(folder, cfg.resume, config))
    found = claimed.found
    if found and not (found.folder / "info.json").is_file():
        raise ValueError(f"{found.folder} is not seen by all processes; `results` must be a folder they share")
    with accelerator.main_process_first():
        data, heldout = open_datasets(cfg, device)
    if found and (Latents.from_json(found.info["latents"]), found.info["samples"]) != (data.latents, len(data)):
        raise ValueError(f"{cfg.dataset.path} is not the data that {folder} was trained on; name=… starts another run")
    real, online_fid = None, None
    if (main_process and cfg.sampling.decode) or cfg.eval.fid_every:
        real = autoencoder.load_decoder(data.latents, device, cfg.sampling.autoencoder)
    if cfg.eval.fid_every:
        with accelerator.main_process_first():  # one process fetches the weights
            online_fid = open_online_fid(
                Path(cfg.eval.fid_reference),
                cfg.eval.fid_samples,
                cfg.eval.inception,
                data.latents,
                real,
                device,
                accelerator.num_processes,
            )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(cfg.seed, "init").initial_seed())
        network = build_network(cfg)
    if not found and cfg.init_from is not None:
        load_weights(network, cfg.init_from, cfg.init_weights)
    network.to(device)
    optimizer = build_optimizer(cfg, network)
    ema = EMA(network, exponential(cfg.ema.decay, cfg.ema.warmup))
    averages = {width: EMA(network, power(width)) for width in cfg.ema.power}
    if found:
        networks = {width: average.network for width, average in averages.items()}
        checkpoint.restore(found, network, ema.network, optimizer, networks)
    network.activation_checkpointing = cfg.train.activation_checkpointing
    compiled, reason = settle_compile(cfg.train.compile, device)
    if compiled:
        compile_blocks([*network.blocks, *ema.network.blocks])
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
        wrapped=distribute(accelerator, network),
        ema=ema,
        averages=averages,
        optimizer=optimizer,
        learning_rate=build_learning_rate(cfg),
        decoder=real if cfg.sampling.decode and real else autoencoder.preview,
        online_fid=online_fid,
        log=log,
        stop=stop,
        began=began,
        tally=Tally(device, found and tally_of(found.info, accelerator.process_index, accelerator.num_processes)),
        step=found.step if found else 0,
        saved=found.step if found else None,
    )
    from_main(accelerator, lambda: take_folder(run, claimed))
    if reason:
        run.say(f"warning: running without torch.compile, which fails here: {reason}")
    return run


def tally_of(info: dict, process: int, processes: int) -> dict[str, float]:
    """What a checkpoint says of the steps since the last log: this process's own loss, or else the mean."""
    if "tally" not in info:  # before bad steps were counted, all were good
        return {"loss": info["loss_sum"], "good": info["loss_count"]}
    losses = info["tally"]["loss"]
    loss = losses[process] if len(losses) == processes else statistics.mean(losses)
    return {**info["tally"], "loss": loss}


def take_folder(run: Run, claimed: Claim) -> None:
    """Write down that the run starts, in the main process. Raises OSError, also without room for a checkpoint."""
    cfg = run.cfg
    copies = 4 + len(run.averages)  # weights, EMA, two moments of AdamW
    checkpoint_bytes = copies * sum(4 * parameter.numel() for parameter in run.network.parameters())
    check_place(run.folder, checkpoint_bytes if run.step < cfg.train.steps else 0)
    facts = {"processes": run.accelerator.num_processes, "device": str(run.device), "precision": run.precision}
    run.log.start(run.step, run.config, **facts)
    try:
        prepare_folder(run, claimed)
    except (ValueError, OSError) as error:
        run.log.status("failed", run.step, str(error))
        run.log.close()
        raise


def prepare_folder(run: Run, claimed: Claim) -> None:
    """Bring a run's folder to the step it goes on from. Raises OSError, or ValueError for what wandb refuses."""
    cfg = run.cfg
    with explain_failure(run.folder):
        write_whole(run.folder / "config.yaml", OmegaConf.to_yaml(run.config))
        posthoc.forget_after(run.folder, run.step)
        if claimed.found:
            point_to(run.folder / "latest", claimed.found.folder.name)
    run.stop.ending = lambda signal: run.log.status(
        "interrupted", run.step, f"{signal} came a second time; steps after {run.saved or 0} will be done again"
    )
    for problem in claimed.damaged:
        run.say(f"warning: {problem}")
    if claimed.found:
        run.say(f"{run.folder} goes on at step {run.step}" + ", from the checkpoint before" * bool(claimed.damaged))
    for key, (before, now) in claimed.changed.items():
        run.say(f"  {key} was {before}, is {now}")
    if cfg.optim.schedule != "constant" and {"train.steps", "optim.schedule"} & claimed.changed.keys():
        rate = run.learning_rate.at(run.step)
        run.say(f"warning: the learning rate falls until train.steps, so it now goes on at {rate:.3g}")
    if cfg.wandb.enabled:
        run.wandb = start_wandb(cfg, run.config, run.folder)
