"""Computes, after training, an average of a run's weights with another EMA width σ_rel.

python scripts/reconstruct_ema.py run=results/my-run sigma_rel=0.075 step=400000

Combines the snapshots that a run with ema.power stored (tread/checkpoints/posthoc_ema.py) into a checkpoint that
sample.py, fid.py and train.py's init_from take. All options: configs/reconstruct_ema.yaml.
"""

from pathlib import Path

if __name__ == "__main__":
    import checkout  # noqa: F401

from dataclasses import dataclass

from tread.checkpoints import checkpoint, posthoc_ema
from tread.checkpoints.for_sampling import open_network
from tread.checkpoints.posthoc_ema import Width
from tread.diffusion.guidance import NO_GUIDANCE
from tread.runtime.cli import door, open_door
from tread.runtime.files import check_place, explain_failure, whole_folder

POOR_FIT = 0.05  # relative L2 distance of profiles that causes a warning
COARSE = 0.002  # relative rounding error of a parameter that causes a warning; bf16's is about as large
# keys of info.json that are not copied from the run
OF_THE_MOMENT = ("format", "version", "step", "files", "tally", "flops", "seconds")


@dataclass(frozen=True)
class Options:
    run: str
    sigma_rel: Width
    step: int | None
    out: str | None


@door(Options, "stopped; nothing was written")
def main(options: Options) -> None:
    folder = write_average(options)
    print(f"{folder}: python sample.py checkpoint={folder}")


def write_average(options: Options) -> Path:
    """Write a checkpoint whose only weights are the EMA of width options.sigma_rel into a new folder, options.out
    (None: one in the run's folder), and return the checkpoint's path. Raises ValueError or OSError if the run has no
    snapshot at options.step, if parameters' shapes are not the network's, if the folder exists, or if writing fails."""
    run = Path(options.run).expanduser()
    snapshots = posthoc_ema.usable(run, options.step)
    step, stored = snapshots[-1].step, posthoc_ema.profiles(snapshots)
    out = Path(options.out).expanduser() if options.out else run / f"ema_{options.sigma_rel:g}_at_{step}"
    if out.exists():
        raise FileExistsError(f"{out} is there already; out=<another folder> writes elsewhere")
    source = checkpoint.find(run)
    network = open_network(source, "ema").without_weights(NO_GUIDANCE).network
    if snapshots[-1].shapes != {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}:
        raise ValueError(f"{snapshots[-1].path} is not of the network that {source.folder} is a checkpoint of")
    check_place(out.parent, source.info["files"]["ema.safetensors"]["bytes"])
    fit = posthoc_ema.profile_error(stored, step, options.sigma_rel)
    rounding = posthoc_ema.rounding_error(stored, step, options.sigma_rel)
    widths = sorted({width for _, width in stored})
    print(
        f"  average   σ_rel {options.sigma_rel:g} at step {step:,}\n"
        f"  made of   {len(snapshots)} snapshots with σ_rel {', '.join(f'{width:g}' for width in widths)}\n"
        f"  fit       {fit:.2%} from the profile (relative L2)\n"
        f"  rounding  {rounding:.2%} of a parameter, from fp16 in storage"
    )
    if fit > POOR_FIT:
        between = "a width between theirs fits better"
        print(f"warning: the stored averages fit σ_rel {options.sigma_rel:g} poorly; {between}")
    if rounding > COARSE:
        times = rounding / posthoc_ema.FP16_ROUNDING
        print(f"warning: fp16's rounding is multiplied by {times:.0f}; a width near the stored ones is cleaner")
    facts = {"sigma_rel": options.sigma_rel, "snapshots": len(snapshots), "widths": widths}
    facts |= {"profile_error": fit, "rounding_error": rounding}
    state = source.tensors("ema") | posthoc_ema.reconstruct(run, options.sigma_rel, step)  # buffers come from the run
    info = {key: value for key, value in source.info.items() if key not in OF_THE_MOMENT}
    with explain_failure(out), whole_folder(out) as partial:
        saved = checkpoint.save(partial, step, {"ema": state}, {**info, "posthoc": facts})
    return out / saved.name


if __name__ == "__main__":
    open_door(main)
