"""The load generator: open loop, each request sent at its scheduled time whatever became of the others."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import ceil, inf, isinf

import trio

from wsbatch.messages import SamplingParams
from wsbatch_bench.load.http_client import HttpFailed
from wsbatch_bench.load.record import Record
from wsbatch_bench.load.server import ServerTotals
from wsbatch_bench.load.target import Target
from wsbatch_bench.load.trace import Planned, Trace
from wsbatch_bench.sampling import GREEDY, seeded
from wsbatch_bench.stability import Sojourn, hopeless, judge

_BEAT_S = 0.05
CLOSED_START_S = 1.0  # over which the clients of a closed loop begin
_LOOK_EVERY = 20  # requests between two looks at the stability
_CONNECTIONS, _MOST_CONNECTIONS = 16, 512  # of the 1024 that a server of this project takes by default
_BUSY_S = 30.0
_GIVE_UP = 20  # requests in a row that no server took
_BROKEN = {"ConnectionLost", "http_broken"}  # what was in flight when the server died ends so
_TOTALS_S = 30.0  # for the server to tell its accounting
_LAST_TOTALS_S = 2.0  # the same while somebody waits for an interrupted run to end
STOPPED = "stopped_early"
"""The error of requests that were still there when a run was stopped."""
TIMED_OUT = "client_timeout"
"""The error of requests that took longer than the plan's bound."""
INTERRUPTED = "interrupted"
"""The error of requests that were still there when a run was interrupted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What to send.

    Attributes:
        trace: the requests; sent over and over if it is too short.
        rate: requests a second; infinite sends all measured ones at once. Without meaning in a closed loop.
        warmup: requests before the measured ones.
        measured: requests that count.
        stop_unstable: end the run once the server has fallen behind beyond doubt.
        sampling: temperature and top_p of every request; lengths are exact in any case.
        request_timeout_s: how long to wait for a request, from sending it to its end; then it is given up, and failed.
    """

    trace: Trace
    rate: float
    warmup: int
    measured: int
    stop_unstable: bool = False
    sampling: SamplingParams = GREEDY
    request_timeout_s: float = inf

    @property
    def requests(self) -> int:
        """Warm-up and measured ones."""
        return self.warmup + self.measured

    @property
    def span_s(self) -> float | None:
        """From the first request to the last measured one, in seconds; None where the server decides."""
        if self.trace.closed is not None or isinf(self.rate):
            return None
        return next(islice(self.trace.schedule(self.rate), self.requests - 1, None)).at_s

    @property
    def connections(self) -> int:
        """How many to open beforehand: one opened under load holds everybody else up by milliseconds.

        How many requests will be in flight is not known: those of half a minute are provided for.
        """
        closed = self.trace.closed
        if closed is not None:
            return min(closed.clients, _MOST_CONNECTIONS)
        return min(self.requests, _MOST_CONNECTIONS, ceil(max(_CONNECTIONS, min(self.rate, 1e6) * _BUSY_S)))


@dataclass(slots=True)
class LoadRun:
    """A run, while it goes on and afterwards. Seconds count from its start.

    Attributes:
        records: every request that was sent, cool-down included, in schedule order.
        window_s: from the first measured request's scheduled time to the end of the last one.
        worst_lag_s: the longest that this client came late, in sending or in anything else it had to do.
        totals: the server's accounting over the whole run.
        window_totals: the same over the window, for utilisation and waste under steady load.
        stopped_early: whether it was ended because the server fell behind.
        interrupted: whether it was ended from outside.
        lost: why the server is taken to be gone; empty where it was there to the end.
    """

    plan: LoadPlan
    records: list[Record] = field(default_factory=list)
    window_s: tuple[float, float] = (0.0, inf)
    worst_lag_s: float = 0.0
    totals: ServerTotals | None = None
    window_totals: ServerTotals | None = None
    stopped_early: bool = False
    interrupted: bool = False
    lost: str = ""

    @property
    def measured(self) -> list[Record]:
        """The requests that count. Those that a stopped run never sent are not among them."""
        first = self.plan.warmup
        return [record for record in self.records if first <= record.index < first + self.plan.measured]

    @property
    def sojourns(self) -> list[Sojourn]:
        """What `judge` needs to know."""
        return [Sojourn(each.scheduled_s, each.ended_s, each.error is None) for each in self.records]


async def run_load(
    target: Target,
    plan: LoadPlan,
    *,
    on_start: Callable[[LoadRun], None] = lambda run: None,
    interrupt: trio.Event | None = None,
) -> LoadRun:
    """Send the plan's requests; wait for the measured ones under continued load, then for the rest.

    A server that is lost on the way, and `interrupt` when it is set, end the run early; what was measured is kept.

    `on_start` is given the run, to be looked at while it goes on. Raises what `Target.totals` raises where the server
    is not there in the first place, and OSError where it does not tell.
    """
    run = LoadRun(plan)
    on_start(run)
    before = await _totals(target, _TOTALS_S)
    await _Generator(target, run).go(trio.Event() if interrupt is None else interrupt)
    try:
        after = await _totals(target, _LAST_TOTALS_S if run.interrupted else _TOTALS_S)
    except (OSError, HttpFailed) as error:
        run.lost = run.lost or str(error)
    else:
        if before is not None and after is not None:
            run.totals = after.since(before)
    return run


async def _totals(target: Target, timeout_s: float) -> ServerTotals | None:
    with trio.move_on_after(timeout_s):
        return await target.totals()
    raise OSError(f"the server did not tell its accounting within {timeout_s:g} s")


class _Generator:
    """One run of a plan."""

    def __init__(self, target: Target, run: LoadRun) -> None:
        self._target = target
        self._run = run
        self._plan = run.plan
        self._start_s = trio.current_time()
        self._left = run.plan.measured  # measured requests that have not ended
        self._window_opens = trio.Event()
        self._window_closes = trio.Event()
        self._window_read = trio.Event()
        self._sending = trio.CancelScope()  # cancelled when no more is to be sent
        self._requests = trio.CancelScope()  # cancelled to give up on what is in flight
        self._unreached = 0  # requests in a row that no server took

    async def go(self, interrupt: trio.Event) -> None:
        """Run it to the end, or until `interrupt` is set."""
        async with trio.open_nursery() as helpers:
            helpers.start_soon(self._beat)
            helpers.start_soon(self._watch_interrupt, interrupt)
            if self._plan.stop_unstable:
                helpers.start_soon(self._watch_stability)
            with self._requests:
                async with trio.open_nursery() as requests:
                    requests.start_soon(self._watch_window)
                    with self._sending:
                        await self._feed(requests)
            helpers.cancel_scope.cancel()
        records = self._run.records
        records.sort(key=lambda record: record.index)
        for record in records:
            if record.ended_s == inf:
                record.error = INTERRUPTED if self._run.interrupted else STOPPED
        self._run.worst_lag_s = max([self._run.worst_lag_s, *(record.lag_s for record in records)])

    async def _feed(self, requests: trio.Nursery) -> None:
        closed = self._plan.trace.closed
        if closed is not None:
            plans = self._plan.trace.schedule(1.0)
            async with trio.open_nursery() as clients:
                for number in range(closed.clients):
                    # One after the other: started at once, clients of equal requests would stay in step for ever.
                    start_s = number / closed.clients * CLOSED_START_S
                    clients.start_soon(self._client, plans, closed.think_s, start_s, requests)
            return
        for planned in self._plan.trace.schedule(self._plan.rate):
            if isinf(self._plan.rate) and planned.index == self._plan.warmup + self._plan.measured:
                return
            await trio.sleep_until(self._start_s + planned.at_s)
            requests.start_soon(self._send, planned, planned.at_s)

    async def _client(self, plans: Iterator[Planned], think_s: float, start_s: float, requests: trio.Nursery) -> None:
        """One client of a closed loop: it is due when its last answer has come and it has thought."""
        await trio.sleep(start_s)
        while True:
            await trio.sleep(think_s)
            done = trio.Event()
            requests.start_soon(self._send, next(plans), trio.current_time() - self._start_s, done)
            await done.wait()

    async def _send(self, planned: Planned, due_s: float, done: trio.Event | None = None) -> None:
        sampling = seeded(self._plan.sampling, planned.index, seed=self._plan.trace.seed)
        record = Record(planned.index, planned.prompt_tokens, planned.output_tokens, due_s, sampling=sampling)
        self._run.records.append(record)
        if planned.index == self._plan.warmup and not self._window_closes.is_set():
            self._run.window_s = (due_s, inf)
            self._window_opens.set()
        prompt_ids = self._plan.trace.prompt_ids(planned.index, planned.prompt_tokens)
        with trio.move_on_after(self._plan.request_timeout_s) as patience:
            await self._target.send(record, prompt_ids, self._start_s)
        if patience.cancelled_caught:
            message = f"no end within {self._plan.request_timeout_s:g} s"
            record.failed(TIMED_OUT, trio.current_time() - self._start_s, message)
        self._notice(record)
        if self._plan.warmup <= planned.index < self._plan.warmup + self._plan.measured:
            self._left -= 1
            if self._left == 0:
                # Not when the last one was sent: load must not fall while requests are still measured.
                self._close_window(record.ended_s)
                self._sending.cancel()
        if done is not None:
            done.set()

    def _notice(self, record: Record) -> None:
        """Stop sending where nobody is there: hours of refused connections tell no more than a few."""
        if record.unreached:
            self._unreached += 1
        elif record.error not in _BROKEN:
            self._unreached = 0
        if self._unreached >= _GIVE_UP and not self._run.lost:
            self._run.lost = record.message or str(record.error)
            self._close_window(record.ended_s)
            self._sending.cancel()

    def _close_window(self, end_s: float) -> None:
        if self._window_closes.is_set():
            return
        self._run.window_s = (self._run.window_s[0] if self._window_opens.is_set() else end_s, end_s)
        self._window_opens.set()
        self._window_closes.set()

    async def _watch_window(self) -> None:
        """Read the server's accounting at both ends of the window."""
        try:
            await self._window_opens.wait()
            before = await _totals(self._target, _TOTALS_S)
            await self._window_closes.wait()
            after = await _totals(self._target, _TOTALS_S)
            if before is not None and after is not None:
                self._run.window_totals = after.since(before)
        except (OSError, HttpFailed):
            pass  # what becomes of the requests says more
        self._window_read.set()

    async def _watch_interrupt(self, interrupt: trio.Event) -> None:
        """End the run now."""
        await interrupt.wait()
        self._run.interrupted = True
        self._close_window(trio.current_time() - self._start_s)
        self._sending.cancel()
        with trio.move_on_after(_LAST_TOTALS_S):
            await self._window_read.wait()
        self._requests.cancel()

    async def _beat(self) -> None:
        """A client that is held up sends late and reads late: notice it also where nothing was due."""
        while True:
            due_s = trio.current_time() + _BEAT_S
            await trio.sleep_until(due_s)
            self._run.worst_lag_s = max(self._run.worst_lag_s, trio.current_time() - due_s)

    async def _watch_stability(self) -> None:
        """Give the run up where the server falls ever further behind."""
        await self._window_opens.wait()
        while True:
            await trio.sleep(_LOOK_EVERY / self._plan.rate)
            now_s = trio.current_time() - self._start_s
            if hopeless(judge(self._run.sojourns, self._run.window_s[0], now_s)):
                break
        self._run.stopped_early = True
        self._close_window(now_s)
        self._sending.cancel()
        await self._window_read.wait()
        self._requests.cancel()
