"""Replicas that fail, are silent, or are only taken for it, in virtual time."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from virtual_replica import VirtualReplica
from wsbatch.client import open_client
from wsbatch.config import ServerConfig
from wsbatch.engine.stream import Stream
from wsbatch.errors import ModelError, NeverFits, RequestError
from wsbatch.messages import Accepted, Failed, Finished, GenerateRequest
from wsbatch.server.serve import Server
from wsbatch.testing import MemoryListener

from .harness import ENGINE, POISON, Cluster, Reader, cluster, request, submit, undisturbed
from .misbehaving import Misbehaving, MisbehavingEngine, fail, shut_down


@asynccontextmanager
async def joined(
    group: Cluster, *engines: MisbehavingEngine, config: ServerConfig | None = None
) -> AsyncIterator[None]:
    """These replicas are in the group's pool, too, named x, y, z; at the end they are removed."""
    names = [chr(120 + index) for index in range(len(engines))]
    async with trio.open_nursery() as nursery:
        for name, engine in zip(names, engines, strict=True):
            replica = Misbehaving(engine, config)
            await nursery.start(replica.run)
            group.pool.add(name, replica.dial)
        await group.all_ready()
        yield
        for name in names:
            await group.pool.remove(name)
        nursery.cancel_scope.cancel()


async def outcome(group: Cluster, asked: GenerateRequest, outcomes: Counter[str]) -> None:
    try:
        reader = await Reader(await group.pool.submit(asked)).read()
    except RequestError as error:
        outcomes[error.code] += 1
    else:
        assert reader.end is not None
        outcomes[reader.end.code if isinstance(reader.end, Failed) else reader.end.finish_reason] += 1
        if isinstance(reader.end, Finished):
            reader.check_undisturbed()


async def load(group: Cluster, count: int, *, every_s: float = 0.1, **fields: Any) -> Counter[str]:
    """So many requests, one after the other; how they ended."""
    outcomes: Counter[str] = Counter()
    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(outcome, group, request(prompt=f"p{number % 8}", tokens=20, **fields), outcomes)
            await trio.sleep(every_s)
    return outcomes


def silent(engine: MisbehavingEngine, stream: Stream) -> None:
    pass


class CrashingEngine(MisbehavingEngine):
    """Its sessions end with 1011."""

    async def submit(self, request: GenerateRequest, **others: Any) -> Stream:
        self.asked += 1
        raise RuntimeError("an exception that nobody expected")


class DeafEngine(MisbehavingEngine):
    """Neither accepts nor refuses."""

    async def submit(self, request: GenerateRequest, **others: Any) -> Stream:
        self.asked += 1
        return await trio.sleep_forever()  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["fails", "fails every other", "crashes", "shuts down"])
async def test_one_black_hole_of_three_fails_next_to_nothing(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    def every_other(engine: MisbehavingEngine, stream: Stream) -> None:
        if engine.asked % 2:
            fail(engine, stream)

    engine = {
        "fails": lambda: MisbehavingEngine(fail),
        "fails every other": lambda: MisbehavingEngine(every_other),
        "crashes": lambda: CrashingEngine(),
        "shuts down": lambda: MisbehavingEngine(shut_down),
    }[kind]()
    async with cluster(2) as group, joined(group, engine), trio.open_nursery() as nursery:
        nursery.start_soon(lambda: play(engine))
        outcomes = await load(group, 300)
        assert outcomes["length"] >= 297, outcomes
        # By what it says it is the least busy one all the time.
        assert engine.asked <= 40
        nursery.cancel_scope.cancel()


async def play(engine: MisbehavingEngine, *, interval_s: float = 0.01) -> None:
    """Tokens as the simulated model gives them."""
    while True:
        await trio.sleep(interval_s)
        for stream in list(engine.live):
            asked = stream.request
            ids, _, _ = undisturbed(replace(asked, id=0, resume_token_ids=(), stream=True))
            index = len(asked.resume_token_ids) + engine._produced[stream]
            engine.push(stream, chr(ids[index]))
            if index + 1 == len(ids):
                engine.finish(stream, "length")


def arm(replica: VirtualReplica) -> None:
    """What has the poison in it breaks the connection that it comes on."""
    submit = replica.engine.submit

    async def crashing(request: GenerateRequest, **others: Any) -> Stream:
        if POISON in (request.prompt or ""):
            raise RuntimeError("an exception that nobody expected")
        return await submit(request, **others)

    replica.engine.submit = crashing  # type: ignore[method-assign]


@pytest.mark.parametrize("replicas", [1, 2, 4])
async def test_a_request_that_breaks_connections_takes_no_replica_away(
    autojump_clock: MockClock, replicas: int
) -> None:
    async with cluster(replicas) as group:
        for replica in group.names.values():
            arm(replica)
        readers = [await submit(group.pool, request(tokens=200, prompt=f"{index}")) for index in range(8)]
        await trio.sleep(0.3)
        async with trio.open_nursery() as nursery:
            for reader in readers:
                nursery.start_soon(reader.read)
            for _ in range(3):
                with pytest.raises(ModelError, match="one after another") as refused:
                    await group.pool.submit(request(prompt="a" + POISON))
                assert refused.value.retry_after_ms is None
                await trio.sleep(0.11)  # for its connections
                assert {replica.state for replica in group.pool.replicas.values()} == {"ready"}
        for reader in readers:
            reader.check_undisturbed()
        assert not any(replica.health.ejected for replica in group.pool.replicas.values())


async def test_a_request_that_fails_everywhere_is_at_fault(autojump_clock: MockClock) -> None:
    async with cluster(4) as group:
        for replica in group.names.values():
            replica.worker.fail = lambda plan: any(
                ord(POISON) in row.token_ids for row in getattr(plan, "rows", ()) if hasattr(row, "token_ids")
            )
        others = [await submit(group.pool, request(tokens=400, prompt=f"{index}")) for index in range(8)]
        async with trio.open_nursery() as nursery:
            for reader in others:
                nursery.start_soon(reader.read)
            for _ in range(10):
                poison = await (await submit(group.pool, request(prompt="a" + POISON))).read()
                assert isinstance(poison.end, Failed)
                assert (poison.end.code, poison.end.retry_after_ms) == ("model_error", None)
        for reader in others:
            reader.check_undisturbed()
        assert not any(replica.health.ejected for replica in group.pool.replicas.values())


async def test_a_replica_that_works_again_is_back_after_one_trial(autojump_clock: MockClock) -> None:
    engine = MisbehavingEngine(fail)
    async with cluster(2) as group, joined(group, engine), trio.open_nursery() as nursery:
        nursery.start_soon(lambda: play(engine))
        await load(group, 100)
        metrics = group.pool.metrics.registry
        assert metrics.get_sample_value("wsbatch_replicas_ejected") == 1
        engine.befall = None
        asked = engine.asked
        await load(group, 200)
        assert metrics.get_sample_value("wsbatch_replicas_ejected") == 0
        assert engine.asked - asked >= 20
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("kind", ["deaf", "silent", "drips"])
async def test_a_replica_that_does_not_go_on_holds_no_request(autojump_clock: MockClock, kind: str) -> None:
    """Though it answers every probe: its requests go on elsewhere, and end."""
    engine = DeafEngine() if kind == "deaf" else MisbehavingEngine(silent)
    async with (
        cluster(2, accept_timeout_s=5.0, request_stall_s=20.0) as group,
        joined(group, engine),
        trio.open_nursery() as nursery,
    ):
        if kind == "drips":
            nursery.start_soon(lambda: play(engine, interval_s=4.0))
        started_s = trio.current_time()
        outcomes = await load(group, 60)
        assert outcomes == {"length": 60}
        assert engine.asked > 0
        assert trio.current_time() - started_s <= (12 if kind == "deaf" else 47)
        nursery.cancel_scope.cancel()


async def test_a_request_that_nobody_answers_ends_all_the_same(autojump_clock: MockClock) -> None:
    deaf = [DeafEngine() for _ in range(3)]
    async with cluster(1, accept_timeout_s=5.0) as group, joined(group, *deaf):
        group["a"].kill()
        await trio.sleep(0.1)
        for fields, code, ended_s in [
            ({}, "model_error", 15.0),
            ({"timeout_ms": 2000}, "queue_timeout", 2.25),
            ({"queue_timeout_ms": 3000}, "queue_timeout", 3.25),
        ]:
            started_s = trio.current_time()
            with pytest.raises(RequestError) as refused:
                await group.pool.submit(request(**fields))  # type: ignore[arg-type]
            assert (refused.value.code, refused.value.retry_after_ms) == (code, None)
            assert trio.current_time() - started_s == pytest.approx(ended_s, abs=0.2)


async def test_a_cancel_ends_a_request_in_the_router_at_once(autojump_clock: MockClock) -> None:
    """Before a replica has answered, while one is silent, and while none is there."""
    async with cluster(1) as group, joined(group, DeafEngine(), MisbehavingEngine(silent)):
        group["a"].kill()
        await trio.sleep(0.1)
        listener = MemoryListener()
        server = Server(group.pool, ServerConfig(), addresses=[("127.0.0.1", 1)])
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run, [listener])
            async with open_client(await listener.connect(), "router", keepalive_s=None) as client:
                for _ in range(2):
                    async with client.generate("abcd") as stream:
                        await trio.sleep(1)
                        cancelled_s = trio.current_time()
                        client.cancel(stream.request.id)
                        events = [event async for event in stream]
                        assert isinstance(events[0], Accepted)
                        assert isinstance(events[-1], Finished)
                        assert events[-1].finish_reason == "cancelled"
                        assert trio.current_time() == cancelled_s
            assert group.where() == {"a": 0, "x": 0, "y": 0}
            nursery.cancel_scope.cancel()


async def test_a_replica_that_stops_its_requests_does_not_move_them_for_ever(autojump_clock: MockClock) -> None:
    engines = [MisbehavingEngine(shut_down) for _ in range(2)]
    async with cluster(1) as group, joined(group, *engines):
        group["a"].kill()
        await trio.sleep(0.1)
        for _ in range(10):
            reader = await (await submit(group.pool, request())).read()
            assert isinstance(reader.end, Finished)
            assert reader.end.finish_reason == "shutdown"
        assert sum(engine.asked for engine in engines) <= 80


async def test_a_request_goes_where_the_limits_take_it(autojump_clock: MockClock) -> None:
    async with cluster(3) as group:
        for name, length in ("a", 100), ("b", 4000):
            group[name].kill()
            group[name].config = replace(ENGINE, max_model_len=length)
            await group.start(name)
        await trio.sleep(6)
        await group.all_ready()
        assert group.pool.info.max_model_len == 8192
        for asked, home in [
            (request(prompt=None, token_ids=(97,) * 80, tokens=40), "b"),
            (request(prompt="a" * 90, tokens=20), "b"),  # whose tokens a router cannot count
            (request(prompt="a" * 3990, tokens=20), "c"),
            (request(prompt="a", tokens=5000), "c"),
        ]:
            for _ in range(3):
                reader = await submit(group.pool, asked)
                where = group.where()
                assert where[home] or (home == "b" and where["c"]), (home, where)
                assert sum(where.values()) == 1
                reader.stream.cancel()
                await reader.read()
        with pytest.raises(NeverFits, match="8192"):
            await group.pool.submit(request(prompt="a", tokens=9000))
        group["c"].kill()
        await trio.sleep(0.1)
        with pytest.raises(NeverFits, match="4000"):
            await group.pool.submit(request(prompt="a", tokens=5000))
