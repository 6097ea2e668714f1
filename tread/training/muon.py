"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): orthogonal steps for the blocks' matrices.

All other parameters take steps of AdamW: embeddings, modulations, last layer, vectors, and alignment's projector. As in
torch.optim.Muon (torch ≥ 2.9), a matrix W (rows, columns) with gradient g is updated by

    B ← μ·B + (1 − μ)·g,   U = μ·B + (1 − μ)·g (Nesterov's; else B),   W ← (1 − rate·weight_decay)·W − rate·r·O,

where O is U with its singular values brought close to 1, and SCALES gives r by the number of rows and columns.
"""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from tread.models.backbone import block_layers

Scale = Literal["original", "match_rms"]
SCALES = {  # r of a matrix with so many rows and columns
    "original": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
    "match_rms": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,  # AdamW's step size (arXiv 2502.16982)
}


def block_matrices(network: nn.Module) -> list[nn.Parameter]:
    """Return the weights of the blocks' linear layers, except adaLN modulations and weights with one row or column."""
    weights = [layer.weight for name, layer in block_layers(network) if "adaLN_modulation" not in name]
    return [weight for weight in weights if min(weight.shape) > 1]


def step_flops(network: nn.Module, iterations: int = 5) -> int:
    """Return a step's FLOPs for `iterations` of Newton–Schulz on the updates of all trained block_matrices(network)."""
    sizes = [sorted(weight.shape) for weight in block_matrices(network) if weight.requires_grad]
    return sum(iterations * (4 * few**2 * many + 2 * few**3) for few, many in sizes)


def groups_of(parameters: Iterable[nn.Parameter], network: nn.Module) -> list[dict]:
    """Split parameters into two groups for an optimizer: those in block_matrices(network), for Muon, and the rest."""
    matrices, own, rest = set(block_matrices(network)), [], []
    for parameter in parameters:
        (own if parameter in matrices else rest).append(parameter)
    return [{"params": own}, {"params": rest}]


def orthogonalized(matrices: Tensor, iterations: int, dtype: torch.dtype) -> Tensor:
    """Return `matrices` (n, rows, columns) with nonzero singular values brought near 1, by Newton–Schulz in `dtype`."""
    a, b, c = 3.4445, -4.775, 2.0315  # of an iteration: σ → a·σ + b·σ³ + c·σ⁵ for each singular value σ
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = (x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7)).to(dtype).contiguous()
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.AdamW):
    """Muon for the first of two parameter groups (matrices), with `momentum` and `steps` Newton–Schulz iterations, and
    fused AdamW for the second, with lr, betas and eps. muon_scale, a key of SCALES, says how the update of a matrix is
    scaled by its numbers of rows and columns. Both groups start at rate lr; the first gets muon_lr only if the caller
    multiplies lr by that group's entry lr_factor (muon_lr / lr) before a step, as optimizer_step does.

    Like fused AdamW it divides gradients by `grad_scale`, changes nothing if `found_inf` is 1 (both 0-d, or None), and
    takes rates as tensors. Updates of one shape are orthogonalized together, in bf16 on a GPU and in fp32 on a CPU,
    which may emulate bf16. Raises ValueError for a momentum outside [0, 1), or if steps is not a positive integer.
    """

    grad_scale = found_inf = None

    def __init__(
        self, groups: list[dict], lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
        muon_lr: float, muon_scale: Scale, momentum: float = 0.95, nesterov: bool = True, steps: int = 5,
    ) -> None:  # fmt: skip
        if not 0 <= momentum < 1 or steps < 1 or steps % 1:
            raise ValueError(f"momentum is {momentum}, steps {steps}: must be in [0, 1) and a whole number above 0")
        super().__init__(groups, lr, betas, eps, weight_decay, fused=True)
        self.scale, self.momentum, self.nesterov, self.iterations = SCALES[muon_scale], momentum, nesterov, int(steps)
        self.param_groups[0]["lr_factor"] = muon_lr / lr

    @torch.no_grad()
    def step(self) -> None:
        (own, rest), alike = self.param_groups, {}  # matrices by shape
        self.param_groups = [rest]
        try:
            super().step()
        finally:
            self.param_groups = [own, rest]
        for weight in own["params"]:
            if weight.grad is not None:
                alike.setdefault(weight.shape, []).append(weight)
        for weights in alike.values():
            self.update(weights, own["lr"], own["weight_decay"])

    def update(self, weights: list[nn.Parameter], rate: Tensor | float, weight_decay: float) -> None:
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        buffers, share = [self.state[weight]["momentum_buffer"] for weight in weights], 1 - self.momentum
        gradient = torch.stack([weight.grad for weight in weights])
        if self.grad_scale is not None:
            gradient /= self.grad_scale
        if self.found_inf is not None:  # 1: no gradient, and shares and rates of 0
            gradient.masked_fill_(self.found_inf > 0, 0.0)
            share, rate = share * (1 - self.found_inf), rate * (1 - self.found_inf)
        mean = torch.stack(buffers).lerp_(gradient, share)
        torch._foreach_copy_(buffers, mean.unbind())
        direction = gradient.lerp_(mean, self.momentum) if self.nesterov else mean
        direction = orthogonalized(direction, self.iterations, torch.bfloat16 if direction.is_cuda else torch.float32)
        if weight_decay:
            torch._foreach_mul_(weights, 1 - rate * weight_decay)
        torch._foreach_sub_(weights, (direction * (rate * self.scale(*direction.shape[1:]))).unbind())
