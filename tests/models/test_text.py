"""Text networks against dit.py and lightning.py, a twin written token by token, and torch's FLOPs counter."""

import math
from types import SimpleNamespace

import modes
import pytest
import torch
from conftest import CPU
from modes import assert_modes_agree, counted_flops, drawn, hot
from torch.testing import assert_close

from dit import DiT, attend
from rf import RF
from routing_module import Route
from tread.checkpoints.lora import Lora
from tread.diffusion.edm import EDM
from tread.diffusion.guidance import Branch, Guidance, guided
from tread.diffusion.sampling import Model, Sampler, draw
from tread.models import conditions
from tread.models.conditions import Text
from tread.models.lightning import LightningDiT
from tread.models.text_dit import TextDiT
from tread.runtime.device import autocast

SIZES = {"input_size": 4, "patch_size": 1, "hidden_size": 16, "depth": 4, "num_heads": 2}
ENCODER = {"text_tokens": 5, "text_width": 6, "text_pooled": 3}
UNPOOLED = {"text_tokens": 5, "text_width": 6}
WORDS = {"text_tokens": 5, "vocabulary": 9}
LIGHTNING = {"norm": "rms", "mlp": "swiglu", "positions": "rope", "qk_norm": True}
ROUTE = Route(1, 2, 0.5, "off")
LENGTHS = (5, 2, 1)


def of_text(name: str) -> bool:
    """Whether a text network's parameter is of the text, and so in no other network."""
    return name.startswith(("y_embedder.", "null_")) or ".cross_" in name


def tiny(std=0.3, seed=0, **more):
    return hot(TextDiT(**{**SIZES, **(more or ENCODER)}), std, seed)


def texts(network, seed=1, lengths=LENGTHS):
    """A text of the network's encoder for each length."""
    generator, given, size = torch.Generator().manual_seed(seed), network.y_embedder, len(lengths)
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    if given.vocabulary:
        return Text(torch.randint(given.vocabulary, (size, 5), generator=generator), mask)
    tokens = torch.randn(size, 5, given.width, generator=generator)
    return Text(tokens, mask, torch.randn(size, given.pooled, generator=generator) if given.pooled else None)


def batch(size=3):
    return modes.batch(size)[:2]


every_encoder = pytest.mark.parametrize("encoder", [ENCODER, UNPOOLED, WORDS], ids=["encoder", "unpooled", "words"])


@every_encoder
@pytest.mark.parametrize("choices, other", [({}, DiT), (LIGHTNING, LightningDiT)], ids=["dit", "lightning"])
def test_at_the_start_it_is_the_network_without_text(encoder, choices, other):
    """With its label rows zero, of weights that are not: bit for bit, whatever the text, routed or not, in bf16 too.
    Reference: dit.py and lightning.py."""
    torch.manual_seed(0)
    plain, network = other(**SIZES, num_classes=3, **choices), TextDiT(**SIZES, **encoder, **choices)
    assert network(*batch(), texts(network)).abs().max() == 0  # adaLN-Zero's
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    torch.nn.init.zeros_(plain.y_embedder.embedding_table.weight)
    shared = {name: value for name, value in plain.state_dict().items() if not of_text(name)}
    assert shared.keys() == {name for name in network.state_dict() if not of_text(name)}
    network.load_state_dict(shared, strict=False)
    for precision in ("fp32", "bf16"):
        for routes in ((), drawn(ROUTE)):
            with autocast(CPU, precision), torch.no_grad():
                actual = network(*batch(), texts(network), routes)
                assert torch.equal(actual, plain(*batch(), torch.arange(3), routes)) and actual.abs().max() > 0.1


@pytest.mark.parametrize("init", ["adaln_zero", "xavier"])
def test_what_brings_text_in_starts_at_zero_and_learns(init):
    network = TextDiT(**SIZES, **ENCODER, init=init)
    zeros = {name for name, value in network.named_parameters() if of_text(name) and not value.any()}
    zeros = {name for name in zeros if "bias" not in name}
    assert zeros == {"y_embedder.pooled_proj.weight", *(f"blocks.{i}.cross_attn.proj.weight" for i in range(4))}
    network = tiny()
    network(*batch(), texts(network)).square().mean().backward()
    assert all(value.grad.any() for name, value in network.named_parameters())


@every_encoder
@pytest.mark.parametrize("choices", [{}, LIGHTNING], ids=["dit", "lightning"])
def test_padding_counts_for_nothing_and_a_word_does(encoder, choices):
    network, (x, t) = tiny(**encoder, **choices), batch()
    y, routes = texts(network), drawn(ROUTE)
    padding = torch.full_like(y.tokens, 10**6 if network.y_embedder.vocabulary else math.nan)
    masked = y.mask if network.y_embedder.vocabulary else y.mask.unsqueeze(2)
    with torch.no_grad():
        actual = network(x, t, y, routes)
        assert torch.equal(network(x, t, y._replace(tokens=torch.where(masked, y.tokens, padding)), routes), actual)
        for row, length in enumerate(LENGTHS):
            for word in range(length):
                tokens = y.tokens.clone()
                old = tokens[row, word].clone()  # of channels in another order, as LayerNorm takes away a constant
                tokens[row, word] = old.flip(0) if old.ndim else (old + 1) % 9
                changed = (network(x, t, y._replace(tokens=tokens), routes) - actual).abs().amax(dim=(1, 2, 3)) > 1e-6
                assert changed.tolist() == [number == row for number in range(3)]  # other samples' pictures are theirs


def naive(network, x, t, y, routes):
    """In fp64, sample by sample, token by token and head by head; norms without weights, only real words."""
    weights = {name: value.double() for name, value in network.state_dict().items()}
    heads, depth, D = 2, len(network.blocks), 16

    def linear(name, vector):
        return weights[f"{name}.weight"] @ vector + weights[f"{name}.bias"]

    def norm(vector):
        return (vector - vector.mean()) / (vector.var(correction=0) + 1e-6).sqrt()

    def attend(queries, keys, values):
        out = []
        for query in queries:
            parts = []
            for q, k, v in zip(query.chunk(heads), *(torch.stack(part).chunk(heads, dim=1) for part in (keys, values))):
                scores = [(q @ one).item() / math.sqrt(D // heads) for one in k]
                shares = [math.exp(score) / sum(map(math.exp, scores)) for score in scores]
                parts.append(sum(share * one for share, one in zip(shares, v)))
            out.append(torch.cat(parts))
        return out

    outputs = []
    for b in range(len(x)):
        words = [one.double() for one, there in zip(y.tokens[b], y.mask[b]) if there]
        if network.y_embedder.vocabulary:
            table, places = (weights[f"y_embedder.{name}.weight"] for name in ("words", "places"))
            words = [table[number.long()] + places[place] for place, number in enumerate(words)]
        text = [linear("y_embedder.proj", norm(word)) for word in words]
        c = network.double().t_embedder.mlp(network.t_embedder.frequencies(t[b : b + 1]).double())[0]
        whole = sum(words) / len(words) if y.pooled is None else y.pooled[b].double()
        c = c + linear("y_embedder.pooled_proj", norm(whole))
        act = c * torch.sigmoid(c)
        patches = x[b].double().flatten(1).T
        kernel = weights["x_embedder.proj.weight"].flatten(1)
        tokens = [kernel @ patch + weights["x_embedder.proj.bias"] for patch in patches]
        tokens = [token + place for token, place in zip(tokens, weights["pos_embed"][0])]
        kept = list(range(16))
        for index in range(depth):
            for route, ids in routes:
                kept = ids[b].tolist() if index == route.start else kept
            block = f"blocks.{index}"
            shift1, scale1, gate1, shift2, scale2, gate2 = linear(f"{block}.adaLN_modulation.1", act).chunk(6)
            qkv = [linear(f"{block}.attn.qkv", norm(tokens[i]) * (1 + scale1) + shift1).chunk(3) for i in kept]
            for i, one in zip(kept, attend(*map(list, zip(*qkv)))):
                tokens[i] = tokens[i] + gate1 * linear(f"{block}.attn.proj", one)
            asked = [linear(f"{block}.cross_attn.q", norm(tokens[i])) for i in kept]
            kv = [linear(f"{block}.cross_attn.kv", word).chunk(2) for word in text]
            for i, one in zip(kept, attend(asked, *map(list, zip(*kv)))):
                tokens[i] = tokens[i] + linear(f"{block}.cross_attn.proj", one)
            for i in kept:
                hidden = linear(f"{block}.mlp.fc1", norm(tokens[i]) * (1 + scale2) + shift2)
                hidden = torch.nn.functional.gelu(hidden, approximate="tanh")
                tokens[i] = tokens[i] + gate2 * linear(f"{block}.mlp.fc2", hidden)
            for route, _ in routes:
                kept = list(range(16)) if index == route.end else kept
        shift, scale = linear("final_layer.adaLN_modulation.1", act).chunk(2)
        pixels = [linear("final_layer.linear", norm(token) * (1 + scale) + shift) for token in tokens]
        outputs.append(torch.stack(pixels).T.reshape(4, 4, 4))
    return torch.stack(outputs)


@every_encoder
@pytest.mark.parametrize("routes", [(), drawn(ROUTE, 2)], ids=["dense", "routed"])
def test_it_is_its_twin_written_token_by_token(encoder, routes):
    network, (x, t) = tiny(0.2, **encoder), batch(2)
    y = texts(network, lengths=(3, 1))
    with torch.no_grad():
        assert_close(network(x, t, y, routes).double(), naive(network, x, t, y, routes), rtol=1e-4, atol=1e-4)


@every_encoder
@pytest.mark.parametrize("process", [EDM(), RF()], ids=["edm", "rf"])
def test_no_text_in_guidance_is_the_empty_caption(encoder, process):
    """The weak branch of cfg is a run on the empty caption's own encoding, bit for bit; so is what number len(prompts)
    samples, whatever it stands beside."""
    network = tiny(**encoder).eval()
    empty, y = texts(network, 7, (1,)), texts(network)
    network.take_null(empty)
    x, level = batch()[0], torch.tensor(0.5)
    branches = [Branch(process_denoise(process, network), one) for one in (y, network.null(3))]
    with torch.no_grad():
        strong, weak = (branch.denoise(x, level, branch.y, ()) for branch in branches)
        alone = process.denoise(network, x, level, conditions.rows(empty, torch.zeros(3, dtype=torch.int64)))
        assert torch.equal(weak, alone) and not torch.isclose(strong, weak).any(dim=1).all()
        both = guided(*branches, lambda call: 3.0)(x, level)  # one batch of six
        assert_close(both, weak + 3 * (strong - weak), rtol=1e-4, atol=1e-4)
        model, sampler = Model(process, network, prompts=y), Sampler(4, 3)
        null = torch.cat(list(draw(model, [5, 6, 7], torch.tensor([3, 2, 3]), sampler)))
        joined = Model(process, network, prompts=conditions.join(y, empty))
        assert torch.equal(null, torch.cat(list(draw(joined, [5, 6, 7], torch.tensor([3, 2, 3]), sampler))))
        assert (model.num_labels, joined.num_labels) == (3, 4)


def process_denoise(process, network):
    return lambda x, level, y, routes: process.denoise(network, x, level, y, routes)


GUIDANCES = [
    Guidance("cfg", 1.5),
    Guidance("sparse", 1.5, 0.25, 0.5),
    Guidance("sparse_cfg", 1.5, 0.0, 0.5),
    Guidance("sparse_uncond", 1.5, 0.0, 0.5),
    Guidance("autoguidance", 1.5, checkpoint="other"),
]


@pytest.mark.parametrize("guidance", GUIDANCES, ids=lambda guidance: guidance.kind)
def test_guidance_works_as_of_classes(guidance):
    """A sample is given by its seed and prompt alone, whatever its batch; prompts matter where a branch sees them."""
    network, other = (tiny(seed=seed).eval() for seed in (0, 1))
    network.take_null(texts(network, 7, (1,)))
    model = Model(EDM(), network, (ROUTE,), texts(network))
    weak = Model(EDM(), other, (ROUTE,)) if guidance.checkpoint else None
    sampler = Sampler(2, 2, guidance=guidance)

    def samples(labels, seeds):
        return torch.cat(list(draw(model, seeds, torch.tensor(labels), sampler, weak)))

    actual = samples([0, 1, 2], [4, 4, 9])
    assert torch.equal(samples([2], [9])[0], actual[2]) and actual.isfinite().all()
    assert torch.equal(actual[0], actual[1]) == (guidance.kind == "sparse_uncond")
    with pytest.raises(ValueError, match="classes lie in 0..4, but must lie in 0..2, or be 3"):
        samples([0, 4], [1, 2])


def test_labels_and_texts_share_their_functions():
    """Each part of a text is treated as a row of labels is."""
    network = tiny()
    y, labels = texts(network), torch.tensor([4, 7, 9])
    assert conditions.count(y) == conditions.count(labels) == 3
    null, gone = texts(network, 8, (1,)), torch.tensor([0.05, 0.2, 0.0])
    done = {
        "rows": (lambda one, _: conditions.rows(one, slice(1, 3)), [7, 9]),
        "chosen": (lambda one, _: conditions.rows(one, torch.tensor([2, 2])), [9, 9]),
        "join": (lambda one, _: conditions.join(one, conditions.rows(one, slice(0, 1))), [4, 7, 9, 4]),
        "pad": (lambda one, _: conditions.pad(one, 5), [4, 7, 9, 9, 9]),
        "replaced": (lambda one, empty: conditions.replaced(one, gone < 0.1, empty), [10, 7, 10]),
        "to": (lambda one, _: conditions.to(one, "cpu"), [4, 7, 9]),
    }
    of = {4: 0, 7: 1, 9: 2}
    for function, expected in done.values():
        assert function(labels, torch.tensor([10])).tolist() == expected
        actual = function(y, null)
        for name in Text._fields:
            rows = [getattr(y, name)[of[one]] if one in of else getattr(null, name)[0] for one in expected]
            assert torch.equal(getattr(actual, name), torch.stack(rows))
    assert conditions.rows(Text(y.tokens, y.mask), slice(0, 1)).pooled is None


@pytest.mark.parametrize("encoder", [ENCODER, WORDS], ids=["encoder", "words"])
@pytest.mark.parametrize("routes", [(), (ROUTE,)], ids=["dense", "routed"])
def test_flops_are_those_that_torch_counts(encoder, routes):
    network = tiny(**encoder)
    given = *batch(2), texts(network, lengths=(5, 2)), drawn(ROUTE, 2) if routes else ()
    assert 2 * network.forward_flops(routes) == counted_flops(network, *given)
    products = [2 * 16 * (tokens**2 + tokens * 5) for tokens in ((16, 8, 8, 16) if routes else (16,) * 4)]
    assert network.forward_flops(routes) - network.forward_flops(routes, attention=False) == 2 * sum(products)
    pytest.importorskip("peft")
    Lora(rank=3).adapt(network)
    assert 2 * network.forward_flops(routes) == counted_flops(network, *given)


@pytest.mark.parametrize("choices", [{}, LIGHTNING], ids=["dit", "lightning"])
@pytest.mark.slow
def test_bf16_recomputation_and_compiled_blocks_agree_with_the_plain_network(choices):
    """One graph for all tokens, one for kept ones, and two of the ends, whatever the lengths of the captions."""
    network, (x, t) = tiny(**ENCODER, **choices), batch()
    captions, routes = (texts(network), texts(network, lengths=(1, 1, 4))), drawn(Route(1, 2, 0.5, "end"))
    assert_modes_agree(network, lambda: [network(x, t, y, which) for y in captions for which in ((), routes)], graphs=4)


@pytest.mark.parametrize(
    "encoder, change, shown",
    [
        (ENCODER, lambda y: torch.arange(3), "y is Tensor, but this network takes Text"),
        (ENCODER, lambda y: conditions.rows(y, slice(0, 2)), r"tokens have shape \(2, 5, 6\), .* \(3, 5, 6\)"),
        (ENCODER, lambda y: y._replace(pooled=None), r"pooled have shape None, .* \(3, 3\)"),
        (ENCODER, lambda y: y._replace(mask=y.mask & False), "no token at all: the empty caption is one begin token"),
    ],
)
def test_texts_of_another_encoder_are_refused(encoder, change, shown):
    network = tiny(**encoder)
    with pytest.raises(ValueError, match=shown):
        network(*batch(), change(texts(network)))


@pytest.mark.parametrize("more", [{}, {**ENCODER, "vocabulary": 4}, {**WORDS, "text_pooled": 3}])
def test_sizes_that_do_not_fit_are_refused(more):
    with pytest.raises(ValueError, match="do not fit"):
        TextDiT(**SIZES, **{"text_tokens": 5, **more})


@pytest.mark.parametrize("keys", [64, 77])
def test_attention_over_padded_words_is_the_formula(keys):
    """Softmax over the words alone, forward and backward; 64 is where cuDNN had a fault."""
    q, k, v = (torch.randn(3, n, 2, 8, generator=torch.Generator().manual_seed(n)) for n in (5, keys, keys + 1))
    v, mask = v[:, :keys], torch.arange(keys) < torch.tensor([[1], [keys - 1], [keys]])
    found, expected, layer = [], [], SimpleNamespace(q_norm=None, proj=lambda x: x)
    for how in (found, expected):
        given = [each.clone().requires_grad_() for each in (q, k, v)]
        if how is found:
            out = attend(layer, *given, mask=mask).unflatten(2, (2, 8))
        else:
            scores = torch.einsum("bnhd,bmhd->bhnm", *given[:2]) / 8**0.5
            weights = scores.masked_fill(~mask[:, None, None], -math.inf).softmax(-1)
            out = torch.einsum("bhnm,bmhd->bnhd", weights, given[2])
        out.square().sum().backward()
        how += [out, *(each.grad for each in given)]
    assert_close(found, expected)
