"""What holds of each network however it is run: FLOPs as torch counts them, bf16, recomputation, compiled blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tread.models.backbone import Backbone
from tread.runtime import compiling
from tread.runtime.device import autocast


def counted_flops(call: Callable[..., Tensor], *given: object, **more: object) -> int:
    """FLOPs of all matrix products in a call, including attention."""
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        call(*given, **more)
    return counter.get_total_flops()


def derived(function: Callable[..., Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """The output, and the gradients of all inputs under a fixed weighting of the output."""
    leaves = [part.detach().clone().requires_grad_() for part in given]
    out = function(*leaves)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (out * weight).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def assert_as(
    twin: Callable[..., Tensor], function: Callable[..., Tensor], given: Sequence[Tensor], tolerance: float = 2e-5
) -> None:
    """Output and gradients are finite, fp32 and the twin's, within a fraction of each one's largest number, or of 1."""
    for actual, expected in zip(derived(function, given), derived(twin, given), strict=True):
        assert actual.dtype == torch.float32 and actual.shape == expected.shape
        assert actual.isfinite().all()
        assert (actual - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1.0)


def assert_modes_agree(network: Backbone, run: Callable[[], Sequence[Tensor]], graphs: int) -> None:
    """Outputs and gradients are the plain network's, bit for bit or to rounding; compiled, its blocks have so many
    graphs."""

    def results(precision: str = "fp32") -> list[Tensor]:
        network.zero_grad()
        with autocast(torch.device("cpu"), precision):
            outputs = run()
        sum(out.float().square().mean() for out in outputs).backward()
        return [*(out.float() for out in outputs), torch.cat([p.grad.flatten() for p in network.parameters()])]

    plain = results()
    for actual, expected in zip(results("bf16"), plain):
        assert (actual - expected).norm() / expected.norm() < 0.1
    network.activation_checkpointing = True
    assert all(map(torch.equal, results(), plain))
    network.activation_checkpointing = False
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiling.compile_blocks(network.compiled(), counter)
    for actual, expected in zip(results(), plain):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)
    assert counter.frame_count == graphs
    torch._dynamo.reset()
