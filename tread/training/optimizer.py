"""One optimizer step that never waits for the device: bad numbers are skipped there, and counted there.

Whether a step is bad is known from the norm of the gradients, which DDP has made equal on all
processes; a loss that is not finite spoils its gradients on purpose (`backward`). The flag stays on
the device: fused AdamW takes it as `found_inf`, averages as `skip`, `step_unless` does it for other optimizers.
"""

import math

import torch
from torch import Tensor

from tread.training.optimizers import step_unless
from tread.training.settings import Settings

SKIPPING = (torch.optim.AdamW, torch.optim.Adam)  # their fused kernels clip and skip by themselves


def learning_rate(cfg: Settings, step: int) -> float:
    """The rate of training step `step` (0, 1, …): it rises to optim.lr, then may fall to final_lr after the last."""
    optim = cfg.optim
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    done = min(1.0, (step - optim.warmup_steps) / max(1, cfg.train.steps - optim.warmup_steps))
    fall = {"constant": 0.0, "linear": done, "cosine": (1 - math.cos(math.pi * done)) / 2}[optim.schedule]
    return optim.lr + (optim.final_lr - optim.lr) * fall


def backward(loss: Tensor) -> None:
    """loss.backward() for a 0-d loss, with NaN as gradients where the loss is not finite."""
    loss.backward(torch.where(loss.detach().isfinite(), 1.0, math.nan))


@torch.no_grad()
def optimizer_step(optimizer: torch.optim.Optimizer, lr: float, clip_norm: float | None) -> tuple[Tensor, Tensor]:
    """Update the parameters by their gradients, or leave all as it is if these are bad; then drop the gradients.

    clip_norm  the norm that gradients are scaled down to; None: never.

    Returns the gradients' norm before clipping, and 1.0 if it was not finite and the step was skipped, else 0.0: 0-d
    fp32 on the device.
    """
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    skip = 1.0 - norm.isfinite().float()
    scale = None if clip_norm is None else (norm / clip_norm).clamp(min=1.0)
    for group in optimizer.param_groups:
        group["lr"] = lr
    if type(optimizer) in SKIPPING and all(group["fused"] for group in optimizer.param_groups):
        # attributes that PyTorch's GradScaler sets for fused optimizers, which divide gradients by the first
        optimizer.grad_scale, optimizer.found_inf = scale, skip
        optimizer.step()
    else:
        if scale is not None:
            torch._foreach_div_(gradients, scale)
        step_unless(optimizer, gradients, skip > 0)
    optimizer.zero_grad()
    return norm, skip
