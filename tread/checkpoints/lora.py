"""LoRA (Hu et al. 2021, arXiv 2106.09685): trains low-rank additions to linear layers, whose own weights are frozen.

A layer multiplies by W + alpha/rank · B·A, where W is its weight, A is (rank, inputs), and B (outputs, rank) starts at
zero. peft makes these layers. Checkpoints of such a run hold only what was trained. The network without adapters is
written once, to base.safetensors in the run's folder, and the checkpoints record its hash. Checkpoint.tensors merges
the trained and the base weights, so readers of a checkpoint get whole weights and do not need peft."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tread.models.backbone import block_layers
from tread.runtime.schema import Count, Positive
from tread.runtime.tensor_files import listed

BASE = "base.safetensors"
DOWN, UP = ".lora_A.default.weight", ".lora_B.default.weight"  # what peft appends to a layer's name for A and B


@dataclass(frozen=True)
class Lora:
    """Section `lora` of a run's settings.

    rank     rank of the product B·A that is added to a layer's weight; None: no LoRA, other fields have no effect.
    alpha    the product is multiplied by alpha/rank; None: by 1.
    targets  regular expression; a linear layer in the blocks gets an adapter if the expression is found in its name.
    also     regular expression; parameters whose names contain a match are trained in full; None: none are.
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
        """Add adapters to the layers that `targets` matches, with A drawn from torch's global generator. Freeze all
        other parameters except those that `also` matches; return the frozen ones' names, as the network with adapters
        has them. Raises ValueError if peft is missing, `targets` or `also` matches no name, or `also` matches all."""
        names = [name for name, _ in block_layers(network)]
        chosen = [name for name in names if re.search(self.targets, name)]
        if not chosen:
            raise ValueError(f"lora.targets={self.targets} is found in no name of the blocks' layers: {listed(names)}")
        whole = [name for name, _ in network.named_parameters() if self.also and re.search(self.also, name)]
        if self.also and not whole:
            raise ValueError(f"lora.also={self.also} is found in no parameter's name")
        if len(whole) == len([*network.parameters()]):
            raise ValueError(f"lora.also={self.also} is found in all parameters' names: train them without lora.rank")
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
    """Return the name that a parameter of a network with adapters had before they were added."""
    return name.replace(".base_layer", "")


def base_of(network: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a network with adapters as it would be without them."""
    return {plain(name): value for name, value in network.state_dict().items() if ".lora_" not in name}


def merge(base: Mapping[str, Tensor], trained: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return the weights `base` with the adapters in `trained` merged into them: scale·B·A is added to each adapted
    layer's weight. Parameters in `trained` that are not adapters replace those in `base`."""
    merged = {**base, **{plain(name): value for name, value in trained.items() if ".lora_" not in name}}
    for layer in (name.removesuffix(DOWN) for name in trained if name.endswith(DOWN)):
        product = trained[layer + UP].float() @ trained[layer + DOWN].float()
        merged[f"{layer}.weight"] = torch.add(merged[f"{layer}.weight"], product, alpha=scale)
    return merged
