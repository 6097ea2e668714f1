"""Writes a network as a folder that diffusers loads with DiffusionPipeline.from_pretrained(…, trust_remote_code=True).

    model_index.json, pipeline.py   the sampler: TreadPipeline (diffusers_pipeline.py)
    transformer/                    config.json, model.py and the weights
    vae/                            the autoencoder, unless the network works on pixels or only a hub id is stored

The Python files need torch, diffusers and, for a text model, transformers; bundle.py collects the code in them.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import diffusers
from torch import Tensor

from tread.checkpoints.bundle import OURS, Bundle
from tread.checkpoints.for_sampling import SavedNetwork
from tread.encoders.autoencoder import UNKNOWN, fingerprint, load_autoencoder
from tread.routing.ids import BUILT_IN, RULES
from tread.runtime.hub import HUB_ID, WEIGHT_FILES
from tread.runtime.tensor_files import save_tensors
from tread.runtime.versions import git_revision

CHECK = '''def check(name, value, kind):
    """Raise ValueError unless value is one of those that a Literal lists, or in the range of an annotated number."""
    for limit in getattr(kind, "__metadata__", ()):
        if not limit.holds(value):
            raise ValueError(f"{name} is {value!r}, but must {limit.must}")
    listed = getattr(kind, "__args__", ())
    if listed and all(isinstance(one, str) for one in listed) and value not in listed:
        raise ValueError(f"{name} is {value!r}, but must be one of {', '.join(listed)}")'''
NO_TEXT = """def encoder_for(spec, device, place):
    raise ValueError("this network takes no text")"""
NETWORK = '''

class TreadTransformer(ModelMixin, {network}, ConfigMixin):
    """The network {network} as a diffusers model: transformer(x, time, y, routes=()), see Backbone.forward."""

    @register_to_config
    def __init__(
        self,
        {signature},
        auto_map=None,  # read by AutoModel
    ) -> None:
        {network}.__init__(
            self,
            {passed},
        )
        if position_scale != 1:
            self.scale_positions(position_scale)
        self._gradient_checkpointing_func = None
'''


def write(saved: SavedNetwork, tensors: Mapping[str, Tensor], info: Mapping, folder: Path, inside: str | None) -> None:
    """Write the network `saved` into `folder` for diffusers: all files except README.md.

    tensors  the network's state dict, in the dtype to store.
    info     the record to publish, a parsed info.json.
    inside   hub id, folder or file of the autoencoder, to store its weights. None: store its recorded hub id, if any.

    Raises ValueError if a plugin defines the network or a route's select or rejoin rule, or if `inside` can't be loaded
    or is not the autoencoder that the latents' fingerprint names.
    """
    ours = {"the network": saved.cfg.model.network.__module__.partition(".")[0] in OURS}
    for route in saved.trained_routes:
        ours[f"select={route.select}"] = RULES[route.select] is BUILT_IN.get(route.select)
        named = isinstance(route.rejoin, str) and route.rejoin != "stale"
        ours[f"rejoin={route.rejoin}"] = route.rejoins.join.__module__ == "routing_module" and not named
    if foreign := [name for name, known in ours.items() if not known]:
        raise ValueError(f"{foreign[0]} is a plugin's, whose code can't be collected: export without format=diffusers")
    latents, version = info["latents"], diffusers.__version__
    (folder / "transformer").mkdir(parents=True)
    (folder / "transformer/model.py").write_text(network_file(saved), encoding="utf-8")
    stated = {"_class_name": "TreadTransformer", "_diffusers_version": version}
    stated["auto_map"] = {"AutoModel": "model.TreadTransformer"}
    _write(folder / "transformer/config.json", stated | arguments(saved))
    save_tensors(folder / "transformer/diffusion_pytorch_model.safetensors", tensors, {"format": "pt"})
    name, vae = latents["autoencoder"], [None, None]
    if inside is not None:
        autoencoder = load_autoencoder(inside)
        if saved.latents.fingerprint not in (None, fingerprint(autoencoder)):
            raise ValueError(f"{inside} is another autoencoder than the one that made the latents, by its hash")
        autoencoder.register_to_config(_name_or_path=name)  # as recorded, not where it was loaded from
        autoencoder.save_pretrained(folder / "vae")
        vae = ["diffusers", type(autoencoder).__name__]
    (folder / "pipeline.py").write_text(pipeline_file(saved), encoding="utf-8")
    index = {
        "_class_name": ["pipeline", "TreadPipeline"],
        "_diffusers_version": version,
        "transformer": ["model", "TreadTransformer"],
        "vae": vae,
        "objective": saved.cfg.objective,
        "process": asdict(saved.process),
        "latents": latents,
        "routes": [asdict(route) for route in saved.trained_routes],
        "text": asdict(saved.cfg.text) | {"encoder": info["config"]["text"]["encoder"]} if saved.text else None,
        "autoencoder": None if inside is not None or name == "pixels" else name,
        "label_drop": saved.label_drop,
        "path_drop": saved.path_drop or 0.0,
    }
    _write(folder / "model_index.json", index)


def arguments(saved: SavedNetwork) -> dict[str, object]:
    """Return the arguments {name: value} of the exported class TreadTransformer: the network's and position_scale."""
    data, model = saved.cfg.dataset, saved.cfg.model
    own = model.all_arguments(data.size, data.channels, data.num_classes, saved.cfg.text)
    return {**own, "position_scale": model.position_scale}


def goes_inside(name: str, asked: bool | None) -> bool:
    """Return whether to export the weights of the autoencoder `name`: `asked` or, if this is None, whether `name` is no
    hub id. False for "pixels". Raises ValueError for "unknown", and if asked=False but `name` is no hub id."""
    if name == "pixels":
        return False
    at_hub = bool(HUB_ID.fullmatch(name)) and not name.endswith(WEIGHT_FILES) and not Path(name).exists()
    if name == UNKNOWN or (asked is False and not at_hub):
        raise ValueError(f"the autoencoder is {name}, no hub id, which the folder needs: autoencoder=… names one")
    return not at_hub if asked is None else asked


def _write(path: Path, tree: Mapping) -> None:
    path.write_text(json.dumps(tree, indent=2, default=list) + "\n", encoding="utf-8")


def _head(what: str) -> str:
    origin = f"export_checkpoint.py of TREAD (arXiv 2501.04765) at commit {git_revision()}"
    return f"{what}: written by {origin}. MIT licence."


def pipeline_file(saved: SavedNetwork) -> str:
    instead = {("tread.runtime.schema", "check"): CHECK}
    if not saved.text:
        instead["tread.encoders.language", "encoder_for"] = NO_TEXT
    bundle = Bundle(instead)
    bundle.add("tread.checkpoints.diffusers_pipeline", "TreadPipeline")
    return bundle.text(_head("Sampling"))


def network_file(saved: SavedNetwork) -> str:
    """Return the text of transformer/model.py: the network's class, and TreadTransformer with `saved`'s options."""
    network = saved.cfg.model.network
    bundle = Bundle({("tread.runtime.schema", "check"): CHECK})
    bundle.add(network.__module__, network.__name__)
    bundle.outside |= {name: f"from diffusers import {name}" for name in ("ConfigMixin", "ModelMixin")}
    bundle.outside["register_to_config"] = "from diffusers.configuration_utils import register_to_config"
    given = arguments(saved)
    signature = ",\n        ".join(f"{name}={value!r}" for name, value in given.items())
    passed = ",\n            ".join(f"{name}={name}" for name in given if name != "position_scale")
    adapter = NETWORK.format(network=network.__name__, signature=signature, passed=passed)
    return bundle.text(_head("A network")) + adapter
