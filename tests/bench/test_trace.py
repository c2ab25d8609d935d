"""Schedules: the right law, the right lengths, the same bytes for the same seed, any rate from one trace."""

import json
import random
from itertools import islice, pairwise
from math import inf
from pathlib import Path
from statistics import fmean

import pytest
from scipy import stats as scipy_stats

from wsbatch_bench.load.specs import DEFAULT_OUTPUTS, DEFAULT_PROMPTS, parse_arrivals, parse_lengths
from wsbatch_bench.load.trace import draw_trace, load_trace


def gaps(spec: str, count: int = 4000, seed: int = 1) -> list[float]:
    times = [unit for unit, _ in islice(parse_arrivals(spec).draw(random.Random(seed)), count)]
    return [later - earlier for earlier, later in pairwise(times)]


@pytest.mark.parametrize(
    ("spec", "law"),
    [
        ("poisson", scipy_stats.expon()),
        ("gamma:burstiness=0.4", scipy_stats.gamma(0.4, scale=1 / 0.4)),
        ("gamma:burstiness=3", scipy_stats.gamma(3, scale=1 / 3)),
    ],
)
def test_gaps_follow_their_law(spec: str, law: scipy_stats.rv_continuous) -> None:
    assert scipy_stats.kstest(gaps(spec), law.cdf).pvalue > 0.01


def test_the_ks_test_can_fail() -> None:
    assert scipy_stats.kstest(gaps("gamma:burstiness=0.8"), scipy_stats.expon().cdf).pvalue < 1e-6


@pytest.mark.parametrize(
    "spec",
    ["poisson", "gamma:burstiness=0.5", "constant", "bursts:k=4,spread_ms=10", "on-off:requests=20,duty=0.25"],
)
def test_every_process_has_unit_rate(spec: str) -> None:
    times = [unit for unit, _ in islice(parse_arrivals(spec).draw(random.Random(3)), 40_000)]
    assert 40_000 / times[-1] == pytest.approx(1, rel=0.04)


def test_bursts_keep_their_spread_at_any_rate() -> None:
    trace = draw_trace(400, parse_arrivals("bursts:k=4,spread_ms=10"), seed=5)
    for rate in (0.1, 20.0):
        at_s = [planned.at_s for planned in islice(trace.schedule(rate), 400)]
        assert at_s == sorted(at_s)
        assert 400 / at_s[-1] == pytest.approx(rate, rel=0.35)
        slow = [later - earlier for earlier, later in pairwise(at_s)]
        # Within a burst gaps are milliseconds whatever the rate: three of every four.
        assert sum(gap < 0.010 for gap in slow) >= 290


def test_on_off_leaves_its_pauses_empty() -> None:
    times = [unit for unit, _ in islice(parse_arrivals("on-off:requests=20,duty=0.25").draw(random.Random(2)), 2000)]
    assert all(time % 20 <= 5 for time in times)


def test_one_trace_serves_every_rate_without_end() -> None:
    trace = draw_trace(50, seed=7)
    slow = list(islice(trace.schedule(2.0), 120))
    fast = list(islice(trace.schedule(8.0), 120))
    assert [planned.at_s for planned in slow] == pytest.approx([4 * planned.at_s for planned in fast])
    assert [planned.index for planned in slow] == list(range(120))
    assert [planned.output_tokens for planned in slow[:50]] == [planned.output_tokens for planned in slow[50:100]]
    assert all(later.at_s >= earlier.at_s for earlier, later in pairwise(slow))
    at_once = list(islice(trace.schedule(inf), 120))
    assert [planned.at_s for planned in at_once] == [0.0] * 120
    assert [planned.index for planned in at_once] == list(range(120))
    assert at_once[70].output_tokens == trace.entries[20].output_tokens


def test_the_default_workload() -> None:
    trace = draw_trace(20_000, seed=11)
    prompts = sorted(entry.prompt_tokens for entry in trace.entries)
    outputs = sorted(entry.output_tokens for entry in trace.entries)
    assert prompts[10_000] == pytest.approx(200, rel=0.03)
    assert outputs[10_000] == pytest.approx(100, rel=0.03)
    assert (prompts[0], prompts[-1], outputs[-1]) == (pytest.approx(20, abs=15), 1024, 1000)
    assert fmean(outputs) == pytest.approx(parse_lengths(DEFAULT_OUTPUTS).mean, rel=0.03)
    assert fmean(prompts) == pytest.approx(parse_lengths(DEFAULT_PROMPTS).mean, rel=0.03)


def test_the_seed_decides_and_other_arrivals_leave_lengths_alone() -> None:
    assert draw_trace(100, seed=1).sha256 == draw_trace(100, seed=1).sha256
    assert draw_trace(100, seed=1).sha256 != draw_trace(100, seed=2).sha256
    other = draw_trace(100, parse_arrivals("constant"), seed=1)
    assert [entry.output_tokens for entry in other.entries] == [
        entry.output_tokens for entry in draw_trace(100, seed=1).entries
    ]


def test_prompts_are_exact_repeatable_and_share_no_prefix() -> None:
    trace = draw_trace(3, seed=1)
    one, other = trace.prompt_ids(0, 200), trace.prompt_ids(1, 200)
    assert len(one) == 200
    assert one == draw_trace(3, seed=1).prompt_ids(0, 200)
    assert one[:16] != other[:16]


def test_a_prompt_of_another_length_shares_no_prefix() -> None:
    trace = draw_trace(3, seed=1)
    heads = {trace.prompt_ids(7, tokens)[:4] for tokens in range(16, 80)}
    assert len(heads) > 60  # of 64: four tokens of 95 kinds are rarely alike


def test_a_saved_trace_is_the_same_trace(tmp_path: Path) -> None:
    trace = draw_trace(30, parse_arrivals("bursts:k=3,spread_ms=5"), seed=4)
    digest = trace.save(tmp_path / "trace.jsonl")
    again = load_trace(tmp_path / "trace.jsonl")
    assert again == trace
    assert again.sha256 == digest


def test_a_foreign_trace_replays_in_its_own_time_and_rescales(tmp_path: Path) -> None:
    path = tmp_path / "foreign.jsonl"
    path.write_text(
        "".join(json.dumps({"at_s": at, "prompt_tokens": 5, "output_tokens": 7}) + "\n" for at in (3.0, 4.0, 8.0))
    )
    trace = load_trace(path)
    assert trace.natural_rate == pytest.approx(2 / 5)
    own = list(islice(trace.schedule(trace.natural_rate), 3))
    assert [planned.at_s for planned in own] == pytest.approx([0, 1, 5])
    assert [planned.at_s for planned in islice(trace.schedule(4.0), 3)] == pytest.approx([0, 0.1, 0.5])


def test_a_trace_whose_times_are_all_equal_comes_at_once(tmp_path: Path) -> None:
    """It was said to offer 1 request a second, and to come 30 at a time."""
    path = tmp_path / "equal.jsonl"
    path.write_text(30 * (json.dumps({"at_s": 7.5, "prompt_tokens": 5, "output_tokens": 7}) + "\n"))
    trace = load_trace(path)
    assert trace.at_once
    assert trace.natural_rate == inf
    assert trace.offered(inf, 0, 30).requests_per_s == inf
    assert [planned.at_s for planned in islice(trace.schedule(inf), 30)] == [0.0] * 30
    with pytest.raises(ValueError, match="a rate of 2 requests/s: all times of the trace are equal"):
        trace.schedule(2.0)
    trace.save(tmp_path / "saved.jsonl")
    json.loads((tmp_path / "saved.jsonl").read_text().splitlines()[0], parse_constant=pytest.fail)
    assert load_trace(tmp_path / "saved.jsonl") == trace
    assert not draw_trace(5, parse_arrivals("closed:clients=2")).at_once


def test_what_is_offered_is_counted_from_the_schedule() -> None:
    trace = draw_trace(100, parse_arrivals("constant"), seed=3)
    offered = trace.offered(4.0, 20, 50)
    assert offered.requests_per_s == pytest.approx(4)
    entries = trace.entries[20:70]
    assert offered.prompt_tokens_per_s == pytest.approx(4 * fmean(entry.prompt_tokens for entry in entries))
    assert offered.output_tokens_per_s == pytest.approx(4 * fmean(entry.output_tokens for entry in entries))
    chance = {round(draw_trace(40, seed=seed).offered(1.0, 0, 16).requests_per_s, 2) for seed in range(12)}
    assert min(chance) < 0.85 < 1.15 < max(chance)


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "{}",
        '{"at_s": 1, "prompt_tokens": 0, "output_tokens": 1}',
        '{"at_s": NaN, "prompt_tokens": 1, "output_tokens": 1}',
        '{"at_s": 1, "prompt_tokens": 1, "output_tokens": Infinity}',
        '{"at_s": 1, "offset_s": -1, "prompt_tokens": 1, "output_tokens": 1}',
        "[1]",
    ],
)
def test_a_bad_trace_names_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"at_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        load_trace(path)


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ("lognormal:median=100", "sigma is required"),
        ("lognormal:median=100,sigma=0", "above 0"),
        ("lognormal:median=100,sigma=1,max=0", "at least 1"),
        ("uniform:max=3", "none of"),
        ("fixed:tokens=x", "must be a whole number"),
        ("fixed:tokens=inf", "fixed:tokens is 'inf': must be a whole number"),
        ("lognormal:median=100,sigma=200", "lognormal:sigma is '200': must be a number above 0 and at most 10"),
        ("lognormal:median=nan,sigma=1", "lognormal:median is 'nan'"),
        ("lognormal:median=9,sigma=1,min=5,max=3", "lognormal:max is 3: must be at least lognormal:min"),
        ("fixed:size=3", "none of tokens"),
    ],
)
def test_bad_lengths_are_named(spec: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        parse_lengths(spec)


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ("bursts:k=4", "spread_ms is required"),
        ("on-off:requests=5,duty=2", "at most 1"),
        ("gamma:burstiness=0", "of at least 0.001"),
        ("closed:clients=0", "at least 1"),
        ("closed:clients=2.5", "whole number"),
        ("bursts:k=4,spread_ms=inf", "at most"),
    ],
)
def test_bad_arrivals_are_named(spec: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        parse_arrivals(spec)


def test_a_smallest_length_beyond_the_rest_is_the_only_one() -> None:
    assert parse_lengths("lognormal:median=1,sigma=0.1,min=50").values == (50,)


def test_a_saved_trace_that_was_changed_names_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    draw_trace(2).save(path)
    path.write_text(path.read_text().replace('"seed": 0', '"seed": NaN'))
    with pytest.raises(ValueError, match=r"line 1: not the head of a trace .*seed is nan"):
        load_trace(path)


def test_empirical_lengths(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("10\n30\n30\n")
    lengths = parse_lengths(f"empirical:{path}")
    assert lengths.mean == pytest.approx(70 / 3)
    rng = random.Random(0)
    assert {lengths.draw(rng) for _ in range(50)} == {10, 30}


def test_quantiles_of_lengths() -> None:
    prompts = parse_lengths(DEFAULT_PROMPTS)
    assert prompts.quantile(0.5) == pytest.approx(200, abs=1)
    assert prompts.quantile(0.0) == 8
    assert prompts.quantile(1.0) == 1024
    assert parse_lengths("fixed:tokens=7").quantile(0.3) == 7


def test_theory_of_padded_waste() -> None:
    """The design's figures for outputs of median 100, sigma 0.9, cap 1000."""
    outputs = parse_lengths(DEFAULT_OUTPUTS)
    waste = [round(100 * outputs.padded_waste(batch)) for batch in (1, 2, 4, 8, 16, 32)]
    assert waste == [0, 32, 51, 64, 72, 77]


def test_moments_match_draws() -> None:
    outputs = parse_lengths("lognormal:median=20,sigma=0.7,max=100")
    rng = random.Random(9)
    longest = [max(outputs.draw(rng) for _ in range(8)) for _ in range(4000)]
    assert fmean(longest) == pytest.approx(outputs.mean_of_longest(8), rel=0.02)


def test_a_longer_trace_begins_as_the_shorter_one_does() -> None:
    trace = draw_trace(50, parse_arrivals("bursts:k=4,spread_ms=10"), seed=3)
    longer = trace.longer(200)
    assert len(longer.entries) == 200
    assert longer.entries[:50] == trace.entries
    assert longer.longer(100) is longer
    assert longer.another(4).entries != longer.entries
