"""One optimizer step. Bad steps are skipped and counted on the device, and the host never waits for the device.

A step is bad if the norm of its gradients is not finite. DDP has made the norm equal on all processes, and `backward`
turns a loss that is not finite into NaN gradients. Whether a step is bad is a flag on the device: fused AdamW takes it
as `found_inf`, EMAs of the weights take it as `skip`, and `step_unless` applies it to other optimizers."""

import math

import torch
from torch import Tensor

from tread.runtime.step_unless import step_unless
from tread.training.muon import Muon
from tread.training.settings import Settings


def learning_rate(cfg: Settings, step: int) -> float:
    """Return the learning rate of training step `step` (0, 1, …), as optim.warmup_steps, schedule and final_lr say."""
    optim = cfg.optim
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    done = min(1.0, (step - optim.warmup_steps) / max(1, cfg.train.steps - optim.warmup_steps))
    fall = {"constant": 0.0, "linear": done, "cosine": (1 - math.cos(math.pi * done)) / 2}[optim.schedule]
    return optim.lr + (optim.final_lr - optim.lr) * fall


def backward(loss: Tensor) -> None:
    """Run loss.backward() for a 0-d loss; the gradients are NaN if the loss is not finite."""
    loss.backward(torch.where(loss.detach().isfinite(), 1.0, math.nan))


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `optimizer` is a fused Adam(W) or Muon, which can clip, skip bad steps and take lr as a tensor."""
    kinds = (torch.optim.AdamW, torch.optim.Adam, Muon)
    return type(optimizer) in kinds and all(group["fused"] for group in optimizer.param_groups)


@torch.no_grad()
def optimizer_step(
    optimizer: torch.optim.Optimizer, lr: Tensor | float, clip_norm: float | None, hold: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Clip the gradients to the norm clip_norm (None: don't), update the parameters and clear the gradients. The update
    is skipped if the gradients' norm is not finite, or if `hold`, 0-d fp32, is 1. A group's learning rate is lr, times
    its entry lr_factor, if any. Returns (norm before clipping, 1.0 if skipped else 0.0), 0-d fp32 on the device."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    skip = 1.0 - norm.isfinite().float()
    skip = skip if hold is None else torch.maximum(skip, hold)
    scale = None if clip_norm is None else (norm / clip_norm).clamp(min=1.0)
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"] if "lr_factor" in group else lr
    if is_fused(optimizer):
        # attributes that PyTorch's GradScaler sets for fused optimizers, which divide gradients by the first
        optimizer.grad_scale, optimizer.found_inf = scale, skip
        optimizer.step()
    else:
        if scale is not None:
            torch._foreach_div_(gradients, scale)
        step_unless(optimizer, gradients, skip > 0)
    optimizer.zero_grad()
    return norm, skip
