"""The start of training: begins or continues a run, with every check before any long work."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf

from tread.checkpoints import checkpoint, posthoc_ema
from tread.checkpoints.adapting import new_classes, new_positions, position_scale
from tread.checkpoints.ema import EMA, exponential, power
from tread.checkpoints.lora import BASE, base_of
from tread.checkpoints.network import build_network, process_of
from tread.checkpoints.run_log import RunLog, check_alike, differences
from tread.checkpoints.weights import StoredWeights, load_weights
from tread.data.columns import check_grid
from tread.data.dataset import LatentDataset
from tread.data.index import changed_files, files_of, read_index
from tread.data.latents import LatentSpec
from tread.diffusion.labels import spread_classes
from tread.encoders import autoencoder
from tread.encoders.autoencoder import Decoder
from tread.encoders.vision import encoder_name, open_encoder
from tread.evaluation.scorers import OnlineFID, open_online_fid
from tread.models.backbone import Backbone, count_parameters
from tread.models.conditions import Text
from tread.runtime.compiling import compile_blocks, settle_compile, why_failing
from tread.runtime.device import avoid_faults, device_name, memory_of
from tread.runtime.distributed import Processes, open_training, split_batch
from tread.runtime.files import check_place, explain_failure, point_to, size_text, whole_file, write_whole
from tread.runtime.plugins import plugin_changes
from tread.runtime.randomness import generator
from tread.runtime.schema import written
from tread.runtime.signals import Stop
from tread.runtime.tensor_files import LABELS, save_tensors
from tread.runtime.tracking import check_tracker, open_tracker
from tread.training.alignment import Aligned, Aligner, build_projector
from tread.training.costs import MemoryPlan, blank_loss, checkpoint_bytes, kinds_to_come, live_bytes, plan_memory
from tread.training.graphs import open_graphs
from tread.training.optimizer import learning_rate
from tread.training.run import Run
from tread.training.run_folder import Claim, claim
from tread.training.settings import Settings, prepare_embedded


def start(cfg: Settings, config: dict, stop: Stop, warnings: Sequence[str] = ()) -> Run:
    """Begin or resume the run `cfg` (`config`: as a dict); print `warnings`. ValueError or OSError if it can't run."""
    began = time.perf_counter()
    if cfg.init_positions == "scaled":
        cfg, config = with_scaled_positions(cfg, config)
    check_tracker(cfg.tracker)
    processes, precision = open_training(cfg.train.precision, cfg.train.cpu_threads, cfg.train.processes)
    stop.connect(processes.count)
    check_alike(processes.gather_objects(config))
    micro_batches = split_batch(cfg.train.batch_size, processes.count, processes.rank, cfg.train.micro_batch_size)
    check_memory(cfg, processes.device)
    log = RunLog(Path(cfg.results) / cfg.name)  # before anything in the folder is read
    claimed = processes.from_main(lambda: claim(log.folder, cfg.resume, config))
    earlier = claimed.checkpoint
    if earlier and not (earlier.folder / "info.json").is_file():
        raise ValueError(f"{earlier.folder} is not seen by all processes; `results` must be a folder they share")
    with processes.main_first():
        data, heldout = open_datasets(cfg, processes.device)
    if earlier:
        check_data(cfg, earlier, data)
    decoder, online_fid = open_drawing(cfg, data, processes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(cfg.seed, "init").initial_seed())
        network = build_network(cfg)
    network.residual = cfg.train.residual  # copied to the averaged networks, too
    if cfg.init_from and not earlier:
        cfg = replace(cfg, init_from=processes.from_main(lambda: checkpoint.pinned(cfg.init_from)))
    weights, notes = bring_weights(cfg, network, claimed, data)
    base = adapt(cfg, network, earlier)
    cfg.optim.freeze(network)
    network.to(processes.device)
    faulty = avoid_faults(processes.device, cfg.text.tokens if cfg.model.takes_text else None)
    ema = EMA(network, exponential(cfg.ema.decay, cfg.ema.warmup), base)
    powers = {width: EMA(network, power(width)) for width in cfg.ema.power}
    with processes.main_first():  # the main process may fetch an encoder
        aligner = open_aligner(cfg, network, ema, data, precision)
    projector = aligner and aligner.module.projector
    optimizer = cfg.optim.build(checkpoint.optimized_parameters(network, projector), network)
    averaged = {width: power.network for width, power in powers.items()}
    trained = checkpoint.Trained(network, ema.network, optimizer, averaged, projector, base)
    if earlier:
        trained.restore(earlier, with_optimizer=cfg.optim.keeps_state(claimed.changed))
    rest = range(earlier.step if earlier else 0, cfg.train.steps)
    lasting = processes.count > 1 or len(micro_batches) > 1
    memory, failed = prepare_blocks(cfg, network, ema, aligner, micro_batches[0], precision, rest, lasting, data)
    prompts = grid_prompts(cfg, heldout or data) if cfg.model.takes_text else {}
    run = Run(
        cfg, config, log, processes, precision, micro_batches, data, heldout, network, ema, [ema, *powers.values()],
        aligner, optimizer, trained, decoder, online_fid, weights, notes, stop, began, memory.said, earlier, **prompts
    )  # fmt: skip
    run.graphs = open_graphs(run)
    if cfg.train.residual == "bf16" and precision == "fp32":
        run.warnings.append("train.residual=bf16 has no effect: the run computes in fp32 (train.precision=bf16)")
    run.warnings += [*settings_warnings(cfg), *data_warnings(run), *filter(None, [faulty, memory.warning])]
    processes.from_main(lambda: take_folder(run, claimed))
    for warning in warnings:
        processes.say(warning)
    if failed:
        processes.say(f"warning: running without torch.compile, which fails here: {failed}")
    return run


def with_scaled_positions(cfg: Settings, config: dict) -> tuple[Settings, dict]:
    """Return `cfg` and `config` with model.position_scale set as init_positions=scaled asks. It is the recorded scale
    if the run has begun already, else the scale of init_from's network × its number of token rows / this network's.
    Raises ValueError if `cfg` states another scale (1, the default, counts as not stated)."""
    run, side = Path(cfg.results) / cfg.name, cfg.dataset.size // cfg.model.patch_size
    scale = position_scale(cfg.init_from, cfg.init_weights, run, side)
    if cfg.model.position_scale not in (1.0, scale):
        said = f"model.position_scale is {cfg.model.position_scale:g}, but init_positions=scaled makes it {scale:g}"
        raise ValueError(f"{said}: leave it out")
    config = {**config, "model": {**config["model"], "position_scale": scale}}
    return replace(cfg, model=replace(cfg.model, position_scale=scale)), config


def adapt(cfg: Settings, network: Backbone, earlier: checkpoint.Checkpoint | None) -> frozenset[str]:
    """Add LoRA's adapters to the network, and return the names of the frozen parameters. If the run goes on from the
    checkpoint `earlier`, first load the weights that its adapters were added to. Does nothing if lora.rank is None."""
    if cfg.lora.rank is None:
        return frozenset()
    if earlier:
        network.load_state_dict(earlier.base())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(cfg.seed, "lora").initial_seed())
        return cfg.lora.adapt(network)


def prepare_blocks(
    cfg: Settings, network: Backbone, ema: EMA, aligner: Aligner | None, rows: slice, precision: str, steps: range,
    lasting: bool, data: LatentDataset,
) -> tuple[MemoryPlan, str | None]:  # fmt: skip
    """Choose how the steps save memory, and compile the blocks, forward and backward, before the first step. Returns
    (the choice, error); the error, one line, says why compiling failed if it was wanted, and is None otherwise.

    rows     the slice of the batch that makes up one micro-batch; only its length counts.
    steps    the numbers of the steps to come; blocks are compiled for the routes that kinds_to_come finds in them.
    lasting  whether gradients stay in memory between passes (accumulation, DDP).
    data     the training data, which may be on the device (dataset.placement=device).
    """
    device, images, kinds = network.pos_embed.device, rows.stop - rows.start, kinds_to_come(cfg, steps)

    def choose(compiled: bool) -> MemoryPlan:
        if device.type == "cpu":
            how = "plain" if cfg.train.memory == "auto" else cfg.train.memory
            return MemoryPlan(how, how)
        more = data.placed + lasting * 4 * count_parameters(network)
        more += live_bytes(cfg, images, aligner and aligner.encoder, data.picture_size)
        return plan_memory(cfg, network, kinds, images, memory_of(device) - more, precision, compiled, aligner)

    def attempt() -> None:
        for routes in dict.fromkeys(routes for routes, _ in kinds):
            blank_loss(cfg, network, routes, images, device, precision).backward()

    compiled, uncompiled = settle_compile(cfg.train.compile, device)
    plan = choose(compiled)
    network.activation_checkpointing = plan.how == "checkpointing"
    if compiled:
        compile_blocks([*network.compiled(), *ema.network.compiled()], saving=plan.how == "budget")
        uncompiled = why_failing(attempt)
        network.zero_grad()
        if uncompiled:
            torch.compiler.set_stance("force_eager")
            compiled, plan = False, choose(compiled=False)
            network.activation_checkpointing = plan.how == "checkpointing"
    if plan.how == "budget" and not compiled:
        said = "train.memory=budget needs compiled blocks, and these are not: all activations are kept"
        plan = plan._replace(warning=plan.warning or said)
    return plan, uncompiled


def check_data(cfg: Settings, earlier: checkpoint.Checkpoint, data: LatentDataset) -> None:
    """Raise ValueError unless `data` has the LatentSpec, sample count and class tokens that `earlier` records."""
    made = {"samples": earlier.info["samples"], "class_token": earlier.info.get("class_token")}
    now = vars(data.latents) | {"samples": len(data), "class_token": data.class_fingerprint}
    if changed := differences(vars(LatentSpec.from_json(earlier.info["latents"])) | made, now):
        listed = [f"\n  {key}: {str(was)[:99]} there, {str(now)[:99]} here" for key, (was, now) in changed.items()]
        said = f"{cfg.dataset.path} is not the data that {Path(cfg.results) / cfg.name} was trained on"
        raise ValueError(f"{said}; name=… starts another run{''.join(listed)}")


def check_memory(cfg: Settings, device: torch.device) -> None:
    """Raise ValueError if training the blocks alone exceeds the device's memory. The network need not be built yet."""
    model, frozen = cfg.model, not all(group.lr for group in cfg.optim.groups)  # frozen: no gradients, no moments
    copies = 1 if cfg.lora.rank else 2 + (not frozen) * (1 + cfg.optim.matrix_copies) + len(cfg.ema.power)
    least = int(model.depth * model.hidden_size**2 * (2 + model.mlp_ratio))  # of all architectures; most have more
    needed, room = int(4 * copies * least), memory_of(device)
    if needed > room:
        asked = f"model.hidden_size={model.hidden_size}, depth={model.depth} and mlp_ratio={model.mlp_ratio:g}"
        takes = f"with gradients, optimizer and averages {size_text(needed)}"
        raise ValueError(f"{asked} make {least:.1e} parameters or more, {takes}; {device} has {size_text(room)}")


def open_drawing(cfg: Settings, data: LatentDataset, processes: Processes) -> tuple[Decoder, OnlineFID | None]:
    """Return the decoder for sample grids, and the scorer of FIDs during training (None without eval.fid_every)."""
    pictures, online_fid = None, None
    if cfg.sampling.decode or cfg.eval.fid_every:
        with processes.main_first():  # one process downloads the weights
            pictures = autoencoder.load_decoder(data.latents, processes.device, cfg.sampling.autoencoder)
    if cfg.eval.fid_every:
        reference, samples = Path(cfg.eval.fid_reference), cfg.eval.fid_samples
        online_fid = open_online_fid(reference, samples, cfg.eval.inception, data.latents, pictures, processes)
    return pictures if cfg.sampling.decode else autoencoder.preview, online_fid


def take_folder(run: Run, claimed: Claim) -> None:
    """Record the run's start, at step 0 or from claimed.checkpoint, in its folder; remove later steps' results. For the
    main process only. Raises OSError, also if a checkpoint would not fit the disk; ValueError if wandb fails."""
    say, optim = run.processes.say, run.cfg.optim
    needed = checkpoint_bytes(run.cfg, run.network, run.aligner) if run.step < run.cfg.train.steps else 0
    check_place(run.folder, needed)
    facts = {"processes": run.processes.count, "device": device_name(run.processes.device), "precision": run.precision}
    parts = {"files": run.data} | ({} if run.heldout is None else {"heldout_files": run.heldout})
    for key, data in parts.items():
        begun = [start[key] for start in run.log.starts() if key in start]
        if claimed.checkpoint and begun and not (data is run.heldout and "dataset.heldout" in claimed.changed):
            run.warnings += changed_files(data.folder, begun[-1], hashes_alone=data.verify == "full")
        else:
            facts[key] = files_of(data.folder)
    run.spent.update({name.removesuffix("_seconds"): s for name, s in run.log.read_status().get("spent", {}).items()})
    run.log.start(run.step, run.config, **facts, weights=run.weights, warnings=run.warnings)
    try:
        with explain_failure(run.folder):
            write_whole(run.folder / "config.yaml", OmegaConf.to_yaml(run.config))
            posthoc_ema.forget_after(run.folder, run.step)
            if run.trained.base and not claimed.checkpoint:
                with whole_file(run.folder / BASE) as partial:
                    run.adapter = {"scale": run.cfg.lora.scale, "base": save_tensors(partial, base_of(run.network))}
            if claimed.checkpoint:
                point_to(run.folder / "latest", claimed.checkpoint.folder.name)
        run.stop.ending = lambda signal: run.log.status(
            "interrupted", run.step, f"{signal} came a second time; steps after {run.saved or 0} will be done again"
        )
        for problem in claimed.damaged:
            say(f"warning: {problem}")
        finished = run.step >= run.cfg.train.steps
        if claimed.checkpoint and not finished:
            before = ", from the checkpoint before" if claimed.damaged else ""
            say(f"{run.folder} goes on at step {run.step}{before}")
        for key, (before, now) in claimed.changed.items():
            if not (finished and key == "train.steps"):  # train.py prints that the run is finished
                say(f"warning: {key} was {written(before)}, is {written(now)}")
        if claimed.checkpoint and not optim.keeps_state(claimed.changed):
            say("warning: the optimizer has changed: its state begins anew, weights and averages go on")
        if not finished and optim.schedule != "constant" and {"train.steps", "optim.schedule"} & claimed.changed.keys():
            rate = learning_rate(run.cfg, run.step)
            say(f"warning: the learning rate falls until train.steps, so it now goes on at {rate:.3g}")
        if not finished:
            run.tracker = open_tracker(run.cfg.tracker, run.cfg.wandb.project, run.config, run.folder, run.step)
    except (ValueError, OSError) as error:
        run.log.status("failed", run.step, str(error))
        run.log.close()
        raise


def bring_weights(cfg: Settings, network: Backbone, claimed: Claim, data: LatentDataset) -> tuple[str, list[str]]:
    """Load init_from's weights unless the run resumes from claimed.checkpoint; give a text network `data`'s empty
    caption. Return (origin of the weights, warnings). Raises FileNotFoundError, or ValueError for unfit weights."""
    weights, notes = f"new, drawn by seed {cfg.seed}", []
    if earlier := claimed.checkpoint:
        unread = "; init_from was read when the run began" if cfg.init_from else ""
        optimizer = "with the optimizer" if cfg.optim.keeps_state(claimed.changed) else "not the optimizer's state"
        weights = f"raw and averaged, {optimizer}, of {earlier.folder}, step {earlier.step:,}{unread}"
    elif cfg.init_from is not None:

        def adapt(stored: StoredWeights) -> StoredWeights:
            if cfg.init_classes is not None:
                table = network.state_dict()[LABELS]
                stored, said = new_classes(stored, table, cfg.init_classes, data.latents.classes)
                notes.append(said)
            if cfg.init_positions is not None:
                stored, said = new_positions(stored, network.grid[0], cfg.model.position_scale)
                notes.extend(said)
            return stored

        stored = load_weights(network, cfg.init_from, cfg.init_weights, cfg.model, cfg.text, adapt)
        weights, notes = stored.describe(), [*notes, *stored.warnings(cfg, data.latents)]
    if cfg.model.takes_text:
        network.take_null(data.encoded.null)
    return weights, notes


def open_aligner(cfg: Settings, network: Backbone, ema: EMA, data: LatentDataset, precision: str) -> Aligner | None:
    """Build the Aligner, which computes the alignment loss; None if alignment.kind is none. The run's seed initialises
    the projector. `precision` is that of training steps. Raises ValueError if an encoder's features do not fit."""
    alignment, device, encoder, flops, fingerprint = cfg.alignment, network.pos_embed.device, None, 0, None
    if alignment.kind == "none":
        return None
    width = network.hidden_size
    if alignment.kind == "repa" and alignment.source == "stored":
        width, fingerprint = data.feature_spec.width, data.feature_spec.fingerprint
    elif alignment.kind == "repa":
        encoder = open_encoder(alignment.encoder, device, grid=network.grid[0], inception=cfg.eval.inception)
        encoder = replace(encoder, precision=alignment.encoder_precision(precision, device))
        cost = encoder.cost(data.picture_size)
        check_grid(math.isqrt(cost.tokens), network.grid[0], f"features of {alignment.encoder}")
        width, flops, fingerprint = cost.width, cost.flops, encoder.fingerprint
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(cfg.seed, "projector").initial_seed())
        projector = build_projector(alignment, network.hidden_size, width)
    module = Aligned(network, projector.to(device), alignment.resolve(cfg.model.depth)[0])
    return Aligner(alignment, module, ema.network if alignment.kind == "self" else None, encoder, flops, fingerprint)


# defaults of configs/defaults.yaml that are neither None, 0 nor the default of a field
USUAL = {"optim.betas": (0.9, 0.999), "optim.eps": 1e-8, "eval.fid_samples": 5000, "wandb.project": "tread"}


def settings_warnings(cfg: Settings) -> list[str]:
    """Return warnings about settings that have no effect in this run, or are likely mistakes."""
    alignment, optim, train, scored, built_in = cfg.alignment, cfg.optim, cfg.train, cfg.eval, cfg.dataset.embedded
    kind, other = alignment.kind, "edm" if cfg.objective == "rf" else "rf"
    live, chosen = kind == "repa" and alignment.source == "live", f"with alignment={kind}"
    judge = cfg.judges_demo and built_in == "emoji" and scored.demo_samples
    inception = scored.fid_every or judge or (live and alignment.encoder == "inception")
    read = {  # setting → whether anything reads it, and where nothing does
        "alignment.precision": (live or alignment.precision == "auto", "without a live encoder of alignment=repa"),
        "checkpoints.keep_every": (cfg.checkpoints.keep_last, "without checkpoints.keep_last, as all are kept"),
        "dataset.archive": (built_in == "cifar10", "but with dataset=cifar10"),
        "ema.snapshot_every": (cfg.ema.power, "without ema.power"),
        "eval.demo_samples": (cfg.judges_demo, "but with digits by class or emoji by caption"),
        "eval.fid_reference": (scored.fid_every, "without eval.fid_every"),
        "eval.fid_samples": (scored.fid_every, "without eval.fid_every"),
        "eval.inception": (inception, "without an FID, emoji's judge or an alignment that reads it"),
        "optim.final_lr": (optim.schedule != "constant", "with optim.schedule=constant"),
        "rf.clamp": (cfg.rf.predicts != "velocity", "with rf.predicts=velocity"),
        "rf.time_mean": (cfg.rf.time != "uniform", "with rf.time=uniform"),
        "rf.time_std": (cfg.rf.time != "uniform", "with rf.time=uniform"),
        "sampling.autoencoder": (cfg.sampling.decode or scored.fid_every, "with sampling.decode=false"),
        "train.class_token_weight": (cfg.model.class_token, "without model.class_token"),
        "train.routes_until": (cfg.model.routes, "without routes"),
        "wandb.project": (cfg.tracker == "wandb", "but with tracker=wandb"),
        "alignment.weight": (kind != "none", chosen),
        "alignment.gap": (kind == "self", chosen),
        "alignment.width": (kind == "repa", chosen),
        "alignment.source": (kind == "repa", chosen),
    }
    for key in ("betas", "eps", "weight_decay"):
        read[f"optim.{key}"] = key in optim.entry.shared, f"with optim.name={optim.name}"
    sections = {"lora": (cfg.lora.rank, "without lora.rank"), other: (False, f"with objective={cfg.objective}")}
    sections["text"] = cfg.model.takes_text, f"with model={cfg.model.name}, which takes no texts"
    read |= {f"{name}.{key}": said for name, said in sections.items() for key in vars(getattr(cfg, name))}
    warnings = []
    for key, (reads, where) in read.items():
        section, name = key.split(".")
        options = getattr(cfg, section)
        value, usual = getattr(options, name), USUAL.get(key, getattr(type(options), name, None))
        if not reads and value != usual and (value or usual):
            warnings.append(f"{key}={written(value)[:80]} has no effect {where}")
    blocks, teacher = alignment.resolve(cfg.model.depth)
    one_channel = cfg.objective == "rf" and cfg.dataset.channels == 1
    until = (train.routes_until or 0) if cfg.model.routes else 0
    ratios = {route.selection_ratio for route in cfg.model.routes if train.ratio_schedule}
    mistakes = [  # whether it is one, and the warning
        (kind == "self" and blocks[-1] >= teacher, f"alignment.block {blocks[-1]} is not before .teacher {teacher}"),
        (optim.warmup_steps >= train.steps, "optim.warmup_steps is not below train.steps: optim.lr is not reached"),
        (until >= train.steps, "train.routes_until is not below train.steps: the routes stay to the end"),
        ((alignment.until or 0) >= train.steps, "alignment.until is not below train.steps: it lasts to the end"),
        (ratios - {0.5}, "selection_ratio of routes has no effect in training with train.ratio_schedule"),
        (train.label_drop == 1, "train.label_drop is 1: no class or text is learned"),
        (cfg.init_weights == "model" and not cfg.init_from, "init_weights=model has no effect without init_from"),
        (one_channel and cfg.rf.direction, "rf.direction teaches nothing: latents of one channel have only a sign"),
    ]
    return warnings + [said for due, said in mistakes if due]


def data_warnings(run: Run) -> list[str]:
    """Return warnings: held-out files are trained on; held-out and training photos differ in orientation or alpha; data
    were made from another archive than dataset.archive names; encoder or plugins differ from the checkpoint's."""
    warnings, dataset, aligner = [], run.cfg.dataset, run.aligner
    ours, theirs = str(files_of(run.data.folder)), files_of(run.heldout.folder) if run.heldout else {}
    if same := [name for name, text in theirs.items() if text.partition(",")[0] in ours]:
        which = f"{len(same)} of {len(theirs)} files of latents in {dataset.heldout} are those of {dataset.path}"
        said = "the evaluation is of the training data, and says nothing about other pictures"
        warnings.append(f"{which}: {said}; prepare_latents.py heldout=0.02 keeps 2% of the pictures for it")
    for key in ("orientation", "alpha") if run.heldout else ():
        here, there = getattr(run.data.latents, key), getattr(run.heldout.latents, key)
        if here != there:
            photos = f"{dataset.heldout} holds photos of {key}={there}, {dataset.path} of {key}={here}"
            warnings.append(f"{photos}: where this matters, the evaluation loss is of other pictures")
    made_of = read_index(run.data.folder).get("archive", "an archive that is not recorded")
    if dataset.embedded == "cifar10" and dataset.archive not in (None, made_of):
        unread = f"dataset.archive={dataset.archive} was not read"
        warnings.append(f"{dataset.path} was there already, made of {made_of}: {unread}")
    info = run.earlier.info if run.earlier else {}
    before = info.get("encoder")
    if before and aligner and aligner.fingerprint not in (None, before):
        name = aligner.settings.encoder
        warnings.append(f"{name} is another encoder than the run was aligned with up to here, by its hash")
    return warnings + plugin_changes(info)


def grid_prompts(cfg: Settings, data: LatentDataset) -> dict[str, Text | list[str]]:
    """Return the captions of a sample grid's rows, as fields of Run: {"prompts": encoded, "captions": texts, or [] if
    the dataset has none}. They are the first captions of samples that are spread evenly over the dataset."""
    samples = spread_classes(len(data), cfg.sampling.classes)
    captions = [data.captions[sample][0] for sample in samples] if "captions" in read_index(data.folder) else []
    return {"prompts": data.read(np.array(samples)).text, "captions": captions}


ALIKE = ("classes", "autoencoder", "fingerprint", "scale", "shift")  # must agree in training and held-out data


def open_datasets(cfg: Settings, device: torch.device | str = "cpu") -> tuple[LatentDataset, LatentDataset | None]:
    """Open the training data, placed and normalised as cfg.dataset says, and the held-out data (else None). Raises
    FileNotFoundError, or ValueError if data does not fit the model or fills no batch, or the two datasets mismatch."""
    data = open_dataset(cfg, cfg.dataset.path, "train", cfg.dataset.placement, device)
    if data.feature_spec is not None:
        check_grid(data.feature_spec.grid, cfg.dataset.size // cfg.model.patch_size, f"features in {data.folder}")
    if cfg.dataset.normalize:
        data.normalize(process_of(cfg).data_std)
    data.steps_per_epoch(cfg.train.batch_size)
    if cfg.dataset.heldout is None:
        return data, None
    heldout = open_dataset(cfg, cfg.dataset.heldout, "heldout")
    pairs = {key: (getattr(heldout.latents, key), getattr(data.latents, key)) for key in ALIKE}
    pairs["the class token's encoder"] = heldout.class_fingerprint, data.class_fingerprint
    if None in pairs["fingerprint"]:  # imported latents have none
        del pairs["fingerprint"]
    for key, ours in vars(data.text_spec).items() if data.text_spec else ():
        pairs[f"text.{key}"] = (getattr(heldout.text_spec, key), ours)
    for key, (theirs, ours) in pairs.items():
        if theirs != ours:
            both = f"{cfg.dataset.heldout} and {cfg.dataset.path} differ in {key}"
            shown = f"{str(theirs)[:100]}\n  {str(ours)[:100]}"
            raise ValueError(f"{both}: prepare both alike, or set dataset.heldout=null\n  {shown}")
    shift, scale = data.latents.channel_shift, data.latents.channel_scale
    heldout.latents = replace(heldout.latents, channel_shift=shift, channel_scale=scale)
    return data, heldout


def open_dataset(
    cfg: Settings, path: str, part: str, placement: str = "mmap", device: torch.device | str = "cpu"
) -> LatentDataset:
    """Open the dataset in folder `path` for use as `part`, "train" or "heldout"; make it first if it is built in, such
    as digits, and missing. `placement`: see LatentDataset. Raises FileNotFoundError, or ValueError for unfit data."""
    prepare_embedded(cfg, path, part)
    repa = part == "train" and cfg.alignment.kind == "repa"
    features = encoder_name(cfg.alignment.encoder) if repa and cfg.alignment.source == "stored" else None
    pictures = repa and cfg.alignment.source == "live"
    text = cfg.text.encoder if cfg.model.takes_text else None
    flip, token = part == "train" and cfg.dataset.flip, cfg.model.class_token
    data = LatentDataset(path, cfg.dataset.verify, placement, device, features, pictures, text, flip, token)
    expected = (cfg.dataset.channels, cfg.dataset.size, cfg.dataset.size, cfg.dataset.num_classes)
    measures = (*data.latents.shape, len(data.latents.classes))
    if measures != expected:
        said = f"dataset.channels, size, size and num_classes say {expected}"
        raise ValueError(f"{path} holds latents and classes {measures}, but {said} (dataset=folder?)")
    return data
