"""What holds of each network whose routes keep whole rows, Mamba and RWKV; their tokens are a grid of 4×4 here."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from routing_module import Route, run_blocks
from tread.models.backbone import Backbone
from tread.routing.ids import choose_ids, row_ids
from tread.runtime import compiling
from tread.runtime.device import autocast


def batch(size: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 4, 8, 8, generator=generator), torch.rand(size, generator=generator), torch.arange(size)


def rows(count: int, ratio: float = 0.5, grid: tuple[int, int] = (4, 4), seed: int = 0) -> Tensor:
    """ids of whole rows, (count, K)"""
    return row_ids(torch.rand(count, grid[0] * grid[1], generator=torch.Generator().manual_seed(seed)), ratio, grid)


def assert_smaller_image(blocks: list[nn.Module], naive: Callable, dim: int) -> None:
    """Three blocks with a route over two, against the twin naive(block, x, c, grid) in fp64: it cuts the rows out of
    the image by hand, runs the blocks on what is then an image, and puts them back."""
    height, width = 5, 3
    x, c = torch.randn(3, height * width, dim), torch.randn(3, dim)
    route, ids = Route(1, 2, 0.5, select="row"), rows(3, 0.5, (height, width))
    chosen = ids.view(3, -1, width)[:, :, 0] // width
    assert chosen.shape == (3, 3) and len(chosen.unique(dim=0)) > 1 and (chosen.diff(dim=1) > 1).any()  # and gaps
    actual = run_blocks(blocks, x, c, routes=[(route, ids)], grid=(height, width))

    before = blocks[0](x, c, (height, width))
    expected = before.clone().double()
    for sample in range(3):
        image = before[sample].view(height, width, dim)
        part = torch.stack([image[row] for row in chosen[sample]]).reshape(1, -1, dim).double()
        for block in blocks[1:]:
            part = naive(copy.deepcopy(block).double(), part, c[sample : sample + 1].double(), (3, width))
        for place, row in enumerate(chosen[sample]):
            expected[sample].view(height, width, dim)[row] = part[0].view(3, width, dim)[place]
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)

    bypassed = torch.ones(3, height * width, dtype=torch.bool).scatter_(1, ids, False)
    assert bypassed.sum() == 3 * 2 * width
    assert torch.equal(actual[bypassed], before[bypassed]) and not torch.equal(actual[~bypassed], before[~bypassed])


def assert_routed_as_it_should_be(model: Backbone) -> None:
    """Ratio 0 is no route; single tokens are refused; gradients reach everything, and recomputation finds the same."""
    dense, by_rows = model(*batch()), [(Route(1, 4, 0.5, select="row"), rows(4))]
    assert torch.equal(model(*batch(), routes=[(Route(1, 4, 0.0, select="row"), rows(4, 0.0))]), dense)
    assert not torch.equal(model(*batch(), routes=by_rows), dense)
    tokens = Route(1, 4, 0.5)
    with pytest.raises(ValueError, match="1→4 selects by 'token'.*it takes select=\"row\""):
        model(*batch(), routes=[(tokens, choose_ids(tokens, torch.rand(4, 16)))])
    recomputed = copy.deepcopy(model)
    recomputed.activation_checkpointing = True
    for item in (model, recomputed):
        item(*batch(), routes=by_rows).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().sum() > 0, name
        assert torch.equal(recomputed.get_parameter(name).grad, parameter.grad), name


def assert_trains_on_a_gpu(model: Backbone) -> None:
    """In fp32 it gives the CPU's numbers; steps in bf16 under a row route lower the loss."""
    given, routes = batch(8), [(Route(1, 4, 0.5, "end", "row"), rows(8))]
    expected = model(*given, routes=routes)
    model, given = model.cuda(), [item.cuda() for item in given]
    routes = [(route, ids.cuda()) for route, ids in routes]
    torch.testing.assert_close(model(*given, routes=routes).cpu(), expected, rtol=1e-3, atol=1e-3)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(*given, routes=routes).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[1] < losses[0]


def assert_compiled_as_eager(model: Backbone, monkeypatch: pytest.MonkeyPatch, fp32: int, bf16: int) -> None:
    """Output and gradients, with a graph for each kind of call: so many after steps under a route in fp32, and after
    one in bf16 whose last block runs in fp32.

    torch 2.11 does not trace is_autocast_available: nor is it traced here.
    """
    torch._dynamo.reset()
    monkeypatch.setattr(torch.amp, "is_autocast_available", torch._dynamo.disable(torch.amp.is_autocast_available))
    eager, counter = copy.deepcopy(model), CompileCounterWithBackend("aot_eager")
    compiling.compile_blocks(model.compiled(), counter)
    for precision, last, graphs in (("fp32", "off", fp32), ("bf16", "end", bf16)):
        routes = [(Route(1, 2, 0.5, last, "row"), rows(4))]
        with autocast(torch.device("cpu"), precision):
            ours, theirs = (each(*batch(), routes=routes) for each in (model, eager))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=0.02 if precision == "bf16" else 1e-5)
        assert counter.frame_count == graphs
        if precision == "fp32":
            for output in (ours, theirs):
                output.square().sum().backward()
            for name, parameter in eager.named_parameters():
                torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()
