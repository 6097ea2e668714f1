"""Diffuses a class token (a feature of the whole picture: tread/models/class_token.py) along with the latents, at the
same time t, with its own noise. The prediction for the token is a velocity, noise minus data, whatever rf.predicts is.

Shapes: B samples, latents (B, C, S, S), class tokens (B, z)."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from routing_module import Record, Routes
from tread.diffusion.process import Process
from tread.diffusion.solvers import AfterStep
from tread.models.conditions import Condition


def noised_token(clean: Tensor | None, noise: Tensor | None, t: Tensor) -> dict[str, Tensor]:
    """Return {"class_token": (1 − t)·clean + t·noise}, (B, z) fp32, to pass to a network; {} if clean is None."""
    return {} if clean is None else {"class_token": torch.lerp(clean.float(), noise, t.float()[:, None])}


def token_loss(velocity: Tensor, clean: Tensor, noise: Tensor) -> Tensor:
    """Return the mean squared error (B,) fp32 between a class token's predicted velocity and noise − clean, (B, z)."""
    return (velocity.float() - (noise - clean.float())).square().mean(dim=1)


@dataclass(frozen=True)
class Beside:
    """Packs latents and a class token into one tensor (B, C + k, S, S), called a state, which solvers and guidance
    treat like latents. The token fills k = ⌈z/S²⌉ further channels; zeros pad the last one, and stay zero in sampling.

    channels  number C of the latents' channels.
    width     length z of the token; None: there is no token, and k is 0.
    """

    channels: int
    width: int | None

    @classmethod
    def of(cls, network: nn.Module) -> "Beside":
        token = getattr(network, "z_embedder", None)
        return cls(network.in_channels, token and token.width)

    def join(self, x: Tensor, token: Tensor) -> Tensor:
        room = x.shape[2] * x.shape[3]
        filled = F.pad(token.to(x), (0, -self.width % room))
        return torch.cat([x, filled.view(len(x), -1, *x.shape[2:])], dim=1)

    def latents(self, state: Tensor) -> Tensor:
        return state[:, : self.channels]

    def of_latents(self, after_step: AfterStep) -> AfterStep:
        """Wrap after_step, (step, latents) → latents, as (step, state) → state that leaves the token unchanged."""

        def after(step: int, state: Tensor) -> Tensor:
            return torch.cat([after_step(step, self.latents(state)), state[:, self.channels :]], dim=1)

        return after_step if self.width is None else after

    def denoise(
        self, process: Process, network: nn.Module, state: Tensor, level: Tensor, y: Condition, routes: Routes
    ) -> Tensor:
        """Run the network on a state, as packed by `join`, at noise level `level`; return the predicted clean state."""
        x = self.latents(state)
        if self.width is None:
            return process.denoise(network, x, level, y, routes)
        token, record = state[:, self.channels :].flatten(1)[:, : self.width], Record()
        beside = partial(network, class_token=token.float(), record=record)
        data = process.denoise(beside, x, level, y, routes)
        return self.join(data, token - level.expand(len(x)).view(-1, 1) * record.class_token)
