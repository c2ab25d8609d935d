"""Whether a replica is there, in virtual time: probes beside the tokens, any frame as a sign of life, a loop held."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from math import inf

import pytest
import trio
from trio.testing import MockClock

from virtual_replica import VirtualReplica
from wsbatch.client import Client, open_client
from wsbatch.pool import EnginePool, PoolConfig, open_pool
from wsbatch.pool.loop_clock import LoopClock
from wsbatch.pool.outlier import EJECTING_FAILURES, FIRST_EJECTION_S, LONGEST_EJECTION_S, OUTCOMES, Outlier
from wsbatch.testing import MemoryStream

from .harness import ENGINE, cluster, request, submit


class Throttled(trio.abc.Stream):
    """A slow link: so many bytes a second come in; none from `blocked_s` on."""

    def __init__(self, stream: MemoryStream, bytes_per_s: float, blocked_s: float = inf) -> None:
        self._stream = stream
        self._bytes_per_s = bytes_per_s
        self._blocked_s = blocked_s

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if trio.current_time() >= self._blocked_s:
            await trio.sleep_forever()
        data = await self._stream.receive_some(1024)
        await trio.sleep(len(data) / self._bytes_per_s)
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._stream.aclose()


Link = Callable[[int, MemoryStream], trio.abc.Stream]


@asynccontextmanager
async def behind(link: Link, **settings: float) -> AsyncIterator[tuple[VirtualReplica, EnginePool]]:
    """A pool of one replica for a hundred rows, whose connections, counted from 0, are made by `link`."""
    replica = VirtualReplica(replace(ENGINE, max_batch_size=128, max_batch_total_tokens=65_536))

    @asynccontextmanager
    async def dial() -> AsyncIterator[Client]:
        number, replica.dials = replica.dials, replica.dials + 1
        assert replica._listener is not None
        async with open_client(link(number, await replica._listener.connect()), "virtual", keepalive_s=None) as client:
            yield client

    async with trio.open_nursery() as nursery:
        await nursery.start(replica.run)
        async with open_pool({"a": dial}, PoolConfig(connections=2, **settings)) as pool:
            await trio.sleep(0.1)
            yield replica, pool
        nursery.cancel_scope.cancel()


async def test_probes_do_not_wait_behind_tokens(autojump_clock: MockClock) -> None:
    """96 streams make twice what the links to the router carry: what is told is seconds old, but the probes are not."""
    async with behind(lambda number, stream: Throttled(stream, 6_000), stall_s=2.0) as (replica, pool):
        readers = [await submit(pool, request(tokens=120, prompt=f"p{number}")) for number in range(96)]
        async with trio.open_nursery() as nursery:
            for reader in readers:
                nursery.start_soon(reader.read)
            await trio.sleep(10)
            assert pool.status().running == replica.engine.status().running
        for reader in readers:
            reader.check_undisturbed()
        assert trio.current_time() > 12
        assert replica.dials == 3  # nothing was lost


async def test_tokens_are_a_sign_of_life_where_probes_are_not_answered(autojump_clock: MockClock) -> None:
    def link(number: int, stream: MemoryStream) -> trio.abc.Stream:
        return Throttled(stream, 1e9, 1.0 if number == 0 else inf)

    async with behind(link, stall_s=2.0) as (replica, pool):
        reader = await submit(pool, request(tokens=1000))
        await trio.sleep(5)
        assert pool.replicas["a"].state == "away"  # it gets nothing new
        assert replica.dials == 3
        (await reader.read()).check_undisturbed()
        await trio.sleep(5)
        assert replica.dials > 3  # now that it says nothing at all, it is connected anew
        assert pool.replicas["a"].state == "ready"


async def test_what_is_late_here_is_not_late_there(autojump_clock: MockClock) -> None:
    bounds = {"stall_s": 2.0, "accept_timeout_s": 1.0, "request_stall_s": 3.0}
    async with cluster(2, **bounds) as group:
        readers = [await submit(group.pool, request(tokens=200, prompt=f"p{number}")) for number in range(8)]
        async with trio.open_nursery() as nursery:
            for reader in readers:
                nursery.start_soon(reader.read)
            for _ in range(5):
                await trio.sleep(0.15)
                autojump_clock.jump(60)  # the process is suspended
                await trio.lowlevel.checkpoint()
                assert {replica.state for replica in group.pool.replicas.values()} == {"ready"}
        for reader in readers:
            reader.check_undisturbed()
        metrics = group.pool.metrics.registry
        assert metrics.get_sample_value("wsbatch_requests_resumed_total") == 0
        assert metrics.get_sample_value("wsbatch_requests_moved_total") == 0
        assert [group[name].dials for name in "ab"] == [3, 3]


async def test_the_patient_clock_stands_while_the_loop_is_held(autojump_clock: MockClock) -> None:
    clock = LoopClock()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(clock.run)
        await trio.sleep(1.0)
        began_s = clock.now_s()
        autojump_clock.jump(100)
        assert clock.now_s() - began_s <= 0.21
        await trio.sleep(10)
        assert clock.now_s() - began_s == pytest.approx(10, abs=0.3)
        nursery.cancel_scope.cancel()


def test_ejection_and_return() -> None:
    health = Outlier()
    assert [health.failed(0.0) for _ in range(EJECTING_FAILURES)] == [False] * (EJECTING_FAILURES - 1) + [True]
    assert health.ejected
    assert not health.admits(FIRST_EJECTION_S / 2)
    health.succeeded(-1.0)  # what it began before it was ejected
    assert health.ejected
    assert health.admits(FIRST_EJECTION_S)
    health.sent(FIRST_EJECTION_S, trial_s=10.0)
    assert not health.admits(FIRST_EJECTION_S + 5)  # one trial at a time
    assert health.failed(FIRST_EJECTION_S + 5)
    assert not health.admits(2 * FIRST_EJECTION_S + 5)  # this time for twice as long
    now_s = FIRST_EJECTION_S + 5 + 2 * FIRST_EJECTION_S
    assert health.admits(now_s)
    health.sent(now_s, trial_s=10.0)
    health.succeeded(now_s)
    assert not health.ejected
    assert health.admits(now_s)


def test_ejections_grow_to_a_bound_and_are_forgotten() -> None:
    health, now_s = Outlier(), 0.0
    for _ in range(EJECTING_FAILURES - 1):
        health.failed(now_s)
    for _ in range(20):
        assert health.failed(now_s)
        now_s += LONGEST_EJECTION_S
        assert health.admits(now_s)
    for _ in range(OUTCOMES + 1):
        health.succeeded(now_s)
    for _ in range(EJECTING_FAILURES):
        health.failed(now_s)
    assert health.admits(now_s + FIRST_EJECTION_S)


def test_now_and_then_a_failure_ejects_nobody() -> None:
    health = Outlier()
    for _ in range(20):
        for _ in range(OUTCOMES // 2):
            health.succeeded(0.0)
        assert not health.failed(0.0)
