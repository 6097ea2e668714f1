"""Converts pixels to latents for storage, and the diffusion network's latents to pixels, by a diffusers autoencoder.

The network gets stored latents after scaling (tread/data/latents.py). With the autoencoder "pixels" (autoencoder=none)
a latent is the picture itself, 0..255 mapped to −1..1; "unknown": the source of imported latents did not name it."""

import hashlib
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Literal

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from tread.data.latents import LatentSpec, from_network, to_uint8
from tread.encoders import ldm_names
from tread.runtime.device import autocast, computing
from tread.runtime.hub import is_cached
from tread.runtime.tensor_files import listed, read_kind

Decoder = Callable[[Tensor], Tensor]
LatentEncoder = Callable[[Tensor], np.ndarray]
HUB_FILES = ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin")  # weight files on the hub
RAE = "AutoencoderRAE"  # a frozen encoder's features as latents (Zheng et al. 2025, arXiv 2510.11690)
KINDS = ("AutoencoderKL", "AutoencoderTiny", RAE)
UNKNOWN = "unknown"
INSTEAD = (
    "as autoencoder=… (in training sampling.autoencoder=…), or draw the latents themselves with decode=false "
    "(sampling.decode=false); sample.py save_latents=true writes them into a file"
)
Content = Literal["auto", "moments", "latents"]
Decoding = Literal["fp32", "tf32", "bf16"]
PIXELS_UP_TO = 1024  # longest side in pixels of pictures stored without an autoencoder
OLDER_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}  # attention: old → new name
# Stable Diffusion 1's autoencoder, for weight files in diffusers' names that come without a config
SD_CONFIG = {
    "_class_name": "AutoencoderKL",
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "latent_channels": 4,
    "sample_size": 256,
    "scaling_factor": 0.18215,
}


def preview(x: Tensor) -> Tensor:
    """Return the first 3 channels of latents, or 1 if there are fewer, as uint8 pictures: −3..3 → 0..255, clipped."""
    return to_uint8(x[:, : 3 if x.shape[1] >= 3 else 1] / 3)


def load_autoencoder(name: str, device: torch.device | str = "cpu") -> nn.Module:
    """Load a frozen diffusers AutoencoderKL, AutoencoderTiny or AutoencoderRAE in fp32 and eval mode.

    `name` is a hub id, a folder with config.json and weights, or a weight file. A weight file has no config, so it must
    hold one of two things: an AutoencoderKL with LDM's parameter names (Stable Diffusion, VA-VAE), whose sizes are read
    from its tensors, and whose scale is 0.18215 if it has the channels of Stable Diffusion 1's, else 1; or, with
    diffusers' names, the autoencoder of Stable Diffusion 1 or TAESD. A hub id in the local cache is read from there,
    else downloaded. Raises ValueError for anything else, or if a download fails.
    """
    try:
        model = _from_file(Path(name)) if Path(name).is_file() else _from_folder_or_hub(name)
    except (OSError, ValueError, KeyError, AttributeError, RuntimeError, UnpicklingError, SafetensorError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        said = f"autoencoder {name!r} could not be loaded as one of {', '.join(KINDS)}: {why}"
        advice = "A hub id must be downloaded once while online; else name a folder or a weight file"
        raise ValueError(f"{said}\n{advice}") from error
    # channels last: 1.5 to 2 times faster on a CPU, and what a GPU's convolutions want
    return model.to(device, memory_format=torch.channels_last).eval().requires_grad_(False)


def located(name: str) -> str:
    """Return an autoencoder's name with paths made absolute; hub ids and "unknown" do not change."""
    return str(Path(name).resolve()) if name != UNKNOWN and Path(name).exists() else name


def _from_folder_or_hub(name: str) -> nn.Module:
    local = Path(name).exists() or is_cached(name, HUB_FILES)
    import diffusers  # imported here because it takes seconds and "pixels" does not need it

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*local_dir_use_symlinks.*")  # from diffusers' own code
        kind = diffusers.AutoencoderKL.load_config(name, local_files_only=local)["_class_name"]
        if kind not in KINDS:
            raise ValueError(f"it is a {kind}")
        if not hasattr(diffusers, kind):
            raise ValueError(f"an {kind} needs diffusers>=0.37, but {diffusers.__version__} is installed")
        if kind == RAE and not diffusers.utils.is_transformers_available():
            raise ValueError(f"an {RAE} needs transformers: pip install -r requirements-alignment.txt")
        return getattr(diffusers, kind).from_pretrained(name, torch_dtype=torch.float32, local_files_only=local)


def _from_file(path: Path) -> nn.Module:
    import diffusers

    state = read_kind(path, "any")[1]
    if any(key.startswith("encoder.layers.") for key in state):
        model = diffusers.AutoencoderTiny()
    elif any(key.startswith("encoder.down_blocks.") for key in state):
        model = diffusers.AutoencoderKL.from_config(SD_CONFIG)
        for older, name in OLDER_NAMES.items():
            state = {key.replace(f".attentions.0.{older}.", f".attentions.0.{name}."): state[key] for key in state}
    else:
        state, aside = ldm_names.own_part(state)
        if aside:
            kinds = listed(sorted({name.partition(".")[0] for name in aside}))
            told = f"{path}: {len(aside)} tensors beside the autoencoder's are set aside: {kinds}"
            logging.getLogger(__name__).warning(told)  # goes to stderr unless logging is configured
        config = ldm_names.config_of(state)
        state = ldm_names.renamed(state, levels=len(config["block_out_channels"]))
        as_sd = all(config[key] == SD_CONFIG[key] for key in ("block_out_channels", "latent_channels"))
        config["scaling_factor"] = SD_CONFIG["scaling_factor"] if as_sd else 1.0
        model = diffusers.AutoencoderKL.from_config(config)
    model.load_state_dict(state)
    return model


def fingerprint(model: nn.Module) -> str:
    """Return the hex sha256 of the names and fp32 values in a module's state dict, whatever the format of its file."""
    digest = hashlib.sha256()
    for key, value in sorted(model.state_dict().items()):
        digest.update(key.encode() + b"\0")
        digest.update(value.float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def decoder_hash(latents: LatentSpec, autoencoder: str | None = None) -> str:
    """Return the `fingerprint` of the autoencoder that load_decoder uses with the same arguments; "pixels" if the
    latents are pixels. The autoencoder is loaded only if `autoencoder` is given or latents.fingerprint is None."""
    if latents.autoencoder == "pixels":
        return "pixels"
    known = latents.fingerprint if autoencoder is None else None  # load_decoder refuses other weights in that case
    return known or fingerprint(load_autoencoder(_chosen(latents, autoencoder)))


def _chosen(latents: LatentSpec, autoencoder: str | None) -> str:
    if (name := autoencoder or latents.autoencoder) == UNKNOWN:
        raise ValueError(f"the source of these latents did not say which autoencoder made them: name it, {INSTEAD}")
    return name


def _is_rae(model: nn.Module) -> bool:
    return type(model).__name__ == RAE


def _encode(model: nn.Module, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
    """Encode pixels (B, 3, R, R) in −1..1. Return latents and None, or mean and log-variance of an AutoencoderKL."""
    out = model.encode((pixels + 1) / 2 if _is_rae(model) else pixels)
    if hasattr(out, "latent_dist"):
        return out.latent_dist.mean, out.latent_dist.logvar
    return (out.latent if _is_rae(model) else out.latents), None


def decoded(model: nn.Module, z: Tensor) -> Tensor:
    """Decode the autoencoder's own latents z (B, C, S, S) to pixels (B, 3, R, R) in about −1..1."""
    pixels = model.decode(z).sample
    return 2 * pixels.float() - 1 if _is_rae(model) else pixels


def _scaling(model: nn.Module) -> dict[str, object]:
    """Return LatentSpec's fields that scale z as diffusers' pipelines do: to (z − shift)·scale or, if the config has
    mean and std per channel, to (z − mean)·scale / std. {} for an AutoencoderRAE, which scales z itself."""
    if _is_rae(model):
        return {}
    config = model.config  # a dict
    scale, shift = float(config["scaling_factor"]), float(config.get("shift_factor") or 0.0)
    mean, std = config.get("latents_mean"), config.get("latents_std")
    if mean is None or std is None:
        return {"scale": scale, "shift": shift}
    if scale == SD_CONFIG["scaling_factor"]:  # diffusers' default: the config states no scale
        scale = 1.0
    channels = {"channel_shift": tuple(scale * value for value in mean)}
    return channels | {"scale": scale, "channel_scale": tuple(1 / value for value in std)}


def encoded(
    model: nn.Module, name: str, resolution: int, classes: tuple[str, ...], store: Content, **kept
) -> LatentSpec:
    """Return the spec (shape, content, scale) of the latents that the autoencoder `model` makes of square pictures.

    name     the autoencoder's name, for the spec and for error messages; `resolution` is the pictures' side in pixels.
    classes  the dataset's class names.
    store    "moments": mean and log-variance of an AutoencoderKL's posterior; "latents": that mean, or another
             autoencoder's latents; "auto": moments if there is a posterior.
    kept     further fields of LatentSpec: dtype, views, orientation and alpha.

    Raises ValueError if store="moments" but there is no posterior, or if decoded pictures have another resolution.
    """
    posterior = type(model).__name__ == "AutoencoderKL"
    if store == "moments" and not posterior:
        raise ValueError(f"store=moments needs an AutoencoderKL, but {name} is an {type(model).__name__}")
    probe = torch.zeros(1, 3, resolution, resolution, device=next(model.parameters()).device)
    try:
        with torch.no_grad():
            z, _ = _encode(model, probe)
            size = decoded(model, z).shape[-1]
    except RuntimeError as error:
        raise ValueError(f"resolution {resolution} does not fit the autoencoder {name}: {error}") from error
    if size != resolution:
        fits = f"resolution={size}" if _is_rae(model) else "a multiple of its step"
        raise ValueError(f"resolution {resolution} comes back as {size} from {name}: use {fits}")
    moments = posterior and store != "latents"
    return LatentSpec(
        shape=tuple(z.shape[1:]),
        classes=classes,
        autoencoder=located(name),
        content="moments" if moments else "latents",
        spread="logvar" if moments else None,
        fingerprint=fingerprint(model),
        **_scaling(model),
        **kept,
    )


def as_pixels(resolution: int, classes: tuple[str, ...], store: Content, **kept) -> LatentSpec:
    """Return the spec of latents that are the pictures themselves, (3, R, R) in −1..1. `classes` are the class names,
    `kept` more fields of LatentSpec. Raises ValueError if store is "moments", or for R > PIXELS_UP_TO (1024)."""
    if store == "moments":
        raise ValueError("store=moments needs an AutoencoderKL, but autoencoder=none stores pixels")
    if resolution > PIXELS_UP_TO:
        most = f"autoencoder=none, which stores pixels, takes at most {PIXELS_UP_TO}"
        raise ValueError(f"resolution is {resolution}, but {most}. Choose a lower resolution, or an autoencoder")
    return LatentSpec((3, resolution, resolution), classes, "pixels", scale_applied=True, **kept)


def patch_for(side: int, tokens: int = 256) -> int:
    """Return the smallest model.patch_size ≥ 2 that cuts latents (side, side) into at most `tokens` patches."""
    return next((p for p in range(2, side) if side % p == 0 and (side // p) ** 2 <= tokens), side)


def encoder(model: nn.Module | None, latents: LatentSpec, precision: str = "fp32") -> LatentEncoder:
    """Return a function from pictures (B, 3, R, R) uint8 to arrays to store, (B, views, C, S, S) float32; if
    latents.content is "moments", means and log variances in 2C channels. model=None stores pixels; precision is "fp32",
    or "bf16" for autocast. latents.views=2 adds mirrored pictures."""
    device = torch.device("cpu") if model is None else next(model.parameters()).device

    def encode_view(pixels: Tensor) -> Tensor:
        if model is None:
            return pixels
        with autocast(device, precision):
            z, logvar = _encode(model, pixels)
        return torch.cat([z, logvar], dim=1) if latents.content == "moments" else z

    @torch.no_grad()
    def encode(pictures: Tensor) -> np.ndarray:
        pixels = (pictures.to(device).float() / 127.5 - 1).contiguous(memory_format=torch.channels_last)
        views = [encode_view(view).float().cpu() for view in (pixels, pixels.flip(-1))[: latents.views]]
        return torch.stack(views, dim=1).contiguous().numpy()

    return encode


def load_decoder(
    latents: LatentSpec,
    device: torch.device | str = "cpu",
    autoencoder: str | None = None,
    precision: Decoding = "fp32",
) -> Decoder:
    """Return a function from network latents (B, C, S, S) to pictures (B, 1 or 3, H, W) uint8, computed in `precision`:
    "fp32", "tf32" or "bf16". `autoencoder` (hub id, folder or file) is used instead of latents.autoencoder.
    Raises ValueError if the autoencoder can't be loaded or takes another number of channels, if latents.autoencoder has
    another hash than latents.fingerprint, and if the latents are pixels but `autoencoder` or `precision` is set."""
    if latents.autoencoder == "pixels":
        if autoencoder is not None or precision != "fp32":
            raise ValueError("autoencoder=… and decode_precision=… are of latents, but this network draws pixels")
        return lambda x: to_uint8(from_network(x, latents))
    name = _chosen(latents, autoencoder)
    try:
        model = load_autoencoder(name, device)
    except ValueError as error:
        raise ValueError(f"{error}, {INSTEAD}") from error
    channels = model.config.encoder_hidden_size if _is_rae(model) else model.config.latent_channels
    if channels != latents.shape[0]:
        said = f"{name} decodes latents of {channels} channels, but these have {latents.shape[0]}"
        raise ValueError(f"{said}: name the right one as autoencoder=… (in training sampling.autoencoder=…)")
    if autoencoder is None and latents.fingerprint not in (None, fingerprint(model)):
        raise ValueError(
            f"{name} holds another autoencoder than the one that made the latents: its weights have another hash. "
            "Name the right one, or this one (autoencoder=…, in training sampling.autoencoder=…) to use it all the same"
        )

    @torch.no_grad()
    def decode(x: Tensor) -> Tensor:
        with computing(x.device, precision):
            return to_uint8(decoded(model, from_network(x, latents)))

    return decode
