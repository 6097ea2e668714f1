"""Hooks on transformers of diffusers, which know nothing of routes, against a twin that runs their blocks sample by
sample on tokens picked by plain indexing."""

import contextlib
import copy
import gc
import inspect
import re
import shutil
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import diffusers  # whose modules are imported where a model is built
import pytest
import torch
from conftest import ROOT
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from routing_module import Route, gather_tokens, run_blocks, scatter_tokens
from tread.routing.hooks import Routing, attach_routes, join_first, select_first
from tread.routing.ids import choose_ids, keep_prefix

B, TEXT = 3, 7
LENGTHS = torch.tensor([TEXT, 4, 5])  # of captions, where they differ
EXAMPLES = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/routing.md").read_text(), re.M | re.S)
FLUX_INPUTS = ("hidden_states", "encoder_hidden_states", "temb", "image_rotary_emb", "joint_attention_kwargs")


def select_lumina(args, kwargs, ids):
    tokens, mask, table, condition = args
    mask = None if mask is None else gather_tokens(mask, ids)
    return (gather_tokens(tokens, ids), mask, gather_tokens(table, ids), condition), kwargs


def select_flux(args, kwargs, ids):
    given = {**dict(zip(FLUX_INPUTS, args)), **kwargs}
    text = given["encoder_hidden_states"].shape[1]
    rows = keep_prefix(ids[:1], text)[0]
    tables = tuple(table[rows] for table in given["image_rotary_emb"])
    return (), {**given, "hidden_states": gather_tokens(given["hidden_states"], ids), "image_rotary_emb": tables}


def join_flux(output, saved, ids):
    args, kwargs = saved
    return output[0], scatter_tokens(args[0] if args else kwargs["hidden_states"], output[1], ids)


@dataclass
class Case:
    """A model with what its routes need; `noise` (B, tokens that may be routed) belongs to a route(1→−2) of a half."""

    model: torch.nn.Module
    inputs: dict
    target: torch.Tensor
    blocks: torch.nn.ModuleList
    noise: torch.Tensor
    select: Callable = select_first
    join: Callable = join_first
    how: str = "token"
    prefix: int = 0
    force_keep: torch.Tensor | None = None
    places: dict = field(default_factory=dict)

    def attach(self, rejoin: int | None = None) -> Routing:
        route = Route(1, -2, select=self.how, rejoin=rejoin)
        return attach_routes(self.blocks, [route], self.select, self.join, **self.places)

    def ids(self, ratio: float = 0.5) -> torch.Tensor:
        return choose_ids(Route(1, -2, ratio, select=self.how), self.noise, None, self.force_keep, self.prefix)

    def run(self) -> torch.Tensor:
        return self.model(**self.inputs).sample

    def loss(self) -> torch.Tensor:
        return (self.run() - self.target).square().mean()


def build(kind: type, **sizes) -> torch.nn.Module:
    """A model in which everything matters: all weight matrices N(0, 0.1); in eval, so that no label is dropped."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(**sizes).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.1)
    return model


def case(name: str) -> Case:
    g = torch.Generator().manual_seed(1)
    x, text = torch.randn(B, 4, 8, 8, generator=g), torch.randn(B, TEXT, 12, generator=g)
    noise = torch.rand(B, 16, generator=g)
    heads = {"num_attention_heads": 2, "attention_head_dim": 16}
    sizes = {"in_channels": 4, "sample_size": 8, **heads}
    inputs = {"hidden_states": x, "timestep": torch.tensor([3, 0, 900]), "encoder_hidden_states": text}
    mask = (torch.arange(TEXT) < LENGTHS[:, None]).long()
    if name == "dit":
        model = build(diffusers.DiTTransformer2DModel, num_embeds_ada_norm=10, num_layers=6, **sizes)
        del inputs["encoder_hidden_states"]
        return Case(model, inputs | {"class_labels": torch.tensor([1, 2, 10])}, x, model.transformer_blocks, noise)
    if name == "pixart":
        texts = {"cross_attention_dim": 32, "caption_channels": 12, "out_channels": 4}
        model = build(diffusers.PixArtTransformer2DModel, num_layers=5, **sizes, **texts)
        return Case(model, inputs | {"encoder_attention_mask": mask}, x, model.transformer_blocks, noise)
    texts = {"joint_attention_dim": 12, "pooled_projection_dim": 12}
    pooled = {"pooled_projections": torch.randn(B, 12, generator=g)}
    if name == "sd3":  # as 3.5 has them, some blocks attend to the picture alone besides; and the last returns no text
        more = {"dual_attention_layers": (1, 2, 3), "qk_norm": "rms_norm", "pos_embed_max_size": 4, "out_channels": 4}
        model = build(
            diffusers.SD3Transformer2DModel, num_layers=5, caption_projection_dim=32, **sizes, **texts, **more
        )
        places = {"tokens": "hidden_states", "output": 1}
        return Case(model, inputs | pooled, x, model.transformer_blocks, noise, places=places)
    inputs["timestep"] = torch.rand(B, generator=g)
    if name.startswith("lumina"):
        layers = {"hidden_size": 48, "num_layers": 5, "num_refiner_layers": 1, "num_attention_heads": 2}
        rope = {"axes_dim_rope": (8, 8, 8), "axes_lens": (32, 16, 16), "num_kv_heads": 1, "multiple_of": 16}
        model = build(diffusers.Lumina2Transformer2DModel, in_channels=4, cap_feat_dim=12, **layers, **rope)
        if name == "lumina":
            inputs["encoder_attention_mask"] = torch.ones_like(mask)
            return Case(model, inputs, x, model.layers, noise, select_lumina, prefix=TEXT)
        is_text = torch.arange(TEXT + 16) < LENGTHS[:, None]  # of different lengths: a mask, and text that is forced
        noise = torch.rand(B, TEXT + 16, generator=g)
        inputs["encoder_attention_mask"] = mask
        return Case(model, inputs, x, model.layers, noise, select_lumina, force_keep=is_text)
    layers = {"num_layers": 3, "num_single_layers": 4, "axes_dims_rope": (4, 6, 6)}
    model = build(diffusers.FluxTransformer2DModel, in_channels=4, **layers, **heads, **texts)
    x = torch.randn(B, 16, 4, generator=g)
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0))
    inputs |= {"hidden_states": x, "img_ids": places, "txt_ids": torch.zeros(TEXT, 3), **pooled}
    blocks = model.transformer_blocks if name == "flux" else model.single_transformer_blocks
    return Case(model, inputs, x, blocks, noise, select_flux, join_flux, how="shared")


NAMES = ("dit", "lumina", "lumina captions", "flux", "flux single", "pixart", "sd3")
every_model = pytest.mark.parametrize("name", NAMES)


def seen_inside(blocks: torch.nn.ModuleList) -> list[int]:
    """Collects how many tokens the first layer inside each block gets, from now on."""
    seen = []
    for block in blocks:
        first = block.norm if hasattr(block, "norm") else block.norm1
        first.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    return seen


def calls_of(item: Case, index: int) -> tuple[tuple, dict, object]:
    """How a block is called in a run of the model, and what it returns to the model."""
    calls = []
    hook = item.blocks[index].register_forward_hook(lambda m, *call: calls.append(call), with_kwargs=True)
    with torch.no_grad():
        item.run()
    hook.remove()
    return calls[-1]


def tokens_of(output) -> torch.Tensor:
    return output[1] if isinstance(output, tuple) else output


def twin(item: Case, ids: torch.Tensor, first: int = 1, last: int = -2, rejoin: int = 1) -> torch.Tensor:
    """Tokens behind the last block of an untouched model's blocks, each sample by itself and by plain indexing."""
    args, kwargs, _ = calls_of(item, 0)
    named = inspect.signature(item.blocks[0].forward).bind(*args, **kwargs).arguments
    count, last = named["hidden_states"].shape[1], last % len(item.blocks)

    def of_one(name, value, b, places):
        if isinstance(value, tuple):  # tables without a batch axis: text, then image
            rows = [*range(TEXT), *(TEXT + place for place in places)]
            return tuple(torch.stack([table[row] for row in rows]) for table in value)
        if name in ("hidden_states", "attention_mask", "image_rotary_emb") and value is not None:
            return torch.stack([value[b, place] for place in places])[None]
        return None if value is None else value[b : b + 1]

    samples = []
    for b in range(len(ids)):
        tokens = named["hidden_states"][b].clone()
        text = named.get("encoder_hidden_states")
        states = []
        for index, block in enumerate(item.blocks):
            places = ids[b].tolist() if first <= index <= last else list(range(count))
            states.append(tokens.clone())
            inputs = {name: of_one(name, value, b, places) for name, value in named.items()}
            inputs["hidden_states"] = torch.stack([tokens[place] for place in places])[None]
            if index and text is not None:
                inputs["encoder_hidden_states"] = text
            with torch.no_grad():
                output = block(**inputs)
            text = output[0] if isinstance(output, tuple) else None
            for position, place in enumerate(places):
                tokens[place] = tokens_of(output)[0, position]
            for place in set(range(count)) - set(places) if index == last else ():
                tokens[place] = states[rejoin][place]
        samples.append(tokens)
    return torch.stack(samples)


def gradients(item: Case) -> list[torch.Tensor]:
    actual = [p.grad.clone() for p in item.model.parameters() if p.grad is not None]
    item.model.zero_grad(set_to_none=True)
    return actual


@every_model
def test_blocks_on_a_route_run_the_kept_tokens_and_leave_the_rest(name):
    """Off, removed and at ratio 0 a model is what it was. On, it is the twin, also where tokens rejoin earlier; the
    skipped tokens are bit for bit those before the route, and the first layer of each block sees the others only."""
    item, ids, text = case(name), case(name).ids(), TEXT if name == "flux single" else 0  # its first layer sees both
    (args, kwargs, first), before, names = calls_of(item, 0), item.run(), list(item.model.state_dict())
    given = inspect.signature(item.blocks[0].forward).bind(*args, **kwargs).arguments["hidden_states"]
    expected = {rejoin: twin(item, ids, rejoin=rejoin) for rejoin in (0, 1)}
    assert not torch.allclose(*expected.values(), atol=0.01)
    seen = seen_inside(item.blocks)
    for rejoin, state in ((0, given), (1, tokens_of(first))):
        routing = item.attach(None if rejoin else 0)
        assert torch.equal(item.run(), before) and list(item.model.state_dict()) == names
        with routing.on(item.noise, ratio=0.0, prefix=item.prefix, force_keep=item.force_keep):
            assert torch.equal(item.run(), before)
        seen.clear()
        with routing.on(item.noise, prefix=item.prefix, force_keep=item.force_keep):
            torch.testing.assert_close(tokens_of(calls_of(item, -1)[2]), expected[rejoin], rtol=1e-4, atol=1e-4)
        whole, kept = text + state.shape[1], text + ids.shape[1]
        assert seen == [kept if 1 <= i < len(item.blocks) - 1 else whole for i in range(len(item.blocks))]
        with routing.on_ids(ids):
            behind = tokens_of(calls_of(item, -2)[2])
        skipped = torch.ones(state.shape[:2], dtype=torch.bool).scatter_(1, ids, False)
        assert skipped.any() and torch.equal(behind[skipped], state[skipped])
        routing.remove()
    assert torch.equal(item.run(), before)
    assert not any(block._forward_hooks for block in item.blocks)


class ByHand(torch.nn.Module):
    """All blocks, with text: the kept tokens are indexed before the second, and put back before the last."""

    def __init__(self, blocks: torch.nn.ModuleList, ids: torch.Tensor) -> None:
        super().__init__()
        self.blocks, self.where = blocks, (torch.arange(len(ids))[:, None].expand_as(ids), ids)

    def forward(self, hidden_states, encoder_hidden_states, **named):
        x, text, last = hidden_states, encoder_hidden_states, len(self.blocks) - 1
        for index, block in enumerate(self.blocks):
            if index == 1:
                whole, x = x, x[self.where]
            if index == last:
                x = whole.index_put(self.where, x)
            output = block(hidden_states=x, encoder_hidden_states=text, **named)
            text, x = output if isinstance(output, tuple) else (text, output)
        return output


@pytest.mark.parametrize("name", ["pixart", "sd3"])
def test_values_and_gradients_are_those_of_a_loop_by_hand(name):
    """Bit for bit, and every weight has a gradient: those that the text alone meets, too."""
    item, ids = case(name), case(name).ids()
    with item.attach().on_ids(ids):
        loss = item.loss()
        loss.backward()
    other = case(name)
    blocks, other.model.transformer_blocks = other.blocks, torch.nn.ModuleList([ByHand(other.blocks, ids)])
    expected = other.loss()
    expected.backward()
    other.model.transformer_blocks = blocks
    assert torch.equal(loss, expected)
    assert all(parameter.grad is not None for parameter in item.model.parameters())
    assert all(map(torch.equal, gradients(item), gradients(other)))


def test_a_route_to_the_last_joint_block_which_returns_no_text():
    item, ids = case("sd3"), case("sd3").ids()
    expected = twin(item, ids, last=-1)
    with attach_routes(item.blocks, Route(1, -1), select_first, **item.places).on_ids(ids):
        text, tokens = calls_of(item, -1)[2]
        item.loss().backward()
    assert text is None
    torch.testing.assert_close(tokens, expected, rtol=1e-4, atol=1e-4)
    unused = {name for name, parameter in item.model.named_parameters() if parameter.grad is None}
    assert not unused and item.model.context_embedder.weight.grad.abs().sum() > 0


@every_model
def test_activation_checkpointing_gives_the_same_gradients(name):
    item = case(name)
    routing, ids = item.attach(), item.ids()
    with routing.on_ids(ids):
        item.loss().backward()
    expected = gradients(item)
    item.model.enable_gradient_checkpointing()
    with routing.on_ids(ids):
        item.loss().backward()
    actual = gradients(item)
    assert len(actual) == len(expected) > 0 and sum(g.abs().sum() > 0 for g in actual) > len(actual) // 2
    torch.testing.assert_close(actual, expected)


def test_activation_checkpointing_needs_the_context_in_the_backward_pass_and_no_earlier_rejoin():
    item = case("dit")
    before, routing = item.run(), item.attach()
    item.model.enable_gradient_checkpointing()
    with routing.on_ids(item.ids()):
        loss = item.loss()
    with pytest.raises(CheckpointError):
        loss.backward()
    routing.remove()
    with item.attach(rejoin=0).on(item.noise):
        with pytest.raises(RuntimeError, match="block 4 was called without block 0.*activation checkpointing"):
            item.loss().backward()
    item.model.disable_gradient_checkpointing()
    assert torch.equal(item.run(), before)


@pytest.mark.parametrize(
    ("routes", "given", "message"),
    [
        ([Route(1, 3), Route(3, 4)], {}, "overlap"),
        (Route(1, -2, fp32="end"), {}, "fp32='end'"),
        (Route(1, -2), {"tokens": "x"}, "must name the first input of the blocks"),
        (Route(1, -2), {}, "more than once"),
    ],
)
def test_routes_that_can_not_be_attached_are_refused(routes, given, message):
    blocks = list(case("sd3").blocks) * (2 if "once" in message else 1)
    with pytest.raises(ValueError, match=message):
        attach_routes(blocks, routes, **given)
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in blocks)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("sd3", {"output": 1}, "keywords only.*tokens="),
        ("sd3", {"tokens": "hidden_states"}, "returned a tuple.*output="),
        ("sd3", {"tokens": "hidden_states", "output": 0}, "(3, 7, 32).*|returned a NoneType"),
        ("pixart", {"output": 1}, "block 1 returned a Tensor"),
        ("pixart", {"words": 16}, "also gets encoder_hidden_states of .*select_first"),
        ("dit", {"noise": 9}, "for 9 tokens, but block 1 gets"),
        ("dit", {"prefix": 7}, r"for 23 tokens, but block 1 gets \(3, 16, 32\)"),
        ("lumina", {"select": select_lumina}, r"for 16 tokens, but block 1 gets \(3, 23, 48\).*prefix="),
        ("lumina", {"select": select_lumina, "noise": 3}, r"for 3 tokens, but block 1 gets \(3, 23, 48\).*prefix="),
        ("flux", {"select": select_flux, "join": join_flux, "noise": 9}, "for 9 tokens, but block 1 gets"),
    ],
)
def test_what_the_blocks_show_to_be_wrong_is_refused(name, given, message):
    """A forgotten prefix, say, would route the first tokens only."""
    item, before = case(name), case(name).run()
    given = dict(given)
    noise, prefix = item.noise[:, : given.pop("noise", 16)], given.pop("prefix", 0)
    if words := given.pop("words", 0):  # as many as picture tokens
        item.inputs["encoder_hidden_states"] = torch.randn(B, words, 12)
        del item.inputs["encoder_attention_mask"]
    routing = attach_routes(item.blocks, Route(1, -1), **given)
    with pytest.raises(ValueError, match=message), routing.on(noise, prefix=prefix):
        item.run()
    assert words or torch.equal(item.run(), before)


@pytest.mark.parametrize("samples", [2, 16])
def test_a_select_of_tokens_that_are_not_the_first_input_or_stand_first(samples):
    """Their number is found wherever it stands, and missed where no input has it."""
    noise, text, tokens = torch.rand(samples, 16), torch.ones(samples, 5, 4), torch.ones(samples, 16, 4)

    def second(args, kwargs, ids):
        return (args[0], gather_tokens(args[1], ids)), kwargs

    def turned(args, kwargs, ids):
        return (gather_tokens(args[0].transpose(0, 1), ids).transpose(0, 1),), kwargs

    first = tokens.transpose(0, 1)
    for select, args, inside in ((second, (text, tokens), (samples, 5)), (turned, (first,), (8, samples))):
        blocks = torch.nn.ModuleList([Mixing()])
        routing = attach_routes(blocks, Route(0, 0), select, lambda output, saved, ids: output, verify=False)
        with routing.on(noise):
            assert blocks[0](*args).shape[:2] == inside
        with routing.on(noise, prefix=1), pytest.raises(ValueError, match="for 17 tokens"):
            blocks[0](*args)


def test_each_route_has_a_number_of_tokens_of_its_own():
    """In a model that merges pairs of tokens between two routes; the reference goes token by token."""
    blocks = torch.nn.ModuleList(torch.nn.Linear(width, width) for width in (4, 4, 8))
    x, noises, routes = torch.randn(B, 20, 4), (torch.rand(B, 20), torch.rand(B, 10)), [Route(1, 1, 0.25), Route(2, 2)]
    kept = [choose_ids(route, noise).tolist() for route, noise in zip(routes, noises)]

    def run() -> torch.Tensor:
        return blocks[2](blocks[1](blocks[0](x)).reshape(B, 10, 8))

    routing, expected = attach_routes(blocks, routes), torch.empty(B, 10, 8)
    for sample in range(B):
        tokens = [blocks[0](token) for token in x[sample]]
        tokens = [blocks[1](token) if place in kept[0][sample] else token for place, token in enumerate(tokens)]
        for place in range(10):
            pair = torch.cat(tokens[2 * place : 2 * place + 2])
            expected[sample, place] = blocks[2](pair) if place in kept[1][sample] else pair
    with routing.on(*noises):
        torch.testing.assert_close(run(), expected)
    for given, block, count in ((noises[1:], 1, 20), (noises[:1], 2, 10)):  # one noise for both routes
        with routing.on(*given), pytest.raises(ValueError, match=rf"but block {block} gets \({B}, {count},"):
            run()


def test_ids_that_do_not_fit_are_refused():
    item = case("dit")
    routing, before, ids = attach_routes(item.blocks, [Route(1, 2), Route(4, 5)]), item.run(), item.ids()
    for given, message in (
        ((ids,), "1 sets of ids for 2 routes"),
        ((ids, item.noise), "float32"),
        ((ids[:, [0, 1, 0]], ids), "twice in sample 0"),
        ((ids + 16, ids), "tokens 16 to 31, but they are 0 to 15"),
        ((ids[:1], ids), "ids of 1 samples for tokens of 3"),  # one row would do for the first sample alone
    ):
        with pytest.raises(ValueError, match=message), routing.on_ids(*given):
            item.run()
    with pytest.raises(ValueError, match=r"one after the other: on\(n1, n2\), not on\(\(n1, n2\)\)"):
        routing.on((item.noise, item.noise))
    with pytest.raises(ValueError, match="3 tensors of noise for 2 routes"):
        routing.on(item.noise, item.noise, item.noise)
    assert torch.equal(item.run(), before)


def test_a_copy_of_a_model_has_routes_of_its_own():
    item = case("dit")
    item.model.routing = item.attach()
    copied = copy.deepcopy(item.model)
    before = item.run()

    def run_copy():
        return copied(**item.inputs).sample

    with item.model.routing.on(item.noise):
        inside = item.run()
        assert torch.equal(run_copy(), before)  # an average of weights sees all tokens
    with copied.routing.on(item.noise):
        assert torch.equal(run_copy(), inside) and torch.equal(item.run(), before)
    with item.model.routing.on(item.noise):  # made meanwhile, after a routed step
        item.run()
        assert torch.equal(copy.deepcopy(item.model)(**item.inputs).sample, before)
    copied.routing.remove()
    assert not any(block._forward_hooks for block in copied.transformer_blocks)
    assert all(block._forward_hooks for block in item.blocks[1:-1])


class Attending(torch.nn.Module):
    """A block of plain attention whose first token has weights of its own, or tokens first (N, B, D)."""

    def __init__(self, prefix: bool = False, first: bool = False, places: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.axis = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16), 0 if first else 1
        self.own, self.places = torch.nn.Linear(16, 16) if prefix else None, places

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.own is not None:
            x = torch.cat([self.own(x[:, :1]), x[:, 1:]], dim=1)
        given = self.qkv(x + torch.arange(len(x))[:, None, None] if self.places else x).transpose(1, self.axis)
        mixed = torch.nn.functional.scaled_dot_product_attention(*given.chunk(3, dim=2))
        return x + self.out(mixed).transpose(1, self.axis)


def select_turned(args, kwargs, ids):
    return (gather_tokens(args[0].transpose(0, 1), ids).transpose(0, 1),), kwargs


def join_turned(output, saved, ids):
    return scatter_tokens(saved[0][0].transpose(0, 1), output.transpose(0, 1), ids).transpose(0, 1)


@pytest.mark.parametrize("samples", [1, 2, 16, 20])
def test_tokens_that_come_first_are_checked_among_all_tokens(samples):
    """(N, B, D) with any B, also without a word about N; blocks that count their tokens are refused."""
    noise, x = torch.rand(samples, 16), torch.randn(16, samples, 16)
    for places in (False, True):
        blocks = torch.nn.ModuleList(Attending(first=True, places=places) for _ in range(4))
        routing = attach_routes(blocks, Route(1, 2), select_turned, join_turned)
        expected = pytest.raises(ValueError, match="order of its tokens") if places else contextlib.nullcontext()
        for context in (routing.on(noise), routing.on_ids(choose_ids(Route(1, 2), noise))):
            with expected, context:
                torch.nn.Sequential(*blocks)(x)


def test_a_prefix_keeps_its_place_in_the_check():
    blocks = torch.nn.ModuleList(Attending(prefix=True) for _ in range(4))
    with attach_routes(blocks, Route(1, 2)).on(torch.rand(2, 16), prefix=1):
        assert torch.nn.Sequential(*blocks)(torch.randn(2, 17, 16)).shape == (2, 17, 16)


def test_the_check_is_not_seen_by_who_watches_the_blocks():
    """Selective checkpointing keeps what the blocks themselves compute: gradients of the first step as of the second;
    and FLOPs are theirs alone."""
    blocks, x, noise = torch.nn.ModuleList(Attending() for _ in range(4)), torch.randn(2, 16, 16), torch.rand(2, 16)
    routing, seen = attach_routes(blocks, Route(1, 2)), []
    how = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default])
    for _ in range(2):
        blocks.zero_grad()
        with routing.on(noise, ratio=0.0), FlopCounterMode(display=False) as counter:
            out = x
            for block in blocks:
                out = checkpoint(block, out, use_reentrant=False, context_fn=how)
            out.square().mean().backward()
        seen.append((counter.get_total_flops(), [parameter.grad.clone() for parameter in blocks.parameters()]))
    assert seen[0][0] == seen[1][0] and all(map(torch.equal, seen[0][1], seen[1][1]))


class Mixing(torch.nn.Module):
    """A block (tokens, …) → tokens; what else it gets has no effect."""

    def __init__(self, **attention: bool) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(4, 1, **attention) if attention else None

    def forward(self, tokens, *others, **named):
        return tokens * 2


@pytest.mark.parametrize(
    ("samples", "args", "kwargs", "name"),
    [
        (3, (torch.zeros(8, 4),), {}, "input 1 of shape \\(8, 4\\)"),
        (3, (torch.zeros(3, 4),), {"table": torch.zeros(8, 2)}, "table of shape"),
        (3, (None, [torch.zeros(1), (torch.zeros(3, 1, 8),)]), {}, "input 2\\[1\\]\\[0\\] of shape \\(3, 1, 8\\)"),
        (3, (), {"more": {"mask": torch.zeros(3, 8)}}, "more\\['mask'\\] of shape"),
        (8, (torch.zeros(8, 8),), {}, "input 1 of shape \\(8, 8\\)"),
        (8, (torch.zeros(8, 4), torch.zeros(8)), {"c": torch.zeros(8, 1, 4)}, None),
        (3, (torch.zeros(3, 4), 8, "x", None), {"flag": True}, None),
    ],
)
def test_what_may_travel_with_the_tokens_is_an_error_unless_it_is_said_not_to(samples, args, kwargs, name):
    x, ids = torch.ones(samples, 8, 4), torch.arange(4).repeat(samples, 1)
    expected = x.clone()
    expected[:, :4] *= 2
    for select in ({}, {"select": select_first}):
        blocks = torch.nn.ModuleList([Mixing()])
        with attach_routes(blocks, Route(0, 0), **select).on_ids(ids):
            if name and not select:
                with pytest.raises(ValueError, match=f"also gets {name}.*give attach_routes a select=.*select_first"):
                    blocks[0](x, *args, **kwargs)
            else:
                assert torch.equal(blocks[0](x, *args, **kwargs), expected)


def test_modules_that_put_the_tokens_first_need_a_select():
    blocks = torch.nn.ModuleList([Mixing(batch_first=True), Mixing(batch_first=False)])
    with pytest.raises(ValueError, match="attention of block 1 has batch_first=False.*select="):
        attach_routes(blocks, Route(0, 0))
    attach_routes(blocks, Route(0, 0), select_first).remove()


def test_contexts_do_not_nest_and_errors_leave_the_routes_off():
    item = case("dit")
    before, routing = item.run(), item.attach()

    def fail(*call):
        raise KeyError

    with routing.on(item.noise):
        for other in (routing, attach_routes(item.blocks, Route(4, 5))):  # whose block 4 is on the first's route
            with pytest.raises(RuntimeError, match="on already.*attach_routes"), other.on(item.noise):
                pass
        with attach_routes(item.blocks, Route(5, 5)).on(item.noise):
            assert item.run().isfinite().all()
        inside = item.run()
        broken = item.blocks[2].ff.register_forward_hook(fail)
        with pytest.raises(KeyError):
            item.run()
        broken.remove()
        assert torch.equal(item.run(), inside)  # an error that the caller handles inside the context
    broken = item.blocks[2].ff.register_forward_hook(fail)
    with pytest.raises(KeyError), routing.on(item.noise):
        item.run()
    broken.remove()
    assert torch.equal(item.run(), before)
    routing.remove()
    with pytest.raises(RuntimeError, match="were removed"), routing.on(item.noise):
        pass


USED = """
import torch
from routing_module import Route, run_blocks
from {package}.hooks import attach_routes
from {package}.ids import choose_ids
torch.manual_seed(0)
blocks = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(4))
x, noise, route = torch.randn(2, 16, 8), torch.rand(2, 16), Route(1, -2, 0.5, select="row")
looped = run_blocks(blocks, x, routes=[(route, choose_ids(route, noise, (4, 4)))])
with attach_routes(blocks, route).on(noise, grid=(4, 4)):
    for block in blocks:
        x = block(x)
torch.testing.assert_close(x, looped)
"""


def test_copied_into_an_empty_project_it_works_there_as_here(tmp_path, monkeypatch):
    """Reference: the same numbers from this repository's own files. test_house.py: they import torch alone."""
    here, there = {}, {}
    with torch.random.fork_rng():
        exec(USED.format(package="tread.routing"), here)
        shutil.copytree(ROOT / "tread" / "routing", tmp_path / "routing")
        shutil.copy(ROOT / "routing_module.py", tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "routing_module")
        exec(USED.format(package="routing"), there)
        for name in ("routing", "routing.hooks", "routing.ids"):
            assert sys.modules.pop(name).__file__.startswith(str(tmp_path))
    assert there["Route"] is not here["Route"] and torch.equal(there["x"], here["x"])


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_of_the_page_run(number):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        left = {"__name__": "example"}
        exec(compile(EXAMPLES[number], f"docs/routing.md, example {number + 1}", "exec"), left)
    model = left.get("model") or left["network"]
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert any(parameter.grad is not None for parameter in model.parameters()) or left.get("optimizer")


# ------------------------------------------------------------------- tokens that rejoin as they were earlier


class Plain(torch.nn.Module):
    """Blocks between a linear layer and nothing; those of `again` are computed again backward."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first = torch.nn.Linear(8, 8)
            layers = [torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(6)]
        self.blocks, self.again, self.reentrant = torch.nn.ModuleList(layers), (), reentrant

    def forward(self, x):
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            again = partial(checkpoint, block, use_reentrant=self.reentrant)
            x = again(x) if number in self.again else block(x)
        return x

    def results(self, x: torch.Tensor, routing: Routing, *ids: torch.Tensor) -> list[torch.Tensor]:
        """Its output and all gradients."""
        self.zero_grad()
        with routing.on_ids(*ids):
            out = self(x)
            out.square().sum().backward()
        return [out.detach(), *(p.grad.clone() for p in self.parameters())]


X = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([[0, 3, 4, 6], [7, 1, 2, 5]])


@pytest.mark.parametrize(
    "routes",
    [[Route(3, 4, rejoin=1)], [Route(-2, -1, rejoin=1), Route(1, 2, rejoin=0)], [Route(1, 2), Route(4, 4, rejoin=3)]],
    ids=str,
)
def test_hooks_equal_run_blocks_where_tokens_rejoin_earlier(routes):
    """Bit for bit, gradients too; where another route starts, it is the state before that one takes tokens out."""
    model, ids = Plain(), [IDS, IDS.flip(0)][: len(routes)]
    actual = model.results(X, attach_routes(model.blocks, routes), *ids)
    model = Plain()
    expected = run_blocks(model.blocks, model.first(X), routes=list(zip([replace(r, fp32="off") for r in routes], ids)))
    expected.square().sum().backward()
    assert all(map(torch.equal, actual, [expected, *(p.grad for p in model.parameters())]))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_refused_where_tokens_rejoin_earlier(reentrant):
    """The block that ends the route can't be recomputed; the others can, and so can all of them in one piece."""
    model = Plain(reentrant)
    routing = attach_routes(model.blocks, Route(3, 4, rejoin=1))
    expected = model.results(X, routing, IDS)
    for model.again in ((1, 2), (3,), (5,)):
        torch.testing.assert_close(model.results(X, routing, IDS), expected)
    for model.again in (range(6), (4,)):
        with pytest.raises(RuntimeError, match="block 4 .*leave rejoin out, or use run_blocks"):
            model.results(X, routing, IDS)
    model.again = ()
    assert all(map(torch.equal, model.results(X, routing, IDS), expected))
    with routing.on_ids(IDS):
        whole = checkpoint(model, X.clone().requires_grad_(), use_reentrant=reentrant)
        model.zero_grad()
        whole.square().sum().backward()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected[1:])
    with torch.no_grad(), routing.on_ids(IDS):  # nothing to compute again
        assert torch.equal(model(X), expected[0])


def test_a_state_that_waits_goes_with_the_call_or_the_context():
    model, held = Plain(), []
    routing = attach_routes(model.blocks, Route(3, 4, rejoin=1))
    model.blocks[1].register_forward_pre_hook(lambda module, args: held.append(weakref.ref(args[0])))
    with torch.no_grad(), routing.on_ids(IDS):
        model.blocks[5].register_forward_pre_hook(lambda module, args: held.append(held[0]() is None))
        model(X)
    assert held[1] is True
    broken = model.blocks[2].register_forward_pre_hook(lambda module, args: 1 / 0)
    held.clear()
    with pytest.raises(ZeroDivisionError), torch.no_grad(), routing.on_ids(IDS):
        model(X)
    gc.collect()  # of the traceback
    assert held[0]() is None
    broken.remove()
    copied = copy.deepcopy(model)
    with routing.on_ids(IDS):
        assert not torch.allclose(model(X), copied(X), atol=1e-3)  # whose routes are off
    routing.remove()
    assert not any(block._forward_hooks for block in model.blocks)


@pytest.mark.parametrize("route", [Route(3, 4, rejoin=1), Route(4, 4, rejoin=1), Route(2, 4, rejoin=0)], ids=str)
@pytest.mark.parametrize("grad", [True, False])
def test_a_block_at_which_tokens_rejoin_must_be_called(route, grad):
    """Stochastic depth skips it once: in the last call, before a whole call, before one without block `rejoin`."""
    blocks = Plain().blocks
    routing = attach_routes(blocks, route)

    def run(*skipped: int) -> torch.Tensor:
        x = X.clone().requires_grad_(grad)
        for number, block in enumerate(blocks):
            x = x if number in skipped else block(x)
        return x

    refused = pytest.raises(RuntimeError, match=f"block 4, the last of a route with rejoin, .*block {route.rejoin}")
    for calls in ([(4,)], [(), (4,)], [(4,), ()], [(4,), (route.rejoin,)], [range(2, 6), ()]):
        with torch.set_grad_enabled(grad), refused, routing.on_ids(IDS):
            for skipped in calls:
                run(*skipped)
            assert calls[-1] == (4,), "the second call should have failed"
    with torch.set_grad_enabled(grad), routing.on_ids(IDS):
        assert torch.equal(run(), run()) and run(3 if route.start < 4 else 2, 5).isfinite().all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_backward_pass_saves_again_does_not_count(reentrant):
    """Calls with their backward passes in one context; the last is without block `rejoin`."""
    model = Plain(reentrant)
    routing, model.again = attach_routes(model.blocks, Route(3, 4, rejoin=1)), (1, 2)
    with routing.on_ids(IDS):
        for _ in range(2):
            model(X).square().sum().backward()
        with pytest.raises(RuntimeError, match="block 4 was called without block 1"):
            torch.nn.Sequential(model.blocks[0], *model.blocks[2:])(X)


def test_what_a_model_does_to_tokens_that_are_to_rejoin_is_refused():
    """Writing into them, and other tokens than the numbers are of."""
    model = Plain()
    routing = attach_routes(model.blocks, Route(3, 4, rejoin=1))
    hook = model.blocks[2].register_forward_pre_hook(lambda module, args: X.add_(0))
    with torch.no_grad(), routing.on_ids(IDS):
        assert model(X).isfinite().all()  # what is not a block's input may be written to
    hook.remove()
    model.blocks[1].register_forward_hook(lambda module, args, output: (args[0].mul_(2), output)[1])
    with torch.no_grad(), routing.on_ids(IDS), pytest.raises(RuntimeError, match="wrote into the inputs of block 1"):
        model(X)
    refused = pytest.raises(ValueError, match="for 7 tokens, but block 1 gets")
    with torch.no_grad(), routing.on(torch.rand(2, 7)), refused:
        model(X)


@pytest.mark.parametrize("how", [pytest.param("compiled before", marks=pytest.mark.slow), "called by forward"])
def test_a_context_in_which_nothing_was_routed_says_so(how):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    run = model
    if how == "compiled before":
        run = torch.compile(model, backend="aot_eager")
        run(torch.randn(2, 6, 8))
    routing, x = attach_routes(nn.ModuleList(model), Route(1, 2)), torch.randn(2, 6, 8)
    with pytest.warns(UserWarning, match="was called without `with`"):
        routing.on(torch.rand(2, 6))
        model(x)
    with pytest.warns(UserWarning, match="nothing was routed"), routing.on(torch.rand(2, 6)):
        run(x) if how == "compiled before" else model[2].forward(x)
    with warnings.catch_warnings(record=True) as said, routing.on(torch.rand(2, 6)):
        assert not torch.equal(model(x), x) and not said
    assert not said


def test_a_residual_added_outside_of_the_blocks_is_told_and_mended_by_a_join():
    """x + block(x) doubles skipped tokens: a warning, once. With the join of docs/routing, it is a twin by hand."""

    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            for block in self.blocks:
                x = x + block(x)
            return x

    def among_zeros(output, saved, ids):
        return scatter_tokens(torch.zeros_like(saved[0][0]), output, ids)

    torch.manual_seed(0)
    model, x, ids = Outside(), torch.randn(2, 6, 8), torch.tensor([[0, 2, 5], [1, 2, 3]])
    blocks = [lambda x, block=block: x + block(x) for block in model.blocks]
    expected = run_blocks(blocks, x, routes=[(Route(1, 2), ids)])
    routing = attach_routes(model.blocks, Route(1, 2))
    with pytest.warns(UserWarning, match="between blocks 1 and 2.*skipped.*x . block.x.*join=") as told:
        for _ in range(2):
            with routing.on_ids(ids):
                assert not torch.allclose(model(x), expected)
    assert len(told) == 1
    routing.remove()
    with warnings.catch_warnings(), attach_routes(model.blocks, Route(1, 2), join=among_zeros).on_ids(ids):
        warnings.simplefilter("error")
        torch.testing.assert_close(model(x), expected)
