"""Pools under chaos, in virtual time: replicas are killed, drained, stalled and restarted at random while clients come.

What must hold: every request that was accepted ends exactly once, nothing that was sent is ever altered, and one that
ends by itself has exactly the output of an undisturbed run.
"""

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from wsbatch.client import open_client
from wsbatch.config import EngineConfig, ServerConfig
from wsbatch.errors import RequestError
from wsbatch.messages import Failed, Finished, GenerateRequest, SamplingParams
from wsbatch.server.serve import Server
from wsbatch.testing import MemoryListener

from .harness import ENGINE, Cluster, Reader, cluster, undisturbed

THOROUGH = settings().max_examples if settings.get_current_profile_name() == "thorough" else 12


@dataclass(frozen=True)
class Blow:
    """What befalls one replica, and for how long it is away afterwards."""

    at_s: float
    replica: str
    kind: str
    away_s: float


@dataclass(frozen=True)
class Ask:
    at_s: float
    request: GenerateRequest
    cancel_after_s: float | None


blows = st.builds(
    Blow,
    at_s=st.floats(0.0, 4.0),
    replica=st.sampled_from("abc"),
    kind=st.sampled_from(["kill", "kill", "kill", "drain", "hasty drain", "stall"]),
    away_s=st.sampled_from([0.05, 1.0, 30.0]),
)
asks = st.builds(
    Ask,
    at_s=st.floats(0.0, 4.0),
    request=st.builds(
        GenerateRequest,
        prompt=st.sampled_from(["a", "ab", "b" * 40, "system " * 60 + "x", "system " * 60 + "y"]),
        sampling=st.builds(
            SamplingParams,
            max_tokens=st.sampled_from([1, 2, 20, 60, 150]),
            temperature=st.sampled_from([0.0, 1.0]),
            seed=st.integers(0, 3),
            stop=st.sampled_from([(), (), ("a",), ("0", "zz"), ("e!",)]),
        ),
        priority=st.sampled_from([0, 5, 9]),
        timeout_ms=st.sampled_from([None, None, None, 900]),
        stream=st.sampled_from([True, True, False]),
    ),
    cancel_after_s=st.sampled_from([None, None, None, None, 0.0, 0.3]),
)


async def strike(group: Cluster, blow: Blow) -> None:
    await trio.sleep_until(blow.at_s)
    replica = group[blow.replica]
    if not replica.alive:
        return
    match blow.kind:
        case "kill":
            replica.kill()
        case "drain":
            await replica.drain(60.0)
        case "hasty drain":
            await replica.drain(0.1)
        case "stall":
            replica.stall_s = 20.0
            await trio.sleep(20.0)
            replica.stall_s = 0.0
            return
    await trio.sleep(blow.away_s)
    if not replica.alive:
        await group.start(blow.replica)


class Visitor:
    """One request, read to its end; `refused` where it was not let in."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.reader: Reader | None = None
        self.refused: RequestError | None = None

    async def run(self, group: Cluster) -> None:
        await trio.sleep_until(self.ask.at_s)
        try:
            self.reader = Reader(await group.pool.submit(self.ask.request))
        except RequestError as error:
            self.refused = error
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.reader.read)
            if self.ask.cancel_after_s is not None:
                await trio.sleep(self.ask.cancel_after_s)
                self.reader.stream.cancel()

    def check(self) -> None:
        if self.reader is None:
            assert self.refused is not None
            assert self.refused.code in ("queue_full", "draining"), self.refused
            assert self.refused.retry_after_ms is not None
            return
        ids, text, _ = undisturbed(self.ask.request)
        end = self.reader.end
        assert end is not None
        assert tuple(self.reader.ids) == ids[: len(self.reader.ids)]
        assert text.startswith(self.reader.text)
        if isinstance(end, Failed):
            assert end.code in ("model_error", "queue_timeout", "shed"), end
        elif end.finish_reason in ("stop", "length"):
            self.reader.check_undisturbed()
        elif end.finish_reason == "cancelled":
            assert self.ask.cancel_after_s is not None
        else:
            assert end.finish_reason == "timeout"
            assert self.ask.request.timeout_ms is not None


@settings(max_examples=THOROUGH, deadline=None)
@given(
    asks=st.lists(asks, min_size=1, max_size=25),
    blows=st.lists(blows, max_size=6),
    engine=st.builds(
        EngineConfig,
        model=st.just("simulated"),
        scheduler=st.sampled_from(["dynamic", "continuous"]),
        max_batch_size=st.sampled_from([1, 4]),
        max_queue_requests=st.sampled_from([3, 64]),
        max_batch_total_tokens=st.just(4096),
        max_wait_ms=st.just(5.0),
    ),
)
def test_nothing_is_lost_altered_or_told_twice(asks: list[Ask], blows: list[Blow], engine: EngineConfig) -> None:
    trio.run(befall, asks, blows, engine, clock=MockClock(autojump_threshold=0))


async def befall(asks: list[Ask], blows: list[Blow], engine: EngineConfig) -> None:
    visitors = [Visitor(ask) for ask in asks]
    async with cluster(3, engine=engine, stall_s=2.0, resume_timeout_s=100.0, status_interval_ms=200.0) as group:
        async with trio.open_nursery() as nursery:
            for blow in blows:
                nursery.start_soon(strike, group, blow)
            for visitor in visitors:
                nursery.start_soon(visitor.run, group)
        await trio.sleep(30)
        assert group.pool._routes == {}
        for replica in group.names.values():
            if replica.alive:
                assert replica.engine.status().running == replica.engine.status().waiting == 0
    for visitor in visitors:
        visitor.check()


async def test_a_thousand_streams_through_a_router_whose_replicas_are_killed(autojump_clock: MockClock) -> None:
    """The whole way: client, router, replica, and back. None lost, none altered."""
    rng = random.Random(7)
    answers: list[tuple[GenerateRequest, Any]] = []
    kills = 0

    async def kill_now_and_then(group: Cluster) -> None:
        nonlocal kills
        while True:
            await trio.sleep(rng.uniform(1.0, 2.0))
            name = rng.choice(sorted(name for name, replica in group.names.items() if replica.alive))
            group[name].kill()
            kills += 1
            await trio.sleep(rng.uniform(0.1, 1.0))
            await group.start(name)

    async def client(listener: MemoryListener, number: int, count: int) -> None:
        async with open_client(await listener.connect(), "router", keepalive_s=None) as connection:
            for turn in range(count):
                sampling = SamplingParams(
                    max_tokens=rng.randrange(5, 80),
                    temperature=rng.choice([0.0, 1.0]),
                    seed=rng.randrange(2**40),
                    stop=rng.choice([(), ("ab", "Q"), ("z",)]),
                )
                prompt = f"{number}/{turn} " * rng.randrange(1, 6)
                asked = GenerateRequest(prompt=prompt, sampling=sampling, stream=rng.random() < 0.8)
                answers.append((asked, await connection.complete(asked, retries=20)))

    engine = replace(ENGINE, max_batch_size=16, max_batch_total_tokens=65_536)
    async with cluster(3, engine=engine, connections=3) as group, trio.open_nursery() as nursery:
        listener = MemoryListener()
        server = Server(group.pool, ServerConfig(), addresses=[("127.0.0.1", 1)])
        await nursery.start(server.run, [listener])
        nursery.start_soon(kill_now_and_then, group)
        async with trio.open_nursery() as clients:
            for number in range(40):
                clients.start_soon(client, listener, number, 25)
        nursery.cancel_scope.cancel()
        resumed = group.pool.metrics.registry.get_sample_value("wsbatch_requests_resumed_total")
    assert len(answers) == 1000
    for asked, answer in answers:
        ids, text, reason = undisturbed(asked)
        assert (answer.token_ids, answer.text, answer.finished.finish_reason) == (ids, text, reason)
        assert isinstance(answer.finished, Finished)
        assert answer.finished.usage.completion_tokens == len(ids)
    assert kills >= 10
    assert resumed is not None
    assert resumed >= 50
    assert Counter(asked.stream for asked, _ in answers)[False] > 100
