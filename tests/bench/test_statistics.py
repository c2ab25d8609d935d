"""Quantiles, intervals and the verdict on stability, against what is known."""

import random
from itertools import count
from math import exp, inf
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wsbatch.batching.costs import CostModel
from wsbatch_bench.load.generator import LoadPlan
from wsbatch_bench.load.specs import parse_lengths
from wsbatch_bench.load.trace import draw_trace
from wsbatch_bench.plan.pool_sim import PoolStage
from wsbatch_bench.quantiles import (
    Interval,
    autocorrelation_time,
    mean_interval,
    observed_quantile,
    quantile_interval,
    share_bounds,
)
from wsbatch_bench.stability import BusyTime, Saturation, Sojourn, Verdict, dispersion, hopeless, judge, saturation
from wsbatch_bench.sweep.setting import Setting, same_for_both


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
    longer = [[rng.lognormvariate(0, 1) for _ in range(600)] for _ in range(100)]
    assert all(quantile_interval(sample, 0.95).high < inf for sample in longer)


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


def verdicts(rho: float, arrivals: int = 800, **more: int) -> list[str]:
    found = []
    for seed in range(60):
        sojourns = queue(rho, arrivals, seed, **more)
        found.append(judge(sojourns, sojourns[arrivals // 4].came_s, sojourns[-1].came_s).verdict)
    return found


def test_a_loaded_stable_queue_is_never_called_unstable() -> None:
    assert verdicts(0.5).count("stable") >= 57
    assert verdicts(0.7).count("unstable") == 0
    assert verdicts(0.9).count("unstable") <= 1


def test_an_overloaded_queue_is_called_unstable() -> None:
    assert verdicts(1.5).count("unstable") >= 59
    assert verdicts(1.3).count("stable") == 0


@pytest.mark.parametrize("arrivals", [60, 120, 400, 1200])
def test_a_slightly_overloaded_queue_is_not_called_stable(arrivals: int) -> None:
    """At 1.1 times what it can do a short run looks like any other: then nothing is claimed."""
    assert verdicts(1.1, arrivals).count("stable") <= 2


def test_a_server_that_sheds_has_not_kept_up() -> None:
    assert verdicts(1.5, room=20).count("unstable") >= 59


def test_a_rise_that_is_sure_but_small_is_no_instability() -> None:
    """From 10 to 14 in the system over 400 arrivals: a certain rise, of one arrival in a hundred."""
    sojourns = [Sojourn(float(at), at + 10 + at / 100, ok=True) for at in range(400)]
    stability = judge(sojourns, 50.0, 400.0)
    assert 0 < stability.growth.value < 0.02
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


def md1(rho: float, arrivals: int, seed: int) -> list[float]:
    """Times in a queue with a constant service time of 1, of Poisson arrivals after as many for warming up."""
    rng = random.Random(seed)
    wait_s, times = 0.0, []
    for _ in range(2 * arrivals):
        times.append(wait_s + 1)
        wait_s = max(0.0, wait_s + 1 - rng.expovariate(rho))
    return times[arrivals:]


# p95 and mean of 20 million requests of each (numpy's Lindley recursion); the mean is 1 + rho / (2 (1 - rho)).
MD1 = {0.5: (3.051, 1.5), 0.7: (5.103, 2.1667), 0.8: (7.613, 3.0)}


@pytest.mark.parametrize(("rho", "arrivals"), [(0.5, 1000), (0.7, 4000), (0.8, 10000)])
def test_intervals_cover_in_an_md1_queue(rho: float, arrivals: int) -> None:
    """As long as a cell of that utilisation is: 93 to 97 of 100 cover, give or take what 150 runs can tell."""
    p95, mean = MD1[rho]
    runs = [md1(rho, arrivals, seed) for seed in range(150)]
    p95s = [quantile_interval(run, 0.95) for run in runs]
    assert 0.91 <= sum(each.low <= p95 <= each.high for each in p95s) / len(runs) <= 0.99
    assert sum(each.high < inf for each in p95s) >= 0.9 * len(runs)  # they say something
    assert 0.91 <= sum(each.low <= mean <= each.high for each in map(mean_interval, runs)) / len(runs) <= 0.99


@pytest.mark.parametrize(
    ("setting", "rate"), [(Setting("dynamic", 8), 15.0), (Setting("continuous", 4), 22.0)], ids=str
)
def test_intervals_cover_in_virtual_time(setting: Setting, rate: float) -> None:
    """Both schedulers at about half of what they can do, against what all 24 runs say together."""
    stage = PoolStage(same_for_both(CostModel(tau_s=0.010, alpha_s=0.001, beta_s=0.0005)))
    prompts, outputs = parse_lengths("fixed:tokens=8"), parse_lengths("lognormal:median=4,sigma=0.8,max=24")
    runs = []
    for seed in range(24):
        trace = draw_trace(1000, prompts=prompts, outputs=outputs, seed=seed)
        run = stage.run(setting, LoadPlan(trace=trace, rate=rate, warmup=100, measured=900))
        runs.append([record.e2e_s for record in run.measured])
    together = [each for run in runs for each in run]
    p95, mean = observed_quantile(together, 0.95), fmean(together)
    p95s, means = [quantile_interval(run, 0.95) for run in runs], [mean_interval(run) for run in runs]
    assert sum(each.low <= p95 <= each.high for each in p95s) >= 21
    assert sum(each.high < inf for each in p95s) >= 20
    assert sum(each.low <= mean <= each.high for each in means) >= 21


def test_a_run_too_short_for_its_queue_has_no_upper_bound() -> None:
    """At 0.95 of its capacity 1,000 requests see one busy spell or none: an interval would cover one time of five."""
    bounds = [quantile_interval(md1(0.95, 1000, seed), 0.95).high for seed in range(40)]
    assert bounds.count(inf) >= 36


def test_ties_are_no_busy_spell() -> None:
    """Times per token take few values: most are equal, in runs."""
    rng = random.Random(5)
    values = [0.018 if rng.random() < 0.9 else 0.019 for _ in range(2000)]
    assert quantile_interval(sorted(values[:1000]) + values[1000:], 0.95).value == 0.019
    assert quantile_interval(values, 0.5) == Interval(0.018, 0.018, 0.018)


CLOCKWORK = Saturation(Interval(10.0, 9.8, 10.2), 0.0)


@given(rate=st.floats(0.1, 30), seen=st.sampled_from(["stable", "unstable", "undecided"]))
def test_more_than_the_capacity_is_never_stable(rate: float, seen: Verdict) -> None:
    verdict = CLOCKWORK.verdict(rate, seen)
    if rate > CLOCKWORK.rate.high:
        assert verdict == "unstable"
    elif rate >= CLOCKWORK.rate.low or seen == "unstable":
        assert verdict == "undecided"
    else:
        assert verdict == "stable"


def test_runs_grow_with_the_utilisation() -> None:
    lengths = [CLOCKWORK.run_length(rate, 1.0) for rate in (5.0, 9.0, 9.4, 9.79, 9.8, 11.0)]
    assert lengths == sorted(lengths)
    assert lengths[1] == pytest.approx(400 * (9.0 / 0.8) ** 2)
    assert lengths[-2:] == [inf, inf]
    assert CLOCKWORK.least_length(4.9, 1.0) == pytest.approx(150)
    assert CLOCKWORK.least_length(4.9, 4.0) == pytest.approx(600)  # bursts of four
    assert CLOCKWORK.times(3).rate == Interval(30.0, pytest.approx(29.4), pytest.approx(30.6))


def test_what_serving_adds_to_a_step() -> None:
    """1,000 steps of 10 ms + 4 rows + 20 prompt tokens take 10 ms + 4 + 10 bare, and took 26 ms."""
    costs = CostModel(tau_s=0.010, alpha_s=0.001, beta_s=0.0005)
    assert BusyTime(26.0, 1000, 4000, 20_000).gap_s(costs) == pytest.approx(0.002)
    assert BusyTime(23.0, 1000, 4000, 20_000).gap_s(costs) == 0  # faster than the costs say: nothing was added
    assert BusyTime(26.0, 0, 0, 0).gap_s(costs) == 0


def test_dispersion() -> None:
    rng = random.Random(6)
    now, poisson = 0.0, []
    for _ in range(5000):
        now += rng.expovariate(1)
        poisson.append(now)
    assert dispersion(poisson) == pytest.approx(1, abs=0.4)
    assert dispersion([float(at) for at in range(5000)]) < 0.01
    assert dispersion([at for at in poisson for _ in range(4)]) == pytest.approx(4, abs=1.6)
    assert dispersion([3.0, 3.0]) == 0
    served = saturation(poisson, 0.0, now, segments=50)
    assert served.rate.low < 1 < served.rate.high
