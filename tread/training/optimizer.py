"""One optimizer step that never waits for the device: bad numbers are skipped there, and counted there.

Whether a step is bad is known from the norm of the gradients, which DDP has made equal on all
processes; a loss that is not finite spoils its gradients on purpose (`backward`). The flag stays on
the device: the fused optimizer takes it as `found_inf`, averages as `skip`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tread.training.settings import Settings


def learning_rate(cfg: Settings, step: int) -> float:
    """Of training step `step` (0, 1, …): it rises to optim.lr, then may fall to final_lr, reached after the last."""
    optim = cfg.optim
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    done = min(1.0, (step - optim.warmup_steps) / max(1, cfg.train.steps - optim.warmup_steps))
    fall = {"constant": 0.0, "linear": done, "cosine": (1 - math.cos(math.pi * done)) / 2}[optim.schedule]
    return optim.lr + (optim.final_lr - optim.lr) * fall


def backward(loss: Tensor) -> None:
    """loss.backward() for a 0-d loss, with NaN as gradients where the loss is not finite."""
    loss.backward(torch.where(loss.detach().isfinite(), 1.0, math.nan))


def optimizer_step(optimizer: torch.optim.Optimizer, lr: float, clip_norm: float | None) -> tuple[Tensor, Tensor]:
    """Update the parameters by their gradients, which are then dropped, or leave all as it is if they are bad.

    optimizer  a fused one.
    clip_norm  scale the gradients down to this norm; None: never.

    Returns the gradients' norm before clipping, and 1.0 where it is not finite and the step was
    skipped, else 0.0: 0-d fp32 on the device.
    """
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    skip = 1.0 - norm.isfinite().float()
    # attributes that PyTorch's GradScaler sets for fused optimizers, which divide gradients by the first
    optimizer.grad_scale = None if clip_norm is None else (norm / clip_norm).clamp(min=1.0)
    optimizer.found_inf = skip
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    return norm, skip


class StepStatistics:
    """Sums over the steps since the last log, on the device: loss, norm of the gradients, good and bad steps.

    Beside them the bad steps in a row up to now, the longest such row since the last log, how many steps ago that
    ended, and the alignment's sum. `sums` (8,) fp32 has them in the order of NAMES. `recent` (LAST,) fp32 has 1 for a
    bad and 0 for a good one of the last steps, the newest last, and 0.5 for those that are not known.
    """

    NAMES = ("loss", "grad_norm", "good", "bad", "in_a_row", "longest", "ago", "alignment")
    LAST = 100

    def __init__(self, device: torch.device | str, values: dict[str, float | str] | None = None) -> None:
        values = values or {}
        self.sums = torch.tensor([values.get(name, 0.0) for name in self.NAMES], device=device)
        recent = [float(flag) for flag in values.get("recent", "")]
        self.recent = torch.tensor([0.5] * (self.LAST - len(recent)) + recent, device=device)

    def add(self, loss: Tensor, norm: Tensor, skip: Tensor, alignment: Tensor | None = None) -> None:
        """Count a step: its mean loss, what optimizer_step returned, and its mean alignment where there is one."""
        good = 1 - skip
        step = torch.stack([loss.float().where(good > 0, 0.0), norm.where(good > 0, 0.0), good, skip])
        in_a_row, longest, ago, aligned = self.sums[4:].unbind()
        if alignment is not None:
            aligned = aligned + alignment.float().where(good > 0, 0.0)
        in_a_row = (in_a_row + 1) * skip
        longer = in_a_row > longest
        rows = torch.stack(
            [in_a_row, torch.where(longer, in_a_row, longest), torch.where(longer, 0.0, ago + 1), aligned]
        )
        self.sums = torch.cat([self.sums[:4] + step, rows])
        self.recent = torch.cat([self.recent[1:], skip[None]])

    def read(self) -> dict[str, float | str]:
        """The sums by name, and as "recent" the known ones of the last steps, "1" a bad one. Waits for the device."""
        values = torch.cat([self.sums, self.recent]).tolist()
        flags = (f"{flag:.0f}" for flag in values[len(self.NAMES) :] if flag != 0.5)
        return {**dict(zip(self.NAMES, values)), "recent": "".join(flags)}

    def restart(self) -> None:
        """Begin anew, but for the bad steps in a row up to now and the last steps."""
        zeros, in_a_row = torch.zeros_like(self.sums), self.sums[4:5]
        self.sums = torch.cat([zeros[:4], in_a_row, in_a_row, zeros[6:]])
