"""Guidance: a denoiser made of a strong and a weak one, D = D_weak + ω·(D_strong − D_weak).

All kinds use this convention, on all channels, for EDM and for rectified flow (whose velocity is linear in D, so
guiding one guides the other). With ω = 1 only the strong branch runs.

    kind           strong branch        weak branch
    none           class                –
    cfg            class                no class              Ho & Salimans 2022, arXiv 2207.12598
    autoguidance   class                class, weaker network Karras et al. 2024, arXiv 2406.02507
    sparse         class, ratio γ_s     class, ratio γ_w      Sparse Guidance, arXiv 2601.01608; the weak
                                                              network may be another
    sparse_cfg     class, ratio γ_s     no class, ratio γ_w   likewise
    sparse_uncond  no class, ratio γ_s  no class, ratio γ_w   for comparison only: labels have no effect
    path_drop      class                no class, without g   SPRINT's, arXiv 2510.21986: g is its sparse part
    path_drop_class class               class, without g      likewise

A ratio is the fraction of tokens that skip the routes which the network was trained with. For a network that takes
texts, "class" means the caption, and "no class" the empty caption.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from routing_module import Routes
from tread.models.conditions import Condition, join
from tread.runtime.schema import check
from tread.runtime.tensor_files import Weights

Shape = Literal["cosine", "linear"]


@dataclass(frozen=True)
class Kind:
    """A row of the table: which branches see the class, whether they are routed, whether the weak branch may use
    another network, and whether it leaves out SPRINT's sparse part."""

    strong_class: bool
    weak_class: bool | None  # None: there is no weak branch
    routed: bool
    weak_network: str  # whether the weak branch uses a second network: "never", "may" or "must"
    drops_path: bool = False


KINDS = {
    "none": Kind(True, None, False, "never"),
    "cfg": Kind(True, False, False, "never"),
    "autoguidance": Kind(True, True, False, "must"),
    "sparse": Kind(True, True, True, "may"),
    "sparse_cfg": Kind(True, False, True, "may"),
    "sparse_uncond": Kind(False, False, True, "never"),
    "path_drop": Kind(True, False, False, "never", drops_path=True),
    "path_drop_class": Kind(True, True, False, "never", drops_path=True),
}


@dataclass(frozen=True)
class Schedule:
    """A number that goes from `start` at the first noise level to `end` at the last, over u = 0 .. 1.

    cosine: end + (start − end)·(1 + cos πu) / 2; linear: start + (end − start)·u.
    """

    schedule: Shape
    start: float
    end: float

    def __post_init__(self) -> None:
        check("schedule", self.schedule, Shape)

    def at(self, u: float) -> float:
        left = (1 + math.cos(math.pi * u)) / 2 if self.schedule == "cosine" else 1 - u
        return left * self.start + (1 - left) * self.end

    def __str__(self) -> str:
        return f"{self.schedule} {self.start:.12g}→{self.end:.12g}"


def ends_of(value: float | Schedule) -> tuple[float, float]:
    return (value.start, value.end) if isinstance(value, Schedule) else (value, value)


def _at(value: float | Schedule, u: float) -> float:
    return value.at(u) if isinstance(value, Schedule) else value


def _show(value: float | Schedule) -> str:
    return str(value) if isinstance(value, Schedule) else f"{value:.12g}"


@dataclass(frozen=True)
class Call:
    """One call of the guided denoiser: ω and the ratio of each branch; with weak None only the strong branch runs."""

    scale: float
    strong: float
    weak: float | None


@dataclass(frozen=True)
class Guidance:
    """How a denoiser is guided. scale, strong and weak are numbers, or schedules over the sampling.

    kind          a row of KINDS.
    scale         ω.
    strong, weak  fractions of tokens that skip the routes in each branch, in [0, 1); for the sparse kinds. Out of N
                  tokens int(N·fraction) skip, or that part of the rows on row routes.
    interval      noise levels (lowest, highest), both included, EDM's σ or rectified flow's t; outside them only the
                  strong branch runs (Kynkäänniemi et al. 2024, arXiv 2404.07724).
    checkpoint    path of the weak network; None: the strong one serves.
    weights       which weights of that checkpoint, "ema" or "model".
    same_ids      both branches choose their tokens by the same random numbers.
    force         allow what is refused as a likely mistake: a network trained without routes, strong above weak.
    """

    kind: str = "none"
    scale: float | Schedule = 1.0
    strong: float | Schedule = 0.0
    weak: float | Schedule = 0.0
    interval: tuple[float, ...] | None = None
    checkpoint: str | None = None
    weights: Weights = "ema"
    same_ids: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"guidance.kind is {self.kind!r}, but must be one of {', '.join(KINDS)}")
        row = KINDS[self.kind]
        if self.kind == "none" and (ends_of(self.scale) != (1, 1) or self.interval is not None):
            raise ValueError(
                "guidance.scale or guidance.interval is given, but guidance=none; choose a kind: guidance=cfg, …"
            )
        for name in ("strong", "weak"):
            given = getattr(self, name)
            if not all(0 <= end < 1 for end in ends_of(given)):
                raise ValueError(
                    f"guidance.{name} is {_show(given)}, but must lie in [0, 1): the fraction of skipped tokens"
                )
            if not row.routed and any(ends_of(given)):
                raise ValueError(
                    f"guidance.{name} is {_show(given)}, but guidance={self.kind} runs all tokens; the kinds with "
                    f"routes are {', '.join(kind for kind in KINDS if KINDS[kind].routed)}"
                )
        if not self.scheduled and self.checkpoint is None and self.strong > self.weak and not self.force:
            raise ValueError(
                f"guidance.strong {self.strong} is larger than guidance.weak {self.weak}, but the weak branch is the "
                "one that sees fewer tokens (guidance.force=true allows it)"
            )
        if self.interval is not None and not (len(self.interval) == 2 and 0 <= self.interval[0] < self.interval[1]):
            raise ValueError(
                f"guidance.interval is {list(self.interval)}, but must be [lowest, highest] noise level, 0 <= lowest < "
                "highest, of σ (edm) or t (rf)"
            )
        if self.checkpoint is not None and row.weak_network == "never":
            raise ValueError(f"guidance.checkpoint is given, but guidance={self.kind} uses one network")
        if self.checkpoint is None and row.weak_network == "must":
            raise ValueError(
                f"guidance={self.kind} needs guidance.checkpoint=…: a weaker network's, or an earlier one of the run"
            )
        if self.weights != "ema" and self.checkpoint is None:
            raise ValueError(f"guidance.weights={self.weights} needs guidance.checkpoint, which is not given")
        if self.same_ids and not row.routed:
            raise ValueError(f"guidance.same_ids is given, but guidance={self.kind} runs all tokens")

    @property
    def row(self) -> Kind:
        return KINDS[self.kind]

    @property
    def scheduled(self) -> bool:
        """Whether the fractions of tokens change over the sampling."""
        return isinstance(self.strong, Schedule) or isinstance(self.weak, Schedule)

    def describe(self) -> str:
        """For people: "cfg 1.5", "sparse 1.5 with ratios 0.3 and 0.7"."""
        if self.kind == "none":
            return "none"
        parts = [f"{self.kind} {_show(self.scale)}"]
        parts += [f"with ratios {_show(self.strong)} and {_show(self.weak)}"] if self.row.routed else []
        parts += ["of the same tokens"] if self.same_ids and self.row.routed else []
        parts += [f"against {self.weights} weights of another network"] if self.checkpoint else []
        parts += [f"within {self.interval[0]:.12g}..{self.interval[1]:.12g}"] if self.interval else []
        return " ".join(parts)

    def plan(self, levels: Sequence[float], progress: Sequence[float]) -> list[Call]:
        """The denoiser's calls, one for each noise level and its progress u (0 to 1). Raises ValueError if no level
        lies in `interval`."""
        low, high = self.interval or (-math.inf, math.inf)
        if not any(low <= level <= high for level in levels):
            raise ValueError(
                f"guidance.interval is {list(self.interval)}, but none of the sampling's noise levels lies in it: "
                f"they are {min(levels):.4g} to {max(levels):.4g}"
            )
        calls = []
        for level, u in zip(levels, progress):
            scale = _at(self.scale, u) if low <= level <= high and self.row.weak_class is not None else 1.0
            calls.append(Call(scale, _at(self.strong, u), None if scale == 1 else _at(self.weak, u)))
        return calls


NO_GUIDANCE = Guidance()


@dataclass(frozen=True)
class Branch:
    """The strong or the weak denoiser.

    denoise  (x, level, y, routes) → D, the predicted data.
    y        conditions: (B,) int64 labels or the null class, or texts.
    routes   call number → routes with their ids; () runs all tokens.
    """

    denoise: Callable[[Tensor, Tensor, Condition, Routes], Tensor]
    y: Condition
    routes: Callable[[int], Routes] = lambda call: ()


def guided(strong: Branch, weak: Branch | None, scale: Callable[[int], float]) -> Callable[[Tensor, Tensor], Tensor]:
    """The guided denoiser (x, level) → D for one batch of samples. It counts its calls, from 0.

    scale  number of the call → ω; with 1, as with weak None, only the strong branch runs.

    Branches that share `denoise` and whose routes agree in shape and rejoin run as one batch, others in turn.
    """
    calls = itertools.count()

    def denoiser(x: Tensor, level: Tensor) -> Tensor:
        call = next(calls)
        weight, routes = scale(call), strong.routes(call)
        if weak is None or weight == 1:
            return strong.denoise(x, level, strong.y, routes)
        weak_routes = weak.routes(call)
        if strong.denoise is weak.denoise and _shapes(routes) == _shapes(weak_routes):
            both = [(route, torch.cat([ids, other])) for (route, ids), (_, other) in zip(routes, weak_routes)]
            x, y = torch.cat([x, x]), join(strong.y, weak.y)
            level = torch.cat([level, level]) if level.ndim else level
            D_strong, D_weak = strong.denoise(x, level, y, both).chunk(2)
        else:
            D_strong = strong.denoise(x, level, strong.y, routes)
            D_weak = weak.denoise(x, level, weak.y, weak_routes)
        return D_weak + weight * (D_strong - D_weak)

    return denoiser


def _shapes(routes: Routes) -> list[tuple]:
    """The facts in which two branches' routes must agree to run as one; if a rule scores tokens, the whole route."""
    return [
        (ids.shape, route)
        if ids.is_floating_point()
        else (ids.shape, route.start, route.end, route.fp32, route.rejoins, route.saved_before)
        for route, ids in routes
    ]
