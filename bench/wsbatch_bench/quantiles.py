"""Quantiles that are observations, and intervals that say how much they can be trusted.

Latencies may be infinite: a request that failed was never answered, and stays in the denominator. Consecutive requests
of a queue are alike, so the intervals here are made of batches of consecutive ones, not of single requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf, isfinite, nan, sqrt
from statistics import fmean, stdev

import numpy as np
from numpy.typing import NDArray
from scipy import stats

# Batches of an interval. Where values are much alike, few long batches cover better than many short ones.
_BATCHES = (10, 20)
_BATCH_WORTH = 10  # independent values that a batch should hold
_LEAST_WORTH = 50.0  # independent values without which a quantile has no upper bound


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the bounds that hold the true value at the stated level."""

    value: float
    low: float
    high: float


def observed_quantile(values: Sequence[float], q: float) -> float:
    """The smallest observation that at least the share `q` of all does not exceed (no interpolation); nan if empty."""
    ordered = sorted(values)
    return ordered[max(0, ceil(q * len(ordered) - 1e-9) - 1)] if ordered else nan


def autocorrelation_time(values: Sequence[float]) -> float:
    """By how much correlation between neighbours inflates the variance of a mean; 1 for independent values.

    Geyer's initial positive sequence (Statistical Science 7, 1992): sums of neighbouring autocorrelations are added up
    as long as they are positive. Needs finite values.
    """
    centred = np.asarray(values, dtype=float)
    centred = centred - centred.mean()
    size = len(centred)
    power = np.abs(np.fft.rfft(centred, 2 * size)) ** 2
    covariance = np.fft.irfft(power)[:size]
    if covariance[0] <= 1e-12 * size:
        return 1.0
    pairs = (covariance[0 : size - 1 : 2] + covariance[1:size:2]) / covariance[0]
    ends = np.flatnonzero(pairs <= 0)
    positive = pairs[: ends[0]] if len(ends) else pairs
    return max(1.0, float(2 * positive.sum()) - 1)


def quantile_interval(values: Sequence[float], q: float, *, level: float = 0.95) -> Interval:
    """The q-quantile of the process that `values` came from, in this order.

    The variance is that of the share above the estimate, over batches (batch means on the indicator; Law, Simulation
    Modeling and Analysis, 5th ed., 9.5), and the bounds are the observations at the shares that Student's interval
    allows. No upper bound where it lies beyond the largest observations, or where the values are worth fewer than 50
    independent ones: an interval of a run that is too short misses the rare busy spells, and would be too narrow.
    """
    size = len(values)
    if size == 0:
        return Interval(nan, 0.0, inf)
    ordered = sorted(values)
    value = ordered[max(0, ceil(q * size - 1e-9) - 1)]
    ranks = _ranks(values)
    worth = size / autocorrelation_time(ranks.tolist())
    share = 1 - q
    half = _half_width(_batch_means(ranks >= size - round(share * size), worth), level)
    low_rank = ceil((q - half) * size) - 1
    high_rank = ceil((q + half) * size)
    low = ordered[low_rank - 1] if low_rank >= 1 else 0.0
    # Without one value above the estimate in any batch nothing is known of the variance.
    bounded = 0 < half < share and high_rank <= size and worth >= _LEAST_WORTH
    return Interval(value, low, ordered[high_rank - 1] if bounded else inf)


def mean_interval(values: Sequence[float], *, level: float = 0.95) -> Interval:
    """The mean with an interval over the means of ten batches. Finite values, in the order in which they came.

    Each side is the wider one of Student's and of Willink's (A confidence interval and test for the mean of an
    asymmetric distribution, Communications in Statistics 34, 2005), as Skart adjusts for skewness: what a run missed
    of a busy queue is on one side.
    """
    mean = fmean(values)
    means = _batch_means(np.asarray(values, dtype=float), 0.0)
    half = _half_width(means, level)
    if not isfinite(half) or half == 0:
        return Interval(mean, mean - half, mean + half)
    count = len(means)
    student = float(stats.t.ppf((1 + level) / 2, count - 1))
    # Of the differences: means that are nearly equal would lose their digits.
    skew = float(stats.skew([each - mean for each in means], bias=False)) / (6 * sqrt(count))
    below, above = (half / student * _willink(sign * student, skew) for sign in (1, -1))
    return Interval(mean, mean - max(half, below), mean + max(half, -above))


def share_bounds(successes: int, total: int, *, level: float = 0.95) -> Interval:
    """A proportion with its one-sided bounds, each at `level` (Clopper and Pearson, Biometrika 26, 1934)."""
    if total == 0:
        return Interval(nan, 0.0, 1.0)
    low = float(stats.beta.ppf(1 - level, successes, total - successes + 1)) if successes else 0.0
    high = float(stats.beta.ppf(level, successes + 1, total - successes)) if successes < total else 1.0
    return Interval(successes / total, low, high)


def student_half_width(values: Sequence[float], *, level: float = 0.95) -> float:
    """Half of Student's interval of the mean of independent values; infinite for fewer than two."""
    if len(values) < 2:
        return inf
    return float(stats.t.ppf((1 + level) / 2, len(values) - 1)) * stdev(values) / sqrt(len(values))


def _ranks(values: Sequence[float]) -> NDArray[np.int64]:
    """Of each value, from 0. Equals are ranked at random (the same every time): runs of equals are no busy spell."""
    ties = np.random.default_rng(0).permutation(len(values))
    ranks = np.empty(len(values), dtype=np.int64)
    ranks[np.lexsort((ties, np.asarray(values, dtype=float)))] = np.arange(len(values))
    return ranks


def _batch_means(values: NDArray[np.float64] | NDArray[np.bool_], worth: float) -> list[float]:
    """Of consecutive batches of equal size; the first values, which fill none, are left out."""
    least, most = _BATCHES
    count = min(len(values), max(least, min(most, int(worth / _BATCH_WORTH))))
    size = len(values) // count
    batches = values[len(values) - count * size :].reshape(count, size)
    return [float(mean) for mean in batches.mean(axis=1)]


def _half_width(means: Sequence[float], level: float) -> float:
    """Student's, wider where neighbouring batches are still alike.

    Their correlation is taken for that of an autoregression of first order, as in Skart (Tafazzoli, Wilson, Lada and
    Steiger, INFORMS Journal on Computing 23, 2011).
    """
    half = student_half_width(means, level=level)
    centre = fmean(means)
    centred = [mean - centre for mean in means]
    total = sum(each * each for each in centred)
    if not isfinite(half) or total == 0:
        return half
    alike = max(0.0, sum(a * b for a, b in pairwise(centred)) / total)
    return half * sqrt((1 + alike) / (1 - alike))


def _willink(student: float, skew: float) -> float:
    """Student's quantile where the sample is skewed; `skew` is its skewness over six times the root of its size."""
    if abs(skew) < 1e-9:
        return student
    return float(np.cbrt(1 + 6 * skew * (student - skew)) - 1) / (2 * skew)
