"""Adding a run up: what counts, what is doubted, and under which names it is written."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import islice
from math import inf, isnan
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from wsbatch.config import EngineConfig
from wsbatch.messages import Accepted, BatchReport, Finished, Timing, Tokens, Usage
from wsbatch_bench.cli.compare import table
from wsbatch_bench.load.generator import LoadPlan, LoadRun, run_load
from wsbatch_bench.load.record import Record
from wsbatch_bench.load.results import result_json, summary_lines
from wsbatch_bench.load.server import ServerTotals, parse_totals
from wsbatch_bench.load.specs import parse_lengths
from wsbatch_bench.load.summary import parse_goodput, summarise
from wsbatch_bench.load.target import open_websocket_target
from wsbatch_bench.load.trace import draw_trace
from wsbatch_bench.sweep.stage import open_virtual_target, run_virtual

from .harness import COSTS, load, short_trace, stall_once


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


def test_throughput_is_of_the_measured_requests_as_in_vllm_and_what_else_was_served_is_told_apart() -> None:
    """Ten measured requests from 1 s to 10.3 s, one a second of 3 tokens; one before and one after end within it."""
    records = [record(index, float(index)) for index in range(13)]
    records[0].arrivals = [(1.1, 1), (1.2, 1), (1.3, 1)]
    records[11].arrivals = [(10.1, 1), (10.2, 1), (10.4, 1)]
    records[0].ended_s, records[11].ended_s = 1.3, 10.2
    summary = summarise(made_run(records, warmup=1))
    assert summary.sent == summary.completed == 10
    assert summary.duration_s == pytest.approx(9.3)
    assert summary.request_throughput == pytest.approx(10 / 9.3)
    assert summary.output_throughput == pytest.approx(30 / 9.3)
    assert summary.served_requests_per_s == pytest.approx(12 / 9.3)
    assert summary.served_tokens_per_s == pytest.approx(35 / 9.3)
    assert summary.e2e.p50 == pytest.approx(0.3)
    assert summary.tpot.p95.value == pytest.approx(0.1)


def test_goodput_counts_requests_within_every_bound() -> None:
    records = [record(index, float(index), ttft_s=0.1 * (index + 1)) for index in range(10)]
    summary = summarise(made_run(records), goodput=parse_goodput(["ttft:450", "e2el:10000", "tpot:150"]))
    assert summary.goodput == pytest.approx(4 / summary.duration_s)
    assert summarise(made_run(records)).goodput is None


def test_goodput_is_the_throughput_where_every_request_meets_its_bounds() -> None:
    run = load(short_trace(90), 60.0, warmup=20, measured=40)
    summary = summarise(run, goodput=parse_goodput(["e2el:60000", "tpot:60000"]))
    assert summary.completed == 40
    assert summary.goodput == summary.request_throughput == pytest.approx(40 / summary.duration_s)
    assert summary.output_throughput == pytest.approx(40 * 5 / summary.duration_s)
    result = result_json(run, summary, backend="wsbatch", model="m")
    assert result["output_throughput"] == pytest.approx(result["total_output_tokens"] / result["duration"])


def test_answers_of_one_token_have_no_time_per_token() -> None:
    """Eight of ten: they made a median of 0, the best in every table."""
    records = [record(index, float(index), tokens=3 if index in (2, 5) else 1) for index in range(10)]
    run = made_run(records)
    summary = summarise(run, goodput=parse_goodput(["tpot:50"]))
    assert (summary.tpot.p50, summary.tpot_undefined) == (pytest.approx(0.1), 8)
    assert summary.goodput == pytest.approx(8 / summary.duration_s)  # nothing of theirs can be late
    assert "leaves out 8 of 10 answers" in "\n".join(summary_lines(run, summary))
    records = [record(index, float(index), tokens=1) for index in range(10)]
    records[9].failed("shed", 9.0)
    run = made_run(records)
    summary = summarise(run)
    assert isnan(summary.tpot.p50)
    result = json.loads(json.dumps(result_json(run, summary, backend="wsbatch", model="m")))
    assert result["p50_tpot_ms"] is None
    (*_, row) = table([("ones", result)])
    cells = dict(zip(table([("ones", result)])[0].split(" | "), row.split(" | "), strict=True))
    assert cells["per token p50 ms"] == cells["longest gap ms"] == "–"
    assert cells["end to end p95 ms"] == "∞"
    assert "9 of 9 answers have no time per token" in row


def test_a_failure_is_infinite_among_answers_that_have_a_time_per_token() -> None:
    records = [record(index, float(index)) for index in range(10)]
    records[4].failed("shed", 4.0)
    summary = summarise(made_run(records))
    assert summary.tpot.p50 == pytest.approx(0.1)
    assert summary.tpot.p95.value == inf
    assert summary.tpot_undefined == 0


def test_a_stall_within_answers_shows_between_tokens_where_the_time_per_token_hides_it() -> None:
    smooth = load(short_trace(40, output=20), 2.0)
    stalled = load(short_trace(40, output=20), 2.0, prepare=lambda worker: stall_once(worker, 5.0, 1.0))
    before, after = summarise(smooth), summarise(stalled)
    assert before.itl.p50 == after.itl.p50 == pytest.approx(before.tpot.p50, rel=0.1)
    assert before.itl.longest < 0.05
    assert after.itl.longest > 0.9
    assert after.tpot.p95.value < 0.1
    line = next(line for line in summary_lines(stalled, after) if line.startswith("between tokens"))
    assert "longest 1,0" in line
    result = result_json(stalled, after, backend="wsbatch", model="m")
    assert result["max_itl_ms"] == pytest.approx(1000 * after.itl.longest)
    assert max(gap for gaps in result["itls"] for gap in gaps) == after.itl.longest


def test_answers_out_of_the_prefix_cache_are_reported() -> None:
    """The same prompts twice on one server: the second run's time to the first token is another thing."""
    trace = short_trace(20, prompt=200)

    async def main() -> list[LoadRun]:
        config = EngineConfig(model="simulated", scheduler="continuous", max_batch_size=4)
        async with open_virtual_target(config, COSTS) as (target, _):
            plan = LoadPlan(trace=trace, rate=1.0, warmup=0, measured=20)
            return [await run_load(target, plan) for _ in range(2)]

    first, second = run_virtual(main)
    cold, warm = summarise(first), summarise(second)
    assert (cold.cache_hits, cold.cached_share) == (0, 0)
    assert warm.cache_hits == 20
    assert warm.cached_share > 0.9
    assert warm.ttft.p50 < cold.ttft.p50
    assert "prefix cache: 20 of 20 answers" in "\n".join(summary_lines(second, warm))
    rows = table([(name, result_json(run, summary, backend="wsbatch", model="m")) for name, run, summary in
                  (("cold", first, cold), ("warm", second, warm))])  # fmt: skip
    assert "prefix cache" not in rows[2]
    assert "of the prompt tokens from its prefix cache" in rows[3]


def test_the_offered_load_is_what_was_sent_and_stands_beside_what_was_stated() -> None:
    """Sixteen requests of the default seed at 1 a second: chance makes three quarters of it."""
    trace = draw_trace(40, seed=0, prompts=parse_lengths("fixed:tokens=8"), outputs=parse_lengths("fixed:tokens=4"))
    run = load(trace, 1.0, measured=16)
    times = [planned.at_s for planned in islice(trace.schedule(1.0), 17)]
    summary = summarise(run)
    assert summary.offered.requests_per_s == pytest.approx(16 / (times[16] - times[0]))
    assert summary.offered.requests_per_s < 0.9
    assert summary.offered.prompt_tokens_per_s == pytest.approx(8 * summary.offered.requests_per_s)
    assert summary.offered.output_tokens_per_s == pytest.approx(4 * summary.offered.requests_per_s)
    (line,) = (line for line in summary_lines(run, summary) if line.startswith("offered"))
    assert f"{summary.offered.requests_per_s:.3g} requests/s (stated: 1), " in line
    head, _, row = table([("run", result_json(run, summary, backend="wsbatch", model="m"))])
    assert f"| 1.0 | {summary.offered.requests_per_s:.3g} |" in row
    assert "| stated rate | offered/s |" in head


def test_a_closed_loop_offers_what_its_answers_let_it() -> None:
    run = load(short_trace(40, "closed:clients=2,think_ms=100"), 1.0, warmup=10, measured=20)
    summary = summarise(run)
    first, after = run.records[10].scheduled_s, run.records[30].scheduled_s
    assert summary.offered.requests_per_s == pytest.approx(20 / (after - first))
    (line,) = (line for line in summary_lines(run, summary) if line.startswith("offered"))
    assert "stated" not in line
    assert "closed:clients=2" in line


def test_a_trace_that_is_sent_over_and_over_says_so() -> None:
    run = load(short_trace(5), 20.0, measured=30)
    summary = summarise(run)
    assert f", 5 requests, {len(run.records)} sent: over and over" in summary_lines(run, summary)[0]
    assert (
        "a trace of 5 requests, over and over"
        in table([("run", result_json(run, summary, backend="wsbatch", model="m"))])[-1]
    )
    enough = load(short_trace(60), 20.0, measured=30)
    assert "over and over" not in summary_lines(enough, summarise(enough))[0]


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
    text = "\n".join(summary_lines(run, summarise(run)))
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

    lost = False

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
    run = load(short_trace(300), 20.0, warmup=10)
    summary = summarise(run)
    assert summary.client_tokens == summary.server_tokens
    assert summary.invalid == ()
    assert summary.stability.verdict == "stable"
    assert summary.stability.little_ratio == pytest.approx(1, abs=0.15)
    assert 0 < summary.slot_utilization <= 1


def test_of_requests_that_all_come_at_once_no_stability_is_claimed() -> None:
    stability = summarise(load(short_trace(60), inf)).stability
    assert stability.verdict == "undecided"
    assert isnan(stability.growth.value)
    assert isnan(stability.little_ratio)
