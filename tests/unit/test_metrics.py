"""What is counted, under labels of our own choosing."""

from dataclasses import replace

import pytest
import trio
import trio.testing

from wsbatch.engine.metrics import EngineMetrics, RequestMetrics
from wsbatch.messages import BatchReport, Finished, Timing, Usage
from wsbatch.pool.metrics import PoolMetrics
from wsbatch.server.metrics import ServerMetrics


def test_a_peer_chooses_no_labels() -> None:
    metrics = RequestMetrics(running=lambda: 0, waiting=lambda: 0)
    finished = Finished(1, "stop", "", Usage(1, 1), Timing(0, 0, 0, 0), BatchReport(1, 1.0, 1, 1, 0.0))
    before = metrics.render().count(b"\n")
    for number in range(100):
        metrics.count_refused(f"code {number}\n")
        metrics.observe_finished(replace(finished, finish_reason=f"reason {number}"))  # type: ignore[arg-type]
    text = metrics.render()
    assert b'wsbatch_requests_refused_total{code="other"} 100.0\n' in text
    assert b'wsbatch_request_success_total{finished_reason="other"} 100.0\n' in text
    assert text.count(b"\n") <= before + 20
    metrics.count_refused("queue_full")
    assert b'{code="queue_full"} 1.0\n' in metrics.render()


def samples(page: bytes, name: str) -> list[str]:
    return [line for line in page.decode().splitlines() if line.startswith(name)]


def test_the_page_has_what_the_engine_counts_and_what_the_server_does() -> None:
    engine, server = EngineMetrics(running=lambda: 3, waiting=lambda: 2, cache=lambda: None), ServerMetrics()
    server.connections.inc()
    page = server.page(engine)
    for line in ("wsbatch_num_requests_running 3.0", "wsbatch_connections 1.0", "wsbatch_batch_size_count 0.0"):
        assert f"\n{line}\n".encode() in page
    heads = [line for line in page.decode().splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads)), "a family stands twice"


def test_refusals_of_both_are_one_family_of_sums() -> None:
    engine, server = RequestMetrics(running=lambda: 0, waiting=lambda: 0), ServerMetrics()
    for metrics, codes in ((engine, ("queue_full", "bad_request")), (server, ("queue_full", "draining"))):
        for code in codes:
            metrics.count_refused(code)
    page = server.page(engine)
    assert samples(page, "wsbatch_requests_refused_total") == [
        'wsbatch_requests_refused_total{code="queue_full"} 2.0',
        'wsbatch_requests_refused_total{code="bad_request"} 1.0',
        'wsbatch_requests_refused_total{code="draining"} 1.0',
    ]
    created = samples(engine.render(), 'wsbatch_requests_refused_created{code="queue_full"}')
    assert samples(page, 'wsbatch_requests_refused_created{code="queue_full"}') == created
    assert page == server.page(engine), "looking changes nothing"


def test_a_pool_counts_no_steps() -> None:
    pool = PoolMetrics(running=lambda: 0, waiting=lambda: 0, ready=lambda: 2, ejected=lambda: 1)
    names = {family.name for family in pool.registry.collect()}
    assert {"wsbatch_replicas_ready", "wsbatch_requests_moved", "wsbatch_time_to_first_token_seconds"} <= names
    steps = EngineMetrics(running=lambda: 0, waiting=lambda: 0, cache=lambda: None)
    only_steps = {family.name for family in steps.registry.collect()} - names
    assert {"wsbatch_batch_size", "wsbatch_step_seconds", "wsbatch_slot_utilization"} <= only_steps


async def test_watching_the_loop_looks_at_every_connection_only_once_a_second(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trio's statistics walk over all sockets: at every tick that was a seventh of a server with 900 clients."""
    looks, statistics = 0, trio.lowlevel.current_statistics

    def count() -> trio.lowlevel.RunStatistics:
        nonlocal looks
        looks += 1
        return statistics()

    monkeypatch.setattr("trio.lowlevel.current_statistics", count)
    metrics = ServerMetrics()
    with trio.move_on_after(9.9):
        await metrics.watch_loop()
    assert looks == 10
    assert metrics.registry.get_sample_value("wsbatch_trio_tasks") == statistics().tasks_living
    assert metrics.registry.get_sample_value("wsbatch_event_loop_lag_seconds_count") == pytest.approx(1980, abs=2)
