"""Soak: a mixed load for a long time, some of it rude, and whether anything of the server grows under it."""

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean

import trio
from scipy import stats
from wsproto.events import Ping

from lab_tools.looks import Sample, look
from lab_tools.vanishing import MANNERS, vanish
from wsbatch.client import Client, connect
from wsbatch.errors import ConnectionLost, RequestError
from wsbatch.messages import GenerateRequest, Hello, SamplingParams, Tokens
from wsbatch.testing import BareClient, Closed, Rejected
from wsbatch_bench.load.server import ServerProcess
from wsbatch_bench.quantiles import observed_quantile

_SETTLE_S = 60.0  # an idle server must be back at its baseline within this
_VANISHING_AT_ONCE = 32
_OPENING_AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakPlan:
    """What is put on the server.

    Attributes:
        duration_s: of the load.
        streams: patient clients, each with one request after the other.
        vanishing: connect, generate, vanish: this many times, spread over the duration.
        cancelling, slow: clients that cancel each request half-way, and that stop reading for good.
        idle: connections that only answer pings.
    """

    duration_s: float
    streams: int
    vanishing: int
    cancelling: int
    slow: int
    idle: int


@dataclass(slots=True)
class SoakRun:
    """What was seen.

    Attributes:
        before, idle, after: the server without clients, with the idle connections only, and when all are gone.
        samples: while the load was on.
        gaps: (time, seconds) between tokens of patient streams; `alone_gaps_s` of one stream before the idle
            connections came, `beside_idle_gaps_s` with them.
        firsts: (time, seconds) to the first token of patient requests.
        count: of what became of everything.
    """

    plan: SoakPlan
    before: Sample | None = None
    idle: Sample | None = None
    after: Sample | None = None
    samples: list[Sample] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    firsts: list[tuple[float, float]] = field(default_factory=list)
    alone_gaps_s: list[float] = field(default_factory=list)
    beside_idle_gaps_s: list[float] = field(default_factory=list)
    count: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Trend:
    """How one figure went over the load, its first third left out as warm-up.

    Attributes:
        growth: by a straight line, over the window.
        allowed: what it may grow by: noise.
        flat: whether it did not.
    """

    name: str
    unit: str
    mean: float
    growth: float
    allowed: float

    @property
    def flat(self) -> bool:
        return self.growth <= self.allowed


async def soak(server: ServerProcess, plan: SoakPlan) -> SoakRun:
    """Run the plan; ends when the server is idle again, or has not become so within a minute."""
    run = SoakRun(plan)
    load = _Load(server, run)
    await vanish("127.0.0.1", server.port, "close")  # what the first connection makes for good is no growth
    run.before = await load.until_idle(None)
    if plan.idle:
        run.alone_gaps_s = await load.gaps_of_one(400)
    async with trio.open_nursery() as nursery:
        for _ in range(plan.idle):
            nursery.start_soon(load.idle, nursery.cancel_scope)
        with trio.move_on_after(plan.idle / 50 + 10):
            while load.idling < plan.idle:  # noqa: ASYNC110 (counted by many tasks)
                await trio.sleep(0.1)
        if plan.idle:
            run.idle = await look(server)
            run.beside_idle_gaps_s = await load.gaps_of_one(400)
        await load.run()
        nursery.cancel_scope.cancel()
    run.after = await load.until_idle(run.before)
    return run


def trends(run: SoakRun) -> list[Trend]:
    """Memory, descriptors, tasks, the event loop and latency over the load."""
    kept = run.samples[len(run.samples) // 3 :]
    times = [sample.at_s for sample in kept]
    found = [
        _trend("memory", "MiB", times, [sample.rss_bytes / 2**20 for sample in kept], share=0.03, least=4),
        _trend("descriptors", "", times, [sample.descriptors for sample in kept], share=0.1, least=8),
        _trend("threads", "", times, [sample.threads for sample in kept], share=0.1, least=1),
        _trend("tasks", "", times, [sample.values["wsbatch_trio_tasks"] for sample in kept], share=0.1, least=16),
    ]
    for name, observations, q in (
        ("time between tokens, p99", run.gaps, 0.99),
        ("time to first token, p95", run.firsts, 0.95),
    ):
        windows = _windows(observations, times[0], times[-1], q)
        found.append(_trend(name, "ms", [at for at, _ in windows], [1000 * s for _, s in windows], share=0.25, least=5))
    return found


def _trend(
    name: str, unit: str, times: Sequence[float], values: Sequence[float], *, share: float, least: float
) -> Trend:
    growth = float(stats.linregress(times, values).slope) * (times[-1] - times[0])
    return Trend(name, unit, fmean(values), growth, max(least, share * fmean(values)))


def _windows(
    observations: Sequence[tuple[float, float]], start_s: float, end_s: float, q: float
) -> list[tuple[float, float]]:
    """The quantile in each of twelve windows that has any."""
    width = (end_s - start_s) / 12
    found = []
    for index in range(12):
        low = start_s + index * width
        values = [value for at_s, value in observations if low <= at_s < low + width]
        if values:
            found.append((low, observed_quantile(values, q)))
    return found


class _Load:
    def __init__(self, server: ServerProcess, run: SoakRun) -> None:
        self._server = server
        self._run = run
        self._random = random.Random(1)
        self.idling = 0
        self._opening = trio.CapacityLimiter(_OPENING_AT_ONCE)

    async def run(self) -> None:
        """All at once, for the duration."""
        plan = self._run.plan
        with trio.move_on_after(plan.duration_s):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._sample)
                for _ in range(plan.streams):
                    nursery.start_soon(self._patient)
                for _ in range(plan.cancelling):
                    nursery.start_soon(self._cancelling)
                for _ in range(plan.slow):
                    nursery.start_soon(self._slow)
                if plan.vanishing:
                    nursery.start_soon(self._vanishing)

    async def until_idle(self, baseline: Sample | None) -> Sample:
        """Wait until nothing is connected and the descriptors and tasks are those of the baseline, or for a minute."""
        give_up_s = trio.current_time() + _SETTLE_S
        while True:
            now = await look(self._server)
            if not any(left_over(now, baseline or now).values()) or now.at_s > give_up_s:
                return now
            await trio.sleep(0.2)

    async def gaps_of_one(self, tokens: int) -> list[float]:
        """Times between the tokens of one stream."""
        gaps: list[float] = []
        # A process that is stopped for a while is a gap to be seen, not a lost connection.
        async with connect(self._server.url, keepalive_s=None) as client:
            await self._ask(client, tokens, gaps_s=gaps)
        return gaps

    async def idle(self, scope: trio.CancelScope) -> None:
        """Connect, and answer pings."""
        with suppress(Closed, Rejected, OSError, trio.BrokenResourceError):
            async with self._opening:
                stream = await trio.open_tcp_stream("127.0.0.1", self._server.port)
                client = BareClient(stream)
                await client.open()
                assert isinstance(await client.receive(), Hello)
            async with stream:
                self.idling += 1
                try:
                    while True:
                        event = await client.next_event()
                        if isinstance(event, Ping):
                            await client.send_event(event.response())
                finally:
                    self.idling -= 1
                    if not scope.cancel_called:
                        self._run.count["idle connections lost"] += 1

    async def _sample(self) -> None:
        while True:
            self._run.samples.append(await look(self._server))
            await trio.sleep(min(1.0, self._run.plan.duration_s / 60))

    async def _ask(self, client: Client, tokens: int, *, gaps_s: list[float] | None = None, leave: int = 0) -> None:
        """One request; its times are kept, or after `leave` tokens it is left."""
        sent_s = last_s = trio.current_time()
        got = 0
        async with client.generate("Tell me about soaking.", max_tokens=tokens, ignore_eos=True) as stream:
            async for event in stream:
                if not isinstance(event, Tokens):
                    continue
                now_s = trio.current_time()
                if gaps_s is not None and got:
                    gaps_s.append(now_s - last_s)
                elif not leave:
                    kept = self._run.gaps if got else self._run.firsts
                    kept.append((now_s, now_s - (last_s if got else sent_s)))
                got += len(event.token_ids)
                last_s = now_s
                if leave and got >= leave:
                    return

    async def _patient(self) -> None:
        """One request after the other, each read to its end; a new connection now and then."""
        while True:
            try:
                async with connect(self._server.url) as client:
                    for _ in range(self._random.randrange(1, 20)):
                        await self._ask(client, self._random.randrange(10, 150))
                        self._run.count["finished"] += 1
            except (RequestError, ConnectionLost) as error:
                self._run.count[f"patient requests that failed: {type(error).__name__}"] += 1
                await trio.sleep(0.1)

    async def _cancelling(self) -> None:
        while True:
            with suppress(RequestError, ConnectionLost):
                async with connect(self._server.url) as client:
                    for _ in range(10):
                        await self._ask(client, 200, leave=self._random.randrange(1, 50))
                        self._run.count["cancelled"] += 1

    async def _slow(self) -> None:
        """Ask for a lot and read nothing, until the server has had enough."""
        while True:
            with suppress(Closed, Rejected, OSError, trio.BrokenResourceError):
                stream = await trio.open_tcp_stream("127.0.0.1", self._server.port)
                async with stream:
                    client = BareClient(stream)
                    await client.open()
                    # Logprobs: the socket's buffers are full before the tokens are at their end.
                    sampling = SamplingParams(max_tokens=2000, ignore_eos=True, logprobs=20)
                    await client.send(GenerateRequest(id=1, prompt="slowly", sampling=sampling))
                    await trio.sleep(5 + 5 * self._random.random())
                    self._run.count["slow readers"] += 1

    async def _vanishing(self) -> None:
        plan, limiter = self._run.plan, trio.CapacityLimiter(_VANISHING_AT_ONCE)
        start_s = trio.current_time()

        async def one(manner: str) -> None:
            async with limiter:
                await vanish("127.0.0.1", self._server.port, manner)
                self._run.count["vanished"] += 1

        async with trio.open_nursery() as nursery:
            for index in range(plan.vanishing):
                # The last ones have time to be noticed before the load ends.
                await trio.sleep_until(start_s + 0.9 * plan.duration_s * index / plan.vanishing)
                nursery.start_soon(one, self._random.choice(list(MANNERS)))


def left_over(now: Sample, baseline: Sample) -> dict[str, float]:
    """What is there now and was not there when the server was idle."""
    return {
        "connections": now.values["wsbatch_connections"],
        "running requests": now.values["wsbatch_num_requests_running"],
        "waiting requests": now.values["wsbatch_num_requests_waiting"],
        "KV blocks": now.values.get("wsbatch_kv_cache_usage_perc", 0.0),
        "descriptors": max(0, now.descriptors - baseline.descriptors),
        "tasks": max(0.0, now.values["wsbatch_trio_tasks"] - baseline.values["wsbatch_trio_tasks"]),
    }
