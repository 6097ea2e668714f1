"""Writes one kind of weights of a checkpoint into a folder of its own, to keep or give away.

python scripts/export_checkpoint.py checkpoint=results/my-run out=exports/my-run

The folder holds ema.safetensors (for a DiT with public DiT's parameter names), info.json and config.yaml. It is a
checkpoint that sample.py, fid.py and init_from take. To give it away, dtype=fp16 halves its size, and paths=short
removes this machine's paths from the record. All options: configs/export_checkpoint.yaml.
"""

from pathlib import Path, PurePath

if __name__ == "__main__":
    import checkout  # noqa: F401

import json
import shutil
from dataclasses import dataclass

from omegaconf import OmegaConf

from tread.checkpoints import checkpoint
from tread.checkpoints.exporting import Dtype, Paths, as_dtype, public_names, record, stored_dtype
from tread.runtime.cli import door, open_door
from tread.runtime.files import check_place, explain_failure, sha256, size_text, whole_folder
from tread.runtime.tensor_files import Weights, save_tensors


@dataclass(frozen=True)
class Options:
    """The options of configs/export_checkpoint.yaml."""

    checkpoint: str
    out: str
    weights: Weights = "ema"
    dtype: Dtype = "fp32"
    paths: Paths = "full"
    autoencoder: str | None = None
    public: bool = False


@door(Options)
def main(options: Options) -> None:
    print(account(export(options), options))


def export(options: Options) -> checkpoint.Checkpoint:
    """Write a checkpoint with the weights options.weights alone, and return it; if writing fails, nothing is left.
    options.public adds a file with MaskDiT's released parameter names. Raises ValueError or OSError."""
    source, out = checkpoint.find(options.checkpoint), Path(options.out).expanduser()
    if out.exists() or out.is_symlink():
        raise FileExistsError(f"out={out} is there already; choose another folder")
    source.verify(options.weights)
    name = f"{options.weights}.safetensors"
    info, stated = record(source.info, options.paths, options.autoencoder), source.info["files"][name]
    copied = options.dtype == stored_dtype(info)
    tensors = {} if copied and not options.public else as_dtype(source.tensors(options.weights), options.dtype)
    theirs = public_names(tensors) if options.public else {}
    size = stated["bytes"] if copied else sum(value.nbytes for value in tensors.values())
    check_place(out.parent, size * (2 if theirs else 1))
    with explain_failure(out), whole_folder(out) as partial:
        path = partial / name
        if copied:
            shutil.copyfile(source.folder / name, path)
        else:
            save_tensors(path, tensors)
            info |= {"dtype": options.dtype, "made_from": stated["sha256"]}
            stated = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        if theirs:
            save_tensors(partial / f"{options.weights}-public.safetensors", theirs)
        (partial / "info.json").write_text(json.dumps({**info, "files": {name: stated}}, indent=1) + "\n")
        (partial / "config.yaml").write_text(OmegaConf.to_yaml(info["config"]))
    return checkpoint.find(out)


def account(exported: checkpoint.Checkpoint, options: Options) -> str:
    """Return a text to print: the exported checkpoint's weights and size, and the commands that use it."""
    info, raw = exported.info, " weights=model" * (options.weights == "model")
    size = size_text(info["files"][f"{options.weights}.safetensors"]["bytes"])
    lines = [f"{options.out}: {options.weights} weights of step {exported.step} in {stored_dtype(info)}, {size}"]
    if options.public:
        lines += [f"  {options.weights}-public.safetensors there has the names of MaskDiT's released files"]
    if info.get("predicts", "objective") == "objective":
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
