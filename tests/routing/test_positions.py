"""Blocks that make their own positions are refused: the hook families of test_hooks.py pass, blocks written here by
rotary angles from arange, a learned table and a running sum do not."""

from collections import deque
from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from test_hooks import case, every_model
from torch import Tensor, nn
from torch.nn import functional as F

from routing_module import Route, run_blocks
from tread.routing.hooks import attach_routes, select_first
from tread.routing.positions import check_positions

WIDTH, TOKENS = 32, 16


class Block(nn.Module):
    """Pre-norm attention behind a gate that is zero at first, as adaLN-Zero's: a fresh block is the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.zeros(WIDTH))
        self.drop, self.calls = nn.Dropout(0.5), deque()  # the check puts lists back as they were
        self.register_buffer("seen", torch.zeros(()))

    def turn(self, x: Tensor, angles: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        rotated = first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()
        return torch.cat(rotated, dim=-1).to(x.dtype)

    def forward(self, x: Tensor, places: Tensor | None = None) -> Tensor:
        self.calls.append(x.shape[1])
        self.seen += 1
        if places is None:
            places = self.places(x)
        angles = places[..., None] / 100 ** torch.linspace(0, 1, WIDTH // 2)
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(self.turn(q, angles), self.turn(k, angles), v)
        return x + self.gate * self.drop(self.out(mixed))

    def places(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[1], dtype=torch.float32)


class Handed(Block):
    """Positions (B, N) come from outside."""

    def places(self, x: Tensor) -> Tensor:
        raise AssertionError("positions are handed along")


class Switched(Block):
    """Makes its positions where a switch says so, and knows its number."""

    def __init__(self, number: int, own: bool) -> None:
        super().__init__()
        self.number, self.inner = number, nn.Dropout(0.0)
        self.inner.own = own

    def places(self, x: Tensor) -> Tensor:
        return super().places(x) if self.inner.own else torch.zeros(x.shape[1])


class Scan(nn.Module):
    """Mixes its tokens by their order on purpose."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.cumsum(dim=1)


class Table(nn.Module):
    """Adds a learned position, zero at first, to whatever stands there."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(TOKENS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.positions[: x.shape[1]]


class Bias(nn.Module):
    """Attention with a bias for each pair of places, a buffer that is zero until weights are loaded; beside it a
    variance and batch statistics that are zero, too, and say nothing of places."""

    def __init__(self, biased: bool = True) -> None:
        super().__init__()
        self.qkv, self.batch = nn.Linear(WIDTH, 3 * WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("bias", torch.zeros(TOKENS, TOKENS) if biased else None)
        self.register_buffer("variance", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.batch((x / (self.variance + 1e-6).sqrt()).transpose(1, 2)).transpose(1, 2)
        q, k, v = self.qkv(normed).chunk(3, dim=-1)
        bias = None if self.bias is None else self.bias[: x.shape[1], : x.shape[1]].to(q.dtype)
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class Network(nn.Module):
    def __init__(self, kind: type, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Gated(Block):
    """Its gate (B, WIDTH) comes from outside, where it is zero at first."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x + gate[:, None] * (super().forward(x) - x)


class GatedHanded(Gated):
    def places(self, x: Tensor) -> Tensor:
        return torch.zeros(x.shape[1])


@pytest.mark.parametrize("kind", [Gated, GatedHanded])
def test_a_gate_of_zeros_from_outside_hides_nothing(kind):
    model, gate = Network(kind), torch.zeros(3, WIDTH)
    refused = pytest.raises(ValueError, match="block 3 .Gated.") if kind is Gated else nullcontext()
    with refused:
        check_positions(model.blocks, tokens(), gate)
    with refused, attach_routes(model.blocks, Route(2, 3), select_first).on(torch.rand(3, TOKENS)):
        model.blocks[3](tokens(), gate)


def tokens() -> Tensor:
    return torch.randn(3, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))


def snapshot(model: nn.Module) -> list:
    modes = [module.training for module in model.modules()]
    tensors = [*model.parameters(), *model.buffers()]
    return [modes, torch.get_rng_state(), *(tensor.clone() for tensor in tensors), *(t._version for t in tensors)]


def equal(first: list, second: list) -> bool:
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(first, second, strict=True))


@every_model
def test_the_families_of_diffusers_pass_and_are_left_as_they_were(name):
    """In training mode, with weights that ask for gradients; two more forwards for each class of blocks, once."""
    item = case(name)
    item.model.train()
    calls, routing = [], item.attach()
    for block in item.blocks:
        block.register_forward_pre_hook(lambda module, args: calls.append(type(module)))
    kinds = {type(block) for block in list(item.blocks)[1:-1]}
    outputs, states = [], []
    for extra in (2 * len(kinds), 0):
        calls.clear()
        torch.manual_seed(0)  # models that drop labels draw
        with routing.on_ids(item.ids()):
            outputs.append(item.run())
        assert len(calls) == len(item.blocks) + extra
        states.append(snapshot(item.model))
    assert torch.equal(*outputs) and equal(*states)


@pytest.mark.parametrize("kind", [Block, Table, Scan, Bias])
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_blocks_whose_order_matters_are_refused_fresh_from_their_constructor(kind, half):
    model, noise = Network(kind), torch.rand(3, TOKENS)
    routing, before = attach_routes(model.blocks, Route(0, 0)), snapshot(model)
    fails = pytest.raises(ValueError, match=rf"block 0 \({kind.__name__}\).*order.*select=.*verify=False")
    with torch.autocast("cpu", torch.bfloat16, enabled=half), fails, routing.on(noise):
        model(torch.ones(3, TOKENS, WIDTH))  # equal tokens hide nothing
    assert equal(before, snapshot(model)) and not routing._running
    with attach_routes(model.blocks, Route(0, 2), verify=False).on(noise):
        model(tokens())


def test_blocks_of_run_blocks_are_checked_by_a_function():
    """The same attention is refused where it makes its positions, and passes where they are handed along."""
    places = torch.rand(3, TOKENS, generator=torch.Generator().manual_seed(1)) * 16
    handed, alone = Network(Handed), Network(Block)
    check_positions([Bias(biased=False)], tokens())  # its zero buffers are not of places
    before = snapshot(handed)
    check_positions(handed.blocks, tokens(), along=[places])
    assert equal(before, snapshot(handed)) and sum(len(block.calls) for block in handed.blocks) == 2
    with pytest.raises(ValueError, match=r"block 3 \(Block\).*along="):
        check_positions(alone.blocks, tokens())
    with pytest.raises(ValueError, match="block 1"):
        check_positions([nn.Identity(), lambda x: x + x.cumsum(1)], tokens())
    ids = torch.arange(8).expand(3, -1)
    assert run_blocks(handed.blocks, tokens(), routes=[(Route(1, 2), ids)], along=[places]).shape == (3, TOKENS, WIDTH)


@pytest.mark.parametrize("own", [1, 2, None])
def test_the_block_whose_settings_differ_most_from_the_last_of_its_class_is_checked_too(own):
    """By a switch deep inside it, among blocks that all differ by their number, which alone is no reason."""
    model = Network(Block)
    model.blocks = nn.ModuleList(Switched(number, number == own) for number in range(5))
    refused = pytest.raises(ValueError, match=rf"block {own} \(Switched\)") if own else nullcontext()
    with refused:
        check_positions(model.blocks, tokens())
    assert sum(bool(block.calls) for block in model.blocks) == (2 if own else 1)
    with refused, attach_routes(model.blocks, Route(1, 4)).on(torch.rand(3, TOKENS)):
        model(tokens())


def test_positions_made_from_some_layer_on_are_seen_in_the_last_block():
    """By its number alone, which is no setting that differs."""

    class Late(Switched):
        def places(self, x: Tensor) -> Tensor:
            return Block.places(self, x) if self.number > 2 else torch.zeros(x.shape[1])

    model = nn.ModuleList(Late(number, False) for number in range(5))
    with pytest.raises(ValueError, match=r"block 4 \(Late\)"):
        check_positions(model, tokens())
    with pytest.raises(ValueError, match=r"block 3 \(Late\)"), attach_routes(model, Route(1, 3)).on(torch.rand(3, 16)):
        [block(tokens()) for block in model]


class Cached(nn.Module):
    """Keeps what it makes of a text at its first call: as an attribute, in a dict or in a list."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.make, self.where = nn.Linear(WIDTH, WIDTH), where
        self.attribute, self.dict, self.list = None, {}, []

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        if self.where == "attribute":
            kept = self.attribute = self.make(text) if self.attribute is None else self.attribute
        elif self.where == "dict":
            kept = self.dict.setdefault("text", self.make(text))
        else:
            self.list = self.list or self.list + [self.make(text)]
            kept = self.list[0]
        return x + F.scaled_dot_product_attention(x, kept, kept)


@pytest.mark.parametrize("where", ["attribute", "dict", "list"])
def test_what_a_block_keeps_from_its_first_call_is_not_of_the_check(where):
    """Its parameters are random: outputs are those of a twin that is not checked, and the check keeps no cache."""
    torch.manual_seed(0)
    blocks, text = nn.ModuleList(Cached(where) for _ in range(3)), torch.randn(3, 5, WIDTH)
    ids = torch.arange(8).expand(3, -1)
    twin = run_blocks(deepcopy(blocks), tokens(), text, routes=[(Route(1, 2), ids)])
    check_positions(blocks, tokens(), text)
    checked = deepcopy(blocks)
    with attach_routes(blocks, Route(1, 2)).on_ids(ids):
        x = tokens()
        for block in blocks:
            x = block(x, text)
    assert torch.equal(x, twin)
    assert torch.equal(run_blocks(checked, tokens(), text, routes=[(Route(1, 2), ids)]), twin)


def test_blocks_with_parameters_of_another_kind_are_left_unchecked_with_a_warning():
    """As sharded and quantized ones are."""

    class Sharded(nn.Parameter):
        pass

    model = Network(Block)
    for block in model.blocks:
        block.gate = Sharded(torch.zeros(WIDTH))
    with pytest.warns(UserWarning, match="Block has sharded or quantized parameters"):
        check_positions(model.blocks, tokens())


@pytest.mark.parametrize("kind", [Scan, Table])
def test_a_compiled_graph_is_not_checked(kind):
    """Nothing is checked inside it, and it has no break."""
    model = Network(kind)
    routing, noise = attach_routes(model.blocks, Route(1, 2)), torch.rand(3, TOKENS)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with routing.on(noise):
        graph = compiled(tokens())
    with attach_routes(model.blocks, Route(1, 2), select_first, verify=False).on(noise):
        torch.testing.assert_close(graph, model(tokens()))
