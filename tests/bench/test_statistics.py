"""Quantiles, intervals and the verdict on stability, against what is known."""

import random
from itertools import count
from math import exp, inf

import pytest

from wsbatch_bench.quantiles import (
    autocorrelation_time,
    mean_interval,
    observed_quantile,
    quantile_interval,
    share_bounds,
)
from wsbatch_bench.stability import Sojourn, hopeless, judge


def test_a_quantile_is_an_observation() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [observed_quantile(values, q) for q in (0.2, 0.5, 0.8, 0.95, 1.0)] == [1.0, 3.0, 4.0, 5.0, 5.0]
    assert observed_quantile([float(n) for n in range(1, 101)], 0.95) == 95.0


def test_failures_are_infinite_and_stay_in_the_denominator() -> None:
    values = [1.0] * 94 + [inf] * 6
    assert observed_quantile(values, 0.94) == 1.0
    assert observed_quantile(values, 0.95) == inf


def covered(samples: list[list[float]], truth: float) -> float:
    intervals = [quantile_interval(sample, 0.95) for sample in samples]
    return sum(interval.low <= truth <= interval.high for interval in intervals) / len(intervals)


def test_the_interval_of_p95_covers_the_truth() -> None:
    """2,000 runs of 200 requests with lognormal latencies."""
    rng = random.Random(1)
    samples = [[rng.lognormvariate(0, 1) for _ in range(200)] for _ in range(2000)]
    # At least 94 % is what is promised; much more would be an interval that says less than it could.
    assert 0.96 <= covered(samples, exp(1.6448536)) <= 0.99
    assert all(quantile_interval(sample, 0.95).high < inf for sample in samples[:100])


def test_correlated_latencies_are_worth_less() -> None:
    """An AR(1) series: with independence assumed, the interval covers 3 of 4 runs; with the effective size 9 of 10."""
    rng = random.Random(2)
    samples = []
    for _ in range(300):
        value, sample = rng.gauss(0, 1), []
        for _ in range(400):
            value = 0.8 * value + 0.6 * rng.gauss(0, 1)
            sample.append(value)
        samples.append(sample)
    assert covered(samples, 1.6448536) >= 0.9
    shuffled = [rng.sample(sample, len(sample)) for sample in samples]  # as if they were independent
    assert covered(shuffled, 1.6448536) < 0.85


def test_autocorrelation_time() -> None:
    rng = random.Random(3)
    assert autocorrelation_time([rng.gauss(0, 1) for _ in range(5000)]) == pytest.approx(1, abs=0.2)
    value, series = 0.0, []
    for _ in range(50_000):
        value = 0.5 * value + rng.gauss(0, 1)
        series.append(value)
    assert autocorrelation_time(series) == pytest.approx(3, rel=0.15)  # (1 + a) / (1 - a)
    assert autocorrelation_time([1.0] * 9) == 1


def test_too_few_observations_give_no_upper_bound() -> None:
    interval = quantile_interval([float(n) for n in range(20)], 0.95)
    assert interval.high == inf
    assert interval.low > 0


def test_mean_interval_covers() -> None:
    rng = random.Random(4)
    hits = 0
    for _ in range(500):
        interval = mean_interval([rng.expovariate(1) for _ in range(200)])
        hits += interval.low <= 1 <= interval.high
    assert hits >= 460


def test_no_failure_in_299_shows_99_percent_and_in_200_does_not() -> None:
    assert share_bounds(299, 299).low >= 0.99
    assert share_bounds(200, 200).low < 0.99
    assert share_bounds(0, 10).high < 0.3
    assert share_bounds(180, 200).high < 0.99


def queue(rho: float, arrivals: int, seed: int, *, room: int = 10**9) -> list[Sojourn]:
    """A single server with exponential service times of mean 1, and a queue of `room`."""
    rng = random.Random(seed)
    now = free_s = 0.0
    sojourns: list[Sojourn] = []
    present: list[float] = []  # when each of those in the system leaves
    for _ in range(arrivals):
        now += rng.expovariate(rho)
        if len(present := [left_s for left_s in present if left_s > now]) >= room:
            sojourns.append(Sojourn(now, now, ok=False))
            continue
        free_s = max(free_s, now) + rng.expovariate(1)
        present.append(free_s)
        sojourns.append(Sojourn(now, free_s, ok=True))
    return sojourns


def verdicts(rho: float, **more: int) -> list[str]:
    found = []
    for seed in range(60):
        sojourns = queue(rho, 400, seed, **more)
        found.append(judge(sojourns, sojourns[100].came_s, sojourns[-1].came_s).verdict)
    return found


def test_a_loaded_stable_queue_is_rarely_called_unstable() -> None:
    assert verdicts(0.5).count("stable") >= 57
    assert verdicts(0.7).count("unstable") <= 3


def test_an_overloaded_queue_is_called_unstable() -> None:
    assert verdicts(1.5).count("unstable") >= 57
    assert verdicts(1.3).count("stable") <= 3


def test_a_server_that_sheds_has_not_kept_up() -> None:
    assert verdicts(1.5, room=20).count("unstable") >= 55


def test_a_rise_that_is_sure_but_small_is_no_instability() -> None:
    """From 10 to 14 in the system over 400 arrivals: a significant trend, of one arrival in a hundred."""
    sojourns = [Sojourn(float(at), at + 10 + at / 100, ok=True) for at in range(400)]
    stability = judge(sojourns, 50.0, 400.0)
    assert stability.trend_p < 0.001
    assert stability.verdict == "stable"


def test_only_a_clear_case_is_hopeless() -> None:
    overloaded, loaded = queue(2.0, 200, 1), queue(0.8, 200, 1)
    few = overloaded[:90]
    assert not hopeless(judge(few, 0.0, few[-1].came_s))
    assert hopeless(judge(overloaded, 0.0, overloaded[-1].came_s))
    assert not hopeless(judge(loaded, 0.0, loaded[-1].came_s))


def test_littles_law_holds_in_a_steady_state() -> None:
    sojourns = queue(0.5, 4000, 8)
    stability = judge(sojourns, sojourns[500].came_s, sojourns[-1].came_s)
    assert stability.little_ratio == pytest.approx(1, rel=0.02)
    assert stability.mean_in_system == pytest.approx(1, rel=0.2)  # rho / (1 - rho)


def test_a_window_without_enough_arrivals_is_undecided() -> None:
    sojourns = [Sojourn(at, at + 1, ok=True) for at, _ in zip(map(float, count()), range(20), strict=False)]
    assert judge(sojourns, 0.0, 20.0).verdict == "undecided"
