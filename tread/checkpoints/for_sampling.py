"""A checkpoint as sampling sees it: what it says of its network, checked before any weights are read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from routing_module import Route
from tread.checkpoints import checkpoint
from tread.checkpoints.network import Network, build_network, process_of, read_network
from tread.data.latents import LatentSpec
from tread.diffusion.guidance import NO_GUIDANCE, Guidance, ends_of
from tread.diffusion.process import Process
from tread.diffusion.sampling import Model


@dataclass(frozen=True)
class SavedNetwork:
    """A trained network on disk.

    weights     which of the checkpoint's: "ema" or "model".
    label_drop  of its training; above 0, the network knows the null class.
    path_drop   likewise; above 0, it knows itself without its sparse part; None: it has none.
    """

    found: checkpoint.Checkpoint
    weights: str
    cfg: Network
    label_drop: float
    path_drop: float | None

    @property
    def process(self) -> Process:
        return process_of(self.cfg)

    @property
    def shift(self) -> float | None:
        """Of the sampler's times; None: its process has none."""
        return self.cfg.rf.shift if self.cfg.objective == "rf" else None

    @property
    def latents(self) -> LatentSpec:
        return LatentSpec.from_json(self.found.info["latents"])

    @property
    def text(self) -> dict[str, object] | None:
        """What its texts are; None: it takes classes."""
        return self.cfg.text.decisive if self.cfg.model.takes_text else None

    @property
    def sha256(self) -> str:
        return self.found.sha256(self.weights)

    def routes(self, guidance: Guidance) -> tuple[Route, ...]:
        """Those it was trained with; without any, and if a guidance is forced, its architecture's usual one."""
        forced = guidance.force and guidance.row.routed and not self.cfg.model.routes
        model = self.cfg.model
        return (model.usual_route,) if forced else model.routes

    def without_weights(self, guidance: Guidance) -> Model:
        """The network without weights, to count tokens and FLOPs by."""
        with torch.device("meta"):
            return Model(self.process, build_network(self.cfg), self.routes(guidance))

    def load(self, device: torch.device, guidance: Guidance = NO_GUIDANCE) -> Model:
        """The network in eval mode, with its weights."""
        network = build_network(self.cfg)
        network.load_state_dict(self.found.tensors(self.weights))
        return Model(self.process, network.to(device).eval().requires_grad_(False), self.routes(guidance))


def open_network(source: checkpoint.Checkpoint, weights: str, shift: float | None = None) -> SavedNetwork:
    """Read a checkpoint's info.

    shift  of the sampler's times, of rectified flow; None: the run's own (rf.shift).

    Raises ValueError or FileNotFoundError, also if the weights are not there whole, or predict something
    that no sampler here takes.
    """
    if source.info.get("predicts", "objective") != "objective":
        raise ValueError(
            f"{source.folder} predicts {source.info['predicts']} on timesteps 0..999, as public DiT weights do: it can "
            "start a run with init_from=…, but cannot be sampled or scored, since the samplers are EDM's and "
            "rectified flow's. If that is wrong, import it with predicts=objective"
        )
    source.check(weights)
    try:
        config = source.info["config"]
        label_drop, path_drop = config["train"]["label_drop"], config["train"].get("path_drop", 0.0)
        LatentSpec.from_json(source.info["latents"])
    except (LookupError, TypeError) as error:
        what = f"{source.folder / 'info.json'} is damaged: {error} is missing, or not what a checkpoint has there"
        raise checkpoint.Damaged(what, source.folder) from error
    cfg = read_network(config)
    cfg = replace(cfg, model=cfg.model.anywhere)
    if shift is not None and cfg.objective != "rf":
        raise ValueError(
            f"shift={shift:g} is of rectified flow, but {source.folder} was trained with objective={cfg.objective}: "
            "leave it out"
        )
    if shift is not None:
        cfg = replace(cfg, rf=replace(cfg.rf, shift=shift))
    return SavedNetwork(source, weights, cfg, label_drop, path_drop if cfg.model.has_path else None)


def open_weak(guidance: Guidance, strong: SavedNetwork) -> SavedNetwork | None:
    """Check that a network can be guided so, and open the weak one; None where the strong one serves.

    Raises ValueError or FileNotFoundError, also if the two can't be combined.
    """
    _check_masks(guidance, strong)
    if guidance.checkpoint is None:
        check_trained_for(guidance, strong)
        return None
    weak = open_network(checkpoint.find(Path(guidance.checkpoint).expanduser()), guidance.weights)
    _check_masks(guidance, weak)
    if weak.sha256 == strong.sha256:
        raise ValueError(
            f"guidance.checkpoint={guidance.checkpoint} is the network that checkpoint=… names: it can't guide itself"
        )
    meanings = [
        {"objective": model.cfg.objective, "text": model.text, **model.latents.to_network_scale}
        for model in (strong, weak)
    ]
    for name, ours in meanings[0].items():
        if meanings[1][name] != ours:
            raise ValueError(
                f"guidance.checkpoint={guidance.checkpoint} and {strong.found.folder} differ in {name}, so that their "
                f"predictions can't be combined\n  {str(meanings[1][name])[:200]}\n  {str(ours)[:200]}"
            )
    check_trained_for(guidance, strong, weak)
    return weak


def check_trained_for(guidance: Guidance, strong: SavedNetwork, weak: SavedNetwork | None = None) -> None:
    """Raise ValueError unless networks were trained for what a guidance asks of them; weak None: there is one network.

    path_drop of other networks than SPRINT's is None, which check_ratios refuses.
    """
    row, other = guidance.row, weak or strong
    for name, network in (("strong", strong), ("weak", other)):
        if any(ends_of(getattr(guidance, name))) and not network.cfg.model.routes and not guidance.force:
            raise ValueError(
                f"guidance={guidance.kind} routes tokens around in the {name} branch, but its network was trained "
                "without a route (guidance.force=true runs it all the same, by the paper's route)"
            )
    instead = "path_drop_class does" if row.drops_path else "sparse and autoguidance do"
    for sees_class, network in ((row.strong_class, strong), (row.weak_class, other)):
        if sees_class is False and network.label_drop == 0:
            raise ValueError(
                f"guidance={guidance.kind} asks a network without a class, but it was trained with train.label_drop=0 "
                f"and knows no null class; guidance={instead} not need one"
            )
    if row.drops_path and weak is None and strong.path_drop == 0:
        raise ValueError(
            f"guidance={guidance.kind} asks a network without its sparse part, but it was trained with "
            "train.path_drop=0 and never ran so: it needs one above 0, as model=sprint sets it; guidance=cfg and "
            "autoguidance do not"
        )


def _check_masks(guidance: Guidance, saved: SavedNetwork) -> None:
    """Raise ValueError for sparse guidance of a network that sees mask tokens where tokens are left out."""
    if guidance.row.routed and saved.cfg.model.masks:
        raise ValueError(
            f"guidance={guidance.kind} leaves tokens out, but the network of {saved.found.folder} is MaskDiT, which "
            "sees mask tokens in their places and nothing of the noisy picture there, so that it has no prediction to "
            "guide by: guidance=cfg or autoguidance runs all tokens"
        )
