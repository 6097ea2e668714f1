"""Alignment losses: a block's projected output is compared, token by token, with targets from the same picture.

kind "repa"  (Yu et al. 2025, arXiv 2410.06940): −cosine with a frozen encoder's patch features of the clean picture.
kind "self"  (SRA; Jiang et al. 2025, arXiv 2505.02831): smooth L1 to a deeper block's output in the averaged (EMA)
             network, the teacher. It sees all tokens of the same latents, noise and labels, at a lower noise level.

Tokens may skip an aligned block (see Route in routing_module.py): only the kept tokens are then compared, with the
targets at their positions. The projector is an MLP without a norm before it. Several aligned blocks share the projector
and the targets, and the loss is the mean over the blocks. Sampling needs neither projector nor targets.

Shapes: B samples, N tokens, K of them in the aligned block, D hidden size, z channels of the targets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from routing_module import Record, Route, Routes, gather_tokens
from tread.data.dataset import Batch
from tread.diffusion.process import Process
from tread.diffusion.token_beside import noised_token
from tread.encoders.vision import Encoder
from tread.models.backbone import Backbone
from tread.models.conditions import Condition
from tread.runtime.device import Precision, has_bf16
from tread.runtime.schema import Count, CountOrZero, Positive, Share, written

BETA = 0.05  # where smooth L1 turns from a parabola into a line (SRA)


@dataclass(frozen=True)
class Alignment:
    """Settings of an alignment loss, explained in configs/defaults.yaml. Raises ValueError for conflicting settings."""

    kind: Literal["none", "repa", "self"] = "none"
    block: int | None = None
    weight: Positive = 0.5
    width: Count = 2048
    encoder: str | None = None
    source: Literal["stored", "live"] = "stored"
    teacher: int | None = None
    gap: Share = 0.2
    precision: Precision = "fp32"
    blocks: tuple[int, ...] | None = None
    until: Count | None = None
    fade: CountOrZero = 0

    def __post_init__(self) -> None:
        if self.blocks is not None and (self.block is not None or not self.blocks):
            given = f"alignment.blocks is {written(self.blocks)} and alignment.block {written(self.block)}"
            raise ValueError(f"{given}: name one block or more, by one of the two keys")
        if self.fade > (self.until or 0):
            raise ValueError(f"alignment.fade is {self.fade}, but alignment.until {written(self.until)}: fade ≤ until")

    def weight_at(self, step: int) -> float:
        """Return the weight of alignment in the loss of step `step` (0, 1, …): `weight`, which falls linearly to 0 over
        the `fade` steps before step `until` and stays 0 from there on. Without alignment it is 0."""
        if self.kind == "none" or (self.until is not None and step >= self.until):
            return 0.0
        return self.weight if not self.fade else self.weight * min(1.0, (self.until - step) / self.fade)

    def encoder_precision(self, training: str, device: torch.device) -> str:
        """Return "fp32" or "bf16" for an encoder that runs during training (source="live"). precision="auto" means the
        precision of the training steps, `training`, if `device` is a GPU with bf16, else fp32."""
        auto = training if has_bf16(device) else "fp32"
        return auto if self.precision == "auto" else self.precision

    def resolve(self, depth: int) -> tuple[tuple[int, ...], int]:
        """Return (indices of the aligned blocks, ascending and distinct; index of the teacher's block), from 0, in a
        network of `depth` blocks. Negative settings count from the end. Raises ValueError for a block out of range."""
        named = [("block", self.block), *(("blocks", each) for each in self.blocks or ()), ("teacher", self.teacher)]
        for name, value in named:
            if value is not None and not -depth <= value < depth:
                raise ValueError(f"alignment.{name} is {value}, but the network has {depth} blocks")
        block = max(1, min(8, depth // 3)) - 1 if self.block is None else self.block
        teacher = max(1, 2 * depth // 3) - 1 if self.teacher is None else self.teacher
        return tuple(sorted({each % depth for each in self.blocks or (block,)})), teacher % depth


def alignment_loss(projected: Tensor, targets: Tensor, ids_keep: Tensor | None) -> Tensor:
    """Return the loss of kind "repa" for each sample, the mean −cosine: (B,) fp32. `projected` (B, K, z) is the
    projector's output for the tokens ids_keep (B, K) of N (None: all), `targets` (B, N, z) the encoder's features."""
    return -F.cosine_similarity(projected.float(), _kept(targets, ids_keep), dim=2).mean(dim=1)


def self_distance(projected: Tensor, targets: Tensor, ids_keep: Tensor | None) -> Tensor:
    """Return the mean smooth L1 of each sample, the loss of kind "self": (B,) fp32. Shapes are as in alignment_loss."""
    distance = F.smooth_l1_loss(projected.float(), _kept(targets, ids_keep), beta=BETA, reduction="none")
    return distance.mean(dim=(1, 2))


def _kept(targets: Tensor, ids_keep: Tensor | None) -> Tensor:
    return (targets if ids_keep is None else gather_tokens(targets, ids_keep)).float()


def build_projector(alignment: Alignment, hidden_size: int, width: int) -> nn.Sequential:
    """Build the MLP that projects an aligned block's output (B, K, hidden_size) to the targets' width, (B, K, width).
    Biases start at 0. Kind "repa" has two hidden layers of alignment.width channels, "self" one of 2·hidden_size."""
    inner = [alignment.width] * 2 if alignment.kind == "repa" else [2 * hidden_size]
    sizes, layers = [hidden_size, *inner, width], []
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [nn.Linear(inputs, outputs), nn.SiLU()]
        nn.init.xavier_uniform_(layers[-2].weight)
        nn.init.zeros_(layers[-2].bias)
    return nn.Sequential(*layers[:-1])


class Aligned(nn.Module):
    """A network and the projector for the outputs of its `blocks` (indices), as one module, so that DDP wraps both."""

    def __init__(self, network: Backbone, projector: nn.Module, blocks: Sequence[int]) -> None:
        super().__init__()
        self.network, self.projector, self.blocks = network, projector, tuple(blocks)

    def forward(
        self, x: Tensor, t: Tensor, y: Condition, routes: Routes, record: Record,
        path_drop: Tensor | None = None, class_token: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the network's output for x (B, C, S, S), time input t (B,) and conditions y. For each aligned block i,
        set record.outputs[i] to (projected tokens (B, K, z), ids_keep (B, K)); ids_keep is None if all tokens ran. The
        last two arguments are for networks that take them: in samples where path_drop (B,) bool is true, mask tokens
        replace the output of SPRINT's sparse part; class_token (B, channels) holds noised class tokens."""
        record.blocks = self.blocks
        some = {"path_drop": path_drop, "class_token": class_token}  # not every network takes them
        given = {name: value for name, value in some.items() if value is not None}
        output = self.network(x, t, y, routes, record=record, **given)
        for block in self.blocks:
            tokens, ids_keep = record.outputs[block]
            record.outputs[block] = self.projector(tokens), ids_keep
        return output


@dataclass(frozen=True)
class Aligner:
    """Computes the targets, loss and FLOPs of a run's alignment. Comments in the source explain fields."""

    settings: Alignment
    module: Aligned  # the network with its projector
    teacher: Backbone | None = None  # the averaged network for alignment=self, else None
    encoder: Encoder | None = None  # repa's encoder for alignment.source=live; None: the features are stored
    encoder_flops: int = 0  # per picture
    fingerprint: str | None = None  # the hash of repa's encoder, live or stored; None if it is unknown

    @torch.no_grad()
    def targets(
        self, process: Process, batch: Batch, x: Tensor, y: Condition, normal: Tensor, noise: Tensor,
        back: Tensor | None,         token_noise: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return targets (B, N, z): encoder features of `batch` ("repa") or a block's output in the teacher ("self").

        x, y, noise  clean latents, conditions and noise of the network's own step; the EMA teacher gets the same.
        normal       (B,) standard normal numbers, which process.noise_level maps to the network's noise levels.
        back         (B,) in [0, 1): process.cleaner lowers the teacher's levels by alignment.gap · back; None for repa.
        token_noise  (B, channels) noise of the class tokens (batch.class_token); None: there are none.
        """
        if self.teacher is None:
            return self.encoder.encode(batch.pictures) if self.encoder else batch.features
        level = process.cleaner(normal, self.settings.gap * back)
        _, block = self.settings.resolve(len(self.teacher.blocks))
        noisy = process.precondition(process.noised(x, level, noise), level)
        return self.teacher.output_of(block, *noisy, y, **noised_token(batch.class_token, token_noise, level))

    def distance(self, record: Record, targets: Tensor) -> Tensor:
        """Return the alignment loss (B,) fp32, the aligned blocks' mean: Aligned's `record` against self.targets(…)."""
        distance = alignment_loss if self.teacher is None else self_distance
        recorded = [record.outputs[block] for block in self.module.blocks]
        return sum(distance(projected, targets, ids_keep) for projected, ids_keep in recorded) / len(recorded)

    def tokens(self, routes: Sequence[Route]) -> list[int]:
        """Return the number of tokens on which each aligned block runs, given the step's `routes`."""
        run = self.module.network.tokens_run(routes)
        return [run[block] for block in self.module.blocks]

    def flops(self, routes: Sequence[Route]) -> int:
        """Return alignment's FLOPs per sample: projector, forward and backward; live encoder or teacher, forward."""
        layers = [layer.weight.numel() for layer in self.module.projector if isinstance(layer, nn.Linear)]
        flops = self.encoder_flops + 3 * 2 * sum(layers) * sum(self.tokens(routes))
        if self.teacher is not None:
            flops += self.teacher.forward_flops(upto=self.settings.resolve(len(self.teacher.blocks))[1])
        return flops
