"""Computes weight averages of any EMA width after training, from averages that were stored during training.

A run stores power-function EMAs of one or more widths σ_rel at regular steps. At these steps the average of another
width is nearly a weighted sum of stored ones (Karras et al. 2024, arXiv 2312.02696, "EDM2", Section 3.2, App. C).

results/<run>/ema_snapshots/step_0001000.safetensors
    keyed "<sigma_rel>/<parameter>"; fp16, or fp32 for a tensor with values that overflow fp16"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from tread.runtime.files import explain_failure, sync, whole_file
from tread.runtime.schema import Range, check
from tread.runtime.tensor_files import save_tensors, what_is_wrong

FORMAT = {"format": "ema_snapshot", "version": 1}
NEGLIGIBLE = 1e-8  # a coefficient this small changes nothing in fp32
Profiles = Sequence[tuple[int, float]]  # (step, sigma_rel) of each average
FP16_ROUNDING = 2e-4  # root mean square of the relative error of rounding to fp16
# a possible σ_rel
Width = Annotated[float, Range("lie between 0 and 0.288, the uniform average's", lambda width: 0 < width < 12**-0.5)]


def exponent(sigma_rel: float) -> float:
    """Return the exponent γ for which the profile t^γ has standard deviation sigma_rel, as a fraction of the training
    time (EDM2, Eq. 4 and 123). Raises ValueError outside (0, 0.288); 0.288 is the width of a uniform average."""
    check("sigma_rel", sigma_rel, Width)
    inverse = sigma_rel**-2  # σ_rel² = (γ+1)/((γ+2)²(γ+3)), a cubic equation in γ
    return float(np.roots([1, 7, 16 - inverse, 12 - inverse]).real.max())


@dataclass(frozen=True)
class Snapshot:
    """The averages stored at a step of training: their widths σ_rel, ascending, and the parameters' shapes by name."""

    step: int
    sigma_rel: tuple[float, ...]
    path: Path
    shapes: Mapping[str, tuple[int, ...]]


def save_snapshot(run: Path, step: int, averages: Mapping[str, Tensor]) -> Path:
    """Write the averages after `step` steps to a file, atomically, replacing an existing one; return its path.
    `averages` are parameters (not buffers) keyed "<sigma_rel>/<parameter>", the same ones for each width. Raises
    ValueError for weights that are not finite, OSError if the file can't be written."""
    tensors = {}
    for name, value in averages.items():
        if not value.isfinite().all():
            raise ValueError(f"{name} is not finite, so no average of it can be stored")
        half = value.half()
        tensors[name] = (half if half.isfinite().all() else value.float()).cpu()
    path = run / "ema_snapshots" / f"step_{step:07d}.safetensors"
    with explain_failure(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as partial:
            save_tensors(partial, tensors, {"snapshot": json.dumps({**FORMAT, "step": step})})  # one key: same bytes
        sync(path.parent)
    return path


def forget_after(run: Path, step: int) -> None:
    """Remove snapshots and sample grids of steps after `step`, which a run that continues at `step` will make again."""
    for path in (*run.glob("ema_snapshots/step_*.safetensors"), *run.glob("samples/step_*.png")):
        number = path.stem.removeprefix("step_")
        if number.isdecimal() and int(number) > step:
            path.unlink()


def _header(path: Path) -> Snapshot:
    try:
        with safe_open(path, "pt") as file:
            metadata = json.loads(file.metadata()["snapshot"])
            stored = [(*key.split("/", 1), tuple(file.get_slice(key).get_shape())) for key in file.keys()]
        if metadata | FORMAT != metadata:
            raise ValueError(f"its metadata is {metadata}, but must hold {FORMAT}")
        widths, shapes = {float(width) for width, _, _ in stored}, {name: shape for _, name, shape in stored}
        return Snapshot(metadata["step"], tuple(sorted(widths)), path, shapes)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        why = what_is_wrong(path) or error
        raise ValueError(f"{path} is damaged or no snapshot ({why}); remove it to go on without it") from error


def usable(run: Path, step: int | None) -> list[Snapshot]:
    """Return the snapshots up to `step` (None: the newest one's step), sorted by step, from which an average at `step`
    is computed. Raises FileNotFoundError if there are no snapshots, ValueError if none is at `step`, if their shapes
    differ, or if any of the run's snapshots is damaged, even one after `step`."""
    snapshots = sorted(map(_header, (run / "ema_snapshots").glob("step_*.safetensors")), key=lambda each: each.step)
    if not snapshots:
        raise FileNotFoundError(f"{run}/ema_snapshots holds no snapshots: ema.power=[0.05,0.1] stores them")
    steps = [snapshot.step for snapshot in snapshots]
    step = steps[-1] if step is None else step
    if step not in steps:
        nearest = min(steps, key=lambda other: abs(other - step))
        raise ValueError(f"{run} has no snapshot at step {step}; the nearest of its {len(steps)} is at {nearest}")
    chosen = [snapshot for snapshot in snapshots if snapshot.step <= step]
    for snapshot in chosen:
        if snapshot.shapes != chosen[-1].shapes:
            raise ValueError(f"{snapshot.path} and {chosen[-1].path} are of different networks; remove the wrong one")
    return chosen


def profiles(snapshots: Iterable[Snapshot]) -> list[tuple[int, float]]:
    return [(snapshot.step, sigma_rel) for snapshot in snapshots for sigma_rel in snapshot.sigma_rel]


def inner_products(profiles: Profiles) -> np.ndarray:
    """Return ∫ p_i(τ) p_j(τ) dτ of power-function profiles (step, sigma_rel): (len(profiles), len(profiles)) fp64. A
    profile is p(τ) = (γ+1) τ^γ / t^(γ+1) on [0, t], where t is its step and γ the exponent of its sigma_rel. For two
    profiles (s, β) and (t, γ) with s ≤ t the integral over [0, s] is (β+1)(γ+1)/(β+γ+1) · (s/t)^γ / t."""
    t, gamma = np.array([(step, exponent(sigma_rel)) for step, sigma_rel in profiles]).T
    s, beta = t[:, None], gamma[:, None]
    later = np.maximum(s, t)
    decay = np.where(s <= t, gamma, beta) * (np.log(np.minimum(s, t)) - np.log(later))
    return (beta + 1) * (gamma + 1) / (beta + gamma + 1) * np.exp(decay) / later


def _normal_equations(stored: Profiles, step: int, sigma_rel: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three arrays for fitting n stored profiles to the target profile (step, sigma_rel), all scaled to L2 norm
    1: inner products of stored profiles with one another (n, n); those with the target (n,); and the norm of the target
    divided by each stored profile's norm, both before scaling (n,)."""
    products = inner_products([*stored, (step, sigma_rel)])
    lengths = np.sqrt(products.diagonal())
    scaled = products / lengths / lengths[:, None]
    return scaled[:-1, :-1], scaled[-1, :-1], lengths[-1] / lengths[:-1]


def coefficients(stored: Profiles, step: int, sigma_rel: float) -> np.ndarray:
    """Return a factor for each stored average, (len(stored),). The sum of the averages times their factors approximates
    the average of width sigma_rel at `step`, in L2 over training time (EDM2, Appendix C), by normal equations in fp64.
    The factors sum to 1, so that parameters that do not move in training are reproduced exactly; the paper leaves the
    sum free, which scales all parameters if snapshots are few. Raises ValueError for widths outside (0, 0.288)."""
    products, goal, scale = _normal_equations(stored, step, sigma_rel)
    solved = np.linalg.lstsq(products, np.stack([goal, scale], axis=1), rcond=None)[0]
    free, along = (solved * scale[:, None]).T
    return free + (1 - free.sum()) / along.sum() * along


def profile_error(stored: Profiles, step: int, sigma_rel: float) -> float:
    """Return how far the stored profiles pᵢ are from the profile p of width sigma_rel at step `step`: the error
    ‖Σ xᵢ pᵢ − p‖ / ‖p‖ over training time, with the factors xᵢ of `coefficients`; it is accurate to 1e-7."""
    products, goal, scale = _normal_equations(stored, step, sigma_rel)
    x = coefficients(stored, step, sigma_rel) / scale
    return float(np.sqrt(max(0.0, 1 - 2 * x @ goal + x @ products @ x)))


def rounding_error(stored: Profiles, step: int, sigma_rel: float) -> float:
    """Estimate a reconstruction's relative RMS error from fp16 storage; large for sigma_rel far below stored widths."""
    return float(FP16_ROUNDING * np.linalg.norm(coefficients(stored, step, sigma_rel)))


def reconstruct(run: Path, sigma_rel: float, step: int | None = None) -> dict[str, Tensor]:
    """Compute the average of width sigma_rel at `step` (None: the newest snapshot's): parameters by name, fp32 on the
    CPU. Raises FileNotFoundError without snapshots, ValueError if `step` has none or sigma_rel is not in (0, 0.288)."""
    snapshots = usable(run, step)
    stored = profiles(snapshots)
    factors = dict(zip(stored, coefficients(stored, snapshots[-1].step, sigma_rel).tolist()))
    result = {name: torch.zeros(shape) for name, shape in snapshots[-1].shapes.items()}
    for snapshot in tqdm(snapshots):
        with safe_open(snapshot.path, "pt") as file:
            for width in snapshot.sigma_rel:
                factor = factors[snapshot.step, width]
                for name in result if abs(factor) > NEGLIGIBLE else ():
                    result[name].add_(file.get_tensor(f"{width!r}/{name}").float(), alpha=factor)
    return result
