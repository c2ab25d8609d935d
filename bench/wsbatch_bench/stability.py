"""Did the server keep up? How fast unserved requests pile up, Little's law, and what a saturated server serves."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, inf, isfinite, nan
from statistics import fmean, variance
from typing import Literal

from wsbatch.batching.costs import CostModel
from wsbatch_bench.quantiles import Interval, student_half_width

Verdict = Literal["stable", "unstable", "undecided"]

MOST_SEGMENTS = 50
"""Into which a long window is cut to see how much it varies."""

_SEGMENTS = 6
_MIN_ARRIVALS = 40
_PILE = 0.05
"""Of those that come: a pile that may grow faster is not stable, one that certainly grows is not, either."""

# Requests of a run in units of (arrivals' + service's dispersion) * (rho / (1 - rho))^2: as many as it takes for
# intervals that cover (`bench/lab/verdicts.py`), and without which no upper bound of a latency is believed.
_RUN_UNITS, _LEAST_UNITS = 400, 150


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
        verdict: unstable where the unserved certainly pile up, stable where they certainly do not by more than 5 % of
            those that come, undecided where the window is too short to tell.
        growth: unserved requests gained over the window per arrival in it, with its 90 % interval. For a server offered
            rho times what it can do this tends to 1 - 1/rho.
        mean_in_system: L, averaged over the window.
        little_ratio: arrival rate times mean sojourn, over L. 1 in a steady state; finite windows scatter around it.
        arrivals: in the window.
    """

    verdict: Verdict
    growth: Interval
    mean_in_system: float
    little_ratio: float
    arrivals: int


def judge(sojourns: Sequence[Sojourn], start_s: float, end_s: float) -> Stability:
    """Judge the window from `start_s` to `end_s`.

    What failed or was shed counts as unserved for good: a server that sheds what it cannot serve has not kept up.
    Student's interval over what the segments of the window gain: under overload gains are independent; in a stable
    queue one segment gains what another loses, which makes the interval wider than it need be, never narrower. Where
    all come at once there is no window, and nothing is claimed.
    """
    present = [each for each in sojourns if start_s <= each.came_s < end_s]
    arrivals = len(present)
    if arrivals < 2 or present[0].came_s == present[-1].came_s:
        return Stability("undecided", Interval(nan, -inf, inf), nan, nan, arrivals)
    in_system = _mean_present(sojourns, start_s, end_s)
    finite = [each.left_s - each.came_s for each in present if isfinite(each.left_s)]
    little = arrivals / (end_s - start_s) * fmean(finite) / in_system if finite and in_system else inf
    edges = [start_s + (end_s - start_s) * index / _SEGMENTS for index in range(_SEGMENTS + 1)]
    unserved = [_unserved(sojourns, at_s) for at_s in edges]
    gains = [_SEGMENTS * (later - earlier) / arrivals for earlier, later in pairwise(unserved)]
    half = student_half_width(gains, level=0.90)
    growth = Interval(fmean(gains), fmean(gains) - half, fmean(gains) + half)
    verdict: Verdict = "undecided"
    if arrivals >= _MIN_ARRIVALS:
        if growth.low > 0 and growth.value >= _PILE:
            verdict = "unstable"
        elif growth.high < _PILE:
            verdict = "stable"
    return Stability(verdict, growth, in_system, little, arrivals)


def hopeless(stability: Stability) -> bool:
    """Whether a run may be stopped: the pile certainly grows, by more than a quarter of what arrives.

    Not before a hundred arrivals: a few long batches look like a trend.
    """
    return stability.arrivals >= 100 and stability.growth.low > 0.1 and stability.growth.value > 0.25


@dataclass(frozen=True, slots=True)
class BusyTime:
    """What a server that was never idle did in `seconds`: model steps, decode slots and prompt tokens computed."""

    seconds: float
    steps: float
    decode_slots: float
    prefill_tokens: float

    def gap_s(self, costs: CostModel) -> float:
        """Seconds that a step took longer than `costs` say, on average; 0 where it took less, or nobody counted.

        It is what serving adds to a bare step: the event loop's turn between two steps, the hand-over to the model's
        thread, and the cores that the model shares with the event loop and the clients.
        """
        if not self.steps:
            return 0.0
        model_s = costs.tau_s * self.steps + costs.alpha_s * self.decode_slots + costs.beta_s * self.prefill_tokens
        return max(0.0, (self.seconds - model_s) / self.steps)


@dataclass(frozen=True, slots=True)
class Saturation:
    """What a server does when the next batch is always waiting.

    Attributes:
        rate: requests a second, with its 95 % interval.
        dispersion: variance over mean of the number served in a time (the index of dispersion for counts); 0 for a
            clockwork, 1 for a Poisson process.
        busy: what it did meanwhile; None where nobody counted.
    """

    rate: Interval
    dispersion: float
    busy: BusyTime | None = None

    def times(self, servers: int) -> "Saturation":
        """Of so many together, if none idles while another has a queue."""
        rate = Interval(*(servers * each for each in (self.rate.value, self.rate.low, self.rate.high)))
        return replace(self, rate=rate)

    def verdict(self, rate: float, seen: Verdict) -> Verdict:
        """Of a run at `rate` that looked like `seen`: whatever a run looks like, more than the capacity piles up.

        A queue below its capacity has its ups, which look like a trend: nothing is claimed where the two disagree.
        """
        if rate > self.rate.high:
            return "unstable"
        return "stable" if rate < self.rate.low and seen != "unstable" else "undecided"

    def run_length(self, rate: float, arrivals: float) -> float:
        """Requests of a run at `rate` whose intervals cover; infinite where the rate may be above the capacity."""
        return _RUN_UNITS * self._busy_spell(rate, arrivals)

    def least_length(self, rate: float, arrivals: float) -> float:
        """Requests without which a run at `rate` may well have seen no busy spell: its upper bounds mean nothing."""
        return _LEAST_UNITS * self._busy_spell(rate, arrivals)

    def _busy_spell(self, rate: float, arrivals: float) -> float:
        """How many requests a queue needs to forget its state, in heavy traffic; `arrivals` is their dispersion.

        Whitt, Planning Queueing Simulations (Management Science 35, 1989): the relaxation time of reflected Brownian
        motion. The utilisation is taken at its upper bound.
        """
        if rate >= self.rate.low:
            return inf
        utilisation = rate / self.rate.low
        return (arrivals + self.dispersion) * (utilisation / (1 - utilisation)) ** 2


def saturation(ended_s: Sequence[float], start_s: float, end_s: float, *, segments: int) -> Saturation:
    """From when requests ended in a window under saturation; over its segments, each of several batches."""
    segment_s = (end_s - start_s) / segments
    counts = [0] * segments
    for at_s in ended_s:
        if start_s < at_s <= end_s:
            counts[min(segments, ceil((at_s - start_s) / segment_s)) - 1] += 1
    mean = fmean(counts)
    half = student_half_width(counts)
    rate = Interval(mean / segment_s, (mean - half) / segment_s, (mean + half) / segment_s)
    return Saturation(rate, variance(counts) / mean if mean else inf)


def dispersion(times_s: Sequence[float]) -> float:
    """Variance over mean of the number of these times in equal parts of their span; 0 where they are all one."""
    first_s, last_s = min(times_s), max(times_s)
    if first_s == last_s:
        return 0.0
    segments = max(4, min(MOST_SEGMENTS, len(times_s) // 10))
    return saturation(times_s, first_s, last_s, segments=segments).dispersion


def _mean_present(sojourns: Sequence[Sojourn], low_s: float, high_s: float) -> float:
    """How many are there on average between the two times."""
    total = sum(max(0.0, min(each.left_s, high_s) - max(each.came_s, low_s)) for each in sojourns)
    return total / (high_s - low_s)


def _unserved(sojourns: Sequence[Sojourn], at_s: float) -> int:
    """How many are there at this time, or failed before it."""
    return sum(each.came_s <= at_s < (each.left_s if each.ok else inf) for each in sojourns)
