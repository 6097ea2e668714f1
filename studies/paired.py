"""Compares kinds of runs (arms) seed by seed: the mean difference, its standard error, and its 95% interval.

With the same seed two runs see the same pictures in the same order, are evaluated on the same held-out pictures with
the same noise, and draw samples from the same seeds. This shared randomness cancels in the difference of their results.
The interval shows how much the difference varies with the training seed, not with held-out pictures or sampling seeds.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy import special

from studies.results import Made

LEVEL = 0.95  # of all intervals
ENOUGH = 3  # seeds below which there is no verdict


@dataclass(frozen=True)
class Estimate:
    """The mean of one number per seed.

    seeds   how many seeds.
    spread  the seeds' standard deviation; None: there is one seed. `error` and `half` then are None, too.
    error   the standard error of the mean, spread / √seeds.
    half    half the width of the 95% interval around the mean, by Student's t with seeds − 1 degrees of freedom.
    """

    mean: float
    seeds: int
    spread: float | None
    error: float | None
    half: float | None

    @property
    def sign(self) -> int | None:
        """−1 or 1 if the whole interval is below or above 0, 0 if it includes 0; None with fewer than 3 seeds."""
        if self.seeds < ENOUGH:
            return None
        return 0 if abs(self.mean) <= self.half else int(math.copysign(1, self.mean))

    def __str__(self) -> str:
        """Format the mean and standard deviation, "1.0203 ± 0.0011", or a single seed's value."""
        return f"{self.mean:.5g}" if self.seeds == 1 else f"{self._to(self.mean)} ± {self._to(self.spread)}"

    def signed(self) -> str:
        """Format a difference, "+0.0114 (0.0001) [+0.0109, +0.0120]": mean, standard error, interval; 1 seed: mean."""
        if self.seeds == 1:
            return f"{self.mean:+.3g}"
        low, high = self.mean - self.half, self.mean + self.half
        return f"{self._to(self.mean, '+')} ({self._to(self.error)}) [{self._to(low, '+')}, {self._to(high, '+')}]"

    def _to(self, number: float, sign: str = "") -> str:
        """Format a number with the decimals that show two significant digits of the standard error (4 decimals if the
        error is 0 or None); sign="+" adds a plus unless the number is negative."""
        places = max(0, 1 - math.floor(math.log10(self.error))) if self.error else 4
        return f"{number:{sign}.{places}f}"


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return the estimate from one value per seed; None if there are no values."""
    if not values:
        return None
    mean, seeds = statistics.fmean(values), len(values)
    if seeds == 1:
        return Estimate(mean, 1, None, None, None)
    spread = statistics.stdev(values)
    error = spread / math.sqrt(seeds)
    return Estimate(mean, seeds, spread, error, float(special.stdtrit(seeds - 1, (1 + LEVEL) / 2)) * error)


def curve(run: Made, metric: str, axis: str) -> dict[float, float]:
    """Return a run's {x: metric} over the `axis` "images", "flops" or "steady_seconds" (defined in studies/jobs.py)."""
    return {point[axis]: point[metric] for point in run["points"] if metric in point and point.get(axis)}


def series(runs: Sequence[Made], metric: str) -> list[tuple[dict, list[float]]]:
    """Return (item of the first run's "points", [each run's metric]) per number of images where all have the metric."""
    curves = [curve(run, metric, "images") for run in runs]
    points = runs[0]["points"] if runs else []
    shared = [point for point in points if all(point["images"] in each for each in curves)]
    return [(point, [each[point["images"]] for each in curves]) for point in shared]


def interpolate(values: Mapping[float, float], place: float) -> float | None:
    """Interpolate {FLOPs or seconds: value} at `place`, linearly in log(FLOPs or seconds); None outside the range."""
    within = len(values) > 1 and min(values) <= place <= max(values)
    return float(np.interp(math.log(place), [*map(math.log, values)], [*values.values()])) if within else None


def last_difference(run: Made, other: Made, metric: str) -> float | None:
    """Return a run's last metric value minus another's, even after unequal numbers of images; None if one has none."""
    ends = [[*curve(each, metric, "images").values()][-1:] for each in (run, other)]
    return ends[0][0] - ends[1][0] if all(ends) else None


def at_equal_images(run: Made, other: Made, metric: str) -> float | None:
    """Return one run's metric minus another's at the largest number of training images where both have it, or None."""
    both = series([run, other], metric)
    return both[-1][1][0] - both[-1][1][1] if both else None


def at_equal(run: Made, other: Made, metric: str, axis: str) -> float | None:
    """Return one run's metric minus another's at the most FLOPs or seconds that both reach; `axis` is "flops" or
    "steady_seconds". Return None if one has no value there, or if the seconds may be from different devices. If the
    runs' last seconds differ by less than 1%, compare the last values. If their last FLOPs differ by less than 1%,
    compare the last values only if neither interpolation nor `at_equal_images` gives a value."""
    if axis == "steady_seconds" and (run["timed_on"] is None or run["timed_on"] != other["timed_on"]):
        return None
    curves = [curve(made, metric, axis) for made in (run, other)]
    ends = [max(each, default=0) for each in curves]
    here, there = (interpolate(each, min(ends)) for each in curves)
    alone = None in (here, there) and at_equal_images(run, other, metric) is None
    if (alone or axis == "steady_seconds") and 0 < max(ends) < 1.01 * min(ends):
        return curves[0][ends[0]] - curves[1][ends[1]]
    return None if None in (here, there) else here - there


def differences(runs: Sequence[Made], others: Sequence[Made], by: Callable, *names: str) -> list[float]:
    """Return by(run, other, *names) for pairs of runs with equal seeds, leaving out the pairs where it is None."""
    by_seed = {run["seed"]: run for run in others}
    found = [by(run, by_seed[run["seed"]], *names) for run in runs if run["seed"] in by_seed]
    return [less for less in found if less is not None]


def along(runs: Sequence[Made], others: Sequence[Made], metric: str, axis: str) -> list[tuple[dict, list[float]]]:
    """Compare runs of equal seeds: return (point, [a run's metric minus that of its partner in `others`, one per seed])
    for each number of training images where all have the metric; `point` is an item of the first run's "points". The
    partner's metric is read at as many images (axis="images") or interpolated at as many FLOPs (axis="flops")."""
    by_seed = {run["seed"]: curve(run, metric, axis) for run in others}
    runs, found = [run for run in runs if run["seed"] in by_seed], []
    for point, values in series(runs, metric):
        read = dict.get if axis == "images" else interpolate
        levels = [read(by_seed[run["seed"]], point.get(axis, 0)) for run in runs]
        if None not in levels:
            found.append((point, [value - level for value, level in zip(values, levels)]))
    return found


EQUAL = {  # quantity at which two runs are compared → the function that does it
    "images": at_equal_images,
    "FLOPs": partial(at_equal, axis="flops"),
    "seconds": partial(at_equal, axis="steady_seconds"),
}


def paired(runs: Sequence[Made], others: Sequence[Made], metric: str, equal: str) -> Estimate | None:
    """Return the estimate of one arm's metric minus another's, paired by seed, at equal "images", "FLOPs" or "seconds"
    (`equal`); None without pairs. An arm is given by its runs, one per seed."""
    return estimate(differences(runs, others, EQUAL[equal], metric))
