"""Constants for predicting time and memory of training: GPUs' data sheets, the fractions of peak speed that are
reached, and the bytes that a block keeps for its backward pass and moves to or from memory."""

from collections.abc import Mapping, Sequence
from statistics import harmonic_mean
from types import MappingProxyType
from typing import NamedTuple

from torch import nn

from routing_module import Route
from tread.models.architectures import NetworkOptions
from tread.models.backbone import Backbone


class Device(NamedTuple):
    """A GPU's data sheet: memory in bytes, bf16 matrix products in FLOP/s, memory bandwidth in bytes/s."""

    memory: float
    products: float
    bandwidth: float


class Constants(NamedTuple):
    """Constants that predict a training step's time: fractions of a GPU's peak for matrix products (`reached`: hidden
    sizes, fractions), `attention` (by channels per head) and memory (`bandwidth`); `launch`: CPU seconds per block."""

    reached: tuple[Sequence[int], Sequence[float]] = (384, 768, 1024, 1152), (0.34, 0.52, 0.58, 0.6)  # widths D, shares
    attention: Mapping[int, float] = MappingProxyType({64: 0.19, 72: 0.13})  # channels per head → share
    bandwidth: float = 0.875  # share of Device.bandwidth
    launch: float = 1.1e-3  # seconds for the CPU to launch forward pass, backward pass and update of a compiled block


class BlockBytes(NamedTuple):
    """Bytes per token and channel of a compiled bf16 block. `saved`: kept for the backward pass; `budget`: that with
    train.memory=budget, which recomputes some. `moved`: read or written by forward and backward together, outside of
    matrix products and attention; `moved_in_bf16`: the same with bf16 tokens between blocks (train.residual=bf16)."""

    saved: float
    moved: float
    budget: float
    moved_in_bf16: float


PREDICTED = Constants()
DEVICES = {
    "h200": Device(141e9, 989e12, 4.8e12),
    "h100": Device(80e9, 989e12, 3.35e12),
    "a100": Device(80e9, 312e12, 2.04e12),
    "4090": Device(24e9, 165e12, 1.01e12),
}
DIT = ("layer", "gelu", "sincos")  # DiT's norm, mlp and positions
DIT_BYTES = {  # (whether norm, mlp and positions are DIT, else LightningDiT's; whether there is text) → a block's bytes
    (True, False): BlockBytes(36.2, 179, 24.2, 137),
    (False, False): BlockBytes(36.2, 205, 28.9, 171),
    (True, True): BlockBytes(48.1, 239, 32.2, 173),
    (False, True): BlockBytes(48.1, 263, 38.9, 206),
}
BLOCK_BYTES = {  # other architectures → a block's bytes; tests/runtime/test_compiling.py checks all with torch's graphs
    "rwkv": BlockBytes(68.5, 535, 44.6, 495),
    "mamba": BlockBytes(126.6, 1201, 84.6, 1159),
}
VALUE_BYTES = BlockBytes(2, 16, 0, 14)  # added for a block that mixes in the first block's values
NORM_BYTES = BlockBytes(6.1, 30, 4.5, 30)  # added for model.qk_norm
MLP_BYTES = BlockBytes(4, 12.8, 2.3, 12.8)  # added for each unit of model.mlp_ratio above 4
TOKEN_BYTES = BlockBytes(1306, 24170, 1306, 24170)  # added per token of Mamba, whatever the width: the scan's B and C
END_BYTES = BlockBytes(30, 41, 30, 41)  # of embedding and last layer together, per token and channel
UPDATE_BYTES = 44  # per parameter, read or written by gradient clipping, AdamW and one EMA
SIZES = {"S": 384, "B": 768, "L": 1024, "XL": 1152}  # hidden sizes of DiTs


def block_bytes(options: NetworkOptions, width: int, block: nn.Module | None = None) -> BlockBytes:
    """Return the BlockBytes of a `block` (None: the network's usual kind) of hidden size `width` in a network of
    `options`. Where the tables were measured with other options, it is within 15% of measurements (`budget`: 30%)."""
    scans = hasattr(options, "directions") and not hasattr(block, "attn")  # not an attention block among Mamba's
    parts = tuple(getattr(options, name, usual) for name, usual in zip(("norm", "mlp", "positions"), DIT))
    row = DIT_BYTES[parts == DIT, options.takes_text]
    if scans or not hasattr(options, "directions"):
        row = BLOCK_BYTES.get(options.architecture, row)
    mixing, normed = (getattr(options, name, False) for name in ("value_residual", "qk_norm"))
    terms = [(1.0, row), (options.mlp_ratio - 4, MLP_BYTES), (mixing, VALUE_BYTES), (normed, NORM_BYTES)]
    if scans:
        state, scanned = options.state / 64, options.directions * options.expand / 4
        terms[0] = 0.3 + scanned * (0.58 + 0.12 * state), row
        terms += [(scanned * state / width, TOKEN_BYTES)]
    return BlockBytes(*(sum(weight * row[column] for weight, row in terms) for column in range(4)))


def blocks_run(network: Backbone, routes: Sequence[Route]) -> list[tuple[nn.Module, int, int]]:
    """Return (block, number of tokens on which it runs, its hidden size) for each block, MaskDiT's decoder included."""
    blocks = [(block, count, network.hidden_size) for block, count in zip(network.blocks, network.tokens_run(routes))]
    decoder = getattr(network, "decoder_blocks", ())
    return blocks + [(block, network.num_tokens, network.decoder_hidden_size) for block in decoder]


def measured_constants(result: Mapping, device: Device) -> Constants:
    """Return the default Constants, updated by measurements on `device` (`result`: JSON of benchmarks/gpu_check.py)."""
    rows = {name: row for part in ("machine", "host") for name, row in result.get(part, {}).get("rows", {}).items()}

    def values(start: str, key: str) -> list[float]:
        return [row[key] for name, row in rows.items() if name.startswith(start) and key in row]

    constants = PREDICTED
    if all(speeds := [values(f"products of {size}, ", "measured") for size in SIZES]):
        shares = [harmonic_mean(measured) * 1e12 / device.products for measured in speeds]
        constants = constants._replace(reached=(tuple(SIZES.values()), shares))
    if all(rates := [values(f"attention, heads of {head}, 256 tokens, ", "tflops") for head in PREDICTED.attention]):
        shares = [max(measured) * 1e12 / device.products for measured in rates]
        constants = constants._replace(attention=dict(zip(PREDICTED.attention, shares)))
    if copied := values("copy", "measured"):
        constants = constants._replace(bandwidth=copied[0] * 1e9 / device.bandwidth)
    if launched := values("S's depth, dense, compiled", "ms_a_block"):
        constants = constants._replace(launch=launched[0] / 1e3)
    return constants
