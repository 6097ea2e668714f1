"""Guidance: a denoiser made of a strong and a weak one, D = D_weak + scale·(D_strong − D_weak).

    kind      strong branch              weak branch
    none      the class, all tokens      –
    cfg       the class, all tokens      no class, all tokens (Ho & Salimans 2022, arXiv 2207.12598)
    sparse    the class, ratio `strong`  the class, ratio `weak` (Sparse Guidance, arXiv 2601.01608)

All channels are guided. Scale 1 is the strong branch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from routing_module import Route

KINDS = ("none", "cfg", "sparse")
Routes = Sequence[tuple[Route, Tensor]]
Branch = Callable[[Tensor, Tensor, Tensor, Routes], Tensor]  # (x, sigma, y, routes) → D


@dataclass(frozen=True)
class Guidance:
    """How a denoiser is guided.

    kind          one of KINDS.
    scale         ω; of no meaning for kind none.
    strong, weak  share of tokens routed around in the branches of kind sparse, in [0, 1), strong below weak.
    """

    kind: str = "none"
    scale: float = 1.0
    strong: float = 0.0
    weak: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"guidance.kind is {self.kind!r}, but must be one of {', '.join(KINDS)}")
        for name in ("strong", "weak"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"guidance.{name} is {getattr(self, name)}, but must lie in [0, 1)")
        if self.kind == "sparse" and self.strong >= self.weak:
            raise ValueError(
                f"guidance.strong {self.strong} must be smaller than guidance.weak {self.weak}: the weak branch is the "
                "one that sees fewer tokens"
            )

    @property
    def branches(self) -> dict[str, float]:
        """Network passes a denoiser call makes: their names, and the ratio each routes around."""
        if self.kind == "none":
            return {"strong": 0.0}
        return {"strong": self.strong, "weak": self.weak} if self.kind == "sparse" else {"strong": 0.0, "weak": 0.0}

    def describe(self) -> str:
        """For people: "cfg 1.5"."""
        sparse = f" with ratios {self.strong:.12g} and {self.weak:.12g}" if self.kind == "sparse" else ""
        return "none" if self.kind == "none" else f"{self.kind} {self.scale:.12g}{sparse}"

    def check(self, routes: Sequence[Route], label_drop: float) -> None:
        """Raise ValueError unless a network trained with these routes and this label drop can be guided so."""
        if self.kind == "sparse" and not routes:
            raise ValueError("guidance=sparse needs a network that was trained with a route, and this one was not")
        if self.kind == "cfg" and label_drop == 0:
            raise ValueError("guidance=cfg needs a network that was trained with train.label_drop above 0")


def guided(
    denoise: Branch, y: Tensor, null_class: int, guidance: Guidance, routes: Callable[[str], Routes]
) -> Callable[[Tensor, Tensor], Tensor]:
    """The guided denoiser (x, sigma) → D of classes y (B,).

    routes  branch name → the routes of its next pass, with ids drawn; () runs all tokens.
    """

    def denoiser(x: Tensor, sigma: Tensor) -> Tensor:
        if guidance.kind == "none":
            return denoise(x, sigma, y, ())
        if guidance.kind == "cfg":  # branches of one shape run as one batch
            labels = torch.cat([y, torch.full_like(y, null_class)])
            strong, weak = denoise(torch.cat([x, x]), sigma, labels, ()).chunk(2)
        else:
            strong, weak = (denoise(x, sigma, y, routes(branch)) for branch in ("strong", "weak"))
        return weak + guidance.scale * (strong - weak)

    return denoiser
