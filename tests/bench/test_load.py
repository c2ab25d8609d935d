"""The load generator over the whole server, in virtual time: what it sends, what it counts, what it notices."""

from functools import partial
from itertools import islice
from math import inf, isfinite

import pytest
import trio

from wsbatch.batching.costs import CostModel
from wsbatch.messages import SamplingParams
from wsbatch.steps import PaddedStart, StepPlan, StepResult
from wsbatch.testing import VirtualWorker
from wsbatch_bench.load.generator import STOPPED
from wsbatch_bench.quantiles import mean_interval, observed_quantile
from wsbatch_bench.stability import judge

from .harness import load, short_trace, stall_once


def test_every_request_goes_out_at_its_scheduled_time_whatever_becomes_of_the_others() -> None:
    """A server five times too slow: an open loop does not care."""
    trace = short_trace(20)
    run = load(trace, 40.0, costs=CostModel(tau_s=0.1, alpha_s=0.0, beta_s=0.0))
    planned = [planned.at_s for planned in islice(trace.schedule(40.0), len(run.records))]
    assert [record.scheduled_s for record in run.records] == planned
    assert [record.sent_s for record in run.records] == pytest.approx(planned)
    assert run.worst_lag_s == pytest.approx(0, abs=1e-6)


def test_load_goes_on_until_the_last_measured_request_has_ended() -> None:
    run = load(short_trace(40, output=40), 10.0, warmup=10, measured=20)
    last_end_s = max(record.ended_s for record in run.measured)
    assert run.window_s == (run.measured[0].scheduled_s, last_end_s)
    assert len(run.measured) == 20
    assert run.measured[0].index == 10
    cooldown = [record for record in run.records if record.index >= 30]
    assert cooldown
    assert all(record.scheduled_s <= last_end_s for record in cooldown)
    assert last_end_s - cooldown[-1].scheduled_s < 0.5  # it did not stop before
    assert all(record.ok for record in run.records)


def test_tokens_are_counted_and_equal_the_servers_own_accounting() -> None:
    run = load(short_trace(60, prompt=30, output=7), 40.0, warmup=10)
    assert run.totals is not None
    assert all(record.tokens == record.reported_tokens == 7 for record in run.records)
    assert sum(record.tokens for record in run.records) == run.totals.generation_tokens
    assert sum(record.prompt_tokens for record in run.records) == run.totals.prompt_tokens
    assert run.window_totals is not None
    assert 0 < run.window_totals.generation_tokens < run.totals.generation_tokens


def test_the_parts_of_the_time_to_first_token_sum_to_it() -> None:
    run = load(short_trace(60), 30.0, max_wait_ms=30.0)
    parts = [(record.ttft_parts_s(), record.ttft_s) for record in run.records]
    for each, ttft_s in parts:
        assert each is not None
        assert sum(each.values()) == pytest.approx(ttft_s, abs=1e-9)
        assert all(part >= -1e-6 for part in each.values())
    for name in ("queue", "batch_wait", "prefill"):
        assert any(each is not None and each[name] > 0.001 for each, _ in parts), name


def test_failures_are_infinitely_late_and_stay_in_the_count() -> None:
    run = load(short_trace(40), 1000.0, max_queue_requests=4)
    failed = [record for record in run.measured if not record.ok]
    assert {record.error for record in failed} == {"queue_full"}
    assert len(run.measured) == 40
    assert all(record.e2e_s == record.ttft_s == record.tpot_s == inf for record in failed)
    assert observed_quantile([record.e2e_s for record in run.measured], 0.95) == inf
    assert run.totals is not None
    assert run.totals.refused == {"queue_full": len([record for record in run.records if not record.ok])}


def test_a_closed_loop_keeps_its_clients_busy_and_no_more() -> None:
    run = load(short_trace(30, "closed:clients=3,think_ms=50"), 1.0, measured=30)
    times = [(record.sent_s, 1) for record in run.records] + [(record.ended_s, -1) for record in run.records]
    live = most = 0
    for _, step in sorted(times):
        live += step
        most = max(most, live)
    assert most == 3
    assert len(run.measured) == 30
    assert min(record.scheduled_s for record in run.records) == pytest.approx(0.05)


def test_an_infinite_rate_sends_all_at_once() -> None:
    run = load(short_trace(12), inf)
    assert [record.sent_s for record in run.records] == [0.0] * 12
    assert all(record.ok for record in run.records)


def test_sampled_requests_draw_their_tokens_and_a_second_run_draws_the_same() -> None:
    asked: list[list[SamplingParams]] = [[], []]

    def keep(worker: VirtualWorker, into: list[SamplingParams]) -> None:
        step = worker.step

        async def watched(plan: StepPlan) -> StepResult:
            nonlocal into
            if isinstance(plan, PaddedStart):
                into += [row.sampling for row in plan.rows]
            return await step(plan)

        worker.step = watched  # type: ignore[method-assign]

    for into in asked:
        run = load(
            short_trace(20), 20.0, sampling=SamplingParams(temperature=0.7, top_p=0.9), prepare=partial(keep, into=into)
        )
        assert all(record.ok and record.tokens == 5 for record in run.measured)
    first, second = asked
    assert {(each.temperature, each.top_p) for each in first} == {(0.7, 0.9)}
    assert len({each.seed for each in first}) == len(first)
    assert [each.seed for each in first] == [each.seed for each in second]


def test_two_runs_of_one_cell_are_equal() -> None:
    """Six clients whose answers end together, and four slots: who is next is decided by the order of tasks."""
    trace = short_trace(60, "closed:clients=6")
    runs = [load(trace, 1.0, measured=60, max_wait_ms=5.0, wait_anchor="idle") for _ in range(4)]
    arrivals = [[record.arrivals for record in run.records] for run in runs]
    assert arrivals[0] == arrivals[1] == arrivals[2] == arrivals[3]


@pytest.mark.parametrize("rho", [0.5, 0.7])
def test_the_mean_wait_of_an_md1_queue(rho: float) -> None:
    """One slot, one token each: a constant service time. Pollaczek-Khinchine: W = rho * S / (2 * (1 - rho))."""
    service_s = 0.1
    costs = CostModel(tau_s=service_s, alpha_s=0.0, beta_s=0.0)
    trace = short_trace(4200, prompt=1, output=1, seed=5)
    run = load(trace, rho / service_s, warmup=200, costs=costs, max_batch_size=1)
    waits = [record.timing.queue_ms / 1000 for record in run.measured if record.timing is not None]
    interval = mean_interval(waits)
    assert len(waits) == 4000
    assert interval.low <= rho * service_s / (2 * (1 - rho)) <= interval.high
    assert interval.high - interval.low < interval.value  # an interval that says something


def test_a_stall_of_the_server_shows_in_p95() -> None:
    """At 10 requests a second a stall of 1 s touches a tenth of 100: measured from the schedule it cannot hide."""
    trace = short_trace(100)
    smooth = load(trace, 10.0)
    stalled = load(trace, 10.0, prepare=lambda worker: stall_once(worker, 5.0, 1.0))
    p95 = [observed_quantile([record.e2e_s for record in run.measured], 0.95) for run in (smooth, stalled)]
    assert p95[0] < 0.15
    assert p95[1] > 0.4
    assert stalled.worst_lag_s < 0.001  # the server's, not this client's


def test_a_stall_of_the_client_is_noticed() -> None:
    """The clock jumps by 0.4 s: what happens to a process that is held up."""

    def hold_up(worker: VirtualWorker) -> None:
        async def jump() -> None:
            await trio.sleep(2.0)
            trio.lowlevel.current_clock().jump(0.4)  # type: ignore[attr-defined]

        trio.lowlevel.spawn_system_task(jump)

    run = load(short_trace(50), 10.0, prepare=hold_up)
    assert run.worst_lag_s >= 0.35
    held = max(run.records, key=lambda record: record.lag_s)
    assert held.lag_s > 0.1
    assert held.ttft_s > held.lag_s  # from the scheduled time: the delay is not lost


def test_a_server_that_falls_behind_is_left_early() -> None:
    run = load(short_trace(400), 200.0, warmup=20, stop_unstable=True, max_batch_size=1)
    assert run.stopped_early
    assert len(run.records) < 400
    assert any(record.error == STOPPED for record in run.measured)
    assert judge(run.sojourns, *run.window_s).verdict == "unstable"
    assert run.window_totals is not None
    assert isfinite(run.window_s[1])


def test_a_server_that_keeps_up_is_not() -> None:
    run = load(short_trace(300), 20.0, warmup=20, stop_unstable=True)
    assert not run.stopped_early
    assert judge(run.sojourns, run.window_s[0], run.measured[-1].scheduled_s).verdict == "stable"
