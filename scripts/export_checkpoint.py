"""Writes the averaged or the raw weights of a checkpoint into a folder of their own, to keep or give away.

python scripts/export_checkpoint.py checkpoint=results/my-run out=exports/my-run

The folder holds ema.safetensors (weights=model: model.safetensors), info.json and config.yaml: a checkpoint that
sample.py, fid.py and train.py's init_from take. DiT's weights have the official DiT code's parameter names. dtype=fp16
halves the size, paths=short cuts recorded absolute paths to their last two names. format=diffusers writes a folder for
diffusers instead; push=user/name uploads the folder to Hugging Face. All options: configs/export_checkpoint.yaml.
"""

from pathlib import Path, PurePath
from typing import Literal

if __name__ == "__main__":
    import checkout  # noqa: F401

import json
import shutil
from dataclasses import dataclass

from omegaconf import OmegaConf

from tread.checkpoints import checkpoint
from tread.checkpoints.exporting import Dtype, Paths, as_dtype, public_names, record
from tread.checkpoints.for_sampling import open_network
from tread.reports.card import card
from tread.runtime.cli import door, open_door
from tread.runtime.files import check_place, explain_failure, size_text, whole_folder
from tread.runtime.hub import check_repository, push
from tread.runtime.tensor_files import Weights, save_tensors


@dataclass(frozen=True)
class Options:
    checkpoint: str
    out: str
    weights: Weights = "ema"
    dtype: Dtype = "fp32"
    paths: Paths = "full"
    autoencoder: str | None = None
    public: bool = False
    format: Literal["tread", "diffusers"] = "tread"
    include_autoencoder: bool | None = None
    license: str | None = None
    push: str | None = None

    def __post_init__(self) -> None:
        if self.format == "diffusers" and self.public:
            raise ValueError("public=true writes MaskDiT's released names, which format=diffusers does not use")
        if self.format == "tread" and self.include_autoencoder is not None:
            raise ValueError(f"include_autoencoder={self.include_autoencoder} needs format=diffusers")
        if self.license and self.format == "tread" and self.push is None:
            raise ValueError(f"license={self.license} is for the model card, which needs format=diffusers or push=…")


@door(Options)
def main(options: Options) -> None:
    out = Path(options.out).expanduser()
    if out.exists() or out.is_symlink():
        raise FileExistsError(f"out={out} is there already; choose another folder")
    if options.push is not None:
        check_repository(options.push)
    print(export_for_diffusers(options) if options.format == "diffusers" else account(export(options), options))
    if options.push is not None:
        print(f"  uploaded: {push(out, options.push)}")


def published(source: checkpoint.Checkpoint, options: Options) -> dict:
    """Return the content of the info.json to write: that of the checkpoint `source`, with paths and the autoencoder's
    name as the options ask (see exporting.record) and, if it is from the Hugging Face hub, its revision there."""
    revision = {"revision": source.revision} if source.revision else {}
    return record(source.info | revision, options.paths, options.autoencoder)


def export_for_diffusers(options: Options) -> str:
    """Write the folder options.out for diffusers; return a summary, with the Python line that loads it. Raises errors
    as `export` does, and ValueError if a plugin defines the network or a route's select or rejoin rule."""
    from tread.checkpoints import diffusers_export  # imported here because diffusers takes seconds

    source, out = checkpoint.find(options.checkpoint), Path(options.out).expanduser()
    source.verify(options.weights)
    saved, info = open_network(source, options.weights), published(source, options)
    tensors = as_dtype(source.tensors(options.weights), options.dtype)
    name = options.autoencoder or source.info["latents"]["autoencoder"]  # whole, while paths in `info` may be shortened
    inside = name if diffusers_export.goes_inside(name, options.include_autoencoder) else None
    check_place(out.parent, sum(value.nbytes for value in tensors.values()))
    with explain_failure(out), whole_folder(out) as partial:
        diffusers_export.write(saved, tensors, info, partial, inside)
        told = card(saved, info, options.dtype, True, options.license, options.push)
        (partial / "README.md").write_text(told, encoding="utf-8")
    loads = f"DiffusionPipeline.from_pretrained({options.out!r}, trust_remote_code=True)"
    return f"{options.out}: {options.weights} weights of step {source.step} in {options.dtype}\n  {loads}"


def export(options: Options) -> checkpoint.Checkpoint:
    """Write a checkpoint with only options.weights, "ema" or "model" (raw), and return it. Raises ValueError or OSError
    if the source is missing or damaged, if an option can't be applied to it, or if writing fails; then no incomplete
    folder remains. options.public (MaskDiT only) adds a file with the parameter names of MaskDiT's released files."""
    source, out = checkpoint.find(options.checkpoint), Path(options.out).expanduser()
    source.verify(options.weights)
    name = f"{options.weights}.safetensors"
    info, stated = published(source, options), source.info["files"][name]
    # runs state no dtype; LoRA's adapters are merged
    copied = options.dtype == info.get("dtype", "fp32") and "adapter" not in source.info
    tensors = {} if copied and not options.public else as_dtype(source.tensors(options.weights), options.dtype)
    theirs = public_names(tensors) if options.public else {}
    size = stated["bytes"] if copied else sum(value.nbytes for value in tensors.values())
    check_place(out.parent, size * (2 if theirs else 1))
    with explain_failure(out), whole_folder(out) as partial:
        path = partial / name
        if copied:
            shutil.copyfile(source.folder / name, path)
        else:
            info |= {"dtype": options.dtype, "made_from": stated["sha256"]}
            stated = {"sha256": save_tensors(path, tensors), "bytes": path.stat().st_size}
        if theirs:
            save_tensors(partial / f"{options.weights}-public.safetensors", theirs)
        (partial / "info.json").write_text(json.dumps({**info, "files": {name: stated}}, indent=1) + "\n")
        (partial / "config.yaml").write_text(OmegaConf.to_yaml(info["config"]))
        if options.push is not None:
            saved = open_network(source, options.weights)
            told = card(saved, info, options.dtype, False, options.license, options.push)
            (partial / "README.md").write_text(told, encoding="utf-8")
    return checkpoint.find(out)


def account(exported: checkpoint.Checkpoint, options: Options) -> str:
    """Return a text to print: the exported checkpoint's weights and size, and the commands that use it."""
    info, raw = exported.info, " weights=model" * (options.weights == "model")
    size = size_text(info["files"][f"{options.weights}.safetensors"]["bytes"])
    lines = [f"{options.out}: {options.weights} weights of step {exported.step} in {options.dtype}, {size}"]
    if options.public:
        lines += [f"  {options.weights}-public.safetensors there has the names of MaskDiT's released files"]
    lines += [f"  python sample.py checkpoint={options.out}{raw}"]
    lines += [f"  python fid.py checkpoint={options.out}{raw} reference=…"]
    lines += [f"  python train.py init_from={options.out}{raw.replace('weights', 'init_weights')} name=…"]
    if files := [PurePath(name).name for name in info["config"].get("plugins", ()) if name.endswith(".py")]:
        lines += [f"  needs {', '.join(files)}: where there is none, plugins=[…] names a copy"]
    if asked := info.get("attribution"):
        lines += [f"  attribution, which its card should have, and its samples: {asked}"]
    return "\n".join(lines)


if __name__ == "__main__":
    open_door(main)
