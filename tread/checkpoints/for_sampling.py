"""Opens checkpoints for sampling, and checks what they record about their networks before any weights are read."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from routing_module import Route
from tread.checkpoints import checkpoint
from tread.checkpoints.network import Network, build_network, process_of, read_network
from tread.data.latents import LatentSpec
from tread.diffusion.guidance import NO_GUIDANCE, Guidance, ends_of
from tread.diffusion.process import Process
from tread.diffusion.sampling import Model


@dataclass(frozen=True)
class SavedNetwork:
    """A network in the checkpoint `found`, of settings `cfg`; its `weights` ("ema" or "model") are not loaded yet. The
    share of training samples without class or text was `label_drop`, without SPRINT's sparse part `path_drop`."""

    found: checkpoint.Checkpoint
    weights: str  # "ema" or "model"
    cfg: Network
    label_drop: float  # train.label_drop: share of training samples without class or text
    path_drop: float | None  # train.path_drop: share of samples without SPRINT's sparse part; None: it has no such part

    @property
    def process(self) -> Process:
        return process_of(self.cfg)

    @property
    def shift(self) -> float | None:
        """The shift of rectified flow's sampling times (rf.shift); None for EDM."""
        return self.cfg.rf.shift if self.cfg.objective == "rf" else None

    @property
    def latents(self) -> LatentSpec:
        return LatentSpec.from_json(self.found.info["latents"])

    @property
    def text(self) -> dict[str, object] | None:
        """The settings of the text encoder, {"text.<name>": value}; None if the network is class-conditional."""
        return self.cfg.text.decisive if self.cfg.model.takes_text else None

    @property
    def sha256(self) -> str:
        return self.found.sha256(self.weights)

    @property
    def trained_routes(self) -> tuple[Route, ...]:
        """The model's token routes; () if train.routes_until=0, unless it began with weights from elsewhere."""
        config = self.found.info["config"]
        elsewhere = config.get("init_from") or "samples" not in self.found.info  # imported
        return self.cfg.model.routes if elsewhere or config["train"].get("routes_until") != 0 else ()

    def routes(self, guidance: Guidance) -> tuple[Route, ...]:
        """Return the network's token routes; if there are none but guidance.force lets tokens skip, a default route."""
        model = self.cfg.model
        return (model.usual_route,) if guidance.force and guidance.row.routed and not model.routes else model.routes

    def without_weights(self, guidance: Guidance) -> Model:
        """Return a Model as `load` does, but on the meta device, to count tokens and FLOPs or to compare shapes."""
        with torch.device("meta"):
            return Model(self.process, build_network(self.cfg), self.routes(guidance))

    def load(self, device: torch.device, guidance: Guidance = NO_GUIDANCE) -> Model:
        """Build the network in eval mode, with residual connections in the precision used in training, and load its
        weights. Returns a Model of this network with the routes self.routes(guidance)."""
        network = build_network(self.cfg)
        network.residual = self.found.info["config"]["train"].get("residual", "fp32")
        network.load_state_dict(self.found.tensors(self.weights))
        return self.with_weights(network.to(device).eval(), guidance)

    def with_weights(self, network: nn.Module, guidance: Guidance) -> Model:
        """Return a Model of `network`, into which the caller has loaded weights, with the routes for this guidance."""
        return Model(self.process, network, self.routes(guidance))

    def shifted(self, shift: float | None) -> "SavedNetwork":
        """Return this network with `shift` as rf.shift in sampling; None: as it is. ValueError for a shift with EDM."""
        if shift is None:
            return self
        if self.cfg.objective != "rf":
            trained = f"{self.found.folder} was trained with objective={self.cfg.objective}"
            raise ValueError(f"shift={shift:g} is for rectified flow, but {trained}")
        return replace(self, cfg=replace(self.cfg, rf=replace(self.cfg.rf, shift=shift)))


def open_network(source: checkpoint.Checkpoint, weights: str, shift: float | None = None) -> SavedNetwork:
    """Open a checkpoint's network and import its plugins, without loading `weights` ("ema" or "model"): only the size
    of the weights' file is checked. `shift` replaces the recorded rf.shift in sampling; None keeps it. Raises
    ValueError if that file is missing or has another size than recorded, if the record is damaged or has unknown
    settings, if a plugin is refused (`check_plugin`) or can't be imported, and for a shift with EDM."""
    source.check(weights)
    try:
        config = source.info["config"]
        label_drop, path_drop = config["train"]["label_drop"], config["train"].get("path_drop", 0.0)
        LatentSpec.from_json(source.info["latents"])
    except (LookupError, TypeError) as error:
        where = f"{source.folder / 'info.json'} is damaged: {error} is missing"
        raise checkpoint.Damaged(where, source.folder) from error
    try:
        cfg = read_network(config, source.folder)
    except ValueError as error:
        raise ValueError(f"{source.folder / 'info.json'}: {error}") from error
    cfg = replace(cfg, model=cfg.model.anywhere)
    if source.info.get("predicts") == "noise":  # imported weights of DDPM; EDM samples them, whatever objective is
        cfg = replace(cfg, objective="edm", edm=replace(cfg.edm, predicts="ddpm_noise"))
    return SavedNetwork(source, weights, cfg, label_drop, path_drop if cfg.model.has_path else None).shifted(shift)


def open_weak(guidance: Guidance, strong: SavedNetwork) -> SavedNetwork | None:
    """Return the weak branch's network, guidance.checkpoint; None if that is None: `strong` runs both branches. Raises
    FileNotFoundError if no checkpoint is there, ValueError if the networks don't fit each other or `guidance`."""
    weak = None
    if guidance.checkpoint is not None:
        given = f"guidance.checkpoint={guidance.checkpoint}"
        weak = open_network(checkpoint.find(guidance.checkpoint), guidance.weights)
        if weak.sha256 == strong.sha256:
            raise ValueError(f"{given} is the network of checkpoint=… itself")
        for name, ours in meaning(strong).items():
            if (theirs := meaning(weak)[name]) != ours:
                both = f"{given} and {strong.found.folder} differ in {name}"
                values = f"{str(theirs)[:200]}\n  {str(ours)[:200]}"
                raise ValueError(f"{both}, so their predictions can't be combined\n  {values}")
    for saved in (strong, weak) if guidance.row.routed else ():
        if saved and saved.cfg.model.masks:
            seen = f"{saved.found.folder} is MaskDiT, which sees mask tokens in their places"
            raise ValueError(f"guidance={guidance.kind} leaves tokens out, but {seen}: guidance=cfg runs all tokens")
    check_trained_for(guidance, strong, weak)
    return weak


def check_trained_for(guidance: Guidance, strong: SavedNetwork, weak: SavedNetwork | None = None) -> None:
    """Raise ValueError if a branch of `guidance` does what its network was not trained for: skip tokens, run without a
    class, or without SPRINT's sparse part. guidance.force=True allows skipping. weak=None: `strong` runs both."""
    row, other, asks = guidance.row, weak or strong, f"guidance={guidance.kind} runs a network"
    for name, network in (("strong", strong), ("weak", other)):
        if any(ends_of(getattr(guidance, name))) and not network.trained_routes and not guidance.force:
            routes = f"{asks} with tokens that skip blocks in the {name} branch, but it was trained without a route"
            raise ValueError(f"{routes} (guidance.force=true allows it)")
    instead = "path_drop_class does" if row.drops_path else "sparse and autoguidance do"
    for sees_class, network in ((row.strong_class, strong), (row.weak_class, other)):
        if sees_class is False and network.label_drop == 0:
            known = "it was trained with train.label_drop=0 and knows no null class"
            raise ValueError(f"{asks} without a class, but {known}; guidance={instead} not need one")
    if row.drops_path and weak is None and strong.path_drop == 0:
        known = "it was trained with train.path_drop=0 and never ran so: train.path_drop must be above 0"
        raise ValueError(f"{asks} without its sparse part, but {known}")


def meaning(saved: SavedNetwork) -> dict[str, object]:
    """Return {name: value} of what must be equal in two networks to combine their predictions: objective, latents, …"""
    token = saved.cfg.model.class_token, saved.found.info.get("class_token")  # its width, and its encoder's hash
    text = saved.text and {**saved.text, **({"text.encoder": None} if saved.text["text.fingerprint"] else {})}
    own = {"objective": saved.cfg.objective, "text": text, "class_token": token}
    names = ("shape", "classes", "scale", "shift", "channel_shift", "channel_scale")  # both must see the same latents
    return own | {name: getattr(saved.latents, name) for name in names}
