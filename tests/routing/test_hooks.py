"""Hooks on transformers of diffusers, which know nothing of routes, against a twin that runs their blocks sample by
sample on tokens picked by plain indexing; FLOPs against counts of one block alone and a closed form."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import io
import re
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
from conftest import ROOT
from diffusers import (
    DiTTransformer2DModel,
    FluxTransformer2DModel,
    Lumina2Transformer2DModel,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointError, checkpoint
from torch.utils.flop_counter import FlopCounterMode

from routing_module import Route, gather_tokens, run_blocks, scatter_tokens
from tread.routing.hooks import Routing, attach_routes, join_first, select_first
from tread.routing.ids import RatioSchedule, choose_ids, keep_prefix
from tread.runtime.distributed import split_batch
from tread.runtime.randomness import generator

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

    def attach(self, select: Callable | None = None, rejoin: int | None = None) -> Routing:
        route = Route(1, -2, select=self.how, rejoin=rejoin)
        return attach_routes(self.blocks, [route], select or self.select, self.join, **self.places)

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
    if name == "dit":
        sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 6, "sample_size": 8}
        model = build(DiTTransformer2DModel, in_channels=4, num_embeds_ada_norm=10, **sizes)
        x = torch.randn(B, 4, 8, 8, generator=g)
        inputs = {"hidden_states": x, "timestep": torch.tensor([3, 0, 9]), "class_labels": torch.tensor([1, 2, 10])}
        return Case(model, inputs, x, model.transformer_blocks, torch.rand(B, 16, generator=g))
    if name.startswith("lumina"):
        sizes = {"hidden_size": 48, "num_layers": 5, "num_refiner_layers": 1, "num_attention_heads": 2}
        rope = {"axes_dim_rope": (8, 8, 8), "axes_lens": (32, 16, 16), "num_kv_heads": 1, "multiple_of": 16}
        model = build(Lumina2Transformer2DModel, in_channels=4, cap_feat_dim=16, **sizes, **rope)
        x = torch.randn(B, 4, 8, 8, generator=g)
        lengths = LENGTHS if name == "lumina captions" else torch.tensor([TEXT] * B)
        inputs = {
            "hidden_states": x,
            "timestep": torch.rand(B, generator=g),
            "encoder_hidden_states": torch.randn(B, TEXT, 16, generator=g),
            "encoder_attention_mask": (torch.arange(TEXT) < lengths[:, None]).long(),
        }
        if name == "lumina captions":  # of different lengths: a mask, and text that is forced
            is_text = torch.arange(TEXT + 16) < lengths[:, None]
            noise = torch.rand(B, TEXT + 16, generator=g)
            return Case(model, inputs, x, model.layers, noise, select_lumina, force_keep=is_text)
        return Case(model, inputs, x, model.layers, torch.rand(B, 16, generator=g), select_lumina, prefix=TEXT)
    if name in ("pixart", "sd3"):
        sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 5, "sample_size": 8}
        x = torch.randn(B, 4, 8, 8, generator=g)
        inputs = {
            "hidden_states": x,
            "timestep": torch.tensor([3, 0, 900]),
            "encoder_hidden_states": torch.randn(B, TEXT, 12, generator=g),
        }
        noise = torch.rand(B, 16, generator=g)
    if name == "pixart":
        texts = {"cross_attention_dim": 32, "caption_channels": 12}
        model = build(PixArtTransformer2DModel, in_channels=4, out_channels=4, **sizes, **texts)
        inputs["encoder_attention_mask"] = (torch.arange(TEXT) < LENGTHS[:, None]).long()
        return Case(model, inputs, x, model.transformer_blocks, noise)
    if name == "sd3":  # as 3.5 has them, some blocks attend to the picture alone besides; and the last returns no text
        texts = {"joint_attention_dim": 12, "caption_projection_dim": 32, "pooled_projection_dim": 12}
        more = {"dual_attention_layers": (1, 2, 3), "qk_norm": "rms_norm", "pos_embed_max_size": 4}
        model = build(SD3Transformer2DModel, in_channels=4, out_channels=4, **sizes, **texts, **more)
        inputs["pooled_projections"] = torch.randn(B, 12, generator=g)
        places = {"tokens": "hidden_states", "output": 1}
        return Case(model, inputs, x, model.transformer_blocks, noise, places=places)
    sizes = {"num_layers": 3, "num_single_layers": 4, "attention_head_dim": 16, "num_attention_heads": 2}
    texts = {"joint_attention_dim": 12, "pooled_projection_dim": 12}
    model = build(FluxTransformer2DModel, in_channels=4, axes_dims_rope=(4, 6, 6), **sizes, **texts)
    x = torch.randn(B, 16, 4, generator=g)
    inputs = {
        "hidden_states": x,
        "encoder_hidden_states": torch.randn(B, TEXT, 12, generator=g),
        "pooled_projections": torch.randn(B, 12, generator=g),
        "timestep": torch.rand(B, generator=g),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0)),
        "txt_ids": torch.zeros(TEXT, 3),
    }
    blocks = model.transformer_blocks if name == "flux" else model.single_transformer_blocks
    return Case(model, inputs, x, blocks, torch.rand(B, 16, generator=g), select_flux, join_flux, how="shared")


NAMES = ("dit", "lumina", "lumina captions", "flux", "flux single", "pixart", "sd3")
every_model = pytest.mark.parametrize("name", NAMES)


def seen_inside(blocks: torch.nn.ModuleList) -> list[int]:
    """Collects how many tokens the first layer inside each block gets, from now on."""
    seen = []
    for block in blocks:
        first = block.norm if hasattr(block, "norm") else block.norm1
        first.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    return seen


def calls_of(one: Case, index: int) -> tuple[tuple, dict, object]:
    """How a block is called in a run of the model, and what it returns to the model."""
    calls = []
    hook = one.blocks[index].register_forward_hook(lambda m, *call: calls.append(call), with_kwargs=True)
    with torch.no_grad():
        one.run()
    hook.remove()
    return calls[-1]


def tokens_of(output) -> torch.Tensor:
    return output[1] if isinstance(output, tuple) else output


def twin(one: Case, ids: torch.Tensor, first: int = 1, last: int = -2, rejoin: int = 1) -> torch.Tensor:
    """Tokens behind the last block of an untouched model's blocks, each sample by itself and by plain indexing."""
    args, kwargs, _ = calls_of(one, 0)
    named = inspect.signature(one.blocks[0].forward).bind(*args, **kwargs).arguments
    count, last = named["hidden_states"].shape[1], last % len(one.blocks)

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
        for index, block in enumerate(one.blocks):
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


def flops(call: Callable[[], object]) -> int:
    """Products of matrices, those of the attention included."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def train(one: Case, routing: Routing, steps: int = 8) -> None:
    optimizer = torch.optim.AdamW(one.model.parameters(), lr=2e-3)
    for step in range(steps):
        noise = torch.rand(one.noise.shape, generator=generator(0, step, "route"))
        with routing.on(noise, prefix=one.prefix, force_keep=one.force_keep):
            one.loss().backward()
        optimizer.step()
        optimizer.zero_grad()


def gradients(one: Case) -> list[torch.Tensor]:
    found = [p.grad.clone() for p in one.model.parameters() if p.grad is not None]
    one.model.zero_grad(set_to_none=True)
    return found


@every_model
def test_a_model_with_routes_off_is_the_model(name):
    one = case(name)
    before, names = one.run(), list(one.model.state_dict())
    routing = one.attach()
    assert torch.equal(one.run(), before)
    assert list(one.model.state_dict()) == names
    with routing.on_ids(one.ids()):
        assert not torch.allclose(one.run(), before, atol=1e-3)
    assert torch.equal(one.run(), before)
    routing.remove()
    assert torch.equal(one.run(), before)
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in one.blocks)


@every_model
def test_ratio_zero_is_the_model(name):
    one = case(name)
    before = one.run()
    with one.attach().on(one.noise, ratio=0.0, prefix=one.prefix, force_keep=one.force_keep):
        torch.testing.assert_close(one.run(), before, rtol=0, atol=0)


@every_model
def test_blocks_on_the_route_get_the_kept_tokens_alone(name):
    one, text = case(name), TEXT if name == "flux single" else 0  # whose first layer sees text and image
    routing, seen, ids = one.attach(), seen_inside(one.blocks), one.ids()
    with routing.on(one.noise, prefix=one.prefix, force_keep=one.force_keep):
        one.run()
    whole, kept = text + one.prefix + one.noise.shape[1], text + ids.shape[1]
    assert seen == [kept if 1 <= i < len(one.blocks) - 1 else whole for i in range(len(one.blocks))]


@every_model
def test_hooks_equal_gathering_once_by_plain_indexing(name):
    one, ids = case(name), case(name).ids()
    expected = twin(one, ids)
    with one.attach().on(one.noise, prefix=one.prefix, force_keep=one.force_keep):
        torch.testing.assert_close(tokens_of(calls_of(one, -1)[2]), expected, rtol=1e-4, atol=1e-4)


@every_model
def test_bypassed_tokens_are_those_before_the_route(name):
    one, ids = case(name), case(name).ids()
    routing = one.attach()
    with routing.on_ids(ids):
        before, behind = tokens_of(calls_of(one, 0)[2]), tokens_of(calls_of(one, -2)[2])
    bypassed = torch.ones(before.shape[:2], dtype=torch.bool).scatter_(1, ids, False)
    assert bypassed.any() and torch.equal(behind[bypassed], before[bypassed])
    assert not torch.isclose(behind[~bypassed], before[~bypassed]).all(dim=-1).any()


@every_model
def test_bypassed_tokens_rejoin_as_they_were_before_an_earlier_block(name):
    """Each kind of select and join: against plain indexing; the text is that of the last block of the route."""
    one, ids = case(name), case(name).ids()
    expected = twin(one, ids, rejoin=0)
    (args, kwargs, _), routing = calls_of(one, 0), one.attach(rejoin=0)
    before = inspect.signature(one.blocks[0].forward).bind(*args, **kwargs).arguments["hidden_states"]
    with routing.on_ids(ids):
        behind = tokens_of(calls_of(one, -2)[2])
        torch.testing.assert_close(tokens_of(calls_of(one, -1)[2]), expected, rtol=1e-4, atol=1e-4)
    bypassed = torch.ones(before.shape[:2], dtype=torch.bool).scatter_(1, ids, False)
    assert bypassed.any() and torch.equal(behind[bypassed], before[bypassed])
    assert not torch.allclose(expected, twin(one, ids), atol=0.01)


def test_hooks_equal_run_blocks():
    one, ids = case("dit"), case("dit").ids()
    args, kwargs, _ = calls_of(one, 0)
    calls = [lambda x, block=block: block(x, **kwargs) for block in one.blocks]
    expected = run_blocks(calls, args[0], routes=[(Route(1, -2, fp32="off"), ids)])
    with one.attach().on_ids(ids):
        assert torch.equal(calls_of(one, -1)[2], expected)


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
    one, ids = case(name), case(name).ids()
    with one.attach().on_ids(ids):
        loss = one.loss()
        loss.backward()
    other = case(name)
    blocks, other.model.transformer_blocks = other.blocks, torch.nn.ModuleList([ByHand(other.blocks, ids)])
    expected = other.loss()
    expected.backward()
    other.model.transformer_blocks = blocks
    assert torch.equal(loss, expected)
    assert all(parameter.grad is not None for parameter in one.model.parameters())
    assert all(map(torch.equal, gradients(one), gradients(other)))


@pytest.mark.parametrize("name", ["pixart", "sd3"])
def test_text_is_whole_in_every_block(name):
    """And is bit for bit the text of the unrouted model, where no picture token has spoken to it yet."""
    one, texts = case(name), []
    for block in one.blocks:
        block.register_forward_pre_hook(
            lambda module, args, kwargs: texts.append(kwargs["encoder_hidden_states"].detach()), with_kwargs=True
        )
    one.run()
    with one.attach().on(one.noise):
        one.run()
    plain, routed = texts[: len(one.blocks)], texts[len(one.blocks) :]
    assert {text.shape for text in routed} == {(B, TEXT, 32)}
    same = [torch.equal(*pair) for pair in zip(routed, plain)]
    assert same == ([True] * 5 if name == "pixart" else [True, True, False, False, False])


def test_padding_is_masked_on_a_route_and_words_are_not():
    one = case("pixart")
    routing, words, (last,) = one.attach(), one.inputs["encoder_hidden_states"], LENGTHS[1:2].tolist()
    with torch.no_grad(), routing.on(one.noise):
        before = one.run()
        words[1, last:] += 1
        assert torch.equal(one.run(), before)
        words[1, last - 1] += 1
        changed = (one.run() != before).flatten(1).any(dim=1)
    assert changed.tolist() == [False, True, False]


def test_a_route_to_the_last_joint_block_which_returns_no_text():
    one, ids = case("sd3"), case("sd3").ids()
    expected = twin(one, ids, last=-1)
    with attach_routes(one.blocks, Route(1, -1), select_first, **one.places).on_ids(ids):
        text, tokens = calls_of(one, -1)[2]
        one.loss().backward()
    assert text is None
    torch.testing.assert_close(tokens, expected, rtol=1e-4, atol=1e-4)
    unused = {name for name, parameter in one.model.named_parameters() if parameter.grad is None}
    assert not unused and one.model.context_embedder.weight.grad.abs().sum() > 0


def test_as_many_words_as_picture_tokens_must_be_said_to_stay():
    for name in ("pixart", "sd3"):
        one = case(name)
        one.inputs["encoder_hidden_states"] = torch.randn(B, 16, 12)
        one.inputs.pop("encoder_attention_mask", None)
        routing = attach_routes(one.blocks, Route(1, -2), **one.places)
        with (
            routing.on(one.noise),
            pytest.raises(ValueError, match="also gets encoder_hidden_states of .*select_first"),
        ):
            one.run()
        routing.remove()
        with one.attach().on(one.noise):
            assert one.run().isfinite().all()


def forgets(args, kwargs, ids):
    """Leaves positions behind: the table as it was."""
    picked, named = case_select(args)(args, kwargs, ids)
    if picked:
        return (*picked[:2], args[2], *picked[3:]), named
    return picked, {**named, "image_rotary_emb": kwargs["image_rotary_emb"]}


def takes_the_first(args, kwargs, ids):
    """Gives the kept tokens the positions of the first ones."""
    picked, named = case_select(args)(args, kwargs, ids)
    if picked:
        return (*picked[:2], args[2][:, : ids.shape[1]], *picked[3:]), named
    return picked, {**named, "image_rotary_emb": tuple(t[: TEXT + ids.shape[1]] for t in kwargs["image_rotary_emb"])}


def case_select(args):
    return select_lumina if args else select_flux


@pytest.mark.parametrize("name", ["lumina", "flux", "flux single"])
def test_positions_that_are_not_gathered_show(name):
    one, ids = case(name), case(name).ids()
    expected = twin(one, ids)
    with one.attach(takes_the_first).on_ids(ids):
        wrong = tokens_of(calls_of(one, -1)[2])
    assert (wrong - expected).abs().max() > 0.01  # the right ones agree to 1e-4, see above
    one = case(name)
    with one.attach(forgets).on_ids(ids), pytest.raises(RuntimeError, match="size"):
        one.run()


def test_kept_tokens_see_their_own_distances():
    """Rotary attention knows differences of positions alone: a pair of kept tokens may be moved over the grid together,
    and what they become depends on how far they are apart."""
    one = case("lumina")
    (_, _, table, condition), _, _ = calls_of(one, 0)
    routing = attach_routes(one.blocks, [Route(0, -1)], select_lumina)
    pair = torch.randn(B, 2, 48, generator=torch.Generator().manual_seed(3))

    def become(*places: int) -> torch.Tensor:
        ids = TEXT + torch.tensor([places] * B)
        x = scatter_tokens(torch.zeros(B, TEXT + 16, 48), pair, ids)
        with torch.no_grad(), routing.on_ids(ids):
            for block in one.blocks:
                x = block(x, None, table, condition)
        return gather_tokens(x, ids)

    torch.testing.assert_close(become(0, 6), become(5, 11), rtol=1e-4, atol=1e-4)  # one row down, two columns right
    assert (become(0, 6) - become(0, 3)).abs().max() > 0.01


def test_tables_without_a_batch_axis_need_shared_ids():
    one = case("flux single")
    shared, own = one.ids(), choose_ids(Route(1, -2), one.noise)
    assert (shared == shared[:1]).all() and not (own == own[:1]).all()
    expected = twin(one, own)
    with one.attach().on_ids(own):
        wrong = tokens_of(calls_of(one, -1)[2])
    torch.testing.assert_close(wrong[0], expected[0], rtol=1e-4, atol=1e-4)
    assert (wrong[1:] - expected[1:]).abs().amax(dim=(1, 2)).min() > 0.01


@every_model
def test_training_under_routes_lowers_the_loss_of_all_tokens(name):
    one = case(name)
    routing = one.attach()
    before = one.loss().item()
    train(one, routing)
    assert one.loss().item() < 0.9 * before
    assert all(parameter.isfinite().all() for parameter in one.model.parameters())


@every_model
def test_activation_checkpointing_gives_the_same_gradients(name):
    one = case(name)
    routing, ids = one.attach(), one.ids()
    with routing.on_ids(ids):
        one.loss().backward()
    expected = gradients(one)
    one.model.enable_gradient_checkpointing()
    with routing.on_ids(ids):
        one.loss().backward()
    found = gradients(one)
    assert len(found) == len(expected) > 0 and sum(g.abs().sum() > 0 for g in found) > len(found) // 2
    for one_found, one_expected in zip(found, expected):
        torch.testing.assert_close(one_found, one_expected)


def test_backward_outside_the_context_is_an_error_with_activation_checkpointing():
    one = case("dit")
    routing = one.attach()
    one.model.enable_gradient_checkpointing()
    with routing.on_ids(one.ids()):
        loss = one.loss()
    with pytest.raises(CheckpointError):
        loss.backward()
    one.model.disable_gradient_checkpointing()
    with routing.on_ids(one.ids()):
        loss = one.loss()
    loss.backward()  # nothing is computed again


def test_a_failed_call_holds_no_tensors():
    one = case("dit")
    routing, held = one.attach(), []
    one.blocks[2].register_forward_pre_hook(
        lambda m, args, kwargs: held.append(weakref.ref(args[0])), with_kwargs=True, prepend=True
    )
    one.blocks[2].register_forward_pre_hook(lambda m, args, kwargs: 1 / 0, with_kwargs=True)
    with pytest.raises(ZeroDivisionError), routing.on_ids(one.ids()):
        one.run()
    gc.collect()  # of the traceback
    assert len(held) == 1 and held[0]() is None


@every_model
def test_flops_fall_by_those_of_the_tokens_routed_around(name):
    one = case(name)
    args, kwargs, _ = calls_of(one, 1)
    block, ids, routing = copy.deepcopy(one.blocks[1]), one.ids(), one.attach()
    dense, whole = flops(one.run), flops(lambda: block(*args, **kwargs))
    bound = inspect.signature(block.forward).bind(*args, **kwargs)
    picked, named = one.select(bound.args, bound.kwargs, ids)
    kept = flops(lambda: block(*picked, **named))
    with routing.on_ids(ids):
        routed = flops(one.run)
    assert dense - routed == (len(one.blocks) - 2) * (whole - kept) > 0
    if name == "dit":  # 12·D² weights a token, and two products of N×N and N×D
        n, k, d = 16, 8, 32
        assert whole - kept == B * (2 * 12 * d * d * (n - k) + 4 * d * (n * n - k * k))


def test_several_routes_at_once():
    one = case("dit")
    routing, seen = attach_routes(one.blocks, [Route(3, -2, 0.75), Route(1, 2, 0.5)]), seen_inside(one.blocks)
    ids = [choose_ids(route, one.noise) for route in routing.routes]
    with routing.on(one.noise):
        one.run()
        assert seen == [16, 8, 8, 4, 4, 16]
        both = calls_of(one, -1)[2]
    with routing.on(one.noise, one.noise.flip(0)):
        assert not torch.allclose(calls_of(one, -1)[2], both)
    args, kwargs, _ = calls_of(one, 0)
    calls = [lambda x, block=block: block(x, **kwargs) for block in one.blocks]
    routes = list(zip([Route(3, 4, fp32="off"), Route(1, 2, fp32="off")], ids))
    assert torch.equal(both, run_blocks(calls, args[0], routes=routes))


def test_ratio_is_overridden_at_inference():
    one = case("dit")
    routing, seen = one.attach(), seen_inside(one.blocks)
    for ratio, kept in ((0.25, 12), (0.75, 4), (None, 8)):
        with torch.no_grad(), routing.on(one.noise, ratio=ratio):
            one.run()
        assert seen[-6:] == [16, kept, kept, kept, kept, 16]
    assert routing.routes[0].selection_ratio == 0.5
    schedule = RatioSchedule(0.0, 0.75, last=4, levels=4)
    for step in (0, 4):
        with torch.no_grad(), routing.on(one.noise, ratio=schedule.at(step)):
            one.run()
    assert seen[-11] == 16 and seen[-5] == 4


def test_prefix_and_forced_tokens_stay():
    one = case("lumina")
    force = torch.zeros(B, 16, dtype=torch.bool)
    force[:, 4:8] = True
    picked = []

    def spy(args, kwargs, ids):
        picked.append(ids)
        return select_lumina(args, kwargs, ids)

    with one.attach(spy).on(one.noise, prefix=TEXT, force_keep=force):
        one.run()
    for row in picked[0].tolist():
        assert len(row) == TEXT + 8 and set(range(TEXT)) | {TEXT + place for place in range(4, 8)} <= set(row)
    with pytest.raises(ValueError, match="force_keep holds 9 tokens .* keeps 8 of 16"):
        one.attach().on(one.noise, force_keep=torch.arange(16).expand(B, -1) < 9)


def test_routes_that_can_not_be_attached_are_refused():
    blocks = case("dit").blocks
    for routes, message in (
        ([Route(1, 3), Route(3, 4)], "1→3 and 3→4 overlap"),
        ([Route(1, -2, fp32="end")], "fp32='end' of the route 1→-2"),
        ([Route(1, 6)], "route end 6 is out of range for 6 blocks"),
        ([], "no routes"),
    ):
        with pytest.raises(ValueError, match=message):
            attach_routes(blocks, routes)
    with pytest.raises(ValueError, match="more than once"):
        attach_routes([*blocks, blocks[0]], [Route(1, 2)])
    assert not any(block._forward_hooks for block in blocks)


def test_ids_that_do_not_fit_are_refused():
    one = case("dit")
    routing, before = attach_routes(one.blocks, [Route(1, 2), Route(4, 5)]), one.run()
    ids = one.ids()
    for given, message in (
        ((ids,), "1 sets of ids for 2 routes"),
        ((ids, ids[0]), "shape \\(8,\\)"),
        ((ids, ids.int()), "int32"),
        ((ids, one.noise), "float32"),
    ):
        with pytest.raises(ValueError, match=message), routing.on_ids(*given):
            pass
    with pytest.raises(ValueError, match="3 tensors of noise for 2 routes"):
        routing.on(one.noise, one.noise, one.noise)
    for given in (ids[:1], ids[:2], ids.repeat(2, 1)):  # one row would do for the first sample alone
        with (
            pytest.raises(ValueError, match=f"ids of {len(given)} samples for tokens of 3"),
            routing.on_ids(given, ids),
        ):
            one.run()
    with pytest.raises(ValueError, match="names token .., but they are 0 to 15"), routing.on_ids(ids + 16, ids):
        one.run()
    assert torch.equal(one.run(), before)


def test_numbers_for_another_count_of_tokens_are_refused():
    """A forgotten prefix would route the first tokens alone."""
    one = case("dit")
    routing, before = one.attach(), one.run()
    for noise, prefix, count in ((one.noise[:, :9], 0, 9), (one.noise, 7, 23)):
        with pytest.raises(ValueError, match=f"of {count} tokens, but block 1 gets 16"):
            with routing.on(noise, prefix=prefix):
                one.run()
    with pytest.raises(ValueError, match="prefix is -1"):
        routing.on(one.noise, prefix=-1)
    assert torch.equal(one.run(), before)


def test_a_copy_of_a_model_has_routes_of_its_own():
    one = case("dit")
    one.model.routing = one.attach()
    copied = copy.deepcopy(one.model)
    before = one.run()

    def run_copy():
        return copied(**one.inputs).sample

    with one.model.routing.on(one.noise):
        inside = one.run()
        assert torch.equal(run_copy(), before)  # an average of weights sees all tokens
    with copied.routing.on(one.noise):
        assert torch.equal(run_copy(), inside) and torch.equal(one.run(), before)
    copied.routing.remove()
    assert not any(block._forward_hooks for block in copied.transformer_blocks)
    assert all(block._forward_hooks for block in one.blocks[1:-1])


def test_blocks_that_need_more_than_the_default_say_so():
    one = case("flux")
    with attach_routes(one.blocks, [Route(1, 1)]).on_ids(one.ids()):
        with pytest.raises(ValueError, match="keywords alone \\(hidden_states, .*give attach_routes a select"):
            one.run()
    one = case("flux")
    with attach_routes(one.blocks, [Route(1, 1)], select_flux).on_ids(one.ids()):
        with pytest.raises(ValueError, match="returned a tuple.*give attach_routes a join"):
            one.run()


def test_places_that_blocks_do_not_have_are_refused():
    for given, message in (
        ({"tokens": "x"}, "tokens is 'x'.*block 0 takes hidden_states, encoder_hidden_states, temb.*select="),
        ({"tokens": "encoder_hidden_states"}, "must name the first input of the blocks"),
        ({"output": "hidden_states"}, "output is 'hidden_states'.*place"),
    ):
        one = case("sd3")
        with pytest.raises(ValueError, match=message):
            attach_routes(one.blocks, Route(1, -2), **given)
        assert not any(block._forward_hooks or block._forward_pre_hooks for block in one.blocks)
    for name, given, message in (
        ("sd3", {"output": 1}, "keywords alone.*give attach_routes .* tokens="),
        ("sd3", {"tokens": "hidden_states"}, "returned a tuple.*give attach_routes .* output="),
        ("sd3", {"tokens": "hidden_states", "output": 2}, "output=2 .* block 1 returned 2 things"),
        ("sd3", {"tokens": "hidden_states", "output": 0}, "\\(3, 7, 32\\) kept tokens for ids of shape \\(3, 8\\)"),
        ("pixart", {"output": 1}, "output=1 .* block 1 returned a Tensor, no tuple"),
    ):
        one = case(name)
        routing = attach_routes(one.blocks, Route(1, -1), **given)
        with pytest.raises(ValueError, match=message), routing.on(one.noise):
            one.run()
    one = case("sd3")
    routing = attach_routes(one.blocks, Route(-1, -1), tokens="hidden_states", output=0)
    with pytest.raises(ValueError, match="returned a NoneType"), routing.on(one.noise):
        one.run()
    one = case("sd3")
    with pytest.raises(ValueError, match="of 9 tokens, but block 1 gets 16"), one.attach().on(one.noise[:, :9]):
        one.run()


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


def test_blocks_with_tokens_in_front_need_a_select():
    blocks = torch.nn.ModuleList([Mixing(batch_first=True), Mixing(batch_first=False)])
    with pytest.raises(ValueError, match="attention of block 1 has batch_first=False.*select="):
        attach_routes(blocks, Route(0, 0))
    assert not any(block._forward_hooks for block in blocks)
    attach_routes(blocks, Route(0, 0), select_first).remove()
    attach_routes(blocks[:1], Route(0, 0)).remove()


def test_what_is_no_tensor_or_function_is_refused_at_once():
    one = case("dit")
    for given, name in (({"select": None, "join": None}, "select"), ({"join": None}, "join")):
        with pytest.raises(ValueError, match=f"{name} is None.*{name}="):
            attach_routes(one.blocks, [Route(1, 2)], **given)
    routing = one.attach()
    with pytest.raises(ValueError, match="numbers are None.*torch.rand"):
        routing.on(None)
    with pytest.raises(ValueError, match="NaN"):
        routing.on(one.noise * torch.nan)
    for ids, message in ((None, "ids are None"), (one.ids()[:, [0, 1, 0]], "token . twice in sample 0")):
        with pytest.raises(ValueError, match=message), routing.on_ids(ids):
            pass


def test_contexts_do_not_nest_and_end_with_the_hooks():
    one = case("dit")
    routing = one.attach()
    with routing.on(one.noise):
        with pytest.raises(RuntimeError, match="on already"), routing.on(one.noise):
            pass
        inside = one.run()
    with routing.on(one.noise):
        assert torch.equal(one.run(), inside)  # the refused one has not switched them off for good
    routing.remove()
    with pytest.raises(RuntimeError, match="were removed"), routing.on(one.noise):
        pass
    with one.attach().on(one.noise):
        assert torch.equal(one.run(), inside)


def test_errors_leave_the_routes_off():
    one = case("dit")
    before, routing = one.run(), one.attach()
    with routing.on(one.noise):
        inside = one.run()

    def fail(*call):
        raise KeyError("of the caller")

    with pytest.raises(KeyError), routing.on(one.noise):
        fail()
    hook = one.blocks[2].ff.register_forward_hook(fail)
    with pytest.raises(KeyError), routing.on(one.noise):
        one.run()
    hook.remove()
    assert torch.equal(one.run(), before)
    with routing.on(one.noise):
        with pytest.raises(KeyError):
            hook = one.blocks[2].ff.register_forward_hook(fail)
            one.run()
        hook.remove()
        assert torch.equal(one.run(), inside)  # an error that the caller handles inside of the context
    assert torch.equal(one.run(), before)


@pytest.mark.parametrize("how", ["token", "row", "shared"])
def test_ids_are_a_function_of_seed_step_and_position(how):
    route, grid = Route(1, -2, select=how), (4, 4)

    def drawn(seed: int, step: int) -> torch.Tensor:
        return torch.rand(8, 16, generator=generator(seed, step, "route"))

    whole = choose_ids(route, drawn(0, 5), grid)
    for ranks, micro in ((1, None), (2, None), (2, 2), (4, 1)):
        parts = []
        for rank in range(ranks):
            for rows in split_batch(8, ranks, rank, micro):
                noise = drawn(0, 5)
                mine = noise[:1].expand(8, -1)[rows] if how == "shared" else noise[rows]
                parts.append(choose_ids(route, mine, grid))
        assert torch.equal(torch.cat(parts), whole)
    assert not any(torch.equal(choose_ids(route, drawn(*other), grid), whole) for other in ((0, 6), (1, 5), (2, 7)))


def test_a_schedule_ends_at_its_end_exactly():
    ends = [number / 100 for number in range(100)]
    assert all(RatioSchedule(0.03, end, last=2).at(2) == end for end in ends)  # 0.03 + (0.29 − 0.03) is less than 0.29


def test_a_part_of_the_batch_under_its_rows_is_that_part_of_the_whole():
    one = case("dit")
    routing = one.attach()
    with torch.no_grad():
        with routing.on(one.noise):
            whole = one.run()
        with routing.on(one.noise[1:]):
            part = one.model(**{name: value[1:] for name, value in one.inputs.items()}).sample
    torch.testing.assert_close(part, whole[1:])


COPIED = """
import sys, torch
before = set(sys.modules)
from routing_module import Route, run_blocks
from {package}.hooks import attach_routes
from {package}.ids import choose_ids
new = {{module.split(".")[0] for module in set(sys.modules) - before}}
assert new - {{"routing_module", "{top}"}} <= set(sys.stdlib_module_names), new
torch.manual_seed(0)
blocks = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(4))
x, noise, route = torch.randn(2, 16, 8), torch.rand(2, 16), Route(1, -2, 0.5, select="row")
looped = run_blocks(blocks, x, routes=[(route, choose_ids(route, noise, (4, 4)))])
routing = attach_routes(blocks, route)
with routing.on(noise, grid=(4, 4)):
    hooked = x
    for block in blocks:
        hooked = block(hooked)
torch.testing.assert_close(hooked, looped)
print(looped.double().sum().item(), looped.double().norm().item())
"""


@pytest.mark.parametrize("package", ["tread.routing", "routing"])
def test_copied_into_an_empty_project_it_works_there_as_here_by_torch_alone(tmp_path, package):
    """Reference: the same numbers from this repository's own files. A copy may keep the folder's place or not."""
    place = tmp_path / package.replace(".", "/")
    shutil.copytree(ROOT / "tread" / "routing", place, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "routing_module.py", tmp_path)
    code = COPIED.format(package=package, top=package.partition(".")[0])
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with torch.random.fork_rng(), contextlib.redirect_stdout(io.StringIO()) as here:
        exec(COPIED.format(package="tread.routing", top="tread"), {})
    assert done.stdout == here.getvalue()


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_of_the_page_run(number):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        left = {"__name__": "example"}
        exec(compile(EXAMPLES[number], f"docs/routing.md, example {number + 1}", "exec"), left)
    model = left.get("model") or left["network"]
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert any(parameter.grad is not None for parameter in model.parameters()) or left.get("optimizer")


def test_the_page_has_its_examples():
    models = ("DiT", "PixArt", "SD3", "Lumina2", "Flux")
    for needed in ("run_blocks(self.blocks", *(f" {name}Transformer2DModel(" for name in models)):
        assert any(needed in example for example in EXAMPLES)


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
        """What it returns, and all gradients."""
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
    found = model.results(X, attach_routes(model.blocks, routes), *ids)
    model = Plain()
    expected = run_blocks(model.blocks, model.first(X), routes=list(zip([replace(r, fp32="off") for r in routes], ids)))
    expected.square().sum().backward()
    assert all(map(torch.equal, found, [expected, *(p.grad for p in model.parameters())]))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_refused_where_tokens_rejoin_earlier(reentrant):
    """Of the block that ends the route; the others may be computed again, and all of them in one piece."""
    model = Plain(reentrant)
    routing = attach_routes(model.blocks, Route(3, 4, rejoin=1))
    expected = model.results(X, routing, IDS)
    for model.again in ((1, 2), (3,), (5,)):
        for one, other in zip(model.results(X, routing, IDS), expected):
            torch.testing.assert_close(one, other)
    for model.again in (range(6), (4,)):
        with pytest.raises(
            RuntimeError, match="block 4 .*activation checkpointing.*leave rejoin out, or use run_blocks"
        ):
            model.results(X, routing, IDS)
    model.again = ()
    assert all(map(torch.equal, model.results(X, routing, IDS), expected))
    with routing.on_ids(IDS):
        whole = checkpoint(model, X.clone().requires_grad_(), use_reentrant=reentrant)
        model.zero_grad()
        whole.square().sum().backward()
    for parameter, gradient in zip(model.parameters(), expected[1:]):
        torch.testing.assert_close(parameter.grad, gradient)
    with torch.no_grad(), routing.on_ids(IDS):  # nothing to compute again
        assert torch.equal(model(X), expected[0])


def test_recomputation_of_a_model_of_others_is_refused_and_leaves_it_whole():
    one = case("dit")
    before, routing = one.run(), one.attach(rejoin=0)
    one.model.enable_gradient_checkpointing()
    with pytest.raises(RuntimeError, match="block 4 was called without block 0 before it.*activation checkpointing"):
        with routing.on(one.noise):
            one.loss().backward()
    one.model.disable_gradient_checkpointing()
    assert torch.equal(one.run(), before)
    with routing.on(one.noise):
        one.loss().backward()


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


def test_what_a_model_does_to_tokens_that_are_to_rejoin_is_refused():
    """Writing into them, and other tokens than the numbers are of."""
    model = Plain()
    routing = attach_routes(model.blocks, Route(3, 4, rejoin=1))
    hook = model.blocks[2].register_forward_pre_hook(lambda module, args: X.add_(0))
    with torch.no_grad(), routing.on_ids(IDS):
        assert model(X).isfinite().all()  # what is not a block's input may be written to
    hook.remove()
    model.blocks[1].register_forward_hook(lambda module, args, output: (args[0].mul_(2), output)[1])
    with torch.no_grad(), routing.on_ids(IDS), pytest.raises(RuntimeError, match="wrote into what block 1 was given"):
        model(X)
    with (
        torch.no_grad(),
        routing.on(torch.rand(2, 7)),
        pytest.raises(ValueError, match="of 7 tokens, but block 1 gets"),
    ):
        model(X)
