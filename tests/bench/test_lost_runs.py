"""Runs that do not go as planned: what was measured is kept, and none of them lasts for ever."""

from collections.abc import Collection
from math import inf

import pytest
import trio

from wsbatch_bench.load.generator import INTERRUPTED, TIMED_OUT, LoadPlan, LoadRun, run_load
from wsbatch_bench.load.record import Record
from wsbatch_bench.load.server import ServerTotals
from wsbatch_bench.load.summary import summarise
from wsbatch_bench.sweep.stage import run_virtual

from .harness import load, short_trace


class Answering:
    """Every answer takes a second, until the server dies; some never come."""

    backend = model = "fake"

    def __init__(self, *, dies_s: float = inf, never: Collection[int] = (), mute: bool = False) -> None:
        self.dies_s = dies_s
        self._never = never
        self._mute = mute
        self._asked = 0

    async def send(self, record: Record, prompt_ids: tuple[int, ...], start_s: float) -> None:
        record.sent_s = trio.current_time() - start_s
        if record.sent_s >= self.dies_s:
            record.failed("ConnectionLost", record.sent_s, "nobody listens", unreached=True)
            return
        await trio.sleep(inf if record.index in self._never else 1.0)
        now_s = trio.current_time() - start_s
        if now_s >= self.dies_s:
            record.failed("ConnectionLost", now_s, "the connection broke")
            return
        record.arrivals.append((now_s, record.output_tokens))
        record.reported_tokens, record.ended_s = record.output_tokens, now_s

    async def totals(self) -> ServerTotals | None:
        self._asked += 1
        if self._mute and self._asked > 1:
            await trio.sleep_forever()
        return None


def run(
    target: Answering, *, warmup: int = 0, measured: int = 100, interrupt_s: float = inf, rate: float = 10.0,
    request_timeout_s: float = inf, arrivals: str = "constant",
) -> LoadRun:  # fmt: skip
    async def main() -> LoadRun:
        interrupt = trio.Event()

        async def press() -> None:
            await trio.sleep(interrupt_s)
            interrupt.set()

        plan = LoadPlan(
            trace=short_trace(200, arrivals),
            rate=rate,
            warmup=warmup,
            measured=measured,
            request_timeout_s=request_timeout_s,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(press)
            done = await run_load(target, plan, interrupt=interrupt)
            nursery.cancel_scope.cancel()
        return done

    return run_virtual(main)


@pytest.mark.parametrize("arrivals", ["constant", "closed:clients=8"])
def test_a_request_that_never_ends_is_given_up_and_counts_as_failed(arrivals: str) -> None:
    done = run(Answering(never=(3, 50)), request_timeout_s=5.0, arrivals=arrivals)
    summary = summarise(done)
    assert (summary.sent, summary.completed, summary.errors) == (100, 98, {TIMED_OUT: 2})
    assert summary.success.value == 0.98
    assert summary.e2e.p99 == inf
    assert [record.message for record in done.measured if not record.ok] == ["no end within 5 s"] * 2


def test_a_server_that_dies_ends_the_run_and_what_was_measured_is_kept() -> None:
    done = run(Answering(dies_s=5.05), measured=1000)
    assert done.lost == "nobody listens"
    assert len(done.records) == 71  # not those of the rest of the 100 s
    summary = summarise(done)
    assert summary.completed == 41
    assert summary.errors == {"ConnectionLost": summary.sent - 41}
    assert "the server was lost: nobody listens" in summary.invalid
    assert summary.e2e.p95.value == inf


@pytest.mark.parametrize("warmup", [0, 500])
def test_a_server_that_was_never_there_and_one_that_dies_during_the_warm_up(warmup: int) -> None:
    done = run(Answering(dies_s=0.0 if warmup == 0 else 2.0), warmup=warmup)
    assert done.lost
    assert summarise(done).completed == 0


def test_a_server_that_is_soon_there_again_is_not_lost() -> None:
    class Restarted(Answering):
        async def send(self, record: Record, prompt_ids: tuple[int, ...], start_s: float) -> None:
            self.dies_s = 3.05 if record.index <= 31 + 18 else inf
            await super().send(record, prompt_ids, start_s)

    done = run(Restarted())
    assert not done.lost
    summary = summarise(done)
    assert (summary.sent, summary.errors) == (100, {"ConnectionLost": 10 + 19})  # in flight, and in between


@pytest.mark.parametrize("mute", [False, True], ids=["told", "mute"])
def test_an_interrupted_run_keeps_what_was_measured(mute: bool) -> None:
    done = run(Answering(mute=mute), warmup=10, interrupt_s=5.05)
    assert done.interrupted
    assert done.window_s == (1.0, 5.05)
    summary = summarise(done)
    assert summary.sent == 41  # of 51, ten of them to warm up
    # The last ten are in flight. A server that does not tell its accounting is waited for a little: they end meanwhile.
    assert summary.errors == ({} if mute else {INTERRUPTED: 10})
    assert any(reason.startswith("interrupted: 41 of 100") for reason in summary.invalid)


def test_a_run_that_is_interrupted_before_anything_is_measured() -> None:
    done = run(Answering(), warmup=100, interrupt_s=2.0)
    assert (done.interrupted, done.measured) == (True, [])
    assert "nothing was measured" in summarise(done).invalid


def test_a_server_that_does_not_tell_its_accounting_at_the_end_is_lost() -> None:
    done = run(Answering(mute=True))
    assert "did not tell its accounting" in done.lost
    assert summarise(done).completed == 100


def test_a_trace_shorter_than_the_count_does_not_hang_at_an_infinite_rate() -> None:
    done = load(short_trace(5), inf, warmup=2, measured=10)
    assert [record.index for record in done.records] == list(range(12))
    assert summarise(done).completed == 10


@pytest.mark.parametrize(
    ("rate", "arrivals", "measured", "expected"),
    [(0.1, "poisson", 100, 16), (2.0, "poisson", 200, 60), (2.0, "poisson", 20, 20), (inf, "poisson", 200, 200),
     (inf, "poisson", 5000, 512), (1.0, "closed:clients=40", 200, 40)],
)  # fmt: skip
def test_connections_are_opened_before_the_load_that_needs_them(
    rate: float, arrivals: str, measured: int, expected: int
) -> None:
    plan = LoadPlan(trace=short_trace(10, arrivals), rate=rate, warmup=0, measured=measured)
    assert plan.connections == expected
