"""Compares kinds of runs (arms) seed by seed: the mean difference, its standard error, and its 95% interval.

With the same seed two runs see the same pictures in the same order, are evaluated on the same held-out pictures with
the same noise, and draw samples from the same seeds. This shared randomness cancels in the difference of their results.
The interval shows how much the difference varies with the training seed, not with held-out pictures or sampling seeds.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from studies.results import Made, Results, curve, series

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
        return (self.mean > self.half) - (self.mean < -self.half)

    def __str__(self) -> str:
        """Format the mean and standard deviation, "1.0203 ± 0.0011", or a single seed's value."""
        return f"{self.mean:.5g}" if self.seeds == 1 else f"{self._to(self.mean)} ± {self._to(self.spread)}"

    def signed(self) -> str:
        """Format a difference: "+0.0114 (0.0001) [+0.0109, +0.0120]" is the mean, its standard error and its interval;
        with a single seed there is only its value."""
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
    return Estimate(mean, seeds, spread, error, float(stats.t.ppf((1 + LEVEL) / 2, seeds - 1)) * error)


def interpolate(values: Mapping[float, float], place: float) -> float | None:
    """Interpolate {FLOPs or seconds: value} at `place`, linearly in their logarithm; None outside their range."""
    within = len(values) > 1 and min(values) <= place <= max(values)
    return float(np.interp(math.log(place), [*map(math.log, values)], [*values.values()])) if within else None


def comparable(run: Made, other: Made, axis: str) -> bool:
    """Return whether two runs can be compared by `axis`: by "steady_seconds" only if measured on the same device."""
    return axis != "steady_seconds" or (run["timed_on"] is not None and run["timed_on"] == other["timed_on"])


def at_equal(run: Made, other: Made, metric: str, axis: str) -> float | None:
    """Return one run's metric minus another's at the most images, FLOPs or seconds that both reach; `axis` is "images",
    "flops" or "steady_seconds" (as in jobs.py). Between two values the metric is interpolated, but not by images. None
    if one has no value there, or if the seconds may be from different devices. Runs that end within 1% of the same
    seconds are compared at their ends; runs that end within 1% of the same FLOPs only if the metric can't be
    interpolated there and can't be compared at equal images either."""
    if axis == "images":
        both = series([run, other], metric)
        return both[-1][1][0] - both[-1][1][1] if both else None
    if not comparable(run, other, axis):
        return None
    curves = [curve(made, metric, axis) for made in (run, other)]
    ends = [max(each, default=0) for each in curves]
    here, there = (interpolate(each, min(ends)) for each in curves)
    alone = None in (here, there) and at_equal(run, other, metric, "images") is None
    if (alone or axis == "steady_seconds") and 0 < max(ends) < 1.01 * min(ends):
        return curves[0][ends[0]] - curves[1][ends[1]]
    return None if None in (here, there) else here - there


def cost_ratio(run: Made, other: Made, axis: str) -> float | None:
    """Return one run's training "flops" or "steady_seconds" (`axis`, as in jobs.py), divided by another's; None if
    either is unknown, or if seconds were not measured on the same device."""
    ends = [max(curve(each, "loss", axis), default=0) for each in (run, other)]
    return ends[0] / ends[1] if all(ends) and comparable(run, other, axis) else None


def partners(runs: Sequence[Made], others: Sequence[Made]) -> list[tuple[Made, Made]]:
    """Return the pairs of a run and another one of the same seed."""
    by_seed = {run["seed"]: run for run in others}
    return [(run, by_seed[run["seed"]]) for run in runs if run["seed"] in by_seed]


def differences(runs: Sequence[Made], others: Sequence[Made], by: Callable, *names: str) -> list[float]:
    """Return by(run, other, *names) for pairs of runs with equal seeds, leaving out the pairs where it is None."""
    found = [by(*pair, *names) for pair in partners(runs, others)]
    return [less for less in found if less is not None]


def along(runs: Sequence[Made], others: Sequence[Made], metric: str, axis: str) -> list[tuple[dict, list[float]]]:
    """Compare runs of equal seeds: return (point, [a run's metric minus that of its partner in `others`, one per seed])
    for each number of training images where all have the metric. The point is the first run's record there: images,
    FLOPs, metrics. The partner's metric is read at equal images or, with axis="flops", interpolated at the run's."""
    pairs, found = partners(runs, others), []
    curves = [curve(other, metric, axis) for _, other in pairs]
    for point, values in series([run for run, _ in pairs], metric):
        read = dict.get if axis == "images" else interpolate
        levels = [read(each, point.get(axis, 0)) for each in curves]
        if None not in levels:
            found.append((point, [value - level for value, level in zip(values, levels)]))
    return found


EQUAL = {"images": "images", "FLOPs": "flops", "seconds": "steady_seconds"}  # what is equal → `at_equal`'s axis


def by_seed(results: Results, arm: str, other: str, metric: str, equal: str) -> list[float]:
    """Return one arm's metric minus another's for each seed that both have, at equal "images", "FLOPs" or "seconds"
    (`equal`)."""
    return differences(results.get(arm, ()), results.get(other, ()), at_equal, metric, EQUAL[equal])


def paired(results: Results, arm: str, other: str, metric: str, equal: str) -> Estimate | None:
    """Return the estimate of what `by_seed` returns; None if no seed can be compared."""
    return estimate(by_seed(results, arm, other, metric, equal))
