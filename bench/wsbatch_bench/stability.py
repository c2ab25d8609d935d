"""Did the server keep up? The trend of the requests in the system, and Little's law."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite
from typing import Literal

from scipy import stats

Verdict = Literal["stable", "unstable", "undecided"]

_SEGMENTS = 12
_MIN_ARRIVALS = 40


@dataclass(frozen=True, slots=True)
class Sojourn:
    """One request's time in the system, in seconds. `left_s` is infinite while it is there; `ok` if it was answered."""

    came_s: float
    left_s: float
    ok: bool


@dataclass(frozen=True, slots=True)
class Stability:
    """What the window shows.

    Attributes:
        verdict: unstable where the unserved pile up, stable where they do not, undecided where the window is too short
            to tell.
        growth_fraction: unserved requests gained over the window, by a straight line, per arrival in it. For a server
            offered rho times what it can do this tends to 1 - 1/rho.
        trend_p: how likely chance alone gives a rise as steady (Kendall's tau over the window's segments).
        mean_in_system: L, averaged over the window.
        little_ratio: arrival rate times mean sojourn, over L. 1 in a steady state; finite windows scatter around it.
        arrivals: in the window.
    """

    verdict: Verdict
    growth_fraction: float
    trend_p: float
    mean_in_system: float
    little_ratio: float
    arrivals: int


def judge(sojourns: Sequence[Sojourn], start_s: float, end_s: float) -> Stability:
    """Judge the window from `start_s` to `end_s`.

    What failed or was shed counts as unserved for good: a server that sheds what it cannot serve has not kept up. A
    rise must be both significant and large, because the segments of a busy queue are correlated and a significant
    trend alone is common in a stable one.
    """
    arrivals = sum(start_s <= each.came_s < end_s for each in sojourns)
    edges = [start_s + (end_s - start_s) * index / _SEGMENTS for index in range(_SEGMENTS + 1)]
    unserved = [_mean_present(sojourns, low, high, only_ok=True) for low, high in pairwise(edges)]
    in_system = _mean_present(sojourns, start_s, end_s, only_ok=False)
    finite = [
        each.left_s - each.came_s for each in sojourns if start_s <= each.came_s < end_s and isfinite(each.left_s)
    ]
    little = arrivals / (end_s - start_s) * (sum(finite) / len(finite)) / in_system if finite and in_system else inf
    if arrivals < 2 or len(set(unserved)) < 2:
        return Stability("stable" if arrivals >= _MIN_ARRIVALS else "undecided", 0.0, 1.0, in_system, little, arrivals)
    slope = stats.linregress(range(_SEGMENTS), unserved).slope
    growth = float(slope) * _SEGMENTS
    trend_p = float(stats.kendalltau(range(_SEGMENTS), unserved, alternative="greater").pvalue)
    fraction = growth / arrivals
    verdict: Verdict = "undecided"
    if arrivals >= _MIN_ARRIVALS:
        if trend_p < 0.01 and fraction >= 0.05:
            verdict = "unstable"
        elif trend_p > 0.05 or fraction < 0.03:
            verdict = "stable"
    return Stability(verdict, fraction, trend_p, in_system, little, arrivals)


def hopeless(stability: Stability) -> bool:
    """Whether a run may be stopped: the pile grows beyond any doubt, by more than a quarter of what arrives.

    Not before a hundred arrivals: a few long batches look like a trend.
    """
    return stability.arrivals >= 100 and stability.trend_p < 0.0001 and stability.growth_fraction > 0.25


def _mean_present(sojourns: Sequence[Sojourn], low_s: float, high_s: float, *, only_ok: bool) -> float:
    """How many are there on average between the two times. With `only_ok` those that failed never leave."""
    total = 0.0
    for each in sojourns:
        left_s = each.left_s if each.ok or not only_ok else inf
        total += max(0.0, min(left_s, high_s) - max(each.came_s, low_s))
    return total / (high_s - low_s)
