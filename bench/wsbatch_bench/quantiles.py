"""Quantiles that are observations, and intervals that say how much they can be trusted.

Latencies may be infinite: a request that failed was never answered, and stays in the denominator. Consecutive requests
of a queue are alike, so the sample is worth less than its size; the intervals here count its effective size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, inf, sqrt
from statistics import fmean, pstdev

from scipy import stats


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the bounds that hold the true value at the stated level."""

    value: float
    low: float
    high: float


def observed_quantile(values: Sequence[float], q: float) -> float:
    """The smallest observation that at least the share `q` of all does not exceed (no interpolation); nan if empty."""
    ordered = sorted(values)
    return ordered[max(0, ceil(q * len(ordered) - 1e-9) - 1)] if ordered else float("nan")


def autocorrelation_time(values: Sequence[float]) -> float:
    """By how much correlation between neighbours inflates the variance of a mean; 1 for independent values.

    Geyer's initial positive sequence (Statistical Science 7, 1992): sums of neighbouring autocorrelations are added up
    as long as they are positive.
    """
    n = len(values)
    mean = fmean(values)
    centred = [value - mean for value in values]
    variance = fmean(value * value for value in centred)
    if variance == 0:
        return 1.0

    def correlation(lag: int) -> float:
        return sum(map(float.__mul__, centred[lag:], centred)) / n / variance

    total = -1.0
    for lag in range(0, n - 1, 2):
        pair = correlation(lag) + correlation(lag + 1)
        if pair <= 0:
            break
        total += 2 * pair
    return max(1.0, total)


def quantile_interval(values: Sequence[float], q: float, *, level: float = 0.95) -> Interval:
    """The q-quantile with a distribution-free interval: two order statistics, by the binomial law.

    `values` in the order in which they came. The number below the true quantile is binomial; correlation enters through
    the effective number of observations. A bound that so few observations cannot give is 0 or infinite.
    """
    n = len(values)
    if n == 0:
        return Interval(float("nan"), 0.0, inf)
    value = observed_quantile(values, q)
    exceeds = [float(each > value) for each in values]
    effective = max(1, round(n / autocorrelation_time(exceeds)))
    tail = (1 - level) / 2
    # P(fewer than `low` of `effective` are below the quantile) < tail, and P(at least `high` are) <= tail.
    low = int(stats.binom.ppf(tail, effective, q))
    high = int(stats.binom.ppf(1 - tail, effective, q)) + 1
    ordered = sorted(values)
    low_rank = floor(low * n / effective)
    high_rank = ceil(high * n / effective)
    return Interval(
        value,
        ordered[low_rank - 1] if low_rank >= 1 else 0.0,
        ordered[high_rank - 1] if high <= effective else inf,
    )


def mean_interval(values: Sequence[float], *, level: float = 0.95) -> Interval:
    """The mean with a Student interval over the effective number of observations. Needs finite values, at least two."""
    effective = max(2.0, len(values) / autocorrelation_time([float(value) for value in values]))
    half = float(stats.t.ppf((1 + level) / 2, effective - 1)) * pstdev(values) / sqrt(effective - 1)
    mean = fmean(values)
    return Interval(mean, mean - half, mean + half)


def share_bounds(successes: int, total: int, *, level: float = 0.95) -> Interval:
    """A proportion with its one-sided bounds, each at `level` (Clopper and Pearson, Biometrika 26, 1934)."""
    if total == 0:
        return Interval(float("nan"), 0.0, 1.0)
    low = float(stats.beta.ppf(1 - level, successes, total - successes + 1)) if successes else 0.0
    high = float(stats.beta.ppf(level, successes + 1, total - successes)) if successes < total else 1.0
    return Interval(successes / total, low, high)
