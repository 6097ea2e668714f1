"""One optimizer step that never waits for the device: bad numbers are skipped there, and counted there.

Whether a step is bad is known from the norm of the gradients, which DDP has made equal on all
processes; a loss that is not finite spoils its gradients on purpose (`backward`). The flag stays on
the device: fused AdamW takes it as `found_inf`, averages as `skip`, `step_unless` does it for other optimizers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from tread.training.settings import Settings

SKIPPING = (torch.optim.AdamW, torch.optim.Adam)  # whose fused kernels clip and skip by themselves


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


@torch.no_grad()
def optimizer_step(optimizer: torch.optim.Optimizer, lr: float, clip_norm: float | None) -> tuple[Tensor, Tensor]:
    """Update the parameters by their gradients, which are then dropped, or leave all as it is if they are bad.

    clip_norm  to which the gradients are scaled down; None: never.

    Returns the gradients' norm before clipping, and 1.0 where it is not finite and the step was
    skipped, else 0.0: 0-d fp32 on the device.
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


def step_unless(optimizer: torch.optim.Optimizer, gradients: list[Tensor], bad: Tensor) -> None:
    """optimizer.step(), with parameters and state left bit for bit as they are where `bad`, a 0-d flag, is set.

    The device decides, which keeps what was before and takes either, number by number. It is waited for where state is
    not its own: in steps that make state, such as the first, or that change numbers of Python or tensors on another
    device (with CUDA, `step` of torch's optimizers, unless their option `capturable` is true).
    """
    for gradient in gradients:
        gradient.masked_fill_(bad, 0.0)  # what the step makes of NaN might be an error
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    owners, state, layout = _state(optimizer)
    before, kept = ([v.clone() if torch.is_tensor(v) else v for v in values] for values in (parameters, state))
    optimizer.step()
    owners_now, state, layout_now = _state(optimizer)
    alike = [*map(id, owners)] == [*map(id, owners_now)] and layout == layout_now
    decidable = alike and all(_decidable(old, new, bad.device) for old, new in zip(kept, state))
    for old, new in zip([*before, *kept], [*parameters, *state] if decidable else parameters):
        if torch.is_tensor(new):
            torch.where(bad, old, new, out=new)
    if not decidable and bad:
        values, groups = tree_unflatten(kept, layout)
        optimizer.state.clear()
        optimizer.state.update(zip(owners, values))
        kept_groups = zip(groups, optimizer.param_groups)
        optimizer.param_groups[:] = [{**settings, "params": group["params"]} for settings, group in kept_groups]


def _state(optimizer: torch.optim.Optimizer) -> tuple[list, list, TreeSpec]:
    """What state is of; all that it and the groups hold, but for parameters, and in which containers."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return list(optimizer.state), *tree_flatten((list(optimizer.state.values()), groups))


def _decidable(old: object, new: object, device: torch.device) -> bool:
    """Whether a flag on this device can choose between two values: tensors there, or what has not changed."""
    if torch.is_tensor(old) and torch.is_tensor(new):
        return (old.device, old.shape, old.dtype) == (device, new.shape, new.dtype) and new.device == device
    return type(old) is type(new) and old == new
