"""Sampling: draw latents or pictures, batch by batch, from seeds and labels.

A sample depends only on its label and its seed, from which its noise and the tokens that skip blocks are drawn.

Shapes: B samples, N tokens; latents (B, C, S, S)."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from routing_module import Route
from tread.diffusion.guidance import NO_GUIDANCE, Branch, Call, Guidance, Routes, guided
from tread.diffusion.pictures import to_pictures
from tread.diffusion.process import Process
from tread.diffusion.solvers import AfterStep, Churn, call_order, solve, unchanged
from tread.diffusion.token_beside import Beside
from tread.models.conditions import Condition, Text, count, pad, replaced, rows, to
from tread.routing.ids import RULES, check_ratio, count_kept, pair, with_ratio
from tread.runtime.cuda_graphs import Recorder, Replayed, recording
from tread.runtime.device import autocast
from tread.runtime.randomness import seeded_normal, seeded_uniform

OnStep = Callable[[int, float, Tensor, Tensor], None]


@dataclass(frozen=True)
class Model:
    """A network ready for sampling.

    process  the diffusion process that it was trained on.
    routes   the blocks that tokens could skip in training, () for none; guidance sets how many tokens skip them.
    prompts  the encoded prompts of a network that takes texts: label i means the i-th prompt. None: labels are classes.
    """

    process: Process
    network: nn.Module
    routes: tuple[Route, ...] = ()
    prompts: Text | None = None

    @property
    def num_labels(self) -> int:
        """Number of classes or prompts. The label num_labels itself means no class, or the empty caption."""
        return self.network.num_classes if self.prompts is None else count(self.prompts)

    def condition(self, labels: Tensor, device: torch.device) -> Condition:
        """Return the network's conditions on `device` for labels (n,): these labels, or the prompts that they index."""
        if self.prompts is None:
            return labels.to(device)
        known = to(rows(self.prompts, labels.clamp(max=self.num_labels - 1)), device)
        return replaced(known, labels.to(device) == self.num_labels, self.network.null(1))


@dataclass(frozen=True)
class Sampler:
    """How samples are drawn: all settings but the networks, seeds and labels.

    steps       number N of the solver's steps.
    precision   "fp32", or "bf16" for autocast.
    batch_size  samples per batch. The last batch is padded to this size, so that all have one shape.
    solver      "heun" calls the denoiser 2N−1 times, "euler" N times.
    churn       how much fresh noise each step adds, for EDM with "heun" only.
    """

    steps: int = 40
    batch_size: int = 64
    precision: str = "fp32"
    guidance: Guidance = NO_GUIDANCE
    solver: str = "heun"
    churn: Churn = Churn()

    @classmethod
    def of(
        cls,
        process: Process,
        steps: int | None,
        solver: str | None,
        batch_size: int,
        precision: str,
        guidance: Guidance = NO_GUIDANCE,
        churn: Churn | None = None,
    ) -> "Sampler":
        """Create a Sampler. If steps or solver is None, the process's default is used; churn=None means no churn."""
        steps = process.default_steps if steps is None else steps
        return cls(steps, batch_size, precision, guidance, solver or process.default_solver, churn or Churn())

    def plan(self, process: Process) -> list[Call]:
        """Return guidance's weight and fractions of skipped tokens for each denoiser call, in order. Raises ValueError
        if steps, solver or churn do not suit the process, or if no noise level lies in the guidance's interval."""
        if self.churn.amount > 0 and not (self.solver == "heun" and process.variance_exploding):
            raise ValueError(f"churn={self.churn.amount:g} needs EDM and solver=heun, to add noise between steps")
        levels = process.schedule(self.steps).tolist()
        order = call_order(self.solver, self.steps)
        raised = [level * (1 + self.churn.gamma(level, self.steps)) for level in levels]
        if self.churn.amount > 0 and raised == levels:
            raise ValueError(f"churn's {self.churn.sigma_min:g}..{self.churn.sigma_max:g} holds no noise level")
        seen = [(levels if call % 2 else raised)[i] for call, i in enumerate(order)]
        return self.guidance.plan(seen, [i / max(1, order[-1]) for i in order])

    def nfe(self, process: Process) -> int:
        """Return the number of network calls per sample (NFE); each branch of guidance counts."""
        return sum(1 + (call.weak is not None) for call in self.plan(process))

    def flops(self, model: Model, weak: Model | None = None, attention: bool = True) -> int:
        """Return the FLOPs of all network calls for one sample; `weak` is guidance's second network. attention=False
        leaves out token mixing (in DiT the products of queries, keys and values)."""

        def cost(model: Model, ratio: float, **more: bool) -> int:
            routes = [with_ratio(route, ratio) for route in model.routes]
            return model.network.forward_flops(routes, attention, **more)

        more = {"path_drop": True} if self.guidance.row.drops_path else {}
        calls = Counter((call.strong, call.weak) for call in self.plan(model.process))
        return sum(
            times * (cost(model, ratio) + (0 if weaker is None else cost(weak or model, weaker, **more)))
            for (ratio, weaker), times in calls.items()
        )


def check_ratios(sampler: Sampler, model: Model, weak: Model | None = None) -> None:
    """Raise ValueError if the sampler's guidance does not suit the networks: if tokens are to skip blocks in a network
    without routes; if a branch's fraction of skipped tokens, at its largest, is above 0, but so small that no token
    skips or so large that only one is kept; or if SPRINT's sparse part is to be left out of a network that has none."""
    plan = sampler.plan(model.process)
    if sampler.guidance.row.drops_path and not model.network.drops_path:
        lacks = f"guidance={sampler.guidance.kind} leaves out SPRINT's sparse part, but this network has none"
        raise ValueError(f"{lacks}: it was not trained with model=sprint")
    for name, branch in (("strong", model), ("weak", weak or model)):
        ratio = max(getattr(call, name) or 0.0 for call in plan)
        if ratio == 0:
            continue
        if not branch.routes:
            raise ValueError(f"guidance={sampler.guidance.kind} skips tokens, but the model has no routes")
        for route in branch.routes:
            check_ratio(with_ratio(route, ratio), branch.network.grid, f"guidance.{name}")


def relative_cost(sampler: Sampler, model: Model, weak: Model | None = None) -> float:
    """Return a sample's FLOPs divided by those without guidance and routes. `weak`: guidance's second network."""
    return sampler.flops(model, weak) / replace(sampler, guidance=NO_GUIDANCE).flops(model)


def draw(
    model: Model,
    seeds: Sequence[int],
    labels: Tensor,
    sampler: Sampler,
    weak: Model | None = None,
    on_step: OnStep | None = None,
    noise: Tensor | None = None,
    after_step: AfterStep = unchanged,
) -> Iterator[Tensor]:
    """Draw samples batch by batch: yields latents (b, C, S, S) fp32 on the network's device, in the order of the seeds.
    Arguments that do not fit raise ValueError, but only when the first batch is requested, as this is a generator.

    seeds       one per sample, from which the sample's noise and the tokens that skip blocks are drawn.
    labels      (n,) int64 classes, or indices of the model's prompts, on the CPU.
    weak        guidance's second network; None: the weak branch uses `model` too.
    on_step     called once in each step with the step's number, noise level, x and D(x), both (b, C, S, S) fp32.
    noise       (n, C, S, S) standard normal; None: noise is drawn from the seeds.
    after_step  function (step's number, latents after the step) → latents to go on with. It gets whole batches; the
                last batch is padded to sampler.batch_size with copies of its last sample.

    A sample does not depend on the others of its batch; another batch size changes it by rounding only.
    """
    if len(seeds) != len(labels) or not len(seeds):
        raise ValueError(f"{len(seeds)} seeds for {len(labels)} labels: each sample needs one of each")
    low, high, null = int(labels.min()), int(labels.max()), model.num_labels
    if not 0 <= low <= high <= null:
        raise ValueError(f"classes lie in {low}..{high}, but must lie in 0..{null - 1}, or be {null} for no class")
    check_ratios(sampler, model, weak)
    with recording([branch.network for branch in (model, weak) if branch]) as recorder:
        for start in range(0, len(seeds), sampler.batch_size):
            part = slice(start, start + sampler.batch_size)
            given = None if noise is None else noise[part]
            batch = list(seeds[part]), labels[part]
            yield _draw_batch(model, weak, *batch, sampler, on_step, given, after_step, recorder)


@torch.no_grad()
def _draw_batch(
    model: Model,
    weak: Model | None,
    seeds: list[int],
    labels: Tensor,
    sampler: Sampler,
    on_step: OnStep | None,
    noise: Tensor | None,
    after_step: AfterStep,
    recorder: Recorder | None,
) -> Tensor:
    network, device = model.network, next(model.network.parameters()).device
    if sampler.guidance.scheduled:
        recorder = None  # few calls have the same number of tokens, and two of them go into a recording
    plan, row = sampler.plan(model.process), sampler.guidance.row
    wanted, weaker = len(seeds), weak or model
    seeds = seeds + seeds[-1:] * (sampler.batch_size - wanted)
    y = model.condition(pad(labels, len(seeds)), device)
    denoise = _denoiser(model, sampler.precision, recorder)
    routes = _routes(model, seeds, [call.strong for call in plan], "strong", device)
    strong, other = Branch(denoise, y if row.strong_class else network.null(len(seeds)), routes), None
    if row.weak_class is not None:
        if weak is not None:  # else both branches share a function and can run as one batch
            denoise = _denoiser(weak, sampler.precision, recorder)
        elif row.drops_path:
            denoise = _denoiser(model, sampler.precision, recorder, path_drop=True)
        stream = "strong" if sampler.guidance.same_ids else "weak"
        routes = _routes(weaker, seeds, [call.weak or 0.0 for call in plan], stream, device)
        other = Branch(denoise, y if row.weak_class else weaker.network.null(len(seeds)), routes)
    denoiser = guided(strong, other, lambda call: plan[call].scale)
    shape, beside = (network.in_channels, network.input_size, network.input_size), Beside.of(network)

    def churn_noise(step: int) -> Tensor:
        return seeded_normal(seeds, shape, f"churn {step}").to(device)

    def told(step: int, level: Tensor, *states: Tensor) -> None:
        if on_step is not None:
            on_step(step, float(level), *(beside.latents(state)[:wanted].float() for state in states))

    noise = (seeded_normal(seeds, shape) if noise is None else pad(noise, len(seeds))).to(device)
    if beside.width is not None:
        noise = beside.join(noise, seeded_normal(seeds, (beside.width,), "class token").to(device))
    levels = model.process.schedule(sampler.steps)
    networks = {network, weaker.network} if sampler.precision == "bf16" else ()
    with _casts_kept(device, networks):
        hooks = {"after_step": beside.of_latents(after_step), "on_step": told}
        drawn = solve(sampler.solver, denoiser, noise, levels, sampler.churn, churn_noise, **hooks)
    return beside.latents(drawn)[:wanted].float()


@contextmanager
def _casts_kept(device: torch.device, networks: Collection[nn.Module]) -> Iterator[None]:
    """Context in which autocast casts each weight of the networks only once. Autocast caches casts until its outermost
    context ends, but only for weights that require gradients, so frozen weights are made to require them here."""
    weights = (weight for network in networks for weight in network.parameters() if weight.is_floating_point())
    frozen = [weight for weight in weights if not weight.requires_grad]
    try:
        with torch.autocast(device.type, enabled=False):
            for weight in frozen:
                weight.requires_grad_()
            yield
    finally:
        for weight in frozen:
            weight.requires_grad_(False)


def _denoiser(
    model: Model, precision: str, recorder: Recorder | None, **more: bool
) -> Callable[[Tensor, Tensor, Condition, Routes], Tensor]:
    beside, network = Beside.of(model.network), partial(model.network, **more)

    def denoise(x: Tensor, level: Tensor, y: Condition, routes: Routes) -> Tensor:
        with autocast(x.device, precision):
            return beside.denoise(model.process, network, x, level, y, routes)

    return Replayed(denoise, recorder) if recorder else denoise


def _routes(
    model: Model, seeds: list[int], ratios: Sequence[float], stream: str, device: torch.device
) -> Callable[[int], Routes]:
    """Return a function from a denoiser call's index to its routes: pairs (Route, kept tokens' indices (B, K), or the
    random numbers (B, N) from which the network chooses). A route skips the fraction ratios[call] of tokens, or is left
    out if none skip. A sample's seed and the name `stream` choose its tokens, even if training samples share theirs."""
    tokens, grid = model.network.num_tokens, model.network.grid
    by_sample = [RULES[route.select].for_sampling(route) for route in model.routes]
    if not any(ratios):
        return lambda call: ()
    uniform = [
        seeded_uniform(seeds, (len(ratios), tokens), f"route {number} {stream}").to(device)
        for number in range(len(by_sample))
    ]

    def routes(call: int) -> Routes:
        drawn = [(with_ratio(route, ratios[call]), u[:, call]) for route, u in zip(by_sample, uniform)]
        return [pair(route, u, grid) for route, u in drawn if count_kept(route, tokens, grid) < tokens]

    return routes


def draw_pictures(
    model: Model,
    decoder: Callable[[Tensor], Tensor],
    seeds: Sequence[int],
    labels: Tensor,
    sampler: Sampler,
    weak: Model | None = None,
    check: bool = False,
    on_step: OnStep | None = None,
) -> Iterator[Tensor]:
    """Draw a sample for each seed and label (n,), and yield batches of pictures (b, 1 or 3, H, W) uint8 on the CPU,
    which `decoder` makes from latents. `weak` is guidance's second network. on_step gets the number of each step, its
    noise level, latents and predicted clean latents. check=True raises ValueError for non-finite samples."""
    for x in draw(model, seeds, labels, sampler, weak, on_step):
        if check and not x.isfinite().all():
            raise ValueError(f"samples are not finite: the weights are broken, or {sampler.precision} is too coarse")
        yield to_pictures(x, decoder, min(16, sampler.batch_size))
