"""LoRA (Hu et al. 2021, arXiv 2106.09685): a linear layer keeps its weight W and trains a small product beside it.

The layer multiplies by W + alpha/rank · B·A, with A (rank, inputs) and B (outputs, rank), of which B begins at zero.
peft makes such layers. A checkpoint of the run holds what is trained alone. The network as it began is written once, to
base.safetensors in the run's folder, and checkpoints name its hash. Checkpoint.tensors merges the two, so whoever reads
a checkpoint gets whole weights, without peft.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tread.models.backbone import block_layers
from tread.runtime.schema import Count, Positive
from tread.runtime.tensor_files import listed

BASE = "base.safetensors"
DOWN, UP = ".lora_A.default.weight", ".lora_B.default.weight"  # peft's names of A and B, behind the layer's


@dataclass(frozen=True)
class Lora:
    """Section `lora` of a run's settings.

    rank     of the trained products; None: all parameters are trained, and the rest is unused.
    alpha    the product counts alpha/rank times; None: once.
    targets  regular expression; adapted are the linear layers of the blocks in whose names it is found.
    also     regular expression; parameters in whose names it is found are trained as they are, None: none.
    """

    rank: Count | None = None
    alpha: Positive | None = None
    targets: str = "."
    also: str | None = "y_embedder"

    def __post_init__(self) -> None:
        for key in ("targets", "also"):
            try:
                re.compile(getattr(self, key) or "")
            except re.error as error:
                raise ValueError(f"lora.{key} is {getattr(self, key)!r}, no regular expression: {error}") from error

    @property
    def scale(self) -> float:
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def adapt(self, network: nn.Module) -> frozenset[str]:
        """Put adapters into the network's blocks, with A from torch's global generator, and freeze what is not trained;
        returns the names of the frozen parameters. Raises ValueError without peft, or if a pattern finds nothing."""
        names = [name for name, _ in block_layers(network)]
        chosen = [name for name in names if re.search(self.targets, name)]
        if not chosen:
            raise ValueError(f"lora.targets={self.targets} is found in no name of the blocks' layers: {listed(names)}")
        whole = [name for name, _ in network.named_parameters() if self.also and re.search(self.also, name)]
        if self.also and not whole:
            raise ValueError(f"lora.also={self.also} is found in no parameter's name")
        try:
            from peft import LoraConfig, inject_adapter_in_model  # imported here because it takes seconds
        except ImportError as error:
            raise ValueError(f"lora.rank needs peft: pip install -r requirements-lora.txt ({error})") from error
        exactly = "|".join(map(re.escape, chosen))
        how = LoraConfig(r=self.rank, lora_alpha=self.alpha or self.rank, target_modules=exactly)
        inject_adapter_in_model(how, network)
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(".lora_" in name or plain(name) in whole)
        return frozenset(name for name, parameter in network.named_parameters() if not parameter.requires_grad)


def plain(name: str) -> str:
    """Return the name that a parameter of an adapted network had before."""
    return name.replace(".base_layer", "")


def base_of(network: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of an adapted network without its adapters."""
    return {plain(name): value for name, value in network.state_dict().items() if ".lora_" not in name}


def merge(base: Mapping[str, Tensor], trained: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return whole weights: `base` with the tensors that were trained in their places, and adapters added."""
    merged = {**base, **{plain(name): value for name, value in trained.items() if ".lora_" not in name}}
    for layer in (name.removesuffix(DOWN) for name in trained if name.endswith(DOWN)):
        product = trained[layer + UP].float() @ trained[layer + DOWN].float()
        merged[f"{layer}.weight"] = torch.add(merged[f"{layer}.weight"], product, alpha=scale)
    return merged
