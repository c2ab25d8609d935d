"""Adding a run up: what counts, what is doubted, and under which names it is written."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from wsbatch.messages import Accepted, BatchReport, Finished, Timing, Tokens, Usage
from wsbatch_bench.load.generator import LoadPlan, LoadRun, run_load
from wsbatch_bench.load.record import Record
from wsbatch_bench.load.results import result_json, summary_lines
from wsbatch_bench.load.server import ServerTotals, parse_totals
from wsbatch_bench.load.summary import parse_goodput, summarise
from wsbatch_bench.load.target import open_websocket_target

from .harness import load, short_trace


def record(index: int, at_s: float, *, ttft_s: float = 0.1, tokens: int = 3, gap_s: float = 0.1) -> Record:
    arrivals = [(at_s + ttft_s + gap_s * number, 1) for number in range(tokens)]
    return Record(
        index=index,
        prompt_tokens=5,
        output_tokens=tokens,
        scheduled_s=at_s,
        sent_s=at_s,
        arrivals=arrivals,
        ended_s=arrivals[-1][0],
        reported_tokens=tokens,
        timing=Timing(20.0, 80.0, 100.0, 300.0, 5.0),
    )


def made_run(records: list[Record], *, warmup: int = 0, totals: ServerTotals | None = None) -> LoadRun:
    plan = LoadPlan(trace=short_trace(10), rate=1.0, warmup=warmup, measured=10)
    run = LoadRun(plan, records, totals=totals)
    run.window_s = (run.measured[0].scheduled_s, max(each.ended_s for each in run.measured))
    return run


def test_throughput_is_of_the_window_and_of_whoever_was_served_in_it() -> None:
    """Ten measured requests from 1 s to 10.3 s, one a second of 3 tokens; one before and one after in flight."""
    records = [record(index, float(index)) for index in range(13)]
    summary = summarise(made_run(records, warmup=1))
    assert summary.sent == summary.completed == 10
    assert summary.duration_s == pytest.approx(9.3)
    assert summary.request_throughput == pytest.approx(10 / 9.3)
    assert summary.output_throughput == pytest.approx(30 / 9.3)
    assert summary.e2e.p50 == pytest.approx(0.3)
    assert summary.tpot.p95.value == pytest.approx(0.1)


def test_goodput_counts_requests_within_every_bound() -> None:
    records = [record(index, float(index), ttft_s=0.1 * (index + 1)) for index in range(10)]
    summary = summarise(made_run(records), goodput=parse_goodput(["ttft:450", "e2el:10000", "tpot:150"]))
    assert summary.goodput == pytest.approx(4 / summary.duration_s)
    assert summarise(made_run(records)).goodput is None


def test_a_late_client_or_a_count_that_differs_makes_it_invalid() -> None:
    records = [record(index, float(index)) for index in range(10)]
    agreed = ServerTotals(generation_tokens=30)
    assert summarise(made_run(records, totals=agreed)).invalid == ()
    late = made_run(records, totals=agreed)
    late.worst_lag_s = 0.2
    assert summarise(late).invalid == ("this client was up to 200 ms late: at most 100 ms is allowed",)
    assert summarise(late, max_lag_s=0.3).invalid == ()
    lost = summarise(made_run(records, totals=ServerTotals(generation_tokens=31)))
    assert lost.invalid == ("30 tokens came, the server counts 31",)
    records[3].arrivals.pop()
    assert "did not get exactly the tokens" in summarise(made_run(records, totals=agreed)).invalid[-1]


def test_the_parts_are_of_the_request_that_is_p95() -> None:
    records = [record(index, float(index), ttft_s=0.1 + 0.01 * index) for index in range(10)]
    summary = summarise(made_run(records))
    assert sum(summary.ttft_parts_p95.values()) == pytest.approx(summary.ttft.p95.value)
    assert summary.ttft_parts_p95["network"] == pytest.approx(0.09)
    assert summary.ttft_parts["batch_wait"] == pytest.approx(0.005)
    assert summary.ttft_parts["queue"] == pytest.approx(0.015)
    assert summary.ttft_parts["prefill"] == pytest.approx(0.080)


def test_latencies_from_sending_leave_the_clients_lag_out() -> None:
    records = [replace(record(index, float(index)), sent_s=index + 0.05) for index in range(10)]
    summary = summarise(made_run(records))
    assert summary.ttft.p50 == pytest.approx(0.1)
    assert summary.ttft_sent.p50 == pytest.approx(0.05)
    assert summary.ttft_parts["client_lag"] == pytest.approx(0.05)


def test_failures_in_json_are_null_and_the_keys_are_vllms() -> None:
    records = [record(index, float(index)) for index in range(10)]
    records[4].failed("queue_full", 4.0)
    run = made_run(records)
    result = json.loads(json.dumps(result_json(run, summarise(run), backend="wsbatch", model="demo"), allow_nan=False))
    assert (result["completed"], result["failed"]) == (9, 1)
    assert result["p50_ttft_ms"] == pytest.approx(100)
    assert result["p95_ttft_ms"] is None
    assert result["mean_ttft_ms"] == pytest.approx(100)
    assert result["errors"][4] == "queue_full"
    for key in ("date", "model_id", "num_prompts", "request_rate", "burstiness", "duration", "total_input_tokens",
                "total_output_tokens", "request_throughput", "output_throughput", "total_token_throughput", "itls",
                "std_itl_ms", "median_tpot_ms", "p99_e2el_ms"):  # fmt: skip
        assert key in result
    assert result["wsbatch"]["trace_sha256"] == run.plan.trace.sha256


def test_the_report_says_what_is_wrong() -> None:
    records = [record(index, float(index)) for index in range(10)]
    records[4].failed("shed", 4.0)
    run = made_run(records, totals=ServerTotals(generation_tokens=99))
    text = "\n".join(summary_lines(summarise(run), offered="1 requests/s"))
    assert "answered 9, shed 1" in text
    assert "∞" in text
    assert "INVALID" in text


@pytest.mark.parametrize("pair", ["ttft", "ttft:fast", "ttft:0", "latency:5"])
def test_a_bad_goodput_is_refused(pair: str) -> None:
    with pytest.raises(ValueError, match="goodput"):
        parse_goodput([pair])


def test_server_totals_are_read_by_name_and_subtracted() -> None:
    text = (
        '# TYPE wsbatch_issued_tokens counter\nwsbatch_issued_tokens_total{phase="decode"} 100.0\n'
        '# TYPE wsbatch_useful_tokens counter\nwsbatch_useful_tokens_total{phase="decode"} 60.0\n'
        '# TYPE wsbatch_requests_refused counter\nwsbatch_requests_refused_total{code="shed"} 3.0\n'
        "# TYPE wsbatch_generation_tokens counter\nwsbatch_generation_tokens_total 70.0\n"
    )
    totals = parse_totals(text)
    assert totals.generation_tokens == 70
    assert totals.slot_utilization == pytest.approx(0.6)
    assert totals.waste_fraction == pytest.approx(0.4)
    assert totals.refused == {"shed": 3}
    assert totals.since(parse_totals("")).refused == {"shed": 3}
    assert totals.since(totals).generation_tokens == 0


class MergingClient:
    """A client whose server has merged three tokens into one frame."""

    class hello:  # noqa: N801
        model = "merged"

    @asynccontextmanager
    async def generate(self, request: Any) -> AsyncIterator[AsyncIterator[Any]]:
        async def events() -> AsyncIterator[Any]:
            yield Accepted(1, 5, 0, 7)
            await trio.sleep(0.5)
            yield Tokens(1, 0, (1, 2, 3), "abc")
            yield Finished(1, "length", "", Usage(5, 3), Timing(0, 500, 500, 500), BatchReport(1, 1, 3, 3, 0))

        yield events()


async def test_tokens_are_counted_and_not_frames(autojump_clock: MockClock) -> None:
    @asynccontextmanager
    async def connect() -> AsyncIterator[Any]:
        yield MergingClient()

    async def unused() -> trio.abc.Stream:
        raise OSError

    async def no_totals() -> None:
        await trio.lowlevel.checkpoint()

    async with open_websocket_target(connect, dial=unused, host="", connections=1) as target:
        target.totals = no_totals  # type: ignore[assignment, method-assign]
        plan = LoadPlan(trace=short_trace(4, output=3), rate=inf, warmup=0, measured=4)
        run = await run_load(target, plan)
    assert [each.tokens for each in run.records] == [3] * 4
    assert [len(each.arrivals) for each in run.records] == [1] * 4
    assert summarise(run).output_throughput == pytest.approx(24)
    assert target.connections == 4  # each live request has its own


def test_a_real_run_is_consistent_with_itself() -> None:
    run = load(short_trace(80), 20.0, warmup=10)
    summary = summarise(run)
    assert summary.client_tokens == summary.server_tokens
    assert summary.invalid == ()
    assert summary.stability.verdict == "stable"
    assert summary.stability.little_ratio == pytest.approx(1, abs=0.15)
    assert 0 < summary.slot_utilization <= 1
