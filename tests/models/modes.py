"""Weights and inputs for tests of networks, and what holds of each network however it is run: FLOPs as torch counts
them, bf16, recomputation, compiled blocks."""

from collections.abc import Callable, Sequence

import torch
from conftest import CPU
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from routing_module import Route
from tread.models.backbone import Backbone
from tread.routing.ids import choose_ids, row_ids
from tread.runtime import compiling
from tread.runtime.device import autocast

Function = Callable[..., Tensor]


def hot(module: nn.Module, std: float = 0.3, seed: int = 0, **stds: float) -> nn.Module:
    """All weights N(0, std), or of the std given for the last part of their name, and those of norms around 1: nothing
    starts at zero, and mistakes show."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = stds.get(name.rpartition(".")[2], std) * noise + ("norm" in name)
    return module


def batch(size: int = 3, side: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Latents (size, 4, side, side), times and labels."""
    g = torch.Generator().manual_seed(1)
    return torch.randn(size, 4, side, side, generator=g), torch.rand(size, generator=g), torch.arange(size)


def drawn(route: Route, size: int = 3, seed: int = 2) -> list[tuple[Route, Tensor]]:
    """The route with ids for a grid of 4×4 tokens."""
    return [(route, choose_ids(route, torch.rand(size, 16, generator=torch.Generator().manual_seed(seed)), (4, 4)))]


def rows(count: int, ratio: float = 0.5, grid: tuple[int, int] = (4, 4)) -> Tensor:
    """ids of whole rows, (count, K)"""
    return row_ids(torch.rand(count, grid[0] * grid[1], generator=torch.Generator().manual_seed(0)), ratio, grid)


def assert_near(actual: Tensor, expected: Tensor, limit: float = 1e-4, share: float = 1e-6) -> None:
    """Within a limit and a share of the largest value: the rounding of its sums differs between processors."""
    assert actual.shape == expected.shape and (actual - expected).abs().max() <= limit + share * expected.abs().max()


def assert_golden_gradients(
    network: nn.Module, golden: dict[str, Tensor], least: int, prefix: str = "grad.", **other: Tensor
) -> None:
    """Each within 1e-4 of its largest value, and at least so many; `other` ones take the place of the network's."""
    actual = {name: parameter.grad for name, parameter in network.named_parameters()} | other
    names = [name for name in golden if name.startswith(prefix)]
    assert len(names) >= least
    for name in names:
        assert_near(actual[name.removeprefix(prefix)], golden[name], 0, 1e-4)


def assert_starts_at_zero(network: Callable[..., Backbone], side: int = 8, **sizes: int) -> None:
    """An untrained network outputs zero, and one that begins with xavier does not."""
    for init in ("adaln_zero", "xavier"):
        out = network(input_size=side, depth=2, num_classes=10, init=init, **sizes)(*batch(3, side))
        assert out.isfinite().all() and (out.abs().max() == 0) == (init == "adaln_zero")


def counted_flops(call: Function, *given: object, **more: object) -> int:
    """FLOPs of all matrix products in a call, including attention."""
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        call(*given, **more)
    return counter.get_total_flops()


def derived(function: Function, given: Sequence[Tensor]) -> list[Tensor]:
    """The output, and the gradients of all inputs under a fixed weighting of the output."""
    leaves = [part.detach().clone().requires_grad_() for part in given]
    out = function(*leaves)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (out * weight).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def assert_as(twin: Function, function: Function, given: Sequence[Tensor], tolerance: float = 2e-5) -> None:
    """Output and gradients are finite, fp32 and the twin's, within a fraction of each one's largest number, or of 1."""
    for actual, expected in zip(derived(function, given), derived(twin, given), strict=True):
        assert actual.dtype == torch.float32 and actual.shape == expected.shape
        assert actual.isfinite().all()
        assert (actual - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1.0)


def assert_compiles(function: Function, given: Sequence[Tensor], atol: float = 1e-5) -> None:
    """Compiled it is one graph with the same output and gradients."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_close(derived(compiled, given), derived(function, given), rtol=1e-5, atol=atol)
    torch._dynamo.reset()


def assert_rounds_inputs_alone(twin: Function, function: Function, rounded: Sequence[Tensor]) -> None:
    """Without autocast, rounded inputs give the twin's fp32 output and gradients, each rounded as its input."""
    actual, expected = derived(function, rounded), derived(twin, [item.float() for item in rounded])
    assert [item.dtype for item in actual] == [torch.float32, *(item.dtype for item in rounded)]
    for ours, theirs in zip(actual, expected, strict=True):
        tolerance = 2**-8 if ours.dtype == torch.bfloat16 else 2e-5
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1.0)


def assert_bf16_products(twin: Function, function: Function, given: Sequence[Tensor], tolerance: float) -> None:
    """Under autocast all is fp32, the output within 2⁻⁷ of its largest number, or of 1, and gradients within
    `tolerance`; the output is off by more than fp32's rounding, so its products were in bf16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = derived(function, given)
    expected = derived(twin, given)
    off = [float((a - b).abs().max() / b.abs().max().clamp(min=1.0)) for a, b in zip(actual, expected, strict=True)]
    assert all(item.dtype == torch.float32 for item in actual)
    assert 1e-4 < off[0] <= 2**-7 and max(off) <= tolerance, off


def assert_modes_agree(network: Backbone, run: Callable[[], Sequence[Tensor]], graphs: int) -> None:
    """Outputs and gradients are the plain network's, bit for bit or to rounding; compiled, it has so many graphs,
    of which two are of embedding and last layer."""

    def results(precision: str = "fp32") -> list[Tensor]:
        network.zero_grad()
        with autocast(CPU, precision):
            outputs = run()
        sum(out.float().square().mean() for out in outputs).backward()
        return [*(out.float() for out in outputs), torch.cat([p.grad.flatten() for p in network.parameters()])]

    plain = results()
    for actual, expected in zip(results("bf16"), plain):
        assert (actual - expected).norm() / expected.norm() < 0.15  # outputs 0.02, gradients up to 0.12
    network.activation_checkpointing = True
    assert all(map(torch.equal, results(), plain))
    network.activation_checkpointing = False
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiling.compile_blocks(network.compiled(), counter)
    assert_close(results(), plain, rtol=1e-3, atol=1e-4)
    assert counter.frame_count == graphs
    torch._dynamo.reset()
