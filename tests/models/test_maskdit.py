"""MaskDiT against golden numbers of its own code, published counts, torch's counter, and its own dense forward."""

import modes
import pytest
import torch
from conftest import size_of, state_of
from modes import assert_golden_gradients, assert_modes_agree, assert_near, batch, counted_flops, drawn, hot
from safetensors.torch import load_file
from torch.testing import assert_close

from routing_module import Record, Route
from tread.diffusion.edm import EDM
from tread.diffusion.token_losses import kept_error, reconstruction_error
from tread.models.maskdit import MaskDiT
from tread.runtime.tensor_files import plain_names

DECODER = {"decoder_hidden_size": 32, "decoder_depth": 2, "decoder_heads": 4}
TINY = {"input_size": 8, "hidden_size": 64, "depth": 4, "num_heads": 4, "num_classes": 10, **DECODER}
HALF = Route(0, -1, 0.5, fp32="off")
ENCODERS = {"S": (384, 12, 6, 68.12), "B": (768, 12, 12, 175.58)}
ENCODERS |= {"L": (1024, 24, 16, 509.78), "XL": (1152, 28, 16, 730.12)}


def tiny():
    """Nothing is zero but the null class."""
    network = hot(MaskDiT(**TINY), 0.2)
    network.y_embedder.embedding_table.weight.data[-1] = 0
    return network


@pytest.fixture
def golden(asset):
    """(numbers, network with their weights, labels, routes)."""
    g = load_file(asset("golden/maskdit_tiny_hot.safetensors"))
    network = MaskDiT(**TINY)
    network.load_state_dict(plain_names(state_of(g)), strict=True)
    labels = torch.where(g["in.labels_onehot"].any(dim=1), g["in.labels_onehot"].argmax(dim=1), 10)
    return g, network, labels, [(HALF, g["in.ids_keep"])]


def test_golden_forward_and_losses(golden):
    g, network, y, routes = golden
    record = Record((3,))
    with torch.no_grad():
        assert_near(network(g["in.net_x"], g["in.net_t_cnoise"], y, routes, record=record), g["out.F_masked"])
        assert_near(record.outputs[3][0], g["out.encoder_kept"])
        assert all(torch.equal(ids, routes[0][1]) for ids in (record.outputs[3][1], *record.ids))
        assert_near(network(g["in.net_x"], g["in.net_t_cnoise"], y), g["out.F_unmasked"])
        assert_near(EDM().denoise(network, g["in.noisy"], g["in.sigma"], y), g["out.D_unmasked"])
        x = g["in.eval_x_sigma0.5"]
        assert_near(EDM().denoise(network, x, torch.tensor(0.5), y), g["out.eval_D_sigma0.5"])
        null = torch.full_like(y, 10)
        assert_near(EDM().denoise(network, x, torch.tensor(0.5), null), g["out.eval_D_sigma0.5_null"])


def test_golden_losses_and_gradients(golden):
    """Denoising of kept patches and a tenth of the reconstruction."""
    g, network, y, routes = golden
    edm, ids = EDM(), [g["in.ids_keep"]]
    squared, denoised, noisy = edm.errors(network, g["in.images"], y, g["in.sigma"], g["in.noise_unit"], routes)
    assert_near(denoised, g["out.D_masked"])
    denoising = edm.weight(g["in.sigma"]) * kept_error(squared, ids, 2)
    masked = reconstruction_error(denoised, noisy, ids, 2)
    assert_close(denoising, g["out.dsm_per_sample"], rtol=1e-5, atol=1e-5)
    assert_close(masked, g["out.mae_per_sample"], rtol=1e-5, atol=1e-5)
    total = denoising + g["meta.mae_coef"] * masked
    assert_close(total, g["out.total_per_sample"], rtol=1e-5, atol=1e-5)
    total.mean().backward()
    table = network.y_embedder.embedding_table.weight.grad
    assert not table[-1].any()  # of the null class, though a sample has it
    assert_golden_gradients(network, g, 9, "grad.model.", **{"y_embedder.embedding_table.weight": table[:-1].T})


@pytest.mark.parametrize("size", ENCODERS)
def test_published_parameter_counts(size):
    """Trainable, without the null row, to 10,000."""
    dim, depth, heads, millions = ENCODERS[size]
    with torch.device("meta"):
        network = MaskDiT(hidden_size=dim, depth=depth, num_heads=heads)
    assert round((size_of(network) - dim) / 1e6, 2) == millions


@pytest.mark.parametrize("more", [{}, {"mlp_ratio": 3.0, "learn_sigma": True, "decoder_depth": 3}])
@pytest.mark.parametrize("routes", [(), (HALF,), (Route(0, 3, 0.75, "off", "row"),)])
def test_flops_agree_with_torchs_counter(more, routes):
    network = MaskDiT(**{**TINY, **more})
    pairs = drawn(routes[0]) if routes else ()
    assert 3 * network.forward_flops(routes) == counted_flops(network, *batch(3, 8), pairs)
    assert network.forward_flops(upto=1) == counted_flops(network.output_of, 1, *batch(1, 8))


def test_a_decoder_of_fixed_size_costs_a_small_encoder_more_than_it_saves():
    """Blocks only, in GMAC: published S 9.9 beside DiT's 6.05, XL 65.4 beside 118.6."""
    for size, masked, dense in (("S", 9.9, 6.05), ("B", 18.3, 23.0), ("XL", 65.4, 118.6)):
        dim, depth, heads, _ = ENCODERS[size]
        with torch.device("meta"):
            network = MaskDiT(hidden_size=dim, depth=depth, num_heads=heads)
        encoder = sum(block.multiply_adds(256) for block in network.blocks) / 1e9
        half = sum(block.multiply_adds(128) for block in network.blocks) / 1e9
        decoder = sum(block.multiply_adds(256) for block in network.decoder_blocks) / 1e9
        assert encoder == pytest.approx(dense, rel=0.01) and half + decoder == pytest.approx(masked, rel=0.01)


def test_dropping_nothing_is_the_dense_forward_bit_for_bit():
    network, inputs = tiny(), batch(3, 8)
    with torch.no_grad():
        dense = network(*inputs)
        assert torch.equal(network(*inputs, drawn(Route(0, 3, 0.0, "off"))), dense)
        assert not torch.isclose(network(*inputs, drawn(HALF)), dense).all()


def test_a_masked_place_knows_its_own_pixels_from_nowhere():
    """The dropped pixels change the output nowhere."""
    network, (x, t, y), ((route, ids),) = tiny(), batch(3, 8), drawn(HALF)
    around = torch.ones(3, 16).scatter(1, ids, 0).view(3, 1, 4, 4)
    other = x + around.repeat_interleave(2, 2).repeat_interleave(2, 3) * torch.randn(3, 4, 8, 8)
    with torch.no_grad():
        assert torch.equal(network(other, t, y, [(route, ids)]), network(x, t, y, [(route, ids)]))


def test_gradients_reach_the_mask_token_and_all_but_the_null_class():
    """Without a route the mask token's is zero, not absent: processes that share gradients wait for each."""
    network = tiny()
    x, t, _ = batch(3, 8)
    for routes in (drawn(HALF), ()):
        network.zero_grad(set_to_none=True)
        network(x, t, torch.tensor([0, 1, 10]), routes).square().mean().backward()
        assert all(item.grad is not None for item in network.parameters())
        assert network.mask_token.grad.any() == bool(routes)
        assert not network.y_embedder.embedding_table.weight.grad[10].any()
        assert network.y_embedder.embedding_table.weight.grad[:2].all()


def test_untrained_network_outputs_zero_and_its_null_class_is_zero():
    modes.assert_starts_at_zero(MaskDiT, hidden_size=64, num_heads=4, **DECODER)
    for init in ("adaln_zero", "xavier"):
        network = MaskDiT(init=init, **TINY)
        table = network.y_embedder.embedding_table.weight
        assert not table[10].any() and table[:10].all() and network.mask_token.all()


@pytest.mark.slow
def test_bf16_recomputation_and_compiled_blocks_agree_with_the_plain_network():
    """One graph for the encoder's blocks with all tokens, one with kept ones, and one for the decoder's."""
    network, inputs, routes = tiny(), batch(3, 8), drawn(HALF)
    assert_modes_agree(network, lambda: [network(*inputs, which) for which in ((), routes)], graphs=3 + 2)


@pytest.mark.parametrize(
    "routes, shown",
    [
        ([Route(1, -1, 0.5, "off")], "1→-1.*one route, start 0, end -1, fp32 off"),
        ([Route(0, 2, 0.5, "off")], "0→2.*one route"),
        ([Route(0, -1, 0.5)], "fp32=auto.*fp32 off"),
        ([Route(0, 1, 0.5, "off"), Route(2, 3, 0.5, "off")], "0→1.*2→3.*one route"),
    ],
)
def test_other_routes_are_refused(routes, shown):
    with pytest.raises(ValueError, match=shown):
        MaskDiT(**TINY)(*batch(3, 8), [drawn(route)[0] for route in routes])


@pytest.mark.parametrize("sizes", [{"decoder_hidden_size": 30}, {"decoder_heads": 5}, {"num_heads": 5}], ids=str)
def test_sizes_that_can_not_be_are_refused(sizes):
    with pytest.raises(ValueError, match="hidden_size .* is not a multiple of"):
        MaskDiT(**{**TINY, **sizes})
