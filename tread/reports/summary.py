"""The text that a run prints at its start and after its last step."""

from routing_module import RULES, check_routes
from tread.checkpoints.network import process_of
from tread.evaluation.metric_table import METRICS, with_real
from tread.models.backbone import Backbone, count_parameters
from tread.routing.ids import describe_route
from tread.runtime.files import size_text
from tread.runtime.schema import written
from tread.training.alignment import Aligner
from tread.training.costs import checkpoint_bytes, sample_flops
from tread.training.draws import active_routes
from tread.training.run import Run
from tread.training.settings import Settings


def describe(run: Run) -> str:
    """Return a text for the run's start: lines on data, network, weights, FLOPs, routes, batch, …; and warnings."""
    cfg, network, data, train, optim = run.cfg, run.network, run.data, run.cfg.train, run.cfg.optim
    parameters = count_parameters(network)
    active, tokens = active_routes(cfg, 0), network.num_tokens
    dense, routed = network.forward_flops(), network.forward_flops(active)
    fewer = f"{dense / routed:.3f} times fewer than without routes; " if routed < dense else ""
    images = run.micro_batches[0].stop - run.micro_batches[0].start
    split = f"{run.processes.count} processes × {len(run.micro_batches)} accumulation steps × {images} images"
    routes = [
        f"{describe_route(route, tokens, network.grid)}{RULES[route.select].description}, fp32: {route.fp32}"
        for route in check_routes(active, cfg.model.depth)
    ]
    trained = count_parameters(network, trained=True)
    some = "" if trained == parameters else f", {trained:,} of them trained"
    lines = {
        "run": f"{cfg.name}, {train.steps:,} steps, {train.steps / data.steps_per_epoch(train.batch_size):.1f} epochs",
        "data": f"{cfg.dataset.name}, {len(data):,} samples of {data.latents.shape}",
        "objective": cfg.objective,
        "network": f"{cfg.model.architecture}, {parameters:,} parameters{some}, {cfg.model.blocks}, {tokens} tokens",
        "weights": run.weights,
        "routes": "; ".join(routes) or "none",
        "FLOPs": f"{sample_flops(network, active):.3e} a training image, {fewer}"
        f"{dense:.3e} a forward pass of all tokens",
        "batch": f"{train.batch_size} = {split}; optimizer: {optim.name}"
        f"{f' {written(optim.options)}' if optim.options else ''}{optim.split(run.optimizer)}",
        "device": f"{run.device}, {run.precision}",
        "memory": run.memory,
        "disk": disk(cfg, network, run.aligner),
    }
    if run.aligner:
        lines["FLOPs"] += f"; alignment adds {run.aligner.flops(active):.3e} a training image"
        lines["alignment"] = describe_alignment(run)
    if schedule := train.ratio_schedule:
        ratios = f"{schedule.start:g} up to step {schedule.first:,}, {schedule.end:g} from {schedule.last:,} on"
        lines["routes"] += f"; ratio {ratios}"
        lines["FLOPs"] += "; at the first step"
    if train.loss_tokens == "kept" and active:
        masked = f", with {train.reconstruction:g} of a masked reconstruction" * bool(train.reconstruction)
        lines["objective"] += f", of kept tokens{masked}"
    if train.path_drop:
        lines["objective"] += f", {train.path_drop:g} of the samples without the sparse part"
    if train.routes_until is not None:
        lines["routes"] += f"; none from step {train.routes_until:,} on"
    warnings = [f"warning: {text}" for text in run.warnings]
    if schedule:
        routed = min(routed, network.forward_flops(active_routes(cfg, schedule.last)))
    if dense != routed and dense / routed < 1.15:
        said = f"the routes save little: a training step takes {dense / routed:.3g} times fewer FLOPs than without"
        advice = "more blocks in a route, a higher selection_ratio or a deeper network (12 blocks: 1.4) save more"
        warnings.append(f"warning: {said}; {advice}")
    if run.heldout is None:
        warnings.append(
            f"warning: there is no held-out data (dataset.heldout), so no {METRICS[process_of(cfg).evaluation].title}, "
            "the number to compare runs by: scripts/prepare_latents.py … heldout=0.02 keeps 2% of the pictures"
        )
    return "\n".join([*(f"  {name:<10}{text}" for name, text in lines.items()), *warnings])


def describe_alignment(run: Run) -> str:
    """Return a line on the alignment loss (REPA or self-alignment): its blocks, targets, weight and projector size."""
    settings, network = run.cfg.alignment, run.network
    blocks, teacher = settings.resolve(len(network.blocks))
    kept = [f"{tokens}" for tokens in run.aligner.tokens(active_routes(run.cfg, 0))]
    targets = f"block {teacher} of the averaged network"
    if settings.kind == "repa":
        encoder = run.aligner.encoder
        targets = f"{'live' if encoder else 'stored'} features of {settings.encoder}"
        targets += f" in {encoder.precision}" if encoder else ""
    aligned = f"{settings.kind}, block{'s' * (len(blocks) > 1)} {' and '.join(map(str, blocks))} "
    aligned += f"({' and '.join(kept)} tokens) with {targets}, weight {settings.weight:g}"
    aligned += f", falling to 0 over {settings.fade:,} steps" * bool(settings.fade)
    aligned += f" up to step {settings.until:,}" if settings.until else ""
    return f"{aligned}; the projector has {count_parameters(run.aligner.module.projector):,} parameters"


def disk(cfg: Settings, network: Backbone, aligner: Aligner | None) -> str:
    """Return a text on the size of a checkpoint and, if ema.power is set, of a snapshot of the power-function EMAs."""
    every, size = cfg.ema.snapshot_every or cfg.every.save, 2 * len(cfg.ema.power) * count_parameters(network)
    more = f"; {size_text(size)} of averages stored every {every:,} steps" * bool(size)
    return f"{size_text(checkpoint_bytes(cfg, network, aligner))} a checkpoint, every {cfg.every.save:,} steps{more}"


def describe_outcome(run: Run) -> str:
    """Return lines: last metrics of samples and held-out data (main process only), then the paths of the results."""
    lines, records = [], run.log.records() if run.main else []
    for name in with_real(name for name, metric in METRICS.items() if metric.of != "training"):
        last, metric = next((record for record in reversed(records) if name in record), None), METRICS.get(name)
        if last:
            count = f" of {last[metric.count]:,} samples" if metric and metric.count else ""
            earlier = "" if last["step"] == run.step else f", at step {last['step']:,}"
            lines.append(f"  {name:<21} {last[name]:.4f}{count}{earlier}")
        elif name == run.model.process.evaluation and run.heldout is None:
            lines.append(f"  {name:<21} none: there is no held-out data")
    files = {"samples": f"samples/step_{run.step:07d}.png", "loss curve": "loss.png"}
    files |= {"metrics": "metrics.jsonl", "checkpoint": "latest"}
    return "\n".join([*lines, *(f"  {name:<21} {run.folder / path}" for name, path in files.items())])
