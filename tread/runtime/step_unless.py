"""Takes a step of any optimizer, undone on the device if a flag tensor is true, e.g. for non-finite gradients."""

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


def step_unless(optimizer: torch.optim.Optimizer, gradients: list[Tensor], bad: Tensor) -> None:
    """Call optimizer.step(), but leave parameters and optimizer state bit for bit unchanged if `bad`, a 0-d bool
    tensor, is true; `gradients`, the parameters' gradients, are then set to 0 in place. Call this under no_grad.

    The choice between the values before and after the step is made on the device. The host must wait for the device
    if the step creates state, as the first one does, or changes Python numbers, or if a tensor of the state is on
    another device: torch's Adam and others keep state["step"] on the CPU unless capturable or fused is set.
    """
    for gradient in gradients:
        gradient.masked_fill_(bad, 0.0)  # a step may raise an error for NaN
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
    """Return (parameters with state, flat list of the values of state and of param_groups, its pytree structure)."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return list(optimizer.state), *tree_flatten((list(optimizer.state.values()), groups))


def _decidable(old: object, new: object, device: torch.device) -> bool:
    """Return whether a flag on `device` can choose between two values: tensors on that device with the same shape and
    dtype. Also True for equal non-tensors of the same type, as then there is nothing to choose."""
    if torch.is_tensor(old) and torch.is_tensor(new):
        return (old.device, old.shape, old.dtype) == (device, new.shape, new.dtype) and new.device == device
    return type(old) is type(new) and old == new
