"""Guidance: predictions of the clean data by two denoisers are combined into D = D_weak + ω·(D_strong − D_weak).

All kinds use this formula, on all channels, for EDM and for rectified flow (whose velocity is linear in D, so guiding D
guides the velocity). The two denoisers are called branches. With ω = 1 only the strong branch runs.

    kind             strong branch        weak branch
    none             class                –
    cfg              class                no class               Ho & Salimans 2022, arXiv 2207.12598
    autoguidance     class                class, weaker network  Karras et al. 2024, arXiv 2406.02507
    sparse           class, ratio γ_s     class, ratio γ_w       Sparse Guidance, arXiv 2601.01608
    sparse_cfg       class, ratio γ_s     no class, ratio γ_w    Sparse Guidance
    sparse_uncond    no class, ratio γ_s  no class, ratio γ_w    for comparison only: labels have no effect
    path_drop        class                no class, without g    SPRINT, arXiv 2510.21986; g is its sparse part
    path_drop_class  class                class, without g       SPRINT

A ratio is the fraction of tokens that skip the blocks that tokens could skip in training. The weak branch of sparse and
sparse_cfg may be another network. For a network that takes texts, "class" means the caption, "no class" the empty one.
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
    """A row of the table in guidance.py's docstring: what each branch gets. Comments beside the fields explain them."""

    strong_class: bool  # whether the strong branch gets the class
    weak_class: bool | None  # whether the weak branch gets it; None: there is no weak branch
    routed: bool  # whether tokens skip blocks
    weak_network: str  # whether the weak branch uses a second network: "never", "may" or "must"
    drops_path: bool = False  # whether the weak branch leaves out SPRINT's sparse part


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
    """A number that changes during sampling, from `start` at the first noise level to `end` at the last one above 0.
    It depends on a level's index, not on its value: of the n levels above 0, level i = 0..n−1 has u = i / (n − 1).
    Schedule "linear" is linear in u; "cosine" is end + (start − end)·(1 + cos πu) / 2."""

    schedule: Shape
    start: float
    end: float

    def __post_init__(self) -> None:
        check("schedule", self.schedule, Shape)

    def at(self, u: float) -> float:
        left = (1 + math.cos(math.pi * u)) / 2 if self.schedule == "cosine" else 1 - u
        return left * self.start + (1 - left) * self.end

    def __format__(self, digits: str) -> str:
        return f"{self.schedule} {self.start:{digits}}→{self.end:{digits}}"


def ends_of(value: float | Schedule) -> tuple[float, float]:
    return (value.start, value.end) if isinstance(value, Schedule) else (value, value)


def _at(value: float | Schedule, u: float) -> float:
    return value.at(u) if isinstance(value, Schedule) else value


@dataclass(frozen=True)
class Call:
    """Guidance's settings for one denoiser call: the weight ω (`scale`), and the fraction of tokens that skip blocks in
    the `strong` and in the `weak` branch. weak=None: only the strong branch runs."""

    scale: float
    strong: float
    weak: float | None


@dataclass(frozen=True)
class Guidance:
    """How samples are guided. scale, strong and weak are numbers, or schedules over the noise levels.

    kind          a key of KINDS, such as "cfg". Raises ValueError for settings that this kind can't have.
    scale         the guidance weight ω in D_weak + ω·(D_strong − D_weak).
    strong, weak  fraction of tokens, in [0, 1), that in this branch skip the blocks that they could skip in training;
                  rounded down to whole tokens (or rows, if routes keep whole rows). 0 unless kind starts with "sparse".
    interval      (lowest, highest) noise level, both included, at which guidance is on: EDM's σ (after churn) or
                  rectified flow's t. Elsewhere only the strong branch runs (Kynkäänniemi et al., arXiv 2404.07724).
    checkpoint    path of the weak branch's network; None: the strong branch's network.
    weights       weights to load from that checkpoint, "ema" or "model".
    same_ids      True: both branches choose the tokens that skip by the same random numbers.
    force         True: allow likely mistakes: skipped tokens in a network trained without routes, or strong above weak.
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
            raise ValueError("guidance.scale or guidance.interval is given, but guidance=none; choose a kind")
        for name in ("strong", "weak"):
            given = getattr(self, name)
            if not all(0 <= end < 1 for end in ends_of(given)):
                raise ValueError(f"guidance.{name} is {given:.12g}, but must lie in [0, 1), a fraction of the tokens")
            if not row.routed and any(ends_of(given)):
                raise ValueError(f"guidance.{name} is {given:.12g}, but guidance={self.kind} runs all tokens")
        if not self.scheduled and self.checkpoint is None and self.strong > self.weak and not self.force:
            above = f"guidance.strong {self.strong} is larger than guidance.weak {self.weak}"
            raise ValueError(f"{above}, but the weak branch sees fewer tokens (guidance.force=true allows it)")
        if self.interval is not None and not (len(self.interval) == 2 and 0 <= self.interval[0] < self.interval[1]):
            wanted = "[lowest, highest] noise level, 0 <= lowest < highest"
            raise ValueError(f"guidance.interval is {list(self.interval)}, but must be {wanted}, of σ (edm) or t (rf)")
        if self.checkpoint is not None and row.weak_network == "never":
            raise ValueError(f"guidance.checkpoint is given, but guidance={self.kind} uses one network")
        if self.checkpoint is None and row.weak_network == "must":
            raise ValueError(f"guidance={self.kind} needs guidance.checkpoint=…, of a weaker or an earlier network")
        if self.weights != "ema" and self.checkpoint is None:
            raise ValueError(f"guidance.weights={self.weights} needs guidance.checkpoint, which is not given")
        if self.same_ids and not row.routed:
            raise ValueError(f"guidance.same_ids is given, but guidance={self.kind} runs all tokens")

    @property
    def row(self) -> Kind:
        return KINDS[self.kind]

    @property
    def scheduled(self) -> bool:
        """Whether a branch's fraction of skipped tokens, `strong` or `weak`, changes over the noise levels."""
        return isinstance(self.strong, Schedule) or isinstance(self.weak, Schedule)

    def describe(self) -> str:
        """Return a text such as "cfg 1.5" or "sparse 1.5 with ratios 0.3 and 0.7"."""
        if self.kind == "none":
            return "none"
        parts = [f"{self.kind} {self.scale:.12g}"]
        parts += [f"with ratios {self.strong:.12g} and {self.weak:.12g}"] if self.row.routed else []
        parts += ["of the same tokens"] if self.same_ids else []
        parts += [f"against {self.weights} weights of another network"] if self.checkpoint else []
        parts += [f"within {self.interval[0]:.12g}..{self.interval[1]:.12g}"] if self.interval else []
        return " ".join(parts)

    def plan(self, levels: Sequence[float], progress: Sequence[float]) -> list[Call]:
        """Return the settings of each denoiser call, given the calls' noise levels and their `progress`, which rises
        from 0 to 1 during sampling. Raises ValueError if no level lies in `interval`."""
        low, high = self.interval or (-math.inf, math.inf)
        if not any(low <= level <= high for level in levels):
            there = f"{min(levels):.4g} to {max(levels):.4g}"
            raise ValueError(f"guidance.interval is {list(self.interval)}, but all noise levels lie beyond it: {there}")
        calls = []
        for level, u in zip(levels, progress):
            scale = _at(self.scale, u) if low <= level <= high and self.row.weak_class is not None else 1.0
            calls.append(Call(scale, _at(self.strong, u), None if scale == 1 else _at(self.weak, u)))
        return calls


NO_GUIDANCE = Guidance()


@dataclass(frozen=True)
class Branch:
    """One of guidance's two denoisers, with its inputs.

    denoise  function (x, level, y, routes) → D, the predicted data.
    y        conditions: (B,) int64 labels, which may be the null class, or texts.
    routes   maps a denoiser call's index to pairs (Route, kept indices or random numbers to choose them); () for none.
    """

    denoise: Callable[[Tensor, Tensor, Condition, Routes], Tensor]
    y: Condition
    routes: Callable[[int], Routes] = lambda call: ()


def guided(strong: Branch, weak: Branch | None, scale: Callable[[int], float]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the guided denoiser (x, level) → D for one batch. `scale` maps the index of a denoiser call (0, 1, …) to
    ω. If ω is 1 or weak is None, only the strong branch runs. Both branches run as one batch if they have the same
    `denoise` and keep equally many tokens on the same routes, else one after the other."""
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
    """Return a tuple per route; branches with equal tuples can run as one batch. For a route with kept indices it has
    their shape and the Route's fields that act in run_blocks; for one with uniform draws, their shape and the Route."""
    return [
        (ids.shape, route)
        if ids.is_floating_point()
        else (ids.shape, route.start, route.end, route.fp32, route.rejoins, route.saved_before)
        for route, ids in routes
    ]
