"""Alignment losses: a block's output is compared, token by token, with targets computed from the clean picture.

mode "repa"  (Yu et al. 2025, arXiv 2410.06940): −cosine between the projected output and patch features of a frozen
             encoder.
mode "self"  (SRA; Jiang et al. 2025, arXiv 2505.02831): smooth L1 between the projected output and the output of a
             deeper block of the averaged network, the teacher, which sees all tokens of the same latents, noise and
             labels at a lower noise level.

The aligned block may lie inside a route: it then outputs the kept tokens alone, which are compared with the targets at
the same positions. No norm stands before the projector. Sampling needs neither projector nor targets.

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
from tread.runtime.schema import Count, Positive, Share

BETA = 0.05  # where smooth L1 turns from a parabola into a line (SRA)


@dataclass(frozen=True)
class Alignment:
    """The settings of section `alignment`, which configs/defaults.yaml explains."""

    kind: Literal["none", "repa", "self"] = "none"
    block: int | None = None
    weight: Positive = 0.5
    width: Count = 2048
    encoder: str | None = None
    source: Literal["stored", "live"] = "stored"
    teacher: int | None = None
    gap: Share = 0.2
    precision: Precision = "fp32"

    def encoder_precision(self, training: str, device: torch.device) -> str:
        """Return "fp32" or "bf16" for an encoder that runs during training (source="live"). precision="auto" means the
        precision of the training steps, `training`, if `device` is a GPU with bf16, else fp32."""
        auto = training if has_bf16(device) else "fp32"
        return auto if self.precision == "auto" else self.precision

    def blocks(self, depth: int) -> tuple[int, int]:
        """Return the indices (from 0) of the aligned block and of the teacher's block in a network of `depth` blocks.
        Negative settings count from the end. Raises ValueError for a block that the network does not have."""
        blocks = {"block": max(1, min(8, depth // 3)) - 1, "teacher": max(1, 2 * depth // 3) - 1}
        for name, value in (("block", self.block), ("teacher", self.teacher)):
            if value is not None and not -depth <= value < depth:
                raise ValueError(f"alignment.{name} is {value}, but the network has {depth} blocks")
            blocks[name] = blocks[name] if value is None else value % depth
        return blocks["block"], blocks["teacher"]


def alignment_loss(projected: Tensor, targets: Tensor, ids_keep: Tensor | None) -> Tensor:
    """Compute the loss of mode "repa" for each sample, −cosine averaged over the tokens: (B,) fp32.

    projected  (B, K, z), the projector's output for the tokens at positions ids_keep (B, K); ids_keep=None: all N.
    targets    (B, N, z).
    """
    return -F.cosine_similarity(projected.float(), _kept(targets, ids_keep), dim=2).mean(dim=1)


def self_distance(projected: Tensor, targets: Tensor, ids_keep: Tensor | None) -> Tensor:
    """Compute the loss of mode "self" for each sample, smooth L1: (B,) fp32. Arguments are those of alignment_loss."""
    distance = F.smooth_l1_loss(projected.float(), _kept(targets, ids_keep), beta=BETA, reduction="none")
    return distance.mean(dim=(1, 2))


def _kept(targets: Tensor, ids_keep: Tensor | None) -> Tensor:
    return (targets if ids_keep is None else gather_tokens(targets, ids_keep)).float()


def build_projector(alignment: Alignment, hidden_size: int, width: int) -> nn.Sequential:
    """Build the MLP that maps the aligned block's output to the targets, (B, K, D) → (B, K, z); its biases start at 0.

    width  z, the channels of the targets. Mode "repa" has two hidden layers of width alignment.width; "self" has one
           of width 2·D.
    """
    inner = [alignment.width] * 2 if alignment.kind == "repa" else [2 * hidden_size]
    sizes, layers = [hidden_size, *inner, width], []
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [nn.Linear(inputs, outputs), nn.SiLU()]
        nn.init.xavier_uniform_(layers[-2].weight)
        nn.init.zeros_(layers[-2].bias)
    return nn.Sequential(*layers[:-1])


class Aligned(nn.Module):
    """A network and the projector of one block's output as one module, so that DDP wraps both."""

    def __init__(self, network: Backbone, projector: nn.Module, block: int) -> None:
        super().__init__()
        self.network, self.projector, self.block = network, projector, block

    def forward(
        self, x: Tensor, t: Tensor, y: Tensor, routes: Routes = (), record: Record | None = None,
        path_drop: Tensor | None = None, class_token: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the network's output; record.outputs[block] is then (projected tokens (B, K, z), ids_keep)."""
        record = record or Record()
        record.blocks = (self.block,)
        some = {"path_drop": path_drop, "class_token": class_token}  # not every network takes them
        given = {name: value for name, value in some.items() if value is not None}
        output = self.network(x, t, y, routes, record=record, **given)
        tokens, ids_keep = record.outputs[self.block]
        record.outputs[self.block] = self.projector(tokens), ids_keep
        return output


@dataclass(frozen=True)
class Aligner:
    """Computes the targets, the loss and the FLOPs of a run's alignment."""

    settings: Alignment
    module: Aligned  # the network with its projector
    teacher: Backbone | None = None  # the averaged network for alignment=self, else None
    encoder: Encoder | None = None  # repa's encoder for alignment.source=live; None: the features are stored
    encoder_flops: int = 0  # for a picture
    fingerprint: str | None = None  # the hash of repa's encoder, live or stored; None where it is not known

    @torch.no_grad()
    def targets(
        self, process: Process, batch: Batch, x: Tensor, y: Condition, normal: Tensor, noise: Tensor, back: Tensor,
        token_noise: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the targets (B, N, z): in mode "repa" the pictures' features, in mode "self" the teacher's output.

        x, y, noise  clean latents, conditions and noise of the network's input, which the teacher gets as well.
        normal       (B,) standard normal numbers, which process.noise_level maps to the network's noise levels.
        back         (B,) in [0, 1): process.cleaner makes the teacher's noise levels lower by alignment.gap · back.
        token_noise  (B, z) noise of class tokens, if there are any.
        """
        if self.teacher is None:
            return self.encoder.encode(batch.pictures) if self.encoder else batch.features
        level = process.cleaner(normal, self.settings.gap * back)
        _, block = self.settings.blocks(len(self.teacher.blocks))
        noisy = process.precondition(process.noised(x, level, noise), level)
        return self.teacher.output_of(block, *noisy, y, **noised_token(batch.class_token, token_noise, level))

    def distance(self, record: Record, targets: Tensor) -> Tensor:
        """Return the alignment loss (B,) fp32 between `targets` and the tokens that Aligned.forward recorded."""
        projected, ids_keep = record.outputs[self.module.block]
        return (alignment_loss if self.teacher is None else self_distance)(projected, targets, ids_keep)

    def flops(self, routes: Sequence[Route]) -> int:
        """Return the FLOPs that alignment adds per sample: projector (forward and backward), teacher, encoder."""
        network = self.module.network
        layers = [layer.weight.numel() for layer in self.module.projector if isinstance(layer, nn.Linear)]
        flops = self.encoder_flops + 3 * 2 * sum(layers) * network.tokens_run(routes)[self.module.block]
        if self.teacher is not None:
            flops += self.teacher.forward_flops(upto=self.settings.blocks(len(network.blocks))[1])
        return flops
